"""A job's side of the coordinator: asked by its rank 0. Needs no torch. The coordinator may go and come back:
questions are asked again, until their deadline."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.address import incarnation_of
from holmes_ext.runtime.outer.coordinator.heartbeat import Heartbeat
from holmes_ext.runtime.sockets.addresses import address_text
from holmes_ext.runtime.sockets.channel import Channel
from holmes_ext.runtime.sockets.deadline import Deadline
from holmes_ext.runtime.sockets.handshake import HANDSHAKE_S, Credentials, Refused, call, printable
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


class CoordinatorClient:
    """hello: makes the document of the job's hello whenever it has to be said (again). Not for several
    threads at a time.

    What the coordinator refuses at first is an error of the user's. Once it has accepted the job, nobody who
    answers in its place can end it: then a refusal is the same as no answer.
    """

    def __init__(
        self,
        job: str,
        host: str,
        port: int,
        credentials: Credentials,
        hello: Callable[[], Mapping[str, Any]],
        secret: str = "",
    ):
        self._secret = secret or secrets.token_hex(16)
        self.job, self.incarnation = job, incarnation_of(self._secret)
        self._where, self._credentials, self._hello = (host, port), credentials, hello
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
        where = address_text(*self._where)
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
        return call(*self._where, self._credentials, {"purpose": purpose, **identity}, part)

    def _exchange(self, document: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Refused when the answer is an error."""
        assert self._channel is not None
        part = deadline.part(POLL_S + _SLOW_S, "the coordinator's answer")
        self._channel.send(document, part)
        reply = self._channel.receive(part, _LONGEST)
        if "error" in reply:
            raise Refused(printable(str(reply["error"])))
        salt = reply.get("salt_of_next")
        if (
            isinstance(salt, list)
            and len(salt) == 2
            and isinstance(salt[0], int)
            and isinstance(salt[1], str)
        ):
            self.salt = salt[0], salt[1]
        return reply

    def _try_again_later(self, deadline: Deadline) -> None:
        self._drop()
        time.sleep(min(_RETRY_S, deadline.left))

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


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
        raise HolmesError(f"the coordinator at {where} broke off ({why(error)}); ask again") from None
    finally:
        channel.close()
