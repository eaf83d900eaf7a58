"""First contact of a restarted job with the coordinator, while the job imports its framework.

A job joins others at its first step. A job that starts again has a certificate already. So threads do before
that step what takes several round trips over a WAN:

    settings    rank 0 reads the settings of the run
    channel     rank 0 opens its connection for requests
    port        each rank opens a port for other jobs, and the coordinator finds out whether it can be called

What fails here is done again at the first step, which reports the error (admission.py, listening.py). Needs
no torch, because the main thread may be importing it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, JoinPlace, PortRange, port_range
from holmes_ext.join.coordinator.client import CoordinatorClient, new_incarnation
from holmes_ext.join.coordinator.gate import SETTINGS
from holmes_ext.join.identity.job_certificate import kept_certificate
from holmes_ext.join.peers.listening import OpenedPort, open_and_publish
from holmes_ext.join.peers.routes import RankIdentity
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import HANDSHAKE_S, Credentials
from holmes_ext.options import Options
from holmes_ext.runtime.deadline import Deadline

T = TypeVar("T")
#: Settings of a run, as `holmes join serve` gives them; None: the jobs bring them.
RunSettings = dict[str, Any] | None
#: Seconds after which the settings are read again: the coordinator may have been started with others.
_VALID_S = 60.0


class EarlyContact:
    """Settings of the run, connection and port of this rank, which threads get in the background.

    Args:
        place: Coordinator, credentials and ports of the job.
        rank: This rank.
    """

    def __init__(self, place: JoinPlace, rank: int):
        #: Name of this start of the job, if this is rank 0.
        self.incarnation = new_incarnation()
        #: Connection of this start of the job for its requests; None on other ranks.
        self.channel: Future[Channel] | None = None
        self._end = time.monotonic() + _VALID_S
        self._settings: Future[RunSettings] | None = None
        self._port: Future[OpenedPort] | None = None
        identity = RankIdentity(place.address.job, self.incarnation, rank)
        if rank == 0:
            deadline = Deadline(HANDSHAKE_S, "the coordinator's answer")
            client = CoordinatorClient(place, dict, self.incarnation)
            self._settings = _in_thread(lambda: settings_of_run(place, deadline))
            self.channel = _in_thread(lambda: client.connect("job", deadline))
        # Another process may need a port that the user has given.
        if place.ports.ports == PortRange().ports:
            self._port = _in_thread(lambda: open_and_publish(place, identity))

    def settings(self, read_now: Callable[[], RunSettings]) -> RunSettings:
        """Return the settings of the run; those of read_now() if they have not been read, or are old."""
        if self._settings is None or time.monotonic() > self._end:
            return read_now()
        return _result_of(self._settings, read_now)

    def port(self, open_now: Callable[[], OpenedPort]) -> OpenedPort:
        """Return the port of this rank; that of open_now() if it could not be opened."""
        if self._port is None:
            return open_now()
        return _result_of(self._port, open_now)

    def close_channel(self) -> None:
        """Close the connection for requests, because this is not rank 0 of the job after all."""

        def close(opened: Future[Channel]) -> None:
            if opened.exception() is None:
                opened.result().close()

        if self.channel is not None:
            self.channel.add_done_callback(close)


def begin_early_contact(
    address: JoinAddress, options: Options, environ: Mapping[str, str]
) -> EarlyContact | None:
    """Begin to contact the coordinator, if the job has a certificate already.

    Args:
        address: Name of the job, and address of the coordinator.
        options: Options of the job.
        environ: Environment variables, which say where the certificate is kept.

    Returns:
        None if the job has no certificate yet, or if it cannot be read.
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
    """Return the settings that the coordinator requires of all jobs (`holmes join serve --outer`).

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


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process from ending; return its result to come."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - _result_of() gets it
            future.set_exception(error)

    threading.Thread(target=run, name="holmes-early", daemon=True).start()
    return future


def _result_of(future: Future[T], do_now: Callable[[], T]) -> T:
    """Return a result, after waiting for it; that of do_now() if there was an error."""
    if future.exception() is not None:
        return do_now()
    return future.result()
