"""Tighter lower bound on a placement's step time, with the same split of the layers for all stages.

A split is the number of layers of each stage. The bound of least.py looks at each stage alone: the
other stages have the layers that suit this stage best. Here all stages have the layers of a common
split. Dynamic programming finds it: it follows the last backward pass of a step from the last stage
to the first. The bound is tighter, and returns a split that reaches it.
"""

from __future__ import annotations

from typing import NamedTuple

from holmes_ext.planner.bound.least import StepLowerBound
from holmes_ext.planner.bound.passes import PassTimes
from holmes_ext.planner.bound.updates import UpdateInterval

#: Relative precision of the bisection.
PRECISION = 2e-4


class ChainedBound(NamedTuple):
    """Lower bound on the step time, and a split of the layers over the stages that has this bound.

    ChainBound.chained() makes it. "Chained": computed stage by stage, each stage from the result of
    the next stage, so that all stages have the layers of the same split.
    """

    step_s: float
    split: tuple[int, ...]  # () if no split is faster than the step time already reached


class _StageChoices(NamedTuple):
    """Best number of layers of a stage, for each total of layers on it and on all later stages.

    With the best number, the stage's last backward pass can end first. The dynamic program of
    ChainBound makes such a table for each stage.
    """

    #: Sum of layers -> least moment at which the stage's last backward pass ends, in seconds.
    end_s: dict[int, float]
    #: Sum of layers -> number of layers on the stage itself for which that moment is reached.
    stage_layers: dict[int, int]


class _StageTimes(NamedTuple):
    """Times of a stage for every number of its layers: item n is for n layers."""

    passes: list[PassTimes]  # all passes of the stage
    after_s: list[float]  # gradient reduction and update after the last backward pass, in seconds


class ChainBound(StepLowerBound):
    """Lower bound on the step time of a placement, with the same split for all stages.

    A split is the number of layers of each stage. The base class lets each stage assume the split
    that suits this stage best, so its bound is lower.
    """

    def chained(self, low: float, reached_s: float) -> ChainedBound:
        """Return a lower bound on the step time between `low` and `reached_s`, found by bisection.

        The bounds of the stages are chained: a stage's last backward pass follows that of the next
        stage, so all stages have the layers of the same split (the number of layers of each stage).

        Args:
            low: A lower bound, in seconds.
            reached_s: A step time already reached by another plan, in seconds.

        Returns:
            The bound and a split; (`reached_s`, ()) if no split can take less than `reached_s`.
        """
        split = self._possible_split(reached_s)
        if not split:
            return ChainedBound(reached_s, ())
        high = reached_s

        # A split that may take `high` is known; no split can take less than `low`.
        while high - low > PRECISION * low:
            middle = (low + high) / 2
            faster_split = self._possible_split(middle)
            if faster_split:
                split = faster_split
                high = middle
            else:
                low = middle
        return ChainedBound(low, split)

    def _possible_split(self, step_s: float) -> tuple[int, ...]:
        """Return a split of the layers with a lower bound on the step of at most `step_s` seconds.

        A split is the number of layers of each stage; () if there is none with such a bound.
        """
        # The seconds of the longest update lie in one of these intervals. Try each of them.
        for interval in self.update_intervals:
            split = self._split_within(step_s, interval)
            if split:
                return split
        return ()

    def _split_within(self, step_s: float, update: UpdateInterval) -> tuple[int, ...]:
        """Return a split of the layers that can reach a step of `step_s` seconds, by its bound.

        A split is the number of layers of each stage. Its lower bound is at most `step_s`; the
        result is () if no split has such a bound. Dynamic programming goes from the last stage to
        the first. For each total of layers on a stage and all later stages, it keeps the earliest
        end of the stage's last backward pass, in seconds from the start of the step.

        Args:
            step_s: Largest bound on the step time, in seconds.
            update: Range of seconds in which the longest update (optimizer step and weight gather)
                of all stages is assumed to lie.
        """
        # Largest number of layers of each stage in such a step; None if their sum is too small.
        limits = self._layer_limits(step_s, update.least_s, update.limit_s)
        if limits is None:
            return ()

        # Layers behind a stage -> least end of the next stage's last backward pass. Behind the last
        # stage are no layers and nothing to wait for.
        end_of: dict[int, float] = {0: 0.0}
        choices_of_stages = []  # from the last stage to the first

        # Layers that the stages before can hold. A stage must take those that do not fit there.
        most_before = sum(limits)
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

        # Read the split from the first stage to the last. The first has all layers on it and behind
        # it.
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
        """Return the table of a stage in the dynamic program over the stages.

        The table has an entry for each possible number of layers on this stage and all later stages
        together (the total). The entry is the number of layers on this stage with which its last
        backward pass can end first, and the moment when it ends. Numbers with which the step would
        exceed `step_s` are left out. Example: of a total of 10, the stage has 4 and the later
        stages have 6; its last backward pass ends after 2.5 s at the earliest.

        Args:
            stage: The stage.
            limit: Largest number of layers that the stage may have.
            end_of: The next stage's table: layers on all later stages -> earliest end of the next
                stage's last backward pass, in seconds.
            most_before: Largest number of layers that all earlier stages together may have.
            step_s: Seconds that the step may take.
            update_s: Lower bound on the longest update (optimizer step and weight gather) of any
                stage, in seconds.
        """
        choices = _StageChoices(end_s={}, stage_layers={})
        times = _StageTimes(
            passes=[self._pass_times(stage, layers) for layers in range(limit + 1)],
            after_s=[
                self._after_last_backward_s(stage, layers, update_s) for layers in range(limit + 1)
            ],
        )
        for behind, behind_end_s in end_of.items():
            available = self.layer_count - behind  # for this stage and the stages before
            # The stages before must hold the remaining layers, and have at least 1 each.
            least_layers = max(1, available - most_before)
            most_layers = min(limit, available - stage)
            layer_numbers = range(least_layers, most_layers + 1)
            # Enters each of these numbers under the total behind + number, if it ends earlier than
            # the number already there.
            self._keep_earliest_ends(
                choices, stage, times, layer_numbers, behind, behind_end_s, step_s
            )
        return choices

    def _keep_earliest_ends(
        self,
        choices: _StageChoices,
        stage: int,
        times: _StageTimes,
        layer_numbers: range,
        behind: int,
        behind_end_s: float,
        step_s: float,
    ) -> None:
        """Enter a stage's numbers of layers in its table, for a given number of layers behind it.

        For each number, this method computes a lower bound on the end of the stage's last backward
        pass, in seconds from the step's start. The number replaces the entry for the same total of
        layers if its bound is earlier. It is skipped if the work after that pass would end later
        than `step_s`. The bound is the latest of these moments, as the pass cannot end before any
        of them:

            own passes     The first activation arrives, after forward passes of all earlier stages.
                           Then the stage does all its passes, and waits for round trips of
                           micro-batches over the later stages.
            next stage     The next stage ends its last backward pass. Its gradient arrives, and
                           this stage does its own last backward pass.
            NIC            The stage's NIC has sent all messages.

        Args:
            choices: Table of the stage: total of layers on it and behind it -> earliest end of its
                last backward pass, and its number of layers then. This method changes it.
            stage: The stage.
            times: Times of the stage, by its number of layers.
            layer_numbers: Numbers of layers of the stage to add.
            behind: Layers on all later stages together.
            behind_end_s: Earliest end of the next stage's last backward pass, in seconds.
            step_s: Seconds that the step may take; numbers of layers that take longer are skipped.
        """
        # Lists by stage, from the base classes (seconds of a micro-batch):
        #   forward_s, backward_s    a pass of a layer
        #   extra_..._s              a pass of the embedding or output layer
        #   down_s, links_before_s   forward passes and messages of all earlier stages
        #   round_trip_s             passes and messages of all later stages, there and back
        #   layer_..._s              least seconds that another layer on those stages adds
        #   nic_busy_s               messages through the stage's NIC
        forward_s = self.forward_s[stage]
        backward_s = self.backward_s[stage]
        layer_down_s = self.layer_down_s[stage] if stage else 0.0

        # Own passes. A stage has at least 1 layer; the further layers are counted separately.
        first_arrival_s = self.down_s[stage] + self.links_before_s[stage]  # 1 layer on each before
        later_stages = self.stage_count - 1 - stage
        further_behind = behind - later_stages
        round_trip_s = self.round_trip_s[stage]
        if further_behind:
            round_trip_s += further_behind * self.layer_round_trip_s[stage]

        # Next stage: the last backward pass of this stage's layers starts after its gradient. On the
        # last stage, it starts after all activations have arrived over the slowest link.
        if later_stages:
            gradient_arrival_s = behind_end_s + self.stage_links_s[stage]
            last_backward_start_s = gradient_arrival_s + self.extra_backward_s[stage]
        else:
            last_backward_start_s = self.flow_end_s[stage]

        # NIC: it begins to send after the first forward pass. The last message that it sends is the
        # gradient of the last backward pass, which arrives a stage link after this pass.
        sent_s = self.micro_batches * self.nic_busy_s[stage]
        link_before_s = self.stage_links_s[stage - 1] if stage else 0.0
        sent_end_s = first_arrival_s + self.extra_forward_s[stage] + sent_s - link_before_s
        passes, after_s = times
        least_end_s, stage_layers = choices  # the dictionaries, filled below
        for layers in layer_numbers:
            # Layers on the earlier stages, besides 1 on each: they delay the first activation.
            further_before = self.layer_count - behind - layers - stage
            further_down_s = layer_down_s * further_before
            one_trip_s, two_trips_s, many_trips_s, rounds = passes[layers]
            # PassTimes.seconds(round_trip_s), written out: this loop takes most of the time
            passes_s = max(
                one_trip_s + round_trip_s,
                two_trips_s + 2 * round_trip_s,
                many_trips_s + (rounds + 1) * round_trip_s,
            )
            own_passes_end_s = passes_s + first_arrival_s + further_down_s
            end_s = max(own_passes_end_s, last_backward_start_s + backward_s * layers)
            if end_s + after_s[layers] > step_s:
                continue
            if sent_s:
                end_s = max(end_s, sent_end_s + forward_s * layers + further_down_s)
            total = behind + layers
            if total not in least_end_s or end_s < least_end_s[total]:
                least_end_s[total] = end_s
                stage_layers[total] = layers
