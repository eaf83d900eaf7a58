"""What megatron-core does, for the plan."""

from holmes_ext.plan.engine import EngineTraits

MEGATRON = EngineTraits("megatron-core")
