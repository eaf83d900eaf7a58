"""Buckets of gradients, grouped by the layer after which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holmes_ext.plan.buckets import cut


class ChunkLayer(NamedTuple):
    """A layer of a stage, with its chunk (of an interleaved schedule)."""

    chunk: int
    layer: int


@dataclass(frozen=True)
class Gradient:
    """Gradient of a parameter: its layer, its size, and when in the backward pass it is final."""

    chunk_layer: ChunkLayer
    #: Bytes.
    size: float
    #: It is not final before the whole backward pass has ended, and the tied weight is summed.
    late: bool = False


@dataclass(frozen=True)
class BucketGroup:
    """Buckets of gradients that are sent together; bucket_groups() makes them."""

    #: Bytes of each bucket.
    sizes: tuple[float, ...]
    #: Layers with gradients in these buckets.
    chunk_layers: tuple[ChunkLayer, ...]
    #: Layer after whose backward pass the buckets are sent; None for after the whole pass.
    after: ChunkLayer | None


def bucket_groups(
    gradients: Sequence[Gradient], limit_bytes: float, exceed: bool, first_bytes: float = 0
) -> list[BucketGroup]:
    """Divide gradients into buckets, grouped by the layer after whose backward pass they are sent.

    A bucket is sent when its last gradient is final. A late gradient (of a tied weight) is final
    only after the whole backward pass. Late gradients have buckets of their own, sent after the
    pass.

    Args:
        gradients: In the order of becoming final.
        limit_bytes: Size of a bucket.
        exceed: True if a bucket also takes the gradient that exceeds its size, and then ends. False
            if that gradient begins the next bucket.
        first_bytes: Size of the first bucket; 0 for the same as the others.
    """
    # Layer after which they are sent (None: after the whole pass) -> buckets
    buckets_of: dict[ChunkLayer | None, list[list[Gradient]]] = {}
    for late in (False, True):
        candidates = [gradient for gradient in gradients if gradient.late == late]
        sizes = [gradient.size for gradient in candidates]
        # cut(): for each bucket the indices of its gradients
        for indices in cut(sizes, limit_bytes, exceed=exceed, first_bytes=first_bytes):
            bucket = [candidates[index] for index in indices]
            # A bucket is full when its last gradient is final.
            after = None if late else bucket[-1].chunk_layer
            buckets_of.setdefault(after, []).append(bucket)
    result = []
    for after, buckets in buckets_of.items():
        sizes = [sum(gradient.size for gradient in bucket) for bucket in buckets]
        # Each layer once, in order.
        chunk_layers = dict.fromkeys(
            gradient.chunk_layer for bucket in buckets for gradient in bucket
        )
        result.append(BucketGroup(tuple(sizes), tuple(chunk_layers), after))
    return result
