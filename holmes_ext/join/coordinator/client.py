"""Client of the coordinator of joined jobs, used by rank 0 of each job. Needs no torch.

Joined jobs train one model together over a WAN; the coordinator decides when they exchange pseudo-gradients.
The coordinator may be restarted at any time, so the client repeats a request until its deadline:

1. Connect, if there is no connection.
2. Send `hello` (the description of the job), if the coordinator does not know the job (yet, or any more).
3. Send the request. The verdict "wait" means that nothing is decided yet: send it again.

A heartbeat thread with its own connection reports every HEARTBEAT_S seconds that the job is alive.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, JoinPlace
from holmes_ext.join.coordinator.state import HEARTBEAT_S
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import (
    HANDSHAKE_S,
    Credentials,
    NotAuthentic,
    Refused,
    call,
    printable,
)
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import address_text
from holmes_ext.words import why

T = TypeVar("T")
#: Seconds after which the coordinator answers an undecided request with "wait".
POLL_S = 1.0
#: The same for a request of rounds=async: by then, the job may have something new to offer.
IDLE_S = 0.2
#: Seconds between two attempts to reach a coordinator that is not there.
_RETRY_S = 0.5
#: Seconds that a request of a job in training still waits after another process has answered at the
#: coordinator's address.
_IMPOSTOR_S = 2.0
#: Seconds that a reply may take beyond POLL_S, until the connection counts as lost.
_SLOW_S = 10.0
#: Bytes of the longest reply: the shard maps of a job with thousands of ranks.
_LONGEST = 64 * 2**20
#: Seconds that one heartbeat may take, including a new connection if it needs one.
_HEARTBEAT_S = 5.0
#: Seconds that close() waits for the last heartbeat.
_LAST_S = 2.0


def new_incarnation() -> str:
    """Return a random text that identifies a start of a job (its incarnation)."""
    return secrets.token_hex(16)


class RoundSalt(NamedTuple):
    """Round number, and random text that jobs must hash into the checksums of their weights.

    The coordinator sends the text shortly before the round. So a job cannot report a checksum that
    it copied earlier: it must have the weights.
    """

    round: int
    salt: str


class CoordinatorClient:
    """Connection of a job to the coordinator, restored whenever it is lost. Not thread-safe.

    If the coordinator refuses a request, the error is raised at once: TLS has proved that the refusal comes
    from the coordinator. If another process answers at the coordinator's address, the address is probably
    wrong: this is raised, too, until the coordinator has accepted a request. Later, such an answer counts
    as no reply, so that another process cannot end training.

    Args:
        place: Address of the coordinator, and the credentials of this job.
        hello: Returns the message `hello` that describes the job; called whenever it must be sent (again).
        incarnation: Name of this start of the job; "": a random one.
    """

    def __init__(
        self, place: JoinPlace, hello: Callable[[], Mapping[str, Any]], incarnation: str = ""
    ):
        self.job = place.address.job
        self.incarnation = incarnation or new_incarnation()
        self._place = place
        self._hello = hello
        self._channel: Channel | None = None
        self._first_channel: Future[Channel] | None = None  # opened by connect_early()
        self._said_hello = False  # on the current connection
        self._accepted = False  # the coordinator has accepted at least one request of this job
        self._heartbeat: Heartbeat | None = None
        #: Whether the coordinator has answered the last message, if only with "wait".
        self.answers = False
        self.salt = RoundSalt(0, "")  # of the next round, from the latest reply

    def ask(self, op: str, document: Mapping[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Send a request and return the coordinator's reply.

        Args:
            op: Name of the request, such as "ready".
            document: The other keys of the request.
            deadline: End of the repetitions: the request is sent again while the reply is missing or "wait".

        Raises:
            Refused: The coordinator rejects the request. Or an impostor answers at its address, before
                the coordinator has accepted any request of this job; after that, an impostor's answer
                counts as no reply.
            TimeoutError: No reply came before the deadline.
        """
        reason = "it did not answer"
        seconds = deadline.seconds
        while not deadline.passed:
            try:
                if self._channel is None:
                    self._channel = self._take_early_channel() or self.connect("job", deadline)
                    self._said_hello = False
                if not self._said_hello:
                    self._say_hello(deadline)
                    continue  # if the reply was "wait", `_said_hello` is False: repeat the hello first
                reply = self._exchange({"op": op, **document}, deadline)
                verdict = reply.get("verdict")
                if verdict == "hello":  # the coordinator was restarted, or has given up the job
                    self._said_hello = False
                elif verdict != "wait":
                    self._accepted = True
                    return reply
                # Otherwise nothing is decided yet, and the request is repeated.
            except NotAuthentic as error:
                if not self._accepted:
                    raise
                # An impostor at the coordinator's address must not end training, nor stall it for long.
                reason = str(error)
                deadline = deadline.part(_IMPOSTOR_S, deadline.operation)
                self._disconnect_and_pause(deadline)
            except Refused:
                self._drop()
                raise
            except OSError as error:
                reason = why(error)
                self._disconnect_and_pause(deadline)
        address = address_text(self._place.address.host, self._place.address.port)
        raise TimeoutError(
            f"the coordinator at {address} did not answer {op!r} in {seconds:.3g} s ({reason})"
        )

    @property
    def is_away(self) -> bool:
        """Return whether the heartbeat thread has no connection to the coordinator.

        The thread has none from its start to its first connection, and from a call of look_again() until
        it has opened a new one. Without a heartbeat thread, the result is always False.
        """
        return self._heartbeat is not None and not self._heartbeat.is_connected

    def look_again(self) -> None:
        """Make the heartbeat thread open a new connection to the coordinator, in the background.

        Called after a request has failed. Until the new connection is open, is_away() returns True, so
        callers need not send further requests that would only time out.
        """
        if self._heartbeat is not None:
            self._heartbeat.reconnect()

    def connect_early(self, opened: Future[Channel] | None = None) -> None:
        """Begin to connect in the background; the first ask() uses the connection.

        Over a WAN, connecting takes several round trips; meanwhile the caller can prepare its hello. If the
        connection cannot be opened, ask() tries again, and reports the error.

        Args:
            opened: Connection for this incarnation of the job that is being opened already; None: open one.
        """
        if opened is None:
            deadline = Deadline(HANDSHAKE_S, "the coordinator's handshake")
            opened = in_thread(lambda: self.connect("job", deadline), "holmes-connect")
        self._first_channel = opened

    def start_heartbeat(self, status: Callable[[], dict[str, Any]]) -> None:
        """Start the heartbeat thread; each heartbeat contains the telemetry that `status` returns."""
        self._heartbeat = Heartbeat(lambda deadline: self.connect("heartbeat", deadline), status)

    def close(self, why: str) -> None:
        """Close the connections, after a last heartbeat that says why the job ends.

        Args:
            why: Reason for the coordinator's log; "": send none, so that the job seems to be lost.
        """
        if self._heartbeat is not None:
            self._heartbeat.close(why)
        self._drop()

    def connect(self, purpose: str, deadline: Deadline) -> Channel:
        """Open another authenticated connection to the coordinator.

        Args:
            purpose: Use of the connection: "job" (requests) or "heartbeat".
            deadline: The connection must be open by then.

        Raises:
            OSError: The coordinator was not reached before the deadline.
            Refused: The coordinator rejected this job.
        """
        identity = {"job": self.job, "incarnation": self.incarnation}
        part = deadline.part(HANDSHAKE_S, "the coordinator's handshake")
        return self._place.call({"purpose": purpose, **identity}, part)

    def _take_early_channel(self) -> Channel | None:
        """Return the connection that connect_early() opens, after waiting until it is open.

        Returns:
            None if connect_early() was not called, or could not connect, or the connection was closed. Later
            calls return None, too: the connection belongs to the first caller.
        """
        first_channel = self._first_channel
        self._first_channel = None
        if first_channel is None or first_channel.exception() is not None:
            return None
        channel = first_channel.result()
        if not channel.idle():  # closed by the coordinator, if it was opened long ago
            channel.close()
            return None
        return channel

    def _say_hello(self, deadline: Deadline) -> None:
        """Describe this job to the coordinator; set `_said_hello` if the coordinator accepts it.

        The verdict "wait" means that the coordinator has not decided yet. Then `_said_hello` stays
        False, and ask() says hello again.

        Raises:
            Refused: The coordinator rejects the job.
            OSError: The connection is lost.
        """
        reply = self._exchange({"op": "hello", **self._hello()}, deadline)
        self._said_hello = reply.get("verdict") != "wait"
        if self._said_hello and self._heartbeat is not None:
            self._heartbeat.now()  # a restarted coordinator must know at once that the job lives

    def _exchange(self, document: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Send a document on the open connection and return the reply to it.

        Replies also contain the salt of the next round, which becomes `self.salt`: a random text
        that goes into the checksum of the job's weights, so that no job can report a checksum that
        it has copied from another. The job needs the salt before it asks for that round, so every
        reply contains it. The list of revoked certificates is in the replies, too.

        Raises:
            Refused: The reply is an error.
            OSError: The connection is lost.
        """
        assert self._channel is not None
        # The coordinator answers within POLL_S, if only with "wait"; _SLOW_S is for the network.
        part = deadline.part(POLL_S + _SLOW_S, "the coordinator's answer")
        self._channel.send(document, part)
        reply = self._channel.receive(part, _LONGEST)
        self.answers = True
        if "error" in reply:
            raise Refused(printable(str(reply["error"])))
        if "revoked" in reply:
            self._place.credentials.revoke(map(str, reply["revoked"]))
        match reply.get("salt_of_next"):  # [number of the round, salt]
            case [int(number), str(salt)]:  # anything else is malformed: keep the previous salt
                self.salt = RoundSalt(number, salt)
        return reply

    def _disconnect_and_pause(self, deadline: Deadline) -> None:
        """Close the connection, and wait a moment before ask() opens another one."""
        self.answers = False
        self._drop()
        time.sleep(min(_RETRY_S, deadline.left))

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class Heartbeat:
    """Thread that reports to the coordinator every HEARTBEAT_S seconds that the job is alive.

    It has its own connection, because requests may block until other jobs are ready.

    Args:
        connect: Opens an authenticated connection to the coordinator before a deadline. Called for the
            first heartbeat, and whenever the last connection was lost.
        status: Returns the telemetry that each heartbeat contains: name -> value, such as `step`.
    """

    def __init__(
        self, connect: Callable[[Deadline], Channel], status: Callable[[], dict[str, Any]]
    ):
        self._connect = connect
        self._status = status
        self._ended = threading.Event()
        self._wake = threading.Event()
        #: Whether a connection was opened since the last call of reconnect(). Only this proves that the
        #: coordinator can be reached: a heartbeat that was sent may still be in a buffer of this host.
        self.is_connected = False
        self._must_reconnect = False
        self._end_reason = ""
        self._thread = threading.Thread(target=self._run, name="holmes-heartbeat", daemon=True)
        self._thread.start()

    def now(self) -> None:
        """Send a heartbeat without waiting for its time, because the coordinator was restarted."""
        self._wake.set()

    def reconnect(self) -> None:
        """Replace the connection of the heartbeats by a new one; the thread tries this repeatedly."""
        self.is_connected = False
        self._must_reconnect = True
        self._wake.set()

    def close(self, why: str) -> None:
        """Stop the thread; unless `why` is empty, send it in a last heartbeat as the job's reason."""
        self._end_reason = why
        self._ended.set()
        self._wake.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        """Send heartbeats until the thread is stopped, then a last heartbeat with the reason.

        _send_heartbeat() opens a connection if there is none. If it fails, it returns None, and the next
        heartbeat needs a new connection.
        """
        channel: Channel | None = None
        while not self._ended.is_set():
            if self._must_reconnect and channel is not None:
                channel.close()
                channel = None
            self._must_reconnect = False
            channel = self._send_heartbeat(channel)
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
        if channel is not None and self._end_reason:
            channel = self._send_heartbeat(channel, ends=self._end_reason)
        if channel is not None:
            channel.close()

    def _send_heartbeat(self, channel: Channel | None, **further_keys: str) -> Channel | None:
        """Send a heartbeat, on a new connection if there is none.

        Args:
            channel: Connection of the previous heartbeat, if it still works.
            further_keys: Added to the telemetry, such as `ends`, the reason why the job ends.

        Returns:
            The connection for the next heartbeat; None if sending failed.
        """
        deadline = Deadline(_HEARTBEAT_S, "a heartbeat")
        try:
            if channel is None:
                channel = self._connect(deadline)
                # Another thread may have called reconnect() while this connection was opened. Then the
                # connection may be older than that call, and the next heartbeat opens another one.
                self.is_connected = not self._must_reconnect
            channel.send({**self._status(), **further_keys}, deadline)
            return channel
        except (OSError, HolmesError):
            if channel is not None:
                channel.close()
            return None


def in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a daemon thread, and return a future with its result or error.

    Args:
        function: The function.
        name: Name of the thread.
    """
    future: Future[T] = Future()

    def call_function() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
            future.set_exception(error)

    threading.Thread(target=call_function, name=name, daemon=True).start()
    return future


def repeat_until_reached(contact: Callable[[], T], address: JoinAddress, deadline: Deadline) -> T:
    """Call a function that contacts the coordinator, again and again until the coordinator is reached.

    Args:
        contact: The function; raises OSError if the coordinator is not reached.
        address: Address of the coordinator, for the error message.
        deadline: End of the repetitions.

    Returns:
        The result of the function.

    Raises:
        HolmesError: The coordinator was not reached before the deadline, or the function raised this error.
    """
    while True:
        try:
            return contact()
        except OSError as error:
            if deadline.left <= _RETRY_S:
                raise _unreachable(address.host, address.port, error) from None
        time.sleep(_RETRY_S)


def ask_status(
    host: str, port: int, credentials: Credentials, timeout_s: float = HANDSHAKE_S
) -> dict[str, Any]:
    """Return the state of a run, as its coordinator reports it: the result of CoordinatorServer.status().

    Args:
        host: Host of the coordinator.
        port: Port of the coordinator.
        credentials: A certificate of the run: that of a job, or of the coordinator.
        timeout_s: Longest wait for the reply, in seconds.

    Raises:
        HolmesError: The coordinator cannot be reached, or rejects the certificate.
    """
    try:
        return read_status(host, port, credentials, timeout_s)
    except OSError as error:
        raise _unreachable(host, port, error) from None


def read_status(
    host: str, port: int, credentials: Credentials, timeout_s: float = HANDSHAKE_S
) -> dict[str, Any]:
    """Return the state of a run like ask_status(), but raise OSError if the coordinator is not reached.

    Raises:
        OSError: The coordinator cannot be reached; another call may succeed.
        Refused: The coordinator rejects the certificate.
    """
    deadline = Deadline(timeout_s, "the coordinator's answer")
    name = credentials.coordinator_name(host)
    channel = call(host, port, credentials, name, {"purpose": "status"}, deadline)
    try:
        return channel.receive(deadline)
    finally:
        channel.close()


def _unreachable(host: str, port: int, error: OSError) -> HolmesError:
    return HolmesError(
        f"no coordinator answers at {address_text(host, port)} ({why(error)}); is `holmes join serve`"
        " running there?"
    )
