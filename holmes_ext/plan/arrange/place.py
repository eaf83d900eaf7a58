"""Order the nodes so that only stage links cross between fabrics.

    launcher: a0 b0 a1 b1     stages: [a0 b0] [a1 b1]     every data-parallel group on Ethernet
    placed:   a0 a1 b0 b1     stages: [a0 a1] [b0 b1]     each on its own fabric, one stage link on Ethernet

Nodes that are on the same fast fabrics are interchangeable: a class. A component (placement.py) without
groups that span is a component on one fabric, so such an order exists exactly when pack() finds one: it
says which fabric each node serves, where some are on several.
Among orders equally free of spanning the least predicted step wins, among equal steps the launcher's order:
a site that gains nothing is left alone.

How sure: up to `budget` orders all are tried. Above, runs of equal components are permuted, then pairs are
swapped while that helps: whether spanning can be avoided stays exact (with nodes on several fabrics: by
whole components), and the step is never longer than the launcher's where that spans no less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, permutations
from typing import TypeVar

from holmes_ext.plan.across import best_order
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.engine import FLAT, HIERARCHICAL
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes

#: Steps of pack()'s search at most.
PACK_BUDGET = 150_000
#: (fabric, class of nodes, how many of them).
Gift = tuple[str, int, int]


def pack(
    counts: Mapping[int, int], homes: Mapping[int, Sequence[str]], size: int
) -> list[tuple[int, ...]] | None:
    """Components of `size` nodes, each sharing a fabric; None where there is no such packing. counts: nodes
    of each class; homes: fabrics that a class can serve, one at least.

    Whether it fits depends on numbers modulo `size` only, so the search goes over the classes, and its state
    is what each fabric that can still get nodes has beyond whole components. The parts come in the order of
    classes. Where most nodes are on three fast fabrics or more the states can be too many; then only
    PACK_BUDGET steps are looked at.
    """
    if size == 1:
        return [(number,) for number, count in counts.items() for _ in range(count)]
    states: dict[frozenset[tuple[str, int]], tuple[Gift, ...]] = {frozenset(): ()}
    waiting = list(counts)
    while waiting:
        number = waiting.pop(0)
        later = {home for other in waiting for home in homes[other]}
        states = _next(
            states, number, counts[number], homes[number], later, size, PACK_BUDGET // len(counts)
        )
    if not states:
        return None
    nodes: dict[str, list[int]] = {}
    for home, number, share in states[frozenset()]:
        nodes.setdefault(home, []).extend([number] * share)
    position = {number: place for place, number in enumerate(counts)}
    parts = [
        tuple(line[at : at + size]) for line in nodes.values() for at in range(0, len(line), size)
    ]
    return sorted(parts, key=lambda part: [position[number] for number in part])


def _next(
    states: Mapping[frozenset[tuple[str, int]], tuple[Gift, ...]],
    number: int,
    count: int,
    homes: Sequence[str],
    later: set[str],
    size: int,
    most: int,
) -> dict[frozenset[tuple[str, int]], tuple[Gift, ...]]:
    """States with one class more."""
    result: dict[frozenset[tuple[str, int]], tuple[Gift, ...]] = {}
    steps = ((rests, shares) for rests in states for shares in _shares(count, len(homes), size))
    for rests, shares in islice(steps, most):
        now = dict(rests)
        for home, share in zip(homes, shares):
            now[home] = (now.get(home, 0) + share) % size
        open_rests = frozenset((home, rest) for home, rest in now.items() if rest)
        if open_rests not in result and all(home in later for home, _ in open_rests):
            gifts = tuple((home, number, share) for home, share in zip(homes, shares) if share)
            result[open_rests] = states[rests] + gifts
    return result


def _shares(count: int, homes: int, size: int) -> Iterator[tuple[int, ...]]:
    """Ways to share nodes among fabrics that differ modulo `size`; whole components stay with the first."""
    if homes == 1:
        yield (count,)
        return
    for last in range(min(count, size - 1) + 1):
        for rest in _shares(count - last, homes - 1, size):
            yield (*rest, last)


T = TypeVar("T")
#: Classes of the nodes of a component.
Part = tuple[int, ...]
#: Work of a search: ranks of components that are looked at anew, stages whose known costs are added up.
RANK_BUDGET = 30_000
STAGE_BUDGET = 4_000
#: Runs of equal components up to which chains over good links are looked for.
MOST_CHAINED = 64
#: A swap that gains less than this fraction of a step is not worth a less orderly placement.
SWAP_GAIN = 1e-3
#: Fraction up to which times are equal.
ROUNDING = 1e-9
#: Ways to mix what is left of the classes.
MIXTURES = 24


def place(prices: Prices, sizes: Sizes, budget: int | None = None) -> Placement:
    """The order of the nodes for complete sizes. budget: orders tried (default: about half a second's)."""
    search = _Search(prices, sizes)
    search.run(budget)
    unused: dict[int, list[str]] = {}
    for name, number in reversed(search.class_of.items()):
        unused.setdefault(number, []).append(name)
    names = [unused[number].pop() for number in search.placement(search.best).kinds()]
    return prices.network.placement(names, sizes)


def fastest_first(network: Network) -> tuple[str, ...]:
    """For sizes that nobody knows yet: each cluster's nodes together, the fastest fabric first. Nothing
    spans where stages divide the clusters, and the slowest reduction comes last."""
    classes: dict[int, list[str]] = {}
    for name, number in classes_of(network).items():
        classes.setdefault(number, []).append(name)
    ordered = sorted(classes, key=lambda number: -network.fabric([number]).rate_bps)
    if network.wan:
        clusters = list(dict.fromkeys(map(network.cluster, ordered)))
        by_cluster = _chain(network, clusters)
        return tuple(
            node.name
            for cluster in by_cluster
            for node in network.site.nodes
            if node.cluster == cluster
        )
    return tuple(name for number in ordered for name in classes[number])


def classes_of(network: Network) -> dict[str, int]:
    """Node -> the first kind that it is interchangeable with."""
    first: dict[object, int] = {}
    result = {}
    for name, kind in network.kind_of.items():
        look = tuple(network.homes(kind)), network.cluster(kind) if network.wan else ""
        result[name] = first.setdefault(look, kind)
    return result


def _chain(network: Network, clusters: Sequence[str]) -> list[str]:
    """Those with good links next to each other, begun at the end that stood nearer to the front."""
    order = list(best_order(clusters, network.wan.cost))
    return order if clusters.index(order[0]) < clusters.index(order[-1]) else order[::-1]


class _Search:
    """best: the order found, as classes by component; at first the launcher's."""

    def __init__(self, prices: Prices, sizes: Sizes):
        self.prices, self.sizes, self.network = prices, sizes, prices.network
        self.flat = Prices(prices.network, prices.job, replace(prices.rules, reductions=(FLAT,)))
        self.class_of = classes_of(prices.network)
        launcher = tuple(self.class_of.values())
        self.counts = Counter(launcher)
        first = Placement.of(sizes, self.network.processes, launcher)
        self.components = first.components
        self.work = first.stage_ranks * first.tied * len(self.components)
        self.best = self.cut(launcher)
        self.score = self.score_of(self.best)

    def cut(self, order: Sequence[int]) -> tuple[Part, ...]:
        """Classes by slot as those of each component."""
        return tuple(tuple(order[slot] for slot in slots) for slots in self.components)

    def placement(self, parts: Sequence[Part]) -> Placement:
        """Of components; those of few are a job of as many."""
        sizes = self.sizes
        if len(parts) < len(self.components):
            sizes = replace(sizes, pipeline=len(parts) * sizes.pipeline // len(self.components))
        return Placement.of_parts(sizes, self.network.processes, parts)

    def score_of(self, parts: Sequence[Part]) -> tuple[bool, float, float]:
        """Whether it spans; seconds of the step, and of one with rings only (small sums)."""
        placement = self.placement(parts)
        step_s = flat_s = self.prices.step_s(placement)
        if any(reduction.name == HIERARCHICAL for reduction in self.prices.reductions(placement)):
            flat_s = self.flat.step_s(placement)
        return self.prices.spans_networks(placement), step_s, flat_s

    def offer(self, parts: Sequence[Part], gain: float = ROUNDING) -> bool:
        """Take it if it spans less, or no more and is faster by more than the fraction `gain`."""
        score = self.score_of(parts)
        better = score[0] < self.score[0]
        compared = zip(score[1:], self.score[1:]) if score[0] == self.score[0] else ()
        for seconds, known in compared:
            better = seconds < known * (1 - gain)
            if better or seconds > known * (1 + ROUNDING):
                break
        if better:
            self.best, self.score = tuple(parts), score
        return better

    def swapped(self, parts: Sequence[Part]) -> bool:
        return self.offer(parts, SWAP_GAIN)

    def run(self, budget: int | None) -> None:
        if len(self.counts) == 1:
            return
        fresh = budget or max(4, RANK_BUDGET // self.work)
        known = budget or max(50, STAGE_BUDGET // self.sizes.pipeline)
        size = len(self.components[0])
        fabrics = {number: self.network.homes(number) for number in self.counts}
        packed = pack(self.counts, fabrics, size)
        several = any(len(fabric) > 1 for fabric in fabrics.values())
        if (packed is None or several) and order_count(self.counts) <= fresh:
            for order in distinct_orders(self.counts):
                self.offer(self.cut(order))
        elif packed is not None:
            self.arrange(packed, known)
        elif self.network.wan:
            self.line_up(size, fresh)
        else:
            mixture_count = min(MIXTURES, max(2, fresh // 2))
            mixtures = list(islice(_with_leftovers(self.counts, size), mixture_count))
            for parts in mixtures:
                self.arrange(parts, min(known, fresh) // len(mixtures))
            _swap(
                self.placement(self.best).kinds(),
                lambda order: self.swapped(self.cut(order)),
                fresh,
            )

    def line_up(self, size: int, limit: int) -> None:
        """Where clusters do not fill components: all nodes of one cluster after the other."""
        of_cluster: dict[str, list[int]] = {}
        for number in self.counts:
            of_cluster.setdefault(self.network.cluster(number), []).append(number)

        def parts(clusters: Sequence[str]) -> tuple[Part, ...]:
            numbers = [number for name in clusters for number in of_cluster[name]]
            line = [number for number in numbers for _ in range(self.counts[number])]
            return tuple(tuple(line[at : at + size]) for at in range(0, len(line), size))

        chain = _chain(self.network, list(of_cluster))
        self.offer(parts(chain))
        _swap(chain, lambda clusters: self.swapped(parts(clusters)), limit)

    def arrange(self, parts: Sequence[Part], limit: int) -> None:
        """Orders of these components: all if they are few, else runs of equal ones permuted, then swaps."""
        counts = Counter(parts)
        if order_count(counts) <= limit:
            for order in distinct_orders(counts):
                self.offer(order)
            return

        def line(runs: Sequence[Part]) -> tuple[Part, ...]:
            return tuple(part for part in runs for _ in range(counts[part]))

        runs, few = list(counts), math.factorial(len(counts)) <= limit // 2
        if few:
            for order in permutations(runs):
                self.offer(line(order))
        else:
            self.offer(line(runs))
            runs.sort(key=self._reduction_s)
            self.offer(line(runs))
        if self.network.wan and 2 < len(runs) <= MOST_CHAINED:
            for chain in self._chains(runs):
                self.offer(line(chain))
            runs = list(dict.fromkeys(self.best))
        if not few:
            _swap(runs, lambda order: self.swapped(line(order)), limit // 4)
        _swap(self.best, self.swapped, limit // 4)

    def _reduction_s(self, part: Part) -> float:
        """Of the slowest stage of such a component."""
        job = self.prices.job
        reductions = self.prices.reductions(self.placement([part]))
        return max(reduction.seconds(job.block_bytes) for reduction in reductions)

    def _chains(self, runs: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """Chains over the best stage links: by the worst stage link, then by the sum of all; each in
        both directions."""
        size, stage_links = self.prices.job.block.activation_bytes, {}
        for first, second in permutations(runs, 2):
            placement = self.placement([first, second])
            border = placement.sizes.pipeline // 2 - 1
            stage_links[first, second] = self.prices.stage_link(
                placement, border, border + 1
            ).seconds(size)
        for worst in (1.0, 0.0):
            chain = best_order(runs, lambda pair: (worst * stage_links[pair], stage_links[pair]))  # noqa: B023
            yield chain
            yield chain[::-1]


def _with_leftovers(counts: Mapping[int, int], size: int) -> Iterator[list[Part]]:
    """Whole components of one class, then what is left in mixed ones, in every order of the classes."""
    pure = [(number,) * size for number, count in counts.items() for _ in range(count // size)]
    leftover = {number: count % size for number, count in counts.items() if count % size}
    for classes in permutations(leftover):
        mixed = [number for number in classes for _ in range(leftover[number])]
        yield pure + [tuple(mixed[at : at + size]) for at in range(0, len(mixed), size)]


def _swap(order: Sequence[T], offer: Callable[[tuple[T, ...]], bool], limit: int) -> None:
    """Swap any two different items as long as the result is accepted, for at most `limit` offers."""
    current, tried, improved = list(order), 0, True
    while improved:
        improved = False
        for left, right in combinations(range(len(current)), 2):
            if current[left] == current[right]:
                continue
            if tried == limit:
                return
            tried += 1
            current[left], current[right] = current[right], current[left]
            if offer(tuple(current)):
                improved = True
            else:
                current[left], current[right] = current[right], current[left]


def order_count(counts: Mapping[T, int]) -> int:
    """How many distinct orders a multiset has."""
    total = math.factorial(sum(counts.values()))
    return total // math.prod(math.factorial(count) for count in counts.values())


def distinct_orders(counts: Mapping[T, int]) -> Iterator[tuple[T, ...]]:
    """Every distinct order of a multiset, once, in the lexicographic order of its keys as given."""
    keys = list(counts)
    order = [number for number, key in enumerate(keys) for _ in range(counts[key])]
    while True:
        yield tuple(keys[number] for number in order)
        places = reversed(range(len(order) - 1))
        at = next((at for at in places if order[at] < order[at + 1]), None)
        if at is None:
            return
        greater = next(place for place in reversed(range(len(order))) if order[place] > order[at])
        order[at], order[greater] = order[greater], order[at]
        order[at + 1 :] = reversed(order[at + 1 :])
