"""The all-reduce that the plan has for a group: two levels where it straddles and that is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch.distributed as dist

from holmes_ext.adapt import learning
from holmes_ext.cluster.site import Fabric
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.buckets import bucket_bytes as bucket_bytes_of
from holmes_ext.plan.traffic import SOCKETS, ReductionSpec
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, network_api_of, one_hardware_queue
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.reduce import flat_bucket
from holmes_ext.runtime.reduce.two_level import TwoLevelAllReduce
from holmes_ext.runtime.reduce.two_level_nccl import TwoLevelCollectives

_ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: the steps of a two-level reduction share one hardware queue with the "
    "backward pass, so they run between its kernels and do not overlap them; set 8 or more where the "
    "framework allows it"
)
TwoLevel = TwoLevelAllReduce | TwoLevelCollectives


def planned(
    group: dist.ProcessGroup, size: float = inf, compress: str | None = None, device_type: str = ""
) -> ReductionSpec | None:
    """How `group` reduces `size` bytes in a step; None: holmes is off. compress: instead of the plan's."""
    current = session.active()
    if current is None:
        return None
    return current.reduction(dist.get_process_group_ranks(group), backend_of(group, device_type), size,
                             compress)


def two_level_for(group: dist.ProcessGroup, size: int, reduction: ReductionSpec | None,
                  device_type: str = "") -> TwoLevel | None:
    """For all-reduces of about `size` bytes in `group`; None: use torch's. Collective."""
    if reduction is None or not reduction.clusters or size < reduction.two_level_from:
        return None
    network_api = network_api_of(backend_of(group, device_type))
    return two_level_of(dist.get_process_group_ranks(group), reduction, network_api)


def two_level_of(ranks: Sequence[int], reduction: ReductionSpec, network_api: str,
                 purpose: str = "two-level") -> TwoLevel | None:
    """For `ranks` and their `network_api`; None: all are in one cluster. purpose: describes the groups."""
    parts = session.require().plan.by_cluster(ranks)
    clusters = list(parts.values())
    if len(clusters) < 2:
        return None
    if network_api != SOCKETS:
        if one_hardware_queue():
            tell(session.require(), _ONE_QUEUE, once=_ONE_QUEUE)
        return TwoLevelCollectives(
            clusters, chunk_bytes=reduction.chunk_bytes, compress=reduction.compress, purpose=purpose
        )
    across = reduction.across
    if across is not None and set(across.order) != set(parts):
        across = None
    return TwoLevelAllReduce(
        clusters, chunk_bytes=reduction.chunk_bytes, compress=reduction.compress, across=across,
        names=list(parts), streams=reduction.streams, purpose=purpose,
    )


class GroupSum:
    """The plan's way to sum `size` bytes in a group, and what carries it out; both follow() the plan.
    all_reduce: the caller's own instead; bucket_bytes: the user's; fabric: the group's, None: the plan's.
    Collective."""

    def __init__(self, group: dist.ProcessGroup, size: int, device_type: str, compress: str | None,
                 all_reduce: Callable[[Any], Any] | None, bucket_bytes: int | None,
                 fabric: Fabric | None = None):
        self.group, self.size, self.device_type, self._own = group, size, device_type, all_reduce
        self.ranks, self._given = tuple(dist.get_process_group_ranks(group)), bucket_bytes
        self.backend = backend_of(group, device_type)
        self.network_api = network_api_of(self.backend)
        self._made: dict[ReductionSpec | None, TwoLevel | None] = {}
        reduction = None if all_reduce else planned(group, size, compress, device_type)
        current = session.active()
        self.fabric = fabric or (current.fabric_of(self.ranks, self.backend) if current else None)
        self._go(reduction)

    def _go(self, reduction: ReductionSpec | None) -> None:
        if reduction not in self._made:
            self._made[reduction] = two_level_for(self.group, self.size, reduction, self.device_type)
        self.reduction, self.two_level = reduction, self._made[reduction]
        self.all_reduce = self._own or self.two_level or flat_all_reduce(self.group)

    def follow(self) -> bool:
        """A step begins, on all ranks: whether the plan has another way by now, which is taken."""
        current = session.active()
        if current is None or self.reduction is None or not self.network_api:
            return False
        learning.begin_sums(current, self.ranks, self.network_api, self)
        reduction = current.decided_again(self.ranks, self.backend)
        if reduction is None or reduction == self.reduction or reduction.compress != self.reduction.compress:
            return False
        self._go(reduction)
        return True

    def note(self, size: float, **how: bool) -> None:
        """For the session: `size` bytes were summed. how: of DoneReduction."""
        session.note_reduction(self.ranks, self.reduction, size, two_levels=self.two_level is not None, **how)

    def bucket_bytes(self) -> int:
        """As the user or the plan says; else by the group's fabric."""
        if self._given is not None:
            if not isinstance(self._given, int) or self._given < 1:
                way_out = "give a number of bytes above 0, or None"
                raise HolmesError(f"GradientReducer: bucket_bytes is {self._given!r}; {way_out}")
            return self._given
        if self.reduction is not None:
            return self.reduction.chunk_bytes if self.two_level is not None else self.reduction.bucket_bytes
        if isinstance(self.all_reduce, TwoLevel):  # the caller's own
            return self.all_reduce.chunk_bytes
        if self.fabric is None:
            return flat_bucket.DEFAULT_BYTES
        return bucket_bytes_of(self.fabric, len(self.ranks), self.size)

    def close(self) -> None:
        """End the threads that it started."""
        for two_level in self._made.values():
            if two_level is not None:
                two_level.close()


def flat_all_reduce(group: dist.ProcessGroup) -> Callable[[Any], Any]:
    """torch's own, asynchronous."""
    return lambda flat: dist.all_reduce(flat, group=group, async_op=True)
