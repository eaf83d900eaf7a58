"""Interchangeable nodes, and blocks of them that have equally many ranks.

Nodes on the same fast fabrics, with equally many ranks, are interchangeable and form a class. If classes
differ in the ranks of a node, the search for the best order moves blocks: nodes of one class that
follow each other and together have as many ranks as a block of any other class.

    class a: nodes of 4 ranks     block of 8 ranks: a0 a1
    class b: nodes of 8 ranks     block of 8 ranks: b0

If all nodes have equally many ranks, a block is a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, permutations

from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes

#: Largest number of orders of whole classes that are priced.
MOST_ORDERS = 120


def classes_of(network: Network) -> dict[str, int]:
    """Return the class of each node, by name: the first node type with equal fabrics and ranks."""
    first_type: dict[object, int] = {}
    result = {}
    for name, node_type in network.node_type_of.items():
        cluster = network.cluster(node_type) if network.wan else ""
        # Equal for interchangeable types.
        signature = (
            tuple(network.usable_fabrics(node_type)),
            cluster,
            network.widths[node_type],
        )
        result[name] = first_type.setdefault(signature, node_type)
    return result


class Blocks:
    """Nodes of a site in blocks of equally many ranks, each of nodes of one class."""

    def __init__(self, network: Network, class_of: Mapping[str, int]):
        """Count the nodes of a block of each class.

        Args:
            network: Nodes and their numbers of ranks.
            class_of: Name of a node -> its class, in the launcher's order of the nodes.
        """
        self.network = network
        self.class_of = class_of
        self.ranks = network.site.aligned_ranks  # of each block
        #: Class -> nodes of each of its blocks.
        self.nodes = {each: self.ranks // network.widths[each] for each in class_of.values()}

    @property
    def hold_all_nodes(self) -> bool:
        """Return whether the nodes of each class fill whole blocks."""
        counts = Counter(self.class_of.values())
        return all(count % self.nodes[each] == 0 for each, count in counts.items())

    def in_launchers_order(self) -> tuple[int, ...]:
        """Return the class of each block, in the order in which the launcher's list completes blocks."""
        blocks = []
        open_nodes: Counter[int] = Counter()  # class -> nodes of its block that is not complete yet
        for node_class in self.class_of.values():
            open_nodes[node_class] += 1
            if open_nodes[node_class] == self.nodes[node_class]:
                blocks.append(node_class)
                open_nodes[node_class] = 0
        return tuple(blocks)

    def placement(self, sizes: Sizes, parts: Sequence[Sequence[int]]) -> Placement:
        """Return the placement of components (nodes with the same stages) that consist of blocks.

        Args:
            sizes: Parallel sizes, with the data size.
            parts: For each component in stage order, the class of each of its blocks.
        """
        nodes_of_parts = [self._nodes_of(part) for part in parts]
        network = self.network
        return Placement.of_parts(sizes, network.processes, nodes_of_parts, network.widths)

    def _nodes_of(self, blocks: Iterable[int]) -> list[int]:
        """Return the class of each node of some blocks."""
        return [node_class for node_class in blocks for _ in range(self.nodes[node_class])]


def best_order_of_classes(
    prices: Prices, sizes: Sizes, class_of: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the class of each node in the best order that keeps the nodes of a class together.

    It is for nodes that do not fill blocks. The launcher's order is a candidate, too. An order in
    which no group spans networks is better than one in which some group does; otherwise the shorter
    predicted step is better.

    Args:
        prices: Costs of the job on the site.
        sizes: Parallel sizes, with the data size.
        class_of: Name of a node -> its class, in the launcher's order.
    """
    network = prices.network
    launcher = tuple(class_of.values())
    counts = Counter(launcher)
    orders = [launcher]
    for classes in islice(permutations(counts), MOST_ORDERS):
        orders.append(tuple(each for each in classes for _ in range(counts[each])))

    def score(order: tuple[int, ...]) -> tuple[bool, float]:
        """Return whether a group spans networks, and the predicted step in seconds."""
        placement = Placement.of(sizes, network.processes, order, network.widths)
        return prices.spans_networks(placement), prices.step_s(placement)

    return min(orders, key=score)
