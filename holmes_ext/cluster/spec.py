"""Description of the clusters that the user writes: the file cluster.toml.

    version = 2

    [ethernet]                     # the network that reaches every node
    rate = "25Gb/s"                # of one node, each way

    [[cluster]]
    name = "a"
    kind = "ib"                    # its fast NICs: ib, roce, efa, ... or ethernet (no fast NIC)
    rate = "200Gb/s"               # of one node, all its fast NICs together, each way
    nodes = ["a[0-3]"]             # host names
    processes = 8                  # on each node, one for each GPU

All keys with their types and defaults are in keys.py.

The GPUs of a cluster are a known model (gpus.py), or three numbers that replace the known ones or
describe any other GPU:

    [[cluster]]
    gpu = "A100"                   # sets the numbers below; "NVIDIA A100-SXM4-40GB" does, too
    gpu_flops = 150e12             # FLOP/s of the kernels of a training step, not the sheet's peak
    gpu_memory_bytes = 80e9
    nvlink = "2400Gb/s"            # of one GPU, each way, to the others of its node
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from holmes_ext.checks import InRange, check_fields
from holmes_ext.cluster.gpus import Accelerator
from holmes_ext.cluster.kind_keys import check_kind, check_network
from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.wan import (
    MeasuredLink,
    MeasuredPair,
    Wan,
    latency_of,
    parse_links,
    parse_pairs,
    parse_wan,
    rate_notes,
)
from holmes_ext.document import Table, digest_of, parse_toml, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import nearest

#: Version of the file format.
VERSION = 2
_UPGRADE = (
    'write "version = 2": every key of version 1 means the same there, and version 2 adds uplinks and '
    "[[between]]"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_IPV4 = re.compile(r"\d+\.\d+\.\d+\.\d+")
#: Largest number of fast NICs of an emulated node.
MAX_RAILS = 8
#: Keys of a cluster that give the speed of its GPUs.
_SPEED_KEYS = ("gpu_flops", "gpu_model_flops", "gpu_hardware_flops")
#: Upper limit of FLOP/s and bytes, to keep nonsense out.
_LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class ClusterSpec:
    """Content of one `[[cluster]]` of a cluster.toml.

    Raises:
        HolmesError: a field has a value that is not allowed.
    """

    name: str
    kind: str  # kind of the fast NICs
    nodes: tuple[str, ...]  # host names
    rate_bps: int  # all fast NICs of one node together, bits/s each way
    fabric: str  # network of the fast NICs; clusters with the same fabric are connected by it
    latency_s: float  # of a message on the fabric
    processes: Annotated[int, InRange(1, 1024)] = 1  # on each node, one for each GPU
    gpu: str = ""
    include: tuple[str, ...] = ()  # patterns of NICs that jobs use
    exclude: tuple[str, ...] = ()  # patterns of NICs that jobs do not use
    accelerator: Accelerator = Accelerator()
    net: str = ""  # see Fabric.net
    uplink_bps: int = 0  # all nodes together to other clusters, bits/s each way; 0 for no limit
    #: Fast NICs of each node that `holmes lab` emulates; jobs on real nodes do not use the number.
    rails: Annotated[int, InRange(1, MAX_RAILS)] = 1

    def __post_init__(self) -> None:
        check_fields(self, f"cluster {self.name!r}")


@dataclass(frozen=True)
class NodeOverride:
    """Content of a `[node.HOST]` of a cluster.toml: settings of a node that differ from its cluster's."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    ethernet: str = ""  # network device on the network that reaches every node


@dataclass(frozen=True)
class SiteSpec:
    """Content of a cluster.toml."""

    name: str
    ethernet_rate_bps: int  # of one node, each way
    ethernet_latency_s: float
    ethernet_interface: str  # network device, "" for the device that reaches the master
    clusters: tuple[ClusterSpec, ...]
    overrides: dict[str, NodeOverride] = field(default_factory=dict)  # host name -> its settings
    source: str = "cluster.toml"  # path of the file
    links: dict[str, MeasuredLink] = field(default_factory=dict)  # fabric -> measured times
    wan: Wan = Wan()
    pairs: tuple[MeasuredPair, ...] = ()  # measured links between clusters

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the values that must be equal in the cluster.toml of all nodes of a job.

        Left out: comments, the site's `name`, measured values, and keys that do not change a plan.
        """
        content: list[object] = [
            self.ethernet_rate_bps,
            self.ethernet_latency_s,
            self.ethernet_interface,
        ]
        # uplink_bps is in self.wan below. The others have no effect on a plan: accelerator is for
        # predictions, net names NCCL's network plugin, rails is for the emulation (`holmes lab`).
        ignored_keys = ("accelerator", "uplink_bps", "net", "rails")
        for cluster in self.clusters:
            values = vars(cluster).items()
            content.append({key: value for key, value in values if key not in ignored_keys})
        for host, override in sorted(self.overrides.items()):
            content.append([host, vars(override)])
        if self.wan:
            content.append(asdict(self.wan))
        return digest_of(content)

    @property
    def notes(self) -> list[str]:
        """One sentence for each value that is allowed but probably a mistake."""
        node_rates = {cluster.name: self.ethernet_rate_bps for cluster in self.clusters}
        return [f"{self.source}: {note}" for note in rate_notes(self.wan, node_rates)]

    def only(self, nodes: Collection[str]) -> SiteSpec:
        """Return the part of this description that concerns some of the nodes.

        A file may describe more nodes than a job uses. Clusters without any of the nodes are left
        out.

        Args:
            nodes: Names of the nodes, as the file has them.
        """
        clusters = []
        for cluster in self.clusters:
            kept = tuple(node for node in cluster.nodes if node in nodes)
            if kept:
                clusters.append(replace(cluster, nodes=kept))
        names = {cluster.name for cluster in clusters}
        return replace(
            self,
            clusters=tuple(clusters),
            overrides={
                host: override for host, override in self.overrides.items() if host in nodes
            },
            wan=self.wan.only(names),
            pairs=tuple(pair for pair in self.pairs if names.issuperset(pair.clusters)),
        )

    @cached_property
    def cluster_by_node(self) -> dict[str, ClusterSpec]:
        """Name of a node -> its cluster."""
        return {node: cluster for cluster in self.clusters for node in cluster.nodes}

    @cached_property
    def _by_short_name(self) -> dict[str, str]:
        """Names of nodes by their short names; the first node of several."""
        return {short_name(node): node for node in reversed(self.cluster_by_node)}

    def known_as(self, host: str) -> str:
        """Return the name that the file has for a host, "" if the host is in no cluster.

        "gpu01" and "gpu01.site.org" are the same host, unless the file has both names.
        """
        if host in self.cluster_by_node:
            return host
        return self._by_short_name.get(short_name(host), "")

    def cluster_of(self, node: str) -> ClusterSpec:
        """Return the cluster that has a node.

        Raises:
            HolmesError: no cluster has the node.
        """
        if node not in self.cluster_by_node:
            raise HolmesError(
                f"{self.source}: node {node!r} is in no cluster; add it to a cluster's nodes"
            )
        return self.cluster_by_node[node]


def short_name(host: str) -> str:
    """Return a host name up to its first dot: "gpu01" for "gpu01.site.org"; an IP address as it is."""
    if _IPV4.fullmatch(host):
        return host
    return host.split(".")[0]


def load_spec(path: str | Path) -> SiteSpec:
    """Return the content of a cluster.toml.

    Raises:
        HolmesError: the file cannot be read or is wrong. The message names the key or the line.
    """
    return parse_spec(read_text(path, "name a cluster.toml"), str(path))


def parse_spec(text: str, source: str = "cluster.toml") -> SiteSpec:
    """Return the content of a cluster.toml.

    Args:
        text: The file's text.
        source: Path of the file, for messages.

    Raises:
        HolmesError: the text is wrong. The message names the key or the line.
    """
    if not text.strip():
        raise HolmesError(
            f"{source}: the file is empty; examples/clusters/ has samples to start from"
        )
    top = parse_toml(text, source)
    top.version(VERSION, _UPGRADE)
    name = top.take("name", str, Path(source).stem)
    ethernet = top.table("ethernet")
    clusters = [_read_cluster(table) for table in top.tables("cluster")]
    if not clusters:
        raise HolmesError(
            f"{source}: key 'cluster' is missing; a site needs at least one [[cluster]]"
        )
    node_table = top.table("node", default={})
    cluster_of_node = _check_clusters(clusters, source)
    overrides = _read_overrides(node_table, cluster_of_node, source)
    fabrics = {"ethernet", *(cluster.fabric for cluster in clusters)}
    links = parse_links(top.table("link", default={}), fabrics)
    ethernet_rate_bps = ethernet.rate("rate")
    ethernet_latency_s = latency_of(ethernet, KINDS["ethernet"].latency_s)
    uplinks = {cluster.name: cluster.uplink_bps for cluster in clusters}
    wan = parse_wan(top, uplinks, ethernet_latency_s)
    pairs = parse_pairs(top, list(uplinks))
    top.done()  # raises for keys that were not read
    interface = ethernet.take("interface", str, "")
    ethernet.done()
    return SiteSpec(
        name=name,
        ethernet_rate_bps=ethernet_rate_bps,
        ethernet_latency_s=ethernet_latency_s,
        ethernet_interface=interface,
        clusters=tuple(clusters),
        overrides=overrides,
        source=source,
        links=links,
        wan=wan,
        pairs=pairs,
    )


def _read_nodes(table: Table, cluster: str) -> tuple[str, ...]:
    """Return the hosts of a cluster from its key `nodes`.

    An item of the key is a host name or a host list such as "gpu[00-15,20]".

    Args:
        table: The cluster's table.
        cluster: Name of the cluster, for the error message.

    Raises:
        HolmesError: an entry is not a host list, or has a name that no host can have, or there is
            no host.
    """
    key = table.at("nodes")
    names: list[str] = []
    for entry in table.list("nodes", str):
        hosts = expand(entry, key)
        for host in hosts or [entry]:  # an empty entry is no host name
            if not _NAME.fullmatch(host):
                advice = 'write for example "a0" or "a[0-3]"'
                raise HolmesError(f"{key}: {host!r:.80} is not a host name; {advice}")
        names += hosts
    if not names:
        raise HolmesError(f"{key}: cluster {cluster!r} has no nodes")
    return tuple(names)


def _read_cluster(table: Table) -> ClusterSpec:
    """Return the content of a `[[cluster]]`.

    Raises:
        HolmesError: a key is missing, unknown, or has a value that is not allowed.
    """
    name = _read_name(table, "name")
    table.path = f"cluster.{name}"  # messages name the table by its path
    kind = table.take("kind", str)
    check_kind(table, kind)
    nodes = _read_nodes(table, name)
    fabric = _read_name(table, "fabric", "ethernet" if kind == "ethernet" else name)
    accelerator = _read_accelerator(table)
    net = table.take("net", str, "")
    check_network(table, kind, fabric, net)
    # into() reads the keys that are not given here, and raises for unknown ones.
    cluster = table.into(
        ClusterSpec,
        name=name,
        kind=kind,
        nodes=nodes,
        fabric=fabric,
        net=net,
        rate_bps=table.rate("rate", required=fabric != "ethernet"),
        latency_s=latency_of(table, KINDS[kind].latency_s),
        uplink_bps=table.rate("uplink", required=False),
        accelerator=accelerator,
    )
    if kind == "ethernet" and "rails" in table.values:
        raise HolmesError(
            f"{table.at('rails')}: nodes of kind 'ethernet' have no fast NIC; remove it"
        )
    return cluster


def _read_accelerator(table: Table) -> Accelerator:
    """Return the numbers of a cluster's GPUs that its `[[cluster]]` gives.

    Raises:
        HolmesError: a number is not above 0, or several keys give the speed.
    """
    speeds = [key for key in _SPEED_KEYS if key in table.values]
    if len(speeds) > 1:
        raise HolmesError(
            f"{table.at(speeds[1])}: {speeds[0]} gives the speed of a GPU already; give one of them"
        )
    return Accelerator(
        flops=_read_positive(table, "gpu_flops"),
        memory_bytes=_read_positive(table, "gpu_memory_bytes"),
        link_bps=table.rate("nvlink", required=False),
        model_flops=_read_positive(table, "gpu_model_flops"),
        hardware_flops=_read_positive(table, "gpu_hardware_flops"),
    )


def _read_name(table: Table, key: str, *default: str) -> str:
    """Return the value of a key that holds the name of a cluster or fabric.

    Args:
        default: The value for a table without the key, or nothing.

    Raises:
        HolmesError: the value is not a name, or the key is missing and has no default.
    """
    name: str = table.take(key, str, *default)
    if not _NAME.fullmatch(name):
        raise HolmesError(
            f"{table.at(key)}: {name!r:.80} is not a name (letters, digits, '.', '_', '-')"
        )
    return name


def _read_positive(table: Table, key: str) -> float:
    """Return the value of a key that holds a number above 0, or 0 without the key.

    Raises:
        HolmesError: the value is not above 0.
    """
    value: float = table.take(key, float, 0.0)
    if key in table.values and not 0 < value < _LARGEST_NUMBER:
        raise HolmesError(f"{table.at(key)}: {value!r} must be above 0")
    return value


def _read_overrides(
    node_table: Table, cluster_of_node: dict[str, str], source: str
) -> dict[str, NodeOverride]:
    """Return the settings in all tables `[node.HOST]` and `[node."HOST[1-4]"]`, host by host.

    Args:
        node_table: The table that holds these tables.
        cluster_of_node: Node -> its cluster, for all nodes of the file.
        source: Path of the file, for the error message.

    Raises:
        HolmesError: a host is in no cluster, a host has two tables, or a key is unknown.
    """
    overrides: dict[str, NodeOverride] = {}
    for hosts in list(node_table.values):
        table = node_table.table(hosts)
        for host in expand(hosts, f"{source}: key 'node.{hosts}'"):
            if host in overrides:
                raise HolmesError(f"{source}: key 'node.{hosts}': node {host!r} has two tables")
            overrides[host] = _read_override(table, host, cluster_of_node, source)
    return overrides


def _read_override(
    table: Table, host: str, cluster_of_node: dict[str, str], source: str
) -> NodeOverride:
    """Return the content of a `[node.HOST]`.

    Args:
        table: The table.
        host: Name of the host.
        cluster_of_node: Node -> its cluster, for all nodes of the file.
        source: Path of the file, for the error message.

    Raises:
        HolmesError: the host is in no cluster, or a key is unknown.
    """
    if host not in cluster_of_node:
        near = nearest(host, cluster_of_node)
        hint = f"; did you mean {near!r}?" if near else ""
        raise HolmesError(f"{source}: key 'node.{host}': no cluster has a node of that name{hint}")
    return table.into(NodeOverride)


def _check_clusters(clusters: list[ClusterSpec], source: str) -> dict[str, str]:
    """Return the cluster of every node, by the node's name.

    Args:
        clusters: All clusters of the file.
        source: Path of the file, for the error message.

    Raises:
        HolmesError: a cluster or node is given twice, or clusters that share a fabric contradict
            each other.
    """
    cluster_of_node: dict[str, str] = {}
    first_on_fabric: dict[str, ClusterSpec] = {}
    names: set[str] = set()
    for cluster in clusters:
        key = f"{source}: key 'cluster.{cluster.name}"
        if cluster.name in names:
            raise HolmesError(f"{key}': two clusters have this name")
        names.add(cluster.name)
        for node in cluster.nodes:
            other = cluster_of_node.setdefault(node, cluster.name)
            if other != cluster.name:
                raise HolmesError(
                    f"{key}.nodes': node {node!r} is already in cluster {other!r}; a node is in one"
                )
        if len(set(cluster.nodes)) < len(cluster.nodes):
            twice = next(node for node in cluster.nodes if cluster.nodes.count(node) > 1)
            raise HolmesError(
                f"{key}.nodes': node {twice!r} is already in the same list; a node is in one"
            )
        first = first_on_fabric.setdefault(cluster.fabric, cluster)
        if first.kind != cluster.kind:
            raise HolmesError(
                f"{key}.fabric': fabric {cluster.fabric!r} is {first.kind} in cluster "
                f"{first.name!r} and {cluster.kind} here; the two kinds cannot talk to each "
                "other"
            )
        if first.net != cluster.net:
            raise HolmesError(
                f"{key}.net': fabric {cluster.fabric!r} has {first.net!r} in cluster "
                f"{first.name!r} and {cluster.net!r} here; one network carries it"
            )
    return cluster_of_node
