"""Costs that are linear in a stage's layers, and intervals of seconds for the longest update of all stages.

An update is a stage's optimizer step and the gather of its new weights. The gradient norm is a barrier: no
stage begins its update before the last gradient reduction has ended, so the longest update counts for every
stage. Its time depends on the split of the layers, and a lower bound holds for every split. So the bound is
computed for each interval of possible seconds:

    interval from 1.0 s to 1.1 s    the longest update takes at least 1.0 s (this adds to the bound),
                                    and no stage has so many layers that its update takes 1.1 s or more
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

#: Relative tolerance for quotients that are rounded down to whole layers or micro-batches.
ROUNDING = 1e-12
#: Width of an interval, as a share of the step. A bound is too low by at most this share.
SHARE_OF_STEP = 0.01
#: Width of an interval, as a share of its own start, if that is wider: otherwise long updates would
#: make too many intervals.
SHARE_OF_UPDATE = 0.1


class LinearCost(NamedTuple):
    """Seconds that a stage needs as a linear function of its number of layers."""

    block_s: float  # for each layer (transformer block)
    fixed_s: float  # once, whatever the number of layers

    def layers_below(self, limit_s: float, max_layers: int) -> int:
        """Return the most layers, up to `max_layers`, whose cost stays below `limit_s` seconds."""
        if limit_s == inf or not self.block_s:
            return max_layers
        layers = ceil((limit_s - self.fixed_s) / self.block_s * (1 - ROUNDING)) - 1
        return min(max_layers, layers)


class UpdateInterval(NamedTuple):
    """Range of seconds for the longest update (optimizer step and weight gather) of all stages."""

    least_s: float
    limit_s: float  # exclusive


#: Equal stages: ((seconds of their update, largest number of layers of each), number of stages).
StageGroup = tuple[tuple[LinearCost, int], int]


def update_intervals(
    groups: Sequence[StageGroup], layer_count: int, step_s: float
) -> list[UpdateInterval]:
    """Return intervals, in ascending order, that cover all possible seconds of the longest update.

    An update is a stage's optimizer step and the gather of its new weights; it takes longer the
    more layers the stage has. So the longest update of all stages depends on the split of the
    layers, which is open. The caller computes a lower bound on the step for each interval, and
    assumes that the longest update takes as long as the interval's start.

    Narrow intervals make these bounds tight, and wide ones make them few. An interval is 1 % of the
    step wide (SHARE_OF_STEP), or 10 % of its start (SHARE_OF_UPDATE) if that is wider.

    Args:
        groups: For each set of equal stages: ((seconds of an update, largest number of layers of a
            stage), number of stages).
        layer_count: Layers of the model.
        step_s: Estimate of the step time, in seconds.
    """
    seconds = _possible_updates_s(groups)
    intervals = []
    start = 0
    while start < len(seconds):
        width_s = max(SHARE_OF_STEP * step_s, SHARE_OF_UPDATE * seconds[start])
        end = bisect_right(seconds, seconds[start] + width_s)  # first index after the interval
        limit_s = seconds[end] if end < len(seconds) else inf
        # If the stages cannot hold all layers with updates below the limit, then every split has
        # a longer update, and the longest update is never in this interval.
        if _layers_below(limit_s, groups) >= layer_count:
            intervals.append(UpdateInterval(seconds[start], limit_s))
        start = end
    return intervals


def _possible_updates_s(groups: Sequence[StageGroup]) -> list[float]:
    """Return all times that an update of some stage can take, sorted, in seconds.

    An update is a stage's optimizer step and the gather of its new weights. Its time depends on the
    stage's number of layers, so each stage adds a time for every number that its memory allows.

    Args:
        groups: For each set of equal stages: ((seconds of an update, largest number of layers of a
            stage), number of stages).
    """
    possible_s = set()
    for (update, max_layers), _ in groups:
        for layers in range(1, max_layers + 1):
            possible_s.add(layers * update.block_s + update.fixed_s)
    return sorted(possible_s)


def _layers_below(limit_s: float, groups: Sequence[StageGroup]) -> int:
    """Return the most layers that all stages together can hold if no update takes `limit_s` seconds.

    An update is a stage's optimizer step and the gather of its new weights. It takes longer the
    more layers the stage has, so the limit also bounds the layers of each stage.

    Args:
        limit_s: Seconds that every stage's update must stay below.
        groups: For each set of equal stages: ((seconds of an update, largest number of layers of a
            stage), number of stages).
    """
    most_layers = 0
    for (update, max_layers), stages in groups:
        layers = update.layers_below(limit_s, max_layers)
        most_layers += stages * max(0, layers)
    return most_layers
