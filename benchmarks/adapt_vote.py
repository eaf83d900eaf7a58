"""Measures how long 1,024 simulated ranks need to agree on a change of the plan.

This is the case "vote" of adapt.py. Each rank is a thread in one of PROCESSES processes on one emulated node.
All use the same TCPStore. The ranks are two pipeline stages of 512, and rank 0 decides as in a real job. The
time runs from when the last rank has sent its measurements until the last rank knows the verdict.

The ranks run on an emulated node because every client of a TCPStore resolves its own address by DNS: on the
machine itself, that takes up to 5 s for each client.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from adapt_simulated import PipelineCase
from harness import Row
from holmes_lab import Lab

from holmes_ext.adapt.deciding import Deciding, change_of
from holmes_ext.adapt.vote import ADOPT_CHANGE, StepBoundary, Vote
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from clusters import site, spec  # noqa: E402
from learning_job import LearningJob  # noqa: E402

WORLD = 1024  # simulated ranks
NODE = 8  # ranks of a simulated node
PROCESSES = 4  # real processes
PATIENCE_S = 60.0  # longest time that a rank waits for another
STEP = 5  # steps that rank 0 has begun when it decides


def reports_of_stages() -> list[dict[str, Any]]:
    """Return a real report of each pipeline stage: the measurements that a rank sends to rank 0.

    A small job of two stages with simulated steps makes them. It runs until its ranks have sent
    their first reports. The ranks of the benchmark send copies, so that they need not train.
    """
    # A message of 262 kb takes 52 ms at 5 Mb/s, so that reports contain times of messages, too.
    case = PipelineCase(stage_layers=(3, 3), layer_s=0.02, rate_mbps=5)
    # patient: each step waits until the ranks' threads have finished their work.
    job = LearningJob(case, patient=True)
    seen: list[dict[str, Any]] = []

    def keep_reports(step: int, reports: list[dict[str, Any]]) -> dict[str, int]:
        """Keep the reports, and propose no change of the plan.

        In a proposal, "at" is the first step with a new plan (0: no change), and "next" is the
        first step of the next measurements.
        """
        seen.extend(reports)
        return {"at": 0, "next": step + 1}

    job.ranks[0].deciding.propose = keep_reports
    job.until(lambda: seen)  # makes steps until there are reports
    job.end()
    reports_by_stage = {}
    for figures in reversed(seen):  # the first report of each stage stays
        reports_by_stage[figures["stage"]] = figures
    return [reports_by_stage[0], reports_by_stage[1]]


def report(stages: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return the report of one simulated rank: that of its stage, with this rank's number.

    Args:
        stages: A report of each pipeline stage.
        rank: Number of the rank. The first half of the ranks is the first stage, and each rank
            exchanges messages with one rank of the other half.
    """
    half = WORLD // 2
    first_stage_rank = rank % half
    second_stage_rank = first_stage_rank + half
    stage_report = stages[rank // half]
    # The times of messages have the key "f SENDER>RECEIVER" for activations (forward) and
    # "b SENDER>RECEIVER" for gradients (backward). The first letter is the direction.
    times_of_direction = {key[0]: times for key, times in stage_report["messages"].items()}
    return {
        **stage_report,
        "rank": rank,
        "messages": {
            f"f {first_stage_rank}>{second_stage_rank}": times_of_direction["f"],
            f"b {second_stage_rank}>{first_stage_rank}": times_of_direction["b"],
        },
    }


def _deciding() -> Deciding:
    """Return the object by which rank 0 decides about changes of the plan.

    It has the plan of a job of WORLD ranks in two clusters. It prints and stores nothing.
    """
    nodes = [
        f"{name} {kind} 100Gb/s {name}[0-{WORLD // NODE // 2 - 1}]"
        for name, kind in (("a", "ib"), ("b", "roce"))
    ]
    # Ethernet is as slow as in reports_of_stages(), so that a change of the plan is worth it.
    clusters = site(*nodes, ethernet="5Mb/s", processes=NODE)
    options = Options()
    plan = build_plan(clusters, Sizes(pipeline=2), options=options)
    assert plan.world_size == WORLD and plan.sizes is not None
    process = Process(
        rank=0,
        world_size=WORLD,
        local_rank=0,
        local_world_size=NODE,
        master_addr="host",
        master_port=1,
        launcher="simulated",
    )
    current = Session(
        options=options, process=process, site=clusters, plan=plan, rank=0, maker=maker
    )
    return Deciding(
        current,
        plan.sizes,
        network_api="sockets",
        tell=lambda line: None,  # would print a line
        put=lambda document: None,  # would store a document in the telemetry
    )


def main() -> None:
    """Let some of the simulated ranks vote on a new plan, and print the times of the vote as JSON.

    Each rank is a thread of this process. It sends rank 0 a report with measured step times. Rank 0
    proposes a new plan, and every rank agrees or not. The verdict is the result of this vote.

    The printed line is [start, end, distinct verdicts]. `start` is the time when the last rank
    began to send its report. At `end`, the last rank knew the verdict. Times are in seconds.
    """
    import torch.distributed as dist

    process = int(os.environ["RANK"])
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    process_store = dist.TCPStore(*address, is_master=process == 0, wait_for_workers=False)
    deciding = _deciding()
    stages = json.loads(sys.argv[1])  # the report of a rank of each stage
    outcomes: list[tuple[float, float, str]] = []  # (start, end, verdict) of each rank

    def run_rank(rank: int) -> None:
        """Vote as a rank, and append its times and the verdict of the vote to `outcomes`.

        The vote begins when all ranks have connected to the store. All ranks send their report to
        rank 0. Rank 0 proposes a change of the plan, and each rank agrees or not. The verdict is
        ADOPT_CHANGE if all agree.

        The function uses two variables of main(): `stages` (the report of a rank of each stage) and
        `deciding` (the object that chooses a change for rank 0).
        """
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        vote = Vote(
            store, "adapt", rank=rank, world=WORLD, stopped=threading.Event(), patience_s=PATIENCE_S
        )
        # A StepBoundary stores a change of the plan that this rank has agreed to make at a later
        # step. When a real job reaches this step, it calls verdict_of(number of the vote) to learn
        # whether all ranks agreed. No steps run here, so verdict_of() is never called.
        boundary = StepBoundary(verdict_of=lambda vote_number: "")
        own_report = report(stages, rank)
        if store.add("ready", 1) == WORLD:
            store.set("go", "")
        store.wait(["go"])
        start = time.monotonic()

        def propose(reports: list[dict[str, Any]]) -> dict[str, Any]:
            """Return rank 0's proposal to change the plan. Only rank 0 calls this.

            Args:
                reports: The measurements of all ranks.

            Returns:
                The new plan, and the step at which all ranks change to it ("at"; 0: no change).
            """
            return deciding.propose(STEP, reports)

        def agree(vote_number: int, proposal: dict[str, Any]) -> bool:
            """Return whether this rank can still change its plan at the proposed step ("at").

            Args:
                vote_number: Number of the vote. This program holds a single one, number 0.
                proposal: The proposal of rank 0, as propose() returns it.
            """
            return boundary.agree(vote_number, at=proposal["at"], change=change_of(proposal))

        _, verdict = vote.run_ballot(0, own_report, propose=propose, agree=agree)
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
    # Process 0 has the server of the store, and must not end before the other processes.
    while process == 0 and process_store.add("over", 0) < PROCESSES:
        time.sleep(0.05)


def rows(name: str, repetitions: int) -> list[Row]:
    """Measure how long WORLD simulated ranks need to agree on a new plan, and return a row.

    The ranks are threads of PROCESSES processes on one emulated node. Each process prints the times
    of its ranks. This function combines them.

    Args:
        name: Name of the case in the results.
        repetitions: Number of votes.
    """
    seconds = []
    command = [sys.executable, __file__, json.dumps(reports_of_stages())]
    with Lab(spec("a ib 10Gb/s a0", ethernet="10Gb/s")) as lab:
        for _ in range(repetitions):
            result = lab.run(command, processes=PROCESSES, preload=("torch",), timeout=120)
            assert result.returncode == 0, result.outputs
            outcomes = [json.loads(lines[-1][1]) for _, lines in sorted(result.lines.items())]
            starts, ends, verdicts_of_processes = zip(*outcomes)
            # All ranks must have received the verdict to change the plan.
            assert all(verdicts == [ADOPT_CHANGE] for verdicts in verdicts_of_processes)
            # From the last rank's report (all others wait for it) to the last rank's verdict.
            seconds.append(max(ends) - max(starts))
    return [
        Row.median(
            name, f"{WORLD} simulated ranks agree", seconds, unit="s", emulated=False, target="<= 1"
        )
    ]


if __name__ == "__main__":
    main()
