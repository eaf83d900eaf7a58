"""Chooses anew the micro-batches in flight of a running job, from measured times.

    measured()           returns the plan with the job's measured times instead of predicted ones
    PipelineEvaluator    chooses a change after every few steps, and takes it back if it turns out
                         not to save time
    better_split()       finds layers of the stages that would shorten the step, for a restart

The step time is predicted as for the plan at the start (plan/decide.py, plan/cost/pipeline.py).
Three thresholds prevent flapping:

    LEAST_GAIN       2 %     a change is tried only if it is predicted to save this share of a step
    LEAST_SAVED      0.5 %   it is taken back if its trial (some steps with it) saves less than this share
    CHANGED_SHARE    10 %    it is then not tried again until measured times have changed by this share
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.cost.pipeline import SETTLED, WORTH_MORE, walked_ends
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.decide import Decisions, decisions
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.partition import partition
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.profile import Profile
from holmes_ext.plan.workload import StageLoad, passes_s

# Shares of the step time.
LEAST_GAIN = 0.02  # least predicted saving for which a change is tried
LEAST_SAVED = 0.005  # least measured saving for which a change stays
RESTART_GAIN = 0.05  # least predicted saving for which a restart is proposed
# Differences between two lists of measured times, as shares of the longest time in them.
CHANGED_SHARE = 0.1  # with a larger difference, a rejected change is tried again
EQUAL_SHARE = 0.01  # up to this difference, times count as equal, so that nothing is decided anew
#: `basis` of a plan with measured times.
MEASURED = "measured"


@dataclass(frozen=True)
class Room:
    """GPU memory of a rank, in bytes; all zeros if it is not measured.

    It stands for a whole pipeline stage: the rank is the stage's rank with the least free memory.
    """

    fixed_bytes: float = 0.0  # independent of the micro-batches in flight
    kept_bytes: float = 0.0  # for each micro-batch in flight
    limit_bytes: float = 0.0  # usable bytes of the device


@dataclass(frozen=True)
class Change:
    """Change of the number of micro-batches that each stage of a running pipeline keeps in flight.

    PipelineEvaluator proposes such a change from measured times, and all ranks adopt it at the same
    step. Tuples have a number for each stage. An empty tuple of micro-batches stands for the
    training engine's own schedule, 1F1B.
    """

    before: tuple[int, ...]  # micro-batches in flight before the change, by stage
    in_flight: tuple[int, ...]  # after the change
    now_s: float  # measured seconds of a step before the change
    then_s: float  # predicted seconds of a step after the change
    forward_s: tuple[float, ...]  # measured seconds of a forward pass, by stage
    backward_s: tuple[float, ...]  # measured seconds of a backward pass, by stage
    takes_back: bool = False  # True: an earlier change did not save time and is reverted

    @property
    def key(self) -> tuple[int, ...]:
        """Value that is equal for changes to the same plan; Trials recognizes rejected changes by it."""
        return self.in_flight

    @property
    def text(self) -> str:
        """This change in words, such as "3+2+1 micro-batches in flight (were 2+2+1)"."""
        after = _counts_text(self.in_flight)
        return f"{after} micro-batches in flight (were {_counts_text(self.before)})"

    def adapted(self, plan: Plan, network_api: str) -> Plan:
        """Return a plan with this change and with measured times of forward and backward passes.

        Args:
            plan: Plan before the change.
            network_api: Not used; the parameter exists because ReductionChange.adapted() needs it.
                The plan has separate decisions (`traffic`) for NCCL and gloo. This change is made
                in both.
        """
        # Load: seconds and bytes of a stage. A plan made without times has no loads yet.
        old_loads = plan.loads or (StageLoad(0.0, 0.0),) * len(self.forward_s)
        loads = tuple(
            replace(load, forward_s=forward_s, backward_s=backward_s)
            for load, forward_s, backward_s in zip(old_loads, self.forward_s, self.backward_s)
        )
        traffic = tuple(
            replace(decisions_for_api, in_flight=self.in_flight)
            for decisions_for_api in plan.traffic
        )
        return replace(plan, loads=loads, traffic=traffic)


def _counts_text(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts)) if counts else "the engine's own"


@dataclass(frozen=True)
class Restart:
    """Change of the numbers of layers on the pipeline stages; it needs a restart of the job."""

    layers: tuple[int, ...]  # of each stage
    now_s: float  # measured seconds of a step
    then_s: float  # predicted seconds of a step after the restart

    @property
    def partition(self) -> str:
        """Layers of the stages, as the value of --holmes-partition, such as "5,3"."""
        return ",".join(map(str, self.layers))

    @property
    def text(self) -> str:
        """Description of this restart for the user, to be continued by `effect_text`."""
        return f"a restart with --holmes-partition {self.partition}"

    @property
    def effect_text(self) -> str:
        """Predicted effect of this restart for the user: the end of a sentence that begins with `text`."""
        return f"would take {self.then_s / self.now_s:.2f} of a step"


def measured(plan: Plan, profile: Profile, memory: Sequence[Room] = ()) -> Plan:
    """Return a plan with the measured times of its pipeline stages instead of predicted times.

    Args:
        plan: The plan.
        profile: Measured times of each stage: of its layers, and of a message to the next stage.
        memory: Measured GPU memory of each stage: bytes that are always used, bytes for each
            micro-batch in flight, and the limit. Empty if no memory was measured.
    """
    # The profile was measured with the parallel sizes of this plan.
    assert plan.sizes == profile.sizes
    loads = []
    for stage, room in zip(profile.stages, memory or [Room()] * len(profile.stages)):
        # Layers outside the transformer blocks, such as embedding and output layer.
        forward_before_s, backward_before_s = stage.before_s
        forward_after_s, backward_after_s = stage.after_s
        load = StageLoad(
            forward_s=sum(stage.forward_s) + forward_before_s + forward_after_s,
            backward_s=sum(stage.backward_s) + backward_before_s + backward_after_s,
            fixed_bytes=room.fixed_bytes,
            kept_bytes=room.kept_bytes,
            limit_bytes=room.limit_bytes,
            stage_link_s=stage.stage_link_s,
        )
        loads.append(load)
    # `basis` is the source of a plan's times: here measurements.
    return replace(plan, loads=tuple(loads), workload=profile.workload(), basis=MEASURED)


def pipeline_s(plan: Plan, stage_links: Sequence[float], in_flight: Sequence[int]) -> float:
    """Return the seconds from the begin of a step to the last end of a backward pass on any stage.

    The order of passes and messages is simulated.

    Args:
        plan: Plan whose `loads` have the seconds of a forward and a backward pass of each stage.
        stage_links: Seconds of a message to the next stage, for each stage but the last.
        in_flight: Largest number of micro-batches in flight, by stage.
    """
    forward_s, backward_s = passes_s(plan.loads)
    micro_batches = plan.workload.micro_batches
    return max(walked_ends(forward_s, backward_s, stage_links, micro_batches, tuple(in_flight)))


def quickest(
    plan: Plan, stage_links: Sequence[float], in_flight: tuple[int, ...]
) -> tuple[int, ...]:
    """Raise the numbers of micro-batches in flight as long as this shortens the step; return them.

    A stage with more micro-batches in flight works ahead, so that it waits less for messages. This
    matters if a step has few micro-batches. With many, the slowest stage alone decides the time of
    the step, and `in_flight` is returned unchanged.

    Args:
        plan: Plan with measured times.
        stage_links: Seconds of a message to the next stage, for each stage but the last.
        in_flight: Micro-batches in flight, by stage; () for the engine's own schedule.
    """
    micro_batches = plan.workload.micro_batches
    # With more than SETTLED times as many micro-batches as in flight, filling and draining the
    # pipeline hardly matter.
    if not in_flight or micro_batches > SETTLED * in_flight[0]:
        return in_flight
    seconds = pipeline_s(plan, stage_links, in_flight)
    while True:
        # Another micro-batch on each stage but the last, as far as the stage's memory allows. The last
        # stage needs no more: there is no later stage that makes it wait for gradients.
        *counts_before_last, count_of_last = in_flight
        raised = []
        for count, load in zip(counts_before_last, plan.loads):
            count_in_memory = load.most  # largest number of micro-batches that fit the memory
            allowed = int(min(count + 1, count_in_memory, micro_batches))
            raised.append(max(count, allowed))
        candidate = (*raised, count_of_last)
        candidate_s = pipeline_s(plan, stage_links, candidate)
        saves_enough = candidate_s < seconds * (1 - WORTH_MORE)
        if not saves_enough:
            return in_flight
        in_flight = candidate
        seconds = candidate_s


def better_split(costs: StageCosts, layers: Sequence[int], step_s: float) -> Restart | None:
    """Return the best split of the layers into stages; None if it saves too little of a step.

    A restart costs minutes, so it must be predicted to save the share RESTART_GAIN of a step.

    Args:
        costs: Seconds and bytes of each layer on each stage.
        layers: Number of layers on each stage now.
        step_s: Measured seconds of a step.
    """
    try:
        best_layers = partition("balanced", costs)
    except HolmesError:  # no split fits the memory limits in `costs`
        return None
    # A step also contains work outside the pipeline's passes; it does not depend on the split.
    passes_now_s = seconds_of_passes(costs, layers)
    passes_then_s = seconds_of_passes(costs, best_layers)
    then_s = step_s - passes_now_s + passes_then_s
    saves_enough = then_s < step_s * (1 - RESTART_GAIN)
    if best_layers == tuple(layers) or not saves_enough:
        return None
    return Restart(best_layers, now_s=step_s, then_s=then_s)


def seconds_of_passes(costs: StageCosts, layers: Sequence[int]) -> float:
    """Return the seconds from the first forward to the last backward pass of a step, as simulated.

    Args:
        costs: Seconds and bytes of each layer on each stage.
        layers: Number of layers on each stage.
    """
    forward_s, backward_s = passes_s(costs.loads(layers))
    stage_link_s = costs.stage_links_s(layers)
    in_flight = costs.in_flight(layers)
    return max(walked_ends(forward_s, backward_s, stage_link_s, costs.micro_batches, in_flight))


@dataclass(frozen=True)
class _Trial:
    """Adopted change whose effect on the step time is being measured, and the times before the change."""

    change: Any
    deciding_times: tuple[float, ...]  # measured seconds from which the change was chosen
    unchanged_times: tuple[float, ...]  # seconds that the change should not affect


class EndedTrial(NamedTuple):
    """Adopted change with the step time that was measured with it, and whether it stays."""

    change: Any
    step_s: float  # measured seconds of a step with the change
    stays: bool  # False if the change is taken back


class Trials:
    """Trials of one class of changes, one after the other, and the changes that saved no time.

    A trial is some steps with a change that all ranks have adopted: their time decides whether the
    change stays. The changes are objects of Change or of ReductionChange. These attributes are used:
    `key` (equal for changes with the same result), `now_s` (measured seconds of a step before the
    change) and `takes_back` (it reverts an earlier change).
    """

    def __init__(self) -> None:
        self.running: _Trial | None = None
        self.ended: EndedTrial | None = None  # trial that the last call of end() has ended
        self._rejected: list[_Trial] = []  # trials of changes that were taken back

    def begin(
        self, change: Any, deciding_times: tuple[float, ...], unchanged_times: tuple[float, ...]
    ) -> None:
        """Begin the trial of a change that all ranks adopt.

        Args:
            change: The change.
            deciding_times: Measured seconds from which the change was chosen. If the change is
                taken back, it is not tried again while these times stay similar.
            unchanged_times: Measured seconds that the change should not affect. end() compares
                them with those after the trial.
        """
        self.running = _Trial(change, deciding_times, unchanged_times)

    def end(self, unchanged_times: tuple[float, ...], step_s: float) -> Any:
        """End the running trial, if any; return its change if it must be taken back, else None.

        A trial is some steps with an adopted change; their step time is measured. The change stays in
        each of these cases:

        1. The step has become shorter by the share LEAST_SAVED (0.5 %).
        2. Times that the change should not affect have changed meanwhile: they hide its effect.
        3. The change has itself undone an earlier change (`takes_back`): it is not undone again.

        Args:
            unchanged_times: Seconds that the change should not affect, as measured during the
                trial.
            step_s: Measured seconds of a step during the trial.
        """
        trial = self.running
        self.running = None
        self.ended = None
        if trial is None:
            return None
        change = trial.change
        # now_s: measured seconds of a step before the change.
        has_saved_time = step_s <= change.now_s * (1 - LEAST_SAVED)
        others_differ = differ(trial.unchanged_times, unchanged_times)
        stays = others_differ or has_saved_time or change.takes_back
        self.ended = EndedTrial(change, step_s, stays)
        if stays:
            return None
        self._rejected.append(trial)
        return change

    def was_rejected(self, key: Any, deciding_times: tuple[float, ...]) -> bool:
        """Return whether the same change was taken back before, when measured times were similar.

        Args:
            key: Value that is equal for changes with the same result.
            deciding_times: Measured seconds from which the change is chosen now.
        """
        return any(
            trial.change.key == key and not differ(trial.deciding_times, deciding_times)
            for trial in self._rejected
        )


class PipelineEvaluator:
    """Chooses changes of a job's numbers of micro-batches in flight, and checks their effect."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        """Create an evaluator for a job that has adopted no change yet.

        Args:
            network_api: VERBS for NCCL, SOCKETS for gloo, of the pipeline's groups.
            options: Options of the job.
            engine: Abilities of the training framework.
        """
        self.network_api = network_api
        self.options = options
        self.engine = engine
        self.trials = Trials()
        #: Measured seconds in the last call of next() if that call returned None. () before the
        #: first call, and after a call that returned a change.
        self._times_without_change: tuple[float, ...] = ()

    def next(self, plan: Plan, step_s: float) -> Change | None:
        """Return the next change of micro-batches in flight, or None to keep the plan.

        If the last call found no change and measured times have not changed since, the search is
        skipped and None is returned. It is not skipped while an adopted change is on trial.

        Args:
            plan: Current plan, with the measured times of its stages.
            step_s: Measured seconds of a step.
        """
        times = _times_of(plan, [load.stage_link_s for load in plan.loads])
        # If no change was found for equal times (within EQUAL_SHARE, 1 % of the longest), no change
        # will be found now.
        is_unchanged = bool(self._times_without_change) and not differ(
            self._times_without_change, times, EQUAL_SHARE
        )
        if self.trials.running is None and is_unchanged:
            self.trials.ended = None  # so that the caller does not report the last trial again
            return None
        change = self._decide(plan, step_s)  # also judges the change on trial, and may revert it
        self._times_without_change = () if change else times
        return change

    def _decide(self, plan: Plan, step_s: float) -> Change | None:
        """Judge the last change by the measured step time, and return the next change, or None.

        If the last change has not saved time, the next change takes it back. Otherwise the numbers of
        micro-batches in flight are chosen again, by the same rules as at the start of the job, but
        from measured times. They become a change if they are predicted to save LEAST_GAIN (2 %) of
        a step.

        Args:
            plan: Current plan, with the measured times of its stages.
            step_s: Measured seconds of a step.
        """
        decided = self._decisions(plan)
        # Seconds of a message to the next stage: measured where possible, else predicted.
        stage_links = decided.stage_link_seconds().transfer_s
        now = plan.traffic_of(self.network_api).in_flight  # by stage; (): the engine's own schedule
        times = _times_of(plan, stage_links)
        rejected = self.trials.end(times, step_s)  # change to take back, or None
        takes_back = rejected is not None
        if takes_back:
            in_flight = rejected.before
        else:
            in_flight = decided.in_flight()
            if self.options.inflight == "auto":
                in_flight = quickest(plan, stage_links, in_flight)
        wants_own_schedule = not in_flight  # the engine's own schedule, 1F1B
        if wants_own_schedule and now and plan.sizes is not None:
            # A running job cannot return to 1F1B, but it can have as many micro-batches in flight: 1 on
            # the last stage, 2 on the stage before, ...
            counts_of_1f1b = range(plan.sizes.pipeline, 0, -1)
            in_flight = tuple(min(count, plan.workload.micro_batches) for count in counts_of_1f1b)
        if in_flight == now:
            return None
        # A step also contains work outside the pipeline's passes; it stays the same.
        pipeline_now_s = pipeline_s(plan, stage_links, now)
        pipeline_then_s = pipeline_s(plan, stage_links, in_flight)
        then_s = step_s + pipeline_then_s - pipeline_now_s
        if not takes_back:
            saves_enough = then_s <= step_s * (1 - LEAST_GAIN)
            if not saves_enough or self.trials.was_rejected(in_flight, times):
                return None
        forward_s, backward_s = passes_s(plan.loads)
        return Change(
            before=now,
            in_flight=in_flight,
            now_s=step_s,
            then_s=then_s,
            forward_s=forward_s,
            backward_s=backward_s,
            takes_back=takes_back,
        )

    def taken(self, change: Change, plan: Plan) -> None:
        """Begin to measure the effect of a change that all ranks have voted to adopt ("taken").

        Called on rank 0 after the vote. The next call of next() judges the change by the step time:
        it keeps the change, or takes it back.

        Args:
            change: The change.
            plan: Plan with the measured times from which the change was chosen.
        """
        stage_links = self._decisions(plan).stage_link_seconds().transfer_s
        times = _times_of(plan, stage_links)  # seconds of the passes and messages of each stage
        # deciding_times: the change was chosen from these times. unchanged_times: the change does not
        # affect them, so if they differ after the trial, something else has changed the step time.
        # Both are the same here: the change only affects how long stages wait.
        self.trials.begin(change, deciding_times=times, unchanged_times=times)

    def _decisions(self, plan: Plan) -> Decisions:
        """Apply the rules that made the plan at the start of the job to its measured times.

        Returns:
            Micro-batches in flight of each stage, and seconds of the links between stages.
        """
        return decisions(plan, self.network_api, self.options, self.engine)


def _times_of(plan: Plan, stage_links: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of all forward passes, all backward passes and all stage links, by stage.

    They are in the same tuple, because differ() compares two such tuples.
    """
    forward_s, backward_s = passes_s(plan.loads)
    return *forward_s, *backward_s, *stage_links


def differ(
    times: Sequence[float], other_times: Sequence[float], share: float = CHANGED_SHARE
) -> bool:
    """Return whether times have changed between two measurements.

    Args:
        times: Seconds, for example of each stage's passes.
        other_times: The same times in another measurement.
        share: Differences up to this share of the longest time in both lists do not count. The
            default is 10 %.
    """
    tolerance = share * max(*times, *other_times)
    return any(abs(first - second) > tolerance for first, second in zip(times, other_times))
