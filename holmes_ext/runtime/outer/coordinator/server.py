"""`holmes join serve`: the coordinator as a process. Needs no torch; a thread for each connection, two connections
for each job.

    heartbeat line    every HEARTBEAT_S seconds: what `holmes join status` shows. When it closes, the job is gone
    job line      {"op": "hello" | "enter" | "ready" | "done" | "maps", ...} -> an answer, or {"verdict": "wait"}
    after POLL_S: ask again
    status line   -> one document

All decisions are rules.Coordinator's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.rules import Coordinator, NotHere
from holmes_ext.runtime.outer.coordinator.wire import HANDSHAKE_S, WRONG_TOKEN, Line, answer

#: Why a job is gone that said nothing.
CLOSED = "its connection was closed"
#: Seconds after which a question without an answer yet is told to be asked again.
POLL_S = 1.0
#: Lines of the log that `holmes join status` can show.
_EVENTS = 100
#: Connections at a time that have not shown the token yet.
_STRANGERS = 64
#: Seconds without a word on a line until it is closed: jobs ask, or heartbeat, far more often.
_SILENCE_S = 3600.0


class Server:
    """Listens from construction on; serve() runs until close(). HolmesError when the address cannot be had."""

    def __init__(self, host: str, port: int, token: str, tell: Callable[[str], None]):
        self._token, self._tell = token, tell
        self._listener = _listen(host, port)
        self.port = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._coordinator = Coordinator(time.monotonic())
        self._heartbeats: dict[tuple[str, str], Line] = {}
        self._strangers = threading.Semaphore(_STRANGERS)
        self._told = 0
        self._open = True
        self._lines: set[Line] = set()

    def serve(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()
        while self._open:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._welcome, args=(connection, host), daemon=True).start()
            else:
                connection.close()

    def close(self) -> None:
        self._open = False
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in list(self._lines):
            line.cut()

    def _welcome(self, connection: socket.socket, host: str) -> None:
        line = Line(connection)
        self._lines.add(line)
        if not self._open:  # accepted while close() went through the lines
            line.cut()
        try:
            try:
                connection.settimeout(HANDSHAKE_S)
                purpose = answer(line, self._token)
            finally:
                self._strangers.release()
            if purpose is None:
                self._tell(f"a caller from {host} was turned away: {WRONG_TOKEN.partition(';')[0]}")
            elif purpose.get("purpose") == "heartbeat":
                self._heartbeat(line, str(purpose.get("job")), str(purpose.get("incarnation")))
            elif purpose.get("purpose") == "status":
                line.send(self.status())
            elif purpose.get("purpose") == "job":
                self._questions(line)
        except OSError:
            pass
        finally:
            self._lines.discard(line)
            line.close()

    def _heartbeat(self, line: Line, job: str, incarnation: str) -> None:
        self._heartbeats[job, incarnation] = line
        why = CLOSED
        try:
            while True:
                told = line.receive(_SILENCE_S)
                with self._changed:
                    self._coordinator.heartbeat(job, incarnation, told, time.monotonic())
                if told.get("ends"):
                    why = str(told["ends"])
                    return
        finally:
            with self._changed:
                if self._heartbeats.get((job, incarnation)) is line:
                    del self._heartbeats[job, incarnation]
                    self._coordinator.gone(job, incarnation, why, time.monotonic())
                    self._after()

    def _questions(self, line: Line) -> None:
        who = ("", "")
        try:
            while True:
                question = line.receive(_SILENCE_S)
                if question.get("op") == "hello":
                    who = str(question.get("job")), str(question.get("incarnation"))
                line.send(self._answer_to(question))
        finally:
            with self._changed:
                if who not in self._heartbeats:  # it died before its first heartbeat, which would tell
                    self._coordinator.gone(*who, CLOSED, time.monotonic())
                    self._after()

    def _answer_to(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._ask(question)
        except HolmesError as error:
            return {"error": str(error)}
        except NotHere:
            return {"verdict": "hello"}
        except (KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            return {"error": f"the coordinator cannot read this {question.get('op')} ({why})"}

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        deadline, first = time.monotonic() + POLL_S, True
        with self._changed:
            while True:
                now = time.monotonic()
                reply = self._reply(question, now)
                self._after(wake=first)  # what one reports may be what others wait for
                first = False
                if reply is not None:
                    return reply
                if now >= deadline:
                    return {"verdict": "wait"}
                self._changed.wait(max(0.01, min(deadline - now, 0.25)))

    def _reply(self, question: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        op, job = question.get("op"), str(question.get("job"))
        if op == "hello":
            return self._coordinator.hello(question, now)
        if op == "enter":
            return self._coordinator.enter(job, now)
        if op == "ready":
            return self._coordinator.ready(job, question, now)
        if op == "done":
            return self._coordinator.done(job, question, now)
        if op == "maps":
            member = self._coordinator.members.get(str(question["of"]))
            if member is None:
                return {"verdict": "void", "why": f"there is no job {question['of']} any more"}
            return {
                "verdict": "maps",
                "incarnation": member.incarnation,
                "maps": member.maps,
                "addresses": member.addresses,
            }
        raise HolmesError(f"the coordinator does not know {op!r}; install the same holmes_ext everywhere")

    def _after(self, wake: bool = False) -> None:
        """Tell what was decided, and wake those who wait for it. Holds the lock."""
        events = self._coordinator.events
        new = events[self._told :]
        for event in new:
            self._tell(event)
        if new or wake:
            self._changed.notify_all()
        del events[:-_EVENTS]
        self._told = len(events)

    def _look(self) -> None:
        while self._open:
            time.sleep(1.0)
            with self._changed:
                self._coordinator.look(time.monotonic())
                self._after()

    def status(self) -> dict[str, Any]:
        """What `holmes join status` shows."""
        with self._changed:
            return status(self._coordinator, time.monotonic())


def status(coordinator: Coordinator, now: float) -> dict[str, Any]:
    """round: the last one that was opened; of each job its state, what it told in its last heartbeat (step,
    steps_per_second, bits_per_second, round), its lag (seconds after the first in its last round), rounds it was
    counted in and missed."""
    jobs = [
        {
            "job": m.name,
            "state": m.state,
            "ranks": len(m.addresses),
            "heard_s": round(now - m.heard, 1),
            "lag_s": round(m.lag_s, 3),
            "rounds": m.rounds,
            "missed": m.missed,
            **{key: m.told.get(key) for key in TOLD},
        }
        for m in sorted(coordinator.members.values(), key=lambda m: m.order)
    ]
    return {
        "version": 1,
        "round": coordinator.number,
        "up_s": round(now - coordinator.started, 1),
        "jobs": jobs,
        "events": coordinator.events[-20:],
    }


#: Of a heartbeat.
TOLD = ("round", "step", "steps_per_second", "bits_per_second", "drift")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, reuse_port=False)
    except OSError as error:
        raise HolmesError(
            f"holmes join serve: {host}:{port} cannot be listened on ({error.strerror or error}); give another"
            " --host or --port"
        ) from None
