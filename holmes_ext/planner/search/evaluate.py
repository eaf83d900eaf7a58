"""The work of a search: a shape taken apart, a placement bounded closer, a placement simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import floor, inf

from holmes_ext.plan.arrange.orders import Orders
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate, predict
from holmes_ext.plan.partition import Split, full_to_empty, improved
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.chain import ChainBound
from holmes_ext.planner.bound.orders import OrderBounds
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.bound.stages import Stages
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import execution_of, job_of, passes, with_flight
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.simulate.repeat import folded_s

#: Passes up to which a step is simulated.
WORK = 200_000
#: Moves of a block that are simulated where the first split comes so near, at most, and their passes.
MOVES, NEAR, MOVED_WORK = 30, 1.02, 40_000
#: Moves of a block that are tried by the closed form.
TRIES = 1400


@dataclass(frozen=True)
class PlacedShape:
    """To be simulated: no step of it is below its bound. closer: whether that is of the chain of its stages;
    split: the one that it leaves, walked pass by pass in walked_s."""

    shape: Shape
    placement: Placement
    closer: bool = False
    split: Split = ()
    walked_s: float = 0.0


Item = Shape | PlacedShape
#: What became of an item: (bound, what is to be looked at), candidates, and the bound of what is left of it.
Found = tuple[list[tuple[float, Item]], list[Candidate], float]


class Evaluator:
    def __init__(self, result: SearchResult):
        self.result, self.orders = result, Orders(result.network, result.gpus)

    def do(self, item: Item, bound: float, best: float) -> Found:
        """best: simulated so far; what does not beat it is left out."""
        if isinstance(item, Shape):
            return self.take_apart(item, bound, best)
        if not item.closer and item.shape.virtual == 1 and item.shape.pipeline > 1:
            return self.bound_closer(item, bound, best)
        return self.simulate(item, bound, best)

    def placements(self, shape: Shape) -> tuple[list[Placement], bool]:
        """Those that the limits let be, and whether none was left out."""
        sizes = shape.sizes().complete(self.result.network.world)
        every, complete = self.result.network.remember(
            ("placements", sizes), lambda: self.orders.placements(sizes)
        )
        return [
            placement for placement in every if allowed(self.result.limits, placement)
        ], complete

    def stages(self, shape: Shape, placement: Placement) -> Stages:
        costs = self.result.prices(shape).costs(placement)
        return Stages(
            self.result.prices(shape), placement, costs, execution_of(self.result, shape, (), ())
        )

    def lower_bound(self, shape: Shape, placement: Placement, costs: StageCosts) -> ChainBound:
        prices = self.result.prices(shape)
        names = [reduction.name for reduction in prices.reductions(placement)]
        return ChainBound(prices, placement, costs, execution_of(self.result, shape, (), names))

    def take_apart(self, shape: Shape, ideal: float, best: float) -> Found:
        every, complete = self.placements(shape)

        def bound_of(placement: Placement) -> ChainBound:
            return self.lower_bound(shape, placement, self.result.prices(shape).costs(placement))

        bounds = [(bound_of(placement).seconds(best), placement) for placement in every]
        left_s, sizes = inf, shape.sizes().complete(self.result.network.world)
        if not complete:
            left_s = ideal
            if shape.virtual == 1 and OrderBounds.known(self.orders, sizes):
                ring_bits = ShapeBound(
                    self.result.network, self.result.prices(shape), shape
                ).ring_bits
                more, left_s = OrderBounds(self.orders, sizes, bound_of, ring_bits).below(best)
                bounds += [
                    (bound, other)
                    for bound, other in more
                    if other not in every and allowed(self.result.limits, other)
                ]
        items: list[tuple[float, Item]] = [
            (max(ideal, bound), PlacedShape(shape, placement))
            for bound, placement in bounds
            if bound < best * (1 - EQUAL)
        ]
        return items, [], max(ideal, left_s)

    def bound_closer(self, item: PlacedShape, bound: float, best: float) -> Found:
        costs = self.result.prices(item.shape).costs(item.placement)
        closer, split = self.lower_bound(item.shape, item.placement, costs).chained(bound, best)
        if not split:
            return [], [], inf
        walked_s = predict(costs, split).step_s
        return [(closer, replace(item, closer=True, split=split, walked_s=walked_s))], [], inf

    def simulate(self, item: PlacedShape, bound: float, best: float) -> Found:
        """Of one split only (no pipeline, or chunks) its simulation settles it; else its bound is left."""
        result, shape, placement = self.result, item.shape, item.placement
        stages = self.stages(shape, placement)
        known: dict[Split, Candidate] = {}

        def seconds_of(split: Split) -> float:
            if split not in known and stages.fits(split):
                candidate = result.candidate(shape, placement, split)
                simulated_s = folded_s(job_of(result, candidate))
                known[split] = with_flight(result, replace(candidate, simulated_s=simulated_s))
            return known[split].simulated_s if split in known else inf

        even = uniform(stages.layers, stages.count)
        work = passes(shape, result.model.layers)
        if work > WORK:
            return [], [], bound
        if shape.virtual > 1 or shape.pipeline == 1:
            seconds_of(even)
            return [], [*known.values()], inf
        starts = filter(None, (self.level(stages), self.split(stages), item.split))
        first = min(starts, key=seconds_of)
        if seconds_of(first) < best * NEAR:
            improved(
                first,
                seconds_of,
                lambda split: islice(full_to_empty(_work(stages, split)), MOVES // 3),
                min(MOVES, MOVED_WORK // work),
            )
        return [], [*known.values()], bound

    def level(self, stages: Stages) -> Split:
        """The split whose slowest stage is the fastest; () where none fits."""
        if stages.run.virtual > 1 or stages.count == 1:
            even = uniform(stages.layers, stages.count)
            return even if stages.fits(even) else ()
        return levelled_blocks(stages)

    def split(self, stages: Stages) -> Split:
        """A good one by the closed form, from the level ones; () where none fits."""
        start = self.level(stages)
        if not start or stages.run.virtual > 1 or stages.count == 1:
            return start

        def seconds_of(split: Split) -> float:
            return estimate(stages.costs, split).step_s if stages.fits(split) else inf

        reduced = [row[1] / stages.m for row in stages.costs.reduction_s]
        start = min(start, levelled_blocks(stages, reduced), key=seconds_of)
        return improved(start, seconds_of, lambda split: full_to_empty(_work(stages, split)), TRIES)


def levelled_blocks(stages: Stages, more: Sequence[float] = ()) -> Split:
    """Of blocks that are alike: each to the stage that is fastest with it. more: seconds of a block
    besides."""
    most, layers = stages.most, stages.layers
    block_s = (
        [seconds + beside for seconds, beside in zip(stages.each, more)] if more else stages.each
    )
    if min(most) < 1 or sum(most) < layers:
        return ()
    counts = [1] * stages.count
    if min(block_s) > 0:  # most of them at once
        inverse = sum(1 / value for value in block_s)
        level = (
            layers + sum(extra / value for extra, value in zip(stages.extra, block_s))
        ) / inverse
        shares = [
            floor((level * (1 - 1e-9) - extra) / value)
            for extra, value in zip(stages.extra, block_s)
        ]
        counts = [max(1, min(limit, share)) for limit, share in zip(most, shares)]
    while sum(counts) > layers:  # the least of one block each was more than the share
        several = (stage for stage in range(stages.count) if counts[stage] > 1)
        counts[
            max(several, key=lambda stage: stages.extra[stage] + counts[stage] * block_s[stage])
        ] -= 1

    def with_one_more(stage: int) -> tuple[float, int]:
        return stages.extra[stage] + (counts[stage] + 1) * block_s[stage], stage

    heap = [with_one_more(stage) for stage in range(stages.count) if counts[stage] < most[stage]]
    heapify(heap)
    for _ in range(layers - sum(counts)):
        _, stage = heappop(heap)
        counts[stage] += 1
        if counts[stage] < most[stage]:
            heappush(heap, with_one_more(stage))
    return tuple(counts)


def _work(stages: Stages, split: Split) -> list[float]:
    return [layers * block_s for layers, block_s in zip(split, stages.each)]


def allowed(limits: Limits, placement: Placement) -> bool:
    """Whether the limits that placements know let it be."""
    order = limits.of("order", [placement.sizes.order])
    return bool(order and limits.of("clusters", [what_crosses(placement)]))


def what_crosses(placement: Placement) -> str:
    """Between clusters: the pipeline, data-parallel groups, or both."""
    contents = placement.stages
    if all(len(content) == 1 for content in contents):
        return "pipeline"
    return "data" if len(set(contents)) == 1 else "both"
