"""A process group at whose making only its members take part.

torch.distributed.new_group(use_local_synchronization=True) is meant for that, but names the group after its
ranks and the number of groups that the process is in (_hash_ranks_to_str). Ranks of different stages are in
different numbers of groups (only some have embeddings): they look for each other under different names and
wait for ever. So the name is given here.

And where WORLD is bound to a device (device_id of init_process_group; deepspeed/comm/torch.py gives it),
torch makes every new NCCL group by ncclCommSplit of WORLD, which gathers over all its ranks: those outside
the group would never come (torch's NON_GROUP_MEMBER calls perform_nocolor_split for that). So WORLD is
unbound while the group is made, whose communicator then comes about at its first use, among its members.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holmes_ext.runtime.groups.backend import timeout_of

#: How often this process has made a group of these ranks and purpose: a name must not come back, its keys are
#: still in the store.
_count: Counter[tuple[Any, ...]] = Counter()


def members_group(ranks: Sequence[int], purpose: str, **options: Any) -> Any:
    """A new group of `ranks`, this one among them. All make those of the same ranks and purpose in the same
    order. purpose: also the group's description; options: new_group's."""
    import torch.distributed as dist

    ranks = sorted(ranks)
    options.setdefault("timeout", timeout_of(dist.group.WORLD))
    key = (*ranks, purpose)
    _count[key] += 1
    members = "-".join(map(str, ranks)) if len(ranks) <= 8 else hashlib.sha256(
        str(ranks).encode()).hexdigest()[:16]
    with _by_members_alone(f"holmes {purpose} {members} {_count[key]}"):
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose, **options)


@contextmanager
def _by_members_alone(name: str) -> Iterator[None]:
    """torch's name for the group and the device to split for are set aside."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    world: Any = dist.group.WORLD
    torch_naming, device = c10d._process_group_name, world.bound_device_id
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    world.bound_device_id = None
    try:
        yield
    finally:
        c10d._process_group_name, world.bound_device_id = torch_naming, device
