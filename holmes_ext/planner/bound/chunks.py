"""What no simulated step of an interleaved schedule beats (least.py has 1F1B): moments before which nothing
of a stage can be over. All chunks have the same number of layers, so there is one split.

f, b: a pass of a chunk; x: a stage link; y: in which one message flows over it; N = v m: passes of a
kind; u_s:
forward passes of a stage before its first backward (cost/pipeline.py's passes), so r_s = u_s + 1 backward
passes come after its last forward. The first backward is that of the first micro-batch's last chunk

    begin_s    the first pass: sum above (f + x)
    back_s     first backward: through all chunks; u_s + 1 passes, or
               messages from above, after begin_s; after back_(s+1)
    last_s     last forward ended: N f after begin_s; N y after the first message from above; N - r_s pairs of
               passes after back_s; after last_(s-1)
    end_s      last backward ended: N b, or messages from below, after back_s; r_s passes after last_s;
               r_(s+1) messages from below after last_(s+1); after end_(s+1); the last micro-batch's way
               back through all chunks after the last stage's last forward; all messages through a NIC
               that sends both ways, after begin_s

Where passes, or messages, of a kind follow each other, p of each chunk in turn (p: stages), the first
micro-batch of the p comes to its next chunk a turn through all stages later; if that is longer than p of
them, once for each chunk.

Then come reductions: of the chunks whose last backward lies in the r_s last ones, and of all if nothing is
hidden; then a tied embedding's. A NIC that carries both activations and the reductions of its stage must send
all of it, and the gradients that such chunks send up.
"""

from __future__ import annotations

from holmes_ext.planner.bound.stages import Stages


def interleaved_s(bounds: Stages) -> float:
    """Seconds that the simulated step takes at least."""
    v, m, count, stage_links = bounds.run.virtual, bounds.m, bounds.count, bounds.stage_links
    n, total, stages = bounds.layers // count, v * m, range(count)
    forward, backward = (
        [n * seconds / v for seconds in row] for row in (bounds.forward, bounds.backward)
    )
    first_f, last_f = bounds.extra_forward[0], bounds.extra_forward[-1]
    turns = (
        v * sum(stage_links) + (v - 1) * bounds.around.all_s
    )  # of one micro-batch from stage to stage, one way
    begun = [
        min(total, (count - stage - 1) * 2 + (v - 1) * count) if m > count else total
        for stage in stages
    ]
    closing = [
        min(passes + 1, total) for passes in begun
    ]  # r_s: backward passes after the last forward
    begin, back, last, end = [0.0], [0.0] * count, [0.0] * count, [0.0] * count
    turn_f, turn_b = (
        sum(row) + sum(stage_links) + bounds.around.all_s for row in (forward, backward)
    )

    def behind(turn_s: float, each_s: float, turns: int = v - 1) -> float:
        """What waiting for so many turns adds to passes, or messages, that take each_s."""
        return turns * max(0.0, turn_s - count * each_s)

    for stage in stages[1:]:
        begin.append(
            begin[-1] + forward[stage - 1] + stage_links[stage - 1] + first_f * (stage == 1)
        )
    through = (
        v * sum(forward) + first_f + last_f + turns
    )  # the first micro-batch, and back to a stage
    for stage in reversed(stages):
        flow, forward_s = bounds.flow[stage - 1] if stage else 0.0, forward[stage]
        passes_s = closing[stage] * forward_s + behind(turn_f, forward_s)
        messages_s = (closing[stage] - 1) * flow + behind(turn_f, flow) + forward_s
        back[stage] = max(through, begin[stage] + max(passes_s, messages_s))
        if stage < count - 1:
            below = backward[stage + 1] + bounds.extra_backward[-1] * (stage == count - 2)
            back[stage] = max(back[stage], back[stage + 1] + below + stage_links[stage])
        through += backward[stage] + (stage_links[stage - 1] if stage else 0.0)
        through += bounds.extra_backward[-1] * (stage == count - 1)
    for stage in stages:
        flow, forward_s = bounds.flow[stage - 1] if stage else 0.0, forward[stage]
        pair_s = forward[stage] + backward[stage]
        moments = [
            begin[stage] + total * forward_s + m * bounds.extra_forward[stage],
            begin[stage] + total * forward_s + behind(turn_f, forward_s),
            begin[stage] + (total - 1) * flow + behind(turn_f, flow) + forward_s,
        ]
        if total > begun[stage]:
            moments.append(back[stage] + (total - begun[stage] - 1) * pair_s)
        if stage:
            moments.append(
                last[stage - 1] + stage_links[stage - 1] + forward_s + last_f * (stage == count - 1)
            )
        last[stage] = max(moments)
    # the last one's way back
    through = last[-1] + (v - 1) * (sum(backward) + sum(stage_links) + bounds.around.all_s)
    for stage in reversed(stages):
        backward_s = backward[stage]
        through += backward_s + bounds.extra_backward[stage]
        through += stage_links[stage] if stage < count - 1 else 0.0
        moments = [
            through,
            last[stage] + closing[stage] * backward_s,
            back[stage] + total * backward_s + behind(turn_b, backward_s),
        ]
        if stage < count - 1:
            below, flow = backward[stage + 1], bounds.flow[stage]
            moments.append(back[stage] + (total - 1) * flow + behind(turn_b, flow) + backward_s)
            moments += [
                end[stage + 1] + stage_links[stage] + backward_s,
                last[stage + 1] + below + closing[stage + 1] * flow + backward_s,
                begin[stage + 1] + forward[stage + 1] + total * bounds.sent[stage + 1] + backward_s,
            ]
        end[stage] = max(moments)
    steps_s = [m * (v - 1) * bounds.around.flow_s]
    rests = [n * each_s + once_s for each_s, once_s in (after.rest for after in bounds.after)]
    for stage, after in enumerate(bounds.after):
        backward_s, (block_s, fixed) = backward[stage], after.reduce
        rest_s = bounds.tied[stage] + (max(rests) if bounds.barrier else rests[stage])
        steps_s.append(end[stage] + rest_s + (0.0 if after.hidden else n * block_s + fixed))
        sent_s = bounds.sent_there[stage]
        steps_s.append(begin[stage] + forward[stage] + total * sent_s + n * after.shared + rest_s)
        chunks = (closing[stage] - 1) // count + 1 if after.hidden else 0
        for chunk in range(
            min(v, chunks)
        ):  # whose last backward is followed by those of so many chunks
            gone = chunk * count
            over = (
                end[stage]
                if not chunk
                else max(
                    last[stage] + (closing[stage] - gone) * backward_s,
                    back[stage]
                    + (total - gone) * backward_s
                    + behind(turn_b, backward_s, v - 1 - chunk),
                )
            )
            part = n * block_s * (chunk + 1) / v + (fixed if stage < count - 1 else 0.0)
            carried = n * after.shared * (chunk + 1) / v + gone * sent_s / 2
            steps_s.append(
                over - backward_s - bounds.extra_backward[stage] + max(part, carried) + rest_s
            )
    return max(steps_s)
