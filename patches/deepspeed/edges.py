"""Hides the transfer time between the stages of DeepSpeed's pipeline engine behind computation.

    DeepSpeed   1F1B (TrainSchedule). p2p.send and p2p.recv block, so that a stage computes nothing while a
                message travels.
    holmes      1F1B with more forward passes before a stage's first backward pass, as many as the plan has.
                Messages travel in the background.

                stage 0  F F F B F B F B ...   a round trip of half a stage's time per micro-batch is hidden
                stage 1      F B F B F B ...   by one more micro-batch in flight (plan/cost/pipeline.py)

Terms:

    edge      the link between two neighbouring stages
    flight    the plan's order of passes: the number of micro-batches in flight of each stage (ReceiveOrder),
              or a list of all passes (ListedOrder; runtime/groups/receive_order.py)
    mailbox   sends messages and posts receives in the background (runtime/groups/mailbox.py). It learns in
              the first training step, which runs DeepSpeed's own schedule, which messages a micro-batch has.
    wire      how tensors travel over an edge: unchanged, or between clusters compressed to bf16 or int8
              (--holmes-edges; runtime/groups/wire.py)

A stage runs the passes of its micro-batches in DeepSpeed's order, so gradients are summed in the same order.

No stage waits for ever. Stage s holds at most k[s] micro-batches, with k[s] >= k[s + 1].

- The backward pass of micro-batch m on stage s needs the gradient from stage s + 1, which stage s + 1
  computes right after its forward pass of micro-batch m + k[s + 1] - 1. For that it needs the activation of
  that micro-batch from stage s.
- Stage s runs its backward pass of micro-batch m right after its forward pass of micro-batch m + k[s] - 1,
  so it has sent that activation before, because k[s] >= k[s + 1].

The order of all passes therefore has no cycle, nor has the order of the messages (receive_order.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import Any

from holmes_ext.patches.deepspeed.features import EDGES, NARROW
from holmes_ext.patches.deepspeed.p2p import grid_sizes, groups_by_peer, p2p_patches
from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.plan.passes.schedule import before
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.groups.mailbox import Mailbox, form_of, of_pairs
from holmes_ext.runtime.groups.receive_order import Flight, ListedOrder, flight_of
from holmes_ext.runtime.groups.wire import PLAIN, Wire
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients

#: Sends and receives the messages of this process's pipeline stage. None if there is no pipeline engine, or
#: its process groups use neither gloo nor NCCL.
_mailbox: Mailbox | None = None


def _mailbox_in_use() -> Mailbox | None:
    """Return the mailbox while a training step runs whose messages it transfers, else None."""
    if _mailbox is None:
        return None
    is_learning = _mailbox.listening  # the first step, whose messages the mailbox records
    if _mailbox.open or is_learning:
        return _mailbox
    return None


def unsupported(engine: Any, flight: Flight | None = None) -> str | None:
    """Return why the planned schedule cannot run on this engine, or None if it can.

    The reason depends only on the configuration of the engine: it is the same on all ranks.

    Args:
        flight: The plan's order of passes; None to check the engine alone.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if type(engine) is not PipelineEngine:
        return f"the engine is a {type(engine).__name__}, whose schedule is its own"
    if read_by_version("dynamic_shape", engine):
        return "shapes change from batch to batch"
    if not isinstance(flight, ListedOrder):
        return None
    # The plan lists every pass (--holmes-passes auto), and may split a backward pass into two.
    if engine.zero_optimization() and not engine.using_bf16_optimizer:
        return "ZeRO's optimizer takes each gradient once, --holmes-passes auto makes them in two passes"
    planned_count = flight.schedule.micro_batches
    if engine.micro_batches != planned_count:
        return f"the plan's passes are of {planned_count} micro-batches, a step has {engine.micro_batches}"
    return None


@with_session
@by_name
def _make_mailbox(current, call, instance, grid):
    """Make the mailbox of this pipeline stage, after DeepSpeed prepared its p2p.

    Every pair of neighbouring stages gets two process groups, one for activations and one for gradients, so
    that neither direction waits for the other. All ranks make these groups here, in the same order.
    """
    global _mailbox
    import torch.distributed as dist

    result = call()
    _mailbox = None  # that of an earlier engine
    if not network_api_of(backend_of()):  # the backend is neither gloo nor NCCL
        return result
    # p2p_groups is a ring: two stages appear in both orders, a single stage is paired with itself.
    pairs = {(min(pair), max(pair)) for pair in grid.p2p_groups if len(set(pair)) > 1}
    stage_of_rank = {grid.stage_to_global(stage_id=stage): stage for stage in range(grid.pipe_parallel_size)}
    _mailbox = of_pairs(pairs, current.rank, stages=stage_of_rank, pipeline=dist.group.WORLD)
    groups_by_peer.update(_mailbox.by_peer)  # for p2p.py, which transfers messages outside training steps
    return result


def _through_mailbox(direction, call, tensor, stage, async_op):
    """Send or receive a tensor through the mailbox while a training step runs.

    DeepSpeed's p2p.send and p2p.recv block until the message has been transferred. The mailbox sends in the
    background and posts receives in advance. Outside a training step, as in evaluation, p2p.py makes a
    blocking transfer over the same process groups.

    Args:
        direction: "send" or "recv". Mailbox has a method of this name.
        stage: The neighbouring stage.
        async_op: Not used: DeepSpeed's pipeline engine always passes False.
    """
    mailbox = _mailbox_in_use()
    if mailbox is None:
        return call()
    call.refuse_unread_arguments()
    from deepspeed.runtime.pipe import p2p

    peer = p2p._grid.stage_to_global(stage_id=stage)
    transfer = getattr(mailbox, direction)
    return transfer(tensor, peer)


def _wire_to(stage: int) -> Wire:
    """Return how tensors travel between this stage and a neighbouring one: unchanged or compressed."""
    current = session.active()
    network_api = network_api_of(backend_of())
    if current is None or not network_api:  # without a plan, or over neither gloo nor NCCL
        return PLAIN
    from deepspeed.runtime.pipe import p2p

    grid: Any = p2p._grid
    own_stage = grid.get_stage_id()
    if abs(own_stage - stage) == 1:
        index = min(own_stage, stage)
    else:
        index = grid.pipe_parallel_size - 1  # from the last stage to the first
    # Entry i of the plan is the edge between stages i and i + 1, modulo the number of stages. Two stages have
    # one edge.
    planned_edges = current.plan_for(grid_sizes(current, grid)).traffic_of(network_api).edges
    planned = planned_edges[index % len(planned_edges)]
    return Wire(narrow=planned.narrow, edge=f"stage {own_stage}'s edge to stage {stage}")


def _transfer_compressed(direction, call, tensor, stage, async_op):
    """Send a tensor in fewer bits (--holmes-edges bf16 or int8), or receive and decode such a message.

    While a training step runs, the mailbox encodes and decodes. At other times this function does, around
    DeepSpeed's blocking call.

    Args:
        direction: "send" or "recv".
        stage: The neighbouring stage.
        async_op: Not used: DeepSpeed's pipeline engine always passes False.
    """
    import torch

    if tensor.dtype in (torch.int32, torch.int64):
        wire = PLAIN  # a message about the shapes of tensors: it must arrive exactly
    else:
        wire = _wire_to(stage)
    mailbox = _mailbox_in_use()
    if mailbox is not None:
        # call() reaches _through_mailbox. The mailbox reads wire_to when it sends or receives this tensor.
        mailbox.wire_to = lambda peer: wire
        return call()
    if direction == "send":
        return call(tensor=wire.outgoing(tensor))
    encoded, decode_into_tensor = wire.incoming(tensor)
    result = call(tensor=encoded)
    decode_into_tensor()
    return result


@by_name
def _announce_shapes(call, instance, buffer, recv_stage):
    """Record in the mailbox the shapes that DeepSpeed's _send_tensor_meta sends to the next stage.

    The next stage allocates its receive buffers for these shapes, once for all steps. If a tensor of another
    shape is to be sent there later, the mailbox raises an error; the transfer itself would never end.
    """
    if _mailbox is None:
        return call()
    peer = instance.grid.stage_to_global(stage_id=recv_stage)
    _mailbox.announce((), peer)  # no shapes: the messages of _send_tensor_meta itself are not checked
    result = call()
    tensors = buffer if isinstance(buffer, (tuple, list)) else (buffer,)
    _mailbox.announce([form_of(tensor) for tensor in tensors], peer)
    return result


@by_name
def _exclude_shape_messages(call, instance, send_stage):
    """Remove the messages of DeepSpeed's _recv_tensor_meta from those expected of every micro-batch.

    DeepSpeed exchanges shapes once, before the first activation. The mailbox learns from the first step which
    messages a micro-batch has, and must not wait for those about shapes again.
    """
    result = call()
    if _mailbox is not None:
        _mailbox.leave_out(instance.grid.stage_to_global(stage_id=send_stage))
    return result


@cache
def _schedule_class() -> type:
    """Return the class of planned schedules, which can be defined only once DeepSpeed is imported."""
    from deepspeed.runtime.pipe import schedule

    class PlannedSchedule(schedule.TrainSchedule):
        """DeepSpeed's training schedule with the passes in the plan's order.

        The order lists passes as (letter, micro-batch): "F" forward, "B" backward. A zero-bubble order splits
        the backward pass of a micro-batch: "I" computes the gradients of the inputs, which the previous stage
        waits for, and a later "W" computes the gradients of the weights.
        """

        def __init__(self, stock: Any, flight: Flight, engine: Any, mailbox: Mailbox):
            # Copy the sizes of DeepSpeed's own schedule, and whatever a later DeepSpeed adds to it.
            self.__dict__.update(vars(stock))
            self.order = flight.order(self.stage_id, self.micro_batches)
            self.engine = engine
            self.mailbox = mailbox
            self.splits_backward = any(letter == "W" for letter, _ in self.order)
            self.weight_gradients = WeightGradients()  # computes them in W, if backward passes are split
            self.losses = dict[int, Any]()  # micro-batch -> loss, on the last stage
            # For each micro-batch: how many gradients the previous stage had received when it sent the
            # activation.
            previous_order = flight.order(self.stage_id - 1, self.micro_batches) if self.stage_id > 0 else ()
            self.gradients_received_above = before(previous_order, "BI", "F")

        def num_pipe_buffers(self) -> int:
            """Return the largest number of micro-batches in flight, at least 2 as in DeepSpeed's schedule.

            A micro-batch occupies a buffer from F to B or I.
            """
            changes = [1 if letter == "F" else -1 for letter, _ in self.order if letter != "W"]
            return max(2, *accumulate(changes))

        def steps(self) -> Iterator[list[Any]]:
            """Yield the instructions of a training step, in lists that the engine executes one by one.

            After each pass the mailbox posts the receives that are due, and releases sent tensors that must
            have arrived:

            - The gradient of a micro-batch arrived: the next stage had received its activation before.
            - The activation of a micro-batch arrived: the previous stage had received all gradients that come
              before it in its order of passes.
            """
            for letter, micro_batch in self.order:
                if letter == "F":
                    self.mailbox.unit = ("F", micro_batch)  # the pass that the next messages belong to
                    yield from self._forward(micro_batch, self._buffer_idx(micro_batch))
                    self.mailbox.passed("F", micro_batch)
                    if self.stage_id > 0:
                        self.mailbox.arrived("B", self.gradients_received_above[micro_batch] - 1)
                elif letter == "W":
                    self.mailbox.unit = ("B", micro_batch)
                    self._compute_weight_gradients(micro_batch)
                else:  # "B" or "I"
                    self.mailbox.unit = ("B", micro_batch)
                    yield from self._backward(micro_batch, self._buffer_idx(micro_batch))
                    if self.splits_backward and letter == "B":
                        self._compute_weight_gradients(micro_batch)
                    self.mailbox.passed("B", micro_batch)
                    self.mailbox.arrived("F", micro_batch)
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

        def _forward(self, micro_batch: int, buffer: int) -> Iterator[list[Any]]:
            is_first = self.stage_id == 0
            is_last = self.stage_id == self.stages - 1
            inputs: list[Any] = []
            if not is_first:
                inputs.append(schedule.RecvActivation(buffer))
            if is_first or is_last:  # the first stage loads the model's inputs, the last one the labels
                inputs.append(schedule.LoadMicroBatch(buffer))
            yield inputs
            with self.weight_gradients.of(micro_batch) if self.splits_backward else nullcontext():
                yield [schedule.ForwardPass(buffer)]
            if is_last:
                self.losses[micro_batch] = self.engine.loss
            else:
                yield [schedule.SendActivation(buffer)]

        def _backward(self, micro_batch: int, buffer: int) -> Iterator[list[Any]]:
            engine = self.engine
            received: Any = None  # the engine's receive buffer for gradients
            if self.stage_id == self.stages - 1:
                # The engine keeps the loss of its latest forward pass only.
                engine.loss = self.losses.pop(micro_batch)
            else:
                yield [schedule.RecvGrad(buffer)]
                received = engine.grad_layer
                if self.splits_backward:
                    # The W pass of this micro-batch needs the gradient after the next one has been received
                    # into the same buffer.
                    if isinstance(received, list):
                        engine.grad_layer = [gradient.clone() for gradient in received]
                    else:
                        engine.grad_layer = received.clone()
            instructions = [schedule.BackwardPass(buffer)]
            if self.stage_id > 0:
                instructions.append(schedule.SendGrad(buffer))
            yield instructions
            engine.grad_layer = received

        def _compute_weight_gradients(self, micro_batch: int) -> None:
            """Compute the gradients of the weights, and add them to the optimizer's as DeepSpeed would.

            BF16_Optimizer sums gradients in float32. Without immediate_grad_update the engine adds the bf16
            gradients to these sums after each backward pass. This function does so after the W pass.
            """
            engine = self.engine
            updates_immediately = read_by_version("immediate_grad_update", engine)
            updates_sums = engine.using_bf16_optimizer and not updates_immediately
            if updates_sums:
                # The bf16 (low-precision, lp) gradients of the I pass have been added already.
                engine.optimizer.clear_lp_grads()
            engine._running_engine_backward = True  # else DeepSpeed's hooks refuse this backward pass
            try:
                self.weight_gradients.make(micro_batch)
            finally:
                engine._running_engine_backward = False
            if updates_sums:
                engine.optimizer.update_hp_grads(clear_lp_grads=False)

    return PlannedSchedule


@with_session
@by_name
def _exec_schedule(current, call, instance, pipe_schedule):
    """Run a training step in the plan's order of passes, with its messages sent through the mailbox.

    DeepSpeed's schedule keeps as few micro-batches in flight as instantaneous messages would need. The
    planned schedule keeps more, so that slow edges between stages are hidden behind computation. The call
    returns when all messages of the step have been transferred.

    DeepSpeed's own schedule runs in the first training step, from which the mailbox learns the messages of a
    micro-batch; in evaluation; if the program has a schedule of its own; and if the engine does not support
    the plan's order.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if _mailbox is None or instance.num_stages == 1 or type(pipe_schedule) is not TrainSchedule:
        return call()
    plan = current.plan_for(grid_sizes(current, instance.grid))
    flight = flight_of(plan, network_api_of(backend_of()))
    if not flight:  # the plan keeps DeepSpeed's schedule
        return call()
    reason = unsupported(instance, flight)
    if reason:
        tell(current, f"DeepSpeed's own pipeline schedule is used: {reason}", once=True)
        return call()

    if not _mailbox.knows:  # it has not learned yet which messages a micro-batch has
        _mailbox.listen()
        result = call()
        _mailbox.learn(instance.micro_batches)
        return result
    import torch

    planned_schedule = _schedule_class()(pipe_schedule, flight, instance, _mailbox)
    tensor_on_device = torch.empty(0, device=instance.device)  # says where receive buffers are allocated
    _mailbox.begin(flight, instance.micro_batches, tensor_on_device)
    result = call(pipe_schedule=planned_schedule)
    _mailbox.end()
    return result


@by_name
def _forget_messages(call, instance):
    """Let the next training step run DeepSpeed's own schedule, so that the mailbox learns new shapes.

    DeepSpeed's reset_activation_shape announces that the shapes of messages change, and is the only function
    that is patched with this. Two others need no patch:

    - set_train_batch_size changes the number of micro-batches, but the mailbox knows the messages of one
      micro-batch. Megatron-DeepSpeed calls it before every step.
    - set_train_micro_batch_size changes shapes, but the engine keeps its old buffers until
      reset_activation_shape is called.
    """
    if _mailbox is not None:
        _mailbox.forget()
    return call()


_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(EDGES, "deepspeed.runtime.pipe.p2p:init_process_groups",
          "groups are made where the engine sets up its p2p, on all ranks at once", _make_mailbox),
    *p2p_patches(EDGES, _through_mailbox, "p2p.send waits until the other end has the message",
                 "p2p.recv is posted when the message is needed, too late for it to travel before"),
    *p2p_patches(NARROW, _transfer_compressed, "activations and gradients cross as wide as they are computed",
                 "what was narrowed is widened"),
    Patch(EDGES, f"{_ENGINE}._exec_schedule",
          "the schedule keeps as few micro-batches in flight as free edges need", _exec_schedule),
    Patch(EDGES, f"{_ENGINE}._send_tensor_meta",
          "what is announced is what has to come, or nobody says what is wrong", _announce_shapes),
    Patch(EDGES, f"{_ENGINE}._recv_tensor_meta", "what comes before the first activation comes once",
          _exclude_shape_messages),
    Patch(EDGES, f"{_ENGINE}.reset_activation_shape", "shapes of messages change (curriculum learning)",
          _forget_messages),
)  # fmt: skip
