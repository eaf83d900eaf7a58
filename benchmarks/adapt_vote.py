"""1,024 simulated ranks agree on a change: adapt.py's "vote".

A thread of each rank, in PROCESSES processes, over one TCPStore on this machine. Two stages of 512; rank 0
decides as in a job. Timed is from when the last rank has measured until the last one knows the verdict.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness import Row

from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.adapt.deciding import Deciding, change_of
from holmes_ext.runtime.adapt.vote import TAKE, Boundary, Vote
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from clusters import site  # noqa: E402
from learning_job import LearningJob  # noqa: E402

WORLD, NODE, PROCESSES = 1024, 8, 4
#: Of the store. A client asks for the name of its own address: 127.0.0.1, mapped to IPv6, takes DNS a second.
HOST = "localhost"
#: Of ranks and rank 0.
PATIENCE_S = 60.0
#: Steps that rank 0 has begun when it decides.
STEP = 5


def measured() -> list[dict[str, Any]]:
    """What a rank of each stage tells after a window."""
    job, found = LearningJob(((3, 3), 0.02, 5), patient=True), []
    job.ranks[0].deciding.propose = lambda step, told: found.extend(told) or {"at": 0, "next": step + 1}
    job.until(lambda: found)
    job.end()
    return [next(one for one in found if one["stage"] == stage) for stage in range(2)]


def report(stages: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    half = WORLD // 2
    first, second = rank % half, rank % half + half
    told = stages[rank // half]
    messages = {f"f {first}>{second}": "f", f"b {second}>{first}": "b"}
    of = {way[0]: steps for way, steps in told["messages"].items()}
    return {**told, "rank": rank, "messages": {way: of[letter] for way, letter in messages.items()}}


def _deciding() -> Deciding:
    """Rank 0's."""
    nodes = [f"{name} {kind} 100Gb/s {name}[0-{WORLD // NODE // 2 - 1}]"
             for name, kind in (("a", "ib"), ("b", "roce"))]
    where, options = site(*nodes, ethernet="5Mb/s", processes=NODE), Options()
    plan = build_plan(where, Sizes(2), options=options)
    assert plan.world_size == WORLD and plan.sizes is not None
    process = Process(0, WORLD, 0, NODE, "host", 1, "simulated")
    current = Session(options, process, where, plan, 0)
    return Deciding(current, plan.sizes, "sockets", lambda line: None, lambda document: None)


def _ranks(port: int, ranks: range, stages: list[dict[str, Any]], done: Any) -> None:
    """Those of one process; what they found, by way of the queue `done`."""
    import torch.distributed as dist

    deciding = _deciding()

    def one(rank: int) -> None:
        store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        vote = Vote(store, "adapt", rank, WORLD, threading.Event(), PATIENCE_S)
        boundary, told = Boundary(lambda number: ""), report(stages, rank)
        store.add("ready", 1)
        store.wait(["go"])
        start = time.monotonic()
        _, verdict = vote.round(
            0, told, lambda reports: deciding.propose(STEP, reports),
            lambda number, proposal: boundary.agree(number, proposal["at"], change_of(proposal)))
        done.put((start, time.monotonic(), verdict))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:  # the queue ends with this function
        thread.join()


def rows(name: str, repetitions: int) -> list[Row]:
    import torch.distributed as dist

    context, seconds, stages = multiprocessing.get_context("spawn"), [], measured()
    for _ in range(repetitions):
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        done, each = context.Queue(), WORLD // PROCESSES
        parts = [range(first, first + each) for first in range(0, WORLD, each)]
        processes = [context.Process(target=_ranks, args=(store.port, part, stages, done)) for part in parts]
        for process in processes:
            process.start()
        while store.add("ready", 0) < WORLD:
            time.sleep(0.05)
        store.set("go", "")
        told = [done.get(timeout=300) for _ in range(WORLD)]
        assert {verdict for _, _, verdict in told} == {TAKE}
        seconds.append(max(end for _, end, _ in told) - max(start for start, _, _ in told))
        for process in processes:
            process.join()
    return [Row.median(name, f"{WORLD} simulated ranks agree", seconds, "s", False, "<= 1")]
