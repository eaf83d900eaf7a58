"""Nodes that another program knows, as clusters: alike and on one fabric.

found nodes    a0 ib h100 x 8 fabric "spine"     ->   cluster "ib": a0 a1     asked for: what nobody but a
               a1 ib h100 x 8 fabric "spine"          cluster "roce": b0      person knows (rates, a kind
               b0 roce h100 x 8 fabric "spine"                                that no label tells)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.spec import KNOWN_GPUS
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class FoundNode:
    """kind: of its fast NICs; fabric: a name for what it shares with others; rate_bps: of all its fast NICs
    ("", "", 0: not told); group: what its source calls its like; why_not: why no job can use it now."""

    name: str
    processes: int
    kind: str = ""
    gpu: str = ""
    fabric: str = ""
    rate_bps: int = 0
    group: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True)
class FoundCluster:
    """Of alike nodes. kind "", rate_bps 0: to be asked for."""

    name: str
    nodes: tuple[str, ...]
    processes: int
    kind: str = ""
    gpu: str = ""
    rate_bps: int = 0
    fabric: str = ""


def kind_of(words: Iterable[str]) -> str:
    """The kind of NIC that features or labels name; "" where none does, or several do."""
    tokens = {token for text in words for token in _WORD.findall(text.lower())}
    kinds = [name for name, kind in KINDS.items() if tokens.intersection(kind.words)]
    return kinds[0] if len(kinds) == 1 else ""


def gpu_name(text: str) -> str:
    """ "H100" of "NVIDIA-H100-80GB-HBM3", "h100", "tesla_h100"; `text` itself where it names no known GPU."""
    words = _WORD.findall(text.lower())
    return next((name for name in KNOWN_GPUS if name.lower() in words), text)


def clusters_of(nodes: Sequence[FoundNode]) -> list[FoundCluster]:
    """Nodes alike in kind, GPUs and fabric, in order. HolmesError: a node is named twice, or none is."""
    names: set[str] = set()
    members: dict[tuple[object, ...], list[FoundNode]] = {}
    for node in nodes:
        if node.name in names:
            raise HolmesError(f"node {node.name!r} is named twice")
        names.add(node.name)
        members.setdefault(
            (node.fabric, node.kind, node.gpu, node.processes, node.rate_bps), []
        ).append(node)
    if not members:
        raise HolmesError(
            "no node has a GPU or a slot for a process: there is nothing to make a cluster of"
        )
    result = []
    for name, alike in zip(_named(list(members.values())), members.values()):
        first = alike[0]
        others = [
            group[0]
            for group in members.values()
            if group is not alike and group[0].fabric == first.fabric
        ]
        shared = (
            first.fabric
            and first.kind
            and others
            and all(other.kind == first.kind for other in others)
        )
        result.append(
            FoundCluster(
                name,
                tuple(node.name for node in alike),
                first.processes,
                first.kind,
                first.gpu,
                first.rate_bps,
                _plain(first.fabric) if shared else "",
            )
        )
    return result


def _named(groups: Sequence[Sequence[FoundNode]]) -> list[str]:
    """What its source calls exactly these nodes, else kind and GPU or the fabric, else a number."""
    owner: dict[str, set[str]] = {}
    for node in (node for group in groups for node in group):
        for text in node.group:
            owner.setdefault(text, set()).add(node.name)
    described = ["-".join(filter(None, [group[0].kind, group[0].gpu.lower()])) for group in groups]
    taken: list[str] = []
    for number, group in enumerate(groups):
        members, looks = {node.name for node in group}, described[number]
        exact = [text for text in group[0].group if owner[text] == members]
        alone = [looks] if described.count(looks) == 1 else []
        choices = map(_plain, (*exact, *alone, group[0].fabric))
        # that is the common network
        free = (text for text in choices if text and text not in (*taken, "ethernet"))
        taken.append(next(free, f"cluster{number + 1}"))
    return taken


def _plain(text: str) -> str:
    """As a name of cluster.toml may be."""
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
    """Return `clusters` with the kinds and rates that the user gave, and the list of missing values.

    Args:
        kinds: Name of a cluster -> kind of its fast NICs.
        rates: Name of a cluster -> bits/s of all fast NICs of one node.

    Raises:
        HolmesError: no cluster has one of the names, or a kind does not exist.
    """
    known = [cluster.name for cluster in clusters]
    for name in (*kinds, *rates):
        if name not in known:
            raise HolmesError(
                f"no cluster {name!r} was found; there are {some_of(known) or 'no new ones'}"
            )
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise HolmesError(
                f"kind of cluster {name!r}: {kind!r} is not one of {', '.join(KINDS)}"
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
