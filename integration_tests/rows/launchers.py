"""Starts a job as its users do: by torchrun, srun, mpirun or deepspeed, on emulated clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_ext.lab.process.job import RunResult
from integration_tests.gpu.commands import Command
from integration_tests.launchers.bench import PAIR, Bench
from integration_tests.launchers.cases import deepspeed, hostfile, mpirun, torchrun
from integration_tests.rows.job import Job

LAUNCHER_TIMEOUT_S = 300


class StartByLauncher:
    """Starts a job by the launcher that Job.launcher names, on two nodes with two ranks each.

    One node belongs to cluster a, the other one to cluster b. Slurm and ssh run on both. srun and
    mpirun number the ranks in turn over the nodes (a0, b0, a0, b0), so that holmes has to renumber
    them.
    """

    nodes = ("a0", "a0", "b0", "b0")

    def __init__(self, folder: Path):
        self.bench = Bench(folder, needs=("slurm", "ssh"), processes=2, order=PAIR)

    def __enter__(self) -> StartByLauncher:
        self.bench.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bench.__exit__(*reason)

    def __call__(
        self, job: Job, command: Command, arguments: Sequence[str], env: Mapping[str, str], shell: str
    ) -> RunResult:
        bench = self.bench
        bench.script = list(arguments)
        if job.launcher == "torchrun":  # the user starts it on every node
            programs = [bench.daemons.program(torchrun(bench), host) for host in bench.order]
            return bench.lab.start_programs(programs, timeout=LAUNCHER_TIMEOUT_S).wait()

        if job.launcher == "srun":
            command_line = ["srun", *bench.all, "--distribution=cyclic", *bench.job]
        elif job.launcher == "mpirun":
            command_line = mpirun(bench, "--hostfile", hostfile(bench), "--map-by", "node")
        else:
            command_line = deepspeed(bench)
        return bench.daemons.run(command_line, timeout=LAUNCHER_TIMEOUT_S)
