"""Which fabric each node serves, where some are on several: components that lie on one fast fabric each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

#: Steps of a search at most.
BUDGET = 150_000
#: (fabric, class of nodes, how many of them).
Gift = tuple[str, int, int]


def pack(
    counts: Mapping[int, int], homes: Mapping[int, Sequence[str]], size: int
) -> list[tuple[int, ...]] | None:
    """Components of `size` nodes, each sharing a fabric; None where there is no such packing. counts: nodes
    of each class; homes: fabrics that a class can serve, one at least.

    Whether it fits depends on numbers modulo `size` only, so the search goes over the classes, and its state
    is what each fabric that can still get nodes has beyond whole components. The parts come in the order of
    classes. Where most nodes are on three fast fabrics or more the states can be too many; then only BUDGET
    steps are looked at.
    """
    if size == 1:
        return [(number,) for number, count in counts.items() for _ in range(count)]
    states: dict[frozenset[tuple[str, int]], tuple[Gift, ...]] = {frozenset(): ()}
    waiting = list(counts)
    while waiting:
        number = waiting.pop(0)
        later = {home for other in waiting for home in homes[other]}
        states = _next(states, number, counts[number], homes[number], later, size, BUDGET // len(counts))
    if not states:
        return None
    nodes: dict[str, list[int]] = {}
    for home, number, share in states[frozenset()]:
        nodes.setdefault(home, []).extend([number] * share)
    position = {number: place for place, number in enumerate(counts)}
    parts = [tuple(line[at : at + size]) for line in nodes.values() for at in range(0, len(line), size)]
    return sorted(parts, key=lambda part: [position[number] for number in part])


def _next(
    states: Mapping[frozenset[tuple[str, int]], tuple[Gift, ...]], number: int, count: int,
    homes: Sequence[str], later: set[str], size: int, most: int,
) -> dict[frozenset[tuple[str, int]], tuple[Gift, ...]]:
    """States with one class more."""
    result: dict[frozenset[tuple[str, int]], tuple[Gift, ...]] = {}
    steps = ((rests, shares) for rests in states for shares in _shares(count, len(homes), size))
    for rests, shares in islice(steps, most):
        now = dict(rests)
        for home, share in zip(homes, shares):
            now[home] = (now.get(home, 0) + share) % size
        open_rests = frozenset((home, rest) for home, rest in now.items() if rest)
        if open_rests not in result and all(home in later for home, _ in open_rests):
            gifts = tuple((home, number, share) for home, share in zip(homes, shares) if share)
            result[open_rests] = states[rests] + gifts
    return result


def _shares(count: int, homes: int, size: int) -> Iterator[tuple[int, ...]]:
    """Ways to share nodes among fabrics that differ modulo `size`; whole components stay with the first."""
    if homes == 1:
        yield (count,)
        return
    for last in range(min(count, size - 1) + 1):
        for rest in _shares(count - last, homes - 1, size):
            yield (*rest, last)
