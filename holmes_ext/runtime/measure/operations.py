"""One operation of torch.distributed and its process group, as telemetry and the watchdog see them.

What a group is for follows from its ranks and the job's sizes; sent_bytes() is what an operation sends:

    ranks of one data-parallel group -> "data"     (first stage, last stage) of a
                                                   longer pipeline -> "embedding"
    two neighbouring stages          -> "pipeline" everything                                     -> "world"

Where the program itself says what a group is for (megatron-core's group_desc, a DeviceMesh's dimension,
holmes's own groups), that counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.plan.sizes import AXES, Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, traits_of

KINDS = ("data", "tensor", "pipeline", "context", "expert", "embedding", "world", "other")
#: Words of a group's description (lower case) and its kind; the first that fits counts.
_WORDS = (
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
#: Parts of a mesh dimension's name (PyTorch's tutorials, torchtitan) and its kind; the first that is among
#: them counts: a group of "dp_shard_cp" shards weights.
_DIMENSIONS = {
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
    """One of KINDS. sizes: complete, or None where nobody told them."""
    return described(description) or kind_of_ranks(ranks, sizes, world_size)


def described(description: str) -> str:
    """The kind that a description tells, "" when it tells none."""
    text = description.lower()
    if text.startswith("mesh_"):
        parts = text.split("_")
        return next((kind for part, kind in _DIMENSIONS.items() if part in parts), "")
    return next((kind for word, kind in _WORDS if word in text), "")


def kind_of_ranks(ranks: Sequence[int], sizes: Sizes | None, world_size: int) -> str:
    """The same from the ranks alone. A group of all ranks is "world", unless one axis is all there is."""
    members = tuple(sorted(ranks))
    if sizes is not None and len(members) > 1:
        for axis, kind in AXES.items():
            group = sizes.group(members[0], axis)
            if members == tuple(sorted(group)):
                return kind
        stages = sorted(sizes.group(members[0], "pp"))
        if set(members) <= set(stages):
            places = [stages.index(rank) for rank in members]
            return "embedding" if places == [0, len(stages) - 1] and len(stages) > 2 else "pipeline"
        spans = {
            axis
            for axis in AXES
            if any(set(sizes.group(members[0], axis)) & {rank} for rank in members[1:])
        }
        if spans == {"dp"} or (
            spans == {"dp", "cp"} and len(members) == sizes.data * sizes.context < world_size
        ):
            return "data"
    return "world" if len(members) == world_size else "other"


#: Bytes that a rank of a group of n sends, for each byte of the payload (see PAYLOAD in telemetry's patches):
#: what ring algorithms move (Thakur, Rabenseifner and Gropp 2005). For rooted ones the mean over the ranks.
_RING = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,  # of this rank's share
    "reduce_scatter": lambda n: n - 1,  # of this rank's share
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1,
}


def sent_bytes(operation: str, payload: int, ranks: int, backend: str) -> float:
    """Bytes that one rank sends in `operation` among `ranks`; gloo's reduce-scatter is an all-reduce."""
    factor = (
        _RING[operation](ranks) if operation in _RING and (ranks > 1 or operation == "send") else 0
    )
    if operation == "reduce_scatter" and backend == "gloo":
        factor *= 2
    return payload * factor


class GroupTraffic:
    """A process group as this rank sees it: members, transport, operations started."""

    def __init__(self, process_group: Any):
        import torch.distributed as dist

        current = session.require()
        self.name = process_group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.backend = backend_of(process_group)
        traits = traits_of(self.backend)
        self.is_on_device = traits.is_nccl  # its operations run on CUDA streams
        self.is_nccl2 = traits.is_nccl2
        self.description = str(process_group.group_desc or "").replace("undefined", "")
        made = [
            r.transport
            for r in current.groups
            if r.ranks == self.ranks and r.backend == self.backend
        ]
        self.transport = made[-1] if made else current.transport(self.ranks, self.backend)
        self.world_size = current.plan.world_size
        self.collectives = 0
        self.messages: dict[
            tuple[str, int], int
        ] = {}  # ("send" or "receive", the other's rank) -> how many
        self.on_device: deque[Op] = (
            deque()
        )  # over NCCL: those under way, in the order of their launch
        self.last_end = 0.0  # of those: one communicator works in that order

    def kind(self, sizes: Sizes | None, peer: int | None, rank: int) -> str:
        """What it is for; a message between two ranks may belong to the pipeline over any group."""
        if (
            peer is not None
            and len(self.ranks) > 2
            and described(self.description) in ("", "world")
        ):
            return kind_of_ranks((rank, peer), sizes, self.world_size) if sizes else "other"
        return kind_of(self.ranks, self.description, sizes, self.world_size)


@dataclass(slots=True, eq=False)
class Op:
    """payload, sent: bytes (sent_bytes); peer: of a send or receive; number: which of the group's
    collectives, or messages with the peer; end: 0 while under way; block: began and ended with it."""

    group: GroupTraffic
    name: str
    payload: int
    sent: float
    peer: int | None
    number: int
    start: float
    end: float = 0.0
    waited: float = 0.0
    work: Any = None
    background: bool = False
    is_synchronous: bool = False  # called without async_op=True
    block: Sequence[Op] = ()
    # NCCL: before its launch; ended: after it, or after the stream has waited for it
    began: Mark | None = None
    ended: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)  # NCCL: around the stream's waits
    seen_over: float = 0.0  # NCCL: when torch said so, and what it took
    duration: float = 0.0


@dataclass(slots=True)
class Mark:
    """A CUDA event, its stream, and the clock when it was recorded."""

    event: Any
    stream: Any
    at: float
