"""Every order of clusters of equal size where the network between them is not flat: best first (Hart, Nilsson
and Raphael 1968), by what their links leave.

    (a)(b)(c)...     a chain of groups of clusters begun: its links' messages on the way down and up, the
                     micro-batches over its slowest link; of the borders to come the best link; for chains of
                     single clusters what the first stage does last, too

An order that could be below the best step known is bounded as a placement (least.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, count
from math import inf

from holmes_ext.plan.arrange.orders import Groups, Orders
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.bound.least import StepLowerBound
from holmes_ext.planner.bound.shape import best_links, rates_between

#: Begun orders that are looked at, and placements that are bounded, at most.
LOOKED, BOUNDED = 6000, 1000
#: Clusters below which orders are listed anyhow.
FEWEST = 3


class OrderBounds:
    """Of complete sizes. bound_of: a placement's; ring_bits: of all gradients (ShapeBound). Chains of single
    clusters have whole stages."""

    def __init__(
        self,
        orders: Orders,
        sizes: Sizes,
        bound_of: Callable[[Placement], StepLowerBound],
        ring_bits: float,
    ):
        self.orders, self.sizes, self.bound_of, self.ring_bits = orders, sizes, bound_of, ring_bits
        self.rate = rates_between(orders.network)
        self.tree = best_links(orders.network)[0]
        self.every = orders.every
        self.message: dict[tuple[int, int], tuple[float, float]] = {}
        self.tied: dict[tuple[int, int], float] = {}
        self.m = 0
        self.left = [inf] * len(self.every)
        self.fixed = 0.0
        for first in self.every:
            rest = [(first + more) % len(self.every) for more in self.every[1:]]
            for at, last in enumerate(rest):  # each other one is second once, and last once
                self._look((first, *rest[at + 1 :], *rest[:at], last))

    @staticmethod
    def known(orders: Orders, sizes: Sizes) -> bool:
        """Whether there is anything to look at that these bounds know."""
        ranks = {nodes * orders.network.processes for nodes in orders.nodes}
        size = orders.network.world // sizes.pipeline
        many = len(orders.every) >= FEWEST and sizes.pipeline > 1
        return bool(orders.network.wan) and many and len(ranks) == 1 and not ranks.pop() % size

    def _look(self, chain: Sequence[int]) -> None:
        """What a chain of single clusters says of its links and of its ends."""
        (placement,) = self.orders.made(self.sizes, tuple((kind,) for kind in chain))
        bound = self.bound_of(placement)
        per_cluster = bound.count // len(chain)
        borders = range(per_cluster - 1, bound.count - 1, per_cluster)
        for pair, border in zip(zip(chain, chain[1:]), borders):
            self.message[pair] = bound.stage_links[border], bound.flow[border]
        self.tied[chain[0], chain[-1]] = bound.tied[0]
        self.left[chain[0]] = min(self.left[chain[0]], bound.first_left() - bound.tied[0])
        self.m, work = bound.m, bound.layers * min(bound.each)
        inside = sum(bound.stage_links) - sum(bound.stage_links[border] for border in borders)
        self.fixed = min(self.fixed or inf, work + 2 * inside)

    def below(self, best: float) -> tuple[list[tuple[float, Placement]], float]:
        """(bound, placement) of those that may take less than `best`; what the others take at least."""
        result, bounded, number = [], 0, count()
        heap: list[tuple[float, int, int, Groups]] = []
        for together in self.every[1:]:
            if len(self.every) % together == 0 and len(self.every) > together:
                heap.append((0.0, next(number), together, ()))
        for _ in range(LOOKED):
            if not heap or heap[0][0] >= best or bounded == BOUNDED:
                break
            bound, _, together, groups = heapq.heappop(heap)
            if len(groups) * together == len(self.every):
                for placement in self.orders.made(self.sizes, groups):
                    bounded += 1
                    seconds = max(bound, self.bound_of(placement).seconds(best))
                    if seconds < best:
                        result.append((seconds, placement))
                continue
            for more in self._next(groups, together):
                longer = (*groups, more)
                seconds = self.seconds(longer, together)
                if seconds < best:
                    heapq.heappush(heap, (seconds, next(number), together, longer))
        return result, heap[0][0] if heap and heap[0][0] < best else inf

    def _next(self, groups: Groups, together: int) -> Iterator[tuple[int, ...]]:
        """Groups that may follow; of clusters that are alike, the first unused ones alone."""
        used = {kind for group in groups for kind in group}
        free, alike = [kind for kind in self.every if kind not in used], self.orders.alike
        for group in combinations(free, together):
            earlier = (
                kind
                for last in group
                for kind in free
                if kind < last and alike[kind] == alike[last]
            )
            if all(kind in group for kind in earlier):
                yield group

    def seconds(self, groups: Groups, together: int) -> float:
        """That no order which begins so beats."""
        borders = len(self.every) // together - 1
        to_come = borders - (len(groups) - 1)
        least_s = min(all_s for all_s, _ in self.message.values())
        least_flow = min(flow for _, flow in self.message.values())
        columns = [
            [self.message[pair] for pair in zip(column, column[1:])] for column in zip(*groups)
        ]
        flows = [flow for column in columns for _, flow in column] + [least_flow] * (to_come > 0)

        def down(column: Sequence[tuple[float, float]]) -> float:
            """With its part of what a link carries."""
            return sum(all_s - flow * (1 - 1 / together) for all_s, flow in column)

        least_s -= least_flow * (1 - 1 / together)
        once_s = max(map(down, columns)) + to_come * least_s
        through_s = once_s + (self.m - 1) * max(flows) / together
        total = once_s + through_s
        if together > 1:
            return max(total, through_s + self._reduced_s(groups, to_come, together))
        first = groups[0][0]
        lasts = (
            [groups[-1][0]]
            if not to_come
            else [kind for kind in self.every if (kind,) not in groups]
        )
        return self.fixed + total + self.left[first] + min(self.tied[first, last] for last in lasts)

    def _reduced_s(self, groups: Groups, to_come: int, together: int) -> float:
        """Each group's part of the gradients, once round its clusters: all at once at best."""
        rings = (
            min(self.rate[pair] for pair in zip(group, (*group[1:], group[0]))) for group in groups
        )
        rate_bps = sum(rings) + to_come * self.tree[together - 2]
        return self.ring_bits * 2 * (together - 1) / together / rate_bps
