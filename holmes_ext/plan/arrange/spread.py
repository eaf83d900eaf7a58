"""Distribution of nodes over pipeline stages, if the nodes of a cluster need not stay together.

Example: four clusters A, B, C and D of four nodes each, and a pipeline of four stages. "|"
separates the stages, and each letter is a node. (A B) is a group of clusters: its nodes are mixed
evenly over its stages.

    groups          stages                        traffic between clusters
    (A)(B)(C)(D)    AAAA | BBBB | CCCC | DDDD     activations, at three borders of stages
    (A B)(C D)      AABB | AABB | CCDD | CCDD     activations at one border, and gradients
    (no groups)     AAAB | ABBB | CCDD | CCDD     depends on the mixture: single nodes were exchanged

Nodes of a cluster are interchangeable, so only the number of nodes of each cluster on a stage
matters. The search is simulated annealing (Kirkpatrick et al. 1983) with a fixed seed. It first
changes the groups, and then exchanges single nodes of the best results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp, inf
from typing import TypeVar

State = TypeVar("State")
#: Clusters of each stage's units (nodes or GPUs), ascending; stages in their order.
Stages = tuple[tuple[int, ...], ...]
#: Clusters in groups. The units (nodes or GPUs) of a group's clusters are mixed evenly over stages.
Groups = tuple[tuple[int, ...], ...]
#: Number of results of the first search with which the second search begins.
RESULTS_KEPT = 2
#: Part of the tries that the first search gets.
GROUPS_SHARE = 0.4
#: First and last temperature of the annealing, as a part of the shortest time.
FIRST_TEMPERATURE, LAST_TEMPERATURE = 0.02, 0.0002
#: Probabilities of the changes to groups, cumulative: exchange, reverse, join; else part.
_EXCHANGE, _REVERSE, _JOIN = 0.5, 0.65, 0.8
#: Probability of reversing stages instead of exchanging units.
_REVERSE_STAGES = 0.1


def spread(
    units: Sequence[int],
    stages: int,
    seconds_of: Callable[[Stages], float],
    tries: int,
    chain: Sequence[int] = (),
) -> tuple[Stages, float]:
    """Return the best distribution found of units over pipeline stages, and its time in seconds.

    A unit is a node or a GPU; all stages get equally many. The search first mixes the units of groups of
    clusters evenly over stages, and changes the groups. Then it exchanges single units of the best results.
    Both use simulated annealing.

    Args:
        units: Number of units of each cluster.
        stages: Number of stages; all get equally many units.
        seconds_of: Returns the time of a distribution; inf if it is impossible.
        tries: Number of distributions to try.
        chain: Clusters in the order with which the search begins; (): in ascending order.
    """
    order = tuple(chain or range(len(units)))
    size = sum(units) // stages
    rng = random.Random(0)
    seconds: dict[Stages, float] = {}  # of the distributions that were tried

    def seconds_of_groups(groups: Groups) -> float:
        """Return the time of the stages if the units (nodes or GPUs) of each group are mixed evenly.

        Each distribution is timed once; `seconds` keeps the result.
        """
        mixture = mixed(units, groups, size)
        if mixture not in seconds:
            seconds[mixture] = seconds_of(mixture)
        return seconds[mixture]

    # The first search begins several times, each time with groups of another equal size.
    group_sizes = [count for count in range(1, len(order) + 1) if len(order) % count == 0]
    tries_with_groups = int(GROUPS_SHARE * tries / len(group_sizes))
    for group_size in group_sizes:
        groups = tuple(
            order[start : start + group_size] for start in range(0, len(order), group_size)
        )
        # It leaves its results in `seconds`.
        _annealed(groups, seconds_of_groups, _regrouped, rng, tries_with_groups)
    tries_with_units = int((1 - GROUPS_SHARE) * tries / RESULTS_KEPT)
    for start in sorted(seconds, key=seconds.__getitem__)[:RESULTS_KEPT]:
        result, result_s = _annealed(start, seconds_of, _exchanged, rng, tries_with_units)
        seconds[result] = result_s
    best = min(seconds, key=seconds.__getitem__)
    return best, seconds[best]


def mixed(units: Sequence[int], groups: Groups, size: int) -> Stages:
    """Return stages of `size` units (nodes or GPUs), with the units of each group of clusters mixed evenly.

    The units of a group are put in a line in which those of each cluster are spread evenly. The lines of
    all groups follow each other, and are cut into stages of `size` units. So a stage may have units of two
    groups. Example: a group of clusters 0 and 1 with 4 and 2 units has the line 0 1 0 0 1 0. Cut into
    stages of 3 units, it gives 0 1 0 twice. The units of a stage are sorted: (0, 0, 1), (0, 0, 1).

    Args:
        units: Number of units of each cluster.
        groups: Clusters whose units are mixed; the groups follow each other.
        size: Units of a stage.

    Returns:
        For each stage, the cluster of each of its units.
    """
    line: list[int] = []  # cluster of each unit
    for group in groups:
        # Unit n of a cluster with N units has the position (n + 1/2) / N, from 0 to 1.
        positions = [
            ((n + 0.5) / units[cluster], cluster)
            for cluster in group
            for n in range(units[cluster])
        ]
        line += [cluster for _, cluster in sorted(positions)]
    return tuple(tuple(sorted(line[start : start + size])) for start in range(0, len(line), size))


def _annealed(
    state: State,
    seconds_of: Callable[[State], float],
    changed: Callable[[State, random.Random], State],
    rng: random.Random,
    tries: int,
) -> tuple[State, float]:
    """Return the best state of a simulated annealing, and its time in seconds.

    A worse state is accepted with a probability that decreases with its time and with the number of tries.

    Args:
        state: State to begin with.
        seconds_of: Returns the time of a state; inf if it is impossible.
        changed: Returns a random neighbour of a state.
        rng: Source of random numbers.
        tries: Number of neighbours to try.
    """
    current_s = seconds_of(state)
    best = state
    best_s = current_s
    for index in range(tries):
        candidate = changed(state, rng)
        candidate_s = seconds_of(candidate)
        # Decreases geometrically from FIRST_TEMPERATURE to LAST_TEMPERATURE, as parts of the shortest time.
        temperature_s = (
            FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (index / tries) * best_s
        )
        is_accepted = candidate_s <= current_s
        if not is_accepted and candidate_s < inf:
            is_accepted = rng.random() < exp((current_s - candidate_s) / temperature_s)
        if not is_accepted:
            continue
        state = candidate
        current_s = candidate_s
        if current_s < best_s:
            best = state
            best_s = current_s
    return best, best_s


def _regrouped(groups: Groups, rng: random.Random) -> Groups:
    """Return groups after a random change.

    The change exchanges two clusters, reverses the order of some groups, joins two neighbouring
    groups, or divides a group. The search for the best distribution over stages tries the result.

    Args:
        groups: Clusters of each group. The nodes or GPUs of the clusters in a group are mixed
            evenly over the group's pipeline stages.
        rng: Source of random numbers.
    """
    result = [list(group) for group in groups]
    index = rng.randrange(len(groups))  # of the group that is changed
    # In [0, 1). The constants are cumulative probabilities: 50 % exchange, 15 % reverse, 15 % join.
    change = rng.random()
    if change < _EXCHANGE:
        group = result[index]
        partner = rng.choice(result)
        i = rng.randrange(len(group))
        j = rng.randrange(len(partner))
        group[i], partner[j] = partner[j], group[i]
    elif change < _REVERSE:
        low, high = sorted((index, rng.randrange(len(result))))
        result[low : high + 1] = result[low : high + 1][::-1]
    elif change < _JOIN and len(result) > 1:
        index = min(index, len(result) - 2)
        result[index : index + 2] = [result[index] + result[index + 1]]
    elif len(result[index]) > 1:
        cut = rng.randrange(1, len(result[index]))
        result[index : index + 1] = [result[index][:cut], result[index][cut:]]
    return tuple(map(tuple, result))


def _exchanged(stages: Stages, rng: random.Random) -> Stages:
    """Return stages after a random change: two units exchanged, or several stages reversed.

    A unit is a node or a GPU. Only the cluster of a unit matters.

    Args:
        stages: For each stage, the cluster of each of its units.
        rng: Source of random numbers.
    """
    result = list(stages)
    first, second = sorted((rng.randrange(len(stages)), rng.randrange(len(stages))))
    if rng.random() < _REVERSE_STAGES:
        result[first : second + 1] = result[first : second + 1][::-1]
    elif first != second:  # exchange unit i of one stage and unit j of the other
        i = rng.randrange(len(stages[first]))
        j = rng.randrange(len(stages[second]))
        result[first] = _with_unit(stages[first], i, stages[second][j])
        result[second] = _with_unit(stages[second], j, stages[first][i])
    return tuple(result)


def _with_unit(stage: tuple[int, ...], index: int, cluster: int) -> tuple[int, ...]:
    """Return a copy of a stage in which unit `index` is replaced by a unit of another cluster."""
    return tuple(sorted((*stage[:index], *stage[index + 1 :], cluster)))
