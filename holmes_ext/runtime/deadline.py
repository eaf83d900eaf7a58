"""Deadlines of whole operations, a timeout for any function, and errors that only the first rank prints.

All ranks of a job often meet the same error at the same call. told_once() prints it on the first rank that
reaches it. The ranks agree through the job's key-value store:

    1. each rank     claims the message in the store
    2. first rank    prints it, then marks it as printed
    3. other ranks   wait for this mark, at most _WAIT seconds
    4. store's host  waits until all ranks have seen the mark, because the store ends with this process

The line is printed before any rank ends, because a launcher ends all ranks as soon as any rank has ended.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime import session

if TYPE_CHECKING:
    from holmes_ext.errors import HolmesError


#: Seconds that ranks wait for each other in told_once(). Some ranks may not meet the error.
_WAIT = 10.0
_POLL_S = 0.02


def told_once(error: HolmesError, topic: str = "") -> HolmesError:
    """Print an error on the first of several ranks that meet it, and return the error to raise.

    Every rank that meets the error calls this function. The first caller prints the error. The
    ranks find out through the job's key-value store which of them was first.

    Args:
        error: The error.
        topic: Identifies the error if its text differs between ranks. By default the text does.

    Returns:
        A RemoteError with the same text: its handler ends the process without printing the text.
        Without a store, or if the store fails: `error` itself, so each rank prints it. A message
        that is printed twice is better than none.
    """
    current = session.active()
    if current is None or current.store is None:
        return error
    process = current.process
    store = current.store
    digest = hashlib.sha256((topic or str(error)).encode()).hexdigest()[:16]
    key = f"{current.key_prefix}/refusal/{digest}"
    own_rank = str(process.rank)

    # The store ends with the process that hosts it: rank 0, or the launcher's agent (agent_store).
    is_host = process.rank == 0 and not process.agent_store
    try:
        # Writes this rank only if the key has no value yet; returns the key's value afterwards.
        first_rank = store.compare_set(key, "", own_rank).decode()
        if first_rank == own_rank:
            # job._excepthook_over replaces sys.stderr, so the original stream is used.
            print(f"holmes: {error}", file=sys.__stderr__, flush=True)
            store.set(f"{key}/told", "yes")  # the message is printed
        store.wait([f"{key}/told"], timedelta(seconds=_WAIT))
        seen_by = store.add(f"{key}/seen", 1)  # ranks that need the store no more
        deadline = Deadline(_WAIT)
        # The host waits until all ranks have passed this point, so that the store outlives their calls.
        while is_host and seen_by < process.world_size and not deadline.passed:
            time.sleep(_POLL_S)
            seen_by = store.add(f"{key}/seen", 0)  # reads the counter
    except (RuntimeError, ValueError):  # torch.distributed.DistError is a RuntimeError
        return error
    return RemoteError(str(error))


#: Slowest rate, in bytes/s, that is assumed for sending or receiving while the real rate is unknown.
FLOOR_BYTES_PER_S = 64_000
#: Smallest timeout of a socket call, in seconds. 0 would make the socket non-blocking.
_LEAST_S = 0.001


class Deadline:
    """Point in time until which a whole operation must be done, however many calls it makes."""

    def __init__(self, seconds: float, operation: str = "it"):
        """Set the deadline `seconds` from now. `operation` names the operation in the TimeoutError."""
        self.seconds = seconds
        self.operation = operation
        self._end = time.monotonic() + seconds

    @classmethod
    def for_bytes(cls, patience_s: float, count: int, operation: str) -> Deadline:
        """Return a deadline that leaves time to transfer `count` bytes over a slow link.

        The time is `patience_s` seconds and the transfer at FLOOR_BYTES_PER_S.
        """
        return cls(patience_s + count / FLOOR_BYTES_PER_S, operation)

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """True if the deadline has passed."""
        return self.left == 0

    def check(self) -> None:
        """Raise TimeoutError if the deadline has passed."""
        if self.passed:
            raise self.missed()

    def missed(self) -> TimeoutError:
        """Create the TimeoutError to raise if the operation is not done before its deadline."""
        return TimeoutError(f"{self.operation} took longer than {self.seconds:.3g} s")

    def limit(self, connection: socket.socket) -> None:
        """Set the timeout of a socket to the time until the deadline; raise TimeoutError if none is left."""
        self.check()
        connection.settimeout(max(self.left, _LEAST_S))

    def part(self, seconds: float, operation: str) -> Deadline:
        """Create a deadline for a part of the operation: in `seconds`, but not after the whole deadline."""
        return Deadline(min(seconds, self.left), operation)


def within(seconds: float, late: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may hang, e.g. because torch's store client waits for ever for a silent server.

    The function runs in a thread. If it does not return in time, the thread goes on, and its result is lost.

    Args:
        seconds: Seconds until the function must have returned.
        late: Message of the error if it has not.
        function: The function.
        *args: Arguments of the function.

    Returns:
        The result of the function. An exception of the function is raised here.

    Raises:
        HolmesError: The function has not returned in time.
    """
    outcome: Future[Any] = Future()

    def call() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=call, name=f"holmes-{function.__name__}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome.done():
        raise HolmesError(late)
    return outcome.result()
