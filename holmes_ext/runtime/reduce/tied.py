"""Hierarchical sum of the gradient of a weight that two pipeline stages share (tied embeddings).

The first stage uses the weight as the embedding, and the last stage as the output layer. Engines let each
rank of the first stage sum the gradient with the rank of the last stage that has the same data-parallel
position. So each of the d data-parallel ranks of a stage sends the whole gradient to the other cluster. The
wanted result is the average of these d sums. It is computed with fewer bytes:

    1  divide the gradient by d
    2  inside each stage's cluster: reduce-scatter, so that rank k has the stage's sum of block k
    3  across: the two ranks with block k sum it; each sends 1/d of the bytes
    4  inside: all-gather the blocks

hierarchical.py and hierarchical_nccl.py do steps 2 to 4. All ranks then have the final average.

The engine also averages the gradient over the d data-parallel ranks of each stage. The result is right in
both orders:

    this sum first            all d ranks have the same result, and an average over them does not change it
    the engine's average first    the d ranks have the same values; step 1 takes 1/d of each, so their sum is
                              the average
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

#: Pipeline stages that have a copy of the weight: the first and the last.
_STAGES_WITH_WEIGHT = 2


class TiedSum:
    """Sum of the gradient of a weight that the first and the last pipeline stage share (tied embeddings).

    The gradient is summed over all ranks that hold a copy of the weight: the data-parallel ranks of both
    stages.
    """

    def __init__(self, ranks: tuple[int, ...], reduction: Reduction, least_bytes: int):
        """Prepare sums of the gradient of a weight that the first and the last pipeline stage share.

        Args:
            ranks: Global ranks that hold a copy of the weight: as many of the first stage as of the last.
            reduction: Sums tensors over these ranks.
            least_bytes: Smaller gradients are left to the engine's own sum.
        """
        self.ranks = ranks
        #: Data-parallel ranks of a stage: each of the two stages has half of the ranks.
        self.ranks_per_stage = len(ranks) // _STAGES_WITH_WEIGHT
        self.reduction = reduction
        self.least_bytes = least_bytes

    def takes(self, gradient: Any) -> bool:
        """Return whether a gradient is contiguous and large enough for the hierarchical sum."""
        size = gradient.numel() * gradient.element_size()
        return gradient.is_contiguous() and size >= self.least_bytes

    def __call__(self, gradient: Any, divisor: int) -> None:
        """Divide this rank's gradient of the shared weight, and replace it by the sum over all its holders.

        Args:
            gradient: Gradient of the weight's copy on this rank, contiguous.
            divisor: 1 for the plain sum. An engine that averages gradients over its d data-parallel ranks
                passes d: the ranks of both stages are summed, and the sum is divided by d (not by 2 d).
        """
        divided = gradient.view(-1).div_(divisor)
        self.reduction.all_reduce(divided).wait()


#: Process group of two ranks that share a weight -> the hierarchical sum, or None to keep the engine's own.
made: weakref.WeakKeyDictionary[Any, TiedSum | None] = weakref.WeakKeyDictionary()


def tied_sum_of(group: Any, sizes: Sizes, device_type: str) -> TiedSum | None:
    """Return the hierarchical sum of the gradient of a weight that the first and last stage share.

    Such a weight is that of the embedding and the output layer. The first call for a group makes
    process groups, so all ranks of both stages must make it.

    Args:
        group: Process group of the engine's own sum, with two ranks: a rank of the first stage, and
            the rank of the last stage with the same tensor-, data- and context-parallel rank.
        sizes: Parallel sizes of the job.
        device_type: Device of the gradient, "cpu" or "cuda".

    Returns:
        None if the plan keeps the engine's own sum. All ranks get None then.
    """
    if group not in made:
        made[group] = _make_tied_sum(group, sizes, device_type)
    return made[group]


def _make_tied_sum(group: Any, sizes: Sizes, device_type: str) -> TiedSum | None:
    """Make the hierarchical sum that replaces an engine's sum over two ranks with a shared weight.

    Args:
        group: Process group of the engine's own sum, with two ranks: a rank of the first stage, and
            the rank of the last stage with the same tensor-, data- and context-parallel rank.
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
    if spec is None or len(members) != _STAGES_WITH_WEIGHT:
        return None

    # tied_sums() returns a tuple of ranks for each tensor-parallel slice of the weight: all data-parallel
    # ranks of both stages that hold this slice. A single tuple contains the two members of the group.
    ranks_with_same_slice = [ranks for ranks in tied_sums(sizes) if members <= set(ranks)]
    if len(ranks_with_same_slice) != 1:
        return None

    # The sum was planned for two ranks in certain clusters (spec.clusters). If these two ranks are
    # in other clusters, the hierarchical sum may be slower than the engine's.
    if set(spec.clusters) != set(plan.by_cluster(members)):
        return None
    ranks = ranks_with_same_slice[0]
    reduction = hierarchical_over(ranks, spec, network_api, purpose="embedding")
    if reduction is None:
        return None
    return TiedSum(ranks, reduction, least_bytes=spec.hierarchical_from)
