"""benchmarks/placement.py: its lower bound against every placement of small matrices.

Its matrix is compared with the file.
"""

import random
import sys
from itertools import permutations
from pathlib import Path

import pytest
from clusters import example

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def placement(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import placement

    yield placement
    for name in ("placement", "harness"):
        sys.modules.pop(name, None)


def random_matrix(placement, pick):
    units = pick.choice(((2, 2, 2), (3, 3), (4, 2)))
    every = range(len(units))
    delay, rate = [[0.0] * len(units) for _ in every], [[0.0] * len(units) for _ in every]
    for i in every:
        for j in range(i + 1):
            delay[i][j] = delay[j][i] = pick.choice((0.0, 0.01, 0.1))
            rate[i][j] = rate[j][i] = pick.choice((0.5, 1.0, 1.1, 2.0, 100.0))
    return placement.Matrix(units, tuple(map(tuple, delay)), tuple(map(tuple, rate)))


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_below_the_bound(seed, placement, monkeypatch):
    monkeypatch.setattr(placement, "STAGES", 3)
    matrix = random_matrix(placement, random.Random(seed))
    line = [index for index, count in enumerate(matrix.units) for _ in range(count)]
    every = {
        tuple(tuple(sorted(order[at : at + 2])) for at in (0, 2, 4)) for order in permutations(line)
    }
    least = min(map(matrix.cost, every))
    assert 0 < matrix.least() <= least * (1 + 1e-9)


def test_the_matrix_is_the_one_of_the_file(placement):
    site = example("eight_cities_64")
    matrix = placement.Matrix.of(site, 0.0)
    assert matrix.units == (8,) * 8
    names = list(site.clusters)
    oregon, tokyo = names.index("oregon"), names.index("tokyo")
    assert (matrix.delay_s[oregon][tokyo], matrix.rate[oregon][tokyo]) == pytest.approx(
        (0.096, 0.523)
    )
    assert (matrix.delay_s[tokyo][tokyo], matrix.rate[tokyo][tokyo]) == pytest.approx((0.005, 2.0))
