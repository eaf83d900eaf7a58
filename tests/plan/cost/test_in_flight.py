"""How many micro-batches hide the edges, and that any non-increasing choice of them ends."""

import random

import pytest

from holmes_ext.plan.cost.pipeline import in_flight, passes


def walk(orders, forward, backward, transfer):
    """Seconds at which every stage has ended its passes, messages on their own; None where passes wait for ever."""
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
                clock[stage] = max(clock[stage], ready) + (forward if kind == "F" else backward)[stage]
                done[kind, micro_batch, stage] = clock[stage]
                place[stage] += 1
                moved = True
        if not moved:
            return None
    return clock


def orders_of(held, micro_batches):
    return [passes(stage, len(held), micro_batches, held=one) for stage, one in enumerate(held)]


def test_free_edges_are_1f1b():
    assert in_flight([3.0] * 4, [0.0] * 3, 8) == (4, 3, 2, 1)
    assert orders_of((4, 3, 2, 1), 8) == [passes(stage, 4, 8) for stage in range(4)]


def test_half_a_stage_needs_one_more():
    assert in_flight([1.0, 1.0], [0.5], 8) == (3, 1)
    assert in_flight([1.0, 1.0], [0.5], 2) == (2, 1)  # no more than there are


@pytest.mark.parametrize("seed", range(40))
def test_any_edge_is_hidden(seed):
    """But for the first and the last transfer: the step is within the pipeline's fill of one with free edges."""
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 5), rng.choice((8, 16, 32))
    forward, backward = [1.0] * stages, [2.0] * stages
    transfer = [rng.choice((0.0, 0.5, 1.5, 3.0)) for _ in range(stages - 1)]
    held = in_flight([3.0] * stages, transfer, micro_batches)
    assert list(held) == sorted(held, reverse=True)
    free = walk(orders_of(range(stages, 0, -1), micro_batches), forward, backward, [0.0] * (stages - 1))
    slow = walk(orders_of(held, micro_batches), forward, backward, transfer)
    assert max(free) <= max(slow) <= max(free) + 2 * sum(transfer) + 1e-9 or max(held) == micro_batches


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_ever(seed):
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 6), rng.randint(1, 12)
    held = sorted((rng.randint(1, 12) for _ in range(stages)), reverse=True)
    ends = walk(orders_of(held, micro_batches), [1.0] * stages, [2.0] * stages, [0.25] * (stages - 1))
    assert ends is not None
    for stage, order in enumerate(orders_of(held, micro_batches)):
        most = max(sum(1 if kind == "F" else -1 for kind, *_ in order[: end + 1]) for end in range(len(order)))
        assert most == min(held[stage], micro_batches)


def test_fewer_in_front_than_behind_would_wait_for_ever():
    assert walk(orders_of((1, 3, 2), 4), [1.0] * 3, [1.0] * 3, [0.0] * 2) is None
