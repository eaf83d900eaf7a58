"""The service sends a version to hosts that requested it before it existed; zeros make TCP's window grow."""

import os
import socket
import threading
from dataclasses import asdict

import pytest
from weights_runs import until

from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import Refused
from holmes_ext.weights import exchange
from holmes_ext.weights.exchange import NextRequest, ReceivingStream, pushed_chunks
from holmes_ext.weights.fetch import VersionFetch
from holmes_ext.weights.manifest import LEAST_CHUNK_BYTES
from holmes_ext.weights.publishing import publish_folder
from holmes_ext.weights.rate import RateLimit
from holmes_ext.weights.service import WeightsService
from holmes_ext.weights.sites import HostReport
from holmes_ext.weights.store import VersionStore
from holmes_ext.weights.streams import StreamPool

CHUNKS = 23
STREAMS = 3
HOST = "host"


class CountingLimit(RateLimit):
    """No limit; counts the bytes that pass."""

    def __init__(self):
        super().__init__()
        self.passed = 0

    def take(self, count):
        self.passed += count


class RecordingStream(ReceivingStream):
    """Stream that records the chunks that it requests one by one."""

    requested: list[int] = []

    def request_chunk(self, version, index):
        self.requested.append(index)
        super().request_chunk(version, index)


class Pair:
    """The service, and a host of a site that is connected to it without TLS."""

    def __init__(self, folder):
        self._folder = folder
        self.published = VersionStore(folder / "published")
        self.store = VersionStore(folder / "site")
        self.store.make()
        self.limit = CountingLimit()
        self.service = WeightsService(self.published, self.limit)
        self._watching = threading.Thread(target=self.service.watch)
        self._watching.start()
        self.opened = 0
        RecordingStream.requested = []
        self.pool = StreamPool(self.dial, most=STREAMS)
        self.reports = self.dial("")
        self.bytes = 0

    def dial(self, address):
        ends = socket.socketpair()
        threading.Thread(target=self._serve, args=(Channel(ends[0]),), daemon=True).start()
        self.opened += 1
        return RecordingStream(Channel(ends[1]), "the service", RateLimit())

    def _serve(self, channel):
        try:
            self.service.answer(channel, "east", HOST)
        except OSError:
            channel.close()

    def report(self, staged=()):
        report = HostReport(host=HOST, address="", staged=tuple(staged), current=None)
        request = {"op": "report", "report": asdict(report), "seen": "", "wait": 0.0}
        return self.reports.ask(request)

    def wait_for_next(self, newest=-1):
        """Open the streams of the pool, and wait until all have requested the next version."""
        self.pool.open_ahead("", newest=newest)
        until(lambda: len(self.pool._idle) == STREAMS)

    def publish(self, version, chunks=CHUNKS):
        folder = self._folder / f"made{version}"
        folder.mkdir()
        (folder / "model").write_bytes(os.urandom((chunks - 1) * LEAST_CHUNK_BYTES + 1))
        return publish_folder(folder, self.published, version)

    def pull(self, manifest):
        staged = self.store.stage(manifest)
        fetch = VersionFetch([staged], self.pool, "", STREAMS, self._count)
        fetch.start()
        fetch.wait_for(staged)
        staged.finish()
        copy, original = (store.folder(manifest.version) for store in (self.store, self.published))
        assert (copy / "model").read_bytes() == (original / "model").read_bytes()

    def _count(self, staged, count):
        self.bytes += count

    def close(self):
        self.pool.close()
        self.reports.close()
        self.service.close()
        self._watching.join()


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "_SHRINKS_IN_IDLE", tmp_path / "idle")
    (tmp_path / "idle").write_text("1\n")
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_first_chunks_come_without_a_request_and_no_chunk_comes_twice(pair):
    for version in (1, 2):
        pair.report(staged=range(1, version))
        pair.wait_for_next(newest=version - 1)
        RecordingStream.requested = []
        pair.limit.passed = 0
        pair.bytes = 0
        requests = [stream.next_request for stream in pair.pool._idle]
        assert len({request.first for request in requests}) == STREAMS
        manifest = pair.publish(version)
        pushed = {index for request in requests for index in pushed_chunks(manifest, request)}
        # Before the host asks for anything, the first chunks are on their way.
        until(lambda: pair.limit.passed > 0)
        pair.pull(manifest)
        assert pushed and sorted(RecordingStream.requested) == sorted({*range(CHUNKS)} - pushed)
        assert pair.bytes == pair.limit.passed == manifest.bytes
        until(lambda: not any(t.name == "holmes-weights" for t in threading.enumerate()))
    assert pair.opened == 1 + STREAMS  # the same streams for both versions


def test_a_version_that_is_not_the_next_one_is_requested(pair):
    pair.report()
    pair.wait_for_next(newest=5)
    manifest = pair.publish(3)
    pair.pull(manifest)
    assert sorted(RecordingStream.requested) == list(range(CHUNKS))
    assert pair.limit.passed == manifest.bytes


def test_a_host_with_another_source_gets_nothing_by_itself(pair):
    pair.report(staged=[1])
    stream = pair.dial("")
    stream.request_next(after=0, first=0, step=1)
    manifest = pair.publish(1)
    until(lambda: pair.report(staged=[1])["versions"] == [1])
    assert stream.receive_next() is None  # it has version 1
    assert pair.limit.passed == 0
    assert stream.manifest(1) == manifest  # the stream works on
    stream.close()


@pytest.mark.parametrize("chunks", [CHUNKS, STREAMS - 1])
def test_a_stream_with_another_version_than_the_announced_one_is_not_used(pair, chunks):
    pair.report()
    pair.wait_for_next()
    pair.publish(1)
    until(lambda: pair.limit.passed > 0)
    second = pair.publish(2, chunks)
    pair.pull(second)
    assert sorted(RecordingStream.requested) == list(range(chunks))


@pytest.mark.parametrize("text, is_padded", [("0\n", True), ("1\n", False)])
def test_zeros_are_sent_if_the_window_stays(pair, tmp_path, text, is_padded):
    (tmp_path / "idle").write_text(text)
    pair.wait_for_next()
    assert (pair.limit.passed > 0) == is_padded
    assert pair.service.status()["sent_bytes"] == {}  # they are not weights


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "next", "after": 0, "first": 0, "step": 0, "bytes": 1},
        {"op": "next", "after": 0, "first": -1, "step": 1, "bytes": 1},
        {"op": "next", "after": "0", "first": 0, "step": 1, "bytes": 1},
        {"op": "warm", "bytes": True},
    ],
)
def test_requests_that_are_not_valid(pair, request_):
    stream = pair.dial("")
    with pytest.raises(Refused, match="a request"):
        stream.ask(request_)
    stream.close()


def test_streams_share_the_chunks(pair):
    manifest = pair.publish(1)
    shares = [pushed_chunks(manifest, NextRequest(0, first, 4, 2**30)) for first in range(4)]
    assert sorted(index for share in shares for index in share) == list(range(CHUNKS))
    some = NextRequest(after=0, first=1, step=4, bytes=LEAST_CHUNK_BYTES + 1)
    assert pushed_chunks(manifest, some) == [1, 5]
