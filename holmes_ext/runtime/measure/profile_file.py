"""Writes profile.json: rank 0 collects the measurements of all ranks through the job's key-value store.

    1. every rank   measures reductions and stage links, and stores its report    -> PREFIX/reports
    2. rank 0       waits for all reports, writes the file, and stores "" or an error -> PREFIX/error
    3. every rank   waits for PREFIX/error, and says that it is done              -> PREFIX/left
    4. store's host waits for all ranks, since the store ends with its process

Every wait has a timeout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.plan.profile import Profile, StageTimes
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.measure import probe
from holmes_ext.runtime.measure.profiler import Label, Profiler
from holmes_ext.runtime.start.store import append_entry, collect_entries, wait_for_value
from holmes_ext.words import counted, some_of, tell_user

#: Seconds that rank 0 waits for the reports of other ranks.
_COLLECT_SECONDS = 120.0
#: Seconds that the launcher's rank 0 waits for other ranks at the end, since it may host the store.
_LEAVE_SECONDS = 30.0
#: Parts of a step that a profile has the seconds of.
_TOTALS = ("send", "receive", "reduce", "tied", "optimizer", "idle")


def publish(
    current: session.Session,
    profiler: Profiler,
    report: dict[str, Any],
    *,
    stages: int,
    gradient_bytes: dict[Label, float],
    group: Any,
    device: Any,
    send: Callable[[Any, int], Any],
    receive: Callable[[Any, int], Any],
) -> None:
    """Measure all-reduces and stage-to-stage transfers outside of training; write a profile.

    All ranks call this function after the last profiled training step. The profile is a file with
    the times of layers, stages and communication. With `holmes tune`, the process then exits.

    Args:
        current: The session of this process.
        profiler: Has measured the training steps.
        report: Has "framework", "stage", "tensor" (tensor-parallel size), "micro_batches" and
            "activation_bytes". The measurements are added to it.
        stages: Pipeline stages.
        gradient_bytes: Layer -> bytes of its gradients on this rank.
        group: Process group that reduces the gradients.
        device: Device of the gradients.
        send: Sends a tensor to a stage, and returns when it is sent.
        receive: Receives a tensor from a stage, and returns when it has arrived.

    Raises:
        HolmesError: On rank 0: a rank did not report, or the file cannot be written.
        RemoteError: The error of rank 0, on all other ranks.
    """
    link_s = probe.stage_link(
        report["stage"], stages, report["activation_bytes"], device, send, receive
    )
    report |= {
        "steps": profiler.steps,
        "gradient_bytes": [[label, size] for label, size in gradient_bytes.items()],
        "stage_link_s": link_s,
        "reduction": probe.reduction(group, int(sum(gradient_bytes.values())), device),
        **profiler.medians(),
    }
    path = current.options.profile_file
    error = ""
    if current.plan.world_size == 1:
        write(current, [report], path)
    else:
        error = _write_together(current, report, path)
    if error:
        if current.rank == 0:
            raise HolmesError(error)
        raise RemoteError(error)
    if current.options.profile_stops:
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter's normal exit could meet threads of gloo that are still running.
        os._exit(0)


def _write_together(current: session.Session, report: dict[str, Any], path: str) -> str:
    """Let rank 0 write the profile from the reports of all ranks. All ranks call this function.

    Reports and the outcome go through the job's key-value store.

    Args:
        current: The session of this process.
        report: Measurements of this rank, for JSON.
        path: File of the profile.

    Returns:
        The error of rank 0; "" if the file was written.
    """
    world = current.plan.world_size
    store = current.store
    # current.key_prefix is "holmes/1" at the first start of the job in this store.
    prefix = f"{current.key_prefix}/profile"
    entry = json.dumps([current.rank, report]).encode()
    append_entry(store, f"{prefix}/reports", entry, count=1, total=world)
    if current.rank == 0:
        error = ""
        try:
            write(current, _collect_reports(store, prefix, world), path)
        except HolmesError as problem:
            error = str(problem)
        store.set(f"{prefix}/error", error)
    store.wait([f"{prefix}/error"], timedelta(seconds=2 * _COLLECT_SECONDS))
    stored_error: str = store.get(f"{prefix}/error").decode()

    # This rank needs the store no more.
    append_entry(store, f"{prefix}/left", b"", count=1, total=world)
    # current.rank is this process's rank in the job; current.process.rank is the launcher's, and holmes may
    # have changed it. The launcher's rank 0 may host the store, so it must end last.
    if current.process.rank == 0:
        wait_for_value(store, f"{prefix}/left/all", _LEAVE_SECONDS)
    return stored_error


def _collect_reports(store: Any, prefix: str, world: int) -> list[dict[str, Any]]:
    """Return the reports of all ranks in rank order; raise HolmesError if some are missing."""
    reports: dict[int, dict[str, Any]] = {}  # rank -> its report
    for entry in collect_entries(store, f"{prefix}/reports", _COLLECT_SECONDS):
        rank, report = json.loads(entry)
        reports[rank] = report
    missing = [rank for rank in range(world) if rank not in reports]
    if missing:
        raise HolmesError(
            f"--holmes-profile: rank {some_of(missing)} did not report what it measured"
        )
    return [reports[rank] for rank in range(world)]


def write(current: session.Session, reports: list[dict[str, Any]], path: str) -> None:
    """Write the profile of all ranks' reports into a file, and print a line about it."""
    profile = merge(current, reports)
    profile.save(path)
    text = f"{path}: the profile of {counted(profile.steps, 'step')}, {profile.step_s:.4g} s each"
    if not current.options.profile_stops:
        text += f"; `holmes plan --profile {path} --partition balanced` uses it"
    tell_user(text)


def merge(current: session.Session, reports: list[dict[str, Any]]) -> Profile:
    """Combine the measurements of all ranks into the profile of the job.

    Each pipeline stage gets the times of its slowest rank.

    Args:
        current: The session of this process.
        reports: Reports of all ranks, in rank order. Each has the rank's stage, "totals" (part of the step
            -> seconds), the times of its layers, and numbers that are equal on all ranks.
    """
    first = reports[0]
    stage_count = 1 + max(report["stage"] for report in reports)
    gradient_bytes = _largest_of_layers(reports, "gradient_bytes")

    # Transformer blocks have numbers; "before" and "after" are the layers before and after them.
    block_count = sum(isinstance(label, int) for label in gradient_bytes)
    labels: list[Label] = ["before", *range(block_count), "after"]

    # If the user has given no parallel sizes, use the framework's: "tensor" is the number of
    # tensor-parallel ranks.
    sizes = current.plan.sizes or Sizes(pipeline=stage_count, tensor=first["tensor"])
    stages = []
    for stage in range(stage_count):
        ranks = [rank for rank, report in enumerate(reports) if report["stage"] == stage]
        # _stage_times() takes the times of the slowest of these ranks.
        stages.append(_stage_times(current, ranks, [reports[rank] for rank in ranks]))
    return Profile(
        framework=first["framework"],
        site=current.site.to_dict(),
        sizes=sizes.complete(current.plan.world_size),
        micro_batches=first["micro_batches"],
        steps=first["steps"],
        gradient_bytes=tuple(gradient_bytes.get(label, 0.0) for label in labels),
        activation_bytes=first["activation_bytes"],
        step_s=max(report["totals"]["step"] for report in reports),
        stages=tuple(stages),
    )


def _largest_of_layers(reports: list[dict[str, Any]], name: str) -> dict[Label, float]:
    """Return the largest value of each layer over all reports, e.g. of "forward" (seconds)."""
    largest: dict[Label, float] = {}
    for report in reports:
        for label, value in report[name]:
            largest[label] = max(value, largest.get(label, 0.0))
    return largest


def _stage_times(
    current: session.Session, ranks: list[int], reports: list[dict[str, Any]]
) -> StageTimes:
    """Return how long a pipeline stage took for its layers, its communication and its optimizer.

    Each number is the largest that a rank of the stage has measured.

    Args:
        current: The session of this process.
        ranks: Global ranks of the stage.
        reports: Reports of these ranks, in the same order.
    """
    # Label of a layer -> seconds. Labels are block numbers, "before" and "after".
    forward = _largest_of_layers(reports, "forward")
    backward = _largest_of_layers(reports, "backward")
    blocks = tuple(sorted(label for label in forward if isinstance(label, int)))
    nodes = tuple(dict.fromkeys(current.plan.node_of(rank) for rank in ranks))
    clusters = tuple(dict.fromkeys(current.site.node_by_name[node].cluster for node in nodes))
    reductions = [probe.ReductionTime(*report["reduction"]) for report in reports]
    totals = {}
    for kind in _TOTALS:
        totals[f"{kind}_s"] = max(report["totals"].get(kind, 0.0) for report in reports)
    return StageTimes(
        clusters=clusters,
        nodes=nodes,
        blocks=blocks,
        forward_s=tuple(forward[block] for block in blocks),
        backward_s=tuple(backward.get(block, 0.0) for block in blocks),
        before_s=(forward.get("before", 0.0), backward.get("before", 0.0)),
        after_s=(forward.get("after", 0.0), backward.get("after", 0.0)),
        reduction_s_per_byte=max(reduction.s_per_byte for reduction in reductions),
        reduction_latency_s=max(reduction.latency_s for reduction in reductions),
        stage_link_s=max(report["stage_link_s"] for report in reports),
        **totals,
    )
