"""Sees when a job on emulated GPUs stands still, and whether it can ever move on; ends it where it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_lab.gpu import communicators
from holmes_lab.gpu.hang import Hang
from holmes_lab.gpu.hang_report import explain
from holmes_lab.gpu.state import Watch
from holmes_lab.process.job import Job, RunResult

#: Seconds without any progress of any rank until the ranks are asked, and between two questions.
STANDSTILL_S = 4.0
#: Seconds without any progress after which it is told even though a host may still move on, once.
STILL_S = 60.0
#: Seconds without any progress, with work in a stream, after which the job is ended though no circle closes.
END_S = 300.0
_POLL_S = 0.5


@dataclass(frozen=True)
class WatchedRun:
    """A job that has ended. hang: lines that explain why it was ended, () where it was not."""

    result: RunResult
    hang: tuple[str, ...] = ()


def wait_watched(
    job: Job, watcher: Watcher, labels: Sequence[str], tell: Callable[[Sequence[str]], None]
) -> WatchedRun:
    """Waits for a job, ends it once it is sure that it hangs or has stood still for too long, and tells of
    one that stands still and may yet move on. labels: where each rank runs."""
    nodes = dict(enumerate(labels))
    try:
        while True:
            try:
                return WatchedRun(job.wait(_POLL_S))
            except TimeoutError:
                hang = watcher.poll()
            if hang is None:
                continue
            lines = explain(hang, nodes, watcher.watch.stacks())
            if watcher.ends(hang):
                if not hang.circle():
                    lines.append(
                        f"no rank progressed for {watcher.end_s:g} s (--gpu-standstill): the job is ended"
                    )
                job.kill()
                return WatchedRun(job.wait(), tuple(lines))
            tell(
                [
                    *lines,
                    f"after {watcher.end_s:g} s of this (--gpu-standstill) it is ended if a stream has work",
                ]
            )
    except BaseException:
        job.kill()
        raise


class Watcher:
    """Of the job whose watch files are in `directory`. poll() is called about twice a second."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
        standstill_s: float = STANDSTILL_S,
        still_s: float = STILL_S,
        end_s: float = END_S,
    ):
        self.directory, self.watch, self.clock = directory, Watch(directory), clock
        self.standstill_s, self.still_s, self.end_s = standstill_s, still_s, end_s
        self._seen: dict[int, int] = {}
        self._moved = self._looked = clock()
        self._told = False

    def poll(self) -> Hang | None:
        """The hang, once it is sure: nothing moved for a while, a circle closes, and nothing has moved since.
        Or, once for each long standstill and when it has lasted too long, what the ranks stand at without a
        circle."""
        progress, now = self.watch.progress(), self.clock()
        if progress != self._seen:
            self._seen, self._moved, self._looked, self._told = progress, now, now, False
        if not progress or now - self._looked < self.standstill_s:
            return None
        hang = self.look()
        self._looked = self.clock()
        if self.watch.progress() != progress:
            return None
        if self.ends(hang):
            return hang
        if self._told or now - self._moved < self.still_s:
            return None
        self._told = True
        return hang

    def ends(self, hang: Hang) -> bool:
        """Whether the job is to be ended: a circle, or work that has waited too long. (Hosts may compute or
        write for as long as they like while no stream has work.)"""
        return bool(hang.circle()) or bool(hang.work) and self._looked - self._moved >= self.end_s

    def look(self) -> Hang:
        """What the ranks stand at now."""
        states = self.watch.ask()
        return Hang(states, communicators.ranks_of(communicators.read(self.directory)))
