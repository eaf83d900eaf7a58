"""Decides on rank 0 about changes of a running job's plan, from all ranks' measurements.

    measured passes, messages   -> PipelineEvaluator    changes the micro-batches in flight
    measured reductions         -> ReductionEvaluator   changes how gradients are reduced
    measured seconds of layers  -> better_split()       changes the layers of stages, by a restart

After each change, some steps are trained with it, to measure its effect on the step time (its
trial). If the change did not help, the next change takes it back. Only one change is on trial at a
time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from typing import Any

from holmes_ext.adapt import can_change_in_flight
from holmes_ext.adapt.pipeline import (
    Change,
    PipelineEvaluator,
    Restart,
    Room,
    Trials,
    better_split,
    differ,
    measured,
)
from holmes_ext.adapt.reductions import MeasuredReductions, ReductionChange, ReductionEvaluator
from holmes_ext.adapt.restart import why_not
from holmes_ext.adapt.stage_links import stage_links_of
from holmes_ext.document import Table
from holmes_ext.plan.build import costs_of
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import walked_ends
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel, StageCosts
from holmes_ext.plan.decide import decisions
from holmes_ext.plan.engine import rules_of
from holmes_ext.plan.plan import Plan, site_of
from holmes_ext.plan.profile import Profile
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, ReductionSpec
from holmes_ext.runtime.measure.profile_file import merge
from holmes_ext.runtime.session import Session

# Least distance between the step in which rank 0 proposes a change and the first step with it. All
# ranks must have voted on the change by then. Both limits must be met.
LEAD_STEPS = 2
LEAD_S = 0.5  # seconds
#: Changes that the ranks vote on.
Changes = Change | ReductionChange | Restart
#: Kind of change in a proposal -> its class.
CHANGES: dict[str, type[Changes]] = {
    "in flight": Change,
    "sums": ReductionChange,
    "restart": Restart,
}


class Deciding:
    """Chooses on rank 0 a change of a running job's plan, and proposes it to all ranks.

    The ranks then vote on the change, and either all or none of them adopt it. A change is another
    number of micro-batches in flight, another algorithm that reduces gradients, or a restart with
    other numbers of layers on the pipeline stages.
    """

    def __init__(
        self,
        current: Session,
        sizes: Sizes,
        network_api: str,
        tell: Callable[[str], None],
        put: Callable[[dict[str, Any]], None],
    ):
        """Make the evaluators that choose changes; the job has its first plan, and no measurements.

        Args:
            current: State of holmes in this process.
            sizes: Complete parallel sizes of the job.
            network_api: VERBS for NCCL, SOCKETS for gloo.
            tell: Prints a line for the user.
            put: Writes a document to the telemetry file.
        """
        self.current = current
        self.sizes = sizes
        self.network_api = network_api
        self.tell = tell
        self.put = put
        self.in_flight_evaluator = PipelineEvaluator(network_api, current.options, current.engine)
        self.reduction_evaluator = ReductionEvaluator(network_api, current.options, current.engine)
        self._stage_links: dict[int, float] = {}  # stage -> seconds of a message to the next stage
        self._lines_told: set[str] = set()
        #: Seconds of a forward and a backward pass together, by stage. They were measured at the
        #: last search for better numbers of layers. [] before the first search.
        self._busy_s: list[float] = []
        self._on_taken: Callable[[], None] = _do_nothing  # called when all ranks adopt the proposal
        self._restart: Restart | None = None  # restart to propose next
        self._will_restart = False  # all ranks have agreed on a restart

    def propose(self, step: int, reports: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Return a proposal for a change of the plan; all ranks then vote on it.

        With --holmes-adapt report, the change is only printed, and "no change" is proposed.

        Args:
            step: Step that rank 0 trains now.
            reports: Measurements of each rank; None for ranks that did not answer in time.

        Returns:
            "at": number of the first step with the change, or 0 for no change. "next": number of
            the next step that all ranks measure. With a change this is "at" + 1, because
            adopting the change makes step "at" longer. "kind" and "change": name of the kind of
            change (CHANGES), and its fields; absent for no change. change_of() reads them.
        """
        no_change = {"at": 0, "next": step + 1}
        answered = [report for report in reports if report is not None]
        answered.sort(key=lambda report: report["rank"])
        # A change needs the votes of all ranks. So nothing is proposed if a single rank is absent.
        if len(answered) < self.current.process.world_size:
            return no_change
        step_s = max(report["totals"]["step"] for report in answered)  # of the slowest rank
        change = self._next_change(answered, step_s)
        if change is None:
            return no_change
        if self.current.options.value("adapt") == "report":
            self._tell_change(change)
            return no_change
        # The votes need time, so the change begins at least LEAD_STEPS (2) steps and LEAD_S (0.5)
        # seconds later. The current step may be almost over and does not count: hence 1 +.
        steps_ahead = max(LEAD_STEPS, 1 + ceil(LEAD_S / step_s))
        at = step + steps_ahead
        # CHANGES: name of a kind of change ("restart", ...) -> its class.
        kind = next(
            name for name, change_class in CHANGES.items() if isinstance(change, change_class)
        )
        return {"at": at, "next": at + 1, "kind": kind, "change": asdict(change)}

    def taken(self) -> None:
        """Begin to measure the effect of the last proposal, because all ranks have voted to adopt it."""
        self._on_taken()

    def _next_change(self, reports: list[dict[str, Any]], step_s: float) -> Changes | None:
        """Return the change to propose, or None.

        Three kinds of changes are considered in this order: micro-batches in flight, the algorithm
        that reduces gradients, a restart with other layers on the stages. An adopted change is
        first on trial: its effect on the step time is measured. During a trial, only the evaluator
        of the same kind may propose something, for example to take the change back.

        Args:
            reports: Measurements of all ranks.
            step_s: Seconds of the slowest rank's step.
        """
        plan = self.current.plan_for(self.sizes)
        # The same plan, with the measured times of these reports; None if passes were not measured.
        measured_plan: Plan | None = None
        if all("forward" in report for report in reports):
            profile, measured_plan = self._plan_with_measured_times(plan, reports)
            self._compare_layers(profile, measured_plan)  # may set self._restart
            in_flight_change = self._next_in_flight(measured_plan, step_s)
            if in_flight_change is not None:
                return in_flight_change
        reduction_change = self._next_reductions(plan, measured_plan, reports, step_s)
        if reduction_change is not None:
            return reduction_change
        is_trial_running = (
            self.in_flight_evaluator.trials.running is not None
            or self.reduction_evaluator.trials.running is not None
        )
        if self._restart is not None and not is_trial_running:
            self._on_taken = self._note_restart
            return self._restart
        return None

    def _next_in_flight(self, measured_plan: Plan, step_s: float) -> Change | None:
        """Return the next change of the micro-batches in flight; None if there is none.

        There is none during the trial of another kind of change, or if the user has fixed the number, or
        if the engine cannot change it in a running job.
        """
        if self.reduction_evaluator.trials.running is not None:
            return None
        if not can_change_in_flight(self.current):
            return None
        change = self.in_flight_evaluator.next(measured_plan, step_s)
        # next() may have ended the trial of an earlier change. If so, print the effect of that change.
        self._tell_ended(self.in_flight_evaluator.trials)
        if change is not None:
            # taken() calls this if all ranks adopt the change: its trial begins.
            self._on_taken = partial(self.in_flight_evaluator.taken, change, measured_plan)
        return change

    def _next_reductions(
        self, plan: Plan, measured_plan: Plan | None, reports: list[dict[str, Any]], step_s: float
    ) -> ReductionChange | None:
        """Return the next change of the algorithms that reduce gradients; None if there is none.

        There is none during the trial of another kind of change, or if the reductions of a rank do not
        follow the plan.
        """
        if self.in_flight_evaluator.trials.running is not None:
            return None
        # One item for each stage; [] if the reductions do not follow the plan.
        measured_stages = self._measured_reductions(reports, measured_plan)
        if not measured_stages:
            return None
        change = self.reduction_evaluator.next(plan, measured_stages, step_s)
        self._tell_ended(self.reduction_evaluator.trials)
        if change is not None:
            self._on_taken = partial(self.reduction_evaluator.taken, change, plan, measured_stages)
        return change

    def _note_restart(self) -> None:
        """Record that all ranks have agreed on a restart, so that no other restart is proposed."""
        self._restart = None
        self._will_restart = True

    def _plan_with_measured_times(
        self, plan: Plan, reports: list[dict[str, Any]]
    ) -> tuple[Profile, Plan]:
        """Return a profile made of the ranks' reports, and the plan with the times of this profile.

        Each report gets a value "stage_link_s": seconds of a message to the next pipeline stage.

        Args:
            plan: Current plan of the job.
            reports: Measurements of all ranks.
        """
        # stage_links_of() leaves out stage links whose messages no rank waited for. For such a link
        # the time that was measured in earlier steps is kept.
        self._stage_links |= stage_links_of(reports)
        for report in reports:
            report["stage_link_s"] = self._stage_links.get(report["stage"], 0.0)
        # merge() makes a profile of the reports of all ranks: times and bytes of each stage, by its
        # slowest rank.
        profile = replace(merge(self.current, reports), sizes=self.sizes)
        # memory_of(): GPU memory of each stage. measured(): the plan with the profile's times.
        return profile, measured(plan, profile, memory_of(reports, profile))

    def _measured_reductions(
        self, reports: list[dict[str, Any]], measured_plan: Plan | None
    ) -> list[MeasuredReductions]:
        """Return the measured gradient reductions (all-reduces) of each pipeline stage.

        Of the times that a stage's ranks report, the shortest counts: the rank with the shortest
        time was the last to join the all-reduce, so its time contains no wait for other ranks.

        Args:
            reports: Measurements of all ranks.
            measured_plan: Plan with measured times; None if passes were not measured.

        Returns:
            An item for each stage. [] if the reductions of a rank do not follow the plan, or if
            ranks of a stage report different algorithms: then some of them measured before the
            last change, others after it.
        """
        # "sums": measured gradient reductions of a rank in a window of steps. None if the rank's
        # reductions do not follow the plan.
        if not all(report["sums"] for report in reports):
            return []
        # Time at which each stage has computed all gradients: seconds after the begin of the step; all
        # 0 if passes were not measured.
        end_s_of_stage = self._ends_of_backward(measured_plan)
        measured_stages = []
        for stage, end_s in enumerate(end_s_of_stage):
            windows = [report["sums"] for report in reports if report["stage"] == stage]
            # "way": the algorithm that summed gradients, the fields of a ReductionSpec.
            reductions = {json.dumps(window["way"]) for window in windows}
            if len(reductions) != 1:
                return []
            seconds_after_first_stage = end_s - min(end_s_of_stage)
            measured_stages.append(_merged_windows(windows, seconds_after_first_stage))
        return measured_stages

    def _ends_of_backward(self, measured_plan: Plan | None) -> list[float]:
        """Return when each stage ends its last backward pass, in seconds after the begin of a step.

        The order of all passes is simulated, with their measured times. All returned values are 0
        if passes were not measured.

        Args:
            measured_plan: Plan with measured times; None if passes were not measured.
        """
        if measured_plan is None:
            return [0.0] * self.sizes.pipeline
        loads = measured_plan.loads
        in_flight = measured_plan.traffic_of(self.network_api).in_flight
        in_flight_of_1f1b = tuple(range(len(loads), 0, -1))  # the engine's own schedule
        # Walks through the schedule pass by pass; returns the end of each stage's last backward.
        ends = walked_ends(
            [load.forward_s for load in loads],
            [load.backward_s for load in loads],
            self._stage_link_seconds(measured_plan),  # measured where possible, else predicted
            measured_plan.workload.micro_batches,
            in_flight or in_flight_of_1f1b,
        )
        return list(ends)

    def _stage_link_seconds(self, measured_plan: Plan) -> tuple[float, ...]:
        """Return the seconds that a message to the next stage takes, for each stage but the last.

        The plan's measured time is returned for each stage that has a measured time. Otherwise the time is
        predicted from the networks' rates.
        """
        options = self.current.options
        decided = decisions(measured_plan, self.network_api, options, self.current.engine)
        return decided.stage_link_seconds().transfer_s

    def _compare_layers(self, profile: Profile, measured_plan: Plan) -> None:
        """Look for better numbers of layers on the stages, if the times of passes have changed.

        Better numbers become the restart to propose next, or are printed for the user
        (_look_for_restart). The measured times are also written to the telemetry file. If the times
        equal those of the last call, nothing happens.

        Args:
            profile: Times that were measured in the last steps.
            measured_plan: Plan with these times.
        """
        busy_s = [load.busy_s for load in measured_plan.loads]
        if self._busy_s and not differ(self._busy_s, busy_s):
            return
        self._busy_s = busy_s
        self._store_model(profile, measured_plan)
        self._look_for_restart(profile)

    def _store_model(self, profile: Profile, measured_plan: Plan) -> None:
        """Write the measured times of all stages to the telemetry file.

        `holmes report --write-model` makes a profile file from this entry ("model"), for `holmes
        plan`. A message is timed only if a rank waited for it. So some stage links have no measured
        time. They get the time that is predicted from the networks' rates.

        Args:
            profile: Measured times of all stages.
            measured_plan: Plan with these times; it also has the times of stage links.
        """
        # Measured or predicted. The last stage has no link to a next stage.
        stage_link_s = (*self._stage_link_seconds(measured_plan), 0.0)
        stages = [
            replace(stage, stage_link_s=seconds)
            for stage, seconds in zip(profile.stages, stage_link_s)
        ]
        model = replace(profile, stages=tuple(stages))
        # "stage_links": the stages whose link was measured (the keys of _stage_links).
        self.put({"model": json.loads(model.to_json()), "stage_links": sorted(self._stage_links)})

    def _look_for_restart(self, profile: Profile) -> None:
        """Look for numbers of layers on the pipeline stages that would shorten the step.

        Only a restart can change them. With --holmes-restart auto the restart becomes the next
        proposal, otherwise it is printed for the user.

        Args:
            profile: Measured times of all stages.
        """
        options = self.current.options
        layers = [len(stage.blocks) for stage in profile.stages]  # of each stage now
        self._restart = None
        better = better_split(self._measured_costs(profile), layers, profile.step_s)
        if better is None or self._will_restart:
            return
        consequence = better.effect_text
        if options.value("restart") == "auto" and options.value("adapt") == "on":
            # "" if the launcher and the framework can restart the job with other layers.
            obstacle = why_not(self.current.process, options, self.current.engine, os.environ)
            if not obstacle:
                self._restart = better
                return
            consequence += f" (--holmes-restart auto: {obstacle})"
        self._tell_once(better.text, consequence)

    def _measured_costs(self, profile: Profile) -> StageCosts:
        """Return the costs of each layer on each stage: measured seconds if available, else predicted.

        Args:
            profile: Measured times of all stages.
        """
        plan = self.current.plan_for(self.sizes)
        # The network and `prices` predict the times of messages on stage links that have no
        # measured time. site_of(): the plan's nodes and networks, as the network API uses them.
        network = Network(site_of(plan, self.network_api))
        # A hierarchical all-reduce exchanges shards of the gradients. With gloo, each rank sends
        # them to every other rank ("direct"). With NCCL, they go around a ring.
        direct = self.network_api == SOCKETS
        # Rules: methods that the job may use. RankModel: bytes and micro-batches of a rank. Prices:
        # predicted seconds of messages and reductions with these rules and sizes.
        rules = rules_of(self.current.engine, self.current.options, direct=direct)
        rank_model = RankModel.of_workload(profile.workload(), self.sizes)
        prices = Prices(network, rank_model, rules)
        placement = network.placement(plan.nodes, self.sizes)  # the ranks on the plan's nodes
        # Without a model, the bytes of a layer are unknown, so every split counts as fitting the
        # memory. Overlap only changes the reductions, and better_split() compares passes.
        return costs_of(prices, placement, model=None, profile=profile, overlap=False)

    # Lines for the user

    def _tell_ended(self, trials: Trials) -> None:
        """Print the effect on the step time of a trial that has ended, and whether the change stays.

        A trial is some steps with an adopted change. Nothing is printed if no trial has ended, or if
        the change only undid an earlier change. The line about that earlier change already has the
        word "reverted".

        Args:
            trials: Trials of one class of changes.
        """
        if trials.ended is None:
            return
        change, step_s, stays = trials.ended
        if change.takes_back:
            return
        line = (
            f"{change.text}: a step takes {step_s:.4g} s, "
            f"it took {change.now_s:.4g} (predicted {change.then_s:.4g})"
        )
        if not stays:
            line += "; reverted"
        self.tell(line)

    def _tell_change(self, change: Changes) -> None:
        """Print a change that the job would make with --holmes-adapt on.

        Called for --holmes-adapt report: changes are only reported.
        """
        effect = f"a step would take {change.then_s:.4g} s, not {change.now_s:.4g}"
        self._tell_once(f"with {change.text}", f"{effect} (--holmes-adapt on does it)")

    def _tell_once(self, subject: str, effect: str) -> None:
        """Print a subject and its effect, if no line with this subject was printed before."""
        if subject not in self._lines_told:
            self._lines_told.add(subject)
            self.tell(f"{subject} {effect}")


def _do_nothing() -> None:
    pass


def change_of(proposal: dict[str, Any]) -> Changes:
    """Return the change of the plan that a proposal contains, as an object of its class.

    Args:
        proposal: Result of Deciding.propose() on rank 0; other ranks get it as JSON. "kind" names
            the class of the change, "change" has its fields.
    """
    change: Changes = Table(proposal["change"], "proposal").into(CHANGES[proposal["kind"]])
    return change


def _merged_windows(windows: list[dict[str, Any]], end_s: float) -> MeasuredReductions:
    """Return the measurements of a stage from those of its ranks; of all times, the shortest counts.

    Args:
        windows: Measurements of each rank of the stage (ReductionWindow.report), with the same algorithm.
        end_s: End of the stage's last backward pass, in seconds after that of the stage that ends first.
    """
    busy_s: dict[str, float] = {}  # network -> shortest time of the ranks
    for window in windows:
        for network, seconds in window["busy"].items():
            busy_s[network] = min(seconds, busy_s.get(network, seconds))
    return MeasuredReductions(
        reduction=Table(windows[0]["way"], "report").into(ReductionSpec),
        size=max(window["bytes"] for window in windows),
        seconds=min(window["seconds"] for window in windows),
        exposed_s=min(window["exposed"] for window in windows),
        busy=busy_s,
        end_s=end_s,
    )


def memory_of(reports: list[dict[str, Any]], profile: Profile) -> list[Room]:
    """Return the GPU memory of each stage: that of its rank with the least free memory.

    A stage gets Room(), with zeros, if the memory of any of its ranks was not measured.

    Args:
        reports: Measurements of all ranks.
        profile: Has the stages of the job.
    """
    tightest = []
    for stage in range(len(profile.stages)):
        rooms = [Room(*report["memory"]) for report in reports if report["stage"] == stage]
        if all(room.limit_bytes for room in rooms):
            tightest.append(min(rooms, key=_free_bytes))
        else:
            tightest.append(Room())
    return tightest


def _free_bytes(room: Room) -> float:
    return room.limit_bytes - room.fixed_bytes
