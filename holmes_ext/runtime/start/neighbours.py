"""One rank of a node speaks for it: its neighbours report to it, and learn from it what was decided.

    local rank 0     listens on an abstract socket of the node, which
                     ends with its process and leaves nothing behind
    its neighbours   say their report          ->   heard
                     wait                      <-   the verdict; its document as a memory file's descriptor

So the job's store serves a node as it would serve one rank. A neighbour that is not heard within
HEARD_SECONDS speaks for itself: local rank 0 came without holmes or late, or is in another network namespace,
another user's or another job's. Whoever was heard was counted, so nobody is counted twice.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from contextlib import suppress

from holmes_ext.runtime.deadline import Deadline

#: How long a node's ranks wait for each other before those that are there speak, in seconds.
HEARD_SECONDS = 10.0
_HEARD = b"heard"
_LONGEST = 1 << 17  # bytes of a report, or of what is said without a document


def name_of(node: str, address: str, port: int) -> str:
    """Of the socket of a node in the job whose store is there."""
    said = f"{os.geteuid()} {node} {address}:{port}"
    return f"\0holmes-{hashlib.sha256(said.encode()).hexdigest()[:32]}"


class Neighbours:
    """On local rank 0: those that it speaks for."""

    def __init__(self, name: str):
        self._heard: list[socket.socket] = []
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(name)
            self._listener.listen(1024)
        except OSError:  # another process has that name: nobody is heard here
            self._close()

    def hear(self, count: int, seconds: float) -> list[bytes]:
        """What they report: so many, or those that came in so many seconds; who comes later is refused."""
        reports: list[bytes] = []
        limit = Deadline(seconds)
        while self._listener and len(reports) < count and (left := limit.left) > 0:
            self._listener.settimeout(left)
            with suppress(OSError):  # none came, or it went away before it was heard
                connection, _ = self._listener.accept()
                if _user_of(connection) != os.geteuid():
                    connection.close()
                    continue
                connection.settimeout(left)
                report = connection.recv(_LONGEST)
                connection.sendall(_HEARD)
                self._heard.append(connection)
                reports.append(report)
        self._close()
        return reports

    def tell(self, said: bytes, document: bytes = b"") -> None:
        """To all that were heard; ends what ties them to this one."""
        self._close()
        fd = os.memfd_create("holmes-verdict")
        with open(fd, "wb", buffering=0) as file:
            file.write(document)
            for connection in self._heard:
                with connection, suppress(OSError):  # it has ended
                    socket.send_fds(connection, [said], [fd])
        self._heard.clear()

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def speaker_hears(name: str, report: bytes, patience: float) -> socket.socket | None:
    """The connection to local rank 0 that has heard `report`; None: none in `patience` seconds."""
    limit = Deadline(patience)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(2 * HEARD_SECONDS)
        try:
            connection.connect(name)
            if _user_of(connection) == os.geteuid():
                connection.sendall(report)
                if connection.recv(len(_HEARD)) == _HEARD:
                    return connection
            limit = Deadline(0.0)  # one that is not for this rank, or ended
        except ConnectionRefusedError:  # not there yet
            pass
        except OSError:  # it did not hear: it speaks already, or is stopped
            limit = Deadline(0.0)
        connection.close()
        if limit.passed:
            return None
        time.sleep(0.02)


def told(connection: socket.socket, seconds: float) -> tuple[bytes, bytes]:
    """What the speaker says, and the document; (b"", b"") where it ended or was silent so long."""
    with connection:
        connection.settimeout(max(0.1, seconds))
        try:
            said, fds, _, _ = socket.recv_fds(connection, _LONGEST, 1)
        except OSError:
            return b"", b""
    document = b""
    for fd in fds:
        document = os.pread(fd, os.fstat(fd).st_size, 0)  # all neighbours share its position
        os.close(fd)
    return said, document


def _user_of(connection: socket.socket) -> int:
    """Who is at the other end."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
