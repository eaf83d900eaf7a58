"""Runs DeepSpeed's pipeline in a planned order of passes, and sends its messages in the background.

DeepSpeed's engine uses the 1F1B schedule (its class TrainSchedule). Its functions p2p.send and p2p.recv
block: a pipeline stage computes nothing while an activation or a gradient travels. This module replaces both:

    schedule    A stage runs more forward passes (F) before its first backward pass (B) than in 1F1B. It can
                compute these while it waits for a gradient from the next stage:

                    1F1B      stage 0   F F B F B F B ...      planned   stage 0   F F F B F B F B ...
                              stage 1     F B F B F B ...                stage 1       F B F B F B ...

    transfers   Sends return at once. Receives are posted before the pass that needs the message.

Terms:

    in flight    A micro-batch is in flight on a stage from the start of its forward pass until the end of its
                 backward pass there.
    stage link   the connection between two neighbouring stages
    mailbox      sends and receives messages in the background (runtime/groups/mailbox.py)
    wire         the format of tensors on a stage link: unchanged, bf16 or int8
                 (--holmes-compress-activations)

planned_schedule.py makes the engine's instructions for the planned order of passes. This module makes the
mailbox, transfers the messages, and starts the planned schedule in each training step.

A stage runs the backward passes in DeepSpeed's order, so gradients are summed in the same order.

Why no stage waits for ever: let k[s] be the number of micro-batches in flight of stage s. The plan has
k[s] >= k[s + 1] for all s.

- Stage s runs the backward pass of micro-batch m right after the forward pass of micro-batch m + k[s] - 1.
- The backward pass needs a gradient from stage s + 1. That stage computes it right after the forward pass of
micro-batch m + k[s + 1] - 1. It needs an activation from stage s for this pass.
- Stage s has sent this activation before its own backward pass, because k[s] >= k[s + 1].

The order of all passes therefore has no cycle, nor has the order of the messages (receive_order.py).
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.deepspeed.features import COMPRESS_ACTIVATIONS, STAGE_LINKS
from holmes_ext.patches.deepspeed.p2p import grid_sizes, groups_by_peer, p2p_patches
from holmes_ext.patches.deepspeed.planned_schedule import planned_schedule_class
from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.mailbox import Mailbox, message_spec, of_pairs
from holmes_ext.runtime.groups.receive_order import ListedOrder, PipelineOrder, pipeline_order_of
from holmes_ext.runtime.groups.wire import PLAIN, Wire
from holmes_ext.runtime.session import Session, tell

#: Sends and receives the messages of this process's pipeline stage. None if there is no pipeline engine, or
#: its process groups use neither gloo nor NCCL.
_mailbox: Mailbox | None = None


def _mailbox_in_use() -> Mailbox | None:
    """Return the mailbox if it must see the messages between pipeline stages now; else None.

    The mailbox must see all messages of training steps. In the first step it sends and receives
    each message at once, and records the messages. In later steps it transfers them in the
    background. Outside of training steps, as in evaluation, it is idle: the result is None.
    """
    if _mailbox is None:
        return None
    is_recording = _mailbox.is_recording
    is_transferring = _mailbox.is_open
    if is_transferring or is_recording:
        return _mailbox
    return None


def unsupported(engine: Any, order: PipelineOrder | None = None) -> str | None:
    """Return why a DeepSpeed engine cannot run the planned order of passes, or None if it can.

    All ranks get the same answer, because it depends only on the engine's type and configuration.

    Args:
        order: The planned order of forward and backward passes. If it is None, only the engine is checked.
            A ListedOrder lists every pass of each stage. An Order1F1B has only the number of
            micro-batches in flight of each stage, and any engine that passes the first checks can
            run it.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if type(engine) is not PipelineEngine:
        return f"the engine is a {type(engine).__name__}, whose schedule is its own"
    if read_by_version("dynamic_shape", engine):
        return "shapes change from batch to batch"
    if not isinstance(order, ListedOrder):
        return None

    # The plan lists every pass (--holmes-schedule auto), and may split a backward pass into two.
    # ZeRO's optimizer cannot take gradients from two parts. BF16_Optimizer can, although
    # zero_optimization() is True with it as well: it adds the gradients of both to its float32
    # sums.
    uses_zero_optimizer = engine.zero_optimization() and not engine.using_bf16_optimizer
    if uses_zero_optimizer:
        return "ZeRO's optimizer takes each gradient once, --holmes-schedule auto makes them in two passes"
    planned_count = order.schedule.micro_batches
    if engine.micro_batches != planned_count:
        return f"the plan's passes are of {planned_count} micro-batches, a step has {engine.micro_batches}"
    return None


@with_session
@by_name
def _make_mailbox(current: Session, call: Call, instance: Any, grid: Any) -> Any:
    """Make the mailbox. It sends and receives the messages of this pipeline stage in the background.

    DeepSpeed calls the patched function, p2p.init_process_groups, on all ranks when a pipeline engine is
    made. All ranks therefore also make the process groups of the mailbox here. Each pair of neighbouring
    stages gets two groups, one for activations and one for gradients, so that neither direction waits for the
    other.
    """
    global _mailbox
    import torch.distributed as dist

    result = call()  # DeepSpeed's init_process_groups
    _mailbox = None  # forget the mailbox of an earlier engine
    if not network_api_of(backend_of()):  # the backend is neither gloo nor NCCL
        return result

    # grid.p2p_groups has a pair of ranks for each stage and the next one, and for the last stage and the
    # first. Two stages therefore appear in both orders, and a single stage is paired with itself.
    pairs = {(min(pair), max(pair)) for pair in grid.p2p_groups if len(set(pair)) > 1}
    stage_of_rank = {
        grid.stage_to_global(stage_id=stage): stage for stage in range(grid.pipe_parallel_size)
    }

    # of_pairs() makes the process groups. They get the settings of the group `pipeline`, such as the timeout.
    _mailbox = of_pairs(pairs, current.rank, stages=stage_of_rank, pipeline=dist.group.WORLD)
    # p2p.py uses these groups for blocking transfers while the mailbox is idle, as in evaluation.
    groups_by_peer.update(_mailbox.by_peer)
    return result


def _through_mailbox(direction: str, call: Call, tensor: Any, stage: Any, async_op: Any) -> Any:
    """Send or receive a tensor without blocking, in place of DeepSpeed's p2p.send or p2p.recv.

    The tensor goes through the mailbox. It sends in the background and posts receives in advance. The
    mailbox is in use during training steps only. At other times, as in evaluation, call() makes a blocking
    transfer.

    Args:
        direction: "send" or "recv". Mailbox has a method of this name.
        stage: The neighbouring stage.
        async_op: Not used: DeepSpeed's pipeline engine always passes False. It is a parameter so that
            call.refuse_unread_arguments() accepts it.
    """
    mailbox = _mailbox_in_use()
    if mailbox is None:
        return call()
    # This raises if a later DeepSpeed passes arguments that this function does not have.
    call.refuse_unread_arguments()
    from deepspeed.runtime.pipe import p2p

    peer = p2p._grid.stage_to_global(stage_id=stage)  # rank on the neighbouring stage
    transfer = getattr(mailbox, direction)  # Mailbox.send or Mailbox.recv
    return transfer(tensor, peer)


def _wire_to(stage: int) -> Wire:
    """Return the format of tensors that travel between this pipeline stage and a neighbouring stage.

    PLAIN is the unchanged tensor. Otherwise the plan of the job says whether this pair of stages sends its
    tensors as bf16 or int8.
    """
    current = session.active()  # has the plan; None if this process was started without holmes
    network_api = network_api_of(backend_of())  # None if the backend is neither gloo nor NCCL
    if current is None or not network_api:
        return PLAIN
    from deepspeed.runtime.pipe import p2p

    grid: Any = p2p._grid
    this_stage = grid.get_stage_id()
    # A stage link is the connection between two neighbouring stages. Entry i of the plan's list is between
    # stages i and i + 1. DeepSpeed also allows messages between the last stage and the first of more than
    # two, as in a ring: the last entry is for them.
    plan = current.plan_for(grid_sizes(current, grid))
    planned_stage_links = plan.traffic_of(network_api).stage_links
    is_adjacent = abs(this_stage - stage) == 1
    if is_adjacent:
        earlier_stage = min(this_stage, stage)
        planned = planned_stage_links[earlier_stage]
    else:  # the last stage and the first
        planned = planned_stage_links[-1]

    # planned.compression is "off", "bf16" or "int8".
    return Wire(
        compression=planned.compression,
        stage_link=f"stage {this_stage}'s stage link to stage {stage}",
    )


def _transfer_compressed(direction: str, call: Call, tensor: Any, stage: Any, async_op: Any) -> Any:
    """Send a tensor as bf16 or int8 (--holmes-compress-activations), or receive such a message.

    Runs instead of DeepSpeed's p2p.send or p2p.recv. There are two cases:

    - During a training step, `call` passes the tensor to a mailbox. The mailbox sends and receives
      in the background, and encodes and decodes messages.
    - At other times, as in evaluation, `call` blocks until the transfer ends. This function encodes
      the tensor before the call, or decodes the message after the call.

    Args:
        direction: "send" or "recv".
        call: Makes the transfer.
        tensor: The tensor to send, or the tensor that receives the decoded message.
        stage: The neighbouring stage.
        async_op: Not used: DeepSpeed's pipeline engine always passes False. p2p_patches() passes it
            to every function like this one.
    """
    import torch

    # `wire` is the format of the message; PLAIN is the unchanged tensor.
    if tensor.dtype in (torch.int32, torch.int64):
        # The engine sends the shapes of tensors as integers. These must arrive exactly.
        wire = PLAIN
    else:
        wire = _wire_to(stage)
    mailbox = _mailbox_in_use()
    if mailbox is not None:
        # call() runs Mailbox.send or Mailbox.recv. These call wire_to() for the format of this tensor, and
        # encode or decode it. The next transfer sets wire_to again.
        mailbox.wire_to = lambda peer: wire
        return call()
    if direction == "send":
        return call(tensor=wire.outgoing(tensor))
    encoded_buffer, decode_into_tensor = wire.incoming(tensor)
    result = call(tensor=encoded_buffer)  # receives into the buffer
    decode_into_tensor()
    return result


@by_name
def _announce_shapes(call: Call, instance: Any, buffer: Any, recv_stage: Any) -> Any:
    """Record the shapes of activations that DeepSpeed's _send_tensor_meta sends to the next pipeline stage.

    The next stage allocates its receive buffers for these shapes, once for all steps. A later activation of
    another shape would never arrive. The mailbox sends the activations. It compares each with the recorded
    shapes and raises an error instead.

    Args:
        call: Runs _send_tensor_meta.
        instance: The pipeline engine.
        buffer: An activation, or several of them.
        recv_stage: Number of the next stage.
    """
    if _mailbox is None:  # e.g. the backend is neither gloo nor NCCL
        return call()
    peer = instance.grid.stage_to_global(stage_id=recv_stage)
    # announce() sets the shapes that the mailbox demands of tensors for this peer. But
    # _send_tensor_meta sends the shapes themselves, in small tensors. (): demand nothing of these.
    _mailbox.announce((), peer)
    result = call()  # DeepSpeed's _send_tensor_meta
    tensors = buffer if isinstance(buffer, (tuple, list)) else (buffer,)
    shapes_and_dtypes = [message_spec(tensor) for tensor in tensors]  # of each activation
    # From now on, the mailbox compares each activation with these.
    _mailbox.announce(shapes_and_dtypes, peer)
    return result


@by_name
def _exclude_shape_messages(call: Call, instance: Any, send_stage: Any) -> Any:
    """Receive the shapes of activations from the previous stage, as messages that come only once.

    The mailbox receives messages between stages. In the first training step, it records the messages of a
    micro-batch. DeepSpeed's _recv_tensor_meta receives shapes in that step and in no later one. These
    messages are removed from the record, so that the mailbox does not wait for them in later steps.
    """
    result = call()  # DeepSpeed's _recv_tensor_meta
    if _mailbox is not None:
        _mailbox.discard_recorded(instance.grid.stage_to_global(stage_id=send_stage))
    return result


@with_session
@by_name
def _exec_schedule(current: Session, call: Call, instance: Any, pipe_schedule: Any) -> Any:
    """Run a training step in the planned order of passes, with messages that travel in the background.

    This wrapper runs in place of PipelineEngine._exec_schedule; call() runs the original. It executes a
    schedule. DeepSpeed's own (1F1B) starts as few micro-batches as suffice if messages take no
    time. The planned order starts more before the first backward pass, so that a stage computes
    while messages travel between clusters.

    DeepSpeed's own schedule runs instead:

    - in evaluation, and if the program has a schedule of its own
    - if the plan keeps DeepSpeed's schedule, or the engine does not support the planned order
    - in the first training step: the mailbox transfers the messages, and records their shapes
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if _mailbox is None or instance.num_stages == 1 or type(pipe_schedule) is not TrainSchedule:
        return call()  # DeepSpeed's _exec_schedule, with DeepSpeed's own schedule
    plan = current.plan_for(grid_sizes(current, instance.grid))

    # For each stage the order of its passes, and when it posts its receives. The order is listed in
    # the plan, or follows from the planned number of micro-batches in flight.
    planned_order = pipeline_order_of(plan, network_api_of(backend_of()))
    if not planned_order:  # the plan keeps DeepSpeed's schedule
        return call()
    reason = unsupported(instance, planned_order)
    if reason:
        tell(current, f"DeepSpeed's own pipeline schedule is used: {reason}", once=True)
        return call()

    # The mailbox needs a record of a micro-batch's messages before it can post receives in advance. In
    # the first step, between start_recording() and finish_recording(), it records the messages that it
    # receives. In every later step, between begin() and end(), it transfers the messages in the background.
    if not _mailbox.has_message_specs:  # it has no record yet
        _mailbox.start_recording()
        result = call()
        # Divides the recorded messages by the number of micro-batches.
        _mailbox.finish_recording(instance.micro_batches)
        return result
    import torch

    planned_schedule = planned_schedule_class()(pipe_schedule, planned_order, instance, _mailbox)
    # The mailbox allocates its receive buffers on the device of this empty tensor.
    tensor_on_device = torch.empty(0, device=instance.device)
    _mailbox.begin(planned_order, instance.micro_batches, tensor_on_device)
    result = call(pipe_schedule=planned_schedule)
    _mailbox.end()  # waits until all messages of the step have been sent
    return result


@by_name
def _forget_messages(call: Call, instance: Any) -> Any:
    """Delete the recorded shapes of messages when DeepSpeed's reset_activation_shape is called.

    The program calls reset_activation_shape when activations get another shape. The mailbox transfers the
    messages between stages and needs their shapes. It records them again in the next training step.

    Two other functions of the engine do not make the record wrong:

    - set_train_batch_size changes only the number of micro-batches. The record is of one micro-batch.
    - set_train_micro_batch_size changes the shapes, but the engine uses them only after
      reset_activation_shape.
    """
    if _mailbox is not None:
        _mailbox.clear_message_specs()
    return call()  # DeepSpeed's reset_activation_shape


_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(
        STAGE_LINKS,
        "deepspeed.runtime.pipe.p2p:init_process_groups",
        "groups are made where the engine sets up its p2p, on all ranks at once",
        _make_mailbox,
    ),
    *p2p_patches(
        STAGE_LINKS,
        _through_mailbox,
        "p2p.send waits until the other end has the message",
        "p2p.recv is posted when the message is needed, too late for it to travel before",
    ),
    *p2p_patches(
        COMPRESS_ACTIVATIONS,
        _transfer_compressed,
        "activations and gradients travel between clusters in the type in which they are computed",
        "a compressed message is decoded",
    ),
    Patch(
        STAGE_LINKS,
        f"{_ENGINE}._exec_schedule",
        "the schedule has as few micro-batches in flight as suffice if messages take no time",
        _exec_schedule,
    ),
    Patch(
        STAGE_LINKS,
        f"{_ENGINE}._send_tensor_meta",
        "a tensor of another shape than the announced one would never arrive, without any error",
        _announce_shapes,
    ),
    Patch(
        STAGE_LINKS,
        f"{_ENGINE}._recv_tensor_meta",
        "the shapes of activations are sent once, before the first activation",
        _exclude_shape_messages,
    ),
    Patch(
        STAGE_LINKS,
        f"{_ENGINE}.reset_activation_shape",
        "shapes of messages change (curriculum learning)",
        _forget_messages,
    ),
)
