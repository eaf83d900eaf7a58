"""Part of `holmes join serve` that sends versions of the weights to sites, and decides when they switch.

A host that receives versions keeps one connection to this service for reports, and opens others to pull
chunks of versions (exchange.py). This is the report, and the service's answer:

    {"op": "report", "report": {...}, "seen": TOKEN, "wait": SECONDS}
        -> {"token": TOKEN, "versions": [...], "commit": N or null, "source":
            {"address": ..., "versions": [...]}, "manifests": [...]}

    report     state of the host: class HostReport
    token      text that is equal for equal answers; "seen" is the token of the last answer that the host got
    versions   numbers of the versions that the host should have
    commit     number of the version that the host should use
    source     where the host should pull, and which versions: class Source
    manifests  of the versions to pull, if the service is the source

The answer comes as soon as its token differs from the one that the host has seen, or after `wait` seconds. So
the news of a version needs only the one-way delay of the network to reach a site.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.weights.exchange import PURPOSE, NextRequest, SendingStream
from holmes_ext.weights.manifest import VersionManifest
from holmes_ext.weights.monitor import Monitor, run_monitor
from holmes_ext.weights.origin import origin_of
from holmes_ext.weights.publishing import store_of_run
from holmes_ext.weights.rate import RateLimit, parse_rate_limit
from holmes_ext.weights.sites import HostReport, Sites
from holmes_ext.weights.store import MissingVersion, VersionStore
from holmes_ext.words import tell_user, why

if TYPE_CHECKING:
    from holmes_ext.join.coordinator.server import CoordinatorServer

#: Variable with the limit on the rate of all weights that this process sends.
RATE_VARIABLE = "HOLMES_WEIGHTS_RATE"
#: Longest wait of a report for news, in seconds.
_MOST_WAIT_S = 10.0
#: Seconds between two looks for a further request of a host that waits for the next version.
_LOOK_FOR_REQUEST_S = 0.5
#: Seconds between two looks at the store, to which `holmes weights publish` writes: at the times of its
#: folders, and at their content.
_LOOK_S = 0.01
_WHOLE_LOOK_S = 0.5
#: Most chunks of the manifests that one answer contains, together. The host requests the other manifests.
_MOST_CHUNKS_IN_ANSWER = 10_000
#: Seconds after the start in which hosts of an earlier service may come back before a version is committed.
_GRACE_S = 3.0
#: Connections of one site at a time.
_MOST_OF_SITE = 256


@contextlib.contextmanager
def serve_weights(server: CoordinatorServer) -> Iterator[None]:
    """Context manager that lets `holmes join serve` also send published versions of the weights.

    The server passes all connections with the purpose PURPOSE to the service of weights, and includes the
    status of this service in its own status. No weights are sent while joined jobs exchange data (RateLimit).

    Args:
        server: The server of `holmes join serve`.

    Raises:
        HolmesError: The store, or an environment variable, cannot be used.
    """
    rate_text = os.environ.get(RATE_VARIABLE)
    bits_per_second = parse_rate_limit(rate_text, RATE_VARIABLE) if rate_text else 0.0
    limit = RateLimit(bits_per_second, lambda: server.is_exchanging)
    store = store_of_run(os.environ, server.port)
    service = WeightsService(store, limit)
    monitor = Monitor(service.status, service.published_at, origin_of(store))
    server.handlers[PURPOSE] = service.answer
    server.sections[PURPOSE] = monitor.status
    thread = threading.Thread(target=service.watch, name="holmes-weights", daemon=True)
    thread.start()
    try:
        with run_monitor(monitor, os.environ):
            yield
    finally:
        service.close()
        thread.join()


class WeightsService:
    """Sends versions of the weights to the hosts of all sites, and decides when they switch to a version.

    Args:
        store: Folder of the versions that `holmes weights publish` has added.
        limit: Limit on the rate of all streams together.
    """

    def __init__(self, store: VersionStore, limit: RateLimit):
        store.make()
        self._store = store
        self._limit = limit
        self._sites = Sites()
        self._condition = threading.Condition()  # also the lock of the fields below
        self._connections: Counter[str] = Counter()  # site -> open connections
        self._sent: Counter[str] = Counter()  # site -> bytes of chunks
        # Id of a host -> its latest connection for reports. A host is gone when this connection ends.
        self._reporting: dict[str, Channel] = {}
        self._ended = threading.Event()
        self._versions: list[int] = []  # published, in ascending order
        self._required: list[int] = []  # versions that each host should have, oldest first
        # Nothing is committed before this time, by time.monotonic(). If a version is already wanted at the
        # start, hosts of an earlier service first get time to connect again.
        self._commit_after = 0.0
        if store.wanted != store.current:
            self._commit_after = time.monotonic() + _GRACE_S
        self._has_news = False  # hosts have reported news since the last call of _update()
        self._printed_problem = ""  # problem of the store that was printed last
        # Version -> manifest that was sent to hosts.
        self._manifests: dict[int, VersionManifest] = {}
        self._update()

    def close(self) -> None:
        """Let watch() return, and answer all reports that wait for news."""
        self._ended.set()
        with self._condition:
            self._condition.notify_all()

    def watch(self) -> None:
        """Handle new versions in the store and news of the hosts until close() is called."""
        stamp: tuple[int, ...] | None = None
        updated_at = 0.0
        while not self._ended.wait(_LOOK_S):
            stamp_before = stamp
            stamp = self._stamp()
            is_store_changed = stamp is None or stamp != stamp_before
            is_time_for_update = time.monotonic() - updated_at >= _WHOLE_LOOK_S
            if is_store_changed or self._has_news or is_time_for_update:
                updated_at = time.monotonic()
                self._update()

    def _stamp(self) -> tuple[int, ...] | None:
        """Return the stamp of the store; None: the store cannot be read. _update() then prints the error."""
        try:
            return self._store.stamp()
        except OSError:
            return None

    def _update(self) -> None:
        """Read the versions in the store, forget silent hosts, and commit the wanted version if possible."""
        with self._condition:
            self._has_news = False
            try:
                versions = self._store.versions()
                if versions != self._versions:
                    self._versions = versions
                    for version in self._manifests.keys() - set(versions):
                        del self._manifests[version]
                    self._condition.notify_all()
                self._required = self._required_versions()
                self._sites.forget_silent(time.monotonic())
                self._commit_if_staged()
            except (OSError, HolmesError) as error:
                self._print_problem(f"weights in {self._store.path}: {why(error)}")

    def _print_problem(self, problem: str) -> None:
        """Print a problem of the store, unless it was the last one that was printed."""
        if problem != self._printed_problem:
            tell_user(problem)
        self._printed_problem = problem

    def _required_versions(self) -> list[int]:
        """Return the versions that each host should have, in ascending order.

        They are the newest published version, the version that the publisher wants to be committed, and the
        version that is committed now. If such a version is a delta, the versions to which it must be applied
        are included.
        """
        required: set[int] = set()
        for version in (*self._versions[-1:], self._store.wanted, self._store.current):
            if version in self._versions:
                with contextlib.suppress(MissingVersion):
                    required.update(self._store.chain(version))
        return sorted(required)

    def _commit_if_staged(self) -> None:
        """Let all sites switch to the wanted version if all hosts that are up to date have received it.

        The caller holds the lock.
        """
        wanted = self._store.wanted
        current = self._store.current
        if wanted is None or wanted not in self._versions:
            return
        is_committed = wanted == current
        is_too_early = time.monotonic() < self._commit_after
        if is_committed or is_too_early:
            return
        if self._sites.may_commit(wanted, current):
            self._store.commit(wanted)
            self._condition.notify_all()

    def answer(self, channel: Channel, site: str, host_id: str) -> None:
        """Answer the requests of a receiving host until its connection ends.

        Runs in the thread of the connection.

        Args:
            channel: The connection.
            site: Name in the certificate of the receiving host.
            host_id: Random id of the host's process.
        """
        stream = SendingStream(
            channel, self._store, self._limit, on_bytes=lambda count: self._count(site, count)
        )
        with self._condition:
            has_room = self._connections[site] < _MOST_OF_SITE
            if has_room:
                self._connections[site] += 1
        if not has_room:
            stream.reply({"error": f"site {site} has too many connections"})
            return
        try:
            while not self._ended.is_set():
                request = stream.next_request()
                match request.get("op"):
                    case "report":
                        with self._condition:
                            self._reporting[host_id] = channel
                        stream.reply(self._report_reply(site, host_id, request))
                    case "next":
                        self._push_next(stream, host_id, request)
                    case "end":
                        pass  # needs no answer: it only ends the wait of _push_next()
                    case "warm":
                        stream.warm_up(request)
                    case _:
                        stream.answer(request)
        finally:
            self._remove_connection(channel, site, host_id)

    def _remove_connection(self, channel: Channel, site: str, host_id: str) -> None:
        """Forget a connection that has ended; if it was the host's connection for reports, also the host."""
        with self._condition:
            self._connections[site] -= 1
            if self._reporting.get(host_id) is channel:
                del self._reporting[host_id]
                self._sites.remove(host_id)
            self._condition.notify_all()

    def _push_next(self, stream: SendingStream, host_id: str, document: dict[str, Any]) -> None:
        """Wait for the next version that a host pulls from the service, and send its first chunks.

        The wait ends without a version when the host sends another request.

        Args:
            stream: Connection to the host.
            host_id: Random id of the host's process.
            document: The request; see NextRequest.
        """
        try:
            request = NextRequest.of_document(document)
        except HolmesError as error:
            stream.reply({"error": str(error)})
            return
        manifest = None
        with self._condition:
            while not self._ended.is_set():
                version = self._sites.next_from_service(host_id, self._required, request.after)
                if version is not None:
                    manifest = self._manifest_of(version)
                    break
                if not stream.is_idle():
                    break
                self._condition.wait(_LOOK_FOR_REQUEST_S)
        stream.answer_next(manifest, request)

    def _manifest_of(self, version: int) -> VersionManifest | None:
        """Return the manifest of a version; None: it was removed meanwhile. The caller holds the lock."""
        if version not in self._manifests:
            try:
                self._manifests[version] = self._store.manifest(version)
            except HolmesError:
                return None
        return self._manifests[version]

    def _count(self, site: str, count: int) -> None:
        with self._condition:
            self._sent[site] += count

    def _report_reply(self, site: str, host_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Record the report of a host, and return the answer as soon as there is news for the host.

        There is news if the answer differs from the last answer to the host. Without news, the same answer is
        returned after the number of seconds in the key "wait" of the request.

        Args:
            site: Site of the host.
            host_id: Random id of the host's process.
            request: The request "report" as the docstring of this module shows it.
        """
        document = request.get("report")
        if not isinstance(document, dict):
            document = {}
        try:
            report = Table(document, "a report").into(HostReport)
        except HolmesError as error:
            return {"error": str(error)}
        end = time.monotonic() + _requested_wait_s(request)
        with self._condition:
            if self._sites.report(host_id, site, report, time.monotonic()):
                self._has_news = True
                self._condition.notify_all()  # other hosts of the site may pull from this one
            while True:
                reply = self._instructions_for(host_id)
                is_new = reply["token"] != request.get("seen")
                if is_new:
                    reply["manifests"] = self._manifests_for(reply)
                    return reply
                left_s = end - time.monotonic()
                if left_s <= 0 or self._ended.is_set():
                    return reply
                self._condition.wait(left_s)

    def _instructions_for(self, host_id: str) -> dict[str, Any]:
        """Return the answer to a host without manifests: versions to pull, their source, version to commit.

        The caller holds the lock.
        """
        current = self._store.current
        source = self._sites.source(host_id, self._required)
        return {
            "versions": self._required,
            "commit": current,
            "source": asdict(source),
            "token": f"{self._required} {current} {source}",
        }

    def _manifests_for(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """Return manifests of the versions that a host should pull from the service, oldest first.

        They are a part of the answer, to save the round trip of a request for them. Together they have
        at most _MOST_CHUNKS_IN_ANSWER chunks; the host requests the other manifests. The caller holds the
        lock.

        Args:
            reply: The answer to the host, with the source.
        """
        is_source_in_site = bool(reply["source"]["address"])
        if is_source_in_site:
            return []  # the host requests the manifests from that source
        documents: list[dict[str, Any]] = []
        chunks_left = _MOST_CHUNKS_IN_ANSWER
        for version in reply["source"]["versions"]:
            manifest = self._manifest_of(version)
            if manifest is None:
                break
            chunks_left -= len(manifest.chunks)
            if chunks_left < 0:
                break
            documents.append(manifest.document())
        return documents

    def published_at(self, version: int) -> float | None:
        """Return the publication time of a version, in seconds since 1970; None: the version was removed."""
        try:
            # Publishing ends with the renaming of the version's folder, and renaming sets st_ctime.
            return self._store.folder(version).stat().st_ctime
        except OSError:
            return None

    def status(self) -> dict[str, Any]:
        """Return the published versions, and the state of the receiving hosts of all sites."""
        with self._condition:
            return {
                "versions": self._versions,
                "current": self._store.current,
                "wanted": self._store.wanted,
                "sent_bytes": dict(self._sent),
                "hosts": self._sites.status(time.monotonic()),
            }


def _requested_wait_s(request: dict[str, Any]) -> float:
    """Return how long the answer to a report may wait for news, in seconds; 0.0: the request does not say."""
    wait = request.get("wait")
    if not isinstance(wait, (int, float)):
        return 0.0
    return min(float(wait), _MOST_WAIT_S)
