"""What one rank of a job computes and sends, in a few numbers: what orders of nodes are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Annotated, Any

from holmes_ext.checks import InRange, check_fields

_Amount = Annotated[float, InRange(0, 1e30)]
_Count = Annotated[int, InRange(0, 1e30)]


def _option(default: float, name: str, text: str) -> Any:
    """A field of Workload: of `holmes plan --NAME`, and of NAME in its TOML."""
    return field(default=default, metadata={"option": name, "help": text})


@dataclass(frozen=True)
class Workload:
    """Seconds and bytes of one micro-batch on one stage, both ways together unless said otherwise.

    The defaults are nominal, for when the model is unknown: 10^9 parameters in each rank (5 layers of hidden
    size 4096), one sequence of 2048 tokens, 150 TFLOP/s (2 FLOPs a parameter and token forward, 4 backward),
    16-bit activations, 32-bit gradients, four tensor all-reduces a layer (Shoeybi et al. 2019), K and V and
    their gradients around the ring, four all-to-alls a layer.
    """

    forward_s: _Amount = _option(
        0.027, "forward-seconds", "seconds to compute a micro-batch forward"
    )
    backward_s: _Amount = _option(
        0.055, "backward-seconds", "seconds to compute a micro-batch backward"
    )
    micro_batches: Annotated[int, InRange(1, 1e30)] = _option(
        8, "micro-batches", "micro-batches in a step"
    )
    gradient_bytes: _Amount = _option(4e9, "gradient-bytes", "bytes of gradients of one rank")
    activation_bytes: _Amount = _option(
        2048 * 4096 * 2,
        "activation-bytes",
        "bytes that a rank sends to the next stage for a micro-batch",
    )
    tensor_bytes: _Amount = _option(
        5 * 4 * 2048 * 4096 * 2,
        "tensor-bytes",
        "bytes all-reduced by a tensor group for one micro-batch on one stage",
    )
    context_bytes: _Amount = _option(
        5 * 4 * 2048 * 4096 * 2,
        "context-bytes",
        "bytes passed around a context ring for one micro-batch on one stage",
    )
    expert_bytes: _Amount = _option(
        5 * 4 * 2048 * 4096 * 2,
        "expert-bytes",
        "bytes sent by one rank in all-to-alls for one micro-batch on one stage",
    )
    copies: _Count = _option(
        0,
        "copies",
        "tensor ranks that have the same activation to send (1 with sequence parallelism)",
    )
    activation_width: _Count = _option(2, "activation-width", "bytes per activation element")

    def __post_init__(self) -> None:
        check_fields(self, "workload")


@dataclass(frozen=True)
class StageLoad:
    """What a rank of one stage computes and holds. forward_s, backward_s: seconds of a micro-batch.
    fixed_bytes: weights, gradients, optimizer and working memory; kept_bytes: activations of each micro-batch
    under way; limit_bytes: of the stage's smallest GPU, 0 where nobody told. stage_link_s: seconds of
    an activation to the next stage, as measured; 0: what the networks' price says."""

    forward_s: float
    backward_s: float
    fixed_bytes: float = 0.0
    kept_bytes: float = 0.0
    limit_bytes: float = 0.0
    stage_link_s: float = 0.0
    #: Of backward_s, what makes weights' gradients and could wait.
    weights_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def most(self) -> float:
        """Micro-batches in flight that the memory holds; inf where no limit is known."""
        if not (self.limit_bytes and self.kept_bytes):
            return inf
        return floor((self.limit_bytes - self.fixed_bytes) / self.kept_bytes)

    def bytes_of(self, in_flight: float) -> float:
        """Held with so many micro-batches in flight."""
        return self.fixed_bytes + in_flight * self.kept_bytes


def passes_s(loads: Sequence[StageLoad]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a forward and of a backward pass, by stage."""
    return tuple(load.forward_s for load in loads), tuple(load.backward_s for load in loads)
