"""Joined jobs in a lab: separate training jobs that exchange weights over the link between their clusters.

The jobs run examples/plain_torch. They join through `holmes join serve` (the coordinator).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.samples import examples
from holmes_lab.lab import Lab
from holmes_lab.process.job import Job

#: Two clusters of 2 nodes. The link between them has 20 Mb/s and a round trip of 40 ms.
CLUSTERS = """version = 2
[ethernet]
rate = "1Gb/s"
[[cluster]]
name = "east"
kind = "ib"
rate = "1Gb/s"
nodes = ["a[0-1]"]
processes = 1
[[cluster]]
name = "west"
kind = "roce"
rate = "1Gb/s"
nodes = ["b[0-1]"]
processes = 1
[[between]]
clusters = ["east", "west"]
rate = "20Mb/s"
latency = "20ms"
"""
NODES = {"east": ["a0", "a1"], "west": ["b0", "b1"]}
SIZE = "--layers 4 --hidden 128 --heads 4 --sequence 64 --micro-batch 2 --micro-batches 2".split()
#: Tokens that a rank reads in a step: micro-batch x micro-batches x sequence.
TOKENS = 2 * 2 * 64
FLOPS = 2e9  # FLOP/s of the emulated accelerator of each rank
_PORT = 29600
_COMMAND = (sys.executable, "-m", "holmes_ext.cli.main", "join")


@dataclass(frozen=True)
class LabCoordinator:
    """Coordinator of joined jobs: a process `holmes join serve` on the first node of a lab.

    A lab is a set of emulated nodes on this machine. coordinator() starts the process.
    """

    address: str  # HOST:PORT
    lines: list[str]  # printed so far; grows while the coordinator runs
    state: str  # folder for the state of coordinator and jobs

    @property
    def environment(self) -> dict[str, str]:
        """Return variables that a job needs in addition to its own environment.

        They name the folder of the job's certificate. If the job is killed and starts again, it finds the
        certificate there.
        """
        return {"XDG_STATE_HOME": self.state}

    def invitation(self, name: str) -> Path:
        """Return the file with the invitation of a training job; each job has one."""
        file = Path(self.state) / f"{name}.json"
        if not file.exists():  # a job that was killed starts again with the same invitation
            host = self.address.partition(":")[0]
            invite = [*_COMMAND, "invite", name, "--address", host, "--output", str(file)]
            environment = {**os.environ, **self.environment}
            subprocess.run(invite, check=True, capture_output=True, env=environment)
        return file

    def flags(self, name: str, own: str = "") -> list[str]:
        """Invite a training job to the run, and return the flags with which it joins.

        Args:
            name: Name of the job.
            own: Value of --holmes-outer: the job's own settings.
        """
        # No test of the networks before the job: it takes time, and the lab's networks are intact.
        flags = ["--holmes", "--holmes-preflight", "off"]
        flags += ["--holmes-join", f"{name}@{self.address}"]
        flags += ["--holmes-join-invitation", str(self.invitation(name))]
        if own:
            flags += ["--holmes-outer", own]
        return flags


@contextmanager
def coordinator(lab: Lab, outer: str) -> Iterator[LabCoordinator]:
    """Run the coordinator on the first node. Training jobs exchange weights through it.

    It is the command `holmes join serve`. It is killed at the end of the `with` block.

    Args:
        lab: The emulated clusters.
        outer: Value of --outer, the settings of the rounds, such as "every=16" (steps between two
            rounds).
    """
    node = lab.nodes[0]
    with tempfile.TemporaryDirectory(prefix="holmes-join-") as state:
        running = LabCoordinator(f"{node.address}:{_PORT}", [], state)
        with _serve(lab, running, outer):
            yield running


@contextmanager
def _serve(lab: Lab, running: LabCoordinator, outer: str) -> Iterator[None]:
    """Run `holmes join serve` until the end of the `with` block.

    Args:
        lab: The emulated clusters.
        running: The coordinator: its environment. Its list of printed lines grows.
        outer: Value of --outer, the settings of the rounds.
    """
    lines = running.lines
    serve = lab.start(
        [*_COMMAND, "serve", "--port", str(_PORT), "--outer", outer],
        order=[lab.nodes[0].name],
        processes=1,
        env=running.environment,
        on_line=lambda rank, line, stream: lines.append(line),
    )
    try:
        # The coordinator prints "jobs meet at port ..." when it accepts connections. Its start
        # takes seconds; 60 s are enough on a busy machine.
        await_(lambda: any("jobs meet" in line for line in lines), 60, "the coordinator")
        yield
    finally:
        serve.kill()
        serve.wait()


@dataclass
class LabJob:
    """Running training job on emulated nodes, with access to its logged steps and its end.

    start() makes it. The job runs the script examples/plain_torch/train.py, and the script logs every step.
    """

    name: str
    job: Job
    log: Path  # has a line of JSON for each step, with "loss" and "seconds"

    def steps(self) -> list[dict[str, Any]]:
        """Return the logged lines, one for each finished step, without a half-written last line."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self) -> None:
        """Wait for the end of the job.

        Raises:
            HolmesError: The job failed. The message has the last two lines with an error.
        """
        result = self.job.wait()
        if result.returncode:
            lines = "".join(result.outputs.values()).strip().splitlines()
            errors = [line for line in lines if "Error" in line or line.startswith("holmes: ")]
            shown = errors[-2:] or lines[-1:]
            raise HolmesError(
                f"lab: job {self.name} ended with status {result.returncode}: {' '.join(shown)}"
            )


def start(
    lab: Lab,
    name: str,
    nodes: Sequence[str],
    flags: Sequence[str],
    steps: int,
    seed: int,
    log: Path,
    flops: float = FLOPS,
    environment: Mapping[str, str] = {},
) -> LabJob:
    """Start the training script examples/plain_torch/train.py on some emulated nodes.

    Args:
        lab: The emulated clusters.
        name: Name of the job.
        nodes: Names of the nodes in the order of their ranks.
        flags: Further arguments of the script, such as those of LabCoordinator.flags().
        steps: Number of training steps.
        seed: Seed of the weights and of the text.
        log: File for a line of JSON for each step.
        flops: FLOP/s of the emulated accelerator of each rank.
        environment: Further variables, such as LabCoordinator.environment.
    """
    script = str(examples() / "plain_torch" / "train.py")
    command = [
        sys.executable,
        script,
        *SIZE,
        "--steps",
        str(steps),
        "--seed",
        str(seed),
        "--log-file",
        str(log),
    ]
    env = {"OMP_NUM_THREADS": "1", **environment}
    job = lab.start(
        [*command, *flags],
        order=nodes,
        preload=("torch",),
        timeout=600,
        accelerator={"flops": flops, "classes": ["Block"]},
        env=env,
    )
    return LabJob(name, job, log)


def await_(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until done() is true; it is called every 0.1 s.

    Args:
        done: The condition.
        seconds: Limit.
        what: Name of the condition, for the message.

    Raises:
        HolmesError: The condition is still false after `seconds`.
    """
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise HolmesError(f"lab: {what} did not come about within {seconds:g} s")
        time.sleep(0.1)
