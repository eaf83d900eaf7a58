"""Which gradients travel together: buckets, and how large they should be.

A bucket is one flat buffer and one reduction. Small buckets start early and pay the latency often; large ones start
late, and the last one is exposed. The size that keeps latency below a given share of the time follows from the fabric.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: torch DistributedDataParallel's bucket_cap_mb; used where nothing is known of the fabric.
DEFAULT_BYTES = 25 * 2**20
#: Below this gloo spends most of its time in the CPU (measured, 12 MiB on 4 ranks: 42 ms in 256 KiB buckets, 27 in 1 MiB, 22 in one).
SMALLEST_BYTES = 2**20
LARGEST_BYTES = 256 * 2**20
LATENCY_SHARE = 0.1


@dataclass(frozen=True)
class Item:
    """One gradient to be reduced: its parameter's name, its number of elements, bytes of an element on the wire, and a key
    (dtype, device) that all items of a bucket share."""

    name: str
    numel: int
    itemsize: int
    key: Any

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


def bucket_bytes_for(latency_s: float, rate_bps: float, ranks: int, share: float = LATENCY_SHARE) -> int:
    """Bytes of a bucket, so that latency is at most `share` of its all-reduce on `ranks` ranks.

    A ring all-reduce of B bytes takes 2 (n-1) steps of latency + B / (n rate) each (Thakur, Rabenseifner and Gropp 2005,
    section 4.4), so latency / (latency + B / (n rate)) <= share gives B >= n rate latency (1 - share) / share. Held between 1 MiB
    and 256 MiB. latency_s in seconds, rate_bps in bits/s of one node.
    """
    assert 0 < share < 1 and latency_s >= 0 and rate_bps > 0 and ranks >= 1
    wanted = ranks * (rate_bps / 8) * latency_s * (1 - share) / share
    return int(min(max(wanted, SMALLEST_BYTES), LARGEST_BYTES))


def fill_buckets(items: Sequence[Item], order: Sequence[int], limit_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `items`, in `order`, cut into buckets of at most `limit_bytes`; a larger item gets a bucket of its own.

    Items of different keys never share a bucket. A bucket takes the place of its last item, so that buckets stand in the
    order in which they become complete.
    """
    done: list[tuple[int, ...]] = []
    open_: dict[Any, list[int]] = {}
    for index in order:
        item = items[index]
        bucket = open_.setdefault(item.key, [])
        if bucket and sum(items[i].bytes for i in bucket) + item.bytes > limit_bytes:
            done.append(tuple(bucket))
            bucket = open_[item.key] = []
        bucket.append(index)
    position = {index: place for place, index in enumerate(order)}
    done += [tuple(bucket) for bucket in open_.values() if bucket]
    return tuple(sorted(done, key=lambda bucket: position[bucket[-1]]))


def layout_digest(items: Sequence[Item], limit_bytes: int) -> int:
    """A 63-bit number that differs where the items, their order or the bucket size differ."""
    content = [[item.name, item.numel, item.itemsize, str(item.key)] for item in items]
    text = json.dumps([content, limit_bytes])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
