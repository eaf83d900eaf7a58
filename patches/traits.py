"""The engine of each framework, as a plan knows it."""

from collections.abc import Sequence

from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.patches.torch.features import DDP, FSDP2, LOOP, TORCHTITAN
from holmes_ext.plan.engine import ABILITIES, EngineTraits

#: By the names of `holmes plan --for`.
ENGINES: dict[str, EngineTraits] = {
    "megatron-lm": MEGATRON,
    "deepspeed": DEEPSPEED,
    "megatron-deepspeed": DEEPSPEED,
    "ddp": DDP,
    "fsdp2": FSDP2,
    "torch": LOOP,
    "torchtitan": TORCHTITAN,
}


def any_engine() -> EngineTraits:
    """Where nobody knows which it is: what any of them can, while no feature of any of them for it is off."""
    features: dict[str, tuple[str, ...]] = {}
    for ability in ABILITIES:
        needed = (name for engine in ENGINES.values() for name in engine.features.get(ability, ()))
        features[ability] = tuple(dict.fromkeys(needed))
    return EngineTraits(features=features)


def engine_of(framework: str, argv: Sequence[str] = ()) -> EngineTraits:
    """framework: "" where it cannot be told; then a ds_config among the script's arguments tells."""
    if not framework and ds_config.from_arguments(list(argv)) is not None:
        framework = "deepspeed"
    return ENGINES[framework] if framework else any_engine()
