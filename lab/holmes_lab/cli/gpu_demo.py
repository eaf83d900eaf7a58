"""Command `holmes demo --gpu`: trains the GPT of the demo on emulated GPUs, without and with holmes.

The ranks communicate over NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from holmes_ext.cli.show.table import Screen
from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples
from holmes_lab.cli import lab_gpu
from holmes_lab.cli.gpu_build import BuildProgress
from holmes_lab.compare import LOSS_TOLERANCE
from holmes_lab.gpu.job import Gpus
from holmes_lab.gpu.libraries import libraries
from holmes_lab.lab import Lab
from holmes_lab.process.ranks import interleave

#: DS_BUILD_OPS=0: DeepSpeed builds no CUDA operators (they would need nvcc).
_ENVIRONMENT = {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0"}


def run(as_json: bool, script_flags: list[str], cluster: str, steps: int) -> int:
    """Train a GPT on emulated GPUs, without and with holmes; print NCCL's networks and the losses.

    The output has the network that NCCL chose for each process group, and the bytes of each NIC.

    Args:
        as_json: Whether the result is also printed as JSON on stdout.
        script_flags: Flags for the script examples/deepspeed_pipeline/train.py.
        cluster: Name of a file in examples/clusters.
        steps: Training steps of each run.

    Returns:
        The exit status: 1 if a run fails, or if losses differ by more than 1e-6; else 0.
    """
    folder, screen = examples(), Screen(stderr=True)
    file = folder / "clusters" / cluster
    spec = load_spec(file)
    command = [
        sys.executable,
        str(folder / "deepspeed_pipeline" / "train.py"),
        *script_flags,
        "--steps",
        str(steps),
    ]
    flags = {"stock": [], "holmes": ["--holmes", "--holmes-cluster", str(file)]}
    with BuildProgress() as progress:
        gpus = Gpus(libraries(command, os.environ, on_progress=progress), memory_mb=4096)
    runs = []
    losses: dict[str, list[float]] = {}  # name of a run -> loss of each step
    with tempfile.TemporaryDirectory() as directory, Lab(spec) as lab:
        for name, more in flags.items():
            screen.line(f"{name}: 4 nodes with an emulated GPU each, {steps} steps")
            log = Path(directory, f"{name}.jsonl")
            watched = lab_gpu.run_watched(
                lab,
                name,
                [*command, "--log", str(log), *more],
                interleave(spec),
                gpus=gpus,
                env=_ENVIRONMENT,
                order=interleave(spec),
                processes=1,
                preload=("torch", "deepspeed"),
            )
            result = watched.result
            if result.returncode:
                screen.line(result.outputs[result.first_failed or 0][-3000:])
                return 1
            runs.append(watched)
            losses[name] = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    lab_gpu.show(runs, gpus.libraries)
    difference = max(abs(a - b) for a, b in zip(losses["stock"], losses["holmes"], strict=True))
    screen.line(
        f"last loss {losses['stock'][-1]:.4f}; stock's and holmes's losses differ by {difference:.1g}"
    )
    screen.line("Emulated GPU: numbers, networks and bytes are real, times are not.")
    if as_json:
        print(
            json.dumps(
                {
                    "emulated": "GPU",
                    "max_loss_difference": difference,
                    "losses": losses,
                    "runs": [
                        {
                            "name": run.name,
                            "groups": [asdict(group) for group in run.groups],
                            "nics": [asdict(nic) for nic in run.nics],
                        }
                        for run in runs
                    ],
                }
            )
        )
    return 0 if difference <= LOSS_TOLERANCE else 1
