"""Runs schedules of torch.distributed.pipelining in the order of passes that the plan lists.

Terms:

    pass    The forward pass of one micro-batch on one stage (F), its full backward pass (B), or one half of
            the backward pass: for the gradients of inputs (I) or of weights (W).
    plan    The result of holmes's planner, made before the job starts. With --holmes-schedule auto it lists
            the passes of each stage.

If the schedule has one stage a rank (1F1B, GPipe), each training step runs in _PipelineScheduleRuntime,
torch's executor for lists of passes. It adds the sends and receives. holmes changes two things:

    receives           torch posts each receive shortly before the message is needed. Over a slow network the
                       stage would wait. So receives are moved to where the plan posts them.
    weight gradients   Between I and W, torch keeps the whole autograd graph. Here linear layers keep only the
                       tensors that their weight gradients need (runtime/reduce/weight_gradients.py).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.patches.torch.features import SCHEDULE
from holmes_ext.patches.torch.pipelining import sizes_of
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.receive_order import listed_passes
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients
from holmes_ext.runtime.session import Session, tell
from holmes_ext.words import counted


class PlannedRuntime(NamedTuple):
    """torch's runtime for training steps of a pipeline schedule, in a planned order of passes.

    A pass is the forward or backward pass of a micro-batch. holmes's plan lists their order for
    each pipeline stage. The runtime is made in the first training step, once for each schedule of
    the program. The wrapper of the schedule's step() then runs each training step by it.
    """

    runtime: Any  # a _PipelineScheduleRuntime of torch
    #: Whether _step() must divide the gradients by the number of micro-batches, because the runtime
    #: leaves that out (see _planned_runtime).
    must_divide_gradients: bool


#: Schedule of the program -> the executor of its steps. None: the schedule keeps its own order of passes.
_runtimes: weakref.WeakKeyDictionary[Any, PlannedRuntime | None] = weakref.WeakKeyDictionary()
#: Stage that runs the plan's passes -> its postponed weight gradients.
_weight_gradients: weakref.WeakKeyDictionary[Any, WeightGradients] = weakref.WeakKeyDictionary()


@with_session
@by_name
def _step(current: Session, call: Call, instance: Any) -> Any:
    """Run a training step of a pipeline schedule in the order of passes that holmes's plan lists.

    Runs instead of PipelineScheduleSingle.step; `call()` runs the original.

    A pass is the forward or backward pass of a micro-batch. torch's _PipelineScheduleRuntime runs the listed
    passes. If the plan lists none, or they do not fit the schedule, the schedule runs its own passes.

    Args:
        instance: The schedule.
    """
    if not instance._has_backward:
        return call()  # evaluation: the plan's passes are those of training steps
    if instance not in _runtimes:  # the first training step
        _runtimes[instance] = _planned_runtime(current, instance)
    planned = _runtimes[instance]
    if planned is None:
        return call()  # the schedule runs its own passes

    outputs = planned.runtime.step(*call.args, **call.kwargs)  # in place of the schedule's own step
    if planned.must_divide_gradients:  # the runtime has left out the division by the micro-batches
        # scale_grads=False: the program's loss is a sum over the micro-batches, and is not divided.
        divisor = instance._n_microbatches if instance.scale_grads else 1
        instance._stage.scale_grads(divisor)  # divides the gradients of the stage by it
    return outputs


def _planned_runtime(current: Session, schedule: Any) -> PlannedRuntime | None:
    """Return an executor that runs a pipeline schedule's passes in the order of holmes's plan.

    A pass is the forward or backward pass of a micro-batch.

    Returns:
        None if the plan lists no passes for this pipeline. Also None if its passes do not fit the schedule;
        rank 0 then prints the reason.
    """
    from torch.distributed.pipelining import schedules

    stage = schedule._stage
    order = _planned_passes(current, stage)
    if order is None:
        return None
    misfit = _misfit_of_passes(schedule, order)
    if misfit:  # tell() prints on rank 0
        tell(current, f"{type(schedule).__name__} keeps its own passes: {misfit}", once=True)
        return None

    runtime = _empty_runtime(schedule)
    _load_passes(runtime, order)
    actions_of_rank = runtime.pipeline_order_with_comms  # rank -> its passes, sends and receives
    torch_actions = actions_of_rank[runtime.rank]

    # The passes in the plan's order, with each receive moved to the position that the plan gives it
    # among the sends. Two neighbours then start their common sends and receives in the same order.
    # Otherwise NCCL would hang.
    actions_of_rank[runtime.rank] = _with_receives_moved(torch_actions, order, stage.stage_index)

    # From now on, _run_backward() postpones the weight gradients of this stage.
    _weight_gradients[stage] = WeightGradients()
    # At the end of a step, gradients must be divided by the number of micro-batches. torch 2.10 and
    # later always do that. Older releases do it in the stage's last full backward pass. If the
    # stage ends with a pass for weight gradients only ("W"), _step() of this module must divide.
    last_letter, _micro_batch = order.stages[stage.stage_index][-1]
    ends_with_weight_gradients = last_letter == "W"
    is_before_torch_2_10 = not hasattr(schedules, "REDUCE_GRAD")  # torch 2.10 added it
    must_divide_gradients = ends_with_weight_gradients and is_before_torch_2_10
    return PlannedRuntime(runtime, must_divide_gradients)


def _planned_passes(current: Session, stage: Any) -> PassOrder | None:
    """Return the passes that holmes's plan lists for each stage of a pipeline.

    Args:
        current: The session, with the plan.
        stage: This rank's stage of the pipeline.

    Returns:
        None if the plan lists no passes for this pipeline.
    """
    import torch.distributed as dist

    group = stage.group or dist.group.WORLD
    network_api = network_api_of(backend_of(group))  # SOCKETS for gloo, VERBS for NCCL
    # Parallel sizes of the job: numbers of stages, replicas, ...
    sizes = sizes_of(current, group_ranks(group))
    if sizes is None or not network_api:
        return None  # the plan cannot be applied to this pipeline or to its backend

    # The plan has decisions about passes and messages ("traffic") for gloo, and others for NCCL, because it
    # can use faster networks.
    decisions = current.plan_for(sizes).traffic_of(network_api)
    passes_of_stages = decisions.schedule  # one text for each stage, such as "F0 F1 B0 B1"
    if not passes_of_stages:
        return None

    # Parses the texts. For NCCL it also checks that they say when receives are posted.
    return listed_passes(passes_of_stages, network_api)


def _empty_runtime(schedule: Any) -> Any:
    """Create torch's executor for lists of passes, with a schedule's settings but no passes yet."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineScheduleRuntime(
        [schedule._stage],
        schedule._n_microbatches,
        loss_fn=schedule._loss_fn,
        scale_grads=schedule.scale_grads,
        args_chunk_spec=schedule._args_chunk_spec,
        kwargs_chunk_spec=schedule._kwargs_chunk_spec,
        output_merge_spec=schedule._output_merge_spec,
    )


def _misfit_of_passes(schedule: Any, order: PassOrder) -> str:
    """Return why a pipeline schedule cannot run the passes that the plan lists; "" if it can.

    Args:
        schedule: A schedule of torch.distributed.pipelining with one stage a rank.
        order: The listed passes (forward and backward passes of micro-batches) of each stage.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    stage = schedule._stage
    micro_batches = schedule._n_microbatches
    planned_stages = len(order.stages)
    if isinstance(stage.submod, (DistributedDataParallel, FSDPModule)):
        return (
            "its stages reduce gradients during their last backward pass (DistributedDataParallel, "
            "fully_shard); pass plain modules"
        )
    if micro_batches != order.micro_batches:
        return f"a step has {micro_batches} micro-batches, but the plan lists passes of {order.micro_batches}"
    if stage.num_stages != planned_stages:
        return f"it has {counted(stage.num_stages, 'stage')}, but the plan has {planned_stages}"
    return ""


def _load_passes(runtime: Any, order: PassOrder) -> None:
    """Load the passes of all pipeline stages into torch's executor for lists of passes.

    The executor adds the sends and receives of this rank's stage.

    Args:
        runtime: A _PipelineScheduleRuntime.
        order: For each stage its passes, e.g. ("F", 0): the forward pass of micro-batch 0.
    """
    from torch.distributed.pipelining import schedules

    # "F": forward pass, "B": full backward pass, "I" and "W": backward pass for the gradients of inputs or of
    # weights only.
    type_of_letter = schedules._ComputationType.from_str
    passes_of_rank = {}
    for stage, passes in enumerate(order.stages):
        rank = stage  # in the pipeline's group: each rank has one stage
        passes_of_rank[rank] = [
            schedules._Action(stage, type_of_letter(letter), micro_batch)
            for letter, micro_batch in passes
        ]
    if hasattr(runtime, "_prepare_schedule_with_comms"):
        runtime._prepare_schedule_with_comms(passes_of_rank)
    else:
        runtime._load_actions(passes_of_rank)  # torch 2.8


def _with_receives_moved(actions: list[Any], order: PassOrder, stage: int) -> list[Any]:
    """Return the actions of a pipeline stage, with each receive moved to its planned position.

    A receive is posted at the beginning of the training step, or right after the stage has sent a certain
    message to the same neighbour. So two neighbours launch their common sends and receives in the same order,
    as NCCL needs it.

    Args:
        actions: Passes, sends and receives of the stage, in torch's order.
        order: The plan's passes of each stage, and positions of receives.
        stage: Number of the stage in the pipeline.
    """
    at_beginning = None
    # Message that the stage sends, as (letter, micro-batch), or at_beginning -> receives to post after it.
    receives_after = defaultdict[Any, list[Any]](list)
    passes_and_sends = []
    for action in actions:
        # A name like "RECV_F" (of an activation) or "RECV_B" (of a gradient).
        operation, _, letter = action.computation_type.name.partition("_")
        if operation != "RECV":
            passes_and_sends.append(action)
            continue
        # Link k connects stages k and k + 1.
        if letter == "F":
            link = stage - 1  # activations arrive from the preceding stage
        else:
            link = stage  # gradients arrive from the next stage
        # The message after which the plan posts the receive; None for at_beginning.
        sent_before = order.posted_after(link, letter, action.microbatch_index)
        receives_after[sent_before].append(action)

    ordered = receives_after[at_beginning]
    for action in passes_and_sends:
        ordered.append(action)
        operation, _, letter = action.computation_type.name.partition("_")
        if operation == "SEND":
            ordered += receives_after[letter, action.microbatch_index]
    return ordered


@by_name
def _run_forward(call: Call, instance: Any, fwd_chunk_id: int) -> Any:
    """Run the forward pass of a micro-batch on a pipeline stage.

    Runs instead of forward_one_chunk of torch's stages; `call()` runs the original.

    A plan of holmes may list the order of all passes of a stage, with weight gradients as separate passes. On
    such a stage, linear layers keep what they need to compute their weight gradients after the backward pass.

    Args:
        instance: The stage.
        fwd_chunk_id: Number of the micro-batch.
    """
    runs_planned_passes = instance in _weight_gradients
    if not runs_planned_passes or not instance.has_backward:
        return call()
    # Within this context, linear layers keep the tensors that their weight gradients of the
    # micro-batch need.
    with _weight_gradients[instance].of(fwd_chunk_id):
        return call()


@by_name
def _run_backward(
    call: Call, instance: Any, bwd_chunk_id: int, full_backward: bool, last_backward: bool
) -> Any:
    """Run the backward pass of a micro-batch on a pipeline stage, full or for input gradients only.

    Runs instead of backward_one_chunk of torch's stages; `call()` runs the original.

    If the stage runs passes that holmes's plan lists, autograd computes all gradients except the weight
    gradients of linear layers. The weight gradients of linear layers are computed

    - right afterwards in a full backward pass
    - otherwise later, when the schedule calls _compute_weight_gradients()

    Args:
        instance: The stage.
        bwd_chunk_id: Number of the micro-batch.
    """
    if instance not in _weight_gradients:
        return call()  # the stage does not run the plan's passes
    # full_backward=True: linear layers leave their weight gradients out by themselves (_run_forward).
    # last_backward=True would make DistributedDataParallel and FSDP reduce. These stages are in neither, so
    # the program's value of last_backward is replaced without being read.
    result = call(full_backward=True, last_backward=False)
    if full_backward:
        _weight_gradients[instance].make(bwd_chunk_id)
    return result


@by_name
def _compute_weight_gradients(
    call: Call, instance: Any, bwd_chunk_id: int, last_backward: bool = False
) -> Any:
    """Compute the weight gradients of a micro-batch that _run_backward() left out.

    Runs instead of backward_weight_one_chunk of torch's stages; `call()` runs the original.

    Args:
        instance: The stage.
        bwd_chunk_id: Number of the micro-batch.
        last_backward: Has no effect, because the stage is neither in DistributedDataParallel nor in FSDP. It
            is a parameter only so that refuse_unread_arguments() accepts it.
    """
    if instance not in _weight_gradients:
        return call()  # the stage does not run the plan's passes
    # Raises an error if a later torch passes an argument that this wrapper does not read.
    call.refuse_unread_arguments()
    return _weight_gradients[instance].make(bwd_chunk_id)


_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"

PATCHES = (
    Patch(
        SCHEDULE,
        "torch.distributed.pipelining.schedules:PipelineScheduleSingle.step",
        "a schedule with one stage a rank cannot run other passes than its own",
        _step,
    ),
    Patch(
        SCHEDULE,
        f"{_STAGE}.forward_one_chunk",
        "linear layers must keep what their weight gradients need",
        _run_forward,
    ),
    Patch(
        SCHEDULE,
        f"{_STAGE}.backward_one_chunk",
        "between the passes for inputs and weights, torch keeps the whole autograd graph",
        _run_backward,
    ),
    Patch(
        SCHEDULE,
        f"{_STAGE}.backward_weight_one_chunk",
        "weight gradients are computed from what linear layers have kept",
        _compute_weight_gradients,
    ),
)
