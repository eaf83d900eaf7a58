"""What megatron-core does, for the plan."""

from holmes_ext.patches.megatron.features import EDGES, REDUCTION, SLICES, TIED
from holmes_ext.plan.engine import EngineTraits

MEGATRON = EngineTraits(
    "megatron-core",
    features={
        "overlap": (REDUCTION.name,), "two-level": (REDUCTION.name,), "tied": (TIED.name,),
        "in-flight": (EDGES.name,), "slices": (SLICES.name,), "narrow": (SLICES.name,),
    },
    limits={"zero": (0, 1)},
    two_level_zero=(1,),
)  # fmt: skip
