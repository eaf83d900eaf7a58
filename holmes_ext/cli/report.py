"""Command `holmes report`: summarizes step times and communication from telemetry files.

--holmes-telemetry DIR makes each rank of a job write such a file. holmes_ext/report reads the files
and computes the figures; this module prints them as tables.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any, NamedTuple

from holmes_ext import extensions
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.plan.profile import load_profile
from holmes_ext.report.figures import JoinedRow, Summary, summarize
from holmes_ext.report.files import Run, load
from holmes_ext.report.trace import chosen_step, trace
from holmes_ext.units import format_rate, format_seconds
from holmes_ext.words import counted, some_of

#: Columns of the table of groups.
GROUPS = (
    Column("groups"),
    Column("where"),
    Column("ranks", right=True, drop=4),
    Column("operations", right=True, drop=5),
    Column("MB sent", right=True, drop=1),
    Column("under way, s", right=True, drop=2),
    Column("exposed, s", right=True),
    Column("of the step", right=True, drop=3),
    Column("achieved", right=True),
    Column("of", right=True),
)
#: Columns of the table of links between clusters.
PAIRS = (
    Column("from"),
    Column("to"),
    Column("MB", right=True, drop=1),
    Column("exposed, s", right=True),
    Column("achieved", right=True),
    Column("of", right=True),
    Column("round trip", right=True),
)
#: Columns of the table of plans that the job used.
PLANS = (
    Column("from step"),
    Column("micro-batches in flight"),
    Column("steps", right=True),
    Column("predicted, s", right=True),
    Column("measured, s", right=True),
)
#: Columns of the table of ranks.
RANKS = (
    Column("rank"),
    Column("node"),
    Column("cluster"),
    *(Column(name, right=True) for name in ("step, s", "exposed, s", "its own, s")),
)
#: Largest number of ranks in the table.
LISTED = 16
#: A link with a higher rate in bits/s has no limit.
_UNLIMITED_BPS = 1e18


class ReportTable(NamedTuple):
    """Table of a report."""

    title: str
    columns: tuple[Column, ...]
    rows: list[list[str]]


def add_parser(subparsers: Any) -> None:
    """Add the command `report` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "report",
        help="summarize a job's step times, bandwidth, exposed communication and slowest rank",
        description="Summarize the files that --holmes-telemetry DIR wrote, those of all nodes together. "
        "Exposed: seconds in which the program was blocked on communication. Achieved: bytes "
        "sent, divided by the time in which all of a group's ranks took part.",
    )
    parser.add_argument(
        "directory", metavar="DIR", help="folder of --holmes-telemetry, or of one run in it"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write one step of every rank for chrome://tracing or ui.perfetto.dev",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="show step N in --trace and --html (default: the last traced step)",
    )
    parser.add_argument(
        "--write-model",
        metavar="FILE",
        help="write the measured times for `holmes plan --profile`",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with the tables and a picture of one step"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, write the files that the options name, and return 0.

    Raises:
        HolmesError: a file cannot be read or written, or an option does not apply.
    """
    job = load(args.directory)
    summary = summarize(job)
    if args.step is not None and not (args.trace or args.html):
        raise HolmesError(
            "holmes report: --step chooses what --trace or --html shows; give one of them"
        )
    if args.trace:
        save(args.trace, json.dumps(trace(job, chosen_step(job, args.step))) + "\n", "the trace")
    model_line = _write_measured_model(job, args.write_model) if args.write_model else ""
    if args.html:
        page = extensions.contributed("report_pages", "html")
        save(args.html, page(job, summary, chosen_step(job, args.step)), "the report")
    if args.json:
        document = {
            "version": 1,
            **asdict(summary),
            "slowest_rank": summary.slowest.rank,
            "notes": job.notes,
            "done": asdict(job.followed_plan),
        }
        print(json.dumps(document))
        return 0
    screen = Screen()
    _show_report(screen, job, summary)
    for option, file in (("trace", args.trace), ("picture", args.html), ("model", model_line)):
        if file:
            screen.line(f"{option}: {file}")
    return 0


def _show_report(screen: Screen, job: Run, summary: Summary) -> None:
    """Print the notes, tables and verdict of a job's report.

    Args:
        screen: Output.
        job: Telemetry of all ranks of the job.
        summary: The figures that were computed from the telemetry.
    """
    for note in job.notes:
        screen.line(f"note: {note}")
    for text in job.followed_plan.differences:
        screen.line(f"not as planned: {text}")
    screen.line(headline(summary))
    if summary.joined is not None:
        screen.line(joined_line(summary.joined))
    for table in tables(summary):
        screen.line()
        screen.table(table.columns, table.rows)
    screen.line("\n" + verdict(summary))


def headline(summary: Summary) -> str:
    """Return the first line of a report: ranks, steps, step time, and tokens/s if known."""
    fastest_s, slowest_s = summary.spread
    line = (
        f"run {summary.run}: {counted(summary.world, 'rank')}, {counted(summary.steps, 'step')} of "
        f"{summary.step_s:.4f} s (median; {fastest_s:.4f} to {slowest_s:.4f})"
    )
    if summary.tokens_per_second:
        line += f", {summary.tokens_per_second:,.0f} tokens/s"
    return line


def joined_line(row: JoinedRow) -> str:
    """Return the line about a job's outer rounds.

    Several jobs may train one model together (--holmes-join): at intervals of several steps, they
    exchange pseudo-gradients in an outer round, as in DiLoCo.

    Args:
        row: Figures of the rounds. `counted`: rounds that all jobs committed: they then applied the
            aggregate (called "the sum" in the line) of their pseudo-gradients. `drift`: distance of
            this job's pseudo-gradient from the aggregate, as a share of the aggregate's norm; None
            if no round has a drift.
    """
    line = (
        f"joined: {counted(row.rounds, 'round')}, {row.counted} of them counted; "
        f"{row.sent / 1e6:.3f} MB sent in a round, {row.seconds:.3f} s under way, "
        f"{row.exposed_s:.4f} s exposed (medians)"
    )
    if row.drift is not None:
        line += f"; drift {row.drift:.2f} of the sum"
    return line


def tables(summary: Summary) -> list[ReportTable]:
    """Return the tables of a report, without tables that have no rows."""
    every = [
        ReportTable("Plans", PLANS, _plan_cells(summary)),
        ReportTable(
            "Groups: means of a step on a rank that has them", GROUPS, _group_cells(summary)
        ),
        ReportTable("Between clusters", PAIRS, _pair_cells(summary)),
        ReportTable("Ranks", RANKS, _rank_cells(summary)),
    ]
    return [table for table in every if table.rows]


def _group_cells(summary: Summary) -> list[list[str]]:
    """Return the rows of the table GROUPS: one for each kind of group and fabric."""
    rows = []
    for row in summary.rows:
        share = "-"
        if summary.step_s:
            share = f"{100 * row.exposed_s / summary.step_s:.1f} %"
        rows.append(
            [
                row.kind,
                f"{row.where}, {row.fabric}",
                str(row.ranks),
                f"{row.operations:.1f}",
                f"{row.sent / 1e6:.3f}",
                f"{row.busy_s:.4f}",
                f"{row.exposed_s:.4f}",
                share,
                format_rate(row.achieved_bps) if row.achieved_bps else "-",
                # Groups inside one node have no network.
                format_rate(row.configured_bps) if row.configured_bps else "memory",
            ]
        )
    return rows


def _pair_cells(summary: Summary) -> list[list[str]]:
    """Return the rows of the table PAIRS: one for each direction between two clusters."""
    rows = []
    for row in summary.pairs:
        # Without a limit of its own, the link is as fast as the NICs at its ends. The plan has 0 or
        # a huge number for such a link.
        has_limit = 0 < row.configured_bps < _UNLIMITED_BPS
        rows.append(
            [
                row.source,
                row.target,
                f"{row.sent / 1e6:.3f}",
                f"{row.exposed_s:.4f}",
                format_rate(row.achieved_bps) if row.achieved_bps else "-",
                format_rate(row.configured_bps) if has_limit else "NICs",
                format_seconds(row.round_trip_s) if row.round_trip_s else "-",
            ]
        )
    return rows


def _plan_cells(summary: Summary) -> list[list[str]]:
    """Return the rows of the table PLANS: one for each plan that the job used, none if it never changed."""
    rows = []
    for row in summary.plans:
        rows.append(
            [
                str(row.step),
                row.name,
                str(row.steps),
                "-" if row.predicted_s is None else f"{row.predicted_s:.4f}",
                f"{row.step_s:.4f}" if row.step_s else "-",
            ]
        )
    return rows


def _write_measured_model(job: Run, path: str) -> str:
    """Write the last measured times of pipeline stages to a file, and return a line about the file.

    The file also has the time of a message from each stage to the next (stage link). A message is
    timed only if a rank waited for it. For stage links without such a message, the file has the
    time that the plan predicts.

    Args:
        job: Telemetry of all ranks of the job.
        path: The file. It has the format of a profile, for `holmes plan --profile`.

    Raises:
        HolmesError: the job has measured no times, or the file cannot be written.
    """
    # rank.model: the measured times of all stages in the format of the file, not the trained model.
    # Only rank 0 writes it to its telemetry, and only if all ranks have measured times.
    ranks_with_profile = [rank for rank in job.ranks if rank.model is not None]
    if not ranks_with_profile:
        raise HolmesError(
            f"holmes report --write-model {path}: the job has measured none; it takes some "
            "steps of a pipeline of DeepSpeed or megatron-core with --holmes-adapt on (the "
            "default) or report"
        )
    rank = ranks_with_profile[0]
    save(path, json.dumps(rank.model, indent=1) + "\n", "the model")
    # The last stage has no link to a next stage. `stage_links` are the numbers of the stages whose
    # link was measured.
    stage_link_count = len(load_profile(path).stages) - 1
    links_not_measured = sorted(set(range(stage_link_count)) - set(rank.stage_links))
    line = f"{path}: stages and stage links as measured"
    if links_not_measured:
        line += (
            f"; no rank waited for the stage links after stages {some_of(links_not_measured)}: those times "
            "are the plan's"
        )
    return f"{line}; `holmes plan --profile {path}` takes it"


def _rank_cells(summary: Summary) -> list[list[str]]:
    """Return the rows of the table RANKS: the ranks with the longest computation first."""
    ordered = sorted(summary.ranks, key=lambda row: (-row.own_s, row.rank))
    rows = []
    for row in ordered[:LISTED]:
        seconds = [f"{value:.4f}" for value in (row.step_s, row.exposed_s, row.own_s)]
        rows.append([str(row.rank), row.node, row.cluster, *seconds])
    return rows


def verdict(summary: Summary) -> str:
    """Return the last line of a report: the slowest rank, and the network that costs most time.

    A "slow" network carries far less than its configured rate. The line names such a network if it
    costs more time in a step than waiting for the slowest rank does. If there is none, the line
    names the network that ranks waited for longest.
    """
    rank = summary.slowest  # the rank whose own work takes longest
    line = (
        f"slowest: rank {rank.rank} on {rank.node} ({rank.cluster}): {rank.own_s:.4f} s of its step "
        f"are its own work"
    )
    slow = summary.slow_link  # None if no network is slow, or if the slowest rank costs more time
    if slow is not None:
        # slow.where: "inside" or "across" clusters.
        return (
            f"{line}; a slow network costs more: {slow.kind} groups {slow.where} clusters on "
            f"{slow.fabric} carry {format_rate(slow.achieved_bps)} of {format_rate(slow.configured_bps)}, "
            f"{slow.exposed_s:.4f} s a step are waited for (rank {slow.most_exposed} waits longest)"
        )
    line += ", the others wait for it"
    if not summary.rows:
        return line
    worst = summary.rows[0]  # rows are sorted by exposed seconds
    return (
        f"{line}; most exposed: {worst.kind} groups {worst.where} clusters on {worst.fabric},"
        f" {worst.exposed_s:.4f} s a step (rank {worst.most_exposed} waits longest)"
    )
