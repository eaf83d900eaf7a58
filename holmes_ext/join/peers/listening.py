"""Where a rank listens for ranks of other jobs, and what address they are told.

a port open to the others      they are told this rank's address (address.PortRange says what is told)
none, or it cannot be called   they are told none: this rank keeps a
                               standing line to the coordinator (routes.py)
"""

from __future__ import annotations

import socket

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, JoinPlace
from holmes_ext.join.peers.routes import RankIdentity
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text, is_loopback, listen
from holmes_ext.words import why

#: Seconds to learn from the coordinator whether this rank can be called.
_ASK_S = 8.0


def open_port(place: JoinPlace, rank: int) -> socket.socket | None:
    """A listening socket, on the address towards the coordinator (on all, if others are told another).
    HolmesError: no port can be had."""
    if place.ports.ports is None:
        return None
    host = "" if place.ports.host else own_host(place.address)
    first, last = place.ports.ports
    for port in range(first, last + 1):
        try:
            return listen(host, port)
        except OSError as error:
            reason = why(error)
    ports = f"port {first}" if first == last else f"any port from {first} to {last}"
    where = f"{ports} of {host or 'this host'}"
    raise HolmesError(
        f"rank {rank} cannot listen on {where} for other jobs ({reason}); free one, or give others with"
        " --holmes-join-ports"
    ) from None


def told_address(place: JoinPlace, listening: socket.socket | None, identity: RankIdentity) -> str:
    """What other jobs call; "": they cannot, and this rank keeps a line to the coordinator."""
    if listening is None:
        return ""
    host, port = listening.getsockname()[:2]
    if place.ports.host:
        return address_text(place.ports.host, place.ports.advertised(port))
    if not is_loopback(host) and not _can_be_called(port, place, identity):
        return ""
    return address_text(host, port)


def own_host(coordinator: JoinAddress) -> str:
    """This node's address on the way to the coordinator. Nothing is sent."""
    try:
        infos = socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = infos[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HolmesError(
            f"--holmes-join: there is no way to {coordinator.host} ({why(error)}); is the name right?"
        ) from None


def _can_be_called(port: int, place: JoinPlace, identity: RankIdentity) -> bool:
    """As the coordinator finds, at the address from which this rank calls it."""
    deadline = Deadline(_ASK_S, "asking whether this rank can be called")
    try:
        question = {
            **identity.facts,
            "secret": identity.secret,
            "purpose": "reachable",
            "port": port,
        }
        channel = place.call(question, deadline)
        try:
            return channel.receive(deadline).get("reachable") is not False
        finally:
            channel.close()
    except (OSError, HolmesError):
        return True  # what is wrong is said where the job enters
