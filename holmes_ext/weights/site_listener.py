"""Sends versions of the weights from a receiving host to other hosts of the same site (data centre).

So each version crosses the WAN once for a site. Chunks of a version that is still arriving at this host are
sent on as soon as they are written.
"""

from __future__ import annotations

import socket
import threading

from holmes_ext.join.sockets.handshake import HANDSHAKE_S, Credentials, NotHolmes, Refused, answer
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener
from holmes_ext.weights.exchange import PURPOSE, SendingStream
from holmes_ext.weights.rate import RateLimit
from holmes_ext.weights.staging import ArrivingVersions
from holmes_ext.weights.store import VersionStore

#: Most connections from other hosts of the site at a time.
_MOST_CONNECTIONS = 256


class SiteListener:
    """Server on a receiving host that sends versions of the weights to other hosts of the same site.

    Args:
        listening: Listening socket for the other hosts.
        site: Name of the site. Hosts of other sites are refused.
        credentials: Certificate of the site, for TLS.
        store: Folder with the complete versions of this host.
        arriving: The versions that are arriving at this host.
    """

    def __init__(
        self,
        listening: socket.socket,
        site: str,
        credentials: Credentials,
        store: VersionStore,
        arriving: ArrivingVersions,
    ):
        self._site = site
        self._credentials = credentials
        self._store = store
        self._arriving = arriving
        self._ended = threading.Event()
        self._listener = Listener(
            listening, self._serve, "holmes-weights", admitted=_MOST_CONNECTIONS
        )

    @property
    def port(self) -> int:
        """Return the port of the listening socket."""
        return self._listener.port

    def start(self) -> None:
        """Begin to accept connections, in threads."""
        self._listener.start()

    def close(self) -> None:
        """Close the listening socket and all connections."""
        self._ended.set()
        self._listener.close()

    def _serve(self, guest: Guest) -> None:
        """Send manifests and chunks to another host of the site, until its connection ends.

        Runs in the thread of the connection, and ends with an OSError when the connection is lost.

        Args:
            guest: Connection that was accepted, before its handshake.
        """
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        try:
            # guest.becomes(): the listener uses the TLS socket that answer() makes of the connection.
            caller = answer(guest.socket, self._credentials, deadline, on_tls=guest.becomes)
        except (NotHolmes, Refused):
            return
        is_of_site = caller.purpose.get("job") == self._site
        wants_weights = caller.purpose.get("purpose") == PURPOSE
        if not is_of_site or not wants_weights:
            return
        is_admitted = guest.admit()  # False: there are too many connections
        if not is_admitted:
            return
        stream = SendingStream(caller.channel, self._store, RateLimit(), arriving=self._arriving)
        while not self._ended.is_set():
            stream.answer(stream.next_request())
