"""`holmes plan`: where each stage of a job should run, over which network, and what that is worth."""

from __future__ import annotations

import argparse
import sys
from dataclasses import Field, dataclass, fields
from typing import Any, get_type_hints

from holmes_ext.cli.parts import command_parts
from holmes_ext.cli.show.matrix import show_wan
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cli.show.training import Training, training_of
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
from holmes_ext.words import some_of

_ABOUT = """Says where each stage of a job should run, over which network, and what that is worth: for a
training command after --, for sizes, or searched for a model."""
_EPILOG = """\
Four ways to ask:

  holmes plan --cluster FILE -- COMMAND                      today's command, with holmes, and the best sizes
  holmes plan --cluster FILE --model FILE --global-batch N   the best sizes for a model
  holmes plan --cluster FILE --pipeline 2                    where the stages of these sizes go
  holmes plan --nodes 12 --from-cluster FILE -- COMMAND      which 12 nodes to ask the scheduler for

Exit status: 0 good, 1 a group of the given sizes spans networks, 2 bad input, 130 after Ctrl-C
(with the best found until then)."""


def add_parser(subparsers: Any) -> None:
    what = (
        "what a step takes today, with holmes, and with the best sizes; where each stage should run"
    )
    parser = subparsers.add_parser("plan", help=what, description=_ABOUT, epilog=_EPILOG)
    add = parser.add_argument
    add("--cluster", metavar="FILE", help="cluster.toml")
    add(
        "--nodelist",
        metavar="LIST",
        help="with --cluster: only these of the file ($SLURM_JOB_NODELIST)",
    )
    add(
        "--sizes",
        metavar="TEXT",
        help='parallel sizes, such as "pipeline=2,tensor=1"; what is left is data',
    )
    for name in ("pipeline", "tensor", "context", "expert"):
        add(f"--{name}", type=int, metavar="N", help=f"{name}-parallel size")
    add("--order", metavar="O", help="axes in the ranks, innermost first (default: tp-cp-ep-dp-pp)")
    add("--global-batch", type=int, metavar="N", help="sequences of a step (default: the model's)")
    add(
        "--for",
        dest="framework",
        choices=tuple(ENGINES),
        help="plan for what this framework can do (default: the one whose flags the command line has)",
    )
    add(
        "--output",
        metavar="FILE",
        help="write plan.json: of the sizes given, or the best plan found",
    )
    add("--json", action="store_true", help="print the plan as JSON instead of the table")
    add(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="a Megatron or DeepSpeed command line that names the model; its sizes are your layout",
    )
    add = parser.add_argument_group(
        "what the model computes and sends (nominal values unless given)"
    ).add_argument
    add("--workload", metavar="FILE", help="TOML with such keys (forward_seconds = 0.03, ...)")
    for field in fields(Workload):
        about = field.metadata
        add(
            f"--{about['option']}",
            dest=field.name,
            type=_kind(field),
            metavar="N",
            help=about["help"],
        )
    add = parser.add_argument_group("layers of each stage").add_argument
    add("--model", metavar="FILE", help="the model as TOML (examples/models), not a nominal one")
    add("--profile", metavar="FILE", help="what a job measured with --holmes-profile N")
    add(
        "--partition",
        choices=METHODS,
        default="uniform",
        help="as the framework splits them, by the Holmes paper's formula, or for the least predicted step "
        "(default: uniform)",
    )
    add(
        "--alpha",
        type=float,
        default=1.0,
        metavar="X",
        help="the paper's alpha, for --partition speed (default: 1)",
    )
    add(
        "--overlap",
        choices=("on", "off"),
        default="on",
        help="gradients are reduced under the last backward, as --holmes-overlap auto does (default: on)",
    )
    add(
        "--inflight",
        choices=("auto", "off"),
        default="auto",
        help="micro-batches in flight that hide stage links, as under --holmes-inflight auto, or off",
    )
    add(
        "--schedule",
        choices=("auto", "1f1b"),
        default="1f1b",
        help="auto: backward passes in two, as under --holmes-schedule auto",
    )
    for part in command_parts("plan"):
        part.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print (or write) the plan of the given sizes, unless the arguments ask an extension for more.

    Returns:
        The exit status: 0 if no group spans networks, 1 if one does.

    Raises:
        HolmesError: the input is bad.
    """
    for part in command_parts("plan"):
        status: int | None = part.run(args)
        if status is not None:
            return status
    return show_given_sizes(given_sizes(args, *inputs(args)), args)


def inputs(args: argparse.Namespace) -> tuple[SiteSpec, Training]:
    """Read cluster.toml, and what is to be trained."""
    if not args.cluster:
        raise HolmesError(
            "the following arguments are required: --cluster (see holmes plan --help)"
        )
    spec = load_spec(args.cluster)
    if args.nodelist:
        spec = only(spec, args.nodelist, "--nodelist")
    return spec, training_of(args, spec)


def only(spec: SiteSpec, listed: str, flag: str) -> SiteSpec:
    """Return the clusters with the listed nodes alone.

    Raises:
        HolmesError: the file does not know a node of the list, which `flag` gave.
    """
    names = expand(listed, flag)
    if strangers := [name for name in names if not spec.known_as(name)]:
        raise HolmesError(
            f"{flag}: {spec.source} does not know {some_of(strangers, 4)}; add it to a cluster's nodes"
        )
    return spec.only({spec.known_as(name) for name in names})


@dataclass(frozen=True)
class GivenSizes:
    """Plan of the parallel sizes that the user gave, and what it costs."""

    spec: SiteSpec
    site: Site  # with the rates that were measured
    network: Network
    job: Training
    plan: Plan
    costs: StageCosts | None  # of a model or profile; None for a nominal model
    step: Estimate | None  # None where the sizes are unknown
    nominal: bool  # neither a model, nor a profile, nor a workload was given


def given_sizes(args: argparse.Namespace, spec: SiteSpec, job: Training) -> GivenSizes:
    """Plan the sizes that the arguments or the command line give."""
    site, links = site_from_spec(spec), Links.of_spec(spec)
    model, given_workload = job.model, workload(args)
    profile = load_profile(args.profile) if args.profile else None
    known = model or profile
    if known is not None and given_workload is not None:
        conflict = "--model or --profile says what the model computes and sends"
        raise HolmesError(f"{conflict}; give it or --workload (--gradient-bytes, ...), not both")
    how = args.partition, model, args.alpha, job.overlap, (), profile, links, job.options
    plan = build_plan(site, job.sizes, given_workload, *how, engine=job.engine)
    network = Network(site, links)
    costs = step = None
    if plan.sizes is not None:
        rules = rules_of(job.engine, job.options, job.direct)
        prices = Prices(network, RankModel.of_workload(plan.workload, plan.sizes), rules)
        placement = network.placement(plan.nodes, plan.sizes)
        if known is not None:
            costs = costs_of(prices, placement, model, profile, job.overlap)
            step = predict(costs, plan.stage_layers or uniform(costs.blocks, costs.stages))
        else:
            by_stage = prices.costs(placement)
            step = estimate(by_stage, (1,) * by_stage.stages)
    nominal = known is None and given_workload is None
    return GivenSizes(spec, links.site(site), network, job, plan, costs, step, nominal)


def show_given_sizes(given: GivenSizes, args: argparse.Namespace) -> int:
    """Print the plan, and write it where --output says; return the exit status."""
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
    """Print what was read, the stages, their networks, and the predicted step."""
    given.job.show(Screen())
    _show(given.site, given.plan, given.step, given.nominal)
    show_wan(given.site, given.spec.notes)


def status_of(plan: Plan) -> int:
    """Return the exit status: 1 if a group spans networks."""
    return 1 if plan.spanning else 0


def workload(args: argparse.Namespace) -> Workload | None:
    """None when nothing about the model was given."""
    values = load_workload(args.workload) if args.workload else {}
    options = {field.name: getattr(args, field.name) for field in fields(Workload)}
    values |= {name: value for name, value in options.items() if value is not None}
    return Workload(**values) if values else None


def load_workload(path: str) -> dict[str, Any]:
    """Fields of Workload from a TOML file whose keys are the options' names with underscores."""
    table, values = load_toml(path, "name a TOML file"), {}
    for field in fields(Workload):
        value = table.take(field.metadata["option"].replace("-", "_"), _kind(field), None)
        if value is not None:
            values[field.name] = value
    table.done()
    return values


def _kind(field: Field[Any]) -> type:
    """Return int or float, the type of a field of Workload."""
    kind: type = get_type_hints(Workload)[field.name]
    return kind


def _show(site: Site, plan: Plan, step: Estimate | None, nominal: bool) -> None:
    screen = Screen()
    if plan.sizes is None or step is None:
        clusters = ", ".join(dict.fromkeys(site.node_by_name[name].cluster for name in plan.nodes))
        screen.line(
            f"parallel sizes unknown: clusters as blocks, the fastest fabric first ({clusters})"
        )
        screen.line(f"nodes: {folded(plan.nodes)}")
        return
    columns = (
        Column("stage"),
        Column("nodes", wrap=12),
        Column("data-parallel over", wrap=10),
        Column("to the next stage", wrap=10, drop=1),
        Column("reduction", right=True),
    )
    reductions = [f"{seconds:.3g} s" for seconds in step.reduction_s]
    rows = [
        (str(stage), *row, reductions[stage])
        for stage, row in enumerate(_stage_rows(site, plan, plan.sizes))
    ]
    screen.table(columns, rows, _title(plan, plan.sizes))
    for spanning in plan.spanning:
        which = f"{spanning.kind} group{'s span' if spanning.groups > 1 else ' spans'} clusters"
        text = f"! {spanning.groups} {which} (one has {', '.join(spanning.example)}): on {spanning.fabric}"
        costs = (
            f"costs {spanning.seconds:.3g} s a step"
            if spanning.seconds
            else ("no slower than inside clusters")
        )
        screen.line(f"{text}, {costs}", "yellow")
    if not plan.spanning:
        screen.line(
            "no data-, tensor-, context- or expert-parallel group leaves its fabric", "green"
        )
    if (
        slices := max(
            (stage_link.slices for stage_link in plan.traffic_of().stage_links), default=1
        )
    ) > 1:
        screen.line(
            f"{slices} tensor ranks each send a slice of what a stage sends on Ethernet, unless "
            f"sequence parallelism splits it already"
        )
    ours, stock = plan.predicted["step_seconds"], plan.predicted["stock_step_seconds"]
    screen.line(
        f"predicted step: {ours:.4g} s; stock: {stock:.4g} s ({stock / ours:.2f} times as long)",
        "bold",
    )
    if plan.stage_layers:
        screen.line(
            f"layers of the stages ({plan.partition}): {' '.join(map(str, plan.stage_layers))}"
        )
    if nominal:
        advice = "give --workload or --gradient-bytes and so on for yours"
        screen.line(f"for a nominal model (10^9 parameters in each rank); {advice}")


def _title(plan: Plan, sizes: Sizes) -> str:
    names = [
        f"{name} {getattr(sizes, name)}"
        for name in ("pipeline", "tensor", "context", "data", "expert")
    ]
    shown = [
        text for text in names if not text.endswith(" 1") or text.startswith(("pipeline", "data"))
    ]
    return f"{plan.world_size} ranks on {len(plan.nodes)} nodes: {' x '.join(shown)}"


def _stage_rows(site: Site, plan: Plan, sizes: Sizes) -> list[tuple[str, str, str]]:
    """Of each stage: its nodes, fabrics of its data-parallel groups, those of its stage links to the
    next one."""
    stages: list[list[dict[str, None]]] = [[{} for _ in range(sizes.pipeline)] for _ in range(3)]
    nodes, data, stage_links = stages
    for rank in range(plan.world_size):
        nodes[sizes.stage(rank)][plan.node_of(rank)] = None
    reducing, fabrics = groups(sizes, "data"), plan.transports["data"]
    for group, fabric in zip(reducing, fabrics if len(fabrics) > 1 else fabrics * len(reducing)):
        data[sizes.stage(group[0])][fabric] = None
    for group in groups(sizes, "pipeline"):
        for stage, pair in enumerate(zip(group, group[1:])):
            shared = plan.fabric_of(pair)
            stage_links[stage][LOCAL if shared is None else shared.name] = None
    return [
        (" ".join(runs(names)), ", ".join(data[stage]), ", ".join(stage_links[stage]))
        for stage, names in enumerate(nodes)
    ]
