"""Non-blocking transfer of bytes to and from several ranks at once, with one selector.

1. Each connection first sends a label: round, attempt, number of bytes. It must equal the expected label.
2. The selector waits for any connection that can be read or written, and moves as many bytes as possible
   without blocking, until all transfers are complete or have failed.

No transfer waits for ever. It fails when no byte moves for `patience_s` seconds, and when its deadline
passes. The deadline is four times the duration at the best rate to this peer so far, plus `patience_s`
(Speed).
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

#: First bytes on a connection in each exchange: round, attempt, number of bytes that follow.
_LABEL = struct.Struct("!QIQ")
#: Bytes that are read or written in a system call, at most.
_CALL_BYTES = 2**20
#: Time that a peer may take, as a multiple of its best time.
_SLOWER = 4.0
#: Bytes of the smallest exchange from which a peer's rate is measured.
_ENOUGH = 2**20
#: Seconds between two checks for late transfers, at most.
_LONGEST_SELECT_S = 1.0
#: Least number of checks in the time after which a silent transfer fails: it fails at most a quarter
#: too late.
_CHECKS_IN_PATIENCE = 4
_CLOSED = "it has called again, so this connection was closed"


class Speed:
    """The best transfer rate so far to each other job. The deadlines of later transfers follow from it."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, float] = {}  # by job

    def deadline(self, peer: Peer, count: int, patience_s: float) -> Deadline:
        """Return the deadline for exchanging `count` bytes in all with a peer.

        It is four times the duration at the best rate so far, plus `patience_s` seconds. For the first
        exchange with a job a slow rate is assumed.

        Args:
            peer: Rank of another job; the rate of its job counts.
            count: Bytes to and from the peer.
            patience_s: Seconds that are always allowed.
        """
        purpose = f"the exchange with job {peer.job}"
        best = self._seconds_per_byte.get(peer.job)
        if best is None:
            return Deadline.for_bytes(patience_s, count, purpose)
        return Deadline(patience_s + _SLOWER * best * count, purpose)

    def record_duration(self, peer: Peer, count: int, seconds: float) -> None:
        """Record how many seconds an exchange of `count` bytes (both directions) with a peer took.

        The best rate since the last failure is kept. An exchange may take four times as long as at
        this rate. With the latest rate instead, a job could become four times slower in each
        exchange, without end.
        """
        if count >= _ENOUGH:
            best = self._seconds_per_byte.get(peer.job, math.inf)
            self._seconds_per_byte[peer.job] = min(best, seconds / count)

    def failed(self, job: str) -> None:
        """Forget the rate of a job, because an exchange with it failed."""
        self._seconds_per_byte.pop(job, None)


class PeerTransfer:
    """State of an exchange of bytes with a rank of another job, over a non-blocking connection.

    Each end first sends a label: round, attempt within the round, and number of bytes that follow.
    An unexpected label means that the other rank is at another round, or expects another size.
    """

    def __init__(
        self,
        peer: Peer,
        channel: Channel,
        label: tuple[int, int],
        out: Sequence[memoryview],
        into: Sequence[memoryview],
        deadline: Deadline,
    ):
        """Prepare the transfer; move() sends and receives.

        Args:
            peer: The rank at the other end.
            channel: The connection, non-blocking.
            label: (number of the round, attempt within the round). Each end sends both before the
                data, with its number of bytes. The other end compares them with its own.
            out: Buffers with the bytes to send.
            into: Buffers to fill with received bytes; the sum of their sizes is the expected number.
            deadline: All bytes must have been moved by then. Only stored here: run() checks it.
        """
        self.peer = peer
        self.connection = channel.socket
        self.deadline = deadline
        self.sent = 0  # bytes
        self.received = 0  # bytes
        self.last_moved = time.monotonic()  # when a byte was last moved
        round_number, attempt = label
        bytes_to_receive = sum(map(len, into))
        bytes_to_send = sum(map(len, out))
        self._expected_label = _LABEL.pack(round_number, attempt, bytes_to_receive)
        our_label = memoryview(_LABEL.pack(round_number, attempt, bytes_to_send))
        # Buffers in the order of sending and receiving, the labels first. The channel adds and
        # checks the MACs that protect the bytes on a connection without TLS.
        self._outgoing = chain(channel.outgoing([our_label]), channel.outgoing(out))
        self._incoming = self._buffers_to_fill(channel, into)
        # Rest of the buffer that is being sent, or filled; None: everything was sent, or received.
        self._out = next(self._outgoing, None)
        self._into = next(self._incoming, None)

    def _buffers_to_fill(
        self, channel: Channel, into: Sequence[memoryview]
    ) -> Iterator[memoryview]:
        """Yield the buffers for received bytes: first a buffer for the peer's label, then `into`.

        The label has round, attempt and number of bytes. It is checked before the data is received.

        Args:
            channel: The connection.
            into: Buffers for the data.

        Raises:
            ConnectionError: The label shows that the peer is at another round, or sends another
                size.
        """
        label = bytearray(_LABEL.size)
        yield from channel.incoming([memoryview(label)])
        if bytes(label) != self._expected_label:
            raise ConnectionError("it is at another round")
        yield from channel.incoming(into)

    @property
    def events(self) -> int:
        """Return the selector events for which the transfer waits; 0: it is complete."""
        events = 0
        if self._out is not None:
            events |= selectors.EVENT_WRITE
        if self._into is not None:
            events |= selectors.EVENT_READ
        return events

    def move(self, mask: int) -> None:
        """Send and receive as many bytes of this transfer as possible without blocking.

        The transfer is complete when `events` has become 0.

        Args:
            mask: Selector events of the connection that are ready (readable, writable).

        Raises:
            OSError: The connection is lost, or carries unexpected data.
        """
        # If a direction would block, this call ends. The selector reports the other direction again.
        try:
            if mask & selectors.EVENT_WRITE and self._out is not None:
                self._write()
            if mask & selectors.EVENT_READ:
                self._read()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def _write(self) -> None:
        """Send bytes of the current buffer, as many as a single system call takes."""
        assert self._out is not None
        count = self.connection.send(self._out[:_CALL_BYTES])
        self.sent += count
        self.last_moved = time.monotonic()
        self._out = self._out[count:] or next(self._outgoing, None)

    def _read(self) -> None:
        """Receive into this transfer's buffers: once, and again while TLS holds decrypted bytes.

        Without TLS, a single call is enough: if more bytes are available, the selector reports the
        socket again. But it does not see bytes that TLS has already decrypted, so these are read here.
        """
        while self._into is not None:
            count = self.connection.recv_into(self._into[:_CALL_BYTES])
            if count == 0:
                raise ConnectionResetError("closed by the other end")
            self.received += count
            self.last_moved = time.monotonic()
            self._into = self._into[count:] or next(self._incoming, None)
            has_decrypted = isinstance(self.connection, ssl.SSLSocket) and self.connection.pending()
            if not has_decrypted:
                return


def run(transfers: Iterable[PeerTransfer], patience_s: float) -> dict[str, str]:
    """Run all transfers until each is complete or has failed.

    Args:
        transfers: Transfers over different connections.
        patience_s: Seconds without a byte after which a transfer fails.

    Returns:
        Job whose transfer failed -> reason.
    """
    failed: dict[str, str] = {}
    longest_select_s = min(_LONGEST_SELECT_S, patience_s / _CHECKS_IN_PATIENCE)
    # Each call returns the reason why the transfer has failed, or "". A transfer without events has
    # moved all its bytes.
    with selectors.DefaultSelector() as selector:
        for transfer in transfers:
            # Read first: bytes that TLS has decrypted already would not wake the selector.
            reason = _move_bytes(transfer, selectors.EVENT_READ)
            if not reason and transfer.events:
                reason = _watch(selector.register, transfer)
            if reason:
                failed[transfer.peer.job] = reason
        while selector.get_map():  # as long as there are transfers under way
            for key, mask in selector.select(longest_select_s):
                transfer = key.data
                reason = _move_bytes(transfer, mask)
                if reason or not transfer.events:  # failed, or complete
                    selector.unregister(transfer.connection)
                elif transfer.events != key.events:  # sending, or receiving, is complete
                    # If this fails, the connection is closed; the loop below then unregisters the
                    # transfer.
                    reason = _watch(selector.modify, transfer)
                if reason:
                    failed[transfer.peer.job] = reason
            for transfer in [key.data for key in selector.get_map().values()]:
                reason = _reason_to_give_up(transfer, patience_s)
                if reason:
                    failed[transfer.peer.job] = reason
                    selector.unregister(transfer.connection)
    return failed


def _move_bytes(transfer: PeerTransfer, mask: int) -> str:
    """Send and receive bytes of a transfer; return why this failed, "" if it did not fail.

    Args:
        transfer: The transfer.
        mask: Events for which its connection is ready, as a selector reports them.
    """
    try:
        transfer.move(mask)
        return ""
    except OSError as error:
        return f"{transfer.peer}: {why(error)}"


def _watch(change: Callable[..., Any], transfer: PeerTransfer) -> str:
    """Make a selector wait for the events (readable, writable) that a transfer needs now.

    If the peer has opened a new connection, another thread closes this connection. Then this call fails.

    Args:
        change: The selector's `register` or `modify`.
        transfer: The transfer.

    Returns:
        The reason why it failed; "" if it did not.
    """
    try:
        change(transfer.connection, transfer.events, transfer)
        return ""
    except (OSError, ValueError):
        return f"{transfer.peer}: {_CLOSED}"


def _reason_to_give_up(transfer: PeerTransfer, patience_s: float) -> str:
    """Return why a transfer must be given up; "" if it may go on.

    Args:
        transfer: The transfer.
        patience_s: The longest time in seconds in which no byte may move.
    """
    peer = transfer.peer
    if transfer.connection.fileno() < 0:  # closed by another thread
        return f"{peer}: {_CLOSED}"
    if time.monotonic() - transfer.last_moved > patience_s:
        return f"{peer}: silent for {patience_s:.3g} s"
    if transfer.deadline.passed:
        return f"{peer}: not done after {transfer.deadline.seconds:.3g} s"
    return ""
