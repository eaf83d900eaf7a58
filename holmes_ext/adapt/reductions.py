"""Chooses anew how each pipeline stage of a running job reduces gradients, from measured times.

The choice is between one ring and a hierarchical all-reduce, with sizes of buckets or chunks
and the algorithm between clusters.

    measured_networks()    corrects the plan's network rates by the measured reduction times
    ReductionEvaluator     chooses a change after every few steps, and checks its effect

A reduction is an all-reduce of gradients over a data-parallel group. Its predicted time is a Price:
seconds of latency, and seconds for each byte. The rules are those that made the plan at the start
of the job (plan/decide.py). Thresholds prevent flapping, as in adapt/pipeline.py. Another algorithm
adds in another order, so losses differ by rounding from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, log2
from typing import TYPE_CHECKING, NamedTuple

from holmes_ext.adapt.pipeline import LEAST_GAIN, MEASURED, Trials
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
class MeasuredReductions:
    """Measurements of the gradient reductions (all-reduces) of a pipeline stage in a step."""

    reduction: ReductionSpec  # algorithm that summed the gradients
    size: float  # bytes of gradients of a rank
    seconds: float  # duration of the reductions; overlaps count once
    exposed_s: float  # seconds that the program waited for reductions
    #: Network -> duration of the reductions on it, in seconds.
    busy: Mapping[str, float] = field(default_factory=dict)
    #: End of the stage's last backward pass, in seconds after that of the stage that ends first.
    end_s: float = 0.0

    @property
    def hierarchical(self) -> bool:
        """True if gradients are reduced inside clusters first, then across; False for one ring."""
        return is_hierarchical(self.reduction, self.size)


@dataclass(frozen=True)
class ReductionChange:
    """Change of the algorithms that reduce gradients, on one or more pipeline stages."""

    before: tuple[ReductionSpec, ...]  # of each stage, before the change
    after: tuple[ReductionSpec, ...]  # of each stage, after the change
    size: float  # bytes of gradients of the stage that has most
    now_s: float  # measured seconds of a step before the change
    then_s: float  # predicted seconds of a step after the change
    takes_back: bool = False  # True: an earlier change did not save time and is reverted

    @property
    def key(self) -> tuple[_ReductionKey, ...]:
        """Value that is equal for similar changes; Trials recognizes rejected changes by it.

        Changes are similar if all stages get the same algorithms, with the same bytes of buckets or
        chunks after rounding to powers of two.
        """
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
        """Description of this change for the user: new and old algorithm of the first changed stage.

        Example: "gradients of stage 1 hierarchically, in chunks of 4 MiB (were in one ring, in
        buckets of 25 MiB)". In a job with a single stage, "of stage 1" is left out.
        """
        stage = 0  # becomes the first stage that changes; a change always has such a stage
        while self.after[stage] == self.before[stage]:
            stage += 1
        of_stage = f" of stage {stage}" if len(self.after) > 1 else ""
        gradient_bytes = self.size  # small gradients are reduced in one ring by any algorithm
        after = reduction_text(self.after[stage], gradient_bytes)
        before = reduction_text(self.before[stage], gradient_bytes)
        return f"gradients{of_stage} {after} (were {before})"


class _ReductionKey(NamedTuple):
    """Description of a reduction algorithm that is equal for algorithms of similar speed.

    The size of a bucket or chunk is rounded to a power of two. ReductionChange.key consists of the
    keys of all stages.
    """

    is_hierarchical: bool
    across: CrossClusterAlgorithm | None
    log2_bytes: int  # of a chunk or a bucket


def is_hierarchical(reduction: ReductionSpec, size: float) -> bool:
    """Return whether gradients are summed hierarchically, and not in one ring.

    Args:
        reduction: How the stage sums gradients. Below its `hierarchical_from` bytes, one ring is
            used in any case.
        size: Bytes of gradients.
    """
    return bool(reduction.clusters) and size >= reduction.hierarchical_from


def reduction_text(reduction: ReductionSpec, size: float) -> str:
    """Return a description of how gradients are summed, such as "in one ring, in buckets of 25 MiB".

    Args:
        reduction: How the stage sums gradients.
        size: Bytes of gradients.
    """
    if not is_hierarchical(reduction, size):
        return f"in one ring, in buckets of {format_bytes(reduction.bucket_bytes)}"
    route = f" by {reduction.across.algorithm}" if reduction.across is not None else ""
    return f"hierarchically{route}, in chunks of {format_bytes(reduction.chunk_bytes)}"


def measured_networks(
    plan: Plan,
    network_api: str,
    options: Options,
    engine: EngineTraits,
    measured_stages: Sequence[MeasuredReductions],
) -> Plan:
    """Return a plan with network rates that are corrected by measured times of reductions.

    With the corrected rates, the predicted times of the gradient all-reduces equal the measured
    times. If reductions on a network took twice as long as predicted, its rate is halved. Networks
    without reductions keep their rates. If a network carries the reductions of several stages, the
    largest slowdown counts. The links between clusters (WAN) are slowed down like Ethernet, because
    traffic between clusters that share no faster network is measured as Ethernet traffic.

    Args:
        plan: The plan; its network rates give the predicted times of reductions.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        options: Options of the job.
        engine: Abilities of the training framework.
        measured_stages: Measurements of the reductions of each stage.
    """
    slowdown: dict[str, float] = {}  # network -> measured time / predicted time
    # The predicted times depend on the bytes of gradients, and these differ between stages.
    # Bytes of gradients -> Decisions: they predict the time of each algorithm for so many bytes.
    predicted_by_size = _decisions_by_size(plan, network_api, options, engine, measured_stages)
    for stage, measured_stage in enumerate(measured_stages):
        decided = predicted_by_size[measured_stage.size]
        for name, price in _networks_with_prices(decided, stage, measured_stage):
            # A Price is the predicted time of a reduction: a latency and seconds for each byte.
            # Only the latter depend on the network's rate, so the latency is taken off the measured
            # time.
            # busy: network -> duration of the reductions on it. byte_s: seconds for a byte.
            measured_s = measured_stage.busy.get(name, 0.0) - price.latency_s
            predicted_s = measured_stage.size * price.byte_s
            if measured_s > 0 and predicted_s > 0:
                slowdown[name] = max(slowdown.get(name, 0.0), measured_s / predicted_s)
    fabrics = []
    for fabric in plan.fabrics:
        rate_bps = round(fabric.rate_bps / slowdown.get(fabric.name, 1.0))
        fabrics.append(replace(fabric, rate_bps=max(1, rate_bps)))
    # The WAN gets the slowdown of Ethernet (see above).
    wan = plan.wan.scaled(1 / slowdown.get(ETHERNET, 1.0))
    return replace(plan, fabrics=tuple(fabrics), wan=wan)


def _networks_with_prices(
    decided: Decisions, stage: int, measured_stage: MeasuredReductions
) -> Iterator[tuple[str, Price]]:
    """Yield (network, predicted time on it) for the gradient all-reduces of a pipeline stage.

    A ring uses one network. A hierarchical all-reduce uses a network across clusters and others
    inside them. Across clusters, the time is predicted for the algorithm that the plan's rules choose.
    If the job has used another algorithm across clusters, measured and predicted times are not
    comparable, and nothing is yielded. Direct exchanges across clusters are an exception: their
    measured times are compared with the prediction for any algorithm.

    Args:
        decided: Predicts the time (Price: latency, and seconds for each byte) of each algorithm.
        stage: Number of the stage.
        measured_stage: Measurements of the stage, with the algorithm that it used.
    """
    # An entry for each family (data-parallel groups on equal networks): predicted times of one
    # ring (`flat`) and of a hierarchical all-reduce (`hierarchical`; None if that is not possible).
    groups = decided.prices.family_reductions(decided.placement, stage)
    for group in groups:
        if not measured_stage.hierarchical:
            network_of_ring = group.flat.load.fabric  # None: the group is inside a node
            if network_of_ring is not None:
                yield (
                    network_of_ring.name,
                    _ring_price(group, measured_stage.reduction, measured_stage.size),
                )
            continue
        predicted = group.hierarchical
        if predicted is None:
            continue
        used_across = measured_stage.reduction.across  # None: direct exchanges
        is_comparable = used_across is None or used_across == predicted.route
        if not is_comparable:
            continue
        # The latency depends on the number of chunks, so their real size is used.
        predicted = replace(predicted, chunk_bytes=measured_stage.reduction.chunk_bytes)
        network_across = predicted.reduce_across.fabric
        assert network_across is not None
        yield network_across.name, predicted.across
        for load in predicted.inside_loads:
            if load.fabric is not None:
                # Inside clusters: a reduce-scatter before, and an all-gather after.
                yield load.fabric.name, load.price.scaled(2)


def _ring_price(group: FamilyReductions, reduction: ReductionSpec, size: float) -> Price:
    """Return the predicted time of the ring all-reduces of all gradients, bucket by bucket.

    Args:
        group: Predicted times of the possible algorithms for a data-parallel group.
        reduction: The algorithm; only its bytes of a bucket are used.
        size: Bytes of all gradients of a rank.

    Returns:
        A Price: seconds of latency (once for each bucket), and seconds for each byte.
    """
    price = group.flat.once  # of a single all-reduce, as if all gradients were in one bucket
    bucket_count = max(1, ceil(size / reduction.bucket_bytes))
    return replace(price, latency_s=price.latency_s * bucket_count)


def _decisions_by_size(
    plan: Plan,
    network_api: str,
    options: Options,
    engine: EngineTraits,
    measured_stages: Sequence[MeasuredReductions],
) -> dict[float, Decisions]:
    """Return how gradients would be reduced best, for each size of gradients that a stage has.

    Stages hold different layers, so their gradients differ in size. But a plan has one size for
    all stages. So the rules by which the plan was made (decisions()) are applied once for each size.

    Args:
        plan: The plan; its network rates give the predicted times of reductions.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        options: Options of the job.
        engine: Abilities of the training framework.
        measured_stages: Measurements of each stage; only the bytes of gradients are used.

    Returns:
        Bytes of gradients of a stage -> Decisions: the best algorithm, and the predicted times of
        all algorithms (`prices`).
    """
    decided = {}
    for size in {measured_stage.size for measured_stage in measured_stages}:
        workload = replace(plan.workload, gradient_bytes=size)
        # `basis` is the source of a workload: here measurements. The rules decide otherwise for an
        # assumed model: a plan has such a model if the user has given no model.
        plan_for_size = replace(plan, workload=workload, basis=MEASURED)
        decided[size] = decisions(plan_for_size, network_api, options, engine)
    return decided


class _Choice(NamedTuple):
    """Algorithm chosen for the gradient reductions of a pipeline stage, and its predicted time."""

    reduction: ReductionSpec
    seconds: float  # of the reductions in a step: measured for the algorithm in use, else predicted


class ReductionEvaluator:
    """Changes of a running job's reduction algorithms: chosen, measured, and taken back if slower."""

    def __init__(self, network_api: str, options: Options, engine: EngineTraits):
        """Create an evaluator for a job that still has the algorithms of its plan.

        Args:
            network_api: VERBS if the data-parallel groups use NCCL, SOCKETS if they use gloo.
            options: Options of the job.
            engine: Abilities of the training framework.
        """
        self.network_api = network_api
        self.options = options
        self.engine = engine
        self.trials = Trials()

    def next(
        self, plan: Plan, measured_stages: Sequence[MeasuredReductions], step_s: float
    ) -> ReductionChange | None:
        """Judge the last change by the measured step time, and return the next change, or None.

        If the last change has not saved time, the next change takes it back. Otherwise each stage
        gets the algorithm that is fastest at the measured rates of the networks, if this is predicted
        to save at least LEAST_GAIN (2 %) of a step.

        Args:
            plan: Current plan of the job.
            measured_stages: Measurements of the reductions of each stage.
            step_s: Measured seconds of a step.
        """
        measured_plan = self._with_measured_networks(plan, measured_stages)
        current = tuple(measured_stage.reduction for measured_stage in measured_stages)
        size = max(measured_stage.size for measured_stage in measured_stages)
        rejected = self.trials.end(_times_without_reductions(measured_stages, step_s), step_s)
        if rejected is not None:
            return ReductionChange(
                before=current,
                after=rejected.before,
                size=size,
                now_s=step_s,
                then_s=rejected.now_s,
                takes_back=True,
            )
        # Bytes of gradients of a stage -> decisions, at the measured and at the planned rates.
        by_size = partial(
            _decisions_by_size,
            network_api=self.network_api,
            options=self.options,
            engine=self.engine,
            measured_stages=measured_stages,
        )
        decided_for = by_size(measured_plan)
        planned_for = by_size(plan)
        choices = []  # by stage
        for stage, measured_stage in enumerate(measured_stages):
            choice = self._fastest(
                decided=decided_for[measured_stage.size],
                planned=planned_for[measured_stage.size],
                stage=stage,
                measured_stage=measured_stage,
            )
            choices.append(choice)
        after = tuple(choice.reduction for choice in choices)
        if after == current:
            return None
        then_s = step_s - _saved_s(measured_stages, choices)
        change = ReductionChange(
            before=current, after=after, size=size, now_s=step_s, then_s=then_s
        )
        saves_enough = then_s <= step_s * (1 - LEAST_GAIN)
        times = _transfer_times(measured_plan, measured_stages)
        if not saves_enough or self.trials.was_rejected(change.key, times):
            return None
        return change

    def _fastest(
        self, decided: Decisions, planned: Decisions, stage: int, measured_stage: MeasuredReductions
    ) -> _Choice:
        """Return the algorithm for a stage's gradients: another algorithm if that should be faster.

        1. The candidate is the algorithm that the plan's rules choose at the measured network rates.
        2. A hierarchical candidate needs process groups inside the clusters. A running job cannot make
           new groups, so the candidate is rejected if it would use other networks inside the clusters
           than the existing groups.
        3. The candidate's predicted time must be shorter than the measured time of the algorithm in
           use.

        Args:
            decided: The rules applied at the measured rates of the networks: the candidate, and the
                predicted times (prices) of all algorithms.
            planned: The rules applied at the rates in the current plan. They have chosen the networks of
                the existing groups.
            stage: Number of the stage.
            measured_stage: Measurements of the algorithm in use.
        """
        size = measured_stage.size
        current = _Choice(measured_stage.reduction, measured_stage.seconds)
        # Overlap with the backward pass and compression stay as they are in the running job.
        reduction = decided.reduction(stage, overlap=current.reduction.overlap)
        reduction = replace(reduction, compress=current.reduction.compress)
        # An entry for each family (data-parallel groups on equal networks), with the predicted times
        # of the algorithms. All groups reduce at the same time, so the slowest group counts.
        groups = decided.prices.family_reductions(decided.placement, stage)
        if is_hierarchical(reduction, size):
            planned_groups = planned.prices.family_reductions(planned.placement, stage)
            needed_networks = [_networks_inside(group) for group in groups]
            existing_networks = [_networks_inside(group) for group in planned_groups]
            if needed_networks != existing_networks:
                return current
            # hierarchical.seconds(): predicted seconds of the whole hierarchical all-reduce.
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

    def taken(
        self, change: ReductionChange, plan: Plan, measured_stages: Sequence[MeasuredReductions]
    ) -> None:
        """Begin to measure the effect of a change that all ranks have voted to adopt ("taken").

        Called on rank 0 after the vote. The next call of next() judges the change by the step time:
        it keeps the change, or takes it back.

        Args:
            change: The change.
            plan: Plan before the change.
            measured_stages: Measurements of each stage from which the change was chosen.
        """
        # deciding_times: while they stay similar, a change that was taken back is not tried again.
        # unchanged_times: should not be affected by the change; if they differ later, they hide its
        # effect. self.trials keeps both until the trial ends.
        times = _transfer_times(
            self._with_measured_networks(plan, measured_stages), measured_stages
        )
        unchanged_times = _times_without_reductions(measured_stages, change.now_s)
        self.trials.begin(change, deciding_times=times, unchanged_times=unchanged_times)

    def _with_measured_networks(
        self, plan: Plan, measured_stages: Sequence[MeasuredReductions]
    ) -> Plan:
        return measured_networks(plan, self.network_api, self.options, self.engine, measured_stages)


def _saved_s(measured_stages: Sequence[MeasuredReductions], choices: Sequence[_Choice]) -> float:
    """Return the seconds by which other algorithms for the reductions would shorten a step.

    The step ends when the last stage has its gradients. A shorter reduction shortens the program's wait
    for it (exposed_s). The part of a reduction that overlaps the backward pass stays the same.

    Args:
        measured_stages: Measurements of the reductions of each stage.
        choices: The other algorithm of each stage, with its predicted time.
    """
    ends_now_s = []  # ends of the waits for reductions, by stage
    ends_then_s = []
    for measured_stage, choice in zip(measured_stages, choices):
        shorter_s = measured_stage.seconds - choice.seconds
        exposed_then_s = max(0.0, measured_stage.exposed_s - shorter_s)
        ends_now_s.append(measured_stage.end_s + measured_stage.exposed_s)
        ends_then_s.append(measured_stage.end_s + exposed_then_s)
    return max(ends_now_s) - max(ends_then_s)


def _networks_inside(group: FamilyReductions) -> list[str]:
    """Return the networks that a hierarchical all-reduce of a group uses inside the clusters.

    Args:
        group: Predicted times of the algorithms of a data-parallel group.

    Returns:
        Names of networks; [] if the group is inside a cluster and cannot reduce hierarchically.
    """
    if group.hierarchical is None:
        return []
    loads = group.hierarchical.inside_loads
    return [load.fabric.name for load in loads if load.fabric is not None]


def _times_without_reductions(
    measured_stages: Sequence[MeasuredReductions], step_s: float
) -> tuple[float]:
    """Return the seconds of a step without the longest wait for reductions, as a tuple.

    Another algorithm for the reductions should not change this time. It is a tuple of length 1 because
    differ() compares tuples of times.
    """
    return (step_s - max(measured_stage.exposed_s for measured_stage in measured_stages),)


def _transfer_times(plan: Plan, measured_stages: Sequence[MeasuredReductions]) -> tuple[float, ...]:
    """Return how long the largest gradients of a stage would take over each network, in seconds.

    These times change when a network becomes faster or slower.
    """
    size_bits = 8 * max(measured_stage.size for measured_stage in measured_stages)
    return tuple(size_bits / fabric.rate_bps for fabric in plan.fabrics)
