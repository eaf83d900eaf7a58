"""Decides again how each stage of a running job sums gradients, from measured times of the sums.

The choice is between one ring and a hierarchical all-reduce, with sizes of buckets or chunks and the
algorithm between clusters.

    measured_networks()    returns the plan with the rates of networks that follow from the measured sums
    SumEvaluator           chooses a change after each window of steps, and checks its effect

Prices and rules are those of the plan at the start (plan/decide.py). Flapping is prevented as in
adapt/pipeline.py. Another algorithm adds in another order, so losses differ by rounding from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import TYPE_CHECKING, NamedTuple

from holmes_ext.adapt.pipeline import GAIN, MEASURED, Trials
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.options import Options
from holmes_ext.plan.cost.network import Price
from holmes_ext.plan.cost.price import FamilyReductions
from holmes_ext.plan.decide import Decisions, decisions
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.units import format_bytes

if TYPE_CHECKING:
    from holmes_ext.plan.traffic import CrossClusterAlgorithm


@dataclass(frozen=True)
class Summed:
    """Measurements of the sums of gradients of one stage in a step."""

    reduction: ReductionSpec  # algorithm of the sums
    size: float  # bytes of gradients of a rank
    seconds: float  # while sums were under way
    exposed_s: float  # seconds that the program waited for sums
    #: Network -> seconds of carrying sums.
    busy: Mapping[str, float] = field(default_factory=dict)
    #: End of the stage's last backward pass, in seconds after that of the stage that ends first.
    end_s: float = 0.0

    @property
    def hierarchical(self) -> bool:
        """True if the sums are hierarchical."""
        return is_hierarchical(self.reduction, self.size)


@dataclass(frozen=True)
class SumChange:
    """Change of the algorithms that sum gradients."""

    before: tuple[ReductionSpec, ...]  # of each stage, before the change
    after: tuple[ReductionSpec, ...]  # of each stage, after the change
    size: float  # bytes of gradients
    now_s: float  # measured seconds of a step before the change
    then_s: float  # predicted seconds of a step after the change
    back: bool = False  # whether an earlier change is taken back

    @property
    def key(self) -> tuple[_ReductionKey, ...]:
        """Value that is equal for changes with a similar result: sizes are rounded to powers of two."""
        return tuple(map(self._key, self.after))

    def _key(self, reduction: ReductionSpec) -> _ReductionKey:
        if is_hierarchical(reduction, self.size):
            return _ReductionKey(True, reduction.across, round(log2(reduction.chunk_bytes)))
        return _ReductionKey(False, None, round(log2(reduction.bucket_bytes)))

    def adapted(self, plan: Plan, network_api: str) -> Plan:
        """Return a plan with this change, which is based on measurements instead of a nominal model."""
        all_traffic = []
        for traffic in plan.traffic:
            if network_api in traffic.network_apis:
                traffic = replace(traffic, reductions=self.after)
            all_traffic.append(traffic)
        return replace(plan, traffic=tuple(all_traffic), basis=MEASURED)

    @property
    def text(self) -> str:
        """Description of the first stage that changes, for messages."""
        stage = 0
        while self.after[stage] == self.before[stage]:
            stage += 1
        of_stage = f" of stage {stage}" if len(self.after) > 1 else ""
        after = reduction_text(self.after[stage], self.size)
        before = reduction_text(self.before[stage], self.size)
        return f"gradients{of_stage} {after} (were {before})"


class _ReductionKey(NamedTuple):
    """Properties for the comparison of two algorithms."""

    is_hierarchical: bool
    across: CrossClusterAlgorithm | None
    log2_bytes: int  # of a chunk or a bucket


def is_hierarchical(reduction: ReductionSpec, size: float) -> bool:
    """Return whether gradients of so many bytes are summed hierarchically."""
    return bool(reduction.clusters) and size >= reduction.hierarchical_from


def reduction_text(reduction: ReductionSpec, size: float) -> str:
    """Return a description of how gradients of so many bytes are summed, for messages."""
    if not is_hierarchical(reduction, size):
        return f"in one ring, in buckets of {format_bytes(reduction.bucket_bytes)}"
    route = f" by {reduction.across.algorithm}" if reduction.across is not None else ""
    return f"hierarchically{route}, in chunks of {format_bytes(reduction.chunk_bytes)}"


def measured_networks(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits, summed: Sequence[Summed]
) -> Plan:
    """Return a plan whose networks have the rates that follow from the measured sums.

    Networks without sums keep their rates. If a network carries the sums of several stages, the slowest one
    counts.

    Args:
        plan: The plan.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        options: Options of the job.
        engine: Abilities of the training framework.
        summed: Measurements of each stage.
    """
    slowdown: dict[str, float] = {}  # network -> measured time / predicted time
    # Bytes of gradients -> decisions of the plan's rules, with the prices of sums.
    decided = _decisions_by_size(plan, network_api, options, engine, summed)
    for stage, stage_sums in enumerate(summed):
        for name, price in _networks_with_prices(decided[stage_sums.size], stage, stage_sums):
            # A price is a latency and seconds for each byte; only the latter depends on the rate.
            measured_s = stage_sums.busy.get(name, 0.0) - price.latency_s
            predicted_s = stage_sums.size * price.byte_s
            if measured_s > 0 and predicted_s > 0:
                slowdown[name] = max(slowdown.get(name, 0.0), measured_s / predicted_s)
    fabrics = []
    for fabric in plan.fabrics:
        rate_bps = round(fabric.rate_bps / slowdown.get(fabric.name, 1.0))
        fabrics.append(replace(fabric, rate_bps=max(1, rate_bps)))
    wan = plan.wan.scaled(1 / slowdown.get(ETHERNET, 1.0))
    return replace(plan, fabrics=tuple(fabrics), wan=wan)


def _networks_with_prices(
    decided: Decisions, stage: int, summed: Summed
) -> Iterator[tuple[str, Price]]:
    """Yield (network, price) of the networks that a stage's sums use, for each of its groups.

    A ring uses one network. A hierarchical all-reduce uses one between clusters and others inside them; it is
    left out if its algorithm between clusters is not the one that was priced.

    Args:
        decided: Decisions of the plan's rules, with the prices of sums.
        stage: Number of the stage.
        summed: Measurements of the stage.
    """
    for sums in decided.prices.family_reductions(decided.placement, stage):
        if not summed.hierarchical:
            if sums.flat.load.fabric is not None:
                yield sums.flat.load.fabric.name, _ring_price(sums, summed.reduction, summed.size)
        elif sums.hierarchical is not None and summed.reduction.across in (
            None,
            sums.hierarchical.route,
        ):
            hierarchical = replace(sums.hierarchical, chunk_bytes=summed.reduction.chunk_bytes)
            assert hierarchical.reduce_across.fabric is not None
            yield hierarchical.reduce_across.fabric.name, hierarchical.across
            for load in hierarchical.inside_loads:
                if load.fabric is not None:
                    # Inside clusters: a reduce-scatter before, and an all-gather after.
                    yield load.fabric.name, load.price.scaled(2)


def _ring_price(sums: FamilyReductions, reduction: ReductionSpec, size: float) -> Price:
    """Return the price of a ring all-reduce of gradients of so many bytes, bucket by bucket.

    The latency counts once for each bucket.
    """
    once = sums.flat.once
    bucket_count = max(1, ceil(size / reduction.bucket_bytes))
    return replace(once, latency_s=once.latency_s * bucket_count)


def _decisions_by_size(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits, summed: Sequence[Summed]
) -> dict[float, Decisions]:
    """Return the decisions of the plan's rules for each number of gradient bytes.

    Returns:
        Bytes of gradients of a stage -> decisions. Stages with the same number share them.
    """
    decided = {}
    for size in {stage_sums.size for stage_sums in summed}:
        workload = replace(plan.workload, gradient_bytes=size)
        plan_for_size = replace(plan, workload=workload, basis=MEASURED)
        decided[size] = decisions(plan_for_size, network_api, options, engine)
    return decided


class _Choice(NamedTuple):
    """Algorithm for the sums of one stage."""

    reduction: ReductionSpec
    seconds: float  # of the sums in a step: predicted, or measured for the current algorithm


class SumEvaluator:
    """Decisions on how one job sums gradients."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        """Prepare to decide.

        Args:
            network_api: VERBS for NCCL, SOCKETS for gloo, of the data-parallel groups.
            options: Options of the job.
            engine: Abilities of the training framework.
        """
        self.network_api = network_api
        self.options = options
        self.engine = engine
        self.trials = Trials()

    def next(self, plan: Plan, summed: Sequence[Summed], step_s: float) -> SumChange | None:
        """End the running trial, if there is one, and return the next change, or None.

        The next change takes back the one on trial if that has not saved time. Otherwise each stage gets the
        algorithm that is faster at the measured rates of the networks, if this is predicted to save GAIN of a
        step.

        Args:
            plan: Current plan of the job.
            summed: Measurements of each stage.
            step_s: Measured seconds of a step.
        """
        measured_plan = self._with_measured_networks(plan, summed)
        current = tuple(stage_sums.reduction for stage_sums in summed)
        size = max(stage_sums.size for stage_sums in summed)
        rejected = self.trials.end(_times_without_sums(summed, step_s), step_s)
        if rejected is not None:
            return SumChange(
                before=current,
                after=rejected.before,
                size=size,
                now_s=step_s,
                then_s=rejected.now_s,
                back=True,
            )
        # Bytes of gradients of a stage -> decisions, with measured networks and for the current plan.
        decided = _decisions_by_size(
            measured_plan, self.network_api, self.options, self.engine, summed
        )
        before = _decisions_by_size(plan, self.network_api, self.options, self.engine, summed)
        choices = []  # by stage
        for stage, stage_sums in enumerate(summed):
            size_of_stage = stage_sums.size
            choice = self._fastest(decided[size_of_stage], before[size_of_stage], stage, stage_sums)
            choices.append(choice)
        after = tuple(choice.reduction for choice in choices)
        if after == current:
            return None
        # The step ends when the last stage has its sums. Sums that take less time expose less of it.
        ends_now_s = []  # ends of the waits for sums, by stage
        ends_then_s = []
        for stage_sums, choice in zip(summed, choices):
            exposed_then_s = stage_sums.exposed_s - stage_sums.seconds + choice.seconds
            ends_now_s.append(stage_sums.end_s + stage_sums.exposed_s)
            ends_then_s.append(stage_sums.end_s + max(0.0, exposed_then_s))
        then_s = step_s + max(ends_then_s) - max(ends_now_s)
        change = SumChange(current, after, size, step_s, then_s)
        saves_enough = then_s <= step_s * (1 - GAIN)
        times = _times_on_networks(measured_plan, summed)
        if not saves_enough or self.trials.refused(change.key, times):
            return None
        return change

    def _fastest(
        self, decided: Decisions, before: Decisions, stage: int, stage_sums: Summed
    ) -> _Choice:
        """Return the algorithm that the plan's rules choose for a stage, or the current one if it is faster.

        A hierarchical all-reduce over other networks inside clusters than in the current plan is not chosen:
        the process groups are made for those.

        Args:
            decided: Decisions for the plan with measured networks.
            before: Decisions for the current plan.
            stage: Number of the stage.
            stage_sums: Measurements of the stage.
        """
        size = stage_sums.size
        current = _Choice(stage_sums.reduction, stage_sums.seconds)
        # Overlap and compression are those of the running job.
        planned = decided.reduction(stage, current.reduction.overlap)
        reduction = replace(planned, compress=current.reduction.compress)
        groups = decided.prices.family_reductions(
            decided.placement, stage
        )  # prices; the slowest group counts
        if is_hierarchical(reduction, size):
            groups_before = before.prices.family_reductions(before.placement, stage)
            networks = [_networks_inside(group) for group in groups]
            if networks != [_networks_inside(group) for group in groups_before]:
                return current
            seconds = max(
                group.hierarchical.seconds(size)
                for group in groups
                if group.hierarchical is not None
            )
        else:
            seconds = max(_ring_price(group, reduction, size).seconds(size) for group in groups)
        if seconds >= current.seconds:
            return current
        return _Choice(reduction, seconds)

    def taken(self, change: SumChange, plan: Plan, summed: Sequence[Summed]) -> None:
        """Begin the trial of a change that all ranks adopt.

        Args:
            change: The change.
            plan: Plan before the change.
            summed: Measurements that the decision was based on.
        """
        times = _times_on_networks(self._with_measured_networks(plan, summed), summed)
        unchanged_times = _times_without_sums(summed, change.now_s)
        self.trials.begin(change, deciding_times=times, unchanged_times=unchanged_times)

    def _with_measured_networks(self, plan: Plan, summed: Sequence[Summed]) -> Plan:
        return measured_networks(plan, self.network_api, self.options, self.engine, summed)


def _networks_inside(sums: FamilyReductions) -> list[str]:
    """Return the networks that a hierarchical all-reduce uses inside clusters; [] if there is none."""
    if sums.hierarchical is None:
        return []
    return [load.fabric.name for load in sums.hierarchical.inside_loads if load.fabric is not None]


def _times_without_sums(summed: Sequence[Summed], step_s: float) -> tuple[float]:
    """Return the seconds of a step without the longest wait for sums."""
    return (step_s - max(stage_sums.exposed_s for stage_sums in summed),)


def _times_on_networks(plan: Plan, summed: Sequence[Summed]) -> tuple[float, ...]:
    """Return the seconds that the bytes of the largest sum take on each network."""
    size_bits = 8 * max(stage_sums.size for stage_sums in summed)
    return tuple(size_bits / fabric.rate_bps for fabric in plan.fabrics)
