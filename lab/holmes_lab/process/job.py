"""Running job of a lab, as its caller sees it: PIDs, output and the ends of its ranks.

A thread reads the messages of the job supervisor (the process that forks the ranks,
process/launch.py) and the output of the ranks. If a rank fails, the other ranks have `grace`
seconds to end by themselves. Then they get SIGTERM, and TERM_SECONDS later SIGKILL. After the
time-out of a job, all ranks get both signals without these `grace` seconds.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_lab.cores import CoreMeter, median_share
from holmes_lab.process import wire

OnLine = Callable[[int, str, str], None]  # called with the rank, the line, and "stdout" or "stderr"
TERM_SECONDS = 3.0  # from SIGTERM to SIGKILL
TIMED_OUT = 124  # exit status after the time-out, as that of timeout(1)


@dataclass(frozen=True)
class RunResult:
    """Result of a job that has ended."""

    #: 0, or the exit status of the first rank that failed (128 + n after signal n), or 124 (TIMED_OUT).
    returncode: int
    statuses: dict[int, int]  # rank -> exit status
    #: Rank -> pairs ("stdout" or "stderr", line) in the order of arrival.
    lines: dict[int, list[tuple[str, str]]]
    seconds: float  # from the first fork to the last exit
    first_failed: int | None = None  # rank
    emulated: bool = False  # whether an emulated accelerator decided the timings
    realtime: bool = False  # whether all ranks ran under SCHED_RR
    #: Samples of the share of this machine's cores in use by all programs, 0 to 1 (CoreMeter).
    core_shares: tuple[float, ...] = ()

    @property
    def busy(self) -> float:
        """The median share of this machine's cores that was in use during the job, 0 to 1."""
        return median_share(self.core_shares)

    def busy_in_last(self, seconds: float) -> float:
        """Return the median share of the cores in use, 0 to 1, during the last `seconds` of the job.

        A job that warms up first is judged by its measured steps, and these come last.
        """
        return median_share(self.core_shares, seconds)

    @property
    def outputs(self) -> dict[int, str]:
        """The printed text of each rank, from stdout and stderr."""
        return self._texts("stdout", "stderr")

    @property
    def stdout(self) -> dict[int, str]:
        """The printed text of each rank, from stdout only."""
        return self._texts("stdout")

    def _texts(self, *streams: str) -> dict[int, str]:
        """Return the output of each rank in the given streams ("stdout", "stderr"), as one text."""
        return {
            rank: "".join(f"{line}\n" for stream, line in lines if stream in streams)
            for rank, lines in self.lines.items()
        }


@dataclass
class _Pipe:
    """Pipe that carries the output of a rank."""

    rank: int
    stream: str  # "stdout" or "stderr"
    log: Any  # open file for the output, or None
    rest: bytes = field(default=b"")  # beginning of a line whose end has not arrived


class Job:
    """Running job in a lab: a handle to wait for its ranks, signal them, and read their output.

    Lab.start() makes it. A lab is a set of emulated nodes on this machine.
    """

    def __init__(
        self,
        ranks: list[dict[str, Any]],
        supervisor: socket.socket,
        on_line: OnLine | None,
        logs: Path | None,
        timeout: float | None,
        grace: float,
        emulated: bool,
        watch: Path | None = None,
    ):
        """Start the ranks, and the thread that reads their output.

        Args:
            ranks: For each rank, the message that starts it: "rank", "argv", "env", "cwd", "holder"
                (PID of a process in the namespaces of its node), "realtime" (run under SCHED_RR).
            supervisor: Socket of the job supervisor, the process that forks the ranks.
            on_line: Called in a thread as on_line(rank, line, "stdout" or "stderr").
            logs: Folder for the output of the ranks (rank0.log, ...); None: no files.
            timeout: Seconds after which the job ends with status 124; None: no limit.
            grace: Seconds that the other ranks have to end by themselves when one fails.
            emulated: Whether the ranks have an emulated accelerator.
            watch: Folder for the state that ranks on emulated GPUs record; None without such GPUs.
        """
        self.watch = watch
        self._supervisor = supervisor
        self._on_line = on_line
        self._grace = grace
        self._emulated = emulated
        self._selector = selectors.DefaultSelector()
        self._selector.register(supervisor, selectors.EVENT_READ, None)
        self._started, self._cores = time.monotonic(), CoreMeter()
        self._deadline = None if timeout is None else self._started + timeout
        self._pids: dict[int, int] = {}  # rank -> PID, of the ranks that have started
        self._realtime: list[bool] = []  # of each started rank: whether it runs under SCHED_RR
        self._statuses: dict[int, int] = {}  # rank -> exit status, of the ranks that have ended
        #: Rank -> pairs ("stdout" or "stderr", line).
        self._lines: dict[int, list[tuple[str, str]]] = {message["rank"]: [] for message in ranks}
        self._first_failed: int | None = None
        self._exit_code = 0  # of the job: that of the first rank that failed, or TIMED_OUT
        #: (time, number) of the next signal for all ranks; None: none is due.
        self._next_signal: tuple[float, int] | None = None
        self._done = False  # whether the job supervisor has sent its last message
        self._lost_lab = False  # whether it ended without a last message, because the lab has ended
        self._error: BaseException | None = None
        self._result: RunResult | None = None
        self._all_started = threading.Event()
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        wire.send(supervisor, {"job": len(ranks)})
        for message in ranks:
            log = None
            if logs is not None:  # the file stays open as long as the rank prints
                log = open(logs / f"rank{message['rank']}.log", "wb")  # noqa: SIM115
            ends = [self._pipe(message["rank"], stream, log) for stream in ("stdout", "stderr")]
            wire.send(supervisor, message, ends)
            for end in ends:
                os.close(end)
        self._thread = threading.Thread(target=self._run, name="holmes-lab-job", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """The PID of each rank. Reading it waits until all ranks are started, or the job has ended."""
        self._all_started.wait()
        return dict(self._pids)

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(rank for rank in self._lines if rank not in self._statuses)

    def poll(self) -> RunResult | None:
        """Return the result if the job has ended, else None."""
        return None if self._thread.is_alive() else self.wait()

    def wait(self, timeout: float | None = None) -> RunResult:
        """Wait for the end of the job, and return its result.

        Args:
            timeout: Limit of the wait in seconds; None: no limit.

        Raises:
            TimeoutError: The job has not ended in time. It continues to run.
            HolmesError: The lab has ended while the job ran.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the job still runs after {timeout} s (ranks {list(self.running)})")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to ranks and their process groups, without those that have ended.

        Args:
            rank: The rank; None: all ranks.
            number: The signal.
        """
        with suppress(OSError):  # if the job supervisor has ended, its ranks have, too
            wire.send(self._supervisor, {"signal": int(number), "rank": rank})

    def _pipe(self, rank: int, stream: str, log: Any) -> int:
        """Make a pipe for the output of a rank, and return the descriptor of the end for the rank."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._selector.register(read, selectors.EVENT_READ, _Pipe(rank, stream, log))
        return write

    def _run(self) -> None:
        """Read the messages and the output of the job until it has ended, and then set its result.

        A thread runs this function. The messages come from the job supervisor, the process that forks the
        ranks. The output comes from each rank by two pipes, stdout and stderr. The job has ended when the
        supervisor has closed its socket and all ranks have closed their pipes.
        """
        try:
            while len(self._selector.get_map()) > 0:
                for key, _ in self._selector.select(self._seconds_to_next_event()):
                    pipe: _Pipe | None = key.data  # None: the socket of the job supervisor
                    if pipe is None:
                        self._read_message()
                    else:
                        self._read_output(key.fd, pipe)
                self._end_when_due()
                self._cores.sample()
            # _read_message() sets _lost_lab if the supervisor's socket closes before the message
            # that all ranks have ended.
            if self._lost_lab:
                # The lab ends if its keeper or its delay line is killed. The keeper owns all its
                # processes. The delay line emulates the network between clusters.
                who = "its keeper or its delay line"
                raise HolmesError(
                    f"the lab ended while the job ran: {who} was killed (`holmes lab down --all`?)"
                )
        except BaseException as error:  # raised again in wait()
            self._error = error
        finally:
            # Of the ranks that have started; a job without any did not run in real time.
            realtime = bool(self._realtime) and all(self._realtime)
            self._result = RunResult(
                returncode=self._exit_code,
                statuses=dict(sorted(self._statuses.items())),
                lines=self._lines,
                seconds=time.monotonic() - self._started,
                first_failed=self._first_failed,
                emulated=self._emulated,
                realtime=realtime,
                core_shares=self._cores.shares,
            )
            for key in list(self._selector.get_map().values()):  # after an error
                if key.data is not None:  # a pipe; the supervisor's socket is closed below
                    os.close(key.fd)
            self._selector.close()
            self._supervisor.close()  # if the job supervisor still runs, it now ends its ranks
            self._all_started.set()  # wakes callers of `pids`

    def _seconds_to_next_event(self) -> float:
        """Return the seconds until the next sample of the cores' use, the next signal, or the time-out."""
        times = [time.monotonic() + CoreMeter.SAMPLE_S]
        times += [self._next_signal[0]] if self._next_signal is not None else []
        if self._deadline is not None and self._exit_code == 0:
            times.append(self._deadline)
        return max(0.0, min(times) - time.monotonic())

    def _end_when_due(self) -> None:
        """Send SIGTERM or SIGKILL to all ranks if the time for it has come.

        The loop of _run() calls this again and again. After the time-out of the job, SIGTERM is
        sent at once, and the status of the job becomes 124. After the first failure of a rank,
        SIGTERM is sent when `grace` seconds are over. SIGKILL follows TERM_SECONDS after SIGTERM.
        """
        now = time.monotonic()
        if (
            self._deadline is not None
            and now >= self._deadline
            and self._exit_code == 0
            and not self._done
        ):
            self._exit_code, self._next_signal = TIMED_OUT, (now, signal.SIGTERM)
        if self._next_signal is not None and now >= self._next_signal[0]:
            _, number = self._next_signal
            self.kill(None, number)
            self._next_signal = (
                (now + TERM_SECONDS, signal.SIGKILL) if number == signal.SIGTERM else None
            )

    def _read_message(self) -> None:
        """Read a message of the job supervisor, the process that forks the ranks of the job.

        {"rank", "pid", "realtime"}    a rank has started; realtime: whether it runs under SCHED_RR
        {"rank", "status"}             a rank has ended. After the first failure, the other ranks
                                       get SIGTERM when the grace time is over.
        {"done"}                       all ranks have ended
        """
        message, _ = wire.receive(self._supervisor)
        if message is None or "done" in message:  # None: the supervisor was killed with the lab
            self._done = True
            self._lost_lab = message is None
            self._next_signal = None
            self._selector.unregister(self._supervisor)
        elif "pid" in message:
            self._pids[message["rank"]] = message["pid"]
            self._realtime.append(message["realtime"])
            rank_count = len(self._lines)  # every rank has an entry from the start
            if len(self._pids) == rank_count:
                self._all_started.set()
        else:
            rank, status = message["rank"], message["status"]
            self._statuses[rank] = status
            if status != 0 and self._exit_code == 0:
                self._exit_code, self._first_failed = status, rank
                self._next_signal = (time.monotonic() + self._grace, signal.SIGTERM)

    def _read_output(self, descriptor: int, pipe: _Pipe) -> None:
        """Read output of a rank, and store its complete lines."""
        data = os.read(descriptor, 1 << 16)
        *lines, pipe.rest = (pipe.rest + data).split(b"\n")
        if not data:  # the rank has closed its end
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
