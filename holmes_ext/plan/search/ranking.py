"""The fastest candidates of a search simulated step by step (plan/simulate/step.py), ranked by that, and a certificate that holds for it.

What was not simulated is bounded by Candidate.least_s (plan/search/bounds.py), which holds for every 1F1B step, so the certificate compares the
winner's simulated step with the least of all others' bounds. Steps of more than WORK passes are not simulated.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from holmes_ext.plan.search.refine import costs_of
from holmes_ext.plan.search.result import Candidate, Certificate, Outcome
from holmes_ext.plan.simulate.step import Options, Step, simulate

#: Candidates simulated at most, each of another shape, and the passes (forward and backward, of all stages) of all of them together.
COUNT = 30
WORK = 60_000


def simulated(outcome: Outcome, candidate: Candidate) -> Step:
    """One step of `candidate`."""
    shape, stages = candidate.shape, outcome.stages(candidate)
    sizes = shape.sizes(candidate.arrangement.order)
    layers, two_level = candidate.split, "two-level" in candidate.reductions
    if shape.virtual > 1:
        layers = (candidate.split[0] // shape.virtual,) * (shape.pipeline * shape.virtual)
    options = Options(
        schedule="interleaved" if shape.virtual > 1 else "1f1b",
        virtual=shape.virtual,
        stage_layers=layers,
        overlap="on" if outcome.overlap else "off",
        two_level=two_level,
        zero=0 if two_level else shape.zero,  # scattered inside, all-reduced across, gathered inside: a two-level all-reduce
    )
    nodes = candidate.arrangement.nodes(outcome.ground)
    ground = outcome.ground
    return simulate(ground.site, nodes, sizes, shape.model(outcome.model), options, ground.links, costs=costs_of(stages))


def rank(outcome: Outcome, count: int = COUNT) -> Outcome:
    """`outcome` with its fastest shapes simulated: those first, by their simulated step, and a second certificate for it."""
    left, seen, done, best = WORK, set(), {}, inf
    for index, one in enumerate(outcome.candidates):
        passes = 2 * one.shape.micro_batches * one.shape.pipeline * one.shape.virtual
        passes *= outcome.model.layers if one.shape.zero > 1 else 1  # each layer's weights and gradients travel by themselves
        if len(seen) == count or one.step_s >= best:  # the closed form seldom says more than the simulation
            break
        if one.shape in seen or passes > left:
            continue
        left -= passes
        seen.add(one.shape)
        done[index] = replace(one, simulated_s=simulated(outcome, one).step_s)
        best = min(best, done[index].simulated_s)
    if not done:
        return outcome
    ranked = sorted(done.values(), key=lambda one: one.simulated_s)
    rest = [one for index, one in enumerate(outcome.candidates) if index not in done]
    least = min([outcome.left_s, *(one.least_s for one in rest)], default=inf)
    certificate = Certificate(ranked[0].simulated_s, min(least, ranked[0].simulated_s))
    return replace(outcome, candidates=[*ranked, *rest], simulated=certificate)
