"""TCP helpers: addresses as text, a listener that untrusted clients may reach, and a test of a connection.

Addresses are HOST:PORT. HOST may be an IPv6 address in brackets, such as "[::1]:29600".

A Listener runs one thread for each connection. It limits the connections, so that unknown clients cannot use
up all threads:

    stranger   every connection until its handler calls guest.admit(). Strangers are counted in all, and for
               each address (IPv6: each /64 network). If there are too many, the oldest connection of the
               address that has most of them is closed.
    admitted   connections whose client has authenticated itself. They are counted in all, and an address
               gets about half of the places.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

_PORT_COUNT = 65536
_MOST_HOST_LENGTH = 253  # characters of a host name (RFC 1035, 2.3.4)
_MOST_LABEL_LENGTH = 63  # characters between two dots of a host name
#: Bits of the IPv6 prefix of a network: a single host may take any address with it (RFC 4291, 2.5.4).
_IPV6_SITE_BITS = 64
_KEEPALIVE_IDLE_S = 25  # silence before TCP's first keepalive probe
_KEEPALIVE_INTERVAL_S = 5  # between two probes
_KEEPALIVE_COUNT = 5  # unanswered probes until the connection fails
#: Seconds until the next try if accept() fails because descriptors or memory are used up.
_RETRY_S = 0.1
_MOST_HELLO_BYTES = 4096


# Addresses


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return host and port of "HOST:PORT", or of "HOST" if there is a default port.

    Args:
        text: The address. An IPv6 address stands in brackets: "[::1]:29600".
        default_port: Port for a text without a port; None if the text must have a port.

    Raises:
        ValueError: The text is no such address. The message quotes the text.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not [IPv6]:PORT")
        port_text = rest[1:]  # without the colon
        ipaddress.IPv6Address(host.partition("%")[0])  # raises ValueError; "%eth0" is a scope
    elif text.count(":") > 1:
        raise ValueError(f"{text!r} needs brackets around its IPv6 address, as in [::1]:29600")
    else:
        host, _, port_text = text.partition(":")
    if not port_text and default_port is not None and not text.endswith(":"):
        _check_host(host, text)
        return host, default_port
    is_number = port_text.isascii() and port_text.isdecimal()
    if not is_number or not 0 < int(port_text) < _PORT_COUNT:
        raise ValueError(f"{text!r} has no port from 1 to {_PORT_COUNT - 1}")
    _check_host(host, text)
    return host, int(port_text)


def _check_host(host: str, text: str) -> None:
    """Raise ValueError if `host` is neither a host name nor an IP address. The message quotes `text`."""
    has_valid_characters = all(c.isascii() and (c.isalnum() or c in "-._:%") for c in host)
    labels = host.removesuffix(".").split(".")
    has_valid_labels = all(0 < len(label) <= _MOST_LABEL_LENGTH for label in labels)
    if not has_valid_characters or not has_valid_labels or len(host) > _MOST_HOST_LENGTH:
        raise ValueError(f"{text!r} has no host name or IP address")


def address_text(host: str, port: int) -> str:
    """Return "HOST:PORT", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return `host` as an IP address; None if it is a name.

    An IPv4 address that is mapped into IPv6 (::ffff:10.0.0.1) is returned as IPv4 address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def peer_host(connection: socket.socket) -> str:
    """Return the IP address at the other end of a connection; ::ffff:10.0.0.1 is returned as 10.0.0.1."""
    host = connection.getpeername()[0]
    return str(ip_of(host) or host)


def network_of(host: str) -> str:
    """Return the network of an address. All addresses of such a network probably belong to the same client.

    This is the /64 network of an IPv6 address, and an IPv4 address itself.
    """
    address = ip_of(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((address, _IPV6_SITE_BITS), strict=False))
    return host


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address; False for a host name."""
    address = ip_of(host)
    return address is not None and address.is_loopback


def stays_on_host(connection: socket.socket) -> bool:
    """Return whether both ends of a connection are loopback addresses of this host."""
    return is_loopback(connection.getpeername()[0]) and is_loopback(connection.getsockname()[0])


def shares_host(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is on this host, as far as its address says."""
    own_host = ip_of(connection.getsockname()[0])
    return stays_on_host(connection) or own_host == ip_of(connection.getpeername()[0])


# Sockets


def prepare(connection: socket.socket) -> None:
    """Set TCP options of a connection: no delay for small messages, and keepalive probes.

    With the probes, the connection fails within a minute if the peer is dead or a NAT has forgotten it.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Args:
        host: Host name or IP address; "" for all addresses, with those of IPv6 if the system has it.
        port: TCP port; 0 for any free port.

    Raises:
        OSError: The system refuses it, e.g. because the port is in use.
    """
    if host:
        first_address, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family = first_address[0]  # IPv4 or IPv6
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise  # else IPv6 cannot be used here, and IPv4 alone is tried
    return socket.create_server(("0.0.0.0", port))


class Guest:
    """Connection that a Listener has accepted, as the handler gets it."""

    def __init__(self, connection: socket.socket, host: str, admit: Callable[[Guest], bool]):
        """Wrap a connection that a TCP listener has accepted.

        Args:
            connection: The connection.
            host: IP address of the other end.
            admit: Called when the other end has identified itself. It moves the guest from the list of
                unidentified guests (strangers) to the admitted guests, and returns whether the limit of
                admitted guests allows it.
        """
        self.socket = connection
        self.host = host
        self._admit = admit
        self.network = network_of(host)  # guests of the same network share a limit
        self.kept = False  # whether the handler keeps the socket open after it returns

    def admit(self) -> bool:
        """Count this connection as authenticated, because its client has identified itself.

        Returns:
            False if there are too many authenticated connections; then the handler should return.
        """
        return self._admit(self)

    def keep(self) -> None:
        """Keep the socket open when the handler of the connection returns: other code uses it from now on."""
        self.kept = True

    def becomes(self, wrapped: socket.socket) -> None:
        """Replace this guest's socket by the TLS socket that wraps it, for all later calls."""
        self.socket = wrapped

    def cut(self) -> None:
        """Shut the connection down: threads that read or write it return. Any thread may call this."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Listener:
    """TCP listener that handles each connection in a thread of its own, with limits for unknown clients."""

    def __init__(
        self,
        listening: socket.socket,
        handle: Callable[[Guest], None],
        name: str,
        strangers: int = 64,
        per_address: int = 16,
        admitted: int = 1024,
    ):
        """Create a TCP listener. Connections are accepted after start().

        A guest is a connection. Guests are strangers until the handler has identified and admitted them.
        Limits on strangers keep clients that identify themselves from being shut out by others.

        Args:
            listening: The listening socket.
            handle: Called with each guest in the guest's thread. When it returns, the guest's socket is
                closed unless guest.keep() was called.
            name: Name of the threads.
            strangers: Largest number of guests that are not admitted.
            per_address: Largest number of guests from the same address that are not admitted.
            admitted: Largest number of admitted guests.
        """
        self._socket = listening
        self._handle = handle
        self._name = name
        self._most_strangers = strangers
        self._most_per_address = per_address
        self._most_admitted = admitted
        self._lock = threading.Lock()  # held while the two lists of guests are read or changed
        self._strangers: list[Guest] = []  # oldest first
        self._admitted: set[Guest] = set()
        self._closed = False
        self.port: int = listening.getsockname()[1]

    def start(self) -> None:
        """Accept connections in a new thread."""
        threading.Thread(target=self.serve, name=self._name, daemon=True).start()

    def serve(self) -> None:
        """Accept connections until close(), even if accept() fails in between."""
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed or self._socket.fileno() < 0:
                    return
                # Too many open files, for example: try again.
                time.sleep(_RETRY_S)
                continue
            try:
                self._welcome(connection)
            except (OSError, RuntimeError):  # the client has gone, or no thread can be started
                connection.close()

    def close(self) -> None:
        """Stop accepting connections, and shut down those of all guests."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            guests = [*self._strangers, *self._admitted]
        for guest in guests:
            guest.cut()

    def _welcome(self, connection: socket.socket) -> None:
        """Start the thread that handles a new connection.

        The connection counts as a stranger until the handler has authenticated its client.
        Strangers are limited, so that they cannot use up all threads. At a limit, the oldest
        stranger of an IP network (address range) is disconnected:

            limit of the client's network    a stranger of this network
            limit of all strangers           a stranger of the network that has the most strangers

        Raises:
            RuntimeError: No thread can be started.
        """
        prepare(connection)
        # The handler calls _admit() through the guest when it has authenticated the client.
        guest = Guest(connection, peer_host(connection), self._admit)
        with self._lock:
            self._disconnect_stranger_over_limit(guest.network)
            self._strangers.append(guest)
        thread = threading.Thread(
            target=self._run, args=(guest,), name=f"{self._name} guest", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            self._forget(guest)
            raise

    def _disconnect_stranger_over_limit(self, network: str) -> None:
        """Disconnect the oldest suitable stranger if a new stranger from `network` would exceed a limit.

        A stranger is a connection that is not admitted yet. If `network` has reached its limit, a stranger of
        this network is disconnected. If the limit of all strangers is reached, a stranger of the network with
        most strangers is disconnected. The caller holds the lock.
        """
        counts = Counter(guest.network for guest in self._strangers)
        if counts[network] >= self._most_per_address:
            crowded = network
        elif len(self._strangers) >= self._most_strangers:
            [(crowded, _)] = counts.most_common(1)
        else:
            return  # no limit is reached
        oldest = next(guest for guest in self._strangers if guest.network == crowded)
        self._strangers.remove(oldest)
        oldest.cut()  # shuts the connection down

    def _admit(self, guest: Guest) -> bool:
        """Count a connection as authenticated from now on, if the limits of such connections allow it.

        The number of authenticated connections is limited, in all and for each IP network of clients.

        Returns:
            False if a limit is reached, or if the connection was cut meanwhile.
        """
        most_per_network = self._most_admitted // 2 + 1
        with self._lock:
            same_network = sum(other.network == guest.network for other in self._admitted)
            is_full = len(self._admitted) >= self._most_admitted or same_network >= most_per_network
            if guest not in self._strangers or is_full:
                return False
            self._strangers.remove(guest)
            self._admitted.add(guest)
            return True

    def _forget(self, guest: Guest) -> None:
        """Stop counting a connection that has ended."""
        with self._lock:
            if guest in self._strangers:
                self._strangers.remove(guest)
            self._admitted.discard(guest)

    def _run(self, guest: Guest) -> None:
        """Handle a guest, and close its socket afterwards unless the handler keeps it.

        This is the function of the guest's thread.
        """
        try:
            if self._closed:  # accepted while close() disconnected the guests
                return
            self._handle(guest)
        except OSError:  # the connection has failed
            pass
        finally:
            self._forget(guest)
            if not guest.kept:
                guest.socket.close()


# A test that a connection leads to the expected node


def answer_hello(guest: Guest, hello: dict[str, str], answer_s: float) -> None:
    """Read a line from a guest, and answer with `hello` as a line of JSON.

    Args:
        guest: The connection to a client that has called exchange_hello().
        hello: Identifies this node and the job.
        answer_s: Seconds that each call on the socket may take.
    """
    guest.socket.settimeout(answer_s)
    guest.socket.makefile("rb").readline(_MOST_HELLO_BYTES)
    guest.socket.sendall(json.dumps(hello).encode() + b"\n")


def exchange_hello(
    source: str,
    target: tuple[str, int],
    hello: dict[str, str],
    expected: dict[str, str],
    connect_s: float,
    answer_s: float,
) -> str:
    """Connect to an address, and check that the expected node answers.

    Args:
        source: IP address of this host; the connection is made from it.
        target: IP address and port of the other node. It must call answer_hello().
        hello: Identifies this node and the job: {"node": ..., "token": ...}.
        expected: The answer of the expected node.
        connect_s: Seconds until the other end must accept the connection.
        answer_s: Seconds until it must answer.

    Returns:
        "" if the expected node answered, else the error in words.
    """
    try:
        connection = socket.create_connection(target, timeout=connect_s, source_address=(source, 0))
    except TimeoutError:
        return f"no answer to connect within {connect_s:g} s"
    except OSError as error:
        return f"connect: {error.strerror or error}"
    with connection:
        try:
            connection.settimeout(answer_s)
            # Both ends send a line of JSON.
            connection.sendall(json.dumps(hello).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(_MOST_HELLO_BYTES))
        except TimeoutError:
            return f"connected, but no answer within {answer_s:g} s"
        except OSError as error:
            # An error of the operating system has a text (strerror), such as "Connection reset by
            # peer". An error without a text is taken for an answer of a process outside of this
            # job.
            return f"connected, but the answer failed: {error.strerror or 'it is not of this job'}"
        except (ValueError, RecursionError):  # RecursionError: lists in lists, hundreds of times
            return "connected, but the answer failed: it is not of this job"
    if answer == expected:
        return ""
    if isinstance(answer, dict):
        return f"the address is answered by node {answer.get('node')!r}, so two nodes have it"
    return "not of this job"
