"""Decides again, of what a running job's sums of gradients took, how each stage sums them: in one ring or in
a hierarchical all-reduce, in which buckets or chunks, how across.

    measured_networks(plan, ...)   the plan with each network as fast as the sums on it were
    SumEvaluator                   step after step: what to change, whether it brought what was predicted

The price and the code are those of the start (plan/decide.py), and nothing flaps, as in adapt/pipeline.py.
A sum that goes another way adds in another order: losses differ by float32's rounding from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Any

from holmes_ext.adapt.pipeline import GAIN, MEASURED, Trials
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.options import Options
from holmes_ext.plan.cost.network import Price
from holmes_ext.plan.cost.price import Sums
from holmes_ext.plan.decide import Decisions, decisions
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.units import format_bytes


@dataclass(frozen=True)
class Summed:
    """What the ranks of a stage measured of a step's sums. reduction: how they went; size: bytes of a rank;
    seconds: that they were under way; exposed_s: that the program stood still for them; busy: network ->
    seconds in which it carried them; end_s: of the stage's last backward pass, after the first one's."""

    reduction: ReductionSpec
    size: float
    seconds: float
    exposed_s: float
    busy: Mapping[str, float] = field(default_factory=dict)
    end_s: float = 0.0

    @property
    def hierarchical(self) -> bool:
        return is_hierarchical(self.reduction, self.size)


@dataclass(frozen=True)
class SumChange:
    """From one way of every stage to sum `size` bytes to another. now_s, then_s: seconds of a step, measured
    and predicted; back: a change is taken back."""

    before: tuple[ReductionSpec, ...]
    after: tuple[ReductionSpec, ...]
    size: float
    now_s: float
    then_s: float
    back: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others: sizes of buckets and chunks that are about the same count as one."""
        return tuple(map(self._key, self.after))

    def _key(self, reduction: ReductionSpec) -> tuple[Any, ...]:
        if is_hierarchical(reduction, self.size):
            return True, reduction.across, round(log2(reduction.chunk_bytes))
        return False, None, round(log2(reduction.bucket_bytes))

    def adapted(self, plan: Plan, network_api: str) -> Plan:
        """`plan` as a job goes on with it: what was measured has decided, not the nominal model."""
        traffic = tuple(
            replace(known, reductions=self.after) if network_api in known.network_apis else known
            for known in plan.traffic
        )
        return replace(plan, traffic=traffic, basis=MEASURED)

    @property
    def text(self) -> str:
        pairs = zip(self.after, self.before)
        stage = next(stage for stage, (now, before) in enumerate(pairs) if now != before)
        of = f" of stage {stage}" if len(self.after) > 1 else ""
        return (
            f"gradients{of} {reduction_text(self.after[stage], self.size)} (were "
            f"{reduction_text(self.before[stage], self.size)})"
        )


def is_hierarchical(reduction: ReductionSpec, size: float) -> bool:
    return bool(reduction.clusters) and size >= reduction.hierarchical_from


def reduction_text(reduction: ReductionSpec, size: float) -> str:
    """Of `size` bytes."""
    if not is_hierarchical(reduction, size):
        return f"in one ring, in buckets of {format_bytes(reduction.bucket_bytes)}"
    route = f" by {reduction.across.algorithm}" if reduction.across is not None else ""
    return f"hierarchically{route}, in chunks of {format_bytes(reduction.chunk_bytes)}"


def measured_networks(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits, summed: Sequence[Summed]
) -> Plan:
    """`plan` with each network that the stages' sums were on as fast as they found it."""
    slower: dict[str, float] = {}
    decided = _by_size(plan, network_api, options, engine, summed)
    for stage, stage_sums in enumerate(summed):
        for name, price in _networks(decided[stage_sums.size], stage, stage_sums):
            busy, predicted = (
                stage_sums.busy.get(name, 0.0) - price.latency_s,
                stage_sums.size * price.byte_s,
            )
            if busy > 0 and predicted > 0:
                slower[name] = max(slower.get(name, 0.0), busy / predicted)
    fabrics = tuple(
        replace(fabric, rate_bps=max(1, round(fabric.rate_bps / slower.get(fabric.name, 1.0))))
        for fabric in plan.fabrics
    )
    return replace(plan, fabrics=fabrics, wan=plan.wan.scaled(1 / slower.get(ETHERNET, 1.0)))


def _networks(decided: Decisions, stage: int, summed: Summed) -> Iterator[tuple[str, Price]]:
    """The networks on which a stage's sums are, with what the slowest of its groups takes on them."""
    for sums in decided.prices.sums(decided.placement, stage):
        if not summed.hierarchical:
            if sums.flat.load.fabric is not None:
                yield sums.flat.load.fabric.name, _ring(sums, summed.reduction, summed.size)
        elif sums.both is not None and summed.reduction.across in (None, sums.both.route):
            both = replace(sums.both, chunk_bytes=summed.reduction.chunk_bytes)
            assert both.there.fabric is not None
            yield both.there.fabric.name, both.across
            for load in both.insides:
                if load.fabric is not None:
                    yield load.fabric.name, load.price.scaled(2)


def _ring(sums: Sums, reduction: ReductionSpec, size: float) -> Price:
    """One bucket after the other."""
    once = sums.flat.once
    return replace(once, latency_s=once.latency_s * max(1, ceil(size / reduction.bucket_bytes)))


def _by_size(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits, summed: Sequence[Summed]
) -> dict[float, Decisions]:
    """The start's decisions for each number of bytes that a stage sums; stages of one size share them."""
    plans = {
        size: replace(plan, workload=replace(plan.workload, gradient_bytes=size), basis=MEASURED)
        for size in {stage_sums.size for stage_sums in summed}
    }
    return {
        size: decisions(sized_plan, network_api, options, engine)
        for size, sized_plan in plans.items()
    }


class SumEvaluator:
    """Of one job. network_api: of its data-parallel groups."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        self.known = network_api, options, engine
        self.trials = Trials()

    def next(self, plan: Plan, summed: Sequence[Summed], step_s: float) -> SumChange | None:
        """What to change now, in a job whose steps take step_s with `plan`."""
        learned = measured_networks(plan, *self.known, summed)
        figures, current = (
            _figures(learned, summed),
            tuple(stage_sums.reduction for stage_sums in summed),
        )
        size = max(stage_sums.size for stage_sums in summed)
        if (back := self.trials.end(_rest(summed, step_s), step_s)) is not None:
            return SumChange(current, back.before, size, step_s, back.now_s, back=True)
        decided, before = (
            _by_size(known_plan, *self.known, summed) for known_plan in (learned, plan)
        )
        choices = [
            self._best(decided[stage_sums.size], before[stage_sums.size], stage, stage_sums)
            for stage, stage_sums in enumerate(summed)
        ]
        after = tuple(reduction for reduction, _ in choices)
        if after == current:
            return None
        ends = [
            stage_sums.end_s + max(0.0, stage_sums.exposed_s - stage_sums.seconds + seconds)
            for stage_sums, (reduction, seconds) in zip(summed, choices)
        ]
        then_s = (
            step_s
            + max(ends)
            - max(stage_sums.end_s + stage_sums.exposed_s for stage_sums in summed)
        )
        change = SumChange(current, after, size, step_s, then_s)
        return (
            None
            if then_s > step_s * (1 - GAIN) or self.trials.refused(change.key, figures)
            else change
        )

    def _best(
        self, decided: Decisions, before: Decisions, stage: int, stage_sums: Summed
    ) -> tuple[ReductionSpec, float]:
        """How the rules of the start let a stage sum, and the predicted seconds. The current way, and its
        measured seconds, where the new one is no faster, or sums hierarchically over other networks inside
        clusters than the current plan's, for which the groups were built. decided: of the learned plan;
        before: of the current one."""
        current, current_s, size = stage_sums.reduction, stage_sums.seconds, stage_sums.size
        reduction = replace(decided.reduction(stage, current.overlap), compress=current.compress)
        groups = decided.prices.sums(decided.placement, stage)
        if is_hierarchical(reduction, size):
            if list(map(_inside, groups)) != list(
                map(_inside, before.prices.sums(before.placement, stage))
            ):
                return current, current_s
            seconds = max(group.both.seconds(size) for group in groups if group.both is not None)
        else:
            seconds = max(_ring(group, reduction, size).seconds(size) for group in groups)
        return (reduction, seconds) if seconds < current_s else (current, current_s)

    def taken(self, change: SumChange, plan: Plan, summed: Sequence[Summed]) -> None:
        """All ranks go on with it; it was decided on what was `summed`."""
        figures = _figures(measured_networks(plan, *self.known, summed), summed)
        self.trials.begin(change, figures, _rest(summed, change.now_s))


def _inside(sums: Sums) -> list[str]:
    """The networks inside clusters of a sum hierarchically."""
    loads = sums.both.insides if sums.both is not None else ()
    return [load.fabric.name for load in loads if load.fabric is not None]


def _rest(summed: Sequence[Summed], step_s: float) -> tuple[float]:
    """Seconds of a step without its wait for sums."""
    return (step_s - max(stage_sums.exposed_s for stage_sums in summed),)


def _figures(plan: Plan, summed: Sequence[Summed]) -> tuple[float, ...]:
    """Seconds of the largest sum's bytes on each network."""
    size = max(stage_sums.size for stage_sums in summed)
    return tuple(8 * size / fabric.rate_bps for fabric in plan.fabrics)
