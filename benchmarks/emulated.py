"""Emulated GPUs, and what the emulated accelerator's layers take, for predictions of steps on it."""

from __future__ import annotations

import os
import sys

from holmes_lab.emulate.accelerator import Config, Pacer
from holmes_lab.gpu.job import GpuClock, Gpus
from holmes_lab.gpu.libraries import libraries

from holmes_ext.plan.cost.stages import StageCosts


def emulated_gpus(flops: float = 0.0) -> Gpus:
    """For this Python's torch. flops: FLOP/s of their clock, 0: what the host takes."""
    return Gpus(
        libraries([sys.executable], os.environ), memory_mb=4096, clock=GpuClock(flops=flops)
    )


def forward_s(hidden: int, tokens: int, flops: float, parameters: float = 0) -> float:
    """Seconds of a block's forward pass of a sequence; parameters: of what a rank holds of it, 0: the whole
    block."""
    return Pacer(Config(flops, classes=("Block",))).seconds(  # type: ignore[arg-type]
        parameters or 12 * hidden**2 + 13 * hidden, (1, tokens, hidden), "classes"
    )


def even_costs(seconds: float, layers: int, stages: int, micro_batches: int) -> StageCosts:
    """Of blocks that all take `seconds` forward and twice that backward; embedding and output take
    nothing."""
    row = lambda layer_s: ((0.0, *[layer_s] * layers, 0.0),) * stages  # noqa: E731
    return StageCosts(row(seconds), row(2 * seconds), row(0.0), row(0.0), micro_batches)
