"""Shape of a job: its sizes, micro-batches, recomputation and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Model, states
from holmes_ext.plan.sizes import DEFAULT_ORDER, Sizes


@dataclass(frozen=True, order=True)
class Shape:
    """One choice of everything but the order of nodes, the partition and how each group reduces."""

    pipeline: int
    tensor: int
    context: int
    expert: int
    data: int
    virtual: int
    micro_batch: int
    micro_batches: int
    recompute: str
    zero: int
    #: Under ZeRO 3: of the weights, which are sharded over as many parts of the ranks: clusters (FSDP's
    #: hybrid).
    replicas: int = 1

    def sizes(self, order: str = DEFAULT_ORDER) -> Sizes:
        return Sizes(self.pipeline, self.tensor, self.context, self.expert, self.data, order)

    def model(self, model: Model) -> Model:
        """`model` with this micro-batch, recomputation and ZeRO stage (as state_bytes and sharded_bytes)."""
        return replace(
            with_zero(model, self.zero),
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            global_batch=0,
            recompute=self.recompute,
        )


def zero_of(model: Model) -> int:
    """The ZeRO stage that the model's sharded_bytes come nearest to."""
    return min(range(4), key=lambda stage: abs(_shared(model, stage) - model.sharded_bytes))


def with_zero(model: Model, zero: int) -> Model:
    """`model` with state_bytes and sharded_bytes as that stage of ZeRO divides them."""
    total, shared = model.state_bytes + model.sharded_bytes, _shared(model, zero)
    return replace(model, state_bytes=total - shared, sharded_bytes=shared)


def _shared(model: Model, zero: int) -> float:
    parts = states(model)
    return sum(parts[name] for name in ("optimizer", "gradients", "weights")[:zero])


def shape_of(model: Model, sizes: Sizes, zero: int | None = None, virtual: int = 1) -> Shape:
    """Of complete `sizes`; zero: None for what the model says. HolmesError: batch or chunks do not divide."""
    steps, experts = model.micro_batches_of(sizes.data), model.experts or 1
    if sizes.expert > experts:
        raise HolmesError(
            f"{model.source}: expert size {sizes.expert} is more than the {experts} experts"
        )
    if model.layers < sizes.pipeline * virtual:
        what = f"{model.layers} layers are too few for {sizes.pipeline} stages of {virtual} chunks"
        raise HolmesError(f"{model.source}: {what}; every chunk needs one")
    if virtual > 1 and (steps % sizes.pipeline or model.layers % (sizes.pipeline * virtual)):
        units = f"{sizes.pipeline} stages, and {model.layers} layers by {sizes.pipeline} x {virtual} chunks"
        raise HolmesError(
            f"{model.source}: interleaved: {steps} micro-batches must be divisible by {units}"
        )
    axes = sizes.pipeline, sizes.tensor, sizes.context, sizes.expert, sizes.data
    zero = zero_of(model) if zero is None else zero
    return Shape(*axes, virtual, model.micro_batch, steps, model.recompute, zero)
