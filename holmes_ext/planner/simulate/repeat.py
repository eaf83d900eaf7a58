"""Step time of many micro-batches from a simulation of few, if the middle of the step repeats.

    few micro-batches   F F F F B F B F B F B F B B B B       the same operations up to the last forward pass;
    k more of them      F F F F B F B F B F B F B F B B B B   the state there decides everything after it

If the state at the last forward pass equals the state k micro-batches before, D seconds earlier,
then a step of few + n k micro-batches takes n D longer: max-plus systems become periodic (Baccelli
et al. 1992, ch. 3). The lifetime of a micro-batch is the time from its first forward pass to its
last backward pass. The state depends on the micro-batches under way (they began within the last
lifetime), and on those that they waited for, a lifetime earlier. So the state counts as equal if
every pass of the last two lifetimes ended D later than the same pass of k micro-batches before.

Pipeline classes (a class is all pipelines on equal nodes) that share no link may each have their
own D. Each class then begins n D later, and they meet when their gradients are reduced.
tests/planner/simulate/test_repeat.py compares with full simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holmes_ext.planner.simulate.events import Span
from holmes_ext.planner.simulate.step import JobStep, end_of

#: Longest period that is tried, in micro-batches (interleaved: in rounds of as many as stages).
MAX_PERIOD = 4
#: Least multiple of all these periods.
ALL_PERIODS = 12
#: Factor on the number of simulated micro-batches if the middle did not repeat, and the largest share
#: of all micro-batches that is simulated; beyond it, all are simulated.
GROWTH = 3
MAX_SHARE = 0.35
#: Micro-batches simulated first: this multiple of the warm-up depth, and FEW_MORE. Enough for the
#: warm-up, two lifetimes of a micro-batch to compare, and a period.
FEW_DEPTHS = 3
FEW_DEPTHS_INTERLEAVED = 6
FEW_MORE = 4
#: Fraction of a step up to which moments are equal.
ROUNDING = 1e-11
#: Fraction of a step up to which the sum of all causes is the step time.
SUM_ROUNDING = 1e-9
_PASSES = ("forward", "backward")


def folded_s(job: JobStep) -> float:
    """Simulate a step with few of its micro-batches, and return the step time with all, in seconds.

    The time equals that of a full simulation but for rounding. If the middle of the step does not
    repeat, more micro-batches are simulated, and in the end all.
    """
    total = job.costs.micro_batches
    if job.run.schedule:  # a written order of passes, for just this number of micro-batches
        return job.step().step_s
    few, round_size = _first_simulation(job)
    while few < MAX_SHARE * total:  # with more, a full simulation takes hardly longer
        step_s = _from_few_s(job, few, round_size)
        if step_s:  # 0: the middle did not repeat
            return step_s
        few *= GROWTH
    return end_of(job.simulation(total).run())


def folded_causes(job: JobStep, step_s: float) -> dict[str, float]:
    """Return the mean seconds of a rank by cause in a step, from simulations of few micro-batches.

    If the middle of the step repeats, each cause grows by the same seconds with each period. So two
    simulations give the growth for all micro-batches. If the sum of the causes is not the step
    time, the middle does not repeat, and all micro-batches are simulated.

    Args:
        job: The step.
        step_s: Time of the step, as folded_s() returns it.
    """
    total = job.costs.micro_batches
    few, round_size = _first_simulation(job)
    # The middle may repeat after 1 to MAX_PERIOD rounds. ALL_PERIODS rounds are a multiple of each.
    period = ALL_PERIODS * round_size

    # Two simulations that differ by a period. The smaller has at least `few` micro-batches, and
    # lacks a whole number of periods.
    lacking_periods = (total - few) // period
    smaller = total - lacking_periods * period
    larger = smaller + period
    if not job.run.schedule and larger < MAX_SHARE * total:
        causes_of_smaller = job.step(smaller).causes
        causes_of_larger = job.step(larger).causes
        causes = {}
        for name, seconds in causes_of_smaller.items():
            growth_s = causes_of_larger[name] - seconds  # with another period
            causes[name] = seconds + lacking_periods * growth_s
        if abs(sum(causes.values()) - step_s) <= SUM_ROUNDING * step_s:
            return causes
    return job.step().causes


class _FirstSimulation(NamedTuple):
    """How many micro-batches of a step are simulated first, and in which multiples.

    In the middle of a step, the operations of all ranks repeat after a period of some micro-batches.
    folded_s() first simulates a few micro-batches. If it detects no period, it simulates more.
    """

    micro_batches: int
    #: Number of micro-batches that an interleaved schedule passes through a chunk before the next
    #: chunk (a round); periods are multiples of it. 1 under other schedules.
    round_size: int


def _first_simulation(job: JobStep) -> _FirstSimulation:
    """Return how many micro-batches to simulate first.

    The middle of a step is the part in which all stages are busy: after the first micro-batches have
    reached the last stage (warm-up), before the last ones leave the first stage. The simulation must
    be long enough to show after how many micro-batches the operations of the middle repeat.
    """
    stages = job.costs.stages
    # An interleaved schedule passes `stages` micro-batches through a chunk before the next chunk,
    # so its period is a multiple of these.
    is_interleaved = job.run.virtual > 1
    round_size = stages if is_interleaved else 1
    # Largest warm-up depth of a stage: 1F1B's is the number of stages on the first stage.
    warm_up = max((*job.run.in_flight, stages))
    # Enough for the warm-up itself, two lifetimes of a micro-batch to compare, and a period. A lifetime
    # is about as long as `warm_up` micro-batches take.
    depths = FEW_DEPTHS_INTERLEAVED if round_size > 1 else FEW_DEPTHS
    return _FirstSimulation(depths * warm_up + FEW_MORE, round_size)


def _from_few_s(job: JobStep, few: int, round_size: int) -> float:
    """Return the step time from a simulation of about `few` micro-batches; 0 if nothing repeats.

    The simulation leaves out micro-batches in the middle of the step. If the middle repeats with a
    period, the step takes longer by the time of the omitted periods.

    Args:
        job: The step.
        few: Number of micro-batches to simulate, or a little more.
        round_size: Micro-batches of a round; periods are multiples of it.
    """
    stages = job.costs.stages
    total = job.costs.micro_batches
    omitted = (total - few) // round_size * round_size  # whole rounds
    count = total - omitted
    spans = job.simulation(count).run()
    possible_periods = range(round_size, MAX_PERIOD * round_size + 1, round_size)
    periods = [period for period in possible_periods if omitted % period == 0]
    omitted_s = _omitted_s(spans, stages, periods, omitted)
    if omitted_s:
        return end_of(spans) + omitted_s

    # Pipeline classes (on different nodes) that share no network before their gradients are reduced
    # may repeat with different periods.
    groups = job.apart()
    if len(groups) == 1:
        return 0.0
    begins: dict[int, float] = {}  # pipeline class -> its delay
    for classes in groups:
        group_spans: list[Sequence[Span]] = []
        for pipeline_class in sorted(classes):
            first = pipeline_class * stages  # its actors follow each other, stage by stage
            group_spans += spans[first : first + stages]
        delay_s = _omitted_s(group_spans, stages, periods, omitted)
        if not delay_s:
            return 0.0
        begins |= dict.fromkeys(classes, delay_s)

    # Each class starts later by the time of its omitted micro-batches. So each reaches the
    # reduction of its gradients, where the classes meet, at the same moment as in a full step.
    delayed = job.simulation(count, [begins[number] for number in sorted(begins)])
    return end_of(delayed.run())


def _omitted_s(
    spans: Sequence[Sequence[Span]], stages: int, periods: Sequence[int], omitted: int
) -> float:
    """Return the seconds that the micro-batches left out of a simulation would take; 0 if unknown.

    To save time, folded_s() simulates a step with few of its micro-batches: some in the middle of
    the step are omitted. The passes there repeat after a number of micro-batches, the period.
    Several periods are tried, and the first that fits gives the seconds. 0 if none fits.

    Args:
        spans: Spans of every actor (ranks of a stage that do the same). Those of a pipeline class
            (pipelines on equal nodes) follow each other, stage by stage.
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
    """Return the seconds after which the passes in the middle of a step repeat; 0 if they do not.

    Each pass is compared with the same pass of the micro-batch `period` numbers before. The passes
    repeat if the time between their ends is equal for all pairs; this time is the result.

    Compared are the passes that end within two lifetimes of a micro-batch (first to last pass),
    before the first actor's last forward pass ends. The last lifetime covers the micro-batches under
    way then, the lifetime before it those that they waited for.

    Args:
        spans: Spans of every actor (ranks of a stage that do the same). Those of a pipeline class
            (pipelines on equal nodes) follow each other, stage by stage.
        stages: Number of stages.
        period: Period to test, in micro-batches.
    """
    # (actor, kind of pass, chunk, micro-batch) -> end of the pass
    ends = {
        (actor, span.kind, span.chunk, span.micro_batch): span.end
        for actor, actor_spans in enumerate(spans)
        for span in actor_spans
        if span.kind in _PASSES
    }

    # From here on an actor does cool-down passes. These do not repeat.
    last_forward_end_s = min(
        max(span.end for span in actor_spans if span.kind == "forward") for actor_spans in spans
    )

    # Longest time, over the pipeline classes, from a micro-batch's first to its last pass.
    lifetime_s = 0.0
    for first_stage in range(0, len(spans), stages):
        actor_lifetime_s = _lifetime_s(spans[first_stage], last_forward_end_s)
        if not actor_lifetime_s:
            return 0.0
        lifetime_s = max(lifetime_s, actor_lifetime_s)

    # Compare all passes of the last two lifetimes with those a period before.
    since = last_forward_end_s - 2 * lifetime_s
    if since <= 0:
        return 0.0
    period_s = 0.0  # set by the first pass; all others must agree
    rounding_s = ROUNDING * last_forward_end_s
    for (actor, kind, chunk, micro_batch), end in ends.items():
        is_compared = since < end <= last_forward_end_s
        if not is_compared:
            continue
        end_before = ends.get((actor, kind, chunk, micro_batch - period))
        if end_before is None:
            return 0.0
        elapsed_s = end - end_before
        period_s = period_s or elapsed_s
        if abs(elapsed_s - period_s) > rounding_s:
            return 0.0
    return period_s


def _lifetime_s(spans: Sequence[Span], until: float) -> float:
    """Return the seconds from a micro-batch's first to its last pass, on a first stage.

    The micro-batch is the last that ended before the moment `until`; 0 if none did.
    """
    starts: dict[int, float] = {}  # micro-batch -> start of its first forward pass
    last_end: dict[int, float] = {}  # micro-batch -> end of its last backward pass
    last = -1
    for span in spans:
        if span.kind == "forward":
            starts.setdefault(span.micro_batch, span.start)
        elif span.kind == "backward" and span.chunk == 0:  # the first chunk comes last
            last_end[span.micro_batch] = span.end
            if span.end <= until:
                last = max(last, span.micro_batch)
    return last_end[last] - starts[last] if last >= 0 else 0.0
