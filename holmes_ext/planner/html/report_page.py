"""HTML page of `holmes report --html`: tables, steps over time, a step of every rank."""

from __future__ import annotations

from holmes_ext.cli.report import headline, joined_line, tables, verdict
from holmes_ext.extensions import contributions
from holmes_ext.planner.html import pictures
from holmes_ext.planner.html.over_time import over_time_figure
from holmes_ext.planner.html.page import heading, page, paragraphs, table
from holmes_ext.report.figures import Summary
from holmes_ext.report.files import Run
from holmes_ext.report.trace import pictured


def document(job: Run, summary: Summary, step: int) -> str:
    """Return the HTML page of a training run: notes, tables, steps over time, and a timeline of a step.

    Args:
        job: Telemetry of the run: events of every rank, and differences from its plan.
        summary: Figures computed from the telemetry.
        step: Number of the step to show as a timeline.
    """
    traces = {f"step {step}": pictured(job, step)}
    label = "seconds of one step (rank 0's clock)"
    lines = [f"note: {note}" for note in job.notes]
    lines += [f"not as planned: {text}" for text in job.followed_plan.differences]
    if summary.joined:  # the run trained together with other jobs (holmes join)
        lines.append(joined_line(summary.joined))
    lines.append(verdict(summary))  # the slowest rank, and the network that costs most
    table_parts = []  # HTML
    for title, columns, rows in tables(summary):
        table_parts.append(heading(title) + table([column.name for column in columns], rows))
    sections = []  # of extensions
    for section in contributions("report_sections"):
        sections += section.load()(job, summary)
    return page(
        "holmes report",
        heading(headline(summary), 1),
        paragraphs(lines),
        *table_parts,
        heading("Steps over time"),
        pictures.chart(
            lambda width: over_time_figure(job, summary.plans, width), "steps over time, and plans"
        ),
        heading("One step"),
        pictures.chart(
            lambda width: pictures.timeline_figure(traces, label, width), "timeline of one step"
        ),
        *sections,
    )
