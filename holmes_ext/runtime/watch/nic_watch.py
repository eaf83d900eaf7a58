"""Looks at this node's NICs every second, and ends the process when a needed one stays without link; tells
of NCCL's failures before torch's watchdog ends the process.

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
from holmes_ext.runtime.watch import nics
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
        self._told_failure = False

    def start(self) -> None:
        self.look(time.monotonic())
        threading.Thread(target=self.run, name="holmes NICs", daemon=True).start()

    def run(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            try:
                self.look(time.monotonic())
            except Exception as error:  # never the reason why a job ends
                _tell(f"NICs are not watched any more ({type(error).__name__}: {error})")
                return

    def look(self, now: float) -> None:
        """One look at the NICs, at time `now` in seconds."""
        current = session.active()
        if current is None:
            return
        if not self._told_failure and (failed := describe_nccl_failure()):
            self._told_failure = True
            _tell(failed)
        troubled = {port.name: (port, problem) for port in nics.in_use(current)
                    if (problem := self._trouble(port))}
        if self._ignored is None:  # was so as the job started (another machine's sysfs, a virtual device)
            self._ignored = set(troubled)
        for name in [name for name in self._since if name not in troubled]:
            away = now - self._since.pop(name)
            self._tell_once(current, f"NIC {name} of node {current.node.name} is back after {away:.0f} s")
        for name, (port, problem) in troubled.items():
            fault = f"{nics.say(current.node, port)} {problem}"
            away = now - self._since.get(name, now)
            if name in self._ignored:
                continue
            if name not in self._since:
                self._since[name] = now
                then = f"; the job ends in {self.patience_s:g} s unless it comes back (--holmes-patience)"
                self._tell_once(current, fault + (then if self.patience_s else ""))
            elif (0 < self.patience_s <= away
                  and any(group.transport.fabric == port.fabric for group in current.groups)):
                self.ended.set()
                self._end(f"{me(current)}: {fault} for {away:.0f} s, and groups of this rank need it; "
                          "the job ends here")
                return

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
