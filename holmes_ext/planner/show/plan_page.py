"""HTML page of `holmes plan --html`: start of the plan, its placement, a step, what-ifs, other plans."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from holmes_ext.cli.show.matrix import WAN_TITLE, wan_table
from holmes_ext.cli.show.training import Training
from holmes_ext.planner.companion import PlanCompanion
from holmes_ext.planner.html import plan_pictures as pictures
from holmes_ext.planner.html.page import command, heading, page, paragraphs, table
from holmes_ext.planner.html.pictures import chart
from holmes_ext.planner.launch_flags import Launch, added
from holmes_ext.planner.search.explain import thin_stages
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.show import search_table
from holmes_ext.planner.show.start import CANNOT, launch_lines


def document(
    result: SearchResult,
    args: argparse.Namespace,
    job: Training,
    starts: Mapping[str, Launch],
    besides: Mapping[str, PlanCompanion] = MappingProxyType({}),
) -> str:
    """Return the page of the best plan of a search, or of the user's layout.

    Args:
        result: The search.
        args: Options of the command `holmes plan`.
        job: The training job, with lines on it.
        starts: Framework -> how to start the plan.
        besides: Name -> forecast that an extension shows beside the plan, such as a forecast of
            joined jobs. Each adds a section to the page.
    """
    best = result.best
    is_layout_only = result.user_layout is best  # without a search, the layout is the only plan
    why_title, head, rows = search_table.why_table(result)
    optimality_gap = []
    if not is_layout_only:
        optimality_gap.append(f"{best.step_s:.4g} s a step: {result.optimality_gap}.")
    placement = f"Stages on {result.describe(best)}; layers {search_table.split_text(best.split)}."

    # "placement", "clusters", "timeline", "ethernet" -> the picture as HTML
    drawn = {
        name: chart(partial(paint, result), name)
        for name, paint in pictures.painted(result).items()
    }
    what_if = []  # stays empty if there is a single cluster, and so no network between clusters
    if "ethernet" in drawn:
        what_if = [
            heading("What if the network between the clusters were another"),
            drawn["ethernet"],
        ]
    seconds_by_cause = partial(pictures.seconds, search_table.named_reasons(result))
    plan_count = 0 if is_layout_only else args.rows
    plan_rows = [search_table.row_cells(*row) for row in search_table.ranked(result, plan_count)]
    return page(
        "holmes plan",
        heading(search_table.title(result), 1),
        paragraphs([*job.lines, *optimality_gap, *search_table.why_lines(result)]),
        *(part for forecast in besides.values() for part in forecast.page_parts()),
        heading("Start it"),
        *_launches(result, args, starts),
        heading("Placement"),
        paragraphs([placement]),
        drawn["placement"],
        drawn.get("clusters", ""),  # "" for a site of one cluster
        *_links(result),
        heading("One step"),
        paragraphs([*search_table.stage_link_lines(result, best), *thin_stages(result, best)]),
        drawn["timeline"],
        heading(why_title.capitalize()),
        chart(seconds_by_cause, "seconds by cause"),
        table(head, rows, strong=-1),  # the last row, the sum of all causes, is bold
        *what_if,
        heading("Your layout" if is_layout_only else "The plans found"),
        table([column.name for column in search_table.COLUMNS], plan_rows),
        paragraphs([search_table.LEGEND]),
    )


def _links(result: SearchResult) -> list[str]:
    """Return the table of the links between all clusters, also of those that the plan leaves out.

    Returns:
        HTML fragments: the table's title as a paragraph, and the table. [] if cluster.toml describes
        no network between the clusters.
    """
    site = (result.on_all or result).network.measured
    if not site.wan:
        return []
    columns, rows = wan_table(site)
    return [paragraphs([f"{WAN_TITLE.capitalize()}:"]), table([one.name for one in columns], rows)]


def _launches(
    result: SearchResult, args: argparse.Namespace, starts: Mapping[str, Launch]
) -> list[str]:
    """Return the commands to copy for each framework, then the frameworks that cannot run the plan.

    If the user gave a layout, the flags of holmes for it come first.
    """
    parts = []
    unsupported = []
    layout = result.user_layout
    if layout:
        plan_file = ""
        if layout is result.best and args.output:
            plan_file = args.output  # the file has the best plan
        flags = shlex.join(added(layout, args.cluster, plan_file))
        parts += [heading("your layout: add to your command line", 3), command(flags)]
    for name, lines in launch_lines(starts).items():
        if lines[0].startswith(CANNOT):  # the line is the reason, not a command
            unsupported.append(f"{name} {' '.join(lines)}")
        else:
            parts += [heading(name, 3), command("\n".join(lines))]
    return [*parts, paragraphs(unsupported)]
