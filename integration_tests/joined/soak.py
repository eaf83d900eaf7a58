"""A soak of joined jobs: random faults for as long as wanted; every round accounted for. Not in CI.

    make soak [MINUTES=30] [SEED=1]
    PYTHONPATH=tests:. python integration_tests/joined/soak.py --minutes 30 [--seed 1]
        [--keep DIR] [--ledger FILE]

Three jobs (one of two ranks) on loopback, TLS throughout. Every few seconds one of: a job killed, one rank of
it killed, a job stopped for a while, a fault or a lie inside the next incarnation (faulty.POINTS, LIES), the
coordinator restarted. Jobs that died come back. At the end liars are ended, and all three make a round: then
all jobs have the same bits of the same version of each fragment, each round that a job began has an end, each
committed round was applied by all of its members that lived. Status 1 where one of that is not so. The ledger
(JSON lines, as it goes): what was done, and whenever the coordinator is restarted what has been counted and
compared.
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

from joined_jobs import coordinator
from waiting import await_

from integration_tests.joined.faulty import LIES, OUTER, POINTS, Fault, Job, check, start_server

INSIDE = ("kill", "kill", "reset", "nan", "far", *LIES)
PATIENCE_S = 180


class Ledger:
    """Lines on the screen, and in the file as JSON."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._begin, self.faults = open(file, "a", buffering=1), time.monotonic(), 0

    def tell(self, what: str, **more: object) -> None:
        seconds = time.monotonic() - self._begin
        print(
            f"{seconds:6.0f} s  {what}"
            + "".join(f"; {value} {name}" for name, value in more.items()),
            flush=True,
        )
        print(json.dumps({"seconds": round(seconds, 1), "what": what, **more}), file=self._file)

    def account(self, place: Path, events: list[str]) -> None:
        """What must hold, held so far; AssertionError where it does not."""
        self.tell("all is accounted for", faults=self.faults, **check(place, events))


def soak(place: Path, seconds: float, seed: int, ledger: Ledger) -> int:
    chance, events = random.Random(seed), []
    end = time.monotonic() + seconds
    port, jobs = 0, list[Job]()
    try:
        while time.monotonic() < end:
            with coordinator(port) as server:
                port = server.port
                if not jobs:
                    more = {
                        "steps": 10**9,
                        "faulty_incarnations": 10**9,
                        "encrypted": True,
                        "outer": f"min=1,limit=8,{OUTER}",
                    }
                    jobs.extend(
                        Job(place, name, port, ranks=ranks, seed=k, **more)
                        for k, (name, ranks) in enumerate((("east", 1), ("west", 2), ("north", 1)))
                    )
                    for job in jobs:
                        job.start()
                until = min(end, time.monotonic() + chance.uniform(20, 60))
                while time.monotonic() < until:
                    time.sleep(chance.uniform(1, 5))
                    for job in jobs:
                        if job.ended:
                            job.fault = chance.choice((None, fault(chance)))
                            ledger.tell(
                                f"{job.name} is started again, {job.fault or 'without a fault'}"
                            )
                            job.start()
                    ledger.faults += 1
                    ledger.tell(strike(chance, jobs))
                await_(lambda: one_in_the_run(jobs), PATIENCE_S, "a job that has made a round")
            events += server.told
            ledger.tell("the coordinator is restarted")
            ledger.account(place, events)
        with coordinator(port) as server:  # quiet at the end: all three make rounds together
            for job in jobs:
                if job.fault and job.fault.what in LIES and not job.ended:
                    ledger.tell(f"{job.name}, {job.fault}, is ended")
                    job.kill()
                job.fault = None

            def all_three() -> bool:
                for job in jobs:
                    if job.ended:
                        job.start()
                return any(
                    all(job.name in line for job in jobs)
                    for line in server.told
                    if "commit" in line
                )

            await_(all_three, PATIENCE_S, "a round of all three")
            for job in jobs:
                job.kill()
        events += server.told
    finally:
        for job in jobs:
            job.kill()
        (place / "events.txt").write_text("\n".join(events))
    ledger.account(place, events)
    return 0


def one_in_the_run(jobs: list[Job]) -> bool:
    """Whether one of them lives and has made a round: else nobody remembers the run when the coordinator is
    restarted, and the next one counts from 1 again. Those that ended are started.
    """
    for job in jobs:
        if job.ended:
            job.start()
        elif any(line.get("verdict") == "commit" for line in job.lines_of_last):
            return True
    return False


def fault(chance: random.Random) -> Fault:
    return Fault(
        chance.choice(sorted(set(POINTS) - {"save"})), chance.randint(1, 12), chance.choice(INSIDE)
    )


def strike(chance: random.Random, jobs: list[Job]) -> str:
    job = chance.choice(jobs)
    what = chance.choice(("kill", "rank", "stop", "nothing"))
    if what == "kill":
        job.kill()
    elif what == "rank":
        job.processes[-1].kill()
        job.processes[-1].join()
    elif what == "stop":
        job.signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 8))
        job.signal(signal.SIGCONT)
    return f"{job.name}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", metavar="DIR", help="keep the jobs' files here (a new directory)")
    parser.add_argument(
        "--ledger", metavar="FILE", default="build/soak.jsonl", help="default: build/soak.jsonl"
    )
    args = parser.parse_args()
    start_server()
    ledger = Ledger(Path(args.ledger))
    ledger.tell(f"{args.minutes:g} minutes, seed {args.seed}")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(args.keep or directory)
        if args.keep:
            place.mkdir(parents=True)
        try:
            return soak(place, 60 * args.minutes, args.seed, ledger)
        except AssertionError as error:
            ledger.tell(f"WRONG: {error}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
