"""profile.json of a job: every rank's report through the job's store, merged and written by rank 0."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.plan.profile import Profile, StageTimes
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.measure import probe
from holmes_ext.runtime.measure.profiler import Label, Profiler

#: How long rank 0 waits for the others' reports.
_COLLECT_SECONDS = 120.0
_TOTALS = ("send", "receive", "reduce", "tied", "optimizer", "idle")


def publish(
    current: session.Session,
    profiler: Profiler,
    *,
    framework: str,
    stage: int,
    stages: int,
    tensor: int,
    micro_batches: int,
    gradient_bytes: dict[Label, float],
    activation_bytes: int,
    group: Any,
    device: Any,
    send: Callable[[Any, int], Any],
    receive: Callable[[Any, int], Any],
) -> None:
    """Time the reduction in `group` and the edges by themselves and send this rank's report; rank 0 writes the profile.

    stage: of `stages`, this rank's; send, receive: of a tensor to and from a stage, until done. Ends the process with
    status
    0 where the options say so (`holmes tune`).
    """
    own = {
        "framework": framework,
        "stage": stage,
        "tensor": tensor,
        "micro_batches": micro_batches,
        "steps": profiler.steps,
        "gradient_bytes": [[label, size] for label, size in gradient_bytes.items()],
        "activation_bytes": activation_bytes,
        "edge_s": probe.edge(stage, stages, activation_bytes, device, send, receive),
        "reduction": probe.reduction(group, int(sum(gradient_bytes.values())), device),
        **profiler.medians(),
    }
    world, path, error = current.plan.world_size, current.options.profile_file, ""
    if world == 1:
        write(current, [own], path)
    else:
        store, prefix = current.store, f"{current.round}/profile"
        store.set(f"{prefix}/{current.rank}", json.dumps(own))
        if current.rank == 0:
            try:
                names = [f"{prefix}/{rank}" for rank in range(world)]
                store.wait(names, timedelta(seconds=_COLLECT_SECONDS))
                write(current, [json.loads(store.get(name)) for name in names], path)
            except HolmesError as problem:
                error = str(problem)
            store.set(f"{prefix}/error", error)
        store.wait([f"{prefix}/error"], timedelta(seconds=2 * _COLLECT_SECONDS))
        error = store.get(f"{prefix}/error").decode()
        _leave_together(store, prefix, world, current.process.rank == 0)
    if error:
        raise HolmesError(error) if current.rank == 0 else RemoteError(error)
    if current.options.profile_stops:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # not through the interpreter's end: threads of gloo may still be in it


def _leave_together(store: Any, prefix: str, world: int, serves: bool) -> None:
    """The store lives in one rank's process, which must be the last to go."""
    gone = store.add(f"{prefix}/left", 1)
    until = time.monotonic() + 30
    while serves and gone < world and time.monotonic() < until:
        time.sleep(0.02)
        gone = store.add(f"{prefix}/left", 0)


def write(current: session.Session, reports: list[dict[str, Any]], path: str) -> None:
    """profile.json of all ranks' reports."""
    profile = merge(current, reports)
    profile.save(path)
    text = f"{path}: the profile of {profile.steps} steps, {profile.step_s:.4g} s each"
    if not current.options.profile_stops:
        text += f"; `holmes plan --profile {path} --partition balanced` uses it"
    print(f"holmes: {text}", file=sys.stderr, flush=True)


def merge(current: session.Session, reports: list[dict[str, Any]]) -> Profile:
    """Of a stage's ranks the slowest counts."""
    plan = current.plan
    sizes = (plan.sizes or _sizes(reports)).complete(plan.world_size)
    by_stage: dict[int, list[dict[str, Any]]] = {}
    for rank, report in enumerate(reports):
        by_stage.setdefault(report["stage"], []).append({**report, "node": plan.node_of(rank)})
    stages = [_stage(current, by_stage[stage]) for stage in sorted(by_stage)]
    gradients: dict[Label, float] = {}
    for report in reports:
        gradients |= {label: max(size, gradients.get(label, 0.0)) for label, size in report["gradient_bytes"]}
    blocks = sum(isinstance(label, int) for label in gradients)
    return Profile(
        framework=reports[0]["framework"],
        site=current.site.to_dict(),
        sizes=sizes,
        micro_batches=reports[0]["micro_batches"],
        steps=reports[0]["steps"],
        gradient_bytes=tuple(gradients.get(label, 0.0) for label in ("before", *range(blocks), "after")),
        activation_bytes=reports[0]["activation_bytes"],
        step_s=max(report["totals"]["step"] for report in reports),
        stages=tuple(stages),
    )


def _sizes(reports: list[dict[str, Any]]) -> Sizes:
    """Where the command line did not tell holmes: as the framework has them."""
    return Sizes(pipeline=1 + max(report["stage"] for report in reports), tensor=reports[0].get("tensor", 1))


def _stage(current: session.Session, ranks: list[dict[str, Any]]) -> StageTimes:
    def slowest(name: str) -> dict[Label, float]:
        found: dict[Label, float] = {}
        for rank in ranks:
            for label, seconds in rank[name]:
                found[label] = max(seconds, found.get(label, 0.0))
        return found

    forward, backward = slowest("forward"), slowest("backward")
    blocks = tuple(sorted(label for label in forward if isinstance(label, int)))
    totals = {kind: max(rank["totals"].get(kind, 0.0) for rank in ranks) for kind in _TOTALS}
    nodes = tuple(dict.fromkeys(rank["node"] for rank in ranks))
    return StageTimes(
        clusters=tuple(dict.fromkeys(current.site.node_by_name[node].cluster for node in nodes)),
        nodes=nodes,
        blocks=blocks,
        forward_s=tuple(forward[block] for block in blocks),
        backward_s=tuple(backward.get(block, 0.0) for block in blocks),
        before_s=(forward.get("before", 0.0), backward.get("before", 0.0)),
        after_s=(forward.get("after", 0.0), backward.get("after", 0.0)),
        reduction_s_per_byte=max(rank["reduction"][0] for rank in ranks),
        reduction_latency_s=max(rank["reduction"][1] for rank in ranks),
        edge_s=max(rank["edge_s"] for rank in ranks),
        **{f"{kind}_s": seconds for kind, seconds in totals.items()},
    )
