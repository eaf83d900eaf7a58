"""Rounds without a barrier (rounds=async): jobs contribute when they are ready. Pure.

    next     -> go: members and their shares (0: it only receives),
             or behind (take these fragments from that job), idle
                then settlement.py

Every job gets every round's sum. After Decoupled DiLoCo (arXiv 2604.21428): a round of a fragment
is opened once half of the jobs that are there offer a pseudo-gradient of it (the quorum), and a
grace has passed in which others may; a job that was not ready contributes to a later one. There is
one round at a time, of the fragment that was offered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.lateness import sits_out
from holmes_ext.join.coordinator.replies import Reply, go_reply, void_reply
from holmes_ext.join.coordinator.reports import NextReport, ReadyReport, next_from
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.shares import weights_in_sum
from holmes_ext.join.coordinator.state import Member, RunState, outer_settings
from holmes_ext.join.coordinator.versions import Versions

#: Seconds after its last question in which a job is waited for.
_ACTIVE_S = 5.0
#: Share of the time until the first sum is needed that is spent waiting for others.
_GRACE = 0.5


class RollingRounds:
    """Round policy for jobs that wait for nobody."""

    question: ClassVar[str] = "next"

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        self._state = state
        self._rounds = rounds
        self._versions = versions
        self._question_times: dict[str, float] = {}  # by job: when it asked last
        self._reports: dict[str, NextReport] = {}  # by job: what it offered then
        # By fragment: when it was offered first, and when by a quorum.
        self._first_offers: dict[int, float] = {}
        self._quorums: dict[int, float] = {}

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> NextReport:
        return next_from(document, fragments)

    def answer(self, name: str, report: NextReport, now: float) -> Reply | None:
        """Return the round in which a job takes part; None: there is none at the moment.

        Raises:
            HolmesError: The report cannot be true.
        """
        state = self._state
        member = state.member(name)
        if sits_out(state, member, state.number + 1):
            return None
        member.state = "in"
        self._question_times[name] = now
        self._reports[name] = report
        if reply := self._reply_of_last_round(name):
            return reply
        last_round = state.rounds.get(state.number)
        if last_round is not None and not last_round.outcome:
            return None
        if correction := self._versions.correction(member):
            member.corrected = True
            return correction
        if why := _unusable_offer(report):
            return {"verdict": "void", "round": state.number, "why": why, "left_out": {name: why}}
        self._open_round(now)
        return self._reply_of_last_round(name)

    def _reply_of_last_round(self, name: str) -> Reply | None:
        """Return that the last round goes on or is void, if the job must know that."""
        round_state = self._state.rounds.get(self._state.number)
        if (
            round_state is None
            or name not in round_state.members
            or round_state.outcome == "commit"
        ):
            return None
        if not round_state.outcome:
            return go_reply(self._state, round_state)
        if name in round_state.informed:
            return None
        round_state.informed.add(name)
        return void_reply(round_state)

    def _open_round(self, now: float) -> None:
        """Open a round of the fragment offered first whose quorum and grace are reached."""
        active = [member for member in self._state.members.values() if self._is_active(member, now)]
        able = sorted((m for m in active if m.current), key=lambda member: member.order)
        if not able:
            return
        quorum = self._state.least_jobs(active)
        offered = {fragment for member in able for fragment in self._reports[member.name].offers}
        self._first_offers = {
            fragment: self._first_offers.get(fragment, now) for fragment in offered
        }
        self._quorums = {
            fragment: at for fragment, at in self._quorums.items() if fragment in offered
        }
        for fragment in sorted(offered, key=lambda fragment: self._first_offers[fragment]):
            contributors = [m for m in able if fragment in self._reports[m.name].offers]
            if len(contributors) < quorum:
                continue
            reached = self._quorums.setdefault(fragment, now)
            is_complete = len(contributors) == len(able)
            if is_complete or now >= reached + self._grace_s(fragment, contributors):
                self._begin(fragment, contributors, able, now)
                return

    def _is_active(self, member: Member, now: float) -> bool:
        asked = self._question_times.get(member.name)
        return member.state == "in" and asked is not None and now - asked < _ACTIVE_S

    def _grace_s(self, fragment: int, contributors: Sequence[Member]) -> float:
        """Return the seconds after the quorum in which other jobs may contribute.

        That is the setting `grace`, or as long as the job that needs the sum first hardly waits for
        it.
        """
        setting = outer_settings(contributors).get("grace", "auto")
        if isinstance(setting, (int, float)):
            return float(setting)
        offers = [self._reports[member.name].offers[fragment] for member in contributors]
        return _GRACE * min(offer.slack_s for offer in offers)

    def _begin(
        self, fragment: int, contributors: Sequence[Member], able: Sequence[Member], now: float
    ) -> None:
        """Begin a round: the contributors send, and all that are able receive."""
        round_state = self._rounds.open(self._state.number + 1, fragment, now)
        for member in contributors:
            report = self._reports[member.name]
            offer = report.offers[fragment]
            round_state.ready_reports[member.name] = ReadyReport(
                fragment=fragment,
                claims=report.claims,
                round=round_state.number,
                tokens=offer.tokens,
                norm=offer.norm,
                why=offer.why,
            )
        ranks = {member.name: len(member.hello.addresses) for member in contributors}
        usual_norms = self._rounds.usual_norms(fragment)
        weights = weights_in_sum(round_state, ranks, outer_settings(contributors), usual_norms)
        least = self._state.least_jobs(able)
        if self._rounds.begin_exchange(round_state, able, weights, least, now):
            self._first_offers.pop(fragment, None)
            self._quorums.pop(fragment, None)


def _unusable_offer(report: NextReport) -> str:
    """Return why the first unusable pseudo-gradient of a report cannot be used; "": all can be."""
    for offer in report.offers.values():
        if offer.norm is None:
            return offer.why or "its pseudo-gradient is not finite"
    return ""
