"""Connections to ranks that cannot be called: each keeps a standing line to the coordinator, over which it is
told who wants it. It calls back where it can; else the coordinator hands the bytes of one to the other.

    rank B    purpose "standby"             -> {"call": ID, "job": A, "incarnation", "address": of A or ""}
              {"answer": "reversed"}        it has called A: the line stands on
              {"answer": "relay"}           it cannot
    rank A    purpose "relay", to: B's      -> {"relay": "reversed"}, or "go" to both, or "alone"

After "go" TLS between each of them and the coordinator ends; what follows is their own handshake and their
own encryption: the coordinator sees sizes and times. Of each direction BUFFER_BYTES are held at most: who
sends waits for who receives.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import bare
from holmes_ext.runtime.deadline import Deadline

BUFFER_BYTES = 2**18
#: Pairs whose bytes are relayed at a time.
MOST_PAIRS = 256
#: Seconds that a caller waits for a rank's standing line, and for its answer.
WAIT_S, ANSWER_S = 10.0, 10.0
#: Seconds without a byte until a pair is closed.
_SILENCE_S = 3600.0
#: Seconds between two looks at whether a rank still stands by.
_LOOK_S = 5.0
#: Seconds to tell a rank something, and to end TLS with it.
_TELL_S = 10.0


@dataclass(eq=False)
class _Line:
    """A rank's standing line. over: nobody needs it any more."""

    channel: Channel
    job: str
    over: threading.Event = field(default_factory=threading.Event)


class PeerRelay:
    """limit_bytes: that are relayed in all, then no more; 0: none are relayed; None: no limit."""

    def __init__(
        self, limit_bytes: int | None = None, tell: Callable[[str], None] = lambda line: None
    ):
        self._limit, self._tell = limit_bytes, tell
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._bytes: Counter[str] = Counter()

    def counted(self) -> dict[str, int]:
        """Bytes that were relayed, by the job that sent them."""
        with self._changed:
            return dict(self._bytes)

    def close(self) -> None:
        with self._changed:
            lines, self._lines = list(self._lines.values()), {}
            for pair in self._pairs:
                for end in pair:
                    _shut(end, socket.SHUT_RDWR)
        for line in lines:
            line.over.set()

    def stand_by(
        self, channel: Channel, job: str, incarnation: str, purpose: Mapping[str, Any]
    ) -> None:
        """In the thread of a rank's standing line, as long as it stands."""
        line, key = _Line(channel, job), _key(job, incarnation, purpose.get("rank"))
        with self._changed:
            before, self._lines[key] = self._lines.get(key), line
            self._changed.notify_all()
        if before is not None:
            before.over.set()
        while not line.over.wait(_LOOK_S):
            with self._changed:
                if self._lines.get(key) is line and not channel.idle():
                    del self._lines[key]
                    return

    def call(self, channel: Channel, job: str, purpose: Mapping[str, Any]) -> None:
        """In the thread of a caller, until all is carried."""
        key = _key(*(purpose.get(name) for name in ("to_job", "to", "to_rank")))
        answer, line = "", None
        deadline = Deadline(WAIT_S, "a standing line")
        while not answer and (line := self._taken(key, deadline)) is not None:
            keys = "call", "job", "incarnation", "address"
            question = {name: str(purpose.get(name, ""))[:300] for name in keys}
            answer = _asked(line, question)
            if not answer:
                line.over.set()
        if line is None:
            channel.send({"relay": "alone"}, Deadline(_TELL_S, "an answer"))
        elif answer == "reversed":
            with self._changed:
                stands = self._lines.setdefault(key, line) is line
            if not stands:  # the rank has made a new one meanwhile
                line.over.set()
            channel.send({"relay": "reversed"}, Deadline(_TELL_S, "an answer"))
        else:
            try:
                self._carry(channel, job, line)
            finally:
                line.over.set()

    def _taken(self, key: str, deadline: Deadline) -> _Line | None:
        """A rank's standing line, for this caller alone."""
        with self._changed:
            while key not in self._lines:
                if deadline.passed:
                    return None
                self._changed.wait(deadline.left)
            return self._lines.pop(key)

    def _left(self) -> float:
        """Bytes that may still be relayed. Holds the lock."""
        return float("inf") if self._limit is None else self._limit - sum(self._bytes.values())

    def _carry(self, caller: Channel, job: str, line: _Line) -> None:
        with self._changed:
            if len(self._pairs) >= MOST_PAIRS or self._left() <= 0:
                full = {"error": "the relay takes no more pairs, or no more bytes"}
                caller.send(full, Deadline(_TELL_S, "an answer"))
                return
        a, b = _bare(caller), _bare(line.channel)
        with self._changed:
            self._pairs.add((a, b))
        try:
            self._run([_Direction(a, b, job), _Direction(b, a, line.job)])
        finally:
            with self._changed:
                self._pairs.discard((a, b))
            a.close()
            b.close()

    def _run(self, directions: list[_Direction]) -> None:
        for direction in directions:
            direction.source.setblocking(False)
        while not all(direction.ended for direction in directions):
            with selectors.DefaultSelector() as selector:
                wanted: Counter[socket.socket] = Counter()
                for direction in directions:
                    if direction.can_read:
                        wanted[direction.source] |= selectors.EVENT_READ
                    if direction.held:
                        wanted[direction.target] |= selectors.EVENT_WRITE
                for connection, events in wanted.items():
                    selector.register(connection, events)
                ready = {key.fileobj: events for key, events in selector.select(_SILENCE_S)}
            if not ready:
                return
            for direction in directions:
                if direction.can_read and ready.get(direction.source, 0) & selectors.EVENT_READ:
                    if not self._count(direction.job, direction.read()):
                        return
                if direction.held and ready.get(direction.target, 0) & selectors.EVENT_WRITE:
                    direction.write()

    def _count(self, job: str, count: int) -> bool:
        """False once the limit is reached."""
        with self._changed:
            self._bytes[job] += count
            left = self._left()
        if left <= 0:
            self._tell("the relay has carried all the bytes that it may")
        return left > 0


class _Direction:
    """From one end of a pair to the other."""

    def __init__(self, source: socket.socket, target: socket.socket, job: str):
        self.source, self.target, self.job = source, target, job
        self.held = bytearray()
        self._at_end = False

    @property
    def can_read(self) -> bool:
        return not self._at_end and len(self.held) < BUFFER_BYTES

    @property
    def ended(self) -> bool:
        return self._at_end and not self.held

    def read(self) -> int:
        """Bytes that came. OSError when the connection broke."""
        try:
            data = self.source.recv(BUFFER_BYTES - len(self.held))
        except BlockingIOError:
            return 0
        self.held += data
        if not data:
            self._at_end = True
            self._pass_end_on()
        return len(data)

    def write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self.held[: self.target.send(self.held)]
        self._pass_end_on()

    def _pass_end_on(self) -> None:
        if self.ended:
            _shut(self.target, socket.SHUT_WR)


def _key(*names: object) -> str:
    return " ".join(str(name)[:64] for name in names)


def _asked(line: _Line, question: Mapping[str, str]) -> str:
    """ "reversed" or "relay"; "" where the line is dead."""
    try:
        line.channel.send(dict(question), Deadline(_TELL_S, "a call"))
        return str(line.channel.receive(Deadline(ANSWER_S, "an answer to a call")).get("answer"))
    except OSError:
        return ""


def _bare(channel: Channel) -> socket.socket:
    """The connection itself, once the rank knows that it goes and TLS with it has ended."""
    deadline = Deadline(_TELL_S, "the relay's word")
    channel.send({"relay": "go"}, deadline)
    return bare(channel.socket, deadline)


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(how)
