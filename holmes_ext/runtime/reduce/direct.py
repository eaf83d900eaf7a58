"""Reduce-scatter, all-gather and relayed sums over gloo, made of sends and receives between single ranks.

A tensor is divided into parts. Each part has an owner, the rank that adds it up (DividedTensor).

Direct exchange (DirectExchange):

    reduce_scatter()   1  post a receive of every other rank's values for this rank's part
                       2  send every other rank this rank's values for its part
                       3  wait, and add all values for this rank's part in the order of the owners
    all_gather()       1  post a receive of every other owner's part
                       2  send this rank's part to every other owner
                       3  wait

Relayed sum (Relay): clusters pass sums on to other clusters, around a ring or along a tree
(plan/across.py), so that no data crosses a pair of clusters with a slow link. A chunk of the tensor is cut
into shards. Each shard is summed by a rank of each cluster (hierarchical.py). In a ring, a shard has a
part for each cluster. Clusters a, b, c with parts 0, 1, 2:

    ring a b c        a: send part 0
                      a: receive part 2, add to it, send it
                      a: receive part 1, add to it: the total of part 1; send it
                      a: receive the totals of parts 0 and 2
    tree, root b      a, c: send their shard to b
                      b: add both, send the total to a and c

All receives of a chunk are posted before its first round, and each round has a thread of its own (steps.py).
Consecutive chunks therefore overlap, and the latency of a link does not limit its throughput.

Invariant: each element is added up by a single rank, in a fixed order, and its total is passed on. So all
ranks get the same bits.

No rank waits for ever: a receive is posted before any send of the same operation, a send needs nothing but
its posted receive, and both ranks of a pair run the same operations in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.runtime.compress import PLAIN, residual_of
from holmes_ext.runtime.groups.members import members_group

if TYPE_CHECKING:
    from holmes_ext.plan.traffic import CrossClusterAlgorithm
    from holmes_ext.runtime.compress import Codec, ResidualMap

#: Tags of a tree's messages towards the root and away from it. A ring has a tag for each round, from _UP_TAG.
_UP_TAG = 10
_DOWN_TAG = 11
#: A part is shared out over several streams if each of them carries at least so many bytes.
STREAM_BYTES = 64 * 2**10


class DividedTensor(NamedTuple):
    """A flat tensor that is cut into parts. The owner of a part is the rank that adds it up."""

    parts: Sequence[torch.Tensor]
    owners: Sequence[int]  # global rank of the owner of each part

    def part_of(self, rank: int) -> torch.Tensor:
        """Return the part that a rank owns."""
        return self.parts[self.owners.index(rank)]


class GlooTransfer(NamedTuple):
    """Send or receive over gloo that was started and has not been waited for."""

    work: Any
    buffer: torch.Tensor  # kept until the work has ended


def wait_for(transfers: Sequence[GlooTransfer]) -> None:
    """Wait until all sends and receives in the list have ended."""
    for transfer in transfers:
        transfer.work.wait()


class RelayReceive(NamedTuple):
    """A part that a cluster receives in a round of a sum around a ring, or along a tree, of clusters."""

    cluster: int  # the sending cluster's number
    part: int
    tag: int
    added: bool  # whether the part is added to this cluster's; otherwise it replaces it


class RelaySend(NamedTuple):
    """A part that a cluster sends in a round of a sum around a ring, or along a tree, of clusters."""

    cluster: int  # the receiving cluster's number
    part: int
    tag: int


@dataclass(frozen=True)
class Round:
    """Messages of a cluster in a round of a sum around a ring, or along a tree, of clusters.

    The sends begin when the receives have ended.
    """

    receives: tuple[RelayReceive, ...]
    sends: tuple[RelaySend, ...]


def relay_rounds(across: CrossClusterAlgorithm, names: Sequence[str], cluster: str) -> list[Round]:
    """Return a cluster's rounds (of receives, then sends) in a sum around a ring or along a tree of clusters.

    Args:
        across: The ring or tree of clusters.
        names: Names of all clusters. Rounds name clusters by their position in this list.
        cluster: Name of the cluster whose rounds are returned.
    """
    number_of = {name: number for number, name in enumerate(names)}
    if across.algorithm == "ring":
        ring = [number_of[name] for name in across.order]
        return _ring_rounds(ring, number_of[cluster])
    parent = ""  # stays empty for the root of the tree
    children = []
    for child_name, parent_name in zip(across.order, across.parents):
        if child_name == cluster:
            parent = parent_name
        if parent_name == cluster:
            children.append(number_of[child_name])
    return _tree_rounds(number_of[parent] if parent else None, children)


def _tree_rounds(parent: int | None, children: Sequence[int]) -> list[Round]:
    """Return the rounds of a cluster in a sum along a tree of clusters.

    Partial sums go up to the root, where the total is complete. The total comes down the same way.
    Each message has the whole tensor ("part 0"): only a ring divides it into parts. A received part
    is added to this cluster's values (added=True), or it replaces them (added=False).

    Args:
        parent: Number of the cluster's parent; None for the root.
        children: Numbers of the cluster's children.
    """
    sums_of_children = tuple(
        RelayReceive(cluster=child, part=0, tag=_UP_TAG, added=True) for child in children
    )
    totals = tuple(RelaySend(cluster=child, part=0, tag=_DOWN_TAG) for child in children)
    if parent is None:
        return [Round(receives=sums_of_children, sends=totals)]
    sum_of_subtree = RelaySend(cluster=parent, part=0, tag=_UP_TAG)
    total = RelayReceive(cluster=parent, part=0, tag=_DOWN_TAG, added=False)
    return [
        Round(receives=sums_of_children, sends=(sum_of_subtree,)),
        Round(receives=(total,), sends=totals),
    ]


def _ring_rounds(ring: Sequence[int], cluster: int) -> list[Round]:
    """Return the rounds of a cluster in a ring all-reduce (Patarasuk and Yuan 2009).

    The tensor has a part for each cluster. In each round a cluster receives a part from its predecessor and
    sends the same part to its successor. In the first half of the rounds the part is a partial sum: the
    cluster adds its own values to it (added=True). In the second half it is the total.

    Args:
        ring: Numbers of the clusters in the order of the ring.
        cluster: Number of the cluster whose rounds are returned.
    """
    count = len(ring)  # clusters, and parts
    position = ring.index(cluster)
    predecessor = ring[position - 1]  # the first cluster follows the last
    successor = ring[(position + 1) % count]
    last_round = 2 * count - 2  # count - 1 rounds for partial sums, and as many for totals
    # Round 0 only sends. A message's tag is _UP_TAG plus the number of the round that sends it. The
    # receiver gets the message a round later.
    first_send = RelaySend(successor, part=position, tag=_UP_TAG)
    rounds = [Round(receives=(), sends=(first_send,))]
    for number in range(1, last_round + 1):
        part = (position - number) % count
        is_partial_sum = number < count
        receive = RelayReceive(predecessor, part, tag=_UP_TAG + number - 1, added=is_partial_sum)
        sends: tuple[RelaySend, ...] = ()
        if number < last_round:
            sends = (RelaySend(successor, part, tag=_UP_TAG + number),)
        rounds.append(Round((receive,), sends))
    return rounds


class _PostedReceive(NamedTuple):
    """A receive, posted in advance, of another cluster's values for a part of a tensor."""

    transfers: list[GlooTransfer]
    buffer: torch.Tensor
    part: torch.Tensor  # this rank's values of the part
    added: bool  # True: a partial sum, to be added to `part`. False: the total; the buffer is `part` itself


@dataclass
class RelayedChunk:
    """Piece of a gradient tensor that is summed over clusters, and the messages under way."""

    shards: list[DividedTensor]  # this rank has the sums of these over its cluster
    receives_of_round: list[list[_PostedReceive]]
    sends: list[GlooTransfer] = field(default_factory=list)


class Relay:
    """Sum over clusters, formed by messages in rounds around a ring or along a tree of clusters."""

    def __init__(
        self,
        exchange: DirectExchange,
        across: CrossClusterAlgorithm,
        clusters: Sequence[str],
        cluster: str,
    ):
        """Plan this cluster's rounds of messages in a sum around a ring or along a tree of clusters.

        Args:
            exchange: Sends and receives the messages.
            across: The ring or tree of clusters.
            clusters: Names of all clusters. Messages name a cluster by its position in this list.
            cluster: Name of this rank's cluster.
        """
        self._exchange = exchange
        self.rounds = relay_rounds(across, clusters, cluster)
        #: Number of parts that a shard must be divided into: a tree passes on whole shards.
        self.parts = 1 if across.algorithm == "tree" else len(clusters)

    def post_receives(self, shards: list[DividedTensor]) -> RelayedChunk:
        """Post the receives of all rounds that sum this rank's shards over the clusters.

        The chunk is a piece of a gradient tensor. `self.rounds` lists the messages of each round,
        by number of the other cluster. Afterwards run_round() is called once for each round.

        Args:
            shards: Ranges of the chunk that this rank has summed over its cluster. Each shard is
                divided into parts, as the rounds need them. shard.owners[i] is the rank in
                cluster i that has the sum of cluster i for the same range.
        """
        chunk = RelayedChunk(shards, receives_of_round=[])
        for relay_round in self.rounds:
            posted = []
            for shard in shards:
                for receive in relay_round.receives:
                    part = shard.parts[receive.part]
                    # A total is received in place. A partial sum gets a buffer: run_round() adds it.
                    buffer = torch.empty_like(part) if receive.added else part
                    sender = shard.owners[receive.cluster]
                    transfers = self._exchange.start_receive(buffer, sender, receive.tag)
                    posted.append(_PostedReceive(transfers, buffer, part, receive.added))
            chunk.receives_of_round.append(posted)
        return chunk

    def run_round(self, number: int, chunk: RelayedChunk) -> None:
        """Wait for the messages that a round receives, process them, and start the round's sends.

        A received partial sum is added to this rank's values. A received total needs no step: it
        was received in place. The last round also waits for all sends of the chunk.

        Args:
            number: Number of the round, from 0.
            chunk: The chunk, whose receives post_receives() has posted.
        """
        for receive in chunk.receives_of_round[number]:
            wait_for(receive.transfers)
            if receive.added:
                receive.part.add_(receive.buffer)
        for shard in chunk.shards:
            for send in self.rounds[number].sends:
                receiver = shard.owners[send.cluster]  # the rank in that cluster with this shard
                chunk.sends += self._exchange.start_send(shard.parts[send.part], receiver, send.tag)
        is_last_round = number == len(self.rounds) - 1
        if is_last_round:
            wait_for(chunk.sends)


class _Stream(NamedTuple):
    """Gloo connection between any two ranks (no CUDA stream): a process group per direction."""

    to_higher_ranks: Any
    to_lower_ranks: Any


class DirectExchange:
    """Reduce-scatter and all-gather over gloo; each rank sends to each other rank directly.

    Calls with different tags may run in different threads at the same time.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        codec: Codec = PLAIN,
        streams: int = 1,
        purpose: str = "hierarchical",
    ):
        """Make gloo process groups for messages between ranks; all `ranks` do so in the same order.

        Args:
            ranks: Global ranks, among them this one.
            codec: Compression of the messages; PLAIN sends values as they are.
            streams: Number of gloo connections between two ranks, each with two process groups. A
                large message is divided among them, to fill a link of high latency.
            purpose: Part of the process groups' names.
        """
        self._rank = dist.get_rank()
        self.codec = codec
        # Tag -> bytes sent. Each tag is used by a single thread, so no lock is needed.
        self._bytes_sent: Counter[int] = Counter()
        #: Receive buffers of earlier calls: (tag, number of the tensor, sender, dtype) -> buffer.
        self._buffers: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self._streams = []
        # Two groups for each stream: gloo sometimes runs the two directions of a group in turn.
        for _ in range(streams):
            stream = _Stream(
                to_higher_ranks=members_group(ranks, f"{purpose} up", backend="gloo"),
                to_lower_ranks=members_group(ranks, f"{purpose} down", backend="gloo"),
            )
            self._streams.append(stream)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that this rank has sent so far, without headers."""
        return sum(self._bytes_sent.values())

    def reduce_scatter(
        self, tensors: Sequence[DividedTensor], tag: int, residuals: ResidualMap | None = None
    ) -> None:
        """Replace this rank's part of each tensor by the sum over all owners, this rank included.

        Args:
            tensors: Tensors that are cut into parts. Each part has an owner (a rank), and this rank
                owns a part of each tensor. All tensors are exchanged at the same time.
            tag: Tag of the messages.
            residuals: Rounding errors of earlier calls. The compression adds them to the values and
                stores the new errors (error feedback). None: no errors are kept.
        """
        transfers: list[GlooTransfer] = []
        received: list[dict[int, torch.Tensor]] = []  # of each tensor: sender -> its encoded values
        for number, tensor in enumerate(tensors):
            own_part = tensor.part_of(self._rank)
            buffers = {}
            for sender in self._other_owners(tensor):
                buffers[sender] = self._receive_buffer(own_part, tag, number, sender)
                transfers += self.start_receive(buffers[sender], sender, tag)
            received.append(buffers)
        # All receives are posted before the first send, so no rank waits for ever.
        for tensor in tensors:
            for owner in self._other_owners(tensor):
                encoded = self._encode(tensor.part_of(owner), tag, residuals)
                transfers += self.start_send(encoded, owner, tag)
        wait_for(transfers)
        for tensor, buffers in zip(tensors, received):
            self._add_contributions(tensor, buffers)

    def all_gather(
        self, tensors: Sequence[DividedTensor], tag: int, residuals: ResidualMap | None = None
    ) -> None:
        """Replace every part of each tensor by the values of the rank that owns the part.

        Args:
            tensors: Tensors that are cut into parts, see reduce_scatter(). The owner of a part has
                its final values, such as sums.
            tag: Tag of the messages.
            residuals: See reduce_scatter().
        """
        transfers: list[GlooTransfer] = []
        encoded_parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (part, its encoding)
        for tensor in tensors:
            for owner in self._other_owners(tensor):
                part = tensor.part_of(owner)
                codec = self._codec_of(part)
                buffer = part if codec is PLAIN else codec.buffer(part)
                encoded_parts.append((part, buffer))
                transfers += self.start_receive(buffer, owner, tag)
        for tensor in tensors:
            own_part = tensor.part_of(self._rank)
            encoded = self._encode(own_part, tag, residuals)
            # This rank decodes its own part, too: then all ranks have the same rounded values.
            encoded_parts.append((own_part, encoded))
            for owner in self._other_owners(tensor):
                transfers += self.start_send(encoded, owner, tag)
        wait_for(transfers)
        for part, encoded in encoded_parts:
            if encoded is not part:
                part.copy_(self._codec_of(part).decode(encoded, like=part))

    def start_send(self, part: torch.Tensor, peer: int, tag: int) -> list[GlooTransfer]:
        """Start to send a part of a tensor to another rank; an empty part is not sent."""
        self._bytes_sent[tag] += part.nbytes
        return self._start(dist.isend, part, peer, tag, goes_up=self._rank < peer)

    def start_receive(self, part: torch.Tensor, peer: int, tag: int) -> list[GlooTransfer]:
        """Start to receive a part of a tensor from another rank; an empty part is not received."""
        return self._start(dist.irecv, part, peer, tag, goes_up=peer < self._rank)

    def _start(
        self, operation: Callable[..., Any], part: torch.Tensor, peer: int, tag: int, goes_up: bool
    ) -> list[GlooTransfer]:
        """Start to send or receive a part; a large part is divided among all "streams".

        A stream is a pair of gloo process groups, no CUDA stream. The first group sends to higher
        ranks, the second to lower ranks: gloo may run both directions of a single group in turn.

        Args:
            operation: dist.isend or dist.irecv.
            part: Flat tensor.
            peer: Global rank of the other end.
            tag: Tag of the message.
            goes_up: Whether the receiver's rank is higher than the sender's.

        Returns:
            A transfer for each stream that is used; none for an empty part.
        """
        if part.numel() == 0:
            return []
        share_count = 1  # a small part uses the first stream only
        if part.nbytes >= len(self._streams) * STREAM_BYTES:
            share_count = len(self._streams)
        transfers = []
        for stream, share in zip(self._streams, part.tensor_split(share_count)):
            group = stream.to_higher_ranks if goes_up else stream.to_lower_ranks
            work = operation(share, peer, group=group, tag=tag)
            transfers.append(GlooTransfer(work, share))
        return transfers

    def _add_contributions(self, tensor: DividedTensor, received: dict[int, torch.Tensor]) -> None:
        """Add the values of all ranks for the part that this rank owns, and store the sum in the part.

        Ranks are added in the order of tensor.owners, so the sum does not depend on the order of arrival.

        Args:
            tensor: The tensor, with a part owned by this rank.
            received: Other rank -> its encoded values for this part. The buffers may be overwritten.
        """
        own_part = tensor.part_of(self._rank)  # this rank's values, and the result
        codec = self._codec_of(own_part)
        contributions = []
        for rank in tensor.owners:
            if rank == self._rank:
                contributions.append(own_part)
            else:  # `like` only gives the length and the type
                contributions.append(codec.decode(received[rank], like=own_part))
        if len(contributions) == 1:
            return
        # Add up in the memory of the first contribution. own_part may be among the later contributions, so it
        # must not be overwritten before the last addition.
        total, *middle, last = contributions
        for contribution in middle:
            total.add_(contribution)
        torch.add(total, last, out=own_part)

    def _codec_of(self, part: torch.Tensor) -> Codec:
        """Return the codec that compresses a part; PLAIN if it does not apply to the part's dtype."""
        if part.numel() and self.codec.applies(part.dtype):
            return self.codec
        return PLAIN

    def _encode(self, part: torch.Tensor, tag: int, residuals: ResidualMap | None) -> torch.Tensor:
        """Compress a part of a tensor for sending; with error feedback, update its rounding errors."""
        codec = self._codec_of(part)
        if not codec.feedback:
            residuals = None
        key = (tag, int(part.storage_offset()))
        return codec.encode(part, residual_of(residuals, key, part))

    def _receive_buffer(
        self, part: torch.Tensor, tag: int, number: int, sender: int
    ) -> torch.Tensor:
        """Return a buffer for another rank's encoded values of a part.

        Without compression (PLAIN), the buffer is kept for later calls. A new buffer would be slow:
        the first access to its memory takes as long as adding up the received values.

        Args:
            part: The part that is received.
            tag: Tag of the messages.
            number: Number of the tensor among those that are exchanged together.
            sender: Rank that sends the values.
        """
        codec = self._codec_of(part)
        if codec is not PLAIN:
            return codec.buffer(part)
        key = (tag, number, sender, part.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < part.numel():
            buffer = torch.empty_like(part)
            self._buffers[key] = buffer
        return buffer[: part.numel()]

    def _other_owners(self, tensor: DividedTensor) -> list[int]:
        """Return the other ranks that own parts of a tensor, beginning with the next after this rank.

        Each rank begins elsewhere, so that not all ranks send to the same rank first.
        """
        owners = list(tensor.owners)
        position = owners.index(self._rank)
        return owners[position + 1 :] + owners[:position]
