"""Reduce-scatter and all-gather over gloo by direct sends: every rank sends each other rank its block.

Receives are posted first. Two groups, one for each direction: sends both ways on one gloo group take the time
of one or of both, at random.

Sums by way of other clusters: round a ring, or up a tree and down again (plan/across.py).

    ring a b c   a: send part 0 | take 2, add, send on | take 1,
                 add: the total of 1, send on | take 0, 2: totals
    tree b: a c  a: send        |                        take the total
                 b: take from a and c, add, send both the total

Of every piece one rank in each cluster has the cluster's sum; those act as above. All receives of a tensor
are posted when its reduction begins and each round has a thread of its own (steps.py), so chunks follow each
other on a link without waiting for what its latency holds back. An element is added up in one order, on one
rank, and its total passed on: all ranks get the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.compress import PLAIN, residual_of
from holmes_ext.runtime.groups.members import members_group

if TYPE_CHECKING:
    from holmes_ext.plan.traffic import CrossClusterAlgorithm
    from holmes_ext.runtime.compress import Codec, ResidualMap


#: Tags: of a tree's ways, and of a ring's rounds from _UP on.
_UP, _DOWN = 10, 11


@dataclass(frozen=True)
class Round:
    """takes: (cluster, part, tag, added or replacing), then sends: (cluster, part, tag); numbers of
    clusters."""

    takes: tuple[tuple[int, int, int, bool], ...]
    sends: tuple[tuple[int, int, int], ...]


def rounds(across: CrossClusterAlgorithm, names: Sequence[str], me: str) -> list[Round]:
    """What cluster `me` does."""
    number = {name: index for index, name in enumerate(names)}
    if across.algorithm == "tree":
        parent = dict(zip(across.order, across.parents))[me]
        children = [
            number[child] for child, above in zip(across.order, across.parents) if above == me
        ]
        down = tuple((child, 0, _DOWN) for child in children)
        up = Round(
            tuple((child, 0, _UP, True) for child in children),
            ((number[parent], 0, _UP),) if parent else down,
        )
        return [up, Round(((number[parent], 0, _DOWN, False),), down)] if parent else [up]
    count, place = len(across.order), across.order.index(me)
    before, after = number[across.order[place - 1]], number[across.order[(place + 1) % count]]
    ring = [Round((), ((after, place, _UP),))]
    for turn in range(1, 2 * count - 1):
        part, goes_on = (place - turn) % count, turn < 2 * count - 2
        take = before, part, _UP + turn - 1, turn < count
        ring.append(Round((take,), ((after, part, _UP + turn),) if goes_on else ()))
    return ring


@dataclass
class Passage:
    """A chunk on its way. arriving: by round, (works, what arrives, where it goes, added)."""

    owned: list[Parts]
    arriving: list[list[tuple[Any, torch.Tensor, torch.Tensor, bool]]]
    sent: list[Any] = field(default_factory=list)


class Relay:
    """exchange: its groups and tags from _UP on are used; clusters: as owners are listed; me: this rank's."""

    def __init__(
        self,
        exchange: DirectExchange,
        across: CrossClusterAlgorithm,
        clusters: Sequence[str],
        me: str,
    ):
        self._exchange, self.rounds = exchange, rounds(across, clusters, me)
        self.parts = 1 if across.algorithm == "tree" else len(clusters)

    def expect(self, owned: list[Parts]) -> Passage:
        """Posts the receives of a chunk. owned: this rank's pieces, in `parts` parts, an owner per
        cluster."""
        arriving: list[list[tuple[Any, torch.Tensor, torch.Tensor, bool]]] = [
            [] for _ in self.rounds
        ]
        for turn, step in enumerate(self.rounds):
            for parts, owners in owned:
                for cluster, number, tag, added in step.takes:
                    mine = parts[number]
                    wire = torch.empty_like(mine) if added else mine
                    works: list[Any] = []
                    self._exchange.post(works, dist.irecv, wire, owners[cluster], tag)
                    arriving[turn].append((works, wire, mine, added))
        return Passage(owned, arriving)

    def turn(self, turn: int, passage: Passage) -> None:
        """One round of a chunk; after the last one all has left and come."""
        for works, wire, mine, added in passage.arriving[turn]:
            wait_for(works)
            if added:
                mine.add_(wire)
        for parts, owners in passage.owned:
            for cluster, number, tag in self.rounds[turn].sends:
                self._exchange.post(passage.sent, dist.isend, parts[number], owners[cluster], tag)
        if turn == len(self.rounds) - 1:
            wait_for(passage.sent)


#: Of a part at least, for each stream that shares it.
STREAM_BYTES = 64 * 2**10
#: (parts, owners): owners[k], a global rank, holds or gets parts[k].
Parts = tuple[Sequence[torch.Tensor], Sequence[int]]


class DirectExchange:
    """Reduce-scatter and all-gather among ranks of one network; all jobs of a call are under way at once.

    ranks: global, this one among them; construction is collective. codec: of what is sent; calls may be given
    residuals. streams: groups that share out each large part over a long link. purpose: of the groups.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        codec: Codec = PLAIN,
        streams: int = 1,
        purpose: str = "hierarchical",
    ):
        self._rank = dist.get_rank()
        self.codec = codec
        self._sent: Counter = Counter()  # by tag: each has its own thread
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._groups = [
            [
                members_group(ranks, f"{purpose} {direction}", backend="gloo")
                for direction in ("up", "down")
            ]
            for _ in range(streams)
        ]

    @property
    def bytes_sent(self) -> int:
        """By this rank, without headers."""
        return sum(self._sent.values())

    def reduce_scatter(
        self, jobs: Sequence[Parts], tag: int, residuals: ResidualMap | None = None
    ) -> None:
        """My part of every job becomes the sum of all owners' copies, added in the order of the owners."""
        works: list[Any] = []
        copies = []
        for number, (parts, owners) in enumerate(jobs):
            mine = parts[owners.index(self._rank)]
            received = {
                owner: self._kept(mine, tag, number, owner) for owner in self._others(owners)
            }
            for owner, wire in received.items():
                self.post(works, dist.irecv, wire, owner, tag)
            copies.append((mine, received, owners))
        for parts, owners in jobs:
            for owner in self._others(owners):
                self.post(
                    works,
                    dist.isend,
                    self._encode(parts[owners.index(owner)], tag, residuals),
                    owner,
                    tag,
                )
        wait_for(works)
        for mine, received, owners in copies:
            codec = self._codec_of(mine)
            total, *others = (
                mine if o == self._rank else codec.decode(received[o], mine) for o in owners
            )
            for value in others:
                total = torch.add(total, value, out=mine if value is others[-1] else total)

    def all_gather(
        self, jobs: Sequence[Parts], tag: int, residuals: ResidualMap | None = None
    ) -> None:
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
        for (up, down), share in zip(
            self._groups, part.tensor_split(count) if part.numel() else ()
        ):
            sends = start is dist.isend
            if sends:
                self._sent[tag] += share.nbytes
            group = up if sends == (peer > self._rank) else down
            works.append((start(share, peer, group=group, tag=tag), share))


def wait_for(works: Sequence[Any]) -> None:
    """What post() has noted."""
    for work, _ in works:  # the buffer is kept alive until then
        work.wait()
