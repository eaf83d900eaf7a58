"""What no simulated step of a placement beats, however its layers are split over the stages: the bound that a
search by simulated time rests on.

f, b: forward and backward of a micro-batch on one stage, w both; x: a stage link there, x' as far as
it holds up
who sends; u: micro-batches that a stage begins before its first backward, as the memory holds with its
layers; m: all of them; D: sum below of (w + 2 x), a micro-batch's way on and back. Stage s takes at least

    down to s                      sum above (f + x)
    its own passes                 m b + (m - u + 1) f + D, its first backward comes after that
    or, k rounds of u at the end   (m - k u + k) w + (k + 1) D: in each all go on and back; k = 1: the last
                                   ones
    blocked, unless stage links hide
    or nobody waits for sends      (m - u) (x'_s + x'_(s-1)) + (u - 1) x'_(s-1)        pairs of messages
    then one of                    up again: sum above (b + x), and what stage 0 does after it
                                   its reductions that its last backward does not hide, then (first and last
                                   stage) the tied embedding's, then the longest optimizer and gather of all
                                   stages (barrier)

And whatever hides them, all activations flow over each stage link, one after the other, between the
first one's way
there and the last one's way on and back. Then each stage does what it does after its last backward.

Closer, for one split (chained): the last backward of s comes after that of the stage below, whose own passes
may take longer, and after that one's NIC sent all that leaves it, down and up; then come the reductions of s.

All grow with the layers of s, and what the other stages hold takes at least as much as the layers take where
they are cheapest. So a time T gives each stage a most number of layers, and where these are fewer than the
model's, no split takes T. Stages of one node must all be reduced through its NIC after the first of their
last backwards began, and stages of the same clusters over the links between these (crossing.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, floor, inf
from typing import NamedTuple

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.placement import Placement
from holmes_ext.planner.bound.chunks import interleaved_s
from holmes_ext.planner.bound.crossing import blocks_at_most, shared_hops
from holmes_ext.planner.bound.stages import Stages
from holmes_ext.planner.simulate.execution import Execution

#: The bound is found up to this fraction.
CLOSE = 2e-3
#: Part of the layers that rounding leaves.
ALMOST = 1 - 1e-9
#: Steps of the longest optimizer and gather that are looked at one by one: this part of a step, and ten times
#: as much of its own.
APART = 0.01


class _Passes(NamedTuple):
    """A stage from its first forward to its last backward's end, without what micro-batches take below."""

    #: Its own passes, which wait once for what is below.
    alone: float
    #: They wait once more, and `rounds` times more, as often as all micro-batches are in flight that may be.
    once: float
    rounds_s: float
    rounds: int

    def seconds(self, below_s: float) -> float:
        twice, often = self.once + 2 * below_s, self.rounds_s + (self.rounds + 1) * below_s
        return max(self.alone + below_s, twice, often)


class StepLowerBound(Stages):
    """Of one placement; costs: of the simulation."""

    def __init__(self, prices: Prices, placement: Placement, costs: StageCosts, run: Execution):
        super().__init__(prices, placement, costs, run)
        self.look_at_networks()
        if run.virtual == 1:
            self._add_lines()

    def _add_lines(self) -> None:
        """What the others take at least (one layer each) down to a stage, below it, above it; and a layer
        more."""
        count, m = self.count, self.m
        self.there = [0.0, *accumulate(self.stage_links)]
        self.down = [0.0, *accumulate(map(sum, zip(self.forward, self.extra_forward)))]
        self.up = [0.0, *accumulate(map(sum, zip(self.backward, self.extra_backward)))]
        both = [0.0, *accumulate(map(sum, zip(self.each, self.extra)))]
        self.below = [
            both[-1] - both[stage + 1] + 2 * (self.there[-1] - self.there[stage])
            for stage in range(count)
        ]
        self.more_down = list(accumulate(self.forward, min, initial=inf))
        self.more_up = list(accumulate(self.backward, min, initial=inf))
        self.more_below = list(accumulate(reversed(self.each), min, initial=inf))[-2::-1]
        #: To its last backward, without its own blocks: all messages are down, and that one's gradient is up.
        down_s = self.down[-1] + (self.layers - count) * min(self.forward) + self.there[-1]
        down_s += (m - 1) * max(self.flow, default=0.0) + self.there[-1] + self.up[-1]
        self.flowed = [
            down_s - self.there[stage] - self.up[stage] - self.backward[stage]
            for stage in range(count)
        ]
        #: Seconds to the end of its last forward, without what others hold.
        self.starts: list[tuple[float, float]] = []
        #: By number of layers, as far as asked for.
        self.own: list[dict[int, _Passes]] = [{} for _ in range(count)]
        self.crossing = shared_hops(self) if self.prices.network.wan else []
        for stage in range(count) if self.together or self.crossing else ():
            pairs, (_, blocked) = m - self.ahead[stage], self._blocked(stage)
            fixed = 2 * self.there[-1] - self.there[stage] + max(0, pairs - 1) * blocked
            fixed += pairs * self.extra[stage] - self.extra_backward[stage]
            self.starts.append((fixed, pairs * self.each[stage] - self.backward[stage]))
        self.levels = [(0.0, inf)]
        if self.barrier:
            rests = (after.rest for after in self.after)
            groups = tuple(Counter(zip(rests, self.most)).items())
            known = self.prices.known
            if ("levels", groups) not in known:
                known["levels", groups] = self._levels(groups)
            self.levels = known["levels", groups]

    def _levels(
        self, groups: Iterable[tuple[tuple[tuple[float, float], int], int]]
    ) -> list[tuple[float, float]]:
        """What the longest of all stages' optimizers and gathers may take: at least, and less than, in steps
        of APART. No stage begins one before the last one's gradients are reduced. groups: (rest, layers at
        most), stages that have them."""
        rests = ((rest, most) for (rest, most), _ in groups)
        seconds = sorted(
            {n * block_s + once for (block_s, once), most in rests for n in range(1, most + 1)}
        )
        small = APART * self.m * self.layers / self.count * min(self.each)
        result, at = [], 0
        while at < len(seconds):
            above = bisect_right(seconds, seconds[at] + max(small, 10 * APART * seconds[at]))
            limit = seconds[above] if above < len(seconds) else inf
            if sum(count * max(0, _below(limit, *group)) for group, count in groups) >= self.layers:
                result.append((seconds[at], limit))
            at = above
        return result

    def _blocked(self, stage: int) -> tuple[float, float]:
        """Seconds for which a message holds it up: to the stage above, and both."""
        above = self.gone[stage - 1] if stage else 0.0
        return above, above + (self.gone[stage] if stage < self.count - 1 else 0.0)

    def _passes(self, stage: int, layers: int) -> _Passes:
        """Of so many layers, with as many micro-batches in flight as memory then holds (at least 1F1B's)."""
        if layers in self.own[stage]:
            return self.own[stage][layers]
        m, begun = self.m, self._begun(stage, layers)
        above, blocked = self._blocked(stage)
        forward = layers * self.forward[stage] + self.extra_forward[stage]
        pair_s = layers * self.each[stage] + self.extra[stage]
        alone = m * pair_s - (begun - 1) * forward + (m - begun) * blocked + (begun - 1) * above
        rounds = (m - 1) // begun

        def in_rounds(count: int) -> float:
            """A round is as many as are begun; before them are pairs of passes."""
            pairs = m - 1 - count * begun
            return (pairs + count + 1) * pair_s + max(0, pairs - 1) * blocked

        once = in_rounds(1) if rounds else -inf
        result = _Passes(alone, once, in_rounds(rounds) if rounds > 1 else once, rounds)
        self.own[stage][layers] = result
        return result

    def _begun(self, stage: int, layers: int) -> int:
        """Micro-batches before the first backward, at most."""
        costs, begun = self.costs, self.ahead[stage]
        if not self.async_stage_links or costs.room_bytes[stage] == inf:
            return begun
        ends = [kind for kind, at in ((0, 0), (2, self.count - 1)) if stage == at]
        kept = layers * costs.kept_bytes[1] + sum(costs.kept_bytes[kind] for kind in ends)
        if not kept:
            return begun
        states = layers * costs.state_bytes[1] + sum(costs.state_bytes[kind] for kind in ends)
        holds = floor((costs.room_bytes[stage] - states) / kept * (1 + 1e-12))
        return min(begun, max(holds, min(self.count - stage, self.m)))

    def seconds(self, known: float = inf) -> float:
        """That no split beats; inf where none fits. known: beyond it nothing is asked."""
        if self.run.virtual > 1:
            return interleaved_s(self) if self.fits(uniform(self.layers, self.count)) else inf
        if sum(self.most) < self.layers or min(self.most) < 1:
            return inf
        low = self._work(self.most) + 2 * sum(self.stage_links)
        rounds, flow = (self.m - 1) // max(self.ahead), max(self.flow, default=0.0)
        low = max((rounds + 1) * low, low + (self.m - 1) * flow)
        low = max(low + self.first_left(), self.m * max(self.sent))
        if low >= known or (known < inf and not self._possible(known)):
            return known
        high = min(known, 2 * low)
        while high < known and not self._possible(high):
            low, high = high, min(known, 2 * high)
        while high - low > CLOSE * low:
            middle = (low + high) / 2
            low, high = (low, middle) if self._possible(middle) else (middle, high)
        return low

    def first_left(self) -> float:
        """Seconds after the first stage's last backward at least: where a stage link's messages make a
        step long, its reductions and the tied embedding's come on top."""
        rest_s = self.levels[0][0] if self.levels else 0.0
        return min(self._left(0, layers, rest_s) for layers in range(1, self.most[0] + 1))

    def _work(self, most: Sequence[int], from_stage: int = 0) -> float:
        """Of a micro-batch at least, with `most` layers a stage at most; forward alone before from_stage."""
        ends = sum(self.extra[from_stage:]) + sum(self.extra_forward[:from_stage])
        if self.even:
            above = min(self.layers - self.count + from_stage, sum(most[:from_stage]))
            return above * self.forward[0] + (self.layers - above) * self.each[0] + ends
        cost = [*self.forward[:from_stage], *self.each[from_stage:]]
        total, remaining = sum(cost) + ends, self.layers - self.count
        for stage in sorted(range(self.count), key=cost.__getitem__):
            layers = min(remaining, most[stage] - 1)
            total, remaining = total + layers * cost[stage], remaining - layers
            if not remaining:
                break
        return total

    def _possible(self, step_s: float) -> bool:
        """Whether some split could take no longer, as far as each stage alone knows."""
        return self._room(step_s, self.levels[0][0]) is not None

    def _room(self, step_s: float, rest_s: float, limit_s: float = inf) -> list[int] | None:
        """The most layers of each stage in such a split; rest_s, limit_s: of _levels."""
        most, above, first_s = list(self.most), 0, self._left(0, 1, rest_s)
        for stage in range(self.count):
            limit = min(
                _below(limit_s, self.after[stage].rest, most[stage]), self.layers - self.count + 1
            )
            if limit < 1:
                return None
            most[stage] = limit

            def takes(layers: int) -> float:
                return self._takes(stage, layers, above, rest_s, first_s)  # noqa: B023

            if takes(limit) > step_s:
                most[stage] = bisect_right(range(1, limit), step_s, key=takes)
                if not most[stage]:
                    return None
            above += most[stage]
        good = sum(most) >= self.layers
        good = good and all(self._reduced(stages, most, step_s) for stages in self.together)
        if good and self.crossing:
            left_s, down_s = step_s - self._last_begun(most), self.there[-1]
            hop_left_s = [left_s - (down_s - self.there[max(hop.stages)]) for hop in self.crossing]
            first_s = left_s - down_s - self.tied[0] - rest_s
            good = blocks_at_most(self.crossing, most, hop_left_s, first_s) >= self.layers * ALMOST
        return most if good else None

    def _takes(self, stage: int, layers: int, above: int, rest_s: float, first_s: float) -> float:
        """Of a step at least, where a stage has so many layers, the stages above have `above` at most, and
        the rest lie where they take least. first_s: of the first stage after its last backward."""
        remaining, below = self.layers - layers - self.count + 1, self.below[stage]
        down, up = self.down[stage], self.up[stage]
        if remaining:
            layer_s = (
                self.each[stage] if self.m > 1 else self.forward[stage]
            )  # at most: fewer take no longer
            more_down = min(self.more_down[stage], layer_s)
            more_below = min(self.more_below[stage], layer_s)
            more_up = min(self.more_up[stage], layer_s - more_down)
            if more_down + more_up <= more_below or stage == self.count - 1:
                upper = min(remaining, above - stage) if stage < self.count - 1 else remaining
                down, up = down + upper * more_down, up + upper * more_up
                below += (remaining - upper) * more_below
            else:
                least = min(more_down, more_below)
                down, up = down + remaining * least, up + remaining * (more_below - least)
        end = down + self.there[stage] + self._passes(stage, layers).seconds(below)
        end = max(end, self.flowed[stage] + layers * self.backward[stage])
        back = up + self.there[stage] + first_s
        return end + max(self._left(stage, layers, rest_s), back)

    def _left(self, stage: int, layers: int, rest_s: float) -> float:
        """After its last backward at least: reductions, tied ones, all stages' norm, optimizer, gathers."""
        after = self.after[stage]
        backward = layers * self.backward[stage] + self.extra_backward[stage]
        reduce = max(0.0, layers * after.reduce[0] + after.reduce[1] - after.hidden * backward)
        return reduce + self.tied[stage] + max(rest_s, layers * after.rest[0] + after.rest[1])

    def _reduced(self, stages: Sequence[int], most: Sequence[int], step_s: float) -> bool:
        """Whether a node can reduce what its stages hold from the first of all last backwards on. Of what the
        stages could hold at most they lack `spare` layers in all, so one lacks no more than its share."""
        spare = sum(most) - self.layers
        total = max(len(stages), sum(most[stage] for stage in stages) - spare)
        least = min(self.after[stage].reduce[0] for stage in stages)
        return self._last_begun(most) + total * least <= step_s

    def _last_begun(self, most: Sequence[int]) -> float:
        """Seconds before which no stage's last backward begins: not before the stage's last forward is over,
        with as many layers as it can have or few less; nor before all messages are down."""
        spare, begun = sum(most) - self.layers, []
        for stage in range(self.count):
            fixed, block_s = self.starts[stage]
            fewest = max(1, most[stage] - spare // self.count)
            layers = fewest if block_s > 0 else most[stage]
            begun.append(self._work(most, stage) + fixed + block_s * layers)
        flow = (self.m - 1) * max(self.flow, default=0.0)
        return max(min(begun), self._work(most, self.count) + self.there[-1] + flow)


def _below(limit_s: float, rest: tuple[float, float], most: int) -> int:
    """Layers, `most` at most, whose optimizer and gather take less than limit_s."""
    block_s, once = rest
    if limit_s == inf or not block_s:
        return most
    return min(most, ceil((limit_s - once) / block_s * (1 - 1e-12)) - 1)
