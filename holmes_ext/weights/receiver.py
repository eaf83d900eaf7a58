"""Receiving host: keeps a folder up to date with the versions that `holmes weights publish` publishes.

    main thread      reports to the service, and commits the version that it names
    transfer thread  pulls missing versions, oldest first, from the service or from a host of the same site
    streams          connections for chunks: opened before they are needed, and kept (streams.py)
    listener         sends versions to other hosts of the same site, also while they arrive

Staged versions are complete in the folder; the committed one is in use. A source is the process from which
this host pulls: a host of the same site with the address HOST:PORT, or with the address "" the service.

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
from holmes_ext.join.sockets.handshake import HANDSHAKE_S, NotHolmes, Refused, answer, call
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
_NEWS_S = 10.0
#: Seconds between two reports while a version is pulled.
_BUSY_S = 0.5
#: Seconds without a byte after which a host of the same site is given up if its connections break.
_SITE_STALL_S = 2.0
#: Failed transfers in which a host of the same site had nothing to send, after which it is not used any more.
_MOST_REFUSALS = 3
#: Most hosts of the same site that a report names as unreachable.
_MOST_UNREACHABLE = 8
#: Connections from other hosts of the site at a time.
_MOST_GUESTS = 256


@dataclass(frozen=True)
class ReceiverSettings:
    """Settings of a host that receives new versions of the weights from a training job."""

    streams: int = 4  # connections over which a version is pulled
    keep: int = 3  # newest versions that stay, besides those that are needed
    bits_per_second: float = 0.0  # limit on the rate at which versions are pulled; 0: none
    address: str = ""  # host that they call; "": the address from which the service is reached
    is_once: bool = False  # end as soon as the newest committed version is here


@dataclass
class VersionTransfer:
    """Progress of one version that this host pulls."""

    staged: StagedVersion  # the version, with its manifest and its files
    is_over_wan: bool  # from the service; False: from a host of the same site
    missing_bytes: int  # bytes of the version that were missing when the transfer began
    written_bytes: int  # bytes of the version that are written, with those of earlier transfers
    started: float = field(default_factory=time.monotonic)  # time at which it began

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
        # Token of the service's last answer. The service waits with the next one until its token differs.
        self._seen = ""
        self._unreachable: tuple[str, ...] = ()  # HOST:PORT of hosts of the site
        # HOST:PORT of a host of the site -> number of transfers in which it had nothing to send.
        self._refusals: Counter[str] = Counter()
        self._received = 0  # bytes of chunks since the start
        self._received_wan = 0  # of them from the service
        self.transfer: VersionTransfer | None = None  # shown by the progress line
        self._pulling: threading.Thread | None = None  # the latest transfer thread
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
        """Commit a version, and begin to pull versions, as the answer of the service says.

        Returns:
            Whether run() should return: with `is_once`, all required versions are staged, and the committed
            one is in use.
        """
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
            required: Versions that this host should have, oldest first.
            documents: Manifests of some of these versions, from the service.
        """
        address = str(source.get("address"))
        missing: list[int] = []
        for version in _list_or_empty(source.get("versions")):
            if isinstance(version, int) and not self._store.has(version):
                missing.append(version)
        if not missing:
            self._pool.open_ahead(address, newest=max(self._store.versions(), default=-1))
            return
        manifests: dict[int, VersionManifest] = {}
        for document in _list_or_empty(documents):
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
            needed_manifests = [
                manifests.get(number) or self._manifest_from(address, number) for number in missing
            ]
            versions = self._stage(needed_manifests)
            try:
                self._pull_chunks(address, versions, required)
            finally:
                for version in versions:
                    version.close()
                    self._arriving.remove(version)
        except DiskError as error:
            self._error = error
        except (OSError, HolmesError) as error:
            self._handle_failure(address, error)
        finally:
            self.transfer = None

    def _handle_failure(self, address: str, error: Exception) -> None:
        """Handle a failed transfer: prepare for the next one, or end this process if that cannot help.

            a host of the site has no bytes yet    it is tried again, a few times
            any other error of a host of the site  it is reported as unreachable, to get another source
            wrong bytes from the service           this process ends with the error
            any other error of the service         the service is tried again

        Args:
            address: HOST:PORT of the source, a host of the site; "": the service.
            error: Why the transfer failed.
        """
        # A host of the site refuses a version that has not arrived there in time.
        has_nothing_to_send = isinstance(error, Refused | QuietSource)
        if has_nothing_to_send:
            self._refusals[address] += 1
        is_from_service = not address
        if is_from_service:
            if isinstance(error, HolmesError) and not has_nothing_to_send:
                self._error = error  # another transfer would get the same bytes
                return
        elif not has_nothing_to_send or self._refusals[address] >= _MOST_REFUSALS:
            self._unreachable = (*self._unreachable, address)[-_MOST_UNREACHABLE:]
        self._tell({"event": "broken", "source": address or "service", "reason": why(error)})
        self._ended.wait(_RETRY_S)

    def _manifest_from(self, address: str, version: int) -> VersionManifest:
        """Request the manifest of a version from the source with an address, and return it."""
        stream = self._pool.take(address)
        try:
            manifest = stream.manifest(version)
        except BaseException:
            stream.close()
            raise
        self._pool.give_back(address, stream)
        return manifest

    def _stage(self, manifests: Sequence[VersionManifest]) -> list[StagedVersion]:
        """Make the staging folders of versions, and reserve their space on the disk.

        Raises:
            DiskError: There is too little space, for example. Folders without any chunk were removed.
        """
        versions: list[StagedVersion] = []
        try:
            for manifest in manifests:
                versions.append(self._store.stage(manifest))
        except (OSError, HolmesError) as error:
            for version in versions:
                has_no_chunk = version.missing_bytes == version.manifest.bytes
                version.close()
                if has_no_chunk:
                    version.drop()
            if isinstance(error, OSError):
                raise _disk_error(self._store, error) from None
            raise DiskError(str(error)) from None
        return versions

    def _pull_chunks(
        self, address: str, versions: Sequence[StagedVersion], required: list[int]
    ) -> None:
        """Pull the missing chunks of versions. Move each version to its final folder once it is complete.

        Args:
            address: HOST:PORT of the source, a host of the site; "": the service.
            versions: Versions to pull, in their staging folders, oldest first.
            required: Numbers of the versions that must not be removed from the folder.

        Raises:
            OSError: The source cannot be reached.
            WrongDigest: The source has other bytes than the manifest says.
            DiskError: A version cannot be written.
            HolmesError: The source refuses this host, or has removed a version.
        """
        is_from_service = not address
        transfers: dict[StagedVersion, VersionTransfer] = {}
        for version in versions:
            self._arriving.add(version)
            missing_bytes = version.missing_bytes
            transfers[version] = VersionTransfer(
                version,
                is_over_wan=is_from_service,
                missing_bytes=missing_bytes,
                written_bytes=version.manifest.bytes - missing_bytes,
            )

        def on_bytes(version: StagedVersion, count: int) -> None:
            self._count(transfers[version], count)

        fetch = VersionFetch(
            versions,
            self._pool,
            address,
            self._settings.streams,
            on_bytes,
            stall_s=STALL_S if is_from_service else _SITE_STALL_S,
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
            fetch.stop()  # before the files are removed to which its threads write
            for version in versions:
                version.drop()
            raise
        finally:
            fetch.stop()

    def _finish(self, transfer: VersionTransfer, address: str) -> None:
        """Move a version, of which all chunks are written, to its final folder, and report it as staged."""
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
        """Count bytes of a version that have arrived."""
        transfer.written_bytes += count
        self._received += count
        if transfer.is_over_wan:
            self._received_wan += count

    def _dial(self, address: str) -> ReceivingStream:
        """Open a stream to a source.

        Args:
            address: HOST:PORT of another host of the site; "": the service.

        Raises:
            OSError: The source cannot be reached.
            Refused: The source refuses this process.
        """
        if not address:
            return ReceivingStream(self._call_service(), "the service", self._limit)
        host, port = split_address(address)
        deadline = Deadline(HANDSHAKE_S, f"calling {address}")
        channel = call(host, port, self._place.credentials, self._site, self._purpose(), deadline)
        return ReceivingStream(channel, address, RateLimit())

    def _call_service(self) -> Channel:
        return self._place.call(self._purpose(), Deadline(HANDSHAKE_S, "the service's handshake"))

    def _purpose(self) -> dict[str, Any]:
        """Return what this host says in the handshake of each connection. The "job" is the site's name."""
        return {"purpose": PURPOSE, "job": self._site, "incarnation": self._host_id}

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _serve_guest(self, guest: Guest) -> None:
        """Send manifests and chunks to another host of the same site, until its connection ends.

        Runs in the thread of the connection, which ends with the OSError of a lost connection.

        Args:
            guest: Connection that the listener has accepted, before its handshake.
        """
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        try:
            channel, purpose, _ = answer(
                guest.socket, self._place.credentials, deadline, on_tls=guest.becomes
            )
        except (NotHolmes, Refused):
            return
        if purpose.get("job") != self._site or purpose.get("purpose") != PURPOSE:
            return  # of another site, or not for weights
        if not guest.admit():
            return  # too many hosts are connected
        stream = SendingStream(channel, self._store, RateLimit(), arriving=self._arriving)
        while not self._ended.is_set():
            stream.answer(stream.next_request())


def _list_or_empty(value: object) -> list[Any]:
    """Return a value of a parsed JSON document if it is a list; otherwise an empty list."""
    return value if isinstance(value, list) else []


def _disk_error(store: VersionStore, error: OSError) -> DiskError:
    return DiskError(
        f"{store.path}: a version cannot be written there ({why(error)}); make space and start again"
    )
