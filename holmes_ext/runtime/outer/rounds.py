"""The rounds of one rank, in a thread beside training: from a pseudo-gradient on the host to an aggregate that may be
applied.

    all ranks   norm of the pseudo-gradient, summed over the job
    rank 0      "ready" -> the meeting point's verdict -> all ranks
    all ranks   exchange with their counterparts (exchange.py), or take fragments (take.py)
    rank 0      "done" -> commit, another attempt, or void -> all ranks

So all ranks of a job come to the same end, and every wait has one: the meeting point's timeout, a link's patience,
the control group's timeout.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.aggregate import BY_PRODUCTS, coefficients, combine, products
from holmes_ext.runtime.outer.algorithms import momentum_of, staleness_gap
from holmes_ext.runtime.outer.cross.exchange import Attempt
from holmes_ext.runtime.outer.cross.links import Peer, PeerLinks, PeersFailed
from holmes_ext.runtime.outer.cross.take import take
from holmes_ext.runtime.outer.elements import Owned, pieces
from holmes_ext.runtime.outer.flight import Counterpart, Flight, RoundEnd
from holmes_ext.runtime.outer.inside import Inside
from holmes_ext.runtime.outer.meeting.client import MeetingPoint
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.outer.state import OuterState, Pending
from holmes_ext.runtime.reduce.compress import codec

#: Seconds for a meeting point that did not answer the last time.
_AWAY_S = 2.0
#: How often a job that begins tries to take weights, and the seconds in between: by then the meeting point knows
#: whether the giver is gone.
_ENTRIES, _AGAIN_S = 5, 2.0
Verdict = dict[str, Any]


class Rounds:
    """submit(flight) and wait for flight.end. owned: of this job at this rank's position; rank: in the job;
    checksums(): of the fragments' anchors, collective. Construction starts the thread; close() ends it."""

    def __init__(
        self,
        settings: OuterSettings,
        state: OuterState,
        owned: list[Owned],
        inside: Inside,
        links: PeerLinks,
        point: MeetingPoint | None,
        job: str,
        token: str,
    ):
        self.settings, self.state, self.owned, self.inside, self.links, self.point = (
            settings,
            state,
            owned,
            inside,
            links,
            point,
        )
        self.job, self.token, self.codec = job, token, codec(settings.compress)
        self.known: dict[tuple[str, str], Counterpart] = {}
        self.away = self.entered = False
        self.number, self.told = 0, self._no_news()
        self._sums: dict[int, tuple[int, int]] = {}
        self._inbox: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holmes-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, flight: Flight) -> None:
        flight.versions = self._versions()
        self._inbox.put(flight)

    def close(self, seconds: float, why: str) -> None:
        """Ends the thread when what is under way has ended, at most so long, and says goodbye."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self.point is not None:
            self.point.close(why)
        self.links.close()

    def _no_news(self) -> list[list[int | None]]:
        return [[f.promised, None] for f in self.state.fragments]

    def _versions(self) -> list[int]:
        return [f.version for f in self.state.fragments]

    def fragments(self, versions: Sequence[int]) -> list[list[int | None]]:
        """Version and checksum of each fragment, as the meeting point wants them; collective. versions: those that
        training had when it sent the flight. What it had not applied then, and may be applying now, is promised,
        without a checksum; the others' anchors do not change while this thread reads them."""
        with self.state.lock:
            promised = [f.promised for f in self.state.fragments]
        still = [k for k, version in enumerate(versions) if promised[k] == version]
        stale = [k for k in still if self._sums.get(k, (-1, 0))[0] != versions[k]]
        mine = [self.state.fragments[k].checksum(self.state.weights.position) for k in stale]
        for k, total in zip(stale, self.inside.sum_modulo(mine) if stale else ()):
            self._sums[k] = (versions[k], total)
        return [[version, self._sums[k][1] if k in still else None] for k, version in enumerate(promised)]

    def forget_checksum(self, fragment: int) -> None:
        """The anchor is another one, though its version is not."""
        self._sums.pop(fragment, None)

    # The thread

    def _run(self) -> None:
        while (flight := self._inbox.get()) is not None:
            try:
                flight.end.set_result(self._round(flight))
            except BaseException as error:  # noqa: BLE001 - raised where the training thread waits for it
                flight.end.set_exception(error)

    def _round(self, flight: Flight) -> RoundEnd:
        begin, sent = time.monotonic(), self.links.sent
        fragment = self.state.fragments[flight.fragment]
        momentum = _square(fragment.momentum.float()) if self.settings.stale and fragment.momentum is not None else 0.0
        square, momentum, tokens = self.inside.sums([_square(flight.gradient), momentum, flight.tokens])
        norm = square**0.5 if square == square and square != float("inf") else None
        self.told = self.fragments(flight.versions)
        report = {
            "round": flight.number,
            "fragment": flight.fragment,
            "fragments": self.told,
            "norm": norm,
            "tokens": tokens,
        }
        if flight.base != fragment.version:
            report |= {"norm": None, "why": "it has just taken these weights from another job"}
        verdict = self._ask("ready", report)
        outcome = None
        while outcome is None:
            if verdict["verdict"] == "go":
                verdict = self._attempt(flight, verdict, momentum)
                outcome = verdict.get("outcome")
            elif verdict["verdict"] == "behind":
                outcome = self.take(verdict)
            else:
                why = str(verdict.get("why", "the round was over already"))
                outcome = RoundEnd("void", int(verdict.get("round", flight.number)), why)
                outcome.left_out = verdict.get("left_out", {})
        outcome.bytes, outcome.seconds, outcome.norm = self.links.sent - sent, time.monotonic() - begin, norm or 0.0
        outcome.period = int(self.inside.from_first(flight.period)) if self.settings.seconds else 0
        self.number = max(self.number, outcome.round)
        return outcome

    def enter(self, number: int) -> RoundEnd:
        """The first word with the meeting point; collective. HolmesError when the job may not join, or no weights can
        be had where others have newer ones."""
        self.number, outcome = number, RoundEnd("void", number)
        for tried in range(_ENTRIES):
            time.sleep(_AGAIN_S if tried else 0)
            self.told = self.fragments(self._versions())
            verdict = self._ask("enter", {})
            if verdict["verdict"] == "void":
                self.inside.refuse(f"job {self.job} cannot join: {verdict['why']}")
            outcome = self.take(verdict) if verdict["verdict"] == "behind" else RoundEnd("in", int(verdict["round"]))
            if outcome.verdict != "void":
                break
        else:
            self.inside.refuse(f"job {self.job} cannot join: {outcome.why}")
        self.number, self.entered = max(number, outcome.round), True
        return outcome

    def hello(self) -> dict[str, Any]:
        """Of what this job is now: for a meeting point that does not know it (any more)."""
        peers = sorted({name for name, _ in self.known})
        return {"fragments": self.told, "round": self.number, "entered": self.entered, "peers": peers}

    def _attempt(self, flight: Flight, verdict: Verdict, momentum_square: float) -> Verdict:
        """One attempt: the next verdict; with key "outcome" when the round is committed."""
        members, lives = verdict["members"], verdict["lives"]
        others = [name for name in members if name != self.job]
        fragment = self.state.fragments[flight.fragment]
        failed = self.learn({name: lives[name] for name in others})
        known = {name: self.known[name, lives[name]] for name in others if name not in failed}
        maps = {self.job: self.owned, **{name: one.owned for name, one in known.items()}}
        mine = [one for one in pieces(maps, fragment.start, fragment.stop) if one.owners[self.job] == self.inside.rank]
        peers = {(name, rank): peer for name, one in known.items() for rank, peer in one.peers.items()}
        attempt = Attempt(self.job, members, mine, peers, self.codec)
        gradients: list[torch.Tensor] = []
        if not failed:
            try:
                gradients = attempt.run(
                    self.links, flight.number, int(verdict["attempt"]), fragment, flight.gradient, self.settings.timeout
                )
            except PeersFailed as error:
                failed = error.jobs
        count = len(attempt.contributors)
        wanted = self.settings.stale or self.settings.aggregate in BY_PRODUCTS
        gram = products(gradients) if wanted and gradients else torch.zeros(count, count, dtype=torch.float64)
        sums = self.inside.sums([*(float(name in failed) for name in members), *gram.flatten().tolist()])
        accused = [name for name, times in zip(members, sums) if times]
        gram = torch.tensor(sums[len(members) :], dtype=torch.float64).view(count, count)
        shares = [members[name] for name in attempt.contributors]
        factors, gap = shares, 1.0
        if wanted and not accused:
            factors = coefficients(self.settings, gram, shares)
            c = torch.tensor(factors, dtype=torch.float64)
            gap = staleness_gap(self.settings, momentum_square, float(c @ gram @ c)) if self.settings.stale else 1.0
        report = {
            "round": flight.number,
            "attempt": verdict["attempt"],
            "ok": not accused,
            "accused": accused,
            "factors": [*factors, gap],
        }
        answer = self._ask("done", report)
        if answer["verdict"] != "commit":
            return answer
        *factors, gap = answer["factors"]
        total = combine(self.settings, gradients, factors)
        length, away = self.inside.sums(
            [_square(total), _square(flight.gradient - total) if self.job in attempt.contributors else 0.0]
        )
        with self.state.lock:
            fragment.pending = Pending(flight.number, total, momentum_of(self.settings, shares), gap, attempt.residual)
        drift = (away / length) ** 0.5 if length > 0 and count > 1 and self.job in attempt.contributors else None
        return {
            "verdict": "commit",
            "outcome": RoundEnd("commit", flight.number, members=members, left_out=verdict["left_out"], drift=drift),
        }

    # With the meeting point: rank 0 asks, all hear

    def _ask(self, op: str, document: Mapping[str, Any]) -> Verdict:
        answer: Verdict = {}
        if self.inside.rank == 0:
            answer = self._answer(op, document)
        answer = self.inside.from_first(answer)
        if "line" in answer:
            self.inside.refuse(answer["line"])
        return answer

    def _answer(self, op: str, document: Mapping[str, Any]) -> Verdict:
        assert self.point is not None
        try:
            answer = self.point.ask(
                op, document, time.monotonic() + (_AWAY_S if self.away else 2 * self.settings.timeout + 10)
            )
            self.away = False
            return answer
        except HolmesError as error:
            return {"verdict": "error", "line": str(error)}
        except TimeoutError as error:
            self.away = True
            return {"verdict": "void", "round": int(document.get("round", 0)), "why": str(error)}

    def learn(self, lives: Mapping[str, str]) -> frozenset[str]:
        """Maps and addresses of jobs that are not known yet; those of whom nothing can be learnt (they are gone
        again). Collective."""
        failed = set()
        for name, life in lives.items():
            if (name, life) not in self.known:
                told = self._ask("maps", {"of": name})
                if told.get("life") != life:
                    failed.add(name)
                    continue
                self.known = {key: one for key, one in self.known.items() if key[0] != name}
                self.known[name, life] = counterpart(name, told, self.state.weights.position)
        return frozenset(failed)

    def take(self, verdict: Verdict) -> RoundEnd:
        """Fragments from another job, as the verdict says; collective."""
        donor, life, numbers = str(verdict["from"]), str(verdict["life"]), [int(one) for one in verdict["fragments"]]
        if self.learn({donor: life}):
            return RoundEnd("void", int(verdict["round"]), f"job {donor}, which has newer weights, is gone again")
        known = self.known[donor, life]
        why = take(
            self.state,
            dict(zip(numbers, verdict["versions"])),
            self.owned,
            known.owned,
            self.inside.rank,
            known.peers,
            self.inside,
            self.token,
            self.settings.timeout,
        )
        for number in numbers:
            self.forget_checksum(number)
        if why:
            return RoundEnd("void", int(verdict["round"]), f"the weights of job {donor} could not be taken: {why}")
        return RoundEnd("taken", int(verdict["round"]), source=donor, fragments=numbers)


def counterpart(name: str, told: Mapping[str, Any], position: str) -> Counterpart:
    """Of the meeting point's answer to "maps"."""
    if position not in told["maps"]:
        raise HolmesError(f"job {name} has no {position}; joined jobs need the same tensor and pipeline sizes")
    owned = [Owned(start, stop, rank) for start, stop, rank in told["maps"][position]]
    ranks = {one.rank for one in owned}
    return Counterpart(owned, {rank: Peer(name, str(told["life"]), rank, told["addresses"][rank]) for rank in ranks})


def _square(values: torch.Tensor) -> float:
    return float(sum(torch.dot(one, one).double() for one in values.split(2**20)))
