"""DeepSpeed's pipeline engine without waits for sends, with micro-batches in flight to hide slow edges, and
with fewer bits between clusters (--holmes-edges bf16, int8; runtime/groups/wire.py).

    stock    1F1B (TrainSchedule); p2p.send and p2p.recv block: an edge's time stands between its ends' passes
    here     1F1B with the plan's number of forward passes before a stage's first backward; sends go by
             themselves, receives are posted in advance (runtime/groups/mailbox.py)

             stage 0  F F F B F B F B ...   an edge of half a stage's time, there and back, is hidden with one
             stage 1      F B F B F B ...   micro-batch more in flight (plan/cost/pipeline.py: in_flight)

The passes of a stage run their micro-batches in the same order as before, so gradients are summed as before.
The first step runs the engine's own schedule, to learn what messages come.

Why no rank waits for ever: stage s holds at most k[s] micro-batches, k[s] >= k[s + 1]. Its backward of
micro-batch m needs that of the next stage, which comes right after that stage's forward of m + k[s + 1] - 1,
which needs this stage's forward of that micro-batch. This stage's own backward of m comes right after its
forward of m + k[s] - 1, so that one has been done. The order of all passes has no circle, nor has that of the
messages between them (receive_order.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import Any

from holmes_ext.patches.deepspeed.features import EDGES, NARROW
from holmes_ext.patches.deepspeed.p2p import grid_sizes, messages, pairs_by_peer
from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.plan.passes.schedule import before
from holmes_ext.runtime import session
from holmes_ext.runtime.groups import mailbox
from holmes_ext.runtime.groups.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import Flight, ListedOrder, flight_of
from holmes_ext.runtime.groups.wire import PLAIN, Wire
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients

#: The mailbox of this process's pipeline; None where its edges are the engine's own.
_mailbox: Mailbox | None = None


def _opened() -> Mailbox | None:
    """The mailbox, while it carries the messages of a step."""
    return _mailbox if _mailbox is not None and (_mailbox.open or _mailbox.listening) else None


def unsupported(engine: Any, flight: Flight | None = None) -> str | None:
    """Why this engine's schedule cannot be ours, or None; of its configuration, so the same on all ranks."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if type(engine) is not PipelineEngine:
        return f"the engine is a {type(engine).__name__}, whose schedule is its own"
    if read_by_version("dynamic_shape", engine):
        return "shapes change from batch to batch"
    if not isinstance(flight, ListedOrder):
        return None
    if engine.zero_optimization() and not engine.using_bf16_optimizer:
        return "ZeRO's optimizer takes each gradient once, --holmes-passes auto makes them in two passes"
    count, planned = engine.micro_batches, flight.schedule.micro_batches
    if count != planned:
        return f"the plan's passes are of {planned} micro-batches, a step has {count}"
    return None


@with_session
@by_name
def _make_groups(current, call, instance, grid):
    """Make the mailbox of this pipeline, after DeepSpeed made its own process groups for p2p.

    Every pair of neighbouring stages gets two groups, one for activations and one for gradients, so that
    neither direction waits for the other. All ranks make the groups here, in the same order.
    """
    global _mailbox
    import torch.distributed as dist

    result = call()
    _mailbox = None  # that of an earlier engine
    if not network_api_of(backend_of()):
        return result
    # p2p_groups is a ring: two stages appear in both orders, a single stage is paired with itself.
    pairs = {(min(pair), max(pair)) for pair in grid.p2p_groups if len(set(pair)) > 1}
    stages = {grid.stage_to_global(stage_id=stage): stage for stage in range(grid.pipe_parallel_size)}
    _mailbox = mailbox.of_pairs(pairs, current.rank, stages, dist.group.WORLD)
    pairs_by_peer.update(_mailbox.by_peer)
    return result


def _through_mailbox(direction, call, tensor, stage, async_op):
    """Send or receive a tensor through the mailbox while a training step runs.

    DeepSpeed's p2p.send and p2p.recv block until the message has been transferred. The mailbox sends in the
    background and posts receives in advance. Outside a training step, as in evaluation, DeepSpeed's blocking
    call over the same process groups remains (p2p.py).

    Args:
        direction: "send" or "recv", the name of the mailbox's method too.
        stage: The neighbouring stage.
    """
    box = _opened()
    if box is None:
        return call()
    call.refuse_unknown()
    from deepspeed.runtime.pipe import p2p

    peer = p2p._grid.stage_to_global(stage_id=stage)
    transfer = getattr(box, direction)
    return transfer(tensor, peer)


def _wire_to(stage: int) -> Wire:
    """Of this rank's edge to `stage`, a neighbour."""
    current, network_api = session.active(), network_api_of(backend_of())
    if current is None or not network_api:
        return PLAIN
    from deepspeed.runtime.pipe import p2p

    grid: Any = p2p._grid
    my_stage, stages = grid.get_stage_id(), grid.pipe_parallel_size
    planned = current.plan_for(grid_sizes(current, grid)).traffic_of(network_api).edges
    first = min(my_stage, stage) if abs(my_stage - stage) == 1 else stages - 1
    narrow = planned[first % len(planned)].narrow
    return Wire(narrow=narrow, edge=f"stage {my_stage}'s edge to stage {stage}")


def _transfer_narrowed(direction, call, tensor, stage, async_op):
    """Send a tensor in fewer bits, or receive such a message and decode it into the engine's buffer.

    A `Wire` says how tensors travel between two stages (--holmes-edges bf16 or int8). While a training step
    runs, the mailbox encodes and decodes with it; otherwise that is done here, around DeepSpeed's call.

    Args:
        direction: "send" or "recv".
        stage: The neighbouring stage.
    """
    import torch

    if tensor.dtype in (torch.int32, torch.int64):
        wire = PLAIN  # a message about the shapes of tensors: it must arrive exactly
    else:
        wire = _wire_to(stage)
    box = _opened()
    if box is not None:
        box.wire_to = lambda peer: wire
        return call()  # reaches the mailbox by _through_mailbox
    if direction == "send":
        return call(tensor=wire.outgoing(tensor))
    encoded, decode_into_tensor = wire.incoming(tensor)
    result = call(tensor=encoded)
    decode_into_tensor()
    return result


@by_name
def _announce_shapes(call, instance, buffer, recv_stage):
    """Record in the mailbox the shapes that DeepSpeed's _send_tensor_meta sends to the next stage.

    The next stage allocates its receive buffers for these shapes, once for all steps. From now on the mailbox
    raises if a tensor of another shape is to be sent there, instead of a transfer that never ends.
    """
    if _mailbox is None:
        return call()
    peer = instance.grid.stage_to_global(stage_id=recv_stage)
    _mailbox.announce((), peer)  # no shapes: the messages of _send_tensor_meta itself are not checked
    result = call()
    tensors = buffer if isinstance(buffer, (tuple, list)) else (buffer,)
    _mailbox.announce([mailbox.form_of(tensor) for tensor in tensors], peer)
    return result


@by_name
def _exclude_shape_messages(call, instance, send_stage):
    """Remove the messages of DeepSpeed's _recv_tensor_meta from those expected of every micro-batch.

    DeepSpeed exchanges shapes only before the first activation. The mailbox, which learns from the first step
    which messages a micro-batch has, must not wait for them again.
    """
    result = call()
    if _mailbox is not None:
        _mailbox.leave_out(instance.grid.stage_to_global(stage_id=send_stage))
    return result


@cache
def _schedule_class() -> type:
    from deepspeed.runtime.pipe import schedule

    class PlannedSchedule(schedule.TrainSchedule):
        """DeepSpeed's training schedule with the passes in the order of a `Flight`.

        The order lists passes as (letter, micro-batch): "F" forward, "B" backward. A zero-bubble order splits
        the backward pass: "I" computes the gradient of the input, "W" later those of the weights.
        """

        def __init__(self, stock: Any, flight: Flight, engine: Any, box: Mailbox):
            # The stock schedule's sizes, and whatever a later DeepSpeed adds to its schedules.
            self.__dict__.update(vars(stock))
            self.order = flight.order(self.stage_id, self.micro_batches)
            self.engine = engine
            self.box = box
            self.splits = any(letter == "W" for letter, _ in self.order)
            self.weights = WeightGradients()
            self.losses = dict[int, Any]()  # of the last stage, by micro-batch
            # For each activation that arrives: how many gradients the previous stage had received when it
            # sent it.
            order_above = flight.order(self.stage_id - 1, self.micro_batches) if self.stage_id else ()
            self.returned = before(order_above, "BI", "F")

        def num_pipe_buffers(self) -> int:
            ended = (1 if letter == "F" else -1 for letter, _ in self.order if letter != "W")
            return max(2, *accumulate(ended))

        def steps(self) -> Iterator[list[Any]]:
            box = self.box
            for letter, micro_batch in self.order:
                box.unit = kind, _ = "F" if letter == "F" else "B", micro_batch
                if letter == "F":
                    yield from self._forward(micro_batch, self._buffer_idx(micro_batch))
                elif letter != "W":
                    yield from self._backward(micro_batch, self._buffer_idx(micro_batch))
                if self.splits and letter in "BW":
                    self._weights(micro_batch)
                if letter == "W":
                    continue
                box.passed(kind, micro_batch)
                if kind == "B":  # a gradient that came says that its activation had come
                    box.arrived("F", micro_batch)
                elif self.stage_id:
                    box.arrived("B", self.returned[micro_batch] - 1)
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

        def _forward(self, micro_batch: int, buffer: int) -> Iterator[list[Any]]:
            last = self.stages - 1
            received = [schedule.RecvActivation(buffer)] if self.stage_id else []
            yield [*received, *([schedule.LoadMicroBatch(buffer)] if self.stage_id in (0, last) else [])]
            with self.weights.of(micro_batch) if self.splits else nullcontext():
                yield [schedule.ForwardPass(buffer)]
            if self.stage_id == last:
                self.losses[micro_batch] = self.engine.loss
            else:
                yield [schedule.SendActivation(buffer)]

        def _backward(self, micro_batch: int, buffer: int) -> Iterator[list[Any]]:
            engine, received = self.engine, None
            if self.stage_id == self.stages - 1:  # the engine knows the loss of its last forward pass only
                engine.loss = self.losses.pop(micro_batch)
            else:
                yield [schedule.RecvGrad(buffer)]
                received = engine.grad_layer
                if self.splits:  # the next gradient comes into the same buffer, and this one is needed then
                    several = isinstance(received, list)
                    engine.grad_layer = [grad.clone() for grad in received] if several else received.clone()
            sent = [schedule.SendGrad(buffer)] if self.stage_id else []
            yield [schedule.BackwardPass(buffer), *sent]
            engine.grad_layer = received

        def _weights(self, micro_batch: int) -> None:
            engine = self.engine
            # the engine sums after each backward pass, then into its own fp32 gradients
            sums = engine.using_bf16_optimizer and not read_by_version("immediate_grad_update", engine)
            if sums:
                engine.optimizer.clear_lp_grads()
            engine._running_engine_backward = True  # its hooks refuse a backward pass of others
            try:
                self.weights.make(micro_batch)
            finally:
                engine._running_engine_backward = False
            if sums:
                engine.optimizer.update_hp_grads(clear_lp_grads=False)

    return PlannedSchedule


@with_session
@by_name
def _exec_schedule(current, call, instance, pipe_schedule):
    """Run a training step with the plan's order of passes, its messages sent through the mailbox.

    DeepSpeed's schedule keeps as few micro-batches in flight as instantaneous messages would need. The
    planned schedule keeps more, so that slow edges between stages are hidden behind computation.

    The first step runs DeepSpeed's own schedule: the mailbox listens, to learn the messages of one
    micro-batch. Evaluation, schedules of the program's own, and engines without support for the plan's order
    keep DeepSpeed's schedule. When the step ends, all its messages have been transferred.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if _mailbox is None or instance.num_stages == 1 or type(pipe_schedule) is not TrainSchedule:
        return call()
    plan = current.plan_for(grid_sizes(current, instance.grid))
    planned = flight_of(plan, network_api_of(backend_of()))
    if not planned:
        return call()
    reason = unsupported(instance, planned)
    if reason:
        tell(current, f"DeepSpeed's own pipeline schedule is used: {reason}", once=True)
        return call()

    if not _mailbox.knows:  # which messages a micro-batch has
        _mailbox.listen()
        result = call()
        _mailbox.learn(instance.micro_batches)
        return result
    import torch

    schedule = _schedule_class()(pipe_schedule, planned, instance, _mailbox)
    _mailbox.begin(planned, instance.micro_batches, torch.empty(0, device=instance.device))
    result = call(pipe_schedule=schedule)
    _mailbox.end()
    return result


@by_name
def _forget_messages(call, instance):
    """Let the next training step run DeepSpeed's own schedule, to learn new shapes of messages.

    Only reset_activation_shape is patched with this, as it announces that shapes change:

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
          "groups are made where the engine sets up its p2p, on all ranks at once", _make_groups),
    *messages(EDGES, _through_mailbox, "p2p.send waits until the other end has the message",
              "p2p.recv is posted when the message is needed, too late for it to travel before"),
    *messages(NARROW, _transfer_narrowed, "activations and gradients cross as wide as they are computed",
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
