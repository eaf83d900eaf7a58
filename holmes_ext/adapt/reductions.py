"""Decides again how each stage of a running job sums gradients, from measured times of the sums.

The choice is between one ring and a hierarchical all-reduce, with sizes of buckets or chunks and
the algorithm between clusters.

    measured_networks()    returns the plan with the rates of networks that measured sums show
    SumEvaluator           chooses a change after each window of steps, and checks its effect

A sum is an all-reduce of gradients over a data-parallel group. Its price is its predicted time:
seconds of latency, and seconds for each byte. Prices and rules are those of the plan at the start
(plan/decide.py). Flapping is prevented as in adapt/pipeline.py. Another algorithm adds in another
order, so losses differ by rounding from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    """Measurements of the sums (all-reduces) of gradients of one pipeline stage in a step."""

    reduction: ReductionSpec  # algorithm that summed the gradients
    size: float  # bytes of gradients of a rank
    seconds: float  # while any sum was under way
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
    """Change of the algorithms that sum gradients, on one or more pipeline stages."""

    before: tuple[ReductionSpec, ...]  # of each stage, before the change
    after: tuple[ReductionSpec, ...]  # of each stage, after the change
    size: float  # bytes of gradients
    now_s: float  # measured seconds of a step before the change
    then_s: float  # predicted seconds of a step after the change
    back: bool = False  # whether an earlier change is taken back

    @property
    def key(self) -> tuple[_ReductionKey, ...]:
        """Value that is equal for changes with a similar result: sizes are rounded (log2)."""
        return tuple(map(self._key, self.after))

    def _key(self, reduction: ReductionSpec) -> _ReductionKey:
        if is_hierarchical(reduction, self.size):
            return _ReductionKey(
                is_hierarchical=True,
                across=reduction.across,
                log2_bytes=round(log2(reduction.chunk_bytes)),
            )
        return _ReductionKey(
            is_hierarchical=False, across=None, log2_bytes=round(log2(reduction.bucket_bytes))
        )

    def adapted(self, plan: Plan, network_api: str) -> Plan:
        """Return a plan with this change, marked as based on measurements."""
        all_traffic = []
        for traffic in plan.traffic:
            if network_api in traffic.network_apis:
                traffic = replace(traffic, reductions=self.after)
            all_traffic.append(traffic)
        return replace(plan, traffic=tuple(all_traffic), basis=MEASURED)

    @property
    def text(self) -> str:
        """This change in words, of the first stage that changes: how it sums gradients, and did."""
        stage = 0
        while self.after[stage] == self.before[stage]:
            stage += 1
        of_stage = f" of stage {stage}" if len(self.after) > 1 else ""
        after = reduction_text(self.after[stage], self.size)
        before = reduction_text(self.before[stage], self.size)
        return f"gradients{of_stage} {after} (were {before})"


class _ReductionKey(NamedTuple):
    """Properties that are equal for two algorithms with a similar speed."""

    is_hierarchical: bool
    across: CrossClusterAlgorithm | None
    log2_bytes: int  # of a chunk or a bucket


def is_hierarchical(reduction: ReductionSpec, size: float) -> bool:
    """Return whether gradients are summed hierarchically, and not in one ring.

    Args:
        reduction: How the stage sums gradients. Small sums use one ring in any case.
        size: Bytes of gradients.
    """
    return bool(reduction.clusters) and size >= reduction.hierarchical_from


def reduction_text(reduction: ReductionSpec, size: float) -> str:
    """Return how gradients are summed, in words: "in one ring, in buckets of 25 MiB".

    Args:
        reduction: How the stage sums gradients.
        size: Bytes of gradients.
    """
    if not is_hierarchical(reduction, size):
        return f"in one ring, in buckets of {format_bytes(reduction.bucket_bytes)}"
    route = f" by {reduction.across.algorithm}" if reduction.across is not None else ""
    return f"hierarchically{route}, in chunks of {format_bytes(reduction.chunk_bytes)}"


def measured_networks(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits, summed: Sequence[Summed]
) -> Plan:
    """Return a plan whose networks have the rates that follow from the measured sums of gradients.

    If sums on a network took twice as long as predicted, its rate is halved. Networks without sums
    keep their rates. If a network carries the sums of several stages, the largest slowdown counts.

    Args:
        plan: The plan, from whose rates the times of sums are predicted.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        options: Options of the job.
        engine: Abilities of the training framework.
        summed: Measurements of the sums of each stage.
    """
    slowdown: dict[str, float] = {}  # network -> measured time / predicted time
    # The predicted times depend on the bytes of gradients, which differ between stages.
    decisions_for = _decisions_by_size(plan, network_api, options, engine, summed)
    for stage, stage_sums in enumerate(summed):
        decided = decisions_for[stage_sums.size]
        for name, price in _networks_with_prices(decided, stage, stage_sums):
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
    """Yield (network, price of the all-reduce on it) for each data-parallel group of a stage.

    A ring uses one network. A hierarchical all-reduce uses one between clusters and others inside
    them; it is left out if its algorithm between clusters is not the one that was priced.

    Args:
        decided: Knows the prices of the possible algorithms for each group.
        stage: Number of the stage.
        summed: Measurements of the stage, which say what algorithm was used.
    """
    groups = decided.prices.family_reductions(decided.placement, stage)
    for group in groups:
        if not summed.hierarchical:
            network_of_ring = group.flat.load.fabric  # None: the group is inside one node
            if network_of_ring is not None:
                yield network_of_ring.name, _ring_price(group, summed.reduction, summed.size)
            continue
        used_across = summed.reduction.across  # algorithm between clusters; None: direct exchanges
        priced = group.hierarchical
        if priced is None or used_across not in (None, priced.route):
            continue
        priced = replace(priced, chunk_bytes=summed.reduction.chunk_bytes)
        network_across = priced.reduce_across.fabric
        assert network_across is not None
        yield network_across.name, priced.across
        for load in priced.inside_loads:
            if load.fabric is not None:
                # Inside clusters: a reduce-scatter before, and an all-gather after.
                yield load.fabric.name, load.price.scaled(2)


def _ring_price(group: FamilyReductions, reduction: ReductionSpec, size: float) -> Price:
    """Return the price of ring all-reduces of gradients, with the latency once for each bucket.

    Args:
        group: Prices of the possible algorithms for a group.
        reduction: Has the bytes of a bucket.
        size: Bytes of all gradients.
    """
    price = group.flat.once  # as if all gradients were in one bucket
    bucket_count = max(1, ceil(size / reduction.bucket_bytes))
    return replace(price, latency_s=price.latency_s * bucket_count)


def _decisions_by_size(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits, summed: Sequence[Summed]
) -> dict[float, Decisions]:
    """Return how gradients would be summed best, for each number of gradient bytes of a stage.

    Stages hold different layers, so they have different bytes of gradients, but a plan has one
    number for all stages. So the plan's rules decide once for each number, with its prices of sums.

    Args:
        plan: The plan, with the rates of networks from which times of sums are predicted.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        options: Options of the job.
        engine: Abilities of the training framework.
        summed: Measurements of each stage, of which only the bytes of gradients are used.

    Returns:
        Bytes of gradients of a stage -> decisions. Stages with the same number share them.
    """
    decided = {}
    for size in {stage_sums.size for stage_sums in summed}:
        workload = replace(plan.workload, gradient_bytes=size)
        # MEASURED: without it, the rules would take the plan for one of an assumed model.
        plan_for_size = replace(plan, workload=workload, basis=MEASURED)
        decided[size] = decisions(plan_for_size, network_api, options, engine)
    return decided


class _Choice(NamedTuple):
    """Algorithm for the sums of one stage."""

    reduction: ReductionSpec
    seconds: float  # of the sums in a step: predicted, or measured for the current algorithm


class SumEvaluator:
    """Chooses changes of the algorithms that sum a job's gradients, and checks their effect."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        """Start without a trial.

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

        The next change takes back the one on trial if that has not saved time. Otherwise each stage
        gets the algorithm that is fastest at the measured rates of the networks, if this is
        predicted to save the share GAIN of a step.

        Args:
            plan: Current plan of the job.
            summed: Measurements of the sums of each stage.
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
        # Bytes of gradients of a stage -> decisions, at the measured and at the planned rates.
        by_size = partial(
            _decisions_by_size,
            network_api=self.network_api,
            options=self.options,
            engine=self.engine,
            summed=summed,
        )
        decided_for = by_size(measured_plan)
        planned_for = by_size(plan)
        choices = []  # by stage
        for stage, stage_sums in enumerate(summed):
            choice = self._fastest(
                decided=decided_for[stage_sums.size],
                planned=planned_for[stage_sums.size],
                stage=stage,
                stage_sums=stage_sums,
            )
            choices.append(choice)
        after = tuple(choice.reduction for choice in choices)
        if after == current:
            return None
        # The step ends when the last stage has its sums. The seconds that sums save come off the
        # program's wait for them (exposed_s), because the part of a sum that overlaps the backward
        # pass stays the same.
        ends_now_s = []  # ends of the waits for sums, by stage
        ends_then_s = []
        for stage_sums, choice in zip(summed, choices):
            exposed_then_s = stage_sums.exposed_s - stage_sums.seconds + choice.seconds
            ends_now_s.append(stage_sums.end_s + stage_sums.exposed_s)
            ends_then_s.append(stage_sums.end_s + max(0.0, exposed_then_s))
        then_s = step_s + max(ends_then_s) - max(ends_now_s)
        change = SumChange(before=current, after=after, size=size, now_s=step_s, then_s=then_s)
        saves_enough = then_s <= step_s * (1 - GAIN)
        times = _times_on_networks(measured_plan, summed)
        if not saves_enough or self.trials.was_rejected(change.key, times):
            return None
        return change

    def _fastest(
        self, decided: Decisions, planned: Decisions, stage: int, stage_sums: Summed
    ) -> _Choice:
        """Return the best algorithm for the sums of a stage: the one in use, or a faster one.

        Args:
            decided: Decisions at the measured rates of the networks.
            planned: Decisions at the rates in the current plan.
            stage: Number of the stage.
            stage_sums: Measurements of the algorithm in use.
        """
        size = stage_sums.size
        current = _Choice(stage_sums.reduction, stage_sums.seconds)
        # Overlap with the backward pass and compression stay as they are in the running job.
        reduction = decided.reduction(stage, overlap=current.reduction.overlap)
        reduction = replace(reduction, compress=current.reduction.compress)
        # Prices of the stage's data-parallel groups. They sum at the same time: the slowest counts.
        groups = decided.prices.family_reductions(decided.placement, stage)
        if is_hierarchical(reduction, size):
            # Inside clusters, process groups exist only for the networks of the current plan.
            planned_groups = planned.prices.family_reductions(planned.placement, stage)
            networks = [_networks_inside(group) for group in groups]
            if networks != [_networks_inside(group) for group in planned_groups]:
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
            summed: Measurements of each stage from which the change was chosen.
        """
        times = _times_on_networks(self._with_measured_networks(plan, summed), summed)
        unchanged_times = _times_without_sums(summed, change.now_s)
        self.trials.begin(change, deciding_times=times, unchanged_times=unchanged_times)

    def _with_measured_networks(self, plan: Plan, summed: Sequence[Summed]) -> Plan:
        return measured_networks(plan, self.network_api, self.options, self.engine, summed)


def _networks_inside(group: FamilyReductions) -> list[str]:
    """Return the networks that a hierarchical all-reduce of a group uses inside the clusters.

    The result is [] if the group cannot reduce hierarchically.
    """
    if group.hierarchical is None:
        return []
    loads = group.hierarchical.inside_loads
    return [load.fabric.name for load in loads if load.fabric is not None]


def _times_without_sums(summed: Sequence[Summed], step_s: float) -> tuple[float]:
    """Return the seconds of a step without the longest wait for sums, in a tuple for differ().

    Another algorithm for the sums should not change this time.
    """
    return (step_s - max(stage_sums.exposed_s for stage_sums in summed),)


def _times_on_networks(plan: Plan, summed: Sequence[Summed]) -> tuple[float, ...]:
    """Return how long the largest gradients of a stage would take over each network, in seconds.

    These times change when a network becomes faster or slower.
    """
    size_bits = 8 * max(stage_sums.size for stage_sums in summed)
    return tuple(size_bits / fabric.rate_bps for fabric in plan.fabrics)
