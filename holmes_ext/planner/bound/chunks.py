"""Lower bound on the simulated step time of an interleaved schedule (1F1B: least.py).

A stage has several chunks of layers, all of the same size, so a placement has a single split. A pass
is the work of a micro-batch on a chunk. A lap is the way of a micro-batch through a chunk of every
stage. A stage first passes as many micro-batches as there are stages through its first chunk, then the
same micro-batches through its second chunk, and so on; then the next micro-batches follow. The
backward passes take the chunks in the opposite order.

The bound is computed from the earliest possible times of four events on each stage. Each is the
largest of several times that the event cannot precede (the functions derive them):

    first forward pass starts
    first backward pass starts
    last forward pass ends
    last backward pass ends

The reductions follow. If they overlap with the backward pass, those of the chunks that end last are
left; else those of all chunks. Then the tied embedding's follows. A NIC that carries both the
activations and the reductions of its stage must send all of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from holmes_ext.planner.bound.stages import StageBounds


def interleaved_s(bounds: StageBounds) -> float:
    """Return a lower bound on the simulated step time of an interleaved schedule, in seconds."""
    return _InterleavedBound(bounds).step_s()


class _InterleavedBound:
    """Earliest possible times of every stage's first and last passes, in seconds.

    They count from the step's start, for an interleaved schedule: each stage has several chunks of
    layers. A pass is the work of a micro-batch on a chunk, forward or backward. A lap is the way of a
    micro-batch through a chunk of every stage, back to the stage where it began. Lists have an entry
    for each stage.
    """

    def __init__(self, bounds: StageBounds):
        """Compute when each stage of an interleaved pipeline can start and end its passes at the earliest.

        The results are the last four attributes: start of the first and end of the last forward
        pass, and the same for the backward passes. A pass is the work of a micro-batch on a chunk
        of layers.

        Args:
            bounds: Least seconds of a layer, a message and a reduction on every stage of a
                placement.
        """
        self.bounds = bounds
        self.chunks = bounds.run.virtual
        self.micro_batches = bounds.micro_batches
        self.stage_count = bounds.stage_count
        self.stage_links_s = bounds.stage_links_s
        self.stage_layers = bounds.layer_count // bounds.stage_count
        #: Forward passes of each stage in a step: one for each chunk and micro-batch. There are as
        #: many backward passes.
        self.passes = self.chunks * self.micro_batches
        #: Seconds of a pass through a chunk.
        self.forward_s = self._of_chunk(bounds.forward_s)
        self.backward_s = self._of_chunk(bounds.backward_s)
        #: Embedding and output layer.
        self.embedding_forward_s = bounds.extra_forward_s[0]
        self.output_forward_s = bounds.extra_forward_s[-1]
        self.output_backward_s = bounds.extra_backward_s[-1]
        #: Forward passes of each stage before it does a forward and a backward pass in turn.
        self.warm_up = [self._warm_up(stage) for stage in range(self.stage_count)]
        #: Forward passes of each stage before its first backward pass: those of the warm-up, and the
        #: next one, as a forward pass comes first in each turn. The schedule is symmetric: as many
        #: backward passes come after the last forward pass.
        self.in_flight = [min(passes + 1, self.passes) for passes in self.warm_up]
        #: Seconds of a lap: a micro-batch goes through a chunk of every stage, and over the link from
        #: the last stage to the next chunk of the first (last_to_first).
        links_s = sum(self.stage_links_s)
        self.forward_lap_s = sum(self.forward_s) + links_s + bounds.last_to_first.total_s
        self.backward_lap_s = sum(self.backward_s) + links_s + bounds.last_to_first.total_s

        # The results: by stage, in seconds from the step's start.
        self.first_forward_start_s = self._first_forward_starts()
        self.first_backward_start_s = self._first_backward_starts()
        self.last_forward_end_s = self._last_forward_ends()
        self.last_backward_end_s = self._last_backward_ends()

    def _of_chunk(self, block_s: Sequence[float]) -> list[float]:
        """Convert seconds for a single layer (block) on each stage into seconds for a chunk of layers."""
        return [self.stage_layers * seconds / self.chunks for seconds in block_s]

    def _warm_up(self, stage: int) -> int:
        """Return how many forward passes a stage does before forward and backward passes alternate.

        The number is that of Megatron's interleaved schedule:

            2 * stages behind this stage + (chunks of a stage - 1) * number of stages

        If there are no more micro-batches than stages, all forward passes come first.
        """
        if self.micro_batches <= self.stage_count:  # all forward passes come first
            return self.passes
        stages_behind = self.stage_count - stage - 1
        return min(self.passes, stages_behind * 2 + (self.chunks - 1) * self.stage_count)

    def _lap_waits_s(self, lap_s: float, each_s: float, laps: int | None = None) -> float:
        """Return the seconds that a stage idles because micro-batches return late for its next chunk.

        A stage passes `stage_count` micro-batches through one of its chunks of layers. Then it
        begins the next chunk with the first of them. This micro-batch must have passed a chunk of
        every stage by then: a lap. If a lap takes longer than `stage_count` passes of the stage,
        the stage idles for the difference, each time it begins a chunk.

        Args:
            lap_s: Seconds of a lap, with the messages.
            each_s: Seconds between the starts of two passes of this stage: the time of a pass, or
                of a message if the messages are to limit the pace.
            laps: How often the stage begins a further chunk; None: number of chunks - 1.
        """
        if laps is None:
            laps = self.chunks - 1
        stage_passes_s = self.stage_count * each_s
        return laps * max(0.0, lap_s - stage_passes_s)

    def _interval_before_s(self, stage: int) -> float:
        """Return the least seconds between two activations that the previous stage sends to this stage.

        0 for the first stage, which has no previous stage.
        """
        return self.bounds.interval_s[stage - 1] if stage else 0.0

    def _first_forward_starts(self) -> list[float]:
        """Return, for each stage, the earliest start of its first forward pass, in seconds of the step.

        Before that, the first micro-batch passes the first chunk of layers on every earlier stage.
        """
        starts_s = [0.0]
        for stage in range(1, self.stage_count):
            before = stage - 1
            # The first stage computes the embedding, too, before the second stage can start.
            embedding_s = self.embedding_forward_s * (stage == 1)
            forward_s = self.forward_s[before]
            link_s = self.stage_links_s[before]
            starts_s.append(starts_s[-1] + forward_s + link_s + embedding_s)
        return starts_s

    def _first_backward_starts(self) -> list[float]:
        """Return the earliest start of each stage's first backward pass, in seconds of the step.

        It is the latest of three moments that the pass cannot precede:

            first_returns_s     The first micro-batch has passed all chunks of all stages forward,
                                and the later stages backward.
            warm_up_end_s       The stage has done the forward passes that the schedule puts first.
            arrival_s           The next stage has done its first backward pass, and its gradient
                                has arrived.
        """
        last_stage = self.stage_count - 1
        starts_s = [0.0] * self.stage_count
        first_returns_s = self._first_forward_way_s()  # to the last stage
        for stage in reversed(range(self.stage_count)):
            warm_up_end_s = self._warm_up_end_s(stage)
            starts_s[stage] = max(first_returns_s, warm_up_end_s)
            if stage < last_stage:
                arrival_s = self._next_gradient_arrival_s(stage, starts_s[stage + 1])
                starts_s[stage] = max(starts_s[stage], arrival_s)
            # The loop continues with stage - 1. Until the first micro-batch's gradient is there: this
            # stage's backward pass, and the message.
            link_before_s = self.stage_links_s[stage - 1] if stage else 0.0
            output_s = self.output_backward_s if stage == last_stage else 0.0
            first_returns_s += self.backward_s[stage] + output_s + link_before_s
        return starts_s

    def _first_forward_way_s(self) -> float:
        """Return the seconds until the first micro-batch has passed all layers of the model forward.

        A stage has several chunks of layers (interleaved schedule), so the micro-batch passes each
        stage several times.
        """
        links_s = self.chunks * sum(self.stage_links_s)
        returns_s = (self.chunks - 1) * self.bounds.last_to_first.total_s
        passes_s = self.chunks * sum(self.forward_s)
        ends_s = self.embedding_forward_s + self.output_forward_s
        return passes_s + ends_s + links_s + returns_s

    def _warm_up_end_s(self, stage: int) -> float:
        """Return the earliest end of the forward passes that precede a stage's first backward pass.

        The end is bounded in two ways, and the later moment is returned:

            passes_s      The stage does these passes in sequence.
            messages_s    Their activations arrive in sequence; then comes the last pass.

        These forward passes reach the stage's last chunk. So both bounds include the idle time
        before each further chunk: its first micro-batch must pass a chunk of every stage to
        return here (_lap_waits_s).
        """
        forward_s = self.forward_s[stage]
        interval_s = self._interval_before_s(stage)
        forwards_first = self.in_flight[stage]
        passes_s = forwards_first * forward_s + self._lap_waits_s(self.forward_lap_s, forward_s)
        # After the first activation: an interval for each further activation, then the last pass.
        messages_s = (
            (forwards_first - 1) * interval_s
            + self._lap_waits_s(self.forward_lap_s, interval_s)
            + forward_s
        )
        return self.first_forward_start_s[stage] + max(passes_s, messages_s)

    def _next_gradient_arrival_s(self, stage: int, behind_start_s: float) -> float:
        """Return the earliest arrival of the first gradient that the next stage sends back to `stage`.

        The result is in seconds from the start of the step.

        Args:
            stage: The receiving stage.
            behind_start_s: Start of the first backward pass of stage + 1, in seconds.
        """
        behind = stage + 1
        output_s = self.output_backward_s if behind == self.stage_count - 1 else 0.0
        return behind_start_s + self.backward_s[behind] + output_s + self.stage_links_s[stage]

    def _last_forward_ends(self) -> list[float]:
        """Return the earliest end of each stage's last forward pass, in seconds of the step.

        It is the latest of five moments. The first three count from the start of the first forward
        pass:

            after_passes_s      all forward passes, with embedding or output layer
            after_laps_s        all forward passes, and the idle time until micro-batches have
                                passed the other stages and return for their next chunk
                                (_lap_waits_s)
            after_messages_s    all activations arrive in sequence; then the last pass
            after_pairs_s       from the start of the first backward pass: a backward and a forward
                                pass for each forward pass that is still to do
            after_before_s      from the last forward pass of the stage before: its message, then
                                a pass
        """
        bounds = self.bounds
        ends_s = [0.0] * self.stage_count
        for stage in range(self.stage_count):
            interval_s = self._interval_before_s(stage)
            forward_s = self.forward_s[stage]
            start_s = self.first_forward_start_s[stage]
            # Embedding or output layer: once for each micro-batch, as only a single chunk has it.
            extra_s = self.micro_batches * bounds.extra_forward_s[stage]
            after_passes_s = start_s + self.passes * forward_s + extra_s
            pass_waits_s = self._lap_waits_s(self.forward_lap_s, forward_s)
            after_laps_s = start_s + self.passes * forward_s + pass_waits_s
            message_waits_s = self._lap_waits_s(self.forward_lap_s, interval_s)
            last_message_s = start_s + (self.passes - 1) * interval_s + message_waits_s
            after_messages_s = last_message_s + forward_s
            times_s = [after_passes_s, after_laps_s, after_messages_s]
            if self.passes > self.warm_up[stage]:
                pairs = self.passes - self.warm_up[stage] - 1
                pair_s = forward_s + self.backward_s[stage]
                after_pairs_s = self.first_backward_start_s[stage] + pairs * pair_s
                times_s.append(after_pairs_s)
            if stage:
                is_last = stage == self.stage_count - 1
                output_s = self.output_forward_s if is_last else 0.0
                link_s = self.stage_links_s[stage - 1]
                after_before_s = ends_s[stage - 1] + link_s + forward_s + output_s
                times_s.append(after_before_s)
            ends_s[stage] = max(times_s)
        return ends_s

    def _last_backward_ends(self) -> list[float]:
        """Return the earliest end of each stage's last backward pass, in seconds of the step.

        It is the latest of three moments, and of those that the next stage's work sets
        (_ends_after_stage_behind):

            last_returns_s     The last stage ends its last forward pass. The last micro-batch then
                               goes backward through all chunks of all stages, down to this stage.
            after_closing_s    This stage ends its last forward pass. Then it does the backward
                               passes that the schedule puts after it (`in_flight` of them).
            after_passes_s     This stage starts its first backward pass. Then it does all backward
                               passes, and idles until gradients return for its next chunk.

        A lap is the way of a micro-batch through a chunk of every stage.
        """
        bounds = self.bounds
        last_stage = self.stage_count - 1
        # The last micro-batch goes backward through `chunks` chunks of every stage. All but the last
        # chunk are chunks - 1 laps, from the last stage to the last stage. The loop then goes from
        # the last stage to the first, and adds the pass through the remaining chunk.
        last_returns_s = self.last_forward_end_s[-1] + (self.chunks - 1) * self.backward_lap_s
        ends_s = [0.0] * self.stage_count
        for stage in reversed(range(self.stage_count)):
            backward_s = self.backward_s[stage]
            # As many backward passes follow the last forward pass as forward passes precede the
            # first backward pass.
            after_closing_s = self.last_forward_end_s[stage] + self.in_flight[stage] * backward_s
            last_returns_s += backward_s + bounds.extra_backward_s[stage]
            last_returns_s += self.stage_links_s[stage] if stage < last_stage else 0.0
            after_passes_s = (
                self.first_backward_start_s[stage]
                + self.passes * backward_s
                + self._lap_waits_s(self.backward_lap_s, backward_s)
            )
            times_s = [
                last_returns_s,
                after_closing_s,
                after_passes_s,
            ]
            if stage < last_stage:
                times_s += self._ends_after_stage_behind(stage, ends_s[stage + 1])
            ends_s[stage] = max(times_s)
        return ends_s

    def _ends_after_stage_behind(self, stage: int, behind_end_s: float) -> list[float]:
        """Return several lower bounds on the end of a stage's last backward pass, from the next stage's work.

        The next stage (stage + 1, `behind`) sends the gradients to this stage. They arrive at least
        `interval_s` apart, the time of a message on the link. Each moment counts in seconds from
        the step's start. It is the end of these events, plus this stage's last backward pass:

            after_messages_s    This stage begins its first backward pass. All further gradients
                                arrive, `interval_s` apart.
            after_last_s        The next stage ends its last backward pass. Its gradient arrives.
            after_closing_s     The next stage ends its last forward pass. It has `in_flight`
                                backward passes left, and ends the first of them. The gradients of
                                all of them then cross the link, `interval_s` apart.
            after_nic_s         The next stage ends its first forward pass. Its NIC then sends all
                                its activations and gradients.

        Args:
            stage: The stage.
            behind_end_s: Earliest end of the last backward pass of stage + 1.
        """
        bounds = self.bounds
        behind = stage + 1
        backward_s = self.backward_s[stage]

        # Least seconds between two messages on the link between this stage and the next.
        interval_s = bounds.interval_s[stage]
        # The waits: a gradient travels through all stages (backward_lap_s) before its next chunk.
        after_messages_s = (
            self.first_backward_start_s[stage]
            + (self.passes - 1) * interval_s
            + self._lap_waits_s(self.backward_lap_s, interval_s)
            + backward_s
        )
        after_last_s = behind_end_s + self.stage_links_s[stage] + backward_s
        after_closing_s = (
            self.last_forward_end_s[behind]
            + self.backward_s[behind]
            + self.in_flight[behind] * interval_s
            + backward_s
        )
        after_nic_s = (
            self.first_forward_start_s[behind]
            + self.forward_s[behind]
            + self.passes * bounds.nic_busy_s[behind]
            + backward_s
        )
        return [after_messages_s, after_last_s, after_closing_s, after_nic_s]

    def step_s(self) -> float:
        """Return a lower bound on the step time of an interleaved pipeline schedule, in seconds.

        It is the largest of several bounds. The first is the time of the messages from the last stage
        back to the first. The others follow from the work of each stage (_steps_by_stage).
        """
        # After each chunk of the last stage but its last, a micro-batch returns to the first stage.
        # All these messages follow each other on the same link (last_to_first), `interval_s` apart.
        returns = self.micro_batches * (self.chunks - 1)
        steps_s = [returns * self.bounds.last_to_first.interval_s]
        # Optimizer step and weight gather of each stage.
        updates_s = [
            self.stage_layers * after.update.block_s + after.update.fixed_s
            for after in self.bounds.after_backward
        ]
        for stage in range(self.stage_count):
            # The gradient norm is a barrier: the longest update counts for every stage.
            update_s = max(updates_s) if self.bounds.has_norm_barrier else updates_s[stage]
            after_reduction_s = self.bounds.tied_s[stage] + update_s
            # Several lower bounds on the step; all end with `after_reduction_s`.
            steps_s += self._steps_by_stage(stage, after_reduction_s)
        return max(steps_s)

    def _steps_by_stage(self, stage: int, after_reduction_s: float) -> list[float]:
        """Return several lower bounds on the step time, in seconds, that follow from the work of `stage`.

        The step cannot end before this stage has reduced its gradients and done the work that
        follows (`after_reduction_s`). Each bound derives the earliest end of the reduction from
        other events, so all of them hold; the caller takes the largest.

        Args:
            stage: The stage.
            after_reduction_s: Seconds of the tied embedding's reduction, optimizer step and weight
                gather.
        """
        ends_s = [self._end_after_passes_s(stage), self._end_after_nic_s(stage)]
        if self.bounds.after_backward[stage].overlapped:
            # The reduction of a chunk runs under the backward passes of the chunks that follow.
            # There is a bound for each chunk that ends after the stage's last forward pass. Then
            # `in_flight` backward passes are left, and the schedule does stage_count of them for
            # each chunk. So they belong to in_flight / stage_count chunks, rounded up.
            ending_chunks = min(self.chunks, ceil(self.in_flight[stage] / self.stage_count))
            for followers in range(ending_chunks):  # 0: the chunk that ends last
                ends_s.append(self._end_after_chunk_s(stage, followers))
        return [end_s + after_reduction_s for end_s in ends_s]

    def _end_after_passes_s(self, stage: int) -> float:
        """Return the earliest end of a stage's reduction, as it follows from the last backward pass.

        A reduction that does not overlap with passes begins after the last backward pass, so its
        whole time is added. If it overlaps, no time is certain, so none is added.
        """
        after = self.bounds.after_backward[stage]
        exposed_s = 0.0
        if not after.overlapped:
            exposed_s = self.stage_layers * after.reduction.block_s + after.reduction.fixed_s
        return self.last_backward_end_s[stage] + exposed_s

    def _end_after_nic_s(self, stage: int) -> float:
        """Return the earliest moment at which a stage's NIC can have sent all data of the step, in seconds.

        The data are the activations and gradients of all passes after the first forward pass, and
        the stage's part of the gradient reduction, if that uses the same NIC.
        """
        first_forward_end_s = self.first_forward_start_s[stage] + self.forward_s[stage]
        messages_s = self.passes * self.bounds.shared_nic_busy_s[stage]
        after = self.bounds.after_backward[stage]
        return first_forward_end_s + messages_s + self.stage_layers * after.shared_nic_block_s

    def _end_after_chunk_s(self, stage: int, followers: int) -> float:
        """Return the earliest end of a stage's reduction, derived from the last backward pass of a chunk.

        A chunk's gradients are complete only in its last backward pass, so its reduction begins no
        earlier than that pass. The chunks that end later (the followers) are reduced after it, over
        the same network. So the reductions of this chunk and of all followers still have to come.

        Args:
            stage: The stage.
            followers: Number of the stage's chunks that end their backward passes after this chunk.
                0: it is the chunk that ends last.
        """
        bounds = self.bounds
        after = bounds.after_backward[stage]
        passes_after = followers * self.stage_count  # backward passes of the followers
        backward_end_s = self._backward_end_s(stage, followers)
        backward_start_s = backward_end_s - self.backward_s[stage] - bounds.extra_backward_s[stage]
        reduced_layers = self.stage_layers * (followers + 1) / self.chunks

        reduction_s = reduced_layers * after.reduction.block_s
        # fixed_s does not depend on the number of layers: latency, embedding and output layer. On
        # the last stage it may be left out of this reduction: the output layer is in the chunk that
        # completes first. On other stages it is included: the embedding is in the first chunk, which
        # completes last.
        is_last_stage = stage == self.stage_count - 1
        if not is_last_stage:
            reduction_s += after.reduction.fixed_s

        # The same NIC also sends the gradients of the followers' passes. shared_nic_busy_s is for an
        # activation and a gradient, so half of it is for a gradient.
        gradients_s = passes_after * bounds.shared_nic_busy_s[stage] / 2
        nic_s = reduced_layers * after.shared_nic_block_s + gradients_s
        return backward_start_s + max(reduction_s, nic_s)

    def _backward_end_s(self, stage: int, followers: int) -> float:
        """Return the earliest end of a chunk's last backward pass, in seconds.

        It is the later of two moments; without followers, that of the stage's last backward pass:

            after_closing_s    The stage ends its last forward pass. Then it does the backward
                               passes that are left, up to this chunk's last.
            after_passes_s     The stage starts its first backward pass. Then it does all backward
                               passes up to this chunk's last. Before each further chunk it idles
                               until its gradient has passed a chunk of every stage (a lap).

        Args:
            stage: The stage.
            followers: Number of the stage's chunks that end their backward passes after this chunk.
                0: it is the chunk that ends last.
        """
        if not followers:
            return self.last_backward_end_s[stage]
        backward_s = self.backward_s[stage]
        passes_after = followers * self.stage_count  # backward passes of the followers

        # Backward passes between the stage's last forward pass and the end of this chunk.
        closing_passes = self.in_flight[stage] - passes_after
        after_closing_s = self.last_forward_end_s[stage] + closing_passes * backward_s
        laps = self.chunks - 1 - followers
        after_passes_s = (
            self.first_backward_start_s[stage]
            + (self.passes - passes_after) * backward_s
            + self._lap_waits_s(self.backward_lap_s, backward_s, laps)
        )
        return max(after_closing_s, after_passes_s)
