"""Jobs that others waited for in vain; those that are late again and again sit rounds out. Pure."""

from __future__ import annotations

from holmes_ext.join.coordinator.state import Member, RunState

#: Times in a row that a job is waited for in vain without consequence.
_FREE_DELAYS = 2
#: Rounds that a job sits out at most.
_LONGEST_REST = 31


def mark_late(state: RunState, member: Member, number: int) -> None:
    """Stop waiting for a job that others waited for in round `number`.

    From the third time in a row on, the job also sits out: one round, then three, seven, ...
    """
    member.state = "late"
    member.missed += 1
    member.in_vain += 1
    doublings = max(0, min(member.in_vain - _FREE_DELAYS, 30))
    rest_rounds = min(2**doublings - 1, _LONGEST_REST)
    if rest_rounds:
        member.rests_until = number + 1 + rest_rounds
        state.events.append(
            f"job {member.name} was waited for {member.in_vain} times in vain: it sits out until "
            f"round {member.rests_until}"
        )


def sits_out(state: RunState, member: Member, number: int) -> bool:
    """Return whether the job sits out round `number`, or the current one if that is later.

    A job never sits out alone: without others that are in, it takes part.
    """
    others = [
        other for other in state.members.values() if other is not member and other.state == "in"
    ]
    return max(number, state.number) < member.rests_until and bool(others)
