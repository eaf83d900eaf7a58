"""What no placement of a shape beats: all clusters' stages together, and the least that must cross between
clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import inf

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.plan.cost.model import in_flight
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import SHARES
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape


class ShapeBound:
    """Of one shape. seconds: that no placement beats; inf where no stages have room for the layers."""

    def __init__(self, network: Network, prices: Prices, shape: Shape):
        self.network, self.prices, self.shape = network, prices, shape
        self.job, self.size = prices.job, network.world // shape.pipeline
        self.sizes = shape.sizes().complete(network.world)
        self.ranks = [len(names) * network.processes for names in network.names]

    @property
    def seconds(self) -> float:
        return max(self.computing_s(), self.crossing_s())

    def computing_s(self) -> float:
        """Each kind of node's stages compute and talk inside stages as if they were alone, layers are
        divisible, activations take the fastest network, and little is reduced."""
        shape, layers = self.shape, self.job.blocks
        alone = [self._alone(kind) for kind in range(len(self.ranks))]
        forward, work = [f for f, _, _ in alone], [both for _, both, _ in alone]
        if not self._has_room(max(limit for _, _, limit in alone)):
            return inf
        stages = [ranks / self.size for ranks in self.ranks]
        m, stage_link, stage_links = shape.micro_batches, self.stage_link_s(), shape.pipeline - 1
        reductions = [self._reduction_s(kind) for kind in range(len(self.ranks))]
        if shape.virtual > 1:
            return self._interleaved_s(stages, forward, work, reductions, stage_link)
        room = sum(count / seconds for count, seconds in zip(stages, work))
        share = max(f / seconds for f, seconds in zip(forward, work))
        share = min(1.0, share * 1.2)  # embedding and output may have a greater one
        async_stage_links = self.prices.hide_stage_links
        ahead = (
            m if async_stage_links and stage_links else min(shape.pipeline, m)
        )  # at most, whatever the stage links are
        load = self.stage_link_s(latency=False) if async_stage_links else stage_link
        once, rounds = layers * min(work) + 2 * stage_links * stage_link, (m - 1) // ahead + 1
        weight = max(0.0, m - 1 - (ahead - 1) * share)
        # after its last backward, which may hide as much of it, a stage reduces what it holds
        alone_s = [
            m * e - (ahead - 1) * f + max(0.0, r - (e - f)) - f
            for f, e, r in zip(forward, work, reductions)
        ]
        reduced = layers * min(forward) + stage_links * stage_link
        if min(alone_s) > 0:
            reduced += layers / sum(count / seconds for count, seconds in zip(stages, alone_s))
        return max(
            once + weight * layers / room, m * layers / room, rounds * once, m * load, reduced
        )

    def _interleaved_s(
        self,
        stages: Sequence[float],
        forward: Sequence[float],
        work: Sequence[float],
        reductions: Sequence[float],
        stage_link: float,
    ) -> float:
        m, v, pipeline = self.shape.micro_batches, self.shape.virtual, self.shape.pipeline
        stage_blocks, slowest = self.job.blocks / pipeline, max(work) * self.job.blocks / pipeline
        alike = max(
            0.0, sum(count for count, seconds in zip(stages, work) if seconds == max(work)) - 1
        )
        # at most two stage links at each border between clusters leave one: with many more, two
        # neighbouring ones
        # are on one network
        shared_stage_links = 2 if (pipeline - 1) // 2 > 2 * (len(stages) - 1) else 1
        # the last chunk's gradients are the first to be reduced: with the last micro-batch's backward
        late = max(0.0, m - (pipeline * (v - 1) + 1) / v) * min(
            e - f for e, f in zip(work, forward)
        )
        reduced = stage_blocks * (m * min(forward) + late + min(reductions))
        return max(
            slowest * (m + alike / v) + 2 * alike * stage_link,
            m * v * shared_stage_links * stage_link,
            reduced,
        )

    def _alone(self, kind: int) -> tuple[float, float, float]:
        """(forward, forward and backward of a block, memory) of a stage that lies on one kind of node."""
        gpus = self.job.gpu_of(self.network.cluster(kind))

        def collective_s() -> float:
            processes = self.network.processes
            stages, nodes = max(1, processes // self.size), max(1, self.size // processes)
            sizes = replace(self.sizes, pipeline=stages)
            fold, (stage,) = self.prices.fold(Placement(sizes, processes, ((kind, nodes),)), 0)
            return self.prices.collective_s(fold, stage)

        block, sizes = self.job.block, (self.shape.tensor, self.shape.context, self.shape.expert)
        sent = block.tensor_bytes, block.context_bytes, block.expert_bytes
        half = 0.0
        if max(sizes) > 1:
            half = (
                self.network.remember(("alone", kind, self.size, sizes, sent, gpus), collective_s)
                / 2
            )
        forward = self.job.block.forward_flops / gpus.flops + half
        limit = min(gpus.memory_bytes or inf, self.prices.rules.memory_bytes or inf)
        return forward, forward + self.job.block.backward_flops / gpus.flops + half, limit

    def _has_room(self, limit: float) -> bool:
        """Whether the stages could hold all layers with the largest memory, without embedding and output."""
        shape, job = self.shape, self.job
        if limit == inf:
            return True
        room, layers = limit - job.working_bytes, 0
        for stage in range(shape.pipeline):
            keep = in_flight(stage, shape.pipeline, shape.virtual, shape.micro_batches)
            layers += int(max(0.0, room) // (job.state_bytes[1] + keep * job.block.kept_bytes))
            if layers >= job.blocks:
                return True
        return False

    def stage_link_s(self, latency: bool = True) -> float:
        """Of an activation to the next stage at least; 0 where neighbouring stages may share a node."""
        shape, processes = self.shape, self.network.processes
        replica = shape.pipeline * shape.tensor * shape.context
        first = all(ranks % replica == 0 for ranks in self.ranks)
        first = first and any(
            ranks // shape.pipeline % processes for ranks in self.ranks
        )  # pipelines first
        if shape.pipeline == 1 or first or self.size % processes:
            return 0.0
        size = self.job.block.activation_bytes
        slices = self.prices.slices(Placement(self.sizes, processes, ()))
        share = self.job.compressed_share(self.prices.rules.compression) / slices
        kinds = range(len(self.ranks))

        def least() -> float:
            seconds = []
            for fabric in {self.network.fabric((kind, other)) for kind in kinds for other in kinds}:
                part = size * share if fabric.name == ETHERNET else size
                line = self.network.line(fabric)
                seconds.append(8 * processes * part / line.rate_bps + latency * line.latency_s)
            return min(seconds)

        return self.network.remember(("stage_link", size, share, latency), least)

    def _reduction_s(self, kind: int) -> float:
        """Seconds that a stage reduces a block's gradients at least where a cluster has a part in it,
        whatever part: on the cluster's fabric among as few as a hierarchical all-reduce leave there,
        or on Ethernet."""
        shape, network, processes = self.shape, self.network, self.network.processes
        if shape.zero > 1 or self.size % processes or network.wan:
            return 0.0
        kinds = range(len(self.ranks))
        shards, per_node = (
            shape.data * shape.context,
            max(1, min(processes, self.size) // shape.tensor),
        )

        def byte_s(fabric: Fabric, count: int) -> float:
            volume = 2 * (count - 1) / count if count > per_node else 0.0
            return 8 * volume * (processes // per_node) / network.line(fabric).rate_bps

        def least_s() -> float:
            inside, shared = network.fabric([kind]), network.fabric(kinds)
            return min(byte_s(inside, max(1, shards // len(kinds))), byte_s(shared, shards))

        byte_seconds = network.remember(("least reduction", kind, shards, per_node), least_s)
        return byte_seconds * self.job.reduced_bytes[1] * (0.5 if shape.zero else 1.0)

    # ------------------------------------------------------------------- what crosses

    def crossing_s(self) -> float:
        """Of what crosses clusters of equal size where the network between them is not flat; 0 where nothing
        is known.

        Groups of g clusters share stages. The pipeline passes from group to group in g chains, and chains
        over all clusters use as many links as a forest of g trees, whose worst link is at best that of the
        spanning tree without its g - 1 worst ones. Once all micro-batches have passed, gradients are summed:
        the group that holds most layers at least its share, each of its clusters a whole sum (or a flat
        ring's half), over g - 1 links.
        """
        shape, size = self.shape, self.size
        count, ranks = len(self.ranks), self.ranks[0]
        if not self.network.wan or len(set(self.ranks)) > 1 or size % ranks and ranks % size:
            return 0.0
        tree, into, latency_s = self.network.remember(
            "best links", lambda: best_links(self.network)
        )
        latency_s *= not self.prices.hide_stage_links  # under what computes
        every_bit = 8 * shape.micro_batches * self.job.block.activation_bytes / shape.tensor
        every_bit *= self.job.compressed_share(self.prices.rules.compression)
        shards = shape.data * shape.context
        summed = (
            0.0 if self.job.layers[1].expert_parameters else 8 * shape.tensor * self.job.total_bytes
        )
        summed *= (1 - 1 / shards) * SHARES[self.prices.rules.compress]
        bounds_s = []
        for together in (n for n in range(max(1, size // ranks), count + 1) if count % n == 0):
            seconds = 0.0
            if together > 1:
                seconds = summed * together / count / into[together - 2][together - 1]
                around = (
                    self.ring_bits * 2 * (together - 1) / count
                )  # no link of it beats the tree's
                seconds = max(seconds, around / tree[together - 2])
            if together < count:
                slowest = tree[count - together - 1]
                seconds += shape.micro_batches * latency_s + size / together * every_bit / slowest
            bounds_s.append(seconds)
        return min(bounds_s)

    @property
    def ring_bits(self) -> float:
        """Of all gradients, if they go uncompressed round the clusters (so a ring's worst link counts); else
        0: nothing is known."""
        rules, experts = self.prices.rules, self.job.layers[1].expert_parameters
        if rules.direct or self.shape.zero or experts or rules.compress != "off":
            return 0.0
        return 8 * self.shape.tensor * self.job.total_bytes


def rates_between(network: Network) -> dict[tuple[int, int], float]:
    """Bits/s from cluster to cluster: of the slowest hop; inf where they are on one fast network."""
    result = {}
    for pair in permutations(range(len(network.kinds)), 2):
        hops = (
            network.wan.hops(*map(network.cluster, pair))
            if network.fabric(pair).name == ETHERNET
            else ()
        )
        result[pair] = min((hop.rate_bps for hop in hops), default=inf)
    return result


def best_links(network: Network) -> tuple[list[float], list[list[float]], float]:
    """Bits/s of the links of the spanning tree of the best ones (Prim 1957), descending; for 1, 2, ... others
    into each cluster from so many, descending; the least latency."""
    kinds = range(len(network.kinds))
    clusters, rate = [network.cluster(kind) for kind in kinds], rates_between(network)
    paths = [
        network.wan.hops(clusters[source], clusters[target]) if rate[source, target] < inf else ()
        for source, target in rate
    ]
    joined, tree = {0}, []
    while len(joined) < len(kinds):
        border = (pair for pair in rate if pair[0] in joined and pair[1] not in joined)
        inside, outside = max(border, key=rate.__getitem__)
        joined.add(outside)
        tree.append(rate[inside, outside])
    links = [sorted((rate[a, b] for a in kinds if a != b), reverse=True) for b in kinds]
    uplinks = [network.wan.uplink_of.get(name, inf) for name in clusters]
    into = [
        [min(sum(link[:count]), uplink) for link, uplink in zip(links, uplinks)]
        for count in kinds[1:]
    ]
    latency_s = min(sum(hop.latency_s for hop in path) for path in paths)
    return sorted(tree, reverse=True), [sorted(rates, reverse=True) for rates in into], latency_s
