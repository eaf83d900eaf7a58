"""The page of `holmes plan --html`: stages, one step, its seconds, what-ifs, joined jobs, what to type."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from types import MappingProxyType

from holmes_ext.cli.show.training import Training
from holmes_ext.planner.companion import PlanCompanion
from holmes_ext.planner.html import plan_pictures as pictures
from holmes_ext.planner.html.page import command, heading, page, paragraphs, picture, table
from holmes_ext.planner.html.pictures import svg
from holmes_ext.planner.launch_flags import Launch, added
from holmes_ext.planner.search.explain import thin_stages
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.show import search_table as shown


def document(
    result: SearchResult,
    args: argparse.Namespace,
    job: Training,
    starts: Mapping[str, Launch],
    besides: Mapping[str, PlanCompanion] = MappingProxyType({}),
) -> str:
    """The best plan of a search, or the layout that was given; nothing needs the network."""
    best, alone = result.best, result.user_layout is result.best
    seconds, head, rows = shown.why_table(result)
    optimality_gap = [] if alone else [f"{best.step_s:.4g} s a step: {result.optimality_gap}."]
    where = f"Stages on {result.describe(best)}; layers {shown.split_text(best.split)}."
    drawn = {name: picture(svg(paint(result)), name) for name, paint in pictures.PAINTED.items()}
    whys = svg(pictures.seconds(shown.named_reasons(result)))
    rows_shown = 0 if alone else args.rows
    plan_rows = [shown.row_cells(*row) for row in shown.ranked(result, rows_shown)]
    return page(
        "holmes plan",
        heading(shown.title(result), 1),
        paragraphs([*optimality_gap, *shown.why_lines(result), *job.lines]),
        heading("Start it"),
        *_launches(result, args, starts),
        heading("Placement"),
        paragraphs([where]),
        drawn["placement"],
        drawn["clusters"],
        heading("One step"),
        paragraphs([*shown.stage_link_lines(result, best), *thin_stages(result, best)]),
        drawn["timeline"],
        heading(seconds.capitalize()),
        picture(whys, "seconds by cause"),
        table(head, rows, strong=-1),
        heading("What if the network between the clusters were another"),
        drawn["ethernet"],
        *(part for beside in besides.values() for part in beside.page_parts()),
        heading("Your layout" if alone else "The plans found"),
        table([column.name for column in shown.COLUMNS], plan_rows),
        paragraphs([shown.LEGEND]),
    )


def _launches(
    result: SearchResult, args: argparse.Namespace, starts: Mapping[str, Launch]
) -> list[str]:
    """What is to be copied; and below it which frameworks cannot do the plan."""
    parts, cannot = [], []
    if result.user_layout:
        plan = args.output or "" if result.user_layout is result.best else ""
        flags = shlex.join(added(result.user_layout, args.cluster, plan))
        parts += [heading("your layout: add to your command line", 3), command(flags)]
    for name, lines in shown.launch_lines(starts).items():
        if lines[0].startswith(shown.CANNOT):
            cannot.append(f"{name} {' '.join(lines)}")
        else:
            parts += [heading(name, 3), command("\n".join(lines))]
    return [*parts, paragraphs(cannot)]
