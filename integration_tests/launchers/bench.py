"""Starts jobs with a launcher on emulated nodes, and checks the ranks, losses and processes."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clusters
from holmes_lab import Lab
from holmes_lab.launchers.daemons import Daemons

from holmes_ext.cluster.spec import parse_spec
from integration_tests.jobs import ROOT
from integration_tests.launchers import train

TRAIN = str(Path(train.__file__))
PAIR = ("a0", "b0")
TIMED_OUT = 124  # exit status of a job that the lab ended after its timeout


@dataclass
class Bench:
    """A lab with the daemons that a launcher needs, and the files of the jobs that run in it.

    Nodes whose names begin with "a" are one cluster, those with "b" another. A test uses two nodes (PAIR)
    if these suffice: most of the time of a launch is spent on importing torch in every rank.
    """

    folder: Path  # shared by all nodes
    needs: tuple[str, ...] = ()  # daemons: "slurm", "ssh"
    processes: int | None = 1  # of each node; None: the numbers in `toml`
    order: tuple[str, ...] = ("a0", "b0", "a1", "b1")  # names of the nodes
    toml: str = ""  # cluster.toml with the nodes of `order`, instead of the two clusters

    @property
    def file(self) -> Path:
        """Return the path of cluster.toml."""
        return self.folder / "cluster.toml"

    def write(self) -> None:
        """Write cluster.toml."""
        text = self.toml
        if not text:
            a = ",".join(sorted(node for node in self.order if node.startswith("a")))
            b = ",".join(sorted(node for node in self.order if node.startswith("b")))
            lines = (f"a ib 2Gb/s {a}", f"b roce 1Gb/s {b}")
            text = clusters.toml(*lines, ethernet="400Mb/s", processes=self.processes)
        self.file.write_text(text)

    def __enter__(self) -> Bench:
        self.script = [TRAIN, str(self.folder), "--holmes", "--holmes-cluster", str(self.file)]
        self.write()
        self.lab = Lab(parse_spec(self.file.read_text(), str(self.file)), login=True)
        self.lab.__enter__()
        try:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            env = {"PYTHONPATH": modules, "PATH": path}
            self.daemons = Daemons(self.lab, self.needs, self.order, self.processes, env)
        except BaseException:
            self.lab.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()

    @property
    def job(self) -> list[str]:
        """Return the command of every process of a job."""
        return [sys.executable, *self.script]

    def run(self, *argv: str, status: int | None = 0, timeout: float = 300, **options: Any) -> str:
        """Run a command on the login host, and return its output.

        Args:
            status: Exit status that the command must have; None: it must fail.
            timeout: Seconds after which the command is ended.
        """
        result = self.daemons.run(argv, timeout=timeout, **options)
        text = result.outputs[0]
        if status is None:
            is_expected = result.returncode not in (0, TIMED_OUT)
        else:
            is_expected = result.returncode == status
        assert is_expected, (result.returncode, text[-6000:])
        return text

    @property
    def ranks(self) -> list[dict[str, str]]:
        """Return the host and the environment variables that each rank saw, by rank."""
        files = sorted(self.folder.glob("rank*.json"), key=_number)
        ranks = [json.loads(file.read_text()) for file in files]
        assert [int(rank["RANK"]) for rank in ranks] == list(range(len(ranks)))
        return ranks

    @property
    def losses(self) -> dict[int, float]:
        """Return step -> loss; a step that was trained twice must have the same loss."""
        loss_of: dict[int, float] = {}
        for line in (self.folder / "losses").read_text().splitlines():
            step, loss = json.loads(line).values()
            first_loss = loss_of.setdefault(step, loss)
            assert abs(first_loss - loss) < 1e-6
        return loss_of

    def processes_on(self, host: str) -> int:
        """Return the number of processes of a node."""
        return self.processes or self.lab.spec.cluster_of(host).processes

    @property
    def all(self) -> tuple[str, str]:
        """Return srun's options for a job of all nodes and processes."""
        return f"--nodes={len(self.order)}", f"--ntasks-per-node={self.processes}"

    def check(self, steps: int = 5, hosts: tuple[str, ...] = (), each: int = 0) -> None:
        """Assert that the job ran on the right hosts, and has the losses of a single process.

        Ranks of a host and of a cluster must be consecutive, and each process must have its right numbers.

        Args:
            steps: Number of steps of the job.
            hosts: Hosts of the job; by default all.
            each: Number of ranks of each host; by default the processes of the node.
        """
        ranks = self.ranks
        hosts = hosts or self.order
        count_of = {host: each or self.processes_on(host) for host in hosts}
        world = sum(count_of.values())
        assert len(ranks) == world
        assert {rank["WORLD_SIZE"] for rank in ranks} == {str(world)}
        hosts_by_rank = [rank["host"] for rank in ranks]
        assert hosts_by_rank == [rank["HOLMES_LAB_NODE"] for rank in ranks]
        assert Counter(hosts_by_rank) == count_of
        clusters_by_rank = [host[0] for host in hosts_by_rank]
        assert _equal_names_are_consecutive(hosts_by_rank), hosts_by_rank
        assert _equal_names_are_consecutive(clusters_by_rank), hosts_by_rank
        for host in hosts:
            local = [int(rank["LOCAL_RANK"]) for rank in ranks if rank["host"] == host]
            assert local == list(range(count_of[host])), (host, local)
        assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
        expected = train.expected(world, steps)
        assert list(self.losses) == list(range(1, steps + 1))
        assert max(abs(a - b) for a, b in zip(self.losses.values(), expected)) < 1e-6

    def processes_of(self, host: str) -> list[int]:
        """Return the pids, as this process sees them, of all processes of a host.

        The process that holds the host's namespaces is left out.
        """
        holder = self.lab.holder(host)
        namespace = os.stat(f"/proc/{holder}/ns/uts").st_ino
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_on_host = os.stat(entry / "ns" / "uts").st_ino == namespace
            except OSError:  # the process has ended
                continue
            if is_on_host and int(entry.name) != holder:
                pids.append(int(entry.name))
        return pids


def _equal_names_are_consecutive(names: list[str]) -> bool:
    changes = sum(first != second for first, second in zip(names, names[1:]))
    return changes == len(set(names)) - 1


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))
