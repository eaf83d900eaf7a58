"""Makes holmes_ext.initialize_model_parallel. It replaces megatron-core's function in a program.

The function switches holmes on in a program that was started without --holmes. The program has called
torch.distributed.init_process_group before. holmes changes the numbers of the ranks, so the function destroys
the default process group and makes it anew.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
from holmes_ext.patches.engine.wrap import arguments_of
from holmes_ext.patches.megatron.core import sizes_of
from holmes_ext.patches.torch.features import LATE_START
from holmes_ext.plan.sizes import sizes_text
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import Connect, nccl_backend_in, timeout_of, traits_of
from holmes_ext.runtime.groups import communicators
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.start.store import until_gone

#: Suggestion in error messages about a call of holmes_ext.initialize_model_parallel that comes too late.
_ENABLE_EARLIER = "call holmes_ext.enable() before init_process_group, or start with --holmes"
#: Another suggestion, which keeps init_process_group of torch 2.15 from making a communicator
#: (late_start.py).
_IMPORT_EARLIER = (
    "write `from holmes_ext import initialize_model_parallel` above init_process_group"
)


@functools.cache
def drop_in(enable: Callable[..., None]) -> Callable[..., Any]:
    """Return the function that programs call as holmes_ext.initialize_model_parallel.

    The returned function has the signature of megatron-core's initialize_model_parallel and calls
    it. If holmes is still off, the returned function first switches it on.

    That is possible only as long as NCCL has made no communicator: with the first one, NCCL chooses
    the network cards of the process. torch 2.15 makes a communicator in init_process_group already.
    drop_in() runs when the program imports initialize_model_parallel from holmes_ext. If
    init_process_group comes later, drop_in() makes it postpone the communicator to the first
    operation of the group.

    Args:
        enable: holmes_ext.enable, which switches holmes on.

    Raises:
        HolmesError: megatron-core cannot be imported.
    """
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise HolmesError(
            "initialize_model_parallel needs megatron-core, which cannot be imported here "
            f"({error})"
        ) from None
    import torch.distributed as dist

    if not dist.is_initialized():
        # LATE_START changes init_process_group of torch 2.15: it postpones the first communicator.
        registry().enable([LATE_START.name])

    @functools.wraps(parallel_state.initialize_model_parallel)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        holmes_is_off = session.active() is None
        if holmes_is_off:
            target = parallel_state.initialize_model_parallel
            arguments_by_name = arguments_of(target, args, kwargs)
            # Switches holmes on, and makes the default process group anew with holmes's ranks.
            _enable_after_init(arguments_by_name, enable)
        return parallel_state.initialize_model_parallel(*args, **kwargs)

    return initialize_model_parallel


def _enable_after_init(arguments: Mapping[str, Any], enable: Callable[..., None]) -> None:
    """Switch holmes on in a program that has already called torch.distributed.init_process_group.

    holmes changes the numbers of the ranks. The default process group has the old numbers. Therefore this
    function destroys the group, switches holmes on, and makes the group anew with the same backend and
    options.

    Args:
        arguments: The program's arguments of initialize_model_parallel.
        enable: holmes_ext.enable, which switches holmes on.

    Raises:
        HolmesError: torch.distributed is not initialized, or it is too late to change the ranks (partly
            raised by _init_arguments).
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        raise HolmesError(
            "initialize_model_parallel: call torch.distributed.init_process_group first"
        )
    other_groups_exist = len(distributed_c10d._world.pg_map) > 1  # besides the default group
    if other_groups_exist:
        raise HolmesError(
            "initialize_model_parallel comes too late: the program has made process groups already, and "
            f"ranks cannot change under them; {_ENABLE_EARLIER}"
        )
    sizes = sizes_of(arguments, dist.get_world_size())

    # No variable may refer to the old group: it would keep the group's listening sockets open, and ranks of
    # the new group would connect to them.
    init_arguments = _init_arguments(dist.group.WORLD)

    # until_gone() waits at the end of the block until rank 0 has closed the store (key-value server) of the
    # old group. Without that, other ranks could connect to the old store when the group is made anew.
    process = launcher.detect(os.environ)  # this process's rank and address of the store
    with until_gone(process, distributed_c10d._get_default_store()):
        dist.destroy_process_group()
    if arguments["num_distributed_optimizer_instances"] > 1:
        # Each instance of the optimizer should lie in one cluster. It does if holmes numbers the ranks
        # cluster by cluster. Without sizes it always does so. With sizes it may keep the old numbers.
        enable()
    else:
        enable(sizes=sizes_text(sizes).replace(" ", ""))  # such as "pipeline=2,tensor=4"
    dist.init_process_group(**init_arguments)


def _init_arguments(world: Any) -> dict[str, Any]:
    """Return the arguments of init_process_group to make the default process group anew.

    The arguments are the backend, NCCL options, timeout and device of the present group. The caller
    then destroys the present group and makes a new one, because holmes changes the numbers of the
    ranks.

    Args:
        world: The present default process group (torch.distributed.group.WORLD).

    Raises:
        HolmesError: The group has an NCCL communicator already. holmes can then no longer choose
            the network cards of this process (raised by _options_if_no_communicator).
    """
    import torch.distributed as dist

    backend = dist.get_backend(world)
    arguments: dict[str, Any] = {"backend": backend}
    # torch has several NCCL backends: "nccl", "nccl2", ... This is "nccl2" if the backend is
    # "cpu:gloo,cuda:nccl2", and "" if it has no NCCL.
    nccl_backend = nccl_backend_in(backend)
    if nccl_backend:
        # The options of the old group. Raises the error if a communicator exists.
        arguments["pg_options"] = _options_if_no_communicator(world, nccl_backend)
    timeout = timeout_of(world)
    if timeout is not None:
        arguments["timeout"] = timeout
    if world.bound_device_id is not None:
        arguments["device_id"] = world.bound_device_id
    return arguments


def _options_if_no_communicator(world: Any, backend: str) -> Any:
    """Return the NCCL options of the default process group, or raise an error if it is too late.

    The caller destroys this group and makes a new one with these options, because holmes changes
    the numbers of the ranks. It is too late if the group has an NCCL communicator already.

    Args:
        world: The default process group.
        backend: The name of NCCL's backend, e.g. "nccl2".

    Raises:
        HolmesError: The group has a communicator. With the first communicator of a process, NCCL
            reads which HCAs and which network interface it may use. holmes can then no longer
            choose them.
    """
    import torch

    nccl = world._get_backend(torch.device("cuda"))  # torch's ProcessGroupNCCL or ProcessGroupNCCL2
    if _has_communicator(world, nccl, backend):
        ways_out = [_ENABLE_EARLIER]
        if communicators.can_postpone(backend):
            ways_out.insert(0, _IMPORT_EARLIER)
        raise HolmesError(
            "initialize_model_parallel comes too late: NCCL has made a communicator already (by "
            "init_process_group, or for a collective since), and chosen its devices for the whole process; "
            f"{', '.join(ways_out)}"
        )
    options = nccl.options
    if hasattr(options, "lazy_init"):
        # drop_in() has set this option of the present group, to postpone its communicator. The new
        # group, which gets these options, is to make its communicator at once, as torch does.
        options.lazy_init = False
    return options


def _has_communicator(world: Any, nccl: Any, backend: str) -> bool:
    """Return whether the default process group has an NCCL communicator.

    torch has several NCCL backends. Some make the communicator together with the group, unless the
    group's option lazy_init postpones it to the first operation. Others always make it at the first
    operation.

    Args:
        world: The default process group.
        nccl: NCCL's part of the group, torch's ProcessGroupNCCL or ProcessGroupNCCL2.
        backend: The name of NCCL's backend, e.g. "nccl2".
    """
    if traits_of(backend).connects is Connect.WITH_GROUP:  # together with the group
        was_postponed = getattr(nccl.options, "lazy_init", False)
        if not was_postponed:
            return True
        # torch does not say directly whether the first operation has made the communicator. But it
        # can split a communicator only if one exists, and supports_splitting says whether it can.
        return nccl.supports_splitting
    if world.bound_device_id is not None:
        return True  # for a device, init_process_group makes the communicator at once
    if not hasattr(nccl, "_is_initialized"):
        return True  # nccl2 of torch 2.14 does not show whether it has one
    return nccl._is_initialized()
