"""Relay for ranks that cannot be called from outside (NAT, firewall): calls go through the coordinator.

Each such rank B keeps an idle connection to the coordinator, its standby line. When rank A of another job
wants to reach B:

1. A calls the coordinator with purpose "relay", naming B's job, its incarnation (start), and B's rank.
2. The coordinator takes B's line out of its table, so that no other caller uses it, and sends on it
   {"call": ID, "job": A's job, "incarnation": ..., "address": A's address, or "" if A cannot be called}.
3. B tries to call A's address and answers on its line
       {"answer": "reversed"}   B has called A. The line returns to the table, A gets {"relay": "reversed"}.
       {"answer": "relay"}      B cannot call A. Both get {"relay": "go"}, and exchange their bytes through
                                the coordinator.
4. If B has no line within WAIT_S seconds, A gets {"relay": "alone"}.

A rank C that the coordinator can call has no line. If only A cannot reach C, because the network between the
two is cut, the coordinator calls C's port itself, A gets {"relay": "go"}, and C sees a caller like any other.

After "go", TLS between each rank and the coordinator ends. The bytes that follow are the handshake and the
encryption of A and B themselves, so the coordinator sees only sizes and times. It buffers at most
BUFFER_BYTES of each direction, then a fast sender waits for a slow receiver.

Invariant: a line is in the table or belongs to exactly one caller. No thread waits for ever: every wait and
every message has a deadline, and a pair that moves no bytes for an hour is closed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holmes_ext.join.address import is_loopback_address
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import connect, end_tls
from holmes_ext.join.sockets.reachable import is_reachable
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import is_loopback, shares_host

BUFFER_BYTES = 2**18
#: Pairs of ranks that exchange bytes through the coordinator at a time.
MOST_PAIRS = 256
#: Seconds that a caller waits for the standby line of a rank.
WAIT_S = 10.0
#: Seconds for a connection to a rank that the coordinator can call.
_CALL_S = 5.0
#: Addresses of ranks of a job that are remembered, at most.
_MOST_ADDRESSES = 2**12
#: Seconds that a rank may take to answer a call.
ANSWER_S = 10.0
#: Seconds without a byte after which a pair is closed.
_SILENCE_S = 3600.0
#: Seconds between two checks that a standby line is still open.
_LOOK_S = 5.0
#: Seconds to send a message to a rank, or to end TLS with it.
_TELL_S = 10.0
#: Bytes of the longest answer of a called rank.
_LONGEST_ANSWER = 2**10
#: Characters of a value that is passed on to the called rank.
_LONGEST_VALUE = 300


@dataclass(eq=False)
class _Line:
    """Idle connection that a rank behind NAT keeps open to the coordinator (standby line).

    Other jobs cannot connect to this rank. When a rank of another job wants to, the coordinator
    announces its call on this connection.
    """

    channel: Channel
    job: str  # of the rank
    #: Set when the line is not needed any more; its thread (stand_by) then closes the connection.
    over: threading.Event = field(default_factory=threading.Event)


class PeerRelay:
    """Coordinator's part in connections to ranks that accept no connections from outside (NAT).

    Such a rank keeps an idle connection to the coordinator (standby line). When another rank wants
    to connect, the coordinator announces the call on that line. Then the rank connects to the caller
    instead (a reversed call), or the coordinator forwards bytes between the two.

    Args:
        limit_bytes: Total bytes to forward; None: no limit; 0: forward none (reversed calls still
            work).
        tell: Called with each line for the log.
    """

    def __init__(
        self, limit_bytes: int | None = None, tell: Callable[[str], None] = lambda line: None
    ):
        self._limit_bytes = limit_bytes
        self._tell = tell
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}  # key of a rank (_key) -> its line
        # Job -> key of each rank that the coordinator has reached -> host and port.
        self._addresses: defaultdict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._bytes: Counter[str] = Counter()  # sending job -> bytes forwarded

    def counted(self) -> dict[str, int]:
        """Return the number of bytes forwarded for each sending job."""
        with self._changed:
            return dict(self._bytes)

    def reaches(self, host: str, job: str, incarnation: str, purpose: Mapping[str, Any]) -> bool:
        """Return whether the coordinator can call a rank; then calls of other ranks may use this way, too.

        Args:
            host: Host from which the rank has asked. Its address counts, and no other one: otherwise a job
                could let the coordinator connect to any host. A loopback address does not serve for calls:
                it may be the end of a tunnel, and the port may be that of another process of this host.
            job: Job of the rank.
            incarnation: Identifies the start of the job.
            purpose: Sent by the rank: its number `rank`, and its port `port`.
        """
        port = purpose.get("port")
        if not isinstance(port, int) or not is_reachable(host, port):
            return False
        if not is_loopback(host):
            with self._changed:
                addresses = self._addresses[job]
                addresses[_key(job, incarnation, purpose.get("rank"))] = host, port
                if len(addresses) > _MOST_ADDRESSES:
                    del addresses[next(iter(addresses))]  # the oldest one
        return True

    def close(self) -> None:
        """Close all connections: pairs between which bytes are forwarded, and standby lines."""
        with self._changed:
            lines = list(self._lines.values())
            self._lines = {}
            for pair in self._pairs:
                for end in pair:
                    _shut(end, socket.SHUT_RDWR)
        for line in lines:
            line.over.set()

    def stand_by(
        self, channel: Channel, job: str, incarnation: str, purpose: Mapping[str, Any]
    ) -> None:
        """Keep the connection as the standby line of a rank; return when the line is not needed any more.

        A standby line is an idle connection of a rank that cannot be called from outside; calls for the rank
        are announced on it. Runs in the thread of the connection. A rank's new line replaces its old line.

        Args:
            channel: The connection.
            job: Job of the rank.
            incarnation: Identifies the start of the job.
            purpose: Sent by the rank when it connected; its key `rank` is the rank's number.
        """
        line = _Line(channel, job)
        key = _key(job, incarnation, purpose.get("rank"))
        with self._changed:
            previous_line = self._lines.get(key)
            self._lines[key] = line
            self._changed.notify_all()
        if previous_line is not None:
            previous_line.over.set()
        # `over` is set by close(), by a newer line of the rank, or by the call() that has used this line.
        while not line.over.wait(_LOOK_S):
            with self._changed:
                # A line that is not in the table belongs to a call(); that sets `over` at its end.
                is_in_table = self._lines.get(key) is line
                # idle(): open, and without received bytes. A rank sends nothing on a line without a call.
                if is_in_table and not channel.idle():
                    del self._lines[key]
                    return

    def call(self, channel: Channel, job: str, purpose: Mapping[str, Any]) -> None:
        """Connect a caller with a rank that it cannot reach; return when the call is over.

        A rank that accepts no connections should keep an idle connection to the coordinator, its standby
        line; the call is announced there. The coordinator calls any other rank itself. The caller gets one
        of these replies:

            alone      there is no connection: the rank has no standby line, and cannot be called
            reversed   the rank itself has connected to the caller, so nothing is forwarded
            go         the coordinator forwards bytes between the two (sent by `_forward`)

        Runs in the thread of the caller's connection.

        Args:
            channel: The caller's connection.
            job: The caller's job.
            purpose: Sent by the caller. Its keys about the called rank: job `to_job`, incarnation `to`
                (start of that job), number `to_rank`. About the caller: `job`, `incarnation`,
                `address`, and the id `call` of this call.
        """
        key = _key(purpose.get("to_job"), purpose.get("to"), purpose.get("to_rank"))
        announcement = {  # message to the called rank, about the caller
            name: str(purpose.get(name, ""))[:_LONGEST_VALUE]
            for name in ("call", "job", "incarnation", "address")
        }
        called_job = str(purpose.get("to_job"))
        called_end = self._connect_to_rank(called_job, key)
        if called_end is not None:
            with called_end:
                self._forward(channel, job, called_job, lambda: called_end)
            return
        is_elsewhere = not shares_host(channel.socket)
        deadline = Deadline(WAIT_S, "a standing line")
        # _take_line() waits for the rank's standby line; None: there is none by the deadline.
        while (line := self._take_line(key, deadline)) is not None:
            if is_elsewhere or not shares_host(line.channel.socket):
                announcement = _without_loopback(announcement)
            # The rank's answer: "reversed" or "relay"; "": the line is dead.
            answer = _call_on(line, announcement)
            if answer:
                break
            line.over.set()  # the line was dead; the rank may open another before the deadline
        if line is None:
            channel.send({"relay": "alone"}, Deadline(_TELL_S, "an answer"))
        elif answer == "reversed":
            with self._changed:  # the line is free again, for the next caller
                is_latest = self._lines.setdefault(key, line) is line  # puts the line back
            if not is_latest:  # the rank has opened another line in the meantime
                line.over.set()
            channel.send({"relay": "reversed"}, Deadline(_TELL_S, "an answer"))
        else:  # "relay"
            try:
                self._forward(channel, job, line.job, partial(_start_forwarding, line.channel))
            finally:
                line.over.set()

    def _connect_to_rank(self, job: str, key: str) -> socket.socket | None:
        """Connect to a rank that has no standby line, if the coordinator could reach it before.

        Returns:
            The connection. None if the rank has a standby line, if its address is unknown, or if it cannot
            be reached.
        """
        with self._changed:
            address = self._addresses.get(job, {}).get(key)
            if address is None or key in self._lines:
                return None
        try:
            return connect(*address, Deadline(_CALL_S, "calling a rank"))
        except OSError:
            return None

    def _take_line(self, key: str, deadline: Deadline) -> _Line | None:
        """Wait for a rank's standby line, and take it, so that no other caller uses it.

        A standby line is an idle connection of a rank that accepts no connections from outside.

        Args:
            key: Identifies the rank, as _key() builds it from job, incarnation and rank.
            deadline: End of the wait.

        Returns:
            The line; None if the rank has not opened a line before the deadline.
        """
        with self._changed:
            while key not in self._lines:
                if deadline.passed:
                    return None
                self._changed.wait(deadline.left)
            return self._lines.pop(key)

    def _bytes_left(self) -> float:
        """Return how many bytes the relay may still forward between jobs (inf: no limit is set).

        The caller must hold the lock `_changed`.
        """
        if self._limit_bytes is None:
            return float("inf")
        return self._limit_bytes - sum(self._bytes.values())

    def _forward(
        self, caller: Channel, job: str, called_job: str, begin: Callable[[], socket.socket]
    ) -> None:
        """Forward bytes between a caller and the rank that it calls, until both have ended.

        The two ranks encrypt the bytes end to end, with a TLS handshake of their own. The caller gets an
        error instead if MOST_PAIRS pairs are open, or the limit of bytes is reached.

        Args:
            caller: The caller's connection.
            job: The caller's job.
            called_job: Job of the called rank.
            begin: Returns the connection to the called rank. If that is its standby line, the rank is first
                told that the bytes of the caller follow.
        """
        with self._changed:
            if len(self._pairs) >= MOST_PAIRS or self._bytes_left() <= 0:
                refusal = {"error": "the relay takes no more pairs, or no more bytes"}
                caller.send(refusal, Deadline(_TELL_S, "an answer"))
                return
        # The caller gets "go", and its TLS with the coordinator ends. The two ranks encrypt all further bytes
        # themselves.
        calling_end = _start_forwarding(caller)
        called_end = begin()
        pair = (calling_end, called_end)
        with self._changed:
            self._pairs.add(pair)
        try:
            self._pump(
                [
                    _Direction(calling_end, called_end, job),
                    _Direction(called_end, calling_end, called_job),
                ]
            )
        finally:
            with self._changed:
                self._pairs.discard(pair)
            calling_end.close()
            called_end.close()

    def _pump(self, directions: list[_Direction]) -> None:
        """Forward bytes between two connections until both directions have ended.

        The call also returns when the relay's limit on forwarded bytes is reached, or no byte has
        moved for an hour.

        Args:
            directions: The two directions of the pair of connections.
        """
        for direction in directions:
            direction.source.setblocking(False)
        while not all(direction.ended for direction in directions):
            ready = _wait_until_ready(directions)  # socket -> selector events
            if not ready:  # no byte could be moved for _SILENCE_S
                return
            for direction in directions:
                is_readable = ready.get(direction.source, 0) & selectors.EVENT_READ
                if direction.can_read and is_readable:
                    may_continue = self._count(direction.job, direction.read())
                    if not may_continue:  # the limit of bytes is reached
                        return
                is_writable = ready.get(direction.target, 0) & selectors.EVENT_WRITE
                if direction.held and is_writable:
                    direction.write()

    def _count(self, job: str, count: int) -> bool:
        """Add forwarded bytes to the total of a job; return whether more may be forwarded."""
        with self._changed:
            self._bytes[job] += count
            left = self._bytes_left()
        if left <= 0:
            self._tell("the relay has carried all the bytes that it may")
        return left > 0


class _Direction:
    """Direction of a relayed connection: bytes are read from a source socket and written to a target."""

    def __init__(self, source: socket.socket, target: socket.socket, job: str):
        self.source = source
        self.target = target
        self.job = job  # of the source
        self.held = bytearray()  # read from the source, not written to the target yet
        self._source_ended = False

    @property
    def can_read(self) -> bool:
        return not self._source_ended and len(self.held) < BUFFER_BYTES

    @property
    def ended(self) -> bool:
        return self._source_ended and not self.held

    def read(self) -> int:
        """Read available bytes into the buffer and return their number; OSError if the source broke."""
        try:
            data = self.source.recv(BUFFER_BYTES - len(self.held))
        except BlockingIOError:
            return 0
        self.held += data
        if not data:
            self._source_ended = True
            self._pass_end_on()
        return len(data)

    def write(self) -> None:
        """Write buffered bytes as far as the target takes them without blocking."""
        with contextlib.suppress(BlockingIOError):
            del self.held[: self.target.send(self.held)]
        self._pass_end_on()

    def _pass_end_on(self) -> None:
        if self.ended:
            _shut(self.target, socket.SHUT_WR)


def _wait_until_ready(directions: list[_Direction]) -> dict[Any, int]:
    """Wait until a socket can be read or written, for an hour at most.

    Args:
        directions: Directions of relayed connections. A direction reads from its source while its
            buffer has room, and writes to its target while the buffer has bytes.

    Returns:
        Socket -> selector events (EVENT_READ, EVENT_WRITE); empty if nothing was ready within the
        hour.
    """
    wanted: Counter[socket.socket] = Counter()  # socket -> bit mask of events
    for direction in directions:
        if direction.can_read:
            wanted[direction.source] |= selectors.EVENT_READ
        if direction.held:
            wanted[direction.target] |= selectors.EVENT_WRITE
    with selectors.DefaultSelector() as selector:
        for connection, events in wanted.items():
            selector.register(connection, events)
        return {key.fileobj: events for key, events in selector.select(_SILENCE_S)}


def _key(job: object, incarnation: object, rank: object) -> str:
    return " ".join(str(part)[:64] for part in (job, incarnation, rank))


def _without_loopback(announcement: dict[str, str]) -> dict[str, str]:
    """Return the message about a caller for the rank that it calls, without a loopback address.

    The rank would try to connect to the caller's address. A loopback address (127.0.0.1:7000) would lead it
    to a process on its own host. Called if the two are on different hosts.
    """
    if is_loopback_address(announcement["address"]):
        return {**announcement, "address": ""}
    return announcement


def _call_on(line: _Line, announcement: Mapping[str, str]) -> str:
    """Announce a call on a standby line, an idle connection of a rank that cannot be called.

    Args:
        line: Standby line of the called rank.
        announcement: Message about the caller: its job, incarnation and address, and the id of the call.

    Returns:
        The rank's answer: "reversed" (it has called the caller instead) or "relay" (the coordinator
        must forward the bytes); "" if the connection is dead.
    """
    try:
        line.channel.send(dict(announcement), Deadline(_TELL_S, "a call"))
        deadline = Deadline(ANSWER_S, "an answer to a call")
        return str(line.channel.receive(deadline, _LONGEST_ANSWER).get("answer"))
    except OSError:
        return ""


def _start_forwarding(channel: Channel) -> socket.socket:
    """Send "go" on a connection, end its TLS, and return the bare socket."""
    deadline = Deadline(_TELL_S, "the relay's word")
    channel.send({"relay": "go"}, deadline)
    return end_tls(channel.socket, deadline)


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)
