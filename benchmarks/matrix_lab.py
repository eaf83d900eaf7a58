"""Measures one training job on two emulated clusters, alternately without holmes ("stock") and with holmes.

    python benchmarks/matrix_lab.py SCENE --repetitions 3

SCENE names the job, one of matrix_rows.CASES. The last line that is printed is JSON:

    stock, holmes    the median seconds of a training step, for each repetition
    difference       the largest difference between the losses of the two
    busy             the share of this machine's cores that was used

benchmarks/matrix.py runs this program with many versions of Python, torch and the frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import stacks
import two_clusters
from harness import checkouts_folder
from holmes_lab import Lab, interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from matrix_rows import CASES

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

ROOT = Path(__file__).resolve().parents[1]
#: Micro-batches of 2 + 2: of 8 even a network that is fast everywhere makes a step 1.59 x as fast.
BATCH = "4"
STEPS, SKIP = 12, 3


def variants(clusters: str, *flags: str) -> list[Variant]:
    """Return the variants "stock" and "holmes" of a job, with nodes of both clusters in turn.

    Args:
        clusters: Name of a cluster file in examples/clusters.
        flags: Further flags of the script in the variant "holmes".
    """
    file = examples() / "clusters" / clusters
    spec = load_spec(file)
    ours = ("--holmes", "--holmes-cluster", str(file), *flags)
    return [
        Variant("stock", spec, interleave(spec)),
        Variant("holmes", spec, interleave(spec), flags=ours),
    ]


def run(
    compared: list[Variant],
    script: Sequence[str],
    classes: str,
    flops: float,
    repetitions: int,
    preload: Sequence[str],
    **accelerator: str,
) -> dict[str, Series]:
    """Run a training script on emulated clusters in several variants, and return the measurements.

    Args:
        compared: The variants, such as the script without and with holmes.
        script: The training script and its arguments.
        classes: Name of the class of transformer layers. Its instances sleep as long as a GPU would
            compute.
        flops: FLOP/s of an emulated GPU.
        repetitions: Runs of each variant.
        preload: Modules that are imported once for all ranks.
        accelerator: Further settings of the emulated GPU.

    Returns:
        Name of a variant -> its step times and losses.
    """
    return compare(
        compared,
        [*map(str, script)],
        repetitions=repetitions,
        steps=STEPS,
        skip=SKIP,
        preload=preload,
        accelerator={"flops": flops, "classes": [classes], **accelerator},
    )


def deepspeed(repetitions: int) -> dict[str, Series]:
    """Train with DeepSpeed's pipeline engine, without and with holmes."""
    case = replace(two_clusters.CASES[0], micro_batches=int(BATCH))
    return run(
        variants("two_clusters_4.toml", "--holmes-sizes", "pipeline=2"),
        two_clusters.script(case),
        classes="Block",
        flops=case.flops,
        repetitions=repetitions,
        preload=("torch", "deepspeed"),
    )


def megatron_core(repetitions: int) -> dict[str, Series]:
    """Train with megatron-core on two emulated clusters of two nodes, without and with holmes.

    Returns:
        "stock" (without holmes) and "holmes" -> the step times, losses and sent bytes.
    """
    import megatron_two_clusters

    # megatron-core expects CUDA. This folder has a module that replaces the CUDA calls on a CPU,
    # and every rank must be able to import it.
    shim = str(ROOT / "examples" / "megatron_core" / "on_cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [shim, os.environ.get("PYTHONPATH", "")])
    )
    script = [
        examples() / "megatron_core" / "train.py",
        *megatron_two_clusters.MODEL,
        "--micro-batches",
        BATCH,
    ]
    return run(
        variants("two_clusters_4.toml", "--holmes-sizes", "pipeline=2"),
        script,
        classes="TransformerLayer",  # sleep as long as a GPU would compute
        flops=5e9,  # of an emulated GPU, as in the case "2+2" of megatron_two_clusters.py
        repetitions=repetitions,
        preload=megatron_two_clusters.PRELOAD,  # imported once for all ranks
        layout="sbh",  # shape of a layer's input: sequence, batch, hidden
    )


def trainer(repetitions: int) -> dict[str, Series]:
    """Train with the Trainer of transformers, without and with holmes."""
    script = [stacks.JOB, *stacks.MODEL, "--stack", "trainer"]
    return run(
        variants("two_clusters_8.toml"),
        script,
        classes="GPT2Block",
        flops=stacks.DDP_FLOPS,
        repetitions=repetitions,
        preload=("torch", "transformers.trainer"),
    )


def fsdp2(repetitions: int) -> dict[str, Series]:
    """Train with FSDP2, without holmes and with weights that holmes shards inside clusters only."""
    return run(
        variants("two_clusters_8.toml", "--holmes-fsdp", "hybrid"),
        [stacks.FSDP2, *stacks.MODEL],
        classes="Block",
        flops=stacks.FSDP_FLOPS,
        repetitions=repetitions,
        preload=("torch",),
    )


def pretrain(repetitions: int) -> dict[str, Series]:
    """Train with Megatron-DeepSpeed's unmodified pretrain_gpt.py on two emulated clusters of 4 nodes.

    Returns:
        The step times, losses and sent bytes of "stock" (without holmes) and of "holmes".
    """
    import megatron_deepspeed  # the benchmark of this name

    stock, holmes = variants("two_clusters_8.toml")
    series = {variant.name: Series(variant.name) for variant in (stock, holmes)}
    source = checkouts_folder() / "Megatron-DeepSpeed"
    with tempfile.TemporaryDirectory() as folder, Lab(stock.spec, realtime=True) as emulated:
        checkout = megatron_deepspeed.copy_checkout(source, Path(folder))  # with a training text
        command = megatron_deepspeed.command_of(
            checkout, micro_batches=int(BATCH), ranks=len(stock.order), steps=STEPS
        )
        for _ in range(repetitions):
            for variant in (stock, holmes):
                megatron_deepspeed.measure(
                    emulated,
                    variant,
                    checkout,
                    command,
                    flops=megatron_deepspeed.CASES["4+4"].flops,  # of an emulated GPU
                    steps=STEPS,
                    series=series[variant.name],  # the measurements are added to it
                )
    return series


MAKERS: dict[str, Callable[[int], dict[str, Series]]] = dict(
    zip(CASES, (deepspeed, megatron_core, trainer, fsdp2, pretrain), strict=True)
)


def main() -> int:
    """Measure a training job with and without holmes, and print its step times as JSON.

    The command line names the job, one of CASES. The JSON has the median seconds of a step for each
    repetition ("stock": without holmes, "holmes": with it). It also has the largest "difference" of
    the losses, and the share of the cores in use ("busy").
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    series = MAKERS[args.case](args.repetitions)
    stock, holmes = series["stock"], series["holmes"]
    print(
        json.dumps(
            {
                "stock": stock.medians,
                "holmes": holmes.medians,
                "difference": max_loss_difference(stock, holmes),
                "busy": max(stock.busy, holmes.busy),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
