"""Bytes of GPU memory for one parameter: its weight, gradient and optimizer states, and which are sharded.

The training state of a parameter has three parts. With Adam in 16 bits they have 16 to 20 bytes:

    weights      2      bfloat16 or float16
    gradients    2..6   as the engine sums them over the micro-batches of a step
    optimizer    12     weight in 32 bits, and two moments in 32 bits

ZeRO stages 1, 2 and 3 shard the optimizer states, then also the gradients, then also the weights over the
data-parallel ranks. Engines differ from this rule: DeepSpeed's BF16_Optimizer shards optimizer states at
ZeRO stage 0. Such an engine gives the model one StateBytes for each `Mode` that it accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Parts of the training state, in the order in which ZeRO stages 1, 2 and 3 shard them.
ZERO_ORDER = ("optimizer", "gradients", "weights")


class Mode(NamedTuple):
    """ZeRO stage of a job, and whether it has pipeline parallelism: an engine may treat both differently."""

    zero: int
    has_pipeline: bool


@dataclass(frozen=True)
class StateBytes:
    """Bytes of GPU memory for one parameter, by part of the training state.

    Offloaded parts are on the host, and have 0 bytes here.
    """

    weights: float
    gradients: float
    optimizer: float
    #: Parts that are divided among the data-parallel ranks, out of ZERO_ORDER.
    sharded: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Return the bytes of all parts, without sharding."""
        return self.weights + self.gradients + self.optimizer

    @property
    def sharded_bytes(self) -> float:
        """Return the bytes of the sharded parts, before the division."""
        return sum(self.bytes_of(part) for part in self.sharded)

    def bytes_of(self, part: str) -> float:
        """Return the bytes of one part: "weights", "gradients" or "optimizer"."""
        part_bytes: float = getattr(self, part)
        return part_bytes


def sharded_by(zero: int) -> tuple[str, ...]:
    """Return the parts of the training state that a ZeRO stage shards.

    For example "optimizer" and "gradients" for stage 2.
    """
    return ZERO_ORDER[:zero]
