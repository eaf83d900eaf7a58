"""Pipelines that are alike, folded into one: what plan/simulate/step.py simulates stands for all of them.

A pipeline is one rank on every stage. Two are alike (of one kind) when on every stage they are in the same cluster,
their edges use the same fabrics, and their data-parallel groups are made of the same kinds. Nodes that hold the same
kinds of ranks are alike too: one NIC of theirs stands for all of theirs, and a flow counts on it as many times as the
node has such flows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.plan.cost.across import neighbours
from holmes_ext.plan.sizes import Sizes

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class DataGroups:
    """The data-parallel groups of one stage that are alike. kinds: of the pipelines in it; members: ranks on each of
    its nodes; alike: how many such groups each node has a part in, count: in all; clusters: the nodes' names by
    cluster; crossed: (from, to) -> neighbours in one such ring that lie in these two clusters."""

    stage: int
    kinds: tuple[int, ...]
    ranks: int
    members: dict[str, int]
    alike: dict[str, int]
    clusters: dict[str, tuple[str, ...]]
    count: int
    crossed: dict[tuple[str, str], int]

    @cached_property
    def ranks_of(self) -> dict[str, int]:
        """Cluster -> ranks of one such group."""
        return {name: sum(self.members[node] for node in nodes) for name, nodes in self.clusters.items()}


def _numbered(looks: Mapping[K, Hashable]) -> dict[K, int]:
    """Equal looks get equal numbers, in the order of appearance."""
    known = {look: number for number, look in enumerate(dict.fromkeys(looks.values()))}
    return {key: known[look] for key, look in looks.items()}


class Pipelines:
    """A pipeline goes by its rank on the first stage. kinds: representative nodes by stage; count: pipelines of the
    kind; kind_of: rank -> kind."""

    def __init__(self, site: Site, order: Sequence[str], sizes: Sizes, only: Fabric | None = None):
        self.site, self.only, self.stages = site, only, sizes.pipeline
        self._shared: dict[frozenset[tuple[str, ...]], Fabric] = {}
        strides = sizes.strides()
        self._stride, stages, processes = strides["pp"], range(sizes.pipeline), site.processes
        firsts = [rank for rank in range(site.world_size) if rank // self._stride % sizes.pipeline == 0]
        self._nodes = {
            first: tuple(order[(first + stage * self._stride) // processes] for stage in stages) for first in firsts
        }
        self._group = {first: first // strides["tp"] % sizes.tensor for first in firsts}
        looks = _numbered({first: self._look(nodes) for first, nodes in self._nodes.items()})
        mixed: dict[int, Counter[int]] = {}
        for first in firsts:
            mixed.setdefault(self._group[first], Counter())[looks[first]] += 1
        made_of = {group: tuple(sorted(counts.items())) for group, counts in mixed.items()}
        self.kind_of = _numbered({first: (looks[first], made_of[self._group[first]]) for first in firsts})
        self.count = Counter(self.kind_of.values())
        representative = {kind: first for first, kind in reversed(self.kind_of.items())}
        self.kinds = [self._nodes[representative[kind]] for kind in sorted(representative)]
        self._on: dict[str, Counter[tuple[int, int]]] = {}  # node -> (kind, stage) -> ranks
        #: (node, kind, stage, other stage) -> ranks whose peer is on another node
        self._leaving: Counter[tuple[str, int, int, int]] = Counter()
        for first, nodes in self._nodes.items():
            for stage, node in enumerate(nodes):
                self._on.setdefault(node, Counter())[self.kind_of[first], stage] += 1
                for other in {(stage + 1) % self.stages, (stage - 1) % self.stages}:
                    if node != nodes[other]:
                        self._leaving[node, self.kind_of[first], stage, other] += 1

    def _look(self, nodes: Sequence[str]) -> Hashable:
        pairs = zip(nodes, (*nodes[1:], nodes[0]))
        edges = tuple("" if one == other else self.fabric((one, other)).name for one, other in pairs)
        return tuple(map(self.cluster, nodes)), edges

    def ranks(self, kind: int, stage: int) -> tuple[int, ...]:
        return tuple(first + stage * self._stride for first, own in self.kind_of.items() if own == kind)

    def fabric(self, nodes: Sequence[str]) -> Fabric:
        if self.only is not None:
            return self.only
        key = frozenset(self.site.node_by_name[node].fabrics for node in nodes)
        if key not in self._shared:
            self._shared[key] = self.site.shared_fabric(nodes)
        return self._shared[key]

    def cluster(self, node: str) -> str:
        return self.site.node_by_name[node].cluster

    @cached_property
    def _alike(self) -> dict[str, int]:
        """node -> a number that its likes have too."""
        return _numbered({node: (self.cluster(node), tuple(sorted(held.items()))) for node, held in self._on.items()})

    def nic(self, node: str, fabric: Fabric, way: str) -> Hashable:
        """The key of one way ("out" or "in") of the NIC that stands for `node`'s and its likes'."""
        return self._alike[node], fabric.name, way

    def edge(self, kind: int, stage: int, other: int) -> tuple[str, str, int, int]:
        """Nodes of a message from `stage` to `other` of a kind of pipeline, and how many like it leave the one and
        reach the other."""
        one, two = self.kinds[kind][stage], self.kinds[kind][other]
        return one, two, max(1, self._leaving[one, kind, stage, other]), max(1, self._leaving[two, kind, other, stage])

    def groups(self, stage: int) -> list[DataGroups]:
        """Data-parallel (with context-parallel) groups of a stage, those that are alike as one."""
        members: dict[int, list[int]] = {}
        for first, group in self._group.items():
            members.setdefault(group, []).append(first)
        likes: dict[tuple[int, ...], list[int]] = {}
        for group, firsts in members.items():
            likes.setdefault(tuple(sorted({self.kind_of[first] for first in firsts})), []).append(group)
        found = []
        for kinds, same in likes.items():
            parts: dict[str, set[int]] = {}
            for group in same:
                for first in members[group]:
                    parts.setdefault(self._nodes[first][stage], set()).add(group)
            nodes = Counter(self._nodes[first][stage] for first in members[same[0]])
            clusters: dict[str, tuple[str, ...]] = {}
            for node in nodes:
                clusters[self.cluster(node)] = (*clusters.get(self.cluster(node), ()), node)
            alike = {node: len(parts[node]) for node in nodes}
            order = [self.cluster(self._nodes[first][stage]) for first in members[same[0]]]
            crossed = dict(Counter(neighbours(order)))
            ranks = sum(nodes.values())
            found.append(DataGroups(stage, kinds, ranks, dict(nodes), alike, clusters, len(same), crossed))
        return found
