"""Operations over NCCL: the host launches them and goes on, the GPU carries them out; what is known of that.

    async_op=True    current stream    [began] ...........  [before] wait [after]
                     torch's stream            [operation]
    async_op=False   current stream    [began] [operation] [ended]           since torch 2.8; there is no Work

torch's Work is never kept: it owns its outputs (ProcessGroupNCCL.cpp: WorkNCCL::outputs_), so FSDP's and ZeRO
3's gathered weights would live as long as it does here. Marks tell instead; every launch
looks whether the oldest of its group is over, so that nothing piles up in programs without steps. An
asynchronous operation ends when torch says so, asked at launches and waits while the program holds the Work;
else where the stream has waited for it: an upper bound. With TORCH_NCCL_ENABLE_TIMING and the Work at hand
its own duration counts.

The clocks of the GPU and of the host are compared by bounds: an event cannot be over before it was recorded,
nor after it was seen to be over. The first holds with equality wherever the GPU has nothing else to do. Every
step begins from an event of its own, since elapsed_time() is a float32 of milliseconds. (Not run on a GPU so
far: tests/runtime/measure/ runs it with events that a test ends.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holmes_ext.runtime.measure.operations import GroupTraffic, Mark, Op


class DeviceClock:
    """Marks on the current CUDA stream, in seconds of `clock`; from any thread of one device."""

    def __init__(self, clock: Callable[[], float]):
        import torch

        self.clock, self._cuda = clock, torch.cuda
        #: Whether what is launched now goes into a CUDA graph instead: events cannot be asked there.
        self.capturing = torch.cuda.is_current_stream_capturing
        self._free: list[Any] = []
        self._base: Mark | None = None  # what elapsed times are counted from
        self._base_s = 0.0  # its time
        self._next: Mark | None = None  # the next base, once it is over
        self._compute: Any = None  # the stream on which steps end

    def mark(self) -> Mark:
        """Here on the current stream."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        stream = self._cuda.current_stream()
        event.record(stream)
        mark = Mark(event, stream, self.clock())
        if self._base is None:
            self._base, self._base_s = mark, mark.at
            return self.mark()
        return mark

    def give_back(self, *marks: Mark | None) -> None:
        """Nobody asks for these again."""
        self._free += [mark.event for mark in marks if mark is not None]

    def over(self, mark: Mark) -> bool:
        """Whether the stream has come by; then its time can be told."""
        return bool(mark.event.query() and self._base is not None and self._base.event.query())

    def time_of(self, mark: Mark) -> float:
        """Of a mark that is over()."""
        assert self._base is not None
        at = self._base_s + self._base.event.elapsed_time(mark.event) / 1e3
        bounded = min(max(at, mark.at), self.clock())
        self._base_s += bounded - at
        return bounded

    def stood_still(self, first: Mark, last: Mark) -> float:
        """Between two marks that are over(), on the compute stream; other streams' waits cost nothing."""
        computes = self._compute is None or first.stream == self._compute
        return float(first.event.elapsed_time(last.event)) / 1e3 if computes else 0.0

    def step_done(self) -> None:
        """Count from about here on, on the compute stream."""
        if self._base is None or self.capturing():
            return
        self._compute = self._cuda.current_stream()
        if self._next is not None and self.over(self._next):
            at, old = self.time_of(self._next), self._base
            self._base, self._base_s, self._next = self._next, at, None
            self.give_back(old)
        if self._next is None:
            self._next = self.mark()


class OnDevice:
    """Of one Recorder. Called from any thread: the watchdog's looks too."""

    def __init__(self, recorder: Any, clock: DeviceClock):
        self._recorder, self._clock = recorder, clock
        self._polling = threading.RLock()
        self.captures, self.step_done, self.mark = clock.capturing, clock.step_done, clock.mark

    def timed(
        self, spans: list[tuple[str, Any, Any]]
    ) -> tuple[list[tuple[str, float, float]], list[Any]]:
        """(those that the GPU has come by, in seconds; the others). Spans in seconds are as they are."""
        done, left = [], []
        for kind, begun, ended in spans:
            if not isinstance(begun, Mark) or not isinstance(ended, Mark):
                done.append((kind, begun, ended))
            elif self._clock.over(ended) and self._clock.over(begun):
                start = self._clock.time_of(begun)
                done.append((kind, start, start + begun.event.elapsed_time(ended.event) / 1e3))
                self._clock.give_back(begun, ended)
            else:
                left.append((kind, begun, ended))
        return done, left

    def launch(self, op: Op) -> None:
        """Before its launch."""
        self.poll(op.group)
        op.began = self._clock.mark()

    def launched(self, op: Op) -> None:
        """After it; without a Work it runs on the compute stream."""
        if op.work is None:
            op.ended = self._clock.mark()
        op.group.on_device.append(op)

    def wait(self, op: Op, wait: Callable[[], Any]) -> Any:
        """wait() makes the compute stream wait."""
        if op.end or self.captures():
            return wait()
        self._is_over(op)
        before = self._clock.mark()
        result = wait()
        after = self._clock.mark()
        op.waits.append((before, after))
        op.ended = op.ended or after
        return result

    def is_at(self, op: Op) -> bool:
        """Whether it has begun, and is not over as far as anybody knows."""
        return not op.end and not op.seen_over and self.has_begun(op)

    def has_begun(self, op: Op) -> bool:
        """Whether the compute stream has come to it."""
        return op.began is None or self._clock.over(op.began)

    def poll(self, group: GroupTraffic) -> None:
        """End what is over by now: a communicator works in order, so one that was dropped ends with a later
        one."""
        with self._polling:
            while count := self._first_known(group):
                last = group.on_device[count - 1]
                if not self._is_over(last) or not all(
                    self._clock.over(after) for _, after in last.waits
                ):
                    return
                for _ in range(count):
                    self._end(group.on_device.popleft(), last)

    def _first_known(self, group: GroupTraffic) -> int:
        """How many operations there are up to the first whose end can be told; 0 for none."""
        ops = enumerate(group.on_device, 1)
        return next(
            (
                n
                for n, op in ops
                if op.ended is not None or (op.work is not None and op.work() is not None)
            ),
            0,
        )

    def _is_over(self, op: Op) -> bool:
        work = op.work() if op.work is not None else None
        if not op.seen_over and work is not None and work.is_completed():
            op.seen_over = self._recorder.clock()
            if self._recorder.keeps:
                with suppress(RuntimeError):  # without TORCH_NCCL_ENABLE_TIMING
                    op.duration = work._get_duration() / 1e3
        return op.seen_over > 0 or (op.ended is not None and self._clock.over(op.ended))

    def _end(self, op: Op, last: Op) -> None:
        """End `op`: `last`, the same operation or a later one, is over."""
        clock, ops = self._clock, (*op.block, op)
        began = ops[0].began
        assert began is not None
        end = last.seen_over or self._recorder.clock()
        if last.ended is not None and clock.over(last.ended):
            end = min(end, clock.time_of(last.ended))
        start = min(end, clock.time_of(began)) if clock.over(began) else op.start
        if op.duration:  # from where it was its turn
            start = max(start, min(op.group.last_end, end))
            end = min(end, start + op.duration)
        op.group.last_end = end
        ran = [(began, op.ended)] if op.work is None and op.ended is not None else op.waits
        op.waited = sum(clock.stood_still(*pair) for pair in ran)
        marks = [member.began for member in ops] + [mark for pair in op.waits for mark in pair]
        clock.give_back(*marks, op.ended if op.work is None else None)
        op.ended, op.waits = None, []
        for member in ops:
            member.start, member.began = start, None
        self._recorder.end(op, end)
