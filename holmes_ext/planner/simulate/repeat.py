"""The seconds of a step whose middle repeats: only the micro-batches before and after it are simulated.

    few micro-batches   F F F F B F B F B F B F B B B B       the same operations up to the last forward pass;
    k more of them      F F F F B F B F B F B F B F B B B B   what then is under way decides all that follows

Where at the last forward pass all that is under way stands as k micro-batches before, D seconds earlier, a
step of few + n k micro-batches takes n D longer (max-plus systems become periodic: Baccelli et al. 1992,
chapter 3). It does if every pass of the last two lifetimes of a micro-batch ended D later than the one k
before. Kinds of pipelines that share no link may each have a D: they begin n D later then, and meet where
their gradients are reduced. tests/planner/simulate/test_fold.py compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.planner.simulate.events import Span
from holmes_ext.planner.simulate.step import JobStep, end_of

#: Periods that are looked for, in micro-batches (interleaved: rounds of them).
PERIODS = 4
#: How many times more micro-batches are simulated if those did not settle, and the part of all from which all
#: are.
MORE, MOST = 3, 0.35
#: Fraction of a step up to which moments are equal.
ROUNDING = 1e-11
_PASSES = ("forward", "backward")


def folded_s(job: JobStep) -> float:
    """Seconds of the step."""
    stages, total = job.costs.stages, job.costs.micro_batches
    unit = stages if job.run.virtual > 1 else 1
    if job.run.schedule:  # a list, of so many micro-batches
        return job.step().step_s
    in_flight = max((*job.run.in_flight, stages))
    few = (6 if unit > 1 else 3) * in_flight + 4
    while few < MOST * total:
        count = total - (total - few) // unit * unit
        spans = job.simulation(count).run()
        periods = [
            period
            for period in range(unit, PERIODS * unit + 1, unit)
            if (total - count) % period == 0
        ]
        more = [_more_s(spans, stages, periods, total - count)]
        if more[0]:
            return end_of(spans) + more[0]
        if len(apart := job.apart()) > 1:
            by_group = [
                [spans[kind * stages + stage] for kind in sorted(kinds) for stage in range(stages)]
                for kinds in apart
            ]
            more = [
                _more_s(group_spans, stages, periods, total - count) for group_spans in by_group
            ]
            if all(more):
                begins = {kind: seconds for kinds, seconds in zip(apart, more) for kind in kinds}
                return end_of(
                    job.simulation(count, [begins[kind] for kind in sorted(begins)]).run()
                )
        few *= MORE
    return end_of(job.simulation(total).run())


def _more_s(
    spans: Sequence[Sequence[Span]], stages: int, periods: Sequence[int], extra: int
) -> float:
    """What `extra` micro-batches more take, where the middle repeats; else 0."""
    per_period = ((period, _longer_s(spans, stages, period)) for period in periods)
    return next((extra // period * longer for period, longer in per_period if longer), 0.0)


def _longer_s(spans: Sequence[Sequence[Span]], stages: int, period: int) -> float:
    """What `period` micro-batches more take, where the middle repeats; else 0."""
    ends = {
        (actor, span.kind, span.chunk, span.micro_batch): span.end
        for actor, actor_spans in enumerate(spans)
        for span in actor_spans
        if span.kind in _PASSES
    }
    same_until = min(
        max(span.end for span in actor_spans if span.kind == "forward") for actor_spans in spans
    )
    lived = 0.0
    for first in range(0, len(spans), stages):  # of first stages
        begins: dict[int, float] = {}
        last = -1
        for span in spans[first]:
            if span.kind == "forward":
                begins.setdefault(span.micro_batch, span.start)
            elif span.kind == "backward" and span.chunk == 0 and span.end <= same_until:
                last = max(last, span.micro_batch)
        if last < 0:
            return 0.0
        lived = max(lived, ends[first, "backward", 0, last] - begins[last])
    since = same_until - 2 * lived
    if since <= 0:
        return 0.0
    longer, rounding = 0.0, ROUNDING * same_until
    for (actor, kind, chunk, micro_batch), end in ends.items():
        if since < end <= same_until:
            before = ends.get((actor, kind, chunk, micro_batch - period))
            longer = longer or (end - before if before is not None else 0.0)
            if before is None or abs(end - before - longer) > rounding:
                return 0.0
    return longer
