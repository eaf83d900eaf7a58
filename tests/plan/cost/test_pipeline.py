"""The formula and the walk of 1F1B against a simulation operation by operation; orders of passes."""

import random

import pytest
from one_forward_one_backward import simulate

from holmes_ext.plan.cost.pipeline import formula_ends, walked_ends


def test_the_formula_for_equal_stages_are_exact():
    rng = random.Random(0)
    for _ in range(300):
        stages, micro = rng.randint(1, 8), rng.randint(1, 20)
        ends = formula_ends([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), micro)
        assert ends[0] == pytest.approx((micro + stages - 1) * 3.0)
        assert ends == pytest.approx(
            simulate([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), micro)
        )


def test_the_walk():
    """Unequal stages and stage links; and the wait that the formula does not see filled: F0 F1 wait B0 B1."""
    rng = random.Random(0)
    for _ in range(200):
        stages, micro = rng.randint(1, 6), rng.randint(1, 12)
        forward, backward, stage_links = (
            [rng.random() for _ in range(count)] for count in (stages, stages, stages - 1)
        )
        assert walked_ends(forward, backward, stage_links, micro) == pytest.approx(
            simulate(forward, backward, stage_links, micro)
        )
    assert walked_ends([2.0, 1.0], [4.0, 2.0], [0.0], 2)[0] == 2 + 3 + 4 + 4
    assert formula_ends([2.0, 1.0], [4.0, 2.0], [0.0], 2)[0] == 2 + 3 + 4 + 6


def test_the_formula_with_stage_links_within_a_tenth():
    rng = random.Random(0)
    for _ in range(500):
        stages, micro = rng.randint(2, 8), rng.randint(1, 20)
        stage_links = [rng.choice((0.05, 0.5)) for _ in range(stages - 1)]
        ends = formula_ends([1.0] * stages, [2.0] * stages, stage_links, micro)
        found = simulate([1.0] * stages, [2.0] * stages, stage_links, micro)
        assert ends[0] == pytest.approx(found[0], rel=0.1)
        # the later stages end a little earlier than the formula says
        assert ends == pytest.approx(found, rel=0.12)


def test_the_formula_with_slow_stage_links_are_never_too_early():
    """A stage link in the middle slows the run of stages around it.

    The stages that end with the last stage are not enough: the formula would be 13 % too early.
    """
    rng = random.Random(0)
    for _ in range(500):
        stages, micro = rng.randint(2, 8), rng.randint(1, 40)
        stage_links = [rng.choice((0.05, 2.0)) for _ in range(stages - 1)]
        found = simulate([1.0] * stages, [2.0] * stages, stage_links, micro)[0]
        assert 0.99 * found <= formula_ends([1.0] * stages, [2.0] * stages, stage_links, micro)[0]


def test_each_stage_ends_one_backward_earlier():
    ends = formula_ends([1.0] * 3, [2.0] * 3, [0.5, 0.25], 4)
    assert [a - b for a, b in zip(ends, ends[1:])] == pytest.approx([2.5, 2.25])
