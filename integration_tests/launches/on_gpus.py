"""Trains with random clusters, sizes, flags and devices on emulated GPUs.

    PYTHONPATH=tests:. HOLMES_TEST_CARRIER=nccl .venv-gpu/bin/python integration_tests/launches/on_gpus.py
        --count 100 --within 150 --results launches.jsonl

No job may hang, and the losses must be those without holmes ("stock"). Each case trains DeepSpeed's
pipeline example with a random choice of:

    clusters    one to three clusters of one to three nodes, with one or two GPUs a node
    model       ZeRO 0 or 1, tied layers, overlap, micro-batches in flight
    device      one hardware queue, few multiprocessors, kernels that start late at random, or a host that
                waits for each launch

A line for each case is printed, and then the counts. The exit status is 1 if a case hung or has other
losses. A case is identified by its seed: --seed N --count 1 repeats it. --results writes a JSON line for
each case; seeds that already have a line are skipped.

Starting nodes and importing DeepSpeed would take most of the time. So cases share a lab if their clusters
have NICs of the same kinds, and stock trains once for each size and flags, since its losses depend on no
network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import clusters
from carriers import gpus
from holmes_lab import Lab
from holmes_lab.gpu.job import GpuClock, Gpus

from holmes_ext.cluster.spec import load_spec
from integration_tests.jobs import ONE_AT_A_TIME, PRELOAD, TRAIN, LabOf, losses

MOST_RANKS = 6  # of a job
MOST_NODES = 3  # of a cluster
STEPS = 5
SIZES = (
    f"--layers 4 --hidden 32 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4 --steps {STEPS}"
).split()
#: A communicator of one channel starts fewer threads, most of which only spin.
ONE_CHANNEL = dict.fromkeys(
    (
        "NCCL_MAX_NCHANNELS",
        "NCCL_MAX_P2P_NCHANNELS",
        "NCCL_SOCKET_NTHREADS",
        "NCCL_NSOCKS_PERTHREAD",
    ),
    "1",
)
#: Modules that are imported before a process is forked for each rank, holmes's own included.
PRELOADED = (
    *PRELOAD,
    "holmes_ext.job",
    *(f"holmes_ext.runtime.reduce.{name}" for name in ("reducer", "hierarchical_nccl", "tied")),
)
DEVICES = ("plain", *ONE_AT_A_TIME, "few multiprocessors", "late kernels")
NAMES = "abc"


@dataclass(frozen=True)
class Drawn:
    """A random case."""

    seed: int
    nodes: tuple[int, ...]  # number of nodes of each cluster
    processes: int  # of each node
    kinds: tuple[str, ...]  # kind of the NICs of each cluster
    gbps: tuple[int, ...]  # rate of each cluster's NICs, Gb/s
    flags: tuple[str, ...]  # of the example
    holmes: tuple[str, ...]  # flags of holmes besides --holmes
    device: str  # see DEVICES

    @property
    def world(self) -> int:
        return sum(self.nodes) * self.processes

    @property
    def job(self) -> str:
        """Return the number of ranks and the flags, on which the losses without holmes depend."""
        return f"{self.world} {' '.join(self.flags)}"

    @property
    def lab(self) -> tuple[str, ...]:
        """Return the kinds of NICs of three clusters into which the case fits."""
        return (*self.kinds, "ib", "ib")[: len(NAMES)]

    @property
    def site(self) -> str:
        """Return the text of cluster.toml."""
        return site(self.kinds, self.gbps, self.nodes, self.processes)

    @property
    def gpus(self) -> Gpus:
        if self.device == "few multiprocessors":
            return replace(two_gpus(), clock=GpuClock(sms=16))
        return replace(two_gpus(), seed=self.seed) if self.device == "late kernels" else two_gpus()

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.device}; {' '.join((*self.flags, *self.holmes))}"


def two_gpus() -> Gpus:
    """Return two GPUs for each node, so that all cases of a lab fork their ranks from one Python."""
    return replace(gpus(), count=2)


def site(kinds: Sequence[str], gbps: Sequence[int], nodes: Sequence[int], processes: int) -> str:
    lines = [
        f"{name} {kind} {rate}Gb/s {','.join(f'{name}{number}' for number in range(count))}"
        for name, kind, rate, count in zip(NAMES, kinds, gbps, nodes)
    ]
    return clusters.toml(*lines, processes=processes)


def draw(seed: int) -> Drawn:
    """Draw a random case."""
    rng = random.Random(seed)
    world = 0
    while not 2 <= world <= MOST_RANKS:
        cluster_count = rng.choice((1, 2, 2, 2, 3))
        nodes = [rng.randint(1, MOST_NODES) for _ in range(cluster_count)]
        processes = rng.choice((1, 1, 2))
        world = sum(nodes) * processes
    nics = [(rng.choice(("ib", "roce")), rng.choice((1, 2, 4))) for _ in nodes]
    kinds, gbps = zip(*nics)
    stages = rng.choice([count for count in range(1, 5) if world % count == 0])
    flags = [
        "--stages",
        str(stages),
        *rng.choice(([], ["--zero", "1"])),
        *(["--tied"] if rng.random() < 0.3 else []),
    ]
    holmes = []
    if stages > 1:
        holmes = ["--holmes-inflight", rng.choice(("auto", "auto", "1", "3", "off"))]
    device = rng.choice(DEVICES)
    # The bucket is so small that this small model has several.
    holmes += [
        "--holmes-overlap",
        rng.choice(("on", "on", "auto", "off")),
        "--holmes-bucket",
        "0.002",
    ]
    return Drawn(seed, tuple(nodes), processes, kinds, gbps, tuple(flags), tuple(holmes), device)


class Launches:
    """Training of cases in one lab."""

    def __init__(self, lab: Lab, folder: Path, stock: dict[str, list[float]]):
        self.lab = lab
        self.folder = folder
        self.stock = stock  # Drawn.job -> losses without holmes

    def train(self, drawn: Drawn, *flags: str, device: str) -> list[float]:
        """Train a case, and return its losses.

        Args:
            flags: ("--holmes",), or nothing for a job without holmes.
            device: Kind of device; see DEVICES.

        Raises:
            AssertionError: The job failed, or hangs; the message has the circle of waits.
        """
        file = self.folder / "cluster.toml"
        log = self.folder / "log"
        file.write_text(drawn.site)
        nodes = LabOf(file, self.lab, load_spec(file))
        holmes_flags = (*nodes.holmes, *drawn.holmes) if flags else ()
        result = nodes.run(
            TRAIN,
            *SIZES,
            "--log",
            str(log),
            *drawn.flags,
            *holmes_flags,
            preload=PRELOADED,
            env={**ONE_CHANNEL, **ONE_AT_A_TIME.get(device, {})},
            processes=drawn.processes,
            gpus=drawn.gpus if flags else two_gpus(),
        )
        assert result.returncode == 0, "\n".join(result.outputs.values())[-2000:]
        losses_of_steps = losses(log)
        assert len(losses_of_steps) == STEPS
        return losses_of_steps

    def difference(self, drawn: Drawn) -> float:
        """Return the largest difference between a step's loss with holmes and without."""
        if drawn.job not in self.stock:
            self.stock[drawn.job] = self.train(drawn, device="plain")
        for node in self.lab.nodes:
            for nic, rate in zip(node.nics[1:], drawn.gbps[NAMES.index(node.cluster) :][:1]):
                self.lab.set_rate(node.name, nic.name, rate * 10**9)
        ours = self.train(drawn, "--holmes", device=drawn.device)
        return max(abs(a - b) for a, b in zip(self.stock[drawn.job], ours))


@contextlib.contextmanager
def lab_of(kinds: Sequence[str], stock: dict[str, list[float]]) -> Iterator[Launches]:
    """Start a lab with three clusters of these kinds of NICs."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "lab.toml")
        file.write_text(site(kinds, (4,) * 3, (MOST_NODES,) * 3, 2))
        with Lab(load_spec(file)) as lab:
            yield Launches(lab, Path(directory), stock)


def tried(launches: Launches, drawn: Drawn) -> dict[str, Any]:
    """Run a case, and return the object for its line in the results."""
    case: dict[str, Any] = {
        "seed": drawn.seed,
        "case": str(drawn),
        "job": drawn.job,
        "difference": None,
        "error": "",
    }
    try:
        case["difference"] = launches.difference(drawn)
    except AssertionError as error:
        case["error"] = f"{drawn.site}\n{error}"
    return {**case, "stock": launches.stock.get(drawn.job)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="begin no case after so many seconds"
    )
    parser.add_argument("--results", type=Path, help="JSON lines, added to")
    arguments = parser.parse_args()
    file = arguments.results
    end = time.monotonic() + arguments.within
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    cases = {case["seed"]: case for case in map(json.loads, lines)}
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    left = sorted((draw(seed) for seed in seeds if seed not in cases), key=lambda drawn: drawn.lab)
    stock = {case["job"]: case["stock"] for case in cases.values() if case["stock"]}
    for kinds, of_lab in groupby(left, lambda drawn: drawn.lab):
        with (
            lab_of(kinds, stock) if time.monotonic() < end else contextlib.nullcontext() as launches
        ):
            for drawn in of_lab:
                if launches is None or (began := time.monotonic()) >= end:
                    break
                case = cases[drawn.seed] = tried(launches, drawn)
                print(
                    f"{drawn}: {case['error'] or case['difference']} ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )
                if file is not None:
                    with file.open("a") as more:
                        more.write(json.dumps(case) + "\n")
    wrong = sum(case["difference"] is None or case["difference"] > 1e-5 for case in cases.values())
    print(f"{len(cases)} cases, {wrong} of them hung or learned something else")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
