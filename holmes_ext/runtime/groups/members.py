"""Makes process groups that only their members take part in making.

torch.distributed.new_group usually needs all ranks of the job. With use_local_synchronization=True it needs
only the members of the new group. members_group() uses this, and removes two obstacles:

    The name of the group. torch computes it from the ranks and from the number of groups that the process has
    made so far. Members can have made different numbers of groups. They would then use different names, and
    wait for each other without end. members_group() gives the group a name that all members know.

    The communicator of the group. If the default group is bound to a GPU, torch splits the new communicator
    from the default group's (ncclCommSplit). All ranks of the job must take part in a split.
    members_group() keeps torch from splitting.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holmes_ext.runtime.backend import (
    nccl_backend_in,
    timeout_of,
)
from holmes_ext.runtime.groups.communicators import can_postpone, with_lazy_init

#: Largest group whose name lists its ranks; the name of a larger group has a hash of them.
_MOST_NAMED = 8
#: (ranks, purpose) -> how many groups this process has made of them. Each group needs a new name: the keys of
#: earlier groups are still in the store.
_count: Counter[tuple[Any, ...]] = Counter()


def members_group(ranks: Sequence[int], purpose: str, **options: Any) -> Any:
    """Make a process group that only its members make: `ranks` call this function, and no others.

    dist.new_group() usually needs all ranks of the job. With use_local_synchronization=True it
    needs only the members. But if the default group is bound to a GPU, torch still splits the
    communicator from the default group's (ncclCommSplit), and the split needs all ranks. Two ways
    avoid it:

        lazy_init       An option of newer NCCL backends: the group creates its communicator at its
                        first operation, without a split.
        no bound GPU    Without this option, the default group is unbound while the group is made.

    Ranks that make several groups of the same ranks and purpose must make them in the same order.

    Args:
        ranks: Global ranks of the members, in any order.
        purpose: Part of the group's name, and the group's description (group_desc).
        options: Further arguments of torch.distributed.new_group.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    ranks = sorted(ranks)
    options.setdefault("timeout", timeout_of(world))
    backend = options.get("backend") or dist.get_backend(world)
    nccl_backend = nccl_backend_in(backend)  # "" if the group does not use NCCL
    has_lazy_init = bool(nccl_backend) and can_postpone(nccl_backend)
    if has_lazy_init:  # torch does not split, so the default group may stay bound to its GPU
        options["pg_options"] = with_lazy_init(options.get("pg_options"))
        bound_device = world.bound_device_id
    else:
        bound_device = None  # the default group is unbound while the group is made, against a split
    with _group_name(_new_name(ranks, purpose)), _default_group_bound_to(bound_device):
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose, **options)


def _new_name(ranks: Sequence[int], purpose: str) -> str:
    """Return a name for a new process group, not used by an earlier group of this process."""
    key = (*ranks, purpose)
    _count[key] += 1
    if len(ranks) <= _MOST_NAMED:
        members = "-".join(map(str, ranks))
    else:
        members = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
    return f"holmes {purpose} {members} {_count[key]}"


@contextmanager
def _group_name(name: str) -> Iterator[None]:
    """Let torch give this name to the process group that is made inside the `with` block."""
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    torch_naming = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        c10d._process_group_name = torch_naming


@contextmanager
def _default_group_bound_to(device: Any) -> Iterator[None]:
    """Set the GPU that the default process group is bound to, inside the `with` block.

    With a bound GPU, torch creates a new NCCL group as a split of the default group's communicator
    (ncclCommSplit), and all ranks of the job must take part in the split. With None it does not
    split.

    Args:
        device: The torch.device; None to bind the default group to no GPU.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    before = world.bound_device_id
    if device == before:  # setting the same device again could have an effect in torch
        yield
        return
    world.bound_device_id = device
    try:
        yield
    finally:
        world.bound_device_id = before
