"""The CUDA stream on which a reducer fills its buckets and launches their reductions.

    compute stream A   [backward]  g1 ready .......... [backward]
    compute stream B        [backward]   g2 ready
    side stream                               [wait g1, g2][fill][reduce ...

autograd runs every operation of the backward pass on the stream of its forward (torch.autograd, "Stream
semantics of backward passes"), so the gradients of a bucket may become final on several streams
(torch.compile, side streams), and the hook that completes it runs on one of them. Each hook leaves an event,
all of them are waited for before the copy, and no compute stream waits for another.

Lifetimes: what is allocated here is freed after finish(), whose stream has waited for the reduction; the next
step's first use of that memory comes after armed(), so after all that read it. (Run on emulated GPUs, where
torch's CUDA sanitizer reports no race, and on an H100; the order also with recording streams,
tests/runtime/reduce/test_side_stream.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: By stream: what is recorded there once a gradient is final. A later event of a stream covers the earlier
#: ones.
Ready = dict[torch.cuda.Stream, torch.cuda.Event]


class SideStream:
    """One reducer's."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._armed: Ready = {}

    def armed(self) -> None:
        """A step's reductions come after what is on the current stream."""
        self.arrived(self._armed)

    @staticmethod
    def arrived(ready: Ready) -> None:
        """A gradient is final on the current stream."""
        stream = torch.cuda.current_stream()
        ready.setdefault(stream, torch.cuda.Event()).record(stream)

    def join(self) -> None:
        """The current stream goes on when the side stream has come here."""
        torch.cuda.current_stream().wait_stream(self.stream)

    @contextmanager
    def after(self, ready: Ready) -> Iterator[None]:
        """On the side stream, when all of these have come and what is on the current stream is done."""
        self.stream.wait_stream(torch.cuda.current_stream())
        for event in (*self._armed.values(), *ready.values()):
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield
