"""Two helpers of telemetry: offsets between the clocks of nodes (ask, answer), and a counter of steps.

1. Offsets. The offset of a node's clock from that of rank 0's node is measured by messages through the job's
key-value store (Cristian's algorithm):

    node n reads its clock: a          sets ask/n/i
    rank 0 reads its clock: t          sets answer/n/i to t
    node n reads its clock: b          offset = t - (a + b) / 2, wrong by at most (b - a) / 2

The question with the shortest round trip counts. Only the first process of each node asks, because all
processes of a node have the same monotonic clock.

The formula assumes that a question and its answer take equally long. This holds if rank 0 runs on the node
that hosts the store: the node of the process that the launcher numbered 0. holmes may give the number 0 to
a process of another node. Then the offset is still wrong by at most (b - a) / 2.

2. Training steps. They are counted by the calls of torch's optimizer hooks. torch calls the hooks at every
step of every optimizer, but a training step may contain several optimizer steps:

    DeepSpeed, ZeRO 1 and 2      steps its single optimizer once for each parameter group
    megatron-core, torchtitan    have an optimizer for each part of the model

So the number of calls can be a multiple of the number of training steps. `StepCounter` says at each call
whether it counts as a training step.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple


class StepCounter:
    """Counter of training steps: decides whether a step of a torch optimizer counts as a training step.

    A training step may consist of several optimizer steps, but updates each parameter once. Therefore the
    counter chooses a parameter, called the leader, and counts the optimizer steps that update it.

    The first parameter that is updated becomes the leader. Another parameter replaces it if it is updated
    twice without an update of the leader in between: then the leader is updated more rarely than other
    parameters, or no longer.
    """

    def __init__(self) -> None:
        """Create a counter of training steps that has not seen any optimizer step."""
        # Weak references: the counter lives as long as the job and must not keep the memory of a model that
        # the program deleted. If the leader was deleted, the next parameter becomes the leader.
        self._leader: weakref.ref[Any] | None = None
        self._updated_since_leader: list[weakref.ref[Any]] = []  # other parameters

    def ends_step(self, optimizer: Any) -> bool:
        """Return whether the step that `optimizer` has just made counts as a training step.

        A training step may consist of several optimizer steps. Only those that update a chosen parameter, the
        leader, count. This method must be called exactly once for each optimizer step.
        """
        # This parameter represents all that this optimizer step has updated.
        parameter = _first_parameter(optimizer)
        leader = None
        if self._leader is not None:
            leader = self._leader()  # None if the program has deleted it

        # This parameter may be updated for the second time without an update of the leader in
        # between. Then the leader is updated in only some training steps, or in none any more.
        # Counting the updates of such a leader would miss training steps.
        is_updated_again = any(other() is parameter for other in self._updated_since_leader)
        if leader is None or is_updated_again:  # this parameter becomes the leader
            leader = parameter
            self._leader = weakref.ref(parameter)
        if parameter is leader:
            self._updated_since_leader.clear()
            return True
        self._updated_since_leader.append(weakref.ref(parameter))
        return False


def _first_parameter(optimizer: Any) -> Any:
    """Return the first parameter in the optimizer's param_groups, or the optimizer if it has no parameters.

    The caller recognizes an optimizer step by this object. The group itself would not do: load_state_dict
    replaces the groups of an optimizer, but keeps its parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter
    return optimizer


QUESTIONS = 5
#: Seconds between two looks for a key that another node will set.
_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1
Clock = Callable[[], float]


class Offset(NamedTuple):
    """Measured time of rank 0's clock minus the time of this node's clock, in seconds.

    ask() measures it. A time of this node plus `offset_s` is the same moment on rank 0's clock.
    """

    offset_s: float  # clock of rank 0's node minus clock of this node
    error_s: float  # the offset is wrong by at most so much: half of the measurement's round trip


def answer(
    store: Any,
    prefix: str,
    nodes: Sequence[int],
    timeout_s: float,
    clock: Clock = time.monotonic,
    ended: threading.Event | None = None,
) -> None:
    """Send the time of rank 0's clock to all other nodes in turn. Rank 0 calls this.

    Each node measures its clock's offset by several questions in ask(). Each question uses a key of the
    store.

    Args:
        store: The job's key-value store.
        prefix: Prefix of the store's keys.
        nodes: Numbers of the other nodes.
        timeout_s: Seconds after which a node that does not ask is skipped.
        clock: The clock of this node.
        ended: When it is set, this function returns; None: never.
    """
    for node in nodes:
        try:
            _await_key(store, f"{prefix}/ask/{node}/0", timeout_s, ended)
            for number in range(QUESTIONS):  # questions of each node
                store.wait([f"{prefix}/ask/{node}/{number}"], timedelta(seconds=timeout_s))
                store.set(f"{prefix}/answer/{node}/{number}", repr(clock()))
        except RuntimeError:  # the store: no question in time
            if ended is not None and ended.is_set():
                return


def _await_key(store: Any, key: str, timeout_s: float, ended: threading.Event | None) -> None:
    """Wait for a key of the store that another node will set, perhaps much later.

    The key is asked for again and again, because a thread that waits inside of the store could not be ended:
    if it came back while the interpreter shuts down, it would abort the process (status 134).

    Args:
        store: The job's key-value store.
        key: The key.
        timeout_s: Seconds to wait.
        ended: When it is set, waiting ends; None: never.

    Raises:
        RuntimeError: the key is not there in time, or waiting has ended, or the store is lost.
    """
    deadline = time.monotonic() + timeout_s
    event = ended or threading.Event()
    pause_s = _SHORTEST_PAUSE_S
    while not store.check([key]):
        if event.wait(pause_s) or time.monotonic() > deadline:
            raise RuntimeError(f"no {key} in the store")
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def ask(
    store: Any,
    prefix: str,
    node: int,
    timeout_s: float,
    clock: Clock = time.monotonic,
    ended: threading.Event | None = None,
) -> Offset:
    """Measure the offset of this node's clock from that of rank 0's node, as NTP does.

    The other clock is taken to have been read in the middle of the round trip. The shortest of several
    trips counts, since its error is the smallest.

    Args:
        store: The job's key-value store.
        prefix: Prefix of the store's keys.
        node: Number of this node.
        timeout_s: Seconds to wait for an answer.
        clock: The clock of this node.
        ended: When it is set, this function raises RuntimeError; None: never.

    Raises:
        RuntimeError: Rank 0 does not answer in time.
    """
    shortest_trip_s = float("inf")
    offset_s = 0.0
    for number in range(QUESTIONS):
        asked_at = clock()
        store.set(f"{prefix}/ask/{node}/{number}", "")
        if number == 0:  # rank 0 may answer other nodes first
            _await_key(store, f"{prefix}/answer/{node}/0", timeout_s, ended)
        store.wait([f"{prefix}/answer/{node}/{number}"], timedelta(seconds=timeout_s))
        remote_time = float(store.get(f"{prefix}/answer/{node}/{number}"))
        answered_at = clock()
        if number == 0:  # rank 0 may have answered other nodes before, so this trip is too long
            continue
        trip_s = answered_at - asked_at
        new_offset_s = remote_time - (asked_at + answered_at) / 2
        if (trip_s, new_offset_s) < (shortest_trip_s, offset_s):  # the offset only decides a tie
            shortest_trip_s = trip_s
            offset_s = new_offset_s
    return Offset(offset_s, error_s=shortest_trip_s / 2)
