"""`holmes join serve`: the coordinator as a process. Needs no torch; a thread for each connection, two
connections for each job.

    heartbeat   every HEARTBEAT_S seconds: what `holmes join status` shows. When it closes, the job is gone
    job         {"op": "hello" | "enter" | "ready" | "done" | "checked" | "maps", ...}
                -> an answer, or {"verdict": "wait"} after POLL_S: ask again
    status      -> one document
    reachable   whether the caller's port can be called
    standby, relay    of ranks that cannot be called (relay.py)

All decisions are those of coordinator.Coordinator. A connection speaks for the job that its handshake named,
with the secret of which the incarnation is a hash, so that no job speaks for another, not even where the
coordinator has just been restarted. A job whose report cannot be true is dropped.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import incarnation_of, is_name, ticket
from holmes_ext.join.coordinator.client import IDLE_S, POLL_S
from holmes_ext.join.coordinator.coordinator import Coordinator
from holmes_ext.join.coordinator.lock_step import LockStepRounds
from holmes_ext.join.coordinator.relay import PeerRelay
from holmes_ext.join.coordinator.reports import (
    TELEMETRY,
    checked_from,
    done_from,
    hello_from,
    telemetry_from,
)
from holmes_ext.join.coordinator.rolling import RollingRounds
from holmes_ext.join.coordinator.state import NotInRun
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    Credentials,
    NotHolmes,
    Refused,
    answer,
    connect,
    printable,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener, listen, network_of
from holmes_ext.words import why

#: Starts something beside the coordinator; the context manager ends it.
Service = Callable[["CoordinatorServer"], AbstractContextManager[object]]
#: Why a job is gone that said nothing.
CLOSED = "its connection was closed"
#: Lines of the log that `holmes join status` can show.
_EVENTS = 100
#: Seconds without a word on a connection until it is closed: jobs ask, or send heartbeats, far more often.
_SILENCE_S = 3600.0
#: Seconds in which an answer must be taken.
_ANSWER_S = 60.0
#: Bytes of a hello: the maps of a job with thousands of ranks.
_LONGEST = 64 * 2**20
#: Incarnations that are not here whose secret is remembered; lines in a minute about callers that were turned
#: away, of each network and in all.
_SECRETS, _COMPLAINTS, _COMPLAINTS_IN_ALL = 1024, 5, 60
#: Connections of jobs at a time: two, and one for each rank that cannot be called.
_ADMITTED = 8192
#: Seconds to find out whether a rank can be called.
_CALL_BACK_S = 2.0


class CoordinatorServer:
    """The coordinator of one run on a port, which listens from construction on.

    Args:
        host: Address to listen on; "": all addresses of this host.
        port: 0: any free one; the attribute `port` is the one that was chosen.
        tell: Called with each line for the log.
        services: What else runs beside the coordinator. Each is called with this server when serve() begins,
            and the context manager that it returns is open until serve() ends. A service reads the run from
            status(), in threads of its own; nothing waits for it.

    Raises:
        HolmesError: The address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: Credentials,
        tell: Callable[[str], None],
        relay: PeerRelay | None = None,
        services: Sequence[Service] = (),
    ):
        self._credentials, self._tell = credentials, tell
        self._services = services
        self.relay = relay or PeerRelay()
        self._changed = threading.Condition()
        self._coordinator = Coordinator(time.monotonic(), policies=(LockStepRounds, RollingRounds))
        self._heartbeats: dict[tuple[str, str], Channel] = {}
        self._secrets: dict[tuple[str, str], str] = {}
        self._complaints: list[tuple[float, str]] = []  # (when, from which network)
        self._told = 0
        self._ended = threading.Event()
        try:
            self._listener = Listener(
                listen(host, port), self._welcome, "holmes-serve", admitted=_ADMITTED
            )
        except (OSError, UnicodeError) as error:
            raise HolmesError(
                f"holmes join serve: {host or '*'}:{port} cannot be listened on ({why(error)}); give another"
                " --host or --port"
            ) from None
        self.port = self._listener.port

    def serve(self) -> None:
        """Answer jobs, and run the services, until close() is called."""
        with ExitStack() as running:
            for service in self._services:
                running.enter_context(service(self))
            threading.Thread(target=self._look, name="holmes-look", daemon=True).start()
            self._listener.serve()

    def close(self) -> None:
        """Stop listening, and end serve()."""
        self._ended.set()
        self._listener.close()
        self.relay.close()

    def _welcome(self, guest: Guest) -> None:
        try:
            deadline = Deadline(HANDSHAKE_S, "the handshake")
            channel, purpose = answer(
                guest.socket, self._credentials, deadline, on_tls=guest.becomes
            )
        except (NotHolmes, Refused) as error:
            self._complain(guest.host, str(error))
            return
        what = purpose.get("purpose")
        if what == "status":
            channel.send(self.status(), deadline)
            return
        try:
            who = self._identity(purpose)
        except HolmesError as error:
            channel.send({"error": str(error)}, deadline)
            self._complain(guest.host, str(error))
            return
        if not guest.admit():
            channel.send({"error": "there are too many connections"}, deadline)
        elif what == "heartbeat":
            self._heartbeat(channel, *who)
        elif what == "job":
            self._questions(channel, *who)
        elif what == "standby":
            self.relay.stand_by(channel, *who, purpose)
        elif what == "relay":
            self.relay.call(channel, who[0], purpose)
        elif what == "reachable":
            channel.send(
                {"reachable": _reachable(guest.host, purpose.get("port"))},
                Deadline(_ANSWER_S, "an answer"),
            )

    def _identity(self, purpose: Mapping[str, Any]) -> tuple[str, str]:
        """(job, incarnation) for which a connection speaks. HolmesError where it may not."""
        job, incarnation, secret = (
            str(purpose.get(key, "")) for key in ("job", "incarnation", "secret")
        )
        if not is_name(job) or not is_name(incarnation) or not is_name(secret):
            raise HolmesError("a caller names no job, incarnation and secret")
        if not hmac.compare_digest(incarnation_of(secret), incarnation):
            raise HolmesError(f"a caller says that it is job {job}, but is another")
        with self._changed:
            self._secrets[job, incarnation] = secret
            here = {(m.name, m.incarnation) for m in self._coordinator.state.members.values()}
            for old in [key for key in self._secrets if key not in here][:-_SECRETS]:
                del self._secrets[old]
        return job, incarnation

    def _complain(self, host: str, reason: str) -> None:
        """A line for the log, not more than a few for each network in a minute, nor many in all."""
        now, network = time.monotonic(), network_of(host)
        with self._changed:
            self._complaints = [(at, who) for at, who in self._complaints if now - at < 60]
            of_network = sum(who == network for _, who in self._complaints)
            if of_network >= _COMPLAINTS or len(self._complaints) >= _COMPLAINTS_IN_ALL:
                return
            self._complaints.append((now, network))
            last = len(self._complaints) == _COMPLAINTS_IN_ALL
        more = "; so many are that no more are told for a minute" if last else ""
        self._tell(f"a caller from {host} was turned away: {printable(reason)}{more}")

    def _heartbeat(self, channel: Channel, job: str, incarnation: str) -> None:
        self._heartbeats[job, incarnation] = channel
        reason = CLOSED
        try:
            while not self._ended.is_set():
                heartbeat = channel.receive(Deadline(_SILENCE_S, "a heartbeat"))
                telemetry = telemetry_from(heartbeat)
                with self._changed:
                    self._coordinator.heartbeat(job, incarnation, telemetry, time.monotonic())
                if heartbeat.get("ends"):
                    reason = printable(str(heartbeat["ends"]))
                    return
        except HolmesError as error:
            reason = f"dropped: {error}"
        finally:
            with self._changed:
                if self._heartbeats.get((job, incarnation)) is channel:
                    del self._heartbeats[job, incarnation]
                    self._gone(job, incarnation, reason)

    def _questions(self, channel: Channel, job: str, incarnation: str) -> None:
        try:
            while not self._ended.is_set():
                question = channel.receive(Deadline(_SILENCE_S, "a question"), _LONGEST)
                reply = self._answer_to(job, incarnation, question)
                channel.send(reply, Deadline(_ANSWER_S, "an answer"))
        finally:
            with self._changed:
                # it died before its first heartbeat, which would tell
                if (job, incarnation) not in self._heartbeats:
                    self._gone(job, incarnation, CLOSED)

    def _gone(self, job: str, incarnation: str, reason: str) -> None:
        with self._changed:
            self._coordinator.gone(job, incarnation, reason)
            self._after(wake=True)

    def _answer_to(self, job: str, incarnation: str, question: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = self._ask(job, incarnation, question)
        except NotInRun:
            reply = {"verdict": "hello"}
        except HolmesError as error:
            if question.get("op") not in ("hello", "enter"):
                self._gone(job, incarnation, f"dropped: {error}")
            reply = {"error": str(error)}
        state = self._coordinator.state
        number = state.number + 1
        return {**reply, "salt_of_next": [number, state.salt("round", number)]}

    def _ask(self, job: str, incarnation: str, question: dict[str, Any]) -> dict[str, Any]:
        decide = self._decision(job, incarnation, question)
        coming = question.get("op") == RollingRounds.question
        deadline, first = Deadline(IDLE_S if coming else POLL_S, "an answer"), True
        with self._changed:
            while True:
                reply = decide(time.monotonic())
                self._after(wake=first)  # what one reports may be what others wait for
                first = False
                if reply is not None:
                    return reply
                if deadline.passed:
                    return {"verdict": "idle" if coming else "wait"}
                self._changed.wait(max(0.01, min(deadline.left, 0.25)))

    def _decision(
        self, job: str, incarnation: str, question: dict[str, Any]
    ) -> Callable[[float], dict[str, Any] | None]:
        """Return a function that answers the question, given the time, or None while nothing is decided.

        Raises:
            HolmesError: The question cannot be read.
            NotInRun: The job has to say hello first.
        """
        op = str(question.get("op"))
        coordinator = self._coordinator
        if op == "hello":
            hello = hello_from(question)
            return lambda now: coordinator.hello(job, incarnation, hello, now)
        with self._changed:
            member = coordinator.state.member(job)
            if member.incarnation != incarnation:
                raise NotInRun(job)
            fragments = len(member.claims)
        if op == "enter":
            return lambda now: coordinator.enter(job, now)
        if op in coordinator.policies:
            report = coordinator.policies[op].read(question, fragments)
            return lambda now: coordinator.next_round(op, job, report, now)
        if op == "done":
            done_report = done_from(question)
            return lambda now: coordinator.done(job, done_report, now)
        if op == "checked":
            checked_report = checked_from(question)
            return lambda now: coordinator.checked(job, checked_report, now)
        if op == "maps":
            of = str(question.get("of"))[:100]
            return lambda now: self._with_ticket(coordinator.maps_of(job, of), job, incarnation, of)
        raise HolmesError(
            f"the coordinator does not know {op!r:.40}; install the same holmes_ext everywhere"
        )

    def _with_ticket(
        self, reply: dict[str, Any], job: str, incarnation: str, of: str
    ) -> dict[str, Any]:
        """What shows the ranks of `of` that a caller is this job: a secret of both and the coordinator."""
        secret = self._secrets.get((of, str(reply.get("incarnation"))), "")
        return {**reply, "ticket": ticket(secret, job, incarnation)} if secret else reply

    def _after(self, wake: bool = False) -> None:
        """Tell what was decided, and wake those who wait for it. Holds the lock."""
        events = self._coordinator.state.events
        new = events[self._told :]
        for event in new:
            self._tell(event)
        if new or wake:
            self._changed.notify_all()
        del events[:-_EVENTS]
        self._told = len(events)

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            with self._changed:
                self._coordinator.look(time.monotonic())
                self._after()

    def status(self) -> dict[str, Any]:
        """What `holmes join status` shows. round: the last that was opened; of each job its state, its last
        heartbeat's figures, its lag (seconds after the first in its last round), rounds counted and missed,
        bytes relayed for it."""
        with self._changed:
            state, relayed, now = self._coordinator.state, self.relay.counted(), time.monotonic()
            jobs = [
                {
                    "job": m.name,
                    "state": m.state,
                    "ranks": len(m.hello.addresses),
                    "heard_s": round(now - m.heard, 1),
                    "lag_s": round(m.lag_s, 3),
                    "rounds": m.rounds,
                    "missed": m.missed,
                    "relayed": relayed.get(m.name, 0),
                    **{key: m.telemetry.get(key) for key in TELEMETRY},
                }
                for m in sorted(state.members.values(), key=lambda m: m.order)
            ]
            return {
                "version": 1,
                "round": state.number,
                "up_s": round(now - state.started, 1),
                "jobs": jobs,
                "events": state.events[-20:],
            }


def _reachable(host: str, port: object) -> bool:
    """Whether a caller can be called back, at the address from which it called."""
    if not isinstance(port, int) or not 0 < port < 65536:
        return False
    try:
        connect(host, port, Deadline(_CALL_BACK_S, "calling back")).close()
    except OSError:
        return False
    return True
