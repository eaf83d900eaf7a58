"""Polls this node's NICs and the NCCL communicators of this rank once a second, and reports failures.

NICs: A collective over a NIC without a link hangs for a long time. TCP retries for a quarter of an hour, and
the default timeout of a process group is half an hour. So holmes polls the NICs that the job uses:

    a NIC fails             A warning is printed.
    the NIC recovers        A second message is printed, and the job goes on.
    the NIC stays failed    After --holmes-patience seconds (20 by default) the process exits with status 2,
                            if a process group of this rank uses the NIC's network. The launcher may then
                            start the job again: torchrun --max-restarts does, without that NIC.

A NIC that has already failed at the first poll is ignored.

NCCL: When NCCL fails, torch aborts the process. A message that names the failed process group is printed
before that. nccl_errors.py detects the failures.
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

INTERVAL_S = 1.0  # seconds between two polls


class NicWatch:
    """Thread that polls this node's NICs and this rank's NCCL communicators, and reports failures."""

    def __init__(
        self,
        patience_s: float,
        trouble: Callable[[Port], str] = nics.trouble,
        end: Callable[[str], None] | None = None,
    ):
        """Create the watch without starting the thread.

        Args:
            patience_s: Seconds after which a failed NIC ends the process. 0: never.
            trouble: Returns the problem of a NIC in words; "" if it works. Tests pass a stand-in.
            end: Called with a message to end the process. None: print the message and exit with status 2.
        """
        self.patience_s = patience_s
        self._trouble = trouble
        self._end = end or _end_process
        self.ended = threading.Event()  # tells the thread to end
        self._since: dict[str, float] = {}  # name of a failed NIC -> time of the first poll that saw it fail
        self._ignored: set[str] | None = None  # names of NICs that failed at the first poll; None before it
        self._has_reported_failure = False  # whether a failure of NCCL has been printed
        self._report_lock = threading.Lock()  # held while a failure of NCCL is printed

    def start(self) -> None:
        """Poll once, start the thread, and let torch's abort hooks report failures of NCCL."""
        nccl_errors.set_failure_callback(self.report_nccl_failure)
        self.poll(time.monotonic())
        threading.Thread(target=self.run, name="holmes NICs", daemon=True).start()

    def stop(self) -> None:
        """Signal the thread to end, and stop the reports of torch's abort hooks.

        This does not block. The waiting thread ends at once. If a poll is running, it is completed first.
        """
        self.ended.set()
        nccl_errors.set_failure_callback(None)

    def run(self) -> None:
        """Poll once a second until stop() is called or a failed NIC ends the job."""
        while not self.ended.wait(INTERVAL_S):
            try:
                self.poll(time.monotonic())
            except Exception as error:  # an error of this watch must not end the job
                _tell(f"NICs are not watched any more ({type(error).__name__}: {error})")
                return

    def poll(self, now: float) -> None:
        """Check this rank's NCCL communicators and the NICs that the job uses, once.

        Failures of NCCL, and NICs that fail or recover, are reported. The job ends if a NIC that this rank
        needs has failed for too long.

        Args:
            now: Time of this poll, in seconds of a monotonic clock.
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
            # A NIC that fails at the first poll is ignored: it may be a virtual device, or the sysfs that
            # HOLMES_SYSFS names may describe another machine.
            self._ignored = set(troubled)

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
                self._end(
                    f"{me(current)}: {fault} for {away:.0f} s, and groups of this rank need it; "
                    "the job ends here"
                )
                return

    def report_nccl_failure(self) -> None:
        """Print a message if NCCL has failed in a process group of this rank.

        A second message names the dump file of torch's flight recorder, if torch writes one. Only the first
        failure of the process is printed.

        The thread of this watch and torch's abort hooks may call this method at the same time. Each call
        returns only when both messages are printed: torch aborts the process when an abort hook returns.
        """
        with self._report_lock:
            if self._has_reported_failure:
                return
            message = describe_nccl_failure()
            if message:
                self._has_reported_failure = True
                _tell(message)
                self._print_dump_hint()

    def _print_dump_hint(self) -> None:
        """Print where torch's flight recorder dumps this rank's last operations, if torch writes a dump."""
        current = session.active()
        if current is None:
            return
        hint = flight_recorder.dump_hint(current.rank)
        if hint:
            _tell(hint)

    def _tell_once(self, current: session.Session, line: str) -> None:
        """Print a message on one rank of this node: local rank 0."""
        if current.process.local_rank == 0:
            _tell(line)


def _tell(line: str) -> None:
    """Print a message to standard error."""
    os.write(2, f"holmes: {line}\n".encode())


def _end_process(line: str) -> None:
    """Print a message and exit with status 2, without waiting for other threads of this process.

    If another rank has reported a failure before, its message is printed, too.
    """
    _tell(with_first(line))
    sys.stdout.flush()
    os._exit(2)
