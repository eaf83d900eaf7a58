"""Predicted steps of a job that has started: with holmes, without it, and with a better layout.

The prediction is that of `holmes plan` for the same command, but for the nodes and networks that the
job has found. It needs a model and parallel sizes. Megatron's flags have both, and other programs
can give them with --holmes-model and --holmes-sizes.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holmes_ext.cli import plan as plan_command
from holmes_ext.cli.show.training import Training, training_of
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import ClusterSpec, SiteSpec, load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import times
from holmes_ext.planner.search.result import EQUAL, SearchResult, worst_error
from holmes_ext.planner.search.search import search
from holmes_ext.planner.show import start
from holmes_ext.planner.show.layout import alone, asked_for, compared, limits_of
from holmes_ext.planner.show.search_table import sizes_text, split_text
from holmes_ext.planner.simulate.deadline import TimeIsOver

if TYPE_CHECKING:
    from holmes_ext.runtime.session import Session

#: Name of the cluster file in the arguments of `holmes plan` if the job has none.
_NO_CLUSTER_FILE = "cluster.toml"
#: Time limit of the search for a better layout, in seconds.
SEARCH_S = 8.0
_MODEL_IS_MISSING = (
    "the program's arguments name no model: give --holmes-model FILE (examples/models) and "
    "--holmes-sizes pipeline=N,tensor=N"
)


@dataclass(frozen=True)
class BetterLayout:
    """A layout of the same model that the search predicts to be faster."""

    sizes: str  # "T2 P2 D16", as in the tables of `holmes plan`
    layers: str  # of each stage
    step_s: float
    changes: tuple[str, ...]  # lines that name flags of the command line to remove, change or add


@dataclass(frozen=True)
class Prediction:
    """Predicted step times of a job in seconds, or the reason why there are none."""

    missing: str = ""  # the reason, and the missing input; "" if there is a prediction
    step_s: float = 0.0
    stock_s: float = 0.0  # without holmes
    worst_error: float = 0.0  # largest measured error of predictions, as a fraction
    better: BetterLayout | None = None  # None if the search found nothing faster
    lines: tuple[str, ...] = ()  # for the user: facts read from the command, assumptions, omissions


def predict(current: Session, words: Sequence[str]) -> Prediction:
    """Return the predicted steps of a job: as it is, without holmes, and with a better layout.

    The job's own layout is simulated. Then a short search looks for other parallel sizes that are
    faster.

    Args:
        current: The session of rank 0.
        words: The program and its arguments, without flags of holmes.
    """
    spec = _spec_of(current)
    try:
        args = _plan_arguments(current, words)
        job = training_of(args, spec)
    except HolmesError as error:
        return Prediction(missing=str(error))
    if job.model is None:
        return Prediction(missing=_MODEL_IS_MISSING, lines=job.lines)
    sizes = current.plan.sizes or Sizes().complete(current.plan.world_size)

    # The job has its own options, and sizes that --holmes-sizes or a plan file may have given.
    job = replace(job, options=current.options, engine=current.engine, sizes=sizes)
    network = Network(current.site, Links.of_spec(spec))
    try:
        # A search result with a single candidate, so `best` is the job's own layout, simulated.
        own = alone(current.plan_for(sizes), network, job, job.known_model)
        seconds = times(own, own.best)  # name -> step time; "stock": the job without holmes
    except (HolmesError, TimeIsOver) as error:
        return Prediction(missing=f"no prediction: {error}", lines=job.lines)
    return Prediction(
        step_s=seconds["step_seconds"],
        stock_s=seconds["stock_step_seconds"],
        worst_error=worst_error(),  # of simulated against measured steps, in all benchmarks
        better=_better_layout(own, args, job),  # than the job's own layout
        lines=job.lines,
    )


def _plan_arguments(current: Session, words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `holmes plan` that describe the job."""
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    options = ["--cluster", current.options.cluster or _NO_CLUSTER_FILE]
    if current.options.model:
        options += ["--model", current.options.model]
    return parser.parse_args(["plan", *options, "--", *words])


def _spec_of(current: Session) -> SiteSpec:
    """Return the cluster.toml of the job, without nodes that are not in the job.

    Without a cluster.toml, the result describes the nodes as they have reported, with GPUs of an
    unknown model.
    """
    if not current.options.cluster:
        return _spec_of_reports(current.site)
    spec = load_spec(current.options.cluster)
    return spec.only({spec.known_as(node) for node in current.plan.nodes})


def _spec_of_reports(site: Site) -> SiteSpec:
    """Describe the clusters as a cluster.toml would, for a job that has no such file.

    Args:
        site: Clusters, nodes and networks, as the nodes have reported their NICs.
    """
    ethernet = site.fabric_by_name[ETHERNET]
    clusters = []
    for cluster in site.clusters:
        nodes = [node for node in site.nodes if node.cluster == cluster]
        # The ports of a node are in the order of their rates. All nodes of a cluster have the same.
        fastest = site.fabric_by_name[nodes[0].ports[0].fabric]
        clusters.append(
            ClusterSpec(
                name=cluster,
                kind=fastest.kind,
                nodes=tuple(node.name for node in nodes),
                rate_bps=fastest.rate_bps,
                fabric=fastest.name,
                latency_s=fastest.latency_s,
                processes=nodes[0].processes,
            )
        )
    return SiteSpec(
        name="",
        ethernet_rate_bps=ethernet.rate_bps,
        ethernet_latency_s=ethernet.latency_s,
        ethernet_interface="",
        clusters=tuple(clusters),
        source=site.source,
    )


def _better_layout(
    layout: SearchResult, args: argparse.Namespace, job: Training
) -> BetterLayout | None:
    """Search other parallel sizes, and return the fastest; None if nothing is faster than the layout.

    Args:
        layout: Result whose best plan is the job as it is.
        args: Arguments with which `holmes plan` would describe the job (_plan_arguments).
        job: The job.
    """
    limits = limits_of(args, job)  # of the search space
    request = asked_for(layout.network, job, layout.global_batch, limits)
    request = replace(request, user_layout=layout.best)
    try:
        # prove=False: only the fast heuristic part of the search runs. The part that proves how far
        # the best plan is from the optimum would start processes.
        found = search(request, SEARCH_S, prove=False)
        # The job's own layout becomes the best plan if the search found nothing faster.
        result = compared(found, limits)
    except HolmesError:  # nothing else fits
        return None
    best = result.best
    if best.step_s >= layout.best.step_s * (1 - EQUAL):
        return None
    return BetterLayout(
        sizes=sizes_text(best.shape),
        layers=split_text(best.split),
        step_s=best.step_s,
        changes=tuple(_changes(result, args, job)),
    )


def _changes(result: SearchResult, args: argparse.Namespace, job: Training) -> list[str]:
    """Return the changes to the command line for the best plan; [] if the framework is not known.

    Each line names flags to remove, to change or to add.
    """
    # Framework -> how to start the plan. plan="": by flags alone, without a plan file.
    launches = start.launches_of(result, args, job, plan="")
    if len(launches) > 1:  # the command does not show its framework, so there is an entry for each
        return []
    (changes,) = start.launch_lines(launches).values()
    # The command has this flag, or the job runs without a cluster.toml and _NO_CLUSTER_FILE fills in.
    flag = shlex.join(["--holmes-cluster", job.options.cluster or _NO_CLUSTER_FILE])
    return [change.replace(f" {flag}", "") for change in changes]
