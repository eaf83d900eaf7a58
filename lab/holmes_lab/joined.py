"""Jobs in one lab that join over the link between their clusters: examples/plain_torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.samples import examples
from holmes_lab.lab import Lab
from holmes_lab.process.job import Job

#: 2 + 2 nodes; 40 ms there and back and 20 Mb/s for all that crosses.
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
#: That a rank reads in a step.
TOKENS = 2 * 2 * 64
#: Of the accelerator that each rank seems to have.
FLOPS = 2e9
TOKEN, _PORT = "the token of joined jobs in a lab", 29600


@contextmanager
def coordinator(lab: Lab) -> Iterator[tuple[str, list[str]]]:
    """`holmes join serve` on the first node: its HOST:PORT, and the lines that it prints."""
    lines: list[str] = []
    command = [sys.executable, "-m", "holmes_ext.cli.main", "join", "serve", "--port", str(_PORT)]
    node = lab.nodes[0]
    serve = lab.start(
        command,
        order=[node.name],
        processes=1,
        env={"HOLMES_JOIN_TOKEN": TOKEN},
        on_line=lambda rank, line, stream: lines.append(line),
    )
    try:
        await_(lambda: any("jobs meet" in line for line in lines), 60, "the coordinator")
        yield f"{node.address}:{_PORT}", lines
    finally:
        serve.kill()
        serve.wait()


@dataclass
class LabJob:
    """A job under way. log: a line of JSON for each step."""

    name: str
    job: Job
    log: Path

    def steps(self) -> list[dict[str, Any]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self) -> None:
        """HolmesError when it fails."""
        result = self.job.wait()
        if result.returncode:
            lines = "".join(result.outputs.values()).strip().splitlines()
            said = [line for line in lines if "Error" in line or line.startswith("holmes: ")][
                -2:
            ] or lines[-1:]
            raise HolmesError(
                f"lab: job {self.name} ended with status {result.returncode}: {' '.join(said)}"
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
) -> LabJob:
    """examples/plain_torch on these nodes."""
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
    env = {"HOLMES_JOIN_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    job = lab.start(
        [*command, *flags],
        order=nodes,
        preload=("torch",),
        timeout=600,
        accelerator={"flops": flops, "classes": ["Block"]},
        env=env,
    )
    return LabJob(name, job, log)


def join_flags(name: str, where: str, outer: str) -> list[str]:
    return [
        "--holmes",
        "--holmes-preflight",
        "off",
        "--holmes-join",
        f"{name}@{where}",
        "--holmes-outer",
        outer,
    ]


def await_(done: Callable[[], bool], seconds: float, what: str) -> None:
    """HolmesError when done() is not true in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise HolmesError(f"lab: {what} did not come about within {seconds:g} s")
        time.sleep(0.1)
