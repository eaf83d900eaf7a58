"""Sends the gradient of a shared embedding between clusters once for each pipeline stage.

If a model's input and output embeddings share a weight, the first and the last pipeline stage have a copy
each, and sum their gradients. In megatron-core each of the d data-parallel ranks of a stage sends the whole
gradient to its counterpart in the other stage. Between clusters it thus travels d times.

This module sums over all ranks of both stages hierarchically instead (runtime/reduce/tied.py): first inside
each cluster, then between clusters, where a rank sends 1 / d of the bytes, and then inside each cluster
again.

Before this sum, megatron-core has averaged the gradients over the data-parallel ranks of each stage:

    without the distributed optimizer    Every rank has the whole average, and the sum counts it d times.
                                         Therefore the sum is divided by d.
    with the distributed optimizer       A rank has the average of its own shard only. It sets the other
                                         elements to zero, and each shard counts once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import TIED
from holmes_ext.runtime.session import Session

PAIR_SIZE = 2  # ranks in the group of the two stages that share an embedding


class ElementRange(NamedTuple):
    """Consecutive elements of a weight's gradient, counted from the start of the weight."""

    start: int
    stop: int  # the index after the last element


@with_session
@by_name
def _all_reduce(
    current: Session,
    call: Call,
    instance: Any,
    model: Any,
    embd_group: Any,
    pp_group: Any,
    weight_getter: Any,
    skip_if_none: Any = True,
    config: Any = None,
) -> Any:
    """Sum the gradient of the shared word embedding over all data-parallel ranks of both pipeline stages.

    This wrapper runs in place of megatron-core's _allreduce_embedding_grad; call() runs the original. In that
    function every rank sends the whole gradient to its counterpart in the other stage. The hierarchical sum
    sends the gradient between clusters only once for each stage.

    Before the sum each rank has the average of its stage. Therefore the sum is divided by the number of ranks
    of a stage. With the distributed optimizer, a rank has only the average of its shard. It sets all other
    elements to zero, and the sum is not divided.
    """
    if core.job.sizes is None:  # no plan describes this job
        return call()
    # skip_if_none and config are not read. They are parameters so that unread_arguments() does not list them.
    chunk = _chunk_with_embedding(model, pp_group)

    # embd_group has the two ranks with a copy of the embedding.
    if chunk is None or not _is_pair_member(embd_group):
        return call()

    # Arguments that this wrapper does not have. A later megatron-core may pass some, and call() handles them.
    if call.unread_arguments():
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
    if tied_sum is None:  # the plan has no hierarchical sum for these ranks
        return call()
    if not tied_sum.takes(gradient):  # not faster for so few bytes
        return call()
    shard = own_shard(chunk, weight)
    if shard is None:
        # Without the distributed optimizer, every rank of a stage adds the same average. The sum counts it
        # once for each rank, and is divided by their number.
        divisor = tied_sum.ranks_per_stage  # the number of data-parallel ranks of one stage
    else:
        # With it, one rank of a stage has the average of an element, and the others add zero. The sum counts
        # the average once, and is not divided.
        divisor = 1
        flat = gradient.view(-1)
        flat[: shard.start].zero_()
        flat[shard.stop :].zero_()
    tied_sum(gradient, divisor)  # in place: sums and divides
    return None  # like _allreduce_embedding_grad


def _is_pair_member(group: Any) -> bool:
    """Return whether a process group has two members, and this rank is one of them."""
    import torch.distributed as dist

    # On other ranks torch's new_group() returns NON_GROUP_MEMBER, which is no ProcessGroup.
    return isinstance(group, dist.ProcessGroup) and group.size() == PAIR_SIZE


def _chunk_with_embedding(model: list[Any], pipeline_group: Any) -> Any:
    """Return this rank's chunk with the shared embedding; None if holmes cannot sum its gradient.

    The input and output embeddings share a weight. The first and the last pipeline stage have a
    copy each, and their gradients must be summed. holmes can do so only if all of these conditions
    hold:

    - The rank is on the first or the last stage of a single pipeline.
    - The chunk is in a DistributedDataParallel, but not in Megatron-FSDP.
    - Its distributed optimizer, if any, has one instance.

    Otherwise the result is None: megatron-core sums the gradient if this rank has one.

    Args:
        model: The chunks of the model on this rank.
        pipeline_group: Process group of the pipeline; a list if the rank is in several pipelines;
            None if the program passed none.
    """
    if pipeline_group is None or isinstance(pipeline_group, list):
        return None
    stage = pipeline_group.rank()
    if stage == 0:
        chunk = model[0]  # with the input embedding
    elif stage == pipeline_group.size() - 1:
        chunk = model[-1]  # with the output embedding
    else:
        return None
    ddp_config = getattr(chunk, "ddp_config", None)
    if ddp_config is None or ddp_config.use_megatron_fsdp:
        return None

    # own_shard() looks up the embedding in the list of gradient buffers.
    if not isinstance(getattr(chunk, "buffers", None), list):
        return None

    # own_shard() assumes that a bucket is sharded over all data-parallel ranks. Each of several instances
    # shards it over its own ranks only.
    if ddp_config.num_distributed_optimizer_instances != 1:
        return None
    return chunk


def own_shard(chunk: Any, weight: Any) -> ElementRange | None:
    """Return the elements of a weight's gradient that this rank has reduced under the distributed optimizer.

    The distributed optimizer cuts each bucket of gradients into equal shards, one for each data-parallel
    rank. A rank averages only its own shard.

    Args:
        chunk: DistributedDataParallel with the weight.

    Returns:
        The range is empty, from 0 to 0, if this rank's shard has none of the weight. None without
        the distributed optimizer: the rank has all elements.
    """
    if not chunk.ddp_config.use_distributed_optimizer:
        return None
    buffer = next(candidate for candidate in chunk.buffers if weight in candidate.param_index_map)

    # Start and stop are indices in the buffer.
    weight_start, weight_stop, bucket_index = buffer.param_index_map[weight]
    bucket = buffer.buckets[bucket_index]
    group = buffer.data_parallel_group
    shard_size = bucket.grad_data.numel() // group.size()
    shard_start = bucket.offset + group.rank() * shard_size

    # The overlap of weight and shard, as indices in the buffer.
    start = max(weight_start, shard_start)
    stop = min(weight_stop, shard_start + shard_size)
    if start >= stop:  # no overlap
        return ElementRange(start=0, stop=0)
    return ElementRange(start=start - weight_start, stop=stop - weight_start)


PATCHES = (
    Patch(
        TIED,
        "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
        "megatron-core sends the whole gradient to another cluster from every data-parallel rank",
        _all_reduce,
    ),
)
