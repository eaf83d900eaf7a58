"""The best plan for a model on a site: branch and bound by simulated time.

    shape            sizes, micro-batch, recomputation, ZeRO     bound: bound/shape.py
     `- placement        which nodes hold which stage            bound: bound/least.py, of stages
         `- placement        the same, bounded closer, with a split of the layers that the bound leaves
             `- partition        simulated

First a look around by the closed form, of which the fastest are simulated. Then what has the least bound is
looked at next, before all else the best one's sizes and micro-batch with other recomputation and ZeRO. When
the least bound left is no better than the best step, nothing can beat it. With a time limit, a WAN, or only
some orders of clusters the optimality gap says within which fraction the best lies. After ALONE_S two
processes share the work.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from math import inf
from multiprocessing import get_context

from holmes_ext.plan.shape import Shape
from holmes_ext.planner.search.evaluate import Evaluator, Found, Item, PlacedShape
from holmes_ext.planner.search.result import EQUAL, SearchResult
from holmes_ext.planner.search.sketch import Progress, Sketch

#: Seconds that one process works before another is started, and processes at most.
ALONE_S, PROCESSES = 2.0, 2
#: Part of the seconds in which the closed form looks for what is simulated first.
FIRST = 0.1
#: Where the network between clusters is not flat bounds know little of what crosses: after so many items
#: without a step that is better by this part the best is taken; the optimality gap says what is open.
PATIENCE, GAIN = 12, 0.01
#: Placements of the best one's kin that are bounded closer, the first of every shape first, and of those
#: simulated, the quickest walked first, before all else.
EARLY = 20, 4


def search(
    result: SearchResult,
    seconds: float = inf,
    progress: Progress | None = None,
    rows: int = 10,
    only: Sequence[Shape] = (),
    prove: bool = True,
    simulate: bool = True,
) -> SearchResult:
    """`result`, asked for and empty, with what is found in so many seconds. rows: shapes that a table shows;
    only: shapes to look at; prove: go on after the first look; simulate: not closed forms alone.

    HolmesError: no sizes are possible, or nothing fits the memory. A KeyboardInterrupt ends it with the best
    so far (`interrupted`), or is raised on where there is none.
    """
    begin = time.monotonic()
    sketch = Sketch(result, rows, only)
    try:
        first_look = sketch.run(FIRST * seconds if simulate else seconds, progress, simulate)
        if prove and simulate and not first_look.interrupted:
            first_look = proven(first_look, begin + seconds, progress)
    finally:
        result.seconds = time.monotonic() - begin
    return replace(first_look, seconds=time.monotonic() - begin)


def proven(result: SearchResult, end: float, progress: Progress | None = None) -> SearchResult:
    """`result` of a first look, until the time `end` at most, with an optimality gap of simulated steps."""
    run = _Proof(result, end, progress)
    try:
        run.go()
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        run.stop()
    return run.finish()


_evaluator: Evaluator | None = None  # of a process that another one started


def _begin(result: SearchResult) -> None:
    global _evaluator
    gc.disable()  # nothing here refers to itself: a tenth of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    _evaluator = Evaluator(result)


def _done(item: Item, bound: float, best: float) -> Found:
    assert _evaluator is not None
    return _evaluator.do(item, bound, best)


class _Proof:
    """heap: (bound, number, item); early: (stage of it, place there, number, bound, item) of what comes
    before. left_s: the least bound of what was looked at and not settled."""

    def __init__(self, result: SearchResult, end: float, progress: Progress | None):
        self.result, self.progress, self.begin, self.end = result, progress, time.monotonic(), end
        self.best, self.left_s, self.interrupted = result.best.step_s, inf, False
        self.done = self.improved = 0
        self.number = itertools.count()
        self.heap: list[tuple[float, int, Item]] = []
        self.early: list[tuple[int, float, int, float, Item]] = []
        self.early_left = [len(result.ideals), *EARLY]
        self.candidates = {candidate.key: candidate for candidate in result.candidates}
        self.pool: ProcessPoolExecutor | None = None
        self.current: dict[Future[Found], tuple[float, Item, bool]] = {}

    def go(self) -> None:
        best = self.result.best.shape
        for shape, ideal in self.result.ideals.items():
            if ideal < self.best * (1 - EQUAL):
                kin = replace(shape, recompute=best.recompute, zero=best.zero) == best
                if kin and best.virtual == 1 and best.pipeline > 1:
                    self._push_early(0, ideal, ideal, shape)
                else:
                    self._push(ideal, shape)
        evaluator = Evaluator(self.result)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        patience = PATIENCE if self.result.network.wan else inf
        while time.monotonic() < self.end and self.done - self.improved < patience:
            if min(cores, PROCESSES) > 1 and time.monotonic() > self.begin + ALONE_S:
                if not self._share(min(cores, PROCESSES)):
                    break
            elif not self._alone(evaluator):
                break

    def _alone(self, evaluator: Evaluator) -> bool:
        """One item; False where none is left."""
        entry = next(self._next(), None)
        if entry is None:
            return False
        bound, item, early = entry
        try:
            self._take(evaluator.do(item, bound, self.best), early)
        except KeyboardInterrupt:
            self.left_s = min(self.left_s, bound)
            raise
        return True

    def _share(self, processes: int) -> bool:
        """The same with processes that have work and one item more each."""
        if self.pool is None:
            bare = replace(self.result, candidates=[], ideals={})
            self.pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (bare,))
        while len(self.current) < 2 * processes and (entry := next(self._next(), None)):
            bound, item, _ = entry
            self.current[self.pool.submit(_done, item, bound, self.best)] = entry
        if not self.current:
            return False
        left_s = min(60.0, max(0.0, self.end - time.monotonic()))
        finished, _ = wait(self.current, left_s, FIRST_COMPLETED)
        for future in finished:
            _, _, early = self.current.pop(future)
            self._take(future.result(), early)
        return True

    def _next(self) -> Iterator[tuple[float, Item, bool]]:
        """What is looked at next, if it could beat the best: (bound, item, whether it is early)."""
        while self.early:
            stage, _, _, bound, item = heapq.heappop(self.early)
            if self.early_left[stage] and bound < self.best * (1 - EQUAL):
                self.early_left[stage] -= 1
                yield bound, item, True
                return
            self._push(bound, item)
        if self._waits():
            bound, _, item = heapq.heappop(self.heap)
            yield bound, item, False

    def _waits(self) -> bool:
        """Whether something in the heap could beat the best."""
        return bool(self.heap) and self.heap[0][0] < self.best * (1 - EQUAL)

    def _push(self, bound: float, item: Item) -> None:
        heapq.heappush(self.heap, (bound, next(self.number), item))

    def _push_early(self, stage: int, place: float, bound: float, item: Item) -> None:
        heapq.heappush(self.early, (stage, place, next(self.number), bound, item))

    def _take(self, outcome: Found, early: bool) -> None:
        items, candidates, left_s = outcome
        for place, (bound, item) in enumerate(sorted(items, key=lambda pair: pair[0])):
            if early and isinstance(item, PlacedShape):
                self._push_early(1 + item.closer, item.walked_s or place, bound, item)
            else:
                self._push(bound, item)
        self.left_s = min(self.left_s, left_s)
        for plan in candidates:
            known = self.candidates.get(plan.key)
            if known is None or not known.simulated_s:
                self.candidates[plan.key] = plan
        again = any(isinstance(item, PlacedShape) and item.closer for _, item in items)
        self.done += not again
        best = min([self.best, *(candidate.simulated_s for candidate in candidates)])
        if best < self.best * (1 - GAIN):
            self.improved = self.done
        self.best = best
        if self.progress:
            remaining = len(self.heap) * self._waits() + len(self.early) + len(self.current)
            self.progress(self.done, remaining, self.best, 1 - self._bound_s() / self.best)

    def _bound_s(self) -> float:
        """That no plan beats."""
        waiting = [bound for bound, _, _ in self.current.values()]
        waiting += [bound for _, _, _, bound, _ in self.early]
        return min([self.best, self.left_s, *(bound for bound, _, _ in self.heap[:1]), *waiting])

    def stop(self) -> None:
        """End the processes that were started."""
        if self.pool is not None:
            started = list((self.pool._processes or {}).values())
            self.pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.terminate()
            for process in started:
                process.join()

    def finish(self) -> SearchResult:
        ranked = sorted(
            self.candidates.values(),
            key=lambda plan: (not plan.simulated_s, plan.step_s, plan.peak_bytes),
        )
        return replace(
            self.result.ranked(ranked, self._bound_s()),
            interrupted=self.interrupted,
            pruned=self.result.pruned + len(self.heap),
        )
