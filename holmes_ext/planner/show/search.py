"""Command `holmes plan` without parallel sizes: search for the best plan, print it, and say how to start it.

An extension can show a forecast of its own beside the plans (a "companion", planner/companion.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holmes_ext.cli.show.matrix import show_wan
from holmes_ext.cli.show.training import LEAVE_OUT, Training, sizes_given
from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.sources.hostlist import folded
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.document import save
from holmes_ext.errors import HolmesError
from holmes_ext.extensions import Contribution, contributions
from holmes_ext.patches.megatron.command_line.refusals import refusals
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import REDUCTIONS, rules_of
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.companion import PlanCompanion
from holmes_ext.planner.html.pictures import pyplot, write
from holmes_ext.planner.html.plan_pictures import draw_search
from holmes_ext.planner.launch_flags import Launch, limited
from holmes_ext.planner.search.as_plan import layout_candidate, plan_of
from holmes_ext.planner.search.fewer import best_use
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.search import proven, search
from holmes_ext.planner.search.simulated import in_passes, timed, with_breadth_first, with_passes
from holmes_ext.planner.search.space import Limits, parse_limits
from holmes_ext.planner.search.spreading import with_spread
from holmes_ext.planner.show import plan_page, search_table
from holmes_ext.words import grouped

#: Seconds of silence before the progress bar shows.
SILENCE_S = 2.0
#: Share of the time limit for the forecasts of extensions.
COMPANION_SHARE = 0.1
#: Exit status after Ctrl-C.
INTERRUPTED_STATUS = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the search, and those of extensions that forecast beside it."""
    # `add` is add_argument() of the search's group; extensions add their own options to the same
    # group.
    title = "search (when no sizes are given, and --model or a command line says what to train)"
    add = parser.add_argument_group(title).add_argument
    add(
        "--search",
        action="store_true",
        help="search even if sizes are given, and compare with the best",
    )
    add(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=V,...",
        help="search only these values: tensor=1,2 or pipeline=2,tensor=1 or recompute=none or memory=60GB; "
        "repeatable",
    )
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time limit; ends early once the best is proven (default: 60); Ctrl-C: the best so far",
    )
    add("--rows", type=int, default=10, metavar="N", help="rows of the table (default: 10)")
    add(
        "--html",
        metavar="FILE",
        help="write one page with all of it, and pictures (needs matplotlib)",
    )
    add(
        "--pictures",
        metavar="DIR",
        help="write placement, timeline, clusters and ethernet.png, and joined.png with --joined (needs "
        "matplotlib)",
    )
    for companion in companions():
        companion.load().add_arguments(add)


def companions() -> list[Contribution]:
    """Return the extensions that show a forecast beside a search's plans (planner/companion.py)."""
    return contributions("plan_companions")


def wanted_companions(args: argparse.Namespace) -> list[Contribution]:
    """Return the extensions of `holmes plan` that an option on the command line selects.

    Such an extension shows a forecast of its own beside the plans of a search.
    """
    return [companion for companion in companions() if companion.load().wanted(args)]


def wanted(args: argparse.Namespace) -> bool:
    """Return whether the arguments ask for a search.

    The first rule that applies decides:

        --picture                                      no
        --explain without anything to search for       no: it explains the given sizes
        --search, --limit, or an extension's option    yes
        a model, a command or a global batch           yes, unless parallel sizes are given

    --explain has something to search for with a model or an option of a search, except --search.
    """
    has_search_option = (
        args.global_batch is not None
        or args.limit
        or args.framework
        or args.pictures
        or args.html
        or args.command
    )
    if args.picture or (args.explain and not has_search_option and not args.model):
        return False
    # wanted_companions(): extensions that an option selects; they show a forecast beside the plans
    if args.search or wanted_companions(args) or args.limit:
        return True
    has_job = args.model or args.command or args.global_batch
    return bool(has_job) and not sizes_given(args)


def run(args: argparse.Namespace, spec: SiteSpec, job: Training) -> int:
    """Search for the best plan and print or write it.

    Args:
        args: Arguments of `holmes plan`.
        spec: Clusters and nodes available.
        job: What to train.

    Returns:
        Exit status: 0, or 130 after Ctrl-C with the best so far.

    Raises:
        HolmesError: The input is bad, or no plan fits.
    """
    _check(args, job)
    site = site_from_spec(spec)
    links = Links.of_spec(spec)
    batch = global_batch(args, job, site)
    request = asked_for(Network(site, links), job, batch, limits_of(args, job))
    more: dict[str, Any] = {}  # additional keys of --json
    with _Bar(quiet=args.json) as bar:
        end = time.monotonic() + args.seconds
        # A quick first look; best_use() or proven() goes on until the best plan is proven.
        result = search(request, args.seconds, bar.on_progress, args.rows, prove=False)
        result, job = beside(result, job)  # adds the user's layout, if there is one
        if not result.interrupted:
            if args.nodelist:  # the user wants just these nodes
                result = proven(with_spread(result), end, bar.on_progress)
            else:
                result = best_use(result, spec, end, bar.on_progress, args.rows)
            if result.on_all is not None:  # the job is faster on fewer nodes
                lines, more["leave_out"] = leave_out(result, result.on_all, args, job)
                job = replace(job, lines=(*lines, *job.lines))
                if (
                    job.sizes is not None
                ):  # given sizes are for all nodes, so show the plan for these
                    result = result.on_all
            if job.engine.breadth_first:  # the framework supports that order of passes
                result = with_breadth_first(result)
            if request.rules.splits:  # the framework can split backward passes and list their order
                result = with_passes(result)
    forecasts = _forecasts(args, result)
    for name, forecast in forecasts.items():
        more[name] = forecast.document()
    plan = plan_of(result, result.best, job.options)
    if args.output:
        plan.save(args.output)
    starts = search_table.launches_of(result, args, job)
    if args.json:
        print(search_table.document(result, plan, job, starts, more))
    else:
        search_table.show(result, args, job, starts)
        show_wan(links.site(site), spec.notes)
        for forecast in forecasts.values():
            forecast.show()
    draw(result, args, job, starts, forecasts)
    if args.output and not args.json:
        print(f"written: {args.output}")
    return INTERRUPTED_STATUS if result.interrupted else 0


def _check(args: argparse.Namespace, job: Training) -> None:
    """Raise HolmesError if options are out of range, or no model is given."""
    if args.rows < 1:
        raise HolmesError(f"--rows is {args.rows}; it must be 1 or more")
    if not args.seconds > 0:
        raise HolmesError(f"--seconds is {args.seconds}; it must be above 0")
    if job.model is None:
        problem = "nothing says what to train"
        if args.command:
            problem = "the command line names no model (--num-layers, --hidden-size, ...)"
        raise HolmesError(f"{problem}; give --model FILE (examples/models has some)")


def _forecasts(args: argparse.Namespace, result: SearchResult) -> dict[str, PlanCompanion]:
    """Return the forecasts of extensions that the arguments ask for: name -> forecast; {} after Ctrl-C."""
    if result.interrupted:
        return {}
    forecasts = {}
    for companion in wanted_companions(args):
        seconds = COMPANION_SHARE * args.seconds
        module = companion.load()
        forecasts[companion.name] = module.beside(result.on_all or result, seconds)
    return forecasts


def leave_out(
    fewer: SearchResult, on_all: SearchResult, args: argparse.Namespace, job: Training
) -> tuple[list[str], dict[str, Any]]:
    """Return the advice to leave out nodes, because the job is faster without them.

    Args:
        fewer: Result for fewer nodes.
        on_all: Result for all nodes.
        args: Arguments of `holmes plan`.
        job: What to train.

    Returns:
        Lines to print, with flags if the job's command line has sizes for all nodes; and a
        dictionary for --json.
    """
    nodes = [node.name for node in fewer.network.site.nodes]
    left_out = grouped(  # cluster -> names of its nodes
        (node.cluster, node.name) for node in on_all.network.site.nodes if node.name not in nodes
    )
    remaining_clusters = fewer.network.site.clusters
    parts = []
    for cluster, names in left_out.items():
        if cluster in remaining_clusters:
            parts.append(f"{len(names)} nodes of {cluster} ({folded(names)})")
        else:
            parts.append(f"{cluster} ({len(names)} nodes)")
    fewer_s = fewer.best.step_s
    all_s = on_all.best.step_s
    lines = [
        f"{LEAVE_OUT}{', '.join(parts)}: a job on {folded(nodes)} takes {fewer_s:.4g} s a step, on all "
        f"nodes {all_s:.4g} s, {all_s / fewer_s:.2f} times as long"
    ]
    starts = search_table.launches_of(fewer, args, job, plan="")
    if job.sizes is not None:
        for name, flags in search_table.launch_lines(starts).items():
            lines.append(f"  {name}: {' '.join(flags)}")
    return lines, {
        "nodes": left_out,
        "nodelist": folded(nodes),
        "step_seconds": fewer_s,
        "step_seconds_of_all": all_s,
        "best": search_table.row(fewer.best, fewer),
        "launch": {name: asdict(launch) for name, launch in starts.items()},
    }


def asked_for(
    network: Network, job: Training, batch: int, limits: Limits = Limits()
) -> SearchResult:
    """Return the request of a search for a job on a network: a SearchResult without candidates.

    `stock_overlap` says which reductions the framework overlaps without holmes.

    Args:
        batch: Sequences of a step.
        limits: Limits of the search space.
    """
    rules = rules_of(job.engine, job.options, job.is_gloo, overlap=job.overlap)
    if job.engine.hierarchical_zero is not None:
        # The framework itself can reduce hierarchically (under these ZeRO stages). Its flags choose
        # between flat and hierarchical reductions, so the search may try both.
        rules = replace(rules, reductions=REDUCTIONS)
    request = SearchResult(
        network,
        job.known_model,
        global_batch=batch,
        limits=limits,
        rules=rules,
        engine=job.engine,
        stock_overlap=job.engine.overlaps,
    )
    command_line = job.command_line  # what the job's command line sets; framework "" without one
    if not command_line.framework:
        return request
    return replace(
        request,
        stock_overlap=command_line.overlap,
        gather_overlap=command_line.gather_overlap,
    )


def limits_of(args: argparse.Namespace, job: Training) -> Limits:
    """Return the limits of the search: those of --limit and those of the framework, if one is named."""
    limits = parse_limits(args.limit)
    framework = args.framework or job.command_line.framework
    if not framework:
        return limits
    return limited(limits, job.engine, framework, has_experts=bool(job.known_model.experts))


def check_pictures(args: argparse.Namespace, job: Training) -> None:
    """Raise HolmesError before the search if --html or --pictures lacks a model or matplotlib."""
    for name in ("html", "pictures"):
        if getattr(args, name):
            pyplot(f"--{name} needs")
            if job.model is None:
                advice = "give --model FILE (examples/models has some)"
                raise HolmesError(
                    f"--{name} needs to know the model: {advice} or a command line after --"
                )


def draw(
    search_result: SearchResult,
    args: argparse.Namespace,
    job: Training,
    starts: Mapping[str, Launch],
    besides: Mapping[str, PlanCompanion] = MappingProxyType({}),
) -> None:
    """Write the page of --html and the pictures of --pictures, and print the paths of these files.

    Args:
        starts: Framework -> how to start the best plan.
        besides: Name -> forecast that an extension shows beside the plan.
    """
    written: list[Path] = []
    if args.pictures:
        written += draw_search(search_result, Path(args.pictures))
        for name, forecast in besides.items():
            path = Path(args.pictures) / f"{name}.png"
            written.append(write(forecast.figure(), path, "name another directory"))
    if args.html:
        page = plan_page.document(search_result, args, job, starts, besides)
        save(args.html, page, "the page")
        written.append(Path(args.html))
    # With --json, stdout has only the JSON.
    for path in written:
        print(f"written: {path}", file=sys.stderr if args.json else sys.stdout)


def beside(search_result: SearchResult, job: Training) -> tuple[SearchResult, Training]:
    """Simulate the user's layout, to compare it with the plans of a search.

    Returns:
        The result with the layout (as user_layout, and as a candidate if it is the fastest), and
        the job. If the layout is impossible: the result as it is, and the job with a line on the
        reason. Without given sizes: both as they are.
    """
    if job.sizes is None:
        return search_result, job
    try:
        # complete(): computes the sizes that the user left out from the number of ranks.
        sizes = job.sizes.complete(search_result.network.world, search_result.network.processes)
        layout = timed(search_result, _candidate_of_layout(search_result, job, sizes))
    except HolmesError as error:
        return search_result, replace(
            job, lines=(*job.lines, f"not possible: your layout: {error}")
        )
    return replace(search_result.with_known(layout), user_layout=layout), job


def alone(plan: Plan, network: Network, job: Training, model: Model) -> SearchResult:
    """Return a result with only the layout of a given plan, simulated in the plan's order of nodes.

    Args:
        plan: Plan with complete parallel sizes.
    """
    assert plan.sizes is not None
    # A fixed number of micro-batches, from which the batch follows below.
    model = replace(model, global_batch=0, micro_batches=model.micro_batches_of(plan.sizes.data))
    batch = model.micro_batches * model.micro_batch * plan.sizes.data
    request = asked_for(network, replace(job, model=model), batch)
    layout = timed(request, _candidate_of_layout(request, job, plan.sizes, plan))
    if request.rules.splits:  # the framework can split backward passes and list their order
        layout = in_passes(request, layout) or layout
    return replace(request, user_layout=layout, candidates=[layout])


def _candidate_of_layout(
    result: SearchResult, job: Training, sizes: Sizes, plan: Plan | None = None
) -> Candidate:
    """Return the candidate of the job's layout; raise HolmesError if the framework refuses it.

    Args:
        sizes: Complete parallel sizes.
        plan: Plan with the order of nodes and the layers of the stages, if there is one.
    """
    command = job.command_line
    options = job.options
    is_partitioned = bool(options.plan) or options.partition != "uniform"
    # refusals() yields the reasons why Megatron cannot run the command line; the first ends the
    # planning.
    for refusal in refusals(command, sizes, result.network.world, is_partitioned):
        raise HolmesError(refusal)
    shape = shape_of(result.model, sizes, *job.zero_and_chunks)
    layers = command.stage_layers
    nodes: Sequence[str] = ()
    if plan is not None:
        layers = plan.stage_layers or layers
        nodes = plan.nodes
    # Flat: no all-reduce is hierarchical (first inside clusters, then between them). Only a
    # framework that reduces by itself can be flat: Megatron, the one with `hierarchical_zero`. It
    # reduces hierarchically if its flags ask for several optimizer instances. With all other
    # frameworks (None) holmes reduces, hierarchically where that is faster.
    is_flat = job.engine.hierarchical_zero is not None and command.instances <= 1
    return layout_candidate(result, sizes, shape, split=layers, nodes=nodes, flat=is_flat)


def global_batch(args: argparse.Namespace, job: Training, site: Site) -> int:
    """Return the sequences of a step on all nodes of `site`.

    They come from --global-batch, the model, or the command line's micro-batches, in this order.

    Raises:
        HolmesError: None of these names them.
    """
    model = job.known_model
    given: int | None = args.global_batch
    if given is not None:
        return given
    if model.global_batch:
        return model.global_batch
    # `command_line` is what the script's command line states. If it names the model, job.known_model has
    # the micro-batches of the command line.
    if job.command_line.model is not None and job.sizes is not None:
        sizes = job.sizes.complete(site.world_size, site.processes)
        return model.micro_batches * model.micro_batch * sizes.data
    needed = "a search needs it, or --global-batch N (sequences of a step)"
    raise HolmesError(f"{model.source}: key 'global_batch' is missing; {needed}")


class _Bar(Progress):
    """Progress bar on stderr, shown after SILENCE_S seconds and only on a terminal."""

    def __init__(self, quiet: bool):
        """Create the bar, still hidden.

        Args:
            quiet: Never show it.
        """
        count = TextColumn("{task.completed:.0f} of {task.total:.0f}")
        console = Console(stderr=True)
        may_show = console.is_terminal and not quiet
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            count,
            TimeElapsedColumn(),
            console=console,
            transient=True,  # the bar disappears at the end
            disable=not may_show,
        )
        self.begin = time.monotonic()
        self.task = self.add_task("searching", visible=False)

    def on_progress(self, done: int, left: int, best: float, gap: float) -> None:
        """Update the bar; the search calls this from time to time.

        Args:
            done: Items of the search that were examined.
            left: Items that are left.
            best: Best step so far, in seconds; inf before the first.
            gap: Largest fraction of that step that another plan could save; 1 before a step was
                simulated.
        """
        text = "searching" if best == inf else f"best so far {best:.4g} s"
        text += f", simulated; at most {gap:.1%} can be saved" if gap < 1 else ""
        visible = time.monotonic() - self.begin > SILENCE_S
        self.update(self.task, description=text, completed=done, total=done + left, visible=visible)
