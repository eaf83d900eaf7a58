"""What DeepSpeed's pipeline engine does, for the plan."""

from holmes_ext.patches.deepspeed.features import EDGES, NARROW, OVERLAP, TIED, TWO_LEVEL
from holmes_ext.plan.engine import AWAITED, EngineTraits
from holmes_ext.plan.sizes import DEFAULT_ORDER

DEEPSPEED = EngineTraits(
    "deepspeed", AWAITED, norm=False, buckets_exceed=False, tied_first=True, scatters=False,
    features={
        "overlap": (OVERLAP.name,), "two-level": (TWO_LEVEL.name,), "tied": (TIED.name,),
        "in-flight": (EDGES.name,), "narrow": (NARROW.name,),
    },
    limits={
        **dict.fromkeys(("virtual", "context", "expert", "replicas"), (1,)), "recompute": ("none", "full"),
        "order": (DEFAULT_ORDER,),
    },
)  # fmt: skip
