"""Compares the first training steps of a job with its plan, and prints the differences.

holmes has made the plan before the job started. Compared are:

    groups       the network of each process group (environment variables such as GLOO_SOCKET_IFNAME, or
                 options of NCCL, can choose another network)
    reductions   whether gradients are reduced hierarchically ("hierarchically") or by a single ring
                 all-reduce, and whether during the last backward pass or after it
    in flight    the micro-batches that each pipeline stage begins before its first backward pass

`holmes report` shows the differences, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime.backend import network_api_of
from holmes_ext.runtime.measure.operations import kind_of
from holmes_ext.runtime.session import DoneReduction, Session
from holmes_ext.words import some_of, tell_user

#: Number of training steps after which the comparison is made. A single step is not enough: in the first
#: step, DeepSpeed's pipeline engine runs its own schedule, since holmes does not know the messages' shapes
#: yet.
COMPARED_STEP = 2
#: Whether a reduction is hierarchical -> words for it.
_HOW_SUMMED = {True: "hierarchically", False: "in one ring"}
#: Whether a reduction overlaps the backward pass -> words for it.
_WHEN_SUMMED = {True: "under the last backward pass", False: "after the backward pass"}


class Difference(NamedTuple):
    """Difference between the job and its plan."""

    # A sentence. It contains no rank, so that it is the same on all ranks, and any rank can print it for all.
    text: str
    is_explained: bool = False  # whether a message of holmes has already given the reason


class Comparison:
    """Comparison of a running job with its plan, made once, after the second training step.

    Compared are the network of each process group, how gradients are reduced, and the micro-batches
    in flight. Differences are printed, and written for `holmes report`.
    """

    def __init__(self, current: Session, put: Callable[[dict[str, Any]], None]):
        """Prepare the comparison of a running job with its plan. Nothing is compared yet.

        Args:
            current: The state of holmes in this process. It has the plan, and records groups and reductions.
            put: Called once, with the result as a JSON document. `holmes report` reads it.
        """
        self.current = current
        self.put = put
        self.steps = 0

    def step_done(self) -> None:
        """Count a finished training step. After the second step, compare the job with its plan.

        holmes has made the plan before the start: networks, reductions, micro-batches in flight. All
        differences go into the report. Those with a reason that holmes has printed already are not printed.
        """
        self.steps += 1
        if self.steps != COMPARED_STEP:
            return
        # Two process groups may have the same difference: it is printed once.
        differences = dict(find_differences(self.current))  # text -> is_explained
        for text, is_explained in differences.items():
            if not is_explained and _is_first_to_report(self.current, text):
                tell_user(f"not as planned: {text}")
        # For `holmes report`.
        self.put({"done": {**summary(self.current), "differences": list(differences)}})


def _is_first_to_report(current: Session, text: str) -> bool:
    """Return whether this rank is the first of the job that found a difference from the plan.

    Only the first rank prints a difference. The job's key-value store decides between the ranks.
    If there is no store, or it fails, True is returned on each rank.

    Args:
        current: The session of this process.
        text: The difference in words, such as "data groups are on ethernet, planned on ib".
    """
    if current.store is None:
        return True
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    this_rank = str(current.rank)
    try:
        # Writes this rank only if the key has no value yet, and returns the key's value afterwards.
        # key_prefix differs for each start of the job, so an earlier start does not count.
        first_rank = current.store.compare_set(
            f"{current.key_prefix}/difference/{digest}", "", this_rank
        )
        return first_rank.decode() == this_rank
    except RuntimeError:  # the store failed, with a torch.distributed.DistError
        return True


def summary(current: Session) -> dict[str, Any]:
    """Return how the job reduced gradients and how many micro-batches it had in flight, for `holmes report`.

    Returns:
        "reductions": for each reduction of gradients [pipeline stage, whether it was hierarchical, whether it
            overlapped the backward pass].
        "in_flight": for each pipeline stage, the micro-batches that it began before its first backward pass.
            The list is empty if the framework used its own schedule.
    """
    rows = []
    for ranks, reduction in current.reductions.items():
        stage = current.plan.stage_of(ranks)
        if stage is not None:  # None: the ranks are not the replicas of a single stage
            rows.append([stage, reduction.hierarchical, reduction.overlap])
    return {"reductions": sorted(rows), "in_flight": list(current.in_flight)}


def find_differences(current: Session) -> Iterator[Difference]:
    """Yield the differences between the job and its plan: networks, reductions, micro-batches in flight.

    Args:
        current: The state of holmes in this process. It has the plan, and records groups and reductions.
    """
    sizes = current.plan.sizes
    world = current.plan.world_size
    for record in current.groups:  # the process groups that were created
        planned = current.transport(record.ranks, record.backend).fabric  # the plan's network
        if record.transport.fabric != planned:
            kind = kind_of(record.ranks, record.name, sizes, world)  # e.g. "data"
            yield Difference(
                f"{kind} groups are on {record.transport.fabric}, planned on {planned}"
            )

    # current.reductions: ranks of a group -> the reduction that holmes made.
    for ranks, reduction in current.reductions.items():
        text = _reduction_difference(reduction)
        if text:
            sentence = f"gradients of {_stage(current, ranks)} are summed {text}"
            # A difference that another message has explained is not printed again.
            yield Difference(sentence, is_explained=reduction.reported)

    for sentence in (_missing_reduction(current), _in_flight_difference(current)):
        if sentence:
            yield Difference(sentence)


def _stage(current: Session, ranks: Iterable[int]) -> str:
    """Name the pipeline stage whose data-parallel replicas are `ranks`, in words such as "stage 1"."""
    stage = current.plan.stage_of(ranks)
    if stage is None:
        return f"a group of rank {some_of(ranks)}"
    return f"stage {stage}"


def _reduction_difference(reduction: DoneReduction) -> str:
    """Return how a reduction of gradients differed from the plan, in words; "" if it did not.

    Two things are compared: whether it was hierarchical ("hierarchically") or a single ring, and whether it
    overlapped the backward pass as planned. An overlap that was not planned is no difference: the framework
    may overlap reductions by itself.
    """
    planned = reduction.planned
    spans_clusters = bool(planned.clusters)
    # Below a certain size a single ring is faster: the plan uses a hierarchical all-reduce from this size on.
    is_large = reduction.bytes >= planned.hierarchical_from
    is_planned_hierarchical = spans_clusters and is_large
    if reduction.hierarchical != is_planned_hierarchical:
        # e.g. "in one ring, planned hierarchically"
        return (
            f"{_HOW_SUMMED[reduction.hierarchical]}, planned {_HOW_SUMMED[is_planned_hierarchical]}"
        )
    if planned.overlap and not reduction.overlap:
        # "after the backward pass, planned under the last backward pass"
        return f"{_WHEN_SUMMED[False]}, planned {_WHEN_SUMMED[True]}"
    return ""


def _missing_reduction(current: Session) -> str:
    """Return a sentence if holmes was to reduce gradients, but the framework did so; else "".

    holmes reduces gradients itself in two cases, if it has a patch of the framework for the case:
        - They cross clusters: by a hierarchical all-reduce.
        - The plan wants their reduction to overlap the backward pass.
    Each reduction that holmes makes is recorded in `current.reductions`. The sentence says that there is no
    record for this rank's pipeline stage.
    """
    plan = current.plan
    sizes = plan.sizes
    engine = current.engine
    if sizes is None or not engine.name or not plan.traffic or not current.groups:
        return ""  # not enough is known of the job to find its planned reduction
    stage = sizes.stage(current.rank)
    backend = current.groups[0].backend  # e.g. "gloo"

    # The plan has decisions for verbs (NCCL) and for sockets (gloo). For backends that choose their networks
    # themselves, such as MPI, those for sockets hold.
    planned = plan.traffic_of(network_api_of(backend) or SOCKETS).reductions[stage]

    # engine.features: names of holmes's patches for this framework. Without them, the framework reduces.
    is_overlap_expected = planned.overlap and bool(engine.features.get("overlap"))
    spans_clusters = bool(planned.clusters)
    is_hierarchical_expected = spans_clusters and bool(engine.features.get("hierarchical"))
    if not is_overlap_expected and not is_hierarchical_expected:
        return ""  # the plan leaves the reduction to the framework
    if current.keeps_own_reduction:  # ZeRO 3
        return ""  # the user has been told already that DeepSpeed reduces by itself
    is_recorded = any(plan.stage_of(ranks) == stage for ranks in current.reductions)

    # This rank's gradients are reduced over its data- and context-parallel ranks.
    group = {other for axis in ("dp", "cp") for other in sizes.group(current.rank, axis)}
    # A group inside one node has no planned network: holmes leaves its reduction to the framework.
    has_network = current.fabric_of(group, backend) is not None
    if is_recorded or not has_network:
        return ""

    # The dicts map whether a reduction is hierarchical (or overlaps) to words: True ->
    # "hierarchically" (or "under the last backward pass").
    how = _HOW_SUMMED[True] if is_hierarchical_expected else _WHEN_SUMMED[True]
    return f"gradients of stage {stage} are summed by {engine.name} itself, planned {how}"


def _in_flight_difference(current: Session) -> str:
    """Return a sentence if the stages had other numbers of micro-batches in flight than planned; else "".

    "In flight" are the micro-batches that a stage begins before its first backward pass.
    """
    plan = current.plan
    if plan.sizes is None or not plan.traffic or not current.groups:
        return ""  # not enough is known of the job to find the planned numbers

    # A plan has a part for each way to reach a network: verbs for NCCL, sockets for gloo. A backend that
    # chooses its networks itself is planned like sockets.
    network_api = network_api_of(current.groups[0].backend) or SOCKETS

    # For each stage its number, e.g. (3, 1); empty if the framework uses its own schedule.
    planned = plan.traffic_of(network_api).in_flight
    if planned == current.in_flight:
        return ""
    if not current.in_flight and not current.engine.name:
        return ""  # no framework that holmes knows: an empty tuple does not mean its own schedule
    done_text = "+".join(map(str, current.in_flight)) or "the framework's own"  # e.g. "3+1"
    planned_text = "+".join(map(str, planned)) or "the framework's own"
    return f"micro-batches in flight by stage are {done_text}, planned {planned_text}"
