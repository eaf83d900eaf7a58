"""The reduction that the plan chooses for a group's gradients, before the job starts and while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from holmes_ext import extensions
from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import bucket_bytes as bucket_bytes_of
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime import hooks, session
from holmes_ext.runtime.backend import backend_of, network_api_of, one_hardware_queue
from holmes_ext.runtime.reduce import flat_bucket
from holmes_ext.runtime.reduce.reduction import FlatReduction
from holmes_ext.runtime.session import tell

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.plan.traffic import ReductionSpec
    from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce
    from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives
    from holmes_ext.runtime.reduce.reduction import Reduction

#: Classes of the hierarchical all-reduce. A job imports such a class only if its groups span clusters.
_OVER_NCCL = "holmes_ext.runtime.reduce.hierarchical_nccl:HierarchicalCollectives"
_OVER_GLOO = "holmes_ext.runtime.reduce.hierarchical:HierarchicalAllReduce"


class PlannedReduction:
    """The reduction that the plan chooses for the gradients of a process group.

    The plan may change while the job runs. follow_plan() then replaces the reduction. Reductions that were
    made once are kept, because each creates process groups.
    """

    def __init__(
        self, group: dist.ProcessGroup, size: int, device_type: str, compress: str | None = None
    ):
        """Choose the planned algorithm for a group's gradients, and set it up. All its ranks must do so.

        Args:
            group: Process group whose ranks sum gradients.
            size: Bytes of gradients that the group sums in a step.
            device_type: Device of the gradients, "cpu" or "cuda".
            compress: Compression between clusters: "off", "bf16" or "int8"; None for
                --holmes-compress-gradients.
        """
        self.size = size
        self.device_type = device_type
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.backend = backend_of(group, device_type)
        #: Planned bucket size, clusters and compression; None while holmes is off.
        self.spec: ReductionSpec | None = None
        #: None if the plan sums in a single ring, or holmes is off.
        self.hierarchical: Reduction | None = None
        self._group = group
        self._flat = FlatReduction(group)
        #: Planned reduction -> the object that was made for it; None: a single ring.
        self._made: dict[ReductionSpec, Reduction | None] = {}
        current = session.active()
        if current is not None:
            self._use(current.reduction(self.ranks, self.backend, size, compress))

    @property
    def reduction(self) -> Reduction:
        """The reduction that sums the gradients at present."""
        return self._flat if self.hierarchical is None else self.hierarchical

    def follow_plan(self) -> bool:
        """Use another algorithm for the sums from now on if measurements of the running job suggest it.

        --holmes-adapt compares measured reductions with predicted ones, and may change the plan, e.g. to a
        hierarchical all-reduce instead of a single ring. All ranks of the group must call this method at the
        beginning of a step, so that they change at the same step.

        Returns:
            Whether the reduction was replaced.
        """
        current = session.active()
        network_api = network_api_of(self.backend)
        if current is None or self.spec is None or not network_api:
            return False

        # This hook lets --holmes-adapt, an extension, compare measurements with predictions. It may
        # put a new plan into the session. reduction_from_measurements() returns the reduction of
        # such a plan, or None if there is none.
        hooks.on_reduction(current, self.ranks, network_api, self)
        spec = current.reduction_from_measurements(self.ranks, self.backend)
        if spec is None or spec == self.spec:
            return False
        if spec.compress != self.spec.compress:
            # The user may give a reducer another compression than --holmes-compress-gradients. The new
            # reduction was chosen for that flag's compression, so it does not suit such a reducer.
            return False
        self._use(spec)
        return True

    def _use(self, spec: ReductionSpec) -> None:
        """Use a planned reduction from now on; make it if it was not made before."""
        if spec not in self._made:
            made = hooks.reduction_for(self._group, self.size, spec, self.device_type)
            self._made[spec] = made or hierarchical_for(
                self._group, self.size, spec, self.device_type
            )
        self.spec = spec
        self.hierarchical = self._made[spec]

    def close(self) -> None:
        """End the threads of all reduction algorithms that were made for the group."""
        for made in self._made.values():
            if made is not None:
                made.close()


def planned_fabric(group: dist.ProcessGroup, device_type: str) -> Fabric | None:
    """Return the planned fabric (network) of a group; None inside a node, and while holmes is off."""
    current = session.active()
    if current is None:
        return None
    return current.fabric_of(dist.get_process_group_ranks(group), backend_of(group, device_type))


def check_bucket_bytes(given: int) -> None:
    """Raise HolmesError unless `given` is a positive whole number of bytes."""
    if not isinstance(given, int) or given < 1:
        way_out = "give a number of bytes above 0, or None"
        raise HolmesError(f"GradientReducer: bucket_bytes is {given!r}; {way_out}")


def bucket_bytes_for(
    planned: PlannedReduction | None, fabric: Fabric | None, rank_count: int, size: int
) -> int:
    """Return the size of a gradient bucket in bytes, where the user gave none.

    Args:
        planned: The plan's reduction of the gradients; None if the plan does not reduce them.
        fabric: The group's network; None if nothing is known of it.
        rank_count: Ranks of the group.
        size: Bytes of gradients that the group sums in a step.
    """
    if planned is not None and planned.spec is not None:
        if planned.hierarchical is not None:
            # A hierarchical all-reduce cuts each bucket into chunks, so a bucket as large as a chunk is
            # enough.
            return planned.spec.chunk_bytes
        return planned.spec.bucket_bytes
    if fabric is None:
        return flat_bucket.DEFAULT_BYTES
    return bucket_bytes_of(fabric, rank_count, size)


#: Warning that the steps of a hierarchical all-reduce will not overlap with the backward pass: with a single
#: hardware queue, the GPU takes the kernels of all CUDA streams in the order of their launches.
_NO_OVERLAP_WARNING = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: the steps of a hierarchical reduction share one hardware queue with the "
    "backward pass, so they run between its kernels and do not overlap them; set 8 or more where the "
    "framework allows it"
)


def hierarchical_for(
    group: dist.ProcessGroup, size: int, spec: ReductionSpec, device_type: str = ""
) -> Reduction | None:
    """Make the hierarchical reduction of a group, if the plan has chosen it for sums of this size.

    All ranks of the group must call this function.

    Args:
        group: Process group whose ranks sum gradients.
        size: Bytes of gradients that the group sums.
        spec: Planned reduction of the group.
        device_type: Device of the gradients, "cpu" or "cuda"; "" for the GPU if the host has a GPU, else the
            CPU.

    Returns:
        None if the group is in one cluster, or a single ring is faster for sums of this size.
    """
    # hierarchical_from: from so many bytes on, a hierarchical all-reduce is faster than a single
    # ring.
    is_planned = bool(spec.clusters) and size >= spec.hierarchical_from
    if not is_planned:
        return None
    network_api = network_api_of(backend_of(group, device_type))
    return hierarchical_over(dist.get_process_group_ranks(group), spec, network_api)


def hierarchical_over(
    ranks: Sequence[int], spec: ReductionSpec, network_api: str, purpose: str = "hierarchical"
) -> Reduction | None:
    """Make a hierarchical reduction over ranks that need not have a process group.

    All of the ranks must call this function.

    Args:
        ranks: Global ranks.
        spec: Planned chunk size, compression, and algorithm between clusters.
        network_api: "verbs" for NCCL, "sockets" for gloo.
        purpose: Describes the process groups that are made.

    Returns:
        None if all ranks are in one cluster.
    """
    ranks_by_cluster = session.require().plan.by_cluster(ranks)  # name of a cluster -> its ranks
    clusters = list(ranks_by_cluster.values())
    if len(clusters) == 1:
        return None
    if network_api != SOCKETS:
        # With CUDA_DEVICE_MAX_CONNECTIONS=1, all CUDA streams share a single hardware queue. Then
        # the sum cannot overlap the backward pass. Print a warning.
        if one_hardware_queue():
            tell(session.require(), _NO_OVERLAP_WARNING, once=_NO_OVERLAP_WARNING)
        # Between clusters, NCCL chooses the algorithm itself, so `spec.across` is not used.
        over_nccl: type[HierarchicalCollectives] = extensions.load(_OVER_NCCL)
        return over_nccl(
            clusters, chunk_bytes=spec.chunk_bytes, compress=spec.compress, purpose=purpose
        )

    # gloo: how sums pass between clusters. A ring or tree of clusters; None for a direct exchange:
    # each cluster sends to each other cluster.
    across = spec.across
    if across is not None and set(across.order) != set(ranks_by_cluster):
        across = None  # it was planned for other clusters than these
    over_gloo: type[HierarchicalAllReduce] = extensions.load(_OVER_GLOO)
    return over_gloo(
        clusters,
        chunk_bytes=spec.chunk_bytes,
        compress=spec.compress,
        across=across,
        names=list(ranks_by_cluster),
        streams=spec.streams,
        purpose=purpose,
    )
