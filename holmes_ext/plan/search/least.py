"""What no simulated step of a shape under an arrangement beats, however its layers are split over the stages: the bound
that a search by simulated time rests on.

f, b: forward and backward of a micro-batch on one stage, w both; x: an edge there, x' as far as it holds up who sends;
u: micro-batches that a stage begins before its first backward; m: all of them. Stage s takes at least

    down to s, f_s, on and back    sum above (f + x) + f_s + sum below (w + 2 x)      until its first backward
    its own passes                 m b_s + (m - u_s) f_s
    blocked, unless edges hide     (m - u_s) (x'_s + x'_(s-1)) + (u_s - 1) x'_(s-1)    Megatron's pairs of messages
    then one of                    up again: sum above (b + x), and what stage 0 does after it
                                   its reductions that its last backward does not hide, optimizer, gathers

And whatever hides them, all activations flow over each edge, one after the other, between the first one's way there
and the last one's way on and back.

Closer, for one split (chained): the last backward of s comes after that of the stage below, whose own passes may take
longer, and after that one's NIC sent all that leaves it, down and up; then come the reductions of s.

All are linear in the layers of s, and what the other stages hold takes at least as much as the layers take where they
are cheapest. So a time T gives each stage a most number of layers, and where these are fewer than the model's, no split
takes T. What stages share is counted once: a NIC carries the messages of one kind of pipeline at a time, whatever
others do, and a link between clusters the reductions of one stage. Stages of one node must all be reduced through its
NIC after the first of their last backwards began (tests/plan/search/test_least.py: no simulated step is below).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf

from holmes_ext.plan.cost.network import FREE, WORTH, Price
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.search.arrangement import Arrangement
from holmes_ext.plan.search.bounds import Bounds, least_edges, sent_both_ways
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.sizes import PIPELINES_FIRST

#: The bounds are found up to these fractions: of each stage alone, of the chain of stages.
CLOSE, NEAR = 5e-3, 2e-4


@dataclass(frozen=True)
class _After:
    """What a stage does when its last backward begins: seconds at least, of a block and besides. reduce: its gradients'
    reductions, hidden under that backward where `hidden`; rest: optimizer and gathers."""

    reduce: tuple[float, float]
    rest: tuple[float, float]
    hidden: bool


class Least:
    """Of one shape under an arrangement. run: how it is simulated; costs of `bounds` are those of the simulation."""

    def __init__(self, pricing: Pricing, arrangement: Arrangement, bounds: Bounds, run: Execution):
        self.pricing, self.arrangement, self.bounds, self.run = pricing, arrangement, bounds, run
        self.count, self.layers, self.m = bounds.count, bounds.costs.blocks, bounds.micro_batches
        held = run.in_flight or [self.count - stage for stage in range(self.count)]
        self.ahead = [min(one, self.m) for one in held]
        found = least_edges(pricing, arrangement)
        self.edges, self.gone, self.flow = ([one[part] for one in found[:-1]] for part in range(3))
        self.around, self.sent = found[-1], sent_both_ways(pricing, arrangement)
        if run.in_flight:
            self.gone = [0.0] * len(self.gone)
        self.after = [self._after(stage) for stage in range(self.count)]
        step = pricing._step(arrangement.order)
        here = max(1, pricing.processes // step)  # stages of a node
        stages = range(self.count)
        self.together = [list(stages[low : low + here]) for low in range(0, self.count, here)] if here > 1 else []
        self.even = len({*zip(bounds.forward, bounds.backward)}) == 1
        self._lines()

    def _after(self, stage: int) -> _After:
        pricing, content, order = self.pricing, self.arrangement.contents[stage], self.arrangement.order
        portion, processes = pricing.portion, pricing.processes
        way, whole = pricing._reduction(content, order, 1)
        own = min(processes, pricing.stage_ranks)  # ranks of this stage on a node
        if order == PIPELINES_FIRST:
            step = pricing._step(order)
            own = min(processes, step * max(1, processes // (step * pricing.shape.pipeline)))
        factor = (WORTH if pricing.ground.wan else 1.0) * min(1.0, own / processes)
        if self.run.two_level != "off" and way == "flat" and len(content) > 1:
            whole = FREE  # a simulation sums it in two levels: not priced here
        whole = Price(factor * whole.byte_s, whole.latency_s)
        zero, weights = self.run.zero, pricing.model.activation_width / pricing.model.gradient_width
        half = whole.scaled(0.5)
        reduce = (whole, half, FREE, FREE)[zero]
        gather = Price(weights * half.byte_s, half.latency_s) if zero in (1, 2) else FREE
        if zero == 1 and self.run.gather_overlap:
            gather = FREE
        share = portion.shards if zero else 1
        seconds = [self.run.parameter_s * layer.parameters / share + gather.byte_s * size
                   for layer, size in zip(portion.layers, portion.reduced_bytes)]
        bytes_s = [reduce.byte_s * size for size in portion.reduced_bytes]
        ends = (stage == 0) * 1, (stage == self.count - 1) * 1

        def split(each: Sequence[float], fixed_s: float) -> tuple[float, float]:
            return each[1], ends[0] * each[0] + ends[1] * each[2] + fixed_s

        hidden = self.run.buckets_on(stage)
        return _After(split(bytes_s, reduce.latency_s), split(seconds, gather.latency_s), hidden)

    def _lines(self) -> None:
        """Of every stage: (seconds, seconds of a layer) of what its own layers decide, to the end of the way up, and of
        its own reductions; without what the others hold."""
        bounds, m = self.bounds, self.m
        there, back = [0.0, *accumulate(self.edges)], sum(self.edges)
        self.up: list[tuple[float, float]] = []
        self.own: list[list[tuple[float, float]]] = []
        self.starts: list[tuple[float, float]] = []  # seconds to the end of its last forward, likewise
        first = self.after[0]
        tail_s = max(0.0, sum(first.reduce) - first.hidden * (bounds.backward[0] + bounds.extra_backward[0]))
        tail_s += sum(first.rest)
        for stage in range(self.count):
            begun, above = self.ahead[stage] - 1, self.gone[stage - 1] if stage else 0.0
            below = self.gone[stage] if stage < self.count - 1 else 0.0
            blocked = (m - begun - 1) * (below + above) + begun * above
            each = (m - 1) * bounds.each[stage] - begun * bounds.forward[stage]
            fixed = (m - 1) * bounds.extra[stage] - begun * bounds.extra_forward[stage] + blocked
            self.up.append((fixed + 2 * back + tail_s, each))
            after, fixed = self.after[stage], fixed + 2 * back - there[stage]
            pairs = m - begun - 1
            way = 2 * back - there[stage] + max(0, pairs - 1) * (below + above) - bounds.extra_backward[stage]
            self.starts.append((way + pairs * bounds.extra[stage], pairs * bounds.each[stage] - bounds.backward[stage]))
            reduce, rest, hides = after.reduce, after.rest, after.hidden
            exposed = reduce[1] - hides * bounds.extra_backward[stage], reduce[0] - hides * bounds.backward[stage]
            plain = fixed + rest[1], each + rest[0]
            self.own.append([plain, (plain[0] + exposed[0], plain[1] + exposed[1])])

    def seconds(self, known: float = inf) -> float:
        """That no split beats; inf where none fits. known: beyond it nothing is asked."""
        most = self.bounds.most
        if self.run.virtual > 1:
            return self._of_chunks()
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

    def _of_chunks(self) -> float:
        """seconds of an interleaved schedule, which hides messages and splits evenly: a stage's own passes, after the
        first chunks came down, and up again or what it reduces, hidden from the first chunk's last backward on; or what
        the NICs send; or one way through the schedule (cost/pipeline.py's passes): the first micro-batch goes through
        all chunks and its last chunk back, then stage 0 has as many pairs of passes left as it has not begun, then the
        last one goes down and through all chunks back."""
        bounds, v, m = self.bounds, self.run.virtual, self.m
        down = up = least = 0.0
        split = uniform(self.layers, self.count)
        if not bounds.fits(split):
            return inf
        forward = [n * f for n, f in zip(split, bounds.forward)]
        backward = [n * b for n, b in zip(split, bounds.backward)]
        all_chunks = v * sum(self.edges) + (v - 1) * self.around[0]
        whole_back = sum(backward) + sum(bounds.extra_backward) + all_chunks
        first_back = sum(forward) + sum(bounds.extra_forward) + all_chunks + sum(self.edges)
        first_back += sum(backward[1:]) / v + bounds.extra_backward[-1]
        total, begun = m * v, (self.count - 1) * 2 + (v - 1) * self.count if m > self.count else m * v
        last = m * (forward[0] + bounds.extra_forward[0])
        if total > begun:
            last = max(last, first_back + (total - begun - 1) * (forward[0] + backward[0]) / v)
        last += sum(forward[1:]) / v + bounds.extra_forward[-1] + sum(self.edges) + whole_back
        for stage, n in enumerate(split):
            own = forward[stage] + bounds.extra_forward[stage], backward[stage] + bounds.extra_backward[stage]
            after = self.after[stage]
            (each, fixed), (rest, once) = after.reduce, after.rest
            hidden = ((v - 1) * self.count + 1) * own[1] / v if after.hidden else 0.0
            left = max(0.0, n * each + fixed - hidden) + n * rest + once
            least = max(least, down + m * sum(own) + max(up, left))
            least = max(least, last + n * rest + once + (0.0 if after.hidden else n * each + fixed))
            last -= backward[stage] / v + bounds.extra_backward[stage]
            if stage < self.count - 1:
                last -= self.edges[stage]
                down += bounds.forward[stage] * n / v + self.edges[stage]
                up += bounds.backward[stage] * n / v + self.edges[stage]
        return max(least, *(m * v * seconds for seconds in (*self.flow, *self.sent)), m * (v - 1) * self.around[2])

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
        return self._room(step_s) is not None

    def _room(self, step_s: float) -> list[int] | None:
        """The most layers of each stage in such a split."""
        most = list(self.bounds.most)
        for _ in range(2):
            before = sum(most)
            if before < self.layers:
                return None
            work = self._work(most)
            for stage in range(self.count):
                lines = [(work + self.up[stage][0], self.up[stage][1])]
                ahead = self._work(most, stage) if stage else work
                lines += [(ahead + fixed, each) for fixed, each in self.own[stage]]
                for fixed, each in lines:
                    if each > 0:
                        most[stage] = min(most[stage], floor((step_s - fixed) / each * (1 + 1e-12)))
                    elif fixed + each * most[stage] > step_s:
                        return None
                if most[stage] < 1:
                    return None
            if sum(most) == before:
                break
        good = sum(most) >= self.layers and all(self._reduced(stages, most, step_s) for stages in self.together)
        return most if good else None

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
        """A split that could take no longer; () where there is none. From the last stage up, for each number of layers
        that the stages below hold, the least moment at which the last backward of a stage can end: after its own
        passes, or that of the next stage and the edge between, or once that one's NIC has sent all."""
        if self.run.virtual > 1 or (most := self._room(step_s)) is None:
            return ()
        bounds, m, count = self.bounds, self.m, self.count
        least_f = [0.0, *accumulate(bounds.forward, min)]
        ends, choices = {0: 0.0}, []
        over, back, work, each = sum(most), 0.0, 0.0, inf  # below: edges twice, work of a layer each, and of one more
        for stage in reversed(range(count)):
            f, b, after = bounds.forward[stage], bounds.backward[stage], self.after[stage]
            extra_f, extra_b = bounds.extra_forward[stage], bounds.extra_backward[stage]
            over -= most[stage]
            above, below = self.gone[stage - 1] if stage else 0.0, self.gone[stage] if stage < count - 1 else 0.0
            begun, edge = self.ahead[stage] - 1, self.edges[stage] if stage < count - 1 else 0.0
            fixed = sum(bounds.forward[:stage]) + sum(bounds.extra_forward[:stage]) + sum(self.edges[:stage])
            fixed += work + back + (m - begun - 1) * (below + above) + begun * above
            fixed += m * (extra_f + extra_b) - begun * extra_f
            of_layer, slope = m * (f + b) - begun * f, least_f[stage]
            down = sum(bounds.forward[:stage]) + sum(bounds.extra_forward[: stage + 1]) + sum(self.edges[:stage])
            down += m * self.sent[stage] - (self.edges[stage - 1] if stage else 0.0)  # its NIC is done, an edge before
            found: dict[int, tuple[float, int, int]] = {}
            for held, end in ends.items():
                room = self.layers - held
                spare = held - (count - 1 - stage)
                more = fixed + (spare * each if spare else 0.0)
                for n in range(max(1, room - over), min(most[stage], room - stage) + 1):
                    moment = more + of_layer * n + slope * (room - n - stage)
                    if stage < count - 1:
                        moment = max(moment, end + edge + b * n + extra_b)
                    reduce = n * after.reduce[0] + after.reduce[1] - after.hidden * (b * n + extra_b)
                    if moment + max(0.0, reduce) + n * after.rest[0] + after.rest[1] <= step_s:
                        moment = max(moment, down + f * n + slope * (room - n - stage)) if self.sent[stage] else moment
                        if held + n not in found or moment < found[held + n][0]:
                            found[held + n] = moment, n, held
            ends = {held: moment for held, (moment, _, _) in found.items()}
            choices.append(found)
            work, each = work + f + b + extra_f + extra_b, min(each, f + b)
            back += 2 * (self.edges[stage - 1] if stage else 0.0)
        held, split = self.layers, []
        for found in reversed(choices):
            if held not in found:
                return ()
            _, n, held = found[held]
            split.append(n)
        return tuple(split)
