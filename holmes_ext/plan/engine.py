"""What an engine does, as far as a plan needs it: a value that its room in patches/ supplies.

plan/ knows no engine by name. What differs between them is a field here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.errors import HolmesError

#: How a stage awaits what it sends and receives: each operation by itself; those of a pass together with what
#: the next one needs; or receives are posted beforehand and nobody waits for sends.
SENDS = AWAITED, PAIRED, POSTED = "awaited", "paired", "posted"
#: What holmes can do in an engine: reduce under the last backward; sum in two levels, of a tied weight too;
#: have more micro-batches in flight; cut what crosses into slices; round it; run a plan's own passes,
#: backward passes in two among them.
ABILITIES = "overlap", "two-level", "tied", "in-flight", "slices", "narrow", "passes"


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
    #: ZeRO stages under which it sums in two levels itself, by flags of its own: all stages over as many
    #: clusters, or none. None: holmes does it, stage by stage.
    two_level_zero: tuple[int, ...] | None = None
    #: It has schedules that run all micro-batches of a chunk before the next one (LoopedBFS).
    breadth_first: bool = False

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise HolmesError(f"engine {self.name}: sends {self.sends!r} is none of {', '.join(SENDS)}")
        for ability in self.features:
            if ability not in ABILITIES:
                known = ", ".join(ABILITIES)
                raise HolmesError(f"engine {self.name}: features {ability!r} is none of {known}")

    def can(self, ability: str, off: Collection[str] = ()) -> bool:
        """off: features that are switched off."""
        return ability in self.features and not set(self.features[ability]) & set(off)
