"""Records when torch.distributed starts an operation, and how long the program waits for it.

The recorder (runtime/measure/telemetry.py) uses this for telemetry (measurements of communication) and for
the watchdog (reports of operations that never end). Methods of two classes of torch are replaced:

    ProcessGroup.allreduce, send, ...   start an operation; dist.all_reduce, dist.send, ... call them
    Work.wait                           waits for an operation

Operations that torch's C++ code starts are not seen, e.g. functional collectives. DistributedDataParallel
would start its operations in C++, too. With telemetry it starts them from Python, by a comm hook (ddp.py).

Without telemetry there is no recorder: each method then costs one more comparison.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.patches.torch.features import TELEMETRY
from holmes_ext.runtime.measure import telemetry

_C10D = "torch.distributed.distributed_c10d"
_GROUP = f"{_C10D}:ProcessGroup"


class Operation(NamedTuple):
    """Operation that a method of ProcessGroup starts, and positions of its arguments to record."""

    name: str  # as in reports, e.g. "all_reduce"
    #: Position of the argument with the tensors that are sent or received, without `self`; None if there is
    #: no such argument. For a gather or scatter, this is the argument with this rank's share.
    payload_position: int | None
    peer_position: int | None = None  # of the argument with the other rank, of a send or receive


class RenamedMethod(NamedTuple):
    """Method of ProcessGroup that torch 2.13 renamed."""

    new_name: str
    old_name: str  # before torch 2.13
    operation: Operation


#: Method of ProcessGroup -> the operation that it starts.
METHODS: dict[str, Operation] = {
    "allreduce": Operation("all_reduce", payload_position=0),
    "allreduce_coalesced": Operation("all_reduce", payload_position=0),
    "broadcast": Operation("broadcast", payload_position=0),
    "reduce": Operation("reduce", payload_position=0),
    "allgather": Operation("all_gather", payload_position=1),
    "allgather_coalesced": Operation("all_gather", payload_position=1),
    "gather": Operation("gather", payload_position=1),
    "scatter": Operation("scatter", payload_position=0),
    "reduce_scatter": Operation("reduce_scatter", payload_position=0),
    "alltoall": Operation("all_to_all", payload_position=1),
    "barrier": Operation("barrier", payload_position=None),
    "send": Operation("send", payload_position=0, peer_position=1),
    "recv": Operation("receive", payload_position=0, peer_position=1),
}
RENAMED = (
    RenamedMethod(
        "all_gather_single", "_allgather_base", Operation("all_gather", payload_position=1)
    ),
    RenamedMethod(
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
        Operation("all_gather", payload_position=1),
    ),
    RenamedMethod(
        "reduce_scatter_single",
        "_reduce_scatter_base",
        Operation("reduce_scatter", payload_position=0),
    ),
    RenamedMethod(
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        Operation("reduce_scatter", payload_position=0),
    ),
    RenamedMethod(
        "all_to_all_single", "alltoall_base", Operation("all_to_all", payload_position=1)
    ),
)


def _size_in_bytes(value: Any) -> int:
    """Return the size of a tensor, or of all tensors in nested lists, in bytes."""
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
    last_argument = args[-1] if args else None
    options = kwargs.get("opts", last_argument)
    return getattr(options, "asyncOp", True) is False


def _recording(original: Any, operation: Operation) -> Any:
    """Return a method that calls a method of ProcessGroup, and records the operation it starts.

    Args:
        original: The method of ProcessGroup.
        operation: Name of the operation, and positions of the arguments to record.
    """
    read_positions = [
        position
        for position in (operation.payload_position, operation.peer_position)
        if position is not None
    ]
    last_position = max(read_positions, default=-1)  # of the arguments that are recorded

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the original method, and record the collective, send or receive that it starts.

        Programs call this function in place of a method of torch's ProcessGroup, e.g. allreduce.
        This process's telemetry gets a record with the operation's name, its bytes and its peer.
        Without telemetry, only the original method runs.

        Returns:
            The result of the original method: torch's Work of the operation.
        """
        recorder = telemetry.recorder
        if recorder is None:  # telemetry is off
            return original(self, *args, **kwargs)

        # operation.payload_position and peer_position select the `args` that are recorded.
        has_arguments = len(args) > last_position
        if not has_arguments:  # they were passed by keyword: the operation is not recorded
            return original(self, *args, **kwargs)

        payload_bytes = 0
        if operation.payload_position is not None:
            payload_bytes = _size_in_bytes(args[operation.payload_position])
        peer_rank = None
        if operation.peer_position is not None:
            peer_rank = args[operation.peer_position]

        # launch() makes the record before the operation starts, and launched() completes it afterwards.
        record = recorder.launch(self, operation.name, payload_bytes, peer_rank)
        if record is None:  # a CUDA graph is being captured
            return original(self, *args, **kwargs)
        try:
            work = original(self, *args, **kwargs)
        except BaseException:
            recorder.failed(record)  # the operation did not start
            raise

        # From now on, Work.wait of `work` finds the record.
        recorder.launched(record, work, self, _is_synchronous(args, kwargs))
        return work

    return start


def _recording_wait(original: Any) -> Any:
    """Return a method that calls Work.wait, and records how long the program waits.

    Args:
        original: torch's method Work.wait.
    """

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Work.wait of `self`, and record how long it lasts."""
        recorder = telemetry.recorder
        if recorder is None:  # telemetry is off
            return original(self, *args, **kwargs)
        record = recorder.by_work.get(id(self))
        if record is None:  # the start of the operation was not recorded
            return original(self, *args, **kwargs)
        # Runs the lambda, and records how long it lasts.
        return recorder.wait(record, lambda: original(self, *args, **kwargs))

    return wait


@by_name
def _start_coalescing(call: Call, instance: Any) -> Any:
    """Begin a block of coalesced operations on a process group.

    Runs instead of ProcessGroup._start_coalescing; `call()` runs the original.

    From now on, telemetry lists the operations of the block. They have no Work of their own that could be
    timed (see _end_coalescing).
    """
    if telemetry.recorder is not None:
        # The recorder appends each operation of the block to this list.
        telemetry.recorder.coalescing[id(instance)] = []
    return call()


@by_name
def _end_coalescing(call: Call, instance: Any) -> Any:
    """End a block of coalesced operations on a process group.

    Runs instead of ProcessGroup._end_coalescing; `call()` runs the original.

    torch returns a single Work for the block. Telemetry times all operations of the block by this Work.
    """
    work = call()
    if telemetry.recorder is not None:
        telemetry.recorder.coalesced_launched(instance, work)
    return work


def _patch_of(method: str, operation: Operation, only: str = "") -> Patch:
    """Create the patch that makes a method of ProcessGroup record the operation that it starts.

    Args:
        method: Name of the method.
        operation: The operation that the method starts.
        only: Versions of torch that have the method, e.g. ">=2.13"; "" for all.
    """
    return Patch(
        TELEMETRY,
        f"{_GROUP}.{method}",
        "telemetry and the watchdog need to see when an operation starts",
        replace=lambda original: _recording(original, operation),
        only=only,
    )


PATCHES = (
    *(_patch_of(method, operation) for method, operation in METHODS.items()),
    *(_patch_of(method.new_name, method.operation, only=">=2.13") for method in RENAMED),
    *(_patch_of(method.old_name, method.operation, only="<2.13") for method in RENAMED),
    Patch(
        TELEMETRY,
        f"{_GROUP}._start_coalescing",
        "coalesced operations have no Work of their own that could be timed",
        _start_coalescing,
    ),
    Patch(
        TELEMETRY,
        f"{_GROUP}._end_coalescing",
        "all coalesced operations have one Work, which is timed",
        _end_coalescing,
    ),
    Patch(
        TELEMETRY,
        f"{_C10D}:Work.wait",
        "telemetry measures how long the program waits for an operation",
        replace=_recording_wait,
    ),
)
