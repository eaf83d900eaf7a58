"""The distributed optimizer's weights travel during the next forward pass, in programs that never heard of it
(--holmes-overlap on).

megatron-core's overlap_param_gather starts the gather in the forward pass; until then the weights that a
program sees are old, and it has to know (start_param_sync before each checkpoint, on all ranks). Here step()
starts every bucket's gather, the first that the forward pass needs first, and state_dict() waits for all of
them. What is left to the program: tensors that it reads by itself, between step() and the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.megatron.features import GATHER

_EIGHT_BIT = ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather")


def turn_on(ddp_config: Any) -> bool:
    """Set overlap_param_gather in place where it is asked for (features.py), unless the program did, or has
    weights that it does not suit; whether it is ours."""
    if getattr(ddp_config, "gather_by_plan", False):
        return True  # an earlier chunk of the same model
    eight_bit = any(getattr(ddp_config, name, False) for name in _EIGHT_BIT)
    if ddp_config.overlap_param_gather or not ddp_config.use_distributed_optimizer or eight_bit:
        return False
    ddp_config.overlap_param_gather = ddp_config.gather_by_plan = registry().is_on(GATHER.name)
    return ddp_config.gather_by_plan


def prepare(ddp: Any) -> None:
    """A DistributedDataParallel after turn_on(): reading or loading weights waits for their gathers."""
    for group in _groups(ddp):
        group.next_param_gather_bucket_group = None  # step() starts them all

    def wait(*_) -> None:
        for group in _groups(ddp):
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    for module in ddp.module.modules():
        module.register_state_dict_pre_hook(wait)
        module.register_load_state_dict_pre_hook(wait)


def _groups(ddp: Any) -> Iterator[Any]:
    yield from ddp.bucket_groups
    yield from ddp.expert_parallel_bucket_groups


@by_name
def _gather_after_step(call, instance):
    """Start the gathers of all weights right after the distributed optimizer's step.

    With overlap_param_gather, step_with_ready_grads leaves the gathers to the next forward pass. A program
    that does not know of it could read old weights until then. Groups of buckets are started in reverse: the
    buckets are in the order of the backward pass, and the forward pass needs the last ones first.
    """
    result = call()
    if not getattr(instance.ddp_config, "gather_by_plan", False):
        return result
    # Only this optimizer's buckets: experts have another optimizer, which steps later.
    bucket_ids = {id(bucket) for buffer in instance.buffers for bucket in buffer.buckets}
    for chunk in instance.model_chunks:
        for group in reversed(list(_groups(chunk))):
            if id(group.buckets[0]) in bucket_ids and not group.param_gather_dispatched:
                group.start_param_sync()
    return result


PATCHES = (
    Patch(GATHER, "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
          "the gather is to be under way before anything can read the weights", _gather_after_step),
)  # fmt: skip
