"""Which gradients travel together: how large a bucket should be, and where a list of them is cut.

A bucket is one flat buffer and one reduction. Small ones start early and pay the latency often; the last of
large ones is what no overlap hides. The running job (runtime/reduce/) and the simulation cut alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric


#: Below this gloo spends most of its time in the CPU (measured, 12 MiB on 4 ranks: 42 ms in 256 KiB buckets,
#: 27 in 1 MiB, 22 in one); a group that reduces less than FEWEST of these is cut into so many parts.
SMALLEST_BYTES = 2**20
FEWEST = 8
LARGEST_BYTES = 256 * 2**20
LATENCY_SHARE = 0.1
#: Buckets on a GPU that have memory of their own at once (filled, reduced, on a hierarchical
#: all-reduce in three steps,
#: stored): the reducer fills no other before the first is stored.
BUCKETS_IN_FLIGHT = 4


def bucket_bytes(
    fabric: Fabric, ranks: int, total_bytes: float, share: float = LATENCY_SHARE
) -> int:
    """Bytes for which latency is at most `share` of an all-reduce among `ranks` ranks: a ring takes 2 (n-1)
    steps of latency + B / (n rate) (Thakur et al. 2005, section 4.4), so B >= n rate latency (1 - share) /
    share. At least 1 MiB (or an eighth of total_bytes, if that is less), at most 256 MiB."""
    assert 0 < share < 1 and ranks >= 1
    wanted = ranks * (fabric.rate_bps / 8) * fabric.latency_s * (1 - share) / share
    return int(min(max(wanted, min(SMALLEST_BYTES, total_bytes / FEWEST), 1), LARGEST_BYTES))


def buffer_bytes(gradient_bytes: float) -> float:
    """At most, of the buckets of a rank that reduces so many bytes. (Gradients that travel as they are need
    less: they become views. A larger gradient than the limit counts as LARGEST_BYTES.)"""
    return min(gradient_bytes, BUCKETS_IN_FLIGHT * LARGEST_BYTES)


def cut(
    sizes: Sequence[float],
    limit_bytes: float,
    keys: Sequence[Hashable] = (),
    exceed: bool = False,
    first_bytes: float = 0,
) -> tuple[tuple[int, ...], ...]:
    """Places in `sizes` (bytes, in the order in which gradients become final), bucket by bucket, the first
    complete one first. keys: of each gradient (dtype, device); different ones never share a bucket. A bucket
    holds at most limit_bytes (the first: first_bytes); with `exceed` it ends with the gradient that reaches
    them (megatron-core's _ParamAndGradBuffer, torch's compute_bucket_assignment_by_size)."""
    done: list[tuple[int, ...]] = []
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, float] = {}
    for place, size in enumerate(sizes):
        key = keys[place] if keys else None
        filled_bytes, limit = (
            filled.get(key, 0.0),
            limit_bytes if done else first_bytes or limit_bytes,
        )
        if key in open_ and (filled_bytes >= limit if exceed else filled_bytes + size > limit):
            done.append(tuple(open_.pop(key)))
            filled_bytes = 0.0
        open_.setdefault(key, []).append(place)
        filled[key] = filled_bytes + size
    return tuple(sorted([*done, *map(tuple, open_.values())], key=lambda bucket: bucket[-1]))


#: Bytes of a chunk for each rank of the smallest cluster: what its Ethernet NIC carries at a time.
CHUNK_SHARE_BYTES = 512 * 2**10


#: NCCL's collectives need some MiB to reach a network's rate, and more only fills the pipeline later.
NCCL_CHUNK_BYTES = 4 * 2**20, 16 * 2**20


def chunk_bytes(ranks: int, direct: bool) -> int:
    """Of a chunk; ranks: of the group in the smallest cluster."""
    size, (least, most) = CHUNK_SHARE_BYTES * ranks, NCCL_CHUNK_BYTES
    return size if direct else min(max(size, least), most)


def chunks_of(size: float, chunk_bytes: float) -> int:
    """Of a sum of `size` bytes, all alike: what is left beside whole ones costs nearly as much as one."""
    return max(1, int(size // chunk_bytes))
