"""A process group for each pair of neighbours in a pipeline, where one of them has a faster network than all share:

    stage 0 === stage 1 --- stage 2 === stage 3        === inside a cluster: the pair's own group, on its fabric
       cluster a        |       cluster b              --- across: the pair's own group, on Ethernet

Every pair gets one then: the first batch over the pipeline group would make NCCL's communicator of all its ranks, and
those that only use pairs would never come (plan/decide.py, own_pairs).
"""

from __future__ import annotations

from typing import Any

from holmes_ext.plan.decide import own_pairs
from holmes_ext.runtime.groups.backend import backend_of, carrier_of, group_ranks, timeout_of
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.transport import settings_of
from holmes_ext.runtime.session import Session


def pair_groups(current: Session, group: Any) -> dict[int, Any]:
    """The other's rank -> the pair's group, of this rank in the pipeline `group`; {} where the group itself will do.

    All ranks of `group` must call it. A pair is made by its two ranks alone, in the same order everywhere, so that no
    circle of ranks waits.
    """
    ranks, carrier = tuple(group_ranks(group)), carrier_of(backend_of(group))
    made: dict[int, Any] = {}
    for pair in own_pairs(current.plan, ranks, carrier) if carrier and len(ranks) > 2 else ():
        if current.rank in pair:
            made[pair[current.rank == pair[0]]] = members_group(pair, "pipeline pair", **like(group))
    return made


def like(group: Any) -> dict[str, Any]:
    """For new_group: backend and timeout of `group`, and NCCL's settings for it (priority, CTAs, CGA), which are those
    of its pairs too: a receive that is posted early holds the CTAs that it was given until its message is there."""
    backend, timeout = backend_of(group), timeout_of(group)
    return {"backend": backend, "timeout": timeout, **({"pg_options": settings_of(group)} if backend == "nccl" else {})}
