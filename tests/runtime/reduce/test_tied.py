"""The gradient of a shared weight, summed over both stages hierarchically.

The result is that of the engines, for fewer bytes across.
"""

import torch
import torch.distributed as dist
from carriers import DEVICE, ON_GPUS
from clusters import example
from ranks import run_ranks

from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce.tied import made, tied_sum_of
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

SIZE = 1001


def own(rank):
    """On the CPU: the ranks' device has other random numbers than the caller's."""
    return torch.randn(7, SIZE // 7, generator=torch.Generator().manual_seed(rank), device="cpu")


def summed(rank):
    """Sum a tied gradient with pipeline 2 x data 2.

    Returns:
        (as DeepSpeed's ranks have it, as a distributed optimizer's, bytes across, no session)
    """
    pairs = [dist.new_group([first, first + 2]) for first in (0, 1)]
    group, sizes = pairs[rank % 2], Sizes(2).complete(4)
    without = tied_sum_of(group, sizes, DEVICE)
    site = example()
    plan = build_plan(site, sizes)
    session.set_active(
        Session(Options(), Process(rank, 4, 0, 1, "", 0, ""), site, plan, rank, maker=maker)
    )
    made.clear()
    tied_sum = tied_sum_of(group, sizes, DEVICE)
    local = own(rank).to(DEVICE)
    assert tied_sum.takes(local) and not tied_sum.takes(local.t())
    tied_sum(local, tied_sum.ranks_per_stage)
    crossed = 0 if ON_GPUS else tied_sum.reduction.bytes_across
    shard = own(rank).view(-1).to(DEVICE)
    shard[: 300 if rank % 2 else 0] = (
        0  # rank 0 of a stage owns the first 300 elements, rank 1 the others
    )
    shard[SIZE if rank % 2 else 300 :] = 0
    tied_sum(shard, 1)
    kinds = sorted(
        {
            dist.distributed_c10d._world.pg_names[one]
            for one in dist.distributed_c10d._world.pg_map
            if "embedding" in (one.group_desc or "")
        }
    )
    session.set_active(None)
    return local, shard, crossed, without, len(kinds)


def test_it_is_the_average_of_the_pairs_sums():
    done = run_ranks(summed, 4)
    wanted = sum(own(rank) for rank in range(4)) / 2
    for rank, (local, shard, crossed, without, kinds) in enumerate(done):
        assert torch.allclose(local, wanted, atol=1e-6) and torch.equal(local, done[0][0])
        both = torch.cat(
            [
                sum(own(owner).view(-1) for owner in (0, 2))[:300],
                sum(own(owner).view(-1) for owner in (1, 3))[300:],
            ]
        )
        assert torch.allclose(shard, both, atol=1e-6), rank
        assert crossed <= 4 * (SIZE // 2 + 1), "half of what pairs send"
        assert without is None and kinds == (3 if ON_GPUS else 4)
