"""The rounds of one rank, in a thread beside training: from a pseudo-gradient on the host to an aggregate that may be
applied.

    all ranks   norm of the pseudo-gradient, summed over the job
    rank 0      "ready" -> the coordinator's verdict -> all ranks
    all ranks   exchange with their counterparts (exchange.py), or take fragments (take.py)
    rank 0      "done" -> commit, another attempt, or void -> all ranks

So all ranks of a job come to the same end, and every wait has one: the coordinator's timeout, a link's patience,
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
from holmes_ext.runtime.outer.coordinator.client import CoordinatorClient
from holmes_ext.runtime.outer.in_flight import InFlight, RemoteJob, RoundResult
from holmes_ext.runtime.outer.job_ranks import JobRanks
from holmes_ext.runtime.outer.ownership import RankRange, shard_pairs
from holmes_ext.runtime.outer.peers.exchange import Attempt
from holmes_ext.runtime.outer.peers.links import Peer, PeerLinks, PeersFailed
from holmes_ext.runtime.outer.peers.take import take
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.outer.state import OuterState, Pending
from holmes_ext.runtime.reduce.compress import codec

#: Seconds for a coordinator that did not answer the last time.
_AWAY_S = 2.0
#: How often a job that begins tries to take weights, and the seconds in between: by then the coordinator knows
#: whether the giver is gone.
_ENTRIES, _AGAIN_S = 5, 2.0
Verdict = dict[str, Any]


class RoundRunner:
    """submit(sent_round) and wait for sent_round.end. owned: of this job at this rank's position; rank: in the job;
    checksums(): of the fragments' anchors, collective. Construction starts the thread; close() ends it."""

    def __init__(
        self,
        settings: OuterSettings,
        state: OuterState,
        owned: list[RankRange],
        job_ranks: JobRanks,
        links: PeerLinks,
        point: CoordinatorClient | None,
        job: str,
        token: str,
    ):
        self.settings, self.state, self.owned, self.job_ranks, self.links, self.point = (
            settings,
            state,
            owned,
            job_ranks,
            links,
            point,
        )
        self.job, self.token, self.codec = job, token, codec(settings.compress)
        self.known: dict[tuple[str, str], RemoteJob] = {}
        self.away = self.entered = False
        self.number, self.told = 0, self._no_news()
        self._sums: dict[int, tuple[int, int]] = {}
        self._inbox: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holmes-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, sent_round: InFlight) -> None:
        sent_round.versions = self._versions()
        self._inbox.put(sent_round)

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
        """Version and checksum of each fragment, as the coordinator wants them; collective. versions: those that
        training had when it sent the sent_round. What it had not applied then, and may be applying now, is promised,
        without a checksum; the others' anchors do not change while this thread reads them."""
        with self.state.lock:
            promised = [f.promised for f in self.state.fragments]
        still = [k for k, version in enumerate(versions) if promised[k] == version]
        stale = [k for k in still if self._sums.get(k, (-1, 0))[0] != versions[k]]
        mine = [self.state.fragments[k].checksum(self.state.weights.position) for k in stale]
        for k, total in zip(stale, self.job_ranks.sum_modulo(mine) if stale else ()):
            self._sums[k] = (versions[k], total)
        return [[version, self._sums[k][1] if k in still else None] for k, version in enumerate(promised)]

    def forget_checksum(self, fragment: int) -> None:
        """The anchor is another one, though its version is not."""
        self._sums.pop(fragment, None)

    # The thread

    def _run(self) -> None:
        while (sent_round := self._inbox.get()) is not None:
            try:
                sent_round.end.set_result(self._round(sent_round))
            except BaseException as error:  # noqa: BLE001 - raised where the training thread waits for it
                sent_round.end.set_exception(error)

    def _round(self, sent_round: InFlight) -> RoundResult:
        begin, sent = time.monotonic(), self.links.sent
        fragment = self.state.fragments[sent_round.fragment]
        momentum = _square(fragment.momentum.float()) if self.settings.stale and fragment.momentum is not None else 0.0
        square, momentum, tokens = self.job_ranks.sums([_square(sent_round.gradient), momentum, sent_round.tokens])
        norm = square**0.5 if square == square and square != float("inf") else None
        self.told = self.fragments(sent_round.versions)
        report = {
            "round": sent_round.number,
            "fragment": sent_round.fragment,
            "fragments": self.told,
            "norm": norm,
            "tokens": tokens,
        }
        if sent_round.base != fragment.version:
            report |= {"norm": None, "why": "it has just taken these weights from another job"}
        verdict = self._ask("ready", report)
        outcome = None
        while outcome is None:
            if verdict["verdict"] == "go":
                verdict = self._attempt(sent_round, verdict, momentum)
                outcome = verdict.get("outcome")
            elif verdict["verdict"] == "behind":
                outcome = self.take(verdict)
            else:
                why = str(verdict.get("why", "the round was over already"))
                outcome = RoundResult("void", int(verdict.get("round", sent_round.number)), why)
                outcome.left_out = verdict.get("left_out", {})
        outcome.bytes, outcome.seconds, outcome.norm = (
            self.links.sent - sent,
            time.monotonic() - begin,
            norm or 0.0,
        )
        outcome.period = int(self.job_ranks.from_first(sent_round.period)) if self.settings.seconds else 0
        self.number = max(self.number, outcome.round)
        return outcome

    def enter(self, number: int) -> RoundResult:
        """The first word with the coordinator; collective. HolmesError when the job may not join, or no weights can
        be had where others have newer ones."""
        self.number, outcome = number, RoundResult("void", number)
        for tried in range(_ENTRIES):
            time.sleep(_AGAIN_S if tried else 0)
            self.told = self.fragments(self._versions())
            verdict = self._ask("enter", {})
            if verdict["verdict"] == "void":
                self.job_ranks.refuse(f"job {self.job} cannot join: {verdict['why']}")
            outcome = self.take(verdict) if verdict["verdict"] == "behind" else RoundResult("in", int(verdict["round"]))
            if outcome.verdict != "void":
                break
        else:
            self.job_ranks.refuse(f"job {self.job} cannot join: {outcome.why}")
        self.number, self.entered = max(number, outcome.round), True
        return outcome

    def hello(self) -> dict[str, Any]:
        """Of what this job is now: for a coordinator that does not know it (any more)."""
        peers = sorted({name for name, _ in self.known})
        return {"fragments": self.told, "round": self.number, "entered": self.entered, "peers": peers}

    def _attempt(self, sent_round: InFlight, verdict: Verdict, momentum_square: float) -> Verdict:
        """One attempt: the next verdict; with key "outcome" when the round is committed."""
        members, incarnations = verdict["members"], verdict["incarnations"]
        others = [name for name in members if name != self.job]
        fragment = self.state.fragments[sent_round.fragment]
        failed = self.learn({name: incarnations[name] for name in others})
        known = {name: self.known[name, incarnations[name]] for name in others if name not in failed}
        maps = {self.job: self.owned, **{name: one.owned for name, one in known.items()}}
        mine = [
            one
            for one in shard_pairs(maps, fragment.start, fragment.stop)
            if one.owners[self.job] == self.job_ranks.rank
        ]
        peers = {(name, rank): peer for name, one in known.items() for rank, peer in one.peers.items()}
        attempt = Attempt(self.job, members, mine, peers, self.codec)
        gradients: list[torch.Tensor] = []
        if not failed:
            try:
                gradients = attempt.run(
                    self.links,
                    sent_round.number,
                    int(verdict["attempt"]),
                    fragment,
                    sent_round.gradient,
                    self.settings.timeout,
                )
            except PeersFailed as error:
                failed = error.jobs
        count = len(attempt.contributors)
        wanted = self.settings.stale or self.settings.aggregate in BY_PRODUCTS
        gram = products(gradients) if wanted and gradients else torch.zeros(count, count, dtype=torch.float64)
        sums = self.job_ranks.sums([*(float(name in failed) for name in members), *gram.flatten().tolist()])
        accused = [name for name, times in zip(members, sums) if times]
        gram = torch.tensor(sums[len(members) :], dtype=torch.float64).view(count, count)
        shares = [members[name] for name in attempt.contributors]
        factors, gap = shares, 1.0
        if wanted and not accused:
            factors = coefficients(self.settings, gram, shares)
            c = torch.tensor(factors, dtype=torch.float64)
            gap = staleness_gap(self.settings, momentum_square, float(c @ gram @ c)) if self.settings.stale else 1.0
        report = {
            "round": sent_round.number,
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
        length, away = self.job_ranks.sums(
            [
                _square(total),
                _square(sent_round.gradient - total) if self.job in attempt.contributors else 0.0,
            ]
        )
        with self.state.lock:
            fragment.pending = Pending(
                sent_round.number, total, momentum_of(self.settings, shares), gap, attempt.residual
            )
        drift = (away / length) ** 0.5 if length > 0 and count > 1 and self.job in attempt.contributors else None
        return {
            "verdict": "commit",
            "outcome": RoundResult(
                "commit", sent_round.number, members=members, left_out=verdict["left_out"], drift=drift
            ),
        }

    # With the coordinator: rank 0 asks, all hear

    def _ask(self, op: str, document: Mapping[str, Any]) -> Verdict:
        answer: Verdict = {}
        if self.job_ranks.rank == 0:
            answer = self._answer(op, document)
        answer = self.job_ranks.from_first(answer)
        if "line" in answer:
            self.job_ranks.refuse(answer["line"])
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

    def learn(self, incarnations: Mapping[str, str]) -> frozenset[str]:
        """Maps and addresses of jobs that are not known yet; those of whom nothing can be learnt (they are gone
        again). Collective."""
        failed = set()
        for name, incarnation in incarnations.items():
            if (name, incarnation) not in self.known:
                told = self._ask("maps", {"of": name})
                if told.get("incarnation") != incarnation:
                    failed.add(name)
                    continue
                self.known = {key: one for key, one in self.known.items() if key[0] != name}
                self.known[name, incarnation] = remote_job(name, told, self.state.weights.position)
        return frozenset(failed)

    def take(self, verdict: Verdict) -> RoundResult:
        """Fragments from another job, as the verdict says; collective."""
        donor, incarnation, numbers = (
            str(verdict["from"]),
            str(verdict["incarnation"]),
            [int(one) for one in verdict["fragments"]],
        )
        if self.learn({donor: incarnation}):
            return RoundResult("void", int(verdict["round"]), f"job {donor}, which has newer weights, is gone again")
        known = self.known[donor, incarnation]
        why = take(
            self.state,
            dict(zip(numbers, verdict["versions"])),
            self.owned,
            known.owned,
            self.job_ranks.rank,
            known.peers,
            self.job_ranks,
            self.token,
            self.settings.timeout,
        )
        for number in numbers:
            self.forget_checksum(number)
        if why:
            return RoundResult("void", int(verdict["round"]), f"the weights of job {donor} could not be taken: {why}")
        return RoundResult("taken", int(verdict["round"]), source=donor, fragments=numbers)


def remote_job(name: str, told: Mapping[str, Any], position: str) -> RemoteJob:
    """Of the coordinator's answer to "maps"."""
    if position not in told["maps"]:
        raise HolmesError(f"job {name} has no {position}; joined jobs need the same tensor and pipeline sizes")
    owned = [RankRange(start, stop, rank) for start, stop, rank in told["maps"][position]]
    ranks = {one.rank for one in owned}
    return RemoteJob(
        owned, {rank: Peer(name, str(told["incarnation"]), rank, told["addresses"][rank]) for rank in ranks}
    )


def _square(values: torch.Tensor) -> float:
    return float(sum(torch.dot(one, one).double() for one in values.split(2**20)))
