"""Rounds in lock step (rounds=sync) begin when all jobs are ready, or late ones are given up. Pure.

    ready    -> go: members and their shares, or behind (take these
             fragments from that job), skip (it is over), void
                then settlement.py

A round is one exchange of one fragment.
"""

from __future__ import annotations

from typing import Any, ClassVar

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.consensus import is_compatible
from holmes_ext.join.coordinator.lateness import mark_late, sits_out
from holmes_ext.join.coordinator.replies import Reply, go_reply, skip_reply, void_reply
from holmes_ext.join.coordinator.reports import Claim, ReadyReport, ready_from
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.shares import weights_in_sum
from holmes_ext.join.coordinator.state import (
    Member,
    RoundState,
    RunState,
    outer_settings,
    patience_s,
)
from holmes_ext.join.coordinator.versions import Versions


class LockStepRounds:
    """Round policy for jobs that all exchange the same fragment after the same number of steps."""

    question: ClassVar[str] = "ready"

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        self._state = state
        self._rounds = rounds
        self._versions = versions
        self._awaited = awaited

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> ReadyReport:
        return ready_from(document, fragments)

    def answer(self, name: str, report: ReadyReport, now: float) -> Reply | None:
        """Return what a job does that is ready for a round; None: other jobs must be ready first.

        Raises:
            HolmesError: The report cannot be true.
        """
        state = self._state
        member = state.member(name)
        if sits_out(state, member, report.round):
            return skip_reply(state.number)
        if member.state == "late":
            state.events.append(f"job {name} is back")
        member.state = "in"
        if report.round > state.number + 1:  # it went on counting while it was away
            return skip_reply(state.number)
        round_state = state.rounds.get(report.round)
        if round_state is None or name not in round_state.ready_reports:
            if self._must_catch_up(member, report.round):
                return self._catch_up(member, report.round, now)
            round_state = self._enlist(member, report, now)
        if not round_state.attempt and not round_state.outcome:
            self._begin_if_complete(round_state, now)
        return self._reply(round_state, member, now)

    def _must_catch_up(self, member: Member, number: int) -> bool:
        """Return whether the job is behind, or round `number` goes on without it."""
        if member.awaits is not None or number < self._state.number:
            return True
        round_state = self._state.rounds.get(number)
        if round_state is not None and (round_state.attempt or round_state.outcome):
            return True
        return self._versions.correction(member) is not None

    def _enlist(self, member: Member, report: ReadyReport, now: float) -> RoundState:
        """Add the job to its round, which is opened for the first one.

        Raises:
            HolmesError: The job is ready for another fragment than the round's.
        """
        round_state = self._state.rounds.get(report.round)
        if round_state is None:
            round_state = self._rounds.open(report.round, report.fragment, now)
        if report.fragment != round_state.fragment:
            raise HolmesError(
                f"round {report.round} exchanges fragment {round_state.fragment}, "
                f"not {report.fragment}"
            )
        round_state.ready_reports[member.name] = report
        member.lag_s = now - round_state.opened
        return round_state

    def _catch_up(self, member: Member, number: int, now: float) -> Reply | None:
        """Return what a job takes that is behind at round `number`; None until a round has ended.

        That is the round that goes on without the job, or the next one if that has not begun. Taken
        before, that round's fragment would be old again by then, and the job behind for ever.
        """
        if member.awaits is None:
            member.awaits = self._state.number
            if number > self._state.number:
                member.awaits = self._state.number + 1
            member.awaits_from = now
            member.expected_from = max(self._state.number, number) + 1
        if not self._has_ended(member.awaits, member, now):
            return None
        ended, member.awaits = member.awaits, None
        correction = self._versions.correction(member)
        member.corrected = correction is not None
        return {**(correction or {"verdict": "skip"}), "round": ended}

    def _has_ended(self, number: int, member: Member, now: float) -> bool:
        """Return whether the awaited round `number` is over, or nobody can begin or end it."""
        round_state = self._state.rounds.get(number)
        if round_state is not None:
            names = [name for name in round_state.ready_reports if name in self._state.members]
            members = [self._state.members[name] for name in names]
            if round_state.outcome or all(m.state == "gone" for m in members):
                return True
            return now > round_state.opened + 2 * patience_s(members)
        others = [
            other
            for other in self._state.members.values()
            if other is not member and other.state == "in" and other.awaits is None
        ]
        if number <= self._state.number or not others:
            return True
        return now > member.awaits_from + 2 * member.hello.timeout

    def _begin_if_complete(self, round_state: RoundState, now: float) -> None:
        """Begin the round if all expected jobs are ready or the late ones are given up."""
        state = self._state
        expected = [
            member
            for member in state.members.values()
            if member.state == "in" and member.expected_from <= round_state.number
        ]
        missing = [member for member in expected if member.name not in round_state.ready_reports]
        if round_state.half_ready is None and 2 * len(missing) <= len(expected):
            round_state.half_ready = now
        if (missing or self._awaited.may_arrive(now)) and now < self._deadline(round_state):
            return
        for member in missing:
            state.events.append(
                f"round {round_state.number} goes on without job {member.name}, which is late"
            )
            mark_late(state, member, round_state.number)
        self._begin(round_state, now)

    def _begin(self, round_state: RoundState, now: float) -> None:
        """Begin the exchange between all ready jobs that have the fragment's true version."""
        state = self._state
        ready = [state.members[name] for name in round_state.ready_reports]
        ready = sorted((m for m in ready if m.state == "in"), key=lambda member: member.order)
        claims = {member.name: self._salted_claim(round_state, member) for member in ready}
        truth = self._true_claim(round_state, ready, claims)
        if truth is not None:
            round_state.behind = {
                name for name, claim in claims.items() if not is_compatible(claim, truth)
            }
        able = [member for member in ready if member.name not in round_state.behind]
        ranks = {member.name: len(member.hello.addresses) for member in able}
        usual_norms = self._rounds.usual_norms(round_state.fragment)
        weights = weights_in_sum(round_state, ranks, outer_settings(able), usual_norms)
        least = state.least_jobs(ready) if ready else 1
        if self._rounds.begin_exchange(round_state, able, weights, least, now):
            for name, why in round_state.left_out.items():
                state.events.append(f"round {round_state.number}: job {name} is left out: {why}")

    def _deadline(self, round_state: RoundState) -> float:
        """Return when late jobs are given up: a patience after half of the jobs were ready."""
        patience = patience_s([self._state.members[name] for name in round_state.ready_reports])
        if round_state.half_ready is None:
            return round_state.opened + 2 * patience
        return round_state.half_ready + patience

    def _salted_claim(self, round_state: RoundState, member: Member) -> Claim:
        """Return what the member claims of the round's fragment, with the salted checksum.

        A checksum with the salt of another round, which others could have told the job, is left
        out.
        """
        report = round_state.ready_reports[member.name]
        claim = member.claims[round_state.fragment]
        checksum = report.salted if report.salt_round == round_state.number else ""
        return Claim(claim.version, checksum)

    def _true_claim(
        self, round_state: RoundState, ready: list[Member], salted_claims: dict[str, Claim]
    ) -> Claim | None:
        """Return the true version of the round's fragment, with its salted checksum if known.

        Current jobs decide, or all if none is current. Claims without salted checksum count as
        well.
        """
        trusted = [member for member in ready if member.current] or ready
        truth = self._versions.truth(round_state.fragment, trusted)
        if truth is None:
            return None
        holders = [
            member
            for member in trusted
            if is_compatible(member.claims[round_state.fragment], truth)
        ]
        checksums = [salted_claims[member.name].checksum for member in holders]
        checksums = [checksum for checksum in checksums if checksum]
        if not checksums:
            return Claim(truth.version)
        return Claim(truth.version, max(checksums, key=checksums.count))

    def _reply(self, round_state: RoundState, member: Member, now: float) -> Reply | None:
        """Return what the round means for a job that is ready for it."""
        if round_state.outcome == "void":
            return void_reply(round_state)
        if member.name in round_state.behind:
            return self._catch_up(member, round_state.number, now)
        if not round_state.attempt:
            return None
        if member.name not in round_state.members:
            return skip_reply(round_state.number)
        return go_reply(self._state, round_state)
