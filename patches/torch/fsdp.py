"""Prints what FSDP over several clusters costs; --holmes-fsdp hybrid keeps the shards inside clusters.

With --holmes-fsdp hybrid, FSDP gets a 2-D mesh (clusters, ranks of a cluster) and works as torch's HSDP:

    the program calls                       it gets
    fully_shard with a 1-D mesh or none     the 2-D mesh
    FullyShardedDataParallel, FULL_SHARD    HYBRID_SHARD over the two groups of the 2-D mesh

Nothing else of FSDP changes. A checkpoint loads with either mesh, since its tensors are global. Before the
first forward pass, rank 0 prints the predicted seconds that a step spends on gathers and reductions, without
and with hybrid. A 2-D mesh of the program stays; if its sharding dimension crosses clusters, rank 0 prints
what that costs.
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
    """Shard a module (FSDP2) over the hybrid mesh, unless the program shaped a mesh itself.

    A program calls fully_shard once for each module of a model.
    """
    is_one_dimensional = dp_mesh_dims is None and (mesh is None or mesh.ndim == 1)
    if not is_one_dimensional:
        return call()
    hybrid_mesh = _hybrid(current, mesh)
    if hybrid_mesh is None:
        return call()
    return call(mesh=hybrid_mesh)


@with_session
@by_name
def _fully_sharded(current, call, instance, module, process_group, sharding_strategy, device_mesh):
    """Construct FullyShardedDataParallel (FSDP1) with the hybrid strategy that corresponds to the program's.

    A call whose process group, mesh or strategy is hybrid already stays as it is. With an auto_wrap_policy,
    the constructor calls itself for the submodules, which are handled in the same way.
    """
    from torch.distributed.fsdp import ShardingStrategy

    hybrid_strategies = {
        ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
        ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    hybrid_strategy = hybrid_strategies.get(sharding_strategy or ShardingStrategy.FULL_SHARD)
    has_hybrid_groups = isinstance(process_group, tuple)
    has_shaped_mesh = device_mesh is not None and device_mesh.ndim != 1
    if hybrid_strategy is None or has_hybrid_groups or has_shaped_mesh:
        return call()

    device_type = next((p.device.type for p in module.parameters()), "cpu")
    hybrid_mesh = _hybrid(current, device_mesh, process_group, device_type)
    if hybrid_mesh is None:
        return call()
    if device_mesh is not None:
        return call(sharding_strategy=hybrid_strategy, device_mesh=hybrid_mesh)
    replicate_group = hybrid_mesh.get_group(0)
    shard_group = hybrid_mesh.get_group(1)
    return call(sharding_strategy=hybrid_strategy, process_group=(shard_group, replicate_group))


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
    """Print what sharding by FSDP2 costs, before the first forward pass of the root module.

    FSDP2 calls _lazy_init of every sharded module in every forward pass. The root's first call decides which
    module is the root. From then on all sharded modules are known.
    """
    is_first_call = instance._is_root is None
    call()
    if not is_first_call or not instance._is_root or current.rank != 0:
        return

    groups = _parameter_groups(instance)
    if not groups:
        return
    weights, stored_bytes = _sharded_weights(groups)
    mesh_info = groups[0].mesh_info
    if mesh_info.mesh.ndim == 1:
        _tell_costs(current, mesh_info.shard_process_group, weights, stored_bytes)
    elif _meshes:
        _tell_costs(current, None, weights, stored_bytes)
    else:
        _tell_crossing(current, mesh_info.mesh, weights)


def _parameter_groups(root: Any) -> list[Any]:
    """Return FSDP2's FSDPParamGroup objects of all modules below the root: each is gathered as one."""
    groups: list[Any] = []
    for state in root._state_ctx.all_states:
        if getattr(state, "_fsdp_param_groups", ()):
            groups += state._fsdp_param_groups
        else:
            groups.append(state._fsdp_param_group)  # torch before 2.12
    return [group for group in groups if group is not None]


def _sharded_weights(groups: list[Any]) -> tuple[ShardedWeights, float]:
    """Return what a step of FSDP2 sends, and the bytes of all weights as they are stored."""
    weight_bytes = regathered_bytes = gradient_bytes = stored_bytes = 0.0
    for group in groups:
        for parameter in group.fsdp_params:
            policy = parameter.mp_policy
            count = prod(parameter._orig_size)
            stored_itemsize = parameter.sharded_param.itemsize
            sent_itemsize = policy.param_dtype.itemsize if policy.param_dtype else stored_itemsize
            gradient_itemsize = policy.reduce_dtype.itemsize if policy.reduce_dtype else sent_itemsize
            weight_bytes += count * sent_itemsize
            if group.post_forward_mesh_info is not None:  # the backward pass gathers the weights again
                regathered_bytes += count * sent_itemsize
            gradient_bytes += count * gradient_itemsize
            stored_bytes += count * stored_itemsize
    sent = ShardedWeights(len(groups), weight_bytes, gradient_bytes, regathered_bytes / weight_bytes)
    return sent, stored_bytes


@with_session
@by_name
def _tell_root_of_1(current, call, instance, state):
    """Print what sharding by FullyShardedDataParallel (FSDP1) costs, before the root's first forward pass.

    A program's own hybrid strategy is not described: nothing could be improved by --holmes-fsdp hybrid.
    """
    is_first_call = state._is_root is None
    result = call()
    if not is_first_call or not state._is_root or current.rank != 0:
        return result
    is_hybrid = getattr(state, "_inter_node_pg", None) is not None
    if is_hybrid and not _meshes:
        return result
    flat_parameters = [unit._handle.flat_param for unit in state._all_fsdp_states if unit._handle]
    if not flat_parameters:
        return result

    stored_bytes = sum(
        flat._unpadded_unsharded_size.numel() * flat.dtype.itemsize for flat in flat_parameters
    )
    sent_bytes = float(stored_bytes)
    sent_dtype = state.mixed_precision.param_dtype
    if sent_dtype:
        sent_bytes = stored_bytes * (sent_dtype.itemsize / flat_parameters[0].dtype.itemsize)
    weights = ShardedWeights(len(flat_parameters), sent_bytes, sent_bytes)
    group = None if is_hybrid else state.process_group
    _tell_costs(current, group, weights, stored_bytes)
    return result


def _tell_costs(current: Session, group: Any, what: ShardedWeights, kept: float) -> None:
    """Print the predicted seconds a step that sharding takes, and those of --holmes-fsdp hybrid.

    Args:
        group: The process group of the shards; None if the hybrid mesh is in use.
        what: What a step gathers and reduces.
        kept: Bytes of all weights as they are stored.
    """
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
