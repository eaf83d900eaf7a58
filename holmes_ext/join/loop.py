"""Inner steps and outer steps of a joined job: what its training thread does after each optimizer step.

Each of `fragments` fragments of the model is exchanged every `every` inner steps, so a period between two
exchanges has P = every / fragments steps. With d = `delay`, one period goes like this:

    inner step   1 .. P-d-1   P-d                       P-d+1 .. P-1     P
    training     train        capture a fragment's      train, while     wait for the round to end, take the
    thread                    pseudo-gradient, submit   the round runs   outer step, write the weights

The algorithm determines the steps at which this happens (algorithms.py). The round itself runs in another
thread (rounds/round_runner.py). All ranks of a job count the same inner steps and get the same results of
rounds, so they act in the same step.
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
from holmes_ext.join.shards.saved import opened, readable, sealed
from holmes_ext.join.shards.state import OuterState
from holmes_ext.join.shards.weights import Part, Weights

#: Steps of the first period if `every` is given in seconds.
_FIRST_PERIOD = 8
#: Seconds between two checks that the rounds thread still runs.
_LOOK_S = 10.0
#: Least duration of an inner step in a division, in seconds.
_SHORTEST_STEP_S = 1e-6


@dataclass(frozen=True)
class Record:
    """One round as the training thread saw it, for telemetry and `holmes report`."""

    number: int
    fragment: int
    step: int  # inner step at which the pseudo-gradient was captured
    exposed_s: float  # seconds for which training waited for the end of the round
    outcome: RoundResult


@dataclass
class _Sent:
    """Pseudo-gradient that was captured, with the local weights at that time."""

    in_flight: InFlight
    #: Local weights on the host; None: inner steps after the capture will be discarded.
    parts: list[Part] | None = None


class OuterLoop:
    """Outer training of a joined job on one rank. after_step() must be called after each inner step.

    Args:
        settings: The --holmes-outer settings.
        weights: Weights of this rank.
        state: Outer state of this rank.
        rounds: The thread that runs the rounds.
        replicas: Ranks of this job that hold the same weights.
        on_round: Called with the record of each round.
        written: Called after weights were written.
    """

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
        self.settings = settings
        self.algorithm = settings.outer_algorithm()
        self.weights = weights
        self.state = state
        self.rounds = rounds
        self.replicas = replicas
        self._on_round = on_round
        self._written = written
        self.number = 0  # last round that this job began, or heard of
        self.steps = 0  # inner steps of this job
        self.period = settings.period or max(_FIRST_PERIOD, settings.delay + 1)
        self.in_period = 0  # inner steps since the period began
        self._tokens = 0.0  # of this rank, since the last capture
        self._captured: dict[int, _Sent] = {}  # by fragment
        self._submitted: dict[int, _Sent] = {}  # by fragment
        #: Fragment -> pseudo-gradient of a void round, which counts in the fragment's next round.
        self._carried: dict[int, torch.Tensor] = {}
        self._begun = time.monotonic()  # of the period

    def after_step(self, tokens: float = 1.0) -> None:
        """Count an inner step; begin or end a round if one is due.

        Args:
            tokens: Tokens that this rank has read (or samples: any measure that all jobs share).

        Raises:
            HolmesError: The job cannot stay in the run.
        """
        self.steps += 1
        self.in_period += 1
        self._tokens += tokens
        self.algorithm.after_step(self)

    @torch.no_grad()
    def capture(self) -> int:
        """Capture the next fragment's pseudo-gradient: its anchor minus its local weights.

        The anchor is the fragment's weights after its last outer step, equal in all jobs.

        Returns:
            Index of the fragment.

        Raises:
            HolmesError: The weights are in other memory than at the first step.
        """
        if self.weights.moved():
            raise HolmesError(
                f"step {self.steps}: the script or framework has reallocated the weights since the first"
                f" step; a joined job's weights must stay in place"
            )
        self.number += 1
        index = (self.number - 1) % len(self.state.fragments)  # one fragment after the other
        fragment = self.state.fragments[index]
        local = self.weights.read(fragment.ranges, torch.empty_like(fragment.anchor))
        gradient = fragment.anchor - local
        if index in self._carried:  # the pseudo-gradient of a void round
            gradient += self._carried.pop(index)
        # If inner steps after the capture are to be kept, the local weights at this time are needed later.
        parts = None
        keeps_later_steps = self.settings.mix == "keep" and self.algorithm.keeps_progress
        if keeps_later_steps and self.settings.delay:
            parts = [
                Part(part.start, part.values.to("cpu", torch.float32, copy=True))
                for part in self.weights.held(fragment.start, fragment.stop)
            ]
        in_flight = InFlight(
            self.number,
            index,
            gradient,
            base=fragment.version,
            tokens=self._tokens,
            step=self.steps,
            period=self._wanted_period(),
        )
        self._tokens = 0.0
        self._captured[index] = _Sent(in_flight, parts)
        return index

    def submit(self, fragment: int) -> None:
        """Pass the captured pseudo-gradient of a fragment to the rounds thread."""
        sent = self._captured.pop(fragment)
        self._submitted[fragment] = sent
        self.rounds.submit(sent.in_flight)

    def submitted(self) -> list[int]:
        """Return the fragments whose pseudo-gradients were submitted, the oldest first."""
        return list(self._submitted)

    @torch.no_grad()
    def settle(self, fragment: int) -> None:
        """Wait for the end of a fragment's round, and apply the result to anchor and local weights.

        If nothing of the fragment was submitted, its local weights are set to the anchor.

        Args:
            fragment: Index of the fragment.
        """
        sent = self._submitted.pop(fragment, None)
        if sent is None:
            self._write(fragment, sent=None)
            return
        in_flight = sent.in_flight
        begin = time.monotonic()
        result = self._result_of(in_flight)
        exposed_s = time.monotonic() - begin
        self.number += result.round - in_flight.number  # the run may be in a later round
        self.period = result.period or self.period  # 0: no change
        self._apply_result(fragment, sent, result)
        is_left_out = self.rounds.job in result.left_out
        if is_left_out and not result.norm:
            # The pseudo-gradient was not finite: the other fragments would spoil the weights again.
            for index in range(len(self.state.fragments)):
                self._write(index, sent=None)  # set the local weights to the anchor
        captured = self._captured.get(fragment)
        if captured is not None and result.verdict != "taken":
            # It was captured before this outer step, and remains valid after it.
            captured.in_flight.base = self.state.fragments[fragment].version
        self._on_round(Record(in_flight.number, fragment, in_flight.step, exposed_s, result))

    def _apply_result(self, fragment: int, sent: _Sent, result: RoundResult) -> None:
        """Take the outer step of a committed round, or write weights that came from another job.

        After a void round, the local weights stay, unless this job's pseudo-gradient was unusable.

        Args:
            fragment: Index of the fragment.
            sent: The pseudo-gradient that this job submitted, with the local weights at its capture.
            result: Result of the round.
        """
        number = sent.in_flight.number
        is_left_out = self.rounds.job in result.left_out
        pending = [step.number for step in self.state.fragments[fragment].pending]
        # _write() with sent=None sets the local weights to the anchor.
        if result.verdict == "taken":
            for index in result.fragments:
                self._write(index, sent=None)
                self._carried.pop(index, None)
        elif result.verdict == "commit" and number in pending:
            self.state.apply(self.state.fragments[fragment])  # the outer step moves the anchor
            is_counted = not is_left_out and result.members.get(self.rounds.job, 0) != 0
            if is_counted and self.algorithm.keeps_progress:
                self._write(fragment, sent.parts, follow=False)
            else:  # discard the inner steps that no round has counted
                self._write(fragment, sent=None)
        elif is_left_out:
            self._write(fragment, sent=None)
        elif not self.algorithm.keeps_progress:
            # The inner steps of the void round leave the weights, and count in the next round.
            self._write(fragment, sent=None)
            self._carried[fragment] = sent.in_flight.gradient

    def new_period(self) -> None:
        """Begin the next period."""
        self.in_period = 0
        self._begun = time.monotonic()

    def _result_of(self, in_flight: InFlight) -> RoundResult:
        """Wait for the end of a round and return its result; raise the exception that ended it.

        All waits of a round have an end (round_runner.py).
        """
        while not wait([in_flight.ended], _LOOK_S).done:
            if not self.rounds.running:
                raise HolmesError(
                    "--holmes-join: the thread of the rounds has ended before its round"
                )
        return in_flight.ended.result()

    def _write(self, index: int, sent: list[Part] | None, follow: bool = True) -> None:
        """Write the local weights of a fragment from its anchor; collective over the replicas.

        Args:
            index: Index of the fragment.
            sent: Local weights at the capture of the pseudo-gradient, so that later inner steps are kept.
            follow: Without `sent`: set the local weights to the anchor. Otherwise mix both (setting mix).
        """
        # Each rank keeps the anchor of the elements that it exchanges; the replicas have the others.
        for local, anchor in self._gathered(index, self.state.fragments[index].anchor):
            new = anchor
            if sent is not None or not follow:
                sent_values = None
                if sent is not None:
                    sent_values = _values_of(sent, local.start, local.stop).to(anchor.device)
                new = self.algorithm.mixed(local.values.float(), sent_values, anchor)
            local.values.copy_(new)
        self._written()

    def _gathered(self, index: int, mine: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Gather a tensor of a fragment from the replicas, and yield it next to the local weights.

        Args:
            index: Index of the fragment.
            mine: Values of the elements that this rank exchanges.

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
        """Return how many inner steps this rank proposes until the next fragment.

        Rank 0's proposal counts (round_runner.py). 0: no change, because `every` is given in steps.
        """
        if not self.settings.seconds:
            return 0
        step_s = (time.monotonic() - self._begun) / self.in_period
        period_s = self.settings.seconds / self.settings.fragments
        steps = round(period_s / max(step_s, _SHORTEST_STEP_S))
        return max(self.settings.delay + 1, steps)

    # Checkpoints, beginning and end

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state of this rank for a checkpoint, as nested dicts and lists of tensors.

        With rounds=sync, the results of rounds under way are waited for, and saved without being applied.
        With rounds=async, pseudo-gradients under way are not saved: they are still in the local
        weights, and are captured again.
        """
        is_sync = self.settings.rounds == "sync"
        return sealed(
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
        """Wait for the rounds under way, and return their pseudo-gradients and results."""
        submitted = []
        for sent in self._submitted.values():
            in_flight = sent.in_flight
            parts = None
            if sent.parts is not None:
                parts = [[part.start, part.values] for part in sent.parts]
            submitted.append(
                {
                    "number": in_flight.number,
                    "fragment": in_flight.fragment,
                    "gradient": in_flight.gradient,
                    "base": in_flight.base,
                    "step": in_flight.step,
                    "outcome": asdict(self._result_of(in_flight)),
                    "parts": parts,
                }
            )
        return submitted

    def load_state_dict(self, saved: Any, source: str = "checkpoint") -> None:
        """Load the outer state of a checkpoint; only before begin().

        Args:
            saved: What `state_dict` returned.
            source: Name of the checkpoint in error messages.

        Raises:
            HolmesError: The state is damaged, or belongs to another model or other settings.
        """
        with readable(source):
            self._load(opened(saved, source), source)

    def _load(self, saved: dict[str, Any], source: str) -> None:
        """Load a state whose digest was checked.

        Args:
            saved: Nested dicts and lists of state_dict().
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
                base=sent["base"],
                tokens=0.0,
                step=sent["step"],
            )
            # The round had ended when the state was saved.
            in_flight.ended.set_result(RoundResult(**sent["outcome"]))
            parts = None
            if sent["parts"] is not None:
                parts = [Part(start, values) for start, values in sent["parts"]]
            self._submitted[in_flight.fragment] = _Sent(in_flight, parts)

    def begin(self) -> str:
        """Enter the run and start the rounds thread; collective.

        Returns:
            Where the job's weights come from, for a message to the user.

        Raises:
            HolmesError: The coordinator refuses the job, or its ranks loaded different checkpoints.
        """
        numbers = self.rounds.job_ranks.all_gather([self.number, self.steps])  # of each rank
        if any(others != numbers[0] for others in numbers):
            raise HolmesError(
                f"the ranks of job {self.rounds.job} loaded outer state of different rounds"
                f" ({sorted(map(tuple, numbers))}); load one checkpoint"
            )
        versions = [fragment.version for fragment in self.state.fragments]
        result = self.rounds.enter(max(self.number, *versions))
        self.number = result.round
        for index in result.fragments:  # whose anchors came from another job
            self._write(index, sent=None)
        self.rounds.start()
        self._begun = time.monotonic()
        if result.verdict == "taken":
            return f"the weights of job {result.source}, round {self.number}"
        return f"round {self.number}"

    def end(self, why: str = "training is over") -> None:
        """Leave the run, after waiting for the rounds under way for at most two timeouts."""
        self.rounds.close(2 * self.settings.timeout, why)


def _values_of(parts: list[Part], start: int, stop: int) -> torch.Tensor:
    """Return the values of elements [start, stop), all of which lie in one of the parts."""
    whole = next(part for part in parts if part.start <= start and stop <= part.stop)
    return whole.values[start - whole.start : stop - whole.start]
