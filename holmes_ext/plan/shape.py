"""Shape of a job: parallel sizes, micro-batches, recomputation and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Model, states
from holmes_ext.plan.sizes import DEFAULT_ORDER, Sizes
from holmes_ext.words import counted

_ZERO_STAGES = 4  # 0 to 3


@dataclass(frozen=True, order=True)
class Shape:
    """Parallel sizes, batch sizes, recomputation and ZeRO stage of a job.

    Order of the nodes, layers of each stage and reductions are chosen afterwards, for a given shape.
    """

    pipeline: int
    tensor: int
    context: int
    expert: int
    data: int
    virtual: int  # chunks per stage
    micro_batch: int  # sequences in a micro-batch
    micro_batches: int  # per step on each rank
    recompute: str  # "none", "selective" or "full"
    zero: int  # ZeRO stage
    #: Copies of the sharded weights (ZeRO 3), each in some of the clusters (FSDP's hybrid sharding).
    replicas: int = 1

    def sizes(self, order: str = DEFAULT_ORDER) -> Sizes:
        """Return the parallel sizes, with an order of the axes."""
        return Sizes(self.pipeline, self.tensor, self.context, self.expert, self.data, order)

    def model(self, model: Model) -> Model:
        """Return `model` with this micro-batch, recomputation and ZeRO stage."""
        return replace(
            with_zero(model, self.zero),
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            global_batch=0,
            recompute=self.recompute,
        )


def zero_of(model: Model) -> int:
    """Return the ZeRO stage whose sharded bytes are nearest to the model's sharded_bytes."""
    return min(
        range(_ZERO_STAGES),
        key=lambda stage: abs(_sharded_bytes(model, stage) - model.sharded_bytes),
    )


def with_zero(model: Model, zero: int) -> Model:
    """Return `model` with state_bytes and sharded_bytes as a ZeRO stage divides them."""
    total = model.state_bytes + model.sharded_bytes
    sharded = _sharded_bytes(model, zero)
    return replace(model, state_bytes=total - sharded, sharded_bytes=sharded)


def _sharded_bytes(model: Model, zero: int) -> float:
    """Return the bytes per parameter that a ZeRO stage shards."""
    bytes_of = states(model)
    sharded = ("optimizer", "gradients", "weights")[:zero]
    return sum(bytes_of[name] for name in sharded)


def shape_of(model: Model, sizes: Sizes, zero: int | None = None, virtual: int = 1) -> Shape:
    """Return the parallel sizes, batch sizes, recomputation and ZeRO stage of a job as a Shape.

    Args:
        model: The model and its training settings.
        sizes: Parallel sizes, with the data size.
        zero: ZeRO stage; None: as the model says.
        virtual: Chunks of layers that each pipeline stage has; more than 1: interleaved schedule.

    Raises:
        HolmesError: The batch, layers or experts do not fit these sizes.
    """
    micro_batches = model.micro_batches_of(sizes.data)
    experts = model.experts or 1
    chunks = sizes.pipeline * virtual
    if sizes.expert > experts:
        raise HolmesError(
            f"{model.source}: expert size {sizes.expert} is more than the {experts} experts"
        )
    if model.layers < chunks:
        layers = counted(model.layers, "layer", "are")
        problem = f"{layers} too few for {sizes.pipeline} stages of {virtual} chunks"
        raise HolmesError(f"{model.source}: {problem}; every chunk needs one")
    if virtual > 1 and (micro_batches % sizes.pipeline or model.layers % chunks):
        layers = f"{model.layers} layers by {sizes.pipeline} x {virtual} chunks"
        raise HolmesError(
            f"{model.source}: interleaved: {micro_batches} micro-batches must be divisible by "
            f"{sizes.pipeline} stages, and {layers}"
        )
    return Shape(
        pipeline=sizes.pipeline,
        tensor=sizes.tensor,
        context=sizes.context,
        expert=sizes.expert,
        data=sizes.data,
        virtual=virtual,
        micro_batch=model.micro_batch,
        micro_batches=micro_batches,
        recompute=model.recompute,
        zero=zero_of(model) if zero is None else zero,
    )
