"""Part of `holmes plan` that belongs to the planner: search, choice of nodes, experts, explanations.

The command itself is in cli/plan.py, and loads this module as an extension.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from holmes_ext.cli.plan import (
    GivenSizes,
    given_sizes,
    inputs,
    show_given_sizes,
    show_table,
    status_of,
    workload,
)
from holmes_ext.cli.show.training import Training, lines_before_error
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.planner.html.plan_pictures import draw_partitions
from holmes_ext.planner.search.as_plan import times
from holmes_ext.planner.show import experts, explain, search, search_table, start, subset
from holmes_ext.planner.show.layout import alone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the planner to `holmes plan`."""
    explain.add_arguments(parser)
    experts.add_arguments(parser)
    search.add_arguments(parser)
    subset.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run `holmes plan`: choose nodes, place experts, search for sizes, or show the plan of given sizes.

    The arguments decide which of the four it is. --nodes chooses nodes; _run_with() has the other rules.

    Returns:
        The exit status.

    Raises:
        HolmesError: the input is bad.
    """
    if subset.wanted(args):  # --nodes is given
        return subset.run(args)
    spec, job = inputs(args)
    with lines_before_error(job.lines):
        return _run_with(args, spec, job)


def _run_with(args: argparse.Namespace, spec: SiteSpec, job: Training) -> int:
    """Run `holmes plan` without --nodes, and return the exit status.

    The first rule that applies decides what it does:

        --experts                       place the experts
        search.wanted()                 search for sizes, because of --search or a job without sizes
        --explain, --picture, a model   print the plan of the given sizes, with its simulated step or
                                        the times of its stages (see _show)
        else                            print the plan of the given sizes

    Args:
        args: Arguments of `holmes plan`.
        spec: The clusters.
        job: The training job that the arguments describe.
    """
    if args.experts:
        site, links = site_from_spec(spec), Links.of_spec(spec)
        return experts.run(args, build_plan(site, job.sizes, workload(args), links=links))
    search.check_pictures(args, job)  # raises before the search if a picture cannot be drawn
    if search.wanted(args):
        return search.run(args, spec, job)

    # Both options show times and memory of each stage. These need a model or a measured profile.
    explains = bool(args.explain or args.picture)
    if explains and job.model is None and not args.profile:
        advice = "give --model FILE (examples/models has some) or --profile FILE"
        raise HolmesError(f"--explain and --picture need to know the model: {advice}")
    _check_partition(args, job)
    given = given_sizes(args, spec, job)  # plan and costs for the sizes
    if job.model is None and not explains:
        return show_given_sizes(given, args)
    return _show(args, given, explains)


def _check_partition(args: argparse.Namespace, job: Training) -> None:
    """Raise HolmesError if --partition is to divide the layers of an interleaved schedule.

    A job with such a plan ends with an error, because the plan has layers of stages, not of chunks.
    """
    chunks = job.command_line.virtual
    if args.partition != "uniform" and chunks > 1:
        raise HolmesError(
            f"--partition {args.partition}: the command has {chunks} chunks of layers on each stage "
            "(interleaved schedule), and these stay even; remove "
            "--num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank from the "
            "command, or use --partition uniform"
        )


def _show(args: argparse.Namespace, given: GivenSizes, explains: bool) -> int:
    """Print or write the plan of the given sizes with its simulated step, and return the exit status.

    --explain and --picture compare ways to divide the layers among the stages (partitions), such as
    even or by speed. The first rule that applies decides what is printed:

        --explain and --json, with costs    the predicted step of each partition
        --json                              the plan
        else                                tables of the plan and its step, and with --explain of
                                            the partitions

    Whatever is printed, --output writes the plan to a file, and --picture a picture of the
    partitions.

    Args:
        args: Arguments of `holmes plan`.
        given: Plan and costs of the given sizes.
        explains: Compute the partitions, for --explain or --picture.
    """
    job = given.job
    plan = given.plan
    costs = given.costs
    layout = None  # result of a search with only the given sizes; it simulates their step
    starts = {}  # framework -> how to start it

    # The simulation computes the times of the layers from the model. With --profile, measured times
    # take their place, so nothing is simulated.
    if job.model is not None and not args.profile and plan.sizes is not None:
        layout = alone(plan, given.network, job, job.model)
        simulated_times = times(layout, layout.best)  # name -> seconds
        plan = replace(plan, predicted=plan.predicted | simulated_times)
        given = replace(given, plan=plan)
        starts = start.launches_of(layout, args, job)
    if args.output:
        plan.save(args.output)
    estimates = {}
    if explains:
        if costs is None:
            raise HolmesError("--explain needs the parallel sizes: give --sizes pipeline=N")
        estimates = explain.outcomes(costs, args.alpha)
        if args.picture:
            draw_partitions(costs, estimates, args.picture)
    if costs and args.explain and args.json:
        print(json.dumps(explain.document(costs, estimates)))
    elif args.json:
        sys.stdout.write(plan.to_json())
    else:
        show_table(given)
        if layout:
            search_table.show_given(layout, args, starts)
        if costs and args.explain:
            explain.show(costs, estimates)
        for path in filter(None, (args.picture, args.output)):
            print(f"written: {path}")
    if layout:
        search.draw(layout, args, job, starts)
    return status_of(plan)
