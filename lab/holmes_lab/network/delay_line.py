"""The network between the clusters of a lab: one process that carries every frame from cluster to cluster.

    bridge eth0 (cluster 0) -- TAP wan0 --+              +-- TAP wan1 -- bridge eth1 (cluster 1)
                                      [uplink 0] -> [link 0-1] -> latency -> [uplink 1]

It reads frames from one TAP, holds each until it has passed what lies on its way, and writes it to
the other cluster's. The TAPs exchange frames of up to 64 KiB whole (virtio-net headers, checksum
and segmentation left to the receiver), so few system calls carry much. A link or an uplink is a
clock for each direction, and everything that passes waits for it in turn, every pair of nodes with
the same share: what is small does not wait behind all that a large message has sent before. What
would wait longer than its buffer is dropped, as a router does. Needs only the standard library (the
lab's keeper forks it); the kernel needs TUN/TAP, not netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import heapq
import os
import select
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

TUN_DEVICE = "/dev/net/tun"
#: Seconds that it sleeps after each round of work, so that frames come and go in handfuls, half of
#: it early or late: the tenth part of the least latency, between these.
QUANTA_S = 400e-6, 1e-3
#: A clock's buffer holds so many seconds of its rate at least; else two round trips of its longest
#: way. Much, so that a link is its rate and its latency and no more: for each loss Reno halves its
#: window, and wins a segment back in a round trip (over 20 ms and 100 Mb/s sums of 10 MB took 3 to
#: 12 % longer with 0.1 s, docs/numbers.md).
LEAST_BUFFER_S = 3.0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksum, TCP over IPv4 and over IPv6 in segments to be cut later
_VNET, _MACS, _FRAME = struct.Struct("<BBHHHH"), 12, 10 + 14 + (1 << 16)
_IPV4 = b"\x08\x00"
_PR_SET_TIMERSLACK, _M_TRIM_THRESHOLD = 29, -1


class Passing:
    """A frame on its way. flow: who sends to whom; hops: clocks that it still has to pass on the near side;
    end: when its last bit has left what it has passed."""

    __slots__ = "bits", "end", "flow", "hops", "latency_s", "pieces", "target"

    def __init__(
        self,
        pieces: tuple,
        bits: int,
        flow: bytes,
        target: int,
        path: tuple[Sequence[Clock], float],
        end: float,
    ):
        self.pieces, self.bits, self.flow, self.target, self.end = pieces, bits, flow, target, end
        self.hops, self.latency_s = iter(path[0]), path[1]


class Clock:
    """One direction of something that has a rate: frames leave one after the other, those of flows that wait
    at once in turn, so that each gets the same rate (self-clocked fair queueing, Golestani 1994).
    rate_bps on the wire; seconds.
    """

    def __init__(self, rate_bps: float, buffer_s: float):
        self.second_per_bit, self.most_bits, self.free = 1.0 / rate_bps, buffer_s * rate_bps, 0.0
        self.waiting: list[tuple[float, int, Passing]] = []
        self._bits = self._count = 0
        self._virtual = 0.0  # the tag of what left last
        self._tags: dict[bytes, float] = {}  # of each flow's last frame

    def take(self, passing: Passing, when: float) -> bool:
        """Whether its buffer takes a frame that comes at `when`."""
        if not self.waiting:
            if self.free <= when:
                self.free, self._virtual = when, 0.0
                self._tags.clear()
        elif self._bits > self.most_bits:
            return False
        tag = max(self._virtual, self._tags.get(passing.flow, 0.0)) + passing.bits
        self._tags[passing.flow] = tag
        self._bits += passing.bits
        self._count += 1
        heapq.heappush(self.waiting, (tag, self._count, passing))
        return True

    def leaving(self, now: float) -> Iterator[tuple[float, Passing]]:
        """(when, frame) of those whose first bit leaves by `now`."""
        while self.waiting and self.free <= now:
            self._virtual, _, passing = heapq.heappop(self.waiting)
            self._bits -= passing.bits
            begin = self.free
            self.free = begin + passing.bits * self.second_per_bit
            passing.end = max(passing.end, self.free)
            yield begin, passing


class Router:
    """What is on its way. clusters: for each the MAC address of its router and its uplink's wire rate (0:
    unlimited); links: [cluster, cluster, wire rate (0: unlimited), one-way latency in seconds],
    both directions alike; nodes: IPv4 address -> (cluster, MAC address)."""

    def __init__(
        self,
        clusters: Sequence[dict[str, Any]],
        links: Sequence[Sequence[float]],
        nodes: dict[str, tuple[int, str]],
    ):
        trip = {
            cluster: max([4 * link[3] for link in links if cluster in link[:2]], default=0.0)
            for cluster in range(len(clusters))
        }

        def clock(rate: float, seconds: float) -> Clock | None:
            return Clock(rate, max(LEAST_BUFFER_S, seconds)) if rate else None

        out = [clock(cluster["uplink_bps"], trip[index]) for index, cluster in enumerate(clusters)]
        self._into = [
            clock(cluster["uplink_bps"], trip[index]) for index, cluster in enumerate(clusters)
        ]
        self._paths: dict[tuple[int, int], tuple[list[Clock], float]] = {}
        between = []
        for first, second, rate, latency in links:
            for a, b in ((int(first), int(second)), (int(second), int(first))):
                between.append(clock(rate, 4 * latency))
                self._paths[a, b] = (
                    [hop for hop in (out[a], between[-1]) if hop is not None],
                    latency,
                )
        self._near, self._far = (
            [hop for hop in hops if hop] for hops in ([*out, *between], self._into)
        )
        self._nodes = {
            bytes(map(int, address.split("."))): (
                cluster,
                _mac(mac) + _mac(clusters[cluster]["mac"]),
            )
            for address, (cluster, mac) in nodes.items()
        }
        self._heap: list[
            tuple[float, int, bool, Passing]
        ] = []  # (when it arrives, ..., past the far uplink)
        self._count = 0
        self.dropped = 0
        least = min((link[3] for link in links), default=0.0)
        self.quantum_s = min(max(least / 10, QUANTA_S[0]), QUANTA_S[1])

    @property
    def next_due(self) -> float | None:
        """When something is due to leave; None while nothing is on its way."""
        due = [clock.free for clock in (*self._near, *self._far) if clock.waiting]
        return min([*due, self._heap[0][0]] if self._heap else due, default=None)

    def take(self, frame: bytes, source: int, now: float) -> None:
        """A frame of cluster `source` (virtio-net header first); dropped where nobody elsewhere gets it."""
        known = self._nodes.get(frame[40:44]) if frame[22:24] == _IPV4 else None
        if known is None or known[0] == source:
            return
        target, macs = known
        pieces = frame[:10] + macs, memoryview(frame)[10 + _MACS :]
        path = self._paths[source, target]
        self._go_on(Passing(pieces, wire_bits(frame), frame[36:44], target, path, now), now)

    def _go_on(self, passing: Passing, when: float) -> None:
        """To the next clock on the near side, else on the long way."""
        clock = next(passing.hops, None)
        if clock is None:
            self._push(passing.end + passing.latency_s, False, passing)
        elif not clock.take(passing, when):
            self.dropped += 1

    def due(self, now: float) -> list[tuple[int, tuple]]:
        """(cluster, pieces of the frame) of what has arrived by `now`, in order."""
        # uplinks first: a frame's first bytes are on the link while the last are still on one
        for clock in self._near:
            for when, passing in clock.leaving(now):
                self._go_on(passing, when)
        arrived = self._arrived(now)
        for clock in self._far:
            for _, passing in clock.leaving(now):
                self._push(clock.free, True, passing)
        return arrived + self._arrived(now)

    def _arrived(self, now: float) -> list[tuple[int, tuple]]:
        arrived = []
        while self._heap and self._heap[0][0] <= now:
            when, _, last, passing = heapq.heappop(self._heap)
            clock = None if last else self._into[passing.target]
            if clock is None:
                arrived.append((passing.target, passing.pieces))
            elif not clock.take(passing, when):
                self.dropped += 1
        return arrived

    def _push(self, when: float, last: bool, passing: Passing) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, last, passing))


def wire_bits(frame: bytes) -> int:
    """Of a frame with its virtio-net header: every segment that it will be cut into has headers."""
    _, kind, _, segment, transport, _ = _VNET.unpack_from(frame)
    size = len(frame) - _VNET.size
    if not kind:
        return 8 * size
    # up to the end of TCP's, by its data offset
    header = transport + 4 * (frame[_VNET.size + transport + 12] >> 4)
    return 8 * (size + (-(-(size - header) // segment) - 1) * header)


def open_tap(name: str) -> int:
    """Descriptor of a new TAP device in the caller's network namespace, gone when it is closed. OSError."""
    descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    return descriptor


def run(router: Router, taps: Sequence[int]) -> None:
    """Carry frames between `taps` (of the clusters in order) for ever."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1_000, 0, 0, 0)  # nanoseconds
    # glibc's: frames come and go, and fresh pages cost as much as reading into them
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    gc.disable()  # nothing here refers to itself
    quantum = router.quantum_s
    while True:
        due, before = router.next_due, time.monotonic()
        if due is None or due - quantum / 2 > before:
            select.select(taps, [], [], None if due is None else due - quantum / 2 - before)
        now = time.monotonic()
        # while it slept: in the middle, on average
        came = now if now - before > 50e-6 else before - quantum / 2
        for cluster, tap in enumerate(taps):
            for frame in _frames(tap):
                router.take(frame, cluster, came)
        for target, pieces in router.due(now + quantum / 2):
            try:
                os.writev(taps[target], pieces)
            except (
                OSError
            ):  # the bridge is down, or the receiver's queue is full: the frame is lost
                router.dropped += 1
        time.sleep(quantum)


def _frames(tap: int) -> list[bytes]:
    """Those that wait, some hundreds at most."""
    frames = []
    try:
        for _ in range(500):
            frames.append(os.read(tap, _FRAME))
    except BlockingIOError:
        pass
    return frames


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
