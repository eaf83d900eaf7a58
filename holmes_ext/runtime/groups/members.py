"""Process groups that only their members make, while the other ranks go on.

torch.distributed.new_group(use_local_synchronization=True) is meant for that, but has two obstacles.

Names. torch names such a group after its ranks and the number of groups that the process has made
(_hash_ranks_to_str). Ranks of different pipeline stages have made different numbers of groups, since only
some of them have embeddings. They would look for each other under different names, and wait without end. So
holmes gives the name itself.

Splits. If the group of all ranks (WORLD) is bound to a device, torch makes a new NCCL group by ncclCommSplit
of WORLD. All ranks of WORLD must take part in a split, but ranks outside of the new group never call.
DeepSpeed binds WORLD (deepspeed/comm/torch.py), and the backend nccl2 always does. So the new communicator
must not be split from WORLD; _members_alone() says how.

Pairs of neighbouring stages get groups of their own if one pair has a faster network than all stages share:

    stage 0 === stage 1 --- stage 2 === stage 3      === inside a cluster: the pair's group uses its fabric
       cluster a        |       cluster b            --- between clusters: the pair's group uses Ethernet

Then all pairs get one. The first message over the pipeline's group would make the NCCL communicator of all
stages, and stages that only use groups of pairs would never come (pairs_with_group in plan/decisions.py).
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
from holmes_ext.runtime.groups.backend import (
    backend_of,
    group_ranks,
    nccl_backend_in,
    network_api_of,
    timeout_of,
)
from holmes_ext.runtime.groups.backend_table import traits_of
from holmes_ext.runtime.groups.communicators import can_postpone, with_lazy_init
from holmes_ext.runtime.groups.transport import settings_of

#: (ranks, purpose) -> how many groups this process has made of them. Each group needs a new name: the keys of
#: earlier groups are still in the store.
_count: Counter[tuple[Any, ...]] = Counter()
#: Most thread blocks (CTAs) that the communicator of a pair of nodes uses, if its pipeline's group has no
#: limit. Four fill a NIC. A receive that was started early occupies them until its message arrives.
PAIR_CTAS = 4


def members_group(ranks: Sequence[int], purpose: str, **options: Any) -> Any:
    """Make a process group of `ranks`. Only these ranks call this function, and this rank is one of them.

    Ranks that make several groups of the same ranks and purpose must make them in the same order.

    Args:
        purpose: Part of the group's name, and the group's description (group_desc).
        options: Further arguments of torch.distributed.new_group.
    """
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    ranks = sorted(ranks)
    options.setdefault("timeout", timeout_of(world))
    backend = nccl_backend_in(options.get("backend") or dist.get_backend(world))
    is_postponed = bool(backend) and can_postpone(backend)
    if is_postponed:
        options["pg_options"] = with_lazy_init(options.get("pg_options"))
    elif backend and traits_of(backend).binds_device:  # nccl2 of a torch without lazy_init
        options["device_id"] = world.bound_device_id
    with _members_alone(_new_name(ranks, purpose), keeps_device=is_postponed):
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose, **options)


def _new_name(ranks: Sequence[int], purpose: str) -> str:
    """Return a name that this process has not used for a group before."""
    key = (*ranks, purpose)
    _count[key] += 1
    if len(ranks) <= 8:
        members = "-".join(map(str, ranks))
    else:
        members = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
    return f"holmes {purpose} {members} {_count[key]}"


@contextmanager
def _members_alone(name: str, keeps_device: bool) -> Iterator[None]:
    """Let torch.distributed.new_group use a given name, and not split the group of all ranks (WORLD).

    torch splits WORLD only if WORLD is bound to a device, and if the options of the new group do not contain
    lazy_init. So WORLD is unbound during the `with` block, unless the options contain lazy_init.

    Args:
        keeps_device: WORLD stays bound. The backends nccl2 and nccl-lazy give a new group the device of
            WORLD. Without it, they take device LOCAL_RANK, which need not be the device of this process.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    world: Any = dist.group.WORLD
    torch_naming = c10d._process_group_name
    device = world.bound_device_id
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    if not keeps_device:
        world.bound_device_id = None
    try:
        yield
    finally:
        c10d._process_group_name = torch_naming
        if not keeps_device:
            world.bound_device_id = device


def pair_groups(current: session.Session, group: Any) -> dict[int, Any]:
    """Make a process group for each pair of neighbouring stages that this rank is in.

    All ranks of the pipeline must call this function.

    Args:
        group: The process group of the pipeline.

    Returns:
        Rank of a neighbouring stage -> group of the pair; empty if the pipeline needs no such groups.
    """
    ranks = tuple(group_ranks(group))
    network_api = network_api_of(backend_of(group))
    if not network_api or len(ranks) < 3:
        return {}
    return groups_of(pairs_with_group(current.plan, ranks, network_api), current.rank, group)


def groups_of(pairs: Iterable[tuple[int, int]], rank: int, pipeline: Any) -> dict[int, Any]:
    """Make a process group for each of `pairs` that contains `rank`.

    Args:
        pairs: In the same order on all ranks.
        pipeline: The process group of the pipeline.

    Returns:
        The other rank of a pair -> group of the pair.
    """
    groups = {}
    for first, second in pairs:
        if rank in (first, second):
            peer = second if rank == first else first
            groups[peer] = pair_group((first, second), "pipeline pair", pipeline)
    return groups


def pair_group(pair: Iterable[int], purpose: str, pipeline: Any) -> Any:
    """Make a process group of two ranks, with the backend, timeout and NCCL settings of another group.

    Only the two ranks call this function.

    Args:
        purpose: As in members_group().
        pipeline: The other group, the one of the whole pipeline.
    """
    ranks = sorted(pair)
    backend = backend_of(pipeline)
    options: dict[str, Any] = {"backend": backend, "timeout": timeout_of(pipeline)}
    if traits_of(backend).is_nccl:
        settings = settings_of(pipeline)
        current = session.active()
        has_limit = settings.config.max_ctas >= 1
        if not has_limit and current and current.transport(ranks, backend).fabric != LOCAL:
            settings.config.max_ctas = max(PAIR_CTAS, settings.config.min_ctas)
        options["pg_options"] = settings
    return members_group(ranks, purpose, **options)
