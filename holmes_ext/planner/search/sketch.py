"""A first look around: the fastest shapes by the closed form, and of those the fastest simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from holmes_ext.errors import HolmesError
from holmes_ext.plan.arrange.orders import launched
from holmes_ext.plan.cost.model import in_flight
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.partition import Split
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.bound.stages import Stages
from holmes_ext.planner.search.evaluate import Evaluator, what_crosses
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import memory_of, passes, timed
from holmes_ext.planner.search.space import CLUSTERS, Limits, shapes
from holmes_ext.units import format_bytes

#: Candidates simulated at most, each of another shape, and the passes of all of them together.
COUNT = 30
WORK = 60_000
#: Passes that one counts as where the network between clusters is not flat, and those that a stage's (or
#: chunk's) reductions hierarchically count as.
UNEVEN, HIERARCHICAL = 4, 1000
#: Times the best simulated step from which on a closed form is not simulated, for a table neither.
FAR = 1.5
#: Shapes above which one of each depth is looked at first.
MANY = 5000
#: Where the network between clusters is not flat: shapes without one that is better by this part.
PATIENCE, GAIN = 60, 0.01
#: Times the best step in closed form up to which a split is made better.
NEAR = 1.2
#: What makes a term of the memory smaller.
FIXES = {
    "weights": "more GPUs, or a larger tensor or pipeline size",
    "gradients": "more GPUs, or a larger tensor or pipeline size",
    "optimizer": "more GPUs, or ZeRO (limit zero)",
    "activations": "a smaller micro-batch, full recomputation, or more tensor or context parallelism",
    "working": "a smaller micro-batch, or more tensor or context parallelism",
}
#: Told from time to time: what is done and left, the best step so far, the gap of the optimality gap.
Progress = Callable[[int, int, float, float], None]


class Sketch:
    """rows: shapes that are looked at at least; only: instead of all."""

    def __init__(self, result: SearchResult, rows: int, only: Sequence[Shape] = ()):
        if result.global_batch < 1:
            raise HolmesError(f"--global-batch is {result.global_batch}; it must be 1 or more")
        self.result, self.rows, self.only = result, rows, only
        self.evaluator = Evaluator(result)
        self.best = inf
        #: The least bound of what was left out by the limit of orders.
        self.nearest: tuple[float, Shape] | None = None

    def run(
        self, seconds: float, progress: Progress | None = None, simulate: bool = True
    ) -> SearchResult:
        """In so many seconds of closed forms; then, if asked for, some steps are simulated."""
        result, end = self.result, time.monotonic() + seconds
        try:
            self._bound_shapes()
            self._look(end, progress)
        except KeyboardInterrupt:
            if not result.candidates:
                raise
            result.interrupted = True
        if not result.shapes:
            what = f"{result.network.world} GPUs ({result.network.processes} on a node)"
            what += f", global batch {result.global_batch}, {result.model.heads} heads"
            what += f", {result.model.layers} layers{_within(result.limits)}"
            advice = "give a global batch that is a multiple of the data size, or other limits"
            raise HolmesError(f"no parallel sizes are possible: {what}; {advice}")
        if not result.candidates:
            raise HolmesError(self._why_not())
        result.candidates.sort(key=lambda plan: (plan.formula_s, plan.peak_bytes))
        return (
            simulate_first(result, rows=self.rows)
            if simulate and not result.interrupted
            else result
        )

    def _bound_shapes(self) -> None:
        result = self.result
        all_shapes = shapes(result.network, result.model, result.global_batch, result.limits)
        for shape in self.only or all_shapes:
            result.shapes += 1
            ideal = ShapeBound(result.network, result.prices(shape), shape).seconds
            if ideal < inf:
                result.ideals[shape] = ideal
            else:
                self._misfit(shape)

    def _look(self, end: float, progress: Progress | None) -> None:
        result = self.result
        patience, since = PATIENCE if result.network.wan else inf, 0
        for number, shape in enumerate(self._in_order()):
            ideal = result.ideals[shape]
            enough = len(result.candidates) >= self.rows
            if enough and ideal >= self.best * (1 - EQUAL):
                continue
            if result.candidates and (time.monotonic() > end or since > patience):
                break
            before = self.best
            self._sketch(shape)
            since = 0 if self.best < before * (1 - GAIN) else since + 1
            if progress and number % 16 == 0:
                progress(number, len(result.ideals) - number, self.best, 1.0)

    def _in_order(self) -> Iterator[Shape]:
        """The least bound first; of many, one of each depth of the pipeline before."""
        ideals = self.result.ideals
        ordered = sorted(ideals, key=ideals.__getitem__)
        first: dict[int, Shape] = {}
        if len(ordered) > MANY:
            for shape in ordered:
                if shape.virtual == 1 and shape.pipeline > 1:
                    first.setdefault(shape.pipeline, shape)
        return iter(dict.fromkeys((*first.values(), *ordered)))

    def _sketch(self, shape: Shape) -> None:
        """The best placement of a shape by the closed form; where the network between clusters is not flat,
        the best with pipelines, data-parallel groups or both across, too: of these that form knows less."""
        result = self.result
        placed: list[tuple[float, int, Split, Stages]] = []
        for placement in self.evaluator.placements(shape)[0]:
            stages = self.evaluator.stages(shape, placement)
            split = self.evaluator.level(stages)
            if split:
                placed.append((estimate(stages.costs, split).step_s, len(placed), split, stages))
            else:
                self._misfit(shape)
        if not placed:
            return
        firsts = [min(placed)]
        if result.network.wan:
            of_kind = [
                min(
                    (item for item in placed if what_crosses(item[3].placement) == kind),
                    default=None,
                )
                for kind in CLUSTERS
            ]
            limit_s = NEAR * self.best
            firsts += [
                item for item in of_kind if item and item is not firsts[0] and item[0] < limit_s
            ]
        result.pruned += len(placed) - len(firsts)
        for seconds, _, split, stages in firsts:
            if seconds < NEAR * self.best:
                split = self.evaluator.split(stages)
            result.candidates.append(result.candidate(shape, stages.placement, split))
            self.best = min(self.best, result.candidates[-1].formula_s)

    def _misfit(self, shape: Shape) -> None:
        """Remember the shape that comes nearest to fitting."""
        self.result.misfits += 1
        job = self.result.prices(shape).job
        keep = in_flight(0, shape.pipeline, shape.virtual, shape.micro_batches)
        first, block, last = (
            state + factor * layer.kept_bytes
            for state, factor, layer in zip(job.state_bytes, (1, keep, 1), job.layers)
        )
        need = job.blocks / shape.pipeline * block + job.working_bytes + max(first, last)
        if self.nearest is None or need < self.nearest[0]:
            self.nearest = need, shape

    def _why_not(self) -> str:
        """Which term of which stage is too large, by how much, of the plan nearest to fitting."""
        result = self.result
        if self.nearest is None:
            return f"no arrangement of the clusters is possible{_within(result.limits)}; allow other sizes"
        shape = self.nearest[1]
        split = uniform(result.model.layers, shape.pipeline)
        placement = launched(result.network, shape.sizes().complete(result.network.world))
        candidate = result.candidate(shape, placement, split)
        stages = zip(candidate.memory_bytes, candidate.limit_bytes, range(shape.pipeline))
        used, limit, stage = max(stages, key=lambda entry: entry[0] / entry[1])
        terms = memory_of(result, candidate, stage).terms
        largest = max(terms, key=terms.__getitem__)
        has, needs, excess, alone = (
            format_bytes(value, 4) for value in (limit, used, used - limit, terms[largest])
        )
        return (
            f"{result.model.name} does not fit in GPU memory: nearest is tensor {shape.tensor}, pipeline "
            f"{shape.pipeline}, data {shape.data}, recompute {shape.recompute}, ZeRO {shape.zero}, whose "
            f"stage {stage} needs {needs}, {excess} more than its {has} ({largest}: {alone}); "
            f"use {FIXES[largest]}"
        )


def simulate_first(result: SearchResult, count: int = COUNT, rows: int = 1) -> SearchResult:
    """With the fastest shapes simulated and first, of `rows` also those that are not much slower, and a
    optimality gap by the shapes' bounds."""
    budget, best, layers = WORK, inf, result.model.layers
    candidates: list[Candidate] = []
    rest: list[Candidate] = []
    for number, candidate in enumerate(result.candidates):
        far = candidate.formula_s >= (best if len(candidates) >= rows else FAR * best)
        if len(candidates) == count or far:
            rest += result.candidates[number:]
            break  # the closed form seldom says more than the simulation
        shape = candidate.shape
        work = passes(shape, layers) * (UNEVEN if result.network.wan else 1)
        work += (
            HIERARCHICAL * shape.pipeline * shape.virtual * ("hierarchical" in candidate.reductions)
        )
        if work > budget:
            rest.append(candidate)
            continue
        budget -= work
        candidates.append(timed(result, candidate))
        best = min(best, candidates[-1].step_s)
    candidates.sort(key=lambda plan: plan.simulated_s)
    if result.user_layout is not None:
        result = replace(result, user_layout=timed(result, result.user_layout))
    return result.ranked([*candidates, *rest], min(result.ideals.values(), default=0.0))


def _within(limits: Limits) -> str:
    if not limits.allowed:
        return ""
    named = (f"{name}={','.join(map(str, values))}" for name, values in limits.allowed.items())
    return ", within " + " ".join(named)
