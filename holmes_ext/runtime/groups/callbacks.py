"""Delays the exit of the interpreter until asynchronous operations and their callbacks have ended.

A backend's thread that needs the GIL while the interpreter ends aborts the process (status 134, "terminate
called without an active exception"). There are two cases:

    callbacks   torch.futures.Future.then() runs a function in the thread of the backend. The future is
                complete before the function runs, so the program may reach its end meanwhile.
    gloo        Its threads need the GIL after every operation, to free the operation's tensors, and hold a
                lock until they have it. DistributedDataParallel outlives destroy_process_group. If it ends
                its group meanwhile, the process hangs (torch 2.13, distributed/c10d/ProcessGroupGloo.cpp,
                runLoop and the destructor).

    gloo's thread   ...operation | needs GIL | callback | needs GIL again, to free the function
    main thread     ...last step | exit: waits here ............... | the interpreter ends

All waits have a time limit, so the exit is delayed, but not for ever. An operation that another rank never
joins ends when that rank's process ends, or by gloo's timeout. Without holmes the exit waits for it, too, in
the destructor of the group. That is too late for a callback, since the interpreter has ended then.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from holmes_ext.words import counted

#: Longest wait for a callback at exit, in seconds. The callback of an operation that never ends never runs.
CALLS_S = 600.0
#: Seconds at exit until a line names the operations that the exit waits for.
_SILENT_S = 2.0
#: Time at exit, in seconds, for the backend's thread to free the last function and its tensors.
FREE_S = 0.02
#: Longest time at exit, in seconds, that gloo's threads get if they still run after FREE_S. On a busy
#: machine, a thread may wait longer than FREE_S for a CPU.
_RUNNING_S = 2.0
_CHECKS = 4  # in FREE_S
#: Names that torch and gloo give to threads that run operations.
_GLOO_THREAD = "gloo"

#: Event -> longest wait for it, in seconds from the beginning of the exit.
_awaited: weakref.WeakKeyDictionary[threading.Event, float] = weakref.WeakKeyDictionary()


def await_at_exit(ended: threading.Event, seconds: float) -> None:
    """Wait for an event when the interpreter exits, if the event object still exists then.

    Args:
        ended: The event.
        seconds: Longest wait, in seconds from the beginning of the exit.
    """
    _awaited[ended] = seconds
    delay_exit()


def before_exit(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a callback, so that the exit of the interpreter waits until it was called.

    Args:
        function: Callback of a torch.futures.Future. It is called with the future.
    """
    ended = threading.Event()
    # Limits the wait at exit: the callback of an operation that never ends is never called.
    await_at_exit(ended, seconds=CALLS_S)

    def call(argument: Any) -> Any:
        try:
            return function(argument)
        finally:
            ended.set()

    return call


def let_threads_free_tensors() -> None:
    """Sleep until gloo's threads have had the time to free the tensors of the last operation.

    The threads need the GIL for that, and this thread does not hold it while it sleeps. They have freed
    everything when none of them is busy in _CHECKS successive checks.
    """
    deadline = time.monotonic() + _RUNNING_S
    idle_checks = 0
    while idle_checks < _CHECKS and time.monotonic() < deadline:
        time.sleep(FREE_S / _CHECKS)
        idle_checks = 0 if _has_running_gloo_thread() else idle_checks + 1


def _has_running_gloo_thread() -> bool:
    """Return whether a thread of gloo in this process is busy, by its state in /proc.

    A busy thread runs or waits for a CPU (state R), or is in a short wait of the kernel, such as for a
    page of memory (D). An idle thread sleeps until an operation of gloo begins (S).
    """
    for file in Path("/proc/self/task").glob("*/stat"):
        try:
            # "4711 (pt_gloo_runloop) S 1 ...": number, name, state
            name, _, values = file.read_text(errors="replace").partition(") ")
        except OSError:  # the thread has ended
            continue
        state = values[:1]
        if _GLOO_THREAD in name and state in ("R", "D"):
            return True
    return False


@cache
def delay_exit() -> None:
    """Register a function that delays the interpreter's exit until gloo's threads are idle.

    It first waits for the events of await_at_exit(), for a limited time. Further calls have no effect.
    Programs without a gloo group or a callback do not call this function, and exit without delay.
    """
    atexit.register(_wait)


def _wait() -> None:
    """Wait for all awaited events, each at most until its time limit, and then for gloo's threads.

    An event is set when an operation over gloo or its callback has ended (see await_at_exit). If some are not
    set after _SILENT_S seconds, a line is printed: the exit waits for operations.
    """
    begin = time.monotonic()
    deadlines = {ended: begin + seconds for ended, seconds in list(_awaited.items())}
    # First wait silently, for at most _SILENT_S seconds.
    for ended, deadline in deadlines.items():
        ended.wait(max(0.0, min(deadline, begin + _SILENT_S) - time.monotonic()))

    # Then print a line, and wait for the remaining events until their time limits.
    now = time.monotonic()
    pending = {}
    for ended, deadline in deadlines.items():
        if not ended.is_set() and deadline > now:
            pending[ended] = deadline
    if pending:
        _report(pending=len(pending), longest_s=max(pending.values()) - now)
    for ended, deadline in pending.items():
        ended.wait(max(0.0, deadline - time.monotonic()))

    # The operations have ended, but gloo's threads still need the GIL to free the tensors.
    let_threads_free_tensors()


def _report(pending: int, longest_s: float) -> None:
    """Print how many operations the exit waits for, if the stream for messages still exists."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or it is closed
        sys.stderr.write(
            f"holmes: the exit waits up to {longest_s:.0f} s for {counted(pending, 'operation')} under way "
            "over gloo, until the other ranks take part or end\n"
        )
        sys.stderr.flush()
