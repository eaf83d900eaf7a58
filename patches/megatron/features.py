"""Lists the changes of holmes to megatron-core, Megatron-LM and Megatron-DeepSpeed, and to which releases.

megatron-core is installed as a package, or runs from a source tree such as Megatron-LM's. Megatron-DeepSpeed
has an old copy of megatron.core (0.2). holmes does not change it.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from holmes_ext.patches.engine.patch import Feature
from holmes_ext.plan.engine import EngineTraits


def loaded_version() -> str | None:
    """Return the version of the megatron.core that the program imports.

    The version is read from megatron.core.package_info, because megatron.core itself is still being imported.
    Return None for the copy in Megatron-DeepSpeed, whose pipeline is DeepSpeed's: there is nothing to patch.
    """
    version = importlib.import_module("megatron.core.package_info").__version__
    if version.startswith("0.2.") and _is_megatron_deepspeed():
        return None
    return version


def _is_megatron_deepspeed() -> bool:
    """Return whether the imported megatron is Megatron-DeepSpeed's.

    Only Megatron-DeepSpeed has a file megatron/arguments.py that adds the flags of DeepSpeed. Megatron-LM has
    moved this file to megatron/training.
    """
    core_folder = Path(sys.modules["megatron.core"].__path__[0])
    arguments_file = core_folder.parent / "arguments.py"
    if not arguments_file.is_file():
        return False
    return "add_config_arguments" in arguments_file.read_text(errors="replace")


def megatron_deepspeed_version() -> str | None:
    """Return the version of Megatron-DeepSpeed's megatron.core, or None for another megatron."""
    arguments_module = sys.modules.get("megatron.arguments")
    if not hasattr(arguments_module, "deepspeed"):
        return None
    return importlib.import_module("megatron.core.package_info").__version__


#: Versions of megatron-core that the features were run with. Up to 0.16 they come from PyPI; later ones are
#: checkouts of Megatron-LM (its main branch is 0.20).
_TRIED = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.20.0")
_core = partial(
    Feature,
    versions="megatron-core>=0.11,<0.21",
    tried=_TRIED,
    read=("0.11.0",),
    version_of=loaded_version,
)
#: Features that need megatron-core 0.14: since then, sends and receives between stages are methods of a
#: class.
_later = partial(_core, versions="megatron-core>=0.14,<0.21", tried=_TRIED[2:], read=())
#: Features of megatron.training. Only a checkout of Megatron-LM has it.
_lm = partial(_core, versions="megatron-lm>=0.14,<0.21", tried=("0.16.1", "0.20.0"), read=())

GROUPS = _core("megatron-groups", what="checks that the groups made are those planned for")
LAYERS = _core("megatron-layers", what="layers of each stage as planned")
REDUCTION = _core(
    "megatron-reduction", what="reductions overlap on every stage, in buckets for its fabric"
)
GATHER = _core(
    "megatron-gather",
    option="overlap",
    idle=("off", "auto"),
    what="updated weights travel during the next forward pass",
)
P2P = _core("megatron-p2p", what="stages of one cluster send over its fabric")
TIED = _later("megatron-tied", what="tied weights' gradients cross clusters once, in parts")
SLICES = _later(
    "megatron-slices", what="tensor ranks each send a slice of activations across clusters"
)
STAGE_LINKS = _later(
    "megatron-stage-links",
    option="inflight",
    idle=("off",),
    what="sends between stages do not block",
)
ADAPT = _later(
    "megatron-adapt", option="adapt", idle=("off",), what="adapts the plan while the job runs"
)
RESTART = _later(
    "megatron-restart",
    option="restart",
    idle=("report",),
    what="after a checkpoint the job starts again with better layers",
)
EXPERTS = _later(
    "megatron-experts",
    option="experts",
    idle=("",),
    binding=True,
    what="experts live where holmes plan --experts placed them",
)
PROFILE = _core(
    "megatron-profile",
    option="profile",
    idle=("",),
    what="measures layers for holmes plan --profile",
)
_JOIN: dict[str, Any] = {"option": "join", "idle": ("",), "binding": True}
JOINED = _later(
    "joined-megatron",
    versions="megatron-core>=0.16,<0.21",
    tried=_TRIED[4:],
    **_JOIN,
    what="jobs that join: the optimizer takes new weights",
)
_PARTS = "joined jobs read different parts of one data set"
JOINED_LM_DATA = _lm("joined-megatron-lm", versions="megatron-lm>=0.16,<0.21", **_JOIN, what=_PARTS)
TELEMETRY = _core("telemetry-megatron", what="where a step begins and ends")
LM = _lm("megatron-lm", what="--holmes flags in pretrain_gpt.py's --help")
LM_CHECKPOINTS = _lm("megatron-lm-checkpoints", what="the plan is kept in checkpoints")
#: Features of Megatron-DeepSpeed.
_mds = partial(
    Feature,
    versions="megatron-deepspeed==0.2.*",
    tried=("0.2.0",),
    version_of=megatron_deepspeed_version,
)
MEGATRON_DEEPSPEED_FLAGS = _mds(
    "megatron-deepspeed-flags", what="--holmes flags in pretrain_gpt.py's --help"
)
JOINED_MDS_DATA = _mds("joined-megatron-deepspeed", **_JOIN, what=_PARTS)
MEGATRON_DEEPSPEED_IMPORTS = _mds(
    "megatron-deepspeed-imports", what="empty stubs for missing imports that a GPT never uses"
)

P2P_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
#: The method step() of each class of optimizer.
OPTIMIZER_STEPS = tuple(
    f"megatron.core.optimizer.optimizer:{name}.step"
    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
)


#: Properties of megatron-core, for holmes's planner.
MEGATRON = EngineTraits(
    "megatron-core",
    features={
        "overlap": (REDUCTION.name,),
        "hierarchical": (REDUCTION.name,),
        "tied": (TIED.name,),
        "in-flight": (STAGE_LINKS.name,),
        "slices": (SLICES.name,),
        "compressed-activations": (SLICES.name,),
    },
    limits={"zero": (0, 1)},
    hierarchical_zero=(1,),
)

#: Module of this package -> features whose patches it has. The module is imported if one of them is on.
MODULES = {
    "unused": (MEGATRON_DEEPSPEED_IMPORTS,),
    "core": (GROUPS, LAYERS),
    "reduce.reduction": (REDUCTION,),
    "reduce.gather": (GATHER,),
    "reduce.tied": (TIED,),
    "p2p": (P2P,),
    "slices": (SLICES,),
    "stage_links": (STAGE_LINKS,),
    "experts": (EXPERTS,),
    "profile": (PROFILE,),
    "flags": (LM, MEGATRON_DEEPSPEED_FLAGS),
    "megatron_lm": (LM, LM_CHECKPOINTS),
    "telemetry": (TELEMETRY, ADAPT, RESTART),
}
