"""A TCP port that strangers may reach: so many at a time, from one address and in all.

    accept -> a thread for each connection -> handle(guest)
                  stranger                    until guest.admit(): counted by address (of IPv6: by /64) and in
                                              all; where there are too many the oldest of the address that has
                                              most is closed
                  admitted                    counted in all; one address gets half of the places
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from holmes_ext.runtime.sockets.addresses import network_of, peer_host, prepare

#: Seconds until the next try when accept() fails: out of descriptors or of memory.
_RETRY_S = 0.1


class Guest:
    """One connection, in the thread that handles it. host: the other end's address; network: by which it is
    counted."""

    def __init__(self, connection: socket.socket, host: str, admit: Callable[[Guest], bool]):
        self.socket, self.host, self._admit = connection, host, admit
        self.network = network_of(host)
        self.kept = False

    def admit(self) -> bool:
        """It has shown that it may stay: no stranger any more. False where too many do."""
        return self._admit(self)

    def keep(self) -> None:
        """The socket is somebody else's from now on: it is not closed when the handler returns."""
        self.kept = True

    def becomes(self, wrapped: socket.socket) -> None:
        """TLS has taken the connection over: its socket object is another one."""
        self.socket = wrapped

    def cut(self) -> None:
        """From any thread: whoever reads or writes it gets an error, or an end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener:
    """Serves from start() until close(): handle(guest) in threads; then the socket is closed, unless
    guest.keep()."""

    def __init__(
        self,
        listening: socket.socket,
        handle: Callable[[Guest], None],
        name: str,
        strangers: int = 64,
        per_address: int = 16,
        admitted: int = 1024,
    ):
        self._socket, self._handle, self._name = listening, handle, name
        self._strangers_most, self._per_address, self._admitted_most = strangers, per_address, admitted
        self._lock = threading.Lock()
        self._strangers: list[Guest] = []  # oldest first
        self._admitted: set[Guest] = set()
        self._closed = False
        self.port: int = listening.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self.serve, name=self._name, daemon=True).start()

    def serve(self) -> None:
        """Until close(), whatever accept() raises meanwhile."""
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed or self._socket.fileno() < 0:
                    return
                time.sleep(_RETRY_S)
                continue
            try:
                self._welcome(connection)
            except (OSError, RuntimeError):  # gone already; no more threads
                connection.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            guests = [*self._strangers, *self._admitted]
        for guest in guests:
            guest.cut()

    def _welcome(self, connection: socket.socket) -> None:
        prepare(connection)
        guest = Guest(connection, peer_host(connection), self._admit)
        with self._lock:
            self._make_room(guest.network)
            self._strangers.append(guest)
        try:
            threading.Thread(target=self._run, args=(guest,), name=f"{self._name} guest", daemon=True).start()
        except RuntimeError:
            self._forget(guest)
            raise

    def _make_room(self, network: str) -> None:
        """Close a stranger where one more would be too many. Holds the lock."""
        networks = Counter(guest.network for guest in self._strangers)
        if networks[network] >= self._per_address:
            crowded = network
        elif len(self._strangers) >= self._strangers_most:
            crowded = networks.most_common(1)[0][0]
        else:
            return
        oldest = next(guest for guest in self._strangers if guest.network == crowded)
        self._strangers.remove(oldest)
        oldest.cut()

    def _admit(self, guest: Guest) -> bool:
        with self._lock:
            near = sum(other.network == guest.network for other in self._admitted)
            full = len(self._admitted) >= self._admitted_most or near >= self._admitted_most // 2 + 1
            if guest not in self._strangers or full:
                return False
            self._strangers.remove(guest)
            self._admitted.add(guest)
            return True

    def _forget(self, guest: Guest) -> None:
        with self._lock:
            if guest in self._strangers:
                self._strangers.remove(guest)
            self._admitted.discard(guest)

    def _run(self, guest: Guest) -> None:
        try:
            if self._closed:  # accepted while close() went through the guests
                return
            self._handle(guest)
        except OSError:
            pass
        finally:
            self._forget(guest)
            if not guest.kept:
                guest.socket.close()
