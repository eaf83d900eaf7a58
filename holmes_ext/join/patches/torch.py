"""Lets jobs of plain torch, DistributedDataParallel or FSDP2 train one model together (--holmes-join).

"Joined jobs" train separately for some steps. Then they exchange how far their weights have moved, and apply
the average (DiLoCo, arXiv 2311.08105): an outer step. This file connects them to torch:

    optimizer.step()     Global hooks of torch run before and after each step. Before the first step the job
                         joins the others. After a step, an exchange may begin or end. A step that a
                         GradScaler skips does not count.
    weights              The parameters of the optimizer, in its order. Under FSDP2 (DTensor parameters) each
                         rank exchanges its shard.
    DistributedSampler   Each job reads another part of the data set (--holmes-outer part=k/K).
"""

from __future__ import annotations

from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join import training
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.torch.features import JOINED
from holmes_ext.runtime.session import Session

_hooks: list[Any] = []


def on_start(current: Session) -> list[str]:
    """Begin to count the steps of this process's optimizers; holmes calls this hook at its start.

    Returns:
        Lines to print at the start of the job: none.
    """
    attach()
    return []


def on_stop(reason: str) -> None:
    """Stop counting the optimizers' steps, and leave the run; holmes calls this hook when the job ends.

    Args:
        reason: Why the job ends, for the log of the coordinator.
    """
    detach()
    training.end(reason)


def attach() -> None:
    """Register hooks that torch runs before and after each step of every optimizer of this process.

    Before its first step, the job joins the jobs that train the same model. After a step, an
    exchange of weights with these jobs may begin or end.
    """
    from torch.optim import optimizer

    _hooks.append(optimizer.register_optimizer_step_pre_hook(_before_step))
    _hooks.append(optimizer.register_optimizer_step_post_hook(_after_step))


def detach() -> None:
    """Remove the hooks that attach() has registered."""
    while _hooks:
        _hooks.pop().remove()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Connect to the other jobs before the first optimizer step; later, check the optimizer.

    torch calls this hook before every step of every optimizer.

    Args:
        optimizer: The optimizer that is about to step.
        args: Positional arguments of step(), unused.
        kwargs: Keyword arguments of step(), unused.

    Raises:
        HolmesError: Another optimizer of the program has made a step before.
    """
    from torch.optim import Optimizer

    def device() -> Any:
        """Return the device of the weights."""
        _, first_parameter = _parameters(optimizer)[0]
        return _local(first_parameter).device

    def adapter() -> training.FrameworkAdapter:
        """Describe the weights that the job exchanges. claim() calls this once, before the first step."""
        return training.FrameworkAdapter(
            "torch", weights=lambda: weights_of(optimizer), device=device, optimizer=optimizer
        )

    # claim() makes the first optimizer of the process the owner, and joins the other jobs with its weights.
    # The exchange with these jobs counts the owner's steps only. claim() is True for the owner.
    is_first_optimizer = training.claim(optimizer, adapter)
    # The owner may also be an engine, e.g. DeepSpeed's, that has this optimizer and counts its steps.
    is_owned_by_optimizer = isinstance(training.owner(), Optimizer)
    if not is_first_optimizer and is_owned_by_optimizer:
        raise HolmesError(
            "--holmes-join: the script has two optimizers; jobs of one optimizer can join"
        )


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Count an inner step of the job if `optimizer` is the one that trains it; called after each step."""
    if training.owner() is optimizer:
        training.stepped()  # an exchange with the other jobs may begin or end


def weights_of(optimizer: Any) -> training.WeightShards:
    """Return the weights that this rank exchanges with other jobs that train the same model (--holmes-join).

    These are the optimizer's parameters, or this rank's shards of them.

    Raises:
        HolmesError: The optimizer has no parameters, or this rank's elements of a parameter are not a
            contiguous range of its elements.
    """
    named = _parameters(optimizer)
    if not named:
        raise HolmesError("--holmes-join: the optimizer steps no parameters")
    parts = []  # (name, position of this rank's first element in the parameter, this rank's elements)
    for name, parameter in named:
        local = _local(parameter)
        if not local.is_contiguous():
            raise HolmesError(
                f"--holmes-join: parameter {name} is not contiguous in memory, so jobs cannot join"
            )
        parts.append((name, _offset(name, parameter), local.view(-1)))

    # Addresses at this moment, to notice later that a parameter has moved.
    addresses = [(parameter, _local(parameter).data_ptr()) for _, parameter in named]

    def have_moved() -> bool:
        """Return whether a parameter has moved to other memory since weights_of() was called."""
        return any(_local(parameter).data_ptr() != address for parameter, address in addresses)

    return training.WeightShards(
        position="all ranks",  # there is no model parallelism: all ranks have parts of the same tensors
        tensors=[(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in named],
        parts=parts,
        moved=have_moved,
    )


def _parameters(optimizer: Any) -> list[tuple[str, Any]]:
    """Return (name, parameter) of all parameters of an optimizer that require a gradient.

    The names are those that the program has given to the optimizer, or else like "group 0 parameter 3".
    """
    parameters = []
    for group_number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names")  # those that the program gave, if any
        if not names:
            names = [
                f"group {group_number} parameter {number}" for number in range(len(group["params"]))
            ]
        parameters += [
            (name, parameter)
            for name, parameter in zip(names, group["params"])
            if parameter.requires_grad
        ]
    return parameters


def _local(parameter: Any) -> Any:
    """Return this rank's elements of a parameter: the local shard of a DTensor, or the whole tensor."""
    return getattr(parameter, "_local_tensor", parameter).detach()


def _offset(name: str, parameter: Any) -> int:
    """Return the position, in a flat parameter, of the first element that this rank holds.

    It is 0 for a parameter that is no DTensor: the rank holds all elements.

    Raises:
        HolmesError: The shards are not contiguous ranges of the parameter's elements, or FSDP1 shards it.
    """
    if not hasattr(parameter, "_local_tensor"):
        # FSDP1 changes the size of its flat parameters in each step.
        if hasattr(parameter, "_sharded_size"):
            raise HolmesError(
                "--holmes-join: FSDP1 (FullyShardedDataParallel) cannot join; use fully_shard (FSDP2)"
            )
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = parameter.placements  # of the DTensor
    # The shape of this rank's shard, and the index of its first element in each dimension.
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, placements
    )
    # Partial sums and strided shards are not contiguous ranges of the parameter's elements.
    has_unfit_placement = any(
        placement.is_partial() or "Strided" in type(placement).__name__ for placement in placements
    )
    # Whole rows are contiguous. The shard has whole rows if only its first dimension is smaller.
    is_split_by_rows = tuple(shape[1:]) == tuple(parameter.shape[1:])
    if has_unfit_placement or not is_split_by_rows:
        raise HolmesError(
            f"--holmes-join: parameter {name} is sharded as {placements}; a job can join if its weights"
            " are replicated, or sharded along their first dimension"
        )
    is_scalar = not parameter.dim()
    is_empty = not parameter._local_tensor.numel()
    if is_scalar or is_empty:
        return 0  # there are no rows to count
    first_row = int(offset[0])
    row_length = parameter.numel() // parameter.shape[0]
    return first_row * row_length


@by_name
def _sample_job_part(call, instance, num_replicas, rank):
    """Construct a DistributedSampler that draws only from this job's part of the data set.

    Wrapper of DistributedSampler.__init__; call() runs the original.

    Several jobs may train one model together. If this job has part k of K of the data set (--holmes-outer
    part=k/K), it must draw the samples i with i mod K = k.

    A DistributedSampler deals samples to its replicas in turn: replica j of n draws those with i mod n = j.
    So in a job of R ranks, rank r becomes replica k + K * r of K * R.

    Args:
        call: Runs the original with its arguments; keyword arguments replace some of them.
        instance: The sampler.
        num_replicas: Number of ranks; None: that of the default process group.
        rank: This rank; None: that of the default process group.
    """
    k, part_count = training.data_part()  # (0, 1) without --holmes-outer part=k/K
    if part_count == 1:
        return call()

    import torch.distributed as dist

    # Notes that the job reads its own part. Otherwise holmes warns that the script must divide the data.
    training.mark_data_divided()
    if num_replicas is None:
        num_replicas = dist.get_world_size()
    if rank is None:
        rank = dist.get_rank()
    replica = k + part_count * rank  # k + K * r
    return call(num_replicas=part_count * num_replicas, rank=replica)


PATCHES = (
    Patch(
        JOINED,
        "torch.utils.data.distributed:DistributedSampler.__init__",
        "joined jobs read different parts of one data set",
        _sample_job_part,
    ),
)
