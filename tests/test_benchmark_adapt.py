"""benchmarks/adapt_hours.py: a data-parallel job of simulated steps follows a change of its Ethernet.

It follows within ten steps, by real votes.
"""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import adapt_hours  # noqa: E402
from adapt_hours import DataParallelHour, Part  # noqa: E402

GOOD, BAD = Part(0, 0.75), Part(0, 0.0625)


@pytest.fixture
def hour():
    one = DataParallelHour(random.Random(2006))
    one.collect_fixed_plans([GOOD, BAD])
    return one


def test_an_hour_is_an_hour_and_the_same_each_time():
    for pipeline in (True, False):
        every = [adapt_hours.random_periods(random.Random(7), pipeline) for _ in range(2)]
        assert every[0] == every[1] and sum(part.seconds for part in every[0]) == pytest.approx(
            3600
        )


def test_sums_follow_a_network_that_becomes_bad_goes_away_and_becomes_good(hour):
    job = hour.start(GOOD)
    try:
        for part, gone in ((GOOD, 0.0), (BAD, 0.0), (GOOD, 30.0), (BAD, 30.0)):
            hour.change(job, part)
            job.gone = gone
            for _ in range(10):
                job.step()
            least = min(hour.step_s(part, plan) for plan in hour.fixed)
            taken = job.each(lambda traffic: traffic.reductions[0])
            assert hour.step_s(part, taken) < 1.02 * least
            told = len(job.lines)
            for _ in range(20):
                job.step()
            assert len(job.lines) == told, job.lines[told:]
    finally:
        job.end()
