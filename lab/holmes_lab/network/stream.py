"""Program that measures the rate, the round trip and message times of TCP between pairs of nodes.

    RANK=r WORLD_SIZE=2n python -I -S stream.py flood|messages ADDRESS,ADDRESS,... SIZE ...

lab/measure.py runs it on 2 n nodes. Rank r < n sends to the r-th address, where rank n + r
receives. There are two measurements:

    stream      With "flood": all senders send without a pause for LEAD_S seconds, until TCP's
                window has opened, and for STREAM_S more, in which the receivers count bytes. All
                start at the same time.
    messages    With a single pair and sizes: the sender measures round trips of one byte, and
                messages of SIZE bytes. The receiver acknowledges each message with one byte before
                the next is sent.

Each sender prints {"flood": rate of the stream in bits/s, "round_trip": median in seconds,
"seconds": [mean of the messages of each size]}, without the keys of a measurement that was not
made. The program uses the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import sys
import time

#: Seconds of a stream before its rate is measured: TCP's window has then opened.
LEAD_S = 1.5
STREAM_S = 1.5  # seconds of the measurement of the rate
#: Seconds for the messages of each size.
SIZE_S = 0.5
_PORT = 9001
_CHUNK = 1 << 18  # bytes of a write
_WARM_UP_BYTES = 1 << 20
_LEAST_MESSAGES = 5
_RATE = struct.Struct("d")
_SIZE = struct.Struct("I")  # bytes of the message that follows, or _END
_END = 0  # in place of a size: the sender sends no more messages
#: Seconds for which messages warm up a connection between clusters, as long as the messages of five
#: sizes. TCP's window opens by some packets in each round trip, and these round trips are long.
_LONG_WARM_UP_S = 5 * SIZE_S


def _send(
    address: str, sizes: list[int], with_stream: bool, with_messages: bool
) -> dict[str, object]:
    """Send to a receiver over TCP and return the measured values.

    Args:
        address: IP address of the receiver.
        sizes: Sizes of the messages in bytes.
        with_stream: Whether to measure the rate of a stream: data that is sent without a pause for
            LEAD_S seconds, until TCP's window has opened, and for STREAM_S more, in which the
            receiver measures. The stream comes before the messages. lab/measure.py measures a
            stream only between nodes of different clusters.
        with_messages: Whether to measure round trips and single messages. No other pair of nodes
            may send at the same time.

    Returns:
        With the stream, "flood" (another word for the stream): its rate in bits/s. With messages,
        "round_trip": median seconds of a byte and its acknowledgement; "seconds": mean seconds of a
        message and its acknowledgement, for each size.
    """
    result: dict[str, object] = {}
    if with_stream:
        connection = _connect(address)
        chunk = bytes(_CHUNK)
        start = time.monotonic()
        while time.monotonic() < start + LEAD_S + STREAM_S:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        # The receiver counts the bytes, and sends the rate back.
        (result["flood"],) = _RATE.unpack(connection.recv(_RATE.size, socket.MSG_WAITALL))
    if with_messages:
        connection = _connect(address)
        # Messages before the measurement open TCP's window. That takes long only between clusters,
        # where a stream is measured, too. A few messages are sent in any case.
        warm_up_s = _LONG_WARM_UP_S if with_stream else 0.0
        _exchanges(connection, _WARM_UP_BYTES, least_s=warm_up_s)
        result["round_trip"] = statistics.median(_exchanges(connection, size=1, least_s=SIZE_S))
        result["seconds"] = [
            statistics.mean(_exchanges(connection, size, least_s=SIZE_S)) for size in sizes
        ]
        connection.sendall(_SIZE.pack(_END))
    return result


def _exchanges(connection: socket.socket, size: int, least_s: float) -> list[float]:
    """Send messages and return the seconds of each until its acknowledgement.

    Args:
        connection: Connection to the receiver.
        size: Bytes of a message.
        least_s: Messages are sent for this many seconds; at least _LEAST_MESSAGES are sent in any case.
    """
    message = _SIZE.pack(size) + bytes(size)
    times: list[float] = []
    while sum(times) < least_s or len(times) < _LEAST_MESSAGES:
        start = time.perf_counter()
        connection.sendall(message)
        if not connection.recv(1):
            raise ConnectionError("the receiver has gone")
        times.append(time.perf_counter() - start)
    return times


def _connect(address: str) -> socket.socket:
    """Return a connection to the receiver, or raise ConnectionError if it does not start."""
    for _ in range(200):
        try:
            connection = socket.create_connection((address, _PORT), timeout=60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except ConnectionRefusedError:  # the receiver has not started yet
            time.sleep(0.05)
    raise ConnectionError(f"nobody listens on {address}:{_PORT}")


def _receive(sizes: list[int], with_stream: bool, with_messages: bool) -> None:
    """Receive the data of one sender, and acknowledge each message with one byte.

    Args:
        sizes: Sizes of the messages in bytes.
        with_stream: Whether the sender first opens a connection for a stream: data that it sends
            without a pause. At its end, the sender gets the rate of the stream.
        with_messages: Whether the sender then opens a connection for single messages. Each begins
            with its size; the size _END ends the connection.
    """
    server = socket.create_server(("", _PORT))
    buffer = bytearray(max([_CHUNK, _WARM_UP_BYTES, *sizes]))
    if with_stream:
        connection, _ = server.accept()
        _measure_stream(connection, buffer)
    if with_messages:
        connection, _ = server.accept()
        while True:
            (size,) = _SIZE.unpack(connection.recv(_SIZE.size, socket.MSG_WAITALL))
            if size == _END:
                return
            connection.recv_into(buffer, size, socket.MSG_WAITALL)
            connection.sendall(b"\1")


def _measure_stream(connection: socket.socket, buffer: bytearray) -> None:
    """Receive a stream, and send its rate in bits/s back at the end.

    The rate is that of the STREAM_S seconds after the first LEAD_S seconds, in which TCP's window
    opens. The sender sends for LEAD_S + STREAM_S seconds, so the stream is never shorter.

    Args:
        connection: Connection to the sender.
        buffer: Space for the received bytes. They are not used.
    """
    total_bytes = 0
    first_s = 0.0  # time of the first byte
    lead_bytes = 0  # bytes until the end of the first LEAD_S seconds
    lead_end_s = 0.0  # time at which the last of them came
    counted_bytes = 0  # bytes after the first LEAD_S seconds
    counted_s = 0.0  # seconds from `lead_end_s` until the last of them came
    while count := connection.recv_into(buffer):
        now = time.monotonic()
        first_s = first_s or now
        total_bytes += count
        if now - first_s < LEAD_S:
            lead_bytes = total_bytes
            lead_end_s = now
        elif now - first_s < LEAD_S + STREAM_S:
            counted_bytes = total_bytes - lead_bytes
            counted_s = now - lead_end_s
    connection.sendall(_RATE.pack(counted_bytes * 8 / counted_s))


if __name__ == "__main__":
    _rank = int(os.environ["RANK"])
    _with_stream = sys.argv[1] == "flood"
    _addresses = sys.argv[2].split(",")
    _sizes = [int(text) for text in sys.argv[3:]]
    _with_messages = len(_addresses) == 1 and bool(_sizes)  # only while no other pair sends
    if _rank < len(_addresses):
        print(json.dumps(_send(_addresses[_rank], _sizes, _with_stream, _with_messages)))
    else:
        _receive(_sizes, _with_stream, _with_messages)
