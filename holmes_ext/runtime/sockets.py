"""Addresses as text, and a TCP port that strangers may reach: so many at a time, from one address and in all.

HOST:PORT may hold an IPv6 address ("[::1]:29600").

    accept -> a thread for each connection -> handle(guest)
                  stranger                    until guest.admit(): counted by address (of IPv6: by /64) and in
                                              all; where there are too many the oldest of the address that has
                                              most is closed
                  admitted                    counted in all; one address gets half of the places
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

_PORTS = 65536
#: Bits of an IPv6 prefix within which one host may take any address (RFC 4291, 2.5.4).
_ONE_SITE = 64
#: Of TCP's keepalive: seconds of silence before the first probe, between two, and how many are not answered.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 25, 5, 5


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """(host, port) of "HOST:PORT", or of "HOST" where there is a default. ValueError where it is neither."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [IPv6]:PORT")
        port_text = rest[1:]
        ipaddress.IPv6Address(host.partition("%")[0])
    elif text.count(":") > 1:
        raise ValueError(f"{text!r} needs brackets around its IPv6 address, as in [::1]:29600")
    else:
        host, _, port_text = text.partition(":")
    if not port_text and default_port is not None and not text.endswith(":"):
        return _host(host, text), default_port
    if not (port_text.isascii() and port_text.isdecimal()) or not 0 < int(port_text) < _PORTS:
        raise ValueError(f"{text!r} has no port from 1 to {_PORTS - 1}")
    return _host(host, text), int(port_text)


def _host(host: str, text: str) -> str:
    allowed = all(c.isascii() and (c.isalnum() or c in "-._:%") for c in host)
    labels = host.removesuffix(".").split(".")
    if not allowed or len(host) > 253 or not all(0 < len(label) < 64 for label in labels):
        raise ValueError(f"{text!r} has no host name or IP address")
    return host


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, as IPv4 where it is mapped into IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def peer_host(connection: socket.socket) -> str:
    """Who is at the other end: one text for an IPv4 address and the same one mapped into IPv6."""
    host = connection.getpeername()[0]
    return str(ip_of(host) or host)


def network_of(host: str) -> str:
    """What one caller can have many addresses of: the /64 of an IPv6 address; of IPv4 the address alone."""
    address = ip_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((address, _ONE_SITE), strict=False))
    return host


def is_loopback(host: str) -> bool:
    address = ip_of(host)
    return address is not None and address.is_loopback


def stays_on_host(connection: socket.socket) -> bool:
    """Whether both ends of a connection are loopback addresses of this host."""
    return is_loopback(connection.getpeername()[0]) and is_loopback(connection.getsockname()[0])


def prepare(connection: socket.socket) -> None:
    """Small messages go at once; a dead peer, or a forgetful NAT, is noticed within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; host "": all addresses, IPv6 too where there is. OSError."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("0.0.0.0", port))


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
        self._strangers_most, self._per_address, self._admitted_most = (
            strangers,
            per_address,
            admitted,
        )
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
            threading.Thread(
                target=self._run, args=(guest,), name=f"{self._name} guest", daemon=True
            ).start()
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
            full = (
                len(self._admitted) >= self._admitted_most or near >= self._admitted_most // 2 + 1
            )
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
