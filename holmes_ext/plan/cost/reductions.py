"""Costs of the ways to sum gradients over a data-parallel group.

The classes and functions below each price one way; classes also list the transfers for the simulation:

    PricedReduction   a ring all-reduce over all ranks of a group
    Hierarchical      reduce inside every cluster, then across clusters, then distribute inside again
    Sharded           gradients, weights or optimizer sharded over a data-parallel group (ZeRO, FSDP)
    by_pairs          all-reduce of the gradient of a weight that the first and last stage share

A hierarchical all-reduce sends only the sums of whole clusters over the slow network between clusters. It
cuts the gradients into chunks that follow each other in a pipeline, so the slower network is always busy.
"inside" steps use the network inside each cluster, "across" steps the network between clusters:

    chunk 0   reduce inside | reduce across | gather across | gather inside
    chunk 1                 | reduce inside | reduce across | gather across | gather inside

With NCCL the steps inside a cluster are rings, and every cluster needs the same number of ranks
(runtime/reduce/hierarchical_nccl.py). With gloo they are `direct` exchanges: every rank sends each other rank
its block (runtime/reduce/hierarchical.py).

Sharded training sends:

    ZeRO 1    once a step: gradients are reduce-scattered, updated weights are gathered
    ZeRO 2    gradients are reduce-scattered after each micro-batch's backward; weights gathered once a step
    ZeRO 3    as ZeRO 2, but weights are gathered before each layer's forward and again before its backward
    hybrid    the same inside each cluster; ranks of different clusters that own the same shard all-reduce
              its gradient

A reduce-scatter or an all-gather takes half the time of a ring all-reduce; gloo's reduce-scatter takes as
long as its all-reduce. With prefetching, the next layer's weights and the previous layer's gradients travel
while a layer computes.

The gradient of a weight that the first and last stage share (a tied embedding) is summed in one of two ways:

    pairs          every rank of the first stage all-reduces the whole gradient with its counterpart in the
                   last stage
    hierarchical   the ranks of both stages form one group, with each stage in a cluster; the sum of a stage
                   crosses between clusters once (runtime/reduce/tied.py)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.plan.across import ways_across
from holmes_ext.plan.buckets import chunk_bytes, chunks_of
from holmes_ext.plan.cost.network import FREE, Load, Network, Nic, Price
from holmes_ext.plan.placement import Fold, GroupFamily, GroupPart
from holmes_ext.plan.traffic import CrossClusterAlgorithm, Pair

#: Name of a transfer in the simulation.
Tag = tuple[Hashable, ...]


@dataclass(frozen=True)
class Flow:
    """A simulated transfer of a gradient reduction: collectives with the same loads that run in sequence.

    The time of a transfer depends on its `loads` (use of NICs and links) and on other transfers
    that run at the same time. A flat all-reduce is a single Flow, with a collective for each bucket. A
    hierarchical all-reduce has four Flows for each chunk of the gradients (reduce inside and across
    clusters, gather across and inside). Each has a single collective and is `chained`: it starts
    the next one.
    """

    loads: tuple[
        Load, ...
    ]  # of a step inside clusters: a load for each cluster; else a single load
    sizes: tuple[float, ...]  # bytes of each collective
    tag: Hashable  # name of the transfer
    channel: Hashable = None  # transfers on the same channel run in sequence
    then: Hashable = None  # tag of the transfer that starts when this transfer has arrived
    chained: bool = False  # whether it is a step of a chunk (hierarchical all-reduce)
    wan_latency_s: float = 0.0  # latency between clusters beyond the fabric's own
    awaits_arrival: bool = False  # whether the next transfer on the channel waits for the latency


@dataclass(frozen=True)
class PricedReduction:
    """A ring all-reduce over all ranks of a group; the base class of the other reductions.

    Each reduction has a price (closed form), and lists its transfers for the simulation.
    """

    load: Load = Load()  # use of NICs and links, for each byte of the sum
    name: str = "flat"  # in tables

    @property
    def once(self) -> Price:
        """Return the price of the collectives that run once a step, not in each micro-batch.

        The price has seconds per byte of the gradients, and latency in seconds.
        """
        return self.load.price

    def seconds(self, size: float) -> float:
        """Return the seconds that the collectives of a step take for `size` bytes of gradients."""
        return self.once.seconds(size)

    def flows(self, sizes: Sequence[float], tag: Tag, most: int) -> list[list[Flow]]:
        """Return the transfers that reduce buckets of gradients, as chains that start independently.

        Args:
            sizes: Bytes of each bucket.
            tag: Name of the last transfer. Its first three elements name the reduction.
            most: Largest number of chains.
        """
        # A chain with a single transfer, which reduces the buckets in sequence. Transfers on the same
        # channel run in sequence, too.
        return [[Flow(loads=(self.load,), sizes=tuple(sizes), tag=tag, channel=tag[:3])]]


#: For a group of a single rank.
NONE = PricedReduction(name="none")


#: With a shorter round trip than this, in seconds, larger chunks save nothing: other costs are as long.
HIDDEN_LATENCY_S = 5e-4
#: Another route across clusters is chosen if it takes less than this part of the direct route's time.
OTHER_ROUTE_SHARE = 0.95
#: Bytes on the wire for each byte of gradients that crosses (runtime/compress.py).
SHARES = {"off": 1.0, "bf16": 0.5, "int8": (1 + 4 / 256) / 4}
#: Largest number of TCP streams between two ranks.
MOST_STREAMS = 8
#: Part of a link's rate that streams must reach; below 1 because the rate is measured imprecisely.
STREAM_SHARE = 0.8
#: Sizes for which `faster_from` compares two reductions: powers of two from 1 KiB to 1 GiB.
_COMPARED_BYTES: tuple[int, ...] = tuple(2**power for power in range(10, 31))
#: Stages with a copy of a tied weight: the first and the last.
_TIED_STAGES = 2


@dataclass(frozen=True)
class Hierarchical(PricedReduction):
    """An all-reduce in steps inside and across clusters, so that only clusters' sums cross.

    The gradients are cut into chunks. Each is reduced inside every cluster, then across clusters.
    Then its total is distributed across clusters, and inside every cluster. The steps of different
    chunks run at the same time.
    """

    name: str = "hierarchical"
    #: Step inside each cluster. It runs twice: as a reduce-scatter and as an all-gather.
    inside_loads: tuple[Load, ...] = ()
    reduce_across: Load = Load()  # step across clusters that adds up the clusters' sums
    gather_across: Load = Load()  # step across clusters that distributes the total
    chunk_bytes: float = 0.0  # gradients are cut into chunks of this size
    #: Algorithm of the steps across clusters: direct exchanges, a ring or a tree of clusters.
    route: CrossClusterAlgorithm = field(default=CrossClusterAlgorithm("direct", ()))
    ranks: Mapping[str, int] = field(default_factory=dict, hash=False)  # cluster -> its ranks
    #: Latency of a step across clusters, in seconds, and the part of it beyond the fabric's own latency.
    step_latency_s: float = 0.0
    wan_latency_s: float = 0.0
    #: Seconds per byte of a chunk that a step across takes longer because clusters on the route receive a
    #: chunk completely before they forward it.
    relay_byte_s: float = 0.0
    #: Whether a chunk must arrive before the next chunk leaves (direct exchanges over long distances).
    stalls: bool = False
    compressed_share: float = 1.0  # part of the bytes that compression leaves on the slow network
    senders: float = 1.0  # ranks of a node that send across at the same time
    weight_gather: Price = FREE  # ZeRO 1: of gathering updated weights, per byte of gradients

    @cached_property
    def inside(self) -> Price:
        """Return the price of the two steps inside the slowest cluster: reduce-scatter and all-gather.

        The price has seconds per byte of the gradients, and latency in seconds.
        """
        prices = [
            load.price for load in self.inside_loads
        ]  # of a single step, if nothing else runs
        # FREE: no cluster has several ranks of the group.
        slowest = max(prices, key=lambda price: price.byte_s, default=FREE)
        return slowest.scaled(2)  # two steps

    @property
    def _stall_byte_s(self) -> float:
        """Return the latency that chunks add if each waits for its predecessor, in seconds for each byte.

        If chunks stall, a chunk is sent across clusters only after the previous one has arrived.
        Then every chunk takes two latencies (reduce and gather), which are divided by its bytes.
        """
        if not self.stalls:
            return 0.0
        return 2 * self.step_latency_s / self.chunk_bytes

    @cached_property
    def across(self) -> Price:
        """Return the price of the reduce and the gather step across clusters, both together.

        The price has seconds per byte of the gradients, and latency in seconds. The busiest NIC or
        link between clusters sets the rate. Compression sends fewer bytes. Chunks normally follow
        each other without a pause, so the latency counts once. If `stalls` is set, each chunk
        leaves only after the chunk before it has arrived, so the latency counts for every chunk.
        """
        # NIC or link between clusters -> seconds that it is busy per bit, in both steps.
        bit_s: dict[object, float] = defaultdict(float)
        for load in (self.reduce_across, self.gather_across):
            assert load.fabric is not None
            # `flows` is a volume here: bytes through this NIC for each byte of the gradients.
            for nic, flows in load.nics:
                bit_s[nic] += flows / load.fabric.rate_bps
            for hop, flows in load.hops:  # the same for links between clusters
                bit_s[hop] += flows / hop.rate_bps

        # Each of the two steps takes a latency. gloo's direct exchanges over a WAN (`stalls`) take a
        # second latency: a send waits for the receiver's announcement, posted at the same time.
        latencies = 4 if self.stalls else 2
        busiest_byte_s = 8 * max(bit_s.values())
        return Price(
            # _stall_byte_s: two latencies, divided by the bytes of a chunk; 0 if chunks do not wait
            byte_s=self.compressed_share * busiest_byte_s + self._stall_byte_s,
            latency_s=latencies * self.step_latency_s,
        )

    @property
    def once(self) -> Price:
        """Return the price of reducing all gradients of a step once, in many chunks.

        Chunks pass the network inside clusters and the network across clusters in a pipeline. So
        the slower network is always busy, and the faster network adds only the time of the first
        chunk. With ZeRO 1, the gather of the updated weights follows (`weight_gather`).
        """
        # `inside` is the price of both steps inside clusters, `across` that of both steps across.
        slower_byte_s, faster_byte_s = sorted(
            (self.inside.byte_s, self.across.byte_s), reverse=True
        )
        latency_s = self.inside.latency_s + self.across.latency_s
        # Clusters on the route forward a chunk after they have received all of it, in the reduce and in the
        # gather step. Chunks follow each other, so this delay counts once.
        relay_byte_s = 2 * self.relay_byte_s
        first_chunk_s = self.chunk_bytes * (faster_byte_s + relay_byte_s)
        # Price(seconds per byte, latency in seconds); a sum of prices adds up both.
        return Price(slower_byte_s, latency_s + first_chunk_s) + self.weight_gather

    def seconds(self, size: float) -> float:
        """Return the seconds that the all-reduce of `size` bytes of gradients takes.

        Up to the size of a chunk, there is a single chunk. Its steps inside and across clusters do
        not overlap, so their times add up.
        """
        if size > self.chunk_bytes:
            return self.once.seconds(size)  # many chunks, whose steps overlap
        relay_byte_s = 2 * self.relay_byte_s  # of the reduce step and the gather step
        # No chunk follows that would wait, so the price of waiting (part of `across`) is taken off again.
        byte_s = self.inside.byte_s + self.across.byte_s + relay_byte_s - self._stall_byte_s
        # Price(seconds per byte, latency in seconds); a sum of prices adds up both.
        single_chunk = Price(byte_s, self.inside.latency_s + self.across.latency_s)
        return (single_chunk + self.weight_gather).seconds(size)

    def with_best_chunks(self, size: float) -> Hierarchical:
        """Return this reduction with the chunk size that is fastest for a sum of `size` bytes.

        Candidates are the present chunk size, twice, four times ... of it. Small chunks keep the
        networks inside and across clusters busy at the same time. Large chunks pay the latency
        across clusters less often, if each chunk waits until its predecessor has arrived (`stalls`).
        """
        if not self.stalls or self.across.latency_s < HIDDEN_LATENCY_S:
            return self  # chunks do not add their latencies, or these are too short to matter
        candidates = [self]
        while candidates[-1].chunk_bytes < size:
            doubled = 2 * candidates[-1].chunk_bytes
            candidates.append(replace(self, chunk_bytes=doubled))
        return min(candidates, key=lambda candidate: candidate.seconds(size))

    def flows(self, sizes: Sequence[float], tag: Tag, most: int) -> list[list[Flow]]:
        """Return the transfers that reduce buckets of gradients: four for each chunk.

        These are a reduce-scatter inside each cluster, a reduce across clusters, a gather across
        clusters, and an all-gather inside each cluster. All simulated chunks have an equal part of
        all bytes. The sizes of the buckets decide only how many chunks there are, as a chunk never
        spans buckets.

        Args:
            sizes: Bytes of each bucket of gradients.
            tag: Name of the last transfer of the last chunk.
            most: Largest number of chunks to simulate. If there are more, the simulated chunks are
                larger than the real chunks.

        Returns:
            For each chunk, its four transfers. The end of each transfer starts the next.
        """
        # chunks_of: bytes / chunk_bytes rounded down, at least 1
        real_chunks = sum(chunks_of(size, self.chunk_bytes) for size in sizes)
        chunks = min(most, real_chunks)
        # On a ring or a tree of clusters, a cluster forwards a chunk only after it has received all
        # of it. This delay counts as a longer latency. It depends on the real size of a chunk, even
        # if larger chunks are simulated.
        real_chunk_bytes = sum(sizes) / real_chunks
        relay_s = self.relay_byte_s * real_chunk_bytes
        chains = []
        for chunk in range(chunks):
            chain = self._chain(
                size=sum(sizes) / chunks,
                wan_latency_s=self.wan_latency_s + relay_s,
                tag=tag,
                chunk=chunk,
                is_last=chunk == chunks - 1,
            )
            chains.append(list(chain))
        return chains

    def _chain(
        self, size: float, wan_latency_s: float, tag: Tag, chunk: int, is_last: bool
    ) -> Iterator[Flow]:
        """Yield the four transfers that all-reduce a chunk of the gradients.

        They are a reduce-scatter inside each cluster, a reduce across clusters, a gather across
        clusters, and an all-gather inside each cluster. The end of each transfer starts the next.
        The chunks follow each other through each of the four steps. If `self.stalls` is set, a chunk
        is sent to another cluster only after the chunk before it has arrived there.

        Args:
            size: Bytes of the chunk.
            wan_latency_s: Seconds between the end of sending a chunk to another cluster and its
                arrival, beyond the latency of the fabric.
            tag: Name of the last transfer of the last chunk. Its first three elements name the
                reduction (collective, number of the stage, classes of equal pipelines); the others
                tell the buckets of gradients apart.
            chunk: Number of the chunk.
            is_last: Whether this is the last chunk.
        """
        reduction = tag[:3]  # without the bucket: all buckets of a stage share the channels
        # Reduce-scatter inside, reduce across, gather across, all-gather inside.
        steps = [self.inside_loads, (self.reduce_across,), (self.gather_across,), self.inside_loads]
        names: list[Tag] = [(*tag, chunk, step) for step in range(len(steps))]
        if is_last:
            names[-1] = tag
        followers = (*names[1:], None)  # name of the transfer that each transfer starts
        for step, loads in enumerate(steps):
            crosses = loads is not self.inside_loads
            yield Flow(
                loads=loads,
                # Across clusters, compression leaves this part of the bytes.
                sizes=(self.compressed_share * size if crosses else size,),
                tag=names[step],
                channel=(reduction, step),  # chunks take the same step in sequence
                then=followers[step],
                chained=True,  # a step of a chunk; `then` starts the next step
                wan_latency_s=wan_latency_s if crosses else 0.0,
                awaits_arrival=self.stalls and crosses,
            )

    def streams(self, network: Network, crossing_groups: float) -> int:
        """Return how many TCP streams a pair of ranks needs to fill its share of the links between clusters.

        A single stream is often slower than the link, because of the latency. Pairs of ranks share
        the sender's NIC and the link, so each pair can use only a part of them. The result is
        enough streams for the part STREAM_SHARE of this rate. The link that needs most streams
        decides; MOST_STREAMS is the limit. Links without measured rates are left out.

        Args:
            network: The site, with measured rates of links and of a single stream.
            crossing_groups: Number of groups that cross at the same time.
        """
        assert self.reduce_across.fabric is not None
        # `senders` ranks of a node send across at the same time; each has this share of the NIC.
        nic_bps = self.reduce_across.fabric.rate_bps / self.senders
        count = 1

        # route.halves: for the reduce and the gather step, (from cluster, to cluster) -> bytes per
        # byte of the sum. Both steps use the same links, so the first is enough.
        reduce_volumes, _ = self.route.halves
        for source, target in reduce_volumes:
            # The link of cluster.toml between two clusters; None if it lists none.
            link = network.wan.pair_of.get((source, target))
            if link is None or not link.stream_bps or not link.rate_bps:
                continue
            # Pairs of ranks that share the link: each rank of the smaller cluster sends to a rank of
            # the larger cluster.
            rank_pairs = crossing_groups * min(self.ranks[source], self.ranks[target])
            pair_bps = min(nic_bps, link.rate_bps / rank_pairs)  # the most that a pair can use
            count = max(count, ceil(STREAM_SHARE * pair_bps / link.stream_bps))
        return min(count, MOST_STREAMS)

    def faster_from(self, flat: PricedReduction) -> int | None:
        """Return the least number of bytes for which this reduction is faster than `flat`.

        Returns:
            A power of two, 0 if it is always faster, or None if it is slower for 1 GiB.
        """
        slower = [size for size in _COMPARED_BYTES if self.seconds(size) >= flat.seconds(size)]
        if not slower:
            return 0
        largest_slower = slower[-1]
        if largest_slower == _COMPARED_BYTES[-1]:
            return None
        return 2 * largest_slower  # the next size that was compared


class _HierarchicalRequest(NamedTuple):
    """Arguments of `hierarchical` except the size of the sum, as a key for cached results."""

    family: GroupFamily  # equal groups; each sums its gradients
    direct: bool  # whether the steps are gloo's direct exchanges; else NCCL's rings
    #: Number of all groups that cross between clusters at the same time. 0: count only those of the
    #: family.
    groups: float
    compress: str  # compression across clusters: "off", "bf16" or "int8"
    inside_bps: float  # bits/s between the GPUs of a node; 0: not known
    spread: bool  # whether some cluster must have several nodes of a group
    chunk_bytes: int  # size of a chunk; 0: the size that suits the network


class _ClusterMembers(NamedTuple):
    """Nodes and ranks of a group, by cluster."""

    parts: dict[str, list[GroupPart]]  # cluster -> its nodes in the group
    ranks: dict[str, int]  # cluster -> its ranks in the group


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
    """Return the fastest hierarchical all-reduce of equal groups (a family), or None if it has no use.

    It reduces inside every cluster, then across clusters, and distributes the sum inside again. It
    has no use if the groups lie in a single cluster, or if a flat ring sends as little across clusters.

    Args:
        network: The site.
        family: Equal groups; each sums its gradients.
        size: Bytes of the sum for which the route and the chunks are chosen.
        direct: Whether the steps are gloo's direct exchanges; else they are NCCL's rings.
        groups: Number of all groups that cross between clusters at the same time. 0: count only the
            groups of this family (for the simulation, which adds the loads of other groups itself).
        compress: Compression across clusters: "off", "bf16" or "int8".
        inside_bps: Bits/s between the GPUs of a node.
        spread: Whether some cluster must have several nodes of the group. With a single node in every
            cluster, a hierarchical all-reduce sends as much across clusters as a flat ring, so it
            saves nothing.
        chunk_bytes: Size of a chunk; 0 for the size that suits the network.
    """
    request = _HierarchicalRequest(
        family, direct, groups, compress, inside_bps, spread, chunk_bytes
    )
    # Computed once for each key. Without a WAN the result does not depend on the size.
    key = "a hierarchical all-reduce", request, size if network.wan else 0.0
    return network.remember(key, lambda: _hierarchical(network, size, request))


def _hierarchical(
    network: Network, size: float, request: _HierarchicalRequest
) -> Hierarchical | None:
    """Return the hierarchical all-reduce with the fastest route across clusters for `size` bytes.

    A route is the algorithm that adds up the clusters' sums: direct exchanges between all clusters, a ring
    or a tree of clusters. The result is None if this is not possible, or if it sends no less than a flat
    ring.
    """
    members = _by_cluster(network, request.family)  # nodes and ranks of a group in each cluster
    if not _can_be_hierarchical(network, request, members):
        return None
    clusters = tuple(members.parts)  # names of the clusters, the keys of `parts`
    if request.direct:
        routes = ways_across(network.wan, clusters)  # direct exchanges first, then rings and trees
    else:
        # NCCL's all-reduce is a ring.
        algorithm = "ring" if network.wan else "direct"
        routes = (CrossClusterAlgorithm(algorithm, clusters),)
    if request.compress != "off":
        routes = routes[:1]  # compressed sums take the first route, "direct" or NCCL's ring, only

    # By cluster with several ranks: load of a reduce-scatter or an all-gather inside it.
    inside_loads = tuple(
        _step_inside_cluster(network, request, members.parts[cluster], members.ranks[cluster])
        for cluster in clusters
        if members.ranks[cluster] > 1
    )
    candidates = []
    for route in routes:
        candidate = _priced_route(network, request, members, route, inside_loads)
        if not request.chunk_bytes:  # choose the fastest chunk size for a sum of `size` bytes
            candidate = candidate.with_best_chunks(size)
        candidates.append(candidate)
    default, *_ = candidates  # "direct", or NCCL's ring; kept if another gains only a little
    best = min(candidates, key=lambda candidate: candidate.seconds(size))
    is_worth_it = best.seconds(size) < OTHER_ROUTE_SHARE * default.seconds(size)
    return best if is_worth_it else default


def _by_cluster(network: Network, family: GroupFamily) -> _ClusterMembers:
    """Return the nodes and the number of ranks that each of several equal groups has in each cluster."""
    parts: dict[str, list[GroupPart]] = {}
    for part in family.parts:  # sets of equal nodes of a group
        parts.setdefault(network.cluster(part.node_type), []).append(part)
    ranks = {
        cluster: sum(part.nodes * part.ranks_per_node for part in cluster_parts)
        for cluster, cluster_parts in parts.items()
    }
    return _ClusterMembers(parts, ranks)


def _can_be_hierarchical(
    network: Network, request: _HierarchicalRequest, members: _ClusterMembers
) -> bool:
    """Return whether a hierarchical all-reduce is possible and sends less than a flat ring.

    Args:
        network: The site.
        request: The groups, and how they reduce.
        members: Nodes and ranks of a group, by cluster.
    """
    is_in_one_cluster = len(members.parts) <= 1
    if is_in_one_cluster:
        return False

    # For each cluster with several nodes of the group: these nodes.
    with_several_nodes = [
        parts for parts in members.parts.values() if sum(part.nodes for part in parts) > 1
    ]

    # With a single node in every cluster, no step inside clusters takes bytes off the slow network: a
    # flat ring already adds up the ranks of a node first. `spread` requires more nodes than that.
    if request.spread and not with_several_nodes:
        return False

    # NCCL's steps need equally many ranks in each cluster. `uneven` networks ignore that: lower
    # bounds may use a reduction that is faster than any possible one.
    has_equal_ranks = len(set(members.ranks.values())) == 1
    if not (request.direct or network.uneven or has_equal_ranks):
        return False
    fabric_across = network.fabric(request.family.node_types)  # the fastest that all nodes share
    fabrics_inside = {
        network.fabric(part.node_type for part in parts) for parts in with_several_nodes
    }

    # If a cluster uses the same fabric inside and across, a flat ring sends as little over the NICs.
    # But on a WAN, the links between clusters are slower than the NICs, so saving bytes there pays.
    return fabric_across not in fabrics_inside or bool(network.wan)


def _priced_route(
    network: Network,
    request: _HierarchicalRequest,
    members: _ClusterMembers,
    route: CrossClusterAlgorithm,
    inside_loads: tuple[Load, ...],
) -> Hierarchical:
    """Return the hierarchical all-reduce that uses a given algorithm across clusters.

    Args:
        network: The site.
        request: The groups, and how they reduce.
        members: Nodes and ranks of a group, by cluster.
        route: Algorithm that adds up the clusters' sums: direct exchanges, a ring or a tree.
        inside_loads: For each cluster with several ranks of a group: the load of a reduce-scatter
            (or an all-gather, which is equal) among these ranks.
    """
    # route.halves: traffic between clusters in the reduce step, and in the gather step. The load of
    # a step is its use of NICs and links, for each byte of the sum.
    reduce_across, gather_across = (
        _step_across_clusters(network, request, members, volumes) for volumes in route.halves
    )
    fabric = reduce_across.fabric
    assert fabric is not None

    def latency_s(pair: Pair) -> float:
        """Return the latency between two clusters: of the links between them, if any, or of the fabric."""
        wan_s = sum(hop.latency_s for hop in network.wan.hops(*pair))
        return wan_s or fabric.latency_s

    share = SHARES[request.compress]  # bytes on the wire for each byte of gradients
    if request.compress != "off" and not request.direct:
        # Compressed NCCL groups all-gather the sums of all C clusters, as NCCL cannot add compressed
        # numbers. A rank then receives C - 1 sums, in place of 2 (C - 1) / C in a ring: C / 2 times.
        share *= len(members.parts) / 2

    # Size of a chunk that fits the number of ranks in the smallest cluster.
    suitable_bytes = chunk_bytes(min(members.ranks.values()), request.direct)
    return Hierarchical(
        inside_loads=inside_loads,
        reduce_across=reduce_across,
        gather_across=gather_across,
        chunk_bytes=request.chunk_bytes or suitable_bytes,
        route=route,
        ranks=members.ranks,
        # Latency of all messages of a step that follow each other, given that between two clusters.
        step_latency_s=route.latency_s(latency_s),
        compressed_share=share,
        wan_latency_s=route.latency_s(lambda pair: network.wan_latency_s(fabric, pair)),
        relay_byte_s=_relay_byte_s(network, fabric, route, members.ranks),
        # gloo's direct exchanges over a WAN send a chunk only after the previous one has arrived.
        stalls=bool(network.wan) and request.direct and route.algorithm == "direct",
        # Ranks of the busiest node that send across at the same time.
        senders=max(_sending_ranks(part, request.groups) for part in request.family.parts),
    )


def _relay_byte_s(
    network: Network, fabric: Fabric, route: CrossClusterAlgorithm, ranks: Mapping[str, int]
) -> float:
    """Return by how many seconds forwarding lengthens a step across clusters, for each byte to sum.

    On a ring or a tree of clusters, data pass several links in sequence: a cluster forwards a message
    after it has received all of it. So a step takes as long as the messages on its longest path. The
    price of a step already contains the time of its busiest link. The result is the difference.

    Args:
        network: The site.
        fabric: Fabric between the clusters.
        route: Algorithm that adds up the clusters' sums.
        ranks: Cluster -> number of the group's ranks in it.
    """

    def message_s(pair: Pair) -> float:
        """Return the seconds of a message between two clusters, for each byte of the gradients to sum.

        A message carries the part `route.message_share` of the bytes of the gradients.
        """
        # The ranks of the smaller cluster send through their NICs at the same time.
        rates_bps: list[float] = [fabric.rate_bps * min(ranks[cluster] for cluster in pair)]
        # Links and uplinks between the two clusters.
        rates_bps += [hop.rate_bps for hop, _ in network.hops(fabric, {pair: 1.0})]
        return 8 * route.message_share / min(rates_bps)  # the slowest limits the rate

    # route.halves: for the reduce and the gather step, (from cluster, to cluster) -> bytes for each
    # byte of the sum. The gather step has the same numbers, in a tree in the opposite direction.
    reduce_volumes, _ = route.halves

    # Seconds of all messages on each link. A message carries `message_share` of the sum, so
    # volume / message_share is the number of messages.
    busy_s = [
        message_s(pair) * volume / route.message_share for pair, volume in reduce_volumes.items()
    ]

    # route.latency_s(f) adds up f(link) along the longest path of data through the clusters. f is
    # usually the latency of a link. Here it is the time of a message, so the result is the time of
    # all messages that follow each other.
    longest_path_s = route.latency_s(message_s)
    return max(0.0, longest_path_s - max(busy_s))


def _sending_ranks(part: GroupPart, groups: float) -> float:
    """Return how many ranks of a node send at the same time, and so share its NIC.

    Args:
        part: Equal nodes of a group.
        groups: 0: count only ranks in groups equal to this group (for the simulation, which adds the
            loads of other groups itself). Any other number: count the ranks of all groups and
            stages on the node. The number itself does not matter.
    """
    counts_all_groups = groups > 0
    # concurrent_groups: groups of all families and stages with ranks on the node
    groups_on_node = part.concurrent_groups if counts_all_groups else part.groups
    return part.ranks_per_node * groups_on_node


def _step_inside_cluster(
    network: Network, request: _HierarchicalRequest, parts: Sequence[GroupPart], ranks: int
) -> Load:
    """Return the load of a reduce-scatter or an all-gather among a group's ranks in a single cluster.

    It is a step of a hierarchical all-reduce.

    Args:
        network: The site.
        request: The groups, and how they reduce: with gloo's exchanges (`direct`) or NCCL's rings.
        parts: Nodes of a group in the cluster.
        ranks: Ranks of a group in the cluster.
    """
    nodes = sum(part.nodes for part in parts)
    ring_volume = (ranks - 1) / ranks  # bytes that a rank sends, for each byte of the sum
    if nodes == 1:
        return Load(inside_bps=request.inside_bps, volume=ring_volume)
    family = request.family
    fabric = network.fabric(part.node_type for part in parts)  # the fastest that the nodes share

    # Node class -> groups that share a NIC. concurrent_groups counts all groups on the node, `groups`
    # only those of this family (if request.groups is 0, for the simulation).
    flows = {
        part.node_class: float(part.concurrent_groups if request.groups else part.groups)
        for part in parts
    }
    cpu_messages = 0.0
    if request.direct:
        # Every rank sends each other rank its part (1 / ranks of the sum). The parts for ranks of
        # other nodes pass the NIC. All messages are sent at the same time, so the latency counts once.
        ranks_per_node = max(part.ranks_per_node for part in parts)
        volume = ranks_per_node * (ranks - ranks_per_node) / ranks
        messages = 1
        # Of all groups: every rank to every other.
        cpu_messages = family.count * ranks * (ranks - 1)
    else:
        volume = ring_volume
        messages = ranks - 1
    return Load(
        nics=network.both_ways(fabric, flows),  # NICs in both directions, with their flows
        fabric=network.line(fabric),  # with the measured rate and latency
        volume=volume,
        messages=messages,
        message_share=1 / ranks,
        ring=not request.direct,
        crosses_clusters=True,  # as a part of a reduction that crosses
        senders=family.count * nodes,  # each node copies `volume` bytes for each byte of the sum
        cpu_messages=cpu_messages,
    )


def _step_across_clusters(
    network: Network,
    request: _HierarchicalRequest,
    members: _ClusterMembers,
    volumes: Mapping[Pair, float],
) -> Load:
    """Return the load of a step across clusters, which either sums or distributes the total.

    The ranks of a cluster share its bytes evenly, so all of its NICs send.

    Args:
        network: The site.
        request: The groups, and how they reduce.
        members: Nodes and ranks of a group by cluster.
        volumes: (from cluster, to cluster) -> bytes that a group sends for each byte of the sum.
    """
    family = request.family
    fabric = network.fabric(family.node_types)  # the fastest that all nodes of a group share
    # Cluster -> bytes that each of its ranks sends or receives, for each byte of the sum.
    sent_by: dict[str, float] = defaultdict(float)
    received_by: dict[str, float] = defaultdict(float)
    for (source, target), volume in volumes.items():
        sent_by[source] += volume / members.ranks[source]
        received_by[target] += volume / members.ranks[target]
    nics: list[tuple[Nic, float]] = []  # with the flows that each NIC carries
    for direction, volume_of in (("out", sent_by), ("in", received_by)):
        for cluster, parts in members.parts.items():
            if cluster not in volume_of:
                continue  # no traffic in this direction (the root or a leaf of a tree)
            for part in parts:
                # Ranks of a node that send at the same time, each with this volume.
                flows = _sending_ranks(part, request.groups) * volume_of[cluster]
                # Nodes of the same class are equally busy, so a single entry is enough.
                nics.append(((part.node_class, fabric.name, direction), flows))
    groups = request.groups or family.count

    # Bytes between clusters for each byte of a sum, of all groups that cross at once.
    crossing = {pair: volume * groups for pair, volume in volumes.items()}
    # Each rank of the larger cluster of a pair sends or receives a message.
    messages = sum(max(members.ranks[cluster] for cluster in pair) for pair in volumes)
    return Load(
        nics=tuple(nics),
        hops=network.hops(fabric, crossing),  # links between clusters, with their flows
        fabric=network.line(fabric),  # with the measured rate and latency
        message_share=max(sent_by.values()),  # of the largest message; each rank sends a message
        crosses_clusters=True,
        # CPU time grows with the bytes: as many messages as if each carried the whole sum.
        senders=family.count * sum(volumes.values()),
        cpu_messages=family.count * messages,
    )


#: Seconds or bytes: a number for each type of layer (embedding, block, output).
Row = tuple[float, ...]
#: ZeRO stages, by what they shard besides that of the stage before.
ZERO_OPTIMIZER, ZERO_GRADIENTS, ZERO_WEIGHTS = 1, 2, 3


@dataclass(frozen=True)
class Sharded(PricedReduction):
    """Collectives of sharded training (ZeRO, FSDP): their prices, once a step or in each pass.

    All prices are derived from that of a ring all-reduce among the ranks that share the shards:
    `load`. A reduce-scatter or an all-gather takes half of its time (see scatter_share).
    """

    zero: int = ZERO_OPTIMIZER  # ZeRO stage
    weight_bytes_per_gradient_byte: float = 0.5  # in the dtypes in which they are sent
    scatter_share: float = 0.5  # time of a reduce-scatter, as a part of an all-reduce's
    #: Hybrid sharding: all-reduce of a shard's gradient among the clusters, and number of shards.
    across: Load | None = None
    shards: int = 1
    regathered_share: float = 1.0  # ZeRO 3: part of the weights gathered again in the backward pass

    @property
    def gather(self) -> Price:
        """Return the price of gathering all weights, per byte of their gradients."""
        all_gather = self.load.price.scaled(0.5)  # half of the time of a ring all-reduce
        return Price(self.weight_bytes_per_gradient_byte * all_gather.byte_s, all_gather.latency_s)

    @property
    def scatter(self) -> Price:
        """Return the price of reduce-scattering all gradients, per byte of gradients."""
        return self.load.price.scaled(self.scatter_share)  # `load` is a ring all-reduce

    @property
    def shard_sum(self) -> Price:
        """Return the price of all-reducing shards across clusters, per byte of all gradients.

        Only hybrid sharding needs it: every cluster has all shards, and the ranks that hold the
        same shard in different clusters sum its gradient. It is free otherwise.
        """
        if self.across is None:
            return FREE
        # Each rank sums only its shard: 1 / shards of the gradients.
        return Price(self.across.price.byte_s / self.shards, self.across.price.latency_s)

    @property
    def once(self) -> Price:
        """Return the price of the collectives that run once a step, per byte of gradients.

        ZeRO 2 and 3 have further collectives in each micro-batch (see `passes`).
        """
        # A sum of prices adds up seconds per byte and latencies.
        if self.zero == ZERO_OPTIMIZER:
            return self.scatter + self.shard_sum + self.gather
        if self.zero == ZERO_GRADIENTS:
            return self.gather
        return FREE

    def passes(
        self, forward: Row, backward: Row, sizes: Row, repeats: Sequence[int], prefetch: bool
    ) -> tuple[Row, Row]:
        """Return the seconds of a layer's forward and backward pass, including collectives in each pass.

        ZeRO 3 gathers the layer's weights before both passes. ZeRO 2 and 3 reduce-scatter its
        gradients after the backward pass. With hybrid sharding, the shards' gradients are then
        summed across clusters.

        Args:
            forward: Seconds of computation in the forward pass, of each type of layer (such as
                embedding, block and output, in the order of the model).
            backward: The same of the backward pass.
            sizes: Bytes of the gradients of a layer of each type.
            repeats: Number of layers of each type.
            prefetch: Whether the collectives of a layer overlap with the computation of another.

        Returns:
            Seconds of each type of layer in the forward pass, and in the backward pass.
        """
        if self.zero < ZERO_GRADIENTS:
            return forward, backward  # ZeRO 1 has no collectives in a micro-batch
        gather = self.gather if self.zero == ZERO_WEIGHTS else FREE
        backward_gather = gather.scaled(self.regathered_share)

        # Seconds of each collective, by type of layer.
        gather_s = _seconds_of(gather, sizes)
        backward_gather_s = _seconds_of(backward_gather, sizes)
        scatter_s = _seconds_of(self.scatter, sizes)
        shard_sum_s = _seconds_of(self.shard_sum, sizes)
        if not prefetch:  # computation and collectives follow each other
            forward_s = _sum_by_element(forward, gather_s)
            return forward_s, _sum_by_element(backward, backward_gather_s, scatter_s, shard_sum_s)

        # Gathers and scatters share a NIC: their bytes add up, and the shorter latency is hidden.
        gather_and_scatter = Price(
            byte_s=backward_gather.byte_s + self.scatter.byte_s,
            latency_s=max(backward_gather.latency_s, self.scatter.latency_s),
        )

        # The backward pass begins with the last layer, whose weights no computation hides. It ends
        # with the first layer, and nothing follows that could hide the sum of its gradients.
        exposed_s = backward_gather_s[-1] + scatter_s[0] + shard_sum_s[0]

        # Activities of a list run at the same time, so the longest is the time of the pass.
        forward_activities = [
            _Activity(forward, exposed_s=gather_s[0]),
            _Activity(gather_s, exposed_s=forward[-1]),
        ]
        backward_activities = [
            _Activity(backward, exposed_s=exposed_s),
            _Activity(_seconds_of(gather_and_scatter, sizes)),
            _Activity(shard_sum_s),
        ]
        return _row_of_longest(forward_activities, repeats), _row_of_longest(
            backward_activities, repeats
        )


class _Activity(NamedTuple):
    """Work in a pass over all layers that overlaps with other work.

    It is the computation of all layers, or the use of a network by their collectives.
    """

    layer_s: Row  # seconds of a layer of each type
    exposed_s: float = 0.0  # seconds before or after it that overlap with nothing


def _seconds_of(price: Price, sizes: Row) -> Row:
    """Return the seconds that a collective takes for each of several numbers of bytes."""
    return tuple(map(price.seconds, sizes))


def _sum_by_element(*rows: Row) -> Row:
    """Add up rows of numbers element by element."""
    return tuple(map(sum, zip(*rows)))


def _row_of_longest(activities: Sequence[_Activity], repeats: Sequence[int]) -> Row:
    """Return the seconds of each type of layer, so that their total is the time of the pass.

    A pass runs several activities at the same time: computation, and the use of networks. Each has
    seconds for a layer of each type, and exposed seconds that overlap with nothing. The activity
    with the longest total sets the time of the pass, so the result has the seconds of this activity.
    Its exposed seconds belong to no layer. They are divided among the layers of the first type,
    because only the total of the pass counts.

    Args:
        activities: Activities that run at the same time.
        repeats: Number of layers of each type.
    """

    def total_s(activity: _Activity) -> float:
        """Return the seconds of an activity in a pass, over all layers."""
        layers_s = sum(seconds * count for seconds, count in zip(activity.layer_s, repeats))
        return layers_s + activity.exposed_s

    slowest = max(activities, key=total_s)
    # Each layer of the first type gets an equal part of the exposed seconds.
    first_s = slowest.layer_s[0] + slowest.exposed_s / repeats[0]
    return first_s, *slowest.layer_s[1:]


def inside_clusters(network: Network, family: GroupFamily) -> list[GroupFamily]:
    """Divide equal groups by cluster: return a family of smaller groups for each cluster.

    Hybrid sharding shards among the ranks of such a smaller group.

    Args:
        network: The site.
        family: The equal groups.

    Returns:
        For each cluster, a family with the groups' ranks in this cluster. []: the groups lie in a
        single cluster, or a group has more ranks in some clusters than in others.
    """
    # By cluster: nodes of a group in it (`parts`, in sets of equal nodes), and number of its ranks.
    members = _by_cluster(network, family)
    sizes = set(members.ranks.values())
    is_in_one_cluster = len(members.parts) <= 1
    if is_in_one_cluster or len(sizes) > 1:
        return []
    (ranks,) = sizes  # the only number of ranks, of every cluster
    families = []
    for parts in members.parts.values():
        # Nodes that a ring through the ranks visits: (node type, number that follow each other).
        ring = tuple((part.node_type, part.nodes) for part in parts)
        families.append(replace(family, ranks=ranks, parts=tuple(parts), ring=ring))
    return families


def owners(network: Network, family: GroupFamily) -> GroupFamily:
    """Return the groups of ranks that own the same shard under hybrid sharding, a rank in each cluster.

    Hybrid sharding divides the model among the ranks of each cluster. So every cluster has all shards, and
    the owners of a shard in different clusters all-reduce its gradients. A data-parallel group with n
    ranks in each cluster has n shards, so it contains n groups of owners.

    Args:
        network: The site.
        family: Equal data-parallel groups, with equally many ranks in every cluster.
    """
    # Cluster -> the first of its node sets (GroupPart: equal nodes of a group). It stands for all of
    # the cluster: with equally many ranks on each node, the NICs are equally busy.
    first_of: dict[str, GroupPart] = {}
    for part in family.parts:
        first_of.setdefault(network.cluster(part.node_type), part)
    parts = tuple(
        replace(
            part,
            nodes=1,
            ranks_per_node=1,
            # An old group with n ranks on a node becomes n new groups, one for each of these ranks.
            # `groups` counts those of this family, `concurrent_groups` those of all families.
            groups=part.ranks_per_node * part.groups,
            concurrent_groups=part.ranks_per_node * part.concurrent_groups,
        )
        for part in first_of.values()
    )
    shards = family.ranks // len(parts)  # ranks of a group in each cluster
    return replace(
        family,
        ranks=len(parts),
        count=family.count * shards,
        parts=parts,
        ring=tuple((part.node_type, 1) for part in parts),
    )


def tied_weight_families(fold: Fold) -> Iterator[GroupFamily]:
    """Yield groups that can sum the gradient of a weight shared by the first and the last stage.

    Such a group has all ranks of both stages with the same part of the weight: a data-parallel
    group of the first stage, and the group of the same pipelines in the last stage. Groups of the
    first stage without such a counterpart are left out. Equal groups are yielded together, as a
    GroupFamily.

    Args:
        fold: A compact placement: it has a pipeline of each class. Pipelines on equal nodes form a
            pipeline class.
    """
    # Both stages have a rank of every pipeline. So the groups of the same pipelines are found by
    # their pipeline classes, and there are equally many in both stages.
    last_families = fold.families(fold.stages[-1])
    last_of_classes = {family.pipeline_classes: family for family in last_families}
    for first in fold.families(0):
        last = last_of_classes.get(first.pipeline_classes)
        if last is None:
            continue
        yield GroupFamily(
            stage=0,
            ranks=first.ranks + last.ranks,
            count=first.count,  # the count of `last` is the same
            parts=first.parts + last.parts,
            pipeline_classes=first.pipeline_classes,
            ring=first.ring + last.ring,  # nodes of the first stage, then those of the last
        )


def by_pairs(
    network: Network, fold: Fold, pipeline: int, inside_bps: float = 0.0
) -> PricedReduction:
    """Return the price of summing a tied weight's gradient between pairs of ranks.

    The first and the last stage both have a tied weight. In each pipeline, the rank of the first
    stage and the rank of the last stage are a pair, and exchange their gradients with each other.

    Args:
        network: The site.
        fold: A compact placement. Pipelines on equal nodes are a class, with an index.
        pipeline: Index of the class of the pipelines.
        inside_bps: Bits/s between the GPUs of a node; 0: not known, counts as free.
    """
    # Messages from the first to the last stage, of this class only.
    messages = fold.stage_link(pipeline, 0, fold.stages[-1])
    # pairwise: load of an all-reduce between the two ranks of each pair
    return PricedReduction(network.pairwise(messages, inside_bps), name="pairs")


def tied_hierarchical(
    network: Network,
    family: GroupFamily,
    size: float,
    direct: bool,
    groups: float,
    inside_bps: float = 0.0,
) -> Hierarchical | None:
    """Return the hierarchical all-reduce of a tied weight's gradient, or None if it is not possible.

    The weight is on the first and the last stage. The all-reduce is possible if each of the two stages
    lies in a single cluster, the two clusters differ, and a group has two or more ranks on each stage.
    Training without holmes (a network with `single_fabric`) never reduces hierarchically.

    Args:
        network: The site.
        family: Equal groups that have the ranks of both stages. Their `ring` lists the nodes of the
            first stage, then those of the last stage.
        size: Bytes of the gradient.
        direct: Whether the steps are gloo's direct exchanges; else they are NCCL's rings.
        groups: Number of all groups that cross between clusters at the same time. 0: count only the
            groups of this family (for the simulation, which adds the loads of other groups itself).
        inside_bps: Bits/s between the GPUs of a node.
    """
    clusters = [network.cluster(node_type) for node_type, _ in family.ring]
    # Ranks of a group in the cluster where the ring begins.
    first_ranks = sum(
        part.nodes * part.ranks_per_node
        for part in family.parts
        if network.cluster(part.node_type) == clusters[0]
    )
    borders = sum(cluster != following for cluster, following in zip(clusters, clusters[1:]))

    # Each stage has half of the ranks. So each lies in a single cluster if the cluster changes once
    # along the ring, in the middle.
    are_apart = _TIED_STAGES * first_ranks == family.ranks and borders == 1
    has_single_pair = family.ranks == _TIED_STAGES  # one rank on each stage
    is_without_holmes = network.single_fabric is not None
    if is_without_holmes or has_single_pair or not are_apart:
        return None
    return hierarchical(
        network,
        family,
        size,
        direct=direct,
        groups=groups,
        compress="off",
        inside_bps=inside_bps,
        # It pays with a single node in each cluster, too: otherwise each rank sends the whole
        # gradient.
        spread=False,
    )
