"""A schedule with the least step that is found, within the memory: list scheduling under a local search.

A stage that is free takes what its rules say: a gradient of the input first, unless fewer than `ahead`
micro-batches are under way and a forward is ready; then a forward; then the weights' gradient of the oldest
micro-batch. That one comes first where more than `late` of them are undone, or the memory is full. Where a
message comes sooner than `patience` of a weights' gradient's time, the stage waits for it instead. The search
changes one rule of one stage at a time and keeps what shortens the step; then it changes three at random and
begins again. Deterministic: so many passes are tried, not seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf
from random import Random

from holmes_ext.plan.cost.pipeline import WORTH_MORE, quickest_in_flight, walked_ends
from holmes_ext.plan.schedule import OnePass, PassOrder, Times
from holmes_ext.plan.workload import StageLoad, passes_s
from holmes_ext.planner.schedule.least import least_s

#: Passes that a search walks through at most: about a second.
WORK = 200_000
#: Passes in which each stage link's messages get an order: so many times the work.
ONE_ORDER = 4
#: Times that a search leaves the best rules found, by three changes of them at random.
KICKS = 40
#: A change must save this part of a step.
BETTER = 1e-9


@dataclass(frozen=True)
class Rule:
    """late: weights' gradients that may be undone; patience: part of such a pass that it rather waits."""

    ahead: int
    late: int
    patience: float = 0.0


@lru_cache(maxsize=64)
def quickest(
    loads: tuple[StageLoad, ...],
    transfer: tuple[float, ...],
    sent: tuple[float, ...],
    micro_batches: int,
    one_order: bool,
) -> PassOrder | None:
    """None where 1F1B with hidden stage links is as fast, or what of a backward could wait is not
    known. transfer:
    seconds of an activation over each stage link; sent: those in which it carries nothing else; one_order: as
    solved's. Memory of unknown size holds as many micro-batches as 1F1B's fullest stage."""
    forward, backward = passes_s(loads)
    weights, most = tuple(load.weights_s for load in loads), tuple(load.most for load in loads)
    if len(loads) < 2 or not all(weights):
        return None
    in_flight = quickest_in_flight(forward, backward, transfer, micro_batches, sent, most)
    step_1f1b_s = max(walked_ends(forward, backward, transfer, micro_batches, in_flight))
    fullest = max(in_flight)
    room = tuple(
        max(count, fullest if limit == inf else limit) for count, limit in zip(in_flight, most)
    )
    inputs = tuple(backward_s - weights_s for backward_s, weights_s in zip(backward, weights))
    times = Times(forward, inputs, weights, transfer, micro_batches, room)
    pass_order = solved(times, in_flight, one_order)
    return pass_order if max(pass_order.ends(times)) < step_1f1b_s * (1 - WORTH_MORE) else None


def solved(times: Times, ahead: Sequence[int], one_order: bool = False) -> PassOrder:
    """ahead: micro-batches in flight on each stage under 1F1B, where the search begins; one_order: a
    stage link's messages need one order (NCCL), which is found and priced, too."""
    passes = 3 * times.micro_batches * len(times.forward) * (ONE_ORDER if one_order else 1)
    budget = max(1, WORK // passes)
    room, count = [int(min(most, times.micro_batches)) for most in times.most], len(ahead)
    wide = [min(2 * depth, depth + count) for depth in ahead]
    starts = [
        [
            Rule(min(depth, most), late if late >= 0 else most, patience)
            for depth, most in zip(aheads, room)
        ]
        for aheads in (ahead, [depth + 1 for depth in ahead], wide, [max(ahead)] * count, room)
        for late in (0, 1, 2, -1)
        for patience in (0.0, 1.0)
    ]
    tried: dict[tuple[Rule, ...], float] = {}

    def seconds(rules: Sequence[Rule]) -> float:
        key = tuple(rules)
        if key not in tried:
            orders, end_s = listed(times, rules)
            tried[key] = max(ordered(orders).ends(times)) if one_order else end_s
        return tried[key]

    def ordered(orders: Sequence[Sequence[OnePass]]) -> PassOrder:
        pass_order = PassOrder(tuple(tuple(order) for order in orders))
        return pass_order.in_one_order(times) if one_order else pass_order

    def descended(rules: list[Rule]) -> list[Rule]:
        best_s, changed = seconds(rules), True
        while changed:
            changed = False
            for neighbour in _near(rules, room):
                if len(tried) < budget and seconds(neighbour) < best_s * (1 - BETTER):
                    rules, best_s, changed = neighbour, seconds(neighbour), True
        return rules

    bound_s, dice = least_s(times), Random(0)
    best = min(map(descended, sorted(starts, key=seconds)[:3]), key=seconds)
    kicks = 0
    while len(tried) < budget and kicks < KICKS and seconds(best) > bound_s * (1 + BETTER):
        kicked, kicks = best, kicks + 1
        for _ in range(3):
            kicked = dice.choice([*_near(kicked, room)])
        best = min(best, descended(kicked), key=seconds)
    return ordered(list(map(_whole, range(len(ahead)), listed(times, best)[0])))


def _near(rules: list[Rule], in_flight: Sequence[int]) -> Iterator[list[Rule]]:
    """With one stage's rule changed."""
    for stage, rule in enumerate(rules):
        changes = [replace(rule, ahead=rule.ahead + by) for by in (1, -1, 2, -2)]
        changes += [replace(rule, late=rule.late + by) for by in (1, -1, 2, -2)]
        changes += [
            replace(rule, patience=value)
            for value in (0.0, 0.5, 1.0, inf)
            if value != rule.patience
        ]
        for change in changes:
            if 1 <= change.ahead <= in_flight[stage] and 0 <= change.late <= in_flight[stage]:
                yield [*rules[:stage], change, *rules[stage + 1 :]]


def _whole(stage: int, order: list[OnePass]) -> tuple[OnePass, ...]:
    """On the first stage, whose input's gradient nobody waits for, I and the W right after it become B."""
    merged: list[OnePass] = []
    for letter, number in order:
        if stage == 0 and letter == "W" and merged[-1] == ("I", number):
            merged[-1] = "B", number
        else:
            merged.append((letter, number))
    return tuple(merged)


def listed(times: Times, rules: Sequence[Rule]) -> tuple[list[list[OnePass]], float]:
    """The passes that the rules make, and their seconds."""
    count, m = len(rules), times.micro_batches
    last = count - 1
    f, i, w, x = times.forward, times.inputs, times.weights, times.transfer
    orders: list[list[OnePass]] = [[] for _ in rules]
    # of each stage: passes done of each kind, and when the messages came that are known to come
    begun, back, done = [0] * count, [0] * count, [0] * count
    activations: list[list[float]] = [[0.0] * m, *([] for _ in range(last))]
    gradients: list[list[float]] = [[] for _ in rules]
    heap = [(0.0, stage) for stage in range(count)]
    asleep, free, end = [False] * count, [0.0] * count, 0.0
    room = [max(1, int(min(most, m))) for most in times.most]

    def wake(stage: int, moment: float) -> None:
        if asleep[stage]:
            asleep[stage] = False
            heappush(heap, (max(free[stage], moment), stage))

    while heap:
        now, s = heappop(heap)
        rule = rules[s]
        next_f = activations[s][begun[s]] if begun[s] < len(activations[s]) else inf
        next_i = gradients[s][back[s]] if back[s] < len(gradients[s]) else inf
        undone = back[s] - done[s]
        if begun[s] - done[s] >= room[s]:
            next_f = inf
        early = begun[s] - back[s] < rule.ahead
        if next_i <= now and not (early and next_f <= now):
            letter = "I"
        elif undone and (
            undone > rule.late
            or next_f > now
            and (min(next_f, next_i) - now >= rule.patience * w[s] or begun[s] - done[s] >= room[s])
        ):
            letter = "W"
        elif next_f <= now:
            letter = "F"
        else:
            if (soon := min(next_f, next_i)) < inf:
                heappush(heap, (soon, s))
            else:
                asleep[s] = True
            continue
        if letter == "F":
            number, end_s = begun[s], now + f[s]
            begun[s] += 1
            if s == last:
                gradients[s].append(end_s)
            else:
                activations[s + 1].append(end_s + x[s])
                wake(s + 1, end_s + x[s])
        elif letter == "I":
            number, end_s = back[s], now + i[s]
            back[s] += 1
            if s:
                gradients[s - 1].append(end_s + x[s - 1])
                wake(s - 1, end_s + x[s - 1])
        else:
            number, end_s = done[s], now + w[s]
            done[s] += 1
        orders[s].append((letter, number))
        free[s], end = end_s, max(end, end_s)
        if done[s] < m:
            heappush(heap, (end_s, s))
    return orders, end
