"""Switches telemetry and the watchdog of this process on and off."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holmes_ext.runtime.measure import clock, telemetry
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.store import connect

#: How long telemetry waits for the others at the start, in seconds.
_START_S = 60.0
#: How long end() waits for operations under way, in seconds.
_SETTLE_S = 0.5

_writer: Any = None
_watchdog: Any = None
_hooks: list[Any] = []


def begin(current: Session) -> list[str]:
    """Switch on what the options ask for; returns lines for the user."""
    global _watchdog
    limits = current.options.watchdog_limits if current.process.world_size > 1 else None
    lines: list[str] = []
    if not current.options.telemetry and limits is None:
        return lines
    recorder = telemetry.Recorder(current.rank, current.plan.sizes)
    if current.options.telemetry:
        lines += _begin_writer(current, recorder)
    telemetry.set_recorder(recorder)
    _hook_optimizers(recorder)
    atexit.register(end)  # a thread or a backend's callback that comes to Python while the interpreter ends aborts the process
    if limits is not None:
        from holmes_ext.runtime.watch.watchdog import Watchdog

        _watchdog = Watchdog(
            recorder,
            *limits,
            connect=lambda: connect(current.process, 10.0),
            prefix=f"{current.round}/watchdog",
            node_of=current.plan.node_of,
            rates={fabric.name: fabric.rate_bps for fabric in current.site.fabrics},
            counters=lambda: nic_bytes(current),
            host=None if current.process.agent_store else _rank_of_host(current),
        )
        _watchdog.start()
    return lines


def end() -> None:
    """Switch off; what is recorded gets written. Waits a moment for operations whose end is still being told (by the backend's threads)."""
    global _writer, _watchdog
    atexit.unregister(end)
    recorder = telemetry.recorder
    telemetry.set_recorder(None)
    if recorder is not None:
        recorder.settle(_SETTLE_S)
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    if _watchdog is not None:
        _watchdog.stop()
    if _writer is not None:
        _writer.close()
    _writer = _watchdog = None


def _rank_of_host(current: Session) -> int | None:
    """The rank that the launcher's rank 0 has now: on the launcher's first node."""
    first = current.site.nodes[0].name
    return current.plan.nodes.index(first) * current.plan.processes


# --------------------------------------------------------------------------- telemetry


def _begin_writer(current: Session, recorder: telemetry.Recorder) -> list[str]:
    """Open this rank's file; the clocks are compared meanwhile, in a thread."""
    global _writer
    from holmes_ext.runtime.measure.telemetry_file import Writer, tensorboard_writer

    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    process, directory = current.process, Path(current.options.telemetry).absolute()
    prefix, store = f"{current.round}/telemetry", None
    run = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
    try:
        if process.world_size > 1:
            store = connect(process, _START_S)
            run = store.compare_set(f"{prefix}/run", "", run).decode()
        place = directory / run
        _writer = Writer(place / f"rank{current.rank}.jsonl", _head(current, run), lambda ranks: _crosses(current, ranks), current.rank)
    except (OSError, RuntimeError) as error:  # of this rank alone, so rank 0 does not tell it
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        print(f"holmes: --holmes-telemetry {directory}: rank {current.rank} trains without telemetry ({reason})", file=sys.stderr, flush=True)
        return []
    _writer.recorder = recorder
    recorder.on_step, recorder.keeps = _writer.on_step, True
    if current.rank == 0:
        _writer.add_scalars(lambda: tensorboard_writer(place / "tensorboard"))
    if store is not None and process.local_rank == 0:
        threading.Thread(target=_compare_clocks, args=(current, store, prefix), name="holmes clock", daemon=True).start()
    return [f"telemetry: {place} (holmes report {current.options.telemetry})"]


def _head(current: Session, run: str) -> dict[str, Any]:
    site, node = current.site, current.node
    sizes = current.plan.sizes
    return {
        "run": run,
        "rank": current.rank,
        "world": current.process.world_size,
        "node": node.name,
        "cluster": node.cluster,
        "wall": time.time(),
        "sizes": {name: getattr(sizes, name) for name in ("pipeline", "tensor", "context", "expert", "data")} if sizes else None,
        "fabrics": {fabric.name: [fabric.kind, fabric.rate_bps] for fabric in site.fabrics},
    }


def _crosses(current: Session, ranks: tuple[int, ...]) -> bool:
    return len({current.site.node_by_name[current.plan.node_of(rank)].cluster for rank in ranks}) > 1


def _compare_clocks(current: Session, store: Any, prefix: str) -> None:
    nodes = len(current.plan.nodes)
    mine = current.plan.nodes.index(current.node.name)
    try:
        if mine == 0:  # rank 0's node
            clock.answer(store, prefix, range(1, nodes), _START_S)
            _put_clock(0.0, 0.0)
        else:
            _put_clock(*clock.ask(store, prefix, mine, _START_S * 2))
    except RuntimeError:  # no answer: the report says that this node's times are not aligned
        pass


def _put_clock(offset: float, error: float) -> None:
    if _writer is not None:
        _writer.put({"clock": [offset, error]})


def _hook_optimizers(recorder: telemetry.Recorder) -> None:
    """torch's own hooks around every optimizer's step: the end of a step where nobody else tells."""
    from torch.optim import optimizer

    begun: list[float] = []

    def before(*_: Any) -> None:
        begun.append(recorder.clock())

    def after(*_: Any) -> None:
        if begun:
            recorder.span("optimizer", begun.pop(), recorder.clock())
        recorder.step_done("optimizer")

    _hooks.extend((optimizer.register_optimizer_step_pre_hook(before), optimizer.register_optimizer_step_post_hook(after)))


# --------------------------------------------------------------------------- what NICs carry


def nic_bytes(current: Session, root: Path = Path("/")) -> Mapping[str, int]:
    """Interface of this node -> bytes that it has received and sent; an RDMA port's are its HCAs' (which sockets do not count)."""
    carried: dict[str, int] = {}
    try:
        for line in (root / "proc/self/net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            fields = rest.split()
            carried[name.strip()] = int(fields[0]) + int(fields[8])
    except (OSError, IndexError, ValueError):
        return carried
    for port in current.node.ports:
        for hca in port.hcas if port.interface in carried else ():
            name, _, number = hca.partition(":")
            for counter in ("port_xmit_data", "port_rcv_data"):  # in units of four bytes
                try:
                    carried[port.interface] += 4 * int((root / f"sys/class/infiniband/{name}/ports/{number or 1}/counters/{counter}").read_text())
                except (OSError, ValueError):
                    pass
    return carried
