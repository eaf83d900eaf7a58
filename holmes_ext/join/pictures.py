"""Pictures of joined jobs: forecast of their speed, rounds of one job, and losses of all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from holmes_ext.join.estimate import RoundForecasts, over_every
from holmes_ext.planner.html.page import heading, picture
from holmes_ext.planner.html.pictures import CLUSTER_COLORS, KINDS, PAPER, pyplot, svg
from holmes_ext.report.figures import Summary
from holmes_ext.report.files import Run

#: Distance of the labels of points, in typographic points: above for the first, below for later ones.
_LABEL_ABOVE = 9
_LABEL_BELOW = -16


@dataclass(frozen=True)
class Incarnation:
    """A job from one start to its end or death."""

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


def worth_figure(rounds: RoundForecasts, tokens: int, spanning_job_tokens_per_s: float) -> Any:
    """Draw tokens/s of joined jobs over `every`, a line for each way to choose the other settings.

    The model is exchanged in `fragments`, each of them once in `every` inner steps, and its
    aggregate is applied `delay` inner steps after it was sent. Points are filled if training never
    waits for a round. A dashed line shows one job across the clusters.

    Args:
        rounds: Forecasts for joined jobs.
        tokens: Tokens of a sample.
        spanning_job_tokens_per_s: Tokens/s of one job that spans the clusters.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    labelled = set()
    for colour, (name, settings) in zip(CLUSTER_COLORS, over_every(rounds).items()):
        every = [setting.every for setting in settings]
        rates = [setting.samples_per_s * tokens for setting in settings]
        axis.plot(every, rates, "-", color=colour, lw=1.5, label=name)
        fills = [PAPER if setting.exposed_s else colour for setting in settings]
        axis.scatter(every, rates, s=30, c=fills, edgecolors=colour, zorder=3)
        points_without_waiting = [
            (setting.every, rate) for setting, rate in zip(settings, rates) if not setting.exposed_s
        ]
        if points_without_waiting and points_without_waiting[0] not in labelled:
            least_every = points_without_waiting[0]
            labelled.add(least_every)
            offset = _LABEL_ABOVE if len(labelled) == 1 else _LABEL_BELOW
            axis.annotate(
                f"every={least_every[0]}",
                least_every,
                xytext=(0, offset),
                textcoords="offset points",
                fontsize=8,
                ha="center",
                color=colour,
            )
    axis.axhline(
        spanning_job_tokens_per_s,
        color=KINDS["across"][0],
        lw=1.5,
        ls="--",
        label="one job that crosses, the best plan",
    )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.08)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel(
        "every, in steps: how often each fragment is exchanged (filled: nothing is exposed)"
    )
    axis.set_ylabel("tokens/s of all jobs, predicted")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return figure


def losses_figure(lives: Sequence[Incarnation]) -> Any:
    """Draw the losses of jobs over time, with a colour for each job and a cross where it was killed.

    Args:
        lives: Each start of each job, until its end.
    """
    figure, axis = pyplot().subplots(figsize=(9, 4))
    colours: dict[str, str] = {}  # by job; CLUSTER_COLORS is the palette of all pictures
    for life in lives:
        label = None if life.job in colours else life.job  # each job once in the legend
        colour = colours.setdefault(life.job, CLUSTER_COLORS[len(colours)])
        # ends: time at which each step ended, in seconds from the first job's start.
        axis.plot(life.ends, life.losses, color=colour, lw=1.2, label=label)
        if life.killed:  # a cross at the last step
            axis.plot(
                life.ends[-1:],
                life.losses[-1:],
                "x",
                color=colour,
                ms=10,
                mew=2.5,
                label=f"{life.job} is killed",
            )
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def rounds_figure(run: Run) -> Any:
    """Draw the rounds of a job: their durations, the time that training waited, and the drift.

    Durations and waits are those of the slowest rank. The drift is the distance of this job's
    pseudo-gradient from the aggregate of all jobs, divided by the aggregate's norm. Rounds that
    were not committed are labelled with their verdict.
    """
    # The colours that other pages use for traffic inside a cluster and across clusters, and for
    # forward work.
    inside_colour = KINDS["inside"][0]
    across_colour = KINDS["across"][0]
    forward_colour = KINDS["forward"][0]
    numbers = list(run.rounds)
    reports_of_rounds = list(run.rounds.values())  # of each round: the reports of the ranks
    figure, (above, below) = pyplot().subplots(2, figsize=(9, 4.5), sharex=True)
    above.bar(
        numbers,
        [max(report["seconds"] for report in reports) for reports in reports_of_rounds],
        color=inside_colour,
        label="under way",
    )
    above.bar(
        numbers,
        [max(report["exposed"] for report in reports) for reports in reports_of_rounds],
        color=across_colour,
        label="of that, training waited",
    )
    numbers_with_drift = []
    drifts = []
    for number, reports in zip(numbers, reports_of_rounds):
        first_rank = reports[0]
        if first_rank["verdict"] != "commit":
            above.annotate(
                first_rank["verdict"],
                (number, 0),
                rotation=90,
                va="bottom",
                ha="center",
                fontsize=7,
            )
        if isinstance(first_rank.get("drift"), (int, float)):
            numbers_with_drift.append(number)
            drifts.append(first_rank["drift"])
    above.set_ylabel("seconds")
    above.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    below.plot(numbers_with_drift, drifts, ".-", color=forward_colour)
    below.set_ylabel("drift, of the sum")  # as a share of the norm of the aggregate ("sum")
    below.set_ylim(bottom=0)
    below.set_xlabel("round")
    figure.tight_layout()
    return figure


def report_sections(run: Run, summary: Summary) -> list[str]:
    """Return the part of `holmes report --html` about rounds with other jobs, as HTML."""
    if summary.joined is None:
        return []
    return [
        heading("Rounds with other jobs"),
        picture(svg(rounds_figure(run)), "rounds with other jobs"),
    ]
