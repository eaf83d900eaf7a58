"""Traces of the ranks of a lab job: when each rank computes, communicates and updates its weights.

If HOLMES_LAB_TRACE=DIR is set, each rank writes a file DIR/rankN.json when it ends:

    {"rank", "node", "cluster", "events": [[kind, start, end, bytes], ...]}

Times are seconds of time.monotonic(), which is the same clock on all nodes, since they are one machine. The
kinds of events:

    forward, backward                      passes of layers on the emulated accelerator; 0 bytes
    send, receive, reduce, collective      functions of torch.distributed; bytes of the tensor
    optimizer                              steps of torch.optim; 0 bytes
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
#: Function of torch.distributed -> kind of its events.
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
_inside = threading.local()  # has the attribute `kind` while this thread is in such a function


def install(directory: str) -> None:
    """Record the events of this process from now on, and write them when it ends.

    Args:
        directory: Folder for the file.
    """
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
    """Replace the functions of torch.distributed by functions that also record events.

    Args:
        module: torch.distributed.
        events: The events are appended.
    """
    if not module.is_available():
        return
    # Not all versions of torch have all functions: those named "single" are new in 2.13.
    for name in KINDS.keys() & vars(module.distributed_c10d).keys():
        traced = _traced(getattr(module.distributed_c10d, name), KINDS[name], events)
        for holder in (module, module.distributed_c10d):
            setattr(holder, name, traced)


def _traced(function: Callable, kind: str, events: list) -> Callable:
    """Return a function that does the same and appends an event.

    The event of an asynchronous operation ends with the first wait() for it.

    Args:
        function: A function of torch.distributed.
        kind: Kind of the event.
        events: The event is appended when the operation has ended.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Some functions call each other, such as send and isend: only the outermost call is recorded.
        if hasattr(_inside, "kind"):
            return function(*args, **kwargs)
        start = time.monotonic()
        _inside.kind = kind
        try:
            work = function(*args, **kwargs)
        finally:
            del _inside.kind
        # Bytes of the first argument that is a tensor.
        size = next((_bytes(value) for value in (*args, *kwargs.values()) if _bytes(value)), 0)

        def done() -> None:
            events.append((kind, start, time.monotonic(), size))

        if not hasattr(work, "wait"):
            done()
            return work
        return _Awaited(work, done)

    return call


class _Awaited(wrapt.ObjectProxy):
    """Handle of an asynchronous operation (torch's Work) that calls a function at the first wait()."""

    def __init__(self, work: Any, done: Callable[[], None]):
        super().__init__(work)
        self._self_done = done

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__.wait(*args, **kwargs)
        done, self._self_done = self._self_done, lambda: None
        done()
        return result


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor, 0 for another value."""
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def _hook_optimizer(module: Any, events: list) -> None:
    """Record an event for each step of an optimizer.

    Args:
        module: torch.optim.optimizer.
        events: The events are appended.
    """
    started: list[float] = []
    module.register_optimizer_step_pre_hook(lambda *_: started.append(time.monotonic()))
    module.register_optimizer_step_post_hook(
        lambda *_: events.append(("optimizer", started.pop(), time.monotonic(), 0))
    )
