"""Gives every process group of torch.distributed the NIC that the plan assigns to its ranks.

holmes computes the plan before the job starts. The plan assigns a network to each group. holmes replaces four
functions of torch by wrappers that call them:

    _new_process_group_helper   Makes every group, except for those of split_group. The wrapper passes the
                                NIC to the group. Before the default group is made, it checks that all
                                ranks have the same plan (agree_on_patches).
    split_group                 Makes groups from parts of a group. The wrapper passes the NIC.
    _create_c10d_store          Creates the rendezvous store. The plan may have renumbered the ranks; the
                                wrapper lets the process host the store that the launcher started as rank 0.
    destroy_process_group       The wrapper first waits for gloo's threads, to prevent a deadlock.
"""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import NICS, RANKS
from holmes_ext.runtime.backend import (
    backend_named,
    backend_of,
    backends,
    nccl_backend_in,
    options_of,
    traits_of,
)
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.groups import communicators
from holmes_ext.runtime.groups.callbacks import delay_exit, let_threads_free_tensors
from holmes_ext.runtime.groups.communicators import with_lazy_init
from holmes_ext.runtime.groups.transport import as_made, gloo_interface, nccl_options, refuse_forced
from holmes_ext.runtime.measure.operations import kind_of
from holmes_ext.runtime.session import GroupRecord, Session, tell
from holmes_ext.words import some_of, tell_user

_C10D = "torch.distributed.distributed_c10d"


@with_session
@by_name
def _host_store_where_launched(current: Session, call: Call, instance: Any, rank: int) -> Any:
    """Create the rendezvous store, hosted by the process that the launcher started as rank 0.

    Runs instead of torch's _create_c10d_store; `call()` runs the original, with the launcher's
    rank.

    holmes may have renumbered the ranks, so that the new rank 0 runs on another node. MASTER_ADDR
    is still the address of the launcher's rank 0, and all ranks connect to that address. If
    torchrun hosts the store, its keys get a prefix for each start of the job.

    Args:
        rank: The rank after renumbering, as torch passes it. The original receives the launcher's
            rank in its place. holmes checks that torch's function has a parameter of this name.
    """
    launched_rank = current.process.rank  # the rank before holmes renumbered it
    store = call(rank=launched_rank)
    if not current.process.agent_store:
        return store  # the store is new for this start of the job

    # torchrun's agents keep the store when they restart a job. A prefix for each start hides the addresses
    # that the ranks of the last start left there.
    from torch.distributed import PrefixStore

    prefix_of_this_start = current.key_prefix
    return PrefixStore(prefix_of_this_start, store)


@with_session
@by_name
def _give_group_its_nic(
    current: Session,
    call: Call,
    instance: Any,
    global_ranks_in_group: Any,
    backend: Any,
    store: Any,
    group_name: Any,
    timeout: Any,
    backend_options: Any = None,
    pg_options: Any = None,  # before torch 2.6
    group_desc: Any = None,
) -> Any:
    """Make a process group that uses the NIC of its ranks in holmes's plan.

    Runs instead of torch's _new_process_group_helper; `call()` runs the original.

    gloo reads the NIC from the environment variable GLOO_SOCKET_IFNAME. It is set while the group is made.
    NCCL receives its network as net_name in the group's options.

    Before the default group is made, all ranks check that they have the same plan, and that holmes has
    changed the same functions of torch.
    """
    is_default_group = not global_ranks_in_group
    if is_default_group:
        ranks = tuple(range(current.plan.world_size))
        # With torch's backend "fake", one process stands for all ranks: there is none to wait for.
        is_fake = str(backend) == "fake"
        agree_on_patches(store, current, waits=not is_fake)
    else:
        ranks = tuple(global_ranks_in_group)

    if call.accepts("backend_options"):  # since torch 2.6
        options_name = "backend_options"
        options = backend_options
    else:
        options_name = "pg_options"
        options = pg_options

    # "nccl2" of "cpu:gloo,cuda:nccl2"; "" if the group does not use NCCL
    nccl_backend = nccl_backend_in(str(backend))
    # Whether NCCL makes the communicator at the group's first operation (torch's option lazy_init).
    is_postponed = False
    if nccl_backend and not is_default_group:
        is_postponed = communicators.are_postponed(nccl_backend, options)
    is_member = current.rank in ranks
    if not is_member and is_postponed:
        # Without lazy_init, torch would wait on this rank for a split that the members do not start.
        return call(**{options_name: with_lazy_init(None)})
    if not is_member:
        return call()

    _note_backends(current, str(backend))
    arguments = {options_name: options}  # those of torch's function that change
    if nccl_backend:
        name = communicator_name(current, ranks, str(group_desc or ""))
        options = planned_nccl_options(current, ranks, nccl_backend, options, timeout, name)
        if is_postponed:
            options = with_lazy_init(options)
        arguments[options_name] = options
        if traits_of(nccl_backend).is_nccl2:
            # nccl2 names a communicator after its group, and overwrites comm_name in the options.
            arguments["group_name"] = f"{name}:{group_name}"
    with gloo_interface(current.transport(ranks, "gloo")):  # sets GLOO_SOCKET_IFNAME
        new_group = call(**arguments)
    name_in_report = str(group_desc or group_name)

    # Of several backends, the report names that of the GPU if there is one, else that of the CPU.
    main_backend = backend_named(str(backend))
    record_group(current, name_in_report, ranks, main_backend, options)
    return new_group


def _note_backends(current: Session, backend: str) -> None:
    """Check the backend of a new process group, and note the names of its backends in the session.

    A group may have one backend for each device type: "cpu:gloo,cuda:nccl".

    Args:
        current: The session, whose set of backends is updated.
        backend: The group's backend, e.g. "gloo" or "cpu:gloo,cuda:nccl".

    Raises:
        HolmesError: the backend uses one network for all groups (e.g. "ucc"), but the plan chooses
            different networks for different groups.
    """
    # The check is for one backend: that of the GPU if there is one, else that of the CPU.
    main_backend = backend_named(backend)
    _check_backend(current, main_backend)
    names_of_all = set(backends(backend).values())  # {"gloo", "nccl"} of "cpu:gloo,cuda:nccl"
    current.backends |= names_of_all  # read by _destroy_after_gloo_threads()
    if "gloo" in names_of_all:
        # Registers an exit handler: it waits until gloo's threads have freed their tensors. If they did so
        # while the interpreter shuts down, the process could hang.
        delay_exit()


@with_session
@by_name
def _give_split_group_its_nic(
    current: Session,
    call: Call,
    instance: Any,
    parent_pg: Any,
    split_ranks: Any,
    timeout: Any,
    pg_options: Any,
    group_desc: Any = None,
    backend: Any = None,
) -> Any:
    """Split a process group into smaller groups, and give this rank's group its planned NIC.

    Runs instead of torch.distributed.split_group; `call()` runs the original.

    The part with this rank uses the NIC that holmes's plan for the job assigns to the ranks of the part. A
    call without options takes the NCCL options of the parent group, except for the network.

    Args:
        parent_pg: The group to split; None for the default group.
        split_ranks: A list of parts. Each part lists ranks within the parent group.
    """
    import torch.distributed as dist

    parent: Any = parent_pg or dist.group.WORLD
    my_rank = dist.get_rank(parent)
    my_part = None
    for part in split_ranks or ():
        if my_rank in part:
            my_part = part
            break
    if my_part is None:
        return call()  # this rank is in no part

    ranks = tuple(dist.get_global_rank(parent, rank) for rank in my_part)
    if backend:  # since torch 2.15, `backend` can select some of the parent's backends
        backend_name = backend_named(str(backend))
    else:
        backend_name = backend_of(parent)
    if traits_of(backend_name).is_nccl:
        name = communicator_name(current, ranks, group_desc or "")
        pg_options = planned_nccl_options(
            current,
            ranks,
            backend_name,
            pg_options,
            timeout,
            name,
            parent_options=options_of(parent),
        )
    with gloo_interface(current.transport(ranks, "gloo")):  # sets GLOO_SOCKET_IFNAME
        new_group = call(pg_options=pg_options)
    record_group(current, group_desc or "split", ranks, backend_name, pg_options)
    return new_group


@with_session
@by_name
def _destroy_after_gloo_threads(current: Session, call: Call, instance: Any) -> Any:
    """Destroy process groups, after gloo's threads had time to release the last tensors.

    Runs instead of torch.distributed.destroy_process_group; `call()` runs the original.

    Without the wait a deadlock is possible. The thread of gloo that releases tensors holds a lock of its
    group and waits for the GIL. The destructor of DistributedDataParallel holds the GIL and waits for the
    lock of the group.
    """
    if "gloo" in current.backends:
        let_threads_free_tensors()  # sleeps for some milliseconds
    return call()


#: Counts the default groups that this process makes: a program may end torch.distributed and start it again.
_default_group_numbers = itertools.count()


def agree_on_patches(store: Any, current: Session, waits: bool = True) -> None:
    """Check that all ranks have the same plan and patches, before the default group is made.

    The plan is holmes's plan for the job, and patches are its changes to functions of torch. Ranks that
    differ would wait for each other without end. So every rank compares its plan and patches with those of
    the rank that calls this function first, by these keys of the rendezvous store:

        first         plan and patches of the rank that called first
        rank/R        exists when rank R has found no difference
        count         number of ranks that have found no difference
        difference    the first difference that a rank found; "none" when all ranks have found none

    Args:
        waits: Whether to wait until all ranks have compared.

    Raises:
        HolmesError: this rank is the first that found a difference, or a rank did not call this function
            within --holmes-timeout.
        RemoteError: another rank found a difference first, and prints it.
    """
    # The prefix differs for each start of the job, and for each default group of a process.
    prefix = f"{current.key_prefix}/agree/{next(_default_group_numbers)}"
    mine = {
        "who": f"rank {current.rank} on {current.node.name}",
        "plan's digest": current.plan.digest,
        **registry().states(),  # feature -> "off" or "on VERSION"
    }

    # compare_set(key, "", value) sets the key if it does not exist, and returns the key's value.
    first = json.loads(store.compare_set(f"{prefix}/first", "", json.dumps(mine)))
    difference = _difference(mine, first)
    if difference:
        reported = store.compare_set(f"{prefix}/difference", "", difference).decode()
        if reported == difference:
            raise HolmesError(difference)
        raise RemoteError(reported)  # another rank has reported a difference before
    if not waits:
        return

    store.set(f"{prefix}/rank/{current.rank}", "")
    agreeing_ranks = store.add(f"{prefix}/count", 1)  # returns the count, with this rank
    if agreeing_ranks == current.plan.world_size:  # this rank is the last
        store.set(f"{prefix}/difference", "none")
    _wait_for_all_ranks(store, prefix, current)
    difference = store.get(f"{prefix}/difference").decode()
    if difference != "none":
        raise RemoteError(difference)


def _difference(mine: dict[str, str], first: dict[str, str]) -> str:
    """Return a message about the first difference between two ranks; "" if there is none.

    Ranks must have the same plan and patches. Patches are holmes's changes to functions of torch.

    Args:
        mine: Describes this rank. Keys: "who" (this rank and its node, not compared), "plan's digest" (a
            hash) and the name of each feature (a group of patches), whose value is the feature's state.
        first: Describes the rank that called agree_on_patches() first, in the same way. A key that only one
            rank has is not compared: the other rank has not imported the framework of this feature yet.
    """
    keys = sorted((mine.keys() & first.keys()) - {"who"})
    different_keys = [key for key in keys if mine[key] != first[key]]
    if not different_keys:
        return ""
    key = different_keys[0]
    if key == "plan's digest":
        verb = "differ in"
    else:  # the name of a feature
        verb = "are patched differently:"
    my_value = f"{mine[key]!r} on {mine['who']}"
    first_value = f"{first[key]!r} on {first['who']}"
    return f"the ranks {verb} {key}: it is {my_value} and {first_value}; install and give the same everywhere"


def _wait_for_all_ranks(store: Any, prefix: str, current: Session) -> None:
    """Wait until the key `difference` of the rendezvous store exists.

    Each rank compares its plan and patches with those of another rank. The first rank that finds a difference
    sets the key to a message about it. If all ranks have found none, the last one sets it to "none".

    Args:
        store: The rendezvous store.
        prefix: Prefix of the keys.

    Raises:
        HolmesError: the key was not set within --holmes-timeout. The message lists the ranks R without a key
            `rank/R`: they have not called init_process_group.
    """
    try:
        store.wait([f"{prefix}/difference"], timedelta(seconds=current.options.timeout_s))
    except RuntimeError:  # or a subclass: torch.distributed.DistError
        all_ranks = range(current.plan.world_size)
        missing = [rank for rank in all_ranks if not store.check([f"{prefix}/rank/{rank}"])]
        timeout = f"{current.options.timeout} s (--holmes-timeout)"
        raise HolmesError(
            f"rank {current.rank} on {current.node.name}: "
            f"rank {some_of(missing)} did not come to init_process_group within {timeout}"
        ) from None


def _check_backend(current: Session, name: str) -> None:
    """Check that the plan's networks can be given to a backend.

    A warning is printed if the backend is unknown. It then chooses its networks itself.

    Args:
        name: The backend of one device type, e.g. "ucc".

    Raises:
        HolmesError: The backend uses one network for all groups, and the plan needs several: some nodes have
            a fast network that other nodes lack.
    """
    traits = traits_of(name)
    if not traits.is_known:
        tell(
            current,
            f"backend {name!r} is not known to holmes and chooses its networks itself; the plan's networks "
            "apply to groups of nccl and gloo only",
            once=True,
        )
        return
    all_ranks = range(current.plan.world_size)
    if not traits.network_api and current.plan.spans_networks(all_ranks):
        raise told_once(
            HolmesError(
                f"backend {name!r} uses one network for all groups, but the nodes share only Ethernet and "
                "the plan gives faster networks to groups inside a cluster; use nccl or gloo, or run without "
                "--holmes"
            )
        )


def communicator_name(current: Session, ranks: tuple[int, ...], description: str) -> str:
    """Return a name for the communicator of a group, e.g. "data:a:rank0".

    NCCL's logs, its inspector and RAS print the name. It consists of the group's purpose, its clusters and
    its first rank.

    Args:
        ranks: The group's ranks.
        description: The program's description of the group (group_desc); "" if there is none.
    """
    plan = current.plan
    purpose = kind_of(ranks, description, plan.sizes, plan.world_size)  # e.g. "data"
    clusters = "+".join(plan.by_cluster(ranks))
    return f"{purpose}:{clusters}:rank{min(ranks)}"


def planned_nccl_options(
    current: Session,
    ranks: tuple[int, ...],
    backend: str,
    program_options: Any,
    timeout: timedelta | None,
    name: str,
    parent_options: Any = None,
) -> Any:
    """Return options for an NCCL group, with the planned network as their net_name.

    Args:
        ranks: The group's ranks.
        backend: "nccl" or another name of NCCL, such as "nccl2".
        program_options: Options that the program gave for the group, or None.
        timeout: The program's timeout for operations of the group, or None.
        name: Name of the communicator for NCCL's logs.
        parent_options: If the group is split from another group: the options of the other group.

    Raises:
        HolmesError: a configuration file of NCCL forces another network.
    """
    from torch.distributed import ProcessGroupNCCL

    can_choose_network = hasattr(ProcessGroupNCCL.Options().config, "net_name")
    if not can_choose_network:
        return program_options  # NCCL before 2.17 chooses the network itself
    transport = current.transport(ranks, backend)  # the planned network of these ranks
    try:
        # forced_nets: network -> configuration file of NCCL that forces this network.
        refuse_forced(transport, current.forced_nets)
    except HolmesError as error:
        # All ranks of the group fail. told_once() lets one of them print the message.
        raise told_once(error) from None
    return nccl_options(
        transport,
        program_options,
        ProcessGroupNCCL.Options,  # the class: each group gets an object of its own
        timeout,
        parent_options,
        comm_name=name,
    )


def record_group(
    current: Session, name: str, ranks: tuple[int, ...], backend: str, options: Any
) -> None:
    """Record a process group and the network that it uses, for the job's report.

    With --holmes-verbose on, the group's first rank prints the entry.

    Args:
        name: Name of the group in the report.
        ranks: The group's ranks.
        backend: The group's backend, e.g. "nccl".
        options: Options of the group: ProcessGroupNCCL.Options, or None.
    """
    # A transport is a network, with the NIC or name that the backend uses on this node.
    planned = current.transport(ranks, backend)
    # as_made() returns `planned`, unless the user has set another network: for gloo by GLOO_SOCKET_IFNAME,
    # for NCCL by the field net_name of the options.
    transport = as_made(
        planned, current.node, backend, fabrics=current.site.fabric_by_name, options=options
    )
    current.groups.append(GroupRecord(name, ranks, backend, transport))
    if current.options.verbose == "on" and current.rank == ranks[0]:
        members = some_of(ranks, separator=",")  # a long list is cut
        # gloo's network interface, or the name of NCCL's network. A group inside one node has neither.
        way = transport.interface or transport.net_name or "NVLink/memory"
        tell_user(f"group {name or 'world'} [{members}] {backend}: {transport.fabric} via {way}")


PATCHES = (
    Patch(
        RANKS,
        "torch.distributed.rendezvous:_create_c10d_store",
        "rank 0 may have moved away from MASTER_ADDR, where the store is hosted",
        _host_store_where_launched,
    ),
    Patch(
        NICS,
        f"{_C10D}:_new_process_group_helper",
        "torch has no hook for the transport of a group; every group is made here",
        _give_group_its_nic,
    ),
    Patch(
        NICS,
        f"{_C10D}:split_group",
        "split_group copies the parent's options, so a split would keep the parent's network",
        _give_split_group_its_nic,
        only=">=2.5",
    ),
    Patch(
        RANKS,
        f"{_C10D}:destroy_process_group",
        "DistributedDataParallel ends its group while it holds the GIL, for which a thread of gloo waits",
        _destroy_after_gloo_threads,
    ),
)
