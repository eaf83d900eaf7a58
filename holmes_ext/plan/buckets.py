"""Sizes of gradient buckets and of chunks, and the division of gradients into buckets.

A bucket is one flat buffer and one reduction. Small buckets start early, but pay the latency often. With
large buckets, more of the reduction is exposed: nothing is left to compute while the last bucket is reduced.
A running job (runtime/reduce/) and the simulation use the same division.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric


#: With smaller buckets gloo spends most of its time on the CPU (measured on 4 ranks, 12 MiB of gradients:
#: 42 ms in buckets of 256 KiB, 27 ms in 1 MiB, 22 ms in a single one).
SMALLEST_BYTES = 2**20
#: A group with less than FEWEST x SMALLEST_BYTES is divided into this many buckets.
FEWEST = 8
LARGEST_BYTES = 256 * 2**20
LATENCY_SHARE = 0.1
#: Largest number of buckets on a GPU that have separate memory at the same time: filled, reduced (a
#: hierarchical all-reduce has three steps), stored. The reducer (runtime/reduce/) fills no further bucket
#: before the first of these is stored.
BUCKETS_IN_FLIGHT = 4


def bucket_bytes(
    fabric: Fabric, ranks: int, total_bytes: float, share: float = LATENCY_SHARE
) -> int:
    """Return the size of a bucket for which latency is at most `share` of an all-reduce.

    A ring of n ranks takes 2 (n - 1) steps of latency + B / (n rate) each (Thakur et al. 2005, section
    4.4). So

        B >= n rate latency (1 - share) / share

    The result is at least 1 MiB (or an eighth of total_bytes, if that is less) and at most 256 MiB.

    Args:
        fabric: Network of the group.
        ranks: Number of ranks of the group.
        total_bytes: Bytes of all gradients.
        share: Largest part of the time that latency may take.
    """
    assert 0 < share < 1 and ranks >= 1
    bytes_per_s = fabric.rate_bps / 8
    # The formula above.
    wanted = ranks * bytes_per_s * fabric.latency_s * (1 - share) / share
    least = min(SMALLEST_BYTES, total_bytes / FEWEST)
    return int(min(max(wanted, least, 1), LARGEST_BYTES))


def buffer_bytes(gradient_bytes: float) -> float:
    """Return an upper bound on the memory of the buckets of a rank, in bytes.

    Gradients that are reduced without conversion need less memory: they become views of the buckets. A
    gradient larger than a bucket counts as LARGEST_BYTES.

    Args:
        gradient_bytes: Bytes of all gradients of the rank.
    """
    return min(gradient_bytes, BUCKETS_IN_FLIGHT * LARGEST_BYTES)


def cut(
    sizes: Sequence[float],
    limit_bytes: float,
    keys: Sequence[Hashable] = (),
    exceed: bool = False,
    first_bytes: float = 0,
) -> tuple[tuple[int, ...], ...]:
    """Divide gradients into buckets: the gradients of a bucket are reduced together.

    Args:
        sizes: Bytes of each gradient, in the order of becoming final.
        limit_bytes: Largest size of a bucket.
        keys: Key of each gradient (dtype, device); gradients with different keys never share a bucket.
        exceed: Whether a bucket ends with the gradient that reaches the limit, not before it (as
            megatron-core's _ParamAndGradBuffer and torch's compute_bucket_assignment_by_size do).
        first_bytes: Limit of the first bucket; 0: limit_bytes.

    Returns:
        Indices into `sizes` for each bucket. The bucket that is complete first comes first.
    """
    complete: list[tuple[int, ...]] = []
    open_buckets: dict[Hashable, list[int]] = {}  # key -> bucket that further gradients may join
    filled_bytes: dict[Hashable, float] = {}  # key -> bytes in its open bucket
    for index, size in enumerate(sizes):
        key = keys[index] if keys else None
        filled = filled_bytes.get(key, 0.0)
        limit = limit_bytes
        if first_bytes and not complete:
            limit = first_bytes
        is_full = filled >= limit if exceed else filled + size > limit
        if key in open_buckets and is_full:
            complete.append(tuple(open_buckets.pop(key)))
            filled = 0.0
        open_buckets.setdefault(key, []).append(index)
        filled_bytes[key] = filled + size
    buckets = [*complete, *map(tuple, open_buckets.values())]

    # A bucket is complete when its last gradient is final.
    return tuple(sorted(buckets, key=lambda bucket: bucket[-1]))


#: Bytes of a chunk for each rank of the smallest cluster: the bytes that its Ethernet NIC carries at a time.
CHUNK_SHARE_BYTES = 512 * 2**10


#: Smallest and largest chunk with NCCL: its collectives need some MiB to reach a network's rate, and with
#: larger chunks the pipeline fills later.
NCCL_CHUNK_BYTES = 4 * 2**20, 16 * 2**20


def chunk_bytes(ranks: int, direct: bool) -> int:
    """Return the size of a chunk of a hierarchical all-reduce, in bytes.

    The ranks of a cluster divide a chunk to send it to other clusters, so it grows with their
    number: each sends CHUNK_SHARE_BYTES at a time. For NCCL's collectives, the result also stays within
    NCCL_CHUNK_BYTES. gloo's messages are as large as the share of a rank, so they need no such limits.

    Args:
        ranks: Number of ranks of the group in the smallest cluster.
        direct: Whether the steps are gloo's direct exchanges; else they are NCCL's collectives.
    """
    size = CHUNK_SHARE_BYTES * ranks
    if direct:
        return size
    least, most = NCCL_CHUNK_BYTES
    return min(max(size, least), most)


def chunks_of(size: float, chunk_bytes: float) -> int:
    """Return the number of chunks of `size` bytes of gradients: size / chunk_bytes rounded down, at least 1.

    All chunks then have the same size, chunk_bytes or somewhat more. A separate chunk for the
    remainder would cost nearly as much as a whole chunk.
    """
    return max(1, int(size // chunk_bytes))
