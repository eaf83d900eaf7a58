"""Requests that the coordinator receives from jobs, and replies, within limits of time and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holmes_ext.join.address import without_loopback
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.memory import MemoryBudget
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import shares_host

#: Seconds without a message after which a connection is closed; jobs send far more often.
SILENCE_S = 3600.0
#: Seconds to send a reply.
ANSWER_S = 60.0
#: Bytes of the longest request: the shard maps of a job with thousands of ranks.
_LONGEST = 2**24
#: Bytes of the longest heartbeat.
_LONGEST_HEARTBEAT = 2**14
#: Bytes that the requests and replies under way may hold: of each job, and in all.
_MOST_OF_JOB = 96 * 2**20
_MOST_IN_ALL = 256 * 2**20


def request_memory() -> MemoryBudget:
    """Return the limits of the memory that requests and replies of all jobs may hold."""
    return MemoryBudget(_MOST_IN_ALL, _MOST_OF_JOB)


def receive_heartbeat(channel: Channel) -> dict[str, Any]:
    """Wait for the next heartbeat of a job, and return it.

    Returns:
        "round" and "step" of the job, its telemetry, and "ends" (the reason) if the job ends.

    Raises:
        TimeoutError: No heartbeat came within SILENCE_S seconds.
        OSError: The connection is lost.
    """
    return channel.receive(Deadline(SILENCE_S, "a heartbeat"), _LONGEST_HEARTBEAT)


def answer_request(
    channel: Channel,
    job: str,
    memory: MemoryBudget,
    reply_to: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Wait for a request of a job, and send the reply.

    Until the reply is sent, the memory of request and reply counts against the limits of the job. If the job
    runs on another host, loopback addresses of ranks are removed from request and reply: such an address has
    a meaning only on its own host.

    Args:
        channel: Connection to the job.
        job: Name of the job.
        memory: Limits of the memory of all requests and replies.
        reply_to: Returns the reply to a request.

    Raises:
        MemoryExhausted: The request or the reply would exceed a limit.
        OSError: The connection is lost.
    """
    is_elsewhere = not shares_host(channel.socket)
    with memory.reservation(job, channel.cut) as reserved:
        deadline = Deadline(SILENCE_S, "a question")
        request = channel.receive(deadline, _LONGEST, reserved.grow)
        if is_elsewhere:
            request = without_loopback(request)
        reply = reply_to(request)
        if is_elsewhere:
            reply = without_loopback(reply)
        channel.send(reply, Deadline(ANSWER_S, "an answer"), reserved.grow)
