"""Compares joined jobs of holmes with torchft's DiLoCo and hivemind's averaging, over an emulated WAN.

    python benchmarks/peers.py --torchft VENV/bin/python --hivemind VENV2/bin/python --json FILE
        [--cases train,killed] [--steps 200] [--seeds 1,2] [--ways NAME;...] [--runs FILE] [--minutes M]

Two jobs of one process each train the same GPT (0.84 M parameters) on the same text, tokens and seeds.
The WAN has 40 ms and 20 Mb/s. VENV is made by `pip install torch==2.13.0 torchft==0.2.0 numpy`, and VENV2
in the same way with hivemind==1.1.12. A library without an interpreter is left out.

Each library runs with the defaults of its documentation and, where others are better, with better settings:

    torchft     train_diloco.py: 20 steps, outer learning rate 0.7 and momentum 0.9; with USE_STREAMING: 2
                fragments, delay 5; and the settings with which holmes is best
    hivemind    the quick start, with rounds as long as those of holmes
    holmes      algorithm=diloco, as the others, else the defaults; and with 2 bits for each element
    alone       a job that does not join

Every step sleeps as long as an accelerator would compute (--pace). The results:

    bytes         bytes that both nodes sent in a step, by the counters of their NICs
    exposed       seconds of a step in optimizer.step() beyond its median: there all libraries wait
    tokens/s      of both jobs. This and exposed count from step 40 on.
    loss          of the jobs' mean weights, on text that no job has read
    killed        One job is killed (kill -9) after a third of the steps and started again at once. The
                  result is the loss of the other job: its next --after seconds, less its usual seconds for
                  the steps that it made in them. It is below 0 if the other job was faster than usual. A
                  second result is the seconds until the killed job trains again.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Row, Runs, chosen_cases, finish, kept_rows, parser, tell, write
from holmes_lab import Lab
from holmes_lab.joined import CLUSTERS, LabCoordinator, await_, coordinator
from holmes_lab.process.job import Job
from peers_job import BATCH, SIZE, evaluate

from holmes_ext.cluster.spec import parse_spec

JOB = str(Path(__file__).with_name("peers_job.py"))
NODES = {"east": "a0", "west": "b0"}  # job -> its node
PORT = 29510  # of the server where the jobs of a library find each other
TOKENS = BATCH * SIZE["sequence"]
CASES = ("train", "killed")
#: First steps whose exposed seconds and tokens/s do not count, because the jobs meet in them.
SKIP = 40


@dataclass(frozen=True)
class Way:
    """Library by which two jobs join during training, and its settings."""

    library: str  # "holmes", "torchft", "hivemind", or "none" for a job that trains alone
    settings: str = ""  # option --settings of peers_job.py


WAYS = {
    "alone": Way("none"),
    "holmes, diloco": Way("holmes", "min=2,timeout=20,algorithm=diloco"),
    "holmes, diloco, 2bit": Way("holmes", "min=2,timeout=20,algorithm=diloco,compress=2bit"),
    "torchft, default": Way("torchft", "sync_every=20"),
    "torchft, streaming": Way("torchft", "sync_every=20,fragments=2,delay=5"),
    "torchft, holmes's settings": Way(
        "torchft", "sync_every=32,fragments=4,delay=5,lr=1.0,momentum=0.3"
    ),
    "hivemind": Way("hivemind", "steps=32"),
}


class Meeting(NamedTuple):
    """Running server where two jobs find each other, before they exchange weights.

    It is holmes' coordinator (`holmes join serve`), torchft's lighthouse, or the first peer of hivemind's
    distributed hash table.
    """

    address: str  # "": there is none, for a job that trains alone
    holmes: LabCoordinator | None = None  # None: the server of another library


@contextlib.contextmanager
def server_of(lab: Lab, way: Way, python: str) -> Iterator[Meeting]:
    """Start the server where the jobs of a library find each other.

    Args:
        lab: The emulated nodes.
        way: The library and its settings.
        python: Interpreter that has the library.
    """
    library = way.library
    if library == "holmes":
        with coordinator(lab, way.settings) as running:
            yield Meeting(running.address, running)
    elif library == "none":
        yield Meeting("")
    else:
        lines: list[str] = []
        address = lab.nodes[0].address  # of the node of the job "east"; the server runs there
        command = [python, JOB, "--library", library, "--serve", "--where", f"{address}:{PORT}"]
        job = lab.start(
            command,
            order=[NODES["east"]],
            env={"PEERS_ADDRESS": address},
            on_line=lambda rank, line, stream: lines.append(line),
        )
        try:
            await_(
                lambda: any("jobs meet at" in line for line in lines),
                60,
                f"{library}'s meeting place",
            )
            announced = next(line for line in lines if "jobs meet at" in line).split()[-1]
            # torchft listens at the address that it was given, but announces a URL with a host
            # name. hivemind chooses its address itself: only the announced address is known to be right.
            yield Meeting(f"{address}:{PORT}" if library == "torchft" else announced)
        finally:
            job.kill()
            job.wait()


@dataclass(frozen=True)
class Run:
    """Training run of the two jobs "east" and "west" on two emulated nodes, joined by one library.

    start() starts a job, or starts it again. log(), steps() and sent() read its log and the NICs.
    """

    lab: Lab
    python: str  # interpreter that has the library
    way: Way
    server: Meeting  # through which the jobs find each other
    folder: Path  # for the files of the jobs
    args: Any  # options of this program
    seed: int

    def start(self, name: str, steps: int) -> Job:
        """Start one of the two jobs.

        A job that was killed is started again by the same call. It may train alone until it has joined again.

        Args:
            name: "east" or "west".
            steps: Number of training steps.
        """
        holmes = self.server.holmes
        # The settings of holmes are those of its coordinator.
        settings = self.way.settings if holmes is None else ""
        command = [
            self.python,
            JOB,
            "--library",
            self.way.library,
            "--name",
            name,
            "--where",
            self.server.address,
            "--settings",
            settings,
            "--seed",
            str(2 * self.seed + (name == "west")),  # each job reads the text in its own order
            "--steps",
            str(steps),
            "--pace",
            str(self.args.pace),
            "--log",
            str(self.log(name)),
            "--weights",
            str(self.folder / f"{name}.pt"),
        ]
        address = next(node.address for node in self.lab.nodes if node.name == NODES[name])
        # The libraries' sockets, and gloo in torchft, must use the NIC between the clusters.
        env = {"OMP_NUM_THREADS": "1", "PEERS_ADDRESS": address, "GLOO_SOCKET_IFNAME": "eth0"}
        if holmes is not None:
            command += ["--invitation", str(holmes.invitation(name))]
            env |= holmes.environment
        return self.lab.start(command, order=[NODES[name]], env=env, timeout=900)

    def log(self, name: str) -> Path:
        """Return the path of the log of a job."""
        return self.folder / f"{name}.jsonl"

    def steps(self, name: str) -> list[dict[str, float]]:
        """Return the lines that a job has logged, one for each finished step."""
        text = self.log(name).read_text() if self.log(name).exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def sent(self) -> int:
        """Return the bytes that the Ethernet NICs of both nodes have sent."""
        counters = self.lab.counters()
        return sum(counters[node]["eth0"][1] for node in NODES.values())


def wait(jobs: dict[str, Job]) -> None:
    """Wait until the jobs have ended.

    Raises:
        SystemExit: A job failed.
    """
    for name, job in jobs.items():
        result = job.wait()
        if result.returncode:
            output = "".join(result.outputs.values()).strip().splitlines()[-3:]
            raise SystemExit(
                f"peers: job {name} ended with status {result.returncode}: {' | '.join(output)}"
            )


def train_both_jobs(run: Run) -> dict[str, float]:
    """Run two jobs that train together to their end, and return the measurements by name.

    Returns:
        "bytes": sent by both nodes in a step. "exposed": seconds of communication that a step waits
        for. It is the mean of how much longer optimizer.step() takes than its median over the
        steps. "rate": tokens per second of both jobs. "loss": in nats, of the jobs' mean weights;
        of jobs that do not join, the loss of the first job.
    """
    steps = run.args.steps
    sent_before = run.sent()
    jobs = {name: run.start(name, steps) for name in NODES}
    wait(jobs)
    sent = run.sent() - sent_before
    exposed = []  # mean seconds in optimizer.step() beyond its median, of each job
    rates = []  # tokens per second of each job
    for name in NODES:
        # The step before the first measured one marks the beginning of the measured time.
        lines = run.steps(name)[SKIP - 1 :]
        updates = [line["update_s"] for line in lines[1:]]
        usual = statistics.median(updates)
        exposed.append(statistics.fmean(max(0.0, update - usual) for update in updates))
        rates.append(len(updates) * TOKENS / (lines[-1]["at"] - lines[0]["at"]))
    weights = [torch.load(run.folder / f"{name}.pt") for name in NODES]
    mean = {key: sum(state[key] for state in weights) / len(weights) for key in weights[0]}
    # Jobs that do not join have nothing in common: their mean weights are no model.
    loss = evaluate(weights[0] if run.way.library == "none" else mean)
    return {
        "bytes": sent / steps,
        "exposed": statistics.fmean(exposed),
        "rate": sum(rates),
        "loss": loss,
    }


def kill_one_job(run: Run) -> dict[str, float]:
    """Kill the job "west" after a third of its steps, start it again, and measure the cost.

    Returns:
        "lost": seconds of training that the other job lost. "back": seconds until the killed job trained
        again.
    """
    endless = 10**6  # steps; the jobs are killed at the end of the measurement
    jobs = {name: run.start(name, steps=endless) for name in NODES}
    third = max(run.args.steps // 3, SKIP + 1)  # steps
    after = run.args.after  # seconds after the kill that are measured
    try:
        await_(lambda: len(run.steps("west")) > third, 600, "west's first third")
        jobs["west"].kill()
        at = time.time()
        jobs["west"].wait()
        steps_before_kill = len(run.steps("west"))
        jobs["west"] = run.start("west", 10**6)
        await_(lambda: run.steps("east")[-1]["at"] > at + after, 600, "the time after")
        await_(lambda: len(run.steps("west")) > steps_before_kill, 600, "the killed job")
        before = [line for line in run.steps("east") if line["at"] < at][SKIP - 1 :]
        usual_step_s = (before[-1]["at"] - before[0]["at"]) / (len(before) - 1)
        last_before = before[-1]["at"]  # time of the last step of "east" before the kill
        steps_made = sum(last_before < line["at"] <= at + after for line in run.steps("east"))
        lost = at + after - last_before - steps_made * usual_step_s
        return {"lost": lost, "back": run.steps("west")[steps_before_kill]["at"] - at}
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()


def run_once(case: str, lab: Lab, python: str, way: Way, seed: int, args: Any) -> dict[str, float]:
    """Run both jobs of a case once, with their server, and return the measurements by name.

    Args:
        case: "train": both jobs train to the end. "killed": a job is killed and started again.
        lab: The emulated nodes.
        python: Interpreter that has the library.
        way: The library and its settings.
        seed: Seed of the weights, and of the order of the text.
        args: Options of this program.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        server_of(lab, way, python) as server,
    ):
        run = Run(
            lab,
            python=python,
            way=way,
            server=server,
            folder=Path(directory),
            args=args,
            seed=seed,
        )
        return train_both_jobs(run) if case == "train" else kill_one_job(run)


def measure(case: str, args: Any, runs: Runs) -> list[Row]:
    """Measure a case with each way to join, and return the rows of results.

    Args:
        case: "train", or "killed" for the case with a killed job.
        args: Options of this program.
        runs: Results of earlier runs.
    """
    pythons = {
        "none": sys.executable,
        "holmes": sys.executable,
        "torchft": args.torchft,
        "hivemind": args.hivemind,
    }
    ways = {
        name: WAYS[name]
        for name in args.ways.split(";")
        if pythons[WAYS[name].library] and not (case == "killed" and WAYS[name].library == "none")
    }
    rows, results = [], {name: [] for name in ways}
    with Lab(parse_spec(CLUSTERS, "cluster.toml")) as lab:
        for seed in map(int, args.seeds.split(",")):
            for name, way in ways.items():
                run_both_jobs = partial(
                    run_once,
                    case,
                    lab=lab,
                    python=pythons[way.library],
                    way=way,
                    seed=seed,
                    args=args,
                )
                values = runs.of(f"{case}, {name}, seed {seed}, {args.steps} steps", run_both_jobs)
                results[name] += [values] if values else []
    metrics = {
        "bytes": ("sent in a step", "B"),
        "exposed": ("exposed in a step", "s"),
        "rate": ("tokens/s", "token/s"),
        "loss": ("evaluation loss", "nats"),
        "lost": ("lost by the other job", "s"),
        "back": ("until the killed one trains again", "s"),
    }
    for name, values in results.items():
        for key in values[0] if values else ():
            text, unit = metrics[key]
            rows.append(
                Row.median(
                    case,
                    f"{text}, {name}",
                    [result[key] for result in values],
                    unit=unit,
                    emulated=True,
                )
            )
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file.

    A way is a library that joins two training jobs, with its settings: a key of WAYS, such as
    "holmes, diloco" or "torchft, streaming". Each step of a job sleeps for --pace seconds, as long
    as an accelerator would compute.
    """
    arguments = parser(__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--torchft", default="", metavar="PYTHON", help="of an environment with torchft")
    add("--hivemind", default="", metavar="PYTHON", help="of an environment with hivemind")
    add("--steps", type=int, default=200)
    add("--pace", type=float, default=0.1, help="seconds of an accelerator in each step")
    add("--seeds", default="1,2")
    add("--after", type=float, default=60.0, help="seconds that are looked at after the kill")
    add("--ways", default=";".join(WAYS), metavar="NAME;...", help="only these")
    # --runs FILE keeps the result of each run, so that an interrupted benchmark can go on.
    # --minutes M: no run begins after M minutes.
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    unknown = [name for name in args.ways.split(";") if name not in WAYS]
    if unknown:
        tell(f"peers.py: no way {unknown[0]!r}; there are {'; '.join(WAYS)}")
        return 2
    names = chosen_cases(args.cases, CASES)
    runs = Runs(args.runs, args.minutes)
    rows = {(row.case, row.metric): row for row in kept_rows(args.json)}
    for name in names:
        rows |= {(row.case, row.metric): row for row in measure(name, args, runs)}
        write([*rows.values()], args.json)
    return finish(
        [*rows.values()], args.json, f"joined jobs beside torchft and hivemind, seeds {args.seeds}"
    )


if __name__ == "__main__":
    sys.exit(main())
