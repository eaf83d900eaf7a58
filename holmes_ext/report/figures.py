"""What `holmes report` shows, worked out from the files of a run's telemetry."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from holmes_ext.report.files import RankFile, Run
from holmes_ext.units import union_s

#: Kind, fabric, "inside" or "across" clusters.
Key = tuple[str, str, str]
#: Rank, start, end, bytes.
Member = tuple[int, float, float, float]
#: What sends, the place whose spans may overlap, (start, end), bytes.
Send = tuple[Any, Any, tuple[float, float], float]


#: Part of its rate below which a network is slow: gloo's rings reach more.
SLOW = 0.25


@dataclass(frozen=True)
class GroupRow:
    """One kind of group on one fabric, inside a cluster or across: means of a step, on a rank that has such
    groups.

    Bytes, seconds, bits/s. busy_s: with an operation under way, waiting for others included; exposed_s: of it
    the program stood still; achieved_bps: bytes sent over the time in which all of the group's ranks were
    there (from the traced steps), 0 where it is not known; most_exposed: the rank that waited most.
    """

    kind: str
    fabric: str
    where: str
    ranks: int
    operations: float
    sent: float
    busy_s: float
    exposed_s: float
    achieved_bps: float
    configured_bps: float
    most_exposed: int


@dataclass(frozen=True)
class PairRow:
    """What goes from one cluster to another in a step: bytes of all ranks together, seconds that a rank which
    has a part in it is exposed (mean), bits/s while anything was under way (traced steps; 0: not known),
    bits/s and seconds there and back that the plan reckons with (0: no link of its own)."""

    source: str
    target: str
    sent: float
    exposed_s: float
    achieved_bps: float
    configured_bps: float
    round_trip_s: float


@dataclass(frozen=True)
class RankRow:
    """One rank: medians of a step's seconds, those that it waited for communication, and the rest."""

    rank: int
    node: str
    cluster: str
    step_s: float
    exposed_s: float
    own_s: float


@dataclass(frozen=True)
class JoinedRow:
    """Rounds with other jobs. counted: committed ones with this job in them; sent: bytes of all ranks in a
    round; seconds: from start to end, exposed_s: waited for, both the slowest rank's, medians; drift: of the
    last counted round, between this job's pseudo-gradient and the aggregate, None without another job."""

    rounds: int
    counted: int
    sent: float
    seconds: float
    exposed_s: float
    drift: float | None


@dataclass(frozen=True)
class PlanRow:
    """Micro-batches in flight, by stage (() for the engine's own), from a step on; predicted_s: of a step,
    None before the first change; step_s: median of its steps, without the first one; 0: it had no other."""

    step: int
    in_flight: tuple[int, ...]
    predicted_s: float | None
    steps: int
    step_s: float
    sums: str = ""  # what of the sums of gradients changed with it, in words

    @property
    def name(self) -> str:
        return self.sums or "+".join(map(str, self.in_flight)) or "the engine's own"


@dataclass(frozen=True)
class Summary:
    """step_s: median of the slowest rank's; spread: least and greatest; tokens_per_second 0: not known."""

    run: str
    world: int
    steps: int
    step_s: float
    spread: tuple[float, float]
    tokens_per_second: float
    rows: tuple[GroupRow, ...]
    pairs: tuple[PairRow, ...]
    ranks: tuple[RankRow, ...]
    joined: JoinedRow | None = None
    plans: tuple[PlanRow, ...] = ()

    @property
    def slowest(self) -> RankRow:
        """The rank whose own work takes longest: for it the others wait."""
        return max(self.ranks, key=lambda rank: (rank.own_s, -rank.rank))

    @property
    def slow_link(self) -> GroupRow | None:
        """The groups that lose most on a network that carries less than SLOW of its rate; None where a rank's
        own work, against the quickest rank's, costs as much."""
        late_s = self.slowest.own_s - min(rank.own_s for rank in self.ranks)
        slow = [row for row in self.rows if 0 < row.achieved_bps < SLOW * row.configured_bps]
        worst = max(slow, key=_lost_s, default=None)
        return worst if worst is not None and _lost_s(worst) > late_s else None


def _lost_s(row: GroupRow) -> float:
    """Of what is waited for, beyond what the network's rate would take."""
    return row.exposed_s * (1 - row.achieved_bps / row.configured_bps)


def summarize(run: Run) -> Summary:
    """The figures of all steps but the warm-up."""
    steps = run.steps
    seconds = run.took(steps)
    tokens = [max(row.steps[step].get("tokens", 0) for row in run.ranks) for step in steps]
    median = statistics.median(seconds)
    rate = statistics.median(tokens) / median if median > 0 else 0.0
    ranks = tuple(_rank_row(rank, steps) for rank in run.ranks)
    spread, joined = (min(seconds), max(seconds)), _joined(run)
    rows, pairs = _rows(run, steps), _pairs(run)
    return Summary(
        run.head["run"],
        run.head["world"],
        len(steps),
        median,
        spread,
        rate,
        rows,
        pairs,
        ranks,
        joined,
        _plans(run),
    )


def _plans(run: Run) -> tuple[PlanRow, ...]:
    changes = [change for rank in run.ranks for change in rank.plans]
    if not changes:
        return ()
    first = {"step": run.steps[0] - 1, "in_flight": changes[0]["before"], "then_s": None}
    rows, ends = [first, *changes], [change["step"] for change in changes]
    plans = []
    for row, end in zip(rows, [*ends, run.steps[-1] + 1]):
        steps = [step for step in run.steps if row["step"] < step < end]
        took = statistics.median(run.took(steps) or [0.0])
        plans.append(
            PlanRow(
                max(row["step"], 0),
                tuple(row["in_flight"]),
                row["then_s"],
                end - row["step"],
                took,
                row.get("sums", ""),
            )
        )
    return tuple(plans)


def _joined(run: Run) -> JoinedRow | None:
    if not (rounds := run.rounds):
        return None
    ends = [reports[0] for reports in rounds.values()]
    drifts = [end["drift"] for end in ends if isinstance(end.get("drift"), (int, float))]
    return JoinedRow(
        len(rounds),
        sum(end["verdict"] == "commit" for end in ends),
        statistics.median(
            sum(report["bytes"] for report in reports) for reports in rounds.values()
        ),
        statistics.median(
            max(report["seconds"] for report in reports) for reports in rounds.values()
        ),
        statistics.median(
            max(report["exposed"] for report in reports) for reports in rounds.values()
        ),
        drifts[-1] if drifts else None,
    )


def _rank_row(rank_file: RankFile, steps: list[int]) -> RankRow:
    of_steps = [rank_file.steps[step] for step in steps]
    whole = [step["end"] - step["begin"] for step in of_steps]
    exposed = [sum(row[7] for row in exposed_rows(step)) for step in of_steps]
    own_s = statistics.median(a - b for a, b in zip(whole, exposed))
    return RankRow(
        rank_file.rank,
        rank_file.node,
        rank_file.head["cluster"],
        statistics.median(whole),
        statistics.median(exposed),
        own_s,
    )


def exposed_rows(step: dict[str, Any]) -> list[list[Any]]:
    """The step's groups; what a GradientReducer's threads waited stands with the data groups across."""
    rows = [list(row) for row in step["groups"]]
    data = sorted((row for row in rows if row[0] == "data"), key=lambda row: row[2] != "across")
    if data and "exposed" in step.get("reduction", ()):
        data[0][7] += max(0.0, step["reduction"]["exposed"] - sum(row[7] for row in data))
    return rows


def _rows(run: Run, steps: list[int]) -> tuple[GroupRow, ...]:
    sums: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * 4))
    for rank_file in run.ranks:
        for step in steps:
            for kind, fabric, where, operations, _, *values in exposed_rows(rank_file.steps[step]):
                total = sums[kind, fabric, where][rank_file.rank]
                total[:] = map(sum, zip(total, (operations, *values)))
    rates = achieved(run)
    rows = []
    for key, by_rank in sums.items():
        operations, sent, busy, exposed = (
            sum(of) / len(by_rank) / len(steps) for of in zip(*by_rank.values())
        )
        configured = run.head["fabrics"].get(key[1], ["", 0])[1]
        most = max(by_rank, key=lambda rank: (by_rank[rank][3], -rank))
        means = (operations, sent, busy, exposed)
        rows.append(GroupRow(*key, len(by_rank), *means, rates.get(key, 0.0), configured, most))
    return tuple(sorted(rows, key=lambda row: -row.exposed_s))


def _pairs(run: Run) -> tuple[PairRow, ...]:
    sent: dict[tuple[str, str], float] = defaultdict(float)
    exposed: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank in run.ranks:
        for step in run.steps:
            for first, second, size, waited in rank.steps[step].get("between", ()):
                sent[first, second] += size / len(run.steps)
                exposed[first, second][rank.rank] += waited / len(run.steps)
    links = {
        (source, target): (rate, latency)
        for source, target, rate, latency in run.head.get("between", ())
    }
    rates, rows = _achieved_between(run), []
    for pair, size in sent.items():
        rate, latency = links.get(pair, (0.0, 0.0))
        back = links.get(pair[::-1], (0.0, latency))[1]
        mean = statistics.mean(exposed[pair].values())
        rows.append(PairRow(*pair, size, mean, rates.get(pair, 0.0), rate, latency + back))
    return tuple(sorted(rows, key=lambda row: -row.exposed_s))


def _achieved_between(run: Run) -> dict[tuple[str, str], float]:
    """Bits/s from cluster to cluster while anything that goes there is under way on any rank."""
    cluster = {rank_file.rank: rank_file.head["cluster"] for rank_file in run.ranks}
    sends: list[Send] = []
    for step in run.traced():
        for members in _matched(run, step).values():
            span, ring = _all_there(members), sorted(members)
            for (rank, _, _, size), (following, *_) in zip(ring, (*ring[1:], ring[0])):
                pair = cluster[rank], cluster[following]
                if pair[0] != pair[1]:
                    sends.append((pair, step, span, size))
    return _rates(sends)


def achieved(run: Run) -> dict[Key, float]:
    """Bits/s that a rank sends from the latest start to the latest end of its operations' members
    (overlapping ones once). Empty without traced steps."""
    cluster = {rank_file.rank: rank_file.head["cluster"] for rank_file in run.ranks}
    sends: list[Send] = []
    for step in run.traced():
        for (kind, fabric, *_), members in _matched(run, step).items():
            span = _all_there(members)
            where = "across" if len({cluster[rank] for rank, *_ in members}) > 1 else "inside"
            sends += [
                ((kind, fabric, where), (rank, step), span, size) for rank, _, _, size in members
            ]
    return _rates(sends)


def _all_there(members: list[Member]) -> tuple[float, float]:
    """From the latest start to the latest end of an operation."""
    return max(start for _, start, _, _ in members), max(end for _, _, end, _ in members)


def _rates(sends: list[Send]) -> dict[Any, float]:
    """Bits/s by what sends; spans of one place that overlap count once."""
    spans: dict[Any, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    sent: dict[Any, float] = defaultdict(float)
    for sender, place, (start, end), size in sends:
        if size and end > start:
            spans[sender][place].append((start, end))
            sent[sender] += size
    seconds = {sender: sum(map(union_s, of.values())) for sender, of in spans.items()}
    return {sender: sent[sender] * 8 / total for sender, total in seconds.items() if total > 0}


def _matched(run: Run, step: int) -> dict[tuple, list[Member]]:
    """By (kind, fabric, group, operation, number, its ends); complete ones only."""
    operations: dict[tuple, list[Member]] = defaultdict(list)
    for rank in run.ranks:
        offset = run.offset(rank)
        for kind, fabric, name, group, number, peer, start, end, _, size in rank.steps[step]["ops"]:
            if end:
                ends = (
                    None
                    if peer is None
                    else (rank.rank, peer)
                    if name == "send"
                    else (peer, rank.rank)
                )
                key = (kind, fabric, group, "message" if ends else name, number, ends)
                operations[key].append((rank.rank, start + offset, end + offset, size))
    return {key: members for key, members in operations.items() if len(members) > 1}
