"""Rules of the service of weights: which host pulls over the WAN, and when all sites switch.

These rules use no sockets and no clock: callers give them the reports of the hosts, and the time.

source    the first host of a site (by its arrival) pulls from `holmes join serve`. Each other host pulls
          from the one that arrived before it, while that one receives, or from any host of the site that
          has the version. So each version crosses the WAN once, and each host sends it on once
commit    a version is committed when all hosts that use the current version have staged it, so all its
          files are there. A host that does not use the current version yet, such as a new one, does not
          delay the others
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
    staged: tuple[int, ...]  # complete versions, whether they are in use or not
    current: int | None  # version that the host uses; None: it uses none yet
    unreachable: tuple[str, ...] = ()  # addresses of other hosts that did not answer
    received: int = 0  # bytes of chunks from other processes since its start
    received_wan: int = 0  # part of them that came over the WAN, from the service
    version: int | None = None  # that the host receives now; None: it receives none
    version_bytes: int = 0  # bytes of `version` that are written on the host
    version_size: int = 0  # bytes of `version` in all

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
    staged: frozenset[int] = field(init=False)  # complete versions, as in the report

    def __post_init__(self) -> None:
        self.staged = frozenset(self.report.staged)


class Sites:
    """Table of the receiving hosts of all sites, which decides what each host should do.

    report(), gone() and forget_silent() keep the table up to date. source() says from where a host pulls,
    and may_commit() whether all sites can switch to a version. Not thread-safe.
    """

    def __init__(self) -> None:
        # Random id of a host's process -> the host, in the order in which the hosts connected first.
        self._hosts: dict[str, SiteHost] = {}

    def report(self, host_id: str, site: str, report: HostReport, now: float) -> bool:
        """Record the report of a host.

        Args:
            host_id: Random id of the host's process.
            site: Site of the host.
            report: State of the host.
            now: Time of the report, by time.monotonic().

        Returns:
            Whether the report may change what other hosts should do.
        """
        host_before = self._hosts.get(host_id)
        self._hosts[host_id] = SiteHost(site, report, now)  # keeps the position of a connected host
        if host_before is None:
            return True
        before = host_before.report
        is_same_for_others = (
            before.address == report.address
            and before.staged == report.staged
            and before.current == report.current
        )
        return not is_same_for_others

    def gone(self, host_id: str) -> None:
        """Forget a host whose connection has ended."""
        self._hosts.pop(host_id, None)

    def forget_silent(self, now: float) -> None:
        """Forget hosts without a report for SILENCE_S seconds."""
        for host_id, host in list(self._hosts.items()):
            if now - host.heard > SILENCE_S:
                del self._hosts[host_id]

    def source(self, host_id: str, versions: Iterable[int]) -> Source:
        """Return the process from which a host should pull, and the versions to pull from it.

        In this order of preference:

            1. a host of the same site that has staged the oldest missing version
            2. the host of the same site that connected last before this one: it gets the versions itself
            3. the service, over the WAN

        Args:
            host_id: Random id of the host's process.
            versions: Versions that the host should have, oldest first.

        Returns:
            The source; without versions if none is missing. Then the host opens connections to the source
            for the next version.
        """
        host = self._hosts[host_id]
        missing = tuple(version for version in versions if version not in host.staged)
        predecessor_address = ""  # of the service, if no host of the site connected earlier
        is_earlier = True  # whether `other` connected before this host
        for other_id, other in self._hosts.items():
            if other_id == host_id:
                is_earlier = False
                continue
            if other.site != host.site or not self._is_reachable(host, other):
                continue
            if missing and missing[0] in other.staged:
                if is_earlier:
                    return Source(other.report.address, missing)
                # A later host may wait for this host itself with the versions that it has not staged.
                return Source(other.report.address, _leading_staged(missing, other.staged))
            if is_earlier:
                predecessor_address = other.report.address
        # A host that still waits for a version is a source of it only for later hosts. So no two hosts wait
        # for each other.
        return Source(predecessor_address, missing)

    def next_from_service(self, host_id: str, versions: Iterable[int], after: int) -> int | None:
        """Return the version that a host pulls next from the service; None: no version after `after`.

        Args:
            host_id: Random id of the host's process.
            versions: Versions that the host should have, oldest first.
            after: Newest version that the host has.
        """
        if host_id not in self._hosts:
            return None  # it has not reported yet
        source = self.source(host_id, versions)
        if source.address or not source.versions or source.versions[0] <= after:
            return None
        return source.versions[0]

    def _is_reachable(self, host: SiteHost, other: SiteHost) -> bool:
        """Return whether `other` has an address, and `host` did not report it as unreachable."""
        address = other.report.address
        return bool(address) and address not in host.report.unreachable

    def may_commit(self, version: int, current: int | None) -> bool:
        """Return whether all sites can switch to a version: no host must wait for it that is up to date.

        Only hosts that use the current version must have staged the next one. A host that uses another
        version, or none, has fallen behind or is new: it does not delay the switch.

        Args:
            version: The next version, to which all sites should switch.
            current: The version that is committed now. None: no version is committed yet; then all hosts
                must have staged the next one.
        """
        for host in self._hosts.values():
            is_up_to_date = current is None or host.report.current == current
            if is_up_to_date and version not in host.staged:
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
            for host in sorted(self._hosts.values(), key=_site_and_name)
        ]


def _site_and_name(host: SiteHost) -> tuple[str, str]:
    return host.site, host.report.host


def _leading_staged(missing: tuple[int, ...], staged: frozenset[int]) -> tuple[int, ...]:
    """Return the first of the missing versions, up to the one before the first that is not staged."""
    return tuple(itertools.takewhile(lambda version: version in staged, missing))
