"""Runs schedules of torch.distributed.pipelining in the order of passes that the plan lists.

A pass is the forward pass of one micro-batch on one stage, its backward pass, or one half of the backward
pass: for the gradients of inputs or for those of weights. With --holmes-passes auto the plan lists the passes
of each stage. A schedule with one stage a rank (1F1B, GPipe) then hands each training step to torch's runtime
for lists of actions, _PipelineScheduleRuntime, which adds the sends and receives. Two things are changed:

    receives           torch posts them as if messages took no time, so messages over slow links would wait.
                       They are moved to where the plan posts them (runtime/groups/receive_order.py).
    weight gradients   A backward pass of torch for inputs only keeps the whole graph until the weights' turn.
                       Here linear layers keep only what their weight gradients need
                       (runtime/reduce/weight_gradients.py), and hooks of parameters see every gradient.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.patches.torch.features import PASSES
from holmes_ext.patches.torch.pipelining import sizes_of
from holmes_ext.plan.passes.schedule import PassOrder
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.groups.receive_order import listed_passes
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients
from holmes_ext.runtime.session import Session


class PlannedRuntime(NamedTuple):
    """torch's runtime for lists of actions, with the passes of the plan."""

    runtime: Any  # a _PipelineScheduleRuntime
    # Whether the runtime does not divide gradients by the number of micro-batches, so that _step() must:
    # before torch 2.10 it divides after a full backward pass only, and the stage's last pass is none.
    leaves_gradients_undivided: bool


#: Schedule of the program -> what runs its steps. None: the schedule keeps its own order of passes.
_runtimes: weakref.WeakKeyDictionary[Any, PlannedRuntime | None] = weakref.WeakKeyDictionary()
#: Stage that runs the plan's passes -> its postponed weight gradients.
_weight_gradients: weakref.WeakKeyDictionary[Any, WeightGradients] = weakref.WeakKeyDictionary()


@with_session
@by_name
def _step(current, call, instance):
    """Run a training step of a schedule with one stage a rank, in the plan's order of passes if it has one.

    torch's runtime for lists of actions runs the plan's order; it is made before the schedule's first step.
    """
    if not instance._has_backward:
        return call()
    if instance not in _runtimes:
        _runtimes[instance] = _planned_runtime(current, instance)
    planned = _runtimes[instance]
    if planned is None:
        return call()

    outputs = planned.runtime.step(*call.args, **call.kwargs)
    if planned.leaves_gradients_undivided:
        divisor = instance._n_microbatches if instance.scale_grads else 1
        instance._stage.scale_grads(divisor)
    return outputs


def _planned_runtime(current: Session, schedule: Any) -> PlannedRuntime | None:
    """Return a runtime with the plan's passes for a schedule.

    Returns:
        None if the plan lists no passes for the job, or if its passes do not fit the schedule, which rank 0
        then prints.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules

    stage = schedule._stage
    group = stage.group or dist.group.WORLD
    network_api = network_api_of(backend_of(group))
    sizes = sizes_of(current, group_ranks(group))
    if sizes is None or not network_api:
        return None  # the plan cannot be applied to this pipeline or to its backend
    passes_of_stages = current.plan_for(sizes).traffic_of(network_api).passes
    if not passes_of_stages:
        return None
    order = listed_passes(passes_of_stages, network_api)
    reason = _reason_for_own_passes(schedule, order)
    if reason:
        tell(current, f"{type(schedule).__name__} keeps its own passes: {reason}", once=True)
        return None

    runtime = schedules._PipelineScheduleRuntime(
        [stage],
        schedule._n_microbatches,
        loss_fn=schedule._loss_fn,
        scale_grads=schedule.scale_grads,
        args_chunk_spec=schedule._args_chunk_spec,
        kwargs_chunk_spec=schedule._kwargs_chunk_spec,
        output_merge_spec=schedule._output_merge_spec,
    )
    _load_passes(runtime, order)
    actions_of_rank = runtime.pipeline_order_with_comms
    actions_of_rank[runtime.rank] = _with_receives(
        actions_of_rank[runtime.rank], order, stage.stage_index
    )
    _weight_gradients[stage] = WeightGradients()
    last_pass, _ = order.stages[stage.stage_index][-1]
    is_older_than_2_10 = not hasattr(schedules, "REDUCE_GRAD")
    return PlannedRuntime(runtime, leaves_gradients_undivided=last_pass == "W" and is_older_than_2_10)


def _reason_for_own_passes(schedule: Any, order: PassOrder) -> str:
    """Return why a schedule cannot run the plan's passes; "" if it can."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    stage = schedule._stage
    micro_batches = schedule._n_microbatches
    planned_stages = len(order.stages)
    if isinstance(stage.submod, (DistributedDataParallel, FSDPModule)):
        return ("its stages reduce under their last backward (DistributedDataParallel, fully_shard); give "
                "plain modules")
    if micro_batches != order.micro_batches:
        return f"a step has {micro_batches} micro-batches, the plan's passes are of {order.micro_batches}"
    if stage.num_stages != planned_stages:
        return f"it has {stage.num_stages} stages, the plan {planned_stages}"
    return ""


def _load_passes(runtime: Any, order: PassOrder) -> None:
    """Give torch's runtime the passes of all stages. It adds sends and receives to this rank's own."""
    from torch.distributed.pipelining import schedules

    type_of_letter = schedules._ComputationType.from_str
    actions_of_rank = {
        stage: [schedules._Action(stage, type_of_letter(letter), number) for letter, number in passes]
        for stage, passes in enumerate(order.stages)  # one stage a rank: both have the same number
    }
    if hasattr(runtime, "_prepare_schedule_with_comms"):
        runtime._prepare_schedule_with_comms(actions_of_rank)
    else:
        runtime._load_actions(actions_of_rank)  # torch 2.8


def _with_receives(actions: list[Any], order: PassOrder, stage: int) -> list[Any]:
    """Return the actions of a stage with each receive moved to where the plan posts it.

    The plan posts a receive when the step begins, or after this stage has sent a certain message over the
    same link. So both ends of a link launch its messages in one order.

    Args:
        actions: Passes, sends and receives of the stage, in torch's order.
    """
    # Keys: None for the step's beginning, or (letter, micro-batch) of the message that is sent before.
    receives_after = defaultdict[Any, list[Any]](list)
    passes_and_sends = []
    for action in actions:
        operation, _, letter = action.computation_type.name.partition("_")  # "RECV_F": of an activation
        if operation != "RECV":
            passes_and_sends.append(action)
            continue
        # An activation comes over the link from the preceding stage, a gradient over that to the next one.
        link = stage - 1 if letter == "F" else stage
        after = order.posted_after(link, letter, action.microbatch_index)
        receives_after[after].append(action)

    ordered = receives_after[None]
    for action in passes_and_sends:
        ordered.append(action)
        operation, _, letter = action.computation_type.name.partition("_")
        if operation == "SEND":
            ordered += receives_after[letter, action.microbatch_index]
    return ordered


@by_name
def _run_forward(call, instance, fwd_chunk_id):
    """Run a micro-batch's forward pass so that weight gradients of linear layers can be computed later."""
    if instance not in _weight_gradients or not instance.has_backward:
        return call()
    with _weight_gradients[instance].of(fwd_chunk_id):
        return call()


@by_name
def _run_backward(call, instance, bwd_chunk_id, full_backward, last_backward):
    """Run a micro-batch's backward pass without the weight gradients of linear layers.

    For autograd it is always a full backward pass, since linear layers keep what their weight gradients need
    (WeightGradients). If the schedule asks for a full pass, those gradients are computed right after it;
    otherwise in _compute_weight_gradients(), which the schedule calls later.
    """
    if instance not in _weight_gradients:
        return call()
    # last_backward makes DistributedDataParallel and FSDP reduce; these stages are in neither.
    result = call(full_backward=True, last_backward=False)
    if full_backward:
        _weight_gradients[instance].make(bwd_chunk_id)
    return result


@by_name
def _compute_weight_gradients(call, instance, bwd_chunk_id, last_backward=False):
    """Compute the weight gradients of linear layers that the micro-batch's backward pass left out.

    `last_backward` is not needed here; as a parameter, it is not refused as unknown.
    """
    if instance not in _weight_gradients:
        return call()
    call.refuse_unread_arguments()
    return _weight_gradients[instance].make(bwd_chunk_id)


_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"

PATCHES = (
    Patch(PASSES, "torch.distributed.pipelining.schedules:PipelineScheduleSingle.step",
          "a schedule of one stage a rank has no other passes than its own", _step),
    Patch(PASSES, f"{_STAGE}.forward_one_chunk", "linear layers keep what their weights' gradients need",
          _run_forward),
    Patch(PASSES, f"{_STAGE}.backward_one_chunk",
          "torch's own keeps the whole graph for the weights' gradients", _run_backward),
    Patch(PASSES, f"{_STAGE}.backward_weight_one_chunk", "the weights' gradients of what linear layers kept",
          _compute_weight_gradients),
)  # fmt: skip
