"""Process groups for pairs of neighbouring pipeline stages that share a faster network than the pipeline.

stage 0 === stage 1 --- stage 2 === stage 3      === inside a cluster: the pair's group uses its fabric
   cluster a        |       cluster b            --- between clusters: the pair's group uses Ethernet
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holmes_ext.plan.plan import pairs_with_group
from holmes_ext.plan.traffic import LOCAL
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import (
    backend_of,
    group_ranks,
    network_api_of,
    timeout_of,
    traits_of,
)
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.transport import settings_of

#: Largest number of thread blocks (CTAs) of a communicator for two ranks on different nodes. Four are enough
#: to use the whole NIC. More would be a loss: a receive that is started early occupies them until its message
#: arrives, and the GPU cannot compute with them.
PAIR_CTAS = 4
_RANKS_OF_PAIR = 2


def pair_groups(current: session.Session, group: Any) -> dict[int, Any]:
    """Make process groups for the pairs of neighbouring pipeline stages that this rank is in.

    All ranks of the pipeline must call this function. Either all pairs of the pipeline get a group,
    or none. With a mixture the job could hang. NCCL makes the communicator of the pipeline's own
    group at the first message in it, and all stages must take part. A stage between two pairs with
    groups never sends a message in the pipeline's own group, so the other stages would wait for it.

    Args:
        group: The process group of the pipeline.

    Returns:
        Rank of a neighbouring stage -> group of the pair. The dict is empty if no pair has a faster network
        than the whole pipeline.
    """
    ranks = tuple(group_ranks(group))
    network_api = network_api_of(backend_of(group))
    if not network_api:
        return {}  # the backend chooses its networks itself
    if len(ranks) <= _RANKS_OF_PAIR:
        return {}  # the pipeline is a single pair
    # All pairs of neighbouring stages, or none.
    pairs = pairs_with_group(current.plan, ranks, network_api)
    return groups_of(pairs, current.rank, group)


def groups_of(pairs: Iterable[tuple[int, int]], rank: int, pipeline: Any) -> dict[int, Any]:
    """Make a process group for each of `pairs` that contains `rank`.

    Args:
        pairs: Pairs of global ranks, in the same order on all ranks.
        rank: Global rank of this process.
        pipeline: The process group of the pipeline. The new groups get its backend and settings.

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
    """Make a process group of two ranks, with the backend, timeout and NCCL settings of their pipeline.

    Only the two ranks call this function.

    Args:
        pair: Global ranks of the two.
        purpose: Part of the group's name, and the group's description (group_desc).
        pipeline: The process group of the pipeline.
    """
    ranks = sorted(pair)
    backend = backend_of(pipeline)
    options: dict[str, Any] = {"backend": backend, "timeout": timeout_of(pipeline)}
    if traits_of(backend).is_nccl:
        settings = settings_of(pipeline)
        current = session.active()
        # max_ctas limits the thread blocks of a communicator. If the program set no limit, it has
        # NCCL's negative value for "undefined".
        program_has_limit = settings.config.max_ctas >= 1
        uses_nic = current is not None and current.transport(ranks, backend).fabric != LOCAL
        if uses_nic and not program_has_limit:
            # A receive that waits for its message occupies its thread blocks, and the GPU cannot
            # compute with them. So they are limited to PAIR_CTAS (4), enough to use the whole NIC.
            settings.config.max_ctas = max(PAIR_CTAS, settings.config.min_ctas)
        options["pg_options"] = settings
    return members_group(ranks, purpose, **options)
