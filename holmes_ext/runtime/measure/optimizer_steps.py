"""Counts training steps by the steps of torch's optimizers, of which a training step may have several.

    DeepSpeed, ZeRO 1 and 2         one optimizer, stepped once for each of its parameter groups
    megatron-core, torchtitan       an optimizer for each part of the model

Each of these calls torch's hooks, so a hook alone would count too many steps.
"""

from __future__ import annotations

import weakref
from typing import Any


class StepCounter:
    """Finds the optimizer step that ends a training step: those of one leading parameter.

    The leader is the parameter that is stepped first. Another takes its place if it is stepped twice without
    the leader: then the leader belongs to an optimizer that steps more rarely, or no more.
    """

    def __init__(self) -> None:
        # Weak: a counter must not keep the memory of a model that is gone.
        self._leader: weakref.ref[Any] | None = None
        self._others: list[weakref.ref[Any]] = []  # stepped since the leader's last step

    def ends_step(self, optimizer: Any) -> bool:
        """Return whether this step of `optimizer` ends a training step. Call it once for each step."""
        parameter = _first_parameter(optimizer)
        leader = self._leader() if self._leader is not None else None
        if leader is None or any(other() is parameter for other in self._others):
            leader = parameter
            self._leader = weakref.ref(parameter)
        if parameter is not leader:
            self._others.append(weakref.ref(parameter))
            return False
        self._others.clear()
        return True


def _first_parameter(optimizer: Any) -> Any:
    """Return the first parameter that the optimizer steps now, or the optimizer if it has none.

    Parameters keep their identity when an optimizer's state is loaded; its groups do not.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter
    return optimizer
