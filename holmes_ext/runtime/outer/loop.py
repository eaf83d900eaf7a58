"""Local steps and rounds: what a joined job's training thread does after each step of its optimizer.

    step      1 .. P-d-1     P-d                      P-d+1 .. P-1       P
              train          take the fragment's      train, the sum     wait for the sum, step the anchor,
                             pseudo-gradient, send    is under way       write the weights

P = every / fragments steps, d = delay. With co2 both happen at P, and what is applied there is what was sent one
whole `every` before. All ranks of a job count alike, so they act in the same step; the end of a round is the same on
all of them (rounds.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.algorithms import mixed
from holmes_ext.runtime.outer.job_ranks import Replicas
from holmes_ext.runtime.outer.round_runner import InFlight, RoundResult, RoundRunner
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.outer.state import OuterState
from holmes_ext.runtime.outer.weights import Part, Weights

#: Steps of the first period where `every` is given in seconds.
_FIRST_PERIOD = 8


@dataclass(frozen=True)
class Record:
    """One round as the training thread saw it: for telemetry and `holmes report`. exposed_s: waited for its end."""

    number: int
    fragment: int
    step: int
    exposed_s: float
    outcome: RoundResult


@dataclass
class _Sent:
    """A sent_round, and the local weights that it was taken from (host); None where what was gained since then does not
    count."""

    sent_round: InFlight
    parts: list[Part] | None = None


class OuterLoop:
    """after_step() after each real step of the inner optimizer. told: called with each round's Record; written:
    called when weights have been changed, for what a framework derives from them."""

    def __init__(
        self,
        settings: OuterSettings,
        weights: Weights,
        state: OuterState,
        rounds: RoundRunner,
        replicas: Replicas,
        told: Callable[[Record], None] = lambda record: None,
        written: Callable[[], None] = lambda: None,
    ):
        self.settings, self.weights, self.state, self.rounds, self.replicas = (
            settings,
            weights,
            state,
            rounds,
            replicas,
        )
        self._told, self._written = told, written
        self.number = 0  # of the last round that this job began, or heard of
        self.steps = 0
        self.period = settings.period or max(_FIRST_PERIOD, settings.delay + 1)
        self._in_period = 0
        self._tokens = 0.0
        self._in_flight: dict[int, _Sent] = {}  # by fragment
        self._carried: dict[int, torch.Tensor] = {}  # co2: pseudo-gradients of rounds that came to nothing
        self._begun = time.monotonic()

    def after_step(self, tokens: float = 1.0) -> None:
        """tokens: that this rank has read for this step (or any measure that all jobs share). HolmesError when the
        job cannot stay in the run."""
        self.steps += 1
        self._in_period += 1
        self._tokens += tokens
        if self.settings.stale:
            if self._in_period >= self.period:
                sent = self._send()
                before = self._in_flight.pop(sent.sent_round.fragment, None)
                if before is None:
                    self._write(sent.sent_round.fragment, None)
                elif self._receive(before).verdict != "taken":
                    sent.sent_round.base = self.state.fragments[sent.sent_round.fragment].version
                self._in_flight[sent.sent_round.fragment] = sent
                self.rounds.submit(sent.sent_round)  # only now: its thread reads the momentum
                self._new_period()
            return
        if self._in_period == self.period - self.settings.delay:
            sent = self._send()
            self._in_flight[sent.sent_round.fragment] = sent
            self.rounds.submit(sent.sent_round)
        if self._in_period >= self.period:
            for fragment in list(self._in_flight):
                self._receive(self._in_flight.pop(fragment))
            self._new_period()

    @torch.no_grad()
    def _send(self) -> _Sent:
        """The pseudo-gradient of the next fragment: its anchor minus what it is now."""
        if self.weights.moved():
            raise HolmesError(f"step {self.steps}: the script or framework has given the weights other memory since the"
                              f" first step; a joined job's weights must stay where they are")  # fmt: skip
        self.number += 1
        index = (self.number - 1) % len(self.state.fragments)
        fragment = self.state.fragments[index]
        gradient = fragment.anchor - self.weights.read(fragment.ranges, torch.empty_like(fragment.anchor))
        if index in self._carried:
            gradient += self._carried.pop(index)
        keep = self.settings.mix == "keep" and self.settings.delay and not self.settings.stale
        held = self.weights.held(fragment.start, fragment.stop) if keep else []
        parts = (
            [Part(one.start, one.values.to("cpu", torch.float32, copy=True)) for one in held]
            if keep
            else None
        )
        sent_round = InFlight(self.number, index, gradient, fragment.version, self._tokens, self.steps)
        sent_round.period = self._wanted_period()
        self._tokens = 0.0
        return _Sent(sent_round, parts)

    @torch.no_grad()
    def _receive(self, sent: _Sent) -> RoundResult:
        """Wait for the end of a round and apply it."""
        sent_round, begin = sent.sent_round, time.monotonic()
        outcome = sent_round.end.result(timeout=10 * self.settings.timeout + 600)
        exposed = time.monotonic() - begin
        self.number = max(self.number, outcome.round)
        self.period = outcome.period or self.period
        fragment = self.state.fragments[sent_round.fragment]
        if outcome.verdict == "taken":
            for index in outcome.fragments:
                self._write(index, None)
                self._carried.pop(index, None)
        elif (
            outcome.verdict == "commit"
            and fragment.pending is not None
            and fragment.pending.number == sent_round.number
        ):
            self.state.apply(fragment)
            left_out = outcome.members.get(self.rounds.job, 0) == 0  # its own steps count for nothing
            follow = self.settings.stale or left_out
            self._write(sent_round.fragment, None if follow else sent.parts, follow)
        elif outcome.verdict == "void" and self.rounds.job in outcome.left_out:
            self._write(sent_round.fragment, None)
        elif outcome.verdict == "void" and self.settings.stale:
            self._write(sent_round.fragment, None)
            self._carried[sent_round.fragment] = sent_round.gradient
        if (
            self.rounds.job in outcome.left_out and not outcome.norm
        ):  # not finite: other fragments would spoil it again
            for index in range(len(self.state.fragments)):
                self._write(index, None)
        self._told(Record(sent_round.number, sent_round.fragment, sent_round.step, exposed, outcome))
        return outcome

    def _write(self, index: int, sent: list[Part] | None, follow: bool = True) -> None:
        """The local weights of a fragment from its anchor; follow: whatever they were."""
        fragment = self.state.fragments[index]
        for anchor in self.replicas.gather(fragment, fragment.anchor):
            for local in self.weights.held(anchor.start, anchor.stop):
                wanted = anchor.values[local.start - anchor.start : local.stop - anchor.start].to(
                    local.values.device
                )
                if sent is not None or not follow:
                    before = (
                        None if sent is None else _cut(sent, local.start, local.stop).to(local.values.device)
                    )
                    wanted = mixed(self.settings, local.values.float(), before, wanted)
                local.values.copy_(wanted)
        self._written()

    def _wanted_period(self) -> int:
        """Steps until the next fragment; 0: as ever. What rank 0 says goes (rounds.py)."""
        if not self.settings.seconds:
            return 0
        step_s = (time.monotonic() - self._begun) / self._in_period
        return max(
            self.settings.delay + 1,
            round(self.settings.seconds / self.settings.fragments / max(step_s, 1e-6)),
        )

    def _new_period(self) -> None:
        self._in_period, self._begun = 0, time.monotonic()

    # Checkpoints, beginning and end

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, texts, lists and dicts. What is under way is waited for, not applied: it comes with the
        rest."""
        in_flight = []
        for sent in self._in_flight.values():
            sent_round, outcome = (
                sent.sent_round,
                sent.sent_round.end.result(timeout=10 * self.settings.timeout + 600),
            )
            in_flight.append(
                {
                    "number": sent_round.number,
                    "fragment": sent_round.fragment,
                    "gradient": sent_round.gradient,
                    "base": sent_round.base,
                    "step": sent_round.step,
                    "outcome": asdict(outcome),
                    "parts": None if sent.parts is None else [[one.start, one.values] for one in sent.parts],
                }
            )
        return {
            "version": 1,
            "number": self.number,
            "steps": self.steps,
            "period": self.period,
            "in_period": self._in_period,
            "tokens": self._tokens,
            "carried": {str(index): one for index, one in self._carried.items()},
            "in_flight": in_flight,
            "state": self.state.to_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any], source: str = "checkpoint") -> None:
        """Before begin(); HolmesError when it does not fit."""
        self.state.load(saved["state"], source)
        for name in ("number", "steps", "period"):
            setattr(self, name, saved[name])
        self._in_period, self._tokens = saved["in_period"], saved["tokens"]
        self._carried = {int(index): one for index, one in saved["carried"].items()}
        self._in_flight = {}
        for one in saved["in_flight"]:
            sent_round = InFlight(
                one["number"], one["fragment"], one["gradient"], one["base"], 0.0, one["step"]
            )
            sent_round.end.set_result(RoundResult(**one["outcome"]))
            parts = None if one["parts"] is None else [Part(start, values) for start, values in one["parts"]]
            self._in_flight[sent_round.fragment] = _Sent(sent_round, parts)

    def begin(self) -> str:
        """Enter the run; collective. Returns a line for the banner; HolmesError when the coordinator or the jobs
        there refuse."""
        numbers = self.rounds.job_ranks.from_all([self.number, self.steps])
        if any(one != numbers[0] for one in numbers):
            raise HolmesError(
                f"the ranks of job {self.rounds.job} loaded outer state of different rounds"
                f" ({sorted(map(tuple, numbers))}); load one checkpoint"
            )
        outcome = self.rounds.enter(self.number)
        self.number = max(self.number, outcome.round)
        for index in outcome.fragments:
            self._write(index, None)
        self.rounds.start()
        self._begun = time.monotonic()
        return (
            f"the weights of job {outcome.source}, round {self.number}"
            if outcome.verdict == "taken"
            else f"round {self.number}"
        )

    def end(self, why: str = "training is over") -> None:
        """Leave the run: what is under way is waited for, at most as long as a late job."""
        self.rounds.close(2 * self.settings.timeout, why)


def _cut(parts: list[Part], start: int, stop: int) -> torch.Tensor:
    """Values of elements [start, stop), which lie in one of the parts."""
    found = next(one for one in parts if one.start <= start and stop <= one.stop)
    return found.values[start - found.start : stop - found.start]
