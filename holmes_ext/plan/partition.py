"""Number of layers that each pipeline stage gets.

With N layers and p stages, the methods are:

    uniform     N / p each; the first N mod p stages get one more (DeepSpeed's and Megatron's rule)
    speed       floor(alpha N S_i / sum of S) (Holmes, arXiv 2312.03549), where S_i is the speed of
                stage i: steps per second of a job whose stages are all like stage i
    balanced    the split of the layers with the shortest predicted step

The paper on `speed` leaves the remainder open. Here, each layer that is left goes to the stage that
lost most by rounding; layers that are too many (alpha > 1) are taken from the slowest stages.

`balanced` tries all splits if they are few. Otherwise it begins with uniform, speed and the split
whose slowest stage is fastest. It moves single blocks from a stage to another as long as the step gets
shorter: predicted in closed form (a formula) first, then pass by pass (a simulation of the schedule).

So the step of `balanced` is never predicted to be longer than those of the other two.
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
from holmes_ext.words import counted

METHODS = ("uniform", "speed", "balanced")
#: Times with a smaller relative difference are equal.
ROUNDING = 1e-12
#: Largest number of passes (of a micro-batch on a stage) that `balanced` calculates (about 0.1 s).
MOST_WALKED_PASSES = 100_000
#: Largest number of predictions in closed form that `balanced` makes.
MOST_FORMULAS = 1500
#: Number of the best splits in closed form that `balanced` calculates pass by pass.
MOST_WALKED_SPLITS = 20
_BISECTIONS = 40
#: A share of layers that is this close to the next whole number is rounded up.
_SHARE_ROUNDING = 1e-9
#: Step time below which a speed would be infinite.
_SHORTEST_S = 1e-30
#: Layers of each stage.
Split = tuple[int, ...]
#: A change of a split, in which a block moves to another stage: (stage that gives it, stage that takes it).
Move = tuple[int, int]


def partition(method: str, costs: StageCosts, alpha: float = 1.0) -> Split:
    """Return the number of blocks (layers) of each stage, by one of the methods of the module.

    Args:
        method: One of METHODS.
        costs: Costs of every layer on every stage.
        alpha: Factor by which the method "speed" multiplies the share of each stage before it
            rounds the share to whole layers.

    Raises:
        HolmesError: The method is unknown, alpha is bad, or ("balanced") no split fits the memory.
    """
    if method == "uniform":
        return uniform(costs.blocks, costs.stages)
    if method == "speed":
        return by_speed(costs.blocks, speeds(costs), alpha)
    if method == "balanced":
        return balanced(costs, alpha)
    raise HolmesError(f"partition {method!r} is not one of {', '.join(METHODS)}")


def balanced(costs: StageCosts, alpha: float = 1.0) -> Split:
    """Return the split with the shortest predicted step.

    Predictions pass by pass are exact but slow, those in closed form fast. So with many splits, the closed
    form selects candidates. The best candidate is then improved pass by pass, by moving single blocks.

    Args:
        costs: Costs of every layer on every stage.
        alpha: Factor of the shares in the method "speed" (see partition). The search begins with
            the split of this method, among others.

    Raises:
        HolmesError: No split fits the memory.
    """
    # Work of one prediction pass by pass: a forward and a backward pass of each micro-batch and stage.
    passes = 2 * costs.stages * costs.micro_batches
    split_count = comb(costs.blocks - 1, costs.stages - 1)
    if split_count <= MOST_FORMULAS:
        splits = list(_all_splits(costs.blocks, costs.stages))
        if split_count * passes > MOST_WALKED_PASSES:  # too many to calculate them all pass by pass
            splits.sort(key=lambda split: in_closed_form(costs, split))
            splits = splits[:MOST_WALKED_SPLITS]  # the best ones
    else:
        splits = by_moves(costs, alpha)
    best = min(splits, key=lambda split: pass_by_pass_s(costs, split))
    if pass_by_pass_s(costs, best) == inf:
        raise HolmesError(_too_large(costs))
    return improved(
        best,
        seconds_of=lambda split: pass_by_pass_s(costs, split),
        moves_of=_over_borders,
        tries=MOST_WALKED_PASSES // passes,  # predictions that fit the budget of about 0.1 s
    )


def in_closed_form(costs: StageCosts, split: Sequence[int]) -> float:
    """Predict the step time of a split of the layers by a formula; inf if the split does not fit the memory.

    The result is in seconds.
    """
    step = estimate(costs, split)
    return step.step_s if all(step.fits) else inf


def pass_by_pass_s(costs: StageCosts, split: Sequence[int]) -> float:
    """Predict the step time of a split of the layers pass by pass; inf if it does not fit the memory.

    The result is in seconds.
    """
    step = predict(costs, split)
    return step.step_s if all(step.fits) else inf


def _all_splits(blocks: int, stages: int) -> Iterator[Split]:
    """Yield all ways to divide the blocks among the stages, at least one for each."""
    for borders in combinations(range(1, blocks), stages - 1):
        yield tuple(high - low for low, high in zip((0, *borders), (*borders, blocks)))


def by_moves(costs: StageCosts, alpha: float = 1.0) -> list[Split]:
    """Return a few splits that are worth a precise prediction, if there are too many to try all.

    The search begins with up to three splits: those of the methods "uniform" and "speed", and the
    split whose slowest stage is fastest. From each of them, it moves single blocks between stages as
    long as that shortens the step predicted in closed form. The result has each split before and
    after these moves.

    Args:
        costs: Costs of every layer on every stage.
        alpha: Factor by which "speed" multiplies the share of each stage before rounding it.
    """
    starts = [uniform(costs.blocks, costs.stages), by_speed(costs.blocks, speeds(costs), alpha)]
    level = levelled(costs)  # its slowest stage is fastest; () if no split fits the memory
    if level:
        starts.append(level)

    # Mean seconds of a layer on each stage: low on stages with fast GPUs.
    layer_s = [sum(costs.by_layer(row)) / costs.layers for row in _forward_and_backward_s(costs)]

    def moves(split: Split) -> Iterator[Move]:
        """Yield the moves of a block to try, as (stage that gives it, stage that takes it)."""
        stage_s = [count * seconds for count, seconds in zip(split, layer_s)]
        yield from full_to_empty(stage_s)  # from busy stages to less busy stages
        yield from _over_borders(split)  # to a neighbouring stage
        yield from full_to_empty(layer_s)  # from slow GPUs to fast GPUs

    tries = MOST_FORMULAS // len(starts)  # of each search
    improved_splits = [
        improved(
            start,
            seconds_of=lambda split: in_closed_form(costs, split),
            moves_of=moves,
            tries=tries,
        )
        for start in starts
    ]
    return list(dict.fromkeys((*starts, *improved_splits)))  # without duplicates


def _forward_and_backward_s(costs: StageCosts) -> list[Row]:
    """Return the seconds of a forward and a backward pass, by stage and kind of layer."""
    return [tuple(map(sum, zip(*rows))) for rows in zip(costs.forward_s, costs.backward_s)]


def levelled(costs: StageCosts) -> Split:
    """Return the split whose slowest stage is fastest, of those that fit the memory; () if none fits.

    This is a bisection on the time of the slowest stage.
    """
    # By stage: seconds of the first 0, 1, 2, ... layers of the model, forward and backward.
    busy_totals = [
        [forward_s + backward_s for forward_s, backward_s in zip(forward, backward)]
        for forward, backward in zip(costs.sums["forward_s"], costs.sums["backward_s"])
    ]

    # With enough time for all layers on a single stage, only the memory limits the split.
    slow_s = max(totals[-1] for totals in busy_totals)
    best = _filled(costs, busy_totals, slow_s)
    if not best:
        return ()
    fast_s = 0.0
    for _ in range(_BISECTIONS):
        middle_s = (fast_s + slow_s) / 2
        split = _filled(costs, busy_totals, middle_s)
        if split:
            best = split
            slow_s = middle_s
        else:
            fast_s = middle_s
    return best


def _filled(costs: StageCosts, busy_totals: Sequence[Sequence[float]], limit_s: float) -> Split:
    """Return the split in which each stage has as many blocks as its memory and a time limit allow.

    The stages take blocks in turn, from the first stage on.

    Args:
        costs: Costs of every layer on every stage.
        busy_totals: Stage -> seconds of the first 0, 1, 2, ... layers, if the stage had them.
        limit_s: Largest time of a stage, in seconds.

    Returns:
        () if a stage cannot hold even a single block, or if blocks are left after the last stage.
    """
    counts = []
    start = 0
    for stage in range(costs.stages):
        memory = costs.sums["memory"][stage]
        busy_s = busy_totals[stage]
        stages_after = costs.stages - stage - 1
        most = costs.blocks - stages_after  # every later stage needs a block
        stop = start
        while stop < most:
            low, high = costs.bounds(start, stop + 1)  # layers, with one more block
            is_too_large = memory[high] - memory[low] > costs.room_bytes[stage]
            if is_too_large or busy_s[high] - busy_s[low] > limit_s:
                break
            stop += 1
        if stop == start:
            return ()
        counts.append(stop - start)
        start = stop
    return tuple(counts) if start == costs.blocks else ()


def speeds(costs: StageCosts) -> tuple[float, ...]:
    """Return the speed S_i of every pipeline stage, in steps per second.

    S_i is the speed of a job with a uniform partition whose stages are all like stage i. Messages
    between its stages take no time.
    """
    count = costs.stages
    free_transfer = ((0.0,) * len(costs.repeats),) * count
    stages = list(zip(costs.forward_s, costs.backward_s, costs.reduction_s, costs.latency_s))
    speed_of = {}  # costs of a stage -> its speed, computed once for equal stages
    for stage in dict.fromkeys(stages):
        forward_s, backward_s, reduction_s, latency_s = stage
        # The costs of the job whose stages are all like this one.
        equal_stages = replace(
            costs,
            forward_s=(forward_s,) * count,
            backward_s=(backward_s,) * count,
            transfer_s=free_transfer,
            reduction_s=(reduction_s,) * count,
            latency_s=(latency_s,) * count,
            tied_s=0.0,
        )
        step_s = estimate(equal_stages, uniform(costs.blocks, count)).step_s
        speed_of[stage] = 1 / max(step_s, _SHORTEST_S)
    return tuple(speed_of[stage] for stage in stages)


def by_speed(layers: int, speed: Sequence[float], alpha: float = 1.0) -> Split:
    """Return the split in which stages have layers in proportion to their speed, each at least 1.

    Stage i gets floor(alpha N S_i / sum of S) of N layers (Holmes, arXiv 2312.03549). Each layer that is
    left goes to the stage that lost most by rounding; layers that are too many come from the slowest
    stages.

    Args:
        layers: Number of layers.
        speed: Speed of each stage, in steps per second.
        alpha: Factor of the paper's formula.

    Raises:
        HolmesError: There are fewer layers than stages, or a speed or alpha is not above 0.
    """
    stages = len(speed)
    uniform(layers, stages)  # raises the error for too few layers
    for stage, value in enumerate(speed):
        if not 0 < value < inf:
            raise HolmesError(f"stage {stage}: a speed of {value}; it must be above 0, and finite")
    if not 0 < alpha < inf:
        raise HolmesError(
            f"alpha is {alpha}; it must be above 0, and finite (the paper: 1 to 1.05)"
        )
    shares = [alpha * layers * value / sum(speed) for value in speed]  # not whole numbers

    # Layers of each stage. They need not sum to `layers` yet.
    counts = [min(layers, max(1, floor(share + _SHARE_ROUNDING))) for share in shares]

    def missing(stage: int) -> float:
        """Return the part of a layer that the stage lost by rounding; rounded, so that ties stay ties."""
        return round(shares[stage] - counts[stage], 9)

    def sort_key(stage: int) -> tuple[float, int, int]:
        """Return a key that is smallest for the stage that gives up a layer next.

        This is the slowest stage. Of equally slow stages, it is that with most layers, then the last.
        """
        return (speed[stage], -counts[stage], -stage)

    while sum(counts) < layers:
        neediest = max(range(stages), key=missing)
        counts[neediest] += 1
    while sum(counts) > layers:
        with_several = [stage for stage in range(stages) if counts[stage] > 1]
        giver = min(with_several, key=sort_key)
        counts[giver] -= 1
    return tuple(counts)


def improved(
    split: Split,
    seconds_of: Callable[[Split], float],
    moves_of: Callable[[Split], Iterable[Move]],
    tries: int,
) -> Split:
    """Return `split` after moving single blocks between stages, as long as that makes the step shorter.

    Args:
        split: Split to begin with.
        seconds_of: Returns the step time of a split; inf if it does not fit the memory.
        moves_of: Returns the moves to try for a split, the most promising first.
        tries: Largest number of moves to try.
    """
    best = split
    best_s = seconds_of(split)
    is_improved = True
    while is_improved and tries > 0:
        is_improved = False
        # The moves are those of the split at the beginning of the round, although `best` changes within it.
        for giver, taker in list(moves_of(best))[:tries]:
            tries -= 1
            if best[giver] == 1:
                continue  # every stage keeps a block
            moved = _moved(best, giver, taker)
            moved_s = seconds_of(moved)
            if moved_s < best_s * (1 - ROUNDING):
                best = moved
                best_s = moved_s
                is_improved = True
    return best


def _moved(split: Split, giver: int, taker: int) -> Split:
    """Return the split of the layers after moving a block from stage `giver` to stage `taker`."""
    counts = list(split)
    counts[giver] -= 1
    counts[taker] += 1
    return tuple(counts)


def _over_borders(split: Split) -> Iterator[Move]:
    """Yield moves of a block between neighbouring stages, in both directions: (giving, taking stage)."""
    for stage in range(len(split) - 1):
        yield (stage + 1, stage)
        yield (stage, stage + 1)


def full_to_empty(work: Sequence[float]) -> Iterator[Move]:
    """Yield moves of a block from the stages with most work to those with least.

    A move is (stage that gives a block, stage that takes it). Trying all pairs of stages would take
    too long. So only the three stages with most work give a block, and the four stages with least
    work take it. The first and the last stage always give and take, and the middle stage always
    takes: their gradients may be reduced after all computation, so `work` does not show how busy
    they are.

    Args:
        work: Seconds of computation of each stage.
    """
    last = len(work) - 1
    stages = sorted(range(len(work)), key=work.__getitem__)  # least work first
    three_with_most = stages[:-4:-1]
    four_with_least = stages[:4]
    givers = dict.fromkeys((*three_with_most, 0, last))
    takers = dict.fromkeys((*four_with_least, 0, last // 2, last))
    return ((giver, taker) for giver in givers for taker in takers if giver != taker)


def _too_large(costs: StageCosts) -> str:
    """Return the error message if no split fits the memory."""
    advice = "tensor parallelism, recomputation or smaller micro-batches"
    most_blocks = []  # by stage: blocks that fit its memory
    for stage in range(costs.stages):
        count = 0
        # Every other stage needs a block, too.
        while count <= costs.blocks - costs.stages:
            used_bytes = _memory_of(costs, stage, count + 1)
            if used_bytes > costs.room_bytes[stage]:
                break
            count += 1
        if not count:
            needs = f"one layer needs {format_bytes(used_bytes + costs.working_bytes)}"
            has = f"its GPUs have {format_bytes(costs.limit_bytes[stage])}"
            return f"{costs.names[stage]}: {needs} and {has}; use more {advice}"
        most_blocks.append(count)
    total = "+".join(map(str, most_blocks))
    problem = f"no split of {counted(costs.blocks, 'layer')} fits the GPUs' memory"
    return f"{problem}: the stages hold at most {total} layers; use more stages, {advice}"


def _memory_of(costs: StageCosts, stage: int, blocks: int) -> float:
    """Return the bytes that a stage's layers need if the stage has this number of blocks.

    The first and the last stage also have the layers before and after the blocks (embedding, output).
    """
    if stage == 0:
        first_block = 0  # also selects the layers before the blocks
    elif stage == costs.stages - 1:
        first_block = costs.blocks - blocks  # also selects the layers after the blocks
    else:
        first_block = 1  # any blocks of the middle will do: all blocks are equal
    # Layers first_layer .. end_layer - 1 of the model: these blocks and the layers that belong to them.
    first_layer, end_layer = costs.bounds(first_block, first_block + blocks)
    memory = costs.sums["memory"][stage]  # bytes of the first 0, 1, 2, ... layers on this stage
    return memory[end_layer] - memory[first_layer]
