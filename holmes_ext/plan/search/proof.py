"""The search by simulated time: what could beat the best simulated step is simulated, until a bound proves that no more
can, or the time is over.

    search (closed form) -> rank (its best, simulated) -> prove:
        shape           bound: plan/search/search.py's ideal_s       expanded into its arrangements
         `- arrangement     bound: plan/search/bound/least.py, of stages     bounded again, with a split
             `- arrangement     bound: least.py, of their chain        its splits simulated, those that the bounds, the
                                                                       closed form and moves of single blocks give

First what is akin to the best, its sizes and micro-batch with any recomputation and ZeRO: the sooner a good step is
known, the less is left to look at. Then the least bound comes first. Where an arrangement has one split only (no
pipeline, or chunks) its simulation settles it; else its bound stays in the certificate. Where the network between
clusters is not flat it ends after PATIENCE of them that were no better, as in search.py. Where that takes more than
ALONE_S, two processes share the work.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from math import inf
from multiprocessing import get_context
from typing import Any

from holmes_ext.plan.cost.stages import predict
from holmes_ext.plan.search.arrangement import Arrangement, arrangements
from holmes_ext.plan.search.bound.formula import Bounds
from holmes_ext.plan.search.bound.least import Least
from holmes_ext.plan.search.partition import improved
from holmes_ext.plan.search.ranking import execution_of, job_of, passes, under_way
from holmes_ext.plan.search.result import EQUAL, Candidate, Certificate, Outcome
from holmes_ext.plan.search.search import GAIN, allowed, full_to_empty, partitioned
from holmes_ext.plan.search.space import Shape
from holmes_ext.plan.simulate.fold import folded_s

#: Seconds that one process works before another is started, and processes at most.
ALONE_S, PROCESSES = 2.0, 2
#: Where the network between clusters is not flat: items after which nothing better is expected (search.py's PATIENCE).
PATIENCE = 12
#: Arrangements of the best one's kin that are bounded again, the first of every shape first, and of those simulated,
#: the quickest walked first, before all else.
EARLY = 20, 4
#: Passes up to which a step is simulated; moves of a block that are simulated where the first split comes so near, at
#: most, and their passes.
WORK, MOVES, NEAR, MOVED = 200_000, 30, 1.02, 40_000
#: Told from time to time: what is done and left, the best step so far, the gap of the certificate.
Progress = Callable[[int, int, float, float], None]


@dataclass(frozen=True)
class Arranged:
    """To be simulated: no step of it takes less than the bound. chained: whether that is the closer one; split: the one
    that it leaves, and its seconds walked pass by pass."""

    shape: Shape
    arrangement: Arrangement
    chained: bool = False
    split: tuple[int, ...] = ()
    walked_s: float = 0.0


Item = Shape | Arranged
#: What became of an item: (bound, what is to be looked at), candidates, and the bound of what is left of it.
Found = tuple[list[tuple[float, Item]], list[Candidate], float]


class Judge:
    """The two kinds of work, wherever they are done."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome

    def do(self, item: Item, bound: float, best: float) -> Found:
        """best: simulated so far; what does not beat it is left out."""
        return self._expand(item, bound, best) if isinstance(item, Shape) else self._simulate(item, bound, best)

    def _expand(self, shape: Shape, ideal: float, best: float) -> Found:
        outcome, pricing = self.outcome, self.outcome.pricing(shape)
        every, complete = arrangements(outcome.ground, shape.pipeline, shape.tensor * shape.context)
        found: list[tuple[float, Item]] = []
        for arrangement in every:
            if allowed(outcome.limits, arrangement):
                bounds = Bounds(pricing.costs(arrangement, outcome.overlap))
                bound = max(ideal, self._least(pricing, arrangement, bounds).seconds(best))
                if bound < best * (1 - EQUAL):
                    found.append((bound, Arranged(shape, arrangement)))
        return found, [], inf if complete else ideal

    def _least(self, pricing: Any, arrangement: Arrangement, bounds: Bounds) -> Least:
        ways = [price.way for price in pricing.stages(arrangement)]
        ahead = bounds.ahead() if bounds.costs.hidden is not None else ()
        return Least(pricing, arrangement, bounds, execution_of(self.outcome, pricing.shape, (), ways, ahead))

    def _simulate(self, item: Arranged, bound: float, best: float) -> Found:
        outcome, shape, arrangement = self.outcome, item.shape, item.arrangement
        pricing = outcome.pricing(shape)
        costs = pricing.costs(arrangement, outcome.overlap)
        bounds = Bounds(costs)
        formula, split = bounds.bound()
        assert split is not None
        if not item.chained and shape.virtual == 1 and shape.pipeline > 1:
            closer, own = self._least(pricing, arrangement, bounds).chained(bound, best)
            if not own:
                return [], [], inf
            return [(closer, replace(item, chained=True, split=own, walked_s=predict(costs, own).step_s))], [], inf
        known: dict[tuple[int, ...], Candidate] = {}

        def seconds_of(moved: Sequence[int]) -> float:
            own = tuple(moved)
            if own not in known and bounds.fits(own):
                one = outcome.candidate(pricing, arrangement, own, None, bound)
                known[own] = under_way(outcome, replace(one, simulated_s=folded_s(job_of(outcome, one))))
            return known[own].simulated_s if own in known else inf

        work = passes(outcome.candidate(pricing, arrangement, split), outcome.model.layers)
        if work > WORK:
            return [], [], bound
        if shape.virtual > 1 or shape.pipeline == 1:
            seconds_of(split)
            return [], [*known.values()], inf
        first = min((split, partitioned(costs, bounds, split, formula, best)[0], item.split), key=seconds_of)
        if seconds_of(first) < best * NEAR:
            tries = min(MOVES, MOVED // work)
            improved(first, seconds_of, lambda moved: list(full_to_empty(bounds, moved))[: MOVES // 3], tries)
        return [], [*known.values()], bound


_work: Judge | None = None  # of a process that another one started


def _begin(outcome: Outcome) -> None:
    global _work
    gc.disable()  # nothing here refers to itself: a tenth of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    _work = Judge(outcome)


def _done(item: Item, bound: float, best: float) -> Found:
    assert _work is not None
    return _work.do(item, bound, best)


def prove(outcome: Outcome, seconds: float = inf, progress: Progress | None = None) -> Outcome:
    """`outcome` (of rank) after so many seconds more at most: its candidates with those that were simulated here, and
    its certificate of simulated steps. A KeyboardInterrupt ends it with the best so far and interrupted set."""
    if outcome.simulated is None or outcome.interrupted:
        return outcome
    run = _Proof(outcome, seconds, progress)
    try:
        run.go()
    except KeyboardInterrupt:
        run.interrupted = True
    finally:
        run.stop()
    return run.finish()


class _Proof:
    """heap: (bound, number, item); early: (stage of it, place there, number, bound, item) of what comes before. left_s:
    the least bound of what was looked at and not settled."""

    def __init__(self, outcome: Outcome, seconds: float, progress: Progress | None):
        self.outcome, self.progress, self.begin = outcome, progress, time.monotonic()
        self.end = self.begin + seconds
        self.best, self.left_s, self.interrupted = outcome.best.simulated_s, inf, False
        self.done = self.improved = 0
        self.number = itertools.count()
        self.heap: list[tuple[float, int, Item]] = []
        self.early: list[tuple[int, float, int, float, Item]] = []
        self.early_left = [len(outcome.ideals), *EARLY]
        self.known = {(one.shape, one.arrangement, one.split) for one in outcome.candidates if one.simulated_s}
        self.more: list[Candidate] = []
        self.pool: ProcessPoolExecutor | None = None
        self.current: dict[Future[Found], tuple[float, Item, bool]] = {}

    def go(self) -> None:
        outcome, work = self.outcome, Judge(self.outcome)
        best = outcome.best.shape
        for shape, ideal in outcome.ideals.items():
            if ideal < self.best * (1 - EQUAL):
                kin = replace(shape, recompute=best.recompute, zero=best.zero) == best
                if kin and best.virtual == 1 and best.pipeline > 1:
                    self._push_early(0, ideal, ideal, shape)
                else:
                    self._push(ideal, shape)
        several = min(PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        patience = PATIENCE if outcome.ground.wan else inf
        while time.monotonic() < self.end and self.done - self.improved < patience:
            if several > 1 and self.pool is None and time.monotonic() > self.begin + ALONE_S:
                bare = replace(outcome, candidates=[], unseen=[], ideals={})
                self.pool = ProcessPoolExecutor(several, get_context("spawn"), _begin, (bare,))
            if self.pool is None:
                if not (given := next(self._next(), None)):
                    break
                bound, item, early = given
                try:
                    self._take(work.do(item, bound, self.best), early)
                except KeyboardInterrupt:
                    self.left_s = min(self.left_s, bound)
                    raise
                continue
            while len(self.current) < 2 * several and (given := next(self._next(), None)):
                self.current[self.pool.submit(_done, *given[1::-1], self.best)] = given
            if not self.current:
                break
            left_s = min(60.0, max(0.0, self.end - time.monotonic()))
            finished, _ = wait(self.current, left_s, FIRST_COMPLETED)
            for future in finished:
                _, _, early = self.current.pop(future)
                self._take(future.result(), early)

    def _next(self) -> Iterator[tuple[float, Item, bool]]:
        """What is looked at next, if it could beat the best: (bound, item, whether it is early)."""
        while self.early:
            stage, _, _, bound, item = heapq.heappop(self.early)
            if self.early_left[stage] and bound < self.best * (1 - EQUAL):
                self.early_left[stage] -= 1
                yield bound, item, True
                return
            self._push(bound, item)
        if self.heap and self.heap[0][0] < self.best * (1 - EQUAL):
            bound, _, item = heapq.heappop(self.heap)
            yield bound, item, False

    def _push(self, bound: float, item: Item) -> None:
        heapq.heappush(self.heap, (bound, next(self.number), item))

    def _push_early(self, stage: int, place: float, bound: float, item: Item) -> None:
        heapq.heappush(self.early, (stage, place, next(self.number), bound, item))

    def _take(self, found: Found, early: bool) -> None:
        items, candidates, left_s = found
        for place, (bound, item) in enumerate(sorted(items, key=lambda one: one[0])):
            if early and isinstance(item, Arranged):
                self._push_early(1 + item.chained, item.walked_s or place, bound, item)
            else:
                self._push(bound, item)
        self.left_s = min(self.left_s, left_s)
        self.more += candidates
        self.done += not any(isinstance(item, Arranged) and item.chained for _, item in items)  # those come again
        best = min([self.best, *(one.simulated_s for one in candidates)])
        self.best, self.improved = best, self.done if best < self.best * (1 - GAIN) else self.improved
        if self.progress:
            left = len(self.heap) + len(self.early) + len(self.current)
            self.progress(self.done, left, self.best, 1 - self._bound_s() / self.best)

    def _bound_s(self) -> float:
        """That no plan beats."""
        waiting = [bound for bound, _, _ in self.current.values()] + [one[3] for one in self.early]
        return min([self.best, self.left_s, *(bound for bound, _, _ in self.heap[:1]), *waiting])

    def stop(self) -> None:
        """End the processes that were started."""
        if self.pool is not None:
            own = list((self.pool._processes or {}).values())
            self.pool.shutdown(wait=False, cancel_futures=True)
            for process in own:
                process.terminate()
            for process in own:
                process.join()

    def finish(self) -> Outcome:
        outcome = self.outcome
        new = {(one.shape, one.arrangement, one.split): one for one in self.more}
        simulated = [one for one in outcome.candidates if one.simulated_s]
        simulated += [one for key, one in new.items() if key not in self.known]
        simulated.sort(key=lambda one: (one.simulated_s, one.peak_bytes))
        rest = [one for one in outcome.candidates
                if not one.simulated_s and (one.shape, one.arrangement, one.split) not in new]
        certificate = Certificate(simulated[0].simulated_s, min(self._bound_s(), simulated[0].simulated_s))
        return replace(
            outcome, candidates=[*simulated, *rest], simulated=certificate, interrupted=self.interrupted,
            seconds=outcome.seconds + time.monotonic() - self.begin,
        )
