"""Gives process groups that lose or replace members in a running job the planned network.

A program calls these functions of torch to continue after a rank is lost, or to replace ranks:

    shrink_group    Makes a new group from the remaining members of a group. The patch gives the new group the
                    network that holmes's plan assigns to these members.
    _reconfigure    Replaces the communicator of an existing group by one with other members. It needs
                    torch 2.14 and init_process_group(..., enable_reconfigure=True). The group keeps its
                    network.

Both patches add the changed group to Session.groups, the list from which holmes reports groups and networks.

Two numberings of ranks: When the default group loses a member, torch renumbers its remaining ranks from 0
without gaps. The plan keeps the ranks of the job's start, called planned ranks here. While the two numberings
differ, holmes cannot look up the network of a new group: new_group and split_group end the job.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import CHANGED_GROUPS
from holmes_ext.patches.torch.groups import communicator_name, planned_nccl_options, record_group
from holmes_ext.runtime.backend import backend_of, group_ranks, options_of, traits_of
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.groups.transport import gloo_interface
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.watch import nccl_errors

_C10D = "torch.distributed.distributed_c10d"
#: UUID in torch's handle of a process whose group has not been reconfigured yet.
_NO_UUID = -1
#: Fields at the beginning of a handle: backend, rank, UUID.
_MIN_HANDLE_FIELDS = 3


class _Membership(NamedTuple):
    """Members of a process group from one reconfiguration to the next.

    A reconfiguration gives the group other members.
    """

    uuid: int  # identifies the communicator; chosen by the program, _NO_UUID before any reconfiguration
    planned_ranks: tuple[int, ...]  # planned rank of the member with group rank 0, 1, ...


#: Process group -> its members since the last reconfiguration.
_memberships: weakref.WeakKeyDictionary[Any, _Membership] = weakref.WeakKeyDictionary()
#: Starts of the job (values of Session.key_prefix) whose ranks in torch now differ from the planned ranks.
_renumbered_rounds: set[str] = set()


@with_session
@by_name
def _shrink_group_with_planned_network(
    current: Session,
    call: Call,
    instance: Any,
    ranks_to_exclude: Collection[int],
    group: Any = None,
    pg_options: Any = None,
) -> Any:
    """Shrink a process group, and give the new group the network that the plan assigns to it.

    Runs instead of torch.distributed.shrink_group; `call()` runs the original.

    Args:
        ranks_to_exclude: Ranks within the group that leave it.
        group: The group; None for the default group.
        pg_options: The program's options for the new group, or None.
    """
    import torch.distributed as dist

    parent: Any = group or dist.group.WORLD
    is_default_group = parent is dist.group.WORLD
    # `ranks_to_exclude` has ranks within the group. The plan needs global ranks.
    global_ranks = group_ranks(parent)
    remaining = tuple(
        global_rank
        for group_rank, global_rank in enumerate(global_ranks)
        if group_rank not in ranks_to_exclude
    )
    if current.rank not in remaining:
        return call()  # torch raises an error: an excluded rank must not call shrink_group
    description = _description_of(parent)
    backend = backend_of(parent)
    if traits_of(backend).is_nccl:
        pg_options = planned_nccl_options(
            current,
            remaining,
            backend,
            pg_options,
            timeout=None,
            name=communicator_name(current, remaining, description),
            parent_options=options_of(parent),
        )
    shrunk_group = call(pg_options=pg_options)  # also destroys `parent`
    record_group(
        current, f"{description or parent.group_name}:shrunk", remaining, backend, pg_options
    )
    if is_default_group:
        _update_renumbered_rounds(current, remaining)
    return shrunk_group


def _description_of(group: Any) -> str:
    """Return the description that the program gave a process group; "" if it gave none."""
    if group.group_desc == "undefined":  # torch's default
        return ""
    return group.group_desc


@with_session
@by_name
def _reconfigure_and_record_group(
    current: Session,
    call: Call,
    instance: Any,
    uuid: int,
    handles: Collection[str],
    group: Any = None,
) -> Any:
    """Reconfigure a process group, and add it to the job's report if its members have changed.

    Runs instead of torch.distributed._reconfigure; `call()` runs the original: it replaces the
    group's communicator by one with other members.

    The report (Session.groups) lists the members by the ranks that they had at the job's start. The
    plan uses these numbers, too. torch numbers the members of the reconfigured group anew, from 0.

    Args:
        uuid: Identifies the new communicator; chosen by the program.
        handles: torch's texts that identify the new members: each has the former rank of the
            member.
        group: The group; None for the default group.
    """
    import torch.distributed as dist

    changed_group: Any = group or dist.group.WORLD
    # torch's list of a group's ranks is not changed by reconfigurations: it has the original members.
    original_ranks = tuple(group_ranks(changed_group))
    original = _Membership(uuid=_NO_UUID, planned_ranks=original_ranks)
    former = _memberships.get(changed_group, original)  # members until now
    new_ranks = _new_planned_ranks(handles, former, original_ranks)

    # The group keeps its network: a gloo communicator is again made on the interface that the plan assigns to
    # the original members (GLOO_SOCKET_IFNAME). Other backends do not read this variable.
    with gloo_interface(current.transport(original_ranks, "gloo")):
        work = call()

    # The program may have aborted the former communicator. Failures of the new one must be reported.
    nccl_errors.unmark_aborted_by_program(changed_group)
    if new_ranks is None:  # this process has just started, and cannot know the other members
        return work
    _memberships[changed_group] = _Membership(uuid=uuid, planned_ranks=new_ranks)
    if new_ranks != former.planned_ranks:
        name = f"{_description_of(changed_group)}:reconfigured"
        record_group(current, name, new_ranks, backend_of(changed_group), options_of(changed_group))
        if changed_group is dist.group.WORLD:
            _update_renumbered_rounds(current, new_ranks)
    return work


def _new_planned_ranks(
    handles: Collection[str], former: _Membership, original_ranks: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Translate members of a reconfigured group into the ranks that they had at the job's start.

    A member's rank at the job's start is called its planned rank, because the plan uses it.

    torch describes each new member by a handle "BACKEND:RANK:UUID:...". RANK is an index in one of
    two lists of planned ranks. UUID says in which one:

    - The UUID of the group's last reconfiguration: former.planned_ranks, the members since then.
    - -1: original_ranks, the first members. The member's process has just started.

    For example, rank 1 of the planned ranks (0, 1, 2, 3) has left, so former.planned_ranks is
    (0, 2, 3). A handle with RANK 1 and the UUID of that change is the member with planned rank 2.

    Args:
        handles: Handles of the new members. A list is in the order of the new ranks. A set has no
            order: torch sorts it, and so does this function.
        former: Members since the last reconfiguration, with its UUID.
        original_ranks: Planned ranks of the group's first members, when the program made it.

    Returns:
        Planned rank of the member with new group rank 0, 1, ... None if a handle has another UUID.
        This happens in a process that has just started, because it does not know the former
        members.
    """
    is_set = isinstance(handles, (set, frozenset))
    ordered_handles = sorted(handles) if is_set else list(handles)
    planned_ranks = []
    for handle in ordered_handles:
        fields = handle.split(":")
        if len(fields) < _MIN_HANDLE_FIELDS:
            return None  # a malformed handle: torch raises an error
        group_rank = int(fields[1])  # former rank within the group: the index in the list
        uuid = int(fields[2])
        if uuid == former.uuid:
            planned_by_group_rank = former.planned_ranks
        elif uuid == _NO_UUID:
            planned_by_group_rank = original_ranks
        else:
            return None
        planned_ranks.append(planned_by_group_rank[group_rank])
    return tuple(planned_ranks)


def _update_renumbered_rounds(current: Session, default_group_ranks: tuple[int, ...]) -> None:
    """Record whether torch's ranks now differ from the planned ranks, those of the job's start.

    Called after the default group has changed. When a member has left, torch numbers the remaining
    members from 0 without gaps. While the two numberings differ, new process groups are refused:
    the plan has no network for them.

    The record is the set _renumbered_rounds. A round is one start of the job by the launcher. A
    restart begins a new round, and both numberings agree again.

    Args:
        default_group_ranks: Planned ranks of the default group's new members, ordered by torch's
            new rank. For example, (0, 2) after rank 1 of three has left: torch's ranks are 0 and 1.
    """
    # current.key_prefix identifies this start of the job: after a restart, torch's ranks are the planned
    # ones.
    torch_ranks = tuple(range(len(default_group_ranks)))
    if default_group_ranks == torch_ranks:
        _renumbered_rounds.discard(current.key_prefix)
    else:
        _renumbered_rounds.add(current.key_prefix)


@with_session
@by_name
def _make_group_unless_renumbered(
    current: Session, call: Call, instance: Any, global_ranks_in_group: Any
) -> Any:
    """Make a process group, or raise an error if torch has renumbered the job's ranks.

    Runs instead of torch's _new_process_group_helper; `call()` runs the original.

    When the default group loses a member, torch numbers the remaining ranks anew. holmes's plan
    assigns networks to ranks by their numbers at the job's start. Therefore the plan has no network
    for a group of renumbered ranks. A new default group is always made.

    Raises:
        HolmesError: torch's ranks differ from those of the job's start.
    """
    is_default_group = not global_ranks_in_group
    if not is_default_group:  # a new default group is always allowed: it has all planned ranks
        _raise_if_renumbered(current)
    return call()


@with_session
@by_name
def _split_group_unless_renumbered(current: Session, call: Call, instance: Any) -> Any:
    """Split a process group, or raise an error if torch has renumbered the job's ranks.

    Runs instead of torch.distributed.split_group; `call()` runs the original.

    When the default group loses a member, torch numbers the remaining ranks anew. holmes's plan
    assigns networks to ranks by their numbers at the job's start. Therefore the plan has no network
    for a group of renumbered ranks.

    Raises:
        HolmesError: torch's ranks differ from those of the job's start.
    """
    _raise_if_renumbered(current)
    return call()


def _raise_if_renumbered(current: Session) -> None:
    """Raise an error if torch's ranks differ from those of the job's start, which the plan uses.

    Raises:
        HolmesError: the default process group has lost or replaced members, so torch has renumbered
            the ranks. The plan has no network for a new group of renumbered ranks.
    """
    if current.key_prefix not in _renumbered_rounds:
        return
    # Every rank raises this error. told_once() lets one of them print the message.
    raise told_once(
        HolmesError(
            "the default process group has lost ranks, and torch has numbered the others anew, so the plan "
            "has no network for a new group; start the job again on the remaining nodes, or run without "
            "--holmes"
        )
    )


PATCHES = (
    Patch(
        CHANGED_GROUPS,
        f"{_C10D}:shrink_group",
        "the backend makes a shrunk group without _new_process_group_helper",
        _shrink_group_with_planned_network,
        only=">=2.10",
    ),
    Patch(
        CHANGED_GROUPS,
        f"{_C10D}:_reconfigure",
        "the group gets other members, but torch's list of its ranks does not change",
        _reconfigure_and_record_group,
        only=">=2.14",
    ),
    Patch(
        CHANGED_GROUPS,
        f"{_C10D}:_new_process_group_helper",
        "after a change of the default group, ranks have other numbers than in the plan",
        _make_group_unless_renumbered,
        only=">=2.10",
    ),
    Patch(
        CHANGED_GROUPS,
        f"{_C10D}:split_group",
        "after a change of the default group, ranks have other numbers than in the plan",
        _split_group_unless_renumbered,
        only=">=2.10",
    ),
)
