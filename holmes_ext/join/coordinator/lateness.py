"""Jobs that let the others wait: they are marked late, and sit out rounds if they are late repeatedly.

Pure: no clock, no network.
"""

from __future__ import annotations

from holmes_ext.join.coordinator.state import Member, RunState

#: Delays in a row after which a job does not have to sit out rounds yet.
_FREE_DELAYS = 2
#: Number of delays that count for a job if it leaves a round after the exchange has begun.
_UNFINISHED_DELAYS = 2
#: Rounds that a job sits out at most.
_LONGEST_REST = 31
#: Largest exponent of two for the rounds that a job sits out, long beyond _LONGEST_REST.
_MOST_DOUBLINGS = 30


def mark_late(state: RunState, member: Member, number: int) -> None:
    """Mark a job as late, because it was not ready for round `number` before the deadline.

    The others wait for the job again as soon as it reports. From its third delay in a row on, the
    job must also sit out rounds: one round, then three, seven, ...
    """
    member.state = "late"
    count_delay(state, member, number)


def mark_unfinished(state: RunState, member: Member, number: int) -> None:
    """Mark a job as late, because it has left round `number` after the exchange had begun.

    This counts as two delays: the other jobs have waited for this job's data, and must now repeat the
    exchange. A job that has left the run stays "gone", but its delays count when it is back.
    """
    if member.state == "in":
        member.state = "late"
    count_delay(state, member, number, delays=_UNFINISHED_DELAYS)


def count_delay(state: RunState, member: Member, number: int, delays: int = 1) -> None:
    """Count delays of a job, and let it sit out rounds if it has caused too many in a row.

    Args:
        state: State of the run.
        member: The job.
        number: Current round.
        delays: Number of delays.
    """
    member.missed += 1  # rounds in all
    member.delays_in_a_row += delays  # since its last committed round
    doublings = max(0, min(member.delays_in_a_row - _FREE_DELAYS, _MOST_DOUBLINGS))
    rest_rounds = min(2**doublings - 1, _LONGEST_REST)  # rounds to sit out: 0, then 1, 3, 7, ...
    if rest_rounds:
        member.sits_out_until = number + 1 + rest_rounds
        state.events.append(
            f"job {member.name} has delayed rounds {member.delays_in_a_row} times in a row: it sits out "
            f"until round {member.sits_out_until}"
        )


def sits_out(state: RunState, member: Member, number: int) -> bool:
    """Return whether a job that asks for a round gets none, because it was late too often.

    Repeated delays make a job sit out rounds (count_delay). It takes part all the same if no other
    job is in training, or if all others sit out, too: otherwise there would be no round at all.

    Args:
        state: State of the run; `state.number` is its current round.
        member: The job, with `sits_out_until`: the first round in which it may take part again.
        number: Round for which the job asks. Not used if the run is in a later round: a job that was
            late may ask for a round that is over.
    """
    number = max(number, state.number)
    others = [
        other
        for other in state.members.values()
        if other is not member and other.state == "in" and number >= other.sits_out_until
    ]
    return number < member.sits_out_until and bool(others)
