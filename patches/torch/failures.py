"""Lets holmes report failures of NCCL in time, and not report groups that the program aborts by itself.

runtime/watch/nccl_errors.py finds the failures. It needs three changes of torch:

    _register_pg_in_world   torch calls it with every new process group. The group gets an abort hook, which
                            torch runs before it aborts the process because of a failure.
    ProcessGroup.abort      The program aborts a group by itself, e.g. by torch's _abort_process_group.
    Backend.abort           The program aborts the NCCL backend of a group by itself.

torch's own code in C++ aborts a group after a failure without these two methods.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import FAILURES
from holmes_ext.runtime.watch import nccl_errors

_C10D = "torch.distributed.distributed_c10d"


@with_session
@by_name
def _register_with_abort_hook(current, call, instance, pg):
    """Register a new process group in torch, and let torch call holmes when NCCL fails in the group.

    Wrapper of torch's _register_pg_in_world, which `call()` runs.
    """
    registered = call()
    nccl_errors.register_abort_hook(pg)
    return registered


def _noting_abort_of_group(original: Any) -> Any:
    """Return a method that notes that the program aborts a process group, and calls ProcessGroup.abort."""

    def abort(self: Any, *args: Any, **kwargs: Any) -> Any:
        nccl_errors.note_abort(self)  # before the abort: holmes may look at the group's state at any time
        return original(self, *args, **kwargs)

    return abort


def _noting_abort_of_backend(original: Any) -> Any:
    """Return a method that notes that the program aborts a group's backend, and calls Backend.abort."""

    def abort(self: Any, *args: Any, **kwargs: Any) -> Any:
        nccl_errors.note_abort_of_backend(self)
        return original(self, *args, **kwargs)

    return abort


# The two new methods must be named `abort` and take `self`. If a Python class inherits them, torch's C++ code
# calls the Python method of the name `abort`, unless a function of this name and this `self` is its caller.
_DELIBERATE = "a group that the program aborts has the same state as one that has lost a rank"

PATCHES = (
    Patch(FAILURES, f"{_C10D}:_register_pg_in_world",
          "torch may abort the process before holmes looks for a failure; every new group is registered here",
          _register_with_abort_hook, only=">=2.13"),
    Patch(FAILURES, f"{_C10D}:ProcessGroup.abort", _DELIBERATE, replace=_noting_abort_of_group,
          only=">=2.7"),
    # The module torch._C._distributed_c10d is part of a library, so its import cannot be observed. torch's
    # Python code imports it as an attribute of torch._C.
    Patch(FAILURES, f"{_C10D}:torch._C._distributed_c10d.Backend.abort", _DELIBERATE,
          replace=_noting_abort_of_backend, only=">=2.7"),
)  # fmt: skip
