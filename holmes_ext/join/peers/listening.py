"""Port on which a rank listens for ranks of other jobs, and the address that the coordinator passes to them.

The address is empty if the rank has no port, or if the coordinator cannot call the port. Such a rank keeps a
standby line to the coordinator instead (routes.py).
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, JoinPlace
from holmes_ext.join.peers.routes import RankIdentity
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text, listen
from holmes_ext.words import why

#: Seconds for the coordinator to find out whether it can call this rank.
_ASK_S = 8.0


class OpenedPort(NamedTuple):
    """Port of a rank for connections from other jobs."""

    listening: socket.socket | None  # None: the rank listens on no port
    address: str  # HOST:PORT that other jobs can call; "": they cannot


def open_and_publish(place: JoinPlace, identity: RankIdentity) -> OpenedPort:
    """Open a port for this rank, and find out the address at which other jobs can call it.

    Raises:
        HolmesError: All ports that the user has given are in use.
    """
    listening = open_port(place, identity.rank)
    return OpenedPort(listening, published_address(place, listening, identity))


def open_port(place: JoinPlace, rank: int) -> socket.socket | None:
    """Return a listening socket on which this rank accepts connections from other jobs.

    It listens on the first free port of --holmes-join-ports, at this host's address on the route to
    the coordinator. With --holmes-join-address (NAT), it listens at all addresses.

    Args:
        place: Ports and addresses that the user has given.
        rank: This rank, for the error message.

    Returns:
        The socket; None with --holmes-join-ports none.

    Raises:
        HolmesError: All ports of the range are in use.
    """
    if place.ports.ports is None:
        return None
    host = "" if place.ports.host else own_host(place.address)  # "": all addresses
    first, last = place.ports.ports  # 0, 0: any free port
    for port in range(first, last + 1):
        try:
            return listen(host, port)
        except OSError as error:  # in use: try the next port
            reason = why(error)
    ports = f"port {first}" if first == last else f"any port from {first} to {last}"
    where = f"{ports} of {host or 'this host'}"
    raise HolmesError(
        f"rank {rank} cannot listen on {where} for other jobs ({reason}); free one, or give others with"
        " --holmes-join-ports"
    ) from None


def published_address(
    place: JoinPlace, listening: socket.socket | None, identity: RankIdentity
) -> str:
    """Return the HOST:PORT at which other jobs can connect to this rank; "" if they cannot.

    It is the address given with --holmes-join-address. Without that option, the coordinator tries to
    connect to this rank, to find out whether it can be reached. If the coordinator is on this host,
    the address is a loopback address: the coordinator passes it on only to jobs on this host.

    Args:
        place: Ports and address that the user has given.
        listening: Socket of open_port(); None: this rank does not listen.
        identity: Name of this job, and number of this rank, for the request to the coordinator.
    """
    if listening is None:
        return ""
    host, port = listening.getsockname()[:2]
    if place.ports.host:
        # --holmes-join-address: other jobs reach the rank at another address, such as the public
        # address and the forwarded port of a NAT. The coordinator may be unable to call that address,
        # so it is not tested.
        external_port = place.ports.advertised(port)
        return address_text(place.ports.host, external_port)
    # Loopback is asked about, too: the coordinator may be on another host, at the end of a tunnel.
    if not _can_be_called(port, place, identity):
        return ""
    return address_text(host, port)


def own_host(coordinator: JoinAddress) -> str:
    """Return this node's IP address on the route to the coordinator; nothing is sent.

    Raises:
        HolmesError: The coordinator's name is unknown, or there is no route to it.
    """
    try:
        infos = socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = infos[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HolmesError(
            f"--holmes-join: there is no way to {coordinator.host} ({why(error)}); is the name right?"
        ) from None


def _can_be_called(port: int, place: JoinPlace, identity: RankIdentity) -> bool:
    """Return whether the coordinator can connect to a port of this node.

    The result is also True if the coordinator does not answer: the error then appears when the job
    enters the run.

    Args:
        port: The port.
        place: Address of the coordinator.
        identity: This rank.
    """
    deadline = Deadline(_ASK_S, "asking whether this rank can be called")
    question = {
        **identity.facts,
        "purpose": "reachable",
        "port": port,
    }
    try:
        channel = place.call(question, deadline)
        try:
            return channel.receive(deadline).get("reachable") is not False
        finally:
            channel.close()
    except (OSError, HolmesError):
        return True
