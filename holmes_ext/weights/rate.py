"""Limit on the rate of several connections together."""

from __future__ import annotations

import threading
import time

#: Seconds of traffic that may pass at once after a pause.
_BURST_S = 0.05
#: Least limit, in bits/s: slower streams would be taken for broken ones.
LEAST_BITS_PER_S = 8_000_000


class RateLimit:
    """Limit that all threads which call take() share. Thread-safe.

    Args:
        bits_per_second: The limit; 0: none.
    """

    def __init__(self, bits_per_second: float = 0.0):
        self._bytes_per_second = bits_per_second / 8
        self._lock = threading.Lock()
        self._free_at = 0.0  # time at which all bytes that were taken are through

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        if not self._bytes_per_second:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._bytes_per_second
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)
