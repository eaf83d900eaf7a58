"""How busy this machine's cores are: what is timed on full cores is a figure of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

#: Share of the cores' time from which on a timing is "bound by this machine's cores".
BOUND = 0.8
BOUND_TEXT = "bound by this machine's cores"


@dataclass(frozen=True)
class CoreTimes:
    """Of all cores since this machine started, in ticks: used by anything that runs on it, and in all."""

    used: int
    total: int

    def busy_since(self, before: CoreTimes) -> float:
        """Share of the time since `before` in which the cores were used, 0 to 1."""
        return (self.used - before.used) / max(1, self.total - before.total)


def core_times(stat: Path = Path("/proc/stat")) -> CoreTimes:
    """From the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (proc(5))."""
    user, nice, system, idle, waiting, *interrupts = map(
        int, stat.read_text().split("\n", 1)[0].split()[1:9]
    )
    used = user + nice + system + sum(interrupts)
    return CoreTimes(used, used + idle + waiting)


class CoreMeter:
    """Measures how busy the cores are from its making on, in pieces of SAMPLE_S."""

    SAMPLE_S = 0.5

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), core_times()
        self._shares: list[float] = []

    def sample(self) -> None:
        """Called often: counts a piece once it is over."""
        now = time.monotonic()
        if now - self._began >= self.SAMPLE_S:
            times = core_times()
            self._shares.append(times.busy_since(self._before))
            self._began, self._before = now, times

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the pieces, in order; before the first one is over, of the time so far."""
        return tuple(self._shares) or (core_times().busy_since(self._before),)


def median_share(shares: Sequence[float], last_s: float = inf) -> float:
    """The median of a CoreMeter's shares in its last `last_s` seconds; 0 where there are none."""
    pieces = max(1, round(min(last_s / CoreMeter.SAMPLE_S, len(shares))))
    return statistics.median(shares[-pieces:] or [0.0])
