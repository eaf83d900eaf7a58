"""Measures joined jobs over a WAN in the lab: separate jobs, joined jobs, and a single synchronous job.

    python benchmarks/joined.py --json FILE [--repetitions 3] [--cases NAME,...]
        [--runs FILE] [--minutes M]

examples/plain_torch trains on 2 + 2 emulated nodes with a round trip of 40 ms between the clusters.
Layers sleep as long as an accelerator of 2 GFLOP/s would compute. Three variants run in turn:

    apart          two jobs that do not communicate
    joined         the same jobs with --holmes-join. They encrypt their messages (TLS 1.3), as between hosts
    synchronous    a single job on the four nodes with --holmes (hierarchical all-reduce)

The result is the number of tokens per second of all nodes together.

The gain of joining depends on a ratio: the seconds that a step's gradients need on the link, divided by the
seconds that the step computes. Three cases with these variants:

    20 Mb/s               The ratio is 1.9: 0.84 M float32 gradients take 1.3 s, and a step computes 0.7 s.
                          The jobs exchange weights every 16 steps.
    20 Mb/s half batch    3.9, as over a real WAN, with half of the tokens in a step. The default values of
                          --holmes-outer are used.
    5.6 Mb/s              6.8, with the default values and all tokens.

Two cases without "synchronous" show whether joining costs eight jobs the same as two. Each job has one
node in a cluster of its own, behind a link of 20 Mb/s. The accelerator has half the speed, because this
machine has two cores:

    2 jobs, 8 jobs

For comparison, real jobs over a WAN: 7 B parameters, bfloat16 gradients (14 GB in each direction), and 4
M tokens in a step, on two clusters of 8 nodes with 8 GPUs each. A step computes 6 x 7e9 x 2e6 FLOP in a
cluster: 3.3 s on 64 H100 that reach 400 TFLOP/s, 8.4 s on 64 A100 that reach 156.

    link      gradients, s    ratio, H100    ratio, A100
    5 Gb/s              22            6.8            2.7
    2 Gb/s              56             17            6.7
    1 Gb/s             112             34             13
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness import Row, Runs, chosen_cases, finish, kept_rows, parser, write
from holmes_lab import Lab
from holmes_lab.joined import CLUSTERS, FLOPS, NODES, TOKENS, LabCoordinator, coordinator, start

from holmes_ext.cluster.spec import load_spec


class JobRequest(NamedTuple):
    """Nodes and flags of a job to start."""

    nodes: list[str]
    flags: list[str]


class MeasuredSteps(NamedTuple):
    """Numbers of steps of a job: the first steps (not measured), and the measured steps."""

    skip: int
    steps: int


@dataclass(frozen=True)
class Case:
    """Joined jobs on emulated clusters, and the link between these clusters."""

    rate: str  # of the link between clusters
    outer: str  # value of --holmes-outer: how often and how the jobs exchange weights
    skip: int  # first steps of a job that are not measured
    steps: int  # steps of a job that are measured
    #: Steps of the single synchronous job (they take longer); None: the case has no such job.
    synchronous: MeasuredSteps | None = None
    batch: tuple[str, ...] = ()  # flags of the script for the batch size
    tokens: int = TOKENS  # that a rank reads in a step
    jobs: int = 0  # jobs of one node, each in a cluster; 0: two jobs of two nodes
    flops: float = FLOPS  # of an emulated accelerator

    @property
    def nodes(self) -> dict[str, list[str]]:
        """The nodes of each job, by its name."""
        return {f"job{k}": [f"n{k}"] for k in range(self.jobs)} or NODES

    @property
    def clusters(self) -> str:
        """The text of the cluster.toml for this case.

        If `jobs` is 0, there are two clusters of 2 nodes, and the link between them has the rate
        `rate`. Otherwise each job has one node, in a cluster of its own behind an uplink with that
        rate. Each pair of clusters has a round trip of 40 ms.
        """
        if not self.jobs:
            return CLUSTERS.replace("20Mb/s", self.rate)
        clusters = "".join(
            f"""[[cluster]]
name = "{name}"
kind = "ethernet"
nodes = ["{nodes[0]}"]
uplink = "{self.rate}"
"""
            for name, nodes in self.nodes.items()  # each job has a single node
        )
        links = "".join(
            f"""[[between]]
clusters = ["{one}", "{other}"]
rate = "1Gb/s"
latency = "20ms"
"""
            for one, other in itertools.combinations(self.nodes, 2)
        )
        return 'version = 2\n[ethernet]\nrate = "1Gb/s"\n' + clusters + links

    @property
    def name(self) -> str:
        """The name of the case in the table of results."""
        if self.jobs:
            return f"{self.jobs} x 1, 40 ms, {self.rate} each"
        name = f"2 + 2, 40 ms, {self.rate}"
        return f"{name} half batch" if self.batch else name


HALF = ("--micro-batches", "1")
CASES = {
    "20 Mb/s": Case(
        "20 Mb/s",
        outer="min=2,every=16,fragments=4,delay=1,timeout=60",
        skip=16,
        steps=44,
        synchronous=MeasuredSteps(skip=16, steps=14),
    ),
    "20 Mb/s half batch": Case(
        "20 Mb/s",
        outer="min=2,timeout=60",
        skip=32,
        steps=96,
        synchronous=MeasuredSteps(skip=3, steps=18),
        batch=HALF,
        tokens=TOKENS // 2,
    ),
    "5.6 Mb/s": Case(
        "5.6 Mb/s",
        outer="min=2,timeout=60",
        skip=32,
        steps=32,
        synchronous=MeasuredSteps(skip=2, steps=7),
    ),
    "2 jobs": Case("20 Mb/s", outer="min=2,timeout=60", skip=32, steps=32, jobs=2, flops=FLOPS / 2),
    "8 jobs": Case("20 Mb/s", outer="min=8,timeout=60", skip=32, steps=32, jobs=8, flops=FLOPS / 2),
}
RATIO = "joined / apart"


def run(
    lab: Lab,
    jobs: dict[str, JobRequest],
    case: Case,
    directory: Path,
    skip: int,
    steps: int,
    environment: Mapping[str, str],
) -> float:
    """Run jobs at the same time, and return the tokens per second of all jobs together.

    Args:
        lab: The emulated nodes.
        jobs: Name of a job -> its nodes and flags.
        case: The case: its batch sizes, and the speed of the emulated accelerators.
        directory: For the logs of the jobs.
        skip: First steps that are not measured.
        steps: Steps that are measured.
        environment: Further variables of the jobs.
    """
    running = []  # pairs (number of ranks, job)
    for seed, (name, (nodes, flags)) in enumerate(jobs.items(), start=1):
        log = directory / f"{name}.jsonl"
        words = [*case.batch, *flags]
        job = start(
            lab,
            name,
            nodes,
            flags=words,
            steps=skip + steps,
            seed=seed,
            log=log,
            flops=case.flops,
            environment=environment,
        )
        running.append((len(nodes), job))
    total = 0.0
    for ranks, job in running:
        job.wait()
        step_s = statistics.fmean(line["seconds"] for line in job.steps()[skip:])
        total += ranks * case.tokens / step_s
    return total


def jobs_of(
    case: Case, mode: str, lab_coordinator: LabCoordinator, file: Path
) -> dict[str, JobRequest]:
    """Return the jobs of a mode: name of a job -> its nodes and flags.

    Args:
        case: The case.
        mode: "apart": jobs that do not communicate. "joined": the same jobs; they exchange weights through
            the coordinator. "synchronous": a single job on all nodes.
        lab_coordinator: The coordinator of the joined jobs, a server that runs in the lab.
        file: The cluster file of the case. Only the synchronous job needs it: each other job is
            inside a single cluster.
    """
    if mode == "apart":
        # No preflight (a test of the connections), as in the joined jobs (LabCoordinator.flags()).
        alone = ["--holmes", "--holmes-preflight", "off"]
        return {job: JobRequest(nodes, alone) for job, nodes in case.nodes.items()}
    if mode == "joined":
        return {
            job: JobRequest(nodes, lab_coordinator.flags(job)) for job, nodes in case.nodes.items()
        }
    all_nodes = [node for nodes in case.nodes.values() for node in nodes]
    return {"all": JobRequest(all_nodes, ["--holmes", "--holmes-cluster", str(file)])}


def measure(name: str, file: Path, repetitions: int, runs: Runs) -> list[Row]:
    """Measure a case in turn with separate jobs, joined jobs and a single synchronous job.

    Args:
        name: A key of CASES.
        file: The cluster file of the case.
        repetitions: Runs of each mode.
        runs: File of results. runs.of(key, run) returns the result of an earlier session if there
            is one, else it runs and stores the result. It returns None if no time is left to run.

    Returns:
        No rows if no time is left for a run.
    """
    case = CASES[name]
    modes = ("apart", "joined", "synchronous") if case.synchronous else ("apart", "joined")
    rates: dict[str, list[float]] = {mode: [] for mode in modes}  # tokens per second of each run
    with Lab(load_spec(file)) as lab, tempfile.TemporaryDirectory() as directory:
        for repetition in range(repetitions):
            for mode in rates:

                def run_jobs(mode: str = mode) -> float:
                    """Run the jobs in one mode, and return the tokens per second of all together.

                    Args:
                        mode: "apart" (jobs that do not communicate), "joined" (the same jobs, which exchange
                            weights), or "synchronous" (a single job on all nodes).
                    """
                    # The joined jobs exchange weights as often and in the way that case.outer says.
                    with coordinator(lab, case.outer) as lab_coordinator:
                        jobs = jobs_of(case, mode, lab_coordinator, file)
                        # Number of the first steps (not measured), and of the measured steps.
                        counts = MeasuredSteps(case.skip, case.steps)
                        if mode == "synchronous" and case.synchronous:
                            counts = case.synchronous  # fewer: its steps take far longer
                        return run(
                            lab,
                            jobs,
                            case,
                            Path(directory),
                            skip=counts.skip,
                            steps=counts.steps,
                            environment=lab_coordinator.environment,
                        )

                rate = runs.of(f"{name}, {mode}, repetition {repetition + 1}", run_jobs)
                rates[mode] += [rate] if rate else []  # None: no time is left for this run
    if not all(rates.values()):
        return []
    rows = [
        Row.median(case.name, f"tokens/s, {mode}", values, unit="token/s", emulated=True)
        for mode, values in rates.items()
    ]
    # Targets for the speed of the joined jobs: the exchange of weights costs at most 3 % of the
    # tokens/s, and a synchronous job over the same slow link has at most a fifth.
    for other, target in (("apart", ">= 0.97"), ("synchronous", ">= 5")):
        if other in rates:
            # The pairs are of the same repetition: after the first run without time there is no
            # further run, so each list has the first repetitions.
            ratios = [a / b for a, b in zip(rates["joined"], rates[other])]
            rows.append(
                Row.median(
                    case.name, f"joined / {other}", ratios, unit="", emulated=True, target=target
                )
            )
    return rows


def compare_eight_jobs_with_two(rows: list[Row]) -> list[Row]:
    """Return a row that compares the cost of joining for eight jobs with that for two.

    Joined jobs exchange weights during training. Each case has a row "joined / apart" (RATIO): the
    tokens/s of joined jobs, divided by those of the same jobs without communication. The value here
    is this ratio for eight jobs, divided by that for two jobs.

    Args:
        rows: All rows. The result is empty if the cases "2 jobs" and "8 jobs" are not among them.
    """
    ratios = {row.case: row.value for row in rows if row.metric == RATIO}
    two, eight = (ratios.get(CASES[name].name) for name in ("2 jobs", "8 jobs"))
    if not (two and eight):
        return []
    metric, value = f"{RATIO}, beside 2 jobs'", eight / two
    return [
        Row.median(
            CASES["8 jobs"].name,
            metric,
            [value],
            unit="",
            emulated=True,
            target=">= 0.97",
        )
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    names = chosen_cases(args.cases, CASES)
    # Options --runs FILE and --minutes M: single runs are stored in FILE, and none starts after M.
    runs = Runs(args.runs, args.minutes)
    rows = kept_rows(args.json)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "cluster.toml"
            file.write_text(CASES[name].clusters)
            new = measure(name, file, args.repetitions, runs)
            if new:
                rows = [row for row in rows if row.case != CASES[name].name] + new
                write(rows, args.json)
    # This row depends on two cases, perhaps measured in different sessions. So it is made anew from all rows,
    # and replaces the row of an earlier session.
    comparison = compare_eight_jobs_with_two(rows)
    replaced = {row.metric for row in comparison}
    rows = [row for row in rows if row.metric not in replaced] + comparison
    return finish(rows, args.json, f"joined jobs in the lab, {args.repetitions} repetitions")


if __name__ == "__main__":
    sys.exit(main())
