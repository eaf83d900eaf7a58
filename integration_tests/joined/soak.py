"""Soak test of joined jobs: random faults for as long as wanted. It does not run in CI.

    make soak [MINUTES=30] [SEED=1]
    PYTHONPATH=tests:. python integration_tests/joined/soak.py --minutes 30 [--seed 1] [--jobs 3]
        [--only STRIKE,...] [--keep DIR] [--ledger FILE]

Three jobs (one of two ranks) or more train on loopback. Each is invited, as from another host (`holmes join
invite`): it redeems its invitation, keeps its certificate in a folder of its own, and all connections use
mutual TLS. Every few seconds one of these happens:

    kill, rank   a job is killed, or one of its ranks
    stop         a job is stopped for a while
    cut          two jobs cannot connect to each other for a while; both reach the coordinator
    liar         a job is started again as a liar (LIES), if there is none
    revoke       a job is revoked (`holmes join revoke`). Its connections must end, and its certificate is
                 refused. Later the job is invited again, under the same name or another
    names        a member with one invitation runs under three names, all liars, to have three votes
                 (members.Crowd). Later it is revoked
    nothing

Jobs that died are started again, some with a fault or lie (faulty.POINTS, LIES). The coordinator is restarted
now and then.

At the end, liars are ended, links are mended, and all jobs make a round. Then all jobs must have the same
bits in the same version of each fragment, each committed round must have been applied by all of its members
that lived, each void round must have a reason, and no line of the coordinators may break a promise about
members (accounting.py). Otherwise the exit status is 1. The last lines account for every round. The ledger
is a file of JSON lines with the faults, and with the counts whenever the coordinator is restarted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from joined_jobs import coordinator
from waiting import await_

from integration_tests.joined.accounting import account_of, members_of
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
from integration_tests.joined.members import CROWD, WAYS, Crowd, Members

INSIDE = ("kill", "kill", "reset", "nan", "far", *LIES)
NAMES = ("east", "west", "north", "south", "centre", "coast", "hills", "lake")
STRIKES = ("kill", "rank", "stop", "cut", "liar", "revoke", "names", "nothing")
#: Seconds for which two jobs are cut off from each other, at least and at most.
CUT_S = (3.0, 15.0)
#: Seconds until a revoked job is invited again, at least and at most.
AWAY_S = (4.0, 20.0)
#: Share of the revoked jobs that are killed, and started again with the old certificate.
KILLED_SHARE = 0.5
#: Seconds that a member runs under several names, at least and at most.
CROWD_S = (10.0, 30.0)
CROWD_LIES = ("flip", "accuse")
PATIENCE_S = 180
_RECONNECTED = re.compile(r"is here \(.*, (in|late)\)")


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


def start_jobs(place: Path, port: int, count: int, members: Members) -> list[Job]:
    """Invite and start jobs, one of them of two ranks, that train without end."""
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
        jobs.append(members.invite(job).start())
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


class Soak:
    """Jobs under random faults, and what the faults need.

    Args:
        place: Folder for the files of the jobs.
        seed: Of the random faults.
        ledger: Record of the faults.
        strikes: Names of the faults that may happen.
    """

    def __init__(self, place: Path, seed: int, ledger: Ledger, strikes: tuple[str, ...]):
        self._place = place
        self._chance = random.Random(seed)
        self._ledger = ledger
        self._strikes = strikes
        self._cut_pairs = CutPairs(place)
        self.jobs: list[Job] = []
        self._revoked: dict[str, float] = {}  # job -> time.monotonic() of its next invitation
        self._crowd: Crowd | None = None
        self._end_of_crowd = 0.0  # time.monotonic()
        self._names = 0  # that crowds have used
        self._server: Any = None  # the current coordinator
        self._coordinators: list[list[str]] = []  # lines that each coordinator printed

    @property
    def _events(self) -> list[str]:
        """Return the lines of all coordinators."""
        return [line for lines in self._coordinators for line in lines]

    def run(self, seconds: float, job_count: int) -> None:
        """Run the jobs with random faults for this time, and check the logs.

        Raises:
            AssertionError: The logs of the jobs do not agree, a round is void without a reason, or a promise
                about members is broken.
        """
        end = time.monotonic() + seconds
        port = 0
        try:
            while time.monotonic() < end:
                with self._serve(port) as port:
                    if not self.jobs:
                        self._members = Members(self._place, port)
                        self.jobs = start_jobs(self._place, port, job_count, self._members)
                    self._strike_until(min(end, time.monotonic() + self._chance.uniform(20, 60)))
                    await_(self._one_in_the_run, PATIENCE_S, "a job that has made a round")
                    if self._crowd is not None:
                        self._crowd.kill_newcomers()
                self._ledger.tell("the coordinator is restarted")
                self._ledger.account(self._place, self._events)
            self._cut_pairs.mend(everything=True)
            with self._serve(port):
                self._make_a_round_of_all()
        finally:
            self._kill_all()
            self._write_events()
            account = account_of(self._coordinators, names_in(self._place))
            for line in account.lines:
                self._ledger.tell(line)
            for problem in (*account.unexplained, *account.broken_promises):
                self._ledger.tell(f"WRONG: {problem}")
        self._ledger.account(self._place, self._events)
        assert not account.unexplained, f"{len(account.unexplained)} void rounds without a reason"
        assert not account.broken_promises, f"{len(account.broken_promises)} broken promises"

    def _write_events(self) -> None:
        """Write the lines of all coordinators to a file, with an empty line between two coordinators."""
        texts = ["\n".join(lines) for lines in self._coordinators]
        (self._place / "events.txt").write_text("\n\n".join(texts))

    @contextlib.contextmanager
    def _serve(self, port: int) -> Iterator[int]:
        """Run a coordinator, and provide its port."""
        with coordinator(port) as server:
            self._server = server
            self._coordinators.append(server.told)
            if self.jobs:
                await_(self._one_is_back, PATIENCE_S, "a job that has reconnected")
            yield server.port

    def _one_is_back(self) -> bool:
        """Return whether a job has reconnected after a restart of the coordinator.

        A job that is started before that may begin another run: it joins first, and may train alone (min=1).
        """
        return any(_RECONNECTED.search(line) for line in self._server.told)

    def _strike_until(self, until: float) -> None:
        while time.monotonic() < until:
            time.sleep(self._chance.uniform(1, 5))
            self._cut_pairs.mend()
            self._mend_membership()
            self._restart_ended()
            self._ledger.faults += 1
            what = self._chance.choice(self._strikes)
            self._ledger.tell(self._strike(what, self._chance.choice(self.jobs)), strike=what)

    def _kill_all(self) -> None:
        for job in self.jobs:
            job.kill()
        if self._crowd is not None:
            self._crowd.kill()

    def _restart_ended(self) -> None:
        """Start the jobs that have ended, each with a random fault or without.

        A revoked job is started with its old certificate, so that it ends again: it is refused.
        """
        for job in self.jobs:
            if not job.ended:
                continue
            job.fault = None
            if job.name not in self._revoked:
                job.fault = self._chance.choice((None, fault(self._chance)))
            self._ledger.tell(f"{job.name} is started again, {job.fault or 'without a fault'}")
            job.start()
        if self._crowd is not None:
            self._crowd.restart_ended()

    def _mend_membership(self, everything: bool = False) -> None:
        """End the crowd, and invite revoked jobs again, if it is time; or in any case."""
        now = time.monotonic()
        if self._crowd is not None and (everything or now > self._end_of_crowd):
            self._crowd.end(self._server)
            self._crowd = None
            self._ledger.tell("the member with several names is revoked, and ended")
        for index, job in enumerate(self.jobs):
            if job.name not in self._revoked or not (everything or now > self._revoked[job.name]):
                continue
            del self._revoked[job.name]
            job.kill()
            name = self._chance.choice((job.name, self._next_name(job)))
            self.jobs[index] = replace(job, name=name, fault=None, processes=[])
            self._members.invite(self.jobs[index]).start()
            self._ledger.tell(f"{job.name} is invited again, as {name}")

    def _next_name(self, job: Job) -> str:
        """Return another name for the holder of a job."""
        base, _, number = job.name.partition("-")
        return f"{base}-{int(number or 1) + 1}"

    def _make_a_round_of_all(self) -> None:
        """End the liars, wait until all jobs have made a round together, and kill the jobs."""
        self._mend_membership(everything=True)
        for job in self.jobs:
            if job.fault and job.fault.what in LIES and not job.ended:
                self._ledger.tell(f"{job.name}, {job.fault}, is ended")
                job.kill()
            job.fault = None
        names = {job.name for job in self.jobs}

        def all_have_committed() -> bool:
            for job in self.jobs:
                if job.ended:
                    job.start()
            return any(names <= members_of(line) for line in self._server.told)

        await_(all_have_committed, PATIENCE_S, "a round of all jobs")
        self._kill_all()

    def _one_in_the_run(self) -> bool:
        """Return whether a job that will not die by a fault has made a round; start the jobs that have ended.

        Only such a job remembers the number of rounds while the coordinator is restarted. If all jobs died
        meanwhile, the next coordinator would count from 1 again, and check() would compare different rounds.
        """
        jobs = [job for job in self.jobs if job.name not in self._revoked]
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

    def _strike(self, what: str, job: Job) -> str:
        """Do a strike, to this job if it concerns one, and return a line about it."""
        match what:
            case "kill":
                job.kill()
            case "rank":
                job.processes[-1].kill()
                job.processes[-1].join()
            case "stop":
                job.signal(signal.SIGSTOP)
                time.sleep(self._chance.uniform(0.5, 8))
                job.signal(signal.SIGCONT)
            case "cut":
                other = self._chance.choice([other for other in self.jobs if other is not job])
                self._cut_pairs.add((job.name, other.name), self._chance.uniform(*CUT_S))
                return f"{job.name}: cut from {other.name}"
            case "liar":
                return self._start_liar(job)
            case "revoke":
                return self._revoke(job)
            case "names":
                return self._start_crowd()
        return f"{job.name}: {what}"

    def _start_liar(self, job: Job) -> str:
        if any(one.fault and one.fault.what in LIES for one in self.jobs):
            return "nothing: there is a liar already"
        if job.name in self._revoked:
            return f"nothing: {job.name} is revoked"
        job.kill()
        job.fault = Fault("ready", 1, self._chance.choice(LIES))
        job.start()
        return f"{job.name} is started again, {job.fault}"

    def _revoke(self, job: Job) -> str:
        if self._revoked:
            return "nothing: there is a revoked job already"
        self._members.revoke([job], self._server)
        self._revoked[job.name] = time.monotonic() + self._chance.uniform(*AWAY_S)
        if self._chance.random() < KILLED_SHARE:
            job.kill()  # _restart_ended() starts it with its old certificate
        return f"{job.name} is revoked"

    def _start_crowd(self) -> str:
        if self._crowd is not None:
            return "nothing: there is a member with several names already"
        names = [f"crowd-{self._names + number}" for number in range(1, CROWD + 1)]
        self._names += CROWD
        way, lie = self._chance.choice(WAYS), self._chance.choice(CROWD_LIES)
        pattern = replace(self.jobs[0], processes=[])
        self._crowd = Crowd(self._members, pattern, names, way, lie).start()
        self._end_of_crowd = time.monotonic() + self._chance.uniform(*CROWD_S)
        return f"{', '.join(names)} are started: one member, {way}, {lie}"


def names_in(place: Path) -> list[str]:
    """Return the names of all jobs that have written logs."""
    return sorted({file.name.split(".")[0] for file in place.glob("*.0.jsonl")})


def fault(chance: random.Random) -> Fault:
    """Draw a random fault for the next start of a job."""
    point = chance.choice(sorted(set(POINTS) - {"save"}))
    nth = chance.randint(1, 12)
    return Fault(point, nth, chance.choice(INSIDE))


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
            Soak(place, args.seed, ledger, strikes).run(60 * args.minutes, args.jobs)
        except AssertionError as error:
            ledger.tell(f"WRONG: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
