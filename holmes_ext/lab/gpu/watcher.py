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
#: Seconds without any progress after which it is told even though a host may still move on, once.
STILL_S = 60.0


class Watcher:
    """Of the job whose watch files are in `directory`. poll() is called about twice a second."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic, still_s: float = STILL_S):
        self.directory, self.watch, self.clock, self.still_s = directory, Watch(directory), clock, still_s
        self._seen: dict[int, int] = {}
        self._moved = self._looked = clock()
        self._told = False

    def poll(self) -> Hang | None:
        """The hang, once it is sure: nothing moved for a while, a circle closes, and nothing has moved since. Or, once
        for each long standstill, what the ranks stand at without a circle."""
        progress, now = self.watch.progress(), self.clock()
        if progress != self._seen:
            self._seen, self._moved, self._looked, self._told = progress, now, now, False
        if not progress or now - self._looked < STANDSTILL_S:
            return None
        hang = self.look()
        self._looked = self.clock()
        if self.watch.progress() != progress:
            return None
        if hang.circle():
            return hang
        if self._told or now - self._moved < self.still_s:
            return None
        self._told = True
        return hang

    def look(self) -> Hang:
        """What the ranks stand at now."""
        states = self.watch.ask()
        return Hang(states, communicators.ranks_of(communicators.read(self.directory)))
