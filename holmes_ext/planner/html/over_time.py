"""A picture of a run over its steps: how long each took, and from which on another plan was followed."""

from __future__ import annotations

import statistics
from math import ceil
from typing import Any

from holmes_ext.planner.html.pictures import CLUSTERS, INK, PAPER, pyplot
from holmes_ext.report.figures import PlanRow
from holmes_ext.report.files import Run

#: Points of the line; of more steps several become one, their median.
POINTS = 1000


def over_time_figure(run: Run, plans: tuple[PlanRow, ...]) -> Any:
    """Seconds of each step on its slowest rank; a band for each plan, with those predicted and measured."""
    plt, steps = pyplot(), run.steps
    took = run.took(steps)
    stride = ceil(len(steps) / POINTS)
    points = [
        statistics.median(took[first : first + stride]) for first in range(0, len(took), stride)
    ]
    figure, axis = plt.subplots(figsize=(11, 3.2), layout="constrained")
    axis.plot(
        steps[::stride], points, color=INK, lw=0.8, marker=".", ms=3, label="step, slowest rank"
    )
    for number, plan in enumerate(plans):
        last = number + 1 == len(plans)
        begin, end = plan.step - 0.5, (steps[-1] + 1 if last else plans[number + 1].step) - 0.5
        color = CLUSTERS[number % len(CLUSTERS)]
        axis.axvspan(begin, end, color=color, alpha=0.15, lw=0)
        axis.annotate(
            plan.name,
            (plan.step, 1),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            va="top",
            xytext=(2, -3 - 12 * (number % 3)),
            textcoords="offset points",
            bbox={"fc": PAPER, "ec": color, "pad": 1, "lw": 0.5},
        )
        for seconds, style, what in (
            (plan.predicted_s, "--", "predicted"),
            (plan.step_s, "-", "measured"),
        ):
            if seconds:
                axis.hlines(
                    seconds,
                    begin,
                    end,
                    color=color,
                    ls=style,
                    lw=2,
                    label=f"{what} of a plan (median)" if last else None,
                )
    axis.set(
        xlabel="step",
        ylabel="seconds",
        ylim=(0, 1.25 * max(points)),
        xlim=(steps[0] - 0.5, steps[-1] + 0.5),
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure
