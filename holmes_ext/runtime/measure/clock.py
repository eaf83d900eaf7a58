"""How far this node's clock is from rank 0's, by questions and answers over the job's store.

    node n:  ask/n/i = ""   at a             rank 0:  answer/n/i = its clock t      node n:  reads it at b
    offset = t - (a + b) / 2, wrong by at most (b - a) / 2; the question with the shortest round trip counts

Only each node's first process asks: all processes of a node have one monotonic clock. The store's server is
on the launcher's rank 0, so there and back take equally long when rank 0 stayed where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

QUESTIONS = 5
Clock = Callable[[], float]


def answer(store: Any, prefix: str, nodes: Sequence[int], timeout_s: float,
           clock: Clock = time.monotonic) -> None:
    """Rank 0: answer every node's questions, one after the other; who does not ask in time is left out."""
    for node in nodes:
        try:
            for number in range(QUESTIONS):
                store.wait([f"{prefix}/ask/{node}/{number}"], timedelta(seconds=timeout_s))
                store.set(f"{prefix}/answer/{node}/{number}", repr(clock()))
        except RuntimeError:
            continue


def ask(store: Any, prefix: str, node: int, timeout_s: float,
        clock: Clock = time.monotonic) -> tuple[float, float]:
    """(offset, error) in seconds: this clock + offset is rank 0's. RuntimeError: nobody answers in time."""
    best = (float("inf"), 0.0)
    for number in range(QUESTIONS):
        asked = clock()
        store.set(f"{prefix}/ask/{node}/{number}", "")
        store.wait([f"{prefix}/answer/{node}/{number}"], timedelta(seconds=timeout_s))
        theirs, now = float(store.get(f"{prefix}/answer/{node}/{number}")), clock()
        if number:  # the first one waits for its turn
            best = min(best, (now - asked, theirs - (asked + now) / 2))
    return best[1], best[0] / 2
