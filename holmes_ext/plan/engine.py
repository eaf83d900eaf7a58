"""What an engine does, as far as a plan needs it, and what a job may do by engine, options and network API.

    EngineTraits                         a value that the engine's room in patches/ supplies
    rules_of(engine, options, direct)    ->  Rules: what prices and decisions may count on

plan/ knows no engine by name. What differs between them is a field of EngineTraits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError

if TYPE_CHECKING:
    from holmes_ext.options import Options

#: How a stage awaits what it sends and receives: each operation by itself; those of a pass together with what
#: the next one needs; or receives are posted beforehand and nobody waits for sends.
SENDS = AWAITED, PAIRED, POSTED = "awaited", "paired", "posted"
#: What holmes can do in an engine: reduce under the last backward; sum hierarchically, of a tied weight too;
#: have more micro-batches in flight; cut what crosses into slices; round it; run a plan's own passes,
#: backward passes in two among them.
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
    """The defaults are megatron-core's: what most engines do."""

    name: str = ""
    sends: str = PAIRED
    #: The gradients' norm is summed over a pipeline's stages before the optimizer.
    norm: bool = True
    #: The loss is averaged over the last stage's data-parallel ranks at a step's end.
    averages_loss: bool = False
    #: Then every stage is told it.
    reports_loss: bool = True
    #: A bucket ends with the gradient that reaches the limit, not before it.
    buckets_exceed: bool = True
    #: A tied gradient is summed before the stage's own, and is final after the backward pass only.
    tied_first: bool = False
    #: Reductions that it puts under the last backward without holmes: "off", "first" (of the first stage),
    #: "on".
    overlaps: str = "off"
    #: The next layer's sharded weights, and the last one's gradients, travel while a layer computes (NCCL;
    #: gloo's collectives on CPUs are waited for).
    prefetches: bool = False
    #: ZeRO 1 scatters gradients; else it all-reduces them.
    scatters: bool = True
    #: Ability -> features of holmes (HOLMES_DISABLE's names) that it takes. What is missing cannot be done.
    features: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(ABILITIES, ()), hash=False
    )
    #: Its checkpoints load where stages have other layers.
    resplits: bool = True
    #: Of what a search may choose (planner/search/space.py, NAMES), what it can run.
    limits: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    #: ZeRO stages under which it sums hierarchically itself, by flags of its own: all stages over as many
    #: clusters, or none. None: holmes does it, stage by stage.
    hierarchical_zero: tuple[int, ...] | None = None
    #: It has schedules that run all micro-batches of a chunk before the next one (LoopedBFS).
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

    def can(self, ability: str, off: Collection[str] = ()) -> bool:
        """off: features that are switched off."""
        return ability in self.features and not set(self.features[ability]) & set(off)


FLAT, HIERARCHICAL = REDUCTIONS = "flat", "hierarchical"


@dataclass(frozen=True)
class Rules:
    """The defaults: all that holmes can do without being asked."""

    #: Ways to sum gradients that are allowed, of REDUCTIONS.
    reductions: tuple[str, ...] = REDUCTIONS
    #: gloo's exchanges; else NCCL's rings.
    direct: bool = False
    compress: str = "off"
    #: Of a bucket; 0: as suits the network.
    bucket_bytes: int = 0
    zero: int = 0
    #: ZeRO 1 all-reduces gradients, hierarchically too, and gathers updated weights over all ranks.
    gathers: bool = False
    #: FSDP's shards inside clusters.
    hybrid: bool = False
    #: Gathers and scatters travel while other layers compute.
    prefetch: bool = False
    #: Chunks of a stage.
    virtual: int = 1
    #: Gradients are reduced under the last backward.
    overlap: bool = False
    #: As many micro-batches are in flight as hide the pipeline's stage links.
    hide_stage_links: bool = True
    #: Backward passes may be in two, and passes follow the order with the least step that is found.
    splits: bool = False
    #: Tensor ranks share out what crosses; tied weights are summed hierarchically.
    slices: bool = True
    tied: bool = True
    #: What activations are rounded to on the slow network: "off", "bf16", "int8".
    compression: str = "off"
    #: Of every GPU; 0: what the GPUs have.
    memory_bytes: float = 0.0
    #: All stages that lie on as many clusters reduce alike.
    alike: bool = False


def rules_of(engine: EngineTraits, options: Options, direct: bool = False, **more: Any) -> Rules:
    """direct: see Rules; more: its other fields."""

    def able(ability: str) -> bool:
        return engine.can(ability, options.off)

    return Rules(
        reductions=REDUCTIONS
        if able("hierarchical") and engine.hierarchical_zero is None
        else (FLAT,),
        direct=direct,
        compress=options.compress_gradients,
        bucket_bytes=options.bucket_bytes or 0,
        gathers=not engine.scatters,
        prefetch=engine.prefetches and not direct,
        hide_stage_links=able("in-flight") and options.inflight != "off",
        splits=able("schedule") and options.schedule == "auto",
        slices=able("slices"),
        tied=able("tied"),
        compression=options.compress_activations if able("compressed-activations") else "off",
        **more,
    )
