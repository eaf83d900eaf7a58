"""`holmes report`: what a job's steps and messages took, from the files of --holmes-telemetry."""

from __future__ import annotations

import argparse
import html
import json
import sys
from dataclasses import asdict
from typing import Any

from holmes_ext.document import save
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="what a job's steps took: bytes, bandwidth and exposed time of each kind of group, the slowest rank",
        description="Reads DIR, written by --holmes-telemetry DIR (the files of all nodes together). Exposed: seconds in which the program stood"
        " still for communication. Achieved: bytes sent over the time in which all of a group's ranks were there.",
    )
    parser.add_argument("directory", metavar="DIR", help="the directory of --holmes-telemetry, or one run in it")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--trace", metavar="OUT.json", help="write one step of every rank for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--step", type=int, help="which step --trace and --html show (default: the last one that was traced)")
    parser.add_argument("--html", metavar="OUT.html", help="write the tables and a picture of one step")


def run(args: argparse.Namespace) -> int:
    """Prints the tables; 0."""
    from rich.console import Console

    from holmes_ext.report.figures import summarize
    from holmes_ext.report.files import load

    job = load(args.directory)
    summary = summarize(job)
    if args.step is not None and not (args.trace or args.html):
        raise HolmesError("holmes report: --step chooses what --trace or --html shows; give one of them")
    if args.trace:
        from holmes_ext.report.trace import chosen_step, trace

        save(args.trace, json.dumps(trace(job, chosen_step(job, args.step))) + "\n", "the trace")
    if args.html:
        save(args.html, _document(job, summary, args.step), "the page")
    if args.json:
        slowest = {"slowest_rank": summary.slowest.rank, "notes": job.notes}
        print(json.dumps({"version": 1, **asdict(summary), **slowest}))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    for note in job.notes:
        console.print(f"note: {note}", markup=False)
    console.print(headline(summary), markup=False)
    console.print(_table(HEAD, cells(summary), left=2))
    console.print(_table(RANK_HEAD, rank_cells(summary), left=3))
    console.print(verdict(summary), markup=False)
    for option, name in (("trace", args.trace), ("picture", args.html)):
        if name:
            console.print(f"{option}: {name}", markup=False)
    return 0


def headline(summary: Any) -> str:
    """Steps, their time, tokens where they are known."""
    tokens = f", {summary.tokens_per_second:,.0f} tokens/s" if summary.tokens_per_second else ""
    low, high = summary.spread
    return f"run {summary.run}: {summary.world} ranks, {summary.steps} steps of {summary.step_s:.4f} s (median; {low:.4f} to {high:.4f}){tokens}"


HEAD = ("groups", "where", "ranks", "operations", "MB sent", "under way, s", "exposed, s", "of the step", "achieved", "of")
RANK_HEAD = ("rank", "node", "cluster", "step, s", "exposed, s", "its own, s")


def cells(summary: Any) -> list[tuple[str, ...]]:
    """One row for each kind of group and fabric; means of a step on a rank."""
    rows = []
    for row in summary.rows:
        rate = format_rate(row.achieved_bps) if row.achieved_bps else "-"
        configured = format_rate(row.configured_bps) if row.configured_bps else "memory"
        share = f"{100 * row.exposed_s / summary.step_s:.1f} %" if summary.step_s else "-"
        rows.append((row.kind, f"{row.where}, {row.fabric}", str(row.ranks), f"{row.operations:.1f}", f"{row.sent / 1e6:.3f}", f"{row.busy_s:.4f}",
                     f"{row.exposed_s:.4f}", share, rate, configured))  # fmt: skip
    return rows


def rank_cells(summary: Any, most: int = 16) -> list[tuple[str, ...]]:
    """The ranks with the most work of their own first."""
    ordered = sorted(summary.ranks, key=lambda one: (-one.own_s, one.rank))[:most]
    return [(str(one.rank), one.node, one.cluster, f"{one.step_s:.4f}", f"{one.exposed_s:.4f}", f"{one.own_s:.4f}") for one in ordered]


def verdict(summary: Any) -> str:
    """Which rank is slowest, and what costs most."""
    slow = summary.slowest
    text = f"slowest: rank {slow.rank} on {slow.node} ({slow.cluster}): {slow.own_s:.4f} s of its step are its own work, the others wait for it"
    if not summary.rows:
        return text
    worst = summary.rows[0]
    return f"{text}; most exposed: {worst.kind} groups {worst.where} clusters on {worst.fabric}, {worst.exposed_s:.4f} s a step (rank {worst.most_exposed} waits longest)"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: int) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(head):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _document(job: Any, summary: Any, step: int | None) -> str:
    """One HTML file: the tables, and one step of every rank as in `holmes demo`."""
    from holmes_ext.report import pictures
    from holmes_ext.report.trace import chosen_step, pictured

    shown = chosen_step(job, step)
    figure = pictures.timeline_figure({f"step {shown}": pictured(job, shown)}, "seconds of one step (rank 0's clock)")
    parts = [_html_table(HEAD, cells(summary)), _html_table(RANK_HEAD, rank_cells(summary))]
    notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in job.notes)
    return f"""<!doctype html><meta charset="utf-8"><title>holmes report</title>
<style>body{{font:15px sans-serif;max-width:1150px;margin:2em auto}}img{{max-width:100%}}table{{border-collapse:collapse;margin:1em 0}}
td,th{{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}}td:first-child{{text-align:left}}</style>
<h1>{html.escape(headline(summary))}</h1>{notes}{''.join(parts)}<p>{html.escape(verdict(summary))}</p>
{pictures.inline(pictures.png(figure), 'timeline of one step')}
"""


def _html_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{html.escape(column)}</th>" for column in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
