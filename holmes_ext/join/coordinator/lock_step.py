"""First half of a round in lock step (setting rounds=sync): all jobs exchange the same fragment together.

1. Each job reports `ready` when it has a pseudo-gradient for the round. The first report opens the round.
2. The round begins when all jobs that take part are ready, or a patience (the median of the jobs' timeouts)
   after half of them are; the missing jobs are marked late.
3. Every ready job gets one of the verdicts
       go       exchange pseudo-gradients with these members (settlement.py decides what follows)
       behind   this job's weights are outdated: take these fragments from that job
       skip     the round takes place without this job
       void     the round changes nothing, because too few pseudo-gradients count

No job waits for ever: a round that does not begin in time begins without the missing jobs.
Pure: no clock, no network.
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
    """Round policy for jobs that exchange the same fragment after the same number of inner steps."""

    question: ClassVar[str] = "ready"

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        self._state = state
        self._rounds = rounds
        self._versions = versions
        self._awaited = awaited

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> ReadyReport:
        """Return the `ready` report in a request; raise HolmesError if it is malformed."""
        return ready_from(document, fragments)

    def answer(self, name: str, report: ReadyReport, now: float) -> Reply | None:
        """Return the verdict for a job that is ready for a round; None while it must wait for others.

        The round begins in the request that completes it: the last expected job, or the first request
        after the round's deadline.

        Raises:
            HolmesError: The report contradicts the state of the run.
        """
        state = self._state
        member = state.member(name)
        if sits_out(state, member, report.round):  # because it was late repeatedly
            return skip_reply(state.number)
        if member.state == "late":
            state.events.append(f"job {name} is back")
        member.state = "in"
        if report.round > state.number + 1:  # the job went on counting while it was disconnected
            return skip_reply(state.number)
        round_state = state.rounds.get(report.round)
        is_first_request = round_state is None or name not in round_state.ready_reports
        if round_state is None or is_first_request:
            if self._must_catch_up(member, report.round):
                return self._catch_up(member, report.round, now)
            round_state = self._enlist(member, report, now)
        has_begun = round_state.attempt > 0 or round_state.outcome != ""
        if not has_begun:
            self._begin_if_complete(round_state, now)
        return self._reply(round_state, member, now)

    def _must_catch_up(self, member: Member, number: int) -> bool:
        """Return whether the job has outdated weights, or is too late for round `number`."""
        is_catching_up = member.awaits is not None  # it already waits for the end of a round
        if is_catching_up or number < self._state.number:
            return True
        round_state = self._state.rounds.get(number)
        if round_state is not None and (round_state.attempt or round_state.outcome):
            return True  # the round has begun, or is over, without this job
        return self._versions.correction(member) is not None

    def _enlist(self, member: Member, report: ReadyReport, now: float) -> RoundState:
        """Add a job to the round that it is ready for; the first job opens the round.

        Args:
            member: The job.
            report: Its `ready` report, which names the round and the fragment.
            now: Current time, in seconds.

        Raises:
            HolmesError: The round exchanges another fragment than the job is ready for.
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
        """Return which fragments a job must take from another job to catch up with the run.

        The job first waits for the end of the round that takes place without it (the current round, or
        the next one if the job is ready for that). If it took weights before, that round would make
        them outdated again, and the job would never catch up.

        Returns:
            The verdict "behind" with the fragments, or "skip" if there are none to take. None until the
            awaited round has ended.
        """
        if member.awaits is None:
            member.awaits = self._state.number
            if number > self._state.number:
                member.awaits = self._state.number + 1
            member.awaits_from = now
            member.expected_from = max(self._state.number, number) + 1
        if not self._has_ended(member.awaits, member, now):
            return None
        ended_round = member.awaits
        member.awaits = None
        correction = self._versions.correction(member)
        member.corrected = correction is not None
        if correction is None:
            return skip_reply(ended_round)
        return {**correction, "round": ended_round}

    def _has_ended(self, number: int, member: Member, now: float) -> bool:
        """Return whether round `number`, for which a job waits, is over or given up.

        It is given up if all its jobs are gone, if no other job can open it, or after twice the jobs'
        timeout (their median timeout once the round is open).
        """
        round_state = self._state.rounds.get(number)
        if round_state is not None:
            names = [name for name in round_state.ready_reports if name in self._state.members]
            members = [self._state.members[name] for name in names]
            if round_state.outcome or all(other.state == "gone" for other in members):
                return True
            return now > round_state.opened + 2 * patience_s(members)
        # The round is not open. Only jobs in training that do not wait themselves can open it.
        others = [
            other
            for other in self._state.members.values()
            if other is not member and other.state == "in" and other.awaits is None
        ]
        # A later round was opened instead, or nobody is left who could open this one.
        if number <= self._state.number or not others:
            return True
        return now > member.awaits_from + 2 * member.hello.timeout

    def _begin_if_complete(self, round_state: RoundState, now: float) -> None:
        """Begin the round if all expected jobs are ready, or its deadline has passed.

        Expected are the jobs in training that are not late and not catching up. Those that are not ready by
        the deadline are marked late: the next rounds do not wait for them.
        """
        state = self._state
        expected = [
            member
            for member in state.members.values()
            if member.state == "in" and member.expected_from <= round_state.number
        ]
        missing = [member for member in expected if member.name not in round_state.ready_reports]
        if round_state.half_ready is None and 2 * len(missing) <= len(expected):
            round_state.half_ready = now
        # After a restart of the coordinator, other jobs of the run may not have reconnected yet.
        must_wait = bool(missing) or self._awaited.may_arrive(now)
        if must_wait and now < self._deadline(round_state):
            return
        for member in missing:
            state.events.append(
                f"round {round_state.number} goes on without job {member.name}, which is late"
            )
            mark_late(state, member, round_state.number)
        self._begin(round_state, now)

    def _begin(self, round_state: RoundState, now: float) -> None:
        """Begin the exchange between the ready jobs whose weights agree with the majority's.

        The other ready jobs are `behind`: they have to take the weights from another job first. The round is
        void if too few pseudo-gradients count.
        """
        state = self._state
        reported = [state.members[name] for name in round_state.ready_reports]
        ready = [member for member in reported if member.state == "in"]
        ready.sort(key=lambda member: member.order)
        # Versions and checksums of the fragment; a salted checksum cannot be copied from another job.
        claims = {member.name: self._salted_claim(round_state, member) for member in ready}
        valid = self._valid_salted_claim(round_state, ready, claims)
        if valid is not None:
            round_state.behind = {
                name for name, claim in claims.items() if not is_compatible(claim, valid)
            }
        able = [member for member in ready if member.name not in round_state.behind]
        ranks = {member.name: len(member.hello.addresses) for member in able}
        usual_norms = self._rounds.usual_norms(round_state.fragment)
        # Also fills round_state.left_out with the jobs whose pseudo-gradients do not count.
        weights = weights_in_sum(round_state, ranks, outer_settings(able), usual_norms)
        least = state.least_jobs(ready) if ready else 1
        has_begun = self._rounds.begin_exchange(round_state, able, weights, least, now)
        if has_begun:
            for name, why in round_state.left_out.items():
                state.events.append(f"round {round_state.number}: job {name} is left out: {why}")

    def _deadline(self, round_state: RoundState) -> float:
        """Return the time after which the round begins without the missing jobs, in seconds.

        The missing jobs have one median timeout after half of the jobs were ready, or two after the
        opening of the round until then.
        """
        patience = patience_s([self._state.members[name] for name in round_state.ready_reports])
        if round_state.half_ready is None:
            return round_state.opened + 2 * patience
        return round_state.half_ready + patience

    def _salted_claim(self, round_state: RoundState, member: Member) -> Claim:
        """Return a member's claim about the round's fragment, with the salted checksum.

        A checksum with the salt of another round is dropped, because the job could have copied it
        from another job.
        """
        report = round_state.ready_reports[member.name]
        claim = member.claims[round_state.fragment]
        checksum = report.salted if report.salt_round == round_state.number else ""
        return Claim(claim.version, checksum)

    def _valid_salted_claim(
        self, round_state: RoundState, ready: list[Member], salted_claims: dict[str, Claim]
    ) -> Claim | None:
        """Return the majority's version of the round's fragment, with its salted checksum if known.

        Only jobs that are up to date vote (`current`), or all jobs if none is.

        Args:
            round_state: The round.
            ready: Jobs that are ready for it.
            salted_claims: Job -> its claim with the salted checksum.

        Returns:
            The majority's claim, with the most frequent salted checksum of the jobs that have this version;
            without a checksum if none of them reports one; None if no job claims a possible version.
        """
        trusted = [member for member in ready if member.current] or ready
        valid = self._versions.valid_claim(round_state.fragment, trusted)
        if valid is None:
            return None
        holders = [
            member
            for member in trusted
            if is_compatible(member.claims[round_state.fragment], valid)
        ]
        checksums = [salted_claims[member.name].checksum for member in holders]
        checksums = [checksum for checksum in checksums if checksum]
        if not checksums:
            return Claim(valid.version)
        return Claim(valid.version, max(checksums, key=checksums.count))

    def _reply(self, round_state: RoundState, member: Member, now: float) -> Reply | None:
        """Return the verdict of the round for a job that is ready; None until the round begins."""
        if round_state.outcome == "void":
            return void_reply(round_state)
        if member.name in round_state.behind:  # the job has another version than the majority
            return self._catch_up(member, round_state.number, now)
        if not round_state.attempt:  # the exchange has not begun
            return None
        if member.name not in round_state.members:
            return skip_reply(round_state.number)
        return go_reply(self._state, round_state)
