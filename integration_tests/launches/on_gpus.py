"""Random sites, sizes, flags and devices on emulated GPUs: no job hangs, and its losses are stock's.

    PYTHONPATH=tests:. HOLMES_TEST_CARRIER=nccl .venv-gpu/bin/python integration_tests/launches/on_gpus.py
        --count 100 --within 150 --results launches.jsonl

DeepSpeed's pipeline example under each: one to three clusters of one to three nodes, unequal ones too, one or
two GPUs a node; ZeRO 0 or 1, tied layers, overlap, micro-batches in flight; a device with one hardware
queue, with few multiprocessors, with kernels that start late at random, or whose launches are waited for. A
line for each case, then how many there were; exit status 1 where one hung or learned something else. A case
is its seed: --seed N --count 1 repeats it. --results keeps a JSON line of each; seeds that have one there are
not run again.

Bringing up nodes and importing DeepSpeed took most of a case's time, so cases share a lab, one for each
choice of three kinds of cluster, and stock trains once for each size and flags: its losses depend on no
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

MOST_RANKS, MOST_NODES, STEPS = 6, 3, 5
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
#: holmes's modules, too: each rank would import them.
PRELOADED = (
    *PRELOAD,
    "holmes_ext.job",
    *(f"holmes_ext.runtime.reduce.{name}" for name in ("reducer", "hierarchical_nccl", "tied")),
)
DEVICES = ("plain", *ONE_AT_A_TIME, "few multiprocessors", "late kernels")
NAMES = "abc"


@dataclass(frozen=True)
class Drawn:
    """nodes, kinds, gbps: of each cluster; flags: of the example; holmes: besides --holmes; device: of
    DEVICES.
    """

    seed: int
    nodes: tuple[int, ...]
    processes: int
    kinds: tuple[str, ...]
    gbps: tuple[int, ...]
    flags: tuple[str, ...]
    holmes: tuple[str, ...]
    device: str

    @property
    def world(self) -> int:
        return sum(self.nodes) * self.processes

    @property
    def job(self) -> str:
        """What stock's losses depend on."""
        return f"{self.world} {' '.join(self.flags)}"

    @property
    def lab(self) -> tuple[str, ...]:
        """Kinds of three clusters in which the case fits."""
        return (*self.kinds, "ib", "ib")[: len(NAMES)]

    @property
    def site(self) -> str:
        """cluster.toml."""
        return site(self.kinds, self.gbps, self.nodes, self.processes)

    @property
    def gpus(self) -> Gpus:
        if self.device == "few multiprocessors":
            return replace(two_gpus(), clock=GpuClock(sms=16))
        return replace(two_gpus(), seed=self.seed) if self.device == "late kernels" else two_gpus()

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.device}; {' '.join((*self.flags, *self.holmes))}"


def two_gpus() -> Gpus:
    """As many in each node, so that all cases of a lab fork one Python."""
    return replace(gpus(), count=2)


def site(kinds: Sequence[str], gbps: Sequence[int], nodes: Sequence[int], processes: int) -> str:
    lines = [
        f"{name} {kind} {rate}Gb/s {','.join(f'{name}{number}' for number in range(count))}"
        for name, kind, rate, count in zip(NAMES, kinds, gbps, nodes)
    ]
    return clusters.toml(*lines, processes=processes)


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    while True:
        nodes, processes = (
            [rng.randint(1, MOST_NODES) for _ in range(rng.choice((1, 2, 2, 2, 3)))],
            rng.choice((1, 1, 2)),
        )
        if 2 <= (world := sum(nodes) * processes) <= MOST_RANKS:
            break
    of_clusters = [(rng.choice(("ib", "roce")), rng.choice((1, 2, 4))) for _ in nodes]
    stages = rng.choice([count for count in range(1, 5) if world % count == 0])
    flags = [
        "--stages",
        str(stages),
        *rng.choice(([], ["--zero", "1"])),
        *(["--tied"] if rng.random() < 0.3 else []),
    ]
    holmes = (
        ["--holmes-inflight", rng.choice(("auto", "auto", "1", "3", "off"))] if stages > 1 else []
    )
    kinds, gbps = zip(*of_clusters)
    device = rng.choice(DEVICES)
    # several buckets in this small model
    holmes += [
        "--holmes-overlap",
        rng.choice(("on", "on", "auto", "off")),
        "--holmes-bucket",
        "0.002",
    ]
    return Drawn(seed, tuple(nodes), processes, kinds, gbps, tuple(flags), tuple(holmes), device)


class Launches:
    """Cases in one lab. stock: losses by Drawn.job."""

    def __init__(self, lab: Lab, folder: Path, stock: dict[str, list[float]]):
        self.lab, self.folder, self.stock = lab, folder, stock

    def train(self, drawn: Drawn, *flags: str, device: str) -> list[float]:
        """AssertionError with the circle of waits where it hangs."""
        file, log = self.folder / "cluster.toml", self.folder / "log"
        file.write_text(drawn.site)
        on = LabOf(file, self.lab, load_spec(file))
        on_holmes = (*on.holmes, *drawn.holmes) if flags else ()
        result = on.run(
            TRAIN,
            *SIZES,
            "--log",
            str(log),
            *drawn.flags,
            *on_holmes,
            preload=PRELOADED,
            env={**ONE_CHANNEL, **ONE_AT_A_TIME.get(device, {})},
            processes=drawn.processes,
            gpus=drawn.gpus if flags else two_gpus(),
        )
        assert result.returncode == 0, "\n".join(result.outputs.values())[-2000:]
        found = losses(log)
        assert len(found) == STEPS
        return found

    def difference(self, drawn: Drawn) -> float:
        """Greatest difference of a step's loss to stock's."""
        if drawn.job not in self.stock:
            self.stock[drawn.job] = self.train(drawn, device="plain")
        for node in self.lab.nodes:
            for nic, rate in zip(node.nics[1:], drawn.gbps[NAMES.index(node.cluster) :][:1]):
                self.lab.set_rate(node.name, nic.name, rate * 10**9)
        ours = self.train(drawn, "--holmes", device=drawn.device)
        return max(abs(a - b) for a, b in zip(self.stock[drawn.job], ours))


@contextlib.contextmanager
def lab_of(kinds: Sequence[str], stock: dict[str, list[float]]) -> Iterator[Launches]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "lab.toml")
        file.write_text(site(kinds, (4,) * 3, (MOST_NODES,) * 3, 2))
        with Lab(load_spec(file)) as lab:
            yield Launches(lab, Path(directory), stock)


def tried(launches: Launches, drawn: Drawn) -> dict[str, Any]:
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
    file, end = arguments.results, time.monotonic() + arguments.within
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
