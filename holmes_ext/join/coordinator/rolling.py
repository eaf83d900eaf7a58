"""First half of a round without a barrier (setting rounds=async): jobs contribute when they are ready.

After Decoupled DiLoCo (arXiv 2604.21428):

1. Each job sends `next` again and again, with an offer for each fragment for which it has a pseudo-gradient.
   (A fragment is a part of the model's parameters that is exchanged in its own rounds.)
2. When a quorum (half of the jobs, or the median of their settings `min` if that is more) offers the same
   fragment, a grace period begins in which other jobs may offer it, too.
3. After it, or as soon as all jobs offer the fragment, the round begins. It waits a little for members of the
   last round that have not asked again, and for a job that was behind twice in a row and takes weights.
   Every active job gets the verdict
       go       contribute (share > 0) or only receive the sum (share 0); settlement.py decides what follows
   At any time a job may get
       behind   this job's weights are outdated: take these fragments from that job
       void     the round, or the job's offer, does not count
       idle     no round for this job at the moment. The methods return None for it; server.py repeats the
                call for IDLE_S (a fraction of a second) before it sends "idle"

Rounds follow each other: the next round exchanges the fragment that was offered first. A job that was not
ready contributes to a later round of the fragment. No job's training waits for another job.
Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.lateness import sits_out
from holmes_ext.join.coordinator.replies import Reply, go_reply, void_reply
from holmes_ext.join.coordinator.reports import NextReport, ReadyReport, next_from
from holmes_ext.join.coordinator.rounds import Rounds, two_are_apart
from holmes_ext.join.coordinator.shares import weights_in_sum
from holmes_ext.join.coordinator.state import (
    Member,
    RunState,
    least_jobs,
    outer_settings,
    patience_s,
)
from holmes_ext.join.coordinator.versions import Versions

#: Seconds since its last request in which a job counts as active.
_ACTIVE_S = 5.0
#: Share of the timeout for which a round waits for a job that takes weights, and how often it does until the
#: job takes part again.
_TAKER_SHARE = 0.25
_MOST_WAITS = 4
#: Grace period as a share of the time until the first contributor would apply the sum.
_GRACE = 0.5
#: Seconds for which a round waits until the members of the last round have asked for it.
_RETURN_S = 2.0


class RollingRounds:
    """Asynchronous rounds (rounds=async) on the coordinator: decides when the next round begins.

    A job offers pseudo-gradients and trains on without waiting. When enough jobs offer the same
    fragment, a round begins: these jobs exchange it, and all active jobs receive the aggregate.
    """

    question: ClassVar[str] = "next"

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        """Store the parts of the coordinator; no job has sent a request yet.

        Args:
            state: State of the run, with its jobs and rounds.
            rounds: Opens and ends rounds.
            versions: Finds jobs whose weights are outdated.
            awaited: Not used here, because no round waits for jobs that have yet to join. Both round
                policies take the same arguments; LockStepRounds uses it.
        """
        self._state = state
        self._rounds = rounds
        self._versions = versions
        self._request_times: dict[str, float] = {}  # job -> time of its last request
        # Job -> its last request. Its offers are the pseudo-gradients that the job could send now; they
        # are removed once the request is answered (_forget_offers).
        self._reports: dict[str, NextReport] = {}
        # Fragment -> time of its first offer; forgotten when a round of the fragment begins, or when no job
        # offers it any more.
        self._first_offer_times: dict[int, float] = {}
        # Fragment -> time at which enough jobs (a quorum) offered it. Then its grace period begins: the
        # round waits for offers of further jobs.
        self._quorum_times: dict[int, float] = {}
        # Members of the newest round that have not sent a request since it ended.
        self._not_asked_again: set[str] = set()

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> NextReport:
        """Parse the report "next" (a job asks for any round, with its offers) in a request.

        Args:
            document: The request, as parsed JSON.
            fragments: Number of fragments (parts of the model) in the run.

        Raises:
            HolmesError: The report is malformed.
        """
        return next_from(document, fragments)

    def answer(self, name: str, report: NextReport, now: float) -> Reply | None:
        """Return the reply to a job that asks for its next round; None: nothing for it to do yet.

        Each job polls with this request. The first of these replies that applies is returned:

        1. "go" if the job is a member of the current round, or "void" if that round has failed
        2. "behind" if the job must first take newer weights from another job
        3. "void" if the job offers a pseudo-gradient that cannot be used
        4. "go" for a new round; it begins if enough jobs now offer the same fragment

        Args:
            name: Name of the job.
            report: Its request: the versions of its fragments, and the pseudo-gradients that it
                offers.
            now: Current time, in seconds.

        Raises:
            HolmesError: The report contradicts the state of the run.
        """
        reply = self._reply_to(name, report, now)
        if reply is not None:
            self._forget_offers(name)
        return reply

    def _reply_to(self, name: str, report: NextReport, now: float) -> Reply | None:
        """Store a job's request, and return the first reply of answer()'s list that applies.

        A job that sits out rounds gets None, and its request is not stored. All others get None while a round
        without them is under way, or while no round can begin.
        """
        state = self._state
        member = state.member(name)
        # A job that was late repeatedly takes no part in the next rounds (lateness.py).
        if sits_out(state, member, state.number + 1):
            return None
        member.state = "in"  # it takes part in the run
        member.taking_since = None
        self._request_times[name] = now
        self._reports[name] = report
        last_round = state.rounds.get(state.number)
        is_under_way = last_round is not None and not last_round.outcome
        if not is_under_way:
            self._not_asked_again.discard(name)
        if reply := self._reply_of_newest_round(
            name
        ):  # "go" for a member, "void" for its failed round
            return reply
        if is_under_way:  # it is a round of other jobs
            return None
        if behind_reply := self._versions.order_to_take(member, now):
            member.was_told_to_take_weights = True
            return behind_reply
        if why := _unusable_offer(report):
            return {"verdict": "void", "round": state.number, "why": why, "left_out": {name: why}}
        self._begin_round_with_quorum(now)
        return self._reply_of_newest_round(name)  # of the round that has just begun, if any

    def _reply_of_newest_round(self, name: str) -> Reply | None:
        """Return the reply to a job about the newest round; None if there is nothing to reply.

        Returns:
            "go" if the job is a member of the round and the round is not over. "void", only once,
            if the round ended without an outer step. None in all other cases.
        """
        round_state = self._state.rounds.get(self._state.number)
        if round_state is None or name not in round_state.members:
            return None
        if round_state.outcome == "commit":
            return None  # its members get "commit" as the reply to their last report, `checked`
        if not round_state.outcome:
            return go_reply(self._state, round_state)
        if name in round_state.informed:  # it already got "void"
            return None
        round_state.informed.add(name)
        return void_reply(round_state)

    def _begin_round_with_quorum(self, now: float) -> None:
        """Begin a round if enough jobs (a quorum) offer pseudo-gradients of the same part of the model.

        The round begins when all jobs offer the fragment, or when a grace period for the other jobs is over.
        Of several such fragments, the fragment that was offered first is exchanged.

        The jobs of a round, each set a part of the one above:

            active         take part in the run, and have sent a request in the last seconds
            candidates     have the valid weights: they can take the outer step
            members        can also exchange data with each other: they will take the outer step
            contributors   offer a pseudo-gradient of the fragment

        Contributors are compared with two numbers: the quorum, and the jobs that are expected to offer the
        fragment. Both also count jobs that were heard of recently, but have not asked for a round again.
        """
        active = [member for member in self._state.members.values() if self._is_active(member, now)]
        candidates = [member for member in active if member.is_up_to_date]
        candidates.sort(key=lambda member: member.order)
        # The fewest jobs without which all others can exchange data with each other (failed_pairs.py).
        left_out = self._state.jobs_to_leave_out(candidates, now)
        # There is no round if the only two jobs cannot exchange data: neither may go on alone.
        if not candidates or two_are_apart(candidates, left_out):
            return
        members = [member for member in candidates if member.name not in left_out]
        # These jobs may have outdated weights, or not have asked again since their last round. The quorum
        # is half of them, so that a few active jobs cannot begin a round alone.
        heard_recently = self._heard_recently(now)
        quorum = least_jobs(heard_recently)
        # Jobs that may still offer the fragment; the round need not wait when all of them have.
        expected = [
            member
            for member in heard_recently
            if member.is_up_to_date and member.name not in left_out
        ]
        self._record_offer_times(members, now)
        by_first_offer = sorted(self._first_offer_times, key=self._first_offer_times.__getitem__)
        for fragment in by_first_offer:
            contributors = [
                member for member in members if fragment in self._reports[member.name].offers
            ]
            if len(contributors) < quorum:
                continue
            quorum_time = self._quorum_times.setdefault(fragment, now)
            all_contribute = len(contributors) >= len(expected)
            if self._waits_for_last_members(now):
                return
            if self._waits_for_taker(now):
                return
            if all_contribute or now >= quorum_time + self._grace_s(fragment, contributors):
                self._rounds.note_left_out(self._state.number + 1, candidates, left_out)
                self._begin(fragment, contributors, members, candidates, now)
                return

    def _forget_offers(self, name: str) -> None:
        """Forget the pseudo-gradients that a job offered in a request, when the request gets a reply.

        After the reply, the job may drop pseudo-gradients that count in the round or are unusable. Its
        next request offers those that it still has.
        """
        if report := self._reports.get(name):
            self._reports[name] = replace(report, offers={})

    def _record_offer_times(self, members: Sequence[Member], now: float) -> None:
        """Record when a part of the model is first offered; forget parts that no job offers any more."""
        offered = {fragment for member in members for fragment in self._reports[member.name].offers}
        self._first_offer_times = {
            fragment: self._first_offer_times.get(fragment, now) for fragment in offered
        }
        self._quorum_times = {
            fragment: quorum_time
            for fragment, quorum_time in self._quorum_times.items()
            if fragment in offered
        }

    def _is_active(self, member: Member, now: float) -> bool:
        """Return whether a job takes part in the run and has sent a request in the last seconds."""
        request_time = self._request_times.get(member.name)
        if member.state != "in" or request_time is None:
            return False
        return now - request_time < _ACTIVE_S

    def _heard_recently(self, now: float) -> list[Member]:
        """Return the jobs from which the quorum of the next round is computed (half of them, or more).

        These are the jobs with a recent request, those that joined recently, and the members of the last
        round if it ended recently: members send no requests during a round. Without them, the first job
        that sends a request after the round would be a quorum by itself.
        """
        last_round = self._state.rounds.get(self._state.number)
        jobs = []
        for member in self._state.members.values():
            heard = max(member.since, self._request_times.get(member.name, member.since))
            if last_round is not None and member.name in last_round.members:
                heard = max(heard, last_round.last_report)
            if member.state == "in" and now - heard < _ACTIVE_S:
                jobs.append(member)
        return jobs

    def _waits_for_last_members(self, now: float) -> bool:
        """Return whether the next round waits for members of the last round, which have not asked for it yet.

        All members of a round get its verdict at almost the same time. If the first ones to ask again began
        the next round, it would make the weights of the others outdated. (A quorum may be there already: for
        a fragment that was offered before the last round began.)
        """
        last_round = self._state.rounds.get(self._state.number)
        if last_round is None or now >= last_round.last_report + _RETURN_S:
            return False
        missing = self._not_asked_again & last_round.members.keys()
        return any(
            member.name in missing and member.state == "in"
            for member in self._state.members.values()
        )

    def _waits_for_taker(self, now: float) -> bool:
        """Return whether the next round waits for a job that takes weights.

        To take a fragment may last longer than the time between two rounds. Then the job would be behind
        again each time, and never take part. So from the second time on, the next round waits for it: not
        for long, and not again and again. In simulated half hours of 141 to 180 rounds, such a job takes part
        in 127 to 176 of them instead of none, and the other jobs lose at most 5 (test_slow_taker.py).
        """
        members = [member for member in self._state.members.values() if member.state == "in"]
        longest_wait_s = _TAKER_SHARE * patience_s(members)
        return any(
            1 < member.orders_in_a_row <= 1 + _MOST_WAITS
            and member.taking_since is not None
            and now < member.taking_since + longest_wait_s
            for member in members
        )

    def _grace_s(self, fragment: int, contributors: Sequence[Member]) -> float:
        """Return how long a round waits for offers of further jobs after it has a quorum, in seconds.

        It is the setting `grace`. With grace=auto, it is half of the time that is left until the
        first contributor needs the aggregate.

        Args:
            fragment: Fragment (part of the model) of the round.
            contributors: Jobs that offer a pseudo-gradient of the fragment.
        """
        setting = outer_settings(contributors).get("grace", "auto")
        if isinstance(setting, (int, float)):
            return float(setting)
        offers = [self._reports[member.name].offers[fragment] for member in contributors]
        # slack_s: seconds until the job would apply the sum.
        return _GRACE * min(offer.slack_s for offer in offers)

    def _begin(
        self,
        fragment: int,
        contributors: Sequence[Member],
        members: Sequence[Member],
        candidates: Sequence[Member],
        now: float,
    ) -> None:
        """Begin a round of a fragment, or void it at once if too few pseudo-gradients are usable.

        Each contributor's offer (norm and tokens of its pseudo-gradient) is recorded as a `ready`
        report, so that the further course of the round is the same code as for synchronous rounds.

        Args:
            fragment: Fragment (part of the model) that the round exchanges.
            contributors: Jobs that send their pseudo-gradients.
            members: All active jobs whose model weights are up to date, contributors or not. They
                receive the sum of the pseudo-gradients.
            candidates: The members, and the jobs that are left out because they and another job cannot
                exchange data (a failed pair). At least half of the candidates must contribute usable
                pseudo-gradients.
            now: Current time, in seconds.
        """
        round_state = self._rounds.open(self._state.number + 1, fragment, now)
        for member in contributors:
            report = self._reports[member.name]
            offer = report.offers[fragment]
            round_state.ready_reports[member.name] = ReadyReport(
                fragment=fragment,
                claims=report.claims,  # versions of the job's fragments
                round=round_state.number,
                tokens=offer.tokens,
                norm=offer.norm,
                why=offer.why,  # reason if the pseudo-gradient cannot be used
            )
        ranks = {member.name: len(member.hello.addresses) for member in contributors}
        # Norms of the fragment's recent pseudo-gradients: a job with a much larger norm does not count.
        usual_norms = self._rounds.usual_norms(fragment)
        # Job -> factor of its pseudo-gradient in the sum (not normalized). Jobs with an unusable
        # pseudo-gradient are missing.
        factors = weights_in_sum(round_state, ranks, outer_settings(contributors), usual_norms)
        has_begun = self._rounds.begin_exchange(round_state, members, factors, candidates, now)
        # If too few of the pseudo-gradients count, the round is void and the offers stay, for a
        # later round. Otherwise the fragment's next round begins with new offers. So the times of the
        # first offer and of the quorum, which decide when a round begins, are forgotten.
        if has_begun:
            self._first_offer_times.pop(fragment, None)
            self._quorum_times.pop(fragment, None)
            self._not_asked_again = {member.name for member in members}
            for member in members:
                self._forget_offers(member.name)


def _unusable_offer(report: NextReport) -> str:
    """Return the reason why an offered pseudo-gradient is unusable; "" if all in the report are usable."""
    for offer in report.offers.values():
        if offer.norm is None:
            return offer.why or "its pseudo-gradient is not finite"
    return ""
