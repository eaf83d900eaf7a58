"""Assignment of weight elements to ranks: the elements that each rank of a job exchanges with other jobs.

All weights at a position of the model-parallel grid (pipeline stage, tensor-parallel rank) are numbered in
the model's order, so that element i is the same weight in every job. A rank holds ranges of elements: all
elements under plain data parallelism, a shard under ZeRO, FSDP or a distributed optimizer.

    job east, 2 replicas       [ rank 0       ][ rank 1          ]  each replica exchanges half
    job west, sharded over 3   [ rank 0  ][ rank 1     ][ rank 2 ]  each rank exchanges its shard
    pieces of the exchange     [ 0-0     ][0-1 ][1-1   ][ 1-2    ]  cut wherever the rank changes in some job

So each element crosses the WAN once in each direction, whatever the sizes of the jobs. Pure: no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holmes_ext.errors import HolmesError

#: Cuts fall on multiples of this number of elements, so that the int8 codec's blocks stay whole.
ALIGNMENT = 256
#: Elements [start, stop).
Range = tuple[int, int]


@dataclass(frozen=True)
class RankRange:
    """Elements [start, stop) that `rank` exchanges for its job."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class SharedRange:
    """Elements [start, stop) that one rank of each job exchanges.

    Ranks of different jobs hold different shards, so a fragment consists of many such ranges.
    """

    start: int
    stop: int
    owners: Mapping[str, int]  # job -> its rank that exchanges these elements


def fragment_cuts(total: int, fragments: int, indivisible: Sequence[Range] = ()) -> list[int]:
    """Return the borders at which `total` elements are divided into fragments, from 0 to `total`.

    Fragments have equal lengths, rounded to multiples of ALIGNMENT if they are large.

    Args:
        total: Number of elements.
        fragments: Number of fragments (parts of the model).
        indivisible: Ranges (such as matrices) that no border may cut, in order.
    """
    return _even_cuts(0, total, fragments, indivisible)


def owners(
    total: int,
    cuts: Sequence[int],
    holdings: Mapping[int, Sequence[Range]],
    indivisible: Sequence[Range] = (),
) -> list[RankRange]:
    """Assign each element to a rank that holds it; that rank exchanges it with other jobs.

    Within each fragment, elements that several ranks hold are divided evenly among them.

    Args:
        total: Number of elements.
        cuts: Borders of the fragments (parts of the model), from fragment_cuts().
        holdings: Rank -> ranges of elements that it holds.
        indivisible: Ranges (such as matrices) that a single rank should exchange as a whole. Such a
            range is divided only at an element inside it where the holdings of some rank begin or end.

    Returns:
        Ranges in order, without overlaps and holes, from 0 to `total`.

    Raises:
        HolmesError: No rank holds some element.
    """
    borders = _borders(total, cuts, holdings)
    # Border -> ranks that hold the elements from it to the next border.
    holders_from = _holders_by_border(borders, holdings)
    fragment_borders = set(cuts)
    result: list[RankRange] = []
    first = 0  # first element that is not assigned yet
    for start, stop in pairwise(borders):
        holders = holders_from[start]
        if not holders:
            raise HolmesError(
                f"elements {start} to {stop} of {total} are held by no rank of the job"
            )
        is_continued = holders_from.get(stop) == holders and stop not in fragment_borders
        if is_continued:  # divide the elements up to the next change of holders at once
            continue
        # A share of equal length for each holder; a share is empty if there are few elements.
        shares = pairwise(_even_cuts(first, stop, len(holders), indivisible))
        for (share_start, share_stop), rank in zip(shares, holders):
            if share_start < share_stop:
                result.append(RankRange(share_start, share_stop, rank))
        first = stop
    return _merged(result)


def _borders(total: int, cuts: Sequence[int], holdings: Mapping[int, Sequence[Range]]) -> list[int]:
    """Return the sorted borders of all fragments and held ranges.

    Args:
        total: Number of elements.
        cuts: Borders of the fragments (parts of the model).
        holdings: Rank -> ranges of elements that it holds.

    Raises:
        HolmesError: A range reaches beyond the elements.
    """
    borders = {0, total, *cuts}
    for ranges in holdings.values():
        for start, stop in ranges:
            borders |= {start, stop}
    lowest, highest = min(borders), max(borders)
    if lowest < 0 or highest > total:
        raise HolmesError(f"shards reach from element {lowest} to {highest}, but there are {total}")
    return sorted(borders)


def _holders_by_border(
    borders: Sequence[int], holdings: Mapping[int, Sequence[Range]]
) -> dict[int, list[int]]:
    """Return border -> ranks that hold the elements from this border to the next.

    Args:
        borders: All borders, sorted: between two neighbours, all elements have the same holders.
        holdings: Rank -> ranges of elements that it holds.
    """
    holders: dict[int, list[int]] = {border: [] for border in borders}
    index_of = {border: index for index, border in enumerate(borders)}
    for rank, ranges in sorted(holdings.items()):
        for start, stop in ranges:
            for index in range(index_of[start], index_of[stop]):
                holders[borders[index]].append(rank)
    return holders


def _even_cuts(start: int, stop: int, parts: int, indivisible: Sequence[Range]) -> list[int]:
    """Divide [start, stop) into parts of about equal length; return the `parts` + 1 borders.

    Parts begin at multiples of ALIGNMENT after `start`, except if they are short.

    Args:
        start: First element.
        stop: Element after the last.
        parts: Number of parts.
        indivisible: Ranges that should not be divided, in order. A border inside such a range is moved to
            the nearer end of the range.
    """
    length = stop - start
    is_long = length >= 2 * ALIGNMENT * parts
    grain = ALIGNMENT if is_long else 1
    borders = [start]
    for index in range(1, parts):
        even_length = length * index // parts
        cut = start + even_length // grain * grain
        cut = _moved_out(cut, indivisible)
        borders.append(min(max(start, cut), stop))
    borders.append(stop)
    return borders


def _moved_out(cut: int, indivisible: Sequence[Range]) -> int:
    """Return `cut`, or, if it is inside a range, the nearer end of that range.

    Example: 7 with ranges [(5, 12)] -> 5; 5 and 12 stay as they are.

    Args:
        cut: Border between two elements: index of the first element after it.
        indivisible: Ranges that must not be divided, in order.
    """
    # Index of the last range that does not begin after the cut.
    index = bisect_right(indivisible, cut, key=lambda span: span[0]) - 1
    if index < 0:
        return cut
    first, last = indivisible[index]
    if cut >= last:
        return cut
    return first if cut - first <= last - cut else last


def any_range_is_divided(owned: Sequence[RankRange], indivisible: Sequence[Range]) -> bool:
    """Return whether any of the `indivisible` ranges is divided among several ranks.

    Args:
        owned: Elements that each rank exchanges, in order.
        indivisible: Ranges of elements, such as matrices.
    """
    starts = [span.start for span in owned]
    for start, stop in indivisible:
        owner = owned[bisect_right(starts, start) - 1]  # has the first element of the range
        if stop > owner.stop:
            return True
    return False


def _merged(owned: list[RankRange]) -> list[RankRange]:
    """Return the ranges with adjacent ranges of the same rank merged."""
    result: list[RankRange] = []
    for span in owned:
        if result and result[-1].rank == span.rank and result[-1].stop == span.start:
            result[-1] = RankRange(result[-1].start, span.stop, span.rank)
        else:
            result.append(span)
    return result


def shared_ranges(
    maps: Mapping[str, Sequence[RankRange]], start: int, stop: int
) -> list[SharedRange]:
    """Cut elements [start, stop) wherever the exchanging rank changes in some job.

    Args:
        maps: Job -> elements that each of its ranks exchanges, in order (result of `owners`).
        start: First element.
        stop: Element after the last.

    Returns:
        Ranges in order. Each belongs to a single rank of every job, so these ranks can exchange it
        directly.
    """
    starts_of = {name: [span.start for span in owned] for name, owned in maps.items()}
    cuts = {start, stop}
    for name, owned in maps.items():
        # Index of the first range that begins after `start`.
        first_inside = bisect_right(starts_of[name], start)
        for span in owned[first_inside:]:
            if span.start >= stop:
                break
            cuts.add(span.start)

    pieces = []
    for piece_start, piece_stop in pairwise(sorted(cuts)):
        ranks = {}  # job -> rank that exchanges the piece
        for name, owned in maps.items():
            index = bisect_right(starts_of[name], piece_start) - 1
            ranks[name] = owned[index].rank
        pieces.append(SharedRange(piece_start, piece_stop, ranks))
    return pieces


def owned_ranges(owned: Sequence[RankRange], rank: int, start: int, stop: int) -> list[Range]:
    """Return the ranges of elements [start, stop) that `rank` exchanges."""
    return [
        (max(span.start, start), min(span.stop, stop))
        for span in owned
        if span.rank == rank and span.start < stop and start < span.stop
    ]
