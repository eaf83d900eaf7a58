"""Explanation of the best plan in sentences: thin stages, gains over other plans, effects of site changes.

A stage is thin if it has far fewer layers than the mean. All numbers are seconds of a step,
simulated if the plan was simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import NamedTuple

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate
from holmes_ext.planner.search.changed import what_if
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.stock import CAUSES, causes, stock_like
from holmes_ext.planner.simulate.deadline import TimeIsOver
from holmes_ext.words import counted, some_of

#: A stage is thin if it has at most this share of the mean number of layers, or a single layer.
THIN_SHARE = 1 / 3
#: Least mean number of layers for which a stage of a single layer is thin.
MIN_MEAN_LAYERS = 2
#: Most changes of the site that are shown.
MAX_CHANGES = 7
#: A change of the step below this fraction is none.
NEGLIGIBLE = 0.001
#: Most causes and unchanged cases that a line lists.
MAX_CAUSES = 3
MAX_UNCHANGED = 4

# A cost above these thresholds explains why a stage has few layers.
#: Time of a layer, relative to the fastest stage.
SLOW_LAYER = 1.2
#: Share of collectives in a layer's time.
LARGE_COLLECTIVES = 0.1
#: Time of embedding or output, in layers.
LARGE_EXTRA = 0.5
#: Exposed reduction with even layers: share of the step, and of the largest of all stages.
EXPOSED_SHARE = 0.02
EXPOSED_OF_LARGEST = 0.5
BYTES_PER_GB = 1e9
#: Items of each row of StageCosts.
EMBEDDING, BLOCK, OUTPUT = range(3)


class _Transfer(NamedTuple):
    """An activation or gradient between a stage and a neighbour."""

    seconds: float
    neighbour: int


def thin_stages(result: SearchResult, candidate: Candidate) -> list[str]:
    """Explain why some stages have very few layers, and compare with an even split.

    Returns:
        A sentence for each reason and another for the even split; [] if no stage is thin.
    """
    split = candidate.split  # layers of each stage
    mean = sum(split) / len(split)
    if mean < MIN_MEAN_LAYERS:
        return []
    limit = max(1, THIN_SHARE * mean)
    thin = [stage for stage, layers in enumerate(split) if layers <= limit]
    if not thin:
        return []
    costs = result.costs(candidate)
    stages_by_reason: dict[str, list[int]] = {}
    for stage in thin:
        reasons = "; ".join(_thin_reasons(costs, result, candidate, stage))
        if not reasons:
            reasons = "this hides its neighbours' sends best"
        stages_by_reason.setdefault(reasons, []).append(stage)
    lines = [
        _thin_line(candidate, costs, stages, reasons)
        for reasons, stages in stages_by_reason.items()
    ]
    with suppress(TimeIsOver):  # too late to simulate the even split: no line on it
        lines.append(_even_split_line(result, candidate))
    return lines


def _even_split_line(result: SearchResult, candidate: Candidate) -> str:
    """Return a sentence on the step with the same number of layers on every stage."""
    even_split = uniform(sum(candidate.split), len(candidate.split))
    even = result.candidate(candidate.shape, candidate.placement, even_split)
    even_s = timed(result, even).step_s if candidate.simulated_s else even.step_s
    if not even.fits:
        return "even layers do not fit in memory"
    return f"with even layers the step takes {even_s:.4g} s instead of {candidate.step_s:.4g} s"


def _thin_line(candidate: Candidate, costs: StageCosts, stages: list[int], reasons: str) -> str:
    """Return the sentence "stages 0, 3 (a, b) have 1 layer: reasons".

    Args:
        candidate: The plan.
        costs: Its costs, with the clusters of each stage.
        stages: Stages with the same reasons.
        reasons: Reasons why they have few layers.
    """
    numbers = ", ".join(map(str, stages))
    places = ", ".join(dict.fromkeys(costs.places[stage] for stage in stages))
    layers = " and ".join(dict.fromkeys(str(candidate.split[stage]) for stage in stages))
    noun = "layer" if layers == "1" else "layers"
    if len(stages) == 1:
        subject = f"stage {numbers} ({places}) has"
    else:
        subject = f"stages {numbers} ({places}) have"
    return f"{subject} {layers} {noun}: {reasons}"


def _thin_reasons(
    costs: StageCosts, result: SearchResult, candidate: Candidate, stage: int
) -> Iterator[str]:
    """Yield the reasons why a stage has few layers, as sentences.

    Each reason is a cost of this stage that is above a threshold:

        memory       room for few layers
        slow layer   a layer takes longer here than on the fastest stage
        ends         the embedding or output layer takes more than half as long as a layer
        reduction    if every stage had equally many layers, no pass would hide a long part of this
                     stage's gradient reduction. Long is more than 2 % of the step, and at least
                     half as long as on the stage where this part is longest
        messages     an activation to a neighbour and its gradient take longer than a layer

    Args:
        costs: Costs of the plan.
        result: The search that found it.
        candidate: The plan.
        stage: Number of the stage.
    """
    # Seconds of a micro-batch in a block (layer), on each stage.
    layer_s = [
        forward[BLOCK] + backward[BLOCK]
        for forward, backward in zip(costs.forward_s, costs.backward_s)
    ]
    yield from _memory_reason(costs, candidate, stage)
    yield from _slow_layer_reason(layer_s, result, candidate, stage)
    yield from _ends_reason(costs, layer_s[stage], stage)
    yield from _reduction_reason(costs, candidate, stage)
    yield from _messages_reason(costs, layer_s[stage], stage)


def _ends_reason(costs: StageCosts, layer_s: float, stage: int) -> Iterator[str]:
    """Yield a sentence if a stage's embedding or output layer takes long, compared with a block.

    Args:
        costs: Costs of the plan.
        layer_s: Seconds of a micro-batch in a block of the stage.
        stage: Number of the stage.
    """
    if stage == 0:
        name = "the embedding"
        layer_kind = EMBEDDING
    elif stage == costs.stages - 1:
        name = "the output"
        layer_kind = OUTPUT
    else:
        return
    extra_s = costs.forward_s[stage][layer_kind] + costs.backward_s[stage][layer_kind]
    if extra_s > LARGE_EXTRA * layer_s:
        yield f"{name} takes as long as {extra_s / layer_s:.1f} layers there"


def _reduction_reason(costs: StageCosts, candidate: Candidate, stage: int) -> Iterator[str]:
    """Yield a sentence if a stage's gradient reduction would delay a step with even layers.

    Even layers are equal numbers of layers on all stages. The reduction delays the step by its
    exposed part: no pass hides it. A sentence is due if this part is more than 2 % of the step
    (EXPOSED_SHARE), and at least half as long as on the stage where it is longest
    (EXPOSED_OF_LARGEST).
    """
    even_split = uniform(sum(candidate.split), costs.stages)
    exposed_s = estimate(costs, even_split).exposed_s  # of each stage
    is_long = exposed_s[stage] > EXPOSED_SHARE * candidate.step_s
    is_among_longest = exposed_s[stage] >= EXPOSED_OF_LARGEST * max(exposed_s)
    if is_long and is_among_longest:
        yield f"with even layers {exposed_s[stage]:.3g} s of its reduction would be exposed"


def _messages_reason(costs: StageCosts, layer_s: float, stage: int) -> Iterator[str]:
    """Yield a sentence if an activation to a neighbour and its gradient take longer than a block.

    The caller puts "stage 3 (cluster a) has 1 layer: " before the sentence. So "it" in the sentence
    is this stage.

    Args:
        costs: Costs of the plan.
        layer_s: Seconds of a micro-batch in a block of the stage.
        stage: Number of the stage.
    """
    transfers = []  # of a block's activation, over the links to the neighbours
    if stage > 0:
        transfers.append(_Transfer(costs.transfer_s[stage - 1][BLOCK], neighbour=stage - 1))
    if stage < costs.stages - 1:
        transfers.append(_Transfer(costs.transfer_s[stage][BLOCK], neighbour=stage + 1))
    longest = max(transfers, default=_Transfer(0.0, neighbour=0))
    round_trip_s = 2 * longest.seconds  # activation forward, gradient back
    if round_trip_s > layer_s:
        yield (
            f"a micro-batch's activation and gradient take {round_trip_s:.3g} s between it and stage "
            f"{longest.neighbour}, as long as {counted(round(round_trip_s / layer_s), 'layer')}"
        )


def _memory_reason(costs: StageCosts, candidate: Candidate, stage: int) -> Iterator[str]:
    """Yield a sentence if another layer does not fit the stage's memory."""
    embedding_bytes, block_bytes, *_ = costs.memory[stage]
    output_bytes = costs.memory[stage][-1]
    is_first = stage == 0
    is_last = stage == costs.stages - 1
    extra_bytes = 0.0
    if is_first:
        extra_bytes += embedding_bytes
    if is_last:
        extra_bytes += output_bytes
    available_bytes = costs.room_bytes[stage]  # for layers; inf without a limit
    needed_bytes = block_bytes * (candidate.split[stage] + 1)
    if available_bytes < inf and needed_bytes > available_bytes - extra_bytes:
        layer_gb = block_bytes / BYTES_PER_GB
        yield f"its memory has no room for another layer ({layer_gb:.3g} GB)"


def _slow_layer_reason(
    layer_s: list[float], result: SearchResult, candidate: Candidate, stage: int
) -> Iterator[str]:
    """Yield a sentence if a layer takes much longer on the stage than on the fastest stage.

    Args:
        layer_s: Seconds of a layer on each stage.
        result: The search that found the plan.
        candidate: The plan.
        stage: Number of the stage.
    """
    least_s = min(layer_s)
    stage_layer_s = layer_s[stage]
    if stage_layer_s <= SLOW_LAYER * least_s:
        return
    prices = result.prices(candidate.shape)

    # collective_s() needs the stage in a compact form of the placement, with the same costs.
    fold, (folded_stage,) = prices.fold(candidate.placement, stage)
    collective_share = prices.collective_s(fold, folded_stage) / stage_layer_s
    collectives = ""
    if collective_share > LARGE_COLLECTIVES:
        collectives = f", {collective_share:.0%} of it tensor, context and expert collectives"
    ratio = stage_layer_s / least_s
    fastest = layer_s.index(least_s)
    yield (
        f"a layer takes {ratio:.1f} x as long there as on stage {fastest} "
        f"({stage_layer_s:.3g} s{collectives})"
    )


def explain(result: SearchResult) -> list[str]:
    """Return at most ten sentences on the best plan.

    First its gain over the runner-up, the user's layout and the job without holmes, by cause. Then
    the effect of each change of the site, the largest gain first; effects within the optimality gap
    are summed up as "unchanged".
    """
    best = result.best
    best_causes = causes(result, best)
    layout = result.user_layout
    lines = []
    runners_up = (
        candidate
        for candidate in result.candidates
        if candidate.shape != best.shape and candidate.simulated_s
    )
    runner_up = next(runners_up, None)
    if runner_up is not None:
        lines.append(_comparison("the runner-up", best_causes, causes(result, runner_up)))
    if layout is not None:
        lines.append(_comparison("your layout with holmes", best_causes, causes(result, layout)))
    name = "stock" if layout is None else "your layout as stock runs it"
    stock, stock_plan = stock_like(result, layout or best)
    lines.append(_comparison(name, best_causes, causes(stock, stock_plan)))
    return lines + _change_lines(result)


def _change_lines(result: SearchResult) -> list[str]:
    """Return a sentence for each change of the site that changes the step, and another for all others."""
    best_s = result.best.step_s
    gap = result.optimality_gap.gap if result.optimality_gap else 0.0
    least_effect = max(NEGLIGIBLE, gap)  # smaller changes may be due to the search
    effects = []
    unchanged = []
    for change in sorted(what_if(result), key=lambda change: change.step_s):
        effect = change.step_s / best_s - 1
        if abs(effect) >= least_effect:
            effects.append(f"with {change.description}: {change.step_s:.4g} s ({effect:+.1%})")
        else:
            unchanged.append(change.description)
    lines = effects[: MAX_CHANGES - bool(unchanged)]  # the line on the unchanged counts, too
    if unchanged:
        within = f" (within {least_effect:.1%})" if least_effect > NEGLIGIBLE else ""
        lines.append(f"unchanged{within} with {some_of(unchanged, MAX_UNCHANGED)}")
    return lines


def _comparison(name: str, best_causes: dict[str, float], other: dict[str, float]) -> str:
    """Return the best and another plan's step, and the causes of most of the difference.

    Args:
        name: Name of the other plan.
        best_causes: Seconds of the best plan's step by cause.
        other: Seconds of the other plan's step by cause.
    """
    best_s = sum(best_causes.values())
    other_s = sum(other.values())
    # (seconds that the other plan takes longer, name of the cause), the largest difference first
    differences = [(other[cause] - best_causes[cause], CAUSES[cause]) for cause in best_causes]
    differences.sort(key=lambda difference: -abs(difference[0]))
    parts = [
        f"{seconds:+.3g} s {cause}"
        for seconds, cause in differences[:MAX_CAUSES]
        if abs(seconds) > NEGLIGIBLE * best_s
    ]
    by_cause = f"; there {', '.join(parts)}" if parts else ""
    return f"against {name}: {best_s:.4g} s instead of {other_s:.4g} s{by_cause}"
