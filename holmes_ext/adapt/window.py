"""What one rank measures in a window of steps: its passes, its messages, its reductions, its memory.

    Recorder.on_step (main thread)  ->  Window.step  ->  report(): one document, of medians

Sends and receives are told one by one, with this node's times: stage_links.py puts both ends together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.measure.telemetry import Op, Recorder
from holmes_ext.units import union_s

#: Receives that were waited for at least so long came when the wait ended: seconds.
WAITED_S = 2e-4
#: Part of the device's memory that is counted on: the rest goes in pieces too small to use.
MARGIN = 0.95
_SPANS = "forward", "backward", "optimizer"
#: [micro-batch, posted, came, waited for] of a receive, [micro-batch, sent] of a send; seconds.
Message = list[Any]


def waited_s(sums: Sequence[Op], spans: Sequence[tuple[str, float, float]]) -> float:
    """Seconds that the program stood still for sums of gradients; on a GPU, where a stream of its own
    launches them, in spans of the compute stream."""
    return sum(op.waited for op in sums) + sum(
        end - begin for kind, begin, end in spans if kind == "reduce"
    )


@dataclass
class Window:
    """Of one rank; steps are put in one after the other. in_flight: micro-batches; 0: as many
    as the engine's own schedule."""

    stage: Stage
    recorder: Recorder
    in_flight: int = 0
    passes: dict[str, list[float]] = field(default_factory=dict)  # seconds of each
    totals: dict[str, list[float]] = field(default_factory=dict)  # of each step
    messages: dict[str, list[list[Message]]] = field(
        default_factory=dict
    )  # by "GROUP from>to", of each step
    reduced: list[tuple[float, float]] = field(
        default_factory=list
    )  # (bytes, seconds) of each step
    activation_bytes: float = 0.0

    def step(
        self,
        begin: float,
        end: float,
        done: Sequence[Op],
        spans: Sequence[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> None:
        """A step that took from `begin` to `end`."""
        sums = dict.fromkeys((*_SPANS, "send", "receive", "reduce", "tied"), 0.0)
        for kind, start, stop in spans:
            if kind in _SPANS:
                sums[kind] += stop - start
                self.passes.setdefault(kind, []).append(stop - start)
        reduces = [op for op in done if op.peer is None and self.recorder.kind(op) == "data"]
        for op in done:
            if op.peer is not None:
                sums["send" if op.name == "send" else "receive"] += op.waited
        sums["reduce"] = waited_s(reduces, spans)
        size, seconds = (
            sum(op.payload for op in reduces),
            union_s([(op.start, op.end) for op in reduces]),
        )
        if reduction and "seconds" in reduction:  # the reducer's own figures know of its threads
            size, seconds = reduction["bytes"], reduction["seconds"]
            sums["reduce"] = reduction["exposed"]
        self.reduced.append((size, seconds))
        rest = max(0.0, end - begin - sum(sums.values()))
        for kind, total in {**sums, "step": end - begin, "idle": rest}.items():
            self.totals.setdefault(kind, []).append(total)
        self._messages(done)

    def _messages(self, done: Sequence[Op]) -> None:
        """Keep them by direction; all those of a micro-batch count as one message."""
        by_direction: dict[str, list[Op]] = {}
        for op in done:
            if op.peer in self.stage.neighbours:
                ends = (
                    (self.recorder.rank, op.peer)
                    if op.name == "send"
                    else (op.peer, self.recorder.rank)
                )
                by_direction.setdefault(f"{op.group.name} {ends[0]}>{ends[1]}", []).append(op)
        for direction, ops in by_direction.items():
            ops.sort(key=lambda op: op.number)
            per_batch, left = divmod(len(ops), self.stage.micro_batches)
            if left or not per_batch:
                continue
            parts = [ops[start : start + per_batch] for start in range(0, len(ops), per_batch)]
            if ops[0].name == "send":
                messages = [[index, part[0].start] for index, part in enumerate(parts)]
            else:
                self.activation_bytes = sum(op.payload for op in parts[0])
                messages = [
                    [index, part[0].start, part[-1].end, sum(op.waited for op in part) > WAITED_S]
                    for index, part in enumerate(parts)
                ]
            self.messages.setdefault(direction, []).append(messages)

    def _memory(self) -> list[float]:
        """Bytes that do not depend on the micro-batches in flight, that each of them keeps, and that there
        are; zeros where nothing measures them."""
        if not self.recorder.spans_on_device or not self.recorder.kept_bytes:
            return [0.0, 0.0, 0.0]
        import torch

        device, kept = self.recorder.device_index, max(0, self.recorder.kept_bytes)
        free, _ = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device)
        held = min(
            self.in_flight or len(self.stage.stages) - self.stage.stage, self.stage.micro_batches
        )
        room = MARGIN * (torch.cuda.memory_reserved(device) + free)
        return [float(max(0, peak - held * kept)), float(kept), room]

    def report(self) -> dict[str, Any]:
        """As runtime/measure/profile_file.py merges them; without passes where none was seen, or nobody
        tells what blocks they pass."""
        stage, blocks = self.stage, self.stage.blocks
        common: dict[str, Any] = {
            "rank": self.recorder.rank,
            "stage": stage.stage,
            "totals": {kind: statistics.median(values) for kind, values in self.totals.items()},
        }
        if not (blocks and self.passes.get("forward") and self.passes.get("backward")):
            return common
        size, seconds = max(self.reduced, default=(0.0, 0.0))
        return {
            **common,
            "framework": stage.framework,
            "tensor": stage.tensor,
            "micro_batches": stage.micro_batches,
            "activation_bytes": self.activation_bytes,
            "steps": len(self.totals["step"]),
            "gradient_bytes": [[label, size] for label, size in stage.gradient_bytes.items()],
            **{
                kind: [
                    [block, statistics.median(self.passes[kind]) / len(blocks)] for block in blocks
                ]
                for kind in ("forward", "backward")
            },
            "reduction": [seconds / size if size else 0.0, 0.0],
            "messages": self.messages,
            "memory": self._memory(),
        }
