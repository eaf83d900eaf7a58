"""Work on an item of the search: list a shape's placements, tighten a bound, simulate a placement.

An item is an entry of the search tree (search.py): a shape, or a shape with a placement of its
stages on cluster nodes. A split is the number of layers (transformer blocks) of each stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import floor, inf
from typing import NamedTuple

from holmes_ext.plan.arrange.orders import Orders
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate, predict
from holmes_ext.plan.partition import Split, full_to_empty, improved
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.chain import ChainBound
from holmes_ext.planner.bound.orders import OrderBounds
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.bound.stages import StageBounds
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import execution_of, job_of, passes, with_flight
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.simulate.repeat import folded_s

#: Most passes of a step that is simulated.
MAX_PASSES = 200_000
#: A split is improved by moving blocks if its simulated step is within this factor of the best
#: step. At most MAX_MOVES moves are simulated, with MAX_MOVED_PASSES passes together.
NEAR = 1.02
MAX_MOVES = 30
MAX_MOVED_PASSES = 40_000
#: Most moves of a block that are tried with the closed form.
MAX_TRIES = 1400
#: Margin for quotients that are rounded down to whole blocks.
ROUNDING = 1e-9


@dataclass(frozen=True)
class PlacedShape:
    """All plans with the same parallel sizes and the same nodes of every stage.

    They are an item of the search: they differ only in the split (number of layers of each stage),
    and are not simulated yet.
    """

    shape: Shape
    placement: Placement
    #: The item has the tighter of two lower bounds (bound/chain.py).
    is_tightened: bool = False
    #: Then: a split of the layers that has this bound, and its step time by the closed form, in
    #: seconds.
    split: Split = ()
    predicted_s: float = 0.0


Item = Shape | PlacedShape


class BoundedItem(NamedTuple):
    """A part of the search space, and a lower bound on its plans' step times, in seconds."""

    bound_s: float
    item: Item


class Outcome(NamedTuple):
    """Result of examining a part of the search space (an item).

    It has smaller items, simulated plans, and a lower bound on all plans that were left out. An
    item is all plans of a shape (parallel sizes), or those of them with the same placement of the
    stages.
    """

    #: Smaller items to examine.
    items: list[BoundedItem]
    #: Simulated plans.
    candidates: list[Candidate]
    #: Lower bound on the step time of the plans that neither are in `items` nor were simulated; inf
    #: if none.
    remaining_s: float


class Placements(NamedTuple):
    """Placements of a shape: ways to put its pipeline stages on nodes."""

    listed: list[Placement]
    complete: bool  # no order of the clusters was left out


class Evaluator:
    """Examination of the search space: divides its parts, or simulates their plans.

    Such a part (an item) is a shape (parallel sizes, micro-batch, recomputation, ZeRO stage), or a
    shape with a placement (the nodes of every stage).
    """

    def __init__(self, result: SearchResult, end: float = inf):
        """Create the object that divides and simulates the parts of a job's search space.

        Args:
            result: Request of the search: the job, its network, and the limits of the user.
            end: Moment of time.monotonic() at which simulations should have ended. A placement that
                would probably take longer is not simulated. After this moment, no further split of
                a placement is simulated.
        """
        self.result = result
        self.end = end
        #: Longest time of a simulation so far, in seconds for each pass of the step.
        self.pass_s = 0.0
        self.orders = Orders(result.network, result.gpus)

    def process(self, item: Item, bound_s: float, best_s: float) -> Outcome:
        """Examine a part of the search space (an item): divide it, tighten its lower bound or simulate it.

            a shape              becomes items: each placement of its stages
            a placement          becomes the same item with a tighter bound, if it has several
                                 splits of the layers
            a tightened item     is simulated, and so is a placement with a single split

        The caller queues the new items and calls again.

        Args:
            item: Shape (parallel sizes), or shape with a placement.
            bound_s: Lower bound on the step time of the item's plans, in seconds.
            best_s: Best simulated step time so far; plans that cannot be faster are left out.
        """
        if isinstance(item, Shape):
            return self._list_placements(item, bound_s, best_s)
        has_splits = item.shape.virtual == 1 and item.shape.pipeline > 1
        if has_splits and not item.is_tightened:
            return self._tighten(item, bound_s, best_s)
        return self._simulate(item, bound_s, best_s)

    def placements(self, shape: Shape) -> Placements:
        """Return the placements of a shape that the user's limits allow.

        A shape is the parallel sizes; a placement says which nodes hold which stage.
        """
        network = self.result.network
        sizes = shape.sizes().complete(network.world)
        # Shapes with the same sizes share their placements.
        listed, complete = network.remember(
            ("placements", sizes), lambda: self.orders.placements(sizes)
        )
        allowed = [placement for placement in listed if is_allowed(self.result.limits, placement)]
        return Placements(allowed, complete)

    def stage_bounds(self, shape: Shape, placement: Placement) -> StageBounds:
        """Return the compute times and memory limits of the stages in a placement.

        They hold for every split, the number of layers of each stage.
        """
        prices = self.result.prices(shape)
        run = execution_of(self.result, shape, split=(), reductions=())
        return StageBounds(prices, placement, prices.costs(placement), run)

    def lower_bound(self, shape: Shape, placement: Placement, costs: StageCosts) -> ChainBound:
        """Return an object that computes lower bounds on the step time of a placement.

        They hold for all splits of the layers over the stages.

        Args:
            shape: Parallel sizes.
            placement: Nodes of every stage.
            costs: Times and memory of the stages.
        """
        prices = self.result.prices(shape)
        reductions = [reduction.name for reduction in prices.reductions(placement)]
        run = execution_of(self.result, shape, split=(), reductions=reductions)
        return ChainBound(prices, placement, costs, run)

    def _list_placements(self, shape: Shape, ideal_s: float, best_s: float) -> Outcome:
        """Return a shape's placements, each with its own lower bound on the step time.

        They are the `items` of the result, without those that cannot beat the best step.

        Args:
            shape: Parallel sizes, micro-batch, recomputation and ZeRO stage.
            ideal_s: Lower bound on the step time of all plans of the shape, in seconds.
            best_s: Best simulated step time so far.

        Returns:
            Outcome; its `remaining_s` is a lower bound on the step time of the placements that were
            not examined (inf if there are none).
        """
        prices = self.result.prices(shape)

        def bound_of(placement: Placement) -> ChainBound:
            """Return the object that computes lower bounds on the step time of a placement."""
            return self.lower_bound(shape, placement, prices.costs(placement))

        # complete: the list has all orders of the clusters; else some were left out
        listed, complete = self.placements(shape)
        bounds = [(bound_of(placement).seconds(best_s), placement) for placement in listed]
        remaining_s = inf if complete else ideal_s  # bound on the orders that were left out
        sizes = shape.sizes().complete(self.result.network.world)
        if not complete and shape.virtual == 1 and OrderBounds.applies_to(self.orders, sizes):
            # Not all orders of the clusters are listed: search the others by their lower bounds.
            ring_bits = ShapeBound(self.result.network, prices, shape).ring_bits
            order_bounds = OrderBounds(self.orders, sizes, bound_of, ring_bits)
            found = order_bounds.below(best_s)
            remaining_s = found.remaining_s
            for bound_s, placement in found.placements:
                if placement not in listed and is_allowed(self.result.limits, placement):
                    bounds.append((bound_s, placement))
        items = [
            BoundedItem(max(ideal_s, bound_s), PlacedShape(shape, placement))
            for bound_s, placement in bounds
            if bound_s < best_s * (1 - EQUAL)
        ]

        # Both are lower bounds on the placements that were left out, so the larger counts.
        return Outcome(items, candidates=[], remaining_s=max(ideal_s, remaining_s))

    def _tighten(self, item: PlacedShape, bound_s: float, best_s: float) -> Outcome:
        """Compute a tighter lower bound for a placement, and return the item with it.

        The new item also has a split of the layers that reaches this bound. If no split can beat
        the best step, the outcome has no item. Its `remaining_s`, the bound on plans that are left
        out, is inf in both cases: none is left out that could be faster.

        Args:
            item: Shape with a placement.
            bound_s: Lower bound of the item so far, in seconds.
            best_s: Best simulated step time so far.
        """
        costs = self.result.prices(item.shape).costs(item.placement)
        chain_bound = self.lower_bound(item.shape, item.placement, costs)
        tighter_s, split = chain_bound.chained(bound_s, best_s)
        if not split:
            return Outcome(items=[], candidates=[], remaining_s=inf)
        predicted_s = predict(costs, split).step_s  # decides which items are simulated first
        tightened = replace(item, is_tightened=True, split=split, predicted_s=predicted_s)
        return Outcome([BoundedItem(tighter_s, tightened)], candidates=[], remaining_s=inf)

    def _simulate(self, item: PlacedShape, bound_s: float, best_s: float) -> Outcome:
        """Simulate a placement with good splits of its layers, and return the plans.

        A split is the number of layers of each stage. `remaining_s` of the outcome is a lower bound
        on the step time of the plans that were not simulated; it counts in the optimality gap:

            inf        The placement has a single split, which was simulated: there is no pipeline,
                       or a stage has several chunks of layers.
            bound_s    There are other splits, or the simulation would take too long.

        Args:
            item: Shape (parallel sizes) with a placement.
            bound_s: Lower bound on the step time of its plans, in seconds.
            best_s: Best simulated step time so far.
        """
        result = self.result
        shape = item.shape
        placement = item.placement
        stages = self.stage_bounds(shape, placement)
        simulated: dict[Split, Candidate] = {}
        step_passes = passes(shape, result.model.layers)  # measure of a simulation's work

        def seconds_of(split: Split) -> float:
            """Return the simulated step of a split, in seconds, and keep its plan in `simulated`.

            The result is inf if the split does not fit the memory, or the time is over. The first
            split is simulated even then.
            """
            is_over = bool(simulated) and time.monotonic() > self.end
            if split not in simulated and not is_over and stages.fits(split):
                candidate = result.candidate(shape, placement, split)
                begin = time.monotonic()
                simulated_s = folded_s(job_of(result, candidate))
                self.pass_s = max(self.pass_s, (time.monotonic() - begin) / step_passes)
                timed = replace(candidate, simulated_s=simulated_s)
                # The simulation let stages begin more micro-batches early, to hide slow links. The
                # plan gets these numbers (warm-up depths), and the memory that they need.
                simulated[split] = with_flight(result, timed)
            return simulated[split].simulated_s if split in simulated else inf

        # pass_s: the longest simulation so far, in seconds for each pass
        would_end_late = time.monotonic() + step_passes * self.pass_s > self.end
        if step_passes > MAX_PASSES or would_end_late:
            return Outcome(items=[], candidates=[], remaining_s=bound_s)
        has_single_split = shape.virtual > 1 or shape.pipeline == 1
        if has_single_split:
            seconds_of(uniform(stages.layer_count, stages.stage_count))  # adds it to `simulated`
            return Outcome(items=[], candidates=[*simulated.values()], remaining_s=inf)

        # item.split has the placement's lower bound (_tighten()). A split is () if none was found.
        splits = (self.balanced_split(stages), self.good_split(stages), item.split)
        fastest = min(filter(None, splits), key=seconds_of)
        is_near_best = seconds_of(fastest) < best_s * NEAR
        if is_near_best:
            # A local search moves single blocks. It calls seconds_of() for each split that it tries,
            # so each becomes a plan in `simulated`.
            max_tries = min(MAX_MOVES, MAX_MOVED_PASSES // step_passes)
            improved(fastest, seconds_of, lambda split: _moves(stages, split), max_tries)
        return Outcome(items=[], candidates=[*simulated.values()], remaining_s=bound_s)

    def balanced_split(self, stages: StageBounds) -> Split:
        """Return the split whose slowest stage is as fast as possible; () if none fits the memory."""
        if stages.run.virtual > 1 or stages.stage_count == 1:
            even = uniform(stages.layer_count, stages.stage_count)
            return even if stages.fits(even) else ()
        return balanced_blocks(stages)

    def good_split(self, stages: StageBounds) -> Split:
        """Return a split with a short step by the closed form; () if none fits the memory.

        A local search moves single blocks. It starts from the better of two balanced splits (all
        stages take about equally long): of the passes alone, and of passes and gradient reduction.
        """
        balanced = self.balanced_split(stages)
        if not balanced or stages.run.virtual > 1 or stages.stage_count == 1:
            return balanced

        def seconds_of(split: Split) -> float:
            """Return the step time of a split in closed form; inf if it does not fit the memory."""
            return estimate(stages.costs, split).step_s if stages.fits(split) else inf

        # A block's gradients are reduced once a step, but balanced_blocks() compares seconds of a
        # micro-batch. So each micro-batch counts its share of the reduction.
        reduction_s = [block_s / stages.micro_batches for _, block_s, _ in stages.costs.reduction_s]
        with_reduction = balanced_blocks(stages, reduction_s)
        start = min(balanced, with_reduction, key=seconds_of)

        def moves(split: Split) -> Iterator[tuple[int, int]]:
            """Yield moves of a block to try, (from stage, to stage): from much work to little."""
            return full_to_empty(_work_s(stages, split))

        return improved(start, seconds_of, moves, MAX_TRIES)


def balanced_blocks(stages: StageBounds, more_s: Sequence[float] = ()) -> Split:
    """Return the split that makes the slowest stage as fast as possible; () if none fits the memory.

    Example: 10 blocks, on a first stage that needs 1 s for a block and a second that needs 2 s -> (7, 3).
    They take 7 s and 6 s.

    Args:
        stages: For each stage, the seconds of a block and of the embedding or output layer
            (`extra_s`), and the number of blocks that fit its memory.
        more_s: For each stage, seconds to add to those of a block, for work besides its forward and
            backward pass, such as the reduction of its gradients; () to add nothing.
    """
    block_s = stages.block_s
    if more_s:
        block_s = [seconds + more for seconds, more in zip(stages.block_s, more_s)]
    if min(stages.max_layers) < 1 or sum(stages.max_layers) < stages.layer_count:
        return ()
    # The ideal division has fractions of blocks. Rounded down, it is too small in sum; with at
    # least 1 block on every stage, it may be too large.
    counts = _ideal_counts_rounded_down(stages, block_s)
    _remove_surplus(counts, stages, block_s)
    _add_missing(counts, stages, block_s)
    return tuple(counts)


def _ideal_counts_rounded_down(stages: StageBounds, block_s: Sequence[float]) -> list[int]:
    """Return how many whole blocks each stage computes if all stages take the same time.

    If blocks were divisible, all stages would take `equal_s` seconds. Each stage gets the whole
    blocks that it computes in this time, at least 1, and no more than fit its memory.

    Args:
        stages: Bounds on the work of the stages, and the largest number of layers of each.
        block_s: For each stage, the seconds of a block.
    """
    counts = [1] * stages.stage_count
    if min(block_s) > 0:
        blocks_per_s = sum(1 / seconds for seconds in block_s)
        # Embedding and output layer, in blocks of their stage that take as long.
        extra_blocks = sum(extra / seconds for extra, seconds in zip(stages.extra_s, block_s))
        equal_s = (stages.layer_count + extra_blocks) / blocks_per_s
        for stage, most in enumerate(stages.max_layers):
            remaining_s = equal_s * (1 - ROUNDING) - stages.extra_s[stage]
            counts[stage] = max(1, min(most, floor(remaining_s / block_s[stage])))
    return counts


def _remove_surplus(counts: list[int], stages: StageBounds, block_s: Sequence[float]) -> None:
    """Take blocks from the slowest stages until the sum is no larger than the model's blocks.

    Every stage got at least 1 block, even if its share is smaller.
    """
    while sum(counts) > stages.layer_count:
        slowest = max(
            (stage for stage in range(stages.stage_count) if counts[stage] > 1),
            key=lambda stage: stages.extra_s[stage] + counts[stage] * block_s[stage],
        )
        counts[slowest] -= 1


def _add_missing(counts: list[int], stages: StageBounds, block_s: Sequence[float]) -> None:
    """Give the blocks that `counts` lacks to stages, so that the slowest stage stays fast.

    Each block goes to the stage that takes the fewest seconds after it has got the block.
    """

    def with_one_more(stage: int) -> tuple[float, int]:
        """Return the seconds of a stage with another block, and its number for ties."""
        return stages.extra_s[stage] + (counts[stage] + 1) * block_s[stage], stage

    heap = []  # (seconds with one more block, stage), of the stages that have room for it
    for stage in range(stages.stage_count):
        if counts[stage] < stages.max_layers[stage]:
            heap.append(with_one_more(stage))
    heapify(heap)
    for _ in range(stages.layer_count - sum(counts)):
        _, stage = heappop(heap)
        counts[stage] += 1
        if counts[stage] < stages.max_layers[stage]:
            heappush(heap, with_one_more(stage))


def _moves(stages: StageBounds, split: Split) -> Iterator[tuple[int, int]]:
    """Yield (from stage, to stage) for moves of a block, from stages with much work to little.

    At most a third of all tries are spent on each round of moves, so that several rounds are
    possible.
    """
    return islice(full_to_empty(_work_s(stages, split)), MAX_MOVES // 3)


def _work_s(stages: StageBounds, split: Split) -> list[float]:
    """Return, for each stage, the seconds of a micro-batch's forward and backward pass on its layers."""
    return [layers * block_s for layers, block_s in zip(split, stages.block_s)]


def is_allowed(limits: Limits, placement: Placement) -> bool:
    """Return whether the user's limits on order and on traffic between clusters allow a placement."""
    # of() returns those of the values that are allowed: [] if the only value is not.
    order = limits.of("order", [placement.sizes.order])
    clusters = limits.of("clusters", [crossing_groups(placement)])
    return bool(order and clusters)


def crossing_groups(placement: Placement) -> str:
    """Return which groups span clusters: "pipeline", "data" (data parallel groups) or "both"."""
    stages = placement.stages  # of each: the clusters that it lies on, with the ranks on each
    if all(len(clusters) == 1 for clusters in stages):
        return "pipeline"
    return "data" if len(set(stages)) == 1 else "both"
