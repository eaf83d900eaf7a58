"""The process that holds a lab: forks the namespaces' holders, runs ip and tc, forks launchers.

    python -I -S -c ... ROOT CONTROL PIDFD DIRECTORY       (started by Lab; needs only the standard library)

It ends when its caller ends (PIDFD) or closes CONTROL, and removes DIRECTORY. All its children are in one PID
namespace; when the keeper dies, by SIGKILL too, the kernel kills that namespace's init and so every process
of the lab.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from holmes_lab.network import delay_line, namespaces
from holmes_lab.process import launch, wire

SWITCH, WAN = (
    "",
    " wan",
)  # the switch's and the delay line's names among the holders: no host has them


def main(arguments: list[str]) -> None:
    """`arguments`: descriptor numbers of the control socket and of the caller's pidfd, and the lab's
    directory."""
    control, caller, directory = (
        socket.socket(fileno=int(arguments[0])),
        int(arguments[1]),
        arguments[2],
    )
    for descriptor in (control.fileno(), caller):
        os.set_inheritable(descriptor, False)
    try:
        broken = _hold_lab(control, caller)
    except ConnectionError:  # the caller has ended, perhaps before the lab was there
        broken = False
    if (
        broken
    ):  # the caller, which lives, finds the reason in the log and then removes the directory
        print("the delay line between the clusters has ended", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def _hold_lab(control: socket.socket, caller: int) -> bool:
    """Until it is to end; whether the delay line was the reason."""
    try:
        _isolate()
        keeper = Keeper(control, caller)
        keeper.hold(SWITCH, _furnish_switch)
    except OSError as error:
        wire.send(control, {"denied": str(error), "userns": os.getuid() != 0})
        return False
    try:
        wire.send(control, {"init": keeper.holders[SWITCH][0]})
        keeper.serve()
        return keeper.gone(WAN)
    finally:
        keeper.end()


def _isolate() -> None:
    """A PID namespace for all future children; without the right to make one, inside a user namespace of our
    own."""
    try:
        namespaces.unshare(namespaces.CLONE_NEWPID)
    except PermissionError:
        namespaces.become_root_of_new_user_namespace(namespaces.CLONE_NEWPID)


def _write(path: str, text: str) -> None:
    """Set a sysctl of the caller's network namespace; a kernel built without that feature has no such
    file."""
    if os.path.exists(path):
        Path(path).write_text(text)


def _furnish_switch() -> None:
    namespaces.unshare(namespaces.CLONE_NEWNET)
    _write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    for table in ("iptables", "ip6tables", "arptables"):
        _write(f"/proc/sys/net/bridge/bridge-nf-call-{table}", "0")


def _furnish_node(name: str, hosts: str, nsswitch: str, sysctl: dict[str, str]) -> None:
    namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNS)
    _write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    for key, value in sysctl.items():
        try:
            Path("/proc/sys", key.replace(".", "/")).write_text(value)
        except OSError as error:
            raise OSError(f"sysctl {key}={value}: {error.strerror}") from None
    namespaces.furnish_node(name, hosts, nsswitch)


class Keeper:
    """holders: name -> (pid here, pid inside the lab's PID namespace)."""

    def __init__(self, control: socket.socket, caller: int):
        self.control, self.caller = control, caller
        self.holders: dict[str, tuple[int, int]] = {}

    def hold(self, name: str, furnish: Callable[[], Callable[[], None] | None]) -> None:
        """Fork a process that makes its namespaces with `furnish` and keeps them until it is killed;
        meanwhile it runs what furnish returns."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _hold_namespaces(furnish, write)
        os.close(write)
        with os.fdopen(read, "r") as pipe:
            answer = pipe.read()
        if not answer.isdigit():
            os.waitpid(pid, 0)
            raise OSError(f"{name.strip() or 'switch'}: {answer}")
        self.holders[name] = (pid, int(answer))

    def serve(self) -> None:
        """Answer the caller until it, the init of the lab's PID namespace, or the delay line, is gone."""
        needed = [self.caller, os.pidfd_open(self.holders[SWITCH][0])]
        while True:
            if WAN in self.holders and len(needed) == 2:
                needed.append(os.pidfd_open(self.holders[WAN][0]))
            ready, _, _ = select.select([self.control.fileno(), *needed], [], [])
            if any(descriptor in ready for descriptor in needed):
                return
            message, descriptors = wire.receive(self.control)
            if message is None:
                return
            self._reap()
            try:
                answer = getattr(self, "do_" + message.pop("do"))(*descriptors, **message)
            except (OSError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            for descriptor in descriptors:
                os.close(descriptor)
            wire.send(self.control, answer)

    def gone(self, name: str) -> bool:
        """Whether a holder has ended."""
        return name in self.holders and os.waitpid(self.holders[name][0], os.WNOHANG) != (0, 0)

    def do_node(
        self, name: str, hosts: str, nsswitch: str, sysctl: dict[str, str]
    ) -> dict[str, Any]:
        """Make the namespaces of node `name`, with these files as its /etc/hosts and /etc/nsswitch.conf."""
        self.hold(name, lambda: _furnish_node(name, hosts, nsswitch, sysctl))
        return {"pids": self.holders[name]}

    def do_tool(self, name: str, argv: list[str], text: str) -> dict[str, Any]:
        """Run ip or tc, `text` on its standard input, in the network namespace of `name`."""
        pid = self.holders[name][0]
        done = subprocess.run(
            argv,
            input=text,
            text=True,
            capture_output=True,
            preexec_fn=lambda: namespaces.enter(pid, ("net",)),
        )
        return {"status": done.returncode, "out": done.stdout, "error": done.stderr}

    def do_wan(self, clusters: list[dict[str, Any]], **network: Any) -> dict[str, Any]:
        """Fork the delay line (lab/network/delay_line.py), its TAPs in the switch's network namespace."""
        pid = self.holders[SWITCH][0]

        def furnish() -> Callable[[], None]:
            namespaces.enter(pid, ("net",))
            try:
                taps = [delay_line.open_tap(cluster["tap"]) for cluster in clusters]
            except OSError as error:
                raise OSError(
                    f"uplinks and [[between]] need TUN/TAP: {delay_line.TUN_DEVICE}: {error.strerror}"
                    " (modprobe tun; in a container: --device /dev/net/tun)"
                ) from None
            launch.go_realtime(priority=2)  # above the ranks
            return lambda: delay_line.run(delay_line.Router(clusters, **network), taps)

        self.hold(WAN, furnish)
        return {"pids": self.holders[WAN]}

    def do_job(self, job: int) -> dict[str, Any]:
        """Fork a launcher that serves one job over the socket `job`."""
        if os.fork() == 0:
            namespaces.die_with_parent()
            self.control.close()
            os.close(self.caller)
            launch.serve_job(socket.socket(fileno=job))
        return {}

    def do_zygote(
        self, control: int, log: int, argv: list[str], env: dict[str, str], cwd: str
    ) -> dict[str, Any]:
        """Start a zygote: `argv` gets the number of its control socket as last argument; its output goes to
        `log`."""
        if os.fork() == 0:
            try:
                namespaces.die_with_parent()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.set_inheritable(control, True)
                os.chdir(cwd)
                os.execvpe(argv[0], [*argv, str(control)], env)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error}\n".encode())
            os._exit(127)
        return {}

    def end(self) -> None:
        """Kill the PID namespace's init; returns when every process of the lab is gone."""
        os.kill(self.holders[SWITCH][0], signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return

    def _reap(self) -> None:
        """Forget launchers and zygotes that have ended (never the init, whose end ends the lab)."""
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == self.holders[SWITCH][0]:
                return
            os.waitpid(ended.si_pid, 0)


def _hold_namespaces(furnish: Callable[[], Callable[[], None] | None], ready: int) -> NoReturn:
    """In a forked child: furnish, say so (the pid, or why not), then do what it returned or sleep for ever;
    orphans of the lab are reaped."""
    try:
        namespaces.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        work = None
        try:
            work = furnish()
            answer = str(os.getpid())
        except OSError as error:
            answer = str(error)
        os.write(ready, answer.encode())
        os.close(ready)
        if work:
            work()
        while answer.isdigit():
            signal.pause()
    except Exception:
        traceback.print_exc()  # into the keeper's log
    finally:
        os._exit(1)
