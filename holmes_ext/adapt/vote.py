"""All ranks of a job agree on a change of its plan, over the job's store, while they train.

    every rank  figures of a window of steps                       FIGURES   put together
    rank 0      {"change": ..., "at": step} or no change           PROPOSAL
    every rank  yes, if it has not come to that step and has room  VOTES     a counter
    who is last "take"; who says no, and rank 0 after a while:     VERDICT   compare_set: the first one counts
                "keep"
    every rank  at that step: goes by the verdict

Seven messages of each rank in a round: the store answers when there is something, nobody looks repeatedly.

A thread of each rank does all of it. Why two plans are never at work at once: a rank that has said yes looks
for the verdict when it comes to the step, and where there is none yet sets "keep" itself: the store lets the
first one stand, for all. A rank that has not said yes keeps the old plan, and then "take" is never set. Why
nobody waits for ever: the training thread never waits for an answer of a rank, and rank 0 waits for the
others PATIENCE_S at most.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from holmes_ext.runtime.start.store import append_entry, collect_entries, wait_for_value

TAKE, KEEP = "take", "keep"
#: Seconds that rank 0 waits for the others' figures and votes.
PATIENCE_S = 10.0
#: Seconds that a thread waits in the store at once: it could not be ended there.
_WAIT_S = 0.5
#: Rounds whose proposals and verdicts stay in the store.
_KEPT_ROUNDS = 64


class Stopped(Exception):
    """The job ends."""


@dataclass
class _Pending:
    number: int
    at: int
    change: Any
    verdict: str = ""


class Boundary:
    """What the training thread and the vote's thread of one rank share. verdict_of(number): sets and returns
    the verdict of a round, called by the training thread where it is not known yet."""

    def __init__(self, verdict_of: Callable[[int], str]):
        self.step = 0
        self._pending: _Pending | None = None
        self._verdict_of, self._lock = verdict_of, threading.Lock()

    def begin(self) -> Any:
        """A step begins; the change that it begins with, or None."""
        with self._lock:
            self.step += 1
            pending = self._pending
            if pending is None or self.step < pending.at:
                return None
            self._pending = None
        verdict = pending.verdict or self._verdict_of(pending.number)
        return pending.change if verdict == TAKE else None

    def agree(self, number: int, at: int, change: Any) -> bool:
        """Whether this rank can still go on with the change from step `at` on; then it is bound to the
        verdict."""
        with self._lock:
            if self.step >= at:
                return False
            self._pending = _Pending(number, at, change)
            return True

    def settle(self, number: int, verdict: str) -> None:
        with self._lock:
            if self._pending is not None and self._pending.number == number:
                self._pending.verdict = verdict


class Vote:
    """One rank's part, of rank `rank` of `world`. store: a client of its own, for a thread; stopped: the job
    ends."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        world: int,
        stopped: threading.Event,
        patience_s: float = PATIENCE_S,
    ):
        self.store, self.prefix, self.rank, self.world = store, prefix, rank, world
        self.stopped, self.patience_s = stopped, patience_s

    def round(
        self,
        number: int,
        figures: Any,
        propose: Callable[[list[Any]], dict[str, Any]],
        agree: Callable[[int, dict[str, Any]], bool],
    ) -> tuple[dict[str, Any], str]:
        """(proposal, verdict) of one round; "" where nothing was proposed. propose(figures of the ranks that
        answered): rank 0's, {"at": step or 0, ...}; agree: whether this rank can. Stopped when the job
        ends."""
        append_entry(
            self.store, self._key(number, "figures"), json.dumps(figures).encode(), 1, self.world
        )
        if self.rank == 0:
            key = self._key(number, "figures")
            self._await(f"{key}/all", time.monotonic() + self.patience_s)
            proposal = propose(
                [json.loads(answer) for answer in collect_entries(self.store, key, 0.1)]
            )
            self.store.set(self._key(number, "proposal"), json.dumps(proposal))
            self._tidy(number)
        else:
            proposal = json.loads(self._await(self._key(number, "proposal")))
        return proposal, self._verdict(number, agree(number, proposal)) if proposal["at"] else ""

    def _verdict(self, number: int, yes: bool) -> str:
        """After this rank's vote."""
        if not yes:
            return self.set_verdict(self.store, number, KEEP)
        if self.store.add(self._key(number, "votes"), 1) == self.world:
            return self.set_verdict(self.store, number, TAKE)
        until = time.monotonic() + (inf if self.rank else self.patience_s)
        verdict = self._await(self._key(number, "verdict"), until)
        return verdict.decode() or self.set_verdict(self.store, number, KEEP)

    def set_verdict(self, store: Any, number: int, wanted: str) -> str:
        """The verdict of the round: `wanted`, or what somebody has set before."""
        return store.compare_set(self._key(number, "verdict"), "", wanted).decode()

    def _key(self, number: int, what: str) -> str:
        return f"{self.prefix}/{number}/{what}"

    def _await(self, key: str, until: float = inf) -> bytes:
        """What stands under `key` as soon as it does; empty where nothing does at `until`."""
        while not self.stopped.is_set():
            left = until - time.monotonic()
            if (
                value := wait_for_value(self.store, key, min(_WAIT_S, max(left, 0.01)))
            ) or left <= 0:
                return value
        raise Stopped

    def _tidy(self, number: int) -> None:
        """Rank 0's: what nobody reads again leaves the store."""
        keys = [
            f"{self._key(number - 1, 'figures')}/{part}" for part in ("entries", "count", "all")
        ]
        keys.append(self._key(number - 1, "votes"))
        keys += [self._key(number - _KEPT_ROUNDS, what) for what in ("proposal", "verdict")]
        for key in keys if number else ():
            self.store.delete_key(key)
