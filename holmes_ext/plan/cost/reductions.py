"""How gradients are summed: each reduction prices itself, and says which NICs and links it uses.

A reduction is made for one family of groups (plan/placement.py): its prices where it is alone, its flows
for the simulation.

    PricedReduction   one ring over all ranks of a group
    Hierarchical         a sum inside every cluster, across them, and inside again
    Sharded           gradients, weights or optimizer sharded over a data-parallel group (ZeRO, FSDP)
    by_pairs, ...     the gradient of a weight that the first and the last stage share

A hierarchical all-reduce. What crosses is a sum of a whole cluster:

    chunk 0   inside | there | back | inside          chunks follow each other, so the slower level is
    chunk 1            inside | there | back | ...    always busy

The steps inside clusters are rings (NCCL, runtime/reduce/hierarchical_nccl.py), or `direct`: every rank sends
each other its block (gloo, hierarchical.py). NCCL's need as many ranks in each cluster.

Sharded:

    ZeRO 1    once a step: gradients are scattered, updated weights gathered
    ZeRO 2    gradients are scattered after each micro-batch's backward; weights gathered once a step
    ZeRO 3    and weights gathered before each layer's forward and again before its backward
    hybrid    the same inside each cluster; the owners of a shard, one in each, all-reduce its gradient across

A scatter or a gather is half of a ring's all-reduce; gloo's reduce-scatter moves as much as an all-reduce.
With prefetch the next layer's weights, and the last one's gradients, travel while a layer computes.

A tied weight's gradient:

    pairs        every rank of the first stage all-reduces the whole gradient with its twin of the last
    a hierarchical all-reduce   the sum over all ranks of both stages, each in a cluster of
                 its own: it crosses once for a stage (runtime/reduce/tied.py)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.plan.across import ways_across
from holmes_ext.plan.buckets import chunk_bytes, chunks_of
from holmes_ext.plan.cost.network import FREE, Load, Network, Price
from holmes_ext.plan.placement import Fold, GroupFamily, GroupPart
from holmes_ext.plan.traffic import CrossClusterAlgorithm, Pair

#: Of a transfer.
Tag = tuple[Hashable, ...]


@dataclass(frozen=True)
class Flow:
    """Bytes of `sizes`, one after the other, over one load; or one step of a chain, over several at once."""

    loads: tuple[Load, ...]
    sizes: tuple[float, ...]
    #: Name in the simulation, and what it stands behind.
    tag: Hashable
    channel: Hashable = None
    #: The step of a chain that follows when it has arrived.
    then: Hashable = None
    chained: bool = False
    #: Latency of a way between clusters; blocks: what follows on the same channel waits for it too.
    way_s: float = 0.0
    blocks: bool = False


@dataclass(frozen=True)
class PricedReduction:
    """A reduction by one ring over all ranks of a group, which others refine. name: in tables."""

    load: Load = Load()
    name: str = "flat"

    @property
    def once(self) -> Price:
        """Of a step's gradients, by their bytes."""
        return self.load.price

    def seconds(self, size: float) -> float:
        """Of `size` bytes at once."""
        return self.once.seconds(size)

    def flows(self, sizes: Sequence[float], tag: Tag, most: int) -> list[list[Flow]]:
        """Of buckets of `sizes` bytes: at most `most` chains, begun by their first flow; the last is named
        `tag`."""
        return [[Flow((self.load,), tuple(sizes), tag, tag[:3])]]


#: Where there is nothing to sum.
NONE = PricedReduction(name="none")


#: Below this, there and back, chunks are not made larger to outlast latency: other costs are as long.
HIDDEN_LATENCY_S = 5e-4
#: What another route across must take at most of the direct one's time.
WORTH = 0.95
#: Bytes on the wire for each byte of gradients that crosses (runtime/compress.py).
SHARES = {"off": 1.0, "bf16": 0.5, "int8": (1 + 4 / 256) / 4}
#: Streams of two ranks at most; the part of a link that they are to fill, as measuring one is not exact.
MOST_STREAMS, STREAM_SHARE = 8, 0.8


@dataclass(frozen=True)
class Hierarchical(PricedReduction):
    """insides: of each cluster, one of the two steps there; there, back: across."""

    name: str = "hierarchical"
    insides: tuple[Load, ...] = ()
    there: Load = Load()
    back: Load = Load()
    chunk_bytes: float = 0.0
    route: CrossClusterAlgorithm = field(default=CrossClusterAlgorithm("direct", ()))
    #: Ranks of each cluster.
    ranks: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: Seconds of a half for the first bytes, and what they are more than a fabric's latency.
    half_s: float = 0.0
    longer_s: float = 0.0
    #: Seconds of a half for each byte of a chunk, as every cluster on its way receives it whole before it
    #: passes it on (nothing is compressed then).
    relay_byte_s: float = 0.0
    #: Whether a chunk must have arrived across before the next one leaves (direct exchanges over long ways).
    stalls: bool = False
    #: What compression leaves of the bytes that cross.
    share: float = 1.0
    #: Ranks of a node that send across at once.
    senders: float = 1.0
    #: Of weights, once a step, by the bytes of their gradients.
    gather: Price = FREE

    @cached_property
    def inside(self) -> Price:
        """Both steps inside the slowest cluster."""
        slowest = max(
            (load.price for load in self.insides), key=lambda price: price.byte_s, default=FREE
        )
        return slowest.scaled(2)

    @cached_property
    def across(self) -> Price:
        """There and back."""
        bit_s: dict[object, float] = defaultdict(float)
        for load in (self.there, self.back):
            assert load.fabric is not None
            for nic, flows in load.nics:
                bit_s[nic] += flows / load.fabric.rate_bps
            for hop, flows in load.hops:
                bit_s[hop] += flows / hop.rate_bps
        stall_s = 2 * self.half_s / self.chunk_bytes if self.stalls else 0.0
        # a receive is posted with the send: gloo's sender hears of it a way later
        turns = 4 if self.stalls else 2
        return Price(8 * self.share * max(bit_s.values()) + stall_s, turns * self.half_s)

    @property
    def once(self) -> Price:
        """Of many chunks: the slower level all the time, and the first chunk on the other one."""
        slower, faster = sorted((self.inside.byte_s, self.across.byte_s), reverse=True)
        latency_s = self.inside.latency_s + self.across.latency_s
        first_s = self.chunk_bytes * (faster + 2 * self.relay_byte_s)
        return Price(slower, latency_s + first_s) + self.gather

    def seconds(self, size: float) -> float:
        """One chunk alone takes one level after the other."""
        if size > self.chunk_bytes:
            return self.once.seconds(size)
        stall_s = 2 * self.half_s / self.chunk_bytes if self.stalls else 0.0
        # nothing follows that could stall
        byte_s = self.inside.byte_s + self.across.byte_s + 2 * self.relay_byte_s - stall_s
        alone = Price(byte_s, self.inside.latency_s + self.across.latency_s)
        return (alone + self.gather).seconds(size)

    def sized(self, size: float) -> Hierarchical:
        """With chunks that suit so many bytes: small ones fill the levels, large ones outlast latency."""
        if not self.stalls or self.across.latency_s < HIDDEN_LATENCY_S:
            return self
        sizes = [self]
        while sizes[-1].chunk_bytes < size:
            sizes.append(replace(self, chunk_bytes=2 * sizes[-1].chunk_bytes))
        return min(sizes, key=lambda levels: levels.seconds(size))

    def flows(self, sizes: Sequence[float], tag: Tag, most: int) -> list[list[Flow]]:
        real = sum(chunks_of(size, self.chunk_bytes) for size in sizes)
        chunks = min(most, real)
        way_s = self.longer_s + self.relay_byte_s * sum(sizes) / real
        steps = [self.insides, (self.there,), (self.back,), self.insides]
        return [
            list(self._chain(steps, sum(sizes) / chunks, way_s, tag, chunk, chunk == chunks - 1))
            for chunk in range(chunks)
        ]

    def _chain(
        self,
        steps: Sequence[tuple[Load, ...]],
        size: float,
        across_s: float,
        tag: Tag,
        chunk: int,
        last: bool,
    ) -> Iterator[Flow]:
        names: list[Tag] = [(*tag, chunk, step) for step in range(len(steps))]
        names[-1] = tag if last else names[-1]
        for step, (loads, following) in enumerate(zip(steps, (*names[1:], None))):
            crosses = loads is not self.insides
            way_s, part = (across_s, self.share) if crosses else (0.0, 1.0)
            blocks = self.stalls and crosses
            yield Flow(
                loads, (part * size,), names[step], (tag[:3], step), following, True, way_s, blocks
            )

    def streams(self, network: Network, crossing: float) -> int:
        """TCP streams between two ranks that fill the measured links; crossing: groups at once."""
        count, load = 1, self.there
        assert load.fabric is not None
        nic_bps = load.fabric.rate_bps / self.senders
        for source, target in self.route.halves[0]:
            link = network.wan.pair_of.get((source, target))
            if link is not None and link.stream_bps and link.rate_bps:
                ranks = min(self.ranks[source], self.ranks[target])
                wanted = min(nic_bps, link.rate_bps / (crossing * ranks))
                count = max(count, ceil(STREAM_SHARE * wanted / link.stream_bps))
        return min(count, MOST_STREAMS)

    def faster_from(self, flat: PricedReduction) -> int | None:
        """The least bytes of a sum for which this is faster than `flat`; None: never."""
        sums = [2**power for power in range(10, 31)]
        slower = [size for size in sums if self.seconds(size) >= flat.seconds(size)]
        if sums[-1] in slower:
            return None
        return 2 * slower[-1] if slower else 0


def hierarchical(
    network: Network,
    family: GroupFamily,
    size: float,
    direct: bool,
    groups: float = 0,
    compress: str = "off",
    inside_bps: float = 0.0,
    spread: bool = True,
    chunk_bytes: int = 0,
) -> Hierarchical | None:
    """Of the groups of a family, by the fastest route for a sum of `size` bytes; None where they cannot.

    direct: gloo's; groups: as of Network.ring; inside_bps: of the GPUs of a node; spread: only where some
    cluster has two nodes, else every rank sends across what it has anyhow; chunk_bytes: 0 for what suits.
    """
    known = family, direct, groups, compress, inside_bps, spread, chunk_bytes
    key = "a hierarchical all-reduce", known, size if network.wan else 0.0
    return network.remember(key, lambda: _hierarchical(network, size, *known))


def _hierarchical(
    network: Network,
    size: float,
    family: GroupFamily,
    direct: bool,
    groups: float,
    compress: str,
    inside_bps: float,
    spread: bool,
    given_bytes: int,
) -> Hierarchical | None:
    clusters: dict[str, list[GroupPart]] = {}
    for part in family.parts:
        clusters.setdefault(network.cluster(part.kind), []).append(part)
    ranks = {
        name: sum(part.nodes * part.here for part in parts) for name, parts in clusters.items()
    }
    several = [parts for parts in clusters.values() if sum(part.nodes for part in parts) > 1]
    even = direct or network.uneven or len(set(ranks.values())) == 1
    if len(clusters) < 2 or (spread and not several) or not even:
        return None
    fabric = network.fabric(family.kinds)
    inside = {network.fabric(part.kind for part in parts) for parts in several}
    if fabric in inside and not network.wan:
        return None  # the ring sends no more over it
    share = SHARES[compress]
    if compress != "off" and not direct:  # every cluster's sum is gathered whole
        share *= len(clusters) / 2
    insides = tuple(
        _inside(network, family, parts, ranks[name], direct, groups, inside_bps)
        for name, parts in clusters.items()
        if ranks[name] > 1
    )
    around = CrossClusterAlgorithm(
        "ring" if network.wan else "direct", tuple(clusters)
    )  # NCCL's all-reduce
    routes = ways_across(network.wan, tuple(clusters)) if direct else (around,)
    candidates = []
    for route in routes[:1] if compress != "off" else routes:
        there, back = (
            _half(network, family, clusters, ranks, half, groups) for half in route.halves
        )
        assert there.fabric is not None
        fabric = there.fabric

        def way_s(pair: Pair) -> float:
            return sum(hop.latency_s for hop in network.wan.hops(*pair)) or fabric.latency_s  # noqa: B023

        levels = Hierarchical(
            insides=insides,
            there=there,
            back=back,
            chunk_bytes=given_bytes or chunk_bytes(min(ranks.values()), direct),
            route=route,
            ranks=ranks,
            half_s=route.latency_s(way_s),
            share=share,
            longer_s=route.latency_s(lambda pair: network.longer_s(fabric, pair)),  # noqa: B023
            relay_byte_s=_relay_byte_s(network, fabric, route, ranks),
            stalls=bool(network.wan) and direct and route.algorithm == "direct",
            senders=max(_senders(part, groups) for part in family.parts),
        )
        candidates.append(levels if given_bytes else levels.sized(size))
    best = min(candidates, key=lambda candidate: candidate.seconds(size))
    return best if best.seconds(size) < WORTH * candidates[0].seconds(size) else candidates[0]


def _relay_byte_s(
    network: Network, fabric: Fabric, route: CrossClusterAlgorithm, ranks: Mapping[str, int]
) -> float:
    """The messages of a half one after the other, without the slowest one's, which its flow takes anyhow; of
    a byte that is summed."""

    def message_s(pair: Pair) -> float:
        rates: list[float] = [fabric.rate_bps * min(ranks[name] for name in pair)]
        rates += [hop.rate_bps for hop, _ in network.hops(fabric, {pair: 1.0})]
        return 8 * route.part / min(rates)

    flow_s = max(message_s(pair) * volume / route.part for pair, volume in route.halves[0].items())
    return max(0.0, route.latency_s(message_s) - flow_s)


def _senders(part: GroupPart, groups: float) -> float:
    return part.here * (part.crowd if groups else part.groups)


def _inside(
    network: Network,
    family: GroupFamily,
    parts: Sequence[GroupPart],
    ranks: int,
    direct: bool,
    groups: float,
    inside_bps: float,
) -> Load:
    """One step among the ranks of a cluster."""
    if sum(part.nodes for part in parts) == 1:
        return Load(inside_bps=inside_bps, volume=(ranks - 1) / ranks)
    fabric, per_node = network.fabric(part.kind for part in parts), max(part.here for part in parts)
    volume = per_node * (ranks - per_node) / ranks if direct else (ranks - 1) / ranks
    flows = {part.node: float(part.crowd if groups else part.groups) for part in parts}
    nodes = sum(part.nodes for part in parts)
    return Load(
        network.both_ways(fabric, flows),
        fabric=network.line(fabric),
        volume=volume,
        messages=1 if direct else ranks - 1,
        part=1 / ranks,
        ring=not direct,
        across=True,
        senders=family.count * nodes,
        posts=family.count * ranks * (ranks - 1) if direct else 0.0,
    )


def _half(
    network: Network,
    family: GroupFamily,
    clusters: Mapping[str, Sequence[GroupPart]],
    ranks: Mapping[str, int],
    volumes: Mapping[Pair, float],
    groups: float,
) -> Load:
    """The way across, there or back; volumes: bytes from cluster to cluster, for each byte summed."""
    fabric = network.fabric(family.kinds)
    leaving: dict[str, float] = defaultdict(float)
    reaching: dict[str, float] = defaultdict(float)
    for (source, target), volume in volumes.items():
        leaving[source] += volume / ranks[source]
        reaching[target] += volume / ranks[target]
    nics = tuple(
        ((part.node, fabric.name, direction), _senders(part, groups) * volume_of[name])
        for direction, volume_of in (("out", leaving), ("in", reaching))
        for name, parts in clusters.items()
        if name in volume_of
        for part in parts
    )
    crossing = {pair: volume * (groups or family.count) for pair, volume in volumes.items()}
    posts = family.count * sum(max(ranks[name] for name in pair) for pair in volumes)
    return Load(
        nics,
        network.hops(fabric, crossing),
        network.line(fabric),
        part=max(leaving.values()),
        across=True,
        senders=family.count * sum(volumes.values()),
        posts=posts,
    )


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
        both = Price(
            again.byte_s + self.scatter.byte_s, max(again.latency_s, self.scatter.latency_s)
        )
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
    ranks = {
        sum(part.nodes * part.here for part in cluster_parts) for cluster_parts in parts.values()
    }
    if len(parts) < 2 or len(ranks) > 1:
        return []
    (count,) = ranks
    return [
        replace(
            family,
            ranks=count,
            parts=tuple(cluster_parts),
            ring=tuple((part.kind, part.nodes) for part in cluster_parts),
        )
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
    return replace(
        family,
        ranks=len(parts),
        count=family.count * ranks,
        parts=parts,
        ring=tuple((part.kind, 1) for part in parts),
    )


def twins(fold: Fold) -> Iterator[GroupFamily]:
    """Groups of the first and the last stage that hold the same part of such a weight, as one family each."""
    last = {family.pipelines: family for family in fold.families(fold.stages[-1])}
    for first in fold.families(0):
        if (other := last.get(first.pipelines)) is not None:
            parts, ring = first.parts + other.parts, first.ring + other.ring
            yield GroupFamily(
                0, first.ranks + other.ranks, first.count, parts, first.pipelines, ring
            )


def by_pairs(
    network: Network, fold: Fold, pipeline: int, inside_bps: float = 0.0
) -> PricedReduction:
    """Of one kind of pipeline."""
    stage_link = fold.stage_link(pipeline, 0, fold.stages[-1])
    return PricedReduction(network.pairwise(stage_link, inside_bps), "pairs")


def is_hierarchical(
    network: Network,
    both: GroupFamily,
    size: float,
    direct: bool,
    groups: float,
    inside_bps: float = 0.0,
) -> Hierarchical | None:
    """None where a stage lies on several clusters, both lie on one, or a stage has one rank."""
    clusters = [network.cluster(kind) for kind, _ in both.ring]
    first = sum(
        part.nodes * part.here for part in both.parts if network.cluster(part.kind) == clusters[0]
    )
    borders = sum(cluster != following for cluster, following in zip(clusters, clusters[1:]))
    apart = 2 * first == both.ranks and borders == 1
    if network.only is not None or both.ranks == 2 or not apart:
        return None
    return hierarchical(network, both, size, direct, groups, "off", inside_bps, spread=False)
