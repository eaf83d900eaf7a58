"""Process that emulates the network between clusters: it delays and forwards frames.

    bridge eth0 (cluster 0) -- TAP wan0 --+              +-- TAP wan1 -- bridge eth1 (cluster 1)
                                      [uplink 0] -> [link 0-1] -> latency -> [uplink 1]

The process reads frames from a TAP device, holds each frame until it has passed the uplinks and the
link on its path, and writes it to the TAP device of the other cluster. Frames have up to 64 KiB
(virtio-net headers, checksum and segmentation left to the receiver), so few system calls are
needed.

Each direction of a link or an uplink is a `Clock`: frames pass it one after the other at its rate.
All pairs of nodes get the same share, so a small message does not wait behind all frames of a large
one. A frame that finds the clock's buffer full is dropped, as in a router.

Only the standard library is needed, because the lab's keeper forks this process. The kernel needs
TUN/TAP, not netem.
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
#: Limits of the seconds that the process sleeps after each round of work, so that it handles
#: several frames at a time. The sleep is a tenth of the shortest latency. Frames are up to half of
#: it too early or too late.
QUANTA_S = 400e-6, 1e-3
#: Smallest buffer of a clock, in seconds of its rate. A longer path has two round trips. Large
#: buffers make a link its rate and its latency, and nothing else: for each lost frame, Reno halves
#: its window and wins back a segment per round trip (over 20 ms and 100 Mb/s, sums of 10 MB took 3
#: to 12 % longer with 0.1 s, docs/numbers.md).
LEAST_BUFFER_S = 3.0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
#: Offloads of a TAP device: checksum, and segmentation of TCP over IPv4 and IPv6.
_OFFLOADS = 0x01 | 0x02 | 0x04
_VNET, _MACS, _FRAME = struct.Struct("<BBHHHH"), 12, 10 + 14 + (1 << 16)
_IPV4 = b"\x08\x00"
#: Frames that are read from a TAP device at a time.
_MOST_FRAMES = 500
_PR_SET_TIMERSLACK, _M_TRIM_THRESHOLD = 29, -1


class Passing:
    """Frame that is delayed.

    Attributes:
        pieces: Parts of the frame, to be written to the TAP device.
        bits: Bits on the wire.
        flow: IPv4 addresses of the sender and the receiver.
        target: Number of the receiver's cluster.
        hops: Clocks that the frame still has to pass before the latency.
        latency_s: Latency of the link.
        end: Time in seconds at which the last bit has left the clocks that were passed.
    """

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
        """Create a frame that has passed nothing yet.

        Args:
            path: Clocks before the latency, and the seconds of the latency.
            end: Time at which the frame arrived.
        """
        hops, latency_s = path
        self.pieces = pieces
        self.bits = bits
        self.flow = flow
        self.target = target
        self.end = end
        self.hops = iter(hops)
        self.latency_s = latency_s


class Clock:
    """One direction of a link or an uplink: frames leave one after the other at its rate.

    All flows that wait get the same rate (self-clocked fair queueing, Golestani 1994): a frame gets
    a tag, the larger of the last tag that left and the last tag of its flow, plus its bits. The
    frame with the smallest tag leaves next.
    """

    def __init__(self, rate_bps: float, buffer_s: float):
        """Create an idle clock.

        Args:
            rate_bps: Rate on the wire.
            buffer_s: Size of the buffer in seconds of the rate.
        """
        self.second_per_bit = 1.0 / rate_bps
        self.most_bits = buffer_s * rate_bps
        self.free = 0.0  # time at which the next frame can leave
        self.waiting: list[tuple[float, int, Passing]] = []  # heap of (tag, number, frame)
        self._bits = 0  # of all waiting frames
        self._count = 0
        self._virtual = 0.0  # tag of the frame that left last
        self._tags: dict[bytes, float] = {}  # flow -> tag of its last frame

    def take(self, passing: Passing, when: float) -> bool:
        """Add a frame that arrives at the time `when`. Return False if the buffer is full."""
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
        """Remove the frames that begin to leave until `now`, and yield (time, frame)."""
        while self.waiting and self.free <= now:
            self._virtual, _, passing = heapq.heappop(self.waiting)
            self._bits -= passing.bits
            begin = self.free
            self.free = begin + passing.bits * self.second_per_bit
            passing.end = max(passing.end, self.free)
            yield begin, passing


class Router:
    """Network between the clusters with the frames that are on it."""

    def __init__(
        self,
        clusters: Sequence[dict[str, Any]],
        links: Sequence[Sequence[float]],
        nodes: dict[str, tuple[int, str]],
    ):
        """Create a network without frames.

        Args:
            clusters: For each cluster, "mac" (address of its router) and "uplink_bps" (rate of its
                uplink on the wire, 0 for no limit).
            links: [cluster, cluster, rate on the wire (0: no limit), one-way latency in seconds],
                for both directions.
            nodes: IPv4 address of each node -> (number of its cluster, MAC address).
        """
        # Cluster -> two round trips (four times the latency) of its slowest link, for the size of buffers.
        trip = {
            cluster: max([4 * link[3] for link in links if cluster in link[:2]], default=0.0)
            for cluster in range(len(clusters))
        }

        def clock(rate: float, seconds: float) -> Clock | None:
            """Return a clock with a buffer of at least these seconds, None if there is no limit."""
            return Clock(rate, max(LEAST_BUFFER_S, seconds)) if rate else None

        out = [clock(cluster["uplink_bps"], trip[index]) for index, cluster in enumerate(clusters)]
        self._into = [
            clock(cluster["uplink_bps"], trip[index]) for index, cluster in enumerate(clusters)
        ]
        #: (cluster of the sender, of the receiver) -> (clocks before the latency, seconds of latency).
        self._paths: dict[tuple[int, int], tuple[list[Clock], float]] = {}
        between = []
        for first, second, rate, latency in links:
            for a, b in ((int(first), int(second)), (int(second), int(first))):
                between.append(clock(rate, 4 * latency))
                self._paths[a, b] = (
                    [hop for hop in (out[a], between[-1]) if hop is not None],
                    latency,
                )
        # Clocks that frames pass before and after the latency.
        self._near, self._far = (
            [hop for hop in hops if hop] for hops in ([*out, *between], self._into)
        )
        # IPv4 address -> (cluster, MAC addresses of receiver and sender that the frame gets).
        self._nodes = {
            bytes(map(int, address.split("."))): (
                cluster,
                _mac(mac) + _mac(clusters[cluster]["mac"]),
            )
            for address, (cluster, mac) in nodes.items()
        }
        # Frames that wait for the latency, or for the end of the last uplink: (time, number, whether the
        # frame has passed all clocks, frame).
        self._heap: list[tuple[float, int, bool, Passing]] = []
        self._count = 0
        self.dropped = 0
        least = min((link[3] for link in links), default=0.0)
        self.quantum_s = min(max(least / 10, QUANTA_S[0]), QUANTA_S[1])

    @property
    def next_due(self) -> float | None:
        """Time at which the next frame leaves a clock or arrives, None if there is no frame."""
        due = [clock.free for clock in (*self._near, *self._far) if clock.waiting]
        return min([*due, self._heap[0][0]] if self._heap else due, default=None)

    def take(self, frame: bytes, source: int, now: float) -> None:
        """Add a frame. It is dropped if its receiver is not a node of another cluster.

        Args:
            frame: The frame with its virtio-net header.
            source: Number of the sender's cluster.
            now: Time in seconds at which the frame was read.
        """
        # Behind 10 bytes of virtio-net header and 12 of MAC addresses come the type of the frame and the
        # IPv4 header. Its bytes 12 to 19 (36 to 43 of the frame) are the sender and the receiver.
        known = self._nodes.get(frame[40:44]) if frame[22:24] == _IPV4 else None
        if known is None or known[0] == source:
            return
        target, macs = known
        pieces = frame[:10] + macs, memoryview(frame)[10 + _MACS :]
        path = self._paths[source, target]
        self._go_on(Passing(pieces, wire_bits(frame), frame[36:44], target, path, now), now)

    def _go_on(self, passing: Passing, when: float) -> None:
        """Move a frame to the next clock before the latency, or let it wait for the latency."""
        clock = next(passing.hops, None)
        if clock is None:
            self._push(passing.end + passing.latency_s, False, passing)
        elif not clock.take(passing, when):
            self.dropped += 1

    def due(self, now: float) -> list[tuple[int, tuple]]:
        """Return (cluster, pieces) of each frame that has arrived until `now`, in order."""
        # Frames go on when they begin to leave an uplink: the first bytes of a frame are on the link while
        # its last bytes are still on the uplink.
        for clock in self._near:
            for when, passing in clock.leaving(now):
                self._go_on(passing, when)
        arrived = self._arrived(now)
        for clock in self._far:
            for _, passing in clock.leaving(now):
                self._push(clock.free, True, passing)
        return arrived + self._arrived(now)

    def _arrived(self, now: float) -> list[tuple[int, tuple]]:
        """Return the frames that have arrived, and move others to the uplink of the receiver."""
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
        """Let a frame wait until the time `when`.

        Args:
            last: Whether the frame has then passed all clocks.
        """
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, last, passing))


def wire_bits(frame: bytes) -> int:
    """Return the bits of a frame on the wire, where each of its segments has headers.

    Args:
        frame: The frame with its virtio-net header.
    """
    # The kind of segmentation, the bytes of a segment's data, and the position of the TCP header.
    _, kind, _, segment, transport, _ = _VNET.unpack_from(frame)
    size = len(frame) - _VNET.size
    if not kind:  # a single segment
        return 8 * size
    # All headers up to the end of TCP's, whose length is in its data offset.
    header = transport + 4 * (frame[_VNET.size + transport + 12] >> 4)
    return 8 * (size + (-(-(size - header) // segment) - 1) * header)


def open_tap(name: str) -> int:
    """Create a TAP device in the current network namespace, and return its descriptor.

    The device disappears when the descriptor is closed.

    Raises:
        OSError: the kernel does not permit TAP devices.
    """
    descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
    return descriptor


def run(router: Router, taps: Sequence[int]) -> None:
    """Forward frames between clusters, without end.

    Args:
        router: Network between the clusters.
        taps: Descriptor of each cluster's TAP device.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_TIMERSLACK, 1_000, 0, 0, 0)  # nanoseconds
    # glibc keeps freed memory: fresh pages would cost as much as reading a frame.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    gc.disable()  # there are no reference cycles
    quantum = router.quantum_s
    while True:
        due, before = router.next_due, time.monotonic()
        if due is None or due - quantum / 2 > before:
            select.select(taps, [], [], None if due is None else due - quantum / 2 - before)
        now = time.monotonic()
        # If select() did not wait, frames have arrived during the last sleep: on average in its middle.
        arrival = now if now - before > 50e-6 else before - quantum / 2
        for cluster, tap in enumerate(taps):
            for frame in _frames(tap):
                router.take(frame, cluster, arrival)
        for target, pieces in router.due(now + quantum / 2):
            try:
                os.writev(taps[target], pieces)
            except OSError:  # the bridge is down, or the queue of the receiver is full
                router.dropped += 1
        time.sleep(quantum)


def _frames(tap: int) -> list[bytes]:
    """Return the frames that wait at a TAP device, at most _MOST_FRAMES."""
    frames = []
    try:
        for _ in range(_MOST_FRAMES):
            frames.append(os.read(tap, _FRAME))
    except BlockingIOError:
        pass
    return frames


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
