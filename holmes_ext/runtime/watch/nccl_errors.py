"""Detects process groups of this rank whose NCCL communicator has failed.

There are two sources:

    polling       nccl_failures() reads the state of each group's backend by torch's method get_error()
                  (torch 2.7 and newer). The thread of NicWatch calls it once a second.
    abort hooks   torch calls an abort hook, a Python function, in the thread that detects the failure, and
                  aborts the process when the function returns. Without such a hook, torch could abort the
                  process between two polls, and holmes would report nothing. Abort hooks exist since
                  torch 2.14, for the backends "nccl2" and "nccl-lazy". Since torch 2.15 "nccl" is "nccl2".

Not every error is a failure. A program may abort a process group itself, for example to replace it by a new
group. get_error() then returns the same error as for a lost rank. So patches/torch/failures.py wraps torch's
abort methods and calls mark_aborted_by_program(). Marked groups are not reported.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holmes_ext.runtime.backend import group_ranks

#: ID under which holmes registers its abort hook with each backend ("HOLM" in ASCII). It must differ from the
#: IDs of torch's abort hooks.
_HOOK_ID = 0x484F4C4D
#: Longest time that the exit of the process waits for a running abort hook, in seconds.
_HOOK_EXIT_WAIT_S = 15.0


class NcclFailure(NamedTuple):
    """Process group whose NCCL communicator has failed."""

    ranks: list[int]  # global ranks of the group's members
    error: str  # torch's name of the error: "COMM_ERROR", "REMOTE_ERROR" or "TIMEOUT"


class _HookState:
    """State that all abort hooks of this process share."""

    on_failure: Callable[[], None] | None = None  # called by the abort hooks; None: they do nothing
    running = threading.Lock()  # held while a thread of torch runs an abort hook
    has_exit_handler = False  # whether atexit calls _unregister_abort_hooks()


#: Process groups that the program has aborted itself.
_aborted_by_program: weakref.WeakSet[Any] = weakref.WeakSet()


def nccl_failures() -> list[NcclFailure]:
    """Return the process groups of this rank whose NCCL communicator has failed.

    Groups that the program has aborted itself are left out. The list is empty before torch 2.7, whose
    backends have no get_error().
    """
    failures = []
    for group, backend in cuda_backends():
        get_error = getattr(backend, "get_error", None)
        if get_error is None or group in _aborted_by_program:
            continue
        error = get_error().name
        if error != "SUCCESS":
            failures.append(NcclFailure(group_ranks(group), error))
    return failures


def mark_aborted_by_program(group: Any) -> None:
    """Exclude a process group from nccl_failures(), because the program aborts the group itself."""
    _aborted_by_program.add(group)


def mark_backend_aborted_by_program(backend: Any) -> None:
    """Exclude the process group of a backend from nccl_failures(), because the program aborts the backend.

    Args:
        backend: A backend object of torch. Backends for CPU tensors are ignored.
    """
    for group, cuda_backend in cuda_backends():
        if cuda_backend is backend:
            mark_aborted_by_program(group)


def unmark_aborted_by_program(group: Any) -> None:
    """Include a process group in nccl_failures() again, because it has a new communicator."""
    _aborted_by_program.discard(group)


def register_abort_hook(group: Any) -> None:
    """Register holmes's abort hook with a process group's backend for CUDA tensors.

    When NCCL fails in the group, torch calls the hook before it aborts the process. The hook calls the
    function that set_failure_callback() has set.

    Groups whose backend has no abort hooks, and groups without a backend for CUDA tensors, stay as they are.
    """
    backend = _cuda_backend(group)
    register = getattr(backend, "register_abort_hook", None)
    if register is None:  # torch before 2.14, or there is no backend for CUDA tensors
        return
    try:
        register(_HOOK_ID, _run_abort_hook)
    except RuntimeError:  # the method exists, but this backend has no abort hooks, e.g. "nccl-legacy"
        return
    if not _HookState.has_exit_handler:
        _HookState.has_exit_handler = True
        atexit.register(_unregister_abort_hooks)


def set_failure_callback(on_failure: Callable[[], None] | None) -> None:
    """Set the function that the abort hooks call when NCCL fails.

    The function runs in a thread of torch, which aborts the process after the function has returned. Several
    threads may call it, one after another, because of the same failure.

    Args:
        on_failure: The function. None stops the reports: the abort hooks then do nothing.
    """
    _HookState.on_failure = on_failure


def _run_abort_hook() -> None:
    """Call the function that set_failure_callback() has set. This is holmes's abort hook, called by torch."""
    with _HookState.running:
        on_failure = _HookState.on_failure
        if on_failure is not None:
            on_failure()


def _unregister_abort_hooks() -> None:
    """Remove holmes's abort hooks from all backends, and wait until no hook is running.

    This runs when the process exits. If a thread of torch called Python while the interpreter shuts down, the
    process would abort, or the thread would hang.
    """
    for _group, backend in cuda_backends():
        unregister = getattr(backend, "unregister_abort_hook", None)
        if unregister is None:  # torch before 2.14
            continue
        try:
            unregister(_HOOK_ID)
        except RuntimeError:  # the method exists, but this backend has no abort hooks
            continue
    _HookState.on_failure = None

    # A running hook holds the lock until its message is printed.
    has_lock = _HookState.running.acquire(timeout=_HOOK_EXIT_WAIT_S)
    if has_lock:
        _HookState.running.release()


def cuda_backends() -> Iterator[tuple[Any, Any]]:
    """Yield (process group, backend) for each group of this rank that has a backend for CUDA tensors."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    # The list is a copy, since another thread of the program may add groups during the iteration.
    for group in list(dist.distributed_c10d._world.pg_map):
        backend = _cuda_backend(group)
        if backend is not None:
            yield group, backend


def _cuda_backend(group: Any) -> Any:
    """Return a process group's backend for CUDA tensors; None if it has none."""
    import torch

    cuda = torch.device("cuda")
    if cuda not in getattr(group, "_device_types", ()):
        return None
    return group._get_backend(cuda)
