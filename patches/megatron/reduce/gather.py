"""Gathers the distributed optimizer's updated weights during the next forward pass (--holmes-overlap on).

With the distributed optimizer each rank updates a shard of the weights. The ranks then gather the shards.
megatron-core's option overlap_param_gather delays the gathers until the forward pass needs them. A program
that does not expect this would read old weights between step() and the forward pass, for example in a
checkpoint.

This module switches the option on in programs that have not set it, and changes two things:

    step()                            starts all gathers at its end, those of the first layers first
    state_dict(), load_state_dict()   wait until the gathers are complete

A program must not read weights in any other way between step() and the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.patches.megatron.features import GATHER

#: Fields of DistributedDataParallelConfig that are true for a model with weights of 8 bits.
_EIGHT_BIT = ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather")


def set_gather_overlap(ddp_config: Any) -> bool:
    """Make the distributed optimizer gather its updated weights during the next forward pass, where possible.

    It is not possible with weights of 8 bits. A program that has set overlap_param_gather keeps its own way.

    Args:
        ddp_config: DistributedDataParallelConfig. It is changed in place. The attribute gather_by_plan is
            holmes's own: it marks a configuration that this function has changed.

    Returns:
        Whether holmes has switched on overlap_param_gather for this model.
    """
    if getattr(ddp_config, "gather_by_plan", False):
        return True  # an earlier chunk of the same model
    if ddp_config.overlap_param_gather:  # the program has set it
        return False
    has_eight_bit_weights = any(getattr(ddp_config, name, False) for name in _EIGHT_BIT)
    if not ddp_config.use_distributed_optimizer or has_eight_bit_weights:
        return False
    is_on = registry().is_on(GATHER.name)  # only with --holmes-overlap on
    ddp_config.overlap_param_gather = is_on
    ddp_config.gather_by_plan = is_on
    return is_on


def finish_gathers_before_state_dict(ddp: Any) -> None:
    """Make a model's state_dict() and load_state_dict() wait for the gathers of its updated weights.

    After the optimizer's step, each rank has updated only a shard of the weights. The weights of a
    bucket group are gathered together. _gather_after_step() starts the gathers of all groups.

    Args:
        ddp: DistributedDataParallel whose configuration set_gather_overlap() has changed.
    """
    for group in _bucket_groups(ddp):
        # When a gather has ended, megatron-core would start that of the group in this attribute. It must not:
        # _gather_after_step() has started all gathers.
        group.next_param_gather_bucket_group = None

    def wait(*_: Any) -> None:
        """Wait until all started gathers of the model's weights are complete.

        torch calls this hook with the module and other arguments. They are not needed.
        """
        for group in _bucket_groups(ddp):
            if group.param_gather_handle is not None:  # a gather has been started
                # Waits for the gather. By default it would also start the next group's.
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    # Programs can call state_dict() of any module in the model.
    for module in ddp.module.modules():
        module.register_state_dict_pre_hook(wait)
        module.register_load_state_dict_pre_hook(wait)


def _bucket_groups(ddp: Any) -> Iterator[Any]:
    """Yield the bucket groups of a model. The weights in a group are gathered by one operation."""
    yield from ddp.bucket_groups
    yield from ddp.expert_parallel_bucket_groups


@by_name
def _gather_after_step(call: Call, instance: Any) -> Any:
    """Start to gather the updated weights at the end of the distributed optimizer's step.

    This wrapper runs in place of DistributedOptimizer.step_with_ready_grads; call() runs the original. With
    overlap_param_gather, that method leaves the gathers to the next forward pass. Until then a program could
    read old weights.

    Buckets are in the order of the backward pass. The forward pass needs the last ones first. Therefore their
    gathers are started in reverse order.
    """
    result = call()
    is_switched_on_by_holmes = getattr(instance.ddp_config, "gather_by_plan", False)
    if not is_switched_on_by_holmes:
        return result
    # Only buckets of this optimizer: experts have another optimizer, which steps later.
    bucket_ids = {id(bucket) for buffer in instance.buffers for bucket in buffer.buckets}
    for chunk in instance.model_chunks:
        for group in reversed(list(_bucket_groups(chunk))):
            belongs_to_optimizer = id(group.buckets[0]) in bucket_ids
            if belongs_to_optimizer and not group.param_gather_dispatched:
                group.start_param_sync()
    return result


PATCHES = (
    Patch(
        GATHER,
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
        "the gathers must be started before the program can read the weights",
        _gather_after_step,
    ),
)
