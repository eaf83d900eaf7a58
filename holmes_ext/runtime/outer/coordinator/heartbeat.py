"""Tells the coordinator that the job lives: a thread with a connection of its own, so that a heartbeat never
waits for an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.member import HEARTBEAT_S
from holmes_ext.runtime.sockets.channel import Channel
from holmes_ext.runtime.sockets.deadline import Deadline

#: Seconds that a heartbeat, with a connection for it where there is none, may take.
_DEADLINE_S = 5.0
#: Seconds that the last word may take.
_LAST_S = 2.0


class Heartbeat:
    """connect: a channel to the coordinator within a deadline; status: what is told with each heartbeat."""

    def __init__(self, connect: Callable[[Deadline], Channel], status: Callable[[], dict[str, Any]]):
        self._connect, self._status = connect, status
        self._ended, self._again = threading.Event(), threading.Event()
        self._why = ""
        self._thread = threading.Thread(target=self._run, name="holmes-heartbeat", daemon=True)
        self._thread.start()

    def now(self) -> None:
        """The coordinator is a new one: tell it at once."""
        self._again.set()

    def close(self, why: str) -> None:
        """Say that the job ends."""
        self._why = why
        self._ended.set()
        self._again.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        channel: Channel | None = None
        while not self._ended.is_set():
            channel = self._beat(channel, {})
            self._again.wait(HEARTBEAT_S)
            self._again.clear()
        if channel is not None and self._why:
            channel = self._beat(channel, {"ends": self._why})
        if channel is not None:
            channel.close()

    def _beat(self, channel: Channel | None, more: dict[str, Any]) -> Channel | None:
        """The channel for the next one; None where this one did not go."""
        deadline = Deadline(_DEADLINE_S, "a heartbeat")
        try:
            channel = channel or self._connect(deadline)
            channel.send({**self._status(), **more}, deadline)
            return channel
        except (OSError, HolmesError):
            if channel is not None:
                channel.close()
            return None
