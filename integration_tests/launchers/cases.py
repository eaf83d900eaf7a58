"""Test cases that start a job by a launcher; test_launchers.py runs them.

Each case is a function of a folder. It fails if the job has other losses than with another launcher.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import clusters
from waiting import await_

from integration_tests.launchers.bench import PAIR, Bench

CASES: dict[str, Callable[[Path], None]] = {}
PATIENCE = 300.0  # seconds that a busy machine may take; nothing here asserts how fast something is


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a function as a test case."""
    CASES[function.__name__] = function
    return function


def eventually(condition: Callable[[], object], what: str) -> None:
    await_(condition, PATIENCE, what)


def torchrun(bench: Bench, *flags: str) -> list[str]:
    return [
        "torchrun",
        f"--nnodes={len(bench.order)}",
        f"--nproc-per-node={bench.processes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=a0:29400",
        "--rdzv-id=1",
        *flags,
        *bench.script,
    ]


def agents(bench: Bench, *flags: str, env: dict[str, str] | None = None) -> list[str]:
    """Run torchrun on every node, and return the output of each."""
    programs = [bench.daemons.program(torchrun(bench, *flags), host, env) for host in bench.order]
    result = bench.lab.start_programs(programs, timeout=PATIENCE).wait()
    assert result.returncode == 0, result.outputs
    return list(result.outputs.values())


@case
def torchrun_two_ranks_a_node(folder):
    with Bench(folder, processes=2, order=PAIR) as bench:
        agents(bench)
        bench.check()


@case
def torchrun_max_restarts(folder):
    """Kill a rank in step 3: the agents restart all ranks, which resume from the checkpoint."""
    with Bench(folder, order=PAIR) as bench:
        bench.script.extend(["--fail", "b0:3"])
        agents(bench, "--max-restarts=2")
        assert (folder / "failed").exists()
        bench.check()
        assert "1" in {rank["TORCHELASTIC_RESTART_COUNT"] for rank in bench.ranks}


@case
def torchrun_in_srun(folder):
    """Start an agent of torchrun on every node by srun, as most sites do."""
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:
        bench.run("srun", "--nodes=2", "--ntasks-per-node=1", *torchrun(bench))
        bench.check()


@case
def srun_one_rank_a_node(folder):
    with Bench(folder, ("slurm",), order=("a0", "b0", "a1")) as bench:
        bench.run("srun", "--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=1", *bench.job)
        bench.check()
        assert {rank["CUDA_VISIBLE_DEVICES"] for rank in bench.ranks} == {"0"}


@case
def srun_two_ranks_a_node(folder):
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:
        bench.run("srun", *bench.all, *bench.job)
        bench.check()


@case
def srun_cyclic(folder):
    """Distribute ranks cyclically, so that ranks 0 and 2 are on a0."""
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:
        bench.run("srun", *bench.all, "--distribution=cyclic", *bench.job)
        bench.check()


@case
def srun_plane(folder):
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:
        bench.run("srun", *bench.all, "--distribution=plane=1", *bench.job)
        bench.check()


@case
def srun_arbitrary(folder):
    """Order the nodes by SLURM_HOSTFILE: rank 0 is on b1, the last node of the node list."""
    with Bench(folder, ("slurm",), order=("a0", "b0", "b1")) as bench:
        (folder / "hosts").write_text("b1\na0\nb0\n")
        bench.run(
            "env",
            f"SLURM_HOSTFILE={folder}/hosts",
            "srun",
            "--ntasks=3",
            "--distribution=arbitrary",
            *bench.job,
        )
        bench.check()


#: Two nodes of one process, and one of two.
UNEQUAL = clusters.toml(
    "a ib 2Gb/s a0,a1 processes=1", "b roce 1Gb/s b0 processes=2", ethernet="400Mb/s"
)


@case
def srun_nodes_of_different_width(folder):
    """Start a component for each cluster, and in it as many tasks on a node as the node has GPUs.

    Slurm tells all tasks the number of tasks of the first component's nodes.
    """
    with Bench(folder, ("slurm",), processes=None, order=("a0", "a1", "b0"), toml=UNEQUAL) as bench:
        narrow = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--partition=a")
        wide = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--partition=b")
        bench.run("srun", *wide, *bench.job, ":", *narrow, *bench.job)
        bench.check()
        sizes = {(rank["host"], rank["LOCAL_WORLD_SIZE"]) for rank in bench.ranks}
        assert sizes == {("a0", "1"), ("a1", "1"), ("b0", "2")}


@case
def srun_heterogeneous(folder):
    """Start two components, the second cluster first.

    Rank 0 is on b0, which is not the first node of the node list.
    """
    with Bench(folder, ("slurm",), order=("a0", "b0", "b1")) as bench:
        bench.run(
            "srun",
            "--partition=b",
            "--nodes=2",
            "--ntasks=2",
            *bench.job,
            ":",
            "--partition=a",
            "--nodes=1",
            "--ntasks=1",
            *bench.job,
        )
        bench.check()


@case
def sbatch_heterogeneous(folder):
    """Submit a heterogeneous batch job whose step spans both components."""
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:
        script = folder / "job.sbatch"
        script.write_text(
            "#!/bin/bash\n#SBATCH --partition=a --nodes=1 --ntasks-per-node=2\n#SBATCH hetjob\n"
            "#SBATCH --partition=b --nodes=1 --ntasks-per-node=2\n"
            f"srun --het-group=0,1 {' '.join(bench.job)}\n"
        )
        bench.run("sbatch", "--wait", f"--output={folder}/out", str(script))
        bench.check()


@case
def srun_on_some_nodes_of_the_file(folder):
    with Bench(folder, ("slurm",)) as bench:
        text = bench.run("srun", "--nodelist=a1,b0,b1", "--ntasks-per-node=1", *bench.job)
        assert "3 of the 4 nodes of" in text and "not in this job: a0" in text
        bench.check(hosts=("a1", "b0", "b1"))


def submit(bench: Bench, *flags: str, script: str) -> str:
    """Submit a batch job that runs a script on all nodes, and return its number."""
    file = bench.folder / "job.sbatch"
    file.write_text(f"#!/bin/bash\n{script}\n")
    output = bench.run("sbatch", *bench.all, f"--output={bench.folder}/out", *flags, str(file))
    return re.search(r"Submitted batch job (\d+)", output)[1]


def state_of(bench: Bench, job: str) -> str:
    return re.search(r"JobState=(\w+)", bench.run("scontrol", "show", "job", job))[1]


def saved(bench: Bench, step: int) -> bool:
    """Return whether the job has saved this step."""
    log = bench.folder / "losses"
    return log.exists() and len(log.read_text().splitlines()) >= step


@case
def scontrol_requeue(folder):
    """Requeue a running job: it starts again and resumes from its checkpoint."""
    with Bench(folder, ("slurm",), order=PAIR) as bench:
        job = submit(
            bench,
            "--requeue",
            "--open-mode=append",
            script=f"srun {' '.join(bench.job)} --pause 1 --steps 6",
        )
        eventually(lambda: saved(bench, 2), "it trains")
        bench.run("scontrol", "requeue", job)
        eventually(lambda: state_of(bench, job) == "PENDING", "it waits again")
        # Slurm would let it wait for two minutes
        bench.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        eventually(lambda: state_of(bench, job) == "COMPLETED", "it ends well")
        bench.check(steps=6)
        assert {rank["SLURM_RESTART_COUNT"] for rank in bench.ranks} == {"1"}


@case
def time_limit(folder):
    """Send SIGTERM 45 s before the time limit, which is set when the job trains.

    The job finishes and saves the step, and ends. Another job resumes from there.
    """
    with Bench(folder, ("slurm",), order=PAIR) as bench:
        job = submit(
            bench,
            "--time=30",
            "--signal=TERM@45",
            script=f"srun {' '.join(bench.job)} --pause 1 --steps 999",
        )
        eventually(lambda: saved(bench, 2), "it trains")
        run_time = re.search(r"RunTime=0+:(\d+):(\d+)", bench.run("scontrol", "show", "job", job))
        run_time_s = 60 * int(run_time[1]) + int(run_time[2])
        limit_minutes = (run_time_s + 45) // 60 + 1  # SIGTERM comes 45 s before the limit
        bench.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit_minutes}")
        eventually(lambda: state_of(bench, job) == "COMPLETED", "it ends before its limit")
        last_step = max(bench.losses)
        assert f"ended by SIGTERM after step {last_step}" in (folder / "out").read_text()
        assert 0 < last_step < 999
        bench.run("srun", *bench.all, *bench.job, "--steps", str(last_step + 2))
        bench.check(steps=last_step + 2)


@case
def srun_node_goes_down(folder):
    """Switch b1 off: Slurm ends the job and names the node, and a job without the node resumes."""
    with Bench(folder, ("slurm",), order=("a0", "b0", "b1")) as bench:
        job = bench.daemons.start(
            ["srun", *bench.all, *bench.job, "--pause", "1", "--steps", "999"], timeout=PATIENCE
        )
        eventually(lambda: saved(bench, 2) or job.poll(), "it trains")
        power_off(bench, "b1")
        result = job.wait()
        assert result.returncode not in (0, 124) and "b1" in result.outputs[0], result.outputs
        before = max(bench.losses)
        for path in folder.glob("rank*.json"):
            path.unlink()
        bench.run(
            "srun", "--nodes=2", "--ntasks-per-node=1", *bench.job, "--steps", str(before + 1)
        )
        assert [rank["host"] for rank in bench.ranks] == ["a0", "b0"]
        assert max(bench.losses) == before + 1


def power_off(bench: Bench, host: str) -> None:
    """Drop all packets of a host and kill its processes, so that other hosts see only silence."""
    node = next(node for node in bench.lab.nodes if node.name == host)
    for nic in node.nics:
        bench.lab.set_silent(host, nic.name, True)
    for pid in bench.processes_of(host):
        os.kill(pid, signal.SIGKILL)


def mpirun(bench: Bench, *flags: str) -> list[str]:
    return [
        "mpirun",
        "--allow-run-as-root",
        "--bind-to",
        "none",
        "-x",
        "PYTHONPATH",
        "-x",
        "MASTER_ADDR=a0",
        *flags,
        *bench.job,
    ]


def hostfile(bench: Bench, *lines: str) -> str:
    path = bench.folder / "hostfile"
    path.write_text(
        "\n".join(lines or [f"{host} slots={bench.processes_on(host)}" for host in bench.order])
        + "\n"
    )
    return str(path)


@case
def mpirun_hostfile(folder):
    with Bench(folder, ("ssh",), processes=2, order=PAIR) as bench:
        bench.run(*mpirun(bench, "--hostfile", hostfile(bench)))
        bench.check()


@case
def mpirun_nodes_of_different_width(folder):
    with Bench(folder, ("ssh",), processes=None, order=("a0", "b0"), toml=UNEQUAL) as bench:
        bench.run(*mpirun(bench, "--hostfile", hostfile(bench)))
        bench.check()


@case
def mpirun_by_node(folder):
    """Map MPI's ranks by node, so that consecutive ranks are on different nodes."""
    with Bench(folder, ("ssh",), processes=2, order=PAIR) as bench:
        bench.run(*mpirun(bench, "--hostfile", hostfile(bench), "--map-by", "node"))
        bench.check()


@case
def mpirun_rankfile(folder):
    """Name every rank's host in a rankfile, a0 first because MASTER_ADDR names it."""
    with Bench(folder, ("ssh",), order=("a0", "b0", "a1")) as bench:
        ranks = [f"rank {rank}={host} slot=0" for rank, host in enumerate(bench.order)]
        (folder / "rankfile").write_text("\n".join(ranks) + "\n")
        bench.run(
            *mpirun(
                bench, "--hostfile", hostfile(bench), "-np", "3", "--rankfile", f"{folder}/rankfile"
            )
        )
        bench.check()


@case
def mpirun_in_sbatch(folder):
    """Start mpirun in a batch job, whose nodes and slots it reads from Slurm.

    It runs on a0 and starts its daemons on the other nodes by srun.
    """
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:
        command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", *bench.job]
        submit(bench, "--wait", script=" ".join(command))
        bench.check()


@case
def mpirun_sigterm(folder):
    """Send SIGTERM to mpirun, which passes it on and waits for its ranks."""
    with Bench(folder, ("ssh",), order=PAIR) as bench:
        command = mpirun(
            bench, "--hostfile", hostfile(bench), "--mca", "odls_base_sigkill_timeout", "15"
        )
        job = bench.daemons.start([*command, "--pause", "1", "--steps", "999"], timeout=PATIENCE)
        eventually(lambda: saved(bench, 2) or job.poll(), "it trains")
        job.kill(number=signal.SIGTERM)
        text = job.wait().outputs[0]
        assert f"ended by SIGTERM after step {max(bench.losses)}" in text, text
        bench.run(
            *mpirun(bench, "--hostfile", hostfile(bench)), "--steps", str(max(bench.losses) + 1)
        )
        bench.check(steps=max(bench.losses))


def deepspeed(bench: Bench, *flags: str) -> list[str]:
    return ["deepspeed", "--hostfile", hostfile(bench), "--force_multi", *flags, *bench.script]


@case
def deepspeed_hostfile(folder):
    with Bench(folder, ("ssh",), processes=2, order=PAIR[::-1]) as bench:
        bench.run(*deepspeed(bench))
        bench.check()


@case
def deepspeed_nodes_of_different_width(folder):
    """Start with slots in the hostfile that differ as the clusters' nodes do."""
    with Bench(folder, ("ssh",), processes=None, order=("b0", "a0"), toml=UNEQUAL) as bench:
        bench.run(*deepspeed(bench))
        bench.check()


@case
def deepspeed_include(folder):
    """Start on some hosts, on each with one slot of two, over ssh without pdsh."""
    with Bench(folder, ("ssh",), processes=2, order=("a0", "b0", "b1")) as bench:
        bench.file.write_text(bench.file.read_text().replace("processes = 2", "processes = 1"))
        bench.run(*deepspeed(bench, "--include", "a0:1@b0:0@b1:1"))
        bench.check(hosts=("a0", "b0", "b1"), each=1)
