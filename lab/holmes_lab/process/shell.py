"""A shell, or a command, on a host of a lab that runs, of this process or of another.

The child is in all namespaces of the host, that of its processes too, so it ends with the lab. Terminal,
input and output are the caller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of
from holmes_lab import state
from holmes_lab.network import namespaces


@dataclass(frozen=True)
class Host:
    """Of a lab that runs. holder: pid of what holds its namespaces; variables: those of its processes."""

    holder: int
    variables: Mapping[str, str]


def running(host: str, directory: str | None = None) -> Host:
    """`host` of the lab in `directory`, or the only one that has it; HolmesError: none, or several."""
    labs = {
        path: _hosts(path) for path in ([Path(directory)] if directory else state.directories())
    }
    labs = {path: hosts for path, hosts in labs.items() if hosts}
    if not labs:
        where = f"{directory}: no lab runs there" if directory else "no lab of yours runs"
        raise HolmesError(
            f"{where}; start one with `holmes lab run`, or one for this shell with --cluster FILE"
        )
    holders = {path: hosts[host] for path, hosts in labs.items() if host in hosts}
    if not holders:
        names = some_of([name for hosts in labs.values() for name in hosts])
        raise HolmesError(f"no lab that runs has a host {host!r}; there are {names}")
    if len(holders) > 1:
        which = " or ".join(map(str, holders))
        raise HolmesError(f"{len(holders)} labs have a host {host!r}; say which with --lab {which}")
    return next(iter(holders.values()))


def _hosts(directory: Path) -> dict[str, Host]:
    """By name; empty where no lab is complete there."""
    try:
        hosts = json.loads((directory / "state.json").read_text()).get("hosts", {})
    except (OSError, ValueError):
        return {}
    slurm = directory / "launchers" / "slurm.conf"
    more = {"SLURM_CONF": str(slurm)} if slurm.exists() else {}
    return {
        name: Host(pid, {**variables, **more})
        for name, ((pid, start), variables) in hosts.items()
        if state.identity(pid) == [pid, start]
    }


def inside(holder: int, argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `argv` in the namespaces of process `holder`: its exit status, 128 + n for signal n. HolmesError:
    that cannot be."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(read)
        _enter_and_run(holder, argv, env, write)
    os.close(write)
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the shell's
    try:
        with os.fdopen(read) as pipe:
            trouble = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    finally:
        signal.signal(signal.SIGINT, old)
    if trouble:
        raise HolmesError(f"lab: {argv[0]}: {trouble}")
    return status


def _enter_and_run(holder: int, argv: Sequence[str], env: Mapping[str, str], trouble: int) -> None:
    """In a forked child, which waits for the one that is in the host's PID namespace and ends as it does."""
    directory = os.getcwd()
    try:
        namespaces.die_with_parent()
        try:
            same_user = (
                os.stat("/proc/self/ns/user").st_ino == os.stat(f"/proc/{holder}/ns/user").st_ino
            )
            namespaces.enter(
                holder, (*(() if same_user else ("user",)), "pid", "net", "uts", "mnt")
            )
            child = os.fork()
            if child == 0:
                namespaces.die_with_parent()
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                # setns moves the caller to the root; the mounts may differ
                with contextlib.suppress(OSError):
                    os.chdir(directory)
                os.execvpe(argv[0], list(argv), dict(env))
        except OSError as error:
            os.write(trouble, (error.strerror or str(error)).encode())
            os._exit(127)
        os.close(trouble)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    finally:
        os._exit(1)
