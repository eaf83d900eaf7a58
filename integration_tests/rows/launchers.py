"""Starts a training job by a real launcher (torchrun, srun, mpirun or deepspeed) on two emulated nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_lab.process.job import RunResult

from integration_tests.gpu.commands import Command
from integration_tests.launchers.bench import PAIR, Bench
from integration_tests.launchers.cases import deepspeed, hostfile, mpirun, torchrun
from integration_tests.rows.job import Job

LAUNCHER_TIMEOUT_S = 300


class StartByLauncher:
    """Starts a job by torchrun, srun, mpirun or deepspeed on two emulated nodes, two ranks on each.

    Node a0 belongs to one cluster, b0 to another. Daemons of Slurm and ssh run on both nodes.
    srun and mpirun put ranks 0 and 2 on a0, and ranks 1 and 3 on b0. holmes has to renumber them so
    that the ranks of a node are neighbours.
    """

    nodes = ("a0", "a0", "b0", "b0")  # nodes of ranks 0 to 3 after holmes has renumbered them

    def __init__(self, folder: Path):
        # The emulated nodes a0 and b0, on which daemons run and launchers can be started.
        self.bench = Bench(folder, needs=("slurm", "ssh"), processes=2, order=PAIR)

    def __enter__(self) -> StartByLauncher:
        self.bench.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bench.__exit__(*reason)

    def __call__(
        self,
        job: Job,
        command: Command,
        arguments: Sequence[str],
        env: Mapping[str, str],
        shell: str,
    ) -> RunResult:
        """Run the script by the launcher that the job names, and return the output of all processes.

        The arguments command, env and shell are not used: they are for starts without a launcher.
        """
        bench = self.bench  # the two emulated nodes
        bench.script = list(arguments)  # which the command lines of all launchers contain
        if job.launcher == "torchrun":  # its users start it on every node
            programs = [bench.daemons.program(torchrun(bench), host) for host in bench.order]
            return bench.lab.start_programs(programs, timeout=LAUNCHER_TIMEOUT_S).wait()

        # The other launchers are started once, and start the ranks on all nodes.
        if job.launcher == "srun":
            # --distribution=cyclic and --map-by node put neighbouring ranks on different nodes.
            node_and_task_counts = bench.all  # arguments such as --nodes=2
            python_and_script = bench.job
            command_line = [
                "srun",
                *node_and_task_counts,
                "--distribution=cyclic",
                *python_and_script,
            ]
        elif job.launcher == "mpirun":
            command_line = mpirun(bench, "--hostfile", hostfile(bench), "--map-by", "node")
        else:
            command_line = deepspeed(bench)
        return bench.daemons.run(command_line, timeout=LAUNCHER_TIMEOUT_S)
