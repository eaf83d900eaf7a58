"""Limits of the memory that a process spends on messages of its callers, of each job and in all.

Each message under way has a Reservation that grows as the message does. A job that would exceed its own
limit is refused. When the limit of all jobs is reached, the connections of the job that holds most are
closed, so that many large messages do not keep small messages out.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

_MIB = 2**20
_REVOKED = "its memory was needed for smaller messages of other jobs"


class MemoryExhausted(ConnectionError):
    """Error: a message would take more memory than its job, or than all jobs together, may hold."""


class Reservation:
    """Number of bytes that a message under way takes in memory, or is about to take.

    The code that receives or sends the message calls grow() before it uses more memory.

    Args:
        budget: Limits on the sum of all reservations, and on the sum of those of a single job.
        job: The job that sends or gets the message.
        cut: Shuts the connection of the message down. The budget calls it, from another thread, to get
            the memory back for messages of other jobs.
    """

    def __init__(self, budget: MemoryBudget, job: str, cut: Callable[[], None]):
        self.job = job
        self.cut = cut
        self.held = 0  # bytes
        self.is_revoked = False  # the budget has given its memory to another job
        self._budget = budget

    def grow(self, count: int) -> None:
        """Reserve `count` more bytes for the message, before they are used.

        Raises:
            MemoryExhausted: A limit is reached. Or the budget has closed the connection of this message
                before, because messages of another job needed its memory.
        """
        self._budget.grow(self, count)


class MemoryBudget:
    """Limits on the memory that messages under way take at the same time. Thread-safe.

    A message that would exceed the limit of its job is refused. If it would exceed the limit of all jobs, the
    connections with messages of the job that takes most memory are closed. If that would be the message's own
    job, the message is refused instead.

    Args:
        most: Bytes for the messages of all jobs, at most.
        most_of_job: Bytes for the messages of a single job, at most.
    """

    def __init__(self, most: int, most_of_job: int):
        self._most = most
        self._most_of_job = most_of_job
        self._lock = threading.Lock()
        self._reservations: set[Reservation] = set()
        self._held: Counter[str] = Counter()  # job -> bytes

    @property
    def held(self) -> int:
        """Return the bytes that all messages hold now."""
        with self._lock:
            return self._held.total()

    @contextlib.contextmanager
    def reservation(self, job: str, cut: Callable[[], None]) -> Iterator[Reservation]:
        """Provide an empty reservation for a message, and release its bytes at the end.

        Args:
            job: The job that sends or gets the message.
            cut: Shuts the connection of the message down; any thread may call it.

        Raises:
            MemoryExhausted: The connection was closed because messages of another job needed the memory.
                Raised in place of the OSError of the closed connection.
        """
        reservation = Reservation(self, job, cut)
        with self._lock:
            self._reservations.add(reservation)
        try:
            yield reservation
        except OSError:
            if reservation.is_revoked:  # cut() has broken the connection
                raise MemoryExhausted(_REVOKED) from None
            raise
        finally:
            with self._lock:
                self._release(reservation)

    def grow(self, reservation: Reservation, count: int) -> None:
        """Add bytes to the reservation of a message, if the limits on memory allow it.

        If the limit of all jobs together is exceeded, the connections of the job with most memory are
        closed, to free its memory.

        Raises:
            MemoryExhausted: The job of the message would exceed its own limit; the limit of all jobs
                would be exceeded, and this job would hold most memory; or the message's own
                connection was closed to free its memory.
        """
        job = reservation.job
        with self._lock:
            if reservation.is_revoked:
                raise MemoryExhausted(_REVOKED)
            wanted = self._held[job] + count
            if wanted > self._most_of_job:
                raise MemoryExhausted(
                    f"messages of job {job} would take more than {self._most_of_job // _MIB} MiB"
                )
            while self._held.total() + count > self._most:
                largest, held = self._held.most_common(1)[0]
                if held <= wanted:
                    raise MemoryExhausted(
                        f"messages of all jobs would take more than {self._most // _MIB} MiB"
                    )
                self._revoke(largest)
            reservation.held += count
            self._held[job] = wanted

    def _revoke(self, job: str) -> None:
        """Close the connections on which messages of a job hold memory. The caller must hold the lock."""
        # A list, because _release() changes the set.
        for reservation in list(self._reservations):
            if reservation.job != job or not reservation.held:
                continue
            self._release(reservation)
            reservation.is_revoked = True
            reservation.cut()  # its thread gets an error, and frees the memory

    def _release(self, reservation: Reservation) -> None:
        """Remove a reservation, and subtract its bytes from its job's. The caller must hold the lock."""
        self._reservations.discard(reservation)
        self._held[reservation.job] -= reservation.held
        reservation.held = 0
        if self._held[reservation.job] <= 0:
            del self._held[reservation.job]
