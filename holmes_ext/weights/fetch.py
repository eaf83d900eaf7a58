"""Pulls the missing chunks of one version over several streams.

Each stream is a TLS connection with a thread of its own. A stream that breaks gives its chunks back, and is
opened again. The fetch fails if streams break and no byte arrives for a while. Then the chunks that were
written stay in the staging folder for the next try, which may use another source.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from holmes_ext.errors import HolmesError
from holmes_ext.weights.exchange import ReceivingStream
from holmes_ext.weights.manifest import CHUNK_BYTES
from holmes_ext.weights.store import StagedVersion
from holmes_ext.words import why

#: Seconds without a byte, on any stream, after which a fetch fails.
STALL_S = 20.0
#: Bytes of the chunks that a stream has requested and not received, at least while there are more.
_REQUESTED_BYTES = 2 * CHUNK_BYTES
#: Chunks that a stream has requested and not received, at most.
_REQUESTED_CHUNKS = 64
#: Seconds between two attempts to open a stream.
_RETRY_S = 0.5

#: Opens a stream to the source; called with a function for the number of bytes of each part that arrives.
Dial = Callable[[Callable[[int], None]], ReceivingStream]


class WrongDigest(HolmesError):
    """Error: a chunk that arrived is not the one that the manifest describes."""


class DiskError(HolmesError):
    """Error: a version cannot be written to the disk of this host."""


class VersionFetch:
    """Transfer of the missing chunks of one version. Use once.

    Args:
        staged: The version, with the chunks that it has already.
        dial: Opens a stream to the source.
        streams: Number of streams.
        on_bytes: Called with the number of bytes of each part that arrives.
        stall_s: Seconds without a byte after which a broken stream is not opened again.
    """

    def __init__(
        self,
        staged: StagedVersion,
        dial: Dial,
        streams: int,
        on_bytes: Callable[[int], None],
        stall_s: float = STALL_S,
    ):
        self._stall_s = stall_s
        self._staged = staged
        self._dial = dial
        self._on_bytes = on_bytes
        self._waiting = deque(staged.missing)  # indices of chunks that no stream has requested
        self._left = len(self._waiting)  # chunks that are not written yet
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._last_byte = time.monotonic()
        self._threads = [
            threading.Thread(target=self._pull_until_end, name="holmes-weights", daemon=True)
            for _ in range(max(1, min(streams, self._left)))
        ]

    def run(self) -> None:
        """Pull all missing chunks.

        Raises:
            OSError: The streams broke, and no byte arrived for `stall_s` seconds.
            WrongDigest: The source has other bytes than the manifest says.
            DiskError: A chunk cannot be written.
            HolmesError: The source refuses this process, or has removed the version.
        """
        if not self._left:
            return
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the transfer from another thread: run() fails soon."""
        self._fail(ConnectionError("the transfer was ended"))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._error is None and self._left:
                self._error = error
        self._ended.set()

    def _count(self, count: int) -> None:
        self._last_byte = time.monotonic()
        self._on_bytes(count)

    def _pull_until_end(self) -> None:
        """Open a stream, and again if it breaks, until all chunks are written or the fetch fails."""
        while not self._ended.is_set():
            try:
                stream = self._dial(self._count)
                try:
                    self._pull(stream)
                finally:
                    stream.close()
            except OSError as error:
                if time.monotonic() - self._last_byte > self._stall_s:
                    self._fail(error)
                self._ended.wait(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - run() raises it in the caller's thread
                self._fail(error)

    def _pull(self, stream: ReceivingStream) -> None:
        """Pull chunks over one stream until no chunk is missing."""
        requested: deque[int] = deque()
        try:
            while not self._ended.is_set():
                self._request(stream, requested)
                if not requested:
                    self._ended.wait(_RETRY_S / 10)  # a stream that breaks may give chunks back
                    continue
                index = requested[0]
                data = stream.chunk(self._staged.manifest.chunks[index].length)
                self._write(index, data)
                requested.popleft()
                self._count_chunk()
        finally:
            with self._lock:
                self._waiting.extendleft(reversed(requested))

    def _request(self, stream: ReceivingStream, requested: deque[int]) -> None:
        """Request chunks that no stream has requested, as many as one stream may."""
        manifest = self._staged.manifest
        requested_bytes = sum(manifest.chunks[index].length for index in requested)
        while requested_bytes < _REQUESTED_BYTES and len(requested) < _REQUESTED_CHUNKS:
            with self._lock:
                if not self._waiting:
                    return
                index = self._waiting.popleft()
            requested.append(index)
            stream.request_chunk(manifest.version, index)
            requested_bytes += manifest.chunks[index].length

    def _write(self, index: int, data: memoryview) -> None:
        manifest = self._staged.manifest
        file = manifest.files[manifest.chunks[index].file]
        try:
            is_right = self._staged.write(index, data)
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

    def _count_chunk(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._ended.set()
