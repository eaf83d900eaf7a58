"""Sends the messages between two pipeline stages over the fastest network that both stages have.

megatron-core sends all messages between stages over one process group, the pipeline group. If the pipeline
spans several clusters, that group uses Ethernet, even between two stages that share InfiniBand. Therefore
this module gives each pair of neighbouring stages a process group of its own.

megatron-core starts messages by one of two functions, and this module wraps both:

    _batched_p2p_ops    all messages of a rank as one batch
    _p2p_ops            each send and each receive by itself (unbatched)

If megatron-stage-links is on (stage_links.py), the messages of training steps do not pass through these
functions, but through a mailbox: an object that sends without waiting. The mailbox has two groups for
each pair of stages, one for activations and one for gradients. Messages of evaluation then use the group
of activations.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.patches.megatron.features import P2P, P2P_MODULE, STAGE_LINKS
from holmes_ext.plan.plan import pair_needs_group
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups import mailbox
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.pairs import pair_group, pair_groups

PAIR_SIZE = 2  # ranks in the group of two neighbouring pipeline stages

#: Order in which megatron-core's _p2p_ops starts messages, at even and at odd positions in the pipeline. Of
#: two neighbours one is at an even position: while it starts a send, the other starts the matching receive.
_ORDER_AT_EVEN_POSITIONS = ("send_next", "recv_prev", "send_prev", "recv_next")
_ORDER_AT_ODD_POSITIONS = ("recv_prev", "send_next", "recv_next", "send_prev")


@dataclass
class _NeighbourGroups:
    """Process groups for this rank's messages to and from its neighbouring pipeline stages."""

    #: Rank of a neighbour -> group of this rank and the neighbour. If a neighbour is missing, its messages
    #: use the pipeline group.
    by_peer: dict[int, Any] = field(default_factory=dict)
    #: With two stages: a second group of the two ranks, for unbatched messages from the second stage.
    second_group: Any = None


#: Pipeline group -> this rank's groups for its neighbours.
_neighbour_groups: weakref.WeakKeyDictionary[Any, _NeighbourGroups] = weakref.WeakKeyDictionary()
#: Pipeline group -> this rank's mailbox, which sends without waiting and posts receives in advance.
_mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()


def mailbox_of(pipeline_group: Any) -> Mailbox:
    """Return this rank's mailbox, which sends messages to neighbouring pipeline stages without waiting.

    The first call for a pipeline group makes the mailbox and its process groups. All ranks of the pipeline
    group must make that call.
    """
    if pipeline_group not in _mailboxes:
        ranks = group_ranks(pipeline_group)
        this_rank = ranks[pipeline_group.rank()]
        stage_of_rank = {rank: stage for stage, rank in enumerate(ranks)}
        pairs = zip(ranks, ranks[1:])  # of neighbouring stages
        # of_pairs() makes the process groups. They get the settings of the pipeline group, e.g. the timeout.
        _mailboxes[pipeline_group] = mailbox.of_pairs(
            pairs, this_rank, stage_of_rank, pipeline_group
        )
    return _mailboxes[pipeline_group]


def neighbour_groups_of(pipeline_group: Any) -> _NeighbourGroups:
    """Return the process groups for this rank's messages to and from neighbouring pipeline stages.

    The first call for a pipeline group makes the process groups. All ranks of the pipeline group must make
    that call.

    Returns:
        An empty _NeighbourGroups() if all messages use the pipeline group itself, as without holmes.
    """
    if pipeline_group not in _neighbour_groups:
        current = session.active()
        if current is None:  # holmes is off
            groups = _NeighbourGroups()  # empty: the pipeline group is used
        else:
            groups = _make_neighbour_groups(current, pipeline_group)
        _neighbour_groups[pipeline_group] = groups
    return _neighbour_groups[pipeline_group]


def _make_neighbour_groups(current: session.Session, pipeline_group: Any) -> _NeighbourGroups:
    """Make the process groups for this rank's messages to and from neighbouring pipeline stages.

    Returns:
        One of:

        - by_peer: a group of this rank and each neighbour. A group of two ranks can use a faster
          network than the pipeline group, which needs one that connects all stages. The mailbox,
          which sends messages in the background, also has such groups.
        - second_group: with two stages, a group for the second stage's messages
        - no groups: all messages use the pipeline group itself, e.g. because it uses the fastest
          network
    """
    ranks = group_ranks(pipeline_group)  # one on each stage
    network_api = network_api_of(backend_of(pipeline_group))
    if len(ranks) <= 1 or current.rank not in ranks:
        return _NeighbourGroups()  # no groups
    if not network_api:  # a backend that chooses its networks itself, such as MPI
        return _NeighbourGroups()
    mailbox_is_used = registry().is_on(STAGE_LINKS.name) and not _is_schedule_interleaved()
    if mailbox_is_used:
        return _NeighbourGroups(by_peer=mailbox_of(pipeline_group).by_peer)  # has groups already
    if len(ranks) > PAIR_SIZE:
        return _NeighbourGroups(by_peer=pair_groups(current, pipeline_group))

    # With two stages, the pipeline group has only this pair, so by_peer is not needed. But
    # megatron-core uses the pipeline group for messages of the first stage only. It sends unbatched
    # messages of the second stage in the group of all ranks, whose network can be slower. A second
    # group of the pair replaces that group, if the pair has a faster network.
    all_ranks = range(current.plan.world_size)
    if pair_needs_group(current.plan, ranks, all_ranks, network_api):
        # "pipeline twin" tells this group from the pipeline group, which has the same two ranks.
        second_group = pair_group(ranks, "pipeline twin", pipeline_group)
        return _NeighbourGroups(second_group=second_group)
    return _NeighbourGroups()


def _is_schedule_interleaved() -> bool:
    """Return whether each pipeline stage has several chunks of layers (interleaved schedule)."""
    from megatron.core import parallel_state

    return (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1


@by_name
def _start_batch_with_each_neighbour(
    call: Call, instance: Any, group: Any, prev_pipeline_rank: Any, next_pipeline_rank: Any
) -> Any:
    """Start the messages of each neighbouring pipeline stage as a batch in the group of this pair of stages.

    This wrapper runs in place of megatron-core's _batched_p2p_ops, which starts the messages of both
    neighbours as one batch over the pipeline group. A batch runs over a single group, and each neighbour has
    a group of its own. Therefore call(), the original function, runs twice: once without the tensors of the
    previous stage, once without the tensors of the next stage.

    Ranks at even positions in the pipeline start with the next stage, ranks at odd positions with the
    previous stage. Thus two neighbours start their common batch at the same time.

    Args:
        group: The pipeline group.
        prev_pipeline_rank: Rank of the previous stage.
        next_pipeline_rank: Rank of the next stage.

    Returns:
        The requests of both batches.
    """
    groups = neighbour_groups_of(group)
    if not groups.by_peer:  # the pipeline group itself uses the fastest network
        return call()

    # call() takes the caller's arguments, but those that are given here replace them.
    def exchange_with_previous() -> Any:
        group_of_pair = groups.by_peer.get(prev_pipeline_rank, group)
        return call(tensor_send_next=None, tensor_recv_next=None, group=group_of_pair)

    def exchange_with_next() -> Any:
        group_of_pair = groups.by_peer.get(next_pipeline_rank, group)
        return call(tensor_send_prev=None, tensor_recv_prev=None, group=group_of_pair)

    is_at_odd_position = group.rank() % 2 == 1
    if is_at_odd_position:
        return [*exchange_with_previous(), *exchange_with_next()]
    return [*exchange_with_next(), *exchange_with_previous()]


@by_name
def _start_each_in_pair_group(
    call: Call,
    instance: Any,
    tensor_send_prev: Any,
    tensor_recv_prev: Any,
    tensor_send_next: Any,
    tensor_recv_next: Any,
    group: Any,
    prev_pipeline_rank: Any,
    next_pipeline_rank: Any,
) -> Any:
    """Start each send and receive in the process group of its pair of pipeline stages.

    This wrapper runs in place of megatron-core's _p2p_ops, which starts the same messages in the same order
    over the pipeline group. Tensors to send are replaced by views of them: see _view_to_send.

    Returns:
        The requests, by names like "send_next".
    """
    tensor_send_prev = _view_to_send(tensor_send_prev)
    tensor_send_next = _view_to_send(tensor_send_next)
    groups = neighbour_groups_of(group)
    pipeline_group_suffices = not groups.by_peer and groups.second_group is None
    if pipeline_group_suffices:  # it uses the fastest network
        return call(tensor_send_prev=tensor_send_prev, tensor_send_next=tensor_send_next)

    # This raises if a later megatron-core passes arguments that this wrapper does not have.
    call.refuse_unread_arguments()
    import torch.distributed as dist

    tensors = {
        "send_prev": tensor_send_prev,
        "recv_prev": tensor_recv_prev,
        "send_next": tensor_send_next,
        "recv_next": tensor_recv_next,
    }
    is_at_odd_position = group.rank() % 2 == 1
    order = _ORDER_AT_ODD_POSITIONS if is_at_odd_position else _ORDER_AT_EVEN_POSITIONS
    requests = {}
    for name in order:
        tensor = tensors[name]
        if tensor is None:
            continue
        direction, side = name.split("_")
        peer = prev_pipeline_rank if side == "prev" else next_pipeline_rank
        is_send = direction == "send"
        message_group = _group_of_message(groups, group, peer, is_send)
        if is_send:
            requests[name] = dist.isend(tensor, peer, group=message_group)
        else:
            requests[name] = dist.irecv(tensor, peer, group=message_group)
    return requests


def _view_to_send(tensor: Any) -> Any:
    """Return a view of a tensor. The view keeps the memory from being used again while it is sent.

    megatron-core frees an output after it has started to send it, by `output.data = ...`
    (deallocate_pipeline_outputs). torch's newer NCCL backend, the default since torch 2.15, keeps the tensor
    object until the message has been sent, but this object has no longer the memory that NCCL reads. A view
    is another tensor object, and keeps the memory.

    Args:
        tensor: The activation or gradient; None if there is nothing to send.
    """
    return None if tensor is None else tensor.detach()


def _group_of_message(
    groups: _NeighbourGroups, pipeline_group: Any, peer: int, is_send: bool
) -> Any:
    """Choose the process group for one unbatched message between this rank and a neighbouring stage.

    With two stages, each direction has a group, so that the two directions do not wait for each other. The
    first stage sends in the pipeline group, and the second stage in a second group of the same two ranks.

    Args:
        groups: This rank's groups for its neighbours.
        peer: Rank of the neighbour.
        is_send: True if this rank is the sender.
    """
    if groups.second_group is None:
        return groups.by_peer.get(peer, pipeline_group)
    is_second_stage = pipeline_group.rank() == 1
    if is_send:
        sender_is_second_stage = is_second_stage
    else:  # the other one of the two stages sends
        sender_is_second_stage = not is_second_stage
    return groups.second_group if sender_is_second_stage else pipeline_group


#: Parameters that _p2p_ops and _batched_p2p_ops must have: wrappers of these functions read or replace them.
PARAMETERS = (
    "tensor_send_prev",
    "tensor_recv_prev",
    "tensor_send_next",
    "tensor_recv_next",
    "group",
    "prev_pipeline_rank",
    "next_pipeline_rank",
)

PATCHES = (
    Patch(
        P2P,
        f"{P2P_MODULE}:_batched_p2p_ops",
        "a pipeline group that spans clusters uses Ethernet, also between two stages of one cluster",
        _start_batch_with_each_neighbour,
        parameters=PARAMETERS,
    ),
    Patch(
        P2P,
        f"{P2P_MODULE}:_p2p_ops",
        "the same for unbatched messages; with two stages, one direction uses the group of all ranks",
        _start_each_in_pair_group,
    ),
)
