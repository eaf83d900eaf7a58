"""Coordinator of several jobs that train one model together over a WAN (DiLoCo, arXiv 2311.08105).

Each job takes inner steps by itself. Once in a while the jobs exchange pseudo-gradients (weight
differences) of a fragment (part of the model) in a round, and each takes the same outer step with their sum.
The coordinator moves no tensors; it decides who takes part in a round and whether the round counts.

    request of a job     purpose                                      decided by
    hello, enter         join the run                                 membership.py
    ready (or next)      ask for the next round, sync (or async)      lock_step.py (or rolling.py)
    done, checked        report the exchange, then the received data  settlement.py

Pure: no clock, no network. Methods return None while a decision depends on other jobs; the caller repeats
the request after another event. Times are seconds on the caller's clock.
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
    """State of a run of joined jobs, and the rules that change it.

    Args:
        now: Time at which the coordinator starts, in seconds.
        policies: Round policies that jobs can use, such as LockStepRounds. All jobs of a run use the
            same policy (setting `rounds`); the `op` of their requests selects it.
    """

    def __init__(self, now: float, policies: Sequence[type[RoundPolicy]]):
        self.state = RunState(started=now)
        rounds = Rounds(self.state)
        self._versions = versions = Versions(self.state)
        self._awaited_peers = awaited = AwaitedPeers(self.state)
        self._membership = Membership(self.state, rounds, versions, awaited)
        self._settlement = Settlement(self.state, rounds)
        self.policies: dict[str, RoundPolicy] = {  # by the `op` of the requests that it answers
            policy.question: policy(self.state, rounds, versions, awaited) for policy in policies
        }

    def hello(self, name: str, incarnation: str, hello: Hello, now: float) -> Reply | None:
        """Accept a job that joins or reconnects.

        Args:
            name: Name of the job.
            incarnation: Identifies this start of the job.
            hello: The job's description of itself.
            now: Current time, in seconds.

        Returns:
            The verdict "hello" with the last round and the job's state; None while it is unclear
            whether another job of this name still runs.

        Raises:
            HolmesError: The name is taken, the run is full, or the job's model or settings differ.
        """
        return self._membership.hello(name, incarnation, hello, now)

    def enter(self, name: str, now: float) -> Reply | None:
        """Let an accepted job begin to train as soon as enough jobs have joined.

        Returns:
            The verdict "in" (train with its own weights) or "behind" (first take the named
            fragments from the named job), with the number of the last round before it begins. None
            while it must wait for other jobs.

        Raises:
            HolmesError: Too few other jobs joined within the job's timeout.
        """
        return self._membership.enter(name, now)

    def next_round(self, question: str, name: str, report: Any, now: float) -> Reply | None:
        """Return the reply to a job that asks for its next round; None: undecided, ask again.

        The reply's "verdict" says, for example, that the exchange begins ("go"), or that the job
        must first take newer weights ("behind").

        Args:
            question: Type of the request: "ready" (synchronous rounds) or "next" (asynchronous rounds).
            name: The job.
            report: The parsed request: ReadyReport for "ready", NextReport for "next".
            now: Current time, in seconds.

        Raises:
            HolmesError: The report contradicts the state of the run.
        """
        member = self.state.member(name)
        # After a restart of the coordinator, decide nothing until the jobs have reconnected.
        if self._awaited_peers.majority_is_unknown(now):
            return None
        self._versions.accept_claims(member, report.claims)
        return self.policies[question].answer(name, report, now)

    def done(self, name: str, report: DoneReport, now: float) -> Reply | None:
        """Record that a member of a round has ended its exchange of pseudo-gradients.

        Args:
            name: The member, a job.
            report: The jobs with which its exchange failed, or whose data it cannot use.
            now: Current time, in seconds.

        Returns:
            The verdict for the member: "check" (report digests of the received data), "go"
            (exchange again with fewer members) or "void". None while it depends on members that
            have not reported yet.
        """
        return self._settlement.done(name, report, now)

    def checked(self, name: str, report: CheckedReport, now: float) -> Reply | None:
        """Record a member's digests of the data that it received; they must equal the other members'.

        Args:
            name: The member, a job.
            report: The digests.
            now: Current time, in seconds.

        Returns:
            The verdict for the member: "commit" (take the outer step), "check" (again, without some
            jobs), "go" (exchange again with fewer members) or "void". None while it depends on
            members that have not reported yet.
        """
        return self._settlement.checked(name, report, now)

    def maps_of(self, asking: str, name: str) -> Reply:
        """Return the shards and addresses of job `name`, for exchanges of job `asking` with it.

        The verdict is "maps", or "void" if there is no such job any more.
        """
        return self._membership.maps_of(asking, name)

    def heartbeat(
        self, name: str, incarnation: str, telemetry: dict[str, float], now: float
    ) -> None:
        """Record that a job is alive, with its telemetry."""
        self._membership.heartbeat(name, incarnation, telemetry, now)

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Record that a job has ended or lost its connection."""
        self._membership.gone(name, incarnation, why)

    def look(self, now: float) -> None:
        """Mark the jobs as gone that have been silent for longer than their timeout."""
        self._membership.look(now)
