"""Parsing of --holmes-join and of the flags for ports; names of jobs.

    --holmes-join           NAME@HOST:PORT: name of this job, and address of the coordinator
    --holmes-join-ports     ports of this job's ranks: PORT, FIRST-LAST, "any" (a free
                            port, the default), or "none" (they only call other jobs)
    --holmes-join-address   HOST or HOST:PORT that other jobs call, if the ranks listen at another
                            address: the public address of a NAT, or another interface. The NAT
                            forwards PORT to the first port of --holmes-join-ports
    HOLMES_JOIN_PORT        port of local rank 0; rank n listens on the n-th port after it

Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import Credentials, call
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import is_loopback, split_address

#: Default port of `holmes join serve`.
PORT = 29600
#: Number of TCP ports.
_PORTS = 65536
#: Seconds to find out whether a port can be called.
_CALL_BACK_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class JoinAddress:
    """Name of this job in the run, and address of the coordinator (NAME@HOST:PORT)."""

    job: str
    host: str
    port: int


@dataclass(frozen=True)
class PortRange:
    """Ports on which a rank may listen for other jobs, and its external address if it is behind NAT."""

    ports: tuple[int, int] | None = (0, 0)  # first and last; 0, 0: any free port; None: no port
    host: str = ""  # that other jobs call; "": the address on which the rank listens
    port: int = 0  # external port to which the first port is mapped; 0: ports are not mapped

    def advertised(self, port: int) -> int:
        """Return the port that other jobs must call if a rank listens on `port`; NAT may change it."""
        assert self.ports is not None
        first, _ = self.ports
        if not self.port:
            return port
        return self.port + port - first


@dataclass(frozen=True)
class JoinPlace:
    """Address of the coordinator, credentials of this job, and ports of its ranks."""

    address: JoinAddress
    credentials: Credentials
    ports: PortRange = PortRange()

    def call(self, purpose: Mapping[str, Any], deadline: Deadline) -> Channel:
        """Open an authenticated channel to the coordinator.

        Args:
            purpose: Reason for the connection and name of the caller, such as
                {"purpose": "status", "job": "east"}.
            deadline: The handshake must be complete by then.

        Raises:
            OSError: The coordinator was not reached before the deadline.
            Refused: The coordinator rejected this job, or another process answers at its address.
        """
        name = self.credentials.coordinator_name(self.address.host)
        host, port = self.address.host, self.address.port
        return call(host, port, self.credentials, name, purpose, deadline)


def is_name(text: str) -> bool:
    """Return whether a job may have this name: 1 to 64 letters, digits, '.', '_' or '-'."""
    return _NAME.fullmatch(text) is not None


def parse_address(text: str) -> JoinAddress:
    """Return the job's name and the coordinator's address from NAME@HOST or NAME@HOST:PORT.

    An IPv6 address stands in brackets.

    Raises:
        HolmesError: The text is malformed.
    """
    job, _, coordinator = text.partition("@")
    try:
        if not is_name(job):
            raise ValueError("no name")  # becomes the HolmesError below
        host, port = split_address(coordinator, PORT)
        return JoinAddress(job, host, port)
    except ValueError:
        example = f"such as east@10.0.0.1:{PORT} or east@[fd00::1]:{PORT}"
        raise HolmesError(
            f"--holmes-join: {text!r:.200} is not NAME@HOST:PORT, {example}"
        ) from None


def is_loopback_address(address: str) -> bool:
    """Return whether HOST:PORT is a loopback address: only processes of the same host can connect to it."""
    try:
        host, _ = split_address(address)
    except ValueError:
        return False
    return is_loopback(host) or host == "localhost"


def without_loopback(document: dict[str, Any]) -> dict[str, Any]:
    """Return a message about a job's ranks with "" (it cannot be called) for each loopback address.

    A loopback address such as 127.0.0.1:7000 is of use only on its own host: on any other host, it leads
    to a process of that host. So the coordinator changes all messages between itself and jobs on other
    hosts in this way: each hello that it receives from them, and each reply that it sends to them.

    Args:
        document: A hello, or the reply to a request for the shard maps. Its list `addresses` has the
            address of each rank. Other messages stay as they are.
    """
    addresses = document.get("addresses")
    if not isinstance(addresses, (list, tuple)):
        return document
    callable_addresses = [
        "" if isinstance(address, str) and is_loopback_address(address) else address
        for address in addresses
    ]
    return {**document, "addresses": callable_addresses}


def port_range(ports: str, address: str, environ: Mapping[str, str]) -> PortRange:
    """Return the ports on which this rank listens for other joined jobs, and its external address.

    --holmes-join-ports wins over HOLMES_JOIN_PORT. With HOLMES_JOIN_PORT=7000, local rank 2 listens
    on port 7002 only. Without both, it listens on any free port.

    Args:
        ports: Value of --holmes-join-ports: "PORT", "FIRST-LAST", "any", "none" (do not listen) or
            "" (not given).
        address: Value of --holmes-join-address: HOST or HOST:PORT to which other jobs connect if
            this rank is behind NAT; "": the address where it listens.
        environ: Environment variables; HOLMES_JOIN_PORT is the port of local rank 0.

    Raises:
        HolmesError: A value is malformed.
    """
    host = ""  # that other jobs call, behind NAT; "": the address on which the rank listens
    advertised = 0  # external port; 0: ports are not mapped
    if address:
        try:
            host, advertised = split_address(address, 0)
        except ValueError as error:
            raise HolmesError(f"--holmes-join-address: {error}") from None
    first_port = environ.get("HOLMES_JOIN_PORT")
    if not ports and first_port:
        # Each rank of the node has one port of its own, the n-th after HOLMES_JOIN_PORT. PortRange
        # maps the first port of a range to the external port, and here the range is this rank's
        # port alone. So the external port must be shifted, too. Below, all ranks have the same
        # range: nothing is shifted.
        port = _port(first_port, "HOLMES_JOIN_PORT") + _local_rank(environ)
        if advertised:
            advertised += _local_rank(environ)
        return PortRange((port, port), host, advertised)
    if ports == "none":
        return PortRange(ports=None)  # no address either: nobody can call a rank without a port
    if ports in ("", "any"):
        if advertised:
            raise HolmesError(
                f"--holmes-join-address {address}: a port there needs --holmes-join-ports"
            )
        return PortRange((0, 0), host)  # 0: any free port
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
