"""The same job without holmes ("stock"), as a baseline, and the seconds of a step by cause.

Without holmes, the ranks are in the launcher's order, and all traffic uses the network that all
nodes share. A search result with these properties is the "stock request" below; it prices and
simulates the plans of the job without holmes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import NamedTuple

from holmes_ext.plan.cost.stages import estimate
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import job_of, timed
from holmes_ext.planner.simulate.deadline import TimeIsOver
from holmes_ext.planner.simulate.repeat import folded_causes, folded_s

#: Most shapes of a schedule (1F1B, interleaved) that are simulated to find the best stock plan.
MAX_STOCKS = 3
#: Cause of a second of a step -> name in tables and pictures.
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
    """Divide the step time of a plan by cause (CAUSES): seconds as the mean over all ranks.

    The sum of all causes is the step time: the simulated time if the candidate was simulated.
    """
    return dict(result.remember("causes", candidate, lambda: _compute_causes(result, candidate)))


def _compute_causes(result: SearchResult, candidate: Candidate) -> dict[str, float]:
    """Compute the seconds of a step by cause; causes() remembers them."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    stages = candidate.placement.stages  # an entry a stage: the clusters whose nodes it has
    stage_count = len(stages)
    if candidate.simulated_s:
        # folded_causes(): simulates the step, and sets all causes but "collectives"
        seconds |= folded_causes(job_of(result, candidate), candidate.simulated_s)
    else:
        step = estimate(result.costs(candidate), candidate.split)
        seconds["compute"] = sum(step.compute_s) / stage_count
        seconds["bubble"] = sum(step.idle_s) / stage_count
        # exposed_s: gradient reduction of a stage that no computation hides
        for clusters, exposed_s in zip(stages, step.exposed_s):
            cause = "reduce_across" if len(clusters) > 1 else "reduce_inside"
            seconds[cause] += exposed_s / stage_count
    micro_batches = candidate.shape.micro_batches
    collectives_s = micro_batches * _collectives_s(result, candidate) / stage_count

    # The computation of a pass contains its collectives; here they are a cause of their own.
    seconds["collectives"] = collectives_s
    seconds["compute"] -= collectives_s
    return seconds


def _collectives_s(result: SearchResult, candidate: Candidate) -> float:
    """Return the seconds of a micro-batch's tensor, context and expert collectives, summed over stages."""
    prices = result.prices(candidate.shape)
    total_s = 0.0
    for stage, layers in enumerate(candidate.split):
        # collective_s() needs the stage in a compact form of the placement, with the same costs.
        fold, (folded_stage,) = prices.fold(candidate.placement, stage)
        total_s += layers * prices.collective_s(fold, folded_stage)
    return total_s


class _StepTimeByCause(NamedTuple):
    """Seconds of a step by cause, for the best plan and the plans to compare with; see reasons()."""

    by_plan: dict[str, dict[str, float]]  # "holmes", "yours" or "stock" -> cause -> seconds
    are_simulated: bool  # False: from the closed form, a formula for the step time (estimate())


def reasons(result: SearchResult) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by cause (a key of CAUSES), for each of these plans.

        "holmes"    the best plan
        "yours"     the user's layout, if there is one and it is not the best plan
        "stock"     the job without holmes, with the sizes of the user's layout or else of the best plan

    The seconds are simulated if the best plan was simulated and the time limit of the caller
    (simulations_until()) leaves time for it. Else they come from the closed form, a formula for the
    step time (estimate()).
    """
    return _remembered_reasons(result).by_plan


def are_reasons_simulated(result: SearchResult) -> bool:
    """Return whether the seconds of reasons() are simulated; False: they come from the closed form.

    reasons() divides a step's time by cause. The closed form is a formula for the step time. It is
    used if the best plan was not simulated, or if the time was too short to simulate its causes.
    """
    return _remembered_reasons(result).are_simulated


def _remembered_reasons(result: SearchResult) -> _StepTimeByCause:
    """Return the seconds of a step by cause, for the best plan and for the user's own layout.

    They come from a simulation, and are kept for the next call. If the time is over before they are
    known, they come from the closed form. These are not kept: the page, which has no deadline,
    simulates the seconds by cause as its other pictures.
    """
    best = result.best
    layout = result.user_layout
    if layout is best:
        layout = None
    try:
        return result.remember("reasons", best, lambda: _reasons_of(result, best, layout))
    except TimeIsOver:
        # causes() takes the closed form for candidates that were not simulated (simulated_s is 0).
        # That needs no time, so it gets copies of the plans without a simulated step time.
        best = replace(best, simulated_s=0.0)
        if layout is not None:
            layout = replace(layout, simulated_s=0.0)
        return _reasons_of(result, best, layout)


def _reasons_of(
    result: SearchResult, best: Candidate, layout: Candidate | None
) -> _StepTimeByCause:
    """Compute the seconds of a step by cause, for the best plan and the plans to compare with.

    Args:
        result: The search.
        best: The best plan: "holmes" in the result.
        layout: The user's layout: "yours" in the result. None if there is none, or if it is the best
            plan.

    Returns:
        "stock", too: the job without holmes, with the sizes of the layout or else of the best plan.
        The seconds are simulated if the best plan was.
    """
    by_plan = {"holmes": causes(result, best)}
    if layout is not None:
        by_plan["yours"] = causes(result, layout)
    # The job without holmes is on another network, so it has a search result of its own.
    stock_result, stock_plan = stock_like(result, layout or best)
    by_plan["stock"] = causes(stock_result, stock_plan)
    return _StepTimeByCause(by_plan, are_simulated=bool(best.simulated_s))


def stock_like(result: SearchResult, candidate: Candidate) -> tuple[SearchResult, Candidate]:
    """Return the job without holmes with the sizes of a plan: its search request, and the plan it runs.

    The parallel sizes are those of the candidate. A layout that the user gave keeps its number of
    layers on each stage; otherwise all stages get equally many. The plan is simulated if the
    candidate is.
    """
    return result.remember("stock", candidate, lambda: _compute_stock(result, candidate))


def _compute_stock(result: SearchResult, candidate: Candidate) -> tuple[SearchResult, Candidate]:
    """Compute the job without holmes ("stock") for stock_like(): its search request, and its plan."""
    is_user_layout = bool(candidate.placement.names)  # only a given layout names its nodes
    split = candidate.split if is_user_layout else ()
    stock, same_sizes = result.stock(candidate.shape, split, candidate.placement.sizes.order)
    if candidate.simulated_s:
        same_sizes = replace(same_sizes, simulated_s=folded_s(job_of(stock, same_sizes)))
    return stock, same_sizes


class Baseline(NamedTuple):
    """The same training job without holmes ("stock"): tables compare the best plan with it."""

    name: str  # in tables and pictures
    request: SearchResult  # prices and simulates plans of this job
    plan: Candidate  # layout that this job runs


def baseline(result: SearchResult) -> Baseline:
    """Return the job without holmes with which tables and pictures compare the best plan.

    It has the sizes of the user's layout if there is one, else of the best plan.
    """
    layout = result.user_layout
    return Baseline(stock_name(result), *stock_like(result, layout or result.best))


def stock_name(result: SearchResult) -> str:
    """Return the name by which tables and pictures call the job without holmes."""
    return "your layout, stock" if result.user_layout else "stock, same sizes"


def plan_name(result: SearchResult) -> str:
    """Return the name of the best plan in tables and pictures."""
    return "your layout" if result.user_layout is result.best else "this plan"


def plan_names(result: SearchResult) -> dict[str, str]:
    """Return the names by which tables and pictures call the plans that reasons() compares.

    Returns:
        Key of a plan in the result of reasons() ("holmes", "yours" or "stock") -> name, such as
        "this plan" for "holmes".
    """
    return {"holmes": plan_name(result), "yours": "your layout", "stock": stock_name(result)}


def best_stock(result: SearchResult, end: float = inf) -> Candidate | None:
    """Return the plan with the shortest step of the job without holmes.

    All shapes of the search's candidates and of the user's layout are compared. A shape is the
    parallel sizes, micro-batch, recomputation and ZeRO stage. If the best plan with holmes is
    simulated, the plans that are fastest by the closed form are simulated, too.

    Args:
        result: The search, with its candidates.
        end: Moment of time.monotonic() at which the simulations must have ended.

    Returns:
        None if no plan fits, or the time was too short to find the fastest (also if a simulation is
        given up at the deadline of simulations_until()).
    """
    user_layout = result.user_layout
    examined = list(result.candidates)
    if user_layout:
        examined.append(user_layout)
    shapes = dict.fromkeys(candidate.shape for candidate in examined)  # each once, in order
    stock_plans = []
    for shape in shapes:
        _, stock_plan = result.stock(shape)  # the job without holmes: its request, and its plan
        stock_plans.append(stock_plan)
    fitting = [candidate for candidate in stock_plans if candidate.fits]
    ranked = sorted(fitting, key=lambda candidate: candidate.formula_s)
    if not result.best.simulated_s:
        return next(iter(ranked), None)
    chosen: dict[Candidate, None] = {}  # to simulate; an ordered set

    # The closed form underestimates interleaved schedules, so each schedule has its own fastest
    # plans.
    for interleaved in (False, True):
        same_schedule = [plan for plan in ranked if (plan.shape.virtual > 1) == interleaved]
        chosen |= dict.fromkeys(same_schedule[:MAX_STOCKS])
    if user_layout:
        # The shape that the user runs now is simulated in any case, however it ranks.
        shape = user_layout.shape
        chosen |= dict.fromkeys(plan for plan in ranked if plan.shape == shape)
    simulated_plans: list[Candidate] = []
    longest_s = 0.0  # of a simulation
    for plan in chosen:
        begin = time.monotonic()
        if begin + longest_s > end:
            return None
        try:
            simulated_plans.append(_simulated_stock(result, plan))
        except TimeIsOver:
            return None
        longest_s = max(longest_s, time.monotonic() - begin)
    return min(simulated_plans, key=lambda plan: plan.step_s, default=None)


def _simulated_stock(result: SearchResult, plan: Candidate) -> Candidate:
    """Simulate a plan of the job without holmes, and return the plan with its step time."""
    stock_request, _ = result.stock(plan.shape)
    return result.remember("simulated stock", plan, lambda: timed(stock_request, plan))
