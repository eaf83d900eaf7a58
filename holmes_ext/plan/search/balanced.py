"""The split of the layers with the least predicted step: a dynamic program, exact.

With stage i's blocks a range, from the last stage to the first (f, b, x: forward, backward, transfer; R: exposed
reduction)

    tail_s = f_s + b_s + 2 x_s + tail_(s+1)                    the first micro-batch from s down and back
    V_s    = max(tail_s + R_s, f_s + x_s + V_(s+1))            the latest end of stages s..p-1, seen from s
    step   = V_0 + (micro_batches - 1) P,   P >= the average of any run of stages             (plan/cost/pipeline.py)
    M_s    = f_s + b_s - P + max(0, 2 x_s + M_(s+1)) <= 0      the same, for one P: no run that begins with s exceeds it

Where as many micro-batches are under way as hide the edges (StageCosts.hidden), runs are one stage long, and P is at
least the edges' load.

For a given bound on P a dynamic program over (stage, first block) finds the least V_0; it keeps every (V, tail, carry),
carry = max(0, 2 x + M) for the stage before, that no other beats in all. Intervals of P are then halved, those that
cannot hold a better step are dropped, and each run says up to which P its answer stays the same. A run skips what
cannot lead to a better step than the best one known: the blocks above need at least their cheapest forward (and
backward) before V (and tail), and the stages above must be able to hold them. Tied embeddings make the last stage wait
for the first: its R is kept too. "Exact" is: no other split is better by more than TOLERANCE, as long as no (stage,
first block) has more than MAX_STATES of them (benchmarks/stages_speed.py counts how often); above, half are kept for
the least V, half for the least carry, and the split found may be a little worse than the best.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import pace, uniform
from holmes_ext.plan.cost.stages import Row, StageCosts, estimate
from holmes_ext.units import format_bytes

#: Times that differ by less than this fraction are equal.
ROUNDING = 1e-12
#: The fraction of a step up to which balanced is the best.
TOLERANCE = 1e-7
#: States kept for one stage and first block.
MAX_STATES = 64

#: (V, tail, R of the last stage if tied, carry, first block of the next stage, index of its state); see the module.
State = tuple[float, float, float, float, int, int]


def balanced(costs: StageCosts) -> tuple[int, ...]:
    """The split with the least estimate(costs, split).step_s among those that fit; HolmesError when none fits."""
    outcome = estimate(costs, uniform(costs.blocks, costs.stages))
    best, split = (outcome.step_s, outcome.stage_layers) if all(outcome.fits) else (inf, None)
    more = costs.micro_batches - 1
    least = sum(costs.by_layer(_least(costs)[1]))  # of V_0
    pending = [(0.0, (best - least) / more * (1 + 1e-9) if more and best < inf else inf, least)]
    search = _Search(costs)
    while pending:
        low, high, floor_v = pending.pop()
        if low > high or low == inf or low * more + floor_v >= best * (1 - TOLERANCE):
            continue
        at = high if low == 0.0 or high == inf else (low + high) / 2
        found = search.least(at, best * (1 - TOLERANCE) - low * more)
        if found is None:
            pending.append((search.next_pace, high, floor_v))
            continue
        latest, stage_layers = found
        outcome = estimate(costs, stage_layers)
        if outcome.step_s < best:
            best, split = outcome.step_s, stage_layers
        slowest = search.pace(stage_layers)
        if at < high:
            pending.append((search.next_pace, high, floor_v))
        pending.append((max(low, 1e-300, *(costs.hidden or ())), slowest * (1 - TOLERANCE / 10), latest))
    if split is None:
        raise HolmesError(_too_big(costs))
    return split


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
    held = "+".join(map(str, most))
    what = f"no split of {costs.blocks} layers fits the GPUs' memory: the stages hold at most {held} layers"
    return f"{what}; use more stages, {advice}"


def _least(costs: StageCosts) -> tuple[Row, Row]:
    """By kind of layer, on the stage where it takes least: forward, and forward and backward."""
    kinds = list(zip(zip(*costs.forward_s), zip(*costs.backward_s)))
    return tuple(min(forward) for forward, _ in kinds), tuple(min(map(sum, zip(*both))) for both in kinds)


class _Search:
    """The dynamic program for one bound on P after the other. next_pace: the least P above the last bound that allows
    more; exact: no state was dropped for there being too many."""

    def __init__(self, costs: StageCosts):
        self.costs = costs
        self.tied = costs.tied_wait_s
        self.next_pace = inf
        self.exact = True
        forward, both = _least(costs)
        self._ahead = list(accumulate(costs.by_layer(forward), initial=0.0))  # of the layers below this one, at least
        self._round = list(accumulate(costs.by_layer(both), initial=0.0))
        blocks = range(costs.blocks)
        self._low = [costs.bounds(start, start + 1)[0] for start in blocks]  # by first block
        self._high = [0, *(costs.bounds(last, last + 1)[1] for last in blocks)]  # by the block after the last

    def pace(self, stage_layers: Sequence[int]) -> float:
        """P of a split."""
        outcome = estimate(self.costs, stage_layers)
        busy = [seconds / self.costs.micro_batches for seconds in outcome.compute_s]
        return pace(busy, outcome.transfer_s) if self.costs.hidden is None else max((*busy, *self.costs.hidden))

    def least(self, bound: float, cap: float = inf) -> tuple[float, tuple[int, ...]] | None:
        """The least V_0 and its split among splits with P <= bound and V_0 < cap; None when there is none."""
        costs, self.next_pace = self.costs, inf
        bound *= 1 + ROUNDING
        below: dict[int, list[State]] = {costs.blocks: [(-inf, 0.0, 0.0, 0.0, -1, -1)]}
        table = []
        held = self._held(bound)
        for stage in reversed(range(costs.stages)):
            below = self._stage(stage, below, bound, cap, held[stage])
            table.append(below)
        states = below.get(0, [])
        if not states:
            return None
        ends = [max(latest, tail + self.tied + last) if self.tied else latest for latest, tail, last, *_ in states]
        index = ends.index(min(ends))
        found, start, latest = [], 0, ends[index]
        for level in reversed(table):
            *_, stop, following = level[start][index]
            found.append(stop - start)
            start, index = stop, following
        return latest, tuple(found)

    def _held(self, bound: float) -> list[int]:
        """For each stage, how many blocks the stages before it can hold at most."""
        costs, held = self.costs, [0]
        for stage in range(costs.stages - 1):
            forward, backward, memory = (costs.sums[name][stage] for name in ("forward_s", "backward_s", "memory"))
            low, stop = costs.bounds(held[-1], held[-1] + 1)[0], held[-1]
            while stop < costs.blocks - (costs.stages - stage - 1):
                high = costs.bounds(held[-1], stop + 1)[1]
                busy = forward[high] - forward[low] + backward[high] - backward[low]
                if busy > bound:
                    self.next_pace = min(self.next_pace, busy)
                    break
                if memory[high] - memory[low] > costs.room_bytes[stage]:
                    break
                stop += 1
            held.append(stop)
        return held

    def _stage(
        self, stage: int, below: dict[int, list[State]], bound: float, cap: float, held: int
    ) -> dict[int, list[State]]:
        """States of `stage` by its first block, from those of the next stage by theirs."""
        costs = self.costs
        forward, backward = costs.sums["forward_s"][stage], costs.sums["backward_s"][stage]
        reduction, memory = costs.sums["reduction_s"][stage], costs.sums["memory"][stage]
        transfer, latency, room_bytes = costs.transfer[stage], costs.latency_s[stage], costs.room_bytes[stage]
        first, last = stage == 0, stage == costs.stages - 1
        alone = first or costs.hidden is not None
        share, tied = costs.stages - stage, self.tied
        behind = costs.transfer[stage - 1]
        stops = sorted(below)
        found = {}
        for start in (0,) if first else range(stage, min(held, stops[-1] - 1) + 1) if stops else ():
            low, options = self._low[start], []
            scanned, peak, base = low, -inf, reduction[low] - backward[low]
            before_s, before_round_s = self._ahead[low], self._round[low]
            for stop in stops[bisect_right(stops, start) :]:
                high = self._high[stop]
                ahead, back = forward[high] - forward[low], backward[high] - backward[low]
                if memory[high] - memory[low] > room_bytes:
                    break
                if ahead + back > bound:
                    self.next_pace = min(self.next_pace, ahead + back)
                    break
                if costs.overlap:
                    while scanned < high:
                        peak = max(peak, reduction[scanned + 1] - backward[scanned])
                        scanned += 1
                    exposed = peak - base + latency
                else:
                    exposed = reduction[high] - reduction[low] + latency
                hop = 0.0 if last else transfer[high - 1]
                busy, there, both = ahead + back, ahead + hop, ahead + back + 2 * hop
                waited, room, link = exposed + (tied if first else 0.0), busy - bound, 2 * behind[low - 1]
                for index, (latest, tail, kept, carry, _, _) in enumerate(below[stop]):
                    tail += both
                    if tail + before_round_s > cap:
                        continue
                    latest, own = there + latest, tail + waited
                    if own > latest:
                        latest = own
                    if latest + before_s > cap:
                        continue
                    excess = room + carry
                    if excess > 0:  # a run is at most `share` stages long
                        self.next_pace = min(self.next_pace, bound + excess / share)
                        continue
                    carry = 0.0 if alone else max(0.0, excess + link)
                    options.append((latest, tail, exposed if tied and last else kept, carry, stop, index))
            if options:
                found[start] = self._unbeaten(options, bound)
        return found

    def _unbeaten(self, options: list[State], bound: float) -> list[State]:
        """Those that no other equals or beats in all four numbers (up to rounding). Carries shrink as P grows, each in
        its own way: one that is above 0 beats another for this bound only."""
        if len(options) == 1:
            return options
        options.sort()
        kept: list[State] = []
        for option in options:
            tail, last, carry = option[1] * (1 + ROUNDING), option[2] * (1 + ROUNDING), option[3] + bound * ROUNDING
            for other in kept:
                if other[1] <= tail and other[2] <= last and other[3] <= carry:
                    if other[3] > 0:
                        self.next_pace = min(self.next_pace, bound * (1 + TOLERANCE / 10))
                    break
            else:
                kept.append(option)
        if len(kept) > MAX_STATES:
            self.exact = False
            half = MAX_STATES // 2
            kept = kept[:half] + sorted(kept[half:], key=lambda state: state[3])[:half]
        return kept
