"""The part of the coordinator that depends on how the jobs of a run are synchronized. Pure."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.replies import Reply
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.state import RunState
from holmes_ext.join.coordinator.versions import Versions


class RoundPolicy(Protocol):
    """Decides when a round begins, and which jobs exchange in it."""

    #: The `op` of the question with which a job of this policy asks for its next round.
    question: ClassVar[str]

    def __init__(
        self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers
    ): ...

    @staticmethod
    def read(document: dict[str, Any], fragments: int) -> Any:
        """Return the report that the question contains; fragments: number of fragments of the run.

        Raises:
            HolmesError: The report is malformed.
        """

    def answer(self, name: str, report: Any, now: float) -> Reply | None:
        """Return what job `name` does; None: nothing is decided yet, and the job has to ask again.

        The coordinator has accepted what the report claims of the job's weights.

        Raises:
            HolmesError: The report cannot be true.
        """
