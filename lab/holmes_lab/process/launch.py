"""The launcher: forks a job's ranks into their nodes' namespaces, reports their ends, leaves nothing.

It runs in a fork of the keeper, where a rank execs its command, or of a zygote that has imported the job's
modules, where a rank goes on as the script's interpreter. Messages, over the job's socket:

    in   {"job": count}                        how many ranks follow
         {"rank", "holder", "argv", "env", "cwd", "realtime"} + stdout, stderr
         {"signal": number, "rank": r or null}
    out  {"rank", "pid", "realtime"}           pid as the lab's caller sees it;
                                               realtime: whether it was granted
         {"rank", "status"}                    exit status, 128 + n for signal n
         {"done": true}                        every rank and whatever it had started is gone
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from holmes_lab.network import namespaces
from holmes_lab.process import wire

Entry = Callable[[], object]
Script = Callable[[list[str], dict[str, str]], object]


def serve_job(job: socket.socket, run_script: Script | None = None) -> Entry | None:
    """Serve one job; the launcher itself never returns.

    run_script(argv, env): how a rank goes on in this interpreter; serve_job returns in the rank with what
    calls it. Without it every rank execs its command.
    """
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    namespaces.adopt_orphans()
    expected, started = None, 0
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (rank, pid)
    while expected is None or started < expected or running:
        ready, _, _ = select.select([job.fileno(), *running], [], [])
        for pidfd in [fd for fd in ready if fd in running]:
            rank, pid = running.pop(pidfd)
            os.close(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _tell(job, {"rank": rank, "status": status if status >= 0 else 128 - status})
        if job.fileno() in ready:
            message, descriptors = wire.receive(job)
            if message is None:
                break
            if "job" in message:
                expected = message["job"]
            elif "signal" in message:
                for rank, pid in running.values():
                    if message["rank"] in (None, rank):
                        _signal(pid, message["signal"])
            else:
                pid = os.fork()
                if pid == 0:
                    _become_rank(job, message, descriptors)
                    if run_script is None:
                        _exec(message["argv"], message["env"])
                    return functools.partial(run_script, message["argv"], message["env"])
                for descriptor in descriptors:
                    os.close(descriptor)
                running[os.pidfd_open(pid)] = (message["rank"], pid)
                started += 1
    _end_strays()
    _tell(job, {"done": True})
    os._exit(0)


def _tell(job: socket.socket, message: dict[str, Any]) -> None:
    try:
        wire.send(job, message)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the caller is gone; the loop sees it next and ends the ranks


def _signal(pid: int, number: int) -> None:
    """Signal a rank (not yet reaped) and its process group; before its setsid there is no such group."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)


def _end_strays() -> None:
    """Kill what is still there of the ranks: children first, and then their orphans, which become ours."""
    me = os.readlink("/proc/self")
    # /proc may show pids of an outer PID namespace; kill takes ours
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
            return


def _status(pid: str) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def _become_rank(job: socket.socket, message: dict[str, Any], output: list[int]) -> None:
    """In the forked child: its session, output, priority, node and directory; it exits where that is
    refused."""
    try:
        namespaces.die_with_parent()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, descriptor in enumerate(output, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        realtime = message["realtime"] and go_realtime()
        _tell(
            job,
            {"rank": message["rank"], "pid": int(os.readlink("/proc/self")), "realtime": realtime},
        )
        job.close()
        namespaces.enter(message["holder"])
        os.chdir(message["cwd"])
    except OSError as error:
        _give_up(message["argv"], error)


def _exec(argv: list[str], env: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; a command expects it
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        _give_up(argv, error)


def _give_up(argv: list[str], error: OSError) -> NoReturn:
    os.write(2, f"holmes lab: {argv[0]}: {error}\n".encode())
    os._exit(127)


def go_realtime(priority: int = 1) -> bool:
    """SCHED_RR, so that other work on the machine does not disturb what is measured; False when it is not
    permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    except PermissionError:
        return False
    return True
