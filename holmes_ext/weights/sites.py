"""Decides from where each host pulls versions of the weights, and when all sites switch to a new version.

The service is the part of `holmes join serve` that sends versions. A site is a data centre with hosts that
receive them. This module uses no sockets and no clock: the service calls it with the reports of the hosts,
and with the time.

source    the host of a site that connected first pulls from the service. Each other host pulls from the host
          of the site that connected before it, while that host itself receives, or from any host of the site
          that has the version. So each version crosses the WAN once, and each host sends it on once
commit    all sites switch to a version (it is committed) when all hosts that use the current version have
          staged the new version: all of its files are there. A host that does not use the current version,
          such as a new host, does not delay the others
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.errors import HolmesError

#: A host is forgotten if it sends no report for this number of seconds.
SILENCE_S = 30.0
#: Most versions that a report may name.
_MOST_VERSIONS = 10_000
#: Most addresses that a report may name.
_MOST_ADDRESSES = 64
#: Most characters of a name or an address.
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class HostReport:
    """Report of a receiving host to the service: versions, address, and progress of a transfer."""

    host: str  # name of the host, for the user
    address: str  # HOST:PORT for other hosts of the site that pull from it; "": none
    staged: tuple[int, ...]  # complete versions, whether they are in use or not
    current: int | None  # version that the host uses; None: it uses none yet
    unreachable: tuple[str, ...] = ()  # addresses of other hosts that it could not pull from
    received: int = 0  # bytes of chunks that it has received since its start
    received_wan: int = 0  # the part of them that came over the WAN, from the service
    version: int | None = None  # version that the host receives now; None: it receives none
    version_bytes: int = 0  # bytes of `version` that are written on the host
    version_size: int = 0  # size of `version`, in bytes

    def __post_init__(self) -> None:
        if len(self.staged) > _MOST_VERSIONS or len(self.unreachable) > _MOST_ADDRESSES:
            raise HolmesError("a report names too many versions or addresses")
        for text in (self.host, self.address, *self.unreachable):
            if len(text) > _LONGEST_TEXT or not text.isprintable():
                raise HolmesError(f"a report has the text {text!r:.80}")


@dataclass(frozen=True)
class Source:
    """Instruction for a receiving host: the process to pull from, and the versions to pull."""

    address: str  # HOST:PORT of a host of the same site; "": the service, over the WAN
    versions: tuple[int, ...] = ()  # oldest first; none if the host has all versions


@dataclass
class SiteHost:
    """Receiving host that is connected to the service, with its latest report."""

    site: str
    report: HostReport
    heard: float  # time of its last report, by time.monotonic()
    staged: frozenset[int] = field(init=False)  # complete versions, as in the report

    def __post_init__(self) -> None:
        self.staged = frozenset(self.report.staged)


class Sites:
    """Table of the receiving hosts of all sites, for deciding what each of them should do.

    report(), remove() and forget_silent() keep the table up to date. source() decides from where a host
    pulls, and may_commit() whether all sites can switch to a version. Not thread-safe.
    """

    def __init__(self) -> None:
        # Random id of a host's process -> the host. The host that connected first is the first.
        self._hosts: dict[str, SiteHost] = {}

    def report(self, host_id: str, site: str, report: HostReport, now: float) -> bool:
        """Record the latest report of a host; add the host to the table if it is new.

        Args:
            host_id: Random id of the host's process.
            site: Site of the host.
            report: State of the host.
            now: Time of the report, by time.monotonic().

        Returns:
            Whether the decisions for other hosts may change: the host is new, or its address or its versions
            are not those of its last report.
        """
        host_before = self._hosts.get(host_id)
        self._hosts[host_id] = SiteHost(site, report, now)  # keeps the position of a connected host
        if host_before is None:
            return True
        before = host_before.report
        return (
            report.address != before.address
            or report.staged != before.staged
            or report.current != before.current
        )

    def remove(self, host_id: str) -> None:
        """Remove a host whose connection has ended from the table."""
        self._hosts.pop(host_id, None)

    def forget_silent(self, now: float) -> None:
        """Remove hosts that have sent no report for SILENCE_S seconds from the table."""
        for host_id, host in list(self._hosts.items()):
            if now - host.heard > SILENCE_S:
                del self._hosts[host_id]

    def source(self, host_id: str, versions: Iterable[int]) -> Source:
        """Choose the process that a host should pull from, and the versions to pull.

        In this order of preference:

            1. a host of the same site that has all files of the oldest missing version
            2. the host of the same site that connected last before this host: it is receiving the versions
            3. the service, over the WAN

        Args:
            host_id: Random id of the host's process.
            versions: Versions that the host should have, oldest first.

        Returns:
            The source. If no version is missing, the host only opens connections to it, for the next version.
        """
        host = self._hosts[host_id]
        missing = tuple(version for version in versions if version not in host.staged)
        host_ids = list(self._hosts)
        position = host_ids.index(host_id)
        earlier = self._possible_sources(host, host_ids[:position])
        later = self._possible_sources(host, host_ids[position + 1 :])
        if missing:
            oldest = missing[0]
            for other in earlier:
                if oldest in other.staged:
                    return Source(other.report.address, missing)
            for other in later:
                if oldest in other.staged:
                    # Only versions that `other` has completely: it may be pulling the others from this host.
                    return Source(other.report.address, _leading_staged(missing, other.staged))
        # A host pulls versions that the source itself lacks only if the source connected before it. So no
        # two hosts wait for each other.
        predecessor_address = earlier[-1].report.address if earlier else ""
        return Source(predecessor_address, missing)

    def next_from_service(self, host_id: str, versions: Iterable[int], after: int) -> int | None:
        """Return the version that a host should pull next from the service.

        Args:
            host_id: Random id of the host's process.
            versions: Versions that the host should have, oldest first.
            after: Newest version that the host has.

        Returns:
            None: The host should pull no version newer than `after`, or it should pull from another host of
            its site.
        """
        if host_id not in self._hosts:
            return None  # it has not reported yet
        source = self.source(host_id, versions)
        if source.address:
            return None  # it should pull from another host of its site
        if not source.versions or source.versions[0] <= after:
            return None
        return source.versions[0]

    def _is_reachable(self, host: SiteHost, other: SiteHost) -> bool:
        """Return whether `other` has an address, and `host` did not report it as unreachable."""
        address = other.report.address
        return bool(address) and address not in host.report.unreachable

    def _possible_sources(self, host: SiteHost, host_ids: Iterable[str]) -> list[SiteHost]:
        """Return the hosts in `host_ids` from which `host` can pull: hosts of its site that it can reach."""
        others = [self._hosts[host_id] for host_id in host_ids]
        return [
            other for other in others if other.site == host.site and self._is_reachable(host, other)
        ]

    def may_commit(self, version: int, current: int | None) -> bool:
        """Return whether all sites can switch to a version: all hosts that are up to date have all its files.

        Hosts that use the current version are up to date. A host that uses another version, or none, has
        fallen behind or is new: it does not delay the switch.

        Args:
            version: The next version.
            current: The version that is committed now. None: no version is committed yet; then all hosts
                must have staged the next one.
        """
        for host in self._hosts.values():
            is_up_to_date = current is None or host.report.current == current
            if is_up_to_date and version not in host.staged:
                return False
        return True

    def status(self, now: float) -> list[dict[str, Any]]:
        """Return the state of each host, sorted by site and name, for the status of the service."""
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
    """Return the missing versions before the first of them that is not in `staged`."""
    return tuple(itertools.takewhile(lambda version: version in staged, missing))
