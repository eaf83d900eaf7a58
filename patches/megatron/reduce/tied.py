"""megatron-core's shared embedding, whose gradient crosses clusters once for a stage instead of once for each
of its data-parallel ranks: over all ranks of both stages in two levels (runtime/reduce/tied.py).

By then a rank has its stage's average, which counts 1 / d on each of the d ranks. Under the distributed
optimizer it has that of its own shard of a bucket, and nothing of use beside it: zeros are summed there, and
the shard counts once."""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import TIED


@with_session
@by_name
def _all_reduce(
    current, call, instance, model, embd_group, pp_group, weight_getter, skip_if_none=True, config=None
):
    """Sum the gradient of the shared word embedding over all data-parallel ranks of both stages.

    In megatron-core's _allreduce_embedding_grad every rank sends the whole gradient to its counterpart in the
    other stage. The two-level sum over all ranks crosses clusters once for each stage. By then each rank has
    the average of its stage, therefore the sum is divided by the number of ranks of one stage.

    Under the distributed optimizer a rank has that average only in its own shard of the gradient. The rest is
    set to zero, so that each element counts once, and the sum is not divided.
    """
    chunk = _own_chunk(model, pp_group)
    if core.job.sizes is None or not _is_pair_member(embd_group) or chunk is None or call.unread_arguments():
        return call()
    import torch
    from megatron.core.utils import get_attr_wrapped_model

    module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    weight = weight_getter(module)
    gradient = getattr(weight, "main_grad", None)
    if type(gradient) is not torch.Tensor:  # none, or a DTensor
        return call()
    # Imported here, where torch has been loaded already.
    from holmes_ext.runtime.reduce.tied import tied_sum_of

    tied_sum = tied_sum_of(embd_group, core.job.sizes, gradient.device.type)
    if tied_sum is None or not tied_sum.takes(gradient):
        return call()
    shard = own_shard(chunk, weight)
    if shard is None:
        divisor = tied_sum.twins  # data-parallel ranks of one stage
    else:
        divisor = 1
        start, stop = shard
        flat = gradient.view(-1)
        flat[:start].zero_()
        flat[stop:].zero_()
    tied_sum(gradient, divisor)


def _is_pair_member(group: Any) -> bool:
    """Return whether this rank is a member of a group of two; dist.NON_GROUP_MEMBER is no ProcessGroup."""
    import torch.distributed as dist

    return isinstance(group, dist.ProcessGroup) and group.size() == 2


def _own_chunk(model: list[Any], pipeline: Any) -> Any:
    """The chunk of this rank that has the embedding; None where megatron-core's own way stays: other stages,
    the position embeddings of encoders, several optimizer instances, FSDP."""
    if pipeline is None or isinstance(pipeline, list):
        return None
    chunk = {0: model[0], pipeline.size() - 1: model[-1]}.get(pipeline.rank())
    config: Any = getattr(chunk, "ddp_config", None)
    plain = config is not None and not config.use_megatron_fsdp and isinstance(
        getattr(chunk, "buffers", None), list)
    return chunk if plain and config.num_distributed_optimizer_instances == 1 else None


def own_shard(chunk: Any, weight: Any) -> tuple[int, int] | None:
    """Elements [start, stop) of `weight` whose reduced gradient this rank has; None: all.
    (param_and_grad_buffer.py: shard_buffer of each bucket, by rank in its data-parallel group.)"""
    if not chunk.ddp_config.use_distributed_optimizer:
        return None
    buffer = next(candidate for candidate in chunk.buffers if weight in candidate.param_index_map)
    start, stop, number = buffer.param_index_map[weight]
    bucket, group = buffer.buckets[number], buffer.data_parallel_group
    length = bucket.grad_data.numel() // group.size()
    first = bucket.offset + group.rank() * length
    low, high = max(start, first), min(stop, first + length)
    return (low - start, high - start) if low < high else (0, 0)


PATCHES = (
    Patch(TIED, "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
          "every data-parallel rank would send the whole gradient to another cluster", _all_reduce),
)  # fmt: skip
