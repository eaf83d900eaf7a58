"""Measures megatron-core on emulated clusters: without holmes, with holmes, and on one InfiniBand cluster.

    python benchmarks/megatron_two_clusters.py --json FILE [--cases 4+4,2+2] [--repetitions 5]

The script is examples/megatron_core. The compute is emulated: layers sleep as long as a GPU with the
case's FLOP/s would compute. megatron-core, its schedules and optimizer, gloo, the sockets and their
limited rates are real. two_clusters.py measures the same with DeepSpeed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness import Row, chosen_cases, finish, parser, tell
from holmes_lab import interleave
from holmes_lab.compare import Variant, all_rdma, compare, max_loss_difference
from two_clusters import loss_row, ratio_row, step_rows

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

#: Imported once for each cluster: eight ranks would take half a minute over it on two cores. The first module
#: serves machines without CUDA.
PRELOAD = (
    "megatron_cpu_shim",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
)
MODEL = "--hidden 288 --heads 4 --sequence 16 --micro-batch 1 --layers 6 --pipeline 2".split()
#: Of a distributed optimizer holmes buckets and overlaps only when told to; 256 wide layers can be bucketed
#: without padding.
DISTRIBUTED = ("--distributed-optimizer", "--hidden", "256"), ("--holmes-overlap", "on")
#: name: file of examples/clusters, micro-batches, FLOP/s of the emulated GPU, (more flags of the script, of
#: holmes), targets of holmes : stock and holmes : all-RDMA.
CASES = {
    "4+4": ("two_clusters_8.toml", 4, 2.3e9, ((), ()), ">= 1.6", ">= 0.97"),
    "2+2": ("two_clusters_4.toml", 8, 5e9, ((), ()), "", ""),
    "4+4 distributed optimizer": ("two_clusters_8.toml", 4, 2.3e9, DISTRIBUTED, "", ""),
}


def case(name: str, repetitions: int, steps: int) -> list[Row]:
    """Measure a case without holmes, with holmes and on a single InfiniBand cluster; return its rows.

    Args:
        name: A key of CASES.
        repetitions: Runs of each variant.
        steps: Training steps of a run. The first 3 are not measured.
    """
    # `ratio` and `bound` are the targets of holmes : stock and of holmes : all-RDMA.
    file, micro_batches, flops, (flags, holmes_flags), ratio, bound = CASES[name]
    path = examples() / "clusters" / file
    spec = load_spec(path)
    variants = [
        Variant("stock", spec, interleave(spec)),
        Variant(
            "holmes",
            spec,
            interleave(spec),
            flags=(
                "--holmes",
                "--holmes-cluster",
                str(path),
                "--holmes-sizes",
                "pipeline=2",
                *holmes_flags,
            ),
        ),
        all_rdma(spec),
        Variant("stock again", spec, interleave(spec)),
    ]
    runs = iter(range(1, repetitions * len(variants) + 1))
    series = compare(
        variants,
        [
            str(examples() / "megatron_core" / "train.py"),
            *MODEL,
            "--micro-batches",
            str(micro_batches),
            *flags,
        ],
        repetitions=repetitions,
        steps=steps,
        skip=3,
        preload=PRELOAD,
        accelerator={"flops": flops, "classes": ["TransformerLayer"], "layout": "sbh"},
        on_run=lambda variant, _: tell(
            f"{name}: run {next(runs)} of {repetitions * len(variants)}: {variant}"
        ),
    )
    stock, holmes, all_fast = series["stock"], series["holmes"], series["all-RDMA"]
    noise, difference = (
        abs(series["stock again"].median / stock.median - 1),
        max_loss_difference(stock, holmes),
    )
    return [
        ratio_row(name, "holmes : stock", stock, holmes, target=ratio),
        ratio_row(name, "holmes : all-RDMA", all_fast, holmes, target=bound),
        ratio_row(name, "stock : all-RDMA", all_fast, stock, target=""),
        Row.median(
            name,
            "A/A difference (noise)",
            [noise],
            unit="of a step",
            emulated=stock.emulated,
        ),
        loss_row(name, difference),
        *step_rows(name, series),
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=12)
    args = arguments.parse_args()
    # megatron-core expects CUDA. This folder has a module that replaces the CUDA calls on a CPU,
    # and every rank must be able to import it.
    shim = str(Path(__file__).resolve().parents[1] / "examples" / "megatron_core" / "on_cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [shim, os.environ.get("PYTHONPATH", "")])
    )
    wanted = chosen_cases(args.cases, CASES)
    rows = [row for name in wanted for row in case(name, args.repetitions, args.steps)]
    return finish(
        rows,
        args.json,
        "megatron-core: stock, holmes and the all-RDMA bound (step times on the emulated accelerator)",
    )


if __name__ == "__main__":
    sys.exit(main())
