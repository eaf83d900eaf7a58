"""DeepSpeed's pipeline engine under a plan.

runtime/pipe/p2p.py sends activations and gradients over the world group, which crosses clusters and so is on
Ethernet. A pair of neighbouring stages whose two nodes share something faster gets a group of its own:

    stage 0 --- stage 1 === stage 2 --- stage 3        --- inside a cluster: the pair's group, on its fabric
       cluster a      |        cluster b               === across: the world group, on Ethernet
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

#: This rank's pair groups: the other's rank -> process group. Filled when the engine sets up its p2p, with
#: those of edges.py where it is on.
pairs_by_peer: dict[int, object] = {}


@with_session
@by_name
def _make_pair_groups(current, call, instance, grid):
    """Make a process group for each pair of neighbouring stages that shares a faster network than the world.

    DeepSpeed's init_process_groups, which runs on all ranks at once, makes no groups for its p2p: messages go
    over the world group. If edges.py is switched on, it makes groups for all pairs instead.
    """
    import torch.distributed as dist

    result = call()
    network_api = network_api_of(backend_of())
    pairs_by_peer.clear()  # those of an earlier engine
    if not network_api or registry().is_on(EDGES.name):
        return result
    world = range(current.plan.world_size)
    neighbours = sorted({tuple(sorted(pair)) for pair in grid.p2p_groups})
    pairs = [pair for pair in neighbours if pair_needs_group(current.plan, pair, world, network_api)]
    pairs_by_peer.update(groups_of(pairs, current.rank, dist.group.WORLD))
    return result


def messages(feature: Feature, carry: Callable[..., Any], sending: str, receiving: str) -> list[Patch]:
    """Return patches of DeepSpeed's p2p.send and p2p.recv that share one function.

    Args:
        carry: Called with the direction ("send" or "recv"), the call of DeepSpeed's function, the tensor, the
            neighbouring stage and async_op.
        sending: Why p2p.send is patched.
        receiving: Why p2p.recv is patched.
    """

    @by_name
    def send(call, instance, tensor, dest_stage, async_op):
        return carry("send", call, tensor, dest_stage, async_op)

    @by_name
    def recv(call, instance, tensor, src_stage, async_op):
        return carry("recv", call, tensor, src_stage, async_op)

    return [Patch(feature, f"deepspeed.runtime.pipe.p2p:{wrap.__name__}", reason, wrap)
            for wrap, reason in ((send, sending), (recv, receiving))]


def _over_pair_group(direction, call, tensor, stage, async_op):
    """Send or receive a tensor over the group of this pair of stages, if the pair has one.

    DeepSpeed's p2p.send and p2p.recv use the world group, which is on Ethernet as soon as a job spans
    clusters. Asynchronous calls are left to DeepSpeed, which keeps their handles.

    Args:
        direction: "send" or "recv", the name of deepspeed.comm's function too.
        stage: The neighbouring stage.
    """
    from deepspeed import comm
    from deepspeed.runtime.pipe import p2p

    peer = p2p._grid.stage_to_global(stage_id=stage)
    if async_op or peer not in pairs_by_peer:
        return call()
    call.refuse_unknown()
    p2p._is_valid_send_recv(p2p._grid.get_stage_id(), stage)  # as DeepSpeed's functions do first
    transfer = getattr(comm, direction)
    return transfer(tensor, peer, group=pairs_by_peer[peer])


def grid_sizes(current: Session, grid: Any) -> Sizes:
    """Complete sizes of DeepSpeed's grid, which has no axis for context and experts."""
    planned, pipeline, tensor = current.plan.sizes, grid.pipe_parallel_size, grid.model_parallel_size
    if planned is not None and (planned.pipeline, planned.tensor) == (pipeline, tensor):
        return planned
    return Sizes(pipeline=pipeline, tensor=tensor).complete(current.plan.world_size)


@with_session
@by_name
def _check_grid(current, call, instance):
    """Compare the sizes of DeepSpeed's grid with the plan's, as soon as the grid exists.

    A script with command-line flags of its own names its pipeline size nowhere else.
    """
    result = call()
    check_grid(current, grid_sizes(current, instance))
    return result


PATCHES = (
    Patch(P2P, "deepspeed.runtime.pipe.p2p:init_process_groups",
          "pair groups are made where the engine sets up its p2p, on all ranks at once", _make_pair_groups),
    *messages(P2P, _over_pair_group,
              "p2p sends over the world group, which is on Ethernet as soon as the job crosses clusters",
              "the other end of p2p.send"),
    Patch(GRID_CHECK, "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
          "only here the pipeline size of a script with flags of its own becomes known", _check_grid,
          parameters=("topology",)),
)  # fmt: skip
