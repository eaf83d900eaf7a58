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
from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, TypeVar

from holmes_ext.plan.traffic import CrossClusterAlgorithm, Pair, neighbours

if TYPE_CHECKING:
    from holmes_ext.cluster.wan import Hop, Wan


T = TypeVar("T")
#: Up to so many clusters every order of a ring is looked at.
ALL_ORDERS = 7


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
        orders = permutations(others) if closed else permutations(names)
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
    root: str,
    names: Sequence[str],
    ring: Sequence[str],
    cost: Callable[[Pair], tuple[float, float]],
) -> Iterator[CrossClusterAlgorithm]:
    """The spanning tree of the best links (Prim 1957), the star, and the ring's chain, with this root."""
    order, parents = [root], [""]
    while remaining := [name for name in names if name not in order]:
        child, parent = min(
            ((c, p) for c in remaining for p in order), key=lambda pair: (cost(pair), pair)
        )
        order.append(child)
        parents.append(parent)
    yield CrossClusterAlgorithm("tree", tuple(order), tuple(parents))
    rest = [name for name in names if name != root]
    yield CrossClusterAlgorithm("tree", (root, *rest), ("", *[root] * len(rest)))
    at = ring.index(root)
    chain = [*ring[at:], *ring[:at]]
    yield CrossClusterAlgorithm("tree", tuple(chain), ("", *chain[:-1]))
