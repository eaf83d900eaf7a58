"""Make the hierarchical reduction that the plan has for ranks in several clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, network_api_of, one_hardware_queue
from holmes_ext.runtime.reduce.two_level import TwoLevelAllReduce
from holmes_ext.runtime.reduce.two_level_nccl import TwoLevelCollectives
from holmes_ext.runtime.session import tell

if TYPE_CHECKING:
    from holmes_ext.plan.traffic import ReductionSpec
    from holmes_ext.runtime.reduce.reduction import Reduction

_ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: the steps of a two-level reduction share one hardware queue with the "
    "backward pass, so they run between its kernels and do not overlap them; set 8 or more where the "
    "framework allows it"
)


def hierarchical_for(
    group: dist.ProcessGroup, size: int, spec: ReductionSpec, device_type: str = ""
) -> Reduction | None:
    """Make the hierarchical reduction of a group, if the plan has one for sums of this size.

    All ranks of the group must call this function.

    Args:
        size: Bytes of gradients that the group sums.
        spec: What the plan says of the group's reduction.
        device_type: Device of the gradients, "cpu" or "cuda"; "" for the GPU if there is one, else the CPU.

    Returns:
        None if the group is in one cluster, or one ring is faster for sums of this size.
    """
    is_planned = bool(spec.clusters) and size >= spec.two_level_from
    if not is_planned:
        return None
    network_api = network_api_of(backend_of(group, device_type))
    return hierarchical_over(dist.get_process_group_ranks(group), spec, network_api)


def hierarchical_over(
    ranks: Sequence[int], spec: ReductionSpec, network_api: str, purpose: str = "two-level"
) -> Reduction | None:
    """Make a hierarchical reduction over ranks that need not have a process group.

    All of the ranks must call this function.

    Args:
        ranks: Global ranks.
        spec: What the plan says: chunks, compression, and how the clusters exchange their sums.
        network_api: "verbs" for NCCL, "sockets" for gloo.
        purpose: Describes the process groups that are made.

    Returns:
        None if all ranks are in one cluster.
    """
    ranks_by_cluster = session.require().plan.by_cluster(ranks)
    clusters = list(ranks_by_cluster.values())
    if len(clusters) < 2:
        return None
    if network_api != SOCKETS:
        if one_hardware_queue():
            tell(session.require(), _ONE_QUEUE, once=_ONE_QUEUE)
        return TwoLevelCollectives(
            clusters, chunk_bytes=spec.chunk_bytes, compress=spec.compress, purpose=purpose
        )
    across = spec.across
    if across is not None and set(across.order) != set(ranks_by_cluster):
        across = None  # it was planned for other clusters than these
    return TwoLevelAllReduce(
        clusters, chunk_bytes=spec.chunk_bytes, compress=spec.compress, across=across,
        names=list(ranks_by_cluster), streams=spec.streams, purpose=purpose,
    )  # fmt: skip
