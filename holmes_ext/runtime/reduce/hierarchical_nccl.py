"""The hierarchical all-reduce of hierarchical.py with NCCL's own collectives, for clusters of equal size.

    stream in       [scatter 1][scatter 2][scatter 3]              reduce-scatter inside, on the fabric
    stream across              [across 1  ][across 2  ][across 3]  all-reduce of the shard, on Ethernet
    stream out                              [gather 1]  [gather 2] all-gather inside, its own communicator

A communicator works in the order of its launches, whatever the streams: with one for both steps inside,
scatter 2 would stand behind gather 1, which waits for across 1, and no step would ever run beside another. So
there are two inside and a stream for each step, and events join the steps of a chunk. All ranks launch
scatter, across, gather of one chunk after the other, of one reduction after the other: no communicator waits
for one that waits for it. A shard is a view of its chunk (NCCL's in-place form), so nothing is allocated on
one stream and used on another. What is left of the last chunk is padded.

    compressed:     encode the shard -> all-gather across -> decode, add up in cluster order, on the stream
                    across

(Run on emulated GPUs, over NCCL's own host code, and on an H100; order and overlap also with recorded
launches and a queue for each communicator and stream, tests/runtime/reduce/test_hierarchical_nccl.py.
Under one hardware queue, CUDA_DEVICE_MAX_CONNECTIONS=1, the events hold up the backward pass's kernels:
nothing overlaps, all sums are right.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import chunk_bytes as planned_chunk_bytes
from holmes_ext.plan.buckets import chunks_of
from holmes_ext.runtime.compress import Residuals, codec, residual_of
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.units import format_bytes

if TYPE_CHECKING:
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket


class Done:
    """Its end, for which the current CUDA stream waits; after: what is to be done there then."""

    def __init__(self, event: torch.cuda.Event | None, after: Callable[[], Any] | None):
        self._event, self._after = event, after

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._after is not None:
            self._after()
            self._after = None

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class HierarchicalCollectives:
    """Hierarchical all-reduce over all ranks of `clusters` by NCCL's collectives: a Reduction.

    clusters: as many global ranks in each, the same lists on every rank. chunk_bytes, compress: as of
    HierarchicalAllReduce (compressed, each cluster's shard goes to all others whole: more bytes for three
    clusters or more). Construction is collective: two groups for each cluster and one for each set of ranks
    in the same place. Tensors whose elements are a multiple of `multiple` need no padding.
    """

    def __init__(
        self,
        clusters: Sequence[Sequence[int]],
        *,
        chunk_bytes: int | None = None,
        compress: str = "off",
        purpose: str = "hierarchical",
    ):
        sizes = {len(members) for members in clusters}
        if len(sizes) != 1 or len(clusters) < 2:
            raise HolmesError(
                f"HierarchicalCollectives: clusters {clusters} must be two or more lists of the same length"
            )
        rank = dist.get_rank()
        inside = sorted(next(members for members in clusters if rank in members))
        self._place, self.multiple = inside.index(rank), len(inside)
        across = sorted(sorted(members)[self._place] for members in clusters)
        self.chunk_bytes = chunk_bytes or planned_chunk_bytes(len(inside), direct=False)
        self._clusters = len(across)
        self._codec, self._residuals = codec(compress), Residuals()
        self._scatters, self._across, self._gathers = (
            members_group(ranks, f"{purpose} {name}")
            for name, ranks in (("inside", inside), ("across", across), ("gather", inside))
        )
        cuda = torch.cuda.is_available()
        self._streams = [torch.cuda.Stream() for _ in range(3)] if cuda else []

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Done:
        """Start the sum of a tensor, as Reduction.all_reduce. Rounding errors are kept for each `bucket`."""
        assert flat.dim() == 1 and flat.is_contiguous()
        streams = self._streams if flat.is_cuda else []
        residuals = self._residuals.of(bucket or flat) if self._codec.feedback else None
        length = (
            ceil(flat.numel() / chunks_of(flat.nbytes, self.chunk_bytes) / self.multiple)
            * self.multiple
        )
        *chunks, last = flat.split(length) if flat.numel() else (flat,)
        rest = -last.numel() % self.multiple
        padded = torch.nn.functional.pad(last, (0, rest)) if rest else last
        if streams:
            streams[0].wait_stream(torch.cuda.current_stream())
        for stream in streams if rest else ():
            padded.record_stream(stream)  # whoever drops the work may be ahead of it
        for number, chunk in enumerate((*chunks, padded)):
            self._sum(chunk, number, residuals, streams)
        event = streams[-1].record_event() if streams else None

        def cut() -> None:
            last.copy_(padded[: last.numel()])
            if streams:
                padded.record_stream(torch.cuda.current_stream())

        return Done(event, cut if rest else None)

    def close(self) -> None:
        """Do nothing: no thread runs here, unlike in HierarchicalAllReduce."""

    def describe(self) -> str:
        chunk = format_bytes(self.chunk_bytes)
        return f"hierarchical all-reduce over {self._clusters} clusters, in chunks of {chunk}"

    def _sum(
        self, chunk: torch.Tensor, number: int, residuals: dict | None, streams: Sequence[Any]
    ) -> None:
        shard = chunk.view(self.multiple, -1)[self._place]

        def across() -> None:
            if self._codec.applies(shard.dtype):
                self._sum_compressed(shard, residual_of(residuals, (0, number), shard))
            else:
                dist.all_reduce(shard, group=self._across)

        steps = (
            lambda: dist.reduce_scatter_tensor(shard, chunk, group=self._scatters),
            across,
            lambda: dist.all_gather_into_tensor(chunk, shard, group=self._gathers),
        )
        for place, step in enumerate(steps):
            if streams and place:
                streams[place].wait_event(streams[place - 1].record_event())
            with torch.cuda.stream(streams[place]) if streams else nullcontext():
                step()

    def _sum_compressed(self, shard: torch.Tensor, residual: torch.Tensor | None) -> None:
        wire = self._codec.encode(shard, residual)
        wires = torch.empty(self._clusters * wire.numel(), dtype=wire.dtype, device=wire.device)
        dist.all_gather_into_tensor(wires, wire, group=self._across)
        first, *others = (self._codec.decode(part, shard) for part in wires.split(wire.numel()))
        shard.copy_(first)
        for other in others:
            shard.add_(other)
