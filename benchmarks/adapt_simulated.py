"""A job that learns by real threads and votes, whose steps are simulated: adapt.py's "simulated n" and
"simulated hour".

A step is plan/simulate/step.py's of two stages, by the micro-batches that the job has in flight; its ranks
are told of passes and messages as their recorders would be, and the clock is the simulation's. So an hour
takes minutes, and what is counted is how soon the plan follows, not what the machine does besides.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Part:
    """Of an hour. rate: times that at which an activation takes half a stage's time; gone: seconds that the
    link is away in the first step; slower: of the second stage's layers."""

    seconds: float
    rate: float
    gone: float = 0.0
    slower: float = 1.0


HOUR = (Part(500, 4.0), Part(500, 1.0), Part(400, 0.5), Part(400, 0.5, gone=30.0), Part(400, 4.0),
        Part(250, 0.25), Part(300, 1.0, slower=2.0), Part(350, 1.0), Part(500, 2.0))
#: Micro-batches in flight of the first stage.
FIXED = range(2, 9)


def half_mbps(layer_s: float) -> float:
    """At which an activation takes half the time of three layers, forward and backward."""
    return BITS / (3 * 3 * layer_s / 2) / 1e6


def drawn(name: str, number: int) -> list[Row]:
    draw = random.Random(1000 + number)
    layer_s, micro_batches = draw.choice((0.004, 0.008, 0.011, 0.02)), draw.choice((6, 8, 12, 16))
    slower = draw.choice((0.8, 1.0, 1.2)) / 1.3
    scene = (3, 3), layer_s, round(half_mbps(layer_s), 3)
    job = LearningJob(scene, micro_batches, patient=True)
    job.slower, stays = slower, step_s(step_of(scene, job.held()[0], micro_batches, slower))
    free = min(step_s(step_of((*scene[:2], FREE_MBPS), (held, 1), micro_batches, slower)) for held in FIXED)
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
        Row.median(name, "slow edge, learns : free edge (simulated)", [learns / free], "x", True, "<= 1.15"),
        Row.median(name, "slow edge, stays : free edge (simulated)", [stays / free], "x", True),
    ]  # fmt: skip


def hour(name: str) -> list[Row]:
    layer_s = 0.1 / 9
    half, learned = half_mbps(layer_s), [0] * len(HOUR)
    job = LearningJob(((3, 3), layer_s, 4 * half), 8, patient=True)
    fixed = {held: [_steps(part, layer_s, half, held) for part in HOUR] for held in FIXED}
    end = 0.0
    try:
        for place, part in enumerate(HOUR):
            end += part.seconds
            job.scene, job.slower = ((3, 3), layer_s, part.rate * half), part.slower / 1.3
            job.clock += part.gone
            while job.clock < end:
                job.step()
                learned[place] += 1
    finally:
        job.end()
    best = sum(max(parts) for parts in zip(*fixed.values()))
    one = max(map(sum, fixed.values()))
    return [
        Row.median(name, "steps, learns : the best fixed plan of each part (simulated)",
                   [sum(learned) / best], "x", True, ">= 0.95"),
        Row.median(name, "steps, learns : the best one fixed plan (simulated)", [sum(learned) / one], "x",
                   True, ">= 1"),
        Row.median(name, "steps, learns (simulated)", [sum(learned)], "steps", True),
    ]  # fmt: skip


def _steps(part: Part, layer_s: float, half: float, held: int) -> float:
    scene = (3, 3), layer_s, part.rate * half
    return (part.seconds - part.gone) / step_s(step_of(scene, (held, 1), 8, part.slower / 1.3))
