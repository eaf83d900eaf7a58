"""Lets all ranks of a running job agree on a change of its plan, through the job's store.

The vote on a change is a ballot. On each rank, the re-planning thread takes part in it beside the
training thread (Vote.run_ballot):

    1  every rank   stores its measurements of some steps                               key figures
    2  rank 0       stores a proposal: a change and the first step with it              key proposal
    3  every rank   votes yes if it has not reached that step and has memory (agree)    key votes
    4  verdict      the rank with the last yes sets "take"; a rank that says no, or
                    rank 0 after a time limit, sets "keep". The first verdict stands
                    (compare_set).                                                      key verdict
    5  every rank   follows the verdict when its training reaches the step (StepBoundary.begin)

Each rank sends seven messages in a ballot. The store answers as soon as a key exists, so no rank
polls.

Invariant: no two ranks train a step with different plans. A rank that voted yes reads the verdict
when it reaches the step. If there is no verdict yet, it sets "keep" itself; the store lets the first
verdict stand for all ranks. A rank that did not vote yes keeps the old plan, and then "take" is
never set.

No rank waits for ever: the training thread never waits for another rank, and rank 0 waits for the
figures and votes of the others for at most PATIENCE_S.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from holmes_ext.runtime.start.store import append_entry, collect_entries, wait_for_value

# Verdicts, equal on all ranks.
ADOPT_CHANGE = "take"  # all ranks begin the step with the changed plan
KEEP_PLAN = "keep"  # no rank changes its plan
#: Longest wait of rank 0 for the figures and votes of the other ranks, in seconds.
PATIENCE_S = 10.0
#: Longest single wait in the store, in seconds. A thread that waits there cannot be ended.
_WAIT_S = 0.5
_SHORTEST_WAIT_S = 0.01
#: Number of ballots whose proposals and verdicts are kept in the store.
_KEPT_BALLOTS = 64


class Stopped(Exception):
    """Raised in the re-planning thread when the job ends."""


class VoteResult(NamedTuple):
    """Result of a ballot: the proposed change, and the verdict of all ranks."""

    proposal: dict[str, Any]
    verdict: str  # ADOPT_CHANGE or KEEP_PLAN; "" if no change was proposed


@dataclass
class _Pending:
    """Change that this rank adopts at step `at`, unless the vote of all ranks keeps the old plan."""

    number: int  # of the ballot
    at: int  # first step with the change
    change: Any
    verdict: str = ""  # "" if it is not known yet


class StepBoundary:
    """Counter of training steps, and the change that this rank has promised to adopt later.

    Two threads of a rank use it:

        re-planning thread    agree(): stores a change, and its first step
                              settle(): stores the verdict: whether all ranks adopt the change
        training thread       begin(): counts a step. At the first step of the change, it returns the
                              change if the verdict is to adopt it

    The training thread may reach that step before settle() was called. Then it asks for the verdict
    itself (`verdict_of`).
    """

    def __init__(self, verdict_of: Callable[[int], str]):
        """Start before the first training step, without a change of the plan to adopt.

        The ranks vote on each change of the plan. A vote is called a ballot, and its result a verdict.

        Args:
            verdict_of: Called with the number of a ballot when training reaches the first step with the
                change. Returns the verdict for all ranks, ADOPT_CHANGE or KEEP_PLAN, without waiting:
                a ballot that has no verdict yet is ended with KEEP_PLAN.
        """
        self.step = 0  # the step that runs; the first step is 1
        self._pending: _Pending | None = None  # change for which this rank has voted yes
        self._verdict_of = verdict_of
        self._lock = threading.Lock()

    def begin(self) -> Any:
        """Begin a training step; return the change of the plan that all ranks adopt with it, or None."""
        with self._lock:
            self.step += 1
            pending = self._pending
            if pending is None or self.step < pending.at:
                return None
            self._pending = None
        # Without the lock: if settle() has not stored the verdict, verdict_of() reads it in the store.
        verdict = pending.verdict or self._verdict_of(pending.number)
        return pending.change if verdict == ADOPT_CHANGE else None

    def agree(self, number: int, at: int, change: Any) -> bool:
        """Promise to adopt a change at step `at` if all ranks vote for it; return False if too late.

        It is too late if the training thread has already begun step `at` or a later step, because it
        trains that step with the old plan. Otherwise the change is kept here, and begin() returns it at
        step `at` if the vote has succeeded.

        Args:
            number: Number of the vote ("ballot") on this change.
            at: First step with the change.
            change: The change.
        """
        with self._lock:
            if self.step >= at:
                return False
            self._pending = _Pending(number, at, change)
            return True

    def settle(self, number: int, verdict: str) -> None:
        """Store the result of a vote on a change of the plan, for the step at which the change is due.

        It is not stored if training has already begun this step: begin() has then decided.

        Args:
            number: Number of the vote ("ballot"), as passed to agree().
            verdict: ADOPT_CHANGE or KEEP_PLAN.
        """
        with self._lock:
            if self._pending is not None and self._pending.number == number:
                self._pending.verdict = verdict


class Vote:
    """Votes of this rank with all other ranks on changes of the plan; each vote is called a ballot."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        stopped: threading.Event,
        patience_s: float = PATIENCE_S,
    ):
        """Store the connection to the job's store, over which the ranks vote.

        Args:
            store: Client of the job's store that only this thread uses.
            prefix: Prefix of the keys in the store, equal on all ranks.
            rank: Global rank of this process.
            world: Number of ranks.
            stopped: Set when the job ends.
            patience_s: Longest wait of rank 0 for the other ranks, in seconds.
        """
        self.store = store
        self.prefix = prefix
        self.rank = rank
        self.world = world
        self.stopped = stopped
        self.patience_s = patience_s

    def run_ballot(
        self,
        number: int,
        figures: Any,
        propose: Callable[[list[Any]], dict[str, Any]],
        agree: Callable[[int, dict[str, Any]], bool],
    ) -> VoteResult:
        """Run a ballot: rank 0 proposes a change, and all ranks adopt it or keep the plan.

        Args:
            number: Number of the ballot.
            figures: Measurements of this rank, a value that JSON can represent.
            propose: Returns the proposal, given the measurements of the ranks that answered. Its
                key "at" is the step of the change, or 0 for no change. Only rank 0 calls it.
            agree: Returns whether this rank can adopt the proposal of a ballot.

        Returns:
            The proposal, and the verdict; both are equal on all ranks.

        Raises:
            Stopped: The job ends.
        """
        figures_key = self._key(number, "figures")
        append_entry(
            self.store, figures_key, json.dumps(figures).encode(), count=1, total=self.world
        )
        if self.rank == 0:
            # Wait for the others' figures, but not for ever: after the wait, some may be missing.
            self._await(f"{figures_key}/all", until=time.monotonic() + self.patience_s)
            answers = collect_entries(self.store, figures_key, seconds=0.1)
            proposal = propose([json.loads(answer) for answer in answers])
            self.store.set(self._key(number, "proposal"), json.dumps(proposal))
            self._delete_old_keys(number)
        else:
            proposal = json.loads(self._await(self._key(number, "proposal")))
        if not proposal["at"]:  # no change
            return VoteResult(proposal, verdict="")
        says_yes = agree(number, proposal)
        return VoteResult(proposal, self._vote_and_wait(number, says_yes))

    def _vote_and_wait(self, number: int, says_yes: bool) -> str:
        """Vote in a ballot, and return its verdict for all ranks, ADOPT_CHANGE or KEEP_PLAN.

        If all ranks vote yes, the rank that votes last sets ADOPT_CHANGE. A rank that votes no sets
        KEEP_PLAN, and so does rank 0 if votes are missing after `patience_s` seconds. If the verdict
        is set already, set_verdict() returns it unchanged: the first verdict stands.

        Args:
            number: Number of the ballot.
            says_yes: Whether this rank can adopt the change.
        """
        if not says_yes:
            return self.set_verdict(self.store, number, KEEP_PLAN)
        yes_votes = self.store.add(self._key(number, "votes"), 1)
        if yes_votes == self.world:
            return self.set_verdict(self.store, number, ADOPT_CHANGE)
        until = inf  # other ranks need no limit: rank 0 sets a verdict after patience_s
        if self.rank == 0:
            until = time.monotonic() + self.patience_s
        verdict = self._await(self._key(number, "verdict"), until)
        if not verdict:  # rank 0 has waited long enough for votes
            return self.set_verdict(self.store, number, KEEP_PLAN)
        return verdict.decode()

    def set_verdict(self, store: Any, number: int, wanted: str) -> str:
        """Set the verdict of a ballot unless it is set already, and return the verdict that stands.

        Args:
            store: Client of the job's store that the calling thread may use.
            number: Number of the ballot.
            wanted: ADOPT_CHANGE or KEEP_PLAN.
        """
        verdict: bytes = store.compare_set(self._key(number, "verdict"), "", wanted)
        return verdict.decode()

    def _key(self, number: int, name: str) -> str:
        return f"{self.prefix}/{number}/{name}"

    def _await(self, key: str, until: float = inf) -> bytes:
        """Wait for a key of the store and return its value; b"" if the key does not exist in time.

        Args:
            key: The key.
            until: End of the wait, by time.monotonic().

        Raises:
            Stopped: The job ends.
        """
        while not self.stopped.is_set():
            seconds_left = until - time.monotonic()
            wait_s = min(_WAIT_S, max(seconds_left, _SHORTEST_WAIT_S))
            value = wait_for_value(self.store, key, wait_s)
            if value or seconds_left <= 0:
                return value
        raise Stopped

    def _delete_old_keys(self, number: int) -> None:
        """Delete keys of earlier ballots that no rank reads again; rank 0 calls this method.

        Args:
            number: Number of the present ballot.
        """
        if number == 0:
            return
        # No rank needs the figures (measurements) and votes of the previous ballot again. A late
        # rank may still read a proposal or verdict, so the last _KEPT_BALLOTS (64) are kept.
        figures_key = self._key(number - 1, "figures")
        keys = [
            f"{figures_key}/entries",
            f"{figures_key}/count",
            f"{figures_key}/all",
            self._key(number - 1, "votes"),
            self._key(number - _KEPT_BALLOTS, "proposal"),
            self._key(number - _KEPT_BALLOTS, "verdict"),
        ]
        for key in keys:
            self.store.delete_key(key)
