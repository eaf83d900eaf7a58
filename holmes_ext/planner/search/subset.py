"""Which nodes to ask for: of so many idle nodes of each cluster the count of each that trains fastest.

    idle        a: 8   b: 6   c: 6                    nodes of a cluster are alike,
                                                      so a subset is how many of each
    12 nodes    (8, 4, 0)  (6, 6, 0)  (0, 6, 6) ...   each has a price: the step of the best plan on it
    families    (8, ?, ?)  (7, ?, ?)  ...             each has a floor: ? is one
                                                      cluster with the best of b and c

Looked at first is what is mostly best: clusters filled one after the other in every order, whole stages,
equal parts; then what differs from the best by a move of nodes; all of two clusters. The rest is branch and
bound: a family is the nodes of some clusters, the others being open, and on nodes that have the best of all
open clusters and one network no step is longer (better hardware never is). The family with the least floor is
divided next; one whose floor is no better than the best subset is left out. Where no family is left the best
found is the best of all; else, when the time is over, it is so within a fraction.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from itertools import count as count_from
from math import inf
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.planner.bound.nodes import Family

#: Nodes of each cluster.
Counts = tuple[int, ...]
#: Clusters of which every order is filled; of more only those that begin with two of them.
EVERY_ORDER = 5
#: Parts of the seconds that are left: for likely subsets, for those of two clusters.
LIKELY, OF_TWO = 0.5, 0.2
#: Seconds that are equal.
EQUAL = 1e-9


@dataclass(frozen=True)
class Priced:
    """Of a subset: the best plan's step, the step that no plan on it beats, what the price came from."""

    step_s: float
    bound_s: float
    plan: Any = None


@dataclass(frozen=True)
class Subsets:
    """found: those that fit, the fastest first; bound_s: no subset is below; complete: all were looked at."""

    found: tuple[tuple[Counts, Priced], ...]
    bound_s: float
    complete: bool

    @property
    def gap(self) -> float:
        """The fraction of the best step that another subset could save at most."""
        return max(0.0, 1 - self.bound_s / self.found[0][1].step_s)

    @property
    def proven(self) -> bool:
        return self.gap <= 10 * EQUAL


def best_subset(
    idle: Counts,
    count: int,
    price: Callable[[Counts], Priced],
    floor: Callable[[Family], float],
    *,
    unit: int = 1,
    alike: Sequence[int] = (),
    order: Sequence[int] = (),
    end: float = inf,
) -> Subsets:
    """Of `count` nodes out of so many idle ones of each cluster. price: HolmesError for a subset on which
    nothing fits; floor: no step of a subset of a family is below it; unit: nodes that a stage fills; alike:
    for each cluster the first one that can stand for it, by default itself; order: of the clusters, those
    that are alike or poor last (they are open for longest), by default as they are; end: when
    time.monotonic() is past it the best so far is the answer.

    HolmesError: there are too few nodes, or nothing fits on any subset (price's own).
    """
    if sum(idle) < count or count < 1:
        raise HolmesError(
            f"{count} nodes requested, {sum(idle)} available; ask for 1 to {sum(idle)}"
        )
    unit, every = max(1, unit), range(len(idle))
    search = _Search(idle, count, price, floor, alike or every, order or every, end)
    search.look(_likely(idle, count, unit), search.share(LIKELY))
    search.improve(unit, search.share(LIKELY))
    search.look(_of_two(idle, count), search.share(OF_TWO))
    search.divide()
    return search.result()


class _Search:
    """heap: (floor, number, family) of families that are left; of equal floors the newest comes first."""

    def __init__(
        self,
        idle: Counts,
        count: int,
        price: Callable[[Counts], Priced],
        floor: Callable[[Family], float],
        alike: Sequence[int],
        order: Sequence[int],
        end: float,
    ):
        self.idle, self.count = idle, count
        self.price, self.floor = price, floor
        self.order, self.end = order, end
        groups = [
            [index for index, first in enumerate(alike) if first == kind]
            for kind in dict.fromkeys(alike)
        ]
        #: Clusters that are alike, the one with most idle nodes first.
        self.groups = [sorted(group, key=lambda index: -idle[index]) for group in groups]
        self.seen: set[Counts] = set()
        self.found: list[tuple[float, Counts, Priced]] = []
        self.trouble: HolmesError | None = None
        #: Whether a family was left out, as its floor is no better than the best.
        self.left_out = False
        self.floors: dict[Family, float] = {}
        every: Family = (None,) * len(idle)
        self.number = count_from(0, -1)
        self.heap = [(floor(every), next(self.number), every)]

    @property
    def best_s(self) -> float:
        return self.found[0][0] if self.found else inf

    @property
    def proven(self) -> bool:
        """Whether nothing that is left can be better."""
        return not self.heap or self.best_s <= self.heap[0][0] * (1 + EQUAL)

    def share(self, part: float) -> float:
        """When this part of the time that is left is over."""
        return (
            self.end if self.end == inf else time.monotonic() + part * (self.end - time.monotonic())
        )

    def over(self, end: float) -> bool:
        """Whether nothing can be better, or the time is up (one subset at least is looked at)."""
        return bool(self.found) and (self.proven or time.monotonic() > end)

    def look(self, subsets: Iterator[Counts], end: float) -> None:
        for counts in subsets:
            if self.over(end):
                return
            if self.bound(counts) < self.best_s * (1 - EQUAL):
                self.one(counts)
            else:
                self.left_out = True

    def divide(self) -> None:
        """Branch and bound over what is left, the least floor first."""
        while self.heap and not self.over(self.end):
            floor_s, _, family = heapq.heappop(self.heap)
            for part in self.parts(family):
                if self.found and time.monotonic() > self.end:
                    return self.keep(floor_s, family)  # the rest of it was not looked at
                part_s = max(floor_s, self.bound(part))
                if part_s >= self.best_s * (1 - EQUAL):
                    self.left_out = True
                elif None in part:
                    self.keep(part_s, part)
                else:
                    self.one(tuple(nodes or 0 for nodes in part))

    def keep(self, floor_s: float, family: Family) -> None:
        heapq.heappush(self.heap, (floor_s, next(self.number), family))

    def bound(self, family: Family) -> float:
        """The greatest floor of families that hold this one: those that fix one cluster; and its own, if that
        may leave it out."""
        fixed = [index for index, nodes in enumerate(family) if nodes is not None]
        least_s = 0.0
        for index in fixed if len(family) > 2 else ():  # of two clusters it would be one subset
            alone = tuple(nodes if index == other else None for other, nodes in enumerate(family))
            if alone not in self.floors:
                self.floors[alone] = self.floor(alone)
            least_s = max(least_s, self.floors[alone])
            if least_s >= self.best_s:
                return least_s
        return max(least_s, self.floor(family)) if None in family and len(fixed) > 1 else least_s

    def parts(self, family: Family) -> Iterator[Family]:
        """With every number of nodes of the first open cluster; of alike clusters the first has most."""
        first, *others = [index for index in self.order if family[index] is None]
        remaining = self.count - sum(nodes or 0 for nodes in family)
        least = max(0, remaining - sum(self.idle[index] for index in others))
        for nodes in range(min(self.idle[first], remaining), least - 1, -1):
            part = list(family)
            part[first] = nodes
            if len(others) == 1:
                part[others[0]] = remaining - nodes
            if all(self.falls([part[index] for index in group]) for group in self.groups):
                yield tuple(part)

    @staticmethod
    def falls(counts: Sequence[int | None]) -> bool:
        """Of clusters that are alike: whether none has more nodes than one before it."""
        known = [nodes for nodes in counts if nodes is not None]
        return known == sorted(known, reverse=True)

    def one(self, counts: Counts) -> None:
        counts = self.standing_for(counts)
        if counts in self.seen:
            return
        self.seen.add(counts)
        try:
            priced = self.price(counts)
        except HolmesError as error:
            self.trouble = error
            return
        heapq.heappush(self.found, (priced.step_s, counts, priced))

    def standing_for(self, counts: Counts) -> Counts:
        """The same with clusters that are alike in one order: the fuller ones where more nodes are idle."""
        kept = list(counts)
        for group in self.groups:
            for index, nodes in zip(
                group, sorted((counts[index] for index in group), reverse=True)
            ):
                kept[index] = nodes
        return tuple(kept)

    def improve(self, unit: int, end: float) -> None:
        """Move nodes of the best subset from one cluster to another, many at first, while that helps."""
        while not self.over(end) and self.found:
            best_s, best, _ = self.found[0]
            for giver, taker in permutations(range(len(best)), 2):
                for nodes in dict.fromkeys((unit, 1)):
                    possible = best[giver] >= nodes and best[taker] + nodes <= self.idle[taker]
                    if possible and not self.over(end):
                        moved = list(best)
                        moved[giver], moved[taker] = moved[giver] - nodes, moved[taker] + nodes
                        self.one(tuple(moved))
            if self.best_s >= best_s:
                return

    def result(self) -> Subsets:
        if not self.found:
            assert self.trouble is not None
            raise self.trouble
        ranked = sorted(self.found, key=lambda entry: entry[:2])
        bound_s = min(
            self.best_s,
            *(priced.bound_s for _, _, priced in ranked),
            *(entry[0] for entry in self.heap),
        )
        complete = not self.heap and not self.left_out
        return Subsets(tuple((counts, priced) for _, counts, priced in ranked), bound_s, complete)


def _likely(idle: Counts, count: int, unit: int) -> Iterator[Counts]:
    """Subsets that are mostly good: few clusters, whole stages in each, equal parts."""
    clusters = range(len(idle))
    for order in permutations(
        clusters, min(len(idle), EVERY_ORDER if len(idle) <= EVERY_ORDER else 2)
    ):
        rest = sorted(set(clusters) - set(order), key=lambda index: -idle[index])
        for whole in dict.fromkeys((1, unit)):
            yield from _filled(idle, count, (*order, *rest), whole)
    for size in range(2, len(idle) + 1):
        if count % size == 0:
            for chosen in combinations(clusters, size):
                if all(idle[index] >= count // size for index in chosen):
                    yield tuple(count // size if index in chosen else 0 for index in clusters)


def _filled(idle: Counts, count: int, order: Sequence[int], whole: int) -> Iterator[Counts]:
    """One cluster after the other, in multiples of `whole` nodes; the rest where there is room."""
    counts, remaining = [0] * len(idle), count
    for index in order:
        counts[index] = min(idle[index], remaining) // whole * whole
        remaining -= counts[index]
    for index in order:
        more = min(idle[index] - counts[index], remaining)
        counts[index], remaining = counts[index] + more, remaining - more
    yield tuple(counts)


def _of_two(idle: Counts, count: int) -> Iterator[Counts]:
    """Of one cluster or two: more are seldom better."""
    for first, second in combinations(range(len(idle)), 2):
        for nodes in range(max(0, count - idle[second]), min(idle[first], count) + 1):
            yield tuple(
                nodes if index == first else count - nodes if index == second else 0
                for index in range(len(idle))
            )
