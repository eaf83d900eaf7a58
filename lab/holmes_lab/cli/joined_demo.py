"""Command `holmes demo --joined`: trains one model by two jobs over a WAN.

One of the jobs is killed and restarted.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.spec import load_spec
from holmes_ext.document import save
from holmes_ext.errors import HolmesError
from holmes_ext.join.pictures import Incarnation, losses_figure
from holmes_ext.planner.html.page import heading, page, paragraphs, picture, table
from holmes_ext.planner.html.pictures import svg
from holmes_lab.joined import CLUSTERS, NODES, LabJob, await_, coordinator, join_flags, start
from holmes_lab.lab import Lab

OUTER = "every=16,fragments=4,delay=1,timeout=10"  # value of --holmes-outer
KILLED_AFTER = 40  # steps of the job "west" until it is killed
ALONE = 30  # steps that the job "east" makes alone before "west" is restarted
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

    Args:
        as_json: Whether the result is printed as JSON on stdout.
        steps: Training steps of a job that is not killed.
        output: File for the report.

    Returns:
        The exit status: 1 if the restarted job did not get the weights of the other one, or if there was no
        exchange of both jobs; else 0.
    """
    if steps < 2 * KILLED_AFTER + ALONE:
        raise HolmesError(
            f"holmes demo --joined: --steps must be {2 * KILLED_AFTER + ALONE} or more"
        )
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
        if "commit" not in event:
            screen.line(event)
    screen.line(
        f"{result['rounds']} rounds. Step times are emulated; the network, its delay and the losses "
        f"are real.\nPicture: {output}"
    )
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
    begin = time.monotonic()
    jobs: list[dict[str, Any]] = []

    def begin_job(name: str, count: int, number: int) -> LabJob:
        """Start a job, and append its entry to `jobs`.

        Args:
            count: Training steps.
            number: Seed, which also makes the name of the log unique.
        """
        flags = join_flags(name, where, OUTER)
        job = start(
            lab,
            name,
            NODES[name],
            flags=flags,
            steps=count,
            seed=number,
            log=directory / f"{name}{number}.jsonl",
        )
        jobs.append({"job": name, "from": time.monotonic() - begin, "losses": []})
        screen.line(f"{jobs[-1]['from']:4.0f} s  {name} starts")
        return job

    def record_end(job: LabJob, number: int) -> None:
        """Add the end and the losses of a job to its entry in `jobs`, which has the index `number`."""
        lines = job.steps()
        jobs[number] |= {
            "to": time.monotonic() - begin,
            "losses": [line["loss"] for line in lines],
            "seconds": [line["seconds"] for line in lines],
        }

    with Lab(load_spec(directory / "cluster.toml")) as lab, coordinator(lab) as (where, events):
        east, west = begin_job("east", steps, 1), begin_job("west", steps, 2)
        await_(lambda: len(west.steps()) >= KILLED_AFTER, 200, f"west's step {KILLED_AFTER}")
        west.job.kill()
        record_end(west, 1)
        screen.line(f"{jobs[1]['to']:4.0f} s  west is killed")
        reached = len(east.steps())
        await_(lambda: len(east.steps()) >= reached + ALONE, 200, "east's going on alone")
        again = begin_job("west", steps - reached - ALONE, 3)
        east.wait()
        record_end(east, 0)
        again.wait()
        record_end(again, 2)
    return {
        "jobs": jobs,
        "events": events[1:],  # without the first line, which names the address
        "rounds": sum("commit" in line for line in events),
        "came_back": any("job west begins, with the weights of east" in line for line in events),
        "rounds_of_both": sum(
            "commit (" in line and "east" in line and "west" in line for line in events
        ),
    }


def _report(rows: list[list[str]], result: dict[str, Any]) -> str:
    """Return the report as one HTML page: the losses over time, the table, and the coordinator's messages."""
    incarnations = [
        Incarnation(job["job"], job["to"], job["seconds"], job["losses"], number == 1)
        for number, job in enumerate(result["jobs"])
    ]
    return page(
        "holmes demo --joined",
        heading("Two jobs that train one model over 40 ms and 20 Mb/s", 1),
        picture(svg(losses_figure(incarnations)), "losses over time"),
        table([column.name for column in COLUMNS], rows),
        paragraphs(
            [
                f"{result['rounds']} rounds, {result['rounds_of_both']} of them of both jobs.",
                *(event for event in result["events"] if "commit" not in event),
            ]
        ),
    )


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
