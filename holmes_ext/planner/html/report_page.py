"""The page of `holmes report --html`: the tables, steps over time, one step of every rank."""

from __future__ import annotations

from holmes_ext.cli.report import headline, joined_line, tables, verdict
from holmes_ext.extensions import contributions
from holmes_ext.planner.html import pictures
from holmes_ext.planner.html.over_time import over_time_figure
from holmes_ext.planner.html.page import heading, page, paragraphs, picture, table
from holmes_ext.report.figures import Summary
from holmes_ext.report.files import Run
from holmes_ext.report.trace import pictured


def document(job: Run, summary: Summary, step: int) -> str:
    """Return the page.

    Args:
        job: Telemetry of a run.
        summary: Its figures.
        step: The step that is shown as a timeline.
    """
    figure = pictures.timeline_figure(
        {f"step {step}": pictured(job, step)}, "seconds of one step (rank 0's clock)"
    )
    joined = [joined_line(summary.joined)] if summary.joined else []
    unlike = [f"not as planned: {text}" for text in job.done.differences]
    sections = [
        part
        for section in contributions("report_sections")
        for part in section.load()(job, summary)
    ]
    return page(
        "holmes report",
        heading(headline(summary), 1),
        paragraphs([*(f"note: {note}" for note in job.notes), *unlike, *joined, verdict(summary)]),
        *(
            heading(title) + table([column.name for column in columns], rows)
            for title, columns, rows in tables(summary)
        ),
        heading("Steps over time"),
        picture(pictures.svg(over_time_figure(job, summary.plans)), "steps over time, and plans"),
        heading("One step"),
        picture(pictures.svg(figure), "timeline of one step"),
        *sections,
    )
