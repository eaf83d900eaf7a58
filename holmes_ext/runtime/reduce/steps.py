"""Runs gloo's blocking calls in a pipeline of threads, one for each step of an operation.

Every part of a tensor passes through the same steps:

    part 1   [step 1][step 2][step 3]
    part 2           [step 1][step 2][step 3]

Each step has a thread and an inbox, and hands a part to the inbox of the next step. Gloo's calls release the
GIL, so the steps of different parts overlap.

Protocol:

    1  submit()   puts all parts of a tensor into the first inbox, and returns a Work
    2  _serve()   in each thread: takes a part from the inbox, runs the step, passes the part on
    3  Work       completes when the last step has finished the last part; wait() then returns
    4  close()    sends an end mark after the submitted parts and joins the threads

No rank waits for ever after an error: the failed part and all later parts still pass through every inbox, but
no step touches them any more, so each Work completes or fails.

A thread that is inside a call of gloo while the interpreter ends aborts the process. Therefore the
interpreter waits at exit until the parts under way have arrived, or have failed because the other rank is
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

#: Longest time that the exit of the interpreter is delayed by parts under way, in seconds. Another rank may
#: be stuck, and neither answer nor end.
SETTLE_S = 20.0


@dataclass(frozen=True)
class ReductionTimes:
    """Times of the gradient reductions of one training step, as measured on one rank.

    On GPUs these are times of the host only.
    """

    step: int
    bytes: int  # of gradients in all buckets
    buckets: int
    early: int  # buckets whose reduction was launched during the backward pass
    seconds: float  # from the launch of the first bucket to the end of the last one
    exposed_s: float  # seconds that finish() waited
    fabric: str  # name of the group's network; "" if unknown


class Work:
    """Handle of the parts of one ThreadPipeline.submit(), similar to the Work of torch.distributed."""

    def __init__(self, parts: int):
        """Make the handle of `parts` submitted parts."""
        self._parts_left = parts
        self._future: torch.futures.Future = torch.futures.Future()
        #: First error of a step, after which no step touches the parts.
        self.error: Exception | None = None
        #: Set when all parts have left the threads, successful or not.
        self.left_threads = threading.Event()
        await_at_exit(self.left_threads, SETTLE_S)

    def wait(self) -> None:
        """Wait until all parts have passed all steps; raise the error of a step that failed."""
        self._future.wait()

    def get_future(self) -> torch.futures.Future:
        """Return a future that completes, with None, or fails as wait() does."""
        return self._future

    def fail(self, error: Exception) -> None:
        """Record an error and let wait() raise it; later errors are ignored."""
        if self.error is None:
            self.error = error
            self._future.set_exception(error)

    def finish_part(self) -> None:
        """Count a part that has left the last step."""
        self._parts_left -= 1
        if self._parts_left == 0:
            if self.error is None:
                self._future.set_result(None)
            self.left_threads.set()


class ThreadPipeline:
    """Threads that run a sequence of steps, one thread for each step."""

    def __init__(self, name: str, *steps: Callable[[Any], None]):
        """Start the threads.

        Args:
            name: Part of the threads' names.
            steps: Functions of one part, in the order of execution. Each gets a thread.
        """
        # A thread takes parts from its inbox and puts them into its outbox, the inbox of the next thread.
        self._inboxes: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in steps]
        outboxes: list[queue.SimpleQueue | None] = [*self._inboxes[1:], None]
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

    def submit(self, parts: Sequence[Any]) -> Work:
        """Send all parts through the steps, in their order, and return a handle to wait for them."""
        work = Work(len(parts))
        for part in parts:
            self._inboxes[0].put((work, part))
        return work

    def close(self) -> None:
        """Finish the submitted parts and end the threads."""
        self._inboxes[0].put(None)
        for thread in self._threads:
            thread.join()


def _serve(
    step: Callable[[Any], None], inbox: queue.SimpleQueue, outbox: queue.SimpleQueue | None
) -> None:
    """Run one step on every part in the inbox, until the end mark None. This is the function of a thread.

    After an error of the step, all later parts are passed on without running it: other ranks may have missed
    messages, so nothing after the error is reliable.

    Args:
        step: Function of a part.
        inbox: Tuples of a Work and one of its parts. The Work is the handle of the submitted parts.
        outbox: Inbox of the next step's thread; None for the last step.
    """
    first_error: Exception | None = None
    while (task := inbox.get()) is not None:
        work, part = task
        if first_error is not None:
            work.fail(first_error)
        elif work.error is None:  # no earlier step of this work has failed
            try:
                step(part)
            except Exception as error:  # noqa: BLE001 - raised by Work.wait()
                first_error = error
                work.fail(error)
        if outbox is not None:
            outbox.put(task)
        else:
            work.finish_part()
    if outbox is not None:
        outbox.put(None)  # ends the thread of the next step
