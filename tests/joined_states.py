"""Fingerprints of the states of joined_model.py: states with equal ones have the same futures.

The exploration of all orders of events (joined_explorer.py) visits states with equal fingerprints only once.
So a fingerprint contains all that later events depend on, and as little else as possible:

    times            relative to now, and equal if longer ago than any rule waits
    checksums        numbered in a fixed order: they depend on all earlier rounds, but it only matters which
                     of them are equal
    past rounds      only if a job may still ask for them, and only what replies depend on
    crashed jobs     nothing of what they last did, and nothing of jobs that the coordinator has given up
    counters, texts  left out if no rule reads them (_IRRELEVANT)

test_explorer.py shows that states with equal fingerprints have the same futures, and that no order of the
coordinator's dicts, which fingerprints ignore, matters.
"""

from __future__ import annotations

import hashlib
import marshal
from dataclasses import fields
from typing import Any, NamedTuple

from joined_model import START, TIMEOUT, ModelJob, World

from holmes_ext.join.coordinator.failed_pairs import FailedPairs
from holmes_ext.join.coordinator.reports import Claim
from holmes_ext.join.coordinator.state import Member, RoundState

#: Class -> fields that no later event depends on, or that _Canonical treats separately.
_IRRELEVANT = {
    "Member": {
        "name",
        "incarnation",
        "hello",
        "missed",
        "rounds",
        "lag_s",
        "telemetry",
        "rivals",
        "since",
        "catches_up_since",
        "orders_in_a_row",
        "taking_since",
    },
    "RoundState": {"left_out", "why", "factors", "gap", "excluded", "exchange_begin"},
    "ModelJob": {"name", "salt", "commits"},
    "ReadyReport": {"claims", "tokens", "norm", "why", "salted", "salt_round"},
}
_PLAIN = frozenset((str, int, bool, type(None)))
#: No rule waits longer, except those about failed pairs (_of_failed_pairs).
_LONGEST_WAIT_S = 2 * TIMEOUT + 1
#: With rounds=async, a job counts as active for 5 s after its last request.
_INACTIVE_S = 6.0
#: With rounds=async, a round waits a quarter of a timeout for a job that takes weights, if the job was told
#: to take them 2 to 5 times in a row.
_LONGEST_TAKING_S = TIMEOUT / 4
_MANY_ORDERS = 6


class Fingerprint(NamedTuple):
    """Hashes of a world."""

    coordinator: bytes  # its rounds and members
    world: bytes  # everything: the coordinator, the jobs and the network


def fingerprint(world: World) -> Fingerprint:
    """Return hashes of everything that later events depend on."""
    state = world.coordinator.state
    rolling = world.coordinator.policies["next"]
    asked_rounds = {job.round for job in world.jobs.values() if not job.crashed} | {state.number}
    present = {member.name for member in state.present()}
    canonical = _Canonical(world.now)
    of_coordinator = [
        [canonical.of(state.rounds.get(number)) for number in sorted(asked_rounds)],
        canonical.of({member.name: member for member in state.present()}),
        state.number,
        canonical.of(state.committed),
        _of_failed_pairs(state.failed_pairs, present, world.now),
    ]
    coordinator = _digest(of_coordinator)
    times = rolling._request_times
    reports = rolling._reports
    # Rounds that a job may still apply: the aggregate of another round is not compared any more.
    unapplied = {
        job.round
        for job in world.jobs.values()
        if not job.crashed and job.step in ("done", "checked")
    }
    aggregates = {key: data for key, data in world.aggregates.items() if key[0] in unapplied}
    of_world = [
        coordinator,
        [(name, world.now - times[name] < _INACTIVE_S) for name in sorted(present & set(times))],
        [(name, sorted(reports[name].offers)) for name in sorted(present & set(reports))],
        sorted(rolling._first_offer_times, key=rolling._first_offer_times.__getitem__),
        canonical.of(rolling._quorum_times),
        sorted(present & rolling._not_asked_again),
        canonical.of(world.jobs),
        canonical.of(aggregates),
        world.early_ticks,
        world.noticed,
    ]
    return Fingerprint(coordinator, _digest(of_world))


def _of_failed_pairs(failed_pairs: FailedPairs, present: set[str], now: float) -> Any:
    """Return what later events depend on of the pairs of jobs that are present."""
    relayed = [
        (sorted(pair), round(now - item.until), item.lasts_s)
        for pair, item in failed_pairs._relayed.items()
        if pair <= present and now < item.until + item.lasts_s
    ]
    separated = [
        (sorted(pair), sorted(item.reporters), round(max(0.0, item.until - now)))
        for pair, item in failed_pairs._separations.items()
        if pair <= present
    ]
    return [sorted(relayed), sorted(separated)]


def _digest(value: Any) -> bytes:
    # Version 2 of the format: later ones depend on which objects are identical.
    return hashlib.blake2b(marshal.dumps(value, 2), digest_size=12).digest()


class _Canonical:
    """Converts values to ones whose repr() is equal for equal states, whatever the order in dicts and sets.

    Args:
        now: Current time.
    """

    _fields_of: dict[type, tuple[str, ...]] = {}

    def __init__(self, now: float):
        self._now = now
        self._number_of_checksum: dict[str, int] = {"": 0}

    def of(self, value: Any) -> Any:
        """Return the canonical form of a value."""
        cls = type(value)
        if cls in _PLAIN:
            return value
        if cls is float:
            return self._age(value) if value > START / 2 else value
        if cls is Claim:
            numbers = self._number_of_checksum
            return value.version, numbers.setdefault(value.checksum, len(numbers))
        if cls is dict:
            return [(_sortable(key), self.of(value[key])) for key in sorted(value, key=_sortable)]
        if cls in (set, frozenset):
            return sorted(map(_sortable, value))
        if cls in (list, tuple):
            return [self.of(item) for item in value]
        if cls is ModelJob and value.crashed:
            return "crashed"
        if cls is RoundState and value.outcome:
            return self._past_round(value)
        parts = []
        for name in self._relevant_fields(cls):
            part = getattr(value, name)
            parts.append(part if type(part) in _PLAIN else self.of(part))
        return parts + self._further_parts(value)

    def _age(self, time: float) -> float:
        return min(round(self._now - time), _LONGEST_WAIT_S)

    def _past_round(self, past: RoundState) -> Any:
        """Return what replies about a round that is over depend on."""
        ended_recently = self._now - past.last_report < _INACTIVE_S
        names = [past.ready_reports, past.members, past.behind, past.informed]
        return [past.number, past.fragment, past.outcome, ended_recently, *map(sorted, names)]

    def _relevant_fields(self, cls: type) -> tuple[str, ...]:
        if cls not in self._fields_of:
            irrelevant = _IRRELEVANT.get(cls.__name__, ())
            names = [item.name for item in fields(cls) if item.name not in irrelevant]
            self._fields_of[cls] = tuple(names)
        return self._fields_of[cls]

    def _further_parts(self, value: Any) -> list[Any]:
        if isinstance(value, RoundState):
            # From the begin of the exchange, the time is computed for which failed pairs are kept apart.
            return [sorted(value.excluded), round(self._now - value.exchange_begin)]
        if isinstance(value, Member):
            is_catching_up = value.catches_up_after is not None
            since = self._age(value.catches_up_since) if is_catching_up else 0
            is_taking = value.taking_since is not None
            return [
                self._now - value.since < _INACTIVE_S,
                since,
                is_taking and self._now - value.taking_since < _LONGEST_TAKING_S,
                min(value.orders_in_a_row, _MANY_ORDERS),
            ]
        return []


def _sortable(key: Any) -> Any:
    return tuple(sorted(key)) if isinstance(key, frozenset) else key
