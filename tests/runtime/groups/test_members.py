"""Groups that only their members make, on ranks that are in unequal numbers of groups: torch's names would differ."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.direct import DirectExchange
from holmes_ext.runtime.reduce.owned import ReduceToOwners
from holmes_ext.runtime.reduce.two_level_nccl import TwoLevelCollectives

MAKERS = {
    "pair": lambda: members_group([1, 2], "pair"),
    "direct": lambda: DirectExchange([1, 2]),
    "owned": lambda: ReduceToOwners(members_group([1, 2], "data")),
    "two levels": lambda: TwoLevelCollectives([[1], [2]]),
}


def unequal(rank, name):
    """Rank 1 is in one group more than rank 2."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    if rank in (1, 2):
        made = [MAKERS[name]() for _ in range(2)]  # and once more: the names do not come back
        assert made[0] is not made[1]
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("name", MAKERS)
def test_members_find_each_other(name):
    assert run_ranks(unequal, 3, name, timeout_s=30) == [3.0] * 3


def test_the_order_in_which_ranks_are_given_does_not_matter():
    assert run_ranks(shuffled, 2, timeout_s=30) == [2.0] * 2


def shuffled(rank):
    x = torch.ones(1)
    dist.all_reduce(x, group=members_group([0, 1] if rank else [1, 0], "pair"))
    return x.item()
