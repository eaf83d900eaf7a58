"""Counts training steps by the steps of torch's optimizers, of which a training step may have several.

    DeepSpeed, ZeRO 1 and 2         one optimizer, stepped once for each of its parameter groups
    megatron-core, torchtitan       an optimizer for each part of the model

Each optimizer step calls torch's hooks, so a hook alone would count too many training steps.
"""

from __future__ import annotations

import weakref
from typing import Any


class StepCounter:
    """Counts those optimizer steps as training steps that update one chosen parameter, the leader.

    A training step updates each parameter once. Therefore the updates of a single parameter count the
    training steps. The first parameter that an optimizer steps becomes the leader. If another parameter is
    stepped twice and the leader is not stepped in between, the leader's optimizer steps more rarely than that
    of the other parameter, or no longer. Then the other parameter becomes the leader.

    Parameters are identified, not optimizers: DeepSpeed steps one optimizer several times a training step.
    """

    def __init__(self) -> None:
        # Weak references: the counter lives as long as the job and must not keep the memory of a model that
        # the program deleted. If the leader was deleted, the next parameter becomes the leader.
        self._leader: weakref.ref[Any] | None = None
        self._stepped_since_leader: list[weakref.ref[Any]] = []

    def ends_step(self, optimizer: Any) -> bool:
        """Return whether this step of `optimizer` counts as a training step.

        It must be called exactly once for each optimizer step.
        """
        parameter = _first_parameter(optimizer)
        leader = self._leader() if self._leader is not None else None
        is_stepped_again = any(other() is parameter for other in self._stepped_since_leader)
        if leader is None or is_stepped_again:
            leader = parameter
            self._leader = weakref.ref(parameter)
        if parameter is leader:
            self._stepped_since_leader.clear()
            return True
        self._stepped_since_leader.append(weakref.ref(parameter))
        return False


def _first_parameter(optimizer: Any) -> Any:
    """Return the first parameter of the groups that the optimizer has now, or the optimizer if it has none.

    A parameter identifies a step better than a group: loading an optimizer's state replaces the groups.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter
    return optimizer
