"""Process that emulates the network between clusters: it delays and forwards frames.

    bridge eth0 (cluster 0) -- TAP wan0 --+              +-- TAP wan1 -- bridge eth1 (cluster 1)
                                      [uplink 0] -> [link 0-1] -> latency -> [uplink 1]

The process reads frames from a TAP device, holds each frame until it has passed the uplinks and the
link on its path, and writes it to the TAP device of the other cluster. Frames have up to 64 KiB
(virtio-net headers, checksum and segmentation left to the receiver), so few system calls are
needed.

Each direction of a link or an uplink is a `FairQueue`: frames leave it one after the other at its rate. All
pairs of nodes get the same share of the rate, so a small message does not wait behind all frames of a large
one. A frame that finds the buffer of the queue full is dropped, as in a router.

Forked by the lab's keeper, so it uses only the standard library. It needs TUN/TAP, not netem.
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
from typing import Any, NamedTuple

TUN_DEVICE = "/dev/net/tun"
#: Limits of the seconds that the process sleeps after each round of work (a quantum), so that it
#: handles several frames at a time. The sleep is a tenth of the shortest latency. Frames are up to
#: half of it too early or too late.
QUANTA_S = 400e-6, 1e-3
#: A call of select() that took at most these seconds has not waited: there were frames already.
_NO_WAIT_S = 50e-6
#: Smallest buffer of a queue, in seconds of its rate. A longer path has two round trips. Large
#: buffers make a link its rate and its latency, and nothing else: for each lost frame, Reno halves
#: its window and wins back a segment per round trip (over 20 ms and 100 Mb/s, sums of 10 MB took 3
#: to 12 % longer with 0.1 s, benchmarks/README.md).
LEAST_BUFFER_S = 3.0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
#: Offloads of a TAP device: checksum, and segmentation of TCP over IPv4 and IPv6.
_OFFLOADS = 0x01 | 0x02 | 0x04
#: Virtio-net header (linux/virtio_net.h): flags, segmentation (0: none), length of all headers,
#: data bytes of a segment, start and offset of the checksum. The checksum starts at the TCP header.
_VNET = struct.Struct("<BBHHHH")
_MACS = 12  # bytes of the MAC addresses of receiver and sender
_FRAME = _VNET.size + _MACS + 2 + (1 << 16)  # bytes of the largest frame
#: Slices of a frame with its virtio-net header: type of the frame, and fields of the IPv4 header
#: behind it.
_ETHERTYPE = slice(_VNET.size + _MACS, _VNET.size + _MACS + 2)
_IPV4_HEADER = _VNET.size + _MACS + 2
_FLOW = slice(_IPV4_HEADER + 12, _IPV4_HEADER + 20)  # IPv4 addresses of sender and receiver
_RECEIVER = slice(_IPV4_HEADER + 16, _IPV4_HEADER + 20)  # IPv4 address of the receiver
_IPV4 = b"\x08\x00"  # type of a frame with an IPv4 packet
#: Frames that are read from a TAP device at a time.
_MOST_FRAMES = 500
_PR_SET_TIMERSLACK, _M_TRIM_THRESHOLD = 29, -1


class ClusterPath(NamedTuple):
    """Queues and latency of frames from one cluster to another, up to the receiving cluster's uplink."""

    queues: Sequence[FairQueue]  # uplink of the sender and link, as far as they have a limited rate
    latency_s: float  # of the link, one way


class DelayedFrame:
    """Frame on its way to another cluster."""

    __slots__ = "bits", "flow", "last_bit_s", "latency_s", "next_queues", "pieces", "target"

    def __init__(
        self,
        pieces: tuple,
        bits: int,
        flow: bytes,
        target: int,
        path: ClusterPath,
        arrival_s: float,
    ):
        """Create a frame that has entered no queue yet.

        Args:
            pieces: Parts of the frame, to be written one after the other to the TAP device.
            bits: Bits on the wire.
            flow: IPv4 addresses of the sender and the receiver. Flows share each rate equally.
            target: Number of the receiver's cluster.
            path: Queues and latency on the way.
            arrival_s: Time when the sender's cluster has delivered the whole frame.
        """
        self.pieces = pieces
        self.bits = bits
        self.flow = flow
        self.target = target
        #: Time at which the last bit has left the queues so far. Each queue replaces it by a later
        #: time. Without a queue on the path, the latency begins when the frame has arrived.
        self.last_bit_s = arrival_s
        #: Queues that the frame still has to enter before the latency: an uplink and a link.
        self.next_queues = iter(path.queues)
        self.latency_s = path.latency_s  # one-way latency of the link, after these queues


class _WaitingFrame(NamedTuple):
    """Frame that waits in a FairQueue; the queue's heap compares the fields in this order."""

    finish_tag: float
    number: int  # of the frames of the queue
    frame: DelayedFrame


class LeavingFrame(NamedTuple):
    """Frame whose transmission out of a FairQueue begins."""

    begin_s: float  # time at which its first bit leaves
    frame: DelayedFrame


class _TimedFrame(NamedTuple):
    """Frame that waits until a point in time; a heap compares the fields in this order."""

    when_s: float
    number: int  # of such waits; it decides between equal times
    on_uplink: bool  # whether it is sent over the receiver's uplink, and arrives at this time
    frame: DelayedFrame


class ArrivedFrame(NamedTuple):
    """Frame that is to be written to the TAP device of the receiver's cluster."""

    target: int  # number of the cluster
    pieces: tuple  # parts of the frame, to be written one after the other


class FairQueue:
    """Queue of one direction of a link or an uplink: frames leave one after the other at its rate.

    All flows that wait get the same share of the rate. The algorithm is self-clocked fair queueing
    (Golestani 1994). It gives each frame a number, the finish tag, and the frame with the smallest
    finish tag leaves next:

        finish tag      the bits of the frame, plus the larger of the virtual time and the finish
                        tag of the flow's frame before
        virtual time    the finish tag of the frame that left last

    So a flow that has sent much has large tags, and waits until other flows have sent as much.
    """

    def __init__(self, rate_bps: float, buffer_s: float):
        """Create an empty queue for self-clocked fair queueing (Golestani 1994).

        Args:
            rate_bps: Rate on the wire in bits/s.
            buffer_s: Size of the buffer in seconds of the rate.
        """
        self.second_per_bit = 1.0 / rate_bps
        self.buffer_bits = buffer_s * rate_bps
        #: Time at which the last bit of the frame before has left, so that the next frame can
        #: begin. 0 lies before every time of the clock: the queue is free.
        self.free_at_s = 0.0
        #: Heap of the frames that wait: the one with the smallest finish tag leaves next.
        self.waiting: list[_WaitingFrame] = []
        self._waiting_bits = 0
        self._frame_count = 0  # frames so far, which numbers them
        #: Finish tag of the frame that left last. A flow that begins to send gets tags from here
        #: on, so it neither owes nor gets anything for the time before.
        self._virtual_time = 0.0
        self._finish_tags: dict[bytes, float] = {}  # flow -> finish tag of its last frame

    def add(self, frame: DelayedFrame, now: float) -> bool:
        """Add a frame that arrives at the time `now`. Return False if the buffer is full.

        The frame gets its finish tag by self-clocked fair queueing (Golestani 1994): of all waiting
        frames, the one with the smallest tag leaves next. The tag is the bits of the frame, plus
        the larger of the virtual time (tag of the frame that left last) and the tag of the flow's
        frame before.

        The buffer is full if more bits than its size wait already, so it holds one frame more than
        its size.
        """
        if not self.waiting:
            if self.free_at_s <= now:
                # The link is idle: no flow has a claim from before, so tags start at 0 again.
                self.free_at_s = now
                self._virtual_time = 0.0
                self._finish_tags.clear()
        elif self._waiting_bits > self.buffer_bits:
            return False
        start_tag = max(self._virtual_time, self._finish_tags.get(frame.flow, 0.0))
        finish_tag = start_tag + frame.bits
        self._finish_tags[frame.flow] = finish_tag
        self._waiting_bits += frame.bits
        self._frame_count += 1
        heapq.heappush(self.waiting, _WaitingFrame(finish_tag, self._frame_count, frame))
        return True

    def leaving(self, now: float) -> Iterator[LeavingFrame]:
        """Remove and yield the frames that begin to leave the queue until `now`, with their times.

        The frame with the smallest finish tag leaves next (self-clocked fair queueing), and its tag
        becomes the queue's virtual time. A frame occupies the link for its bits at the queue's
        rate; the end of this time is entered into the frame as `last_bit_s`.
        """
        while self.waiting and self.free_at_s <= now:
            next_frame = heapq.heappop(self.waiting)
            frame = next_frame.frame
            self._virtual_time = next_frame.finish_tag
            self._waiting_bits -= frame.bits
            begin_s = self.free_at_s
            self.free_at_s = begin_s + frame.bits * self.second_per_bit
            # A slower queue before this one may deliver the last bit later than this queue needs.
            frame.last_bit_s = max(frame.last_bit_s, self.free_at_s)
            yield LeavingFrame(begin_s, frame)


class ReceivingNode(NamedTuple):
    """Node that receives frames from other clusters."""

    cluster: int  # number of its cluster
    macs: bytes  # MAC addresses of a frame that the cluster's router sends to it: receiver, sender


class Router:
    """Simulation of the network between clusters: holds each frame until it arrives at its cluster.

    It stands for the router of each cluster and the links between the routers. take() gets a frame
    that a node has sent. pop_arrived() returns the frames that have passed the rate limits and the
    latency of their path. run() moves frames between a Router and the TAP devices.
    """

    def __init__(
        self,
        clusters: Sequence[dict[str, Any]],
        links: Sequence[Sequence[float]],
        nodes: dict[str, tuple[int, str]],
    ):
        """Create the uplinks of the clusters and the links between them, with empty queues.

        Args:
            clusters: For each cluster, "mac" (address of its router) and "uplink_bps" (rate of its
                uplink on the wire, 0 for no limit).
            links: [cluster, cluster, rate on the wire (0: no limit), one-way latency in seconds],
                for both directions.
            nodes: IPv4 address of each node -> (number of its cluster, MAC address).
        """
        largest_latency_s = [0.0] * len(clusters)  # of the links of each cluster
        for first, second, _, latency_s in links:
            for cluster in (int(first), int(second)):
                largest_latency_s[cluster] = max(largest_latency_s[cluster], latency_s)
        uplinks_out = []
        #: Uplink of each cluster in the direction into the cluster; None: without limit.
        self._uplinks_in: list[FairQueue | None] = []
        for cluster, settings in enumerate(clusters):
            uplinks_out.append(_queue(settings["uplink_bps"], largest_latency_s[cluster]))
            self._uplinks_in.append(_queue(settings["uplink_bps"], largest_latency_s[cluster]))
        #: (cluster of the sender, cluster of the receiver) -> path.
        self._paths: dict[tuple[int, int], ClusterPath] = {}
        links_one_way = []
        for first, second, rate_bps, latency_s in links:
            for sender, receiver in ((int(first), int(second)), (int(second), int(first))):
                link = _queue(rate_bps, latency_s)
                links_one_way.append(link)
                queues = [queue for queue in (uplinks_out[sender], link) if queue is not None]
                self._paths[sender, receiver] = ClusterPath(queues, latency_s)
        # Queues that frames pass before the latency of a link delays them, and after that.
        self._queues_before_latency = [queue for queue in (*uplinks_out, *links_one_way) if queue]
        self._queues_after_latency = [queue for queue in self._uplinks_in if queue]
        self._receivers = {
            bytes(map(int, address.split("."))): ReceivingNode(
                cluster, macs=_mac(mac) + _mac(clusters[cluster]["mac"])
            )
            for address, (cluster, mac) in nodes.items()
        }
        #: Heap of frames that wait for the end of the latency, or of their last transmission.
        self._timed: list[_TimedFrame] = []
        self._wait_count = 0  # waits so far, which numbers them
        self.dropped = 0  # frames
        least_s = min((latency_s for _, _, _, latency_s in links), default=0.0)
        shortest_quantum_s, longest_quantum_s = QUANTA_S
        self.quantum_s = min(max(least_s / 10, shortest_quantum_s), longest_quantum_s)

    @property
    def next_due(self) -> float | None:
        """Time at which the next frame leaves a queue or arrives, None if there is no frame."""
        queues = (*self._queues_before_latency, *self._queues_after_latency)
        times = [queue.free_at_s for queue in queues if queue.waiting]
        if self._timed:
            times.append(self._timed[0].when_s)  # the first of the heap is the earliest
        return min(times, default=None)

    def take(self, frame: bytes, source: int, now: float) -> None:
        """Add a frame. It is dropped if its receiver is not a node of another cluster.

        The frame is addressed to the router of the sender's cluster. Its MAC addresses are replaced
        by those with which the router of the other cluster sends it to the receiver.

        Args:
            frame: The frame, with the virtio-net header of a TAP device before its MAC addresses.
                All slices (_ETHERTYPE, _RECEIVER, _FLOW) count from the start of this header.
            source: Number of the sender's cluster.
            now: Time in seconds at which the frame was read.
        """
        is_ipv4 = frame[_ETHERTYPE] == _IPV4
        receiver = self._receivers.get(frame[_RECEIVER]) if is_ipv4 else None
        if receiver is None or receiver.cluster == source:
            return
        virtio_header = frame[: _VNET.size]
        after_macs = memoryview(frame)[_VNET.size + _MACS :]  # a view, to copy no 64 KiB
        delayed = DelayedFrame(
            pieces=(virtio_header + receiver.macs, after_macs),
            bits=wire_bits(frame),
            flow=frame[_FLOW],  # IPv4 addresses of sender and receiver
            target=receiver.cluster,
            path=self._paths[source, receiver.cluster],
            arrival_s=now,
        )
        self._enter_next_queue(delayed, now)

    def _enter_next_queue(self, frame: DelayedFrame, now: float) -> None:
        """Add a frame to the next queue on its path at the time `now`, or let the latency delay it.

        The queues are the uplink of the sender's cluster and the link. After them, the frame waits
        until the latency of the link is over, counted from its last bit. A frame that finds the
        buffer of a queue full is dropped.
        """
        queue = next(frame.next_queues, None)
        if queue is None:  # the frame has passed the uplink and the link
            self._wait_until(frame.last_bit_s + frame.latency_s, frame, on_uplink=False)
        elif not queue.add(frame, now):
            self.dropped += 1

    def pop_arrived(self, now: float) -> list[ArrivedFrame]:
        """Move all frames on to where they are at the time `now`, and remove those that have arrived.

        A frame passes the uplink of the sender's cluster, the link, the latency of the link, and
        the uplink of the receiver's cluster.

        Returns:
            The frames that have arrived, in the order of arrival.
        """
        # A frame enters the next queue when it begins to leave the one before: its first bytes are
        # on the link while its last bytes are still on the uplink.
        for queue in self._queues_before_latency:
            for begin_s, frame in queue.leaving(now):
                self._enter_next_queue(frame, begin_s)
        arrived = self._end_waits(now)
        for queue in self._queues_after_latency:
            for _, frame in queue.leaving(now):
                self._wait_until(frame.last_bit_s, frame, on_uplink=True)
        # A wait that was added just now may end before `now`: its frame has arrived, too.
        return arrived + self._end_waits(now)

    def _end_waits(self, now: float) -> list[ArrivedFrame]:
        """End the waits that are over at the time `now`, and return the frames that have arrived.

        A frame waits for one of two times (_TimedFrame):

            on_uplink is false    the end of the link's latency. The frame then enters the queue of
                                  the uplink of the receiver's cluster. If that uplink has no rate
                                  limit, there is no such queue, and the frame has arrived.
            on_uplink is true     the end of the transmission over that uplink. The frame has then
                                  arrived. pop_arrived() adds these waits.
        """
        arrived = []
        while self._timed and self._timed[0].when_s <= now:
            wait = heapq.heappop(self._timed)
            frame = wait.frame
            next_queue = None if wait.on_uplink else self._uplinks_in[frame.target]
            if next_queue is None:
                arrived.append(ArrivedFrame(frame.target, frame.pieces))
            elif not next_queue.add(frame, wait.when_s):
                self.dropped += 1
        return arrived

    def _wait_until(self, when_s: float, frame: DelayedFrame, on_uplink: bool) -> None:
        """Let a frame wait until the time `when_s`; _end_waits() ends the wait.

        Args:
            on_uplink: True: until then, the frame is sent over the uplink of the receiver's
                cluster, and arrives. False: the link's latency ends then, before that uplink.
        """
        self._wait_count += 1
        heapq.heappush(self._timed, _TimedFrame(when_s, self._wait_count, on_uplink, frame))


def _queue(rate_bps: float, latency_s: float) -> FairQueue | None:
    """Return an empty queue for one direction of a link or an uplink, None if it has no limit.

    The buffer holds what the rate sends in two round trips, or in LEAST_BUFFER_S if that is longer.

    Args:
        rate_bps: Rate on the wire in bits/s; 0: no limit.
        latency_s: One-way latency of the link; for an uplink, of the slowest link behind it.
    """
    if not rate_bps:
        return None
    return FairQueue(rate_bps, buffer_s=max(LEAST_BUFFER_S, 4 * latency_s))


def wire_bits(frame: bytes) -> int:
    """Return the bits of a frame on the wire, where each of its segments has headers.

    A frame that the kernel has not yet divided into segments has the headers only once.

    Args:
        frame: The frame with its virtio-net header.
    """
    _, segmentation, _, segment_data, tcp_header_start, _ = _VNET.unpack_from(frame)
    frame_bytes = len(frame) - _VNET.size
    if not segmentation:  # a single segment
        return 8 * frame_bytes
    # The header of TCP has its length, in words of 4 bytes, in the upper half of byte 12.
    tcp_header_bytes = 4 * (frame[_VNET.size + tcp_header_start + 12] >> 4)
    header_bytes = tcp_header_start + tcp_header_bytes  # of Ethernet, IP and TCP
    data_bytes = frame_bytes - header_bytes
    segments = (data_bytes + segment_data - 1) // segment_data  # rounded up
    return 8 * (data_bytes + segments * header_bytes)


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

    In each round, the process waits until a frame is due or arrives, forwards all frames that are
    due, and sleeps for `router.quantum_s` seconds (a quantum). So it handles several frames in a
    round, which saves CPU time. Times are then rounded to the middle of a quantum:

        due        A frame that is due within the next half of a quantum is forwarded now. Frames
                   are up to half a quantum too early or too late, and on average neither.
        arrival    A frame that is found after the sleep came at an unknown time of the sleep. Its
                   time of arrival is set to the middle of the sleep.

    Args:
        router: Network between the clusters.
        taps: Descriptor of each cluster's TAP device.
    """
    libc = ctypes.CDLL(None)
    # The kernel may end a sleep late by the timer slack. The default, 50,000 ns, would be an eighth
    # of the shortest quantum.
    libc.prctl(_PR_SET_TIMERSLACK, 1_000, 0, 0, 0)
    # glibc keeps freed memory: fresh pages would cost as much as reading a frame.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    gc.disable()  # there are no reference cycles
    half_quantum_s = router.quantum_s / 2
    while True:
        due = router.next_due
        before = time.monotonic()
        if due is None:
            select.select(taps, [], [])
        elif due - half_quantum_s > before:
            select.select(taps, [], [], due - half_quantum_s - before)
        now = time.monotonic()
        arrival = now
        if now - before <= _NO_WAIT_S:
            # select() did not wait, so the frames have come during the sleep of the last round: on
            # average in its middle.
            arrival = before - half_quantum_s
        for cluster, tap in enumerate(taps):
            for frame in _frames(tap):
                router.take(frame, cluster, arrival)
        for target, pieces in router.pop_arrived(now + half_quantum_s):
            try:
                os.writev(taps[target], pieces)
            except OSError:  # the bridge is down, or the queue of the receiver is full
                router.dropped += 1
        time.sleep(router.quantum_s)


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
