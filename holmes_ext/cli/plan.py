"""Command `holmes plan`: places pipeline stages, chooses networks, predicts step times.

This module plans for parallel sizes that the user gives. Extensions handle the other uses of the
command, such as the search for the best sizes: they are the "parts" of the command (cli/parts.py), and run
first.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import Field, dataclass, fields
from typing import Any, NamedTuple, get_type_hints

from holmes_ext.cli.parts import command_parts
from holmes_ext.cli.show.command_nodes import training_on_nodes
from holmes_ext.cli.show.matrix import show_wan
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, lines_before_error
from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.sources.hostlist import expand, folded, runs
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.document import load_toml
from holmes_ext.errors import HolmesError
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.build import build_plan, costs_of
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import Estimate, uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel, StageCosts, estimate, predict
from holmes_ext.plan.engine import rules_of
from holmes_ext.plan.partition import METHODS
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.profile import load_profile
from holmes_ext.plan.sizes import Sizes, groups
from holmes_ext.plan.traffic import LOCAL
from holmes_ext.plan.workload import Workload
from holmes_ext.words import counted, some_of

_ABOUT = """Place the pipeline stages of a job on nodes, choose the network of each group, and predict
the step time: for a training command after --, for given sizes, or for the best sizes of a model."""
_EPILOG = """\
Four kinds of use:

  holmes plan --cluster FILE -- COMMAND                      compare the command, holmes, and the best sizes
  holmes plan --cluster FILE --model FILE --global-batch N   search the best sizes for a model
  holmes plan --cluster FILE --pipeline 2                    place the stages of given sizes
  holmes plan --nodes 12 --from-cluster FILE -- COMMAND      choose 12 nodes to request from the scheduler

Exit status: 0 for success, 1 if a group of the given sizes spans networks, 2 on bad input, 130 after
Ctrl-C (the best plan found until then is printed)."""


#: Columns of the table of stages.
_STAGE_COLUMNS = (
    Column("stage"),
    Column("nodes", wrap=12),
    Column("data-parallel over", wrap=10),
    Column("to the next stage", wrap=10, drop=1),
    Column("reduction", right=True),
)


def add_parser(subparsers: Any) -> None:
    """Add the command `plan` with its options to the parser of `holmes`."""
    summary = (
        "place pipeline stages and predict step times: now, with holmes, and with the best sizes"
    )
    parser = subparsers.add_parser("plan", help=summary, description=_ABOUT, epilog=_EPILOG)
    _add_job_arguments(parser)
    _add_workload_arguments(parser)
    _add_layer_arguments(parser)
    # Modules of extensions, such as the search for the best sizes.
    for part in command_parts("plan"):
        part.add_arguments(parser)
    parser.set_defaults(run=run)


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the clusters, the command, the parallel sizes and the output."""
    add = parser.add_argument
    add("--cluster", metavar="FILE", help="describe the clusters (cluster.toml)")
    add(
        "--nodelist",
        metavar="LIST",
        help="use only these nodes of --cluster ($SLURM_JOB_NODELIST)",
    )
    add(
        "--sizes",
        metavar="TEXT",
        help='set the parallel sizes: "pipeline=2,tensor=1"; the data-parallel size follows',
    )
    for name in ("pipeline", "tensor", "context", "expert"):
        add(f"--{name}", type=int, metavar="N", help=f"set the {name}-parallel size")
    add(
        "--order",
        metavar="O",
        help="set the order of axes in the ranks, innermost first (default: tp-cp-ep-dp-pp)",
    )
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="set the sequences of a step (default: the model's)",
    )
    add(
        "--for",
        dest="framework",
        choices=tuple(ENGINES),
        help="plan for the abilities of this framework (default: the one whose flags the command has)",
    )
    add(
        "--output",
        metavar="FILE",
        help="write plan.json for the given sizes, or for the best plan found",
    )
    add("--json", action="store_true", help="print the plan as JSON instead of the table")
    add(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="read model and sizes from a Megatron or DeepSpeed command",
    )


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the times and message sizes of a nominal model.

    A nominal model is only these numbers: it has no layers. It is used if neither a model nor a command is
    given. There is an argument for each field of Workload.
    """
    title = "computation and messages of the model (nominal values unless given)"
    add = parser.add_argument_group(title).add_argument
    add(
        "--workload",
        metavar="FILE",
        help="read these values from TOML (forward_seconds = 0.03, ...)",
    )
    for field in fields(Workload):
        add(
            f"--{field.metadata['option']}",
            dest=field.name,
            type=_type_of_field(field),
            metavar="N",
            help=field.metadata["help"],
        )


def _add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model, for overlapping communication, and for splitting backward passes."""
    add = parser.add_argument_group("layers of each stage").add_argument
    add("--model", metavar="FILE", help="describe the model in TOML (examples/models)")
    add("--profile", metavar="FILE", help="use times that a job measured with --holmes-profile N")
    add(
        "--partition",
        choices=METHODS,
        default="uniform",
        help="split layers as the framework does, by the Holmes paper's formula, or for the shortest "
        "predicted step (default: uniform)",
    )
    add(
        "--alpha",
        type=float,
        default=1.0,
        metavar="X",
        help="set the paper's alpha for --partition speed (default: 1)",
    )
    add(
        "--overlap",
        choices=("on", "off"),
        default="on",
        help="reduce gradients under the last backward pass, as --holmes-overlap auto (default: on)",
    )
    add(
        "--inflight",
        choices=("auto", "off"),
        default="auto",
        help="use more micro-batches in flight to hide stage links, as --holmes-inflight auto",
    )
    add(
        "--schedule",
        choices=("auto", "1f1b"),
        default="1f1b",
        help="split backward passes in two with auto, as --holmes-schedule auto",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the plan for the parallel sizes that the user gives.

    An extension may handle the arguments instead, such as a search for the best sizes.

    Returns:
        The exit status: 1 if a process group spans clusters, otherwise 0; or that of the extension.

    Raises:
        HolmesError: the input is bad.
    """
    for part in command_parts("plan"):
        status: int | None = part.run(args)  # None: the arguments are not for this extension
        if status is not None:
            return status
    spec, job = inputs(args)
    with lines_before_error(job.lines):
        return show_given_sizes(given_sizes(args, spec, job), args)


def inputs(args: argparse.Namespace) -> tuple[SiteSpec, Training]:
    """Return the clusters and the training job that the arguments describe.

    Raises:
        HolmesError: the input is bad.
    """
    if not args.cluster:
        raise HolmesError(
            "the following arguments are required: --cluster (see holmes plan --help)"
        )
    spec = load_spec(args.cluster)
    if args.nodelist:
        spec = only(spec, args.nodelist, "--nodelist")
    return training_on_nodes(args, spec)


def only(spec: SiteSpec, listed: str, flag: str) -> SiteSpec:
    """Return the part of a cluster.toml that describes the listed nodes.

    Args:
        spec: Content of the file.
        listed: A host list, such as "a[0-3]".
        flag: Option that has the list, for the error message.

    Raises:
        HolmesError: a node of the list is in no cluster.
    """
    names = expand(listed, flag)
    unknown = [name for name in names if not spec.known_as(name)]  # hosts in no cluster
    if unknown:
        raise HolmesError(
            f"{flag}: {spec.source} does not know {some_of(unknown, 4)}; add it to a cluster's nodes"
        )
    return spec.only({spec.known_as(name) for name in names})


@dataclass(frozen=True)
class GivenSizes:
    """Plan, costs and predicted step for the parallel sizes that the user gave to `holmes plan`."""

    spec: SiteSpec
    site: Site  # with measured rates, if there are any
    network: Network
    job: Training
    plan: Plan
    costs: StageCosts | None  # seconds and bytes of each stage's layers; None for a nominal model
    step: Estimate | None  # predicted step; None if the sizes are unknown
    nominal: bool  # no model, profile or workload was given


def given_sizes(args: argparse.Namespace, spec: SiteSpec, job: Training) -> GivenSizes:
    """Return the plan, costs and predicted step for the sizes of the options or the command.

    Args:
        args: Arguments of `holmes plan`.
        spec: The clusters.
        job: The training job.

    Raises:
        HolmesError: the sizes do not fit the clusters, or the input is bad.
    """
    profile = load_profile(args.profile) if args.profile else None
    given_workload = workload(args)
    described_model = job.model or profile
    if described_model is not None and given_workload is not None:
        conflict = "--model or --profile says what the model computes and sends"
        raise HolmesError(f"{conflict}; give it or --workload (--gradient-bytes, ...), not both")
    site = site_from_spec(spec)
    links = Links.of_spec(spec)
    plan = build_plan(
        site,
        job.sizes,
        given_workload,
        partition=args.partition,
        model=job.model,
        alpha=args.alpha,
        overlap=job.overlap,
        profile=profile,
        links=links,
        options=job.options,
        engine=job.engine,
    )
    network = Network(site, links)
    costs = None
    step = None
    if plan.sizes is not None:
        rules = rules_of(job.engine, job.options, job.is_gloo)
        prices = Prices(network, RankModel.of_workload(plan.workload, plan.sizes), rules)
        placement = network.placement(plan.nodes, plan.sizes)
        if described_model is not None:
            costs = costs_of(prices, placement, job.model, profile, overlap=job.overlap)
            step = predict(costs, plan.stage_layers or uniform(costs.blocks, costs.stages))
        else:
            nominal_costs = prices.costs(placement)
            one_layer_per_stage = (1,) * nominal_costs.stages
            step = estimate(nominal_costs, one_layer_per_stage)
    return GivenSizes(
        spec=spec,
        site=links.site(site),
        network=network,
        job=job,
        plan=plan,
        costs=costs,
        step=step,
        nominal=described_model is None and given_workload is None,
    )


def show_given_sizes(given: GivenSizes, args: argparse.Namespace) -> int:
    """Print the plan, write it to the file of --output, and return the exit status."""
    if args.output:
        given.plan.save(args.output)
    if args.json:
        sys.stdout.write(given.plan.to_json())
    else:
        show_table(given)
        if args.output:
            print(f"written: {args.output}")
    return status_of(given.plan)


def show_table(given: GivenSizes) -> None:
    """Print the lines about the input, the stages, their networks, and the predicted step."""
    given.job.show(Screen())
    _show_plan(given.site, given.plan, given.step, given.nominal)
    show_wan(given.site, given.spec.notes)


def status_of(plan: Plan) -> int:
    """Return exit status 1 if nodes of a process group share no network but Ethernet, else 0."""
    return 1 if plan.spanning else 0


def workload(args: argparse.Namespace) -> Workload | None:
    """Return the workload that --workload and the options describe, None if none of them is given.

    A workload is the computing times and message sizes of a nominal model. An option takes precedence over
    the file.

    Raises:
        HolmesError: the file or a value is wrong.
    """
    values = load_workload(args.workload) if args.workload else {}
    for field in fields(Workload):
        value = getattr(args, field.name)
        if value is not None:
            values[field.name] = value
    return Workload(**values) if values else None


def load_workload(path: str) -> dict[str, Any]:
    """Return fields of a Workload from a TOML file. Its keys are the options with underscores.

    Raises:
        HolmesError: the file cannot be read, or a key or value is wrong.
    """
    table = load_toml(path, advice="name a TOML file")
    values = {}
    for field in fields(Workload):
        key = field.metadata["option"].replace("-", "_")
        value = table.take(key, _type_of_field(field), None)
        if value is not None:
            values[field.name] = value
    table.done()  # raises for keys that were not read
    return values


def _type_of_field(field: Field[Any]) -> type:
    """Return int or float, the type of a field of Workload."""
    field_type: type = get_type_hints(Workload)[field.name]
    return field_type


def _show_plan(site: Site, plan: Plan, step: Estimate | None, nominal: bool) -> None:
    """Print the stages of a plan, the groups that span clusters, and the predicted step.

    Args:
        site: The clusters.
        plan: The plan.
        step: Predicted step, None if the sizes are unknown.
        nominal: Whether the prediction is for a nominal model, because the user gave none.
    """
    screen = Screen()
    if plan.sizes is None or step is None:
        # Without sizes, the plan only orders the ranks: cluster by cluster.
        clusters = ", ".join(dict.fromkeys(site.node_by_name[name].cluster for name in plan.nodes))
        screen.line(
            f"parallel sizes unknown: clusters as blocks, the fastest fabric first ({clusters})"
        )
        screen.line(f"nodes: {folded(plan.nodes)}")
        return
    rows = []
    for stage, row in enumerate(_stage_rows(site, plan, plan.sizes)):
        reduction = f"{step.reduction_s[stage]:.3g} s"
        rows.append((str(stage), row.nodes, row.data_fabrics, row.link_fabrics, reduction))
    screen.table(_STAGE_COLUMNS, rows, _title_of_stages(plan, plan.sizes))
    _show_spanning(screen, plan)
    # Tensor-parallel ranks hold equal activations, so each needs to send only a slice of them.
    slices = max((link.slices for link in plan.traffic_of().stage_links), default=1)
    if slices > 1:
        screen.line(
            f"{slices} tensor ranks each send a slice of what a stage sends on Ethernet, unless "
            f"sequence parallelism splits it already"
        )
    predicted_s = plan.predicted["step_seconds"]
    stock_s = plan.predicted["stock_step_seconds"]  # of the same job without holmes
    screen.line(
        f"predicted step: {predicted_s:.4g} s; stock: {stock_s:.4g} s "
        f"({stock_s / predicted_s:.2f} times as long)",
        "bold",
    )
    if plan.stage_layers:
        screen.line(
            f"layers of the stages ({plan.partition}): {' '.join(map(str, plan.stage_layers))}"
        )
    if nominal:
        advice = "give --workload or --gradient-bytes and so on for yours"
        screen.line(f"for a nominal model (10^9 parameters in each rank); {advice}")


def _show_spanning(screen: Screen, plan: Plan) -> None:
    """Print a line for each kind of group that spans clusters, or a line that there is none."""
    # One item for each kind of group ("data", ...) that spans clusters, with one group's nodes.
    for spanning in plan.spanning:
        groups = counted(spanning.groups, f"{spanning.kind} group", "span")
        costs = "no slower than inside clusters"
        if spanning.seconds:  # more than inside clusters, a step; 0: no more
            costs = f"costs {spanning.seconds:.3g} s a step"
        screen.line(
            f"! {groups} clusters (one has "
            f"{', '.join(spanning.example)}): on {spanning.fabric}, {costs}",
            "yellow",
        )
    if not plan.spanning:
        screen.line(
            "no data-, tensor-, context- or expert-parallel group leaves its fabric", "green"
        )


def _title_of_stages(plan: Plan, sizes: Sizes) -> str:
    """Return the title of the table of stages: "16 ranks on 4 nodes: pipeline 2 x data 8".

    Sizes of 1 are left out, except for pipeline and data.
    """
    texts = []
    for name in ("pipeline", "tensor", "context", "data", "expert"):
        size = getattr(sizes, name)
        if size != 1 or name in ("pipeline", "data"):
            texts.append(f"{name} {size}")
    return f"{counted(plan.world_size, 'rank')} on {counted(len(plan.nodes), 'node')}: {' x '.join(texts)}"


class _StageRow(NamedTuple):
    """Cells of a pipeline stage in the table of stages."""

    nodes: str
    data_fabrics: str  # fabrics of the data-parallel groups
    link_fabrics: str  # fabrics to the next stage


def _stage_rows(site: Site, plan: Plan, sizes: Sizes) -> list[_StageRow]:
    """Return the nodes and fabrics of each pipeline stage.

    Args:
        site: The clusters.
        plan: The plan.
        sizes: Parallel sizes of the plan.
    """
    # For each stage, names in the keys of a dict: a set that keeps its order.
    nodes: list[dict[str, None]] = [{} for _ in range(sizes.pipeline)]
    data_fabrics: list[dict[str, None]] = [{} for _ in range(sizes.pipeline)]
    link_fabrics: list[dict[str, None]] = [{} for _ in range(sizes.pipeline)]
    for rank in range(plan.world_size):
        nodes[sizes.stage(rank)][plan.node_of(rank)] = None
    data_groups = groups(sizes, "data")
    fabrics = plan.transports["data"]  # of each data-parallel group
    if len(fabrics) == 1:  # the same for all groups
        fabrics = fabrics * len(data_groups)
    for group, fabric in zip(data_groups, fabrics):  # all ranks of a group are on one stage
        data_fabrics[sizes.stage(group[0])][fabric] = None
    for group in groups(sizes, "pipeline"):  # one rank of each stage
        for stage, pair in enumerate(zip(group, group[1:])):
            shared = plan.fabric_of(pair)
            link_fabrics[stage][LOCAL if shared is None else shared.name] = None
    return [
        _StageRow(
            nodes=" ".join(runs(nodes[stage])),
            data_fabrics=", ".join(data_fabrics[stage]),
            link_fabrics=", ".join(link_fabrics[stage]),
        )
        for stage in range(sizes.pipeline)
    ]
