"""Joined jobs of plain torch, DistributedDataParallel, FSDP2 and what is built on them.

    optimizer.step()   before the first: join;   after each: a round may begin or end (torch's global hooks)
    FSDP2              DTensor parameters: each rank exchanges its shard
    DistributedSampler num_replicas K x R, rank k R + r: job k of K reads its part (--holmes-outer part=k/K)

Steps that a GradScaler skips do not count. The row is the optimizer's parameters in its order.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.torch.features import JOINED
from holmes_ext.runtime.outer import training

_hooks: list[Any] = []


def attach() -> None:
    """Look on at every optimizer's steps."""
    from torch.optim import optimizer

    _hooks.append(optimizer.register_optimizer_step_pre_hook(_before))
    _hooks.append(optimizer.register_optimizer_step_post_hook(_after))


def detach() -> None:
    while _hooks:
        _hooks.pop().remove()


def _before(optimizer: Any, args: Any, kwargs: Any) -> None:
    from torch.optim import Optimizer

    def adapter() -> training.FrameworkAdapter:
        return training.FrameworkAdapter("torch", lambda: weights_of(optimizer),
                                         lambda: _local(_parameters(optimizer)[0][1]).device)

    if not training.claim(optimizer, adapter) and isinstance(training.owner(), Optimizer):
        raise HolmesError("--holmes-join: the script has two optimizers; jobs of one optimizer can join")


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    if training.owner() is optimizer:
        training.stepped()


def weights_of(optimizer: Any) -> training.WeightShards:
    """The row of what an optimizer steps. HolmesError where a parameter's elements are not a range of it."""
    named = _parameters(optimizer)
    if not named:
        raise HolmesError("--holmes-join: the optimizer steps no parameters")
    parts = []
    for name, p in named:
        local = _local(p)
        if not local.is_contiguous():
            raise HolmesError(
                f"--holmes-join: parameter {name} is not contiguous in memory, so jobs cannot join")
        parts.append((name, _offset(name, p), local.view(-1)))
    places = [(p, _local(p).data_ptr()) for _, p in named]
    return training.WeightShards(
        "all ranks", [(name, tuple(p.shape), str(p.dtype)) for name, p in named], parts,
        moved=lambda: any(_local(p).data_ptr() != place for p, place in places))


def _parameters(optimizer: Any) -> list[tuple[str, Any]]:
    """By the names that the optimizer was given, or their places in it."""
    parameters = []
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {g} parameter {k}" for k in range(len(group["params"]))]
        parameters += [(name, p) for name, p in zip(names, group["params"]) if p.requires_grad]
    return parameters


def _local(p: Any) -> Any:
    """What this rank holds of a parameter."""
    return getattr(p, "_local_tensor", p).detach()


def _offset(name: str, p: Any) -> int:
    """Where the elements of a DTensor's shard begin in the whole."""
    if not hasattr(p, "_local_tensor"):
        if hasattr(p, "_sharded_size"):  # FSDP1's flat parameters are resized under way
            raise HolmesError(
                "--holmes-join: FSDP1 (FullyShardedDataParallel) cannot join; use fully_shard (FSDP2)")
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    # rows that are not a range
    odd = any(placement.is_partial() or "Strided" in type(placement).__name__ for placement in p.placements)
    if odd or tuple(shape[1:]) != tuple(p.shape[1:]):
        raise HolmesError(
            f"--holmes-join: parameter {name} is sharded as {p.placements}; a job can join if its weights"
                          " are replicated, or sharded along their first dimension")  # fmt: skip
    return int(offset[0]) * (p.numel() // p.shape[0]) if p.dim() and p._local_tensor.numel() else 0


@by_name
def _sample_job_part(call, instance, num_replicas, rank):
    """Make a DistributedSampler give this job its part of the data set (--holmes-outer part=k/K).

    DistributedSampler deals the shuffled indices to `num_replicas` ranks in turn. The ranks of job k of K
    (k from 0), which has R ranks, take the numbers k, k + K, k + 2 K, ... among K * R replicas. So the job
    reads the indices i with i mod K = k, whatever number of ranks the other jobs have.
    """
    job, job_count = training.part()
    if job_count == 1:
        return call()

    import torch.distributed as dist

    training.share()
    if num_replicas is None:
        num_replicas = dist.get_world_size()
    if rank is None:
        rank = dist.get_rank()
    return call(num_replicas=job_count * num_replicas, rank=job + job_count * rank)


PATCHES = (
    Patch(JOINED, "torch.utils.data.distributed:DistributedSampler.__init__",
          "joined jobs read different parts of one data set", _sample_job_part),
)  # fmt: skip
