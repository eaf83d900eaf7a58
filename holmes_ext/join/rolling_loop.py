"""Inner steps and outer steps with rounds=async: the training thread's work after each optimizer step.

With P inner steps from a fragment's exchange to the next fragment's (a period), and D = `delay`:

    inner step   1 .. P-D-1   P-D                         P-D+1 .. P-1   P
    training     train        capture a fragment's        train          apply the aggregates that have
    thread                    pseudo-gradient, submit                    arrived; wait for no round

An outer step moves the anchor (the fragment's weights after the last outer step), and the local weights by
the same amount. Progress that no round has counted yet stays in the local weights, and is part of a later
pseudo-gradient. With g the pseudo-gradient that this job contributed (anchor minus local weights):

    round to which this job contributed g    local <- local + (move of the anchor) + g
    round that this job only received        local <- local + (move of the anchor)

g is added because the outer step has moved the anchor by -g, too, and the local weights have that
progress already.
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
    """Outer training on one rank with asynchronous rounds: it never waits for other jobs.

    A pseudo-gradient stays offered until enough jobs offer the same fragment. Aggregates that have
    arrived are applied at the end of a period.

    Args:
        arguments, more: Arguments of OuterLoop, the base class for synchronous rounds.
        boundary: Collectives over all ranks of this job, at the boundaries of periods. They need a
            process group of their own: the rounds thread runs collectives at any time.
    """

    rounds: RollingRunner

    def __init__(self, *arguments: Any, boundary: JobRanks, **more: Any):
        super().__init__(*arguments, **more)
        self._training_collectives = boundary
        # Tokens that this rank has read since the last capture of each fragment.
        self._tokens_of_fragment = [0.0] * len(self.state.fragments)
        self._next = 0  # fragment to capture next, if it is free

    def after_step(self, tokens: float = 1.0) -> None:
        """Count an inner step; send a pseudo-gradient or apply aggregates if it is time.

        Each fragment has its own count of tokens since its last capture, because a fragment on offer
        misses its turn.

        Args:
            tokens: Tokens that this rank has read in this step; all jobs may count samples instead.

        Raises:
            HolmesError: The coordinator has rejected the job, or the weights were reallocated.
        """
        self._tokens_of_fragment = [before + tokens for before in self._tokens_of_fragment]
        super().after_step(tokens)

    def capture(self) -> int:
        """Compute the pseudo-gradient of the next part of the model that has none on offer to other jobs.

        Fragments take turns in cyclic order. A fragment's pseudo-gradient is stored in `_captured`.
        submit() then moves it to `_submitted`: it is on offer until a round has used it.

        Returns:
            Index of the fragment; _NO_FRAGMENT if all fragments have a pseudo-gradient on offer.
        """
        count = len(self.state.fragments)
        # From the next fragment on, the first fragment without a pseudo-gradient on offer.
        candidates = [(self._next + offset) % count for offset in range(count)]
        free = [index for index in candidates if index not in self._submitted]
        if not free:
            return _NO_FRAGMENT
        index = free[0]
        self._next = (index + 1) % count
        # The capture takes self._tokens as the tokens of this pseudo-gradient, and sets it to 0.
        self._tokens = self._tokens_of_fragment[index]
        self._tokens_of_fragment[index] = 0.0
        # The second argument is the round's number. There is no round yet, so any number will do: the
        # rounds thread sets the true number when the coordinator has begun a round.
        self._capture_fragment(index, number=index + 1)
        # in_period: inner steps since the period began.
        step_s = (time.monotonic() - self._period_start) / max(1, self.in_period)
        # Time until training applies the aggregate, `delay` inner steps later. The coordinator waits for
        # other jobs no longer than a part of it.
        self._captured[index].in_flight.slack_s = self.settings.delay * step_s
        return index

    def submit(self, fragment: int) -> None:
        """Pass the captured pseudo-gradient of a fragment to the thread that runs the outer rounds.

        Args:
            fragment: Result of capture(); with _NO_FRAGMENT nothing was captured, and nothing is
                passed.
        """
        if fragment != _NO_FRAGMENT:
            super().submit(fragment)

    def submitted(self) -> list[int]:
        """Return an empty list: with rounds=async, training waits for no round."""
        return []

    def new_period(self) -> None:
        """Apply the results of the rounds that have ended, and begin the next period; collective.

        A period is the inner steps between two calls of this method. All ranks must apply the same
        rounds, but a round may have ended on some ranks only. So rank 0 broadcasts how many rounds
        have ended there, and a rank on which fewer have ended waits for the others.
        """
        begin = time.monotonic()
        ended_on_rank_0 = self._training_collectives.broadcast_from_rank_0(self.rounds.ended)
        # Results not returned before, each with the pseudo-gradient that this job contributed.
        ended_rounds = self.rounds.results_until(ended_on_rank_0)
        exposed_s = time.monotonic() - begin  # training waited
        for contribution, result in ended_rounds:
            self._apply(contribution, result)
            fragment = result.fragments[0] if result.fragments else 0
            self._on_round(Record(result.round, fragment, self.steps, exposed_s, result))
            exposed_s = 0.0  # the wait counts once, in the record of the first round
        super().new_period()

    @torch.no_grad()
    def _apply(self, contribution: InFlight | None, result: RoundResult) -> None:
        """Apply the result of a round to anchors (the outer weights) and local weights; collective.

            commit    take the outer step, and move the local weights with the anchor
            taken     (weights came from another job) replace anchors, and set the local weights to
                      them
            void      no outer step. Keep all; but if this job was left out (its pseudo-gradient was
                      unusable), set all local weights to the anchors

        Args:
            contribution: This job's pseudo-gradient in the round; None: it only received.
            result: Result of the round.
        """
        is_left_out = self.rounds.job in result.left_out
        if result.verdict == "commit":
            (index,) = result.fragments
            self._apply_commit(index, contribution, result, is_left_out)
        elif result.verdict == "taken":
            for index in result.fragments:
                self.state.apply(self.state.fragments[index])
                self._discard_local_progress(index)
        elif is_left_out:
            # This job's pseudo-gradient was unusable (such as a NaN). In the next inner step the
            # fault reaches the weights of all fragments, so all of them go back to their anchors.
            for index in range(len(self.state.fragments)):
                self._discard_local_progress(index)

    def _apply_commit(
        self, index: int, contribution: InFlight | None, result: RoundResult, is_left_out: bool
    ) -> None:
        """Take the outer step of a committed round, and move the local weights with the anchor.

        Local weights have the job's own progress -g already (g: pseudo-gradient = anchor - local
        weights). If the job contributed g, the anchor's move contains this progress, too. It must not
        count twice, so the local weights move by (anchor's move + g) in this case.

        Afterwards, a pseudo-gradient that counted is forgotten, and the fragment can be captured
        again. If the job only received the aggregate, its pseudo-gradient is offered again. If the
        job was left out, its pseudo-gradient and local progress are discarded.

        Args:
            index: Index of the fragment, a part of the model.
            contribution: This job's pseudo-gradient in the round; None: it only received.
            result: Result of the round.
            is_left_out: This job's pseudo-gradient was found unusable, and did not count.
        """
        fragment = self.state.fragments[index]
        anchor_before = fragment.anchor.clone()
        self.state.apply(fragment)  # the outer step moves the anchor
        move = fragment.anchor - anchor_before
        is_contributor = result.members.get(self.rounds.job, 0) > 0
        if contribution is not None and is_contributor:
            move += contribution.gradient  # g, so that it does not count twice
            self._submitted.pop(index, None)
        if is_left_out:
            self._discard_local_progress(index)
            return
        # This rank has the move only of the elements that it exchanges, other ranks with the same weights
        # have the rest. _gathered() yields the move of all local elements.
        for local, move_of_part in self._gathered(index, move):
            local.values.add_(move_of_part)
        self._on_weights_written()  # the framework updates its copies of the weights

    def _discard_local_progress(self, index: int) -> None:
        """Set the local weights of a fragment to its anchor: the weights after its last outer step.

        The submitted pseudo-gradient of the fragment is forgotten, so a new one can be computed.
        """
        self._submitted.pop(index, None)
        self._set_to_anchor(index)
