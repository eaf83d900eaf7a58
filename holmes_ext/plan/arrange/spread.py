"""Which nodes of which cluster hold which pipeline stage, where those of one cluster need not stay together.

    cities A B C D, 4 stages  (A)(B)(C)(D)  A | B | C | D           activations cross at every border
    of 4 nodes                (A B)(C D)    AB | AB | CD | CD       gradients cross, activations at one border
                              exchanged     AAAB | ABBB | CCDD ...  whatever takes least

Nodes of a cluster are interchangeable: a stage is a multiset of clusters. First groups of clusters, mixed
evenly over their stages, are changed, then single nodes of the best: simulated annealing (Kirkpatrick et al.
1983) with a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp, inf
from typing import TypeVar

State = TypeVar("State")
#: The clusters of a stage's units (nodes, or GPUs), ascending; of all stages in their order.
Stages = tuple[tuple[int, ...], ...]
#: Clusters in groups, whose units are mixed.
Groups = tuple[tuple[int, ...], ...]
#: Groups that single nodes are moved from; of the tries, the part that the groups get.
STARTS, COARSE = 2, 0.4
#: Temperatures at the begin and at the end, as fractions of the least seconds.
HOT, COLD = 0.02, 0.0002


def spread(
    units: Sequence[int],
    stages: int,
    seconds_of: Callable[[Stages], float],
    tries: int,
    chain: Sequence[int] = (),
) -> tuple[Stages, float]:
    """The best stages found, and what they take. units: of each cluster; seconds_of: inf where it cannot be;
    tries: stages looked at; chain: clusters in an order that may be good."""
    order, size, rng = tuple(chain or range(len(units))), sum(units) // stages, random.Random(0)
    known: dict[Stages, float] = {}

    def of_groups(groups: Groups) -> float:
        mixture = mixed(units, groups, size)
        if mixture not in known:
            known[mixture] = seconds_of(mixture)
        return known[mixture]

    sizes = [together for together in range(1, len(order) + 1) if len(order) % together == 0]
    for together in sizes:
        groups = tuple(order[at : at + together] for at in range(0, len(order), together))
        _improved(groups, of_groups, _regrouped, rng, int(COARSE * tries / len(sizes)))
    for start in sorted(known, key=known.__getitem__)[:STARTS]:
        layout, seconds = _improved(
            start, seconds_of, _exchanged, rng, int((1 - COARSE) * tries / STARTS)
        )
        known[layout] = seconds
    layout = min(known, key=known.__getitem__)
    return layout, known[layout]


def mixed(units: Sequence[int], groups: Groups, size: int) -> Stages:
    """Groups one after the other, the units of each mixed evenly, cut into stages of `size` units."""
    laid: list[int] = []
    for group in groups:
        laid += [
            index
            for _, index in sorted(
                ((n + 0.5) / units[index], index) for index in group for n in range(units[index])
            )
        ]
    return tuple(tuple(sorted(laid[at : at + size])) for at in range(0, len(laid), size))


def _improved(
    state: State,
    seconds_of: Callable[[State], float],
    changed: Callable[[State, random.Random], State],
    rng: random.Random,
    tries: int,
) -> tuple[State, float]:
    """The best state seen in so many random changes; worse states are accepted ever more rarely."""
    current_s = seconds_of(state)
    best, best_s = state, current_s
    for at in range(tries):
        candidate = changed(state, rng)
        seconds = seconds_of(candidate)
        heat = HOT * (COLD / HOT) ** (at / tries) * best_s
        if seconds <= current_s or (
            seconds < inf and rng.random() < exp((current_s - seconds) / heat)
        ):
            state, current_s = candidate, seconds
            if current_s < best_s:
                best, best_s = state, current_s
    return best, best_s


def _regrouped(groups: Groups, rng: random.Random) -> Groups:
    """Two clusters exchanged, groups reversed, two neighbouring groups joined, or one parted."""
    result, at, kind = [list(group) for group in groups], rng.randrange(len(groups)), rng.random()
    if kind < 0.5:
        group, partner = result[at], rng.choice(result)
        i, j = rng.randrange(len(group)), rng.randrange(len(partner))
        group[i], partner[j] = partner[j], group[i]
    elif kind < 0.65:
        low, high = sorted((at, rng.randrange(len(result))))
        result[low : high + 1] = result[low : high + 1][::-1]
    elif kind < 0.8 and len(result) > 1:
        at = min(at, len(result) - 2)
        result[at : at + 2] = [result[at] + result[at + 1]]
    elif len(result[at]) > 1:
        cut = rng.randrange(1, len(result[at]))
        result[at : at + 1] = [result[at][:cut], result[at][cut:]]
    return tuple(map(tuple, result))


def _exchanged(stages: Stages, rng: random.Random) -> Stages:
    """A unit of one stage exchanged with one of another, or stages reversed."""
    result = list(stages)
    first, second = sorted((rng.randrange(len(stages)), rng.randrange(len(stages))))
    if rng.random() < 0.1:
        result[first : second + 1] = result[first : second + 1][::-1]
    elif first != second:
        leaves, comes = rng.randrange(len(stages[first])), rng.randrange(len(stages[second]))
        for at, out, new in (
            (first, leaves, stages[second][comes]),
            (second, comes, stages[first][leaves]),
        ):
            result[at] = tuple(sorted((*stages[at][:out], *stages[at][out + 1 :], new)))
    return tuple(result)
