"""A process group for each pair of a pipeline's neighbours, where one has a faster network than all share:

    stage 0 === stage 1 --- stage 2 === stage 3      === inside a cluster: the pair's own group, on its fabric
       cluster a        |       cluster b            --- across: the pair's own group, on Ethernet

Every pair gets one then: the first batch over the pipeline group would make NCCL's communicator of all its
ranks, and those that only use pairs would never come (plan/decisions.py, pairs_with_group).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holmes_ext.plan.decide import pairs_with_group
from holmes_ext.plan.traffic import LOCAL
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of, timeout_of
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.transport import settings_of

#: CTAs (thread blocks) of a pair's communicator between two nodes, where its pipeline's group has no limit:
#: they fill a NIC, and a receive that is posted early holds them until its message has come.
PAIR_CTAS = 4


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
