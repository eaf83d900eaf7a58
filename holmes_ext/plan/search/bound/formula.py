"""What no partition of the layers can beat, for a shape under an arrangement whose blocks are alike.

w: work of a micro-batch on one stage (forward f and backward b), W its sum over the p stages, m micro-batches, x_s the
edge below stage s.

    formula    W + 2 sum x + (m - 1) pace, then exposed reductions           (plan/cost/pipeline.py, stages.py)
    bound      W + 2 sum x + max over s of ((m - 1) w_s - (u_s - 1) f_s),     u_s = min(p - s, m)

holds for every 1F1B schedule: stage s starts when the first micro-batch has come down, its first backward waits until
that one has been to the end and back, u_s forwards may come before, the other m - u_s forwards and all m backwards come
after, and the last one goes up again. As (m - 1) w - (u - 1) f >= k_s w with k_s = (m - 1) - (u_s - 1) max f/w, no
split beats W_least + Q + 2 sum x, where Q is the least for which the stages have room for all layers when k_s w_s <= Q
(and what they reduce fits under the backwards above). With v chunks a stage: m w_s + (sum of the stages above) / v + 2
sum x above, and m times what a NIC sends. Where more micro-batches are under way (StageCosts.hidden) u_s is larger by
at most the sum of ceil(2 x_t / P) over the edges below, P the least pace: so much plan/cost/pipeline.py's in_flight
adds for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil, floor, inf

from holmes_ext.plan.cost.memory import under_way
from holmes_ext.plan.cost.network_old import all_reduce
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import Rows, StageCosts, estimate
from holmes_ext.plan.search.arrangement import Ground
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.sizes import DEFAULT_ORDER

Bound = tuple[float, tuple[int, ...] | None]


class Bounds:
    """Of `costs` with one kind of blocks. Lists by stage: forward, backward, reduction of a block in seconds; extra_*:
    of what the first and the last stage have besides (embedding, output); most: blocks that the memory holds."""

    def __init__(self, costs: StageCosts):
        assert len(costs.repeats) == 3, "embedding, blocks, output"
        self.costs, self.count, self.micro_batches = costs, costs.stages, costs.micro_batches
        self.forward, self.extra_forward = _of(costs.forward_s)
        self.backward, self.extra_backward = _of(costs.backward_s)
        self.reduction, self.extra_reduction = _of(costs.reduction_s)
        self.each = [f + b for f, b in zip(self.forward, self.backward)]
        self.extra = [f + b for f, b in zip(self.extra_forward, self.extra_backward)]
        self.edges = [row[1] for row in costs.transfer_s[:-1]]
        self.most = [
            costs.blocks if room == inf else min(costs.blocks, floor((room - extra) / each * (1 + 1e-12)))
            for room, each, extra in zip(costs.room_bytes, *_of(costs.memory))
        ]

    def fits(self, split: Sequence[int]) -> bool:
        return all(layers <= most for layers, most in zip(split, self.most))

    def bound(self) -> Bound:
        """Seconds that no split beats, and the split whose slowest stage is the fastest; (inf, None) when no split
        fits."""
        if self.costs.virtual > 1:
            return self._bound_of_chunks()
        more, share = self.micro_batches - 1, 0.0
        for stage in (0, self.count - 1):
            for n in (0, 1) if self.count > 1 else (1,):
                first = self.extra_forward[stage] + n * self.forward[stage]
                share = max(share, first / (first + self.extra_backward[stage] + n * self.backward[stage] or 1.0))
        share = max([share, *(f / each for f, each in zip(self.forward, self.each))])
        begun = self.ahead()
        weights = [more - (held - 1) * share for held in begun]
        least, _ = self._room([max(weight, 0.0) for weight in weights])
        _, split = self._room([float(more or 1)] * self.count)
        if split is None:
            return inf, None
        if self.count == 1:
            return estimate(self.costs, split).step_s, split
        least = max(least, self._room_for_reductions(weights, least, 1 - share))
        fewest = sum(self.extra) + self._least_work()
        once = fewest + 2 * sum(self.edges)
        rounds = more // begun[0] + 1
        loads = self.edges if self.costs.hidden is None else self.costs.hidden
        return max(once + least, rounds * once, self.micro_batches * max(loads)), split

    def ahead(self) -> list[int]:
        """Micro-batches that no stage has more of before its first backward."""
        found = [self.count - stage for stage in range(self.count)]
        if self.costs.hidden is not None:
            pace = max((sum(self.extra) + self._least_work()) / self.count, *self.costs.hidden)
            for stage in reversed(range(self.count - 1)):
                found[stage] = found[stage + 1] + 1 + ceil(2 * self.edges[stage] / pace if pace else 0)
        return [min(held, self.micro_batches) for held in found]

    def _bound_of_chunks(self) -> Bound:
        """The bound with several chunks a stage; all stages hold the same number of layers."""
        costs, v = self.costs, self.costs.virtual
        split = uniform(costs.blocks, self.count)
        if not self.fits(split):
            return inf, None
        down, up, least = 0.0, 0.0, 0.0
        for stage, (n, (low, high)) in enumerate(zip(split, costs.ranges(split))):
            forward = n * self.forward[stage] + self.extra_forward[stage]
            backward = n * self.backward[stage] + self.extra_backward[stage]
            left = costs.exposed_s(stage, low, high)
            least = max(least, down + self.micro_batches * (forward + backward) + max(up, left))
            if stage < self.count - 1:
                down += forward / v + self.edges[stage]
                up += backward / v + self.edges[stage]
        return max(least, self.micro_batches * costs.load_s), split

    def _room_for_reductions(self, weights: Sequence[float], start: float, most_backward: float) -> float:
        """The least Q, layers being divisible, when every stage reduces what it holds after its last backward, under
        the last backwards of the stages above: weight x work + reduction <= Q + backwards and edges above, the former
        at most Q / weight x its share of work."""
        tied = self.costs.tied_wait_s
        lines = []  # n <= offset + slope x Q, twice a stage
        above, edges = 0.0, 0.0
        for stage, weight in enumerate(weights):
            if weight <= 0:
                return start
            extra, each = weight * self.extra[stage], weight * self.each[stage]
            if self.costs.overlap:
                reduce, rest = max(0.0, self.reduction[stage] - self.backward[stage]), 0.0
            else:
                reduce, rest = self.reduction[stage], self.extra_reduction[stage] + self.costs.latency_s[stage]
            rest += tied if stage in (0, self.count - 1) else 0.0
            credit = (0.0, 0.0) if tied and stage == self.count - 1 else (above, edges)
            other = (credit[1] - extra - rest) / (each + reduce), (1 + credit[0]) / (each + reduce)
            lines.append((-extra / each, 1 / each, *other, self.most[stage]))
            above += most_backward / weight
            edges += self.edges[stage] if stage < self.count - 1 else 0.0
        at = start
        for _ in range(8):  # Newton's method on a concave function, from below: every step stays below the root
            total, slope = 0.0, 0.0
            for offset, rise, other_offset, other_rise, most in lines:
                n, d = offset + rise * at, rise
                if other_offset + other_rise * at < n:
                    n, d = other_offset + other_rise * at, other_rise
                if most < n:
                    n, d = most, 0.0
                total, slope = total + n, slope + d
            if total >= self.costs.blocks * (1 - 1e-12) or slope <= 0:
                break
            at += (self.costs.blocks - total) / slope
        return at * (1 - 1e-12)

    def _least_work(self) -> float:
        """Of all blocks of one micro-batch: each stage one, the others where they are fastest and fit."""
        left, total = self.costs.blocks - self.count, sum(self.each)
        for stage in sorted(range(self.count), key=self.each.__getitem__):
            taken = min(left, self.most[stage] - 1)
            total, left = total + taken * self.each[stage], left - taken
            if not left:
                break
        return total

    def _room(self, weights: Sequence[float]) -> Bound:
        """The least Q for which all layers have room when weight x work <= Q on every stage, and the split; (inf, None)
        without room."""
        layers = self.costs.blocks
        if min(self.most) < 1 or sum(self.most) < layers:
            return inf, None
        each = [weight * seconds for weight, seconds in zip(weights, self.each)]
        base = [weight * seconds for weight, seconds in zip(weights, self.extra)]
        counts = [1] * self.count
        if all(value > 0 for value in each):
            inverse = sum(1 / value for value in each)
            start = max(0.0, (layers + sum(b / e for b, e in zip(base, each))) / inverse * (1 - 1e-9))
            counts = [max(1, min(most, floor((start - b) / e))) for most, b, e in zip(self.most, base, each)]
            while sum(counts) > layers:  # the least of one layer each was more than the share: take from the fullest
                several = (s for s in range(self.count) if counts[s] > 1)
                counts[max(several, key=lambda s: base[s] + counts[s] * each[s])] -= 1
        stages = enumerate(zip(base, counts, each))
        heap = [(b + (n + 1) * e, stage) for stage, (b, n, e) in stages if n < self.most[stage]]
        heapq.heapify(heap)
        for _ in range(layers - sum(counts)):
            _, stage = heapq.heappop(heap)
            counts[stage] += 1
            if counts[stage] < self.most[stage]:
                heapq.heappush(heap, (base[stage] + (counts[stage] + 1) * each[stage], stage))
        return max(b + n * e for b, n, e in zip(base, counts, each)), tuple(counts)


def ideal_s(ground: Ground, pricing: Pricing) -> float:
    """Seconds that no arrangement beats: each cluster's stages compute and talk inside stages as if they were
    alone, layers are divisible, activations take the fastest network, nothing is reduced; inf where no stages have
    room for the layers."""
    shape, block, layers = pricing.shape, pricing.block, pricing.portion.blocks
    size = ground.world // shape.pipeline
    prices = [pricing.stage(((index, size),), DEFAULT_ORDER) for index in ground.inside_alike]
    forward = [block.forward_flops / p.flops + p.collective_s / 2 for p in prices]
    each = [f + block.backward_flops / p.flops + p.collective_s / 2 for f, p in zip(forward, prices)]
    if not _has_room(pricing, max(price.limit_bytes for price in prices)):
        return inf
    stages = [ranks / size for ranks in ground.ranks]
    room = sum(count / seconds for count, seconds in zip(stages, each))
    m, v, edge, edges = shape.micro_batches, shape.virtual, pricing.least_edge_s(), shape.pipeline - 1
    reductions = [_least_reduction_s(pricing, index) for index in ground.inside_alike]
    if v > 1:
        own, slowest = layers / shape.pipeline, max(each) * layers / shape.pipeline
        alike = max(0.0, sum(count for count, seconds in zip(stages, each) if seconds == max(each)) - 1)
        # at most two edges at each border between clusters leave one: with many more, two neighbouring ones are on
        # one network
        both = 2 if edges // 2 > 2 * (len(stages) - 1) else 1
        # the last chunk's gradients are the first to be reduced: with the last micro-batch's backward
        late = max(0.0, m - (shape.pipeline * (v - 1) + 1) / v) * min(e - f for e, f in zip(each, forward))
        reduced = own * (m * min(forward) + late + min(reductions))
        return max(slowest * (m + alike / v) + 2 * alike * edge, m * v * both * edge, reduced)
    share = max(f / seconds for f, seconds in zip(forward, each))
    share = min(1.0, share * 1.2)  # embedding and output may have a greater one
    ahead = m if pricing.hides and edges else min(shape.pipeline, m)  # at most, whatever the edges are
    load = pricing.least_edge_s(False) if pricing.hides else edge
    weight = m - 1 - (ahead - 1) * share
    once, rounds = layers * min(each) + 2 * edges * edge, (m - 1) // ahead + 1
    # after its last backward, which may hide as much of it, a stage reduces what it holds
    alone = [m * e - (ahead - 1) * f + max(0.0, r - (e - f)) - f for f, e, r in zip(forward, each, reductions)]
    reduced = layers * min(forward) + edges * edge
    reduced += layers / sum(count / seconds for count, seconds in zip(stages, alone)) if min(alone) > 0 else 0.0
    return max(once + max(weight, 0.0) * layers / room, m * layers / room, rounds * once, m * load, reduced)


def _least_reduction_s(pricing: Pricing, index: int) -> float:
    """Seconds that a stage reduces a block's gradients at least where a cluster has a part in it, whatever part: on the
    cluster's fabric among as few as two levels leave there, or on Ethernet."""
    ground, shape, here = pricing.ground, pricing.shape, pricing._members_on_node(DEFAULT_ORDER)
    if shape.zero > 1 or pricing.stage_ranks % pricing.processes or ground.wan:
        return 0.0
    fabrics = (ground.fabric([index]), pricing.shards // len(ground.ranks)), (ground.fabric(range(len(ground.ranks))),
                                                                              pricing.shards)
    found = (all_reduce(count, fabric, pricing.processes // here).byte_s if count > here else 0.0
             for fabric, count in fabrics)
    return min(found) * pricing.portion.reduced_bytes[1] * (0.5 if shape.zero else 1.0)


def _has_room(pricing: Pricing, limit: float) -> bool:
    """Whether the stages could hold all layers if each had the largest memory, without embedding and output."""
    shape, portion = pricing.shape, pricing.portion
    if limit == inf:
        return True
    state, kept, room, layers = portion.state_bytes[1], portion.block.kept_bytes, limit - portion.working_bytes, 0
    for stage in range(shape.pipeline):
        keep = under_way(stage, shape.pipeline, shape.virtual, shape.micro_batches)
        layers += int(max(0.0, room) // (state + keep * kept))
        if layers >= portion.blocks:
            return True
    return False


def _of(rows: Rows) -> tuple[list[float], list[float]]:
    """By stage: of a block, and of what the stage has besides."""
    extra = [0.0] * len(rows)
    extra[0] += rows[0][0]
    extra[-1] += rows[-1][2]
    return [row[1] for row in rows], extra
