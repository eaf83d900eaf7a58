"""torch.distributed.pipelining with the passes that the plan lists (--holmes-passes auto).

A schedule of one stage a rank (1F1B, GPipe) hands each training step to torch's runtime for lists of actions,
_PipelineScheduleRuntime, which adds the sends. It posts receives as if edges took no time, so that messages
over slow ones wait: here they stand where runtime/groups/receive_order.py has them. Torch's backward passes
of inputs keep the whole graph until the weights' turn: here linear layers keep what their weights need
(runtime/reduce/weight_gradients.py), and parameters' hooks see every gradient.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

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

#: schedule -> torch's runtime with the plan's passes (None: the schedule keeps its own passes), and whether
#: that runtime leaves gradients undivided by the number of micro-batches: before torch 2.10 it divides only
#: after full backward passes.
_listed: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()
#: Stages that run the plan's passes -> their weight gradients.
_stages: weakref.WeakKeyDictionary[Any, WeightGradients] = weakref.WeakKeyDictionary()


@with_session
@by_name
def _step(current, call, instance):
    """Run a training step of a schedule with one stage a rank, in the plan's order of passes if it has one.

    torch's runtime for lists of actions runs the plan's order; it is made before the schedule's first step.
    """
    if not instance._has_backward:
        return call()
    if instance not in _listed:
        _listed[instance] = _made(current, instance)
    runtime, leaves_gradients_undivided = _listed[instance]
    if runtime is None:
        return call()

    outputs = runtime.step(*call.args, **call.kwargs)
    if leaves_gradients_undivided:
        divisor = instance._n_microbatches if instance.scale_grads else 1
        instance._stage.scale_grads(divisor)
    return outputs


def _made(current: Session, schedule: Any) -> tuple[Any, bool]:
    """What _listed holds of `schedule`."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining import schedules
    from torch.nn.parallel import DistributedDataParallel

    stage = schedule._stage
    group = stage.group or dist.group.WORLD
    network_api, sizes = network_api_of(backend_of(group)), sizes_of(current, group_ranks(group))
    if sizes is None or not network_api:
        return None, False
    if not (texts := current.plan_for(sizes).traffic_of(network_api).passes):
        return None, False
    planned = listed_passes(texts, network_api)
    count, reason = schedule._n_microbatches, ""
    if isinstance(stage.submod, (DistributedDataParallel, FSDPModule)):
        reason = ("its stages reduce under their last backward (DistributedDataParallel, fully_shard); give "
                  "plain modules")
    elif count != planned.micro_batches:
        reason = f"a step has {count} micro-batches, the plan's passes are of {planned.micro_batches}"
    elif stage.num_stages != len(texts):
        reason = f"it has {stage.num_stages} stages, the plan {len(texts)}"
    if reason:
        tell(current, f"{type(schedule).__name__} keeps its own passes: {reason}", once=True)
        return None, False
    kind_of = schedules._ComputationType.from_str
    runtime = schedules._PipelineScheduleRuntime(
        [stage], schedule._n_microbatches, loss_fn=schedule._loss_fn, scale_grads=schedule.scale_grads,
        args_chunk_spec=schedule._args_chunk_spec, kwargs_chunk_spec=schedule._kwargs_chunk_spec,
        output_merge_spec=schedule._output_merge_spec,
    )  # fmt: skip
    load = "_prepare_schedule_with_comms"
    getattr(runtime, load if hasattr(runtime, load) else "_load_actions")({  # torch 2.8
        place: [schedules._Action(place, kind_of(letter), number) for letter, number in order]
        for place, order in enumerate(planned.stages)
    })  # fmt: skip
    orders = runtime.pipeline_order_with_comms
    orders[runtime.rank] = _with_receives(orders[runtime.rank], planned, stage.stage_index)
    _stages[stage] = WeightGradients()
    ends_with = planned.stages[stage.stage_index][-1][0]
    return runtime, ends_with == "W" and not hasattr(schedules, "REDUCE_GRAD")


def _with_receives(actions: list[Any], planned: PassOrder, stage: int) -> list[Any]:
    """The stage's actions, its receives where the plan posts them."""
    receives, rest = defaultdict[Any, list[Any]](list), list[tuple[Any, Any]]()
    for action in actions:
        what, _, kind = action.computation_type.name.partition("_")
        if what == "RECV":
            after = planned.posted_after(stage - (kind == "F"), kind, action.microbatch_index)
            receives[after].append(action)
        else:
            rest.append((action, (kind, action.microbatch_index) if what == "SEND" else action))
    ordered = receives[None]
    for action, sent in rest:
        ordered += [action, *receives[sent]]
    return ordered


@by_name
def _forward(call, instance, fwd_chunk_id):
    """Run a micro-batch's forward pass such that linear layers can compute weight gradients later."""
    if instance not in _stages or not instance.has_backward:
        return call()
    with _stages[instance].of(fwd_chunk_id):
        return call()


@by_name
def _backward(call, instance, bwd_chunk_id, full_backward, last_backward):
    """Run a micro-batch's backward pass without the weight gradients of linear layers.

    For autograd it is always a full backward pass, since linear layers keep what their weight gradients need
    (WeightGradients). If the schedule asks for a full pass, those gradients are computed right after it;
    otherwise in _weights().
    """
    if instance not in _stages:
        return call()
    result = call(full_backward=True, last_backward=False)
    if full_backward:
        _stages[instance].make(bwd_chunk_id)
    return result


@by_name
def _weights(call, instance, bwd_chunk_id, last_backward=False):
    """Compute the weight gradients of linear layers that the micro-batch's backward pass left out."""
    if instance not in _stages:
        return call()
    call.refuse_unknown()
    return _stages[instance].make(bwd_chunk_id)


_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"

PATCHES = (
    Patch(PASSES, "torch.distributed.pipelining.schedules:PipelineScheduleSingle.step",
          "a schedule of one stage a rank has no other passes than its own", _step),
    Patch(PASSES, f"{_STAGE}.forward_one_chunk", "linear layers keep what their weights' gradients need",
          _forward),
    Patch(PASSES, f"{_STAGE}.backward_one_chunk",
          "torch's own keeps the whole graph for the weights' gradients", _backward),
    Patch(PASSES, f"{_STAGE}.backward_weight_one_chunk", "the weights' gradients of what linear layers kept",
          _weights),
)  # fmt: skip
