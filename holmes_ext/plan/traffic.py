"""What of a Plan a running job looks up: each group's network, reductions, how stages send.

    fabrics    in the order of preference: the first that all nodes of a group can use is the group's
    traffic    for each network API the decisions that follow; one entry where both come to the same

What carries a group's tensors decides which ports it can use: NCCL needs HCAs ("verbs"), gloo an address
("sockets", which InfiniBand without IPoIB has not). Ethernet carries both, so every node is on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holmes_ext.cluster.fabric import Fabric

VERBS, SOCKETS = NETWORK_APIS = ("verbs", "sockets")
#: The "fabric" of a group that one node holds: memory, NVLink or loopback.
LOCAL = "local"
#: (cluster, cluster)
Pair = tuple[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class PlannedFabric(Fabric):
    """A fabric as the plan reckons with it (measured where it was), and the nodes that can use it."""

    verbs: tuple[str, ...]
    sockets: tuple[str, ...]


def neighbours(order: Sequence[T]) -> list[tuple[T, T]]:
    """(cluster, next cluster) round the ring, without pairs inside one cluster."""
    return [
        (first, second) for first, second in zip(order, (*order[1:], order[0])) if first != second
    ]


@dataclass(frozen=True)
class CrossClusterAlgorithm:
    """How the sums of whole clusters are added up."""

    #: "direct", "ring" or "tree".
    algorithm: str
    #: Names: of a ring in its order, of a tree with parents before their children.
    order: tuple[str, ...]
    #: Of a tree, for each of `order` the one that it sends to, "" for the root.
    parents: tuple[str, ...] = ()

    @property
    def halves(self) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """(from, to) -> bytes for each byte that is summed."""
        count = len(self.order)
        if self.algorithm == "tree":
            up = {(child, parent): 1.0 for child, parent in zip(self.order, self.parents) if parent}
            return up, {(parent, child): share for (child, parent), share in up.items()}
        if self.algorithm == "ring":
            round_ = dict.fromkeys(neighbours(self.order), (count - 1) / count)
            return round_, round_
        exchange = {
            (source, target): 1 / count
            for source in self.order
            for target in self.order
            if source != target
        }
        return exchange, exchange

    def latency_s(self, of: Callable[[Pair], float]) -> float:
        """Seconds of a half, for the first bytes; of: seconds from one cluster to another."""
        if self.algorithm == "direct":
            return max(map(of, self.halves[0]))
        if self.algorithm == "ring":
            hops = [of(pair) for pair in neighbours(self.order)]
            return sum(hops) - min(hops)
        depth = {"": 0.0}
        for child, parent in zip(self.order, self.parents):
            depth[child] = depth[parent] + (of((child, parent)) if parent else 0.0)
        return max(depth.values())

    @property
    def part(self) -> float:
        """Of the bytes that are summed, what one message carries."""
        return 1.0 if self.algorithm == "tree" else 1 / len(self.order)

    @property
    def rounds(self) -> int:
        """Messages that follow each other in a half."""
        if self.algorithm == "tree":
            depth = {"": -1}
            for child, parent in zip(self.order, self.parents):
                depth[child] = depth[parent] + 1
            return max(depth.values())
        return len(self.order) - 1 if self.algorithm == "ring" else 1


@dataclass(frozen=True)
class ReductionSpec:
    """How the gradients of one pipeline stage are averaged."""

    #: Under the last backward pass.
    overlap: bool
    #: Of gradients that travel together in one ring.
    bucket_bytes: int
    #: A group that lies on several of them sums hierarchically; () for one ring.
    clusters: tuple[str, ...] = ()
    #: What it has in a step, from which on that is worth it; in buckets of chunk_bytes.
    hierarchical_from: int = 0
    chunk_bytes: int = 0
    #: What crosses then: "off", "bf16", "int8".
    compress: str = "off"
    #: How it crosses, where that is not directly.
    across: CrossClusterAlgorithm | None = None
    #: Connections over which each pair of ranks shares out what crosses (gloo groups).
    streams: int = 1


@dataclass(frozen=True)
class StageLink:
    """Two neighbouring stages; by pipeline group, in their order, or one entry where all are the same."""

    stages: tuple[int, ...]
    #: Of the pair of ranks.
    fabrics: tuple[str, ...]
    #: Where the pair gets a group of its own: "world" in frameworks that send over the group of all ranks,
    #: "pipeline" in those that send over the pipeline group, "pipeline+world" in both, "" in none.
    pair_groups: tuple[str, ...]
    #: Tensor ranks that share out what each of them has to send.
    slices: int = 1
    #: What activations and gradients are rounded to on their way: "off", "bf16", "int8".
    compression: str = "off"


@dataclass(frozen=True)
class Traffic:
    """The decisions for groups that one of `network_apis` carries."""

    network_apis: tuple[str, ...]
    #: Kind of group -> the fabric of every group, in the order of first ranks; one entry where they share
    #: one.
    transports: dict[str, tuple[str, ...]]
    #: By stage; one entry where the sizes are not known.
    reductions: tuple[ReductionSpec, ...]
    #: Of the pipeline.
    stage_links: tuple[StageLink, ...] = ()
    #: Micro-batches that each stage begins before its first backward ends, where sends do not block; () where
    #: the framework's own schedule runs.
    in_flight: tuple[int, ...] = ()
    #: Of every stage, such as "F0 F1 I0 F2 W0" (plan/schedule.py), in place of in_flight; () under
    #: 1F1B.
    schedule: tuple[str, ...] = ()
    #: Of gradients of a weight that the first and the last stage share, hierarchically; None where each rank
    #: sums with its twin, as frameworks do.
    tied: ReductionSpec | None = None


def same(values: tuple[str, ...]) -> tuple[str, ...]:
    """One entry where all are equal."""
    return values[:1] if len(set(values)) == 1 else values
