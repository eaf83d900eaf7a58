"""Candidates simulated step by step (planner/simulate)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holmes_ext.plan.cost.model import Memory, in_flight, stage_memory
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.workload import StageLoad
from holmes_ext.planner.schedule.solve import quickest
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.repeat import folded_s
from holmes_ext.planner.simulate.step import JobStep, Step

#: Passes (forward and backward, of all stages) up to which a step is simulated.
WORK = 60_000
#: Passes up to which they are listed, and candidates for which that is tried.
LISTED, PIPED = 4_000, 3


def execution_of(
    result: SearchResult,
    shape: Shape,
    split: Sequence[int],
    reductions: Sequence[str],
    in_flight: Sequence[int] = (),
    breadth_first: bool = False,
    listed: tuple[str, ...] = (),
) -> Execution:
    """How a candidate runs; reductions, in_flight, listed (passes): of its stages."""
    hierarchical = "hierarchical" in reductions
    return Execution(
        result.engine,
        virtual=shape.virtual,
        breadth_first=breadth_first,
        stage_layers=tuple(split) if shape.virtual == 1 else (),
        in_flight=tuple(in_flight),
        schedule=listed,
        overlap="off" if listed else result.overlap or ("on" if result.rules.overlap else "off"),
        gather_overlap=result.gather_overlap,
        hierarchical=hierarchical,
        direct=result.rules.direct,
        reductions=tuple(reductions),
        compress=result.rules.compress,
        # scattered inside, summed across, gathered inside: as a hierarchical all-reduce
        zero=0 if hierarchical and result.engine.scatters else shape.zero,
        replicas="clusters" if "hybrid" in reductions else "",
        prefetch=result.rules.prefetch,
        cut=result.rules.slices,
        tied=result.rules.tied,
        compression=result.rules.compression,
    )


def job_of(
    result: SearchResult,
    candidate: Candidate,
    hide_stage_links: bool = True,
    in_flight: Sequence[int] = (),
) -> JobStep:
    """hide_stage_links: False for the framework's own schedule; in_flight: instead of the plan's."""
    shape = candidate.shape
    costs, model = result.costs(candidate, sharded=False), shape.model(result.model)
    counts = tuple(in_flight)
    listed = candidate.schedule if hide_stage_links else ()
    if not counts and hide_stage_links and not candidate.breadth_first and not listed:
        counts = costs.in_flight(candidate.split)
    how = candidate.split, candidate.reductions, counts, candidate.breadth_first, listed
    run = execution_of(result, shape, *how)
    return JobStep(result.network, candidate.placement, model, run, costs)


def simulated(result: SearchResult, candidate: Candidate) -> Step:
    """One step of `candidate`, whole."""
    return job_of(result, candidate).step()


def passes(shape: Shape, layers: int) -> int:
    """Of a simulation; under ZeRO 2 and 3 each layer's weights and gradients travel by themselves."""
    messages = layers if shape.zero > 1 else 1
    return 2 * shape.micro_batches * shape.pipeline * shape.virtual * messages


def timed(result: SearchResult, candidate: Candidate) -> Candidate:
    """With its micro-batches in flight and their memory; simulated unless that is too much work."""
    seconds = candidate.simulated_s
    if passes(candidate.shape, result.model.layers) <= WORK:
        seconds = folded_s(job_of(result, candidate))
    return with_flight(result, replace(candidate, simulated_s=seconds))


def with_flight(result: SearchResult, candidate: Candidate) -> Candidate:
    """`candidate` with its micro-batches in flight and the memory that they take."""
    costs, memory = result.costs(candidate), candidate.memory_bytes
    if in_flight := costs.in_flight(candidate.split):
        memory = tuple(map(StageLoad.bytes_of, costs.loads(candidate.split), in_flight))
    return replace(candidate, in_flight=in_flight, memory_bytes=memory)


def step_without(result: SearchResult, candidate: Candidate) -> float:
    """Seconds of its step with the framework's own pipeline schedule, simulated if the candidate is."""
    if candidate.simulated_s:
        return folded_s(job_of(result, candidate, hide_stage_links=False))
    return estimate(replace(result.costs(candidate), hidden=None), candidate.split).step_s


def memory_of(result: SearchResult, candidate: Candidate, stage: int) -> Memory:
    """Of a rank of a stage, term by term."""
    shape, layers = candidate.shape, candidate.split[stage]
    prices = result.prices(shape)
    job, sizes = prices.job, candidate.placement.sizes
    layers_held = [job.block] * layers
    layers_held += [job.layers[0]] if stage == 0 else []
    layers_held += [job.layers[-1]] if stage == shape.pipeline - 1 else []
    shards, kept = sizes.data * sizes.context // shape.replicas, _kept(candidate, stage)
    experts = max(1, shards // sizes.expert)
    return stage_memory(
        result.model, layers_held, shape.zero, shards, experts, kept, job.working_bytes
    )


def _kept(candidate: Candidate, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at most."""
    if candidate.in_flight:
        return candidate.in_flight[stage]
    shape = candidate.shape
    return in_flight(stage, shape.pipeline, shape.virtual, shape.micro_batches)


def with_passes(result: SearchResult) -> SearchResult:
    """Listed passes first, where these make a candidate faster than the best. (The optimality gap is of
    1F1B.)"""
    piped = [
        candidate
        for candidate in result.candidates
        if candidate.simulated_s and not candidate.breadth_first
    ]
    return _with_faster(result, (in_passes(result, candidate) for candidate in piped[:PIPED]))


def _with_faster(result: SearchResult, others: Iterable[Candidate | None]) -> SearchResult:
    """With the fastest of them first, if it is faster than the best."""
    best = min(filter(None, others), key=lambda candidate: candidate.simulated_s, default=None)
    if best is None or best.simulated_s >= result.best.step_s:
        return result
    return replace(result, candidates=[best, *result.candidates])


def in_passes(result: SearchResult, candidate: Candidate) -> Candidate | None:
    """None where no list of passes makes it faster, or would be too much work to find."""
    shape, work = candidate.shape, passes(candidate.shape, result.model.layers)
    if shape.pipeline == 1 or shape.virtual > 1 or shape.zero > 1 or work > LISTED:
        return None
    costs = result.costs(candidate)
    loads, stage_links = costs.loads(candidate.split), costs.stage_links_s(candidate.split)
    pass_order = quickest(
        loads,
        stage_links,
        costs.hidden or stage_links,
        shape.micro_batches,
        not result.rules.direct,
    )
    if pass_order is None:
        return None
    memory = tuple(map(StageLoad.bytes_of, loads, pass_order.in_flight))
    listed = replace(candidate, schedule=pass_order.texts, in_flight=(), memory_bytes=memory)
    listed = replace(listed, simulated_s=folded_s(job_of(result, listed)))
    return listed if listed.simulated_s < candidate.step_s else None


def with_breadth_first(result: SearchResult) -> SearchResult:
    """The same in breadth-first order (arXiv 2211.05953), for a stack that has it."""
    piped = [
        candidate
        for candidate in result.candidates
        if candidate.simulated_s and candidate.shape.pipeline > 1
    ]
    return _with_faster(result, (_in_breadth_first(result, candidate) for candidate in piped))


def _in_breadth_first(result: SearchResult, candidate: Candidate) -> Candidate | None:
    """None where a stage has no memory for all micro-batches at once."""
    shape, sizes = candidate.shape, []
    for stage, used in enumerate(candidate.memory_bytes):
        terms = memory_of(result, candidate, stage)
        sizes.append(used + terms.activations * (shape.micro_batches / _kept(candidate, stage) - 1))
    whole = replace(candidate, breadth_first=True, in_flight=(), memory_bytes=tuple(sizes))
    return replace(whole, simulated_s=simulated(result, whole).step_s) if whole.fits else None
