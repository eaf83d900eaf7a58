"""Lets a program switch holmes on after init_process_group, by holmes_ext.initialize_model_parallel.

holmes chooses the network cards of NCCL before the first communicator of a process: NCCL reads them only
once. Since torch 2.15, init_process_group makes a communicator at once. A program that imports

    from holmes_ext import initialize_model_parallel

before init_process_group gets it later: here the option lazy_init is set for the default process group.
"""

from __future__ import annotations

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.torch.features import LATE_START
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import nccl_backend_in
from holmes_ext.runtime.groups.communicators import can_postpone, with_lazy_init


@by_name
def _postpone_communicator(call, instance, global_ranks_in_group, backend, backend_options=None):
    """Make a process group. The communicator of the default group is postponed while holmes is off.

    Wrapper of torch's _new_process_group_helper, which `call()` runs.
    """
    is_default_group = not global_ranks_in_group
    nccl_backend = nccl_backend_in(str(backend))  # "" if the group does not use NCCL
    holmes_is_off = session.active() is None
    if holmes_is_off and is_default_group and nccl_backend and can_postpone(nccl_backend):
        return call(backend_options=with_lazy_init(backend_options))
    return call()


PATCHES = (
    Patch(
        LATE_START,
        "torch.distributed.distributed_c10d:_new_process_group_helper",
        "a communicator that init_process_group makes would fix the network cards before the plan is known",
        _postpone_communicator,
        only=">=2.15",  # older releases make the communicator at the first operation
    ),
)
