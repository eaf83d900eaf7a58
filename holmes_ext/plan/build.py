"""The Plan of a job: placement, the decisions that follow from it, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import clusters_of_stages, costs_on_site, step_seconds, stock_fabric
from holmes_ext.plan.cost.pipeline import Estimate, uniform
from holmes_ext.plan.cost.stages import StageCosts, predict
from holmes_ext.plan.cost.workload import StageLoad, Workload
from holmes_ext.plan.decide import settle
from holmes_ext.plan.in_flight import asked_in_flight
from holmes_ext.plan.place_old import place
from holmes_ext.plan.plan import NOMINAL, Plan
from holmes_ext.plan.profile import Profile, check_profile, measured_costs
from holmes_ext.plan.search import partition as stages
from holmes_ext.plan.sizes import Sizes


def build_plan(
    site: Site,
    sizes: Sizes | None = None,
    workload: Workload | None = None,
    partition: str = "uniform",
    model: Model | None = None,
    alpha: float = 1.0,
    overlap: bool = False,
    stage_layers: Sequence[int] = (),
    profile: Profile | None = None,
    links: Links = Links(),
    options: Options = Options(),
    basis: str = "",
) -> Plan:
    """The plan for a job of `sizes` on `site`; with sizes None only the order of the nodes, and what follows for the
    group of all ranks.

    partition: how layers go to stages (plan/search/partition.py), of `model`; "uniform" leaves them to the framework.
    alpha: of "speed"; overlap: gradients are reduced under the last backward. stage_layers: the layers of each stage,
    as the user lists them. links: what was measured of the networks; times and the choice among them follow it.
    options: what the user asked of reductions (overlap, bucket, compress) and edges (inflight). basis: where `workload`
    comes from.

    predicted, in seconds for each step: step_seconds, reduction_seconds (of the slowest stage),
    exposed_reduction_seconds (after the first stage's last backward), and the first two with the prefix stock_ for the
    launcher's order with all traffic on stock_fabric(site). With a model the times are its own, with a profile those
    measured (and a model's memory, where both are given). HolmesError when the sizes do not multiply to the world size,
    or the partition cannot be made.
    """
    if profile is not None:
        check_profile(profile, site, sizes, model)
        sizes, workload, basis = sizes or profile.sizes, profile.workload(), "measured"
    if stage_layers or partition != "uniform":
        _check(partition, sizes, model or profile, stage_layers)
    sizes = sizes.complete(site.world_size, site.processes) if sizes is not None else None
    if workload is None and model is not None and sizes is not None:
        workload, basis = model.workload(sizes), model.source
    measured = links.site(site)
    placement = place(measured, sizes, workload)
    launched = [node.name for node in site.nodes]
    predicted: dict[str, float] = {}
    loads: tuple[StageLoad, ...] = ()
    if sizes is not None and placement.predicted is not None:
        stock = step_seconds(measured, launched, sizes, workload, only=stock_fabric(measured))
        predicted = {
            "step_seconds": placement.predicted.step_s,
            "reduction_seconds": max(placement.predicted.reduction_s),
            "exposed_reduction_seconds": placement.predicted.waited_s,
            "stock_step_seconds": stock.step_s,
            "stock_reduction_seconds": max(stock.reduction_s),
        }
    if stage_layers:
        partition = "explicit"
    elif (model is not None or profile is not None) and sizes is not None:
        costs = costs_of(measured, placement.nodes, sizes, model, overlap, profile, options.inflight != "off")
        split = stages.partition(partition, costs, alpha)
        loads = costs.loads(split)
        predicted |= _times(predict(costs, split, asked_in_flight(options, sizes.pipeline, costs.micro_batches)))
        if profile is None and model is not None:
            by_stage = costs_on_site(measured, launched, sizes, model, only=stock_fabric(measured))
            times = _times(predict(by_stage, uniform(costs.blocks, costs.stages)))
            predicted |= {key: value for name, value in times.items() if (key := f"stock_{name}") in predicted}
        stage_layers = split if partition != "uniform" else ()
    plan = Plan(
        site_digest=site.digest,
        nodes=placement.nodes,
        processes=site.processes,
        sizes=sizes,
        straddling=placement.straddling,
        stage_layers=tuple(stage_layers),
        loads=loads,
        partition=partition,
        predicted=predicted,
    )
    return settle(plan, site, options, links, workload, basis or (NOMINAL if workload is None else "given"))


def costs_of(
    site: Site, nodes: Sequence[str], sizes: Sizes, model: Model | None, overlap: bool, profile: Profile | None,
    hides: bool = True,
) -> StageCosts:
    """Of `model`, or as measured (one is given); the memory always comes from the model. hides: as many micro-batches
    are under way as hide the pipeline's edges."""
    if profile is None:
        assert model is not None
        return costs_on_site(site, nodes, sizes, model, overlap, hides=hides)
    costs = measured_costs(profile, clusters_of_stages(site, nodes, sizes), overlap)
    costs = costs if hides else replace(costs, hidden=None)
    if model is None:
        return costs
    memory = costs_on_site(site, nodes, sizes, model, overlap)
    state, kept = (tuple(memory.by_layer(row)) for row in (memory.state_bytes, memory.kept_bytes))
    limits, working = memory.limit_bytes, memory.working_bytes
    return replace(costs, state_bytes=state, kept_bytes=kept, limit_bytes=limits, working_bytes=working)


def _check(partition: str, sizes: Sizes | None, model: Model | Profile | None, stage_layers: Sequence[int]) -> None:
    """What a partition that is not the framework's needs."""
    if partition not in stages.METHODS:
        raise HolmesError(f"partition {partition!r} is not one of {', '.join(stages.METHODS)}")
    what = f"layers {','.join(map(str, stage_layers))}" if stage_layers else f"partition {partition!r}"
    if sizes is None:
        raise HolmesError(f"{what}: the number of stages is not known; give --holmes-sizes pipeline=N")
    if stage_layers and (len(stage_layers) != sizes.pipeline or min(stage_layers) < 1):
        count = f"{len(stage_layers)} numbers for {sizes.pipeline} pipeline stages"
        raise HolmesError(f"{what}: {count}; give each stage one, 1 or more")
    if not stage_layers and model is None:
        raise HolmesError(f"{what} needs to know the model: give --holmes-model FILE (examples/models has some)")


def _times(outcome: Estimate) -> dict[str, float]:
    return {
        "step_seconds": outcome.step_s,
        "reduction_seconds": max(outcome.reduction_s),
        "exposed_reduction_seconds": outcome.waited_s,
    }
