"""Meter of the load of this machine's cores.

Times that are measured while all cores are busy describe this machine, not the emulated network.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

#: Load of the cores, from 0 to 1, from which on a time is marked with BOUND_TEXT.
BOUND = 0.8
BOUND_TEXT = "bound by this machine's cores"


@dataclass(frozen=True)
class CoreTimes:
    """Busy time and total time of all cores together, since this machine started, in clock ticks.

    Two readings at different times give the load of the cores between them (busy_since()).
    """

    used: int  # busy with any program or with the kernel
    total: int  # busy and idle

    def busy_since(self, before: CoreTimes) -> float:
        """Return the load of the cores since an earlier time, from 0 to 1."""
        return (self.used - before.used) / max(1, self.total - before.total)


def core_times(stat: Path = Path("/proc/stat")) -> CoreTimes:
    """Return the times in the first line of /proc/stat.

    The columns are user, nice, system, idle, iowait, irq, softirq, steal (proc(5)).
    """
    first_line = stat.read_text().partition("\n")[0]
    _, *columns = first_line.split()
    user, nice, system, idle, iowait, *interrupts = map(int, columns[:8])
    used = user + nice + system + sum(interrupts)
    return CoreTimes(used=used, total=used + idle + iowait)


class CoreMeter:
    """Meter that records the load of the cores for every SAMPLE_S seconds since its creation."""

    SAMPLE_S = 0.5

    def __init__(self) -> None:
        self._sample_start_s = time.monotonic()
        self._times_at_start = core_times()
        self._shares: list[float] = []

    def sample(self) -> None:
        """End the running sample and begin the next, if SAMPLE_S seconds are over. Call this often."""
        now = time.monotonic()
        if now - self._sample_start_s >= self.SAMPLE_S:
            times = core_times()
            self._shares.append(times.busy_since(self._times_at_start))
            self._sample_start_s = now
            self._times_at_start = times

    @property
    def shares(self) -> tuple[float, ...]:
        """Load of the cores, from 0 to 1, in each sample of SAMPLE_S seconds.

        Before the end of the first sample, there is one value: the load from its start until now.
        """
        return tuple(self._shares) or (core_times().busy_since(self._times_at_start),)


def median_share(shares: Sequence[float], last_s: float = inf) -> float:
    """Return the median load in the last seconds of a CoreMeter, 0 without a sample.

    Args:
        shares: Load in each sample.
        last_s: Seconds whose samples count.
    """
    samples = max(1, round(min(last_s / CoreMeter.SAMPLE_S, len(shares))))
    return statistics.median(shares[-samples:] or [0.0])
