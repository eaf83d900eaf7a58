"""Rules of the service of weights: which host pulls over the WAN, and when all sites switch. Pure values.

source    the first host of a site (by its arrival) pulls from `holmes join serve`. Each other host pulls
          from the one that arrived before it, while that one receives, or from any host of the site that
          has the version. So each version crosses the WAN once, and each host sends it on once
commit    a version is committed when all hosts that use the current version have staged it. A host that
          lags behind, such as a new one, does not delay the others
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.errors import HolmesError

#: Seconds without a report after which a host does not count any more.
SILENCE_S = 30.0
#: Versions that a report may name.
_MOST_VERSIONS = 10_000
#: Addresses that a report may name.
_MOST_ADDRESSES = 64
#: Characters of a name or an address.
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class HostReport:
    """State of a receiving host, as it reports it to the service."""

    host: str  # name for the user
    address: str  # HOST:PORT at which other hosts of the site pull from it; "": none
    staged: tuple[int, ...]  # complete versions
    current: int | None  # committed version
    unreachable: tuple[str, ...] = ()  # addresses of other hosts that did not answer
    received: int = 0  # bytes of chunks from other processes since its start
    received_wan: int = 0  # part of them that came over the WAN, from the service
    version: int | None = None  # that it receives now
    version_bytes: int = 0  # of that version: bytes that are written
    version_size: int = 0  # of that version: bytes in all

    def __post_init__(self) -> None:
        if len(self.staged) > _MOST_VERSIONS or len(self.unreachable) > _MOST_ADDRESSES:
            raise HolmesError("a report names too many versions or addresses")
        for text in (self.host, self.address, *self.unreachable):
            if len(text) > _LONGEST_TEXT or not text.isprintable():
                raise HolmesError(f"a report has the text {text!r:.80}")


@dataclass(frozen=True)
class Source:
    """Process from which a host pulls its missing versions."""

    address: str  # HOST:PORT of a host of the same site; "": the service, over the WAN
    versions: tuple[int, ...] = ()  # missing versions to pull from it now, oldest first


@dataclass
class SiteHost:
    """A receiving host that is connected to the service."""

    site: str
    report: HostReport
    heard: float  # time of its last report, by time.monotonic()
    staged: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.staged = frozenset(self.report.staged)


class Sites:
    """Receiving hosts of all sites. Not thread-safe."""

    def __init__(self) -> None:
        # Id of a host's process -> the host, in order of arrival.
        self._hosts: dict[str, SiteHost] = {}

    def report(self, host_id: str, site: str, report: HostReport, now: float) -> bool:
        """Take in the report of a host; return whether it may change what other hosts should do."""
        before = self._hosts.get(host_id)
        # A known host keeps its place in the order.
        self._hosts[host_id] = SiteHost(site, report, now)
        if before is None:
            return True
        earlier = before.report
        return (earlier.address, earlier.staged, earlier.current) != (
            report.address,
            report.staged,
            report.current,
        )

    def gone(self, host_id: str) -> None:
        """Forget a host whose connection has ended."""
        self._hosts.pop(host_id, None)

    def forget_silent(self, now: float) -> None:
        """Forget hosts without a report for SILENCE_S seconds."""
        for host_id, host in list(self._hosts.items()):
            if now - host.heard > SILENCE_S:
                del self._hosts[host_id]

    def source(self, host_id: str, versions: Iterable[int]) -> Source:
        """Return where a host gets its next missing version, or will get the next one.

        Args:
            host_id: The host.
            versions: What the host should have, oldest first.
        """
        host = self._hosts[host_id]
        missing = tuple(version for version in versions if version not in host.staged)
        predecessor: SiteHost | None = None
        has_passed = False
        for other_id, other in self._hosts.items():
            if other_id == host_id:
                has_passed = True
            elif other.site == host.site and self._is_reachable(host, other):
                if missing and missing[0] in other.staged:
                    # A host that arrived later may wait for this one with the versions that it lacks.
                    ready = missing if not has_passed else _first_of(missing, other.staged)
                    return Source(other.report.address, ready)
                if not has_passed:
                    predecessor = other
        # Only hosts that arrived earlier are sources of what they do not have yet. So hosts cannot wait for
        # each other. A host that reaches none of them pulls over the WAN itself.
        return Source("" if predecessor is None else predecessor.report.address, missing)

    def _is_reachable(self, host: SiteHost, other: SiteHost) -> bool:
        address = other.report.address
        return bool(address) and address not in host.report.unreachable

    def may_commit(self, version: int, current: int | None) -> bool:
        """Return whether all hosts that use the current version have staged another version.

        Args:
            version: The version that is to be committed.
            current: The version that is committed now; None: none is, and all hosts count.
        """
        for host in self._hosts.values():
            is_in_step = current is None or host.report.current == current
            if is_in_step and version not in host.staged:
                return False
        return True

    def status(self, now: float) -> list[dict[str, Any]]:
        """Return the state of each host, as `holmes weights status --json` prints it."""
        return [
            {
                "site": host.site,
                "host": host.report.host,
                "address": host.report.address,
                "current": host.report.current,
                "newest": max(host.staged, default=None),
                "receiving": host.report.version,
                "received_bytes": host.report.version_bytes,
                "size_bytes": host.report.version_size,
                "wan_bytes": host.report.received_wan,
                "site_bytes": host.report.received - host.report.received_wan,
                "heard_s": round(now - host.heard, 1),
            }
            for host in sorted(self._hosts.values(), key=lambda one: (one.site, one.report.host))
        ]


def _first_of(missing: tuple[int, ...], staged: frozenset[int]) -> tuple[int, ...]:
    """Return the missing versions up to the first one that is not staged."""
    return tuple(itertools.takewhile(staged.__contains__, missing))
