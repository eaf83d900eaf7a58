"""Inner steps and outer steps with rounds=async: what the training thread does after each optimizer step.

    inner step   1 .. P-d-1   P-d                         P-d+1 .. P-1   P
    training     train        capture a fragment's        train          apply the aggregates that are there;
    thread                    pseudo-gradient d, submit                  wait for no round

An outer step moves the anchor, and the local weights by the same amount. Progress that no round has counted
yet stays in the local weights, and is part of a later pseudo-gradient:

    round to which this job contributed d    local <- local + (move of the anchor) + d
    round that this job only received        local <- local + (move of the anchor)
"""

from __future__ import annotations

import time
from typing import Any

import torch

from holmes_ext.join.loop import OuterLoop, Record
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.rolling_runner import RollingRunner
from holmes_ext.join.shards.job_ranks import JobRanks

#: Index that capture() returns if there is no fragment to capture.
_NO_FRAGMENT = -1


class RollingLoop(OuterLoop):
    """Outer training of a joined job on one rank with rounds=async.

    Args:
        boundary: Collectives over the ranks of the job, for the training thread only.
    """

    rounds: RollingRunner

    def __init__(self, *arguments: Any, boundary: JobRanks, **more: Any):
        super().__init__(*arguments, **more)
        self._boundary = boundary
        # Tokens of this rank since the last capture of each fragment.
        self._tokens_of = [0.0] * len(self.state.fragments)
        self._next = 0  # fragment to capture next, if it is free

    def after_step(self, tokens: float = 1.0) -> None:
        """Count an inner step, and its tokens for each fragment; see OuterLoop.after_step."""
        self._tokens_of = [before + tokens for before in self._tokens_of]
        super().after_step(tokens)

    def capture(self) -> int:
        """Capture the pseudo-gradient of the next fragment that does not wait for a round.

        Returns:
            Index of the fragment; _NO_FRAGMENT if all fragments wait for a round.
        """
        count = len(self.state.fragments)
        # From the next fragment on, the first one that does not wait for a round.
        candidates = [(self._next + offset) % count for offset in range(count)]
        free = [index for index in candidates if index not in self._submitted]
        if not free:
            return _NO_FRAGMENT
        index = free[0]
        self.number = index  # the base class captures fragment number - 1 after adding 1
        self._next = (index + 1) % count
        self._tokens = self._tokens_of[index]
        self._tokens_of[index] = 0.0
        super().capture()
        step_s = (time.monotonic() - self._begun) / max(1, self.in_period)
        # Until the aggregate will be applied, `delay` inner steps later.
        self._captured[index].in_flight.slack_s = self.settings.delay * step_s
        return index

    def submit(self, fragment: int) -> None:
        """Pass the captured pseudo-gradient of a fragment to the rounds thread, if there is one."""
        if fragment != _NO_FRAGMENT:
            super().submit(fragment)

    def submitted(self) -> list[int]:
        """Return no fragments, because training waits for no round."""
        return []

    def new_period(self) -> None:
        """Apply the results of the rounds that have ended, and begin the next period; collective.

        Rank 0 determines the number of rounds, so that all ranks apply the same ones.
        """
        begin = time.monotonic()
        count = self._boundary.broadcast_from_rank_0(self.rounds.ended)
        ended_rounds = self.rounds.results_until(count)
        exposed_s = time.monotonic() - begin
        for contribution, result in ended_rounds:
            self._apply(contribution, result)
            fragment = result.fragments[0] if result.fragments else 0
            self._on_round(Record(result.round, fragment, self.steps, exposed_s, result))
            exposed_s = 0.0  # it counts once
        super().new_period()

    @torch.no_grad()
    def _apply(self, contribution: InFlight | None, result: RoundResult) -> None:
        """Apply the result of a round to anchors and local weights; collective over the replicas.

        The local weights move with the anchor. If this job contributed a pseudo-gradient d, the anchor's move
        contains the progress -d, which the local weights have already; therefore d is added to them.

        Args:
            contribution: This job's pseudo-gradient; None: it only received.
            result: Result of the round.
        """
        is_left_out = self.rounds.job in result.left_out
        if result.verdict == "commit":
            (index,) = result.fragments
            fragment = self.state.fragments[index]
            anchor_before = fragment.anchor.clone()
            self.state.apply(fragment)
            move = fragment.anchor - anchor_before
            if contribution is not None and result.members.get(self.rounds.job, 0) > 0:
                move += contribution.gradient
                self._submitted.pop(index, None)
            if is_left_out:  # the progress of this job is discarded
                self._set_to_anchor(index)
                return
            for local, move_of_part in self._gathered(index, move):
                local.values.add_(move_of_part)
            self._written()
        elif result.verdict == "taken":
            for index in result.fragments:
                self.state.apply(self.state.fragments[index])
                self._set_to_anchor(index)
        elif is_left_out:
            # The pseudo-gradient was unusable: the other fragments would spoil the weights again.
            for index in range(len(self.state.fragments)):
                self._set_to_anchor(index)

    def _set_to_anchor(self, index: int) -> None:
        """Set the local weights of a fragment to its anchor, and forget what was submitted of it."""
        self._submitted.pop(index, None)
        self._write(index, sent=None)
