"""Measures scripts with DistributedDataParallel, FSDP2 or torch's pipelining, with and without holmes.

The scripts know nothing of holmes. They run on two emulated clusters of 4 nodes. Ethernet (250 Mb/s) connects
the clusters and has an eighth of the rate of the faster cluster's own network. Compute is emulated
(lab/emulate/accelerator.py), and the network is real.

Each script is one case, whose variants (e.g. with and without holmes) run in turns. Two of the scripts use
transformers' Trainer and Lightning, which are installed in `.venv`.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import stacks_prediction as prediction
from emulated import even_costs, forward_s
from harness import Row, chosen_cases, finish, parser, tell
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, all_rdma, compare, max_loss_difference
from two_clusters import one_cluster_toml, ratio_row, step_rows

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.patches.torch.features import DDP
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.sizes import PIPELINES_FIRST, Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.samples import examples

CLUSTERS = examples() / "clusters" / "two_clusters_8.toml"
#: 5.5 M parameters: 22 MB of gradients.
MODEL = "--layers 6 --hidden 272 --heads 4 --sequence 16 --micro-batch 1".split()
JOB = Path(__file__).with_name("stacks_job.py")
FSDP2 = examples() / "fsdp2" / "train.py"
#: FLOP/s of the emulated GPU at which stock's flat reduction takes half of its step.
DDP_FLOPS, FSDP_FLOPS = 4.3e8, 2e9
#: Variant for the fit of one number of each prediction: the script without holmes, with all nodes
#: in a single cluster on the fast network.
ONE_CLUSTER = "one cluster"
PIPELINE = examples() / "torch_pipelining" / "train.py"
#: 2.1 MB of gradients and 10 ms of forward pass a layer: a stage's sum takes 0.27 s.
PIPELINE_HIDDEN, PIPELINE_FLOPS = 208, 1.7e9
PIPELINE_MODEL = ["--hidden", str(PIPELINE_HIDDEN)]
PIPELINE_MODEL += "--layers 16 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 8".split()
PRELOAD = ("torch", "transformers.trainer", "lightning")


class Clusters(NamedTuple):
    """The two emulated clusters on which all cases run."""

    spec: SiteSpec
    launch_order: tuple[str, ...]  # nodes of both clusters in turn, in the order of their ranks
    holmes_flags: tuple[str, ...]  # flags of a script that switch holmes on


def emulated_clusters() -> Clusters:
    """Return the clusters, the launcher's order of their nodes, and the flags of holmes."""
    spec = load_spec(CLUSTERS)
    holmes_flags = ("--holmes", "--holmes-cluster", str(CLUSTERS))
    return Clusters(spec, interleave(spec), holmes_flags)


def run(
    case: str, variants: list[Variant], script: list[str], classes: str, flops: float, args
) -> dict[str, Series]:
    """Run a training script on emulated clusters in several variants, and return the measurements.

    Args:
        case: Name of the case, for lines about the progress.
        variants: Such as the script without and with holmes.
        script: The training script and its arguments.
        classes: Name of one class, the transformer layer. Its instances sleep as long as a GPU
            would compute.
        flops: FLOP/s of an emulated GPU.
        args: Options of this program.

    Returns:
        Name of a variant -> its step times and losses.
    """
    total = args.repetitions * len(variants)
    run_numbers = itertools.count(1)
    return compare(
        variants,
        script,
        repetitions=args.repetitions,
        steps=args.steps,
        skip=3,
        preload=args.preload,
        accelerator={"flops": flops, "classes": [classes]},
        on_run=lambda name, _: tell(f"{case}: run {next(run_numbers)} of {total}: {name}"),
    )


def loss_row(case: str, series: dict[str, Series], name: str, stock: str = "stock") -> Row:
    """Return a row with the largest difference between the losses of two variants.

    Args:
        case: Name of the case in the results.
        series: Variant -> its measurements.
        name, stock: Names of the two variants.
    """
    return Row.median(
        case,
        f"{name}: largest loss difference",
        [max_loss_difference(series[stock], series[name])],
        unit="nats",
        emulated=False,
        target="<= 1e-6",
    )


def networks() -> list[Row]:
    """Measure the CPU time that communication needs on this machine, and return rows with it.

    It is the CPU time of a sent byte on each network, of a message, and of a parameter in an
    optimizer step. Simulations of steps on emulated clusters need them. Results that are already in
    results/stacks_measured.json are not measured again.
    """
    known = prediction.Networks.load()
    known.measure(CLUSTERS)
    return known.rows()


def data_parallel(stack: str, args) -> list[Row]:
    """Compare a training library without and with holmes, and with a plain loop.

    The plain loop uses GradientReducer of holmes. The job also runs without holmes on a single fast
    cluster. There communication takes little time, so the step shows the CPU time of the library's
    own code. Predictions of the other steps need this time.

    Args:
        stack: The library: "trainer" (of transformers) or "lightning".
        args: Options of this program.
    """
    spec, order, flags = emulated_clusters()
    with_stack, with_reducer = (["--stack", name] for name in (stack, "reducer"))
    variants = [
        # all_rdma() puts all nodes into one fast cluster. Its name is that of the predictions.
        replace(all_rdma(spec), name=ONE_CLUSTER, flags=tuple(with_stack)),
        Variant("stock", spec, order, flags=tuple(with_stack)),
        Variant("holmes", spec, order, flags=(*with_stack, *flags)),
        Variant("GradientReducer", spec, order, flags=(*with_reducer, *flags)),
    ]
    series = run(
        stack, variants, [str(JOB), *MODEL], classes="GPT2Block", flops=DDP_FLOPS, args=args
    )
    return [
        # ratio_row() divides the first step time by the second: "holmes : stock" are speeds.
        ratio_row(stack, "holmes : stock", series["stock"], series["holmes"], target=">= 1.35"),
        ratio_row(
            stack,
            "holmes : GradientReducer",
            series["GradientReducer"],
            series["holmes"],
            target=">= 0.95",
        ),
        loss_row(stack, series, "holmes"),
        *step_rows(stack, series),
        *predicted_step_rows(
            stack,
            series,
            step=prediction.data_parallel,
            flops=DDP_FLOPS,
            options_of={"stock": {}, "holmes": {}},  # variants to predict, without further options
        ),
    ]


def predicted_step_rows(
    case: str, series: dict[str, Series], step: Callable[..., float], flops: float, options_of
) -> list[Row]:
    """Return rows with the simulated steps of some variants, and their errors.

    One number is fitted: the CPU time of the library's code (DDP: for each parameter; FSDP: for
    each pass of a transformer block). It is chosen so that the simulated step of the variant
    ONE_CLUSTER, where the network is fast, equals the measured one. The steps of the other variants
    are then predicted with it.

    Args:
        case: Name of the case in the results.
        series: Variant -> measurements.
        step: prediction.data_parallel or prediction.sharded. It simulates a step. Its fourth
            argument is the fitted number.
        flops: FLOP/s of an emulated GPU.
        options_of: Variant to predict -> further keyword arguments of `step`.
    """
    stack_site = prediction.StackSite.of(CLUSTERS)
    software_s = prediction.fit_number(
        lambda seconds: step(stack_site, ONE_CLUSTER, flops, seconds), series[ONE_CLUSTER].median
    )
    seconds = {}
    for name, options in options_of.items():
        way = "stock" if name == "stock" else "holmes"
        seconds[name] = step(stack_site, way, flops, software_s, **options)
    return prediction.rows(case, seconds, {name: series[name].median for name in seconds})


def one_cluster(args) -> list[Row]:
    """Measure the seconds that holmes adds to a step of DistributedDataParallel in a single fast cluster.

    The eight nodes are in one cluster on the fast network, where holmes cannot improve a step. Both
    variants, without and with holmes, must use that network. By itself gloo would choose Ethernet,
    so the variant without holmes sets gloo's environment variable for the NIC.
    """
    case = "one cluster"
    fast_cluster = all_rdma(load_spec(CLUSTERS))
    order = fast_cluster.order
    ddp = ("--stack", "ddp")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "one.toml")
        file.write_text(one_cluster_toml(fast_cluster.spec))
        spec = load_spec(file)
        stock = Variant("stock", spec, order, flags=ddp, env=fast_cluster.env)
        holmes_flags = (*ddp, "--holmes", "--holmes-cluster", str(file))
        variants = [
            stock,
            Variant("holmes", spec, order, flags=holmes_flags),
            replace(stock, name="stock again"),
        ]
        series = run(
            case, variants, [str(JOB), *MODEL], classes="GPT2Block", flops=DDP_FLOPS, args=args
        )
    stock_s = series["stock"].median
    cost = series["holmes"].median / stock_s - 1
    noise = series["stock again"].median / stock_s - 1
    return [
        Row.median(
            case,
            "what holmes adds to a step",
            [cost],
            unit="of a step",
            emulated=True,
            target="<= 0.01",
        ),
        Row.median(case, "A/A difference (noise)", [abs(noise)], unit="of a step", emulated=True),
        loss_row(case, series, "holmes"),
        *step_rows(case, series),
    ]


def sharded(args) -> list[Row]:
    """Measure FSDP2, without holmes and with --holmes-fsdp hybrid.

    The script shards weights over all ranks. With "hybrid", holmes shards them inside each cluster
    and replicates the shards between clusters, so that weights are not gathered over Ethernet.
    """
    case = "fsdp2"
    spec, order, flags = emulated_clusters()
    variants = [
        Variant("stock", spec, order),
        Variant("hybrid", spec, order, flags=(*flags, "--holmes-fsdp", "hybrid")),
        Variant("holmes", spec, order, flags=flags),
        replace(all_rdma(spec), name=ONE_CLUSTER),
    ]
    series = run(case, variants, [str(FSDP2), *MODEL], classes="Block", flops=FSDP_FLOPS, args=args)
    return [
        # ratio_row() divides the first step time by the second: "hybrid : stock" are speeds.
        ratio_row(case, "hybrid : stock", series["stock"], series["hybrid"], target=">= 2"),
        ratio_row(
            case, "holmes without hybrid : stock", series["stock"], series["holmes"], target=""
        ),
        loss_row(case, series, "hybrid"),
        loss_row(case, series, "holmes"),
        # Seconds of the collectives that holmes predicts. It prints them when a job starts.
        *predicted_collective_rows(case, series),
        *predicted_step_rows(
            case,
            series,
            step=prediction.sharded,
            flops=FSDP_FLOPS,
            # Variants to predict -> further keyword arguments of prediction.sharded().
            options_of={"stock": {}, "hybrid": {"hybrid": True}},
        ),
        *step_rows(case, series),
    ]


def predicted_collective_rows(case: str, series: dict[str, Series]) -> list[Row]:
    """Return rows with the seconds of FSDP2's collectives in a step, as holmes predicts them.

    The seconds are read from a message that holmes prints when a job starts. The job "hybrid"
    predicts hybrid sharding. The job "holmes" shards over all ranks, as the job without holmes
    ("stock") does. "stock" prints nothing, so the prediction of "holmes" is shown for it.

    Args:
        case: Name of the case in the results.
        series: Name of a variant -> its measurements and printed lines.
    """
    # Both messages contain "..., SECONDS s of ...", and the words below.
    seconds_of = {
        "stock": _seconds(series["holmes"], "of weights across"),
        "hybrid": _seconds(series["hybrid"], "FSDP hybrid"),
    }
    return [
        Row.median(case, f"predicted collectives {name}", [seconds], unit="s", emulated=False)
        for name, seconds in seconds_of.items()
    ]


def _seconds(series: Series, words: str) -> float:
    """Return the number before " s of " in the line of a job's output that contains `words`."""
    line = next(line for line in series.lines if words in line)
    return float(line.partition(" s of ")[0].rpartition(", ")[2])


def hybrid_sharded(args) -> list[Row]:
    """Measure HSDP (hybrid sharding) with 2 replicas, a device mesh that the script makes itself.

    Without holmes, ranks are in the order of the launcher, and each replica spans both clusters.
    With holmes, they are in the order of the plan, and each replica is inside a cluster.
    """
    case = "hsdp"
    spec, order, flags = emulated_clusters()
    variants = [Variant("stock", spec, order), Variant("holmes", spec, order, flags=flags)]
    series = run(
        case,
        variants,
        [str(FSDP2), *MODEL, "--replicas", "2"],
        classes="Block",
        flops=FSDP_FLOPS,
        args=args,
    )
    return [
        ratio_row(
            case,
            "holmes : the launcher's order",
            series["stock"],
            series["holmes"],
            target=">= 1.5",
        ),
        loss_row(case, series, "holmes"),
        *step_rows(case, series),
    ]


def breadth_first(args) -> list[Row]:
    """Measure how many seconds gradient reductions add to a step of torch.distributed.pipelining.

    Each pipeline is inside a cluster, and the gradients of each stage travel between clusters. Three
    ways to reduce them are compared, each with a run of the same schedule that reduces nothing. The
    difference is the result:

        1F1B, breadth-first (LoopedBFS)    holmes overlaps the reductions with the passes
        "torch's waits"                    1F1B without this overlap: torch waits for each reduction

    In the runs without reductions ("nothing reduced"), each rank is in a DistributedDataParallel
    group with no other rank. So all other costs of DistributedDataParallel stay the same.
    """
    case = "breadth first"
    spec, order, flags = emulated_clusters()
    flags = (
        *flags,
        "--mesh",
        "dp,pp",
        "--pipeline",
        "4",
    )  # without sizes the plan keeps clusters as blocks
    orders = {"1F1B": flags, "breadth first": (*flags, "--schedule", "LoopedBFS", "--chunks", "4")}
    variants = [Variant(name, spec, order, flags=options) for name, options in orders.items()]
    variants.append(
        Variant(
            "1F1B, torch's waits", spec, order, flags=flags, env={"HOLMES_DISABLE": "pipelining"}
        )
    )
    variants += [
        Variant(
            f"{name}, nothing reduced", spec, order, flags=(*options, "--data-parallel", "alone")
        )
        for name, options in orders.items()
    ]
    series = run(
        case,
        variants,
        [str(PIPELINE), *PIPELINE_MODEL],
        classes="Block",
        flops=PIPELINE_FLOPS,
        args=args,
    )
    exposed = {}
    for name in (variant.name for variant in variants[:3]):  # those that reduce gradients
        alone = series[f"{name.split(',')[0]}, nothing reduced"]
        exposed[name] = [
            with_sums - least for with_sums, least in zip(series[name].medians, alone.medians)
        ]
    ratios = {
        other: [ours / theirs for ours, theirs in zip(exposed["breadth first"], exposed[other])]
        for other in ("1F1B", "1F1B, torch's waits")
    }
    return [
        *(
            Row.median(
                case,
                f"exposed reduction, breadth first : {name}",
                values,
                unit="x",
                emulated=True,
                target="<= 0.5",
            )
            for name, values in ratios.items()
        ),
        *(
            Row.median(case, f"exposed reduction, {name}", seconds, unit="s", emulated=True)
            for name, seconds in exposed.items()
        ),
        *(
            Row.median(
                case,
                f"exposed reduction, {name}, simulated",
                [seconds],
                unit="s",
                emulated=True,
            )
            for name, seconds in simulated_exposure(spec).items()
        ),
        *(loss_row(case, series, name, "1F1B, torch's waits") for name in orders),
        *step_rows(case, series),
    ]


def simulated_exposure(spec: SiteSpec) -> dict[str, float]:
    """Return the simulated seconds that gradient reductions add to a step, by pipeline schedule.

    A step is simulated twice: with the given networks, and with an Ethernet on which messages take
    no time. Only gradient reductions use Ethernet, because each pipeline is inside a cluster. The
    difference is the time of the reductions.

    Args:
        spec: The clusters.

    Returns:
        Schedule ("1F1B" and "breadth first") -> seconds.
    """
    stages = 4
    site = site_from_spec(spec)
    sizes = Sizes(pipeline=stages, order=PIPELINES_FIRST).complete(site.world_size)
    order = [node.name for node in site.nodes]
    fabrics = []
    for fabric in site.fabrics:
        if fabric.name == ETHERNET:
            fabric = replace(fabric, rate_bps=1e15)  # practically unlimited
        fabrics.append(fabric)
    site_without_reduction_time = replace(site, fabrics=tuple(fabrics))
    layers, hidden, micro_batches = 16, PIPELINE_HIDDEN, 8  # as in PIPELINE_MODEL
    gpt = Model(
        layers=layers,
        hidden=hidden,
        heads=4,
        sequence=16,
        vocabulary=256,
        micro_batches=micro_batches,
        activation_width=4,
        tied=False,
    )
    costs = even_costs(
        forward_s(hidden, tokens=16, flops=PIPELINE_FLOPS),
        layers=layers,
        stages=stages,
        micro_batches=micro_batches,
    )
    plain_run = Execution(DDP, overlap="on", **prediction.DDP_BUCKETS)
    runs = {
        "1F1B": plain_run,
        # Four chunks of layers on each stage, as in the lab.
        "breadth first": replace(plain_run, virtual=4, breadth_first=True),
    }
    exposed = {}
    for name, run in runs.items():
        with_reductions_s, without_s = (
            simulate(used_site, order, sizes, gpt, run, costs=costs).step_s
            for used_site in (site, site_without_reduction_time)
        )
        exposed[name] = with_reductions_s - without_s
    return exposed


def main() -> int:
    """Measure scripts with and without holmes on two emulated clusters, and print the table.

    The cases:

        networks              CPU time of communication on this machine, for the predictions
        trainer, lightning    data-parallel training by transformers' Trainer, or by Lightning
        one cluster           the same in a single cluster, where holmes can only cost time
        fsdp2, hsdp           FSDP2, with shards over all ranks or inside replicas
        breadth first         reductions of torch.distributed.pipelining with several schedules
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=11)
    args = arguments.parse_args()
    # Modules that are imported once in a process from which all ranks are forked. run() reads it.
    args.preload = PRELOAD
    makers = {
        "networks": networks,
        "trainer": lambda: data_parallel("trainer", args),
        "lightning": lambda: data_parallel("lightning", args),
        "one cluster": lambda: one_cluster(args),
        "fsdp2": lambda: sharded(args),
        "hsdp": lambda: hybrid_sharded(args),
        "breadth first": lambda: breadth_first(args),
    }
    rows = [row for name in chosen_cases(args.cases, makers) for row in makers[name]()]
    return finish(
        rows,
        args.json,
        "Scripts that know nothing of holmes (step times on the emulated accelerator)",
    )


if __name__ == "__main__":
    sys.exit(main())
