"""Keeps the planned network of process groups whose members change while the job runs.

A program calls these functions of torch to go on after a rank is lost, or to use other ranks:

    shrink_group   Makes a smaller group from a group, without the ranks that are excluded.
    _reconfigure   Gives the default group a new communicator with other members (torch 2.14 or newer, after
                   init_process_group(..., enable_reconfigure=True)).

The new group is added to the list of groups in the session of holmes. A shrunk group gets the network that
the plan assigns to its ranks. A reconfigured group keeps its network.

If the members of the default group change, torch may number the ranks anew. The plan has the old numbers, so
holmes can choose no network for groups that are made later, and ends the job when one is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import CHANGED_GROUPS
from holmes_ext.patches.torch.groups import _communicator_name, _nccl_options, _record
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, options_of
from holmes_ext.runtime.groups.backend_table import traits_of
from holmes_ext.runtime.groups.transport import gloo_interface
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.refusal import told_once
from holmes_ext.runtime.watch import nccl_errors

_C10D = "torch.distributed.distributed_c10d"
#: torch's number of the communicator of a group that was never reconfigured.
_NO_UUID = -1


class _Generation(NamedTuple):
    """Members of a process group between two reconfigurations."""

    uuid: int  # the program's number of the communicator; _NO_UUID before the first reconfiguration
    ranks: tuple[int, ...]  # the members in the order of the group, numbered as in the plan


#: Process group -> its members since its last reconfiguration.
_generations: weakref.WeakKeyDictionary[Any, _Generation] = weakref.WeakKeyDictionary()
#: Starts of the job (Session.round) in which torch has numbered the ranks anew.
_renumbered_rounds: set[str] = set()


@with_session
@by_name
def _keep_network_of_shrunk_group(current, call, instance, ranks_to_exclude, group=None, pg_options=None):
    """Make a smaller process group, with the network that the plan assigns to the remaining ranks.

    Wrapper of torch.distributed.shrink_group, which `call()` runs.
    """
    import torch.distributed as dist

    parent: Any = group or dist.group.WORLD
    is_default_group = parent is dist.group.WORLD
    # `ranks_to_exclude` lists ranks within the group.
    remaining = tuple(
        rank for position, rank in enumerate(group_ranks(parent)) if position not in ranks_to_exclude
    )
    if current.rank not in remaining:
        return call()  # torch raises an error
    description = _description_of(parent)
    backend = backend_of(parent)
    if traits_of(backend).is_nccl:
        pg_options = _nccl_options(
            current,
            remaining,
            backend,
            pg_options,
            timeout=None,
            name=_communicator_name(current, remaining, description),
            parent_options=options_of(parent),
        )
    shrunk_group = call(pg_options=pg_options)  # also destroys `parent`
    _record(current, f"{description or parent.group_name}:shrunk", remaining, backend, pg_options)
    if is_default_group:
        _note_numbers(current, remaining)
    return shrunk_group


def _description_of(group: Any) -> str:
    """Return the program's description of a process group; "" if the program gave none."""
    if group.group_desc == "undefined":  # torch's default
        return ""
    return group.group_desc


@with_session
@by_name
def _record_reconfigured_group(current, call, instance, uuid, handles, group=None):
    """Give a process group a new communicator, and add it to the session's list if its members have changed.

    Wrapper of torch.distributed._reconfigure, which `call()` runs.
    """
    import torch.distributed as dist

    changed_group: Any = group or dist.group.WORLD
    original_ranks = tuple(group_ranks(changed_group))  # torch does not change them here
    former = _generations.get(changed_group, _Generation(_NO_UUID, original_ranks))
    members = _members_of(handles, former, original_ranks)
    with gloo_interface(current.transport(original_ranks, "gloo")):  # sets GLOO_SOCKET_IFNAME
        work = call()
    nccl_errors.note_reconfiguration(changed_group)
    if members is None:
        return work
    _generations[changed_group] = _Generation(uuid, members)
    if members != former.ranks:
        name = f"{_description_of(changed_group)}:reconfigured"
        _record(current, name, members, backend_of(changed_group), options_of(changed_group))
        if changed_group is dist.group.WORLD:
            _note_numbers(current, members)
    return work


def _members_of(
    handles: Collection[str], former: _Generation, original_ranks: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the new members of a process group that is reconfigured, in the order of the group.

    None is returned if this rank does not know the numbers in a handle, because it was not in the former
    group.

    Args:
        handles: torch's handle of each new member: "BACKEND:RANK:UUID:...", with its rank in the former group
            and the uuid of the former group. The uuid is -1 if the member has just started; RANK is then its
            rank in the original group.
        former: The group before.
        original_ranks: The members with which the program made the group.
    """
    # torch sorts a set; a list has the order of the new group.
    ordered_handles = sorted(handles) if isinstance(handles, (set, frozenset)) else handles
    members = []
    for handle in ordered_handles:
        parts = handle.split(":")
        if len(parts) < 3:
            return None  # torch raises an error
        _backend, rank, uuid, *_rest = parts
        if int(uuid) == former.uuid:
            members.append(former.ranks[int(rank)])
        elif int(uuid) == _NO_UUID:
            members.append(original_ranks[int(rank)])
        else:
            return None
    return tuple(members)


def _note_numbers(current: Session, default_group_ranks: tuple[int, ...]) -> None:
    """Note whether torch's numbers of the ranks still are those of the plan.

    Args:
        default_group_ranks: New members of the default group, by their new rank, numbered as in the plan.
    """
    new_numbers = tuple(range(len(default_group_ranks)))
    if default_group_ranks == new_numbers:
        _renumbered_rounds.discard(current.round)
    else:
        _renumbered_rounds.add(current.round)


@with_session
@by_name
def _refuse_group_after_renumbering(current, call, instance, global_ranks_in_group):
    """Make a process group, or end the job if the plan does not have torch's numbers of the ranks any more.

    Wrapper of torch's _new_process_group_helper, which `call()` runs.
    """
    is_default_group = not global_ranks_in_group
    if not is_default_group:
        _check_numbers(current)
    return call()


@with_session
@by_name
def _refuse_split_after_renumbering(current, call, instance):
    """Split a group, or end the job if the plan does not have torch's numbers of the ranks any more.

    Wrapper of torch.distributed.split_group, which `call()` runs.
    """
    _check_numbers(current)
    return call()


def _check_numbers(current: Session) -> None:
    """Raise a HolmesError if torch has numbered the ranks anew since the job's start."""
    if current.round not in _renumbered_rounds:
        return
    raise told_once(
        HolmesError(
            "the default process group has lost ranks, and torch has numbered the others anew, so the plan "
            "has no network for a new group; start the job again on the remaining nodes, or run without "
            "--holmes"
        )
    )


PATCHES = (
    Patch(CHANGED_GROUPS, f"{_C10D}:shrink_group",
          "a shrunk group is made by the backend, without _new_process_group_helper",
          _keep_network_of_shrunk_group, only=">=2.10"),
    Patch(CHANGED_GROUPS, f"{_C10D}:_reconfigure",
          "a group gets other members, and torch's list of its ranks stays as it was",
          _record_reconfigured_group, only=">=2.14"),
    Patch(CHANGED_GROUPS, f"{_C10D}:_new_process_group_helper",
          "after a change of the default group, ranks have other numbers than in the plan",
          _refuse_group_after_renumbering, only=">=2.10"),
    Patch(CHANGED_GROUPS, f"{_C10D}:split_group",
          "after a change of the default group, ranks have other numbers than in the plan",
          _refuse_split_after_renumbering, only=">=2.10"),
)  # fmt: skip
