"""Lets a program enable holmes after init_process_group, by postponing NCCL's first communicator.

holmes must choose the network cards before a process makes its first NCCL communicator, because NCCL reads
the choice only once. Since torch 2.15, init_process_group makes a communicator at once. A program may enable
holmes later, by initialize_model_parallel(). If it has the statement

    from holmes_ext import initialize_model_parallel

before init_process_group, the wrapper in this module sets the option lazy_init of the default process group:
NCCL then makes the communicator at the group's first operation.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.patches.torch.features import LATE_START
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import nccl_backend_in
from holmes_ext.runtime.groups.communicators import can_postpone, with_lazy_init


@by_name
def _postpone_communicator(
    call: Call,
    instance: Any,
    global_ranks_in_group: Any,
    backend: Any,
    backend_options: Any = None,
) -> Any:
    """Make a process group; if it is the default one and holmes is off, postpone its communicator.

    Runs instead of torch's _new_process_group_helper; `call()` runs the original.

    NCCL chooses the network cards of a process when it makes the first communicator, and keeps this
    choice. Since torch 2.15, init_process_group makes a communicator for the default group at once.
    A program may enable holmes only afterwards. So as long as holmes is off, the communicator waits
    for the group's first operation (torch's option lazy_init). If holmes is on, it has chosen the
    cards already.

    Args:
        global_ranks_in_group: Ranks of the group; [] for the default group.
        backend: Backend of the group, such as NCCL.
        backend_options: Options of the group, or None.
    """
    is_default_group = not global_ranks_in_group  # torch passes [] for the default group
    nccl_backend = nccl_backend_in(str(backend))  # "" if the group does not use NCCL
    holmes_is_off = session.active() is None
    if holmes_is_off and is_default_group and nccl_backend and can_postpone(nccl_backend):
        return call(backend_options=with_lazy_init(backend_options))
    return call()


PATCHES = (
    Patch(
        LATE_START,
        "torch.distributed.distributed_c10d:_new_process_group_helper",
        "a communicator that init_process_group makes would fix the network cards before the plan exists",
        _postpone_communicator,
        only=">=2.15",  # older releases make the communicator at the first operation
    ),
)
