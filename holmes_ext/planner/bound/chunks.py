"""Lower bound on the simulated step time of an interleaved schedule (least.py has the one for 1F1B).

All chunks have the same number of layers, so a placement has one split. The bound is computed from four
moments of each stage, each of which nothing in the simulation can precede. The letters, in seconds:

    f, b    forward and backward pass of one chunk
    x       stage link: from sending an activation to its arrival
    y       interval between messages that follow each other on a stage link
    N       passes of one kind on a stage: chunks * micro-batches
    u       forward passes of a stage before its first backward pass (plan/cost/pipeline.py, passes)
    r       u + 1: backward passes that come after the stage's last forward pass

    first forward starts     sum of (f + x) over the stages before
    first backward starts    the first micro-batch has passed all chunks; r forward passes, or r messages from
                             the stage before, after the first forward started; after stage s + 1's
    last forward ends        N forward passes after the first started; N intervals y after the first message
                             from the stage before; N - r pairs of passes after the first backward started;
                             after stage s - 1's
    last backward ends       N backward passes, or messages from the stage behind, after the first backward
                             started; r passes after the last forward; r messages from the stage behind after
                             its last forward; after stage s + 1's; after the last micro-batch's way back
                             through all chunks; after a NIC that sends both ways has sent all messages

Passes of one kind take the chunks in turn, `stages` micro-batches of each. A micro-batch reaches its next
chunk after a turn through all stages; if a turn takes longer than `stages` passes, the stage waits for the
difference, once for each chunk but the first.

The reductions follow: of the chunks whose last backward pass lies within the last r passes, and of all
chunks if nothing overlaps; then the tied embedding's. A NIC that carries both the activations and the
reductions of its stage must send all of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.planner.bound.stages import StageBounds


def interleaved_s(bounds: StageBounds) -> float:
    """Return a lower bound on the simulated step time of an interleaved schedule, in seconds."""
    return _InterleavedBound(bounds).step_s()


class _InterleavedBound:
    """Moments of one step that nothing in the simulation precedes, in seconds from its start."""

    def __init__(self, bounds: StageBounds):
        """Compute the moments.

        Args:
            bounds: Lower bounds on the work of every stage of a placement.
        """
        self.bounds = bounds
        self.chunks = bounds.run.virtual
        self.micro_batches = bounds.micro_batches
        self.stage_count = bounds.stage_count
        self.stage_links_s = bounds.stage_links_s
        self.stage_layers = bounds.layer_count // bounds.stage_count
        #: Passes of one kind on each stage (N).
        self.passes = self.chunks * self.micro_batches
        #: Pass of one chunk on each stage (f, b).
        self.forward_s = self._of_chunk(bounds.forward_s)
        self.backward_s = self._of_chunk(bounds.backward_s)
        #: Embedding and output layer.
        self.embedding_forward_s = bounds.extra_forward_s[0]
        self.output_forward_s = bounds.extra_forward_s[-1]
        self.output_backward_s = bounds.extra_backward_s[-1]
        #: Forward passes of each stage before its first backward pass (u), and backward passes after its
        #: last forward pass (r).
        self.warm_up = [self._warm_up(stage) for stage in range(self.stage_count)]
        self.cool_down = [min(passes + 1, self.passes) for passes in self.warm_up]
        #: One micro-batch's turn through all stages and back to the first.
        links_s = sum(self.stage_links_s)
        self.forward_turn_s = sum(self.forward_s) + links_s + bounds.last_to_first.total_s
        self.backward_turn_s = sum(self.backward_s) + links_s + bounds.last_to_first.total_s
        self.first_forward_start_s = self._first_forward_starts()
        self.first_backward_start_s = self._first_backward_starts()
        self.last_forward_end_s = self._last_forward_ends()
        self.last_backward_end_s = self._last_backward_ends()

    def _of_chunk(self, block_s: Sequence[float]) -> list[float]:
        """Return the seconds of one chunk on each stage, from those of a block."""
        return [self.stage_layers * seconds / self.chunks for seconds in block_s]

    def _warm_up(self, stage: int) -> int:
        """Return the number of forward passes of a stage before its first backward pass."""
        if self.micro_batches <= self.stage_count:
            return self.passes
        stages_behind = self.stage_count - stage - 1
        return min(self.passes, stages_behind * 2 + (self.chunks - 1) * self.stage_count)

    def _turns_wait_s(self, turn_s: float, each_s: float, turns: int | None = None) -> float:
        """Return the seconds that a stage waits for micro-batches to come round to their next chunk.

        Args:
            turn_s: One turn through all stages.
            each_s: A pass, or the interval between messages; `stage_count` of them fill a turn.
            turns: Number of turns waited for (default: one for each chunk but the first).
        """
        if turns is None:
            turns = self.chunks - 1
        return turns * max(0.0, turn_s - self.stage_count * each_s)

    def _interval_before_s(self, stage: int) -> float:
        return self.bounds.interval_s[stage - 1] if stage else 0.0

    def _first_forward_starts(self) -> list[float]:
        """Return the least start of each stage's first forward pass: after those of all stages before."""
        starts_s = [0.0]
        for stage in range(1, self.stage_count):
            before = stage - 1
            embedding_s = self.embedding_forward_s * (stage == 1)
            forward_s = self.forward_s[before]
            link_s = self.stage_links_s[before]
            starts_s.append(starts_s[-1] + forward_s + link_s + embedding_s)
        return starts_s

    def _first_backward_starts(self) -> list[float]:
        """Return the least start of each stage's first backward pass.

        It follows the first micro-batch's way through all chunks, the forward passes (or their messages) of
        the warm-up, and the first backward pass of the stage behind.
        """
        last_stage = self.stage_count - 1
        all_links_s = (
            self.chunks * sum(self.stage_links_s)
            + (self.chunks - 1) * self.bounds.last_to_first.total_s
        )
        # The first micro-batch passes all chunks down, and then the last chunk of each stage up.
        first_returns_s = (
            self.chunks * sum(self.forward_s)
            + self.embedding_forward_s
            + self.output_forward_s
            + all_links_s
        )
        starts_s = [0.0] * self.stage_count
        for stage in reversed(range(self.stage_count)):
            interval_s = self._interval_before_s(stage)
            forward_s = self.forward_s[stage]
            passes_first = self.cool_down[stage]  # r of the module docstring
            passes_s = passes_first * forward_s + self._turns_wait_s(self.forward_turn_s, forward_s)
            messages_s = (
                (passes_first - 1) * interval_s
                + self._turns_wait_s(self.forward_turn_s, interval_s)
                + forward_s
            )
            start_s = self.first_forward_start_s[stage] + max(passes_s, messages_s)
            start_s = max(first_returns_s, start_s)
            if stage < last_stage:
                is_before_last = stage == self.stage_count - 2
                behind_s = self.backward_s[stage + 1] + self.output_backward_s * is_before_last
                start_s = max(start_s, starts_s[stage + 1] + behind_s + self.stage_links_s[stage])
            starts_s[stage] = start_s
            # On to the stage before, for the next iteration.
            link_before_s = self.stage_links_s[stage - 1] if stage else 0.0
            first_returns_s += self.backward_s[stage] + link_before_s
            first_returns_s += self.output_backward_s * (stage == last_stage)
        return starts_s

    def _last_forward_ends(self) -> list[float]:
        """Return the least end of each stage's last forward pass; see the module docstring."""
        bounds = self.bounds
        ends_s = [0.0] * self.stage_count
        for stage in range(self.stage_count):
            interval_s = self._interval_before_s(stage)
            forward_s = self.forward_s[stage]
            start_s = self.first_forward_start_s[stage]
            extra_s = self.micro_batches * bounds.extra_forward_s[stage]
            after_passes_s = start_s + self.passes * forward_s + extra_s
            after_turns_s = (
                start_s
                + self.passes * forward_s
                + self._turns_wait_s(self.forward_turn_s, forward_s)
            )
            after_messages_s = (
                start_s
                + (self.passes - 1) * interval_s
                + self._turns_wait_s(self.forward_turn_s, interval_s)
                + forward_s
            )
            moments = [after_passes_s, after_turns_s, after_messages_s]
            if self.passes > self.warm_up[stage]:
                pairs = self.passes - self.warm_up[stage] - 1
                pair_s = forward_s + self.backward_s[stage]
                moments.append(self.first_backward_start_s[stage] + pairs * pair_s)
            if stage:
                output_s = self.output_forward_s * (stage == self.stage_count - 1)
                link_s = self.stage_links_s[stage - 1]
                moments.append(ends_s[stage - 1] + link_s + forward_s + output_s)
            ends_s[stage] = max(moments)
        return ends_s

    def _last_backward_ends(self) -> list[float]:
        """Return the least end of each stage's last backward pass; see the module docstring."""
        bounds = self.bounds
        last_stage = self.stage_count - 1
        # The last micro-batch returns through all chunks.
        turn_s = sum(self.backward_s) + sum(self.stage_links_s) + bounds.last_to_first.total_s
        last_returns_s = self.last_forward_end_s[-1] + (self.chunks - 1) * turn_s
        ends_s = [0.0] * self.stage_count
        for stage in reversed(range(self.stage_count)):
            backward_s = self.backward_s[stage]
            closing_s = self.cool_down[stage] * backward_s
            last_returns_s += backward_s + bounds.extra_backward_s[stage]
            last_returns_s += self.stage_links_s[stage] if stage < last_stage else 0.0
            after_passes_s = (
                self.first_backward_start_s[stage]
                + self.passes * backward_s
                + self._turns_wait_s(self.backward_turn_s, backward_s)
            )
            moments = [
                last_returns_s,
                self.last_forward_end_s[stage] + closing_s,
                after_passes_s,
            ]
            if stage < last_stage:
                moments += self._ends_after_stage_behind(stage, ends_s[stage + 1])
            ends_s[stage] = max(moments)
        return ends_s

    def _ends_after_stage_behind(self, stage: int, behind_end_s: float) -> list[float]:
        """Return moments that a stage's last backward pass cannot precede because of the stage behind.

        They are, in this order: after all messages from the stage behind (`behind`, stage + 1), its last
        backward pass, its last r messages, and all messages of its NIC.

        Args:
            stage: The stage.
            behind_end_s: End of the last backward pass of stage + 1.
        """
        bounds = self.bounds
        behind = stage + 1
        backward_s = self.backward_s[stage]
        interval_s = bounds.interval_s[stage]
        after_messages_s = (
            self.first_backward_start_s[stage]
            + (self.passes - 1) * interval_s
            + self._turns_wait_s(self.backward_turn_s, interval_s)
            + backward_s
        )
        after_last_s = behind_end_s + self.stage_links_s[stage] + backward_s
        after_closing_s = (
            self.last_forward_end_s[behind]
            + self.backward_s[behind]
            + self.cool_down[behind] * interval_s
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
        """Return the bound on the step: all messages, and each stage's end."""
        steps_s = [self.micro_batches * (self.chunks - 1) * self.bounds.last_to_first.interval_s]
        updates_s = [
            self.stage_layers * after.update.block_s + after.update.fixed_s
            for after in self.bounds.after_backward
        ]
        for stage in range(self.stage_count):
            # The gradient norm is a barrier: the longest update counts for every stage.
            update_s = max(updates_s) if self.bounds.has_norm_barrier else updates_s[stage]
            after_reduction_s = self.bounds.tied_s[stage] + update_s
            steps_s += self._steps_by_stage(stage, after_reduction_s)
        return max(steps_s)

    def _steps_by_stage(self, stage: int, after_reduction_s: float) -> list[float]:
        """Return lower bounds on the step time that one stage sets.

        Args:
            stage: The stage.
            after_reduction_s: Seconds of the tied embedding's reduction, optimizer step and weight gather.
        """
        bounds = self.bounds
        after = bounds.after_backward[stage]
        layers = self.stage_layers
        backward_s = self.backward_s[stage]
        sent_s = bounds.shared_nic_busy_s[stage]
        last_backward_end_s = self.last_backward_end_s[stage]
        block_reduction_s, fixed_reduction_s = after.reduction

        exposed_s = 0.0 if after.overlapped else layers * block_reduction_s + fixed_reduction_s
        nic_done_s = (
            self.first_forward_start_s[stage]
            + self.forward_s[stage]
            + self.passes * sent_s
            + layers * after.shared_nic_block_s
        )
        steps_s = [
            last_backward_end_s + after_reduction_s + exposed_s,
            nic_done_s + after_reduction_s,
        ]
        if not after.overlapped:
            return steps_s

        closing = self.cool_down[stage]
        chunks_in_closing = (closing - 1) // self.stage_count + 1
        # Once the last backward pass of `followers` + 1 chunks has begun, their reductions are left.
        for followers in range(min(self.chunks, chunks_in_closing)):
            passes_after = followers * self.stage_count
            backward_end_s = last_backward_end_s
            if followers:
                after_closing_s = (
                    self.last_forward_end_s[stage] + (closing - passes_after) * backward_s
                )
                turns = self.chunks - 1 - followers
                after_passes_s = (
                    self.first_backward_start_s[stage]
                    + (self.passes - passes_after) * backward_s
                    + self._turns_wait_s(self.backward_turn_s, backward_s, turns)
                )
                backward_end_s = max(after_closing_s, after_passes_s)
            backward_start_s = backward_end_s - backward_s - bounds.extra_backward_s[stage]
            reduced = followers + 1
            fixed_s = fixed_reduction_s if stage < self.stage_count - 1 else 0.0
            reduction_s = layers * block_reduction_s * reduced / self.chunks + fixed_s
            carried_s = (
                layers * after.shared_nic_block_s * reduced / self.chunks
                + passes_after * sent_s / 2
            )
            steps_s.append(backward_start_s + max(reduction_s, carried_s) + after_reduction_s)
        return steps_s
