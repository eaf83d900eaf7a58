"""Lines of JSON between jobs and their coordinator, and the handshake that keeps strangers out. Needs no torch.

    listener   {"holmes": 1, "challenge": S}
    caller     {"challenge": C, "proof": HMAC(token, "caller S C"), "purpose": ...}
    listener   {"proof": HMAC(token, "listener S C")}      or {"error": one line}

The token itself never travels, and both ends know that the other has it (HMAC-SHA256, RFC 2104). What follows is
neither encrypted nor signed: a network that others can write to needs WireGuard or IPsec.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from holmes_ext.errors import HolmesError

VERSION = 1
#: Bytes of the longest line: the maps of a job with thousands of ranks.
LONGEST = 256 * 2**20
_PEEK = 2**16
#: Of one of the handshake, from whom nobody knows yet.
_STRANGERS = 2**16
#: Seconds that a handshake may take.
HANDSHAKE_S = 10.0


class Refused(HolmesError):
    """The other end answered, and said no: trying again is of no use."""


def pack(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> dict[str, Any]:
    """The document of a line; ValueError when it is none."""
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def challenge() -> str:
    return secrets.token_hex(16)


def proof(token: str, role: str, listener: str, caller: str) -> str:
    """What shows that `role` ("caller" or "listener") knows the token."""
    return hmac.new(token.encode(), f"{role} {listener} {caller}".encode(), "sha256").hexdigest()


def proves(document: dict[str, Any], token: str, role: str, listener: str, caller: str) -> bool:
    return hmac.compare_digest(str(document.get("proof", "")), proof(token, role, listener, caller))


class Line:
    """A connection that sends and receives documents, blocking. Raises OSError when it breaks (TimeoutError when
    nothing comes)."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, document: dict[str, Any]) -> None:
        self.socket.sendall(pack(document))

    def receive(self, timeout_s: float, longest: int = LONGEST) -> dict[str, Any]:
        """The next document, whole within timeout_s seconds; longest: its bytes at most."""
        end = time.monotonic() + timeout_s
        line = bytearray()
        while not line.endswith(b"\n"):
            self.socket.settimeout(max(0.001, end - time.monotonic()))
            # What comes after the line stays for whoever reads bytes.
            waiting = self.socket.recv(_PEEK, socket.MSG_PEEK)
            if not waiting or len(line) > longest:
                raise ConnectionResetError("the other end closed the connection")
            line += self.socket.recv(waiting.find(b"\n") + 1 or len(waiting))
        try:
            return unpack(bytes(line))
        except ValueError as error:
            raise ConnectionError(f"no JSON came: {error}") from None

    def close(self) -> None:
        self.socket.close()

    def cut(self) -> None:
        """From another thread: whoever reads or writes gets an error, and closes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def call(host: str, port: int, token: str, purpose: dict[str, Any], timeout_s: float = HANDSHAKE_S) -> Line:
    """A line to a listener, after the handshake. OSError when it cannot be had, Refused when the listener says no."""
    line = Line(socket.create_connection((host, port), timeout=timeout_s))
    try:
        hello = line.receive(timeout_s, _STRANGERS)
        if hello.get("holmes") != VERSION:
            raise Refused(
                f"{host}:{port} speaks version {hello.get('holmes')} of holmes's coordinator, this is"
                f" {VERSION}; install the same holmes_ext"
            )
        theirs, ours = str(hello.get("challenge")), challenge()
        line.send({"challenge": ours, "proof": proof(token, "caller", theirs, ours), **purpose})
        answer = line.receive(timeout_s, _STRANGERS)
        if "error" in answer:
            raise Refused(str(answer["error"]))
        if not proves(answer, token, "listener", theirs, ours):
            raise Refused(
                f"{host}:{port} does not know the token of this run; is it another run's coordinator?"
            )
    except BaseException:
        line.close()
        raise
    return line


def answer(line: Line, token: str, timeout_s: float = HANDSHAKE_S) -> dict[str, Any] | None:
    """The listener's side of call(): the caller's purpose; None when it does not know the token (it has been told).
    OSError when it broke."""
    ours = challenge()
    line.send({"holmes": VERSION, "challenge": ours})
    document = line.receive(timeout_s, _STRANGERS)
    theirs = str(document.get("challenge"))
    if not proves(document, token, "caller", ours, theirs):
        line.send({"error": WRONG_TOKEN})
        return None
    line.send({"proof": proof(token, "listener", ours, theirs)})
    return document


WRONG_TOKEN = (
    "the token is not the coordinator's; set HOLMES_JOIN_TOKEN to the one that `holmes join serve` was given or"
    " printed"
)
