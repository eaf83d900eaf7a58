"""Describes the pipeline stage of a rank, for code that measures training steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Pipeline stage of a rank, as its training engine describes it."""

    framework: str  # name and version, such as "deepspeed 0.19.8"
    stage: int
    tensor: int  # tensor-parallel size
    micro_batches: int  # of a step
    #: Bytes of the gradients of each layer on this rank. The key is the number of a transformer block, from 0
    #: over the whole model; "before" for layers before the first block, and "after" for those after the last.
    gradient_bytes: dict[str | int, float]
    stages: dict[int, int]  # (renumbered) rank of each rank in this pipeline -> its stage

    @property
    def blocks(self) -> list[int]:
        """Numbers of the transformer blocks of this stage."""
        return [label for label in self.gradient_bytes if isinstance(label, int)]

    @property
    def neighbours(self) -> list[int]:
        """Ranks of the previous and the next stage in this rank's pipeline."""
        return [rank for rank, stage in self.stages.items() if abs(stage - self.stage) == 1]
