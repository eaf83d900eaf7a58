"""First contact of a restarted job with the coordinator, while the job imports its framework.

The coordinator (`holmes join serve`) lets jobs at several sites train one model. A job joins at its first
training step. A job that has joined before has a certificate already, so it can call the coordinator as soon
as it starts. Threads do before the first step what takes several round trips over a WAN:

    settings    rank 0 reads the settings of the run
    channel     rank 0 opens its connection for requests
    port        each rank opens a port for other jobs, and the coordinator finds out whether it can be called

If one of these fails, it is done again at the first step, which reports the error (admission.py,
listening.py). This module needs no torch, because the main thread may be importing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, JoinPlace, PortRange, port_range
from holmes_ext.join.coordinator.client import CoordinatorClient, in_thread, new_incarnation
from holmes_ext.join.coordinator.gate import SETTINGS
from holmes_ext.join.identity.job_certificate import kept_certificate
from holmes_ext.join.peers.listening import OpenedPort, open_and_publish
from holmes_ext.join.peers.routes import RankIdentity
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import HANDSHAKE_S, Credentials
from holmes_ext.options import Options
from holmes_ext.runtime.deadline import Deadline

T = TypeVar("T")
#: Settings that the coordinator requires of all jobs of a run; None: the first job brings the settings.
RunSettings = dict[str, Any] | None
#: Seconds after which the settings are read again: the coordinator may have been started with others.
_VALID_S = 60.0
#: Name of the threads.
_THREAD = "holmes-early"


class EarlyContact:
    """Settings, coordinator connection and open port, which threads get while the job starts.

    The constructor starts the threads and returns at once.

    Args:
        place: Address of the coordinator, and credentials and ports of the job.
        rank: Global rank of this process in its job.
    """

    def __init__(self, place: JoinPlace, rank: int):
        #: Random id of this start of the job. The job uses that of rank 0; other ranks get it later.
        self.incarnation = new_incarnation()
        #: Connection of rank 0 over which the job sends its requests; None on other ranks.
        self.channel: Future[Channel] | None = None
        self._settings_valid_until = time.monotonic() + _VALID_S
        self._settings: Future[RunSettings] | None = None  # None on ranks other than 0
        self._port: Future[OpenedPort] | None = None  # None if the user has named the ports
        if rank == 0:
            deadline = Deadline(HANDSHAKE_S, "the coordinator's answer")
            client = CoordinatorClient(place, dict, self.incarnation)
            self._settings = in_thread(lambda: settings_of_run(place, deadline), _THREAD)
            self.channel = in_thread(lambda: client.connect("job", deadline), _THREAD)
        # A port that the user has named is not opened yet: another process may still need it.
        may_use_any_port = place.ports.ports == PortRange().ports
        if may_use_any_port:
            identity = RankIdentity(place.address.job, self.incarnation, rank)
            self._port = in_thread(lambda: open_and_publish(place, identity), _THREAD)

    def settings(self, read_now: Callable[[], RunSettings]) -> RunSettings:
        """Return the settings of the run, after waiting for the thread that reads them.

        Args:
            read_now: Reads the settings in this thread. It is called if they were not read early, if reading
                failed, or if they are older than _VALID_S seconds.
        """
        if self._settings is None or time.monotonic() > self._settings_valid_until:
            return read_now()
        return _result_of(self._settings, read_now)

    def port(self, open_now: Callable[[], OpenedPort]) -> OpenedPort:
        """Return the open port of this rank, after waiting for the thread that opens it.

        Args:
            open_now: Opens a port in this thread. It is called if no port was opened early.
        """
        if self._port is None:
            return open_now()
        return _result_of(self._port, open_now)

    def close_channel(self) -> None:
        """Close the connection for requests as soon as it is open, because only rank 0 needs one."""

        def close_if_open(channel: Future[Channel]) -> None:
            if channel.exception() is None:
                channel.result().close()

        if self.channel is not None:
            self.channel.add_done_callback(close_if_open)


def begin_early_contact(
    address: JoinAddress, options: Options, environ: Mapping[str, str]
) -> EarlyContact | None:
    """Begin to contact the coordinator in threads, if the job has a certificate from an earlier start.

    Args:
        address: Name of the job, and address of the coordinator.
        options: Options of the job.
        environ: Environment variables: the rank, and where the certificate is kept.

    Returns:
        None if the job has no certificate yet, or if the certificate or an option cannot be used. The first
        step of the job then contacts the coordinator, and reports the error.
    """
    certificate_file = options.value("join_certificate")
    try:
        if certificate_file:
            credentials = Credentials.of_site(certificate_file, options.value("join_ca"))
        else:
            kept = kept_certificate(address, options.value("join_invitation"), environ)
            if kept is None:
                return None
            credentials = kept.credentials()
        ports = port_range(options.value("join_ports"), options.value("join_address"), environ)
        rank = int(environ.get("RANK", "0"))
    except (OSError, ValueError, HolmesError):
        return None
    return EarlyContact(JoinPlace(address, credentials, ports), rank)


def settings_of_run(place: JoinPlace, deadline: Deadline) -> RunSettings:
    """Read from the coordinator the settings that it requires of all jobs (`holmes join serve --outer`).

    Args:
        place: Address of the coordinator, and credentials of the job.
        deadline: End of the time to wait.

    Returns:
        None if the coordinator requires none. Then the first job that joins brings the settings of the run,
        and the coordinator refuses later jobs that differ from it.
    """
    purpose = {
        "purpose": SETTINGS,
        "job": place.address.job,
        "incarnation": new_incarnation(),
    }
    part = deadline.part(HANDSHAKE_S, "the coordinator's answer")
    channel = place.call(purpose, part)
    try:
        settings: RunSettings = channel.receive(part)["settings"]
        return settings
    finally:
        channel.close()


def _result_of(future: Future[T], do_now: Callable[[], T]) -> T:
    """Return the result of a future, after waiting for it; if it has an error, the result of do_now()."""
    if future.exception() is not None:
        return do_now()
    return future.result()
