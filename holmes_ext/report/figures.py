"""Computes the figures of `holmes report` from the telemetry of a run.

The option --holmes-telemetry writes a file for each rank with a line for each step (report/files.py reads
these files). The figures are step times, and for every kind of process group (data, pipeline, ...) on every
fabric the bytes that were sent, the rate that was achieved, and the exposed seconds: the program waited for
communication.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holmes_ext.report.files import RankFile, Run
from holmes_ext.units import union_s

#: Groups of a step: (kind, fabric, "inside" or "across" clusters).
Key = tuple[str, str, str]

#: A network is slow if it carries less than this share of its configured rate. Rings of gloo reach more.
SLOW = 0.25
#: Position of the exposed seconds in a row of a step's "groups" (all columns: exposed_rows()).
_EXPOSED = 7
_KIND, _WHERE = 0, 2  # positions of the kind of group, and of "inside" or "across", in such a row


class _Participant(NamedTuple):
    """Part that a rank takes in an operation: its start and end, on rank 0's clock."""

    rank: int
    start: float
    end: float
    sent_bytes: float


class _Send(NamedTuple):
    """Bytes that were sent in an interval of time."""

    sender: Any  # the rate is computed for it, e.g. a pair of clusters
    timeline: Hashable  # overlapping intervals of the same timeline count once
    interval: tuple[float, float]  # start and end, in seconds
    sent_bytes: float


class _OperationKey(NamedTuple):
    """Identity of an operation, the same on all ranks that take part."""

    kind: str
    fabric: str
    group: str
    name: str  # "message" for a send and its receive
    number: int
    ends: tuple[int, int] | None  # sender and receiver of a message


@dataclass(frozen=True)
class GroupRow:
    """Traffic, times and rates of the process groups of one kind on one fabric, as means."""

    kind: str
    fabric: str
    where: str  # "inside" a cluster or "across" clusters
    ranks: int  # with such groups. The next values are means over these ranks and all steps
    operations: float  # per step
    sent: float  # bytes per step
    busy_s: float  # seconds per step with an operation under way, including waits for other ranks
    exposed_s: float  # seconds per step that the program stood still
    #: Bits/s while all ranks of an operation took part (from the traced steps); 0 if unknown.
    achieved_bps: float
    configured_bps: float
    most_exposed: int  # the rank with the most exposed seconds


@dataclass(frozen=True)
class PairRow:
    """Traffic from one cluster to another: means over all steps."""

    source: str
    target: str
    sent: float  # bytes of all ranks together, per step
    exposed_s: float  # mean over the ranks that take part, seconds per step
    achieved_bps: float  # while anything was under way (from the traced steps); 0 if unknown
    configured_bps: float  # as the plan assumes; 0 if the clusters have no link of their own
    round_trip_s: float  # as the plan assumes


@dataclass(frozen=True)
class RankRow:
    """Duration of a step on one rank, and its two parts: medians over all steps, in seconds."""

    rank: int
    node: str
    cluster: str
    step_s: float
    exposed_s: float  # while the program waited for communication
    own_s: float  # the rest of the step


@dataclass(frozen=True)
class JoinedRow:
    """Medians over a job's outer rounds, in which joined jobs exchange pseudo-gradients."""

    rounds: int
    counted: int  # committed rounds in which this job took part
    sent: float  # bytes of all ranks together
    seconds: float  # from start to end, on the slowest rank
    exposed_s: float  # while the slowest rank waited
    #: Difference between this job's pseudo-gradient and the aggregate, in the last counted round. None if no
    #: other job took part.
    drift: float | None


@dataclass(frozen=True)
class PlanRow:
    """A plan that was used for some of the steps."""

    step: int  # the first step with the plan
    in_flight: tuple[int, ...]  # micro-batches of each stage; () for the engine's own schedule
    predicted_s: float | None  # seconds of a step; None before the first change
    steps: int
    step_s: float  # median of its steps without the first; 0 if there is no other
    sums: str = ""  # how the reductions of gradients changed with it, in words

    @property
    def name(self) -> str:
        """The plan in words: its ways to reduce gradients, or micro-batches in flight such as "3+1"."""
        return self.sums or "+".join(map(str, self.in_flight)) or "the engine's own"


@dataclass(frozen=True)
class Summary:
    """Figures of a run, over all steps after the warm-up."""

    run: str
    world: int
    steps: int
    step_s: float  # median, on the slowest rank of each step
    spread: tuple[float, float]  # shortest and longest step, in seconds
    tokens_per_second: float  # 0 if unknown
    rows: tuple[GroupRow, ...]  # the most exposed first
    pairs: tuple[PairRow, ...]  # the most exposed first
    ranks: tuple[RankRow, ...]
    joined: JoinedRow | None = None
    plans: tuple[PlanRow, ...] = ()

    @property
    def slowest(self) -> RankRow:
        """The rank whose own work takes longest, so that other ranks wait for it."""
        return max(self.ranks, key=lambda rank: (rank.own_s, -rank.rank))

    @property
    def slow_link(self) -> GroupRow | None:
        """The groups that lose most time on a slow network, which carries less than SLOW of its rate.

        None if there is no slow network, or if the slowest rank's own work costs more time.
        """
        late_s = self.slowest.own_s - min(rank.own_s for rank in self.ranks)
        slow = [row for row in self.rows if 0 < row.achieved_bps < SLOW * row.configured_bps]
        worst = max(slow, key=_lost_s, default=None)
        if worst is None or _lost_s(worst) <= late_s:
            return None
        return worst


def _lost_s(row: GroupRow) -> float:
    """Return the exposed seconds that the network would not have cost at its configured rate."""
    return row.exposed_s * (1 - row.achieved_bps / row.configured_bps)


def summarize(run: Run) -> Summary:
    """Return the figures of `holmes report` for a run, from the telemetry of all ranks."""
    steps = run.steps  # without the warm-up
    seconds = run.took(steps)  # of each step, on its slowest rank
    # Not every rank knows the tokens of a step; the others have 0 or nothing.
    tokens = [max(rank.steps[step].get("tokens", 0) for rank in run.ranks) for step in steps]
    median_s = statistics.median(seconds)
    tokens_per_second = statistics.median(tokens) / median_s if median_s > 0 else 0.0
    return Summary(
        run=run.head["run"],
        world=run.head["world"],
        steps=len(steps),
        step_s=median_s,
        spread=(min(seconds), max(seconds)),
        tokens_per_second=tokens_per_second,
        rows=_group_rows(run, steps),
        pairs=_pair_rows(run),
        ranks=tuple(_rank_row(rank, steps) for rank in run.ranks),
        joined=_joined_row(run),
        plans=_plan_rows(run),
    )


def _plan_rows(run: Run) -> tuple[PlanRow, ...]:
    """Return the plans that a run used, in order, each with the steps that it was used for.

    A running job may change its plan (--holmes-adapt). The result is empty if the plan never changed.
    """
    # Only rank 0 records the changes in its file, so there are no duplicates.
    changes = [change for rank in run.ranks for change in rank.plans]
    if not changes:
        return ()
    # The plan at the start has no line. Its "step" is the step before the first, because the "step" of a plan
    # is not timed (see below). then_s, the predicted time, is not known.
    first = {"step": run.steps[0] - 1, "in_flight": changes[0]["before"], "then_s": None}
    plans = [first, *changes]
    # A plan is used from its "step" until that of the next plan.
    ends = [*(change["step"] for change in changes), run.steps[-1] + 1]
    rows = []
    for plan, end in zip(plans, ends):
        # The step of the change itself belongs to the plan, but it also contains the time of the change. So
        # it counts in the number of steps, but not in their median time.
        timed_steps = [step for step in run.steps if plan["step"] < step < end]
        row = PlanRow(
            step=max(plan["step"], 0),  # -1 is shown as 0
            in_flight=tuple(plan["in_flight"]),
            predicted_s=plan["then_s"],
            steps=end - plan["step"],
            step_s=statistics.median(run.took(timed_steps) or [0.0]),
            sums=plan.get("sums", ""),  # new algorithm of gradient reductions, in words
        )
        rows.append(row)
    return tuple(rows)


def _joined_row(run: Run) -> JoinedRow | None:
    """Return the figures of a run's outer rounds; None if it had none.

    Several jobs may train one model together (--holmes-join). At intervals of several steps they exchange
    pseudo-gradients in an outer round, as in DiLoCo. The drift of a round is the distance of this job's
    pseudo-gradient from the aggregate of all jobs, as a share of the aggregate's norm.
    """
    rounds = list(run.rounds.values())  # of each round the figures of each rank
    if not rounds:
        return None
    # All ranks have the same verdict and drift, so the first rank's are taken. With the verdict "commit" a
    # round counts: all jobs apply its aggregate.
    first_reports = [reports[0] for reports in rounds]
    drifts = []
    for report in first_reports:
        drift = report.get("drift")
        if isinstance(drift, (int, float)):  # absent or null if no other job took part
            drifts.append(drift)
    return JoinedRow(
        rounds=len(rounds),
        counted=sum(report["verdict"] == "commit" for report in first_reports),
        sent=statistics.median(sum(report["bytes"] for report in reports) for reports in rounds),
        seconds=statistics.median(
            max(report["seconds"] for report in reports) for reports in rounds
        ),
        exposed_s=statistics.median(
            max(report["exposed"] for report in reports) for reports in rounds
        ),
        drift=drifts[-1] if drifts else None,  # of the last round with a drift
    )


def _rank_row(rank_file: RankFile, steps: list[int]) -> RankRow:
    """Compute the row of a rank: medians over the training steps with the numbers `steps`."""
    step_times = []
    exposed_times = []
    own_times = []
    for step in steps:
        line = rank_file.steps[step]
        step_s = line["end"] - line["begin"]
        exposed_s = sum(row[_EXPOSED] for row in exposed_rows(line))
        step_times.append(step_s)
        exposed_times.append(exposed_s)
        own_times.append(step_s - exposed_s)
    return RankRow(
        rank=rank_file.rank,
        node=rank_file.node,
        cluster=rank_file.head["cluster"],
        step_s=statistics.median(step_times),
        exposed_s=statistics.median(exposed_times),
        own_s=statistics.median(own_times),
    )


def exposed_rows(step: dict[str, Any]) -> list[list[Any]]:
    """Return the "groups" of a step, with the seconds that the program waited for gradients.

    A GradientReducer runs all-reduces in threads, so their rows have no exposed seconds. The step has the
    wait for the reducer as a single number for all groups. The part of it that exceeds the exposed seconds of
    the data-parallel rows cannot be divided among them. It is added to one row: if possible to that for
    groups "across" clusters, which are the slowest.

    Args:
        step: Line of a step in the telemetry of one rank.

    Returns:
        Copies of the rows: [kind of group, fabric, "inside" or "across" clusters, operations,
        payload bytes, bytes sent, busy seconds, exposed seconds].
    """
    rows = [list(row) for row in step["groups"]]
    data_rows = [row for row in rows if row[_KIND] == "data"]
    data_rows.sort(key=lambda row: row[_WHERE] != "across")  # groups across clusters come first
    if data_rows and "exposed" in step.get("reduction", ()):
        waited_for_reducer_s = step["reduction"]["exposed"]
        recorded_s = sum(row[_EXPOSED] for row in data_rows)
        data_rows[0][_EXPOSED] += max(0.0, waited_for_reducer_s - recorded_s)
    return rows


class _Sums(NamedTuple):
    """Communication of a rank in groups of one kind, added up over the steps."""

    operations: float = 0.0
    sent_bytes: float = 0.0
    busy_s: float = 0.0
    exposed_s: float = 0.0


def _group_rows(run: Run, steps: list[int]) -> tuple[GroupRow, ...]:
    """Compute the row of each kind of process group on each fabric, the most exposed first.

    Args:
        run: Telemetry of all ranks.
        steps: Numbers of the steps that count.
    """
    sums_of: dict[Key, dict[int, _Sums]] = defaultdict(dict)  # groups -> rank -> sums
    for rank_file in run.ranks:
        rank = rank_file.rank
        for step in steps:
            for row in exposed_rows(rank_file.steps[step]):
                kind, fabric, where, operations, _payload, sent_bytes, busy_s, exposed_s = row
                rank_sums = sums_of[kind, fabric, where]
                old = rank_sums.get(rank, _Sums())
                rank_sums[rank] = _Sums(
                    operations=old.operations + operations,
                    sent_bytes=old.sent_bytes + sent_bytes,
                    busy_s=old.busy_s + busy_s,
                    exposed_s=old.exposed_s + exposed_s,
                )
    rates_bps = achieved(run)
    rows = []
    for key, rank_sums in sums_of.items():
        kind, fabric, where = key
        # Per step, and over the ranks that have such groups.
        means = _Sums(
            *(sum(values) / len(rank_sums) / len(steps) for values in zip(*rank_sums.values()))
        )
        _, configured_bps = run.head["fabrics"].get(fabric, ["", 0])
        # The lower rank, if two have the same exposed time.
        most_exposed = max(rank_sums, key=lambda rank: (rank_sums[rank].exposed_s, -rank))
        group_row = GroupRow(
            kind=kind,
            fabric=fabric,
            where=where,
            ranks=len(rank_sums),
            operations=means.operations,
            sent=means.sent_bytes,
            busy_s=means.busy_s,
            exposed_s=means.exposed_s,
            achieved_bps=rates_bps.get(key, 0.0),
            configured_bps=configured_bps,
            most_exposed=most_exposed,
        )
        rows.append(group_row)
    return tuple(sorted(rows, key=lambda row: -row.exposed_s))


def _pair_rows(run: Run) -> tuple[PairRow, ...]:
    """Compute the traffic from each cluster to each other cluster, the most exposed pair first.

    Bytes are added over the ranks, which share the link. Exposed seconds are averaged over the
    ranks that use the link, because these wait at the same time.
    """
    sent_of: dict[tuple[str, str], float] = defaultdict(float)  # (from, to) -> bytes per step
    # (from, to) -> rank -> seconds per step
    exposed_of: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank in run.ranks:
        for step in run.steps:
            # "between" of a step: [sending cluster, receiving cluster, bytes sent, exposed
            # seconds].
            for source, target, sent_bytes, exposed_s in rank.steps[step].get("between", ()):
                sent_of[source, target] += sent_bytes / len(run.steps)
                exposed_of[source, target][rank.rank] += exposed_s / len(run.steps)
    # (from, to) -> rate and latency that the plan assumes.
    links = {
        (source, target): (rate_bps, latency_s)
        for source, target, rate_bps, latency_s in run.head.get("between", ())
    }
    rates_bps = _achieved_between_clusters(run)
    rows = []
    for (source, target), sent_bytes in sent_of.items():
        rate_bps, latency_s = links.get((source, target), (0.0, 0.0))
        _, latency_back_s = links.get((target, source), (0.0, latency_s))
        row = PairRow(
            source=source,
            target=target,
            sent=sent_bytes,
            exposed_s=statistics.mean(exposed_of[source, target].values()),
            achieved_bps=rates_bps.get((source, target), 0.0),
            configured_bps=rate_bps,
            round_trip_s=latency_s + latency_back_s,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.exposed_s))


def _achieved_between_clusters(run: Run) -> dict[tuple[str, str], float]:
    """Return the achieved rate from each cluster to each other cluster, in bits/s.

    The rate is the bytes sent between the two clusters, divided by the time while an operation between them
    is under way on any rank. Only traced steps count. A collective counts as a ring in the order of the
    ranks: each rank sends to the next.
    """
    cluster_of = {rank_file.rank: rank_file.head["cluster"] for rank_file in run.ranks}
    sends: list[_Send] = []
    for step in run.traced():
        for participants in _operations_with_ranks(run, step).values():
            interval = _interval_of_operation(participants)
            ring = sorted(participants)
            for sender, receiver in zip(ring, [*ring[1:], ring[0]]):
                pair = (cluster_of[sender.rank], cluster_of[receiver.rank])
                if pair[0] != pair[1]:
                    sends.append(_Send(pair, step, interval, sender.sent_bytes))
    return _rate_of_each_sender(sends)


def achieved(run: Run) -> dict[Key, float]:
    """Return the achieved rate of each kind of group on each fabric, in bits/s.

    The keys are (kind of group, fabric, "inside" or "across" clusters). The rate is the bytes that
    were sent, divided by the seconds of the operations. An operation counts from the moment when
    its last rank has joined. Only traced steps count: each rank lists the operations of these. If
    operations of a rank overlap, their common time counts once.
    """
    cluster_of = {rank_file.rank: rank_file.head["cluster"] for rank_file in run.ranks}
    sends: list[_Send] = []
    for step in run.traced():
        for operation, participants in _operations_with_ranks(run, step).items():
            clusters = {cluster_of[participant.rank] for participant in participants}
            where = "across" if len(clusters) > 1 else "inside"
            key = (operation.kind, operation.fabric, where)
            interval = _interval_of_operation(participants)
            for participant in participants:
                timeline = (participant.rank, step)
                sends.append(_Send(key, timeline, interval, participant.sent_bytes))
    return _rate_of_each_sender(sends)


def _interval_of_operation(participants: Sequence[_Participant]) -> tuple[float, float]:
    """Return the interval of an operation: from the latest start to the latest end of its ranks."""
    start = max(participant.start for participant in participants)
    end = max(participant.end for participant in participants)
    return start, end


def _rate_of_each_sender(sends: list[_Send]) -> dict[Any, float]:
    """Return sender -> rate in bits/s: bytes of all its sends, divided by the seconds they took.

    A sender may have several timelines, such as one for each step. Their seconds are added.
    Overlapping sends of one timeline count once.
    """
    # sender -> timeline -> intervals
    intervals_of: dict[Any, dict[Hashable, list[tuple[float, float]]]]
    intervals_of = defaultdict(lambda: defaultdict(list))
    sent_bytes_of: dict[Any, float] = defaultdict(float)
    for send in sends:
        start, end = send.interval
        if send.sent_bytes and end > start:
            intervals_of[send.sender][send.timeline].append(send.interval)
            sent_bytes_of[send.sender] += send.sent_bytes
    rates_bps = {}
    for sender, timelines in intervals_of.items():
        seconds = sum(union_s(intervals) for intervals in timelines.values())
        if seconds > 0:
            rates_bps[sender] = sent_bytes_of[sender] * 8 / seconds
    return rates_bps


def _operations_with_ranks(run: Run, step: int) -> dict[_OperationKey, list[_Participant]]:
    """Return the operations of a traced step with the ranks that took part, at least two of each.

    A rank whose part was not over when the step ended is left out. Times are on rank 0's clock.

    Args:
        run: Telemetry of all ranks.
        step: Number of a traced step.
    """
    operations: dict[_OperationKey, list[_Participant]] = defaultdict(list)
    for rank_file in run.ranks:
        rank = rank_file.rank
        offset = run.offset(rank_file)  # from the clock of the rank's node to rank 0's
        for row in rank_file.steps[step]["ops"]:
            kind, fabric, name, group, number, peer, start, end, _waited, sent_bytes = row
            if not end:  # 0: not over when the step ended
                continue
            # A send and its receive are a single operation, with the same (sender, receiver) on both ranks.
            ends = None
            if peer is not None:
                ends = (rank, peer) if name == "send" else (peer, rank)
                name = "message"
            key = _OperationKey(kind, fabric, group, name, number, ends)
            operations[key].append(_Participant(rank, start + offset, end + offset, sent_bytes))
    return {key: participants for key, participants in operations.items() if len(participants) > 1}
