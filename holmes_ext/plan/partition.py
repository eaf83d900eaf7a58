"""How many layers each pipeline stage gets.

    uniform     N / p each, the first N mod p stages one more (DeepSpeed's and Megatron's rule)
    speed       floor(alpha N S_i / sum S) (Holmes, arXiv 2312.03549). The paper leaves the remainder open:
                layers that are left go, one by one, where most was cut off; those that are too many (alpha >
                1) come from the slowest stages. S_i: the steps a second of a job whose stages were all like i
    balanced    the least predicted step: of all splits where those are few; else from the best of uniform,
                speed and levelled on (the slowest stage as fast as can be) one block at a time is moved from
                a stage to another while the step gets shorter, by the closed form first, then pass by pass

So balanced is never predicted to be slower than the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb, floor, inf

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import Row, StageCosts, estimate, predict
from holmes_ext.units import format_bytes

METHODS = ("uniform", "speed", "balanced")
#: Times that differ by less than this fraction are equal.
ROUNDING = 1e-12
#: Passes of micro-batches that balanced walks through at most (0.1 s or so), and closed forms that it works
#: out.
WALKED_PASSES, FORMULAS = 100_000, 1500
#: Of all splits by the closed form, those that are walked.
FIRST = 20
#: Split of the layers.
Split = tuple[int, ...]


def partition(method: str, costs: StageCosts, alpha: float = 1.0) -> Split:
    """Blocks of each stage. HolmesError: unknown method, bad alpha, nothing fits (balanced)."""
    if method == "uniform":
        return uniform(costs.blocks, costs.stages)
    if method == "speed":
        return by_speed(costs.blocks, speeds(costs), alpha)
    if method == "balanced":
        return balanced(costs, alpha)
    raise HolmesError(f"partition {method!r} is not one of {', '.join(METHODS)}")


def balanced(costs: StageCosts, alpha: float = 1.0) -> Split:
    """HolmesError where no split fits the memory."""
    walk_s = 2 * costs.stages * costs.micro_batches
    if (count := comb(costs.blocks - 1, costs.stages - 1)) <= FORMULAS:
        splits = list(_every(costs.blocks, costs.stages))
        if count * walk_s > WALKED_PASSES:
            splits = sorted(splits, key=lambda split: in_closed_form(costs, split))[:FIRST]
    else:
        splits = by_moves(costs, alpha)
    best = min(splits, key=lambda split: walked(costs, split))
    if walked(costs, best) == inf:
        raise HolmesError(_too_big(costs))
    return improved(
        best, lambda split: walked(costs, split), _over_borders, WALKED_PASSES // walk_s
    )


def in_closed_form(costs: StageCosts, split: Sequence[int]) -> float:
    """Seconds; inf where it does not fit."""
    step = estimate(costs, split)
    return step.step_s if all(step.fits) else inf


def walked(costs: StageCosts, split: Sequence[int]) -> float:
    """The same pass by pass."""
    step = predict(costs, split)
    return step.step_s if all(step.fits) else inf


def _every(blocks: int, stages: int) -> Iterator[Split]:
    for borders in combinations(range(1, blocks), stages - 1):
        yield tuple(high - low for low, high in zip((0, *borders), (*borders, blocks)))


def by_moves(costs: StageCosts, alpha: float = 1.0) -> list[Split]:
    """The other methods' splits and the levelled one, and what moving blocks makes of them."""
    level = levelled(costs)
    starts = [uniform(costs.blocks, costs.stages), by_speed(costs.blocks, speeds(costs), alpha)]
    starts += [level] if level else []
    layer_s = [sum(row) / costs.layers for row in map(costs.by_layer, _busy(costs))]

    def pairs(split: Split) -> Iterator[tuple[int, int]]:
        yield from full_to_empty([count * seconds for count, seconds in zip(split, layer_s)])
        yield from _over_borders(split)
        yield from full_to_empty(layer_s)

    tries = FORMULAS // len(starts)
    moved = [
        improved(start, lambda split: in_closed_form(costs, split), pairs, tries)
        for start in starts
    ]
    return list(dict.fromkeys((*starts, *moved)))


def _busy(costs: StageCosts) -> list[Row]:
    """Seconds of a micro-batch by kind of layer, of each stage."""
    return [tuple(map(sum, zip(*rows))) for rows in zip(costs.forward_s, costs.backward_s)]


def levelled(costs: StageCosts) -> Split:
    """The split whose slowest stage is as fast as can be, of those that fit; () where none does."""
    stages, blocks = costs.stages, costs.blocks
    busy = [
        [f + b for f, b in zip(costs.sums["forward_s"][stage], costs.sums["backward_s"][stage])]
        for stage in range(stages)
    ]

    def filled(limit_s: float) -> Split:
        """From the first stage on each takes as much as it can, and leaves the others one block each."""
        counts, start = [], 0
        for stage in range(stages):
            memory, room = costs.sums["memory"][stage], costs.room_bytes[stage]
            most, stop = blocks - (stages - stage - 1), start
            while stop < most:
                low, high = costs.bounds(start, stop + 1)
                fits = memory[high] - memory[low] <= room
                if not fits or busy[stage][high] - busy[stage][low] > limit_s:
                    break
                stop += 1
            if stop == start:
                return ()
            counts.append(stop - start)
            start = stop
        return tuple(counts) if start == blocks else ()

    slow = max(sums[-1] for sums in busy)
    best = filled(slow)
    if not best:
        return ()
    fast = 0.0
    for _ in range(40):
        middle = (fast + slow) / 2
        if split := filled(middle):
            best, slow = split, middle
        else:
            fast = middle
    return best


def speeds(costs: StageCosts) -> tuple[float, ...]:
    """Steps a second of the uniform partition if every stage were like stage i: the paper's S."""
    stages = list(zip(costs.forward_s, costs.backward_s, costs.reduction_s, costs.latency_s))
    free, known = ((0.0,) * len(costs.repeats),) * costs.stages, {}
    for rows in dict.fromkeys(stages):
        forward, backward, reduction, latency_s = rows
        count = costs.stages
        alike = replace(
            costs,
            forward_s=(forward,) * count,
            backward_s=(backward,) * count,
            transfer_s=free,
            reduction_s=(reduction,) * count,
            latency_s=(latency_s,) * count,
            tied_s=0.0,
        )
        step_s = estimate(alike, uniform(costs.blocks, costs.stages)).step_s
        known[rows] = 1 / max(step_s, 1e-30)
    return tuple(known[stage] for stage in stages)


def by_speed(layers: int, speed: Sequence[float], alpha: float = 1.0) -> Split:
    """The paper's formula with the module's rule for the remainder; every stage gets one layer at least."""
    stages = len(speed)
    uniform(layers, stages)  # or says that they are too few
    for stage, value in enumerate(speed):
        if not 0 < value < inf:
            raise HolmesError(f"stage {stage}: a speed of {value}; it must be above 0, and finite")
    if not 0 < alpha < inf:
        raise HolmesError(
            f"alpha is {alpha}; it must be above 0, and finite (the paper: 1 to 1.05)"
        )
    shares = [alpha * layers * value / sum(speed) for value in speed]
    blocks = [min(layers, max(1, floor(share + 1e-9))) for share in shares]
    while sum(blocks) < layers:
        blocks[max(range(stages), key=lambda stage: round(shares[stage] - blocks[stage], 9))] += 1
    while sum(blocks) > layers:
        several = (stage for stage in range(stages) if blocks[stage] > 1)
        blocks[min(several, key=lambda stage: (speed[stage], -blocks[stage], -stage))] -= 1
    return tuple(blocks)


def improved(
    split: Split,
    seconds_of: Callable[[Split], float],
    pairs_of: Callable[[Split], Iterable[tuple[int, int]]],
    tries: int,
) -> Split:
    """`split` after single blocks were moved wherever that takes something off, for so many tries.
    seconds_of: inf where a split does not fit; pairs_of: (giver, taker), the most promising first."""
    best_s, best, better = seconds_of(split), split, True
    while better and tries > 0:
        better = False
        for giver, taker in list(pairs_of(best))[:tries]:
            tries -= 1
            if best[giver] == 1:
                continue
            moved = _moved(best, giver, taker)
            seconds = seconds_of(moved)
            if seconds < best_s * (1 - ROUNDING):
                best_s, best, better = seconds, moved, True
    return best


def _moved(split: Split, giver: int, taker: int) -> Split:
    counts = list(split)
    counts[giver] -= 1
    counts[taker] += 1
    return tuple(counts)


def _over_borders(split: Split) -> Iterator[tuple[int, int]]:
    for stage in range(len(split) - 1):
        yield from ((stage + 1, stage), (stage, stage + 1))


def full_to_empty(work: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Pairs of stages: the fullest give, the emptiest take, and the ends (whose reductions may be
    exposed)."""
    last = len(work) - 1
    stages = sorted(range(len(work)), key=work.__getitem__)
    givers = dict.fromkeys((*stages[:-4:-1], 0, last))
    takers = dict.fromkeys((*stages[:4], 0, last // 2, last))
    return ((giver, taker) for giver in givers for taker in takers if giver != taker)


def _too_big(costs: StageCosts) -> str:
    advice = "tensor parallelism, recomputation or smaller micro-batches"
    most = []
    for stage, room in enumerate(costs.room_bytes):
        memory, count, used = costs.sums["memory"][stage], 0, 0.0
        while count <= costs.blocks - costs.stages:
            start = 0 if not stage else costs.blocks - count - 1 if stage == costs.stages - 1 else 1
            low, high = costs.bounds(start, start + count + 1)
            used = memory[high] - memory[low]
            if used > room:
                break
            count += 1
        if not count:
            needs = f"one layer needs {format_bytes(used + costs.working_bytes)}"
            has = f"its GPUs have {format_bytes(costs.limit_bytes[stage])}"
            return f"{costs.names[stage]}: {needs} and {has}; use more {advice}"
        most.append(count)
    total = "+".join(map(str, most))
    what = f"no split of {costs.blocks} layers fits the GPUs' memory: the stages hold at most {total} layers"
    return f"{what}; use more stages, {advice}"
