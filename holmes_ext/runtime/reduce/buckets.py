"""One gradient of a bucket, and what all ranks of a group must agree on; where buckets are cut: plan/cost/buckets.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.plan.cost.buckets import cut

#: torch DistributedDataParallel's bucket_cap_mb; used where nothing is known of the fabric.
DEFAULT_BYTES = 25 * 2**20


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


def fill_buckets(items: Sequence[Item], order: Sequence[int], limit_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `items`, in `order`, cut as plan/cost/buckets.py says."""
    found = cut([items[index].bytes for index in order], limit_bytes, [items[index].key for index in order])
    return tuple(tuple(order[place] for place in bucket) for bucket in found)


def layout_digest(items: Sequence[Item], limit_bytes: int) -> int:
    """A 63-bit number that differs where the items, their order or the bucket size differ."""
    content = [[item.name, item.numel, item.itemsize, str(item.key)] for item in items]
    text = json.dumps([content, limit_bytes])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
