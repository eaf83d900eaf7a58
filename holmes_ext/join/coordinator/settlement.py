"""Second half of a round: from the jobs' exchange of pseudo-gradients to commit or void.

1. Each member of the round exchanges its pseudo-gradient with the other members, then reports `done`
   with the members that it could not reach.
2. If all members have reported `done` and reached each other, they all get the verdict `check`. Otherwise
   the remaining members get `go` again, for another attempt without the unreachable ones.
3. Each member reports `checked`, with salted digests of the data it received from each other member.
4. If the digests agree, all members get `commit` and take the outer step. Members in conflict with the
   majority are excluded, and the others are checked again.

Invariant: a round is committed only if all its members received identical data. A round that cannot be
completed is void and changes nothing: the jobs keep their pseudo-gradients for the fragment's next
round. No member waits for ever: members that are silent for the jobs' median timeout are given up.

Pure: no clock, no network.
"""

from __future__ import annotations

from collections import Counter

from holmes_ext.join.coordinator.consensus import (
    accusations_from_digests,
    medians_by_key,
    voted_out,
)
from holmes_ext.join.coordinator.lateness import mark_late
from holmes_ext.join.coordinator.replies import (
    Reply,
    check_reply,
    commit_reply,
    go_reply,
    void_reply,
)
from holmes_ext.join.coordinator.reports import CheckedReport, DoneReport
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.state import RoundState, RunState, patience_s

#: Least number of other members with which "most others cannot reach it" points at one member. With
#: a single other one, a failed exchange may be the fault of either.
_LEAST_OTHERS = 2


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
        """Return the reply about a round that this coordinator does not remember."""
        return {
            "verdict": "void",
            "round": self._state.number,
            "why": "the coordinator was restarted",
        }

    def _reply_if_outdated(self, round_state: RoundState, name: str, attempt: int) -> Reply | None:
        """Return the reply to a report that came too late; None if the report is still current.

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

        It is "check" if the received data is to be compared, "go" if the exchange is repeated, and
        "commit" or "void" if the round has ended.

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
        """Check or repeat the exchange, once all jobs of the round have reported that it has ended.

        The exchange is repeated without jobs that were lost, or that others could not reach. If
        there are no such jobs, the comparison of the received data begins. Nothing happens while a
        missing report may still arrive.
        """
        lost = self._lost_members(round_state, set(round_state.done_reports), now)
        if lost is None:
            return
        unreached = {
            name: report.unreached
            for name, report in round_state.done_reports.items()
            if report.unreached
        }
        if lost:
            self._retry_without(round_state, lost, now)
        elif unreached:
            self._retry_without_least_reachable(round_state, unreached, now)
        else:
            # Member -> (accused member -> reason): data that the member cannot use.
            faults = {name: report.faults for name, report in round_state.done_reports.items()}
            round_state.excluded = voted_out(faults)
            self._begin_check(round_state, now)

    def _retry_without_least_reachable(
        self, round_state: RoundState, unreached: dict[str, tuple[str, ...]], now: float
    ) -> None:
        """Begin the next attempt without the member that most other members could not reach.

        If no member was unreachable for at least half of the others, no single member is at fault:
        the network between them is. Removing one after the other would end with few jobs, so the
        round is void, and the jobs keep their pseudo-gradients for the next round.

        Args:
            round_state: The round.
            unreached: Member -> jobs with which its exchange failed.
            now: Current time, in seconds.
        """
        failures = Counter(
            name for names in unreached.values() for name in names if name in round_state.members
        )
        # Of several equally unreachable members, one that itself reports failures.
        worst = max(round_state.members, key=lambda name: (failures[name], name in unreached))
        others = len(round_state.members) - 1
        if others < _LEAST_OTHERS or 2 * failures[worst] < others:
            names = ", ".join(sorted({*failures, *unreached}))
            self._rounds.void(round_state, f"its jobs are here, but could not exchange: {names}")
            return
        self._retry_without(round_state, {worst}, now)

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
            self._retry_without(round_state, lost, now)
            return
        counting = [name for name in _contributors(round_state) if name not in round_state.excluded]
        digests: dict[str, dict[str, str]] = {}  # receiver -> sender -> digest of the received data
        for name, report in round_state.checked_reports.items():
            if name in round_state.excluded:  # its word must not force yet another check
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
        """Tell all members to compare the data they have received, or end the round as void.

        Members poll; they get the reply "check" after this call has increased
        `round_state.check_number`. The round is void instead if too few pseudo-gradients count. A
        pseudo-gradient counts if its job has a share above 0 and is not excluded.

        Args:
            round_state: The round.
            now: Current time, in seconds.
        """
        round_state.check_number += 1
        round_state.checked_reports = {}
        round_state.last_report = now
        members = [self._state.members[name] for name in round_state.members]
        counting = [name for name in _contributors(round_state) if name not in round_state.excluded]
        for name, why in round_state.excluded.items():
            self._state.events.append(f"round {round_state.number}: job {name} is left out: {why}")
        if len(counting) < self._state.least_jobs(members) or not counting:
            reasons = "; ".join(
                f"{name} is left out: {why}" for name, why in round_state.excluded.items()
            )
            round_state.left_out |= round_state.excluded
            self._rounds.void(round_state, reasons or "no job counts")

    def _lost_members(
        self, round_state: RoundState, reported: set[str], now: float
    ) -> set[str] | None:
        """Return the members that are disconnected or have been silent for too long.

        Members without a report are silent for too long if no member at all has reported for
        the median of their timeouts.

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
        if silent and now - round_state.last_report < patience_s(members):
            return None
        return silent | gone

    def _retry_without(self, round_state: RoundState, lost: set[str], now: float) -> None:
        """Repeat the exchange without the lost members, or void the round if too few are left.

        Too few: the rest has fewer pseudo-gradients than the setting `min` or half of all jobs in
        training. The shares of the remaining members are scaled to add up to 1.

        Args:
            round_state: The round.
            lost: Members that disconnected, were silent for too long, or could not be reached.
            now: Current time, in seconds.
        """
        for name in lost:
            self._state.events.append(f"round {round_state.number}: job {name} is lost on the way")
            if self._state.members[name].state == "in":
                mark_late(self._state, self._state.members[name], round_state.number)
        remaining = {name: share for name, share in round_state.members.items() if name not in lost}
        counting = [name for name, share in remaining.items() if share > 0]
        members = [self._state.members[name] for name in remaining]
        if not counting or len(counting) < self._state.least_jobs(members):
            self._rounds.void(round_state, f"job {', '.join(sorted(lost))} was lost on the way")
            return
        # The shares of the remaining members add up to 1 again; the reports of the attempt are void.
        total = sum(remaining.values())
        round_state.members = {name: share / total for name, share in remaining.items()}
        round_state.attempt += 1
        round_state.done_reports = {}
        round_state.last_report = now
        round_state.check_number = 0
        round_state.checked_reports = {}
        round_state.excluded = {}


def _contributors(round_state: RoundState) -> list[str]:
    """Return the members whose pseudo-gradients count; members with share 0 only receive."""
    return [name for name, share in round_state.members.items() if share > 0]
