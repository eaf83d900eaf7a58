"""Thread that runs the outer rounds of a rank of a joined job, beside the training thread.

Joined jobs train one model together over a WAN (DiLoCo, arXiv 2311.08105): in a round they exchange the
pseudo-gradients of a fragment of the model. The training thread submits a pseudo-gradient and goes on. For
each pseudo-gradient, the rounds threads of all ranks of the job do the following together:

1. All ranks: add up the squared length of the pseudo-gradient over the job.
2. Rank 0: send "ready" to the coordinator and broadcast its verdict: "go" (step 3) or "behind" (step 6).
3. All ranks: exchange pseudo-gradients with the ranks of the other jobs that have the same elements
   (peers/exchange.py); add up the Gram matrix of the received data over the job; screen the data
   (screening.py). Rank 0: send "done" and broadcast the verdict: "check" (step 4) or "go" (step 3 again).
4. All ranks: compute salted digests of the received data and the factors of the aggregate. Rank 0: send
   "checked" and broadcast the verdict: "commit" (step 5), "check" (4 again, without some jobs) or "go" (3).
5. On "commit": aggregate the pseudo-gradients, and leave the outer step to the training thread as pending.
6. On "behind": take the named fragments from another job (taking.py).
Any other verdict ends the round as void, and nothing changes.

Invariant: every decision comes from rank 0's broadcast or from an all-reduce, so all ranks of the job end
the round the same way. No rank waits for ever: requests, exchanges and collectives have timeouts.
"""

from __future__ import annotations

import math
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
from holmes_ext.join.rounds import aggregate as aggregation
from holmes_ext.join.rounds.aggregate import square_of
from holmes_ext.join.rounds.coordinator_link import (
    Claims,
    CoordinatorLink,
    FoundJobs,
    RemoteJobs,
    Verdict,
    hexadecimal,
)
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.screening import Screening
from holmes_ext.join.rounds.taking import WeightTaker
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange, shared_ranges
from holmes_ext.join.shards.state import Fragment, OuterState, Pending

#: Attempts of a starting job to take weights from another job.
_ENTRIES = 5
#: Seconds between these attempts; by then the coordinator knows whether the donor is gone.
_AGAIN_S = 2.0


@dataclass
class _Received:
    """Result of an exchange on this rank: the jobs' pseudo-gradients, or the jobs that failed."""

    attempt: Attempt
    names: list[str]  # jobs that contribute; this job may be among them
    gradients: list[torch.Tensor]  # this rank's elements, by name; empty if the exchange failed
    gram: torch.Tensor  # inner products of the whole pseudo-gradients, float64 [J, J]
    unreached: list[str]  # jobs with which the exchange failed on some rank
    faults: dict[str, str]  # job whose data cannot be used -> reason


class RoundRunner:
    """Thread that runs one rank's outer rounds: exchanges of pseudo-gradients (rounds=sync)."""

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
        """Prepare the thread; start() starts it.

        Args:
            settings: The --holmes-outer settings.
            state: Anchors (weights after the last outer step) and outer momentum of this rank.
            ranges: Elements that each rank of this job exchanges with other jobs; only the ranks at
                this rank's position of the model-parallel grid.
            job_ranks: Collectives over this job's ranks. Once the thread runs, only it uses them.
            links: Connections to ranks of other jobs, for tensors.
            coordinator: Collective requests to the coordinator.
            job: Name of this job.
        """
        self.settings = settings
        self.algorithm = settings.outer_algorithm()
        self.codec = codec_of(settings)  # compression of pseudo-gradients
        self.state = state
        self.ranges = ranges
        self.job_ranks = job_ranks
        self.links = links
        self.coordinator = coordinator
        self.job = job
        # Shards and addresses of the other jobs' ranks.
        weights = state.weights
        self.remote = RemoteJobs(coordinator, job_ranks, weights.position, weights.total)
        self.number = 0  # last round of the run, as far as this job knows
        self.claims = Claims(state, job_ranks)  # versions and checksums of this job's fragments
        self.taker = WeightTaker(
            settings, state, ranges, job_ranks, links.routes, self.remote, self.claims
        )
        self._screening = Screening(settings.aggregate)  # finds received data that cannot be used
        # Pseudo-gradients that the training thread has submitted. None ends the thread.
        self._inbox: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holmes-rounds", daemon=True)

    @property
    def running(self) -> bool:
        """Return whether the thread has been started and has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, in_flight: InFlight) -> None:
        """Queue a pseudo-gradient for a round; the rounds thread sets the result in `in_flight.ended`."""
        in_flight.versions = self._versions()
        self._inbox.put(in_flight)

    def close(self, seconds: float, why: str) -> None:
        """Stop the thread and close all connections, also that of rank 0 to the coordinator.

        Args:
            seconds: Longest wait for the ends of submitted rounds; later rounds are cut off.
            why: Reason for the coordinator's log.
        """
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self.coordinator.client is not None:
            self.coordinator.client.close(why)
        self.links.close()

    def enter(self, number: int) -> RoundResult:
        """Enter the run, and take newer weights from another job if there are any; collective.

        Args:
            number: Last round of this job, from its checkpoint.

        Raises:
            HolmesError: The coordinator refuses the job, or no donor could give the newer weights.
        """
        self.number = number
        result = RoundResult("void", number)
        # Taking weights may fail because the donor is gone; the coordinator then names another donor.
        for attempt in range(_ENTRIES):
            if attempt > 0:
                time.sleep(_AGAIN_S)
            self.claims.renew(self._versions())
            verdict = self.coordinator.ask("enter", {})
            if verdict["verdict"] == "behind":
                result = self.taker.take_to_begin(verdict)
            elif verdict["verdict"] == "in":
                result = RoundResult("in", int(verdict["round"]))
            else:
                reason = verdict.get("why", "it is not told why")
                self.job_ranks.refuse(f"job {self.job} cannot join: {reason}")
            if result.verdict != "void":
                break
        else:  # all attempts failed
            self.job_ranks.refuse(f"job {self.job} cannot join: {result.why}")
        self.number = result.round
        self.coordinator.entered = True
        return result

    def hello(self) -> dict[str, Any]:
        """Return the part of the job's `hello` to the coordinator that changes over time."""
        return {
            **self.claims.latest_report,
            "round": self.number,
            "entered": self.coordinator.entered,
            "peers": self.remote.names(),
        }

    def _versions(self) -> list[int]:
        return [fragment.version for fragment in self.state.fragments]

    # Methods of the thread

    def _run(self) -> None:
        """Run a round for each submitted pseudo-gradient, until None is submitted.

        The training thread waits for the result, or the error, in the future `ended` of each
        pseudo-gradient.
        """
        # enter() may have taken only anchors from another job, so that training could begin. Their
        # momenta are taken here, before the first outer step needs them.
        self.taker.take_momenta()
        while (in_flight := self._inbox.get()) is not None:
            try:
                in_flight.ended.set_result(self._round(in_flight))
            except BaseException as error:  # noqa: BLE001 - raised where the training thread waits for it
                in_flight.ended.set_exception(error)

    def _round(self, in_flight: InFlight) -> RoundResult:
        """Run a round for a submitted pseudo-gradient, and return its result; collective."""
        begin = time.monotonic()
        self.taker.wait_for_momenta()  # take_momenta() has ended: this raises its error
        sent_before = self.links.sent
        fragment = self.state.fragments[in_flight.fragment]
        momentum_square = 0.0
        if self.algorithm.needs_gap and fragment.momentum is not None:
            momentum_square = square_of(fragment.momentum.float())
        # From here on, the three values are those of the whole job.
        square, momentum_square, tokens = self.job_ranks.all_reduce_sum(
            [self._squared_norm_to_send(in_flight), momentum_square, in_flight.tokens]
        )
        is_finite = not math.isnan(square) and square != math.inf
        norm = square**0.5 if is_finite else None
        report = self._ready_report(in_flight, norm, tokens)
        verdict = self.coordinator.ask("ready", report)
        # The exchange, the check and the commit, in the order of the coordinator's verdicts.
        result = self._follow_verdicts(in_flight, verdict, momentum_square)
        result.bytes = self.links.sent - sent_before
        result.seconds = time.monotonic() - begin
        result.norm = norm or 0.0
        if self.settings.seconds:  # `every` is given in seconds: rank 0 sets the length of periods
            result.period = int(self.job_ranks.broadcast_from_rank_0(in_flight.period))
        self.number = result.round
        return result

    def _squared_norm_to_send(self, in_flight: InFlight) -> float:
        """Return the squared length of the vector that the codec will encode, over this rank's elements.

        That is the pseudo-gradient, plus the rounding errors of earlier rounds if the codec keeps them.
        """
        residual = self.state.fragments[in_flight.fragment].residual
        if residual is None:
            return square_of(in_flight.gradient)
        return square_of(torch.add(in_flight.gradient, residual))

    def _ready_report(
        self, in_flight: InFlight, norm: float | None, tokens: float
    ) -> dict[str, Any]:
        """Return the document of the request "ready" (reports.ReadyReport); collective.

        A pseudo-gradient counts only if the report has its norm.

        Args:
            in_flight: This job's pseudo-gradient.
            norm: The pseudo-gradient's Euclidean norm over all ranks; None: it is not finite.
            tokens: Tokens that the job has read for the pseudo-gradient.
        """
        index = in_flight.fragment
        claims = self.claims.renew(in_flight.versions)  # versions and checksums of all fragments
        report = {"round": in_flight.number, "fragment": index, "tokens": tokens, **claims}
        # A checksum with the salt of this round cannot be copied from another job.
        salt = self.coordinator.salt_of(in_flight.number)  # "": rank 0 has no salt for this round
        if salt and claims["checksums"][index]:
            report["salted"] = self.claims.salted(index, salt)
            report["salt_round"] = in_flight.number
        is_outdated = in_flight.anchor_version != self.state.fragments[index].version
        if is_outdated:
            report["why"] = "it has just taken these weights from another job"
        elif norm is not None:
            report["norm"] = norm
        return report

    def _follow_verdicts(
        self, in_flight: InFlight, verdict: Verdict, momentum_square: float
    ) -> RoundResult:
        """Follow the coordinator's verdicts, one after the other, until the round has ended; collective.

            go        exchange pseudo-gradients with these members; again, if some of them were lost
            check     report digests of the received data; the coordinator compares them
            commit    aggregate the pseudo-gradients, for the outer step
            behind    this job's weights are outdated: take fragments from another job
            others    ("void", "skip") nothing changes

        Args:
            in_flight: This job's pseudo-gradient.
            verdict: The first verdict.
            momentum_square: Squared length of the fragment's momentum, for algorithms that need it.
        """
        received: _Received | None = None  # result of the last exchange
        members: dict[str, float] = {}  # job -> share of its pseudo-gradient in the sum
        while True:
            name = verdict["verdict"]
            if name == "go":
                members = verdict["members"]
                received = self._exchange(in_flight, verdict)
                report = {"unreached": received.unreached, "faults": received.faults}
                verdict = self._send_report("done", in_flight, verdict, report)
            elif name == "check" and received is not None:
                report = self._checked_report(
                    in_flight, received, members, verdict, momentum_square
                )
                verdict = self._send_report("checked", in_flight, verdict, report)
            elif name == "commit" and received is not None:
                return self._commit(in_flight, received, members, verdict)
            elif name == "behind":
                return self.take_weights(verdict)
            else:
                why = str(verdict.get("why", "the round was over already"))
                number = int(verdict.get("round", in_flight.number))
                left_out = verdict.get("left_out", {})
                return RoundResult("void", number, why, left_out=left_out)

    def _send_report(
        self, op: str, in_flight: InFlight, verdict: Verdict, report: Mapping[str, Any]
    ) -> Verdict:
        """Report the end of an exchange or a check, and return the next verdict; collective."""
        attempt = {"round": in_flight.number, "attempt": verdict["attempt"]}
        return self.coordinator.ask(op, {**attempt, **report})

    def _exchange(self, in_flight: InFlight, verdict: Verdict) -> _Received:
        """Exchange pseudo-gradients with the other members of a round, once; collective.

        Args:
            in_flight: This job's pseudo-gradient.
            verdict: The verdict "go". It has the members (job -> share of its pseudo-gradient in the sum;
                0: it only receives), the incarnation (start) of each job, and the norm of its
                pseudo-gradient that each job has reported (claimed).

        Returns:
            The received pseudo-gradients; without them, the jobs with which the exchange failed.
        """
        members = verdict["members"]
        self.links.use_relay(verdict["relayed"])
        others = {name: verdict["incarnations"][name] for name in members if name != self.job}
        fragment = self.state.fragments[in_flight.fragment]
        found = self.remote.find(others)  # addresses and shards of the other jobs' ranks
        failed = found.missing
        attempt = self._attempt(members, fragment, found)
        gradients: list[torch.Tensor] = []
        if not failed:
            try:
                gradients = attempt.run(
                    self.links,
                    number=in_flight.number,
                    attempt=int(verdict["attempt"]),
                    fragment=fragment,
                    gradient=in_flight.gradient,
                    patience_s=self.settings.timeout,
                )
            except PeersFailed as error:
                failed = error.jobs
        names = attempt.contributors  # members with a share above 0
        gram = torch.zeros(len(names), len(names), dtype=torch.float64)
        if gradients:
            gram = aggregation.products(gradients)
        is_unreached = [name in failed for name in members]
        sums = aggregation.sum_over_ranks(self.job_ranks, is_unreached, gram)
        unreached = [name for name, ranks in zip(members, sums.failures) if ranks > 0]
        self.remote.forget(unreached)
        faults: dict[str, str] = {}
        if not unreached:
            # Jobs whose data is implausible by the Gram matrix: by its length (it must not exceed the
            # claimed norm), or by its direction. A job does not accuse itself.
            faults = self._screening.faults(in_flight.fragment, names, sums.gram, verdict["norms"])
            faults.pop(self.job, None)
        return _Received(attempt, names, gradients, sums.gram, unreached, faults)

    def _attempt(
        self, members: Mapping[str, float], fragment: Fragment, found: FoundJobs
    ) -> Attempt:
        """Build the exchange of a fragment with ranks of other jobs; its run() performs it.

        Args:
            members: Job -> share of its pseudo-gradient in the sum; 0: it only receives.
            fragment: Part of the model to exchange.
            found: The other jobs' ranks, with addresses and the elements that each exchanges.
        """
        ranges_of = {self.job: self.ranges}
        peers = {}
        for name, job in found.jobs.items():
            ranges_of[name] = job.ranges
            for rank, peer in job.peers.items():
                peers[name, rank] = peer
        # Ranges of elements that one rank of each job exchanges; this rank takes part in its own.
        ranges = shared_ranges(ranges_of, fragment.start, fragment.stop)
        pieces = [span for span in ranges if span.owners[self.job] == self.job_ranks.rank]
        return Attempt(self.job, members, pieces, peers, self.codec)

    def _checked_report(
        self,
        in_flight: InFlight,
        received: _Received,
        members: Mapping[str, float],
        verdict: Verdict,
        momentum_square: float,
    ) -> dict[str, Any]:
        """Return this job's report about the received data, for the request "checked"; collective.

            digests   sending job -> digest of its data, salted so that it cannot be copied
            factors   job -> factor of its pseudo-gradient in the aggregate (a weighted sum)
            gap       divisor of an aggregate that is applied late (CO2); 1 in other algorithms

        Args:
            in_flight: This job's pseudo-gradient.
            received: Result of _exchange().
            members: Job -> share of its pseudo-gradient.
            verdict: The coordinator's order to check: salt, excluded jobs, number of the check.
            momentum_square: Squared length of the fragment's momentum.
        """
        # Excluded jobs do not count: drop their parts of the Gram matrix, and their shares.
        counting = [
            index for index, name in enumerate(received.names) if name not in verdict["excluded"]
        ]
        counting_names = [received.names[index] for index in counting]
        gram = received.gram[counting][:, counting]
        total_share = sum(members[name] for name in counting_names)
        shares = [members[name] / total_share for name in counting_names]
        factors = aggregation.coefficients(self.settings, gram, shares)
        factors_vector = torch.tensor(factors, dtype=torch.float64)
        # |sum of c_j d_j|^2 = c' G c, with the factors c and the Gram matrix G.
        aggregate_square = float(factors_vector @ gram @ factors_vector)
        return {
            "digests": self._digests(in_flight, received, str(verdict["salt"])),
            "factors": dict(zip(counting_names, factors)),
            "gap": self.algorithm.gap_of(momentum_square, aggregate_square),
            "check": verdict["check"],
        }

    def _digests(self, in_flight: InFlight, received: _Received, salt: str) -> dict[str, str]:
        """Return for each job a salted digest of the data that it sent to all our ranks; collective."""
        fragment = self.state.fragments[in_flight.fragment]
        digests_of_rank = [
            received.attempt.digest(fragment, gradient, salt) for gradient in received.gradients
        ]
        digests = map(hexadecimal, self.job_ranks.all_reduce_checksums(digests_of_rank))
        return dict(zip(received.names, digests))

    def _commit(
        self,
        in_flight: InFlight,
        received: _Received,
        members: Mapping[str, float],
        verdict: Verdict,
    ) -> RoundResult:
        """Aggregate the pseudo-gradients of a committed round; return its result; collective.

        The outer step is not taken here but queued (`pending`): the training thread takes it
        `delay` inner steps after it has sent the pseudo-gradient.

        Args:
            in_flight: This job's pseudo-gradient.
            received: Result of _exchange().
            members: Job -> share of its pseudo-gradient.
            verdict: The reply "commit", with the factors of the jobs that count.
        """
        fragment = self.state.fragments[in_flight.fragment]
        factors = verdict["factors"]  # job -> factor of its pseudo-gradient
        counting = {  # job -> its pseudo-gradient
            name: gradient
            for name, gradient in zip(received.names, received.gradients)
            if name in factors
        }
        aggregate = aggregation.combine(
            self.settings, list(counting.values()), [factors[name] for name in counting]
        )
        contributes = self.job in factors
        distance_square = square_of(in_flight.gradient - aggregate) if contributes else 0.0
        aggregate_square, distance_square = self.job_ranks.all_reduce_sum(
            [square_of(aggregate), distance_square]
        )
        shares = {name: members[name] if name in factors else 0.0 for name in members}
        momentum = self.algorithm.momentum_of([shares[name] for name in counting])
        residual = received.attempt.residual if contributes else None
        self._screening.remember(in_flight.fragment, received.gram)
        with self.state.lock:
            fragment.pending.append(
                Pending(in_flight.number, aggregate, momentum, float(verdict["gap"]), residual)
            )
        # Distance of this job's pseudo-gradient from the aggregate, relative to the aggregate's norm.
        drift = None
        if aggregate_square > 0 and len(counting) > 1 and contributes:
            drift = (distance_square / aggregate_square) ** 0.5
        return RoundResult(
            "commit", in_flight.number, members=shares, left_out=verdict["left_out"], drift=drift
        )

    def take_weights(self, verdict: Verdict) -> RoundResult:
        """Take newer parts of the model (fragments) from another job; collective.

        Args:
            verdict: The verdict "behind". It names the other job, the fragments, and their versions.

        Returns:
            A result with verdict "taken", or "void" with the reason.
        """
        # With rounds=async, training goes on meanwhile. So the weights are queued until training
        # takes them (add_replacement). Otherwise training waits for this round: replace at once.
        is_concurrent = self.settings.rounds == "async"
        store = self.state.add_replacement if is_concurrent else self.state.replace
        return self.taker.take(verdict, store)
