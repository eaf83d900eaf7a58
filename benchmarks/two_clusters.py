"""Measures DeepSpeed on emulated clusters without holmes, with holmes, and on a single InfiniBand cluster.

    python benchmarks/two_clusters.py --json FILE [--cases 2+2,4+4,...] [--repetitions 5]

The variants of a case run in turn (holmes_lab.compare). Results are step times and the bytes that each
NIC sent. The compute is emulated: layers sleep as long as a GPU with the case's FLOP/s would compute.
DeepSpeed, gloo, the sockets and their limited rates are real.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Row, chosen_cases, finish, kept_rows, parser, tell, write
from holmes_lab import Lab, interleave
from holmes_lab.compare import Series, Variant, all_rdma, compare, max_loss_difference

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.samples import examples

MODEL = "--hidden 288 --heads 4 --sequence 16 --micro-batch 1".split()
HELLO = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"


@dataclass(frozen=True)
class Case:
    """Emulated clusters and the job that runs on them.

    With 8 ranks and 8 micro-batches, the small amount of real compute would keep the two cores of this
    machine busy. Cases with 8 ranks therefore have 4 micro-batches.
    """

    name: str
    file: str  # in examples/clusters
    stages: int
    layers: int
    micro_batches: int
    flops: float  # FLOP/s of an emulated GPU
    stock_target: str = ""  # of holmes : stock; "" if there is none
    all_rdma_target: str = ""  # of holmes : all-RDMA; "" if there is none
    #: Factor by which GPUs and networks are slower. Steps then last longer with the same CPU work.
    slower: float = 1.0


CASES = (
    Case(
        "2+2",
        "two_clusters_4.toml",
        stages=2,
        layers=6,
        micro_batches=8,
        flops=6.7e9,
        stock_target=">= 1.6",
        all_rdma_target=">= 0.97",
    ),
    Case(
        "4+4",
        "two_clusters_8.toml",
        stages=2,
        layers=6,
        micro_batches=4,
        flops=2.3e9,
        stock_target=">= 1.6",
        all_rdma_target=">= 0.97",
    ),
    Case("2+4 pipeline 3", "two_clusters_6.toml", stages=3, layers=6, micro_batches=6, flops=3.3e9),
    Case(
        "three clusters", "three_clusters_8.toml", stages=4, layers=8, micro_batches=4, flops=2.3e9
    ),
    Case(
        "4+4 slow RoCE",
        "two_clusters_8_slow_roce.toml",
        stages=2,
        layers=6,
        micro_batches=4,
        flops=2.3e9,
    ),
    Case(
        "4+4 three times slower",
        "two_clusters_8.toml",
        stages=2,
        layers=6,
        micro_batches=4,
        flops=2.3e9,
        stock_target=">= 1.6",
        all_rdma_target=">= 0.97",
        slower=3.0,
    ),
)
#: Names of the other cases.
CONTROL = "control: one cluster"
START = "start-up, 8 ranks"


def script(case: Case) -> list[str]:
    """Return the training script of a case with its arguments."""
    numbers = {
        "--stages": case.stages,
        "--layers": case.layers,
        "--micro-batches": case.micro_batches,
    }
    train = examples() / "deepspeed_pipeline" / "train.py"
    return [str(train), *(str(word) for pair in numbers.items() for word in pair), *MODEL]


def ratio_row(case: str, name: str, top: Series, bottom: Series, target: str) -> Row:
    """Return a row with the ratio of two median step times, and its spread over the repetitions.

    Args:
        case: Name of the case in the results.
        name: Name of the metric.
        top: Measurements of a variant. Its step time is divided by that of `bottom`.
        bottom: Measurements of another variant.
        target: A bound such as ">= 1.6"; "" if there is none.
    """
    pairs = [a / b for a, b in zip(top.medians, bottom.medians)]
    return Row.of(
        case,
        name,
        top.median / bottom.median,
        unit="x",
        spread=(min(pairs), max(pairs)),
        emulated=bottom.emulated,
        target=target,
        busy=max(top.busy, bottom.busy),
    )


def loss_row(case: str, difference: float, target: str = "<= 1e-6") -> Row:
    """Return the row of the largest difference between the losses of two variants, in nats.

    Args:
        case: Name of the case in the results.
        difference: Largest difference of a step's loss.
        target: A bound of the difference.
    """
    return Row.median(
        case, "largest loss difference", [difference], unit="nats", emulated=False, target=target
    )


def step_rows(case: str, by_variant: dict[str, Series]) -> list[Row]:
    """Return rows with the step times and the sent bytes of each variant of a job.

    There are bytes of each NIC of each node in a step. There are also MB of Ethernet, and of the
    fast NICs together, as the mean of all nodes.

    Args:
        case: Name of the case in the results.
        by_variant: Name of a variant, such as "stock" or "holmes" -> its measurements.
    """
    rows = [
        Row.of(
            case,
            f"step {name}",
            series.median,
            unit="s",
            spread=series.spread,
            emulated=series.emulated,
            busy=series.busy,
        )
        for name, series in by_variant.items()
    ]
    for name, series in by_variant.items():
        for node, nics in series.sent.items():
            rows += [
                Row.median(
                    case, f"bytes {name} {node} {nic}", [sent], unit="bytes/step", emulated=False
                )
                for nic, sent in nics.items()
            ]
        slow, fast = series.megabytes  # MB that a node sends in a step, as the mean of the nodes
        rows.append(
            Row.median(case, f"Ethernet {name}", [slow], unit="MB/step/node", emulated=False)
        )
        rows.append(
            Row.median(case, f"fast NIC {name}", [fast], unit="MB/step/node", emulated=False)
        )
    return rows


def two_clusters(case: Case, repetitions: int, steps: int) -> list[Row]:
    """Measure a case in its variants, and return the rows of results.

    The variants are "stock" (without holmes), "holmes" (the same with holmes), and "all-RDMA" (without
    holmes on a single InfiniBand cluster: nothing can be faster). A case with targets has two more:
    holmes without overlap, and stock again, to show the noise.

    Args:
        case: The emulated clusters, the job and its targets.
        repetitions: Runs of each variant.
        steps: Training steps of a run.
    """
    file = examples() / "clusters" / case.file
    spec = load_spec(file)
    order = interleave(spec)
    flags = (
        "--holmes",
        "--holmes-cluster",
        str(file),
        "--holmes-sizes",
        f"pipeline={case.stages}",
    )
    variants = [
        Variant("stock", spec, order),
        Variant("holmes", spec, order, flags=flags),
        all_rdma(spec),
    ]
    if case.stock_target:
        variants.append(
            Variant("holmes, overlap off", spec, order, flags=(*flags, "--holmes-overlap", "off"))
        )
        variants.append(Variant("stock again", spec, order))
    series = run(case.name, variants, case, repetitions, steps)
    stock, one_fast_cluster = series["stock"], series["all-RDMA"]
    rows = []
    for name in ("holmes", "holmes, overlap off"):
        if name not in series:
            continue
        difference = max_loss_difference(stock, series[name])
        rows += [
            ratio_row(
                case.name,
                f"{name} : stock",
                stock,
                series[name],
                target=case.stock_target if name == "holmes" else "",
            ),
            ratio_row(
                case.name,
                f"{name} : all-RDMA",
                one_fast_cluster,
                series[name],
                target=case.all_rdma_target if name == "holmes" else "",
            ),
            Row.median(
                case.name,
                f"{name}: largest loss difference",
                [difference],
                unit="nats",
                emulated=False,
                target="<= 1e-6",
            ),
        ]
    rows.append(ratio_row(case.name, "stock : all-RDMA", one_fast_cluster, stock, target=""))
    if case.stock_target:
        noise = abs(series["stock again"].median / stock.median - 1)
        rows.append(
            Row.median(
                case.name,
                "A/A difference (noise)",
                [noise],
                unit="of a step",
                emulated=stock.emulated,
            )
        )
    return rows + step_rows(case.name, series)


def control(repetitions: int, steps: int) -> list[Row]:
    """Measure the seconds that holmes adds to a step on a single fast cluster, where it can improve nothing.

    The eight nodes are in one cluster on the fast network. Both variants, without and with holmes,
    must use that network. By itself gloo would choose Ethernet, so the variant without holmes sets
    gloo's environment variable for the NIC.

    Args:
        repetitions: Runs of each variant.
        steps: Training steps of a run.
    """
    case = Case(CONTROL, "two_clusters_8.toml", stages=2, layers=6, micro_batches=4, flops=2.3e9)
    fast_cluster = all_rdma(load_spec(examples() / "clusters" / case.file))
    order, use_fast_nic = fast_cluster.order, fast_cluster.env
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "one.toml")
        file.write_text(one_cluster_toml(fast_cluster.spec))
        spec = load_spec(file)
        flags = ("--holmes", "--holmes-cluster", str(file), "--holmes-sizes", "pipeline=2")
        stock, again = (
            Variant(name, spec, order, env=use_fast_nic) for name in ("stock", "stock again")
        )
        variants = [stock, Variant("holmes", spec, order, flags=flags), again]
        series = run(case.name, variants, case, repetitions, steps)
    cost, noise = (
        series[name].median / series["stock"].median - 1 for name in ("holmes", "stock again")
    )
    return [
        Row.median(
            case.name,
            "what holmes adds to a step",
            [cost],
            unit="of a step",
            emulated=True,
            target="<= 0.01",
            busy=max(measured.busy for measured in series.values()),
        ),
        Row.median(
            case.name, "A/A difference (noise)", [abs(noise)], unit="of a step", emulated=True
        ),
        *step_rows(case.name, series),
    ]


def one_cluster_toml(spec: SiteSpec) -> str:
    """Return the text of a cluster.toml for a site with a single cluster."""
    (cluster,) = spec.clusters
    nodes = ", ".join(f'"{node}"' for node in cluster.nodes)
    rates = [f'rate = "{bps / 1e6:g}Mb/s"' for bps in (spec.ethernet_rate_bps, cluster.rate_bps)]
    return (
        f'version = 2\n[ethernet]\n{rates[0]}\n[[cluster]]\nname = "all"\nkind = '
        f'"{cluster.kind}"\n{rates[1]}\n'
        f"nodes = [{nodes}]\n"
    )


def run(
    name: str, variants: list[Variant], case: Case, repetitions: int, steps: int
) -> dict[str, Series]:
    """Run the variants of a case on emulated clusters, and return their measurements by name.

    In a case with `slower` above 1, GPUs and networks are slower by this factor. The ratio of
    communication to compute stays the same, and the CPU work of the nodes, which share this
    machine's cores, becomes a smaller part of a step.

    Args:
        name: Name of the case, for lines about the progress.
        variants: The job with and without holmes, on one or two clusters.
        case: The job.
        repetitions: Runs of each variant.
        steps: Training steps of a run. The first three warm up and are not measured.
    """
    accelerator = {"flops": case.flops / case.slower, "classes": ["Block"]}
    total = repetitions * len(variants)
    started = iter(range(1, total + 1))
    return compare(
        variants,
        script(case),
        repetitions=repetitions,
        steps=steps,
        skip=3,
        accelerator=accelerator,
        scale=1 / case.slower,  # of all network rates
        on_run=lambda variant, _: tell(f"{name}: run {next(started)} of {total}: {variant}"),
    )


def startup(repetitions: int) -> list[Row]:
    """Measure the seconds from the launch of 8 ranks until their process group is destroyed again.

    The difference with and without holmes is the time that holmes adds to the start.
    """
    file = examples() / "clusters" / "two_clusters_8.toml"
    spec = load_spec(file)
    seconds: dict[str, list[float]] = {"stock": [], "holmes": []}
    with Lab(spec, realtime=True) as lab, tempfile.TemporaryDirectory() as directory:
        hello = Path(directory, "hello.py")
        hello.write_text(HELLO)
        for repetition in range(repetitions + 1):
            for name, flags in (
                ("stock", []),
                ("holmes", ["--holmes", "--holmes-cluster", str(file)]),
            ):
                begin = time.monotonic()
                result = lab.run(
                    [sys.executable, str(hello), *flags], order=interleave(spec), preload=("torch",)
                )
                assert result.returncode == 0, result.outputs
                if repetition:  # the first starts the preloading process
                    seconds[name].append(time.monotonic() - begin)
    added = [b - a for a, b in zip(seconds["stock"], seconds["holmes"])]
    return [
        Row.median(
            START, "seconds that holmes adds", added, unit="s", emulated=False, target="<= 1.0"
        )
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=12)
    args = arguments.parse_args()
    measure_of = {
        case.name: lambda case=case: two_clusters(case, args.repetitions, args.steps)
        for case in CASES
    }
    # One cluster, where holmes must not cost anything.
    measure_of[CONTROL] = lambda: control(args.repetitions, args.steps)
    # Seconds that holmes adds to the start of a job.
    measure_of[START] = lambda: startup(args.repetitions)
    names = chosen_cases(args.cases, measure_of)
    rows = kept_rows(args.json, names)
    for name in names:
        rows += measure_of[name]()
        write(rows, args.json)
    return finish(
        rows,
        args.json,
        "Stock, holmes and the all-RDMA bound (step times on the emulated accelerator)",
    )


if __name__ == "__main__":
    sys.exit(main())
