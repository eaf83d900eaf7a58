"""The gradient of a weight that the first and the last stage share.

    pairs        every rank of the first stage all-reduces the whole gradient with its twin of the last
    two levels   the sum over all ranks of both stages, each in a cluster of
                 its own: it crosses once for a stage (runtime/reduce/tied.py)
"""

from __future__ import annotations

from collections.abc import Iterator

from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.reductions.reduction import PricedReduction
from holmes_ext.plan.cost.reductions.two_levels import TwoLevels, two_levels
from holmes_ext.plan.placement.families import GroupFamily
from holmes_ext.plan.placement.fold import Fold


def twins(fold: Fold) -> Iterator[GroupFamily]:
    """Groups of the first and the last stage that hold the same part of such a weight, as one family each."""
    last = {family.pipelines: family for family in fold.families(fold.stages[-1])}
    for first in fold.families(0):
        if (other := last.get(first.pipelines)) is not None:
            parts, ring = first.parts + other.parts, first.ring + other.ring
            yield GroupFamily(0, first.ranks + other.ranks, first.count, parts, first.pipelines, ring)


def by_pairs(network: Network, fold: Fold, pipeline: int, inside_bps: float = 0.0) -> PricedReduction:
    """Of one kind of pipeline."""
    edge = fold.edge(pipeline, 0, fold.stages[-1])
    return PricedReduction(network.pairwise(edge, inside_bps), "pairs")


def in_two_levels(
    network: Network, both: GroupFamily, size: float, direct: bool, groups: float, inside_bps: float = 0.0
) -> TwoLevels | None:
    """None where a stage lies on several clusters, both lie on one, or a stage has one rank."""
    clusters = [network.cluster(kind) for kind, _ in both.ring]
    first = sum(part.nodes * part.here for part in both.parts if network.cluster(part.kind) == clusters[0])
    borders = sum(cluster != following for cluster, following in zip(clusters, clusters[1:]))
    apart = 2 * first == both.ranks and borders == 1
    if network.only is not None or both.ranks == 2 or not apart:
        return None
    return two_levels(network, both, size, direct, groups, "off", inside_bps, spread=False)


