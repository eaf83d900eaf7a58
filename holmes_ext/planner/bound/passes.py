"""Lower bounds on the time that a pipeline stage takes for all its passes under 1F1B.

The bounds hold for every way to split the layers into stages. Letters of the formulas, for a
stage:

    f, b    seconds of a forward and of a backward pass of a micro-batch; w = f + b
    m       number of micro-batches
    u       warm-up depth: micro-batches that the stage begins before its first backward pass
    D       round trip: seconds from the end of a forward pass on the stage until the micro-batch has passed
            all stages behind, forward and backward, and its gradient arrives back
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

from holmes_ext.planner.bound.stages import StageBounds
from holmes_ext.planner.bound.updates import ROUNDING


class PassTimes(NamedTuple):
    """Lower bounds on the time of all passes of a stage under 1F1B, without its waits for later stages.

    The stage waits while a micro-batch makes a round trip: to the last stage and back. A round trip
    depends on the layers of the later stages, so the fields do not include it, and seconds() adds it.
    PassBounds._pass_times() makes a record for each number of layers of the stage.
    """

    one_trip_s: float  # if the stage waits for a single round trip
    #: If it waits for the round trips of the first and of the last micro-batch; -inf (no bound) if
    #: there are no more micro-batches (m) than the warm-up depth u.
    two_trips_s: float
    many_trips_s: float  # if it waits for rounds + 1 round trips
    rounds: int  # most rounds of u micro-batches after the first micro-batch: (m - 1) // u

    def seconds(self, round_trip_s: float) -> float:
        """Return the least seconds of all passes of a stage, if a round trip takes `round_trip_s` seconds.

        A round trip is the way of a micro-batch through all later stages and back.
        """
        one_trip = self.one_trip_s + round_trip_s
        two_trips = self.two_trips_s + 2 * round_trip_s
        many_trips = self.many_trips_s + (self.rounds + 1) * round_trip_s
        return max(one_trip, two_trips, many_trips)


class PassBounds(StageBounds):
    """Lower bounds on the time of every stage's passes under 1F1B, for any number of layers."""

    def _sum_along_pipeline(self) -> None:
        """Set the least seconds that a micro-batch spends before and behind each stage of the pipeline.

        They become attributes of this object: lists by stage, with 1 layer on every stage. Down
        is the way of an activation from the first stage to the last, up that of its gradient back.

            down_s, up_s, links_before_s    forward passes, backward passes and messages (one way)
                                            on the stages before this stage
            round_trip_s                    from this stage down to the last, and up to it again
            layer_down_s, layer_up_s, layer_round_trip_s    least seconds that each further layer adds
        """
        stages = range(self.stage_count)
        forward_s = map(sum, zip(self.forward_s, self.extra_forward_s))
        backward_s = map(sum, zip(self.backward_s, self.extra_backward_s))
        both_s = map(sum, zip(self.block_s, self.extra_s))
        # Item s of these lists: sum over the stages before stage s. The last item: over all stages.
        #: Stage links, forward passes ("down") and backward passes ("up") before each stage.
        self.links_before_s = [0.0, *accumulate(self.stage_links_s)]
        self.down_s = [0.0, *accumulate(forward_s)]
        self.up_s = [0.0, *accumulate(backward_s)]
        both_before_s = [0.0, *accumulate(both_s)]
        all_links_s = self.links_before_s[-1]
        #: Round trip of a micro-batch from the stage to the last stage and back: both passes on the
        #: later stages, and the links between, twice. both_before_s[stage + 1] is the sum up to
        #: and with this stage, so the difference to the last item is that of the later stages.
        self.round_trip_s = [
            both_before_s[-1]
            - both_before_s[stage + 1]
            + 2 * (all_links_s - self.links_before_s[stage])
            for stage in stages
        ]
        #: Least seconds that another layer on the stages before adds, forward (down) and backward
        #: (up).
        self.layer_down_s = list(accumulate(self.forward_s, min, initial=inf))
        self.layer_up_s = list(accumulate(self.backward_s, min, initial=inf))

        # Item n: the least over the last n stages. Stage s has stage_count - 1 - s stages behind.
        least_of_last_s = list(accumulate(reversed(self.block_s), min, initial=inf))
        #: Least seconds that another layer on the stages behind adds to the round trip.
        self.layer_round_trip_s = [
            least_of_last_s[self.stage_count - 1 - stage] for stage in stages
        ]
        #: Least end of each stage's last backward pass, as all activations share the stage links.
        self.flow_end_s = self._flow_ends()
        #: For each stage: number of layers -> pass times, filled on demand.
        self.pass_times: list[dict[int, PassTimes]] = [{} for _ in stages]

    def _flow_ends(self) -> list[float]:
        """Return the earliest end of each stage's last backward pass, in seconds of the step.

        All activations pass the slowest stage link in sequence, `interval_s` seconds apart. Then
        the gradient of the last activation comes back from the last stage to this stage. The number
        of layers of this stage is not known. So the result does not include the backward passes of
        its layers: the caller adds them.
        """
        # The last item of these lists is the sum over all stages, with 1 layer on each.
        all_forward_s = self.down_s[-1]
        all_backward_s = self.up_s[-1]
        all_links_s = self.links_before_s[-1]

        # The first activation reaches the last stage, after the forward passes of all layers.
        further_layers = self.layer_count - self.stage_count  # besides 1 on each stage
        further_forward_s = further_layers * min(self.forward_s)
        first_activation_down_s = all_forward_s + further_forward_s + all_links_s
        # The other activations follow. The gradient of the last passes all stages back to the first.
        others_down_s = (self.micro_batches - 1) * max(self.interval_s, default=0.0)
        first_stage_end_s = first_activation_down_s + (others_down_s + all_links_s + all_backward_s)

        ends_s = []
        for stage in range(self.stage_count):
            # Without the way from this stage to the first stage, and without this stage's own layer.
            end_s = first_stage_end_s - self.links_before_s[stage] - self.up_s[stage]
            ends_s.append(end_s - self.backward_s[stage])
        return ends_s

    def _blocked_up_s(self, stage: int) -> float:
        """Return the seconds for which sending a gradient to the previous stage blocks a stage's passes."""
        return self.sender_blocked_s[stage - 1] if stage else 0.0

    def _blocked_both_s(self, stage: int) -> float:
        """Return the seconds for which sending an activation and a gradient blocks a stage's passes."""
        blocked_down_s = 0.0
        if stage < self.stage_count - 1:
            blocked_down_s = self.sender_blocked_s[stage]
        return self._blocked_up_s(stage) + blocked_down_s

    def _pass_times(self, stage: int, layers: int) -> PassTimes:
        """Return the least seconds of all passes of a stage that has `layers` layers.

        The result leaves out the stage's waits for round trips: a round trip is the time of a
        micro-batch on the later stages, there and back. PassTimes.seconds() adds them, as their
        length is known to the caller only. The result is kept, so that each number of layers is
        computed once.
        """
        if layers not in self.pass_times[stage]:
            self.pass_times[stage][layers] = self._computed_pass_times(stage, layers)
        return self.pass_times[stage][layers]

    def _computed_pass_times(self, stage: int, layers: int) -> PassTimes:
        """Compute the least seconds of all passes of a stage, without its waits for round trips.

        A round trip is the time of a micro-batch on the later stages, there and back. A stage with
        1F1B has at most `warm_up` micro-batches under way, so it waits for at least 1 round trip.
        The result has a sum of the stage's own passes and sends for several numbers of round trips.
        With the round trips added, each is a lower bound, and the caller takes the largest.
        """
        micro_batches = self.micro_batches
        warm_up = self._warm_up_with(stage, layers)
        # Seconds for which sends block the stage (0 if they do not): up is a gradient to the stage
        # before; both is a gradient, and an activation to the next stage.
        blocked_up_s = self._blocked_up_s(stage)
        blocked_both_s = self._blocked_both_s(stage)
        forward_s = layers * self.forward_s[stage] + self.extra_forward_s[stage]
        pair_s = layers * self.block_s[stage] + self.extra_s[stage]  # a forward and a backward pass

        # A single round trip: the first backward pass waits for that of the first micro-batch.
        # Meanwhile the stage computes only warm_up - 1 forward passes.
        hidden_s = (warm_up - 1) * forward_s  # by the round trip
        # After the warm-up, each pair of passes sends an activation and a gradient. At the end,
        # warm_up backward passes are left. Each sends a gradient; the last delays no other pass.
        sends_of_pairs_s = (micro_batches - warm_up) * blocked_both_s
        sends_at_end_s = (warm_up - 1) * blocked_up_s
        one_trip_s = micro_batches * pair_s - hidden_s + sends_of_pairs_s + sends_at_end_s

        def in_rounds(rounds: int) -> float:
            """Return the seconds if the last `rounds` * `warm_up` micro-batches come in rounds.

            A pair is a forward and a backward pass of this stage. A micro-batch begins only when
            the backward pass of the micro-batch `warm_up` before it has ended. So of a round, only a
            pair and a round trip are certain to follow each other. The result has three parts,
            without the round trips:

                first micro-batch                a pair, and a round trip
                micro-batches in no round        a pair each, and the sends between two pairs
                each round                       a pair, and a round trip
            """
            in_no_round = micro_batches - 1 - rounds * warm_up
            pairs = 1 + in_no_round + rounds
            # Sending an activation and a gradient may block the stage.
            sends_between = max(0, in_no_round - 1)
            return pairs * pair_s + sends_between * blocked_both_s

        # The time is linear in the number of rounds, so no other number than the fewest and the
        # most can give a larger bound.
        max_rounds = (micro_batches - 1) // warm_up
        if max_rounds == 0:
            two_trips_s = -inf  # no round, no bound
            many_trips_s = -inf
        else:
            two_trips_s = in_rounds(1)
            many_trips_s = in_rounds(max_rounds)
        return PassTimes(one_trip_s, two_trips_s, many_trips_s, max_rounds)

    def _warm_up_with(self, stage: int, layers: int) -> int:
        """Return the most micro-batches that a stage can begin before its first backward pass.

        The GPU's memory limits it, with `layers` layers on the stage. The result is never below the
        number of 1F1B, even if that does not fit; the simulation does the same. Only a schedule
        that hides the messages between stages (`async_stage_links`) begins more micro-batches than
        1F1B, so only then the memory is examined.
        """
        costs = self.costs  # room_bytes: a GPU's memory for this stage, inf if unknown
        warm_up = self.warm_up[stage]
        if not self.async_stage_links or costs.room_bytes[stage] == inf:
            return warm_up

        # Bytes of a micro-batch's activations, and of weights, gradients and optimizer.
        kept_bytes = self._stage_bytes(stage, layers, costs.kept_bytes)
        if not kept_bytes:
            return warm_up
        state_bytes = self._stage_bytes(stage, layers, costs.state_bytes)
        free_bytes = costs.room_bytes[stage] - state_bytes

        # ROUNDING: a quotient just below a whole number counts as that number, so the bound stays
        # valid.
        fitting = floor(free_bytes / kept_bytes * (1 + ROUNDING))
        warm_up_1f1b = min(self.stage_count - stage, self.micro_batches)
        return min(warm_up, max(fitting, warm_up_1f1b))

    def _stage_bytes(self, stage: int, layers: int, layer_bytes: Sequence[float]) -> float:
        """Return the bytes of a stage's layers, and of its embedding and output layer.

        The caller chooses which bytes: `layer_bytes` may be those of activations, or of weights,
        gradients and optimizer state.

        Args:
            stage: Number of the stage. The first also has the embedding, the last the output layer.
            layers: Number of transformer layers (blocks).
            layer_bytes: Bytes of (embedding, block, output layer).
        """
        embedding_bytes, block_bytes, output_bytes = layer_bytes
        ends_bytes = 0.0
        if stage == 0:
            ends_bytes += embedding_bytes
        if stage == self.stage_count - 1:
            ends_bytes += output_bytes
        return layers * block_bytes + ends_bytes
