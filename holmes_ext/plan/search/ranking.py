"""The fastest candidates of a search simulated step by step (plan/simulate/step.py), ranked by that, and a certificate
that holds for it.

What was not simulated is bounded by Candidate.least_s (plan/search/bound/formula.py), which holds for every such step,
so the certificate compares the best simulated step with the least of all others' bounds. Steps of more than WORK passes
are not simulated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice, permutations
from math import inf

from holmes_ext.cluster.site import ETHERNET
from holmes_ext.plan.cost import memory as of_memory
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.cost.workload import StageLoad
from holmes_ext.plan.search.arrangement import Arrangement, Content, Ground
from holmes_ext.plan.search.bound.formula import Bounds
from holmes_ext.plan.search.result import EQUAL, Candidate, Certificate, Outcome
from holmes_ext.plan.search.space import Shape
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.simulate.fold import folded_s
from holmes_ext.plan.simulate.pipelines import Pipelines
from holmes_ext.plan.simulate.step import JobStep, Step
from holmes_ext.plan.spread import Stages, spread

#: Candidates simulated at least (those that a table shows) and at most, each of another shape, and the passes (forward
#: and backward, of all stages) of all of them together.
SHOWN, COUNT = 10, 30
WORK = 60_000
#: Passes that one counts as where the network between clusters is not flat, and those that a stage's (or chunk's)
#: reductions in two levels count as.
UNEVEN, TWO_LEVEL = 4, 1000
#: Times the best simulated step from which on a closed form is not simulated, for a table neither.
FAR = 1.5
#: Shapes whose nodes are spread over stages, and orders of stages looked at for each.
SPREAD, SPREAD_TRIES = 2, 1500


def execution_of(
    outcome: Outcome, shape: Shape, split: Sequence[int], reductions: Sequence[str], in_flight: Sequence[int] = (),
    breadth_first: bool = False,
) -> Execution:
    """How a candidate is simulated; reductions, in_flight (micro-batches under way): of its stages."""
    two_level = "two-level" in reductions
    return Execution(
        virtual=shape.virtual,
        breadth_first=breadth_first,
        stage_layers=tuple(split) if shape.virtual == 1 else (),
        in_flight=tuple(in_flight),
        overlap=outcome.reducing or ("on" if outcome.overlap else "off"),
        gather_overlap=outcome.gather_overlap,
        two_level="rings" if two_level else "off",
        zero=0 if two_level else shape.zero,  # scattered inside, all-reduced across, gathered inside: as two levels
    )


def job_of(outcome: Outcome, candidate: Candidate, hides: bool = True, replicas: str = "") -> JobStep:
    """One step of `candidate`, to be simulated; hides: as it is, or with the framework's own schedule; replicas: see
    Execution."""
    shape, ground = candidate.shape, outcome.ground
    costs, model = outcome.costs(candidate, sharded=False), shape.model(outcome.model)
    held = costs.in_flight(candidate.split) if hides and not candidate.breadth_first else ()
    execution = execution_of(outcome, shape, candidate.split, candidate.reductions, held, candidate.breadth_first)
    execution = replace(execution, replicas=replicas)
    nodes, sizes = candidate.arrangement.nodes(ground), shape.sizes(candidate.arrangement.order)
    pipelines = ground.remember(
        ("pipelines", nodes, sizes), lambda: Pipelines(ground.site, nodes, sizes.complete(ground.world), ground.only))
    return JobStep(ground.site, nodes, sizes, model, execution, ground.links, ground.only, costs, pipelines)


def simulated(outcome: Outcome, candidate: Candidate, hides: bool = True) -> Step:
    """One step of `candidate`; hides: as it is, or with the framework's own schedule."""
    return job_of(outcome, candidate, hides).step()


def passes(candidate: Candidate, layers: int) -> int:
    """That a simulation of it walks through: under ZeRO 2 and 3 each layer's weights and gradients travel by
    themselves."""
    shape = candidate.shape
    return 2 * shape.micro_batches * shape.pipeline * shape.virtual * (layers if shape.zero > 1 else 1)


def timed(outcome: Outcome, candidate: Candidate) -> Candidate:
    """`candidate` with its micro-batches under way and the memory that they take; simulated unless that is too much
    work."""
    large = passes(candidate, outcome.model.layers) > WORK
    step_s = candidate.simulated_s if large else folded_s(job_of(outcome, candidate))
    return under_way(outcome, replace(candidate, simulated_s=step_s))


def under_way(outcome: Outcome, candidate: Candidate) -> Candidate:
    """`candidate` with its micro-batches under way and the memory that they take."""
    costs, memory = outcome.costs(candidate), candidate.memory_bytes
    if held := costs.in_flight(candidate.split):
        memory = tuple(map(StageLoad.bytes_of, costs.loads(candidate.split), held))
    return replace(candidate, in_flight=held, memory_bytes=memory)


def step_without(outcome: Outcome, candidate: Candidate) -> float:
    """Seconds of its step with the framework's own pipeline schedule, simulated if the candidate is."""
    if candidate.simulated_s:
        return folded_s(job_of(outcome, candidate, hides=False))
    return estimate(replace(outcome.costs(candidate), hidden=None), candidate.split).step_s


def hybrid_s(outcome: Outcome, candidate: Candidate) -> float:
    """Seconds of its step with FSDP's shards inside clusters; 0 where they are not all over several equal clusters, or
    the candidate is not simulated."""
    if candidate.shape.zero < 3 or candidate.replicas < 2 or not candidate.simulated_s:
        return 0.0
    return folded_s(job_of(outcome, candidate, replicas="clusters"))


def rank(outcome: Outcome, count: int = COUNT) -> Outcome:
    """`outcome` with its fastest shapes simulated: those first, by their simulated step, and a second certificate for
    it."""
    left, done, best = WORK, {}, inf
    seen: set[Shape] = set()
    for index, one in enumerate(outcome.candidates):
        if len(seen) == count or one.formula_s >= (best if len(seen) >= SHOWN else FAR * best):
            break  # the closed form seldom says more than the simulation
        work = passes(one, outcome.model.layers) * (UNEVEN if outcome.ground.wan else 1)
        work += TWO_LEVEL * one.shape.pipeline * one.shape.virtual * ("two-level" in one.reductions)
        if one.shape in seen or work > left:
            continue
        left -= work
        seen.add(one.shape)
        done[index] = timed(outcome, one)
        best = min(best, done[index].simulated_s)
    if outcome.yours is not None:
        outcome = replace(outcome, yours=timed(outcome, outcome.yours))
    if not done:
        return outcome
    ranked = sorted(done.values(), key=lambda one: one.simulated_s)
    rest = [one for index, one in enumerate(outcome.candidates) if index not in done]
    least = min([outcome.left_s, *(one.least_s for one in rest)], default=inf)
    certificate = Certificate(ranked[0].simulated_s, min(least, ranked[0].simulated_s))
    return replace(outcome, candidates=[*ranked, *rest], simulated=certificate)


def with_breadth_first(outcome: Outcome) -> Outcome:
    """`outcome`, ranked, for a stack that has breadth-first order (arXiv 2211.05953): first the simulated candidate
    that it makes faster than the best one, if there is one. The certificate still speaks of 1F1B's orders."""
    piped = [one for one in outcome.candidates if one.simulated_s and one.shape.pipeline > 1]
    found = [_in_breadth_first(outcome, one) for one in piped]
    ahead = [replace(one, simulated_s=simulated(outcome, one).step_s) for one in found if one is not None]
    best = min(ahead, key=lambda one: one.simulated_s, default=None)
    if best is None or best.simulated_s >= outcome.best.step_s:
        return outcome
    return replace(outcome, candidates=[best, *outcome.candidates])


def _in_breadth_first(outcome: Outcome, one: Candidate) -> Candidate | None:
    """None where a stage has no memory for all micro-batches at once."""
    shape, pricing = one.shape, outcome.pricing(one.shape)
    sizes = []
    for stage, (layers, used) in enumerate(zip(one.split, one.memory_bytes)):
        now = of_memory.under_way(stage, shape.pipeline, shape.virtual, shape.micro_batches)
        now = one.in_flight[stage] if one.in_flight else now
        sizes.append(used + pricing.memory(stage, layers).activations * (shape.micro_batches / now - 1))
    if any(used > limit for used, limit in zip(sizes, one.limit_bytes)):
        return None
    return replace(one, breadth_first=True, in_flight=(), memory_bytes=tuple(sizes))


def with_spread(outcome: Outcome) -> Outcome:
    """`outcome`, ranked, where the network between clusters is not flat: of the fastest shapes also nodes spread over
    stages as plan/spread.py finds them by what crosses, simulated where the closed form has them ahead. The certificate
    speaks of whole clusters."""
    if not outcome.ground.wan or len(outcome.ground.ranks) < 2 or outcome.simulated is None:
        return outcome
    fastest: dict[tuple[int, int], Candidate] = {}
    for one in outcome.candidates:
        if one.simulated_s and one.shape.pipeline > 1 and one.shape.virtual == 1:
            fastest.setdefault((one.shape.pipeline, one.shape.tensor * one.shape.context), one)
    more = [_spread(outcome, one) for one in islice(fastest.values(), SPREAD)]
    known = {one.arrangement.contents for one in outcome.candidates}
    found = [timed(outcome, one) for one in more
             if one is not None and one.formula_s < outcome.best.step_s and one.arrangement.contents not in known]
    ranked = sorted([*found, *outcome.candidates], key=lambda one: one.simulated_s or inf)
    best = ranked[0].simulated_s
    return replace(outcome, candidates=ranked, simulated=Certificate(best, min(best, outcome.simulated.bound_s)))


def _spread(outcome: Outcome, one: Candidate) -> Candidate | None:
    """The shape and the split of `one` with its nodes spread; None where a stage does not hold whole nodes, or nothing
    was found that crosses faster."""
    ground, shape, pricing = outcome.ground, one.shape, outcome.pricing(one.shape)
    unit, size = max(ground.processes, shape.tensor * shape.context), ground.world // shape.pipeline
    if size % unit or any(ranks % unit for ranks in ground.ranks):
        return None
    sent = shape.micro_batches * pricing.block.activation_bytes * unit / shape.tensor
    reduced = shape.tensor * (0.5 if shape.zero else 1.0) * sum(
        layer * count for layer, count in zip(pricing.portion.reduced_bytes, (1, pricing.portion.blocks, 1)))
    seconds_of = _Crossing(ground, sent, reduced / shape.pipeline).seconds
    now = tuple(tuple(sorted(index for index, ranks in content for _ in range(ranks // unit)))
                for content in one.arrangement.contents)
    chain = tuple(dict.fromkeys(index for content in one.arrangement.contents for index, _ in content))
    units = [ranks // unit for ranks in ground.ranks]
    stages, seconds = spread(units, shape.pipeline, seconds_of, SPREAD_TRIES, chain)
    if seconds >= seconds_of(now) * (1 - EQUAL):
        return None
    arrangement = laid(stages, unit)
    fits = Bounds(pricing.costs(arrangement, outcome.overlap)).fits(one.split)
    return outcome.candidate(pricing, arrangement, one.split) if fits else None


class _Crossing:
    """What of a step passes the links between clusters, by the fullest of them: sent: bytes of a unit's activations
    (gradients come back the other way); reduced: of a stage's gradients, summed directly between its clusters."""

    def __init__(self, ground: Ground, sent: float, reduced: float):
        self.sent, self.reduced, every = 8 * sent, 8 * reduced, range(len(ground.ranks))
        names = ground.site.clusters
        self.rate = {(a, b): min((hop.rate_bps for hop in ground.wan.hops(names[a], names[b])), default=inf)
                     if ground.fabric((a, b)).name == ETHERNET else inf for a in every for b in every if a != b}

    def seconds(self, stages: Stages) -> float:
        pipeline: dict[tuple[int, int], float] = defaultdict(float)
        data: dict[tuple[int, int], float] = defaultdict(float)
        for stage in stages:
            if stage[0] != stage[-1]:
                clusters = set(stage)
                for pair in permutations(clusters, 2):
                    data[pair] += 2 / len(clusters)
        for one, two in zip(map(Counter, stages), map(Counter, stages[1:])):
            for a, b in zip((one - two).elements(), (two - one).elements()):
                pipeline[a, b] += 1
                pipeline[b, a] += 1
        parts = ((pipeline, self.sent), (data, self.reduced))
        return sum(max((bits * load / self.rate[pair] for pair, load in loads.items()), default=0.0)
                   for loads, bits in parts)


def laid(stages: Stages, unit: int) -> Arrangement:
    """Stages of units of `unit` ranks, each with its clusters in the order in which most of its ranks face one of their
    own cluster in the stage before."""
    contents: list[Content] = []
    before: list[int] = []
    for stage in stages:
        counts = Counter(stage)
        orders = islice(permutations(counts), 120)
        runs = [[index for index in order for _ in range(counts[index])] for order in orders]
        before = max(runs, key=lambda run: sum(a == b for a, b in zip(run, before)))  # noqa: B023
        contents.append(tuple((index, unit * counts[index]) for index, _ in groupby(before)))
    groups = tuple(tuple(index for index, _ in content) for content, _ in groupby(contents))
    return Arrangement(groups, tuple(contents))
