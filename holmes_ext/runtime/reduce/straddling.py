"""The all-reduce that suits a group: in two levels where it straddles clusters and that is predicted to be faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.runtime import session
from holmes_ext.runtime.groups.carrier import carrier
from holmes_ext.runtime.reduce.two_level import TwoLevelAllReduce, planned
from holmes_ext.runtime.reduce.two_level_nccl import TwoLevelCollectives

TwoLevel = TwoLevelAllReduce | TwoLevelCollectives


def two_level_for(
    group: dist.ProcessGroup, size: int, compress: str | None = None, device_type: str = ""
) -> TwoLevel | None:
    """For all-reduces of about `size` bytes in `group`; None: use torch's. Collective, and the same on all its ranks.

    None where holmes is off, the group lies in one cluster, a flat ring is predicted to be faster, or NCCL has clusters
    of different sizes. compress: "off", "bf16" or "int8" for what crosses; None takes --holmes-compress. device_type:
    of the tensors; "" as in carrier.
    """
    clusters = planned(tuple(dist.get_process_group_ranks(group)), size, compress)
    if clusters is None:
        return None
    compress = compress or session.require().options.compress
    if carrier(group, device_type) == "gloo":
        return TwoLevelAllReduce(clusters, compress=compress)
    if len({len(members) for members in clusters}) == 1:
        return TwoLevelCollectives(clusters, compress=compress)
    return None


def flat_all_reduce(group: dist.ProcessGroup) -> Callable[[torch.Tensor], Any]:
    """torch's own, asynchronous."""
    return lambda flat: dist.all_reduce(flat, group=group, async_op=True)
