"""Measures the gradient reductions on a rank in some steps, and checks memory before a change.

A gradient reduction is an all-reduce of the data-parallel group, or the operations of a hierarchical
all-reduce in smaller groups. Their time is measured for each network. Small all-reduces of the same
group (a loss, a norm) are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from holmes_ext.adapt.reductions import ReductionChange
from holmes_ext.adapt.window import USABLE_MEMORY_SHARE, waited_s
from holmes_ext.plan.buckets import BUCKETS_IN_FLIGHT
from holmes_ext.runtime.measure.operations import Op
from holmes_ext.runtime.measure.telemetry import LAST_BUCKET, Recorder
from holmes_ext.runtime.session import DoneReduction, Session
from holmes_ext.units import union_s

#: All-reduces with less than this share of the bytes of the largest all-reduce do not reduce
#: gradients, but a loss or a norm.
LEAST_GRADIENT_SHARE = 1 / 64


class _StepTimes(NamedTuple):
    """Times of the gradient reductions in a step, in seconds."""

    seconds: float  # duration of the reductions; overlaps count once
    exposed_s: float  # wait of the program for reductions
    busy_s: dict[str, float]  # network -> duration of the reductions on it


class ReductionWindow:
    """Times of the gradient reductions (all-reduces) on this rank, in a window of training steps."""

    def __init__(self, current: Session, recorder: Recorder):
        self.current = current
        self.recorder = recorder
        self._steps: list[_StepTimes] = []
        #: How the last measured step reduced gradients. None: no reduction that follows the plan
        #: was measured.
        self._reduction: DoneReduction | None = None

    def step(
        self,
        done: Sequence[Op],
        spans: Sequence[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> None:
        """Add the gradient reductions of a training step.

        The step is ignored in two cases. If the reductions do not follow the plan, no change of the
        plan could make them faster. If the gradients are reduced by other code than a gradient reducer
        or DistributedDataParallel, it is unknown how long the program waited for them.

        Args:
            done: Operations of the step: messages and collectives.
            spans: Parts of the step: (kind, begin, end in seconds).
            reduction: Measurements of the gradient reducer in the step; None without a reducer.
        """
        # Reductions that change when the plan changes: ranks of the group -> how they reduced.
        changeable = {
            ranks: record
            for ranks, record in self.current.reductions.items()
            if record.follows_plan
        }
        # Times at which DistributedDataParallel had launched the all-reduce of its last bucket.
        launch_ends = [end for kind, _, end in spans if kind == LAST_BUCKET]
        if not changeable or (reduction is None and not launch_ends):
            return
        # If this rank is in several groups that reduce, the group with the most bytes counts.
        ranks = max(changeable, key=lambda group: changeable[group].bytes)
        self._reduction = changeable[ranks]
        ops = _gradient_sums(done, ranks)
        intervals_on: dict[str, list[tuple[float, float]]] = {}  # network -> (start, end) of sums
        for op in ops:
            intervals_on.setdefault(op.group.transport.fabric, []).append((op.start, op.end))
        if reduction is None:
            # DistributedDataParallel waits inside of torch, and no wait is measured there. The wait
            # begins when the last bucket has been launched, and ends with the last all-reduce.
            wait_begin = launch_ends[-1]
            wait_end = max((op.end for op in ops), default=0.0)
            exposed_s = max(0.0, wait_end - wait_begin)
        elif "exposed" in reduction:  # the reducer itself measured how long the program waited
            exposed_s = reduction["exposed"]
        else:
            exposed_s = waited_s(ops, spans)
        times = _StepTimes(
            seconds=union_s([(op.start, op.end) for op in ops]),
            exposed_s=exposed_s,
            busy_s={network: union_s(intervals) for network, intervals in intervals_on.items()},
        )
        self._steps.append(times)

    def report(self) -> dict[str, Any] | None:
        """Return the medians over the steps, as a JSON document for rank 0.

        Returns:
            None if step() found no reduction of this rank that follows the plan. Otherwise a dict:

                "way"       algorithm of the reductions (fields of ReductionSpec)
                "bytes"     bytes of gradients
                "seconds"   duration of the reductions; overlaps count once
                "exposed"   wait of the program for reductions
                "busy"      network -> duration of the reductions on it
        """
        if self._reduction is None:  # all calls of step() have added nothing
            return None
        # All steps use the same networks, unless the algorithm has just changed: then the networks
        # of the last step belong to the algorithm that is reported.
        last_step = self._steps[-1]
        busy_s = {}
        for network in last_step.busy_s:
            busy_s[network] = statistics.median(
                step.busy_s.get(network, 0.0) for step in self._steps
            )
        return {
            "way": asdict(self._reduction.planned),  # as planned; the job has followed the plan
            "bytes": self._reduction.bytes,
            "seconds": statistics.median(step.seconds for step in self._steps),
            "exposed": statistics.median(step.exposed_s for step in self._steps),
            "busy": busy_s,
        }


def _gradient_sums(done: Sequence[Op], ranks: tuple[int, ...]) -> list[Op]:
    """Return the operations that sum gradients over a group of ranks.

    They are all-reduces of the group itself, or the operations of a hierarchical all-reduce in smaller
    groups inside and across clusters.

    Args:
        done: Operations of a step.
        ranks: Global ranks of the group.
    """
    all_reduces = [
        op for op in done if op.peer is None and op.group.ranks == ranks and op.name == "all_reduce"
    ]
    # Much smaller all-reduces sum something else, such as a loss or a norm.
    least_bytes = LEAST_GRADIENT_SHARE * max((op.payload for op in all_reduces), default=0)
    sums = [op for op in all_reduces if op.payload >= least_bytes]
    for op in done:
        # When holmes makes such smaller groups, it writes this word into their descriptions.
        if "hierarchical" in op.group.description and set(op.group.ranks) <= set(ranks):
            sums.append(op)
    return sums


def fits(change: ReductionChange, recorder: Recorder) -> bool:
    """Return whether this rank's GPU has the memory for the larger buckets and chunks of a change.

    Even if torch reports enough free memory, it may be in pieces, or another program may use the
    same GPU. So the memory that the change needs is allocated once as a test, and freed.

    Args:
        change: Change of the algorithms that sum gradients; it has an algorithm for each pipeline
            stage.
        recorder: Telemetry of this rank; it has the GPU's index.
    """
    if not recorder.spans_on_device:  # the job runs on CPUs
        return True
    import torch

    # A stage uses buckets (one ring) or chunks (hierarchical). Both sizes are added, because it
    # may use either, depending on the bytes of its gradients: the sum is large enough for both.
    increases = []  # in bytes, by stage
    for before, after in zip(change.before, change.after):
        bucket_increase = after.bucket_bytes - before.bucket_bytes
        chunk_increase = after.chunk_bytes - before.chunk_bytes
        increases.append(bucket_increase + chunk_increase)
    # BUCKETS_IN_FLIGHT buckets (or chunks) exist at the same time. The largest increase of all
    # stages counts on every rank. If this rank's stage needs less, the rank may refuse a change for
    # which it has the memory; this does no harm.
    extra_bytes: float = BUCKETS_IN_FLIGHT * max(increases)
    if extra_bytes <= 0:
        return True
    device = recorder.device_index
    free_bytes, _ = torch.cuda.mem_get_info(device)
    # 95 % of the memory that torch has or can get, less the highest use by tensors so far.
    usable_bytes = USABLE_MEMORY_SHARE * (torch.cuda.memory_reserved(device) + free_bytes)
    if extra_bytes > usable_bytes - torch.cuda.max_memory_allocated(device):
        return False
    try:
        torch.empty(round(extra_bytes), dtype=torch.uint8, device=f"cuda:{device}")
    except torch.cuda.OutOfMemoryError:
        return False
    return True
