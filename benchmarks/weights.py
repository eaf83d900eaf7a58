"""Measures `holmes weights` in the lab: a trainer, and sites of several hosts over emulated WAN links.

Each case publishes versions of random bytes, and measures the time from the end of `holmes weights publish`
until the last host has staged the version. The bound is the version's bytes over the rate of a site's link.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Row, chosen_cases, finish, parser, tell
from holmes_lab import Lab
from holmes_lab.process.job import Job
from holmes_lab.process.ranks import Program

from holmes_ext.cluster.spec import load_spec

HOLMES = (sys.executable, "-m", "holmes_ext.cli.main")
PORT = 29600
VERSIONS = 3  # measured versions of a case
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Case:
    """Sites, their links to the trainer, and the size of a version."""

    sites: int
    rate_bps: float  # of each link between the trainer and a site
    latency_ms: int  # one way
    megabytes: int  # of a version
    hosts: int = 3  # of a site

    @property
    def bound_s(self) -> float:
        """Return the time of the bytes at the rate of one link; each site has a link of its own."""
        return self.megabytes * 8e6 / self.rate_bps

    def toml(self) -> str:
        """Return the cluster.toml of the lab: cluster 0 is the trainer's."""
        clusters = ['[[cluster]]\nname = "trainer"\nkind = "ib"\nrate = "1Gb/s"\nnodes = ["t0"]\n']
        links = []
        for number in range(self.sites):
            nodes = f"s{number}h[0-{self.hosts - 1}]"
            clusters.append(
                f'[[cluster]]\nname = "site{number}"\nkind = "ib"\nrate = "1Gb/s"\nnodes = ["{nodes}"]\n'
            )
            links.append(
                f'[[between]]\nclusters = ["trainer", "site{number}"]\n'
                f'rate = "{self.rate_bps / 1e6:.0f}Mb/s"\nlatency = "{self.latency_ms}ms"\n'
            )
        for first in range(self.sites):
            for second in range(first + 1, self.sites):
                links.append(
                    f'[[between]]\nclusters = ["site{first}", "site{second}"]\n'
                    f'rate = "{self.rate_bps / 1e6:.0f}Mb/s"\nlatency = "{self.latency_ms}ms"\n'
                )
        return 'version = 2\n[ethernet]\nrate = "1Gb/s"\n' + "".join(clusters + links)


CASES = {
    "1 site 100 Mb/s 40 ms": Case(1, 1e8, 20, 40),
    "2 sites 100 Mb/s 40 ms": Case(2, 1e8, 20, 40),
    "1 site 100 Mb/s 160 ms": Case(1, 1e8, 80, 40),
}


class Hosts:
    """Processes of one case: the service on node t0, and a receiver on each other node."""

    def __init__(self, lab: Lab, case: Case, folder: Path):
        self._lab = lab
        self._case = case
        self._folder = folder
        self._state = folder / "state"
        self.events: dict[str, list[dict[str, Any]]] = {}  # node -> events, with their time
        self._jobs: list[Job] = []

    def start(self) -> None:
        """Start the service and all receivers, and wait until the service knows all of them."""
        lines: list[str] = []
        self._start("t0", ["join", "serve", "--port", str(PORT)], self._state, lines.append)
        wait_until(lambda: any("jobs meet" in line for line in lines))
        [address] = [node.address for node in self._lab.nodes if node.name == "t0"]
        for number in range(self._case.sites):
            for host in range(self._case.hosts):
                self._start_receiver(f"s{number}h{host}", f"site{number}", address)
        count = self._case.sites * self._case.hosts
        wait_until(lambda: len(self.status()["hosts"]) == count)

    def _start_receiver(self, node: str, site: str, address: str) -> None:
        invitation = self._folder / f"{node}.json"
        self.holmes("join", "invite", site, "--address", address, "--output", str(invitation))
        events = self.events.setdefault(node, [])

        def on_line(line: str) -> None:
            if line.startswith("{"):
                events.append({**json.loads(line), "time": time.monotonic()})
            else:
                tell(f"{node}: {line}")

        arguments = ["weights", "receive", str(self._folder / node), "--json"]
        arguments += ["--join", f"{site}@{address}:{PORT}", "--invitation", str(invitation)]
        self._start(node, arguments, self._folder / f"state-{node}", on_line)

    def _start(self, node: str, arguments: list[str], state: Path, on_line: Any) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(state)}
        program = Program(host=node, argv=[*HOLMES, *arguments], env=environment)
        self._jobs.append(
            self._lab.start_programs(
                [program],
                timeout=TIMEOUT_S,
                on_line=lambda rank, line, stream: on_line(line),
            )
        )

    def holmes(self, *arguments: str) -> str:
        """Run a command of the run's user, which needs its state folder only; return its output."""
        environment = {**os.environ, "XDG_STATE_HOME": str(self._state)}
        command = [*HOLMES, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Return the state of the service, asked for on its node."""
        lines: list[str] = []
        environment = {**os.environ, "XDG_STATE_HOME": str(self._state)}
        command = [*HOLMES, "weights", "status", f"127.0.0.1:{PORT}", "--json"]
        program = Program(host="t0", argv=command, env=environment)
        job = self._lab.start_programs(
            [program], timeout=60, on_line=lambda rank, line, stream: lines.append(line)
        )
        job.wait()
        return json.loads(lines[-1])

    def publish(self, version: int) -> float:
        """Publish a version of random bytes; return the seconds until all hosts have staged it."""
        folder = self._folder / f"made{version}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(os.urandom(self._case.megabytes * 10**6))
        self.holmes("weights", "publish", str(folder), "--version", str(version))
        start = time.monotonic()
        wait_until(lambda: all(self._staged(node, version) for node in self.events))
        return max(self._staged(node, version) for node in self.events) - start

    def _staged(self, node: str, version: int) -> float:
        """Return the time at which a host has staged a version; 0: it has not."""
        for event in list(self.events[node]):
            if event["event"] == "staged" and event["version"] == version:
                return event["time"]
        return 0.0

    def close(self) -> None:
        """End all processes."""
        for job in self._jobs:
            job.kill()
            job.wait()


def wait_until(condition: Any) -> None:
    """Wait until a condition holds, at most TIMEOUT_S seconds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("a case did not end")
        time.sleep(0.01)


def measure(name: str) -> list[Row]:
    """Run a case, and return its rows."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "cluster.toml"
        file.write_text(case.toml())
        with Lab(load_spec(file)) as lab:
            hosts = Hosts(lab, case, Path(temporary))
            try:
                hosts.start()
                seconds = [hosts.publish(version) for version in range(1, VERSIONS + 1)]
                sent = hosts.status()["sent_bytes"]
            finally:
                hosts.close()
    ratios = [each / case.bound_s for each in seconds]
    copies = [count / (VERSIONS * case.megabytes * 1e6) for count in sent.values()]
    return [
        Row.median(name, "last host staged", seconds, unit="s", emulated=False),
        Row.median(name, "staged / bound", ratios, unit="", emulated=False, target="<= 1.1"),
        Row.median(name, "copies sent to a site", copies, unit="", emulated=False, target="<= 1"),
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    args = parser(__doc__.splitlines()[0]).parse_args()
    rows = [row for case in chosen_cases(args.cases, CASES) for row in measure(case)]
    return finish(rows, args.json, "weights to sites over emulated links")


if __name__ == "__main__":
    raise SystemExit(main())
