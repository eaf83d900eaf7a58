"""The functions of extensions that the running job calls (holmes_ext.extensions.HOOKS).

The lists are filled when holmes starts (activate) and emptied when it stops. They are empty in a job whose
extensions have nothing to do, so the job does not import them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holmes_ext import extensions

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.measure.stage import Stage
    from holmes_ext.runtime.session import Session

_functions: dict[str, list[Callable[..., Any]]] = {name: [] for name in extensions.HOOKS}


def activate(current: Session) -> None:
    """Import the hooks of the extensions that have something to do in this job."""
    for extension in extensions.found().extensions:
        if extension.is_active(current.options) and extension.applies_to(current):
            for name, reference in extension.hooks.items():
                _functions[name].append(extensions.load(reference))


def deactivate(reason: str) -> None:
    """Call on_stop of the extensions with the reason, and forget all hooks."""
    for function in _functions["on_stop"]:
        function(reason)
    for functions in _functions.values():
        functions.clear()


def follow_steps() -> bool:
    """Return whether an extension needs the times of training steps."""
    return bool(_functions["on_step"])


def on_start(current: Session) -> list[str]:
    """Call the extensions after the start; return their lines for the user."""
    return [line for function in _functions["on_start"] for line in function(current)]


def on_step(
    current: Session, sizes: Sizes, micro_batches: int, network_api: str, describe: Callable[[], Stage]
) -> None:
    """Tell the extensions that a training step of a pipeline begins, on all ranks in the same order.

    Args:
        current: The session of this process.
        sizes: The parallel sizes of the job, including the data-parallel size.
        micro_batches: Micro-batches of the step.
        network_api: How the pipeline's groups reach the network: "verbs" or "sockets".
        describe: Returns what the engine does on this rank. It may be called once, in the first step.
    """
    for function in _functions["on_step"]:
        function(current, sizes, micro_batches, network_api, describe)


def on_reduction(current: Session, ranks: tuple[int, ...], network_api: str, reducer: object) -> None:
    """Tell the extensions that a reducer is about to sum the gradients of a step over `ranks`."""
    for function in _functions["on_reduction"]:
        function(current, ranks, network_api, reducer)


def on_checkpoint() -> None:
    """Tell the extensions that this rank's part of a checkpoint is written, and the checkpoint is complete."""
    for function in _functions["on_checkpoint"]:
        function()
