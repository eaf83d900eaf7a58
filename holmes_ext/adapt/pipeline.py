"""Decides again on the micro-batches in flight of a running job, from measured times.

    measured()           returns the plan with the job's measured times instead of predicted ones
    PipelineEvaluator    chooses a change after each window of steps, checks its effect, and takes it back if
                         it has none
    better_split()       finds layers of the stages that would shorten the step, for a restart

Prices and rules are those of the plan at the start (plan/decide.py, plan/cost/pipeline.py). Three thresholds
prevent flapping: a change must be predicted to save GAIN of a step. If it does not save KEPT of a step, it is
taken back. Then it is not tried again until the measured times differ by OTHER.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

# Shares of the step time.
GAIN = 0.02  # that a change must be predicted to save
KEPT = 0.005  # that a change must have saved to stay
RESTART = 0.05  # that a restart must be predicted to save
# Shares of the longest pass or stage link.
OTHER = 0.1  # least difference of times to try a rejected change again
SAME = 0.01  # up to which times count as equal, so that no decision is needed
#: `basis` of a plan with measured times.
MEASURED = "measured"


@dataclass(frozen=True)
class Room:
    """Memory of the rank of a stage with the least free memory; zeros if it is not measured."""

    fixed_bytes: float = 0.0  # independent of the micro-batches in flight
    kept_bytes: float = 0.0  # for each micro-batch in flight
    limit_bytes: float = 0.0  # usable bytes of the device


@dataclass(frozen=True)
class Change:
    """Change of the micro-batches in flight; () stands for the engine's own schedule."""

    before: tuple[int, ...]  # micro-batches in flight before the change, by stage
    in_flight: tuple[int, ...]  # after the change
    now_s: float  # measured seconds of a step before the change
    then_s: float  # predicted seconds of a step after the change
    forward_s: tuple[float, ...]  # measured seconds of a forward pass, by stage
    backward_s: tuple[float, ...]  # measured seconds of a backward pass, by stage
    back: bool = False  # whether an earlier change is taken back

    @property
    def key(self) -> tuple[int, ...]:
        """Value that is equal for changes with the same result."""
        return self.in_flight

    @property
    def text(self) -> str:
        """Description for messages."""
        after = _counts_text(self.in_flight)
        return f"{after} micro-batches in flight (were {_counts_text(self.before)})"

    def adapted(self, plan: Plan, network_api: str) -> Plan:
        """Return a plan with this change and the measured times of passes."""
        old_loads = plan.loads or (StageLoad(0.0, 0.0),) * len(self.forward_s)
        loads = tuple(
            replace(load, forward_s=forward_s, backward_s=backward_s)
            for load, forward_s, backward_s in zip(old_loads, self.forward_s, self.backward_s)
        )
        traffic = tuple(replace(decided, in_flight=self.in_flight) for decided in plan.traffic)
        return replace(plan, loads=loads, traffic=traffic)


def _counts_text(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts)) if counts else "the engine's own"


@dataclass(frozen=True)
class Restart:
    """Change of the layers of the stages, which needs a restart."""

    layers: tuple[int, ...]  # of each stage
    now_s: float  # measured seconds of a step
    then_s: float  # predicted seconds of a step after the restart

    @property
    def partition(self) -> str:
        """Value of --holmes-partition."""
        return ",".join(map(str, self.layers))

    @property
    def text(self) -> str:
        """Description for messages."""
        return f"a restart with --holmes-partition {self.partition}"

    @property
    def brings(self) -> str:
        """Effect for messages, a predicate."""
        return f"would take {self.then_s / self.now_s:.2f} of a step"


def measured(plan: Plan, profile: Profile, memory: Sequence[Room] = ()) -> Plan:
    """Return a plan with the measured times of its stages instead of the predicted ones.

    Args:
        plan: The plan.
        profile: Measured times, for the same parallel sizes.
        memory: Measured memory of each stage; empty if unknown.
    """
    assert plan.sizes == profile.sizes
    loads = []
    for stage, room in zip(profile.stages, memory or [Room()] * len(profile.stages)):
        forward_before_s, backward_before_s = stage.before_s  # of modules before the blocks
        forward_after_s, backward_after_s = stage.after_s  # of modules after the blocks
        load = StageLoad(
            forward_s=sum(stage.forward_s) + forward_before_s + forward_after_s,
            backward_s=sum(stage.backward_s) + backward_before_s + backward_after_s,
            fixed_bytes=room.fixed_bytes,
            kept_bytes=room.kept_bytes,
            limit_bytes=room.limit_bytes,
            stage_link_s=stage.stage_link_s,
        )
        loads.append(load)
    return replace(plan, loads=tuple(loads), workload=profile.workload(), basis=MEASURED)


def pipeline_s(plan: Plan, stage_links: Sequence[float], in_flight: Sequence[int]) -> float:
    """Return the seconds from the begin of a step to the end of its last backward pass.

    Args:
        plan: Its loads have the times of passes.
        stage_links: Seconds of a message on each stage link.
        in_flight: Micro-batches in flight, by stage.
    """
    forward_s, backward_s = passes_s(plan.loads)
    micro_batches = plan.workload.micro_batches
    return max(walked_ends(forward_s, backward_s, stage_links, micro_batches, tuple(in_flight)))


def quickest(
    plan: Plan, stage_links: Sequence[float], in_flight: tuple[int, ...]
) -> tuple[int, ...]:
    """Return more micro-batches in flight as long as they shorten the step and fit the memory.

    With few micro-batches in a step, faster stages can work ahead, so that messages have more time. With
    many, `in_flight` is returned unchanged.

    Args:
        plan: Plan with measured times.
        stage_links: Seconds of a message on each stage link.
        in_flight: Micro-batches in flight, by stage; () for the engine's own schedule.
    """
    micro_batches = plan.workload.micro_batches
    # With many micro-batches, the pipeline's beginning and end hardly matter.
    if not in_flight or micro_batches > SETTLED * in_flight[0]:
        return in_flight
    seconds = pipeline_s(plan, stage_links, in_flight)
    while True:
        # One more on each stage but the last, as far as the stage's memory (load.most) allows.
        deeper = []
        for count, load in zip(in_flight[:-1], plan.loads):
            allowed = int(min(count + 1, load.most, micro_batches))
            deeper.append(max(count, allowed))
        candidate = (*deeper, in_flight[-1])
        candidate_s = pipeline_s(plan, stage_links, candidate)
        if candidate_s >= seconds * (1 - WORTH_MORE):  # the gain is too small
            return in_flight
        in_flight = candidate
        seconds = candidate_s


def better_split(costs: StageCosts, layers: Sequence[int], step_s: float) -> Restart | None:
    """Return the layers of the stages with the shortest step; None if they save less than RESTART.

    Args:
        costs: Costs of the layers on each stage.
        layers: Layers of each stage now.
        step_s: Measured seconds of a step.
    """
    now_s = partition_s(costs, layers)  # of the pipeline's passes; step_s has more than them
    try:
        split = partition.partition("balanced", costs)
    except HolmesError:  # no split fits the memory
        return None
    then_s = step_s - now_s + partition_s(costs, split)
    if split == tuple(layers) or then_s >= step_s * (1 - RESTART):
        return None
    return Restart(split, step_s, then_s)


def partition_s(costs: StageCosts, layers: Sequence[int]) -> float:
    """Return the seconds of the pipeline's passes for a number of layers on each stage."""
    forward_s, backward_s = passes_s(costs.loads(layers))
    stage_link_s = costs.stage_links_s(layers)
    in_flight = costs.in_flight(layers)
    return max(walked_ends(forward_s, backward_s, stage_link_s, costs.micro_batches, in_flight))


@dataclass(frozen=True)
class _Trial:
    """Change whose effect is measured."""

    change: Any
    deciding_times: tuple[float, ...]  # seconds that the decision was based on
    unchanged_times: tuple[float, ...]  # seconds that the change should not affect


class EndedTrial(NamedTuple):
    """Result of a trial."""

    change: Any
    step_s: float  # measured seconds of a step with the change
    stays: bool  # False if the change is taken back


class Trials:
    """Changes of one kind, of which one at a time is on trial.

    A change has the attributes `key`, `now_s` and `back`.
    """

    def __init__(self) -> None:
        self.running: _Trial | None = None
        self.ended: EndedTrial | None = None  # by the last call of end()
        self._rejected: list[_Trial] = []

    def begin(
        self, change: Any, deciding_times: tuple[float, ...], unchanged_times: tuple[float, ...]
    ) -> None:
        """Begin the trial of a change that all ranks adopt.

        Args:
            change: The change.
            deciding_times: Seconds that the decision was based on. If the change is taken back, it is not
                tried again while these times stay similar.
            unchanged_times: Seconds that the change should not affect.
        """
        self.running = _Trial(change, deciding_times, unchanged_times)

    def end(self, unchanged_times: tuple[float, ...], step_s: float) -> Any:
        """End the trial; return its change if it must be taken back, else None.

        A change stays if it has shortened the step, if other times have changed meanwhile, which hides its
        effect, or if it took back an earlier change.

        Args:
            unchanged_times: Measured seconds that the change should not affect.
            step_s: Measured seconds of a step.
        """
        trial = self.running
        self.running = None
        self.ended = None
        if trial is None:
            return None
        change = trial.change
        has_saved_time = step_s <= change.now_s * (1 - KEPT)
        others_differ = differ(trial.unchanged_times, unchanged_times)
        stays = others_differ or has_saved_time or change.back
        self.ended = EndedTrial(change, step_s, stays)
        if stays:
            return None
        self._rejected.append(trial)
        return change

    def refused(self, key: Any, deciding_times: tuple[float, ...]) -> bool:
        """Return whether a change was taken back before, when the measured times were similar."""
        return any(
            trial.change.key == key and not differ(trial.deciding_times, deciding_times)
            for trial in self._rejected
        )


class PipelineEvaluator:
    """Decisions on the micro-batches in flight of one job."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        """Prepare to decide.

        Args:
            network_api: VERBS for NCCL, SOCKETS for gloo, of the pipeline's groups.
            options: Options of the job.
            engine: Abilities of the training framework.
        """
        self.network_api = network_api
        self.options = options
        self.engine = engine
        self.trials = Trials()
        self._times_without_change: tuple[float, ...] = ()  # for which no change was found

    def next(self, plan: Plan, step_s: float) -> Change | None:
        """Return the next change, or None.

        Args:
            plan: Plan with measured times (measured()).
            step_s: Measured seconds of a step.
        """
        times = _times_of(plan, [load.stage_link_s for load in plan.loads])
        # If no change was found for equal times before, none will be found now.
        is_unchanged = bool(self._times_without_change) and not differ(
            self._times_without_change, times, SAME
        )
        if self.trials.running is None and is_unchanged:
            self.trials.ended = None
            return None
        change = self._decide(plan, step_s)
        self._times_without_change = () if change else times
        return change

    def _decide(self, plan: Plan, step_s: float) -> Change | None:
        """End the running trial, if there is one, and return the next change, or None.

        The next change takes back the one on trial if that has not saved time. Otherwise it is the one that
        the rules of the plan choose from the measured times, if it is predicted to save GAIN of a step.

        Args:
            plan: Plan with measured times.
            step_s: Measured seconds of a step.
        """
        decided = self._decisions(plan)  # by the rules that also made the plan at the start
        stage_links, _ = decided.stage_link_seconds()
        now = plan.traffic_of(
            self.network_api
        ).in_flight  # by stage; () for the engine's own schedule
        times = _times_of(plan, stage_links)
        rejected = self.trials.end(times, step_s)  # the change to take back, or None
        takes_back = rejected is not None
        in_flight = rejected.before if takes_back else decided.in_flight()
        if not takes_back and self.options.inflight == "auto":
            in_flight = quickest(plan, stage_links, in_flight)
        if not in_flight and now and plan.sizes is not None:
            # The engine's own schedule (1F1B) would do. A running job can only change the counts.
            counts_of_1f1b = range(plan.sizes.pipeline, 0, -1)
            in_flight = tuple(min(count, plan.workload.micro_batches) for count in counts_of_1f1b)
        if in_flight == now:
            return None
        pipeline_now_s = pipeline_s(plan, stage_links, now)
        pipeline_then_s = pipeline_s(plan, stage_links, in_flight)
        then_s = step_s + pipeline_then_s - pipeline_now_s
        if not takes_back:
            saves_enough = then_s <= step_s * (1 - GAIN)
            if not saves_enough or self.trials.refused(in_flight, times):
                return None
        forward_s, backward_s = passes_s(plan.loads)
        return Change(
            before=now,
            in_flight=in_flight,
            now_s=step_s,
            then_s=then_s,
            forward_s=forward_s,
            backward_s=backward_s,
            back=takes_back,
        )

    def taken(self, change: Change, plan: Plan) -> None:
        """Begin the trial of a change that all ranks adopt.

        Args:
            change: The change.
            plan: Plan with measured times that the decision was based on.
        """
        stage_links, _ = self._decisions(plan).stage_link_seconds()
        times = _times_of(plan, stage_links)
        self.trials.begin(change, deciding_times=times, unchanged_times=times)

    def _decisions(self, plan: Plan) -> Decisions:
        return decisions(plan, self.network_api, self.options, self.engine)


def _times_of(plan: Plan, stage_links: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of all stages' passes and of all stage links."""
    forward_s, backward_s = passes_s(plan.loads)
    return *forward_s, *backward_s, *stage_links


def differ(times: Sequence[float], other_times: Sequence[float], share: float = OTHER) -> bool:
    """Return whether two lists of seconds differ by more than a share of the longest time."""
    tolerance = share * max(*times, *other_times)
    return any(abs(first - second) > tolerance for first, second in zip(times, other_times))
