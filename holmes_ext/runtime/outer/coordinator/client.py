"""A job's side of the coordinator: asked by its rank 0. Needs no torch. The coordinator may go and come back:
questions are asked again."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.member import HEARTBEAT_S
from holmes_ext.runtime.outer.coordinator.server import POLL_S
from holmes_ext.runtime.outer.coordinator.wire import Line, Refused, call

#: Seconds between two tries to reach a coordinator that is not there.
_RETRY_S = 0.5
#: Seconds that an answer may take beyond the time that the coordinator waits by itself.
_PATIENCE_S = 15.0


class CoordinatorClient:
    """hello: makes the document of the job's hello whenever it has to be said (again). Not for several threads at a
    time."""

    def __init__(
        self,
        job: str,
        host: str,
        port: int,
        token: str,
        hello: Callable[[], Mapping[str, Any]],
        incarnation: str = "",
    ):
        self.job, self.incarnation = job, incarnation or secrets.token_hex(8)
        self._where, self._token, self._hello = (host, port), token, hello
        self._line: Line | None = None
        self._said_hello = False
        self._heartbeat: _Heartbeat | None = None

    def ask(self, op: str, document: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to a question. HolmesError when it is an error, TimeoutError when `deadline` (time.monotonic())
        passes without one."""
        while True:
            try:
                if self._line is None:
                    self._line = call(*self._where, self._token, {"purpose": "job", "job": self.job})
                    self._said_hello = False
                if not self._said_hello and op != "maps":
                    reply = self._exchange(
                        {"op": "hello", "job": self.job, "incarnation": self.incarnation, **self._hello()}
                    )
                    self._said_hello = reply.get("verdict") != "wait"
                    if self._said_hello and self._heartbeat is not None:
                        self._heartbeat.connect()
                else:
                    reply = self._exchange({"op": op, "job": self.job, **document})
                    if reply.get("verdict") == "hello":
                        self._said_hello = False
                    elif reply.get("verdict") != "wait":
                        return reply
            except Refused:
                raise
            except OSError:
                self._drop()
                time.sleep(_RETRY_S)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the coordinator at {self._where[0]}:{self._where[1]} did not answer {op!r} in time"
                )

    def heartbeat(self, told: Callable[[], dict[str, Any]]) -> None:
        """From now on: a heartbeat every HEARTBEAT_S seconds, with what `told` says."""
        self._heartbeat = _Heartbeat(self, told)

    def close(self, why: str) -> None:
        """Say that the job ends."""
        if self._heartbeat is not None:
            self._heartbeat.close(why)
        self._drop()

    def _exchange(self, document: dict[str, Any]) -> dict[str, Any]:
        assert self._line is not None
        self._line.send(document)
        reply = self._line.receive(POLL_S + _PATIENCE_S)
        if "error" in reply:
            raise HolmesError(str(reply["error"]))
        return reply

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


class _Heartbeat:
    """A thread with a line of its own, so that a heartbeat never waits for an answer."""

    def __init__(self, owner: CoordinatorClient, told: Callable[[], dict[str, Any]]):
        self._owner, self._told = owner, told
        self._ended = threading.Event()
        self._again = threading.Event()
        self._why = ""
        self._thread = threading.Thread(target=self._run, name="holmes-heartbeat", daemon=True)
        self._thread.start()

    def connect(self) -> None:
        """The coordinator is a new one: heartbeat at once."""
        self._again.set()

    def close(self, why: str) -> None:
        self._why = why
        self._ended.set()
        self._again.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        line = None
        while not self._ended.is_set():
            try:
                if line is None:
                    line = call(
                        *self._owner._where,
                        self._owner._token,
                        {
                            "purpose": "heartbeat",
                            "job": self._owner.job,
                            "incarnation": self._owner.incarnation,
                        },
                        5.0,
                    )
                line.send(self._told())
            except (OSError, HolmesError):
                if line is not None:
                    line.close()
                line = None
            self._again.wait(HEARTBEAT_S)
            self._again.clear()
        if line is not None:
            try:
                line.send({**self._told(), "ends": self._why})
            except OSError:
                pass
            line.close()


def ask_status(host: str, port: int, token: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """What the coordinator says of the run; HolmesError when it cannot be reached or refuses."""
    try:
        line = call(host, port, token, {"purpose": "status"}, timeout_s)
    except Refused:
        raise
    except OSError as error:
        raise HolmesError(
            f"no coordinator answers at {host}:{port} ({error}); is `holmes join serve` running there?"
        ) from None
    try:
        return line.receive(timeout_s)
    except OSError as error:
        raise HolmesError(f"the coordinator at {host}:{port} broke off ({error}); ask again") from None
    finally:
        line.close()
