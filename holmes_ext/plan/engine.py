"""Traits of training engines (frameworks), and the methods that a job on such an engine may use.

    EngineTraits                        differences between engines; patches/ has a value for each engine
    rules_of(engine, options, direct)   -> Rules: assumptions of prices and decisions

plan/ does not know any engine by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError

if TYPE_CHECKING:
    from holmes_ext.options import Options

#: How a pipeline stage waits for its sends and receives: for each operation by itself; for those of a
#: pass together with the receives of the next pass; or receives are posted beforehand, and no stage waits
#: for sends.
SENDS = AWAITED, PAIRED, POSTED = "awaited", "paired", "posted"
#: Abilities of holmes in an engine, in this order: reduce gradients during the last backward pass; reduce
#: them hierarchically, also those of tied weights; have more micro-batches in flight; divide messages
#: between stages among ranks; compress these messages; run the passes of a plan, with split backward
#: passes.
ABILITIES = (
    "overlap",
    "hierarchical",
    "tied",
    "in-flight",
    "slices",
    "compressed-activations",
    "schedule",
)


@dataclass(frozen=True)
class EngineTraits:
    """Behaviour of a training engine; the defaults are those of megatron-core and most other engines."""

    name: str = ""
    sends: str = PAIRED  # a value of SENDS
    #: Whether the gradients' norm is summed over the pipeline stages before the optimizer runs.
    norm: bool = True
    #: Whether the last stage's ranks average the loss at the end of a step.
    averages_loss: bool = False
    reports_loss: bool = True  # whether all stages then receive the loss
    #: Whether a bucket ends with the gradient that reaches the limit, not before it.
    buckets_exceed: bool = True
    #: Whether a tied weight's gradient is summed before the stage's other gradients. It is then final
    #: only after the backward pass.
    tied_first: bool = False
    #: Stages that reduce during the last backward pass without holmes: "off", "first" (the first stage)
    #: or "on".
    overlaps: str = "off"
    #: Whether the next layer's sharded weights and the previous layer's gradients travel while a layer
    #: computes (NCCL only: gloo's collectives on CPUs block).
    prefetches: bool = False
    scatters: bool = True  # whether ZeRO 1 reduce-scatters gradients; else it all-reduces them
    #: Ability -> features of holmes (names in HOLMES_DISABLE) that it needs. An ability that is missing
    #: is not available.
    features: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(ABILITIES, ()), hash=False
    )
    resplits: bool = (
        True  # whether its checkpoints still load if the layers of the stages have changed
    )
    #: Choice of a search (NAMES of planner/search/space.py) -> values that the engine can run.
    limits: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    #: Further limits for models with experts (mixture of experts).
    limits_with_experts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    #: ZeRO stages under which the engine itself reduces hierarchically. Its flags for this apply to all
    #: pipeline stages on equally many clusters. None: holmes reduces, stage by stage.
    hierarchical_zero: tuple[int, ...] | None = None
    #: Whether it has schedules that run all micro-batches of a chunk before the next chunk (LoopedBFS).
    breadth_first: bool = False

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise HolmesError(
                f"engine {self.name}: sends {self.sends!r} is none of {', '.join(SENDS)}"
            )
        for ability in self.features:
            if ability not in ABILITIES:
                known = ", ".join(ABILITIES)
                raise HolmesError(f"engine {self.name}: features {ability!r} is none of {known}")

    def limits_for(self, has_experts: bool) -> Mapping[str, tuple[Any, ...]]:
        """Return the values of each choice of a search that the engine can run.

        Args:
            has_experts: Whether the model has experts (mixture of experts).
        """
        if has_experts:
            return {**self.limits, **self.limits_with_experts}
        return self.limits

    def can(self, ability: str, off: Collection[str] = ()) -> bool:
        """Return whether the engine has an ability, if the features of holmes in `off` are disabled."""
        return ability in self.features and not set(self.features[ability]) & set(off)


#: Ways to sum gradients. "flat" is a single ring over all ranks, "hierarchical" every other way;
#: ReductionSpec.across (plan/traffic.py) says how the sums of whole clusters are added up.
FLAT, HIERARCHICAL = REDUCTIONS = "flat", "hierarchical"


@dataclass(frozen=True)
class Rules:
    """How a job may reduce gradients, shard, schedule its passes and compress.

    The cost model and the decisions about a job's traffic assume these settings. They follow from the
    training engine and the user's options (rules_of). The defaults are those of a job without options, on
    an engine with all abilities of holmes.
    """

    reductions: tuple[str, ...] = REDUCTIONS  # ways to sum gradients that are allowed
    #: Whether a hierarchical all-reduce uses gloo's direct exchanges; else NCCL's rings.
    direct: bool = False
    compress: str = "off"  # compression of gradients across clusters
    bucket_bytes: int = 0  # 0: the size that suits the network
    zero: int = 0  # ZeRO stage
    gathers: bool = False  # whether ZeRO 1 all-reduces gradients and gathers updated weights
    hybrid: bool = False  # whether FSDP shards inside clusters only
    prefetch: bool = False  # whether gathers and scatters travel while other layers compute
    virtual: int = 1  # chunks per stage
    overlap: bool = False  # whether gradients are reduced during the last backward pass
    #: Whether enough micro-batches are in flight to hide the stage links.
    hide_stage_links: bool = True
    #: Whether backward passes may be split, and passes follow the best order found.
    splits: bool = False
    slices: bool = True  # whether tensor-parallel ranks share the messages between stages
    tied: bool = True  # whether tied weights may be reduced hierarchically
    compression: str = "off"  # of activations on the slow network: "off", "bf16" or "int8"
    memory_bytes: float = 0.0  # limit for every GPU; 0: the GPUs' memory
    same_reductions: bool = (
        False  # whether all stages on equally many clusters reduce in the same way
    )


def rules_of(engine: EngineTraits, options: Options, direct: bool = False, **more: Any) -> Rules:
    """Return the methods that a job may use: ways to reduce gradients, schedules and compression.

    A method may be used under three conditions:

        The engine is able to run it (EngineTraits.can).
        The user has not disabled the feature of holmes that implements it (options.off, from
        HOLMES_DISABLE).
        If the method has an option, such as --holmes-schedule, the option allows it.

    Args:
        engine: The training engine.
        options: Options of the user.
        direct: Whether a hierarchical all-reduce uses gloo's direct exchanges; else NCCL's rings.
        more: Fields of Rules that do not follow from the other arguments, such as `zero`.
    """

    def can(ability: str) -> bool:
        """Return whether the engine has an ability, and the user has not turned it off."""
        return engine.can(ability, off=options.off)

    compression = options.compress_activations if can("compressed-activations") else "off"
    # If the engine itself reduces hierarchically (hierarchical_zero), holmes only prices flat rings.
    is_hierarchical = can("hierarchical") and engine.hierarchical_zero is None

    return Rules(
        reductions=REDUCTIONS if is_hierarchical else (FLAT,),
        direct=direct,
        compress=options.compress_gradients,  # across clusters; `compression` is of activations
        bucket_bytes=options.bucket_bytes or 0,
        gathers=not engine.scatters,  # an engine that does not scatter gradients all-reduces them
        prefetch=engine.prefetches and not direct,  # gloo's collectives block the computation
        hide_stage_links=can("in-flight") and options.inflight != "off",
        splits=can("schedule") and options.schedule == "auto",  # split backward passes
        slices=can("slices"),  # tensor-parallel ranks share the messages between stages
        tied=can("tied"),  # hierarchical reduction of tied weights
        compression=compression,
        **more,
    )
