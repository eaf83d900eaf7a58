"""Inner steps and outer steps of a joined job: the work of its training thread after each optimizer step.

The model is divided into fragments. They are exchanged with the other jobs one after the other, each fragment
every `every` inner steps. The time between the exchanges of two fragments is a period: it has
P = every / fragments inner steps. With D = `delay`, a period goes like this:

    inner step   1 .. P-D-1   P-D                       P-D+1 .. P-1     P
    training     train        capture a fragment's      train, while     wait for the round to end, take the
    thread                    pseudo-gradient, submit   the round runs   outer step, write the weights

The algorithm determines these steps (algorithms.py). Rounds run in a thread of round_runner.py.
All ranks of a job count the same inner steps and get the same results, so they act in the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.round_runner import RoundRunner
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import Replicas
from holmes_ext.join.shards.saved import (
    refuse_unexpected_structure,
    unwrap_verified,
    wrap_with_digest,
)
from holmes_ext.join.shards.state import OuterState
from holmes_ext.join.shards.weights import Part, Weights

#: Inner steps before the first exchange if `every` is given in seconds: the duration of a step is unknown.
_FIRST_PERIOD = 8
#: Seconds between two checks that the rounds thread still runs.
_LOOK_S = 10.0
#: Least duration of an inner step in a division, in seconds.
_SHORTEST_STEP_S = 1e-6


@dataclass(frozen=True)
class Record:
    """Record of a round (exchange of a part of the model) that has ended, for telemetry and reports."""

    number: int
    fragment: int
    step: int  # inner step at which the pseudo-gradient was captured
    exposed_s: float  # seconds for which training waited for the end of the round
    outcome: RoundResult


@dataclass
class _Capture:
    """Pseudo-gradient of a part of the model, and the local weights from which it was computed."""

    in_flight: InFlight
    #: Host copy of the local weights at the capture, to compute the later inner steps that are kept (later
    #: weights minus these). None: inner steps after the capture will be discarded.
    parts: list[Part] | None = None


class OuterLoop:
    """Outer training (DiLoCo) of a joined job on this rank; after_step() follows each inner step."""

    def __init__(
        self,
        settings: OuterSettings,
        weights: Weights,
        state: OuterState,
        rounds: RoundRunner,
        replicas: Replicas,
        on_round: Callable[[Record], None] = lambda record: None,
        written: Callable[[], None] = lambda: None,
    ):
        """Prepare the outer training; begin() joins the other jobs.

        Args:
            settings: The --holmes-outer settings.
            weights: Weights of this rank; inner steps change them.
            state: Anchors (weights after the last outer step) and outer momentum, by fragment.
            rounds: Background thread (rounds thread): exchanges submitted pseudo-gradients.
            replicas: Ranks of this job that hold the same weights; each has a part of the anchors.
            on_round: Called with the record of a round after its result was applied (telemetry).
            written: Called after local weights were overwritten, on all ranks in the same step. The
                framework's patch then updates copies of them, such as bf16 weights.
        """
        self.settings = settings
        self.algorithm = settings.outer_algorithm()
        self.weights = weights
        self.state = state
        self.rounds = rounds
        self.replicas = replicas
        self._on_round = on_round
        self._on_weights_written = written
        self.number = 0  # last round that this job began, or that a reply of the coordinator named
        self.steps = 0  # inner steps of this job
        # Inner steps between the exchanges of two fragments. A period must be longer than `delay`: a
        # pseudo-gradient is sent and its aggregate is applied in the same period.
        self.period = settings.period or max(_FIRST_PERIOD, settings.delay + 1)
        self.in_period = 0  # inner steps since the period began, up to `period`
        self._tokens = 0.0  # that this rank has read since its last pseudo-gradient (capture)
        self._captured: dict[int, _Capture] = {}  # by fragment; not passed to the rounds thread yet
        self._submitted: dict[int, _Capture] = {}  # by fragment; passed to it, not yet applied
        #: Fragment -> pseudo-gradient of a void round, to be added to the fragment's next pseudo-gradient.
        self._carried: dict[int, torch.Tensor] = {}
        self._period_start = time.monotonic()

    def after_step(self, tokens: float = 1.0) -> None:
        """Count an inner step; send a pseudo-gradient or apply an aggregate if it is time.

        Args:
            tokens: Tokens that this rank has read in this step; all jobs may count samples instead.

        Raises:
            HolmesError: The coordinator has rejected the job, or the weights were reallocated.
        """
        self.steps += 1
        self.in_period += 1
        self._tokens += tokens
        self.algorithm.after_step(self)

    def capture(self) -> int:
        """Compute the pseudo-gradient of the next part (fragment) of the model: anchor minus local weights.

        The anchor is the fragment's weights after its last outer step, equal in all jobs.

        Returns:
            Index of the fragment.
        """
        index = self.number % len(self.state.fragments)  # one fragment after the other
        self._capture_fragment(index, number=self.number + 1)
        return index

    @torch.no_grad()
    def _capture_fragment(self, index: int, number: int) -> None:
        """Compute a fragment's pseudo-gradient, anchor minus local weights; submit() sends it.

        Args:
            index: Index of the fragment, a part of the model.
            number: Number of the round in which it will be exchanged.

        Raises:
            HolmesError: The framework has reallocated the weights since the first step.
        """
        if self.weights.moved():
            raise HolmesError(
                f"step {self.steps}: the script or framework has reallocated the weights since the first"
                f" step; a joined job's weights must stay in place"
            )
        self.number = number
        fragment = self.state.fragments[index]
        local = self.weights.read(fragment.ranges, torch.empty_like(fragment.anchor))
        gradient = fragment.anchor - local
        if index in self._carried:  # the pseudo-gradient of a void round
            gradient += self._carried.pop(index)
        # mix=keep: the inner steps between capture and outer step are later weights minus this copy.
        weights_at_capture = None
        keeps_later_steps = self.settings.mix == "keep" and self.algorithm.keeps_progress
        if keeps_later_steps and self.settings.delay > 0:
            weights_at_capture = [
                Part(part.start, part.values.to("cpu", torch.float32, copy=True))
                for part in self.weights.held(fragment.start, fragment.stop)
            ]
        in_flight = InFlight(
            number,
            index,
            gradient,
            anchor_version=fragment.version,
            tokens=self._tokens,
            step=self.steps,
            period=self._wanted_period(),
        )
        self._tokens = 0.0
        self._captured[index] = _Capture(in_flight, weights_at_capture)

    def submit(self, fragment: int) -> None:
        """Pass the captured pseudo-gradient of part `fragment` of the model to the rounds thread."""
        sent = self._captured.pop(fragment)
        self._submitted[fragment] = sent
        self.rounds.submit(sent.in_flight)

    def submitted(self) -> list[int]:
        """Return the parts of the model with a submitted, not yet applied pseudo-gradient, oldest first."""
        return list(self._submitted)

    @torch.no_grad()
    def finish_round(self, fragment: int) -> None:
        """Wait for a round to end; update a fragment's local weights and anchor (the outer weights).

        If nothing was submitted yet (first period of CO2), the local weights are only reset to the
        anchor. The pseudo-gradient just captured contains this change, so no progress is lost.

        Args:
            fragment: Index of the fragment, a part of the model.
        """
        sent = self._submitted.pop(fragment, None)
        if sent is None:
            self._set_to_anchor(fragment)
            return
        in_flight = sent.in_flight
        begin = time.monotonic()
        result = self._result_of(in_flight)
        exposed_s = time.monotonic() - begin
        # This job may have been absent while the run went on: skip the numbers of the rounds it missed.
        missed_rounds = result.round - in_flight.number
        self.number += missed_rounds
        # With `every` in seconds, each round also has a new length of periods; 0: no change.
        self.period = result.period or self.period
        self._apply_result(fragment, sent, result)
        is_left_out = self.rounds.job in result.left_out
        if is_left_out and not result.norm:
            # A norm of 0 here means: the norm is not finite. In the next inner step, NaNs of this
            # fragment would reach the weights of all fragments, so reset all of them.
            for index in range(len(self.state.fragments)):
                self._set_to_anchor(index)
        captured_again = self._captured.get(fragment)
        if captured_again is not None and result.verdict != "taken":
            # CO2 captures the next pseudo-gradient before it applies the last aggregate. A round
            # accepts only pseudo-gradients of the current anchor, and the outer step has just replaced
            # the anchor. The captured difference stays valid, so it gets the new anchor's version.
            # (After "taken", the weights are another job's: the next round drops this difference.)
            captured_again.in_flight.anchor_version = self.state.fragments[fragment].version
        self._on_round(Record(in_flight.number, fragment, in_flight.step, exposed_s, result))

    def _apply_result(self, fragment: int, sent: _Capture, result: RoundResult) -> None:
        """Update a fragment's local weights and anchor (weights after the last outer step) after a round.

            taken     (weights came from another job) local weights <- the new anchor
            commit    take the outer step; then combine local weights and new anchor by the setting
                      `mix`. If this job's pseudo-gradient did not count ("left out"),
                      local weights <- the new anchor
            void      no outer step. Keep the local weights; but if this job was left out, or the
                      algorithm keeps no inner steps in them (CO2), local weights <- the anchor

        Args:
            fragment: Index of the fragment, a part of the model.
            sent: The pseudo-gradient that this job submitted, with the local weights at that time.
            result: Result of the round.
        """
        number = sent.in_flight.number
        is_left_out = self.rounds.job in result.left_out
        # Rounds whose outer steps the rounds thread has prepared. A committed round is missing if the
        # fragment has been replaced by another job's since then; the round is then treated as void.
        rounds_to_apply = [step.number for step in self.state.fragments[fragment].pending]
        if result.verdict == "taken":
            for index in result.fragments:
                self._set_to_anchor(index)
                self._carried.pop(index, None)
        elif result.verdict == "commit" and number in rounds_to_apply:
            self.state.apply(self.state.fragments[fragment])  # the outer step moves the anchor
            is_counted = not is_left_out and result.members.get(self.rounds.job, 0) != 0
            if is_counted and self.algorithm.keeps_progress:
                self._mix_with_anchor(fragment, sent.parts)
            else:  # discard the inner steps that no round has counted
                self._set_to_anchor(fragment)
        elif is_left_out:
            self._set_to_anchor(fragment)
        elif not self.algorithm.keeps_progress:
            # This algorithm (CO2) sets local weights to the anchor after each round. Inner steps
            # of a void round are not lost: they are added to the fragment's next pseudo-gradient.
            self._set_to_anchor(fragment)
            self._carried[fragment] = sent.in_flight.gradient

    def new_period(self) -> None:
        """Begin the next period: set its count of inner steps to 0, and its start time to now."""
        self.in_period = 0
        self._period_start = time.monotonic()

    def _result_of(self, in_flight: InFlight) -> RoundResult:
        """Wait for the end of a round and return its result; raise the exception that ended it.

        The wait is finite: each step of a round in the rounds thread has a deadline.
        """
        while not wait([in_flight.ended], _LOOK_S).done:
            if not self.rounds.running:
                raise HolmesError(
                    "--holmes-join: the thread of the rounds has ended before its round"
                )
        return in_flight.ended.result()

    def _set_to_anchor(self, index: int) -> None:
        """Set the local weights of fragment `index` to its anchor; collective over the replicas.

        The anchor is the fragment's weights after its last outer step, equal in all jobs.
        """
        self._overwrite_local(index, lambda local, anchor: anchor)

    def _mix_with_anchor(self, index: int, captured: list[Part] | None) -> None:
        """Set the local weights of fragment `index` after an outer step by the setting `mix`; collective.

        mix=keep: anchor (weights after the outer step) plus inner steps since the capture. mix=A, a
        number: A * local weights + (1 - A) * anchor.

        Args:
            captured: With mix=keep, the local weights at the capture; None: keep no inner steps.
        """

        def mixed(local: Part, anchor: torch.Tensor) -> torch.Tensor:
            captured_values = None
            if captured is not None:
                captured_values = _values_of(captured, local.start, local.stop).to(anchor.device)
            return self.algorithm.mixed(local.values.float(), captured_values, anchor)

        self._overwrite_local(index, mixed)

    def _overwrite_local(
        self, index: int, new_values: Callable[[Part, torch.Tensor], torch.Tensor]
    ) -> None:
        """Overwrite the local weights of fragment `index` by values computed from the anchor; collective.

        The anchor is the weights after the last outer step. Ranks with the same weights each store a part
        of it, so the parts are gathered first.

        Args:
            new_values: Called with consecutive local weights and their anchor; returns their new values.
        """
        for local, anchor in self._gathered(index, self.state.fragments[index].anchor):
            local.values.copy_(new_values(local, anchor))
        self._on_weights_written()

    def _gathered(self, index: int, mine: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Gather a tensor of a fragment from the replicas, and yield it part by part; collective.

        Several ranks of a job may hold the same weights (replicas). Each of them keeps the anchor for its
        own share of the elements only, so the shares are gathered before the local weights are written.

        Args:
            index: Index of the fragment, a part of the model.
            mine: Values of the elements that this rank exchanges with other jobs.

        Yields:
            A part of the local weights, and the gathered values of the same elements on their device.
        """
        for part in self.replicas.gather(self.state.fragments[index], mine):
            # Views of the local weights with these elements; a rank may hold fewer.
            for local in self.weights.held(part.start, part.stop):
                first = local.start - part.start
                last = local.stop - part.start
                yield local, part.values[first:last].to(local.values.device)

    def _wanted_period(self) -> int:
        """Return the period that this rank proposes, in inner steps; 0: no change.

        If `every` is in seconds, a period should last every / fragments seconds. The proposal is this time
        divided by the measured time of an inner step. All ranks use the proposal of rank 0.
        """
        if not self.settings.seconds:
            return 0
        step_s = (time.monotonic() - self._period_start) / self.in_period
        period_s = self.settings.seconds / self.settings.fragments
        steps = round(period_s / max(step_s, _SHORTEST_STEP_S))
        # An aggregate is applied `delay` steps after sending, and before the next fragment is sent.
        return max(self.settings.delay + 1, steps)

    # Checkpoints, beginning and end

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state of this rank for a checkpoint, as nested dicts and lists of tensors.

        With rounds=sync, the results of rounds under way are waited for, and saved without being applied.
        With rounds=async, pseudo-gradients under way are not saved: they are still in the local
        weights, and are captured again.
        """
        is_sync = self.settings.rounds == "sync"
        self.rounds.taker.wait_for_momenta()  # only shortly after the start of a job
        return wrap_with_digest(
            {
                "number": self.number,
                "steps": self.steps,
                "period": self.period,
                "in_period": self.in_period,
                "tokens": self._tokens,
                "carried": {str(index): gradient for index, gradient in self._carried.items()},
                "submitted": self._saved_submitted() if is_sync else [],
                "state": self.state.to_dict(pending=is_sync),
            }
        )

    def _saved_submitted(self) -> list[dict[str, Any]]:
        """Wait for the rounds under way; return pseudo-gradients and results for a checkpoint.

        Returns:
            A dict for each submitted pseudo-gradient. Its keys are part of the format of
            checkpoints: "base" is the version of the anchor from which the local weights were
            subtracted; "outcome" is the round's result (RoundResult); "parts" are the local weights
            at the capture, as [first element, values]; None if inner steps after the capture are
            discarded.
        """
        submitted = []
        for sent in self._submitted.values():
            in_flight = sent.in_flight
            result = self._result_of(in_flight)  # waits for the end of the round
            parts = None
            if sent.parts is not None:
                parts = [[part.start, part.values] for part in sent.parts]
            submitted.append(
                {
                    "number": in_flight.number,
                    "fragment": in_flight.fragment,
                    "gradient": in_flight.gradient,
                    "base": in_flight.anchor_version,
                    "step": in_flight.step,
                    "outcome": asdict(result),
                    "parts": parts,
                }
            )
        return submitted

    def load_state_dict(self, saved: Any, source: str = "checkpoint") -> None:
        """Load the outer training's state from a checkpoint; allowed only before begin().

        The state has anchors (weights after the last outer step), momenta, counters, unapplied results.

        Args:
            saved: Result of state_dict().
            source: Name of the checkpoint in error messages.

        Raises:
            HolmesError: The state is damaged, or belongs to another model or other settings.
        """
        # The digest finds damage; the context manager turns errors about missing keys into HolmesError.
        with refuse_unexpected_structure(source):
            self._load(unwrap_verified(saved, source), source)

    def _load(self, saved: dict[str, Any], source: str) -> None:
        """Load a checkpoint's state, after its digest was checked.

        Args:
            saved: Result of state_dict(). "carried": fragment -> pseudo-gradient of a failed round,
                which the next one of this fragment will contain, too. "submitted": rounds that had
                ended when the job was saved, and whose results it had not applied (_saved_submitted()).
            source: Name of the checkpoint in error messages.
        """
        self.state.load(saved["state"], source)
        self.number = saved["number"]
        self.steps = saved["steps"]
        self.period = saved["period"]
        self.in_period = saved["in_period"]
        self._tokens = saved["tokens"]
        self._carried = {int(index): gradient for index, gradient in saved["carried"].items()}
        self._submitted = {}
        for sent in saved["submitted"]:
            in_flight = InFlight(
                sent["number"],
                sent["fragment"],
                sent["gradient"],
                anchor_version=sent["base"],
                tokens=0.0,  # only needed before the round, and that is over
                step=sent["step"],
            )
            # The round had ended when the state was saved.
            in_flight.ended.set_result(RoundResult(**sent["outcome"]))
            parts = None
            if sent["parts"] is not None:
                parts = [Part(start, values) for start, values in sent["parts"]]
            self._submitted[in_flight.fragment] = _Capture(in_flight, parts)

    def begin(self) -> str:
        """Enter the run and start the rounds thread; collective.

        Returns:
            Source of the job's weights, for a message to the user.

        Raises:
            HolmesError: The coordinator refuses the job, or its ranks loaded different checkpoints.
        """
        numbers = self.rounds.job_ranks.all_gather([self.number, self.steps])  # of each rank
        if any(others != numbers[0] for others in numbers):
            raise HolmesError(
                f"the ranks of job {self.rounds.job} loaded outer state of different rounds"
                f" ({sorted(map(tuple, numbers))}); load one checkpoint"
            )
        # Last known round: begun by this job, or (versions) the round of a fragment's outer step.
        # (With rounds=async, `number` is no round's number, so only the versions matter.)
        versions = [fragment.version for fragment in self.state.fragments]
        result = self.rounds.enter(max(self.number, *versions))
        self.number = result.round
        for index in result.fragments:  # fragments with an anchor from another job
            self._set_to_anchor(index)
        self.rounds.start()
        self._period_start = time.monotonic()
        # The verdict is "taken" (newer weights came from another job) or "in" (this job keeps its own).
        if result.verdict == "taken":
            return f"the weights of job {result.source}, round {self.number}"
        return f"round {self.number}"

    def end(self, why: str = "training is over") -> None:
        """Leave the run after the rounds under way; wait for them at most twice a round's timeout."""
        self.rounds.close(2 * self.settings.timeout, why)


def _values_of(parts: list[Part], start: int, stop: int) -> torch.Tensor:
    """Return the values of elements [start, stop); all of them lie in the same part."""
    holder = next(part for part in parts if part.start <= start and stop <= part.stop)
    return holder.values[start - holder.start : stop - holder.start]
