"""Pictures of joined jobs: forecast of their speed, rounds of a job, and losses of all jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

from holmes_ext.join.estimate import RoundForecasts, over_every
from holmes_ext.planner.html.chart import (
    EXPOSED_ROUND,
    INK,
    JOB_COLORS,
    LINE_STYLES,
    MEDIUM,
    PAPER,
    ROUND,
    SMALL,
    WIDE,
    fold,
    is_narrow,
)
from holmes_ext.planner.html.page import heading
from holmes_ext.planner.html.pictures import chart, legend, pyplot
from holmes_ext.report.figures import Summary
from holmes_ext.report.files import Run

#: Distance of the first label above its point, in typographic points, and of each later label above
#: the one before.
_LABEL_ABOVE, _LABEL_HEIGHT = 9, 13
#: Most ticks of the axis of `every`, on a narrow and on a wide chart.
_NARROW_TICKS, _WIDE_TICKS = 4, 9


@dataclass(frozen=True)
class Incarnation:
    """Measured steps of a job, from one of its starts until it ended or was killed."""

    job: str
    end: float  # seconds from the first job's start
    steps: Sequence[float]  # duration of each step, in seconds
    losses: Sequence[float]  # of each step
    killed: bool = False

    @property
    def ends(self) -> list[float]:
        """Return the time at which each step ended, in seconds; the last step ended at `end`."""
        if not self.steps:
            return []
        durations_of_later_steps = accumulate([0.0, *self.steps[:0:-1]])
        times = [self.end - seconds for seconds in durations_of_later_steps]
        return times[::-1]


def worth_figure(
    rounds: RoundForecasts,
    tokens: int,
    single_jobs: Mapping[str, float],
    verdict: str,
    width: float = WIDE,
) -> Any:
    """Draw tokens/s of joined jobs over the setting `every`, compared with single jobs.

    The model is exchanged in `fragments` parts, each of them once in `every` inner steps. The
    aggregate of a fragment is applied `delay` inner steps after it was sent. The three lines differ in
    `fragments` and `delay`: both by default, the longest possible delay, or the most fragments
    (over_every). Points are filled if training never waits for a round. Horizontal lines show the
    alternatives: single jobs.

    Args:
        rounds: Forecasts for joined jobs.
        tokens: Tokens of a sample.
        single_jobs: Name of a way to train with one job -> its tokens/s.
        verdict: Title of the figure: the recommended way to train.
        width: Width of the figure, in inches.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(width, 4.8), layout="constrained")
    labelled: set[tuple[int, float]] = set()
    lines = over_every(rounds).items()
    for (style, marker), (name, settings) in zip(cycle(LINE_STYLES), lines):
        every = [setting.every for setting in settings]
        rates = [setting.samples_per_s * tokens for setting in settings]
        axis.plot(every, rates, style, marker=marker, color=INK, lw=1.2, mfc=PAPER, label=name)
        fills = [PAPER if setting.exposed_s else INK for setting in settings]
        axis.scatter(every, rates, s=36, c=fills, edgecolors=INK, marker=marker, zorder=3)
        points_without_waiting = [
            (setting.every, rate) for setting, rate in zip(settings, rates) if not setting.exposed_s
        ]
        if points_without_waiting and points_without_waiting[0] not in labelled:
            least_every = points_without_waiting[0]
            offset = _LABEL_ABOVE + _LABEL_HEIGHT * len(labelled)  # no label covers another
            labelled.add(least_every)
            axis.annotate(
                f"every={least_every[0]}",
                least_every,
                xytext=(0, offset),
                textcoords="offset points",
                fontsize=SMALL,
                ha="center",
                color=INK,
            )
    for (name, tokens_per_s), dashes in zip(single_jobs.items(), ("--", ":")):
        axis.axhline(tokens_per_s, color=INK, lw=2.5, alpha=0.5, ls=dashes, label=name)
    axis.set_xscale("log", base=2)
    most_ticks = _NARROW_TICKS if is_narrow(width) else _WIDE_TICKS
    axis.xaxis.set_major_locator(plt.LogLocator(base=2, numticks=most_ticks))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * (1.04 + 0.09 * len(labelled)))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    label = "every, in steps: how often each fragment is exchanged (filled: nothing is exposed)"
    axis.set_xlabel(fold(label, width - 0.8))
    axis.set_title(fold(verdict, width - 0.8), loc="left", fontsize=MEDIUM)
    axis.set_ylabel("tokens/s of all jobs, predicted")
    axis.spines[["top", "right"]].set_visible(False)
    legend(figure, axis.get_legend_handles_labels()[0], width)
    return figure


def losses_figure(lives: Sequence[Incarnation], width: float = WIDE) -> Any:
    """Draw the losses of jobs over time, with a colour for each job and a cross where it was killed.

    Args:
        lives: Each start of each job, until its end.
        width: Width of the figure, in inches.
    """
    figure, axis = pyplot().subplots(figsize=(width, 4), layout="constrained")
    middle = max(life.end for life in lives) / 2
    colours: dict[str, str] = {}  # by job
    for life in lives:
        label = None if life.job in colours else life.job  # each job once in the legend
        colour = colours.setdefault(life.job, JOB_COLORS[len(colours) % len(JOB_COLORS)])
        # ends: time at which each step ended, in seconds from the first job's start.
        axis.plot(life.ends, life.losses, color=colour, lw=1.2, label=label)
        if life.killed:  # a line over the whole height with a name: no other line hides it
            axis.axvline(life.end, color=INK, lw=1.5, ls=":", zorder=4)
            axis.plot(life.ends[-1:], life.losses[-1:], "x", color=INK, ms=10, mew=2.5, zorder=5)
            is_right = life.end > middle  # the name is then left of the line, to stay inside
            axis.annotate(
                f"{life.job} is killed",
                (life.end, 1),
                xycoords=("data", "axes fraction"),
                xytext=(-4 if is_right else 4, -4),
                textcoords="offset points",
                ha="right" if is_right else "left",
                va="top",
                fontsize=SMALL,
                bbox={"fc": PAPER, "ec": "none", "pad": 1},
                zorder=5,
            )
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss")
    axis.grid(alpha=0.3)
    legend(figure, axis.get_legend_handles_labels()[0], width)
    return figure


def rounds_figure(run: Run, width: float = WIDE) -> Any:
    """Draw the rounds of a job: their durations, the time that training waited, and the drift.

    Durations and waits are those of the slowest rank. The drift is the distance of this job's
    pseudo-gradient from the aggregate of all jobs, divided by the aggregate's norm. Bars of rounds
    that were not committed are hatched.
    """
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, figsize=(width, 5), sharex=True, layout="constrained")
    seconds_by_verdict: dict[str, dict[int, float]] = {}  # verdict -> round -> seconds
    exposed_s = {}  # round -> seconds
    drifts = {}  # round -> drift
    for number, reports in run.rounds.items():  # reports: of the ranks
        first_rank = reports[0]
        seconds = max(report["seconds"] for report in reports)
        seconds_by_verdict.setdefault(first_rank["verdict"], {})[number] = seconds
        exposed_s[number] = max(report["exposed"] for report in reports)
        if isinstance(first_rank.get("drift"), (int, float)):
            drifts[number] = first_rank["drift"]
    for verdict, seconds_of_rounds in seconds_by_verdict.items():
        is_committed = verdict == "commit"
        above.bar(
            list(seconds_of_rounds),
            list(seconds_of_rounds.values()),
            color=ROUND if is_committed else PAPER,
            edgecolor=ROUND,
            hatch="" if is_committed else "////",
            label="under way" if is_committed else f"under way, not committed ({verdict})",
        )
    above.bar(
        list(exposed_s),
        list(exposed_s.values()),
        color=EXPOSED_ROUND,
        label="of that, training waited",
    )
    above.set_ylabel("seconds")
    above.xaxis.set_major_locator(plt.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    legend(figure, above.get_legend_handles_labels()[0], width)
    below.plot(list(drifts), list(drifts.values()), ".-", color=INK)
    below.set_ylabel("drift, of the sum")  # as a share of the norm of the aggregate ("sum")
    below.set_ylim(bottom=0)
    below.set_xlabel("round")
    return figure


def report_sections(run: Run, summary: Summary) -> list[str]:
    """Return the part of `holmes report --html` about rounds with other jobs, as HTML."""
    if summary.joined is None:
        return []
    return [
        heading("Rounds with other jobs"),
        chart(lambda width: rounds_figure(run, width), "rounds with other jobs"),
    ]
