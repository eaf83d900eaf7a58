"""Routes between ranks of different joined jobs: how a rank calls another rank, and is called.

    direct      the caller connects to the address that the other rank has published
    reversed    the other rank cannot be called (firewall, no open port). It keeps a standby line to the
                coordinator. The coordinator announces the call there, and the other rank calls back
    relayed     neither rank can be called, or a direct connection between the two jobs has failed: the
                coordinator forwards the bytes (coordinator/relay.py). For an exchange the coordinator
                chooses this route; a job that takes weights from another job chooses it itself

On each connection both ends show a certificate with the name of their job, so no job can act for another. A
relayed connection uses TLS between the two ranks, so the coordinator sees only ciphertext.

No call waits for ever: dial() has a deadline, and the standby thread opens a new line whenever the old line
fails or has been silent for an hour.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinPlace, is_loopback_address
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    NotAuthentic,
    NotHolmes,
    Purpose,
    Refused,
    answer,
    call,
    end_tls,
    greet,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener, split_address
from holmes_ext.words import why

#: Seconds for an attempt to call an address.
_CALL_S = 5.0
#: Seconds for a call through the coordinator.
_RELAY_S = 25.0
#: Seconds between two attempts to open a standby line.
_RETRY_S = 2.0
#: Seconds for which a direct connection that has failed is not tried again, if the relay may be used.
_CUT_S = 60.0
#: Seconds without a call after which a standby line is opened anew.
_STANDING_S = 3600.0
#: Most connections at a time with callers that are not authenticated yet: in all, and from the same address.
_MOST_UNPROVEN = 32
_PER_ADDRESS = 16
#: Connections at a time with authenticated callers.
_ADMITTED = 512
#: Addresses that could not be called back and are remembered, at most.
_MOST_UNREACHABLE = 4096
#: Least timeout of a queue, in seconds.
_LEAST_TIMEOUT_S = 0.001


@dataclass(frozen=True)
class Peer:
    """A rank of another job, with the address that is needed to connect to it."""

    job: str
    incarnation: str  # of the job
    rank: int
    address: str = ""  # HOST:PORT; "": only through the coordinator

    def __str__(self) -> str:
        return f"rank {self.rank} of job {self.job}"


@dataclass(frozen=True)
class RankIdentity:
    """Identity of a rank for ranks of other jobs: job, incarnation (start of the job) and rank."""

    job: str
    incarnation: str  # of the job
    rank: int

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields as a dict with keys "job", "incarnation" and "rank", for a handshake."""
        return {"job": self.job, "incarnation": self.incarnation, "rank": self.rank}


class _ExpectedCallback(NamedTuple):
    """Request to a rank that accepts no connections: it shall connect to this rank instead.

    The thread that waits for the connection gets it from the queue `channels`.
    """

    job: str  # of the called rank
    channels: queue.SimpleQueue[Channel]  # gets the connection


class Routes:
    """Connections that this rank opens to ranks of other jobs, and accepts from them."""

    def __init__(
        self,
        identity: RankIdentity,
        place: JoinPlace,
        listening: socket.socket | None,
        address: str,
        incoming: Callable[[Channel, Purpose], None],
    ):
        """Begin to accept connections; or announce to the coordinator that this rank accepts none.

        The rank of another job that opens a connection is called a caller. If callers cannot connect to
        this rank, it keeps an idle connection to the coordinator, its standby line. The coordinator
        announces callers there.

        Args:
            identity: This rank.
            place: Coordinator, credentials and ports of this job.
            listening: Listening socket of this rank; None: it has no port.
            address: HOST:PORT at which other jobs connect; "": they cannot (no port, NAT).
            incoming: Handles a connection from a caller, in a thread of its own. Called with the
                authenticated connection, and the caller's document of the handshake.
        """
        self.identity = identity
        self.address = address
        self._place = place
        self._credentials = place.credentials
        self._incoming = incoming
        # Id of a request for a callback -> queue of the thread that has sent it and waits.
        self._callbacks: dict[str, _ExpectedCallback] = {}
        # Addresses of callers that could not be called back; they are not tried again.
        self._unreachable_addresses: set[str] = set()
        self._closed = False
        self._listener: Listener | None = None
        if listening is not None:
            # Limits the connections that are open at a time, before and after authentication.
            self._listener = Listener(
                listening,
                self._accept,  # authenticates, then calls `incoming`
                "holmes-peers",
                strangers=_MOST_UNPROVEN,  # not authenticated yet, in all
                per_address=_PER_ADDRESS,  # not authenticated yet, from the same address
                admitted=_ADMITTED,  # authenticated
            )
            self._listener.start()
        # Jobs that are called through the coordinator, by its order.
        self._relayed_jobs: frozenset[str] = frozenset()
        # Job whose direct connection has failed -> until when dial(or_relay=True) does not try it again.
        self._cut_until: dict[str, float] = {}
        self._standby_line: Channel | None = None
        self._stands_by = False
        # Without an address, no rank can connect to this rank. With a loopback address, only ranks on the
        # same host can. The others call through the coordinator, and it needs the standby line for that.
        if not address or is_loopback_address(address):
            self._start_to_stand_by()

    def close(self) -> None:
        """Stop listening, and close the idle connection on which the coordinator announces callers."""
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._standby_line is not None:
            self._standby_line.cut()

    def use_relay(self, jobs: Iterable[str]) -> None:
        """Call the ranks of these jobs through the coordinator from now on, and all others directly.

        The coordinator orders this for pairs of jobs whose direct connections have failed. Both jobs of a
        pair get the order, so this rank also stands by for the other job's calls.
        """
        self._relayed_jobs = frozenset(jobs)
        if self._relayed_jobs:
            self._start_to_stand_by()

    def uses_relay(self, job: str) -> bool:
        """Return whether use_relay() has ordered the coordinator's relay for calls to a job's ranks."""
        return job in self._relayed_jobs

    def dial(
        self, peer: Peer, purpose: Purpose, deadline: Deadline, or_relay: bool = False
    ) -> Channel:
        """Open a connection to a rank of another job.

        Args:
            peer: The rank.
            purpose: Use of the connection, for the handshake, such as {"purpose": "exchange", "lane": 0}.
            deadline: The connection must be open by then.
            or_relay: If the direct connection fails, call through the coordinator.

        Raises:
            OSError: The rank cannot be reached, or refuses the connection.
        """
        facts = {**self.identity.facts, **purpose, "to": peer.incarnation}
        try:
            if not peer.address or self.uses_relay(peer.job):
                return self._dial_through_coordinator(peer, facts, deadline)
            if or_relay:
                return self._dial_or_relay(peer, facts, deadline)
            return self._dial_directly(peer, facts, deadline)
        except Refused as error:
            raise ConnectionRefusedError(str(error)) from None
        except HolmesError as error:
            raise ConnectionError(str(error)) from None

    def _dial_directly(self, peer: Peer, facts: dict[str, Any], deadline: Deadline) -> Channel:
        host, port = split_address(peer.address)
        part = deadline.part(_CALL_S, f"calling {peer.address}")
        return call(host, port, self._credentials, peer.job, facts, part)

    def _dial_or_relay(self, peer: Peer, facts: dict[str, Any], deadline: Deadline) -> Channel:
        """Connect to a rank at its address; if that fails, through the coordinator, for a minute."""
        reason = f"{peer.address} could not be reached"
        if time.monotonic() >= self._cut_until.get(peer.job, 0.0):
            try:
                return self._dial_directly(peer, facts, deadline)
            except (OSError, NotAuthentic) as error:
                reason = why(error)
                self._cut_until[peer.job] = time.monotonic() + _CUT_S
        try:
            return self._dial_through_coordinator(peer, facts, deadline)
        except OSError as error:
            raise ConnectionError(f"{reason}; through the coordinator: {why(error)}") from None

    def _call_coordinator(self, purpose: str, deadline: Deadline, **more: Any) -> Channel:
        """Open another connection of this rank to the coordinator.

        Args:
            purpose: Use of the connection: "relay" or "standby".
            deadline: The connection must be open by then.
            more: Further keys of the handshake's document.
        """
        facts = {**self.identity.facts, "purpose": purpose, **more}
        return self._place.call(facts, deadline)

    def _dial_through_coordinator(
        self, peer: Peer, facts: dict[str, Any], deadline: Deadline
    ) -> Channel:
        """Reach a rank that cannot be called: it calls back, or the coordinator relays the bytes.

        The coordinator announces the call on the rank's standby line, an idle connection of that rank.

        Args:
            peer: The rank.
            facts: Document of the handshake: this rank's identity, and the use of the connection.
            deadline: The connection must be open by then.

        Raises:
            OSError: The rank has no standby line, or does not answer.
        """
        deadline = deadline.part(_RELAY_S, f"reaching {peer} through the coordinator")
        call_id = secrets.token_hex(8)
        # Address at which the peer first tries to call this rank back. "": it does not try, and the
        # coordinator forwards the bytes. If direct connections have failed, trying would only take time.
        callback_address = "" if self.uses_relay(peer.job) else self.address
        callback = _ExpectedCallback(peer.job, queue.SimpleQueue())
        self._callbacks[call_id] = callback
        try:
            channel = self._call_coordinator(
                "relay",
                deadline,
                call=call_id,
                address=callback_address,
                to_job=peer.job,
                to=peer.incarnation,
                to_rank=peer.rank,
            )
            try:
                reply = channel.receive(deadline)
                if reply.get("relay") == "reversed":  # the rank has connected to this rank
                    return _await_callback(callback, facts, deadline)
                if reply.get("relay") != "go":
                    reason = reply.get("error", "it has no standing line to the coordinator")
                    raise ConnectionError(str(reason))
                # "go": TLS with the coordinator ends, and the peer is at the other end of the connection.
                connection = end_tls(channel.socket, deadline)
            finally:
                channel.close()
            return greet(connection, str(peer), self._credentials, peer.job, facts, deadline)
        finally:
            del self._callbacks[call_id]

    def _accept(self, guest: Guest) -> None:
        """Authenticate an accepted connection, and pass it on to _handle().

        The connection is closed without an answer if the caller does not prove its identity, if
        there are too many connections, or if the caller wants to reach an earlier start of this job.
        Runs in a thread of its own.

        Args:
            guest: The accepted connection. Its listener closes it when this function returns,
                unless keep() was called, and limits the numbers of connections before and after
                authentication.
        """
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        with contextlib.suppress(NotHolmes, Refused):
            # guest.becomes(): the listener uses the TLS socket that answer() makes of the connection.
            channel, purpose, _ = answer(
                guest.socket, self._credentials, deadline, on_tls=guest.becomes
            )
            # Counts as authenticated from now on; False: there are too many such connections.
            is_admitted = guest.admit()
            # The caller must want this start of the job, not an earlier start at the same address.
            if not is_admitted or purpose.get("to") != self.identity.incarnation:
                return
            guest.keep()
            self._handle(channel, purpose)

    def _handle(self, channel: Channel, purpose: Purpose) -> None:
        """Pass an authenticated connection to the function or thread that uses it, and later closes it.

        Usually that is the function for incoming connections. A "reversed" connection goes to the
        waiting thread instead. That thread wanted to call a rank that accepts no connections, so the
        other rank has opened this connection.

        Args:
            purpose: Document that the caller sent in the handshake; its key "purpose" is the use of
                the connection, and "call" the id of the request that a reversed connection answers.
        """
        if purpose.get("purpose") != "reversed":
            self._handle_incoming(channel, purpose)
            return
        callback = self._callbacks.get(str(purpose.get("call")))
        # None: the thread does not wait any more. The handshake has proved the caller's job.
        if callback is None or callback.job != purpose.get("job"):
            channel.close()
        else:
            callback.channels.put(channel)

    def _handle_incoming(self, channel: Channel, purpose: Purpose) -> None:
        """Call the handler of incoming connections; close the connection if it fails."""
        try:
            self._incoming(channel, purpose)
        except (OSError, HolmesError):
            channel.close()

    # Methods of a rank that cannot be called, or that is called over the relay

    def _start_to_stand_by(self) -> None:
        """Start the thread that keeps a standby line to the coordinator, if it does not run.

        The standby line is an idle connection. On it the coordinator announces ranks of other jobs that
        want to reach this rank and cannot connect to it directly.
        """
        if not self._stands_by:
            self._stands_by = True
            threading.Thread(target=self._stand_by, name="holmes-standby", daemon=True).start()

    def _stand_by(self) -> None:
        """Keep an idle connection to the coordinator (standby line); it announces callers there.

        This is for a rank to which other ranks cannot connect. The connection is replaced when it
        fails, or when the coordinator begins to forward a caller's bytes on it. In the latter case,
        closing the old object here does not end the call: the call uses a new socket object.
        """
        while not self._closed:
            try:
                self._standby_line = self._call_coordinator(
                    "standby", Deadline(HANDSHAKE_S, "a standing line")
                )
                is_open = True
                while is_open:
                    is_open = self._take_call(self._standby_line)
            except (OSError, HolmesError):
                time.sleep(_RETRY_S)
            finally:
                if self._standby_line is not None:
                    self._standby_line.close()

    def _take_call(self, standby_line: Channel) -> bool:
        """Wait until the coordinator announces a caller on the standby line, and answer.

            {"answer": "reversed"}   this rank has connected to the caller itself
            {"answer": "relay"}      this rank cannot connect. So the line becomes the connection to
                                     the caller, and the coordinator forwards the bytes. The
                                     coordinator confirms this with {"relay": "go"}

        Args:
            standby_line: Idle connection of this rank to the coordinator. This rank accepts no
                connections, so the coordinator announces callers here.

        Returns:
            True after "reversed": the line stays idle and can announce more callers. False after
            "relay".
        """
        # The caller: job, incarnation, address, and the id of the call.
        caller = standby_line.receive(Deadline(_STANDING_S, "a call"))
        deadline = Deadline(_RELAY_S, "taking a call")
        channel = self._call_back(caller)
        if channel is not None:
            standby_line.send({"answer": "reversed"}, deadline)
            threading.Thread(
                target=self._serve_reversed, args=(channel, caller), name="holmes-peer", daemon=True
            ).start()
            return True
        standby_line.send({"answer": "relay"}, deadline)
        if standby_line.receive(deadline).get("relay") != "go":
            return False
        # TLS with the coordinator ends: the next bytes are the handshake with the caller.
        connection = end_tls(standby_line.socket, deadline)
        threading.Thread(
            target=self._serve_relayed, args=(connection,), name="holmes-peer", daemon=True
        ).start()
        return False

    def _call_back(self, caller: Mapping[str, Any]) -> Channel | None:
        """Connect to a caller that cannot connect to this rank; return the connection.

        Args:
            caller: The other rank, as the coordinator has announced it: "job", "incarnation", "address"
                ("": it has none), and "call", the id of its call.

        Returns:
            None if the caller has no address, or cannot be reached at it.
        """
        address = str(caller.get("address"))
        if not address or address in self._unreachable_addresses:
            return None
        facts = {  # document of the handshake; its "call" leads the caller to its waiting thread
            **self.identity.facts,
            "purpose": "reversed",
            "call": caller.get("call"),
            "to": caller.get("incarnation"),
        }
        try:
            host, port = split_address(address)
            deadline = Deadline(_CALL_S, "calling back")
            job = str(caller.get("job"))
            return call(host, port, self._credentials, job, facts, deadline)
        except (OSError, ValueError, HolmesError):
            # Do not lose time with this address again. A caller may announce any number of addresses,
            # so too many are forgotten.
            if len(self._unreachable_addresses) >= _MOST_UNREACHABLE:
                self._unreachable_addresses.clear()
            self._unreachable_addresses.add(address)
            return None

    def _serve_reversed(self, channel: Channel, caller: Mapping[str, Any]) -> None:
        """Handle a connection that this rank has opened, because the caller could not open it.

        The caller's first message names the use of the connection. From then on, the connection is
        handled as if the caller had opened it.

        Args:
            caller: The other rank, as the coordinator has announced it: job and incarnation.
        """
        try:
            purpose = channel.receive(Deadline(HANDSHAKE_S, "what it wants"))
        except OSError:
            channel.close()
            return
        # The handshake has proved these two values. The message may claim others, but must not
        # replace these.
        proven = {"job": caller.get("job"), "incarnation": caller.get("incarnation")}
        self._handle_incoming(channel, {**purpose, **proven})

    def _serve_relayed(self, connection: socket.socket) -> None:
        """Authenticate a caller whose bytes the coordinator forwards, and pass the connection on.

        The caller must use TLS, also if the coordinator is on this host, because the caller may be on
        another host. The connection is closed if the caller is not authentic, or wants to reach an
        earlier start of this job.
        """
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        try:
            channel, purpose, _ = answer(connection, self._credentials, deadline)
            if purpose.get("to") == self.identity.incarnation:
                self._handle(channel, purpose)
                return
        except (OSError, HolmesError):
            pass
        connection.close()


def _await_callback(
    callback: _ExpectedCallback, facts: Mapping[str, Any], deadline: Deadline
) -> Channel:
    """Wait until the called rank has connected to this rank, and return the connection.

    Args:
        callback: Its queue gets the connection from another thread of this rank, which accepts it.
        facts: This rank's identity, and the use of the connection; sent on it.
        deadline: End of the wait.

    Raises:
        TimeoutError: The rank has not connected in time.
        OSError: The connection broke.
    """
    timeout_s = max(_LEAST_TIMEOUT_S, deadline.left)
    try:
        channel = callback.channels.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError("it did not call back") from None
    channel.send(dict(facts), deadline)
    return channel
