"""What torch's own ways to train do, for the plan."""

from holmes_ext.patches.torch.features import DDP as DDP_HOOK
from holmes_ext.plan.engine import POSTED, EngineTraits

#: A loop or torch.distributed.pipelining, with GradientReducer's buckets.
LOOP = EngineTraits(
    "torch", POSTED, norm=False, reports_loss=False, buckets_exceed=False,
    features={"overlap": (), "two-level": ()},
)  # fmt: skip
#: DistributedDataParallel.
DDP = EngineTraits(
    "ddp", POSTED, norm=False, reports_loss=False,
    features={"overlap": (), "two-level": (DDP_HOOK.name,)},
)  # fmt: skip
