"""Measures training steps over NCCL on emulated GPUs, where kernels and reductions overlap on CUDA streams.

    .venv-gpu/bin/python benchmarks/gpu_steps.py --json FILE [--cases DeepSpeed,...] [--repetitions 1]

A case is a training program on 4 + 4 nodes with an emulated GPU each, with 2 pipeline stages and 4
data-parallel replicas:

    DeepSpeed             examples/deepspeed_pipeline
    megatron-core         examples/megatron_core
    Megatron-DeepSpeed    the pretrain_gpt.py of its checkout (tests/checkouts.py)
    Megatron-LM           the pretrain_gpt.py of its checkout, with the distributed optimizer

Each program runs in three variants:

    stock       without holmes, on an InfiniBand and a RoCE cluster that Ethernet connects
    holmes      the same with holmes
    all-RDMA    without holmes, on a single InfiniBand cluster: no variant can be faster

The CUDA build of torch, the frameworks, NCCL's host code, the sockets and their limited rates are real. GPUs
are emulated: a matrix product occupies its CUDA stream for as long as a GPU of 2.3 GFLOP/s would need.

GPUs and networks are slowed down by the factor SLOWER, so that a step lasts longer. Then the CPU work of the
eight ranks on this machine's two cores is a smaller part of a step. (The rows of results say how busy the
cores were.) All four cases take half an hour.

The steps of stock and holmes are also predicted, except for Megatron-LM, by the simulator in
planner/simulate/step.py. One number is fitted for each framework: the CPU seconds that its Python
code and torch's operators need for one pass of a transformer block, beside the emulated GPU's time.
It is chosen so that the predicted step of all-RDMA equals the measured step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from emulated import emulated_gpus, even_costs, forward_s
from harness import (
    Row,
    chosen_cases,
    find_checkout,
    finish,
    kept_rows,
    parser,
    tell,
    why_missing,
    write,
)
from holmes_lab import interleave
from holmes_lab.compare import (
    Series,
    Variant,
    all_rdma,
    compare,
    lab_for_measurements,
    max_loss_difference,
)
from prediction import CORES, TRAITS
from two_clusters import loss_row, ratio_row, step_rows

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import stock_fabric
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.samples import examples

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / name)
    for name in (".", "tests", "integration_tests", "examples/megatron_core/on_cpu")
]
from carriers import LESS_MEMORY  # noqa: E402
from clusters import toml  # noqa: E402

from integration_tests.gpu import commands  # noqa: E402
from integration_tests.megatron_deepspeed.job import byte_vocabulary, read_log  # noqa: E402

#: Case -> factor of the slow-down of its GPUs and networks. The two scripts need the CPU longest.
SLOWER = {"DeepSpeed": 5, "megatron-core": 5, "Megatron-DeepSpeed": 8, "Megatron-LM": 8}
LAYERS, HIDDEN, SEQUENCE, MICRO_BATCHES, STAGES = 6, 288, 16, 4, 2
SKIP = 3
MODEL = (
    f"--layers {LAYERS} --hidden {HIDDEN} --heads 4 --sequence {SEQUENCE} --micro-batch 1 "
    f"--micro-batches {MICRO_BATCHES}"
).split()
#: Case -> name of its engine in prediction.TRAITS.
ENGINES = {
    "DeepSpeed": "deepspeed",
    "megatron-core": "megatron",
    "Megatron-DeepSpeed": "deepspeed",
    "Megatron-LM": "megatron",
}
#: Case -> folder below examples/, its flag for the number of stages, and modules to import before a fork.
SCRIPTS = {
    "DeepSpeed": ("deepspeed_pipeline", "--stages", ("torch", "deepspeed")),
    "megatron-core": ("megatron_core", "--pipeline", ("torch",)),
}
#: Cases that run the pretrain_gpt.py of the checkout with the same name.
CHECKOUTS = ("Megatron-DeepSpeed", "Megatron-LM")


def flops_of(name: str) -> float:
    """Return the FLOP/s of an emulated GPU in a case."""
    return 2.3e9 / SLOWER[name]


def variants_of(spec: SiteSpec, file: Path) -> list[Variant]:
    """Return the three variants of each training script: stock, holmes and all-RDMA.

    "stock" and "holmes" run on the given clusters, without and with the flags of holmes. "all-RDMA"
    runs without holmes, with all nodes in a single cluster on the fastest network: nothing can be
    faster. A Variant has a name, clusters, the order of the nodes, flags and environment variables.

    Args:
        spec: The emulated clusters.
        file: Cluster file of `spec`, for the flags of holmes.
    """
    order, holmes = interleave(spec), ("--holmes", "--holmes-cluster", str(file))
    return [
        # LESS_MEMORY makes NCCL's buffers smaller: by default a communicator takes 512 MB for each
        # rank, and all eight ranks share the memory of this machine.
        replace(variant, env={**variant.env, **LESS_MEMORY})
        for variant in (
            Variant("stock", spec, order),
            Variant("holmes", spec, order, flags=holmes),
            all_rdma(spec),
        )
    ]


def example(
    name: str, variants: Sequence[Variant], repetitions: int, steps: int
) -> dict[str, Series]:
    """Run an example script in each variant, and return the measurements by variant.

    Args:
        name: A key of SCRIPTS.
        variants: The variants: stock, holmes and all-RDMA.
        repetitions: Runs of each variant.
        steps: Training steps of a run. The first SKIP are not measured.
    """
    folder, stages, preload = SCRIPTS[name]
    script = [str(examples() / folder / "train.py"), *MODEL, stages, str(STAGES)]
    return compare(
        variants,
        script,
        repetitions=repetitions,
        steps=steps,
        skip=SKIP,
        accelerator=None,
        gpus=emulated_gpus(flops_of(name)),
        preload=preload,
        on_run=lambda variant, _: tell(f"{name}: {variant}"),
    )


def command_of(name: str, folder: Path, source: Path, batch: int, steps: int) -> commands.Command:
    """Return the command that trains with pretrain_gpt.py of a checkout.

    Args:
        name: "Megatron-LM" or "Megatron-DeepSpeed".
        folder: For the files of the run.
        source: The checkout.
        batch: Global batch size.
        steps: Training steps.
    """
    model = (
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQUENCE} "
        f"--max-position-embeddings {SEQUENCE} --micro-batch-size 1 --global-batch-size {batch} "
        f"--train-iters {steps} --make-vocab-size-divisible-by 8"
    ).split()
    if name == "Megatron-LM":
        return commands.megatron_lm(folder, source, *model)
    config = folder / "ds.json"
    config.write_text(
        json.dumps(
            {
                "train_batch_size": batch,
                "train_micro_batch_size_per_gpu": 1,
                "steps_per_print": 1000,
                "zero_optimization": {"stage": 0},
            }
        )
    )
    return commands.megatron_deepspeed(
        folder,
        source,
        0,  # ZeRO stage
        *model,
        "--deepspeed_config",
        str(config),
        vocabulary=byte_vocabulary(source, folder),
    )


def pretrain_gpt(
    name: str, variants: Sequence[Variant], folder: Path, source: Path, repetitions: int, steps: int
) -> dict[str, Series]:
    """Run pretrain_gpt.py in each variant, and return step times and losses from the script's log.

    Args:
        name: "Megatron-LM" or "Megatron-DeepSpeed".
        variants: The variants: stock, holmes and all-RDMA.
        folder: For the files of the runs.
        source: The checkout with the script.
        repetitions: Runs of each variant.
        steps: Training steps of a run.
    """
    replicas = len(variants[0].order) // STAGES  # data-parallel; one GPU on each node
    command = command_of(name, folder, source, batch=MICRO_BATCHES * replicas, steps=steps)
    by_variant = {variant.name: Series(variant.name) for variant in variants}
    with ExitStack() as stack:
        # Variants on equal clusters (with the same hash of their description) share a lab.
        specs = {variant.spec.digest: variant.spec for variant in variants}
        labs = {
            digest: stack.enter_context(lab_for_measurements(spec))
            for digest, spec in specs.items()
        }
        for _ in range(repetitions):
            for variant in variants:
                tell(f"{name}: {variant.name}")
                lab, series = labs[variant.spec.digest], by_variant[variant.name]
                before = lab.counters()
                result = lab.run(
                    [sys.executable, *command.words, *variant.flags],
                    order=variant.order,
                    env={**command.env, **commands.ON_GPU, **variant.env},
                    cwd=command.inside,
                    preload=command.preload,
                    timeout=300,
                    gpus=emulated_gpus(flops_of(name)),
                )
                log, after = read_log(result), lab.counters()
                series.add(
                    [log.seconds[step] for step in log.losses],
                    list(log.losses.values()),
                    SKIP,
                    result,
                    before,
                    after,
                )
                series.emulated = True
    return by_variant


def predict_step_s(name: str, spec: SiteSpec, variant: str, block_s: float) -> float:
    """Return the predicted seconds of a training step.

    Args:
        name: The case.
        spec: Its clusters.
        variant: "stock", "holmes" or "all-RDMA".
        block_s: CPU seconds of the framework's code (Python, torch's operators) in one forward
            or backward pass of a transformer block, beside the emulated GPU's time.
    """
    site = site_from_spec(all_rdma(spec).spec if variant == "all-RDMA" else spec)
    # Without holmes, all groups use the single network that all nodes share (`only`).
    order, only = interleave(spec), stock_fabric(site)
    model = Model(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=4,
        sequence=SEQUENCE,
        vocabulary=256,
        micro_batches=MICRO_BATCHES,
        activation_width=4,
    )
    execution = Execution(TRAITS[ENGINES[name]], block_s=block_s, cores=CORES)
    if variant == "holmes":
        launched = replace(site, nodes=tuple(site.node_by_name[node] for node in order))
        plan = build_plan(launched, Sizes(pipeline=STAGES), model=model)
        traffic = plan.traffic_of()
        overlap = "on" if all(reduction.overlap for reduction in traffic.reductions) else "off"
        execution = replace(execution, in_flight=traffic.in_flight, overlap=overlap)
        if name == "Megatron-DeepSpeed":
            # its command has a single hardware queue, where a reduction and a backward pass take turns; all
            # stages but the first reduce after theirs, before tied weights (patches/deepspeed/reduce.py)
            execution = replace(
                execution, overlap="off", engine=replace(execution.engine, tied_first=False)
            )
        order, only = plan.nodes, None
    elif variant == "all-RDMA":
        order = tuple(node.name for node in site.nodes)
    costs = even_costs(
        forward_s(HIDDEN, SEQUENCE, flops_of(name)),
        layers=LAYERS,
        stages=STAGES,
        micro_batches=MICRO_BATCHES,
    )
    return simulate(
        site,
        order,
        Sizes(pipeline=STAGES).complete(site.world_size),
        model,
        execution,
        only=only,
        costs=costs,
    ).step_s


def fit_block_s(name: str, spec: SiteSpec, bound_s: float) -> float:
    """Return the framework's CPU seconds per block and pass, fitted to the step of all-RDMA.

    A simulated step has the times of GPUs and networks. The framework's code takes further time
    in each pass of a transformer block. The function searches, by bisection, the time that makes the
    simulated step equal to the measured step.

    Args:
        name: The case.
        spec: Its clusters.
        bound_s: The measured step of all-RDMA, in seconds.

    Returns:
        Seconds of one forward or backward pass of a block. 0 if the simulated step is too long
        without them.
    """
    low, high = 0.0, bound_s
    for _ in range(30):  # bisection: 2^-30 of the step is exact enough
        middle = (low + high) / 2
        if predict_step_s(name, spec, "all-RDMA", middle) > bound_s:
            high = middle
        else:
            low = middle
    return low


def rows_of(name: str, spec: SiteSpec, by_variant: dict[str, Series]) -> list[Row]:
    """Return the rows of results of a case.

    Args:
        name: Name of the case.
        spec: Its clusters.
        by_variant: Measurements of "stock", "holmes" and "all-RDMA".
    """
    stock, ours, bound = by_variant["stock"], by_variant["holmes"], by_variant["all-RDMA"]
    difference = max_loss_difference(stock, ours)
    # Megatron-LM trains with its distributed optimizer. Its steps are not predicted, and its
    # targets differ from those of the other programs.
    is_megatron_lm = name == "Megatron-LM"
    stock_target = ">= 1.6" if is_megatron_lm else ">= 1.67"
    bound_target = "" if is_megatron_lm else ">= 0.97"
    rows = [
        ratio_row(name, "holmes : stock", stock, ours, target=stock_target),
        ratio_row(name, "holmes : all-RDMA", bound, ours, target=bound_target),
        loss_row(name, difference, target="<= 1e-5"),
    ]
    if not is_megatron_lm:
        rows += predictions(name, spec, by_variant)
    rows += [
        Row.median(
            name,
            f"share of the cores used, {series.name}",
            [series.busy],
            unit="of them",
            emulated=False,
        )
        for series in by_variant.values()
    ]
    return [*rows, *step_rows(name, by_variant)]


def predictions(name: str, spec: SiteSpec, by_variant: dict[str, Series]) -> list[Row]:
    """Return rows with the predicted steps of two variants, "stock" and "holmes", and their errors.

    "stock" trains without holmes on two clusters, "holmes" with it on the same clusters, and
    "all-RDMA" without it on a single fast cluster. A single number is fitted to the measured step of
    all-RDMA: the CPU seconds of the framework's code in one pass of a transformer block. The
    predictions of the other two variants use it.

    Args:
        name: The case.
        spec: Its clusters.
        by_variant: Measurements of "stock", "holmes" and "all-RDMA".
    """
    stock, ours, bound = by_variant["stock"], by_variant["holmes"], by_variant["all-RDMA"]
    block_s = fit_block_s(name, spec, bound.median)
    rows = [
        Row.median(
            name, "software of a block (fitted to all-RDMA)", [block_s], unit="s", emulated=True
        )
    ]
    for series in (stock, ours):
        seconds = predict_step_s(name, spec, series.name, block_s)
        error = seconds / series.median - 1
        rows += [
            Row.median(name, f"predicted step {series.name}", [seconds], unit="s", emulated=True),
            Row.median(
                name,
                f"error of the prediction, {series.name}",
                [abs(error)],
                unit="of the measured",
                emulated=True,
                target="<= 0.05",
                # The prediction depends on both runs, so neither may be short of CPU time.
                busy=max(series.busy, bound.busy),
            ),
        ]
    return rows


def case(name: str, repetitions: int, steps: int) -> list[Row]:
    """Measure one training program in three variants, and return its rows of the table of results.

    The variants are "stock" (without holmes), "holmes", and "all-RDMA" (without holmes on a single InfiniBand
    cluster).

    Args:
        name: The program, e.g. "DeepSpeed". If it is a script of a checkout that is missing, nothing is
            measured and the list is empty.
        repetitions: Runs of each variant.
        steps: Training steps of a run.
    """
    with tempfile.TemporaryDirectory() as directory:
        if name in CHECKOUTS:
            source = find_checkout(name)
            if source is None:
                tell(f"{name}: skipped; {why_missing(name)}")
                return []
            # The script trains in a copy of the checkout in `directory`.
            run = partial(pretrain_gpt, name, folder=Path(directory), source=source)
        else:
            run = partial(example, name)  # a script below examples/

        cluster_file = Path(directory, "cluster.toml")
        cluster_file.write_text(cluster_toml(slower=SLOWER[name]))
        spec = load_spec(cluster_file)
        # `run` trains each variant, and returns its step times, losses and sent bytes.
        series = run(variants_of(spec, cluster_file), repetitions=repetitions, steps=steps)
        return rows_of(name, spec, series)


def cluster_toml(slower: float) -> str:
    """Return the text of a cluster.toml, the file that describes the clusters and their networks to holmes.

    It has an InfiniBand and a RoCE cluster of 4 nodes each, which Ethernet connects. All rates are divided by
    `slower`.
    """
    infiniband, roce, ethernet = (f"{megabits / slower:g}Mb/s" for megabits in (2000, 1600, 250))
    return toml(f"a ib {infiniband} a[0-3]", f"b roce {roce} b[0-3]", ethernet=ethernet)


def main() -> int:
    """Measure training steps on emulated GPUs, print the table of results, and write the file.

    A case is one training program (a key of ENGINES, such as "DeepSpeed"). It runs without holmes,
    with holmes, and without holmes on a single fast cluster.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=1)
    arguments.add_argument(
        "--steps", type=int, default=11, help=f"of a run, of which {SKIP} warm up"
    )
    args = arguments.parse_args()
    names = chosen_cases(args.cases, ENGINES)
    rows = kept_rows(args.json, names)
    for name in names:
        rows += case(name, args.repetitions, args.steps)
        write(rows, args.json)
    # "their clock" is the time that an emulated GPU charges for a kernel, by its FLOP/s.
    return finish(rows, args.json, "Steps on emulated GPUs over NCCL, by their clock")


if __name__ == "__main__":
    sys.exit(main())
