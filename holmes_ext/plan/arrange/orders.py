"""Orders of whole clusters that are worth pricing, for given parallel sizes.

    clusters A B, 4 stages    (A)(B)    A A B B        the pipeline crosses between clusters once, gradients
                                                       stay inside
                              (AB)      AB AB AB AB    every cluster holds whole pipelines, gradients cross
    clusters A B C D          (AB)(CD)  AB AB CD CD    both

Nodes of the same cluster on the same fabrics form a node type. An order divides the node types into
groups of equally many types, and puts the groups into a sequence. The first group holds the first
pipeline stages. The types of a group share its stages: each type holds a part of each stage. Types
with equal nodes, GPUs, fabrics and links to other clusters are interchangeable and form a class, so
only distinct orders are listed.

If node types differ in the ranks of a node, blocks are put into an order in place of single nodes. A
block are nodes of the same type that follow each other; all blocks have equally many ranks.

    type a: nodes of 4 ranks     block of 8 ranks: a0 a1
    type b: nodes of 8 ranks     block of 8 ranks: b0

If all nodes have equally many ranks, a block is a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations

from holmes_ext.plan.across import best_order
from holmes_ext.plan.cost.model import Gpu
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.placement import Content, Placement, merge_neighbours
from holmes_ext.plan.sizes import PIPELINES_FIRST, Sizes

#: Least number of parts (node types, components) for which neighbours on good links are a choice: two parts
#: are neighbours in every order.
LEAST_CHAINED = 3
#: Groups of node types in the order of the stages; the types of a group share stages.
Groups = tuple[tuple[int, ...], ...]
#: Largest number of distinct orders for each number of types in a group, times the number of stages.
MAX_ORDERS = 9600
#: Least number of distinct orders that are listed, however many stages there are.
_LEAST_ORDERS = 8
#: Largest number of orders if there is a WAN, where all orders differ: chains over good links come first.
MOST_CHAINED = 9
#: Largest number of orders of whole classes (interchangeable nodes) that are priced.
MOST_CLASS_ORDERS = 120


class Orders:
    """Distinct orders of the node types of a site, for the pipeline stages of a job.

    A node type stands for the nodes of a cluster that are on the same fabrics.
    """

    def __init__(self, network: Network, gpus: Sequence[Gpu]):
        """Find the node types that can be exchanged without changing any cost.

        Two node types are interchangeable if all of these are equal: the number of their nodes,
        the ranks of a node, their GPUs, their fabrics, and the rate and latency of their links to all
        other clusters.

        Args:
            network: Nodes, fabrics and links of the site.
            gpus: GPU of the nodes of each node type, in the order of network.node_types.
        """
        self.network = network
        self.gpus = tuple(gpus)
        self.node_types = range(len(network.node_types))
        self.nodes = [len(names) for names in network.names]  # by node type
        fabrics_of = [fabrics for _, fabrics in network.node_types]

        # Fabric -> number of node types on it. _fabric_signature uses it: a fabric of several node
        # types equals no other fabric.
        self._types_on = Counter(name for fabrics in fabrics_of for name in fabrics)

        # By node type: a value that is equal for node types with equal fabrics, numbers of nodes,
        # ranks of a node and GPUs.
        self._signatures = [
            (tuple(map(self._fabric_signature, fabrics)), nodes, ranks, gpu)
            for fabrics, nodes, ranks, gpu in zip(fabrics_of, self.nodes, network.widths, self.gpus)
        ]
        #: By node type: the first node type that it is interchangeable with.
        self.first_equal_type = tuple(self._first_equal(node_type) for node_type in self.node_types)

    def _fabric_signature(self, name: str) -> Hashable:
        """Return a value that is equal for fabrics that can be exchanged without changing any cost.

        A fabric that connects a single node type can be exchanged for one with equal rate and
        latency. A fabric that connects several types cannot, because a group may span these types.
        """
        if self._types_on[name] > 1:
            return name
        # line: the fabric with its measured rate and latency
        fabric = self.network.line(self.network.site.fabric_by_name[name])
        return (fabric.kind, fabric.rate_bps, fabric.latency_s)

    def _first_equal(self, node_type: int) -> int:
        """Return the first node type that is interchangeable with `node_type`, maybe itself."""
        for first in self.node_types:
            if self._signatures[first] == self._signatures[node_type] and self._have_equal_links(
                node_type, first
            ):
                return first
        raise AssertionError("every node type is equal to itself")

    def _have_equal_links(self, first: int, second: int) -> bool:
        """Return whether two node types have equal links to all other clusters."""
        wan = self.network.wan
        first_cluster = self.network.cluster(first)  # name of its cluster
        second_cluster = self.network.cluster(second)
        if first_cluster == second_cluster or not wan:
            return True

        def signature(source: str, target: str) -> Hashable:
            """Return the type, rate and latency of each link on the way between two clusters."""
            return tuple(
                (hop.key[0], hop.rate_bps, hop.latency_s) for hop in wan.hops(source, target)
            )

        return all(
            signature(first_cluster, other) == signature(second_cluster, other)
            for other in self.network.site.clusters
            if other not in (first_cluster, second_cluster)
        )

    def placements(self, sizes: Sizes) -> tuple[list[Placement], bool]:
        """Return placements that keep clusters whole, and whether the list is complete.

        A placement is an order of the nodes. In these placements, the nodes of a type either follow
        each other, or share their stages evenly with other types. Two placements are distinct if
        they differ in more than interchangeable node types. Large sites have too many to price.
        Then the list has only the first placements, for each number of node types that share stages.

        Args:
            sizes: Parallel sizes with the data size, in the default order of the axes.

        Returns:
            The placements, and True if no distinct placement is missing.
        """
        stages = sizes.pipeline
        if stages == 1:
            most = 1  # a single stage holds all clusters, in any order
        elif self.network.wan:
            # Links between clusters differ, so few orders are equal and there are many. Only chains
            # over good links are worth pricing.
            most = min(MOST_CHAINED, max(_LEAST_ORDERS, MAX_ORDERS // stages))
        else:
            # Pricing an order takes time in proportion to its stages.
            most = min(MAX_ORDERS, max(_LEAST_ORDERS, MAX_ORDERS // stages))
        is_complete = True
        placements: list[Placement] = []
        types_count = len(self.node_types)
        for group_size in range(1, types_count + 1):  # number of node types that share stages
            if types_count % group_size:
                continue
            if stages == 1 and group_size > 1:
                break  # all node types share the only stage in any case
            # Two sources of orders: tuples of groups of node types, in the order of the stages.
            # _chained yields orders with good links between neighbours; it is empty without a WAN.
            # _distinct yields all distinct orders, those of _chained among them. The first `most`
            # orders are priced, for each group size.
            orders = chain(self._chained(group_size), self._distinct(group_size))
            first_orders = list(islice(orders, most))
            has_further_orders = next(orders, None) is not None
            if stages > 1 and has_further_orders:  # with a single stage, all orders are equal
                is_complete = False
            for groups in dict.fromkeys(first_orders):  # each once
                placements += self.placements_of(sizes, groups)
        return placements, is_complete

    def placements_of(self, sizes: Sizes, groups: Groups) -> list[Placement]:
        """Return the placement in which the groups of node types follow each other over the stages.

        Args:
            sizes: Parallel sizes with the data size.
            groups: Node types by group; all groups have equally many types. The first group holds
                the first stages; the types of a group share all of its stages.

        Returns:
            A list with the placement, or [] if a group's nodes do not divide evenly among its
            stages.
        """
        if len(groups[0]) > 1:
            return self._placements_with_shared_stages(sizes, groups)
        # Each group has a single type, whose nodes follow each other: (node type, number of nodes).
        node_runs = tuple((node_type, self.nodes[node_type]) for (node_type,) in groups)
        return [self._placement(sizes, node_runs)]

    def _placement(self, sizes: Sizes, node_runs: Content) -> Placement:
        """Return the placement on nodes that are given as (node type, number of nodes) in rank order."""
        return Placement(sizes, self.network.processes, node_runs, widths=self.network.widths)

    def _chained(self, group_size: int) -> Iterator[Groups]:
        """Yield a few sequences of groups of node types in which clusters with good links are neighbours.

        They are made from a chain: a sequence of all node types in which the worst WAN link between
        the clusters of two neighbours is as good as possible. It is cut into groups of
        `group_size` types. The yielded sequences are these groups, their reverse, and a sequence for
        each pair of neighbouring groups, with these two swapped. Without a WAN, or with fewer than
        three node types, nothing is yielded.

        Args:
            group_size: Number of node types in a group; these share pipeline stages.
        """
        if not self.network.wan or len(self.node_types) < LEAST_CHAINED:
            return

        def cost(pair: tuple[int, int]) -> tuple[float, float]:
            """Return the cost of the WAN link between the clusters of two node types."""
            source, target = map(self.network.cluster, pair)
            return self.network.wan.cost((source, target))  # (seconds per bit, latency in seconds)

        # The chain whose worst link is cheapest. `remember` computes it once for each network.
        order = self.network.remember("chain", lambda: best_order(self.node_types, cost))
        groups = tuple(
            order[start : start + group_size] for start in range(0, len(order), group_size)
        )
        yield groups
        yield groups[::-1]
        for left in range(len(groups) - 1):
            yield (*groups[:left], groups[left + 1], groups[left], *groups[left + 2 :])

    def _distinct(self, group_size: int) -> Iterator[Groups]:
        """Yield every way to divide the node types of the site into an ordered sequence of groups.

        Each node type is in exactly one group, and each group has `group_size` types. With types
        0 1 2 3 and groups of two, ((0, 1), (2, 3)) and ((2, 3), (0, 1)) are two sequences.
        Interchangeable node types form a class. Of sequences that only exchange types of the same
        class, the first is yielded.

        The search is depth-first: `extend` appends each possible next group, and takes it back.

        Args:
            group_size: Number of node types in each group; it divides the number of node types.
        """
        # A class is named by its first type. class -> all of its types
        types_of: dict[int, list[int]] = {}
        for node_type, equal_class in enumerate(self.first_equal_type):
            types_of.setdefault(equal_class, []).append(node_type)
        used = dict.fromkeys(types_of, 0)  # class -> number of its types that are in groups already

        def choices(size: int, classes: list[int]) -> Iterator[tuple[int, ...]]:
            """Yield every way to choose `size` of the node types that are in no group yet.

            Interchangeable node types form a class. A choice names only the class of each chosen
            type: (3, 3, 5) stands for two types of class 3 and a type of class 5. Of a class,
            len(types_of[class]) - used[class] types are in no group yet.

            Args:
                size: Number of node types to choose.
                classes: Classes to choose from.
            """
            if not size:
                yield ()
            elif classes:
                first_class, *others = classes
                unused = len(types_of[first_class]) - used[first_class]
                for amount in range(min(size, unused), -1, -1):
                    for choice in choices(size - amount, others):
                        yield (first_class,) * amount + choice

        def extend(groups: Groups) -> Iterator[Groups]:
            """Yield the complete sequences of groups of node types that begin with `groups`.

            A sequence is complete if each node type of the site is in exactly one of its groups. Of
            sequences that differ only in interchangeable types, the first is yielded.

            The enclosing function defines `group_size` (types in each group), `types_of` (class of
            interchangeable types -> its types), `used` (class -> number of its types in `groups`)
            and `choices` (ways to choose the next group; (3, 3, 5) has two types of class 3).
            """
            if len(groups) * group_size == len(self.first_equal_type):
                yield groups
                return
            # A choice is the class of every type of the next group. All choices are listed first,
            # because they depend on `used`, and the loop changes `used`.
            for choice in list(choices(group_size, list(types_of))):
                group = []
                for equal_class in choice:
                    group.append(types_of[equal_class][used[equal_class]])  # its next unused type
                    used[equal_class] += 1
                yield from extend((*groups, tuple(group)))
                for equal_class in choice:  # undo the choice
                    used[equal_class] -= 1

        return extend(())

    def _placements_with_shared_stages(self, sizes: Sizes, groups: Groups) -> list[Placement]:
        """Return the placement that spreads each node type evenly over the stages of its group.

        The node types of a group share stages. With types a (4 nodes) and b (2 nodes) on two
        stages, each stage has 2 nodes of a and 1 of b: the node order is a a b a a b.

        If a type's part of a stage is not a whole number of nodes, stages must share nodes. This is
        possible only with a single group, in the order PIPELINES_FIRST of the parallel axes.
        Neighbouring ranks then form whole pipelines, so every node holds ranks of all stages.

        Args:
            sizes: Parallel sizes with the data size.
            groups: Groups of node types that share stages; the first group holds the first stages.

        Returns:
            A list with the placement. [] in these cases: a group does not hold whole stages; a type's
            part of a stage has incomplete tensor or context groups; or stages must share nodes, and
            there are several groups.
        """
        widths = self.network.widths  # node type -> ranks of a node
        stage_ranks = self.network.world // sizes.pipeline
        replica_ranks = sizes.tensor * sizes.context
        node_runs = []  # (node type, nodes), in the order of the ranks
        has_whole_nodes = True  # whether a type's part of each stage consists of whole nodes
        for group in groups:
            ranks_of = {node_type: self.nodes[node_type] * widths[node_type] for node_type in group}
            group_ranks = sum(ranks_of.values())
            stages = group_ranks // stage_ranks
            if group_ranks % stage_ranks:
                return []  # the group does not hold whole stages
            if any(ranks % (stages * replica_ranks) for ranks in ranks_of.values()):
                return []  # a type's part of a stage has incomplete tensor or context groups
            if any(ranks // stages % widths[each] for each, ranks in ranks_of.items()):
                has_whole_nodes = False
            # (node type, nodes) of a stage; not used if a part is not a whole number of nodes
            stage = [
                (node_type, ranks // stages // widths[node_type])
                for node_type, ranks in ranks_of.items()
            ]
            node_runs += stage * stages
        if has_whole_nodes:
            # merge_neighbours: (a, 2), (a, 1) -> (a, 3)
            return [self._placement(sizes, merge_neighbours(node_runs))]
        if len(groups) > 1:
            # With PIPELINES_FIRST every node holds ranks of all stages. But if there are several
            # groups, the nodes of a group must hold only the stages of this group.
            return []
        node_runs = [(node_type, self.nodes[node_type]) for node_type in groups[0]]
        return [self._placement(replace(sizes, order=PIPELINES_FIRST), tuple(node_runs))]


def launched(network: Network, sizes: Sizes) -> Placement:
    """Return the placement without holmes: the nodes in the order of the cluster file."""
    names = [node.name for node in network.site.nodes]
    # names=(): the nodes of each type stand in the launcher's order in any case.
    return replace(network.placement(names, sizes), names=())


def described(network: Network, placement: Placement) -> str:
    """Return the clusters of a placement's stages as a text for tables.

    "a -> b": cluster a holds the first stages, b the last ones. "a + b": both hold the same stages.
    """
    stages_of: dict[str, list[int]] = {}  # cluster -> its stages
    for stage, content in enumerate(placement.stages):  # content: (node type, ranks) of the stage
        for cluster in network.clusters(content):  # each cluster once
            stages_of.setdefault(cluster, []).append(stage)
    groups: dict[tuple[int, ...], list[str]] = {}  # stages -> clusters that hold them
    for cluster, stages in stages_of.items():
        groups.setdefault(tuple(stages), []).append(cluster)
    return " -> ".join(" + ".join(clusters) for clusters in groups.values())


def classes_of(network: Network) -> dict[str, int]:
    """Return the class of each node, by name. Nodes of the same class are interchangeable.

    They have equally many ranks and the same fabrics. With a WAN they are also in the same cluster,
    because the links of two clusters may differ. A class is named by the first of its node types.
    """
    first_type: dict[object, int] = {}  # signature of a class -> its first node type
    result = {}
    for name, node_type in network.node_type_of.items():
        cluster = network.cluster(node_type) if network.wan else ""
        signature = (
            tuple(network.usable_fabrics(node_type)),
            cluster,
            network.widths[node_type],
        )
        result[name] = first_type.setdefault(signature, node_type)
    return result


class Blocks:
    """Nodes of a site, in blocks that all have equally many ranks.

    A block is a set of interchangeable nodes (a class, classes_of()) that follow each other. With nodes
    of 4 and of 8 ranks, a block has 8 ranks: two nodes of 4 ranks, or a node of 8. A search for an order
    of the nodes orders blocks instead, because any two blocks can be swapped.
    """

    def __init__(self, network: Network, class_of: Mapping[str, int]):
        """Compute how many nodes of each class form a block.

        The ranks of a block are the least number that whole nodes of every class can have together
        (site.aligned_ranks).

        Args:
            network: Nodes and their numbers of ranks.
            class_of: Name of a node -> its class (interchangeable nodes), in the launcher's order
                of the nodes.
        """
        self.network = network
        self.class_of = class_of
        self.ranks = network.site.aligned_ranks  # of each block
        #: Class -> nodes of each of its blocks.
        self.nodes = {each: self.ranks // network.widths[each] for each in class_of.values()}

    @property
    def has_only_whole_blocks(self) -> bool:
        """Return whether no node is left over when the nodes of each class are cut into blocks.

        A block are nodes of the same class (interchangeable nodes) with self.ranks ranks together.
        If nodes are left over, an order of blocks cannot have all nodes.
        """
        counts = Counter(self.class_of.values())
        return all(count % self.nodes[each] == 0 for each, count in counts.items())

    def in_launchers_order(self) -> tuple[int, ...]:
        """Return the class of each block, in the order in which the launcher's list of nodes completes them.

        A class is a set of interchangeable nodes. The nodes a0 b0 a1, of 4, 8 and 4 ranks, are the
        blocks b0 and (a0 a1) of 8 ranks.
        """
        blocks = []
        open_nodes: Counter[int] = Counter()  # class -> nodes of its block that is not complete yet
        for node_class in self.class_of.values():
            open_nodes[node_class] += 1
            if open_nodes[node_class] == self.nodes[node_class]:
                blocks.append(node_class)
                open_nodes[node_class] = 0
        return tuple(blocks)

    def placement(self, sizes: Sizes, parts: Sequence[Sequence[int]]) -> Placement:
        """Return the placement whose components consist of the given blocks.

        A component is a set of nodes that hold the same stages. A block are nodes of the same class
        (interchangeable nodes) with self.ranks ranks together.

        Args:
            sizes: Parallel sizes, with the data size.
            parts: For each component in stage order, the class of each of its blocks.
        """
        classes_of_parts = [self._node_classes(part) for part in parts]
        network = self.network
        return Placement.of_parts(sizes, network.processes, classes_of_parts, network.widths)

    def _node_classes(self, block_classes: Iterable[int]) -> list[int]:
        """Expand the class of each block into the class of each node of these blocks.

        If a block of class 0 has two nodes, and a block of class 1 a single node: 0 1 -> 0 0 1.
        """
        return [node_class for node_class in block_classes for _ in range(self.nodes[node_class])]


def best_order_of_classes(
    prices: Prices, sizes: Sizes, class_of: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the class of each node in the best order that keeps the nodes of a class together.

    A class is a set of interchangeable nodes. This simple search is for sites whose nodes cannot be
    cut into blocks (Blocks) without a remainder. It tries up to MOST_CLASS_ORDERS orders of the
    classes, and the launcher's order of the nodes.

    A communication group spans networks if it has to use Ethernet because its nodes are on different
    fast networks. An order without such groups is better than an order with them. Otherwise the shorter
    predicted step is better.

    Args:
        prices: Costs of the job on the site.
        sizes: Parallel sizes, with the data size.
        class_of: Name of a node -> its class, in the launcher's order.
    """
    network = prices.network
    launchers_order = tuple(class_of.values())
    counts = Counter(launchers_order)
    orders = [launchers_order]
    for classes in islice(permutations(counts), MOST_CLASS_ORDERS):
        orders.append(tuple(each for each in classes for _ in range(counts[each])))

    def score(order: tuple[int, ...]) -> tuple[bool, float]:
        """Return the score of an order, given as the class of each node; a smaller score is better.

        First, whether some communication group spans networks: it has to use Ethernet because its
        nodes are on different fast networks. Then the predicted step in seconds.
        """
        placement = Placement.of(sizes, network.processes, order, network.widths)
        return prices.spans_networks(placement), prices.step_s(placement)

    return min(orders, key=score)
