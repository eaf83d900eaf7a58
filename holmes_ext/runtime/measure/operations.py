"""Describes operations of torch.distributed and their process groups, for telemetry and the watchdog.

The kind of a group is the parallelism that it serves. If the group has a description, the kind is taken from
that: megatron-core's group_desc, the dimension of a DeviceMesh, or the name of a group that holmes made.
Otherwise the kind is derived from the group's ranks and the parallel sizes of the job:

    ranks of a data-parallel group                       "data"; other parallel dimensions likewise
    neighbouring stages of a pipeline                    "pipeline"
    first and last stage of a pipeline with more stages  "embedding"
    all ranks                                            "world"
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.plan.sizes import AXES, Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, traits_of

#: Purposes of process groups. "embedding": first and last pipeline stage, because they share a
#: weight.
KINDS = ("data", "tensor", "pipeline", "context", "expert", "embedding", "world", "other")
#: (part of a group's description in lower case, kind of the group). The first part that is found counts.
_DESCRIPTIONS = (
    ("embedding", "embedding"),
    ("hierarchical", "data"),
    ("pipeline pair", "pipeline"),
    ("pipeline twin", "pipeline"),
    ("pipeline activations", "pipeline"),
    ("pipeline gradients", "pipeline"),
    ("expert_data", "data"),
    ("expert", "expert"),
    ("distributed_optimizer_instance", "data"),
    ("tensor_and", "other"),
    ("data_parallel", "data"),
    ("context_parallel", "context"),
    ("hybrid_dp_cp", "context"),
    ("hierarchical", "context"),
    ("tensor_model_parallel", "tensor"),
    ("pipeline_model_parallel", "pipeline"),
    ("default_pg", "world"),
)
#: Part of the name of a DeviceMesh's dimension, as PyTorch's tutorials and torchtitan use it -> kind of its
#: groups. The first part that the name contains counts: a group of "dp_shard_cp" shards weights, so it is
#: "data".
_MESH_DIMENSIONS = {
    "dp": "data",
    "replicate": "data",
    "shard": "data",
    "fsdp": "data",
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "ep": "expert",
}


def kind_of(ranks: Sequence[int], description: str, sizes: Sizes | None, world_size: int) -> str:
    """Return the kind of parallelism that a process group serves.

    It follows from the group's description, or else from its ranks and the parallel sizes.

    Args:
        ranks: Members of the group.
        description: The program's description of the group; "" if there is none.
        sizes: Parallel sizes, including the data-parallel size; None if they are unknown.
        world_size: Ranks of the job.

    Returns:
        "data", "tensor", "pipeline", "context", "expert", "embedding" (the first and the last
        pipeline stage: they share a weight), "world" (all ranks) or "other".
    """
    return described(description) or kind_of_ranks(ranks, sizes, world_size)


def described(description: str) -> str:
    """Return the kind of parallelism that a process group serves, as described by its group_desc.

    Example: "mesh_dp_shard" -> "data", "pipeline_model_parallel_group" -> "pipeline", "default_pg"
    -> "world", "my_group" -> "".

    Args:
        description: torch's group_desc.

    Returns:
        "data", "tensor", "pipeline", "context", "expert", "embedding" (the first and the last
        pipeline stage), "world" (all ranks) or "other"; "" if the description does not show it.
    """
    text = description.lower()
    if text.startswith("mesh_"):  # torch's description of a group of a DeviceMesh
        parts = text.split("_")
        for name, kind in _MESH_DIMENSIONS.items():
            if name in parts:
                return kind
        return ""
    for words, kind in _DESCRIPTIONS:  # names that Megatron and holmes use
        if words in text:
            return kind
    return ""


def kind_of_ranks(ranks: Sequence[int], sizes: Sizes | None, world_size: int) -> str:
    """Return the kind of parallelism that a process group serves, derived from its ranks.

    The ranks are compared with the groups that follow from the parallel sizes. If no group fits, or
    the sizes are unknown, the kind is "world" for a group of all ranks and "other" for any other
    group.

    Args:
        ranks: Members of the group.
        sizes: Parallel sizes, including the data-parallel size; None if they are unknown.
        world_size: Ranks of the job.

    Returns:
        "data", "tensor", "pipeline", "context", "embedding" (the first and the last pipeline
        stage), "world" (all ranks) or "other".
    """
    members = tuple(sorted(ranks))
    if sizes is not None and len(members) > 1:
        kind = _kind_by_sizes(members, sizes, world_size)
        if kind:
            return kind
    return "world" if len(members) == world_size else "other"


def _kind_by_sizes(members: tuple[int, ...], sizes: Sizes, world_size: int) -> str:
    """Return the kind of parallelism whose groups, by the parallel sizes, have these ranks.

    Example: with 2 tensor-parallel and 2 data-parallel ranks, (0, 1) -> "tensor" and (0, 2) ->
    "data".

    Args:
        members: Sorted global ranks, two or more.
        sizes: Parallel sizes of the job.
        world_size: Ranks of the job.

    Returns:
        "tensor", "context", "data", "pipeline" or "embedding" (the first and the last pipeline
        stage); "" if no group fits.
    """
    first = members[0]
    for axis, kind in AXES.items():  # e.g. "dp" -> "data"
        if members == tuple(sorted(sizes.group(first, axis))):
            return kind

    pipeline = sorted(sizes.group(first, "pp"))
    if set(members) <= set(pipeline):
        stages = [pipeline.index(rank) for rank in members]
        last_stage = len(pipeline) - 1
        if stages == [0, last_stage] and last_stage > 1:  # they share the embedding's weight
            return "embedding"
        return "pipeline"

    # The group is no complete group of a single dimension. Collect the dimensions ("dp", "cp", ...)
    # that alone lead from the first member to some other member.
    axes = set()
    for axis in AXES:
        ranks_along_axis = set(sizes.group(first, axis))
        if ranks_along_axis & set(members[1:]):
            axes.add(axis)
    if axes == {"dp"}:  # a part of a data-parallel group
        return "data"

    # Gradients are averaged over data-parallel and context-parallel ranks together. But a group of
    # all ranks of the job may have another purpose. For such a group the result is "", and the
    # caller then takes it for "world".
    has_all_dp_cp_ranks = len(members) == sizes.data * sizes.context
    is_world = len(members) == world_size
    if axes == {"dp", "cp"} and has_all_dp_cp_ranks and not is_world:
        return "data"
    return ""


#: Operation -> bytes that a rank of a group of n ranks sends, for each byte of the payload. These are the
#: numbers of ring algorithms (Thakur, Rabenseifner and Gropp 2005). For operations with a root it is the mean
#: over all ranks. The payload of all_gather and reduce_scatter is this rank's share.
_SENT_PER_PAYLOAD_BYTE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1,
}


def sent_bytes(operation: str, payload: int, ranks: int, backend: str) -> float:
    """Return the bytes that a rank sends in an operation; 0 for an unknown operation such as "receive".

    Args:
        operation: Name of the operation, such as "all_reduce".
        payload: Bytes of the rank's tensors.
        ranks: Ranks of the process group.
        backend: Backend of the process group. gloo's reduce-scatter is an all-reduce and sends twice as much.
    """
    if operation not in _SENT_PER_PAYLOAD_BYTE:
        return 0
    # A collective of a single rank sends nothing. A message counts whatever the size of its group.
    if ranks <= 1 and operation != "send":
        return 0
    factor = _SENT_PER_PAYLOAD_BYTE[operation](ranks)  # e.g. 2 (n - 1) / n of an all-reduce
    if operation == "reduce_scatter" and backend == "gloo":
        factor *= 2
    return payload * factor


class GroupTraffic:
    """A process group as this rank sees it: members, network, and operations started so far."""

    def __init__(self, process_group: Any):
        """Read the members, the description and the network of a process group of torch.

        holmes recorded the network (transport) when the group was made.
        """
        import torch.distributed as dist

        current = session.require()
        self.name = process_group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.backend = backend_of(process_group)
        traits = traits_of(self.backend)
        self.is_on_device = traits.is_nccl  # its operations run on CUDA streams

        # torch's newer NCCL backend. Since torch 2.15, the name "nccl" stands for it, too.
        self.is_nccl2 = traits.is_nccl2
        # torch's description of a group that the program has not described is "undefined".
        self.description = str(process_group.group_desc or "").replace("undefined", "")
        transports = [
            record.transport
            for record in current.groups
            if record.ranks == self.ranks and record.backend == self.backend
        ]
        if transports:
            self.transport = transports[-1]  # of the latest group with these ranks
        else:
            # holmes did not record the group when it was made: assume the network that the plan has
            # for these ranks.
            self.transport = current.transport(self.ranks, self.backend)
        self.world_size = current.plan.world_size
        self.collectives = 0  # started so far
        #: ("send" or "receive", rank of the other end) -> messages started so far.
        self.messages: dict[tuple[str, int], int] = {}
        #: NCCL: operations under way, in the order of their launch.
        self.on_device: deque[Op] = deque()
        #: NCCL: end of the last operation, in seconds. A communicator works in the order of launches.
        self.last_end = 0.0

    def kind(self, sizes: Sizes | None, peer: int | None, rank: int) -> str:
        """Return the kind of parallelism that an operation of this process group serves.

        This is the kind of the group, derived from its description or else from its ranks.
        Exception: a send or receive in a group of 3 or more ranks, if the description does not name
        a kind or names "world". Then the kind of a group of only the two ranks is returned, because
        engines send between pipeline stages in the group of all ranks.

        Args:
            sizes: Parallel sizes of the job, if known.
            peer: Rank of the other end of a send or receive; None for a collective.
            rank: This rank.

        Returns:
            "data", "tensor", "pipeline", "context", "expert", "embedding" (the first and the last
            pipeline stage), "world" (all ranks) or "other".
        """
        has_no_purpose = described(self.description) in ("", "world")
        if peer is not None and len(self.ranks) > 2 and has_no_purpose:  # noqa: PLR2004 - more than a pair
            if sizes is None:
                return "other"
            return kind_of_ranks((rank, peer), sizes, self.world_size)
        return kind_of(self.ranks, self.description, sizes, self.world_size)


@dataclass(slots=True, eq=False)
class Op:
    """An operation of torch.distributed that the program has started. All times are in seconds."""

    group: GroupTraffic
    name: str  # such as "all_reduce"
    payload: int  # bytes of this rank's tensors
    sent: float  # bytes that this rank sends
    peer: int | None  # rank of the other end of a send or receive; None for a collective
    number: int  # among the group's collectives, or among the messages with `peer`
    start: float
    end: float = 0.0  # 0 while it is under way
    waited: float = 0.0  # seconds that the program, or the GPU's compute stream, stood still
    work: Any = None  # weak reference to torch's Work
    background: bool = False  # started by another thread than the main thread
    is_synchronous: bool = False  # called without async_op=True
    coalesced: Sequence[
        Op
    ] = ()  # operations that were coalesced with this operation, the last of them

    # The following fields are used with NCCL only.
    launch_mark: Mark | None = None  # directly before the launch
    end_mark: Mark | None = None  # after the operation, or after the first wait for it
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)  # around each wait of the stream
    completed_at: float = 0.0  # when its Work was first seen completed; 0 before
    duration: float = 0.0  # as torch measured it; 0 if unknown


@dataclass(slots=True)
class Mark:
    """A CUDA event that was recorded on a stream."""

    event: Any
    stream: Any
    at: float  # host time, in seconds, when it was recorded
