"""What there is: nodes, the fabrics that each is attached to, and which of them two nodes share.

A Site is either planned from cluster.toml alone (no NIC names yet) or what the running nodes reported.

    site.clusters:   a ------- fabric "a" (ib)        b ------- fabric "b" (roce)
    site.nodes:      a0 a1                            b0 b1
    all nodes:       fabric "ethernet"                between clusters: site.wan (cluster/wan.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.wan import Hop, Wan
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

if TYPE_CHECKING:
    from holmes_ext.cluster.spec import SiteSpec

#: A site's source where there is no cluster.toml.
REPORTS = "the nodes' own reports"


@dataclass(frozen=True)
class Port:
    """How one node reaches one fabric: the interface that sockets bind to, the HCA ports that RDMA uses.

    fault: what is wrong with it, "" when nothing is known to be; usable: False where no group may use it;
    no_verbs: why NCCL cannot use the HCAs, "" where it can.
    """

    fabric: str
    interface: str = ""
    address: str = ""
    hcas: tuple[str, ...] = ()
    gid_index: int | None = None
    rate_bps: int = 0
    fault: str = ""
    usable: bool = True
    no_verbs: str = ""

    @property
    def name(self) -> str:
        """What users call it: "roce0 (mlx5_0:1)", "eth0"."""
        hcas = ", ".join(self.hcas)
        return (
            f"{self.interface} ({hcas})"
            if self.interface and hcas
            else self.interface or hcas or "its NIC"
        )


@dataclass(frozen=True)
class Node:
    """A host with its `processes` (one a GPU) and its ports, the fastest first, Ethernet last."""

    name: str
    cluster: str
    processes: int
    ports: tuple[Port, ...]

    def __post_init__(self) -> None:
        if not self.ports or self.ports[-1].fabric != ETHERNET:
            raise HolmesError(f"node {self.name!r}: key 'ports': the last one is not on Ethernet")

    @cached_property
    def fabrics(self) -> tuple[str, ...]:
        """The fabrics that groups on this node may use."""
        return tuple(port.fabric for port in self.ports if port.usable)

    def port(self, fabric: str) -> Port:
        return next(port for port in self.ports if port.fabric == fabric)


@dataclass(frozen=True)
class Site:
    """All nodes, in the launcher's order, the fabrics, and what lies between the clusters."""

    nodes: tuple[Node, ...]
    fabrics: tuple[Fabric, ...]
    source: str = REPORTS
    wan: Wan = Wan()

    def __post_init__(self) -> None:
        counts = sorted({node.processes for node in self.nodes})
        if len(counts) > 1:
            few, many = (
                next(n.name for n in self.nodes if n.processes == count)
                for count in (counts[0], counts[-1])
            )
            unequal = f"node {few!r} has {counts[0]} processes and node {many!r} has {counts[-1]}"
            raise HolmesError(f"{self.source}: {unequal}; start the same number on every node")

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def fabric_by_name(self) -> dict[str, Fabric]:
        return {fabric.name: fabric for fabric in self.fabrics}

    @cached_property
    def clusters(self) -> tuple[str, ...]:
        """Cluster names in the order of their first node."""
        return tuple(dict.fromkeys(node.cluster for node in self.nodes))

    @property
    def processes(self) -> int:
        return self.nodes[0].processes

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.processes

    def shared_fabric(self, names: Iterable[str]) -> Fabric:
        """The fastest fabric that all the nodes `names` are attached to (Ethernet at worst)."""
        nodes = [self.node_by_name[name] for name in dict.fromkeys(names)]
        shared = set(nodes[0].fabrics).intersection(*(node.fabrics for node in nodes[1:]))
        return max(
            (self.fabric_by_name[name] for name in shared), key=lambda fabric: fabric.preference
        )

    def path(self, source: str, target: str) -> tuple[Hop, ...]:
        """What traffic from one node to another passes, in order, on their best fabric; () in one node. The
        hops' latencies add up to the path's."""
        if source == target:
            return ()
        fabric = self.shared_fabric((source, target))
        pair = (self.node_by_name[source].cluster, self.node_by_name[target].cluster)
        middle = self.wan.hops(*pair) if fabric.name == ETHERNET else ()
        before_s = 0.0 if any(hop.latency_s for hop in middle) else fabric.latency_s
        out = Hop(("out", source, fabric.name), fabric.rate_bps, before_s)
        return (out, *middle, Hop(("in", target, fabric.name), fabric.rate_bps))

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of nodes, clusters, networks; not of the launcher's order, NICs and faults."""
        fabrics = {node.name: tuple(port.fabric for port in node.ports) for node in self.nodes}
        nodes = sorted(
            (node.name, node.cluster, node.processes, fabrics[node.name]) for node in self.nodes
        )
        content = [
            nodes,
            sorted((fabric.name, fabric.kind, fabric.rate_bps) for fabric in self.fabrics),
        ]
        content += [asdict(self.wan)] if self.wan else []
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def without(self, faults: Mapping[tuple[str, str], str]) -> Site:
        """The same site on which no group uses these ports: {(node, fabric): what is wrong}."""
        nodes = []
        for node in self.nodes:
            checked = [(port, faults.get((node.name, port.fabric))) for port in node.ports]
            ports = tuple(
                replace(port, fault=fault, usable=False) if fault else port
                for port, fault in checked
            )
            nodes.append(replace(node, ports=ports))
        return replace(self, nodes=tuple(nodes))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Site:
        """The inverse of to_dict, of a document that came over the job's store or out of a file."""
        return Table(document, "site").into(cls)


def fabrics_of_spec(spec: SiteSpec) -> tuple[Fabric, ...]:
    """Ethernet and every fabric that a cluster names; of shared ones the least rate and longest latency."""
    fabrics = {
        ETHERNET: Fabric(ETHERNET, "ethernet", spec.ethernet_rate_bps, spec.ethernet_latency_s)
    }
    for cluster in spec.clusters:
        if cluster.fabric == ETHERNET:
            continue
        known = fabrics.get(cluster.fabric)
        rate = min(cluster.rate_bps, known.rate_bps) if known else cluster.rate_bps
        latency = max(cluster.latency_s, known.latency_s) if known else cluster.latency_s
        net = cluster.net or (known.net if known else "")
        fabrics[cluster.fabric] = Fabric(cluster.fabric, cluster.kind, rate, latency, net=net)
    return tuple(fabrics.values())


def site_from_spec(spec: SiteSpec) -> Site:
    """As cluster.toml describes it, before any node has reported: nodes in its order, no NIC names."""
    nodes = []
    for cluster in spec.clusters:
        ethernet = Port(ETHERNET, rate_bps=spec.ethernet_rate_bps)
        fast = (
            () if cluster.fabric == ETHERNET else (Port(cluster.fabric, rate_bps=cluster.rate_bps),)
        )
        nodes += [
            Node(name, cluster.name, cluster.processes, (*fast, ethernet)) for name in cluster.nodes
        ]
    return Site(tuple(nodes), fabrics_of_spec(spec), spec.source, spec.wan)
