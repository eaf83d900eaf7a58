"""How many micro-batches hide the stage links, and that any non-increasing choice of them ends."""

import random
from itertools import product
from math import ceil, inf

import pytest

from holmes_ext.plan.cost.pipeline import (
    SETTLED,
    WORTH_MORE,
    formula_ends,
    in_flight,
    quickest_in_flight,
    share_nics,
    walked_ends,
)
from holmes_ext.plan.schedule import passes


def walk(orders, forward, backward, transfer):
    """Return the seconds at which every stage has ended its passes, messages on their own.

    None where passes wait for ever.
    """
    done, clock, place = {}, [0.0] * len(orders), [0] * len(orders)
    while any(at < len(order) for at, order in zip(place, orders)):
        moved = False
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, micro_batch, _ = order[place[stage]]
                other = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if 0 <= other < len(orders):
                    if (kind, micro_batch, other) not in done:
                        break
                    ready = done[kind, micro_batch, other] + transfer[min(stage, other)]
                clock[stage] = (
                    max(clock[stage], ready) + (forward if kind == "F" else backward)[stage]
                )
                done[kind, micro_batch, stage] = clock[stage]
                place[stage] += 1
                moved = True
        if not moved:
            return None
    return clock


def orders_of(held, micro_batches):
    return [
        passes(stage, len(held), micro_batches, in_flight=one) for stage, one in enumerate(held)
    ]


def test_free_stage_links_are_1f1b():
    assert in_flight([3.0] * 4, [0.0] * 3, 8) == (4, 3, 2, 1)
    assert orders_of((4, 3, 2, 1), 8) == [passes(stage, 4, 8) for stage in range(4)]


def test_half_a_stage_needs_one_more():
    assert in_flight([1.0, 1.0], [0.5], 8) == (3, 1)
    assert in_flight([1.0, 1.0], [0.5], 2) == (2, 1)  # no more than there are


@pytest.mark.parametrize("seed", range(40))
def test_any_stage_link_is_hidden(seed):
    """All transfers but the first and the last are hidden.

    The step is within the pipeline's fill of a step with free stage links.
    """
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 5), rng.choice((8, 16, 32))
    forward, backward = [1.0] * stages, [2.0] * stages
    transfer = [rng.choice((0.0, 0.5, 1.5, 3.0)) for _ in range(stages - 1)]
    held = in_flight([3.0] * stages, transfer, micro_batches)
    assert list(held) == sorted(held, reverse=True)
    free = walk(
        orders_of(range(stages, 0, -1), micro_batches), forward, backward, [0.0] * (stages - 1)
    )
    slow = walk(orders_of(held, micro_batches), forward, backward, transfer)
    assert (
        max(free) <= max(slow) <= max(free) + 2 * sum(transfer) + 1e-9 or max(held) == micro_batches
    )


def test_an_stage_link_slower_than_the_stages_sets_the_pace():
    assert in_flight([1.0] * 3, [2.0, 2.0], 16, [2.0, 2.0]) == (6, 3, 1)
    assert in_flight([1.0] * 3, [2.0, 2.0], 16, [0.1, 0.1]) == (
        11,
        6,
        1,
    )  # latency: others may be on the way


@pytest.mark.parametrize("seed", range(40))
def test_no_more_than_memory_holds_and_the_fastest_of_those(seed):
    """The chosen number of micro-batches fits into memory, and is the fastest of those that fit.

    No other number that fits makes a step that is shorter by more than what the fill and one more
    pass give.
    """
    rng = random.Random(seed)
    stages, micro_batches = rng.choice((2, 3)), 24
    busy = [3.0 * rng.choice((1.0, 1.0, 1.5)) for _ in range(stages)]
    forward, backward = [b / 3 for b in busy], [2 * b / 3 for b in busy]
    transfer = [rng.choice((0.5, 1.5, 3.0)) for _ in range(stages - 1)]
    most = [rng.randint(stages - stage, 6) for stage in range(stages)]
    held = in_flight(busy, transfer, micro_batches, (), most)
    assert all(count <= room for count, room in zip(held, most)) and list(held) == sorted(
        held, reverse=True
    )
    assert all(count >= stages - stage for stage, count in enumerate(held))
    took = max(walk(orders_of(held, micro_batches), forward, backward, transfer))
    choices = product(*(range(stages - stage, room + 1) for stage, room in enumerate(most)))
    best = min(
        max(walk(orders_of(one, micro_batches), forward, backward, transfer))
        for one in choices
        if list(one) == sorted(one, reverse=True)
    )
    assert took <= best * 1.02 + sum(busy) + 2 * sum(transfer)
    needs = in_flight(busy, transfer, micro_batches)
    assert held == needs or any(need > room for need, room in zip(needs, most))


@pytest.mark.parametrize("seed", range(40))
def test_a_short_step_has_more_where_that_is_quicker(seed):
    """Never more than memory holds, nor than the bounds of the search reckon with (Bounds.ahead)."""
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 6), rng.choice((4, 8, 16, 64))
    forward = [rng.choice((0.5, 1.0, 2.0)) for _ in range(stages)]
    backward, transfer = (
        [2 * f for f in forward],
        [rng.choice((0.0, 0.5, 1.5)) for _ in range(stages - 1)],
    )
    most = tuple(rng.choice((inf, stages - stage + rng.randint(0, 6))) for stage in range(stages))
    busy, ways = [3 * f for f in forward], map(tuple, (forward, backward, transfer))
    given = micro_batches, (), most
    least, found = in_flight(busy, transfer, *given), quickest_in_flight(*ways, *given)
    assert all(one <= room for one, room in zip(found, most)) and list(found) == sorted(
        found, reverse=True
    )
    assert found == least or micro_batches <= SETTLED * least[0]
    now, before = (
        max(walk(orders_of(held, micro_batches), forward, backward, transfer))
        for held in (found, least)
    )
    assert now <= before and (found == least or now < before * (1 - WORTH_MORE))
    ahead = [1]
    for stage_link in reversed(transfer):
        ahead.insert(0, ahead[0] + 1 + ceil(2 * stage_link / (sum(busy) / stages)))
    assert all(one <= most for one, most in zip(found, ahead))


def test_quick_stages_behind_a_slow_one_work_ahead():
    forward, transfer = (1.0, 1.0, 1.0, 1.5, 0.5, 0.5, 0.5, 1.0), (1.0,) * 7
    given = forward, tuple(2 * f for f in forward), transfer
    assert quickest_in_flight(*given, 16) > in_flight([3 * f for f in forward], transfer, 16)
    assert quickest_in_flight(*given, 640) == in_flight([3 * f for f in forward], transfer, 640)


def test_what_1f1b_needs_is_the_frameworks_to_fit():
    assert in_flight([1.0] * 3, [2.0, 2.0], 16, (), [1, 1, 1]) == (3, 2, 1)
    assert in_flight([1.0], [], 4) == (1,)


@pytest.mark.parametrize("seed", range(20))
def test_the_step_walked_with_them_is_the_slow_one(seed):
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 4), rng.choice((2, 8))
    forward = [rng.uniform(0.5, 1.5) for _ in range(stages)]
    backward, transfer = [2 * f for f in forward], [rng.uniform(0, 2) for _ in range(stages - 1)]
    held = in_flight([3 * f for f in forward], transfer, micro_batches)
    slow = walk(orders_of(held, micro_batches), forward, backward, transfer)
    assert walked_ends(forward, backward, transfer, micro_batches, held) == pytest.approx(slow)
    hidden = formula_ends(
        forward, backward, transfer, micro_batches, link_load_s=[0.0] * (stages - 1)
    )
    assert max(hidden) == pytest.approx(max(slow), rel=0.3)


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_ever(seed):
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 6), rng.randint(1, 12)
    held = sorted((rng.randint(1, 12) for _ in range(stages)), reverse=True)
    ends = walk(
        orders_of(held, micro_batches), [1.0] * stages, [2.0] * stages, [0.25] * (stages - 1)
    )
    assert ends is not None
    for stage, order in enumerate(orders_of(held, micro_batches)):
        most = max(
            sum(1 if kind == "F" else -1 for kind, *_ in order[: end + 1])
            for end in range(len(order))
        )
        assert most == min(held[stage], micro_batches)


def test_fewer_in_front_than_behind_would_wait_for_ever():
    assert walk(orders_of((1, 3, 2), 4), [1.0] * 3, [1.0] * 3, [0.0] * 2) is None


def test_messages_both_ways_through_one_nic_that_sets_the_pace_take_longer():
    transfer, load, nics = (1.0, 1.0, 3.0), (0.5, 0.5, 2.0), [(1, 1), (2, 2)]
    assert share_nics(transfer, load, [], 0.1) == (transfer, load)
    assert share_nics(transfer, load, nics, 0.9) == ((1.5, 1.5, 3.5), (1.0, 1.0, 2.0))
    assert share_nics(transfer, load, nics, 1.0) == (
        transfer,
        load,
    )  # a stage is as busy: few of them meet
    assert share_nics(transfer, load, [(1, 2)], 0.9) == ((1.5, 1.0, 3.5), (1.0, 0.5, 2.0))
