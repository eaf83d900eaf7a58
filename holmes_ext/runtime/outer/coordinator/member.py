"""What the coordinator knows of one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.errors import HolmesError

#: Seconds between two heartbeats of a job.
HEARTBEAT_S = 2.0
#: A fragment: the round in which it was last stepped, and the checksum of what it was then (None: not told yet).
State = tuple[int, int | None]


@dataclass
class Member:
    """One job. incarnation: this start of it. agreed: what must be the same in all jobs. maps: by
    position, who exchanges what. fragments: of its anchors.

    state: "waiting" (for others, at its start), "in", "late" (not waited for until it is heard again), "gone".
    expected_from: the first round in which it is waited for; awaits: the round whose end it waits for, to take what it
    is behind, since awaits_from. claims: when another incarnation asked for its name first.
    """

    name: str
    incarnation: str
    agreed: dict[str, Any]
    maps: dict[str, Any]
    addresses: list[str]
    fragments: list[State]
    least: int
    timeout_s: float
    order: int
    since: float
    heard: float
    state: str = "waiting"
    expected_from: int = 0
    awaits: int | None = None
    awaits_from: float = 0.0
    rounds: int = 0
    missed: int = 0
    lag_s: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, float] = field(default_factory=dict)

    @property
    def here(self) -> bool:
        return self.state in ("in", "late")


def member_from(document: Mapping[str, Any], order: int, now: float) -> Member:
    """Of a hello; HolmesError when something is missing."""
    try:
        return Member(
            name=str(document["job"]),
            incarnation=str(document["incarnation"]),
            agreed=dict(document["agreed"]),
            maps=dict(document["maps"]),
            addresses=[str(one) for one in document["addresses"]],
            fragments=states(document["fragments"]),
            least=int(document["min"]),
            timeout_s=float(document["timeout"]),
            order=order,
            since=now,
            heard=now,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HolmesError(
            f"the hello of a job cannot be read ({type(error).__name__}: {error}); is it the same version of"
            " holmes_ext?"
        ) from None


def states(told: Any) -> list[State]:
    """Of a hello or a report."""
    return [(int(version), None if checksum is None else int(checksum)) for version, checksum in told]


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    """What a new job has otherwise than job `name`, in words; "" when nothing. Documents of one depth more are named
    key by key."""
    found = []
    for key in sorted({*ours, *theirs}):
        here, there = ours.get(key), theirs.get(key)
        if here == there:
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            parts = [part for part in sorted({*here, *there}) if here.get(part) != there.get(part)]
            found += [
                f"{key} {part} ({here.get(part, 'none')} here, {there.get(part, 'none')} in {name})"
                for part in parts
            ]
        else:
            found.append(f"{key} ({here!r:.80} here, {there!r:.80} in {name})")
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(found[:4]) + more
