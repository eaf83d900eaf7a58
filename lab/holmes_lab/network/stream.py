"""Sends over TCP and prints how fast that was: a program of its own, run on 2 n nodes by lab/measure.py.

    RANK=r WORLD_SIZE=2n python -I -S stream.py flood|messages ADDRESS,ADDRESS,... SIZE ...

Ranks 0 to n - 1 send, rank r to the r-th address, where rank n + r receives. "flood": first every sender
sends for LEAD_S, so that TCP's window has opened, and on for FLOOD_S, in which its receiver counts; all start
together. With one pair and sizes then round trips of one byte, and messages of SIZE bytes, each of which the
receiver acknowledges with one byte before the next is sent. Each sender prints {"flood": bits/s,
"round_trip": seconds (median), "seconds": [of a message of each size (mean), ...]}. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import sys
import time

LEAD_S, FLOOD_S, SIZE_S = 1.5, 1.5, 0.5
_PORT, _CHUNK = 9001, 1 << 18
_RATE = struct.Struct("d")


def _send(address: str, sizes: list[int], floods: bool, alone: bool) -> dict[str, object]:
    result: dict[str, object] = {}
    if floods:
        connection = _connect(address)
        chunk, start = bytes(_CHUNK), time.monotonic()
        while time.monotonic() < start + LEAD_S + FLOOD_S:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        (result["flood"],) = _RATE.unpack(connection.recv(_RATE.size, socket.MSG_WAITALL))
    if alone:
        connection = _connect(address)
        _exchanges(connection, 1 << 20, 5 * SIZE_S if floods else 0.0)  # opens TCP's window
        result["round_trip"] = statistics.median(_exchanges(connection, 1, SIZE_S))
        result["seconds"] = [
            statistics.mean(_exchanges(connection, size, SIZE_S)) for size in sizes
        ]
        connection.sendall(struct.pack("I", 0))
    return result


def _exchanges(connection: socket.socket, size: int, least_s: float) -> list[float]:
    """Seconds of each message until its acknowledgement, for `least_s` and 5 messages at least."""
    message, times = struct.pack("I", size) + bytes(size), list[float]()
    while sum(times) < least_s or len(times) < 5:
        start = time.perf_counter()
        connection.sendall(message)
        if not connection.recv(1):
            raise ConnectionError("the receiver has gone")
        times.append(time.perf_counter() - start)
    return times


def _connect(address: str) -> socket.socket:
    for _ in range(200):
        try:
            connection = socket.create_connection((address, _PORT), timeout=60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except ConnectionRefusedError:  # the receiver has not started yet
            time.sleep(0.05)
    raise ConnectionError(f"nobody listens on {address}:{_PORT}")


def _receive(sizes: list[int], floods: bool, alone: bool) -> None:
    server, buffer = socket.create_server(("", _PORT)), bytearray(max([_CHUNK, 1 << 20, *sizes]))
    if floods:
        _count_flood(server.accept()[0], buffer)
    if alone:
        connection, _ = server.accept()
        while size := struct.unpack("I", connection.recv(4, socket.MSG_WAITALL))[0]:
            connection.recv_into(buffer, size, socket.MSG_WAITALL)
            connection.sendall(b"\1")


def _count_flood(connection: socket.socket, buffer: bytearray) -> None:
    """Tells the sender the bits/s that came in FLOOD_S after LEAD_S."""
    total, first, begin, passed = 0, 0.0, 0, 0.0
    while count := connection.recv_into(buffer):
        now = time.monotonic()
        first = first or now
        total += count
        if now - first < LEAD_S:
            begin, start = total, now
        elif now - first < LEAD_S + FLOOD_S:
            counted, passed = total - begin, now - start
    connection.sendall(_RATE.pack(counted * 8 / passed))


if __name__ == "__main__":
    _rank, _floods, _addresses = (
        int(os.environ["RANK"]),
        sys.argv[1] == "flood",
        sys.argv[2].split(","),
    )
    _sizes = [int(text) for text in sys.argv[3:]]
    _alone = len(_addresses) == 1 and bool(_sizes)
    if _rank < len(_addresses):
        print(json.dumps(_send(_addresses[_rank], _sizes, _floods, _alone)))
    else:
        _receive(_sizes, _floods, _alone)
