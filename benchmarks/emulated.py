"""Emulated GPUs and accelerators for benchmarks, and the times of their layers for predictions."""

from __future__ import annotations

import os
import sys

from holmes_lab.emulate.accelerator import Config, Pacer
from holmes_lab.gpu.job import GpuClock, Gpus
from holmes_lab.gpu.libraries import libraries

from holmes_ext.plan.cost.stages import StageCosts


def emulated_gpus(flops: float = 0.0) -> Gpus:
    """Return emulated GPUs for the torch of this Python.

    Args:
        flops: FLOP/s of their clock; 0: operations take as long as on the host.
    """
    return Gpus(
        libraries([sys.executable], os.environ), memory_mb=4096, clock=GpuClock(flops=flops)
    )


def forward_s(hidden: int, tokens: int, flops: float, parameters: float = 0) -> float:
    """Return the seconds of the forward pass of a transformer block on the emulated accelerator.

    The emulated accelerator (Pacer) counts the FLOP of a layer by its parameters and the shape of
    its input, and sleeps for FLOP / `flops`. This function returns the seconds of that sleep.

    Args:
        hidden: Width of an activation.
        tokens: Tokens of the sequence.
        flops: FLOP/s of the accelerator.
        parameters: Parameters of the block that a rank holds; 0: all of them.
    """
    all_parameters = 12 * hidden**2 + 13 * hidden
    pacer = Pacer(Config(flops, classes=("Block",)))  # type: ignore[arg-type]
    # The third argument says how the FLOP are counted. "classes": as for a transformer block (a
    # class named in Config.classes). Its attention is counted in addition to its parameters.
    input_shape = (1, tokens, hidden)  # batch, sequence, width
    return pacer.seconds(parameters or all_parameters, input_shape, "classes")


def even_costs(seconds: float, layers: int, stages: int, micro_batches: int) -> StageCosts:
    """Return the costs of a pipeline whose blocks all take the same time.

    A backward pass takes twice as long as a forward pass. Embedding and output layer take no time.

    Args:
        seconds: Seconds of the forward pass of a block.
        layers: Number of blocks.
        stages: Number of pipeline stages.
        micro_batches: Micro-batches of a step.
    """

    def row(block_s: float) -> tuple[tuple[float, ...], ...]:
        """Return for each stage the seconds of the embedding, of each block, and of the output layer."""
        return ((0.0, *[block_s] * layers, 0.0),) * stages

    return StageCosts(
        forward_s=row(seconds),
        backward_s=row(2 * seconds),
        reduction_s=row(0.0),
        transfer_s=row(0.0),
        micro_batches=micro_batches,
    )
