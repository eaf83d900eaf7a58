"""Decides again, of what a running job has measured, what can change at a step's boundary: micro-batches in
flight.

    measured(plan, ...)    the plan with the job's own seconds in place of the model's and the networks'
    PipelineEvaluator      step after step: what to change, whether it brought what was predicted, what to
                           take back

The price and the code are those of the start (plan/decide.py, plan/cost/pipeline.py). Nothing flaps: a
change must be predicted to bring GAIN of a step; one that does not bring KEPT of it is taken back, and is not
tried again until what was measured differs by OTHER.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan import partition
from holmes_ext.plan.cost.pipeline import SETTLED, WORTH_MORE, walked_ends
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.decide import Decisions, decisions
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.profile import Profile
from holmes_ext.plan.workload import StageLoad, passes_s

#: Parts of a step: that a change must be predicted to bring; that it must have brought to stay; that a
#: restart must bring to be told. OTHER: part by which a pass or a stage link must differ to count as another;
#: SAME: up to which nothing is decided anew.
GAIN, KEPT, RESTART, OTHER, SAME = 0.02, 0.005, 0.05, 0.1, 0.01
#: `basis` of a plan with a job's own figures.
MEASURED = "measured"


@dataclass(frozen=True)
class Room:
    """Bytes of a stage's fullest rank: fixed, of each micro-batch under way, and of its device; 0: not
    known."""

    fixed_bytes: float = 0.0
    kept_bytes: float = 0.0
    limit_bytes: float = 0.0


@dataclass(frozen=True)
class Change:
    """From one number of micro-batches in flight by stage to another. now_s, then_s: seconds of a step,
    measured and predicted; back: a change is taken back. forward_s, backward_s: of the stages, that were
    measured."""

    before: tuple[int, ...]
    in_flight: tuple[int, ...]
    now_s: float
    then_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    back: bool = False

    @property
    def key(self) -> tuple[int, ...]:
        return self.in_flight

    @property
    def text(self) -> str:
        now, before = (
            "+".join(map(str, counts)) if counts else "the engine's own"
            for counts in (self.in_flight, self.before)
        )
        return f"{now} micro-batches in flight (were {before})"

    def adapted(self, plan: Plan, network_api: str) -> Plan:
        """`plan` as a job goes on with it."""
        known = plan.loads or (StageLoad(0.0, 0.0),) * len(self.forward_s)
        pairs = zip(known, self.forward_s, self.backward_s)
        loads = tuple(
            replace(load, forward_s=forward, backward_s=backward)
            for load, forward, backward in pairs
        )
        traffic = tuple(replace(decided, in_flight=self.in_flight) for decided in plan.traffic)
        return replace(plan, loads=loads, traffic=traffic)


@dataclass(frozen=True)
class Restart:
    """Layers of each stage that only a restart can give. now_s, then_s: seconds of a step, measured and
    predicted."""

    layers: tuple[int, ...]
    now_s: float
    then_s: float

    @property
    def partition(self) -> str:
        return ",".join(map(str, self.layers))

    @property
    def text(self) -> str:
        return f"a restart with --holmes-partition {self.partition}"

    @property
    def brings(self) -> str:
        return f"would take {self.then_s / self.now_s:.2f} of a step"


def measured(plan: Plan, profile: Profile, memory: Sequence[Room] = ()) -> Plan:
    """`plan` with what its stages take by `profile`, which has its sizes."""
    assert plan.sizes == profile.sizes
    known = memory or [Room()] * len(profile.stages)
    loads = tuple(
        StageLoad(
            sum(stage.forward_s) + stage.before_s[0] + stage.after_s[0],
            sum(stage.backward_s) + stage.before_s[1] + stage.after_s[1],
            room.fixed_bytes,
            room.kept_bytes,
            room.limit_bytes,
            stage.stage_link_s,
        )
        for stage, room in zip(profile.stages, known)
    )
    return replace(plan, loads=loads, workload=profile.workload(), basis=MEASURED)


def pipeline_s(plan: Plan, stage_links: Sequence[float], in_flight: Sequence[int]) -> float:
    """Seconds from a step's begin to its last backward, by the loads of `plan`."""
    return max(
        walked_ends(
            *passes_s(plan.loads), stage_links, plan.workload.micro_batches, tuple(in_flight)
        )
    )


def quickest(
    plan: Plan, stage_links: Sequence[float], in_flight: tuple[int, ...]
) -> tuple[int, ...]:
    """`in_flight`, or more where these make the step shorter, as many as the memory has room for: while few
    micro-batches fill the pipeline, faster stages work ahead, and messages have more time."""
    if not in_flight or plan.workload.micro_batches > SETTLED * in_flight[0]:
        return in_flight
    least = pipeline_s(plan, stage_links, in_flight)
    while True:
        deeper = (
            max(count, int(min(count + 1, load.most, plan.workload.micro_batches)))
            for count, load in zip(in_flight[:-1], plan.loads)
        )
        more = (*deeper, in_flight[-1])
        then = pipeline_s(plan, stage_links, more)
        if then >= least * (1 - WORTH_MORE):
            return in_flight
        in_flight, least = more, then


def better_split(costs: StageCosts, layers: Sequence[int], step_s: float) -> Restart | None:
    """What layers other than `layers` would make of a step of step_s seconds; None where it would bring less
    than RESTART."""
    now = partition_s(costs, layers)
    try:
        split = partition.partition("balanced", costs)
    except HolmesError:  # no split fits the memory
        return None
    then_s = step_s - now + partition_s(costs, split)
    if split == tuple(layers) or then_s >= step_s * (1 - RESTART):
        return None
    return Restart(split, step_s, then_s)


def partition_s(costs: StageCosts, layers: Sequence[int]) -> float:
    """Seconds of the pipeline's passes with so many layers on each stage."""
    passes, stage_links = passes_s(costs.loads(layers)), costs.stage_links_s(layers)
    return max(walked_ends(*passes, stage_links, costs.micro_batches, costs.in_flight(layers)))


@dataclass(frozen=True)
class _Trial:
    change: Any
    figures: tuple[float, ...]
    rest: tuple[float, ...]


class Trials:
    """What was changed, one after the other: a change has `key`, now_s and back."""

    def __init__(self) -> None:
        self.running: _Trial | None = None  # its steps are being measured
        # the last one: seconds that a step took, whether it stays
        self.ended: tuple[Any, float, bool] | None = None
        self._refused: list[_Trial] = []

    def begin(self, change: Any, figures: tuple[float, ...], rest: tuple[float, ...]) -> None:
        """All ranks go on with it. figures: seconds that it was decided on; rest: those that it does not
        change."""
        self.running = _Trial(change, figures, rest)

    def end(self, rest: tuple[float, ...], step_s: float) -> Any:
        """The change that runs is over; it itself, where it is to be taken back."""
        self.ended, trial, self.running = None, self.running, None
        if trial is None:
            return None
        change = trial.change
        stays = differ(trial.rest, rest) or step_s <= change.now_s * (1 - KEPT) or change.back
        self.ended = change, step_s, stays
        if not stays:
            self._refused.append(trial)
        return None if stays else change

    def refused(self, key: Any, figures: tuple[float, ...]) -> bool:
        """Whether it was taken back, and what it was decided on has not changed."""
        return any(
            trial.change.key == key and not differ(trial.figures, figures)
            for trial in self._refused
        )


class PipelineEvaluator:
    """Of one job. network_api: of its pipeline's groups."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        self.network_api, self.options, self.engine = network_api, options, engine
        self.trials = Trials()
        self._left: tuple[float, ...] = ()  # loads that called for no change

    def next(self, plan: Plan, step_s: float) -> Change | None:
        """What to change now, in a job whose steps take step_s with `plan`, which is measured()."""
        loads = _figures(plan, [load.stage_link_s for load in plan.loads])
        if self.trials.running is None and self._left and not differ(self._left, loads, SAME):
            self.trials.ended = None
            return None
        change = self._next(plan, step_s)
        self._left = () if change else loads
        return change

    def _next(self, plan: Plan, step_s: float) -> Change | None:
        decided = self._decisions(plan)
        stage_links, _ = decided.stage_link_seconds()
        now, figures = plan.traffic_of(self.network_api).in_flight, _figures(plan, stage_links)
        back = self.trials.end(figures, step_s)
        in_flight = back.before if back is not None else decided.in_flight()
        if back is None and self.options.inflight == "auto":
            in_flight = quickest(plan, stage_links, in_flight)
        sizes = plan.sizes
        if (
            not in_flight and now and sizes is not None
        ):  # the engine's own schedule would do as well
            of_1f1b = range(sizes.pipeline, 0, -1)
            in_flight = tuple(min(count, plan.workload.micro_batches) for count in of_1f1b)
        if in_flight == now:
            return None
        then_s = (
            step_s + pipeline_s(plan, stage_links, in_flight) - pipeline_s(plan, stage_links, now)
        )
        if back is None and (
            then_s > step_s * (1 - GAIN) or self.trials.refused(in_flight, figures)
        ):
            return None
        return Change(now, in_flight, step_s, then_s, *passes_s(plan.loads), back=back is not None)

    def taken(self, change: Change, plan: Plan) -> None:
        """All ranks go on with it; `plan`: the measured one that it was decided on."""
        figures = _figures(plan, self._decisions(plan).stage_link_seconds()[0])
        self.trials.begin(change, figures, figures)

    def _decisions(self, plan: Plan) -> Decisions:
        return decisions(plan, self.network_api, self.options, self.engine)


def _figures(plan: Plan, stage_links: Sequence[float]) -> tuple[float, ...]:
    forward, backward = passes_s(plan.loads)
    return *forward, *backward, *stage_links


def differ(some: Sequence[float], others: Sequence[float], part: float = OTHER) -> bool:
    """Whether seconds of a pipeline are others: by more than a part of its longest pass or stage link."""
    slack = part * max(*some, *others)
    return any(abs(a - b) > slack for a, b in zip(some, others))
