"""Which rank of a job exchanges which elements, and with whom in another job. Pure.

All weights at one place of the model-parallel grid (a "position": pipeline stage, tensor-parallel rank, ...)
stand in a row, in the model's order: element i of that row is the same weight in every job. A rank holds
ranges of it: all of it under plain data parallelism, its shard under ZeRO, FSDP or a distributed optimizer.

    job east, 2 replicas       [ rank 0       ][ rank 1          ]  each exchanges its half; gathered inside
    job west, sharded over 3   [ rank 0  ][ rank 1     ][ rank 2 ]  each exchanges what it holds
    pieces                     [ 0-0     ][0-1 ][1-1   ][ 1-2    ]  cut wherever the owner changes in some job

So every element crosses once in each direction, whatever the jobs' sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holmes_ext.errors import HolmesError

#: Shares of replicas begin at multiples of so many elements: the blocks in which int8 scales them stay whole.
ALIGNMENT = 256
#: (start, stop) in the row of a position.
Range = tuple[int, int]


@dataclass(frozen=True)
class RankRange:
    """Elements [start, stop) that `rank` exchanges for its job."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class ShardPair:
    """Elements [start, stop) that one rank of each job exchanges: `owners`, by job."""

    start: int
    stop: int
    owners: Mapping[str, int]


def fragment_cuts(total: int, fragments: int, whole: Sequence[Range] = ()) -> list[int]:
    """Of a row of `total` elements: equal parts, at multiples of ALIGNMENT where they are large. whole:
    ranges that are not cut, in order."""
    return _even_cuts(0, total, fragments, whole)


def owners(
    total: int,
    cuts: Sequence[int],
    holdings: Mapping[int, Sequence[Range]],
    whole: Sequence[Range] = (),
) -> list[RankRange]:
    """Who exchanges what, each element one rank: in order of `start`, none overlapping, 0 to `total` covered.

    holdings: the ranges that each rank holds. What several hold is shared out evenly among them, fragment by
    fragment (`cuts`, as of fragment_cuts), in the order of their ranks; ranges of `whole` are not cut where
    holdings do not cut them. HolmesError when an element is held by no rank.
    """
    borders = sorted(
        {
            0,
            total,
            *cuts,
            *(stage_link for ranges in holdings.values() for span in ranges for stage_link in span),
        }
    )
    if borders[0] < 0 or borders[-1] > total:
        raise HolmesError(
            f"shards reach from element {borders[0]} to {borders[-1]}, but there are {total}"
        )
    held_by: dict[int, list[int]] = {stage_link: [] for stage_link in borders}
    place = {stage_link: number for number, stage_link in enumerate(borders)}
    for rank, ranges in sorted(holdings.items()):
        for start, stop in ranges:
            for number in range(place[start], place[stop]):
                held_by[borders[number]].append(rank)
    result: list[RankRange] = []
    inner = set(cuts)
    first = 0
    for start, stop in pairwise(borders):
        holders = held_by[start]
        if not holders:
            raise HolmesError(
                f"elements {start} to {stop} of {total} are held by no rank of the job"
            )
        if (
            held_by.get(stop) == holders and stop not in inner
        ):  # one run of elements with the same holders
            continue
        shares = pairwise(_even_cuts(first, stop, len(holders), whole))
        result += [RankRange(a, b, rank) for (a, b), rank in zip(shares, holders) if a < b]
        first = stop
    return _merged(result)


def _even_cuts(start: int, stop: int, parts: int, whole: Sequence[Range]) -> list[int]:
    length = stop - start
    grain = ALIGNMENT if length >= 2 * ALIGNMENT * parts else 1
    cuts = [start + length * k // parts // grain * grain for k in range(1, parts)]
    inner = [min(max(start, _outside(cut, whole)), stop) for cut in cuts]
    return [start, *inner, stop]


def _outside(cut: int, whole: Sequence[Range]) -> int:
    """The nearest stage link of the range that it would cut."""
    at = bisect_right(whole, cut, key=lambda span: span[0]) - 1
    if at < 0 or cut >= whole[at][1]:
        return cut
    first, last = whole[at]
    return first if cut - first <= last - cut else last


def any_cut(owned: Sequence[RankRange], whole: Sequence[Range]) -> bool:
    """Whether several ranks exchange parts of one of `whole`."""
    starts = [span.start for span in owned]
    return any(stop > owned[bisect_right(starts, start) - 1].stop for start, stop in whole)


def _merged(owned: list[RankRange]) -> list[RankRange]:
    result: list[RankRange] = []
    for span in owned:
        if result and result[-1].rank == span.rank and result[-1].stop == span.start:
            result[-1] = RankRange(result[-1].start, span.stop, span.rank)
        else:
            result.append(span)
    return result


def shard_pairs(maps: Mapping[str, Sequence[RankRange]], start: int, stop: int) -> list[ShardPair]:
    """Elements [start, stop) cut wherever the owner changes in some job. maps: owners() of each job."""
    stage_links = {name: [span.start for span in owned] for name, owned in maps.items()}
    cuts = {start, stop}
    for name, owned in maps.items():
        first = bisect_right(stage_links[name], start)
        for span in owned[first:]:
            if span.start >= stop:
                break
            cuts.add(span.start)
    return [
        ShardPair(
            a,
            b,
            {
                name: owned[bisect_right(stage_links[name], a) - 1].rank
                for name, owned in maps.items()
            },
        )
        for a, b in pairwise(sorted(cuts))
    ]


def owned_ranges(owned: Sequence[RankRange], rank: int, start: int, stop: int) -> list[Range]:
    """What `rank` exchanges of elements [start, stop)."""
    return [
        (max(span.start, start), min(span.stop, stop))
        for span in owned
        if span.rank == rank and span.start < stop and start < span.stop
    ]
