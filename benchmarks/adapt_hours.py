"""Simulates jobs whose networks change for an hour, and compares adapted plans with the best fixed plans.

These are the cases "simulated hour n" of adapt.py. Threads and votes of the ranks are real, and steps are
simulated, as in adapt_simulated.py.

The first PIPELINES jobs have two pipeline stages and adapt the number of micro-batches in flight.
The next DATA_PARALLEL jobs are data-parallel over two clusters, where the ranks of a node share its
NICs. They choose between a single ring, which is faster over a fast Ethernet, and a hierarchical all-reduce,
which is faster over a slow one.

Each hour begins at a random rate of Ethernet, and consists of parts that begin with a random event: the rate
halves or doubles, a backup takes 7/8 of it, the link fails for 30 s, or a GPU becomes half as fast.

Results are numbers of steps in the hour: of the job that adapts, of the best fixed plan for each part,
and of the best of the plans that stay fixed for the whole hour.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from adapt_simulated import FIXED, PipelineCase, half_mbps, step_of
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

PIPELINES = 4  # hours with pipelines
DATA_PARALLEL = 6  # hours with data-parallel jobs
HOUR_S = 3600.0
GONE_S = 30.0  # seconds for which a failed link is away
#: Events that begin a part of an hour. Those that are named twice are twice as likely.
EVENTS = ("halves", "halves", "doubles", "doubles", "backup", "gone", "slow")
#: Limits of Ethernet's rate, by whether the job is a pipeline. The unit is the rate that makes an activation
#: take half of a stage's time (pipeline), or the rate of the fast networks (data-parallel job).
MIN_RATE = {True: 0.25, False: 0.0625}
MAX_RATE = {True: 4.0, False: 0.75}
#: The simulated ranks are faster than the durations say by this factor.
RANK_SPEED = 1.3


@dataclass(frozen=True)
class Part:
    """Part of a simulated hour of training, with a constant Ethernet rate and GPU speed.

    A job trains for one simulated hour while the network changes. random_periods() divides the hour
    into such parts.
    """

    seconds: float
    rate: float  # of Ethernet between the clusters; MIN_RATE has the unit
    #: Seconds without the Ethernet link, in the first step of the period.
    gone: float = 0.0
    slower: float = 1.0  # factor of the durations of the forward and backward passes


def random_periods(draw: random.Random, pipeline: bool) -> list[Part]:
    """Return random periods that follow each other and fill one simulated hour.

    Each begins with an event. "halves" and "doubles" change the rate of Ethernet for all later
    periods, too. The others last for one period: "backup" takes 7/8 of the rate, "gone" takes the
    Ethernet link down for GONE_S, and "slow" makes the GPUs half as fast.

    Args:
        draw: Source of random numbers.
        pipeline: Whether the job is a pipeline. Its rates have other limits and another unit
            (MIN_RATE, MAX_RATE) than those of a data-parallel job.
    """
    min_rate = MIN_RATE[pipeline]
    max_rate = MAX_RATE[pipeline]
    rate = max_rate / 2 ** draw.randrange(4)  # the hour begins at 1, 1/2, 1/4 or 1/8 of the maximum
    parts: list[Part] = []
    left_s = HOUR_S
    while left_s > 0:
        seconds = min(left_s, draw.uniform(200, 600))  # long enough for a plan to adapt
        event = draw.choice(EVENTS)
        factor = {"halves": 0.5, "doubles": 2.0}.get(event, 1.0)
        rate = max(min_rate, min(max_rate, rate * factor))
        rate_of_part = rate
        if event == "backup":  # takes 7/8 of the rate, until the part ends
            rate_of_part = max(min_rate, rate / 8)
        parts.append(
            Part(
                seconds,
                rate_of_part,
                gone=GONE_S if event == "gone" else 0.0,
                slower=2.0 if event == "slow" else 1.0,
            )
        )
        left_s -= seconds
    return parts


class PipelineHour:
    """Pipeline of two stages that trains for one simulated hour, while the network's rate changes.

    A plan is a number of micro-batches in flight on the first stage. The adaptive job changes it.
    Each of its baselines keeps a number for the whole hour.
    """

    def __init__(self, draw: random.Random):
        """Draw the speed of the layers and the number of micro-batches."""
        # Seconds of the forward pass of a layer on the first stage.
        self.layer_s = draw.choice((0.02, 0.033, 0.05))
        self.micro_batches = draw.choice((8, 12))
        self.half_mbps = half_mbps(self.layer_s)  # an activation takes half of a stage's time
        self.fixed = list(FIXED)

    def pipeline_case(self, part: Part) -> PipelineCase:
        """Return the pipeline with the rate that its stage link has in a period of the hour."""
        rate_mbps = round(part.rate * self.half_mbps, 4)
        return PipelineCase(stage_layers=(3, 3), layer_s=self.layer_s, rate_mbps=rate_mbps)

    def start(self, part: Part) -> SimulatedJob:
        """Return a job that changes its micro-batches in flight by the step times that it measures.

        Its steps are simulated. The threads of its ranks, which measure and vote, are real.

        Args:
            part: First period of the hour. The job starts with its network rate.
        """
        # patient: after each step, wait until the ranks' threads are idle.
        return LearningJob(self.pipeline_case(part), self.micro_batches, patient=True)

    def change(self, job: Any, part: Part) -> None:
        """Set the rate of Ethernet and the speed of the ranks to those of a period of the hour."""
        job.case = self.pipeline_case(part)
        job.slower = part.slower / RANK_SPEED

    def step_s(self, part: Part, in_flight: int) -> float:
        """Return the step time with a fixed number of micro-batches in flight, in seconds."""
        slower = part.slower / RANK_SPEED
        # The last stage has a single micro-batch in flight.
        return step_s(step_of(self.pipeline_case(part), (in_flight, 1), self.micro_batches, slower))


class DataParallelJob(SimulatedJob):
    """Data-parallel job that adapts how it reduces gradients. Its steps are simulated.

    The base class has a thread for each rank. It measures, votes and changes the plan as in a real job. After
    each step it calls step_told() of this class for the times that the ranks measure.
    """

    def __init__(self, hour: DataParallelHour, part: Part):
        """Start a thread for each rank, to measure and vote as in a real job.

        The base class SimulatedJob (tests/learning_job.py) makes the threads. Only the training
        steps are simulated.

        Args:
            hour: The model, the two clusters, and a function that returns the times of a step for a network
                rate and a GPU speed.
            part: First period of the hour: its network rate and GPU speed. The caller sets
                `self.part` to the next period when that begins.
        """
        self.hour = hour
        self.part = part

        def stage_of(rank: int) -> Stage:
            """Return the stage that a rank holds: the whole model, as a pipeline of one stage."""
            return Stage(
                framework="torch",
                stage=0,
                tensor=1,
                micro_batches=1,
                gradient_bytes={},  # bytes by layer: not needed without pipeline stages
                stages={rank: 0},  # the ranks of its pipeline -> their stages
            )

        # SimulatedJob(clusters, parallel sizes, part of each rank). Sizes(): all ranks are
        # data-parallel. patient: after each step, wait until the ranks' threads are idle.
        super().__init__(hour.site(part.rate), Sizes(), stage_of, patient=True)

    def step_told(self) -> tuple[float, Callable[[Any], Any]]:
        """Simulate the next step, and return its seconds and the function that measures it.

        The base class SimulatedJob calls this once for each step. The ranks reduce gradients by
        their current plan.

        Returns:
            (seconds, measurements_of). The seconds are without an outage of the Ethernet link: the base class
            adds it (`self.gone`). measurements_of(rank) returns the measurements that a real rank would make
            in the step: all-reduces, pipeline messages (none), and totals.
        """
        # each() applies a function to the current plan of every rank, and checks that all agree.
        reduction: ReductionSpec = self.each(lambda traffic: traffic.reductions[0])
        step = self.hour.simulated(self.part, reduction)
        link_down_s = self.gone  # seconds without Ethernet in this step; usually 0
        hierarchical = is_hierarchical(reduction, self.hour.bytes)
        ranks = tuple(range(len(self.ranks)))
        group_fields = {"ranks": ranks, "description": "hierarchical" if hierarchical else ""}

        def measurements_of(rank: Any) -> tuple[Any, ...]:
            """Return the measurements of a rank in this step, and record how it reduced its gradients.

            The simulated `step` has the times. The record is an entry of
            `rank.current.reductions`, where `rank.current` is the rank's session (its run-time
            state). In a real job, the gradient reducer writes the record. The ranks' vote on a new
            plan reads it.

            Returns:
                (all-reduces, pipeline messages, totals). There is an all-reduce for each network.
                Over Ethernet it ends `link_down_s` later, after an outage of the link. There are no
                pipeline messages. Totals are those of the gradients: "bytes", "seconds", and
                "exposed" seconds (the rank only waits).
            """
            rank.current.reductions[ranks] = DoneReduction(
                planned=reduction,
                bytes=self.hour.bytes,
                hierarchical=hierarchical,
                overlap=reduction.overlap,
                follows_plan=True,  # the reducer changes when the plan does
            )
            ops = []
            # step.busy: network -> seconds for which the all-reduce uses it.
            for network, seconds in step.busy.items():
                delay_s = link_down_s if network == ETHERNET else 0.0  # only Ethernet fails
                group = Group(transport=Transport(network), **group_fields)
                ops.append(Op(group, end=seconds + delay_s))
            totals = {
                "bytes": self.hour.bytes,
                "seconds": max(op.end for op in ops),
                "exposed": step.exposed_s + link_down_s,
            }
            return ops, (), totals

        return step.seconds, measurements_of


@dataclass(frozen=True)
class Transport:
    fabric: str


@dataclass(frozen=True)
class Group:
    """Process group, with the attributes that telemetry reads."""

    ranks: tuple[int, ...]
    description: str
    transport: Transport
    name: str = "data"


@dataclass(frozen=True)
class Op:
    """All-reduce of gradients over one network, with the attributes that telemetry records of it.

    Times are seconds from the start of the step.
    """

    group: Group
    end: float
    start: float = 0.0
    peer: int | None = None  # rank of the other end of a message; None: a collective
    name: str = "all_reduce"
    payload: float = 1.0  # bytes; this value is a placeholder
    waited: float = 0.0  # seconds that the program stood still; a placeholder


@dataclass(frozen=True)
class DataParallelStep:
    """Simulated step of a data-parallel job, with the times of its gradient reduction."""

    seconds: float
    exposed_s: float  # seconds that a rank waits for its gradient reduction
    busy: dict[str, float]  # network -> seconds for which it carries gradients


class DataParallelHour:
    """Data-parallel job on two clusters for one simulated hour, while the rate of Ethernet changes.

    A plan says how gradients are reduced: in a single ring or hierarchically, and the sizes of the buckets.
    The adaptive job changes it. Each of its baselines keeps a plan for the whole hour.
    """

    def __init__(self, draw: random.Random):
        """Draw the speed of the networks, the number of ranks, and the model."""
        self.fast = draw.choice((1, 2)) * 10**9  # bits/s inside a cluster
        self.processes = draw.choice((4, 8))  # of a node
        self.compute_s = draw.choice((0.2, 0.5, 1.0))  # of a step's passes
        self.model = Model(
            layers=6,
            hidden=draw.choice((512, 768)),
            heads=4,
            sequence=128,
            vocabulary=256,
            micro_batches=1,
        )
        self.bytes = float(self.model.gradient_width * self.model.parameters)  # gradients of a rank
        # Plans of the baselines. They stay for the whole hour. collect_fixed_plans() finds them.
        self.fixed: list[Any] = []
        self.simulated = cache(self._simulated)  # the same conditions come again and again

    def site(self, rate: float) -> Site:
        """Return the two clusters, with Ethernet at `rate` times the rate of their fast networks."""
        clusters = [
            f"{name} {kind} {self.fast / 1e6:g}Mb/s {name}[0-1]"
            for name, kind in (("a", "ib"), ("b", "roce"))
        ]
        return site(*clusters, ethernet=f"{rate * self.fast / 1e6:g}Mb/s", processes=self.processes)

    def collect_fixed_plans(self, parts: list[Part]) -> None:
        """Make a plan for the network rate of each period, and store the distinct plans in `fixed`.

        The adaptive job is compared with jobs that keep one of these plans for the whole hour.

        Args:
            parts: The periods of the hour.
        """
        distinct: dict[Hashable, ReductionSpec] = {}
        for part in parts:
            plan = build_plan(self.site(part.rate), Sizes(), model=self.model, options=Options())
            (reduction,) = plan.traffic_of("sockets").reductions
            distinct[reduction] = reduction
        self.fixed = list(distinct)

    def start(self, part: Part) -> SimulatedJob:
        """Return a job that changes how it reduces gradients by the step times that it measures.

        Its steps are simulated. The threads of its ranks, which measure and vote, are real.

        Args:
            part: First period of the hour: the network rate and the speed of the GPUs at the start.
        """
        return DataParallelJob(self, part)

    def change(self, job: Any, part: Part) -> None:
        """Set the rate of Ethernet and the speed of the ranks to those of a period of the hour."""
        job.part = part

    def step_s(self, part: Part, fixed: ReductionSpec) -> float:
        """Return the step time in a period of the hour, in seconds, with a fixed way to reduce."""
        return self.simulated(part, fixed).seconds

    def _simulated(self, part: Part, reduction: ReductionSpec) -> DataParallelStep:
        """Simulate a step of the data-parallel job, and return its time and that of its reduction.

        Args:
            part: Period of the hour: the rate of Ethernet, and the factor by which passes take
                longer.
            reduction: Whether gradients are reduced hierarchically or in a ring, and their buckets.

        Returns:
            The seconds of the step, the seconds that the slowest rank waits for its gradients (exposed), and
            the seconds that each network carries gradients.
        """
        hour_site = self.site(part.rate)
        hierarchical = is_hierarchical(reduction, self.bytes)
        layers = self.model.layers
        # A backward pass takes twice as long as a forward pass. Embedding and output layer take no time.
        layer_s = part.slower * self.compute_s / 3 / layers
        forward_s = (0.0, *(layer_s,) * layers, 0.0)
        backward_s = tuple(2 * seconds for seconds in forward_s)
        nothing = ((0.0,) * (layers + 2),)
        costs = StageCosts(
            forward_s=(forward_s,),
            backward_s=(backward_s,),
            reduction_s=nothing,
            transfer_s=nothing,
            micro_batches=1,
        )
        run = Execution(
            EngineTraits(),  # a plain loop without a pipeline
            overlap="on" if reduction.overlap else "off",
            hierarchical=hierarchical,
            direct=True,  # inside clusters, gloo exchanges directly and not in a ring
            # The hierarchical all-reduce is pipelined in chunks, and a ring reduces whole buckets.
            bucket_bytes=reduction.chunk_bytes if hierarchical else reduction.bucket_bytes,
        )
        order = [node.name for node in hour_site.nodes]
        step = simulate(hour_site, order, Sizes(), self.model, run, costs=costs)
        # `carried` has the bytes of a NIC by (nodes, network, direction). Nodes with the same
        # traffic are simulated as a single node, and share an entry. All NICs work at the same time, so the
        # NIC with most bytes decides how long its network is busy.
        busy: dict[str, float] = {}
        for (_equal_nodes, network, _direction), nic_bytes in step.carried.items():
            rate_bps = hour_site.fabric_by_name[network].rate_bps
            busy[network] = max(busy.get(network, 0.0), 8 * nic_bytes / rate_bps)
        # A rank's timeline consists of spans. Those of kind "reduce" are the times in which it only
        # waits for gradients. The rank that waits longest counts.
        exposed = max(
            sum(span.end - span.start for span in timeline.spans if span.kind == "reduce")
            for timeline in step.ranks
        )
        assert ETHERNET in busy
        return DataParallelStep(step.step_s, exposed_s=exposed, busy=busy)


def rows(name: str, number: int) -> list[Row]:
    """Simulate one hour, and return how many steps the adapting job made compared with fixed plans.

    Args:
        name: Name of the case in the results.
        number: Number of the simulated hour, from 1. In the first PIPELINES hours the job is a
            pipeline, and in all others it is data-parallel.
    """
    pipeline = number <= PIPELINES
    draw = random.Random(2000 + number)
    hour: PipelineHour | DataParallelHour = (
        PipelineHour(draw) if pipeline else DataParallelHour(draw)
    )
    parts = random_periods(draw, pipeline)
    if isinstance(hour, DataParallelHour):
        hour.collect_fixed_plans(parts)
    learned = [0] * len(parts)  # number of steps that the adapting job makes in each part
    end = 0.0  # of the current part, in simulated seconds
    job = hour.start(parts[0])
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
    steps_of_plans = []  # for each fixed plan, its numbers of steps in the parts
    for plan in hour.fixed:
        steps = [(part.seconds - part.gone) / hour.step_s(part, plan) for part in parts]
        steps_of_plans.append(steps)
    best_per_part = sum(map(max, zip(*steps_of_plans)))
    best_fixed = max(map(sum, steps_of_plans))
    about = "in flight" if pipeline else "sums"  # difference of the plans, for names of metrics
    return [
        Row.median(
            name,
            f"steps, learns : the best fixed plan of each part ({about}, simulated)",
            [sum(learned) / best_per_part],
            unit="x",
            emulated=True,
            target=">= 0.95",
        ),
        Row.median(
            name,
            f"steps, learns : the best one fixed plan ({about}, simulated)",
            [sum(learned) / best_fixed],
            unit="x",
            emulated=True,
            target=">= 1",
        ),
        Row.median(
            name,
            f"steps, the best plan of each part : the best one ({about}, simulated)",
            [best_per_part / best_fixed],
            unit="x",
            emulated=True,
        ),
        Row.median(name, f"changes ({about}, simulated)", [changes], unit="changes", emulated=True),
        Row.median(
            name, f"steps, learns ({about}, simulated)", [sum(learned)], unit="steps", emulated=True
        ),
    ]
