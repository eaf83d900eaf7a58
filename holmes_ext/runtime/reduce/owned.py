"""Gradients of ZeRO 1 travel to the rank that keeps them, and nowhere else: half of an all-reduce's way.

    a span that rank 0 keeps       rank 1 --> rank 2 --> rank 3 --> rank 0   each adds its own, chunk by chunk
    the next, which rank 1 keeps   rank 2 --> rank 3 --> rank 0 --> rank 1

Of a span's B bytes every rank sends B once, in one direction of the ring; a ring all-reduce sends 2 (n-1)/n B
(Thakur et al. 2005). DeepSpeed cuts its partitions by layers, so a bucket has one owner or two, and a
reduce-scatter of equal blocks does not fit. gloo's own reduce() is as slow as an all-reduce (4 ranks: 0.41 s,
all-reduce 0.40 s, this chain 0.27 s). NCCL's reduce() is such a chain itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.backend import backend_of
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.steps import Steps

if TYPE_CHECKING:
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket

#: What a rank adds and sends on at a time.
CHUNK_BYTES = 256 * 2**10
#: (elements, the global rank that needs their sum), one after the other.
Spans = Sequence[tuple[int, int]]


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours with the same owner become one span."""
    merged: list[tuple[int, int]] = []
    for elements, owner in spans:
        if merged and merged[-1][1] == owner:
            elements += merged.pop()[0]
        merged.append((elements, owner))
    return merged


class ReduceToOwners:
    """Reduction by which each rank gets the sums of its own part of a tensor only.

    All ranks of `group` start the same sums in the same order; construction is collective. gloo's chains run
    in a thread (close() ends it), over their own group; other backends reduce().
    """

    multiple = 1

    def __init__(self, group: dist.ProcessGroup, device_type: str = ""):
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._group, self._steps = group, None
        if backend_of(group, device_type) == "gloo":
            self._group = members_group(self._ranks, "data_parallel owners", backend="gloo")
            self._steps = Steps("owners", self._chains)

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        """Start the sums of a bucket's parts, as Reduction.all_reduce.

        Args:
            flat: The buffer of the bucket.
            bucket: Its `spans` name the rank that gets the sum of each part. On other ranks the part is
                undefined afterwards.
        """
        assert bucket is not None, "only a bucket knows which rank needs which part"
        return self.reduce(flat, bucket.spans)

    def reduce(self, flat: torch.Tensor, spans: Spans) -> Any:
        """Start the sums of a tensor's parts.

        Args:
            flat: One-dimensional and contiguous.
            spans: The parts, one after the other: (elements, global rank that gets the sum).

        Returns:
            A work with wait() and get_future().
        """
        parts = list(
            zip(flat.split([elements for elements, _ in spans]), [owner for _, owner in spans])
        )
        if self._steps is not None:
            return self._steps([parts])
        return _Works(
            [dist.reduce(part, owner, group=self._group, async_op=True) for part, owner in parts]
        )

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def describe(self) -> str:
        return f"reduction over {len(self._ranks)} ranks, each part to the rank that owns it"

    def _chains(self, parts: list[tuple[torch.Tensor, int]]) -> None:
        """All receives are posted at once; ranks work on one span after the other."""
        count, me = len(self._ranks), self._ranks.index(self._rank)
        before, after = self._ranks[me - 1], self._ranks[(me + 1) % count]
        hops: list[tuple[torch.Tensor, Any, bool]] = []
        for part, owner in parts:
            # 0: begins the chain; count - 1: owns the span
            place = (me - self._ranks.index(owner) - 1) % count
            for chunk in part.split(max(1, CHUNK_BYTES // part.element_size())):
                arriving = torch.empty_like(chunk) if place > 0 else None
                receive = arriving is not None and (
                    dist.irecv(arriving, src=before, group=self._group),
                    arriving,
                )
                hops.append((chunk, receive, place < count - 1))
        sends: list[Any] = []
        for chunk, receive, goes_on in hops:
            if receive:
                receive[0].wait()
                chunk.add_(receive[1])
            if goes_on:
                sends.append(dist.isend(chunk, dst=after, group=self._group))
        for send in sends:
            send.wait()


class _Works:
    """Several reductions as one."""

    def __init__(self, works: list[Any]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def get_future(self) -> torch.futures.Future:
        return torch.futures.collect_all([work.get_future() for work in self._works])
