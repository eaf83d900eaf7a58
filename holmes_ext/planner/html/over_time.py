"""Picture of a run over time: the duration of every step, and the plan that was in use at each step."""

from __future__ import annotations

import statistics
from math import ceil
from typing import Any

from holmes_ext.planner.html.pictures import CLUSTER_COLORS, INK, PAPER, pyplot
from holmes_ext.report.figures import PlanRow
from holmes_ext.report.files import Run

#: Most points of the line; more steps are combined into medians.
MAX_POINTS = 1000


def over_time_figure(run: Run, plans: tuple[PlanRow, ...]) -> Any:
    """Return a figure with the seconds of each step on its slowest rank.

    A colored band marks the steps of each plan, with lines for the predicted and the measured step.

    Args:
        run: Telemetry of the run.
        plans: Plans that were in use, in the order of their first steps.
    """
    plt = pyplot()
    steps = run.steps
    durations_s = run.took(steps)
    stride = ceil(len(steps) / MAX_POINTS)  # steps of a point
    points = [
        statistics.median(durations_s[first : first + stride])
        for first in range(0, len(durations_s), stride)
    ]
    figure, axis = plt.subplots(figsize=(11, 3.2), layout="constrained")
    axis.plot(
        steps[::stride], points, color=INK, lw=0.8, marker=".", ms=3, label="step, slowest rank"
    )
    for number, plan in enumerate(plans):
        is_last = number + 1 == len(plans)
        next_step = steps[-1] + 1 if is_last else plans[number + 1].step
        _draw_plan(axis, plan, number, next_step, has_label=is_last)
    axis.set(
        xlabel="step",
        ylabel="seconds",
        ylim=(0, 1.25 * max(points)),
        xlim=(steps[0] - 0.5, steps[-1] + 0.5),
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _draw_plan(axis: Any, plan: PlanRow, number: int, next_step: int, has_label: bool) -> None:
    """Draw the band, the name and the step times of a plan.

    Args:
        number: Index of the plan, which sets its color.
        next_step: First step of the next plan.
        has_label: Add the lines to the legend.
    """
    # A band reaches from half a step before the plan's first step to half a step after its last.
    begin = plan.step - 0.5
    end = next_step - 0.5
    color = CLUSTER_COLORS[number % len(CLUSTER_COLORS)]
    axis.axvspan(begin, end, color=color, alpha=0.15, lw=0)
    axis.annotate(
        plan.name,
        (plan.step, 1),
        xycoords=("data", "axes fraction"),
        fontsize=7,
        va="top",
        xytext=(2, -3 - 12 * (number % 3)),  # three heights, so names of neighbours do not overlap
        textcoords="offset points",
        bbox={"fc": PAPER, "ec": color, "pad": 1, "lw": 0.5},
    )
    lines = (("predicted", plan.predicted_s, "--"), ("measured", plan.step_s, "-"))
    for name, seconds, style in lines:
        if seconds:
            label = f"{name} of a plan (median)" if has_label else None
            axis.hlines(seconds, begin, end, color=color, ls=style, lw=2, label=label)
