"""Detects process groups whose NCCL communicator has failed, and says where torch dumps the last operations.

There are two ways to detect a failure:

    polling       nccl_failures() reads the state of each group's backend by torch's method get_error()
                  (torch 2.7 and newer). The thread of NicWatch calls it once a second.
    abort hooks   torch calls an abort hook, a Python function, in the thread that detects the failure, and
                  aborts the process when the function returns. Without such a hook, torch could abort the
                  process between two polls, and holmes would report nothing. Abort hooks exist since
                  torch 2.14, for the backends "nccl2" and "nccl-lazy". Since torch 2.15 "nccl" is "nccl2".

Not every error is a failure. A program may abort a process group itself, for example to replace it by a new
group. get_error() then returns the same error as for a lost rank. So patches/torch/failures.py wraps torch's
abort methods and calls mark_aborted_by_program(). Marked groups are not reported.

This module also tells the user where to find the dumps of torch's flight recorder (dump_hint), and how to
read them. The flight recorder is a buffer in every rank with the rank's last collectives and messages. When
NCCL fails or times out, torch dumps the buffer to a file on the rank's node. The part of torch that does so
depends on the backend of a process group:

    "nccl" of torch 2.13 and 2.14, and "nccl-legacy"
        The C++ class ProcessGroupNCCL writes the dump. Its monitoring thread starts this.
    "nccl" of torch 2.15, and other backends that support abort hooks
        torch registers a FlightRecorderHook with the backend. The backend calls its abort hooks when a
        collective fails or times out, and this hook writes the dump.

Environment variables of torch switch the dumps off and set their path. The names and defaults in this module
are those of torch 2.13 and newer. For older releases no message is made.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from holmes_ext.runtime.backend import group_ranks

_OLDEST_TORCH = Version("2.13")
#: Values, in lower case, that switch a feature of torch off in an environment variable.
_OFF = ("0", "n", "no", "f", "false")

# Each tuple lists the environment variables of a setting. torch renamed some variables from TORCH_NCCL_* to
# TORCH_FR_* and still reads the old names. The new name comes first and takes precedence if both are set.
#: Operations that the buffer holds; 0 switches the flight recorder off.
_BUFFER_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
#: Path of a dump. torch appends the rank.
_PATH_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: Switch for the dumps of FlightRecorderHook.
_HOOK_DUMP_VARIABLES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
#: Switches for the dumps of ProcessGroupNCCL and for the thread that starts them. They have no newer names.
_LEGACY_DUMP_VARIABLES = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_LEGACY_MONITORING_VARIABLES = ("TORCH_NCCL_ENABLE_MONITORING",)


def dump_hint(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return a message that names this rank's dump file and the command that reads the dumps of all ranks.

    An empty string is returned if torch writes no dump on this rank, for example because the flight recorder
    is switched off or no process group uses NCCL.

    Args:
        rank: The global rank of this process.
        environ: The environment variables of this process.
    """
    import torch
    import torch.distributed as dist

    is_supported_torch = Version(torch.__version__) >= _OLDEST_TORCH
    if not is_supported_torch or not dist.is_nccl_available():
        return ""

    # The variables have a new and an old name; the first that is set counts.
    buffer_size = _first_value(environ, _BUFFER_SIZE_VARIABLES, default="2000")
    if buffer_size == "0":  # the flight recorder is off
        return ""
    if not any(_dumps_on_failure(group, backend, environ) for group, backend in cuda_backends()):
        return ""
    path_without_rank = Path(_first_value(environ, _PATH_VARIABLES, default=_default_path(environ)))
    return (
        f"when NCCL fails or times out, torch writes the last operations of rank {rank} to "
        f"{path_without_rank}{rank}; copy these files of all ranks to a folder, and read them with: "
        f"torchfrtrace --allow-incomplete-ranks --prefix {path_without_rank.name} FOLDER"
    )


def _dumps_on_failure(group: Any, backend: Any, environ: Mapping[str, str]) -> bool:
    """Return whether torch dumps the flight recorder's buffer when a process group fails or times out.

    Args:
        group: The process group.
        backend: The group's backend for CUDA tensors.
        environ: The environment variables of this process.
    """
    import torch.distributed as dist

    if isinstance(backend, dist.ProcessGroupNCCL):  # nccl-legacy, whose monitoring thread dumps
        is_dump_enabled = _is_enabled(environ, _LEGACY_DUMP_VARIABLES)
        is_monitored = _is_enabled(environ, _LEGACY_MONITORING_VARIABLES)
        return is_dump_enabled and is_monitored

    # Groups with a FlightRecorderHook. torch has this dict since release 2.15.
    hook_by_group = getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {})
    if group not in hook_by_group:
        return False

    # torch also registers a FlightRecorderHook with backends that have no abort hooks. It then fills the
    # buffer, but nothing calls it when a collective fails, so it never writes a dump.
    return backend.supports_abort_hooks and _is_enabled(environ, _HOOK_DUMP_VARIABLES)


def _default_path(environ: Mapping[str, str]) -> str:
    """Return torch's default path of a dump. torch appends the rank to it.

    The file is in the user's cache folder: $XDG_CACHE_HOME, or $HOME/.cache if that variable is not set.
    """
    home_cache = f"{environ.get('HOME', '/tmp')}/.cache"
    cache = environ.get("XDG_CACHE_HOME", home_cache)
    return f"{cache}/torch/comm_lib_trace_rank_"


def _is_enabled(environ: Mapping[str, str], variables: tuple[str, ...]) -> bool:
    """Return whether a switch of torch is on. It is on by default.

    Args:
        environ: The environment variables of this process.
        variables: Names of the switch. The first name that is set in `environ` decides.
    """
    return _first_value(environ, variables, default="1").lower() not in _OFF


def _first_value(environ: Mapping[str, str], variables: tuple[str, ...], default: str) -> str:
    """Return the value of the first of the `variables` that is set and not empty, else `default`."""
    for name in variables:
        if environ.get(name):
            return environ[name]
    return default


#: ID of holmes's abort hook in each backend ("HOLM" in ASCII). It must differ from the
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
    for group, backend in cuda_backends():  # process groups with a backend for CUDA tensors
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
    except RuntimeError:
        # The method exists, but this backend has no abort hooks, e.g. "nccl-legacy".
        return
    if not _HookState.has_exit_handler:
        _HookState.has_exit_handler = True
        atexit.register(_unregister_abort_hooks)


def set_failure_callback(on_failure: Callable[[], None] | None) -> None:
    """Set the function that the abort hooks call when NCCL fails.

    The function runs in a thread of torch. When it returns, the thread aborts the process. Several threads
    may call it in turn because of the same failure.

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
