"""Load that a message or a collective puts on the networks, and its time if nothing else runs.

Times are linear in the bytes (the alpha-beta model: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan
2009). The simulation (planner/simulate) uses the same loads, and divides the rate of a NIC among the loads
that use it at the same time.

    ring of n ranks    Every NIC on the ring carries 2 (n - 1) / n of the bytes, in 2 (n - 1) messages that
                       follow each other.
    all-to-all         Every rank sends the others their parts in turn.
    between clusters   Traffic also passes uplinks and links (cluster/wan.py). All groups that cross share
                       them. The slowest NIC or link limits the rate, and the latencies add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.wan import Hop, Wan
from holmes_ext.plan.across import hop_loads
from holmes_ext.plan.cost.links import Curve, Link, Links
from holmes_ext.plan.placement import Content, GroupFamily, Placement, StageMessages
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import Pair, neighbours

T = TypeVar("T")
#: (node class, fabric, "out" or "in"). Nodes of the same class are equally busy (plan/placement.py).
Nic = tuple[int, str, str]


@dataclass(frozen=True)
class Price:
    """Time of a transfer as a linear function of its bytes."""

    byte_s: float = 0.0  # seconds per byte
    latency_s: float = 0.0  # seconds that do not depend on the bytes

    def seconds(self, size: float) -> float:
        """Return the seconds that a transfer of `size` bytes takes; 0 for no bytes."""
        return self.latency_s + size * self.byte_s if size > 0 else 0.0

    def scaled(self, factor: float) -> Price:
        """Return this price times `factor`: latency and seconds per byte both grow."""
        return Price(factor * self.byte_s, factor * self.latency_s)

    def __add__(self, other: Price) -> Price:
        return Price(self.byte_s + other.byte_s, self.latency_s + other.latency_s)


#: Price of a transfer that takes no time.
FREE = Price()


@dataclass(frozen=True)
class Load:
    """Use of the networks by a message or a collective, for each byte that it sends or reduces.

    `price` is its time if nothing else runs. The simulation adds up the loads of transfers that run
    at the same time. The defaults are those of a single message from one rank to another.
    """

    nics: tuple[tuple[Nic, float], ...] = ()  # NIC, and number of equal flows that share its rate
    hops: tuple[tuple[Hop, float], ...] = ()  # the same for links and uplinks between clusters
    fabric: Fabric | None = None  # None: inside a node
    inside_bps: float = 0.0  # bits/s inside a node; 0: not known, counts as free
    volume: float = 1.0  # bytes through a NIC for each byte of the message or reduced tensor
    messages: float = 1.0  # number of messages that follow each other, each with a latency
    message_share: float = 1.0  # size of each message, as a part of all bytes
    wan_latency_s: float = 0.0  # total latency between clusters beyond the fabric's own, in seconds
    #: Whether both ends send at the same time, as in a ring. This selects the measured curve.
    ring: bool = False
    crosses_clusters: bool = False
    # Only for a lab, where all nodes share the cores of the same machine:
    senders: float = 0.0  # messages at the same time, of all nodes; their bytes cost CPU time
    cpu_messages: float = 0.0  # of a hierarchical all-reduce; each costs a fixed CPU time

    def scaled(self, factor: float) -> Load:
        """Return the load of `factor` times as many messages and bytes (half a ring: a reduce-scatter)."""
        return replace(
            self,
            volume=factor * self.volume,
            messages=factor * self.messages,
            wan_latency_s=factor * self.wan_latency_s,
        )

    @cached_property
    def price(self) -> Price:
        """Return the seconds per byte and the latency of this load while no other traffic runs.

        The busiest NIC or link sets the seconds per byte. Latencies of successive messages add up.
        """
        if self.fabric is None:  # inside a node
            if not self.inside_bps:
                return FREE
            return Price(byte_s=8 * self.volume / self.inside_bps)
        nic_bps = self.fabric.rate_bps  # bits/s of a NIC
        # If n equal flows share a NIC or a link, each takes n / rate seconds per bit.
        slowest_bit_s = 1 / nic_bps  # of a flow that shares nothing
        for _, flows in self.nics:
            slowest_bit_s = max(slowest_bit_s, flows / nic_bps)
        for hop, flows in self.hops:  # links between clusters
            slowest_bit_s = max(slowest_bit_s, flows / hop.rate_bps)
        return Price(
            byte_s=8 * self.volume * slowest_bit_s,
            latency_s=self.messages * self.fabric.latency_s + self.wan_latency_s,
        )


class Network:
    """Nodes and fabrics of a site, as the cost model uses them.

    Nodes of the same cluster on the same fabrics form a node type: an index of `node_types`.
    """

    def __init__(
        self,
        site: Site,
        links: Links = Links(),
        single_fabric: Fabric | None = None,
        uneven: bool = False,
        on_best_fabrics: bool = False,
    ):
        """Group the nodes of a site into node types, and number these in the order of the site's nodes.

        Args:
            site: Nodes and fabrics.
            links: Measured rates and latencies.
            single_fabric: The only fabric that groups may use, as in training without holmes. None:
                every group uses the fastest fabric that its nodes share.
            uneven: Whether NCCL's hierarchical all-reduce may have different numbers of ranks in the
                clusters. In reality it may not; a lower bound may ignore that.
            on_best_fabrics: Whether to price groups whose nodes share only Ethernet as if they shared
                a fast network. Of the best fabric of each node, they then use the slowest.
        """
        self.site = site
        self.links = links
        self.single_fabric = single_fabric
        self.uneven = uneven
        self.on_best_fabrics = on_best_fabrics
        self.processes = site.processes  # of each node, or the greatest common divisor of all nodes
        self.world = site.world_size
        #: The site with measured rates; they decide which fabric is fastest. `site` keeps the rates of
        #: cluster.toml.
        self.measured = links.site(site)
        self.wan: Wan = self.measured.wan
        type_of_node = {node.name: (node.cluster, node.fabrics) for node in site.nodes}
        self.node_types = tuple(dict.fromkeys(type_of_node.values()))  # (cluster, nodes' fabrics)
        numbers = {node_type: number for number, node_type in enumerate(self.node_types)}
        #: Name of a node -> its type.
        self.node_type_of = {name: numbers[each] for name, each in type_of_node.items()}
        #: Node type -> ranks of each of its nodes. (self.names: a cached property, names by type)
        self.widths = tuple(site.node_by_name[names[0]].processes for names in self.names)
        self._known: dict[Hashable, Any] = {}  # results of `remember`

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Cache the result of make(): compute it once for each key.

        The key must contain everything that affects the result, besides this network.
        """
        if key not in self._known:
            self._known[key] = make()
        result: T = self._known[key]
        return result

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of the nodes of each type, in the launcher's order."""
        by_type: list[list[str]] = [[] for _ in self.node_types]
        for name, node_type in self.node_type_of.items():
            by_type[node_type].append(name)
        return tuple(map(tuple, by_type))

    def cluster(self, node_type: int) -> str:
        """Return the cluster of a node type."""
        return self.node_types[node_type][0]

    def clusters(self, content: Content) -> list[str]:
        """Return the clusters of the nodes of a pipeline stage, each once, in the order of the nodes.

        Args:
            content: Nodes of the stage: (node type, number of nodes or ranks).
        """
        return list(dict.fromkeys(self.cluster(node_type) for node_type, _ in content))

    def placement(self, names: Sequence[str], sizes: Sizes) -> Placement:
        """Return the placement of a job on these nodes, given in the order of the ranks."""
        node_types = [self.node_type_of[name] for name in names]
        # Placement.of takes the type of each node, in the order of the ranks.
        placement = Placement.of(sizes, self.processes, node_types, self.widths)
        return replace(placement, names=tuple(names))

    def nodes(self, placement: Placement) -> tuple[str, ...]:
        """Return the names of a placement's nodes, in the order of the ranks.

        If the placement has no names, the nodes of each type are taken in the launcher's order.
        """
        if placement.names:
            return placement.names
        unused = [iter(names) for names in self.names]
        return tuple(next(unused[node_type]) for node_type in placement.node_types())

    def fabric(self, node_types: Iterable[int]) -> Fabric:
        """Return the fabric that a group of nodes of these types uses, as in cluster.toml.

        This is the fastest fabric that they share, with two exceptions. `single_fabric`, if set, carries
        all traffic. With `on_best_fabrics`, groups are assumed to need no slower common fabric: a
        group uses the slowest of the best fabrics of its nodes, even if its nodes do not share it.
        """
        if self.single_fabric is not None:
            return self.single_fabric
        # _shared_fabric: the fastest that nodes of these types share; with a single type, its best
        if self.on_best_fabrics:
            best_fabrics = [self._shared_fabric(frozenset([node_type])) for node_type in node_types]
            return min(best_fabrics, key=lambda fabric: fabric.preference)  # slow: small preference
        return self._shared_fabric(frozenset(node_types))

    def _shared_fabric(self, node_types: frozenset[int]) -> Fabric:
        """Return the fastest fabric that nodes of these types share; Ethernet if no other."""

        def fastest() -> Fabric:
            nodes = (self.names[node_type][0] for node_type in node_types)
            # The fastest by measured rates. The result has the rate of cluster.toml.
            name = self.measured.shared_fabric(nodes).name
            return self.site.fabric_by_name[name]

        return self.remember(node_types, fastest)

    def line(self, fabric: Fabric) -> Fabric:
        """Return `fabric` with its measured rate and latency, if any: a straight line of time by size."""
        return self.remember(fabric.name, lambda: self.links.line(fabric))

    # ------------------------------------------------------------------- links between clusters

    def hops(self, fabric: Fabric, pairs: Mapping[Pair, float]) -> tuple[tuple[Hop, float], ...]:
        """Return the links between clusters that flows on a fabric use, each with its number of flows.

        Args:
            fabric: Fabric of the flows; only Ethernet crosses a WAN.
            pairs: (from cluster, to cluster) -> number of flows.
        """
        if not self.wan or fabric.name != ETHERNET:
            return ()
        return tuple(hop_loads(self.wan, pairs).items())  # link -> sum of its flows

    def wan_latency_s(self, fabric: Fabric, pair: Pair) -> float:
        """Return a message's latency between two clusters beyond the fabric's own, in seconds."""
        if not self.wan or fabric.name != ETHERNET:
            return 0.0
        # hops: links and uplinks from one cluster to the other
        latency_s = sum(hop.latency_s for hop in self.wan.hops(*pair))
        return max(0.0, latency_s - self.line(fabric).latency_s)

    def neighbours(self, ring: Content) -> list[Pair]:
        """Return the pairs of different clusters that follow each other on a ring of nodes.

        The ring is given as (node type, number of nodes that follow each other). For clusters
        a a b it is (a, b), (b, a).
        """
        return neighbours([self.cluster(node_type) for node_type, _ in ring])

    # ------------------------------------------------------------------- loads

    def ring(self, family: GroupFamily, groups: float = 0, inside_bps: float = 0.0) -> Load:
        """Return the load of a ring all-reduce in each of several equal groups (a family).

        Args:
            family: The groups. Equal groups have the same ring over equal nodes.
            groups: Number of groups that cross between clusters at the same time, and so share links
                and NICs; groups that are not in `family` count, too. 0: only the groups of `family`
                share them (for the simulation, which adds the loads of all families by itself).
            inside_bps: Bits/s between the GPUs of a node; used if each group lies inside a node.
        """
        if family.nodes == 1:
            volume = 2 * (family.ranks - 1) / family.ranks
            return Load(inside_bps=inside_bps, volume=volume)
        return self.remember(("ring", family, groups), lambda: self._ring(family, groups))

    def _ring(self, family: GroupFamily, groups: float) -> Load:
        """Return the load of a ring all-reduce in each of several equal groups that span nodes.

        NICs and links between clusters are shared with other groups that run at the same time.

        Args:
            family: The groups.
            groups: Number of all groups that share the links between clusters. The NICs are then
                shared by all groups with ranks on a node. 0: links and NICs are shared only by the
                groups of this family (for the simulation, which adds the loads of others itself).
        """
        ranks = family.ranks
        counts_all_groups = groups > 0
        crossing_groups = groups if counts_all_groups else family.count
        fabric = self.fabric(family.node_types)  # the fastest that all nodes of a group share
        # (from cluster, to cluster) -> number of links of the ring between them.
        pairs = Counter(self.neighbours(family.ring))
        # Latency beyond the fabric's own, of each rank's link to the next rank; 0 inside a cluster.
        link_latency_s = []
        for pair, times in pairs.items():
            link_latency_s += [self.wan_latency_s(fabric, pair)] * times
        link_latency_s += [0.0] * (ranks - len(link_latency_s))
        # A chunk passes all links except the last, first for the sum and again to distribute it.
        # The slowest chunk leaves out the fastest link.
        wan_latency_s = 2 * (sum(link_latency_s) - min(link_latency_s))
        # (from cluster, to cluster) -> flows of all groups that share the link.
        crossing = {pair: times * crossing_groups for pair, times in pairs.items()}
        # A part has the equal nodes of a group; they form a node class. Node class -> groups that
        # share a NIC: all groups with ranks on the node (concurrent_groups), or only those of this
        # family (`groups`). Each sends a single flow into the next node.
        flows = {
            part.node_class: part.concurrent_groups if counts_all_groups else part.groups
            for part in family.parts
        }
        return Load(
            nics=self.both_ways(fabric, flows),  # NICs in both directions, with their flows
            hops=self.hops(fabric, crossing),  # links between clusters, with their flows
            fabric=self.line(fabric),  # with the measured rate and latency
            # 2 (ranks - 1) steps; in each of them a rank passes on 1 / ranks of the bytes.
            volume=2 * (ranks - 1) / ranks,
            messages=2 * (ranks - 1),
            message_share=1 / ranks,
            ring=True,
            wan_latency_s=wan_latency_s,
            crosses_clusters=self.spans_clusters(family.node_types),
            senders=family.count * family.nodes,  # a rank of each node sends to another node
        )

    def exchange(self, family: GroupFamily, all_to_all: bool, inside_bps: float = 0.0) -> Load:
        """Return what an all-to-all (expert groups) or a ring (context groups) uses of the networks.

        Both have n - 1 steps for n ranks. In step i of an all-to-all, a rank sends a part of its
        bytes to the i-th next rank. In each step of a ring, it passes the parts that it has received
        to its neighbour. The result is for a byte that a rank sends, in all steps together.

        Args:
            family: Equal groups of a stage.
            all_to_all: Whether it is an all-to-all; else a ring.
            inside_bps: Bits/s between the GPUs of a node; used if each group lies inside a node.
        """
        if family.nodes == 1:
            return Load(inside_bps=inside_bps)
        fabric = self.fabric(family.node_types)  # the fastest that all nodes of a group share
        # (from cluster, to cluster) -> number of links of the ring of ranks between them.
        pairs = Counter(self.neighbours(family.ring))
        flows = {}  # node class (equally busy nodes) -> flows that share a NIC
        for part in family.parts:  # sets of equal nodes of a group
            # In a ring, only the last rank of a group on a node sends to another node.
            senders_per_group = part.ranks_per_node if all_to_all else 1
            # concurrent_groups: all groups with ranks on the node, which exchange at the same time
            flows[part.node_class] = part.concurrent_groups * senders_per_group
        # In every step, some rank waits for the slowest link between clusters.
        step_latency_s = max((self.wan_latency_s(fabric, pair) for pair in pairs), default=0.0)
        messages = family.ranks - 1
        return Load(  # of Load's other fields: each byte passes a NIC once (volume=1)
            nics=self.both_ways(fabric, flows),  # each NIC twice: these flows out, as many in
            hops=self.hops(fabric, pairs),  # links between clusters, with their flows
            fabric=self.line(fabric),  # the same fabric, with its measured rate and latency
            messages=messages,
            wan_latency_s=messages * step_latency_s,
            crosses_clusters=self.spans_clusters(family.node_types),
        )

    def message(
        self, stage_link: StageMessages, inside_bps: float = 0.0, crossing: float = 0
    ) -> Load:
        """Return what a message to another pipeline stage uses of the networks, for each of its bytes.

        All pipelines of a class (on equal nodes) send such a message at the same time.

        Args:
            stage_link: These messages. `count` is their number. `leaving` and `reaching` are the
                messages of all classes on the NIC of a sending and of a receiving node.
            inside_bps: Bits/s between the GPUs of a node.
            crossing: Messages of all classes on the links between clusters. 0: only the `count`
                messages of this class use the links.
        """
        if stage_link.local:  # both stages are on the same node
            return Load(inside_bps=inside_bps)
        fabric = self.fabric(stage_link.node_types)  # the fastest that both nodes share
        sender_type, receiver_type = stage_link.node_types
        pair = self.cluster(sender_type), self.cluster(receiver_type)
        crosses = pair[0] != pair[1]
        # (from cluster, to cluster) -> messages that share the link between them.
        flows = {pair: crossing or stage_link.count} if crosses else {}
        return Load(
            nics=(  # ((class of equally busy nodes, fabric, direction), messages that share this NIC)
                ((stage_link.sender, fabric.name, "out"), stage_link.leaving),
                ((stage_link.receiver, fabric.name, "in"), stage_link.reaching),
            ),
            hops=self.hops(fabric, flows),  # links between clusters, with their flows
            fabric=self.line(fabric),  # with the measured rate and latency
            wan_latency_s=self.wan_latency_s(fabric, pair) if crosses else 0.0,
            crosses_clusters=crosses,
            senders=stage_link.count,
        )

    def pairwise(self, stage_link: StageMessages, inside_bps: float = 0.0) -> Load:
        """Return the load of summing a gradient between the two ranks that each pipeline has in two stages.

        This is the gradient of a weight that both stages hold (a tied embedding). The two ranks
        exchange halves of the gradient, then halves of the sum, in both directions at the same time.
        So each rank sends as many bytes as the gradient has, in two messages.

        Args:
            stage_link: Messages from the first of the stages to the other, of pipelines on equal nodes.
            inside_bps: Bits/s between the GPUs of a node.
        """
        forward = self.message(stage_link, inside_bps)  # load of a message of each pair
        if forward.fabric is None:  # inside a node
            return forward
        backward = self.message(stage_link.turned, inside_bps)  # in the opposite direction
        # Flows of both directions add up on a link.
        hops: dict[Hop, float] = {}
        for hop, flows in (*forward.hops, *backward.hops):
            hops[hop] = hops.get(hop, 0.0) + flows
        # A NIC is identified by a class of equally busy nodes, and a direction. If both stages are on
        # nodes of the same class, forward and backward messages have the same key. But they use
        # different nodes of the class. So the larger load counts, not the sum.
        nics = dict(forward.nics)
        for nic, flows in backward.nics:
            nics[nic] = max(flows, nics.get(nic, 0.0))
        return replace(
            forward,
            nics=tuple(nics.items()),
            hops=tuple(hops.items()),
            messages=2,  # that follow each other
            message_share=0.5,  # each message has half of the gradient's bytes
            ring=True,  # both ends send at the same time, as in a ring of two ranks
            wan_latency_s=2 * forward.wan_latency_s,  # of two messages that follow each other
            senders=2 * stage_link.count,  # both ranks of each pair
        )

    def both_ways(
        self, fabric: Fabric, flows: Mapping[int, float]
    ) -> tuple[tuple[Nic, float], ...]:
        """Return the number of messages that share each NIC, for sending and for receiving.

        A collective sends as many messages from each node as to it, so both numbers are equal.

        Args:
            fabric: Fabric of the NICs.
            flows: Node class (equally busy nodes) -> messages that a NIC sends at the same time.

        Returns:
            Pairs of (node class, fabric, "out" or "in") and the number of messages.
        """
        return tuple(
            ((node_class, fabric.name, direction), count)
            for direction in ("out", "in")
            for node_class, count in flows.items()
        )

    def usable_fabrics(self, node_type: int) -> list[str]:
        """Return the names of the fabrics on which groups of nodes of this type run at full speed.

        These are the nodes' fabrics that are faster than Ethernet, or Ethernet if they have none.
        With a WAN, the Ethernet of each cluster counts as a fabric of its own, with the name
        "ethernet of <cluster>".
        """
        cluster, fabrics = self.node_types[node_type]
        ethernet = self.site.fabric_by_name[ETHERNET]
        fast = [
            name
            for name in sorted(fabrics)
            if self.site.fabric_by_name[name].preference > ethernet.preference
        ]
        return fast or [f"{ETHERNET} of {cluster}" if self.wan else ETHERNET]

    def spans_networks(self, node_types: frozenset[int]) -> bool:
        """Return whether these node types share only Ethernet although some have a faster fabric.

        A group on such nodes "spans networks". With a WAN, Ethernet between two clusters counts as
        slower than Ethernet inside one.
        """
        if len(node_types) == 1 or self.fabric(node_types).name != ETHERNET:
            return False
        return len({tuple(self.usable_fabrics(node_type)) for node_type in node_types}) > 1

    def spans_clusters(self, node_types: Iterable[int]) -> bool:
        """Return whether nodes of these types lie in several clusters."""
        return len(set(map(self.cluster, node_types))) > 1

    def link(self, load: Load) -> Link:
        """Return the message times of a load's fabric: measured, or else as in cluster.toml."""
        assert load.fabric is not None
        return self.links.of(load.fabric)

    def curve(self, load: Load) -> Curve:
        """Return the measured time of a load's messages by their bytes."""
        link = self.link(load)
        return link.ring if load.ring else link.send


def stock_fabric(site: Site) -> Fabric:
    """Return the fabric of all traffic without holmes: the fastest that all nodes share."""
    return site.shared_fabric(node.name for node in site.nodes)
