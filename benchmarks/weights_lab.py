"""Emulated trainer and sites of benchmarks/weights.py, and the processes of `holmes weights` on them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import tell, weights_runs
from holmes_lab import Lab
from holmes_lab.process.job import Job
from holmes_lab.process.ranks import Program

HOLMES = (sys.executable, "-m", "holmes_ext.cli.main")
PORT = 29600
TIMEOUT_S = 900.0
TRAINER = "t0"
#: Fields of /proc/PID/stat behind the name of the program (proc(5)).
_USER_TICKS, _SYSTEM_TICKS, _POLICY = 11, 12, 38


@dataclass(frozen=True)
class Network:
    """Emulated network of a trainer and several sites, whose hosts receive the trainer's weights.

    Each site is a cluster with an uplink of `rate_bps`. The trainer's uplink has the same rate, and all
    sites share it.
    """

    sites: int
    rate_bps: float
    latency_ms: int  # one way
    lan_bps: float = 4e9  # of each host's NIC
    hosts: int = 3  # of a site
    trainers: int = 1  # hosts of the trainer's cluster
    training_hosts: int = 0  # further hosts of each site, which receive nothing

    @property
    def name(self) -> str:
        """Return the name of this network in the results, such as "2 sites 100 Mb/s 20 ms"."""
        sites = "1 site" if self.sites == 1 else f"{self.sites} sites"
        return f"{sites} {self.rate_bps / 1e6:.0f} Mb/s {self.latency_ms} ms"

    @property
    def site_hosts(self) -> list[list[str]]:
        """Return the names of the receiving hosts, as a list for each site."""
        return [[f"s{site}h{host}" for host in range(self.hosts)] for site in range(self.sites)]

    def bound_s(self, size: int) -> float:
        """Return a lower bound on the seconds to send `size` bytes over the uplink, once to each site."""
        return self.sites * size * 8 / self.rate_bps

    def toml(self) -> str:
        """Return the text of the cluster.toml that describes this network to the lab."""
        text = f'version = 2\n[ethernet]\nrate = "{self.lan_bps / 1e6:.0f}Mb/s"\n'
        text += _cluster(
            "trainer", [f"t{number}" for number in range(self.trainers)], self.rate_bps
        )
        for number, hosts in enumerate(self.site_hosts):
            training = [f"s{number}t{host}" for host in range(self.training_hosts)]
            text += _cluster(f"site{number}", hosts + training, self.rate_bps)
        names = ["trainer", *(f"site{number}" for number in range(self.sites))]
        for first, second in itertools.combinations(names, 2):
            text += (
                f'[[between]]\nclusters = ["{first}", "{second}"]\n'
                f'rate = "{self.rate_bps / 1e6:.0f}Mb/s"\nlatency = "{self.latency_ms}ms"\n'
            )
        return text


def _cluster(name: str, nodes: Sequence[str], uplink_bps: float) -> str:
    quoted = ", ".join(f'"{node}"' for node in nodes)
    return (
        f'[[cluster]]\nname = "{name}"\nkind = "ethernet"\nnodes = [{quoted}]\n'
        f'uplink = "{uplink_bps / 1e6:.0f}Mb/s"\n'
    )


def address_of(lab: Lab, node: str) -> str:
    """Return the IP address of a node."""
    [address] = [each.address for each in lab.nodes if each.name == node]
    return address


def sent_bytes(lab: Lab) -> int:
    """Return the bytes that the trainer's hosts have sent since the lab was created, with headers."""
    return sum(nics["eth0"][1] for node, nics in lab.counters().items() if node.startswith("t"))


class LabCores:
    """Meter of the share of this machine's cores that the programs in the lab use.

    These are the processes under SCHED_RR, which have priority over all other programs of this machine.
    The time of processes that end before busy() is called is not counted.
    """

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._before = _real_time_cpu_s()

    def busy(self) -> float:
        """Return the share of the cores' time that was used since this object was made, from 0 to 1."""
        after = _real_time_cpu_s()
        used_s = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())
        return used_s / (time.monotonic() - self._begin_s) / (os.cpu_count() or 1)


def _real_time_cpu_s() -> dict[int, float]:
    """Return the CPU seconds that each process under SCHED_RR has used, by its PID."""
    seconds: dict[int, float] = {}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[_POLICY]) == os.SCHED_RR:
                    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
                    seconds[int(entry.name)] = ticks / ticks_per_s
    return seconds


class Programs:
    """Programs that were started on nodes of a lab; close() ends them all.

    Args:
        lab: The lab.
    """

    def __init__(self, lab: Lab):
        self.lab = lab
        self._jobs: list[Job] = []

    def start(
        self,
        node: str,
        command: Sequence[str],
        on_line: Callable[[str], None] = lambda line: None,
        **variables: str,
    ) -> Job:
        """Start a program on a node, and return its job.

        Args:
            node: Name of the node.
            command: The program with its arguments.
            on_line: Called with each line of the program's output.
            variables: Environment variables in addition to those of this process.
        """
        program = Program(host=node, argv=list(command), env={**os.environ, **variables})
        job = self.lab.start_programs(
            [program], timeout=TIMEOUT_S, on_line=lambda rank, line, stream: on_line(line)
        )
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """End all programs."""
        for job in self._jobs:
            job.kill()
            job.wait()


class WeightsHosts:
    """Processes of `holmes weights` in a lab: a service on the trainer's host, a receiver on all others.

    Args:
        lab: The lab.
        network: The network that the lab emulates.
        folder: Folder for the state and the versions of all hosts.
        variables: Environment variables of the service.
    """

    def __init__(self, lab: Lab, network: Network, folder: Path, **variables: str):
        self._programs = Programs(lab)
        self._network = network
        self._folder = folder
        self.state = folder / "state"
        self._variables = variables
        self.address = address_of(lab, TRAINER)
        self.events: dict[str, list[dict[str, Any]]] = {}  # node -> events, with their time

    def start(self, *options: str) -> None:
        """Start the service and all receivers, and wait until all receivers have connected.

        Args:
            options: Options of `holmes join serve`.
        """
        lines: list[str] = []
        command = [*HOLMES, "join", "serve", "--port", str(PORT), *options]
        self._programs.start(
            TRAINER, command, lines.append, XDG_STATE_HOME=str(self.state), **self._variables
        )
        wait_until(lambda: any("jobs meet" in line for line in lines))
        for site, hosts in enumerate(self._network.site_hosts):
            for host in hosts:
                self.start_receiver(host, f"site{site}")
        count = self._network.sites * self._network.hosts
        wait_until(lambda: len(self.status()["hosts"]) == count)
        time.sleep(2.5)  # with its next report, each host opens the streams for later transfers

    def start_receiver(self, node: str, site: str) -> None:
        """Start `holmes weights receive` on a node, with an invitation for the site of the node."""
        invitation = self._folder / f"{node}.json"
        if not invitation.exists():
            arguments = ("--address", self.address, "--output", str(invitation))
            self.holmes("join", "invite", site, *arguments)
        events = self.events.setdefault(node, [])

        def on_line(line: str) -> None:
            if line.startswith("{"):
                events.append({**json.loads(line), "time": time.time()})
            else:
                tell(f"{node}: {line}")

        command = [*HOLMES, "weights", "receive", str(self._folder / node), "--json"]
        command += ["--join", f"{site}@{self.address}:{PORT}", "--invitation", str(invitation)]
        self._programs.start(
            node, command, on_line, XDG_STATE_HOME=str(self._folder / f"state-{node}")
        )

    def holmes(self, *arguments: str) -> None:
        """Run a command of holmes as the owner of the run: it finds the run in the state folder.

        Raises:
            RuntimeError: The command failed; the message has its error output.
        """
        done = weights_runs.holmes(self.state, *arguments)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def status(self) -> dict[str, Any]:
        """Return the output of `holmes weights status --json`, run on the host of the service."""
        lines: list[str] = []
        command = [*HOLMES, "weights", "status", f"127.0.0.1:{PORT}", "--json"]
        job = self._programs.start(TRAINER, command, lines.append, XDG_STATE_HOME=str(self.state))
        job.wait()
        return json.loads(lines[-1])

    def publish(self, folder: Path, version: int, parent: int | None = None) -> float:
        """Publish a folder as a version, and return the seconds until the last host has received it.

        Args:
            folder: Folder with the weights.
            version: Number of the version.
            parent: Version to which the weights are a delta; None: they are a checkpoint.
        """
        options = [] if parent is None else ["--parent", str(parent)]
        self.holmes("weights", "publish", str(folder), "--version", str(version), *options)
        return self.staged_after_s(version)

    def staged_after_s(self, version: int) -> float:
        """Wait until the last host has staged a version; return the seconds since its publication."""
        [published] = self.state.rglob(f"weights/{version}")
        start = published.stat().st_ctime  # time at which the folder got this name
        wait_until(lambda: all(self._staged(node, version) for node in self.events))
        return max(self._staged(node, version) for node in self.events) - start

    def _staged(self, node: str, version: int) -> float:
        """Return the time at which a host had received (staged) a version; 0 if it has not yet."""
        for event in list(self.events[node]):
            if event["event"] == "staged" and event["version"] == version:
                return event["time"]
        return 0.0

    def close(self) -> None:
        """End the service and all receivers."""
        self._programs.close()


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until condition() is true; raise TimeoutError after TIMEOUT_S seconds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("a case did not end")
        time.sleep(0.005)
