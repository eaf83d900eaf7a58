"""Gradients, weights or optimizer sharded over a data-parallel group (ZeRO, FSDP).

    ZeRO 1    once a step: gradients are scattered, updated weights gathered
    ZeRO 2    gradients are scattered after each micro-batch's backward; weights gathered once a step
    ZeRO 3    and weights gathered before each layer's forward and again before its backward
    hybrid    the same inside each cluster; the owners of a shard, one in each, all-reduce its gradient across

A scatter or a gather is half of a ring's all-reduce; gloo's reduce-scatter moves as much as an all-reduce.
With prefetch the next layer's weights, and the last one's gradients, travel while a layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holmes_ext.plan.cost.network import FREE, Load, Network, Price
from holmes_ext.plan.cost.reductions.reduction import PricedReduction
from holmes_ext.plan.placement.families import GroupFamily, GroupPart

Row = tuple[float, ...]


@dataclass(frozen=True)
class Sharded(PricedReduction):
    """load: of an all-reduce among the ranks that share."""

    zero: int = 1
    #: Bytes of weights that travel for each byte of gradients.
    weights: float = 0.5
    #: What a scatter moves of an all-reduce.
    scatter_part: float = 0.5
    #: All-reduce of a shard across clusters, and how many bytes of gradients are in one of a shard.
    across: Load | None = None
    shards: int = 1
    #: Part of the weights that the backward pass gathers again.
    again: float = 1.0

    @property
    def gather(self) -> Price:
        """Of all weights, by the bytes of their gradients."""
        half = self.load.price.scaled(0.5)
        return Price(self.weights * half.byte_s, half.latency_s)

    @property
    def scatter(self) -> Price:
        return self.load.price.scaled(self.scatter_part)

    @property
    def owned(self) -> Price:
        """Of a shard's sum across clusters, by the bytes of all gradients."""
        if self.across is None:
            return FREE
        return Price(self.across.price.byte_s / self.shards, self.across.price.latency_s)

    @property
    def once(self) -> Price:
        if self.zero == 1:
            return self.scatter + self.owned + self.gather
        return self.gather if self.zero == 2 else FREE

    def passes(
        self, forward: Row, backward: Row, sizes: Row, repeats: Sequence[int], prefetch: bool
    ) -> tuple[Row, Row]:
        """[kind of layer] seconds of a forward and a backward pass that compute so long, with what they send;
        sizes: bytes of its gradients."""
        if self.zero < 2:
            return forward, backward
        weights = self.gather if self.zero == 3 else FREE
        again = weights.scaled(self.again)
        before, between, after, across = (
            tuple(map(price.seconds, sizes)) for price in (weights, again, self.scatter, self.owned)
        )
        if not prefetch:
            return added(forward, before), added(backward, between, after, across)
        # gathers and scatters have the same NICs; of both latencies one is hidden
        both = Price(again.byte_s + self.scatter.byte_s, max(again.latency_s, self.scatter.latency_s))
        last_s = between[-1] + after[0] + across[0]
        down = (forward, before[0]), (before, forward[-1])
        up = (backward, last_s), (tuple(map(both.seconds, sizes)), 0.0), (across, 0.0)
        return longest(down, repeats), longest(up, repeats)


def added(*rows: Row) -> Row:
    return tuple(map(sum, zip(*rows)))


def longest(rows: Sequence[tuple[Row, float]], repeats: Sequence[int]) -> Row:
    """Of passes over all layers with seconds that nothing hides: the longest, those added to layer 0."""

    def seconds(direction: tuple[Row, float]) -> float:
        return sum(value * count for value, count in zip(direction[0], repeats)) + direction[1]

    row, more_s = max(rows, key=seconds)
    return row[0] + more_s / repeats[0], *row[1:]


def inside_clusters(network: Network, family: GroupFamily) -> list[GroupFamily]:
    """The parts of such groups that lie in one cluster each; [] where they are not equal, or there is one."""
    parts: dict[str, list[GroupPart]] = {}
    for part in family.parts:
        parts.setdefault(network.cluster(part.kind), []).append(part)
    ranks = {sum(part.nodes * part.here for part in cluster_parts) for cluster_parts in parts.values()}
    if len(parts) < 2 or len(ranks) > 1:
        return []
    (count,) = ranks
    return [
        replace(family, ranks=count, parts=tuple(cluster_parts),
                ring=tuple((part.kind, part.nodes) for part in cluster_parts))
        for cluster_parts in parts.values()
    ]


def owners(network: Network, family: GroupFamily) -> GroupFamily:
    """Groups of one shard: a rank of each cluster; a node has as many as ranks of the others."""
    first: dict[str, GroupPart] = {}
    for part in family.parts:
        first.setdefault(network.cluster(part.kind), part)
    parts = tuple(
        replace(part, nodes=1, here=1, groups=part.here * part.groups, crowd=part.here * part.crowd)
        for part in first.values()
    )
    ranks = family.ranks // len(parts)
    return replace(family, ranks=len(parts), count=family.count * ranks, parts=parts,
                   ring=tuple((part.kind, 1) for part in parts))
