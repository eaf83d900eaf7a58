"""One attempt at a round, on one rank: its pseudo-gradient goes to whoever exchanges the same elements in the
other jobs, theirs come.

Every rank sends each of its pieces to one rank of each other member, and adds up what came by itself, in the
members' order: of N elements a job sends N to each other job. For two jobs that is the least there is, in one
trip of the link instead of two; for J jobs it is J / 2 times what a reduce-scatter and an all-gather would
send, for which no aggregate but the mean could be had.

What goes on is what was decoded, a job's own part too: all jobs have the same bits. A job whose share is 0
(left out) only receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holmes_ext.join.codecs import OuterCodec
from holmes_ext.join.peers.links import PeerLinks
from holmes_ext.join.peers.routes import Peer
from holmes_ext.join.shards.ownership import ShardPair
from holmes_ext.join.shards.state import Fragment
from holmes_ext.join.shards.weights import bytes_of, checksum
from holmes_ext.runtime.compress import PLAIN


class Attempt:
    """members: shares by job, in order; pieces: of this rank (its job's owner there); peers: by job and
    rank."""

    def __init__(
        self,
        job: str,
        members: Mapping[str, float],
        pieces: Sequence[ShardPair],
        peers: Mapping[tuple[str, int], Peer],
        codec: OuterCodec,
    ):
        self.job, self.members, self.pieces, self.peers = job, members, pieces, peers
        self.others = [name for name in members if name != job]
        self.contributors = [name for name, share in members.items() if share > 0]
        self.codec = codec if self.others else PLAIN
        # What the codec's residual becomes when the round is committed.
        self.residual: torch.Tensor | None = None

    def run(
        self,
        links: PeerLinks,
        number: int,
        attempt: int,
        fragment: Fragment,
        gradient: torch.Tensor,
        patience_s: float,
    ) -> list[torch.Tensor]:
        """The contributors' pseudo-gradients of this rank's elements, in order: float32, host. gradient: this
        job's. PeersFailed when not all came."""
        if fragment.residual is not None and self.others:
            self.residual = fragment.residual.float()
        places = [fragment.places(piece.start, piece.stop) for piece in self.pieces]
        residuals = [None if self.residual is None else self.residual[place] for place in places]
        mine = [
            self.codec.encode(gradient[place], residual)
            for place, residual in zip(places, residuals)
            if self.job in self.contributors
        ]
        came = {
            name: [self.codec.buffer(gradient[place]) for place in places]
            for name in self.contributors
            if name != self.job
        }
        outgoing: dict[Peer, list[memoryview]] = {}
        incoming: dict[Peer, list[memoryview]] = {}
        for index, piece in enumerate(self.pieces):
            for name in self.others:
                peer = self.peers[name, piece.owners[name]]
                out, into = outgoing.setdefault(peer, []), incoming.setdefault(peer, [])
                if mine:
                    out.append(bytes_of(mine[index]))
                if name in came:
                    into.append(bytes_of(came[name][index]))
        links.swap(number, attempt, outgoing, incoming, patience_s)
        return [
            self._decoded(mine if name == self.job else came[name], places, gradient)
            for name in self.contributors
        ]

    def digest(self, fragment: Fragment, values: torch.Tensor, salt: str) -> int:
        """Of what came from one job, or went: the ranks' digests add up, modulo 2^64, to the same number in
        all jobs that got the same."""
        sums = (
            checksum(values[fragment.places(piece.start, piece.stop)], piece.start, salt)
            for piece in self.pieces
        )
        return sum(sums) & (2**64 - 1)

    def _decoded(
        self, wires: Sequence[torch.Tensor], places: Sequence[slice], gradient: torch.Tensor
    ) -> torch.Tensor:
        result = torch.empty_like(gradient)
        for wire, place in zip(wires, places):
            result[place] = self.codec.decode(wire, result[place])
        return result
