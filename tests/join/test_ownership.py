"""Which rank exchanges which elements: every element once, whatever the jobs' sizes and shards."""

import random

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.join.shards.ownership import (
    ALIGNMENT,
    RankRange,
    fragment_cuts,
    owned_ranges,
    owners,
    shared_ranges,
)


def random_job(source: random.Random, total: int) -> dict[int, list[tuple[int, int]]]:
    """Return the holdings of a job: replicas of shards, cut anywhere and dealt out in any order."""
    shards, replicas = source.randint(1, 4), source.randint(1, 3)
    cuts = [
        0,
        *sorted(source.randint(0, total) for _ in range(source.randint(shards - 1, 3 * shards))),
        total,
    ]
    ranges = [pair for pair in zip(cuts, cuts[1:]) if pair[0] < pair[1]]
    holdings = {rank: [] for rank in range(shards * replicas)}
    for pair in ranges:
        shard = source.randrange(shards)
        for replica in range(replicas):
            holdings[replica * shards + shard].append(pair)
    return holdings


@pytest.mark.parametrize("seed", range(60))
def test_every_element_crosses_once_between_two_ranks_that_hold_it(seed):
    source = random.Random(seed)
    total = source.choice([7, 300, 5000, 40_000])
    cuts = fragment_cuts(total, source.randint(1, 5))
    holdings = {
        name: random_job(source, total)
        for name in ("east", "west", "south")[: source.randint(1, 3)]
    }
    maps = {name: owners(total, cuts, one) for name, one in holdings.items()}
    for name, owned in maps.items():
        assert [one.start for one in owned] == [0, *(one.stop for one in owned)][:-1] and owned[
            -1
        ].stop == total
        for one in owned:
            assert any(
                start <= one.start and one.stop <= stop
                for start, stop in joined_up(holdings[name][one.rank])
            )
    for start, stop in zip(cuts, cuts[1:]):
        found = shared_ranges(maps, start, stop) if start < stop else []
        assert (
            [piece.start for piece in found] == [start, *(piece.stop for piece in found)][:-1]
            if found
            else start == stop
        )
        for (
            name,
            owned,
        ) in maps.items():  # the pieces of a rank are what it owns, no more and no less
            for rank in holdings[name]:
                mine = joined_up(
                    (piece.start, piece.stop) for piece in found if piece.owners[name] == rank
                )
                assert mine == joined_up(owned_ranges(owned, rank, start, stop))


def joined_up(ranges):
    """Touching ranges made one."""
    result = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def test_replicas_share_each_fragment_evenly():
    total = 64 * ALIGNMENT
    cuts = fragment_cuts(total, 4)
    owned = owners(total, cuts, {rank: [(0, total)] for rank in range(4)})
    for start, stop in zip(cuts, cuts[1:]):
        assert [
            sum(b - a for a, b in owned_ranges(owned, rank, start, stop)) for rank in range(4)
        ] == [total // 16] * 4


def test_shards_stay_with_the_rank_that_holds_them():
    assert owners(10, [0, 10], {0: [(0, 6)], 1: [(6, 10)]}) == [
        RankRange(0, 6, 0),
        RankRange(6, 10, 1),
    ]


def test_shares_of_replicas_keep_the_blocks_of_int8_whole():
    owned = owners(10_000, [0, 10_000], {rank: [(0, 10_000)] for rank in range(3)})
    assert all(one.start % ALIGNMENT == 0 for one in owned)


def test_fragments_cover_small_rows_too():
    assert fragment_cuts(3, 4) == [0, 0, 1, 2, 3]
    assert fragment_cuts(100_000, 3) == [0, 33280, 66560, 100_000]


def test_an_element_that_nobody_holds_is_named():
    with pytest.raises(HolmesError, match="elements 4 to 6 of 10 are held by no rank"):
        owners(10, [0, 10], {0: [(0, 4)], 1: [(6, 10)]})
    with pytest.raises(HolmesError, match="shards reach from element 0 to 12, but there are 10"):
        owners(10, [0, 10], {0: [(0, 12)]})
