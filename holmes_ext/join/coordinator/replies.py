"""Replies of the coordinator about a round: JSON documents; their "verdict" names the job's next step.

Pure: no clock, no network.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.join.coordinator.state import RoundState, RunState

Reply = dict[str, Any]


def skip_reply(number: int) -> Reply:
    """Return the reply "skip": the job takes no part in round `number`, and goes on with the next."""
    return {"verdict": "skip", "round": number}


def go_reply(state: RunState, round_state: RoundState) -> Reply:
    """Return the reply "go", on which a job begins the exchange of pseudo-gradients.

    The reply names the round, the fragment (part of the model), the jobs with their shares in the sum,
    and the attempt: an exchange is repeated without jobs that were lost. It also has the norms that the
    jobs report for their pseudo-gradients, and the pairs of jobs that use the coordinator's relay.
    """
    members = round_state.members  # job -> share of its pseudo-gradient in the sum
    # Lengths that the jobs claim for their pseudo-gradients; the receivers check them.
    norms = {
        name: report.norm for name, report in round_state.ready_reports.items() if name in members
    }
    return {
        "verdict": "go",
        "round": round_state.number,
        "attempt": round_state.attempt,
        "members": members,
        "fragment": round_state.fragment,
        "norms": norms,
        "incarnations": {name: state.members[name].incarnation for name in members},
        "left_out": round_state.left_out,
        "relayed": sorted(sorted(pair) for pair in round_state.relayed),
    }


def check_reply(state: RunState, round_state: RoundState) -> Reply:
    """Return the reply that makes members report digests of the data they received.

    The digests contain a salt, a random text that is published only now, after the exchange. So a
    member without the data cannot report the digest of another member.
    """
    return {
        "verdict": "check",
        "round": round_state.number,
        "attempt": round_state.attempt,
        "check": round_state.check_number,
        "salt": state.salt(
            "check", round_state.number, round_state.attempt, round_state.check_number
        ),
        "excluded": round_state.excluded,
    }


def commit_reply(round_state: RoundState) -> Reply:
    """Return the reply that makes a member take the outer step of a committed round."""
    return {
        "verdict": "commit",
        "round": round_state.number,
        "factors": round_state.factors,
        "gap": round_state.gap,
        "left_out": round_state.left_out,
    }


def void_reply(round_state: RoundState) -> Reply:
    """Return the reply to a job that must not take the outer step of a round; `why` is the reason."""
    return {
        "verdict": "void",
        "round": round_state.number,
        "why": round_state.why or "the round went on without this job",
        "left_out": round_state.left_out,
    }
