"""Starts the jobs that `holmes plan` suggests for clusters with different links, and measures the prediction.

    python benchmarks/found_plans.py --json FILE [--cases NAME;...]

The clusters have four to six nodes. Links between them have 2 to 80 ms and different rates, and some
share an uplink. `holmes probe` has measured them in the lab (results/prediction_links_measured.json of
prediction_links.py). The search receives the model and the global batch, and finds the layout. The job
starts with the flags and the ds_config that `holmes plan` prints.

Layers take the time of an emulated accelerator. It is so slow that the CPU work of this machine (the plan
does not contain it) is a small part of a step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import Row, finish, parser, tell
from holmes_lab import interleave
from holmes_lab.compare import Variant, compare
from prediction import Measured, cluster_file
from prediction_links import STORE

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

HEADS = 4
SEQUENCE = 16  # tokens
VOCABULARY = 256
STEPS = 6
SKIP = 2  # first steps, not measured
MODEL = """version = 1
layers = {layers}
hidden = {hidden}
heads = {heads}
sequence = {sequence}
vocabulary = {vocabulary}
tied = false
[training]
global_batch = {batch}
activation_width = 4
gradient_width = 4
state_bytes = 16
[gpu]
flops = {flops}
"""


@dataclass(frozen=True)
class Case:
    """Model and clusters for which `holmes plan` finds a layout."""

    engine: str  # as `holmes plan --for` takes it
    file: str  # cluster file, without .toml
    layers: int = 6
    hidden: int = 288
    batch: int = 16
    flops: float = 6e8  # of the emulated accelerator


CASES = {
    "2+2, 20 ms: deepspeed": Case("deepspeed", "links_two_20ms"),
    "2+2, 20 ms: megatron-core": Case("megatron-lm", "links_two_20ms", batch=24),
    "2+2, 80 ms: deepspeed": Case("deepspeed", "links_two_80ms", layers=8),
    "2+2, uplinks: megatron-core": Case("megatron-lm", "links_uplinks_2ms", hidden=384, flops=1e9),
    "2+2+2, links 4:4:1: deepspeed": Case("deepspeed", "three_links_6", batch=24),
    "2+2+2, links 4:4:1: megatron-core": Case("megatron-lm", "three_links_6", layers=12, flops=1e9),
}


def run_holmes_plan(case: Case, folder: Path) -> dict:
    """Run `holmes plan --json` for a case, and return the document that it prints.

    Args:
        case: The model, the global batch and the clusters.
        folder: For the input files, and for the plan (plan.json).
    """
    cluster = folder / "cluster.toml"
    model = folder / "model.toml"
    cluster.write_text(Measured.load(STORE).probes[case.file])
    sizes = {
        "layers": case.layers,
        "hidden": case.hidden,
        "batch": case.batch,
        "flops": case.flops,
    }
    model.write_text(MODEL.format(heads=HEADS, sequence=SEQUENCE, vocabulary=VOCABULARY, **sizes))
    limits = (
        "tensor=1",
        "context=1",
        "zero=0",
        "recompute=none",
        "micro_batch=1",
        "reduction=flat",
    )
    command = [
        sys.executable,
        "-m",
        "holmes_ext.cli.main",
        "plan",
        "--cluster",
        cluster,
        "--model",
        model,
        "--json",
        "--for",
        case.engine,
        "--seconds",
        "20",
        "--output",
        folder / "plan.json",
    ]
    command += [word for limit in limits for word in ("--limit", limit)]
    return json.loads(
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout
    )


def command_of(case: Case, result: dict, folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the command that trains with the best plan of `holmes plan`.

    The model is that of the case. The parallel sizes and micro-batches are those of the plan.

    Args:
        result: The output of `holmes plan --json`.
        folder: The ds_config file (DeepSpeed's configuration) is written there.

    Returns:
        (script with its arguments, further flags that `holmes plan` printed for this engine).
    """
    launch = result["launch"][case.engine]
    best = result["candidates"][0]
    # "lacks": properties of the plan that the engine does not support. The list must be empty.
    assert not launch["lacks"], launch["lacks"]
    size = [
        "--layers",
        case.layers,
        "--hidden",
        case.hidden,
        "--heads",
        HEADS,
        "--sequence",
        SEQUENCE,
    ]
    if case.engine == "deepspeed":
        config = folder / "ds_config.json"
        config.write_text(json.dumps(launch["config"]))
        flags = [str(config) if flag == "ds_config.json" else flag for flag in launch["flags"]]
        return [
            str(examples() / "deepspeed_pipeline" / "train.py"),
            *map(str, size),
            "--stages",
            str(best["pipeline"]),
        ], tuple(flags)
    # The printed flags are Megatron-LM's own, then "--holmes" and the others of holmes. The example
    # script has other names for Megatron-LM's. So only those from "--holmes" on are used, and the
    # sizes are added by the example's names.
    flags = launch["flags"][launch["flags"].index("--holmes") :]
    size += [
        "--pipeline",
        best["pipeline"],
        "--virtual-pipeline",
        best["virtual"],
        "--micro-batch",
        best["micro_batch"],
        "--micro-batches",
        best["micro_batches"],
    ]
    return [str(examples() / "megatron_core" / "train.py"), *map(str, size)], tuple(flags)


def rows_of(name: str, case: Case) -> list[Row]:
    """Search a plan, start the job with it, and return rows with predicted and measured steps.

    Args:
        name: Name of the case in the results.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        result = run_holmes_plan(case, folder)
        command, flags = command_of(case, result, folder)
        best, spec = result["candidates"][0], load_spec(cluster_file(case.file))
        tell(
            f"{name}: pipeline {best['pipeline']}, {best['clusters']}, layers {best['stage_layers']}"
        )
        classes = {"deepspeed": ("Block", "bsh"), "megatron-lm": ("TransformerLayer", "sbh")}[
            case.engine
        ]
        accelerator = {"flops": case.flops, "classes": [classes[0]], "layout": classes[1]}
        variant = Variant(name, spec, interleave(spec), flags=flags)
        series = compare(
            [variant],
            command,
            repetitions=1,
            steps=STEPS,
            skip=SKIP,
            accelerator=accelerator,
            timeout=150.0,
        )[name]
    steps, predicted = series.steps[0], result["candidates"][0]["step_seconds"]
    error = predicted / series.median - 1
    return [
        Row.median(name, "measured step", steps, unit="s", emulated=True),
        Row.median(
            name,
            "predicted step",
            [predicted],
            unit="s",
            emulated=True,
        ),
        Row.of(name, "error", error, unit="of the measured", spread=(error, error), emulated=True),
        Row.of(
            name,
            "error without its sign",
            abs(error),
            unit="of the measured",
            spread=(abs(error),) * 2,
            emulated=True,
            target="<= 0.1",
        ),
        Row.of(
            name, "stages", best["pipeline"], unit="", spread=(best["pipeline"],) * 2, emulated=True
        ),
    ]


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    args = parser(__doc__.splitlines()[0]).parse_args()
    rows = []
    for name in (name for name in CASES if any(part in name for part in args.cases.split(";"))):
        rows += rows_of(name, CASES[name])
    return finish(rows, args.json, "what the search finds, started as printed")


if __name__ == "__main__":
    sys.exit(main())
