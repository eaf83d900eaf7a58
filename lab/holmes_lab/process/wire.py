"""Messages between the lab's processes: JSON objects with file descriptors, over Unix sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 8


class HolderPids(NamedTuple):
    """Both PIDs of a process that keeps the namespaces of a node alive.

    The processes of a lab are in a PID namespace of their own, so each has a PID inside of it, and
    another one outside.
    """

    pid: int  # outside: as the process that created the lab sees it
    pid_in_lab: int  # inside: for `ip` and other programs that run in the lab


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the boundaries of messages (SOCK_SEQPACKET)."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    return ends


def send(end: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message with file descriptors.

    Raises:
        BrokenPipeError: the process at the other end has ended.
        ConnectionResetError: the process at the other end has ended.
    """
    socket.send_fds(end, [json.dumps(message).encode()], list(descriptors), socket.MSG_NOSIGNAL)


def receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its file descriptors (close-on-exec).

    The message is None if the process at the other end has ended.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(
            end, _MAX_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None, []
    return (json.loads(data) if data else None), descriptors
