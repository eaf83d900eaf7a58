"""`holmes demo --joined`: two jobs that train one model over a WAN; one of them is killed and comes back."""

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

OUTER = "every=16,fragments=4,delay=1,timeout=10"
#: Steps of west until it is killed, and that east makes before west is started again.
KILLED_AFTER, ALONE = 40, 30
COLUMNS = (
    Column("job"),
    Column("from, s", right=True),
    Column("to, s", right=True),
    Column("steps", right=True),
    Column("first loss", right=True),
    Column("last loss", right=True),
)


def run(as_json: bool, steps: int, output: str) -> int:
    """The table, and the picture in `output`; 1 when a job did not go on, or did not take the weights."""
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
        result = _lived(Path(directory), steps, screen)
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


def _lived(directory: Path, steps: int, screen: Screen) -> dict[str, Any]:
    begin = time.monotonic()
    jobs: list[dict[str, Any]] = []

    def begin_job(name: str, count: int, number: int) -> LabJob:
        flags = join_flags(name, where, OUTER)
        job = start(
            lab, name, NODES[name], flags, count, number, directory / f"{name}{number}.jsonl"
        )
        jobs.append({"job": name, "from": time.monotonic() - begin, "losses": []})
        screen.line(f"{jobs[-1]['from']:4.0f} s  {name} starts")
        return job

    def ended(job: LabJob, number: int) -> None:
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
        ended(west, 1)
        screen.line(f"{jobs[1]['to']:4.0f} s  west is killed")
        reached = len(east.steps())
        await_(lambda: len(east.steps()) >= reached + ALONE, 200, "east's going on alone")
        again = begin_job("west", steps - reached - ALONE, 3)
        east.wait()
        ended(east, 0)
        again.wait()
        ended(again, 2)
    return {
        "jobs": jobs,
        "events": events[1:],
        "rounds": sum("commit" in line for line in events),
        "came_back": any("job west begins, with the weights of east" in line for line in events),
        "rounds_of_both": sum(
            "commit (" in line and "east" in line and "west" in line for line in events
        ),
    }


def _report(rows: list[list[str]], result: dict[str, Any]) -> str:
    """One HTML file: losses of all jobs over time, the table, what the coordinator said."""
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
    losses = job["losses"] or [float("nan")]
    return [
        job["job"],
        f"{job['from']:.0f}",
        f"{job['to']:.0f}",
        str(len(job["losses"])),
        f"{losses[0]:.3f}",
        f"{losses[-1]:.3f}",
    ]
