"""Reductions of several stages on one hop between clusters: a link or an uplink carries them one after the
other, whichever comes first.

    clusters a, b    stages 0, 1 lie on both    all gradients of stages 0 and 1 pass a -> b

None begins before its stage's last backward. The first stage's begins last, and hops are shared fairly: while
it is on its way, each other one on the same clusters gets as much, until that has all. A tied embedding's
reduction comes after the first stage's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.wan import Hop
from holmes_ext.plan.cost.network import Load
from holmes_ext.plan.cost.reductions import Hierarchical
from holmes_ext.planner.bound.stages import Stages

#: Of as much as the first stage's reduction gets, what another gets at least: its chunks wait for each other.
FAIR = 0.9


class SharedHop(NamedTuple):
    """each_s: of a block's gradients on it at least, on any of these stages; ends_s: what both ends add;
    first_s: the first one alone; alike: other stages that lie where the first one lies."""

    stages: tuple[int, ...]
    each_s: float
    ends_s: float
    first_s: float = 0.0
    alike: tuple[int, ...] = ()

    def blocks(self, seconds: float) -> float:
        """That it carries in so much time; below 0 where the time is too short for what the ends add."""
        return (seconds - self.ends_s) / self.each_s

    def blocks_beside_first(self, most: Sequence[int], seconds: float) -> float:
        """On all its stages at most, where each has room for most[stage] and the first one must be reduced in
        so much time; -inf where it cannot be, inf where the first one is not on it."""
        if 0 not in self.stages:
            return inf
        others = sorted((most[stage] for stage in self.alike if stage), reverse=True)
        free, best = sum(most[stage] for stage in self.stages) - most[0] - sum(others), -inf
        for blocks in range(1, most[0] + 1):
            first_s = blocks * self.each_s + self.first_s
            for more in range(len(others) + 1):  # that have more than the first one
                left_s = seconds - (1 + FAIR * more) * first_s
                if left_s >= 0:
                    others_blocks = min(sum(others[more:]), left_s / (FAIR * self.each_s))
                    best = max(best, blocks + free + sum(others[:more]) + others_blocks)
        return best


def shared_hops(stages: Stages) -> list[SharedHop]:
    """No two of them with a stage in common, the slowest first."""
    byte_s: dict[Hop, dict[int, float]] = defaultdict(dict)
    for stage in range(stages.count):
        for hop, seconds in _byte_s(stages, stage).items():
            byte_s[hop][stage] = seconds
    chosen: list[SharedHop] = []
    candidates = [
        _shared(stages, by_stage) for by_stage in byte_s.values() if min(by_stage.values()) > 0
    ]
    for shared in sorted(candidates, key=lambda item: -len(item.stages) * item.each_s):
        if not any(set(shared.stages) & set(earlier.stages) for earlier in chosen):
            chosen.append(shared)
    return chosen


def _shared(stages: Stages, byte_s: dict[int, float]) -> SharedHop:
    first, block, last = stages.prices.job.reduced_bytes
    ends_s = byte_s.get(0, 0.0) * first + byte_s.get(stages.count - 1, 0.0) * last
    where, of_first = stages.placement.stages, byte_s.get(0, 0.0)
    alike = (
        stage
        for stage, seconds in byte_s.items()
        if where[stage] == where[0] and seconds == of_first
    )
    return SharedHop(
        tuple(byte_s), min(byte_s.values()) * block, ends_s, of_first * first, tuple(alike)
    )


def _byte_s(stages: Stages, stage: int) -> dict[Hop, float]:
    """Seconds of a byte of a stage's gradients on every hop that they pass."""
    part, byte_s = stages.part, defaultdict[Hop, float](float)
    reduction, _ = stages.reduction(stage)
    loads: tuple[Load, ...] = (reduction.load,)
    if isinstance(reduction, Hierarchical):
        if stages.run.direct:
            return {}  # by a route that suits what the stage has
        loads, part = (reduction.there, reduction.back), part * reduction.share
    for load in loads:
        for hop, flows in load.hops:
            byte_s[hop] += 8 * part * load.volume * flows / hop.rate_bps
    return byte_s


def blocks_at_most(
    hops: Sequence[SharedHop], most: Sequence[int], seconds: Sequence[float], first_s: float = inf
) -> float:
    """On all stages, where each has room for most[stage], with so much time for what each hop carries;
    first_s: for the first stage's part of it."""
    total: float = sum(most)
    for hop, left_s in zip(hops, seconds):
        room = sum(most[stage] for stage in hop.stages)
        total -= max(0.0, room - min(hop.blocks(left_s), hop.blocks_beside_first(most, first_s)))
    return total
