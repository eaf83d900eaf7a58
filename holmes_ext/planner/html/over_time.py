"""Picture of a run over time: the duration of every step, and the plan in use at each step."""

from __future__ import annotations

import statistics
from math import ceil
from typing import Any

from holmes_ext.planner.html.chart import INK, PAPER, PLAN, SMALL, WIDE, is_narrow
from holmes_ext.planner.html.pictures import pyplot
from holmes_ext.report.figures import PlanRow
from holmes_ext.report.files import Run

#: Most points of the line; more steps are combined into medians.
MAX_POINTS = 1000
#: Heights of the names of plans, so that names of neighbours do not overlap.
_NAME_HEIGHTS = 3


def over_time_figure(run: Run, plans: tuple[PlanRow, ...], width: float = WIDE) -> Any:
    """Return a figure with the seconds of each step on its slowest rank.

    A colored band marks the steps of each plan, with lines for the predicted and the measured step.

    Args:
        run: Telemetry of the run.
        plans: Plans that were in use, in the order of their first steps.
        width: Of the figure, in inches.
    """
    plt = pyplot()
    steps = run.steps
    durations_s = run.took(steps)
    stride = ceil(len(steps) / MAX_POINTS)  # steps of a point
    points = [
        statistics.median(durations_s[first : first + stride])
        for first in range(0, len(durations_s), stride)
    ]
    figure, axis = plt.subplots(figsize=(width, 3.4), layout="constrained")
    axis.plot(
        steps[::stride], points, color=INK, lw=0.8, marker=".", ms=3, label="step, slowest rank"
    )
    shown_steps = (steps[0], steps[-1])
    for number, plan in enumerate(plans):
        is_last = number + 1 == len(plans)
        next_step = steps[-1] + 1 if is_last else plans[number + 1].step
        if next_step > steps[0] and plan.step <= steps[-1]:
            _draw_plan(axis, plan, number, next_step, shown_steps, has_label=is_last)
    axis.set(
        xlabel="step",
        ylabel="seconds",
        ylim=(0, 1.6 * max(points)),
        xlim=(steps[0] - 0.5, steps[-1] + 0.5),
    )
    axis.xaxis.set_major_locator(plt.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    axis.spines[["top", "right"]].set_visible(False)
    columns = 1 if is_narrow(width) else 3
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=SMALL)
    return figure


def _draw_plan(
    axis: Any,
    plan: PlanRow,
    number: int,
    next_step: int,
    shown_steps: tuple[int, int],
    has_label: bool,
) -> None:
    """Draw the band, the name and the step times of a plan.

    Args:
        axis: Axes to draw on.
        plan: The plan, with its steps.
        number: Index of the plan; bands of neighbours differ in their shade.
        next_step: First step of the next plan.
        shown_steps: First and last step on the axis.
        has_label: Add the lines to the legend.
    """
    first, last = shown_steps
    # A band reaches from half a step before the plan's first step to half a step after its last.
    begin = max(plan.step, first) - 0.5
    end = min(next_step - 1, last) + 0.5
    axis.axvspan(begin, end, color=INK, alpha=0.04 + 0.06 * (number % 2), lw=0)

    # The name begins at the band's start, or ends at the band's end in the right half of the axes:
    # so it stays inside.
    is_right = begin + end > first + last
    axis.annotate(
        plan.name,
        (end if is_right else begin, 1),
        xycoords=("data", "axes fraction"),
        fontsize=SMALL,
        va="top",
        ha="right" if is_right else "left",
        xytext=(-3 if is_right else 3, -3 - 15 * (number % _NAME_HEIGHTS)),
        textcoords="offset points",
        bbox={"fc": PAPER, "ec": INK, "pad": 1, "lw": 0.5},
    )
    lines = (("predicted", plan.predicted_s, "--"), ("measured", plan.step_s, "-"))
    for name, seconds, style in lines:
        if seconds:
            label = f"{name} of a plan (median)" if has_label else None
            axis.hlines(seconds, begin, end, color=PLAN, ls=style, lw=2, label=label)
