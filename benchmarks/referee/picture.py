"""Draws planners by regret: a row for each planner and a dot for each case, with the best planner on top."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Row

from holmes_ext.planner.html.chart import COMPUTE, INK, SMALL, fold, is_narrow
from holmes_ext.planner.html.pictures import pyplot, save_in_two_widths


def draw(
    rows: Sequence[Row],
    notes: Mapping[str, Mapping],
    metric: str,
    planners: Sequence[str],
    path: Path,
) -> None:
    """Draw a picture that compares planners: a line for each planner, with a dot for each case.

    The horizontal axis is the regret: by how many percent the step of the planner's plan is longer
    than that of the best plan of all planners. It is linear up to 1 % and logarithmic beyond. The
    planner with the smallest median is on top.

    Args:
        rows: All results.
        notes: Case -> planner -> its plan, or why it has none.
        metric: Name of the metric with the regret.
        planners: Planners that may have results.
        path: The SVG file. A narrow picture for phones gets the same name with the suffix .narrow.svg.
    """
    percent_of: dict[str, list[float]] = {name: [] for name in planners}  # planner -> regrets
    for row in rows:
        name, _, what = row.metric.partition(": ")
        if what == metric and name in percent_of and row.case in notes:  # not a median over all
            percent_of[name].append(100 * row.value)
    asked = {name: sum(name in case_notes for case_notes in notes.values()) for name in planners}
    save_in_two_widths(path, lambda width: _figure(percent_of, asked, width))


def _figure(percent_of: Mapping[str, list[float]], asked: Mapping[str, int], width: float) -> Any:
    """Return the figure of a picture.

    Args:
        percent_of: Planner -> its regrets in percent, one for each case with a plan.
        asked: Planner -> number of cases for which it was asked for a plan.
        width: Of the figure, in inches.
    """
    plot = pyplot("--picture needs")
    # The best planner is the last, and so on top.
    shown = sorted(
        (name for name, percents in percent_of.items() if percents),
        key=lambda name: -statistics.median(percent_of[name]),
    )
    figure, axes = plot.subplots(figsize=(width, 0.42 * len(shown) + 1.6), layout="constrained")
    for height, name in enumerate(shown):
        percents = percent_of[name]
        axes.plot(percents, [height] * len(percents), "o", alpha=0.5, color=COMPUTE, markersize=6)
        median = statistics.median(percents)
        axes.plot([median], [height], "|", color=INK, markersize=16, markeredgewidth=2)
    between = "\n" if is_narrow(width) else "  "
    axes.set_yticks(
        range(len(shown)),
        [f"{name}{between}({len(percent_of[name])} of {asked[name]})" for name in shown],
    )
    axes.set_xscale("symlog", linthresh=1.0)
    most = max(max(percent_of[name]) for name in shown)
    axes.set_xlim(-0.2, 1.6 * most)
    all_ticks = (
        (0, 1, 10, 100, 1000) if is_narrow(width) else (0, 1, 3, 10, 30, 100, 300, 1000, 3000)
    )
    ticks = [tick for tick in all_ticks if tick <= 1.6 * most]
    axes.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    label = "regret: step longer than that of the best plan that any planner found (simulated)"
    figure.supxlabel(fold(label, width, SMALL), fontsize=SMALL)
    title = "a dot for each case, a bar at the median (in brackets: cases with a plan that starts and fits)"
    figure.suptitle(fold(title, width, SMALL), fontsize=SMALL)
    axes.grid(axis="x", alpha=0.3)
    return figure
