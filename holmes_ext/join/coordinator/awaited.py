"""Jobs that a restarted coordinator waits for, because others name them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from holmes_ext.join.coordinator.state import MOST_JOBS, RunState


class AwaitedPeers:
    """Jobs that have not said hello to this coordinator, but that others know."""

    def __init__(self, state: RunState):
        self._state = state
        self._since: dict[str, float] = {}  # by name: when another job told of it

    def expect(self, names: Iterable[str], now: float) -> None:
        """Wait for jobs that another job knows, if the coordinator has just been started."""
        if now - self._state.started >= self._patience_s():
            return
        for name in names:
            if name not in self._state.members and len(self._since) < MOST_JOBS**2:
                self._since.setdefault(name, now)

    def arrived(self, name: str) -> None:
        """Wait no longer for this job, if it was waited for."""
        self._since.pop(name, None)

    def may_arrive(self, now: float) -> bool:
        """Return whether one of the jobs may still come."""
        patience_s = self._patience_s()
        return any(now < since + patience_s for since in self._since.values())

    def hide_truth(self, now: float) -> bool:
        """Return whether it cannot be known yet which versions most jobs of the run have."""
        return not self._state.committed and self.may_arrive(now)

    def _patience_s(self) -> float:
        """Return how long the jobs are waited for, in seconds.

        That is a median, as one job may tell of jobs that do not exist.
        """
        return statistics.median_low(member.hello.timeout for member in self._state.present())
