"""The rounds of one rank with rounds=async, in a thread beside training: it asks for rounds all the time,
contributes to those for which training has submitted something, and gets the sums of all.

    all ranks   what was submitted since, as rank 0 has it
    rank 0      "next" -> go, behind or idle -> all ranks
    all ranks   as in round_runner.py; a round to which this job does not contribute, it only receives

What is committed waits as pending in the fragment until training applies it (rolling_loop.py).
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from holmes_ext.join.rounds.coordinator_link import Verdict
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.round_runner import RoundRunner, square_of

#: Rounds of one fragment that may wait for training; then no more are received until it has applied some.
MOST_PENDING = 3
#: Seconds until the next question while training is behind, or the coordinator away.
_REST_S = 0.2


class RollingRunner(RoundRunner):
    """ended: rounds that have ended on this rank, in the order that all ranks of the job have."""

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.ended = 0
        self._offers: dict[int, InFlight] = {}
        self._results: list[tuple[InFlight | None, RoundResult]] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def results_until(self, count: int) -> list[tuple[InFlight | None, RoundResult]]:
        """What training has not had yet of the first `count` rounds that ended: what this job contributed
        (None: it did not), and how the round ended. Waits until they have ended on this rank, as on the job's
        others."""
        with self._changed:
            while self.ended < count and self._error is None and self.running:
                self._changed.wait(1.0)
            if self._error is not None:
                raise self._error
            had = self.ended - len(self._results)
            results, self._results = self._results[: count - had], self._results[count - had :]
            return results

    # The thread

    def _run(self) -> None:
        try:
            while self._gather():
                self._ask_once()
        except BaseException as error:  # noqa: BLE001 - raised where the training thread waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _gather(self) -> bool:
        """What training has submitted on rank 0 until now, on all ranks; False at the end."""
        new: list[InFlight] = []
        ends = False
        if self.job_ranks.rank == 0:
            while not ends:
                try:
                    submitted = self._inbox.get_nowait()
                except queue.Empty:
                    break
                ends = submitted is None
                new += [submitted] if submitted is not None else []
        count, ends = self.job_ranks.from_first([len(new), ends])
        while len(new) < count:
            submitted = self._inbox.get()
            if submitted is None:
                return False
            new.append(submitted)
        for submitted in new:
            self._offers[submitted.fragment] = submitted
        return not ends

    def _ask_once(self) -> None:
        waiting = max(len(fragment.pending) for fragment in self.state.fragments)
        if self.job_ranks.from_first(waiting >= MOST_PENDING):
            time.sleep(_REST_S)
            return
        offers = [self._offer(in_flight) for _, in_flight in sorted(self._offers.items())]
        claims = self.claims.renew(self._versions())
        verdict = self.coordinator.ask("next", {**claims, "offers": offers})
        what = verdict["verdict"]
        if what == "go":
            self._join_round(verdict)
        elif what == "behind":
            result = self.take(verdict)
            for fragment in result.fragments:
                self._offers.pop(fragment, None)
            self._end(None, result)
        elif what != "idle":
            self._is_void(verdict)

    def _offer(self, in_flight: InFlight) -> dict[str, Any]:
        square, tokens = self.job_ranks.sums([self._square_to_send(in_flight), in_flight.tokens])
        offer = {"fragment": in_flight.fragment, "tokens": tokens, "slack_s": in_flight.slack_s}
        return {**offer, "norm": square**0.5} if 0 <= square < float("inf") else offer

    def _join_round(self, verdict: Verdict) -> None:
        """To its end; begun at "go"."""
        number, index = int(verdict["round"]), int(verdict["fragment"])
        begin, sent = time.monotonic(), self.links.sent
        contributes = verdict["members"].get(self.job, 0) > 0 and index in self._offers
        mine = self._offers.get(index) if contributes else None
        anchor = self.state.fragments[index].anchor
        in_flight = mine or InFlight(number, index, anchor, 0, 0.0, 0)
        in_flight.number = number
        result = self._follow(in_flight, verdict, 0.0)
        result.fragments = [index]
        result.bytes, result.seconds = self.links.sent - sent, time.monotonic() - begin
        if mine is not None:
            result.norm = sum(self.job_ranks.sums([square_of(mine.gradient)])) ** 0.5
        ended = result.verdict == "commit" and result.members.get(self.job, 0) > 0
        if mine is not None and (ended or self.job in result.left_out):
            del self._offers[index]
        self._end(mine, result)

    def _is_void(self, verdict: Verdict) -> None:
        """The coordinator is away, or what this job offers is of no use: begin anew with the others'
        state."""
        result = RoundResult(
            "void", int(verdict.get("round", self.number)), str(verdict.get("why", ""))
        )
        result.left_out = verdict.get("left_out", {})
        if self.job in result.left_out:
            self._offers.clear()
        elif not result.left_out:
            time.sleep(_REST_S)
        self._end(None, result)

    def _end(self, mine: InFlight | None, result: RoundResult) -> None:
        self.number = result.round
        with self._changed:
            self._results.append((mine, result))
            self.ended += 1
            self._changed.notify_all()
