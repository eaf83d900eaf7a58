"""Keeps transfers of weights from slowing down training: a rate limit, pauses, and packets of low priority.

limit     HOLMES_WEIGHTS_RATE, shared by all connections of a process
pauses    nothing is sent while joined jobs exchange gradients, but at most half of the time, and PAUSE_S
          at a stretch: jobs that always exchange gradients do not stop the weights
priority  DSCP CS1 ("lower effort") for routers, and the lowest band of the host's own queue. A network
          that ignores DSCP shares its rate between weights and training as between any two connections
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from holmes_ext.errors import HolmesError
from holmes_ext.units import parse_rate

#: Longest pause, in seconds. A receiver that gets no bytes for longer gives the connection up.
PAUSE_S = 10.0
#: Least limit, in bits/s: with a lower one, receivers would give connections up.
LEAST_BITS_PER_S = 8_000_000
#: Seconds of traffic that may pass at once after a pause.
_BURST_S = 0.05
#: Seconds between two checks whether training still exchanges data.
_LOOK_S = 0.005
#: DSCP CS1 in the byte of the IP header (RFC 4594), and the priority TC_PRIO_BULK of the host's queues.
_CS1 = 0x20
_BULK = 2
#: Most bytes of a connection that the kernel takes before it sends them.
_MOST_UNSENT_BYTES = 2**17


class RateLimit:
    """Rate limit for transfers of weights, shared by all threads of a process. Thread-safe.

    A thread calls take() before it sends or receives some bytes. take() waits as long as the limit demands,
    and also while training exchanges data. These pauses have a budget, so that the weights are not stopped
    if training always exchanges data. At first the budget is PAUSE_S seconds. Each second of a pause
    reduces the budget by a second. Each second without a pause adds a second, up to PAUSE_S.

    Args:
        bits_per_second: The limit; 0: no limit.
        is_training_sending: Returns whether training exchanges data now.
    """

    def __init__(
        self,
        bits_per_second: float = 0.0,
        is_training_sending: Callable[[], bool] = lambda: False,
    ):
        self._bytes_per_second = bits_per_second / 8
        self._is_training_sending = is_training_sending
        self._lock = threading.Lock()
        # Time when all bytes of earlier calls of take() have been sent, if they are sent at the limit.
        self._link_free_at = 0.0
        self._is_paused = False  # since the last call of _update_pause()
        self._pause_checked_at = time.monotonic()  # time of that call
        self._pause_budget_s = PAUSE_S  # how long sending may still pause, in seconds

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may be sent or received."""
        self._pause_for_training()
        if not self._bytes_per_second:
            return
        with self._lock:
            now = time.monotonic()
            # After an idle time, _BURST_S seconds of traffic may pass at once.
            begins_at = max(self._link_free_at, now - _BURST_S)
            self._link_free_at = begins_at + count / self._bytes_per_second
            wait_s = self._link_free_at - now
        if wait_s > 0:
            time.sleep(wait_s)
            self._pause_for_training()  # it may have begun meanwhile

    def _pause_for_training(self) -> None:
        """Wait while training exchanges data, as long as the budget of pauses lasts."""
        while self._update_pause():
            time.sleep(_LOOK_S)

    def _update_pause(self) -> bool:
        """Update the budget of pauses for the time since the last call; return whether to pause now.

        Sending must pause while training exchanges data and the budget is not used up.
        """
        is_training_sending = self._is_training_sending()
        with self._lock:
            now = time.monotonic()
            elapsed_s = now - self._pause_checked_at
            self._pause_checked_at = now
            if self._is_paused:
                self._pause_budget_s -= elapsed_s
            else:
                self._pause_budget_s = min(PAUSE_S, self._pause_budget_s + elapsed_s)
            self._is_paused = is_training_sending and self._pause_budget_s > 0
            return self._is_paused


def parse_rate_limit(text: str, where: str) -> int:
    """Parse a rate limit for weights, and return it in bits/s.

    Args:
        text: The limit, such as "400Mb/s".
        where: Name of the option or variable, for error messages.

    Raises:
        HolmesError: The text is no rate, or the rate is below LEAST_BITS_PER_S.
    """
    rate = parse_rate(text, where)
    if rate < LEAST_BITS_PER_S:
        raise HolmesError(
            f"{where}: {text} is below {LEAST_BITS_PER_S // 10**6}Mb/s, the least limit"
        )
    return rate


def make_background(connection: socket.socket) -> None:
    """Mark the packets of a connection as less urgent than all others, as far as the system allows it.

    Also limit the bytes that the kernel accepts and has not sent: it still sends them after RateLimit has
    paused the weights because training exchanges data.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)
    with contextlib.suppress(OSError):
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _CS1)
        # Of an IPv6 socket, this is for IPv4 addresses that are mapped into IPv6.
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _CS1)
    with contextlib.suppress(OSError):
        # After IP_TOS, which sets the priority, too.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK)
