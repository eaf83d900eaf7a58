"""Lower bound on a placement's step time over all ways to split its layers into pipeline stages.

The search for the best plan leaves a placement out if this bound is no better than the best
simulated step, so no simulated 1F1B step may ever be below it. (Interleaved schedules have a single
split: chunks.py.)

A step takes at least, for each stage, the sum of three times:

    way down      until the first activation arrives: forward passes and stage links of the stages before
    passes        the stage's own passes, and its waits for micro-batches that travel to the last stage and
                  back (passes.py)
    the end       after the stage's last backward pass, the larger of
                  the way up: backward passes and stage links of the stages before, then the end
                  of the first stage
                  its gradient reduction as far as not overlapped, the tied embedding's reduction,
                  then the longest optimizer step and weight gather of all stages (the gradient
                  norm is a barrier)

The passes also end no earlier than all activations have flowed over each stage link in sequence, and
the gradient of the last has come back.

The bound on the step follows from the bounds on the stages by bisection. A time T limits the layers
of each stage: its own layers make its passes longer, and the layers of the other stages cost at
least what they cost on the cheapest stage. If the limits sum to fewer layers than the model has, no
split takes T, and T is a lower bound; bisection finds the largest such T. Stages that share a NIC
or a link between clusters limit their layers together (crossing.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.placement import Placement
from holmes_ext.planner.bound.chunks import interleaved_s
from holmes_ext.planner.bound.crossing import blocks_at_most, shared_hops
from holmes_ext.planner.bound.passes import PassBounds
from holmes_ext.planner.bound.updates import LinearCost, UpdateInterval, update_intervals
from holmes_ext.planner.simulate.execution import Execution

#: Relative precision of the bisection.
PRECISION = 2e-3
#: Factor on the number of layers that absorbs rounding errors.
ALMOST_ALL = 1 - 1e-9


class _Ways(NamedTuple):
    """Least seconds that a micro-batch spends on all pipeline stages except a given stage.

    "Before" means earlier stages, "behind" later stages. The way down goes forward from the first
    stage to the given stage, the way up goes backward. _ways_with() makes this record.
    """

    down_s: float  # its forward passes on the stages before, without the stage links
    up_s: float  # its backward passes on the stages before, without the stage links
    #: From the stage to the last stage and back: forward and backward passes, and stage links.
    round_trip_s: float


class StepLowerBound(PassBounds):
    """Lower bound on the simulated step time of a placement, for every split of its layers."""

    def __init__(self, prices: Prices, placement: Placement, costs: StageCosts, run: Execution):
        super().__init__(prices, placement, costs, run)
        self.bound_communication()
        if run.virtual == 1:
            self._sum_along_pipeline()
            self._add_shared_resources()
            self._add_update_intervals()

    def _add_shared_resources(self) -> None:
        """Prepare the bounds on links and NICs that carry the reductions of several stages.

        No gradient reduction begins before its stage's last backward pass. So this method computes
        when that pass starts at the earliest: a linear function of the stage's number of layers.
        """
        #: Hops between clusters that carry the reductions of several stages.
        self.crossing = shared_hops(self) if self.prices.network.wan else []
        #: Seconds from the step's start to the start of each stage's last backward pass, without
        #: the passes of the other stages; only if a resource is shared.
        self.last_backward_start: list[LinearCost] = []
        if not self.stages_of_nodes and not self.crossing:  # no node or link has several stages
            return
        all_links_s = self.links_before_s[-1]
        for stage in range(self.stage_count):
            # The caller adds the time until the first micro-batch's backward pass here ends. Between
            # this pass and the last backward pass, the stage has to do `pairs` forward passes and
            # pairs - 1 backward passes. (Without pairs, the first backward pass may also be the last;
            # it starts its own duration before it ends: -1 backward pass.)
            pairs = self.micro_batches - self.warm_up[stage]
            block_s = pairs * self.block_s[stage] - self.backward_s[stage]
            # The first micro-batch goes down over all stage links, and up again to this stage.
            links_s = 2 * all_links_s - self.links_before_s[stage]
            # Between two pairs, sending an activation and a gradient blocks the stage.
            blocked_s = max(0, pairs - 1) * self._blocked_both_s(stage)
            # Embedding and output layer in the same passes as the blocks above.
            extra_s = pairs * self.extra_s[stage] - self.extra_backward_s[stage]
            fixed_s = links_s + blocked_s + extra_s
            self.last_backward_start.append(LinearCost(block_s, fixed_s))

    def _add_update_intervals(self) -> None:
        """Divide the possible seconds of the longest update into intervals.

        An update is a stage's optimizer step and weight gather. If a gradient norm is summed over
        all stages (has_norm_barrier), all updates start after that sum, so the longest update adds its
        whole time to the step. How long it is depends on the split of the layers, and the split is
        not known. The bound for an interval from 1.0 s to 1.1 s assumes 1.0 s for the longest update,
        and only splits with all updates below 1.1 s. Without a norm, a single interval (0 to inf) is
        enough.
        """
        self.update_intervals = [UpdateInterval(0.0, inf)]
        if not self.has_norm_barrier:
            return

        # Seconds of optimizer step and weight gather, linear in the layers of each stage.
        updates = (after.update for after in self.after_backward)
        # Equal stages: ((update, most layers), number of such stages).
        groups = tuple(Counter(zip(updates, self.max_layers)).items())

        # All placements of the same shape share this cache.
        cache = self.prices.cached_results
        key = ("update intervals", groups)
        if key not in cache:
            # The step is estimated: the computation of a stage of mean size with the fastest GPUs.
            mean_layers = self.layer_count / self.stage_count
            step_s = self.micro_batches * mean_layers * min(self.block_s)
            cache[key] = update_intervals(groups, self.layer_count, step_s)
        self.update_intervals = cache[key]

    def seconds(self, reached_s: float = inf) -> float:
        """Return a lower bound on the step time over all splits, in seconds; inf if no split fits.

        Args:
            reached_s: A step time already reached by another plan. A larger bound is not computed;
                `reached_s` is returned instead.
        """
        if self.run.virtual > 1:  # interleaved: equally many layers on all stages
            even = uniform(self.layer_count, self.stage_count)
            return interleaved_s(self) if self.fits(even) else inf
        if sum(self.max_layers) < self.layer_count or min(self.max_layers) < 1:  # by memory
            return inf
        low = self._simple_bound_s()  # from here on always a lower bound
        if low >= reached_s or (reached_s < inf and not self._is_possible(reached_s)):
            return reached_s
        # Find a possible step time by doubling, then the least possible one by bisection.
        high = min(reached_s, 2 * low)
        while high < reached_s and not self._is_possible(high):
            low = high
            high = min(reached_s, 2 * high)
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            if self._is_possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _simple_bound_s(self) -> float:
        """Return a quick lower bound on the step time, in seconds: the larger of two simple bounds.

        First, all micro-batches make round trips through the pipeline; then the first stage reduces
        its gradients and updates its weights. Second, the busiest NIC sends all its messages.
        """
        # A micro-batch's passes on all stages, with the split that computes fastest, and the stage
        # links there and back.
        round_trip_s = self._least_work_s(self.max_layers) + 2 * sum(self.stage_links_s)
        # A stage has at most max(warm_up) micro-batches under way. The next begins when the
        # oldest has returned, so each further round of that many micro-batches takes another round
        # trip.
        further_rounds = (self.micro_batches - 1) // max(self.warm_up)
        in_rounds_s = (further_rounds + 1) * round_trip_s

        # The activations follow each other over the slowest stage link.
        interval_s = max(self.interval_s, default=0.0)
        one_by_one_s = round_trip_s + (self.micro_batches - 1) * interval_s
        passes_s = max(in_rounds_s, one_by_one_s)

        # The activations and gradients of all micro-batches, through the NIC of a single stage.
        nic_s = self.micro_batches * max(self.nic_busy_s)
        # The first stage's end follows the last gradient's arrival. The NIC may be that of another
        # stage. It may still send while the first stage ends, so nothing is added to its time.
        return max(passes_s + self.first_stage_end_s(), nic_s)

    def first_stage_end_s(self) -> float:
        """Return the least seconds from the first stage's last backward pass to the step's end.

        After this pass come the part of the first stage's gradient reduction that no pass hides,
        the tied embedding's reduction, and the optimizer step with the gather of the new weights
        (update). The result is the sum of their times for the number of layers on the first stage
        that makes it shortest. It is inf if the first stage's memory holds no layer: then no split
        of the layers is possible.
        """
        if self.max_layers[0] < 1:
            return inf
        # The longest update of all stages takes at least the start of the first interval: they are
        # sorted, the shortest first.
        update_s = self.update_intervals[0].least_s if self.update_intervals else 0.0
        choices = range(1, self.max_layers[0] + 1)
        return min(self._after_last_backward_s(0, layers, update_s) for layers in choices)

    def _least_work_s(self, max_layers: Sequence[int], backward_from: int = 0) -> float:
        """Return the least seconds in which a micro-batch passes all stages in sequence.

        The layers are split over the stages in the best way for this sum.

        Args:
            max_layers: For each stage, the largest number of layers that it may have.
            backward_from: First stage whose backward pass counts, too; of earlier stages only the
                forward pass counts.
        """
        extra_s = sum(self.extra_s[backward_from:]) + sum(self.extra_forward_s[:backward_from])
        if self.is_homogeneous:
            # Layers cost least on the stages that count the forward pass only, so these have as
            # many as possible: all but 1 for each of the other stages, as far as memory allows.
            stages_with_backward = self.stage_count - backward_from
            forward_only = min(
                self.layer_count - stages_with_backward,
                sum(max_layers[:backward_from]),
            )
            both = self.layer_count - forward_only
            return forward_only * self.forward_s[0] + both * self.block_s[0] + extra_s

        # Each stage has 1 layer. The remaining layers go to the cheapest stages, as far as memory
        # allows.
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
        """Return whether a step of `step_s` seconds contradicts no lower bound, for some split of the layers.

        A step of this length sets a limit on the layers of each stage. It is possible if all layers
        of the model fit these limits.
        """
        return self._layer_limits(step_s, self.update_intervals[0].least_s) is not None

    def _layer_limits(
        self, step_s: float, update_s: float, update_limit_s: float = inf
    ) -> list[int] | None:
        """Return the most layers of each stage in a step of `step_s` seconds; None if it is too short.

        The limit of a stage is the largest number of layers with which its own lower bound on the
        step (_stage_step_s) is at most `step_s`. The step is too short, so `step_s` is a lower
        bound on every step, in three cases: a stage can have no layer; the limits sum to fewer
        layers than the model has; or NICs and links that several stages share cannot carry the
        gradients of all layers in time.

        Args:
            step_s: Seconds that the step may take.
            update_s: Lower bound on the longest update (optimizer step, weight gather) of any
                stage, in seconds; it counts for every stage.
            update_limit_s: Seconds that no update may reach; this limits the layers, too.
        """
        limits: list[int] = []
        # Least seconds of the first stage after its last backward pass: it has at least 1 layer.
        first_end_s = self._after_last_backward_s(0, layers=1, update_s=update_s)
        for stage in range(self.stage_count):
            update = self.after_backward[stage].update
            most_for_update = update.layers_below(update_limit_s, self.max_layers[stage])
            # Each other stage has at least 1 layer.
            limit = min(most_for_update, self.layer_count - (self.stage_count - 1))
            if limit < 1:
                return None
            # Every split that takes at most step_s respects the limits of the earlier stages. So
            # this stage's bound may assume that they have no more layers.
            layers_before = sum(limits)

            def stage_step_s(layers: int) -> float:
                """Return the bound on the step if this stage has so many layers."""
                return self._stage_step_s(stage, layers, layers_before, update_s, first_end_s)  # noqa: B023

            # More layers never make the step shorter. So if `limit` layers take too long, bisection
            # finds how many of 1, 2, ..., limit - 1 fit.
            if stage_step_s(limit) > step_s:
                limit = bisect_right(range(1, limit), step_s, key=stage_step_s)
                if not limit:
                    return None
            limits.append(limit)
        has_all_layers = sum(limits) >= self.layer_count
        if not has_all_layers or not self._can_reduce_in_time(limits, step_s, update_s):
            return None
        return limits

    def _can_reduce_in_time(self, limits: Sequence[int], step_s: float, update_s: float) -> bool:
        """Return whether NICs and links that several stages share can carry their gradients in time.

        Two resources are examined: the NIC of a node that holds several stages, and links between
        clusters over which several stages reduce. Each carries the gradients of its stages in
        sequence, so the layers of these stages are limited together.

        Args:
            limits: For each stage, the largest number of layers that it may have.
            step_s: Seconds of the step.
            update_s: Lower bound on the longest update of any stage, in seconds.
        """
        for stages in self.stages_of_nodes:  # the stages on each node, if several
            if not self._node_can_reduce(stages, limits, step_s):
                return False
        if not self.crossing:  # no link between clusters is shared
            return True
        return self._links_can_reduce(limits, step_s, update_s)

    def _links_can_reduce(self, limits: Sequence[int], step_s: float, update_s: float) -> bool:
        """Return whether the links between clusters can carry the gradients of all layers in time.

        A link is examined if several stages send the traffic of their gradient reductions over it
        (`self.crossing`).

        Args:
            limits: For each stage, the largest number of layers that it may have.
            step_s: Seconds of the step.
            update_s: Lower bound on the longest update (optimizer step and weight gather) of any
                stage, in seconds.
        """
        # Time from the first of all last backward passes, on the last stage, to the step's end.
        remaining_s = step_s - self._last_backward_start_s(limits)
        all_links_s = self.links_before_s[-1]
        hop_remaining_s = []
        for hop in self.crossing:
            # Reductions on this link begin on the last of its stages. Its last backward pass begins
            # later than that of the last stage of all, by the stage links in between.
            first_to_reduce = max(hop.stages)
            links_behind_s = all_links_s - self.links_before_s[first_to_reduce]
            hop_remaining_s.append(remaining_s - links_behind_s)

        # The first stage's last backward pass begins later by all stage links. After its reduction
        # the tied embedding's reduction and the update must still fit.
        first_stage_s = remaining_s - all_links_s - self.tied_s[0] - update_s

        # Most layers (blocks) of all stages whose gradients the links can carry in these times.
        blocks = blocks_at_most(self.crossing, limits, hop_remaining_s, first_stage_s)
        return blocks >= self.layer_count * ALMOST_ALL  # just below 1, for rounding errors

    def _stage_step_s(
        self, stage: int, layers: int, layers_before: int, update_s: float, first_end_s: float
    ) -> float:
        """Return a lower bound on the step time, in seconds, if `stage` has `layers` layers.

        The end of the stage's last backward pass divides the step in two parts. Each part takes at
        least the larger of two times, and the bound is the sum of both parts:

            1. from the step's start to this end
                 by_passes_s    The first activation comes through the earlier stages. Then the stage
                                does all its passes, and waits for gradients of the later stages.
                 by_messages_s  All activations pass the slowest stage link in sequence. The last one
                                reaches the last stage, its gradient comes back to this stage, and
                                the stage does the backward pass.
            2. from this end to the step's end
                 stage_end_s    The stage reduces its gradients and updates its weights.
                 way_up_s       The last gradient goes back through the earlier stages. Then the first
                                stage reduces and updates (`first_end_s`).

        Args:
            stage: The stage.
            layers: Its number of layers.
            layers_before: Largest number of layers that all earlier stages together can hold.
            update_s: Lower bound on the longest update (optimizer step, weight gather) of any
                stage, in seconds.
            first_end_s: Least seconds of the first stage's reduction and update.
        """
        # A micro-batch on the other stages: down_s and up_s are forward and backward passes of the
        # earlier stages, round_trip_s goes through the later stages and back.
        ways = self._ways_with(stage, layers, layers_before)
        links_s = self.links_before_s[stage]  # messages of the earlier stages, one way
        passes_s = self._pass_times(stage, layers).seconds(ways.round_trip_s)
        by_passes_s = ways.down_s + links_s + passes_s
        by_messages_s = self.flow_end_s[stage] + layers * self.backward_s[stage]
        stage_end_s = self._after_last_backward_s(stage, layers, update_s)
        way_up_s = ways.up_s + links_s + first_end_s
        return max(by_passes_s, by_messages_s) + max(stage_end_s, way_up_s)

    def _ways_with(self, stage: int, layers: int, layers_before: int) -> _Ways:
        """Return the least seconds that a micro-batch spends on all pipeline stages but `stage`.

        `stage` has `layers` layers, and each other stage has at least 1. The remaining layers are
        assumed where they lengthen the step least. On earlier stages they lengthen the way down
        (forward) and the way up (backward). On later stages they lengthen the round trip from
        `stage` to the last stage and back.

        Args:
            stage: The stage.
            layers: Its number of layers.
            layers_before: Largest number of layers that all earlier stages together can hold.
        """
        down_s = self.down_s[stage]
        up_s = self.up_s[stage]
        round_trip_s = self.round_trip_s[stage]
        further = self.layer_count - layers - (self.stage_count - 1)
        if not further:
            return _Ways(down_s, up_s, round_trip_s)

        # A layer on another stage counts at most as much as on this stage (layer_s; down and up
        # together). Then more layers here never lower the bound, as the caller's bisection needs.
        layer_s = self.block_s[stage] if self.micro_batches > 1 else self.forward_s[stage]
        layer_down_s = min(self.layer_down_s[stage], layer_s)
        layer_round_trip_s = min(self.layer_round_trip_s[stage], layer_s)
        layer_up_s = min(self.layer_up_s[stage], layer_s - layer_down_s)
        is_last = stage == self.stage_count - 1
        is_cheaper_before = layer_down_s + layer_up_s <= layer_round_trip_s
        if is_cheaper_before or is_last:
            # The earlier stages get as many layers as they can hold, besides 1 each. The later
            # stages get the others.
            before = further if is_last else min(further, layers_before - stage)
            down_s += before * layer_down_s
            up_s += before * layer_up_s
            round_trip_s += (further - before) * layer_round_trip_s
        else:
            # A layer costs less on later stages than both its passes on earlier stages. But the way
            # down counts by itself, too, and a forward pass alone may cost less. So the bound adds
            # the less of the two to the way down, and the rest of a later layer's cost to `up_s`.
            least_down_s = min(layer_down_s, layer_round_trip_s)
            down_s += further * least_down_s
            up_s += further * (layer_round_trip_s - least_down_s)
        return _Ways(down_s, up_s, round_trip_s)

    def _after_last_backward_s(self, stage: int, layers: int, update_s: float) -> float:
        """Return the least seconds that a stage needs after its last backward pass.

        The sum has the reduction as far as it is not overlapped, the tied embedding's reduction,
        and the longest update (optimizer step and weight gather) of all stages.

        Args:
            stage: Number of the stage.
            layers: Layers of the stage.
            update_s: Lower bound on the longest update of any stage, in seconds.
        """
        after = self.after_backward[stage]
        backward_s = layers * self.backward_s[stage] + self.extra_backward_s[stage]
        hidden_s = backward_s if after.overlapped else 0.0  # of the reduction, under the last pass
        block_reduction_s, fixed_reduction_s = after.reduction
        reduction_s = layers * block_reduction_s + fixed_reduction_s
        exposed_s = max(0.0, reduction_s - hidden_s)
        block_update_s, fixed_update_s = after.update
        stage_update_s = layers * block_update_s + fixed_update_s
        # update_s is only a lower bound on the longest update: this stage's may be longer.
        return exposed_s + self.tied_s[stage] + max(update_s, stage_update_s)

    def _node_can_reduce(self, stages: Sequence[int], limits: Sequence[int], step_s: float) -> bool:
        """Return whether a node's NIC can reduce the gradients of the stages on it within a step.

        No reduction begins before the first of all last backward passes (_last_backward_start_s).

        Args:
            stages: Stages on the node.
            limits: For each stage, the largest number of layers that it may have.
            step_s: Seconds of the step.
        """
        # The limits sum to `spare` layers more than the model has. In the best case for this node,
        # its stages have all these layers fewer than their limits (but each at least 1).
        spare = sum(limits) - self.layer_count
        layers = max(len(stages), sum(limits[stage] for stage in stages) - spare)
        block_s = min(self.after_backward[stage].reduction.block_s for stage in stages)
        return self._last_backward_start_s(limits) + layers * block_s <= step_s

    def _last_backward_start_s(self, limits: Sequence[int]) -> float:
        """Return the earliest start of any stage's last backward pass, in seconds of the step.

        A last backward pass begins only after all stages have ended their last forward pass. So
        each stage that has many layers gives a bound, by its own passes. The sum of `limits`
        exceeds the model's layers by `spare`. So some stage has at most spare / stages layers fewer
        than its limit. It may be any stage, so the least of their bounds is returned.

        Args:
            limits: For each stage, the largest number of layers that it may have.
        """
        spare = sum(limits) - self.layer_count
        most_missing = spare // self.stage_count  # from the limit of that stage
        starts_s = []
        # start: least seconds of the stage's own passes, and of messages, linear in its layers
        for stage, start in enumerate(self.last_backward_start):
            has_cost_for_layers = start.block_s > 0
            if has_cost_for_layers:  # fewest layers: least bound
                layers = max(1, limits[stage] - most_missing)
            else:  # most layers: least bound
                layers = limits[stage]
            # The first micro-batch passes all stages down, and those from `stage` on also up.
            first_returns_s = self._least_work_s(limits, backward_from=stage)
            starts_s.append(first_returns_s + start.fixed_s + start.block_s * layers)

        # All activations also pass the slowest stage link in sequence, on their way down.
        intervals_s = (self.micro_batches - 1) * max(self.interval_s, default=0.0)
        down_work_s = self._least_work_s(limits, backward_from=self.stage_count)
        down_s = down_work_s + self.links_before_s[-1] + intervals_s
        return max(min(starts_s), down_s)
