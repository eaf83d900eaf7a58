"""Exchange of a fragment's pseudo-gradient between this rank and the ranks of the other jobs.

A fragment is a part of the model; a pseudo-gradient is the change of its weights since the last outer step.
Each rank sends each piece of its pseudo-gradient directly to the rank of each other job that has the same
elements, and aggregates the received pieces itself, in the order of the members. Of N elements a job sends
N to each other job. For two jobs this is the minimum, in one trip over the link instead of two. For J jobs it
is J / 2 times as much as a reduce-scatter and an all-gather would send, but those allow only the mean.

All jobs continue with the decoded data, also of their own pseudo-gradient, so all have the same bits. A job
with share 0 in the sum only receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from holmes_ext.join.codecs import OuterCodec
from holmes_ext.join.peers.links import PeerLinks
from holmes_ext.join.peers.routes import Peer
from holmes_ext.join.shards.ownership import SharedRange
from holmes_ext.join.shards.state import Fragment
from holmes_ext.join.shards.weights import CHECKSUM_MASK, bytes_of, checksum
from holmes_ext.runtime.compress import PLAIN


class Attempt:
    """Attempt to exchange this rank's elements of a pseudo-gradient with ranks of other jobs.

    A pseudo-gradient belongs to a fragment, a part of the model. If jobs are lost during an exchange,
    the next attempt runs without them. run() sends and receives.
    """

    def __init__(
        self,
        job: str,
        members: Mapping[str, float],
        pieces: Sequence[SharedRange],
        peers: Mapping[tuple[str, int], Peer],
        codec: OuterCodec,
    ):
        """Prepare the exchange; nothing is sent yet.

        Args:
            job: Name of this job.
            members: Job -> share of its pseudo-gradient in the sum (0: it only receives), in the
                order of aggregation; with this job.
            pieces: Ranges of elements that this rank exchanges. `owners` of a range: job -> the rank
                of that job that exchanges these elements.
            peers: (name of another job, rank of that job) -> address of the rank.
            codec: Compression of the pseudo-gradients. Without other members nothing is sent, so
                nothing is compressed.
        """
        self.job = job
        self.members = members
        self.pieces = pieces
        self.peers = peers
        self.others = [name for name in members if name != job]
        self.contributors = [name for name, share in members.items() if share > 0]
        # Rounding would lose precision for nothing if no other job receives the data.
        self.codec = codec if self.others else PLAIN
        #: The codec's rounding errors after this exchange; kept only if the round is committed.
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
        """Send this rank's pieces of the pseudo-gradient, and receive the same pieces of the other jobs.

        Args:
            links: Connections to ranks of other jobs.
            number: Number of the round.
            attempt: Number of the exchange within the round.
            fragment: Fragment (part of the model) to which the pseudo-gradient belongs.
            gradient: This rank's elements of this job's pseudo-gradient.
            patience_s: Seconds of silence after which the exchange with a peer has failed.

        Returns:
            Decoded pseudo-gradients of all contributors, in order: this rank's elements, float32, host.

        Raises:
            PeersFailed: The exchange with some jobs failed.
        """
        if fragment.residual is not None and self.others:
            self.residual = fragment.residual.float()  # a copy; encode() updates it
        # Slice of each piece in this rank's tensors of the fragment.
        places = [fragment.places(piece.start, piece.stop) for piece in self.pieces]
        encoded: list[torch.Tensor] = []  # this job's data: a tensor for each piece
        if self.job in self.contributors:
            for place in places:
                residual = None if self.residual is None else self.residual[place]
                encoded.append(self.codec.encode(gradient[place], residual))
        received = {  # other job that contributes -> a buffer for each piece
            name: [self.codec.buffer(gradient[place]) for place in places]
            for name in self.contributors
            if name != self.job
        }
        outgoing: dict[Peer, list[memoryview]] = {}  # bytes to send to each rank of another job
        incoming: dict[Peer, list[memoryview]] = {}  # buffers for the bytes of each rank
        for index, piece in enumerate(self.pieces):
            for name in self.others:
                rank = piece.owners[name]  # of job `name`, with the elements of this piece
                peer = self.peers[name, rank]
                to_peer = outgoing.setdefault(peer, [])
                from_peer = incoming.setdefault(peer, [])
                if encoded:  # this job contributes
                    to_peer.append(bytes_of(encoded[index]))
                if name in received:  # job `name` contributes
                    from_peer.append(bytes_of(received[name][index]))
        links.swap(number, attempt, outgoing, incoming, patience_s)
        # All jobs decode this job's data, too, so that all get the same bits.
        received[self.job] = encoded
        return [self._decoded(received[name], places, gradient) for name in self.contributors]

    def digest(self, fragment: Fragment, values: torch.Tensor, salt: str) -> int:
        """Return this rank's part of the digest of a job's pseudo-gradient.

        Modulo 2^64, the parts of all ranks of a job add up to the same number in all jobs that
        received identical data, whatever their shards.

        Args:
            fragment: The fragment: a part of the model.
            values: The job's decoded pseudo-gradient: this rank's elements.
            salt: Random text that the coordinator publishes after the exchange. So no job can report a
                digest that it has copied from another job.
        """
        parts = (
            checksum(values[fragment.places(piece.start, piece.stop)], piece.start, salt)
            for piece in self.pieces
        )
        return sum(parts) & CHECKSUM_MASK

    def _decoded(
        self, encoded: Sequence[torch.Tensor], places: Sequence[slice], like: torch.Tensor
    ) -> torch.Tensor:
        """Return a pseudo-gradient with the shape of `like` from its encoded pieces.

        Args:
            encoded: The pieces.
            places: Slice of each piece in the result.
            like: Tensor of the result's shape and dtype.
        """
        result = torch.empty_like(like)
        for piece, place in zip(encoded, places):
            # Of the second argument, only size and dtype are used, not the values.
            result[place] = self.codec.decode(piece, like[place])
        return result
