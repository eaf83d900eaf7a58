"""Detects that a job on emulated GPUs stalls, reports why, and ends a job that cannot continue.

A `Watcher` polls the progress counters of the ranks. While no counter changes, it reads the state of all
ranks and builds their wait-for graph (hang.py):

    the graph has a cycle, and no counter changed while it was read    the job is deadlocked and is ended
    no progress for REPORT_S                                           a report is printed once
    no progress for END_S, while a CUDA stream has pending work        the job is ended
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_lab.gpu import communicators
from holmes_lab.gpu.hang import WaitForGraph
from holmes_lab.gpu.hang_report import explain
from holmes_lab.gpu.state import Watch
from holmes_lab.process.job import Job, RunResult

#: Seconds without progress before the state of the ranks is read, and between two such readings.
STALL_S = 4.0
#: Seconds without progress before a stall that is no deadlock is reported.
REPORT_S = 60.0
#: Seconds without progress before a stall that is no deadlock ends the job.
END_S = 300.0
_POLL_S = 0.5


@dataclass(frozen=True)
class WatchedRun:
    """Result of a job that was watched for hangs."""

    result: RunResult
    hang: tuple[
        str, ...
    ] = ()  # lines that explain why the job was ended; empty if it ended by itself


def wait_watched(
    job: Job, watcher: Watcher, labels: Sequence[str], print_lines: Callable[[Sequence[str]], None]
) -> WatchedRun:
    """Wait until a job ends; end it if it is deadlocked or makes no progress for too long.

    Args:
        job: The running job.
        watcher: Watches the progress of the job's ranks. Its `end_s` is the limit of seconds
            without progress while GPU work is pending.
        labels: "NODE:LOCAL_RANK" of each rank, such as "a0:1", for the report.
        print_lines: Prints the lines of a report about a stall that does not end the job yet.
    """
    labels_by_rank = dict(enumerate(labels))
    try:
        while True:
            try:
                return WatchedRun(job.wait(_POLL_S))
            except TimeoutError:  # the job still runs
                graph = watcher.poll()  # the wait-for graph of a job that stalls
            if graph is None:  # there is nothing to report: the ranks progress, or it was reported
                continue
            lines = explain(graph, labels_by_rank, watcher.watch.stacks())
            if watcher.must_end(graph):
                is_deadlock = bool(graph.find_cycle())
                if not is_deadlock:
                    lines.append(
                        f"no rank progressed for {watcher.end_s:g} s (--gpu-standstill): the job is ended"
                    )
                job.kill()
                return WatchedRun(job.wait(), tuple(lines))
            # Host threads may compute for long. So such a stall ends the job only after end_s
            # seconds, and only if work in a CUDA stream waits then (Watcher.must_end).
            lines.append(
                f"after {watcher.end_s:g} s of this (--gpu-standstill) it is ended if a stream has work"
            )
            print_lines(lines)
    except BaseException:
        job.kill()
        raise


class Watcher:
    """Stall detector for a job; its owner calls poll() about twice a second."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
        stall_s: float = STALL_S,
        report_s: float = REPORT_S,
        end_s: float = END_S,
    ):
        """Start to watch a job.

        Args:
            directory: Directory of the watch files that the ranks of the job write.
            clock: Returns the time in seconds.
            stall_s: Seconds without progress before the state of the ranks is read. It shows which rank or
                GPU work waits for which (the wait-for graph). A cycle in this graph is a deadlock, and ends
                the job at once. The other two limits are for stalls without a cycle.
            report_s: Seconds without progress before a stall is reported, once.
            end_s: Seconds without progress before a stall ends the job, if GPU work is pending.
        """
        self.directory = directory
        self.watch = Watch(directory)
        self.clock = clock
        self.stall_s = stall_s
        self.report_s = report_s
        self.end_s = end_s
        self._progress: dict[int, int] = {}  # rank -> its progress counter at the last change
        self._progress_time = clock()  # of the last change
        self._read_time = self._progress_time  # when the states of the ranks were last read
        self._reported = False  # whether the present stall was reported

    def poll(self) -> WaitForGraph | None:
        """Return the wait-for graph of the job if it must be reported, else None.

        The graph says which rank or GPU work waits for which. It is read only after `stall_s`
        seconds without progress, since reading it costs time on every rank. It is returned in two
        cases:

            the job must end     it is deadlocked, or has stalled for `end_s` seconds with pending GPU work
            the job may go on    it has stalled for `report_s` seconds; once for each such stall
        """
        progress = self.watch.progress()  # counter of each rank; empty until a rank uses its GPU
        now = self.clock()
        if progress != self._progress:
            self._progress = progress
            self._progress_time = now
            self._read_time = now
            self._reported = False
        if not progress or now - self._read_time < self.stall_s:
            return None

        graph = self.read_graph()
        self._read_time = self.clock()
        if self.watch.progress() != progress:
            # The states of the ranks were read at different moments, so a cycle may not be real.
            return None
        if self.must_end(graph):
            return graph
        if self._reported or now - self._progress_time < self.report_s:
            return None
        self._reported = True
        return graph

    def must_end(self, graph: WaitForGraph) -> bool:
        """Return whether the job must end: because of a deadlock, or of work that waits too long.

        A host may compute or write a file for any time as long as no CUDA stream has pending work.
        """
        if graph.find_cycle():
            return True
        has_work = bool(graph.work)
        return has_work and self._read_time - self._progress_time >= self.end_s

    def read_graph(self) -> WaitForGraph:
        """Return the present wait-for graph of the job."""
        states = self.watch.request_states()
        return WaitForGraph(states, communicators.ranks_of(communicators.read(self.directory)))
