"""Starts Slurm and sshd in the hosts of a lab, waits until they answer, and runs what is submitted there."""

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

#: Seconds that the daemons may take to answer.
PATIENCE = 60.0
#: Seconds for which the other daemons go on when one has ended (select takes 24 days at most).
_GRACE = 1e6
#: Variables of another job's launcher, which the lab's must not take for its own.
_FOREIGN = ("SLURM", "OMPI_", "PMIX", "PMI_", "MPI_LOCAL")
#: Waits for ports (HOST:PORT ...), then, with a number after "--", until so many nodes of Slurm are idle.
_WAIT = """
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
    """Of a lab with a login host. needs: "slurm", "ssh"; order: the nodes in the scheduler's order, default
    the file's; processes: of a node at most, so its GPUs for Slurm; env: what every process of a job gets on
    top of this process's variables; accelerator: as Lab.start.

    programs: in the order of `job`'s ranks. HolmesError where a daemon is missing, ends, or does not answer.
    """

    def __init__(
        self,
        lab: Lab,
        needs: Sequence[str],
        order: Sequence[str] | None = None,
        processes: int | None = None,
        env: Mapping[str, str] | None = None,
        accelerator: Mapping[str, Any] | None = None,
    ):
        if os.getuid() != 0 and needs:
            raise HolmesError(
                "the lab's Slurm and sshd need root: they give each process the rights of its "
                "user; run it as root, or start the job with --launcher torchrun"
            )
        self.lab, self.order = lab, tuple(order or (node.name for node in lab.nodes))
        self.processes = processes or max(node.processes for node in lab.nodes)
        common, self.emulated = ranks.common_environment(env or {}, accelerator)
        common = {name: value for name, value in common.items() if not name.startswith(_FOREIGN)}
        self.directory = lab.directory / "launchers"
        self.directory.mkdir()
        said = {
            name: common[name]
            for name in common
            if name not in os.environ or os.environ[name] != common[name]
        }
        # Open MPI's session folders end with the hosts; in /tmp they stay where a daemon does not end in time
        common["OMPI_MCA_orte_tmpdir_base"] = said["OMPI_MCA_orte_tmpdir_base"] = "/run"
        if "slurm" in needs:
            common["SLURM_CONF"] = said["SLURM_CONF"] = str(self.directory / "slurm.conf")
        hosts = (LOGIN, *self.order)
        self._common = common
        self._prepare(hosts, needs, {**said, "PATH": common.get("PATH", os.defpath)})
        self.programs = [
            *(slurm.daemons(self.directory, self.order, common) if "slurm" in needs else ()),
            *(ssh.daemons(self.directory, hosts, common) if "ssh" in needs else ()),
        ]
        if self.programs:
            self.job = lab.start_programs(self.programs, logs=self.directory / "logs", grace=_GRACE)
            ports = [f"{LOGIN}:{slurm.PORT}"] if "slurm" in needs else []
            ports += [f"{host}:{ssh.PORT}" for host in hosts] if "ssh" in needs else []
            self._wait([*ports, *(["--", str(len(self.order))] if "slurm" in needs else [])])

    def run(self, argv: Sequence[str], **options: Any) -> RunResult:
        """`argv` alone on the login host (rank 0 of the result); options of Lab.start_programs."""
        return self.start(argv, **options).wait()

    def start(
        self,
        argv: Sequence[str],
        host: str = LOGIN,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Job:
        return self.lab.start_programs([self.program(argv, host, env)], **options)

    def program(
        self, argv: Sequence[str], host: str = LOGIN, env: Mapping[str, str] | None = None
    ) -> Program:
        return Program(host, argv, {**self._common, **self.lab.variables(host), **(env or {})})

    def kill(self, name: str, host: str) -> None:
        """SIGKILL to a daemon ("slurmd", "munged", "sshd", "slurmctld") and what is in its process group."""
        number = next(
            number
            for number, daemon in enumerate(self.programs)
            if daemon.host == host and any(Path(word).name == name for word in daemon.argv)
        )
        self.job.kill(number)

    def _prepare(self, hosts: Sequence[str], needs: Sequence[str], said: Mapping[str, str]) -> None:
        """Files that the daemons read, and a /run of its own for every host."""
        variables = {host: {**said, **self.lab.variables(host)} for host in hosts}
        script = (
            f"{program('mount')} -t tmpfs -o mode=755 none /run; mkdir -p /run/munge /run/slurmctld "
            f"/run/slurmd;"
        )
        if "slurm" in needs:
            slurm.configure(
                self.directory,
                self.lab.spec,
                self.order,
                self.processes,
                {host: self.lab.variables(host) for host in self.order},
            )
        if "ssh" in needs:
            ssh.configure(self.directory, variables)
            script += ssh.prepare(self.directory)
        everywhere = [Program(host, ["sh", "-ec", script], self._common) for host in hosts]
        done = self.lab.start_programs(everywhere, timeout=PATIENCE).wait()
        if done.returncode:
            raise HolmesError(
                f"lab: the hosts cannot be prepared for their launchers: {_last(done)}"
            )

    def _wait(self, arguments: Sequence[str]) -> None:
        waiting = self.start([sys.executable, "-I", "-S", "-c", _WAIT, *arguments])
        deadline = time.monotonic() + PATIENCE
        while waiting.poll() is None:
            ended = [
                number for number in range(len(self.programs)) if number not in self.job.running
            ]
            if ended or time.monotonic() > deadline:
                waiting.kill()
                raise HolmesError(self._why(ended[0] if ended else None))
            time.sleep(0.05)

    def _why(self, ended: int | None) -> str:
        if ended is None:
            return (
                f"lab: its launchers do not answer within {PATIENCE:g} s; what they say is in "
                f"{self.directory}/logs"
            )
        daemon, log = self.programs[ended], self.directory / "logs" / f"rank{ended}.log"
        lines = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        name = next(Path(word).name for word in daemon.argv if Path(word).is_absolute())
        return f"lab: {name} on {daemon.host} has ended: {lines[0]}"


def _last(result: RunResult) -> str:
    rank = result.first_failed or 0
    return (result.outputs[rank].strip().splitlines() or [f"status {result.returncode}"])[-1]
