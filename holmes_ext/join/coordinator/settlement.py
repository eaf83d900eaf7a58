"""Second half of a round: from the jobs' exchange of pseudo-gradients to commit or void.

1. Each member of the round exchanges its pseudo-gradient with the other members, then reports `done`
   with the members that it could not reach.
2. If all members have reported `done` and reached each other, they all get the verdict `check`. Otherwise
   they get `go` again: the first time with the failed pairs over the coordinator's relay, then without the
   fewest members such that all others can exchange with each other (failed_pairs.py).
3. Each member reports `checked`, with salted digests of the data it received from each other member.
4. If the digests agree, all members get `commit` and take the outer step. Members in conflict with the
   majority are excluded, and the others are checked again.

Invariant: a round is committed only if all its members received identical data. A round that cannot be
completed is void and changes nothing: the jobs keep their pseudo-gradients for the fragment's next
round. No member waits for ever: members that are silent for the jobs' median timeout are given up.

Pure: no clock, no network.
"""

from __future__ import annotations

from holmes_ext.join.coordinator.consensus import (
    accusations_from_digests,
    medians_by_key,
    voted_out,
)
from holmes_ext.join.coordinator.failed_pairs import (
    Failures,
    failures_of,
    fewest_to_drop,
    names_in,
    only_reporters,
)
from holmes_ext.join.coordinator.lateness import count_delay, mark_unfinished
from holmes_ext.join.coordinator.replies import (
    Reply,
    check_reply,
    commit_reply,
    go_reply,
    void_reply,
)
from holmes_ext.join.coordinator.reports import CheckedReport, DoneReport
from holmes_ext.join.coordinator.rounds import Rounds, two_are_apart
from holmes_ext.join.coordinator.state import (
    RoundState,
    RunState,
    drop_preference,
    least_jobs,
    patience_s,
)

#: Number of members of a round for which neither member is in the majority.
_TWO = 2
#: Share of the timeout for which the round waits for the report of a member that no other member reached.
_UNREACHED_SHARE = 0.25
#: Share of the timeout for which an attempt lasts at least before half or more of its members can be given
#: up. A member waits a whole timeout for another member's data before it reports the failure.
_HALF_SILENT_SHARE = 1.25


class Settlement:
    """Coordinator's decisions after a round has begun, until its outer step is committed or void.

    The jobs exchange pseudo-gradients and report `done`; then they compare digests of the received
    data and report `checked`. A failed exchange is repeated without the lost jobs. done() and
    checked() return the replies.
    """

    def __init__(self, state: RunState, rounds: Rounds):
        self._state = state
        self._rounds = rounds

    def done(self, name: str, report: DoneReport, now: float) -> Reply | None:
        """Process a member's report that its exchange of pseudo-gradients has ended.

        A member repeats its report until it gets a verdict.

        Args:
            name: The member, a job.
            report: Number of the round and of the attempt, members that it could not reach, and members that
                sent unusable data.
            now: Current time, in seconds.

        Returns:
            The verdict for the member; None while it depends on members that have not reported yet.
        """
        round_state = self._state.rounds.get(report.round)
        if round_state is None:
            return self._forgotten_reply()
        if reply := self._reply_if_outdated(round_state, name, report.attempt):
            return reply
        if not round_state.check_number:  # the members' data is not being compared yet
            if name not in round_state.done_reports:
                round_state.done_reports[name] = report
                round_state.last_report = now
            self._conclude_exchange(round_state, now)
        # Checks (comparisons of the received data) are numbered from 1: this member has reported none.
        return self._next_reply(round_state, name, report.attempt, check_number=0)

    def checked(self, name: str, report: CheckedReport, now: float) -> Reply | None:
        """Process a member's report of digests of the data it received.

        A check is a comparison of these digests between all members. A round may have several,
        numbered from 1: if some members contradict the others, these members are excluded (their
        pseudo-gradients do not count), and the others are compared again.

        Args:
            name: The member, a job.
            report: Numbers of the round, the attempt and the check, and the digests.
            now: Current time, in seconds.

        Returns:
            The verdict for the member; None while it depends on members that have not reported yet.
        """
        round_state = self._state.rounds.get(report.round)
        if round_state is None:
            return self._forgotten_reply()
        if reply := self._reply_if_outdated(round_state, name, report.attempt):
            return reply
        if report.check == round_state.check_number:
            if name not in round_state.checked_reports:
                round_state.checked_reports[name] = report
                round_state.last_report = now
            self._conclude_check(round_state, now)
        return self._next_reply(round_state, name, report.attempt, check_number=report.check)

    def _forgotten_reply(self) -> Reply:
        """Return the reply "void" for a round that began before this coordinator was restarted."""
        return {
            "verdict": "void",
            "round": self._state.number,
            "why": "the coordinator was restarted",
        }

    def _reply_if_outdated(self, round_state: RoundState, name: str, attempt: int) -> Reply | None:
        """Return the reply to a report that is out of date; None if the report is still current.

        Args:
            round_state: The round.
            name: The job that reports.
            attempt: Number of the exchange within the round to which the report belongs.

        Returns:
            "commit" if the round has succeeded. "void" if it has failed, or no longer includes the
            job. "go" if the jobs have begun another attempt of the exchange.
        """
        if round_state.outcome == "commit" and name in round_state.members:
            return commit_reply(round_state)
        if round_state.outcome or name not in round_state.members:
            return void_reply(round_state)
        if attempt != round_state.attempt:
            return go_reply(self._state, round_state)
        return None

    def _next_reply(
        self, round_state: RoundState, name: str, attempt: int, check_number: int
    ) -> Reply | None:
        """Return the verdict for a member that has reported; None while the next step is undecided.

        The verdict is "check" if the received data is to be compared. If the report is out of date, it is
        that of _reply_if_outdated(): "go" if the exchange is repeated, "commit" or "void" if the round
        has ended.

        Args:
            round_state: The round.
            name: The member.
            attempt: Number of the exchange that it has reported.
            check_number: Number of the comparison that it has reported; 0: it reported only its exchange.
        """
        if reply := self._reply_if_outdated(round_state, name, attempt):
            return reply
        if round_state.check_number > check_number:  # the next comparison has begun
            return check_reply(self._state, round_state)
        return None

    def _conclude_exchange(self, round_state: RoundState, now: float) -> None:
        """Check or repeat the exchange after all jobs of the round have reported that it has ended.

        The exchange is repeated if jobs were lost, or if pairs of jobs could not exchange data. Otherwise,
        the comparison of the received data begins. Nothing happens while a missing report may still arrive.
        """
        lost = self._lost_members(round_state, set(round_state.done_reports), now)
        if lost is None:
            return
        failures = failures_of(round_state.done_reports, round_state.members)
        if lost:
            self._repeat_without_lost(round_state, lost, now)
        elif failures and not round_state.has_tried_relay:
            self._repeat_over_relay(round_state, failures, now)
        elif failures:
            self._repeat_without_failed_pairs(round_state, failures, now)
        else:
            # Member -> (accused member -> reason): data that the member cannot use.
            faults = {name: report.faults for name, report in round_state.done_reports.items()}
            round_state.excluded = voted_out(faults)
            self._begin_check(round_state, now)

    def _repeat_over_relay(self, round_state: RoundState, failures: Failures, now: float) -> None:
        """Begin the next attempt with the same members, and with the failed pairs over the relay.

        The pairs use the relay in the next rounds, too (FailedPairs.relay). A round does this once, so that
        no member can make it repeat the exchange again and again.

        Args:
            round_state: The round.
            failures: Pairs whose exchange failed -> the jobs that have reported it.
            now: Current time, in seconds.
        """
        round_state.has_tried_relay = True
        self._state.failed_pairs.relay(failures, now)
        self._state.events.append(
            f"round {round_state.number}: jobs {names_in(failures)} could not exchange, and now use the relay"
        )
        self._begin_attempt(round_state, round_state.members, now)

    def _repeat_without_failed_pairs(
        self, round_state: RoundState, failures: Failures, now: float
    ) -> None:
        """Repeat the exchange without the fewest members such that no failed pair is left.

        A failed pair is two members that could exchange data neither directly nor over the coordinator's
        relay. For a while, the next rounds begin without one of the two, so that they lose no time
        (FailedPairs.separate). If the round has only two members, it is void: neither is in the majority.

        Args:
            round_state: The round.
            failures: Pairs whose exchange failed over the relay, too -> the jobs that have reported it.
            now: Current time, in seconds.
        """
        lost_s = now - round_state.exchange_begin
        self._state.failed_pairs.separate(failures, lost_s, now)
        members = [self._state.members[name] for name in round_state.members]
        dropped = fewest_to_drop(failures, drop_preference(failures, members))
        if two_are_apart(members, dropped):
            names = names_in(failures)
            self._rounds.void(round_state, f"its jobs are here, but could not exchange: {names}")
            return
        self._rounds.note_left_out(round_state.number, members, dropped)
        for name in dropped & only_reporters(failures):
            # The other job of the pair reports no failure, so this job's report may be false. The report
            # counts as a delay: after several rounds in a row with it, the job must sit out rounds.
            count_delay(self._state, self._state.members[name], round_state.number)
        self._repeat_without(round_state, dropped, now)

    def _conclude_check(self, round_state: RoundState, now: float) -> None:
        """Commit the round if all members received identical data.

        Otherwise, members in conflict with the majority are excluded (their pseudo-gradients do not
        count), and the others are compared again. Nothing happens until each member has reported
        `checked` or is given up as lost.
        """
        lost = self._lost_members(round_state, set(round_state.checked_reports), now)
        if lost is None:
            return
        if lost:
            self._repeat_without_lost(round_state, lost, now)
            return
        counting = [name for name in _contributors(round_state) if name not in round_state.excluded]
        digests: dict[str, dict[str, str]] = {}  # receiver -> sender -> digest of the received data
        for name, report in round_state.checked_reports.items():
            if name in round_state.excluded:  # its digests must not force yet another check
                continue
            digests[name] = {
                sender: digest for sender, digest in report.digests.items() if sender in counting
            }
        if excluded := voted_out(accusations_from_digests(digests)):
            round_state.excluded |= excluded
            self._begin_check(round_state, now)
            return
        self._commit(round_state, counting)

    def _commit(self, round_state: RoundState, counting: list[str]) -> None:
        """Commit the round, with the same factors and gap for the outer step of all members.

        A factor is the weight of a job's pseudo-gradient in the aggregate. The gap is the divisor
        of a stale aggregate (CO2). Each member has computed and reported both. Rounding may differ,
        and a single member may lie, so the median over the reports of all members is used.

        Args:
            round_state: The round.
            counting: Members whose pseudo-gradients count in the aggregate.
        """
        reports = round_state.checked_reports.values()
        factors = medians_by_key(report.factors for report in reports)  # job -> factor
        round_state.factors = {name: factors.get(name, 0.0) for name in counting}
        round_state.gap = medians_by_key({"gap": report.gap} for report in reports)["gap"]
        round_state.left_out |= round_state.excluded
        self._rounds.commit(round_state)

    def _begin_check(self, round_state: RoundState, now: float) -> None:
        """Let all members compare the data they have received; repeat or void the round if too few count.

        Members poll; they get the reply "check" after this call has increased `round_state.check_number`.
        A pseudo-gradient counts if its job has a share above 0 and is not excluded (excluded jobs contradict
        other members). If too few count, the exchange is repeated without one excluded job. A round of
        two members, or without excluded jobs, is void instead.

        Args:
            round_state: The round.
            now: Current time, in seconds.
        """
        round_state.check_number += 1
        round_state.checked_reports = {}
        round_state.last_report = now
        counting = [name for name in _contributors(round_state) if name not in round_state.excluded]
        for name, why in round_state.excluded.items():
            self._state.events.append(f"round {round_state.number}: job {name} is left out: {why}")
        if len(counting) >= self._least_jobs(round_state) and counting:
            return
        if round_state.excluded and len(round_state.members) > _TWO:
            self._repeat_without_excluded(round_state, now)
            return
        reasons = "; ".join(
            f"{name} is left out: {why}" for name, why in round_state.excluded.items()
        )
        round_state.left_out |= round_state.excluded
        self._rounds.void(round_state, reasons or "no job counts")

    def _repeat_without_excluded(self, round_state: RoundState, now: float) -> None:
        """Repeat the exchange without one of the excluded jobs, because too few are left without all of them.

        Example: of the jobs A, B and C, A reports that the data from B cannot be used, or differs from the
        data of the others. It is not clear whether A or B lies. So both are excluded, and C alone is no
        round. Then the exchange is repeated without A; the next time that this happens, it is repeated
        without B (drop_preference, note_left_out). So a liar voids no rounds; the other job misses half of
        them.

        Args:
            round_state: The round, with the excluded jobs.
            now: Current time, in seconds.
        """
        members = [self._state.members[name] for name in round_state.excluded]
        dropped = {drop_preference({}, members)[0]}
        self._rounds.note_left_out(
            round_state.number, members, dropped, why="it and another member contradict each other"
        )
        self._repeat_without(round_state, dropped, now)

    def _lost_members(
        self, round_state: RoundState, reported: set[str], now: float
    ) -> set[str] | None:
        """Return the members that are disconnected or have been silent for too long.

        Members without a report are silent for too long after this time:

        1. The median of all members' timeouts, counted from the last report of any member.
        2. A quarter of it, if all members that have reported could not reach the silent members: they have
           already waited for them during the exchange.
        3. If the silent members are half of the round or more, not before the attempt has lasted 1.25 times
           the median (_HALF_SILENT_SHARE). The reporting members may be faulty: a member with broken
           connections reports at once that it reached no other member. The other members wait for its data,
           and are silent meanwhile.

        Rules 2 and 3 hold for the exchange only, not while a check compares the received data
        (check_number > 0).

        Args:
            round_state: The round.
            reported: Members that have reported for the current attempt or check.
            now: Current time, in seconds.

        Returns:
            Names of the lost members; empty: all have reported. None: wait, because a missing
            report may still arrive.
        """
        members = [self._state.members[name] for name in round_state.members]
        gone = {member.name for member in members if member.state == "gone"}
        silent = {member.name for member in members} - reported - gone
        timeout_s = patience_s(members)
        end_of_wait = round_state.last_report + timeout_s
        if not round_state.check_number:  # the members are still exchanging
            if _all_miss(round_state, silent):
                end_of_wait = round_state.last_report + _UNREACHED_SHARE * timeout_s
            if 2 * len(silent) >= len(members):
                end_of_attempt = round_state.attempt_begin + _HALF_SILENT_SHARE * timeout_s
                end_of_wait = max(end_of_wait, end_of_attempt)
        if silent and now < end_of_wait:
            return None
        return silent | gone

    def _repeat_without_lost(self, round_state: RoundState, lost: set[str], now: float) -> None:
        """Repeat the exchange without members that have left the round after it had begun.

        Args:
            round_state: The round.
            lost: Members that disconnected, or were silent for too long.
            now: Current time, in seconds.
        """
        for name in lost:
            self._state.events.append(f"round {round_state.number}: job {name} is lost on the way")
            # The others have waited for its data in vain. This counts as more delays than a late `ready`.
            # It also counts if the job has left the run, because the job may come back and do it again.
            # Jobs with several delays in a row must sit out rounds (lateness.py).
            mark_unfinished(self._state, self._state.members[name], round_state.number)
        # At least half of the electorate must count in the round; lost members cannot.
        round_state.electorate -= lost
        self._repeat_without(round_state, lost, now)

    def _repeat_without(self, round_state: RoundState, dropped: set[str], now: float) -> None:
        """Repeat the exchange without some members, or void the round if too few are left.

        The shares of the remaining members are scaled to add up to 1.

        Args:
            round_state: The round.
            dropped: Members that were lost, or that are dropped because of failed pairs.
            now: Current time, in seconds.
        """
        remaining = {
            name: share for name, share in round_state.members.items() if name not in dropped
        }
        counting = [name for name, share in remaining.items() if share > 0]
        if not counting or len(counting) < self._least_jobs(round_state):
            why = f"job {', '.join(sorted(dropped))} was lost on the way"
            self._rounds.void(round_state, why)
            return
        total = sum(remaining.values())
        members = {name: share / total for name, share in remaining.items()}
        self._begin_attempt(round_state, members, now)

    def _begin_attempt(
        self, round_state: RoundState, members: dict[str, float], now: float
    ) -> None:
        """Begin the next attempt of a round's exchange: its members send all data once more.

        The records of the last attempt are deleted: the members' reports, the number of the check that
        compares the received data, and the members that this check has excluded.

        Args:
            round_state: The round.
            members: Members of the new attempt: job -> share of its pseudo-gradient in the sum.
            now: Current time, in seconds.
        """
        round_state.members = members
        # Pairs of members that have no working connection send their data through a relay.
        round_state.relayed = self._state.failed_pairs.relayed(members, now)
        round_state.attempt += 1
        round_state.attempt_begin = now
        round_state.done_reports = {}
        round_state.last_report = now
        round_state.check_number = 0
        round_state.checked_reports = {}
        round_state.excluded = {}

    def _least_jobs(self, round_state: RoundState) -> int:
        """Return the least number of usable pseudo-gradients with which the round can be committed."""
        return least_jobs([self._state.members[name] for name in round_state.electorate])


def _contributors(round_state: RoundState) -> list[str]:
    """Return the members that contribute a pseudo-gradient; members with share 0 only receive."""
    return [name for name, share in round_state.members.items() if share > 0]


def _all_miss(round_state: RoundState, silent: set[str]) -> bool:
    """Return whether each member that has reported `done` has failed to reach every silent member."""
    reports = round_state.done_reports.values()
    return (
        bool(silent)
        and bool(reports)
        and all(silent <= set(report.unreached) for report in reports)
    )
