"""What a process group is for, by its ranks and the job's sizes; how many bytes an operation sends.

    ranks of one data-parallel group -> "data"     (first stage, last stage) of a
                                                   longer pipeline -> "embedding"
    two neighbouring stages          -> "pipeline" everything                                     -> "world"

Where the program itself says what a group is for (megatron-core's group_desc, a DeviceMesh's dimension,
holmes's own groups), that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.plan.sizes import AXES, Sizes

KINDS = ("data", "tensor", "pipeline", "context", "expert", "embedding", "world", "other")
#: Words of a group's description (lower case) and its kind; the first that fits counts.
_WORDS = (
    ("embedding", "embedding"), ("two-level", "data"), ("pipeline pair", "pipeline"),
    ("pipeline twin", "pipeline"), ("pipeline activations", "pipeline"), ("pipeline gradients", "pipeline"),
    ("expert_data", "data"), ("expert", "expert"), ("distributed_optimizer_instance", "data"),
    ("tensor_and", "other"), ("data_parallel", "data"), ("context_parallel", "context"),
    ("hybrid_dp_cp", "context"), ("hierarchical", "context"), ("tensor_model_parallel", "tensor"),
    ("pipeline_model_parallel", "pipeline"), ("default_pg", "world"),
)  # fmt: skip
#: Parts of a mesh dimension's name (PyTorch's tutorials, torchtitan) and its kind; the first that is among
#: them counts: a group of "dp_shard_cp" shards weights.
_DIMENSIONS = {
    "dp": "data", "replicate": "data", "shard": "data", "fsdp": "data", "tp": "tensor", "cp": "context",
    "pp": "pipeline", "ep": "expert",
}  # fmt: skip


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
        spans = {axis for axis in AXES
                 if any(set(sizes.group(members[0], axis)) & {rank} for rank in members[1:])}
        if spans == {"dp"} or (spans == {"dp", "cp"}
                               and len(members) == sizes.data * sizes.context < world_size):
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
    factor = _RING[operation](ranks) if operation in _RING and (ranks > 1 or operation == "send") else 0
    if operation == "reduce_scatter" and backend == "gloo":
        factor *= 2
    return payload * factor
