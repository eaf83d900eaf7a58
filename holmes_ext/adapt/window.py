"""Measures a window of training steps on a rank: its passes, messages, reductions and memory.

    1  telemetry.Recorder.on_step   reports the operations (sends, receives, collectives) of a step
    2  StepWindow.step()            adds the step to the window
    3  StepWindow.report()          returns the medians of the window, as a document for rank 0

Each send and receive is reported by itself, with the times of this node's clock; stage_links.py
compares the times of both ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holmes_ext.runtime.measure.operations import Op
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.measure.telemetry import Recorder
from holmes_ext.units import union_s

#: Least wait for a receive, in seconds, that counts: the message has arrived when the wait ends.
WAITED_S = 2e-4
#: Share of a device's memory that can be used; the rest is lost in pieces that are too small.
USABLE_MEMORY_SHARE = 0.95
#: Spans (parts of a step with begin and end) of computing. The recorder reports
#: others, too.
_COMPUTING_SPANS = "forward", "backward", "optimizer"
#: Kinds of operations that the program may wait for.
_WAITS = "send", "receive", "reduce"
#: [micro-batch, posted, received, was waited for] of a receive, or [micro-batch, sent] of a send.
#: Times are seconds of this node's clock.
Message = list[Any]


def waited_s(sums: Sequence[Op], spans: Sequence[tuple[str, float, float]]) -> float:
    """Return how long the training program waited for gradient reductions in a step, in seconds.

    Args:
        sums: Operations that sum gradients.
        spans: (kind, begin, end in seconds) of the parts of the step. On a GPU, where a side stream
            launches the sums, the waits of the compute stream are spans of the kind "reduce".
    """
    host_s = sum(op.waited for op in sums)
    device_s = sum(end - begin for kind, begin, end in spans if kind == "reduce")
    return host_s + device_s


def _message_of(micro_batch: int, parts: Sequence[Op]) -> Message:
    """Return the times of a message, from its sends or its receives: see Message.

    Args:
        micro_batch: Number of the micro-batch.
        parts: Operations of the message, all sends or all receives, in order.
    """
    start_s = parts[0].start
    if parts[0].name == "send":
        return [micro_batch, start_s]
    end_s = parts[-1].end
    # Shorter waits than WAITED_S come from the call itself, not from the network.
    was_waited_for = sum(op.waited for op in parts) > WAITED_S
    return [micro_batch, start_s, end_s, was_waited_for]


class _Reduced(NamedTuple):
    """Size and duration of all gradient reductions of a step."""

    size: float  # bytes of gradients
    seconds: float  # duration of the reductions; overlaps count once


@dataclass
class StepWindow:
    """Times of passes, messages and reductions on this rank in some training steps."""

    stage: Stage
    recorder: Recorder
    in_flight: int = 0  # planned micro-batches in flight; 0 for the engine's own schedule
    #: "forward" or "backward" -> seconds of each pass.
    passes: dict[str, list[float]] = field(default_factory=dict)
    #: Kind of work or wait, such as "forward" or "receive" -> seconds in each step.
    totals: dict[str, list[float]] = field(default_factory=dict)
    #: "GROUP sender>receiver" (name of the process group, and ranks) -> messages of each step.
    messages: dict[str, list[list[Message]]] = field(default_factory=dict)
    #: Bytes and seconds of the gradient reductions of each step.
    reduced: list[_Reduced] = field(default_factory=list)
    activation_bytes: float = 0.0  # received for a micro-batch

    def step(
        self,
        begin: float,
        end: float,
        done: Sequence[Op],
        spans: Sequence[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> None:
        """Add the measurements of a training step.

        The step's time is divided into computing (forward, backward, optimizer), waits for messages
        and for reductions, and the remainder, "idle".

        Args:
            begin: Begin of the step, in seconds.
            end: End of the step, in seconds.
            done: Operations of the step: messages and collectives.
            spans: (kind, begin, end in seconds) of the parts of the step.
            reduction: Measurements of the gradient reducer in the step; None without a reducer.
        """
        # Kind of work or wait -> seconds in this step. Profiles also have the time of sums of tied
        # weights. That is not measured here: their key "tied" stays 0.
        seconds_of = dict.fromkeys((*_COMPUTING_SPANS, *_WAITS, "tied"), 0.0)
        for kind, start, stop in spans:
            if kind in _COMPUTING_SPANS:
                seconds_of[kind] += stop - start
                self.passes.setdefault(kind, []).append(stop - start)
        for op in done:
            if op.peer is not None:  # a message, not a collective
                seconds_of["send" if op.name == "send" else "receive"] += op.waited
        if reduction and "seconds" in reduction:
            # A GradientReducer's threads wait for its operations, so only the reducer itself knows
            # how long the program has waited ("exposed").
            reduced_bytes = reduction["bytes"]
            reduced_s = reduction["seconds"]
            seconds_of["reduce"] = reduction["exposed"]
        else:
            sums = [op for op in done if op.peer is None and self.recorder.kind(op) == "data"]
            reduced_bytes = sum(op.payload for op in sums)
            reduced_s = union_s([(op.start, op.end) for op in sums])
            seconds_of["reduce"] = waited_s(sums, spans)
        self.reduced.append(_Reduced(reduced_bytes, reduced_s))
        step_s = end - begin
        idle_s = max(0.0, step_s - sum(seconds_of.values()))
        for kind, seconds in {**seconds_of, "step": step_s, "idle": idle_s}.items():
            self.totals.setdefault(kind, []).append(seconds)
        self._add_messages(done)

    def _add_messages(self, done: Sequence[Op]) -> None:
        """Add the messages between neighbouring pipeline stages in a step to self.messages.

        A micro-batch may need several sends (slices of its activations). They count as a single
        message. self.messages has a list of messages for each direction and step:

            [micro-batch, start]                 a message that was sent
            [micro-batch, start, end, waited]    a received message. `waited`: whether the program waited
                                                 for the receive. Only then is `end` the time at which the
                                                 message arrived; otherwise it arrived earlier, at an
                                                 unknown time

        Args:
            done: Operations of the step.
        """
        by_direction: dict[str, list[Op]] = {}  # "GROUP sender>receiver" -> sends, or receives
        for op in done:
            if op.peer not in self.stage.neighbours:  # not of an adjacent stage
                continue
            sender, receiver = self.recorder.rank, op.peer
            if op.name != "send":
                sender, receiver = receiver, sender
            by_direction.setdefault(f"{op.group.name} {sender}>{receiver}", []).append(op)
        for direction, ops in by_direction.items():
            ops.sort(key=lambda op: op.number)  # in the order in which the program started them
            ops_per_micro_batch, left_over = divmod(len(ops), self.stage.micro_batches)
            if left_over or not ops_per_micro_batch:  # they cannot be assigned to micro-batches
                continue
            # Operations of a direction come in the order of the micro-batches.
            messages: list[Message] = []
            for micro_batch in range(self.stage.micro_batches):
                first = micro_batch * ops_per_micro_batch
                parts = ops[first : first + ops_per_micro_batch]
                messages.append(_message_of(micro_batch, parts))
            self.messages.setdefault(direction, []).append(messages)
            if ops[0].name != "send":  # all micro-batches have equally many bytes
                first_message = ops[:ops_per_micro_batch]
                self.activation_bytes = sum(op.payload for op in first_message)

    def _memory(self) -> list[float]:
        """Return the use of the GPU's memory (fields of pipeline.Room); zeros if not measured.

        Returns:
            Bytes that do not depend on the number of micro-batches in flight, bytes of each micro-batch
            in flight, and usable bytes of the GPU.
        """
        if not self.recorder.spans_on_device or not self.recorder.kept_bytes:
            return [0.0, 0.0, 0.0]
        import torch

        device = self.recorder.device_index
        kept_bytes = max(0, self.recorder.kept_bytes)  # by each micro-batch
        free_bytes, _ = torch.cuda.mem_get_info(device)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        # The engine's own schedule, 1F1B: a micro-batch for this stage, and for each later stage.
        in_flight_of_1f1b = len(self.stage.stages) - self.stage.stage
        in_flight = min(self.in_flight or in_flight_of_1f1b, self.stage.micro_batches)
        # At the peak, `in_flight` micro-batches are kept at the same time.
        fixed_bytes = max(0, peak_bytes - in_flight * kept_bytes)
        usable_bytes = USABLE_MEMORY_SHARE * (torch.cuda.memory_reserved(device) + free_bytes)
        return [float(fixed_bytes), float(kept_bytes), usable_bytes]

    def report(self) -> dict[str, Any]:
        """Return the medians over the steps, as a JSON document for rank 0.

        Rank 0 merges the documents of all ranks into a profile of the job.

        Returns:
            "totals": kind of work or wait ("forward", "backward", "optimizer", "send", "receive",
            "reduce", "step", "idle") -> median seconds in a step. "forward", "backward": seconds of
            each transformer block. They and all later keys are absent if no pass was measured, or
            if the blocks of this rank's stage are unknown.
        """
        stage = self.stage
        blocks = stage.blocks
        common: dict[str, Any] = {
            "rank": self.recorder.rank,
            "stage": stage.stage,
            "totals": {kind: statistics.median(values) for kind, values in self.totals.items()},
        }
        if not (blocks and self.passes.get("forward") and self.passes.get("backward")):
            return common
        # `reduced` has the bytes and seconds of the reductions of each step. A step may reduce only
        # a part of the gradients: the step that reduced the most bytes counts. (Tuples compare by
        # their first field, the bytes.)
        largest = max(self.reduced, default=_Reduced(0.0, 0.0))
        reduction_s_per_byte = largest.seconds / largest.size if largest.size else 0.0
        reduction_latency_s = 0.0  # not measured: the seconds per byte contain it
        # Single blocks are not measured: each gets an equal share of a pass.
        seconds_per_block = {
            kind: statistics.median(self.passes[kind]) / len(blocks)
            for kind in ("forward", "backward")
        }
        return {
            **common,
            "framework": stage.framework,
            "tensor": stage.tensor,  # tensor-parallel size
            "micro_batches": stage.micro_batches,
            "activation_bytes": self.activation_bytes,
            "steps": len(self.totals["step"]),  # number of measured steps
            # [layer, bytes of its gradients]. A layer is the number of a transformer block, "before"
            # (layers before the blocks, such as the embedding), or "after" (such as the head).
            "gradient_bytes": [[label, size] for label, size in stage.gradient_bytes.items()],
            "forward": [[block, seconds_per_block["forward"]] for block in blocks],
            "backward": [[block, seconds_per_block["backward"]] for block in blocks],
            "reduction": [reduction_s_per_byte, reduction_latency_s],
            "messages": self.messages,
            "memory": self._memory(),
        }
