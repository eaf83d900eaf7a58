"""Which nodes to ask for: of so many idle nodes of each cluster the count of each that trains fastest.

    idle        a: 8   b: 6   c: 6                    nodes of a cluster are alike, so a subset is how many of each
    12 nodes    (8, 4, 0)  (6, 6, 0)  (0, 6, 6) ...   each has a price: the step of the best plan on it

Looked at first is what is mostly best: clusters filled one after the other in every order, whole stages,
equal parts; then what differs from the best by a move of nodes; all of two clusters; then the rest, as long as
time is left. The floor is the step on nodes that have the best of everything and one network: better hardware
never takes longer, so no subset is below it. Where all were looked at, or the best is no slower than the
floor, it is the best; else within a fraction.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import inf
from typing import Any

from holmes_ext.cluster.site import ETHERNET, Fabric, Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model

#: Nodes of each cluster.
Counts = tuple[int, ...]
#: Clusters of which every order is filled; of more only those that begin with two of them.
EVERY_ORDER = 5
#: Seconds that are equal.
EQUAL = 1e-9


@dataclass(frozen=True)
class Priced:
    """The step of the best plan found on a subset, that no plan on it beats bound_s, and what the price came from."""

    step_s: float
    bound_s: float
    plan: Any = None


@dataclass(frozen=True)
class Subsets:
    """found: all that were looked at and fit, the fastest first. bound_s: no subset's step is below it. complete: every
    subset was looked at."""

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
    idle: Counts, count: int, price: Callable[[Counts], Priced], floor_s: float, *, unit: int = 1,
    alike: Sequence[int] = (), seconds: float = inf,
) -> Subsets:
    """Of `count` nodes out of so many idle ones of each cluster. price: HolmesError for a subset on which nothing fits;
    floor_s: no subset's step is below it; unit: nodes that a stage fills; alike: for each cluster the first one that
    can stand for it, by default itself; seconds: after so many the best so far is the answer.

    HolmesError: there are too few nodes, or nothing fits on any subset (price's own).
    """
    if sum(idle) < count or count < 1:
        raise HolmesError(f"{count} nodes are asked for, and {sum(idle)} are there; ask for 1 to {sum(idle)}")
    unit = max(1, unit)
    search = _Search(idle, count, price, floor_s, alike or range(len(idle)), time.monotonic() + seconds)
    search.look(_likely(idle, count, unit))
    search.improve(unit)
    search.look(_of_two(idle, count))
    return search.result(complete=search.look(_all(idle, count)))


class _Search:
    def __init__(self, idle: Counts, count: int, price: Callable[[Counts], Priced], floor_s: float,
                 alike: Sequence[int], end: float):
        self.idle, self.count, self.price, self.floor_s, self.end = idle, count, price, floor_s, end
        self.groups = [[index for index, first in enumerate(alike) if first == kind] for kind in dict.fromkeys(alike)]
        self.seen: set[Counts] = set()
        self.found: list[tuple[float, Counts, Priced]] = []
        self.trouble: HolmesError | None = None

    @property
    def best_s(self) -> float:
        return self.found[0][0] if self.found else inf

    @property
    def over(self) -> bool:
        """Whether nothing can be better, or the time is up (one subset at least is looked at)."""
        proven = self.best_s <= self.floor_s * (1 + EQUAL)
        return proven or bool(self.found) and time.monotonic() > self.end

    def look(self, subsets: Iterator[Counts]) -> bool:
        """Whether all of them were looked at."""
        for counts in subsets:
            if self.over:
                return False
            self.one(counts)
        return True

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
            places = sorted(group, key=lambda index: -self.idle[index])
            for index, nodes in zip(places, sorted((counts[index] for index in group), reverse=True)):
                kept[index] = nodes
        return tuple(kept)

    def improve(self, unit: int) -> None:
        """Move nodes from one cluster of the best subset to another, many at first, as long as that makes it better."""
        while not self.over and self.found:
            best_s, best, _ = self.found[0]
            for one, two in permutations(range(len(best)), 2):
                for nodes in dict.fromkeys((unit, 1)):
                    if best[one] >= nodes and best[two] + nodes <= self.idle[two] and not self.over:
                        moved = list(best)
                        moved[one], moved[two] = moved[one] - nodes, moved[two] + nodes
                        self.one(tuple(moved))
            if self.best_s >= best_s:
                return

    def result(self, complete: bool) -> Subsets:
        if not self.found:
            assert self.trouble is not None
            raise self.trouble
        ranked = sorted(self.found, key=lambda each: each[:2])
        bound = min(priced.bound_s for _, _, priced in ranked)
        bound = bound if complete else min(bound, self.floor_s)
        return Subsets(tuple((counts, priced) for _, counts, priced in ranked), min(bound, self.best_s), complete)


def _likely(idle: Counts, count: int, unit: int) -> Iterator[Counts]:
    """Subsets that are mostly good: few clusters, whole stages in each, equal parts."""
    clusters = range(len(idle))
    for order in permutations(clusters, min(len(idle), EVERY_ORDER if len(idle) <= EVERY_ORDER else 2)):
        rest = sorted(set(clusters) - set(order), key=lambda index: -idle[index])
        for whole in dict.fromkeys((1, unit)):
            yield from _filled(idle, count, (*order, *rest), whole)
    for size in range(2, len(idle) + 1):
        if count % size == 0:
            for chosen in combinations(clusters, size):
                if all(idle[index] >= count // size for index in chosen):
                    yield tuple(count // size if index in chosen else 0 for index in clusters)


def _filled(idle: Counts, count: int, order: Sequence[int], whole: int) -> Iterator[Counts]:
    """One cluster after the other, in multiples of `whole` nodes; what is left over goes where there is room."""
    counts, left = [0] * len(idle), count
    for index in order:
        counts[index] = min(idle[index], left) // whole * whole
        left -= counts[index]
    for index in order:
        more = min(idle[index] - counts[index], left)
        counts[index], left = counts[index] + more, left - more
    yield tuple(counts)


def _of_two(idle: Counts, count: int) -> Iterator[Counts]:
    """Of one cluster or two: more are seldom better."""
    for one, two in combinations(range(len(idle)), 2):
        for nodes in range(max(0, count - idle[two]), min(idle[one], count) + 1):
            yield tuple(nodes if index == one else count - nodes if index == two else 0 for index in range(len(idle)))


def _all(idle: Counts, count: int) -> Iterator[Counts]:
    if len(idle) == 1:
        yield (count,)
        return
    rest = sum(idle[1:])
    for nodes in range(min(idle[0], count), max(0, count - rest) - 1, -1):
        for others in _all(idle[1:], count - nodes):
            yield (nodes, *others)


def ideal(site: Site, count: int, model: Model, links: Links) -> tuple[Site, Model]:
    """`count` nodes of one cluster with the best of all GPUs, on one network that is better than any; and
    `model` there. What a step takes on it is a floor for best_subset. links: measured ones."""
    names = [node.name for node in site.nodes[:count]]
    return _on_one_fabric(site, dict.fromkeys(names, "best"), links), replace(
        model, gpus={"best": _best([model.gpu_of(name) for name in site.clusters])})


def ideal_gpus(site: Site, count: int, model: Model, links: Links) -> tuple[Site, Model]:
    """The `count` nodes with the fastest GPUs, each GPU a cluster of its own, all on that network: what they compute
    alone is a floor, too."""
    fastest = sorted(site.nodes, key=lambda node: -model.gpu_of(node.cluster).flops)[:count]
    gpus = {f"{model.gpu_of(node.cluster).flops:g}": model.gpu_of(node.cluster).flops for node in fastest}
    clusters = {node.name: f"{model.gpu_of(node.cluster).flops:g}" for node in fastest}
    best = _best([model.gpu_of(name) for name in site.clusters])
    return _on_one_fabric(site, clusters, links), replace(
        model, gpus={name: replace(best, flops=flops) for name, flops in gpus.items()})


def _best(gpus: Sequence[Gpu]) -> Gpu:
    """0 stands for no limit."""
    free = {field: any(not getattr(gpu, field) for gpu in gpus) for field in ("memory_bytes", "link_bps")}
    most = {field: 0.0 if free[field] else max(getattr(gpu, field) for gpu in gpus) for field in free}
    return Gpu(max(gpu.flops for gpu in gpus), **most)


def _on_one_fabric(site: Site, clusters: Mapping[str, str], links: Links) -> Site:
    """The nodes of `clusters` (node -> cluster), all on one network with the least latency of any, as fast as the best
    fabric and Ethernet together: reductions in two levels use both at once. It is an Ethernet, over which tensor ranks
    share out what a stage sends."""
    fast = [links.line(fabric) for fabric in site.fabrics if any(fabric.name in node.fabrics for node in site.nodes)]
    rates = {fabric.name: fabric.rate_bps for fabric in fast}
    rate_bps = rates[ETHERNET] + max((rate for name, rate in rates.items() if name != ETHERNET), default=0)
    one = Fabric(ETHERNET, "ethernet", rate_bps, min(fabric.latency_s for fabric in fast))
    nodes = [Node(name, cluster, site.processes, (Port(ETHERNET, rate_bps=rate_bps),))
             for name, cluster in clusters.items()]
    return Site(tuple(nodes), (one,), site.source)
