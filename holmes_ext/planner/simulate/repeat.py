"""Step time of many micro-batches from a simulation of few, if the middle of the step repeats.

    few micro-batches   F F F F B F B F B F B F B B B B       the same operations up to the last forward pass;
    k more of them      F F F F B F B F B F B F B F B B B B   the state there decides all that follows

If the state at the last forward pass equals the state k micro-batches before, D seconds earlier, then a step
of few + n k micro-batches takes n D longer: max-plus systems become periodic (Baccelli et al. 1992, ch. 3).
The state counts as equal if every pass in the last two lifetimes of a micro-batch ended D later than the
pass k micro-batches before.

Pipeline classes that share no link may each have their own D. Each kind then begins n D later, and they
meet when their gradients are reduced. tests/planner/simulate/test_repeat.py compares with full simulations.
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.planner.simulate.events import Span
from holmes_ext.planner.simulate.step import JobStep, end_of

#: Longest period that is tried, in micro-batches (interleaved: in rounds of one for each stage).
MAX_PERIOD = 4
#: Factor on the number of simulated micro-batches if the middle did not repeat, and the share of all
#: micro-batches from which on all are simulated.
GROWTH = 3
MAX_SHARE = 0.35
#: Micro-batches simulated first: so many times the warm-up depth, and some more.
FEW_DEPTHS = 3
FEW_DEPTHS_INTERLEAVED = 6
FEW_MORE = 4
#: Fraction of a step up to which moments are equal.
ROUNDING = 1e-11
_PASSES = ("forward", "backward")


def folded_s(job: JobStep) -> float:
    """Simulate a step with few of its micro-batches, and return the step time with all, in seconds.

    The time equals that of a full simulation but for rounding. If the middle of the step does not repeat,
    more micro-batches are simulated, and in the end all.
    """
    stages = job.costs.stages
    total = job.costs.micro_batches
    if job.run.schedule:  # a written order of passes, for just so many micro-batches
        return job.step().step_s
    is_interleaved = job.run.virtual > 1
    unit = (
        stages if is_interleaved else 1
    )  # an interleaved schedule takes `stages` micro-batches in a row
    warm_up = max((*job.run.in_flight, stages))
    depths = FEW_DEPTHS_INTERLEAVED if unit > 1 else FEW_DEPTHS
    few = depths * warm_up + FEW_MORE
    while few < MAX_SHARE * total:
        step_s = _from_few_s(job, few, unit)
        if step_s:  # 0: the middle did not repeat
            return step_s
        few *= GROWTH
    return end_of(job.simulation(total).run())


def _from_few_s(job: JobStep, few: int, unit: int) -> float:
    """Return the step time from a simulation of `few` micro-batches or a little more; 0 if nothing repeats.

    Args:
        job: The step.
        few: Number of micro-batches to simulate.
        unit: Micro-batches of a round; periods are multiples of it.
    """
    stages = job.costs.stages
    total = job.costs.micro_batches
    count = total - (total - few) // unit * unit  # so that whole rounds are omitted
    omitted = total - count
    spans = job.simulation(count).run()
    periods = [
        period for period in range(unit, MAX_PERIOD * unit + 1, unit) if omitted % period == 0
    ]
    omitted_s = _omitted_s(spans, stages, periods, omitted)
    if omitted_s:
        return end_of(spans) + omitted_s
    # Pipeline classes that share nothing may repeat with different periods.
    groups = job.apart()
    if len(groups) == 1:
        return 0.0
    begins: dict[int, float] = {}  # pipeline class -> its delay
    for kinds in groups:
        group_spans = [
            spans[kind * stages + stage] for kind in sorted(kinds) for stage in range(stages)
        ]
        delay_s = _omitted_s(group_spans, stages, periods, omitted)
        if not delay_s:
            return 0.0
        begins |= dict.fromkeys(kinds, delay_s)
    # Each kind starts later by its omitted micro-batches, so all arrive at their reductions in time.
    delayed = job.simulation(count, [begins[kind] for kind in sorted(begins)])
    return end_of(delayed.run())


def _omitted_s(
    spans: Sequence[Sequence[Span]], stages: int, periods: Sequence[int], omitted: int
) -> float:
    """Return the seconds that the omitted micro-batches would take; 0 if the middle does not repeat.

    Args:
        spans: Spans of every actor; the actors of a pipeline class follow each other, stage by stage.
        stages: Number of stages.
        periods: Periods to try, in micro-batches.
        omitted: Number of micro-batches that are not simulated, a multiple of each period.
    """
    for period in periods:
        period_s = _period_s(spans, stages, period)
        if period_s:
            return omitted // period * period_s
    return 0.0


def _period_s(spans: Sequence[Sequence[Span]], stages: int, period: int) -> float:
    """Return the seconds of `period` micro-batches in the middle of a step; 0 if it does not repeat.

    Args:
        spans: Spans of every actor; the actors of a pipeline class follow each other, stage by stage.
        stages: Number of stages.
        period: Period to test, in micro-batches.
    """
    # End of every pass.
    ends = {
        (actor, span.kind, span.chunk, span.micro_batch): span.end
        for actor, actor_spans in enumerate(spans)
        for span in actor_spans
        if span.kind in _PASSES
    }
    last_forward_end_s = min(
        max(span.end for span in actor_spans if span.kind == "forward") for actor_spans in spans
    )
    lifetime_s = 0.0
    for first_stage in range(0, len(spans), stages):
        actor_lifetime_s = _lifetime_s(spans[first_stage], last_forward_end_s)
        if not actor_lifetime_s:
            return 0.0
        lifetime_s = max(lifetime_s, actor_lifetime_s)
    # Compare all passes of the last two lifetimes with those one period before.
    since = last_forward_end_s - 2 * lifetime_s
    if since <= 0:
        return 0.0
    period_s = 0.0  # set by the first pass; all others must agree
    rounding_s = ROUNDING * last_forward_end_s
    for (actor, kind, chunk, micro_batch), end in ends.items():
        if since < end <= last_forward_end_s:
            before = ends.get((actor, kind, chunk, micro_batch - period))
            if before is None:
                return 0.0
            period_s = period_s or end - before
            if abs(end - before - period_s) > rounding_s:
                return 0.0
    return period_s


def _lifetime_s(spans: Sequence[Span], until: float) -> float:
    """Return the seconds from a micro-batch's first forward to its last backward pass on a first stage.

    The micro-batch is the last that ended before the moment `until`; 0 if none did.
    """
    starts: dict[int, float] = {}  # micro-batch -> start of its first forward pass
    last_end: dict[int, float] = {}  # micro-batch -> end of its last backward pass
    last = -1
    for span in spans:
        if span.kind == "forward":
            starts.setdefault(span.micro_batch, span.start)
        elif span.kind == "backward" and span.chunk == 0:
            last_end[span.micro_batch] = span.end
            if span.end <= until:
                last = max(last, span.micro_batch)
    return last_end[last] - starts[last] if last >= 0 else 0.0
