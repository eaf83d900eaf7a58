"""TCP connections between ranks of joined jobs: made when they are needed, given up when they fail, made anew in the
next attempt.

Why not gloo: measured with torch 2.13, ProcessGroupGloo.abort() does not end an operation under way (its whole
timeout passes), that timeout counts from the operation's start instead of from the last byte, a group needs a
TCPStore that somebody holds, and any number of ports; and nothing tells who is at the other end. Here a link is given
up when no byte has come or gone for `patience` seconds, at once when its peer is killed, or by cut(); each rank
listens on one port, and both ends show the run's token (coordinator/wire.py).

    the job whose name sorts first calls, the other one is called; one connection for both directions
    frame: "HLM1", round, attempt, bytes of the payload; then the payload
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.wire import Line, Refused, answer, call

_HEADER = struct.Struct("!4sQIQ")
_MAGIC = b"HLM1"
#: Bytes given to the kernel, or taken from it, in one call.
_CALL_BYTES = 2**20
#: Seconds between two looks at a peer that does not answer yet.
_RETRY_S = 0.2


@dataclass(frozen=True)
class Peer:
    """A rank of another job. incarnation: of that start of the job; address: "host:port"."""

    job: str
    incarnation: str
    rank: int
    address: str


#: Bytes for, or from, each peer.
Exchange = Mapping[Peer, list[memoryview]]


class PeersFailed(Exception):
    """No exchange with these jobs."""

    def __init__(self, jobs: Iterable[str], why: str):
        super().__init__(why)
        self.jobs = frozenset(jobs)


class PeerLinks:
    """Of one rank. serve(line, question) answers what another rank asks on a line of its own (see fetch)."""

    def __init__(
        self,
        job: str,
        incarnation: str,
        rank: int,
        token: str,
        host: str,
        port: int = 0,
        serve: Callable[[Line, dict], None] | None = None,
    ):
        self.job, self.incarnation, self.rank, self._token, self._serve = job, incarnation, rank, token, serve
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise HolmesError(
                f"rank {rank} cannot listen on {host}:{port} for other jobs ({error.strerror or error}); free"
                " the port, or give"
                " another with HOLMES_JOIN_PORT"
            ) from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._open: dict[tuple[str, str, int], socket.socket] = {}
        self._came = threading.Condition()
        self._closed = False
        self.sent = self.received = 0
        threading.Thread(target=self._accept, name="holmes-links", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self, jobs: Iterable[str] | None = None) -> None:
        """Close the connections to these jobs; None: to all."""
        with self._came:
            for key in [key for key in self._open if jobs is None or key[0] in jobs]:
                _cut(self._open.pop(key))

    def swap(
        self, number: int, attempt: int, outgoing: Exchange, incoming: Exchange, patience_s: float
    ) -> None:
        """Send and receive all at once; returns when everything is there. What cannot be had from one job does not
        keep it from the others: PeersFailed names those that failed, at the end, and their connections are closed.

        patience_s: how long a peer may be silent. Both sides must know how many bytes come.
        """
        found, failed = self._connect({*outgoing, *incoming}, patience_s / 2)
        traffic = [
            _Traffic(peer, one, number, attempt, outgoing.get(peer, []), incoming.get(peer, []))
            for peer, one in found.items()
        ]
        failed |= _run(traffic, patience_s)
        self.sent += sum(one.sent for one in traffic)
        self.received += sum(one.received for one in traffic)
        if failed:
            self.drop(set(failed))
            raise PeersFailed(failed, "; ".join(failed.values()))

    def _connect(
        self, peers: Iterable[Peer], patience_s: float
    ) -> tuple[dict[Peer, socket.socket], dict[str, str]]:
        """Connections to all peers that could be reached, and why not to jobs that could not."""
        deadline = time.monotonic() + patience_s
        found: dict[Peer, socket.socket] = {}
        failed: dict[str, str] = {}
        for peer in sorted(peers, key=lambda one: (one.job, one.rank)):
            try:
                found[peer] = self._connection(peer, deadline)
            except OSError as error:
                failed[peer.job] = (
                    f"rank {peer.rank} of job {peer.job} at {peer.address} cannot be reached ({error})"
                )
        return found, failed

    def _connection(self, peer: Peer, deadline: float) -> socket.socket:
        key = (peer.job, peer.incarnation, peer.rank)
        while True:
            if key in self._open and _lives(self._open[key]):
                return self._open[key]
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                raise TimeoutError("in time")
            if self.job < peer.job:
                self._call(peer, left)
            else:
                with self._came:
                    self._came.wait(min(_RETRY_S, left))

    def _call(self, peer: Peer, left: float) -> None:
        purpose = {
            "purpose": "exchange",
            "job": self.job,
            "incarnation": self.incarnation,
            "rank": self.rank,
            "to": peer.incarnation,
        }
        try:
            line = reach(peer.address, self._token, purpose, max(0.1, min(5.0, left)))
        except Refused as error:
            raise ConnectionRefusedError(str(error)) from None
        except OSError:
            time.sleep(min(_RETRY_S, left))
            return
        self._keep((peer.job, peer.incarnation, peer.rank), line.socket)

    def _keep(self, key: tuple[str, str, int], connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setblocking(False)
        with self._came:
            if key in self._open:
                _cut(self._open[key])
            self._open[key] = connection
            self._came.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._welcome, args=(connection,), name="holmes-link", daemon=True
            ).start()

    def _welcome(self, connection: socket.socket) -> None:
        line = Line(connection)
        try:
            purpose = answer(line, self._token)
            if purpose is not None and purpose.get("to") == self.incarnation:
                if purpose.get("purpose") == "exchange":
                    self._keep(
                        (str(purpose["job"]), str(purpose["incarnation"]), int(purpose["rank"])), connection
                    )
                    return
                if self._serve is not None:
                    self._serve(line, purpose)
        except (OSError, KeyError, ValueError):
            pass
        line.close()


def reach(address: str, token: str, purpose: dict, timeout_s: float) -> Line:
    """A line to another rank. OSError when it cannot be had."""
    host, _, port = address.rpartition(":")
    return call(host, int(port), token, purpose, timeout_s)


class _Traffic:
    """What still goes to and comes from one peer."""

    def __init__(
        self,
        peer: Peer,
        connection: socket.socket,
        number: int,
        attempt: int,
        out: list[memoryview],
        into: list[memoryview],
    ):
        self.peer, self.connection, self.sent, self.received = peer, connection, 0, 0
        self._header = _HEADER.pack(_MAGIC, number, attempt, sum(len(one) for one in into))
        head = memoryview(_HEADER.pack(_MAGIC, number, attempt, sum(len(one) for one in out)))
        self._came = bytearray(_HEADER.size)
        self._out = [head, *(one for one in out if len(one))]
        self._into = [memoryview(self._came), *(one for one in into if len(one))]
        self.heard = time.monotonic()

    @property
    def events(self) -> int:
        return (selectors.EVENT_WRITE if self._out else 0) | (selectors.EVENT_READ if self._into else 0)

    def move(self, mask: int) -> None:
        """As much as goes without waiting. OSError when the connection is gone."""
        if mask & selectors.EVENT_WRITE and self._out:
            count = self.connection.send(self._out[0][:_CALL_BYTES])
            self._out[0] = self._out[0][count:]
            self.sent += count
            if not self._out[0]:
                self._out.pop(0)
        if mask & selectors.EVENT_READ and self._into:
            count = self.connection.recv_into(self._into[0][:_CALL_BYTES])
            if count == 0:
                raise ConnectionResetError("closed by the other end")
            self._into[0] = self._into[0][count:]
            self.received += count
            if not self._into[0]:
                self._into.pop(0)
                if self.received == _HEADER.size and bytes(self._came) != self._header:
                    raise ConnectionError("it is at another round")
        self.heard = time.monotonic()


def _run(traffic: Iterable[_Traffic], patience_s: float) -> dict[str, str]:
    """Move everything; the jobs that failed, each with the reason."""
    failed: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        for one in traffic:
            selector.register(one.connection, one.events, one)
        while selector.get_map():
            for key, mask in selector.select(min(1.0, patience_s)):
                one, before = key.data, key.events
                try:
                    one.move(mask)
                except BlockingIOError:
                    pass
                except OSError as error:
                    failed[one.peer.job] = f"rank {one.peer.rank} of job {one.peer.job}: {error}"
                    selector.unregister(one.connection)
                    continue
                if one.events == 0:
                    selector.unregister(one.connection)
                elif one.events != before:
                    selector.modify(one.connection, one.events, one)
            for one in [
                key.data
                for key in selector.get_map().values()
                if time.monotonic() - key.data.heard > patience_s
            ]:
                failed[one.peer.job] = (
                    f"rank {one.peer.rank} of job {one.peer.job}: silent for {patience_s:.0f} s"
                )
                selector.unregister(one.connection)
    return failed


def _lives(connection: socket.socket) -> bool:
    """Whether the other end has not closed it."""
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
