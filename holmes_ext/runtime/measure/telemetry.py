"""Records each operation of torch.distributed: bytes, start and end, and how long the program waited for it.

The patches of torch and of the training engines call the Recorder of this process:

    launch(), launched()   the program has started an operation
    wait()                 the program waits for its end
    finish()               the operation is over
    step_done()            a training step is over: its operations go to telemetry_file.py

The watchdog looks at the operations that are not over. `recorder` is None while nothing needs it.

Times are in seconds of time.monotonic() on this node. An operation is over

    gloo, collectives           when gloo has completed the future of the operation's Work
    gloo, sends and receives    when the program's wait() has returned: gloo does not report their end
    NCCL                        when the GPU has completed it (on_device.py). The time of waiting is how long
                                the compute stream stood still.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure.on_device import DeviceClock, OnDevice
from holmes_ext.runtime.measure.operations import GroupTraffic, Op, sent_bytes

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes

#: Callers of step_done(), from the least to the most reliable. Once a caller has reported the end of a step,
#: those before it are ignored: a step may have several optimizer steps or reductions.
SOURCES = ("optimizer", "reducer", "engine", "program")
#: Kind of the span around the launch of DistributedDataParallel's last bucket: its backward pass ends there.
LAST_BUCKET = "last bucket"
_MEDIAN_STEPS = 50  # the median duration is that of so many last steps
_FEWEST_STEPS = 3  # for a median
_POLL_S = 0.002


class SpanMark(NamedTuple):
    """Begin or end of a part of a training step, such as a forward pass."""

    time: Any  # seconds, or a Mark on the GPU's stream
    memory_bytes: int  # GPU memory in use; 0 if spans are not measured on the GPU


class Recorder:
    """Records the times of this process's collectives, sends and receives in torch.distributed.

    It keeps the operations under way, and those that ended since the last training step. holmes
    wraps torch's functions, and the wrappers call launch(), launched() and wait(), from any thread.
    """

    def __init__(
        self,
        rank: int,
        sizes: Sizes | None,
        on_step: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Create the recorder of this process's operations in torch.distributed.

        Args:
            rank: Rank of this process.
            sizes: Parallel sizes of the job, if known. The purpose of a process group is derived from them.
            on_step: Called after each training step with (step, begin, end, tokens, operations, spans,
                reduction). None: only the watchdog uses this recorder, and ended operations are dropped.
            clock: Returns the time in seconds.
        """
        self.rank = rank
        self.sizes = sizes
        self.clock = clock
        self.on_step = [on_step] if on_step is not None else []
        #: Writes a JSON document as a further line of the telemetry file; None if there is no file.
        self.write_document: Callable[[dict[str, Any]], None] | None = None
        self.device = OnDevice(self, DeviceClock(clock))
        self.groups: dict[int, GroupTraffic] = {}  # id(process group) -> its traffic
        self.open: dict[int, Op] = {}  # id(op) -> an operation under way
        self.by_work: dict[int, Op] = {}  # id(work) -> its operation
        #: id(process group) -> operations that the program coalesces now: it calls them one by one, and torch
        #: launches them together at the end.
        self.coalescing: dict[int, list[Op]] = {}
        self.done: list[Op] = []  # ended since the last step
        self.unfinished: list[Op] = []  # under way when the last step ended
        #: (kind, begin, end) of spans since the last step; times in seconds, or Marks of the GPU.
        self.spans: list[tuple[str, Any, Any]] = []
        self.spans_on_device = False  # whether spans are measured on the GPU
        self.device_index = 0  # the GPU of the spans
        #: Growth of GPU memory in the last forward pass, in bytes, if spans are measured on the GPU.
        self.kept_bytes = 0
        self.reduction: dict[str, Any] | None = None  # GradientReducer's figures of this step
        self.step = 0
        #: Begin of the step as it is reported: mostly the end of the last step, so that no time is left out.
        self.step_began = self.clock()
        #: When the program entered the step. The watchdog counts from here, not from the last step's end:
        #: an evaluation or a checkpoint may lie in between.
        self.step_entered = self.step_began
        #: False between two steps, for programs that report where steps begin. The watchdog then rests.
        self.is_in_step = False
        self.durations: deque[float] = deque(maxlen=_MEDIAN_STEPS)  # seconds of the last steps
        self._awaiting_callback: set[Op] = set()  # whose end a thread of gloo will record
        self._end_lock = threading.RLock()  # held while an operation ends
        self._source = 0  # index in SOURCES of the most reliable source so far
        self._main_thread = threading.main_thread().ident
        self._group_references: list[Any] = []  # weak references that report deleted groups

    @property
    def has_listeners(self) -> bool:
        """True if something gets the operations of each step: the telemetry file, metrics or --holmes-adapt.

        Only then are durations and sent bytes measured. Without listeners, this recorder only serves the
        watchdog, which looks at operations under way.
        """
        return bool(self.on_step)

    # Operations

    def group(self, process_group: Any) -> GroupTraffic:
        """Return the object that counts the operations of a process group, and make it if necessary."""
        key = id(process_group)
        traffic = self.groups.get(key)
        if traffic is None:
            traffic = GroupTraffic(process_group)
            self.groups[key] = traffic
            reference = weakref.ref(process_group, lambda _: self._remove_group(key))
            self._group_references.append(reference)
        return traffic

    def _remove_group(self, key: int) -> None:
        """Stop tracking a process group that torch has deleted, and mark its operations as over."""
        for op in self.groups.pop(key).on_device:
            self.finish(op)

    def kind(self, op: Op) -> str:
        """Return the kind of parallelism that an operation belongs to, e.g. "data" or "pipeline"."""
        return op.group.kind(self.sizes, op.peer, self.rank)

    def participants(self, op: Op) -> tuple[int, ...]:
        """Return the ranks that take part in an operation: the whole group, or both ends of a message."""
        if op.peer is None or op.peer < 0:
            return op.group.ranks
        return tuple(sorted((self.rank, op.peer)))

    def launch(self, process_group: Any, name: str, payload: int, to: int | None) -> Op | None:
        """Record that the program is about to start an operation.

        Args:
            process_group: The operation's process group.
            name: Name of the operation, such as "all_reduce".
            payload: Bytes of the operation's tensors.
            to: Rank of the other end in the group, for a send or receive; negative if it may be any rank.
                None for a collective.

        Returns:
            The operation. None if a CUDA graph captures it: it cannot be observed when the graph runs.
        """
        group = self.group(process_group)
        if group.is_on_device and self.device.captures():
            return None  # not numbered either; all ranks of the group capture it, so their numbers agree
        # Operations of a group are numbered: collectives, and messages of each direction and rank.
        if to is None:
            peer = None
            number = group.collectives
            group.collectives = number + 1
        else:
            peer = group.ranks[to] if to >= 0 else -1
            number = group.messages.get((name, peer), 0)
            group.messages[name, peer] = number + 1
        sent = 0.0
        if self.has_listeners:  # the watchdog does not need the sent bytes
            sent = sent_bytes(name, payload, len(group.ranks), group.backend)
        op = Op(group, name, payload, sent, peer, number, start=self.clock())
        # Waits for operations of other threads (such as GradientReducer's) do not stop the training loop, so
        # wait() does not count them as exposed time.
        op.background = threading.get_ident() != self._main_thread
        if group.is_on_device:  # NCCL: a CUDA event marks the begin
            self.device.launch(op)
        self.open[id(op)] = op
        return op

    def launched(self, op: Op, work: Any, process_group: Any, is_synchronous: bool = False) -> None:
        """Record that an operation was started, and arrange that its end will be recorded.

        How the end is observed:
            NCCL                  By CUDA events.
            gloo, collectives     By a callback of the Work's future, if telemetry or metrics are on
                                  (has_listeners). Otherwise when the program waits for the Work.
            gloo, messages        When the program waits for the Work. It has no future.

        Args:
            op: The operation, from launch().
            work: The Work that torch returned; None for a synchronous operation of nccl-legacy.
            process_group: The operation's process group.
            is_synchronous: Whether the program called the operation without async_op=True.
        """
        op.is_synchronous = is_synchronous
        coalesced = self.coalescing.get(id(process_group))
        if coalesced is not None:
            # The program coalesces operations: torch launches them together at the end. Then
            # coalesced_launched() calls this method once, for the last of them.
            coalesced.append(op)
            return
        if is_synchronous and op.group.is_nccl2:
            # torch has made the program's stream wait, so the Work's wait() measures nothing. CUDA
            # events on that stream do, as with nccl-legacy, where such an operation has no Work.
            work = None
        if work is not None:
            self._remember_work(op, work)
        if op.group.is_on_device:
            self.device.launched(op)
        elif work is None:  # gloo: a synchronous operation has ended
            self.finish(op)
        elif self.has_listeners and op.peer is None:
            self._finish_with_future(op, work)
        # In all other cases, wait() records the end.

    def _remember_work(self, op: Op, work: Any) -> None:
        """Map the Work that torch returned to its operation, without keeping the Work alive."""
        key = id(work)
        self.by_work[key] = op
        op.work = weakref.ref(work, lambda _: self._work_deleted(key, op))

    def _finish_with_future(self, op: Op, work: Any) -> None:
        """Let a thread of gloo record the end of an operation, by the future of its Work.

        Without a future, wait() of the Work records the end.
        """

        def record_end(future: Any) -> None:
            self.finish(op)
            self._awaiting_callback.discard(op)

        self._awaiting_callback.add(op)
        try:
            work.get_future().add_done_callback(before_exit(record_end))
        except RuntimeError:  # gloo's reduce-scatter has no future
            self._awaiting_callback.discard(op)

    def coalesced_launched(self, process_group: Any, work: Any) -> None:
        """Record that torch has launched coalesced operations together; the last of them stands for all."""
        ops = self.coalescing.pop(id(process_group), [])
        if not ops:
            return
        last = ops[-1]
        last.coalesced = ops[:-1]
        is_synchronous = all(op.is_synchronous for op in ops)
        self.launched(last, work, process_group, is_synchronous)

    def failed(self, op: Op) -> None:
        """Forget an operation that launch() has recorded, because torch could not start it (error)."""
        self.open.pop(id(op), None)

    def finish(self, op: Op) -> None:
        """Set the end of an operation to now: it is over."""
        self.end(op, self.clock())

    def end(self, op: Op, end: float) -> None:
        """Set the end of an operation, and of the operations that torch coalesced with it, to time `end`."""
        # A thread of the backend and the program may both see the end. The later of them waits for the lock.
        with self._end_lock:
            for member in (*op.coalesced, op):
                if member.end:
                    continue
                member.end = end
                was_open = self.open.pop(id(member), None) is not None
                if was_open and self.has_listeners:
                    self.done.append(member)

    def wait(self, op: Op, wait: Callable[[], Any]) -> Any:
        """Call the program's `wait` for an operation, and measure how long it takes."""
        if op.group.is_on_device:
            return self.device.wait(op, wait)
        start = self.clock()
        result = wait()
        if not op.background and threading.get_ident() == self._main_thread:
            op.waited += self.clock() - start
        self.finish(op)
        return result

    def settle(self, seconds: float) -> None:
        """Wait until the ends of all started operations are recorded, or `seconds` have passed.

        An operation may end after its training step: a thread of gloo, or poll() with NCCL, records
        that. Operations that do not end in time stay unrecorded, without an error.

        Args:
            seconds: The longest time to wait.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            has_open_operations = any(not op.end for op in self.unfinished)
            if not self._awaiting_callback and not has_open_operations:
                return
            self.poll()
            time.sleep(_POLL_S)

    def _work_deleted(self, key: int, op: Op) -> None:
        """Remove a Work that the program has deleted.

        Over gloo, its operation counts as over now: the program has waited for it, or can no longer do so.
        """
        if self.by_work.get(key) is op:
            del self.by_work[key]
        if not op.group.is_on_device:
            self.finish(op)

    def on_gpu(self, on: bool) -> None:
        """Time parts of the training step on the calling thread's GPU if `on`, else on the host."""
        self.spans_on_device = on
        if on:
            import torch

            self.device_index = torch.cuda.current_device()

    def span_mark(self) -> SpanMark:
        """Return the current time and GPU memory, to mark the begin or end of a part of the training step."""
        if not self.spans_on_device or self.device.captures():
            return SpanMark(self.clock(), memory_bytes=0)
        import torch

        return SpanMark(self.device.mark(), torch.cuda.memory_allocated())

    # Steps

    def step_begins(self, exactly: bool = True) -> None:
        """Record that a training engine (megatron-core, DeepSpeed) enters a training step.

        Args:
            exactly: Whether the step begins here. Otherwise it began where the last step ended, unless more
                than the median duration of a step has passed since then.
        """
        self.step_entered = self.clock()
        self.is_in_step = True  # the watchdog may report a late step from now on
        # The engine will also report where steps end. It is more reliable than optimizers and
        # reducers, whose reports are ignored from now on: SOURCES is ordered by reliability.
        self._source = max(self._source, SOURCES.index("engine"))
        since_last_step_s = self.step_entered - self.step_began
        if exactly or since_last_step_s > (self.median_s() or 0.0):
            self.step_began = self.step_entered

    def median_s(self) -> float | None:
        """Return the median duration of the last steps, in seconds; None if there are too few steps.

        The first step does not count.
        """
        durations = list(self.durations)
        if len(durations) < _FEWEST_STEPS:
            return None
        return statistics.median(durations)

    def step_done(self, source: str, tokens: int = 0) -> None:
        """Record that a training step is over, and pass its operations to the functions in on_step.

        The operations passed on are those that have ended since the last step (self.done). Operations that
        are still under way (self.open) are passed on with a later step, when they have ended.

        Args:
            source: Kind of the caller: "optimizer", "reducer", "engine" or "program", from the least to the
                most reliable. The call is ignored if a more reliable caller has called before.
            tokens: Tokens of this step, over all ranks together; 0 if unknown.
        """
        reliability = SOURCES.index(source)
        if reliability < self._source:
            return
        self._source = reliability
        now = self.clock()
        if self.step > 0:
            self.durations.append(now - self.step_began)  # not of step 0: it includes the start
        self.poll()
        self.device.step_done()
        if self.on_step:
            ended_operations = self.done
            self.done = []
            # Spans that the GPU has not completed yet are passed on with a later step.
            spans, self.spans = self.device.timed(self.spans)
            for on_step in self.on_step:
                on_step(
                    self.step,
                    self.step_began,
                    now,
                    tokens,
                    ended_operations,
                    spans,
                    self.reduction,
                )
            # After the last step, the telemetry file waits for these and gets them in a further line.
            self.unfinished = list(self.open.values())
        self.reduction = None
        self.step += 1
        # The next step begins now. But an engine calls step_begins() when it enters that step.
        # Until then no step runs (is_in_step), and step_begins() replaces these two times.
        self.step_began = now  # for the reported duration
        self.step_entered = now  # for the watchdog
        self.is_in_step = source != "engine"

    def poll(self) -> None:
        """Record the end of all operations that the GPU has completed so far."""
        for group in list(self.groups.values()):
            self.device.poll(group)

    def in_flight(self) -> list[Op]:
        """Return the operations that have begun and are not over, the oldest first.

        Over NCCL, an operation begins when the GPU reaches it, not when the host launches it.
        """
        self.poll()
        ops = [op for op in list(self.open.values()) if self.device.is_running(op)]
        return sorted(ops, key=lambda op: op.start)

    def not_begun(self) -> list[Op]:
        """Return the operations that were launched over NCCL and that the GPU has not reached."""
        return [op for op in list(self.open.values()) if not self.device.has_begun(op)]


#: This process's recorder. The patches read it at every operation; None means that nothing is recorded.
recorder: Recorder | None = None


def set_recorder(new: Recorder | None) -> None:
    """Set this process's recorder; None stops recording."""
    global recorder
    recorder = new


@contextmanager
def span(kind: str) -> Iterator[None]:
    """Measure the body of a `with` statement as a part of the training step.

    Its begin and end are recorded, in seconds or as CUDA events. For a forward pass on a GPU, the
    growth of GPU memory is recorded, too: the size of the activations kept for the backward pass.
    --holmes-adapt computes from it how many micro-batches fit into memory.

    Nothing is measured if neither the telemetry file, metrics nor --holmes-adapt use it.

    Args:
        kind: Name of the part, such as "forward", "backward" or "optimizer".
    """
    active = recorder
    if active is None or not active.has_listeners:
        yield
        return
    begin = active.span_mark()  # time, and GPU memory in use
    yield
    end = active.span_mark()
    active.spans.append((kind, begin.time, end.time))
    if kind == "forward":
        active.kept_bytes = end.memory_bytes - begin.memory_bytes


def learn_sizes(sizes: Sizes | None) -> None:
    """Let the recorder use the framework's parallel sizes, if it has none: the plan had no sizes."""
    if recorder is not None:
        recorder.sizes = recorder.sizes or sizes


def reduction_done(times: Any, on_host: bool) -> None:
    """Record the measurements of a GradientReducer, and that a training step is over.

    Recorded are bytes, buckets, and buckets launched during the backward pass ("early"). On the CPU
    also the seconds of all reductions, and those after the backward pass ("exposed").

    Args:
        times: The ReductionTimes that GradientReducer.finish() returns.
        on_host: Whether gradients are on the CPU. On a GPU, the times are only those of launches.
    """
    if recorder is None:
        return
    recorder.reduction = {"bytes": times.bytes, "early": times.early, "buckets": times.buckets}
    if on_host:
        recorder.reduction |= {"seconds": times.seconds, "exposed": times.exposed_s}
    recorder.step_done("reducer")


def outer_round(figures: dict[str, Any]) -> None:
    """Write the figures of an outer round into the telemetry file, if it is written.

    In an outer round, jobs that were started with --holmes-join exchange pseudo-gradients (DiLoCo).
    """
    if recorder is not None and recorder.write_document is not None:
        recorder.write_document({"outer": figures})


def step_done(tokens: int = 0) -> None:
    """Record that a training step is over, in a training loop that no framework runs.

    Nothing happens without telemetry.

    Args:
        tokens: Tokens of this step, over all ranks together; 0 if unknown.
    """
    if recorder is not None:
        recorder.step_done("program", tokens)
