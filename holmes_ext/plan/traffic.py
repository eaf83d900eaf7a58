"""Parts of a Plan that a running job looks up: networks of groups, reductions, and how stages send.

    fabrics    in order of preference; a group uses the first that all its nodes can use
    traffic    the decisions for each network API, or a single entry if they are equal for both

The network API of a group's backend decides which ports (NICs) the group can use. NCCL needs HCAs
("verbs"). gloo needs an IP address ("sockets"); InfiniBand without IPoIB has none. Ethernet carries both,
so every node is on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holmes_ext.cluster.fabric import Fabric

VERBS, SOCKETS = NETWORK_APIS = ("verbs", "sockets")
#: The "fabric" of a group inside a node: memory, NVLink or loopback.
LOCAL = "local"
#: (from cluster, to cluster)
Pair = tuple[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class PlannedFabric(Fabric):
    """A fabric with the rate that the plan assumes (measured if possible), and the nodes that can use it."""

    verbs: tuple[str, ...]  # nodes whose port has an HCA
    sockets: tuple[str, ...]  # nodes whose port has an IP address


def neighbours(order: Sequence[T]) -> list[tuple[T, T]]:
    """Return the pairs of different neighbours on a ring: for a a b, they are (a, b) and (b, a)."""
    following = (*order[1:], order[0])
    return [(first, second) for first, second in zip(order, following) if first != second]


@dataclass(frozen=True)
class CrossClusterAlgorithm:
    """Algorithm by which clusters add up their sums of gradients in a hierarchical all-reduce.

    Each cluster has first summed the gradients of its ranks. Then a reduce step adds up the clusters'
    sums, and a gather step distributes the total. plan/across.py describes the three algorithms.
    """

    algorithm: str  # "direct", "ring" or "tree"
    #: Clusters; those of a ring in its order, those of a tree with parents before children.
    order: tuple[str, ...]
    parents: tuple[str, ...] = ()  # of a tree: parent of each cluster in `order`, "" for the root

    @property
    def halves(self) -> tuple[dict[Pair, float], dict[Pair, float]]:
        """Return the bytes that clusters send each other in the reduce step, and those in the gather step.

        In a tree, sums go up to the root, and the total comes down. On a ring, each cluster passes
        parts to its successor. With direct exchanges, each cluster sends a part to every other cluster.

        Returns:
            For both steps: (from cluster, to cluster) -> bytes for each byte of the sum.
        """
        clusters = len(self.order)
        if self.algorithm == "tree":
            edges = [(child, parent) for child, parent in zip(self.order, self.parents) if parent]
            up = dict.fromkeys(edges, 1.0)  # the whole sum
            down = {(parent, child): 1.0 for child, parent in edges}
            return up, down
        if self.algorithm == "ring":
            around = dict.fromkeys(neighbours(self.order), (clusters - 1) / clusters)
            return around, around

        # "direct"
        exchange = {
            (source, target): 1 / clusters
            for source in self.order
            for target in self.order
            if source != target
        }
        return exchange, exchange

    def latency_s(self, of: Callable[[Pair], float]) -> float:
        """Return the latency of the reduce step, in seconds; the gather step takes as long.

        The reduce step adds up the sums of all clusters, the gather step distributes the total.
        Both send messages between clusters; the latencies of messages that follow each other add
        up.

        Args:
            of: Returns the latency of a message from one cluster to another, in seconds.
        """
        if self.algorithm == "direct":  # all clusters exchange their parts at the same time
            reduce_step, _ = self.halves
            return max(map(of, reduce_step))
        if self.algorithm == "ring":
            links_s = [of(pair) for pair in neighbours(self.order)]
            # A part begins at each cluster and passes all links of the ring except the last. The slowest
            # part is that which passes all but the fastest link.
            return sum(links_s) - min(links_s)

        # A tree: `parents` has the parent of each cluster in `order`, "" for the root. Parents come before
        # their children in `order`, so the latency of the parent is known already.
        to_root_s: dict[str, float] = {}  # cluster -> latency from it to the root
        for child, parent in zip(self.order, self.parents):
            to_root_s[child] = to_root_s[parent] + of((child, parent)) if parent else 0.0
        return max(to_root_s.values())

    @property
    def message_share(self) -> float:
        """Return the fraction of the gradients' bytes that each message between clusters carries."""
        return 1.0 if self.algorithm == "tree" else 1 / len(self.order)

    @property
    def rounds(self) -> int:
        """Return how many messages follow each other until the sums of all clusters have arrived."""
        if self.algorithm == "direct":
            return 1
        if self.algorithm == "ring":
            return len(self.order) - 1
        depth: dict[str, int] = {}  # cluster -> number of links between it and the root
        for child, parent in zip(self.order, self.parents):
            depth[child] = depth[parent] + 1 if parent else 0
        return max(depth.values())


@dataclass(frozen=True)
class ReductionSpec:
    """Algorithm and settings by which the gradients of a pipeline stage are averaged."""

    overlap: bool  # whether they are reduced during the last backward pass
    bucket_bytes: int  # gradients that are reduced together in a ring
    clusters: tuple[
        str, ...
    ] = ()  # groups on several of these reduce hierarchically; (): a flat ring
    #: Least bytes per step for which a hierarchical reduction is worth it; it is cut into chunks of
    #: chunk_bytes.
    hierarchical_from: int = 0
    chunk_bytes: int = 0
    compress: str = "off"  # compression across clusters: "off", "bf16" or "int8"
    across: CrossClusterAlgorithm | None = None  # None: direct exchanges
    #: Connections between two ranks that share the bytes between clusters (gloo groups).
    streams: int = 1


@dataclass(frozen=True)
class StageLink:
    """Messages between two neighbouring stages.

    `fabrics` and `pair_groups` have an entry for each pipeline group, in their order, or a single
    entry if all are equal. Some frameworks send over the group of a pipeline, others over that of
    all ranks. If this group uses a slower fabric than the two ranks share, they need a process group
    of their own. An entry of `pair_groups` says in which frameworks that is so:

        ""                  in none
        "pipeline"          in those that send over the group of a pipeline
        "world"             in those that send over the group of all ranks
        "pipeline+world"    in both
    """

    stages: tuple[int, ...]
    fabrics: tuple[str, ...]  # fabric between the two ranks
    pair_groups: tuple[str, ...]
    slices: int = 1  # tensor-parallel ranks that share the message that each of them has
    compression: str = "off"  # of activations and their gradients: "off", "bf16" or "int8"


@dataclass(frozen=True)
class Traffic:
    """Decisions about a job's communication, for the process groups of a network API or of both.

    They are the network of each group, how each stage sums gradients and sends to the next stage, and
    the order of the passes. NCCL's groups use the network API "verbs", gloo's "sockets". If the
    decisions for both are equal, a plan has a single Traffic with both names.
    """

    network_apis: tuple[str, ...]
    #: Kind of group -> fabric of every group, in the order of first ranks, or a single entry if all are
    #: equal.
    transports: dict[str, tuple[str, ...]]
    reductions: tuple[ReductionSpec, ...]  # by stage; a single entry if the sizes are not known
    stage_links: tuple[StageLink, ...] = ()
    #: Micro-batches that each stage begins before its first backward pass ends, if sends do not block; ():
    #: the framework's own schedule.
    in_flight: tuple[int, ...] = ()
    #: Passes of each stage, such as "F0 F1 I0 F2 W0" (plan/schedule.py), in place of in_flight; (): 1F1B.
    schedule: tuple[str, ...] = ()
    #: Hierarchical reduction of the gradient of a weight that the first and last stage share; None: each rank
    #: sums with its counterpart in the other stage, as frameworks do.
    tied: ReductionSpec | None = None


def one_if_equal(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return a tuple with the first value only, if all values are equal; else all values."""
    return values[:1] if len(set(values)) == 1 else values
