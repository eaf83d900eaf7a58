"""Lets two pipeline stages of DeepSpeed in the same cluster send over the fast network of that cluster.

DeepSpeed's runtime/pipe/p2p.py sends activations and gradients over the process group of all ranks (the world
group). If a job spans several clusters, that group uses Ethernet, even between two nodes of one cluster. Here
a pair of neighbouring stages gets its own process group if its nodes share a faster network:

    stage 0 --- stage 1 === stage 2 --- stage 3        --- inside a cluster: the pair's group, fast network
       cluster a      |        cluster b               === between clusters: the world group, Ethernet

A second patch checks that DeepSpeed's pipeline and tensor-parallel sizes are the planned sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.deepspeed.features import GRID_CHECK, P2P, STAGE_LINKS
from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.plan.plan import pair_needs_group
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.grid import check_grid
from holmes_ext.runtime.groups.pairs import groups_of
from holmes_ext.runtime.session import Session

#: Rank in a neighbouring pipeline stage -> the process group of this rank and that one. Filled when DeepSpeed
#: sets up its p2p: by stage_links.py for all pairs if its feature is on, otherwise by _make_pair_groups.
groups_by_peer: dict[int, object] = {}


@with_session
@by_name
def _make_pair_groups(current: Session, call: Call, instance: Any, grid: Any) -> Any:
    """Make a process group for each pair of neighbouring pipeline stages that shares a fast network.

    A network is fast if it is faster than the one that all ranks share. The patched function is DeepSpeed's
    p2p.init_process_groups. DeepSpeed calls it on all ranks at the same time, so that all ranks can make
    process groups here.
    """
    import torch.distributed as dist

    result = call()  # DeepSpeed's init_process_groups
    network_api = network_api_of(backend_of())
    groups_by_peer.clear()  # delete the groups of an earlier engine
    if not network_api:  # the backend is neither gloo nor NCCL
        return result
    if registry().is_on(STAGE_LINKS.name):
        # The patches of stage_links.py make groups for all pairs.
        return result
    world = range(current.plan.world_size)

    # Pairs of ranks on neighbouring stages. All ranks need the same order to make groups.
    neighbours = sorted({tuple(sorted(pair)) for pair in grid.p2p_groups})
    # Pairs whose shared network is not that of all ranks.
    pairs = [
        pair for pair in neighbours if pair_needs_group(current.plan, pair, world, network_api)
    ]

    # The third argument gives the new groups its settings, such as the timeout.
    new_groups = groups_of(pairs, current.rank, dist.group.WORLD)
    groups_by_peer.update(new_groups)  # _over_pair_group sends over them
    return result


def p2p_patches(
    feature: Feature, transfer: Callable[..., Any], send_reason: str, receive_reason: str
) -> list[Patch]:
    """Return two patches that make DeepSpeed's p2p.send and p2p.recv call the same function.

    Args:
        feature: The patches are applied if this feature is on.
        transfer: The function. It is called as transfer(direction, call, tensor, stage, async_op). direction
            is "send" or "recv", call() runs DeepSpeed's function, and stage is the neighbouring stage.
        send_reason: Why p2p.send is patched. The command `holmes patches` prints it.
        receive_reason: Why p2p.recv is patched. The command `holmes patches` prints it.
    """

    # by_name() passes the arguments of p2p.send and p2p.recv by these names. `instance` is for methods; these
    # two are functions.
    @by_name
    def send(call: Call, instance: Any, tensor: Any, dest_stage: Any, async_op: Any) -> Any:
        return transfer("send", call, tensor, dest_stage, async_op)

    @by_name
    def recv(call: Call, instance: Any, tensor: Any, src_stage: Any, async_op: Any) -> Any:
        return transfer("recv", call, tensor, src_stage, async_op)

    return [
        Patch(feature, "deepspeed.runtime.pipe.p2p:send", send_reason, send),
        Patch(feature, "deepspeed.runtime.pipe.p2p:recv", receive_reason, recv),
    ]


def _over_pair_group(direction: str, call: Call, tensor: Any, stage: Any, async_op: Any) -> Any:
    """Send or receive a tensor over the process group of two neighbouring pipeline stages, if there is one.

    Such a group uses the fast network of a cluster. Without a group, or if the call is asynchronous, call()
    runs DeepSpeed's own p2p.send or p2p.recv. These use the group of all ranks: it is on Ethernet if the job
    spans clusters.

    Args:
        direction: "send" or "recv". deepspeed.comm has a function of this name.
        stage: The neighbouring stage.
        async_op: True if the call is asynchronous.
    """
    from deepspeed import comm
    from deepspeed.runtime.pipe import p2p

    peer = p2p._grid.stage_to_global(stage_id=stage)  # rank on the neighbouring stage
    if async_op or peer not in groups_by_peer:
        return call()  # DeepSpeed's p2p.send or p2p.recv
    # This raises if a later DeepSpeed passes arguments that this function does not have.
    call.refuse_unread_arguments()
    # DeepSpeed's functions check this first, too.
    p2p._is_valid_send_recv(p2p._grid.get_stage_id(), stage)
    transfer = getattr(comm, direction)  # deepspeed.comm.send or deepspeed.comm.recv
    return transfer(tensor, peer, group=groups_by_peer[peer])


def grid_sizes(current: Session, grid: Any) -> Sizes:
    """Return the pipeline, tensor, data, context and expert-parallel sizes of a job.

    DeepSpeed's grid has the pipeline and the tensor-parallel size. If these are the planned ones, the result
    is all planned sizes. Otherwise, context and expert-parallel size are taken as 1.

    Args:
        current: Has the plan of the job.
        grid: DeepSpeed's PipelineParallelGrid, the arrangement of ranks in stages and tensor-parallel groups.
    """
    planned = current.plan.sizes  # None if the plan was made without sizes
    pipeline = grid.pipe_parallel_size
    tensor = grid.model_parallel_size
    if planned is not None and planned.pipeline == pipeline and planned.tensor == tensor:
        return planned
    return Sizes(pipeline=pipeline, tensor=tensor).complete(current.plan.world_size)


@with_session
@by_name
def _check_grid(current: Session, call: Call, instance: Any) -> Any:
    """Check that the parallel sizes of a DeepSpeed job are the planned sizes.

    The plan was made before the job started, with the sizes in the script's command-line flags. Scripts with
    other flags show their sizes only here, when DeepSpeed has constructed its PipelineParallelGrid. All ranks
    must make this check.

    Raises:
        HolmesError: The plan was made for other sizes (raised by check_grid).
    """
    result = call()  # PipelineParallelGrid.__init__ sets the sizes in `instance`
    check_grid(current, grid_sizes(current, instance))
    return result


PATCHES = (
    Patch(
        P2P,
        "deepspeed.runtime.pipe.p2p:init_process_groups",
        "all ranks call it at the same time, and can make process groups for pairs of stages",
        _make_pair_groups,
    ),
    *p2p_patches(
        P2P,
        _over_pair_group,
        "p2p sends over the group of all ranks, which uses Ethernet if the job spans clusters",
        "the receiver must use the same group as p2p.send",
    ),
    Patch(
        GRID_CHECK,
        "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
        "a script may have its own flags; its pipeline size is known only here",
        _check_grid,
        parameters=("topology",),
    ),
)
