"""The nodes of a job, the fabrics that each node is attached to, and the network between clusters.

A `Site` comes from cluster.toml alone (then it has no NIC names yet), or from the reports of
running nodes.

    site.clusters:   a ------- fabric "a" (ib)        b ------- fabric "b" (roce)
    site.nodes:      a0 a1                            b0 b1
    all nodes:       fabric "ethernet"                between clusters: site.wan (cluster/wan.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.wan import Hop, Wan
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.words import counted

if TYPE_CHECKING:
    from holmes_ext.cluster.nic import Nic
    from holmes_ext.cluster.spec import SiteSpec

#: `Site.source` if there is no cluster.toml.
REPORTS = "the nodes' own reports"


@dataclass(frozen=True)
class Port:
    """Connection of one node to one fabric, over one or several NICs."""

    fabric: str
    interface: str = ""  # network device that sockets bind to
    address: str = ""  # IP address of the interface
    hcas: tuple[
        str, ...
    ] = ()  # NICs that verbs or a network plugin of NCCL use: "mlx5_0:1", "hsn0"
    gid_index: int | None = None  # RoCE: value for NCCL_IB_GID_INDEX
    rate_bps: int = 0  # all NICs together, bits/s
    fault: str = ""  # problem with the port, "" if none is known
    usable: bool = True  # groups may use the port
    no_verbs: str = ""  # reason why NCCL cannot use the HCAs, "" if it can
    verbs: bool = True  # NCCL's built-in network "IB" can use the HCAs; False: only a plugin can

    @property
    def name(self) -> str:
        """Name of the port in messages: "roce0 (mlx5_0:1)", "eth0"."""
        hcas = ", ".join(self.hcas)
        if self.interface and hcas:
            return f"{self.interface} ({hcas})"
        return self.interface or hcas or "its NIC"

    @classmethod
    def of_nics(cls, fabric: str, nics: Sequence[Nic], rate_bps: int, kind: str = "") -> Port:
        """Return the port that all NICs of a node on a fabric form.

        Sockets bind to the first NIC that has an address. RDMA uses all NICs.

        Args:
            fabric: Name of the fabric.
            nics: NICs of the same kind, at least one.
            rate_bps: Rate of all NICs together, in bits/s.
            kind: Kind of the fabric, "" for that of the NICs. It differs for network devices that a
                network plugin of NCCL uses: NICs of kind "ethernet", on a fabric of kind "gvnic".
        """
        kind = kind or nics[0].kind
        gid_index = None
        # NCCL takes one GID index for all NICs, so they must have their GIDs at the same index.
        indices = {nic.gid_index for nic in nics}
        if len(indices) == 1:
            (gid_index,) = indices
        hcas: tuple[str, ...] = ()
        if KINDS[kind].usable:  # by NCCL, with verbs or a network plugin, and not by sockets alone
            hcas = tuple(nic.name for nic in nics)
        port = cls(
            fabric, hcas=hcas, gid_index=gid_index, rate_bps=rate_bps, verbs=KINDS[kind].verbs
        )
        if kind == "plugin":  # it is not known which NICs carry it, and whether they carry IP
            return port
        for nic in nics:
            if nic.ifname and nic.addresses:
                return replace(port, interface=nic.ifname, address=nic.address)
        return port


@dataclass(frozen=True)
class Node:
    """Host that runs processes of the job, with its ports: a connection to each of its networks.

    The ports are sorted: the fastest network first, Ethernet last. Every node must have a port on
    Ethernet, because that network reaches every node.

    Raises:
        HolmesError: there is no port, or the last port is not on Ethernet.
    """

    name: str
    cluster: str
    processes: int  # one for each GPU
    ports: tuple[Port, ...]  # the fastest first, Ethernet last

    def __post_init__(self) -> None:
        if not self.ports or self.ports[-1].fabric != ETHERNET:
            raise HolmesError(f"node {self.name!r}: key 'ports': the last one is not on Ethernet")

    @cached_property
    def fabrics(self) -> tuple[str, ...]:
        """Names of the fabrics that groups on this node may use."""
        return tuple(port.fabric for port in self.ports if port.usable)

    def port(self, fabric: str) -> Port:
        """Return the node's port on a fabric."""
        return next(port for port in self.ports if port.fabric == fabric)


@dataclass(frozen=True)
class Site:
    """All nodes of a job with their fabrics and the network between the clusters.

    The nodes of a cluster have equally many processes. Nodes of two clusters may differ: 4 GPUs on each node
    of one cluster, 8 on each node of another.

    Raises:
        HolmesError: two nodes of one cluster have different numbers of processes.
    """

    nodes: tuple[Node, ...]  # in the launcher's order
    fabrics: tuple[Fabric, ...]
    source: str = REPORTS  # file that describes the site
    wan: Wan = Wan()

    def __post_init__(self) -> None:
        first_of: dict[str, Node] = {}  # cluster -> its first node
        for node in self.nodes:
            first = first_of.setdefault(node.cluster, node)
            if node.processes != first.processes:
                raise HolmesError(
                    f"{self.source}: node {first.name!r} has {counted(first.processes, 'process')} and node "
                    f"{node.name!r} has {node.processes}, both in cluster {node.cluster!r}; start the "
                    "same number on every node of a cluster, or make two clusters of them"
                )

    @classmethod
    def of_reports(cls, nodes: Sequence[Node], fabrics: tuple[Fabric, ...]) -> Site:
        """Return the site of nodes that reported, without a cluster.toml.

        All nodes of a cluster must have equally many processes. So a cluster "ib" that has nodes with 4 and
        nodes with 8 processes is split into two clusters, "ib-4" and "ib-8".
        """
        counts_in: dict[str, set[int]] = {}  # cluster -> numbers of processes of its nodes
        for node in nodes:
            counts_in.setdefault(node.cluster, set()).add(node.processes)
        named = []
        for node in nodes:
            if len(counts_in[node.cluster]) > 1:
                node = replace(node, cluster=f"{node.cluster}-{node.processes}")
            named.append(node)
        return cls(tuple(named), fabrics)

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        """Nodes of the site by their names."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def fabric_by_name(self) -> dict[str, Fabric]:
        """Fabrics of the site by their names."""
        return {fabric.name: fabric for fabric in self.fabrics}

    @cached_property
    def clusters(self) -> tuple[str, ...]:
        """Cluster names in the order of their first nodes."""
        return tuple(dict.fromkeys(node.cluster for node in self.nodes))

    @cached_property
    def processes(self) -> int:
        """Number of processes on each node.

        If the nodes of different clusters have different numbers, it is the greatest common divisor
        of these: 4 for nodes of 8 and of 12. Then no set of 4 consecutive ranks (0-3, 4-7, ...) lies
        on two nodes.
        """
        return gcd(*(node.processes for node in self.nodes))

    @cached_property
    def has_equal_nodes(self) -> bool:
        """True if all nodes have equally many processes."""
        return all(node.processes == self.processes for node in self.nodes)

    @property
    def ranks_of_every_node(self) -> int:
        """Number of processes on each node if all have equally many, else 1.

        For error messages that parallel sizes do not fit (Sizes.complete): they propose a number of nodes
        with so many ranks each. With 1, the proposal is a number of ranks.
        """
        return self.processes if self.has_equal_nodes else 1

    @cached_property
    def processes_of(self) -> dict[str, int]:
        """Number of processes by the name of the node; {} if all nodes have equally many."""
        if self.has_equal_nodes:
            return {}
        return {node.name: node.processes for node in self.nodes}

    @cached_property
    def aligned_ranks(self) -> int:
        """Least number of ranks that fills whole nodes in every cluster: 8 if nodes have 4 or 8."""
        return lcm(*(node.processes for node in self.nodes))

    def processes_in(self, cluster: str) -> int:
        """Return the number of processes on each node of a cluster."""
        return next(node.processes for node in self.nodes if node.cluster == cluster)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(node.processes for node in self.nodes)

    def shared_fabric(self, names: Iterable[str]) -> Fabric:
        """Return the fastest fabric of several nodes: Ethernet if they share no other.

        Args:
            names: Names of the nodes.
        """
        nodes = [self.node_by_name[name] for name in dict.fromkeys(names)]
        shared = set(nodes[0].fabrics)
        for node in nodes[1:]:
            shared.intersection_update(node.fabrics)
        candidates = [self.fabric_by_name[name] for name in shared]
        return max(candidates, key=lambda fabric: fabric.preference)

    def path(self, source: str, target: str) -> tuple[Hop, ...]:
        """Return the hops that traffic between two nodes passes on their fastest shared fabric.

        The latencies of the hops add up to the latency of the path. The path from a node to itself
        is empty.

        Args:
            source: Name of the sending node.
            target: Name of the receiving node.
        """
        if source == target:
            return ()
        fabric = self.shared_fabric((source, target))
        between_clusters: tuple[Hop, ...] = ()
        if fabric.name == ETHERNET:
            source_cluster = self.node_by_name[source].cluster
            target_cluster = self.node_by_name[target].cluster
            between_clusters = self.wan.hops(source_cluster, target_cluster)
        # The latency of a link between clusters is that from node to node, so it includes the
        # fabric's.
        includes_fabric = any(hop.latency_s for hop in between_clusters)
        # NIC of the sender, hops between the clusters, NIC of the receiver.
        return (
            Hop(
                ("out", source, fabric.name),
                rate_bps=fabric.rate_bps,
                latency_s=0.0 if includes_fabric else fabric.latency_s,
            ),
            *between_clusters,
            Hop(("in", target, fabric.name), rate_bps=fabric.rate_bps),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the nodes, clusters and networks.

        A plan has the digest of its site. A comparison shows whether a stored
        plan fits the nodes of a job. Not in the digest: the launcher's order of the nodes, the
        names of NICs, and faults (ports that turned out not to work).
        """
        nodes = sorted(
            (node.name, node.cluster, node.processes, tuple(port.fabric for port in node.ports))
            for node in self.nodes
        )
        fabrics = sorted((fabric.name, fabric.kind, fabric.rate_bps) for fabric in self.fabrics)
        content: list[Any] = [nodes, fabrics]
        if self.wan:
            content.append(asdict(self.wan))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def without(self, faults: Mapping[tuple[str, str], str]) -> Site:
        """Return this site with some ports that no group may use.

        Args:
            faults: (node name, fabric name) of each port to exclude -> the reason.
        """
        nodes = []
        for node in self.nodes:
            ports = []
            for port in node.ports:
                fault = faults.get((node.name, port.fabric))
                if fault:
                    ports.append(replace(port, fault=fault, usable=False))
                else:
                    ports.append(port)
            nodes.append(replace(node, ports=tuple(ports)))
        return replace(self, nodes=tuple(nodes))

    def to_dict(self) -> dict[str, Any]:
        """Return this site as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Site:
        """Return the site that `to_dict()` has converted to a dict, as read from the job's store or a file.

        Raises:
            HolmesError: a key is missing, unknown, or has a value that is not allowed.
        """
        return Table(document, "site").into(cls)


def fabrics_of_spec(spec: SiteSpec) -> tuple[Fabric, ...]:
    """Return Ethernet and the fabric of every cluster in a cluster.toml.

    A fabric that several clusters share gets the lowest of their rates and the longest of their
    latencies.
    """
    ethernet = Fabric(ETHERNET, "ethernet", spec.ethernet_rate_bps, spec.ethernet_latency_s)
    fabrics = {ETHERNET: ethernet}
    for cluster in spec.clusters:
        if cluster.fabric == ETHERNET:  # the cluster has no fast NICs
            continue
        fabric = Fabric(
            cluster.fabric, cluster.kind, cluster.rate_bps, cluster.latency_s, net=cluster.net
        )
        earlier = fabrics.get(cluster.fabric)  # from a cluster that shares the fabric
        if earlier is not None:
            fabric = replace(
                fabric,
                rate_bps=min(fabric.rate_bps, earlier.rate_bps),
                latency_s=max(fabric.latency_s, earlier.latency_s),
                net=fabric.net or earlier.net,
            )
        fabrics[cluster.fabric] = fabric
    return tuple(fabrics.values())


def site_from_spec(spec: SiteSpec) -> Site:
    """Return the site that a cluster.toml describes, before any node has reported.

    The nodes are in the order of the file, and the ports have no NIC names yet.
    """
    nodes = []
    for cluster in spec.clusters:
        # The same ports for all nodes of a cluster, the fastest first.
        ports = [Port(ETHERNET, rate_bps=spec.ethernet_rate_bps)]
        if cluster.fabric != ETHERNET:
            ports.insert(0, Port(cluster.fabric, rate_bps=cluster.rate_bps))
        for name in cluster.nodes:
            nodes.append(Node(name, cluster.name, cluster.processes, tuple(ports)))
    return Site(tuple(nodes), fabrics_of_spec(spec), source=spec.source, wan=spec.wan)
