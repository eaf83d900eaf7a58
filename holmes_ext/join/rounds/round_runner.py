"""The rounds of one rank, in a thread beside training: from a pseudo-gradient on the host to an aggregate
that may be applied.

    all ranks   length of the pseudo-gradient, summed over the job
    rank 0      "ready" -> the coordinator's verdict -> all ranks
    all ranks   exchange with their counterparts (peers/exchange.py), or take fragments (peers/take.py)
    all ranks   products of what came, summed: who can be used (screening.py)
    rank 0      "done" -> check, another attempt, or void -> all ranks
    all ranks   salted sums of what came; factors of the aggregate
    rank 0      "checked" -> commit, check again, another attempt, or void -> all ranks

So all ranks of a job come to the same end, and every wait has one: the coordinator's deadline, a link's, the
control group's timeout.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.join.codecs import codec_of
from holmes_ext.join.peers.exchange import Attempt
from holmes_ext.join.peers.links import PeerLinks, PeersFailed
from holmes_ext.join.peers.take import Donor, take
from holmes_ext.join.rounds.aggregate import coefficients, combine, products
from holmes_ext.join.rounds.coordinator_link import (
    Claims,
    CoordinatorLink,
    RemoteJobs,
    Verdict,
    hexadecimal,
)
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.screening import Screening
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange, shard_pairs
from holmes_ext.join.shards.state import OuterState, Pending

#: How often a job that begins tries to take weights, and the seconds in between: by then the coordinator
#: knows whether the donor is gone.
_ENTRIES, _AGAIN_S = 5, 2.0


@dataclass
class _Came:
    """names: whose; gram: products over all ranks; faults: whose cannot be used, and why."""

    attempt: Attempt
    names: list[str]
    gradients: list[torch.Tensor]
    gram: torch.Tensor
    unreached: list[str]
    faults: dict[str, str]


class RoundRunner:
    """submit(in_flight), and wait for its end. own: who exchanges what in this job at this position."""

    def __init__(
        self,
        settings: OuterSettings,
        state: OuterState,
        ranges: list[RankRange],
        job_ranks: JobRanks,
        links: PeerLinks,
        coordinator: CoordinatorLink,
        job: str,
    ):
        self.settings, self.algorithm, self.codec = (
            settings,
            settings.outer_algorithm(),
            codec_of(settings),
        )
        self.state, self.own, self.job_ranks, self.links = state, ranges, job_ranks, links
        self.coordinator, self.job = coordinator, job
        self.remote = RemoteJobs(
            coordinator, job_ranks, state.weights.position, state.weights.total
        )
        self.number = 0
        self.claims = Claims(state, job_ranks)
        self._screening = Screening(settings.aggregate)
        self._inbox: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holmes-rounds", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, in_flight: InFlight) -> None:
        in_flight.versions = self._versions()
        self._inbox.put(in_flight)

    def close(self, seconds: float, why: str) -> None:
        """Ends the thread when what is submitted has ended, at most so long, and says goodbye."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self.coordinator.client is not None:
            self.coordinator.client.close(why)
        self.links.close()

    def enter(self, number: int) -> RoundResult:
        """The first word; collective. HolmesError: it may not join, or cannot have newer weights."""
        self.number, outcome = number, RoundResult("void", number)
        for tried in range(_ENTRIES):
            time.sleep(_AGAIN_S if tried else 0)
            self.claims.renew(self._versions())
            verdict = self.coordinator.ask("enter", {})
            if verdict["verdict"] == "behind":
                outcome = self.take(verdict)
            elif verdict["verdict"] == "in":
                outcome = RoundResult("in", int(verdict["round"]))
            else:
                self.job_ranks.refuse(
                    f"job {self.job} cannot join: {verdict.get('why', 'it is not told why')}"
                )
            if outcome.verdict != "void":
                break
        else:
            self.job_ranks.refuse(f"job {self.job} cannot join: {outcome.why}")
        self.number, self.coordinator.entered = outcome.round, True
        return outcome

    def hello(self) -> dict[str, Any]:
        """Of what this job is now: for a coordinator that does not know it (any more)."""
        return {
            **self.claims.told,
            "round": self.number,
            "entered": self.coordinator.entered,
            "peers": self.remote.names(),
        }

    def _versions(self) -> list[int]:
        return [f.version for f in self.state.fragments]

    # The thread

    def _run(self) -> None:
        while (in_flight := self._inbox.get()) is not None:
            try:
                in_flight.ended.set_result(self._round(in_flight))
            except BaseException as error:  # noqa: BLE001 - raised where the training thread waits for it
                in_flight.ended.set_exception(error)

    def _round(self, in_flight: InFlight) -> RoundResult:
        begin, sent = time.monotonic(), self.links.sent
        fragment = self.state.fragments[in_flight.fragment]
        momentum = 0.0
        if self.algorithm.needs_gap and fragment.momentum is not None:
            momentum = square_of(fragment.momentum.float())
        square, momentum, tokens = self.job_ranks.sums(
            [self._square_to_send(in_flight), momentum, in_flight.tokens]
        )
        finite = square == square and square != float("inf")
        norm = square**0.5 if finite else 0.0
        verdict = self.coordinator.ask(
            "ready", self._report(in_flight, norm if finite else None, tokens)
        )
        outcome = self._follow(in_flight, verdict, momentum)
        outcome.bytes, outcome.seconds, outcome.norm = (
            self.links.sent - sent,
            time.monotonic() - begin,
            norm,
        )
        outcome.period = (
            int(self.job_ranks.from_first(in_flight.period)) if self.settings.seconds else 0
        )
        self.number = outcome.round
        return outcome

    def _square_to_send(self, in_flight: InFlight) -> float:
        """Of what the codec will encode: with what it has left out so far."""
        residual = self.state.fragments[in_flight.fragment].residual
        if residual is None:
            return square_of(in_flight.gradient)
        return square_of(torch.add(in_flight.gradient, residual))

    def _report(self, in_flight: InFlight, norm: float | None, tokens: float) -> dict[str, Any]:
        """What this job says when it is ready."""
        index = in_flight.fragment
        claims = self.claims.renew(in_flight.versions)
        report = {"round": in_flight.number, "fragment": index, "tokens": tokens, **claims}
        salt = self.coordinator.salt_of(in_flight.number)
        if salt and claims["checksums"][index]:
            report |= {"salted": self.claims.salted(index, salt), "salt_round": in_flight.number}
        if in_flight.base != self.state.fragments[index].version:
            return {**report, "why": "it has just taken these weights from another job"}
        return report if norm is None else {**report, "norm": norm}

    def _follow(self, in_flight: InFlight, verdict: Verdict, momentum_square: float) -> RoundResult:
        """From verdict to verdict, until the round has ended."""
        came: _Came | None = None
        members: dict[str, float] = {}
        while True:
            what = verdict["verdict"]
            if what == "go":
                members = verdict["members"]
                came = self._exchange(in_flight, verdict)
                report = {"unreached": came.unreached, "faults": came.faults}
                verdict = self._tell("done", in_flight, verdict, report)
            elif what == "check" and came is not None:
                report = self._checked(in_flight, came, members, verdict, momentum_square)
                verdict = self._tell(
                    "checked", in_flight, verdict, report | {"check": verdict["check"]}
                )
            elif what == "commit" and came is not None:
                return self._commit(in_flight, came, members, verdict)
            elif what == "behind":
                return self.take(verdict)
            else:
                why = str(verdict.get("why", "the round was over already"))
                outcome = RoundResult("void", int(verdict.get("round", in_flight.number)), why)
                outcome.left_out = verdict.get("left_out", {})
                return outcome

    def _tell(
        self, op: str, in_flight: InFlight, verdict: Verdict, report: Mapping[str, Any]
    ) -> Verdict:
        where = {"round": in_flight.number, "attempt": verdict["attempt"]}
        return self.coordinator.ask(op, {**where, **report})

    def _exchange(self, in_flight: InFlight, verdict: Verdict) -> _Came:
        """One attempt."""
        members, incarnations = verdict["members"], verdict["incarnations"]
        others = [name for name in members if name != self.job]
        fragment = self.state.fragments[in_flight.fragment]
        known, failed = self.remote.learn({name: incarnations[name] for name in others})
        maps = {self.job: self.own, **{name: remote.ranges for name, remote in known.items()}}
        pairs = shard_pairs(maps, fragment.start, fragment.stop)
        mine = [pair for pair in pairs if pair.owners[self.job] == self.job_ranks.rank]
        peers = {
            (name, rank): peer
            for name, remote in known.items()
            for rank, peer in remote.peers.items()
        }
        attempt = Attempt(self.job, members, mine, peers, self.codec)
        gradients: list[torch.Tensor] = []
        if not failed:
            try:
                number = int(verdict["attempt"])
                gradients = attempt.run(
                    self.links,
                    in_flight.number,
                    number,
                    fragment,
                    in_flight.gradient,
                    self.settings.timeout,
                )
            except PeersFailed as error:
                failed = error.jobs
        names = attempt.contributors
        gram = (
            products(gradients)
            if gradients
            else torch.zeros(len(names), len(names), dtype=torch.float64)
        )
        sums = self.job_ranks.sums(
            [*(float(name in failed) for name in members), *gram.flatten().tolist()]
        )
        unreached = [name for name, times in zip(members, sums) if times]
        self.remote.forget(unreached)
        gram = torch.tensor(sums[len(members) :], dtype=torch.float64).view(len(names), len(names))
        faults = (
            {}
            if unreached
            else self._screening.faults(in_flight.fragment, names, gram, verdict["norms"])
        )
        faults.pop(self.job, None)
        return _Came(attempt, names, gradients, gram, unreached, faults)

    def _checked(
        self,
        in_flight: InFlight,
        came: _Came,
        members: Mapping[str, float],
        verdict: Verdict,
        momentum_square: float,
    ) -> dict[str, Any]:
        """Salted sums of what came, and the factors by which to add it up."""
        fragment, salt = self.state.fragments[in_flight.fragment], str(verdict["salt"])
        mine = [came.attempt.digest(fragment, gradient, salt) for gradient in came.gradients]
        digests = dict(zip(came.names, map(hexadecimal, self.job_ranks.sum_modulo(mine))))
        counting = [k for k, name in enumerate(came.names) if name not in verdict["excluded"]]
        gram = came.gram[counting][:, counting]
        total = sum(members[came.names[k]] for k in counting)
        shares = [members[came.names[k]] / total for k in counting]
        factors = coefficients(self.settings, gram, shares)
        c = torch.tensor(factors, dtype=torch.float64)
        gap = self.algorithm.gap_of(momentum_square, float(c @ gram @ c))
        return {
            "digests": digests,
            "factors": dict(zip((came.names[k] for k in counting), factors)),
            "gap": gap,
        }

    def _commit(
        self, in_flight: InFlight, came: _Came, members: Mapping[str, float], verdict: Verdict
    ) -> RoundResult:
        fragment = self.state.fragments[in_flight.fragment]
        factors, left_out = verdict["factors"], verdict["left_out"]
        used = {
            name: gradient for name, gradient in zip(came.names, came.gradients) if name in factors
        }
        total = combine(self.settings, list(used.values()), [factors[name] for name in used])
        mine = self.job in factors
        away = square_of(in_flight.gradient - total) if mine else 0.0
        length, away = self.job_ranks.sums([square_of(total), away])
        shares = {name: members[name] if name in factors else 0.0 for name in members}
        mu = self.algorithm.momentum_of([shares[name] for name in used])
        residual = came.attempt.residual if mine else None
        self._screening.remember(in_flight.fragment, came.gram)
        with self.state.lock:
            fragment.pending.append(
                Pending(in_flight.number, total, mu, float(verdict["gap"]), residual)
            )
        drift = (away / length) ** 0.5 if length > 0 and len(used) > 1 and mine else None
        return RoundResult(
            "commit", in_flight.number, members=shares, left_out=left_out, drift=drift
        )

    def take(self, verdict: Verdict) -> RoundResult:
        """Fragments from another job, as the verdict says; collective."""
        name, number = str(verdict["from"]), int(verdict["round"])
        wanted = dict(zip(map(int, verdict["fragments"]), map(int, verdict["versions"])))
        known, failed = self.remote.learn({name: str(verdict["incarnation"])})
        if failed:
            return RoundResult(
                "void", number, f"job {name}, which has newer weights, is gone again"
            )
        donor = Donor(self.own, known[name].ranges, known[name].peers, self.links.routes)
        # With rounds=async it waits for training, as sums do; else training waits for it.
        waits = self.settings.rounds == "async" and self.running
        store = self.state.promise if waits else self.state.replace
        why = take(self.state, wanted, donor, self.job_ranks, self.settings.timeout, store)
        for fragment in wanted:
            self.claims.forget(fragment)
        if why:
            self.remote.forget([name])
            return RoundResult(
                "void", number, f"the weights of job {name} could not be taken: {why}"
            )
        return RoundResult("taken", number, source=name, fragments=list(wanted))


def square_of(values: torch.Tensor) -> float:
    """Sum of squares, without a copy of the whole."""
    return float(sum(torch.dot(part, part).double() for part in values.split(2**20)))
