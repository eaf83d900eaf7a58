"""Why a plan is as it is: stages of few layers, what it wins, what one change of the site would give.

All in seconds of the step: simulated ones wherever the plan was simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate
from holmes_ext.planner.search.changed import what_if
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.stock import CAUSES, causes, stock_like
from holmes_ext.words import some_of

#: A stage is thin with at most this part of the mean number of layers.
THIN = 1 / 3
#: Changes of the site that are shown.
CHANGES = 7
#: Fraction of the step below which a change gives nothing.
NOTHING = 0.001


def thin_stages(result: SearchResult, candidate: Candidate) -> list[str]:
    """Of stages with one layer, or a third of the mean: why, and what even layers would take."""
    split = candidate.split
    mean = sum(split) / len(split)
    thin = [
        stage for stage, layers in enumerate(split) if layers <= max(1, THIN * mean) and mean >= 2
    ]
    if not thin:
        return []
    costs = result.costs(candidate)
    even = uniform(sum(split), len(split))
    other = result.candidate(candidate.shape, candidate.placement, even)
    seconds = timed(result, other).step_s if candidate.simulated_s else other.step_s
    lines: dict[str, list[int]] = {}
    for stage in thin:
        why = (
            "; ".join(_why_thin(costs, result, candidate, stage))
            or "this hides its neighbours' sends best"
        )
        lines.setdefault(why, []).append(stage)
    said = [_thin_line(candidate, costs, stages, why) for why, stages in lines.items()]
    instead = f"with even layers the step takes {seconds:.4g} s instead of {candidate.step_s:.4g} s"
    return [*said, instead if other.fits else "even layers do not fit in memory"]


def _thin_line(candidate: Candidate, costs: StageCosts, stages: list[int], why: str) -> str:
    names = ", ".join(map(str, stages))
    places = ", ".join(dict.fromkeys(costs.places[stage] for stage in stages))
    layers = " and ".join(dict.fromkeys(str(candidate.split[stage]) for stage in stages))
    noun = "layer" if layers == "1" else "layers"
    who = f"stage {names} ({places}) has" if len(stages) == 1 else f"stages {names} ({places}) have"
    return f"{who} {layers} {noun}: {why}"


def _why_thin(
    costs: StageCosts, result: SearchResult, candidate: Candidate, stage: int
) -> Iterator[str]:
    """What keeps layers away from a stage."""
    works = [
        forward[1] + backward[1] for forward, backward in zip(costs.forward_s, costs.backward_s)
    ]
    first, last = stage == 0, stage == costs.stages - 1
    room, block = costs.room_bytes[stage], costs.memory[stage][1]
    ends = first * costs.memory[stage][0] + last * costs.memory[stage][-1]
    if room < inf and block * (candidate.split[stage] + 1) > room - ends:
        yield f"its memory has no room for another layer ({block / 1e9:.3g} GB)"
    least, work = min(works), works[stage]
    if work > 1.2 * least:
        prices = result.prices(candidate.shape)
        fold, (place,) = prices.fold(candidate.placement, stage)
        talking = prices.collective_s(fold, place) / work
        share = (
            f", {talking:.0%} of it tensor, context and expert collectives" if talking > 0.1 else ""
        )
        fastest = works.index(least)
        yield f"a layer takes {work / least:.1f} x as long there as on stage {fastest} ({work:.3g} s{share})"
    kind = 0 if first else 2
    extra = costs.forward_s[stage][kind] + costs.backward_s[stage][kind] if first or last else 0.0
    if extra > 0.5 * work:
        what = "the embedding" if first else "the output"
        yield f"{what} takes as long as {extra / work:.1f} layers there"
    exposed = estimate(costs, uniform(sum(candidate.split), costs.stages)).exposed_s
    if exposed[stage] > 0.02 * candidate.step_s and exposed[stage] >= 0.5 * max(exposed):
        yield f"with even layers {exposed[stage]:.3g} s of its reduction would be exposed"
    sends = [] if first else [(costs.transfer_s[stage - 1][1], stage - 1)]
    sends += [] if last else [(costs.transfer_s[stage][1], stage + 1)]
    send, other = max(sends, default=(0.0, 0))
    if 2 * send > work:
        what = f"a micro-batch's activation and gradient take {2 * send:.3g} s between it and stage {other}"
        yield f"{what}, as long as {2 * send / work:.0f} layers"


def explain(result: SearchResult) -> list[str]:
    """At most ten lines: what the best plan wins against the runner-up, the user's layout and stock, by
    cause; then what one change of the site gives, the greatest gain first (those below the optimality
    gap's gap as "unchanged")."""
    best, best_causes, layout = result.best, causes(result, result.best), result.user_layout
    lines = []
    others = (
        candidate
        for candidate in result.candidates
        if candidate.shape != best.shape and candidate.simulated_s
    )
    runner_up = next(others, None)
    if runner_up is not None:
        lines.append(_against("the runner-up", best_causes, causes(result, runner_up)))
    if layout is not None:
        lines.append(_against("your layout with holmes", best_causes, causes(result, layout)))
    whom = "stock" if layout is None else "your layout as stock runs it"
    lines.append(_against(whom, best_causes, causes(*stock_like(result, layout or best))))
    gap = max(NOTHING, result.optimality_gap.gap if result.optimality_gap else 0.0)
    ranked = sorted(what_if(result), key=lambda change: change[1])
    gains = [(what, seconds / best.step_s - 1, seconds) for what, seconds in ranked]
    large = [change for change in gains if abs(change[1]) >= gap]
    same = [what for what, gain, _ in gains if abs(gain) < gap]
    shown = CHANGES - bool(same)
    lines += [
        f"with {what}: {seconds:.4g} s ({gain:+.1%})" for what, gain, seconds in large[:shown]
    ]
    within = f" (within {gap:.1%})" if gap > NOTHING else ""
    return lines + ([f"unchanged{within} with {some_of(same, 4)}"] if same else [])


def _against(whom: str, best_causes: dict[str, float], other: dict[str, float]) -> str:
    """The step's difference, and the causes that make most of it."""
    least, most = sum(best_causes.values()), sum(other.values())
    parts = sorted(
        ((other[cause] - best_causes[cause], CAUSES[cause]) for cause in best_causes),
        key=lambda part: -abs(part[0]),
    )
    said = [
        f"{seconds:+.3g} s {cause}" for seconds, cause in parts[:3] if abs(seconds) > 0.001 * least
    ]
    return f"against {whom}: {least:.4g} s instead of {most:.4g} s" + (
        f"; there {', '.join(said)}" if said else ""
    )
