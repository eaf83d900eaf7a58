"""A job's side of the coordinator: asked by its rank 0. Needs no torch. The coordinator may go and come back:
questions are asked again, until their deadline."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinPlace, incarnation_of
from holmes_ext.join.coordinator.state import HEARTBEAT_S
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import HANDSHAKE_S, Credentials, Refused, call, printable
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text
from holmes_ext.words import why

#: Seconds after which a question without an answer yet is told to be asked again.
POLL_S = 1.0
#: The same for a job that may have something new to offer by then.
IDLE_S = 0.2
#: Seconds between two tries to reach a coordinator that is not there.
_RETRY_S = 0.5
#: Seconds that an answer may take beyond POLL_S, until the connection counts as lost.
_SLOW_S = 10.0
#: Bytes of an answer: the maps of a job with thousands of ranks.
_LONGEST = 64 * 2**20
#: Seconds that a heartbeat, with a connection for it where there is none, may take, and the last one.
_HEARTBEAT_S, _LAST_S = 5.0, 2.0


class CoordinatorClient:
    """hello: makes the document of the job's hello whenever it has to be said (again). Not for several
    threads at a time.

    What the coordinator refuses at first is an error of the user's. Once it has accepted the job, nobody who
    answers in its place can end it: then a refusal is the same as no answer.
    """

    def __init__(self, place: JoinPlace, hello: Callable[[], Mapping[str, Any]], secret: str = ""):
        self._secret = secret or secrets.token_hex(16)
        self.job, self.incarnation = place.address.job, incarnation_of(self._secret)
        self._place, self._hello = place, hello
        self._channel: Channel | None = None
        self._said_hello = self._accepted = False
        self._heartbeat: Heartbeat | None = None
        # (round, salt) of the next round, as last heard.
        self.salt: tuple[int, str] = (0, "")

    def ask(self, op: str, document: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """The answer; HolmesError when it is an error, TimeoutError when none comes by the deadline."""
        reason = "it did not answer"
        while not deadline.passed:
            try:
                if self._channel is None:
                    self._channel = self.connect("job", deadline)
                    self._said_hello = False
                if not self._said_hello:
                    reply = self._exchange({"op": "hello", **self._hello()}, deadline)
                    self._said_hello = reply.get("verdict") != "wait"
                    if self._said_hello and self._heartbeat is not None:
                        self._heartbeat.now()
                    continue
                reply = self._exchange({"op": op, **document}, deadline)
                if reply.get("verdict") == "hello":
                    self._said_hello = False
                elif reply.get("verdict") != "wait":
                    self._accepted = True
                    return reply
            except Refused as error:
                if not self._accepted:
                    raise
                reason = str(error)
                self._try_again_later(deadline)
            except OSError as error:
                reason = why(error)
                self._try_again_later(deadline)
        where = address_text(self._place.address.host, self._place.address.port)
        raise TimeoutError(
            f"the coordinator at {where} did not answer {op!r} in {deadline.seconds:.3g} s ({reason})"
        )

    def start_heartbeat(self, status: Callable[[], dict[str, Any]]) -> None:
        """From now on, with what `status` says."""
        self._heartbeat = Heartbeat(lambda deadline: self.connect("heartbeat", deadline), status)

    def close(self, why: str) -> None:
        """Say that the job ends; "": let it seem to be lost."""
        if self._heartbeat is not None:
            self._heartbeat.close(why)
        self._drop()

    def connect(self, purpose: str, deadline: Deadline) -> Channel:
        """OSError, Refused."""
        identity = {"job": self.job, "incarnation": self.incarnation, "secret": self._secret}
        part = deadline.part(HANDSHAKE_S, "the coordinator's handshake")
        return self._place.call({"purpose": purpose, **identity}, part)

    def _exchange(self, document: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Refused when the answer is an error."""
        assert self._channel is not None
        part = deadline.part(POLL_S + _SLOW_S, "the coordinator's answer")
        self._channel.send(document, part)
        reply = self._channel.receive(part, _LONGEST)
        if "error" in reply:
            raise Refused(printable(str(reply["error"])))
        match reply.get("salt_of_next"):
            case [int(number), str(salt)]:
                self.salt = number, salt
        return reply

    def _try_again_later(self, deadline: Deadline) -> None:
        self._drop()
        time.sleep(min(_RETRY_S, deadline.left))

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Heartbeat:
    """Tells the coordinator that the job lives: a thread with a connection of its own, so that a heartbeat
    never waits for an answer. connect: a channel to the coordinator within a deadline; status: what is told
    with each heartbeat."""

    def __init__(
        self, connect: Callable[[Deadline], Channel], status: Callable[[], dict[str, Any]]
    ):
        self._connect, self._status = connect, status
        self._ended, self._again = threading.Event(), threading.Event()
        self._why = ""
        self._thread = threading.Thread(target=self._run, name="holmes-heartbeat", daemon=True)
        self._thread.start()

    def now(self) -> None:
        """The coordinator is a new one: tell it at once."""
        self._again.set()

    def close(self, why: str) -> None:
        """Say that the job ends."""
        self._why = why
        self._ended.set()
        self._again.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        channel: Channel | None = None
        while not self._ended.is_set():
            channel = self._beat(channel, {})
            self._again.wait(HEARTBEAT_S)
            self._again.clear()
        if channel is not None and self._why:
            channel = self._beat(channel, {"ends": self._why})
        if channel is not None:
            channel.close()

    def _beat(self, channel: Channel | None, more: dict[str, Any]) -> Channel | None:
        """The channel for the next one; None where this one did not go."""
        deadline = Deadline(_HEARTBEAT_S, "a heartbeat")
        try:
            channel = channel or self._connect(deadline)
            channel.send({**self._status(), **more}, deadline)
            return channel
        except (OSError, HolmesError):
            if channel is not None:
                channel.close()
            return None


def ask_status(
    host: str, port: int, credentials: Credentials, timeout_s: float = HANDSHAKE_S
) -> dict[str, Any]:
    """What the coordinator says of the run; HolmesError when it cannot be reached or refuses."""
    where, deadline = address_text(host, port), Deadline(timeout_s, "the coordinator's answer")
    try:
        channel = call(host, port, credentials, {"purpose": "status"}, deadline)
    except OSError as error:
        raise HolmesError(
            f"no coordinator answers at {where} ({why(error)}); is `holmes join serve` running there?"
        ) from None
    try:
        return channel.receive(deadline)
    except OSError as error:
        raise HolmesError(
            f"the coordinator at {where} broke off ({why(error)}); ask again"
        ) from None
    finally:
        channel.close()
