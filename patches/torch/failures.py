"""Patches that let holmes report failures of NCCL before torch aborts the process.

runtime/watch/nccl_errors.py detects the failures. Three functions of torch are patched for it:

    _register_pg_in_world   torch calls this function with every new process group. The patch registers an
                            abort hook with the group. torch calls the hook at a failure, before it aborts the
                            process.
    ProcessGroup.abort      A program calls this method, or torch's _abort_process_group does for it, to abort
                            a process group. The patch marks the group, so that it is not reported as failed.
    Backend.abort           The same for a program that aborts only the backend of a group.

After a failure, torch's C++ code aborts the communicators without calling these two Python methods. So a call
of them always comes from the program.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import FAILURES
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.watch import nccl_errors

_C10D = "torch.distributed.distributed_c10d"


@with_session
@by_name
def _register_with_abort_hook(current: Session, call: Call, instance: Any, pg: Any) -> Any:
    """Register a new process group in torch, and register holmes's abort hook with the group.

    When NCCL fails in the group, torch calls the abort hook before it aborts the process. The hook calls a
    function of holmes that reports the failure.

    Runs instead of torch's _register_pg_in_world; `call()` runs the original.
    """
    registered = call()
    nccl_errors.register_abort_hook(pg)
    return registered


def _mark_and_abort_group(original_abort: Any) -> Any:
    """Return a replacement for ProcessGroup.abort that first marks the group.

    The mark says that the program, not a failure, aborts the group.
    """

    def abort(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the abort: another thread may poll the state of the group as soon as it is aborted.
        nccl_errors.mark_aborted_by_program(self)
        return original_abort(self, *args, **kwargs)

    return abort


def _mark_and_abort_backend(original_abort: Any) -> Any:
    """Return a replacement for Backend.abort that first marks the backend of a process group.

    The mark says that the program, not a failure, aborts the backend.
    """

    def abort(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the abort: another thread may poll the state of the backend as soon as it is aborted.
        nccl_errors.mark_backend_aborted_by_program(self)
        return original_abort(self, *args, **kwargs)

    return abort


# Both replacements must be named `abort`, and their first parameter `self`. Otherwise a Python subclass of
# ProcessGroup or Backend that inherits `abort` would recurse without end: torch's C++ code looks for a Python
# method `abort` of the object and calls it, unless its caller is a function `abort` of the same `self`.
_ABORT_REASON = "a group that the program aborts has the same state as one that has lost a rank"

PATCHES = (
    Patch(
        FAILURES,
        f"{_C10D}:_register_pg_in_world",
        "torch may abort the process before holmes looks for a failure; every new group is registered here",
        _register_with_abort_hook,
        only=">=2.13",
    ),
    Patch(
        FAILURES,
        f"{_C10D}:ProcessGroup.abort",
        _ABORT_REASON,
        replace=_mark_and_abort_group,
        only=">=2.7",
    ),
    # This target is in the module torch._C._distributed_c10d. The module is part of torch's C++ library, so
    # its import cannot be observed. The target is named by the Python module that has imported it.
    Patch(
        FAILURES,
        f"{_C10D}:torch._C._distributed_c10d.Backend.abort",
        _ABORT_REASON,
        replace=_mark_and_abort_backend,
        only=">=2.7",
    ),
)
