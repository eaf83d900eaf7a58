"""Branch and bound search for the plan with the shortest simulated step.

    shape            parallel sizes, micro-batch, recomputation, ZeRO    bound: bound/shape.py
     `- placement        nodes of every stage                            bound: bound/least.py
         `- placement        the same with a tighter bound (bound/chain.py), and a split that has this bound
             `- splits           layers of every stage, simulated

Each entry of this tree is an item. It has a lower bound on the step time of all its plans.

1. A first look (sketch.py) finds good plans by the closed form and simulates the fastest.
2. The item with the least lower bound is divided or simulated next. Before all others come the
   "early" items, because they probably contain a better plan: shapes with the parallel sizes of the
   best plan, but other recomputation or ZeRO, and their placements. Only a limited number of items
   is processed early.
3. The search ends when the least remaining bound is no better than the best simulated step: no
   other plan can be faster. With a time limit, a WAN, or if some cluster orders were left out, the
   optimality gap says how much faster another plan could be.

After ALONE_S seconds the work is shared with worker processes. The main process owns all queues; a
worker receives one item and returns its Outcome, so workers share no state.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from enum import IntEnum
from math import inf
from multiprocessing import get_context
from typing import NamedTuple

from holmes_ext.plan.shape import Shape
from holmes_ext.planner.search.evaluate import Evaluator, Item, Outcome, PlacedShape
from holmes_ext.planner.search.result import EQUAL, SearchResult
from holmes_ext.planner.search.sketch import Progress, Sketch

#: Seconds after which worker processes start, and the most processes.
ALONE_S = 2.0
MAX_PROCESSES = 2
#: Share of the time limit that the first look may take, and its share of a short limit, up to
#: LEAST_FIRST_LOOK_S seconds: from a poor first look, branch and bound finds good plans late.
FIRST_LOOK_SHARE = 0.1
SHORT_FIRST_LOOK_SHARE = 0.2
LEAST_FIRST_LOOK_S = 2.0
#: With a WAN the bounds know little of the traffic between clusters, so the search would hardly
#: ever end. It ends after PATIENCE items without a step that is shorter by the factor GAIN.
PATIENCE = 12
GAIN = 0.01
#: Most placements of the early shapes that get a tighter bound early, and most that are simulated
#: early.
MAX_EARLY_TIGHTENED = 20
MAX_EARLY_SIMULATED = 4
#: Longest wait for a worker process, in seconds.
MAX_WAIT_S = 60.0


def search(
    result: SearchResult,
    seconds: float = inf,
    progress: Progress | None = None,
    rows: int = 10,
    only: Sequence[Shape] = (),
    prove: bool = True,
    simulate: bool = True,
) -> SearchResult:
    """Search for the plan with the shortest step.

    1. The first look (sketch.py) estimates plans by the closed form, a formula for the step time
       that takes microseconds. Then it simulates the fastest of them.
    2. Branch and bound (proven) excludes plans by lower bounds and simulates others, until no plan
       can be faster than the best.

    Args:
        result: The job, its clusters and the user's limits, in a SearchResult that has no plans
            (`candidates`) yet. So it is the request of the search.
        seconds: Time limit.
        progress: Called from time to time.
        rows: Number of shapes that the caller's table shows. At least this number of shapes get a
            candidate, even if their lower bound excludes them.
        only: Shapes to examine instead of all.
        prove: Go on after the first look, until the best plan is proven or the time is over.
        simulate: Simulate the fastest plans instead of using the closed form only.

    Returns:
        The request with candidates, the fastest first. After a KeyboardInterrupt: the best so far,
        with `interrupted` set.

    Raises:
        HolmesError: No parallel sizes are possible, or no plan fits the memory.
        KeyboardInterrupt: Interrupted before any candidate was found.
    """
    begin = time.monotonic()
    if simulate:
        least_s = min(LEAST_FIRST_LOOK_S, SHORT_FIRST_LOOK_SHARE * seconds)
        first_look_s = max(least_s, FIRST_LOOK_SHARE * seconds)
    else:  # the first look is all
        first_look_s = seconds
    try:
        found = Sketch(result, rows, only).run(
            first_look_s, progress, simulate, simulation_end=begin + seconds
        )
        if prove and simulate and not found.interrupted:
            found = proven(found, begin + seconds, progress)
    finally:
        # The caller has this object, the request, even if the search ends with an error or an
        # interrupt.
        result.seconds = time.monotonic() - begin

    # `found` may be a copy of the request, so it needs the time, too.
    return replace(found, seconds=time.monotonic() - begin)


def first_look(
    result: SearchResult, seconds: float, rows: int = 1, only: Sequence[Shape] = ()
) -> SearchResult:
    """Search for good plans only, without a proof that the fastest plan found is the best.

    search() begins with this first look (sketch.py). It ranks the parallel sizes by the closed form
    (a formula for the step time that takes microseconds). Then it simulates the fastest plans.

    Args:
        result: The job, its clusters and the user's limits, in a SearchResult that has no plans
            (`candidates`) yet. So it is the request of the search.
        seconds: Time limit of the ranking by the closed form.
        rows: Number of shapes that get a candidate, even if their lower bound excludes them.
        only: Shapes to examine instead of all.

    Raises:
        HolmesError: No parallel sizes are possible, or no plan fits the memory.
    """
    return Sketch(result, rows, only).run(seconds)


def proven(result: SearchResult, end: float, progress: Progress | None = None) -> SearchResult:
    """Continue a search without proof (a first look), until its best plan is proven or the time is over.

    Args:
        result: Result of search() with prove=False.
        end: Moment of time.monotonic() at which to stop.
        progress: Called from time to time.

    Returns:
        The result with more candidates and the optimality gap of simulated steps.
    """
    run = _BranchAndBound(result, end, progress)
    try:
        run.run()
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        run.stop()
    return run.finish()


_evaluator: Evaluator | None = None  # of a worker process


def _start_worker(result: SearchResult) -> None:
    """Prepare a worker process to examine parts of the search space of the request `result`."""
    global _evaluator
    gc.disable()  # nothing here has reference cycles; saves a tenth of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    _evaluator = Evaluator(result)


def _process_in_worker(item: Item, bound_s: float, best_s: float) -> Outcome:
    """Divide, bound or simulate a part of the search space (Evaluator.process), in a worker process."""
    assert _evaluator is not None
    return _evaluator.process(item, bound_s, best_s)


class _Entry(NamedTuple):
    """Part of the search space that waits to be examined; the least lower bound comes first.

    An item is all plans of a shape (parallel sizes), or those with the same placement of the stages.
    """

    bound_s: float
    number: int  # order of creation; decides between equal bounds
    item: Item


class _Phase(IntEnum):
    """State of an item in the queue of early items; the value is its priority.

    An item is a part of the search space. Early items are near the best plan.
    """

    SHAPE = 0  # to be divided into placements
    PLACEMENT = 1  # to get a tighter bound
    TIGHTENED = 2  # placement with the tighter bound, to be simulated


class _EarlyEntry(NamedTuple):
    """Item that is examined before the main queue, because it probably has a better plan.

    An item is a part of the search space: all plans of a shape (parallel sizes), or of a placement.
    Entries are compared by their fields in this order; the smallest is examined first.
    """

    phase: _Phase  # next step of the item: divide it, tighten its bound, or simulate it
    #: Priority within the phase: lower bound in seconds (SHAPE), rank of its bound (PLACEMENT) or
    #: predicted step in seconds (TIGHTENED).
    order: float
    number: int  # counts all entries as they are created; decides between equal orders
    bound_s: float  # lower bound on the step time of the item's plans, in seconds
    item: Item


class _Task(NamedTuple):
    """Item that a process examines next, with its lower bound on the step time.

    An item is a part of the search space: all plans of a shape (parallel sizes), or of a placement.
    """

    bound_s: float
    item: Item
    early: bool  # whether it comes from the early queue


class _BranchAndBound:
    """Branch and bound search for the fastest plan, with its queues and worker processes.

    It goes on from a first look. An item is a part of the search space: all plans of a shape
    (parallel sizes), or those with the same placement. Processing an item divides it, tightens its
    lower bound or simulates its plans. Items wait in two queues:

        early_queue    items that probably have a better plan; processed first
        queue          all others, the least lower bound first

    The first finds good plans, the second raises the lower bound on all plans.
    """

    def __init__(self, result: SearchResult, end: float, progress: Progress | None):
        """Prepare the branch and bound search for a faster plan; run() does the work.

        Args:
            result: Result of a first look: plans, and the lower bound of each shape (parallel
                sizes).
            end: Moment of time.monotonic() at which to stop.
            progress: Called from time to time.
        """
        self.result = result
        self.progress = progress
        self.begin = time.monotonic()
        self.end = end
        self.best_s = result.best.step_s
        #: Least bound of all plans that were neither simulated nor excluded by their bound.
        self.remaining_s = result.unbounded_s
        self.interrupted = False
        #: Number of items processed so far.
        self.processed = 0
        #: Value of `processed` when the best step last became shorter by the fraction GAIN or more.
        self.improved_at = 0
        self.number = itertools.count()
        #: Items by lower bound. Processing the least one raises the lower bound on all plans.
        self.queue: list[_Entry] = []
        #: Items that probably have a better plan. They are processed before those of `queue`.
        self.early_queue: list[_EarlyEntry] = []
        #: Phase (next step of an item) -> number of items that may still be processed from
        #: early_queue in this phase. After that, its items move to `queue`.
        self.early_left = {
            _Phase.SHAPE: len(result.ideals),  # all shapes (`ideals`: their lower bounds)
            _Phase.PLACEMENT: MAX_EARLY_TIGHTENED,
            _Phase.TIGHTENED: MAX_EARLY_SIMULATED,
        }
        self.candidates = {candidate.key: candidate for candidate in result.candidates}
        self.pool: ProcessPoolExecutor | None = None
        #: Tasks of the worker processes.
        self.running: dict[Future[Outcome], _Task] = {}

    def run(self) -> None:
        """Examine the search space until no part can beat the best plan, or the time is over.

        With a WAN, also stop after PATIENCE parts (items) without a better plan.
        """
        self._push_shapes()
        evaluator = Evaluator(self.result, self.end)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        processes = min(cores, MAX_PROCESSES)
        patience = PATIENCE if self.result.network.wan else inf
        while time.monotonic() < self.end and self.processed - self.improved_at < patience:
            # Worker processes take a while to start. That does not pay for a short search, nor if the
            # search ends soon.
            is_long = time.monotonic() > self.begin + ALONE_S
            ends_soon = self.pool is None and time.monotonic() > self.end - ALONE_S
            if processes > 1 and is_long and not ends_soon:
                has_worked = self._process_in_workers(processes)
            else:
                has_worked = self._process_here(evaluator)
            if not has_worked:
                break

    def _push_shapes(self) -> None:
        """Queue all shapes whose lower bound is below the best step.

        A shape is the parallel sizes, recomputation and ZeRO stage. Shapes that differ from the
        best plan's only in recomputation or ZeRO stage probably have a better plan. So they go to
        the early queue, to be processed first. This holds for 1F1B over several stages only:
        other shapes have a single split of their layers, and gain nothing from the early queue's
        tighter bound over all splits.
        """
        best = self.result.best.shape
        for shape, ideal_s in self.result.ideals.items():
            if ideal_s >= self.best_s * (1 - EQUAL):
                continue  # no plan of the shape can be faster
            same_sizes = replace(shape, recompute=best.recompute, zero=best.zero) == best
            if same_sizes and best.virtual == 1 and best.pipeline > 1:
                self._push_early(_Phase.SHAPE, order=ideal_s, bound_s=ideal_s, item=shape)
            else:
                self._push(ideal_s, shape)

    def _process_here(self, evaluator: Evaluator) -> bool:
        """Examine the next part of the search space in this process; return False if none is left.

        Args:
            evaluator: Divides or simulates the part.
        """
        task = self._next_task()
        if task is None:
            return False
        try:
            outcome = evaluator.process(task.item, task.bound_s, self.best_s)
            self._record(outcome, task.early)
        except KeyboardInterrupt:
            # The item is in no queue any more, but its plans still count in the optimality gap.
            self.remaining_s = min(self.remaining_s, task.bound_s)
            raise
        return True

    def _process_in_workers(self, processes: int) -> bool:
        """Keep the workers busy with parts of the search space; wait for a result and record it.

        Each process gets a spare part, so that it need not wait for the next part.

        Args:
            processes: Number of worker processes.

        Returns:
            False if no part is left or being examined.
        """
        if self.pool is None:
            request = replace(self.result, candidates=[], ideals={})
            self.pool = ProcessPoolExecutor(
                processes, get_context("spawn"), initializer=_start_worker, initargs=(request,)
            )
        while len(self.running) < 2 * processes:
            task = self._next_task()
            if task is None:
                break
            future = self.pool.submit(_process_in_worker, task.item, task.bound_s, self.best_s)
            self.running[future] = task
        if not self.running:
            return False
        wait_s = min(MAX_WAIT_S, max(0.0, self.end - time.monotonic()))
        finished, _ = wait(self.running, wait_s, FIRST_COMPLETED)
        for future in finished:
            task = self.running.pop(future)
            self._record(future.result(), task.early)
        return True

    def _next_task(self) -> _Task | None:
        """Take the item to examine next from its queue; None if none can beat the best plan.

        An item is a part of the search space. The early queue comes first; it has the items near
        the best plan. `early_left` says how many more of each phase may be taken from it; further
        items move to the main queue. The main queue is sorted by lower bound.
        """
        while self.early_queue:
            entry = heapq.heappop(self.early_queue)
            if self.early_left[entry.phase] and entry.bound_s < self.best_s * (1 - EQUAL):
                self.early_left[entry.phase] -= 1
                return _Task(entry.bound_s, entry.item, early=True)
            # Enough early items of this phase were processed: this item waits in the main queue.
            self._push(entry.bound_s, entry.item)
        if not self._may_improve():
            return None
        bound_s, _, item = heapq.heappop(self.queue)
        return _Task(bound_s, item, early=False)

    def _may_improve(self) -> bool:
        """Return whether a part of the search space in the main queue could beat the best plan."""
        return bool(self.queue) and self.queue[0].bound_s < self.best_s * (1 - EQUAL)

    def _push(self, bound_s: float, item: Item) -> None:
        """Put a part of the search space into the main queue, by its lower bound in seconds."""
        heapq.heappush(self.queue, _Entry(bound_s, next(self.number), item))

    def _push_early(self, phase: _Phase, order: float, bound_s: float, item: Item) -> None:
        """Put a part of the search space into the queue that is examined before the main queue."""
        entry = _EarlyEntry(phase, order, next(self.number), bound_s, item)
        heapq.heappush(self.early_queue, entry)

    def _record(self, outcome: Outcome, early: bool) -> None:
        """Keep the results of examining a part of the search space (item), and queue the new items.

        An item is a part of the search space: all plans of a shape (parallel sizes), or those with
        the same placement. A placement is first tightened (its lower bound is computed more
        precisely), then simulated. Items near the best plan wait in the early queue, to be processed
        first; the others in the main queue.

        Args:
            outcome: Result of the work on an item: smaller items, and simulated plans.
            early: The item came from the early queue. Then the new placements go there, too.
        """
        # The new items.
        by_bound = sorted(outcome.items, key=lambda entry: entry.bound_s)
        for rank, (bound_s, item) in enumerate(by_bound):
            if early and isinstance(item, PlacedShape):
                if item.is_tightened:
                    # The placement whose split has the shortest predicted step is simulated first.
                    phase, order = _Phase.TIGHTENED, item.predicted_s
                else:
                    # By rank among the placements of the same shape, so the best of each shape come
                    # first.
                    phase, order = _Phase.PLACEMENT, float(rank)
                self._push_early(phase, order, bound_s, item)
            else:
                self._push(bound_s, item)

        # The simulated plans. A plan that is simulated already stays as it is.
        self.remaining_s = min(self.remaining_s, outcome.remaining_s)
        for candidate in outcome.candidates:
            previous = self.candidates.get(candidate.key)
            if previous is None or not previous.simulated_s:
                self.candidates[candidate.key] = candidate

        # `processed` counts the items that could give a better plan. Tightening a bound cannot: it
        # gives back the same placement as the only item, so that is not counted.
        only_tightened = any(
            isinstance(item, PlacedShape) and item.is_tightened for _, item in outcome.items
        )
        if not only_tightened:
            self.processed += 1
        best_s = min([self.best_s, *(candidate.simulated_s for candidate in outcome.candidates)])
        if best_s < self.best_s * (1 - GAIN):
            self.improved_at = self.processed
        self.best_s = best_s
        if self.progress:
            waiting = len(self.queue) if self._may_improve() else 0
            left = waiting + len(self.early_queue) + len(self.running)
            gap = 1 - self._bound_s() / self.best_s
            self.progress(self.processed, left, self.best_s, gap)

    def _bound_s(self) -> float:
        """Return a lower bound on the step time of every plan, in seconds.

        It is the least bound of all items that are neither simulated nor excluded.
        """
        bounds_s = [self.best_s, self.remaining_s]
        bounds_s += [entry.bound_s for entry in self.queue[:1]]  # the first of a heap is the least
        bounds_s += [task.bound_s for task in self.running.values()]
        bounds_s += [entry.bound_s for entry in self.early_queue]
        return min(bounds_s)

    def stop(self) -> None:
        """End the worker processes of the search, if any were started."""
        if self.pool is not None:
            workers = list((self.pool._processes or {}).values())
            self.pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()

    def finish(self) -> SearchResult:
        """Return the search result: simulated plans first, then the others, each part sorted by step time."""
        ranked = sorted(
            self.candidates.values(),
            key=lambda plan: (not plan.simulated_s, plan.step_s, plan.peak_bytes),
        )
        return replace(
            self.result.ranked(ranked, self._bound_s()),
            interrupted=self.interrupted,
            pruned=self.result.pruned + len(self.queue),  # the rest of the queue is not examined
        )
