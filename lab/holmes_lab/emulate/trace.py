"""Traces of the ranks of a lab job: when each rank computes, communicates and updates its weights.

If HOLMES_LAB_TRACE=DIR is set, each rank writes a file DIR/rankN.json when it ends:

    {"rank", "node", "cluster", "events": [[kind, start, end, bytes], ...]}

Times are seconds of time.monotonic(), the same clock on all nodes, since they are one machine. The
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
from typing import Any, NamedTuple

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


class Event(NamedTuple):
    """One timed operation of a rank: a pass, an optimizer step, or a send, receive or collective.

    In the file of a trace, an event is the list [kind, start, end, bytes].
    """

    kind: str  # "forward", "backward", "optimizer" or a value of KINDS
    start: float  # seconds of time.monotonic(), as `end`
    end: float
    bytes: int  # of the tensor that is communicated; 0 for passes and optimizers


def install(directory: str) -> None:
    """Record the operations of this process from now on, and write them into a file at its end.

    Forward and backward passes of emulated layers, functions of torch.distributed, and steps of
    optimizers are recorded, each with its start and end (Event).

    Args:
        directory: Folder for the file rankN.json.
    """
    events: list[Event] = []
    accelerator.after_each_pass(
        lambda kind, start, end: events.append(Event(kind, start, end, bytes=0))
    )
    wrapt.register_post_import_hook(
        lambda module: _wrap_distributed(module, events), "torch.distributed"
    )
    wrapt.register_post_import_hook(
        lambda module: _hook_optimizer(module, events), "torch.optim.optimizer"
    )
    atexit.register(_write, directory, events)


def _write(directory: str, events: list[Event]) -> None:
    rank = os.environ.get("RANK", "0")
    document = {
        "rank": int(rank),
        "node": os.uname().nodename,
        "cluster": os.environ.get("HOLMES_LAB_CLUSTER", ""),
    }
    Path(directory, f"rank{rank}.json").write_text(json.dumps({**document, "events": events}))


def _wrap_distributed(module: Any, events: list[Event]) -> None:
    """Make the sends, receives and collectives of torch.distributed record events.

    The functions are the keys of KINDS, such as isend, all_reduce, broadcast and barrier. Each is
    replaced by one that does the same, and records its start, its end and the bytes of its tensor.

    Args:
        module: torch.distributed.
        events: Each call of a replacement appends an Event to this list.
    """
    if not module.is_available():
        return
    # Not all versions of torch have all functions: those named "single" are new in 2.13.
    for name in KINDS.keys() & vars(module.distributed_c10d).keys():
        traced = _traced(getattr(module.distributed_c10d, name), KINDS[name], events)
        for holder in (module, module.distributed_c10d):
            setattr(holder, name, traced)


def _traced(function: Callable, kind: str, events: list[Event]) -> Callable:
    """Return a function that does the same as `function`, and appends an event to a list.

    An asynchronous operation returns a handle (torch's Work). Its event ends when the first call of
    the handle's wait() returns, and is appended then.

    Args:
        function: A function of torch.distributed.
        kind: Kind of the event.
        events: List to which the event is appended when the operation has ended.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the function of torch.distributed, and record an event when the operation ends.

        A synchronous operation ends when the function returns. An asynchronous operation returns a
        handle (torch's Work), and ends when the first call of the handle's wait() returns.
        """
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

        def append_event() -> None:
            events.append(Event(kind, start, end=time.monotonic(), bytes=size))

        if not hasattr(work, "wait"):  # the operation was synchronous
            append_event()
            return work
        return _Awaited(work, on_first_wait=append_event)

    return call


class _Awaited(wrapt.ObjectProxy):
    """Handle of an operation (torch's Work) that calls a function after the first wait()."""

    def __init__(self, work: Any, on_first_wait: Callable[[], None]):
        super().__init__(work)
        # wrapt keeps attributes of the proxy, not of `work`, under names that begin with _self_.
        self._self_on_wait = on_first_wait

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__.wait(*args, **kwargs)
        on_wait = self._self_on_wait
        self._self_on_wait = lambda: None  # later calls of wait() end no event
        on_wait()
        return result


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor, 0 for another value."""
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


def _hook_optimizer(module: Any, events: list[Event]) -> None:
    """Record an event for each step of an optimizer.

    Args:
        module: torch.optim.optimizer.
        events: The events are appended.
    """
    # Start times of the steps that run now. An optimizer may call another one, so it is a stack.
    started: list[float] = []

    def on_start(*_: Any) -> None:
        started.append(time.monotonic())

    def on_end(*_: Any) -> None:
        start = started.pop()
        events.append(Event("optimizer", start, end=time.monotonic(), bytes=0))

    module.register_optimizer_step_pre_hook(on_start)
    module.register_optimizer_step_post_hook(on_end)
