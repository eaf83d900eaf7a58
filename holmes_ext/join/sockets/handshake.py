"""Mutual authentication: each end of a connection checks the other end's certificate and the name in it.

    1. TLS 1.3: both ends show a certificate of the same CA (certificates.py)
    2. listener    {"holmes": 3}
    3. caller      {"holmes": 3, "purpose": {...}}     use of the connection, and the caller's job
    4. listener    {}                                  or {"error": a line of text}

The caller wants to reach a certain job, or the coordinator. It sends nothing before the listener's
certificate has shown this name. The listener answers a caller only if the purpose names a job that is in the
caller's certificate. Both refuse certificates that were revoked. Nothing else authenticates the ends or their
messages.

Anybody on the way can make TLS fail. This proves nothing: it is a ConnectionError, and the caller retries.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.certificates import (
    COORDINATOR,
    Holder,
    KeyPair,
    TlsContexts,
    contexts_of,
    holder_of,
    site_contexts,
)
from holmes_ext.join.sockets.channel import BrokenFrame, Channel
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text, ip_of, prepare
from holmes_ext.words import why

#: Version of the protocol.
VERSION = 3
#: Seconds that a handshake may take.
HANDSHAKE_S = 10.0
#: Prefixes of an entry of a revocation list: hash of a certificate, or a name in it.
BY_FINGERPRINT = "sha256:"
BY_NAME = "name:"
#: Most bytes of a frame from an end that is not authenticated: anybody can send such a frame.
_LONGEST_UNPROVEN_BYTES = 8192
#: First byte of TLS's first record. In a frame it would mean a length of 370 MB.
_TLS = b"\x16"
#: OpenSSL's reasons for a failed handshake if the other end does not speak TLS.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
#: Seconds to open a TCP connection to any of the addresses of a host name.
_CONNECT_S = 5.0
#: Least timeout of a socket, in seconds.
_LEAST_TIMEOUT_S = 0.001
#: Characters of a protocol version in an error message.
_LONGEST_VERSION = 20
#: Document that a caller sends in the handshake: the use of the connection ("purpose"), and the caller's job.
Purpose = Mapping[str, Any]


class Refused(HolmesError):
    """Error: the other end of a connection is authentic, and has rejected this end."""


class NotAuthentic(Refused):
    """Error: the other end of a connection has not the expected certificate, or a revoked one."""


class NotHolmes(ConnectionError):
    """Error: the other end of a connection does not speak the protocol of joined jobs."""


class Accepted(NamedTuple):
    """Connection from an authenticated caller, with its purpose and the caller's certificate."""

    channel: Channel
    purpose: dict[
        str, Any
    ]  # document of the caller: the use of the connection, and the caller's job
    holder: Holder  # names in the caller's certificate


class Credentials:
    """Certificate of this process, the CA that it trusts, and the certificates that were revoked.

    Args:
        contexts: TLS contexts with certificate and CA.
        names_hosts: True: the CA is that of a site (an organization), and its certificates name hosts. So
            the coordinator's certificate must name the coordinator's host. False: the CA is the run's, and
            the coordinator's certificate must name COORDINATOR.
    """

    def __init__(self, contexts: TlsContexts, names_hosts: bool = False):
        self.contexts = contexts
        self._names_hosts = names_hosts
        self.revoked: frozenset[str] = frozenset()  # entries: see BY_FINGERPRINT and BY_NAME
        self._lock = threading.Lock()
        # Open connections, so that revoke() can find them.
        self._holders: weakref.WeakKeyDictionary[Channel, Holder] = weakref.WeakKeyDictionary()

    @classmethod
    def of_run(cls, pair: KeyPair, authority: str) -> Credentials:
        """Return credentials with a certificate that the run's CA has signed.

        Args:
            pair: Private key and certificate of this process, as PEM texts.
            authority: Certificate of the run's CA, as PEM text.

        Raises:
            ValueError, OSError: The texts cannot be read, or do not belong together.
        """
        return cls(contexts_of(pair, authority))

    @classmethod
    def of_site(cls, certificate: str, authority: str) -> Credentials:
        """Return credentials with a certificate that a site's CA has signed, from PEM files.

        Args:
            certificate: Path of the file with certificate, chain and private key of this process.
            authority: Path of the file with the certificate of the CA.

        Raises:
            HolmesError: A file cannot be read or used.
        """
        return cls(site_contexts(certificate, authority), names_hosts=True)

    def coordinator_name(self, host: str) -> str:
        """Return the name that the certificate of the coordinator on a host must have."""
        return host if self._names_hosts else COORDINATOR

    def accept_strangers(self) -> None:
        """Accept TLS connections from callers without a certificate, too.

        A job needs this to get its certificate in exchange for its invitation. For any other purpose, such
        callers must be rejected: by the argument `problem_of` of answer().
        """
        self.contexts.server.verify_mode = ssl.CERT_OPTIONAL

    def is_revoked(self, holder: Holder) -> bool:
        """Return whether the certificate, or a name in it, was revoked."""
        entries = {BY_FINGERPRINT + holder.fingerprint, *(BY_NAME + name for name in holder.names)}
        return not entries.isdisjoint(self.revoked)

    def revoke(self, entries: Iterable[str]) -> None:
        """Refuse exactly these certificates from now on, and end their open connections.

        Args:
            entries: The whole list of revoked certificates: each is BY_FINGERPRINT and the certificate's
                hash, or BY_NAME and a name.
        """
        self.revoked = frozenset(entries)
        with self._lock:
            open_channels = list(self._holders.items())
        for channel, holder in open_channels:
            if self.is_revoked(holder):
                channel.cut()

    def watch(self, channel: Channel, holder: Holder) -> None:
        """Remember the certificate's holder at the other end of a connection, so that revoke() can cut it."""
        with self._lock:
            self._holders[channel] = holder


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Open a TCP connection; raise OSError if that is not possible before the deadline."""
    timeout_s = max(_LEAST_TIMEOUT_S, min(_CONNECT_S, deadline.left))
    connection = socket.create_connection((host, port), timeout=timeout_s)
    prepare(connection)
    return connection


def call(
    host: str, port: int, credentials: Credentials, name: str, purpose: Purpose, deadline: Deadline
) -> Channel:
    """Connect to a listener, and authenticate both ends; errors are those of greet().

    Args:
        host: Host of the listener.
        port: Port of the listener.
        credentials: Certificate and CA of this process.
        name: Name that the listener's certificate must have.
        purpose: Use of the connection ("purpose"), and name of the caller's job ("job").
        deadline: The handshake must be complete by then.
    """
    connection = connect(host, port, deadline)
    return greet(connection, address_text(host, port), credentials, name, purpose, deadline)


def greet(
    connection: socket.socket,
    where: str,
    credentials: Credentials,
    name: str,
    purpose: Purpose,
    deadline: Deadline,
) -> Channel:
    """Authenticate both ends of an open connection, as its caller; close it if that fails.

    Args:
        connection: TCP connection to the listener.
        where: Name of the listener in error messages, such as HOST:PORT.
        credentials: Certificate and CA of this process.
        name: Name that the listener's certificate must have.
        purpose: Use of the connection ("purpose"), and name of the caller's job ("job").
        deadline: The handshake must be complete by then.

    Raises:
        OSError: The listener was not reached, or the connection broke, also during TLS.
        NotAuthentic: The listener has no certificate of this CA and name, or it was revoked.
        Refused: The listener rejected the caller.
    """
    try:
        wrapped = start_tls(connection, credentials.contexts.client, where, deadline)
        connection = wrapped
        holder = holder_of(wrapped)
        _check_listener(credentials, holder, name, where)
        channel = Channel(wrapped)
        send_purpose(channel, where, purpose, deadline)
        credentials.watch(channel, holder)
        return channel
    except BaseException:
        connection.close()
        raise


def _check_listener(credentials: Credentials, holder: Holder, name: str, where: str) -> None:
    """Raise NotAuthentic if the certificate of a listener was revoked, or does not have a given name.

    Args:
        credentials: Have the list of revoked certificates.
        holder: Holder of the listener's certificate.
        name: Name that the certificate must have: that of the job or coordinator that was called.
        where: Name of the listener in error messages.
    """
    if not has_name(holder, name):
        raise NotAuthentic(
            f"{where} has the certificate of {printable(str(holder))}, not of {name!r}"
        )
    if credentials.is_revoked(holder):
        raise NotAuthentic(f"{where} has a certificate that was revoked")


def has_name(holder: Holder, name: str) -> bool:
    """Return whether a certificate has a name; host names match in any case, IP addresses in any form."""
    if name in holder.names:
        return True
    address = ip_of(name)
    if address is None:
        return name.lower() in {known.lower() for known in holder.names}
    return address in {_address(known) for known in holder.names}


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    return ip_of(text.strip())


def start_tls(
    connection: socket.socket, context: ssl.SSLContext, where: str, deadline: Deadline
) -> ssl.SSLSocket:
    """Return a TLS socket for a TCP connection, after the TLS handshake as the caller.

    Args:
        connection: The TCP connection; closed if the handshake fails.
        context: TLS context of the caller.
        where: Name of the listener in error messages.
        deadline: The handshake must be complete by then.

    Raises:
        NotAuthentic: The listener does not speak TLS, or has no certificate of the CA.
        OSError: The connection broke. Anybody on the way can cause this.
    """
    wrapped = context.wrap_socket(connection, do_handshake_on_connect=False)
    try:
        deadline.limit(wrapped)
        wrapped.do_handshake()
    except ssl.SSLCertVerificationError as error:
        wrapped.close()
        raise NotAuthentic(
            f"{where} does not have a certificate of this run ({error.verify_message}); is it another run's?"
            " A restarted `holmes join serve` needs its old state folder, or jobs need new invitations"
        ) from None
    except ssl.SSLError as error:
        wrapped.close()
        if error.reason in _NOT_TLS:
            raise NotAuthentic(
                f"{where} does not speak TLS; is it `holmes join serve` or a job of this holmes_ext?"
            ) from None
        raise ConnectionError(f"{where} broke TLS off ({error.reason or why(error)})") from None
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def send_purpose(channel: Channel, where: str, purpose: Purpose, deadline: Deadline) -> None:
    """Send the purpose of a new TLS connection to an authentic listener, and wait until it accepts.

    Args:
        channel: The connection.
        where: Name of the listener in error messages.
        purpose: Use of the connection, and name of the caller's job.
        deadline: The listener must have accepted by then.

    Raises:
        Refused: The listener rejected the caller, or speaks another version of the protocol.
        OSError: The connection broke, or the listener does not speak this protocol.
    """
    hello = _receive_as_caller(channel, where, deadline)
    if hello.get("holmes") != VERSION:
        version = printable(str(hello.get("holmes")))[:_LONGEST_VERSION]
        raise Refused(
            f"{where} speaks version {version} of this protocol, not {VERSION};"
            " install the same holmes_ext"
        )
    channel.send({"holmes": VERSION, "purpose": dict(purpose)}, deadline)
    reply = _receive_as_caller(channel, where, deadline)
    if "error" in reply:
        raise Refused(printable(str(reply["error"])))


def _receive_as_caller(channel: Channel, where: str, deadline: Deadline) -> dict[str, Any]:
    """Receive a document of the handshake from an authentic listener.

    Raises:
        Refused: The listener does not accept this end's certificate. In TLS 1.3, this shows only after
            the caller's own part of the TLS handshake is complete.
        NotHolmes: Something else was received.
    """
    try:
        return _receive(channel, where, deadline)
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            raise Refused(
                f"{where} does not accept this job's certificate ({error.reason}); is it of another run,"
                " or expired?"
            ) from None
        raise NotHolmes(f"{where} broke TLS off ({why(error)})") from None


def problem_of_caller(purpose: Purpose, holder: Holder) -> str:
    """Return why a caller may not act for the job that its purpose names; "" if it may.

    Args:
        purpose: Document of the caller; its key "job" names the job that the caller claims to be.
        holder: Names in the caller's certificate; that job must be among them.
    """
    job = printable(str(purpose.get("job", "")), 100)
    if job and job in holder.names:
        return ""
    return f"the certificate of this caller is of {printable(str(holder))}, not of job {job!r}"


def answer(
    connection: socket.socket,
    credentials: Credentials,
    deadline: Deadline,
    problem_of: Callable[[Purpose, Holder], str] = problem_of_caller,
    on_tls: Callable[[socket.socket], None] = lambda wrapped: None,
) -> Accepted:
    """Run the listener's side of the handshake on an accepted connection.

    Args:
        connection: TCP connection from a caller.
        credentials: Certificate and CA of this process.
        deadline: The handshake must be complete by then.
        problem_of: Returns why a caller with a purpose and a certificate is rejected; "": it is accepted.
        on_tls: Called with the TLS socket that takes the place of `connection`.

    Raises:
        Refused: The caller was rejected; the reason was sent to it.
        NotHolmes: The caller does not speak this protocol, or has no certificate of the CA.
        OSError: The connection broke.
    """
    deadline.limit(connection)
    first_byte = connection.recv(1, socket.MSG_PEEK)  # stays in the kernel's buffer
    if not first_byte:
        raise ConnectionResetError("the caller closed the connection")
    if first_byte != _TLS:
        raise NotHolmes("it does not speak TLS, as joined jobs do")
    wrapped = _accept_tls(connection, credentials.contexts.server, deadline, on_tls)
    try:
        return _answer_over_tls(wrapped, credentials, deadline, problem_of)
    except BaseException:
        wrapped.close()
        raise


def _answer_over_tls(
    wrapped: ssl.SSLSocket,
    credentials: Credentials,
    deadline: Deadline,
    problem_of: Callable[[Purpose, Holder], str],
) -> Accepted:
    """Run the listener's part of the handshake after TLS; arguments and errors are those of answer()."""
    channel = Channel(wrapped)
    channel.send({"holmes": VERSION}, deadline)
    try:
        request = _receive(channel, "it", deadline)
    except ssl.SSLError as error:
        raise NotHolmes(f"it broke TLS off ({why(error)})") from None
    if request.get("holmes") != VERSION:
        version = printable(str(request.get("holmes")))[:_LONGEST_VERSION]
        raise NotHolmes(f"it speaks version {version}, not {VERSION}")
    purpose = request.get("purpose")
    if not isinstance(purpose, dict):
        raise NotHolmes("it says no purpose")
    holder = holder_of(wrapped)
    if holder.fingerprint and credentials.is_revoked(holder):
        problem = f"the certificate of {printable(str(holder))} was revoked (`holmes join revoke`)"
    else:
        problem = problem_of(purpose, holder)
    if problem:
        channel.send({"error": problem}, deadline)
        raise Refused(problem)
    channel.send({}, deadline)
    credentials.watch(channel, holder)
    return Accepted(channel, purpose, holder)


def _accept_tls(
    connection: socket.socket,
    context: ssl.SSLContext,
    deadline: Deadline,
    on_tls: Callable[[socket.socket], None],
) -> ssl.SSLSocket:
    """Return a TLS socket for an accepted TCP connection, after the TLS handshake.

    Args:
        connection: The TCP connection; closed if the handshake fails.
        context: TLS context of the listener.
        deadline: The handshake must be complete by then.
        on_tls: Called with the TLS socket before the handshake. While the handshake blocks, another
            thread can end it by closing this socket. It cannot do so with `connection`: that object
            has lost its TCP connection to the TLS socket.

    Raises:
        NotHolmes: The handshake failed.
        OSError: The connection broke.
    """
    wrapped = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    on_tls(wrapped)
    try:
        deadline.limit(wrapped)
        wrapped.do_handshake()
    except ssl.SSLError as error:
        wrapped.close()
        reason = getattr(error, "verify_message", "") or error.reason or why(error)
        raise NotHolmes(f"it has no certificate of this run, or broke TLS off ({reason})") from None
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def end_tls(connection: socket.socket, deadline: Deadline) -> socket.socket:
    """Shut down TLS on a connection, and return its plain TCP socket, for other use.

    The other end must do the same. Used when the coordinator begins to forward a caller's bytes on
    the connection; the caller and the called rank then start TLS with each other.

    Raises:
        OSError: The connection broke.
    """
    if isinstance(connection, ssl.SSLSocket):
        deadline.limit(connection)
        connection = connection.unwrap()
    return socket.socket(fileno=connection.detach())


def printable(text: str, most: int = 300) -> str:
    """Return a text from another process as a line that is safe for a terminal.

    Escapes and other control characters are replaced by "?".

    Args:
        text: The text.
        most: Characters of the result, at most.
    """
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def _receive(channel: Channel, where: str, deadline: Deadline) -> dict[str, Any]:
    """Receive a JSON object of the handshake, of at most _LONGEST_UNPROVEN_BYTES.

    Args:
        channel: Connection to the process that sends it.
        where: Name of the process in error messages.
        deadline: The object must be complete by then.

    Raises:
        NotHolmes: Something else was received.
        ssl.SSLError: TLS failed.
    """
    try:
        return channel.receive(deadline, _LONGEST_UNPROVEN_BYTES)
    except BrokenFrame as error:
        raise NotHolmes(f"{where} does not speak this protocol ({error})") from None
