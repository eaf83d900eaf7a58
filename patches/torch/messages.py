"""Chooses the network of single messages (send, recv, isend, irecv) for torch's backend nccl-lazy.

nccl-lazy (torch 2.14 or newer) makes a separate communicator for each pair of ranks that exchange messages.
torch gives it the network of the whole process group. If the group spans several clusters, this is Ethernet,
also for two ranks of the same cluster. holmes sends such messages over a new process group of the two ranks.
It uses the fastest network that they share.

Batches of messages (batch_isend_irecv) do not use communicators of pairs, and are not changed.
"""

from __future__ import annotations

import weakref
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import NICS
from holmes_ext.runtime.backend import backend_of, group_ranks, traits_of
from holmes_ext.runtime.groups.pairs import pair_group
from holmes_ext.runtime.session import Session

#: Process group -> global rank of a peer -> process group of this rank and the peer; None if their messages
#: stay on the first group. This is decided once for each peer, because a job sends many messages.
_pair_groups: weakref.WeakKeyDictionary[Any, dict[int | None, Any]] = weakref.WeakKeyDictionary()


@with_session
@by_name
def _send_over_pair_group(
    current: Session,
    call: Call,
    instance: Any,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> Any:
    """Send a tensor over a group of two ranks, if these share a faster network than `group`.

    Runs instead of send and isend of torch.distributed; `call()` runs the original.

    Args:
        dst: Global rank of the receiver; None if group_dst is given.
        group: Process group of the message; None for the default group.
        group_dst: Rank of the receiver in `group`.
    """
    peer = _global_rank(group, dst, group_dst)
    pair = _group_of_pair(current, group, peer)
    if pair is None:
        return call()
    return call(dst=peer, group=pair, group_dst=None)


@with_session
@by_name
def _receive_over_pair_group(
    current: Session,
    call: Call,
    instance: Any,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> Any:
    """Receive a tensor over a group of two ranks, if these share a faster network than `group`.

    Runs instead of recv and irecv of torch.distributed; `call()` runs the original.

    Args:
        src: Global rank of the sender; None if group_src is given, or for any sender.
        group: Process group of the message; None for the default group.
        group_src: Rank of the sender in `group`.
    """
    peer = _global_rank(group, src, group_src)
    pair = _group_of_pair(current, group, peer)
    if pair is None:
        return call()
    return call(src=peer, group=pair, group_src=None)


def _global_rank(group: Any, global_rank: int | None, group_rank: int | None) -> int | None:
    """Return the global rank of the peer; None if the program receives from any rank.

    Args:
        global_rank: The peer, as the program names it; None if it gives `group_rank` instead.
        group_rank: The peer's rank in `group`.
    """
    if global_rank is not None or group_rank is None:
        return global_rank
    return group_ranks(group)[group_rank]


def _group_of_pair(current: Session, group: Any, peer: int | None) -> Any:
    """Return the process group of this rank and a peer, to use in place of `group`.

    The group of the two ranks is made at their first message. Both ranks call this function then.

    Args:
        group: The process group over which the program exchanges a message; None for the default group.
        peer: Global rank of the peer; None if this rank receives from any rank.

    Returns:
        None if the messages must stay on `group`.
    """
    import torch.distributed as dist

    group = group or dist.group.WORLD
    groups_by_peer = _pair_groups.setdefault(group, {})
    if peer not in groups_by_peer:
        groups_by_peer[peer] = _new_group_of_pair(current, group, peer)
    return groups_by_peer[peer]


def _new_group_of_pair(current: Session, group: Any, peer: int | None) -> Any:
    """Make the process group of this rank and a peer, if they share a faster network than `group`.

    This is done for torch's backend "nccl-lazy" only. It already sends the messages of two ranks in a
    communicator of these two, but on the network of the whole group. Other backends send them in the
    communicator of the group, as they do without holmes.

    Args:
        peer: Global rank of the peer; None if this rank receives from any rank.

    Returns:
        None if the messages must stay on `group`.
    """
    backend = backend_of(group)
    is_nccl_lazy = traits_of(backend).has_pair_communicators
    if not is_nccl_lazy:
        return None
    if peer is None or peer == current.rank:
        return None  # there is no pair
    pair = (current.rank, peer)
    network_of_pair = current.fabric_of(pair, backend)
    network_of_group = current.fabric_of(group_ranks(group), backend)
    if network_of_pair == network_of_group:
        return None  # torch's own communicator of the pair uses this network, too
    # "messages" is the purpose of the new group, as reports name it. It gets the timeout of `group`.
    return pair_group(pair, "messages", group)


_C10D = "torch.distributed.distributed_c10d"
_REASON = "a communicator of nccl-lazy for two ranks has the network of the whole group"
_SINCE = ">=2.14"

PATCHES = (
    Patch(NICS, f"{_C10D}:send", _REASON, _send_over_pair_group, only=_SINCE),
    Patch(NICS, f"{_C10D}:isend", _REASON, _send_over_pair_group, only=_SINCE),
    Patch(NICS, f"{_C10D}:recv", _REASON, _receive_over_pair_group, only=_SINCE),
    Patch(NICS, f"{_C10D}:irecv", _REASON, _receive_over_pair_group, only=_SINCE),
)
