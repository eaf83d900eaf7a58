"""Gives every process group of torch.distributed the NIC that the plan assigns to the group's ranks.

All ways to make a group, DeviceMesh included, call _new_process_group_helper, except for split_group. So a
wrapper around each of these two functions sees all groups. Two further wrappers adapt the rendezvous store to
renumbered ranks, and the end of gloo's groups.
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
        agree_on_patches(store, current, waits=str(backend) != "fake")
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
        options = _options(current, ranks, options, timeout)
    if "gloo" in backend_names:
        forget_before_exit()
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
        pg_options = _options(current, ranks, pg_options, timeout, options_of(parent))
    with gloo_interface(current.transport(ranks, "gloo")):
        new_group = call(pg_options=pg_options)
    _record(current, group_desc or "split", ranks, backend, pg_options)
    return new_group


@with_session
@by_name
def _let_threads_forget(current, call, instance):
    """Wait until gloo's threads have released the tensors of the last operation, then end process groups.

    To release them, a thread of gloo waits for the interpreter's lock, and holds a lock of the group.
    DistributedDataParallel ends its group with the interpreter's lock held, for which it needs the group's
    lock: without the wait both could stop for ever.
    """
    if "gloo" in current.backends:
        let_threads_forget()
    return call()


#: Default groups made so far: a program may end torch.distributed and start it again.
_agreed = itertools.count()


def agree_on_patches(store: Any, current: Session, waits: bool = True) -> None:
    """Compare plan and patches with the first rank's, before the default group is made: ranks that differ in
    them would hang. HolmesError names the difference and both ranks, on the rank that differs first; the
    others, which wait (if `waits`) until all have compared, get RemoteError."""
    prefix = f"{current.round}/agree/{next(_agreed)}"
    mine = {"who": f"rank {current.rank} on {current.node.name}", "plan's digest": current.plan.digest}
    mine.update(registry().states())
    first = json.loads(store.compare_set(f"{prefix}/first", "", json.dumps(mine)))
    key = next((key for key in sorted({*mine, *first} - {"who"}) if mine.get(key) != first.get(key)), None)
    if key is not None:
        what = "differ in" if key == "plan's digest" else "are patched differently:"
        here, there = (f"{state.get(key)!r} on {state['who']}" for state in (mine, first))
        error = f"the ranks {what} {key}: it is {here} and {there}; install and give the same everywhere"
        difference = store.compare_set(f"{prefix}/difference", "", error).decode()
        raise HolmesError(error) if difference == error else RemoteError(difference)  # once is enough
    if not waits:
        return
    store.set(f"{prefix}/rank/{current.rank}", "")
    if store.add(f"{prefix}/count", 1) == current.plan.world_size:
        store.set(f"{prefix}/difference", "none")
    try:
        store.wait([f"{prefix}/difference"], timedelta(seconds=current.options.timeout_s))
    except RuntimeError:  # torch.distributed.DistError is one
        everyone = range(current.plan.world_size)
        missing = [rank for rank in everyone if not store.check([f"{prefix}/rank/{rank}"])]
        what = f"did not come to init_process_group within {current.options.timeout} s (--holmes-timeout)"
        raise HolmesError(
            f"rank {current.rank} on {current.node.name}: rank {some_of(missing)} {what}") from None
    if (difference := store.get(f"{prefix}/difference").decode()) != "none":
        raise RemoteError(difference)


def _options(current: Session, ranks: tuple[int, ...], given: Any, timeout: timedelta | None,
             parent: Any = None) -> Any:
    """parent: options of the group that this one is split from."""
    from torch.distributed import ProcessGroupNCCL

    if not hasattr(ProcessGroupNCCL.Options().config, "net_name"):
        return given  # NCCL before 2.17: it chooses by itself
    over = current.transport(ranks, "nccl")
    try:
        refuse_forced(over, current.forced_nets)
    except HolmesError as error:
        raise told_once(error) from None
    return nccl_options(over, given, ProcessGroupNCCL.Options, timeout, parent)


def _record(current: Session, name: str, ranks: tuple[int, ...], backend: str, options: Any) -> None:
    planned, fabrics = current.transport(ranks, backend), current.site.fabric_by_name
    transport = as_made(planned, current.node, backend, fabrics, options)
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
          _let_threads_forget),
)  # fmt: skip
