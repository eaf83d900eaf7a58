"""1,024 simulated ranks agree on a change: adapt.py's "vote".

A thread of each rank, in PROCESSES processes on one node of the lab, over one TCPStore. Two stages of 512;
rank 0 decides as in a job. The time runs from when the last rank has measured until the last one knows the
verdict. (In the lab, because every client of a TCPStore asks DNS for the name of its own address: up to 5 s
each on this machine itself, minutes for a thousand.)
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness import Row
from holmes_lab import Lab

from holmes_ext.adapt.deciding import Deciding, change_of
from holmes_ext.adapt.vote import TAKE, Boundary, Vote
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from clusters import site, spec  # noqa: E402
from learning_job import LearningJob  # noqa: E402

WORLD, NODE, PROCESSES = 1024, 8, 4
#: Of ranks and rank 0.
PATIENCE_S = 60.0
#: Steps that rank 0 has begun when it decides.
STEP = 5


def measured() -> list[dict[str, Any]]:
    """What a rank of each stage tells after a window."""
    job, seen = LearningJob(((3, 3), 0.02, 5), patient=True), []
    job.ranks[0].deciding.propose = lambda step, reports: (
        seen.extend(reports) or {"at": 0, "next": step + 1}
    )
    job.until(lambda: seen)
    job.end()
    return [next(figures for figures in seen if figures["stage"] == stage) for stage in range(2)]


def report(stages: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    half = WORLD // 2
    first, second = rank % half, rank % half + half
    figures = stages[rank // half]
    messages = {f"f {first}>{second}": "f", f"b {second}>{first}": "b"}
    steps_of = {key[0]: steps for key, steps in figures["messages"].items()}
    return {
        **figures,
        "rank": rank,
        "messages": {key: steps_of[letter] for key, letter in messages.items()},
    }


def _deciding() -> Deciding:
    """Rank 0's."""
    nodes = [
        f"{name} {kind} 100Gb/s {name}[0-{WORLD // NODE // 2 - 1}]"
        for name, kind in (("a", "ib"), ("b", "roce"))
    ]
    where, options = site(*nodes, ethernet="5Mb/s", processes=NODE), Options()
    plan = build_plan(where, Sizes(2), options=options)
    assert plan.world_size == WORLD and plan.sizes is not None
    process = Process(0, WORLD, 0, NODE, "host", 1, "simulated")
    current = Session(options, process, where, plan, 0, maker=maker)
    return Deciding(current, plan.sizes, "sockets", lambda line: None, lambda document: None)


def main() -> None:
    """The ranks of one process: when the last of them had measured, when it knew the verdict, the
    verdicts."""
    import torch.distributed as dist

    process, where = (
        int(os.environ["RANK"]),
        (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
    )
    process_store = dist.TCPStore(*where, is_master=process == 0, wait_for_workers=False)
    deciding, stages, outcomes = (
        _deciding(),
        json.loads(sys.argv[1]),
        list[tuple[float, float, str]](),
    )

    def run_rank(rank: int) -> None:
        store = dist.TCPStore(*where, is_master=False, wait_for_workers=False)
        vote = Vote(store, "adapt", rank, WORLD, threading.Event(), PATIENCE_S)
        boundary, figures = Boundary(lambda number: ""), report(stages, rank)
        if store.add("ready", 1) == WORLD:
            store.set("go", "")
        store.wait(["go"])
        start = time.monotonic()
        _, verdict = vote.round(
            0,
            figures,
            lambda reports: deciding.propose(STEP, reports),
            lambda number, proposal: boundary.agree(number, proposal["at"], change_of(proposal)),
        )
        outcomes.append((start, time.monotonic(), verdict))

    count = WORLD // PROCESSES
    threads = [
        threading.Thread(target=run_rank, args=(process * count + number,))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts, ends, verdicts = zip(*outcomes)
    print(json.dumps([max(starts), max(ends), sorted(set(verdicts))]), flush=True)
    process_store.add("over", 1)
    while process == 0 and process_store.add("over", 0) < PROCESSES:  # the store ends with it
        time.sleep(0.05)


def rows(name: str, repetitions: int) -> list[Row]:
    seconds, command = [], [sys.executable, __file__, json.dumps(measured())]
    with Lab(spec("a ib 10Gb/s a0", ethernet="10Gb/s")) as lab:
        for _ in range(repetitions):
            result = lab.run(command, processes=PROCESSES, preload=("torch",), timeout=120)
            assert result.returncode == 0, result.outputs
            outcomes = [json.loads(lines[-1][1]) for _, lines in sorted(result.lines.items())]
            starts, ends, verdicts = zip(*outcomes)
            assert all(distinct == [TAKE] for distinct in verdicts), verdicts
            seconds.append(max(ends) - max(starts))
    return [Row.median(name, f"{WORLD} simulated ranks agree", seconds, "s", False, "<= 1")]


if __name__ == "__main__":
    main()
