"""Tests that `holmes plan` ends with a plan or with one line of error, for random sites, models and times."""

import itertools
import time

import pytest
from random_plans import random_plan
from selection import full

from holmes_ext.cli.main import main
from holmes_ext.planner.search import search as searching

#: Seeds of random inputs: quick ones, of all sorts of options, and one of 100 of the others.
QUICK_SEEDS = (1, 2, 4, 5, 6, 8, 11, 13, 16, 22)
OTHER_SEEDS = [seed for seed in range(500) if seed not in QUICK_SEEDS]
SEEDS = [*QUICK_SEEDS, *(pytest.param(seed, marks=full(share=100)) for seed in OTHER_SEEDS)]
#: Exit statuses: a plan was printed; no plan is possible, or a bad input.
GOOD_STATUSES = (0, 2)


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock: each reading is 50 ms later than the one before, so that runs are repeatable."""
    readings = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 0.05 * next(readings))
    monkeypatch.setattr(searching, "ALONE_S", 1e9)  # no worker processes


@pytest.mark.parametrize("seed", SEEDS)
def test_every_random_plan_ends_without_exception(seed, clock, tmp_path, capsys):
    """A run prints a plan and returns 0, or prints one line of error and returns 2.

    Lines on what was read from the command may stand before the error.
    """
    seconds = 1 + seed % 5
    arguments = [*random_plan(seed).arguments(tmp_path)]
    status = main([arguments[0], "--seconds", str(seconds), *arguments[1:]])
    output, error = capsys.readouterr()
    assert status in GOOD_STATUSES
    if status:
        errors = [line for line in error.splitlines() if line.startswith("holmes: ")]
        assert not output and len(errors) == 1 and error.splitlines()[-1] == errors[0]
    else:
        assert output.strip()
