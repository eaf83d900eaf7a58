"""Gives every process group of torch.distributed the NIC that the plan assigns to the group's ranks.

Every function of torch that makes a group, also through a DeviceMesh, calls _new_process_group_helper, except
for split_group. So a wrapper around each of these two functions sees all groups. Two further wrappers change
where the rendezvous store is created, because ranks are renumbered, and how groups of gloo end.
"""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import NICS, RANKS
from holmes_ext.runtime.groups.backend import backend_named, backend_of, backends, options_of
from holmes_ext.runtime.groups.callbacks import forget_before_exit, let_threads_forget
from holmes_ext.runtime.groups.transport import as_made, gloo_interface, nccl_options, refuse_forced
from holmes_ext.runtime.session import GroupRecord, Session
from holmes_ext.runtime.start.refusal import told_once
from holmes_ext.words import some_of, tell_user

_C10D = "torch.distributed.distributed_c10d"


@with_session
@by_name
def _host_store_where_launched(current, call, instance, rank):
    """Create the rendezvous store on the launcher's rank 0, which runs at MASTER_ADDR.

    The plan may have renumbered the ranks, so that the job's rank 0 runs on another node.
    """
    store = call(rank=current.process.rank)  # the launcher's rank, not the renumbered one
    if not current.process.agent_store:
        return store

    # torchrun's agents keep the store when they restart a job. A prefix for each start hides the addresses
    # that the ranks of the last start left there.
    from torch.distributed import PrefixStore

    return PrefixStore(current.round, store)


@with_session
@by_name
def _give_group_its_nic(
    current,
    call,
    instance,
    global_ranks_in_group,
    backend,
    store,
    group_name,
    timeout,
    backend_options=None,
    pg_options=None,  # before torch 2.6
    group_desc=None,
):
    """Make a process group on the NIC that the plan assigns to the ranks of the group.

    gloo reads the NIC from GLOO_SOCKET_IFNAME, which is set while the group is made. NCCL gets it as net_name
    in the group's options. Before the default group is made, all ranks compare their plans and patches.
    """
    is_default_group = not global_ranks_in_group
    if is_default_group:
        is_fake = str(backend) == "fake"  # one process stands for all ranks: nobody else comes
        agree_on_patches(store, current, waits=not is_fake)
    ranks = tuple(global_ranks_in_group) or tuple(range(current.plan.world_size))
    if current.rank not in ranks:
        return call()

    if call.accepts("backend_options"):
        options_name = "backend_options"
        options = backend_options
    else:
        options_name = "pg_options"
        options = pg_options
    backend_names = set(backends(str(backend)).values())
    current.backends |= backend_names
    if "nccl" in backend_names:
        options = _nccl_options(current, ranks, options, timeout)
    if "gloo" in backend_names:
        forget_before_exit()  # registers a wait for gloo's threads at the interpreter's exit
    with gloo_interface(current.transport(ranks, "gloo")):
        new_group = call(**{options_name: options})
    _record(current, str(group_desc or group_name), ranks, backend_named(str(backend)), options)
    return new_group


@with_session
@by_name
def _give_split_group_its_nic(
    current, call, instance, parent_pg, split_ranks, timeout, pg_options, group_desc=None
):
    """Split a process group, and put this rank's part on the NIC that the plan assigns to the part's ranks.

    A call without options inherits those of the parent group, of which only the network is replaced.
    """
    import torch.distributed as dist

    parent: Any = parent_pg or dist.group.WORLD
    my_rank = dist.get_rank(parent)
    my_part = next((part for part in split_ranks or () if my_rank in part), None)
    if my_part is None:
        return call()

    ranks = tuple(dist.get_global_rank(parent, rank) for rank in my_part)
    backend = backend_of(parent)
    if backend == "nccl":
        pg_options = _nccl_options(current, ranks, pg_options, timeout, options_of(parent))
    with gloo_interface(current.transport(ranks, "gloo")):
        new_group = call(pg_options=pg_options)
    _record(current, group_desc or "split", ranks, backend, pg_options)
    return new_group


@with_session
@by_name
def _destroy_when_threads_are_done(current, call, instance):
    """Wait until gloo's threads have released the tensors of the last operation, then end process groups.

    To release them, a thread of gloo waits for the interpreter's lock, and holds a lock of the group.
    DistributedDataParallel ends its group with the interpreter's lock held, for which it needs the group's
    lock: without the wait both could stop for ever.
    """
    if "gloo" in current.backends:
        let_threads_forget()
    return call()


#: Numbers of the default groups that this process makes: a program may end torch.distributed and start it
#: again.
_default_group_numbers = itertools.count()


def agree_on_patches(store: Any, current: Session, waits: bool = True) -> None:
    """Check that all ranks have the same plan and the same patches, before the default group is made.

    Ranks that differ would wait for each other without end. Every rank compares itself with the one that
    comes first, by keys of the rendezvous store:

        first         plan and patches of the rank that came first
        difference    the first difference that a rank found; "none" when all ranks have compared
        rank/R        set when rank R has found no difference
        count         number of these ranks

    Args:
        waits: Whether to wait until all ranks have compared.

    Raises:
        HolmesError: this rank differs and is the first to say so, or other ranks did not come in time.
        RemoteError: another rank has already printed a difference.
    """
    prefix = f"{current.round}/agree/{next(_default_group_numbers)}"
    mine = {"who": f"rank {current.rank} on {current.node.name}", "plan's digest": current.plan.digest}
    mine.update(registry().states())
    first = json.loads(store.compare_set(f"{prefix}/first", "", json.dumps(mine)))
    difference = _difference(mine, first)
    if difference:
        reported = store.compare_set(f"{prefix}/difference", "", difference).decode()
        if reported == difference:
            raise HolmesError(difference)
        raise RemoteError(reported)  # one rank's message is enough
    if not waits:
        return

    store.set(f"{prefix}/rank/{current.rank}", "")
    if store.add(f"{prefix}/count", 1) == current.plan.world_size:
        store.set(f"{prefix}/difference", "none")
    _wait_for_all_ranks(store, prefix, current)
    difference = store.get(f"{prefix}/difference").decode()
    if difference != "none":
        raise RemoteError(difference)


def _difference(mine: dict[str, str], first: dict[str, str]) -> str:
    """Return the first difference between two ranks' plans and patches, in words; "" if there is none.

    Args:
        mine: "who" -> this rank and its node, "plan's digest" -> a hash, and a state for each patch.
        first: The same of the rank that came first.
    """
    keys = sorted({*mine, *first} - {"who"})
    key = next((key for key in keys if mine.get(key) != first.get(key)), None)
    if key is None:
        return ""
    what = "differ in" if key == "plan's digest" else "are patched differently:"
    here = f"{mine.get(key)!r} on {mine['who']}"
    there = f"{first.get(key)!r} on {first['who']}"
    return f"the ranks {what} {key}: it is {here} and {there}; install and give the same everywhere"


def _wait_for_all_ranks(store: Any, prefix: str, current: Session) -> None:
    """Wait until all ranks have compared their patches, or one has found a difference.

    Raises:
        HolmesError: ranks did not come within --holmes-timeout.
    """
    try:
        store.wait([f"{prefix}/difference"], timedelta(seconds=current.options.timeout_s))
    except RuntimeError:  # torch.distributed.DistError is one
        all_ranks = range(current.plan.world_size)
        missing = [rank for rank in all_ranks if not store.check([f"{prefix}/rank/{rank}"])]
        what = f"did not come to init_process_group within {current.options.timeout} s (--holmes-timeout)"
        raise HolmesError(
            f"rank {current.rank} on {current.node.name}: rank {some_of(missing)} {what}"
        ) from None


def _nccl_options(
    current: Session,
    ranks: tuple[int, ...],
    program_options: Any,
    timeout: timedelta | None,
    parent_options: Any = None,
) -> Any:
    """Return the options of an NCCL group, with the network that the plan assigns to the group's ranks.

    Args:
        program_options: Those that the program gave, or None.
        parent_options: Those of the group from which this one is split.

    Raises:
        HolmesError: a configuration file of NCCL forces another network.
    """
    from torch.distributed import ProcessGroupNCCL

    if not hasattr(ProcessGroupNCCL.Options().config, "net_name"):
        return program_options  # NCCL before 2.17 chooses the network itself
    transport = current.transport(ranks, "nccl")
    try:
        refuse_forced(transport, current.forced_nets)
    except HolmesError as error:
        raise told_once(error) from None  # all ranks of the group fail; one prints the message
    return nccl_options(transport, program_options, ProcessGroupNCCL.Options, timeout, parent_options)


def _record(current: Session, name: str, ranks: tuple[int, ...], backend: str, options: Any) -> None:
    """Add a group to the session's list, with the NIC that it uses, and print it with --holmes-verbose on.

    The NIC differs from the plan's if the user has set another one for gloo or NCCL.
    """
    planned = current.transport(ranks, backend)
    transport = as_made(planned, current.node, backend, current.site.fabric_by_name, options)
    current.groups.append(GroupRecord(name, ranks, backend, transport))
    if current.options.verbose == "on" and current.rank == ranks[0]:
        members = some_of(ranks, separator=",")
        where = f"{transport.fabric} via {transport.interface or transport.net_name or 'NVLink/memory'}"
        tell_user(f"group {name or 'world'} [{members}] {backend}: {where}")


PATCHES = (
    Patch(RANKS, "torch.distributed.rendezvous:_create_c10d_store",
          "rank 0 may have moved away from MASTER_ADDR, where the store is hosted",
          _host_store_where_launched),
    Patch(NICS, f"{_C10D}:_new_process_group_helper",
          "torch has no hook for the transport of a group; every group is made here", _give_group_its_nic),
    Patch(NICS, f"{_C10D}:split_group",
          "split_group copies the parent's options, so a split would keep the parent's network",
          _give_split_group_its_nic, only=">=2.5"),
    Patch(RANKS, f"{_C10D}:destroy_process_group",
          "DistributedDataParallel ends its group with the interpreter's lock held, for which gloo waits",
          _destroy_when_threads_are_done),
)  # fmt: skip
