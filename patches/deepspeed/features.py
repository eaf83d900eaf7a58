"""Lists the changes of holmes to DeepSpeed, for which releases, and the options that switch them on."""

from dataclasses import replace
from functools import partial

from holmes_ext.patches.engine.patch import Feature
from holmes_ext.plan.engine import AWAITED, EngineTraits
from holmes_ext.plan.sizes import DEFAULT_ORDER

#: Releases whose source was compared with the patches, without a run: the first and last of each minor
#: version.
_READ = ("0.14.4", "0.14.5", "0.15.0", "0.15.4", "0.16.0", "0.17.0", "0.18.0", "0.19.0")
_of = partial(
    Feature,
    versions="deepspeed>=0.14.4,<0.20",
    tried=("0.16.9", "0.17.6", "0.18.9", "0.19.8"),
    read=_READ,
)

P2P = _of("deepspeed-p2p", what="stages of one cluster send over its fabric")
STAGE_LINKS = _of(
    "deepspeed-stage-links",
    option="inflight",
    idle=("off",),
    what="sends between stages do not block",
)
ADAPT = _of(
    "deepspeed-adapt", option="adapt", idle=("off",), what="adapts the plan while the job runs"
)
GRID_CHECK = _of("deepspeed-grid-check", what="checks that the script's pipeline is the plan's")
PARTITION = _of("deepspeed-partition", what="layers of each stage as planned")
CHECKPOINTS = _of(
    "deepspeed-checkpoints", what="refuses checkpoints of another split; writes latest last"
)
OVERLAP = _of(
    "overlap", option="overlap", idle=("off",), what="gradients travel during the last backward"
)
HIERARCHICAL = _of("hierarchical", what="gradients of groups over several clusters hierarchically")
COMPRESS_ACTIVATIONS = _of(
    "deepspeed-compression",
    option="compress_activations",
    idle=("off",),
    what="bf16/int8 activations across clusters",
)
TIED = _of("deepspeed-tied", what="tied weights' gradients cross clusters once, in parts")
PROFILE = _of(
    "deepspeed-profile",
    option="profile",
    idle=("",),
    what="measures layers for holmes plan --profile",
)
JOINED = _of(
    "joined-deepspeed",
    option="join",
    idle=("",),
    binding=True,
    what="jobs that join: the engine takes new weights",
)
TELEMETRY = _of("telemetry-deepspeed", what="where a step begins and ends")

#: Properties of DeepSpeed, for holmes's planner.
DEEPSPEED = EngineTraits(
    "deepspeed",
    AWAITED,
    norm=False,
    averages_loss=True,
    buckets_exceed=False,
    tied_first=True,
    scatters=False,
    resplits=False,
    features={
        "overlap": (OVERLAP.name,),
        "hierarchical": (HIERARCHICAL.name,),
        "tied": (TIED.name,),
        "in-flight": (STAGE_LINKS.name,),
        "compressed-activations": (COMPRESS_ACTIVATIONS.name,),
        "schedule": (STAGE_LINKS.name,),
    },
    limits={
        **dict.fromkeys(("virtual", "context", "expert", "replicas"), (1,)),
        "recompute": ("none", "full"),
        "order": (DEFAULT_ORDER,),
    },
)
#: Megatron-DeepSpeed trains models with experts, too. Its scripts start these without a pipeline ("Currently
#: MoE is not compatible with pipeline parallel", examples_deepspeed/MoE), and DeepSpeed refuses experts
#: under ZeRO 3 ("MoE not supported with Stage 3").
MEGATRON_DEEPSPEED = replace(
    DEEPSPEED,
    limits={name: values for name, values in DEEPSPEED.limits.items() if name != "expert"},
    limits_with_experts={"pipeline": (1,), "zero": (0, 1, 2)},
)

#: Module of this package -> features whose patches it has. The module is imported if one of them is on.
MODULES = {
    "p2p": (P2P, GRID_CHECK),
    "stage_links": (STAGE_LINKS, COMPRESS_ACTIVATIONS),
    "reduce": (OVERLAP,),
    "hierarchical": (HIERARCHICAL, TIED),
    "partition": (PARTITION,),
    "checkpoints": (CHECKPOINTS,),
    "profile": (PROFILE,),
    "telemetry": (TELEMETRY, ADAPT),
}
