"""Local steps with rounds=async: what a joined job's training thread does after each step of its optimizer.

    step    1 .. P-d-1   P-d                       P-d+1 .. P-1   P
            train        capture a fragment's      train          apply every sum that is there, wait for none
                         pseudo-gradient, submit

The anchor moves under the local weights by what the sums say; what this job has trained since stays, and is
submitted later where no round had it yet:

    a round to which it contributed d       local <- local + (anchor's move) + d
    another one                             local <- local + (anchor's move)
"""

from __future__ import annotations

import time
from typing import Any

import torch

from holmes_ext.join.loop import OuterLoop, Record
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.rolling_runner import RollingRunner
from holmes_ext.join.shards.job_ranks import JobRanks


class RollingLoop(OuterLoop):
    """boundary: a group of the job's ranks for this thread alone."""

    rounds: RollingRunner

    def __init__(self, *arguments: Any, boundary: JobRanks, **more: Any):
        super().__init__(*arguments, **more)
        self._boundary = boundary
        self._tokens_of = [0.0] * len(self.state.fragments)
        self._next = 0

    def after_step(self, tokens: float = 1.0) -> None:
        self._tokens_of = [had + tokens for had in self._tokens_of]
        super().after_step(tokens)

    def capture(self) -> int:
        """Of the next fragment whose last pseudo-gradient a round has had; -1 where there is none."""
        count = len(self.state.fragments)
        free = [
            (self._next + k) % count
            for k in range(count)
            if (self._next + k) % count not in self._submitted
        ]
        if not free:
            return -1
        self.number = free[0]  # the base class takes the fragment after it, counted from 1
        self._next = (free[0] + 1) % count
        self._tokens, self._tokens_of[free[0]] = self._tokens_of[free[0]], 0.0
        index = super().capture()
        step_s = (time.monotonic() - self._begun) / max(1, self.in_period)
        self._captured[index].in_flight.slack_s = self.settings.delay * step_s
        return index

    def submit(self, fragment: int) -> None:
        if fragment >= 0:
            super().submit(fragment)

    def submitted(self) -> list[int]:
        """None is waited for."""
        return []

    def new_period(self) -> None:
        begin = time.monotonic()
        count = self._boundary.broadcast_from_rank_0(self.rounds.ended)
        results = self.rounds.results_until(count)
        exposed = time.monotonic() - begin
        for sent, result in results:
            self._apply(sent, result)
            self._on_round(
                Record(result.round, (result.fragments or [0])[0], self.steps, exposed, result)
            )
            exposed = 0.0
        super().new_period()

    @torch.no_grad()
    def _apply(self, sent: InFlight | None, result: RoundResult) -> None:
        left_out = self.rounds.job in result.left_out
        if result.verdict == "commit":
            (index,) = result.fragments
            fragment = self.state.fragments[index]
            before = fragment.anchor.clone()
            self.state.apply(fragment)
            move = fragment.anchor - before
            if sent is not None and result.members.get(self.rounds.job, 0) > 0:
                move += sent.gradient
                self._submitted.pop(index, None)
            if left_out:
                self._follow(index)
                return
            for local, here in self._gathered(index, move):
                local.values.add_(here)
            self._written()
        elif result.verdict == "taken":
            for index in result.fragments:
                self.state.apply(self.state.fragments[index])
                self._follow(index)
        elif left_out:  # what it offered cannot be used: other fragments would spoil it again
            for index in range(len(self.state.fragments)):
                self._follow(index)

    def _follow(self, index: int) -> None:
        """The local weights are the anchor's; what was submitted of them counts for nothing."""
        self._submitted.pop(index, None)
        self._write(index, None)
