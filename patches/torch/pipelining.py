"""torch.distributed.pipelining under a plan.

    ranks      a mesh's outermost dimension "pp", or groups of every n-th rank: the plan's order puts its
               stages on clusters; where another order of the ranks would keep more inside, one line says so
    messages   schedules send over the pipeline's group, which is on Ethernet once it crosses: each pair of
               neighbours gets a group of its own on what the two share (runtime/groups/members.py)
    gradients  a stage in DistributedDataParallel waits for its reduction at the end of its last backward:
               before it sends its gradient on, so that the stages reduce one after another, and before the
               rank's other stages. Here it goes on; all is awaited, and scaled, at the end of the schedule

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
from holmes_ext.patches.torch.buckets import Buckets
from holmes_ext.patches.torch.features import PIPELINING
from holmes_ext.plan.sizes import DEFAULT_ORDER, PIPELINES_FIRST, Sizes
from holmes_ext.runtime.groups.backend import backend_of, group_ranks
from holmes_ext.runtime.groups.grid import check_grid, tell
from holmes_ext.runtime.groups.members import pair_groups
from holmes_ext.runtime.session import Session

#: pipeline group -> the other's rank -> the pair's group.
_pairs: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
#: Stages of the step that runs, whose reductions are not finished -> the postponed call of scale_grads.
_open: dict[Any, Callable[[], Any]] = {}


def _prepare(current: Session, schedule: Any, stages: list[Any]) -> None:
    """Before a schedule's first step, which is what all ranks of a pipeline do together."""
    import torch
    import torch.distributed as dist

    group = stages[0].group or dist.group.WORLD
    if group in _pairs:
        return
    if (sizes := sizes_of(current, group_ranks(group))) is not None:
        check_grid(current, sizes)
    # torch >= 2.15 can make a group for each edge itself
    per_edge = getattr(stages[0], "p2p_per_edge", False)
    _pairs[group] = {} if per_edge else pair_groups(current, group)
    traced = any(hasattr(stage, "pipe_info") for stage in stages)
    if _pairs[group] and backend_of(group) == "nccl" and traced:
        # Makes the communicator of all ranks, where only two would come with the first message of a skip
        # connection: a traced Pipe may have some, forward only (torch 2.13 refuses their backward and sends
        # them one by one; older ones send them in a batch, over this communicator).
        dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)
    tell(current, _unreduced(schedule, stages), once=True)


def sizes_of(current: Session, ranks: list[int]) -> Sizes | None:
    """Complete sizes of the job whose pipelines are like `ranks`; None where those do not tell its grid."""
    world, planned = current.plan.world_size, current.plan.sizes
    if len(ranks) < 2 or world % len(ranks):
        return None
    if planned is not None and planned.group(ranks[0], "pp") == tuple(ranks):
        return planned
    orders = {world // len(ranks): DEFAULT_ORDER, 1: PIPELINES_FIRST}
    order = orders.get(ranks[1] - ranks[0])
    return Sizes(pipeline=len(ranks), order=order).complete(world) if order else None


def _unreduced(schedule: Any, stages: Any) -> str:
    """A line on torch's own gap; "" where there is none."""
    from torch.nn.parallel import DistributedDataParallel

    modules = [stage.submod for stage in stages if isinstance(stage.submod, DistributedDataParallel)]
    orders = getattr(schedule, "pipeline_order", {}).values()
    passes = {action.computation_type.name for order in orders for action in order if action is not None}
    if "BACKWARD_WEIGHT" not in passes or all(module.process_group.size() == 1 for module in modules):
        return ""
    return (f"{type(schedule).__name__} computes weight gradients where DistributedDataParallel's hooks do "
            f"not see them: torch leaves them unreduced, so replicas drift apart; use fully_shard")


class _Works(list[Any]):
    """Works of several batches, as _batch_p2p returns them.

    Its callers wait for a single Work before torch 2.8, and later for each Work of a list. A list with wait()
    serves both.
    """

    def wait(self, *args: Any, **kwargs: Any) -> None:
        for work in self:
            work.wait(*args, **kwargs)


@by_name
def _over_pairs(call, instance, p2p_ops):
    """Send and receive each message over the process group of its pair of ranks.

    A call of _batch_p2p may have one group only, so the messages are sorted into one call for each pair.
    """
    if not p2p_ops:
        return call()
    pair_group_of = _pairs.get(p2p_ops[0].group)
    if not pair_group_of:
        return call()

    import torch.distributed as dist

    ops_of_group = defaultdict(list)
    for op in p2p_ops:
        # The ends of a skip connection are no neighbours: their messages stay on the pipeline's group.
        group = pair_group_of.get(op.peer, op.group)
        ops_of_group[group].append(dist.P2POp(op.op, op.tensor, op.peer, group, op.tag))
    works = _Works()
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
    the preceding stage needs. Until the end of the step _scale() keeps the division of the gradients back.
    """
    global _open
    stages = getattr(instance, "_stages", None) or [instance._stage]  # several stages a rank, or one
    _prepare(current, instance, stages)
    buckets_of: dict[Any, Buckets] = {}
    if instance._has_backward:
        for stage in stages:
            buckets = ddp.begin_later(stage.submod)
            if buckets:
                buckets_of[stage] = buckets
    if not buckets_of:  # also in a step that another schedule's step runs (passes.py)
        return call()

    _open = dict.fromkeys(buckets_of, lambda: None)
    try:
        result = call()
        for stage, buckets in buckets_of.items():
            buckets.finish()
            _open[stage]()
    finally:
        _open = {}
        for buckets in buckets_of.values():
            buckets.later = None
    return result


@by_name
def _scale(call, instance):
    """Postpone the division of a stage's gradients by the number of micro-batches until they are reduced."""
    if instance not in _open:
        return call()
    _open[instance] = call


_SCHEDULES = "torch.distributed.pipelining.schedules"

PATCHES = (
    *(Patch(PIPELINING, f"{_SCHEDULES}:{schedule}.step",
            "a pipeline's ranks first meet here; a stage's reduction is awaited before the pipeline goes on",
            _step)
      for schedule in ("PipelineScheduleSingle", "PipelineScheduleMulti")),
    Patch(PIPELINING, f"{_SCHEDULES}:_batch_p2p",
          "all goes over the pipeline's group, which is on Ethernet as soon as it crosses clusters",
          _over_pairs),
    Patch(PIPELINING, "torch.distributed.pipelining.stage:_PipelineStageBase.scale_grads",
          "gradients are scaled as soon as a stage's last backward is over", _scale,
          parameters=("grad_scale_factor",), only=">=2.7"),
)  # fmt: skip
