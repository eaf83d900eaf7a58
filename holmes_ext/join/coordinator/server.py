"""Server process of the coordinator, started by `holmes join serve`. Needs no torch.

A job opens two connections, for heartbeats and for requests. Each connection has its own thread. The caller
names the purpose in the handshake:

    heartbeat   telemetry every HEARTBEAT_S seconds; when the connection closes, the job is gone
    job         requests {"op": "hello" | "enter" | "ready" | "next" | "done" | "checked" | "maps", ...}
    status      one reply: the state of the run, as `holmes join status` displays it
    reachable   one reply: whether the caller's port accepts connections
    settings    one reply: the --outer settings of the run
    redeem      one reply: the certificate of a job that has shown its invitation
    standby     a rank that cannot be called waits for calls (relay.py)
    relay       a rank calls a rank that it cannot reach (relay.py)
    others      services use them (`handlers`)

Protocol of a request:

1. The thread of the connection passes it to `Coordinator`, under a lock: there all decisions are made.
2. If the coordinator returns None (other jobs must report first), the thread waits on a condition variable
   and tries again whenever another request, a heartbeat or the clock may have changed the decision.
3. After POLL_S seconds the reply is {"verdict": "wait"}, and the job repeats the request. For "next" it is
   {"verdict": "idle"} after IDLE_S seconds: the job's training does not depend on it.

So no job waits for ever: every request is answered within POLL_S seconds, and the coordinator's rules give
up jobs that stay silent.

A connection acts for the job named in its handshake, and the caller's certificate must have that name. So no
job can act for another. A certificate stands for one job at a time, so its holder has a single vote. A job
that sends an impossible report is dropped, and so is a job with a revoked certificate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.client import IDLE_S, POLL_S
from holmes_ext.join.coordinator.coordinator import Coordinator
from holmes_ext.join.coordinator.gate import (
    SETTINGS,
    STATUS,
    Complaints,
    Gate,
    JobIdentity,
    problem_at_coordinator,
)
from holmes_ext.join.coordinator.lock_step import LockStepRounds
from holmes_ext.join.coordinator.relay import PeerRelay
from holmes_ext.join.coordinator.reports import (
    TELEMETRY,
    Hello,
    checked_from,
    done_from,
    hello_from,
    telemetry_from,
)
from holmes_ext.join.coordinator.rolling import RollingRounds
from holmes_ext.join.coordinator.state import NotInRun
from holmes_ext.join.identity.invitation import REDEEM
from holmes_ext.join.identity.run_folder import ServedRun
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    NotHolmes,
    Purpose,
    Refused,
    answer,
    printable,
)
from holmes_ext.join.sockets.memory import MemoryExhausted
from holmes_ext.join.sockets.requests import (
    ANSWER_S,
    answer_request,
    receive_heartbeat,
    request_memory,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener, listen
from holmes_ext.words import why

#: Function that starts a service beside the coordinator; its context manager ends the service.
#: A service may answer connections with a purpose of its own, add a section to the status, and leave the
#: network to the jobs while they exchange data (is_exchanging).
Service = Callable[["CoordinatorServer"], AbstractContextManager[object]]
#: Reason in the log for a job that ended without a last heartbeat.
CLOSED = "its connection was closed"
#: Lines of the log that are kept.
_EVENTS = 100
#: Lines of the log in a status reply.
_STATUS_EVENTS = 20
#: Seconds between two attempts to decide a waiting request, at least and at most.
_SHORTEST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.25
#: Seconds between two checks for silent jobs.
_LOOK_S = 1.0
#: Connections of jobs at a time: two of each job, and one of each rank that cannot be called.
_ADMITTED = 8192
#: Characters of the name of a job in a request for its shard maps.
_LONGEST_NAME = 100


class CoordinatorServer:
    """TCP server of a run's coordinator; the constructor opens the port, serve() answers the jobs."""

    def __init__(
        self,
        host: str,
        port: int,
        open_run: Callable[[int], ServedRun],
        tell: Callable[[str], None],
        relay: PeerRelay | None = None,
        services: Sequence[Service] = (),
        settings: OuterSettings | None = None,
    ):
        """Listen on a TCP port for the jobs of a run; serve() answers them.

        Args:
            host: Address to listen on; "": all addresses of this host.
            port: Port to listen on; 0: any free port. The attribute `port` is the actual port.
            open_run: Returns the state folder and the certificate of the run; called once, with the
                actual port.
            tell: Called with each line for the log.
            relay: Forwards bytes between ranks that cannot call each other; default: without limit.
            services: Functions that start services beside the coordinator, such as an HTTP endpoint for
                metrics. At its begin, serve() calls each function with this server; at its end, it
                closes the returned context managers. A service reads status() in threads of its own.
            settings: Settings that all jobs of the run must have; None: those of its first job.

        Raises:
            HolmesError: The address, the port or the state folder cannot be used.
        """
        self._tell = tell
        self._services = services
        self.relay = relay or PeerRelay()
        # Of services. Purpose -> function that uses such a connection: (channel, job, incarnation).
        self.handlers: dict[str, Callable[[Channel, str, str], None]] = {}
        # Section of the status -> function that returns its content.
        self.sections: dict[str, Callable[[], Any]] = {}
        # Lock of the coordinator and of these tables; notified when a waiting request may be decided.
        self._changed = threading.Condition()
        # The policies decide when a round begins, with rounds=sync and with rounds=async.
        self._coordinator = Coordinator(time.monotonic(), policies=(LockStepRounds, RollingRounds))
        self._heartbeats: dict[JobIdentity, Channel] = {}  # open connections for heartbeats
        self._complaints = Complaints()
        self._logged_events = 0  # number of the coordinator's events that were passed to `tell`
        self._memory = request_memory()
        self._ended = threading.Event()
        try:
            # Accepts at most _ADMITTED authenticated connections at a time.
            self._listener = Listener(
                listen(host, port), self._serve_connection, "holmes-serve", admitted=_ADMITTED
            )
        except (OSError, UnicodeError) as error:
            raise HolmesError(
                f"holmes join serve: {host or '*'}:{port} cannot be listened on ({why(error)}); give another"
                " --host or --port"
            ) from None
        self.port = self._listener.port
        try:
            self._gate = Gate(open_run(self.port), settings)
        except BaseException:
            self._listener.close()
            raise

    def serve(self) -> None:
        """Answer jobs until close() is called; the `services`, such as metrics, run during this time."""
        with ExitStack() as running:
            for service in self._services:
                running.enter_context(service(self))
            threading.Thread(target=self._watch_silence, name="holmes-look", daemon=True).start()
            self._listener.serve()

    def close(self) -> None:
        """Stop listening, and end serve()."""
        self._ended.set()
        self._listener.close()
        self.relay.close()

    def _serve_connection(self, guest: Guest) -> None:
        """Serve an accepted connection, in its thread, until it ends.

        In the handshake the caller shows its certificate, and sends its purpose: a document that names the
        use of the connection (listed at the top of this module). All callers but those of "status" and
        "redeem" are ranks of the job that the certificate names. "status", "settings" and "redeem" get one
        reply. Any other purpose is ignored. When this function returns, the listener disconnects.

        Args:
            guest: The accepted connection. The number of unauthenticated connections is limited; admit()
                makes this connection count as authenticated.
        """
        self._read_revocations()
        try:
            deadline = Deadline(HANDSHAKE_S, "the handshake")
            # guest.becomes(): use the TLS socket that answer() makes from now on.
            channel, purpose, holder = answer(
                guest.socket,
                self._gate.credentials,
                deadline,
                problem_of=problem_at_coordinator,
                on_tls=guest.becomes,
            )
        except (NotHolmes, Refused) as error:
            self._complain(guest.host, str(error))
            return
        if purpose.get("purpose") in (STATUS, SETTINGS, REDEEM):
            channel.send(self._short_reply(guest.host, purpose), deadline)
            return
        identity = JobIdentity(str(purpose["job"]), str(purpose["incarnation"]), holder.fingerprint)
        if not guest.admit():
            channel.send({"error": "there are too many connections"}, deadline)
            return
        match purpose.get("purpose"):
            case "heartbeat":
                self._receive_heartbeats(channel, identity)
            case "job":
                self._answer_requests(channel, identity)
            case "standby":  # a rank that accepts no connections waits for calls of other jobs
                self.relay.stand_by(channel, identity.job, identity.incarnation, purpose)
            case "relay":  # a rank calls such a rank
                self.relay.call(channel, identity.job, purpose)
            case "reachable":
                can_be_called = self.relay.reaches(
                    guest.host, identity.job, identity.incarnation, purpose
                )
                channel.send({"reachable": can_be_called}, Deadline(ANSWER_S, "an answer"))
            case str(use) if use in self.handlers:
                self.handlers[use](channel, identity.job, identity.incarnation)

    def _short_reply(self, host: str, purpose: Purpose) -> dict[str, Any]:
        """Return the reply to a caller that needs one document: status, settings or certificate."""
        match purpose.get("purpose"):
            case "status":
                return self.status()
            case "settings":
                return self._gate.settings_reply()
        try:
            reply = self._gate.redeem_reply(purpose)
        except HolmesError as error:
            self._complain(host, str(error))
            return {"error": str(error)}
        self._tell(f"job {purpose.get('job')} has got its certificate")
        return reply

    def _read_revocations(self) -> None:
        """End the connections of jobs that `holmes join revoke` has named since the last call."""
        with self._changed:
            try:
                entries = self._gate.revoked_since()
            except (OSError, HolmesError) as error:  # the list that was read last stays valid
                self._tell(f"the list of revoked jobs cannot be read: {error}")
                return
            if entries is None:
                return
            # Before the jobs are gone: a job that is gone says hello again, and is refused only if the new
            # list is in force by then.
            self._gate.credentials.revoke(entries)
            for member in self._coordinator.state.present():
                if self._gate.is_revoked(member.name, entries):
                    self._coordinator.gone(member.name, member.incarnation, "it was revoked")
            self._log_events(wake=True)

    def _complain(self, host: str, reason: str) -> None:
        """Log that a caller was rejected, unless the log has many such lines of the last minute."""
        with self._changed:
            ending = self._complaints.add(host, time.monotonic())
        if ending is not None:
            self._tell(f"a caller from {host} was turned away: {printable(reason)}{ending}")

    def _receive_heartbeats(self, channel: Channel, identity: JobIdentity) -> None:
        """Receive the heartbeats of a job until its connection closes; then the job is gone."""
        self._heartbeats[identity] = channel
        reason = CLOSED
        try:
            while not self._ended.is_set():
                heartbeat = receive_heartbeat(channel)
                telemetry = telemetry_from(heartbeat)
                with self._changed:
                    self._coordinator.heartbeat(
                        identity.job, identity.incarnation, telemetry, time.monotonic()
                    )
                if heartbeat.get("ends"):
                    reason = printable(str(heartbeat["ends"]))
                    return
        except HolmesError as error:
            reason = f"dropped: {error}"
        finally:
            with self._changed:
                # The job may have opened another connection for heartbeats in the meantime.
                if self._heartbeats.get(identity) is channel:
                    del self._heartbeats[identity]
                    self._gone(identity, reason)

    def _answer_requests(self, channel: Channel, identity: JobIdentity) -> None:
        """Answer the requests of a job until its connection closes."""
        try:
            while not self._ended.is_set():
                answer_request(
                    channel, identity.job, self._memory, partial(self._reply_to, identity)
                )
        except MemoryExhausted as error:
            self._complain(f"job {identity.job}", str(error))
        finally:
            with self._changed:
                # A job that dies before its first heartbeat is noticed only here.
                if identity not in self._heartbeats:
                    self._gone(identity, CLOSED)

    def _gone(self, identity: JobIdentity, reason: str) -> None:
        """Record that a job has left the run, and wake the requests that waited for it."""
        with self._changed:
            self._coordinator.gone(identity.job, identity.incarnation, reason)
            self._log_events(wake=True)

    def _reply_to(self, identity: JobIdentity, question: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; drop the job if the request is malformed or false.

        Each reply also contains a salt: a random text for the checksum of the job's weights in the
        next round. So no job can copy that checksum: only a job that has the weights can compute it.
        The reply also lists the revoked certificates. All jobs must refuse them.
        """
        try:
            reply = self._decide(identity, question)
        except NotInRun:
            # The coordinator was restarted, or has given the job up. The job must describe itself (request
            # "hello") and then repeat this request.
            reply = {"verdict": "hello"}
        except HolmesError as error:
            # A job that is refused while it joins does not have to be dropped.
            if question.get("op") not in ("hello", "enter"):
                self._gone(identity, f"dropped: {error}")
            reply = {"error": str(error)}
        state = self._coordinator.state
        next_round = state.number + 1
        reply = {**reply, "salt_of_next": [next_round, state.salt("round", next_round)]}
        if revoked := self._gate.credentials.revoked:
            reply["revoked"] = sorted(revoked)
        return reply

    def _decide(self, identity: JobIdentity, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request, after waiting up to POLL_S seconds for a decision.

        Reports of other jobs may allow a decision meanwhile. Without one, the reply is "wait", and
        the job repeats its request. Jobs that train meanwhile (rounds=async) get "idle" after
        IDLE_S, a shorter time.

        Raises:
            HolmesError: The request is malformed, or contradicts the state of the run.
            NotInRun: The job has to say hello first.
        """
        decide = self._decision(identity, request)
        is_rolling = request.get("op") == RollingRounds.question
        deadline = Deadline(IDLE_S if is_rolling else POLL_S, "an answer")
        with self._changed:
            is_new = True
            while True:
                reply = decide(time.monotonic())
                # A new report of this job may decide requests of other jobs, which wait for it.
                self._log_events(wake=is_new)
                is_new = False
                if reply is not None:
                    return reply
                if deadline.passed:
                    return {"verdict": "idle" if is_rolling else "wait"}
                self._changed.wait(max(_SHORTEST_WAIT_S, min(deadline.left, _LONGEST_WAIT_S)))

    def _decision(
        self, identity: JobIdentity, request: dict[str, Any]
    ) -> Callable[[float], dict[str, Any] | None]:
        """Return a function of the time that returns the reply, or None while nothing is decided.

        The request is parsed once, here; the function may be called several times.

        Args:
            identity: The job that has sent the request.
            request: Parsed JSON; "op" is the type of the request. A request for the job's next round has
                the op of the round policy: "ready" for rounds=sync, "next" for rounds=async.

        Raises:
            HolmesError: The request is malformed.
            NotInRun: The job has to say hello first.
        """
        job = identity.job
        op = str(request.get("op"))
        coordinator = self._coordinator
        if op == "hello":
            hello = hello_from(request)
            return lambda now: self._hello(identity, hello, now)
        with self._changed:
            member = coordinator.state.member(job)
            if member.incarnation != identity.incarnation:
                raise NotInRun(job)
            fragments = len(member.claims)  # a job claims a version of each fragment of the model
        if op == "enter":
            return lambda now: coordinator.enter(job, now)
        if op in coordinator.policies:
            report = coordinator.policies[op].read(request, fragments)
            return lambda now: coordinator.next_round(op, job, report, now)
        if op == "done":
            done_report = done_from(request)
            return lambda now: coordinator.done(job, done_report, now)
        if op == "checked":
            checked_report = checked_from(request)
            return lambda now: coordinator.checked(job, checked_report, now)
        if op == "maps":
            other_job = str(request.get("of"))[:_LONGEST_NAME]
            return lambda now: coordinator.maps_of(job, other_job)
        raise HolmesError(
            f"the coordinator does not know {op!r:.40}; install the same holmes_ext everywhere"
        )

    def _hello(self, identity: JobIdentity, hello: Hello, now: float) -> dict[str, Any] | None:
        """Let a job join or reconnect, and return the reply to its `hello` request.

        Returns:
            The reply, with the last round and the job's state. None while the coordinator cannot decide
            yet whether the job may join.

        Raises:
            HolmesError: The job may not join, for example because of its certificate or its settings.
        """
        state = self._coordinator.state
        present = [member.name for member in state.present()]
        hello = self._gate.admit_hello(identity, hello, present)
        reply = self._coordinator.hello(identity.job, identity.incarnation, hello, now)
        if reply is not None:
            self._gate.record(identity, state.members)
        return reply

    def _log_events(self, wake: bool = False) -> None:
        """Log the coordinator's new events, and wake the waiting requests. The caller must hold the lock.

        Args:
            wake: True: wake the waiting requests even if there is no new event.
        """
        events = self._coordinator.state.events
        new_events = events[self._logged_events :]
        for event in new_events:
            self._tell(event)
        if new_events or wake:
            self._changed.notify_all()
        del events[:-_EVENTS]  # only the latest are kept
        self._logged_events = len(events)

    def _watch_silence(self) -> None:
        """Remove silent jobs, and jobs with revoked certificates, once a second until close()."""
        while not self._ended.wait(_LOOK_S):
            self._read_revocations()
            with self._changed:
                self._coordinator.look(time.monotonic())
                self._log_events()

    @property
    def is_exchanging(self) -> bool:
        """Return whether jobs exchange data in a round now. A service may wait until they have finished."""
        with self._changed:
            return any(each.is_exchanging for each in self._coordinator.state.rounds.values())

    def status(self) -> dict[str, Any]:
        """Return the state of the run, as `holmes join status` shows it.

        Returns:
            The last round that was opened, the server's uptime, the latest events, and for each job:
            its state, seconds since its last heartbeat, `lag_s` (seconds from the opening of its last
            round until it was ready), rounds with and without it, bytes relayed for it, and telemetry.
        """
        sections = {name: content() for name, content in self.sections.items()}
        with self._changed:
            state = self._coordinator.state
            relayed_bytes = self.relay.counted()
            now = time.monotonic()
            jobs = [
                {
                    "job": member.name,
                    "state": member.state,
                    "ranks": len(member.hello.addresses),
                    "heard_s": round(now - member.last_heartbeat, 1),
                    "lag_s": round(member.lag_s, 3),
                    "rounds": member.rounds,
                    "missed": member.missed,
                    "relayed": relayed_bytes.get(member.name, 0),
                    **{key: member.telemetry.get(key) for key in TELEMETRY},
                }
                for member in sorted(state.members.values(), key=lambda member: member.order)
            ]
            return {
                "version": 1,
                "round": state.number,
                "up_s": round(now - state.started, 1),
                "jobs": jobs,
                "events": state.events[-_STATUS_EVENTS:],
                **sections,
            }
