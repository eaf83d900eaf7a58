"""Joined jobs over a WAN in the lab: the same jobs apart, joined, and one synchronous job over that link.

    python benchmarks/joined.py --json FILE [--repetitions 3] [--cases NAME,...]
        [--runs FILE] [--minutes M]

examples/plain_torch on 2 + 2 emulated nodes, 40 ms round trip between the clusters (layers sleep as long as
an accelerator of 2 GFLOP/s would compute). "apart": two jobs that know nothing of each other; "joined":
--holmes-join; "synchronous": one job of four, --holmes (hierarchical). Alternating; tokens per second of all
nodes together, of the steps after the first `every`. Between hosts joined jobs encrypt (TLS 1.3), here too.

What joining is worth depends on one ratio: seconds that a step's gradients need on the link, over seconds
that the step computes. Three cases:

    20 Mb/s                the ratio is 1.9: 0.84 M float32 gradients,
                           1.3 s, beside steps of 0.7 s; every 16 steps
    20 Mb/s half batch     3.9, as over a real WAN: half the tokens in a step; --holmes-outer's own `every`,
                           fragments and delay
    5.6 Mb/s               6.8, so too, with all tokens

and two without "synchronous", of jobs of one node each, each in a cluster of its own behind 20 Mb/s, with an
accelerator of half the speed, for the two cores of this machine:

    2 jobs, 8 jobs         is what joining costs the same for eight?

Jobs over a WAN: 7 B parameters, bfloat16 gradients (14 GB each way), 4 M tokens a step over two clusters of 8
nodes with 8 GPUs each. A step computes 6 x 7e9 x 2e6 FLOP in a cluster: 3.3 s on 64 H100 that reach 400
TFLOP/s, 8.4 s on 64 A100 that reach 156.

    link      gradients, s    ratio, H100    ratio, A100
    5 Gb/s              22            6.8            2.7
    2 Gb/s              56             17            6.7
    1 Gb/s             112             34             13
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import Row, Runs, chosen, finish, kept, parser, write
from holmes_lab import Lab
from holmes_lab.joined import CLUSTERS, FLOPS, NODES, TOKENS, coordinator, join_flags, start

from holmes_ext.cluster.spec import load_spec


@dataclass(frozen=True)
class Case:
    """rate: of the link. outer: of --holmes-outer. skip: first steps that do not count, of jobs; steps: that
    do; synchronous: both, of one synchronous job. batch: the script's flags; tokens: that a rank reads in a
    step then. jobs: of one node in a cluster of its own; 0: two of two nodes. flops: of an accelerator."""

    rate: str
    outer: str
    skip: int
    steps: int
    synchronous: tuple[int, int] | None = None
    batch: tuple[str, ...] = ()
    tokens: int = TOKENS
    jobs: int = 0
    flops: float = FLOPS

    @property
    def nodes(self) -> dict[str, list[str]]:
        """Of each job."""
        return {f"job{k}": [f"n{k}"] for k in range(self.jobs)} or NODES

    @property
    def clusters(self) -> str:
        """cluster.toml."""
        if not self.jobs:
            return CLUSTERS.replace("20Mb/s", self.rate)
        clusters = "".join(
            f"""[[cluster]]
name = "{name}"
kind = "ethernet"
nodes = ["{nodes[0]}"]
uplink = "{self.rate}"
"""
            for name, nodes in self.nodes.items()
        )
        return 'version = 2\n[ethernet]\nrate = "1Gb/s"\nlatency = "20ms"\n' + clusters

    @property
    def name(self) -> str:
        return (
            f"{self.jobs} x 1, 40 ms, {self.rate} each"
            if self.jobs
            else f"2 + 2, 40 ms, {self.rate}" + (" half batch" if self.batch else "")
        )


HALF = ("--micro-batches", "1")
CASES = {
    "20 Mb/s": Case("20 Mb/s", "min=2,every=16,fragments=4,delay=1,timeout=60", 16, 44, (16, 14)),
    "20 Mb/s half batch": Case("20 Mb/s", "min=2,timeout=60", 32, 96, (3, 18), HALF, TOKENS // 2),
    "5.6 Mb/s": Case("5.6 Mb/s", "min=2,timeout=60", 32, 32, (2, 7)),
    "2 jobs": Case("20 Mb/s", "min=2,timeout=60", 32, 32, jobs=2, flops=FLOPS / 2),
    "8 jobs": Case("20 Mb/s", "min=8,timeout=60", 32, 32, jobs=8, flops=FLOPS / 2),
}
RATIO = "joined / apart"


def run(
    lab: Lab,
    jobs: dict[str, tuple[list[str], list[str]]],
    case: Case,
    directory: Path,
    skip: int,
    steps: int,
) -> float:
    """Tokens per second of all jobs together; jobs: {name: (nodes, flags)}."""
    running = [
        (
            len(nodes),
            start(
                lab,
                name,
                nodes,
                [*case.batch, *flags],
                skip + steps,
                seed,
                directory / f"{name}.jsonl",
                case.flops,
            ),
        )
        for seed, (name, (nodes, flags)) in enumerate(jobs.items(), 1)
    ]
    total = 0.0
    for ranks, job in running:
        job.wait()
        total += (
            ranks * case.tokens / statistics.fmean(line["seconds"] for line in job.steps()[skip:])
        )
    return total


def measure(name: str, file: Path, repetitions: int, runs: Runs) -> list[Row]:
    case = CASES[name]
    modes = ("apart", "joined", "synchronous") if case.synchronous else ("apart", "joined")
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    alone = ["--holmes", "--holmes-preflight", "off"]
    together = [node for nodes in case.nodes.values() for node in nodes]
    with Lab(load_spec(file)) as lab, tempfile.TemporaryDirectory() as directory:
        for repetition in range(repetitions):
            for mode in rates:

                def once(mode: str = mode) -> float:
                    with coordinator(lab) as (address, _):
                        jobs = {
                            "apart": {job: (nodes, alone) for job, nodes in case.nodes.items()},
                            "joined": {
                                job: (nodes, join_flags(job, address, case.outer))
                                for job, nodes in case.nodes.items()
                            },
                            "synchronous": {
                                "all": (together, ["--holmes", "--holmes-cluster", str(file)])
                            },
                        }[mode]
                        skip, steps = (case.skip, case.steps)
                        if mode == "synchronous" and case.synchronous:
                            skip, steps = case.synchronous
                        return run(lab, jobs, case, Path(directory), skip, steps)

                rate = runs.of(f"{name}, {mode}, repetition {repetition + 1}", once)
                rates[mode] += [rate] if rate else []
    if not all(rates.values()):
        return []
    rows = [
        Row.median(case.name, f"tokens/s, {mode}", values, "token/s", True)
        for mode, values in rates.items()
    ]
    for other, target in (("apart", ">= 0.97"), ("synchronous", ">= 5")):
        if other in rates:
            ratios = [a / b for a, b in zip(rates["joined"], rates[other])]
            rows.append(Row.median(case.name, f"joined / {other}", ratios, "", True, target))
    return rows


def eight_as_two(rows: list[Row]) -> list[Row]:
    """By how much less eight jobs lose by joining than two; nothing where one of both was not measured."""
    ratios = {row.case: row.value for row in rows if row.metric == RATIO}
    two, eight = (ratios.get(CASES[name].name) for name in ("2 jobs", "8 jobs"))
    if not (two and eight):
        return []
    metric, value = f"{RATIO}, beside 2 jobs'", eight / two
    return [Row.of(CASES["8 jobs"].name, metric, value, "", (value, value), True, ">= 0.97")]


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    names, runs, rows = chosen(args.cases, CASES), Runs(args.runs, args.minutes), kept(args.json)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "cluster.toml"
            file.write_text(CASES[name].clusters)
            if new := measure(name, file, args.repetitions, runs):
                rows = [row for row in rows if row.case != CASES[name].name] + new
                write(rows, args.json)
    beside = eight_as_two(rows)
    rows = [row for row in rows if row.metric not in {ratio.metric for ratio in beside}] + beside
    return finish(rows, args.json, f"joined jobs in the lab, {args.repetitions} repetitions")


if __name__ == "__main__":
    sys.exit(main())
