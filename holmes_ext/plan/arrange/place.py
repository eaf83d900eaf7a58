"""Order of the nodes by which only messages between pipeline stages have to cross between fabrics.

    launcher: a0 b0 a1 b1     stages: [a0 b0] [a1 b1]     every data-parallel group uses Ethernet
    planned:  a0 a1 b0 b1     stages: [a0 a1] [b0 b1]     groups use their own fabric, a stage link Ethernet

Nodes on the same fast fabrics, with equally many ranks, are interchangeable and form a class. (If
classes differ in the ranks of a node, a node below stands for a block of nodes, orders.py.) Stages
that share nodes form a component. If all nodes of each component share a fabric, no group "spans
networks": none has to use Ethernet because its nodes are on different fast networks. pack() finds such
components if they exist.

An order in which no group spans networks is better than an order with such groups. Otherwise the
shorter predicted step is better. If steps are equal, the launcher's order stays. If there are few
distinct orders, all are tried. Otherwise the search permutes runs of equal components, and then
swaps pairs while that shortens the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations
from typing import NamedTuple, TypeVar

from holmes_ext.plan.across import best_order, distinct_orders, order_count, swap_pairs
from holmes_ext.plan.arrange.orders import LEAST_CHAINED, Blocks, best_order_of_classes, classes_of
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.engine import FLAT, HIERARCHICAL
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes

#: Largest number of steps of pack()'s search.
PACK_BUDGET = 150_000


class Assignment(NamedTuple):
    """Fabric that pack() chooses for a number of nodes of a class."""

    fabric: str
    node_class: int  # nodes on the same fabrics form a class
    nodes: int


#: Components that still lack nodes: (fabric, nodes that its last component has so far).
OpenComponents = frozenset[tuple[str, int]]


def pack(
    counts: Mapping[int, int], usable_fabrics: Mapping[int, Sequence[str]], size: int
) -> list[tuple[int, ...]] | None:
    """Divide nodes into components of equal size whose nodes share a fabric.

    A component are nodes with the same pipeline stages. Nodes on the same fabrics form a class. The
    search assigns the classes to fabrics in turn, and so fills components. Whether the remaining
    classes fit depends only on the last component of each fabric: how many nodes it has if it is
    not full. Assignments that agree in these numbers form a state, and only the first of them is
    continued. With many nodes on three or more fast fabrics there are too many states: the search
    stops after PACK_BUDGET steps, and None is no proof then.

    Args:
        counts: Node class -> number of nodes.
        usable_fabrics: Node class -> fabrics that its nodes can use, at least 1.
        size: Nodes of a component.

    Returns:
        The classes of each component's nodes, in the order of the classes; None if no packing was found.
    """
    if size == 1:
        return [(node_class,) for node_class, count in counts.items() for _ in range(count)]
    states: dict[OpenComponents, tuple[Assignment, ...]] = {frozenset(): ()}  # nothing assigned
    waiting = list(counts)  # classes that are not assigned to fabrics yet
    while waiting:
        node_class = waiting.pop(0)
        states = _with_class(
            states,
            node_class,
            counts[node_class],
            usable_fabrics[node_class],
            later={fabric for other in waiting for fabric in usable_fabrics[other]},
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
    usable_fabrics: Sequence[str],
    later: set[str],
    size: int,
    most: int,
) -> dict[OpenComponents, tuple[Assignment, ...]]:
    """Assign the nodes of a class to fabrics in every way; keep the first way for each outcome.

    pack() fills components (nodes with the same stages) of `size` nodes on each fabric. The last component
    of a fabric is open until it is full. An outcome (state) is the set of (fabric, nodes in its open one).

    Args:
        states: Outcome of the earlier classes -> an assignment of their nodes that leads to it.
        node_class: The class: nodes on the same fabrics.
        count: Number of nodes of the class.
        usable_fabrics: Fabrics that the nodes of the class can use.
        later: Fabrics that the remaining classes can use. Only these can fill an open component.
        size: Nodes of a component.
        most: Largest number of combinations (a state, a division of the nodes) to try.

    Returns:
        The same as `states`, after this class.
    """
    result: dict[OpenComponents, tuple[Assignment, ...]] = {}
    steps = (
        (before, division)
        for before in states
        for division in _divisions(count, len(usable_fabrics), size)
    )
    for before, division in islice(steps, most):
        open_nodes = dict(before)  # fabric -> nodes beyond whole components
        for fabric, share in zip(usable_fabrics, division):
            open_nodes[fabric] = (open_nodes.get(fabric, 0) + share) % size  # 0: all are full
        after = frozenset((fabric, nodes) for fabric, nodes in open_nodes.items() if nodes)
        can_be_completed = all(fabric in later for fabric, _ in after)
        if after not in result and can_be_completed:
            assignments = tuple(
                Assignment(fabric, node_class, share)
                for fabric, share in zip(usable_fabrics, division)
                if share
            )
            result[after] = states[before] + assignments
    return result


def _divisions(count: int, usable_fabrics: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield ways to divide `count` equal nodes among fabrics, as the number of nodes on each fabric.

    pack() then cuts the nodes of each fabric into components (sharing stages) of `size` nodes. Only the
    number left over on each fabric matters, and moving `size` nodes to another fabric does not change
    it. So every fabric but the first gets less than `size` nodes, and the first fabric gets all
    other nodes: 5 nodes, 2 fabrics, size 2 -> (5, 0), (4, 1).
    """
    if usable_fabrics == 1:
        yield (count,)
        return
    for last in range(min(count, size - 1) + 1):
        for others in _divisions(count - last, usable_fabrics - 1, size):
            yield (*others, last)


T = TypeVar("T")
#: Node classes of a component's nodes: (0, 0, 1) has two nodes of class 0 and a node of class 1.
Component = tuple[int, ...]
#: A search stops after this many ranks in components that were not priced before (about 0.5 s).
RANK_BUDGET = 30_000
#: The same for stages of components that were priced before: only their costs are added up.
STAGE_BUDGET = 4_000
#: Largest number of different components for which chains over good links are tried.
MOST_CHAINED = 64
#: A swap that saves less than this part of a step is not worth a less regular placement.
SWAP_GAIN = 1e-3
#: Times with a smaller relative difference are equal.
ROUNDING = 1e-9
#: Largest number of ways to mix the nodes that do not fill components of their class.
MIXTURES = 24


def place(prices: Prices, sizes: Sizes, budget: int | None = None) -> Placement:
    """Return the placement with the best order of the nodes that the search finds.

    It has the shortest predicted step of those in which no group uses Ethernet between two fast fabrics.

    Args:
        prices: Costs of the job on the site.
        sizes: Parallel sizes, with the data size.
        budget: Number of orders to try; by default as many as take about half a second.
    """
    class_of = classes_of(prices.network)  # name of a node -> its class (interchangeable nodes)
    blocks = Blocks(prices.network, class_of)
    if blocks.has_only_whole_blocks:  # order runs of equal nodes (blocks) instead of single nodes
        search = _Search(prices, sizes, blocks)
        search.run(budget)
        # Class of each node, in rank order. (A class is named by its first node type.)
        order = search.placement(search.best).node_types()
    else:
        order = list(best_order_of_classes(prices, sizes, class_of))
    unused: dict[int, list[str]] = {}  # class of equal nodes -> names, reversed for pop()
    for name, node_class in reversed(class_of.items()):
        unused.setdefault(node_class, []).append(name)
    return prices.network.placement([unused[node_class].pop() for node_class in order], sizes)


def fastest_first(network: Network) -> tuple[str, ...]:
    """Return the order of the nodes for a job whose parallel sizes are not known.

    The nodes of each cluster follow each other, the fastest fabric first. So each group stays on
    its fabric if the stages divide the clusters evenly. The slowest fabric gets the last stages:
    these end their backward passes first, so their slow reductions start earlier. With a WAN,
    clusters with good links are neighbours.
    """
    nodes_of: dict[int, list[str]] = {}  # class (number of its first node type) -> its nodes
    for name, node_class in classes_of(network).items():
        nodes_of.setdefault(node_class, []).append(name)
    ordered = sorted(nodes_of, key=lambda node_class: -network.fabric([node_class]).rate_bps)
    if not network.wan:
        return tuple(name for node_class in ordered for name in nodes_of[node_class])
    clusters = list(dict.fromkeys(map(network.cluster, ordered)))  # fastest first
    # The better links decide; _chain uses the order only to choose a direction.
    chain = _chain(network, clusters)
    nodes = sorted(network.site.nodes, key=lambda node: chain.index(node.cluster))
    return tuple(node.name for node in nodes)


def _chain(network: Network, clusters: Sequence[str]) -> list[str]:
    """Order clusters such that neighbours have good links.

    Of the two directions, it takes that whose first cluster comes earlier in `clusters`.
    """
    order = list(best_order(clusters, network.wan.cost))
    if clusters.index(order[0]) < clusters.index(order[-1]):
        return order
    return order[::-1]


class _Score(NamedTuple):
    """Quality of an order of the nodes, to compare orders; a smaller score is better."""

    spans: bool  # whether a group uses Ethernet because its nodes are on different networks
    step_s: float  # predicted step
    flat_s: float  # step with flat rings only, to compare orders that are equal otherwise


class _Search:
    """Search for the best order of the nodes; it begins with the launcher's order.

    `best` has the node classes of each component (nodes with the same stages), `score` its score.
    """

    def __init__(self, prices: Prices, sizes: Sizes, blocks: Blocks):
        """Begin with the order in which the launcher lists the nodes, as the best order so far."""
        self.prices = prices
        self.sizes = sizes
        self.network = prices.network
        flat_rules = replace(prices.rules, reductions=(FLAT,))  # flat rings only
        self.flat_prices = Prices(prices.network, prices.job, flat_rules)
        self.blocks = blocks
        # Blocks (orders.py) all have equally many ranks. The search treats each block as a node.
        launchers_order = blocks.in_launchers_order()  # class of each block
        self.counts = Counter(launchers_order)  # class -> number of its blocks, here called nodes
        placement = Placement.of(sizes, blocks.ranks, launchers_order)
        # Node indices of each component. Stages that share nodes form a component.
        self.nodes_of_components = placement.components
        component_ranks = placement.stage_ranks * placement.stages_per_component
        self.ranks_per_order = component_ranks * len(placement.components)  # to price an order
        self.best = self.components_of(launchers_order)
        self.score = self._score_of(self.best)

    def components_of(self, order: Sequence[int]) -> tuple[Component, ...]:
        """Divide an order of the nodes into components; return the node classes of each."""
        return tuple(tuple(order[index] for index in nodes) for nodes in self.nodes_of_components)

    def placement(self, components: Sequence[Component]) -> Placement:
        """Return the placement with these components (nodes that hold the same stages), in this order.

        With only some of the components, the pipeline has only their stages.
        """
        sizes = self.sizes
        if len(components) < len(self.nodes_of_components):
            sizes = replace(
                sizes, pipeline=len(components) * sizes.pipeline // len(self.nodes_of_components)
            )
        return self.blocks.placement(sizes, components)

    def _score_of(self, components: Sequence[Component]) -> _Score:
        """Return the score of an order: whether a group spans networks, and the predicted step time.

        `components` has the classes of each component's nodes. Nodes that hold the same stages form a
        component, nodes on the same fabrics a class.
        """
        placement = self.placement(components)
        step_s = flat_s = self.prices.step_s(placement)  # predicted in closed form
        # Orders that are equal with hierarchical reductions may differ with flat rings.
        if any(reduction.name == HIERARCHICAL for reduction in self.prices.reductions(placement)):
            flat_s = self.flat_prices.step_s(placement)
        return _Score(self.prices.spans_networks(placement), step_s, flat_s)

    def accept_if_better(self, components: Sequence[Component], gain: float = ROUNDING) -> bool:
        """Store an order as `self.best` if it is better than the best so far; return whether it is.

        An order whose groups all share a fast network (_Score.spans) is better; else a shorter step is.

        Args:
            components: Node classes of each component (nodes that hold the same stages).
            gain: Part of the best step time that the order must save.
        """
        score = self._score_of(components)
        is_better = self._is_better(score, gain)
        if is_better:
            self.best = tuple(components)
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

    def accept_worthwhile_swap(self, components: Sequence[Component]) -> bool:
        """Store an order as `self.best` if it saves SWAP_GAIN of a step; return whether it does."""
        return self.accept_if_better(components, SWAP_GAIN)

    def run(self, budget: int | None) -> None:
        """Search for the best order of the nodes, and keep it in `self.best`.

        Args:
            budget: Number of orders to try; None: as many as take about half a second.
        """
        if len(self.counts) == 1:
            return
        # Numbers of orders to try: of components that were not priced before (slow), or that were
        # (fast). On large sites, at least a few.
        new_orders = budget or max(4, RANK_BUDGET // self.ranks_per_order)
        known_orders = budget or max(50, STAGE_BUDGET // self.sizes.pipeline)
        component_nodes = len(self.nodes_of_components[0])
        usable_fabrics = {each: self.network.usable_fabrics(each) for each in self.counts}

        # Classes of each component's nodes, such that the nodes of a component share a fabric. No
        # group then needs Ethernet because of nodes on different networks. None: not found.
        unspanned = pack(self.counts, usable_fabrics, component_nodes)
        # pack() returns a single division. There may be others if some nodes can use several fabrics.
        has_choice = any(len(fabrics) > 1 for fabrics in usable_fabrics.values())
        is_small = order_count(self.counts) <= new_orders  # number of distinct orders
        if is_small and (unspanned is None or has_choice):
            for order in distinct_orders(self.counts):  # order: class of each node
                self.accept_if_better(self.components_of(order))
        elif unspanned is not None:
            self.try_orders_of(unspanned, known_orders)
        elif self.network.wan:  # some group needs Ethernet, here and below
            self.line_up_clusters(component_nodes, new_orders)  # nodes of a cluster stay together
        else:  # components of a single class, and some mixed components
            self._try_mixtures(component_nodes, new_orders, known_orders)

    def _try_mixtures(self, size: int, new_orders: int, known_orders: int) -> None:
        """Price orders in which some components have nodes of several classes; keep the best order.

        Nodes on the same fabrics form a class, nodes with the same stages a component. Each class
        fills as many whole components as it can; only the remaining nodes are mixed. At the end,
        pairs of nodes are swapped. `self.best` has the result.

        Args:
            size: Nodes of a component.
            new_orders: Largest number of orders to price, if their components are new (slow).
            known_orders: Largest number of orders to price, if their components are priced (fast).
        """
        # A mixture is a division into components, some of them mixed. The first order of a mixture
        # is slow to price: its components are new. So half of `new_orders` mixtures are tried.
        mixture_count = min(MIXTURES, max(2, new_orders // 2))
        mixtures = list(islice(_divisions_with_leftovers(self.counts, size), mixture_count))
        # An order may be of either kind, so the smaller limit holds, for all mixtures together.
        orders_per_mixture = min(known_orders, new_orders) // len(mixtures)
        for components in mixtures:
            self.try_orders_of(components, orders_per_mixture)
        swap_pairs(  # keeps each swap for which the function returns True: it saves SWAP_GAIN
            Placement.of_parts(self.sizes, self.blocks.ranks, self.best).node_types(),
            lambda order: self.accept_worthwhile_swap(self.components_of(order)),
            limit=new_orders,
        )

    def line_up_clusters(self, size: int, limit: int) -> None:
        """Price orders in which the nodes of each cluster follow each other; keep the best order.

        A cluster may end in the middle of a component (nodes with the same stages). The component
        then has nodes of two clusters. In the first order, neighbouring clusters have good links.
        Swaps of clusters that save the share SWAP_GAIN follow. `self.best` has the result.

        Args:
            size: Nodes of a component.
            limit: Largest number of orders to price.
        """
        classes: dict[str, list[int]] = {}  # cluster -> classes of its nodes
        for node_class in self.counts:
            classes.setdefault(self.network.cluster(node_class), []).append(node_class)

        def in_order(clusters: Sequence[str]) -> tuple[Component, ...]:
            """Return the classes of each component's nodes, for an order of the clusters."""
            nodes: list[int] = []
            for cluster in clusters:
                for node_class in classes[cluster]:
                    nodes += [node_class] * self.counts[node_class]
            return tuple(tuple(nodes[start : start + size]) for start in range(0, len(nodes), size))

        chain = _chain(self.network, list(classes))  # clusters, good links between neighbours
        self.accept_if_better(in_order(chain))
        swap_pairs(chain, lambda clusters: self.accept_worthwhile_swap(in_order(clusters)), limit)

    def try_orders_of(self, components: Sequence[Component], limit: int) -> None:
        """Price orders of components (nodes with the same stages); keep the best in `self.best`.

        If there are few orders, all are tried. Otherwise equal components first stay together: all
        orders of the distinct components if these are few, else two orders and swaps of them. With
        a WAN, chains over good links are tried, too. Swaps of single components end the search.

        Args:
            components: Node classes (nodes on the same fabrics) of each component.
            limit: Largest number of orders to try, about.
        """
        counts = Counter(components)
        if order_count(counts) <= limit:
            for order in distinct_orders(counts):
                self.accept_if_better(order)
            return

        def with_equal_together(distinct: Sequence[Component]) -> tuple[Component, ...]:
            """Return all components in an order in which equal components stand next to each other."""
            return tuple(part for part in distinct for _ in range(counts[part]))

        distinct = list(counts)
        # Half of the tries are for permutations. Each of the two rounds of swaps gets a quarter.
        has_few_permutations = math.factorial(len(counts)) <= limit // 2
        if has_few_permutations:
            for order in permutations(distinct):
                self.accept_if_better(with_equal_together(order))
        else:
            self.accept_if_better(with_equal_together(distinct))
            # The last stages end their backward passes first: slow reductions belong there.
            distinct.sort(key=self._reduction_s)
            self.accept_if_better(with_equal_together(distinct))
        if self.network.wan and LEAST_CHAINED <= len(distinct) <= MOST_CHAINED:  # over good links
            for chain in self._chains(distinct):
                self.accept_if_better(with_equal_together(chain))
            distinct = list(dict.fromkeys(self.best))  # swaps begin with the best order so far
        if not has_few_permutations:
            swap_pairs(  # swaps a component and all its equals with another component and its equals
                distinct,
                lambda order: self.accept_worthwhile_swap(with_equal_together(order)),
                limit // 4,
            )
        swap_pairs(self.best, self.accept_worthwhile_swap, limit // 4)  # single components

    def _reduction_s(self, part: Component) -> float:
        """Return the seconds in which the slowest stage on the nodes `part` reduces a block's gradients."""
        size = self.prices.job.block_bytes
        reductions = self.prices.reductions(self.placement([part]))  # of each stage
        return max(reduction.seconds(size) for reduction in reductions)

    def _chains(self, distinct: Sequence[Component]) -> Iterator[Sequence[Component]]:
        """Yield four orders of components: two chains over good stage links, each also reversed.

        A component is a set of nodes with the same stages. The first chain makes the slowest link
        between neighbours as fast as possible. The second chain makes the sum of all links smallest.
        """
        size = self.prices.job.block.activation_bytes
        link_s = {}  # (component, next component) -> seconds of an activation
        for first, second in permutations(distinct, 2):
            placement = self.placement([first, second])  # a pipeline of these two components only
            last_of_first = placement.sizes.pipeline // 2 - 1
            # Price (linear in bytes) of a message between the slowest pair of ranks.
            link = self.prices.stage_link(placement, last_of_first, last_of_first + 1)
            link_s[first, second] = link.seconds(size)

        # best_order minimizes the largest first number of all pairs, then the sums of the numbers.
        by_slowest = best_order(distinct, lambda pair: (link_s[pair], link_s[pair]))
        by_sum = best_order(distinct, lambda pair: (0.0, link_s[pair]))
        for chain in (by_slowest, by_sum):
            yield chain
            yield chain[::-1]


def _divisions_with_leftovers(counts: Mapping[int, int], size: int) -> Iterator[list[Component]]:
    """Yield divisions of nodes into components (nodes with the same stages), with few mixed components.

    Nodes that fill no component of their class alone are lined up, in every order of classes, and cut.

    Args:
        counts: Class of node (nodes on the same fabrics) -> number of nodes.
        size: Nodes of a component.
    """
    pure = [(node_class,) * size for node_class, n in counts.items() for _ in range(n // size)]
    leftover = {node_class: n % size for node_class, n in counts.items() if n % size}
    for classes in permutations(leftover):
        line = [node_class for node_class in classes for _ in range(leftover[node_class])]
        yield pure + [tuple(line[start : start + size]) for start in range(0, len(line), size)]
