"""Lower bound on a placement's step time that follows the last backward passes from stage to stage.

The bound of least.py looks at each stage alone: the other stages are as fast as any split makes them. Here
one split is valid for all stages. The bound is closer, and returns a split that reaches it.
"""

from __future__ import annotations

from typing import NamedTuple

from holmes_ext.planner.bound.least import StepLowerBound, UpdateInterval

#: Relative precision of the bisection.
PRECISION = 2e-4


class ChainedBound(NamedTuple):
    """Lower bound on the step time, and a split of the layers that the bound allows."""

    step_s: float
    split: tuple[int, ...]  # () if no split is faster than the step time already reached


class _StageChoices(NamedTuple):
    """Best ways to put layers on a stage and the stages behind it, by their number of layers together."""

    #: Layers -> least moment at which the stage's last backward pass ends, in seconds.
    end_s: dict[int, float]
    #: Layers -> how many of them are on the stage itself.
    stage_layers: dict[int, int]


class ChainBound(StepLowerBound):
    """Lower bound on the step time of one placement, with one split for all stages."""

    def chained(self, low: float, known: float) -> ChainedBound:
        """Return a lower bound on the step time between `low` and `known`, found by bisection.

        Args:
            low: A lower bound, in seconds.
            known: A step time already reached, in seconds.

        Returns:
            The bound and a split; (`known`, ()) if no split can take less than `known`.
        """
        split = self._possible_split(known)
        if not split:
            return ChainedBound(known, ())
        while known - low > PRECISION * low:
            middle = (low + known) / 2
            faster_split = self._possible_split(middle)
            if faster_split:
                split = faster_split
                known = middle
            else:
                low = middle
        return ChainedBound(low, split)

    def _possible_split(self, step_s: float) -> tuple[int, ...]:
        """Return a split whose lower bound is at most `step_s` seconds; () if there is none."""
        for interval in self.update_intervals:
            split = self._split_within(step_s, interval)
            if split:
                return split
        return ()

    def _split_within(self, step_s: float, update: UpdateInterval) -> tuple[int, ...]:
        """Return a split that may take `step_s` seconds if the longest update lies in an interval.

        Dynamic programming from the last stage to the first: for each number of layers on the stages so
        far, the least moment at which the last backward pass of the front stage ends.
        """
        limits = self._layer_limits(step_s, update.least_s, update.limit_s)
        if limits is None:
            return ()
        end_of: dict[int, float] = {0: 0.0}  # layers behind -> end of the last backward pass there
        choices_of_stages = []  # from the last stage to the first
        most_before = sum(limits)  # layers that the stages before can hold
        for stage in reversed(range(self.stage_count)):
            most_before -= limits[stage]
            choices = self._stage_choices(
                stage,
                limit=limits[stage],
                end_of=end_of,
                most_before=most_before,
                step_s=step_s,
                update_s=update.least_s,
            )
            end_of = choices.end_s
            choices_of_stages.append(choices)

        # Read the split from the first stage to the last: each choice says how many layers are left behind.
        remaining = self.layer_count
        split = []
        for choices in reversed(choices_of_stages):
            if remaining not in choices.stage_layers:  # no split is fast enough
                return ()
            layers = choices.stage_layers[remaining]
            split.append(layers)
            remaining -= layers
        return tuple(split)

    def _stage_choices(
        self,
        stage: int,
        limit: int,
        end_of: dict[int, float],
        most_before: int,
        step_s: float,
        update_s: float,
    ) -> _StageChoices:
        """Return, for each number of layers on a stage and behind it, the choice that ends first.

        The last backward pass of a stage ends after the stage's passes, after the next stage's last
        backward pass and the stage link, and after the stage's NIC has sent all messages.

        Args:
            limit: Most layers of the stage.
            end_of: Layers behind the stage -> least end of the next stage's last backward pass.
            most_before: Most layers of all stages before.
            step_s: Seconds that the step may take.
            update_s: Least seconds of the longest update of all stages.
        """
        is_last = stage == self.stage_count - 1
        forward_s = self.forward_s[stage]
        backward_s = self.backward_s[stage]
        link_s = 0.0 if is_last else self.stage_links_s[stage]
        link_before_s = self.stage_links_s[stage - 1] if stage else 0.0
        layer_down_s = self.layer_down_s[stage] if stage else 0.0
        down_s = self.down_s[stage] + self.links_before_s[stage]
        sent_s = self.micro_batches * self.nic_busy_s[stage]
        # The NIC begins to send after the first forward pass; its last gradient arrives a stage link later.
        sent_end_s = down_s + self.extra_forward_s[stage] + sent_s - link_before_s
        passes = [self._pass_times(stage, layers) for layers in range(limit + 1)]
        after_s = [
            self._after_last_backward_s(stage, layers, update_s) for layers in range(limit + 1)
        ]
        stages_behind = self.stage_count - 1 - stage
        choices = _StageChoices(end_s={}, stage_layers={})
        least_end_s, stage_layers = choices  # both are filled below
        for behind, behind_end_s in end_of.items():
            available = self.layer_count - behind
            more_behind = behind - stages_behind  # besides one layer a stage
            round_trip_s = self.round_trip_s[stage]
            round_trip_s += more_behind * self.layer_round_trip_s[stage] if more_behind else 0.0
            if is_last:
                before_backward_s = self.flow_end_s[stage]
            else:
                before_backward_s = behind_end_s + link_s + self.extra_backward_s[stage]
            for layers in range(max(1, available - most_before), min(limit, available - stage) + 1):
                times = passes[layers]
                more_down_s = layer_down_s * (available - layers - stage)
                passes_s = max(
                    times.one_trip_s + round_trip_s,
                    times.two_trips_s + 2 * round_trip_s,
                    times.many_trips_s + (times.rounds + 1) * round_trip_s,
                )
                end_s = max(
                    passes_s + down_s + more_down_s, before_backward_s + backward_s * layers
                )
                if end_s + after_s[layers] > step_s:
                    continue
                if sent_s:
                    end_s = max(end_s, sent_end_s + forward_s * layers + more_down_s)
                total = behind + layers
                if total not in least_end_s or end_s < least_end_s[total]:
                    least_end_s[total] = end_s
                    stage_layers[total] = layers
        return choices
