"""DeepSpeed's pipeline engine under a plan.

runtime/pipe/p2p.py sends activations and gradients over the world group, which crosses clusters and so is on Ethernet.
A pair of neighbouring stages whose two nodes share something faster gets a group of its own:

    stage 0 --- stage 1 === stage 2 --- stage 3        --- inside a cluster: the pair's group, on its fabric
       cluster a      |        cluster b               === across: the world group, on Ethernet
"""

from __future__ import annotations

import sys

from holmes_ext.patches.deepspeed.features import GRID_CHECK, P2P
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.carrier import carrier
from holmes_ext.runtime.groups.pair import new_pair_group

#: This rank's pair groups: the other's rank -> process group. Filled when the engine sets up its p2p.
_pairs: dict[int, object] = {}


def _make_pair_groups(wrapped, instance, args, kwargs):
    """After DeepSpeed's own set-up: one group for each pair of neighbours that shares more than the world does."""
    result = wrapped(*args, **kwargs)
    _pairs.clear()
    current = session.active()
    if current is None:
        return result

    grid = args[0] if args else kwargs["grid"]
    backend = "nccl" if carrier() == "nccl" else "gloo"
    world = current.transport((), backend).fabric
    for pair in sorted({tuple(sorted(pair)) for pair in grid.p2p_groups}):
        if current.rank in pair and pair[0] != pair[1] and current.transport(pair, backend).fabric != world:
            group = new_pair_group(list(pair), "pipeline pair")
            _pairs[pair[1] if current.rank == pair[0] else pair[0]] = group
    return result


def _over_pair_group(direction: str):
    """p2p.send and p2p.recv over the pair's group where it has one."""

    def wrapper(wrapped, instance, args, kwargs):
        if not _pairs or session.active() is None:
            return wrapped(*args, **kwargs)
        from deepspeed import comm
        from deepspeed.runtime.pipe import p2p

        def call(tensor, stage, async_op=False):
            other = p2p._grid.stage_to_global(stage_id=stage)
            group = _pairs.get(other)
            if group is None or async_op:
                return wrapped(tensor, stage, async_op)
            p2p._is_valid_send_recv(p2p._grid.get_stage_id(), stage)
            return getattr(comm, direction)(tensor, other, group=group)

        return call(*args, **{"stage" if key.endswith("_stage") else key: value for key, value in kwargs.items()})

    return wrapper


def _check_grid(wrapped, instance, args, kwargs):
    """Once the real sizes are known: say it when a data-parallel group crosses clusters and another order would not."""
    result = wrapped(*args, **kwargs)
    current = session.active()
    if current is None or current.rank != 0:
        return result
    from holmes_ext.plan.build import build_plan
    from holmes_ext.plan.sizes import Sizes

    sizes = Sizes(pipeline=instance.pipe_parallel_size, tensor=instance.model_parallel_size).complete(current.plan.world_size)
    best = build_plan(current.site, sizes)
    crossing = [g for g in instance.dp_groups if _crosses(current, current.plan.nodes, g)]
    avoidable = len(crossing) - sum(_crosses(current, best.nodes, g) for g in instance.dp_groups)
    if avoidable > 0:
        print(
            f"holmes: {len(crossing)} of {len(instance.dp_groups)} data-parallel groups cross clusters, {avoidable} of them need"
            f" not: start with --holmes-sizes pipeline={sizes.pipeline},tensor={sizes.tensor}",
            file=sys.stderr,
        )
    return result


def _crosses(current: session.Session, nodes: tuple[str, ...], ranks: list[int]) -> bool:
    names = {nodes[rank // current.plan.processes] for rank in ranks}
    return len(names) > 1 and current.site.shared_fabric(names).kind == "ethernet"


PATCHES = (
    Patch(
        P2P, "deepspeed.runtime.pipe.p2p:init_process_groups",
        "the pair groups are made where the engine sets up its p2p, on all ranks at once",
        _make_pair_groups, parameters=("grid",),
    ),
    Patch(
        P2P, "deepspeed.runtime.pipe.p2p:send",
        "p2p sends over the world group, which is on Ethernet as soon as the job crosses clusters",
        _over_pair_group("send"), parameters=("tensor", "dest_stage", "async_op"),
    ),
    Patch(
        P2P, "deepspeed.runtime.pipe.p2p:recv", "the other end of p2p.send",
        _over_pair_group("recv"), parameters=("tensor", "src_stage", "async_op"),
    ),
    Patch(
        GRID_CHECK, "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
        "only here the pipeline size of a script with flags of its own becomes known",
        _check_grid, parameters=("topology",),
    ),
)  # fmt: skip
