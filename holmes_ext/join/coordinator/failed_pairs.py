"""Pairs of jobs that could not exchange data, and the jobs that a round drops so that all others can.

Each member of a round reports the members with which its exchange failed. Seen as a graph, the members are
vertices and the failed pairs are edges. The jobs to drop are then a vertex cover: at least one end of each
edge. A smallest cover drops as few jobs as possible.

A job that reports falsely, or that fails only with chosen jobs, is an end of every edge that it causes. So
the cover contains at most one other job because of it, however many pairs it causes to fail:

    it reports two or more members, or fails with two or more     it is dropped, the smallest cover
    it reports one member, and no other job reports a failure     it is dropped, as the only reporter
    one member reports it, and no other job reports a failure     that member is dropped

Pure: no clock, no network. Times are seconds on the clock of the coordinator's caller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holmes_ext.join.coordinator.reports import DoneReport

#: Two jobs.
Pair = frozenset[str]
#: Pair whose exchange failed -> those of the two jobs that reported this.
Failures = dict[Pair, frozenset[str]]

#: Seconds for which a pair uses the coordinator's relay before its direct connection is tried again: the
#: first time; the factor by which this time grows each time; and its maximum.
FIRST_RELAYED_S = 60.0
_RELAYED_FACTOR = 4.0
_LONGEST_RELAYED_S = 3600.0
#: A pair that failed over the relay, too, is kept apart for this many times the duration of the failed
#: attempts. So failed attempts take at most a tenth of the time.
_APART_FACTOR = 10.0
#: Steps of the search for the smallest cover; then the best cover so far counts. Up to about 20 failed pairs
#: of any shape, and all stars, cliques and partitions of 64 jobs, need far fewer.
_MOST_STEPS = 20_000
#: Cost of each dropped job. It is larger than the sum of all jobs' places in the order of preference (64
#: jobs), so that the number of dropped jobs counts first.
_COST_OF_JOB = 10_000


def failures_of(reports: Mapping[str, DoneReport], members: Collection[str]) -> Failures:
    """Return the failed pairs of an exchange, each with the jobs that reported it.

    Args:
        reports: Member -> its report.
        members: Members of the round; names of other jobs in a report are ignored.
    """
    reporters: dict[Pair, set[str]] = defaultdict(set)
    for name, report in reports.items():
        for other in report.unreached:
            if other in members and other != name:
                reporters[frozenset((name, other))].add(name)
    return {pair: frozenset(names) for pair, names in reporters.items()}


def only_reporters(failures: Failures) -> set[str]:
    """Return the jobs that report a failed exchange with a job that itself does not report it."""
    return {name for names in failures.values() if len(names) == 1 for name in names}


def names_in(pairs: Iterable[Pair]) -> str:
    """Return the jobs of all pairs, sorted, as a text."""
    return ", ".join(sorted({name for pair in pairs for name in pair}))


class FailedPairs:
    """Memory of the pairs of jobs whose exchange failed.

    A pair whose direct connection failed uses the relay from the next attempt on. A pair that fails over the
    relay, too, is kept apart for a while: no round has both jobs, so that no time is lost with it.
    """

    def __init__(self) -> None:
        self._relayed: dict[Pair, _Relaying] = {}
        self._separations: dict[Pair, _Separation] = {}

    def relay(self, pairs: Iterable[Pair], now: float) -> None:
        """Let pairs use the coordinator's relay from now on, for a while.

        Afterwards a pair uses its direct connection again. If that fails again soon, the pair is relayed for
        longer than the last time: first for a minute, then for 4, 16, and at most 60 minutes.
        """
        self._forget_old(now)
        for pair in pairs:
            lasts_s = FIRST_RELAYED_S
            if pair in self._relayed:  # its direct connection has failed again
                lasts_s = min(_RELAYED_FACTOR * self._relayed[pair].lasts_s, _LONGEST_RELAYED_S)
            self._relayed[pair] = _Relaying(until=now + lasts_s, lasts_s=lasts_s)

    def separate(self, failures: Failures, lost_s: float, now: float) -> None:
        """Keep pairs apart for a while that have failed over the relay, too: no round has both jobs.

        This lasts ten times as long as the failed attempts. If they took 30 s, the two jobs do not meet
        for 300 s.

        Args:
            failures: The pairs -> the jobs that reported the failure.
            lost_s: Seconds that the failed attempts of the round have taken.
            now: Current time, in seconds.
        """
        self._forget_old(now)
        end = now + _APART_FACTOR * lost_s
        for pair, reporters in failures.items():
            # When the two meet again, they first try a direct connection.
            self._relayed.pop(pair, None)
            self._separations[pair] = _Separation(reporters, until=end)

    def relayed(self, names: Collection[str], now: float) -> set[Pair]:
        """Return the pairs of these jobs that use the relay at this time."""
        return {
            pair
            for pair, relaying in self._relayed.items()
            if now < relaying.until and pair <= set(names)
        }

    def apart(self, names: Collection[str], now: float) -> Failures:
        """Return the pairs of these jobs that are kept apart now: no round may have both jobs of a pair.

        separate() keeps a pair apart for a while, after an exchange over the relay has failed, too.

        Returns:
            Pair -> the jobs that reported the failure.
        """
        return {
            pair: separation.reporters
            for pair, separation in self._separations.items()
            if now < separation.until and pair <= set(names)
        }

    def has_failed(self, first: str, second: str) -> bool:
        """Return whether two jobs have lately failed to exchange data, both directly and over the relay."""
        return frozenset((first, second)) in self._separations

    def _forget_old(self, now: float) -> None:
        """Delete pairs whose time apart is over, and pairs whose direct connection works again.

        A direct connection works again if it has not failed for as long as the pair was relayed before. So
        if such a pair fails later, relay() begins with the shortest time again.
        """
        self._relayed = {
            pair: relaying
            for pair, relaying in self._relayed.items()
            if now < relaying.until + relaying.lasts_s
        }
        self._separations = {
            pair: separation
            for pair, separation in self._separations.items()
            if now < separation.until
        }


@dataclass(frozen=True)
class _Relaying:
    """Period in which a pair of jobs exchanges data over the coordinator's relay."""

    until: float  # time at which it ends
    lasts_s: float  # its length in seconds; relay() computes the length of the next period from it


@dataclass(frozen=True)
class _Separation:
    """Period in which no round may have both jobs of a pair, because they could not exchange data."""

    reporters: frozenset[str]  # those of the two jobs that reported this: one or both
    until: float  # time at which it ends


def fewest_to_drop(pairs: Iterable[Pair], by_preference: Iterable[str]) -> set[str]:
    """Return the smallest set of jobs that has at least one job of each pair.

    Of several sets of this size, that with the earliest jobs in the order of preference is returned (the
    smallest sum of their places).

    Args:
        pairs: Failed pairs.
        by_preference: All jobs of the pairs, in the order in which they should rather be dropped.
    """
    neighbours: dict[str, set[str]] = defaultdict(set)
    for first, second in map(tuple, pairs):
        neighbours[first].add(second)
        neighbours[second].add(first)
    cost = {name: _COST_OF_JOB + place for place, name in enumerate(by_preference)}
    search = _CoverSearch(cost)
    search.visit(neighbours, frozenset(), cost_so_far=0)
    return set(search.best)


class _CoverSearch:
    """Branch and bound for the cheapest vertex cover: jobs such that each failed pair has one of them.

    For any job, a cover has either this job or all its neighbours (the jobs of its failed pairs). Both
    ways are tried, first with the job that has most neighbours. So the first cover that is found is the
    one that a greedy search would find.
    """

    def __init__(self, cost: Mapping[str, int]):
        self._cost = cost
        self._steps = 0
        self.best: frozenset[str] = frozenset(cost)  # all jobs are a cover
        self._best_cost = sum(cost.values()) + 1

    def visit(
        self, neighbours: Mapping[str, set[str]], cover: frozenset[str], cost_so_far: int
    ) -> None:
        """Extend a partial cover to the cheapest cover, and store it in `best` if it is better.

        Args:
            neighbours: Graph of the pairs that `cover` does not have: job -> jobs at the other ends.
            cover: Jobs that are chosen already.
            cost_so_far: Sum of the costs of the jobs in `cover`.
        """
        self._steps += 1
        lower_bound = cost_so_far + _COST_OF_JOB * _disjoint_pairs(neighbours)
        if lower_bound >= self._best_cost or self._steps > _MOST_STEPS:
            return
        open_jobs = [name for name, others in neighbours.items() if others]
        if not open_jobs:
            self.best = cover
            self._best_cost = cost_so_far
            return
        # The job with most neighbours; of several such jobs, the job with the lowest cost.
        hub = max(open_jobs, key=lambda name: (len(neighbours[name]), -self._cost[name]))
        # A cover has the hub, or else all its neighbours: try both.
        for chosen in ({hub}, neighbours[hub]):
            uncovered = {
                name: others - chosen for name, others in neighbours.items() if name not in chosen
            }
            added_cost = sum(self._cost[name] for name in chosen)
            self.visit(uncovered, cover | chosen, cost_so_far + added_cost)


def _disjoint_pairs(neighbours: Mapping[str, set[str]]) -> int:
    """Return a lower bound on the number of jobs in a vertex cover (a set with a job of each pair).

    It is the number of pairs without a common job that a greedy search finds. No job is in two of these
    pairs, so a cover needs a different job for each of them, and perhaps more jobs for the other pairs.

    Args:
        neighbours: Job -> the jobs with which it forms a pair.
    """
    used: set[str] = set()
    count = 0
    for name, others in neighbours.items():
        free = others - used
        if name not in used and free:
            used |= {name, min(free)}
            count += 1
    return count
