"""All-reduce for a group that straddles clusters: only sums of whole clusters cross the slow network.

    chunk 1   [1 scatter in][2 scatter across][3 gather across][4 gather in]
    chunk 2                 [1 scatter in    ][2 scatter across][3 ...           chunks follow each other like
    chunk 3                                   [1 scatter in    ][2 ...           micro-batches in a pipeline

    1  inside each cluster, on its fabric: rank k gets the cluster's sum of block k (reduce-scatter)
    2  across clusters, on Ethernet: the owners of the same elements reduce-scatter their sums; every node's NIC sends at once
    3  across: they all-gather the total                                   4  inside: all-gather the blocks

Of B bytes a cluster sends 2 (C-1)/C B across for C clusters, the least that any all-reduce can; a flat ring on Ethernet sends
2 (n-1)/n B from EVERY rank. This is the hierarchical all-reduce of Jia et al. 2018 (arXiv 1807.11205, section 3.2), with both outer
steps split into their halves.

Over gloo each step is one exchange: every rank sends each other rank its block directly, receives posted first, one group for each
direction (gloo's own reduce_scatter moves as many bytes as an all-reduce: measured 3 to 4 times slower than this exchange).
The order of additions is fixed by the rank order, and each element is added up on one rank: all ranks get the same bits.
Steps 2 and 3 may be compressed (compress.py), the steps inside never are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.network import CHUNK_SHARE_BYTES
from holmes_ext.runtime.reduce.compress import Residuals, codec
from holmes_ext.runtime.reduce.direct import DirectExchange
from holmes_ext.runtime.reduce.settle import under_way


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a chunk that one rank of every cluster owns after the step inside: `owners`, in cluster order."""

    start: int
    stop: int
    owners: tuple[int, ...]


def pieces(numel: int, clusters: Sequence[Sequence[int]]) -> list[Piece]:
    """A chunk of `numel` elements cut wherever the owner changes in some cluster; clusters may differ in size."""
    cuts = sorted({cut for members in clusters for cut in _cuts(numel, len(members))})
    result = []
    for start, stop in zip(cuts, cuts[1:]):
        owners = tuple(members[_owner(start, _cuts(numel, len(members)))] for members in clusters)
        result.append(Piece(start, stop, owners))
    return result


def _cuts(numel: int, parts: int) -> list[int]:
    return [numel * part // parts for part in range(parts + 1)]


def _owner(position: int, cuts: list[int]) -> int:
    return next(k for k in range(len(cuts) - 1) if cuts[k] <= position < cuts[k + 1])


class Reduction:
    """One all-reduce under way: wait() returns when the tensor holds the sum, and raises what went wrong."""

    def __init__(self, chunks: int, residuals: dict | None = None):
        self._left, self.error, self.residuals = chunks, None, residuals
        self._future: torch.futures.Future = torch.futures.Future()
        self._out = threading.Event()  # all chunks have come out of the threads, summed or not
        under_way(self)

    def wait(self) -> None:
        self._future.wait()

    def get_future(self) -> torch.futures.Future:
        return self._future

    def chunk_done(self) -> None:
        self._left -= 1
        if self._left == 0:
            if self.error is None:
                self._future.set_result(None)
            self._out.set()

    def settle(self, seconds: float) -> None:
        """Until no thread works on it any more, at most so long."""
        self._out.wait(seconds)

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self._future.set_exception(error)


class TwoLevelAllReduce:
    """reduction = all_reduce(flat tensor) starts a sum over all ranks of `clusters`, in place; reduction.wait() ends it.

    clusters: global ranks of each cluster, the same on every rank (two clusters or more). chunk_bytes: None takes 512 KiB for each
    rank of the smallest cluster. compress: of what crosses, "off", "bf16" or "int8" (with error feedback for tensors that are reduced
    again in later steps: the same tensor objects). Construction is collective: it makes four gloo groups, of this cluster on its
    fabric and of all clusters on Ethernet (where holmes is active it chooses the NICs; else GLOO_SOCKET_IFNAME does). Tensors:
    contiguous, on the CPU.
    """

    def __init__(self, clusters: Sequence[Sequence[int]], *, chunk_bytes: int | None = None, compress: str = "off"):
        self.clusters = [list(members) for members in clusters]
        everyone = sorted(rank for members in self.clusters for rank in members)
        self.rank = dist.get_rank()
        if len(self.clusters) < 2 or len(set(everyone)) != len(everyone) or self.rank not in everyone:
            raise HolmesError(
                f"TwoLevelAllReduce: clusters {self.clusters} must be two or more lists of different ranks, rank {self.rank} in one of them"
            )
        self.members = next(members for members in self.clusters if self.rank in members)
        self.chunk_bytes = chunk_bytes or CHUNK_SHARE_BYTES * min(len(members) for members in self.clusters)
        self._inside = DirectExchange(sorted(self.members))
        self._across = DirectExchange(everyone, codec(compress))
        self._residuals = Residuals()
        self._inboxes: list[queue.SimpleQueue] = []
        steps = (self._scatter_in, self._scatter_across, self._gather_across, self._gather_in)
        self._start(steps)

    def __call__(self, flat: torch.Tensor) -> Reduction:
        assert flat.dim() == 1 and flat.is_contiguous() and flat.device.type == "cpu"
        chunks = flat.split(max(1, self.chunk_bytes // flat.element_size()))
        reduction = Reduction(len(chunks), self._residuals.of(flat) if self._across.feedback else None)
        for chunk in chunks:
            self._inboxes[0].put((reduction, chunk))
        return reduction

    @property
    def bytes_across(self) -> int:
        """What this rank has sent to other clusters so far, without headers."""
        return self._across.bytes_sent

    def close(self) -> None:
        """End the threads; what is under way is finished first."""
        self._inboxes[0].put(None)
        for thread in self._threads:
            thread.join()

    # The steps, each in a thread of its own: gloo's calls block, and release the GIL

    def _start(self, steps: Sequence[Callable[[torch.Tensor, dict | None], None]]) -> None:
        self._inboxes = [queue.SimpleQueue() for _ in steps]
        self._threads = []
        for step, inbox, outbox in zip(steps, self._inboxes, [*self._inboxes[1:], None]):
            thread = threading.Thread(target=serve, args=(step, inbox, outbox), name=f"holmes{step.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _scatter_in(self, chunk: torch.Tensor, _: dict | None) -> None:
        blocks = self._blocks(chunk)
        self._inside.reduce_scatter([(blocks, self.members)], tag=1)

    def _scatter_across(self, chunk: torch.Tensor, residuals: dict | None) -> None:
        self._across.reduce_scatter(self._mine(chunk), 2, residuals)

    def _gather_across(self, chunk: torch.Tensor, residuals: dict | None) -> None:
        self._across.all_gather(self._mine(chunk), 3, residuals)

    def _gather_in(self, chunk: torch.Tensor, _: dict | None) -> None:
        self._inside.all_gather([(self._blocks(chunk), self.members)], tag=4)

    def _blocks(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        cuts = _cuts(chunk.numel(), len(self.members))
        return [chunk[start:stop] for start, stop in zip(cuts, cuts[1:])]

    def _mine(self, chunk: torch.Tensor) -> list[tuple[list[torch.Tensor], Sequence[int]]]:
        """The pieces that this rank owns, each cut into one part for each of its owners."""
        owned = [piece for piece in pieces(chunk.numel(), self.clusters) if self.rank in piece.owners]
        result = []
        for piece in owned:
            cuts = [piece.start + cut for cut in _cuts(piece.stop - piece.start, len(piece.owners))]
            result.append(([chunk[start:stop] for start, stop in zip(cuts, cuts[1:])], piece.owners))
        return result


def serve(step: Callable, inbox: queue.SimpleQueue, outbox: queue.SimpleQueue | None) -> None:
    """One step's thread: chunks in, the step, chunks on. After an error the chunks of a reduction pass through untouched."""
    broken: Exception | None = None
    while (task := inbox.get()) is not None:
        reduction, chunk = task
        if broken is not None:
            reduction.fail(broken)
        elif reduction.error is None:
            try:
                step(chunk, reduction.residuals)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                broken = error
                reduction.fail(error)
        if outbox is not None:
            outbox.put(task)
        else:
            reduction.chunk_done()
    if outbox is not None:
        outbox.put(None)
