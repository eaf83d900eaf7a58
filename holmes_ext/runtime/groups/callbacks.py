"""What the interpreter waits for before it ends: operations under way, and functions that a backend's thread
calls when one is done (torch.futures.Future.then).

    gloo's thread   ...operation | asks for Python | calls | asks for Python again, to forget the function
    main thread     ...last step | exit, which waits here ................... | Python ends

A future is complete before it calls, so training may come to its end meanwhile. A thread that asks for Python
while it ends aborts the process: status 134, "terminate called without an active exception". gloo's threads
ask for Python after every operation, to forget its tensors, and hold a lock until they have it: where
DistributedDataParallel, which outlives destroy_process_group, ends its group meanwhile, the process hangs
(torch 2.13, distributed/c10d/ProcessGroupGloo.cpp, runLoop and the destructor).
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

#: Seconds at exit for a call: an operation that never ends calls nobody.
CALLS_S = 2.0
#: Seconds after the last one, in which its thread forgets the function and the tensors.
FORGET_S = 0.02

#: What is awaited -> seconds from the beginning of the exit on.
_awaited: weakref.WeakKeyDictionary[threading.Event, float] = weakref.WeakKeyDictionary()


def await_at_exit(ended: threading.Event, seconds: float) -> None:
    """As long as it lives."""
    _awaited[ended] = seconds
    forget_before_exit()


def before_exit(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, which the interpreter waits for before it ends."""
    ended = threading.Event()
    await_at_exit(ended, CALLS_S)

    def call(done: Any) -> Any:
        try:
            return function(done)
        finally:
            ended.set()

    return call


def let_threads_forget() -> None:
    """Give gloo's threads the time in which they get Python, after the last operation."""
    time.sleep(FORGET_S)


@cache
def forget_before_exit() -> None:
    """Of a process with a group of gloo, and with the first function: other programs do not wait."""
    atexit.register(_wait)


def _wait() -> None:
    begin = time.monotonic()
    for ended, seconds in list(_awaited.items()):
        ended.wait(max(0.0, begin + seconds - time.monotonic()))
    let_threads_forget()
