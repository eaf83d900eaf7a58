"""Functions that a backend's thread calls when an operation is done (torch.futures.Future.then).

    gloo's thread   ...operation | asks for Python | calls | asks for Python again, to forget the function
    main thread     ...last step | exit, which waits here ................... | Python ends

A future is complete before it calls, so training may come to its end meanwhile. A thread that asks for Python
while it ends aborts the process: status 134, "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

#: Seconds at exit for all calls together: an operation that never ends calls nobody.
CALLS_S = 2.0
#: Seconds after the last one, in which its thread forgets the function.
FORGET_S = 0.02

_calls: weakref.WeakSet[threading.Event] = weakref.WeakSet()


def before_exit(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function`, which the interpreter waits for before it ends."""
    ended = threading.Event()
    _calls.add(ended)
    _register()

    def call(done: Any) -> Any:
        try:
            return function(done)
        finally:
            ended.set()

    return call


@cache
def _register() -> None:
    """With the first function: programs without any do not wait."""
    atexit.register(_wait)


def _wait() -> None:
    limit = time.monotonic() + CALLS_S
    for ended in list(_calls):
        ended.wait(max(0.0, limit - time.monotonic()))
    time.sleep(FORGET_S)
