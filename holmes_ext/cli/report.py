"""`holmes report`: what a job's steps and messages took, from the files of --holmes-telemetry."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from holmes_ext import extensions
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.document import save
from holmes_ext.errors import HolmesError
from holmes_ext.plan.profile import load_profile
from holmes_ext.report.figures import JoinedRow, Summary, summarize
from holmes_ext.report.files import Run, load
from holmes_ext.report.trace import chosen_step, trace
from holmes_ext.units import format_rate, format_seconds
from holmes_ext.words import some_of

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
PAIRS = (
    Column("from"),
    Column("to"),
    Column("MB", right=True, drop=1),
    Column("exposed, s", right=True),
    Column("achieved", right=True),
    Column("of", right=True),
    Column("round trip", right=True),
)
PLANS = (
    Column("from step"),
    Column("micro-batches in flight"),
    Column("steps", right=True),
    Column("predicted, s", right=True),
    Column("measured, s", right=True),
)
RANKS = (
    Column("rank"),
    Column("node"),
    Column("cluster"),
    *(Column(name, right=True) for name in ("step, s", "exposed, s", "its own, s")),
)
#: Ranks that are listed.
LISTED = 16


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="what a job's steps took: bytes, bandwidth and exposed time of each kind of group, the slowest "
        "rank",
        description="Reads DIR, written by --holmes-telemetry DIR (the files of all nodes together). "
        "Exposed: seconds in which the program was blocked on communication. Achieved: bytes "
        "sent, divided by the time in which all of a group's ranks took part.",
    )
    parser.add_argument("directory", metavar="DIR", help="of --holmes-telemetry, or one run in it")
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
        help="which step --trace and --html show (default: the last one that was traced)",
    )
    parser.add_argument(
        "--write-model",
        metavar="FILE",
        help="write what the job measured, for `holmes plan --profile`",
    )
    parser.add_argument("--html", metavar="FILE", help="write the tables and a picture of one step")


def run(args: argparse.Namespace) -> int:
    job = load(args.directory)
    summary = summarize(job)
    if args.step is not None and not (args.trace or args.html):
        raise HolmesError(
            "holmes report: --step chooses what --trace or --html shows; give one of them"
        )
    if args.trace:
        save(args.trace, json.dumps(trace(job, chosen_step(job, args.step))) + "\n", "the trace")
    model = _write_model(job, args.write_model) if args.write_model else ""
    if args.html:
        page = extensions.contributed("report_pages", "html")
        save(args.html, page(job, summary, chosen_step(job, args.step)), "the report")
    if args.json:
        slowest = {"slowest_rank": summary.slowest.rank, "notes": job.notes}
        print(json.dumps({"version": 1, **asdict(summary), **slowest, "done": asdict(job.done)}))
        return 0
    screen = Screen()
    for note in job.notes:
        screen.line(f"note: {note}")
    for text in job.done.differences:
        screen.line(f"not as planned: {text}")
    screen.line(headline(summary))
    if summary.joined is not None:
        screen.line(joined_line(summary.joined))
    for _, columns, rows in tables(summary):
        screen.line()
        screen.table(columns, rows)
    screen.line("\n" + verdict(summary))
    for option, name in (("trace", args.trace), ("picture", args.html), ("model", model)):
        if name:
            screen.line(f"{option}: {name}")
    return 0


def headline(summary: Summary) -> str:
    """Steps, their time, tokens where they are known."""
    tokens = f", {summary.tokens_per_second:,.0f} tokens/s" if summary.tokens_per_second else ""
    low, high = summary.spread
    took = f"{summary.steps} steps of {summary.step_s:.4f} s (median; {low:.4f} to {high:.4f})"
    return f"run {summary.run}: {summary.world} ranks, {took}{tokens}"


def joined_line(row: JoinedRow) -> str:
    drift = "" if row.drift is None else f"; drift {row.drift:.2f} of the sum"
    return (
        f"joined: {row.rounds} rounds, {row.counted} of them counted; {row.sent / 1e6:.3f} MB sent in a "
        f"round, {row.seconds:.3f} s under way, {row.exposed_s:.4f} s exposed (medians){drift}"
    )


def tables(summary: Summary) -> list[tuple[str, tuple[Column, ...], list[list[str]]]]:
    """(title, columns, rows) of those that have rows."""
    every = (
        ("Plans", PLANS, _plan_cells(summary)),
        ("Groups: means of a step on a rank that has them", GROUPS, _cells(summary)),
        ("Between clusters", PAIRS, _pair_cells(summary)),
        ("Ranks", RANKS, _rank_cells(summary)),
    )
    return [named for named in every if named[2]]


def _cells(summary: Summary) -> list[list[str]]:
    """One row for each kind of group and fabric; means of a step on a rank."""
    rows = []
    for row in summary.rows:
        share = f"{100 * row.exposed_s / summary.step_s:.1f} %" if summary.step_s else "-"
        amounts = [str(row.ranks), f"{row.operations:.1f}", f"{row.sent / 1e6:.3f}"]
        seconds = [f"{row.busy_s:.4f}", f"{row.exposed_s:.4f}", share]
        achieved = format_rate(row.achieved_bps) if row.achieved_bps else "-"
        configured = format_rate(row.configured_bps) if row.configured_bps else "memory"
        rows.append(
            [row.kind, f"{row.where}, {row.fabric}", *amounts, *seconds, achieved, configured]
        )
    return rows


def _pair_cells(summary: Summary) -> list[list[str]]:
    """One row for each way from a cluster to another."""
    return [
        [
            row.source,
            row.target,
            f"{row.sent / 1e6:.3f}",
            f"{row.exposed_s:.4f}",
            format_rate(row.achieved_bps) if row.achieved_bps else "-",
            format_rate(row.configured_bps) if 0 < row.configured_bps < 1e18 else "NICs",
            format_seconds(row.round_trip_s) if row.round_trip_s else "-",
        ]
        for row in summary.pairs
    ]


def _plan_cells(summary: Summary) -> list[list[str]]:
    """One row for each plan, where it changed while the job ran."""
    return [
        [
            str(row.step),
            row.name,
            str(row.steps),
            "-" if row.predicted_s is None else f"{row.predicted_s:.4f}",
            f"{row.step_s:.4f}" if row.step_s else "-",
        ]
        for row in summary.plans
    ]


def _write_model(job: Run, path: str) -> str:
    """The last model that the job measured, as a profile; what it says."""
    file = next((rank for rank in job.ranks if rank.model is not None), None)
    if file is None:
        raise HolmesError(
            f"holmes report --write-model {path}: the job has measured none; it takes some "
            "steps of a pipeline of DeepSpeed or megatron-core with --holmes-adapt on (the "
            "default) or tell"
        )
    save(path, json.dumps(file.model, indent=1) + "\n", "the model")
    profile = load_profile(path)
    count = len(profile.stages) - 1
    nominal = sorted(set(range(count)) - set(file.stage_links))
    stage_links = (
        f"; no rank waited for the stage links after stages {some_of(nominal)}: those times are the plan's"
        if nominal
        else ""
    )
    return f"{path}: stages and stage links as measured{stage_links}; `holmes plan --profile {path}` takes it"


def _rank_cells(summary: Summary) -> list[list[str]]:
    """The ranks with the most work of their own first."""
    ordered = sorted(summary.ranks, key=lambda row: (-row.own_s, row.rank))[:LISTED]
    return [
        [
            str(row.rank),
            row.node,
            row.cluster,
            *(f"{s:.4f}" for s in (row.step_s, row.exposed_s, row.own_s)),
        ]
        for row in ordered
    ]


def verdict(summary: Summary) -> str:
    """What costs most: a network that carries less than it should, or a rank for which the others wait."""
    slow, link = summary.slowest, summary.slow_link
    slowest = (
        f"slowest: rank {slow.rank} on {slow.node} ({slow.cluster}): {slow.own_s:.4f} s of its step "
        f"are its own work"
    )
    if link is not None:
        carried = f"{format_rate(link.achieved_bps)} of {format_rate(link.configured_bps)}"
        return (
            f"{slowest}; a slow network costs more: {link.kind} groups {link.where} clusters on "
            f"{link.fabric} carry {carried}, {link.exposed_s:.4f} s a step are waited for (rank "
            f"{link.most_exposed} waits longest)"
        )
    text = f"{slowest}, the others wait for it"
    if not summary.rows:
        return text
    worst = summary.rows[0]
    return (
        f"{text}; most exposed: {worst.kind} groups {worst.where} clusters on {worst.fabric},"
        f" {worst.exposed_s:.4f} s a step (rank {worst.most_exposed} waits longest)"
    )
