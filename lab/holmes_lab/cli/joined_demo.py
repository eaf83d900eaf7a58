"""Command `holmes demo --joined`: trains one model by two jobs over a WAN.

The demo goes like this:

    1. The jobs "east" and "west" train, and exchange weights in rounds over the link between
       their clusters.
    2. "west" is killed after WEST_STEPS_UNTIL_KILLED steps.
    3. "east" trains alone for EAST_STEPS_ALONE steps.
    4. "west" is started again. It begins with the weights of "east", and both train to the end.

The coordinator of the jobs prints a line for each event. A round that has ended well is a line with
"commit", and with the names of the jobs that took part.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.join.pictures import Incarnation, losses_figure
from holmes_ext.planner.html.page import heading, page, paragraphs, table
from holmes_ext.planner.html.pictures import chart
from holmes_lab.joined import (
    CLUSTERS,
    NODES,
    LabCoordinator,
    LabJob,
    await_,
    coordinator,
    start,
)
from holmes_lab.lab import Lab

#: Value of --holmes-outer, the settings of the rounds in which jobs exchange weights.
OUTER_SETTINGS = "every=16,fragments=4,delay=1,timeout=10"
WEST_STEPS_UNTIL_KILLED = 40
EAST_STEPS_ALONE = 30  # before "west" is restarted
LEAST_STEPS = 2 * WEST_STEPS_UNTIL_KILLED + EAST_STEPS_ALONE  # of "east", for all parts of the demo
_KILLED_JOB = 1  # index of "west" until it is killed; 0 is "east", and 2 is the restarted "west"
_WHAT_IS_REAL = "Step times are emulated; the network, its delay and the losses are real."
COLUMNS = (
    Column("job"),
    Column("from, s", right=True),
    Column("to, s", right=True),
    Column("steps", right=True),
    Column("first loss", right=True),
    Column("last loss", right=True),
)


def run(as_json: bool, steps: int, output: str) -> int:
    """Run the demo, print the table, and write the report.

    Two jobs train one model together. One of them, "west", is killed, and restarted after a while.

    Args:
        as_json: Whether the result is printed as JSON on stdout.
        steps: Training steps of a job that is not killed.
        output: File for the report.

    Returns:
        The exit status: 0 if the restarted job got the weights of the other one, and both jobs exchanged
        weights at least once; else 1.
    """
    if steps < LEAST_STEPS:
        raise HolmesError(f"holmes demo --joined: --steps must be {LEAST_STEPS} or more")
    screen = Screen(stderr=as_json)
    screen.line(
        "Two jobs of two nodes each, byte-level GPT, English text; 40 ms and 20 Mb/s between them."
    )
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "cluster.toml").write_text(CLUSTERS)
        result = _run_jobs(Path(directory), steps, screen)
    rows = [_row(job) for job in result["jobs"]]
    save(output, _report(rows, result), "the report")
    screen.table(COLUMNS, rows)
    for event in result["events"]:
        if not _is_round(event):  # the rounds are only counted
            screen.line(event)
    screen.line(f"{result['rounds']} rounds. {_WHAT_IS_REAL}\nPicture: {output}")
    if as_json:
        print(json.dumps(result))
    return 0 if result["came_back"] and result["rounds_of_both"] else 1


def _run_jobs(directory: Path, steps: int, screen: Screen) -> dict[str, Any]:
    """Run both jobs, kill "west" and restart it, and return the document that --json prints.

    Args:
        directory: Folder with cluster.toml, and for the logs of the jobs.
        steps: Training steps of "east".
        screen: Prints the progress.

    Returns:
        "jobs": name, times and losses of "east", of "west", and of the restarted "west". "events": lines of
        the coordinator. "rounds": number of exchanges, and "rounds_of_both" those in which both jobs took
        part. "came_back": whether the restarted job began with the weights of "east".
    """
    demo_start = time.monotonic()
    jobs: list[dict[str, Any]] = []  # entries of the result, in the order of the starts

    def start_job(lab: Lab, meeting: LabCoordinator, name: str, count: int, seed: int) -> LabJob:
        """Start a training job that exchanges weights with the other, and list it in the result.

        It appends {"job": name, "from": seconds since the beginning of the demo, "losses": []} to
        `jobs`, the list "jobs" in the result of _run_jobs(). record_end() later fills in the end,
        the losses and the step times.

        Args:
            lab: The emulated clusters.
            meeting: The coordinator: the jobs exchange weights through it.
            name: "east" or "west": the name of the job, and of its cluster.
            count: Training steps.
            seed: Seed of the weights and of the text. It also makes the name of the log unique.
        """
        job = start(
            lab,
            name,
            NODES[name],
            flags=meeting.flags(name),
            steps=count,
            seed=seed,
            log=directory / f"{name}{seed}.jsonl",
            environment=meeting.environment,
        )
        start_s = time.monotonic() - demo_start
        jobs.append({"job": name, "from": start_s, "losses": []})
        screen.line(f"{start_s:4.0f} s  {name} starts")
        return job

    def record_end(job: LabJob, index: int) -> None:
        """Add the end and the losses of a job to its entry in the result (start_job()).

        Args:
            job: The job. It has ended or was killed.
            index: Index of its entry in `jobs`.
        """
        lines = job.steps()
        jobs[index] |= {
            "to": time.monotonic() - demo_start,
            "losses": [line["loss"] for line in lines],
            "seconds": [line["seconds"] for line in lines],
        }

    spec = load_spec(directory / "cluster.toml")
    with Lab(spec) as lab, coordinator(lab, OUTER_SETTINGS) as meeting:
        events = meeting.lines
        east = start_job(lab, meeting, "east", count=steps, seed=1)
        west = start_job(lab, meeting, "west", count=steps, seed=2)
        await_(
            lambda: len(west.steps()) >= WEST_STEPS_UNTIL_KILLED,
            200,
            f"west's step {WEST_STEPS_UNTIL_KILLED}",
        )
        west.job.kill()
        record_end(west, _KILLED_JOB)
        screen.line(f"{jobs[_KILLED_JOB]['to']:4.0f} s  west is killed")
        alone_until = len(east.steps()) + EAST_STEPS_ALONE
        await_(lambda: len(east.steps()) >= alone_until, 200, "east's going on alone")
        # The restarted job gets the steps that "east" has left, so that both end together.
        restarted_west = start_job(lab, meeting, "west", count=steps - alone_until, seed=3)
        east.wait()
        record_end(east, 0)
        restarted_west.wait()
        record_end(restarted_west, 2)
    return {
        "jobs": jobs,
        "events": events[1:],  # without the first line (the address)
        "rounds": sum(_is_round(line) for line in events),
        "came_back": any("job west begins, with the weights of east" in line for line in events),
        "rounds_of_both": sum(
            "commit (" in line and "east" in line and "west" in line for line in events
        ),
    }


def _report(rows: list[list[str]], result: dict[str, Any]) -> str:
    """Return the report as one HTML page: the losses over time, the table, and the coordinator's messages.

    The messages of committed rounds are left out, because there are many; the page has their number.

    Args:
        rows: Rows of the table, one for each start of a job.
        result: Document of _run_jobs(). Its "jobs" are "east", the killed "west", and the restarted "west".
    """
    incarnations = [
        Incarnation(
            job=job["job"],
            end=job["to"],  # in seconds since the demo began
            steps=job["seconds"],  # duration of each step
            losses=job["losses"],
            killed=number == _KILLED_JOB,
        )
        for number, job in enumerate(result["jobs"])
    ]
    return page(
        "holmes demo --joined",
        heading("Two jobs that train one model over 40 ms and 20 Mb/s", 1),
        chart(lambda width: losses_figure(incarnations, width), "losses over time"),
        table([column.name for column in COLUMNS], rows),
        paragraphs(
            [
                _WHAT_IS_REAL,
                f"{result['rounds']} rounds, {result['rounds_of_both']} of them of both jobs.",
                *(event for event in result["events"] if not _is_round(event)),
            ]
        ),
    )


def _is_round(event: str) -> bool:
    """Return whether a line of the coordinator says that a round of exchanging weights has ended well."""
    return "commit" in event


def _row(job: dict[str, Any]) -> list[str]:
    """Return the row of a job in the table, with the columns of COLUMNS."""
    losses = job["losses"] or [float("nan")]
    return [
        job["job"],
        f"{job['from']:.0f}",
        f"{job['to']:.0f}",
        str(len(job["losses"])),
        f"{losses[0]:.3f}",
        f"{losses[-1]:.3f}",
    ]
