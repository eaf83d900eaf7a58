"""Sees when a job on emulated GPUs stands still, and whether it can ever move on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holmes_ext.lab.gpu import communicators
from holmes_ext.lab.gpu.hang import Hang
from holmes_ext.lab.gpu.state import Watch

#: Seconds without any progress of any rank until the ranks are asked, and between two questions.
STANDSTILL_S = 4.0


class Watcher:
    """Of the job whose watch files are in `directory`. poll() is called about twice a second."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic):
        self.directory, self.watch, self.clock = directory, Watch(directory), clock
        self._seen: dict[int, int] = {}
        self._since = clock()

    def poll(self) -> Hang | None:
        """The hang, once it is sure: nothing moved for a while, a circle closes, and nothing has moved since."""
        progress = self.watch.progress()
        if progress != self._seen:
            self._seen, self._since = progress, self.clock()
        if not progress or self.clock() - self._since < STANDSTILL_S:
            return None
        hang = self.look()
        self._since = self.clock()
        return hang if hang.circle() and self.watch.progress() == progress else None

    def look(self) -> Hang:
        """What the ranks stand at now."""
        states = self.watch.ask()
        return Hang(states, communicators.ranks_of(communicators.read(self.directory)))
