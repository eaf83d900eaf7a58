"""Bytes to and from several ranks at once: as much as goes on each connection, until all is there or has
failed.

A peer fails when nothing comes or goes for `patience_s`, and when all takes longer than its deadline: how
long the same number of bytes took at best, four times over (Speed).
"""

from __future__ import annotations

import math
import selectors
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from holmes_ext.join.peers.routes import Peer
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.words import why

_LABEL = struct.Struct("!QIQ")
#: Bytes given to the kernel, or taken from it, in one call.
_CALL_BYTES = 2**20
#: How much slower than at its fastest a peer may be.
_SLOWER = 4.0
#: Bytes of an exchange from which its rate says something.
_ENOUGH = 2**20
_CLOSED = "it has called again, so this connection was closed"


class Speed:
    """How long a peer may take, by what it took before."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, float] = {}

    def deadline(self, peer: Peer, count: int, patience_s: float) -> Deadline:
        """For `count` bytes to and from a peer."""
        what, usual = f"the exchange with job {peer.job}", self._seconds_per_byte.get(peer.job)
        if usual is None:
            return Deadline.for_bytes(patience_s, count, what)
        return Deadline(patience_s + _SLOWER * usual * count, what)

    def took(self, peer: Peer, count: int, seconds: float) -> None:
        """The least since it failed last counts; of the last one each could take four times as long as the
        one before it."""
        if count >= _ENOUGH:
            known = self._seconds_per_byte.get(peer.job, math.inf)
            self._seconds_per_byte[peer.job] = min(known, seconds / count)

    def failed(self, job: str) -> None:
        """Next time it gets the time of one that is not known."""
        self._seconds_per_byte.pop(job, None)


class PeerTransfer:
    """What still goes to and comes from one rank over one connection. label: (round, attempt)."""

    def __init__(
        self,
        peer: Peer,
        channel: Channel,
        label: tuple[int, int],
        out: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: Deadline,
    ):
        self.peer, self.connection, self.deadline = peer, channel.socket, deadline
        self.sent = self.received = 0
        self.heard = time.monotonic()
        self._theirs = _LABEL.pack(*label, sum(map(len, into)))
        ours = memoryview(_LABEL.pack(*label, sum(map(len, out))))
        self._outgoing = chain(channel.outgoing([ours]), channel.outgoing(out))
        self._incoming = self._expected(channel, into)
        self._out = next(self._outgoing, None)
        self._into = next(self._incoming, None)

    def _expected(self, channel: Channel, into: Sequence[memoryview]) -> Iterator[memoryview]:
        came = bytearray(_LABEL.size)
        yield from channel.incoming([memoryview(came)])
        if bytes(came) != self._theirs:
            raise ConnectionError("it is at another round")
        yield from channel.incoming(into)

    @property
    def events(self) -> int:
        """0: all is done."""
        wants_write = selectors.EVENT_WRITE if self._out is not None else 0
        return wants_write | (selectors.EVENT_READ if self._into is not None else 0)

    def move(self, mask: int) -> None:
        """As much as goes without waiting; OSError: the connection is gone, or carries what it should not."""
        try:
            if mask & selectors.EVENT_WRITE and self._out is not None:
                self._write()
            if mask & selectors.EVENT_READ:
                self._read()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def _write(self) -> None:
        assert self._out is not None
        count = self.connection.send(self._out[:_CALL_BYTES])
        self.sent += count
        self.heard = time.monotonic()
        self._out = self._out[count:] or next(self._outgoing, None)

    def _read(self) -> None:
        """Until the system, and TLS, have nothing more for now."""
        while self._into is not None:
            count = self.connection.recv_into(self._into[:_CALL_BYTES])
            if count == 0:
                raise ConnectionResetError("closed by the other end")
            self.received += count
            self.heard = time.monotonic()
            self._into = self._into[count:] or next(self._incoming, None)
            if not (isinstance(self.connection, ssl.SSLSocket) and self.connection.pending()):
                return


def run(transfers: Iterable[PeerTransfer], patience_s: float) -> dict[str, str]:
    """Move everything; the jobs that failed, each with the reason."""
    failed: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        for transfer in transfers:
            if reason := _move(
                transfer, selectors.EVENT_READ
            ):  # what TLS holds already wakes no selector
                failed[transfer.peer.job] = reason
            elif transfer.events and (reason := _watch(selector.register, transfer)):
                failed[transfer.peer.job] = reason
        while selector.get_map():
            for key, mask in selector.select(min(1.0, patience_s / 4)):
                transfer, before = key.data, key.events
                if reason := _move(transfer, mask):
                    failed[transfer.peer.job] = reason
                if reason or not transfer.events:
                    selector.unregister(transfer.connection)
                elif transfer.events != before and (reason := _watch(selector.modify, transfer)):
                    failed[transfer.peer.job] = reason
            for transfer in [key.data for key in selector.get_map().values()]:
                if reason := _late(transfer, patience_s):
                    failed[transfer.peer.job] = reason
                    selector.unregister(transfer.connection)
    return failed


def _move(transfer: PeerTransfer, mask: int) -> str:
    """Why it failed; "" where it did not."""
    try:
        transfer.move(mask)
        return ""
    except OSError as error:
        return f"{transfer.peer}: {why(error)}"


def _watch(change: Callable[..., Any], transfer: PeerTransfer) -> str:
    """A selector's register() or modify(). Why it failed: the thread that takes calls has closed the
    connection meanwhile, as the peer has called again (links.py); "" where it did not."""
    try:
        change(transfer.connection, transfer.events, transfer)
        return ""
    except (OSError, ValueError):
        return f"{transfer.peer}: {_CLOSED}"


def _late(transfer: PeerTransfer, patience_s: float) -> str:
    """Why it is not waited for; "" where it is."""
    who = transfer.peer
    if transfer.connection.fileno() < 0:
        return f"{who}: {_CLOSED}"
    if time.monotonic() - transfer.heard > patience_s:
        return f"{who}: silent for {patience_s:.3g} s"
    return (
        f"{who}: not done after {transfer.deadline.seconds:.3g} s"
        if transfer.deadline.passed
        else ""
    )
