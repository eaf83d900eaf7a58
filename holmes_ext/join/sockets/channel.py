"""Connection between two processes that carries frames: JSON documents, or parts of a byte stream.

    frame    payload length (4 bytes), sequence number (8), payload

TLS encrypts and authenticates the bytes. So only an error of the other end can drop, repeat or reorder a
frame; this ends the connection.

A document must be complete soon after its first byte: within FRAME_S seconds plus the time for its length at
the slowest rate that a link may have (runtime/deadline.py). So unfinished frames cannot take memory for long.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holmes_ext.join.sockets.documents import pack, parsed_bytes, unpack
from holmes_ext.runtime.deadline import FLOOR_BYTES_PER_S, Deadline

#: Payload length, sequence number.
_HEADER = struct.Struct("!IQ")
#: Bytes of the payload of a frame of a byte stream; the last frame may be shorter.
FRAME_BYTES = 2**18
#: Bytes that are read or written in a system call, at most.
_CALL_BYTES = 2**20
#: Default limit of the size of a document, in bytes.
SHORT = 2**20
#: Seconds for the header of a document after its first byte; and for the whole document, in addition to its
#: time at the slowest rate.
FRAME_S = 10.0


class BrokenFrame(ConnectionError):
    """Error: a received frame was dropped, repeated or reordered, or is no frame."""


def _reserve_nothing(count: int) -> None:
    """Accept any number of bytes of a document (the default of `reserve`)."""


class _Direction:
    """State of a direction of a connection (sending or receiving): the number of the next frame."""

    def __init__(self) -> None:
        self._sequence = 0

    def header(self, length: int) -> bytes:
        """Return the header of the next frame, for a payload of `length` bytes."""
        header = _HEADER.pack(length, self._sequence)
        self._sequence += 1
        return header

    def length_of(self, header: bytes | bytearray, longest: int) -> int:
        """Check a received header, count its frame as received, and return the payload's length.

        A frame is a message with a header: length of the payload, and sequence number. The number
        must be that of the next frame; it is then incremented. So frames that were dropped,
        repeated or reordered are detected.

        Args:
            header: The received header.
            longest: Largest accepted length, in bytes.

        Raises:
            BrokenFrame: The header is not that of the next frame, or the frame is too long.
        """
        length, sequence = _HEADER.unpack(header)
        if sequence != self._sequence:
            raise BrokenFrame(f"frame {sequence} came where frame {self._sequence} should")
        if length > longest:
            raise BrokenFrame(f"a frame of {length} bytes came, longer than {longest}")
        self._sequence += 1
        return length


class Channel:
    """Connection that carries frames: JSON documents, and parts of a byte stream.

    Calls block at most until their deadline: then they raise TimeoutError. They raise other
    OSErrors if the connection breaks.

    Args:
        connection: TLS socket.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._sent = _Direction()
        self._received = _Direction()

    def send(
        self,
        document: dict[str, Any],
        deadline: Deadline,
        reserve: Callable[[int], None] = _reserve_nothing,
    ) -> None:
        """Send a JSON document.

        Args:
            document: The document.
            deadline: The document must be sent by then.
            reserve: Called before sending, with the size of the encoded document in bytes. It can limit
                the memory of all messages under way by raising an error.
        """
        payload = pack(document)
        reserve(len(payload))
        header = self._sent.header(len(payload))
        self._write(memoryview(header + payload), deadline)

    def receive(
        self,
        deadline: Deadline,
        longest: int = SHORT,
        reserve: Callable[[int], None] = _reserve_nothing,
    ) -> dict[str, Any]:
        """Receive a JSON document.

        Args:
            deadline: The document must be complete by then. It must also be complete soon after
                its first byte (see FRAME_S).
            longest: Largest accepted size, in bytes.
            reserve: Called with a number of bytes before the document takes that much memory; it
                may raise an error.

        Raises:
            BrokenFrame: The frame is broken, or contains no document.
        """
        header = bytearray(_HEADER.size)
        self._read(memoryview(header)[:1], deadline)
        begun = _sooner(deadline, FRAME_S, "the header of a message")
        self._read(memoryview(header)[1:], begun)
        length = self._received.length_of(header, longest)
        longest_s = FRAME_S + length / FLOOR_BYTES_PER_S
        complete = _sooner(deadline, longest_s, f"a message of {length} bytes")
        payload = self._read_payload(length, complete, reserve)
        reserve(parsed_bytes(payload))
        try:
            return unpack(payload)
        except ValueError as error:
            raise BrokenFrame(f"no document came: {error}") from None

    def _read_payload(
        self, length: int, deadline: Deadline, reserve: Callable[[int], None]
    ) -> bytes:
        """Return the next `length` bytes; memory is reserved and used only as they arrive.

        A header may announce bytes that never come. So the bytes are stored in an anonymous mapping:
        its pages take no memory until they are written, and go back to the system at once.

        Args:
            length: Number of bytes, from the header.
            deadline: All bytes must have been received by then.
            reserve: Called with a number of bytes before that much memory is used.
        """
        if not length:
            return b""
        pages = memoryview(mmap.mmap(-1, length))
        for start in range(0, length, FRAME_BYTES):
            part = pages[start : start + FRAME_BYTES]
            reserve(len(part))
            self._read(part, deadline)
        return bytes(pages)

    def send_bytes(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Send the bytes of the buffers, one buffer after the other."""
        for part in self.outgoing(buffers):
            self._write(part, deadline)

    def receive_bytes(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill the buffers with received bytes, one buffer after the other."""
        for part in self.incoming(buffers):
            self._read(part, deadline)

    def outgoing(self, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield the bytes to write to the socket, in order, to send the content of the buffers.

        The content is divided into frames: a header, and the payload.
        """
        for chunk in _chunks(buffers):
            yield memoryview(self._sent.header(_total_bytes(chunk)))
            yield from chunk

    def incoming(self, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield, in order, the buffers that the caller must fill from the socket to receive `buffers`.

        Between views of `buffers`, these are buffers for the headers of frames. The caller fills each
        buffer before it takes the next. The sender's buffers may have other sizes: both ends divide the
        data into the same frames, each of FRAME_BYTES, and a shorter last frame.

        Args:
            buffers: Buffers for the data.

        Raises:
            BrokenFrame: A frame is broken; raised after its header was filled.
        """
        for chunk in _chunks(buffers):  # buffers, or parts of them, for the payload of a frame
            header = bytearray(_HEADER.size)
            yield memoryview(header)
            length = _total_bytes(chunk)
            # The header was filled meanwhile. length_of() returns the payload's length in it, and raises
            # BrokenFrame if that is more than expected. If it is less, this is not a frame of the data
            # that this end expects.
            if self._received.length_of(header, longest=length) != length:
                raise BrokenFrame("it is at other bytes")
            yield from chunk

    def lives(self) -> bool:
        """Return whether the other end has not closed the connection, as far as this end knows.

        Nothing is read. So a closed connection is recognized even if earlier bytes of the other end are still
        unread. (An end whose TLS fails, for example, sends an alert before it closes.)
        """
        poll = select.poll()
        try:
            poll.register(self.socket.fileno(), select.POLLRDHUP)
            return not poll.poll(0)
        except (OSError, ValueError):  # this end has closed it
            return False

    def idle(self) -> bool:
        """Return whether the connection is open, and no received byte waits to be read."""
        return self._next_byte() is None

    def _next_byte(self) -> bytes | None:
        """Peek at the next received byte: return it and leave it in the kernel's buffer.

        Returns:
            b"" if the connection is closed; None if no byte has been received.
        """
        try:
            # Another object for the same connection: a TLS socket does not support MSG_PEEK.
            probe = socket.socket(fileno=self.socket.fileno())
        except (OSError, ValueError):  # this end has closed it
            return b""
        try:
            return probe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        finally:
            probe.detach()  # does not close the connection

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def cut(self) -> None:
        """Shut the connection down from another thread.

        The thread that reads or writes gets an error, and closes the connection.
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _write(self, data: memoryview, deadline: Deadline) -> None:
        """Write all bytes; raise TimeoutError after the deadline."""
        while data:
            deadline.limit(self.socket)  # sets the socket's timeout
            try:
                count = self.socket.send(data[:_CALL_BYTES])
            except TimeoutError:
                raise deadline.missed() from None
            data = data[count:]

    def _read(self, into: bytearray | memoryview, deadline: Deadline) -> bytearray | memoryview:
        """Fill a buffer with received bytes, and return it; raise TimeoutError after the deadline."""
        left = memoryview(into)
        while left:
            deadline.limit(self.socket)  # sets the socket's timeout
            try:
                count = self.socket.recv_into(left[:_CALL_BYTES])
            except TimeoutError:
                raise deadline.missed() from None
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            left = left[count:]
        return into


def _sooner(deadline: Deadline, seconds: float, operation: str) -> Deadline:
    """Return the earlier of a deadline and the end of an operation that may take `seconds`."""
    return deadline if deadline.left <= seconds else Deadline(seconds, operation)


def _total_bytes(buffers: Sequence[memoryview]) -> int:
    return sum(len(buffer) for buffer in buffers)


def _chunks(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the bytes of all buffers in chunks of FRAME_BYTES; each chunk is a list of views."""
    chunk: list[memoryview] = []
    space = FRAME_BYTES  # bytes that the chunk can still take
    for buffer in buffers:
        while buffer:
            view = buffer[:space]
            chunk.append(view)
            buffer = buffer[len(view) :]
            space -= len(view)
            if not space:
                yield chunk
                chunk = []
                space = FRAME_BYTES
    if chunk:
        yield chunk
