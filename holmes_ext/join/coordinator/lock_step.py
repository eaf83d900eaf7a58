"""First half of a round in lock step (setting rounds=sync): all jobs exchange the same fragment together.

1. Each job reports `ready` when it has a pseudo-gradient for the round. The first report opens the round.
2. The round begins when all jobs that take part are ready, or a timeout (the median of the jobs' timeouts)
   after half of them are; the missing jobs are marked late.
3. Every ready job gets a verdict:
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
from holmes_ext.join.coordinator.rounds import Rounds, two_are_apart
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
    """Synchronous rounds (rounds=sync) on the coordinator: decides when the next round begins.

    All jobs exchange the same fragment (part of the model) after the same number of inner steps. A
    job reports `ready` and waits until the other jobs are ready, too, or a deadline has passed; then
    the round begins.
    """

    question: ClassVar[str] = "ready"

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        self._state = state
        self._rounds = rounds
        self._versions = versions
        # Peers of the connected jobs that have not reconnected since a restart of the coordinator.
        self._awaited_peers = awaited

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> ReadyReport:
        """Parse the report "ready" (a job has a pseudo-gradient for the next round) in a request.

        Args:
            document: The request, as parsed JSON.
            fragments: Number of fragments (parts of the model) in the run.

        Raises:
            HolmesError: The report is malformed.
        """
        return ready_from(document, fragments)

    def answer(self, name: str, report: ReadyReport, now: float) -> Reply | None:
        """Return the reply to a job that is ready for a round; None: wait and ask again.

        The round begins in this call if only this job was missing, or if the round's deadline has
        passed. Until then, the job repeats its request.

        Args:
            name: Name of the job.
            report: Its `ready` report, which names the round and the fragment.
            now: Current time, in seconds.

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
        round_state = state.rounds.get(report.round)  # None: no job was ready for it before
        if round_state is None or name not in round_state.ready_reports:  # the job's first request
            if self._must_catch_up(member, report.round):
                return self._catch_up(member, report.round, now)
            round_state = self._add_ready_job(member, report, now)
        if not _has_begun(round_state):
            self._begin_if_complete(round_state, now)
        return self._reply(round_state, member, now)

    def _must_catch_up(self, member: Member, round_number: int) -> bool:
        """Return whether a job that asks for a round must first catch up with the other jobs.

        It must in each of these cases:

        1. The job is catching up already.
        2. Round `round_number` has ended, or has begun without the job.
        3. The current round, which may be an earlier one, goes on without the job: as soon as that round
           is committed, the job's weights are outdated.
        4. The job's weights are outdated now.

        Args:
            member: The job.
            round_number: Number of the round for which the job has just reported `ready`.
        """
        is_catching_up = member.catches_up_after is not None
        if is_catching_up or round_number < self._state.number:
            return True
        round_state = self._state.rounds.get(round_number)
        if round_state is not None and _has_begun(round_state):  # without this job
            return True
        current_round = self._state.rounds.get(self._state.number)
        if current_round is not None and self._goes_on_without(current_round, member.name):
            return True  # its weights are outdated as soon as that round is committed
        has_outdated_weights = self._versions.behind_reply(member) is not None
        return has_outdated_weights

    def _goes_on_without(self, round_state: RoundState, name: str) -> bool:
        """Return whether a round's exchange is under way, and the job is not one of its members now.

        A round whose members are all gone is not under way: nobody ends it.
        """
        is_under_way = round_state.attempt > 0 and not round_state.outcome
        if not is_under_way or name in round_state.members:
            return False
        return any(member.name in round_state.members for member in self._state.present())

    def _add_ready_job(self, member: Member, report: ReadyReport, now: float) -> RoundState:
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
        member.lag_s = now - round_state.opening_time
        return round_state

    def _catch_up(self, member: Member, ready_for: int, now: float) -> Reply | None:
        """Return the parts of the model (fragments) that an outdated job must take from another job.

        The job first waits for the end of the round that takes place without it: the current round, or
        the next round if the job is ready for that. Weights taken before that round's outer step would
        be outdated at once, and the job would never catch up.

        Args:
            member: The job.
            ready_for: Number of the round for which it has reported `ready`.
            now: Current time, in seconds.

        Returns:
            The reply "behind" with the fragments and the job to take them from, or "skip" if there
            are none to take. None until the awaited round has ended.
        """
        if member.catches_up_after is None:  # the first request: choose the round to wait for
            member.catches_up_after = self._state.number
            if ready_for > self._state.number:
                member.catches_up_after = self._state.number + 1
            member.catches_up_since = now
            # Earlier rounds begin without waiting for this job: it has no valid weights for
            # them.
            member.first_expected_round = max(self._state.number, ready_for) + 1
        # Also true if the awaited round will not end in reasonable time: no job may wait for ever.
        if not self._is_over_or_hopeless(member, member.catches_up_after, now):
            return None
        ended_round = member.catches_up_after
        member.catches_up_after = None
        # The verdict "behind", with the fragments of which the majority has another version.
        behind_reply = self._versions.order_to_take(member, now)
        member.was_told_to_take_weights = behind_reply is not None
        if behind_reply is None:
            return skip_reply(ended_round)
        return {**behind_reply, "round": ended_round}

    def _is_over_or_hopeless(self, member: Member, round_number: int, now: float) -> bool:
        """Return whether a job should stop waiting for a round, because it is over or hopeless.

        The waiting job is catching up: its weights are outdated. It takes part in no round until
        this one has ended and it has then taken newer weights from another job.

        A round is hopeless if all its jobs are gone, or if no job can open it. It is also hopeless
        if it has not ended within twice the median timeout of its jobs.

        Args:
            member: The job that waits.
            round_number: The round; it may not have been opened yet.
            now: Current time, in seconds.
        """
        round_state = self._state.rounds.get(round_number)
        if round_state is not None:
            names = [name for name in round_state.ready_reports if name in self._state.members]
            members = [self._state.members[name] for name in names]
            if round_state.outcome or all(other.state == "gone" for other in members):
                return True
            # patience_s: median timeout of the round's jobs, so that none of them determines the
            # wait.
            return now > round_state.opening_time + 2 * patience_s(members)
        # No job is ready for the round yet; the first ready job will open it. A job that is catching up
        # (catches_up_after is not None) cannot: its weights are outdated.
        others = [
            other
            for other in self._state.members.values()
            if other is not member and other.state == "in" and other.catches_up_after is None
        ]
        was_skipped = round_number <= self._state.number  # a later round was opened instead
        if was_skipped or not others:
            return True
        # The round has no jobs, so there is no median of their timeouts. The waiting job's own
        # timeout counts instead.
        return now > member.catches_up_since + 2 * member.hello.timeout

    def _begin_if_complete(self, round_state: RoundState, now: float) -> None:
        """Begin the round if all expected jobs are ready, or its deadline has passed.

        Expected are the jobs in training, except late ones, those that sit out rounds, and those with
        outdated weights. A job with outdated weights is expected again from its `first_expected_round`
        on: by then it has had time to take newer weights. Expected jobs that are not ready by the
        deadline are marked late: the next rounds do not wait for them.

        The deadline is a timeout after the time at which half of the expected jobs were ready.
        While fewer are ready, it is two timeouts after the round was opened. The timeout is the
        median of the ready jobs' timeouts.

        Args:
            round_state: A round that was opened and has not begun.
            now: Current time, in seconds.
        """
        state = self._state
        expected = [
            member
            for member in state.members.values()
            # "in": in training, and not late.
            if member.state == "in"
            and member.first_expected_round <= round_state.number
            and not sits_out(state, member, round_state.number)
        ]
        missing = [member for member in expected if member.name not in round_state.ready_reports]
        if round_state.half_ready_time is None and 2 * len(missing) <= len(expected):
            round_state.half_ready_time = now  # the deadline counts from it now
        # After a restart of the coordinator, other jobs of the run may not have reconnected yet.
        must_wait = bool(missing) or self._awaited_peers.may_arrive(now)
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

        The other ready jobs are marked as `behind`: they must first take the weights from another job. If
        two jobs have lately failed to exchange data with each other, one of the two is left out. If too few
        of the remaining jobs have a usable pseudo-gradient, the round ends without an exchange (void).

        Args:
            round_state: A round that has not begun.
            now: Current time, in seconds.
        """
        state = self._state
        reported = [state.members[name] for name in round_state.ready_reports]
        ready = [member for member in reported if member.state == "in"]
        ready.sort(key=lambda member: member.order)
        # The jobs that exchange data in this round; `ready` also has those that cannot take part now.
        members = self._with_valid_weights(round_state, ready)
        # The fewest members without which all others can exchange data with each other.
        left_out = state.jobs_to_leave_out(members, now)
        if two_are_apart(members, left_out):  # the round has no other members than such a pair
            names = " and ".join(sorted(member.name for member in members))
            self._rounds.void(round_state, f"jobs {names} are here, but cannot exchange data")
            return
        self._rounds.note_left_out(round_state.number, members, left_out)
        members = [member for member in members if member.name not in left_out]
        ranks = {member.name: len(member.hello.addresses) for member in members}
        # Norms of the fragment's recent pseudo-gradients: a job with a much larger norm is left out.
        usual_norms = self._rounds.usual_norms(round_state.fragment)
        # This call also writes the jobs that are left out, with the reasons, to round_state.left_out.
        weights = weights_in_sum(round_state, ranks, outer_settings(members), usual_norms)
        # Voids the round if `weights` has fewer jobs than half of `ready`, or than their setting `min`.
        has_begun = self._rounds.begin_exchange(round_state, members, weights, ready, now)
        if has_begun:
            for name, why in round_state.left_out.items():
                state.events.append(f"round {round_state.number}: job {name} is left out: {why}")

    def _with_valid_weights(self, round_state: RoundState, ready: list[Member]) -> list[Member]:
        """Return the ready jobs with the majority's weights; mark the others as `behind`.

        Two values that each job reports for the round's fragment are compared: the version (round of
        the fragment's last outer step), and a checksum of the weights and a random text (salt). The
        salt is new in each round, so a job cannot copy an earlier checksum; it must have the weights.

        Args:
            round_state: The round.
            ready: Jobs that are ready for it.
        """
        claims = {member.name: self._salted_claim(round_state, member) for member in ready}
        majority = self._valid_salted_claim(round_state, ready, claims)
        if majority is not None:
            round_state.behind = {
                name for name, claim in claims.items() if not is_compatible(claim, majority)
            }
        return [member for member in ready if member.name not in round_state.behind]

    def _deadline(self, round_state: RoundState) -> float:
        """Return the time at which the round begins without the missing jobs.

        It is the time at which half of the expected jobs were ready, plus the median of the ready jobs'
        timeouts. While fewer than half are ready, it is the opening of the round plus twice this median.
        """
        patience = patience_s([self._state.members[name] for name in round_state.ready_reports])
        if round_state.half_ready_time is None:
            return round_state.opening_time + 2 * patience
        return round_state.half_ready_time + patience

    def _salted_claim(self, round_state: RoundState, member: Member) -> Claim:
        """Return the version of the round's fragment that a member claims to have, with a salted checksum.

        The salt is a random text that is published shortly before the round. So the checksum proves that
        the job has the weights. A checksum with the salt of another round is dropped (""), because the job
        could have copied it from another job.
        """
        report = round_state.ready_reports[member.name]
        claim = member.claims[round_state.fragment]
        checksum = report.salted if report.salt_round == round_state.number else ""
        return Claim(claim.version, checksum)

    def _valid_salted_claim(
        self, round_state: RoundState, ready: list[Member], salted_claims: dict[str, Claim]
    ) -> Claim | None:
        """Return the version of a part of the model that most jobs report, with its salted checksum.

        The version is the round of the last outer step. Each job reports two checksums of its
        weights. The plain checksum is equal in every round, so a job may have copied it. The salted
        checksum contains a random text for this round, so it proves that the job has the weights.
        Only up-to-date jobs vote, or all jobs if none is up to date.

        Args:
            round_state: The round.
            ready: Jobs that are ready for it.
            salted_claims: Job -> version and salted checksum that it reports.

        Returns:
            The majority's version, with the most frequent salted checksum among the jobs that have
            this version ("" if none of them reports a salted checksum). None if each reported version
            is later than the fragment's last outer step that the coordinator knows: no job can have it.
        """
        trusted = [member for member in ready if member.is_up_to_date] or ready
        # Version on which the jobs agree best, with the plain checksum.
        valid = self._versions.valid_claim(round_state.fragment, trusted)
        if valid is None:
            return None
        # Jobs that report this version, and this plain checksum or none: is_compatible() compares
        # both, and lets a missing checksum pass.
        holders = [
            member
            for member in trusted
            if is_compatible(member.claims[round_state.fragment], valid)
        ]
        checksums = [salted_claims[member.name].checksum for member in holders]
        checksums = [checksum for checksum in checksums if checksum]
        if not checksums:
            return Claim(valid.version)
        most_frequent = max(checksums, key=checksums.count)
        return Claim(valid.version, most_frequent)

    def _reply(self, round_state: RoundState, member: Member, now: float) -> Reply | None:
        """Return the verdict of the round for a job that is ready; None until the round begins.

        It is "go" (exchange with the members), "behind" (first take fragments from another job), "skip" (the
        round takes place without this job) or "void" (the round changes nothing).
        """
        if round_state.outcome == "void":
            return void_reply(round_state)
        if member.name in round_state.behind:  # the job has another version than the majority
            return self._catch_up(member, round_state.number, now)
        if not round_state.attempt:  # the exchange has not begun
            return None
        if member.name not in round_state.members:
            return skip_reply(round_state.number)
        return go_reply(self._state, round_state)


def _has_begun(round_state: RoundState) -> bool:
    """Return whether the exchange of a round has begun, or the round is already over."""
    return round_state.attempt > 0 or round_state.outcome != ""
