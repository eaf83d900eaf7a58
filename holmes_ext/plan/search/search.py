"""The best plan for a model on a site: branch and bound over shapes, arrangements of the clusters and partitions of the layers.

    shape      sizes, micro-batch, recomputation, ZeRO        bound: all clusters' stages together, nothing sent        plan/search/space.py
     `- arrangement   order of clusters, who shares stages    bound: no split of the layers is faster                   plan/search/arrangement.py, bounds.py
         `- partition     layers of each stage                the step itself                                           plan/search/partition.py

What has the least bound is looked at next; when the least bound left is no better than the best step found, that step is the best: nothing that was
not looked at can beat it. With a time limit, or where only some orders of clusters or some partitions were tried, the certificate says within
which fraction the best lies. Everything looked at is kept, and of the rest its bound.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.memory import under_way
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pricing import Pricing
from holmes_ext.plan.search.arrangement import Arrangement, Ground, arrangements, launcher
from holmes_ext.plan.search.bounds import Stages
from holmes_ext.plan.search.partition import balanced
from holmes_ext.plan.search.refine import costs_of, describe_misfit, improve
from holmes_ext.plan.search.result import EQUAL, Candidate, Certificate, Outcome
from holmes_ext.plan.search.space import Limits, Shape, shapes
from holmes_ext.plan.sizes import DEFAULT_ORDER

#: Stages x layers up to which the best partition is worked out exactly while searching.
EXACT_WORK = 300
#: Stages x layers^2, all together, of the partitions worked out exactly after the search, the fastest candidates first.
POLISH_WORK = 800_000
#: Candidates worked out at least, for the table.
ROWS = 12


#: Told from time to time: shapes and arrangements looked at, those left, the best step so far (inf: none).
Progress = Callable[[int, int, float], None]


def search(
    site: Site,
    model: Model,
    global_batch: int,
    limits: Limits = Limits(),
    overlap: bool = False,
    seconds: float = inf,
    progress: Progress | None = None,
    rows: int = ROWS,
    links: Links = Links(),
) -> Outcome:
    """The best plans for `model` with `global_batch` sequences a step; HolmesError: no sizes are possible, or nothing fits the memory.

    overlap: gradients are reduced under the last backward. seconds: after so many the best so far is the answer. A KeyboardInterrupt does
    the same, with interrupted set; before anything was found it is raised on. links: measured ones (`holmes probe`).
    """
    if global_batch < 1:
        raise HolmesError(f"--global-batch is {global_batch}; it must be 1 or more")
    ground = Ground.of(site, model, links=links)
    run = _Run(Outcome(ground, model, global_batch, limits, overlap), rows)
    try:
        run.go(time.monotonic(), seconds, progress)
    except KeyboardInterrupt:
        if not run.outcome.candidates:
            raise
        run.outcome.interrupted = True
    return run.finish()


class _Run:
    """One search. heap: (bound, number, shape or stages); a shape is expanded into its arrangements, an arrangement is worked out."""

    def __init__(self, outcome: Outcome, rows: int):
        self.outcome, self.rows = outcome, rows
        self.heap: list[tuple[float, int, Shape | Stages]] = []
        self.number = itertools.count()
        self.best = inf
        self.floor = inf  # the least bound of what was left out: orders beyond MAX_ORDERS, partitions not proven
        self.current: tuple[float, int, Shape | Stages] | None = None  # being looked at
        self.least_need: tuple[float, Shape] | None = None
        model = outcome.model
        self.useful_flops = 3 * sum(layer.forward_flops for layer in _one_sequence(model)) * outcome.global_batch

    def go(self, start: float, seconds: float, progress: Progress | None) -> None:
        outcome = self.outcome
        done = 0
        try:
            for shape in shapes(outcome.ground, outcome.model, outcome.global_batch, outcome.limits):
                outcome.shapes += 1
                pricing = self._pricing(shape)
                ideal = self._ideal(pricing)
                if ideal < inf:
                    self._push(ideal, shape)
                else:
                    outcome.misfits += 1
                    self._least(pricing)
            while self.heap:
                bound, number, item = self.current = self.heap[0]
                if bound >= self.best * (1 - EQUAL) and len(outcome.candidates) >= self.rows:
                    break
                if time.monotonic() - start > seconds and outcome.candidates:
                    break
                heapq.heappop(self.heap)
                self._expand(item, bound) if isinstance(item, Shape) else self._work_out(item, bound)
                self.current = None
                done += 1
                if progress and done % 16 == 0:
                    progress(done, len(self.heap), self.best)
            self._polish()
        finally:
            outcome.seconds = time.monotonic() - start

    def _push(self, bound: float, item: Shape | Stages) -> None:
        heapq.heappush(self.heap, (bound, next(self.number), item))

    def _pricing(self, shape: Shape) -> Pricing:
        outcome = self.outcome
        reductions = outcome.limits.allowed.get("reduction", ("flat", "two-level"))
        return Pricing(outcome.ground, outcome.model, shape, reductions, outcome.limits.memory_bytes)

    def _ideal(self, pricing: Pricing) -> float:
        """Seconds that no arrangement beats: each cluster's stages compute and talk inside stages as if they were alone, layers are divisible,
        activations take the fastest network, nothing is reduced; inf where no stages have room for the layers."""
        ground, shape, model, block = self.outcome.ground, pricing.shape, pricing.model, pricing.block
        size = ground.world // shape.pipeline
        prices = [pricing.stage(((index, size),), DEFAULT_ORDER) for index in range(len(ground.ranks))]
        forward = [block.forward_flops / p.flops + p.collective_s / 2 for p in prices]
        each = [f + block.backward_flops / p.flops + p.collective_s / 2 for f, p in zip(forward, prices)]
        if not self._has_room(pricing, max(price.limit_bytes for price in prices)):
            return inf
        stages = [ranks / size for ranks in ground.ranks]
        room = sum(count / seconds for count, seconds in zip(stages, each))
        m, v, per_stage = shape.micro_batches, shape.virtual, model.layers / shape.pipeline
        edge, edges = pricing.least_edge_s(), shape.pipeline - 1
        if v > 1:
            slowest = max(each) * per_stage
            alike = max(0.0, sum(count for count, seconds in zip(stages, each) if seconds == max(each)) - 1)
            # at most two edges at each border between clusters leave one: with many more, two neighbouring ones are on one network
            both = 2 if edges // 2 > 2 * (len(stages) - 1) else 1
            return max(slowest * (m + alike / v) + 2 * alike * edge, m * v * both * edge)
        share = max(f / seconds for f, seconds in zip(forward, each))
        weight = m - 1 - (min(shape.pipeline, m) - 1) * min(1.0, share * 1.2)  # the embedding and the output may have a greater share
        once, rounds = model.layers * min(each) + 2 * edges * edge, (m - 1) // min(shape.pipeline, m) + 1
        return max(once + max(weight, 0.0) * model.layers / room, m * model.layers / room, rounds * once, m * edge)

    def _has_room(self, pricing: Pricing, limit: float) -> bool:
        """Whether the stages could hold all layers if each had the largest memory, without embedding and output."""
        shape, block = pricing.shape, pricing.block
        if limit == inf:
            return True
        state, room, layers = pricing.bytes_of(block), limit - pricing.working, 0
        for stage in range(shape.pipeline):
            layers += int(max(0.0, room) // (state + block.kept_bytes * under_way(stage, shape.pipeline, shape.virtual, shape.micro_batches)))
            if layers >= pricing.model.layers:
                return True
        return False

    def _expand(self, shape: Shape, ideal: float) -> None:
        """Every arrangement's bound; the one with the least is worked out at once, for a good step to compare with."""
        outcome, pricing, fitting = self.outcome, self._pricing(shape), []
        found, complete = arrangements(outcome.ground, shape.pipeline, shape.tensor * shape.context)
        if not complete:
            self.floor = min(self.floor, ideal)
        wanted = outcome.limits.allowed.get("clusters")
        for arrangement in found:
            if wanted and _across(arrangement) not in wanted:
                continue
            stages = Stages(pricing, arrangement, outcome.overlap)
            bound, split = stages.bound()
            if split is None:
                outcome.misfits += 1
                self._least(pricing)
            else:
                fitting.append((max(bound, ideal), next(self.number), stages))
        if not fitting:
            return
        fitting.sort(key=lambda entry: entry[:2])
        for bound, _, stages in fitting[1:]:
            if bound < self.best:
                self._push(bound, stages)
            else:
                outcome.pruned += 1
        self._work_out(fitting[0][2], fitting[0][0])

    def _least(self, pricing: Pricing) -> None:
        """Remember the shape that comes nearest to fitting."""
        model, shape = pricing.model, pricing.shape
        keep = under_way(0, shape.pipeline, shape.virtual, shape.micro_batches)
        layers, ends = model.layers / shape.pipeline, (pricing.embedding, pricing.output)
        need = layers * (pricing.bytes_of(pricing.block) + keep * pricing.block.kept_bytes) + pricing.working
        need += max(pricing.bytes_of(layer) + layer.kept_bytes for layer in ends)
        if self.least_need is None or need < self.least_need[0]:
            self.least_need = need, shape

    def _work_out(self, stages: Stages, bound: float) -> None:
        outcome = self.outcome
        _, split = stages.bound()
        step, exact = stages.estimate(split), stages.virtual > 1 or stages.count == 1
        if not exact and step > bound * (1 + EQUAL) and bound < self.best:
            if stages.count * stages.layers <= EXACT_WORK:
                split, exact = balanced(costs_of(stages)), True
                step = stages.estimate(split)
            else:
                split, step = improve(stages, split, step)
        outcome.candidates.append(self._candidate(stages, split, step, step if exact else bound))
        self.best = min(self.best, step)

    def _polish(self) -> None:
        """Exact partitions for the fastest candidates, as long as one could be the best."""
        found, left = self.outcome.candidates, POLISH_WORK
        for index in sorted(range(len(found)), key=lambda index: found[index].step_s):
            one = found[index]
            left -= len(one.split) * self.outcome.model.layers ** 2
            if left < 0:
                break
            if one.bound_s >= self.best * (1 - EQUAL) or one.bound_s >= one.step_s * (1 - EQUAL):
                continue
            stages = self.outcome.stages(one)
            split = balanced(costs_of(stages))
            step = min(one.step_s, stages.estimate(split))
            split = split if step < one.step_s else one.split
            found[index] = self._candidate(stages, split, step, step)
            self.best = min(self.best, step)

    def _candidate(self, stages: Stages, split: Sequence[int], step: float, bound: float) -> Candidate:
        sequences, outcome, shape = self.outcome.global_batch, self.outcome, stages.pricing.shape
        return Candidate(
            shape=shape,
            arrangement=stages.arrangement,
            split=tuple(split),
            step_s=step,
            bound_s=bound,
            memory_bytes=tuple(stages.memory_bytes(split)),
            limit_bytes=tuple(stages.limits()),
            reductions=tuple(price.reduction for price in stages.prices),
            tokens_per_s=sequences * outcome.model.sequence / step,
            flops_per_gpu=self.useful_flops / step / outcome.ground.world,
            least_s=stages.bound()[0],
        )

    def finish(self) -> Outcome:
        outcome = self.outcome
        if not outcome.shapes:
            raise HolmesError(
                f"no parallel sizes are possible: {outcome.ground.world} GPUs ({outcome.ground.processes} on a node), global batch {outcome.global_batch},"
                f" {outcome.model.heads} heads, {outcome.model.layers} layers{_said(outcome.limits)}; give a global batch that is a multiple of the data size,"
                " or other limits"
            )
        if not outcome.candidates:
            raise HolmesError(self._why_not())
        outcome.candidates.sort(key=lambda candidate: (candidate.step_s, candidate.peak_bytes))
        left = [bound for bound, _, _ in [*self.heap, *([self.current] if self.current else [])]]
        outcome.left_s = min([self.floor, *left])
        bound = min([outcome.left_s, *(candidate.bound_s for candidate in outcome.candidates)])
        outcome.certificate = Certificate(outcome.best.step_s, bound)
        outcome.unseen = sorted((bound, item) for bound, _, item in self.heap if isinstance(item, Shape))
        outcome.pruned += len(self.heap)
        return outcome

    def _why_not(self) -> str:
        if self.least_need is None:
            return f"no arrangement of the clusters is possible{_said(self.outcome.limits)}; allow other sizes"
        shape = self.least_need[1]
        return describe_misfit(Stages(self._pricing(shape), launcher(self.outcome.ground, shape.pipeline), self.outcome.overlap))


def _one_sequence(model: Model):
    return replace(model, micro_batch=1, recompute="none").costs()


def _across(arrangement: Arrangement) -> str:
    """What crosses between clusters: the pipeline, data-parallel groups, or both."""
    shared = any(len(content) > 1 for content in arrangement.contents)
    return "pipeline" if not shared else "data" if len(set(arrangement.contents)) == 1 else "both"


def _said(limits: Limits) -> str:
    if not limits.allowed:
        return ""
    return ", within " + " ".join(f"{name}={','.join(map(str, values))}" for name, values in limits.allowed.items())
