"""megatron-core's shared embedding: which part of its gradient a rank has under the distributed optimizer."""

from types import SimpleNamespace

import pytest

from holmes_ext.patches.megatron.reduce.tied import own_shard


def chunk(rank, ranks=4, distributed=True, first=128, elements=100):
    """Return a weight of `elements` that starts 20 after its bucket.

    The bucket starts at `first` and has 160 elements.
    """
    weight = object()
    bucket = SimpleNamespace(offset=first, grad_data=SimpleNamespace(numel=lambda: 160))
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    start = first + 20
    buffer = SimpleNamespace(
        param_index_map={weight: (start, start + elements, 1)},
        buckets=[None, bucket],
        data_parallel_group=group,
    )
    other = SimpleNamespace(param_index_map={})
    config = SimpleNamespace(use_distributed_optimizer=distributed)
    return SimpleNamespace(ddp_config=config, buffers=[other, buffer]), weight


@pytest.mark.parametrize("rank, part", [(0, (0, 20)), (1, (20, 60)), (2, (60, 100)), (3, (0, 0))])
def test_the_part_of_this_ranks_shard(rank, part):
    assert own_shard(*chunk(rank)) == part


def test_without_it_every_rank_has_all():
    assert own_shard(*chunk(1, distributed=False)) is None
