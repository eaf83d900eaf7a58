"""Lists the features of holmes for torch: groups of patches that are applied together.

Each feature names the versions of torch that it is for and was run with. The module also describes, for the
planner, the ways of training that torch itself offers (DistributedDataParallel, FSDP2, a hand-written loop).
"""

from functools import partial
from typing import Any

from holmes_ext.patches.engine.patch import Feature
from holmes_ext.plan.engine import PAIRED, POSTED, EngineTraits
from holmes_ext.plan.sizes import DEFAULT_ORDER

_TRIED = (
    "2.6.0",
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
    "2.15.0",
)
_of = partial(Feature, versions="torch>=2.6", tried=_TRIED)
#: A feature that also supports releases before 2.6. Of these, only the Python sources were compared
#: (torch/distributed, _C/_distributed_c10d.pyi).
_older = partial(_of, versions="torch>=2.4", read=("2.4.1", "2.5.1"))

RANKS = _older("ranks", what="ranks are numbered by the plan; rank 0 may run on another node")
NICS = _older("nics", what="every process group gets the fastest network of its members")
JOINED = _older(
    "joined-torch",
    option="join",
    idle=("",),
    binding=True,
    what="jobs that join: weights, steps and parts of the data set",
)
TELEMETRY = _older("telemetry", what="times operations, for reports and the watchdog")
# Older versions of torch do not have the functions that these two features patch (Patch.only).
FAILURES = Feature(
    "nccl-failures",
    "torch>=2.4",
    tried=("2.13.0", "2.15.0"),
    read=("2.7.1", "2.10.0", "2.14.1"),
    what="failures of NCCL are reported before torch ends the process",
)
CHANGED_GROUPS = Feature(
    "changed-groups",
    "torch>=2.4",
    tried=("2.13.0", "2.15.0"),
    read=("2.10.0", "2.14.1"),
    what="groups that lose or change their ranks keep a planned network",
)
DDP_HOOK = _of("ddp", what="DistributedDataParallel sums hierarchically across clusters")
FSDP = _of("fsdp", what="FSDP: predicts the cost of sharding; hybrid sharding")
SCHEDULE = _of(
    "torch-schedule",
    option="schedule",
    idle=("1f1b",),
    versions="torch>=2.8",
    tried=_TRIED[2:],
    what="torch's pipelining: runs passes in the order of the plan",
)
PIPELINING = _of(
    "pipelining",
    what="torch's pipelining: stages use their fastest fabric, and do not wait for reductions",
)
LATE_START = _of(
    "late-start",
    enabling_function="holmes_ext.initialize_model_parallel",
    what="init_process_group postpones NCCL's first communicator to the first operation",
)

# Traits of torch's ways of training, for the planner.

_NON_DATA_SIZES = ("tensor", "context", "expert", "pipeline", "virtual")
#: Limits of an engine that supports only data parallelism: every other parallel size is 1.
_DATA_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NON_DATA_SIZES, (1,)),
    "recompute": ("none", "full"),
}
_engine = partial(EngineTraits, norm=False, reports_loss=False)

#: A hand-written training loop, or torch.distributed.pipelining, with the buckets of GradientReducer. After
#: each pass, Schedule1F1B sends its output and receives the input of the next pass, and waits for both.
LOOP = _engine(
    "torch",
    PAIRED,
    buckets_exceed=False,
    breadth_first=True,
    features={"overlap": (), "hierarchical": (), "schedule": (SCHEDULE.name,)},
    limits={
        "tensor": (1,),
        "context": (1,),
        "expert": (1,),
        "zero": (0,),
        "recompute": ("none", "full"),
    },
)
#: DistributedDataParallel; Hugging Face's Trainer and Lightning use it, too.
DDP = _engine(
    "ddp",
    POSTED,
    overlaps="on",
    features={"overlap": (), "hierarchical": (DDP_HOOK.name,)},
    limits={**_DATA_ONLY, "zero": (0,)},
)
FSDP2 = _engine("fsdp2", POSTED, prefetches=True, features={}, limits={**_DATA_ONLY, "zero": (3,)})
TORCHTITAN = _engine(
    "torchtitan",
    PAIRED,
    prefetches=True,
    features={"overlap": (), "hierarchical": ()},
    limits={"zero": (1, 3), "clusters": ("pipeline", "data"), "order": (DEFAULT_ORDER,)},
    hierarchical_zero=(1,),
    breadth_first=True,
)

#: Module of this package -> the features of its patches.
MODULES = {
    "groups": (RANKS, NICS),
    "messages": (NICS,),
    "late_start": (LATE_START,),
    "shrink": (CHANGED_GROUPS,),
    "torchcomms": (NICS,),
    "ddp": (DDP_HOOK,),
    "fsdp": (FSDP,),
    "schedule": (SCHEDULE,),
    "pipelining": (PIPELINING,),
    "telemetry": (TELEMETRY,),
    "failures": (FAILURES,),
}
#: Module of this package -> the subpackage of torch that it patches. Other modules patch what every program
#: imports; these are needed only by a program that imports the subpackage.
PACKAGES = {
    "fsdp": "torch.distributed.fsdp",
    "schedule": "torch.distributed.pipelining",
    "pipelining": "torch.distributed.pipelining",
}
