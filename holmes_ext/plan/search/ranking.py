"""The fastest candidates of a search simulated step by step (plan/simulate/step.py), ranked by that, and a certificate
that holds for it.

What was not simulated is bounded by Candidate.least_s (plan/search/bounds.py), which holds for every 1F1B step, so the
certificate compares the best simulated step with the least of all others' bounds. Steps of more than WORK passes are
not simulated.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from holmes_ext.plan.cost.memory import under_way
from holmes_ext.plan.search.result import Candidate, Certificate, Outcome
from holmes_ext.plan.search.space import Shape
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.simulate.step import Step, simulate

#: Candidates simulated at least (those that a table shows) and at most, each of another shape, and the passes (forward
#: and backward, of all stages) of all of them together.
SHOWN, COUNT = 10, 30
WORK = 60_000


def simulated(outcome: Outcome, candidate: Candidate) -> Step:
    """One step of `candidate`."""
    shape, ground = candidate.shape, outcome.ground
    two_level = "two-level" in candidate.reductions
    execution = Execution(
        virtual=shape.virtual,
        breadth_first=candidate.breadth_first,
        stage_layers=candidate.split if shape.virtual == 1 else (),
        overlap=outcome.reducing or ("on" if outcome.overlap else "off"),
        gather_overlap=outcome.gather_overlap,
        two_level="rings" if two_level else "off",
        zero=0 if two_level else shape.zero,  # scattered inside, all-reduced across, gathered inside: as two levels
    )
    nodes, sizes = candidate.arrangement.nodes(ground), shape.sizes(candidate.arrangement.order)
    costs, model = outcome.costs(candidate, sharded=False), shape.model(outcome.model)
    return simulate(ground.site, nodes, sizes, model, execution, ground.links, ground.only, costs)


def passes(candidate: Candidate, layers: int) -> int:
    """That a simulation of it walks through: under ZeRO 2 and 3 each layer's weights and gradients travel by
    themselves."""
    shape = candidate.shape
    return 2 * shape.micro_batches * shape.pipeline * shape.virtual * (layers if shape.zero > 1 else 1)


def timed(outcome: Outcome, candidate: Candidate) -> Candidate:
    """`candidate`, simulated unless that is too much work."""
    if passes(candidate, outcome.model.layers) > WORK:
        return candidate
    return replace(candidate, simulated_s=simulated(outcome, candidate).step_s)


def rank(outcome: Outcome, count: int = COUNT) -> Outcome:
    """`outcome` with its fastest shapes simulated: those first, by their simulated step, and a second certificate for
    it."""
    left, done, best = WORK, {}, inf
    seen: set[Shape] = set()
    for index, one in enumerate(outcome.candidates):
        if len(seen) == count or (len(seen) >= SHOWN and one.formula_s >= best):
            break  # the closed form seldom says more than the simulation
        work = passes(one, outcome.model.layers)
        if one.shape in seen or work > left:
            continue
        left -= work
        seen.add(one.shape)
        done[index] = replace(one, simulated_s=simulated(outcome, one).step_s)
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
        now = under_way(stage, shape.pipeline, shape.virtual, shape.micro_batches)
        sizes.append(used + pricing.memory(stage, layers).activations * (shape.micro_batches / now - 1))
    if any(used > limit for used, limit in zip(sizes, one.limit_bytes)):
        return None
    return replace(one, breadth_first=True, memory_bytes=tuple(sizes))
