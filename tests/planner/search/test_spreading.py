"""placement/spread.py against every way to put units into stages, and what planner/search makes of it."""

import random
from itertools import permutations

import pytest

from holmes_ext.plan.arrange.spread import mixed, spread
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.spreading import laid


def every(units, stages):
    """All distinct stages."""
    laid_out = [index for index, count in enumerate(units) for _ in range(count)]
    size = len(laid_out) // stages
    for order in set(permutations(laid_out)):
        yield tuple(tuple(sorted(order[at : at + size])) for at in range(0, len(order), size))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_is_found(seed):
    pick = random.Random(seed)
    units, stages = pick.choice((((2, 2, 2), 3), ((4, 2), 3), ((3, 3, 2), 4), ((2, 2, 4), 2)))
    count = len(units)
    data = [[pick.uniform(1, 5) for _ in range(count)] for _ in range(count)]
    path = [[pick.uniform(1, 5) for _ in range(count)] for _ in range(count)]

    def seconds_of(found):
        slowest = max(sum(data[a][b] for a in stage for b in stage) for stage in found)
        return slowest + sum(
            path[a][b] for one, two in zip(found, found[1:]) for a, b in zip(one, two)
        )

    found, seconds = spread(units, stages, seconds_of, 3000)
    assert seconds == seconds_of(found) == pytest.approx(min(map(seconds_of, every(units, stages))))
    assert sorted(index for stage in found for index in stage) == sorted(
        index for index, own in enumerate(units) for _ in range(own)
    )
    assert spread(units, stages, seconds_of, 3000) == (found, seconds), "equal input, equal output"


def test_groups_are_mixed_evenly():
    assert mixed((4, 4, 4, 4), ((0,), (1,), (2,), (3,)), 4) == tuple(
        (index,) * 4 for index in range(4)
    )
    assert mixed((4, 4, 4, 4), ((0, 1), (2, 3)), 4) == ((0, 0, 1, 1),) * 2 + ((2, 2, 3, 3),) * 2
    assert mixed((2, 4, 2), ((0, 1, 2),), 4) == ((0, 1, 1, 2),) * 2


def test_clusters_of_neighbouring_stages_face_their_own():
    placement = laid(((0, 0, 1), (1, 2, 2), (0, 1, 2)), Sizes(pipeline=3).complete(36), processes=4)
    assert [sorted(content) for content in placement.stages] == [
        [(0, 8), (1, 4)],
        [(1, 4), (2, 8)],
        [(0, 4), (1, 4), (2, 4)],
    ]
    last = [content[-1][0] for content in placement.stages]
    assert last == [1, 1, 1]
