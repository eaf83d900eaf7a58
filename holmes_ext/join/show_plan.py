"""`holmes plan --joined`: one job in each cluster (docs/joined.md), beside the best one that crosses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.join import estimate as joined
from holmes_ext.join.pictures import worth_figure
from holmes_ext.join.simulated_rounds import JoinedJob
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.html.page import heading, paragraphs, picture, table
from holmes_ext.planner.html.pictures import svg
from holmes_ext.planner.search.changed import ethernet_s
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search

COLUMNS = (
    Column("--holmes-outer"),
    Column("round, s", right=True, drop=1),
    Column("exposed, s", right=True),
    Column("slower, s", right=True, drop=2),
    Column("tokens/s", right=True),
    Column("gain", right=True),
)
#: Of `holmes join serve`.
_PORT = 29600
#: Of jobs that join with the default: what docs/benchmarks/joined.md measured beside one synchronous job.
_LOSS_OF_JOINED = {2: "as one job's within seed noise", 4: "0.16 to 0.22 nats behind one job's"}
#: benchmarks/joined_losses.py.
_MUON = "--holmes-outer algorithm=muon: small models learned more than in one job (docs/benchmarks/joined.md)"
CHOICES = (Column("choice"), Column("tokens/s", right=True), Column("loss"))
LEGEND = "exposed, slower: of each step; gain: tokens/s over those of the best plan of one job that crosses"


@dataclass(frozen=True)
class Beside:
    """tokens: of a sample; crossing: tokens/s of the best plan of one job."""

    rounds: joined.RoundPrices
    tokens: int
    crossing: float

    @cached_property
    def settings(self) -> list[joined.Setting]:
        return joined.settings(self.rounds)

    def document(self) -> dict[str, Any]:
        keys = ("name", "tokens_per_second", "loss", "flags")
        choices = [dict(zip(keys, choice)) for choice in self.choices()]
        rows = [
            {**asdict(setting), "tokens_per_second": setting.samples_per_s * self.tokens}
            for setting in self.settings
        ]
        return {
            "jobs": [asdict(job) for job in self.rounds.jobs],
            "settings": rows,
            "crossing": self.crossing,
            "choices": choices,
        }

    def line(self) -> str:
        """Of the least `every` at which nothing is exposed."""
        hidden = [setting for setting in self.settings if not setting.exposed_s]
        least = min(hidden, key=lambda setting: setting.every)
        text = f"nothing is exposed from {least} on; all wait for the slowest job"
        if least.delay > joined.DELAY:
            text += f"; sums older than {joined.DELAY} steps are not known to be harmless"
        return text

    def rows(self) -> list[list[str]]:
        result = []
        for setting in self.settings:
            rate = setting.samples_per_s * self.tokens
            result.append(
                [
                    str(setting),
                    f"{setting.round_s:.3g}",
                    f"{setting.exposed_s:.3g}",
                    f"{setting.slower_s:.3g}",
                    f"{rate:,.0f}",
                    f"{rate / self.crossing:.2f}",
                ]
            )
        return result

    def choices(self) -> list[tuple[str, float, str, str]]:
        """(name, tokens/s, loss, line to copy) of each choice whose loss is known."""
        jobs = self.rounds.jobs
        best = max(jobs, key=lambda job: job.samples / job.step_s)
        alone = self.tokens * best.samples / best.step_s
        result = [
            (f"one job on {best.cluster} alone", alone, "of its batch", "--holmes"),
            ("one job across", self.crossing, "of its batch", "--holmes --holmes-cluster FILE"),
        ]
        if (loss := _LOSS_OF_JOINED.get(len(jobs))) is not None:
            rate = self.tokens * self.rounds.of(*joined.DEFAULT).samples_per_s
            line = f"--holmes --holmes-join {jobs[0].cluster}@HOST:{_PORT}"
            result.append(("joined jobs", rate, loss, line))
        return result

    def advice(self) -> list[str]:
        """Lines: which of the choices gets most tokens/s, and how to start it."""
        name, _, _, line = max(self.choices(), key=lambda choice: choice[1])
        if "--holmes-join" not in line:
            return [f"most tokens/s: {name}; add to the command:", f"  {line}"]
        serve = (
            "`holmes join serve` on HOST, which all reach; add to each job's command, with its own "
            "cluster's name"
        )
        return [_MUON, f"most tokens/s: {name}; {serve}:", f"  {line}"]

    def figure(self) -> Any:
        return worth_figure(self.rounds, self.tokens, self.crossing)

    def jobs_line(self) -> str:
        jobs = self.rounds.jobs
        return ", ".join(
            f"{job.cluster} {job.step_s:.4g} s a step of {job.samples} samples" for job in jobs
        )

    def show(self) -> None:
        screen = Screen()
        screen.line("joined jobs instead (docs/joined.md), one in each cluster:", "bold")
        screen.line(f"  {self.jobs_line()}")
        screen.table(COLUMNS, self.rows())
        screen.line(LEGEND, "dim")
        screen.line(self.line())
        screen.table(
            CHOICES, [[name, f"{rate:,.0f}", loss] for name, rate, loss, _ in self.choices()]
        )
        for line in self.advice():
            screen.line(line)

    def page_parts(self) -> list[str]:
        head = [column.name for column in COLUMNS]
        return [
            heading("Joined jobs in its place, one in each cluster"),
            paragraphs([self.jobs_line() + "."]),
            picture(svg(self.figure()), "tokens/s over every"),
            table(head, self.rows()),
            paragraphs([LEGEND, self.line() + "."]),
        ]


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the argument of `holmes plan`; `add` is an argument group's add_argument()."""
    add(
        "--joined",
        action="store_true",
        help="beside it: one job in each cluster, joined (docs/joined.md)",
    )


def wanted(args: argparse.Namespace) -> bool:
    return bool(args.joined)


def beside(result: SearchResult, seconds: float) -> Beside:
    """Of each cluster alone, in so many seconds each; HolmesError: one cluster, or the model fits none."""
    site, model = result.network.site, result.model
    if len(site.clusters) < 2:
        raise HolmesError(
            f"{site.source}: --joined needs two clusters or more; it has {len(site.clusters)}"
        )
    jobs = []
    for name, samples in joined.shares(site, result.global_batch, model.micro_batch).items():
        try:
            alone = result.on(Network(joined.apart(site, name), result.network.links))
            asked = replace(alone, model=replace(model, global_batch=samples), global_batch=samples)
            match = search(asked, seconds, prove=False)
        except HolmesError as error:
            raise HolmesError(f"--joined: a job on cluster {name} alone: {error}") from None
        jobs.append(JoinedJob(name, samples, match.best.step_s, ethernet_s(match, match.best)))
    rounds = joined.RoundPrices(result.network.measured, model.parameters, jobs)
    return Beside(rounds, model.sequence, result.tokens_per_s(result.best))
