"""FSDP over several clusters: its costs are told, and --holmes-fsdp hybrid keeps the shards inside clusters.

    fully_shard(module, mesh 1-D)           mesh 2-D, (clusters, ranks of one): torch's own HSDP
    FullyShardedDataParallel(FULL_SHARD)    HYBRID_SHARD over the same two groups

Only the mesh is another: all else is torch's, and a checkpoint loads under either (its tensors are global).
The first forward pass tells, on rank 0, what a step's gathers and reductions take, predicted, and what hybrid
would. A mesh that the program shaped itself stays; what it takes is told where its sharding crosses.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import FSDP
from holmes_ext.plan.sharding import ShardedWeights, equal_groups, sharded_seconds, straddling_rows
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.refusal import told_once
from holmes_ext.units import format_bytes

#: Device type -> the mesh of clusters; every module of a model must get the same one.
_meshes: dict[str, Any] = {}
#: What AdamW keeps for each weight: weight, gradient and two moments, in the weight's precision.
STATES = 4


def tell_unused(current: Session) -> None:
    """At the job's end, when --holmes-fsdp hybrid found nothing to do."""
    if not _meshes:
        tell(current, "--holmes-fsdp hybrid did nothing: no model was sharded by FSDP over several clusters")


@with_session
@by_name
def _fully_shard(current, call, instance, mesh, dp_mesh_dims=None):
    """fully_shard(module, mesh=...), every module of a model in turn."""
    plain = dp_mesh_dims is None and (mesh is None or mesh.ndim == 1)
    if plain and (hybrid := _hybrid(current, mesh)) is not None:
        return call(mesh=hybrid)
    return call()


@with_session
@by_name
def _fully_sharded(current, call, instance, module, process_group, sharding_strategy, device_mesh):
    """FullyShardedDataParallel(module, ...), which calls itself for the modules inside."""
    from torch.distributed.fsdp import ShardingStrategy

    given = sharding_strategy or ShardingStrategy.FULL_SHARD
    strategies = {ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
                  ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2}
    plain = not isinstance(process_group, tuple) and (device_mesh is None or device_mesh.ndim == 1)
    device_type = next((p.device.type for p in module.parameters()), "cpu")
    can = plain and given in strategies
    hybrid = _hybrid(current, device_mesh, process_group, device_type) if can else None
    if hybrid is None:
        return call()
    if device_mesh is not None:
        return call(sharding_strategy=strategies[given], device_mesh=hybrid)
    groups = (hybrid.get_group(1), hybrid.get_group(0))
    return call(sharding_strategy=strategies[given], process_group=groups)


def _hybrid(current: Session, mesh: Any, group: Any = None, device_type: str = "") -> Any:
    """The mesh (clusters, ranks of each), made once, in place of a 1-D mesh or a group; None: that stays."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if current.options.fsdp != "hybrid":
        return None
    plan, ranks = current.plan, group_ranks(mesh.get_group() if mesh is not None else group)
    if len(plan.by_cluster(ranks)) < 2:
        return None
    if mesh is not None:
        device_type = mesh.device_type
    elif not device_type:  # as torch chooses it for a mesh of its own
        accelerator = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
        device_type = accelerator.type if accelerator else "cpu"
    if _meshes.get(device_type) is not None:
        return _meshes[device_type]
    _meshes[device_type] = None  # FSDP was there, even where it is refused now: tell_unused
    try:
        if len(ranks) < plan.world_size:
            raise HolmesError(
                f"FSDP shards over {len(ranks)} of {plan.world_size} ranks, beside another kind of "
                f"parallelism: give fully_shard a 2-D mesh (replicate, shard) of its own instead")
        clusters = equal_groups(plan, ranks)
    except HolmesError as error:
        raise told_once(HolmesError(f"--holmes-fsdp hybrid: {error}")) from None
    names = ("dp_replicate", "dp_shard")
    _meshes[device_type] = DeviceMesh(device_type, torch.tensor(clusters), mesh_dim_names=names)
    return _meshes[device_type]


@with_session
@by_name
def _tell_root(current, call, instance):
    """Print what sharding costs, once all units are known: before the first forward pass of the root.

    Every unit calls its _lazy_init in every forward pass; only the root's first call has something to do.
    """
    first = instance._is_root is None
    call()
    if not first or not instance._is_root or current.rank != 0:
        return
    groups = [
        group for state in instance._state_ctx.all_states
        for group in getattr(state, "_fsdp_param_groups", ()) or [state._fsdp_param_group]  # before 2.12
        if group is not None
    ]  # fmt: skip
    if not groups:
        return
    weights = again = gradients = kept = 0.0
    for group in groups:
        for p in group.fsdp_params:
            policy, count, itemsize = p.mp_policy, prod(p._orig_size), p.sharded_param.itemsize
            travels = count * (policy.param_dtype.itemsize if policy.param_dtype else itemsize)
            weights += travels
            again += travels if group.post_forward_mesh_info is not None else 0
            gradients += count * (policy.reduce_dtype.itemsize if policy.reduce_dtype else travels / count)
            kept += count * itemsize
    what = ShardedWeights(len(groups), weights, gradients, again / weights)
    mesh_info = groups[0].mesh_info
    if mesh_info.mesh.ndim == 1:
        _tell_costs(current, mesh_info.shard_process_group, what, kept)
    elif _meshes:
        _tell_costs(current, None, what, kept)
    else:
        _tell_crossing(current, mesh_info.mesh, what)


@with_session
@by_name
def _tell_root_of_1(current, call, instance, state):
    """The same for FullyShardedDataParallel's _lazy_init(state, root_module)."""
    root = state
    first = root._is_root is None
    result = call()
    flats = [state._handle.flat_param for state in root._all_fsdp_states if state._handle] if first else []
    hybrid = getattr(root, "_inter_node_pg", None) is not None
    if flats and root._is_root and current.rank == 0 and (_meshes or not hybrid):
        kept = sum(flat._unpadded_unsharded_size.numel() * flat.dtype.itemsize for flat in flats)
        low = root.mixed_precision.param_dtype
        travels = kept * (low.itemsize / flats[0].dtype.itemsize if low else 1.0)
        what = ShardedWeights(len(flats), travels, travels)
        _tell_costs(current, None if hybrid else root.process_group, what, kept)
    return result


def _tell_costs(current: Session, group: Any, what: ShardedWeights, kept: float) -> None:
    """What sharding over a group takes, and hybrid (None: it is in force). kept: the weights' bytes."""
    plan, ranks = current.plan, group_ranks(group)
    clusters = plan.by_cluster(ranks)
    if len(clusters) < 2:
        return
    members = list(map(len, clusters.values()))
    possible = len(ranks) == plan.world_size and len(set(members)) == 1
    network_api = network_api_of(backend_of()) or SOCKETS
    flat_s, hybrid_s = (sharded_seconds(plan, ranks, what, network_api, hybrid=hybrid)
                        for hybrid in (False, possible))
    here, before = (format_bytes(STATES * kept / count) for count in (members[0], len(ranks)))
    memory = f"{here} of weights, gradients and AdamW's moments on each rank in place of {before}"
    text = (f"FSDP gathers {format_bytes(what.weight_bytes)} of weights across clusters "
            f"{', '.join(clusters)} in every step, {flat_s:.3g} s of it (predicted)")
    if group is None:
        text = (f"FSDP hybrid: sharded inside each of {len(clusters)} clusters, {hybrid_s:.3g} s of a step "
                f"in place of {flat_s:.3g} s (predicted), with {memory}")
    elif possible:
        text += f"; --holmes-fsdp hybrid: {hybrid_s:.3g} s, with {memory}"
    tell(current, text)


def _tell_crossing(current: Session, mesh: Any, what: ShardedWeights) -> None:
    """The program's own 2-D mesh, where no order of the nodes kept its sharding dimension inside clusters."""
    rows, plan, network_api = mesh.mesh.tolist(), current.plan, network_api_of(backend_of()) or SOCKETS
    if not (crossing := straddling_rows(plan, rows)):
        return
    taken = max(sharded_seconds(plan, row, what, network_api) for row in rows)
    name, clusters = (mesh.mesh_dim_names or ("", "1"))[1], plan.by_cluster(range(plan.world_size))
    most = gcd(*map(len, clusters.values()))
    held = ", ".join(f"{cluster} {len(members)}" for cluster, members in clusters.items())
    any_does = f"any size does (ranks of clusters: {held})"
    fits = f"size {most}, or a part of it, would not" if most > 1 else any_does
    tell(current, f"FSDP's mesh: dimension {name} (size {len(rows[0])}) crosses clusters: {crossing}, so "
                  f"every layer's weights cross, {taken:.3g} s of a step (predicted); {fits}")


_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FSDP1 = "torch.distributed.fsdp"

PATCHES = (
    Patch(FSDP, f"{_FSDP2}._fully_shard:fully_shard", "scripts know no clusters: here their mesh is given",
          _fully_shard),
    Patch(FSDP, f"{_FSDP2}._fsdp_state:FSDPState._lazy_init",
          "the first time that all units of a model are known", _tell_root),
    Patch(FSDP, f"{_FSDP1}.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
          "the same for FSDP1: groups and strategy are given here", _fully_sharded),
    Patch(FSDP, f"{_FSDP1}._runtime_utils:_lazy_init", "the first time that all units of a model are known",
          _tell_root_of_1, parameters=("state", "root_module")),
)  # fmt: skip
