"""Runs gloo's blocking calls in a pipeline of threads: a thread for each step of an operation.

A tensor is cut into chunks, and every chunk passes through the same steps:

    chunk 1   [step 1][step 2][step 3]
    chunk 2           [step 1][step 2][step 3]

Each step has a thread and an inbox, and hands a chunk to the inbox of the next step. Gloo's calls release the
GIL, so the steps of different chunks overlap.

Protocol:

    1  submit()   puts all chunks of a tensor into the first inbox, and returns a Work
    2  _serve()   in each thread: takes a chunk from the inbox, runs the step, passes the chunk on
    3  Work       completes when the last step has finished the last chunk; wait() then returns
    4  close()    sends an end mark after the submitted chunks and joins the threads

No rank waits for ever after an error: the failed chunk and all later chunks still pass through every inbox,
but no step touches them any more, so each Work completes or fails.

A thread that is inside a call of gloo while the interpreter ends aborts the process. Therefore the
interpreter waits at exit until the chunks under way have arrived, or have failed because the other rank is
gone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.runtime.groups.callbacks import await_at_exit

#: Longest time that the exit of the interpreter is delayed by chunks under way, in seconds. Another rank may
#: be stuck, and neither answer nor end.
SETTLE_S = 20.0


@dataclass(frozen=True)
class ReductionTimes:
    """Times of the gradient reductions of a training step, as measured on a single rank.

    On GPUs these are times of the host only.
    """

    step: int
    bytes: int  # of gradients in all buckets
    buckets: int
    early: int  # buckets whose reduction was launched during the backward pass
    seconds: float  # from the launch of the first bucket to the end of the last
    exposed_s: float  # seconds that finish() waited
    fabric: str  # name of the group's network; "" if unknown


class Work:
    """Handle of an operation that threads of a ThreadPipeline run, similar to torch.distributed's Work.

    The operation works on the chunks of a tensor that were passed to ThreadPipeline.submit().
    """

    def __init__(self, chunk_count: int):
        """Create the handle of an operation on `chunk_count` chunks of a tensor."""
        self._chunks_left = chunk_count
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        #: First error of a step. After it, no step touches the chunks.
        self.error: Exception | None = None
        #: Set when all chunks have left the threads, successful or not.
        self.left_threads = threading.Event()
        await_at_exit(self.left_threads, SETTLE_S)

    def wait(self) -> None:
        """Wait until the operation has ended: each chunk of the tensor has passed through each step.

        Raises:
            Exception: The error of the first step that failed.
        """
        self._future.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes with None when the operation ends, or fails as wait() does."""
        return self._future

    def fail(self, error: Exception) -> None:
        """Record an error of the operation, which wait() then raises; later errors are ignored."""
        if self.error is None:
            self.error = error
            self._future.set_exception(error)

    def finish_chunk(self) -> None:
        """Record that a chunk of the tensor has left the last step; after the last chunk, let wait() return.

        The thread of the last step calls this method for each chunk.
        """
        self._chunks_left -= 1
        if self._chunks_left == 0:
            if self.error is None:
                self._future.set_result(None)
            self.left_threads.set()


#: Chunks that wait for a step, each with the handle of its operation; None is the end mark.
_Inbox = queue.SimpleQueue["tuple[Work, Any] | None"]


class ThreadPipeline:
    """Threads that run a sequence of steps on each chunk of a tensor: a thread for each step."""

    def __init__(self, name: str, *steps: Callable[[Any], None]):
        """Start a thread for each step.

        Args:
            name: The threads are named "holmes NAME 1", "holmes NAME 2" and so on.
            steps: Functions in the order of execution. Each is called with the chunks in the order of
                submit().
        """
        # A thread takes chunks from its inbox and puts them into its outbox, the inbox of the next thread.
        self._inboxes: list[_Inbox] = [queue.SimpleQueue() for _ in steps]
        outboxes: list[_Inbox | None] = [*self._inboxes[1:], None]
        self._threads = []
        for number, step in enumerate(steps):
            thread = threading.Thread(
                target=_serve,
                args=(step, self._inboxes[number], outboxes[number]),
                name=f"holmes {name} {number + 1}",
                daemon=True,
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def submit(self, chunks: Sequence[Any]) -> Work:
        """Send all chunks of a tensor through the steps, in their order, and return a handle to wait for."""
        work = Work(len(chunks))
        for chunk in chunks:
            self._inboxes[0].put((work, chunk))
        return work

    def close(self) -> None:
        """Finish the submitted chunks and end the threads."""
        self._inboxes[0].put(None)
        for thread in self._threads:
            thread.join()


def _serve(step: Callable[[Any], None], inbox: _Inbox, outbox: _Inbox | None) -> None:
    """Run a step on every chunk in the inbox, until the end mark None. This is the function of a thread.

    After an error of the step, all later chunks are passed on without running it: other ranks may have missed
    messages, so nothing after the error is reliable.

    Args:
        step: Called with a chunk.
        inbox: Pairs of a chunk's Work, the handle of the operation on all chunks of a tensor, and the chunk.
        outbox: Inbox of the next step's thread; None for the last step.
    """
    first_error: Exception | None = None
    while (task := inbox.get()) is not None:
        work, chunk = task
        if first_error is not None:
            work.fail(first_error)
        elif work.error is None:  # no earlier step of this work has failed
            try:
                step(chunk)
            except Exception as error:  # noqa: BLE001 - raised by Work.wait()
                first_error = error
                work.fail(error)
        if outbox is not None:
            outbox.put(task)
        else:
            work.finish_chunk()
    if outbox is not None:
        outbox.put(None)  # ends the thread of the next step
