"""Work of a rank on an average stage, as a few numbers: seconds of computation, and bytes that are sent.

These numbers are enough to compare orders of the nodes. A model (plan/cost/model.py) is more precise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Annotated, Any

from holmes_ext.checks import InRange, check_fields

_Amount = Annotated[float, InRange(0, 1e30)]
_Count = Annotated[int, InRange(0, 1e30)]


def _option(default: float, name: str, text: str) -> Any:
    """Return a dataclass field that `holmes plan --NAME` and its TOML file can set.

    Args:
        default: Value if it is not set.
        name: Name of the option, without "--".
        text: Help of the option.
    """
    return field(default=default, metadata={"option": name, "help": text})


@dataclass(frozen=True)
class Workload:
    """Seconds and bytes of a micro-batch on a rank of a pipeline stage.

    Bytes are those of the forward and backward pass together. The defaults are for a model that is not known:

        10^9 parameters on each rank (5 layers of hidden size 4096), a sequence of 2048 tokens
        150 TFLOP/s; 2 FLOPs per parameter and token in the forward pass, 4 in the backward pass
        16-bit activations, 32-bit gradients
        four tensor-parallel all-reduces per layer (Shoeybi et al. 2019, arXiv 1909.08053), four all-to-alls
        per layer, and keys, values and their gradients around the context ring
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
    """Computation and memory of a rank of a pipeline stage."""

    forward_s: float  # of a micro-batch
    backward_s: float  # of a micro-batch
    fixed_bytes: float = 0.0  # weights, gradients, optimizer and working memory
    kept_bytes: float = 0.0  # activations of each micro-batch in flight
    limit_bytes: float = 0.0  # memory of the stage's smallest GPU; 0: not known
    #: Measured seconds of sending an activation to the next stage; 0: not measured.
    stage_link_s: float = 0.0
    weights_s: float = 0.0  # part of backward_s that can be delayed: weight gradients

    @property
    def busy_s(self) -> float:
        """Return the seconds of a micro-batch's forward and backward pass together."""
        return self.forward_s + self.backward_s

    @property
    def most(self) -> float:
        """Return how many micro-batches in flight fit the memory of the rank; inf if no limit is known."""
        if not (self.limit_bytes and self.kept_bytes):
            return inf
        return floor((self.limit_bytes - self.fixed_bytes) / self.kept_bytes)

    def bytes_of(self, in_flight: float) -> float:
        """Return the bytes of GPU memory that the rank needs with `in_flight` micro-batches in flight."""
        return self.fixed_bytes + in_flight * self.kept_bytes


def passes_s(loads: Sequence[StageLoad]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two tuples by stage: seconds of a forward pass, and seconds of a backward pass."""
    return tuple(load.forward_s for load in loads), tuple(load.backward_s for load in loads)
