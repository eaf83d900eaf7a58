"""One job in a lab, seen from its caller: pids, output, the end of each rank, what a failure does.

A thread reads the launcher's messages and the ranks' pipes. When a rank fails the others get `grace` seconds
to end by themselves, then SIGTERM, then SIGKILL; the same when the job's time is up or it is killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_lab.cores import CoreMeter, median_share
from holmes_lab.process import wire

OnLine = Callable[[int, str, str], None]
TERM_SECONDS = 3.0  # from SIGTERM to SIGKILL
TIMED_OUT = 124  # as timeout(1)


@dataclass(frozen=True)
class RunResult:
    """How a job ended.

    returncode: 0, or the exit status of the first rank that failed (128 + n for signal n), 124 when time was
    up; first_failed: that rank, or None; lines: for each rank (stream, line) in the order of arrival, stream
    "stdout" or "stderr"; seconds: from the first fork to the last exit; emulated: an emulated accelerator
    made the timings; realtime: every rank ran under SCHED_RR; core_shares: of this machine's cores that were
    used, by anybody, 0 to 1, from the start to the end (CoreMeter).
    """

    returncode: int
    statuses: dict[int, int]
    lines: dict[int, list[tuple[str, str]]]
    seconds: float
    first_failed: int | None = None
    emulated: bool = False
    realtime: bool = False
    core_shares: tuple[float, ...] = ()

    @property
    def busy(self) -> float:
        return median_share(self.core_shares)

    def busy_in_last(self, seconds: float) -> float:
        """Those of them in which steps were timed, say."""
        return median_share(self.core_shares, seconds)

    @property
    def outputs(self) -> dict[int, str]:
        """All that each rank printed, stdout and stderr."""
        return self._texts("stdout", "stderr")

    @property
    def stdout(self) -> dict[int, str]:
        return self._texts("stdout")

    def _texts(self, *streams: str) -> dict[int, str]:
        return {
            rank: "".join(f"{line}\n" for stream, line in lines if stream in streams)
            for rank, lines in self.lines.items()
        }


@dataclass
class _Pipe:
    rank: int
    stream: str
    log: Any
    rest: bytes = field(default=b"")


class Job:
    """A running job; made by Lab.start."""

    def __init__(
        self,
        ranks: list[dict[str, Any]],
        launcher: socket.socket,
        on_line: OnLine | None,
        logs: Path | None,
        timeout: float | None,
        grace: float,
        emulated: bool,
        watch: Path | None = None,
    ):
        """`ranks`: what the launcher is told, in rank order; watch: where ranks on emulated GPUs tell what
        they do; the others are those of Lab.start."""
        self.watch = watch
        self._launcher, self._on_line, self._grace, self._emulated = (
            launcher,
            on_line,
            grace,
            emulated,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(launcher, selectors.EVENT_READ, None)
        self._started, self._cores = time.monotonic(), CoreMeter()
        self._deadline = None if timeout is None else self._started + timeout
        self._pids: dict[int, int] = {}
        self._realtime: list[bool] = []
        self._statuses: dict[int, int] = {}
        self._lines: dict[int, list[tuple[str, str]]] = {message["rank"]: [] for message in ranks}
        self._first_failed: int | None = None
        self._code = 0
        self._next_signal: tuple[float, int] | None = None
        self._done = self._lost = False
        self._error: BaseException | None = None
        self._result: RunResult | None = None
        self._all_started = threading.Event()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        wire.send(launcher, {"job": len(ranks)})
        for message in ranks:
            log = open(logs / f"rank{message['rank']}.log", "wb") if logs is not None else None
            ends = [self._pipe(message["rank"], stream, log) for stream in ("stdout", "stderr")]
            wire.send(launcher, message, ends)
            for end in ends:
                os.close(end)
        self._thread = threading.Thread(target=self._run, name="holmes-lab-job", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process id by rank; waits until every rank was started (or the job ended)."""
        self._all_started.wait()
        return dict(self._pids)

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank in self._lines if rank not in self._statuses)

    def poll(self) -> RunResult | None:
        """The result if the job has ended, else None."""
        return None if self._thread.is_alive() else self.wait()

    def wait(self, timeout: float | None = None) -> RunResult:
        """The result when the job has ended; TimeoutError after `timeout` seconds (the job goes on)."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the job still runs after {timeout} s (ranks {list(self.running)})")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank and its process group (None: to all); a rank that has ended is left
        out."""
        try:
            wire.send(self._launcher, {"signal": int(number), "rank": rank})
        except OSError:
            pass  # the launcher is gone, and its ranks with it

    def _pipe(self, rank: int, stream: str, log: Any) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._selector.register(read, selectors.EVENT_READ, _Pipe(rank, stream, log))
        return write

    def _run(self) -> None:
        try:
            while len(self._selector.get_map()) > 0:
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        self._read_message()
                    else:
                        self._read_output(key.fd, key.data)
                self._act_on_time()
                self._cores.sample()
            if self._lost:
                who = "its keeper or its delay line"
                raise HolmesError(
                    f"the lab ended while the job ran: {who} was killed (`holmes lab down --all`?)"
                )
        except BaseException as error:  # raised again in wait()
            self._error = error
        finally:
            realtime = bool(self._realtime) and all(self._realtime)
            self._result = RunResult(
                self._code,
                dict(sorted(self._statuses.items())),
                self._lines,
                time.monotonic() - self._started,
                self._first_failed,
                self._emulated,
                realtime,
                self._cores.shares,
            )
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)
            self._selector.close()
            self._launcher.close()  # one that still lives ends its ranks now
            self._all_started.set()

    def _patience(self) -> float:
        times = [time.monotonic() + CoreMeter.SAMPLE_S]
        times += [self._next_signal[0]] if self._next_signal is not None else []
        if self._deadline is not None and self._code == 0:
            times.append(self._deadline)
        return max(0.0, min(times) - time.monotonic())

    def _act_on_time(self) -> None:
        now = time.monotonic()
        if (
            self._deadline is not None
            and now >= self._deadline
            and self._code == 0
            and not self._done
        ):
            self._code, self._next_signal = TIMED_OUT, (now, signal.SIGTERM)
        if self._next_signal is not None and now >= self._next_signal[0]:
            number = self._next_signal[1]
            self.kill(None, number)
            self._next_signal = (
                (now + TERM_SECONDS, signal.SIGKILL) if number == signal.SIGTERM else None
            )

    def _read_message(self) -> None:
        message, _ = wire.receive(self._launcher)
        if message is None or "done" in message:
            self._done, self._lost = True, message is None
            self._next_signal = None
            self._selector.unregister(self._launcher)
        elif "pid" in message:
            self._pids[message["rank"]] = message["pid"]
            self._realtime.append(message["realtime"])
            if len(self._pids) == len(self._lines):
                self._all_started.set()
        else:
            self._statuses[message["rank"]] = message["status"]
            if message["status"] != 0 and self._code == 0:
                self._code, self._first_failed = message["status"], message["rank"]
                self._next_signal = (time.monotonic() + self._grace, signal.SIGTERM)

    def _read_output(self, descriptor: int, pipe: _Pipe) -> None:
        data = os.read(descriptor, 1 << 16)
        *lines, pipe.rest = (pipe.rest + data).split(b"\n")
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            lines = [pipe.rest] if pipe.rest else []
        for line in lines:
            text = line.decode(errors="replace")
            self._lines[pipe.rank].append((pipe.stream, text))
            if pipe.log is not None:
                pipe.log.write(line + b"\n")
                pipe.log.flush()
            if self._on_line is not None:
                self._on_line(pipe.rank, text, pipe.stream)
