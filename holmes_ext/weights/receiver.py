"""Receiving host: keeps a folder up to date with the versions of the weights that a trainer publishes.

A site (data centre) has several such hosts. The service is the part of `holmes join serve` that sends
versions.

    main thread      reports to the service, and commits the version that the answer of the service names
    transfer thread  pulls missing versions, oldest first, from the service or from a host of the same site
    streams          connections for chunks: opened before they are needed, and kept (streams.py)
    site listener    sends versions to other hosts of the same site (site_listener.py)

Staged versions are complete in the folder; the committed version is in use. This host pulls from a source: a
host of the same site with the address HOST:PORT, or the service with the address "".

A broken connection is opened again. After an interruption, only the missing chunks of a version are pulled,
also after a restart of this process or of the service.
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
from holmes_ext.join.sockets.handshake import HANDSHAKE_S, Refused, call
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text, split_address
from holmes_ext.weights.exchange import PURPOSE, ReceivingStream
from holmes_ext.weights.fetch import STALL_S, DiskError, QuietSource, VersionFetch, WrongDigest
from holmes_ext.weights.manifest import VersionManifest
from holmes_ext.weights.rate import RateLimit
from holmes_ext.weights.site_listener import SiteListener
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
#: If connections to a host of the site break and no byte came for so many seconds, another source is used.
_SITE_STALL_S = 2.0
#: If a host of the site has had nothing to send in so many transfers, it is no longer used as a source.
_MOST_REFUSALS = 3
#: Most hosts of the same site that a report names as unreachable.
_MOST_UNREACHABLE = 8


@dataclass(frozen=True)
class ReceiverSettings:
    """Options of `holmes weights receive`, the process that receives versions of the weights on a host."""

    streams: int = 4  # number of connections for pulling a version
    keep: int = 3  # number of the newest versions that stay, besides those that are still required
    bits_per_second: float = 0.0  # limit on the rate of pulling over the WAN; 0: no limit
    # Address of this host for other hosts of the site; "": that of its connection to the service.
    address: str = ""
    is_once: bool = False  # end as soon as this host has the committed version


@dataclass
class VersionTransfer:
    """Progress of the transfer of one version of the weights to this host."""

    staged: StagedVersion  # the version, with its manifest and its files
    is_over_wan: bool  # from the service; False: from a host of the same site
    missing_bytes: int  # bytes of the version that were missing when the transfer began
    written_bytes: int  # bytes of the version that are written, with those of earlier transfers
    started: float = field(default_factory=time.monotonic)  # begin of the transfer

    @property
    def manifest(self) -> VersionManifest:
        """Return the manifest of the version."""
        return self.staged.manifest


#: Function that is called with each event, such as {"event": "committed", "version": 3}.
OnEvent = Callable[[dict[str, Any]], None]


class WeightsReceiver:
    """Process that keeps the folder of a host up to date with the published versions of the weights.

    Args:
        store: The folder.
        service: Address of `holmes join serve`, and the certificate of this site.
        listening: Listening socket for other hosts of the site.
        settings: Settings of this host.
        on_event: Called with each event, such as that a version is complete. Several threads call it.
    """

    def __init__(
        self,
        store: VersionStore,
        service: JoinPlace,
        listening: socket.socket,
        settings: ReceiverSettings,
        on_event: OnEvent = lambda event: None,
    ):
        self._store = store
        self._service = service
        self._settings = settings
        self._on_event = on_event
        self._site = service.address.job
        self._host_id = secrets.token_hex(16)
        self._limit = RateLimit(settings.bits_per_second)
        self._pool = StreamPool(self._dial, settings.streams)
        self._arriving = ArrivingVersions()
        self._listener = SiteListener(
            listening, self._site, service.credentials, store, self._arriving
        )
        self._channel: Channel | None = None  # to the service, for reports
        # Token of the service's last answer. The service waits with the next answer until the token changes.
        self._last_token = ""
        self._unreachable: tuple[str, ...] = ()  # HOST:PORT of hosts of the site
        # HOST:PORT of a host of the site -> number of transfers that failed because it had nothing to send.
        self._refusals: Counter[str] = Counter()
        self._received = 0  # bytes of chunks since the start
        self._received_wan = 0  # the part of them that came from the service
        self.transfer: VersionTransfer | None = None  # of the version that is pulled now
        self._transfer_thread: threading.Thread | None = None  # the latest one
        self._error: HolmesError | None = None  # error of a transfer, which ends this process
        self._ended = threading.Event()

    def run(self) -> None:
        """Receive all versions of the weights that are published, until close() is called.

        With the setting `is_once`, return as soon as the folder has the committed version.

        Raises:
            HolmesError: The service refuses this host, the disk is full, or a version is damaged.
        """
        self._listener.start()
        try:
            while not self._ended.is_set():
                if self._error is not None:
                    raise self._error
                reply = self._report()
                if reply is not None and self._follow_instructions(reply):
                    return
                if self._transfer_thread is not None:
                    self._transfer_thread.join(_BUSY_S)  # the end of a transfer is reported at once
        finally:
            self.close()

    def close(self) -> None:
        """Let run() return, and close all connections."""
        self._ended.set()
        self._listener.close()
        self._pool.close()
        self._disconnect()

    def _report(self) -> dict[str, Any] | None:
        """Report the state of this host to the service, and return its answer; None: it is not reached now.

        Raises:
            Refused: The service rejects this host.
        """
        try:
            if self._channel is None:
                self._channel = self._call_service()
                self._last_token = ""  # so the first answer comes at once
                self._unreachable = ()  # they may be reachable again
            stream = ReceivingStream(self._channel, "the service", RateLimit())
            request = {
                "op": "report",
                "report": asdict(self._current_report(self._channel)),
                "seen": self._last_token,
                "wait": 0.0 if self._is_pulling() else _NEWS_S,
            }
            reply = stream.ask(request)
            self._last_token = str(reply.get("token"))
            return reply
        except OSError as error:
            if self._channel is not None:
                self._on_event({"event": "lost", "reason": why(error)})
            self._disconnect()
            self._ended.wait(_RETRY_S)
            return None

    def _current_report(self, channel: Channel) -> HostReport:
        """Return the report on the state of this host; `channel` is the connection to the service."""
        transfer = self.transfer
        host = self._settings.address or channel.socket.getsockname()[0]
        return HostReport(
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

    def _follow_instructions(self, reply: dict[str, Any]) -> bool:
        """Carry out an answer of the service: commit a version, and start to pull missing versions.

        Args:
            reply: Answer of the service to a report; see service.py.

        Returns:
            Whether run() should return: with the setting `is_once`, as soon as this host has all required
            versions and uses the committed version.
        """
        versions = [version for version in reply["versions"] if isinstance(version, int)]
        commit = reply.get("commit")
        self._switch_to(commit)
        source = reply.get("source")
        if isinstance(source, dict) and not self._is_pulling():
            self._use_source(source, versions, reply.get("manifests"))
        if not self._settings.is_once or self._is_pulling():
            return False
        if not versions:
            return False  # nothing is published yet
        has_all = all(self._store.has(version) for version in versions)
        return has_all and self._store.current == commit

    def _switch_to(self, version: object) -> None:
        """Make a version the one in use at this host, if the folder has all files that it needs.

        Args:
            version: Number of the version; any other object is ignored.
        """
        if not isinstance(version, int) or version == self._store.current:
            return
        if not self._store.has(version):
            return
        try:
            self._store.check_chain(version)
            self._store.commit(version)
        except OSError as error:
            raise DiskError.of_folder(self._store.path, error) from None
        except HolmesError:
            return  # a version of the chain is still missing
        self._on_event({"event": "committed", "version": version})

    def _is_pulling(self) -> bool:
        return self._transfer_thread is not None and self._transfer_thread.is_alive()

    def _use_source(self, source: dict[str, Any], required: list[int], documents: object) -> None:
        """Start a thread that pulls missing versions from a source. If none is missing, only connect to it.

        The connections are used for the next version.

        Args:
            source: Address of the source, and the versions to pull from it; the fields of class Source.
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
        self._transfer_thread = threading.Thread(
            target=self._pull,
            args=(address, missing, required, manifests),
            name="holmes-weights-pull",
            daemon=True,
        )
        self._transfer_thread.start()

    def _pull(
        self,
        address: str,
        missing: list[int],
        required: list[int],
        manifests: dict[int, VersionManifest],
    ) -> None:
        """Pull versions from a source until they are complete, or the transfer fails.

        Runs in the transfer thread.

        Args:
            address: Address of the source: HOST:PORT of a host of the site; "": the service.
            missing: Numbers of the versions, oldest first.
            required: Versions that must not be removed from the folder.
            manifests: Manifests that the service has sent; the other manifests are requested from the source.
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
        """Prepare for another try after a failed transfer, or end this process if another try cannot help.

            source              error                      reaction
            host of the site    it has no bytes yet        it is used again (limit: _MOST_REFUSALS)
            host of the site    any other                  the next report names it as unreachable
            the service         it has sent wrong bytes    this process ends with the error
            the service         any other                  it is used again

        Args:
            address: HOST:PORT of the source, a host of the site; "": the service.
            error: Why the transfer failed.
        """
        has_no_bytes_yet = isinstance(error, Refused | QuietSource)
        if address:
            if has_no_bytes_yet:
                self._refusals[address] += 1
            is_used_again = has_no_bytes_yet and self._refusals[address] < _MOST_REFUSALS
            if not is_used_again:
                self._unreachable = (*self._unreachable, address)[-_MOST_UNREACHABLE:]
        elif isinstance(error, HolmesError) and not has_no_bytes_yet:
            self._error = error  # wrong bytes: another transfer would get the same ones
            return
        self._on_event({"event": "broken", "source": address or "service", "reason": why(error)})
        self._ended.wait(_RETRY_S)

    def _manifest_from(self, address: str, version: int) -> VersionManifest:
        """Request the manifest of a version from a source (HOST:PORT; "": the service), and return it."""
        stream = self._pool.take(address)
        try:
            manifest = stream.manifest(version)
        except BaseException:
            stream.close()
            raise
        self._pool.give_back(address, stream)
        return manifest

    def _stage(self, manifests: Sequence[VersionManifest]) -> list[StagedVersion]:
        """Create the staging folders of versions, and reserve their space on the disk.

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
                raise DiskError.of_folder(self._store.path, error) from None
            raise DiskError(str(error)) from None
        return versions

    def _pull_chunks(
        self, address: str, versions: Sequence[StagedVersion], required: list[int]
    ) -> None:
        """Pull the missing chunks of versions, and move each complete version to its final folder.

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
                self._finish(transfer, source=address or "service")
                self._store.remove_old(self._settings.keep, protected=required)
        except WrongDigest:
            fetch.stop()  # its threads write to the files that are removed now
            for version in versions:
                version.drop()
            raise
        finally:
            fetch.stop()

    def _finish(self, transfer: VersionTransfer, source: str) -> None:
        """Move a complete version to its final folder, and call `on_event` with the event "staged".

        Args:
            transfer: The transfer, with the complete version in its staging folder.
            source: Name of the source in the event: "service", or HOST:PORT of a host of the site.
        """
        try:
            transfer.staged.finish()
        except OSError as error:
            raise DiskError.of_folder(self._store.path, error) from None
        self._arriving.remove(transfer.staged)
        self._on_event(
            {
                "event": "staged",
                "version": transfer.manifest.version,
                "bytes": transfer.manifest.bytes,
                "pulled_bytes": transfer.missing_bytes,
                "seconds": round(time.monotonic() - transfer.started, 3),
                "source": source,
            }
        )

    def _count(self, transfer: VersionTransfer, count: int) -> None:
        """Add bytes of a version that have arrived to the totals of the transfer and of this process."""
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
        credentials = self._service.credentials
        channel = call(host, port, credentials, self._site, self._introduction(), deadline)
        return ReceivingStream(channel, address, RateLimit())

    def _call_service(self) -> Channel:
        deadline = Deadline(HANDSHAKE_S, "the service's handshake")
        return self._service.call(self._introduction(), deadline)

    def _introduction(self) -> dict[str, Any]:
        """Return the message that identifies this host in the handshake of each connection that it opens.

        Its keys are those of joined jobs. The "job" is the name of the site.
        """
        return {"purpose": PURPOSE, "job": self._site, "incarnation": self._host_id}

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _list_or_empty(value: object) -> list[Any]:
    """Return a value of a parsed JSON document if it is a list; otherwise an empty list."""
    return value if isinstance(value, list) else []
