"""megatron-core's pipeline send and receive under a plan: every pair of stages on the fastest fabric that the
two share (runtime/groups/members.py), not over the pipeline group, which crosses clusters by Ethernet.

Where edges.py carries the messages of training, its groups (two for each pair) carry those of evaluation too.
With two stages the pipeline group is the pair. But unbatched p2p then sends one direction over the world
group, which may be on a slower fabric than the pair: it gets a twin of the pipeline group instead."""

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

#: megatron-core's order of unbatched operations, by parity of the pipeline rank: sends meet their receives.
_ORDER = (("send_next", "recv_prev", "send_prev", "recv_next"),
          ("recv_prev", "send_next", "recv_next", "send_prev"))


@dataclass
class _Pairs:
    """This rank's process groups for messages to neighbouring stages, in one pipeline group."""

    by_peer: dict[int, Any] = field(default_factory=dict)  # the neighbour's rank -> the pair's group
    twin: Any = None  # with two stages: a second group of the same ranks, for unbatched p2p


#: Pipeline group -> this rank's groups for its neighbours.
_made: weakref.WeakKeyDictionary[Any, _Pairs] = weakref.WeakKeyDictionary()
#: Pipeline group -> its mailbox.
_boxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()


def mailbox_of(group: Any) -> Mailbox:
    """Return the mailbox of a pipeline group; the first call makes it, a collective over the group."""
    if group not in _boxes:
        ranks = group_ranks(group)
        stages = {rank: stage for stage, rank in enumerate(ranks)}
        _boxes[group] = mailbox.of_pairs(zip(ranks, ranks[1:]), ranks[group.rank()], stages, group)
    return _boxes[group]


def pairs_of(group) -> _Pairs:
    """Return this rank's groups for its neighbours. The first call, by all ranks of the group, makes them."""
    current = session.active()
    if group not in _made:
        _made[group] = _make(current, group) if current is not None else _Pairs()
    return _made[group]


def _make(current: session.Session, group) -> _Pairs:
    ranks, network_api = group_ranks(group), network_api_of(backend_of(group))
    if len(ranks) < 2 or current.rank not in ranks or not network_api:
        return _Pairs()
    if registry().is_on(EDGES.name) and not _interleaved():
        return _Pairs(mailbox_of(group).by_peer)
    if len(ranks) == 2 and pair_needs_group(current.plan, ranks, range(current.plan.world_size), network_api):
        return _Pairs(twin=pair_group(ranks, "pipeline twin", group))
    return _Pairs(pair_groups(current, group))


def _interleaved() -> bool:
    """Return whether stages have several chunks of layers, which edges.py's schedule does not support."""
    from megatron.core import parallel_state

    return (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1


@by_name
def _batched(call, instance, group, prev_pipeline_rank, next_pipeline_rank):
    """Exchange tensors with the previous and the next stage in two batches, each over the pair's own group.

    megatron-core's _batched_p2p_ops starts the messages to both neighbours as one batch over the pipeline
    group. A batch has a single communicator, therefore two groups need two batches.

    Ranks at even positions in the pipeline start with the next stage, the others with the previous one. Thus
    both ends of a pair start the same batch, also in a ring.

    Returns:
        The requests of both batches.
    """
    by_peer = pairs_of(group).by_peer
    if not by_peer:
        return call()
    peers = {"next": next_pipeline_rank, "prev": prev_pipeline_rank}
    is_odd = group.rank() % 2 == 1
    sides = ("prev", "next") if is_odd else ("next", "prev")
    requests = []
    for side in sides:
        other_side = "prev" if side == "next" else "next"
        without_other_side = {f"tensor_send_{other_side}": None, f"tensor_recv_{other_side}": None}
        requests += call(**without_other_side, group=by_peer.get(peers[side], group))
    return requests


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
    """Start each send and receive over the group of its pair of stages.

    megatron-core's _p2p_ops starts the same operations, in the same order, over the pipeline group. The order
    depends on whether the position in the pipeline is even or odd, so that sends meet their receives.

    With two stages the pipeline group is the pair's, and messages from even and from odd positions need
    different groups: those from odd ones go over the twin of the pipeline group.

    Returns:
        The requests, by names like "send_next".
    """
    pairs = pairs_of(group)
    if not pairs.by_peer and pairs.twin is None:
        return call()
    call.refuse_unknown()
    import torch.distributed as dist

    tensors = {
        "send_prev": tensor_send_prev,
        "recv_prev": tensor_recv_prev,
        "send_next": tensor_send_next,
        "recv_next": tensor_recv_next,
    }
    peers = {"next": next_pipeline_rank, "prev": prev_pipeline_rank}
    functions = {"send": dist.isend, "recv": dist.irecv}
    parity = group.rank() % 2
    is_odd = parity == 1

    requests = {}
    for name in _ORDER[parity]:
        tensor = tensors[name]
        if tensor is None:
            continue
        direction, side = name.split("_")
        sender_is_odd = is_odd == (direction == "send")  # neighbours have different parities
        if pairs.twin is not None and sender_is_odd:
            default_group = pairs.twin
        else:
            default_group = group
        message_group = pairs.by_peer.get(peers[side], default_group)
        requests[name] = functions[direction](tensor, peers[side], group=message_group)
    return requests


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
