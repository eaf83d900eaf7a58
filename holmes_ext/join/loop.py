"""Local steps and rounds: what a joined job's training thread does after each step of its optimizer.

    step      1 .. P-d-1     P-d                      P-d+1 .. P-1       P
              train          capture the fragment's   train, the sum     wait for the sum, step the anchor,
                             pseudo-gradient, submit  travels            write the weights

P = every / fragments steps, d = delay; algorithms.py says when. All ranks of a job count alike, so they act
in the same step; the end of a round is the same on all of them (round_runner.py).
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

#: Steps of the first period where `every` is given in seconds.
_FIRST_PERIOD = 8
#: Seconds between two looks at whether the thread of the rounds still runs.
_LOOK_S = 10.0


@dataclass(frozen=True)
class Record:
    """One round as the training thread saw it (telemetry, `holmes report`). exposed_s: waited for its end."""

    number: int
    fragment: int
    step: int
    exposed_s: float
    outcome: RoundResult


@dataclass
class _Sent:
    """The local weights that it was taken from (host); None: what was gained since does not count."""

    in_flight: InFlight
    parts: list[Part] | None = None


class OuterLoop:
    """after_step() follows each inner step. on_round: called with each Record; written: when weights were
    changed."""

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
        self.settings, self.algorithm = settings, settings.outer_algorithm()
        self.weights, self.state, self.rounds, self.replicas = weights, state, rounds, replicas
        self._on_round, self._written = on_round, written
        self.number = 0  # of the last round that this job began, or heard of
        self.steps = 0
        self.period = settings.period or max(_FIRST_PERIOD, settings.delay + 1)
        self.in_period = 0
        self._tokens = 0.0
        self._captured: dict[int, _Sent] = {}  # by fragment
        self._submitted: dict[int, _Sent] = {}
        self._carried: dict[
            int, torch.Tensor
        ] = {}  # pseudo-gradients of rounds that came to nothing
        self._begun = time.monotonic()

    def after_step(self, tokens: float = 1.0) -> None:
        """tokens: that this rank read (or any measure that jobs share). HolmesError: it cannot stay in the
        run."""
        self.steps += 1
        self.in_period += 1
        self._tokens += tokens
        self.algorithm.after_step(self)

    @torch.no_grad()
    def capture(self) -> int:
        """The pseudo-gradient of the next fragment: its anchor minus what it is now."""
        if self.weights.moved():
            raise HolmesError(
                f"step {self.steps}: the script or framework has reallocated the weights since the first"
                f" step; a joined job's weights must stay in place"
            )
        self.number += 1
        index = (self.number - 1) % len(self.state.fragments)
        fragment = self.state.fragments[index]
        gradient = fragment.anchor - self.weights.read(
            fragment.ranges, torch.empty_like(fragment.anchor)
        )
        if index in self._carried:
            gradient += self._carried.pop(index)
        parts = None
        if self.settings.mix == "keep" and self.settings.delay and self.algorithm.keeps_progress:
            parts = [
                Part(part.start, part.values.to("cpu", torch.float32, copy=True))
                for part in self.weights.held(fragment.start, fragment.stop)
            ]
        in_flight = InFlight(
            self.number, index, gradient, fragment.version, self._tokens, self.steps
        )
        in_flight.period = self._wanted_period()
        self._tokens = 0.0
        self._captured[index] = _Sent(in_flight, parts)
        return index

    def submit(self, fragment: int) -> None:
        sent = self._captured.pop(fragment)
        self._submitted[fragment] = sent
        self.rounds.submit(sent.in_flight)

    def submitted(self) -> list[int]:
        return list(self._submitted)

    @torch.no_grad()
    def settle(self, fragment: int) -> None:
        """Wait for a round's end and apply it; or what comes of it where nothing was submitted and local
        weights follow the anchor."""
        sent = self._submitted.pop(fragment, None)
        if sent is None:
            self._write(fragment, None)
            return
        in_flight, begin = sent.in_flight, time.monotonic()
        outcome = self._result_of(in_flight)
        exposed = time.monotonic() - begin
        self.number += outcome.round - in_flight.number
        self.period = outcome.period or self.period
        left_out = self.rounds.job in outcome.left_out
        pending = [step.number for step in self.state.fragments[fragment].pending]
        if outcome.verdict == "taken":
            for index in outcome.fragments:
                self._write(index, None)
                self._carried.pop(index, None)
        elif outcome.verdict == "commit" and in_flight.number in pending:
            self.state.apply(self.state.fragments[fragment])
            # The steps of a job that is left out count for nothing.
            follow = (
                left_out
                or outcome.members.get(self.rounds.job, 0) == 0
                or not self.algorithm.keeps_progress
            )
            self._write(fragment, None if follow else sent.parts, follow)
        elif left_out:
            self._write(fragment, None)
        elif not self.algorithm.keeps_progress:
            self._write(fragment, None)
            self._carried[fragment] = in_flight.gradient
        if left_out and not outcome.norm:  # not finite: other fragments would spoil it again
            for index in range(len(self.state.fragments)):
                self._write(index, None)
        captured = self._captured.get(fragment)
        if (
            captured is not None and outcome.verdict != "taken"
        ):  # captured before the anchor was stepped
            captured.in_flight.base = self.state.fragments[fragment].version
        self._on_round(Record(in_flight.number, fragment, in_flight.step, exposed, outcome))

    def new_period(self) -> None:
        self.in_period, self._begun = 0, time.monotonic()

    def _result_of(self, in_flight: InFlight) -> RoundResult:
        """Every wait of a round ends (round_runner.py); what its thread raised is raised here."""
        while not wait([in_flight.ended], _LOOK_S).done:
            if not self.rounds.running:
                raise HolmesError(
                    "--holmes-join: the thread of the rounds has ended before its round"
                )
        return in_flight.ended.result()

    def _write(self, index: int, sent: list[Part] | None, follow: bool = True) -> None:
        """The local weights of a fragment from its anchor; follow: whatever they were."""
        for local, anchor in self._gathered(index, self.state.fragments[index].anchor):
            if sent is not None or not follow:
                before = (
                    None if sent is None else _cut(sent, local.start, local.stop).to(anchor.device)
                )
                anchor = self.algorithm.mixed(local.values.float(), before, anchor)
            local.values.copy_(anchor)
        self._written()

    def _gathered(self, index: int, mine: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Local weights of a fragment, and what stands at their places in `mine` and its replicas' parts."""
        for part in self.replicas.gather(self.state.fragments[index], mine):
            for local in self.weights.held(part.start, part.stop):
                there = part.values[local.start - part.start : local.stop - part.start]
                yield local, there.to(local.values.device)

    def _wanted_period(self) -> int:
        """Steps until the next fragment; 0: as ever. What rank 0 says goes (round_runner.py)."""
        if not self.settings.seconds:
            return 0
        step_s = (time.monotonic() - self._begun) / self.in_period
        wanted = self.settings.seconds / self.settings.fragments / max(step_s, 1e-6)
        return max(self.settings.delay + 1, round(wanted))

    # Checkpoints, beginning and end

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, texts, lists, dicts. What travels is waited for and comes with it, not applied;
        with rounds=async it is still in the local weights, and captured again."""
        sync = self.settings.rounds == "sync"
        return sealed(
            {
                "number": self.number,
                "steps": self.steps,
                "period": self.period,
                "in_period": self.in_period,
                "tokens": self._tokens,
                "carried": {str(index): gradient for index, gradient in self._carried.items()},
                "submitted": self._saved_submitted() if sync else [],
                "state": self.state.to_dict(pending=sync),
            }
        )

    def _saved_submitted(self) -> list[dict[str, Any]]:
        """What travels: its round is waited for."""
        submitted = []
        for sent in self._submitted.values():
            in_flight, outcome = sent.in_flight, self._result_of(sent.in_flight)
            submitted.append(
                {
                    "number": in_flight.number,
                    "fragment": in_flight.fragment,
                    "gradient": in_flight.gradient,
                    "base": in_flight.base,
                    "step": in_flight.step,
                    "outcome": asdict(outcome),
                    "parts": None
                    if sent.parts is None
                    else [[p.start, p.values] for p in sent.parts],
                }
            )
        return submitted

    def load_state_dict(self, saved: Any, source: str = "checkpoint") -> None:
        """Before begin(); HolmesError when it does not fit."""
        with readable(source):
            self._load(opened(saved, source), source)

    def _load(self, saved: dict[str, Any], source: str) -> None:
        self.state.load(saved["state"], source)
        for name in ("number", "steps", "period", "in_period"):
            setattr(self, name, saved[name])
        self._tokens = saved["tokens"]
        self._carried = {int(index): gradient for index, gradient in saved["carried"].items()}
        self._submitted = {}
        for sent in saved["submitted"]:
            in_flight = InFlight(
                sent["number"], sent["fragment"], sent["gradient"], sent["base"], 0.0, sent["step"]
            )
            in_flight.ended.set_result(RoundResult(**sent["outcome"]))
            parts = sent["parts"] and [Part(start, values) for start, values in sent["parts"]]
            self._submitted[in_flight.fragment] = _Sent(in_flight, parts)

    def begin(self) -> str:
        """Enter the run; collective. A line for the banner; HolmesError: coordinator or jobs refuse."""
        numbers = self.rounds.job_ranks.all_gather([self.number, self.steps])
        if any(others != numbers[0] for others in numbers):
            raise HolmesError(
                f"the ranks of job {self.rounds.job} loaded outer state of different rounds"
                f" ({sorted(map(tuple, numbers))}); load one checkpoint"
            )
        versions = [fragment.version for fragment in self.state.fragments]
        outcome = self.rounds.enter(max(self.number, *versions))
        self.number = outcome.round
        for index in outcome.fragments:
            self._write(index, None)
        self.rounds.start()
        self._begun = time.monotonic()
        if outcome.verdict == "taken":
            return f"the weights of job {outcome.source}, round {self.number}"
        return f"round {self.number}"

    def end(self, why: str = "training is over") -> None:
        """Leave the run: what travels is waited for, at most as long as a late job."""
        self.rounds.close(2 * self.settings.timeout, why)


def _cut(parts: list[Part], start: int, stop: int) -> torch.Tensor:
    """Values of elements [start, stop), which lie in one of the parts."""
    whole = next(part for part in parts if part.start <= start and stop <= part.stop)
    return whole.values[start - whole.start : stop - whole.start]
