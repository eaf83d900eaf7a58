"""Reduce-scatter and all-gather over gloo by direct sends: every rank sends each other rank its block.

Receives are posted first. Two groups, one for each direction: sends both ways on one gloo group take the time
of one or of both, at random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.compress import PLAIN, residual_of
from holmes_ext.runtime.groups.members import members_group

if TYPE_CHECKING:
    from holmes_ext.runtime.compress import Codec, ResidualMap

#: Of a part at least, for each stream that shares it.
STREAM_BYTES = 64 * 2**10
#: (parts, owners): owners[k], a global rank, holds or gets parts[k].
Parts = tuple[Sequence[torch.Tensor], Sequence[int]]


class DirectExchange:
    """Reduce-scatter and all-gather among ranks of one network; all jobs of a call are under way at once.

    ranks: global, this one among them; construction is collective. codec: of what is sent; calls may be given
    residuals. streams: groups that share out each large part over a long link. purpose: of the groups.
    """

    def __init__(self, ranks: Sequence[int], codec: Codec = PLAIN, streams: int = 1,
                 purpose: str = "two-level"):
        self._rank = dist.get_rank()
        self.codec = codec
        self._sent: Counter = Counter()  # by tag: each has its own thread
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._groups = [
            [members_group(ranks, f"{purpose} {direction}", backend="gloo") for direction in ("up", "down")]
            for _ in range(streams)
        ]

    @property
    def bytes_sent(self) -> int:
        """By this rank, without headers."""
        return sum(self._sent.values())

    def reduce_scatter(self, jobs: Sequence[Parts], tag: int, residuals: ResidualMap | None = None) -> None:
        """My part of every job becomes the sum of all owners' copies, added in the order of the owners."""
        works: list[Any] = []
        copies = []
        for number, (parts, owners) in enumerate(jobs):
            mine = parts[owners.index(self._rank)]
            received = {owner: self._kept(mine, tag, number, owner) for owner in self._others(owners)}
            for owner, wire in received.items():
                self.post(works, dist.irecv, wire, owner, tag)
            copies.append((mine, received, owners))
        for parts, owners in jobs:
            for owner in self._others(owners):
                self.post(works, dist.isend, self._encode(parts[owners.index(owner)], tag, residuals), owner,
                          tag)
        wait_for(works)
        for mine, received, owners in copies:
            codec = self._codec_of(mine)
            total, *others = (mine if o == self._rank else codec.decode(received[o], mine) for o in owners)
            for value in others:
                total = torch.add(total, value, out=mine if value is others[-1] else total)

    def all_gather(self, jobs: Sequence[Parts], tag: int, residuals: ResidualMap | None = None) -> None:
        """Every owner's part of every job arrives in its place."""
        works: list[Any] = []
        arriving = []
        for parts, owners in jobs:
            for owner in self._others(owners):
                part = parts[owners.index(owner)]
                codec = self._codec_of(part)
                arriving.append((part, part if codec is PLAIN else codec.buffer(part)))
                self.post(works, dist.irecv, arriving[-1][1], owner, tag)
        for parts, owners in jobs:
            mine = parts[owners.index(self._rank)]
            wire = self._encode(mine, tag, residuals)
            arriving.append((mine, wire))  # what all others will have
            for owner in self._others(owners):
                self.post(works, dist.isend, wire, owner, tag)
        wait_for(works)
        for part, wire in arriving:
            if wire is not part:
                part.copy_(self._codec_of(part).decode(wire, part))

    def _codec_of(self, part: torch.Tensor) -> Codec:
        return self.codec if part.numel() and self.codec.applies(part.dtype) else PLAIN

    def _encode(self, part: torch.Tensor, tag: int, residuals: ResidualMap | None) -> torch.Tensor:
        codec = self._codec_of(part)
        known = residuals if codec.feedback else None
        return codec.encode(part, residual_of(known, (tag, int(part.storage_offset())), part))

    def _kept(self, part: torch.Tensor, *place: int) -> torch.Tensor:
        """What arrives for `part`: a buffer of earlier calls, as fresh memory costs as much as adding up."""
        if (codec := self._codec_of(part)) is not PLAIN:
            return codec.buffer(part)
        key = (*place, part.dtype)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < part.numel():
            kept = self._buffers[key] = torch.empty_like(part)
        return kept[: part.numel()]

    def _others(self, owners: Sequence[int]) -> list[int]:
        """The other owners, the next one first, so that not all ranks send to the same one."""
        k = list(owners).index(self._rank)
        return [owners[(k + distance) % len(owners)] for distance in range(1, len(owners))]

    def post(self, works: list[Any], start: Any, part: torch.Tensor, peer: int, tag: int) -> None:
        """isend or irecv of a part, if not empty, over its direction's group; large ones over all streams."""
        count = len(self._groups) if part.nbytes >= len(self._groups) * STREAM_BYTES else 1
        for (up, down), share in zip(self._groups, part.tensor_split(count) if part.numel() else ()):
            sends = start is dist.isend
            if sends:
                self._sent[tag] += share.nbytes
            group = up if sends == (peer > self._rank) else down
            works.append((start(share, peer, group=group, tag=tag), share))


def wait_for(works: Sequence[Any]) -> None:
    """What post() has noted."""
    for work, _ in works:  # the buffer is kept alive until then
        work.wait()
