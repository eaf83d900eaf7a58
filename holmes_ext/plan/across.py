r"""Algorithms for the step of a hierarchical all-reduce that sums gradients between clusters.

Each cluster has already summed the gradients of its ranks. The algorithms add up these sums. They differ
in the amount that each cluster sends to each other cluster, and in the order of the messages:

    direct   every cluster sends each other cluster a part, then its sum of a part         2 rounds
    ring     parts go around the clusters twice, in an order                               2 (C - 1) rounds
    tree     sums go up a tree of clusters to its root, and the total comes down again     2 x depth rounds

C is the number of clusters, and a part is 1 / C of the bytes. In the first round of direct, cluster i gets
part i of all others and adds them up. In the second round, it sends this sum to all others. So each link
carries 1 / C of the bytes per round, in each direction. A tree does not use all links: a tree with root b
leaves the slow link of this example idle:

                 slow
           a ---------- c
            \__ b ____/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, permutations
from typing import TYPE_CHECKING, TypeVar

from holmes_ext.plan.traffic import CrossClusterAlgorithm, Pair, neighbours

if TYPE_CHECKING:
    from holmes_ext.cluster.wan import Hop, Wan


T = TypeVar("T")
#: Largest number of clusters in a ring or chain for which every order is tried.
ALL_ORDERS = 7


def hop_loads(wan: Wan, pairs: Mapping[Pair, float]) -> dict[Hop, float]:
    """Add up the load of each link between clusters, from the pairs of clusters that send over it.

    Args:
        wan: Network between the clusters.
        pairs: (from cluster, to cluster) -> load, such as bytes or flows.
    """
    loads: dict[Hop, float] = {}
    for (source, target), amount in pairs.items():
        for hop in wan.hops(source, target):
            loads[hop] = loads.get(hop, 0.0) + amount
    return loads


def ways_across(wan: Wan, names: Sequence[str]) -> tuple[CrossClusterAlgorithm, ...]:
    """Return the algorithms that are worth pricing for these clusters, "direct" first.

    If the links between clusters differ, the result includes the best ring and several trees.

    Args:
        wan: Network between the clusters.
        names: Names of the clusters.
    """
    if wan and len(names) > 1:
        return _ways(wan, tuple(names))
    return (CrossClusterAlgorithm("direct", tuple(names)),)


@lru_cache(maxsize=256)
def _ways(wan: Wan, names: tuple[str, ...]) -> tuple[CrossClusterAlgorithm, ...]:
    """Return the algorithms to price: direct exchanges, the cheapest ring, and trees from every root."""
    ring = best_order(names, wan.cost, closed=True)
    trees = dict.fromkeys(tree for root in names for tree in _trees(root, names, ring, wan.cost))
    return (CrossClusterAlgorithm("direct", names), CrossClusterAlgorithm("ring", ring), *trees)


def best_order(
    names: Sequence[T], cost: Callable[[tuple[T, T]], tuple[float, float]], closed: bool = False
) -> tuple[T, ...]:
    """Return the names in the order whose most expensive link between neighbours is cheapest.

    Of several such orders, it is the one with the least sum of all links. With more than ALL_ORDERS
    names the order is improved by 2-opt (Croes 1958), and may not be the best.

    Args:
        names: Clusters, or other nodes of a complete graph.
        cost: Returns two numbers for a link; the second decides between links with equal first numbers.
        closed: Whether the order is a ring; else it is a chain.
    """

    def total(order: Sequence[T]) -> tuple[float, float, float]:
        """Return the cost of an order of clusters, as a tuple to compare: worst link first, then sums."""
        links = neighbours(order) if closed else list(zip(order, order[1:]))
        costs = [cost(link) for link in links]
        first_numbers = [first for first, _ in costs]
        second_numbers = [second for _, second in costs]
        return max(first_numbers), sum(first_numbers), sum(second_numbers)

    if len(names) > ALL_ORDERS:
        return _two_opt(_nearest_neighbours(names, cost), total, closed)
    if closed:  # a ring may begin anywhere, so the first name can stay
        first, *others = names
        return min(((first, *order) for order in permutations(others)), key=total)
    return min(permutations(names), key=total)


def _nearest_neighbours(
    names: Sequence[T], cost: Callable[[tuple[T, T]], tuple[float, float]]
) -> list[T]:
    """Order clusters greedily: from each cluster, follow the cheapest link to a cluster not yet visited."""
    order = [names[0]]
    while remaining := [name for name in names if name not in order]:
        order.append(min(remaining, key=lambda name: cost((order[-1], name))))
    return order


def _two_opt(
    order: list[T], total: Callable[[Sequence[T]], tuple[float, float, float]], closed: bool
) -> tuple[T, ...]:
    """Improve an order of clusters by reversing parts of it, as long as that reduces its cost (2-opt).

    Args:
        order: Order to begin with.
        total: Returns the cost of an order as a tuple; the first number that differs decides.
        closed: Whether the order is a ring; else it is a chain.
    """
    first_low = 1 if closed else 0  # a ring may begin anywhere, so its first name stays
    is_improved = True
    while is_improved:
        is_improved = False
        for low in range(first_low, len(order) - 1):
            for high in range(low + 2, len(order) + 1):
                reversed_part = order[:low] + order[low:high][::-1] + order[high:]
                if total(reversed_part) < total(order):
                    order = reversed_part
                    is_improved = True
    return tuple(order)


def swap_pairs(order: Sequence[T], offer: Callable[[tuple[T, ...]], bool], limit: int) -> None:
    """Swap pairs of different items as long as some result is accepted.

    Args:
        order: Items to begin with.
        offer: Returns whether an order is accepted; the next swaps then begin with it.
        limit: Largest number of offers.
    """
    current = list(order)
    offers = 0
    is_improved = True
    while is_improved:
        is_improved = False
        for left, right in combinations(range(len(current)), 2):
            if current[left] == current[right]:
                continue
            if offers == limit:
                return
            offers += 1
            current[left], current[right] = current[right], current[left]
            if offer(tuple(current)):
                is_improved = True
            else:
                current[left], current[right] = current[right], current[left]


def order_count(counts: Mapping[T, int]) -> int:
    """Return the number of distinct orders of a multiset, given as item -> number of copies."""
    total = math.factorial(sum(counts.values()))
    return total // math.prod(math.factorial(count) for count in counts.values())


def distinct_orders(counts: Mapping[T, int]) -> Iterator[tuple[T, ...]]:
    """Yield every distinct order of a multiset once, in lexicographic order of its keys as given.

    This is the algorithm of the next permutation (Narayana): the rightmost item that is smaller than its
    successor is swapped with the last greater item, and the items after it are reversed.
    """
    keys = list(counts)
    order = [number for number, key in enumerate(keys) for _ in range(counts[key])]
    while True:
        yield tuple(keys[number] for number in order)
        # Positions of items that are smaller than their successor, from the right.
        ascents = (i for i in reversed(range(len(order) - 1)) if order[i] < order[i + 1])
        pivot = next(ascents, None)
        if pivot is None:
            return  # the items descend: this was the last permutation
        greater = next(i for i in reversed(range(len(order))) if order[i] > order[pivot])
        order[pivot], order[greater] = order[greater], order[pivot]
        order[pivot + 1 :] = reversed(order[pivot + 1 :])


def _trees(
    root: str,
    names: Sequence[str],
    ring: Sequence[str],
    cost: Callable[[Pair], tuple[float, float]],
) -> Iterator[CrossClusterAlgorithm]:
    """Yield trees with this root: the minimum spanning tree (Prim 1957), the star, and a chain.

    Args:
        root: Cluster at the root.
        names: All clusters.
        ring: The clusters in the order of the best ring; the chain follows it.
        cost: Returns two numbers for a link; the second decides between links with equal first numbers.
    """
    # The minimum spanning tree: repeatedly add the cheapest link from the tree to a cluster outside it.
    order = [root]
    parents = [""]  # the root has none
    while remaining := [name for name in names if name not in order]:
        links = ((child, parent) for child in remaining for parent in order)
        child, parent = min(links, key=lambda link: (cost(link), link))
        order.append(child)
        parents.append(parent)
    yield CrossClusterAlgorithm("tree", tuple(order), tuple(parents))

    # The star.
    leaves = [name for name in names if name != root]
    yield CrossClusterAlgorithm("tree", (root, *leaves), ("", *[root] * len(leaves)))

    # The chain: around the ring, from the root to the cluster before it.
    start = ring.index(root)
    chain = [*ring[start:], *ring[:start]]
    yield CrossClusterAlgorithm("tree", tuple(chain), ("", *chain[:-1]))
