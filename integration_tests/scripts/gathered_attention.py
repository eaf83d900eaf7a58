"""Attention for megatron-core with context parallelism on CPUs, without Transformer Engine.

megatron-core's DotProductAttention refuses a context size above 1 ("only supported by
TEDotProductAttention"), and Transformer Engine needs CUDA. This class gathers keys and values of all ranks
and calls DotProductAttention. It has the same result, though not the same cost, so that the rest of context
parallelism runs on a CPU.
"""

import copy

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Gather(torch.autograd.Function):
    """All-gather along dimension 0, whose backward pass adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        ctx.length = tensor.shape[0]
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank() * ctx.length :][: ctx.length], None


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Return the positions of a rank's tokens in the sequence.

    The example gives each rank two chunks: numbers `rank` and 2 x size - 1 - rank.
    """
    chunk = length // 2
    return torch.cat([torch.arange(chunk) + chunk * index for index in (rank, 2 * size - 1 - rank)])


class GatheredAttention(DotProductAttention):
    """DotProductAttention of a rank's queries with the keys and values of all context-parallel ranks."""

    def __init__(self, config, *args, **kwargs):
        config = copy.copy(config)
        config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)

    def forward(self, query, key, value, attention_mask, **kwargs):
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        length = query.shape[0]
        key_positions = torch.cat([positions(rank, size, length) for rank in range(size)])
        query_positions = positions(group.rank(), size, length)
        # A query must not attend to later keys. Shape: (1, 1, queries, keys)
        mask = (key_positions[None, :] > query_positions[:, None])[None, None]
        keys = _Gather.apply(key, group)
        values = _Gather.apply(value, group)
        return super().forward(query, keys, values, mask, **kwargs)
