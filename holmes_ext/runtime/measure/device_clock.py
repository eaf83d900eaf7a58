"""Marks on CUDA streams: what a GPU has come by, and when, on this node's clock.

The clocks of the GPU and of the host are compared by bounds: an event cannot be over before it was recorded,
nor after it was seen to be over. The first holds with equality wherever the GPU has nothing else to do. Every
step begins from an event of its own, since elapsed_time() is a float32 of milliseconds. (Not run on a GPU so
far: tests/runtime/measure/ runs it with events that a test ends.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Mark:
    """A CUDA event, its stream, and the clock when it was recorded."""

    event: Any
    stream: Any
    at: float


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
