"""How sums of whole clusters are added up across clusters: which sends how much to which, in what order.

    direct   every cluster sends each other one its part, and gets the sums back          two exchanges
    ring     parts go round the clusters in an order, twice                               2 (C - 1) rounds
    tree     sums go up a tree of clusters to its root, the total comes down again        2 x depth rounds

                 slow      a tree with b as its root leaves the slow link alone; direct sends 1/3 of the bytes
           a ---------- c  over every link, each way, twice
            \\__ b ____/

Of the bytes that are summed; `halves`: the way to the sum, and the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from holmes_ext.cluster.wan import Hop, Wan


#: (cluster, cluster)
Pair = tuple[str, str]
T = TypeVar("T")
#: Up to so many clusters every order of a ring is looked at.
ALL_ORDERS = 7


@dataclass(frozen=True)
class CrossClusterAlgorithm:
    """How the sums of whole clusters are added up."""

    #: "direct", "ring" or "tree".
    algorithm: str
    #: Names: of a ring in its order, of a tree with parents before their children.
    order: tuple[str, ...]
    #: Of a tree, for each of `order` the one that it sends to, "" for the root.
    parents: tuple[str, ...] = ()

    @property
    def halves(self) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """(from, to) -> bytes for each byte that is summed."""
        count = len(self.order)
        if self.algorithm == "tree":
            up = {(child, parent): 1.0 for child, parent in zip(self.order, self.parents) if parent}
            return up, {(parent, child): share for (child, parent), share in up.items()}
        if self.algorithm == "ring":
            round_ = dict.fromkeys(neighbours(self.order), (count - 1) / count)
            return round_, round_
        exchange = {(source, target): 1 / count
                    for source in self.order for target in self.order if source != target}
        return exchange, exchange

    def latency_s(self, of: Callable[[Pair], float]) -> float:
        """Seconds of a half, for the first bytes; of: seconds from one cluster to another."""
        if self.algorithm == "direct":
            return max(map(of, self.halves[0]))
        if self.algorithm == "ring":
            hops = [of(pair) for pair in neighbours(self.order)]
            return sum(hops) - min(hops)
        depth = {"": 0.0}
        for child, parent in zip(self.order, self.parents):
            depth[child] = depth[parent] + (of((child, parent)) if parent else 0.0)
        return max(depth.values())

    @property
    def part(self) -> float:
        """Of the bytes that are summed, what one message carries."""
        return 1.0 if self.algorithm == "tree" else 1 / len(self.order)

    @property
    def rounds(self) -> int:
        """Messages that follow each other in a half."""
        if self.algorithm == "tree":
            depth = {"": -1}
            for child, parent in zip(self.order, self.parents):
                depth[child] = depth[parent] + 1
            return max(depth.values())
        return len(self.order) - 1 if self.algorithm == "ring" else 1


def neighbours(order: Sequence[T]) -> list[tuple[T, T]]:
    """(cluster, next cluster) round the ring, without pairs inside one cluster."""
    return [(first, second) for first, second in zip(order, (*order[1:], order[0])) if first != second]


def hop_loads(wan: Wan, pairs: Mapping[Pair, float]) -> dict[Hop, float]:
    """What passes each hop between clusters, in the unit of `pairs`."""
    loads: dict[Hop, float] = {}
    for (source, target), amount in pairs.items():
        for hop in wan.hops(source, target):
            loads[hop] = loads.get(hop, 0.0) + amount
    return loads


def ways_across(wan: Wan, names: Sequence[str]) -> tuple[CrossClusterAlgorithm, ...]:
    """Algorithms worth comparing: direct; also the best ring and trees where the network is not flat."""
    if wan and len(names) > 1:
        return _ways(wan, tuple(names))
    return (CrossClusterAlgorithm("direct", tuple(names)),)


@lru_cache(maxsize=256)
def _ways(wan: Wan, names: tuple[str, ...]) -> tuple[CrossClusterAlgorithm, ...]:
    ring = best_order(names, wan.cost, closed=True)
    trees = dict.fromkeys(tree for root in names for tree in _trees(root, names, ring, wan.cost))
    return (CrossClusterAlgorithm("direct", names), CrossClusterAlgorithm("ring", ring), *trees)


def best_order(
    names: Sequence[T], cost: Callable[[tuple[T, T]], tuple[float, float]], closed: bool = False
) -> tuple[T, ...]:
    """Of a ring (closed) or a chain: the order with the cheapest worst link, then the least sum; above
    ALL_ORDERS names by 2-opt (Croes 1958). cost: numbers of a link, the first counts first."""

    def total(order: Sequence[T]) -> tuple[float, float, float]:
        pairs = neighbours(order) if closed else list(zip(order, order[1:]))
        costs = [cost(pair) for pair in pairs]
        return max(c[0] for c in costs), sum(c[0] for c in costs), sum(c[1] for c in costs)

    first, *others = names
    if len(names) <= ALL_ORDERS:
        orders = (permutations(others) if closed else permutations(names))
        return min(((first, *rest) if closed else rest for rest in orders), key=total)
    order = [first]
    while remaining := [name for name in names if name not in order]:
        order.append(min(remaining, key=lambda name: cost((order[-1], name))))
    improved = True
    while improved:  # 2-opt
        improved = False
        for low in range(1 if closed else 0, len(order) - 1):
            for high in range(low + 2, len(order) + 1):
                turned = order[:low] + order[low:high][::-1] + order[high:]
                if total(turned) < total(order):
                    order, improved = turned, True
    return tuple(order)


def _trees(
    root: str, names: Sequence[str], ring: Sequence[str], cost: Callable[[Pair], tuple[float, float]]
) -> Iterator[CrossClusterAlgorithm]:
    """The spanning tree of the best links (Prim 1957), the star, and the ring's chain, with this root."""
    order, parents = [root], [""]
    while remaining := [name for name in names if name not in order]:
        child, parent = min(((c, p) for c in remaining for p in order), key=lambda pair: (cost(pair), pair))
        order.append(child)
        parents.append(parent)
    yield CrossClusterAlgorithm("tree", tuple(order), tuple(parents))
    rest = [name for name in names if name != root]
    yield CrossClusterAlgorithm("tree", (root, *rest), ("", *[root] * len(rest)))
    at = ring.index(root)
    chain = [*ring[at:], *ring[:at]]
    yield CrossClusterAlgorithm("tree", tuple(chain), ("", *chain[:-1]))
