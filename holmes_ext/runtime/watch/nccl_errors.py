"""Finds the process groups of this rank whose NCCL communicator has failed.

torch shows a failure in two ways:

    get_error()   The state of a group's backend (since torch 2.7). holmes reads it once a second.
    abort hook    A function that torch calls in the thread that finds the failure, before torch aborts the
                  process (since torch 2.14, if the group's backend is "nccl2" or "nccl-lazy"; "nccl" means
                  "nccl2" since torch 2.15). Without the hook, the process could end before holmes looks.

A program may abort a group by itself, for example to make its groups anew. The group then has the same state
as after a failure, but no rank is lost. So the patches of the abort methods note such groups here
(patches/torch/failures.py), and they are not reported.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holmes_ext.runtime.groups.backend import group_ranks

#: Number under which torch keeps holmes's hook in each backend. torch's own hooks have other numbers.
_HOOK_ID = 0x484F4C4D
#: Longest wait, at the end of the process, for a hook that is running, in seconds.
_RUNNING_HOOK_S = 15.0


class NcclFailure(NamedTuple):
    """Process group whose NCCL communicator has failed."""

    ranks: list[int]  # the members of the group
    error: str  # torch's name of the error: "COMM_ERROR", "REMOTE_ERROR" or "TIMEOUT"


class _Hook:
    """What torch's abort hooks call in this process."""

    report: Callable[[], None] | None = None  # None: failures are not reported by the hooks
    running = threading.Lock()  # held while a thread of torch runs a hook
    is_unregistered_at_exit = False


#: Process groups that the program has aborted by itself.
_aborted: weakref.WeakSet[Any] = weakref.WeakSet()


def nccl_failures() -> list[NcclFailure]:
    """Return the process groups whose NCCL communicator has failed.

    Groups that the program has aborted by itself are left out. Before torch 2.7 no failure is found.
    """
    failures = []
    for group, backend in cuda_backends():
        get_error = getattr(backend, "get_error", None)
        if get_error is None or group in _aborted:
            continue
        error = get_error().name
        if error != "SUCCESS":
            failures.append(NcclFailure(group_ranks(group), error))
    return failures


def note_abort(group: Any) -> None:
    """Note that the program aborts a process group by itself, so that it is not reported as a failure."""
    _aborted.add(group)


def note_abort_of_backend(backend: Any) -> None:
    """Note that the program aborts the backend of a process group by itself (see note_abort)."""
    for group, cuda_backend in cuda_backends():
        if cuda_backend is backend:
            note_abort(group)


def note_reconfiguration(group: Any) -> None:
    """Note that a process group has a new communicator, so that failures of it are reported again."""
    _aborted.discard(group)


def register_abort_hook(group: Any) -> None:
    """Let torch call holmes when NCCL fails in a process group, before torch aborts the process.

    Nothing is done if the backend of the group has no abort hooks.
    """
    import torch

    cuda = torch.device("cuda")
    if cuda not in getattr(group, "_device_types", ()):
        return
    backend = group._get_backend(cuda)
    register = getattr(backend, "register_abort_hook", None)
    if register is None:  # torch before 2.14
        return
    try:
        register(_HOOK_ID, _on_failure)
    except RuntimeError:  # a backend without abort hooks, such as "nccl-legacy"
        return
    if not _Hook.is_unregistered_at_exit:
        _Hook.is_unregistered_at_exit = True
        atexit.register(_unregister_abort_hooks)


def report_failures_with(report: Callable[[], None] | None) -> None:
    """Set the function that torch's abort hooks call when NCCL fails.

    The function runs in a thread of torch, which aborts the process when the function returns. Several
    threads may call it at the same time, and it may be called several times for a failure.

    Args:
        report: None if failures shall not be reported any more.
    """
    _Hook.report = report


def _on_failure() -> None:
    """Report a failure of NCCL. torch calls this function as an abort hook."""
    with _Hook.running:
        report = _Hook.report
        if report is not None:
            report()


def _unregister_abort_hooks() -> None:
    """Remove holmes's hooks from torch at the end of the process.

    A thread of torch that calls Python while the interpreter ends would abort the process, or never return.
    """
    for _group, backend in cuda_backends():
        unregister = getattr(backend, "unregister_abort_hook", None)
        if unregister is None:
            continue
        try:
            unregister(_HOOK_ID)
        except RuntimeError:  # a backend without abort hooks
            continue
    _Hook.report = None
    if _Hook.running.acquire(timeout=_RUNNING_HOOK_S):  # no hook runs now
        _Hook.running.release()


def cuda_backends() -> Iterator[tuple[Any, Any]]:
    """Yield each process group of this rank that has a backend for tensors on GPUs, and this backend."""
    import torch
    import torch.distributed as dist

    cuda = torch.device("cuda")
    if not dist.is_initialized():
        return
    # A copied list: the program may make groups in another thread.
    for group in list(dist.distributed_c10d._world.pg_map):
        if cuda in getattr(group, "_device_types", ()):
            yield group, group._get_backend(cuda)
