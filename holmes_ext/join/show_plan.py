"""`holmes plan --joined`: forecast for one job in each cluster, compared with one job that spans them.

The jobs train one model together as joined jobs (docs/joined.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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
#: Default port of `holmes join serve`.
_PORT = 29600
#: Number of joined jobs with default settings -> their loss compared with one synchronous job, as measured in
#: docs/benchmarks/joined.md.
_LOSS_OF_JOINED = {2: "as one job's within seed noise", 4: "0.16 to 0.22 nats behind one job's"}
#: Advice from benchmarks/joined_losses.py.
_MUON = "--holmes-outer algorithm=muon: small models learned more than in one job (docs/benchmarks/joined.md)"
CHOICES = (Column("choice"), Column("tokens/s", right=True), Column("loss"))
LEGEND = "exposed, slower: of each step; gain: tokens/s over those of the best plan of one job that crosses"
#: Clusters that are needed for joined jobs.
_LEAST_CLUSTERS = 2


class Choice(NamedTuple):
    """One way to train on several clusters: its tokens/s, its expected loss, and the flags for it.

    One job may span the clusters, or several joined jobs may exchange weights now and then.
    """

    name: str
    tokens_per_second: float
    loss: str  # in words, compared with one synchronous job
    flags: str  # to add to the command


@dataclass(frozen=True)
class JoinedForecast:
    """Predicted throughput of joined jobs, one in each cluster, and of one job that spans them.

    `holmes plan` shows it, as text, JSON or a page.
    """

    rounds: joined.RoundForecasts
    tokens: int  # of a sample
    spanning_job_tokens_per_s: float  # of the best plan of one job that spans the clusters

    @cached_property
    def settings(self) -> list[joined.Setting]:
        """Return the forecasts to show, each with the values of --holmes-outer."""
        return joined.settings(self.rounds)

    def document(self) -> dict[str, Any]:
        """Return the predicted throughput as a JSON document.

        Returns:
            "jobs": samples and step time of each joined job. "settings": round time and tokens/s
            for each combination of --holmes-outer. "crossing": tokens/s of one job that spans the
            clusters. "choices": these ways to train, compared.
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
        tokens_per_sample = self.tokens
        fastest_alone = tokens_per_sample * fastest.samples / fastest.step_s
        choices = [
            Choice(
                name=f"one job on {fastest.cluster} alone",
                tokens_per_second=fastest_alone,
                loss="of its batch",
                flags="--holmes",
            ),
            Choice(
                name="one job across",
                tokens_per_second=self.spanning_job_tokens_per_s,
                loss="of its batch",
                flags="--holmes --holmes-cluster FILE",
            ),
        ]
        loss = _LOSS_OF_JOINED.get(len(jobs))
        if loss is not None:
            every, fragments, delay = joined.DEFAULT  # of --holmes-outer
            forecast = self.rounds.forecast(every, fragments, delay)
            together = tokens_per_sample * forecast.samples_per_s
            flags = f"--holmes --holmes-join {jobs[0].cluster}@HOST:{_PORT}"
            choices.append(
                Choice(name="joined jobs", tokens_per_second=together, loss=loss, flags=flags)
            )
        return choices

    def fastest_choice_lines(self) -> list[str]:
        """Return lines that name the choice with most tokens/s, and how to start it."""
        best = max(self.choices(), key=lambda choice: choice.tokens_per_second)
        if "--holmes-join" not in best.flags:
            return [f"most tokens/s: {best.name}; add to the command:", f"  {best.flags}"]
        serve = (
            "`holmes join serve` on HOST, which all reach; add to each job's command, with its own "
            "cluster's name"
        )
        return [_MUON, f"most tokens/s: {best.name}; {serve}:", f"  {best.flags}"]

    def figure(self) -> Any:
        """Return a matplotlib figure of tokens/s over `every`, in inner steps."""
        return worth_figure(self.rounds, self.tokens, self.spanning_job_tokens_per_s)

    def job_step_times(self) -> str:
        """Return the jobs, their step times and their samples in one line."""
        jobs = self.rounds.jobs
        return ", ".join(
            f"{job.cluster} {job.step_s:.4g} s a step of {job.samples} samples" for job in jobs
        )

    def show(self) -> None:
        """Print the predicted step times and throughput of joined jobs, and the best choice."""
        screen = Screen()
        screen.line("joined jobs instead (docs/joined.md), one in each cluster:", "bold")
        screen.line(f"  {self.job_step_times()}")
        screen.table(COLUMNS, self.rows())
        screen.line(LEGEND, "dim")
        screen.line(self.least_every_sentence())
        rows = [
            [choice.name, f"{choice.tokens_per_second:,.0f}", choice.loss]
            for choice in self.choices()
        ]
        screen.table(CHOICES, rows)
        for line in self.fastest_choice_lines():
            screen.line(line)

    def page_parts(self) -> list[str]:
        """Return the section of the HTML page about joined jobs, as HTML fragments."""
        head = [column.name for column in COLUMNS]
        return [
            heading("Joined jobs in its place, one in each cluster"),
            paragraphs([self.job_step_times() + "."]),
            picture(svg(self.figure()), "tokens/s over every"),
            table(head, self.rows()),
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
    are any.

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
    jobs = []
    # Cluster -> samples of its job in each step.
    batches = joined.shares(site, result.global_batch, model.micro_batch)
    for name, samples in batches.items():
        try:
            # Search as for one job, but on this cluster only, and with its share of the batch.
            one_cluster = joined.site_of_cluster(site, name)
            network = Network(one_cluster, result.network.links)
            problem = result.on(network)  # the same request for this network, not searched yet
            problem = replace(
                problem, model=replace(model, global_batch=samples), global_batch=samples
            )
            # A forecast needs the best plan found, but no proof that there is no better one.
            found = search(problem, seconds, prove=False)
        except HolmesError as error:
            raise HolmesError(f"--joined: a job on cluster {name} alone: {error}") from None
        job = JoinedJob(
            cluster=name,
            samples=samples,
            step_s=found.best.step_s,
            # Seconds of the step that depend on Ethernet's rate, which the rounds reduce.
            ethernet_s=ethernet_s(found, found.best),
        )
        jobs.append(job)
    site_with_measured_rates = result.network.measured
    rounds = joined.RoundForecasts(site_with_measured_rates, model.parameters, jobs)
    return JoinedForecast(
        rounds,
        tokens=model.sequence,  # of a sample: its sequence length
        spanning_job_tokens_per_s=result.tokens_per_s(result.best),
    )
