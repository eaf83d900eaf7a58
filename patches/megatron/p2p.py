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
    """by_peer: neighbour's rank -> the pair's group; twin: see the module's text."""

    by_peer: dict[int, Any] = field(default_factory=dict)
    twin: Any = None


#: Of each pipeline group.
_made: weakref.WeakKeyDictionary[Any, _Pairs] = weakref.WeakKeyDictionary()
_boxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()


def mailbox_of(group: Any) -> Mailbox:
    """Of a pipeline group, whose ranks all come here; pairs in the same order everywhere."""
    if group not in _boxes:
        ranks = group_ranks(group)
        stages = {rank: stage for stage, rank in enumerate(ranks)}
        _boxes[group] = mailbox.of_pairs(zip(ranks, ranks[1:]), ranks[group.rank()], stages, group)
    return _boxes[group]


def pairs_of(group) -> _Pairs:
    """This rank's in a pipeline group. Made on the first call, which all of the group's ranks must reach."""
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
    """Whether stages have several chunks: then the schedule is not the one that edges.py carries."""
    from megatron.core import parallel_state

    return (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1) > 1


@by_name
def _batched(call, instance, group, prev_pipeline_rank, next_pipeline_rank):
    """One batch for each neighbour that has a group of its own: a batch has one communicator."""
    by_peer = pairs_of(group).by_peer
    if not by_peer:
        return call()
    requests = []
    peers = {"next": next_pipeline_rank, "prev": prev_pipeline_rank}
    # even ranks start with their next, odd ones with their previous: each pair at once, also in a ring
    sides = ("prev", "next") if group.rank() % 2 else ("next", "prev")
    for side, other in (sides, sides[::-1]):
        tensors_of_other = {f"tensor_send_{other}": None, f"tensor_recv_{other}": None}
        requests += call(**tensors_of_other, group=by_peer.get(peers[side], group))
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
    """The framework's operations in its order, each over the pair's group."""
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

    odd, requests = group.rank() % 2, {}
    start = {"send": dist.isend, "recv": dist.irecv}
    for name in _ORDER[odd]:
        direction, side = name.split("_")
        tensor, peer = tensors[name], peers[side]
        if tensor is None:
            continue
        from_odd = odd == (direction == "send")  # with two stages each direction has its group
        over = pairs.by_peer.get(peer, pairs.twin if pairs.twin is not None and from_odd else group)
        requests[name] = start[direction](tensor, peer, group=over)
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
