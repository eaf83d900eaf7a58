"""Reduce-scatter and all-gather over gloo by direct sends: every rank sends each other rank its block, receives posted first.

Two groups, one for each direction: sends both ways on one gloo group take the time of one or of both, at random (measured).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.compress import Codec, residual_of

#: (parts, owners): owners[k], a global rank, holds or gets parts[k].
Parts = tuple[Sequence[torch.Tensor], Sequence[int]]


class DirectExchange:
    """Reduce-scatter and all-gather among ranks of one network. All jobs of a call are under way at once.

    ranks: global, this one among them; construction is collective. codec: what is sent is compressed; then a call may be given the
    residuals of the tensor that its parts are views of (None: rounding errors are not carried on).
    """

    def __init__(self, ranks: Sequence[int], codec: Codec | None = None):
        self._rank = dist.get_rank()
        self._codec = codec
        self._sent: Counter = Counter()  # by tag: each has its own thread
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._up, self._down = (
            members_group(ranks, f"two-level {way}", backend="gloo") for way in ("up", "down")
        )

    @property
    def bytes_sent(self) -> int:
        """By this rank, without headers."""
        return sum(self._sent.values())

    @property
    def feedback(self) -> bool:
        """Whether residuals are of use."""
        return self._codec is not None and self._codec.feedback

    def reduce_scatter(self, jobs: Sequence[Parts], tag: int, residuals: dict | None = None) -> None:
        """My part of every job becomes the sum of all owners' copies, added in the order of the owners."""
        works, copies = [], []
        for number, (parts, owners) in enumerate(jobs):
            mine = parts[owners.index(self._rank)]
            received = {owner: mine if owner == self._rank else self._kept(mine, tag, number, owner) for owner in owners}
            works += [self._receive(received[owner], owner, tag) for owner in self._others(owners)]
            copies.append((mine, received, owners))
        for parts, owners in jobs:
            for owner in self._others(owners):
                works.append(self._send(self._encode(parts[owners.index(owner)], tag, residuals), owner, tag))
        _wait(works)
        for mine, received, owners in copies:
            total, *others = (received[owner] if owner == self._rank else self._decode(received[owner], mine) for owner in owners)
            for value in others:
                total = torch.add(total, value, out=mine if value is others[-1] else total)

    def all_gather(self, jobs: Sequence[Parts], tag: int, residuals: dict | None = None) -> None:
        """Every owner's part of every job arrives in its place."""
        works, arriving = [], []
        for parts, owners in jobs:
            for owner in self._others(owners):
                part = parts[owners.index(owner)]
                arriving.append((part, self._buffer(part) if self._compressed(part) else part))
                works.append(self._receive(arriving[-1][1], owner, tag))
        for parts, owners in jobs:
            mine = parts[owners.index(self._rank)]
            wire = self._encode(mine, tag, residuals)
            if wire is not mine:
                mine.copy_(self._decode(wire, mine))  # what all others will have
            works += [self._send(wire, owner, tag) for owner in self._others(owners)]
        _wait(works)
        for part, wire in arriving:
            if wire is not part:
                part.copy_(self._decode(wire, part))

    def _compressed(self, part: torch.Tensor) -> bool:
        return self._codec is not None and part.numel() > 0 and self._codec.applies(part.dtype)

    def _kept(self, part: torch.Tensor, *place: int) -> torch.Tensor:
        """A buffer like `part`, cut from the one that earlier calls had in the same place: fresh memory costs about as much as adding it up."""
        if self._compressed(part):
            return self._buffer(part)
        key = (*place, part.dtype)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < part.numel():
            kept = self._buffers[key] = torch.empty_like(part)
        return kept[: part.numel()]

    def _buffer(self, part: torch.Tensor) -> torch.Tensor:
        return self._codec.buffer(part) if self._compressed(part) else torch.empty_like(part)

    def _encode(self, part: torch.Tensor, tag: int, residuals: dict | None) -> torch.Tensor:
        if not self._compressed(part):
            return part
        return self._codec.encode(part, residual_of(residuals, (tag, part.storage_offset()), part))

    def _decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self._codec.decode(wire, like) if self._compressed(like) else wire

    def _others(self, owners: Sequence[int]) -> list[int]:
        """The other owners, the next one first, so that not all ranks send to the same one."""
        k = list(owners).index(self._rank)
        return [owners[(k + distance) % len(owners)] for distance in range(1, len(owners))]

    def _send(self, part: torch.Tensor, to: int, tag: int) -> Any:
        self._sent[tag] += part.numel() * part.element_size()
        return part.numel() and (dist.isend(part, dst=to, group=self._up if to > self._rank else self._down, tag=tag), part)

    def _receive(self, part: torch.Tensor, source: int, tag: int) -> Any:
        return part.numel() and (dist.irecv(part, src=source, group=self._down if source > self._rank else self._up, tag=tag), part)


def _wait(works: Sequence[Any]) -> None:
    for entry in works:
        if entry:
            entry[0].wait()  # entry[1]: the buffer, kept alive until then
