"""JSON objects and file descriptors between the lab's processes, over a SOCK_SEQPACKET pair."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    return ends


def send(end: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """One message; BrokenPipeError or ConnectionResetError when the other side is gone."""
    socket.send_fds(end, [json.dumps(message).encode()], list(descriptors), socket.MSG_NOSIGNAL)


def receive(end: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors (close-on-exec); None when the other side is gone."""
    try:
        data, descriptors, _, _ = socket.recv_fds(
            end, _MAX_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:
        return None, []
    return (json.loads(data) if data else None), descriptors
