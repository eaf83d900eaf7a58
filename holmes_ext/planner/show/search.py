"""Command `holmes plan` without parallel sizes: search for the best plan, print it, and say how to start it.

An extension can show a forecast of its own beside the plans (a "companion", planner/companion.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from holmes_ext.cli.show.matrix import show_wan
from holmes_ext.cli.show.training import LEAVE_OUT, Training, sizes_given
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.sources.hostlist import folded
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.extensions import Contribution, contributions
from holmes_ext.files import save
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.companion import PlanCompanion
from holmes_ext.planner.html.pictures import pyplot, write
from holmes_ext.planner.html.plan_pictures import draw_search
from holmes_ext.planner.launch_flags import Launch
from holmes_ext.planner.search.as_plan import plan_of
from holmes_ext.planner.search.fewer import best_use
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import proven, search
from holmes_ext.planner.search.simulated import with_breadth_first, with_passes
from holmes_ext.planner.search.space import parse_limits
from holmes_ext.planner.search.spreading import with_spread
from holmes_ext.planner.show import plan_page, search_table, start
from holmes_ext.planner.show.layout import asked_for, beside, compared, global_batch, limits_of
from holmes_ext.planner.show.progress import ProgressBar
from holmes_ext.planner.show.time_limit import OUTPUT_S, TimeLimit
from holmes_ext.planner.simulate.deadline import simulations_until
from holmes_ext.words import counted, grouped

#: Share of the time limit for the forecasts of extensions.
COMPANION_SHARE = 0.1
#: Share of the time limit for the order of split backward passes, if the framework can split them.
PASSES_SHARE = 0.3
#: Exit status after Ctrl-C.
INTERRUPTED_STATUS = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the search, and those of extensions that add a forecast to its output.

    Example of such an extension: --joined forecasts the step of joined jobs, a job in each cluster.
    """
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
        default=8.0,
        metavar="S",
        help="time limit; ends early once the best is proven (default: 8); Ctrl-C: the best so far",
    )
    add("--rows", type=int, default=10, metavar="N", help="rows of the table (default: 10)")
    add(
        "--print-command",
        action="store_true",
        help="print the whole command (and ds_config) of the best plan, not only its changes",
    )
    add(
        "--html",
        metavar="FILE",
        help="write one page with all of it, and pictures (needs matplotlib)",
    )
    add(
        "--pictures",
        metavar="DIR",
        help="write placement, timeline and clusters.png, ethernet.png for several clusters, and joined.png "
        "with --joined (needs matplotlib)",
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
    """Return whether the arguments of `holmes plan` request a search for the best plan.

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
    only_explains = args.explain and not has_search_option and not args.model
    if args.picture or only_explains:
        return False

    # wanted_companions(): extensions that an option selects; they show a forecast beside the plans
    is_requested = args.search or args.limit or wanted_companions(args)
    if is_requested:
        return True
    has_job = args.model or args.command or args.global_batch
    return bool(has_job) and not sizes_given(args)


def run(args: argparse.Namespace, spec: SiteSpec, job: Training) -> int:
    """Search for the best plan and print or write it.

    Args:
        args: Arguments of `holmes plan`.
        spec: Clusters and nodes available.
        job: The training job.

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

    # The search may find facts about the job, such as nodes that slow it. `job` then has more lines to
    # print, and `json_keys` the same for --json.
    result, job, json_keys = _search(args, spec, job, request)

    # Results of extensions, such as the step of a job in each cluster (--joined).
    forecasts = _forecasts(args, result)
    for name, forecast in forecasts.items():
        json_keys[name] = forecast.document()
    plan = None
    if args.output or args.json:  # on 1024 GPUs it takes half a second
        plan = plan_of(result, result.best, job.options)
    if plan and args.output:
        plan.save(args.output)

    # The output simulates a few more steps. Simulations that have not ended at `end` are given up, and
    # the output does without them. (search_table.show() sets this deadline by itself.)
    end = TimeLimit.of_arguments(args).simulations_end
    with simulations_until(end):
        starts = start.launches_of(result, args, job)
    if plan and args.json:
        with simulations_until(end):
            print(search_table.document(result, plan, job, starts, json_keys))
    else:
        search_table.show(result, args, job, starts, end)
        show_wan(links.site(site), spec.notes)  # rates and latencies between the clusters
        for forecast in forecasts.values():
            forecast.show()
    draw(result, args, job, starts, forecasts)
    if args.output and not args.json:
        print(f"written: {args.output}")
    return INTERRUPTED_STATUS if result.interrupted else 0


class _Found(NamedTuple):
    """Result of the search, with lines and JSON keys for the output of `holmes plan`."""

    result: SearchResult
    job: Training  # with further lines, if the user's layout is impossible or nodes slow the job
    #: "leave_out" -> the advice to leave out nodes, for --json; {} if all nodes are worth using.
    json_keys: dict[str, Any]


def _search(
    args: argparse.Namespace, spec: SiteSpec, job: Training, request: SearchResult
) -> _Found:
    """Search for the best plan until it is proven, or the time for the search is over.

    The time of --seconds has these parts:

        first look        ranks all plans by the closed form, and simulates the fastest
        proof             looks for faster plans, also on fewer nodes, until `search_end`
        order of passes   if the framework can split backward passes: until `output_begin`
        output            simulations for the tables, until the end of --seconds

    Args:
        args: Arguments of `holmes plan`.
        spec: Clusters and nodes available.
        job: The training job.
        request: Request of the search.
    """
    json_keys: dict[str, Any] = {}
    user_limits = parse_limits(args.limit)
    time_limit = TimeLimit.of_arguments(args)
    with ProgressBar(args.seconds, quiet=args.json) as bar:
        # Simulates the user's layout, if there is one (`user_layout` of the request).
        request, job = beside(request, job)
        # A quick first look; best_use() or proven() goes on until the best plan is proven.
        seconds = max(0.0, time_limit.left_s - OUTPUT_S)
        result = search(request, seconds, bar.on_progress, args.rows, prove=False)
        # If the user's layout is faster than all plans found, it becomes the best plan.
        result = compared(result, user_limits)
        if result.interrupted:
            return _Found(result, job, json_keys)
        output_begin = time_limit.output_begin(result)
        search_end = output_begin
        if request.rules.splits:
            search_end = time_limit.share_until(output_begin, share=1 - PASSES_SHARE)
        if args.nodelist:
            # The user has chosen the nodes, so the plan uses all of them. with_spread() adds plans
            # whose stages have nodes of several clusters.
            result = proven(with_spread(result), search_end, bar.on_progress)
        else:
            # best_use() also tries fewer nodes. If the job is faster there, it returns the result
            # for these nodes; `on_all` of this result is the result for all nodes.
            result = best_use(result, spec, search_end, bar.on_progress, args.rows)
        if result.on_all is not None:
            advice_lines, advice_for_json = leave_out(result, result.on_all, args, job)
            json_keys["leave_out"] = advice_for_json
            job = replace(job, lines=(*advice_lines, *job.lines))
            if job.sizes is not None:
                # The user's parallel sizes are for all nodes. So the output has the plan for all
                # nodes, and only the advice is on fewer nodes.
                result = result.on_all
        # Try other orders of the passes for the plans found, if the framework supports them. A
        # plan that is faster in such an order than the best plan becomes the best plan.
        if job.engine.breadth_first:
            result = with_breadth_first(result)
        if request.rules.splits:  # the framework can split backward passes and list their order
            result = with_passes(result, output_begin)

    # The plans have changed since the first comparison with the user's layout.
    return _Found(compared(result, user_limits), job, json_keys)


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
        job: The training job.

    Returns:
        Lines to print, and the same advice as a dictionary for --json: the nodes to leave out and to keep,
        both step times, the best plan on fewer nodes, and how each framework starts it. The lines give
        flags only if the user has given parallel sizes. Those are for all nodes, so they must change.
    """
    nodes = [node.name for node in fewer.network.site.nodes]
    left_out = grouped(  # cluster -> names of its nodes
        (node.cluster, node.name) for node in on_all.network.site.nodes if node.name not in nodes
    )
    remaining_clusters = fewer.network.site.clusters
    parts = []
    for cluster, names in left_out.items():
        if cluster in remaining_clusters:
            parts.append(f"{counted(len(names), 'node')} of {cluster} ({folded(names)})")
        else:
            parts.append(f"{cluster} ({counted(len(names), 'node')})")
    fewer_s = fewer.best.step_s
    all_s = on_all.best.step_s
    lines = [
        f"{LEAVE_OUT}{', '.join(parts)}: a job on {folded(nodes)} takes {fewer_s:.4g} s a step, on all "
        f"nodes {all_s:.4g} s, {all_s / fewer_s:.2f} times as long"
    ]

    # plan="": the flags name no plan file, as the file of --output may be for all nodes.
    starts = start.launches_of(fewer, args, job, plan="")
    if job.sizes is not None:  # parallel sizes are given
        for name, texts in start.launch_lines(starts).items():
            lines.append(f"  {name}: {'; '.join(texts)}")
    return lines, {
        "nodes": left_out,
        "nodelist": folded(nodes),
        "step_seconds": fewer_s,
        "step_seconds_of_all": all_s,
        "best": search_table.row(fewer.best, fewer),
        "launch": {name: asdict(launch) for name, launch in starts.items()},
    }


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
        search_result: The search.
        args: Options of the command `holmes plan`.
        job: The training job, with lines on it.
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
