"""Measures operations over NCCL, which the host launches and the GPU carries out later.

CUDA events are recorded on the program's current stream, at the points in brackets:

    async_op=True    current stream    [began] ...........  [before] wait [after]
                     torch's stream            [operation]
    async_op=False   current stream    [began] [operation] [ended]           since torch 2.8; there is no Work

When an asynchronous operation ends:

    1. The Work is asked whether it is completed, at launches and waits, while the program holds it.
    2. Without the Work, the operation has ended when the stream has waited for it ([after]), which is an
    upper
       bound.
    3. With TORCH_NCCL_ENABLE_TIMING, the Work also has the duration of the operation itself.

The Work is never kept here, because it owns its outputs (WorkNCCL::outputs_ in ProcessGroupNCCL.cpp): the
weights that FSDP and ZeRO 3 gather would live too long. Every launch checks whether the oldest operations
of its group are over, so that nothing piles up in programs without training steps.

GPU times are converted to host times by bounds: an event cannot be over before it was recorded, nor after
it was seen to be over. The first bound is exact whenever the GPU is idle. Every step counts from an event
of its own, because elapsed_time() is a float32 of milliseconds.

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
    """Spans whose times are known, and those that the GPU has not completed."""

    done: list[tuple[str, float, float]]  # (kind, begin, end) in seconds
    open: list[Span]


class DeviceClock:
    """Makes marks on CUDA streams, and converts them to seconds of the host's clock."""

    def __init__(self, clock: Callable[[], float]):
        """Create a clock for the current GPU. It has no base before the first mark.

        Args:
            clock: Returns the host's time in seconds.
        """
        import torch

        self.clock = clock
        self._cuda = torch.cuda
        #: Returns whether a CUDA graph captures what is launched now. Then events cannot be queried.
        self.capturing = torch.cuda.is_current_stream_capturing
        self._free: list[Any] = []  # events that can be used again
        self._base: Mark | None = None  # elapsed times are counted from this mark
        self._base_s = 0.0  # time of the base in seconds
        self._next: Mark | None = None  # becomes the base when the GPU has completed it
        self._compute: Any = None  # the stream on which steps end

    def mark(self) -> Mark:
        """Record a CUDA event at this point of the current stream, and return it as a mark.

        The first mark becomes the base, from which elapsed times are counted. Then the returned mark is a
        second one, because the caller gives back the events of its marks.
        """
        try:
            event = self._free.pop()  # an event of an earlier mark that is not needed any more
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        stream = self._cuda.current_stream()
        event.record(stream)
        mark = Mark(event, stream, self.clock())
        if self._base is None:
            self._base = mark
            self._base_s = mark.at
            return self.mark()
        return mark

    def give_back(self, *marks: Mark | None) -> None:
        """Allow the events of marks that are not needed any more to be used again."""
        self._free += [mark.event for mark in marks if mark is not None]

    def over(self, mark: Mark) -> bool:
        """Return whether the GPU has completed everything before a mark. Then time_of() works."""
        return bool(mark.event.query() and self._base is not None and self._base.event.query())

    def time_of(self, mark: Mark) -> float:
        """Return the time in seconds at which the GPU reached a mark that is over().

        The time is kept between the moment when the mark was recorded and now. If it has to be moved, the
        base moves, too.
        """
        assert self._base is not None
        time_s = self._base_s + self._base.event.elapsed_time(mark.event) / _MS_PER_S
        bounded_s = min(max(time_s, mark.at), self.clock())
        self._base_s += bounded_s - time_s
        return bounded_s

    def stood_still(self, first: Mark, last: Mark) -> float:
        """Return the seconds between two marks that are over(), if they are on the compute stream; else 0.

        The waits of other streams do not delay the computation.
        """
        if self._compute is not None and first.stream != self._compute:
            return 0.0
        return float(first.event.elapsed_time(last.event)) / _MS_PER_S

    def step_done(self) -> None:
        """Count elapsed times from the end of this training step, as soon as the GPU has reached it.

        The current stream is taken to be the one that computes. Elapsed times are short then, so that the
        rounding of torch's elapsed_time() does not matter.
        """
        if self._base is None or self.capturing():
            return
        self._compute = self._cuda.current_stream()
        if self._next is not None and self.over(self._next):  # the GPU has reached the next base
            next_s = self.time_of(self._next)
            self.give_back(self._base)
            self._base = self._next
            self._base_s = next_s
            self._next = None
        if self._next is None:
            self._next = self.mark()


class OnDevice:
    """Measures the operations of one Recorder that run over NCCL. Any thread may call its methods."""

    def __init__(self, recorder: Any, clock: DeviceClock):
        """Create the part of a telemetry Recorder that measures operations on the GPU."""
        self._recorder = recorder
        self._clock = clock
        self._polling = threading.RLock()  # held while operations end
        self.captures = clock.capturing
        self.step_done = clock.step_done
        self.mark = clock.mark

    def timed(self, spans: list[Span]) -> TimedSpans:
        """Convert the times of spans that the GPU has completed to seconds; leave the other spans open.

        Args:
            spans: (kind, begin, end), where times are CUDA events (Marks), or seconds of the host.
        """
        done: list[tuple[str, float, float]] = []
        still_open: list[Span] = []
        for kind, begin, end in spans:
            if not isinstance(begin, Mark) or not isinstance(end, Mark):  # seconds already
                done.append((kind, begin, end))
            elif self._clock.over(end) and self._clock.over(begin):
                start_s = self._clock.time_of(begin)
                duration_s = begin.event.elapsed_time(end.event) / _MS_PER_S
                done.append((kind, start_s, start_s + duration_s))
                self._clock.give_back(begin, end)
            else:
                still_open.append((kind, begin, end))
        return TimedSpans(done, still_open)

    def launch(self, op: Op) -> None:
        """Record a CUDA event directly before an operation over NCCL is launched."""
        self.poll(op.group)
        op.began = self._clock.mark()

    def launched(self, op: Op) -> None:
        """Record a CUDA event after an operation without a Work, which runs on the current stream."""
        if op.work is None:
            op.ended = self._clock.mark()
        op.group.on_device.append(op)

    def wait(self, op: Op, wait: Callable[[], Any]) -> Any:
        """Make the current stream wait for an operation, and measure the wait by two CUDA events.

        Args:
            op: The operation.
            wait: The wait() of the operation's Work.

        Returns:
            What `wait` returns.
        """
        # An operation that is over, or that a CUDA graph captures, is not measured.
        if op.end or self.captures():
            return wait()
        self._is_over(op)  # reads the Work's duration while the program still holds the Work
        before = self._clock.mark()
        result = wait()
        after = self._clock.mark()
        op.waits.append((before, after))
        if op.ended is None:
            op.ended = after  # the first wait() is the earliest point after the operation
        return result

    def is_at(self, op: Op) -> bool:
        """Return whether the GPU has reached an operation, and the operation is not known to be over."""
        return not op.end and not op.seen_over and self.has_begun(op)

    def has_begun(self, op: Op) -> bool:
        """Return whether the GPU has reached an operation that the host has launched."""
        return op.began is None or self._clock.over(op.began)

    def poll(self, group: GroupTraffic) -> None:
        """Record the end of a group's operations that are over.

        The end of an operation cannot be observed if its Work was deleted and no event follows it. A
        communicator works in the order of the launches, so such an operation ends with the next one whose
        end can be observed.
        """
        with self._polling:
            while True:
                # Oldest operations up to the first one whose end can be observed, `last`.
                count = self._count_to_observable(group)
                if count == 0:
                    return
                last = group.on_device[count - 1]
                has_waited = all(self._clock.over(after) for _, after in last.waits)
                if not self._is_over(last) or not has_waited:
                    return
                for _ in range(count):
                    self._end(group.on_device.popleft(), last)

    def _count_to_observable(self, group: GroupTraffic) -> int:
        """Return the position, from 1, of the first operation whose end can be observed; 0 without any."""
        for position, op in enumerate(group.on_device, start=1):
            has_work = op.work is not None and op.work() is not None
            if op.ended is not None or has_work:
                return position
        return 0

    def _is_over(self, op: Op) -> bool:
        """Return whether an operation is over. If its Work exists, take its duration from there."""
        work = op.work() if op.work is not None else None
        if not op.seen_over and work is not None and work.is_completed():
            op.seen_over = self._recorder.clock()
            if self._recorder.keeps:
                with suppress(RuntimeError):  # without TORCH_NCCL_ENABLE_TIMING
                    op.duration = work._get_duration() / _MS_PER_S
        return op.seen_over > 0 or (op.ended is not None and self._clock.over(op.ended))

    def _end(self, op: Op, last: Op) -> None:
        """Record the start, the end and the time of waiting of an operation that is over.

        Args:
            op: The operation. It represents the block of operations that was coalesced with it, too.
            last: The same operation, or a later one of the communicator, whose end was observed.
        """
        clock = self._clock
        members = (*op.block, op)
        began = members[0].began
        assert began is not None

        end_s = last.seen_over or self._recorder.clock()
        if last.ended is not None and clock.over(last.ended):
            end_s = min(end_s, clock.time_of(last.ended))
        start_s = op.start
        if clock.over(began):
            start_s = min(end_s, clock.time_of(began))
        if op.duration:  # of the kernel, measured by NCCL; its start is unknown
            # The communicator may have been busy with the operation before, which ended at last_end.
            start_s = max(start_s, min(op.group.last_end, end_s))
            end_s = min(end_s, start_s + op.duration)
        op.group.last_end = end_s

        # A synchronous operation delays the current stream from its begin to its end.
        runs_on_current_stream = op.work is None and op.ended is not None
        if runs_on_current_stream:
            assert op.ended is not None
            op.waited = clock.stood_still(began, op.ended)
        else:
            op.waited = sum(clock.stood_still(before, after) for before, after in op.waits)

        # Allow all events to be used again.
        clock.give_back(*[member.began for member in members])
        for before, after in op.waits:
            clock.give_back(before, after)
        if op.work is None:
            clock.give_back(op.ended)
        op.ended = None
        op.waits = []
        for member in members:
            member.start = start_s
            member.began = None
        self._recorder.end(op, end_s)
