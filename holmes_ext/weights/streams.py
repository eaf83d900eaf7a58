"""Pool of connections (streams) for pulling versions of the weights, which stay open between versions.

Opening a stream takes several round trips, and TCP needs some more until it sends at the rate of the link. So
streams are opened before the first version comes, and the next version uses the same ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from holmes_ext.errors import HolmesError
from holmes_ext.weights.exchange import ReceivingStream


class StreamPool:
    """Pool of open connections (streams) to one source that no transfer uses now. Thread-safe.

    A source is the process from which versions are pulled: a host of the same site with the address
    HOST:PORT, or the service, for which all methods take the address "". If another address is used, the
    pool closes the streams to the former source.

    Args:
        dial: Opens a stream to the source with an address.
        most: Largest number of unused streams that stay open.
    """

    def __init__(self, dial: Callable[[str], ReceivingStream], most: int):
        self._dial = dial
        self._most = most
        self._lock = threading.Lock()
        self._address: str | None = None  # of the source
        self._idle: list[ReceivingStream] = []
        self._dialing = 0  # streams that threads of open_ahead() are opening now
        #: Newest version of this host: its streams to the service request the next one. None: they do not,
        #: because the next one is being pulled.
        self._newest: int | None = None
        self._is_closed = False

    def open_ahead(self, address: str, newest: int = -1) -> None:
        """Begin to open streams to a source before they are needed: as many as the pool may hold.

        Threads open the streams, and this method returns at once. A stream that cannot be opened is left out
        without an error. Streams to the service request the next version, which need not exist yet.

        Args:
            address: Address of the source.
            newest: Newest version that this host has; -1: none.
        """
        self._use(address)
        self._close_broken()
        with self._lock:
            self._newest = newest
            # Streams that a transfer has given back have not requested the next version yet: _add() does it.
            for stream in self._split_off_free():
                self._add(address, stream)
            missing = self._most - len(self._idle) - self._dialing
            if self._is_closed or missing <= 0:
                return
            self._dialing += missing
        for _ in range(missing):
            threading.Thread(
                target=self._open_stream, args=(address,), name="holmes-weights-dial", daemon=True
            ).start()

    def _open_stream(self, address: str) -> None:
        try:
            # A source that cannot be reached now matters only when there is a version to pull.
            with contextlib.suppress(OSError, HolmesError):
                stream = self._dial(address)
                if not address:
                    self._warm_up(stream)
                self.give_back(address, stream)
        finally:
            with self._lock:
                self._dialing -= 1

    def _warm_up(self, stream: ReceivingStream) -> None:
        try:
            stream.warm_up()
        except BaseException:
            stream.close()
            raise

    def _add(self, address: str, stream: ReceivingStream) -> None:
        """Add an unused stream; one to the service requests the next version. The caller holds the lock."""
        is_to_service = not address
        has_requested = stream.next_request is not None
        if is_to_service and self._newest is not None and not has_requested:
            # Each stream requests every `most`-th chunk. So each begins with another one of the first chunks.
            requested = {other.next_request.first for other in self._idle if other.next_request}
            first = min(set(range(self._most)) - requested)
            try:
                stream.request_next(self._newest, first, self._most)
            except OSError:
                stream.close()
                return
        self._idle.append(stream)

    def _split_off_free(self) -> list[ReceivingStream]:
        """Remove and return the unused streams that do not wait for the next version.

        The caller holds the lock.
        """
        free = [stream for stream in self._idle if stream.next_request is None]
        self._idle = [stream for stream in self._idle if stream not in free]
        return free

    def take_waiting(self, address: str) -> list[ReceivingStream]:
        """Remove the unused streams that wait for the next version from the pool, and return them.

        The first chunks of the version may be arriving over them already.
        """
        self._use(address)
        with self._lock:
            self._newest = None
            free = self._split_off_free()
            waiting, self._idle = self._idle, free
        return waiting

    def take(self, address: str) -> ReceivingStream:
        """Return a stream to a source: an unused one that still works, or else a new one.

        Raises:
            OSError: The source cannot be reached.
            Refused: The source refuses this process.
        """
        self._use(address)
        while True:
            with self._lock:
                # Streams that wait for the next version give no other answers before.
                free = self._split_off_free()
                stream = free.pop() if free else None
                self._idle += free
            if stream is None:
                return self._dial(address)
            if stream.is_idle():
                return stream
            stream.close()

    def give_back(self, address: str, stream: ReceivingStream) -> None:
        """Put a stream back into the pool, or close it if the pool has enough or has another source.

        Args:
            address: Address of the source of the stream.
            stream: The stream. All of its requests have been answered.
        """
        with self._lock:
            is_kept = self._has_room(address)
            if is_kept:
                self._add(address, stream)
        if not is_kept:
            stream.close()

    def _has_room(self, address: str) -> bool:
        """Return whether an unused stream to a source stays open. The caller holds the lock."""
        return address == self._address and len(self._idle) < self._most and not self._is_closed

    def _use(self, address: str) -> None:
        """Set the address of the source; if it is another one, close the streams to the former source."""
        with self._lock:
            if address == self._address:
                return
            self._address = address
            unused, self._idle = self._idle, []
        for stream in unused:
            stream.close()

    def _close_broken(self) -> None:
        with self._lock:
            broken = [stream for stream in self._idle if not stream.is_idle()]
            self._idle = [stream for stream in self._idle if stream not in broken]
        for stream in broken:
            stream.close()

    def close(self) -> None:
        """Close all unused streams. A stream that is given back later is closed at once."""
        with self._lock:
            self._is_closed = True
            unused, self._idle = self._idle, []
        for stream in unused:
            stream.close()
