"""Interface of a round policy: the coordinator's rules for when a round begins and who exchanges in it.

`lock_step.LockStepRounds` (setting rounds=sync) makes all jobs wait for each other;
`rolling.RollingRounds` (rounds=async) lets each job contribute when it is ready.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.replies import Reply
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.state import RunState
from holmes_ext.join.coordinator.versions import Versions


class RoundPolicy(Protocol):
    """Rules for when a round begins and which jobs exchange pseudo-gradients in it."""

    #: Value of `op` in the request with which a job of this policy asks for its next round.
    question: ClassVar[str]

    def __init__(
        self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers
    ): ...

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> Any:
        """Return the report that a job's request contains.

        Args:
            document: The request, as parsed JSON.
            fragments: Number of fragments into which the run divides the model.

        Raises:
            HolmesError: The report is malformed.
        """

    def answer(self, name: str, report: Any, now: float) -> Reply | None:
        """Return the verdict for job `name`; None while nothing is decided and it must ask again.

        The coordinator has already checked the versions of fragments (rounds of their last outer
        steps) that the report contains.

        Args:
            report: As `read` returns it.
            now: Time on the coordinator's clock, in seconds.

        Raises:
            HolmesError: The report contradicts the state of the run.
        """
