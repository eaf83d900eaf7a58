"""Measures a window of training steps on one rank: its passes, messages, reductions and memory.

    1  telemetry.Recorder.on_step   reports the operations of a step
    2  Window.step()                adds the step to the window
    3  Window.report()              returns the medians of the window, as a document for rank 0

Each send and receive is reported by itself, with the times of this node's clock; stage_links.py compares the
times of both ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.measure.telemetry import Op, Recorder
from holmes_ext.units import union_s

#: Least wait for a receive, in seconds, that counts: the message has arrived when the wait ends.
WAITED_S = 2e-4
#: Share of a device's memory that can be used; the rest is lost in pieces that are too small.
MARGIN = 0.95
_SPANS = "forward", "backward", "optimizer"
#: [micro-batch, posted, received, was waited for] of a receive, or [micro-batch, sent] of a send. Times are
#: seconds of this node's clock.
Message = list[Any]


def waited_s(sums: Sequence[Op], spans: Sequence[tuple[str, float, float]]) -> float:
    """Return the time that the program waited for sums of gradients, in seconds.

    Args:
        sums: Operations that sum gradients.
        spans: (kind, begin, end in seconds) of the step. On a GPU, where a side stream launches the sums, the
            waits of the compute stream are spans "reduce".
    """
    host_s = sum(op.waited for op in sums)
    device_s = sum(end - begin for kind, begin, end in spans if kind == "reduce")
    return host_s + device_s


@dataclass
class Window:
    """Measurements of several steps on one rank."""

    stage: Stage
    recorder: Recorder
    in_flight: int = 0  # planned micro-batches in flight; 0 for the engine's own schedule
    #: "forward" or "backward" -> seconds of each pass.
    passes: dict[str, list[float]] = field(default_factory=dict)
    #: Kind of work or wait -> seconds in each step.
    totals: dict[str, list[float]] = field(default_factory=dict)
    #: "GROUP sender>receiver" -> messages of each step.
    messages: dict[str, list[list[Message]]] = field(default_factory=dict)
    #: (bytes, seconds) of the gradient reductions of each step.
    reduced: list[tuple[float, float]] = field(default_factory=list)
    activation_bytes: float = 0.0  # received for a micro-batch

    def step(
        self,
        begin: float,
        end: float,
        done: Sequence[Op],
        spans: Sequence[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> None:
        """Add a step.

        Args:
            begin: Begin of the step, in seconds.
            end: End of the step, in seconds.
            done: Operations of the step: messages and sums.
            spans: (kind, begin, end in seconds) of the parts of the step.
            reduction: Measurements of the gradient reducer in the step; None without a reducer.
        """
        # Kind of work or wait -> seconds in this step.
        seconds_of = dict.fromkeys((*_SPANS, "send", "receive", "reduce", "tied"), 0.0)
        for kind, start, stop in spans:
            if kind in _SPANS:
                seconds_of[kind] += stop - start
                self.passes.setdefault(kind, []).append(stop - start)
        for op in done:
            if op.peer is not None:  # a message, not a collective
                seconds_of["send" if op.name == "send" else "receive"] += op.waited
        if reduction and "seconds" in reduction:  # a reducer also measures its threads
            reduced_bytes = reduction["bytes"]
            reduced_s = reduction["seconds"]
            seconds_of["reduce"] = reduction["exposed"]
        else:
            sums = [op for op in done if op.peer is None and self.recorder.kind(op) == "data"]
            reduced_bytes = sum(op.payload for op in sums)
            reduced_s = union_s([(op.start, op.end) for op in sums])
            seconds_of["reduce"] = waited_s(sums, spans)
        self.reduced.append((reduced_bytes, reduced_s))
        step_s = end - begin
        idle_s = max(0.0, step_s - sum(seconds_of.values()))
        for kind, seconds in {**seconds_of, "step": step_s, "idle": idle_s}.items():
            self.totals.setdefault(kind, []).append(seconds)
        self._add_messages(done)

    def _add_messages(self, done: Sequence[Op]) -> None:
        """Add the messages of a step by direction. All sends of a micro-batch count as one message.

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
            ops.sort(key=lambda op: op.number)
            ops_per_micro_batch, left_over = divmod(len(ops), self.stage.micro_batches)
            if left_over or not ops_per_micro_batch:  # they cannot be assigned to micro-batches
                continue
            messages: list[Message] = []
            for micro_batch in range(self.stage.micro_batches):
                first = micro_batch * ops_per_micro_batch
                parts = ops[first : first + ops_per_micro_batch]
                posted = parts[0].start
                if parts[0].name == "send":
                    messages.append([micro_batch, posted])
                else:
                    received = parts[-1].end
                    was_waited_for = sum(op.waited for op in parts) > WAITED_S
                    messages.append([micro_batch, posted, received, was_waited_for])
                    if micro_batch == 0:
                        self.activation_bytes = sum(op.payload for op in parts)
            self.messages.setdefault(direction, []).append(messages)

    def _memory(self) -> list[float]:
        """Return the memory of the GPU in bytes, or zeros if it is not measured.

        Returns:
            Bytes independent of the micro-batches in flight, bytes that each micro-batch keeps, and usable
            bytes of the GPU.
        """
        if not self.recorder.spans_on_device or not self.recorder.kept_bytes:
            return [0.0, 0.0, 0.0]
        import torch

        device = self.recorder.device_index
        kept_bytes = max(0, self.recorder.kept_bytes)  # by each micro-batch
        free_bytes, _ = torch.cuda.mem_get_info(device)
        peak_bytes = torch.cuda.max_memory_allocated(device)
        in_flight_of_1f1b = len(self.stage.stages) - self.stage.stage  # the engine's own schedule
        in_flight = min(self.in_flight or in_flight_of_1f1b, self.stage.micro_batches)
        # At the peak, `in_flight` micro-batches are kept at the same time.
        fixed_bytes = max(0, peak_bytes - in_flight * kept_bytes)
        usable_bytes = MARGIN * (torch.cuda.memory_reserved(device) + free_bytes)
        return [float(fixed_bytes), float(kept_bytes), usable_bytes]

    def report(self) -> dict[str, Any]:
        """Return the medians of the window, as runtime/measure/profile_file.py merges them.

        The times of passes are left out if no pass was measured, or if the blocks of the stage are unknown.
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
        reduced_bytes, reduced_s = max(self.reduced, default=(0.0, 0.0))
        # Single blocks are not measured: each gets an equal share of a pass.
        seconds_per_block = {
            kind: statistics.median(self.passes[kind]) / len(blocks)
            for kind in ("forward", "backward")
        }
        return {
            **common,
            "framework": stage.framework,
            "tensor": stage.tensor,
            "micro_batches": stage.micro_batches,
            "activation_bytes": self.activation_bytes,
            "steps": len(self.totals["step"]),
            "gradient_bytes": [[label, size] for label, size in stage.gradient_bytes.items()],
            "forward": [[block, seconds_per_block["forward"]] for block in blocks],
            "backward": [[block, seconds_per_block["backward"]] for block in blocks],
            "reduction": [reduced_s / reduced_bytes if reduced_bytes else 0.0, 0.0],
            "messages": self.messages,
            "memory": self._memory(),
        }
