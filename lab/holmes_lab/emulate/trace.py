"""What every rank of a lab job did when: compute, communication, optimizer - on one clock, for any script.

    HOLMES_LAB_TRACE=DIR  ->  DIR/rank0.json, ...
    {"rank", "node", "cluster", "events": [[kind, start, end, bytes]]}

All nodes of a lab are one machine, so time.monotonic() is one clock (seconds). Compute comes from the
emulated accelerator (kinds "forward", "backward"), communication from torch.distributed's functions ("send",
"receive", "reduce", "collective"; bytes of the tensor), "optimizer" from torch.optim's global step hooks.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wrapt

from holmes_lab.emulate import accelerator

VARIABLE = "HOLMES_LAB_TRACE"
KINDS = {
    **dict.fromkeys(("send", "isend"), "send"),
    **dict.fromkeys(("recv", "irecv"), "receive"),
    **dict.fromkeys(
        ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter"), "reduce"
    ),
    **dict.fromkeys(
        ("all_gather_into_tensor", "all_gather_single", "all_gather", "broadcast", "barrier"),
        "collective",
    ),
}
_inside = threading.local()  # has the kind of the operation that this thread is in


def install(directory: str) -> None:
    """Trace this process from now on (or from its import of torch on) and write the events when it ends."""
    events: list[tuple[str, float, float, int]] = []
    accelerator.after_each_pass(lambda kind, start, end: events.append((kind, start, end, 0)))
    wrapt.register_post_import_hook(
        lambda module: _wrap_distributed(module, events), "torch.distributed"
    )
    wrapt.register_post_import_hook(
        lambda module: _hook_optimizer(module, events), "torch.optim.optimizer"
    )
    atexit.register(_write, directory, events)


def _write(directory: str, events: list) -> None:
    rank = os.environ.get("RANK", "0")
    document = {
        "rank": int(rank),
        "node": os.uname().nodename,
        "cluster": os.environ.get("HOLMES_LAB_CLUSTER", ""),
    }
    Path(directory, f"rank{rank}.json").write_text(json.dumps({**document, "events": events}))


def _wrap_distributed(module: Any, events: list) -> None:
    if not module.is_available():
        return
    for name in (
        KINDS.keys() & vars(module.distributed_c10d).keys()
    ):  # the "single" ones are torch 2.13's
        traced = _traced(getattr(module.distributed_c10d, name), KINDS[name], events)
        for holder in (module, module.distributed_c10d):
            setattr(holder, name, traced)


def _traced(function: Callable, kind: str, events: list) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # send calls isend, all_gather_into_tensor others: the outermost call counts
        if hasattr(_inside, "kind"):
            return function(*args, **kwargs)
        start = time.monotonic()
        _inside.kind = kind
        try:
            work = function(*args, **kwargs)
        finally:
            del _inside.kind
        size = next((_bytes(value) for value in (*args, *kwargs.values()) if _bytes(value)), 0)

        def done() -> None:
            events.append((kind, start, time.monotonic(), size))

        if not hasattr(work, "wait"):
            done()
            return work
        return _Awaited(work, done)

    return call


class _Awaited(wrapt.ObjectProxy):
    """A torch Work whose first wait() tells when the operation was over for this rank."""

    def __init__(self, work: Any, done: Callable[[], None]):
        super().__init__(work)
        self._self_done = done

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__.wait(*args, **kwargs)
        done, self._self_done = self._self_done, lambda: None
        done()
        return result


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def _hook_optimizer(module: Any, events: list) -> None:
    started: list[float] = []
    module.register_optimizer_step_pre_hook(lambda *_: started.append(time.monotonic()))
    module.register_optimizer_step_post_hook(
        lambda *_: events.append(("optimizer", started.pop(), time.monotonic(), 0))
    )
