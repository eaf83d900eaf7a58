"""Conversion between candidates of a search and plans or layouts of a job.

plan_of() turns a candidate of a search into the Plan that a job loads. layout_candidate() turns the
parallel sizes that the user gave into a candidate: unless the user says otherwise, the nodes are in
the order that the job would choose (plan/arrange/place.py), and every stage has the same number of
layers.
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
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.stock import causes, stock_like
from holmes_ext.planner.simulate.deadline import check_deadline
from holmes_ext.words import counted


def plan_of(result: SearchResult, candidate: Candidate, options: Options = Options()) -> Plan:
    """Return the Plan of a candidate: order of nodes, sizes, layers of the stages, networks of the groups.

    The ranks of the job read the Plan when it starts. The layers are left to the framework if every
    stage has the same number.

    Args:
        result: Search that found the candidate.
        candidate: Sizes, nodes and layers to use.
        options: Settings of the user for holmes.
    """
    network = result.network
    sizes = candidate.placement.sizes
    model = candidate.shape.model(result.model)
    is_even = len(set(candidate.split)) == 1
    plan = Plan(
        site_digest=network.site.digest,
        nodes=network.nodes(candidate.placement),
        processes=network.processes,
        processes_of=network.site.processes_of,
        sizes=sizes,
        stage_layers=() if is_even else candidate.split,
        partition="uniform" if is_even else "balanced",
        predicted=times(result, candidate),
        loads=result.costs(candidate).loads(candidate.split),
    )

    # With "auto", derive_traffic() writes a list of passes for each stage into the plan, with split
    # backward passes (zero bubble). With "1f1b" it writes none.
    options = replace(options, schedule="auto" if candidate.schedule else "1f1b")
    if not result.rules.hide_stage_links:
        # "off": the framework's own number of micro-batches in flight.
        options = replace(options, inflight="off")
    engine = result.engine
    if HIERARCHICAL in candidate.reductions:
        # derive_traffic() plans hierarchical all-reduces only for engines with hierarchical_zero
        # None; with other engines, holmes leaves the reduction to the framework. Here the
        # framework's own flags make it hierarchical, so the plan must have them all the same.
        engine = replace(engine, hierarchical_zero=None)
    workload = model.workload(sizes)

    # Adds the network of each communication group to the plan.
    return derive_traffic(
        plan, network.site, options, network.links, workload, model.source, engine
    )


def times(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Return the predicted times of a candidate, in seconds, by name.

    Returns:
        step_seconds, reduction_seconds                a step; its longest gradient reduction
        exposed_reduction_seconds                      part of the reductions that no pass hides
        stock_step_seconds, stock_reduction_seconds    the same job without holmes
    """
    stock, stock_candidate = stock_like(result, candidate)
    by_cause = causes(result, candidate)  # seconds of the step by cause, such as "compute"
    # {"step_seconds": ..., "reduction_seconds": ...}
    predicted = _step_and_reduction(result, candidate)
    exposed_s = by_cause["reduce_inside"] + by_cause["reduce_across"]
    predicted["exposed_reduction_seconds"] = exposed_s
    for name, seconds in _step_and_reduction(stock, stock_candidate).items():
        predicted[f"stock_{name}"] = seconds
    return predicted


def _step_and_reduction(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Return the seconds of a plan's step ("step_seconds") and reduction ("reduction_seconds").

    The reduction is that of the stage whose gradient reduction takes longest.
    """
    reduction_s = estimate(result.costs(candidate), candidate.split).reduction_s
    return {"step_seconds": candidate.step_s, "reduction_seconds": max(reduction_s)}


class _PricesInTime(Prices):
    """Prices whose step_s() raises TimeIsOver after the deadline of simulations_until().

    place() compares many orders of the nodes by step_s(), the step time in closed form. The check
    in step_s() ends this comparison in time.
    """

    def step_s(self, placement: Placement) -> float:
        """Return the step time in closed form, in seconds.

        Raises:
            TimeIsOver: The deadline has passed.
        """
        check_deadline(0)  # raises TimeIsOver
        return super().step_s(placement)


def layout_candidate(
    result: SearchResult,
    sizes: Sizes,
    shape: Shape,
    split: Sequence[int] = (),
    nodes: Sequence[str] = (),
    flat: bool = False,
) -> Candidate:
    """Return the candidate of a layout that the user gave.

    Args:
        result: Request of the search.
        sizes: Parallel sizes, with the data size, and with the order of the axes in the ranks.
        shape: The same parallel sizes, with micro-batches, recomputation and ZeRO stage.
        split: Layers of each stage; () for equally many on all stages.
        nodes: Names of the nodes in rank order; () for the job's own order.
        flat: The command line turns off the framework's hierarchical all-reduce (Candidate.flat).

    Raises:
        HolmesError: `split` is no split of the model's layers.
        TimeIsOver: The deadline of simulations_until() passed while orders of the nodes were priced.
    """
    layers = result.model.layers
    if split and (len(split) != shape.pipeline or sum(split) != layers or min(split) < 1):
        given = ",".join(map(str, split))
        needed = f"{counted(shape.pipeline, 'number')} above 0 whose sum is {layers}"
        raise HolmesError(f"layers of the stages {given}: they must be {needed}")
    if nodes:
        placement = result.network.placement(nodes, sizes)
    else:
        # A job without a plan file calls place() when it starts, to choose the order of its nodes.
        # Call it with the same inputs, so that it returns the same order: the job's workload, and
        # its rules, which do not count on overlapped reductions.
        workload = shape.model(result.model).workload(sizes)
        rules = replace(result.rules, overlap=False)
        if flat:
            rules = replace(rules, reductions=(FLAT,))
        job = RankModel.of_workload(workload, sizes)
        placement = place(_PricesInTime(result.network, job, rules), sizes)
    return result.candidate(shape, placement, split or uniform(layers, shape.pipeline), flat=flat)
