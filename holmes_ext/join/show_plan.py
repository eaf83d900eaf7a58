"""`holmes plan --joined`: forecast for one job in each cluster, compared with one job that spans them.

The jobs train one model together as joined jobs (docs/joined.md). The forecast begins with the choice among:

    - one job on the fastest cluster
    - one job across all clusters
    - joined jobs
    - joined jobs with rounds by time, or with batches by speed, if the clusters are not equally fast

Nothing is recommended if a search reached its time limit before all parallel sizes were examined.
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
from holmes_ext.planner.html.chart import WIDE
from holmes_ext.planner.html.page import command, heading, paragraphs, table
from holmes_ext.planner.html.pictures import chart
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
#: Number of joined jobs with default settings -> their loss compared with one synchronous job: differences of
#: small models with AdamW, as measured in docs/benchmarks/joined.md (benchmarks/joined_muon.py).
_LOSS_OF_JOINED = {
    2: "-0.13 to 0.12 nats from one job's",
    4: "-0.08 to 0.21 nats from one job's",
    8: "-0.02 to 0.09 nats from one job's",
}
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
    """Way to train on several clusters: its tokens/s, its expected loss, and the flags for it.

    A single job may span the clusters, or several joined jobs may exchange weights now and then.
    """

    name: str
    tokens_per_second: float
    loss: str  # in words, compared with one synchronous job
    flags: str  # to add to the command
    is_unfinished: bool = False  # a search for it ended before all parallel sizes were examined


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
    #: Clusters for which the search for the best plan of a job on this cluster alone ended before all
    #: parallel sizes were examined.
    unfinished: tuple[str, ...] = ()
    #: The search for the job that spans the clusters ended in the same way.
    is_spanning_job_unfinished: bool = False

    @cached_property
    def settings(self) -> list[joined.Setting]:
        """Return the forecasts to show, each with the values of --holmes-outer."""
        return joined.settings(self.rounds)

    def document(self) -> dict[str, Any]:
        """Return the predicted throughput as a JSON document.

        Joined jobs, one in each cluster, train one model together. The alternative is a single job
        with traffic over the links between the clusters.

        Returns:
            A dictionary with these keys:

                "jobs"          samples and step time of each joined job
                "settings"      duration of an exchange between the jobs, and tokens/s of all jobs,
                                for each combination of values of --holmes-outer
                "crossing"      tokens/s of one job that spans the clusters
                "choices"       these ways to train, compared
                "unfinished"    names of the jobs whose search reached its time limit
        """
        settings = []
        for setting in self.settings:
            # self.tokens: of a sample (a sequence)
            tokens_per_second = setting.samples_per_s * self.tokens
            settings.append({**asdict(setting), "tokens_per_second": tokens_per_second})
        return {
            "jobs": [asdict(job) for job in self.rounds.jobs],
            "settings": settings,
            "crossing": self.spanning_job_tokens_per_s,
            "choices": [choice._asdict() for choice in self.choices()],
            "unfinished": self.unfinished_searches(),
        }

    def least_every_sentence(self) -> str:
        """Return a sentence with the least value of `every` for which training never waits for a round.

        `holmes plan` prints it. `every` is the setting of --holmes-outer: inner steps from an exchange
        of a fragment (part of the model) to its next exchange. At least one of the predicted settings
        is without waiting.
        """
        without_waiting = [setting for setting in self.settings if not setting.exposed_s]
        least = min(without_waiting, key=lambda setting: setting.every)
        text = f"nothing is exposed from {least} on; all wait for the slowest job"
        if least.delay > joined.DELAY:
            text += f"; sums older than {joined.DELAY} steps are not known to be harmless"
        return text

    def rows(self) -> list[list[str]]:
        """Return a table of predictions, with a row for each combination of values of --holmes-outer.

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

        Each has a text on the expected loss. The loss of one job depends on its batch only, not
        on the hardware. So the text is "of its batch": the loss that a batch of this size gives.

        Joined jobs appear in two ways:

        - With equal steps in all jobs, only if their loss was measured for this number of jobs
          (_LOSS_OF_JOINED).
        - If the jobs differ in speed, in faster variants (_unequal_choices). No benchmark has
          measured the loss of these, and their text says so.
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
        """Return the samples/s of all joined jobs together, with the default of --holmes-outer.

        --holmes-outer is the schedule of exchanges between the jobs.
        """
        return self.rounds.forecast(*joined.DEFAULT).samples_per_s

    def _joined(self, name: str, samples_per_s: float, loss: str, more_flags: str = "") -> Choice:
        """Return a way to train with joined jobs: its throughput, loss and command-line flags.

        The flags are those of the first job; each other job has its own cluster's name in them.

        Args:
            name: Name of this way to train, as the user sees it.
            samples_per_s: Of all jobs together.
            loss: Comparison of the loss with that of one job, in words.
            more_flags: Flags besides those that all joined jobs need.
        """
        first_cluster = self.rounds.jobs[0].cluster
        # The user replaces HOST by the machine where `holmes join serve` coordinates the jobs.
        flags = f"--holmes --holmes-join {first_cluster}@HOST:{_PORT}"
        return Choice(
            name=name,
            tokens_per_second=self.tokens * samples_per_s,  # tokens: of a sample
            loss=loss,
            flags=f"{flags} {more_flags}".strip(),
            is_unfinished=bool(self.unfinished),
        )

    def _unequal_choices(self) -> list[Choice]:
        """Return ways to train with joined jobs of different speed, without waiting for the slowest.

        Joined jobs, one in each cluster, exchange pseudo-gradients in rounds. By default, a round
        follows the same number of inner steps in each job, and the batches are in proportion to the
        number of ranks. Then the faster jobs wait for the slowest. There are two ways out:

            rounds by time      a round follows a time, such as 15 s. Each job takes as many inner
                                steps as it can in that time
            batches by speed    a faster job has a larger batch, so that a step takes equally long
                                in each job

        A way is returned only if it trains more than WORTH (1.02) times as many tokens/s as the
        default.
        """
        if self.by_speed is None:  # the jobs are equally fast
            return []
        by_time = self.rounds.by_time()
        batches = ", ".join(f"{job.cluster} {job.samples}" for job in self.by_speed.jobs)
        choices = [
            self._joined(
                f"joined jobs, {by_time}",
                by_time.samples_per_s,
                loss=NOT_MEASURED,
                more_flags=f"(start `holmes join serve` with --outer {by_time})",
            ),
            self._joined(
                f"joined jobs, batches {batches}",
                self.by_speed.forecast(*joined.DEFAULT).samples_per_s,
                loss=NOT_MEASURED,
            ),
        ]
        default_tokens_per_s = self.tokens * self._default_samples_per_s
        return [
            choice for choice in choices if choice.tokens_per_second > WORTH * default_tokens_per_s
        ]

    def unfinished_searches(self) -> list[str]:
        """Return the jobs whose search reached its time limit before all parallel sizes were examined.

        They may be jobs on one cluster and the job that spans all clusters.

        Returns:
            Names as in the table of choices: ["one job on a alone", "one job across"].
        """
        searches = [f"one job on {cluster} alone" for cluster in self.unfinished]
        if self.is_spanning_job_unfinished:
            searches.append(ONE_JOB_ACROSS)
        return searches

    def advice(self) -> list[str]:
        """Return lines that recommend a way to train, and show the flags to start it.

        The ways are one job on one cluster, one job across all clusters, and joined jobs
        (choices()). Recommended is the one with most tokens/s among those whose expected loss is
        known. A way with more tokens/s, but a loss that no benchmark has measured, is mentioned
        before it. Nothing is recommended if a search is unfinished. Lines with flags are indented.
        """
        unfinished = self.unfinished_searches()
        if unfinished:
            return [
                "no recommendation: the time was over before all parallel sizes were examined for "
                f"{', '.join(unfinished)}; give more --seconds"
            ]
        best = self._recommended()
        lines = []
        for choice in self.choices():
            is_measured = choice.loss != NOT_MEASURED
            if not is_measured and choice.tokens_per_second > best.tokens_per_second:
                lines.append(
                    f"more tokens/s, but the loss was not measured: {choice.name}; add to each job's "
                    "command, with its own cluster's name:"
                )
                lines.append(f"  {choice.flags}")
        if "--holmes-join" not in best.flags:  # one job, which is started as always
            return [*lines, f"{self.verdict()}; add to the command:", f"  {best.flags}"]
        serve = (
            "`holmes join serve` on HOST, which all reach, and `holmes join invite NAME` there for each "
            "cluster's job; add to each job's command, with its own cluster's name"
        )
        return [*lines, f"{self.verdict()}; {serve}:", f"  {best.flags}"]

    def _recommended(self) -> Choice:
        """Return the way to train with most tokens/s, of those whose loss is known."""
        measured = [choice for choice in self.choices() if choice.loss != NOT_MEASURED]
        return max(measured, key=lambda choice: choice.tokens_per_second)

    def choice_rows(self) -> list[list[str]]:
        """Return the table of the ways to train: name, tokens/s and loss of each."""
        rows = []
        for choice in self.choices():
            name = f"{choice.name} (search unfinished)" if choice.is_unfinished else choice.name
            rows.append([name, f"{choice.tokens_per_second:,.0f}", choice.loss])
        return rows

    def figure(self, width: float = WIDE) -> Any:
        """Return a matplotlib figure of tokens/s over the setting `every`.

        `every` is the number of inner steps from an exchange of a part of the model to the next
        exchange of the same part.
        """
        choices = self.choices()
        single_jobs = {
            choice.name: choice.tokens_per_second
            for choice in choices
            if "--holmes-join" not in choice.flags
        }
        return worth_figure(self.rounds, self.tokens, single_jobs, self.verdict(), width)

    def verdict(self) -> str:
        """Return the recommended way to train.

        Ways whose loss no benchmark has measured are not recommended. If it was not measured for this
        number of joined jobs, the text adds this, as the reason why they are not recommended.
        """
        if self.unfinished_searches():
            return "no recommendation: a search was not finished"
        text = f"recommended: {self._recommended().name}"
        if len(self.rounds.jobs) not in _LOSS_OF_JOINED:  # then choices() has no such way
            text += f"; the loss of {len(self.rounds.jobs)} joined jobs was not measured"
        return text

    def job_step_times(self) -> str:
        """Return a line with the jobs, their step times and their samples."""
        jobs = self.rounds.jobs
        return ", ".join(
            f"{job.cluster} {job.step_s:.4g} s a step of {counted(job.samples, 'sample')}"
            for job in jobs
        )

    def show(self) -> None:
        """Print joined jobs as an alternative to one job that spans the clusters.

        The output comes after the plan of that job. It has these parts:

        1. the ways to train with their tokens/s and loss, and the recommended way
        2. the predicted step time of each joined job
        3. a table of schedules for the exchanges between the jobs, with a legend
        4. a sentence: how many inner steps between exchanges hide the exchanges completely
        """
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
        """Return the section of the HTML page about joined jobs, as HTML fragments.

        It follows the plan of one job that spans the clusters, and has the same parts as the text
        of show(). In addition, a picture draws tokens/s against `every`: the number of inner steps from
        an exchange of a part of the model to the next exchange of the same part.
        """
        advice = []
        for line in self.advice():
            is_flags = line.startswith(" ")
            advice.append(command(line.strip()) if is_flags else paragraphs([line]))
        return [
            # "its": of the job that spans the clusters; its plan is above.
            heading("Joined jobs in its place, one in each cluster"),
            table([column.name for column in CHOICES], self.choice_rows()),
            *advice,
            paragraphs([self.job_step_times() + "."]),
            chart(self.figure, "tokens/s over every"),
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
    """Return whether --joined was given: a forecast of joined jobs, one in each cluster."""
    return bool(args.joined)


def beside(result: SearchResult, seconds: float) -> JoinedForecast:
    """Return the forecast for joined jobs, to show beside the plan of a job that spans the clusters.

    Joined jobs, one in each cluster, train one model together: each takes steps by itself, and now
    and then (in a round) they exchange how far their weights have moved.

    1. For each cluster, search for the best plan of a job on this cluster alone, with its share of
       the batch.
    2. Simulate the rounds between these jobs, on the network with measured rates if there are any.
    3. If the slowest job's step takes more than UNEQUAL (1.05) times as long as the fastest job's,
       also try batches in proportion to the jobs' speeds.

    Args:
        result: The search for the best plan of a job that spans the clusters.
        seconds: Time limit of the search for each job's best plan.

    Raises:
        HolmesError: There is only one cluster, or the model does not fit on a cluster.
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
        except HolmesError:  # no plan fits such a batch: keep only the batches by number of ranks
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
