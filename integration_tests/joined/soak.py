"""A soak of joined jobs: random faults for as long as wanted; every round accounted for. Not in CI.

    PYTHONPATH=tests:. python integration_tests/joined/soak.py --minutes 30 [--seed 1] [--keep DIR]

Three jobs (one of two ranks) on loopback. Every few seconds one of: a job killed, one rank of it killed, a job stopped
for a while, a fault inside the next life (faulty.POINTS), the meeting point restarted. Jobs that died come back. At the
end: all jobs have the same bits of the same version of each fragment, each round that a job began has an end, each
committed round was applied by all of its members that lived. Status 1 where one of that is not so.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from joined_jobs import meeting_point

from integration_tests.joined.faulty import OUTER, POINTS, Fault, Job, await_, check, start_server

INSIDE = ("kill", "kill", "reset", "nan", "far")
PATIENCE_S = 180


def soak(place: Path, seconds: float, seed: int) -> int:
    chance, events, faults = random.Random(seed), [], 0
    begin, end = time.monotonic(), time.monotonic() + seconds
    port, jobs = 0, []
    try:
        while time.monotonic() < end:
            with meeting_point(port) as server:
                port = server.port
                if not jobs:
                    more = {"steps": 10**9, "faulty_lives": 10**9, "outer": f"min=1,limit=8,{OUTER}"}
                    jobs = [Job(place, name, port, ranks=ranks, seed=k, **more)
                            for k, (name, ranks) in enumerate((("east", 1), ("west", 2), ("north", 1)))]
                    for job in jobs:
                        job.start()
                until = min(end, time.monotonic() + chance.uniform(20, 60))
                while time.monotonic() < until:
                    time.sleep(chance.uniform(1, 5))
                    for job in jobs:
                        if job.ended:
                            print(f"{time.monotonic() - begin:6.0f} s  {job.name} is started again", flush=True)
                            job.fault = chance.choice((None, fault(chance)))
                            job.start()
                    faults += 1
                    print(f"{time.monotonic() - begin:6.0f} s  {strike(chance, jobs)}", flush=True)
            events += server.told
            print(f"{time.monotonic() - begin:6.0f} s  the meeting point is restarted", flush=True)
        with meeting_point(port) as server:  # quiet at the end: all three make rounds together

            def all_three() -> bool:
                for job in jobs:
                    job.fault = None
                    if job.ended:
                        job.start()
                return any(all(job.name in line for job in jobs) for line in server.told if "commit" in line)

            await_(all_three, PATIENCE_S, "a round of all three")
            for job in jobs:
                job.kill()
        events += server.told
    finally:
        for job in jobs:
            job.kill()
    (place / "events.txt").write_text("\n".join(events))
    counts = check(place, events)
    print(f"{faults} faults; {counts}")
    return 0


def fault(chance: random.Random) -> Fault:
    return Fault(chance.choice(sorted(set(POINTS) - {"save"})), chance.randint(1, 12), chance.choice(INSIDE))


def strike(chance: random.Random, jobs: list[Job]) -> str:
    job = chance.choice(jobs)
    what = chance.choice(("kill", "rank", "stop", "nothing"))
    if what == "kill":
        job.kill()
    elif what == "rank":
        job.processes[-1].kill()
    elif what == "stop":
        job.signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.5, 8))
        job.signal(signal.SIGCONT)
    return f"{job.name}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", metavar="DIR", help="keep the jobs' files here (a new directory)")
    args = parser.parse_args()
    start_server()
    if args.keep:
        Path(args.keep).mkdir(parents=True)
        return soak(Path(args.keep), 60 * args.minutes, args.seed)
    with tempfile.TemporaryDirectory() as directory:
        return soak(Path(directory), 60 * args.minutes, args.seed)


if __name__ == "__main__":
    sys.exit(main())
