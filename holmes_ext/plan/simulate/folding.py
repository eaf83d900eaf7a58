"""Pipelines that are alike, folded into one: what plan/simulate/step.py simulates stands for all of them.

A column is one rank on every stage: a pipeline. Two columns are alike when on every stage they are in the same cluster, their edges use the
same fabrics, and their data-parallel groups are made of the same kinds. Nodes that hold the same kinds of ranks are alike too: one NIC
of theirs stands for all of theirs, and a flow counts on it as many times as the node has such flows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.plan.sizes import Sizes


@dataclass(frozen=True)
class Group:
    """The data-parallel groups of one stage that are alike. kinds: of the columns in it; members: ranks on each of its nodes;
    alike: how many such groups each node has a part in, count: in all; clusters: the nodes' names by cluster."""

    stage: int
    kinds: tuple[int, ...]
    ranks: int
    members: dict[str, int]
    alike: dict[str, int]
    clusters: dict[str, tuple[str, ...]]
    count: int


class Columns:
    """kinds: representative nodes by stage; count: columns of the kind; kind_of: column -> kind; ranks: those of a kind and stage."""

    def __init__(self, site: Site, order: Sequence[str], sizes: Sizes, only: Fabric | None = None):
        self.site, self.sizes, self.only = site, sizes, only
        self.stages, processes = sizes.pipeline, site.processes
        strides = sizes.strides()
        stride, tensor = strides["pp"], strides["tp"]
        self._clusters = [site.node_by_name[name].cluster for name in order]
        self._order, self._shared = order, {}
        columns = [rank for rank in range(site.world_size) if rank // stride % self.stages == 0]
        nodes = {column: tuple((column + s * stride) // processes for s in range(self.stages)) for column in columns}
        group = {column: column // tensor % sizes.tensor for column in columns}
        looks: dict[int, Hashable] = {column: self._look(nodes[column]) for column in columns}
        known = {look: index for index, look in enumerate(dict.fromkeys(looks.values()))}
        mixed: dict[int, Counter] = {}
        for column in columns:
            mixed.setdefault(group[column], Counter())[known[looks[column]]] += 1
        made_of = {one: tuple(sorted(counts.items())) for one, counts in mixed.items()}
        looks = {column: (known[looks[column]], made_of[group[column]]) for column in columns}
        known = {look: index for index, look in enumerate(dict.fromkeys(looks.values()))}
        self.kind_of = {column: known[looks[column]] for column in columns}
        self.count = Counter(self.kind_of.values())
        self._representative: dict[int, int] = {}
        for column, kind in self.kind_of.items():
            self._representative.setdefault(kind, column)
        self.kinds = [tuple(order[node] for node in nodes[column]) for column in self._representative.values()]
        self._nodes, self._group, self._stride = nodes, group, stride
        self._on: dict[str, Counter] = {}  # node -> (kind, stage) -> ranks
        for column in columns:
            for stage, node in enumerate(nodes[column]):
                self._on.setdefault(order[node], Counter())[self.kind_of[column], stage] += 1
        self._leaving: Counter = Counter()  # (node, kind, stage, other stage) -> ranks whose peer is on another node
        for column in columns:
            for stage in range(self.stages):
                for other in {(stage + 1) % self.stages, (stage - 1) % self.stages}:
                    if nodes[column][stage] != nodes[column][other]:
                        self._leaving[order[nodes[column][stage]], self.kind_of[column], stage, other] += 1

    def _look(self, nodes: tuple[int, ...]) -> Hashable:
        edges = []
        for one, other in zip(nodes, (*nodes[1:], nodes[0])):
            edges.append("" if one == other else self.fabric((self._order[one], self._order[other])).name)
        return tuple(self._clusters[node] for node in nodes), tuple(edges)

    def ranks(self, kind: int, stage: int) -> tuple[int, ...]:
        return tuple(column + stage * self._stride for column, own in self.kind_of.items() if own == kind)

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
    def _look_of_node(self) -> dict[str, Hashable]:
        looks = {node: (self.cluster(node), tuple(sorted(held.items()))) for node, held in self._on.items()}
        known = {look: index for index, look in enumerate(dict.fromkeys(looks.values()))}
        return {node: known[look] for node, look in looks.items()}

    def nic(self, node: str, fabric: Fabric, way: str) -> Hashable:
        """The key of one way of the NIC that stands for `node`'s and its likes'."""
        return self._look_of_node[node], fabric.name, way

    def edge(self, kind: int, stage: int, other: int) -> tuple[str, str, int, int]:
        """Nodes of a message from `stage` to `other` of a kind of column, and how many like it leave the one and reach the other."""
        one, two = self.kinds[kind][stage], self.kinds[kind][other]
        leaving = self._leaving[one, kind, stage, other]
        return one, two, max(1, leaving), max(1, self._leaving[two, kind, other, stage])

    def groups(self, stage: int) -> list[Group]:
        """Data-parallel (with context-parallel) groups of a stage, those that are alike as one."""
        found: dict[tuple, list[int]] = {}
        by_group: dict[int, list[int]] = {}
        for column in self.kind_of:
            by_group.setdefault(self._group[column], []).append(column)
        for one, columns in by_group.items():
            found.setdefault(tuple(sorted({self.kind_of[column] for column in columns})), []).append(one)
        result = []
        for kinds, likes in found.items():
            alike: dict[str, set[int]] = {}
            for one in likes:
                for column in by_group[one]:
                    alike.setdefault(self._order[self._nodes[column][stage]], set()).add(one)
            members = Counter(self._order[self._nodes[column][stage]] for column in by_group[likes[0]])
            clusters: dict[str, list[str]] = {}
            for node in members:
                clusters.setdefault(self.cluster(node), []).append(node)
            counts = {node: len(alike[node]) for node in members}
            named = {name: tuple(nodes) for name, nodes in clusters.items()}
            result.append(Group(stage, kinds, len(by_group[likes[0]]), dict(members), counts, named, len(likes)))
        return result
