"""Thread that runs the outer rounds of a rank of a joined job with rounds=async.

The job asks the coordinator for rounds all the time, and contributes to a round whenever it is ready. The
rounds threads of all ranks of the job repeat these steps:

1. Rank 0: collect the pseudo-gradients that training has submitted; broadcast their number. The other ranks
   wait until their training threads have submitted as many, so that all ranks offer the same
   pseudo-gradients.
2. If a fragment has MOST_PENDING aggregates that training has not applied, sleep, and begin again.
3. Rank 0: send "next" with the offers, and broadcast the verdict.
       go       run the round as round_runner.py does; without an offer for its fragment, only receive
       behind   take fragments from another job
       idle     there is no round at the moment
4. Append the result of the round to a list. The training thread takes results from the list at the end of
   its period (rolling_loop.py) and applies the pending aggregates.

Invariant: all ranks append the same results in the same order, so the training threads can agree on a
number of results, and then apply equal results. No thread waits for ever: requests, exchanges and collectives
have timeouts (round_runner.py), and the training thread stops waiting when the rounds thread has ended.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, NamedTuple

from holmes_ext.join.rounds.aggregate import square_of
from holmes_ext.join.rounds.coordinator_link import Verdict
from holmes_ext.join.rounds.in_flight import InFlight, RoundResult
from holmes_ext.join.rounds.round_runner import RoundRunner

#: Aggregates of a fragment that may wait for training; then no round is run until training applies some.
MOST_PENDING = 3
#: Seconds until the next request while training is behind, or after a request without an answer.
_REST_S = 0.2
#: Seconds until the next request while the coordinator cannot be reached.
_AWAY_REST_S = 2.0


class EndedRound(NamedTuple):
    """Result of a round, with the pseudo-gradient that this job contributed; for the training thread."""

    contribution: InFlight | None  # this job's pseudo-gradient; None: it only received
    result: RoundResult


class RollingRunner(RoundRunner):
    """Background thread that runs a rank's rounds without holding up training (rounds=async).

    Training submits pseudo-gradients and goes on. The thread offers them to the coordinator again
    and again. When the coordinator begins a round, the thread exchanges the pseudo-gradient of that
    round with other jobs. Training takes the results with results_until().
    """

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        #: Number of rounds that have ended on this rank, in the order that all ranks of the job share.
        self.ended = 0
        # Fragment -> pseudo-gradient of this job that waits for a round.
        self._offers: dict[int, InFlight] = {}
        self._results: list[EndedRound] = []  # that training has not taken
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def results_until(self, count: int) -> list[EndedRound]:
        """Return the results of the first `count` rounds, except for those returned by earlier calls.

        The call waits until that many rounds have ended on this rank. All ranks of the job call it
        with the same `count`, so that they apply the same rounds at the same step.

        Args:
            count: Number of rounds since the start of the job.

        Raises:
            BaseException: The exception that ended the rounds thread.
        """
        with self._changed:
            while self.ended < count and self._error is None and self.running:
                self._changed.wait(1.0)
            if self._error is not None:
                raise self._error
            already_taken = self.ended - len(self._results)  # by earlier calls
            new = count - already_taken
            results = self._results[:new]
            self._results = self._results[new:]
            return results

    # Methods of the thread

    def _run(self) -> None:
        """Ask the coordinator for rounds and run them, again and again until training ends."""
        try:
            self.taker.take_momenta()
            self.taker.wait_for_momenta()  # raises the error that take_momenta() met
            while self._collect_submitted():
                self._request_round()
        except BaseException as error:  # noqa: BLE001 - raised where the training thread waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _collect_submitted(self) -> bool:
        """Move submitted pseudo-gradients from the queue to the offers; collective.

        An offer informs the coordinator that a pseudo-gradient can be exchanged. Rank 0 takes all
        queued pseudo-gradients; the other ranks take equally many, and wait for them if needed.

        Returns:
            False after training has ended (None in the queue).
        """
        new: list[InFlight] = []
        is_over = False  # training has ended: there is None in the queue
        if self.job_ranks.rank == 0:  # empty the queue, without waiting
            while not is_over:
                try:
                    submitted = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if submitted is None:
                    is_over = True
                else:
                    new.append(submitted)
        count, is_over = self.job_ranks.broadcast_from_rank_0([len(new), is_over])
        while len(new) < count:  # on the other ranks
            submitted = self._inbox.get()
            if submitted is None:
                return False
            new.append(submitted)
        for submitted in new:
            self._offers[submitted.fragment] = submitted
        return not is_over

    def _request_round(self) -> None:
        """Ask the coordinator for a round, and run it if there is one; collective.

        The request has the version and checksum of each fragment, and offers of the
        pseudo-gradients that wait for a round. Replies:

            go          run the round
            behind      this job's weights are outdated: take fragments from another job
            idle        there is no round at the moment: return, and be called again
            void        the coordinator did not answer, or this job's offers are unusable

        The call only sleeps a moment while MOST_PENDING aggregates of a fragment wait for training
        to apply them.
        """
        most_pending = max(len(fragment.pending) for fragment in self.state.fragments)
        training_lags = self.job_ranks.broadcast_from_rank_0(most_pending >= MOST_PENDING)
        if training_lags:
            time.sleep(_REST_S)
            return
        # In the order of the fragments, because _offer() is collective.
        offers = [self._offer(in_flight) for _, in_flight in sorted(self._offers.items())]
        claims = self.claims.renew(self._versions())
        verdict = self.coordinator.ask("next", {**claims, "offers": offers})
        match verdict["verdict"]:
            case "go":
                self._run_round(verdict)
            case "behind":
                result = self.take_weights(verdict)
                # Their pseudo-gradients are differences to anchors that do not exist any more.
                for fragment in result.fragments:
                    self._offers.pop(fragment, None)
                self._append_result(None, result)
            case "idle":
                pass
            case _:
                self._handle_void(verdict)

    def _offer(self, in_flight: InFlight) -> dict[str, Any]:
        """Return the description of a pseudo-gradient that this job offers for a round; collective.

        Args:
            in_flight: The pseudo-gradient: this rank's elements.

        Returns:
            "fragment": its index. "tokens": tokens of the whole job. "norm": Euclidean norm over all
            ranks; missing if it is not finite, so that the coordinator does not count this job.
            "slack_s": seconds until training would apply the aggregate; the coordinator waits for
            other jobs for a part of this time.
        """
        square, tokens = self.job_ranks.all_reduce_sum(
            [self._squared_norm_to_send(in_flight), in_flight.tokens]
        )
        offer = {"fragment": in_flight.fragment, "tokens": tokens, "slack_s": in_flight.slack_s}
        if 0 <= square < float("inf"):  # neither infinite nor NaN
            offer["norm"] = square**0.5
        return offer

    def _run_round(self, verdict: Verdict) -> None:
        """Run the round of a verdict "go" to its end, and append its result; collective.

        If this job has a share in the sum, it contributes the pseudo-gradient that it has offered for the
        fragment. Otherwise it only receives the sum. Afterwards the offer is

            dropped   if the pseudo-gradient counted in a committed round, or if this job was left
                      out because the pseudo-gradient is unusable
            kept      in all other cases, such as a void round: it is offered again

        Args:
            verdict: Has the round's number, its fragment, and its members with their shares of the sum.
        """
        begin = time.monotonic()
        sent_before = self.links.sent
        number = int(verdict["round"])
        index = int(verdict["fragment"])
        contribution: InFlight | None = None
        if verdict["members"].get(self.job, 0) > 0:  # with share 0 the job only receives
            contribution = self._offers.get(index)
        in_flight = contribution
        if in_flight is None:
            # The job only receives. The exchange needs some tensor of the right shape and dtype, such as
            # the anchor, but does not send it.
            anchor = self.state.fragments[index].anchor
            in_flight = InFlight(number, index, anchor, anchor_version=0, tokens=0.0, step=0)
        in_flight.number = number
        # The exchange, the check and the commit, in the order of the coordinator's verdicts. Only CO2 needs
        # the momentum's length, and CO2 is not possible with rounds=async.
        result = self._follow_verdicts(in_flight, verdict, momentum_square=0.0)
        result.fragments = [index]
        result.bytes = self.links.sent - sent_before
        result.seconds = time.monotonic() - begin
        if contribution is not None:
            [square] = self.job_ranks.all_reduce_sum([square_of(contribution.gradient)])
            result.norm = square**0.5
            has_counted = result.verdict == "commit" and result.members.get(self.job, 0) > 0
            is_left_out = self.job in result.left_out
            if has_counted or is_left_out:
                del self._offers[index]
        self._append_result(contribution, result)

    def _handle_void(self, verdict: Verdict) -> None:
        """Record the result "void" of a request for a round.

        The request offered this job's pseudo-gradients that wait for a round (its offers). The verdict's
        `left_out` (job -> reason) shows the cause:

            has this job      its offers are unusable: drop them. Training sees this in the result,
                              and sets its local weights to the anchors (RollingLoop._apply)
            is empty          the coordinator did not answer: keep the offers, and sleep before the next
                              request. Sleep longer if the coordinator cannot even be reached (is_away)
            has other jobs    a round ended without an outer step because of them: keep the offers
        """
        result = RoundResult(
            "void",
            round=int(verdict.get("round", self.number)),
            why=str(verdict.get("why", "")),
            left_out=verdict.get("left_out", {}),
        )
        if self.job in result.left_out:
            self._offers.clear()
        elif not result.left_out:  # the coordinator did not answer
            time.sleep(_AWAY_REST_S if verdict.get("is_away") else _REST_S)
        self._append_result(None, result)

    def _append_result(self, contribution: InFlight | None, result: RoundResult) -> None:
        self.number = result.round
        with self._changed:
            self._results.append(EndedRound(contribution, result))
            self.ended += 1
            self._changed.notify_all()
