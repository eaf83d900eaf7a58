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
    """_allreduce_embedding_grad, of word embeddings."""
    chunk = _own_chunk(model, pp_group)
    if core.job.sizes is None or not _in(embd_group) or chunk is None or call.unknown():
        return call()
    import torch
    from megatron.core.utils import get_attr_wrapped_model

    module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    weight = weight_getter(module)
    gradient = getattr(weight, "main_grad", None)
    if type(gradient) is not torch.Tensor:  # none, or a DTensor
        return call()
    from holmes_ext.runtime.reduce.tied import tied_sum_of  # torch is there by now

    tied_sum = tied_sum_of(embd_group, core.job.sizes, gradient.device.type)
    if tied_sum is None or not tied_sum.takes(gradient):
        return call()
    if (shard := own_shard(chunk, weight)) is not None:
        flat, (start, stop) = gradient.view(-1), shard
        flat[:start].zero_()
        flat[stop:].zero_()
    tied_sum(gradient, tied_sum.twins if shard is None else 1)


def _in(group: Any) -> bool:
    import torch.distributed as dist

    return isinstance(group, dist.ProcessGroup) and group.size() == 2  # NON_GROUP_MEMBER is none


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
