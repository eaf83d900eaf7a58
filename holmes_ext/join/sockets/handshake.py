"""Mutual authentication: both ends of a connection prove that they know the run's token.

    1. caller      {"holmes": 2, "challenge": C}              C, S: random numbers
    2. listener    {"holmes": 2, "challenge": S}
    3. caller      {"purpose": P, "proof": HMAC(key, "caller" T)}       P: JSON text, use of the connection
    4. listener    {"proof": HMAC(key, "listener" T)}                   or {"error": one line}

T, the transcript, consists of the protocol version, C, S, P, and over TLS the SHA-256 of both ends'
certificates. The key follows from the token by scrypt (RFC 7914), so the token never crosses the network, and
guessing it is slow. Nothing else is read before step 3 has succeeded.

TLS is used between hosts, unless the user chooses plain connections; not between loopback addresses. Over
TLS, all steps are encrypted. A man in the middle has other certificates, so its proofs fail. Without TLS,
each frame that follows has a MAC (channel.py) with keys that follow from T; anybody on the way can read it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.certificates import (
    TlsContexts,
    certificate_hash,
    own_contexts,
    site_contexts,
)
from holmes_ext.join.sockets.channel import BrokenFrame, Channel
from holmes_ext.join.sockets.documents import unpack
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text, prepare, stays_on_host
from holmes_ext.words import why

#: Version of the protocol.
VERSION = 2
#: Seconds that a handshake may take.
HANDSHAKE_S = 10.0
#: Most bytes of a frame from an end that has not proved the token: anybody can send such a frame.
_LONGEST_UNPROVEN_BYTES = 8192
#: First byte of TLS's first record. In a frame it would mean a length of 370 MB.
_TLS = b"\x16"
#: Seconds to open a TCP connection to any of the addresses of a host name.
_CONNECT_S = 5.0
#: Least timeout of a socket, in seconds.
_LEAST_TIMEOUT_S = 0.001
#: Characters of a protocol version in an error message.
_LONGEST_VERSION = 20
WRONG_TOKEN = "the token is not this run's; set HOLMES_JOIN_TOKEN to the one of `holmes join serve`"


class Refused(HolmesError):
    """Error: the other end of a connection rejected this end, or failed to prove the run's token."""


class NotHolmes(ConnectionError):
    """Error: the other end of a connection does not speak the protocol of joined jobs."""


class Accepted(NamedTuple):
    """Connection from a caller that has proved to know the run's token, and what it is for."""

    channel: Channel
    purpose: dict[str, Any]  # what the connection is for, and who calls


class Credentials:
    """What this process authenticates itself with: the run's token, and its TLS certificate.

    Args:
        token: Token of the run.
        plain: Do not use TLS: anybody on the way can read.
        certificate: PEM file with certificate, chain and key; "": this process generates one.
        authority: PEM file with the CA of `certificate`; "" if there is no `certificate`.

    Raises:
        HolmesError: A file cannot be used.
    """

    def __init__(self, token: str, plain: bool = False, certificate: str = "", authority: str = ""):
        self.key = _key(token)
        self.plain = plain
        self._contexts = site_contexts(certificate, authority) if certificate else None

    def contexts(self) -> TlsContexts:
        """Return the TLS contexts, which are made at the first call if no files were given.

        Raises:
            HolmesError: They cannot be made, because `cryptography` is not installed.
        """
        if self._contexts is None:
            self._contexts = own_contexts(self.key)
        return self._contexts

    def derived(self, secret: bytes) -> bytes:
        """Return the key of connections whose ends know a secret besides the token.

        Args:
            secret: The secret; b"": only the token.
        """
        return hmac.digest(self.key, secret, "sha256") if secret else self.key


@lru_cache(maxsize=8)
def _key(token: str) -> bytes:
    """Return the key of a run; this is slow on purpose, so that guessing tokens is, too."""
    return hashlib.scrypt(
        token.encode(), salt=b"holmes_ext joined jobs", n=2**14, r=8, p=1, dklen=32
    )


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Open a TCP connection; raise OSError if that is not possible before the deadline."""
    timeout_s = max(_LEAST_TIMEOUT_S, min(_CONNECT_S, deadline.left))
    connection = socket.create_connection((host, port), timeout=timeout_s)
    prepare(connection)
    return connection


def call(
    host: str,
    port: int,
    credentials: Credentials,
    purpose: Mapping[str, Any],
    deadline: Deadline,
    secret: bytes = b"",
) -> Channel:
    """Connect to a listener, and authenticate both ends.

    Args:
        host: Host of the listener.
        port: Port of the listener.
        credentials: Token and certificates.
        purpose: JSON object that the listener gets: "purpose" (what the connection is for), and who
            calls.
        deadline: Until when the handshake must be complete.
        secret: Further secret that both ends must know, such as a ticket of the coordinator for
            this connection; b"": the token is enough.

    Raises:
        OSError: The listener was not reached, or does not speak this protocol.
        Refused: The listener rejected the caller, or does not know the token.
        HolmesError: TLS is needed and not available.
    """
    connection = connect(host, port, deadline)
    encrypt = not credentials.plain and not stays_on_host(connection)
    return greet(
        connection, address_text(host, port), credentials, purpose, deadline, secret, encrypt
    )


def greet(
    connection: socket.socket,
    where: str,
    credentials: Credentials,
    purpose: Mapping[str, Any],
    deadline: Deadline,
    secret: bytes = b"",
    encrypt: bool = True,
) -> Channel:
    """Authenticate both ends of an open connection, as its caller; close it if that fails.

    Args:
        connection: TCP connection to the listener.
        where: Name of the listener in error messages, such as HOST:PORT.
        credentials: Token and certificates.
        purpose: JSON object that the listener gets: "purpose" (what the connection is for), and who
            calls.
        deadline: Until when the handshake must be complete.
        secret: Further secret that both ends must know, such as a ticket of the coordinator for
            this connection; b"": the token is enough.
        encrypt: Use TLS.

    Raises:
        OSError: The connection broke, or the listener does not speak this protocol.
        Refused: The listener rejected the caller, or does not know the token.
        HolmesError: TLS is not available.
    """
    try:
        our_certificate = b""
        their_certificate = b""
        if encrypt:
            contexts = credentials.contexts()
            connection = _with_tls(
                connection, contexts.client, listens=False, where=where, deadline=deadline
            )
            our_certificate = contexts.certificate
            their_certificate = _certificate_of(connection)
        channel = Channel(connection)
        challenge = secrets.token_hex(16)
        channel.send({"holmes": VERSION, "challenge": challenge}, deadline)
        hello = _receive(channel, where, deadline)
        if hello.get("holmes") != VERSION:
            version = str(hello.get("holmes"))[:_LONGEST_VERSION]
            raise Refused(
                f"{where} speaks version {version} of this protocol, not {VERSION};"
                " install the same holmes_ext"
            )
        text = json.dumps(purpose, separators=(",", ":"))
        # Both challenges, the purpose and the certificates' hashes: each proof is made of these facts.
        facts = _transcript(
            challenge, str(hello.get("challenge")), text, our_certificate, their_certificate
        )
        key = credentials.derived(secret)
        channel.send({"purpose": text, "proof": _proof(key, "caller", facts)}, deadline)
        answer = _receive(channel, where, deadline)
        if "error" in answer:
            raise Refused(printable(str(answer["error"])))
        if not _is_proof(answer.get("proof"), _proof(key, "listener", facts)):
            raise Refused(f"{where} does not know the token of this run; is it another run's?")
        return _authenticated(connection, key, facts, "caller", "listener", encrypt)
    except BaseException:
        connection.close()
        raise


def answer(
    connection: socket.socket,
    credentials: Credentials,
    deadline: Deadline,
    secret_for: Callable[[Mapping[str, Any]], bytes] = lambda purpose: b"",
    plain_too: bool | None = None,
    on_tls: Callable[[socket.socket], None] = lambda wrapped: None,
) -> Accepted:
    """Run the listener's side of the handshake on an accepted connection.

    Args:
        connection: TCP connection from a caller.
        credentials: Token and certificates.
        deadline: Until when the handshake must be complete.
        secret_for: Returns what a caller with a purpose must know besides the token.
        plain_too: Accept callers without TLS; None: if the credentials say so, and on a loopback address.
        on_tls: Called with the TLS socket that takes the place of `connection`.

    Raises:
        Refused: The caller does not know the token. It has been told so.
        NotHolmes: The caller does not speak this protocol.
        OSError: The connection broke.
    """
    if plain_too is None:
        plain_too = credentials.plain or stays_on_host(connection)
    deadline.limit(connection)
    first_byte = connection.recv(1, socket.MSG_PEEK)  # stays in the kernel's buffer
    encrypt = first_byte == _TLS  # the caller begins a TLS handshake
    our_certificate = b""
    their_certificate = b""
    if encrypt:
        try:
            contexts = credentials.contexts()
        except HolmesError as error:
            raise NotHolmes(f"it speaks TLS, and here {error}") from None
        connection = _with_tls(
            connection, contexts.server, listens=True, where="it", deadline=deadline, on_tls=on_tls
        )
        our_certificate = contexts.certificate
        their_certificate = _certificate_of(connection)
    channel = Channel(connection)
    hello = _receive(channel, "it", deadline)
    if hello.get("holmes") != VERSION:
        version = printable(str(hello.get("holmes")))[:_LONGEST_VERSION]
        raise NotHolmes(f"it speaks version {version}, not {VERSION}")
    if not (encrypt or plain_too):
        _refuse_plain(channel, deadline)
    challenge = secrets.token_hex(16)
    channel.send({"holmes": VERSION, "challenge": challenge}, deadline)
    request = _receive(channel, "it", deadline)
    text = str(request.get("purpose"))
    try:
        purpose = unpack(text.encode())
    except ValueError as error:
        raise NotHolmes(f"its purpose cannot be read: {error}") from None
    # Both challenges, the purpose and the certificates' hashes: each proof is made of these facts.
    facts = _transcript(
        str(hello.get("challenge")), challenge, text, their_certificate, our_certificate
    )
    key = credentials.derived(secret_for(purpose))
    if not _is_proof(request.get("proof"), _proof(key, "caller", facts)):
        channel.send({"error": WRONG_TOKEN}, deadline)
        raise Refused("it does not know the token")
    channel.send({"proof": _proof(key, "listener", facts)}, deadline)
    return Accepted(_authenticated(connection, key, facts, "listener", "caller", encrypt), purpose)


def _refuse_plain(channel: Channel, deadline: Deadline) -> None:
    """Tell a caller without TLS that this run is encrypted, and raise Refused.

    A caller accepts an error only as the reply to its second message. So its first message gets the
    usual reply. The challenge in that reply is empty, because the caller's proof will not be
    checked.
    """
    channel.send({"holmes": VERSION, "challenge": ""}, deadline)
    _receive(channel, "it", deadline)  # its purpose and proof
    channel.send(
        {"error": "this run is encrypted; leave --holmes-join-plain away in all jobs"}, deadline
    )
    raise Refused("it does not encrypt, and this run does")


def end_tls(connection: socket.socket, deadline: Deadline) -> socket.socket:
    """Shut down TLS on a connection, and return its plain TCP socket, for other use.

    The other end must do the same. Used when the coordinator begins to forward a caller's bytes on
    the connection. A connection without TLS is returned as it is.

    Raises:
        OSError: The connection broke.
    """
    if isinstance(connection, ssl.SSLSocket):
        deadline.limit(connection)
        connection = connection.unwrap()
    return socket.socket(fileno=connection.detach())


def printable(text: str, most: int = 300) -> str:
    """Return a text from another process as one line that is safe for a terminal.

    Escapes and other control characters are replaced by "?".

    Args:
        text: The text.
        most: Characters of the result, at most.
    """
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def _with_tls(
    connection: socket.socket,
    context: ssl.SSLContext,
    listens: bool,
    where: str,
    deadline: Deadline,
    on_tls: Callable[[socket.socket], None] = lambda wrapped: None,
) -> ssl.SSLSocket:
    """Return a TLS socket for a TCP connection, after the TLS handshake.

    Args:
        connection: The TCP connection; closed if the handshake fails.
        context: TLS context for this side.
        listens: This is the listener's side.
        where: Name of the other end in error messages.
        deadline: Until when the handshake must be complete.
        on_tls: Called with the TLS socket before the handshake, which may block: so another thread
            can close the socket. Wrapping has detached the TCP connection from the old socket
            object.

    Raises:
        NotHolmes: As the listener: the handshake failed.
        Refused: As the caller: the handshake failed.
        OSError: The connection broke.
    """
    wrapped = context.wrap_socket(connection, server_side=listens, do_handshake_on_connect=False)
    on_tls(wrapped)
    try:
        deadline.limit(wrapped)
        wrapped.do_handshake()
    except ssl.SSLError as error:
        wrapped.close()
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            text = f"{where} does not speak TLS; is --holmes-join-plain given there?"
        else:
            reason = getattr(error, "verify_message", "") or error.reason or error
            # Without a CA of the site, a process makes its certificates from the token. So with
            # another token the other end's certificate is not trusted.
            text = (
                f"{where} and this end do not trust each other's certificates ({reason}); all jobs and"
                " `holmes join serve` need one token, and one --holmes-join-ca or none"
            )
        if listens:
            raise NotHolmes(text) from None
        raise Refused(text) from None
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _certificate_of(connection: ssl.SSLSocket) -> bytes:
    """Return the SHA-256 of the other end's certificate."""
    certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None, "CERT_REQUIRED"
    return certificate_hash(certificate)


def _receive(channel: Channel, where: str, deadline: Deadline) -> dict[str, Any]:
    """Receive a JSON object from a process that has not been authenticated yet.

    The object may have at most _LONGEST_UNPROVEN_BYTES.

    Args:
        channel: Connection to that process.
        where: Name of the process in error messages.
        deadline: Until when the object must be complete.

    Raises:
        NotHolmes: Something else was received.
    """
    try:
        return channel.receive(deadline, _LONGEST_UNPROVEN_BYTES)
    except BrokenFrame as error:
        raise NotHolmes(f"{where} does not speak this protocol ({error})") from None
    except ssl.SSLError as error:
        raise NotHolmes(f"{where} broke TLS off ({why(error)})") from None


def _transcript(
    caller: str, listener: str, purpose: str, caller_certificate: bytes, listener_certificate: bytes
) -> str:
    """Return what both ends have seen of the handshake, as one text.

    Each end sends a MAC of this text, which differs if somebody in between has changed a message.

    Args:
        caller: The caller's challenge.
        listener: The listener's challenge.
        purpose: JSON text of the purpose.
        caller_certificate: SHA-256 of the caller's certificate; b"" without TLS.
        listener_certificate: SHA-256 of the listener's certificate; b"" without TLS.
    """
    return json.dumps(
        [VERSION, caller, listener, purpose, caller_certificate.hex(), listener_certificate.hex()]
    )


def _proof(key: bytes, role: str, facts: str) -> str:
    """Return the proof that the end with a role ("caller" or "listener") knows the key."""
    return hmac.new(key, f"{role} {facts}".encode(), "sha256").hexdigest()


def _is_proof(received: object, expected: str) -> bool:
    """Return whether a received proof is the expected one, in constant time."""
    return hmac.compare_digest(str(received).encode(), expected.encode())


def _authenticated(
    connection: socket.socket, key: bytes, facts: str, my_role: str, other_role: str, encrypt: bool
) -> Channel:
    """Return the channel for what follows the handshake, with MACs if there is no TLS.

    Args:
        connection: TCP or TLS socket.
        key: Key derived from the run's token, and from the further secret of this connection if it
            has one.
        facts: Transcript of the handshake, on which the keys of the MACs depend.
        my_role: "caller" or "listener": this end.
        other_role: The role of the other end.
        encrypt: The connection uses TLS.
    """
    if encrypt:
        return Channel(connection)
    keys = [
        hmac.digest(key, f"frames of the {role} {facts}".encode(), "sha256")
        for role in (my_role, other_role)
    ]
    send_key, receive_key = keys
    return Channel(connection, send_key, receive_key)
