"""The step of a shape under an arrangement in closed form, and what no partition of its layers can beat.

w: work of a micro-batch on one stage (forward f and backward b), W its sum over the p stages, m micro-batches, x_s the edge below stage s.

    estimate   W + 2 sum x + (m - 1) pace, then exposed reductions: plan/cost/stage_costs.py's, without building its tables
    bound      W + 2 sum x + max over s of ((m - 1) w_s - (u_s - 1) f_s),     u_s = min(p - s, m)

holds for every 1F1B schedule: stage s starts when the first micro-batch has come down, its first backward waits until that one has been to the end
and back, u_s forwards may come before, the other m - u_s forwards and all m backwards come after, and the last one goes up again. As
(m - 1) w - (u - 1) f >= k_s w with k_s = (m - 1) - (u_s - 1) max f/w, no split beats W_least + Q + 2 sum x, where Q is the least for which
the stages have room for all layers when k_s w_s <= Q (and what they reduce fits under the backwards above). With v chunks a stage: m w_s + (sum of the stages above) / v + 2 sum x above, and m times what a NIC sends.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from holmes_ext.plan.cost.memory import under_way
from holmes_ext.plan.cost.pricing import Pricing
from holmes_ext.plan.cost.step import pace
from holmes_ext.plan.search.arrangement import Arrangement


@dataclass
class Stages:
    """Numbers of every stage, lists by stage. forward, backward: seconds of a block; first_*, last_*: of what the first and last stage
    have besides (embedding, output). reduce, memory, room: seconds and bytes of a block's gradients and state, bytes for them."""

    pricing: Pricing
    arrangement: Arrangement
    overlap: bool

    def __post_init__(self):
        pricing, shape, arrangement = self.pricing, self.pricing.shape, self.arrangement
        block, embedding, output = pricing.block, pricing.embedding, pricing.output
        prices = [pricing.stage(content, arrangement.order) for content in arrangement.contents]
        count = len(prices)
        self.prices, self.count, self.layers, self.micro_batches = prices, count, pricing.model.layers, shape.micro_batches
        sharded = [pricing.sharded_s(block, p) for p in prices]
        self.forward = [block.forward_flops / p.flops + p.collective_s / 2 + more for p, (more, _) in zip(prices, sharded)]
        self.backward = [block.backward_flops / p.flops + p.collective_s / 2 + more for p, (_, more) in zip(prices, sharded)]
        self.extra_forward, self.extra_backward, self.extra_reduce, self.extra_memory = ([0.0] * count for _ in range(4))
        block_state, block_reduced = pricing.bytes_of(block), pricing.reduced_bytes(block)
        ends = ((0, embedding), (count - 1, output))
        keeps = [under_way(stage, count, shape.virtual, shape.micro_batches) for stage in range(count)]
        for stage, layer in ends:
            forward, backward = pricing.sharded_s(layer, prices[stage])
            self.extra_forward[stage] += layer.forward_flops / prices[stage].flops + forward
            self.extra_backward[stage] += layer.backward_flops / prices[stage].flops + backward
            self.extra_reduce[stage] += pricing.reduced_bytes(layer) * prices[stage].byte_s
            self.extra_memory[stage] += pricing.bytes_of(layer) + layer.kept_bytes * keeps[stage]
        self.reduce = [block_reduced * p.byte_s for p in prices]
        self.memory = [block_state + block.kept_bytes * keep for keep in keeps]
        self.room = [p.limit_bytes - pricing.working for p in prices]
        self.edges = pricing.edges(arrangement)
        self.tied_s = pricing.tied_s(arrangement)
        self.most = [
            self.layers if room == inf else min(self.layers, floor((room - extra) / each * (1 + 1e-12)))
            for room, extra, each in zip(self.room, self.extra_memory, self.memory)
        ]

    @property
    def virtual(self) -> int:
        return self.pricing.shape.virtual

    def fits(self, split: Sequence[int]) -> bool:
        return all(layers <= most for layers, most in zip(split, self.most))

    def memory_bytes(self, split: Sequence[int]) -> list[float]:
        """By stage, with what recomputation works on."""
        return [n * each + extra + self.pricing.working for n, each, extra in zip(split, self.memory, self.extra_memory)]

    def limits(self) -> list[float]:
        return [price.limit_bytes for price in self.prices]

    def bound(self) -> tuple[float, tuple[int, ...] | None]:
        """Seconds that no split beats, and the split whose slowest stage is the fastest; (inf, None) when no split fits."""
        if self.virtual > 1:
            return self._bound_of_chunks()
        more, share = self.micro_batches - 1, 0.0
        for stage in (0, self.count - 1):
            for n in (0, 1) if self.count > 1 else (1,):
                ahead = self.extra_forward[stage] + n * self.forward[stage]
                share = max(share, ahead / (ahead + self.extra_backward[stage] + n * self.backward[stage] or 1.0))
        share = max([share, *(f / (f + b) for f, b in zip(self.forward, self.backward))])
        weights = [more - (min(self.count - stage, self.micro_batches) - 1) * share for stage in range(self.count)]
        least, _ = self._room([max(weight, 0.0) for weight in weights])
        _, split = self._room([float(more or 1)] * self.count)
        if split is None:
            return inf, None
        if self.count == 1:
            return self.estimate(split), split
        least = max(least, self._room_for_reductions(weights, least, 1 - share))
        fewest = sum(self.extra_forward) + sum(self.extra_backward) + self._least_work()
        once = fewest + 2 * sum(self.edges)
        rounds = more // min(self.count, self.micro_batches) + 1
        return max(once + least, rounds * once, self.micro_batches * max(self.edges)), split

    def _bound_of_chunks(self) -> tuple[float, tuple[int, ...] | None]:
        """The bound with several chunks a stage; all stages hold the same number of layers."""
        split = (self.layers // self.count,) * self.count
        if not self.fits(split):
            return inf, None
        forward, backward = self.work(split)
        down, up, least = 0.0, 0.0, 0.0
        for stage in range(self.count):
            left = self.exposed(stage, split[stage])
            least = max(least, down + self.micro_batches * (forward[stage] + backward[stage]) + max(up, left))
            if stage < self.count - 1:
                down += forward[stage] / self.virtual + self.edges[stage]
                up += backward[stage] / self.virtual + self.edges[stage]
        return max(least, self.micro_batches * self.load_s()), split

    def load_s(self) -> float:
        """Seconds that a stage's NIC sends for one micro-batch of all chunks: v activations down, v gradients up, and at the ends v - 1 around;
        what goes to another cluster and what stays in one are different NICs."""
        v, last = self.virtual, self.count - 1
        clusters = [{index for index, _ in content} for content in self.arrangement.contents]
        loads = [{True: 0.0, False: 0.0} for _ in clusters]
        for stage, edge in enumerate(self.edges):
            across = len(clusters[stage] | clusters[stage + 1]) > 1
            loads[stage][across] += v * edge
            loads[stage + 1][across] += v * edge
        around, across = self.pricing.wrap(self.arrangement), len(clusters[0] | clusters[last]) > 1
        for stage in (0, last):
            loads[stage][across] += (v - 1) * around
        return max(max(load.values()) for load in loads)

    def _room_for_reductions(self, weights: Sequence[float], start: float, most_backward: float) -> float:
        """The least Q, layers being divisible, when every stage reduces what it holds after its last backward, under the last backwards of the
        stages above: weight x work + reduction <= Q + backwards and edges above, the former at most Q / weight x its share of work."""
        tied = self.tied_s if self.count > 1 else 0.0
        lines = []  # n <= offset + slope x Q, twice a stage
        above, edges = 0.0, 0.0
        for stage, weight in enumerate(weights):
            if weight <= 0:
                return start
            forward, backward = self.forward[stage], self.backward[stage]
            extra = weight * (self.extra_forward[stage] + self.extra_backward[stage])
            each = weight * (forward + backward)
            if self.overlap:
                reduce, rest = max(0.0, self.reduce[stage] - backward), 0.0
            else:
                reduce, rest = self.reduce[stage], self.extra_reduce[stage] + self.prices[stage].latency_s
            rest += tied if stage in (0, self.count - 1) else 0.0
            credit = (0.0, 0.0) if tied and stage == self.count - 1 else (above, edges)
            lines.append((-extra / each, 1 / each, (credit[1] - extra - rest) / (each + reduce), (1 + credit[0]) / (each + reduce), self.most[stage]))
            above += most_backward / weight
            edges += self.edges[stage] if stage < self.count - 1 else 0.0
        at = start
        for _ in range(8):  # Newton's method on a concave function, from below: every step stays below the root
            total, slope = 0.0, 0.0
            for offset, rise, other, other_rise, most in lines:
                n, d = offset + rise * at, rise
                if other + other_rise * at < n:
                    n, d = other + other_rise * at, other_rise
                if most < n:
                    n, d = most, 0.0
                total, slope = total + n, slope + d
            if total >= self.layers * (1 - 1e-12) or slope <= 0:
                break
            at += (self.layers - total) / slope
        return at * (1 - 1e-12)

    def _least_work(self) -> float:
        """Of all blocks of one micro-batch: each stage one, the others where they are fastest and fit."""
        each = [f + b for f, b in zip(self.forward, self.backward)]
        left, total = self.layers - self.count, sum(each)
        for stage in sorted(range(self.count), key=each.__getitem__):
            taken = min(left, self.most[stage] - 1)
            total, left = total + taken * each[stage], left - taken
            if not left:
                break
        return total

    def _room(self, weights: Sequence[float]) -> tuple[float, tuple[int, ...] | None]:
        """The least Q for which all layers have room when weight x work <= Q on every stage, and the split; (inf, None) without room."""
        if min(self.most) < 1 or sum(self.most) < self.layers:
            return inf, None
        each = [weight * (f + b) for weight, f, b in zip(weights, self.forward, self.backward)]
        base = [weight * (f + b) for weight, f, b in zip(weights, self.extra_forward, self.extra_backward)]
        inverse = sum(1 / value for value in each if value > 0)
        if inverse and all(value > 0 for value in each):
            start = max(0.0, (self.layers + sum(b / e for b, e in zip(base, each))) / inverse * (1 - 1e-9))
            counts = [max(1, min(most, floor((start - b) / e))) for most, b, e in zip(self.most, base, each)]
            while sum(counts) > self.layers:  # the least of one layer each was more than the share: take from the fullest
                fullest = max((s for s in range(self.count) if counts[s] > 1), key=lambda s: base[s] + counts[s] * each[s])
                counts[fullest] -= 1
        else:
            counts = [1] * self.count
        heap = [(b + (n + 1) * e, stage) for stage, (b, n, e) in enumerate(zip(base, counts, each)) if n < self.most[stage]]
        heapq.heapify(heap)
        for _ in range(self.layers - sum(counts)):
            _, stage = heapq.heappop(heap)
            counts[stage] += 1
            if counts[stage] < self.most[stage]:
                heapq.heappush(heap, (base[stage] + (counts[stage] + 1) * each[stage], stage))
        return max(b + n * e for b, n, e in zip(base, counts, each)), tuple(counts)

    def work(self, split: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of every stage's forward and backward of a micro-batch."""
        forward = [n * f + extra for n, f, extra in zip(split, self.forward, self.extra_forward)]
        return forward, [n * b + extra for n, b, extra in zip(split, self.backward, self.extra_backward)]

    def estimate(self, split: Sequence[int]) -> float:
        """Seconds of a step under `split`."""
        forward, backward = self.work(split)
        busy, v, m = [f + b for f, b in zip(forward, backward)], self.virtual, self.micro_batches
        if v > 1:
            slowest = max(max(busy), self.load_s())
            first = sum(busy) / v + 2 * sum(self.edges) + (m - 1 / v) * slowest
        else:
            first = sum(busy) + 2 * sum(self.edges) + (m - 1) * pace(busy, self.edges)
        ends, step = [first], 0.0
        for stage, edge in enumerate(self.edges):
            ends.append(ends[-1] - backward[stage] / v - edge)
        tied = self.tied_s if self.count > 1 else 0.0
        if tied:
            ends[-1] = first
        for stage, end in enumerate(ends):
            left = self.exposed(stage, split[stage]) + (tied if stage in (0, self.count - 1) else 0.0)
            step = max(step, end + left)
        return step

    def exposed(self, stage: int, layers: int) -> float:
        """Reduction that is left when the stage's last backward ends."""
        price, pricing = self.prices[stage], self.pricing
        total = self.extra_reduce[stage] + layers * self.reduce[stage]
        if not self.overlap:
            return total + price.latency_s
        parts = []  # (reduction, backward, how many) from the stage's first layer to its last
        if stage == 0:
            parts.append((pricing.reduced_bytes(pricing.embedding) * price.byte_s, pricing.embedding.backward_flops / price.flops, 1))
        parts.append((self.reduce[stage], self.backward[stage], layers))
        if stage == self.count - 1:
            parts.append((pricing.reduced_bytes(pricing.output) * price.byte_s, pricing.output.backward_flops / price.flops, 1))
        reduced, computed, worst = 0.0, 0.0, 0.0
        for reduction, backward, count in parts:
            for position in {1, count}:  # linear between
                worst = max(worst, reduced + position * reduction - computed - (position - 1) * backward)
            reduced, computed = reduced + count * reduction, computed + count * backward
        return worst + price.latency_s
