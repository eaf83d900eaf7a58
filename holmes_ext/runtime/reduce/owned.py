"""Reduction of gradients for ZeRO 1: each rank gets the sums of the gradients whose optimizer state it keeps.

A span is a run of gradient elements with the same owner, the rank that needs their sum. Over gloo, the sum of
a span is formed along a chain of ranks that ends at its owner:

    span owned by rank 0   rank 1 --> rank 2 --> rank 3 --> rank 0   each rank adds its own values
    span owned by rank 1   rank 2 --> rank 3 --> rank 0 --> rank 1

Steps of a reduction, in the thread of each rank (_reduce_along_chains):

    1  post all receives from the rank before, chunk by chunk, in the order of the spans
    2  for each chunk: wait for its receive, add it, start to send the sum to the rank after
    3  wait for all sends

Invariant: all ranks reduce the same spans in the same order, and chunks between two ranks have the order of
the spans.

No rank waits for ever: the wait for a chunk of a span needs only the chunks before it, on this rank and on
the ranks earlier in the chain. The first rank of the chain waits for nothing.

Bytes: each rank sends every span once, so B bytes for a tensor of B bytes; a ring all-reduce over n ranks
sends 2 (n-1)/n B (Thakur et al. 2005). A reduce-scatter of equal blocks does not fit, because DeepSpeed cuts
its partitions by layers, so a bucket has one or two owners. gloo's own reduce() takes as long as an
all-reduce (measured with 4 ranks: reduce 0.41 s, all-reduce 0.40 s, these chains 0.27 s). NCCL's reduce()
forms such chains itself, so other backends use theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.runtime.backend import backend_of
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.steps import ThreadPipeline

if TYPE_CHECKING:
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket

#: Bytes that a rank adds and sends on at a time.
CHUNK_BYTES = 256 * 2**10
#: Spans of a tensor, in order: (number of elements, global rank that needs their sum).
Spans = Sequence[tuple[int, int]]


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge consecutive spans that have the same owner.

    A span is a run of gradient elements with the same owner, the rank that needs their sum.

    Args:
        spans: (number of elements, global rank of the owner) of each span.

    Returns:
        The merged spans, in the same form.
    """
    merged: list[tuple[int, int]] = []
    previous_owner = None
    for elements, owner in spans:
        if owner == previous_owner:
            previous_elements, _ = merged.pop()
            merged.append((previous_elements + elements, owner))
        else:
            merged.append((elements, owner))
        previous_owner = owner
    return merged


class _OwnedSpan(NamedTuple):
    """A span (run of elements) of a tensor, and the rank that gets its sum."""

    tensor: torch.Tensor
    owner: int  # global rank


class _ChunkInTransit(NamedTuple):
    """A chunk whose partial sum passes through this rank.

    The sum is formed along a chain of ranks: each receives it, adds its own values and sends it on.
    """

    chunk: torch.Tensor  # this rank's values
    receive: Any  # work of the receive from the rank before; None on the first rank of the chain
    arriving: torch.Tensor | None  # buffer of the receive; None on the first rank
    is_sent_on: bool  # False on the owner, where the chain ends


class ReduceToOwners:
    """Reduction that gives each rank the sums of its own spans of a tensor only; implements Reduction.

    A span is a run of gradient elements. Its owner is the only rank that needs their sum (ZeRO 1). All ranks
    of the group must start the same sums in the same order.
    """

    multiple = 1

    def __init__(self, group: dist.ProcessGroup, device_type: str = ""):
        """Prepare sums of gradients. Only a single rank, the owner, gets the sum of an element (ZeRO 1).

        All ranks of the group must make this object, since it may make a process group. The bucket
        of each sum lists the owner of each run of elements (bucket.spans). The backend decides:

            gloo      A sum passes along a chain of ranks that ends at the owner. A process group
                      and a thread are made for these sends and receives.
            others    torch's reduce() is called on `group`.

        Args:
            group: Process group of the ranks.
            device_type: Device of the tensors, "cpu" or "cuda"; "" for the group's default.
        """
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._group = group
        self._pipeline: ThreadPipeline | None = None
        if backend_of(group, device_type) == "gloo":
            self._group = members_group(self._ranks, "data_parallel owners", backend="gloo")
            self._pipeline = ThreadPipeline("owners", self._reduce_along_chains)

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Any:
        """Start the sums of a bucket; each rank gets those of its own spans (runs of elements).

        Args:
            flat: The buffer of the bucket.
            bucket: Its `spans` name the rank that gets the sum of each span of elements. On other ranks the
                span is undefined afterwards.
        """
        assert bucket is not None, "only a bucket knows which rank needs which part"
        return self.reduce(flat, bucket.spans)

    def reduce(self, flat: torch.Tensor, spans: Spans) -> Any:
        """Start the sums of a tensor's spans. Only the owner of a span gets the sum of its elements.

        A span is a run of elements. Its owner is the rank that needs their sum.

        Args:
            flat: One-dimensional and contiguous.
            spans: The spans in their order: (number of elements, global rank of the owner). They
                cover the tensor.

        Returns:
            A work with wait() and get_future().
        """
        # All ranks must start the same sums in the same order.
        tensors = flat.split([elements for elements, _ in spans])
        owned = [_OwnedSpan(tensor, owner) for tensor, (_, owner) in zip(tensors, spans)]
        if self._pipeline is not None:
            return self._pipeline.submit([owned])  # runs _reduce_along_chains() in a thread
        works = []
        for span in owned:
            works.append(dist.reduce(span.tensor, span.owner, group=self._group, async_op=True))
        return _Works(works)

    def close(self) -> None:
        """Finish the sums that reduce() has started, and end the thread that runs them (gloo only)."""
        if self._pipeline is not None:
            self._pipeline.close()

    def _reduce_along_chains(self, spans: list[_OwnedSpan]) -> None:
        """Sum each span (run of elements) along a chain of all ranks that ends at the span's owner.

        Each rank of a chain receives a partial sum from the rank before, adds its own values, and sends the
        sum to the rank after. The chains of all owners go around the same ring of ranks.

        Args:
            spans: Spans of a tensor, in the same order on all ranks.
        """
        count = len(self._ranks)
        own_index = self._ranks.index(self._rank)
        rank_before = self._ranks[own_index - 1]
        rank_after = self._ranks[(own_index + 1) % count]
        in_transit: list[_ChunkInTransit] = []

        # Post all receives first: no rank then waits for ever.
        for tensor, owner in spans:
            # Position of this rank in the chain: 0 for the first rank, count - 1 for the owner.
            position = (own_index - self._ranks.index(owner) - 1) % count
            for chunk in tensor.split(max(1, CHUNK_BYTES // tensor.element_size())):
                receive = None
                arriving = None
                if position > 0:
                    arriving = torch.empty_like(chunk)
                    receive = dist.irecv(arriving, src=rank_before, group=self._group)
                is_owner = position == count - 1
                in_transit.append(
                    _ChunkInTransit(chunk, receive, arriving, is_sent_on=not is_owner)
                )
        sends: list[Any] = []
        for chunk_sum in in_transit:
            if chunk_sum.arriving is not None:
                chunk_sum.receive.wait()
                chunk_sum.chunk.add_(chunk_sum.arriving)
            if chunk_sum.is_sent_on:
                sends.append(dist.isend(chunk_sum.chunk, dst=rank_after, group=self._group))
        for send in sends:
            send.wait()


class _Works:
    """Several reductions under way, handled together like a single Work."""

    def __init__(self, works: list[Any]):
        self._works = works

    def wait(self) -> None:
        """Wait for all reductions."""
        for work in self._works:
            work.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes when all reductions have ended."""
        return torch.futures.collect_all([work.get_future() for work in self._works])
