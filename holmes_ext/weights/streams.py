"""Streams to the source of versions, which stay open between versions.

A new stream takes several round trips, and TCP needs some more until it sends at the rate of the link. So
streams are opened before the first version comes, and the next version uses the same ones.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from holmes_ext.errors import HolmesError
from holmes_ext.weights.exchange import ReceivingStream


class StreamPool:
    """Idle streams to one source. Thread-safe.

    Args:
        dial: Opens a stream to an address; "" is the service.
        most: Streams that stay open.
    """

    def __init__(self, dial: Callable[[str], ReceivingStream], most: int):
        self._dial = dial
        self._most = most
        self._lock = threading.Lock()
        self._address: str | None = None  # of the source
        self._idle: list[ReceivingStream] = []
        self._dialing = 0  # threads of open_ahead()
        self._is_closed = False

    def open_ahead(self, address: str) -> None:
        """Open streams to the next source in threads, until `most` are open; close those to another one."""
        self._use(address)
        self._close_broken()
        with self._lock:
            missing = self._most - len(self._idle) - self._dialing
            if self._is_closed or missing <= 0:
                return
            self._dialing += missing
        for _ in range(missing):
            threading.Thread(
                target=self._open_one, args=(address,), name="holmes-weights-dial", daemon=True
            ).start()

    def _open_one(self, address: str) -> None:
        try:
            # A source that cannot be reached now matters only when there is a version to pull.
            with contextlib.suppress(OSError, HolmesError):
                self.give_back(address, self._dial(address))
        finally:
            with self._lock:
                self._dialing -= 1

    def take(self, address: str) -> ReceivingStream:
        """Return an idle stream to a source, or a new one.

        Raises:
            OSError: The source cannot be reached.
            Refused: It refuses this process.
        """
        self._use(address)
        while True:
            with self._lock:
                if not self._idle:
                    break
                stream = self._idle.pop()
            if stream.is_idle():
                return stream
            stream.close()
        return self._dial(address)

    def give_back(self, address: str, stream: ReceivingStream) -> None:
        """Take back a stream on which no request is open."""
        with self._lock:
            is_kept = (
                address == self._address and len(self._idle) < self._most and not self._is_closed
            )
            if is_kept:
                self._idle.append(stream)
        if not is_kept:
            stream.close()

    def _use(self, address: str) -> None:
        """Close the streams to any other source."""
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
        """Close all idle streams, and those that are given back later."""
        with self._lock:
            self._is_closed = True
            unused, self._idle = self._idle, []
        for stream in unused:
            stream.close()
