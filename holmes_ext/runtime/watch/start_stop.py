"""Starts and stops telemetry, the watchdog, the comparison with the plan, and the watch over NICs."""

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
from holmes_ext.runtime.start.store import ENDED_S, STORE_S, connect
from holmes_ext.runtime.watch import nccl_errors as flight_recorder
from holmes_ext.runtime.watch import nics
from holmes_ext.runtime.watch.as_planned import Comparison
from holmes_ext.runtime.watch.failure import NicWatch
from holmes_ext.runtime.watch.watchdog import Watchdog
from holmes_ext.words import tell_user, why

if TYPE_CHECKING:
    from holmes_ext.runtime.measure.telemetry_file import Writer
    from holmes_ext.runtime.watch.metrics import Metrics

#: Takes a document of telemetry, such as that of a training step.
Take = Callable[[dict[str, Any]], None]
#: Seconds that telemetry waits for other ranks at the start.
_START_S = 60.0
#: Seconds that stop() waits for operations that are not over.
_SETTLE_S = 0.5


class _Running:
    """Telemetry, watchdog and other parts that start() has started in this process."""

    writer: Writer | None = None
    watchdog: Watchdog | None = None
    nics: NicWatch | None = None
    metrics: Metrics | None = None
    clock: threading.Thread | None = None  # compares this node's clock with that of rank 0's node
    stopped = threading.Event()  # ends the thread `clock`
    hooks: list[Any] = []  # torch's handles of optimizer hooks


def _ignore(document: dict[str, Any]) -> None:
    """Drop a document of telemetry, because no metrics are exported."""


def start(current: Session, metrics: Metrics | None = None) -> list[str]:
    """Start telemetry, metrics, the watchdog and the watch over NICs, if options require them.

    Args:
        current: The session of this process.
        metrics: Exports metrics; None if this process exports none.

    Returns:
        Lines for the user.
    """
    has_other_ranks = current.process.world_size > 1
    # (factor, floor in seconds) that make a step late; None if the watchdog is off.
    watchdog_limits = current.options.watchdog_limits if has_other_ranks else None
    _Running.metrics = metrics

    # Registers the functions of extensions, such as --holmes-adapt. follow_steps() below looks for
    # them.
    hooks.activate(extensions.hooks_of(current))

    # A recorder observes the operations of this process.
    needs_recorder = (
        bool(current.options.telemetry)
        or watchdog_limits is not None
        or metrics is not None
        or hooks.follow_steps()  # an extension needs the times of steps
    )
    lines: list[str] = []
    if needs_recorder:
        recorder = telemetry.Recorder(current.rank, current.plan.sizes)
        take = _ignore if metrics is None else metrics.take
        if current.options.telemetry:
            lines = _start_telemetry(current, recorder, take)
        if metrics is not None:
            lines.append(f"metrics: {metrics.destination}, of local rank 0 on every node")
            if _Running.writer is None:  # metrics without telemetry: "" for no file
                _Running.writer = _open_writer(current, "", recorder, take)
        telemetry.set_recorder(recorder)
        hook_optimizers(recorder)
        # A thread that enters Python while the interpreter shuts down would abort the process.
        atexit.register(stop)
        if watchdog_limits is not None:
            _Running.watchdog = _make_watchdog(current, recorder, *watchdog_limits)
            _Running.watchdog.start()
    if has_other_ranks:
        compare_with_plan(current)  # installs a hook that prints differences after the second step
        nics.remember_counters(current)  # a later message names the error counters that grew
        watch_nics(current.options.link_timeout_s)
    return lines + hooks.on_start(current)


def stop(reason: str = "training is over") -> None:
    """Stop telemetry, the watchdog and the watch over NICs, and write all records.

    Operations that are not over get _SETTLE_S seconds to end before that.

    Args:
        reason: Why holmes stops, for the on_stop hooks of extensions.
    """
    atexit.unregister(stop)
    hooks.deactivate(reason)
    unwatch_nics()
    recorder = telemetry.recorder
    telemetry.set_recorder(None)  # no operation is recorded from here on
    if recorder is not None:
        with suppress(RuntimeError):  # a GPU has failed
            recorder.settle(_SETTLE_S)
    unhook_optimizers()
    _Running.stopped.set()
    if _Running.watchdog is not None:
        _Running.watchdog.stop()
    if _Running.clock is not None:
        _Running.clock.join(ENDED_S)
    if _Running.writer is not None:
        _Running.writer.close()
    if _Running.metrics is not None:
        _Running.metrics.close()
    _Running.writer = None
    _Running.watchdog = None
    _Running.metrics = None
    _Running.clock = None


def watch_nics(patience_s: float) -> None:
    """Start the watch over this node's NICs, in place of a running watch.

    Args:
        patience_s: Seconds that a NIC may stay failed before the process ends. 0: for ever.
    """
    unwatch_nics()
    _Running.nics = NicWatch(patience_s)
    _Running.nics.start()


def unwatch_nics() -> None:
    """Stop the watch over this node's NICs, if it runs."""
    if _Running.nics is not None:
        _Running.nics.stop()
    _Running.nics = None


def hook_optimizers(recorder: telemetry.Recorder) -> None:
    """Install torch's optimizer hooks: they time each optimizer step and count the training steps.

    Args:
        recorder: Collects the telemetry of this process. It ignores these counts of training steps if it
            gets them from a better source, such as the framework.
    """
    from torch.optim import optimizer

    # A stack, because an optimizer's step() may call the step() of another optimizer.
    open_spans: list[Any] = []
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
    """Install a hook that compares the job with its plan after the second training step.

    Differences are printed, and are written into the telemetry of this process, if that is on.

    Args:
        current: The state of holmes in this process. It has the plan, and records groups and reductions.
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
    """Remove the optimizer hooks that hook_optimizers() and compare_with_plan() have installed."""
    while _Running.hooks:
        _Running.hooks.pop().remove()


def _make_watchdog(
    current: Session, recorder: telemetry.Recorder, factor: float, floor_s: float
) -> Watchdog:
    """Return the watchdog of this process.

    A step is late if it takes longer than both `factor` times the median step and `floor_s` seconds.

    Args:
        current: The session of this process.
        recorder: Records the operations of this process.
        factor: A multiple of the median step.
        floor_s: Seconds that a late step takes at least, however short the median step is.
    """
    process = current.process
    plan = current.plan
    # The launcher's rank 0, on the site's first node, hosts the store. The plan may have another order of
    # nodes, and holmes then gives that process another rank.
    first_node = current.site.nodes[0].name
    host: int | None = plan.first_rank(first_node)
    if process.agent_store:
        host = None  # torchrun's agent hosts the store

    # The lab (holmes_lab) emulates a cluster's networks on a single machine. They carry this multiple of
    # their stated rates. It is 1 on real networks.
    scale = lab_scale(os.environ)
    return Watchdog(
        recorder,
        factor,
        floor_s,
        connect=lambda: connect(process, STORE_S),
        # Prefix of the keys for the states of the watchdogs of all ranks. current.key_prefix
        # differs for each start of the job.
        prefix=f"{current.key_prefix}/watchdog",
        node_of=plan.node_of,
        # For messages about slow networks: stated rates, and the bytes that each NIC has moved so far.
        rates={fabric.name: round(fabric.rate_bps * scale) for fabric in current.site.fabrics},
        carried=lambda: nics.bytes_carried(current.node),
        host=host,
        dump_hint=lambda: flight_recorder.dump_hint(current.rank),
    )


def _open_writer(current: Session, run: str, recorder: telemetry.Recorder, take: Take) -> Writer:
    """Call open_writer of telemetry_file.py. That module is imported only in a job that writes telemetry."""
    open_writer = extensions.load("holmes_ext.runtime.measure.telemetry_file:open_writer")
    writer: Writer = open_writer(current, run, recorder, take)
    return writer


def _start_telemetry(current: Session, recorder: telemetry.Recorder, take: Take) -> list[str]:
    """Open this rank's telemetry file; on local rank 0, also measure the node's clock offset.

    The measurement runs in a thread. If the file cannot be opened, a line is printed, and the job
    runs without telemetry of this rank.

    Args:
        current: The session of this process.
        recorder: Records the operations of this process.
        take: Function that is called with each line of the file, a JSON document (dict).

    Returns:
        Lines for the user.
    """
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # NCCL then measures each operation
    process = current.process
    directory = current.options.telemetry
    prefix = f"{current.key_prefix}/telemetry"
    store = None
    run = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
    try:
        if process.world_size > 1:
            store = connect(process, _START_S)
            # All ranks must use the same name: that of the first rank that gets here. With "" as
            # the expected value, compare_set() writes the key only if it has no value yet. It
            # returns the value that the key has afterwards.
            run = store.compare_set(f"{prefix}/run", "", run).decode()
        writer = _open_writer(current, run, recorder, take)
    except (OSError, RuntimeError) as error:  # on this rank only, so it prints the line itself
        message = f"rank {current.rank} trains without telemetry ({why(error).splitlines()[0]})"
        tell_user(f"--holmes-telemetry {directory}: {message}")
        return []
    _Running.writer = writer
    if store is not None and process.local_rank == 0:
        thread = threading.Thread(
            target=_compare_clocks,
            args=(current, store, prefix, writer, _Running.stopped),
            name="holmes clock",
            daemon=True,
        )
        _Running.clock = thread
        _Running.stopped.clear()
        thread.start()
    return [f"telemetry: {Path(directory).absolute() / run} (holmes report {directory})"]


def _compare_clocks(
    current: Session, store: Any, prefix: str, writer: Writer, stopped: threading.Event
) -> None:
    """Measure the offset of this node's clock from that of rank 0's node, and write it into the telemetry.

    The node of rank 0 answers the other nodes. Without an answer nothing is written, and the report says that
    the times of this node are not aligned.
    """
    nodes = current.plan.nodes
    node_index = nodes.index(current.node.name)
    try:
        if node_index == 0:
            clock.answer(store, prefix, range(1, len(nodes)), timeout_s=_START_S, ended=stopped)
            offset = clock.Offset(0.0, error_s=0.0)
        else:
            # Twice as long: rank 0's node may wait for another node first.
            offset = clock.ask(store, prefix, node_index, timeout_s=_START_S * 2, ended=stopped)
        writer.put({"clock": offset})
    except RuntimeError:  # no answer in time, or the store is lost
        pass
