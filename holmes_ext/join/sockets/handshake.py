"""Who may speak: both ends show that they have the run's token, before anything else is read.

    caller      {"holmes": 2, "challenge": C}
    listener    {"holmes": 2, "challenge": S}
    caller      {"purpose": P, "proof": HMAC(key, "caller" T)}           P: JSON as text; what
                                                                         the connection is for
    listener    {"proof": HMAC(key, "listener" T)}                       or {"error": one line}
    T           the version, C, S, P, and over TLS the SHA-256 of both ends' certificates

The key follows from the token by scrypt (RFC 7914), so the token never travels, and guessing it is slow. Over
TLS all of it is inside: certificates.py says whose they are; whoever ends TLS in between has other
certificates, and its proof is none. Without TLS what follows is signed frame by frame (channel.py), with keys
that follow from T; anybody on the way can read it.

TLS is used between hosts, unless Credentials say plain; between two loopback addresses it is not.
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
from typing import Any

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

VERSION = 2
#: Seconds that a handshake may take.
HANDSHAKE_S = 10.0
#: Bytes of a frame from somebody who has not shown the token.
_STRANGERS = 8192
#: First byte of TLS's first record; of a frame it would be a length of 370 MB.
_TLS = b"\x16"
#: Seconds to find a connection between the addresses that a name has.
_CONNECT_S = 5.0
WRONG_TOKEN = "the token is not this run's; set HOLMES_JOIN_TOKEN to the one of `holmes join serve`"


class Refused(HolmesError):
    """The other end answered, and said no."""


class NotHolmes(ConnectionError):
    """What the other end says is not this protocol."""


class Credentials:
    """What this process shows. plain: no TLS, anybody on the way can read; certificate, authority: files of a
    site's CA, else made here. HolmesError: files cannot be used."""

    def __init__(self, token: str, plain: bool = False, certificate: str = "", authority: str = ""):
        self.key, self.plain = _key(token), plain
        self._contexts = site_contexts(certificate, authority) if certificate else None

    def contexts(self) -> TlsContexts:
        """HolmesError where there are none and `cryptography` is missing."""
        if self._contexts is None:
            self._contexts = own_contexts(self.key)
        return self._contexts

    def derived(self, secret: bytes) -> bytes:
        """The key of connections whose ends know a secret besides the token."""
        return hmac.digest(self.key, secret, "sha256") if secret else self.key


@lru_cache(maxsize=8)
def _key(token: str) -> bytes:
    return hashlib.scrypt(
        token.encode(), salt=b"holmes_ext joined jobs", n=2**14, r=8, p=1, dklen=32
    )


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """A TCP connection. OSError."""
    connection = socket.create_connection(
        (host, port), timeout=max(0.001, min(_CONNECT_S, deadline.left))
    )
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
    """A channel to a listener, after the handshake. OSError; Refused: it says no; HolmesError: no TLS
    here."""
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
    """The caller's side on a connection that is there; it is closed when this fails. where: for errors."""
    try:
        ours = theirs = b""
        if encrypt:
            contexts = credentials.contexts()
            connection = _wrapped(connection, contexts.client, False, where, deadline)
            ours, theirs = contexts.certificate, _certificate_of(connection)
        channel = Channel(connection)
        challenge = secrets.token_hex(16)
        channel.send({"holmes": VERSION, "challenge": challenge}, deadline)
        hello = _receive(channel, where, deadline)
        if hello.get("holmes") != VERSION:
            raise Refused(
                f"{where} speaks version {str(hello.get('holmes'))[:20]} of this protocol, not {VERSION};"
                " install the same holmes_ext"
            )
        text = json.dumps(purpose, separators=(",", ":"))
        facts = _facts(challenge, str(hello.get("challenge")), text, ours, theirs)
        key = credentials.derived(secret)
        channel.send({"purpose": text, "proof": _proof(key, "caller", facts)}, deadline)
        answer = _receive(channel, where, deadline)
        if "error" in answer:
            raise Refused(printable(str(answer["error"])))
        if not hmac.compare_digest(
            str(answer.get("proof")).encode(), _proof(key, "listener", facts).encode()
        ):
            raise Refused(f"{where} does not know the token of this run; is it another run's?")
        return _signed(connection, key, facts, "caller", "listener", encrypt)
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
) -> tuple[Channel, dict[str, Any]]:
    """The listener's side: the channel, and what the caller wants. Refused when the caller has not the token
    (it has been told), NotHolmes when it speaks something else; OSError when the connection broke.

    secret_for: what callers with this purpose must know besides the token; plain_too: whether TLS may be
    missing; None: as Credentials say, and between loopback addresses; on_tls: is given the socket that takes
    the place of `connection` where the caller encrypts.
    """
    if plain_too is None:
        plain_too = credentials.plain or stays_on_host(connection)
    deadline.limit(connection)
    first = connection.recv(1, socket.MSG_PEEK)
    encrypt = first == _TLS
    ours = theirs = b""
    if encrypt:
        try:
            contexts = credentials.contexts()
        except HolmesError as error:
            raise NotHolmes(f"it speaks TLS, and here {error}") from None
        connection = _wrapped(connection, contexts.server, True, "it", deadline, on_tls)
        ours, theirs = contexts.certificate, _certificate_of(connection)
    channel = Channel(connection)
    hello = _receive(channel, "it", deadline)
    if hello.get("holmes") != VERSION:
        raise NotHolmes(
            f"it speaks version {printable(str(hello.get('holmes')))[:20]}, not {VERSION}"
        )
    if not (encrypt or plain_too):
        channel.send({"holmes": VERSION, "challenge": ""}, deadline)
        _receive(channel, "it", deadline)
        channel.send(
            {"error": "this run is encrypted; leave --holmes-join-plain away in all jobs"}, deadline
        )
        raise Refused("it does not encrypt, and this run does")
    challenge = secrets.token_hex(16)
    channel.send({"holmes": VERSION, "challenge": challenge}, deadline)
    proven = _receive(channel, "it", deadline)
    text = str(proven.get("purpose"))
    try:
        purpose = unpack(text.encode())
    except ValueError as error:
        raise NotHolmes(f"its purpose cannot be read: {error}") from None
    facts = _facts(str(hello.get("challenge")), challenge, text, theirs, ours)
    key = credentials.derived(secret_for(purpose))
    if not hmac.compare_digest(
        str(proven.get("proof")).encode(), _proof(key, "caller", facts).encode()
    ):
        channel.send({"error": WRONG_TOKEN}, deadline)
        raise Refused("it does not know the token")
    channel.send({"proof": _proof(key, "listener", facts)}, deadline)
    return _signed(connection, key, facts, "listener", "caller", encrypt), purpose


def bare(connection: socket.socket, deadline: Deadline) -> socket.socket:
    """The connection without the TLS that is on it; both ends do this. OSError."""
    if isinstance(connection, ssl.SSLSocket):
        deadline.limit(connection)
        connection = connection.unwrap()
    return socket.socket(fileno=connection.detach())


def printable(text: str, most: int = 300) -> str:
    """One line that a terminal only shows: escapes and other control characters are replaced."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def _wrapped(
    connection: socket.socket,
    context: ssl.SSLContext,
    listens: bool,
    where: str,
    deadline: Deadline,
    on_tls: Callable[[socket.socket], None] = lambda wrapped: None,
) -> ssl.SSLSocket:
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
            text = (
                f"{where} and this end do not trust each other's certificates ({reason}); all jobs and"
                " `holmes join serve` need one token, and one --holmes-join-ca or none"
            )
        raise (NotHolmes if listens else Refused)(text) from None
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _certificate_of(connection: ssl.SSLSocket) -> bytes:
    """SHA-256 of the other end's."""
    certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None, "CERT_REQUIRED"
    return certificate_hash(certificate)


def _receive(channel: Channel, where: str, deadline: Deadline) -> dict[str, Any]:
    try:
        return channel.receive(deadline, _STRANGERS)
    except BrokenFrame as error:
        raise NotHolmes(f"{where} does not speak this protocol ({error})") from None
    except ssl.SSLError as error:
        raise NotHolmes(f"{where} broke TLS off ({why(error)})") from None


def _facts(
    caller: str, listener: str, purpose: str, caller_certificate: bytes, listener_certificate: bytes
) -> str:
    return json.dumps(
        [VERSION, caller, listener, purpose, caller_certificate.hex(), listener_certificate.hex()]
    )


def _proof(key: bytes, role: str, facts: str) -> str:
    return hmac.new(key, f"{role} {facts}".encode(), "sha256").hexdigest()


def _signed(
    connection: socket.socket, key: bytes, facts: str, my_role: str, other_role: str, encrypt: bool
) -> Channel:
    if encrypt:
        return Channel(connection)
    keys = [
        hmac.digest(key, f"frames of the {role} {facts}".encode(), "sha256")
        for role in (my_role, other_role)
    ]
    return Channel(connection, *keys)
