"""Why a plan is as it is: stages of few layers, what it wins against others, what one change of the site would give.

All in seconds of the step: simulated ones wherever the plan was simulated (plan/search/ranking.py).
"""

from __future__ import annotations

from math import inf

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate
from holmes_ext.plan.search.ranking import timed
from holmes_ext.plan.search.result import Candidate, Outcome

#: A stage is thin with at most this part of the mean number of layers.
THIN = 1 / 3


def thin_stages(outcome: Outcome, candidate: Candidate) -> list[str]:
    """A line for the stages of one layer (or of a third of the mean): why, and what even layers would take."""
    split = candidate.split
    mean = sum(split) / len(split)
    thin = [stage for stage, layers in enumerate(split) if layers <= max(1, THIN * mean) and mean >= 2]
    if not thin:
        return []
    costs = outcome.costs(candidate)
    even = uniform(sum(split), len(split))
    other = outcome.candidate(outcome.pricing(candidate.shape), candidate.arrangement, even)
    fits = all(used <= limit for used, limit in zip(other.memory_bytes, other.limit_bytes))
    seconds = timed(outcome, other).step_s if candidate.simulated_s else other.step_s
    instead = f"with even layers the step takes {seconds:.4g} s instead of {candidate.step_s:.4g} s"
    lines: dict[str, list[int]] = {}
    for stage in thin:
        lines.setdefault(_why_thin(costs, outcome, candidate, stage, even), []).append(stage)
    said = []
    for why, stages in lines.items():
        names = ", ".join(str(stage) for stage in stages)
        places = ", ".join(dict.fromkeys(costs.places[stage] for stage in stages))
        layers = " ".join(str(split[stage]) for stage in stages)
        one = len(stages) == 1
        noun = "layer" if layers == "1" else "layers"
        said.append(f"stage{'' if one else 's'} {names} ({places}) ha{'s' if one else 've'} {layers} {noun}: {why}")
    return [*said, instead if fits else "even layers do not fit the memory"]


def _why_thin(costs: StageCosts, outcome: Outcome, candidate: Candidate, stage: int, even: tuple[int, ...]) -> str:
    """What keeps layers away from a stage."""
    pricing, order = outcome.pricing(candidate.shape), candidate.arrangement.order
    works = [forward[1] + backward[1] for forward, backward in zip(costs.forward_s, costs.backward_s)]
    reasons = []
    room, block = costs.room_bytes[stage], costs.memory[stage][1]
    if room < inf and costs.memory[stage][1] * (candidate.split[stage] + 1) > room - _ends(costs, stage):
        reasons.append(f"its memory has room for no more ({block / 1e9:.3g} GB a layer)")
    fastest = min(range(costs.stages), key=works.__getitem__)
    if works[stage] > 1.2 * works[fastest]:
        talking = pricing.stage(candidate.arrangement.contents[stage], order).collective_s / works[stage]
        share = f", {talking:.0%} of it tensor, context and expert groups" if talking > 0.1 else ""
        ratio = works[stage] / works[fastest]
        reasons.append(f"a layer takes {ratio:.1f} x as long there as on stage {fastest} ({works[stage]:.3g} s{share})")
    extra = _seconds(costs, stage, 0 if stage == 0 else 2) if stage in (0, costs.stages - 1) else 0.0
    if extra > 0.5 * works[stage]:
        what = "the embedding" if stage == 0 else "the output"
        reasons.append(f"{what} takes as long there as {extra / works[stage]:.1f} layers")
    exposed = estimate(costs, even).exposed_s
    if exposed[stage] > 0.02 * candidate.step_s and exposed[stage] >= 0.5 * max(exposed):
        reasons.append(f"with even layers {exposed[stage]:.3g} s of its reduction are waited for")
    return "; ".join(reasons) or "its forwards and backwards hide the sends of its neighbours best so"


def _seconds(costs: StageCosts, stage: int, kind: int) -> float:
    return costs.forward_s[stage][kind] + costs.backward_s[stage][kind]


def _ends(costs: StageCosts, stage: int) -> float:
    """Bytes of the embedding or the output on a stage."""
    first, last = stage == 0, stage == costs.stages - 1
    return first * costs.memory[stage][0] + last * costs.memory[stage][-1]


def explain(outcome: Outcome) -> list[str]:
    return []
