"""What torch's own ways to train do, for the plan."""

from holmes_ext.plan.engine import POSTED, EngineTraits

#: A loop or torch.distributed.pipelining, with GradientReducer's buckets.
LOOP = EngineTraits("torch", POSTED, norm=False, reports_loss=False, buckets_exceed=False)
#: DistributedDataParallel.
DDP = EngineTraits("ddp", POSTED, norm=False, reports_loss=False)
