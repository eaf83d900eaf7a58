"""What networks take: a message, a ring all-reduce, an all-to-all, two levels. Seconds from bytes, a fabric's rate and
its latency.

Every time is linear in the bytes (alpha-beta model: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009), so
it is a Price: latency_s + size x byte_s. Groups that share a node's NICs share their rate: `sharers`.

    ring of n    passes every node once, each way: 2 (n - 1) / n of the bytes through its NIC, in 2 (n - 1) messages
                 that follow each other
    two levels   inside every cluster, across, inside: chunks follow each other, so the slower level is always busy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_ext.cluster.site import Fabric

#: Bytes of a chunk of a two-level all-reduce for each rank of the smallest cluster: what its Ethernet NIC carries at a
#: time.
CHUNK_SHARE_BYTES = 512 * 2**10


@dataclass(frozen=True)
class Price:
    """Seconds of each byte, and those that no byte changes."""

    byte_s: float = 0.0
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Of `size` bytes; nothing takes no time."""
        return self.latency_s + size * self.byte_s if size > 0 else 0.0

    def scaled(self, factor: float) -> Price:
        return Price(factor * self.byte_s, factor * self.latency_s)


FREE = Price()


def ring(ranks: int) -> tuple[int, float]:
    """Of a ring all-reduce: messages that follow each other, and bytes through each node's NIC for each byte that is
    reduced."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


def all_reduce(ranks: int, fabric: Fabric, sharers: float = 1) -> Price:
    """Of the bytes in each rank; the group is on several nodes."""
    messages, share = ring(ranks)
    return Price(share * 8 * sharers / fabric.rate_bps, messages * fabric.latency_s)


def message(fabric: Fabric, sharers: float = 1, messages: int = 1) -> Price:
    """Of bytes that leave a rank in `messages` parts one after the other (activations; K and V around a context ring;
    an all-to-all)."""
    return Price(8 * sharers / fabric.rate_bps, messages * fabric.latency_s)


def inside_cluster(ranks: int, here: int, direct: bool) -> tuple[int, float]:
    """Of a reduce-scatter or an all-gather among a cluster's `ranks`, `here` of them on each node: messages that follow
    each other, and bytes through a node's NIC for each byte. A ring (NCCL); with `direct` every rank sends each other
    its block (runtime/reduce/direct.py, over gloo), so a node's ranks send to all others' nodes."""
    messages, share = ring(ranks)
    return (1, here * (ranks - here) / ranks) if direct else (messages // 2, share / 2)


def across_clusters(clusters: Sequence[int]) -> float:
    """Bytes that an owner of a block sends to its peers of the other clusters in such a step, for each byte; clusters:
    ranks of each."""
    return (len(clusters) - 1) / len(clusters) / min(clusters)


@dataclass(frozen=True)
class TwoLevels:
    """An all-reduce inside clusters and across them, each the price of its two steps; inside: of the slowest cluster.
    """

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
    """clusters: ranks of the group in each. processes: ranks of a node that send across at once. share: what
    compression leaves of the bytes that cross."""
    bits = 2 * across_clusters(clusters) * 8 * share * processes
    chunk_bytes = CHUNK_SHARE_BYTES * min(clusters)
    return TwoLevels(inside, Price(bits / across.rate_bps, 2 * across.latency_s), chunk_bytes)


def two_level_seconds(
    size: float, clusters: Sequence[int], inside: Fabric, across: Fabric, here: int = 1, sharers: int = 1,
    share: float = 1.0, direct: bool = True,
) -> tuple[float, float]:
    """Seconds of an all-reduce of `size` bytes: (flat ring on `across`, two levels). clusters: ranks of the group in
    each; here: ranks of the group on a node; sharers: such groups that share the node's NICs; inside: the slowest
    cluster's fabric; share: what compression leaves of the bytes that cross; direct: see inside_cluster."""
    flat = all_reduce(sum(clusters), across, sharers).seconds(size)
    messages, volume = inside_cluster(max(clusters), here, direct)
    slowest = Price(2 * volume * 8 * sharers / inside.rate_bps, 2 * messages * inside.latency_s)
    return flat, two_levels(slowest, across, clusters, here * sharers, share).seconds(size)
