"""Hours in which networks change, drawn before they are run: adapt.py's "simulated hour n".

Real threads and votes, simulated steps, as in adapt_simulated.py. PIPELINES jobs of two stages (micro-batches
in flight are decided again), then SUMS data-parallel ones on two clusters, whose ranks share their node's
NICs (one ring is faster on a good Ethernet, hierarchical on a bad one). Every hour begins at a drawn
rate; each
of its parts halves or doubles it, or a backup takes all but an eighth, the link is away for 30 s, a GPU is
half as fast. Counted are steps: of the job that learns, of the best fixed plan of each part, and of the best
one of the fixed plans.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from adapt_simulated import FIXED, half_mbps, step_of
from harness import Row

from holmes_ext.adapt.reductions import is_hierarchical
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.session import DoneReduction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from clusters import site  # noqa: E402
from learning_job import LearningJob, SimulatedJob, step_s  # noqa: E402

PIPELINES, SUMS, HOUR_S, GONE_S = 4, 6, 3600.0, 30.0
EVENTS = "halves", "halves", "doubles", "doubles", "backup", "gone", "slow"
#: Of a rate; 1 is that at which an activation takes half a stage's time, or that of the fast networks.
LEAST = {True: 0.25, False: 0.0625}
MOST = {True: 4.0, False: 0.75}


@dataclass(frozen=True)
class Part:
    """rate: see LEAST; gone: seconds that the link is away, in the first step; slower: of a rank's passes."""

    seconds: float
    rate: float
    gone: float = 0.0
    slower: float = 1.0


def drawn(draw: random.Random, pipeline: bool) -> list[Part]:
    least, most = LEAST[pipeline], MOST[pipeline]
    left, parts, rate = HOUR_S, list[Part](), most / 2 ** draw.randrange(4)
    while left > 0:
        seconds = min(left, draw.uniform(200, 600))
        event = draw.choice(EVENTS)
        rate = max(least, min(most, rate * {"halves": 0.5, "doubles": 2.0}.get(event, 1.0)))
        now = max(least, rate / 8) if event == "backup" else rate
        parts.append(Part(seconds, now, GONE_S * (event == "gone"), 1.0 + (event == "slow")))
        left -= seconds
    return parts


# --------------------------------------------------------------------------- jobs


class PipelineHour:
    """layer_s: of the first stage's layers, forward."""

    def __init__(self, draw: random.Random):
        self.layer_s, self.micro_batches = draw.choice((0.02, 0.033, 0.05)), draw.choice((8, 12))
        self.half, self.fixed = half_mbps(self.layer_s), list(FIXED)

    def case(self, part: Part) -> tuple[Any, ...]:
        return (3, 3), self.layer_s, round(part.rate * self.half, 4)

    def start(self, part: Part) -> SimulatedJob:
        return LearningJob(self.case(part), self.micro_batches, patient=True)

    def change(self, job: Any, part: Part) -> None:
        job.case, job.slower = self.case(part), part.slower / 1.3

    def step_s(self, part: Part, held: int) -> float:
        """Of a fixed plan, as many micro-batches in flight."""
        return step_s(step_of(self.case(part), (held, 1), self.micro_batches, part.slower / 1.3))


class SummingJob(SimulatedJob):
    """Data-parallel; a GradientReducer of each rank sums as the plan says. hour: SumsHour; part: the
    present one."""

    def __init__(self, hour: SumsHour, part: Part):
        self.hour, self.part = hour, part
        super().__init__(
            hour.site(part.rate),
            Sizes(),
            lambda rank: Stage("torch", 0, 1, 1, {}, {rank: 0}),
            patient=True,
        )

    def step_told(self) -> tuple[float, Callable[[Any], Any]]:
        reduction: ReductionSpec = self.each(lambda traffic: traffic.reductions[0])
        step, gone = self.hour.simulated(self.part, reduction), self.gone
        hierarchical, ranks = (
            is_hierarchical(reduction, self.hour.bytes),
            tuple(range(len(self.ranks))),
        )
        group_fields = {"ranks": ranks, "description": "hierarchical" if hierarchical else ""}

        def told(rank: Any) -> tuple[Any, ...]:
            done = DoneReduction(
                reduction, self.hour.bytes, hierarchical, reduction.overlap, follows=True
            )
            rank.current.reductions[ranks] = done
            ops = [
                Op(
                    Group(transport=Transport(name), **group_fields),
                    seconds + gone * (name == ETHERNET),
                )
                for name, seconds in step.busy.items()
            ]
            seconds, exposed = max(op.end for op in ops), step.exposed_s + gone
            return ops, (), {"bytes": self.hour.bytes, "seconds": seconds, "exposed": exposed}

        return step.seconds, told


@dataclass(frozen=True)
class Transport:
    fabric: str


@dataclass(frozen=True)
class Group:
    """As telemetry tells of it."""

    ranks: tuple[int, ...]
    description: str
    transport: Transport
    name: str = "data"


@dataclass(frozen=True)
class Op:
    """An operation of a sum, from the step's begin on."""

    group: Group
    end: float
    start: float = 0.0
    peer: int | None = None
    name: str = "all_reduce"
    payload: float = 1.0
    waited: float = 0.0


@dataclass(frozen=True)
class SumStep:
    """busy: seconds in which each network carried sums."""

    seconds: float
    exposed_s: float
    busy: dict[str, float]


class SumsHour:
    """compute_s: of a step's passes; bytes: of a rank's gradients; processes: of a node; fast: bits/s inside
    a cluster."""

    def __init__(self, draw: random.Random):
        self.fast, self.processes = draw.choice((1, 2)) * 10**9, draw.choice((4, 8))
        self.compute_s = draw.choice((0.2, 0.5, 1.0))
        self.model = Model(6, draw.choice((512, 768)), 4, 128, 256, micro_batches=1)
        self.bytes = float(self.model.gradient_width * self.model.parameters)
        self.fixed: list[Any] = []
        self.simulated = cache(self._simulated)

    def site(self, rate: float) -> Site:
        clusters = [
            f"{name} {kind} {self.fast / 1e6:g}Mb/s {name}[0-1]"
            for name, kind in (("a", "ib"), ("b", "roce"))
        ]
        return site(*clusters, ethernet=f"{rate * self.fast / 1e6:g}Mb/s", processes=self.processes)

    def prepare(self, parts: list[Part]) -> None:
        """The plans that somebody could have fixed: what holmes decides at the rate of some part."""
        distinct: dict[Hashable, ReductionSpec] = {}
        for part in parts:
            plan = build_plan(self.site(part.rate), Sizes(), model=self.model, options=Options())
            (reduction,) = plan.traffic_of("sockets").reductions
            distinct[reduction] = reduction
        self.fixed = list(distinct)

    def start(self, part: Part) -> SimulatedJob:
        return SummingJob(self, part)

    def change(self, job: Any, part: Part) -> None:
        job.part = part

    def step_s(self, part: Part, fixed: ReductionSpec) -> float:
        return self.simulated(part, fixed).seconds

    def _simulated(self, part: Part, reduction: ReductionSpec) -> SumStep:
        hour_site, hierarchical = self.site(part.rate), is_hierarchical(reduction, self.bytes)
        layer_s = part.slower * self.compute_s / 3 / self.model.layers
        row, none = (0.0, *(layer_s,) * self.model.layers, 0.0), ((0.0,) * (self.model.layers + 2),)
        costs = StageCosts((row,), (tuple(2 * forward_s for forward_s in row),), none, none, 1)
        run = Execution(
            EngineTraits(),
            overlap="on" if reduction.overlap else "off",
            hierarchical=hierarchical,
            direct=True,
            bucket_bytes=reduction.chunk_bytes if hierarchical else reduction.bucket_bytes,
        )
        order = [node.name for node in hour_site.nodes]
        step = simulate(hour_site, order, Sizes(), self.model, run, costs=costs)
        busy: dict[str, float] = {}
        for (_, name, _), carried in step.carried.items():
            rate = hour_site.fabric_by_name[name].rate_bps
            busy[name] = max(busy.get(name, 0.0), 8 * carried / rate)
        exposed = max(
            sum(span.end - span.start for span in line.spans if span.kind == "reduce")
            for line in step.ranks
        )
        assert ETHERNET in busy
        return SumStep(step.step_s, exposed, busy)


# --------------------------------------------------------------------------- an hour


def rows(name: str, number: int) -> list[Row]:
    pipeline, draw = number <= PIPELINES, random.Random(2000 + number)
    hour: PipelineHour | SumsHour = PipelineHour(draw) if pipeline else SumsHour(draw)
    parts = drawn(draw, pipeline)
    if isinstance(hour, SumsHour):
        hour.prepare(parts)
    learned, end, job = [0] * len(parts), 0.0, hour.start(parts[0])
    try:
        for index, part in enumerate(parts):
            end += part.seconds
            hour.change(job, part)
            job.gone = part.gone
            while job.clock < end:
                job.step()
                learned[index] += 1
        changes = sum("plan" in document for document in job.documents)
    finally:
        job.end()
    fixed = [
        [(part.seconds - part.gone) / hour.step_s(part, plan) for part in parts]
        for plan in hour.fixed
    ]
    best_per_part, best_fixed = sum(map(max, zip(*fixed))), max(map(sum, fixed))
    about = "in flight" if pipeline else "sums"
    return [
        Row.median(
            name,
            f"steps, learns : the best fixed plan of each part ({about}, simulated)",
            [sum(learned) / best_per_part],
            "x",
            True,
            ">= 0.95",
        ),
        Row.median(
            name,
            f"steps, learns : the best one fixed plan ({about}, simulated)",
            [sum(learned) / best_fixed],
            "x",
            True,
            ">= 1",
        ),
        Row.median(
            name,
            f"steps, the best plan of each part : the best one ({about}, simulated)",
            [best_per_part / best_fixed],
            "x",
            True,
        ),
        Row.median(name, f"changes ({about}, simulated)", [changes], "changes", True),
        Row.median(name, f"steps, learns ({about}, simulated)", [sum(learned)], "steps", True),
    ]
