"""First look of the search: rank the shapes by the closed form, and simulate the fastest.

The closed form, a formula for the step time, takes microseconds for a plan; a simulation takes
milliseconds to seconds. So the first look finds good plans soon, and their step times let branch
and bound (search.py) exclude most of the space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.plan.arrange.orders import launched
from holmes_ext.plan.cost.model import in_flight
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.partition import Split
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.bound.stages import StageBounds
from holmes_ext.planner.search.evaluate import Evaluator, crossing_groups, is_allowed
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import memory_of, passes, timed
from holmes_ext.planner.search.space import CLUSTERS, Limits, shapes
from holmes_ext.units import format_bytes
from holmes_ext.words import counted

#: Most candidates that are simulated, and most passes of all of them together.
MAX_SIMULATED = 30
MAX_PASSES = 60_000
#: Factor on the time to simulate a pass with a WAN. Simulating the hierarchical all-reduce of a chunk
#: takes as long as HIERARCHICAL_PASSES passes.
WAN_PASS_FACTOR = 4
HIERARCHICAL_PASSES = 1000
#: If the time is short, it is kept for this number of simulations: the output of the best plan needs them.
RESERVED_SIMULATIONS = 6
#: A plan is not simulated if its closed form exceeds the best simulated step by this factor.
FAR = 1.5
#: If there are more shapes, the best shape of each pipeline size comes first.
MANY_SHAPES = 5000
#: With a WAN the first look ends after PATIENCE shapes without a step shorter by the factor GAIN.
PATIENCE = 60
GAIN = 0.01
#: Fewest shapes that are ranked, even if the time is over, as far as that takes FLOOR_S seconds. The
#: shape with the least lower bound alone is often a poor plan: the bound contains little of the
#: communication.
MIN_RANKED = 32
FLOOR_S = 0.5
#: A split is improved by local search if its step is within this factor of the best step.
NEAR = 1.2
#: Number of shapes after which progress is reported.
PROGRESS_EVERY = 16
#: Lower bounds are computed for every STRIDE-th shape first, then for those between them: if the time
#: ends, shapes of all kinds have one.
STRIDE = 16
#: Most time for the lower bounds of the shapes, relative to the time for the closed form of the best shapes.
BOUNDS_SHARE = 3.0
#: Term of the memory -> how to make it smaller.
FIXES = {
    "weights": "more GPUs, or a larger tensor or pipeline size",
    "gradients": "more GPUs, or a larger tensor or pipeline size",
    "optimizer": "more GPUs, or ZeRO (limit zero)",
    "activations": "a smaller micro-batch, full recomputation, or more tensor or context parallelism",
    "working": "a smaller micro-batch, or more tensor or context parallelism",
}
#: Called from time to time: (items processed, items left, best step in seconds, optimality gap).
Progress = Callable[[int, int, float, float], None]


class _PlacedSplit(NamedTuple):
    """A placement of the stages and its most balanced split of the layers; ordered by step time.

    In this split the slowest stage is as fast as possible.
    """

    step_s: float  # by the closed form
    number: int  # decides between equal steps
    split: Split
    stages: StageBounds

    @property
    def crossing(self) -> str:
        """Groups that span clusters: "pipeline", "data" (data parallel groups) or "both"."""
        return crossing_groups(self.stages.placement)


class Sketch:
    """First part of a search: ranks all shapes by the closed form, and simulates the fastest plans.

    A shape is parallel sizes, micro-batch, recomputation and ZeRO stage. Branch and bound
    (search.py) goes on from here.
    """

    def __init__(self, result: SearchResult, rows: int, only: Sequence[Shape] = ()):
        """Prepare the first look of a search: a ranking of all shapes by the closed form.

        A shape is the parallel sizes, micro-batch, recomputation and ZeRO stage.

        Args:
            result: The request; candidates and counts are added to it.
            rows: Least number of shapes to examine.
            only: Shapes to examine instead of all.

        Raises:
            HolmesError: The global batch is below 1.
        """
        if result.global_batch < 1:
            raise HolmesError(f"--global-batch is {result.global_batch}; it must be 1 or more")
        self.result = result
        self.rows = rows
        self.only = only
        self.evaluator = Evaluator(result)
        self.best_s = inf
        #: Shape that comes nearest to fitting the memory, and the bytes that it needs.
        self.nearest: tuple[float, Shape] | None = None

    def run(
        self,
        seconds: float,
        progress: Progress | None = None,
        simulate: bool = True,
        simulation_end: float = inf,
    ) -> SearchResult:
        """Find the best plan of each shape by the closed form, then simulate the fastest plans.

        A shape is the parallel sizes, micro-batch, recomputation and ZeRO stage. The closed form is
        a formula for the step time, much faster than a simulation.

        Args:
            seconds: Time limit of the closed form, for all shapes together.
            progress: Called from time to time.
            simulate: Simulate steps; otherwise return the ranking by the closed form.
            simulation_end: Moment of time.monotonic() at which all simulations must have ended: those
                of the plans, and those that the output shows of the best plan afterwards (such as
                the job without holmes).

        Raises:
            HolmesError: No parallel sizes are possible, or no plan fits the memory.
        """
        result = self.result
        begin = time.monotonic()
        try:
            self._bound_shapes(begin + BOUNDS_SHARE * seconds)
            # The lower bounds may have taken the time; the ranking gets at least a share of it.
            end = max(begin + seconds, time.monotonic() + seconds / 2)
            self._rank_shapes(end, progress)
        except KeyboardInterrupt:
            if not result.candidates:
                raise
            result.interrupted = True
        layout = _usable_layout(result)
        if layout is not None and (result.interrupted or not result.candidates):
            result.candidates.append(replace(layout))  # perhaps the only plan that fits
        if not result.candidates:
            raise HolmesError(self._misfit_message() if result.shapes else self._no_sizes_message())
        result.candidates.sort(key=lambda plan: (plan.step_s, plan.peak_bytes))
        if simulate and not result.interrupted:
            result = simulate_first(result, rows=self.rows, end=simulation_end)
        if layout is not None:
            result = result.with_best_if_faster(layout)
        return result

    def _bound_shapes(self, end: float) -> None:
        """Compute a lower bound on the step time of every shape (parallel sizes).

        `result.ideals` keeps the bounds. A shape whose layers fit no GPU memory is only counted.

        If the time ends, the remaining shapes are not examined. They share a lower bound,
        `result.unbounded_s`: the time that all GPUs together need to compute a step. To have
        something to rank, the search goes on for up to FLOOR_S seconds until MIN_RANKED shapes fit.

        Args:
            end: Moment of time.monotonic() at which to stop.
        """
        result = self.result
        listed = list(
            self.only or shapes(result.network, result.model, result.global_batch, result.limits)
        )
        result.shapes += len(listed)

        # Neighbours in the list are similar. With every STRIDE-th shape first, shapes of all kinds are
        # examined even if the time is short.
        mixed = [shape for start in range(STRIDE) for shape in listed[start::STRIDE]]
        bounds_s: dict[Shape, float] = {}
        fitting = 0  # examined shapes whose layers fit the memory
        floor_end = time.monotonic() + FLOOR_S
        for number, shape in enumerate(mixed):
            has_enough = fitting >= MIN_RANKED
            deadline = end if has_enough else max(end, floor_end)
            if fitting and time.monotonic() > deadline:
                # No bounds for the others: computation on all GPUs is a bound for every shape.
                result.unbounded_s = result.computing_s
                result.skipped = len(mixed) - number
                break
            bounds_s[shape] = ShapeBound(result.network, result.prices(shape), shape).seconds
            if bounds_s[shape] < inf:
                fitting += 1
        for shape in listed:  # `ideals` has the order of the list
            ideal_s = bounds_s.get(shape)
            if ideal_s is None:
                continue
            if ideal_s < inf:
                result.ideals[shape] = ideal_s
            else:  # inf: the layers fit no memory
                self._count_misfit(shape)

    def _rank_shapes(self, end: float, progress: Progress | None) -> None:
        """Add the best plan of each shape to the candidates, by the closed form, until `end`.

        A shape is the parallel sizes and further settings. If `end` is near or over, the first
        MIN_RANKED shapes may still take FLOOR_S seconds from the call. With a WAN, also stop after
        PATIENCE shapes without a better plan. Once there are candidates for all rows of the table,
        shapes that cannot be faster than the best plan are left out.

        Args:
            end: Moment of time.monotonic() at which to stop.
            progress: Called from time to time.
        """
        result = self.result
        patience = PATIENCE if result.network.wan else inf
        without_gain = 0  # shapes since the last improvement
        ranked = 0
        floor_end = time.monotonic() + FLOOR_S
        ordered = self._by_bound()
        for number, shape in enumerate(ordered):
            has_rows = len(result.candidates) >= self.rows
            if has_rows and not self._may_be_faster(shape):
                continue
            if result.candidates and without_gain > patience:
                break
            is_among_first = ranked < MIN_RANKED
            deadline = max(end, floor_end) if is_among_first else end
            if result.candidates and time.monotonic() > deadline:
                result.skipped += sum(map(self._may_be_faster, ordered[number:]))
                break
            ranked += 1
            previous_best_s = self.best_s
            self._add_candidates(shape)
            if self.best_s < previous_best_s * (1 - GAIN):
                without_gain = 0
            else:
                without_gain += 1
            if progress and number % PROGRESS_EVERY == 0:
                # The largest gap, 100 %: it is known only when steps have been simulated.
                optimality_gap = 1.0
                shapes_left = len(result.ideals) - number
                progress(number, shapes_left, self.best_s, optimality_gap)

    def _may_be_faster(self, shape: Shape) -> bool:
        """Return whether the lower bound of a shape is below the best step so far."""
        return self.result.ideals[shape] < self.best_s * (1 - EQUAL)

    def _by_bound(self) -> list[Shape]:
        """Return the shapes in the order of their examination: by lower bound, the least first.

        A shape is the parallel sizes and further settings. With more than MANY_SHAPES the time may
        end before all are examined. So for each pipeline size the 1F1B shape with the least bound
        comes first: then each size gets a plan. Interleaved shapes and single stages have a single
        split of their layers, so for them the order by bound is enough.
        """
        ideals = self.result.ideals
        ordered = sorted(ideals, key=ideals.__getitem__)
        best_of_depth: dict[int, Shape] = {}  # pipeline size -> shape with the least bound
        if len(ordered) > MANY_SHAPES:
            for shape in ordered:
                if shape.virtual == 1 and shape.pipeline > 1:
                    best_of_depth.setdefault(shape.pipeline, shape)
        return list(dict.fromkeys((*best_of_depth.values(), *ordered)))  # each once

    def _add_candidates(self, shape: Shape) -> None:
        """Add the shape's best placement to the candidates, by the closed form (not simulated).

        With a WAN the closed form is less exact about the traffic between clusters. Then more
        placements are added, if they are good: the best of those in which pipelines cross clusters,
        of those in which data parallel groups do, and of those in which both do. Good means that
        the step is within the factor NEAR = 1.2 of the best step so far.
        """
        result = self.result
        placed: list[_PlacedSplit] = []
        # listed: the placements that are examined individually
        for placement in self.evaluator.placements(shape).listed:
            stages = self.evaluator.stage_bounds(shape, placement)
            split = self.evaluator.balanced_split(stages)
            if split:
                step_s = estimate(stages.costs, split).step_s
                placed.append(_PlacedSplit(step_s, len(placed), split, stages))
            else:
                self._count_misfit(shape)
        if not placed:
            return
        fastest = min(placed)
        chosen = [fastest]
        if result.network.wan:
            limit_s = NEAR * self.best_s  # inf before the first candidate: all are good
            for groups in CLUSTERS:  # groups that span clusters: "pipeline", "data" or "both"
                with_these_groups = [entry for entry in placed if entry.crossing == groups]
                best = min(with_these_groups, default=None)
                if best and best is not fastest and best.step_s < limit_s:
                    chosen.append(best)
        result.pruned += len(placed) - len(chosen)
        for entry in chosen:
            split = entry.split  # balanced: every stage computes about equally long
            is_near_best = entry.step_s < NEAR * self.best_s
            if is_near_best:
                split = self.evaluator.good_split(entry.stages)  # by a local search; takes longer
            candidate = result.candidate(shape, entry.stages.placement, split)
            result.candidates.append(candidate)
            self.best_s = min(self.best_s, candidate.formula_s)

    def _count_misfit(self, shape: Shape) -> None:
        """Count a shape or placement that fits no memory, and remember the shape nearest to fitting.

        That shape is named in the error message if no plan fits. Nearest is the shape that needs the
        fewest bytes on its first stage, because this stage holds the most micro-batches.
        """
        self.result.misfits += 1
        job = self.result.prices(shape).job
        # Micro-batches whose activations stage 0 holds at the same time.
        kept = in_flight(0, shape.pipeline, shape.virtual, shape.micro_batches)

        # The first stage has the embedding, the last stage the output layer. The larger of the two
        # counts. Only blocks have activations of several micro-batches. state: weights, gradients and
        # optimizer; kept_bytes: activations of a micro-batch.
        embedding, block, output = job.layers
        embedding_state, block_state, output_state = job.state_bytes
        embedding_bytes = embedding_state + embedding.kept_bytes
        block_bytes = block_state + kept * block.kept_bytes
        output_bytes = output_state + output.kept_bytes
        stage_blocks_bytes = job.blocks / shape.pipeline * block_bytes
        ends_bytes = max(embedding_bytes, output_bytes)
        needed_bytes = stage_blocks_bytes + job.working_bytes + ends_bytes
        if self.nearest is None or needed_bytes < self.nearest[0]:
            self.nearest = (needed_bytes, shape)

    def _no_sizes_message(self) -> str:
        """Return the error message for a job without any possible parallel sizes."""
        result = self.result
        network = result.network
        gpus_of_nodes = " or ".join(map(str, sorted(set(network.widths))))
        job = (
            f"{counted(network.world, 'GPU')} ({gpus_of_nodes} on a node), global batch "
            f"{result.global_batch}, {counted(result.model.heads, 'head')}, "
            f"{counted(result.model.layers, 'layer')}"
        )
        advice = "give a global batch that is a multiple of the data size, or other limits"
        return f"no parallel sizes are possible: {job}{_limits_text(result.limits)}; {advice}"

    def _misfit_message(self) -> str:
        """Return the error message for a job that does not fit the memory.

        It names the shape that comes nearest to fitting, the stage of it that lacks most memory,
        and the largest term of that stage's memory.
        """
        result = self.result
        if self.nearest is None:
            limits = _limits_text(result.limits)
            return f"no arrangement of the clusters is possible{limits}; allow other sizes"
        _, shape = self.nearest
        split = uniform(result.model.layers, shape.pipeline)
        placement = launched(result.network, shape.sizes().complete(result.network.world))
        candidate = result.candidate(shape, placement, split)
        used_bytes = candidate.memory_bytes
        limit_bytes = candidate.limit_bytes
        stage = max(range(shape.pipeline), key=lambda stage: used_bytes[stage] / limit_bytes[stage])
        terms = memory_of(result, candidate, stage).terms
        largest = max(terms, key=terms.__getitem__)

        def text(size: float) -> str:
            """Return a number of bytes with its unit."""
            return format_bytes(size, 4)  # 4 digits: small differences should show

        limit = limit_bytes[stage]
        needed = used_bytes[stage]
        return (
            f"{result.model.name} does not fit in GPU memory: nearest is tensor {shape.tensor}, pipeline "
            f"{shape.pipeline}, data {shape.data}, recompute {shape.recompute}, ZeRO {shape.zero}, whose "
            f"stage {stage} needs {text(needed)}, {text(needed - limit)} more than its {text(limit)} "
            f"({largest}: {text(terms[largest])}); use {FIXES[largest]}"
        )


def _usable_layout(result: SearchResult) -> Candidate | None:
    """Return the layout that the user gave, if the search may call it the best plan.

    The layout is simulated before the search, so that no plan worse than it is called the best,
    however short the time is. It may have a shape that the search does not try, such as a
    micro-batch of 3. But it must fit the memory, and the limits that the user sets for the search
    (sizes, placement, ways to reduce gradients) apply to it, too.
    """
    layout = result.user_layout
    if layout is None or not layout.simulated_s or not layout.fits:
        return None
    limits = result.limits
    # of() returns those of the layout's reductions (one for each stage) that the limits allow.
    allowed_reductions = limits.of("reduction", layout.reductions)
    are_all_allowed = len(allowed_reductions) == len(layout.reductions)
    is_within_limits = (
        limits.allow_shape(layout.shape)
        and is_allowed(limits, layout.placement)
        and are_all_allowed
    )
    return layout if is_within_limits else None


def simulate_first(
    result: SearchResult, count: int = MAX_SIMULATED, rows: int = 1, end: float = inf
) -> SearchResult:
    """Simulate the fastest candidates, and return the result with these first.

    The budget of all simulations together is MAX_PASSES passes. The optimality gap is computed from
    the lower bounds of the shapes.

    Args:
        result: Candidates ranked by the closed form.
        count: Most candidates to simulate.
        rows: Number of candidates to simulate even if they are slower than the best, up to the
            factor FAR.
        end: Moment of time.monotonic() at which all simulations have to end, also those that the
            caller needs for its output about the best plan. Time for RESERVED_SIMULATIONS of these
            is kept free.
    """
    longest_s = 0.0  # of a simulation
    passes_left = MAX_PASSES
    best_s = inf
    layers = result.model.layers
    simulated: list[Candidate] = []
    others: list[Candidate] = []
    for number, candidate in enumerate(result.candidates):
        # The closed form seldom exceeds the simulated step, so a candidate above the limit is not
        # faster. Nor are the following ones.
        limit_s = best_s if len(simulated) >= rows else FAR * best_s
        is_slower = candidate.formula_s >= limit_s
        now = time.monotonic()
        is_over = bool(simulated) and now + RESERVED_SIMULATIONS * longest_s > end
        if len(simulated) == count or is_slower or is_over:
            others += result.candidates[number:]
            break

        # Simulate the candidate if the passes that are left suffice for it.
        shape = candidate.shape
        needed_passes = passes(shape, layers)
        if result.network.wan:
            needed_passes *= WAN_PASS_FACTOR
        if "hierarchical" in candidate.reductions:
            needed_passes += HIERARCHICAL_PASSES * shape.pipeline * shape.virtual
        if needed_passes > passes_left:
            others.append(candidate)
            continue
        passes_left -= needed_passes
        plan = timed(result, candidate)
        simulated.append(plan)
        longest_s = max(longest_s, time.monotonic() - now)
        best_s = min(best_s, plan.step_s)
    simulated.sort(key=lambda plan: plan.simulated_s)

    # The user's own layout is simulated, too, for the comparison with the best plan.
    layout = result.user_layout
    if layout is not None and not layout.simulated_s:
        result = replace(result, user_layout=timed(result, layout))

    # No plan beats the least bound of a shape, and that of the shapes without a bound of their own.
    bound_s = min(result.ideals.values(), default=0.0)
    return result.ranked([*simulated, *others], min(bound_s, result.unbounded_s))


def _limits_text(limits: Limits) -> str:
    """Return ", within NAME=V,..." for an error message; "" without limits."""
    if not limits.allowed:
        return ""
    texts = (f"{name}={','.join(map(str, values))}" for name, values in limits.allowed.items())
    return ", within " + " ".join(texts)
