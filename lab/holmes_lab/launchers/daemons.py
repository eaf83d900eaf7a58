"""Runs the daemons of Slurm and sshd on the hosts of an emulated cluster, and commands that use them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_lab.lab import Lab
from holmes_lab.launchers import slurm, ssh
from holmes_lab.network.shaping import LOGIN
from holmes_lab.process import ranks
from holmes_lab.process.job import Job, RunResult
from holmes_lab.process.ranks import Program
from holmes_lab.rights import program

#: Seconds for the daemons to accept connections.
PATIENCE = 60.0
#: Grace period of the daemons' job in seconds: the other daemons go on when one daemon ends.
#: select() accepts at most 24 days.
_GRACE_S = 1e6
#: Prefixes of variables that another job's launcher may have set for this process.
_OTHER_LAUNCHERS = ("SLURM", "OMPI_", "PMIX", "PMI_", "MPI_LOCAL")
#: Script that waits until the ports HOST:PORT ... accept connections and then, if a number follows "--",
#: until that many nodes of Slurm are idle.
_WAIT_SCRIPT = """
import socket, subprocess, sys, time
ports, _, nodes = " ".join(sys.argv[1:]).partition("--")
for host, port in (text.split(":") for text in ports.split()):
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            break
        except OSError:
            time.sleep(0.05)
while nodes:
    sinfo = ["sinfo", "-h", "-N", "-p", "all", "-o", "%T"]
    states = subprocess.run(sinfo, capture_output=True, text=True).stdout
    if states.split().count("idle") >= int(nodes):
        break
    time.sleep(0.1)
"""


class Daemons:
    """Running daemons of a launcher on the login host and the nodes of an emulated cluster."""

    def __init__(
        self,
        lab: Lab,
        needs: Sequence[str],
        order: Sequence[str] | None = None,
        processes: int | None = None,
        env: Mapping[str, str] | None = None,
        accelerator: Mapping[str, Any] | None = None,
    ):
        """Start the daemons, and wait until they accept connections.

        Args:
            lab: The emulated cluster, with a login host.
            needs: Services to start: "slurm", "ssh", both or none.
            order: Names of the nodes to use, in the order of the scheduler. None: all nodes.
            processes: Processes of each node. Slurm gives a node that number of GPUs. None: the
                numbers in the cluster file.
            env: Variables that every process of a job gets in addition to this process's variables.
            accelerator: Settings of the emulated accelerator. None: without one.

        Raises:
            HolmesError: This process does not run as root, a daemon is not installed, a daemon ended, or the
                daemons did not answer within PATIENCE seconds.
        """
        if os.getuid() != 0 and needs:
            raise HolmesError(
                "the lab's Slurm and sshd need root: they give each process the rights of its "
                "user; run it as root, or start the job with --launcher torchrun"
            )
        self.lab = lab
        self.order = tuple(order or (node.name for node in lab.nodes))
        #: Node -> its processes.
        self.processes = {node.name: processes or node.processes for node in lab.nodes}
        common, self.emulated = ranks.common_environment(env or {}, accelerator)
        self.directory = lab.directory / "launchers"
        self.directory.mkdir()

        self._common = {
            name: value for name, value in common.items() if not name.startswith(_OTHER_LAUNCHERS)
        }
        # The daemons start with the variables _common. A session of sshd does not inherit them: its
        # variables, those that differ from this process's, are written into sshd's configuration.
        session_variables = {
            name: value for name, value in self._common.items() if os.environ.get(name) != value
        }
        # Open MPI's session folders in /run are removed with the hosts; in /tmp they would remain if a daemon
        # does not end in time.
        launcher_variables = {"OMPI_MCA_orte_tmpdir_base": "/run"}
        if "slurm" in needs:
            launcher_variables["SLURM_CONF"] = str(self.directory / "slurm.conf")
        self._common.update(launcher_variables)
        session_variables.update(launcher_variables)
        session_variables["PATH"] = self._common.get("PATH", os.defpath)

        hosts = (LOGIN, *self.order)
        self._prepare_hosts(hosts, needs, session_variables)
        self.programs: list[Program] = []
        if "slurm" in needs:
            self.programs.extend(slurm.daemons(self.directory, self.order, self._common))
        if "ssh" in needs:
            self.programs.extend(ssh.daemons(self.directory, hosts, self._common))
        if self.programs:
            logs = self.directory / "logs"
            self.job = lab.start_programs(self.programs, logs=logs, grace=_GRACE_S)
            self._wait_until_ready(hosts, needs)

    def run(self, argv: Sequence[str], **options: Any) -> RunResult:
        """Run a command on the login host, and return its result as that of rank 0.

        Args:
            argv: The command.
            options: Passed to Lab.start_programs.
        """
        return self.start(argv, **options).wait()

    def start(
        self,
        argv: Sequence[str],
        host: str = LOGIN,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Job:
        """Start a command on a host, and return it as a job with a single rank.

        Args:
            argv: The command.
            host: Name of the host.
            env: Additional environment variables.
            options: Passed to Lab.start_programs.
        """
        return self.lab.start_programs([self.program(argv, host, env)], **options)

    def program(
        self, argv: Sequence[str], host: str = LOGIN, env: Mapping[str, str] | None = None
    ) -> Program:
        """Return a program that is ready to be started on a host of the lab.

        Args:
            argv: Command of the program.
            host: Name of the host.
            env: Environment variables in addition to those of all daemons and of the host. They win.
        """
        return Program(host, argv, {**self._common, **self.lab.variables(host), **(env or {})})

    def kill(self, name: str, host: str) -> None:
        """Send SIGKILL to the process group of a daemon.

        Args:
            name: "slurmd", "munged", "sshd" or "slurmctld".
            host: Name of the host.

        Raises:
            ValueError: The host runs no such daemon.
        """
        for number, daemon in enumerate(self.programs):
            if daemon.host == host and any(Path(word).name == name for word in daemon.argv):
                self.job.kill(number)
                return
        raise ValueError(f"host {host!r} runs no daemon {name!r}")

    def _prepare_hosts(
        self, hosts: Sequence[str], needs: Sequence[str], session_variables: Mapping[str, str]
    ) -> None:
        """Write the daemons' configuration files, and give every host an empty folder /run.

        All hosts have the file system of this machine. A tmpfs on /run keeps the sockets and PID
        files of a host's daemons apart from those of other hosts, and of this machine's own
        daemons.

        Args:
            hosts: Names of the nodes, and of the login host.
            needs: Services that will run: "slurm" or "ssh".
            session_variables: Variables that sshd sets in each session. With those that describe
                its host, they are written into the configuration of sshd.

        Raises:
            HolmesError: A host cannot be prepared.
        """
        script = (
            f"{program('mount')} -t tmpfs -o mode=755 none /run; mkdir -p /run/munge /run/slurmctld "
            f"/run/slurmd;"
        )
        if "slurm" in needs:
            slurm.configure(
                self.directory,
                self.lab.spec,
                self.order,
                processes=self.processes,
                variables={host: self.lab.variables(host) for host in self.order},
            )
        if "ssh" in needs:
            ssh.configure(
                self.directory,
                {host: {**session_variables, **self.lab.variables(host)} for host in hosts},
            )
            script += ssh.mount_script(self.directory)
        preparations = [Program(host, ["sh", "-ec", script], self._common) for host in hosts]
        result = self.lab.start_programs(preparations, timeout=PATIENCE).wait()
        if result.returncode:
            raise HolmesError(
                f"lab: the hosts cannot be prepared for their launchers: {_last_line(result)}"
            )

    def _wait_until_ready(self, hosts: Sequence[str], needs: Sequence[str]) -> None:
        """Wait until the daemons accept connections and all nodes of Slurm are idle.

        A script on the login host tries this (_WAIT_SCRIPT). Its arguments are HOST:PORT of each
        daemon, and with Slurm "--" and the number of nodes that must be idle.

        Args:
            hosts: Names of the hosts, each with an sshd if ssh is needed.
            needs: Services that run: "slurm" or "ssh".

        Raises:
            HolmesError: A daemon ended, or the daemons did not answer within PATIENCE seconds.
        """
        arguments = []
        if "slurm" in needs:
            arguments.append(f"{LOGIN}:{slurm.PORT}")
        if "ssh" in needs:
            arguments.extend(f"{host}:{ssh.PORT}" for host in hosts)
        if "slurm" in needs:
            node_count = len(self.order)  # `order` has the names of the nodes that Slurm uses
            arguments.extend(["--", str(node_count)])
        # -I -S: the script needs only the standard library, and so starts sooner.
        waiting = self.start([sys.executable, "-I", "-S", "-c", _WAIT_SCRIPT, *arguments])
        deadline = time.monotonic() + PATIENCE
        while waiting.poll() is None:  # the script has not ended
            running = self.job.running  # numbers of the daemons that run
            ended = [number for number in range(len(self.programs)) if number not in running]
            if ended:
                waiting.kill()
                raise HolmesError(self._describe_end(ended[0]))
            if time.monotonic() > deadline:
                waiting.kill()
                raise HolmesError(
                    f"lab: the daemons of its launchers do not answer within {PATIENCE:g} s; their output is "
                    f"in {self.directory}/logs"
                )
            time.sleep(0.05)

    def _describe_end(self, number: int) -> str:
        """Return a message that a daemon has ended, with the last line of its log."""
        daemon = self.programs[number]
        log = self.directory / "logs" / f"rank{number}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "it printed nothing"
        # The first absolute path is the daemon: Slurm's daemons are started by a shell, "sh -c ...".
        name = next(Path(word).name for word in daemon.argv if Path(word).is_absolute())
        return f"lab: {name} on {daemon.host} has ended: {reason}"


def _last_line(result: RunResult) -> str:
    """Return the last line that the first failed host printed, or the exit status."""
    host_number = result.first_failed or 0
    lines = result.outputs[host_number].strip().splitlines()
    return lines[-1] if lines else f"status {result.returncode}"
