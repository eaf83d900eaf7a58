"""Decides on rank 0 what to change in the plan of a running job, from all ranks' measurements.

    measurements of some steps -> Profile -> PipelineEvaluator   changes micro-batches in flight
                               -> Summed  -> SumEvaluator        changes how gradients are summed

Only one change is tried at a time, so that its effect on the step time can be measured.
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
from holmes_ext.adapt.reductions import SumChange, SumEvaluator, Summed
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

# Least time between rank 0's decision and the step that begins with the change: all ranks must have
# voted by then.
LEAD = 2  # steps
LEAD_S = 0.5  # seconds
#: Changes that the ranks vote on.
Changes = Change | SumChange | Restart
#: Kind of change in a proposal -> its class.
CHANGES: dict[str, type[Changes]] = {"in flight": Change, "sums": SumChange, "restart": Restart}


class Deciding:
    """Chooses on rank 0 which change of a running job's plan to propose to all ranks.

    A change is another number of micro-batches in flight, another algorithm that sums gradients, or
    a restart with other numbers of layers on the pipeline stages.
    """

    def __init__(
        self,
        current: Session,
        sizes: Sizes,
        network_api: str,
        tell: Callable[[str], None],
        put: Callable[[dict[str, Any]], None],
    ):
        """Start without measurements and without a change on trial.

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
        self.evaluator = PipelineEvaluator(network_api, current.options, current.engine)
        self.sums = SumEvaluator(network_api, current.options, current.engine)
        self._stage_links: dict[int, float] = {}  # stage -> seconds of a message to the next stage
        self._lines_told: set[str] = set()
        #: Seconds of both passes by stage, when better numbers of layers were last looked for.
        self._busy_s: list[float] = []
        self._on_taken: Callable[[], None] = _do_nothing  # called when all ranks adopt the proposal
        self._restart: Restart | None = None  # restart to propose next
        self._will_restart = False  # all ranks have agreed on a restart

    def propose(self, step: int, reports: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Return a proposal for a change of the plan, on which all ranks then vote.

        With --holmes-adapt report, the change is only printed.

        Args:
            step: Step that rank 0 trains now.
            reports: Measurements of each rank; None for ranks that did not answer.

        Returns:
            "at": first step with the change, or 0 for no change; "next": first step of the next
            window; "kind" and "change": the change, for change_of().
        """
        no_change = {"at": 0, "next": step + 1}
        answered = [report for report in reports if report is not None]
        answered.sort(key=lambda report: report["rank"])
        if len(answered) < self.current.process.world_size:  # all ranks would have to vote yes
            return no_change
        step_s = max(report["totals"]["step"] for report in answered)  # of the slowest rank
        change = self._next_change(answered, step_s)
        if change is None:
            return no_change
        if self.current.options.value("adapt") == "report":
            self._tell_change(change)
            return no_change
        # The votes need time, so the change begins at least LEAD steps and LEAD_S seconds later.
        steps_ahead = max(LEAD, 1 + ceil(LEAD_S / step_s))
        at = step + steps_ahead
        kind = next(
            name for name, change_class in CHANGES.items() if isinstance(change, change_class)
        )
        return {"at": at, "next": at + 1, "kind": kind, "change": asdict(change)}

    def taken(self) -> None:
        """Begin the trial of the last proposed change, which all ranks have voted to adopt."""
        self._on_taken()

    def _next_change(self, reports: list[dict[str, Any]], step_s: float) -> Changes | None:
        """Return the change to propose, or None.

        Another number of micro-batches in flight is preferred, then another algorithm to sum
        gradients, then a restart. Only one change is on trial at a time: while its effect on the
        step time is measured, only its own evaluator may propose something, for example to take the
        change back.

        Args:
            reports: Measurements of all ranks.
            step_s: Seconds of the slowest rank's step.
        """
        plan = self.current.plan_for(self.sizes)
        measured_plan: Plan | None = None  # None if passes were not measured
        if all("forward" in report for report in reports):
            profile, measured_plan = self._plan_with_measured_times(plan, reports)
            self._compare_layers(profile, measured_plan)  # may find a restart to propose
            if self.sums.trials.running is None and can_change_in_flight(self.current):
                change = self.evaluator.next(measured_plan, step_s)
                self._tell_ended(self.evaluator.trials)
                if change is not None:
                    # To be called if all ranks adopt the change: its trial begins.
                    self._on_taken = partial(self.evaluator.taken, change, measured_plan)
                    return change
        if self.evaluator.trials.running is None:
            summed = self._measured_sums(reports, measured_plan)  # one for each stage
            if summed:
                sum_change = self.sums.next(plan, summed, step_s)
                self._tell_ended(self.sums.trials)
                if sum_change is not None:
                    self._on_taken = partial(self.sums.taken, sum_change, plan, summed)
                    return sum_change
        on_trial = self.evaluator.trials.running or self.sums.trials.running
        if self._restart is not None and not on_trial:
            self._on_taken = self._note_restart
            return self._restart
        return None

    def _note_restart(self) -> None:
        """Remember that all ranks have agreed on a restart, so that none is proposed again."""
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
        # If no rank waited for a stage link's messages in these steps, its earlier time stays.
        self._stage_links |= stage_links_of(reports)
        for report in reports:
            report["stage_link_s"] = self._stage_links.get(report["stage"], 0.0)
        profile = replace(merge(self.current, reports), sizes=self.sizes)
        return profile, measured(plan, profile, memory_of(reports, profile))

    def _measured_sums(
        self, reports: list[dict[str, Any]], measured_plan: Plan | None
    ) -> list[Summed]:
        """Return measurements of the all-reduces of gradients, one Summed for each pipeline stage.

        Of the times that a stage's ranks report, the shortest counts: the rank with the shortest
        time was the last to join the all-reduce, so its time has no wait for other ranks in it.

        Args:
            reports: Measurements of all ranks.
            measured_plan: Plan with measured times; None if passes were not measured.

        Returns:
            [] if the sums of a rank cannot be changed through the plan, or if ranks of a stage
            report different algorithms: then some of them measured before the last change, others
            after it.
        """
        if not all(report["sums"] for report in reports):
            return []
        end_s_of_stage = self._ends_of_backward(measured_plan)
        summed = []
        for stage, end_s in enumerate(end_s_of_stage):
            windows = [report["sums"] for report in reports if report["stage"] == stage]
            # "way": the algorithm that summed gradients, the fields of a ReductionSpec.
            reductions = {json.dumps(window["way"]) for window in windows}
            if len(reductions) != 1:
                return []
            busy_s: dict[str, float] = {}  # network -> shortest time of the stage's ranks
            for window in windows:
                for network, seconds in window["busy"].items():
                    busy_s[network] = min(seconds, busy_s.get(network, seconds))
            first = windows[0]
            stage_sums = Summed(
                reduction=Table(first["way"], "report").into(ReductionSpec),
                size=max(window["bytes"] for window in windows),
                seconds=min(window["seconds"] for window in windows),
                exposed_s=min(window["exposed"] for window in windows),
                busy=busy_s,
                end_s=end_s - min(end_s_of_stage),
            )
            summed.append(stage_sums)
        return summed

    def _ends_of_backward(self, measured_plan: Plan | None) -> list[float]:
        """Return when each stage ends its last backward pass, in seconds after the begin of a step.

        The order of all passes is simulated, with their measured times. All are 0 if passes were
        not measured.

        Args:
            measured_plan: Plan with measured times; None if passes were not measured.
        """
        if measured_plan is None:
            return [0.0] * self.sizes.pipeline
        loads = measured_plan.loads
        in_flight = measured_plan.traffic_of(self.network_api).in_flight
        in_flight_of_1f1b = tuple(range(len(loads), 0, -1))  # the engine's own schedule
        ends = walked_ends(
            [load.forward_s for load in loads],
            [load.backward_s for load in loads],
            self._decided_stage_links(measured_plan),
            measured_plan.workload.micro_batches,
            in_flight or in_flight_of_1f1b,
        )
        return list(ends)

    def _decided_stage_links(self, measured_plan: Plan) -> tuple[float, ...]:
        """Return the seconds that a message to the next stage takes, for each stage but the last.

        Times are measured ones where the plan has them, else predicted from the networks' rates.
        """
        options = self.current.options
        decided = decisions(measured_plan, self.network_api, options, self.current.engine)
        return decided.stage_link_seconds().transfer_s

    def _compare_layers(self, profile: Profile, measured_plan: Plan) -> None:
        """Look for better numbers of layers on the stages, if the times of passes have changed.

        The measured times are then also written to the telemetry file.

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

        `holmes report --write-model` makes a profile file of them, for `holmes plan`. A stage link
        whose messages no rank waited for has no measured time: it gets the one predicted from the
        networks' rates.

        Args:
            profile: Measured times of all stages.
            measured_plan: Plan with these times, from which the times of stage links are taken.
        """
        stage_link_s = (*self._decided_stage_links(measured_plan), 0.0)  # the last stage has none
        stages = [
            replace(stage, stage_link_s=seconds)
            for stage, seconds in zip(profile.stages, stage_link_s)
        ]
        model = replace(profile, stages=tuple(stages))
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
        """Return the costs (seconds, bytes) of each layer on each stage, on the plan's nodes.

        Args:
            profile: Measured times of all stages.
        """
        plan = self.current.plan_for(self.sizes)
        # Predicted from the networks: messages of stage links without a measured time.
        network = Network(site_of(plan, self.network_api))
        # direct: gloo's hierarchical all-reduce exchanges data directly, NCCL's in rings.
        direct = self.network_api == SOCKETS
        rules = rules_of(self.current.engine, self.current.options, direct=direct)
        rank_model = RankModel.of_workload(profile.workload(), self.sizes)
        prices = Prices(network, rank_model, rules)
        placement = network.placement(plan.nodes, self.sizes)
        # Without a model, the bytes of a layer are unknown, so every split counts as fitting the
        # memory. Overlap only changes the reductions, and better_split() compares passes.
        return costs_of(prices, placement, model=None, profile=profile, overlap=False)

    # Lines for the user

    def _tell_ended(self, trials: Trials) -> None:
        """Print the result of a trial that has ended, unless it took back an earlier change."""
        if trials.ended is None:
            return
        change, step_s, stays = trials.ended
        if change.back:
            return
        line = (
            f"{change.text}: a step takes {step_s:.4g} s, "
            f"it took {change.now_s:.4g} (predicted {change.then_s:.4g})"
        )
        if not stays:
            line += "; reverted"
        self.tell(line)

    def _tell_change(self, change: Changes) -> None:
        """Print a change that --holmes-adapt report does not make."""
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
    """Return the change that a proposal contains.

    Args:
        proposal: Result of Deciding.propose() on rank 0, which other ranks get as JSON. "kind"
            names the class of the change, "change" has its fields.
    """
    change: Changes = Table(proposal["change"], "proposal").into(CHANGES[proposal["kind"]])
    return change


def memory_of(reports: list[dict[str, Any]], profile: Profile) -> list[Room]:
    """Return the GPU memory of each stage: that of its rank with the least free memory.

    A stage gets Room(), with zeros, if the memory of one of its ranks was not measured.

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
