"""What stands after --holmes-join, and where a job's ranks listen. Needs no torch.

--holmes-join-ports     29700, FIRST-LAST, any (default) or none: this job's ranks cannot be called, only call
--holmes-join-address   HOST or HOST:PORT that others are told: behind NAT, or of another
                        interface than the one that leads to the coordinator. With a port: what
                        the first of the ports is mapped to
HOLMES_JOIN_PORT        the port of local rank 0; rank n takes the n-th after it
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import Credentials, call
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import split_address

#: Where `holmes join serve` listens when nothing else is said.
PORT = 29600
_PORTS = 65536
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class JoinAddress:
    """NAME@HOST:PORT: this job's name in the run, and where the coordinator is."""

    job: str
    host: str
    port: int


@dataclass(frozen=True)
class PortRange:
    """first to last, tried in order; 0, 0: any; None: no port. host, port: what others are told ("", 0: as
    found)."""

    ports: tuple[int, int] | None = (0, 0)
    host: str = ""
    port: int = 0

    def advertised(self, port: int) -> int:
        """The port that others call for one that is listened on."""
        assert self.ports is not None
        return self.port + port - self.ports[0] if self.port else port


@dataclass(frozen=True)
class JoinPlace:
    """Where a job joins, with what credentials, and where its ranks listen."""

    address: JoinAddress
    credentials: Credentials
    ports: PortRange = PortRange()

    def call(self, purpose: Mapping[str, Any], deadline: Deadline) -> Channel:
        """A channel to the coordinator. OSError; Refused: it says no."""
        return call(self.address.host, self.address.port, self.credentials, purpose, deadline)


def is_name(text: str) -> bool:
    """Whether a job may have this name."""
    return _NAME.fullmatch(text) is not None


def parse_address(text: str) -> JoinAddress:
    """HolmesError when it is not NAME@HOST or NAME@HOST:PORT; an IPv6 address stands in brackets."""
    job, _, where = text.partition("@")
    try:
        if not is_name(job):
            raise ValueError("no name")
        return JoinAddress(job, *split_address(where, PORT))
    except ValueError:
        example = f"such as east@10.0.0.1:{PORT} or east@[fd00::1]:{PORT}"
        raise HolmesError(
            f"--holmes-join: {text!r:.200} is not NAME@HOST:PORT, {example}"
        ) from None


def incarnation_of(secret: str) -> str:
    """The name of one start of a job, which only who has its secret can take."""
    return hashlib.sha256(f"holmes_ext incarnation {secret}".encode()).hexdigest()[:32]


def ticket(secret: str, job: str, incarnation: str) -> str:
    """By which a job shows the ranks of another one who it is. secret: of the one that is called."""
    return hmac.new(secret.encode(), f"{job} {incarnation}".encode(), "sha256").hexdigest()


def port_range(ports: str, address: str, environ: Mapping[str, str]) -> PortRange:
    """From the flags, or HOLMES_JOIN_PORT. HolmesError where they cannot be read."""
    host, advertised = "", 0
    if address:
        try:
            host, advertised = split_address(address, 0)
        except ValueError as error:
            raise HolmesError(f"--holmes-join-address: {error}") from None
    if not ports and (first := environ.get("HOLMES_JOIN_PORT")):
        begin = _port(first, "HOLMES_JOIN_PORT") + _local_rank(environ)
        return PortRange((begin, begin), host, advertised and advertised + _local_rank(environ))
    if ports == "none":
        return PortRange(None)
    if ports in ("", "any"):
        if advertised:
            raise HolmesError(
                f"--holmes-join-address {address}: a port there needs --holmes-join-ports"
            )
        return PortRange((0, 0), host)
    first, dash, last = ports.partition("-")
    begin = _port(first, "--holmes-join-ports")
    end = _port(last, "--holmes-join-ports") if dash else begin
    if begin > end:
        raise HolmesError(f"--holmes-join-ports {ports}: the first is greater than the last")
    return PortRange((begin, end), host, advertised)


def _port(text: str, source: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < _PORTS:
        raise HolmesError(f"{source}: {text!r} is not a port from 1 to {_PORTS - 1}")
    return int(text)


def _local_rank(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0
