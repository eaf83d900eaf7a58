"""benchmarks/schedules.py: what it reckons is between 1F1B and the bound, and reaches its target."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def schedules(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import schedules

    yield schedules
    for name in ("schedules", "harness"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["40 ms; 16 micro-batches", "80 ms; 8 micro-batches"])
def test_a_listed_schedule_is_between_1f1b_and_the_bound(schedules, name):
    rows = {row.metric: row for row in schedules.measure(name)}
    for memory in ("each stage's", "the fullest"):
        with_nccl, ratio = (
            rows[f"{what}, memory of {memory}"] for what in ("ratio, NCCL", "ratio")
        )
        least = rows[f"ratio that no schedule beats, memory of {memory}"].value
        assert 1.04 < with_nccl.value <= ratio.value <= least
        asked = (name, memory) == schedules.ASKED
        assert ratio.met is with_nccl.met is (True if asked else None)
