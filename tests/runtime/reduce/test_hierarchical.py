"""Hierarchical all-reduce against a flat one, for clusters of equal and unequal sizes."""

import os

import pytest
import ranks
import torch
import torch.distributed as dist
from carriers import ON_GPUS, gloo_only
from clusters import site
from prices import sums_on_site
from ranks import run_ranks, seeded

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce, Shard, shards
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives
from holmes_ext.runtime.reduce.reducer import GradientReducer

#: What clusters of equal size get.
KIND = HierarchicalCollectives if ON_GPUS else HierarchicalAllReduce


def test_pieces_of_equal_clusters_pair_the_ranks():
    assert shards(8, [[0, 1], [2, 3]]) == [Shard(0, 4, (0, 2)), Shard(4, 8, (1, 3))]


def test_pieces_of_unequal_clusters_are_cut_where_an_owner_changes():
    assert shards(12, [[0, 1], [2, 3, 4]]) == [
        Shard(0, 4, (0, 2)),
        Shard(4, 6, (0, 3)),
        Shard(6, 8, (1, 3)),
        Shard(8, 12, (1, 4)),
    ]


@pytest.mark.parametrize(
    "clusters", [[[0, 1], [2, 3, 4]], [[0], [1, 2], [3, 4, 5, 6]], [[5, 3], [1, 0]]]
)
@pytest.mark.parametrize("numel", [1, 2, 7, 97])
def test_pieces_cover_a_chunk_once_and_name_one_owner_of_each_cluster(clusters, numel):
    found = shards(numel, clusters)
    assert [shard.start for shard in found] == [0, *(shard.stop for shard in found[:-1])] and found[
        -1
    ].stop == numel
    for shard in found:
        assert all(owner in members for owner, members in zip(shard.owners, clusters))


def test_prediction_prefers_hierarchical_where_the_link_is_slow_and_clusters_are_large():
    four = sums_on_site(site("a ib 2Gb/s a[0-3]", "b ib 2Gb/s b[0-3]", ethernet="250Mb/s"))
    assert four.flat.seconds(1e7) / four.hierarchical.seconds(1e7) > 2.5
    one = sums_on_site(site("a ib 2Gb/s a0", "b ib 2Gb/s b0", ethernet="250Mb/s"))
    assert one.hierarchical is None  # the bytes that cross are the same
    slow = sums_on_site(
        site("a ib 250Mb/s a[0-1]", "b ib 250Mb/s b[0-1]", ethernet="250Mb/s", processes=4)
    )
    assert slow.flat.seconds(1e7) < slow.hierarchical.seconds(
        1e7
    )  # four ranks' exchange through one slow NIC


def against_flat(rank, clusters, numels, chunk_bytes, dtype):
    reduction = HierarchicalAllReduce(clusters, chunk_bytes=chunk_bytes)
    worst, same = 0.0, True
    works = []
    for number, numel in enumerate(numels):  # all under way at once
        x = torch.randn(numel, generator=seeded(100 * rank + number)).to(dtype)
        works.append((x, x.clone(), reduction.all_reduce(x)))
    for x, wanted, work in works:
        work.wait()
        dist.all_reduce(wanted)
        worst = max(worst, (x.double() - wanted.double()).abs().max().item())
        everywhere = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, x)
        same &= all(torch.equal(x, other) for other in everywhere)
    reduction.close()
    return worst, same


@gloo_only
@pytest.mark.parametrize(
    "clusters",
    [
        [[0, 1], [2, 3]],
        [[0, 2], [3, 1]],
        [[0], [1, 2]],
        [[0, 1], [2, 3, 4]],
        [[0, 1], [2], [3, 4, 5]],
    ],
    ids=str,
)
def test_sum_is_the_flat_sum_and_the_same_bits_everywhere(clusters):
    count = sum(map(len, clusters))
    for worst, same in run_ranks(
        against_flat, count, clusters, (1, 3, 1000, 5001), 512, torch.float32
    ):
        assert worst < 1e-5 and same


def test_integers_in_float64_are_exact():
    for worst, same in run_ranks(exact, 4):
        assert worst == 0.0 and same


def collectives(rank, clusters, numels):
    reduction = HierarchicalCollectives(clusters, chunk_bytes=512)
    worst = 0.0
    for number, numel in enumerate(numels):
        x = torch.randn(numel, generator=seeded(100 * rank + number))
        wanted = x.clone()
        dist.all_reduce(wanted)
        reduction.all_reduce(x).wait()
        worst = max(worst, (x - wanted).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "clusters", [[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[0, 1, 2], [3, 4, 5]]], ids=str
)
def test_collectives_of_nccl_s_kind_give_the_same_sum(clusters):
    assert max(run_ranks(collectives, sum(map(len, clusters)), clusters, (1, 3, 1000, 5001))) < 1e-5


def exact(rank):
    reduction = KIND([[0, 1], [2, 3]], chunk_bytes=256)
    x = torch.arange(1000, dtype=torch.float64) * (rank + 1)
    reduction.all_reduce(x).wait()
    reduction.close()
    return (x - torch.arange(1000, dtype=torch.float64) * 10).abs().max().item(), True


def lengths(rank):
    reduction, found = HierarchicalAllReduce([[0], [1]], chunk_bytes=400), []
    submit = reduction._pipeline.submit

    def submit_and_record(chunks):
        found.append([len(chunk.tensor) for chunk in chunks])
        return submit(chunks)

    reduction._pipeline.submit = submit_and_record
    for numel in (0, 90, 199, 250):
        reduction.all_reduce(torch.ones(numel)).wait()
    reduction.close()
    return found


@gloo_only
def test_chunks_are_alike_and_none_is_a_small_rest():
    """A bucket of DistributedDataParallel ends above its limit: the rest would be a chunk of a few bytes."""
    assert run_ranks(lengths, 2) == [[[0], [90], [199], [125, 125]]] * 2


def under_a_reducer(rank):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    reduction = KIND([[0, 1], [2, 3]], chunk_bytes=1024)
    reducer = GradientReducer(
        model.named_parameters(), bucket_bytes=5000, all_reduce=reduction.all_reduce
    )
    for _ in range(3):
        model.zero_grad()
        with reducer.overlapped():
            model(torch.full((2, 32), rank + 1.0)).sum().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(torch.full((2, 32), rank + 1.0)).sum().backward()
    worst = 0.0
    for parameter, gradient in zip(model.parameters(), got):
        dist.all_reduce(parameter.grad)
        worst = max(worst, (parameter.grad / 4 - gradient).abs().max().item())
    return worst, reducer.times.early, reducer.times.seconds > 0


def test_a_reducer_can_use_it():
    for worst, early, timed in run_ranks(under_a_reducer, 4):
        assert worst < 1e-5 and early == 4 and timed


def dies(rank):
    reduction = HierarchicalAllReduce([[0, 1], [2, 3]], chunk_bytes=1024)
    model = torch.nn.Linear(32, 32)
    reducer = GradientReducer(
        model.named_parameters(), all_reduce=reduction.all_reduce, bucket_bytes=1024
    )
    ranks.all_are_here(rank, 4)
    if rank == 3:
        os._exit(0)
    model(torch.ones(1, 32)).sum().backward()
    try:
        reducer.finish()
    except HolmesError as error:
        ranks.say(error)
        os._exit(0)


@gloo_only
def test_a_rank_that_dies_is_an_error_on_all_others():
    with pytest.raises(ranks.RankError, match="gave no answer") as error:
        run_ranks(dies, 4)
    lines = error.value.said
    assert len(lines) == 3 and all("the reduction of bucket 0 of 2" in line for line in lines)


def wrong_clusters(rank):
    messages = []
    for clusters in ([[0, 1]], [[0], [0, 1]], [[4], [5]]):
        try:
            HierarchicalAllReduce(clusters)
        except HolmesError as error:
            messages.append(str(error))
    try:
        HierarchicalCollectives([[0], [1, 2]])
    except HolmesError as error:
        messages.append(str(error))
    return messages


def test_wrong_clusters_are_refused():
    for messages in run_ranks(wrong_clusters, 2):
        assert len(messages) == 4 and all("two or more lists of" in message for message in messages)
