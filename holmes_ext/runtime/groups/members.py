"""Process groups at whose making only their members take part.

torch.distributed.new_group(use_local_synchronization=True) is meant for that, but names the group after its
ranks and the number of groups that the process is in (_hash_ranks_to_str). Ranks of different stages are in
different numbers of groups (only some have embeddings): they look for each other under different names and
wait for ever. So the name is given here.

And where WORLD is bound to a device (device_id of init_process_group; deepspeed/comm/torch.py gives it),
torch makes every new NCCL group by ncclCommSplit of WORLD, which gathers over all its ranks: those outside
the group would never come (torch's NON_GROUP_MEMBER calls perform_nocolor_split for that). So WORLD is
unbound while the group is made, whose communicator then comes about at its first use, among its members.

Each pair of a pipeline's neighbours gets one where a pair has a faster network than all share:

    stage 0 === stage 1 --- stage 2 === stage 3      === inside a cluster: the pair's own group, on its fabric
       cluster a        |       cluster b            --- across: the pair's own group, on Ethernet

(all of them then: the first batch over the pipeline group would make NCCL's communicator of all its ranks,
and those that only use pairs would never come; plan/decisions.py, pairs_with_group).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from holmes_ext.plan.decisions import pairs_with_group
from holmes_ext.plan.traffic import LOCAL
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of, timeout_of
from holmes_ext.runtime.groups.transport import settings_of

#: How often this process has made a group of these ranks and purpose: a name must not come back, its keys are
#: still in the store.
_count: Counter[tuple[Any, ...]] = Counter()
#: CTAs (thread blocks) of a pair's communicator between two nodes, where its pipeline's group has no limit:
#: they fill a NIC, and a receive that is posted early holds them until its message has come.
PAIR_CTAS = 4


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


def pair_groups(current: session.Session, group: Any) -> dict[int, Any]:
    """The other's rank -> the pair's group, of this rank in the pipeline `group`; {} where that will do.

    All ranks of `group` call it.
    """
    ranks, network_api = tuple(group_ranks(group)), network_api_of(backend_of(group))
    if not network_api or len(ranks) < 3:
        return {}
    return groups_of(pairs_with_group(current.plan, ranks, network_api), current.rank, group)


def groups_of(pairs: Iterable[tuple[int, int]], rank: int, pipeline: Any) -> dict[int, Any]:
    """The other's rank -> the group of each of `pairs` that `rank` is in; in one order everywhere."""
    return {pair[rank == pair[0]]: pair_group(pair, "pipeline pair", pipeline)
            for pair in pairs if rank in pair}


def pair_group(pair: Iterable[int], purpose: str, pipeline: Any) -> Any:
    """Of these two ranks, made by them alone, with backend, timeout and NCCL settings of `pipeline`."""
    ranks, backend = sorted(pair), backend_of(pipeline)
    options = {"backend": backend, "timeout": timeout_of(pipeline)}
    if backend == "nccl":
        options["pg_options"] = settings = settings_of(pipeline)
        current = session.active()
        if settings.config.max_ctas < 1 and current and current.transport(ranks, backend).fabric != LOCAL:
            settings.config.max_ctas = max(PAIR_CTAS, settings.config.min_ctas)
    return members_group(ranks, purpose, **options)
