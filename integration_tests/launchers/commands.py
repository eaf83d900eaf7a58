"""Test cases of holmes's commands that use launchers: lab run, lab shell, discover, doctor, probe."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from holmes_ext.cluster.spec import load_spec
from integration_tests.jobs import ROOT
from integration_tests.launchers.bench import PAIR, TRAIN, Bench
from integration_tests.launchers.cases import case


def holmes(*argv: str, status: int = 0) -> str:
    """Run a command of holmes, and return its output, standard error included."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["holmes", *argv],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == status, (done.returncode, done.stdout[-4000:])
    return done.stdout


@case
def holmes_lab_run(folder):
    """Run a job by each launcher with `holmes lab run --launcher`, and a job that fails."""
    for launcher in ("torchrun", "srun", "mpirun", "deepspeed"):
        job_folder = folder / launcher
        job_folder.mkdir()
        bench = Bench(job_folder, order=PAIR)
        bench.write()
        start = ("lab", "run", "--cluster", str(bench.file), "--launcher", launcher, "--")
        flags = ("--holmes", "--holmes-cluster", str(bench.file))
        holmes(*start, sys.executable, TRAIN, str(job_folder), *flags)
        bench.check()
    text = holmes(*start[:-1], "--quiet", "--", sys.executable, TRAIN, "/nowhere", status=1)
    assert "/nowhere/rank0.json" in text, text


@case
def holmes_lab_shell(folder):
    """Run commands on a node of a running lab, and of a lab that the command starts with Slurm."""
    with Bench(folder) as bench:
        shell = ("lab", "shell", "--lab", str(bench.lab.directory))
        assert holmes(*shell, "b1", "--", "hostname").split() == ["b1"]
        assert "no lab that runs has a host 'c0'; there are" in holmes(
            *shell, "c0", "--", "hostname", status=2
        )
        holmes(*shell, "b1", "--", "sh", "-c", "exit 7", status=7)
    new_lab = ("lab", "shell", "--cluster", str(bench.file), "--launcher", "srun", "login")
    output = holmes(*new_lab, "--", "srun", "--nodes=4", "hostname")
    assert sorted(output.split()) == ["a0", "a1", "b0", "b1"]


@case
def holmes_discover_from_slurm(folder):
    """Discover the clusters from the features and the topology of Slurm.

    The command must report that munge does not answer.
    """
    with Bench(folder, ("slurm",), processes=2) as bench:
        file = folder / "found.toml"
        rates = ("--rate", "a=2Gb/s", "--rate", "b=1Gb/s", "--rate", "ethernet=400Mb/s")
        text = bench.run("holmes", "discover", "--from", "slurm", status=2)
        assert (
            "give --rate a=... --rate b=... --rate ethernet=..." in text
            and len(text.splitlines()) == 1
        )
        bench.run("holmes", "discover", "--from", "slurm", *rates, "--output", str(file))
        # Slurm does not describe latencies.
        discovered = [replace(cluster, latency_s=0) for cluster in load_spec(file).clusters]
        given = [replace(cluster, latency_s=0) for cluster in load_spec(bench.file).clusters]
        assert discovered == given
        bench.daemons.kill("munged", "login")
        text = bench.run("holmes", "discover", "--from", "slurm", status=2)
        assert "Slurm's munge does not answer" in text and len(text.splitlines()) == 1


@case
def holmes_doctor_over_an_allocation(folder):
    """Check the nodes of Slurm allocations with `holmes doctor`.

    The allocations are: two components; nodes of which one has a silent NIC; nodes that the cluster file
    lacks. One process examines each node, whatever numbers the file and the allocation have.
    """
    with Bench(folder, ("slurm",), processes=2) as bench:
        doctor = ("holmes", "doctor", "--slurm", "--cluster")
        heterogeneous = (
            "salloc",
            "--partition=b",
            "--nodes=2",
            "--ntasks-per-node=2",
            ":",
            "--partition=a",
            "--nodes=1",
            "--ntasks-per-node=2",
        )
        text = bench.run(*heterogeneous, *doctor, str(bench.file))
        assert "3 nodes (" in text and "0 problems, 0 notes" in text and "can't honor" not in text
        bench.lab.set_silent("b1", "roce0", True)
        text = bench.run(
            "holmes", "doctor", "--slurm=--nodes=4", "--cluster", str(bench.file), status=1
        )
        assert "b0 (rank 2, roce0" in text and "does not reach node b1" in text
        short = folder / "short.toml"
        short.write_text(bench.file.read_text().replace('"b0", "b1"', '"b0"'))
        text = bench.run("salloc", "--nodes=4", *doctor, str(short), status=2)
        assert (
            "short.toml: no cluster has node b1 of the allocation" in text
            and "Traceback" not in text
        )


@case
def holmes_probe_in_srun(folder):
    with Bench(folder, ("slurm",), processes=2) as bench:
        probe = ("holmes", "probe", "--largest", "0.0625", "--cluster", str(bench.file))
        bench.run("srun", "--nodes=4", "--ntasks-per-node=1", *probe)
        assert set(load_spec(bench.file).links) == {"a", "b", "ethernet"}
