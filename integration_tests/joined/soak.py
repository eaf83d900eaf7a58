"""Soak test of joined jobs: random faults for as long as wanted. It does not run in CI.

    make soak [MINUTES=30] [SEED=1]
    PYTHONPATH=tests:. python integration_tests/joined/soak.py --minutes 30 [--seed 1] [--jobs 3]
        [--only STRIKE,...] [--keep DIR] [--ledger FILE]

Three jobs (one of two ranks) or more train on loopback with TLS. Every few seconds one of these happens:

    kill, rank   a job is killed, or one of its ranks
    stop         a job is stopped for a while
    cut          two jobs cannot connect to each other for a while; both reach the coordinator
    liar         a job is started again as a liar (LIES), if there is none
    nothing

Jobs that died are started again, some with a fault or lie (faulty.POINTS, LIES). The coordinator is restarted
now and then.

At the end, liars are ended, links are mended, and all jobs make a round. Then all jobs must have the same
bits in the same version of each fragment, each committed round must have been applied by all of its members
that lived, and each void round must have a reason. Otherwise the exit status is 1. The last lines account
for every round (accounting.py). The ledger is a file of JSON lines with the faults, and with the counts
whenever the coordinator is restarted.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from joined_jobs import coordinator
from waiting import await_

from integration_tests.joined.accounting import account_of
from integration_tests.joined.faulty import (
    LIES,
    OUTER,
    POINTS,
    Fault,
    Job,
    check,
    cut,
    start_server,
)

INSIDE = ("kill", "kill", "reset", "nan", "far", *LIES)
NAMES = ("east", "west", "north", "south", "centre", "coast", "hills", "lake")
STRIKES = ("kill", "rank", "stop", "cut", "liar", "nothing")
#: Seconds for which two jobs are cut off from each other, at least and at most.
CUT_S = (3.0, 15.0)
PATIENCE_S = 180


class Ledger:
    """Record of the faults and counts, on the screen and in a file of JSON lines."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a", buffering=1)  # noqa: SIM115 - open until the process ends
        self._begin = time.monotonic()
        self.faults = 0  # number of faults so far

    def tell(self, what: str, **more: object) -> None:
        seconds = time.monotonic() - self._begin
        details = "".join(f"; {value} {name}" for name, value in more.items())
        print(f"{seconds:6.0f} s  {what}{details}", flush=True)
        print(json.dumps({"seconds": round(seconds, 1), "what": what, **more}), file=self._file)

    def account(self, place: Path, events: list[str]) -> None:
        """Assert that the logs of all jobs agree so far, and record the counts."""
        self.tell("all is accounted for", faults=self.faults, **check(place, events))


def start_jobs(place: Path, port: int, count: int) -> list[Job]:
    """Start jobs, one of them of two ranks, that train without end."""
    jobs = []
    for seed, name in enumerate(NAMES[:count]):
        job = Job(
            place,
            name,
            port,
            ranks=2 if name == "west" else 1,
            seed=seed,
            steps=10**9,
            faulty_incarnations=10**9,
            outer=f"min=1,limit=8,{OUTER}",
        )
        jobs.append(job.start())
    return jobs


class CutPairs:
    """Pairs of jobs that cannot connect to each other, each until some time."""

    def __init__(self, place: Path):
        self._place = place
        self._ends: dict[tuple[str, str], float] = {}  # pair -> time.monotonic() of its end

    def add(self, pair: tuple[str, str], seconds: float) -> None:
        self._ends[pair] = time.monotonic() + seconds
        cut(self._place, list(self._ends))

    def mend(self, everything: bool = False) -> None:
        """Let pairs connect again whose time is over; or all."""
        now = time.monotonic()
        ended = [pair for pair, end in self._ends.items() if everything or end < now]
        for pair in ended:
            del self._ends[pair]
        if ended:
            cut(self._place, list(self._ends))


def soak(
    place: Path,
    seconds: float,
    seed: int,
    ledger: Ledger,
    job_count: int = 3,
    strikes: tuple[str, ...] = STRIKES,
) -> int:
    """Run the jobs with random faults for this time, and return the exit status.

    Raises:
        AssertionError: The logs of the jobs do not agree, or a round is void without a reason.
    """
    chance = random.Random(seed)
    coordinators: list[list[str]] = []  # lines that each coordinator printed
    events: list[str] = []  # all of them
    cut_pairs = CutPairs(place)
    end = time.monotonic() + seconds
    port = 0
    jobs: list[Job] = []
    try:
        while time.monotonic() < end:
            with coordinator(port) as server:
                port = server.port
                if not jobs:
                    jobs.extend(start_jobs(place, port, job_count))
                until = min(end, time.monotonic() + chance.uniform(20, 60))
                while time.monotonic() < until:
                    time.sleep(chance.uniform(1, 5))
                    restart_ended(chance, jobs, ledger)
                    ledger.faults += 1
                    cut_pairs.mend()
                    ledger.tell(strike(chance, jobs, cut_pairs, strikes))
                await_(lambda: one_in_the_run(jobs), PATIENCE_S, "a job that has made a round")
            coordinators.append(server.told)
            events += server.told
            ledger.tell("the coordinator is restarted")
            ledger.account(place, events)
        cut_pairs.mend(everything=True)
        with coordinator(port) as server:
            make_a_round_of_all(jobs, server, ledger)
        coordinators.append(server.told)
        events += server.told
    finally:
        for job in jobs:
            job.kill()
        (place / "events.txt").write_text("\n".join(events))
    ledger.account(place, events)
    account = account_of(coordinators, [job.name for job in jobs])
    for line in account.lines:
        ledger.tell(line)
    assert not account.unexplained, f"rounds are void without a reason: {account.unexplained[:3]}"
    return 0


def restart_ended(chance: random.Random, jobs: list[Job], ledger: Ledger) -> None:
    """Start the jobs that have ended, each with a random fault or without."""
    for job in jobs:
        if job.ended:
            job.fault = chance.choice((None, fault(chance)))
            ledger.tell(f"{job.name} is started again, {job.fault or 'without a fault'}")
            job.start()


def make_a_round_of_all(jobs: list[Job], server: Any, ledger: Ledger) -> None:
    """End the liars, wait until all jobs have made a round together, and kill the jobs."""
    for job in jobs:
        if job.fault and job.fault.what in LIES and not job.ended:
            ledger.tell(f"{job.name}, {job.fault}, is ended")
            job.kill()
        job.fault = None

    def all_have_committed() -> bool:
        for job in jobs:
            if job.ended:
                job.start()
        commits = [line for line in server.told if "commit" in line]
        return any(all(job.name in line for job in jobs) for line in commits)

    await_(all_have_committed, PATIENCE_S, "a round of all jobs")
    for job in jobs:
        job.kill()


def one_in_the_run(jobs: list[Job]) -> bool:
    """Return whether a job that will not die by a fault has made a round; start the jobs that have ended.

    Only such a job remembers the number of rounds while the coordinator is restarted. If all jobs died
    meanwhile, the next coordinator would count from 1 again, and check() would compare different rounds.
    """
    mortal = [job for job in jobs if job.fault and job.fault.what == "kill"]
    if len(mortal) == len(jobs):
        mortal[0].kill()
    for job in jobs:
        if job.ended:
            job.fault = None
            job.start()
        elif job not in mortal and any(
            line.get("verdict") == "commit" for line in job.lines_of_last
        ):
            return True
    return False


def fault(chance: random.Random) -> Fault:
    """Draw a random fault for the next start of a job."""
    point = chance.choice(sorted(set(POINTS) - {"save"}))
    nth = chance.randint(1, 12)
    return Fault(point, nth, chance.choice(INSIDE))


def strike(
    chance: random.Random, jobs: list[Job], cut_pairs: CutPairs, strikes: tuple[str, ...]
) -> str:
    """Do one of the strikes to a random job, and return a line about it."""
    job = chance.choice(jobs)
    what = chance.choice(strikes)
    if what == "kill":
        job.kill()
    elif what == "rank":
        job.processes[-1].kill()
        job.processes[-1].join()
    elif what == "stop":
        job.signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 8))
        job.signal(signal.SIGCONT)
    elif what == "cut":
        other = chance.choice([other for other in jobs if other is not job])
        cut_pairs.add((job.name, other.name), chance.uniform(*CUT_S))
        return f"{job.name}: cut from {other.name}"
    elif what == "liar":
        if any(one.fault and one.fault.what in LIES for one in jobs):
            return "nothing: there is a liar already"
        job.kill()
        job.fault = Fault("ready", 1, chance.choice(LIES))
        job.start()
        return f"{job.name} is started again, {job.fault}"
    return f"{job.name}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, choices=range(2, len(NAMES) + 1))
    parser.add_argument(
        "--only", metavar="STRIKE,...", default=",".join(STRIKES), help="strikes (default: all)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the jobs' files here (a new directory)")
    parser.add_argument(
        "--ledger", metavar="FILE", default="build/soak.jsonl", help="default: build/soak.jsonl"
    )
    args = parser.parse_args()
    strikes = tuple(args.only.split(","))
    unknown = [strike for strike in strikes if strike not in STRIKES]
    if unknown:
        parser.error(f"--only: no strike {unknown[0]!r}; there are {', '.join(STRIKES)}")
    start_server()
    ledger = Ledger(Path(args.ledger))
    ledger.tell(f"{args.minutes:g} minutes, seed {args.seed}, {args.jobs} jobs")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(args.keep or directory)
        if args.keep:
            place.mkdir(parents=True)
        try:
            return soak(place, 60 * args.minutes, args.seed, ledger, args.jobs, strikes)
        except AssertionError as error:
            ledger.tell(f"WRONG: {error}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
