"""Compares the first training steps of a job with its Plan. Differences are printed, and are in the report.

    groups       the fabric of each process group (the program can choose another one with
                 GLOO_SOCKET_IFNAME or with options of NCCL)
    reductions   in two levels or in one ring, under the last backward pass or after it
    in flight    micro-batches that the stages began before their first backward pass
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime.groups.backend import network_api_of
from holmes_ext.runtime.groups.kinds import kind_of
from holmes_ext.runtime.session import DoneReduction, Session
from holmes_ext.words import some_of, tell_user

#: Number of training steps after which the comparison is made. One is not enough: in the first step,
#: DeepSpeed's pipeline engine runs its own schedule.
COMPARED_STEP = 2
_RINGS = {True: "in two levels", False: "in one ring"}
_TIMES = {True: "under the last backward pass", False: "after the backward pass"}


class Comparison:
    """Comparison of the job with its plan, which is made once, after COMPARED_STEP training steps."""

    def __init__(self, current: Session, put: Callable[[dict[str, Any]], None]):
        """Prepare the comparison.

        Args:
            put: Called with the document for the report.
        """
        self.current = current
        self.put = put
        self.steps = 0

    def step_done(self) -> None:
        """Count a training step, and compare if it is COMPARED_STEP."""
        self.steps += 1
        if self.steps != COMPARED_STEP:
            return
        deviations = dict(differences(self.current))  # text -> whether the user has read the reason before
        for text, is_explained in deviations.items():
            if not is_explained and _first_to_tell(self.current, text):
                tell_user(f"not as planned: {text}")
        self.put({"done": {**done(self.current), "differences": list(deviations)}})


def _first_to_tell(current: Session, text: str) -> bool:
    """Return whether this rank is the first that found this difference, and therefore prints it.

    Without the job's store, ranks cannot agree on one, and each of them prints the difference.
    """
    if current.store is None:
        return True
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    this_rank = str(current.rank)
    try:
        # Writes only if the key has no value yet; returns the key's value afterwards.
        first_rank = current.store.compare_set(f"{current.round}/difference/{digest}", "", this_rank)
        return first_rank.decode() == this_rank
    except RuntimeError:  # torch.distributed.DistError is one
        return True


def done(current: Session) -> dict[str, Any]:
    """Return what the job did, for the report.

    "reductions" is a list of [stage, whether in two levels, whether overlapped], "in_flight" the number of
    micro-batches of each stage.
    """
    stages = ((current.plan.stage_of(ranks), reduction) for ranks, reduction in current.reductions.items())
    rows = [[stage, reduction.two_levels, reduction.overlap] for stage, reduction in stages
            if stage is not None]
    return {"reductions": sorted(rows), "in_flight": list(current.in_flight)}


def differences(current: Session) -> Iterator[tuple[str, bool]]:
    """Yield each difference from the plan as (text, whether the user has read the reason before).

    The text contains no rank, so that it is the same on all ranks and is printed once.
    """
    sizes, world = current.plan.sizes, current.plan.world_size
    for record in current.groups:
        planned = current.transport(record.ranks, record.backend).fabric
        if record.transport.fabric != planned:
            kind = kind_of(record.ranks, record.name, sizes, world)
            yield f"{kind} groups are on {record.transport.fabric}, planned on {planned}", False
    for ranks, reduction in current.reductions.items():
        if text := _reduction(reduction):
            yield f"gradients of {_stage(current, ranks)} are summed {text}", reduction.reported
    if text := _missing(current):
        yield text, False
    if text := _in_flight(current):
        yield text, False


def _stage(current: Session, ranks: Iterable[int]) -> str:
    stage = current.plan.stage_of(ranks)
    return f"a group of rank {some_of(ranks)}" if stage is None else f"stage {stage}"


def _reduction(reduction: DoneReduction) -> str:
    """Return how the reduction differs from the plan, or "" if it does not.

    An overlap that the plan does not have is no difference: the program may overlap reductions by itself.
    """
    planned = reduction.planned
    two_levels = bool(planned.clusters) and reduction.bytes >= planned.two_level_from
    if reduction.two_levels != two_levels:
        return f"{_RINGS[reduction.two_levels]}, planned {_RINGS[two_levels]}"
    return f"{_TIMES[False]}, planned {_TIMES[True]}" if planned.overlap and not reduction.overlap else ""


def _missing(current: Session) -> str:
    """Return a sentence if holmes should have made this stage's reduction and has not seen it, else ""."""
    plan, sizes, engine = current.plan, current.plan.sizes, current.engine
    if sizes is None or not engine.name or not plan.traffic or not current.groups:
        return ""
    stage, backend = sizes.stage(current.rank), current.groups[0].backend
    planned = plan.traffic_of(network_api_of(backend) or SOCKETS).reductions[stage]
    overlap = planned.overlap and bool(engine.features.get("overlap"))
    two_levels = bool(planned.clusters) and bool(engine.features.get("two-level"))
    group = {other for axis in ("dp", "cp") for other in sizes.group(current.rank, axis)}
    seen = any(plan.stage_of(ranks) == stage for ranks in current.reductions)
    if seen or not (overlap or two_levels) or current.fabric_of(group, backend) is None:
        return ""
    how = _RINGS[True] if two_levels else _TIMES[True]
    return f"gradients of stage {stage} are summed by {engine.name} itself, planned {how}"


def _in_flight(current: Session) -> str:
    plan = current.plan
    if plan.sizes is None or not plan.traffic or not current.groups:
        return ""
    planned = plan.traffic_of(network_api_of(current.groups[0].backend) or SOCKETS).in_flight
    if planned == current.in_flight or not (current.in_flight or current.engine.name):
        return ""
    here, there = ("+".join(map(str, held)) or "the framework's own" for held in (current.in_flight, planned))
    return f"micro-batches in flight by stage are {here}, planned {there}"
