"""A candidate of a search as a Plan, and a layout that the user has as a candidate.

That layout's nodes stand as the job would order them (plan/arrange/place.py), its layers as the framework
splits them, unless the user says otherwise: what `--holmes` alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.arrange.place import place
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel, estimate
from holmes_ext.plan.decide import derive_traffic
from holmes_ext.plan.engine import FLAT, HIERARCHICAL
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.stock import causes, stock_like


def plan_of(result: SearchResult, candidate: Candidate, options: Options = Options()) -> Plan:
    """Its node order and sizes, and its layers unless every stage has the same number."""
    network, shape, sizes = result.network, candidate.shape, candidate.placement.sizes
    model = shape.model(result.model)
    even = len(set(candidate.split)) == 1
    plan = Plan(
        site_digest=network.site.digest,
        nodes=network.nodes(candidate.placement),
        processes=network.processes,
        sizes=sizes,
        stage_layers=() if even else candidate.split,
        partition="uniform" if even else "balanced",
        predicted=times(result, candidate),
        loads=result.costs(candidate).loads(candidate.split),
    )
    options = replace(options, schedule="auto" if candidate.schedule else "1f1b")
    if not result.rules.hide_stage_links:
        options = replace(options, inflight="off")
    engine = result.engine
    if HIERARCHICAL in candidate.reductions:  # its flags will say so
        engine = replace(engine, hierarchical_zero=None)
    return derive_traffic(
        plan, network.site, options, network.links, model.workload(sizes), model.source, engine
    )


def times(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Plan.predicted of `candidate`, in seconds; see plan/build.py."""
    stock, exposed = _times(*stock_like(result, candidate)), causes(result, candidate)
    return {
        **_times(result, candidate),
        "exposed_reduction_seconds": exposed["reduce_inside"] + exposed["reduce_across"],
        **{f"stock_{name}": value for name, value in stock.items()},
    }


def _times(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    whole = estimate(result.costs(candidate), candidate.split).reduction_s
    return {"step_seconds": candidate.step_s, "reduction_seconds": max(whole)}


def given(
    result: SearchResult,
    sizes: Sizes,
    shape: Shape,
    split: Sequence[int] = (),
    nodes: Sequence[str] = (),
    flat: bool = False,
) -> Candidate:
    """Of `shape` and complete `sizes`. split: layers of the stages (default: even); nodes: their order
    (default: the job's); flat: see Candidate. HolmesError: the split is none of the model's layers."""
    layers = result.model.layers
    if split and (len(split) != shape.pipeline or sum(split) != layers or min(split) < 1):
        said = ",".join(map(str, split))
        needs = f"{shape.pipeline} numbers above 0 whose sum is {layers}"
        raise HolmesError(f"layers of the stages {said}: they must be {needs}")
    if nodes:
        placement = result.network.placement(nodes, sizes)
    else:
        work = shape.model(result.model).workload(sizes)
        rules = replace(result.rules, overlap=False)
        if flat:
            rules = replace(rules, reductions=(FLAT,))
        prices = Prices(result.network, RankModel.of_workload(work, sizes), rules)
        placement = place(prices, sizes)
    return result.candidate(shape, placement, split or uniform(layers, shape.pipeline), flat)
