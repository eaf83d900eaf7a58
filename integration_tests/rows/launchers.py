"""Starts a job as its users do: by torchrun, srun, mpirun or deepspeed, on emulated clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_ext.lab.process.job import RunResult
from integration_tests.gpu.commands import Command
from integration_tests.launchers.bench import PAIR, Bench
from integration_tests.launchers.cases import deepspeed, hostfile, mpirun, torchrun
from integration_tests.rows.job import Job


class StartByLauncher:
    """A node of each cluster with two ranks each, and the daemons of Slurm and ssh.

    srun and mpirun deal ranks to the nodes in turn, so that holmes must renumber them.
    """

    nodes = ("a0", "a0", "b0", "b0")

    def __init__(self, folder: Path):
        self.bench = Bench(folder, needs=("slurm", "ssh"), processes=2, order=PAIR)

    def __enter__(self) -> StartByLauncher:
        self.bench.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bench.__exit__(*reason)

    def __call__(self, job: Job, command: Command, words: Sequence[str], env: Mapping[str, str],
                 shell: str) -> RunResult:
        bench = self.bench
        bench.script = list(words)
        if job.launcher == "torchrun":
            programs = [bench.daemons.program(torchrun(bench), host) for host in bench.order]
            return bench.lab.start_programs(programs, timeout=300).wait()
        if job.launcher == "srun":
            argv = ["srun", *bench.all, "--distribution=cyclic", *bench.job]
        elif job.launcher == "mpirun":
            argv = mpirun(bench, "--hostfile", hostfile(bench), "--map-by", "node")
        else:
            argv = deepspeed(bench)
        return bench.daemons.run(argv, timeout=300)
