"""What holmes patches in megatron-core (installed, or run from a source tree such as Megatron-LM's, under any
path), Megatron-LM and Megatron-DeepSpeed, which brings a megatron.core of its own (0.2)."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from holmes_ext.patches.engine.patch import Feature
from holmes_ext.plan.engine import EngineTraits


def loaded_version() -> str | None:
    """Of the megatron.core that the program imports, from its package_info (megatron.core is not whole yet);
    None of Megatron-DeepSpeed's copy: its pipeline is DeepSpeed's, there is nothing in it to patch."""
    version = importlib.import_module("megatron.core.package_info").__version__
    return None if version.startswith("0.2.") and _is_megatron_deepspeed() else version


def _is_megatron_deepspeed() -> bool:
    """By the file beside megatron/core that Megatron-LM has moved, and that reads deepspeed's flags."""
    beside = Path(sys.modules["megatron.core"].__path__[0]).parent / "arguments.py"
    return beside.is_file() and "add_config_arguments" in beside.read_text(errors="replace")


def megatron_deepspeed_version() -> str | None:
    """Of the vendored megatron.core; None when the imported megatron is not Megatron-DeepSpeed's."""
    if not hasattr(sys.modules.get("megatron.arguments"), "deepspeed"):
        return None
    return importlib.import_module("megatron.core.package_info").__version__


#: PyPI has megatron-core up to 0.16; what is newer comes from checkouts of Megatron-LM (main: 0.20).
_TRIED = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.20.0")
_core = partial(
    Feature,
    versions="megatron-core>=0.11,<0.21",
    tried=_TRIED,
    read=("0.11.0",),
    version_of=loaded_version,
)
#: Sends and receives of a stage are methods of a class in P2P_MODULE from 0.14 on, functions of it before.
_later = partial(_core, versions="megatron-core>=0.14,<0.21", tried=_TRIED[2:], read=())
#: Megatron-LM is run from its checkout: megatron-core alone has no megatron.training.
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
#: step() of each class of optimizer.
OPTIMIZER_STEPS = tuple(
    f"megatron.core.optimizer.optimizer:{name}.step"
    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
)


#: What it does, for the plan.
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

#: Module of this package -> features of its patches.
MODULES = {
    "unused": (MEGATRON_DEEPSPEED_IMPORTS,),
    "core": (GROUPS, LAYERS),
    "reduce.reduction": (REDUCTION,),
    "reduce.gather": (GATHER,),
    "reduce.tied": (TIED,),
    "p2p": (P2P,),
    "stage_links": (SLICES, STAGE_LINKS),
    "experts": (EXPERTS,),
    "profile": (PROFILE,),
    "flags": (LM, MEGATRON_DEEPSPEED_FLAGS),
    "megatron_lm": (LM, LM_CHECKPOINTS),
    "telemetry": (TELEMETRY, ADAPT, RESTART),
}
