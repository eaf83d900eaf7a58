"""Draws planners by regret: a row for each planner and a dot for each case, with the best planner on top."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Row

from holmes_ext.planner.html.pictures import pyplot, write


def draw(
    rows: Sequence[Row],
    notes: Mapping[str, Mapping],
    metric: str,
    planners: Sequence[str],
    path: Path,
) -> Path:
    """Draw a PNG file that compares planners: a line for each planner, with a dot for each case.

    The horizontal axis is the regret: by how many percent the step of the planner's plan is longer
    than that of the best plan of all planners. It is linear up to 1 % and logarithmic beyond. The
    planner with the smallest median is on top.

    Args:
        rows: All results.
        notes: Case -> planner -> its plan, or why it has none.
        metric: Name of the metric with the regret.
        planners: Planners that may have results.
        path: The PNG file.
    """
    plot = pyplot("--picture needs")
    percent_of: dict[str, list[float]] = {name: [] for name in planners}  # planner -> regrets
    for row in rows:
        name, _, what = row.metric.partition(": ")
        if what == metric and name in percent_of and row.case in notes:  # not a median over all
            percent_of[name].append(100 * row.value)
    # The best planner is the last, and so on top.
    shown = sorted(
        (name for name in planners if percent_of[name]),
        key=lambda name: -statistics.median(percent_of[name]),
    )
    figure, axes = plot.subplots(figsize=(9, 0.42 * len(shown) + 1.6), layout="constrained")
    for at, name in enumerate(shown):
        values = percent_of[name]
        axes.plot(values, [at] * len(values), "o", alpha=0.5, color="tab:blue", markersize=6)
        axes.plot(
            [statistics.median(values)], [at], "|", color="black", markersize=16, markeredgewidth=2
        )
    asked = {name: sum(name in case_notes for case_notes in notes.values()) for name in shown}
    axes.set_yticks(
        range(len(shown)),
        [f"{name}  ({len(percent_of[name])} of {asked[name]})" for name in shown],
    )
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=-0.2)
    most = max(max(percent_of[name]) for name in shown)
    ticks = [tick for tick in (0, 1, 3, 10, 30, 100, 300, 1000, 3000) if tick <= 2 * most]
    axes.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axes.set_xlabel(
        "regret: step longer than that of the best plan that any planner found (simulated)"
    )
    axes.set_title(
        "A dot a case, the bar its median; (cases with a plan that starts and fits, of those asked)",
        fontsize=10,
    )
    axes.grid(axis="x", alpha=0.3)
    return write(figure, path, "name another file")
