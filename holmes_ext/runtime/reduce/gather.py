"""All-gather of a flat buffer whose ranks own parts of it, in the order in which the parts are needed.

    flat      [ part of rank 0 | part of rank 1 | part of rank 2 ]      pieces: cut at owners and at parameters
    order     piece needed first, second, ...
    chain     owner -> owner + 1 -> owner + 2 -> ...                    each piece goes round once, the first needed first

An all-gather's pieces all end at its end; here the first layer's parameters are there after 1/n of the time, so that a forward pass may
start while the rest travels. Every NIC sends as much as in a ring all-gather.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.groups.backend import backend_of
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.settle import under_way

#: A piece is at least so many bytes where parameters end, and at most so many inside one.
SMALLEST_BYTES = 256 * 2**10
LARGEST_BYTES = 2**20


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flat buffer, which `owner` (a rank in the group) has; needed: the least number of its parameters."""

    start: int
    stop: int
    owner: int
    needed: int


def cut(numel: int, ranks: int, parameters: Sequence[tuple[int, int, int]], itemsize: int) -> list[Piece]:
    """Pieces of a buffer of `numel` elements, `numel // ranks` of each rank; parameters: (start, stop, number in order of use)."""
    share = numel // ranks
    cuts, last = set(range(0, numel + 1, share)), 0
    for start, stop, _ in sorted(parameters):
        if (start - last) * itemsize >= SMALLEST_BYTES:
            cuts.add(start)
            last = start
        cuts.update(range(start + LARGEST_BYTES // itemsize, stop, LARGEST_BYTES // itemsize))
    edges = sorted(cuts)
    pieces = []
    for start, stop in zip(edges, edges[1:]):
        inside = [number for a, b, number in parameters if a < stop and b > start]
        pieces.append(Piece(start, stop, start // share, min(inside, default=len(parameters))))
    return sorted(pieces, key=lambda piece: (piece.needed, piece.start))


class OrderedGather:
    """handle = gather(parts): every part, a view of a buffer, arrives from its owner; handle.wait(k) returns when parts 0 to k are there.

    Construction is collective: gloo gets two groups, one for each direction (see direct.py); NCCL one, over which pieces are broadcast.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.ranks = sorted(dist.get_process_group_ranks(group))
        self._here = self.ranks.index(dist.get_rank())
        backend = backend_of(group)
        self._gloo = backend == "gloo"
        self._groups = [
            members_group(self.ranks, f"gather {way}", backend=backend)
            for way in (("up", "down") if self._gloo else ("all",))
        ]

    def __call__(self, parts: Sequence[tuple[int, torch.Tensor]]) -> Chain | Broadcasts:
        """parts: (owner, tensor), the same on all ranks, the first needed first."""
        if self._gloo:
            return Chain(self, parts)
        return Broadcasts([dist.broadcast(part, self.ranks[owner], group=self._groups[0], async_op=True) for owner, part in parts])

    def send(self, part: torch.Tensor, tag: int) -> Any:
        """To the next rank."""
        following = (self._here + 1) % len(self.ranks)
        return dist.isend(part, self.ranks[following], group=self._groups[following < self._here], tag=tag)

    def receive(self, part: torch.Tensor, tag: int) -> Any:
        """From the rank before."""
        before = (self._here - 1) % len(self.ranks)
        return dist.irecv(part, self.ranks[before], group=self._groups[before > self._here], tag=tag)

    def forwards(self, owner: int) -> bool:
        """Whether a part of `owner` goes on to the next rank."""
        return (self._here + 1) % len(self.ranks) != owner

    def owns(self, owner: int) -> bool:
        return owner == self._here


class Chain:
    """Parts under way over gloo, in a thread: gloo's calls block, and release the GIL."""

    def __init__(self, gather: OrderedGather, parts: Sequence[tuple[int, torch.Tensor]]):
        self._gather, self._parts = gather, parts
        self._error: Exception | None = None
        self._arrived = [threading.Event() for _ in parts]
        self._received = [None if gather.owns(owner) else gather.receive(part, tag) for tag, (owner, part) in enumerate(parts)]
        self._thread = threading.Thread(target=self._run, name="holmes_gather", daemon=True)
        self._thread.start()
        under_way(self)

    def wait(self, last: int) -> None:
        """Until parts 0 to `last` are there; RuntimeError when one is lost."""
        self._arrived[last].wait()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def settle(self, seconds: float) -> None:
        """Until everything has arrived or failed, at most so long."""
        self._thread.join(seconds)

    def finish(self) -> None:
        """Until everything has arrived, and has been passed on."""
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def _run(self) -> None:
        sent = []
        try:
            for tag, (owner, part) in enumerate(self._parts):
                if self._received[tag] is not None:
                    self._received[tag].wait()
                if self._gather.forwards(owner):
                    sent.append(self._gather.send(part, tag))
                self._arrived[tag].set()
            for work in sent:
                work.wait()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error
        finally:
            for event in self._arrived:
                event.set()


class Broadcasts:
    """Parts under way over NCCL; waiting makes the current stream wait."""

    def __init__(self, works: Sequence[Any]):
        self._works, self._next = works, 0

    def wait(self, last: int) -> None:
        while self._next <= last:
            self._works[self._next].wait()
            self._next += 1

    def finish(self) -> None:
        self.wait(len(self._works) - 1)
