"""A transfer over several streams: shared, resumed, and ended in one line; streams that stay open."""

import os
import threading
from collections import deque

import pytest
from weights_runs import until

from holmes_ext.errors import HolmesError
from holmes_ext.weights import fetch as fetch_module
from holmes_ext.weights.fetch import DiskError, QuietSource, VersionFetch, WrongDigest
from holmes_ext.weights.manifest import LEAST_CHUNK_BYTES
from holmes_ext.weights.publishing import publish_folder
from holmes_ext.weights.staging import ArrivingVersions
from holmes_ext.weights.store import ChunkReader, VersionStore
from holmes_ext.weights.streams import StreamPool

CHUNKS = 12


class FakeStream:
    """Stream to a store of this process.

    Args:
        store: The store.
        breaks_after: Chunks after which the connection breaks.
        spoil: Changes each chunk.
        pause: Called before each chunk.
    """

    bytes_ahead = 2 * LEAST_CHUNK_BYTES
    next_request = None  # it does not send a version by itself

    def __init__(self, store, breaks_after=10**9, spoil=lambda data: data, pause=lambda: None):
        self._reader = ChunkReader(store)
        self._left = breaks_after
        self._spoil = spoil
        self._pause = pause
        self._requests = deque()
        self.received = []
        self.is_open = True

    def start_measuring(self):
        pass

    def is_idle(self):
        return self.is_open

    def request_chunk(self, version, index):
        self._requests.append((version, index))

    def chunk(self, length, on_bytes):
        self._pause()
        if not self._left or not self.is_open:
            raise ConnectionResetError("cut")
        self._left -= 1
        version, index = self._requests.popleft()
        data = self._spoil(self._reader.read(version, index))
        assert len(data) == length
        on_bytes(length)
        self.received.append((version, index))
        return memoryview(data)

    def close(self):
        self.is_open = False

    cut = close


class Site:
    """Store of a site, and the pool of its streams to a published store."""

    def __init__(self, folder, streams):
        self.published = VersionStore(folder / "published")
        self.store = VersionStore(folder / "site")
        self.store.make()
        self._made = folder
        self._streams = iter(streams)
        self.pool = StreamPool(self._dial, most=4)
        self.bytes = 0

    def _dial(self, address):
        stream = next(self._streams, None)
        if stream is None:
            raise ConnectionRefusedError("nobody listens")
        return stream(self.published)

    def publish(self, version, parent=None):
        folder = self._made / f"made{version}"
        folder.mkdir()
        (folder / "model").write_bytes(os.urandom((CHUNKS - 1) * LEAST_CHUNK_BYTES + 1))
        return publish_folder(folder, self.published, version, parent=parent)

    def fetch(self, manifests, streams=2, **options):
        staged = [self.store.stage(manifest) for manifest in manifests]
        fetch = VersionFetch(staged, self.pool, "", streams, self._count, **options)
        fetch.start()
        return fetch, staged

    def _count(self, staged, count):
        self.bytes += count

    def is_same(self, version):
        copy, original = (store.folder(version) / "model" for store in (self.store, self.published))
        return copy.read_bytes() == original.read_bytes()


def stream(**options):
    return lambda store: FakeStream(store, **options)


def test_versions_of_one_transfer_are_complete_one_after_the_other(tmp_path):
    site = Site(tmp_path, [stream(), stream()])
    fetch, staged = site.fetch([site.publish(1), site.publish(2, parent=1)])
    for version in staged:
        fetch.wait_for(version)
        version.finish()
        assert site.is_same(version.manifest.version)
    assert site.bytes == sum(version.manifest.bytes for version in staged)


def test_a_stream_that_breaks_gives_its_chunks_back(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "_RETRY_S", 0.001)
    site = Site(tmp_path, [stream(breaks_after=3), stream(breaks_after=2), stream()])
    fetch, [staged] = site.fetch([site.publish(1)])
    fetch.wait_for(staged)
    staged.finish()
    assert site.is_same(1)


def test_a_fast_stream_pulls_what_a_slow_one_has_not_requested(tmp_path):
    is_late = threading.Event()
    slow = FakeStream(None, pause=is_late.wait)
    fast = []

    def open_fast(store):
        fast.append(FakeStream(store))
        return fast[0]

    def open_slow(store):
        slow._reader = ChunkReader(store)
        return slow

    site = Site(tmp_path, [open_slow, open_fast])
    fetch, [staged] = site.fetch([site.publish(1)])
    until(lambda: len(staged.missing) == 2)  # the slow stream has requested as much
    is_late.set()
    fetch.wait_for(staged)
    assert len(slow.received) == 2 and len(fast[0].received) == CHUNKS - 2


def test_streams_are_used_again(tmp_path):
    site = Site(tmp_path, [stream(), stream()])
    for version in (1, 2, 3):
        fetch, [staged] = site.fetch([site.publish(version)])
        fetch.wait_for(staged)
        staged.finish()
        # The threads end just after the last chunk. A thread that starts after it opens no stream.
        until(lambda: not any(t.name == "holmes-weights" for t in threading.enumerate()))
        assert len(site.pool._idle) in (1, 2)


def test_a_source_that_cannot_be_reached_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "_RETRY_S", 0.001)
    site = Site(tmp_path, [stream(breaks_after=3)])
    manifest = site.publish(1)
    fetch, [staged] = site.fetch([manifest], streams=1, stall_s=0.05)
    with pytest.raises(ConnectionRefusedError):
        fetch.wait_for(staged)
    staged.close()
    assert len(site.store.stage(manifest).missing) == CHUNKS - 3  # the next try goes on


def test_a_source_that_waits_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "_QUIET_S", 0.05)
    never = threading.Event()
    site = Site(tmp_path, [stream(pause=never.wait)])
    fetch, [staged] = site.fetch([site.publish(1)], streams=1)
    with pytest.raises(QuietSource):
        fetch.wait_for(staged)
    never.set()


@pytest.mark.parametrize(
    "error, message", [(WrongDigest, "publish the weights again"), (DiskError, "make space")]
)
def test_errors_that_no_other_source_helps(tmp_path, monkeypatch, error, message):
    spoil = bytes.swapcase if error is WrongDigest else bytes
    site = Site(tmp_path, [stream(spoil=spoil), stream(spoil=spoil)])
    manifest = site.publish(1)
    if error is DiskError:
        monkeypatch.setattr(os, "pwrite", lambda *arguments: os.write(-1, b""))
    fetch, [staged] = site.fetch([manifest])
    with pytest.raises(error, match=message):
        fetch.wait_for(staged)


def test_streams_are_opened_ahead_and_those_to_another_source_are_closed():
    opened = []
    is_open = threading.Semaphore(0)

    def dial(address):
        opened.append((address, FakeStream(None)))
        is_open.release()
        return opened[-1][1]

    pool = StreamPool(dial, most=2)
    pool.open_ahead("a:1")
    for _ in range(2):
        assert is_open.acquire(timeout=5)
    until(lambda: len(pool._idle) == 2)
    assert pool.take("a:1") in [stream for _, stream in opened]
    [(_, first), (_, second)] = opened
    assert pool.take("b:1") is opened[2][1] and opened[2][0] == "b:1"
    assert [first.is_open, second.is_open].count(
        False
    ) == 1  # the idle one; the other one is in use
    pool.close()


def test_a_broken_idle_stream_is_replaced():
    opened = []

    def dial(address):
        opened.append(FakeStream(None))
        return opened[-1]

    pool = StreamPool(dial, most=2)
    stream = pool.take("")
    pool.give_back("", stream)
    stream.close()
    assert pool.take("") is opened[1]


def test_a_version_is_awaited_while_it_arrives(tmp_path):
    site = Site(tmp_path, [])
    staged = site.store.stage(site.publish(1))
    arriving = ArrivingVersions()
    assert arriving.wait_for(1, 0.0) is None
    threading.Timer(0.01, arriving.add, [staged]).start()
    assert arriving.wait_for(1, 10.0) is staged
    assert staged.wait_for(0, 0.0) is None
    chunk = ChunkReader(site.published).read(1, 0)
    threading.Timer(0.01, staged.write, [0, memoryview(chunk)]).start()
    assert staged.wait_for(0, 10.0) == chunk
    staged.close()
    with pytest.raises(OSError, match="closed"):
        staged.write(1, memoryview(ChunkReader(site.published).read(1, 1)))
    arriving.remove(staged)
    assert arriving.get(1) is None


def test_a_version_that_exists_is_not_staged(tmp_path):
    site = Site(tmp_path, [stream(), stream()])
    manifest = site.publish(1)
    fetch, [staged] = site.fetch([manifest])
    fetch.wait_for(staged)
    staged.finish()
    with pytest.raises(HolmesError, match="exists already"):
        site.store.stage(manifest)
