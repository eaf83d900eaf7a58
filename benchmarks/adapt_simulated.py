"""A job that learns by real threads and votes, whose steps are simulated: adapt.py's "simulated n".

A step is planner/simulate/step.py's of two stages, by the micro-batches that the job has in flight; its ranks
are told of passes and messages as their recorders would be, and the clock is the simulation's. So what is
counted is how soon the plan follows, not what the machine does besides.
"""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

from harness import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import learning_job  # noqa: E402
from learning_job import LearningJob, step_s  # noqa: E402
from simulated_steps import step_of  # noqa: E402

#: Of an activation.
BITS = 8 * 32768
FREE_MBPS = 1000.0
DRAWN, FIRST, STEPS = 12, 8, 18

learning_job.step_of = step_of = cache(step_of)


#: Micro-batches in flight of the first stage.
FIXED = range(2, 9)


def half_mbps(layer_s: float) -> float:
    """At which an activation takes half the time of three layers, forward and backward."""
    return BITS / (3 * 3 * layer_s / 2) / 1e6


def drawn(name: str, number: int) -> list[Row]:
    draw = random.Random(1000 + number)
    layer_s, micro_batches = draw.choice((0.004, 0.008, 0.011, 0.02)), draw.choice((6, 8, 12, 16))
    slower = draw.choice((0.8, 1.0, 1.2)) / 1.3
    case = (3, 3), layer_s, round(half_mbps(layer_s), 3)
    job = LearningJob(case, micro_batches, patient=True)
    job.slower, stays = slower, step_s(step_of(case, job.held(), micro_batches, slower))
    free = min(
        step_s(step_of((*case[:2], FREE_MBPS), (held, 1), micro_batches, slower)) for held in FIXED
    )
    try:
        for _ in range(FIRST):
            job.step()
        begun = job.clock
        for _ in range(STEPS - FIRST):
            job.step()
        learns = (job.clock - begun) / (STEPS - FIRST)
    finally:
        job.end()
    return [
        Row.median(
            name,
            "slow stage link, learns : free stage link (simulated)",
            [learns / free],
            "x",
            True,
            "<= 1.15",
        ),
        Row.median(
            name, "slow stage link, stays : free stage link (simulated)", [stays / free], "x", True
        ),
    ]
