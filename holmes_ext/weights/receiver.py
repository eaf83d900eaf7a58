"""Receiving host: keeps a folder up to date with the versions that `holmes weights publish` publishes.

    main thread      reports to the service, and commits the version that it names
    transfer thread  pulls missing versions, oldest first, from the service or from a host of the same site
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
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
from holmes_ext.weights.fetch import STALL_S, DiskError, VersionFetch, WrongDigest
from holmes_ext.weights.manifest import VersionManifest
from holmes_ext.weights.rate import RateLimit
from holmes_ext.weights.sites import HostReport
from holmes_ext.weights.store import StagedVersion, VersionStore
from holmes_ext.words import why

#: Seconds between two attempts to reach the service.
_RETRY_S = 0.5
#: Longest wait of a report for news, in seconds: while a version is pulled, and otherwise.
_BUSY_WAIT_S = 0.1
_IDLE_WAIT_S = 2.0
#: Seconds without a byte after which a host of the same site is given up if its connections break.
_SITE_STALL_S = 2.0
#: Refused transfers after which a host of the same site is given up.
_MOST_REFUSALS = 20
#: Connections from other hosts of the site at a time.
_MOST_GUESTS = 256


@dataclass(frozen=True)
class ReceiverSettings:
    """Settings of a receiving host."""

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
    written_bytes: int = 0  # of the version, with those of earlier tries
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
        self._channel: Channel | None = None  # to the service, for reports
        self._seen = ""  # token of the answer that was received last
        self._unreachable: tuple[str, ...] = ()
        self._refusals: Counter[str] = (
            Counter()
        )  # HOST:PORT of a host of the site -> refused transfers
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
        finally:
            self.close()

    def close(self) -> None:
        """End run(), and all connections."""
        self._ended.set()
        self._listener.close()
        self._disconnect()

    def _report(self) -> dict[str, Any] | None:
        """Send a report to the service, and return its answer; None: the service cannot be reached now."""
        try:
            if self._channel is None:
                self._channel = self._call_service()
                self._seen = ""
                self._unreachable = ()
            stream = ReceivingStream(self._channel, "the service", self._limit, lambda count: None)
            is_idle = self._pulling is None or not self._pulling.is_alive()
            request = {
                "op": "report",
                "report": asdict(self._own_report(self._channel)),
                "seen": self._seen,
                "wait": _IDLE_WAIT_S if is_idle else _BUSY_WAIT_S,
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
        self._start_pulling(reply.get("source"), versions)
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

    def _start_pulling(self, source: object, versions: list[int]) -> None:
        """Start the transfer thread if the service names a source, and it does not run."""
        if not isinstance(source, dict) or self._is_pulling():
            return
        address = str(source.get("address"))
        missing = [version for version in versions if not self._store.has(version)]
        if missing:
            # The thread pulls all of them from the service, but only one from another host: by then, that
            # host may not have the next one.
            wanted = missing if not address else missing[:1]
            manifests = {} if address else self._manifests(wanted)
            self._pulling = threading.Thread(
                target=self._pull,
                args=(address, wanted, versions, manifests),
                name="holmes-weights-pull",
                daemon=True,
            )
            self._pulling.start()

    def _manifests(self, versions: list[int]) -> dict[int, VersionManifest]:
        """Return the manifests of versions from the service, over the open connection for reports.

        It takes one round trip each. Those that cannot be got are left out: the transfer thread tries again.
        """
        manifests: dict[int, VersionManifest] = {}
        if self._channel is None:
            return manifests
        stream = ReceivingStream(self._channel, "the service", RateLimit(), lambda count: None)
        try:
            for version in versions:
                manifests[version] = stream.manifest(version)
        except OSError:
            self._disconnect()
        except Refused:
            pass  # the version was removed meanwhile
        return manifests

    def _pull(
        self,
        address: str,
        missing: list[int],
        required: list[int],
        manifests: Mapping[int, VersionManifest],
    ) -> None:
        """Pull versions from a source, in the transfer thread.

        Args:
            address: HOST:PORT of a host of the site; "": the service.
            missing: The versions.
            required: Versions that must not be removed from the folder.
            manifests: Manifests of versions that are here already.
        """
        try:
            for version in missing:
                manifest = manifests.get(version) or self._manifest_from(address, version)
                self._pull_version(address, manifest)
                self._store.remove_old(self._settings.keep, protected=required)
        except DiskError as error:
            self._error = error
        except (OSError, HolmesError) as error:
            self._give_up(address, error)
        finally:
            self.transfer = None

    def _give_up(self, address: str, error: Exception) -> None:
        """Handle a failed transfer: use another source, or end this process if that cannot help."""
        is_refused = isinstance(error, Refused)
        self._refusals[address] += is_refused
        # A host refuses a chunk that has not arrived there in time: it is tried again.
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
        """Return the manifest of a version from a source, over a new connection."""
        stream = self._dial(address, lambda count: None)
        try:
            return stream.manifest(version)
        finally:
            stream.close()

    def _pull_version(self, address: str, manifest: VersionManifest) -> None:
        """Pull a version from a source, and let it appear in the folder.

        Raises:
            OSError: The source cannot be reached.
            HolmesError: See VersionFetch.run().
        """
        is_over_wan = not address
        staged = self._stage(manifest)
        try:
            missing_bytes = sum(manifest.chunks[index].length for index in staged.missing)
            transfer = VersionTransfer(staged, is_over_wan, manifest.bytes - missing_bytes)
            self.transfer = transfer
            count = partial(self._count, transfer)
            fetch = VersionFetch(
                staged,
                partial(self._dial, address),
                self._settings.streams,
                count,
                stall_s=STALL_S if is_over_wan else _SITE_STALL_S,
            )
            fetch.run()
        except WrongDigest:
            staged.drop()
            raise
        except BaseException:
            staged.close()
            raise
        try:
            staged.finish()
        except OSError as error:
            raise _disk_error(self._store, error) from None
        self._tell(
            {
                "event": "staged",
                "version": manifest.version,
                "bytes": manifest.bytes,
                "pulled_bytes": missing_bytes,
                "seconds": round(time.monotonic() - transfer.started, 3),
                "source": address or "service",
            }
        )

    def _stage(self, manifest: VersionManifest) -> StagedVersion:
        try:
            return self._store.stage(manifest)
        except OSError as error:
            raise _disk_error(self._store, error) from None
        except HolmesError as error:
            raise DiskError(str(error)) from None

    def _count(self, transfer: VersionTransfer, count: int) -> None:
        transfer.written_bytes += count
        self._received += count
        if transfer.is_over_wan:
            self._received_wan += count

    def _dial(self, address: str, on_bytes: Callable[[int], None]) -> ReceivingStream:
        """Open a stream to a source.

        Args:
            address: HOST:PORT of a host of the site; "": the service.
            on_bytes: Called with the number of bytes of each part that arrives.
        """
        if not address:
            return ReceivingStream(self._call_service(), "the service", self._limit, on_bytes)
        host, port = split_address(address)
        deadline = Deadline(HANDSHAKE_S, f"calling {address}")
        channel = call(host, port, self._place.credentials, self._site, self._purpose(), deadline)
        return ReceivingStream(channel, address, RateLimit(), on_bytes)

    def _call_service(self) -> Channel:
        return self._place.call(self._purpose(), Deadline(HANDSHAKE_S, "the service's handshake"))

    def _purpose(self) -> dict[str, Any]:
        return {"purpose": PURPOSE, "job": self._site, "incarnation": self._host_id}

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _arriving(self) -> StagedVersion | None:
        transfer = self.transfer
        return None if transfer is None else transfer.staged

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
