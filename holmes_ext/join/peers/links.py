"""Connections of a rank to ranks of other joined jobs: opened when needed, closed when they fail.

1. Of two jobs, the job whose name sorts first calls, the other job accepts (routes.py). So two ranks never
   open two connections to each other at the same time.
2. A pair of ranks uses one connection for both directions, or several (lanes) if it exchanges many bytes.
   Both ends compute the number of lanes from the number of bytes. Each lane has a thread during an exchange.
3. In an exchange, all connections send and receive at the same time (transfer.py).
4. A connection that fails is closed, and the next exchange opens a new connection.

No exchange waits for ever: opening connections takes at most half of the patience, and each transfer has a
deadline.

Why not gloo (measured with torch 2.13): ProcessGroupGloo.abort() does not end a running operation before its
whole timeout; that timeout counts from the operation's start instead of from the last byte; a group needs a
TCPStore on some host, and any number of ports; and it does not authenticate its peers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from holmes_ext.join.peers.routes import Peer, Purpose, Routes
from holmes_ext.join.peers.transfer import PeerTransfer, Speed, run
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.words import why

#: Seconds between two attempts to call a peer (rank of another job), or two checks that it has called.
_RETRY_S = 0.2
#: Seconds for which a rank that cannot be reached is called again and again.
_CALLING_S = 10.0
#: Seconds for which a rank waits for the direct call of a peer: both ends begin at about the same time.
_CALLED_S = 15.0
#: Bytes to and from a peer for each lane.
LANE_BYTES = 2**25
#: Lanes to a peer, at most.
MOST_LANES = 4
#: Peers that are called at the same time.
_CALLS = 16
#: Connections to the ranks of a job, at most.
_MOST_OPEN = 128
#: Peer -> buffers to send to it, or to fill with its bytes.
Exchange = Mapping[Peer, list[memoryview]]


class LaneKey(NamedTuple):
    """Key of a TCP connection to a rank of another job.

    Large exchanges use several connections (lanes) to a rank in parallel; `lane` counts them from
    0. `is_relayed`: the coordinator has ordered the two jobs to use its relay. Both ends get the order, and
    use no connection that was opened before it.
    """

    job: str
    incarnation: str
    rank: int
    lane: int
    is_relayed: bool = False


class Connections(NamedTuple):
    """Result of opening connections to peers (ranks of other jobs): the connections, and the failures."""

    channels: dict[Peer, list[Channel]]  # reached peer -> a channel for each lane
    failed: dict[str, str]  # job with an unreachable rank -> reason


class PeersFailed(Exception):
    """Error: the exchange with some jobs failed; the attribute `jobs` has their names."""

    def __init__(self, jobs: Iterable[str], why: str):
        super().__init__(why)
        self.jobs = frozenset(jobs)


class PeerLinks:
    """Connections of this rank to ranks of other jobs, which stay open from round to round."""

    def __init__(
        self,
        job: str,
        open_routes: Callable[[Callable[[Channel, Purpose], None]], Routes],
        serve: Callable[[Channel, Purpose], None],
    ):
        """Begin to accept connections from ranks of other jobs; connect to them when needed.

        Each accepted connection goes to _accept(). It keeps a connection for exchanges of
        pseudo-gradients, and passes any other connection to `serve`.

        Args:
            job: Name of this job.
            open_routes: Called once, with _accept(). Opens this rank's port, starts to accept
                connections, and returns the object that opens connections to other ranks (Routes).
            serve: Handles an accepted connection that is not for an exchange: a rank of another job
                reads this rank's weights. Called with the connection and the caller's document of
                the handshake.
        """
        self.job = job
        self._serve = serve
        self._open: dict[LaneKey, Channel] = {}
        self._changed = threading.Condition()  # lock of `_open`, notified of each new connection
        self._closed = False
        self._speed = Speed()  # best transfer rate to each job, for deadlines of later transfers
        self.sent = 0  # bytes, in all
        self.received = 0  # bytes, in all
        self.routes = open_routes(self._accept)  # last: connections may arrive at once

    @property
    def address(self) -> str:
        """Return the HOST:PORT to which ranks of other jobs can connect; "" if there is none."""
        return self.routes.address

    def close(self) -> None:
        """Stop accepting connections, and close all."""
        self._closed = True
        self.routes.close()
        self.drop()

    def drop(self, jobs: Iterable[str] | None = None) -> None:
        """Close the connections to the given jobs; None: to all jobs."""
        with self._changed:
            for key in list(self._open):
                if jobs is None or key.job in jobs:
                    _cut_and_close(self._open.pop(key))

    def use_relay(self, pairs: Iterable[Sequence[str]]) -> None:
        """Exchange with some jobs over the coordinator's relay from now on, and with all others directly.

        Direct connections to these jobs, and relayed connections to all others, are closed.

        Args:
            pairs: Pairs of jobs that the coordinator has ordered to use the relay. Only pairs with this job
                matter.
        """
        partners = {name for pair in pairs if self.job in pair for name in pair} - {self.job}
        self.routes.use_relay(partners)
        with self._changed:
            for key in list(self._open):
                if key.is_relayed != (key.job in partners):
                    _cut_and_close(self._open.pop(key))

    def _close_ended(self) -> None:
        """Close the connections that the other end has closed, because its job ended or restarted.

        An exchange closes only broken connections that it wants to use. It never wants those of a job
        that has ended, and a restarted job gets new keys (another incarnation). Without this method,
        their sockets would stay open as long as this job runs.
        """
        with self._changed:
            for key, channel in list(self._open.items()):
                if not channel.lives():
                    _cut_and_close(self._open.pop(key))

    def swap(
        self, number: int, attempt: int, outgoing: Exchange, incoming: Exchange, patience_s: float
    ) -> None:
        """Send bytes to peers (ranks of other jobs) and receive bytes from them, all at the same time.

        Both ends of a connection must know how many bytes go in each direction. Many bytes are divided among
        several connections to the peer (lanes).

        Args:
            number: Number of the round; both ends check that it is equal.
            attempt: Number of the exchange within the round; both ends check it, too.
            outgoing: Bytes to send to each peer.
            incoming: Buffers for the bytes of each peer.
            patience_s: Seconds without a byte after which the exchange with a peer has failed. At most
                half of this time is spent on opening connections.

        Raises:
            PeersFailed: Some jobs failed, after the exchange with the others was completed. The
                connections to them are closed.
        """
        begin = time.monotonic()
        self._close_ended()
        sizes = {
            peer: _total_bytes(outgoing.get(peer, ())) + _total_bytes(incoming.get(peer, ()))
            for peer in {*outgoing, *incoming}
        }
        # failed: job -> reason. A peer whose connections are open waits `patience_s` for a first byte from
        # this rank, also while this rank still connects to other peers. So connecting takes only half of it.
        channels_of, failed = self._connect(sizes, patience_s / 2)
        # For all bytes of a peer; computed from the best rate that the peer's job has reached.
        deadlines = {
            peer: self._speed.deadline(peer, sizes[peer], patience_s) for peer in channels_of
        }
        lanes = _transfers_of_lanes(channels_of, outgoing, incoming, (number, attempt), deadlines)
        # A transfer fails after its deadline, or after `patience_s` seconds without a byte.
        failed |= _run_lanes(lanes, patience_s)
        for transfers in lanes:
            self.sent += sum(transfer.sent for transfer in transfers)
            self.received += sum(transfer.received for transfer in transfers)
        for peer in channels_of:
            self._speed.record_duration(peer, sizes[peer], time.monotonic() - begin)
        if failed:
            for job in failed:
                self._speed.failed(job)
            self.drop(set(failed))
            raise PeersFailed(failed, "; ".join(failed.values()))

    def _connect(self, sizes: Mapping[Peer, int], patience_s: float) -> Connections:
        """Return connections to all peers: those that are open, and new ones, opened in parallel.

        The more bytes, the more connections (lanes) a peer gets. If peers cannot be reached in time,
        nothing is raised: the result names their jobs, with the reason.

        Args:
            sizes: Peer -> bytes to and from it.
            patience_s: Seconds for all connections.

        Returns:
            `channels`: peer -> its connections, by lane. `failed`: job -> reason.
        """
        deadline = Deadline(patience_s, "connecting")
        result = Connections(channels={}, failed={})

        def connect(peer: Peer) -> None:
            try:
                lanes = range(lanes_for(sizes[peer]))
                result.channels[peer] = [self._channel(peer, lane, deadline) for lane in lanes]
            except OSError as error:
                where = f" at {peer.address}" if peer.address else ""
                result.failed[peer.job] = f"{peer}{where} cannot be reached ({why(error)})"

        if sizes:
            with ThreadPoolExecutor(min(len(sizes), _CALLS), "holmes-call") as pool:
                list(pool.map(connect, sizes))
        return result

    def _channel(self, peer: Peer, lane: int, deadline: Deadline) -> Channel:
        """Return a connection to a peer; if needed, open it or wait until the peer opens it.

        Of two jobs, the job whose name sorts first opens the connections. So two ranks never open
        two connections for the same purpose.

        Args:
            peer: The rank of another job.
            lane: Number of the connection to this peer, from 0.
            deadline: The connection must be open by then.

        Raises:
            OSError: There is no connection before the deadline.
        """
        is_relayed = self.routes.uses_relay(peer.job)
        key = LaneKey(peer.job, peer.incarnation, peer.rank, lane, is_relayed)
        peer_calls = self.job > peer.job
        calling = deadline.part(_CALLING_S, "calling")
        waiting = deadline
        if self.routes.address and not is_relayed:  # a direct call; it does not take long
            waiting = deadline.part(_CALLED_S, "waiting for a call")
        reason = ""  # why the last call failed
        while not self._closed:
            with self._changed:
                channel = self._open.get(key)
                if channel is not None and channel.lives():
                    return channel
                if peer_calls:
                    if waiting.passed:
                        raise TimeoutError(f"it did not call within {waiting.seconds:.3g} s")
                    self._changed.wait(min(_RETRY_S, waiting.left))
                    continue
            if calling.passed:
                raise ConnectionError(reason or "no answer")
            try:  # to call the peer; the next iteration returns the new connection
                purpose = {"purpose": "exchange", "lane": lane, "relayed": is_relayed}
                self._keep(key, self.routes.dial(peer, purpose, deadline))
            except OSError as error:
                # The last attempt may have had too little time: its timeout says nothing.
                if not reason or not isinstance(error, TimeoutError):
                    reason = why(error)
                time.sleep(min(_RETRY_S, calling.left))
        raise ConnectionError("the job ends")

    def _keep(self, key: LaneKey, channel: Channel) -> None:
        """Store an open connection to a peer, and close the older connection with the same key, if any.

        A job with too many open connections loses its oldest connection.

        Args:
            key: Rank of the peer, and number of the connection (lane) to it.
            channel: The connection.
        """
        channel.socket.setblocking(False)
        with self._changed:
            if self._closed:
                _cut_and_close(channel)
                return
            if key in self._open:
                _cut_and_close(self._open.pop(key))
            keys_of_job = [other for other in self._open if other.job == key.job]
            if len(keys_of_job) >= _MOST_OPEN:  # no honest job opens so many to a rank
                _cut_and_close(self._open.pop(keys_of_job[0]))
            self._open[key] = channel
            self._changed.notify_all()

    def _accept(self, channel: Channel, purpose: Purpose) -> None:
        """Handle a connection that a rank of another job has opened.

        A connection for exchanges is stored; others are passed to `serve`.

        Args:
            channel: The authenticated connection.
            purpose: Document of the caller's handshake: the use of the connection, and the caller's
                job, incarnation and rank.

        Raises:
            ConnectionError: The purpose is incomplete.
        """
        if purpose.get("purpose") != "exchange":
            self._serve(channel, purpose)
            return
        match [purpose.get(key) for key in ("job", "incarnation", "rank", "lane")]:
            case [str(job), str(incarnation), int(rank), int(lane)] if 0 <= lane < MOST_LANES:
                is_relayed = purpose.get("relayed") is True
                self._keep(LaneKey(job, incarnation, rank, lane, is_relayed), channel)
            case _:
                raise ConnectionError("it does not say who it is")


def lanes_for(size: int) -> int:
    """Return over how many parallel connections (lanes) `size` bytes are exchanged with a peer."""
    return min(MOST_LANES, 1 + size // LANE_BYTES)


def split(buffers: Sequence[memoryview], parts: int) -> list[list[memoryview]]:
    """Split the bytes of the buffers, in order, into parts of equal length (the last may be shorter).

    Returns:
        For each part, the views of the buffers that make it up.
    """
    part_bytes = -(-_total_bytes(buffers) // parts)  # rounded up
    views: list[list[memoryview]] = [[] for _ in range(parts)]
    position = 0  # bytes that were assigned to parts
    for buffer in buffers:
        while buffer:
            part = min(position // part_bytes, parts - 1)
            part_end = part_bytes * (part + 1)
            view = buffer[: part_end - position]
            views[part].append(view)
            position += len(view)
            buffer = buffer[len(view) :]
    return views


def _total_bytes(buffers: Iterable[memoryview]) -> int:
    return sum(map(len, buffers))


def _transfers_of_lanes(
    channels_of: Mapping[Peer, Sequence[Channel]],
    outgoing: Exchange,
    incoming: Exchange,
    label: tuple[int, int],
    deadlines: Mapping[Peer, Deadline],
) -> list[list[PeerTransfer]]:
    """Divide the bytes to and from each peer among its connections (lanes); nothing is sent yet.

    Args:
        channels_of: Peer -> its connections, by lane.
        outgoing: Bytes to send to each peer.
        incoming: Buffers for the bytes of each peer.
        label: Number of the round, and of the attempt within the round.
        deadlines: Peer -> time by which all its bytes must have been moved.

    Returns:
        For each lane, its transfers: at most one for each peer.
    """
    transfers_of_lane: dict[int, list[PeerTransfer]] = defaultdict(list)
    for peer, channels in channels_of.items():
        out = split(outgoing.get(peer, []), len(channels))
        into = split(incoming.get(peer, []), len(channels))
        for lane, channel in enumerate(channels):
            transfer = PeerTransfer(
                peer,
                channel,
                label,
                out=out[lane],
                into=into[lane],
                deadline=deadlines[peer],
            )
            transfers_of_lane[lane].append(transfer)
    return list(transfers_of_lane.values())


def _run_lanes(lanes: Sequence[list[PeerTransfer]], patience_s: float) -> dict[str, str]:
    """Send and receive over parallel connections (lanes) to each peer, with a thread for each lane.

    A peer has one or more connections, as its number of bytes demands. Lane n consists of the n-th
    connections of all peers. So a peer with two connections has transfers in lanes 0 and 1 only.

    Args:
        lanes: For each lane, its transfers: at most one for each peer.
        patience_s: Seconds of silence after which the transfer with a peer has failed.

    Returns:
        Job whose transfer failed -> reason; empty: all bytes have arrived.
    """
    if len(lanes) == 1:
        return run(lanes[0], patience_s)
    failed: dict[str, str] = {}
    if lanes:
        with ThreadPoolExecutor(len(lanes), "holmes-lane") as pool:
            for reasons in pool.map(lambda transfers: run(transfers, patience_s), lanes):
                failed |= reasons
    return failed


def _cut_and_close(channel: Channel) -> None:
    channel.cut()  # wakes a thread that reads or writes
    with contextlib.suppress(OSError):
        channel.close()
