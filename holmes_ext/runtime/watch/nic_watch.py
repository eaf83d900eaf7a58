"""Looks at this node's NICs every second, and ends the process when a needed one stays without link. Reports
failures of NCCL before torch ends the process.

A collective over a dead link does not fail by itself: TCP goes on trying for a quarter of an hour, and the
process group's timeout is half an hour by default. A link that comes back in time only costs a line. The
process ends with status 2, as after every error that holmes tells; what comes then is the launcher's business
(torchrun --max-restarts starts the job again, without that NIC).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from holmes_ext.cluster.site import Port
from holmes_ext.runtime import session
from holmes_ext.runtime.watch import flight_recorder, nccl_errors, nics
from holmes_ext.runtime.watch.failure import describe_nccl_failure, me, with_first

INTERVAL_S = 1.0


class NicWatch:
    """patience_s 0: tell of a dead link, never end the process. trouble(port), end(line): tests' own."""

    def __init__(
        self, patience_s: float, trouble: Callable[[Port], str] = nics.trouble,
        end: Callable[[str], None] | None = None
    ):
        self.patience_s, self._trouble, self._end = patience_s, trouble, end or _end_process
        self.ended = threading.Event()
        self._since: dict[str, float] = {}
        self._ignored: set[str] | None = None
        self._has_reported_failure = False
        self._report_lock = threading.Lock()  # held while a failure of NCCL is reported

    def start(self) -> None:
        nccl_errors.report_failures_with(self.report_nccl_failure)
        self.look(time.monotonic())
        threading.Thread(target=self.run, name="holmes NICs", daemon=True).start()

    def stop(self) -> None:
        """End the thread at its next look, and report no further failures of NCCL."""
        self.ended.set()
        nccl_errors.report_failures_with(None)

    def run(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            try:
                self.look(time.monotonic())
            except Exception as error:  # never the reason why a job ends
                _tell(f"NICs are not watched any more ({type(error).__name__}: {error})")
                return

    def look(self, now: float) -> None:
        """Check the NICs that the job uses: report those that fail or come back, and end the job if needed.

        Args:
            now: Seconds of a monotonic clock.
        """
        current = session.active()
        if current is None:
            return
        self.report_nccl_failure()

        troubled = {}  # name of a NIC -> the NIC, and its problem in words
        for port in nics.in_use(current):
            problem = self._trouble(port)
            if problem:
                troubled[port.name] = (port, problem)
        if self._ignored is None:
            # At the first check, a problem is no failure: another machine's sysfs, or a virtual device.
            self._ignored = set(troubled)

        # self._since: name of a NIC -> time at which its problem was first seen.
        for name in [name for name in self._since if name not in troubled]:
            away = now - self._since.pop(name)
            self._tell_once(current, f"NIC {name} of node {current.node.name} is back after {away:.0f} s")
        for name, (port, problem) in troubled.items():
            if name in self._ignored:
                continue
            fault = f"{nics.say(current.node, port)} {problem}"
            if name not in self._since:  # a new problem
                self._since[name] = now
                line = fault
                if self.patience_s:
                    way_out = "unless it comes back (--holmes-patience)"
                    line += f"; the job ends in {self.patience_s:g} s {way_out}"
                self._tell_once(current, line)
                continue
            away = now - self._since[name]
            is_patience_over = 0 < self.patience_s <= away  # with 0 the job is never ended
            is_needed = any(group.transport.fabric == port.fabric for group in current.groups)
            if is_patience_over and is_needed:
                self.ended.set()  # ends run()
                self._end(f"{me(current)}: {fault} for {away:.0f} s, and groups of this rank need it; "
                          "the job ends here")
                return

    def report_nccl_failure(self) -> None:
        """Print a line if NCCL has failed in a process group of this rank.

        A second line says where torch's flight recorder writes what the ranks did before.

        Only the first failure is printed. The thread of this watch and threads of torch may call this method
        at the same time. The method returns when the lines are printed, since torch may then end the process.
        """
        with self._report_lock:
            if self._has_reported_failure:
                return
            line = describe_nccl_failure()
            if line:
                self._has_reported_failure = True
                _tell(line)
                self._tell_of_dump()

    def _tell_of_dump(self) -> None:
        """Print where torch's flight recorder writes the last operations of this rank, if it does."""
        current = session.active()
        if current is None:
            return
        hint = flight_recorder.dump_hint(current.rank)
        if hint:
            _tell(hint)

    def _tell_once(self, current: session.Session, line: str) -> None:
        """For each node."""
        if current.process.local_rank == 0:
            _tell(line)


def _tell(line: str) -> None:
    os.write(2, f"holmes: {line}\n".encode())


def _end_process(line: str) -> None:
    _tell(with_first(line))
    sys.stdout.flush()
    os._exit(2)
