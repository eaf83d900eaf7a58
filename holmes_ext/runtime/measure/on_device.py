"""Measures operations over NCCL: the host launches them, and the GPU carries them out later.

CUDA events are recorded on the program's current stream, at the points in brackets:

    async_op=True    current stream    [launch_mark] ...........  [before] wait [after]
                     torch's stream                  [operation]
    async_op=False   current stream    [launch_mark] [operation] [end_mark]   (torch 2.8 and newer: no Work)

How the end of an asynchronous operation is found:

    1. By the operation's Work, while the program holds it: is_completed() is called at launches and waits.
    2. Without the Work: when the stream has passed the program's wait ([after]). The operation may have ended
       before.
    3. With TORCH_NCCL_ENABLE_TIMING, the Work also has the duration of the operation itself.

The Work is never kept here, because it owns its outputs (WorkNCCL::outputs_ in ProcessGroupNCCL.cpp): the
weights that FSDP and ZeRO 3 gather would live too long. Every launch checks whether the oldest operations
of its group are over, so that nothing piles up in programs without training steps.

CUDA events only give the time between two events (elapsed_time). To get the host's time of an event, a
reference is kept: an event with a host time that is known approximately. Two facts correct it: the GPU cannot
have passed an event before the host recorded it, nor after the host saw that it was passed. While the GPU is
idle, it passes an event as soon as it is recorded, so the reference becomes exact. Every training step gets a
new reference, because elapsed_time() is a float32 of milliseconds and loses digits over long times.

The tests run this module with simulated events (tests/runtime/measure/); it has not run on a GPU so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from holmes_ext.runtime.measure.operations import GroupTraffic, Mark, Op

_MS_PER_S = 1e3  # torch returns the times of events and Works in milliseconds

#: A part of a training step: (kind, begin, end), with times in seconds or as Marks.
Span = tuple[str, Any, Any]


class TimedSpans(NamedTuple):
    """Spans (parts of a training step) with known times, and spans that the GPU has not completed."""

    done: list[tuple[str, float, float]]  # (kind, begin, end) in seconds
    open: list[Span]


class _Interval(NamedTuple):
    """Start and end of an operation on the GPU, in seconds of the host's clock."""

    start_s: float
    end_s: float


class DeviceClock:
    """Records CUDA events, and converts them to seconds of the host's clock.

    A mark is a recorded CUDA event with the host's time of the recording. CUDA only gives the time
    between two events. So an event is kept as the reference, with the host time when the GPU passed
    it.
    """

    def __init__(self, clock: Callable[[], float]):
        """Create a converter from CUDA events to host times, for the current GPU.

        No CUDA event is recorded yet. The first call of mark() records the reference: the time of
        every later event is computed from it.

        Args:
            clock: The host's clock: returns the time in seconds.
        """
        import torch

        self.clock = clock
        self._cuda = torch.cuda
        #: Returns whether a CUDA graph captures the kernels that are launched now. Then events cannot be
        #: queried.
        self.capturing = torch.cuda.is_current_stream_capturing
        self._free: list[Any] = []  # events that can be used again
        #: Elapsed times are counted from this event; with its host time in seconds. Each training step gets a
        #: new reference: CUDA's elapsed times lose digits over long times.
        self._reference: Mark | None = None
        self._reference_s = 0.0
        #: Event at the end of the last step. It replaces the reference when the GPU has passed it, because
        #: elapsed_time() needs events that the GPU has passed.
        self._next_reference: Mark | None = None
        self._compute: Any = None  # the stream of the steps' ends

    def mark(self) -> Mark:
        """Record a CUDA event on the current stream, and return it with the host's time (a mark).

        The caller later gives the event back (recycle()), and it is then recorded anew for another
        mark. So a returned event cannot serve as the reference for elapsed times. The first call
        therefore records two events: it keeps the first as the reference, and returns the second.
        """
        try:
            event = self._free.pop()  # an event of an earlier mark that is not needed any more
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        stream = self._cuda.current_stream()
        event.record(stream)
        mark = Mark(event, stream, self.clock())
        if self._reference is None:
            self._reference = mark
            self._reference_s = mark.at
            return self.mark()
        return mark

    def recycle(self, *marks: Mark | None) -> None:
        """Keep the CUDA events of old marks, to record them anew for later marks; None is ignored."""
        self._free += [mark.event for mark in marks if mark is not None]

    def has_passed(self, mark: Mark) -> bool:
        """Return whether the GPU has passed a mark (a recorded CUDA event), so that its time can be read."""
        return bool(
            mark.event.query() and self._reference is not None and self._reference.event.query()
        )

    def time_of(self, mark: Mark) -> float:
        """Return the host time, in seconds, when the GPU passed a mark; has_passed(mark) must be true.

        The time is the host time of the reference event, plus CUDA's elapsed time between both
        events. The host time of the reference is only an estimate. But the GPU certainly passed the
        mark after the host recorded it and before now. A time outside of this interval is moved to
        its nearest limit, and the estimate for the reference is moved by the same amount.
        """
        assert self._reference is not None
        since_reference_s = self._reference.event.elapsed_time(mark.event) / _MS_PER_S
        time_s = self._reference_s + since_reference_s
        limited_s = min(max(time_s, mark.at), self.clock())
        self._reference_s += limited_s - time_s
        return limited_s

    def stall_s(self, first: Mark, last: Mark) -> float:
        """Return how many seconds the compute stream stood still between two marks of the same stream.

        The GPU must have passed both marks. The result is 0 for another stream than the compute stream: its
        waits do not delay the computation.
        """
        if self._compute is not None and first.stream != self._compute:
            return 0.0
        return float(first.event.elapsed_time(last.event)) / _MS_PER_S

    def step_done(self) -> None:
        """Record an event at the end of a step: the next reference for elapsed times.

        With a recent reference, elapsed times stay short. So the rounding of torch's elapsed_time()
        (float32, in milliseconds) does not matter. The current stream is taken for the compute
        stream.
        """
        if self._reference is None or self.capturing():
            return
        self._compute = self._cuda.current_stream()

        # Replace the reference by the event of an earlier step, if the GPU has passed that event.
        # Until then, the event stays the next reference, and this step records no event of its own.
        # The GPU may be behind the host by more than a step.
        if self._next_reference is not None and self.has_passed(self._next_reference):
            # time_of() counts from the old reference, so it is called before the replacement.
            next_s = self.time_of(self._next_reference)
            self.recycle(self._reference)
            self._reference = self._next_reference
            self._reference_s = next_s
            self._next_reference = None
        if self._next_reference is None:
            self._next_reference = self.mark()


class OnDevice:
    """Measures start, end and waiting time of NCCL operations, by CUDA events.

    The telemetry Recorder of this process creates this object, and calls launch() before an
    operation, launched() after the launch, wait() for the program's wait, and poll() to record the
    ends of operations. Any thread may call the methods.
    """

    def __init__(self, recorder: Any, clock: DeviceClock):
        """Create the object that measures NCCL operations on the GPU for a telemetry Recorder."""
        self._recorder = recorder
        self._clock = clock
        self._polling = threading.RLock()  # held while operations end
        self.captures = clock.capturing
        self.step_done = clock.step_done
        self.mark = clock.mark

    def timed(self, spans: list[Span]) -> TimedSpans:
        """Convert the times of spans that the GPU has completed to seconds; leave the other spans open.

        Args:
            spans: Parts of a step: (kind, begin, end), where times are CUDA events (Marks) or host seconds.
        """
        done: list[tuple[str, float, float]] = []
        still_open: list[Span] = []
        for kind, begin, end in spans:
            if not isinstance(begin, Mark) or not isinstance(end, Mark):  # seconds already
                done.append((kind, begin, end))
            elif self._clock.has_passed(end) and self._clock.has_passed(begin):
                start_s = self._clock.time_of(begin)
                duration_s = begin.event.elapsed_time(end.event) / _MS_PER_S
                done.append((kind, start_s, start_s + duration_s))
                self._clock.recycle(begin, end)
            else:
                still_open.append((kind, begin, end))
        return TimedSpans(done, still_open)

    def launch(self, op: Op) -> None:
        """Mark the start of an operation over NCCL: record a CUDA event directly before its launch."""
        self.poll(op.group)
        op.launch_mark = self._clock.mark()

    def launched(self, op: Op) -> None:
        """Mark the end of an operation without a Work: record a CUDA event on the current stream."""
        if op.work is None:
            op.end_mark = self._clock.mark()
        op.group.on_device.append(op)

    def wait(self, op: Op, wait: Callable[[], Any]) -> Any:
        """Make the current stream wait for an operation, and measure the wait by two CUDA events.

        Args:
            op: The operation.
            wait: The wait() of the operation's Work.

        Returns:
            The result of `wait`.
        """
        # An operation that is over, or that a CUDA graph captures, is not measured.
        if op.end or self.captures():
            return wait()
        # If the operation is over, _is_over() stores the duration that NCCL has measured. It is
        # read now from the Work: `op` has only a weak reference, and the program may drop the Work
        # after the wait. The result does not matter here.
        self._is_over(op)
        before = self._clock.mark()
        result = wait()
        after = self._clock.mark()
        op.waits.append((before, after))
        if op.end_mark is None:
            op.end_mark = after  # the first wait() is the earliest point after the operation
        return result

    def is_running(self, op: Op) -> bool:
        """Return whether the GPU has reached an operation that is not over, as far as the host has seen."""
        return not op.end and not op.completed_at and self.has_begun(op)

    def has_begun(self, op: Op) -> bool:
        """Return whether the GPU has reached an operation that the host has launched."""
        return op.launch_mark is None or self._clock.has_passed(op.launch_mark)

    def poll(self, group: GroupTraffic) -> None:
        """Record the ends of those operations of a group that are over.

        The end of an operation is observed by its Work or by a CUDA event after it. Some operations
        have neither: their Work was deleted, and no event was recorded. A communicator runs
        operations in the order of launch. So an unobservable operation gets the end of the next
        observable operation.
        """
        with self._polling:
            while True:
                # The oldest operations, up to and including the first with an observable end.
                count = self._count_to_observable(group)
                if count == 0:
                    return
                observed = group.on_device[count - 1]
                # The duration of a wait is read from its two events, so the GPU must have passed both.
                # The operations before `observed` have no waits: the second event of a wait would
                # have made them observable.
                has_waited = all(self._clock.has_passed(after) for _, after in observed.waits)
                if not self._is_over(observed) or not has_waited:
                    return
                for _ in range(count):
                    self._record_end(group.on_device.popleft(), observed)

    def _count_to_observable(self, group: GroupTraffic) -> int:
        """Return the position, from 1, of the first operation whose end can be observed; 0 without any."""
        for position, op in enumerate(group.on_device, start=1):
            has_work = op.work is not None and op.work() is not None
            if op.end_mark is not None or has_work:
                return position
        return 0

    def _is_over(self, op: Op) -> bool:
        """Return whether the GPU has completed an operation.

        There are two signs of it: is_completed() of the operation's Work, if the program still
        holds the Work, or a passed CUDA event after the operation (end_mark).

        When the Work is first seen completed, two values are stored in `op`: the current time, and
        the duration that NCCL has measured. The duration is stored only if telemetry, metrics or
        --holmes-adapt use it (has_listeners). The watchdog does not need it.
        """
        # op.work is a weak reference: it returns None if the program has deleted the Work.
        work = op.work() if op.work is not None else None
        if not op.completed_at and work is not None and work.is_completed():
            op.completed_at = self._recorder.clock()
            if self._recorder.has_listeners:
                with suppress(RuntimeError):  # without TORCH_NCCL_ENABLE_TIMING
                    op.duration = work._get_duration() / _MS_PER_S
        return op.completed_at > 0 or (
            op.end_mark is not None and self._clock.has_passed(op.end_mark)
        )

    def _record_end(self, op: Op, observed: Op) -> None:
        """Record the start, the end and the time of waiting of an operation that is over.

        An operation has CUDA events: launch_mark before its launch, two for each wait() of the
        program (waits), and end_mark, the first event after it. All are given back for reuse.

        Args:
            op: The operation. It also stands for the operations that were coalesced with it.
            observed: The operation whose end was observed: `op` itself, or a later operation of the
                same communicator, if the end of `op` could not be observed.
        """
        clock = self._clock
        members = (*op.coalesced, op)
        launch_mark = members[0].launch_mark  # coalesced operations begin with the first of them
        assert launch_mark is not None
        start_s, end_s = self._times_of(op, observed, launch_mark)
        op.group.last_end = end_s

        # A synchronous operation has no Work and runs on the program's stream. launched() has recorded
        # end_mark directly after it, so it delays the stream from launch_mark to end_mark.
        runs_on_current_stream = op.work is None and op.end_mark is not None
        if runs_on_current_stream:
            assert op.end_mark is not None
            op.waited = clock.stall_s(launch_mark, op.end_mark)
        else:
            op.waited = sum(clock.stall_s(before, after) for before, after in op.waits)

        # Allow all events to be used again.
        clock.recycle(*[member.launch_mark for member in members])
        for before, after in op.waits:
            clock.recycle(before, after)

        # An operation with a Work shares end_mark with its first wait, whose events were given back
        # above. Only the end_mark of an operation without Work is left.
        if op.work is None:
            clock.recycle(op.end_mark)
        op.end_mark = None
        op.waits = []
        for member in members:
            member.start = start_s
            member.launch_mark = None
        self._recorder.end(op, end_s)

    def _times_of(self, op: Op, observed: Op, launch_mark: Mark) -> _Interval:
        """Return the start and the end of an operation that is over, in seconds of the host's clock.

        The host only has bounds. The start is taken to be the earliest possible time. The end is the latest
        possible time, unless NCCL has measured the duration.

        Args:
            op: The operation.
            observed: The operation whose end was observed: `op` itself, or a later operation of the
                same communicator, if the end of `op` could not be observed.
            launch_mark: CUDA event directly before the launch.
        """
        clock = self._clock
        # The latest possible end is the earlier of two times: when the Work was first seen
        # completed (completed_at), and when the GPU passed the first event after the operation
        # (end_mark).
        end_s = observed.completed_at or self._recorder.clock()
        if observed.end_mark is not None and clock.has_passed(observed.end_mark):
            end_s = min(end_s, clock.time_of(observed.end_mark))

        # It began after the host launched it, and after the GPU passed the event before it.
        start_s = op.start
        if clock.has_passed(launch_mark):
            start_s = min(end_s, clock.time_of(launch_mark))

        if op.duration:  # NCCL has measured how long the kernel ran, but not when it began
            # A communicator runs one operation at a time, so `op` began after the operation before it.
            previous_end_s = min(op.group.last_end, end_s)
            start_s = max(start_s, previous_end_s)
            end_s = min(end_s, start_s + op.duration)
        return _Interval(start_s, end_s)
