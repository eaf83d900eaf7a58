"""One round as the coordinator sees it, and whose pseudo-gradients count in it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.runtime.outer.coordinator.reports import CheckedReport, DoneReport, ReadyReport

#: Norms of so many rounds of a fragment say what is usual.
_USUAL_ROUNDS = 16


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
