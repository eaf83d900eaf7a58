"""What torch's own ways to train do, for the plan."""

from functools import partial
from typing import Any

from holmes_ext.patches.torch.features import DDP as DDP_HOOK
from holmes_ext.patches.torch.features import PASSES
from holmes_ext.plan.engine import PAIRED, POSTED, EngineTraits
from holmes_ext.plan.sizes import DEFAULT_ORDER

_SIZES = "tensor", "context", "expert", "pipeline", "virtual"
_DATA_ONLY: dict[str, tuple[Any, ...]] = {**dict.fromkeys(_SIZES, (1,)), "recompute": ("none", "full")}
_of = partial(EngineTraits, norm=False, reports_loss=False)

#: A loop or torch.distributed.pipelining, with GradientReducer's buckets. Schedule1F1B exchanges what a pass
#: made with what the next one needs, and waits for both.
LOOP = _of(
    "torch", PAIRED, buckets_exceed=False, breadth_first=True,
    features={"overlap": (), "two-level": (), "passes": (PASSES.name,)},
    limits={**dict.fromkeys(_SIZES[:3], (1,)), "zero": (0,), "recompute": ("none", "full")},
)  # fmt: skip
#: DistributedDataParallel: Hugging Face's Trainer, Lightning.
DDP = _of(
    "ddp", POSTED, overlaps="on", features={"overlap": (), "two-level": (DDP_HOOK.name,)},
    limits={**_DATA_ONLY, "zero": (0,)},
)  # fmt: skip
FSDP2 = _of("fsdp2", POSTED, prefetches=True, features={}, limits={**_DATA_ONLY, "zero": (3,)})
TORCHTITAN = _of(
    "torchtitan", PAIRED, prefetches=True, features={"overlap": (), "two-level": ()},
    limits={"zero": (1, 3), "clusters": ("pipeline", "data"), "order": (DEFAULT_ORDER,)},
    two_level_zero=(1,), breadth_first=True,
)  # fmt: skip
