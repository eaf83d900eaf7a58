"""What the same job takes without holmes, and where the seconds of a step go."""

from __future__ import annotations

from dataclasses import replace

from holmes_ext.plan.cost.stages import estimate
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import job_of, simulated, timed
from holmes_ext.planner.simulate.repeat import folded_s

#: Shapes for which stock is simulated to find those that suit it best.
STOCKS = 3
CAUSES = {
    "compute": "computing",
    "collectives": "tensor, context and expert collectives",
    "optimizer": "optimizer",
    "bubble": "waiting for other stages",
    "send_inside": "sends between stages inside clusters",
    "send_across": "sends between stages across clusters",
    "reduce_inside": "exposed reductions and gathers inside clusters",
    "reduce_across": "exposed reductions and gathers across clusters",
}


def causes(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Seconds of CAUSES, the mean over all ranks; their sum is the step, the simulated one if there is
    one."""
    placement, seconds = candidate.placement, dict.fromkeys(CAUSES, 0.0)
    contents = placement.stages
    if candidate.simulated_s:
        seconds |= simulated(result, candidate).causes
    else:
        step = estimate(result.costs(candidate), candidate.split)
        seconds["compute"] = sum(step.compute_s) / len(contents)
        seconds["bubble"] = sum(step.idle_s) / len(contents)
        for content, exposed in zip(contents, step.exposed_s):
            cause = "reduce_across" if len(content) > 1 else "reduce_inside"
            seconds[cause] += exposed / len(contents)
    collectives = candidate.shape.micro_batches * _collectives_s(result, candidate) / len(contents)
    return seconds | {"collectives": collectives, "compute": seconds["compute"] - collectives}


def _collectives_s(result: SearchResult, candidate: Candidate) -> float:
    """Of a micro-batch, in all stages."""
    prices, total = result.prices(candidate.shape), 0.0
    for stage, layers in enumerate(candidate.split):
        fold, (place,) = prices.fold(candidate.placement, stage)
        total += layers * prices.collective_s(fold, place)
    return total


def stock_like(result: SearchResult, candidate: Candidate) -> tuple[SearchResult, Candidate]:
    """Stock with the candidate's sizes (and the user's layers and order), simulated if that is."""
    split = candidate.split if candidate.placement.names else ()
    stock, same_sizes = result.stock(candidate.shape, split, candidate.placement.sizes.order)
    if candidate.simulated_s:
        same_sizes = replace(same_sizes, simulated_s=folded_s(job_of(stock, same_sizes)))
    return stock, same_sizes


def best_stock(result: SearchResult) -> Candidate | None:
    """Stock with the sizes that suit it best of those that were worked out and fit; simulated ones, if the
    best is, of the few that are first in closed form."""
    user_layout = result.user_layout
    asked = [*result.candidates, *([user_layout] if user_layout else [])]
    every = [
        result.stock(shape)[1] for shape in dict.fromkeys(candidate.shape for candidate in asked)
    ]
    fitting = [candidate for candidate in every if candidate.fits]
    ranked = sorted(fitting, key=lambda candidate: candidate.formula_s)
    if not result.best.simulated_s:
        return next(iter(ranked), None)
    first: dict[Candidate, None] = {}
    for chunked in (False, True):  # the closed form flatters chunks
        alike = [candidate for candidate in ranked if (candidate.shape.virtual > 1) == chunked]
        first |= dict.fromkeys(alike[:STOCKS])
    if user_layout:
        shape = user_layout.shape
        first |= dict.fromkeys(candidate for candidate in ranked if candidate.shape == shape)
    simulated_ones = [timed(result.stock(candidate.shape)[0], candidate) for candidate in first]
    return min(simulated_ones, key=lambda candidate: candidate.step_s, default=None)
