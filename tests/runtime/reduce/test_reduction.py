"""All ways to sum gradients have the interface Reduction."""

import torch
import torch.distributed as dist
from clusters import example
from ranks import run_ranks

from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.runtime import hooks, session
from holmes_ext.runtime.reduce.flat_bucket import FlatBucket, Item
from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives
from holmes_ext.runtime.reduce.owned import ReduceToOwners
from holmes_ext.runtime.reduce.planned import PlannedReduction
from holmes_ext.runtime.reduce.reduction import CallersReduction, FlatReduction
from holmes_ext.runtime.start.launcher import Process

CLUSTERS = [[0, 1], [2, 3]]


def start_sum(flat):
    return dist.all_reduce(flat, async_op=True)


def summed(rank):
    """Return for each kind of reduction (class, multiple, sums on this rank)."""
    parameters = [torch.nn.Parameter(torch.empty(2)) for _ in range(4)]
    items = [Item.of(str(number), parameter, None) for number, parameter in enumerate(parameters)]
    bucket = FlatBucket((0, 1, 2, 3), items)
    bucket.spans = [(2, owner) for owner in range(4)]
    world = dist.group.WORLD
    reductions = [
        FlatReduction(world),
        CallersReduction(start_sum),
        HierarchicalAllReduce(CLUSTERS, chunk_bytes=1024),
        HierarchicalCollectives(CLUSTERS, chunk_bytes=1024),
        ReduceToOwners(world, "cpu"),
    ]
    answers = []
    for reduction in reductions:
        flat = torch.arange(8.0) * (rank + 1)
        reduction.all_reduce(flat, bucket).wait()
        reduction.close()
        name = type(reduction).__name__
        answers.append((name, reduction.multiple, flat.tolist()))
    return answers


def test_all_sum_alike():
    whole = [10.0 * number for number in range(8)]
    for rank, answers in enumerate(run_ranks(summed, 4)):
        for name, multiple, sums in answers:
            assert multiple == (2 if name == "HierarchicalCollectives" else 1)
            own = slice(2 * rank, 2 * rank + 2) if name == "ReduceToOwners" else slice(None)
            assert sums[own] == whole[own], (rank, name)


def hooked(rank):
    """Return the arguments of the hooks, and whether the last one is the object that reduces."""
    site, calls = example(), []
    hooks._functions["on_reduction"].append(lambda *arguments: calls.append(arguments))
    without = PlannedReduction(dist.group.WORLD, 100, "cpu")
    assert not without.follow_plan() and without.spec is None
    current = session.Session(
        Options(), Process(rank, 4, 0, 1, "", 0, "test"), site, build_plan(site), rank, maker=maker
    )
    session.set_active(current)
    planned = PlannedReduction(dist.group.WORLD, 2**20, "cpu")
    assert not planned.follow_plan()
    session.set_active(None)
    hooks._functions["on_reduction"].clear()
    planned.close()
    ((of_session, ranks, network_api, reducer),) = calls
    return of_session is current, ranks, network_api, reducer is planned


def test_hooks_are_called_before_the_gradients_of_a_step_are_reduced():
    assert run_ranks(hooked, 4) == [(True, (0, 1, 2, 3), "sockets", True)] * 4
