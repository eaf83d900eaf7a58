import os

import pytest
import ranks
import torch
import torch.distributed as dist
from carriers import gloo_only
from ranks import run_ranks, seeded

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.reduce import owned
from holmes_ext.runtime.reduce.owned import ReduceToOwners, merge_spans
from holmes_ext.runtime.reduce.reducer import GradientReducer


def test_neighbours_with_one_owner_are_one_span():
    assert merge_spans([(3, 1), (2, 1), (4, 0), (1, 1)]) == [(5, 1), (4, 0), (1, 1)]


def reduced(rank, spans, members):
    owned.CHUNK_BYTES = 64
    group = dist.new_group(members)
    if rank not in members:
        ranks.all_are_here(rank, dist.get_world_size())
        return None
    reduction, works = ReduceToOwners(group), []
    for number, some in enumerate((spans, spans[::-1], spans)):  # all under way at once
        flat = torch.randn(
            sum(elements for elements, _ in some), generator=seeded(10 * rank + number)
        )
        works.append((flat, flat.double(), some, reduction.reduce(flat, some)))
    worst = 0.0
    for flat, wanted, some, work in works:
        work.wait()
        dist.all_reduce(wanted, group=group)
        place = 0
        for elements, owner in some:
            if owner == rank:
                worst = max(
                    worst,
                    (flat[place : place + elements] - wanted[place : place + elements])
                    .abs()
                    .max()
                    .item(),
                )
            place += elements
    reduction.close()
    ranks.all_are_here(rank, dist.get_world_size())
    return worst


@pytest.mark.parametrize(
    "world, members", [(2, [0, 1]), (4, [0, 1, 2, 3]), (4, [1, 2, 3]), (3, [2, 0])]
)
def test_every_owner_gets_its_sums(world, members):
    spans = [
        (40, members[-1]),
        (7, members[0]),
        (100, members[-1]),
        (1, members[len(members) // 2]),
    ]
    found = run_ranks(reduced, world, spans, members)
    assert all(found[rank] < 1e-5 for rank in members)


def trained(rank, world):
    """Return the averages that a GradientReducer leaves on their owners.

    Rank k owns parameter k. The first and the last rank share the last parameter.
    """
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(6)) for _ in range(world + 1)]

    def owners(parameter):
        k = next(k for k, one in enumerate(parameters) if one is parameter)
        return [(6, k)] if k < world else [(2, 0), (4, world - 1)]

    reducer = GradientReducer(parameters, bucket_bytes=40, owners=owners)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = None
        with reducer.overlapped():
            sum(
                (parameter * (rank + 1 + k)).sum() for k, parameter in enumerate(parameters)
            ).backward()
    reducer.close()
    ranks.all_are_here(rank, world)
    return parameters[rank].grad.tolist(), parameters[world].grad.tolist()


def test_the_reducers_averages_are_on_their_owners():
    found = run_ranks(trained, 3, 3)
    for rank, (own, last) in enumerate(found):
        assert own == pytest.approx([2.0 + rank] * 6)
        assert rank != 0 or last[:2] == pytest.approx([5.0] * 2)
        assert rank != 2 or last[2:] == pytest.approx([5.0] * 4)


def dies(rank):
    reducer = GradientReducer(
        [torch.nn.Parameter(torch.ones(1000))], owners=lambda parameter: [(1000, 0)]
    )
    ranks.all_are_here(rank, 3)
    if rank == 1:
        os._exit(0)
    reducer._parameters[0].grad = torch.ones(1000)
    try:
        reducer.finish()
    except HolmesError as error:
        ranks.say(error)
    os._exit(0)


@gloo_only
def test_a_rank_that_dies_is_an_error_on_those_that_wait_for_it():
    with pytest.raises(ranks.RankError, match="gave no answer") as error:
        run_ranks(dies, 3)
    lines = error.value.said
    assert len(lines) == 2 and all("the reduction of bucket 0 of 1" in line for line in lines)
