"""Test whether the coordinator can open a TCP connection to a rank of a job."""

from __future__ import annotations

from holmes_ext.join.sockets.handshake import connect
from holmes_ext.runtime.deadline import Deadline

#: Seconds to find out whether a rank can be called.
_CALL_BACK_S = 2.0
#: Number of TCP ports.
_PORTS = 65536


def is_reachable(host: str, port: object) -> bool:
    """Return whether a TCP connection from this host to a port of another host can be opened.

    Args:
        host: Address of the other host.
        port: The port, as received; False is returned for any value that is not a port.
    """
    if not isinstance(port, int) or not 0 < port < _PORTS:
        return False
    try:
        connect(host, port, Deadline(_CALL_BACK_S, "calling back")).close()
    except OSError:
        return False
    return True
