"""The best plan for a model on a site: branch and bound over shapes, arrangements of the clusters and partitions of the
layers.

    shape        sizes, micro-batch, recomputation, ZeRO          bound: all clusters' stages together, nothing sent
     `- arrangement   order of clusters, who shares stages        bound: no split of the layers is faster
         `- partition     layers of each stage                    the step itself

What has the least bound is looked at next; when the least bound left is no better than the best step found, that step
is the best: nothing that was not looked at can beat it. With a time limit, on a network between clusters that is not
flat, or where only some orders of clusters or some partitions were tried, the certificate says within which fraction
the best lies. Everything looked at is kept, and of the rest its bound.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.memory import under_way
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate
from holmes_ext.plan.search.arrangement import Arrangement, Ground, arrangements, launcher
from holmes_ext.plan.search.balanced import balanced
from holmes_ext.plan.search.bound.formula import Bounds, ideal_s
from holmes_ext.plan.search.partition import improved
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.search.result import EQUAL, Certificate, Outcome
from holmes_ext.plan.search.space import Limits, Shape, shapes
from holmes_ext.units import format_bytes

#: Stages x layers up to which the best partition is worked out exactly while searching.
EXACT_WORK = 300
#: Stages x layers^2, all together, of the partitions worked out exactly after the search, the fastest candidates first.
POLISH_WORK = 800_000
#: Moves of a block that are tried to improve a larger one.
TRIES = 1400
#: What makes a term of the memory smaller.
FIXES = {
    "weights": "more GPUs, or a larger tensor or pipeline size",
    "gradients": "more GPUs, or a larger tensor or pipeline size",
    "optimizer": "more GPUs, or ZeRO (limit zero)",
    "activations": "a smaller micro-batch, full recomputation, or more tensor or context parallelism",
    "working": "a smaller micro-batch, or more tensor or context parallelism",
}
#: Candidates worked out at least, for the table.
ROWS = 12
#: Shapes above which one of each depth is worked out first.
MANY = 5000
#: Where the network between clusters is not flat, bounds know little of what crosses: after so many shapes and
#: arrangements without a step that is better by this part the best is taken; the certificate says what is open.
PATIENCE, GAIN = 60, 0.01


#: Told from time to time: shapes and arrangements looked at, those left, the best step so far (inf: none).
Progress = Callable[[int, int, float], None]


def search(
    site: Site, model: Model, global_batch: int, limits: Limits = Limits(), overlap: bool = False, seconds: float = inf,
    progress: Progress | None = None, rows: int = ROWS, links: Links = Links(), only: Sequence[Shape] = (),
    hides: bool = True,
) -> Outcome:
    """The best plans for `model` with `global_batch` sequences a step; HolmesError: no sizes are possible, or nothing
    fits the memory. overlap: gradients are reduced under the last backward. seconds: after so many the best so far is
    the answer. A KeyboardInterrupt does the same, with interrupted set; before anything was found it is raised on.
    links: measured ones (`holmes probe`). only: shapes to look at, instead of all. hides: see Outcome."""
    if global_batch < 1:
        raise HolmesError(f"--global-batch is {global_batch}; it must be 1 or more")
    ground = Ground.of(site, model, links=links)
    run = _Run(Outcome(ground, model, global_batch, limits, overlap, hides=hides), rows, only)
    try:
        run.go(time.monotonic(), seconds, progress)
    except KeyboardInterrupt:
        if not run.outcome.candidates:
            raise
        run.outcome.interrupted = True
    return run.finish()


@dataclass(frozen=True)
class _Arranged:
    """A shape under an arrangement: bound_s, which no partition beats, and the split that comes from it."""

    pricing: Pricing
    arrangement: Arrangement
    bounds: Bounds
    bound_s: float
    split: tuple[int, ...]


class _Run:
    """One search. heap: (bound, number, shape or arranged shape); a shape is expanded into its arrangements, an
    arrangement is worked out."""

    def __init__(self, outcome: Outcome, rows: int, only: Sequence[Shape] = ()):
        self.outcome, self.rows, self.only = outcome, rows, only
        self.heap: list[tuple[float, int, Shape | _Arranged]] = []
        self.expanded: set[Shape] = set()
        self.number = itertools.count()
        self.best = inf
        self.floor = inf  # the least bound of what was left out: orders beyond MAX_ORDERS, partitions not proven
        self.current: tuple[float, int, Shape | _Arranged] | None = None  # being looked at
        self.least_need: tuple[float, Shape] | None = None

    def go(self, start: float, seconds: float, progress: Progress | None) -> None:
        outcome = self.outcome
        done, best, improved = 0, inf, 0
        patience = PATIENCE if outcome.ground.wan else inf
        first: dict[int, tuple[float, Shape]] = {}  # of each depth of the pipeline, the one with the least bound
        try:
            every = shapes(outcome.ground, outcome.model, outcome.global_batch, outcome.limits)
            for shape in self.only or every:
                outcome.shapes += 1
                pricing = self.outcome.pricing(shape)
                ideal = max(ideal_s(outcome.ground, pricing), pricing.least_crossing_s())
                if ideal < inf:
                    outcome.ideals[shape] = ideal
                    self._push(ideal, shape)
                    if shape.virtual == 1 and shape.pipeline > 1:
                        first[shape.pipeline] = min(first.get(shape.pipeline, (inf, shape)), (ideal, shape))
                else:
                    outcome.misfits += 1
                    self._least(pricing)
            if len(self.heap) > MANY:  # one of each depth, so that there is something to compare with
                for ideal, shape in sorted(first.values()):
                    if time.monotonic() - start < seconds / 2:
                        self._expand(shape, ideal)
            while self.heap:
                bound, number, item = self.current = self.heap[0]
                if bound >= self.best * (1 - EQUAL) and len(outcome.candidates) >= self.rows:
                    break
                if (time.monotonic() - start > seconds or done - improved > patience) and outcome.candidates:
                    break
                heapq.heappop(self.heap)
                self._expand(item, bound) if isinstance(item, Shape) else self._work_out(item, bound)
                self.current = None
                done += 1
                if self.best < best * (1 - GAIN):
                    best, improved = self.best, done
                if progress and done % 16 == 0:
                    progress(done, len(self.heap), self.best)
            self._polish()
        finally:
            outcome.seconds = time.monotonic() - start

    def _push(self, bound: float, item: Shape | _Arranged) -> None:
        heapq.heappush(self.heap, (bound, next(self.number), item))

    def _expand(self, shape: Shape, ideal: float) -> None:
        """Every arrangement's bound; the one with the least is worked out at once, for a good step to compare with."""
        outcome, fitting = self.outcome, []
        if shape in self.expanded:
            return
        self.expanded.add(shape)
        pricing = outcome.pricing(shape)
        found, complete = arrangements(outcome.ground, shape.pipeline, shape.tensor * shape.context)
        if not complete:
            self.floor = min(self.floor, ideal)
        for arrangement in found:
            if not allowed(outcome.limits, arrangement):
                continue
            bounds = Bounds(pricing.costs(arrangement, outcome.overlap))
            bound, split = bounds.bound()
            if split is None:
                outcome.misfits += 1
                self._least(pricing)
            else:
                one = _Arranged(pricing, arrangement, bounds, bound, split)
                fitting.append((max(bound, ideal), next(self.number), one))
        if not fitting:
            return
        fitting.sort(key=lambda entry: entry[:2])
        for bound, _, arranged in fitting[1:]:
            if bound < self.best:
                self._push(bound, arranged)
            else:
                outcome.pruned += 1
        self._work_out(fitting[0][2], fitting[0][0])

    def _least(self, pricing: Pricing) -> None:
        """Remember the shape that comes nearest to fitting."""
        shape, portion = pricing.shape, pricing.portion
        keep = under_way(0, shape.pipeline, shape.virtual, shape.micro_batches)
        first, block, last = (
            state + factor * layer.kept_bytes
            for state, factor, layer in zip(portion.state_bytes, (1, keep, 1), portion.layers)
        )
        need = portion.blocks / shape.pipeline * block + portion.working_bytes + max(first, last)
        if self.least_need is None or need < self.least_need[0]:
            self.least_need = need, shape

    def _work_out(self, one: _Arranged, bound: float) -> None:
        split, exact = partitioned(one.bounds.costs, one.bounds, one.split, bound, self.best)
        least = None if exact else bound
        self.outcome.candidates.append(self.outcome.candidate(one.pricing, one.arrangement, split, least, one.bound_s))
        self.best = min(self.best, self.outcome.candidates[-1].formula_s)

    def _polish(self) -> None:
        """Exact partitions for the fastest candidates, as long as one could be the best."""
        outcome, found, left = self.outcome, self.outcome.candidates, POLISH_WORK
        for index in sorted(range(len(found)), key=lambda index: found[index].formula_s):
            one = found[index]
            left -= len(one.split) * outcome.model.layers**2
            if left < 0:
                break
            if one.bound_s >= self.best * (1 - EQUAL) or one.bound_s >= one.formula_s * (1 - EQUAL):
                continue
            split = balanced(outcome.costs(one))
            exact = outcome.candidate(outcome.pricing(one.shape), one.arrangement, split, None, one.least_s)
            found[index] = min(exact, replace(one, bound_s=one.formula_s), key=lambda candidate: candidate.formula_s)
            self.best = min(self.best, found[index].formula_s)

    def finish(self) -> Outcome:
        outcome = self.outcome
        if not outcome.shapes:
            ground, model = outcome.ground, outcome.model
            what = f"{ground.world} GPUs ({ground.processes} on a node), global batch {outcome.global_batch}"
            what += f", {model.heads} heads, {model.layers} layers{_said(outcome.limits)}"
            advice = "give a global batch that is a multiple of the data size, or other limits"
            raise HolmesError(f"no parallel sizes are possible: {what}; {advice}")
        if not outcome.candidates:
            raise HolmesError(self._why_not())
        outcome.candidates.sort(key=lambda candidate: (candidate.formula_s, candidate.peak_bytes))
        left = [bound for bound, _, _ in [*self.heap, *([self.current] if self.current else [])]]
        outcome.left_s = min([self.floor, *left])
        bound = min([outcome.left_s, *(candidate.bound_s for candidate in outcome.candidates)])
        outcome.formula = Certificate(outcome.best.formula_s, bound)
        outcome.unseen = sorted((bound, item) for bound, _, item in self.heap if isinstance(item, Shape))
        outcome.pruned += len(self.heap)
        return outcome

    def _why_not(self) -> str:
        """Which term of which stage is too large, and by how much, of the plan that comes nearest to fitting."""
        outcome = self.outcome
        if self.least_need is None:
            return f"no arrangement of the clusters is possible{_said(outcome.limits)}; allow other sizes"
        shape = self.least_need[1]
        pricing, split = outcome.pricing(shape), uniform(outcome.model.layers, shape.pipeline)
        one = outcome.candidate(pricing, launcher(outcome.ground, shape.pipeline), split)
        stages = zip(one.memory_bytes, one.limit_bytes, range(shape.pipeline))
        used, limit, stage = max(stages, key=lambda each: each[0] / each[1])
        terms = pricing.memory(stage, split[stage]).terms
        largest = max(terms, key=terms.__getitem__)
        has, needs, more, alone = (format_bytes(each, 4) for each in (limit, used, used - limit, terms[largest]))
        return (
            f"{outcome.model.name} fits nowhere: nearest is tensor {shape.tensor}, pipeline {shape.pipeline}, data"
            f" {shape.data}, recompute {shape.recompute}, ZeRO {shape.zero}, whose stage {stage} needs {needs} of"
            f" {has}: {largest} alone are {alone}, {more} are too much; it needs {FIXES[largest]}"
        )


def partitioned(
    costs: StageCosts, bounds: Bounds, split: tuple[int, ...], bound: float, best: float
) -> tuple[tuple[int, ...], bool]:
    """A good split by the closed form, starting from `split`, and whether none is better; bound: of all splits. Where
    that is not below `best` the start will do."""
    if costs.virtual > 1 or costs.stages == 1:
        return split, True
    if estimate(costs, split).step_s <= bound * (1 + EQUAL) or bound >= best:
        return split, False
    if costs.stages * costs.blocks <= EXACT_WORK:
        return balanced(costs), True

    def seconds_of(moved: Sequence[int]) -> float:
        return estimate(costs, moved).step_s if bounds.fits(moved) else inf

    return improved(split, seconds_of, lambda moved: full_to_empty(bounds, moved), TRIES), False


def allowed(limits: Limits, arrangement: Arrangement) -> bool:
    """Whether the limits that arrangements know let it be."""
    return bool(limits.of("clusters", [_across(arrangement)]) and limits.of("order", [arrangement.order]))


def full_to_empty(bounds: Bounds, split: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of stages: those with the most work give, those with the least take; and the ends, whose reductions may be
    exposed."""
    work = [n * each for n, each in zip(split, bounds.each)]
    stages = sorted(range(bounds.count), key=work.__getitem__)
    givers = dict.fromkeys((*stages[: -4 : -1], 0, bounds.count - 1))
    takers = dict.fromkeys((*stages[:4], 0, bounds.count // 2, bounds.count - 1))
    return ((giver, taker) for giver in givers for taker in takers if giver != taker)


def _across(arrangement: Arrangement) -> str:
    """What crosses between clusters: the pipeline, data-parallel groups, or both."""
    shared = any(len(content) > 1 for content in arrangement.contents)
    return "pipeline" if not shared else "data" if len(set(arrangement.contents)) == 1 else "both"


def _said(limits: Limits) -> str:
    if not limits.allowed:
        return ""
    return ", within " + " ".join(f"{name}={','.join(map(str, values))}" for name, values in limits.allowed.items())
