"""Until when an operation as a whole has to be done, however many calls it makes.

Bad input that every rank meets at the same call: one rank tells it, the others only end.

    each rank   claims the message in the job's store; who comes first prints it, the others wait until it has
    the host    of the store waits for the others before it ends, or they would find no store

The line is out before any rank ends, because a launcher ends all ranks as soon as one has.
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


#: How long ranks wait for each other, in seconds: some have perhaps nothing to refuse.
_WAIT = 10.0


def told_once(error: HolmesError, topic: str = "") -> HolmesError:
    """A RemoteError to raise instead of `error`: one rank has told the message by then. topic: where ranks
    word it differently. Without a store the error itself: told twice rather than never."""
    current = session.active()
    if current is None or current.store is None:
        return error
    process, store = current.process, current.store
    key = (
        f"{current.round}/refusal/{hashlib.sha256((topic or str(error)).encode()).hexdigest()[:16]}"
    )
    mine = str(process.rank)
    try:
        if store.compare_set(key, "", mine).decode() == mine:
            print(
                f"holmes: {error}", file=sys.__stderr__, flush=True
            )  # not sys.stderr: see job._excepthook_over
            store.set(f"{key}/told", "yes")
        store.wait([f"{key}/told"], timedelta(seconds=_WAIT))
        seen = store.add(f"{key}/seen", 1)
        limit = Deadline(_WAIT)
        while (
            process.rank == 0
            and not process.agent_store
            and seen < process.world_size
            and limit.left > 0
        ):
            time.sleep(0.02)
            seen = store.add(f"{key}/seen", 0)
    except (RuntimeError, ValueError):  # torch.distributed.DistError is a RuntimeError
        return error
    return RemoteError(str(error))


#: Slowest rate at which somebody of whom nothing is known may send, or take: bytes/s.
FLOOR_BYTES_PER_S = 64_000
#: Seconds that a socket call gets at least: 0 would make it non-blocking.
_LEAST_S = 0.001


class Deadline:
    """`seconds` from now on the monotonic clock. what: the operation, for the TimeoutError."""

    def __init__(self, seconds: float, what: str = "it"):
        self.seconds, self.what = seconds, what
        self._end = time.monotonic() + seconds

    @classmethod
    def for_bytes(cls, patience_s: float, count: int, what: str) -> Deadline:
        """Of `count` bytes: a slow link is waited for as long as it carries them."""
        return cls(patience_s + count / FLOOR_BYTES_PER_S, what)

    @property
    def left(self) -> float:
        """Seconds, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left == 0

    def check(self) -> None:
        """TimeoutError once it has passed."""
        if self.passed:
            raise self.missed()

    def missed(self) -> TimeoutError:
        """That it has passed."""
        return TimeoutError(f"{self.what} took longer than {self.seconds:.3g} s")

    def limit(self, connection: socket.socket) -> None:
        """The next call on this socket ends when the operation must. TimeoutError when it has passed."""
        self.check()
        connection.settimeout(max(self.left, _LEAST_S))

    def part(self, seconds: float, what: str) -> Deadline:
        """Of a part of this operation: `seconds` at most, and never longer than the whole."""
        return Deadline(min(seconds, self.left), what)


def within(seconds: float, late: str, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), or HolmesError `late` after so many seconds, an end for what has
    none (torch's store waits for ever for a server that is silent); its thread is left where it hangs."""
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
