"""The gradient of a weight that several stages share, summed over all their ranks hierarchically.

Engines let every rank of the first stage sum it with its twin of the last one: d data-parallel ranks send the
whole gradient across, d times. What is wanted in the end is the average over the d ranks of those sums:

    1  inside each stage's cluster: rank k gets the stage's sum of block k     hierarchical.py,
    hierarchical_nccl.py
    2  across: the two owners of a block sum it; every rank sends 1 / d of the bytes
    3  inside: all ranks gather the blocks; all is divided by d beforehand

Every rank then has what the engine's own average over its data-parallel group makes of it, so that may
follow: the average of equal values is that value. Where an engine averages first, its d copies count 1 / d
each.
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


class TiedSum:
    """tied_sum(gradient, divisor) leaves the sum over all `ranks` of both stages, divided, in it. twins:
    data-parallel ranks of one stage; reduction: over all of them; least: bytes from which on this is
    faster."""

    def __init__(self, ranks: tuple[int, ...], reduction: Reduction, least: int):
        self.ranks, self.twins, self.reduction, self.least = (
            ranks,
            len(ranks) // 2,
            reduction,
            least,
        )

    def takes(self, gradient: Any) -> bool:
        return gradient.is_contiguous() and gradient.numel() * gradient.element_size() >= self.least

    def __call__(self, gradient: Any, divisor: int) -> None:
        self.reduction.all_reduce(gradient.view(-1).div_(divisor)).wait()


#: group of the ranks that share a weight -> its sum hierarchically; None where the engine's own stays.
made: weakref.WeakKeyDictionary[Any, TiedSum | None] = weakref.WeakKeyDictionary()


def tied_sum_of(group: Any, sizes: Sizes, device_type: str) -> TiedSum | None:
    """Of `made`; new ones are collective over both stages, and alike on all."""
    if group not in made:
        made[group] = _tied_sum(group, sizes, device_type)
    return made[group]


def _tied_sum(group: Any, sizes: Sizes, device_type: str) -> TiedSum | None:
    current, network_api = session.active(), network_api_of(backend_of(group, device_type))
    if current is None or not network_api:
        return None
    plan, members = current.plan_for(sizes), set(dist.get_process_group_ranks(group))
    spec = plan.traffic_of(network_api).tied
    candidates = [ranks for ranks in tied_sums(sizes) if members <= set(ranks)]
    if spec is None or len(members) != 2 or len(candidates) != 1:
        return None
    if set(spec.clusters) != set(plan.by_cluster(members)):
        return None
    reduction = hierarchical_over(candidates[0], spec, network_api, purpose="embedding")
    return (
        TiedSum(candidates[0], reduction, spec.hierarchical_from) if reduction is not None else None
    )
