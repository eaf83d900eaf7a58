"""Runs the forward and backward passes of a DeepSpeed pipeline stage in a planned order.

DeepSpeed's pipeline engine executes lists of instructions, such as ForwardPass and SendActivation. Its class
TrainSchedule makes these lists for the 1F1B order. PlannedPasses makes them for any order of the passes.

Messages between stages travel in the background, by a mailbox (runtime/groups/mailbox.py). It keeps a sent
tensor until the neighbouring stage must have received it. PlannedPasses reports when that is the case.
stage_links.py explains the protocol, and why no stage waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import Any

from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.plan.schedule import OnePass, before
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import PipelineOrder
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients

#: Kinds of passes, as letters in the planned order.
FORWARD = "F"
BACKWARD = "B"
#: First part of a split backward pass: the gradients of the inputs. The previous stage waits for them.
INPUT_GRADIENTS = "I"
#: Second part of a split backward pass: the gradients of the weights. Only zero-bubble orders split passes.
WEIGHT_GRADIENTS = "W"

#: DeepSpeed's own schedule never allocates fewer activation buffers.
MIN_PIPE_BUFFERS = 2


class PlannedPasses:
    """Instructions of one training step of a pipeline stage, in a planned order of passes.

    It is a mixin of DeepSpeed's TrainSchedule. That class has the attributes that are only declared here.
    """

    stage_id: int
    stages: int  # number of pipeline stages
    micro_batches: int  # of a training step
    _buffer_idx: Callable[[int], int]  # micro-batch -> number of its activation buffer

    def __init__(
        self, stock_schedule: Any, planned_order: PipelineOrder, engine: Any, mailbox: Mailbox
    ):
        """Create the schedule of one training step: the planned order of passes of this pipeline stage.

        Args:
            stock_schedule: DeepSpeed's own schedule for this step, whose attributes are copied.
            planned_order: The order of passes of all stages.
            engine: The pipeline engine. It executes the instructions.
            mailbox: Sends and receives the messages of this stage in the background.
        """
        self.__dict__.update(vars(stock_schedule))
        self.order = planned_order.order(self.stage_id, self.micro_batches)
        self.engine = engine
        self.mailbox = mailbox
        self.splits_backward = any(kind == WEIGHT_GRADIENTS for kind, _ in self.order)
        self.weight_gradients = WeightGradients()  # used by WEIGHT_GRADIENTS passes only
        self.losses = dict[int, Any]()  # micro-batch -> loss, on the last stage

        # Micro-batch -> number of gradients that the previous stage receives from this stage before
        # its own forward pass of the micro-batch. When the activation of that pass arrives here,
        # the previous stage has so many gradients, and this stage can free them. () on the first
        # stage.
        self.gradients_previous_stage_has: tuple[int, ...] = ()
        if self.stage_id > 0:
            previous_order = planned_order.order(self.stage_id - 1, self.micro_batches)
            self.gradients_previous_stage_has = _gradients_received_before_forwards(previous_order)

    def num_pipe_buffers(self) -> int:
        """Return how many activation buffers the engine must allocate.

        A micro-batch occupies a buffer from its forward pass until its backward pass. The result is the
        largest number of micro-batches that occupy buffers at the same time.
        """
        changes = []  # of the number of occupied buffers, in each pass
        for kind, _ in self.order:
            if kind == FORWARD:
                changes.append(1)
            elif kind != WEIGHT_GRADIENTS:  # that part needs no buffer
                changes.append(-1)
        occupied = accumulate(changes)
        return max(MIN_PIPE_BUFFERS, *occupied)

    def steps(self) -> Iterator[list[Any]]:
        """Yield the instructions of a training step, in lists that the engine executes one by one.

        DeepSpeed's engine calls this method of its schedules. The passes come in the planned order.
        If the plan splits a backward pass, its first part computes the gradients of the inputs, and
        a later pass the gradients of the weights. The engine has no instruction for that second
        part, so it is computed here. The last list reduces the gradients and updates the weights.
        """
        from deepspeed.runtime.pipe import schedule

        for kind, micro_batch in self.order:  # the planned passes of this stage
            if kind == FORWARD:
                yield from self._run_forward(micro_batch)
            elif kind == WEIGHT_GRADIENTS:
                # The mailbox labels messages with the pass that sends them: forward or backward.
                # This part sends none; it belongs to the backward pass of its micro-batch.
                self.mailbox.sending_pass = (BACKWARD, micro_batch)
                self._compute_weight_gradients(micro_batch)
            else:  # a whole backward pass, or the first part of one
                yield from self._run_backward(kind, micro_batch)
        yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def _run_forward(self, micro_batch: int) -> Iterator[list[Any]]:
        """Yield the instructions of a forward pass, then free gradients that have been received.

        This stage sends gradients to the previous stage in the background, by the mailbox. The
        mailbox keeps a sent gradient until the previous stage must have received it.

        The activation that this pass receives proves that. Before the previous stage computed the
        activation, it had received a number of gradients that follows from the planned order. The
        mailbox frees so many gradients after this pass.
        """
        # Mailbox.send labels the sent tensors with the pass.
        self.mailbox.sending_pass = (FORWARD, micro_batch)
        yield from self._forward_instructions(micro_batch, self._buffer_idx(micro_batch))
        # Post the receives that are due after this pass.
        self.mailbox.post_due_receives(FORWARD, micro_batch)
        if self.stage_id > 0:
            # Micro-batch -> number of gradients that the previous stage has received from this one
            # before its forward pass. Gradients are sent in the order of the micro-batches, counted
            # from 0: of 3 received gradients, the last is that of micro-batch 2.
            gradients_received = self.gradients_previous_stage_has[micro_batch]
            last_received = gradients_received - 1
            self.mailbox.release_sent(BACKWARD, last_received)  # frees gradients up to this one

    def _run_backward(self, kind: str, micro_batch: int) -> Iterator[list[Any]]:
        """Yield a backward pass's instructions, then free the activation that the next stage has.

        The mailbox sends and receives this stage's messages in the background. It keeps a sent
        tensor until the neighbouring stage must have received that tensor.

        This pass first receives a gradient from the next stage. The gradient shows that the next
        stage has received the activation of this micro-batch. The mailbox frees the activation
        after this pass.

        Args:
            kind: BACKWARD, or INPUT_GRADIENTS for the first part only.
        """
        # Mailbox.send labels the sent tensors with the pass.
        self.mailbox.sending_pass = (BACKWARD, micro_batch)
        yield from self._backward_instructions(micro_batch, self._buffer_idx(micro_batch))
        if self.splits_backward and kind == BACKWARD:
            # The engine's pass left the gradients of the weights out, as in all passes of such a
            # plan. This backward pass is a whole one, so they follow at once.
            self._compute_weight_gradients(micro_batch)
        # Post the receives that are due after this pass.
        self.mailbox.post_due_receives(BACKWARD, micro_batch)
        self.mailbox.release_sent(FORWARD, micro_batch)  # frees activations up to this one

    def _forward_instructions(self, micro_batch: int, buffer: int) -> Iterator[list[Any]]:
        """Yield the engine's instructions for the forward pass of a micro-batch.

        They receive the activation of the previous stage or load the model's inputs, compute, and
        send the activation to the next stage. The engine executes each yielded list before this
        generator goes on.

        Args:
            buffer: Number of the engine's buffer for the activations of the micro-batch.
        """
        from deepspeed.runtime.pipe import schedule

        is_first_stage = self.stage_id == 0
        is_last_stage = self.stage_id == self.stages - 1
        inputs: list[Any] = []
        if not is_first_stage:
            inputs.append(schedule.RecvActivation(buffer))
        if is_first_stage or is_last_stage:
            # The first stage loads the model's inputs, the last one the labels.
            inputs.append(schedule.LoadMicroBatch(buffer))
        yield inputs

        # If backward passes are split, the linear layers must keep their inputs for the second part.
        keeps_inputs: Any = nullcontext()
        if self.splits_backward:
            keeps_inputs = self.weight_gradients.of(micro_batch)
        with keeps_inputs:
            yield [schedule.ForwardPass(buffer)]
        if is_last_stage:
            # The engine keeps the latest loss only. The backward pass of this micro-batch restores it.
            self.losses[micro_batch] = self.engine.loss
        else:
            yield [schedule.SendActivation(buffer)]

    def _backward_instructions(self, micro_batch: int, buffer: int) -> Iterator[list[Any]]:
        """Yield the engine's instructions for the backward pass of a micro-batch.

        The instructions receive the gradient of the next stage, compute, and send the gradient of
        this stage's inputs to the previous stage. If the plan splits backward passes, only the
        gradients of the inputs are computed. The gradients of the weights follow in
        _compute_weight_gradients().

        The engine executes each yielded list before this generator goes on.

        Args:
            buffer: Number of the engine's buffer for the activations of the micro-batch.
        """
        from deepspeed.runtime.pipe import schedule

        engine = self.engine
        # RecvGrad receives a gradient from the next stage into engine.grad_layer. BackwardPass reads it
        # there.
        receive_buffer: Any = None  # that buffer; None on the last stage
        if self.stage_id == self.stages - 1:
            # The engine keeps only the loss of its latest forward pass, maybe of another micro-batch.
            engine.loss = self.losses.pop(micro_batch)
        else:
            yield [schedule.RecvGrad(buffer)]
            receive_buffer = engine.grad_layer
            if self.splits_backward:
                # The second part of this backward pass runs later and needs the gradient again. The next
                # RecvGrad may overwrite the buffer before that. Both parts therefore read a copy.
                engine.grad_layer = _clone(receive_buffer)
        instructions = [schedule.BackwardPass(buffer)]
        if self.stage_id > 0:
            instructions.append(schedule.SendGrad(buffer))
        yield instructions
        engine.grad_layer = receive_buffer  # the next RecvGrad writes into the same buffer again

    def _compute_weight_gradients(self, micro_batch: int) -> None:
        """Compute a micro-batch's weight gradients: the second part of its split backward pass.

        With BF16_Optimizer, this method then adds these bf16 gradients to the float32 sums over the
        micro-batches. The engine adds gradients only after its instruction BackwardPass, and this
        runs only for the first part. With DeepSpeed's setting immediate_grad_update, a hook has
        added the gradients already, and this method adds nothing.
        """
        engine = self.engine
        has_float32_sums = engine.using_bf16_optimizer
        needs_adding = has_float32_sums and not read_by_version("immediate_grad_update", engine)
        if needs_adding:
            # Delete the bf16 ("lp") gradients of the first part: the engine has added them already.
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True  # else DeepSpeed's hooks raise an error in this pass
        try:
            self.weight_gradients.make(micro_batch)
        finally:
            engine._running_engine_backward = False
        if needs_adding:
            # Add the bf16 gradients to the float32 ("hp") sums.
            engine.optimizer.update_hp_grads(clear_lp_grads=False)


@cache
def planned_schedule_class() -> type:
    """Return DeepSpeed's TrainSchedule with the instructions of PlannedPasses.

    The class is made in a function because this module is imported before DeepSpeed is.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    class PlannedSchedule(PlannedPasses, TrainSchedule):
        """DeepSpeed's training schedule, with the passes of a stage in a planned order."""

    return PlannedSchedule


def _gradients_received_before_forwards(order: Sequence[OnePass]) -> tuple[int, ...]:
    """Return for each forward pass of a stage how many gradients the stage has received before it.

    A gradient comes from the next stage. The stage receives a gradient for each whole backward pass, and for
    each first part of a split backward pass.

    Args:
        order: The passes of the stage.
    """
    receiving_passes = BACKWARD + INPUT_GRADIENTS  # "BI": their letters
    return before(order, counted=receiving_passes, of_letters=FORWARD)


def _clone(gradients: Any) -> Any:
    """Return a copy of a gradient, or of a list of gradients."""
    if isinstance(gradients, list):
        return [gradient.clone() for gradient in gradients]
    return gradients.clone()
