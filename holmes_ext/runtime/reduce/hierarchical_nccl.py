"""Hierarchical all-reduce with NCCL collectives, for clusters with equal numbers of ranks.

A tensor is cut into chunks. Each chunk passes through three steps, each with a CUDA stream and a communicator
of its own:

    1  scatter inside   reduce-scatter among the ranks of a cluster, on the fabric of the cluster
    2  sum across       all-reduce of this rank's shard among the ranks with the same position in all
                        clusters, on Ethernet
    3  gather inside    all-gather of the shards among the ranks of a cluster

    stream 1   [scatter 1][scatter 2][scatter 3]
    stream 2              [across 1  ][across 2  ][across 3]
    stream 3                          [gather 1]  [gather 2] ...      (numbers of chunks)

An event after each step lets the stream of the next step wait for it. If step 2 is compressed, it encodes the
shard, all-gathers the encoded shards of all clusters, and adds the decoded shards in the order of clusters.

Steps 1 and 3 need two communicators, although they connect the same ranks: a communicator works in the order
of its launches, whatever their streams. On a single communicator, scatter 2 would run after gather 1. Gather
1 waits for across 1, so no two steps would ever overlap.

Invariant: all ranks launch scatter, across and gather of a chunk before those of the next chunk, and tensors
in the same order. So the launches of each communicator have the same order on all its ranks.

No rank waits for ever: each launch waits only for launches before it in that common order, so there is no
cycle between the communicators.

A shard is a view of its chunk (NCCL's in-place form), so no memory is allocated on a stream and used on
another. The exception is the last chunk: if its elements are no multiple of the ranks of a cluster, a padded
copy of it is summed.

The order of launches and the overlap were tested with recorded launches
(tests/runtime/reduce/test_hierarchical_nccl.py), on emulated GPUs over NCCL's own host code, and on an H100.
With a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) the events hold up the kernels of the backward
pass: nothing overlaps, but all sums are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import chunk_bytes as planned_chunk_bytes
from holmes_ext.plan.buckets import chunks_of
from holmes_ext.runtime.compress import Residuals, codec, residual_of
from holmes_ext.runtime.groups.members import members_group

if TYPE_CHECKING:
    from holmes_ext.runtime.compress import ResidualMap
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket

_FEWEST_CLUSTERS = 2


class _Streams(NamedTuple):
    """CUDA streams of the steps of a hierarchical all-reduce; None for tensors on the CPU."""

    scatter: torch.cuda.Stream | None  # of the reduce-scatter inside each cluster
    across: torch.cuda.Stream | None  # of the all-reduce between clusters
    gather: torch.cuda.Stream | None  # of the all-gather inside each cluster


_NO_STREAMS = _Streams(scatter=None, across=None, gather=None)


class CollectivesWork:
    """Handle of a sum that runs on CUDA streams, similar to the Work of torch.distributed."""

    def __init__(self, event: torch.cuda.Event | None, after: Callable[[], Any] | None):
        """Create the handle of a sum that runs on CUDA streams.

        Args:
            event: Recorded after the last step; None for tensors on the CPU, whose sum has ended.
            after: Function that the first wait() calls on the waiting stream; None for no function.
        """
        self._event = event
        self._after = after

    def wait(self) -> None:
        """Let the current CUDA stream wait for the sum."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._after is not None:
            self._after()
            self._after = None

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that is completed already, although the GPU may still compute the sum.

        It exists so that callers can treat this handle like a Work. Only wait() orders a CUDA stream after
        the sum.
        """
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class HierarchicalCollectives:
    """Hierarchical all-reduce over several clusters by NCCL collectives; implements Reduction."""

    def __init__(
        self,
        clusters: Sequence[Sequence[int]],
        *,
        chunk_bytes: int | None = None,
        compress: str = "off",
        purpose: str = "hierarchical",
    ):
        """Set up a hierarchical all-reduce over NCCL: make its process groups.

        All ranks of all clusters must do so.

        Args:
            clusters: Global ranks of each cluster, equal on all ranks; two clusters or more, of equal size.
            chunk_bytes: Size of a chunk; None for the plan's formula.
            compress: Compression between clusters: "off", "bf16" or "int8". A compressed shard is sent whole
                to each other cluster. For three or more clusters this takes more bytes than a ring.
            purpose: Part of the process groups' names.

        Raises:
            HolmesError: the clusters differ in size, or there are fewer than two.
        """
        sizes = {len(members) for members in clusters}
        if len(sizes) != 1 or len(clusters) < _FEWEST_CLUSTERS:
            raise HolmesError(
                f"HierarchicalCollectives: clusters {clusters} must be two or more lists of the same length"
            )
        rank = dist.get_rank()
        own_cluster = next(members for members in clusters if rank in members)
        cluster_ranks = sorted(own_cluster)
        #: Index of this rank in its cluster, and of its shard in a chunk.
        self._index_in_cluster = cluster_ranks.index(rank)
        #: Tensors whose elements are a multiple of this need no padding.
        self.multiple = len(cluster_ranks)

        # The ranks with this index in all clusters: a rank of each.
        ranks_across = sorted(sorted(members)[self._index_in_cluster] for members in clusters)
        self.chunk_bytes = chunk_bytes or planned_chunk_bytes(len(cluster_ranks), direct=False)
        self._cluster_count = len(ranks_across)
        self._codec = codec(compress)
        self._residuals = Residuals()
        self._scatter_group = members_group(cluster_ranks, f"{purpose} inside")
        self._across_group = members_group(ranks_across, f"{purpose} across")
        self._gather_group = members_group(cluster_ranks, f"{purpose} gather")
        self._streams = _NO_STREAMS
        if torch.cuda.is_available():
            self._streams = _Streams(
                scatter=torch.cuda.Stream(),
                across=torch.cuda.Stream(),
                gather=torch.cuda.Stream(),
            )

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> CollectivesWork:
        """Start the sum of a tensor over all ranks, in place; see Reduction.all_reduce.

        Args:
            flat: One-dimensional and contiguous.
            bucket: The bucket whose buffer `flat` is, or None. With a compression that has error
                feedback, it identifies the rounding errors of earlier calls (if None: `flat`).
        """
        assert flat.dim() == 1
        assert flat.is_contiguous()
        # Each step of the sum has a CUDA stream: reduce-scatter inside the cluster (scatter), sum
        # over the clusters (across), all-gather inside the cluster (gather).
        streams = self._streams if flat.is_cuda else _NO_STREAMS
        residuals = self._residuals.of(bucket or flat) if self._codec.feedback else None
        *full_chunks, last_chunk = self._chunks(flat)

        # A reduce-scatter gives each rank of a cluster an equal share of the chunk. So the elements
        # of a chunk must be a multiple of the ranks of a cluster (`multiple`). The last chunk may
        # not be, and is then copied and padded with zeros.
        padding = -last_chunk.numel() % self.multiple
        padded = torch.nn.functional.pad(last_chunk, (0, padding)) if padding else last_chunk
        if streams.scatter is not None:
            streams.scatter.wait_stream(torch.cuda.current_stream())
        for step_stream in streams:  # scatter, across, gather; None for tensors on the CPU
            if step_stream is not None and padding:
                # The allocator must not reuse the memory of `padded` before this stream has used
                # it: the returned work holds `padded`, but the caller may drop it earlier.
                padded.record_stream(step_stream)
        for number, chunk in enumerate([*full_chunks, padded]):
            self._sum_chunk(chunk, number, residuals, streams)

        # The gather is the last step of the last chunk, so the event marks the end of the whole sum.
        event = streams.gather.record_event() if streams.gather is not None else None

        def remove_padding() -> None:
            last_chunk.copy_(padded[: last_chunk.numel()])
            if flat.is_cuda:
                # The copy above runs on the stream that waits for the work. `padded` is dropped
                # when this function is, perhaps before the copy has run.
                padded.record_stream(torch.cuda.current_stream())

        return CollectivesWork(event, after=remove_padding if padding else None)

    def close(self) -> None:
        """Do nothing: no thread runs here, unlike in HierarchicalAllReduce."""

    def _chunks(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a flat tensor into chunks; all but the last have a multiple of `self.multiple` elements."""
        if flat.numel() == 0:
            return [flat]
        chunk_count = chunks_of(flat.nbytes, self.chunk_bytes)
        shard_numel = ceil(flat.numel() / chunk_count / self.multiple)
        return flat.split(shard_numel * self.multiple)

    def _sum_chunk(
        self,
        chunk: torch.Tensor,
        number: int,
        residuals: ResidualMap | None,
        streams: _Streams,
    ) -> None:
        """Launch the three steps of a chunk: reduce-scatter, sum over clusters, all-gather.

        The shard is this rank's part of the chunk, a view. So all steps work in place. Each step
        has a CUDA stream that waits for the step before (`after`). The first step needs no wait:
        all_reduce() has made its stream wait for the program's stream.

        Args:
            chunk: Flat; its elements are a multiple of the ranks of a cluster.
            number: Number of the chunk in its tensor.
            residuals: Rounding errors of the tensor; None without error feedback.
            streams: Streams of the steps; _NO_STREAMS on the CPU.
        """
        shard = chunk.view(self.multiple, -1)[self._index_in_cluster]
        with _on_stream(streams.scatter):
            dist.reduce_scatter_tensor(shard, chunk, group=self._scatter_group)
        with _on_stream(streams.across, after=streams.scatter):
            if self._codec.applies(shard.dtype):
                # Rounding errors are kept by (step, chunk). Step is always 0 here: only the sum
                # over the clusters is compressed.
                residual = residual_of(residuals, (0, number), shard)
                self._sum_across_compressed(shard, residual)
            else:
                dist.all_reduce(shard, group=self._across_group)
        with _on_stream(streams.gather, after=streams.across):
            dist.all_gather_into_tensor(chunk, shard, group=self._gather_group)

    def _sum_across_compressed(self, shard: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Sum a shard over all clusters, in place: all-gather the encoded shards, decode and add them.

        Args:
            shard: This cluster's sum of the shard.
            residual: Rounding errors of earlier sums of the shard; None without error feedback.
        """
        encoded = self._codec.encode(shard, residual)
        gathered = encoded.new_empty(self._cluster_count * encoded.numel())
        dist.all_gather_into_tensor(gathered, encoded, group=self._across_group)
        first_cluster, *other_clusters = gathered.split(encoded.numel())
        # Every rank adds in the order of the clusters, so all get the same bits.
        # decode() returns a new tensor with the length and type of `like`, whose elements it does not use.
        shard.copy_(self._codec.decode(first_cluster, like=shard))
        for other_cluster in other_clusters:
            shard.add_(self._codec.decode(other_cluster, like=shard))


@contextmanager
def _on_stream(
    stream: torch.cuda.Stream | None, after: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Launch the operations inside the `with` block on a CUDA stream.

    Args:
        stream: The stream; None to launch on the current stream or on the CPU.
        after: Another stream, whose launches so far must end before the operations start; None for no wait.
    """
    if stream is None:
        yield
        return
    if after is not None:
        stream.wait_event(after.record_event())
    with torch.cuda.stream(stream):
        yield
