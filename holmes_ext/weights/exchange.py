"""Protocol with which a host pulls versions of the weights, in chunks, from another process (a stream).

    {"op": "manifest", "version": N}            -> {"manifest": {...}}
    {"op": "read", "version": N, "chunk": I}    -> {"length": L}, then L bytes
    {"op": "next", ...}                         -> {"version": N or null}, then chunks as after "read"
    {"op": "end"}                               no answer; the wait of "next" ends
    {"op": "warm", "bytes": B}                  -> {"length": B or 0}, then as many zeros

A version is a numbered folder of files, which its manifest lists; a chunk is 256 KiB to 8 MiB of a file.

"next" is sent before the version exists. The sender waits for it, and then sends at once the chunks that
pushed_chunks() returns for the request. So the first bytes of a version need only the one-way delay of the
network. Only the service answers it, and "warm", which fills TCP's window before the first version.

An error is {"error": one line}. If the sender itself still waits for the version, it sends {"later": true}
every few seconds before the answer, so that the receiver does not give up. The receiver sends further
requests before the answer to the first has come, so a stream is busy in spite of the round trip.

A chunk is sent in parts of FRAME_BYTES, the most that one frame of a Channel may hold. Both ends limit the
time of each part. A link that is cut ends the stream, and the receiver opens another one for the missing
chunks.

A stream stays open between versions. So the next version needs no handshakes, and TCP's window is large.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.sockets.channel import FRAME_BYTES, Channel
from holmes_ext.join.sockets.handshake import Refused, printable
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.weights.manifest import VersionManifest
from holmes_ext.weights.rate import RateLimit, make_background
from holmes_ext.weights.staging import ArrivingVersions, StagedVersion
from holmes_ext.weights.store import ChunkReader, MissingVersion, VersionStore

#: Purpose of a connection for weights, in the handshake of joined jobs.
PURPOSE = "weights"
#: Seconds for a part of a chunk (FRAME_BYTES), and for an answer.
PART_S = 20.0
#: Longest time in seconds between two requests on a stream. Then the sender closes the stream.
IDLE_S = 1800.0
#: Seconds between two messages {"later": true} of a sender that itself waits for the version.
_LATER_S = 4.0
#: Most such messages until the request fails, if nothing of the version reaches the sender.
_MOST_LATER = 3
#: Least and most bytes that a stream requests ahead: they are requested, and not received yet.
_LEAST_AHEAD = 2**19
_MOST_AHEAD = 32 * 2**20
#: Round trips of bytes, at the stream's rate, that it requests ahead. A new stream doubles its rate in each.
_ROUND_TRIPS_AHEAD = 3
#: Seconds that are added to a round trip, because both ends need time for a request.
_SLACK_S = 0.02
#: Least duration of a measurement of a stream's rate, in seconds.
_RATE_S = 0.1
#: Field tcpi_min_rtt of struct tcp_info (linux/tcp.h), in microseconds: its format, and its offset in bytes.
_MIN_RTT = struct.Struct("=I")
_MIN_RTT_OFFSET = 148
_MIN_RTT_UNKNOWN = 2**32 - 1  # value of the field before the first measurement
#: Bytes of the first and of the largest request for zeros ("warm").
_FIRST_WARM = 2**17
_MOST_WARM = 8 * 2**20
#: Round trips after which zeros that take longer are limited by the link's rate, not by TCP's window.
_WARM_ROUND_TRIPS = 2.5
#: File that says whether TCP's windows shrink while a connection is idle. BBR's do not in any case.
_SHRINKS_IN_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
#: Bytes of the longest name of a congestion control algorithm (TCP_CA_NAME_MAX of Linux).
_NAME_BYTES = 16
#: Bytes of the longest request: the report of a host.
_LONGEST_REQUEST = 2**20
#: Bytes of the longest answer: a manifest of 500,000 chunks.
_LONGEST_ANSWER = 64 * 2**20


class NextRequest(NamedTuple):
    """Request {"op": "next"}: the sender sends the first chunks of the next version as soon as it exists."""

    after: int  # newest version of the receiver; the next version is the first with a larger number
    first: int  # index of the first chunk
    step: int  # difference of the indices of two chunks: other streams get the chunks in between
    bytes: int  # most bytes of all these chunks together; the last chunk may exceed them

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> NextRequest:
        """Return the request that a document of the receiver describes; HolmesError: it is not valid."""
        request = cls(*(_whole_number(document, key) for key in cls._fields))
        if request.first < 0 or request.step < 1:
            raise HolmesError("a request for the next version has no valid chunks")
        return request._replace(bytes=min(request.bytes, _MOST_AHEAD))


def pushed_chunks(manifest: VersionManifest, request: NextRequest) -> list[int]:
    """Return the indices of the chunks that the sender sends on a request for the next version."""
    indices = []
    count = 0
    for index in range(request.first, len(manifest.chunks), request.step):
        if count >= request.bytes:
            break
        indices.append(index)
        count += manifest.chunks[index].length
    return indices


class SendingStream:
    """Sender's end of a connection: sends versions of the weights to another host that requests them.

    Args:
        channel: Connection to the receiver.
        store: The store whose versions are sent.
        limit: Limit on the rate, for all streams of this process.
        on_bytes: Called with the number of bytes of each part that was sent.
        arriving: The versions that this process receives now. Their chunks are sent as soon as they are
            written. None: this process receives none.
    """

    def __init__(
        self,
        channel: Channel,
        store: VersionStore,
        limit: RateLimit,
        on_bytes: Callable[[int], None] = lambda count: None,
        arriving: ArrivingVersions | None = None,
    ):
        self._channel = channel
        self._store = store
        self._reader = ChunkReader(store)
        self._limit = limit
        self._on_bytes = on_bytes
        self._arriving = arriving
        self._is_background = False  # whether the packets of the connection have a low priority

    def next_request(self) -> dict[str, Any]:
        """Wait for the next request.

        Raises:
            OSError: None came within IDLE_S seconds, or the connection is lost.
        """
        return self._channel.receive(Deadline(IDLE_S, "a request"), _LONGEST_REQUEST)

    def reply(self, document: dict[str, Any]) -> None:
        """Send a document as the answer to a request."""
        self._channel.send(document, Deadline(PART_S, "an answer"))

    def answer(self, request: dict[str, Any]) -> None:
        """Answer a request for a manifest ("op" is "manifest") or for a chunk ("op" is "read").

        A request that cannot be fulfilled is answered with {"error": one line}.

        Raises:
            OSError: The connection is lost, or the receiver does not read the bytes in time.
        """
        try:
            version = _whole_number(request, "version")
            arriving = self._wait_for_version(version)
            if request.get("op") == "manifest":
                manifest = self._store.manifest(version) if arriving is None else arriving.manifest
                self.reply({"manifest": manifest.document()})
                return
            if request.get("op") != "read":
                raise HolmesError(f"there is no request {str(request.get('op'))!r:.40}")
            data = self._read_chunk(arriving, version, _whole_number(request, "chunk"))
        except HolmesError as error:
            self.reply({"error": str(error)})
            return
        self._send_bytes(data, self._on_bytes)

    def is_idle(self) -> bool:
        """Return whether the connection is open, and the receiver has sent no further request."""
        return self._channel.idle()

    def answer_next(self, manifest: VersionManifest | None, request: NextRequest) -> None:
        """Answer a request for the next version: send its number, and the chunks of pushed_chunks().

        Args:
            manifest: Manifest of the version; None: there is none yet, and no chunk is sent.
            request: The request, whose "op" is "next".

        Raises:
            OSError: The connection is lost, or the receiver does not read the bytes in time.
        """
        if manifest is None:
            self.reply({"version": None})
            return
        self.reply({"version": manifest.version})
        try:
            for index in pushed_chunks(manifest, request):
                self._send_bytes(self._reader.read(manifest.version, index), self._on_bytes)
        except HolmesError as error:
            self.reply({"error": str(error)})

    def warm_up(self, request: dict[str, Any]) -> None:
        """Answer a request for zeros ("op" is "warm"), which make TCP's window grow.

        None are sent if the window would shrink again before there are chunks to send.

        Raises:
            OSError: The connection is lost, or the receiver does not read the bytes in time.
        """
        try:
            count = min(_whole_number(request, "bytes"), _MOST_WARM)
        except HolmesError as error:
            self.reply({"error": str(error)})
            return
        if count < 0 or not _keeps_window(self._channel.socket):
            count = 0
        self._send_bytes(bytes(count), on_bytes=lambda length: None)

    def _send_bytes(self, data: bytes, on_bytes: Callable[[int], None]) -> None:
        """Send the length of a chunk, and its bytes in parts, each as soon as the rate limit allows it."""
        if not self._is_background:
            make_background(self._channel.socket)
            self._is_background = True
        self.reply({"length": len(data)})
        for part in _split_into_parts(memoryview(data)):
            self._limit.take(len(part))
            self._channel.send_bytes([part], Deadline(PART_S, "a part of a chunk"))
            on_bytes(len(part))

    def _wait_for_version(self, version: int) -> StagedVersion | None:
        """Wait until a version is in the store, or begins to arrive at this process.

        Sends {"later": true} to the receiver every _LATER_S seconds meanwhile, at most _MOST_LATER times.

        Returns:
            The version that is arriving; None: the version is complete in the store.

        Raises:
            MissingVersion: The version is not in the store, and does not begin to arrive in time.
        """
        if self._arriving is not None:
            for _ in range(_MOST_LATER):
                arriving = self._arriving.get(version)
                if arriving is not None:
                    return arriving
                if self._store.has(version):
                    return None
                arriving = self._arriving.wait_for(version, _LATER_S)
                if arriving is not None:
                    return arriving
                self.reply({"later": True})
        if not self._store.has(version):
            raise MissingVersion(f"there is no version {version}")
        return None

    def _read_chunk(self, arriving: StagedVersion | None, version: int, index: int) -> bytes:
        """Return the bytes of a chunk, as soon as they are on the disk.

        Sends {"later": true} to the receiver every _LATER_S seconds meanwhile.

        Args:
            arriving: The version, if it is arriving at this process; None: it is complete in the store.
            version: Number of the version.
            index: Index of the chunk in the manifest.
        """
        if arriving is None or index not in range(len(arriving.manifest.chunks)):
            return self._reader.read(version, index)
        while not arriving.is_closed:
            data = arriving.wait_for(index, _LATER_S)
            if data is not None:
                return data
            if not arriving.is_closed:
                self.reply({"later": True})
        # The version was moved to the store; if its transfer has failed instead, read() raises an error.
        return self._reader.read(version, index)


class ReceivingStream:
    """Receiver's end of a connection: requests and receives versions of the weights.

    It measures the rate of the connection, to decide how many bytes are requested ahead.

    Args:
        channel: Connection to the sender.
        source: Name of the sender in error messages.
        limit: Limit on the rate, for all streams of this process.
    """

    def __init__(self, channel: Channel, source: str, limit: RateLimit):
        self._channel = channel
        self._source = source
        self._limit = limit
        self._buffer = memoryview(b"")
        self._rate = 0.0  # bytes/s, of the last measurement
        self._round_trip_s = 0.0  # the least that was measured, so without the time in queues
        # Begin of this measurement, by time.monotonic(); None: it begins with the next part.
        self._measured_since: float | None = None
        self._measured_bytes = 0  # received since then
        #: Request for the next version that has no answer yet; None: there is none.
        self.next_request: NextRequest | None = None

    def start_measuring(self) -> None:
        """Restart the measurement of the rate with the next part that arrives, after an idle time."""
        self._measured_since = None

    @property
    def bytes_ahead(self) -> int:
        """Return the number of bytes that should be requested ahead, so that data always flows.

        This is the bandwidth-delay product of the stream, times _ROUND_TRIPS_AHEAD. If a stream requested
        more, faster streams would have to wait at the end for chunks that this one has requested.
        """
        bytes_per_round_trip = self._rate * (self._round_trip_s + _SLACK_S)
        ahead = _ROUND_TRIPS_AHEAD * bytes_per_round_trip
        return round(min(max(ahead, _LEAST_AHEAD), _MOST_AHEAD))

    def _measure(self, count: int) -> None:
        """Count the bytes of a part that has arrived. After a measurement, update rate and round trip.

        A measurement takes _RATE_S seconds, or a round trip if that is longer.
        """
        now = time.monotonic()
        if self._measured_since is not None:
            self._measured_bytes += count
            elapsed_s = now - self._measured_since
            if elapsed_s < max(_RATE_S, self._round_trip_s):
                return
            self._rate = self._measured_bytes / elapsed_s
            self._round_trip_s = _least_round_trip_s(self._channel.socket)
        self._measured_since = now  # the next measurement begins
        self._measured_bytes = 0

    def is_idle(self) -> bool:
        """Return whether the connection is open, and nothing arrives but the answer to `next_request`."""
        if self.next_request is not None:
            return self._channel.lives()  # the answer may be there already
        return self._channel.lives() and self._channel.idle()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            Refused: The answer is an error.
            OSError: No answer came within PART_S seconds, or the connection is lost.
        """
        self._channel.send(request, Deadline(PART_S, "a request"))
        return self._receive_answer()

    def manifest(self, version: int) -> VersionManifest:
        """Request the manifest of a version, and return it.

        Raises:
            HolmesError: The sender has no such version, or the manifest is not valid.
            OSError: The connection is lost.
        """
        answer = self.ask({"op": "manifest", "version": version})
        document = answer.get("manifest")
        if not isinstance(document, dict):
            raise HolmesError(f"{self._source}: sent no manifest of version {version}")
        manifest = VersionManifest.of_document(document, f"{self._source}: version {version}")
        if manifest.version != version:
            raise HolmesError(f"{self._source}: sent version {manifest.version}, not {version}")
        return manifest

    def request_next(self, after: int, first: int, step: int) -> None:
        """Send a request for the first chunks of the next version: see NextRequest.

        Raises:
            OSError: The connection is lost.
        """
        request = NextRequest(after, first, step, self.bytes_ahead)
        self._channel.send({"op": "next", **request._asdict()}, Deadline(PART_S, "a request"))
        self.next_request = request

    def receive_next(self) -> int | None:
        """Wait for the answer to the request for the next version.

        Returns:
            The version whose chunks follow, in the order of pushed_chunks(); None: no chunks follow.

        Raises:
            OSError: No answer came within PART_S seconds, or the connection is lost.
        """
        # If the sender still waits for the next version, this ends the wait: it answers that there is none.
        self._channel.send({"op": "end"}, Deadline(PART_S, "a request"))
        version = self._receive_answer().get("version")
        self.next_request = None
        return version if isinstance(version, int) else None

    def warm_up(self) -> None:
        """Receive zeros, twice as many each time, until TCP's window at the sender suffices for the link.

        Raises:
            Refused: The sender has no zeros.
            OSError: The connection is lost.
        """
        count = _FIRST_WARM
        while count <= _MOST_WARM:
            begin = time.monotonic()
            answer = self.ask({"op": "warm", "bytes": count})
            if answer.get("length") != count:
                return  # the window would shrink again
            self._receive_bytes(count, on_bytes=lambda length: None)
            elapsed_s = time.monotonic() - begin
            round_trip_s = _least_round_trip_s(self._channel.socket) + _SLACK_S
            is_limited_by_link = elapsed_s > _WARM_ROUND_TRIPS * round_trip_s
            # The first zeros take several round trips on any link, because a new window is small.
            if is_limited_by_link and count > _FIRST_WARM:
                return
            count *= 2

    def request_chunk(self, version: int, index: int) -> None:
        """Send a request for a chunk; chunk() returns the chunks in the order of the requests."""
        request = {"op": "read", "version": version, "chunk": index}
        self._channel.send(request, Deadline(PART_S, "a request"))

    def chunk(self, length: int, on_bytes: Callable[[int], None]) -> memoryview:
        """Wait for the next chunk that was requested, and return its bytes.

        Args:
            length: Length of the chunk by the manifest, in bytes.
            on_bytes: Called with the number of bytes of each part that has arrived.

        Returns:
            The bytes. The next call overwrites them.

        Raises:
            Refused: The sender cannot read the chunk.
            OSError: The connection is lost, or a part did not come within PART_S seconds.
        """
        answer = self._receive_answer()
        if answer.get("length") != length:
            raise ConnectionError(f"{self._source} sent a chunk of another length")
        return self._receive_bytes(length, on_bytes)

    def _receive_bytes(self, length: int, on_bytes: Callable[[int], None]) -> memoryview:
        """Wait for `length` bytes and return them; arguments and errors are those of chunk()."""
        if len(self._buffer) < length:
            self._buffer = memoryview(bytearray(length))
        data = self._buffer[:length]
        for part in _split_into_parts(data):
            self._limit.take(len(part))  # may wait; then TCP slows down the sender
            self._channel.receive_bytes([part], Deadline(PART_S, "a part of a chunk"))
            on_bytes(len(part))
            self._measure(len(part))
        return data

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def cut(self) -> None:
        """Shut the connection down from another thread; the thread that uses it gets an error."""
        self._channel.cut()

    def _receive_answer(self) -> dict[str, Any]:
        """Wait for the answer to a request; each {"later": true} that comes before it extends the time.

        Raises:
            Refused: The answer is an error.
            OSError: Nothing came within PART_S seconds, or the connection is lost.
        """
        answer = {"later": True}
        while answer.get("later") is True:
            answer = self._channel.receive(Deadline(PART_S, "an answer"), _LONGEST_ANSWER)
        if "error" in answer:
            raise Refused(f"{self._source}: {printable(str(answer['error']))}")
        return answer


def _split_into_parts(data: memoryview) -> list[memoryview]:
    """Return a chunk in parts of at most FRAME_BYTES, as much as one frame of a Channel may hold."""
    return [data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES)]


def _keeps_window(connection: socket.socket) -> bool:
    """Return whether TCP's window of a connection stays as large as it is while nothing is sent."""
    with contextlib.suppress(OSError):
        if _SHRINKS_IN_IDLE.read_text().strip() == "0":
            return True
        algorithm = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        return algorithm.startswith(b"bbr")
    return False


def _least_round_trip_s(connection: socket.socket) -> float:
    """Return the least round-trip time of a TCP connection, in seconds; 0.0: the kernel has none."""
    with contextlib.suppress(OSError):
        size = _MIN_RTT_OFFSET + _MIN_RTT.size
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(information) == size:
            [microseconds] = _MIN_RTT.unpack_from(information, _MIN_RTT_OFFSET)
            if microseconds != _MIN_RTT_UNKNOWN:
                return microseconds / 1e6
    return 0.0


def _whole_number(request: dict[str, Any], key: str) -> int:
    """Return a field of a request, or raise HolmesError if it is not a whole number."""
    value = request.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise HolmesError(f"a request has no {key}")
    return value
