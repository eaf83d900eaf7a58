"""Nodes that Slurm, Kubernetes or a hostfile lists, grouped into clusters with the same hardware.

    listed nodes   a0 ib h100 x 8 fabric "spine"     ->   cluster "ib": a0 a1
                   a1 ib h100 x 8 fabric "spine"          cluster "roce": b0
                   b0 roce h100 x 8 fabric "spine"

Such a source may have no rates, or no labels that name the kind of NIC. Those values come from the
user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holmes_ext.cluster.nic import CLUSTER_KINDS, KINDS
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

_WORD = re.compile(r"[a-z0-9]+")


class _Hardware(NamedTuple):
    """Hardware of a node, which is equal on all nodes of a cluster: GPUs, NICs and fabric."""

    fabric: str
    kind: str
    gpu: str
    processes: int
    rate_bps: int


@dataclass(frozen=True)
class FoundNode:
    """Node that Slurm, Kubernetes or a hostfile lists. Empty and zero values are unknown."""

    name: str
    processes: int  # one for each GPU
    kind: str = ""  # kind of the fast NICs
    gpu: str = ""
    fabric: str = ""  # name of the network that the node shares with other nodes
    rate_bps: int = 0  # all fast NICs together
    #: Names that the source gives to sets of nodes with this node: partitions, features, pools.
    labels: tuple[str, ...] = ()
    why_not: str = ""  # reason why no job can use the node now, "" if one can

    @property
    def hardware(self) -> _Hardware:
        """Hardware of this node: nodes with equal hardware form a cluster."""
        return _Hardware(self.fabric, self.kind, self.gpu, self.processes, self.rate_bps)


@dataclass(frozen=True)
class FoundCluster:
    """Cluster of nodes with the same hardware, from the list of Slurm, Kubernetes or a hostfile.

    Such a list may not tell the kind or the rate of the InfiniBand, RoCE or Ethernet NICs. Then
    `kind` is "" or `rate_bps` is 0, and the user must give the value.
    """

    name: str
    nodes: tuple[str, ...]
    processes: int  # on each node
    kind: str = ""  # kind of the fast NICs
    gpu: str = ""
    rate_bps: int = 0  # all fast NICs of one node together
    fabric: str = ""  # name of a fabric that several clusters share


def kind_of(words: Iterable[str]) -> str:
    """Return the kind of NIC that the features or labels of a node name.

    The kind is "" if the words name none, or several.
    """
    tokens = {token for text in words for token in _WORD.findall(text.lower())}
    kinds = [name for name, kind in KINDS.items() if tokens.intersection(kind.words)]
    return kinds[0] if len(kinds) == 1 else ""


def clusters_of(nodes: Sequence[FoundNode]) -> list[FoundCluster]:
    """Group nodes with the same hardware into clusters.

    The order is that of the first node of each cluster: nodes a0 (H100), b0 (A100), a1 (H100) give
    the clusters (a0, a1) and (b0). The hardware is GPU, processes, kind and rate of NICs, and
    fabric.

    Raises:
        HolmesError: there is no node, or two have the same name.
    """
    names: set[str] = set()  # of all nodes so far
    groups: dict[_Hardware, list[FoundNode]] = {}
    for node in nodes:
        if node.name in names:
            raise HolmesError(f"node {node.name!r} is named twice")
        names.add(node.name)
        groups.setdefault(node.hardware, []).append(node)
    if not groups:
        raise HolmesError(
            "no node has a GPU or a slot for a process: there is nothing to make a cluster of"
        )
    clusters = []
    for name, (hardware, group) in zip(_cluster_names(list(groups.values())), groups.items()):
        clusters.append(
            FoundCluster(
                name,
                nodes=tuple(node.name for node in group),
                processes=hardware.processes,
                kind=hardware.kind,
                gpu=hardware.gpu,
                rate_bps=hardware.rate_bps,
                fabric=_as_name(hardware.fabric) if _shares_fabric(hardware, groups) else "",
            )
        )
    return clusters


def _shares_fabric(hardware: _Hardware, all_hardware: Iterable[_Hardware]) -> bool:
    """Return whether a cluster shares its fabric with others of the same kind of NIC.

    Clusters of different kinds cannot communicate over a fabric, even if Slurm's topology, say,
    states that they share it.

    Args:
        hardware: Hardware of a cluster.
        all_hardware: Hardware of all clusters.
    """
    on_fabric = [other for other in all_hardware if other.fabric == hardware.fabric]
    kinds = {other.kind for other in on_fabric}
    return bool(hardware.fabric and hardware.kind) and len(on_fabric) > 1 and len(kinds) == 1


def _cluster_names(groups: Sequence[Sequence[FoundNode]]) -> list[str]:
    """Return a cluster name for each group of nodes with the same hardware.

    A group gets the first of these names that no earlier group has:

        1. a label that exactly these nodes have, such as the name of their Slurm partition
        2. the kind of NIC and the GPU ("ib-h100"), if no other group has the same
        3. the fabric
        4. "cluster" and a number

    Args:
        groups: Nodes of each future cluster.
    """
    nodes_of_label: dict[str, set[str]] = {}  # label -> names of the nodes that have it
    for group in groups:
        for node in group:
            for label in node.labels:
                nodes_of_label.setdefault(label, set()).add(node.name)
    descriptions = [_description(group[0]) for group in groups]
    taken = {"ethernet"}  # name of the network that reaches every node
    names = []
    for number, (group, description) in enumerate(zip(groups, descriptions), start=1):
        first = group[0]
        members = {node.name for node in group}
        candidates = [label for label in first.labels if nodes_of_label[label] == members]
        if descriptions.count(description) == 1:
            candidates.append(description)
        candidates.append(first.fabric)
        free = [name for name in map(_as_name, candidates) if name and name not in taken]
        name = free[0] if free else f"cluster{number}"
        taken.add(name)
        names.append(name)
    return names


def _description(node: FoundNode) -> str:
    """Return the kind of NIC and the GPU of a node, such as "ib-h100"."""
    return "-".join(filter(None, [node.kind, node.gpu.lower()]))


def _as_name(text: str) -> str:
    """Return a text as a name for cluster.toml: characters that are not allowed there are replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-._")


class MissingValue(NamedTuple):
    """A value that a cluster needs, and that neither the source nor the user has given."""

    name: str  # "kind" or "rate"; the option --kind or --rate gives it
    cluster: str


class Completed(NamedTuple):
    """Clusters with the values that the user gave, and the values that are still missing."""

    clusters: list[FoundCluster]
    missing: list[MissingValue]


def completed(
    clusters: Sequence[FoundCluster], kinds: Mapping[str, str], rates: Mapping[str, int]
) -> Completed:
    """Return clusters with the kinds and rates that the user gave, and the missing values.

    A value of the user replaces that of the source of the nodes (Slurm, Kubernetes or a hostfile).

    Args:
        clusters: Clusters of the nodes that the source lists.
        kinds: Name of a cluster -> kind of its fast NICs.
        rates: Name of a cluster -> bits/s of all fast NICs of one node.

    Raises:
        HolmesError: a name is not that of a cluster, or a kind does not exist.
    """
    names = [cluster.name for cluster in clusters]
    for name in (*kinds, *rates):
        if name not in names:
            raise HolmesError(
                f"no cluster {name!r} was found; there are {some_of(names) or 'no new ones'}"
            )
    for name, kind in kinds.items():
        if kind not in CLUSTER_KINDS:
            raise HolmesError(
                f"kind of cluster {name!r}: {kind!r} is not one of {', '.join(CLUSTER_KINDS)}"
            )
    full = [
        replace(
            cluster,
            kind=kinds.get(cluster.name, cluster.kind),
            rate_bps=rates.get(cluster.name, cluster.rate_bps),
        )
        for cluster in clusters
    ]
    missing = [MissingValue("kind", cluster.name) for cluster in full if not cluster.kind]
    missing += [
        MissingValue("rate", cluster.name)
        for cluster in full
        if cluster.kind != "ethernet" and not cluster.rate_bps
    ]
    return Completed(full, missing)
