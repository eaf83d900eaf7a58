"""`holmes plan --nodes N --from-cluster FILE`: which nodes to ask the scheduler for."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from holmes_ext.cli.plan import only
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, training_of
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.sources import request, slurm
from holmes_ext.cluster.sources.hostlist import folded
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import compressed_share
from holmes_ext.plan.shape import Shape, shape_of
from holmes_ext.planner.bound.nodes import (
    Family,
    alike,
    fastest_first,
    ideal,
    ideal_gpus,
    is_flat,
    of_family,
)
from holmes_ext.planner.search.as_plan import plan_of
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.sketch import simulate_first
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.search.subset import Counts, Priced, Subsets, best_subset
from holmes_ext.planner.show.search import asked_for, global_batch, limits_of
from holmes_ext.units import format_seconds

FORMS = ("sbatch", "hetjob", "hostfile", "kubernetes")
#: Part of the seconds, where the sizes are free, for those on the best conceivable nodes; and for those of
#: the best subsets in the end; for these where the sizes are given.
FOR_SIZES, FOR_TABLE = 0.3, 0.05
#: Depths of the pipeline that every subset is priced with.
SHAPES = 6
#: Subsets that are simulated in the end, and shown.
SIMULATED = 4
#: Bytes of a number of an activation at most.
WIDEST = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which nodes to ask for").add_argument
    add("--nodes", type=int, metavar="N", help="the N nodes of --from-cluster that train fastest")
    add(
        "--from-cluster",
        metavar="FILE",
        help="with --nodes: cluster.toml of all nodes to choose from",
    )
    add(
        "--idle",
        metavar="slurm|LIST",
        help="with --nodes: only of these, a[0-7],b3, or those that Slurm has idle (default: all)",
    )
    add(
        "--as",
        dest="form",
        choices=FORMS,
        help="with --nodes: print only this: for sbatch, as a heterogeneous job, for MPI, a node affinity",
    )


def wanted(args: argparse.Namespace) -> bool:
    """Whether these arguments ask for a subset; HolmesError where they contradict each other."""
    lone = next(
        (
            f"--{name}"
            for name, value in (
                ("from-cluster", args.from_cluster),
                ("idle", args.idle),
                ("as", args.form),
            )
            if value
        ),
        "",
    )
    if args.nodes is None and lone:
        raise HolmesError(f"{lone} needs --nodes N: how many to ask for")
    if args.nodes is not None and not args.from_cluster:
        raise HolmesError(
            "--nodes needs --from-cluster FILE: a cluster.toml of all nodes to choose from"
        )
    return args.nodes is not None


@dataclass(frozen=True)
class AvailableNodes:
    """The nodes that may be asked for, what is trained on `count` of them. floor_s: no step is below it."""

    spec: SiteSpec
    job: Training
    batch: int
    limits: Limits
    shapes: tuple[Shape, ...] = ()
    count: int = 0
    floor_s: float = 0.0

    def names(self, counts: Counts) -> list[str]:
        return [
            name
            for cluster, count in zip(self.spec.clusters, counts)
            for name in cluster.nodes[:count]
        ]

    def search(self, counts: Counts, seconds: float = 1e9) -> SearchResult:
        subset = self.spec.only(set(self.names(counts)))
        network = Network(site_from_spec(subset), Links.of_spec(subset))
        return in_closed_form(network, self.job, self.batch, self.limits, self.shapes, seconds)

    def price(self, counts: Counts) -> Priced:
        match = self.search(counts)
        return Priced(match.best.formula_s, match.best.formula_s, match)

    def floor(self, family: Family) -> float:
        """Seconds that no step on a subset of a family beats."""
        if not is_flat(self.spec) or set(family) == {None}:
            return self.floor_s
        links, tensor = Links.of_spec(self.spec), max(shape.tensor for shape in self.shapes)
        pipelined = any(shape.pipeline > 1 for shape in self.shapes)
        slices = (
            tensor / compressed_share(self.job.options.compress_activations, WIDEST)
            if pipelined
            else 0
        )
        site, model = of_family(self.spec, family, self.count, self.job.known_model, links, slices)
        job = replace(self.job, model=model)
        try:
            result = in_closed_form(
                Network(site, links, uneven=True), job, self.batch, self.limits, self.shapes
            )
        except HolmesError:  # nothing fits
            return inf
        return max(self.floor_s, result.best.formula_s)

    def computing_s(self) -> float:
        """Of the shape that computes least on the fastest GPUs: no step on so many nodes is below it."""
        site, model = ideal_gpus(
            site_from_spec(self.spec), self.count, self.job.known_model, Links.of_spec(self.spec)
        )
        job = replace(self.job, model=model)
        result = in_closed_form(Network(site), job, self.batch, self.limits, self.shapes, 0.0)
        return min(result.ideals.values())

    def best(self, end: float) -> Subsets:
        """What was found when time.monotonic() is `end`."""
        idle = tuple(len(cluster.nodes) for cluster in self.spec.clusters)
        kin, unit = alike(self.spec, self.job.known_model), self.count // self.shapes[0].pipeline
        order = fastest_first(self.spec, self.job.known_model, kin)
        return best_subset(
            idle, self.count, self.price, self.floor, unit=unit, alike=kin, order=order, end=end
        )


def in_closed_form(
    network: Network,
    job: Training,
    batch: int,
    limits: Limits,
    shapes: Sequence[Shape],
    seconds: float = 1e9,
) -> SearchResult:
    """What is quickest in closed form; shapes: () for all."""
    asked = asked_for(network, job, batch, limits)
    return search(asked, seconds, rows=1, only=shapes, prove=False, simulate=False)


def run(args: argparse.Namespace) -> int:
    """Find the subset and print it; 0. HolmesError on bad input."""
    spec, features = load_spec(args.from_cluster), None
    whole = spec
    if args.idle == "slurm":
        idle, features = slurm.idle_nodes()
        spec = spec.only(spec.owner.keys() & set(idle))
        if not spec.clusters:
            raise HolmesError(f"--idle slurm: none of the nodes of {spec.source} is idle now")
    elif args.idle:
        spec = only(spec, args.idle, "--idle")
    end = args.begin + args.seconds
    job = training_of(args, spec)
    if job.model is None:
        raise HolmesError(
            "--nodes: nothing says what to train; write the command after --, or give --model "
            "FILE (examples/models has some)"
        )
    total = len(spec.owner)
    if not 0 < args.nodes <= total:
        raise HolmesError(
            f"--nodes {args.nodes}: {spec.source} has {total} nodes"
            f"{' that are idle' if args.idle else ''}; ask for 1 to {total}"
        )
    available = _begin(args, spec, job, args.seconds)
    reserved = FOR_SIZES if len(available.shapes) > 1 else FOR_TABLE
    subsets = available.best(end - reserved * args.seconds)
    best = _simulated(subsets, available, end)
    parts = [_parts(spec, whole, counts) for counts, _ in best]
    if args.output:
        first_result = best[0][1]
        plan_of(first_result, first_result.best, job.options).save(args.output)
    if args.form:
        print(_written(args.form, parts[0], features), end="")
    elif args.json:
        print(json.dumps(_document(subsets, best, parts, features), indent=2))
    else:
        _show(args, spec, job, subsets, best, parts, features)
    return 0


def _begin(
    args: argparse.Namespace, spec: SiteSpec, job: Training, seconds: float
) -> AvailableNodes:
    """What prices subsets, and has the floor of all their steps."""
    site, links, model = site_from_spec(spec), Links.of_spec(spec), job.known_model
    best, ideal_model = ideal(site, args.nodes, model, links)
    batch = global_batch(args, job, best)
    limits = limits_of(args, job)
    shapes: tuple[Shape, ...] = ()
    if job.sizes is not None:
        sizes = job.sizes.complete(best.world_size, best.processes)
        shapes = (shape_of(model, sizes, *job.zero_and_chunks),)
    ideal_job = replace(job, model=ideal_model)
    ideal_result = in_closed_form(
        Network(best), ideal_job, batch, limits, shapes, FOR_SIZES * seconds
    )
    shapes = shapes or _of_every_depth(ideal_result)
    available = AvailableNodes(spec, job, batch, limits, shapes, args.nodes)
    return replace(available, floor_s=max(floor(ideal_result), available.computing_s()))


def floor(result: SearchResult) -> float:
    """Seconds that nothing beats on the nodes of a search in closed form."""
    every = {candidate.shape for candidate in result.candidates}
    left = [ideal_s for shape, ideal_s in result.ideals.items() if shape not in every]
    return min([result.best.formula_s, *left])


def _of_every_depth(result: SearchResult) -> tuple[Shape, ...]:
    """The best shape, and of other depths of the pipeline those with the least bounds."""
    depths: dict[int, Shape] = {}
    for shape in sorted(result.ideals, key=result.ideals.__getitem__):
        if shape.virtual == 1:
            depths.setdefault(shape.pipeline, shape)
    return tuple(dict.fromkeys([result.best.shape, *list(depths.values())[:SHAPES]]))


def _simulated(
    subsets: Subsets, available: AvailableNodes, end: float
) -> list[tuple[Counts, SearchResult]]:
    """The fastest subsets by their simulated steps, with all sizes where these are free."""
    ranked = []
    first = subsets.found[:SIMULATED]
    for number, (counts, priced) in enumerate(first):
        result = priced.plan
        if len(available.shapes) > 1:
            share = max(0.0, end - time.monotonic()) / (len(first) - number)
            again = replace(available, shapes=()).search(counts, share)
            result = min(again, result, key=lambda search_result: search_result.best.formula_s)
        ranked.append((counts, simulate_first(result, 1)))
    return sorted(ranked, key=lambda row: row[1].best.step_s)


def _parts(spec: SiteSpec, whole: SiteSpec, counts: Counts) -> list[request.ChosenNodes]:
    return [
        request.ChosenNodes(
            cluster.name,
            cluster.nodes[:count],
            cluster.processes,
            next(full.nodes for full in whole.clusters if full.name == cluster.name),
        )
        for cluster, count in zip(spec.clusters, counts)
        if count
    ]


def _written(
    form: str, parts: Sequence[request.ChosenNodes], features: request.Features | None
) -> str:
    if form == "hostfile":
        return request.hostfile(parts)
    if form == "kubernetes":
        return json.dumps(request.node_affinity(parts), indent=2) + "\n"
    lines = (
        request.sbatch_lines(parts, features)
        if form == "sbatch"
        else request.hetjob_lines(parts, features)
    )
    return "\n".join(lines) + "\n"


def _document(
    subsets: Subsets,
    best: Sequence[tuple[Counts, SearchResult]],
    parts: Sequence[Sequence[request.ChosenNodes]],
    features: request.Features | None,
) -> dict[str, Any]:
    rows = [
        {
            "nodes": {part.cluster: list(part.nodes) for part in nodes},
            "step_seconds": result.best.step_s,
        }
        for (_, result), nodes in zip(best, parts)
    ]
    chosen = parts[0]
    forms = {form: _written(form, chosen, features) for form in FORMS if form != "kubernetes"}
    return {
        "version": 1,
        "best": rows[0],
        "others": rows[1:],
        "gap": subsets.gap,
        "bound_seconds": subsets.bound_s,
        "looked_at": len(subsets.found),
        "all": subsets.complete,
        "nodelist": folded(node for part in chosen for node in part.nodes),
        **forms,
        "affinity": request.node_affinity(chosen),
    }


def _show(
    args: argparse.Namespace,
    spec: SiteSpec,
    job: Training,
    subsets: Subsets,
    best: Sequence[tuple[Counts, SearchResult]],
    parts: Sequence[Sequence[request.ChosenNodes]],
    features: request.Features | None,
) -> None:
    screen = Screen()
    job.show(screen)
    first_s = best[0][1].best.step_s
    rows = []
    for (_, result), chosen_nodes in zip(best, parts):
        candidate = result.best
        shape = candidate.shape
        nodes = ", ".join(f"{len(part.nodes)} of {part.cluster}" for part in chosen_nodes)
        sizes = f"pipeline {shape.pipeline}, tensor {shape.tensor}, data {shape.data}"
        rows.append(
            (
                nodes,
                format_seconds(candidate.step_s),
                f"{candidate.step_s / first_s - 1:+.1%}",
                sizes,
                result.describe(candidate),
            )
        )
    columns = (
        Column("nodes", wrap=16),
        Column("step", right=True),
        Column("slower by", right=True),
        Column("sizes", wrap=12, drop=2),
        Column("stages", wrap=10, drop=1),
    )
    screen.table(
        columns,
        rows,
        f"{args.nodes} of the {len(spec.owner)} nodes"
        f"{' that are idle' if args.idle else ''} in {spec.source}",
    )
    looked = f"subsets looked at: {len(subsets.found)}" + (
        ", all that there are" if subsets.complete else ""
    )
    verdict = (
        "the first is the best of all"
        if subsets.proven
        else (
            f"none is more than {subsets.gap:.1%} better than the first (in closed form; the "
            f"table's steps are "
            f"simulated); --seconds S searches longer"
        )
    )
    screen.line(f"{looked}; {verdict}", "dim")
    screen.line("\nfor sbatch, as one job:", "bold")
    print(_written("sbatch", parts[0], features), end="")
    if len(parts[0]) > 1:
        screen.line(
            "or as a heterogeneous job (srun --het-group=0-"
            f"{len(parts[0]) - 1} starts one step on all of it):",
            "bold",
        )
        print(_written("hetjob", parts[0], features), end="")
    screen.line("for mpirun and deepspeed: --as hostfile; for Kubernetes: --as kubernetes", "dim")
    if args.output:
        print(f"written: {args.output}")
