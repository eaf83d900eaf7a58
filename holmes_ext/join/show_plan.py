"""`holmes plan --joined`: forecast for one job in each cluster, compared with one job that spans them.

The jobs train one model together as joined jobs (docs/joined.md). The forecast begins with the choice:

    one job on the fastest cluster     one job across all clusters     joined jobs
    joined jobs with rounds by time, or with batches by speed, if the clusters are not equally fast

Nothing is recommended if the time of a search was over before all parallel sizes were examined.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.join import estimate as joined
from holmes_ext.join.pictures import worth_figure
from holmes_ext.join.priced_jobs import price_jobs
from holmes_ext.join.simulated_rounds import JoinedJob
from holmes_ext.planner.html.page import heading, paragraphs, picture, table
from holmes_ext.planner.html.pictures import svg
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.words import counted

COLUMNS = (
    Column("--holmes-outer"),
    Column("round, s", right=True, drop=1),
    Column("exposed, s", right=True),
    Column("slower, s", right=True, drop=2),
    Column("tokens/s", right=True),
    Column("gain", right=True),
)
#: Default port of `holmes join serve`.
_PORT = 29600
#: Number of joined jobs with default settings -> their loss compared with one synchronous job, as measured in
#: docs/benchmarks/joined.md.
_LOSS_OF_JOINED = {2: "as one job's within seed noise", 4: "0.16 to 0.22 nats behind one job's"}
#: Advice from benchmarks/joined_losses.py.
_MUON = "--holmes-outer algorithm=muon: small models learned more than in one job (docs/benchmarks/joined.md)"
CHOICES = (Column("choice", wrap=20), Column("tokens/s", right=True), Column("loss", wrap=16))
LEGEND = "exposed, slower: of each step; gain: tokens/s over those of the best plan of one job that crosses"
#: Clusters that are needed for joined jobs.
_LEAST_CLUSTERS = 2
#: Name of the way to train in which one job spans all clusters.
ONE_JOB_ACROSS = "one job across"
#: Loss of a way to train that no benchmark has measured. Such a way is shown, but not recommended.
NOT_MEASURED = "not measured"
#: Jobs whose step times differ by no more than this factor are equally fast.
UNEQUAL = 1.05
#: A way for jobs of different speed is shown if it has this many times the tokens/s of the default.
WORTH = 1.02


class Choice(NamedTuple):
    """One way to train on several clusters: its tokens/s, its expected loss, and the flags for it.

    One job may span the clusters, or several joined jobs may exchange weights now and then.
    """

    name: str
    tokens_per_second: float
    loss: str  # in words, compared with one synchronous job
    flags: str  # to add to the command
    is_unfinished: bool = False  # a search that it rests on ended before all sizes were examined


@dataclass(frozen=True)
class JoinedForecast:
    """Predicted throughput of joined jobs, one in each cluster, and of one job that spans them.

    `holmes plan` shows it, as text, JSON or a page.
    """

    rounds: joined.RoundForecasts
    tokens: int  # of a sample
    spanning_job_tokens_per_s: float  # of the best plan of one job that spans the clusters
    #: The same jobs with batches in proportion to their speeds; None if they are equally fast.
    by_speed: joined.RoundForecasts | None = None
    #: Clusters whose search of a job of their own was over before all sizes were examined.
    unfinished: tuple[str, ...] = ()
    is_spanning_job_unfinished: bool = False  # the same for the job that spans the clusters

    @cached_property
    def settings(self) -> list[joined.Setting]:
        """Return the forecasts to show, each with the values of --holmes-outer."""
        return joined.settings(self.rounds)

    def document(self) -> dict[str, Any]:
        """Return the predicted throughput as a JSON document.

        Returns:
            "jobs": samples and step time of each joined job. "settings": round time and tokens/s
            for each combination of --holmes-outer. "crossing": tokens/s of one job that spans the
            clusters. "choices": these ways to train, compared. "unfinished": searches that the time
            ended.
        """
        settings = []
        for setting in self.settings:
            tokens_per_second = setting.samples_per_s * self.tokens
            settings.append({**asdict(setting), "tokens_per_second": tokens_per_second})
        return {
            "jobs": [asdict(job) for job in self.rounds.jobs],
            "settings": settings,
            "crossing": self.spanning_job_tokens_per_s,  # one job that spans the clusters
            "choices": [choice._asdict() for choice in self.choices()],
            "unfinished": self.unfinished_searches(),
        }

    def least_every_sentence(self) -> str:
        """Return a sentence: from which value of `every` on training never waits for a round.

        `holmes plan` prints it. `every` is the setting of --holmes-outer: inner steps from one
        exchange of a fragment to its next one. At least one predicted setting is without waiting.
        """
        without_waiting = [setting for setting in self.settings if not setting.exposed_s]
        least = min(without_waiting, key=lambda setting: setting.every)
        text = f"nothing is exposed from {least} on; all wait for the slowest job"
        if least.delay > joined.DELAY:
            text += f"; sums older than {joined.DELAY} steps are not known to be harmless"
        return text

    def rows(self) -> list[list[str]]:
        """Return a table of predictions, one row for each combination of values of --holmes-outer.

        Columns:

            the values of --holmes-outer
            duration of a round, in seconds
            seconds that training waits for rounds, per inner step
            seconds by which an inner step itself is slower, as rounds share the network with it,
                compared with a job that trains alone
            tokens/s of all joined jobs
            gain: these tokens/s divided by those of one job that spans the clusters
        """
        result = []
        for setting in self.settings:
            tokens_per_second = setting.samples_per_s * self.tokens
            result.append(
                [
                    str(setting),
                    f"{setting.round_s:.3g}",
                    f"{setting.exposed_s:.3g}",
                    f"{setting.slower_s:.3g}",
                    f"{tokens_per_second:,.0f}",
                    f"{tokens_per_second / self.spanning_job_tokens_per_s:.2f}",
                ]
            )
        return result

    def choices(self) -> list[Choice]:
        """Return ways to train: one job on a cluster, one job across all clusters, joined jobs.

        The loss of one job depends on its batch only, not on the hardware: it is shown as "of its
        batch". The loss of joined jobs was measured for some numbers of jobs; with other numbers
        they are no choice.
        """
        jobs = self.rounds.jobs
        fastest = max(jobs, key=lambda job: job.samples / job.step_s)
        choices = [
            Choice(
                name=f"one job on {fastest.cluster} alone",
                tokens_per_second=self.tokens * fastest.samples / fastest.step_s,
                loss="of its batch",
                flags="--holmes",
                is_unfinished=bool(self.unfinished),  # another cluster might be the fastest
            ),
            Choice(
                name=ONE_JOB_ACROSS,
                tokens_per_second=self.spanning_job_tokens_per_s,
                loss="of its batch",
                flags="--holmes --holmes-cluster FILE",
                is_unfinished=self.is_spanning_job_unfinished,
            ),
        ]
        loss = _LOSS_OF_JOINED.get(len(jobs))
        if loss is not None:
            choices.append(self._joined("joined jobs", self._default_samples_per_s, loss))
        return [*choices, *self._unequal_choices()]

    @property
    def _default_samples_per_s(self) -> float:
        """Samples/s of all joined jobs with the defaults of --holmes-outer."""
        return self.rounds.forecast(*joined.DEFAULT).samples_per_s

    def _joined(self, name: str, samples_per_s: float, loss: str, more_flags: str = "") -> Choice:
        """Return a way to train with joined jobs.

        Args:
            more_flags: Flags besides those that all joined jobs need.
        """
        flags = f"--holmes --holmes-join {self.rounds.jobs[0].cluster}@HOST:{_PORT}"
        return Choice(
            name=name,
            tokens_per_second=self.tokens * samples_per_s,
            loss=loss,
            flags=f"{flags} {more_flags}".strip(),
            is_unfinished=bool(self.unfinished),
        )

    def _unequal_choices(self) -> list[Choice]:
        """Return ways to train with joined jobs of different speed, without waiting for the slowest.

            rounds by time      every=60s: each job takes as many inner steps as it can in that time
            batches by speed    a step takes equally long in each job

        Only those are returned that train more tokens/s than joined jobs with the defaults, by the
        factor WORTH.
        """
        if self.by_speed is None:
            return []
        by_time = self.rounds.by_time()
        batches = ", ".join(f"{job.cluster} {job.samples}" for job in self.by_speed.jobs)
        choices = [
            self._joined(
                f"joined jobs, {by_time}",
                by_time.samples_per_s,
                loss=NOT_MEASURED,
                more_flags=f"--holmes-outer {by_time}",
            ),
            self._joined(
                f"joined jobs, batches {batches}",
                self.by_speed.forecast(*joined.DEFAULT).samples_per_s,
                loss=NOT_MEASURED,
            ),
        ]
        least = WORTH * self.tokens * self._default_samples_per_s
        return [choice for choice in choices if choice.tokens_per_second > least]

    def unfinished_searches(self) -> list[str]:
        """Return the jobs whose search was over before all parallel sizes were examined, in words."""
        searches = [f"one job on {cluster} alone" for cluster in self.unfinished]
        if self.is_spanning_job_unfinished:
            searches.append(ONE_JOB_ACROSS)
        return searches

    def advice(self) -> list[str]:
        """Return lines that name the choice with most tokens/s, and how to start it.

        Nothing is recommended if a search is unfinished. A choice whose loss was not measured is
        named after the others, if it has more tokens/s than them.
        """
        unfinished = self.unfinished_searches()
        if unfinished:
            return [
                "no recommendation: the time was over before all parallel sizes were examined for "
                f"{', '.join(unfinished)}; give more --seconds"
            ]
        measured = [choice for choice in self.choices() if choice.loss != NOT_MEASURED]
        best = max(measured, key=lambda choice: choice.tokens_per_second)
        lines = []
        for choice in self.choices():
            is_measured = choice in measured
            if not is_measured and choice.tokens_per_second > best.tokens_per_second:
                lines.append(
                    f"more tokens/s, but the loss was not measured: {choice.name}; add to each job's "
                    "command, with its own cluster's name:"
                )
                lines.append(f"  {choice.flags}")
        if "--holmes-join" not in best.flags:
            return [*lines, f"most tokens/s: {best.name}; add to the command:", f"  {best.flags}"]
        serve = (
            "`holmes join serve` on HOST, which all reach; add to each job's command, with its own "
            "cluster's name"
        )
        return [*lines, _MUON, f"most tokens/s: {best.name}; {serve}:", f"  {best.flags}"]

    def choice_rows(self) -> list[list[str]]:
        """Return the table of the ways to train, one row each."""
        rows = []
        for choice in self.choices():
            name = f"{choice.name} (search unfinished)" if choice.is_unfinished else choice.name
            rows.append([name, f"{choice.tokens_per_second:,.0f}", choice.loss])
        return rows

    def figure(self) -> Any:
        """Return a matplotlib figure of tokens/s over `every`, in inner steps."""
        return worth_figure(self.rounds, self.tokens, self.spanning_job_tokens_per_s)

    def job_step_times(self) -> str:
        """Return the jobs, their step times and their samples in one line."""
        jobs = self.rounds.jobs
        return ", ".join(
            f"{job.cluster} {job.step_s:.4g} s a step of {counted(job.samples, 'sample')}"
            for job in jobs
        )

    def show(self) -> None:
        """Print the choice and how to start it, then the forecast on which it rests."""
        screen = Screen()
        screen.line("joined jobs instead (docs/joined.md), one in each cluster:", "bold")
        screen.table(CHOICES, self.choice_rows())
        for line in self.advice():
            screen.line(line)
        screen.line(f"joined jobs: {self.job_step_times()}")
        screen.table(COLUMNS, self.rows())
        screen.line(LEGEND, "dim")
        screen.line(self.least_every_sentence())

    def page_parts(self) -> list[str]:
        """Return the section of the HTML page about joined jobs, as HTML fragments."""
        return [
            heading("Joined jobs in its place, one in each cluster"),
            table([column.name for column in CHOICES], self.choice_rows()),
            paragraphs([*self.advice(), self.job_step_times() + "."]),
            picture(svg(self.figure()), "tokens/s over every"),
            table([column.name for column in COLUMNS], self.rows()),
            paragraphs([LEGEND, self.least_every_sentence() + "."]),
        ]


def add_arguments(add: Callable[..., Any]) -> None:
    """Add --joined to the arguments of `holmes plan`.

    Args:
        add: The add_argument() of an argument group.
    """
    add(
        "--joined",
        action="store_true",
        help="beside it: one job in each cluster, joined (docs/joined.md)",
    )


def wanted(args: argparse.Namespace) -> bool:
    """Return whether --joined was given, for a forecast of one joined job in each cluster."""
    return bool(args.joined)


def beside(result: SearchResult, seconds: float) -> JoinedForecast:
    """Return the forecast for joined jobs, one in each cluster, to show beside the plan of one job.

    For each cluster the best plan of a job on this cluster alone is searched, with its share of the
    batch. The rounds between these jobs are simulated on the network with measured rates, if there
    are any. If the jobs' step times differ, batches in proportion to their speeds are tried, too.

    Args:
        result: The search for the best plan of one job that spans the clusters.
        seconds: Time to search for the best plan of each job, per job.

    Raises:
        HolmesError: There is only one cluster, or the model does not fit on one of the clusters.
    """
    site = result.network.site
    model = result.model
    if len(site.clusters) < _LEAST_CLUSTERS:
        raise HolmesError(
            f"{site.source}: --joined needs two clusters or more; it has {len(site.clusters)}"
        )

    def rounds_of(jobs: Sequence[JoinedJob]) -> joined.RoundForecasts:
        return joined.RoundForecasts(result.network.measured, model.parameters, jobs)

    batches = joined.shares(site, result.global_batch, model.micro_batch)
    jobs, unfinished = price_jobs(result, batches, seconds)
    by_speed = None
    steps_s = [job.step_s for job in jobs]
    # Speeds from unfinished searches say little, and would only take more time.
    if not unfinished and max(steps_s) > UNEQUAL * min(steps_s):
        speeds = {job.cluster: job.samples / job.step_s for job in jobs}
        batches = joined.shares(site, result.global_batch, model.micro_batch, speeds)
        try:
            jobs_by_speed, unfinished_by_speed = price_jobs(result, batches, seconds)
        except HolmesError:  # no plan divides a batch: then the clusters' nodes decide the batches
            pass
        else:
            by_speed = rounds_of(jobs_by_speed)
            unfinished = list(dict.fromkeys((*unfinished, *unfinished_by_speed)))
    return JoinedForecast(
        rounds_of(jobs),
        tokens=model.sequence,  # of a sample: its sequence length
        spanning_job_tokens_per_s=result.tokens_per_s(result.best),
        by_speed=by_speed,
        unfinished=tuple(unfinished),
        is_spanning_job_unfinished=result.is_unfinished,
    )
