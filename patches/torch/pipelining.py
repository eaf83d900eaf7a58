"""Adapts torch.distributed.pipelining to clusters: groups for messages between stages, and late waits.

    ranks      A plan orders ranks so that few pairs of neighbouring stages lie in different clusters. It
               needs the job's pipelines, which are read off the schedule's process group; if another order
               of the ranks would keep more traffic inside clusters, rank 0 prints one line.
    messages   A schedule sends all messages over the pipeline's group, which uses Ethernet if the pipeline
               crosses clusters. Here each pair of neighbours gets a group of its own, on the fastest network
               that the two share (runtime/groups/members.py).
    gradients  A stage in DistributedDataParallel waits for its gradient reduction at the end of its last
               backward pass, before it sends a gradient to the preceding stage. So the stages would reduce
               one after another. Here a stage goes on, and the step waits for all reductions at its end.

Breadth-first order (LoopedBFS; arXiv 2211.05953) makes the gradients of a rank's later stages final long
before those of its first: then only the first one's reduction is left to wait for. FSDP's stages reduce and
wait as torch does it: on streams of its own with NCCL, at once with gloo.

Under NCCL (run on emulated GPUs) all ranks of a data-parallel group launch a stage's all-reduces in the same
order, since they run the same schedule. Pair groups keep the order of messages in each direction of a pair.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch import ddp
from holmes_ext.patches.torch.buckets import BucketReducer
from holmes_ext.patches.torch.features import PIPELINING
from holmes_ext.plan.sizes import DEFAULT_ORDER, PIPELINES_FIRST, Sizes
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.grid import check_grid, tell
from holmes_ext.runtime.groups.members import pair_groups
from holmes_ext.runtime.session import Session

#: Process group of a pipeline -> rank of a neighbouring stage -> process group of that pair of ranks.
_pair_groups: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
#: Stages of the current step whose gradients are not reduced yet -> stock's division of these gradients by
#: the number of micro-batches, which _postpone_scaling() stores and _step() calls.
_postponed_scaling: dict[Any, Callable[[], Any]] = {}


def _prepare_pipeline(current: Session, schedule: Any, stages: list[Any]) -> None:
    """Make the pair groups of a pipeline before its first step, and print what keeps it from being optimal.

    A step is what all ranks of the pipeline begin together, as they must when they make groups.
    """
    import torch
    import torch.distributed as dist

    group = stages[0].group or dist.group.WORLD
    if group in _pair_groups:
        return
    sizes = sizes_of(current, group_ranks(group))
    if sizes is not None:
        check_grid(current, sizes)
    if getattr(stages[0], "p2p_per_edge", False):
        _pair_groups[group] = {}  # torch 2.15 or later makes a group for each pair of stages itself
    else:
        _pair_groups[group] = pair_groups(current, group)

    is_traced = any(hasattr(stage, "pipe_info") for stage in stages)
    if _pair_groups[group] and backend_of(group) == "nccl" and is_traced:
        # A model that torch traced (a Pipe) may have skip connections, whose messages stay on the pipeline's
        # group. NCCL makes the communicator of a group at its first use, and waits for all ranks of the
        # group; but such a message has two. So this all-reduce makes it. (torch 2.13 sends these messages one
        # by one, in communicators of two ranks; older versions send them in a batch over this one.)
        dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)
    tell(current, _warning_of_unreduced_gradients(schedule, stages), once=True)


def sizes_of(current: Session, pipeline_ranks: list[int]) -> Sizes | None:
    """Return the parallel sizes of the job (pipeline, data, ...), given the ranks of one of its pipelines.

    Returns:
        The plan's sizes if they have a pipeline of these ranks. Otherwise the distance between consecutive
        ranks shows the order of ranks: the number of pipelines if all first stages come first, 1 if all
        stages of the first pipeline come first. None if the distance is another one.
    """
    world_size = current.plan.world_size
    stage_count = len(pipeline_ranks)
    planned = current.plan.sizes
    if stage_count < 2 or world_size % stage_count:
        return None
    if planned is not None and planned.group(pipeline_ranks[0], "pp") == tuple(pipeline_ranks):
        return planned

    pipeline_count = world_size // stage_count
    distance = pipeline_ranks[1] - pipeline_ranks[0]
    order_of_distance = {pipeline_count: DEFAULT_ORDER, 1: PIPELINES_FIRST}
    order = order_of_distance.get(distance)
    if order is None:
        return None
    return Sizes(pipeline=stage_count, order=order).complete(world_size)


def _warning_of_unreduced_gradients(schedule: Any, stages: Any) -> str:
    """Return a warning if torch leaves gradients of this schedule unreduced; "" if it does not.

    The reducer of DistributedDataParallel learns of gradients from hooks of the parameters, which do not run
    in passes for weight gradients only (zero-bubble schedules).
    """
    from torch.nn.parallel import DistributedDataParallel

    modules = [stage.submod for stage in stages if isinstance(stage.submod, DistributedDataParallel)]
    has_replicas = any(module.process_group.size() != 1 for module in modules)
    computation_types = set()
    for actions in getattr(schedule, "pipeline_order", {}).values():
        computation_types |= {action.computation_type.name for action in actions if action is not None}
    if not has_replicas or "BACKWARD_WEIGHT" not in computation_types:
        return ""
    return (f"{type(schedule).__name__} computes weight gradients where DistributedDataParallel's hooks do "
            f"not see them: torch leaves them unreduced, so replicas drift apart; use fully_shard")


class _WorkList(list[Any]):
    """Works of the calls of _batch_p2p that were made for one call of the program.

    Before torch 2.8, callers of _batch_p2p wait for a single Work; since then, for each Work of a list. A
    list with a method wait() serves both.
    """

    def wait(self, *args: Any, **kwargs: Any) -> None:
        for work in self:
            work.wait(*args, **kwargs)


@by_name
def _send_over_pair_groups(call, instance, p2p_ops):
    """Send and receive each message over the process group of its pair of ranks.

    A call of _batch_p2p may have one group only, so the messages are sorted into one call for each pair.
    """
    if not p2p_ops:
        return call()
    group_of_peer = _pair_groups.get(p2p_ops[0].group)
    if not group_of_peer:
        return call()

    import torch.distributed as dist

    ops_of_group = defaultdict(list)
    for op in p2p_ops:
        # The ends of a skip connection are not neighbours: their messages stay on the pipeline's group.
        group = group_of_peer.get(op.peer, op.group)
        ops_of_group[group].append(dist.P2POp(op.op, op.tensor, op.peer, group, op.tag))
    works = _WorkList()
    for ops in ops_of_group.values():
        started = call(p2p_ops=ops)
        if isinstance(started, list):
            works += started
        else:
            works.append(started)
    return works


@with_session
@by_name
def _step(current, call, instance):
    """Run a step of a schedule, and wait for the stages' gradient reductions only at the end of the step.

    Stock waits for a stage's reduction in the last backward pass of the stage, which delays the gradient that
    the preceding stage needs. Gradients may be divided by the number of micro-batches only after they are
    reduced, so _postpone_scaling() keeps the division back until then.
    """
    global _postponed_scaling
    stages = getattr(instance, "_stages", None) or [instance._stage]  # several stages a rank, or one
    _prepare_pipeline(current, instance, stages)
    reducer_of: dict[Any, BucketReducer] = {}
    if instance._has_backward:
        for stage in stages:
            reducer = ddp.postpone_reductions(stage.submod)
            if reducer:
                reducer_of[stage] = reducer
    # No stage is in DistributedDataParallel. That is also so in a step of torch's runtime for lists of
    # actions, which runs inside the step of another schedule (passes.py): its scaling must stay postponed.
    if not reducer_of:
        return call()

    _postponed_scaling = dict.fromkeys(reducer_of, lambda: None)  # for a stage that stock does not scale
    try:
        result = call()
        for stage, reducer in reducer_of.items():
            reducer.finish()
            _postponed_scaling[stage]()
    finally:
        _postponed_scaling = {}
        for reducer in reducer_of.values():
            reducer.postponed = None
    return result


@by_name
def _postpone_scaling(call, instance):
    """Postpone the division of a stage's gradients by the number of micro-batches until they are reduced."""
    if instance not in _postponed_scaling:
        return call()
    _postponed_scaling[instance] = call


_SCHEDULES = "torch.distributed.pipelining.schedules"

PATCHES = (
    *(Patch(PIPELINING, f"{_SCHEDULES}:{schedule}.step",
            "a pipeline's ranks first meet here; a stage's reduction is awaited before the pipeline goes on",
            _step)
      for schedule in ("PipelineScheduleSingle", "PipelineScheduleMulti")),
    Patch(PIPELINING, f"{_SCHEDULES}:_batch_p2p",
          "all goes over the pipeline's group, which is on Ethernet as soon as it crosses clusters",
          _send_over_pair_groups),
    Patch(PIPELINING, "torch.distributed.pipelining.stage:_PipelineStageBase.scale_grads",
          "gradients are scaled as soon as a stage's last backward is over", _postpone_scaling,
          parameters=("grad_scale_factor",), only=">=2.7"),
)  # fmt: skip
