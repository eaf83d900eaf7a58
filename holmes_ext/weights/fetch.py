"""Pulls the missing chunks of versions of the weights over several streams, oldest version first.

Each stream is a TLS connection to the source, with a thread of its own. The source is the process that has
the versions: the service, or a host of the same site. If a stream breaks, the chunks that it has requested
and not received go back into the queue, and another stream is opened.

The fetch fails if streams break and no byte arrives for a while. Then the chunks that were written stay in
the staging folder for the next transfer, which may use another source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.weights.exchange import ReceivingStream, pushed_chunks
from holmes_ext.weights.staging import StagedVersion
from holmes_ext.weights.streams import StreamPool
from holmes_ext.words import why

#: A fetch fails if a stream breaks and no byte has arrived for this number of seconds, on any stream.
STALL_S = 20.0
#: A fetch also fails, with open streams, if no byte has arrived for this number of seconds: the source itself
#: waits for the version.
_QUIET_S = 30.0
#: Seconds between two checks whether the source is quiet.
_LOOK_FOR_QUIET_S = 1.0
#: Least and most chunks that a stream has requested and not received. With two, however large they are, the
#: source can send one while the other is written.
_LEAST_REQUESTED = 2
_MOST_REQUESTED = 256
#: Seconds between two attempts to open a stream.
_RETRY_S = 0.5
#: Seconds between two checks of an idle stream for chunks that a broken stream has put back into the queue.
_LOOK_S = 0.05


class WrongDigest(HolmesError):
    """Error: a received chunk does not have the SHA-256 that the manifest of its version contains."""


class QuietSource(ConnectionError):
    """Error: the connection to a source is open, but no bytes arrive.

    This happens if the source is a host of the same site that does not get the version either.
    """


class DiskError(HolmesError):
    """Error: files of a version of the weights cannot be written to the disk of this host."""

    @classmethod
    def of_folder(cls, folder: Path, error: OSError) -> DiskError:
        """Return the error for a folder of versions in which a system call has failed with `error`."""
        return cls(
            f"{folder}: a version cannot be written there ({why(error)}); make space and start again"
        )


class _MissingChunk(NamedTuple):
    """Chunk of a version that this host does not have yet."""

    staged: StagedVersion  # version of the chunk
    chunk: int  # index in the manifest

    @property
    def length(self) -> int:
        return self.staged.manifest.chunks[self.chunk].length


class _PushingStream(NamedTuple):
    """Stream over which a version was requested before it existed, and the chunks that come over it."""

    stream: ReceivingStream
    chunks: deque[_MissingChunk]


class VersionFetch:
    """One transfer of the missing chunks of some versions of the weights from one source to this host.

    Args:
        versions: Versions that are arriving, oldest first. Chunks that are written already are not pulled.
        pool: Gives open streams to the source.
        address: HOST:PORT of the source; "": the service.
        streams: Number of streams.
        on_bytes: Called with the version and the number of bytes of each part that arrives, by one thread
            at a time.
        stall_s: A broken stream is not opened again if no byte has arrived for this number of seconds.
    """

    def __init__(
        self,
        versions: Sequence[StagedVersion],
        pool: StreamPool,
        address: str,
        streams: int,
        on_bytes: Callable[[StagedVersion, int], None],
        stall_s: float = STALL_S,
    ):
        self._pool = pool
        self._address = address
        self._on_bytes = on_bytes
        self._stall_s = stall_s
        self._queue: deque[_MissingChunk] = deque()  # chunks that no stream has requested
        self._unwritten: dict[StagedVersion, int] = {}  # version -> number of its unwritten chunks
        for staged in versions:
            missing = staged.missing
            self._unwritten[staged] = len(missing)
            self._queue.extend(_MissingChunk(staged, index) for index in missing)
        self._unwritten_bytes = sum(chunk.length for chunk in self._queue)  # of all versions
        self._condition = threading.Condition()  # also the lock of all fields
        self._ended = threading.Event()  # all chunks are written, or the fetch has failed
        self._error: Exception | None = None  # why it has failed
        self._last_byte = time.monotonic()  # time at which bytes arrived last, on any stream
        self._open: set[ReceivingStream] = set()
        self._streams = max(1, min(streams, len(self._queue)))

    def start(self) -> None:
        """Start the threads that pull the chunks."""
        if not self._queue:
            return
        first_streams: list[_PushingStream | None] = [*self._take_pushing_streams()]
        # The other threads take streams from the pool.
        first_streams += [None] * (self._streams - len(first_streams))
        for first_stream in first_streams:
            threading.Thread(
                target=self._pull_until_end,
                args=(first_stream,),
                name="holmes-weights",
                daemon=True,
            ).start()

    def _take_pushing_streams(self) -> list[_PushingStream]:
        """Take the streams from the pool over which the oldest version was requested before it existed.

        The chunks that come over them are removed from the queue, so that no other stream requests them.
        Streams that wait for another version are closed.
        """
        pushing: list[_PushingStream] = []
        for stream in self._pool.take_waiting(self._address):
            chunks = self._chunks_pushed_over(stream)
            if chunks is None:
                stream.close()
                continue
            for chunk in chunks:
                self._queue.remove(chunk)
            pushing.append(_PushingStream(stream, deque(chunks)))
        return pushing

    def _chunks_pushed_over(self, stream: ReceivingStream) -> list[_MissingChunk] | None:
        """Return the chunks of the oldest version that come over a stream without a further request.

        Returns:
            None: The stream is broken or waits for another version, or some of the chunks are written.
        """
        oldest = next(iter(self._unwritten))
        request = stream.next_request
        if request is None or request.after >= oldest.manifest.version:
            return None
        if not stream.is_idle():
            return None
        indices = pushed_chunks(oldest.manifest, request)
        chunks = [_MissingChunk(oldest, index) for index in indices]
        are_all_missing = all(chunk in self._queue for chunk in chunks)
        return chunks if are_all_missing else None

    def wait_for(self, staged: StagedVersion) -> None:
        """Wait until all chunks of a version are written.

        Raises:
            OSError: The streams broke, and no byte arrived for `stall_s` seconds (see the class).
            QuietSource: The streams are open, but no byte arrived for _QUIET_S seconds.
            WrongDigest: The source has other bytes than the manifest says.
            DiskError: A chunk cannot be written.
            HolmesError: The source refuses this process, or has removed the version.
        """
        with self._condition:
            while self._unwritten[staged]:
                is_quiet = time.monotonic() - self._last_byte > _QUIET_S
                if is_quiet:
                    self._fail(QuietSource(f"no byte arrived for {_QUIET_S:.0f} s"))
                if self._error is not None:  # set above, or by the thread of a stream
                    raise self._error
                self._condition.wait(_LOOK_FOR_QUIET_S)

    def stop(self) -> None:
        """End the transfer from another thread: wait_for() fails unless all chunks are written."""
        self._fail(ConnectionError("the transfer was ended"))

    def _fail(self, error: Exception) -> None:
        """End the transfer with an error, unless all chunks are written already."""
        with self._condition:
            self._ended.set()
            self._condition.notify_all()
            is_complete = self._unwritten_bytes == 0
            if is_complete:
                return  # the streams go back to the pool
            if self._error is None:
                self._error = error
            open_streams = list(self._open)
        for stream in open_streams:
            stream.cut()  # wakes the thread of the stream

    def _pull_until_end(self, pushing: _PushingStream | None) -> None:
        """Pull chunks over a stream, or over another one if it breaks, until the fetch ends.

        Runs in a thread of its own.

        Args:
            pushing: The first stream; None: the first stream is also taken from the pool.
        """
        if pushing is not None:
            # Even if the fetch has ended already: the stream must be closed, or go back to the pool.
            self._pull_while_open(pushing)
        while not self._ended.is_set():
            self._pull_while_open(None)

    def _pull_while_open(self, pushing: _PushingStream | None) -> None:
        """Pull chunks over a stream (None: one of the pool) until the stream breaks, or the fetch ends.

        Errors that another stream cannot mend end the fetch.
        """
        try:
            if pushing is None:
                self._pull_over(self._pool.take(self._address), deque())
            else:
                self._pull_over(pushing.stream, pushing.chunks)
        except OSError as error:
            if time.monotonic() - self._last_byte > self._stall_s:
                self._fail(error)
            self._ended.wait(_RETRY_S)
        except Exception as error:  # noqa: BLE001 - wait_for() raises it in the caller's thread
            self._fail(error)

    def _pull_over(self, stream: ReceivingStream, unanswered: deque[_MissingChunk]) -> None:
        """Pull chunks over a stream until the fetch ends.

        Afterwards the stream goes back to the pool, or is closed if some of its requests are unanswered.

        Args:
            stream: The stream.
            unanswered: Chunks that were requested over the stream, in this order.
        """
        with self._condition:
            self._open.add(stream)
        try:
            if stream.next_request is not None:
                self._await_push(stream, unanswered)
            self._pull(stream, unanswered)
        except BaseException:
            stream.close()
            raise
        finally:
            with self._condition:
                self._open.discard(stream)
                # Back to the front of the queue, in the same order: they are among the oldest chunks.
                self._queue.extendleft(reversed(unanswered))
        if unanswered:
            stream.close()  # late answers would be taken for those of later requests
        else:
            self._pool.give_back(self._address, stream)

    def _await_push(self, stream: ReceivingStream, unanswered: deque[_MissingChunk]) -> None:
        """Wait until the source begins to send the next version, or answers that it sends none.

        Args:
            stream: Stream over which the next version was requested.
            unanswered: Chunks that should come over it. If they do not, they are moved back to the queue.

        Raises:
            OSError: The source sends another version, or the connection is lost.
        """
        version = stream.receive_next()
        stream.start_measuring()
        if version is None:
            with self._condition:
                self._queue.extendleft(reversed(unanswered))
            unanswered.clear()
        elif version != next(iter(self._unwritten)).manifest.version:
            raise ConnectionError(f"version {version} came instead of the next one")

    def _pull(self, stream: ReceivingStream, unanswered: deque[_MissingChunk]) -> None:
        """Request, receive and write chunks until the fetch ends.

        Args:
            stream: An open stream.
            unanswered: Chunks that were requested over the stream and not received yet. This method adds and
                removes chunks; those that are left at the end are for other streams.
        """
        while not self._ended.is_set():
            self._request(stream, unanswered)
            if not unanswered:
                self._ended.wait(_LOOK_S)  # a stream that breaks may give chunks back
                continue
            chunk = unanswered[0]
            data = stream.chunk(chunk.length, partial(self._count_bytes, chunk.staged))
            self._write(chunk.staged, chunk.chunk, data)
            self._count_chunk(unanswered.popleft())

    def _request(self, stream: ReceivingStream, unanswered: deque[_MissingChunk]) -> None:
        """Request chunks from the queue until enough bytes are requested ahead; add them to `unanswered`."""
        requested_bytes = sum(chunk.length for chunk in unanswered)
        if not unanswered:
            stream.start_measuring()
        while len(unanswered) < _MOST_REQUESTED:
            has_enough_bytes = requested_bytes >= stream.bytes_ahead
            if has_enough_bytes and len(unanswered) >= _LEAST_REQUESTED:
                return
            with self._condition:
                if not self._queue:
                    return
                chunk = self._queue.popleft()
            unanswered.append(chunk)
            stream.request_chunk(chunk.staged.manifest.version, chunk.chunk)
            requested_bytes += chunk.length

    def _count_bytes(self, staged: StagedVersion, count: int) -> None:
        """Record that bytes have arrived now, and pass their number to `on_bytes`."""
        with self._condition:  # several streams call this at the same time
            self._last_byte = time.monotonic()
            self._on_bytes(staged, count)

    def _write(self, staged: StagedVersion, index: int, data: memoryview) -> None:
        """Write the bytes of a chunk to the disk.

        Raises:
            DiskError: The disk is full, for example.
            WrongDigest: The bytes do not have the SHA-256 of the manifest.
        """
        manifest = staged.manifest
        file = manifest.files[manifest.chunks[index].file]
        try:
            is_right = staged.write(index, data)
        except OSError as error:
            raise DiskError(
                f"version {manifest.version}: {file.name} cannot be written ({why(error)});"
                " make space and start again: the transfer goes on"
            ) from None
        if not is_right:
            raise WrongDigest(
                f"version {manifest.version}: {file.name} is not what its manifest says, so the published"
                " copy was changed; publish the weights again as a new version"
            )

    def _count_chunk(self, chunk: _MissingChunk) -> None:
        """Count a chunk as written, and wake wait_for() if it was the last missing chunk of its version."""
        with self._condition:
            self._unwritten[chunk.staged] -= 1
            self._unwritten_bytes -= chunk.length
            if not self._unwritten_bytes:
                self._ended.set()
            if not self._unwritten[chunk.staged]:
                self._condition.notify_all()
