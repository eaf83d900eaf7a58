"""Command `holmes plan --nodes N --from-cluster FILE`: choose the N nodes on which the job trains fastest.

The nodes of a cluster are equal, so a choice ("subset") is a number of nodes of each cluster. Its price is
the step time of the best plan on it by the closed form. search/subset.py finds the best subsets. The fastest
of them are then simulated, and printed as a request to the scheduler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from holmes_ext.cli.plan import only
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, lines_before_error, training_of
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
    fastest_first,
    first_equal_cluster,
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
from holmes_ext.planner.show.layout import asked_for, global_batch, limits_of
from holmes_ext.units import format_seconds
from holmes_ext.words import counted

#: Output formats of --as, in the order of its help: options of sbatch, of a heterogeneous job, ...
FORMS = ("sbatch", "hetjob", "hostfile", "kubernetes")
#: Shares of the time limit, if the parallel sizes are free: for sizes on ideal nodes, and again for sizes on
#: the best subsets in the end. If the sizes are given: for the best subsets in the end.
SIZES_SHARE = 0.3
TABLE_SHARE = 0.05
MAX_SHAPES = 6  # pipeline sizes with which every subset is priced
MAX_SIMULATED = 4  # subsets that are simulated in the end, and shown
WIDEST = 4  # largest number of bytes of an activation's element
UNLIMITED_S = 1e9  # no time limit


class RankedSubset(NamedTuple):
    """A subset of the nodes, and the search on it."""

    counts: Counts
    result: SearchResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `holmes plan` that choose nodes to request from a scheduler (--nodes)."""
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
        help="with --nodes: only of these, a[0-7],b3, or those that Slurm has idle (default: every node)",
    )
    add(
        "--as",
        dest="form",
        choices=FORMS,
        help="with --nodes: print only this: for sbatch, as a heterogeneous job, for MPI, a node affinity",
    )


def wanted(args: argparse.Namespace) -> bool:
    """Return whether the arguments of `holmes plan` request a choice of nodes (--nodes).

    Raises:
        HolmesError: An option lacks the option that it belongs to.
    """
    dependent = {"from-cluster": args.from_cluster, "idle": args.idle, "as": args.form}
    for name, value in dependent.items():
        if value and args.nodes is None:
            raise HolmesError(f"--{name} needs --nodes N: how many to ask for")
    if args.nodes is not None and not args.from_cluster:
        raise HolmesError(
            "--nodes needs --from-cluster FILE: a cluster.toml of all nodes to choose from"
        )
    return args.nodes is not None


@dataclass(frozen=True)
class AvailableNodes:
    """Available nodes (`spec`), and the job that some of them are to train."""

    spec: SiteSpec
    job: Training
    batch: int  # sequences of a step
    limits: Limits
    shapes: tuple[Shape, ...] = ()  # parallel sizes with which subsets are priced; () for all
    count: int = 0  # number of nodes to choose
    floor_s: float = 0.0  # lower bound on the step time of every subset, in seconds

    def names(self, counts: Counts) -> list[str]:
        """Return the names of a subset's nodes: the first nodes of each cluster."""
        names: list[str] = []
        for cluster, count in zip(self.spec.clusters, counts):
            names += cluster.nodes[:count]
        return names

    def search(self, counts: Counts, seconds: float = UNLIMITED_S) -> SearchResult:
        """Return the best plan on a subset by the closed form."""
        subset = self.spec.only(set(self.names(counts)))
        network = Network(site_from_spec(subset), Links.of_spec(subset))
        return in_closed_form(network, self.job, self.batch, self.limits, self.shapes, seconds)

    def price(self, counts: Counts) -> Priced:
        """Return the step time of the best plan on a subset of the nodes, by the closed form (its price)."""
        result = self.search(counts)
        step_s = result.best.formula_s
        return Priced(step_s, bound_s=step_s, plan=result)

    def floor(self, family: Family) -> float:
        """Return a lower bound on the step time of all subsets in a family, in seconds; inf if none fits.

        It is the best step on an ideal site, at least as good as every subset of the family. If no
        such site can be made, it is `floor_s`, the bound for all subsets of `count` nodes.

        Args:
            family: Number of nodes of each cluster; None for any number.
        """
        is_all_open = set(family) == {None}
        # No ideal site if clusters differ in their links. All open: floor_s is for all subsets.
        if not is_flat(self.spec) or is_all_open:
            return self.floor_s
        links = Links.of_spec(self.spec)
        # Largest factor by which sends of activations are faster than whole messages: each tensor
        # parallel rank sends a slice, compressed (numbers of WIDEST bytes gain most).
        send_speedup = 0.0
        if any(shape.pipeline > 1 for shape in self.shapes):
            tensor = max(shape.tensor for shape in self.shapes)
            compression = self.job.options.compress_activations
            send_speedup = tensor / compressed_share(compression, WIDEST)
        model = self.job.known_model
        site, model = of_family(self.spec, family, self.count, model, links, send_speedup)
        job = replace(self.job, model=model)
        network = Network(site, links, uneven=True)  # allows clusters of different sizes: a bound
        try:
            result = in_closed_form(network, job, self.batch, self.limits, self.shapes)
        except HolmesError:  # no plan fits the memory
            return inf
        return max(self.floor_s, result.best.formula_s)

    def computing_s(self) -> float:
        """Return the least step time of all shapes on the fastest GPUs, a lower bound for all subsets."""
        site, model = ideal_gpus(
            site_from_spec(self.spec), self.count, self.job.known_model, Links.of_spec(self.spec)
        )
        job = replace(self.job, model=model)
        # No time for plans: only the lower bounds of the shapes (`ideals`) are needed.
        result = in_closed_form(
            Network(site), job, self.batch, self.limits, self.shapes, seconds=0.0
        )
        return min(result.ideals.values())

    def best(self, end: float) -> Subsets:
        """Search for the subset that trains fastest, until the moment `end` of time.monotonic()."""
        model = self.job.known_model
        # For each cluster, the first of the clusters that are interchangeable with it.
        first_equal = first_equal_cluster(self.spec, model)
        return best_subset(
            idle=tuple(len(cluster.nodes) for cluster in self.spec.clusters),
            count=self.count,
            price=self.price,  # computes the best plan on a subset
            floor=self.floor,  # computes a lower bound on the step time for a set of subsets
            unit=self.count // self.shapes[0].pipeline,  # nodes of a stage of the best shape
            first_equal=first_equal,
            order=fastest_first(self.spec, model, first_equal),
            end=end,
        )


def in_closed_form(
    network: Network,
    job: Training,
    batch: int,
    limits: Limits,
    shapes: Sequence[Shape],
    seconds: float = UNLIMITED_S,
) -> SearchResult:
    """Return the fastest plans by the closed form.

    Args:
        batch: Sequences of a step.
        shapes: Shapes to examine; () for all.
        seconds: Time limit.
    """
    search_request = asked_for(network, job, batch, limits)
    return search(search_request, seconds, rows=1, only=shapes, prove=False, simulate=False)


def run(args: argparse.Namespace) -> int:
    """Choose the nodes and print them; return the exit status 0.

    The best subsets by the closed form are found first. Then a simulation of their steps ranks them.

    Raises:
        HolmesError: The input is bad, or no plan fits.
    """
    all_nodes = load_spec(args.from_cluster)
    spec, features = _idle_nodes(args, all_nodes)
    end = args.begin + args.seconds
    job = training_of(args, spec)
    if job.model is None:
        raise HolmesError(
            "--nodes: nothing says what to train; write the command after --, or give --model FILE"
        )
    total = len(spec.cluster_by_node)
    if not 0 < args.nodes <= total:
        nodes = counted(total, "idle node" if args.idle else "node")
        allowed = f"1 to {total}" if total > 1 else "1"
        raise HolmesError(f"--nodes {args.nodes}: {spec.source} has {nodes}; ask for {allowed}")
    with lines_before_error(job.lines):
        available = _available_nodes(args, spec, job)
        # The search for subsets leaves time for the rest. If the sizes are free (several shapes), each
        # of the best subsets is searched with all sizes before it is simulated. That takes longer.
        reserved_share = SIZES_SHARE if len(available.shapes) > 1 else TABLE_SHARE
        subsets = available.best(end - reserved_share * args.seconds)
    ranked = _ranked_by_simulation(subsets, available, end)
    parts = [_chosen_nodes(spec, all_nodes, subset.counts) for subset in ranked]
    if args.output:
        result = ranked[0].result
        plan_of(result, result.best, job.options).save(args.output)
    if args.form:
        print(_formatted(args.form, parts[0], features), end="")
    elif args.json:
        print(json.dumps(_document(subsets, ranked, parts, features), indent=2))
    else:
        _show(args, spec, job, subsets, ranked, parts, features)
    return 0


def _idle_nodes(
    args: argparse.Namespace, spec: SiteSpec
) -> tuple[SiteSpec, request.Features | None]:
    """Return the clusters with their idle nodes only (--idle), and the nodes' features in Slurm."""
    if not args.idle:
        return spec, None
    if args.idle != "slurm":
        return only(spec, args.idle, "--idle"), None
    idle, features = slurm.idle_nodes()
    idle_spec = spec.only(spec.cluster_by_node.keys() & set(idle))
    if not idle_spec.clusters:
        raise HolmesError(f"--idle slurm: none of the nodes of {idle_spec.source} is idle now")
    return idle_spec, features


def _available_nodes(args: argparse.Namespace, spec: SiteSpec, job: Training) -> AvailableNodes:
    """Return the idle nodes, the shapes to try on their subsets, and bounds on the step time.

    Shapes are parallel sizes. If the user gave none, good shapes are searched on ideal nodes, each as
    good as the best of all clusters.
    """
    model = job.known_model
    ideal_site, ideal_model = ideal(site_from_spec(spec), args.nodes, model, Links.of_spec(spec))
    batch = global_batch(args, job, ideal_site)
    limits = limits_of(args, job)
    shapes: tuple[Shape, ...] = ()  # (): the search on ideal nodes tries all shapes
    if job.sizes is not None:
        sizes = job.sizes.complete(ideal_site.world_size, ideal_site.ranks_of_every_node)
        shapes = (shape_of(model, sizes, *job.zero_and_chunks),)  # only that of the given sizes
    ideal_result = in_closed_form(
        Network(ideal_site),
        replace(job, model=ideal_model),
        batch,
        limits,
        shapes,
        seconds=SIZES_SHARE * args.seconds,  # share of the time limit for the choice of sizes
    )
    shapes = shapes or _best_of_each_pipeline_size(ideal_result)
    available = AvailableNodes(spec, job, batch, limits, shapes=shapes, count=args.nodes)
    # Two bounds that no subset beats: floor(), the shortest step that any shape can have on ideal
    # nodes; and the computation alone on the nodes with the fastest GPUs.
    floor_s = max(floor(ideal_result), available.computing_s())
    return replace(available, floor_s=floor_s)


def floor(result: SearchResult) -> float:
    """Return a lower bound on the step times of all plans that a search can choose from, in seconds.

    It is the least of the best plan's closed-form step time and the bounds of all shapes not examined.
    """
    examined = {candidate.shape for candidate in result.candidates}
    bounds_s = [ideal_s for shape, ideal_s in result.ideals.items() if shape not in examined]
    return min([result.best.formula_s, *bounds_s])


def _best_of_each_pipeline_size(result: SearchResult) -> tuple[Shape, ...]:
    """Return the best shape, and for up to MAX_SHAPES pipeline sizes the shape with the least bound."""
    best_of: dict[int, Shape] = {}  # pipeline size -> shape
    for shape in sorted(result.ideals, key=result.ideals.__getitem__):
        if shape.virtual == 1:  # not interleaved
            best_of.setdefault(shape.pipeline, shape)
    others = list(best_of.values())[:MAX_SHAPES]
    return tuple(dict.fromkeys([result.best.shape, *others]))


def _ranked_by_simulation(
    subsets: Subsets, available: AvailableNodes, end: float
) -> list[RankedSubset]:
    """Simulate the best plan of each of the fastest subsets; return these subsets, the fastest first.

    If the user gave no parallel sizes, each subset is searched again with all sizes, until the moment `end`.
    """
    ranked = []
    fastest = subsets.found[:MAX_SIMULATED]
    for number, (counts, priced) in enumerate(fastest):
        result: SearchResult = priced.plan  # of the search that gave the step time
        if len(available.shapes) > 1:
            # An equal part of the remaining time for each subset that is left.
            seconds = max(0.0, end - time.monotonic()) / (len(fastest) - number)
            with_all_sizes = replace(available, shapes=()).search(counts, seconds)
            result = min(with_all_sizes, result, key=lambda found: found.best.formula_s)
        ranked.append(RankedSubset(counts, simulate_first(result, count=1)))
    return sorted(ranked, key=lambda subset: subset.result.best.step_s)


def _chosen_nodes(spec: SiteSpec, all_nodes: SiteSpec, counts: Counts) -> list[request.ChosenNodes]:
    """Return the chosen nodes of each cluster: the first nodes, as all nodes of a cluster are equal.

    Args:
        spec: Clusters with the nodes to choose from.
        all_nodes: Clusters with all their nodes.
        counts: Number of nodes of each cluster.
    """
    nodes_of = {cluster.name: cluster.nodes for cluster in all_nodes.clusters}
    parts = []
    for cluster, count in zip(spec.clusters, counts):
        if count:
            chosen = cluster.nodes[:count]
            all_of_cluster = nodes_of[cluster.name]  # with those that are not idle
            parts.append(
                request.ChosenNodes(cluster.name, chosen, cluster.processes, all_of_cluster)
            )
    return parts


def _formatted(
    form: str, parts: Sequence[request.ChosenNodes], features: request.Features | None
) -> str:
    """Return the chosen nodes as text for a scheduler or launcher.

    Args:
        form: Format (FORMS).
        parts: Chosen nodes of each cluster.
        features: Features of the nodes in Slurm; None if not known.
    """
    if form == "hostfile":
        return request.hostfile(parts)
    if form == "kubernetes":
        return json.dumps(request.node_affinity(parts), indent=2) + "\n"
    if form == "sbatch":
        lines = request.sbatch_lines(parts, features)
    else:
        lines = request.hetjob_lines(parts, features)
    return "\n".join(lines) + "\n"


def _document(
    subsets: Subsets,
    ranked: Sequence[RankedSubset],
    parts: Sequence[Sequence[request.ChosenNodes]],
    features: request.Features | None,
) -> dict[str, Any]:
    """Return the result for --json: the best subset, some others, and the best in all formats.

    Args:
        subsets: All subsets that were priced.
        ranked: Those that were simulated, the fastest first.
        parts: For each of `ranked`, the chosen nodes of each cluster.
        features: Features of the nodes in Slurm; None if not known.
    """
    rows = []
    for subset, chosen_nodes in zip(ranked, parts):
        nodes = {part.cluster: list(part.nodes) for part in chosen_nodes}
        rows.append({"nodes": nodes, "step_seconds": subset.result.best.step_s})
    chosen = parts[0]
    forms = {form: _formatted(form, chosen, features) for form in FORMS if form != "kubernetes"}
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
    ranked: Sequence[RankedSubset],
    parts: Sequence[Sequence[request.ChosenNodes]],
    features: request.Features | None,
) -> None:
    """Print the table of subsets, and the best subset as lines for sbatch.

    Args:
        spec: Clusters with the nodes to choose from.
        subsets: All subsets that were priced.
        ranked: Those that were simulated, the fastest first.
        parts: For each of `ranked`, the chosen nodes of each cluster.
        features: Features of the nodes in Slurm; None if not known.
    """
    screen = Screen()
    job.show(screen)
    idle = " that are idle" if args.idle else ""
    columns = (
        Column("nodes", wrap=16),
        Column("step", right=True),
        Column("slower by", right=True),
        Column("sizes", wrap=12, drop=2),
        Column("stages", wrap=10, drop=1),
    )
    title = f"{args.nodes} of the {len(spec.cluster_by_node)} nodes{idle} in {spec.source}"
    screen.table(columns, _table_rows(ranked, parts), title)
    screen.line(_proof_text(subsets), "dim")
    screen.line("\nfor sbatch, as one job:", "bold")
    chosen = parts[0]
    print(_formatted("sbatch", chosen, features), end="")
    if len(chosen) > 1:
        screen.line(
            f"or as a heterogeneous job (srun --het-group=0-{len(chosen) - 1} starts one step on all "
            "of it):",
            "bold",
        )
        print(_formatted("hetjob", chosen, features), end="")
    screen.line("for mpirun and deepspeed: --as hostfile; for Kubernetes: --as kubernetes", "dim")
    if args.output:
        print(f"written: {args.output}")


def _table_rows(
    ranked: Sequence[RankedSubset], parts: Sequence[Sequence[request.ChosenNodes]]
) -> list[tuple[str, ...]]:
    """Return the rows of the table of subsets.

    Args:
        ranked: Simulated subsets, the fastest first.
        parts: For each of them, the chosen nodes of each cluster.
    """
    first_s = ranked[0].result.best.step_s
    rows: list[tuple[str, ...]] = []
    for subset, chosen_nodes in zip(ranked, parts):
        candidate = subset.result.best
        shape = candidate.shape
        rows.append(
            (
                ", ".join(f"{len(part.nodes)} of {part.cluster}" for part in chosen_nodes),
                format_seconds(candidate.step_s),
                f"{candidate.step_s / first_s - 1:+.1%}",
                f"pipeline {shape.pipeline}, tensor {shape.tensor}, data {shape.data}",
                subset.result.describe(candidate),
            )
        )
    return rows


def _proof_text(subsets: Subsets) -> str:
    """Return how many subsets were priced, and how much faster another subset could be, in words."""
    complete = ", all that there are" if subsets.complete else ""
    if subsets.proven:
        gap = "the first is the best of all"
    else:
        gap = (
            f"none is more than {subsets.gap:.1%} better than the first (in closed form; the "
            "table's steps are simulated); --seconds S searches longer"
        )
    return f"subsets looked at: {len(subsets.found)}{complete}; {gap}"
