"""Keeper: the process that owns all other processes of a lab.

It forks namespace holders (processes that keep the namespaces of one node alive), runs `ip` and
`tc` in these namespaces, and forks a job supervisor (process/launch.py) for each job. Lab starts
the keeper:

    python -I -S -c ... FOLDERS CONTROL PIDFD DIRECTORY    (needs only the standard library)

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

#: Names of two processes among the namespace holders. No host can have such names.
SWITCH = ""  # holds the namespace of the bridges, and is the init of the lab's PID namespace
WAN = " wan"  # the delay line: it emulates the network between clusters


def main(arguments: list[str]) -> None:
    """Run the keeper, the process that owns all other processes of a lab, until the lab ends.

    It creates the namespaces of the nodes, and forks the processes of jobs, when the caller (the
    process that created the lab) requests it. At the end it kills them all.

    Args:
        arguments: Descriptor number of the socket for the requests, descriptor number of a pidfd of
            the caller, and the lab's folder. The folder is removed at the end.
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
    """Create the namespaces of a lab, and hold the lab until it is to end.

    This process (the keeper) owns all other processes of the lab. Its first message to the caller is

        {"init": PID of the init process of the lab's PID namespace}, or
        {"denied": reason, "userns": whether this user is not root}, if the namespaces cannot be
            created. The function then returns at once.

    Args:
        control: Socket to the process that created the Lab (the caller), for its requests.
        caller: pidfd of that process.

    Returns:
        Whether the lab ends because its delay line has ended: the process that emulates the network
        between clusters.
    """
    try:
        _enter_new_pid_namespace()
        keeper = Keeper(control, caller)
        keeper.hold(SWITCH, _furnish_switch)
    except OSError as error:
        # "userns": whether a user namespace would have been needed, because this user is not root.
        wire.send(control, {"denied": str(error), "userns": os.getuid() != 0})
        return False
    try:
        wire.send(control, {"init": keeper.holders[SWITCH].pid})
        keeper.serve()
        return keeper.has_ended(WAN)  # False if the lab has no delay line
    finally:
        keeper.end()


def _enter_new_pid_namespace() -> None:
    """Create a PID namespace for all future children of this process.

    Without the right to do this, the process first becomes root of a new user namespace.
    """
    try:
        namespaces.unshare(namespaces.CLONE_NEWPID)
    except PermissionError:
        namespaces.become_root_of_new_user_namespace(namespaces.CLONE_NEWPID)


def _write(path: str, text: str) -> None:
    """Set a kernel setting (sysctl) of this process's network namespace, unless the kernel lacks it.

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
        sysctl: Kernel settings of the node's network: "net.ipv4..." -> value.

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
    """State of the keeper, the process that owns all other processes of a lab.

    The methods do_NAME serve the requests of the process that created the Lab.
    """

    def __init__(self, control: socket.socket, caller: int):
        """Store the socket and the pidfd; no process is forked yet.

        Args:
            control: Socket to the process that created the Lab (the caller), for its requests.
            caller: pidfd of that process.
        """
        self.control, self.caller = control, caller
        #: Forked processes that keep namespaces alive: name of the node, SWITCH or WAN -> PIDs.
        self.holders: dict[str, wire.HolderPids] = {}

    def hold(self, name: str, prepare: Callable[[], Callable[[], None] | None]) -> None:
        """Fork a process that creates namespaces, and keeps them alive until it is killed.

        Namespaces exist as long as a process is in them. The forked process, a namespace holder, either does
        nothing more, or runs a program that needs these namespaces: the delay line (it emulates the network
        between clusters).

        Args:
            name: Key of the process in self.holders. For the namespaces of a node: the name of the node.
                SWITCH: for the network namespace of the bridges. WAN: for the delay line.
            prepare: Called in the forked process to create or enter the namespaces. It returns
                None if the process shall then only keep them. Otherwise it returns the program of the
                process, a function without arguments.

        Raises:
            OSError: The namespaces cannot be created.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _hold_namespaces(prepare, write)
        os.close(write)
        with os.fdopen(read, "r") as pipe:
            # The PID of the forked process in the lab's PID namespace, or an error message.
            answer = pipe.read()
        if not answer.isdigit():
            os.waitpid(pid, 0)
            # WAN is " wan": no node's name has a space.
            shown_name = "switch" if name == SWITCH else name.strip()
            raise OSError(f"{shown_name}: {answer}")
        self.holders[name] = wire.HolderPids(pid=pid, pid_in_lab=int(answer))

    def serve(self) -> None:
        """Serve requests of the caller, the process that created the lab, until the lab must end.

        It must end when the caller closes its socket, or when one of these processes has ended:

            the caller
            the init process of the lab's PID namespace
            the process that emulates the network between clusters, if the caller has requested it
        """
        needed = {"caller": self.caller, SWITCH: os.pidfd_open(self.holders[SWITCH].pid)}  # pidfds
        while True:
            if WAN in self.holders and WAN not in needed:
                needed[WAN] = os.pidfd_open(self.holders[WAN].pid)
            ready, _, _ = select.select([self.control.fileno(), *needed.values()], [], [])
            # A pidfd is ready when its process has ended.
            is_over = any(pidfd in ready for pidfd in needed.values())
            if is_over:
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

    def has_ended(self, name: str) -> bool:
        """Return whether the process under a key of `holders` has ended; False if there is no such key."""
        if name not in self.holders:
            return False
        ended_pid, _ = os.waitpid(self.holders[name].pid, os.WNOHANG)
        return ended_pid != 0

    def do_node(
        self, name: str, hosts: str, nsswitch: str, sysctl: dict[str, str]
    ) -> dict[str, Any]:
        """Fork a process that creates the namespaces of a node and keeps them alive.

        Args:
            name: Name of the node and its hostname.
            hosts: File that becomes /etc/hosts of the node.
            nsswitch: File that becomes /etc/nsswitch.conf of the node.
            sysctl: Kernel settings of the node's network: "net.ipv4..." -> value.

        Returns:
            {"pids": [PID as seen outside of the lab, PID in the lab's PID namespace]}, both of the
            forked process.
        """
        self.hold(name, lambda: _furnish_node(name, hosts, nsswitch, sysctl))
        return {"pids": self.holders[name]}

    def do_tool(self, name: str, argv: list[str], text: str) -> dict[str, Any]:
        """Run a program (ip or tc) in the network namespace of a node or of the switch.

        Args:
            name: Name of the node, or SWITCH.
            argv: The program with its arguments.
            text: Its standard input.

        Returns:
            {"status": exit status, "out": stdout, "error": stderr}.
        """
        pid = self.holders[name].pid
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

        It reads and writes frames by TAP devices in the network namespace of the switch.

        Args:
            clusters: Settings of each cluster for delay_line.Router, with the name of its TAP
                device as "tap".
            network: Further arguments of delay_line.Router: the links between clusters, and the
                nodes.

        Returns:
            {"pids": [PID as seen outside of the lab, PID in the lab's PID namespace]} of the delay
            line.
        """
        switch_pid = self.holders[SWITCH].pid

        def open_taps() -> Callable[[], None]:
            """Open a TAP device for each cluster, and return the function that delays frames.

            Each TAP device connects the delay line to the Ethernet bridge of a cluster, and has the
            name clusters[i]["tap"]. hold() calls open_taps() in the forked process, and the process then runs
            the returned function.
            """
            namespaces.enter(switch_pid, ("net",))
            try:
                taps = [delay_line.open_tap(cluster["tap"]) for cluster in clusters]
            except OSError as error:
                # Only these settings of cluster.toml need a delay line: they describe links between clusters.
                raise OSError(
                    f"uplinks and [[between]] need TUN/TAP: {delay_line.TUN_DEVICE}: {error.strerror}"
                    " (modprobe tun; in a container: --device /dev/net/tun)"
                ) from None
            # Under SCHED_RR, ranks have the priority 1. Frames must not wait for ranks that
            # compute.
            launch.go_realtime(priority=2)
            return lambda: delay_line.run(delay_line.Router(clusters, **network), taps)

        self.hold(WAN, prepare=open_taps)
        return {"pids": self.holders[WAN]}

    def do_job(self, job: int) -> dict[str, Any]:
        """Fork a job supervisor, the process that forks the ranks of one job (process/launch.py).

        Args:
            job: Descriptor of the socket between the caller and the job supervisor.

        Returns:
            An empty dict: the caller hears of the job over that socket.
        """
        if os.fork() == 0:
            namespaces.die_with_parent()
            self.control.close()
            os.close(self.caller)
            # At the end of the job, this exits the forked process.
            launch.serve_job(socket.socket(fileno=job))
        return {}

    def do_fork_server(
        self, control: int, log: int, argv: list[str], env: dict[str, str], cwd: str
    ) -> dict[str, Any]:
        """Start a fork server: a Python that imports modules once, and then forks ranks.

        It runs process/fork_server.py.

        Args:
            control: Descriptor of its control socket. The number becomes the last argument.
            log: Descriptor of the file for its output.
            argv: The command, without the number of `control`.
            env: Environment of the fork server.
            cwd: Working directory of the fork server.

        Returns:
            An empty dict: the caller talks to the fork server over the control socket.
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
        """Kill the init of the PID namespace, and return when all processes of the lab have ended.

        The kernel then kills all processes of that namespace.
        """
        os.kill(self.holders[SWITCH].pid, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return

    def _reap(self) -> None:
        """Collect the exit statuses of forked children that have ended, so that no zombies remain.

        The holder of the switch's namespace is the init of the lab's PID namespace. Its status is
        left, because the lab ends with it: serve() sees this, and end() collects the status.
        """
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == self.holders[SWITCH].pid:
                return
            os.waitpid(ended.si_pid, 0)


def _hold_namespaces(prepare: Callable[[], Callable[[], None] | None], ready: int) -> NoReturn:
    """Create namespaces in a forked child, and keep them alive. The function never returns.

    Args:
        prepare: Creates the namespaces. If it returns a function, that function runs; otherwise the process
            sleeps.
        ready: Pipe to the keeper, for the PID of this process, or for an error message.
    """
    try:
        namespaces.die_with_parent()
        # The holder of the switch's namespaces is also the init of the lab's PID namespace: processes
        # without a parent become its children. If SIGCHLD is ignored, the kernel reaps them.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        work = None
        try:
            work = prepare()
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
