"""Pulls the missing chunks of versions over several streams, oldest version first.

Each stream is a TLS connection with a thread of its own. A stream that breaks gives its chunks back, and is
opened again. The fetch fails if streams break and no byte arrives for a while. Then the chunks that were
written stay in the staging folder for the next try, which may use another source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.weights.exchange import ReceivingStream
from holmes_ext.weights.staging import StagedVersion
from holmes_ext.weights.streams import StreamPool
from holmes_ext.words import why

#: Seconds without a byte, on any stream, after which a fetch fails if a stream breaks.
STALL_S = 20.0
#: Seconds without a byte after which a fetch fails although its streams are open: the source waits, too.
_QUIET_S = 30.0
#: Chunks that a stream has requested and not received, at most.
_MOST_REQUESTED = 256
#: Seconds between two attempts to open a stream.
_RETRY_S = 0.5
#: Seconds between two looks of a stream that has nothing to do for chunks that another one gave back.
_LOOK_S = 0.05


class WrongDigest(HolmesError):
    """Error: a chunk that arrived is not the one that the manifest describes."""


class QuietSource(ConnectionError):
    """Error: a source is connected, but sends nothing, because it still waits for the version itself."""


class DiskError(HolmesError):
    """Error: a version cannot be written to the disk of this host."""


class _Piece(NamedTuple):
    """Chunk of a version that is missing."""

    staged: StagedVersion
    chunk: int  # index in the manifest

    @property
    def length(self) -> int:
        return self.staged.manifest.chunks[self.chunk].length


class VersionFetch:
    """Transfer of the missing chunks of some versions. Use once.

    Args:
        versions: The versions, with the chunks that they have already, oldest first.
        pool: Streams to the source.
        address: Address of the source.
        streams: Number of streams.
        on_bytes: Called with the version and the number of bytes of each part that arrives, by one thread
            at a time.
        stall_s: Seconds without a byte after which a broken stream is not opened again.
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
        # Chunks that no stream has requested, and the number of those of each version that are not written.
        self._waiting: deque[_Piece] = deque()
        self._left: dict[StagedVersion, int] = {}
        for staged in versions:
            missing = staged.missing
            self._left[staged] = len(missing)
            self._waiting.extend(_Piece(staged, index) for index in missing)
        self._left_bytes = sum(piece.length for piece in self._waiting)
        self._changed = threading.Condition()  # also the lock of all fields
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._last_byte = time.monotonic()
        self._open: set[ReceivingStream] = set()
        self._streams = max(1, min(streams, len(self._waiting)))

    def start(self) -> None:
        """Start to pull the chunks, in threads of their own."""
        if not self._waiting:
            return
        for _ in range(self._streams):
            threading.Thread(
                target=self._pull_until_end, name="holmes-weights", daemon=True
            ).start()

    def wait_for(self, staged: StagedVersion) -> None:
        """Wait until all chunks of a version are written.

        Raises:
            OSError: The streams broke, and no byte arrived for `stall_s` seconds.
            WrongDigest: The source has other bytes than the manifest says.
            DiskError: A chunk cannot be written.
            HolmesError: The source refuses this process, or has removed the version.
        """
        with self._changed:
            while self._left[staged]:
                if self._error is None and time.monotonic() - self._last_byte > _QUIET_S:
                    self._fail(QuietSource(f"no byte arrived for {_QUIET_S:.0f} s"))
                if self._error is not None:
                    raise self._error
                self._changed.wait(1.0)

    def stop(self) -> None:
        """End the transfer from another thread: wait_for() fails unless all chunks are written."""
        self._fail(ConnectionError("the transfer was ended"))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is None and self._left_bytes:
                self._error = error
            broken = list(self._open) if self._left_bytes else []
            self._ended.set()
            self._changed.notify_all()
        for stream in broken:
            stream.cut()

    def _pull_until_end(self) -> None:
        """Open a stream, and again if it breaks, until all chunks are written or the fetch fails."""
        while not self._ended.is_set():
            try:
                self._pull_over(self._pool.take(self._address))
            except OSError as error:
                if time.monotonic() - self._last_byte > self._stall_s:
                    self._fail(error)
                self._ended.wait(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - wait_for() raises it in the caller's thread
                self._fail(error)

    def _pull_over(self, stream: ReceivingStream) -> None:
        """Pull chunks over a stream until all are written, and give the stream back to the pool."""
        requested: deque[_Piece] = deque()
        with self._changed:
            self._open.add(stream)
        try:
            self._pull(stream, requested)
        except BaseException:
            stream.close()
            raise
        finally:
            with self._changed:
                self._open.discard(stream)
                self._waiting.extendleft(reversed(requested))
        if requested:
            stream.close()
        else:
            self._pool.give_back(self._address, stream)

    def _pull(self, stream: ReceivingStream, requested: deque[_Piece]) -> None:
        while not self._ended.is_set():
            self._request(stream, requested)
            if not requested:
                self._ended.wait(_LOOK_S)  # a stream that breaks may give chunks back
                continue
            staged, index = requested[0]
            data = stream.chunk(requested[0].length, partial(self._count, staged))
            self._write(staged, index, data)
            self._count_chunk(requested.popleft())

    def _request(self, stream: ReceivingStream, requested: deque[_Piece]) -> None:
        """Request chunks that no stream has requested, as many as this stream may."""
        requested_bytes = sum(piece.length for piece in requested)
        if not requested:
            stream.start_measuring()
        while len(requested) < _MOST_REQUESTED:
            if requested_bytes >= stream.bytes_ahead and len(requested) > 1:
                return
            with self._changed:
                if not self._waiting:
                    return
                piece = self._waiting.popleft()
            requested.append(piece)
            stream.request_chunk(piece.staged.manifest.version, piece.chunk)
            requested_bytes += piece.length

    def _count(self, staged: StagedVersion, count: int) -> None:
        with self._changed:  # streams count at the same time
            self._last_byte = time.monotonic()
            self._on_bytes(staged, count)

    def _write(self, staged: StagedVersion, index: int, data: memoryview) -> None:
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

    def _count_chunk(self, piece: _Piece) -> None:
        with self._changed:
            self._left[piece.staged] -= 1
            self._left_bytes -= piece.length
            if not self._left_bytes:
                self._ended.set()
            if not self._left[piece.staged]:
                self._changed.notify_all()
