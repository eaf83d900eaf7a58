"""profile.json of a job: every rank's report through the job's store, merged and written by rank 0."""

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
from holmes_ext.words import some_of, tell_user

#: How long rank 0 waits for the others' reports.
_COLLECT_SECONDS = 120.0
#: How long the launcher's rank 0, whose process may serve the store, waits for the others to go.
_LEAVE_SECONDS = 30.0
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
    """Time `group`'s reduction and the stage links alone, and report; rank 0 writes the profile. report: has
    "framework", "stage" (of `stages`), "tensor" (size), "micro_batches", "activation_bytes"; send, receive:
    take a tensor and a stage, and block. Exits with 0 where the options say so (`holmes tune`)."""
    report |= {
        "steps": profiler.steps,
        "gradient_bytes": [[label, size] for label, size in gradient_bytes.items()],
        "stage_link_s": probe.stage_link(
            report["stage"], stages, report["activation_bytes"], device, send, receive
        ),
        "reduction": probe.reduction(group, int(sum(gradient_bytes.values())), device),
        **profiler.medians(),
    }
    world, path, error = current.plan.world_size, current.options.profile_file, ""
    if world == 1:
        write(current, [report], path)
    else:
        store, prefix = current.store, f"{current.round}/profile"
        append_entry(
            store, f"{prefix}/reports", json.dumps([current.rank, report]).encode(), 1, world
        )
        if current.rank == 0:
            try:
                write(current, _reports(store, prefix, world), path)
            except HolmesError as problem:
                error = str(problem)
            store.set(f"{prefix}/error", error)
        store.wait([f"{prefix}/error"], timedelta(seconds=2 * _COLLECT_SECONDS))
        error = store.get(f"{prefix}/error").decode()
        append_entry(store, f"{prefix}/left", b"", 1, world)
        if current.process.rank == 0:  # it may serve the store: it is the last to go
            wait_for_value(store, f"{prefix}/left/all", _LEAVE_SECONDS)
    if error:
        raise HolmesError(error) if current.rank == 0 else RemoteError(error)
    if current.options.profile_stops:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # not through the interpreter's end: threads of gloo may still be in it


def _reports(store: Any, prefix: str, world: int) -> list[dict[str, Any]]:
    """Of all ranks, in their order."""
    reports = dict(map(json.loads, collect_entries(store, f"{prefix}/reports", _COLLECT_SECONDS)))
    if missing := [rank for rank in range(world) if rank not in reports]:
        raise HolmesError(
            f"--holmes-profile: rank {some_of(missing)} did not report what it measured"
        )
    return [reports[rank] for rank in range(world)]


def write(current: session.Session, reports: list[dict[str, Any]], path: str) -> None:
    """profile.json of all ranks' reports."""
    profile = merge(current, reports)
    profile.save(path)
    text = f"{path}: the profile of {profile.steps} steps, {profile.step_s:.4g} s each"
    if not current.options.profile_stops:
        text += f"; `holmes plan --profile {path} --partition balanced` uses it"
    tell_user(text)


def merge(current: session.Session, reports: list[dict[str, Any]]) -> Profile:
    """Of a stage's ranks the slowest counts. Sizes that nobody told holmes are the framework's."""
    plan, first = current.plan, reports[0]
    stages = 1 + max(report["stage"] for report in reports)
    ranks = [
        [rank for rank, report in enumerate(reports) if report["stage"] == stage]
        for stage in range(stages)
    ]
    gradients = _most(reports, "gradient_bytes")
    blocks = sum(isinstance(label, int) for label in gradients)
    return Profile(
        framework=first["framework"],
        site=current.site.to_dict(),
        sizes=(plan.sizes or Sizes(pipeline=stages, tensor=first["tensor"])).complete(
            plan.world_size
        ),
        micro_batches=first["micro_batches"],
        steps=first["steps"],
        gradient_bytes=tuple(
            gradients.get(label, 0.0) for label in ("before", *range(blocks), "after")
        ),
        activation_bytes=first["activation_bytes"],
        step_s=max(report["totals"]["step"] for report in reports),
        stages=tuple(_stage(current, mine, [reports[rank] for rank in mine]) for mine in ranks),
    )


def _most(reports: list[dict[str, Any]], name: str) -> dict[Label, float]:
    largest: dict[Label, float] = {}
    for report in reports:
        largest |= {label: max(value, largest.get(label, 0.0)) for label, value in report[name]}
    return largest


def _stage(current: session.Session, ranks: list[int], reports: list[dict[str, Any]]) -> StageTimes:
    forward, backward = _most(reports, "forward"), _most(reports, "backward")
    blocks = tuple(sorted(label for label in forward if isinstance(label, int)))
    nodes = tuple(dict.fromkeys(current.plan.node_of(rank) for rank in ranks))
    return StageTimes(
        clusters=tuple(dict.fromkeys(current.site.node_by_name[node].cluster for node in nodes)),
        nodes=nodes,
        blocks=blocks,
        forward_s=tuple(forward[block] for block in blocks),
        backward_s=tuple(backward.get(block, 0.0) for block in blocks),
        before_s=(forward.get("before", 0.0), backward.get("before", 0.0)),
        after_s=(forward.get("after", 0.0), backward.get("after", 0.0)),
        reduction_s_per_byte=max(report["reduction"][0] for report in reports),
        reduction_latency_s=max(report["reduction"][1] for report in reports),
        stage_link_s=max(report["stage_link_s"] for report in reports),
        **{
            f"{kind}_s": max(report["totals"].get(kind, 0.0) for report in reports)
            for kind in _TOTALS
        },
    )
