"""cluster.toml: what the user says about the clusters.

    version = 2

    [ethernet]                     # the network that reaches every node
    rate = "25Gb/s"                # of one node, each way

    [[cluster]]
    name = "a"
    kind = "ib"                    # its fast NICs: ib, roce or ethernet (no fast NIC)
    rate = "200Gb/s"               # of one node, all its fast NICs together, each way
    nodes = ["a[0-3]"]             # host names
    processes = 8                  # for each node, one a GPU

Every key with its kind and default: keys.py.

What a GPU does for training: known names, and what cluster.toml says instead.

    [[cluster]]
    gpu = "A100"                 # a name of KNOWN gives all three numbers, as in "NVIDIA A100-SXM4-40GB", too
    gpu_flops = 150e12           # FLOP/s that training reaches on one GPU (not the data sheet's peak)
    gpu_memory_bytes = 80e9
    nvlink = "2400Gb/s"          # of one GPU, each way, to the others of its node

Peaks, memory and NVLink are the data sheets'. What training reaches is an assumption: 150 TFLOP/s on Ampere
(48 % of 312; Narayanan et al. 2021, arXiv 2104.04473, table 1, measure 140 to 163), 400 TFLOP/s on Hopper (40
% of 989). Measure yours and write it down.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from holmes_ext.checks import InRange, check_fields
from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.wan import (
    MeasuredLink,
    MeasuredPair,
    Wan,
    latency_of,
    notes,
    parse_links,
    parse_pairs,
    parse_wan,
)
from holmes_ext.document import Table, digest_of, parse_toml, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import nearest


@dataclass(frozen=True)
class Accelerator:
    """flops: FLOP/s reached in training; link_bps: bits/s of one GPU to others of its node. 0: not known."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    link_bps: float = 0.0


KNOWN = {
    "A100": Accelerator(150e12, 80e9, 2400e9),
    "A800": Accelerator(150e12, 80e9, 1600e9),
    "H100": Accelerator(400e12, 80e9, 3600e9),
    "H800": Accelerator(400e12, 80e9, 1600e9),
    "H200": Accelerator(400e12, 141e9, 3600e9),
}
_MEMORY = re.compile(r"(\d+) ?GB", re.IGNORECASE)


def accelerator_of(name: str) -> Accelerator | None:
    """The known GPU that is a word of `name` ("NVIDIA A100-SXM4-40GB"), with the memory that the name states,
    without NVLink if it says PCIe. None where no word is known."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    accelerator = next((KNOWN[word] for word in words if word in KNOWN), None)
    if accelerator is None:
        return None
    if stated := _MEMORY.search(name):
        accelerator = replace(accelerator, memory_bytes=float(stated[1]) * 1e9)
    return replace(accelerator, link_bps=0.0) if "PCIE" in words else accelerator


VERSION = 2
_UPGRADE = (
    'write "version = 2": every key of version 1 means the same there, and version 2 adds uplinks and '
    "[[between]]"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MAX_RAILS = 8


@dataclass(frozen=True)
class ClusterSpec:
    """Rates in bits/s for each node (uplink_bps: of all of them, 0 without), latency in seconds; rails: fast
    NICs of each node, for the lab."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    rate_bps: int
    fabric: str
    latency_s: float
    processes: Annotated[int, InRange(1, 1024)] = 1
    gpu: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    accelerator: Accelerator = Accelerator()
    net: str = ""
    uplink_bps: int = 0
    rails: Annotated[int, InRange(1, MAX_RAILS)] = 1

    def __post_init__(self) -> None:
        check_fields(self, f"cluster {self.name!r}")


@dataclass(frozen=True)
class NodeOverride:
    """One `[node.HOST]`: what differs from its cluster."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    ethernet: str = ""


@dataclass(frozen=True)
class SiteSpec:
    name: str
    ethernet_rate_bps: int
    ethernet_latency_s: float
    ethernet_interface: str
    clusters: tuple[ClusterSpec, ...]
    overrides: dict[str, NodeOverride] = field(default_factory=dict)
    source: str = "cluster.toml"
    links: dict[str, MeasuredLink] = field(default_factory=dict)
    wan: Wan = Wan()
    pairs: tuple[MeasuredPair, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 (hex) of what the file says, but comments, its name and what was measured."""
        content: list[object] = [
            self.ethernet_rate_bps,
            self.ethernet_latency_s,
            self.ethernet_interface,
        ]
        beside = ("accelerator", "uplink_bps", "net", "rails")
        content += [
            {key: value for key, value in vars(c).items() if key not in beside}
            for c in self.clusters
        ]
        content += [[node, vars(override)] for node, override in sorted(self.overrides.items())]
        content += [asdict(self.wan)] if self.wan else []
        return digest_of(content)

    @property
    def notes(self) -> list[str]:
        """What is possible but looks unintended, a line each."""
        wan_notes = notes(
            self.wan, {cluster.name: self.ethernet_rate_bps for cluster in self.clusters}
        )
        return [f"{self.source}: {note}" for note in wan_notes]

    def only(self, nodes: Collection[str]) -> SiteSpec:
        """The same as far as these nodes go; a file may describe more than a job has."""
        kept = [
            replace(cluster, nodes=tuple(node for node in cluster.nodes if node in nodes))
            for cluster in self.clusters
        ]
        clusters = tuple(cluster for cluster in kept if cluster.nodes)
        names = {cluster.name for cluster in clusters}
        overrides = {host: override for host, override in self.overrides.items() if host in nodes}
        pairs = tuple(pair for pair in self.pairs if names.issuperset(pair.clusters))
        return replace(
            self, clusters=clusters, overrides=overrides, wan=self.wan.only(names), pairs=pairs
        )

    @cached_property
    def owner(self) -> dict[str, ClusterSpec]:
        """Node -> the cluster that lists it."""
        return {node: cluster for cluster in self.clusters for node in cluster.nodes}

    @cached_property
    def _by_short_name(self) -> dict[str, str]:
        return {short_name(node): node for node in reversed(self.owner)}

    def known_as(self, host: str) -> str:
        """The node that a host name means: the same, or the first alike up to the first dot; "" for none."""
        return host if host in self.owner else self._by_short_name.get(short_name(host), "")

    def cluster_of(self, node: str) -> ClusterSpec:
        """The cluster that holds `node`; HolmesError when none does."""
        if node not in self.owner:
            raise HolmesError(
                f"{self.source}: node {node!r} is in no cluster; add it to a cluster's nodes"
            )
        return self.owner[node]


def short_name(host: str) -> str:
    """The host name up to its first dot: as one file says "gpu01" and one machine "gpu01.site.org"."""
    return host.split(".")[0]


def load_spec(path: str | Path) -> SiteSpec:
    """Read and validate a cluster.toml; HolmesError names the file and the key, or the line."""
    return parse_spec(read_text(path, "name a cluster.toml"), str(path))


def parse_spec(text: str, source: str = "cluster.toml") -> SiteSpec:
    """`text` of a cluster.toml as a SiteSpec; see load_spec."""
    if not text.strip():
        raise HolmesError(
            f"{source}: the file is empty; examples/clusters/ has samples to start from"
        )
    top = parse_toml(text, source)
    top.version(VERSION, _UPGRADE)
    name = top.take("name", str, Path(source).stem)
    ethernet = top.table("ethernet")
    clusters = [_cluster(table) for table in top.tables("cluster")]
    if not clusters:
        raise HolmesError(
            f"{source}: key 'cluster' is missing; a site needs at least one [[cluster]]"
        )
    node_table = top.table("node", default={})
    known = _check_clusters(clusters, source)
    overrides = {
        host: _override(node_table.table(host), host, known, source)
        for host in list(node_table.values)
    }
    links = parse_links(
        top.table("link", default={}), {"ethernet", *(cluster.fabric for cluster in clusters)}
    )
    rate, latency = ethernet.rate("rate"), latency_of(ethernet, KINDS["ethernet"].latency_s)
    uplinks = {cluster.name: cluster.uplink_bps for cluster in clusters}
    wan, pairs = parse_wan(top, uplinks, latency), parse_pairs(top, list(uplinks))
    top.done()
    interface = ethernet.take("interface", str, "")
    ethernet.done()
    return SiteSpec(
        name, rate, latency, interface, tuple(clusters), overrides, source, links, wan, pairs
    )


def _nodes(table: Table, cluster: str) -> tuple[str, ...]:
    """Return the hosts of a cluster. An entry of key `nodes` is a host name or a list such as "gpu[00-15]".

    Raises:
        HolmesError: an entry is not a host list, or has a name that no host can have, or there is no host.
    """
    where = table.at("nodes")
    names: list[str] = []
    for entry in table.list("nodes", str):
        hosts = expand(entry, where)
        for host in hosts or [entry]:  # an empty entry is no host name
            if not _NAME.fullmatch(host):
                advice = 'write for example "a0" or "a[0-3]"'
                raise HolmesError(f"{where}: {host!r:.80} is not a host name; {advice}")
        names += hosts
    if not names:
        raise HolmesError(f"{where}: cluster {cluster!r} has no nodes")
    return tuple(names)


def _cluster(table: Table) -> ClusterSpec:
    name = _name(table, "name")
    table.path = f"cluster.{name}"
    kind = table.take("kind", str)
    if kind not in KINDS:
        raise HolmesError(f"{table.at('kind')}: {kind!r} is not one of {', '.join(KINDS)}")
    nodes = _nodes(table, name)
    fabric = _name(table, "fabric", "ethernet" if kind == "ethernet" else name)
    flops, memory = _above_0(table, "gpu_flops"), _above_0(table, "gpu_memory_bytes")
    if kind != "ethernet" and fabric == "ethernet":
        advice = f"name the {kind} fabric otherwise"
        raise HolmesError(f"{table.at('fabric')}: 'ethernet' is the network of all nodes; {advice}")
    cluster = table.into(
        ClusterSpec,
        name=name,
        kind=kind,
        nodes=nodes,
        fabric=fabric,
        rate_bps=table.rate("rate", required=fabric != "ethernet"),
        latency_s=latency_of(table, KINDS[kind].latency_s),
        uplink_bps=table.rate("uplink", required=False),
        accelerator=Accelerator(flops, memory, table.rate("nvlink", required=False)),
    )
    if kind == "ethernet" and "rails" in table.values:
        raise HolmesError(
            f"{table.at('rails')}: nodes of kind 'ethernet' have no fast NIC; remove it"
        )
    if cluster.net and fabric == "ethernet":
        raise HolmesError(
            f"{table.at('net')}: a cluster without a fast fabric goes over NCCL's sockets; remove it"
        )
    if "net" in table.values and not (cluster.net.isprintable() and 0 < len(cluster.net) <= 64):
        raise HolmesError(
            f'{table.at("net")}: {cluster.net!r:.80} is not a network of NCCL\'s ("AWS Libfabric")'
        )
    return cluster


def _name(table: Table, key: str, *default: str) -> str:
    name: str = table.take(key, str, *default)
    if not _NAME.fullmatch(name):
        raise HolmesError(
            f"{table.at(key)}: {name!r:.80} is not a name (letters, digits, '.', '_', '-')"
        )
    return name


def _above_0(table: Table, key: str) -> float:
    """0 when left out."""
    value: float = table.take(key, float, 0.0)
    if key in table.values and not 0 < value < 1e30:
        raise HolmesError(f"{table.at(key)}: {value!r} must be above 0")
    return value


def _override(table: Table, host: str, known: dict[str, str], source: str) -> NodeOverride:
    if host not in known:
        hint = f"; did you mean {near!r}?" if (near := nearest(host, known)) else ""
        raise HolmesError(f"{source}: key 'node.{host}': no cluster has a node of that name{hint}")
    return table.into(NodeOverride)


def _check_clusters(clusters: list[ClusterSpec], source: str) -> dict[str, str]:
    """Node name -> cluster name; refuses what contradicts itself."""
    owner: dict[str, str] = {}
    kinds: dict[str, ClusterSpec] = {}
    names: set[str] = set()
    for cluster in clusters:
        here = f"{source}: key 'cluster.{cluster.name}"
        if cluster.name in names:
            raise HolmesError(f"{here}': two clusters have this name")
        names.add(cluster.name)
        for node in cluster.nodes:
            if node in owner:
                also = (
                    f"cluster {owner[node]!r}" if owner[node] != cluster.name else "the same list"
                )
                raise HolmesError(
                    f"{here}.nodes': node {node!r} is already in {also}; a node is in one"
                )
            owner[node] = cluster.name
        first = kinds.setdefault(cluster.fabric, cluster)
        if first.kind != cluster.kind:
            raise HolmesError(
                f"{here}.fabric': fabric {cluster.fabric!r} is {first.kind} in cluster "
                f"{first.name!r} and {cluster.kind} here; the two kinds cannot talk to each "
                "other"
            )
        if first.net != cluster.net:
            raise HolmesError(
                f"{here}.net': fabric {cluster.fabric!r} has {first.net!r} in cluster "
                f"{first.name!r} and {cluster.net!r} here; one network carries it"
            )
    return owner
