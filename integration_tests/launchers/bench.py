"""A lab of its own for every launch: what it printed, what its ranks were told, its losses, and what it
left.
"""

from __future__ import annotations

import json
import os
import sys
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


@dataclass
class Bench:
    """folder: shared by all nodes; needs: daemons ("slurm", "ssh"); processes: of a node; order: of the
    nodes, of which those that are called a... are a cluster, and those that are called b...: two of each, or
    PAIR where one says as much (most of what a launch costs is that every rank imports torch); toml: of
    other clusters, whose nodes `order` has.
    """

    folder: Path
    needs: tuple[str, ...] = ()
    processes: int = 1
    order: tuple[str, ...] = ("a0", "b0", "a1", "b1")
    toml: str = ""

    @property
    def file(self) -> Path:
        """cluster.toml."""
        return self.folder / "cluster.toml"

    def write(self) -> None:
        a, b = (
            ",".join(sorted(node for node in self.order if node.startswith(name))) for name in "ab"
        )
        self.file.write_text(
            self.toml
            or clusters.toml(
                f"a ib 2Gb/s {a}", f"b roce 1Gb/s {b}", ethernet="400Mb/s", processes=self.processes
            )
        )

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
        """What every process runs."""
        return [sys.executable, *self.script]

    def run(self, *argv: str, status: int | None = 0, timeout: float = 300, **options: Any) -> str:
        """What a command on the login host printed; it must end with this status (None: with another than
        0).
        """
        result = self.daemons.run(argv, timeout=timeout, **options)
        text = result.outputs[0]
        assert (
            (result.returncode not in (0, 124)) if status is None else result.returncode == status
        ), (result.returncode, text[-6000:])
        return text

    @property
    def ranks(self) -> list[dict[str, str]]:
        """What each rank was told, by its rank as the script saw it; and "rank"."""
        found = [
            json.loads(path.read_text())
            for path in sorted(self.folder.glob("rank*.json"), key=_number)
        ]
        assert [int(told["RANK"]) for told in found] == list(range(len(found)))
        return found

    @property
    def losses(self) -> dict[int, float]:
        """By step; a step that was done twice must have had the same loss."""
        found: dict[int, float] = {}
        for line in (self.folder / "losses").read_text().splitlines():
            step, loss = json.loads(line).values()
            assert abs(found.setdefault(step, loss) - loss) < 1e-6
        return found

    @property
    def all(self) -> tuple[str, str]:
        """srun's options for a job of all nodes and processes."""
        return f"--nodes={len(self.order)}", f"--ntasks-per-node={self.processes}"

    def check(self, steps: int = 5, hosts: tuple[str, ...] = (), each: int = 0) -> None:
        """Every rank ran where it should, clusters in one piece, knew itself by the right numbers, and the
        losses are those of one process. hosts: of the job, by default all; each: ranks of a host.
        """
        ranks, hosts, each = self.ranks, hosts or self.order, each or self.processes
        world = len(hosts) * each
        assert len(ranks) == world and {told["WORLD_SIZE"] for told in ranks} == {str(world)}
        where = [told["host"] for told in ranks]
        assert where == [told["HOLMES_LAB_NODE"] for told in ranks] and sorted(where) == sorted(
            hosts * each
        )
        for part in (str, lambda host: host[0]):  # hosts and clusters in one piece
            names = [part(host) for host in where]
            assert sum(one != two for one, two in zip(names, names[1:])) == len(set(names)) - 1, (
                where
            )
        for host in hosts:
            local = [int(told["LOCAL_RANK"]) for told in ranks if told["host"] == host]
            assert local == list(range(each)), (host, local)
        assert len({(told["MASTER_ADDR"], told["MASTER_PORT"]) for told in ranks}) == 1
        wanted = train.expected(world, steps)
        assert list(self.losses) == list(range(1, steps + 1))
        assert max(abs(a - b) for a, b in zip(self.losses.values(), wanted)) < 1e-6

    def processes_of(self, host: str) -> list[int]:
        """Pids, as this process sees them, of all that runs on a host, but the holder of its namespaces."""
        holder = self.lab.holder(host)
        place, found = os.stat(f"/proc/{holder}/ns/uts").st_ino, []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.stat(entry / "ns" / "uts").st_ino == place and int(entry.name) != holder:
                    found.append(int(entry.name))
            except OSError:  # it ended meanwhile
                continue
        return found


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))
