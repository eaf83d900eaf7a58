"""Life of a round: it is opened, its members exchange pseudo-gradients, and it ends as commit or void.

A committed round is an outer step of a fragment (part of the model) in all its members. A void round changes
nothing: the jobs keep their pseudo-gradients for the fragment's next round. Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holmes_ext.join.coordinator.reports import Claim
from holmes_ext.join.coordinator.state import Member, RoundState, RunState, least_jobs

#: Number of members of a round for which neither member is in the majority.
_TWO = 2
#: Rounds that are remembered, for jobs that report late.
_REMEMBERED = 64


class Rounds:
    """Transitions of the rounds of a run: open, begin the exchange, commit, void.

    A round exchanges the pseudo-gradients of a fragment, a part of the model's parameters.
    """

    def __init__(self, state: RunState):
        self._state = state
        self._usual_norms: dict[int, list[float]] = {}  # fragment -> norms in its recent rounds

    def open(self, number: int, fragment: int, now: float) -> RoundState:
        """Open round `number` of a fragment (part of the model), and forget rounds that are long over."""
        state = self._state
        round_state = RoundState(number, fragment, opening_time=now)
        state.rounds[number] = round_state
        state.number = number
        for past_number in list(state.rounds):
            if past_number <= number - _REMEMBERED:
                del state.rounds[past_number]
        return round_state

    def usual_norms(self, fragment: int) -> list[float]:
        """Return the norms of the recent pseudo-gradients of a fragment (part of the model).

        It is the list itself, not a copy: the caller appends the norms of the current round.
        """
        return self._usual_norms.setdefault(fragment, [])

    def begin_exchange(
        self,
        round_state: RoundState,
        members: Sequence[Member],
        weights: Mapping[str, float],
        electorate: Collection[Member],
        now: float,
    ) -> bool:
        """Begin the exchange of pseudo-gradients, or void the round if too few jobs contribute.

        The jobs in `weights` contribute. They must be at least half of the jobs in `electorate`, and at
        least as many as the setting `min` of these jobs demands (least_jobs). Of an electorate of 5 with
        min=2, at least 3 must contribute.

        Args:
            round_state: The round.
            members: Jobs that take part.
            weights: Member -> weight of its pseudo-gradient in the sum, not normalized; members without
                a weight only receive.
            electorate: Jobs that are ready for the round: the members, and jobs that cannot take part now,
                for example because of outdated weights.
            now: Current time, in seconds.

        Returns:
            Whether the exchange has begun.
        """
        total = sum(weights.values()) or 1.0  # without weights, all shares are 0
        round_state.members = {
            member.name: weights.get(member.name, 0.0) / total for member in members
        }
        round_state.electorate = {member.name for member in electorate}
        least_contributors = least_jobs(electorate)
        if weights and len(weights) >= least_contributors:
            # Pairs of members that have no working connection (failed pairs) send their data through
            # a relay.
            round_state.relayed = self._state.failed_pairs.relayed(round_state.members, now)
            round_state.attempt = 1  # the members get "go"
            round_state.exchange_begin = now
            round_state.attempt_begin = now
            round_state.last_report = now
            return True
        left_out = "".join(
            f"; {name} is left out: {why}" for name, why in round_state.left_out.items()
        )
        self.void(round_state, f"{len(weights)} of min={least_contributors} jobs" + left_out)
        return False

    def note_left_out(
        self,
        number: int,
        members: Sequence[Member],
        left_out: Collection[str],
        why: str = "it and another member cannot exchange data",
    ) -> None:
        """Record the jobs that round `number` leaves out because of a conflict between two jobs.

        Args:
            number: Number of the round.
            members: All jobs that could take part.
            left_out: Names of those that are left out. The next conflict of the pair leaves out the other
                job.
            why: Reason for the log.
        """
        for member in members:
            if member.name in left_out:
                member.dropped_in = number
                self._state.events.append(
                    f"round {number} goes on without job {member.name}: {why}"
                )

    def commit(self, round_state: RoundState) -> None:
        """Record that a round has succeeded, so that its jobs take the outer step.

        Called on the coordinator, which holds no weights: the jobs apply the aggregate when they
        get its reply. The version of a fragment is the number of the round of its last outer step.
        Jobs that did not take part are marked as outdated.

        Args:
            round_state: The round; its `outcome` becomes "commit".
        """
        state = self._state
        round_state.outcome = "commit"
        state.committed[round_state.fragment] = round_state.number
        # Several jobs have taken a step together: from now on no returning older run replaces this run.
        state.has_joint_commit = state.has_joint_commit or len(round_state.members) > 1
        for member in state.members.values():
            if member.name in round_state.members:
                # The member's version of the fragment from now on.
                member.claims[round_state.fragment] = Claim(round_state.number)
                member.rounds += 1
                member.delays_in_a_row = 0  # the job is punctual again
                member.orders_in_a_row = 0
            else:
                member.is_up_to_date = False  # it missed this outer step
        shares = {  # of the pseudo-gradients that count, for the log
            name: share
            for name, share in round_state.members.items()
            if name not in round_state.excluded
        }
        total = sum(shares.values())
        shares_text = ", ".join(f"{name} {share / total:.2f}" for name, share in shares.items())
        state.events.append(f"round {round_state.number}: commit ({shares_text})")

    def void(self, round_state: RoundState, why: str) -> None:
        """End the round without an outer step; the jobs keep their pseudo-gradients for a later round."""
        round_state.outcome = "void"
        round_state.why = why
        self._state.events.append(f"round {round_state.number}: void: {why}")

    def forget(self) -> None:
        """Forget all commits and void the open rounds, because the jobs of an older run have returned.

        The version of a fragment is the round of its last outer step. Commits tell the coordinator the
        valid version. Without commits, the version that most jobs report is valid.
        """
        self._state.committed.clear()
        for round_state in self._state.rounds.values():
            if not round_state.outcome:
                self.void(round_state, "the run is in a later round")


def two_are_apart(members: Collection[Member], left_out: Collection[str]) -> bool:
    """Return whether the only two members of a round cannot exchange data with each other.

    Of two jobs, neither is in the majority. If a job went on alone, the other would have to take weights
    that it cannot get.

    Args:
        members: All members.
        left_out: Names of those that must be left out because of failed pairs.
    """
    return bool(left_out) and len(members) <= _TWO
