"""Sends megatron-core's messages between pipeline stages over the fastest network that both stages have.

megatron-core sends all messages between stages over one process group, the pipeline group. If the pipeline
spans several clusters, that group uses Ethernet, also between two stages that share InfiniBand. Therefore
each pair of neighbouring stages gets a group of its own here. megatron-core starts its messages in two ways:

    batched      all messages of a rank as one batch, by _batched_p2p_ops
    unbatched    each send and receive by itself, by _p2p_ops

If edges.py runs the training steps, its mailbox has two groups for each pair of stages, one for activations
and one for gradients. The messages of evaluation, which the mailbox does not send, then use the former."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.megatron.features import EDGES, P2P, P2P_MODULE
from holmes_ext.plan.decisions import pair_needs_group
from holmes_ext.runtime import session
from holmes_ext.runtime.groups import mailbox
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.members import pair_group, pair_groups

#: Order in which megatron-core's _p2p_ops starts messages, by the rank's position in the pipeline. With these
#: two orders, a rank starts a send while its neighbour starts the matching receive.
_ORDER_AT_EVEN_POSITIONS = ("send_next", "recv_prev", "send_prev", "recv_next")
_ORDER_AT_ODD_POSITIONS = ("recv_prev", "send_next", "recv_next", "send_prev")


@dataclass
class _NeighbourGroups:
    """This rank's process groups for messages to neighbouring stages, in place of one pipeline group."""

    #: Rank of a neighbour -> group of the two ranks. A neighbour that is missing is reached by the pipeline
    #: group.
    by_peer: dict[int, Any] = field(default_factory=dict)
    #: With two stages: a second group of the same ranks, for unbatched messages that the second stage sends.
    second_group: Any = None


#: Pipeline group -> this rank's groups for its neighbours.
_neighbour_groups: weakref.WeakKeyDictionary[Any, _NeighbourGroups] = weakref.WeakKeyDictionary()
#: Pipeline group -> this rank's mailbox, which sends without waiting and posts receives in advance.
_mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()


def mailbox_of(pipeline_group: Any) -> Mailbox:
    """Return this rank's mailbox for its neighbours in a pipeline group.

    The first call makes the mailbox and its process groups. All ranks of the pipeline group must make that
    call.
    """
    if pipeline_group not in _mailboxes:
        ranks = group_ranks(pipeline_group)
        own_rank = ranks[pipeline_group.rank()]
        stage_of_rank = {rank: stage for stage, rank in enumerate(ranks)}
        neighbours = zip(ranks, ranks[1:])
        _mailboxes[pipeline_group] = mailbox.of_pairs(neighbours, own_rank, stage_of_rank, pipeline_group)
    return _mailboxes[pipeline_group]


def neighbour_groups_of(pipeline_group: Any) -> _NeighbourGroups:
    """Return this rank's groups for its neighbours in a pipeline group.

    The first call makes these groups. All ranks of the pipeline group must make that call.
    """
    if pipeline_group not in _neighbour_groups:
        current = session.active()
        if current is None:
            groups = _NeighbourGroups()
        else:
            groups = _make_neighbour_groups(current, pipeline_group)
        _neighbour_groups[pipeline_group] = groups
    return _neighbour_groups[pipeline_group]


def _make_neighbour_groups(current: session.Session, pipeline_group: Any) -> _NeighbourGroups:
    """Make this rank's groups for its neighbours in a pipeline group, if the plan needs any."""
    ranks = group_ranks(pipeline_group)
    network_api = network_api_of(backend_of(pipeline_group))
    if len(ranks) < 2 or current.rank not in ranks:
        return _NeighbourGroups()
    if not network_api:  # a backend that chooses its networks itself, such as MPI
        return _NeighbourGroups()
    mailbox_is_used = registry().is_on(EDGES.name) and not _interleaved()
    if mailbox_is_used:
        return _NeighbourGroups(by_peer=mailbox_of(pipeline_group).by_peer)
    if len(ranks) > 2:
        return _NeighbourGroups(by_peer=pair_groups(current, pipeline_group))
    # The pipeline group is the pair of stages. megatron-core sends unbatched messages in the two directions
    # over two groups, of which the second is the group of all ranks. Its network can be slower than the
    # pair's.
    if pair_needs_group(current.plan, ranks, range(current.plan.world_size), network_api):
        second_group = pair_group(ranks, "pipeline twin", pipeline_group)
        return _NeighbourGroups(second_group=second_group)
    return _NeighbourGroups()


def _interleaved() -> bool:
    """Return whether each stage has several chunks of layers, a schedule that edges.py does not support."""
    from megatron.core import parallel_state

    return (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1


@by_name
def _batched(call, instance, group, prev_pipeline_rank, next_pipeline_rank):
    """Start the messages to and from the next stage as one batch, those of the previous stage as another.

    megatron-core's _batched_p2p_ops starts the messages of both neighbours as one batch over the pipeline
    group. A batch runs over a single group, and each neighbour has a group of its own here. Therefore the
    wrapped function is called twice: once without the tensors for one neighbour, once without those for the
    other.

    Ranks at even positions in the pipeline start with the next stage, ranks at odd positions with the
    previous one. Thus an even and an odd neighbour start their common batch at the same time.

    Returns:
        The requests of both batches.
    """
    groups = neighbour_groups_of(group)
    if not groups.by_peer:
        return call()

    def exchange_with_previous():
        pair = groups.by_peer.get(prev_pipeline_rank, group)
        return call(tensor_send_next=None, tensor_recv_next=None, group=pair)

    def exchange_with_next():
        pair = groups.by_peer.get(next_pipeline_rank, group)
        return call(tensor_send_prev=None, tensor_recv_prev=None, group=pair)

    is_at_odd_position = group.rank() % 2 == 1
    if is_at_odd_position:
        return [*exchange_with_previous(), *exchange_with_next()]
    return [*exchange_with_next(), *exchange_with_previous()]


@by_name
def _unbatched(
    call,
    instance,
    tensor_send_prev,
    tensor_recv_prev,
    tensor_send_next,
    tensor_recv_next,
    group,
    prev_pipeline_rank,
    next_pipeline_rank,
):
    """Start each send and receive over the process group of its pair of stages.

    megatron-core's _p2p_ops starts the same sends and receives, in the same order, over the pipeline group.

    With two stages, _p2p_ops sends in one direction over the pipeline group and in the other over the group
    of all ranks, so that the two directions do not wait for each other. Here a second group of the same two
    ranks replaces the group of all ranks, because that one may use a slower network.

    Returns:
        The requests, by names like "send_next".
    """
    groups = neighbour_groups_of(group)
    if not groups.by_peer and groups.second_group is None:
        return call()
    call.refuse_unread_arguments()  # arguments that a later megatron-core adds would have no effect here
    import torch.distributed as dist

    tensors = {
        "send_prev": tensor_send_prev,
        "recv_prev": tensor_recv_prev,
        "send_next": tensor_send_next,
        "recv_next": tensor_recv_next,
    }
    is_at_odd_position = group.rank() % 2 == 1
    order = _ORDER_AT_ODD_POSITIONS if is_at_odd_position else _ORDER_AT_EVEN_POSITIONS

    def group_for(peer, sender_is_at_odd_position):
        if groups.second_group is not None and sender_is_at_odd_position:
            return groups.second_group
        return groups.by_peer.get(peer, group)

    requests = {}
    for name in order:
        tensor = tensors[name]
        if tensor is None:
            continue
        direction, side = name.split("_")
        peer = prev_pipeline_rank if side == "prev" else next_pipeline_rank
        if direction == "send":
            message_group = group_for(peer, sender_is_at_odd_position=is_at_odd_position)
            requests[name] = dist.isend(tensor, peer, group=message_group)
        else:
            # The sender is a neighbour, whose position is even if this rank's is odd.
            message_group = group_for(peer, sender_is_at_odd_position=not is_at_odd_position)
            requests[name] = dist.irecv(tensor, peer, group=message_group)
    return requests


#: Parameters that _p2p_ops and _batched_p2p_ops must have: wrappers of these functions read or replace them.
PARAMETERS = (
    "tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next", "group",
    "prev_pipeline_rank", "next_pipeline_rank",
)  # fmt: skip

PATCHES = (
    Patch(P2P, f"{P2P_MODULE}:_batched_p2p_ops",
          "the pipeline group is on Ethernet as soon as it crosses clusters, for pairs inside a cluster too",
          _batched, parameters=PARAMETERS),
    Patch(P2P, f"{P2P_MODULE}:_p2p_ops",
          "the same for unbatched p2p; with two stages it sends one direction over the world group",
          _unbatched),
)  # fmt: skip
