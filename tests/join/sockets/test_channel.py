"""Frames: what is left out, repeated or out of order ends the connection; so does what is no document."""

import socket
import struct
import threading
from array import array

import pytest
from waiting import soon

from holmes_ext.join.sockets import channel as channel_module
from holmes_ext.join.sockets.channel import FRAME_BYTES, BrokenFrame, Channel


def pair():
    a, b = socket.socketpair()
    return Channel(a), Channel(b)


class Recorder:
    """In place of a socket: what was sent."""

    def __init__(self):
        self.data = bytearray()

    def settimeout(self, seconds):
        pass

    def send(self, data):
        self.data += data
        return len(data)


def sent(*documents):
    """Return the bytes of each document's frame."""
    recorder, frames = Recorder(), []
    channel = Channel(recorder)
    for document in documents:
        recorder.data = bytearray()
        channel.send(document, soon())
        frames.append(bytes(recorder.data))
    return frames


def received(data, count=1):
    a, b = socket.socketpair()
    a.sendall(data)
    a.close()
    channel = Channel(b)
    try:
        return [channel.receive(soon()) for _ in range(count)]
    finally:
        channel.close()


def test_documents_and_bytes_arrive():
    one, two = pair()
    one.send({"a": [1, 2.5, "ü", None]}, soon())
    assert two.receive(soon()) == {"a": [1, 2.5, "ü", None]}
    data = [memoryview(bytearray(range(256)) * 4096), memoryview(b""), memoryview(b"xyz")]
    into = [memoryview(bytearray(len(one))) for one in data]
    thread = threading.Thread(target=one.send_bytes, args=(data, soon()))
    thread.start()
    two.receive_bytes(into, soon())
    thread.join(10)
    assert [bytes(view) for view in into] == [bytes(view) for view in data]
    two.send({"then": 1}, soon())
    assert one.receive(soon()) == {"then": 1}


@pytest.mark.parametrize("place", [0, 4, 11])
def test_one_bit_of_a_header_that_is_flipped_is_noticed(place):
    """In the length, the sequence number. TLS notices all others (test_attacks.py)."""
    (frame,) = sent({"norm": 1.5, "text": "abcdefgh"})
    changed = bytearray(frame)
    changed[place] ^= 1
    with pytest.raises(OSError):
        received(bytes(changed))


def test_order_repetition_and_holes_are_noticed():
    first, second, third = sent({"n": 1}, {"n": 2}, {"n": 3})
    assert received(first + second + third, count=3) == [{"n": 1}, {"n": 2}, {"n": 3}]
    for frames in (first + first, first + third, second + first):
        with pytest.raises(BrokenFrame, match="came where frame"):
            received(frames, count=2)


def test_a_promised_length_is_not_believed():
    with pytest.raises(BrokenFrame, match="longer than"):
        received(struct.pack("!IQ", 2**31, 0))


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 30 + b"}",
        b'{"a":"\\ud800"}',
        b'{"\\udfff":1}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_document_is_refused(text):
    data = struct.pack("!IQ", len(text), 0) + text
    with pytest.raises(BrokenFrame, match="no document came"):
        received(data)


def test_what_is_not_finite_is_not_sent():
    with pytest.raises(ValueError):
        sent({"a": float("nan")})


def test_a_byte_now_and_then_does_not_keep_it_waiting():
    one, two = pair()
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.1):
            one.socket.send(b"\0")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError, match="a test took longer than 0.5 s"):
        two.receive(soon(0.5))
    stop.set()
    thread.join(5)


def test_large_payloads_are_checked_frame_by_frame():
    recorder = Recorder()
    Channel(recorder).send_bytes([memoryview(bytes(FRAME_BYTES + 1))], soon())
    assert len(recorder.data) == FRAME_BYTES + 1 + 2 * 12


@pytest.mark.parametrize("sent_bytes", [1, 12, 20])
def test_a_message_that_begins_must_end_soon(sent_bytes, monkeypatch):
    """A part of a message kept its memory until the deadline of the connection, up to an hour.

    Sent are one byte of the header, the header, or the header and a part of the payload.
    """
    monkeypatch.setattr(channel_module, "FRAME_S", 0.05)
    monkeypatch.setattr(channel_module, "FLOOR_BYTES_PER_S", 1e6)
    a, b = socket.socketpair()
    channel = Channel(b)
    (frame,) = sent({"text": "x" * 1000})
    a.sendall(frame[:sent_bytes])
    with pytest.raises(TimeoutError, match="a message"):
        channel.receive(soon(3600.0))
    a.close(), channel.close()


def test_a_message_may_begin_late(monkeypatch):
    monkeypatch.setattr(channel_module, "FRAME_S", 0.05)
    one, two = pair()
    timer = threading.Timer(0.2, lambda: one.send({"late": True}, soon()))
    timer.start()
    assert two.receive(soon()) == {"late": True}
    timer.join()


def test_a_long_message_has_the_time_of_a_slow_link(monkeypatch):
    """At the slowest rate that a link may have, a message of n bytes takes n / rate seconds."""
    monkeypatch.setattr(channel_module, "FRAME_S", 0.01)
    monkeypatch.setattr(channel_module, "FLOOR_BYTES_PER_S", 100.0)
    one, two = pair()
    (frame,) = sent({"text": "x" * 1000})
    one.socket.sendall(frame[:500])
    timer = threading.Timer(0.2, one.socket.sendall, [frame[500:]])
    timer.start()
    assert two.receive(soon())["text"] == "x" * 1000
    timer.join()


def test_memory_of_a_message_is_reserved_as_it_arrives():
    """An announced length reserves nothing, and a refusal ends the message."""
    one, two = pair()
    reserved = []
    one.send({"text": "x" * 1000}, soon())
    two.receive(soon(), reserve=reserved.append)
    assert sum(reserved) >= 1000
    (frame,) = sent({"text": "x" * (FRAME_BYTES * 4)})
    a, b = socket.socketpair()
    channel, reserved = Channel(b), []
    a.sendall(frame[:20])
    a.close()
    with pytest.raises(ConnectionResetError):
        channel.receive(soon(), 2**24, reserved.append)
    assert sum(reserved) <= FRAME_BYTES
    channel.close()


def test_an_array_is_sent_as_a_list():
    one, two = pair()
    one.send({"numbers": array("q", [1, 2**60])}, soon())
    assert two.receive(soon()) == {"numbers": [1, 2**60]}
    with pytest.raises(TypeError):
        one.send({"numbers": {1, 2}}, soon())
