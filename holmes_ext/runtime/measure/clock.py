"""How far this node's clock is from rank 0's, by questions and answers over the job's store.

    node n:  ask/n/i = ""   at a             rank 0:  answer/n/i = its clock t      node n:  reads it at b
    offset = t - (a + b) / 2, wrong by at most (b - a) / 2; the question with the shortest round trip counts

Only each node's first process asks: all processes of a node have one monotonic clock. The store's server is
on the launcher's rank 0, so there and back take equally long when rank 0 stayed where it was.

Counts the training steps of a job by the calls of torch's optimizer hooks.

torch calls the hooks at every step of every optimizer, but one training step may contain several of these:

    DeepSpeed, ZeRO 1 and 2      steps its single optimizer once for each parameter group
    megatron-core, torchtitan    have an optimizer for each part of the model

So the number of calls can be a multiple of the number of training steps. `StepCounter` says at each call
whether it counts as a training step.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any


class StepCounter:
    """Decides which steps of torch's optimizers count as training steps.

    A training step may consist of several optimizer steps, but updates each parameter once. Therefore the
    counter chooses one parameter, called the leader, and counts the optimizer steps that update it.

    The first parameter that is updated becomes the leader. Another parameter replaces it if it is updated
    twice without an update of the leader in between: then the leader is updated more rarely than other
    parameters, or no longer.
    """

    def __init__(self) -> None:
        # Weak references: the counter lives as long as the job and must not keep the memory of a model that
        # the program deleted. If the leader was deleted, the next parameter becomes the leader.
        self._leader: weakref.ref[Any] | None = None
        self._updated_since_leader: list[weakref.ref[Any]] = []  # other parameters

    def ends_step(self, optimizer: Any) -> bool:
        """Return whether the step that `optimizer` has just made counts as a training step.

        A training step may consist of several optimizer steps. Only those count that update one chosen
        parameter, the leader. This method must be called exactly once for each optimizer step.
        """
        parameter = _first_parameter(
            optimizer
        )  # stands for all parameters that this optimizer step updated
        leader = (
            self._leader() if self._leader is not None else None
        )  # None if the program deleted it
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
Clock = Callable[[], float]


def answer(
    store: Any, prefix: str, nodes: Sequence[int], timeout_s: float, clock: Clock = time.monotonic
) -> None:
    """Rank 0: answer every node's questions, one after the other; who does not ask in time is left out."""
    for node in nodes:
        try:
            for number in range(QUESTIONS):
                store.wait([f"{prefix}/ask/{node}/{number}"], timedelta(seconds=timeout_s))
                store.set(f"{prefix}/answer/{node}/{number}", repr(clock()))
        except RuntimeError:
            continue


def ask(
    store: Any, prefix: str, node: int, timeout_s: float, clock: Clock = time.monotonic
) -> tuple[float, float]:
    """(offset, error) in seconds: this clock + offset is rank 0's. RuntimeError: nobody answers in time."""
    best = (float("inf"), 0.0)
    for number in range(QUESTIONS):
        asked = clock()
        store.set(f"{prefix}/ask/{node}/{number}", "")
        store.wait([f"{prefix}/answer/{node}/{number}"], timedelta(seconds=timeout_s))
        theirs, now = float(store.get(f"{prefix}/answer/{node}/{number}")), clock()
        if number:  # the first one waits for its turn
            best = min(best, (now - asked, theirs - (asked + now) / 2))
    return best[1], best[0] / 2
