"""Measures how long a killed joined job needs until it trains again, by phases of its start.

    python benchmarks/recovery.py --json FILE [--cases NAME,...] [--kills 5] [--repetitions 2]
        [--before FOLDER] [--runs FILE] [--minutes M]

Two or four jobs train the GPT of benchmarks/peers.py (0.84 M parameters) on emulated nodes. Each job has a
node in a cluster of its own, behind a link of 20 Mb/s; the round trip between two nodes takes 40 ms. All
messages are encrypted (TLS 1.3). All processes of the last job are killed (kill -9) several times in each
run. The recovery lasts from the kill to the end of the job's first step after it.

    2 jobs, 4 jobs           A job is one process. This program starts it again at once, as in
                             benchmarks/peers.py.
    2 jobs async, 4 jobs async
                             The same with rounds=async.
    2 jobs torchrun          Each job has two ranks, which `torchrun --max-restarts` starts again.
    2 jobs no bytecode       As "2 jobs", but Python may keep no bytecode, so that each start compiles
                             the sources of torch and holmes_ext.
    alone                    One job, so that nobody has newer weights.
    without holmes_ext       A job that joins no others, for the time of Python and torch.

The processes run under SCHED_RR, so that other programs on this machine delay them little. (This program,
which starts a job again, does not.) The rows are medians over all kills, with the smallest and the largest:
seconds (s) and CPU seconds of rank 0 (CPU s) of each phase and in all. --before names a folder with another
version of holmes_ext: runs of both versions take turns, and the rows of that version are named "before".
--runs and --minutes: as in benchmarks/peers.py.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Row, Runs, chosen_cases, finish, kept_rows, parser, write
from holmes_lab import Lab
from holmes_lab.joined import LabCoordinator, await_, coordinator
from holmes_lab.process.job import Job

from holmes_ext.cluster.spec import parse_spec

HERE = Path(__file__).resolve().parent
JOB = str(HERE / "recovery_job.py")
TARGET = "<= 5"  # seconds from the kill to the end of the first step
TOTAL = "from the kill to the first step"
SECONDS_TO_START = 240
#: Steps of the killed job between two kills: more than a whole round of each fragment.
STEPS_BETWEEN = 40
#: Settings of the run, given to `holmes join serve`.
OUTER = "min=1"
#: Settings of each job.
OWN = "timeout=20"


@dataclass(frozen=True)
class Case:
    """Case of the benchmark: how many joined jobs there are, and how each job runs.

    Joined jobs are separate training jobs that exchange weights. Each run of a case kills the last
    job several times, to measure how long it needs until it trains again.
    """

    jobs: int
    outer: str = OUTER  # value of `holmes join serve --outer`
    ranks: int = 1  # of each job; several are started by torchrun
    keeps_bytecode: bool = True
    joins: bool = True  # whether the jobs use holmes_ext

    @property
    def has_target(self) -> bool:
        """True if the recoveries of this case must meet TARGET.

        The other cases only show what takes the time, such as a start without the bytecode (compiled
        Python files) of earlier starts. Users' jobs have bytecode.
        """
        return self.jobs > 1 and self.keeps_bytecode

    @property
    def clusters(self) -> str:
        """The text of the cluster.toml: a cluster of one node for each job."""
        clusters = "".join(
            f'[[cluster]]\nname = "job{number}"\nkind = "ethernet"\nnodes = ["n{number}"]\n'
            'uplink = "20Mb/s"\n'
            for number in range(self.jobs)
        )
        links = "".join(
            f'[[between]]\nclusters = ["job{first}", "job{second}"]\nlatency = "20ms"\n'
            for first, second in itertools.combinations(range(self.jobs), 2)
        )
        return f'version = 2\n[ethernet]\nrate = "1Gb/s"\n{clusters}{links}'


CASES = {
    "2 jobs": Case(2),
    "2 jobs async": Case(2, f"{OUTER},rounds=async"),
    "4 jobs": Case(4),
    "4 jobs async": Case(4, f"{OUTER},rounds=async"),
    "2 jobs torchrun": Case(2, ranks=2),
    "2 jobs no bytecode": Case(2, keeps_bytecode=False),
    "alone": Case(1),
    "without holmes_ext": Case(1, joins=False),
}


@dataclass(frozen=True)
class Run:
    """One run of a case (of CASES): starts its jobs on emulated nodes, and reads their logs."""

    case: Case
    lab: Lab
    meeting: LabCoordinator  # the coordinator of the joined jobs
    folder: Path  # for logs
    environment: dict[str, str]
    pace: float  # seconds that each step sleeps

    def start(self, number: int) -> Job:
        """Start the job of this number on its node."""
        launcher = [sys.executable]
        if self.case.ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"]
            launcher += ["--nproc-per-node", str(self.case.ranks)]
        arguments = {
            "--name": f"job{number}",
            "--outer": OWN,
            "--times": self.log(number),
            "--seed": number,
            "--pace": self.pace,
        }
        if self.case.joins:
            invitation = self.meeting.invitation(f"job{number}")
            arguments |= {"--where": self.meeting.address, "--invitation": invitation}
        words = [str(word) for argument in arguments.items() for word in argument]
        command = [*launcher, JOB, *words]
        return self.lab.start(command, order=[f"n{number}"], processes=1, env=self.environment)

    def log(self, number: int) -> Path:
        """Return the path of the log of a job."""
        return self.folder / f"job{number}.jsonl"

    def lines(self, number: int) -> list[dict[str, Any]]:
        """Return the log of a job so far, without a half-written last line.

        A line is JSON with the keys "mark" (name of a phase that has ended, "start", "step" or
        "killed"), "at" (time, in seconds) and "cpu_s" (CPU seconds of the process until then).

        Args:
            number: Number of the job, from 0.
        """
        text = self.log(number).read_text() if self.log(number).exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def await_steps(self, number: int, after: int, steps: int) -> list[dict[str, Any]]:
        """Wait until a job has made steps, and return its log lines.

        Args:
            number: The job.
            after: Number of lines of its log that do not count.
            steps: Number of steps after these lines.
        """

        def has_made_them() -> bool:
            marks = [line["mark"] for line in self.lines(number)[after:]]
            if "killed" in marks:  # only steps of the next start count
                marks = marks[marks.index("start") :] if "start" in marks else []
            return marks.count("step") >= steps

        await_(has_made_them, SECONDS_TO_START, f"step {steps} of job{number}")
        return self.lines(number)[after:]


def kill_and_measure(run: Run, kills: int) -> list[dict[str, list[float]]]:
    """Kill the last job several times, and return how long each phase of its recoveries took.

    A recovery is the time from a kill to the end of the first step after it.

    Args:
        run: The run. Its jobs are started here, and killed at the end.
        kills: Number of kills.

    Returns:
        For each kill: name of a phase -> [seconds, CPU seconds].
    """
    victim = run.case.jobs - 1
    jobs = [run.start(number) for number in range(run.case.jobs)]
    try:
        for number in range(run.case.jobs):
            run.await_steps(number, after=0, steps=1)
        recoveries = []
        after = 0
        for _ in range(kills):
            run.await_steps(victim, after, STEPS_BETWEEN)
            after = len(run.lines(victim))
            # All processes of the job watch this file, and kill themselves when it is touched
            # (kill_on_request() in recovery_job.py).
            run.log(victim).with_name(f"{run.log(victim).name}.kill").touch()
            if run.case.ranks == 1:  # torchrun starts a job of several ranks again
                jobs[victim].wait()
                jobs[victim] = run.start(victim)
            recoveries.append(phases_of(run.await_steps(victim, after, 1)))
        return recoveries
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def phases_of(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds and CPU seconds of each phase from the kill to the first step after it.

    Args:
        lines: Lines of the log of the killed job; the last ones before the kill may be among them.
    """
    marks = [line["mark"] for line in lines]
    killed = marks.index("killed")
    start = marks.index("start", killed)  # a last step may have been logged before
    phases: dict[str, list[float]] = {}
    last = {**lines[killed], "cpu_s": 0.0}  # the new process has used no CPU time yet
    names = {"start": "restart by the launcher", "step": "rest of the first step"}
    for line in lines[start:]:
        name = names.get(line["mark"], line["mark"])
        seconds, cpu_s = phases.get(name, (0.0, 0.0))  # a phase may come several times
        seconds += line["at"] - last["at"]
        cpu_s += line["cpu_s"] - last["cpu_s"]
        phases[name] = [seconds, cpu_s]
        last = line
        if line["mark"] == "step":
            break
    phases[TOTAL] = [last["at"] - lines[killed]["at"], last["cpu_s"]]
    return phases


@contextmanager
def environment_of(case: Case, code: str) -> Iterator[dict[str, str]]:
    """Provide the environment of jobs that import a version of holmes_ext.

    Python keeps the bytecode of a module beside its source, and compiles the source if there is none.
    Here it keeps all bytecode in a new folder instead. So only the first start in a run compiles, and no run
    depends on bytecode of earlier runs.

    Args:
        case: Says whether bytecode is kept. If not, each start compiles the sources again.
        code: Folder with the version.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": code,
            "PYTHONPYCACHEPREFIX": folder,
            "PYTHONDONTWRITEBYTECODE": "" if case.keeps_bytecode else "1",
        }


def run_once(case: Case, code: str, args: Any) -> list[dict[str, list[float]]]:
    """Run the jobs of a case once with a version of holmes_ext, and return the measured recoveries.

    Args:
        case: The case.
        code: Folder with the version.
        args: Options of this program: `kills` (number of kills) and `pace` (seconds that a step sleeps).

    Returns:
        For each kill: phase of the recovery -> [seconds, CPU seconds].
    """
    spec = parse_spec(case.clusters, "cluster.toml")
    with (
        Lab(spec, realtime=True) as lab,
        coordinator(lab, case.outer) as meeting,
        tempfile.TemporaryDirectory() as directory,
        environment_of(case, code) as environment,
    ):
        return kill_and_measure(
            Run(
                case,
                lab,
                meeting,
                Path(directory),
                {**environment, **meeting.environment},
                args.pace,
            ),
            args.kills,
        )


def measure(name: str, args: Any, runs: Runs) -> list[Row]:
    """Measure a case with each version of holmes_ext in turn, and return the rows of results.

    Args:
        name: A key of CASES.
        args: Options of this program.
        runs: Results of earlier runs.
    """
    versions = {"": str(HERE.parent)}  # prefix of the rows -> folder; "": the current code
    if args.before:
        versions = {"before: ": str(args.before.resolve()), **versions}
    # Version -> for each kill: phase of the recovery -> [seconds, CPU seconds].
    recoveries: dict[str, list[dict[str, list[float]]]] = {version: [] for version in versions}
    for repetition in range(args.repetitions):
        for version, code in versions.items():
            key = f"{name}, {version}{code}, {args.kills} kills, repetition {repetition + 1}"
            recoveries[version] += (
                runs.of(key, lambda code=code: run_once(CASES[name], code, args)) or []
            )
    rows = []
    for version, measured in recoveries.items():
        for phase in measured[0] if measured else ():
            is_current_code = not version  # the older version has no target
            has_target = is_current_code and CASES[name].has_target
            target = TARGET if phase == TOTAL and has_target else ""
            for position, unit in enumerate(("s", "CPU s")):
                values = [phases[phase][position] for phases in measured if phase in phases]
                row = Row.median(
                    name,
                    f"{version}{phase}, {unit}",
                    values,
                    unit=unit,
                    emulated=True,
                    target=target if unit == "s" else "",
                )
                rows.append(row)
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--kills", type=int, default=5, help="kills in each run")
    add("--repetitions", type=int, default=2, help="runs of each case and version")
    add("--pace", type=float, default=0.1, help="seconds of an accelerator in each step")
    add("--before", type=Path, metavar="FOLDER", help="measure this version of holmes_ext, too")
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    names = chosen_cases(args.cases, CASES)
    runs = Runs(args.runs, args.minutes)
    rows = kept_rows(args.json, names)
    for name in names:
        rows += measure(name, args, runs)
        write(rows, args.json)
    load = ", ".join(f"{value:.0f}" for value in os.getloadavg())
    return finish(rows, args.json, f"recovery of a killed joined job; load averages {load}")


if __name__ == "__main__":
    sys.exit(main())
