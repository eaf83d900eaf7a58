"""Start of a shell or a command on a host of a running lab.

This or another process may have started the lab. The new process is in all namespaces of the host,
including the PID namespace, so it ends with the lab. It uses the terminal, the input and the output
of the calling process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.document import load_json
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of
from holmes_lab import state
from holmes_lab.network import namespaces


@dataclass(frozen=True)
class Host:
    """Emulated node, or login host, of a running lab. Commands can be started on it.

    A host is a set of Linux namespaces. running_host() finds it by its name. run_on_host() starts a
    command in the namespaces of the process `holder`.
    """

    holder: int  # PID of the process that keeps the host's namespaces alive
    variables: Mapping[str, str]  # environment of the host's processes


def running_host(host: str, directory: str | None = None) -> Host:
    """Return a host (a node, or the login host) of a running lab, found by its name.

    Args:
        host: Name of the host.
        directory: Folder of the lab; None for the only running lab that has the host.

    Raises:
        HolmesError: no running lab has the host, or several have it.
    """
    folders = [Path(directory)] if directory else state.directories()
    hosts_of_lab = {path: _hosts(path) for path in folders}
    hosts_of_lab = {path: hosts for path, hosts in hosts_of_lab.items() if hosts}
    if not hosts_of_lab:
        problem = f"{directory}: no lab runs there" if directory else "no lab of yours runs"
        raise HolmesError(
            f"{problem}; start one with `holmes lab run`, or one for this shell with --cluster FILE"
        )
    found = {path: hosts[host] for path, hosts in hosts_of_lab.items() if host in hosts}
    if not found:
        names = some_of([name for hosts in hosts_of_lab.values() for name in hosts])
        raise HolmesError(f"no lab that runs has a host {host!r}; there are {names}")
    if len(found) > 1:
        labs = " or ".join(map(str, found))
        raise HolmesError(f"{len(found)} labs have a host {host!r}; say which with --lab {labs}")
    return next(iter(found.values()))


def _hosts(directory: Path) -> dict[str, Host]:
    """Return the hosts that a lab has recorded in its folder and that still run: name -> host.

    Args:
        directory: Folder of the lab, with state.json.

    Returns:
        {} if the lab has recorded no hosts, because it is still being created, or if state.json
        is missing or cannot be read.
    """
    try:
        hosts = load_json(directory / "state.json", advice="").values.get("hosts", {})
    except HolmesError:
        return {}
    slurm_conf = directory / "launchers" / "slurm.conf"
    running_hosts = {}
    for name, (identity, variables) in hosts.items():
        pid, _ = identity
        if state.identity(pid) != identity:  # the process has ended
            continue
        if slurm_conf.exists():
            variables = {**variables, "SLURM_CONF": str(slurm_conf)}
        running_hosts[name] = Host(pid, variables)
    return running_hosts


def run_on_host(holder: int, argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a command in the namespaces of a process, and return its exit status.

    The status is 128 + n after signal n. This process forks a child. The child joins the
    namespaces, and then forks again to start the command: a process cannot join a PID namespace
    itself, only its later children are in it. If the command cannot be started, the child writes
    the reason into a pipe to this process.

    Args:
        holder: PID of a process in the namespaces.
        argv: The command.
        env: Environment of the command.

    Raises:
        HolmesError: the namespaces cannot be entered, or the command cannot be started.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _enter_and_run(holder, argv, env, write_end)
    os.close(write_end)
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    try:
        with os.fdopen(read_end) as pipe:
            error = pipe.read()
        _, wait_status = os.waitpid(child, 0)
        status = os.waitstatus_to_exitcode(wait_status)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if error:
        raise HolmesError(f"lab: {argv[0]}: {error}")
    return status


def _enter_and_run(
    holder: int, argv: Sequence[str], env: Mapping[str, str], error_pipe: int
) -> None:
    """Run a command in the namespaces of a process, and exit with its status; never return.

    The calling process joins the namespaces, forks a child that executes the command, and waits for it.

    Args:
        holder: PID of the process that holds the namespaces.
        argv: The command.
        env: Environment of the command.
        error_pipe: Descriptor for the message if the command cannot be started.
    """
    directory = os.getcwd()
    try:
        namespaces.die_with_parent()
        try:
            names: tuple[str, ...] = ("pid", "net", "uts", "mnt")
            own_user_namespace = os.stat("/proc/self/ns/user").st_ino
            if own_user_namespace != os.stat(f"/proc/{holder}/ns/user").st_ino:
                names = ("user", *names)
            namespaces.enter(holder, names)
            child = os.fork()
            if child == 0:
                namespaces.die_with_parent()
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                # setns moves the process to the root folder. The host may lack the old folder.
                with contextlib.suppress(OSError):
                    os.chdir(directory)
                os.execvpe(argv[0], list(argv), dict(env))
        except OSError as error:  # in the calling process, or in the child if execvpe() failed
            os.write(error_pipe, (error.strerror or str(error)).encode())
            os._exit(127)
        # Only the calling process comes here: the child executes the command, or has exited.
        os.close(error_pipe)
        _, wait_status = os.waitpid(child, 0)
        status = os.waitstatus_to_exitcode(wait_status)
        os._exit(status if status >= 0 else 128 - status)
    finally:  # after any other exception, in either process
        os._exit(1)
