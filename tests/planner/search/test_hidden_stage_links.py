"""Where micro-batches in flight hide the stage links: the balanced split against all there are."""

import itertools
import random

import pytest

from holmes_ext.plan.cost.stages import StageCosts, predict
from holmes_ext.plan.partition import balanced


def costs_of(rng):
    """Return a random job; some stage links have a latency, which holds up nothing behind it."""
    stages, layers = rng.choice((2, 3, 4)), rng.randint(4, 9)
    each = (
        [rng.uniform(0.2, 1) for _ in range(stages)]
        if rng.random() < 0.5
        else [rng.uniform(0.2, 1)] * stages
    )
    forward = tuple((rng.choice((0, 0.3)), seconds, rng.choice((0, 0.5))) for seconds in each)
    backward = tuple(tuple(2 * seconds for seconds in row) for row in forward)
    stage_links = [rng.choice((0.0, 0.2, 1.0, 3.0)) for _ in range(stages - 1)]
    return StageCosts(
        forward,
        backward,
        ((0.0, rng.choice((0.0, 0.4)), 0.0),) * stages,
        tuple((stage_link, stage_link, 0.0) for stage_link in (*stage_links, 0.0)),
        rng.choice((1, 2, 4, 8, 16)),
        repeats=(1, layers, 1),
        overlap=rng.random() < 0.5,
        link_load_s=tuple(rng.choice((0.0, 0.5, 1.0)) * stage_link for stage_link in stage_links),
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_split_beats_the_balanced_one_by_much(seed):
    costs = costs_of(random.Random(seed))
    splits = [
        split
        for split in itertools.product(range(1, costs.blocks + 1), repeat=costs.stages)
        if sum(split) == costs.blocks
    ]
    least = min(predict(costs, split).step_s for split in splits)
    assert predict(costs, balanced(costs)).step_s <= least * 1.02
