"""FSDP over several clusters: what it costs is told, and --holmes-fsdp hybrid keeps the shards inside
clusters.

    fully_shard(module, mesh 1-D)           mesh 2-D, (clusters, ranks of one): torch's own HSDP,
                                            which shards along the last dimension and all-reduces
                                            each shard's gradient along the first
    FullyShardedDataParallel(FULL_SHARD)    HYBRID_SHARD over the same two groups

Only the mesh is another: streams, order of launches, gradient accumulation, clipping, mixed precision and
torch.distributed.checkpoint are torch's, and a checkpoint loads under either mesh (its tensors are global).
Without the flag the first forward pass tells, on rank 0, what a step's gathers and reductions take,
predicted, and what hybrid would take, in seconds and in memory. A mesh that the program shaped itself stays;
where its sharding dimension crosses, that and what it takes is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import ByVersion, Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import FSDP
from holmes_ext.plan.sharding import ShardedWeights, equal_groups, sharded_seconds, straddling_rows
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.start.refusal import told_once
from holmes_ext.units import format_bytes

#: Device type -> the mesh of clusters; every module of a model must get the same one.
_meshes: dict[str, Any] = {}
#: Of fully_shard's state of a module: its groups of parameters.
_GROUPS = ByVersion("torch", {"of": (
    ("0", lambda state: filter(None, [state._fsdp_param_group])),
    ("2.12", lambda state: state._fsdp_param_groups),
)})  # fmt: skip
#: What AdamW keeps for each weight: weight, gradient and two moments, in the weight's precision.
STATES = 4


def tell_unused(current: session.Session) -> None:
    """At the job's end, when --holmes-fsdp hybrid found nothing to do."""
    if not _meshes:
        tell(current, "--holmes-fsdp hybrid did nothing: no model was sharded by FSDP over several clusters")


@with_session
def _fully_shard(current, wrapped, instance, args, kwargs):
    """fully_shard(module, mesh=...), every module of a model in turn."""
    mesh = kwargs.get("mesh")
    plain = kwargs.get("dp_mesh_dims") is None and (mesh is None or mesh.ndim == 1)
    if plain and (hybrid := _hybrid(current, mesh)) is not None:
        kwargs = {**kwargs, "mesh": hybrid}
    return wrapped(*args, **kwargs)


@with_session
@by_name
def _fully_sharded(current, wrapped, instance, module, process_group=None, sharding_strategy=None, *rest,
                   device_mesh=None, **more):
    """FullyShardedDataParallel(module, ...), which calls itself for the modules inside."""
    from torch.distributed.fsdp import ShardingStrategy

    strategies = {
        None: ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
        ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
    }  # fmt: skip
    plain = not isinstance(process_group, tuple) and (device_mesh is None or device_mesh.ndim == 1)
    device_type = next((p.device.type for p in module.parameters()), "cpu")
    can = plain and sharding_strategy in strategies
    if can and (hybrid := _hybrid(current, device_mesh, process_group, device_type)) is not None:
        sharding_strategy = strategies[sharding_strategy]
        if device_mesh is not None:
            device_mesh = hybrid
        else:
            process_group = (hybrid.get_group(1), hybrid.get_group(0))
    more |= {} if device_mesh is None else {"device_mesh": device_mesh}
    return wrapped(module, process_group, sharding_strategy, *rest, **more)


def _hybrid(current: session.Session, mesh: Any, group: Any = None, device_type: str = "") -> Any:
    """The mesh of clusters in place of a 1-D mesh or a group; None where that stays."""
    if current.options.fsdp != "hybrid":
        return None
    ranks = group_ranks(mesh.get_group() if mesh is not None else group)
    if len(current.plan.by_cluster(ranks)) < 2:
        return None
    return _clusters_mesh(current, ranks, _device_type(mesh, device_type))


def _device_type(mesh: Any, otherwise: str = "") -> str:
    """As torch chooses it for a mesh of its own."""
    import torch

    if mesh is not None or otherwise:
        return otherwise if mesh is None else mesh.device_type
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def _clusters_mesh(current: session.Session, ranks: Sequence[int], device_type: str) -> Any:
    """The 2-D mesh (clusters, ranks of each); made once, by all ranks."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if _meshes.get(device_type) is not None:
        return _meshes[device_type]
    _meshes[device_type] = None  # FSDP was there, even where it is refused now: tell_unused
    if len(ranks) < current.plan.world_size:
        raise told_once(HolmesError(
            f"--holmes-fsdp hybrid: FSDP shards over {len(ranks)} of {current.plan.world_size} ranks, beside "
            f"another kind of parallelism: give fully_shard a 2-D mesh (replicate, shard) of its own instead"
        ))  # fmt: skip
    try:
        clusters = equal_groups(current.plan, ranks)
    except HolmesError as error:
        raise told_once(HolmesError(f"--holmes-fsdp hybrid: {error}")) from None
    mesh = DeviceMesh(device_type, torch.tensor(clusters), mesh_dim_names=("dp_replicate", "dp_shard"))
    _meshes[device_type] = mesh
    return mesh


@with_session
def _tell_root(current, wrapped, instance, args, kwargs):
    """fully_shard's root before its first forward pass: now all units are known."""
    first = instance._is_root is None
    wrapped(*args, **kwargs)
    groups = [group for state in instance._state_ctx.all_states for group in _GROUPS["of"](state)]
    if not first or not instance._is_root or current.rank != 0 or not groups:
        return
    weights = again = gradients = kept = 0.0
    for group in groups:
        for parameter in group.fsdp_params:
            policy, count = parameter.mp_policy, prod(parameter._orig_size)
            itemsize = parameter.sharded_param.itemsize
            travels = count * (policy.param_dtype.itemsize if policy.param_dtype else itemsize)
            weights += travels
            again += travels if group.post_forward_mesh_info is not None else 0
            gradients += count * (policy.reduce_dtype.itemsize if policy.reduce_dtype else travels / count)
            kept += count * itemsize
    what = ShardedWeights(len(groups), weights, gradients, again / weights)
    mesh_info = groups[0].mesh_info
    if mesh_info.mesh.ndim == 1:
        _tell_costs(current, group_ranks(mesh_info.shard_process_group), what, kept)
    elif _meshes:
        _tell_hybrid(current, what, kept)
    else:
        _tell_crossing(current, mesh_info.mesh, what)


@with_session
def _tell_root_of_1(current, wrapped, instance, args, kwargs):
    """The same for FullyShardedDataParallel's _lazy_init(state, root_module)."""
    root = args[0]
    first = root._is_root is None
    result = wrapped(*args, **kwargs)
    handles = [handle for state in root._all_fsdp_states if (handle := state._handle)] if first else []
    if not handles or not root._is_root or current.rank != 0:
        return result
    flats = [handle.flat_param for handle in handles]
    kept = sum(flat._unpadded_unsharded_size.numel() * flat.dtype.itemsize for flat in flats)
    low = root.mixed_precision
    share = low.param_dtype.itemsize / flats[0].dtype.itemsize if low.param_dtype else 1.0
    what = ShardedWeights(len(flats), share * kept, share * kept)
    if getattr(root, "_inter_node_pg", None) is None:
        _tell_costs(current, group_ranks(root.process_group), what, kept)
    elif _meshes:
        _tell_hybrid(current, what, kept)
    return result


def _tell_costs(current: session.Session, ranks: Sequence[int], what: ShardedWeights, kept: float) -> None:
    """Weights sharded over several clusters: what that takes, and what hybrid would. kept: their bytes."""
    network_api, clusters = network_api_of(backend_of()) or SOCKETS, current.plan.by_cluster(ranks)
    if len(clusters) < 2:
        return
    taken = sharded_seconds(current.plan, ranks, what, network_api)
    text = (f"FSDP gathers {format_bytes(what.weight_bytes)} of weights across clusters "
            f"{', '.join(clusters)} in every step, {taken:.3g} s of it (predicted)")
    if len(ranks) == current.plan.world_size and len(set(map(len, clusters.values()))) == 1:
        members = list(clusters.values())
        hybrid = sharded_seconds(current.plan, ranks, what, network_api, hybrid=True)
        text += f"; --holmes-fsdp hybrid: {hybrid:.3g} s, with {_memory(kept, len(members[0]), len(ranks))}"
    tell(current, text)


def _tell_crossing(current: session.Session, mesh: Any, what: ShardedWeights) -> None:
    """The program's own 2-D mesh, where no order of the nodes kept its sharding dimension inside clusters."""
    rows, plan = mesh.mesh.tolist(), current.plan
    if not (crossing := straddling_rows(plan, rows)):
        return
    taken = max(sharded_seconds(plan, row, what, network_api_of(backend_of()) or SOCKETS) for row in rows)
    name, clusters = (mesh.mesh_dim_names or ("", "1"))[1], plan.by_cluster(range(plan.world_size))
    most = gcd(*map(len, clusters.values()))
    held = ", ".join(f"{cluster} {len(members)}" for cluster, members in clusters.items())
    any_does = f"any size does (ranks of clusters: {held})"
    fits = f"size {most}, or a part of it, would not" if most > 1 else any_does
    tell(current, f"FSDP's mesh: dimension {name} (size {len(rows[0])}) crosses clusters: {crossing}, so "
                  f"every layer's weights cross, {taken:.3g} s of a step (predicted); {fits}")


def _tell_hybrid(current: session.Session, what: ShardedWeights, kept: float) -> None:
    ranks = range(current.plan.world_size)
    members, network_api = equal_groups(current.plan, ranks), network_api_of(backend_of()) or SOCKETS
    hybrid, flat = (sharded_seconds(current.plan, ranks, what, network_api, hybrid=hybrid)
                    for hybrid in (True, False))
    tell(
        current,
        f"FSDP hybrid: sharded inside each of {len(members)} clusters, {hybrid:.3g} s of a step in place of "
        f"{flat:.3g} s (predicted), with {_memory(kept, len(members[0]), len(ranks))}",
    )


def _memory(kept: float, inside: int, everywhere: int) -> str:
    here, before = (format_bytes(STATES * kept / count) for count in (inside, everywhere))
    return f"{here} of weights, gradients and AdamW's moments on each rank in place of {before}"


_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FSDP1 = "torch.distributed.fsdp"

PATCHES = (
    Patch(FSDP, f"{_FSDP2}._fully_shard:fully_shard", "scripts know no clusters: here their mesh is given",
          _fully_shard, parameters=("mesh",)),
    Patch(FSDP, f"{_FSDP2}._fsdp_state:FSDPState._lazy_init",
          "the first time that all units of a model are known", _tell_root),
    Patch(FSDP, f"{_FSDP1}.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
          "the same for FSDP1: groups and strategy are given here", _fully_sharded),
    Patch(FSDP, f"{_FSDP1}._runtime_utils:_lazy_init", "the first time that all units of a model are known",
          _tell_root_of_1, parameters=("state", "root_module")),
)  # fmt: skip
