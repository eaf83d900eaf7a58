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
from holmes_ext.patches.deepspeed.versions import ask
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
    if ask("dynamic_shape", engine):
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
    """After DeepSpeed's own: every pair of neighbours gets a group for activations, one for gradients."""
    global _mailbox
    import torch.distributed as dist

    result, _mailbox = call(), None
    if not network_api_of(backend_of()):
        return result
    pairs = {(min(pair), max(pair)) for pair in grid.p2p_groups if len(set(pair)) > 1}
    stages = {grid.stage_to_global(stage_id=stage): stage for stage in range(grid.pipe_parallel_size)}
    _mailbox = mailbox.of_pairs(pairs, current.rank, stages, dist.group.WORLD)
    pairs_by_peer.update(_mailbox.by_peer)
    return result


def _through_mailbox(direction, call, tensor, stage, async_op):
    """Inside a training step; outside (evaluation) they block, over the same groups (p2p.py)."""
    if (box := _opened()) is None:
        return call()
    call.refuse_unknown()
    from deepspeed.runtime.pipe import p2p

    return getattr(box, direction)(tensor, p2p._grid.stage_to_global(stage_id=stage))


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


def _narrowed(direction, call, tensor, stage, async_op):
    """What is sent is narrowed, what is received is decoded into the engine's buffer."""
    import torch

    # the engine's messages about shapes are integers
    wire = PLAIN if tensor.dtype in (torch.int32, torch.int64) else _wire_to(stage)
    if (box := _opened()) is not None:  # it carries the message, and asks for the wire
        box.wire_to = lambda peer: wire
        return call()
    if direction == "send":
        return call(tensor=wire.outgoing(tensor))
    part, finish = wire.incoming(tensor)
    done = call(tensor=part)
    finish()
    return done


@by_name
def _announce(call, instance, buffer, recv_stage):
    """_send_tensor_meta: the next stage makes its buffers for these tensors, once for all steps."""
    if _mailbox is None:
        return call()
    peer = instance.grid.stage_to_global(stage_id=recv_stage)
    _mailbox.announce((), peer)
    result = call()
    tensors = buffer if isinstance(buffer, (tuple, list)) else (buffer,)
    _mailbox.announce([mailbox.form_of(tensor) for tensor in tensors], peer)
    return result


@by_name
def _announced(call, instance, send_stage):
    """_recv_tensor_meta: its messages are about those of each micro-batch."""
    result = call()
    if _mailbox is not None:
        _mailbox.leave_out(instance.grid.stage_to_global(stage_id=send_stage))
    return result


@cache
def _schedule_class() -> type:
    from deepspeed.runtime.pipe import schedule

    class PlannedSchedule(schedule.TrainSchedule):
        """TrainSchedule with the passes of `flight`."""

        def __init__(self, stock: Any, flight: Flight, engine: Any, box: Mailbox):
            self.__dict__.update(vars(stock))  # sizes, and whatever a later DeepSpeed gives its schedules
            self.order, self.engine, self.box = flight.order(self.stage_id, self.micro_batches), engine, box
            self.splits = any(letter == "W" for letter, _ in self.order)
            self.weights, self.losses = WeightGradients(), dict[int, Any]()
            # of each activation that comes: gradients that the stage before must have had to send it
            above = flight.order(self.stage_id - 1, self.micro_batches) if self.stage_id else ()
            self.returned = before(above, "BI", "F")

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
            sums = engine.using_bf16_optimizer and not ask("immediate_grad_update", engine)
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
    """Of training, in the plan's order; messages through the mailbox, all gone at its end."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if _mailbox is None or instance.num_stages == 1 or type(pipe_schedule) is not TrainSchedule:
        return call()
    plan = current.plan_for(grid_sizes(current, instance.grid))
    planned = flight_of(plan, network_api_of(backend_of()))
    reason = unsupported(instance, planned) if planned else None
    if reason:
        tell(current, f"DeepSpeed's own pipeline schedule is used: {reason}", once=True)
    if reason or not planned:
        return call()
    if not _mailbox.knows:
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
def _forget(call, instance):
    """Let the next step run the engine's own schedule, to learn the new shapes of its messages.

    Only reset_activation_shape says that shapes change. set_train_batch_size does not: it changes the number
    of micro-batches, and what is known is the messages of one micro-batch. Megatron-DeepSpeed calls it before
    every step. set_train_micro_batch_size changes shapes, but the engine itself keeps its old buffers until
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
    *messages(NARROW, _narrowed, "activations and gradients cross as wide as they are computed",
              "what was narrowed is widened"),
    Patch(EDGES, f"{_ENGINE}._exec_schedule",
          "the schedule keeps as few micro-batches in flight as free edges need", _exec_schedule),
    Patch(EDGES, f"{_ENGINE}._send_tensor_meta",
          "what is announced is what has to come, or nobody says what is wrong", _announce),
    Patch(EDGES, f"{_ENGINE}._recv_tensor_meta", "what comes before the first activation comes once",
          _announced),
    Patch(EDGES, f"{_ENGINE}.reset_activation_shape", "shapes of messages change (curriculum learning)",
          _forget),
)  # fmt: skip
