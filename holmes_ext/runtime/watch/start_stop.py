"""Starts and stops telemetry, the watchdog, and the watch over this node's NICs."""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holmes_ext import extensions
from holmes_ext.cluster.node_report import lab_scale
from holmes_ext.runtime import hooks
from holmes_ext.runtime.measure import clock, telemetry
from holmes_ext.runtime.measure.clock import StepCounter
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.store import STORE_S, connect
from holmes_ext.runtime.watch import nccl_errors as flight_recorder
from holmes_ext.runtime.watch import nics
from holmes_ext.runtime.watch.as_planned import Comparison
from holmes_ext.runtime.watch.failure import NicWatch
from holmes_ext.runtime.watch.watchdog import Watchdog
from holmes_ext.words import tell_user, why

if TYPE_CHECKING:
    from holmes_ext.runtime.measure.telemetry_file import Writer
    from holmes_ext.runtime.watch.metrics import Metrics

#: How long telemetry waits for the others at the start, in seconds.
_START_S = 60.0
#: How long stop() waits for operations under way, in seconds.
_SETTLE_S = 0.5


class _Running:
    """What is on in this process."""

    writer: Writer | None = None
    watchdog: Watchdog | None = None
    nics: NicWatch | None = None
    metrics: Metrics | None = None
    hooks: list[Any] = []


def start(current: Session, metrics: Metrics | None = None) -> list[str]:
    """Switch on what the options ask for, and tell `metrics`; returns lines for the user."""
    several = current.process.world_size > 1
    limits = current.options.watchdog_limits if several else None
    lines: list[str] = []
    _Running.metrics, take = metrics, metrics.take if metrics is not None else lambda document: None
    hooks.activate(extensions.hooks_of(current))
    if (
        current.options.telemetry
        or limits is not None
        or metrics is not None
        or hooks.follow_steps()
    ):
        recorder = telemetry.Recorder(current.rank, current.plan.sizes)
        if current.options.telemetry:
            lines = _start_telemetry(current, recorder, take)
        if metrics is not None:
            lines.append(f"metrics: {metrics.place}, of local rank 0 on every node")
            if _Running.writer is None:
                _Running.writer = _open_writer(current, "", recorder, take)
        telemetry.set_recorder(recorder)
        hook_optimizers(recorder)
        atexit.register(stop)  # a thread that comes to Python while the interpreter ends aborts it
        if limits is not None:
            _Running.watchdog = _watchdog(current, recorder, *limits)
            _Running.watchdog.start()
    if several:
        compare_with_plan(current)
        nics.remember_counters(current)
        watch_nics(current.options.link_timeout_s)
    return lines + hooks.on_start(current)


def stop(reason: str = "training is over") -> None:
    """Switch off; what is recorded gets written, after a moment for the backend's threads.

    Args:
        reason: Why, for the hooks of extensions.
    """
    atexit.unregister(stop)
    hooks.deactivate(reason)
    unwatch_nics()
    recorder = telemetry.recorder
    telemetry.set_recorder(None)
    if recorder is not None:
        with suppress(RuntimeError):  # of a device that has failed
            recorder.settle(_SETTLE_S)
    unhook_optimizers()
    if _Running.watchdog is not None:
        _Running.watchdog.stop()
    if _Running.writer is not None:
        _Running.writer.close()
    if _Running.metrics is not None:
        _Running.metrics.close()
    _Running.writer = _Running.watchdog = _Running.metrics = None


def watch_nics(patience_s: float) -> None:
    unwatch_nics()
    _Running.nics = NicWatch(patience_s)
    _Running.nics.start()


def unwatch_nics() -> None:
    if _Running.nics is not None:
        _Running.nics.stop()
    _Running.nics = None


def hook_optimizers(recorder: telemetry.Recorder) -> None:
    """Install torch's optimizer hooks, which time each optimizer step and count the training steps.

    Args:
        recorder: Collects the telemetry of this process. It ignores these counts of training steps if it
            gets them from a better source, such as the framework.
    """
    from torch.optim import optimizer

    open_spans: list[
        Any
    ] = []  # a stack: an optimizer's step() may call the step() of another optimizer
    counter = StepCounter()  # a training step may consist of several optimizer steps

    def before_step(*_: Any) -> None:
        span = telemetry.span("optimizer")  # a context manager that measures a duration
        open_spans.append(span)
        span.__enter__()  # the measurement starts; after_step() ends it

    def after_step(stepped_optimizer: Any, *_: Any) -> None:
        if open_spans:  # else the hooks were installed during this step
            open_spans.pop().__exit__(None, None, None)
        if counter.ends_step(stepped_optimizer):
            recorder.step_done("optimizer")  # "optimizer" is the source of this count

    # unhook_optimizers() removes the hooks in this list.
    _Running.hooks.append(optimizer.register_optimizer_step_pre_hook(before_step))
    _Running.hooks.append(optimizer.register_optimizer_step_post_hook(after_step))


def compare_with_plan(current: Session) -> None:
    """Install a hook that compares the job with what holmes planned for it, after the second training step.

    Differences are printed, and are written into the telemetry of this process, if that is on.

    Args:
        current: The state of holmes in this process, which has the plan and records what the job does.
    """
    from torch.optim import optimizer

    def write_to_telemetry(document: dict[str, Any]) -> None:
        if _Running.writer is not None:  # telemetry is on
            _Running.writer.put(document)

    comparison = Comparison(current, write_to_telemetry)
    counter = StepCounter()  # a training step may consist of several optimizer steps

    def after_step(stepped_optimizer: Any, *_: Any) -> None:
        if counter.ends_step(stepped_optimizer):
            comparison.step_done()

    # unhook_optimizers() removes the hooks in this list.
    _Running.hooks.append(optimizer.register_optimizer_step_post_hook(after_step))


def unhook_optimizers() -> None:
    while _Running.hooks:
        _Running.hooks.pop().remove()


def _watchdog(
    current: Session, recorder: telemetry.Recorder, factor: float, floor_s: float
) -> Watchdog:
    process, plan = current.process, current.plan
    # the rank that the launcher's rank 0 has now
    first = plan.nodes.index(current.site.nodes[0].name) * plan.processes
    return Watchdog(
        recorder,
        factor,
        floor_s,
        connect=lambda: connect(process, STORE_S),
        prefix=f"{current.round}/watchdog",
        node_of=plan.node_of,
        rates={
            fabric.name: round(fabric.rate_bps * lab_scale(os.environ))
            for fabric in current.site.fabrics
        },
        carried=lambda: nics.bytes_carried(current.node),
        host=None if process.agent_store else first,
        dump_hint=lambda: flight_recorder.dump_hint(current.rank),
    )


def _open_writer(*arguments: Any) -> Writer:
    """Call open_writer of telemetry_file.py, which is imported only in a job that writes telemetry."""
    return extensions.load("holmes_ext.runtime.measure.telemetry_file:open_writer")(*arguments)


def _start_telemetry(
    current: Session, recorder: telemetry.Recorder, take: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Open this rank's file; the clocks are compared meanwhile, in a thread."""
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    process, directory = current.process, current.options.telemetry
    prefix, store = f"{current.round}/telemetry", None
    run = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
    try:
        if process.world_size > 1:
            store = connect(process, _START_S)
            run = store.compare_set(f"{prefix}/run", "", run).decode()
        _Running.writer = writer = _open_writer(current, run, recorder, take)
    except (OSError, RuntimeError) as error:  # of this rank alone, so rank 0 does not tell it
        message = f"rank {current.rank} trains without telemetry ({why(error).splitlines()[0]})"
        tell_user(f"--holmes-telemetry {directory}: {message}")
        return []
    if store is not None and process.local_rank == 0:
        arguments = (current, store, prefix, writer)
        threading.Thread(
            target=_compare_clocks, args=arguments, name="holmes clock", daemon=True
        ).start()
    return [f"telemetry: {Path(directory).absolute() / run} (holmes report {directory})"]


def _compare_clocks(current: Session, store: Any, prefix: str, writer: Writer) -> None:
    nodes = current.plan.nodes
    mine, offset = nodes.index(current.node.name), (0.0, 0.0)
    try:
        if mine == 0:  # rank 0's node
            clock.answer(store, prefix, range(1, len(nodes)), _START_S)
        else:
            offset = clock.ask(store, prefix, mine, _START_S * 2)
        writer.put({"clock": offset})
    except RuntimeError:  # no answer: the report says that this node's times are not aligned
        pass
