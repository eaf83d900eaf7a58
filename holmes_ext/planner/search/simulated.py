"""Simulated step times of the search's candidates, and variants of their pipeline schedules.

Variants are other orders of the forward and backward passes: breadth-first, or an order that is
optimized for the plan and then written out ("listed"). Under 1F1B a plan may also start more
micro-batches before the first backward pass than the framework does (the warm-up depth). That hides
slow links between stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from holmes_ext.plan.cost.model import Memory, in_flight, stage_memory
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.workload import StageLoad
from holmes_ext.planner.schedule.solve import quickest
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.simulate.deadline import TimeIsOver, check_deadline
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.repeat import folded_s
from holmes_ext.planner.simulate.step import JobStep, Step

#: Most passes (forward and backward, of all stages) of a step that is simulated.
MAX_PASSES = 60_000
#: Most passes for which a pass order is searched, and most candidates for which it is tried.
MAX_SOLVED_PASSES = 4_000
MAX_SOLVED = 3


def execution_of(
    result: SearchResult,
    shape: Shape,
    split: Sequence[int],
    reductions: Sequence[str],
    in_flight: Sequence[int] = (),
    breadth_first: bool = False,
    listed: tuple[str, ...] = (),
) -> Execution:
    """Return the settings with which the simulation runs a candidate, as an Execution.

    These are the order of the passes (schedule), whether gradients are reduced during the backward
    pass (overlap), the reductions of the stages, and compression.

    Args:
        result: Request or result of the search: the engine (framework), and rules for communication.
        shape: The candidate's parallel sizes, batch sizes, recomputation and ZeRO stage.
        split: Layers of each stage.
        reductions: Name of each stage's gradient reduction: "flat", "hierarchical" or "hybrid".
        in_flight: Warm-up depth of each stage; () for the framework's own schedule.
        breadth_first: Pass all micro-batches through a chunk before the next chunk.
        listed: Pass order of each stage, written out; () for 1F1B.
    """
    is_hierarchical = "hierarchical" in reductions
    if listed:
        overlap = "off"  # a listed order has no overlapped reductions
    elif result.overlap:
        overlap = result.overlap
    else:
        overlap = "on" if result.rules.overlap else "off"

    # ZeRO 1 of most engines reduce-scatters gradients and then all-gathers weights (`scatters`). With a
    # hierarchical reduction, it reduce-scatters inside each cluster, all-reduces across clusters, and
    # all-gathers inside each cluster. A hierarchical all-reduce has the same steps, so the simulation
    # runs that, and no ZeRO besides.
    replaces_zero = is_hierarchical and result.engine.scatters
    zero = 0 if replaces_zero else shape.traffic_zero(result.model)
    return Execution(
        result.engine,
        virtual=shape.virtual,
        breadth_first=breadth_first,
        stage_layers=tuple(split) if shape.virtual == 1 else (),
        in_flight=tuple(in_flight),
        schedule=listed,
        overlap=overlap,
        gather_overlap=result.gather_overlap,
        hierarchical=is_hierarchical,
        direct=result.rules.direct,  # gloo's exchanges inside clusters, not NCCL's rings
        reductions=tuple(reductions),
        compress=result.rules.compress,
        zero=zero,
        replicas="clusters" if "hybrid" in reductions else "",
        prefetch=result.rules.prefetch,
        cut=result.rules.slices,  # tensor parallel ranks share out messages between clusters
        tied=result.rules.tied,  # tied embeddings may be all-reduced hierarchically
        compression=result.rules.compression,
    )


def job_of(
    result: SearchResult,
    candidate: Candidate,
    hide_stage_links: bool = True,
    in_flight: Sequence[int] = (),
) -> JobStep:
    """Prepare the simulation of a step of a candidate. JobStep.step() of the result runs it.

    The simulated pipeline schedule is the candidate's or the framework's. The candidate's schedule
    may hide the links between stages: the stages begin more micro-batches before their first
    backward pass, and compute these while messages travel. The first rule that applies decides:

        in_flight is given                     these warm-up depths
        hide_stage_links is False              the framework's own schedule
        the candidate has an order of passes   this order: breadth-first, or listed for each stage
        else                                   the warm-up depths that hide the links

    The framework's own schedule of a breadth-first candidate is breadth-first, too.

    Args:
        result: The search, with the network, the model and the rules.
        candidate: The plan.
        hide_stage_links: Whether to simulate the candidate's schedule; it may hide the links between
            stages. False: the framework's own schedule, which does not hide them.
        in_flight: Warm-up depth of each stage, instead of the candidate's; () for the candidate's.

    Raises:
        TimeIsOver: The deadline of simulations_until() has passed.
    """
    check_deadline(0)  # preparing a simulation takes long, too
    shape = candidate.shape
    costs = result.costs(candidate, sharded=False)  # the simulation adds ZeRO's collectives itself
    warm_up = tuple(in_flight)
    listed = candidate.schedule if hide_stage_links else ()  # written order of passes, or empty
    has_own_order = candidate.breadth_first or listed
    if not warm_up and hide_stage_links and not has_own_order:
        warm_up = costs.in_flight(candidate.split)
    run = execution_of(
        result,
        shape,
        candidate.split,
        candidate.reductions,
        in_flight=warm_up,
        breadth_first=candidate.breadth_first,
        listed=listed,
    )
    return JobStep(result.network, candidate.placement, shape.model(result.model), run, costs)


def simulated(result: SearchResult, candidate: Candidate) -> Step:
    """Simulate a step of a candidate, and return the spans of its ranks (what each does when)."""
    return job_of(result, candidate).step()


def passes(shape: Shape, layers: int) -> int:
    """Return the number of passes that a simulated step has, as a measure of its work.

    With ZeRO 2 and 3 each layer counts, because its weights and gradients are sent separately.
    """
    messages = layers if shape.zero > 1 else 1
    return 2 * shape.micro_batches * shape.pipeline * shape.virtual * messages


def timed(result: SearchResult, candidate: Candidate) -> Candidate:
    """Simulate a candidate, and return it with the simulated step, its warm-up depths and memory.

    A candidate of more than MAX_PASSES passes is not simulated.
    """
    seconds = candidate.simulated_s
    if passes(candidate.shape, result.model.layers) <= MAX_PASSES:
        seconds = folded_s(job_of(result, candidate))
    return with_flight(result, replace(candidate, simulated_s=seconds))


def with_flight(result: SearchResult, candidate: Candidate) -> Candidate:
    """Return a candidate with its warm-up depths and the memory that these need."""
    costs = result.costs(candidate)
    memory_bytes = candidate.memory_bytes
    warm_up = costs.in_flight(candidate.split)
    if warm_up:  # () under the framework's own schedule
        memory_bytes = tuple(map(StageLoad.bytes_of, costs.loads(candidate.split), warm_up))
    return replace(candidate, in_flight=warm_up, memory_bytes=memory_bytes)


def framework_schedule_s(result: SearchResult, candidate: Candidate) -> float:
    """Return the step time of a candidate under the framework's pipeline schedule, in seconds.

    A candidate may have a schedule of its own: it begins more micro-batches early than the framework
    does, or has a written order of passes. The difference from its step time is what this gains.

    The result is simulated if the candidate's own step time is. Otherwise it comes from the closed
    form, a formula for the step time (estimate()). The same formula is used if the simulation does
    not end before the deadline that the caller has set with simulations_until().
    """
    if candidate.simulated_s:
        with suppress(TimeIsOver):
            # folded_s(): simulates a step, and returns its duration in seconds.
            # hide_stage_links=False: the framework's schedule
            return result.remember(
                "framework's schedule",
                candidate,
                lambda: folded_s(job_of(result, candidate, hide_stage_links=False)),
            )
    # link_load_s=None: sends between stages block as in the framework.
    framework_costs = replace(result.costs(candidate), link_load_s=None)
    return estimate(framework_costs, candidate.split).step_s


def memory_of(result: SearchResult, candidate: Candidate, stage: int) -> Memory:
    """Return the memory of a rank on a pipeline stage, by purpose: weights, activations, ...

    Args:
        result: The job, with the model.
        candidate: The plan, with the layers of each stage.
        stage: Number of the stage, from 0.
    """
    shape = candidate.shape
    # The layers as a rank has them: tensor parallelism has divided them already.
    rank_model = result.prices(shape).job
    sizes = candidate.placement.sizes
    layers_held = [rank_model.block] * candidate.split[stage]
    if stage == 0:
        layers_held.append(rank_model.layers[0])  # embedding
    if stage == shape.pipeline - 1:
        layers_held.append(rank_model.layers[-1])  # output layer

    # Ranks among which ZeRO divides the state. With hybrid sharding (replicas > 1), these are the ranks
    # of a single copy of the sharded weights.
    shards = sizes.data * sizes.context // shape.replicas
    expert_shards = max(1, shards // sizes.expert)
    kept_micro_batches = _kept_micro_batches(candidate, stage)
    return stage_memory(
        result.model,
        layers_held,
        mode=shape.mode,
        shards=shards,
        expert_shards=expert_shards,
        in_flight=kept_micro_batches,
        working=rank_model.working_bytes,
    )


def _kept_micro_batches(candidate: Candidate, stage: int) -> float:
    """Return the most micro-batches whose activations a stage holds at the same time."""
    if candidate.in_flight:
        return candidate.in_flight[stage]
    shape = candidate.shape
    return in_flight(stage, shape.pipeline, shape.virtual, shape.micro_batches)


def with_passes(result: SearchResult, end: float = inf) -> SearchResult:
    """Return the result with a better order of passes for its fastest plans, if that is faster.

    in_passes() searches for the best order of the forward and backward passes on each stage of a plan.
    Only the MAX_SOLVED fastest simulated candidates are tried. If any of them beats the best plan
    in its new order, it becomes the first candidate. The optimality gap stays that of 1F1B
    schedules.

    Args:
        result: The search, with simulated plans.
        end: Moment of time.monotonic() after which no further candidate is tried.
    """
    simulated_plans = [
        candidate
        for candidate in result.candidates
        if candidate.simulated_s and not candidate.breadth_first
    ]
    variants = (
        in_passes(result, candidate)
        for candidate in simulated_plans[:MAX_SOLVED]
        if time.monotonic() < end
    )
    return _with_fastest(result, variants)


def _with_fastest(result: SearchResult, variants: Iterable[Candidate | None]) -> SearchResult:
    """Return the result with the fastest variant first, if it beats the best candidate."""
    # None: no variant of the candidate is possible.
    best = min(filter(None, variants), key=lambda candidate: candidate.simulated_s, default=None)
    if best is None or best.simulated_s >= result.best.step_s:
        return result
    return replace(result, candidates=[best, *result.candidates])


def in_passes(result: SearchResult, candidate: Candidate) -> Candidate | None:
    """Return a candidate with an optimized order of passes on each stage.

    Returns:
        None if no order makes the candidate faster, if the search for it would take too long, or if
        the candidate has no pipeline, an interleaved one, or ZeRO 2 or 3.
    """
    shape = candidate.shape
    step_passes = passes(shape, result.model.layers)
    has_plain_pipeline = shape.pipeline > 1 and shape.virtual == 1
    if not has_plain_pipeline or shape.zero > 1 or step_passes > MAX_SOLVED_PASSES:
        return None
    costs = result.costs(candidate)
    loads = costs.loads(candidate.split)  # of each stage: pass times and memory
    stage_links_s = costs.stage_links_s(candidate.split)

    # Seconds for which a message's bytes occupy the link; the others are latency. Without such a
    # distinction the link is occupied all the time.
    occupied_links_s = costs.link_load_s or stage_links_s

    # NCCL needs a common order of a link's messages. gloo's direct exchanges do not.
    needs_message_order = not result.rules.direct
    pass_order = quickest(
        loads, stage_links_s, occupied_links_s, shape.micro_batches, needs_message_order
    )
    if pass_order is None:
        return None
    memory_bytes = tuple(map(StageLoad.bytes_of, loads, pass_order.in_flight))
    listed = replace(candidate, schedule=pass_order.texts, in_flight=(), memory_bytes=memory_bytes)
    timed_listed = replace(listed, simulated_s=folded_s(job_of(result, listed)))
    return timed_listed if timed_listed.simulated_s < candidate.step_s else None


def with_breadth_first(result: SearchResult) -> SearchResult:
    """Return the result with a candidate in breadth-first order first, if it beats the best.

    Breadth-first pipeline parallelism (arXiv 2211.05953) passes all micro-batches through a chunk
    before the next chunk. The framework must support it.
    """
    pipelines = [
        candidate
        for candidate in result.candidates
        if candidate.simulated_s and candidate.shape.pipeline > 1
    ]
    return _with_fastest(result, (_in_breadth_first(result, candidate) for candidate in pipelines))


def _in_breadth_first(result: SearchResult, candidate: Candidate) -> Candidate | None:
    """Return the plan with another order of passes, simulated; None if it does not fit the memory.

    In the new order a stage passes all micro-batches of the step through a chunk of its layers
    before its next chunk (breadth-first). So it holds the activations of all micro-batches at once.
    """
    shape = candidate.shape
    memory_bytes = []
    for stage, used_bytes in enumerate(candidate.memory_bytes):
        activation_bytes = memory_of(result, candidate, stage).activations
        # All micro-batches of a step are held at once, instead of those that 1F1B has in flight.
        growth = shape.micro_batches / _kept_micro_batches(candidate, stage) - 1
        memory_bytes.append(used_bytes + activation_bytes * growth)
    variant = replace(candidate, breadth_first=True, in_flight=(), memory_bytes=tuple(memory_bytes))
    if not variant.fits:
        return None
    return replace(variant, simulated_s=simulated(result, variant).step_s)
