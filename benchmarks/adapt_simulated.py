"""Simulates a pipeline job that adapts, to measure how soon its plan follows the network.

These are the cases "simulated n" of adapt.py. Threads and votes of the ranks are real. A step is
simulated by planner/simulate/step.py for two stages, with the micro-batches that the job has in flight.
The ranks receive the times of passes and messages that their recorders would measure, and the clock is
that of the simulation. Other work of this machine therefore does not affect the result.
"""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import learning_job  # noqa: E402
from learning_job import LearningJob, step_s  # noqa: E402
from simulated_steps import step_of  # noqa: E402

ACTIVATION_BITS = 8 * 32768
FREE_MBPS = 1000.0  # rate at which a message takes next to no time
DRAWN = 12  # random jobs
WARM_UP_STEPS = 8  # first steps, not timed: the plan must have adapted before
STEPS = 18

learning_job.step_of = step_of = cache(step_of)


#: Numbers of micro-batches in flight on the first stage that a fixed plan can have.
FIXED = range(2, 9)


class PipelineCase(NamedTuple):
    """Pipeline of two stages: its layers, their times, and the rate of the link between them."""

    stage_layers: tuple[int, int]
    layer_s: float  # seconds of the forward pass of a layer on the first stage
    rate_mbps: float  # of the link between the stages, in Mb/s


def half_mbps(layer_s: float) -> float:
    """Return the rate in Mb/s that makes an activation take half of a stage's time.

    Args:
        layer_s: Seconds of the forward pass of a layer. A stage has three layers, and a backward pass
            takes twice as long as a forward pass.
    """
    stage_s = 3 * 3 * layer_s  # three layers, forward and backward
    return ACTIVATION_BITS / (stage_s / 2) / 1e6


def simulate_random_job(name: str, number: int) -> list[Row]:
    """Simulate a random job over a slow and a fast link between its stages, and compare its steps.

    Over the slow link, an activation takes half of a stage's time. Over the fast link ("free" in
    the names of metrics) it takes next to no time.

    Args:
        number: Number of the random job.
    """
    draw = random.Random(1000 + number)
    layer_s = draw.choice((0.004, 0.008, 0.011, 0.02))
    micro_batches = draw.choice((6, 8, 12, 16))
    slower = draw.choice((0.8, 1.0, 1.2)) / 1.3
    layers = (3, 3)  # of each stage
    case = PipelineCase(layers, layer_s, rate_mbps=round(half_mbps(layer_s), 3))
    free_case = PipelineCase(layers, layer_s, rate_mbps=FREE_MBPS)
    job = LearningJob(case, micro_batches, patient=True)
    job.slower = slower  # factor of the seconds of all passes
    # The step with the plan at the start, and the best step over the free link with a fixed plan.
    stays = step_s(step_of(case, job.held(), micro_batches, slower))
    free = min(
        step_s(step_of(free_case, (in_flight, 1), micro_batches, slower)) for in_flight in FIXED
    )
    try:
        for _ in range(WARM_UP_STEPS):
            job.step()
        begun = job.clock
        for _ in range(STEPS - WARM_UP_STEPS):
            job.step()
        learns = (job.clock - begun) / (STEPS - WARM_UP_STEPS)
    finally:
        job.end()
    return [
        Row.median(
            name,
            "slow stage link, learns : free stage link (simulated)",
            [learns / free],
            unit="x",
            emulated=True,
            target="<= 1.15",
        ),
        Row.median(
            name,
            "slow stage link, stays : free stage link (simulated)",
            [stays / free],
            unit="x",
            emulated=True,
        ),
    ]
