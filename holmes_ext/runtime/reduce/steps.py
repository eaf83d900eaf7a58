"""Threads for gloo's blocking calls (which release the GIL): parts pass through steps with a thread each.

    part 1   [step 1][step 2][step 3]
    part 2           [step 1][step 2][step 3]          as micro-batches pass through a pipeline

A thread inside gloo's calls aborts the interpreter that ends under it. So at exit everything on its way is
waited for: it arrives, or fails because the other end is gone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.runtime.groups.callbacks import await_at_exit

#: Seconds at exit, for everything together: an end that neither answers nor goes away must not hold this one
#: up for ever.
SETTLE_S = 20.0


@dataclass(frozen=True)
class ReductionTimes:
    """Of one step, as this rank saw it. bytes: in the buffers; seconds: from the first launch to the end of
    the last bucket; exposed_s: of them finish() waited; early: buckets launched under the backward pass. On
    GPUs both are the host's times only."""

    step: int
    bytes: int
    buckets: int
    early: int
    seconds: float
    exposed_s: float
    fabric: str


class Work:
    """Parts under way: wait() returns when all are through, and raises what went wrong."""

    def __init__(self, parts: int):
        self.left = parts
        self.error: Exception | None = None
        self._future: torch.futures.Future = torch.futures.Future()
        self.out = threading.Event()  # all parts have come out of the threads, done or not
        await_at_exit(self.out, SETTLE_S)

    def wait(self) -> None:
        self._future.wait()

    def get_future(self) -> torch.futures.Future:
        return self._future

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self._future.set_exception(error)

    def part_done(self) -> None:
        self.left -= 1
        if self.left == 0:
            if self.error is None:
                self._future.set_result(None)
            self.out.set()


class Steps:
    """work = steps(parts) sends every part through the steps, functions of a part, in threads of `name`.
    After an error nothing more passes. close() ends them, and what is under way before."""

    def __init__(self, name: str, *steps: Callable[[Any], None]):
        self._inboxes: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in steps]
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(step, inbox, outbox),
                name=f"holmes {name} {number}",
                daemon=True,
            )
            for number, (step, inbox, outbox) in enumerate(
                zip(steps, self._inboxes, [*self._inboxes[1:], None]), 1
            )
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, parts: Sequence[Any]) -> Work:
        work = Work(len(parts))
        for part in parts:
            self._inboxes[0].put((work, part))
        return work

    def close(self) -> None:
        self._inboxes[0].put(None)
        for thread in self._threads:
            thread.join()


def _serve(
    step: Callable[[Any], None], inbox: queue.SimpleQueue, outbox: queue.SimpleQueue | None
) -> None:
    """One step's thread. After an error the parts of a work pass through untouched."""
    broken: Exception | None = None
    while (task := inbox.get()) is not None:
        work, part = task
        if broken is not None:
            work.fail(broken)
        elif work.error is None:
            try:
                step(part)
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                broken = error
                work.fail(error)
        if outbox is not None:
            outbox.put(task)
        else:
            work.part_done()
    if outbox is not None:
        outbox.put(None)
