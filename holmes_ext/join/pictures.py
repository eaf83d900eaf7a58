"""Pictures of joined jobs: what they would be worth, rounds of one, losses of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from holmes_ext.join.estimate import RoundPrices, over_every
from holmes_ext.planner.html.page import heading, picture
from holmes_ext.planner.html.pictures import CLUSTERS, KINDS, PAPER, pyplot, svg
from holmes_ext.report.figures import Summary
from holmes_ext.report.files import Run


@dataclass(frozen=True)
class Incarnation:
    """A job from its start to its end or death. end: seconds since the first job's start; steps: of each."""

    job: str
    end: float
    steps: Sequence[float]
    losses: Sequence[float]
    killed: bool = False

    @property
    def ends(self) -> list[float]:
        """When each step ended, on the clock of `end`: the last one then."""
        waits = accumulate([0.0, *self.steps[:0:-1]]) if self.steps else ()
        return [self.end - later for later in waits][::-1]


def worth_figure(rounds: RoundPrices, tokens: int, crossing: float) -> Any:
    """Tokens/s over `every`, a line for each way to choose fragments and delay (filled where nothing is
    exposed), and one job that crosses. tokens: of a sample."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4.2), layout="constrained")
    places = set()
    for colour, (name, line) in zip(CLUSTERS, over_every(rounds).items()):
        every = [setting.every for setting in line]
        rates = [setting.samples_per_s * tokens for setting in line]
        axis.plot(every, rates, "-", color=colour, lw=1.5, label=name)
        fills = [PAPER if setting.exposed_s else colour for setting in line]
        axis.scatter(every, rates, s=30, c=fills, edgecolors=colour, zorder=3)
        hidden = [
            (setting.every, rate) for setting, rate in zip(line, rates) if not setting.exposed_s
        ]
        if hidden and hidden[0] not in places:
            places.add(hidden[0])
            offset = (0, 9 if len(places) == 1 else -16)
            axis.annotate(
                f"every={hidden[0][0]}",
                hidden[0],
                xytext=offset,
                textcoords="offset points",
                fontsize=8,
                ha="center",
                color=colour,
            )
    axis.axhline(
        crossing,
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
    """Loss over time, a colour for each job, a cross where it was killed."""
    figure, axis = pyplot().subplots(figsize=(9, 4))
    colours: dict[str, str] = {}
    for live in lives:
        label = None if live.job in colours else live.job
        colour = colours.setdefault(live.job, CLUSTERS[len(colours)])
        axis.plot(live.ends, live.losses, color=colour, lw=1.2, label=label)
        if live.killed:
            axis.plot(
                live.ends[-1:],
                live.losses[-1:],
                "x",
                color=colour,
                ms=10,
                mew=2.5,
                label=f"{live.job} is killed",
            )
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def rounds_figure(run: Run) -> Any:
    """Of each round: seconds under way and waited for (slowest rank), the drift, what came to nothing."""
    rounds = run.rounds
    numbers, first = list(rounds), [reports[0] for reports in rounds.values()]
    figure, (above, below) = pyplot().subplots(2, figsize=(9, 4.5), sharex=True)
    above.bar(
        numbers,
        [max(report["seconds"] for report in reports) for reports in rounds.values()],
        color=KINDS["inside"][0],
        label="under way",
    )
    above.bar(
        numbers,
        [max(report["exposed"] for report in reports) for reports in rounds.values()],
        color=KINDS["across"][0],
        label="of that, training waited",
    )
    for number, report in zip(numbers, first):
        if report["verdict"] != "commit":
            above.annotate(
                report["verdict"], (number, 0), rotation=90, va="bottom", ha="center", fontsize=7
            )
    above.set_ylabel("seconds")
    above.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    drifts = [
        (n, report["drift"])
        for n, report in zip(numbers, first)
        if isinstance(report.get("drift"), (int, float))
    ]
    below.plot(
        [n for n, _ in drifts], [drift for _, drift in drifts], ".-", color=KINDS["forward"][0]
    )
    below.set_ylabel("drift, of the sum")
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
