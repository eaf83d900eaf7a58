"""How many layers each pipeline stage gets: uniform, by speed, or the best split of all.

    uniform     N / p each, the first N mod p stages one more (DeepSpeed's and Megatron's rule)
    speed       floor(alpha N S_i / sum S) (Holmes, arXiv 2312.03549). The paper leaves the remainder open: layers that
                are left go, one by one, where most was cut off; those that are too many (alpha > 1) come from the
                slowest stages. S_i: the steps a second of a job whose stages were all like i
    balanced    the least predicted step among all splits that fit the stages' memory (plan/search/balanced.py)

The formula that balanced is exact for is up to 20 % too long where stages are unequal. So partition() walks through the
schedule pass by pass: of the split found, of uniform and of speed; from the least of them it goes on, one block over
one border at a time, while that gets better. So balanced is never predicted to be slower than the other two; with two
stages nor than any split near it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import floor, inf

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate, predict
from holmes_ext.plan.search.balanced import ROUNDING, balanced

METHODS = ("uniform", "speed", "balanced")
#: Passes of micro-batches that partition() walks through at most to improve a split (0.1 s or so).
WALKED_PASSES = 100_000


def partition(method: str, costs: StageCosts, alpha: float = 1.0) -> tuple[int, ...]:
    """Blocks of each stage by `method` of METHODS. HolmesError: unknown method, bad alpha, nothing fits the memory
    (balanced)."""
    if method == "uniform":
        return uniform(costs.blocks, costs.stages)
    if method == "speed":
        return by_speed(costs.blocks, speeds(costs), alpha)
    if method == "balanced":
        known = (balanced(costs), uniform(costs.blocks, costs.stages), by_speed(costs.blocks, speeds(costs), alpha))

        def seconds_of(split: Sequence[int]) -> float:
            outcome = predict(costs, split)
            return outcome.step_s if all(outcome.fits) else inf

        tries = WALKED_PASSES // (2 * costs.stages * costs.micro_batches)
        return improved(min(dict.fromkeys(known), key=seconds_of), seconds_of, _over_borders, tries)
    raise HolmesError(f"partition {method!r} is not one of {', '.join(METHODS)}")


def speeds(costs: StageCosts) -> tuple[float, ...]:
    """Steps a second of the uniform partition if every stage had stage i's GPUs and networks: the paper measures S in
    such jobs."""
    stages = list(zip(costs.forward_s, costs.backward_s, costs.reduction_s, costs.latency_s))
    free, known = ((0.0,) * len(costs.repeats),) * costs.stages, {}
    for own in dict.fromkeys(stages):
        forward, backward, reduction, latency = own
        alike = replace(
            costs, forward_s=(forward,) * costs.stages, backward_s=(backward,) * costs.stages, transfer_s=free,
            reduction_s=(reduction,) * costs.stages, latency_s=(latency,) * costs.stages, tied_s=0.0,
        )
        known[own] = 1 / max(estimate(alike, uniform(costs.blocks, costs.stages)).step_s, 1e-30)
    return tuple(known[own] for own in stages)


def by_speed(layers: int, speed: Sequence[float], alpha: float = 1.0) -> tuple[int, ...]:
    """The paper's formula with the module's rule for the remainder; every stage gets one layer at least."""
    stages = len(speed)
    uniform(layers, stages)  # or says that they are too few
    for stage, value in enumerate(speed):
        if not 0 < value < inf:
            raise HolmesError(f"stage {stage}: a speed of {value}; it must be above 0, and finite")
    if not 0 < alpha < inf:
        raise HolmesError(f"alpha is {alpha}; it must be above 0, and finite (the paper: 1 to 1.05)")
    shares = [alpha * layers * value / sum(speed) for value in speed]
    found = [min(layers, max(1, floor(share + 1e-9))) for share in shares]
    while sum(found) < layers:
        found[max(range(stages), key=lambda stage: round(shares[stage] - found[stage], 9))] += 1
    while sum(found) > layers:
        several = (stage for stage in range(stages) if found[stage] > 1)
        found[min(several, key=lambda stage: (speed[stage], -found[stage], -stage))] -= 1
    return tuple(found)


def improved(
    split: Sequence[int], seconds_of: Callable[[Sequence[int]], float],
    pairs_of: Callable[[Sequence[int]], Iterable[tuple[int, int]]], tries: int,
) -> tuple[int, ...]:
    """`split` after single blocks were moved from one stage to another, always the move that takes off most, for so
    many tries. seconds_of: of a step under a split, inf where it does not fit. pairs_of: (giver, taker) to try, the
    most promising first."""
    best = seconds_of(split), tuple(split)
    while tries > 0:
        pairs = [pair for pair in pairs_of(best[1]) if best[1][pair[0]] > 1][:tries]
        moves = [tuple(n - (s == a) + (s == b) for s, n in enumerate(best[1])) for a, b in pairs]
        tries -= len(moves)
        found = min(((seconds_of(moved), moved) for moved in moves), default=best)
        if not found[0] < best[0] * (1 - ROUNDING):
            break
        best = found
    return best[1]


def _over_borders(split: Sequence[int]) -> list[tuple[int, int]]:
    return [pair for stage in range(len(split) - 1) for pair in ((stage + 1, stage), (stage, stage + 1))]
