"""Hierarchical sum of the gradient of a weight that two pipeline stages share (tied embeddings).

Engines let each rank of the first stage sum the gradient with its twin, the rank of the last stage with the
same position. So d data-parallel ranks send the whole gradient to the other cluster, d times. The wanted
result is the average over the d ranks of these sums. It is computed with fewer bytes:

    1  divide the gradient by d
    2  inside each stage's cluster: reduce-scatter, so that rank k has the stage's sum of block k
    3  across: the two ranks with block k sum it; each sends 1/d of the bytes
    4  inside: all-gather the blocks

hierarchical.py and hierarchical_nccl.py do steps 2 to 4. All ranks then have the value of the engine's own
average over the data-parallel group. That average may follow, and leaves equal values unchanged. If an engine
averages before the sum, each of its d copies counts 1/d.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holmes_ext.plan.sizes import tied_sums
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, network_api_of
from holmes_ext.runtime.reduce.planned import hierarchical_over

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.reduce.reduction import Reduction

_TWINS = 2  # ranks that share a weight: one of the first stage, one of the last stage


class TiedSum:
    """Sum of a shared weight's gradient over all ranks of both stages."""

    def __init__(self, ranks: tuple[int, ...], reduction: Reduction, least_bytes: int):
        """Make the sum.

        Args:
            ranks: Global ranks of the first and the last stage that hold the weight.
            reduction: Sums tensors over these ranks.
            least_bytes: Least size of a gradient, in bytes, for the hierarchical sum.
        """
        self.ranks = ranks
        #: Number of data-parallel ranks of one stage.
        self.twins = len(ranks) // _TWINS
        self.reduction = reduction
        self.least_bytes = least_bytes

    def takes(self, gradient: Any) -> bool:
        """Return whether a gradient is contiguous and large enough for the hierarchical sum."""
        size = gradient.numel() * gradient.element_size()
        return gradient.is_contiguous() and size >= self.least_bytes

    def __call__(self, gradient: Any, divisor: int) -> None:
        """Divide a gradient, and replace it by the sum over all ranks."""
        divided = gradient.view(-1).div_(divisor)
        self.reduction.all_reduce(divided).wait()


#: Process group of two ranks that share a weight -> the hierarchical sum, or None to keep the engine's own.
made: weakref.WeakKeyDictionary[Any, TiedSum | None] = weakref.WeakKeyDictionary()


def tied_sum_of(group: Any, sizes: Sizes, device_type: str) -> TiedSum | None:
    """Return the hierarchical sum of the gradient of a weight that the first and last stage share.

    The first call for a group makes process groups: all ranks of both stages must make it.

    Args:
        group: Process group of the engine's own sum: a rank of the first stage, and the rank of the last
            stage with the same position.
        sizes: Parallel sizes of the job.
        device_type: Device of the gradient, "cpu" or "cuda".

    Returns:
        None if the plan keeps the engine's own sum, equally on all ranks.
    """
    if group not in made:
        made[group] = _make_tied_sum(group, sizes, device_type)
    return made[group]


def _make_tied_sum(group: Any, sizes: Sizes, device_type: str) -> TiedSum | None:
    """Make the hierarchical sum of the gradient that two ranks with a shared weight sum.

    Args:
        group: Process group of a rank of the first stage and the rank of the last stage that shares a weight.
        sizes: Parallel sizes of the job.
        device_type: Device of the gradient, "cpu" or "cuda".

    Returns:
        None if the plan keeps the engine's own sum.
    """
    current = session.active()
    network_api = network_api_of(backend_of(group, device_type))
    if current is None or not network_api:
        return None
    plan = current.plan_for(sizes)
    members = set(dist.get_process_group_ranks(group))
    spec = plan.traffic_of(network_api).tied
    if spec is None or len(members) != _TWINS:
        return None
    # All ranks of both stages that hold the same part of the weight as the two members.
    ranks_of_stages = [ranks for ranks in tied_sums(sizes) if members <= set(ranks)]
    if len(ranks_of_stages) != 1 or set(spec.clusters) != set(plan.by_cluster(members)):
        return None
    ranks = ranks_of_stages[0]
    reduction = hierarchical_over(ranks, spec, network_api, purpose="embedding")
    if reduction is None:
        return None
    return TiedSum(ranks, reduction, least_bytes=spec.hierarchical_from)
