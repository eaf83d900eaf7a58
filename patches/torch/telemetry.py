"""Records a job's communication for telemetry and the watchdog, where torch starts it and waits for it.

Python code reaches the network through the methods of two classes of torch, which are replaced here:

    ProcessGroup.allreduce, send, ...   start an operation (called by dist.all_reduce, dist.send, ...)
    Work.wait                           makes the program wait for an operation

Operations that torch's C++ code starts (functional collectives) are not seen. DistributedDataParallel's are,
because with telemetry its buckets are reduced from Python (ddp.py). Without a recorder each method costs one
additional comparison.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.torch.features import TELEMETRY
from holmes_ext.runtime.measure import telemetry

_C10D = "torch.distributed.distributed_c10d"
_GROUP = f"{_C10D}:ProcessGroup"

#: ProcessGroup's method -> arguments of _starts(); of gathers and scatters the payload is this rank's share.
METHODS: dict[str, tuple[Any, ...]] = {
    "allreduce": ("all_reduce", 0), "allreduce_coalesced": ("all_reduce", 0), "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0), "allgather": ("all_gather", 1), "allgather_coalesced": ("all_gather", 1),
    "gather": ("gather", 1), "scatter": ("scatter", 0), "reduce_scatter": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", 1), "barrier": ("barrier", None), "send": ("send", 0, 1),
    "recv": ("receive", 0, 1),
}  # fmt: skip
#: Those of one tensor: what torch calls from 2.13 on, what it called before.
RENAMED = (
    ("all_gather_single", "_allgather_base", ("all_gather", 1)),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced", ("all_gather", 1)),
    ("reduce_scatter_single", "_reduce_scatter_base", ("reduce_scatter", 0)),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", ("reduce_scatter", 0)),
    ("all_to_all_single", "alltoall_base", ("all_to_all", 1)),
)


def _bytes(value: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else value.nbytes


def _starts(original: Any, name: str, payload: int | None, to: int | None = None) -> Any:
    """A method that starts operation `name`: which of its arguments is the payload (None: it has none), and
    which the other's rank in the group (None: all take part)."""
    needed = max(-1 if place is None else place for place in (payload, to))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, op = telemetry.recorder, None
        if recorder is not None and len(args) > needed:
            size = 0 if payload is None else _bytes(args[payload])
            op = recorder.launch(self, name, size, None if to is None else args[to])
        if recorder is None or op is None:
            return original(self, *args, **kwargs)
        try:
            work = original(self, *args, **kwargs)
        except BaseException:
            recorder.failed(op)
            raise
        recorder.launched(op, work, self)
        return work

    return call


def _wait(original: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = telemetry.recorder
        op = recorder.by_work.get(id(self)) if recorder is not None else None
        if recorder is None or op is None:
            return original(self, *args, **kwargs)
        return recorder.wait(op, lambda: original(self, *args, **kwargs))

    return wait


@by_name
def _start_coalescing(call, instance):
    """Begin a list of the operations that a block of coalesced operations starts on a process group."""
    if telemetry.recorder is not None:
        telemetry.recorder.coalescing[id(instance)] = []
    return call()


@by_name
def _end_coalescing(call, instance):
    """End a block of coalesced operations, and time all of them by the one Work that torch returns for it."""
    work = call()
    if telemetry.recorder is not None:
        telemetry.recorder.block_ended(instance, work)
    return work


def _starting(method: str, about: tuple[Any, ...], only: str = "") -> Patch:
    return Patch(TELEMETRY, f"{_GROUP}.{method}",
                 "operations are timed, and seen by the watchdog, where torch starts them",
                 replace=lambda original: _starts(original, *about), only=only)


PATCHES = (
    *(_starting(method, about) for method, about in METHODS.items()),
    *(_starting(new, about, ">=2.13") for new, _, about in RENAMED),
    *(_starting(old, about, "<2.13") for _, old, about in RENAMED),
    Patch(TELEMETRY, f"{_GROUP}._start_coalescing", "operations inside a block have no work of their own",
          _start_coalescing),
    Patch(TELEMETRY, f"{_GROUP}._end_coalescing", "the work of a block of operations", _end_coalescing),
    Patch(TELEMETRY, f"{_C10D}:Work.wait", "what the program waits for is what communication costs it",
          replace=_wait),
)  # fmt: skip
