"""Jobs that a restarted coordinator still expects, because other jobs report them as their peers.

A restarted coordinator starts empty. The first jobs that reconnect list the peers they trained with;
until those peers reconnect too (or their time is over), the coordinator decides nothing that needs a
majority of the run. Pure: no clock, no network.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from holmes_ext.join.coordinator.state import MOST_JOBS, RunState


class AwaitedPeers:
    """Jobs that a restarted coordinator still expects to reconnect.

    A restart loses the list of jobs. Each job that reconnects names its peers: the jobs with which it
    has trained. Peers that have not connected since the restart are expected here, for a limited
    time.
    """

    def __init__(self, state: RunState):
        self._state = state
        self._since: dict[str, float] = {}  # expected job -> time when another job first named it

    def expect(self, names: Iterable[str], now: float) -> None:
        """Add the peers of a reconnecting job to the jobs that are expected to reconnect, too.

        A restarted coordinator does not know the jobs of the interrupted run. So for a limited time
        after its start, its decisions wait for the expected jobs. Later, this call has no effect.

        Args:
            names: The job's peers: other jobs with which it has trained.
            now: Current time, in seconds.
        """
        if now - self._state.started >= self._patience_s():
            return
        for name in names:
            # At most MOST_JOBS jobs, each with MOST_JOBS peers: further names are invented.
            if name not in self._state.members and len(self._since) < MOST_JOBS**2:
                self._since.setdefault(name, now)

    def arrived(self, name: str) -> None:
        """Stop waiting for a job, because it has connected."""
        self._since.pop(name, None)

    def may_arrive(self, now: float) -> bool:
        """Return whether the coordinator still waits for an expected job: one has not timed out yet."""
        patience_s = self._patience_s()
        return any(now < since + patience_s for since in self._since.values())

    def majority_is_unknown(self, now: float) -> bool:
        """Return whether it is too early to say which weights most jobs of the run have.

        That is so while no round was committed since the start of the coordinator, and an expected job may
        still reconnect.
        """
        return not self._state.committed and self.may_arrive(now)

    def _patience_s(self) -> float:
        """Return how long the coordinator waits for each expected job, in seconds.

        It is the median of the timeouts of the connected jobs, because a single job may name peers
        that do not exist and set any timeout.
        """
        return statistics.median_low(member.hello.timeout for member in self._state.present())
