"""What networks take: a message, a ring all-reduce, an all-to-all, two levels. Seconds from bytes, a fabric's rate and its latency.

Every time is linear in the bytes (alpha-beta model: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009), so it is a Price:
latency_s + size x byte_s. Groups that share a node's NICs share their rate: `sharers`.

    ring of n    passes every node once, each way: 2 (n - 1) / n of the bytes through its NIC, in 2 (n - 1) messages that follow each other
    two levels   inside every cluster, across, inside: chunks follow each other, so the slower level is busy all the time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_ext.cluster.site import Fabric

#: Bytes of a chunk of a two-level all-reduce for each rank of the smallest cluster: what its Ethernet NIC carries at a time.
CHUNK_SHARE_BYTES = 512 * 2**10


@dataclass(frozen=True)
class Price:
    """Seconds of each byte, and those that no byte changes."""

    byte_s: float = 0.0
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Of `size` bytes; nothing takes no time."""
        return self.latency_s + size * self.byte_s if size > 0 else 0.0


FREE = Price()


def ring(ranks: int) -> tuple[int, float]:
    """Of a ring all-reduce: messages that follow each other, and bytes through each node's NIC for each byte that is reduced."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


def all_reduce(ranks: int, fabric: Fabric, sharers: float = 1) -> Price:
    """Of the bytes in each rank; the group is on several nodes."""
    messages, share = ring(ranks)
    return Price(share * 8 * sharers / fabric.rate_bps, messages * fabric.latency_s)


def message(fabric: Fabric, sharers: float = 1, messages: int = 1) -> Price:
    """Of bytes that leave a rank in `messages` parts one after the other (activations; K and V around a context ring; an all-to-all)."""
    return Price(8 * sharers / fabric.rate_bps, messages * fabric.latency_s)


@dataclass(frozen=True)
class TwoLevels:
    """An all-reduce inside clusters and across them; inside: the slowest cluster's."""

    inside: Price
    across: Price
    chunk_bytes: float

    @property
    def pipelined(self) -> Price:
        """Of many chunks: the slower level all the time. Never more than seconds()."""
        return Price(max(self.inside.byte_s, self.across.byte_s), self.inside.latency_s + self.across.latency_s)

    def seconds(self, size: float) -> float:
        """The same, and the first chunk on the faster level."""
        return self.pipelined.seconds(size) + min(size, self.chunk_bytes) * min(self.inside.byte_s, self.across.byte_s)


def two_levels(inside: Price, across: Fabric, clusters: Sequence[int], processes: int, share: float = 1.0) -> TwoLevels:
    """clusters: ranks of the group in each. processes: ranks of a node that send across at once. share: what compression leaves of the
    bytes that cross. Every owner of a block exchanges its part with its peers of the other clusters directly, twice."""
    count, smallest = len(clusters), min(clusters)
    crossing = 2 * (count - 1) / count / smallest
    return TwoLevels(inside, Price(crossing * 8 * share * processes / across.rate_bps, 2 * across.latency_s), CHUNK_SHARE_BYTES * smallest)


def inside_cluster(ranks: int, here: int, fabric: Fabric, sharers: float = 1, direct: bool = False) -> Price:
    """Reduce-scatter and all-gather among a cluster's `ranks`, `here` of them on each node.

    A ring (NCCL); with `direct` every rank sends each other its block (runtime/reduce/direct.py, over gloo), so a node's ranks send
    to all others' nodes.
    """
    if not direct:
        return all_reduce(ranks, fabric, sharers)
    return Price(2 * here * (ranks - here) / ranks * 8 * sharers / fabric.rate_bps, 2 * fabric.latency_s)


def two_level_seconds(
    size: float, clusters: Sequence[int], inside: Fabric, across: Fabric, here: int = 1, sharers: int = 1, share: float = 1.0, direct: bool = True
) -> tuple[float, float]:
    """Seconds of an all-reduce of `size` bytes: (flat ring on `across`, two levels).

    clusters: ranks of the group in each; here: ranks of the group on a node; sharers: such groups that share the node's NICs; inside: the
    slowest cluster's fabric; share: what compression leaves of the bytes that cross; direct: see inside_cluster.
    """
    flat = all_reduce(sum(clusters), across, sharers).seconds(size)
    slowest = inside_cluster(max(clusters), here, inside, sharers, direct)
    return flat, two_levels(slowest, across, clusters, here * sharers, share).seconds(size)
