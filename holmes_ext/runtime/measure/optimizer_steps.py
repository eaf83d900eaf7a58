"""Counts the training steps of a job by the calls of torch's optimizer hooks.

torch calls the hooks at every step of every optimizer, but one training step may contain several of these:

    DeepSpeed, ZeRO 1 and 2      steps its single optimizer once for each parameter group
    megatron-core, torchtitan    have an optimizer for each part of the model

So the number of calls can be a multiple of the number of training steps. `StepCounter` says at each call
whether it counts as a training step.
"""

from __future__ import annotations

import weakref
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
        parameter = _first_parameter(optimizer)  # stands for all parameters that this optimizer step updated
        leader = self._leader() if self._leader is not None else None  # None if the program deleted it
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
