"""Adapts torch.distributed.pipelining to pipelines whose stages are in different clusters.

Three things differ from torch without holmes:

    messages   torch sends all messages of a pipeline over one process group. If the pipeline spans clusters,
               this group uses Ethernet, the only network that all its ranks share. Here each pair of
               neighbouring stages has a separate group ("pair group"), on the fastest network that the two
               ranks share.
    gradients  A stage in DistributedDataParallel waits for its gradient reduction at the end of its last
               backward pass, and only then sends a gradient to the preceding stage. So the stages reduce one
               after another. Here a stage does not wait, and the training step waits for all reductions at
               its end.
    ranks      The order of ranks decides how many neighbouring stages are in different clusters. If another
               order would be better for this pipeline, rank 0 prints a message.

Stages in FSDP reduce and wait as in torch without holmes. Under NCCL, all ranks of a data-parallel group
start the reductions of their stages in the same order, since they run the same schedule. (NCCL was run on
emulated GPUs only.)
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch import ddp
from holmes_ext.patches.torch.buckets import BucketReducer
from holmes_ext.patches.torch.features import PIPELINING
from holmes_ext.plan.sizes import DEFAULT_ORDER, PIPELINES_FIRST, Sizes
from holmes_ext.runtime.backend import group_ranks, group_traits
from holmes_ext.runtime.groups.grid import check_grid
from holmes_ext.runtime.groups.pairs import pair_groups
from holmes_ext.runtime.session import Session, tell

#: Process group of a pipeline -> rank of a neighbouring stage -> process group of that pair of ranks.
_pair_groups: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
#: Stage whose gradients are not reduced yet in the current step -> function that divides these gradients by
#: the number of micro-batches. _step() adds the stages with None, _postpone_scaling() stores the functions,
#: and _step() calls them at the end of the training step.
_postponed_scaling: dict[Any, Callable[[], Any] | None] = {}


def _prepare_pipeline(current: Session, schedule: Any, stages: list[Any]) -> None:
    """Make a process group for each pair of neighbouring stages, at a pipeline's first step.

    Rank 0 also prints warnings: if another order of ranks would be better, or if gradients of the schedule
    would not be reduced.

    Args:
        schedule: A schedule of torch.distributed.pipelining.
        stages: The stages of this rank. All ranks of the pipeline must call this function together.
    """
    import torch.distributed as dist

    group = stages[0].group or dist.group.WORLD
    if group in _pair_groups:
        return  # an earlier step has made the groups

    # Numbers of stages, pipelines and so on, derived from the distance between the pipeline's
    # ranks. None if holmes knows no such order of ranks: then nothing is checked.
    sizes = sizes_of(current, group_ranks(group))
    if sizes is not None:
        check_grid(current, sizes)  # compares the sizes and the order of ranks with the plan's

    # The dict maps a neighbour's rank to the group for its messages. The messages of missing
    # neighbours stay in the group that torch uses for them. So {} changes nothing.
    if getattr(stages[0], "p2p_per_edge", False):
        # With this attribute (torch 2.15 or later), torch itself makes a group for each pair.
        _pair_groups[group] = {}
    else:
        # pair_groups() returns {}, too, if all pairs have the same fastest network as the group.
        _pair_groups[group] = pair_groups(current, group)

    # Stages of a model that torch has traced have pipe_info. Only they may have skip connections, whose
    # messages stay on the pipeline's group.
    is_traced = any(hasattr(stage, "pipe_info") for stage in stages)
    has_pair_groups = bool(_pair_groups[group])
    if has_pair_groups and is_traced and group_traits(group).is_nccl:
        # The other messages no longer use `group`, so it has no communicator yet. All ranks make it here,
        # together: at the first message of a skip connection, only two of them would.
        _make_communicator(group)
    warning = _warning_of_unreduced_gradients(schedule, stages)
    tell(current, warning, once=True)  # rank 0 prints it; "" prints nothing


def _make_communicator(group: Any) -> None:
    """Make the NCCL communicator of a pipeline's process group, by an all-reduce of one number.

    Only messages of skip connections use this group, in models that torch has traced. NCCL makes the
    communicator of a group at the group's first operation, and waits for all ranks of the group. A message
    has only two ranks, so the first message would wait without end.

    torch 2.13 and later need no such communicator: they send these messages in communicators of two ranks.
    There the all-reduce does no harm.
    """
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)


def sizes_of(current: Session, pipeline_ranks: list[int]) -> Sizes | None:
    """Return the parallel sizes of the job, given the ranks of one of its pipelines.

    The plan's sizes are returned if the plan has a pipeline with these ranks. Otherwise the sizes are derived
    from the distance between the ranks of consecutive stages, with P pipelines of S stages:

        distance P    ranks 0 to P - 1 run the first stages of all pipelines
        distance 1    ranks 0 to S - 1 run all stages of the first pipeline
        another       None: the order of the ranks is not known

    Args:
        current: The session, with the plan.
        pipeline_ranks: Ranks of the pipeline's stages, in the order of the stages.
    """
    world_size = current.plan.world_size
    stage_count = len(pipeline_ranks)
    planned = current.plan.sizes
    if stage_count <= 1 or world_size % stage_count:
        return None  # no pipeline, or the job does not consist of equal pipelines
    if planned is not None:
        planned_pipeline = planned.group(pipeline_ranks[0], "pp")  # ranks of this rank's pipeline
        if planned_pipeline == tuple(pipeline_ranks):
            return planned

    pipeline_count = world_size // stage_count
    distance = pipeline_ranks[1] - pipeline_ranks[0]
    if distance == 1:
        order = PIPELINES_FIRST
    elif distance == pipeline_count:
        order = DEFAULT_ORDER
    else:
        return None
    return Sizes(pipeline=stage_count, order=order).complete(world_size)


def _warning_of_unreduced_gradients(schedule: Any, stages: Any) -> str:
    """Return a warning if DDP would not reduce the gradients of a pipeline schedule; else "".

    Zero-bubble schedules compute weight gradients in separate passes. The hooks of parameters do not run in
    these passes, so DistributedDataParallel (DDP) does not see the gradients.

    Args:
        schedule: A schedule of torch.distributed.pipelining.
        stages: The stages of this rank.
    """
    from torch.nn.parallel import DistributedDataParallel

    has_replicas = False
    for stage in stages:
        module = stage.submod
        if isinstance(module, DistributedDataParallel) and module.process_group.size() != 1:
            has_replicas = True
    has_weight_passes = False
    actions_of_rank = getattr(schedule, "pipeline_order", {})  # rank -> its passes
    for actions in actions_of_rank.values():
        for action in actions:
            is_idle = action is None
            if not is_idle and action.computation_type.name == "BACKWARD_WEIGHT":
                has_weight_passes = True
    if not has_replicas or not has_weight_passes:
        return ""
    return (
        f"{type(schedule).__name__} computes weight gradients where DistributedDataParallel's hooks do "
        f"not see them: torch leaves them unreduced, so replicas drift apart; use fully_shard"
    )


class _WorkList(list[Any]):
    """List of the Works that torch's _batch_p2p returned, with a method wait() like a single Work.

    Callers of _batch_p2p in torch before 2.8 expect a single Work, and call its wait(). Callers in later
    versions expect a list. This class serves both.
    """

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all send and receive operations in the list."""
        for work in self:
            work.wait(*args, **kwargs)


@by_name
def _send_over_pair_groups(call: Call, instance: Any, p2p_ops: list[Any]) -> Any:
    """Start sends and receives of a pipeline stage, each over the group of its pair of ranks.

    Runs instead of torch's _batch_p2p; `call()` runs the original.

    All messages in one call of _batch_p2p must have the same group. So _batch_p2p is called once for each
    pair.

    Args:
        p2p_ops: The sends and receives: torch.distributed.P2POp objects over the pipeline's group.
    """
    if not p2p_ops:
        return call()
    pipeline_group = p2p_ops[0].group

    # Rank of a neighbouring stage -> process group of that rank and this one.
    group_of_peer = _pair_groups.get(pipeline_group)
    if not group_of_peer:
        return call()  # the pipeline has no groups of pairs

    import torch.distributed as dist

    ops_of_group = defaultdict(list)
    for op in p2p_ops:
        # The ends of a skip connection are not neighbours: their messages stay on the pipeline's group.
        group = group_of_peer.get(op.peer, op.group)
        # The same send or receive, over the group of the pair.
        ops_of_group[group].append(dist.P2POp(op.op, op.tensor, op.peer, group, op.tag))
    works = _WorkList()
    for ops in ops_of_group.values():
        started = call(p2p_ops=ops)
        if isinstance(started, list):  # since torch 2.8; before, a single Work
            works += started
        else:
            works.append(started)
    return works


@with_session
@by_name
def _step(current: Session, call: Call, instance: Any) -> Any:
    """Run a training step of a pipeline schedule, and wait for gradient reductions only at its end.

    Runs instead of `step` of torch's schedules; `call()` runs the original.

    Without holmes, DistributedDataParallel waits for a stage's reduction in the last backward pass of the
    stage. This delays the gradient that the preceding stage needs.

    After the wait, the gradients are divided by the number of micro-batches (see _postpone_scaling).

    Args:
        instance: A schedule of torch.distributed.pipelining.
    """
    global _postponed_scaling
    # Only schedules with several stages a rank have `_stages`.
    stages = getattr(instance, "_stages", None) or [instance._stage]
    _prepare_pipeline(current, instance, stages)  # at the first step
    reducer_of: dict[Any, BucketReducer] = {}
    if instance._has_backward:
        for stage in stages:
            reducer = ddp.defer_waits_for_reductions(stage.submod)
            if reducer:  # None: DistributedDataParallel waits itself, or the stage is not in one
                reducer_of[stage] = reducer
    if not reducer_of:
        # Steps can be nested: schedule.py calls the step of a second schedule object inside that of the
        # program's schedule. An inner step must not change _postponed_scaling, because the outer step may use
        # it.
        return call()

    # Stage -> function that divides its gradients, None until torch wants to divide them. That is during
    # call(), when the sums still run. _postpone_scaling() runs instead, and stores the function here.
    _postponed_scaling = dict.fromkeys(reducer_of)
    try:
        result = call()
        for stage, reducer in reducer_of.items():
            reducer.finish()  # waits for the stage's reductions
            divide_gradients = _postponed_scaling[stage]
            if divide_gradients is not None:
                divide_gradients()
    finally:
        _postponed_scaling = {}
        for reducer in reducer_of.values():
            # defer_waits_for_reductions() has set a list. The reducer collects buckets to wait for in it.
            # None ends that: outside of steps, DistributedDataParallel itself waits for each bucket.
            reducer.unfinished_buckets = None
    return result


@by_name
def _postpone_scaling(call: Call, instance: Any) -> None:
    """Postpone the division of a stage's gradients by the number of micro-batches.

    Runs instead of scale_grads of torch's stages; `call()` runs the original: it divides each
    `.grad` in place.

    torch calls scale_grads when the backward passes of a stage have ended. In torch the gradients
    have been reduced by then. Here their reductions may still run in the background, and each
    `.grad` is a view of the bucket that is being summed: a division now would change the bucket
    during the sum. _step() waits for the reductions at the end of the training step, and divides
    then.

    Args:
        call: Divides the gradients by the number that torch has passed to scale_grads.
        instance: The stage.
    """
    if instance in _postponed_scaling:
        _postponed_scaling[instance] = call  # _step() calls it after the reduction
    else:
        call()  # DistributedDataParallel has waited for the reduction itself, or there is none


_SCHEDULES = "torch.distributed.pipelining.schedules"

PATCHES = (
    *(
        Patch(
            PIPELINING,
            f"{_SCHEDULES}:{schedule}.step",
            "a stage's gradient reductions delay the preceding stage; the first step is the first function "
            "that all ranks of a pipeline call",
            _step,
        )
        for schedule in ("PipelineScheduleSingle", "PipelineScheduleMulti")
    ),
    Patch(
        PIPELINING,
        f"{_SCHEDULES}:_batch_p2p",
        "all messages go over the pipeline's group, which uses Ethernet if it spans clusters",
        _send_over_pair_groups,
    ),
    Patch(
        PIPELINING,
        "torch.distributed.pipelining.stage:_PipelineStageBase.scale_grads",
        "gradients are divided right after a stage's last backward pass, before they are reduced",
        _postpone_scaling,
        parameters=("grad_scale_factor",),
        only=">=2.7",
    ),
)
