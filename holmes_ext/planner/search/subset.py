"""Search for the subset of idle nodes that trains fastest: how many nodes to take of each cluster.

The method is branch and bound:

    idle        a: 8   b: 6   c: 6                    nodes of a cluster are equal, so a subset is
                                                      a number of nodes of each cluster
    12 nodes    (8, 4, 0)  (6, 6, 0)  (0, 6, 6) ...   price: the step of the best plan on the subset
    families    (8, ?, ?)  (7, ?, ?)  ...             floor: a lower bound on the price of all subsets in
                                                      the family, "?" being any number of nodes

1. Likely subsets are priced first: clusters filled in sequence, in every order; whole stages; equal
   parts; then neighbours of the best subset, and all subsets of two clusters.
2. Then the family with the least floor is divided by the number of nodes of its next open cluster. A
   family whose floor is no better than the best price is left out: bound/nodes.py replaces its open
   clusters by ideal clusters, and better hardware never makes a step longer.
3. If no family is left, the best subset found is the best of all. If the time is over first, the
   least floor of the remaining families says how much faster another subset could be.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from itertools import count as count_from
from math import inf
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.planner.bound.nodes import Family
from holmes_ext.words import counted

#: Number of nodes of each cluster.
Counts = tuple[int, ...]
#: Most clusters that are filled in every order; of more, each pair of clusters comes first once.
MAX_ALL_ORDERS = 5
#: Shares of the remaining time for likely subsets (and again for their neighbours), and for subsets
#: of two clusters.
LIKELY_SHARE = 0.5
TWO_CLUSTERS_SHARE = 0.2
#: Steps that differ by less than this fraction are equal.
EQUAL = 1e-9
#: A gap up to this multiple of EQUAL counts as zero.
ROUNDING_ERRORS = 10
#: Clusters of a family in which fixing a single cluster leaves a single subset.
TWO_CLUSTERS = 2


@dataclass(frozen=True)
class Priced:
    """Step time of the best plan on a subset of the nodes (the subset's price)."""

    #: Step time of the best plan found, in seconds.
    step_s: float
    #: Lower bound on the step time of every plan on the subset.
    bound_s: float
    #: Plan (or other object) from which the step time was computed; the search only passes it on.
    plan: Any = None


@dataclass(frozen=True)
class Subsets:
    """Result of a search over subsets of the idle nodes.

    It has the subsets found and a lower bound on the step time of all (`bound_s`). `gap` is the
    distance between the best subset's step and this bound.
    """

    #: Subsets on which a plan fits, the fastest first.
    found: tuple[tuple[Counts, Priced], ...]
    #: Lower bound on the step time of every subset, in seconds.
    bound_s: float
    #: Every subset was priced.
    complete: bool

    @property
    def gap(self) -> float:
        """Largest fraction of the best step that another subset could save."""
        _, best = self.found[0]
        return max(0.0, 1 - self.bound_s / best.step_s)

    @property
    def proven(self) -> bool:
        """True if no subset is faster than the best, apart from rounding."""
        return self.gap <= ROUNDING_ERRORS * EQUAL


def best_subset(
    idle: Counts,
    count: int,
    price: Callable[[Counts], Priced],
    floor: Callable[[Family], float],
    *,
    unit: int = 1,
    first_equal: Sequence[int] = (),
    order: Sequence[int] = (),
    end: float = inf,
) -> Subsets:
    """Search for the `count` nodes that train fastest.

    Branch and bound: a family is all subsets with given numbers of nodes of some clusters (the
    fixed clusters); the other clusters are open. Families are divided by fixing a cluster, and those
    with a lower bound above the best step are left out.

    Args:
        idle: Idle nodes of each cluster.
        count: Number of nodes.
        price: Returns the step time of the best plan on a subset, or raises HolmesError if no plan
            fits.
        floor: Returns a lower bound on the step time of all subsets in a family, in seconds.
        unit: Number of nodes that a pipeline stage fills. Good subsets have multiples of it in each
            cluster.
        first_equal: For each cluster, the first cluster that is interchangeable with it (default:
            itself).
        order: Order in which families fix the clusters (default: as they are). Equal and slow
            clusters should come last.
        end: Moment of time.monotonic() at which to stop with the best so far.

    Raises:
        HolmesError: There are too few nodes, or no plan fits on any subset (raised by `price`).
    """
    available = sum(idle)
    if available < count or count < 1:
        raise HolmesError(
            f"{counted(count, 'node')} requested, {available} available; ask for 1 to {available}"
        )
    unit = max(1, unit)
    clusters = range(len(idle))
    search = _SubsetSearch(
        idle,
        count,
        price,
        floor,
        first_equal=first_equal or clusters,
        order=order or clusters,
        end=end,
    )

    # Good subsets first: the better the best price, the more families their floors exclude.
    search.price_all(_likely_subsets(idle, count, unit), search.moment(LIKELY_SHARE))
    search.move_nodes(unit, search.moment(LIKELY_SHARE))
    search.price_all(_of_two_clusters(idle, count), search.moment(TWO_CLUSTERS_SHARE))
    search.divide_families()
    return search.result()


class _OpenFamily(NamedTuple):
    """Set of node subsets still to examine, with a lower bound ("floor") on their step times.

    A family is all subsets of the nodes with given numbers of nodes of some clusters. The queue is
    sorted by floor, the least first.
    """

    floor_s: float
    number: int  # falls with each entry, so the newest of equal floors comes first
    family: Family


class _Found(NamedTuple):
    """Subset of the nodes on which a plan was found; the heap of them has the fastest first."""

    step_s: float
    counts: Counts
    priced: Priced


class _SubsetSearch:
    """Branch and bound search for the fastest subset of the nodes; best_subset() makes it.

    A subset is a number of nodes of each cluster, and its price the step time of the best plan on
    it. A family is all subsets with given numbers for some clusters; a lower bound on their prices
    (floor) can exclude it as a whole.
    """

    def __init__(
        self,
        idle: Counts,
        count: int,
        price: Callable[[Counts], Priced],
        floor: Callable[[Family], float],
        first_equal: Sequence[int],
        order: Sequence[int],
        end: float,
    ):
        """Begin a search over subsets of the idle nodes: no subset is priced yet.

        The queue has a single family, which contains all subsets.

        Args:
            idle: Idle nodes of each cluster.
            count: Nodes of a subset.
            price: Returns the step time of the best plan on a subset; HolmesError if none fits.
            floor: Returns a lower bound on the step time of all subsets of a family.
            first_equal: For each cluster, the first cluster that is interchangeable with it.
            order: Order in which families fix the clusters' numbers of nodes.
            end: Moment of time.monotonic() at which to stop.
        """
        self.idle = idle
        self.count = count
        self.price = price
        self.floor = floor
        self.order = order
        self.end = end
        #: Groups of interchangeable clusters, those with most idle nodes first.
        self.groups = []
        for representative in dict.fromkeys(first_equal):
            group = [index for index, first in enumerate(first_equal) if first == representative]
            self.groups.append(sorted(group, key=lambda index: -idle[index]))
        #: Subsets that were priced, whether or not a plan fits.
        self.seen: set[Counts] = set()
        #: Heap of the subsets on which a plan fits: the fastest is the first.
        self.found: list[_Found] = []
        #: Error of the last subset on which no plan fits.
        self.misfit: HolmesError | None = None
        #: A subset or family was left out because of its floor.
        self.left_out = False
        #: Floors of families with a single fixed cluster.
        self.floors: dict[Family, float] = {}
        all_open: Family = (None,) * len(idle)  # the family of all subsets

        # Of equal bounds the newest family is divided first (depth first), so numbers fall.
        self.number = count_from(0, -1)
        #: Heap of the families that are neither divided nor excluded: the least floor is the first.
        self.families = [_OpenFamily(floor(all_open), next(self.number), all_open)]

    @property
    def best_s(self) -> float:
        """Step time of the best subset of nodes so far, in seconds; inf before the first."""
        return self.found[0].step_s if self.found else inf

    @property
    def proven(self) -> bool:
        """True if no remaining family (set of subsets) can have a faster subset than the best."""
        return not self.families or self.best_s <= self.families[0].floor_s * (1 + EQUAL)

    def moment(self, share: float) -> float:
        """Return the moment of time.monotonic() when the fraction `share` of the remaining time is over."""
        if self.end == inf:  # no time limit
            return self.end
        now = time.monotonic()
        return now + share * (self.end - now)

    def is_over(self, end: float) -> bool:
        """Return whether to stop: a subset is priced, and it is proven the best or the time is over."""
        return bool(self.found) and (self.proven or time.monotonic() > end)

    def price_all(self, subsets: Iterator[Counts], end: float) -> None:
        """Compute the step time of the best plan on each of some subsets of the nodes, until `end`.

        Subsets whose lower bound ("floor") is not below the best step so far are left out.

        Args:
            subsets: Number of nodes of each cluster, for each subset.
            end: Moment of time.monotonic() at which to stop.
        """
        for counts in subsets:
            if self.is_over(end):
                return
            if self._floor_s(counts) < self.best_s * (1 - EQUAL):
                self._price(counts)
            else:
                self.left_out = True

    def divide_families(self) -> None:
        """Examine the subsets that are left, until the best is proven or the time is over.

        The family with the least floor is divided first. A family is all subsets with given numbers
        of nodes of some clusters, its floor a lower bound on their step times. Dividing it gives
        smaller families (parts), in which the number of another cluster is given. A part with a
        floor above the best step is left out; a part with a single subset is priced.
        """
        while self.families and not self.is_over(self.end):
            floor_s, _, family = heapq.heappop(self.families)
            for part in self._divide(family):
                # The time may also end between two parts, as pricing a subset takes long.
                if self.found and time.monotonic() > self.end:
                    # Some parts are not examined, so the whole family stays open.
                    self._push(floor_s, family)
                    return
                part_floor_s = max(floor_s, self._floor_s(part))
                if part_floor_s >= self.best_s * (1 - EQUAL):
                    self.left_out = True
                elif None in part:  # an open cluster: still a family
                    self._push(part_floor_s, part)
                else:
                    self._price(tuple(nodes or 0 for nodes in part))

    def _push(self, floor_s: float, family: Family) -> None:
        """Put a family (set of subsets of the nodes) into the queue, sorted by its lower bound `floor_s`."""
        heapq.heappush(self.families, _OpenFamily(floor_s, next(self.number), family))

    def _floor_s(self, family: Family) -> float:
        """Return a lower bound on the step time of every subset in a family, in seconds.

        A family is all subsets with given numbers of nodes of some clusters (the fixed clusters).
        Example: (8, 4, None) has 8 nodes of the first cluster and 4 of the second. A family with
        fewer fixed clusters contains it, so that family's bound holds, too: here those of
        (8, None, None) and (None, 4, None). Such bounds are computed once and kept. If one of them
        is not below the best step, it is returned: the family is excluded. Otherwise the family's
        own bound is computed, and the largest bound is returned.

        Args:
            family: Number of nodes of each cluster; None for an open cluster.
        """
        fixed = [index for index, nodes in enumerate(family) if nodes is not None]
        floor_s = 0.0
        # With two clusters, fixing the first leaves a single subset. That is priced instead.
        if len(family) > TWO_CLUSTERS:
            for index in fixed:
                single: list[int | None] = [None] * len(family)  # only cluster `index` is fixed
                single[index] = family[index]
                larger = tuple(single)
                if larger not in self.floors:
                    self.floors[larger] = self.floor(larger)
                floor_s = max(floor_s, self.floors[larger])
                if floor_s >= self.best_s:
                    return floor_s

        # A family with a single fixed cluster has its own bound above. A subset (no open cluster)
        # needs none: it is priced instead.
        if None in family and len(fixed) > 1:
            return max(floor_s, self.floor(family))
        return floor_s

    def _divide(self, family: Family) -> Iterator[Family]:
        """Divide a family by the number of nodes of its first open cluster, most nodes first.

        A family is all subsets with given numbers of nodes of some clusters; the others are open.
        Subsets that differ only by exchanging interchangeable clusters are equal. Of these, only the
        subset in which the earlier cluster has more nodes is yielded.

        Args:
            family: Number of nodes of each cluster; None for an open cluster.
        """
        first, *others = [index for index in self.order if family[index] is None]
        remaining = self.count - sum(nodes or 0 for nodes in family)
        most = min(self.idle[first], remaining)
        # The other open clusters must have enough nodes for the rest.
        least = max(0, remaining - sum(self.idle[index] for index in others))
        for nodes in range(most, least - 1, -1):
            part = list(family)
            part[first] = nodes
            if len(others) == 1:  # the last open cluster gets the rest
                part[others[0]] = remaining - nodes
            if all(self._never_rises([part[index] for index in group]) for group in self.groups):
                yield tuple(part)

    @staticmethod
    def _never_rises(counts: Sequence[int | None]) -> bool:
        """Return whether no number is larger than an earlier one; None is skipped."""
        fixed = [nodes for nodes in counts if nodes is not None]
        return fixed == sorted(fixed, reverse=True)

    def _price(self, counts: Counts) -> None:
        """Search for the best plan on a subset of the nodes, and keep the subset with its step time.

        The subset is added to `found`, a heap with the fastest subset first, unless no plan fits its
        memory. A subset that equals an earlier one (up to interchangeable clusters) is skipped.

        Args:
            counts: The subset, as its number of nodes in each cluster.
        """
        counts = self._canonical(counts)
        if counts in self.seen:
            return
        self.seen.add(counts)
        try:
            priced = self.price(counts)
        except HolmesError as error:
            self.misfit = error
            return
        heapq.heappush(self.found, _Found(priced.step_s, counts, priced))

    def _canonical(self, counts: Counts) -> Counts:
        """Return a representative of all subsets of the nodes that differ only in interchangeable clusters.

        Of interchangeable clusters, the cluster with most idle nodes gets the largest number of nodes
        of the subset, and so on.
        """
        result = list(counts)
        for group in self.groups:
            descending = sorted((counts[index] for index in group), reverse=True)
            for index, nodes in zip(group, descending):
                result[index] = nodes
        return tuple(result)

    def move_nodes(self, unit: int, end: float) -> None:
        """Improve the best subset by moving nodes between two clusters, as long as that helps.

        Args:
            unit: Nodes of a stage. A move takes this number of nodes, or a single one.
            end: Moment of time.monotonic() at which to stop.
        """
        while not self.is_over(end) and self.found:
            fastest = self.found[0]
            before_s = fastest.step_s
            best = fastest.counts  # nodes of each cluster
            for source, target in permutations(range(len(best)), 2):
                for nodes in dict.fromkeys((unit, 1)):  # once, if they are equal
                    is_possible = (
                        best[source] >= nodes and best[target] + nodes <= self.idle[target]
                    )
                    if is_possible and not self.is_over(end):
                        moved = list(best)
                        moved[source] -= nodes
                        moved[target] += nodes
                        self._price(tuple(moved))  # may lower best_s
            if self.best_s >= before_s:
                return

    def result(self) -> Subsets:
        """Return the subsets with their step times; raise HolmesError if no plan fits on any.

        The result is complete if every subset was priced. It is not if subsets remain, or if some
        were left out because a lower bound showed that they are no faster.
        """
        if not self.found:
            assert self.misfit is not None
            raise self.misfit
        ranked = sorted(self.found, key=lambda entry: (entry.step_s, entry.counts))
        bound_s = min(
            self.best_s,
            *(entry.priced.bound_s for entry in ranked),
            *(entry.floor_s for entry in self.families),
        )
        return Subsets(
            found=tuple((entry.counts, entry.priced) for entry in ranked),
            bound_s=bound_s,
            complete=not self.families and not self.left_out,
        )


def _likely_subsets(idle: Counts, count: int, unit: int) -> Iterator[Counts]:
    """Yield subsets of the nodes that probably have a short step, to be priced first.

    They have few clusters, or whole stages in each cluster, or equally many nodes of each of their
    clusters.

    Args:
        idle: Idle nodes of each cluster.
        count: Nodes of a subset.
        unit: Nodes of a stage.
    """
    clusters = range(len(idle))
    # Clusters filled in sequence, in every order; of many clusters, every choice of the first two.
    ordered = len(idle) if len(idle) <= MAX_ALL_ORDERS else TWO_CLUSTERS
    for order in permutations(clusters, ordered):
        others = sorted(set(clusters) - set(order), key=lambda index: -idle[index])
        for multiple in dict.fromkeys((1, unit)):
            yield _fill_clusters(idle, count, (*order, *others), multiple)

    # Equal parts of 2, 3, ... clusters.
    for size in range(2, len(idle) + 1):
        part, remainder = divmod(count, size)
        if remainder:
            continue
        for chosen in combinations(clusters, size):
            has_enough_nodes = all(idle[index] >= part for index in chosen)
            if has_enough_nodes:
                yield tuple(part if index in chosen else 0 for index in clusters)


def _fill_clusters(idle: Counts, count: int, order: Sequence[int], multiple: int) -> Counts:
    """Return a subset of `count` nodes that fills the clusters in order.

    Args:
        idle: Idle nodes of each cluster.
        count: Nodes of the subset.
        order: Indices of the clusters.
        multiple: Each cluster gets a multiple of this number of nodes; the remaining nodes are then taken
            from the first clusters that have idle nodes left.
    """
    counts = [0] * len(idle)
    remaining = count
    for index in order:
        counts[index] = min(idle[index], remaining) // multiple * multiple
        remaining -= counts[index]
    for index in order:
        nodes = min(idle[index] - counts[index], remaining)
        counts[index] += nodes
        remaining -= nodes
    return tuple(counts)


def _of_two_clusters(idle: Counts, count: int) -> Iterator[Counts]:
    """Yield every choice of `count` idle nodes from at most two clusters, as nodes of each cluster.

    Nodes of more than two clusters are seldom better.
    """
    for first, second in combinations(range(len(idle)), 2):
        least = max(0, count - idle[second])
        most = min(idle[first], count)
        for nodes in range(least, most + 1):
            counts = [0] * len(idle)
            counts[first] = nodes
            counts[second] = count - nodes
            yield tuple(counts)
