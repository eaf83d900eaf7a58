"""Keeper: the process that owns all other processes of a lab.

It forks a holder for the namespaces of each node, runs `ip` and `tc` in them, and forks the launchers of
jobs. Lab starts it:

    python -I -S -c ... ROOT CONTROL PIDFD DIRECTORY       (needs only the standard library)

The keeper ends when its caller ends (PIDFD) or closes the socket CONTROL. It then removes DIRECTORY. All its
children are in one PID namespace. If the keeper dies, even by SIGKILL, the kernel kills the init process of
that namespace, and with it all processes of the lab.
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

#: Names of the holders of the switch and of the delay line. No host can have these names.
SWITCH = ""
WAN = " wan"


def main(arguments: list[str]) -> None:
    """Run the keeper until the lab ends.

    Args:
        arguments: Descriptor numbers of the control socket and of the caller's pidfd, and the lab's folder.
    """
    control = socket.socket(fileno=int(arguments[0]))
    caller = int(arguments[1])
    directory = arguments[2]
    for descriptor in (control.fileno(), caller):
        os.set_inheritable(descriptor, False)
    try:
        delay_line_ended = _hold_lab(control, caller)
    except ConnectionError:  # the caller has ended, perhaps before the lab was complete
        delay_line_ended = False
    if delay_line_ended:
        # The caller still runs. It reads the reason in the log, and then removes the folder.
        print("the delay line between the clusters has ended", file=sys.stderr)
    else:
        shutil.rmtree(directory, ignore_errors=True)


def _hold_lab(control: socket.socket, caller: int) -> bool:
    """Hold a lab until it is to end.

    Args:
        control: Socket of the caller.
        caller: pidfd of the caller.

    Returns:
        Whether the lab ends because the delay line between the clusters has ended.
    """
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
    """Create a PID namespace for all future children of this process.

    Without the right to do this, the process first becomes root of a new user namespace.
    """
    try:
        namespaces.unshare(namespaces.CLONE_NEWPID)
    except PermissionError:
        namespaces.become_root_of_new_user_namespace(namespaces.CLONE_NEWPID)


def _write(path: str, text: str) -> None:
    """Set a sysctl of this process's network namespace, unless the kernel lacks the file.

    Args:
        path: File under /proc/sys.
        text: The value.
    """
    if os.path.exists(path):
        Path(path).write_text(text)


def _furnish_switch() -> None:
    """Create the network namespace of the switch, without IPv6 and without filters for bridged frames."""
    namespaces.unshare(namespaces.CLONE_NEWNET)
    _write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    for table in ("iptables", "ip6tables", "arptables"):
        _write(f"/proc/sys/net/bridge/bridge-nf-call-{table}", "0")


def _furnish_node(name: str, hosts: str, nsswitch: str, sysctl: dict[str, str]) -> None:
    """Create the network, hostname and mount namespaces of a node.

    Args:
        name: Hostname of the node.
        hosts: File that becomes /etc/hosts.
        nsswitch: File that becomes /etc/nsswitch.conf.
        sysctl: Kernel settings of the node's network.

    Raises:
        OSError: A setting cannot be made. The message names it.
    """
    namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNS)
    _write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    for key, value in sysctl.items():
        try:
            Path("/proc/sys", key.replace(".", "/")).write_text(value)
        except OSError as error:
            raise OSError(f"sysctl {key}={value}: {error.strerror}") from None
    namespaces.furnish_node(name, hosts, nsswitch)


class Keeper:
    """State of the keeper process. The methods do_NAME serve the requests of the caller (Lab)."""

    def __init__(self, control: socket.socket, caller: int):
        """Begin without holders.

        Args:
            control: Socket of the caller.
            caller: pidfd of the caller.
        """
        self.control, self.caller = control, caller
        #: Name of a holder -> (PID of the process here, PID in the PID namespace of the lab).
        self.holders: dict[str, tuple[int, int]] = {}

    def hold(self, name: str, furnish: Callable[[], Callable[[], None] | None]) -> None:
        """Fork a process that keeps namespaces alive until it is killed.

        Args:
            name: Name of the holder.
            furnish: Called in the forked process to create the namespaces. It may return a function, which
                the process then runs.

        Raises:
            OSError: The namespaces cannot be created.
        """
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
        """Serve requests until a process that the lab needs has ended, or the caller has closed its socket.

        These processes are the caller, the init of the lab's PID namespace, and the delay line.
        """
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
        """Return whether a holder has ended; False if there is none with this name."""
        return name in self.holders and os.waitpid(self.holders[name][0], os.WNOHANG) != (0, 0)

    def do_node(
        self, name: str, hosts: str, nsswitch: str, sysctl: dict[str, str]
    ) -> dict[str, Any]:
        """Create the namespaces of a node, and return the PIDs of its holder.

        The arguments are those of _furnish_node().
        """
        self.hold(name, lambda: _furnish_node(name, hosts, nsswitch, sysctl))
        return {"pids": self.holders[name]}

    def do_tool(self, name: str, argv: list[str], text: str) -> dict[str, Any]:
        """Run a program (ip or tc) in the network namespace of a holder.

        Args:
            name: Name of the holder.
            argv: The program with its arguments.
            text: Its standard input.

        Returns:
            {"status": exit status, "out": stdout, "error": stderr}.
        """
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
        """Fork the delay line, the process that delays frames between clusters (network/delay_line.py).

        Its TAP devices are in the network namespace of the switch.

        Args:
            clusters: Settings of each cluster, with the name of its TAP device as "tap".
            network: Further arguments of delay_line.Router.
        """
        pid = self.holders[SWITCH][0]

        def furnish() -> Callable[[], None]:
            """Open the TAP devices, and return the function that runs the delay line."""
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
        """Fork a launcher (process/launch.py) for one job.

        Args:
            job: Descriptor of the job's socket.
        """
        if os.fork() == 0:
            namespaces.die_with_parent()
            self.control.close()
            os.close(self.caller)
            launch.serve_job(socket.socket(fileno=job))
        return {}

    def do_zygote(
        self, control: int, log: int, argv: list[str], env: dict[str, str], cwd: str
    ) -> dict[str, Any]:
        """Start a zygote, a Python that imports modules and forks ranks (process/zygote.py).

        Args:
            control: Descriptor of its control socket. The number becomes the last argument of the command.
            log: Descriptor of the file for its output.
            argv: The command, without that argument.
            env: Its environment.
            cwd: Its working directory.
        """
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
        """Kill the init of the PID namespace, and return when all processes of the lab have ended."""
        os.kill(self.holders[SWITCH][0], signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return

    def _reap(self) -> None:
        """Collect the statuses of launchers and zygotes that have ended.

        That of the init is left to serve(), because the lab ends with it.
        """
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == self.holders[SWITCH][0]:
                return
            os.waitpid(ended.si_pid, 0)


def _hold_namespaces(furnish: Callable[[], Callable[[], None] | None], ready: int) -> NoReturn:
    """Create namespaces in a forked child, and keep them alive. The function never returns.

    Args:
        furnish: Creates the namespaces. If it returns a function, that function runs; otherwise the process
            sleeps.
        ready: Pipe to the keeper, for the PID of this process, or for an error message.
    """
    try:
        namespaces.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans of the lab
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
        while answer.isdigit():  # there was no error
            signal.pause()
    except Exception:
        traceback.print_exc()  # into the keeper's log
    finally:
        os._exit(1)
