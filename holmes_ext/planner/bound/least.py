"""Lower bound on a placement's step time over all ways to split its layers into pipeline stages.

The search for the best plan leaves a placement out if this bound is no better than the best simulated step,
so no simulated 1F1B step may ever be below it. (Interleaved schedules have one split: chunks.py.)

Letters of the formulas, all for one micro-batch on one stage, in seconds:

    f, b    forward and backward pass; w = f + b
    x       stage link: from sending an activation to its arrival on the next stage
    x'      the part of x for which the sender is blocked (0 if sends do not block)
    m       number of micro-batches
    u       warm-up depth: micro-batches that the stage begins before its first backward pass
    D       round trip below: sum of (w + 2 x) over the stages behind this one

Stage s takes at least the sum of

    way down      sum of (f + x) over the stages before s
    passes        the largest of
                      m b + (m - u + 1) f + D        its own passes; the first backward waits for D
                      (m - k u + k) w + (k + 1) D    k rounds of u micro-batches at the end, each of which
                                                     travels to the last stage and back
                  plus the time for which blocking sends hold the stage up:
                      (m - u) (x'_s + x'_(s-1)) + (u - 1) x'_(s-1)
    the end       the larger of
                      the way up: sum of (b + x) over the stages before s, then the end of stage 0
                      its reduction as far as not overlapped, the tied embedding's, then the longest
                      optimizer step and gather of all stages (the gradient norm is a barrier)

All activations also flow over each stage link one after the other, between the first one's way down and the
last one's way up and down again.

From a time T to layers: each term grows with the layers of s, and the layers of the other stages cost at
least what they cost on the cheapest stage. So T limits the layers of each stage. If the limits sum to fewer
layers than the model has, no split takes T, and T is a lower bound; bisection finds the largest such T.
Stages that share a NIC or a link between clusters limit their layers together (crossing.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.placement import Placement
from holmes_ext.planner.bound.chunks import interleaved_s
from holmes_ext.planner.bound.crossing import blocks_at_most, shared_hops
from holmes_ext.planner.bound.stages import ROUNDING, LinearCost, StageBounds
from holmes_ext.planner.simulate.execution import Execution

#: Relative precision of the bisection.
PRECISION = 2e-3
#: Factor on the number of layers that absorbs rounding errors.
ALMOST_ALL = 1 - 1e-9
#: Width of an interval of update times: this share of a step, or ten times this share of the update itself.
INTERVAL_SHARE = 0.01


class UpdateInterval(NamedTuple):
    """Range of seconds for the longest update (optimizer step and weight gather) of all stages."""

    least_s: float
    limit_s: float  # exclusive


class _PassTimes(NamedTuple):
    """Lower bounds for one stage from its first forward pass to the end of its last backward pass.

    Each bound excludes the round trips of micro-batches to the last stage and back.
    """

    one_trip_s: float  # if the stage waits for one round trip
    two_trips_s: float  # if it waits for two, of the first and of the last micro-batch
    many_trips_s: float  # if it waits for rounds + 1
    rounds: int  # k of the module docstring

    def seconds(self, round_trip_s: float) -> float:
        """Return the bound for a round trip of so many seconds."""
        two_trips = self.two_trips_s + 2 * round_trip_s
        many_trips = self.many_trips_s + (self.rounds + 1) * round_trip_s
        return max(self.one_trip_s + round_trip_s, two_trips, many_trips)


class StepLowerBound(StageBounds):
    """Lower bound on the simulated step time of one placement, whatever its split of the layers."""

    def __init__(self, prices: Prices, placement: Placement, costs: StageCosts, run: Execution):
        super().__init__(prices, placement, costs, run)
        self.bound_communication()
        if run.virtual == 1:
            self._sum_along_pipeline()
            self._add_shared_resources()
            self._add_update_intervals()

    def _sum_along_pipeline(self) -> None:
        """Sum up, for each stage, the least time of the stages before and behind it with one layer each."""
        stages = range(self.stage_count)
        forward_s = map(sum, zip(self.forward_s, self.extra_forward_s))
        backward_s = map(sum, zip(self.backward_s, self.extra_backward_s))
        both_s = [
            0.0,
            *accumulate(map(sum, zip(self.block_s, self.extra_s))),
        ]  # forward and backward
        #: Stage links, forward passes and backward passes of the stages before each stage.
        self.links_before_s = [0.0, *accumulate(self.stage_links_s)]
        self.down_s = [0.0, *accumulate(forward_s)]
        self.up_s = [0.0, *accumulate(backward_s)]
        #: Round trip of a micro-batch from the stage to the last stage and back.
        self.round_trip_s = [
            both_s[-1]
            - both_s[stage + 1]
            + 2 * (self.links_before_s[-1] - self.links_before_s[stage])
            for stage in stages
        ]
        #: The least that one more layer before (down, up) or behind the stage (round trip) adds.
        self.layer_down_s = list(accumulate(self.forward_s, min, initial=inf))
        self.layer_up_s = list(accumulate(self.backward_s, min, initial=inf))
        behind = accumulate(reversed(self.block_s), min, initial=inf)
        self.layer_round_trip_s = list(behind)[-2::-1]
        #: End of the stage's last backward pass, without its own blocks: all activations went down, and the
        #: gradient of the last one came up.
        first_down_s = (
            self.down_s[-1]
            + (self.layer_count - self.stage_count) * min(self.forward_s)
            + self.links_before_s[-1]
        )
        all_down_s = first_down_s + (
            (self.micro_batches - 1) * max(self.interval_s, default=0.0)
            + self.links_before_s[-1]
            + self.up_s[-1]
        )
        self.flow_end_s = [
            all_down_s - self.links_before_s[stage] - self.up_s[stage] - self.backward_s[stage]
            for stage in stages
        ]
        #: For each stage: number of layers -> pass times, filled on demand.
        self.pass_times: list[dict[int, _PassTimes]] = [{} for _ in stages]

    def _add_shared_resources(self) -> None:
        """Prepare the bounds on links and NICs that carry the reductions of several stages."""
        #: Hops between clusters that carry the reductions of several stages.
        self.crossing = shared_hops(self) if self.prices.network.wan else []
        #: Seconds from the step's start to the start of each stage's last backward pass, without the passes
        #: of the other stages; only if a resource is shared.
        self.last_backward_start: list[LinearCost] = []
        if not self.stages_of_nodes and not self.crossing:
            return
        for stage in range(self.stage_count):
            pairs = self.micro_batches - self.warm_up[stage]
            links_s = 2 * self.links_before_s[-1] - self.links_before_s[stage]
            blocked_s = max(0, pairs - 1) * self._blocked_both_s(stage)
            extra_s = pairs * self.extra_s[stage] - self.extra_backward_s[stage]
            fixed_s = links_s + blocked_s + extra_s
            block_s = pairs * self.block_s[stage] - self.backward_s[stage]
            self.last_backward_start.append(LinearCost(block_s, fixed_s))

    def _add_update_intervals(self) -> None:
        """Divide the possible times of the longest update into intervals that are examined one by one."""
        self.update_intervals = [UpdateInterval(0.0, inf)]
        if self.has_norm_barrier:
            updates = (after.update for after in self.after_backward)
            groups = tuple(Counter(zip(updates, self.max_layers)).items())
            known = self.prices.cached_results  # a cache that all placements of the shape share
            if ("levels", groups) not in known:
                known["levels", groups] = self._update_intervals(groups)
            self.update_intervals = known["levels", groups]

    def _update_intervals(
        self, groups: Sequence[tuple[tuple[LinearCost, int], int]]
    ) -> list[UpdateInterval]:
        """Return the intervals in which the longest update of all stages may lie, shortest first.

        The gradient norm is a barrier: no stage begins its update before the last reduction has ended, so
        the longest update counts for every stage.

        Args:
            groups: ((update of a stage, most layers of the stage), number of stages with both equal).
        """
        possible_s = set()
        for (update, max_layers), _ in groups:
            for layers in range(1, max_layers + 1):
                possible_s.add(layers * update.block_s + update.fixed_s)
        seconds = sorted(possible_s)
        # INTERVAL_SHARE of the seconds that a stage of mean size on the fastest GPUs computes in a step
        least_width_s = INTERVAL_SHARE * self.micro_batches * self.layer_count / self.stage_count
        least_width_s *= min(self.block_s)
        result = []
        start = 0
        while start < len(seconds):
            width_s = max(least_width_s, 10 * INTERVAL_SHARE * seconds[start])
            end = bisect_right(seconds, seconds[start] + width_s)
            limit_s = seconds[end] if end < len(seconds) else inf
            most_layers = 0  # that all stages can hold if each update ends below limit_s
            for (update, max_layers), stages in groups:
                most_layers += stages * max(0, update.layers_below(limit_s, max_layers))
            if most_layers >= self.layer_count:
                result.append(UpdateInterval(seconds[start], limit_s))
            start = end
        return result

    def _blocked_up_s(self, stage: int) -> float:
        """Return the seconds for which sending a gradient to the stage before blocks a stage."""
        return self.sender_blocked_s[stage - 1] if stage else 0.0

    def _blocked_both_s(self, stage: int) -> float:
        """Return the seconds for which one activation and one gradient sent block a stage."""
        blocked_down_s = 0.0
        if stage < self.stage_count - 1:
            blocked_down_s = self.sender_blocked_s[stage]
        return self._blocked_up_s(stage) + blocked_down_s

    def _pass_times(self, stage: int, layers: int) -> _PassTimes:
        """Return the bounds on the passes of a stage with `layers` layers (letters: module docstring)."""
        if layers in self.pass_times[stage]:
            return self.pass_times[stage][layers]
        m = self.micro_batches
        warm_up = self._warm_up_with(stage, layers)
        blocked_up_s = self._blocked_up_s(stage)
        blocked_both_s = self._blocked_both_s(stage)
        forward_s = layers * self.forward_s[stage] + self.extra_forward_s[stage]
        pair_s = layers * self.block_s[stage] + self.extra_s[stage]
        # m b + (m - u + 1) f, and the blocking sends
        one_trip_s = (
            m * pair_s
            - (warm_up - 1) * forward_s
            + (m - warm_up) * blocked_both_s
            + (warm_up - 1) * blocked_up_s
        )
        max_rounds = (m - 1) // warm_up

        def in_rounds(rounds: int) -> float:
            # (m - k u + k) w: pairs of passes, then k rounds of `warm_up` micro-batches
            pairs = m - 1 - rounds * warm_up
            return (pairs + rounds + 1) * pair_s + max(0, pairs - 1) * blocked_both_s

        two_trips_s = in_rounds(1) if max_rounds else -inf
        many_trips_s = in_rounds(max_rounds) if max_rounds > 1 else two_trips_s
        result = _PassTimes(one_trip_s, two_trips_s, many_trips_s, max_rounds)
        self.pass_times[stage][layers] = result
        return result

    def _warm_up_with(self, stage: int, layers: int) -> int:
        """Return the largest warm-up depth for which a stage with `layers` layers has memory."""
        costs = self.costs
        warm_up = self.warm_up[stage]
        if not self.async_stage_links or costs.room_bytes[stage] == inf:
            return warm_up
        kept_bytes = layers * costs.kept_bytes[1]
        kept_bytes += self._of_ends(stage, costs.kept_bytes)
        if not kept_bytes:
            return warm_up
        state_bytes = layers * costs.state_bytes[1]
        state_bytes += self._of_ends(stage, costs.state_bytes)
        fitting = floor((costs.room_bytes[stage] - state_bytes) / kept_bytes * (1 + ROUNDING))
        warm_up_1f1b = min(self.stage_count - stage, self.micro_batches)
        return min(warm_up, max(fitting, warm_up_1f1b))

    def _of_ends(self, stage: int, by_layer: Sequence[float]) -> float:
        """Return the bytes of the embedding (first stage) and output layer (last stage) on a stage.

        Args:
            by_layer: Bytes of (embedding, block, output layer).
        """
        total = 0.0
        if stage == 0:
            total += by_layer[0]
        if stage == self.stage_count - 1:
            total += by_layer[2]
        return total

    def seconds(self, known: float = inf) -> float:
        """Return a lower bound on the step time over all splits, in seconds; inf if no split fits.

        Args:
            known: A step time already reached. A larger bound is not computed; `known` is returned instead.
        """
        # `low` is always a lower bound. The largest one is searched by doubling, then by bisection.
        if self.run.virtual > 1:
            even = uniform(self.layer_count, self.stage_count)
            return interleaved_s(self) if self.fits(even) else inf
        if sum(self.max_layers) < self.layer_count or min(self.max_layers) < 1:
            return inf
        low = self._simple_bound_s()
        if low >= known or (known < inf and not self._is_possible(known)):
            return known
        high = min(known, 2 * low)
        while high < known and not self._is_possible(high):
            low = high
            high = min(known, 2 * high)
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            if self._is_possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _simple_bound_s(self) -> float:
        """Return a lower bound on the step time that needs no bisection, in seconds.

        All micro-batches make round trips through the pipeline, and the first stage's reduction and update
        follow; or the busiest NIC sends all messages.
        """
        round_trip_s = self._least_work_s(self.max_layers) + 2 * sum(self.stage_links_s)
        rounds = (self.micro_batches - 1) // max(self.warm_up)
        interval_s = max(self.interval_s, default=0.0)
        in_rounds_s = (rounds + 1) * round_trip_s
        one_by_one_s = round_trip_s + (self.micro_batches - 1) * interval_s  # over the slowest link
        passes_s = max(in_rounds_s, one_by_one_s)
        nic_s = self.micro_batches * max(self.nic_busy_s)
        return max(passes_s + self.first_stage_end_s(), nic_s)

    def first_stage_end_s(self) -> float:
        """Return the least seconds from the first stage's last backward pass to the end of the step.

        If the messages of a stage link make the step long, the first stage's reduction and the tied
        embedding's come after them.
        """
        update_s = self.update_intervals[0].least_s if self.update_intervals else 0.0
        choices = range(1, self.max_layers[0] + 1)
        return min(self._after_last_backward_s(0, layers, update_s) for layers in choices)

    def _least_work_s(self, max_layers: Sequence[int], backward_from: int = 0) -> float:
        """Return the least seconds that all stages compute one micro-batch, over all splits.

        Args:
            max_layers: Most layers of each stage.
            backward_from: First stage whose backward pass counts; stages before it count their forward
                pass only.
        """
        extra_s = sum(self.extra_s[backward_from:]) + sum(self.extra_forward_s[:backward_from])
        if self.is_homogeneous:
            # Layers cost least on the stages that count the forward pass only.
            forward_only = min(
                self.layer_count - self.stage_count + backward_from,
                sum(max_layers[:backward_from]),
            )
            both = self.layer_count - forward_only
            return forward_only * self.forward_s[0] + both * self.block_s[0] + extra_s
        layer_s = [*self.forward_s[:backward_from], *self.block_s[backward_from:]]
        total_s = sum(layer_s) + extra_s
        remaining = self.layer_count - self.stage_count
        for stage in sorted(range(self.stage_count), key=layer_s.__getitem__):
            layers = min(remaining, max_layers[stage] - 1)
            total_s += layers * layer_s[stage]
            remaining -= layers
            if not remaining:
                break
        return total_s

    def _is_possible(self, step_s: float) -> bool:
        """Return whether all layers fit the limits that a step of `step_s` seconds sets for the stages."""
        return self._layer_limits(step_s, self.update_intervals[0].least_s) is not None

    def _layer_limits(
        self, step_s: float, update_s: float, update_limit_s: float = inf
    ) -> list[int] | None:
        """Return the most layers of each stage in a step of `step_s` seconds; None if no split can take it.

        Args:
            update_s: Least seconds of the longest update of all stages.
            update_limit_s: Seconds that no update may reach.
        """
        limits = list(self.max_layers)
        layers_before = 0  # most layers of the stages before
        first_end_s = self._after_last_backward_s(0, 1, update_s)
        others = self.stage_count - 1  # each other stage has one layer or more
        for stage in range(self.stage_count):
            update = self.after_backward[stage].update
            limit = update.layers_below(update_limit_s, limits[stage])
            limit = min(limit, self.layer_count - others)
            if limit < 1:
                return None
            limits[stage] = limit

            def stage_step_s(layers: int) -> float:
                return self._stage_step_s(stage, layers, layers_before, update_s, first_end_s)  # noqa: B023

            if stage_step_s(limit) > step_s:
                limits[stage] = bisect_right(range(1, limit), step_s, key=stage_step_s)
                if not limits[stage]:
                    return None
            layers_before += limits[stage]
        if sum(limits) < self.layer_count:
            return None
        for stages in self.stages_of_nodes:
            if not self._node_can_reduce(stages, limits, step_s):
                return None
        if self.crossing and not self._links_can_reduce(limits, step_s, update_s):
            return None
        return limits

    def _links_can_reduce(self, limits: Sequence[int], step_s: float, update_s: float) -> bool:
        """Return whether the shared links between clusters can carry the gradients of all layers in time."""
        remaining_s = step_s - self._last_backward_start_s(limits)
        all_links_s = self.links_before_s[-1]
        hop_remaining_s = [
            remaining_s - (all_links_s - self.links_before_s[max(hop.stages)])
            for hop in self.crossing
        ]
        first_stage_s = remaining_s - all_links_s - self.tied_s[0] - update_s
        blocks = blocks_at_most(self.crossing, limits, hop_remaining_s, first_stage_s)
        return blocks >= self.layer_count * ALMOST_ALL

    def _stage_step_s(
        self, stage: int, layers: int, layers_before: int, update_s: float, first_end_s: float
    ) -> float:
        """Return the least step time if `stage` has `layers` layers, in seconds.

        The layers of the other stages cost at least what they cost where they are cheapest.

        Args:
            layers_before: Most layers that the stages before can hold.
            update_s: Least seconds of the longest update of all stages.
            first_end_s: Least seconds of the first stage after its last backward pass.
        """
        others = self.layer_count - layers - self.stage_count + 1  # besides one layer a stage
        round_trip_s = self.round_trip_s[stage]
        down_s = self.down_s[stage]
        up_s = self.up_s[stage]
        if others:
            # A layer that moves elsewhere costs no more than on this stage, or fewer layers would
            # take longer and the bisection over `layers` would be wrong.
            layer_s = self.block_s[stage] if self.micro_batches > 1 else self.forward_s[stage]
            layer_down_s = min(self.layer_down_s[stage], layer_s)
            layer_round_trip_s = min(self.layer_round_trip_s[stage], layer_s)
            layer_up_s = min(self.layer_up_s[stage], layer_s - layer_down_s)
            is_last = stage == self.stage_count - 1
            if layer_down_s + layer_up_s <= layer_round_trip_s or is_last:
                before = others if is_last else min(others, layers_before - stage)
                down_s += before * layer_down_s
                up_s += before * layer_up_s
                round_trip_s += (others - before) * layer_round_trip_s
            else:
                least_down_s = min(layer_down_s, layer_round_trip_s)
                down_s += others * least_down_s
                up_s += others * (layer_round_trip_s - least_down_s)
        links_s = self.links_before_s[stage]
        last_backward_end_s = max(
            down_s + links_s + self._pass_times(stage, layers).seconds(round_trip_s),
            self.flow_end_s[stage] + layers * self.backward_s[stage],
        )
        way_up_s = up_s + links_s + first_end_s
        stage_end_s = self._after_last_backward_s(stage, layers, update_s)
        return last_backward_end_s + max(stage_end_s, way_up_s)

    def _after_last_backward_s(self, stage: int, layers: int, update_s: float) -> float:
        """Return the least seconds that a stage needs after its last backward pass.

        The sum has the reduction as far as it is not overlapped, the tied embedding's reduction, and the
        longest update (optimizer step and weight gather) of all stages.

        Args:
            update_s: Least seconds of the longest update.
        """
        after = self.after_backward[stage]
        backward_s = layers * self.backward_s[stage] + self.extra_backward_s[stage]
        hidden_s = after.overlapped * backward_s
        block_reduction_s, fixed_reduction_s = after.reduction
        reduction_s = layers * block_reduction_s + fixed_reduction_s
        exposed_s = max(0.0, reduction_s - hidden_s)
        block_update_s, fixed_update_s = after.update
        stage_update_s = layers * block_update_s + fixed_update_s
        return exposed_s + self.tied_s[stage] + max(update_s, stage_update_s)

    def _node_can_reduce(self, stages: Sequence[int], limits: Sequence[int], step_s: float) -> bool:
        """Return whether a node's NIC can reduce the gradients of the stages on it in time.

        No reduction begins before the first of all last backward passes. All stages together may have
        `sum(limits) - layer_count` layers less than their limits, so the node's stages have no fewer.
        """
        spare = sum(limits) - self.layer_count
        layers = max(len(stages), sum(limits[stage] for stage in stages) - spare)
        block_s = min(self.after_backward[stage].reduction.block_s for stage in stages)
        return self._last_backward_start_s(limits) + layers * block_s <= step_s

    def _last_backward_start_s(self, limits: Sequence[int]) -> float:
        """Return the seconds before which no stage's last backward pass begins.

        It does not begin before the stage's last forward pass has ended, with as many layers as the stage
        can have or few less, nor before all activations have gone down.
        """
        spare = sum(limits) - self.layer_count
        starts_s = []
        for stage, start in enumerate(self.last_backward_start):
            layers = limits[stage]
            if start.block_s > 0:
                layers = max(1, limits[stage] - spare // self.stage_count)
            work_s = self._least_work_s(limits, stage)
            starts_s.append(work_s + start.fixed_s + start.block_s * layers)
        flow_s = (self.micro_batches - 1) * max(self.interval_s, default=0.0)
        down_s = self._least_work_s(limits, self.stage_count) + self.links_before_s[-1] + flow_s
        return max(min(starts_s), down_s)
