"""Coordinator of jobs that train one model together. Pure: no clock, no network.

    hello, enter     a job joins the run                 membership.py
    ready or next    a job asks for its next round       lock_step.py or rolling.py
    done, checked    a job reports of an exchange        settlement.py

A method returns None while nothing is decided yet: the job asks again when something has happened
or time has passed. Times are those of the caller's clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.membership import Membership
from holmes_ext.join.coordinator.replies import Reply
from holmes_ext.join.coordinator.reports import CheckedReport, DoneReport, Hello
from holmes_ext.join.coordinator.round_policy import RoundPolicy
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.settlement import Settlement
from holmes_ext.join.coordinator.state import RunState
from holmes_ext.join.coordinator.versions import Versions


class Coordinator:
    """One run of joined jobs, and everything that is decided about it.

    Args:
        now: When the coordinator begins.
        policies: Round policies that jobs can use. Which of them a run uses is a setting of its
            jobs (`rounds`), the same in all of them; the question that a job asks shows it.
    """

    def __init__(self, now: float, policies: Sequence[type[RoundPolicy]]):
        self.state = RunState(started=now)
        rounds = Rounds(self.state)
        self._versions = versions = Versions(self.state)
        self._awaited = awaited = AwaitedPeers(self.state)
        self._membership = Membership(self.state, rounds, versions, awaited)
        self._settlement = Settlement(self.state, rounds)
        self.policies: dict[str, RoundPolicy] = {  # by the question that a policy answers
            policy.question: policy(self.state, rounds, versions, awaited) for policy in policies
        }

    def hello(self, name: str, incarnation: str, hello: Hello, now: float) -> Reply | None:
        """Accept a job, or raise HolmesError if it cannot be in this run."""
        return self._membership.hello(name, incarnation, hello, now)

    def enter(self, name: str, now: float) -> Reply | None:
        """Let a job begin to train, or raise HolmesError if too few others came."""
        return self._membership.enter(name, now)

    def next_round(self, question: str, name: str, report: Any, now: float) -> Reply | None:
        """Return what a job does that asks for its next round.

        Args:
            question: Chooses the round policy, one of `policies`.
            report: As the policy's read() returns it.

        Raises:
            HolmesError: The report cannot be true.
        """
        member = self.state.member(name)
        if self._awaited.hide_truth(now):
            return None
        self._versions.accept_claims(member, report.claims)
        return self.policies[question].answer(name, report, now)

    def done(self, name: str, report: DoneReport, now: float) -> Reply | None:
        """Return what a member of a round does after its exchange."""
        return self._settlement.done(name, report, now)

    def checked(self, name: str, report: CheckedReport, now: float) -> Reply | None:
        """Return what a member of a round does after the check of what it received."""
        return self._settlement.checked(name, report, now)

    def maps_of(self, asking: str, name: str) -> Reply:
        """Return what job `asking` needs to exchange with job `name`."""
        return self._membership.maps_of(asking, name)

    def heartbeat(
        self, name: str, incarnation: str, telemetry: dict[str, float], now: float
    ) -> None:
        """Note that a job lives."""
        self._membership.heartbeat(name, incarnation, telemetry, now)

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Note that a job has ended, or seems to."""
        self._membership.gone(name, incarnation, why)

    def look(self, now: float) -> None:
        """Give up the jobs that have been silent for too long."""
        self._membership.look(now)
