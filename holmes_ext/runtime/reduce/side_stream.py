"""CUDA stream for the buckets of a GradientReducer: it fills them there and launches their reductions.

    compute stream A   [backward]  g1 final .......... [backward]
    compute stream B        [backward]   g2 final
    side stream                               [wait g1, g2][fill][reduce ...

autograd runs each operation of the backward pass on the stream of its forward operation (torch.autograd,
"Stream semantics of backward passes"). So the gradients of a bucket may become final on several streams
(torch.compile, streams of the program). Protocol:

    1  begin_step()       records an event on the current stream before the backward pass
    2  record_gradient()  in the hook of each gradient: records an event on the hook's stream
    3  launch_after()     makes the side stream wait for the events of a bucket, and launches on it
    4  make_current_stream_wait()   after the last bucket

Only the side stream waits; no compute stream waits for another.

Lifetime of memory: memory that is allocated on the side stream is freed after finish() of the reducer. The
stream of finish() has then waited for the reduction. The side stream uses it again in the next step at the
earliest, after the event of begin_step(), and so after all operations that read it.

The order of waits was tested with recording streams (tests/runtime/reduce/test_side_stream.py), on emulated
GPUs, where torch's CUDA sanitizer reports no race, and on an H100.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Stream -> the last event recorded on it. It covers the earlier events of the stream.
StreamEvents = dict[torch.cuda.Stream, torch.cuda.Event]


class SideStream:
    """CUDA stream for the reductions of one GradientReducer.

    It waits until the gradients of a bucket are final, on whatever streams they are computed.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._step_begin: StreamEvents = {}

    def begin_step(self) -> None:
        """Make the side stream's launches of this step wait for the work so far on the current stream."""
        self.record_gradient(self._step_begin)

    @staticmethod
    def record_gradient(events: StreamEvents) -> None:
        """Record on the current stream that a gradient is final.

        Args:
            events: Events of the gradient's bucket; the event of the current stream is replaced.
        """
        stream = torch.cuda.current_stream()
        events.setdefault(stream, torch.cuda.Event()).record(stream)

    @contextmanager
    def launch_after(self, events: StreamEvents) -> Iterator[None]:
        """Launch the operations inside the `with` block on the side stream.

        They start after the given events, after the beginning of the step, and after the work on the current
        stream so far.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        for event in (*self._step_begin.values(), *events.values()):
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield

    def make_current_stream_wait(self) -> None:
        """Let the current stream wait for the work on the side stream so far."""
        torch.cuda.current_stream().wait_stream(self.stream)
