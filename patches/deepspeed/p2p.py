"""Lets pipeline stages of DeepSpeed that lie in one cluster send over its fast network.

DeepSpeed's runtime/pipe/p2p.py sends activations and gradients over the group of all ranks (the world group).
In a job over several clusters that group uses Ethernet, also between two nodes of one cluster. Here a pair of
neighbouring stages whose nodes share a faster network gets a process group of its own:

    stage 0 --- stage 1 === stage 2 --- stage 3        --- inside a cluster: the pair's group, on its network
       cluster a      |        cluster b               === between clusters: the world group, on Ethernet

Also checks that the sizes of DeepSpeed's grid of ranks are those of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.deepspeed.features import EDGES, GRID_CHECK, P2P
from holmes_ext.patches.engine.patch import Feature, Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.plan.decisions import pair_needs_group
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.groups.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.grid import check_grid
from holmes_ext.runtime.groups.members import groups_of
from holmes_ext.runtime.session import Session

#: Rank of a neighbouring stage -> the process group that this rank shares with it alone. Filled when the
#: engine sets up its p2p, here or by edges.py, whose feature makes such groups for all pairs.
groups_by_peer: dict[int, object] = {}


@with_session
@by_name
def _make_pair_groups(current, call, instance, grid):
    """Make a process group for each pair of neighbouring stages that shares a faster network than the world.

    DeepSpeed's init_process_groups, which all ranks call at the same time, prepares p2p over the world group.
    If the feature of edges.py is on, no groups are made here: edges.py makes them for all pairs.
    """
    import torch.distributed as dist

    result = call()
    network_api = network_api_of(backend_of())
    groups_by_peer.clear()  # those of an earlier engine
    if not network_api:  # the backend is neither gloo nor NCCL: no network was planned for it
        return result
    if registry().is_on(EDGES.name):
        return result
    world = range(current.plan.world_size)
    neighbours = sorted({tuple(sorted(pair)) for pair in grid.p2p_groups})
    pairs = [pair for pair in neighbours if pair_needs_group(current.plan, pair, world, network_api)]
    groups_by_peer.update(groups_of(pairs, current.rank, dist.group.WORLD))
    return result


def p2p_patches(
    feature: Feature, transfer: Callable[..., Any], send_reason: str, receive_reason: str
) -> list[Patch]:
    """Return patches that replace DeepSpeed's p2p.send and p2p.recv by one function.

    Args:
        transfer: Called as transfer(direction, call, tensor, stage, async_op), where direction is "send" or
            "recv", `call` calls DeepSpeed's function, and `stage` is the neighbouring stage.
        send_reason: Why p2p.send is patched, for `holmes patches`.
        receive_reason: Why p2p.recv is patched, for `holmes patches`.
    """

    @by_name
    def send(call, instance, tensor, dest_stage, async_op):
        return transfer("send", call, tensor, dest_stage, async_op)

    @by_name
    def recv(call, instance, tensor, src_stage, async_op):
        return transfer("recv", call, tensor, src_stage, async_op)

    return [
        Patch(feature, "deepspeed.runtime.pipe.p2p:send", send_reason, send),
        Patch(feature, "deepspeed.runtime.pipe.p2p:recv", receive_reason, recv),
    ]


def _over_pair_group(direction, call, tensor, stage, async_op):
    """Send or receive a tensor over the group of this pair of stages, if the pair has one.

    DeepSpeed's p2p.send and p2p.recv use the world group, which is on Ethernet as soon as a job spans
    clusters.

    Args:
        direction: "send" or "recv". deepspeed.comm has a function of this name.
        stage: The neighbouring stage.
        async_op: Whether the caller does not want to wait. Such calls are left to DeepSpeed.
    """
    from deepspeed import comm
    from deepspeed.runtime.pipe import p2p

    peer = p2p._grid.stage_to_global(stage_id=stage)
    if async_op or peer not in groups_by_peer:
        return call()
    call.refuse_unread_arguments()
    p2p._is_valid_send_recv(p2p._grid.get_stage_id(), stage)  # as DeepSpeed's functions do first
    transfer = getattr(comm, direction)
    return transfer(tensor, peer, group=groups_by_peer[peer])


def grid_sizes(current: Session, grid: Any) -> Sizes:
    """Return the parallel sizes of a job, of which DeepSpeed's grid has only the pipeline and tensor sizes.

    If these two are the plan's, the plan's sizes are returned, which may include context and expert sizes.
    """
    planned = current.plan.sizes
    pipeline = grid.pipe_parallel_size
    tensor = grid.model_parallel_size
    if planned is not None and planned.pipeline == pipeline and planned.tensor == tensor:
        return planned
    return Sizes(pipeline=pipeline, tensor=tensor).complete(current.plan.world_size)


@with_session
@by_name
def _check_grid(current, call, instance):
    """Compare the sizes of DeepSpeed's grid of ranks with the plan's, as soon as the grid exists.

    Holmes reads the sizes of a job from the script's command-line flags. It does not know the flags of every
    script; the grid has the sizes in any case.
    """
    result = call()
    check_grid(current, grid_sizes(current, instance))
    return result


PATCHES = (
    Patch(P2P, "deepspeed.runtime.pipe.p2p:init_process_groups",
          "pair groups are made where the engine sets up its p2p, on all ranks at once", _make_pair_groups),
    *p2p_patches(P2P, _over_pair_group,
                 "p2p sends over the world group, which is on Ethernet as soon as the job crosses clusters",
                 "the other end of p2p.send"),
    Patch(GRID_CHECK, "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
          "only here the pipeline size of a script with flags of its own becomes known", _check_grid,
          parameters=("topology",)),
)  # fmt: skip
