"""Frames between two processes: documents (JSON) and bytes, each with its place in the order, and a MAC.

    frame    bytes of the payload (4), sequence number (8), payload, tag (16)

tag: the first half of HMAC-SHA256 over what stands before it, with a key for each direction of each
connection (RFC 2104, section 5). Over TLS there is none: its own AEAD is the MAC. A frame that was changed,
left out, sent twice or in another order ends the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from holmes_ext.join.sockets.documents import pack, unpack
from holmes_ext.runtime.deadline import Deadline

_HEADER = struct.Struct("!IQ")
_TAG_BYTES = 16
#: Of a payload that is sent as bytes: what has to come whole before it is checked.
FRAME_BYTES = 2**18
#: Given to the kernel, or taken from it, in one call.
_CALL_BYTES = 2**20
#: Of a document, where nothing else is said.
SHORT = 2**20


class BrokenFrame(ConnectionError):
    """What came is not what was sent, or not in its place."""


class _Direction:
    """One direction of a connection. key: None over TLS."""

    def __init__(self, key: bytes | None):
        self._mac = hmac.new(key, digestmod="sha256") if key is not None else None
        self._sequence = 0

    def header(self, length: int) -> bytes:
        """Of the next frame."""
        made = _HEADER.pack(length, self._sequence)
        self._sequence += 1
        return made

    def length_of(self, header: bytes | bytearray, longest: int) -> int:
        """Of the payload of the next frame; BrokenFrame when it cannot be the next one."""
        length, sequence = _HEADER.unpack(header)
        if sequence != self._sequence:
            raise BrokenFrame(f"frame {sequence} came where frame {self._sequence} should")
        if length > longest:
            raise BrokenFrame(f"a frame of {length} bytes came, longer than {longest}")
        self._sequence += 1
        return length

    def tag(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """Of header and payload."""
        if self._mac is None:
            return b""
        mac = self._mac.copy()
        for part in parts:
            mac.update(part)
        return mac.digest()[:_TAG_BYTES]

    def check(self, tag: bytes | bytearray, *parts: bytes | bytearray | memoryview) -> None:
        if not hmac.compare_digest(self.tag(*parts), tag):
            raise BrokenFrame("a frame was changed on the way: its MAC differs")

    @property
    def tag_bytes(self) -> int:
        return _TAG_BYTES if self._mac is not None else 0


class Channel:
    """A connection with frames. Calls block until their deadline; OSError when it breaks (TimeoutError).

    send_key, receive_key: of the MACs; None over TLS, and before there is a key.
    """

    def __init__(
        self,
        connection: socket.socket,
        send_key: bytes | None = None,
        receive_key: bytes | None = None,
    ):
        self.socket = connection
        self._sent, self._received = _Direction(send_key), _Direction(receive_key)

    def send(self, document: dict[str, Any], deadline: Deadline) -> None:
        payload = pack(document)
        header = self._sent.header(len(payload))
        self._write(memoryview(header + payload + self._sent.tag(header, payload)), deadline)

    def receive(self, deadline: Deadline, longest: int = SHORT) -> dict[str, Any]:
        """The next document. longest: bytes of it at most. BrokenFrame when it is none."""
        header = bytes(self._read(bytearray(_HEADER.size), deadline))
        payload = bytearray()
        for_length = self._received.length_of(header, longest)
        while len(payload) < for_length:  # memory is taken as it comes, not as the header promises
            payload += self._read(bytearray(min(FRAME_BYTES, for_length - len(payload))), deadline)
        tag = bytes(self._read(bytearray(self._received.tag_bytes), deadline))
        self._received.check(tag, header, payload)
        try:
            return unpack(bytes(payload))
        except ValueError as error:
            raise BrokenFrame(f"no document came: {error}") from None

    def send_bytes(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        for part in self.outgoing(buffers):
            self._write(part, deadline)

    def receive_bytes(self, buffers: Sequence[memoryview], deadline: Deadline) -> None:
        for part in self.incoming(buffers):
            self._read(part, deadline)

    def outgoing(self, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
        """What to send for these bytes, in order."""
        for chunk in _chunks(buffers):
            header = self._sent.header(sum(map(len, chunk)))
            yield memoryview(header)
            yield from chunk
            if tag := self._sent.tag(header, *chunk):
                yield memoryview(tag)

    def incoming(self, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
        """Where to put what comes, one after the other; of the sender's sizes or not, as many bytes in all.
        BrokenFrame."""
        for chunk in _chunks(buffers):
            header, tag = bytearray(_HEADER.size), bytearray(self._received.tag_bytes)
            yield memoryview(header)
            length = sum(map(len, chunk))
            if self._received.length_of(header, length) != length:
                raise BrokenFrame("it is at other bytes")
            yield from chunk
            if tag:
                yield memoryview(tag)
            self._received.check(tag, header, *chunk)

    def lives(self) -> bool:
        """Whether the other end has not closed it, as far as is known here. Takes nothing that has come."""
        return self._next_byte() != b""

    def idle(self) -> bool:
        """Whether it lives, and nothing has come that was not read: of an end that has to wait."""
        return self._next_byte() is None

    def _next_byte(self) -> bytes | None:
        """That has come already; b"" at the end, None where nothing has come."""
        try:
            probe = socket.socket(fileno=self.socket.fileno())
        except (OSError, ValueError):  # it is closed here
            return b""
        try:
            return probe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        finally:
            probe.detach()

    def close(self) -> None:
        self.socket.close()

    def cut(self) -> None:
        """From another thread: whoever reads or writes gets an error, and closes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _write(self, data: memoryview, deadline: Deadline) -> None:
        while data:
            deadline.limit(self.socket)
            try:
                data = data[self.socket.send(data[:_CALL_BYTES]) :]
            except TimeoutError:
                raise deadline.missed() from None

    def _read(self, into: bytearray | memoryview, deadline: Deadline) -> bytearray | memoryview:
        left = memoryview(into)
        while left:
            deadline.limit(self.socket)
            try:
                count = self.socket.recv_into(left[:_CALL_BYTES])
            except TimeoutError:
                raise deadline.missed() from None
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            left = left[count:]
        return into


def _chunks(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The bytes of all buffers, FRAME_BYTES at a time."""
    chunk: list[memoryview] = []
    room = FRAME_BYTES
    for buffer in buffers:
        while buffer:
            chunk.append(buffer[:room])
            buffer, room = buffer[room:], room - len(chunk[-1])
            if not room:
                yield chunk
                chunk, room = [], FRAME_BYTES
    if chunk:
        yield chunk
