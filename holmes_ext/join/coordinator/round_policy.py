"""Interface of a round policy: the coordinator's rules for when a round begins and which jobs are in it.

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

    #: Value of `op` in a job's request for its next round under this policy.
    question: ClassVar[str]

    def __init__(
        self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers
    ): ...

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> Any:
        """Return the report that a job's request contains.

        Args:
            document: The request, as parsed JSON.
            fragments: Number of fragments (parts of the model) in this run.

        Raises:
            HolmesError: The report is malformed.
        """

    def answer(self, name: str, report: Any, now: float) -> Reply | None:
        """Return the reply to a request of job `name` for its next round; None: it must ask again.

        None means that nothing is decided yet. The key "verdict" of a reply has a value of this list:

            go        exchange pseudo-gradients with the members that the reply names
            behind    first take newer weights from another job
            skip      a round takes place without this job
            void      the round has ended without an outer step, or cannot use this job's data

        The coordinator has already checked the versions of fragments (rounds of their last outer
        steps) that the report contains.

        Args:
            name: Name of the job.
            report: The job's request, as read() of the same policy has parsed it.
            now: Time on the coordinator's clock, in seconds.

        Raises:
            HolmesError: The report contradicts the state of the run.
        """
