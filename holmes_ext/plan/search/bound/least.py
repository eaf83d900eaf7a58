"""What no simulated step of a shape under an arrangement beats, however its layers are split over the stages: the bound
that a search by simulated time rests on.

f, b: forward and backward of a micro-batch on one stage, w both; x: an edge there, x' as far as it holds up who sends;
u: micro-batches that a stage begins before its first backward, as the memory holds with its layers; m: all of them;
D: sum below of (w + 2 x), a micro-batch's way on and back. Stage s takes at least

    down to s                      sum above (f + x)
    its own passes                 m b + (m - u + 1) f + D, its first backward comes after that
    or, k rounds of u at the end   (m - k u + k) w + (k + 1) D: in each all go on and back; k = 1: the last ones
    blocked, unless edges hide     (m - u) (x'_s + x'_(s-1)) + (u - 1) x'_(s-1)        Megatron's pairs of messages
    then one of                    up again: sum above (b + x), and what stage 0 does after it
                                   its reductions that its last backward does not hide, then (first and last stage) the
                                   tied embedding's, then the longest optimizer and gather of all stages (megatron)

And whatever hides them, all activations flow over each edge, one after the other, between the first one's way there
and the last one's way on and back.

Closer, for one split (chained): the last backward of s comes after that of the stage below, whose own passes may take
longer, and after that one's NIC sent all that leaves it, down and up; then come the reductions of s.

All grow with the layers of s, and what the other stages hold takes at least as much as the layers take where they are
cheapest. So a time T gives each stage a most number of layers, and where these are fewer than the model's, no split
takes T. Stages of one node must all be reduced through its NIC after the first of their last backwards began
(tests/plan/search/bound/test_least.py: no simulated step is below).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, floor, inf
from typing import NamedTuple

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.search.arrangement import Arrangement
from holmes_ext.plan.search.bound.chunks import interleaved_s
from holmes_ext.plan.search.bound.formula import Bounds
from holmes_ext.plan.search.bound.stages import Stages
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.simulate.execution import Execution

#: The bounds are found up to these fractions: of each stage alone, of the chain of stages.
CLOSE, NEAR = 1e-2, 2e-4
#: Steps of the longest optimizer and gather that are looked at one by one: this part of a step, and ten times as much
#: of its own.
APART = 0.01


class _Own(NamedTuple):
    """All passes of a stage, from its first forward to the end of its last backward: seconds besides those that a
    micro-batch takes below it. alone: its own passes, which wait for that once; once, rounds_s: they wait once more,
    and `rounds` times more, as often as all micro-batches are under way that may be."""

    alone: float
    once: float
    rounds_s: float
    rounds: int

    def seconds(self, below_s: float) -> float:
        return max(self.alone + below_s, self.once + 2 * below_s, self.rounds_s + (self.rounds + 1) * below_s)


class Least(Stages):
    """Of one shape under an arrangement: see Stages."""

    def __init__(self, pricing: Pricing, arrangement: Arrangement, bounds: Bounds, run: Execution):
        super().__init__(pricing, arrangement, bounds, run)
        if run.virtual == 1:
            self._lines()

    def _lines(self) -> None:
        """Of every stage: its own passes by its number of layers; what the others take at least (one layer each) down
        to it, below it and back, and above it; and what one more layer takes there."""
        bounds, m = self.bounds, self.m
        self.there = [0.0, *accumulate(self.edges)]
        self.down = [0.0, *accumulate(map(sum, zip(bounds.forward, bounds.extra_forward)))]
        self.up = [0.0, *accumulate(map(sum, zip(bounds.backward, bounds.extra_backward)))]
        both = [0.0, *accumulate(map(sum, zip(bounds.each, bounds.extra)))]
        self.below = [both[-1] - both[stage + 1] + 2 * (self.there[-1] - self.there[stage])
                      for stage in range(self.count)]
        self.more_down, self.more_up = (
            list(accumulate(each, min, initial=inf)) for each in (bounds.forward, bounds.backward))
        self.more_below = list(accumulate(reversed(bounds.each), min, initial=inf))[-2::-1]
        self.starts: list[tuple[float, float]] = []  # seconds to the end of its last forward, without what others hold
        self.own: list[dict[int, _Own]] = [{} for _ in range(self.count)]  # by number of layers, as far as asked for
        if self.together:
            for stage in range(self.count):
                pairs, (_, blocked) = m - self.ahead[stage], self._blocked(stage)
                way = 2 * self.there[-1] - self.there[stage] + max(0, pairs - 1) * blocked
                way += pairs * bounds.extra[stage] - bounds.extra_backward[stage]
                self.starts.append((way, pairs * bounds.each[stage] - bounds.backward[stage]))
        self.levels = [(0.0, inf)]
        if self.barrier:
            groups = tuple(Counter(zip((after.rest for after in self.after), bounds.most)).items())
            levels = self.pricing.known.setdefault("levels", {})
            if groups not in levels:
                levels[groups] = self._levels(groups)
            self.levels = levels[groups]

    def _levels(self, groups: Iterable[tuple[tuple[tuple[float, float], int], int]]) -> list[tuple[float, float]]:
        """What the longest of all stages' optimizers and gathers may take: at least, and less than, in steps of APART.
        megatron sums the gradients' norm before them, so no stage begins one before the last one's gradients are
        reduced. groups: (rest, layers at most), stages that have them."""
        every = sorted({n * each + once for ((each, once), most), _ in groups for n in range(1, most + 1)})
        small = APART * self.m * self.layers / self.count * min(self.bounds.each)
        found, at = [], 0
        while at < len(every):
            above = bisect_right(every, every[at] + max(small, 10 * APART * every[at]))
            limit = every[above] if above < len(every) else inf
            if sum(count * max(0, _below(limit, *group)) for group, count in groups) >= self.layers:
                found.append((every[at], limit))
            at = above
        return found

    def _blocked(self, stage: int) -> tuple[float, float]:
        """Seconds for which a message holds it up: to the stage above, and both."""
        above = self.gone[stage - 1] if stage else 0.0
        return above, above + (self.gone[stage] if stage < self.count - 1 else 0.0)

    def _passes(self, stage: int, layers: int) -> _Own:
        """With so many layers. A stage begins as many micro-batches before its first backward as the memory holds then,
        and as 1F1B has at least."""
        if layers in self.own[stage]:
            return self.own[stage][layers]
        bounds, costs, m = self.bounds, self.bounds.costs, self.m
        ends = [kind for kind, at in ((0, 0), (2, self.count - 1)) if stage == at]
        begun, size = self.ahead[stage], layers * costs.kept_bytes[1] + sum(costs.kept_bytes[kind] for kind in ends)
        if self.run.in_flight and size and costs.room_bytes[stage] < inf:
            states = layers * costs.state_bytes[1] + sum(costs.state_bytes[kind] for kind in ends)
            holds = floor((costs.room_bytes[stage] - states) / size * (1 + 1e-12))
            begun = min(begun, max(holds, min(self.count - stage, m)))
        above, blocked = self._blocked(stage)
        forward = layers * bounds.forward[stage] + bounds.extra_forward[stage]
        both = layers * bounds.each[stage] + bounds.extra[stage]
        alone = m * both - (begun - 1) * forward + (m - begun) * blocked + (begun - 1) * above
        rounds = (m - 1) // begun

        def in_rounds(count: int) -> float:
            """A round is as many as are begun; before them are pairs of passes."""
            pairs = m - 1 - count * begun
            return (pairs + count + 1) * both + max(0, pairs - 1) * blocked

        once = in_rounds(1) if rounds else -inf
        self.own[stage][layers] = _Own(alone, once, in_rounds(rounds) if rounds > 1 else once, rounds)
        return self.own[stage][layers]

    def seconds(self, known: float = inf) -> float:
        """That no split beats; inf where none fits. known: beyond it nothing is asked."""
        most = self.bounds.most
        if self.run.virtual > 1:
            return interleaved_s(self) if self.bounds.fits(uniform(self.layers, self.count)) else inf
        if sum(most) < self.layers or min(most) < 1:
            return inf
        low = self._work(most) + 2 * sum(self.edges)
        low = max(((self.m - 1) // max(self.ahead) + 1) * low, low + (self.m - 1) * max(self.flow, default=0.0))
        low = max(low, self.m * max(self.sent))
        if low >= known or (known < inf and not self._possible(known)):
            return known
        high = min(known, 2 * low)
        while high < known and not self._possible(high):
            low, high = high, min(known, 2 * high)
        while high - low > CLOSE * low:
            middle = (low + high) / 2
            low, high = (low, middle) if self._possible(middle) else (middle, high)
        return low

    def _work(self, most: Sequence[int], from_stage: int = 0) -> float:
        """Of one micro-batch at least, with at most so many layers on each stage; the stages before from_stage forward
        only."""
        bounds = self.bounds
        if self.even:  # where one layer takes what another does
            above = min(self.layers - self.count + from_stage, sum(most[:from_stage]))
            ends = sum(bounds.extra[from_stage:]) + sum(bounds.extra_forward[:from_stage])
            return above * bounds.forward[0] + (self.layers - above) * bounds.each[0] + ends
        cost = [bounds.forward[stage] if stage < from_stage else bounds.each[stage] for stage in range(self.count)]
        total, left = sum(cost), self.layers - self.count
        total += sum(bounds.extra[from_stage:]) + sum(bounds.extra_forward[:from_stage])
        for stage in sorted(range(self.count), key=cost.__getitem__):
            taken = min(left, most[stage] - 1)
            total, left = total + taken * cost[stage], left - taken
            if not left:
                break
        return total

    def _possible(self, step_s: float) -> bool:
        """Whether some split could take no longer, as far as each stage alone knows."""
        return self._room(step_s, self.levels[0][0]) is not None

    def _room(self, step_s: float, rest_s: float, limit_s: float = inf) -> list[int] | None:
        """The most layers of each stage in such a split; rest_s, limit_s: of _levels."""
        most, held, first_s = list(self.bounds.most), 0, self._left(0, 1, rest_s)
        for stage in range(self.count):
            least = min(_below(limit_s, self.after[stage].rest, most[stage]), self.layers - self.count + 1)
            if least < 1:
                return None
            most[stage] = least
            if self._takes(stage, least, held, rest_s, first_s) > step_s:
                most[stage] = bisect_right(range(1, least), step_s,
                                           key=lambda n: self._takes(stage, n, held, rest_s, first_s))  # noqa: B023
                if not most[stage]:
                    return None
            held += most[stage]
        good = sum(most) >= self.layers and all(self._reduced(stages, most, step_s) for stages in self.together)
        return most if good else None

    def _takes(self, stage: int, layers: int, held: int, rest_s: float, first_s: float) -> float:
        """Seconds of a step at least where a stage has so many layers and those above it `held` at most; the others lie
        where they take least. first_s: of the first stage after its last backward."""
        left, below, bounds = self.layers - layers - self.count + 1, self.below[stage], self.bounds
        down, up = self.down[stage], self.up[stage]
        if left:
            own = bounds.each[stage] if self.m > 1 else bounds.forward[stage]  # at most so: fewer take no longer
            more_down, more_below = min(self.more_down[stage], own), min(self.more_below[stage], own)
            more_up = min(self.more_up[stage], own - more_down)
            if more_down + more_up <= more_below or stage == self.count - 1:
                above = min(left, held - stage) if stage < self.count - 1 else left
                down, up, below = down + above * more_down, up + above * more_up, below + (left - above) * more_below
            else:
                least = min(more_down, more_below)
                down, up = down + left * least, up + left * (more_below - least)
        end = down + self.there[stage] + self._passes(stage, layers).seconds(below)
        return max(end + self._left(stage, layers, rest_s), end + up + self.there[stage] + first_s)

    def _left(self, stage: int, layers: int, rest_s: float) -> float:
        """Seconds after its last backward at least: reductions, tied ones, all stages' norm, optimizer, gathers."""
        after, bounds = self.after[stage], self.bounds
        hidden = after.hidden * (layers * bounds.backward[stage] + bounds.extra_backward[stage])
        reduce = max(0.0, layers * after.reduce[0] + after.reduce[1] - hidden)
        return reduce + self.tied[stage] + max(rest_s, layers * after.rest[0] + after.rest[1])

    def _reduced(self, stages: Sequence[int], most: Sequence[int], step_s: float) -> bool:
        """Whether a node can reduce what its stages hold from the first of all last backwards on. Of what the stages
        could hold at most they lack `spare` layers in all, so one lacks no more than its share, and no last backward of
        any stage begins before that one's last forward is over."""
        spare = sum(most) - self.layers
        total = max(len(stages), sum(most[stage] for stage in stages) - spare)
        begun = []
        for stage in range(self.count):
            fixed, each = self.starts[stage]
            layers = max(1, most[stage] - spare // self.count)
            begun.append(self._work(most, stage) + fixed + max(0.0, each) * layers)
        return min(begun) + total * min(self.after[stage].reduce[0] for stage in stages) <= step_s

    def chained(self, low: float, known: float) -> tuple[float, tuple[int, ...]]:
        """As seconds, between `low` and `known`, with the stages' last backwards one after the other; and a split for
        which no more is known. (`known`, ()) where none is below that."""
        found = self._chain(known)
        if not found:
            return known, ()
        while known - low > NEAR * low:
            middle = (low + known) / 2
            if split := self._chain(middle):
                found, known = split, middle
            else:
                low = middle
        return low, found

    def _chain(self, step_s: float) -> tuple[int, ...]:
        """A split that could take no longer; () where there is none."""
        return next(filter(None, (self._chain_of(step_s, *level) for level in self.levels)), ())

    def _chain_of(self, step_s: float, rest_s: float, limit_s: float) -> tuple[int, ...]:
        """The same within one of _levels. From the last stage up, for each number of layers that the stages below hold,
        the least moment at which the last backward of a stage can end: after its own passes, or that of the next stage
        and the edge between, or once that one's NIC has sent all."""
        if (most := self._room(step_s, rest_s, limit_s)) is None:
            return ()
        bounds, m, count = self.bounds, self.m, self.count
        ends, choices, over = {0: 0.0}, [], sum(most)
        for stage in reversed(range(count)):
            f, b, extra_b = bounds.forward[stage], bounds.backward[stage], bounds.extra_backward[stage]
            over -= most[stage]
            edge = self.edges[stage] if stage < count - 1 else 0.0
            slope = self.more_down[stage] if stage else 0.0
            fixed, sent = self.down[stage] + self.there[stage], m * self.sent[stage]
            down = fixed + bounds.extra_forward[stage] + sent - (self.edges[stage - 1] if stage else 0.0)
            passes = [self._passes(stage, n) for n in range(most[stage] + 1)]
            after = [self._left(stage, n, rest_s) for n in range(most[stage] + 1)]
            found: dict[int, tuple[float, int, int]] = {}
            for held, end in ends.items():
                room, spare = self.layers - held, held - (count - 1 - stage)
                below = self.below[stage] + (spare * self.more_below[stage] if spare else 0.0)
                for n in range(max(1, room - over), min(most[stage], room - stage) + 1):
                    alone, once, rounds_s, rounds = passes[n]
                    more = slope * (room - n - stage)
                    moment = max(alone + below, once + 2 * below, rounds_s + (rounds + 1) * below) + fixed + more
                    if stage < count - 1:
                        moment = max(moment, end + edge + b * n + extra_b)
                    if moment + after[n] <= step_s:
                        if sent:  # its NIC is done, an edge before
                            moment = max(moment, down + f * n + more)
                        if held + n not in found or moment < found[held + n][0]:
                            found[held + n] = moment, n, held
            ends = {held: moment for held, (moment, _, _) in found.items()}
            choices.append(found)
        held, split = self.layers, []
        for found in reversed(choices):
            if held not in found:
                return ()
            _, n, held = found[held]
            split.append(n)
        return tuple(split)


def _below(limit_s: float, rest: tuple[float, float], most: int) -> int:
    """Layers, `most` at most, whose optimizer and gather take less than limit_s."""
    each, once = rest
    return min(most, ceil((limit_s - once) / each * (1 - 1e-12)) - 1) if limit_s < inf and each else most
