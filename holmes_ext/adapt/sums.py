"""Measures the sums of gradients on one rank in a window of steps, and checks memory before a change.

The time of sums is measured for each network. It counts the operations of the process group that sums, and of
the groups that carry its hierarchical all-reduce, which are recognized by their descriptions. Small sums of
the same group (a loss, a norm) are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from holmes_ext.adapt.reductions import SumChange
from holmes_ext.adapt.window import MARGIN, waited_s
from holmes_ext.plan.buckets import BUCKETS_IN_FLIGHT
from holmes_ext.runtime.measure.telemetry import LAST_BUCKET, Op, Recorder
from holmes_ext.runtime.session import DoneReduction, Session
from holmes_ext.units import union_s

#: Smaller sums, as a share of the largest sum's bytes, are not sums of gradients.
SMALL = 1 / 64


class _StepTimes(NamedTuple):
    """Times of the sums of gradients in one step, in seconds."""

    seconds: float  # while any sum was under way
    exposed_s: float  # while the program waited
    busy_s: dict[str, float]  # network -> seconds of carrying sums


class SumWindow:
    """Measurements of the sums of gradients on one rank."""

    def __init__(self, current: Session, recorder: Recorder):
        self.current = current
        self.recorder = recorder
        self._steps: list[_StepTimes] = []
        self._done: DoneReduction | None = None

    def step(
        self,
        done: Sequence[Op],
        spans: Sequence[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> None:
        """Add a step.

        Nothing is added if no reduction of this rank follows the plan, or if the end of the step's sums is
        not measured.

        Args:
            done: The operations of the step.
            spans: Parts of the step: (kind, begin, end in seconds).
            reduction: Measurements of the gradient reducer in the step; None without a reducer.
        """
        # (ranks of the group, record) of the reductions whose algorithm is the planned one.
        planned_reductions = [
            (ranks, record)
            for ranks, record in self.current.reductions.items()
            if record.follows_plan
        ]
        # When DistributedDataParallel had launched the sum of its last bucket.
        launch_ends = [end for kind, _, end in spans if kind == LAST_BUCKET]
        if not planned_reductions or (reduction is None and not launch_ends):
            return
        # The largest one counts.
        ranks, self._done = max(planned_reductions, key=lambda pair: pair[1].bytes)
        ops = _gradient_sums(done, ranks)
        intervals_on: dict[str, list[tuple[float, float]]] = {}  # network -> (start, end) of sums
        for op in ops:
            intervals_on.setdefault(op.group.transport.fabric, []).append((op.start, op.end))
        if reduction is None:
            # DistributedDataParallel's own wait is not measured: it ends with the last sum.
            last_end = max((op.end for op in ops), default=0.0)
            exposed_s = max(0.0, last_end - launch_ends[-1])
        else:
            exposed_s = reduction.get("exposed", waited_s(ops, spans))
        times = _StepTimes(
            seconds=union_s([(op.start, op.end) for op in ops]),
            exposed_s=exposed_s,
            busy_s={network: union_s(intervals) for network, intervals in intervals_on.items()},
        )
        self._steps.append(times)

    def report(self) -> dict[str, Any] | None:
        """Return the medians of the window, for Summed of adapt/reductions.py.

        Returns:
            Algorithm ("way"), bytes of gradients, seconds under way, seconds that the program waited
            ("exposed"), and seconds for each network ("busy"). None if no reduction of this rank follows the
            plan.
        """
        if self._done is None:
            return None
        last_step = self._steps[-1]
        busy_s = {}
        for network in last_step.busy_s:
            busy_s[network] = statistics.median(
                step.busy_s.get(network, 0.0) for step in self._steps
            )
        return {
            "way": asdict(self._done.planned),
            "bytes": self._done.bytes,
            "seconds": statistics.median(step.seconds for step in self._steps),
            "exposed": statistics.median(step.exposed_s for step in self._steps),
            "busy": busy_s,
        }


def _gradient_sums(done: Sequence[Op], ranks: tuple[int, ...]) -> list[Op]:
    """Return the operations that sum gradients over a group: all-reduces, and parts of hierarchical ones.

    Args:
        done: Operations of a step.
        ranks: Global ranks of the group.
    """
    all_reduces = [
        op for op in done if op.peer is None and op.group.ranks == ranks and op.name == "all_reduce"
    ]
    # Much smaller ones sum something else, such as a loss or a norm.
    least_bytes = SMALL * max((op.payload for op in all_reduces), default=0)
    sums = [op for op in all_reduces if op.payload >= least_bytes]
    for op in done:
        # Holmes describes the groups that carry a hierarchical all-reduce with this word.
        if "hierarchical" in op.group.description and set(op.group.ranks) <= set(ranks):
            sums.append(op)
    return sums


def fits(change: SumChange, recorder: Recorder) -> bool:
    """Return whether this rank's GPU has enough memory for the larger buckets and chunks of a change.

    If torch reports enough free memory, it is allocated once as a test: it may be in pieces, or another
    program may use the same GPU.

    Args:
        change: Change of the algorithms that sum gradients.
        recorder: Telemetry of this rank, which has the GPU's index.
    """
    if not recorder.spans_on_device:  # the job runs on CPUs
        return True
    import torch

    increases = []  # of each stage, for a bucket and a chunk
    for before, after in zip(change.before, change.after):
        bucket_increase = after.bucket_bytes - before.bucket_bytes
        chunk_increase = after.chunk_bytes - before.chunk_bytes
        increases.append(bucket_increase + chunk_increase)
    extra_bytes: float = BUCKETS_IN_FLIGHT * max(increases)
    if extra_bytes <= 0:
        return True
    device = recorder.device_index
    free_bytes, _ = torch.cuda.mem_get_info(device)
    usable_bytes = MARGIN * (torch.cuda.memory_reserved(device) + free_bytes)
    if extra_bytes > usable_bytes - torch.cuda.max_memory_allocated(device):
        return False
    try:
        torch.empty(round(extra_bytes), dtype=torch.uint8, device=f"cuda:{device}")
    except torch.cuda.OutOfMemoryError:
        return False
    return True
