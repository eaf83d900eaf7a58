"""How a rank reaches a rank of another job, and is reached.

    direct      it calls the address that the other one has told
    reversed    the other one cannot be called (a firewall, no port open): it has a standing line to the
                coordinator, is told of the call, and calls back
    relayed     neither can be called: the coordinator hands the bytes on (coordinator/relay.py)

Each connection shows the run's token and the caller's ticket for the rank that it calls, which the
coordinator gave to the caller's job alone: no job speaks for another.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinPlace, ticket
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    NotHolmes,
    Refused,
    answer,
    bare,
    call,
    greet,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Guest, Listener, split_address, stays_on_host

#: Seconds for one try to call an address.
_CALL_S = 5.0
#: Seconds that the coordinator may take to find a standing line and to bring both together.
_RELAY_S = 25.0
#: Seconds until the next try to have a standing line.
_RETRY_S = 2.0
#: Seconds that nothing may come over a standing line, until it is made anew.
_STANDING_S = 3600.0
#: Connections from strangers at a time, from one address and in all; admitted ones.
_STRANGERS, _PER_ADDRESS, _ADMITTED = 32, 16, 512
#: Addresses that are remembered as such that cannot be called back.
_NOT_CALLED = 4096
Purpose = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """incarnation: of that start of the job; address: "host:port", or ""; ticket: shows that a call is this
    job's."""

    job: str
    incarnation: str
    rank: int
    address: str = ""
    ticket: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} of job {self.job}"


@dataclass(frozen=True)
class RankIdentity:
    """This rank. secret: of the job's incarnation, known to its ranks and the coordinator."""

    job: str
    incarnation: str
    rank: int
    secret: str

    @property
    def facts(self) -> dict[str, Any]:
        """What it says of itself."""
        return {"job": self.job, "incarnation": self.incarnation, "rank": self.rank}


class Routes:
    """incoming(channel, purpose): what is done, in a thread, with a connection of another job's rank.
    listening: this rank's port, or None; address: what others call, or ""."""

    def __init__(
        self,
        identity: RankIdentity,
        place: JoinPlace,
        listening: socket.socket | None,
        address: str,
        incoming: Callable[[Channel, Purpose], None],
    ):
        self.identity, self.address = identity, address
        self._place, self._credentials, self._incoming = place, place.credentials, incoming
        self._callbacks: dict[str, tuple[str, queue.SimpleQueue[Channel]]] = {}
        self._not_called: set[str] = set()  # addresses that could not be called back
        self._closed = False
        self._listener: Listener | None = None
        if listening is not None:
            limits = {"strangers": _STRANGERS, "per_address": _PER_ADDRESS, "admitted": _ADMITTED}
            self._listener = Listener(listening, self._welcome, "holmes-peers", **limits)
            self._listener.start()
        self._standing: Channel | None = None
        if not address:
            threading.Thread(target=self._stand_by, name="holmes-standby", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
        if self._standing is not None:
            self._standing.cut()

    def dial(self, peer: Peer, purpose: Purpose, deadline: Deadline) -> Channel:
        """A connection to a rank of another job; OSError when it cannot be had, or is refused."""
        facts = {**self.identity.facts, **purpose, "to": peer.incarnation}
        try:
            if peer.address:
                host, port = split_address(peer.address)
                part = deadline.part(_CALL_S, f"calling {peer.address}")
                return call(host, port, self._credentials, facts, part, peer.ticket.encode())
            return self._through_coordinator(peer, facts, deadline)
        except Refused as error:
            raise ConnectionRefusedError(str(error)) from None
        except HolmesError as error:
            raise ConnectionError(str(error)) from None

    def _to_coordinator(self, purpose: str, deadline: Deadline, **more: Any) -> Channel:
        facts = {**self.identity.facts, "purpose": purpose, "secret": self.identity.secret, **more}
        return self._place.call(facts, deadline)

    def _through_coordinator(
        self, peer: Peer, facts: dict[str, Any], deadline: Deadline
    ) -> Channel:
        deadline = deadline.part(_RELAY_S, f"reaching {peer} through the coordinator")
        number, came = secrets.token_hex(8), queue.SimpleQueue[Channel]()
        self._callbacks[number] = peer.ticket, came
        to = {"to_job": peer.job, "to": peer.incarnation, "to_rank": peer.rank}
        try:
            channel = self._to_coordinator(
                "relay", deadline, call=number, address=self.address, **to
            )
            try:
                reply = channel.receive(deadline)
                if reply.get("relay") == "reversed":
                    reversed_channel = came.get(timeout=max(0.001, deadline.left))
                    reversed_channel.send(facts, deadline)
                    return reversed_channel
                if reply.get("relay") != "go":
                    raise ConnectionError(
                        str(reply.get("error", "it has no standing line to the coordinator"))
                    )
                encrypt = not self._credentials.plain and not stays_on_host(channel.socket)
                connection = bare(channel.socket, deadline)
            finally:
                channel.close()
            secret = peer.ticket.encode()
            return greet(connection, str(peer), self._credentials, facts, deadline, secret, encrypt)
        except queue.Empty:
            raise TimeoutError("it did not call back") from None
        finally:
            del self._callbacks[number]

    def _secret_for(self, purpose: Purpose) -> bytes:
        """What a caller must know besides the token."""
        if purpose.get("purpose") == "reversed":
            return self._callbacks.get(str(purpose.get("call")), ("unknown", None))[0].encode()
        return self._own_ticket(purpose).encode()

    def _own_ticket(self, caller: Purpose) -> str:
        return ticket(self.identity.secret, str(caller.get("job")), str(caller.get("incarnation")))

    def _welcome(self, guest: Guest) -> None:
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        with contextlib.suppress(NotHolmes, Refused):
            channel, purpose = answer(
                guest.socket, self._credentials, deadline, self._secret_for, on_tls=guest.becomes
            )
            if not guest.admit() or purpose.get("to") != self.identity.incarnation:
                return
            guest.keep()
            self._came(channel, purpose)

    def _came(self, channel: Channel, purpose: Purpose) -> None:
        """From here on the connection is closed by who has it."""
        if purpose.get("purpose") != "reversed":
            self._serve(channel, purpose)
            return
        _, waiting = self._callbacks.get(str(purpose.get("call")), ("", None))
        if waiting is None:
            channel.close()
        else:
            waiting.put(channel)

    def _serve(self, channel: Channel, purpose: Purpose) -> None:
        try:
            self._incoming(channel, purpose)
        except (OSError, HolmesError):
            channel.close()

    # Of a rank that cannot be called

    def _stand_by(self) -> None:
        while not self._closed:
            try:
                self._standing = self._to_coordinator(
                    "standby", Deadline(HANDSHAKE_S, "a standing line")
                )
                while self._take_call(self._standing):
                    pass
            except (OSError, HolmesError):
                time.sleep(_RETRY_S)
            finally:
                if self._standing is not None:
                    self._standing.close()

    def _take_call(self, standing: Channel) -> bool:
        """Whether the line stands on afterwards."""
        caller = standing.receive(Deadline(_STANDING_S, "a call"))
        deadline = Deadline(_RELAY_S, "taking a call")
        if channel := self._called_back(caller):
            standing.send({"answer": "reversed"}, deadline)
            threading.Thread(
                target=self._reversed, args=(channel, caller), name="holmes-peer", daemon=True
            ).start()
            return True
        standing.send({"answer": "relay"}, deadline)
        if standing.receive(deadline).get("relay") != "go":
            return False
        plain = self._credentials.plain or stays_on_host(standing.socket)
        connection = bare(standing.socket, deadline)
        threading.Thread(
            target=self._relayed, args=(connection, plain), name="holmes-peer", daemon=True
        ).start()
        return False

    def _called_back(self, caller: Purpose) -> Channel | None:
        address = str(caller.get("address"))
        if not address or address in self._not_called:
            return None
        purpose = {
            **self.identity.facts,
            "purpose": "reversed",
            "call": caller.get("call"),
            "to": caller.get("incarnation"),
        }
        try:
            host, port = split_address(address)
            secret = self._own_ticket(caller).encode()
            return call(
                host, port, self._credentials, purpose, Deadline(_CALL_S, "calling back"), secret
            )
        except (OSError, ValueError, HolmesError):
            if len(self._not_called) >= _NOT_CALLED:
                self._not_called.clear()
            self._not_called.add(address)
            return None

    def _reversed(self, channel: Channel, caller: Purpose) -> None:
        """What the rank that was called back wants, which has shown that it is the one that called."""
        try:
            purpose = channel.receive(Deadline(HANDSHAKE_S, "what it wants"))
        except OSError:
            channel.close()
            return
        known = {key: caller.get(key) for key in ("job", "incarnation")}
        self._serve(channel, {**purpose, **known})

    def _relayed(self, connection: socket.socket, plain: bool) -> None:
        deadline = Deadline(HANDSHAKE_S, "the handshake")
        try:
            channel, purpose = answer(
                connection, self._credentials, deadline, self._secret_for, plain
            )
            if purpose.get("to") == self.identity.incarnation:
                self._came(channel, purpose)
                return
        except (OSError, HolmesError):
            pass
        connection.close()
