"""Groups that only their members make.

Some ranks are in unequal numbers of groups, where torch's names would differ. Others have a bound
device (as DeepSpeed binds it), where torch would split WORLD, which takes all its ranks.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT_S, run_ranks

from holmes_ext.runtime.backend import timeout_of
from holmes_ext.runtime.groups.mailbox import of_pairs
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.pairs import pair_group
from holmes_ext.runtime.reduce.direct import DirectExchange
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives
from holmes_ext.runtime.reduce.owned import ReduceToOwners

MAKERS = {
    "pair": lambda: members_group([1, 2], "pair"),
    "direct": lambda: DirectExchange([1, 2]),
    "owned": lambda: ReduceToOwners(members_group([1, 2], "data")),
    "a hierarchical all-reduce": lambda: HierarchicalCollectives([[1], [2]]),
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


def bound(rank, name):
    """Start as DeepSpeed does, with a device bound to WORLD.

    torch then looks for a communicator to split at every new_group().
    """
    world, device = dist.group.WORLD, torch.device("cuda", 0)
    world.bound_device_id = device
    dist.distributed_c10d._get_split_source = lambda _: pytest.fail(
        "a split of WORLD, to which rank 0 never comes"
    )
    if rank in (1, 2):
        MAKERS[name]()
    assert world.bound_device_id == device
    world.bound_device_id = None
    return True


@pytest.mark.parametrize("name", MAKERS)
def test_no_group_is_split_off_world_where_a_device_is_bound(name):
    assert run_ranks(bound, 3, name, timeout_s=30) == [True] * 3


@pytest.mark.parametrize("name", MAKERS)
def test_members_find_each_other(name):
    assert run_ranks(unequal, 3, name, timeout_s=30) == [3.0] * 3


#: Others that make groups, of ranks 1 and 2.
MORE = {
    "mailbox": lambda: of_pairs([(1, 2)], dist.get_rank(), {1: 0, 2: 1}, dist.group.WORLD),
    "pair of a pipeline": lambda: pair_group([1, 2], "pair", dist.group.WORLD),
}


def timeouts(rank, name):
    """Of all groups that are made, in seconds."""
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **more: made.append(new_group(*args, **more)) or made[-1]
    if rank in (1, 2):
        {**MAKERS, **MORE}[name]()
    return [timeout_of(group).total_seconds() for group in made]


@pytest.mark.parametrize("name", [*MAKERS, *MORE])
def test_their_timeout_is_the_jobs(name):
    """The groups get the job's timeout.

    torch's own is 10 minutes with NCCL and 30 with gloo, whatever the job gave init_process_group.
    """
    nobody, *members = run_ranks(timeouts, 3, name, timeout_s=30)
    assert nobody == [] and all(set(seconds) == {TIMEOUT_S} for seconds in members), members


def test_the_order_in_which_ranks_are_given_does_not_matter():
    assert run_ranks(shuffled, 2, timeout_s=30) == [2.0] * 2


def shuffled(rank):
    x = torch.ones(1)
    dist.all_reduce(x, group=members_group([0, 1] if rank else [1, 0], "pair"))
    return x.item()
