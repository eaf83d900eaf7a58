"""Rank 0's part of a plan that learns: what the ranks measured -> what to change, and the lines about it.

    reports of a window -> Profile -> PipelineEvaluator  micro-batches in flight (engine tells passes)
                        -> Summed  -> SumEvaluator       how gradients are summed (reducers that follow it)

One change is tried at a time, so that what it brought is its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from typing import Any

from holmes_ext.adapt import wants_in_flight
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
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.decide import decisions
from holmes_ext.plan.engine import rules_of
from holmes_ext.plan.plan import Plan, site_of
from holmes_ext.plan.profile import Profile
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, ReductionSpec
from holmes_ext.runtime.measure.profile_file import merge
from holmes_ext.runtime.session import Session

#: Steps, and seconds, from rank 0's decision to the change.
LEAD, LEAD_S = 2, 0.5
#: What the ranks vote on; kinds of it, by name.
Changes = Change | SumChange | Restart
CHANGES: dict[str, type[Changes]] = {"in flight": Change, "sums": SumChange, "restart": Restart}


class Deciding:
    """Of a job of complete `sizes`. tell: prints a line; put: keeps a document in the telemetry's file."""

    def __init__(
        self,
        current: Session,
        sizes: Sizes,
        network_api: str,
        tell: Callable[[str], None],
        put: Callable[[dict[str, Any]], None],
    ):
        self.current, self.sizes, self.network_api = current, sizes, network_api
        self.tell, self.put = tell, put
        known = network_api, current.options, current.engine
        self.evaluator, self.sums = PipelineEvaluator(*known), SumEvaluator(*known)
        self._stage_links: dict[int, float] = {}
        self._told: set[str] = set()
        self._busy: list[float] = []  # of the stages, when layers and model were last looked at
        self._taken: Callable[[], None] = lambda: None
        # what all ranks are asked for; whether they have said yes
        self._restart: Restart | None = None
        self._will_restart = False

    def propose(self, step: int, reports: list[dict[str, Any] | None]) -> dict[str, Any]:
        """What to change of what the ranks measured, and where the next window begins."""
        none = {"at": 0, "next": step + 1}
        answered = [report for report in reports if report is not None]
        answered.sort(key=lambda report: report["rank"])
        if len(answered) < self.current.process.world_size:
            return none
        step_s = max(report["totals"]["step"] for report in answered)
        change: Changes | None = None
        plan, learned = self.current.plan_for(self.sizes), None
        if all("forward" in report for report in answered):
            profile, learned = self._measured(plan, answered)
            self._look(profile, learned)
            if self.sums.trials.running is None and wants_in_flight(self.current):
                change = held = self.evaluator.next(learned, step_s)
                self._tell_ended(self.evaluator.trials)
                if held is not None:
                    self._taken = partial(self.evaluator.taken, held, learned)
        if change is None and self.evaluator.trials.running is None:
            if summed := self._summed(answered, learned):
                change = sums = self.sums.next(plan, summed, step_s)
                self._tell_ended(self.sums.trials)
                if sums is not None:
                    self._taken = partial(self.sums.taken, sums, plan, summed)
        if (
            change is None
            and self._restart is not None
            and not (self.evaluator.trials.running or self.sums.trials.running)
        ):
            change, self._taken = self._restart, self._restarts
        if change is None:
            return none
        if self.current.options.value("adapt") == "report":
            self._tell_change(change)
            return none
        at = step + max(LEAD, 1 + ceil(LEAD_S / step_s))
        kind = next(
            name for name, change_class in CHANGES.items() if isinstance(change, change_class)
        )
        return {"at": at, "next": at + 1, "kind": kind, "change": asdict(change)}

    def taken(self) -> None:
        """All ranks go on with what was proposed last."""
        self._taken()

    def _restarts(self) -> None:
        self._restart, self._will_restart = None, True

    def _measured(self, plan: Plan, reports: list[dict[str, Any]]) -> tuple[Profile, Plan]:
        self._stage_links |= stage_links_of(reports)
        for report in reports:
            report["stage_link_s"] = self._stage_links.get(report["stage"], 0.0)
        profile = replace(merge(self.current, reports), sizes=self.sizes)
        return profile, measured(plan, profile, memory_of(reports, profile))

    def _summed(self, reports: list[dict[str, Any]], learned: Plan | None) -> list[Summed]:
        """By stage, of the rank that came last to a sum: it waited for nobody. [] unless all ranks follow."""
        if not all(report["sums"] for report in reports):
            return []
        ends: list[float] = [0.0] * self.sizes.pipeline
        if learned is not None:
            loads, stage_links = learned.loads, self._decided_stage_links(learned)
            held = learned.traffic_of(self.network_api).in_flight or tuple(range(len(loads), 0, -1))
            ends = list(
                walked_ends(
                    [load.forward_s for load in loads],
                    [load.backward_s for load in loads],
                    stage_links,
                    learned.workload.micro_batches,
                    held,
                )
            )
        summed = []
        for stage, end_s in enumerate(ends):
            windows = [
                report["sums"] for report in reports if report["stage"] == stage
            ]  # SumWindow.report()
            reductions = {json.dumps(window["way"]) for window in windows}
            if len(reductions) != 1:  # a rank's window began before the others changed
                return []
            names = {name for window in windows for name in window["busy"]}
            busy = {
                name: min(window["busy"][name] for window in windows if name in window["busy"])
                for name in names
            }
            summed.append(
                Summed(
                    Table(windows[0]["way"], "report").into(ReductionSpec),
                    max(window["bytes"] for window in windows),
                    min(window["seconds"] for window in windows),
                    min(window["exposed"] for window in windows),
                    busy,
                    end_s - min(ends),
                )
            )
        return summed

    def _decided_stage_links(self, learned: Plan) -> tuple[float, ...]:
        options, engine = self.current.options, self.current.engine
        return decisions(learned, self.network_api, options, engine).stage_link_seconds()[0]

    def _look(self, profile: Profile, learned: Plan) -> None:
        """Where passes take other times than before: keep the model, and see whether a restart would help."""
        busy = [load.busy_s for load in learned.loads]
        if self._busy and not differ(self._busy, busy):
            return
        self._busy = busy
        self._keep(profile, learned)
        self._look_at_restart(profile)

    def _keep(self, profile: Profile, learned: Plan) -> None:
        """The model as measured, for `holmes report --write-model`; where nobody waited for a stage link, the
        networks' price stands for it."""
        stages = [
            replace(stage, stage_link_s=stage_link)
            for stage, stage_link in zip(profile.stages, (*self._decided_stage_links(learned), 0.0))
        ]
        whole = replace(profile, stages=tuple(stages))
        self.put({"model": json.loads(whole.to_json()), "stage_links": sorted(self._stage_links)})

    # ------------------------------------------------------------------- what is told

    def _tell_ended(self, trials: Trials) -> None:
        if trials.ended is None:
            return
        change, step_s, stays = trials.ended
        if change.back:
            return
        times = f"a step takes {step_s:.4g} s, it took {change.now_s:.4g} (predicted {change.then_s:.4g})"
        self.tell(f"{change.text}: {times}{'' if stays else '; reverted'}")

    def _tell_change(self, change: Changes) -> None:
        left = f"a step would take {change.then_s:.4g} s, not {change.now_s:.4g}"
        self._tell_once(f"with {change.text}", f"{left} (--holmes-adapt on does it)")

    def _look_at_restart(self, profile: Profile) -> None:
        """What only a restart can change: layers of each stage. All ranks are asked for it where the options
        say so, else it is told."""
        plan, layers = (
            self.current.plan_for(self.sizes),
            [len(stage.blocks) for stage in profile.stages],
        )
        network = Network(site_of(plan, self.network_api))
        rules = rules_of(self.current.engine, self.current.options, self.network_api == SOCKETS)
        prices = Prices(network, RankModel.of_workload(profile.workload(), self.sizes), rules)
        costs = costs_of(
            prices, network.placement(plan.nodes, self.sizes), None, profile, overlap=False
        )
        self._restart, options = None, self.current.options
        better = better_split(costs, layers, profile.step_s)
        if better is None or self._will_restart:
            return
        why = ""
        if options.value("restart") == "auto" and options.value("adapt") == "on":
            why = why_not(self.current.process, options, self.current.engine, os.environ)
            if not why:
                self._restart = better
                return
        self._tell_once(
            better.text, better.brings + (f" (--holmes-restart auto: {why})" if why else "")
        )

    def _tell_once(self, what: str, brings: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.tell(f"{what} {brings}")


def change_of(proposal: dict[str, Any]) -> Changes:
    change: Changes = Table(proposal["change"], "proposal").into(CHANGES[proposal["kind"]])
    return change


def memory_of(reports: list[dict[str, Any]], profile: Profile) -> list[Room]:
    """By stage, of the rank with the least room; Room() where a rank does not know its own."""
    tightest = []
    for stage in range(len(profile.stages)):
        rooms = [Room(*report["memory"]) for report in reports if report["stage"] == stage]
        known = all(room.limit_bytes for room in rooms)
        tightest.append(
            min(rooms, key=lambda room: room.limit_bytes - room.fixed_bytes) if known else Room()
        )
    return tightest
