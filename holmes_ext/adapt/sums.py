"""What one rank measures of its sums of gradients in a window of steps, and whether another way has room.

Operations of the group that sums, and of those that carry two levels of it (their descriptions tell), are
told by the network that they are on. Small sums of the same group (a loss, a norm) are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holmes_ext.adapt.reductions import SumChange
from holmes_ext.adapt.window import MARGIN, waited_s
from holmes_ext.plan.cost.buckets import BUCKETS_IN_FLIGHT
from holmes_ext.runtime.measure.telemetry import LAST_BUCKET, Op, Recorder
from holmes_ext.runtime.session import DoneReduction, Session
from holmes_ext.units import union_s

#: Describes the groups that clusters sum in while they are apart.
APART = "apart"
#: Three float32 of each weight of a fragment, in bytes of its gradient of 16 bits.
WIDE = 6
#: Part of the largest sum's bytes below which a sum is none of gradients.
SMALL = 1 / 64


class SumWindow:
    """Of one rank; steps are put in one after the other."""

    def __init__(self, current: Session, recorder: Recorder):
        self.current, self.recorder = current, recorder
        self._steps: list[tuple[float, float, dict[str, float]]] = []  # (seconds, exposed, by network)
        self._done: DoneReduction | None = None

    def step(self, done: Sequence[Op], spans: Sequence[tuple[str, float, float]],
             reduction: dict[str, Any] | None) -> bool:
        """Whether it counts: not one in which a round of clusters that are apart came to its end."""
        follow = [(ranks, record) for ranks, record in self.current.reductions.items() if record.follows]
        launched = [end for kind, _, end in spans if kind == LAST_BUCKET]
        if not follow or (reduction is None and not launched):
            return True
        ranks, self._done = max(follow, key=lambda pair: pair[1].bytes)
        flat = [op for op in done if op.peer is None and op.group.ranks == ranks and op.name == "all_reduce"]
        least = SMALL * max((op.payload for op in flat), default=0)
        ops = [op for op in flat if op.payload >= least]
        parts = (op for op in done if "two-level" in op.group.description)
        ops += [op for op in parts if set(op.group.ranks) <= set(ranks)]
        if self._done.planned.apart:
            if any(op not in flat or op.payload >= SMALL * self._done.bytes for op in ops):
                return False
            ops = [op for op in done if op.group.description == APART]
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
        return True

    def report(self) -> dict[str, Any] | None:
        """As adapt/reductions.py's Summed, medians; None where nothing here follows the plan."""
        if self._done is None:
            return None
        seconds, exposed, busy = zip(*self._steps)
        return {
            "way": asdict(self._done.planned), "bytes": self._done.bytes,
            "why_not_apart": self._done.why_not_apart, "round_s": self._done.round_s,
            "seconds": statistics.median(seconds), "exposed": statistics.median(exposed),
            "busy": {name: statistics.median(step.get(name, 0.0) for step in busy) for name in busy[-1]},
        }


def fits(change: SumChange, recorder: Recorder, fragments: int = 1) -> bool:
    """Whether this rank's GPU has room for buckets and chunks that are larger than before, and for one of the
    fragments that cross while clusters are apart: by what torch tells, and by asking it for them once (memory
    in pieces, another program on the same GPU)."""
    if not recorder.spans_on_device:
        return True
    import torch

    pairs = zip(change.before, change.after)
    more: float = BUCKETS_IN_FLIGHT * max(
        after.bucket_bytes + after.chunk_bytes - before.bucket_bytes - before.chunk_bytes
        for before, after in pairs)
    if change.before[0].apart != change.after[0].apart:
        more += WIDE * change.size / fragments
    device = recorder.device_index
    free, _ = torch.cuda.mem_get_info(device)
    room = MARGIN * (torch.cuda.memory_reserved(device) + free) - torch.cuda.max_memory_allocated(device)
    if more <= 0 or more > room:
        return more <= 0
    try:
        torch.empty(round(more), dtype=torch.uint8, device=f"cuda:{device}")
    except torch.cuda.OutOfMemoryError:
        return False
    return True
