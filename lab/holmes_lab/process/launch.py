"""Job supervisor: the process that forks the ranks of one job into the namespaces of their nodes.

It also reports the end of each rank, and leaves no processes behind. It is itself forked by one of
two processes:

    keeper         The process that owns the lab. Each rank executes its command.
    fork server    A Python that has imported the modules of the job. Each rank runs its script in its fork of
                   that Python.

Messages over the socket of the job (in: from the process that started the job, out: to it):

    in     {"job": count}                            number of ranks that follow
           {"rank", "holder", "argv", "env",         start a rank in the namespaces of the process "holder";
            "cwd", "realtime"}                       its stdout and stderr come as descriptors
           {"signal": number, "rank": r or null}     send a signal to a rank, or to all
    out    {"rank", "pid", "realtime"}               a rank was started; its PID as seen outside of the lab;
                                                     realtime: whether it runs under SCHED_RR
           {"rank", "status"}                        a rank has ended; 128 + n after signal n
           {"done": true}                            all ranks and their processes have ended
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from holmes_lab.network import namespaces
from holmes_lab.process import wire

Entry = Callable[[], object]
Script = Callable[[list[str], dict[str, str]], object]


def serve_job(job: socket.socket, run_script: Script | None = None) -> Entry | None:
    """Fork the ranks of one job, report their ends, and exit this process at the end of the job.

    The function returns only in forked ranks, and only if there is `run_script`.

    Args:
        job: Socket for the messages that start ranks.
        run_script: Function run_script(argv, env) that runs the script of a forked rank in this Python.
            None: each rank executes its command, as a new program.

    Returns:
        In a forked rank: a function without arguments that runs the script.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    namespaces.adopt_orphans()
    expected: int | None = None  # number of ranks of the job; None: not received yet
    started = 0  # ranks that were started
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (rank, pid)
    while expected is None or started < expected or running:
        # A pidfd is ready when its rank has ended, the socket when it has a message.
        ready, _, _ = select.select([job.fileno(), *running], [], [])
        for pidfd in [fd for fd in ready if fd in running]:
            rank, pid = running.pop(pidfd)
            os.close(pidfd)
            _report(job, {"rank": rank, "status": _wait_for_status(pid)})
        if job.fileno() in ready:
            message, descriptors = wire.receive(job)
            if message is None:  # the caller has closed the socket, or has ended
                break
            if "job" in message:  # the number of ranks
                expected = message["job"]
            elif "signal" in message:  # for one rank or all
                _signal_ranks(running, message)
            else:  # start a rank
                pid = os.fork()
                if pid == 0:
                    _become_rank(job, message, descriptors)
                    if run_script is None:  # replaces the forked process, so it does not return
                        _exec(message["argv"], message["env"])
                    return functools.partial(run_script, message["argv"], message["env"])
                for descriptor in descriptors:
                    os.close(descriptor)
                running[os.pidfd_open(pid)] = (message["rank"], pid)
                started += 1
    _kill_descendants()
    _report(job, {"done": True})
    os._exit(0)


def _report(job: socket.socket, message: dict[str, Any]) -> None:
    """Send a message to the caller, unless it has ended."""
    # If the caller has ended, the loop of serve_job() finds this out next, and ends the ranks.
    with suppress(BrokenPipeError, ConnectionResetError):
        wire.send(job, message)


def _wait_for_status(pid: int) -> int:
    """Wait for the end of a rank, and return its exit status: 128 + n after signal n, as in a shell."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:  # the number of a signal
        return 128 - status
    return status


def _signal_ranks(running: dict[int, tuple[int, int]], message: dict[str, Any]) -> None:
    """Send a signal to a running rank, or to all.

    Args:
        running: Pidfd -> (rank, PID) of each running rank.
        message: The message with the number of the "signal", and the "rank"; None: all ranks.
    """
    for rank, pid in running.values():
        if message["rank"] in (None, rank):
            _signal(pid, message["signal"])


def _signal(pid: int, number: int) -> None:
    """Send a signal to the process group of a rank whose end was not yet waited for."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # the rank has not called setsid yet: it has no group of its own
        os.kill(pid, number)


def _kill_descendants() -> None:
    """Kill all processes of the job that still run: ranks, and processes that ranks have started.

    The children of this process are killed, again and again, until it has none. When a child has
    ended, the children of that child become children of this process (adopt_orphans()).
    """
    # This process's PID as PPid in /proc shows it. In a PID namespace, os.getpid() may differ.
    me = os.readlink("/proc/self")
    # /proc may have the PIDs of an outer PID namespace, but kill() takes those of this namespace. NSpid has
    # both: this is the index of the latter.
    level = len(_status(me)["NSpid"].split()) - 1
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = _status(name)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields["PPid"] == me:
                os.kill(int(fields["NSpid"].split()[level]), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return  # there are no more children


def _status(pid: str) -> dict[str, str]:
    """Return the fields of /proc/PID/status."""
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def _become_rank(job: socket.socket, message: dict[str, Any], output: list[int]) -> None:
    """Turn the forked child into a rank: its session, output, priority, namespaces and directory.

    Its PID, and whether it runs in real time, are reported to the process that started the job.
    This process exits with an error message if a step is not possible.

    Args:
        job: Socket to the process that started the job.
        message: The message that starts the rank: "rank", "argv", "cwd", "realtime" (whether it
            should run under SCHED_RR), "holder" (PID of a process in the namespaces of the rank's
            node).
        output: File descriptors for stdout and stderr.
    """
    try:
        namespaces.die_with_parent()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, descriptor in enumerate(output, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        realtime = message["realtime"] and go_realtime()
        # The caller is outside of the lab's PID namespace. /proc is still the machine's, so its
        # link `self` is the PID that the caller sees; os.getpid() is that inside of the lab.
        outer_pid = int(os.readlink("/proc/self"))
        _report(job, {"rank": message["rank"], "pid": outer_pid, "realtime": realtime})
        job.close()
        namespaces.enter(message["holder"])
        os.chdir(message["cwd"])
    except OSError as error:
        _give_up(message["argv"], error)


def _exec(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Execute the command of a rank, or exit with an error message."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; a command expects it
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        _give_up(argv, error)


def _give_up(argv: list[str], error: OSError) -> NoReturn:
    """Print why a rank cannot be started, and exit with status 127, as a shell does."""
    os.write(2, f"holmes lab: {argv[0]}: {error}\n".encode())
    os._exit(127)


def go_realtime(priority: int = 1) -> bool:
    """Run this process under SCHED_RR, so that other programs on the machine do not disturb measurements.

    Returns:
        False if that is not permitted.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    except PermissionError:
        return False
    return True
