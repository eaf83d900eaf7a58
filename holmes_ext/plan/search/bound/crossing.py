"""Reductions of several stages on one hop between clusters: a link or an uplink carries them one after the
other, whichever comes first.

    clusters a, b    stages 0, 1 lie on both    all gradients of stages 0 and 1 pass a -> b

None begins before its stage's last backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from holmes_ext.cluster.wan import Hop
from holmes_ext.plan.cost.network import Load
from holmes_ext.plan.cost.reductions.two_levels import TwoLevels
from holmes_ext.plan.search.bound.stages import Stages


class SharedHop(NamedTuple):
    """each_s: of a block's gradients on it at least, on any of these stages; ends_s: what both ends add."""

    stages: tuple[int, ...]
    each_s: float
    ends_s: float

    def blocks(self, seconds: float) -> float:
        """That it carries in so much time; below 0 where it has none for what the ends have."""
        return (seconds - self.ends_s) / self.each_s


def shared_hops(stages: Stages) -> list[SharedHop]:
    """No two of them with a stage in common, the slowest first."""
    byte_s: dict[Hop, dict[int, float]] = defaultdict(dict)
    for stage in range(stages.count):
        for hop, seconds in _byte_s(stages, stage).items():
            byte_s[hop][stage] = seconds
    hops: list[SharedHop] = []
    every = [_shared(stages, byte_) for byte_ in byte_s.values() if min(byte_.values()) > 0]
    for one in sorted(every, key=lambda one: -len(one.stages) * one.each_s):
        if not any(set(one.stages) & set(other.stages) for other in hops):
            hops.append(one)
    return hops


def _shared(stages: Stages, byte_s: dict[int, float]) -> SharedHop:
    first, block, last = stages.prices.job.reduced_bytes
    ends_s = byte_s.get(0, 0.0) * first + byte_s.get(stages.count - 1, 0.0) * last
    return SharedHop(tuple(byte_s), min(byte_s.values()) * block, ends_s)


def _byte_s(stages: Stages, stage: int) -> dict[Hop, float]:
    """Seconds of a byte of a stage's gradients on every hop that they pass."""
    run, result = stages.run, defaultdict[Hop, float](float)
    part = (1.0, 0.5 if run.engine.scatters else 1.0, 0.0, 0.0)[run.zero]
    reduction, _ = stages.reduction(stage, stages.column)
    loads: tuple[Load, ...] = (reduction.load,)
    if isinstance(reduction, TwoLevels):
        if run.direct:
            return {}  # by a route that suits what the stage has
        loads, part = (reduction.there, reduction.back), part * reduction.share
    for load in loads:
        for hop, flows in load.hops:
            result[hop] += 8 * part * load.volume * flows / hop.rate_bps
    return result


def blocks_at_most(hops: Sequence[SharedHop], most: Sequence[int], seconds: Sequence[float]) -> float:
    """Of all stages, of which each has room for so many, with so much time for what each hop carries."""
    total: float = sum(most)
    for hop, left_s in zip(hops, seconds):
        room = sum(most[stage] for stage in hop.stages)
        total -= max(0.0, room - hop.blocks(left_s))
    return total
