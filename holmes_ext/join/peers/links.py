"""Connections between ranks of joined jobs: made when they are needed, given up when they fail, made anew in
the next attempt.

Why not gloo: measured with torch 2.13, ProcessGroupGloo.abort() does not end an operation under way (its
whole timeout passes), that timeout counts from the operation's start instead of from the last byte, a group
needs a TCPStore that somebody holds, and any number of ports; and nothing tells who is at the other end.

    the job whose name sorts first calls, the other one is called (routes.py); one connection for both
    directions, more of them where there is much to carry, each in a thread of its own label: round, attempt,
    bytes that follow; then these bytes, in frames (sockets/channel.py)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from holmes_ext.join.peers.routes import Peer, Purpose, Routes
from holmes_ext.join.peers.transfer import PeerTransfer, Speed, run
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.words import why

#: Seconds between two looks at a peer that does not answer yet.
_RETRY_S = 0.2
#: Seconds that a rank which cannot be reached is called again and again.
_CALLING_S = 10.0
#: Bytes to and from a peer for each connection to it, and connections at most.
LANE_BYTES, MOST_LANES = 2**25, 4
#: Peers that are called at the same time.
_CALLS = 16
#: Connections to the ranks of one job.
_MOST_OPEN = 128
#: Bytes for, or from, each peer.
Exchange = Mapping[Peer, list[memoryview]]
#: Of one connection: job, incarnation, rank, which of several.
_Key = tuple[str, str, int, int]


class PeersFailed(Exception):
    """No exchange with these jobs."""

    def __init__(self, jobs: Iterable[str], why: str):
        super().__init__(why)
        self.jobs = frozenset(jobs)


class PeerLinks:
    """Of one rank. serve(channel, purpose): what is done with a connection that is not for exchanges."""

    def __init__(
        self,
        job: str,
        open_routes: Callable[[Callable[[Channel, Purpose], None]], Routes],
        serve: Callable[[Channel, Purpose], None],
    ):
        self.job, self._serve = job, serve
        self._open: dict[_Key, Channel] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._speed = Speed()
        self.sent = self.received = 0
        self.routes = open_routes(self._came)

    @property
    def address(self) -> str:
        return self.routes.address

    def close(self) -> None:
        self._closed = True
        self.routes.close()
        self.drop()

    def drop(self, jobs: Iterable[str] | None = None) -> None:
        """Close the connections to these jobs; None: to all."""
        with self._changed:
            for key in [key for key in self._open if jobs is None or key[0] in jobs]:
                _end(self._open.pop(key))

    def swap(
        self, number: int, attempt: int, outgoing: Exchange, incoming: Exchange, patience_s: float
    ) -> None:
        """Send and receive all at once, until everything is there. PeersFailed names, at the end, jobs that
        failed; their connections are closed. patience_s: of a silent peer. Both sides know how many bytes
        come."""
        begin = time.monotonic()
        sizes = {
            peer: _length(outgoing.get(peer, ())) + _length(incoming.get(peer, ()))
            for peer in {*outgoing, *incoming}
        }
        channels_of, failed = self._connect(sizes, patience_s / 2)
        lanes: dict[int, list[PeerTransfer]] = defaultdict(list)
        for peer, channels in channels_of.items():
            deadline = self._speed.deadline(peer, sizes[peer], patience_s)
            out, into = (
                split(every.get(peer, []), len(channels)) for every in (outgoing, incoming)
            )
            for lane, channel in enumerate(channels):
                lanes[lane].append(
                    PeerTransfer(peer, channel, (number, attempt), out[lane], into[lane], deadline)
                )
        failed |= _run_lanes(list(lanes.values()), patience_s)
        for transfers in lanes.values():
            self.sent += sum(transfer.sent for transfer in transfers)
            self.received += sum(transfer.received for transfer in transfers)
        for peer in channels_of:
            self._speed.took(peer, sizes[peer], time.monotonic() - begin)
        if failed:
            for job in failed:
                self._speed.failed(job)
            self.drop(set(failed))
            raise PeersFailed(failed, "; ".join(failed.values()))

    def _connect(
        self, sizes: Mapping[Peer, int], patience_s: float
    ) -> tuple[dict[Peer, list[Channel]], dict[str, str]]:
        """Connections to all peers that were reached, and why not to others. sizes: bytes to and from
        each."""
        deadline = Deadline(patience_s, "connecting")
        channels: dict[Peer, list[Channel]] = {}
        failed: dict[str, str] = {}

        def connect(peer: Peer) -> None:
            try:
                lanes = range(lanes_for(sizes[peer]))
                channels[peer] = [self._channel(peer, lane, deadline) for lane in lanes]
            except OSError as error:
                where = f" at {peer.address}" if peer.address else ""
                failed[peer.job] = f"{peer}{where} cannot be reached ({why(error)})"

        if sizes:
            with ThreadPoolExecutor(min(len(sizes), _CALLS), "holmes-call") as pool:
                list(pool.map(connect, sizes))
        return channels, failed

    def _channel(self, peer: Peer, lane: int, deadline: Deadline) -> Channel:
        """OSError when there is none in time."""
        key = (peer.job, peer.incarnation, peer.rank, lane)
        calling, reason = deadline.part(_CALLING_S, "calling"), ""
        while not self._closed:
            with self._changed:
                known = self._open.get(key)
                if known is not None and known.lives():
                    return known
                if self.job > peer.job:  # it calls
                    if deadline.passed:
                        raise TimeoutError(f"it did not call within {deadline.seconds:.3g} s")
                    self._changed.wait(min(_RETRY_S, deadline.left))
                    continue
            if calling.passed:
                raise ConnectionError(reason or "no answer")
            try:
                purpose = {"purpose": "exchange", "lane": lane}
                self._keep(key, self.routes.dial(peer, purpose, deadline))
            except OSError as error:
                if not reason or not isinstance(
                    error, TimeoutError
                ):  # no time was left for the last try
                    reason = why(error)
                time.sleep(min(_RETRY_S, calling.left))
        raise ConnectionError("the job ends")

    def _keep(self, key: _Key, channel: Channel) -> None:
        channel.socket.setblocking(False)
        with self._changed:
            if self._closed:
                _end(channel)
                return
            if key in self._open:
                _end(self._open.pop(key))
            of_job = [other for other in self._open if other[0] == key[0]]
            if len(of_job) >= _MOST_OPEN:  # no honest job has so many to one rank
                _end(self._open.pop(of_job[0]))
            self._open[key] = channel
            self._changed.notify_all()

    def _came(self, channel: Channel, purpose: Purpose) -> None:
        """A rank of another job has called."""
        if purpose.get("purpose") != "exchange":
            self._serve(channel, purpose)
            return
        match [purpose.get(key) for key in ("job", "incarnation", "rank", "lane")]:
            case [str(job), str(incarnation), int(rank), int(lane)] if 0 <= lane < MOST_LANES:
                self._keep((job, incarnation, rank, lane), channel)
            case _:
                raise ConnectionError("it does not say who it is")


def lanes_for(size: int) -> int:
    """Connections over which so many bytes go to and from a peer: both ends know the number."""
    return min(MOST_LANES, 1 + size // LANE_BYTES)


def split(buffers: Sequence[memoryview], parts: int) -> list[list[memoryview]]:
    """The bytes in parts of one length, in order."""
    each = -(-_length(buffers) // parts)
    made: list[list[memoryview]] = [[] for _ in range(parts)]
    at = 0
    for buffer in buffers:
        while buffer:
            part = min(at // each, parts - 1)
            some = buffer[: each * (part + 1) - at]
            made[part].append(some)
            at += len(some)
            buffer = buffer[len(some) :]
    return made


def _length(buffers: Iterable[memoryview]) -> int:
    return sum(map(len, buffers))


def _run_lanes(lanes: Sequence[list[PeerTransfer]], patience_s: float) -> dict[str, str]:
    """The jobs that failed, each with the reason."""
    if len(lanes) == 1:
        return run(lanes[0], patience_s)
    failed: dict[str, str] = {}
    if lanes:
        with ThreadPoolExecutor(len(lanes), "holmes-lane") as pool:
            for reasons in pool.map(lambda transfers: run(transfers, patience_s), lanes):
                failed |= reasons
    return failed


def _end(channel: Channel) -> None:
    channel.cut()
    with contextlib.suppress(OSError):
        channel.close()
