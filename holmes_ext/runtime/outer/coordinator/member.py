"""What the coordinator knows of one job, and how two jobs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.runtime.outer.coordinator.reports import Claim, Hello

#: Seconds between two heartbeats of a job.
HEARTBEAT_S = 2.0


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

    def known_by_name(self, incarnation: str) -> bool:
        """Whether it is this start of the job, and not gone."""
        return self.incarnation == incarnation and self.state != "gone"


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
