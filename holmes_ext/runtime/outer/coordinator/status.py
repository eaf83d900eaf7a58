"""What `holmes join status` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holmes_ext.runtime.outer.coordinator.reports import TELEMETRY
from holmes_ext.runtime.outer.coordinator.rules import Coordinator


def status_of(coordinator: Coordinator, relayed: Mapping[str, int], now: float) -> dict[str, Any]:
    """round: the last that was opened; of each job its state, its last heartbeat's figures, its lag (seconds
    after the first in its last round), rounds counted and missed, bytes relayed for it."""
    jobs = [
        {
            "job": m.name,
            "state": m.state,
            "ranks": len(m.hello.addresses),
            "heard_s": round(now - m.heard, 1),
            "lag_s": round(m.lag_s, 3),
            "rounds": m.rounds,
            "missed": m.missed,
            "relayed": relayed.get(m.name, 0),
            **{key: m.telemetry.get(key) for key in TELEMETRY},
        }
        for m in sorted(coordinator.members.values(), key=lambda m: m.order)
    ]
    return {
        "version": 1,
        "round": coordinator.number,
        "up_s": round(now - coordinator.started, 1),
        "jobs": jobs,
        "events": coordinator.events[-20:],
    }
