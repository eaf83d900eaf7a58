"""What an engine does, as far as a plan needs it: a value that its room in patches/ supplies.

plan/ knows no engine by name. What differs between them is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass

from holmes_ext.errors import HolmesError

#: How a stage awaits what it sends and receives: each operation by itself; those of a pass together with what the
#: next one needs; or receives are posted beforehand and nobody waits for sends.
SENDS = AWAITED, PAIRED, POSTED = "awaited", "paired", "posted"


@dataclass(frozen=True)
class EngineTraits:
    """The defaults are megatron-core's: what most engines do."""

    name: str = ""
    sends: str = PAIRED
    #: The gradients' norm is summed over a pipeline's stages before the optimizer.
    norm: bool = True
    #: Every stage is told the loss at a step's end.
    reports_loss: bool = True
    #: A bucket ends with the gradient that reaches the limit, not before it.
    buckets_exceed: bool = True
    #: A tied gradient is summed before the stage's own, and is final after the backward pass only.
    tied_first: bool = False
    #: ZeRO 1 scatters gradients; else it all-reduces them.
    scatters: bool = True

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise HolmesError(f"engine {self.name}: sends {self.sends!r} is none of {', '.join(SENDS)}")
