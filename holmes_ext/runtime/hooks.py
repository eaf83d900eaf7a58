"""The functions of extensions that the running job calls (holmes_ext.extensions.HOOKS).

The lists are filled when holmes starts (activate) and emptied when it stops. They are empty in a job whose
extensions have nothing to do, so the job does not import them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.plan.traffic import ReductionSpec
    from holmes_ext.runtime.measure.stage import Stage
    from holmes_ext.runtime.reduce.reduction import Reduction
    from holmes_ext.runtime.session import Session

_functions: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)


def activate(functions: Mapping[str, list[Callable[..., Any]]]) -> None:
    """Register functions of extensions.

    Args:
        functions: Name of a hook in holmes_ext.extensions.HOOKS -> functions that are called there.
    """
    _functions.update(functions)


def deactivate(reason: str) -> None:
    """Call the on_stop functions of extensions with `reason`, and remove all functions."""
    for function in list(_functions["on_stop"]):
        function(reason)
    _functions.clear()


def follow_steps() -> bool:
    """Return whether the times of training steps must be measured: an extension has an on_step function."""
    return bool(_functions["on_step"])


def on_start(current: Session) -> list[str]:
    """Call the on_start functions of extensions, and return their lines for the user."""
    lines = []
    for function in _functions["on_start"]:
        lines += function(current)
    return lines


def on_ready(current: Session) -> None:
    """Call the on_ready functions of extensions, when holmes has started; they may end the program."""
    for function in list(_functions["on_ready"]):
        function(current)


def on_step(
    current: Session,
    sizes: Sizes,
    micro_batches: int,
    network_api: str,
    describe: Callable[[], Stage],
) -> None:
    """Call the on_step functions of extensions, because a training step of a pipeline begins.

    All ranks call this in the same order.

    Args:
        current: The session of this process.
        sizes: The parallel sizes of the job, including the data-parallel size.
        micro_batches: Number of micro-batches of the step.
        network_api: How the pipeline's groups reach the network: "verbs" or "sockets".
        describe: Returns the pipeline stage of this rank, as its training engine (Megatron, DeepSpeed) has
            it: number of the stage, micro-batches, bytes of gradients. A function, because only some
            extensions need this, and only in the first step.
    """
    for function in _functions["on_step"]:
        function(current, sizes, micro_batches, network_api, describe)


def on_reduction(
    current: Session, ranks: tuple[int, ...], network_api: str, reducer: object
) -> None:
    """Call the on_reduction functions of extensions before gradients are reduced over `ranks`.

    Args:
        current: The session of this process.
        ranks: Members of the process group.
        network_api: How the group reaches the network: "verbs" (NCCL) or "sockets" (gloo).
        reducer: The PlannedReduction that sums the gradients.
    """
    for function in _functions["on_reduction"]:
        function(current, ranks, network_api, reducer)


def reduction_for(group: Any, size: int, spec: ReductionSpec, device_type: str) -> Reduction | None:
    """Return the reduction that an extension makes for a group; None if no extension makes one.

    DistributedDataParallel and GradientReducer call it for every group that has a plan, also for a group
    inside a cluster. If the result is None, they use holmes's own reduction. DeepSpeed's own buckets are
    reduced without it; only its pipeline engine with an overlapped reduction uses GradientReducer.

    All ranks of the group must call this function.

    Args:
        group: The process group.
        size: Bytes of gradients that the group sums in a step.
        spec: The planned reduction of the group's gradients, a holmes_ext.plan.traffic.ReductionSpec:
            clusters, chunk size, algorithm between clusters (`across`), compression, overlap.
        device_type: Device of the gradients, "cpu" or "cuda"; "" for the GPU if the host has a GPU, else the
            CPU.
    """
    for make in _functions["reductions"]:  # each returns a Reduction, or None
        reduction: Reduction | None = make(group, size, spec, device_type)
        if reduction is not None:
            return reduction
    return None


def on_checkpoint() -> None:
    """Call the on_checkpoint functions of extensions: this rank has written its part of a checkpoint."""
    for function in _functions["on_checkpoint"]:
        function()
