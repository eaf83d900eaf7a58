"""One round as the coordinator sees it, and whose pseudo-gradients count in it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Norms of so many rounds of a fragment say what is usual.
_USUAL_ROUNDS = 16


@dataclass
class RoundState:
    """ready, done: reports by job; of `done` those of the attempt under way."""

    number: int
    opened: float
    ready: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    attempt: int = 0
    members: dict[str, float] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    reference: str = ""  # whose fragment those who are behind take
    left_out: dict[str, str] = field(default_factory=dict)
    done: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    last_done: float = 0.0
    outcome: str = ""
    why: str = ""
    factors: Any = None


def counted(
    known: RoundState, able: Sequence[str], settings: Mapping[str, Any], usual: list[float]
) -> dict[str, float]:
    """Tokens (or 1) of the jobs whose pseudo-gradients count: finite, and not `limit` times longer than usual.

    able: jobs that could take part; usual: lengths in the fragment's last rounds, to which these are added. Who is left
    out stands in known.left_out, with the reason.
    """
    norms = {name: known.ready[name]["norm"] for name in able}
    finite = {name: norm for name, norm in norms.items() if norm is not None}
    lost = (name for name in norms if name not in finite)
    known.left_out = {
        name: known.ready[name].get("why") or "its pseudo-gradient is not finite" for name in lost
    }
    limit = float(settings.get("limit", 0))
    typical = [*usual] or [norm for norm in finite.values() if len(finite) > 2]
    middle = statistics.median(typical) if typical else 0.0
    far = [name for name, norm in finite.items() if limit and middle and norm > limit * middle]
    for name in far if len(far) < len(finite) else ():  # all of them: it is the training, not a job
        times = finite.pop(name) / middle
        known.left_out[name] = f"its pseudo-gradient is {times:.3g} times as long as usual (limit={limit:g})"
    usual += finite.values()
    del usual[:-_USUAL_ROUNDS]
    equal = settings.get("weight") == "equal"
    return {name: 1.0 if equal else float(known.ready[name]["tokens"]) or 1.0 for name in finite}
