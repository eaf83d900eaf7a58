"""Predicts the time that FSDP spends on communication, and can shard inside each cluster only.

Without --holmes-fsdp hybrid, FSDP works as in torch without holmes. Before the first forward pass, rank 0
prints the predicted seconds that a step spends on gathers and reductions, and how many --holmes-fsdp hybrid
would need.

With --holmes-fsdp hybrid, holmes changes the arguments of FSDP so that it works as torch's HSDP (hybrid
sharding), over the "hybrid mesh" (clusters x ranks of a cluster):

    the program's call                      change by holmes
    fully_shard with a 1-D mesh or none     mesh: the hybrid mesh
    FullyShardedDataParallel, FULL_SHARD    strategy: HYBRID_SHARD, over the two groups of the hybrid mesh

A 2-D mesh of the program is not changed. If its sharding dimension spans clusters, rank 0 prints the
predicted time. A checkpoint loads with either mesh, since its tensors are global.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import FSDP
from holmes_ext.plan.sharding import ShardedWeights, equal_groups, sharded_seconds, spanning_rows
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.deadline import told_once
from holmes_ext.runtime.session import Session, tell
from holmes_ext.units import format_bytes

#: Device type -> holmes's hybrid mesh (clusters x ranks of a cluster). All modules of a model must
#: share it. The mesh is None if it could not be made. The dict is empty if no model was sharded
#: over several clusters, or without --holmes-fsdp hybrid.
_hybrid_meshes: dict[str, Any] = {}
#: Numbers that training with AdamW keeps for each weight: the weight, its gradient and two moments.
STATES = 4


def tell_unused(current: Session) -> None:
    """Print at the end of the job that --holmes-fsdp hybrid had no effect, if FSDP was not used."""
    if not _hybrid_meshes:
        tell(
            current,
            "--holmes-fsdp hybrid did nothing: no model was sharded by FSDP over several clusters",
        )


@with_session
@by_name
def _fully_shard(
    current: Session, call: Call, instance: Any, mesh: Any, dp_mesh_dims: Any = None
) -> Any:
    """Shard a module by fully_shard (FSDP2), over the hybrid mesh if --holmes-fsdp hybrid is given.

    Runs instead of torch's fully_shard; `call()` runs the original.

    The hybrid mesh has two dimensions: clusters, and the ranks of a cluster. FSDP shards along the second
    dimension only, so shards stay inside a cluster. A 2-D mesh of the program is not replaced.

    Args:
        mesh: The program's mesh; None for all ranks.
        dp_mesh_dims: Data-parallel dimensions of a mesh with more dimensions; None if not given.
    """
    is_one_dimensional = dp_mesh_dims is None and (mesh is None or mesh.ndim == 1)
    if not is_one_dimensional:
        return call()
    hybrid_mesh = _hybrid_mesh_for(current, mesh)
    if hybrid_mesh is None:
        return call()  # without the option, or all ranks are in one cluster
    return call(mesh=hybrid_mesh)


@with_session
@by_name
def _construct_fsdp1(
    current: Session,
    call: Call,
    instance: Any,
    module: Any,
    process_group: Any,
    sharding_strategy: Any,
    device_mesh: Any,
) -> Any:
    """Construct FullyShardedDataParallel (FSDP1), with hybrid sharding if an option says so.

    Runs instead of FullyShardedDataParallel.__init__; `call()` runs the original.

    With --holmes-fsdp hybrid, the sharding becomes hybrid, as torch calls it: it keeps the shards inside
    each cluster of nodes, and replicates them across clusters. A call with hybrid arguments of the program
    (strategy, two groups or a 2-D mesh) is not changed.
    """
    from torch.distributed.fsdp import ShardingStrategy

    hybrid_strategies = {
        ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
        ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    program_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD  # FSDP1's default

    # None if the program's strategy is hybrid already, or does not shard.
    hybrid_strategy = hybrid_strategies.get(program_strategy)
    has_hybrid_groups = isinstance(process_group, tuple)
    has_hybrid_mesh = device_mesh is not None and device_mesh.ndim != 1
    if hybrid_strategy is None or has_hybrid_groups or has_hybrid_mesh:
        return call()

    parameters = list(module.parameters())
    device_type = parameters[0].device.type if parameters else "cpu"
    hybrid_mesh = _hybrid_mesh_for(current, device_mesh, process_group, device_type)
    if hybrid_mesh is None:
        return call()  # without the option, or all ranks are in one cluster
    if device_mesh is not None:
        return call(sharding_strategy=hybrid_strategy, device_mesh=hybrid_mesh)
    replicate_group = hybrid_mesh.get_group(0)  # ranks of different clusters
    shard_group = hybrid_mesh.get_group(1)  # ranks of the same cluster

    # FSDP1 expects the two groups in this order.
    return call(sharding_strategy=hybrid_strategy, process_group=(shard_group, replicate_group))


def _hybrid_mesh_for(current: Session, mesh: Any, group: Any = None, device_type: str = "") -> Any:
    """Return the hybrid mesh that replaces a program's 1-D mesh or process group for FSDP.

    Its dimensions are the clusters and the ranks of a cluster. The mesh is made at the first call, and
    returned again at later ones.

    Args:
        mesh: The program's 1-D mesh, or None.
        group: Without a mesh: the program's process group; None for the default group.
        device_type: Without a mesh: "cpu" or "cuda"; "" for the accelerator that torch finds.

    Returns:
        None without --holmes-fsdp hybrid, or if all ranks of the mesh or group are in one cluster.

    Raises:
        HolmesError: the ranks are not all ranks of the job, or clusters have different numbers of ranks.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if current.options.fsdp != "hybrid":
        return None
    plan = current.plan
    if mesh is not None:
        group = mesh.get_group()
    ranks = group_ranks(group)
    clusters = plan.by_cluster(ranks)  # name of the cluster -> its ranks
    if len(clusters) <= 1:
        return None
    if mesh is not None:
        device_type = mesh.device_type
    elif not device_type:
        device_type = _device_type_of_torch()
    if _hybrid_meshes.get(device_type) is not None:
        return _hybrid_meshes[device_type]  # made by an earlier call

    # FSDP was used, also if an error follows. The entry keeps tell_unused() from printing that it was not.
    _hybrid_meshes[device_type] = None
    try:
        if len(ranks) < plan.world_size:
            raise HolmesError(
                f"FSDP shards over {len(ranks)} of {plan.world_size} ranks, because the job combines it with "
                f"another kind of parallelism; pass a 2-D mesh (replicate, shard) to fully_shard instead"
            )
        # One list of ranks for each cluster. Raises an error if they differ in length.
        ranks_of_clusters = equal_groups(plan, ranks)
    except HolmesError as error:
        # All ranks raise this error. told_once() lets one of them print the message.
        raise told_once(HolmesError(f"--holmes-fsdp hybrid: {error}")) from None
    _hybrid_meshes[device_type] = DeviceMesh(
        device_type, torch.tensor(ranks_of_clusters), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return _hybrid_meshes[device_type]


def _device_type_of_torch() -> str:
    """Return the device type that torch chooses for a mesh: the accelerator's, or "cpu"."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator else "cpu"


@with_session
@by_name
def _print_cost_of_fsdp2(current: Session, call: Call, instance: Any) -> None:
    """Run FSDP2's _lazy_init of a sharded module, and print once the cost of sharding in each step.

    Runs instead of FSDPState._lazy_init of torch; `call()` runs the original.

    FSDP2 calls _lazy_init in every forward pass. The first call for the root module finds out that
    it is the root. All sharded modules are known then, so rank 0 prints the predicted seconds of
    communication. It also prints the memory that --holmes-fsdp hybrid needs, except if the program
    itself has made a 2-D mesh.
    """
    is_first_call = instance._is_root is None  # the root's first call sets it everywhere
    call()
    has_become_root = is_first_call and instance._is_root
    if not has_become_root or current.rank != 0:
        return

    groups = _parameter_groups(instance)
    if not groups:
        return
    weights = _bytes_of_weights(groups)
    mesh_info = groups[0].mesh_info
    is_sharded_over_one_group = mesh_info.mesh.ndim == 1
    if is_sharded_over_one_group:
        _print_cost(current, mesh_info.shard_process_group, weights.sent, weights.stored_bytes)
    elif _hybrid_meshes:
        # The meshes that holmes has made in place of the program's, for --holmes-fsdp hybrid. They
        # include this one. _print_cost() takes group=None as the sign for that option.
        _print_cost(current, group=None, sent=weights.sent, stored_bytes=weights.stored_bytes)
    else:  # the program has made the 2-D mesh
        _print_cost_of_program_mesh(current, mesh_info.mesh, weights.sent)


def _parameter_groups(root: Any) -> list[Any]:
    """Return the FSDPParamGroup objects of all modules below the root module of FSDP2.

    The parameters of one such group are gathered by one operation.
    """
    groups: list[Any] = []
    for state in root._state_ctx.all_states:
        several_groups = getattr(state, "_fsdp_param_groups", ())  # since torch 2.12
        if several_groups:
            groups += several_groups
        else:
            groups.append(state._fsdp_param_group)  # torch before 2.12
    return [group for group in groups if group is not None]


class BytesOfWeights(NamedTuple):
    """Bytes that FSDP sends in a training step, and bytes of the weights that it stores."""

    sent: ShardedWeights  # bytes that a step gathers and reduces
    stored_bytes: float  # all weights, in their stored dtype


def _bytes_of_weights(groups: list[Any]) -> BytesOfWeights:
    """Return the bytes of weights that a model in FSDP2 sends in a training step, and stores.

    Args:
        groups: FSDPParamGroup objects of all sharded modules.
    """
    weight_bytes = 0.0
    regathered_bytes = 0.0
    gradient_bytes = 0.0
    stored_bytes = 0.0
    for group in groups:
        gathers_again_in_backward = group.post_forward_mesh_info is not None
        for parameter in group.fsdp_params:
            element_count = prod(parameter._orig_size)  # of the whole parameter, not of a shard
            # Bytes per element: as stored, as gathered, and of the gradient as reduced.
            stored_itemsize = parameter.sharded_param.itemsize
            sent_itemsize = stored_itemsize
            if parameter.mp_policy.param_dtype:  # mixed precision
                sent_itemsize = parameter.mp_policy.param_dtype.itemsize
            gradient_itemsize = sent_itemsize
            if parameter.mp_policy.reduce_dtype:
                gradient_itemsize = parameter.mp_policy.reduce_dtype.itemsize

            stored_bytes += element_count * stored_itemsize
            weight_bytes += element_count * sent_itemsize
            gradient_bytes += element_count * gradient_itemsize
            if gathers_again_in_backward:
                regathered_bytes += element_count * sent_itemsize
    sent = ShardedWeights(
        units=len(groups),  # gathered one by one
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        regathered_share=regathered_bytes
        / weight_bytes,  # share of the weights that is gathered twice
    )
    return BytesOfWeights(sent, stored_bytes)


@with_session
@by_name
def _print_cost_of_fsdp1(current: Session, call: Call, instance: Any, state: Any) -> Any:
    """Run FSDP1's _lazy_init of a module, and print once the cost of sharding in each step.

    Runs instead of _lazy_init of FSDP1; `call()` runs the original, which FSDP1 calls in every
    forward pass.

    Rank 0 prints the predicted seconds of communication, in the root module's first call: all
    modules in FullyShardedDataParallel are known then. Nothing is printed if the program itself
    chose a hybrid strategy: --holmes-fsdp hybrid would not improve it.

    Args:
        state: The module, an object of FullyShardedDataParallel.
    """
    is_first_call = state._is_root is None  # the root's first call sets it everywhere
    result = call()
    has_become_root = is_first_call and state._is_root
    if not has_become_root or current.rank != 0:
        return result

    # FSDP1 has this process group only under a hybrid strategy: it connects the replicas of a
    # shard.
    is_hybrid = getattr(state, "_inter_node_pg", None) is not None

    # _hybrid_meshes holds the meshes that holmes has made for --holmes-fsdp hybrid. It is empty
    # without that option.
    is_hybrid_by_holmes = is_hybrid and bool(_hybrid_meshes)
    if is_hybrid and not is_hybrid_by_holmes:  # the program chose the strategy
        return result

    # A unit is a module in FSDP1. It has no handle if it has no parameters.
    flat_parameters = [unit._handle.flat_param for unit in state._all_fsdp_states if unit._handle]
    if not flat_parameters:
        return result

    stored_bytes = sum(
        flat._unpadded_unsharded_size.numel() * flat.dtype.itemsize for flat in flat_parameters
    )
    sent_bytes = float(stored_bytes)
    sent_dtype = state.mixed_precision.param_dtype
    if sent_dtype:  # weights are gathered in this dtype
        sent_bytes = stored_bytes * (sent_dtype.itemsize / flat_parameters[0].dtype.itemsize)

    # Gradients are counted in the dtype of the gathered weights, FSDP1's default. The prediction
    # does not read MixedPrecision.reduce_dtype, by which a program can choose another dtype.
    sent = ShardedWeights(
        units=len(flat_parameters), weight_bytes=sent_bytes, gradient_bytes=sent_bytes
    )
    if is_hybrid_by_holmes:
        # _print_cost() takes group=None as the sign for --holmes-fsdp hybrid.
        _print_cost(current, group=None, sent=sent, stored_bytes=stored_bytes)
    else:
        _print_cost(current, state.process_group, sent, stored_bytes)
    return result


def _print_cost(current: Session, group: Any, sent: ShardedWeights, stored_bytes: float) -> None:
    """Print the predicted seconds that a step spends on FSDP's communication across clusters.

    Nothing is printed if all ranks of the group are in one cluster. The message also says how many seconds
    and how much memory --holmes-fsdp hybrid needs, if it is in use or possible.

    Args:
        group: The process group over which FSDP shards. None (the group of all ranks) if
            --holmes-fsdp hybrid is in use: it shards inside each cluster.
        sent: Bytes that a step gathers and reduces.
        stored_bytes: Bytes of all weights, as they are stored.
    """
    plan = current.plan
    ranks = group_ranks(group)
    clusters = plan.by_cluster(ranks)  # name of the cluster -> its ranks
    if len(clusters) <= 1:
        return
    cluster_sizes = [len(members) for members in clusters.values()]
    has_all_ranks = len(ranks) == plan.world_size
    are_clusters_equal = len(set(cluster_sizes)) == 1
    is_hybrid_possible = has_all_ranks and are_clusters_equal

    # network_api_of() returns None for a backend that chooses its networks itself, such as MPI. The
    # prediction then assumes sockets.
    network_api = network_api_of(backend_of()) or SOCKETS

    # Seconds of a step. "Flat": shards over all ranks. "Hybrid": shards inside each cluster; where this is
    # not possible, hybrid_s is not printed.
    flat_s = sharded_seconds(plan, ranks, sent, network_api, hybrid=False)
    hybrid_s = sharded_seconds(plan, ranks, sent, network_api, hybrid=is_hybrid_possible)

    all_states_bytes = STATES * stored_bytes  # weights, gradients and AdamW's two moments
    # hybrid_memory is printed only if all clusters have the same number of ranks.
    hybrid_memory = format_bytes(all_states_bytes / cluster_sizes[0])
    flat_memory = format_bytes(all_states_bytes / len(ranks))
    memory = (
        f"{hybrid_memory} of weights, gradients and AdamW's moments on each rank in place of "
        f"{flat_memory}"
    )
    if group is None:  # --holmes-fsdp hybrid is in use
        text = (
            f"FSDP hybrid: sharded inside each of {len(clusters)} clusters, {hybrid_s:.3g} s of a step "
            f"in place of {flat_s:.3g} s (predicted), with {memory}"
        )
    else:
        text = (
            f"FSDP gathers {format_bytes(sent.weight_bytes)} of weights across clusters "
            f"{', '.join(clusters)} in every step, {flat_s:.3g} s of it (predicted)"
        )
        if is_hybrid_possible:
            text += f"; --holmes-fsdp hybrid: {hybrid_s:.3g} s, with {memory}"
    tell(current, text)


def _print_cost_of_program_mesh(current: Session, mesh: Any, sent: ShardedWeights) -> None:
    """Print the predicted cost of a program's 2-D mesh, if its sharding dimension spans clusters.

    The message has the seconds of a step. It also gives the sizes of the dimension that would not
    span clusters: the common divisors of the clusters' numbers of ranks. For example, clusters of 8
    and 12 ranks give "size 4, or a divisor of it, would not". If 1 is the only common divisor, the
    message says that any size does.

    Args:
        mesh: The mesh (replicas x shards). Each row holds the ranks over which FSDP shards.
        sent: Bytes of weights that a step gathers, and of gradients that it reduces.
    """
    plan = current.plan
    rows = mesh.mesh.tolist()
    spanning_row = spanning_rows(plan, rows)  # e.g. "ranks 0 to 3 lie in clusters a, b"
    if not spanning_row:
        return

    # network_api_of() returns None for a backend that chooses its networks itself, such as MPI. The
    # prediction then assumes sockets.
    network_api = network_api_of(backend_of()) or SOCKETS

    # sharded_seconds() predicts the communication of a step for the ranks of one row, in seconds.
    slowest_s = max(sharded_seconds(plan, row, sent, network_api) for row in rows)
    dimension = mesh.mesh_dim_names[1] if mesh.mesh_dim_names else "1"  # the sharding dimension

    clusters = plan.by_cluster(range(plan.world_size))  # name of the cluster -> its ranks
    # Rows do not span clusters if their size divides the number of ranks of each cluster. The largest such
    # size is the greatest common divisor; the others are divisors of it.
    cluster_sizes = [len(members) for members in clusters.values()]
    largest_fitting_size = gcd(*cluster_sizes)

    # `advice` follows the words "dimension ... crosses clusters": "size 4 would not" cross them.
    if largest_fitting_size > 1:
        advice = f"size {largest_fitting_size}, or a divisor of it, would not"
    else:  # any size of at least 2 "does" cross them
        counts = ", ".join(f"{cluster} {len(members)}" for cluster, members in clusters.items())
        advice = f"any size does (ranks of clusters: {counts})"
    tell(
        current,
        f"FSDP's mesh: dimension {dimension} (size {len(rows[0])}) crosses clusters: {spanning_row}, so "
        f"every layer's weights cross, {slowest_s:.3g} s of a step (predicted); {advice}",
    )


_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FSDP1 = "torch.distributed.fsdp"

PATCHES = (
    Patch(
        FSDP,
        f"{_FSDP2}._fully_shard:fully_shard",
        "the mesh of a script does not follow the clusters; it can be replaced here",
        _fully_shard,
    ),
    Patch(
        FSDP,
        f"{_FSDP2}._fsdp_state:FSDPState._lazy_init",
        "all sharded modules of a model are known here for the first time",
        _print_cost_of_fsdp2,
    ),
    Patch(
        FSDP,
        f"{_FSDP1}.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
        "the same for FSDP1, whose groups and strategy can be replaced here",
        _construct_fsdp1,
    ),
    Patch(
        FSDP,
        f"{_FSDP1}._runtime_utils:_lazy_init",
        "all sharded modules of a model are known here for the first time",
        _print_cost_of_fsdp1,
        parameters=("state", "root_module"),
    ),
)
