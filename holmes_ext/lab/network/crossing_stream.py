"""Measures the way between two clusters over TCP: a program of its own, run on 2 n nodes by lab/measure.py.

    RANK=r WORLD_SIZE=2n python -I -S crossing_stream.py ADDRESS,ADDRESS,... SIZE ...

Ranks 0 to n - 1 send, rank r to the r-th address, where rank n + r receives. First every sender sends for
LEAD_S, so that TCP's window has opened, and on for FLOOD_S, in which its receiver counts; all start together.
With one pair and sizes then round trips of one byte, and messages of SIZE bytes, one at a time; of these the
median round trip is taken off. Each sender prints {"flood": bits/s, "round_trip": seconds, "sizes": [bits/s,
...]}. Standard library only.
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


def _send(address: str, sizes: list[int], alone: bool) -> dict[str, object]:
    connection = _connect(address)
    chunk, start = bytes(_CHUNK), time.monotonic()
    while time.monotonic() < start + LEAD_S + FLOOD_S:
        connection.sendall(chunk)
    connection.shutdown(socket.SHUT_WR)
    found: dict[str, object] = {"flood": _RATE.unpack(connection.recv(_RATE.size, socket.MSG_WAITALL))[0]}
    if alone:
        connection = _connect(address)
        _exchanges(connection, 1 << 20, 5 * SIZE_S)  # opens the window
        trip = statistics.median(_exchanges(connection, 1, SIZE_S))
        found["round_trip"] = trip
        times = [statistics.mean(_exchanges(connection, size, SIZE_S)) for size in sizes]
        found["sizes"] = [size * 8 / max(seconds - trip, 1e-9) for size, seconds in zip(sizes, times)]
        connection.sendall(struct.pack("I", 0))
    return found


def _exchanges(connection: socket.socket, size: int, least_s: float) -> list[float]:
    """Seconds of each message until its acknowledgement, for `least_s` and 5 messages at least."""
    found: list[float] = []
    while sum(found) < least_s or len(found) < 5:
        start = time.perf_counter()
        connection.sendall(struct.pack("I", size) + bytes(size))
        if not connection.recv(1):
            raise ConnectionError("the receiver has gone")
        found.append(time.perf_counter() - start)
    return found


def _connect(address: str) -> socket.socket:
    for _ in range(200):
        try:
            connection = socket.create_connection((address, _PORT), timeout=60)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except ConnectionRefusedError:  # the receiver has not started yet
            time.sleep(0.05)
    raise ConnectionError(f"nobody listens on {address}:{_PORT}")


def _receive(sizes: list[int], alone: bool) -> None:
    server, buffer = socket.create_server(("", _PORT)), bytearray(max([_CHUNK, 1 << 20, *sizes]))
    connection, _ = server.accept()
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
    if alone:
        connection, _ = server.accept()
        while size := struct.unpack("I", connection.recv(4, socket.MSG_WAITALL))[0]:
            connection.recv_into(buffer, size, socket.MSG_WAITALL)
            connection.sendall(b"\1")


if __name__ == "__main__":
    _rank, _addresses = int(os.environ["RANK"]), sys.argv[1].split(",")
    _sizes = [int(text) for text in sys.argv[2:]]
    _alone = len(_addresses) == 1 and bool(_sizes)
    if _rank < len(_addresses):
        print(json.dumps(_send(_addresses[_rank], _sizes, _alone)))
    else:
        _receive(_sizes, _alone)
