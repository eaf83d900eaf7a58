"""Receiving host: keeps a folder up to date with the versions that `holmes weights publish` publishes.

    main thread      reports to the service, and commits the version that it names
    transfer thread  pulls missing versions, oldest first, from the service or from a host of the same site
    streams          opened before they are needed, and kept (streams.py)
    listener         sends versions to other hosts of the same site, also while they arrive

A broken connection is opened again. A transfer that breaks goes on with the chunks that are missing, also
after a restart of this process or of the service.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinPlace
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    NotHolmes,
    Refused,
    answer,
    call,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener, address_text, split_address
from holmes_ext.weights.exchange import PURPOSE, ReceivingStream, SendingStream
from holmes_ext.weights.fetch import STALL_S, DiskError, QuietSource, VersionFetch, WrongDigest
from holmes_ext.weights.manifest import VersionManifest
from holmes_ext.weights.rate import RateLimit
from holmes_ext.weights.sites import HostReport
from holmes_ext.weights.staging import ArrivingVersions, StagedVersion
from holmes_ext.weights.store import VersionStore
from holmes_ext.weights.streams import StreamPool
from holmes_ext.words import why

#: Seconds between two attempts to reach the service.
_RETRY_S = 0.5
#: Longest wait of a report for news, in seconds, while no version is pulled.
_NEWS_S = 2.0
#: Seconds between two reports while a version is pulled.
_BUSY_S = 0.5
#: Seconds without a byte after which a host of the same site is given up if its connections break.
_SITE_STALL_S = 2.0
#: Transfers after which a host of the same site is given up that does not get the version itself.
_MOST_REFUSALS = 3
#: Connections from other hosts of the site at a time.
_MOST_GUESTS = 256


@dataclass(frozen=True)
class ReceiverSettings:
    """Settings of a host that receives new versions of the weights from a training job."""

    streams: int = 4  # connections over which a version is pulled
    keep: int = 3  # newest versions that stay, besides those that are needed
    bits_per_second: float = 0.0  # limit on the rate at which versions are pulled; 0: none
    port: int = 0  # on which other hosts of the site pull from this one; 0: any free one
    address: str = ""  # host that they call; "": the address from which the service is reached
    is_once: bool = False  # end as soon as the newest committed version is here


@dataclass
class VersionTransfer:
    """Version that is pulled now."""

    staged: StagedVersion
    is_over_wan: bool
    missing_bytes: int  # when the transfer began
    written_bytes: int  # of the version, with those of earlier tries
    started: float = field(default_factory=time.monotonic)

    @property
    def manifest(self) -> VersionManifest:
        """Return the manifest of the version."""
        return self.staged.manifest


#: Called with an event, such as {"event": "staged", "version": 3, "bytes": 1000, "seconds": 1.5}.
Tell = Callable[[dict[str, Any]], None]


class WeightsReceiver:
    """Receiving host of one site.

    Args:
        store: Folder in which versions appear.
        place: Address of `holmes join serve`, and the certificate of this site.
        listening: Listening socket for other hosts of the site.
        settings: Settings of this host.
        tell: Called with each event.
    """

    def __init__(
        self,
        store: VersionStore,
        place: JoinPlace,
        listening: socket.socket,
        settings: ReceiverSettings,
        tell: Tell = lambda event: None,
    ):
        self._store = store
        self._place = place
        self._settings = settings
        self._tell = tell
        self._site = place.address.job
        self._host_id = secrets.token_hex(16)
        self._limit = RateLimit(settings.bits_per_second)
        self._listener = Listener(
            listening, self._serve_guest, "holmes-weights", admitted=_MOST_GUESTS
        )
        self._pool = StreamPool(self._dial, settings.streams)
        self._arriving = ArrivingVersions()
        self._channel: Channel | None = None  # to the service, for reports
        self._seen = ""  # token of the answer that was received last
        self._unreachable: tuple[str, ...] = ()
        self._refusals: Counter[str] = (
            Counter()
        )  # HOST:PORT of a host of the site -> transfers in which it sent nothing
        self._received = 0
        self._received_wan = 0
        self.transfer: VersionTransfer | None = None  # shown by the progress line
        self._pulling: threading.Thread | None = None
        self._error: HolmesError | None = None  # of the transfer thread, which ends this process
        self._ended = threading.Event()

    def run(self) -> None:
        """Keep the folder up to date until close() is called; with `is_once`: until it is up to date.

        Raises:
            HolmesError: The service refuses this host, the disk is full, or a version is damaged.
        """
        self._listener.start()
        try:
            while not self._ended.is_set():
                if self._error is not None:
                    raise self._error
                reply = self._report()
                if reply is not None and self._follow(reply):
                    return
                if self._pulling is not None:
                    self._pulling.join(_BUSY_S)  # its end is reported at once
        finally:
            self.close()

    def close(self) -> None:
        """End run(), and all connections."""
        self._ended.set()
        self._listener.close()
        self._pool.close()
        self._disconnect()

    def _report(self) -> dict[str, Any] | None:
        """Send a report to the service, and return its answer; None: the service cannot be reached now."""
        try:
            if self._channel is None:
                self._channel = self._call_service()
                self._seen = ""
                self._unreachable = ()
            stream = ReceivingStream(self._channel, "the service", RateLimit())
            request = {
                "op": "report",
                "report": asdict(self._own_report(self._channel)),
                "seen": self._seen,
                "wait": 0.0 if self._is_pulling() else _NEWS_S,
            }
            reply = stream.ask(request)
            self._seen = str(reply.get("token"))
            return reply
        except Refused:
            raise
        except OSError as error:
            if self._channel is not None:
                self._tell({"event": "lost", "reason": why(error)})
            self._disconnect()
            self._ended.wait(_RETRY_S)
            return None

    def _own_report(self, channel: Channel) -> HostReport:
        transfer = self.transfer
        host = self._settings.address or channel.socket.getsockname()[0]
        report = HostReport(
            host=socket.gethostname()[:100],
            address=address_text(host, self._listener.port),
            staged=tuple(self._store.versions()),
            current=self._store.current,
            unreachable=self._unreachable,
            received=self._received,
            received_wan=self._received_wan,
            version=None if transfer is None else transfer.manifest.version,
            version_bytes=0 if transfer is None else transfer.written_bytes,
            version_size=0 if transfer is None else transfer.manifest.bytes,
        )
        return report

    def _follow(self, reply: dict[str, Any]) -> bool:
        """Commit and pull what the service says; return whether run() is done."""
        versions = [version for version in reply["versions"] if isinstance(version, int)]
        commit = reply.get("commit")
        self._commit(commit)
        source = reply.get("source")
        if isinstance(source, dict) and not self._is_pulling():
            self._use_source(source, versions, reply.get("manifests"))
        if not self._settings.is_once or self._is_pulling():
            return False
        is_complete = all(map(self._store.has, versions))
        return bool(versions) and is_complete and self._store.current == commit

    def _commit(self, version: object) -> None:
        """Switch to a version if it is complete, with all versions to which it is a delta."""
        if not isinstance(version, int) or version == self._store.current:
            return
        if self._store.has(version):
            try:
                self._store.chain(version)
                self._store.commit(version)
            except OSError as error:
                raise _disk_error(self._store, error) from None
            except HolmesError:
                return  # a version of the chain is still missing
            self._tell({"event": "committed", "version": version})

    def _is_pulling(self) -> bool:
        return self._pulling is not None and self._pulling.is_alive()

    def _use_source(self, source: dict[str, Any], required: list[int], documents: object) -> None:
        """Pull the missing versions from a source in the transfer thread, or open streams for the next one.

        Args:
            source: Address of the source, and the versions to pull from it; see Source.
            required: What this host should have.
            documents: Manifests of some of these versions, from the service.
        """
        address = str(source.get("address"))
        named = source.get("versions")
        missing = [
            version
            for version in (named if isinstance(named, list) else ())
            if isinstance(version, int) and not self._store.has(version)
        ]
        if not missing:
            self._pool.open_ahead(address)
            return
        manifests: dict[int, VersionManifest] = {}
        for document in documents if isinstance(documents, list) else ():
            manifest = VersionManifest.of_document(document, "the service: a version")
            manifests[manifest.version] = manifest
        self._pulling = threading.Thread(
            target=self._pull,
            args=(address, missing, required, manifests),
            name="holmes-weights-pull",
            daemon=True,
        )
        self._pulling.start()

    def _pull(
        self,
        address: str,
        missing: list[int],
        required: list[int],
        manifests: dict[int, VersionManifest],
    ) -> None:
        """Pull versions from a source, in the transfer thread.

        Args:
            address: HOST:PORT of a host of the site; "": the service.
            missing: The versions, oldest first.
            required: Versions that must not be removed from the folder.
            manifests: Manifests that are known already.
        """
        try:
            staged = self._stage(
                [
                    manifests.get(version) or self._manifest_from(address, version)
                    for version in missing
                ]
            )
            try:
                self._pull_staged(address, staged, required)
            finally:
                for version in staged:
                    version.close()
                    self._arriving.remove(version)
        except DiskError as error:
            self._error = error
        except (OSError, HolmesError) as error:
            self._give_up(address, error)
        finally:
            self.transfer = None

    def _give_up(self, address: str, error: Exception) -> None:
        """Handle a failed transfer: use another source, or end this process if that cannot help."""
        is_refused = isinstance(error, Refused | QuietSource)
        self._refusals[address] += is_refused
        # A host refuses a version that has not arrived there in time: it is tried again.
        if address and is_refused and self._refusals[address] < _MOST_REFUSALS:
            pass
        elif address:
            self._unreachable = (*self._unreachable, address)[-8:]
        elif isinstance(error, HolmesError) and not is_refused:
            self._error = error  # another try would get the same bytes
            return
        self._tell({"event": "broken", "source": address or "service", "reason": why(error)})
        self._ended.wait(_RETRY_S)

    def _manifest_from(self, address: str, version: int) -> VersionManifest:
        """Return the manifest of a version from a source."""
        stream = self._pool.take(address)
        try:
            manifest = stream.manifest(version)
        except BaseException:
            stream.close()
            raise
        self._pool.give_back(address, stream)
        return manifest

    def _stage(self, manifests: Sequence[VersionManifest]) -> list[StagedVersion]:
        """Return the staging folders of versions.

        Raises:
            DiskError: There is too little space, for example. Then no empty folder stays.
        """
        staged: list[StagedVersion] = []
        try:
            for manifest in manifests:
                staged.append(self._store.stage(manifest))
        except (OSError, HolmesError) as error:
            for version in staged:
                is_empty = version.missing_bytes == version.manifest.bytes
                version.close()
                if is_empty:
                    version.drop()
            if isinstance(error, OSError):
                raise _disk_error(self._store, error) from None
            raise DiskError(str(error)) from None
        return staged

    def _pull_staged(
        self, address: str, staged: Sequence[StagedVersion], required: list[int]
    ) -> None:
        """Pull versions from a source, and let each appear in the folder as soon as it is complete.

        Raises:
            OSError: The source cannot be reached.
            HolmesError: See VersionFetch.wait_for().
        """
        transfers: dict[StagedVersion, VersionTransfer] = {}
        for version in staged:
            self._arriving.add(version)
            missing_bytes = version.missing_bytes
            written_bytes = version.manifest.bytes - missing_bytes
            transfers[version] = VersionTransfer(version, not address, missing_bytes, written_bytes)
        fetch = VersionFetch(
            staged,
            self._pool,
            address,
            self._settings.streams,
            lambda version, count: self._count(transfers[version], count),
            stall_s=_SITE_STALL_S if address else STALL_S,
        )
        fetch.start()
        try:
            for transfer in transfers.values():
                self.transfer = transfer
                transfer.started = time.monotonic()
                fetch.wait_for(transfer.staged)
                self._finish(transfer, address)
                self._store.remove_old(self._settings.keep, protected=required)
        except WrongDigest:
            fetch.stop()
            for version in staged:
                version.drop()
            raise
        finally:
            fetch.stop()

    def _finish(self, transfer: VersionTransfer, address: str) -> None:
        """Let a version appear in the folder whose chunks are all written."""
        try:
            transfer.staged.finish()
        except OSError as error:
            raise _disk_error(self._store, error) from None
        self._arriving.remove(transfer.staged)
        self._tell(
            {
                "event": "staged",
                "version": transfer.manifest.version,
                "bytes": transfer.manifest.bytes,
                "pulled_bytes": transfer.missing_bytes,
                "seconds": round(time.monotonic() - transfer.started, 3),
                "source": address or "service",
            }
        )

    def _count(self, transfer: VersionTransfer, count: int) -> None:
        transfer.written_bytes += count
        self._received += count
        if transfer.is_over_wan:
            self._received_wan += count

    def _dial(self, address: str) -> ReceivingStream:
        """Open a stream to HOST:PORT of a host of the site; "": to the service."""
        if not address:
            return ReceivingStream(self._call_service(), "the service", self._limit)
        host, port = split_address(address)
        deadline = Deadline(HANDSHAKE_S, f"calling {address}")
        channel = call(host, port, self._place.credentials, self._site, self._purpose(), deadline)
        return ReceivingStream(channel, address, RateLimit())

    def _call_service(self) -> Channel:
        return self._place.call(self._purpose(), Deadline(HANDSHAKE_S, "the service's handshake"))

    def _purpose(self) -> dict[str, Any]:
        return {"purpose": PURPOSE, "job": self._site, "incarnation": self._host_id}

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _serve_guest(self, guest: Guest) -> None:
        """Send versions to another host of the same site, in the thread of its connection."""
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        try:
            channel, purpose, _ = answer(
                guest.socket, self._place.credentials, deadline, on_tls=guest.becomes
            )
        except (NotHolmes, Refused):
            return
        is_of_site = purpose.get("job") == self._site and purpose.get("purpose") == PURPOSE
        if not is_of_site or not guest.admit():
            return
        stream = SendingStream(channel, self._store, RateLimit(), arriving=self._arriving)
        while not self._ended.is_set():
            stream.answer(stream.next_request())


def _disk_error(store: VersionStore, error: OSError) -> DiskError:
    return DiskError(
        f"{store.path}: a version cannot be written there ({why(error)}); make space and start again"
    )
