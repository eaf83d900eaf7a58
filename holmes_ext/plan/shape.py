"""Shape of a job: parallel sizes, micro-batches, recomputation and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.model import Mode, Model, state_of
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
        """Return the parallel sizes, with the given order of the axes of the grid of ranks."""
        return Sizes(self.pipeline, self.tensor, self.context, self.expert, self.data, order)

    @property
    def mode(self) -> Mode:
        """Return the ZeRO stage, and whether there are several pipeline stages."""
        return Mode(self.zero, has_pipeline=self.pipeline > 1)

    def model(self, model: Model) -> Model:
        """Return a copy of `model` with the micro-batch, recomputation and ZeRO stage of this shape."""
        return replace(
            with_mode(model, self.mode),
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            global_batch=0,
            recompute=self.recompute,
        )

    def traffic_zero(self, model: Model) -> int:
        """Return the ZeRO stage that determines which collectives the data-parallel ranks run.

        It is the shape's own stage, except for engines that shard optimizer states at stage 0
        (DeepSpeed's BF16_Optimizer): their ranks gather the updated weights, as at stage 1.
        """
        if self.zero == 0 and state_of(model, self.mode).sharded:
            return 1
        return self.zero


def zero_of(model: Model) -> int:
    """Return the ZeRO stage that shards about as many bytes per parameter as the model's sharded_bytes."""

    def distance(zero: int) -> float:
        """Return how far the bytes per parameter that a ZeRO stage shards are from the model's."""
        sharded_bytes = state_of(model, Mode(zero, has_pipeline=False)).sharded_bytes
        return abs(sharded_bytes - model.sharded_bytes)

    return min(range(_ZERO_STAGES), key=distance)


def with_mode(model: Model, mode: Mode) -> Model:
    """Return `model` with state_bytes and sharded_bytes as a ZeRO stage divides them.

    Args:
        model: Model with the settings of its training.
        mode: The ZeRO stage, and whether there is a pipeline.
    """
    state = state_of(model, mode)
    return replace(
        model,
        state_bytes=state.total - state.sharded_bytes,
        sharded_bytes=state.sharded_bytes,
    )


def shape_of(model: Model, sizes: Sizes, zero: int | None = None, virtual: int = 1) -> Shape:
    """Return the parallel sizes, batch sizes, recomputation and ZeRO stage of a job as a Shape.

    Args:
        model: The model and its training settings.
        sizes: Parallel sizes, with the data size.
        zero: ZeRO stage; None: the stage that suits the model's sharded_bytes (zero_of).
        virtual: Chunks of layers that each pipeline stage has; more than 1: interleaved schedule.

    Raises:
        HolmesError: The batch, layers or experts do not fit these sizes.
    """
    micro_batches = model.micro_batches_of(sizes.data)
    experts = model.experts or 1
    chunks = sizes.pipeline * virtual
    if sizes.expert > experts:
        raise HolmesError(
            f"{model.source}: expert size {sizes.expert} is more than the {counted(experts, 'expert')}"
        )
    if model.layers < chunks:
        layers = counted(model.layers, "layer", "are")
        problem = f"{layers} too few for {sizes.pipeline} stages of {counted(virtual, 'chunk')}"
        raise HolmesError(f"{model.source}: {problem}; every chunk needs one")
    if virtual > 1 and (micro_batches % sizes.pipeline or model.layers % chunks):
        layers = f"{counted(model.layers, 'layer')} by {sizes.pipeline} x {virtual} chunks"
        raise HolmesError(
            f"{model.source}: interleaved: {counted(micro_batches, 'micro-batch')} must be divisible by "
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
