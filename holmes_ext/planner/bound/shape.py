"""Lower bound on the step time of every placement of a shape.

A shape fixes parallel sizes, micro-batch, recomputation and ZeRO stage; the nodes of each stage are still
open. The bound has two parts: computation of all clusters together, and the traffic that must cross between
clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.wan import Hop
from holmes_ext.plan.cost.model import in_flight
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import SHARES
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape

#: Embedding and output layer may have a larger share of forward passes than the blocks.
FORWARD_SHARE_MARGIN = 1.2


class _BlockTimes(NamedTuple):
    """Seconds of one block of a stage that lies on one node type."""

    forward_s: float
    both_s: float  # forward and backward pass
    limit_bytes: float  # memory of a GPU


class BestLinks(NamedTuple):
    """Best rates that any choice of links between clusters can reach."""

    #: Rates of the maximum spanning tree (Prim 1957), fastest first, bits/s.
    tree_bps: list[float]
    #: [n - 1] the rates into each cluster from n others, fastest first, bits/s.
    into_bps: list[list[float]]
    latency_s: float  # the least of all pairs


class ShapeBound:
    """Lower bound on the step time of all placements of one shape."""

    def __init__(self, network: Network, prices: Prices, shape: Shape):
        self.network = network
        self.prices = prices
        self.shape = shape
        self.job = prices.job
        self.stage_ranks = network.world // shape.pipeline
        self.sizes = shape.sizes().complete(network.world)
        #: Ranks of each node type.
        self.ranks = [len(names) * network.processes for names in network.names]

    @property
    def seconds(self) -> float:
        """Lower bound on the step, in seconds; inf if the memory cannot hold the layers."""
        return max(self.computing_s(), self.crossing_s())

    def computing_s(self) -> float:
        """Return a lower bound from the computation of all stages, in seconds; inf if no memory suffices.

        It is a lower bound because each relaxation can only shorten a step: stages compute and communicate
        inside as if each node type were alone, layers are divisible, activations take the fastest
        network, and each kind reduces its gradients in the cheapest way.
        """
        kinds = range(len(self.ranks))
        times = [self._block_times(kind) for kind in kinds]
        if not self._layers_fit(max(kind.limit_bytes for kind in times)):
            return inf
        stage_counts = [ranks / self.stage_ranks for ranks in self.ranks]
        reductions_s = [self._reduction_s(kind) for kind in kinds]
        if self.shape.virtual > 1:
            return self._interleaved_s(stage_counts, times, reductions_s)
        return self._in_1f1b_s(stage_counts, times, reductions_s)

    def _in_1f1b_s(
        self,
        stage_counts: Sequence[float],
        times: Sequence[_BlockTimes],
        reductions_s: Sequence[float],
    ) -> float:
        """Return the lower bound of computing_s() for a 1F1B schedule, in seconds.

        Args:
            stage_counts: Number of stages that the nodes of each kind can hold; may be a fraction.
            times: Times of a block on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
        """
        layers = self.job.blocks
        micro_batches = self.shape.micro_batches
        links = self.shape.pipeline - 1
        link_s = self.stage_link_s()
        hides_links = self.prices.hide_stage_links
        # Blocks of one micro-batch that all stages compute in a second, if all take equally long.
        blocks_per_s = sum(count / kind.both_s for count, kind in zip(stage_counts, times))
        fastest_s = layers * min(kind.both_s for kind in times)
        # Largest warm-up depth, however long the stage links are.
        if hides_links and links:
            warm_up = micro_batches
        else:
            warm_up = min(self.shape.pipeline, micro_batches)
        round_trip_s = fastest_s + 2 * links * link_s
        rounds = (micro_batches - 1) // warm_up + 1
        # While one micro-batch makes its round trip, a stage has computed warm_up - 1 forward passes.
        forward_share = max(kind.forward_s / kind.both_s for kind in times)
        forward_share = min(1.0, forward_share * FORWARD_SHARE_MARGIN)
        exposed_passes = max(0.0, micro_batches - 1 - (warm_up - 1) * forward_share)
        link_interval_s = self.stage_link_s(latency=False) if hides_links else link_s

        with_round_trip_s = round_trip_s + exposed_passes * layers / blocks_per_s
        compute_s = micro_batches * layers / blocks_per_s
        in_rounds_s = rounds * round_trip_s
        messages_s = micro_batches * link_interval_s  # all activations over one stage link
        with_reduction_s = self._with_reduction_s(
            stage_counts, times, reductions_s, warm_up, link_s
        )
        return max(with_round_trip_s, compute_s, in_rounds_s, messages_s, with_reduction_s)

    def _with_reduction_s(
        self,
        stage_counts: Sequence[float],
        times: Sequence[_BlockTimes],
        reductions_s: Sequence[float],
        warm_up: int,
        link_s: float,
    ) -> float:
        """Return the least seconds until each stage has computed and reduced its share of the layers.

        Args:
            stage_counts: Number of stages that the nodes of each kind can hold; may be a fraction.
            times: Times of a block on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
            warm_up: Largest number of micro-batches that a stage begins before its first backward pass.
            link_s: Least seconds of a stage link.
        """
        block_s = []  # of one block of a stage: all its passes, then its reduction
        for kind, reduction_s in zip(times, reductions_s):
            backward_s = kind.both_s - kind.forward_s
            exposed_s = max(0.0, reduction_s - backward_s)  # the last backward pass hides the rest
            passes_s = self.shape.micro_batches * kind.both_s - (warm_up - 1) * kind.forward_s
            block_s.append(passes_s + exposed_s - kind.forward_s)
        fastest_forward_s = self.job.blocks * min(kind.forward_s for kind in times)
        down_s = fastest_forward_s + (self.shape.pipeline - 1) * link_s
        if min(block_s) <= 0:  # few micro-batches: no bound beyond the first one's way down
            return down_s
        blocks_per_s = sum(count / seconds for count, seconds in zip(stage_counts, block_s))
        return down_s + self.job.blocks / blocks_per_s

    def _interleaved_s(
        self,
        stage_counts: Sequence[float],
        times: Sequence[_BlockTimes],
        reductions_s: Sequence[float],
    ) -> float:
        """Return the lower bound of computing_s() for an interleaved schedule, in seconds.

        All stages have the same number of layers.

        Args:
            stage_counts: Number of stages that the nodes of each kind can hold; may be a fraction.
            times: Times of a block on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
        """
        micro_batches = self.shape.micro_batches
        chunks = self.shape.virtual
        stages = self.shape.pipeline
        link_s = self.stage_link_s()
        stage_blocks = self.job.blocks / stages
        slowest_block_s = max(kind.both_s for kind in times)
        slowest_stage_s = slowest_block_s * self.job.blocks / stages
        slowest_stages = sum(
            count for count, kind in zip(stage_counts, times) if kind.both_s == slowest_block_s
        )
        # The first micro-batch passes the other slowest stages down, and the last one up.
        others = max(0.0, slowest_stages - 1)
        through_others_s = others / chunks
        compute_s = slowest_stage_s * (micro_batches + through_others_s) + 2 * others * link_s
        # At most two stage links at each border between clusters leave a cluster. If there are many more,
        # two neighbouring stage links are inside a cluster and share its NICs.
        borders = len(stage_counts) - 1
        links_on_nic = 2 if (stages - 1) // 2 > 2 * borders else 1
        messages_s = micro_batches * chunks * links_on_nic * link_s
        # The gradients of the last chunk are reduced first, under the last micro-batch's backward pass.
        backward_s = min(kind.both_s - kind.forward_s for kind in times)
        forward_s = micro_batches * min(kind.forward_s for kind in times)
        early_passes = (stages * (chunks - 1) + 1) / chunks  # in micro-batches
        late_backward_s = max(0.0, micro_batches - early_passes) * backward_s
        with_reduction_s = stage_blocks * (forward_s + late_backward_s + min(reductions_s))
        return max(compute_s, messages_s, with_reduction_s)

    def _block_times(self, kind: int) -> _BlockTimes:
        """Return the times of one block of a stage that lies on one node type only."""
        gpu = self.job.gpu_of(self.network.cluster(kind))
        block = self.job.block

        def collective_s() -> float:
            """Return the seconds of a block's collectives, forward and backward."""
            # priced on a placement with one stage (or the stages of one node) on nodes of this kind
            processes = self.network.processes
            stages = max(1, processes // self.stage_ranks)
            nodes = max(1, self.stage_ranks // processes)
            sizes = replace(self.sizes, pipeline=stages)
            fold, (stage,) = self.prices.fold(Placement(sizes, processes, ((kind, nodes),)), 0)
            return self.prices.collective_s(fold, stage)

        group_sizes = (self.shape.tensor, self.shape.context, self.shape.expert)
        collective_bytes = (block.tensor_bytes, block.context_bytes, block.expert_bytes)
        collectives_s = 0.0  # in each of forward and backward pass
        if max(group_sizes) > 1:
            key = ("alone", kind, self.stage_ranks, group_sizes, collective_bytes, gpu)
            collectives_s = self.network.remember(key, collective_s) / 2
        forward_s = block.forward_flops / gpu.flops + collectives_s
        return _BlockTimes(
            forward_s=forward_s,
            both_s=forward_s + block.backward_flops / gpu.flops + collectives_s,
            limit_bytes=min(gpu.memory_bytes or inf, self.prices.rules.memory_bytes or inf),
        )

    def _layers_fit(self, limit_bytes: float) -> bool:
        """Return whether all layers fit if every GPU has `limit_bytes`, without embedding and output."""
        if limit_bytes == inf:
            return True
        shape = self.shape
        available_bytes = max(0.0, limit_bytes - self.job.working_bytes)
        state_bytes = self.job.state_bytes[1]  # of a block: weights, gradients and optimizer
        layers = 0
        for stage in range(shape.pipeline):
            # Micro-batches whose activations the stage holds at the same time.
            kept = in_flight(stage, shape.pipeline, shape.virtual, shape.micro_batches)
            activation_bytes = kept * self.job.block.kept_bytes
            layers += int(available_bytes // (state_bytes + activation_bytes))
            if layers >= self.job.blocks:
                return True
        return False

    def stage_link_s(self, latency: bool = True) -> float:
        """Return the least seconds for an activation from a stage to the next.

        The bound is 0 if neighbouring stages may share a node.

        Args:
            latency: Count the latency, not only the bytes.
        """
        shape = self.shape
        processes = self.network.processes
        pipeline_ranks = shape.pipeline * shape.tensor * shape.context
        # Each cluster can hold whole pipelines, whose stages then need not fill nodes.
        whole_pipelines = all(ranks % pipeline_ranks == 0 for ranks in self.ranks)
        splits_nodes = any(ranks // shape.pipeline % processes for ranks in self.ranks)
        may_share_node = (whole_pipelines and splits_nodes) or self.stage_ranks % processes
        if shape.pipeline == 1 or may_share_node:
            return 0.0
        message_bytes = self.job.block.activation_bytes
        # Over Ethernet, tensor parallel ranks send a slice of the message each, and it may be compressed.
        slices = self.prices.slices(Placement(self.sizes, processes, ()))
        share = self.job.compressed_share(self.prices.rules.compression) / slices
        kinds = range(len(self.ranks))

        def least_s() -> float:
            """Return the seconds on the fastest network between any two node types."""
            fabrics = {self.network.fabric((kind, other)) for kind in kinds for other in kinds}
            seconds = []
            for fabric in fabrics:
                sent_bytes = message_bytes * share if fabric.name == ETHERNET else message_bytes
                line = self.network.line(fabric)
                latency_s = latency * line.latency_s
                seconds.append(8 * processes * sent_bytes / line.rate_bps + latency_s)
            return min(seconds)

        return self.network.remember(("stage_link", message_bytes, share, latency), least_s)

    def _reduction_s(self, kind: int) -> float:
        """Return the least seconds in which a stage reduces a block's gradients.

        The bound holds for every part that a cluster of this node type has in the stage: the reduction
        uses the cluster's fabric, among as few ranks as a hierarchical all-reduce leaves there, or Ethernet
        among all ranks.
        """
        shape = self.shape
        network = self.network
        processes = network.processes
        if shape.zero > 1 or self.stage_ranks % processes or network.wan:
            return 0.0
        kinds = range(len(self.ranks))
        shards = shape.data * shape.context  # ranks of a data parallel group
        shards_per_node = max(1, min(processes, self.stage_ranks) // shape.tensor)
        groups_per_node = processes // shards_per_node

        def byte_s(fabric: Fabric, ranks: int) -> float:
            """Return the seconds for each byte of gradients in a ring all-reduce of so many ranks."""
            traffic = 2 * (ranks - 1) / ranks if ranks > shards_per_node else 0.0  # of a ring
            return 8 * traffic * groups_per_node / network.line(fabric).rate_bps

        def least_byte_s() -> float:
            """Return the same for the cheaper way: inside the cluster, or among all ranks."""
            inside_s = byte_s(network.fabric([kind]), max(1, shards // len(kinds)))
            across_s = byte_s(network.fabric(kinds), shards)
            return min(inside_s, across_s)

        key = ("least reduction", kind, shards, shards_per_node)
        block_byte_s = network.remember(key, least_byte_s)
        share = 0.5 if shape.zero else 1.0  # a reduce-scatter is half an all-reduce
        return block_byte_s * self.job.reduced_bytes[1] * share

    # ------------------------------------------------------------------- traffic between clusters

    def crossing_s(self) -> float:
        """Return a lower bound from the traffic between clusters of equal size, in seconds.

        The bound needs a WAN between the clusters; it is 0 without one, or if clusters differ in size.

        Groups of g clusters share stages. The pipeline passes from group to group in g chains. Chains over
        all clusters use as many links as a forest of g trees, whose slowest link is at best that of the
        maximum spanning tree without its g - 1 slowest links. After the last micro-batch the gradients are
        summed: the group with most layers has at least its share, and each of its clusters needs a whole
        sum (or half of a flat ring's traffic) over g - 1 links. The group size g is open, so the least
        bound of all sizes counts.
        """
        cluster_count = len(self.ranks)
        cluster_ranks = self.ranks[0]
        fills_clusters = (
            self.stage_ranks % cluster_ranks == 0 or cluster_ranks % self.stage_ranks == 0
        )
        if not self.network.wan or len(set(self.ranks)) > 1 or not fills_clusters:
            return 0.0
        links: BestLinks = self.network.remember("best links", lambda: best_links(self.network))
        least_group = max(1, self.stage_ranks // cluster_ranks)
        return min(
            self._group_crossing_s(group_size, links)
            for group_size in range(least_group, cluster_count + 1)
            if cluster_count % group_size == 0
        )

    def _group_crossing_s(self, group_size: int, links: BestLinks) -> float:
        """Return the bound of crossing_s() if groups of `group_size` clusters share stages, in seconds.

        Args:
            group_size: Number of clusters on which each stage lies.
            links: Best rates that any choice of links between clusters reaches.
        """
        shape = self.shape
        job = self.job
        cluster_count = len(self.ranks)
        seconds = 0.0
        if group_size > 1:
            # The gradients of each stage are summed over the clusters of its group.
            shards = shape.data * shape.context
            gradient_bits = 0.0  # no bound with experts
            if not job.layers[1].expert_parameters:  # [1]: a block
                gradient_bits = 8 * shape.tensor * job.total_bytes
            gradient_bits *= (1 - 1 / shards) * SHARES[self.prices.rules.compress]
            # Even the slowest of the group's clusters receives the sums from group_size - 1 others. Its rate
            # is at best the group_size-th fastest of all clusters.
            into_bps = links.into_bps[group_size - 2][group_size - 1]
            sums_s = gradient_bits * group_size / cluster_count / into_bps
            # No link of a ring around the clusters is faster than the spanning tree's.
            ring_bits = self.ring_bits * 2 * (group_size - 1) / cluster_count
            ring_s = ring_bits / links.tree_bps[group_size - 2]
            seconds = max(sums_s, ring_s)
        if group_size < cluster_count:
            # The pipeline passes from group to group. Hidden stage links overlap their latency with passes.
            latency_s = links.latency_s * (not self.prices.hide_stage_links)
            activation_bits = 8 * shape.micro_batches * job.block.activation_bytes / shape.tensor
            activation_bits *= job.compressed_share(self.prices.rules.compression)
            # Slowest link of a forest: of the tree without its group_size - 1 slowest links.
            slowest_bps = links.tree_bps[cluster_count - group_size - 1]
            latencies_s = shape.micro_batches * latency_s
            bytes_s = self.stage_ranks / group_size * activation_bits / slowest_bps
            seconds += latencies_s + bytes_s
        return seconds

    @property
    def ring_bits(self) -> float:
        """Bits of all gradients that travel uncompressed around the clusters, over the slowest link.

        0 if nothing is known: direct exchanges, ZeRO, experts or compression.
        """
        rules = self.prices.rules
        has_experts = self.job.layers[1].expert_parameters
        if rules.direct or self.shape.zero or has_experts or rules.compress != "off":
            return 0.0
        return 8 * self.shape.tensor * self.job.total_bytes


def rates_between(network: Network) -> dict[tuple[int, int], float]:
    """Return the rate from cluster to cluster in bits/s: (from, to) -> rate of the slowest hop.

    The rate is inf for clusters on one fast network.
    """
    rates_bps = {}
    for pair in permutations(range(len(network.node_types)), 2):
        hops = _hops(network, pair)
        rates_bps[pair] = min((hop.rate_bps for hop in hops), default=inf)
    return rates_bps


def _hops(network: Network, pair: tuple[int, int]) -> Sequence[Hop]:
    """Return the WAN hops from one cluster to another; none if a fast network connects them."""
    if network.fabric(pair).name != ETHERNET:
        return ()
    source, target = pair
    return network.wan.hops(network.cluster(source), network.cluster(target))


def best_links(network: Network) -> BestLinks:
    """Return the best rates between the clusters of a network that any choice of links can reach."""
    kinds = range(len(network.node_types))
    rates_bps = rates_between(network)
    paths = [_hops(network, pair) if rates_bps[pair] < inf else () for pair in rates_bps]

    # Maximum spanning tree (Prim 1957): always add the fastest link to a cluster not yet in the tree.
    in_tree = {0}
    tree_bps = []
    while len(in_tree) < len(kinds):
        border = (pair for pair in rates_bps if pair[0] in in_tree and pair[1] not in in_tree)
        inside, outside = max(border, key=rates_bps.__getitem__)
        in_tree.add(outside)
        tree_bps.append(rates_bps[inside, outside])

    # Rate at which each cluster receives from its `count` fastest peers, at most that of its uplink.
    links_into = []
    for target in kinds:
        links = [rates_bps[source, target] for source in kinds if source != target]
        links_into.append(sorted(links, reverse=True))
    uplinks_bps = [network.wan.uplink_of.get(network.cluster(kind), inf) for kind in kinds]
    into_bps = []
    for count in kinds[1:]:
        rates = [min(sum(links[:count]), uplink) for links, uplink in zip(links_into, uplinks_bps)]
        into_bps.append(sorted(rates, reverse=True))
    latency_s = min(sum(hop.latency_s for hop in path) for path in paths)
    return BestLinks(sorted(tree_bps, reverse=True), into_bps, latency_s)
