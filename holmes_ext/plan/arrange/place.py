"""Order of the nodes for which only stage links cross between fabrics.

    launcher: a0 b0 a1 b1     stages: [a0 b0] [a1 b1]     every data-parallel group uses Ethernet
    planned:  a0 a1 b0 b1     stages: [a0 a1] [b0 b1]     groups use their own fabric, a stage link Ethernet

Nodes on the same fast fabrics are interchangeable and form a class. A component (plan/placement.py) has no
group that spans networks if all its nodes share a fabric. So such an order exists exactly if pack() finds
one; it also decides which fabric a node serves that is on several.

Among orders without (or with) spanning groups, the shortest predicted step wins; if steps are equal, the
launcher's order wins, so a site that gains nothing stays as it is.

How exact the search is: up to `budget` distinct orders, all are tried. Above, runs of equal components are
permuted, and then pairs are swapped while that helps. Whether spanning can be avoided is still exact (with
nodes on several fabrics: by whole components), and the step is never longer than that of the launcher's
order, unless that order spans more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, permutations
from typing import NamedTuple, TypeVar

from holmes_ext.plan.across import best_order
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.engine import FLAT, HIERARCHICAL
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes

#: Largest number of steps of pack()'s search.
PACK_BUDGET = 150_000


class Assignment(NamedTuple):
    """Nodes of one class that serve a fabric."""

    fabric: str
    node_class: int
    nodes: int


#: Open components of a packing: (fabric, nodes beyond whole components).
OpenComponents = frozenset[tuple[str, int]]


def pack(
    counts: Mapping[int, int], homes: Mapping[int, Sequence[str]], size: int
) -> list[tuple[int, ...]] | None:
    """Divide nodes into components of equal size whose nodes share a fabric.

    A component is a set of nodes that hold the same pipeline stages. Nodes on the same fabrics form a class.

    Whether that is possible depends on the numbers modulo `size` only. So the search goes over the
    classes, and its state is the number of nodes that each fabric has beyond whole components. If most
    nodes are on three or more fast fabrics there can be too many states; then only PACK_BUDGET steps are
    tried.

    Args:
        counts: Class of node -> number of nodes.
        homes: Class of node -> fabrics that it can serve, at least one.
        size: Nodes of a component.

    Returns:
        The classes of each component's nodes, in the order of the classes; None if no packing was found.
    """
    if size == 1:
        return [(node_class,) for node_class, count in counts.items() for _ in range(count)]
    states: dict[OpenComponents, tuple[Assignment, ...]] = {frozenset(): ()}
    waiting = list(counts)  # classes that are not assigned yet
    while waiting:
        node_class = waiting.pop(0)
        states = _with_class(
            states,
            node_class,
            counts[node_class],
            homes[node_class],
            later={home for other in waiting for home in homes[other]},
            size=size,
            most=PACK_BUDGET // len(counts),
        )
    if not states:
        return None
    nodes_on: dict[str, list[int]] = {}  # fabric -> class of each of its nodes
    for assignment in states[frozenset()]:  # no component is left open
        nodes = [assignment.node_class] * assignment.nodes
        nodes_on.setdefault(assignment.fabric, []).extend(nodes)
    components = []
    for nodes in nodes_on.values():
        components += [tuple(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    position = {node_class: index for index, node_class in enumerate(counts)}
    return sorted(components, key=lambda component: [position[number] for number in component])


def _with_class(
    states: Mapping[OpenComponents, tuple[Assignment, ...]],
    node_class: int,
    count: int,
    homes: Sequence[str],
    later: set[str],
    size: int,
    most: int,
) -> dict[OpenComponents, tuple[Assignment, ...]]:
    """Return the states of pack()'s search after the nodes of one class were assigned to fabrics.

    Args:
        states: Open components -> assignments so far, before this class.
        node_class: The class.
        count: Number of its nodes.
        homes: Fabrics that it can serve.
        later: Fabrics that the remaining classes can serve; only there may components stay open.
        size: Nodes of a component.
        most: Largest number of steps.
    """
    result: dict[OpenComponents, tuple[Assignment, ...]] = {}
    steps = ((before, shares) for before in states for shares in _shares(count, len(homes), size))
    for before, shares in islice(steps, most):
        open_nodes = dict(before)  # fabric -> nodes beyond whole components
        for home, share in zip(homes, shares):
            open_nodes[home] = (open_nodes.get(home, 0) + share) % size
        after = frozenset((home, nodes) for home, nodes in open_nodes.items() if nodes)
        can_be_completed = all(home in later for home, _ in after)
        if after not in result and can_be_completed:
            assignments = tuple(
                Assignment(home, node_class, share) for home, share in zip(homes, shares) if share
            )
            result[after] = states[before] + assignments
    return result


def _shares(count: int, homes: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide nodes among fabrics that differ modulo `size`.

    Whole components stay with the first fabric.
    """
    if homes == 1:
        yield (count,)
        return
    for last in range(min(count, size - 1) + 1):
        for others in _shares(count - last, homes - 1, size):
            yield (*others, last)


T = TypeVar("T")
#: Classes of the nodes of a component.
Part = tuple[int, ...]
#: Ranks of components not priced yet that a search may look at.
RANK_BUDGET = 30_000
#: Stages of priced components whose costs a search may add up.
STAGE_BUDGET = 4_000
#: Largest number of runs of equal components for which chains over good links are tried.
MOST_CHAINED = 64
#: A swap that saves less than this part of a step is not worth a less regular placement.
SWAP_GAIN = 1e-3
#: Times with a smaller relative difference are equal.
ROUNDING = 1e-9
#: Largest number of ways to mix the nodes that do not fill components of their class.
MIXTURES = 24


def place(prices: Prices, sizes: Sizes, budget: int | None = None) -> Placement:
    """Return the order of the nodes with the shortest predicted step.

    Args:
        prices: Costs of the job on the site.
        sizes: Parallel sizes, with the data size.
        budget: Number of orders to try; by default as many as take about half a second.
    """
    search = _Search(prices, sizes)
    search.run(budget)
    unused: dict[int, list[str]] = {}  # class -> its nodes, reversed: pop() takes the first one
    for name, node_class in reversed(search.class_of.items()):
        unused.setdefault(node_class, []).append(name)
    order = search.placement(search.best).node_types()
    return prices.network.placement([unused[node_class].pop() for node_class in order], sizes)


def fastest_first(network: Network) -> tuple[str, ...]:
    """Return the order of the nodes for a job whose parallel sizes are not known.

    The nodes of each cluster follow each other, the fastest fabric first. So no group spans networks if the
    stages divide the clusters evenly, and the stage with the slowest reduction, which is the last one, starts
    it first. With a WAN, clusters with good links are neighbours.
    """
    nodes_of: dict[int, list[str]] = {}  # class -> its nodes
    for name, node_class in classes_of(network).items():
        nodes_of.setdefault(node_class, []).append(name)
    ordered = sorted(nodes_of, key=lambda node_class: -network.fabric([node_class]).rate_bps)
    if not network.wan:
        return tuple(name for node_class in ordered for name in nodes_of[node_class])
    clusters = list(dict.fromkeys(map(network.cluster, ordered)))
    return tuple(
        node.name
        for cluster in _chain(network, clusters)
        for node in network.site.nodes
        if node.cluster == cluster
    )


def classes_of(network: Network) -> dict[str, int]:
    """Return node -> its class: the first node type that it is interchangeable with."""
    first_kind: dict[object, int] = {}
    result = {}
    for name, kind in network.node_type_of.items():
        cluster = network.cluster(kind) if network.wan else ""
        look = (tuple(network.usable_fabrics(kind)), cluster)  # equal for interchangeable kinds
        result[name] = first_kind.setdefault(look, kind)
    return result


def _chain(network: Network, clusters: Sequence[str]) -> list[str]:
    """Return the clusters in a chain with good links between neighbours.

    Of the two directions, it takes that whose first cluster comes earlier in `clusters`.
    """
    order = list(best_order(clusters, network.wan.cost))
    if clusters.index(order[0]) < clusters.index(order[-1]):
        return order
    return order[::-1]


class _Score(NamedTuple):
    """Quality of an order; smaller is better."""

    spans: bool  # whether a group spans networks
    step_s: float  # predicted step
    flat_s: float  # step with flat rings only, to compare orders that are equal otherwise


class _Search:
    """Search for the best order of the nodes, which begins with the launcher's order.

    `best` and `score` are the best order found so far, as classes by component, and its score.
    """

    def __init__(self, prices: Prices, sizes: Sizes):
        """Make the launcher's order the best one so far."""
        self.prices = prices
        self.sizes = sizes
        self.network = prices.network
        flat_rules = replace(prices.rules, reductions=(FLAT,))
        self.flat_prices = Prices(prices.network, prices.job, flat_rules)
        self.class_of = classes_of(prices.network)
        launcher = tuple(self.class_of.values())
        self.counts = Counter(launcher)  # class -> number of nodes
        placement = Placement.of(sizes, self.network.processes, launcher)
        self.components = placement.components
        component_ranks = placement.stage_ranks * placement.stages_per_component
        self.ranks_per_order = component_ranks * len(self.components)  # looked at to price an order
        self.best = self.cut(launcher)
        self.score = self.score_of(self.best)

    def cut(self, order: Sequence[int]) -> tuple[Part, ...]:
        """Return the classes of each component's nodes, from the classes of all nodes in order."""
        return tuple(tuple(order[slot] for slot in slots) for slots in self.components)

    def placement(self, parts: Sequence[Part]) -> Placement:
        """Return the placement with these components; with fewer than all, of a shorter pipeline."""
        sizes = self.sizes
        if len(parts) < len(self.components):
            sizes = replace(sizes, pipeline=len(parts) * sizes.pipeline // len(self.components))
        return Placement.of_parts(sizes, self.network.processes, parts)

    def score_of(self, parts: Sequence[Part]) -> _Score:
        """Return the score of an order, given as the classes of each component's nodes."""
        placement = self.placement(parts)
        step_s = flat_s = self.prices.step_s(placement)
        if any(reduction.name == HIERARCHICAL for reduction in self.prices.reductions(placement)):
            flat_s = self.flat_prices.step_s(placement)
        return _Score(self.prices.spans_networks(placement), step_s, flat_s)

    def offer(self, parts: Sequence[Part], gain: float = ROUNDING) -> bool:
        """Make an order the best one if it spans less, or if it is faster and spans no more.

        Args:
            parts: Classes of each component.
            gain: Part of the time by which it must be faster.

        Returns:
            Whether the order was accepted.
        """
        score = self.score_of(parts)
        is_better = self._is_better(score, gain)
        if is_better:
            self.best = tuple(parts)
            self.score = score
        return is_better

    def _is_better(self, score: _Score, gain: float) -> bool:
        if score.spans != self.score.spans:
            return not score.spans
        times = ((score.step_s, self.score.step_s), (score.flat_s, self.score.flat_s))
        for seconds, best_s in times:
            if seconds < best_s * (1 - gain):
                return True
            if seconds > best_s * (1 + ROUNDING):
                return False
        return False

    def offer_swap(self, parts: Sequence[Part]) -> bool:
        """Make an order that results from a swap the best one if it is worth it."""
        return self.offer(parts, SWAP_GAIN)

    def run(self, budget: int | None) -> None:
        """Search for the best order of the nodes.

        Args:
            budget: Number of orders to try; None: as many as take about half a second.
        """
        if len(self.counts) == 1:
            return
        # Orders with components that were not priced yet, and orders of components that were.
        new_orders = budget or max(4, RANK_BUDGET // self.ranks_per_order)
        known_orders = budget or max(50, STAGE_BUDGET // self.sizes.pipeline)
        component_nodes = len(self.components[0])
        homes = {node_class: self.network.usable_fabrics(node_class) for node_class in self.counts}
        packed = pack(self.counts, homes, component_nodes)
        is_on_several = any(len(fabrics) > 1 for fabrics in homes.values())
        is_small = order_count(self.counts) <= new_orders
        if (packed is None or is_on_several) and is_small:
            for order in distinct_orders(self.counts):
                self.offer(self.cut(order))
        elif packed is not None:
            self.arrange(packed, known_orders)
        elif self.network.wan:
            self.line_up_clusters(component_nodes, new_orders)
        else:
            self._arrange_mixtures(component_nodes, new_orders, known_orders)

    def _arrange_mixtures(self, size: int, new_orders: int, known_orders: int) -> None:
        """Try components of one class, and mixed components of the nodes that are left.

        Args:
            size: Nodes of a component.
            new_orders: Largest number of orders with new components.
            known_orders: Largest number of orders of components that were priced already.
        """
        mixture_count = min(MIXTURES, max(2, new_orders // 2))
        mixtures = list(islice(_with_leftovers(self.counts, size), mixture_count))
        for parts in mixtures:
            self.arrange(parts, min(known_orders, new_orders) // len(mixtures))
        _swap(
            self.placement(self.best).node_types(),
            lambda order: self.offer_swap(self.cut(order)),
            limit=new_orders,
        )

    def line_up_clusters(self, size: int, limit: int) -> None:
        """Try orders in which the nodes of each cluster follow each other.

        This is for clusters whose nodes do not fill whole components (nodes with the same pipeline stages).

        Args:
            size: Nodes of a component.
            limit: Largest number of orders.
        """
        classes: dict[str, list[int]] = {}  # cluster -> classes of its nodes
        for node_class in self.counts:
            classes.setdefault(self.network.cluster(node_class), []).append(node_class)

        def parts(clusters: Sequence[str]) -> tuple[Part, ...]:
            """Return the classes of each component's nodes, for an order of the clusters."""
            nodes: list[int] = []
            for cluster in clusters:
                for node_class in classes[cluster]:
                    nodes += [node_class] * self.counts[node_class]
            return tuple(tuple(nodes[start : start + size]) for start in range(0, len(nodes), size))

        chain = _chain(self.network, list(classes))
        self.offer(parts(chain))
        _swap(chain, lambda clusters: self.offer_swap(parts(clusters)), limit)

    def arrange(self, parts: Sequence[Part], limit: int) -> None:
        """Try orders of components: all if they are few, else orders with equal ones together, and swaps.

        Args:
            parts: Classes of each component.
            limit: Largest number of orders.
        """
        counts = Counter(parts)
        if order_count(counts) <= limit:
            for order in distinct_orders(counts):
                self.offer(order)
            return

        def with_equal_together(distinct: Sequence[Part]) -> tuple[Part, ...]:
            """Return all components, equal ones next to each other."""
            return tuple(part for part in distinct for _ in range(counts[part]))

        distinct = list(counts)
        has_few_permutations = math.factorial(len(counts)) <= limit // 2  # half is left for swaps
        if has_few_permutations:
            for order in permutations(distinct):
                self.offer(with_equal_together(order))
        else:
            self.offer(with_equal_together(distinct))
            distinct.sort(key=self._reduction_s)
            self.offer(with_equal_together(distinct))
        if self.network.wan and 2 < len(distinct) <= MOST_CHAINED:
            for chain in self._chains(distinct):
                self.offer(with_equal_together(chain))
            distinct = list(dict.fromkeys(self.best))
        if not has_few_permutations:
            _swap(distinct, lambda order: self.offer_swap(with_equal_together(order)), limit // 4)
        _swap(self.best, self.offer_swap, limit // 4)

    def _reduction_s(self, part: Part) -> float:
        """Return the seconds of reducing a block's gradients on the slowest stage of a component."""
        size = self.prices.job.block_bytes
        reductions = self.prices.reductions(self.placement([part]))
        return max(reduction.seconds(size) for reduction in reductions)

    def _chains(self, distinct: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """Yield chains of components with good stage links between neighbours, in both directions.

        The first chain has the fastest slowest link, the second one the least sum of all links.
        """
        size = self.prices.job.block.activation_bytes
        link_s = {}  # (component, next component) -> seconds of an activation
        for first, second in permutations(distinct, 2):
            placement = self.placement([first, second])
            border = placement.sizes.pipeline // 2 - 1
            link = self.prices.stage_link(placement, border, border + 1)
            link_s[first, second] = link.seconds(size)
        by_slowest = best_order(distinct, lambda pair: (link_s[pair], link_s[pair]))
        by_sum = best_order(distinct, lambda pair: (0.0, link_s[pair]))
        for chain in (by_slowest, by_sum):
            yield chain
            yield chain[::-1]


def _with_leftovers(counts: Mapping[int, int], size: int) -> Iterator[list[Part]]:
    """Yield divisions of nodes into components: of one class as far as possible, then mixed.

    The nodes that do not fill components of their class are mixed in every order of the classes.

    Args:
        counts: Class of node -> number of nodes.
        size: Nodes of a component.
    """
    pure = [(node_class,) * size for node_class, n in counts.items() for _ in range(n // size)]
    leftover = {node_class: n % size for node_class, n in counts.items() if n % size}
    for classes in permutations(leftover):
        mixed = [node_class for node_class in classes for _ in range(leftover[node_class])]
        yield pure + [tuple(mixed[start : start + size]) for start in range(0, len(mixed), size)]


def _swap(order: Sequence[T], offer: Callable[[tuple[T, ...]], bool], limit: int) -> None:
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
    """Return the number of distinct orders of a multiset."""
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
        ascents = (i for i in reversed(range(len(order) - 1)) if order[i] < order[i + 1])
        pivot = next(ascents, None)
        if pivot is None:
            return
        greater = next(i for i in reversed(range(len(order))) if order[i] > order[pivot])
        order[pivot], order[greater] = order[greater], order[pivot]
        order[pivot + 1 :] = reversed(order[pivot + 1 :])
