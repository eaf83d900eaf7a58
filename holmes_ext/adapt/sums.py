"""What one rank measures of its sums of gradients in a window of steps, and whether another way has room.

Operations of the group that sums, and of those that carry a hierarchical all-reduce of it (their
descriptions tell), are
told by the network that they are on. Small sums of the same group (a loss, a norm) are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holmes_ext.adapt.reductions import SumChange
from holmes_ext.adapt.window import MARGIN, waited_s
from holmes_ext.plan.buckets import BUCKETS_IN_FLIGHT
from holmes_ext.runtime.measure.telemetry import LAST_BUCKET, Op, Recorder
from holmes_ext.runtime.session import DoneReduction, Session
from holmes_ext.units import union_s

#: Part of the largest sum's bytes below which a sum is none of gradients.
SMALL = 1 / 64


class SumWindow:
    """Of one rank; steps are put in one after the other."""

    def __init__(self, current: Session, recorder: Recorder):
        self.current, self.recorder = current, recorder
        self._steps: list[
            tuple[float, float, dict[str, float]]
        ] = []  # (seconds, exposed, by network)
        self._done: DoneReduction | None = None

    def step(
        self,
        done: Sequence[Op],
        spans: Sequence[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> None:
        """Add a step.

        Args:
            done: The operations of the step.
            spans: What the step consisted of: (kind, begin, end in seconds).
            reduction: What the gradient reducer measured of the step; None where there is no reducer.
        """
        follow = [
            (ranks, record) for ranks, record in self.current.reductions.items() if record.follows
        ]
        launched = [end for kind, _, end in spans if kind == LAST_BUCKET]
        if not follow or (reduction is None and not launched):
            return
        ranks, self._done = max(follow, key=lambda pair: pair[1].bytes)
        flat = [
            op
            for op in done
            if op.peer is None and op.group.ranks == ranks and op.name == "all_reduce"
        ]
        least = SMALL * max((op.payload for op in flat), default=0)
        ops = [op for op in flat if op.payload >= least]
        parts = (op for op in done if "hierarchical" in op.group.description)
        ops += [op for op in parts if set(op.group.ranks) <= set(ranks)]
        by_network: dict[str, list[tuple[float, float]]] = {}
        for op in ops:
            by_network.setdefault(op.group.transport.fabric, []).append((op.start, op.end))
        busy = {name: union_s(spans) for name, spans in by_network.items()}
        seconds = union_s([(op.start, op.end) for op in ops])
        if reduction is None:  # DistributedDataParallel waits where nobody sees it
            exposed = max(0.0, max((op.end for op in ops), default=0.0) - launched[-1])
        else:
            exposed = reduction.get("exposed", waited_s(ops, spans))
        self._steps.append((seconds, exposed, busy))

    def report(self) -> dict[str, Any] | None:
        """As adapt/reductions.py's Summed, medians; None where nothing here follows the plan."""
        if self._done is None:
            return None
        seconds, exposed, busy = zip(*self._steps)
        return {
            "way": asdict(self._done.planned),
            "bytes": self._done.bytes,
            "seconds": statistics.median(seconds),
            "exposed": statistics.median(exposed),
            "busy": {
                name: statistics.median(step.get(name, 0.0) for step in busy) for name in busy[-1]
            },
        }


def fits(change: SumChange, recorder: Recorder) -> bool:
    """Return whether this rank's GPU has room for buckets and chunks that are larger than before.

    torch's figures decide first. Then the memory is allocated once: it may be in pieces, or another program
    may use the same GPU.
    """
    if not recorder.spans_on_device:
        return True
    import torch

    pairs = zip(change.before, change.after)
    more: float = BUCKETS_IN_FLIGHT * max(
        after.bucket_bytes + after.chunk_bytes - before.bucket_bytes - before.chunk_bytes
        for before, after in pairs
    )
    device = recorder.device_index
    free, _ = torch.cuda.mem_get_info(device)
    room = MARGIN * (torch.cuda.memory_reserved(device) + free) - torch.cuda.max_memory_allocated(
        device
    )
    if more <= 0 or more > room:
        return more <= 0
    try:
        torch.empty(round(more), dtype=torch.uint8, device=f"cuda:{device}")
    except torch.cuda.OutOfMemoryError:
        return False
    return True
