"""Records when torch.distributed starts an operation, and how long the program waits for it.

The recorder (runtime/measure/telemetry.py) uses this for telemetry, which measures communication, and for the
watchdog, which reports operations that never end. Methods of two classes of torch are replaced:

    ProcessGroup.allreduce, send, ...   start an operation; dist.all_reduce, dist.send, ... call them
    Work.wait                           waits for an operation

Operations that torch's C++ code starts are not seen, e.g. functional collectives. DistributedDataParallel
would start its operations in C++, too. With telemetry it starts them from Python, by a comm hook (ddp.py).

Without telemetry there is no recorder: each method then costs one more comparison.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.patches.torch.features import TELEMETRY
from holmes_ext.runtime.measure import telemetry

_C10D = "torch.distributed.distributed_c10d"
_GROUP = f"{_C10D}:ProcessGroup"

#: Method of ProcessGroup -> arguments of _recording(), except for the method: the operation's name, position
#: of the payload, position of the peer. The payload of a gather or scatter is this rank's share.
METHODS: dict[str, tuple[Any, ...]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "alltoall": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0, 1),
    "recv": ("receive", 0, 1),
}
#: Methods that torch 2.13 renamed: new name, old name, arguments of _recording().
RENAMED = (
    ("all_gather_single", "_allgather_base", ("all_gather", 1)),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced", ("all_gather", 1)),
    ("reduce_scatter_single", "_reduce_scatter_base", ("reduce_scatter", 0)),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", ("reduce_scatter", 0)),
    ("all_to_all_single", "alltoall_base", ("all_to_all", 1)),
)


def _size_in_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return sum(_size_in_bytes(element) for element in value)
    return value.nbytes


def _is_synchronous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the program called an operation without async_op=True.

    Args:
        args: Arguments of a method of ProcessGroup. The last one is torch's options, whose asyncOp is read.
            Sends and receives have no options: they count as asynchronous.
        kwargs: Named arguments of the method. The options may be among them, as "opts".
    """
    options = kwargs.get("opts", args[-1] if args else None)
    return getattr(options, "asyncOp", True) is False


def _recording(original: Any, name: str, payload: int | None, peer: int | None = None) -> Any:
    """Return a method that calls a method of ProcessGroup, and records the operation that it starts.

    Args:
        original: The method of ProcessGroup.
        name: The operation's name in reports.
        payload: Position of the argument that is sent or received; None if the operation has none.
        peer: Position of the argument with the other rank, of a send or receive; None for other operations.
    """
    read_positions = [position for position in (payload, peer) if position is not None]
    last_position = max(read_positions, default=-1)

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the operation, and call the method of ProcessGroup (`self`) that starts it."""
        recorder = telemetry.recorder
        if recorder is None:  # telemetry is off
            return original(self, *args, **kwargs)
        operation = None  # None: the operation is not recorded
        has_arguments = (
            len(args) > last_position
        )  # else they were passed by keyword: nothing is recorded
        if has_arguments:
            size = 0 if payload is None else _size_in_bytes(args[payload])
            peer_rank = None if peer is None else args[peer]
            operation = recorder.launch(
                self, name, size, peer_rank
            )  # None while a CUDA graph is captured
        if operation is None:
            return original(self, *args, **kwargs)
        try:
            work = original(self, *args, **kwargs)
        except BaseException:
            recorder.failed(operation)  # the operation did not start
            raise
        # From now on, Work.wait of `work` finds the operation.
        recorder.launched(operation, work, self, _is_synchronous(args, kwargs))
        return work

    return start


def _recording_wait(original: Any) -> Any:
    """Return a method that calls Work.wait, and records how long the program waits for the operation."""

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Work.wait of `self`, and record its duration if the start of the operation was recorded."""
        recorder = telemetry.recorder
        if recorder is None:  # telemetry is off
            return original(self, *args, **kwargs)
        # start() of _recording() has filled `by_work`. None: the start of the operation was not recorded.
        operation = recorder.by_work.get(id(self))
        if operation is None:
            return original(self, *args, **kwargs)
        # Calls Work.wait, and records how long the call lasts.
        return recorder.wait(operation, lambda: original(self, *args, **kwargs))

    return wait


@by_name
def _start_coalescing(call, instance):
    """Begin a block of coalesced operations on a process group.

    Wrapper of ProcessGroup._start_coalescing, which `call()` runs.

    From now on, telemetry lists the operations of the block. They have no Work of their own that could be
    timed (see _end_coalescing).
    """
    if telemetry.recorder is not None:
        telemetry.recorder.coalescing[
            id(instance)
        ] = []  # the recorder appends operations to the list
    return call()


@by_name
def _end_coalescing(call, instance):
    """End a block of coalesced operations on a process group.

    Wrapper of ProcessGroup._end_coalescing, which `call()` runs.

    torch returns a single Work for the block. Telemetry times all operations of the block by this Work.
    """
    work = call()
    if telemetry.recorder is not None:
        telemetry.recorder.block_ended(instance, work)
    return work


def _patch_of(method: str, arguments: tuple[Any, ...], only: str = "") -> Patch:
    """Return the patch that makes a method of ProcessGroup record its operation.

    Args:
        arguments: Further arguments of _recording().
        only: Versions of torch that have the method, e.g. ">=2.13"; "" for all.
    """
    return Patch(
        TELEMETRY,
        f"{_GROUP}.{method}",
        "operations are timed, and seen by the watchdog, where torch starts them",
        replace=lambda original: _recording(original, *arguments),
        only=only,
    )


PATCHES = (
    *(_patch_of(method, arguments) for method, arguments in METHODS.items()),
    *(_patch_of(new_name, arguments, ">=2.13") for new_name, _, arguments in RENAMED),
    *(_patch_of(old_name, arguments, "<2.13") for _, old_name, arguments in RENAMED),
    Patch(
        TELEMETRY,
        f"{_GROUP}._start_coalescing",
        "operations inside a block have no work of their own",
        _start_coalescing,
    ),
    Patch(
        TELEMETRY, f"{_GROUP}._end_coalescing", "the work of a block of operations", _end_coalescing
    ),
    Patch(
        TELEMETRY,
        f"{_C10D}:Work.wait",
        "what the program waits for is what communication costs it",
        replace=_recording_wait,
    ),
)
