"""What DeepSpeed's pipeline engine does, for the plan."""

from holmes_ext.plan.engine import AWAITED, EngineTraits

DEEPSPEED = EngineTraits(
    "deepspeed", AWAITED, norm=False, buckets_exceed=False, tied_first=True, scatters=False,
)  # fmt: skip
