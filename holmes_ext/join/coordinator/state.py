"""What the coordinator knows of one job and of one round: how two jobs differ, whose pseudo-gradients count.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.join.coordinator.reports import CheckedReport, Claim, DoneReport, Hello, ReadyReport

#: Seconds between two heartbeats of a job.
HEARTBEAT_S = 2.0
#: Norms of so many rounds of a fragment say what is usual.
_USUAL_ROUNDS = 16


@dataclass
class Member:
    """One job. incarnation: this start of it; order: in which jobs came; state: "waiting" (for others, at its
    start), "in", "late" (not waited for until heard again), "gone"."""

    name: str
    incarnation: str
    hello: Hello
    claims: list[Claim]
    order: int
    since: float
    heard: float
    state: str = "waiting"
    # It has been in every round since it last had what most have: its claims count.
    current: bool = False
    # The first round in which it is waited for.
    expected_from: int = 0
    # The round whose end it waits for, to take what it is behind, and since when.
    awaits: int | None = None
    awaits_from: float = 0.0
    # It was told what to take from another job.
    corrected: bool = False
    # Jobs that gave it other weights than they said, by fragment what it took and from whom.
    avoids: set[str] = field(default_factory=set)
    took: dict[int, str] = field(default_factory=dict)
    rounds: int = 0
    missed: int = 0
    # Rounds in a row in which the others waited for it in vain; the first one that it may be in again.
    in_vain: int = 0
    rests_until: int = 0
    lag_s: float = 0.0
    telemetry: dict[str, float] = field(default_factory=dict)
    # When another incarnation asked for its name first.
    rivals: dict[str, float] = field(default_factory=dict)

    @property
    def here(self) -> bool:
        return self.state in ("in", "late")


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    """What a new job has otherwise than `name`, key by key (of documents one deeper too); "": nothing."""
    differences = []
    for key in sorted({*ours, *theirs}):
        here, there = ours.get(key), theirs.get(key)
        if here == there:
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            parts = [part for part in sorted({*here, *there}) if here.get(part) != there.get(part)]
            differences += [
                f"{key} {part} ({_short(here, part)} here, {_short(there, part)} in {name})" for part in parts
            ]
        else:
            differences.append(f"{key} ({here!r:.80} here, {there!r:.80} in {name})")
    more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
    return ", ".join(differences[:4]) + more


def _short(table: Mapping[str, Any], key: str) -> str:
    return str(table.get(key, "none"))[:200]


@dataclass
class RoundState:
    """ready, done, checked: reports by job; of the last two those of the attempt and check in progress."""

    number: int
    fragment: int
    opened: float
    ready: dict[str, ReadyReport] = field(default_factory=dict)
    # When half of the jobs that are waited for were ready.
    half_ready: float | None = None
    # How often its exchange was begun; 0: not yet.
    attempt: int = 0
    members: dict[str, float] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    done: dict[str, DoneReport] = field(default_factory=dict)
    # How often what came was compared; 0: not yet. excluded: whose contribution does not count in it, and
    # why.
    check: int = 0
    excluded: dict[str, str] = field(default_factory=dict)
    checked: dict[str, CheckedReport] = field(default_factory=dict)
    last_report: float = 0.0
    outcome: str = ""
    # Of rounds=async: members that know that it is void.
    heard: set[str] = field(default_factory=set)
    why: str = ""
    factors: dict[str, float] = field(default_factory=dict)
    gap: float = 1.0


def counted(
    known: RoundState, ranks: Mapping[str, int], settings: Mapping[str, Any], usual: list[float]
) -> dict[str, float]:
    """Tokens (or 1) of the jobs whose pseudo-gradients count: finite, and neither they nor their tokens out
    of all proportion (`limit`).

    ranks: of each job that could take part; usual: lengths in the fragment's last rounds, to which these are
    added. Who is left out stands in known.left_out, with the reason.
    """
    reports = {name: known.ready[name] for name in ranks}
    norms = {name: report.norm for name, report in reports.items() if report.norm is not None}
    known.left_out = {name: report.why or "its pseudo-gradient is not finite"
                      for name, report in reports.items() if report.norm is None}  # fmt: skip
    limit = float(settings.get("limit", 0))
    typical = [*usual] or [norm for norm in norms.values() if len(norms) > 2]
    middle = statistics.median(typical) if typical else 0.0
    far = [name for name, norm in norms.items() if limit and middle and norm > limit * middle]
    for name in far if len(far) < len(norms) else ():  # all of them: it is the training, not a job
        times = norms.pop(name) / middle
        known.left_out[name] = f"its pseudo-gradient is {times:.3g} times as long as usual (limit={limit:g})"
    usual += norms.values()
    del usual[:-_USUAL_ROUNDS]
    if settings.get("weight") == "equal":
        return dict.fromkeys(norms, 1.0)
    tokens = {name: reports[name].tokens or 1.0 for name in norms}
    return _believed(known, tokens, ranks, limit)


def _believed(
    known: RoundState, tokens: dict[str, float], ranks: Mapping[str, int], limit: float
) -> dict[str, float]:
    """Tokens a rank are alike in jobs of one model: who claims `limit` times the others' is left out, and
    none counts as more than `limit` times the median job."""
    if not limit or len(tokens) < 3:
        return tokens
    each = {name: count / ranks[name] for name, count in tokens.items()}
    middle = statistics.median_low(each.values())
    for name, count in each.items():
        if count > limit * middle:
            del tokens[name]
            times = f"{count / middle:.3g} times the others' tokens for each rank (limit={limit:g})"
            known.left_out[name] = f"it claims {times}"
    most = limit * statistics.median_low(tokens.values())
    return {name: min(count, most) for name, count in tokens.items()}
