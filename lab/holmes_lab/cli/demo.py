"""Command `holmes demo`: trains a GPT on two emulated clusters, without holmes ("stock") and with it.

A third variant, "all-RDMA", trains without holmes on a single fast cluster. No other variant can be faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.html import pictures
from holmes_ext.planner.html.page import heading, page, paragraphs, table
from holmes_ext.samples import examples
from holmes_lab.cli import gpu_demo, joined_demo
from holmes_lab.compare import (
    LOSS_TOLERANCE,
    Series,
    Variant,
    all_rdma,
    compare,
    max_loss_difference,
)
from holmes_lab.process.ranks import interleave

WARM_UP_STEPS = 3  # first steps of a run, not measured
LEAST_STEPS = 2 * WARM_UP_STEPS  # of a run: at least as many are measured
#: Number of nodes of the cluster file, each with one rank, and of pipeline stages.
NODE_COUNT, STAGE_COUNT = 4, 2
#: Arguments of examples/deepspeed_pipeline.
SCRIPT = (
    "--stages 2 --layers 6 --hidden 288 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 8"
).split()
#: Parameters of the model that these arguments make, for the texts.
MODEL_PARAMETERS = "6.15 M parameters"
#: Tokens of a step: micro-batch 1 x 8 micro-batches x 2 data-parallel ranks x 16 words.
STEP_TOKENS = 1 * 8 * 2 * 16
#: The emulated accelerator. With these FLOP/s, stock has about 0.6 of the all-RDMA throughput.
ACCELERATOR = {"flops": 6.7e9, "classes": ["Block"]}
CLUSTER = "two_clusters_4.toml"
#: Columns of the table. The last two are the MB that a node sends in a step on Ethernet and on its fast NIC.
COLUMNS = (
    Column("run"),
    Column("step, s (spread)", right=True),
    Column("token/s", right=True, drop=2),
    Column("x stock", right=True),
    Column("x all-RDMA", right=True),
    Column("last loss", right=True, drop=1),
    Column("Eth MB", right=True, drop=3),
    Column("fast MB", right=True, drop=3),
)


def add_parser(subparsers: Any) -> None:
    """Add the command `demo` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "demo",
        help="train a GPT on two emulated clusters, stock and with holmes, and show the difference",
        description="Trains examples/deepspeed_pipeline on 4 emulated nodes (2 with InfiniBand, 2 with RoCE, "
        "Ethernet between) with DeepSpeed's pipeline engine: stock, with --holmes, and on one all-InfiniBand "
        "cluster (all-RDMA). Needs root or user namespaces, and iproute2; takes 2 to 3 minutes on 2 cores. "
        "Exit status 1 when a loss differs from stock's by more than 1e-6.",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=4,
        metavar="N",
        help="runs of each variant, alternating (default: 4)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        metavar="N",
        help="steps of each run, the first 3 not measured (default: 12)",
    )
    parser.add_argument(
        "--output",
        default="report.html",
        metavar="FILE",
        help="the page with table and pictures (default: report.html)",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="one step of each run as a picture alone (.svg), and for phones beside it (.narrow.svg)",
    )
    parser.add_argument(
        "--joined",
        action="store_true",
        # The link between the jobs has 40 ms of latency and 20 Mb/s. One job is killed and restarted.
        help="two jobs train one model over 40 ms and 20 Mb/s, one of them killed and back",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        # It prints the networks that NCCL chose, the bytes that each NIC sent, and the losses.
        help="on emulated GPUs, over NCCL: its networks, each NIC's bytes and the losses, "
        "stock and holmes (needs the CUDA build of torch, g++ and NCCL's source: `make "
        ".venv-gpu`)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print the table, and write the report.

    Returns:
        The exit status: 1 if a loss with holmes differs from that of stock by more than 1e-6, else 0.

    Raises:
        HolmesError: Options contradict each other, a package is missing, or a run failed.
    """
    if args.gpu and args.joined:
        raise HolmesError("holmes demo: --gpu and --joined are two demos; leave one out")
    needed = ("torch", "matplotlib", *(() if args.joined else ("deepspeed",)))
    if missing := [name for name in needed if find_spec(name) is None]:
        raise HolmesError(
            f"holmes demo needs {', '.join(missing)}: pip install {' '.join(missing)}"
        )
    if args.joined:
        return joined_demo.run(args.json, max(args.steps, 160), args.output)
    if args.repetitions < 1 or args.steps < LEAST_STEPS:
        raise HolmesError(
            f"holmes demo: --repetitions must be 1 or more and --steps {LEAST_STEPS} or more"
        )
    if args.gpu:
        return gpu_demo.run(args.json, SCRIPT, CLUSTER, args.steps)
    screen = Screen(stderr=args.json)
    with tempfile.TemporaryDirectory() as directory:
        variants, series = _measure(args, Path(directory), screen)
        result = _result(series)
        traces = {
            variant.name: pictures.load_traces(Path(directory) / variant.name)
            for variant in variants
        }
        save(args.output, _report(variants, series, result, traces), "the report")
        if args.timeline:
            pictures.save_in_two_widths(
                Path(args.timeline), lambda width: pictures.timeline_figure(traces, width=width)
            )
    screen.table(
        COLUMNS,
        _rows(series),
        title=f"holmes: {result['ratio_to_stock']:.2f} x stock, {result['ratio_to_bound']:.2f} x all-RDMA;"
        f" losses differ by {result['max_loss_difference']:.1g}\n",
    )
    screen.line(
        f"\nStep times are emulated: layers sleep as long as the emulated accelerator"
        f" ({ACCELERATOR['flops']:.1e} FLOP/s) would\ncompute; the network, DeepSpeed and the "
        f"numbers are real.\nPictures: {args.output}"
    )
    if args.json:
        print(json.dumps(result))
    return 0 if result["max_loss_difference"] <= LOSS_TOLERANCE else 1


def _measure(
    args: argparse.Namespace, directory: Path, screen: Screen
) -> tuple[list[Variant], dict[str, Series]]:
    """Train the GPT as stock, holmes and all-RDMA, show the progress, and return the measurements.

    stock and holmes run on the two clusters with the nodes in interleaved order (a0, b0, a1, b1),
    as a scheduler that does not consider clusters may list them. Only holmes can then place the
    ranks by cluster. all-RDMA runs on a single fast cluster.

    Args:
        args: Options of the command.
        directory: For the traces of each variant's last run.
        screen: Prints the progress.

    Returns:
        The three variants, and name of each variant -> its measurements.
    """
    file = examples() / "clusters" / CLUSTER
    spec = load_spec(file)
    order = interleave(spec)
    holmes = Variant("holmes", spec, order, ("--holmes", "--holmes-cluster", str(file)))
    variants = [Variant("stock", spec, order), holmes, all_rdma(spec)]
    total = len(variants) * args.repetitions
    screen.line(
        f"A GPT ({MODEL_PARAMETERS}, English text) on 4 nodes: 2 with InfiniBand, 2 with RoCE, "
        "Ethernet between; pipeline 2 x data 2."
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen.console) as progress:
        task = progress.add_task("starting the lab", total=total)
        finished_counts = itertools.count()  # 0 before the first run, 1 before the second, ...

        def on_run(name: str, repetition: int) -> None:
            """Show the number and the name of a run that begins."""
            done = next(finished_counts)
            progress.update(task, completed=done, description=f"run {done + 1} of {total}: {name}")

        series = compare(
            variants,
            [str(examples() / "deepspeed_pipeline" / "train.py"), *SCRIPT],
            repetitions=args.repetitions,
            steps=args.steps,
            skip=WARM_UP_STEPS,
            accelerator=ACCELERATOR,
            traces=directory,
            on_run=on_run,
        )
        progress.update(task, completed=total, description="done")
    return variants, series


def _result(series: dict[str, Series]) -> dict[str, Any]:
    """Return the comparison of the three variants as the JSON document that --json prints.

    "stock" trains without holmes on two clusters, and "holmes" with it on the same clusters.
    "all-RDMA" trains without holmes on one cluster with RDMA between all nodes: the yardstick.

    Args:
        series: Name of each variant -> its measurements.

    Returns:
        Three ratios of throughput in tokens per second:
            "ratio_to_stock"    holmes / stock
            "ratio_to_bound"    holmes / all-RDMA
            "stock_to_bound"    stock / all-RDMA
        "max_loss_difference": between stock and holmes. For each variant: "step_seconds" (median
        and spread), "tokens_per_second", "final_loss" and "bytes_sent_each_step". "emulated" and
        "realtime": whether all runs had emulated compute, and ran under SCHED_RR.
    """
    stock, holmes, bound = series["stock"], series["holmes"], series["all-RDMA"]
    # Series.median is the median step time in seconds. The throughput ratio of two variants is the
    # inverse of the ratio of their step times.
    return {
        "ratio_to_stock": stock.median / holmes.median,
        "ratio_to_bound": bound.median / holmes.median,
        "stock_to_bound": bound.median / stock.median,
        "max_loss_difference": max_loss_difference(stock, holmes),
        "step_seconds": {
            name: {"median": runs.median, "spread": runs.spread} for name, runs in series.items()
        },
        "tokens_per_second": {name: STEP_TOKENS / runs.median for name, runs in series.items()},
        "final_loss": {name: runs.losses[-1] for name, runs in series.items()},
        "bytes_sent_each_step": {name: runs.sent for name, runs in series.items()},
        "emulated": all(runs.emulated for runs in series.values()),
        "realtime": all(runs.realtime for runs in series.values()),
    }


def _rows(series: dict[str, Series]) -> list[list[str]]:
    """Return a row of the table for each variant.

    The columns are those of COLUMNS: name, step time and its spread, tokens per second, throughput
    relative to stock and to all-RDMA, last loss, and the MB that a node sends in a step
    on Ethernet and on its fast NICs.

    Args:
        series: Measurements of "stock", "holmes" and "all-RDMA".
    """
    stock_s = series["stock"].median
    bound_s = series["all-RDMA"].median
    rows = []
    for name, runs in series.items():
        step_s = runs.median
        fastest_s, slowest_s = runs.spread
        rows.append(
            [
                name,
                f"{step_s:.3f} ({fastest_s:.3f}-{slowest_s:.3f})",
                f"{STEP_TOKENS / step_s:.0f}",
                f"{stock_s / step_s:.2f}",
                f"{bound_s / step_s:.2f}",
                f"{runs.losses[-1]:.4f}",
                f"{runs.megabytes.ethernet:.1f}",
                f"{runs.megabytes.fast_nics:.1f}",
            ]
        )
    return rows


def _report(
    variants: list[Variant],
    series: dict[str, Series],
    result: dict[str, Any],
    traces: dict[str, list[dict[str, Any]]],
) -> str:
    """Return the report of the demo as an HTML page: a table of three variants and two pictures.

    One picture shows the node of each rank, and the NICs that connect the nodes. The other is
    the timeline of one training step, with a row for each rank.

    Args:
        variants: stock, holmes and all-RDMA: without holmes, with holmes, and the upper bound.
        series: Name of each variant -> its measurements.
        result: The comparison that _result() returns. Its ratios and its loss difference are shown.
        traces: Name of each variant -> for each rank, the times of its passes and communication
            (emulate/trace.py).
    """
    panels = []  # for each variant: (name, site, nodes in the order of their ranks, whether holmes plans)
    for variant in variants:
        is_holmes = variant.name == "holmes"
        site = site_from_spec(variant.spec)
        site = replace(site, nodes=tuple(site.node_by_name[name] for name in variant.order))
        # Only holmes changes the order in which the launcher lists the nodes.
        nodes = build_plan(site).nodes if is_holmes else variant.order
        panels.append((variant.name, site, nodes, is_holmes))
    sizes = Sizes(pipeline=STAGE_COUNT).complete(NODE_COUNT)  # all other ranks are data-parallel
    # The table has medians over all steps; the timeline has the last traced step of each run.
    steps = {f"{name}, its last step": ranks for name, ranks in traces.items()}
    # The first message of holmes names its plan.
    message = next((line for line in series["holmes"].lines if line.startswith("holmes:")), "")
    about = (
        f"4 emulated nodes, DeepSpeed's pipeline engine, pipeline 2 x data 2, {MODEL_PARAMETERS}, real "
        "text. Times are emulated: layers sleep as long as the emulated accelerator would compute; the "
        "sockets, their limited rates and the losses are real. Largest difference of the loss to "
        f"stock's at any step: {result['max_loss_difference']:.2g}."
    )
    ratios = f"{result['ratio_to_stock']:.2f} x stock, {result['ratio_to_bound']:.2f} x the all-RDMA bound"
    return page(
        "holmes demo",
        heading(f"One GPT on two clusters: {ratios}", 1),
        paragraphs([about]),
        table([column.name for column in COLUMNS], _rows(series)),
        paragraphs([message]),
        heading("Who sits where, over which NIC"),
        pictures.chart(
            lambda width: pictures.placement_figure(panels, sizes, width), "placement of the ranks"
        ),
        heading("One step"),
        pictures.chart(
            lambda width: pictures.timeline_figure(steps, width=width),
            "timeline of one step of each run",
        ),
    )
