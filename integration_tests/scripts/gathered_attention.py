"""Context parallelism without Transformer Engine: megatron-core's own attention after keys and values were
gathered.

megatron-core's DotProductAttention refuses a context size above 1 ("only supported by
TEDotProductAttention"), and Transformer Engine needs CUDA. This one gives the same result (not at the same
cost), so that the rest of context parallelism runs on a CPU.
"""

import copy

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Gather(torch.autograd.Function):
    """Tensors of all ranks, one after the other in dimension 0; backward adds what each rank's use of this
    rank's part gave.
    """

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group, ctx.length = group, tensor.shape[0]
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole[ctx.group.rank() * ctx.length :][: ctx.length], None


def positions(rank: int, size: int, length: int) -> torch.Tensor:
    """Where a rank's tokens stand in the sequence: the example gives it chunks `rank` and 2 x size - 1 -
    rank.
    """
    chunk = length // 2
    return torch.cat([torch.arange(chunk) + chunk * index for index in (rank, 2 * size - 1 - rank)])


class GatheredAttention(DotProductAttention):
    def __init__(self, config, *args, **kwargs):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query, key, value, attention_mask, **kwargs):
        group = parallel_state.get_context_parallel_group()
        size, length = group.size(), query.shape[0]
        there = torch.cat([positions(rank, size, length) for rank in range(size)])
        later = there[None, :] > positions(group.rank(), size, length)[:, None]
        return super().forward(
            query,
            _Gather.apply(key, group),
            _Gather.apply(value, group),
            later[None, None],
            **kwargs,
        )
