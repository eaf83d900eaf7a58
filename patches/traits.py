"""Maps each framework of `holmes plan --for` to the traits of its training engine.

The planner reads the abilities of the engine from the traits, e.g. whether it overlaps gradient reductions.
"""

from collections.abc import Sequence

from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.deepspeed.features import DEEPSPEED, MEGATRON_DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.patches.torch.features import DDP, FSDP2, LOOP, TORCHTITAN
from holmes_ext.plan.engine import ABILITIES, EngineTraits

#: Framework, as `holmes plan --for` takes it -> traits of its training engine.
ENGINES: dict[str, EngineTraits] = {
    "megatron-lm": MEGATRON,
    "deepspeed": DEEPSPEED,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "ddp": DDP,
    "fsdp2": FSDP2,
    "torch": LOOP,
    "torchtitan": TORCHTITAN,
}


def any_engine() -> EngineTraits:
    """Return the traits that the planner assumes for the training engine of an unknown framework.

    An ability is something that holmes can make an engine do, e.g. "overlap": reduce gradients
    during the backward pass. The unknown engine is assumed to have every ability.

    Each framework provides an ability by features of its own. A feature is a group of patches that
    the user may switch off. It is not known which of them the job needs. The planner therefore
    counts on an ability only if all of its features are on, in every framework.

    Returns:
        Traits that map each ability to the names of its features in all frameworks.
    """
    features_of_ability: dict[str, tuple[str, ...]] = {}
    for ability in ABILITIES:
        names: dict[
            str, None
        ] = {}  # the features that provide the ability: a set that keeps its order
        for engine in ENGINES.values():
            for feature in engine.features.get(ability, ()):
                names[feature] = None
        features_of_ability[ability] = tuple(names)
    return EngineTraits(features=features_of_ability)


def engine_of(framework: str, argv: Sequence[str] = ()) -> EngineTraits:
    """Return the traits of a framework's training engine, for the planner.

    Args:
        framework: A key of ENGINES. "" if it is unknown: then the engine is DeepSpeed's if the training
            script's arguments name a DeepSpeed configuration, else any_engine().
        argv: The training script's arguments.
    """
    if framework:
        return ENGINES[framework]
    if ds_config.from_arguments(list(argv)) is not None:
        return ENGINES["deepspeed"]
    return any_engine()
