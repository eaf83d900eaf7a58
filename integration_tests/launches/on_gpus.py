"""Random sites, sizes, flags and devices on emulated GPUs: no job hangs, and its losses are stock's.

    PYTHONPATH=tests:. HOLMES_TEST_CARRIER=nccl .venv-gpu/bin/python integration_tests/launches/on_gpus.py
        --count 20 --results launches.jsonl

DeepSpeed's pipeline example under each: one to three clusters of one to three nodes, unequal ones too, one or
two GPUs a node; ZeRO 0 or 1, tied layers, micro-batches in flight; a device with one hardware queue, with few
multiprocessors, with kernels that start late at random, or whose launches are waited for. A line for each
case, then how many there were; exit status 1 where one hung or learned something else. A case is its seed:
--seed N --count 1 repeats it. --results keeps a JSON line of each; seeds that have one there are not run
again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import clusters
from carriers import gpus

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab
from holmes_ext.lab.gpu.job import GpuClock, Gpus
from integration_tests.jobs import ONE_AT_A_TIME, TRAIN, LabOf, launch, losses

MOST_RANKS, STEPS = 6, 5
DEVICES = ("plain", *ONE_AT_A_TIME, "few multiprocessors", "late kernels")


@dataclass(frozen=True)
class Drawn:
    """site: cluster.toml; flags: of the example; holmes: besides --holmes; device: of DEVICES."""

    seed: int
    site: str
    flags: tuple[str, ...]
    holmes: tuple[str, ...]
    device: str

    @property
    def gpus(self) -> Gpus:
        if self.device == "few multiprocessors":
            return replace(gpus(), clock=GpuClock(sms=16))
        return replace(gpus(), seed=self.seed) if self.device == "late kernels" else gpus()

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.device}; {' '.join((*self.flags, *self.holmes))}"


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    while True:
        nodes, processes = [rng.randint(1, 3)
                            for _ in range(rng.choice((1, 2, 2, 2, 3)))], rng.choice((1, 1, 2))
        if 2 <= (world := sum(nodes) * processes) <= MOST_RANKS:
            break
    lines = [f"{name} {rng.choice(('ib', 'roce'))} {rng.choice((1, 2, 4))}Gb/s "
             + ",".join(f"{name}{number}" for number in range(count)) for name, count in zip("abc", nodes)]
    stages = rng.choice([count for count in range(1, 5) if world % count == 0])
    flags = ["--stages", str(stages), *rng.choice(([], ["--zero", "1"])),
             *(["--tied"] if rng.random() < 0.3 else [])]
    holmes = ["--holmes-inflight", rng.choice(("auto", "auto", "1", "3", "off"))] if stages > 1 else []
    return Drawn(seed, clusters.toml(*lines, processes=processes), tuple(flags), tuple(holmes),
                 rng.choice(DEVICES))


def difference(drawn: Drawn) -> float:
    """Greatest difference of a step's loss to stock's; AssertionError with the circle of waits where a job
    hangs."""
    with tempfile.TemporaryDirectory() as directory:
        file, found = Path(directory, "cluster.toml"), []
        file.write_text(drawn.site)
        with Lab(load_spec(file)) as lab:
            on = LabOf(file, lab)
            sizes = (f"--layers 4 --hidden 32 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4 "
                     f"--steps {STEPS}")
            for name, flags in (("stock", ()), ("holmes", (*on.holmes, *drawn.holmes))):
                log = Path(directory, name)
                command = (TRAIN, *sizes.split(), "--log", str(log), *drawn.flags, *flags)
                result = launch(on, *command, env=ONE_AT_A_TIME.get(drawn.device), gpus=drawn.gpus,
                                processes=lab.spec.clusters[0].processes)
                assert result.returncode == 0, f"{name}: " + "\n".join(result.outputs.values())[-2000:]
                found.append(losses(log))
    stock, ours = found
    assert len(ours) == len(stock) == STEPS
    return max(abs(a - b) for a, b in zip(stock, ours))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--results", type=Path, help="JSON lines, added to")
    arguments = parser.parse_args()
    file = arguments.results
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    cases = {case["seed"]: case for case in map(json.loads, lines)}
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if seed in cases:
            continue
        drawn = draw(seed)
        case = cases[seed] = {"seed": seed, "case": str(drawn), "difference": None, "error": ""}
        try:
            case["difference"] = difference(drawn)
            print(f"{drawn}: losses differ by {case['difference']:.1e}", flush=True)
        except AssertionError as error:
            case["error"] = str(error)
            print(f"{drawn}\n{drawn.site}\n{error}", flush=True)
        if file is not None:
            with file.open("a") as more:
                more.write(json.dumps(case) + "\n")
    wrong = sum(case["difference"] is None or case["difference"] > 1e-5 for case in cases.values())
    print(f"{len(cases)} cases, {wrong} of them hung or learned something else")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
