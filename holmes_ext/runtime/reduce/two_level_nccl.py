"""The two-level all-reduce of two_level.py with NCCL's own collectives, for clusters of equal size.

    chunk c, on a CUDA stream of its own:   reduce-scatter inside -> all-reduce of the shard across -> all-gather inside
    compressed:                         encode the shard -> all-gather across -> decode, add up in cluster order

NCCL orders what is launched on one communicator, and calls return at once; so the chunks follow each other through the
communicators without threads. (Not run on GPUs so far: the order of the steps is tested over gloo, without streams.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.network import CHUNK_SHARE_BYTES
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.compress import Residuals, codec, residual_of

STREAMS = 4


class Done:
    """A reduction whose end the current CUDA stream waits for (on the CPU it has ended already)."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]):
        self._streams = streams

    def wait(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future


class TwoLevelCollectives:
    """work = all_reduce(flat tensor) starts a sum over all ranks of `clusters`, in place; work.wait() ends it.

    clusters: as many global ranks in each, the same lists on every rank. chunk_bytes, compress: as of TwoLevelAllReduce
    (compressed, each cluster's shard goes to all others whole: more bytes for three clusters or more). Construction is
    collective: a group for each cluster, one for each set of ranks in the same place, and one for what is left over.
    """

    def __init__(self, clusters: Sequence[Sequence[int]], *, chunk_bytes: int | None = None, compress: str = "off"):
        sizes = {len(members) for members in clusters}
        if len(sizes) != 1 or len(clusters) < 2:
            raise HolmesError(f"TwoLevelCollectives: clusters {clusters} must be two or more lists of the same length")
        rank = dist.get_rank()
        inside = sorted(next(members for members in clusters if rank in members))
        across = sorted(sorted(members)[inside.index(rank)] for members in clusters)
        self.chunk_bytes = chunk_bytes or CHUNK_SHARE_BYTES * len(inside)
        self._members, self._clusters = len(inside), len(across)
        self._codec, self._residuals = codec(compress), Residuals()
        everyone = sorted(other for members in clusters for other in members)
        self._inside, self._across, self._everyone = (
            members_group(ranks, f"two-level {name}")
            for name, ranks in (("inside", inside), ("across", across), ("rest", everyone))
        )
        self._streams = [torch.cuda.Stream() for _ in range(STREAMS)] if torch.cuda.is_available() else []

    def __call__(self, flat: torch.Tensor) -> Done:
        assert flat.dim() == 1 and flat.is_contiguous()
        even = flat.numel() // self._members * self._members
        length = max(1, self.chunk_bytes // flat.element_size() // self._members) * self._members
        streams = self._streams if flat.is_cuda else []
        residuals = self._residuals.of(flat) if self._codec.feedback else None
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for number, chunk in enumerate(flat[:even].split(length)):
            with torch.cuda.stream(streams[number % len(streams)]) if streams else nullcontext():
                self._sum(chunk, residuals)
        if even < flat.numel():  # fewer elements than ranks of a cluster
            with torch.cuda.stream(streams[0]) if streams else nullcontext():
                dist.all_reduce(flat[even:], group=self._everyone)
        return Done(streams)

    def close(self) -> None:
        """Nothing runs by itself here (as TwoLevelAllReduce's threads do)."""

    def _sum(self, chunk: torch.Tensor, residuals: dict | None) -> None:
        shard: Any = torch.empty(chunk.numel() // self._members, dtype=chunk.dtype, device=chunk.device)
        dist.reduce_scatter_tensor(shard, chunk, group=self._inside)
        if self._codec.applies(shard.dtype):
            self._sum_compressed(shard, residual_of(residuals, (0, int(chunk.storage_offset())), shard))
        else:
            dist.all_reduce(shard, group=self._across)
        dist.all_gather_into_tensor(chunk, shard, group=self._inside)

    def _sum_compressed(self, shard: torch.Tensor, residual: torch.Tensor | None) -> None:
        wire = self._codec.encode(shard, residual)
        wires = torch.empty(self._clusters * wire.numel(), dtype=wire.dtype, device=wire.device)
        dist.all_gather_into_tensor(wires, wire, group=self._across)
        first, *others = (self._codec.decode(one, shard) for one in wires.split(wire.numel()))
        shard.copy_(first)
        for other in others:
            shard.add_(other)
