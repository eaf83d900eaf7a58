"""Orders of whole clusters that are worth pricing, for given parallel sizes.

    clusters A B, 4 stages    (A)(B)    A A B B        the pipeline crosses between clusters once, gradients
                                                       stay inside
                              (AB)      AB AB AB AB    every cluster holds whole pipelines, gradients cross
    clusters A B C D          (AB)(CD)  AB AB CD CD    both

An order divides the node types into groups of equal numbers, which share stages, and puts the groups
into a sequence. Kinds that are equal in nodes, GPUs, fabrics and links to other clusters are
interchangeable, so only distinct orders are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from holmes_ext.plan.across import best_order
from holmes_ext.plan.cost.model import Gpu
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.placement import Placement, joined
from holmes_ext.plan.sizes import PIPELINES_FIRST, Sizes

#: Node types that share stages, in the order of the stages.
Groups = tuple[tuple[int, ...], ...]
#: Largest number of distinct orders for one way to group the kinds, times the number of stages.
MAX_ORDERS = 9600
#: Least number of distinct orders that are listed, however many stages there are.
_LEAST_ORDERS = 8
#: Largest number of orders if there is a WAN, where all orders differ: chains over good links come first.
MOST_CHAINED = 9


class Orders:
    """Distinct orders of the node types of a site.

    Args:
        network: The site.
        gpus: GPU of each node type.
    """

    def __init__(self, network: Network, gpus: Sequence[Gpu]):
        """Find the node types that are interchangeable."""
        self.network = network
        self.gpus = tuple(gpus)
        self.node_types = range(len(network.node_types))
        self.nodes = [len(names) for names in network.names]  # by kind
        fabrics_of = [fabrics for _, fabrics in network.node_types]
        self._kinds_on = Counter(name for fabrics in fabrics_of for name in fabrics)  # by fabric
        # By kind: a value that is equal for kinds with equal fabrics, numbers of nodes and GPUs.
        self._looks = [
            (tuple(map(self._fabric_look, fabrics)), nodes, gpu)
            for fabrics, nodes, gpu in zip(fabrics_of, self.nodes, self.gpus)
        ]
        #: By kind: the first kind that it is interchangeable with.
        self.first_equal_kind = tuple(self._first_equal(kind) for kind in self.node_types)

    def _fabric_look(self, name: str) -> Hashable:
        """Return a value that is equal for interchangeable fabrics: those of a single node type."""
        if self._kinds_on[name] > 1:
            return name
        fabric = self.network.line(self.network.site.fabric_by_name[name])
        return (fabric.kind, fabric.rate_bps, fabric.latency_s)

    def _first_equal(self, kind: int) -> int:
        for first in self.node_types:
            if self._looks[first] == self._looks[kind] and self._have_equal_links(kind, first):
                return first
        raise AssertionError("every kind is equal to itself")

    def _have_equal_links(self, first: int, second: int) -> bool:
        """Return whether two node types have equal links to all other clusters."""
        wan = self.network.wan
        first_cluster = self.network.cluster(first)
        second_cluster = self.network.cluster(second)
        if first_cluster == second_cluster or not wan:
            return True

        def look(source: str, target: str) -> Hashable:
            """Return the type, rate and latency of each link on the way between two clusters."""
            return tuple(
                (hop.key[0], hop.rate_bps, hop.latency_s) for hop in wan.hops(source, target)
            )

        return all(
            look(first_cluster, other) == look(second_cluster, other)
            for other in self.network.site.clusters
            if other not in (first_cluster, second_cluster)
        )

    def placements(self, sizes: Sizes) -> tuple[list[Placement], bool]:
        """Return placements for parallel sizes, and whether these are all distinct orders of whole clusters.

        Args:
            sizes: Parallel sizes with the data size, in the default order of the axes.
        """
        stages = sizes.pipeline
        # Largest number of orders for each way to group the kinds.
        most = max(_LEAST_ORDERS, MAX_ORDERS // stages)
        most = min(MOST_CHAINED if self.network.wan else MAX_ORDERS, most)
        if stages == 1:
            most = 1  # a single stage holds all clusters, in any order
        is_complete = True
        placements: list[Placement] = []
        kinds = len(self.node_types)
        for together in range(1, kinds + 1):  # number of kinds that share stages
            if kinds % together:
                continue
            if stages == 1 and together > 1:
                break  # all kinds share the only stage in any case
            orders = chain(self._chained(together), self._distinct(together))
            listed = dict.fromkeys(islice(orders, most))
            if stages > 1 and next(orders, None) is not None:
                is_complete = False  # there are orders beyond those listed
            for groups in listed:
                placements += self.placements_of(sizes, groups)
        return placements, is_complete

    def placements_of(self, sizes: Sizes, groups: Groups) -> list[Placement]:
        """Return the placement with these groups of equal numbers of kinds, in the order of the stages.

        Returns:
            One placement, or [] if the kinds of a group do not divide evenly among its stages.
        """
        if len(groups[0]) > 1:
            return self._shared(sizes, groups)
        slots = tuple((kind, self.nodes[kind]) for (kind,) in groups)
        return [Placement(sizes, self.network.processes, slots)]

    def _chained(self, together: int) -> Iterator[Groups]:
        """Yield orders in which clusters with good WAN links are neighbours.

        These are the chain over the best links, its reverse, and the chain with two neighbours swapped.

        Args:
            together: Number of kinds that share stages.
        """
        if not self.network.wan or len(self.node_types) < 3:
            return

        def cost(pair: tuple[int, int]) -> tuple[float, float]:
            """Return the cost of the WAN link between the clusters of two kinds."""
            source, target = map(self.network.cluster, pair)
            return self.network.wan.cost((source, target))

        order = self.network.remember("chain", lambda: best_order(self.node_types, cost))
        groups = tuple(order[start : start + together] for start in range(0, len(order), together))
        yield groups
        yield groups[::-1]
        for left in range(len(groups) - 1):
            yield (*groups[:left], groups[left + 1], groups[left], *groups[left + 2 :])

    def _distinct(self, together: int) -> Iterator[Groups]:
        """Yield all sequences of groups of kinds, without those that only swap equal kinds.

        Args:
            together: Number of kinds in each group.
        """
        members: dict[int, list[int]] = {}  # first kind -> all kinds that are equal to it
        for kind, first in enumerate(self.first_equal_kind):
            members.setdefault(first, []).append(kind)
        used = dict.fromkeys(members, 0)  # first kind -> how many equal kinds are in groups already

        def choices(size: int, firsts: list[int]) -> Iterator[tuple[int, ...]]:
            """Yield the multisets of `size` unused kinds.

            Args:
                size: Number of kinds.
                firsts: Kinds to choose from; each stands for all kinds that are equal to it.
            """
            if not size:
                yield ()
            elif firsts:
                first, *others = firsts
                unused = len(members[first]) - used[first]
                for amount in range(min(size, unused), -1, -1):
                    for choice in choices(size - amount, others):
                        yield (first,) * amount + choice

        def extend(groups: Groups) -> Iterator[Groups]:
            """Yield all complete sequences that begin with `groups`."""
            if len(groups) * together == len(self.first_equal_kind):
                yield groups
                return
            # A list, because the loop changes `used`, on which the choices depend.
            for choice in list(choices(together, list(members))):
                group = []
                for first in choice:
                    group.append(members[first][used[first]])
                    used[first] += 1
                yield from extend((*groups, tuple(group)))
                for first in choice:  # undo the choice
                    used[first] -= 1

        return extend(())

    def _shared(self, sizes: Sizes, groups: Groups) -> list[Placement]:
        """Return the placement in which every kind of a group holds an equal part of each of its stages.

        Args:
            sizes: Parallel sizes with the data size.
            groups: Node types that share stages, in the order of the stages.

        Returns:
            One placement, or [] if the kinds do not divide evenly among the stages.
        """
        processes = self.network.processes
        stage_ranks = self.network.world // sizes.pipeline
        replica_ranks = sizes.tensor * sizes.context
        slots = []
        has_whole_nodes = True  # whether a kind's part of each stage consists of whole nodes
        for group in groups:
            ranks_of = {kind: self.nodes[kind] * processes for kind in group}
            group_ranks = sum(ranks_of.values())
            stages = group_ranks // stage_ranks
            if group_ranks % stage_ranks:
                return []  # the group does not hold whole stages
            if any(ranks % (stages * replica_ranks) for ranks in ranks_of.values()):
                return []  # a kind's part of a stage does not consist of whole tensor and context groups
            if any(ranks // stages % processes for ranks in ranks_of.values()):
                has_whole_nodes = False
            # (kind, nodes) of a stage; not used if a part is not a whole number of nodes
            stage = [(kind, ranks // stages // processes) for kind, ranks in ranks_of.items()]
            slots += stage * stages
        if has_whole_nodes:
            return [Placement(sizes, processes, joined(slots))]
        if len(groups) > 1:
            return []
        # Stages share nodes: whole pipelines follow each other.
        slots = [(kind, self.nodes[kind]) for kind in groups[0]]
        return [Placement(replace(sizes, order=PIPELINES_FIRST), processes, tuple(slots))]


def launched(network: Network, sizes: Sizes) -> Placement:
    """Return the placement without holmes: the nodes in the order of the cluster file."""
    names = [node.name for node in network.site.nodes]
    return replace(network.placement(names, sizes), names=())


def described(network: Network, placement: Placement) -> str:
    """Return an order in words: "a -> b" if a holds the first stages, "a + b" if both hold the same."""
    stages_of: dict[str, list[int]] = {}  # cluster -> its stages
    for stage, content in enumerate(placement.stages):
        for cluster in network.clusters(content):
            stages_of.setdefault(cluster, []).append(stage)
    groups: dict[tuple[int, ...], list[str]] = {}  # stages -> clusters that hold them
    for cluster, stages in stages_of.items():
        groups.setdefault(tuple(stages), []).append(cluster)
    return " -> ".join(" + ".join(clusters) for clusters in groups.values())
