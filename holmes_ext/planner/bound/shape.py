"""Lower bound on the step time of all plans that have the same parallel sizes.

A "shape" fixes the parallel sizes, micro-batch, recomputation and ZeRO stage; which nodes hold
which stage is still open. The bound has two parts: the computation of all clusters together, and
the traffic that must cross between clusters.

A node type is a cluster (with its GPUs and fabrics). 1F1B, warm-up depth and chunk are Megatron's
terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.plan.cost.model import in_flight
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import SHARES
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.best_links import BestLinks, best_links

#: Factor on the share of forward passes in the blocks' time: with embedding and output layer a
#: stage's share may be larger.
FORWARD_SHARE_MARGIN = 1.2


class _BlockTimes(NamedTuple):
    """Seconds of one transformer layer (block) for one micro-batch on the GPUs of one cluster.

    A node type is a cluster here. ShapeBound._block_times() makes this record.
    """

    forward_s: float
    both_s: float  # forward and backward pass
    limit_bytes: float  # memory of a GPU


class ShapeBound:
    """Lower bound on the step time of all plans with the same parallel sizes.

    It holds wherever their stages lie. A shape fixes parallel sizes, micro-batch, recomputation and
    ZeRO stage, but not which nodes hold which stage. A node type is a cluster here.
    """

    def __init__(self, network: Network, prices: Prices, shape: Shape):
        self.network = network
        self.prices = prices
        self.shape = shape
        self.job = prices.job
        self.stage_ranks = network.world // shape.pipeline
        self.sizes = shape.sizes().complete(network.world)
        #: Ranks of each node type.
        self.ranks = [len(names) * width for names, width in zip(network.names, network.widths)]

    @property
    def seconds(self) -> float:
        """Lower bound on the step, in seconds; inf if the memory cannot hold the layers."""
        return max(self.computing_s(), self.crossing_s())

    def computing_s(self) -> float:
        """Return a lower bound on the step time from the computation of all stages, in seconds.

        It assumes an ideal case, which can only shorten the step: each stage lies inside one
        cluster, layers can be divided into fractions, activations take the fastest network, and
        gradients are reduced in the cheapest way. The result is inf if even the largest GPU memory
        cannot hold the layers.
        """
        node_types = range(len(self.ranks))
        times = [self._block_times(node_type) for node_type in node_types]
        if not self._layers_fit(max(block.limit_bytes for block in times)):
            return inf
        # Stages that each node type's ranks can hold, such as 2.5.
        stage_counts = [ranks / self.stage_ranks for ranks in self.ranks]
        reductions_s = [self._reduction_s(node_type) for node_type in node_types]
        if self.shape.virtual > 1:
            return self._interleaved_s(stage_counts, times, reductions_s)
        return self._in_1f1b_s(stage_counts, times, reductions_s)

    def _in_1f1b_s(
        self,
        stage_counts: Sequence[float],
        times: Sequence[_BlockTimes],
        reductions_s: Sequence[float],
    ) -> float:
        """Return a lower bound on the step time under a 1F1B schedule, in seconds.

        It is the largest of five bounds: computation without idle time, computation that the first
        micro-batch's round trip cannot hide, round trips one after the other, the messages of one
        stage link, and passes with the gradient reduction. Layers may be fractions, so all stages
        can take equally long.

        Args:
            stage_counts: For each node type (cluster), the number of stages that its ranks hold,
                such as 2.5.
            times: Times of a block (transformer layer) on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
        """
        layers = self.job.blocks
        micro_batches = self.shape.micro_batches
        links = self.shape.pipeline - 1
        link_s = self.stage_link_s()
        hides_links = self.prices.hide_stage_links
        # Blocks of one micro-batch that all stages together compute in a second, if none is idle.
        blocks_per_s = sum(count / block.both_s for count, block in zip(stage_counts, times))
        fastest_s = layers * min(block.both_s for block in times)
        # Largest warm-up depth: micro-batches that a stage begins before its first backward pass.
        # To hide long stage links it may be all micro-batches, as long as the links are not known.
        if hides_links and links:
            warm_up = micro_batches
        else:
            warm_up = min(self.shape.pipeline, micro_batches)
        round_trip_s = fastest_s + 2 * links * link_s
        rounds = (micro_batches - 1) // warm_up + 1
        # While the first micro-batch makes its round trip, a stage can compute only warm_up - 1
        # other forward passes. The remaining passes come before or after the trip (exposed),
        # counted in micro-batches.
        forward_share = max(block.forward_s / block.both_s for block in times)
        forward_share = min(1.0, forward_share * FORWARD_SHARE_MARGIN)
        exposed_passes = max(0.0, micro_batches - 1 - (warm_up - 1) * forward_share)
        link_interval_s = self.stage_link_s(latency=False) if hides_links else link_s

        with_round_trip_s = round_trip_s + exposed_passes * layers / blocks_per_s
        # All passes on all stages, which are never idle.
        compute_s = micro_batches * layers / blocks_per_s
        # A stage has at most warm_up micro-batches under way: each round of so many takes a trip.
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
        """Return a lower bound on a 1F1B step, in seconds, from passes and gradient reduction.

        Consider the last stage to end. First, an activation passes all layers and stage links
        (down_s). Then the stage does its other passes and reduces its gradients. That takes longer
        the more layers (blocks) it has. The best split, in fractions of layers, lets all stages end
        at the same time; every other split is slower. Then the time is all blocks / blocks_per_s,
        the blocks that all stages together complete in a second.

        Args:
            stage_counts: For each node type (cluster), the number of stages that its ranks hold;
                may be a fraction.
            times: Times of a block on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
            warm_up: Largest number of micro-batches that a stage begins before its first backward
                pass.
            link_s: Least seconds of an activation from a stage to the next one.
        """
        # Seconds of one block of a stage after the way down: all its passes and its reduction.
        block_s = []
        for block, reduction_s in zip(times, reductions_s):
            backward_s = block.both_s - block.forward_s
            exposed_s = max(0.0, reduction_s - backward_s)  # the last backward pass hides the rest
            # While the stage waits for its first gradient it can do warm_up - 1 forward passes,
            # which so may cost no time: subtract them.
            passes_s = self.shape.micro_batches * block.both_s - (warm_up - 1) * block.forward_s
            # `down_s` below has the first forward pass of every block: subtract it here.
            block_s.append(passes_s + exposed_s - block.forward_s)
        fastest_forward_s = self.job.blocks * min(block.forward_s for block in times)
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
        """Return a lower bound on the step time under an interleaved schedule, in seconds.

        All stages have the same number of layers, divided into chunks. So the stages on the slowest
        nodes set the pace. The bound is the largest of three: computation, messages, and passes
        with reduction.

        Args:
            stage_counts: For each node type (cluster), the number of stages that its ranks hold;
                may be a fraction.
            times: Times of a block (transformer layer) on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
        """
        micro_batches = self.shape.micro_batches
        chunks = self.shape.virtual
        stages = self.shape.pipeline
        link_s = self.stage_link_s()
        stage_blocks = self.job.blocks / stages
        slowest_block_s = max(block.both_s for block in times)
        slowest_stage_s = slowest_block_s * self.job.blocks / stages
        slowest_stages = sum(
            count for count, block in zip(stage_counts, times) if block.both_s == slowest_block_s
        )
        # The last of the slowest stages computes all micro-batches. Before that the first
        # micro-batch passes one chunk of each other slowest stage forward, and after that the last
        # one passes them backward. Both use the stage links in between.
        others = max(0.0, slowest_stages - 1)
        passes_of_others = others / chunks  # in passes of a whole stage
        compute_s = slowest_stage_s * (micro_batches + passes_of_others) + 2 * others * link_s
        # At most two stage links at each border between clusters leave a cluster. If there are many
        # more, two neighbouring stage links are inside a cluster and share its NICs.
        borders = len(stage_counts) - 1
        links_on_nic = 2 if (stages - 1) // 2 > 2 * borders else 1
        messages_s = micro_batches * chunks * links_on_nic * link_s
        # The gradients of the last chunk are reduced first: when its last backward pass begins, all
        # forward passes have ended, and all backward passes but the `passes_behind` that follow.
        backward_s = min(block.both_s - block.forward_s for block in times)
        forward_s = micro_batches * min(block.forward_s for block in times)
        passes_behind = (stages * (chunks - 1) + 1) / chunks  # in passes of a whole stage
        backward_before_s = max(0.0, micro_batches - passes_behind) * backward_s
        with_reduction_s = stage_blocks * (forward_s + backward_before_s + min(reductions_s))
        return max(compute_s, messages_s, with_reduction_s)

    def _block_times(self, node_type: int) -> _BlockTimes:
        """Return the times of one transformer layer (block) of a stage inside one cluster.

        They include the tensor, context and expert parallel collectives of the layer.

        Args:
            node_type: Number of the cluster; the network numbers node types, each of which is a
                cluster.
        """
        gpu = self.job.gpu_of(self.network.cluster(node_type))
        block = self.job.block

        def collective_s() -> float:
            """Return the seconds of a block's tensor, context and expert parallel collectives.

            Forward and backward pass together. They depend on the nodes of one stage only. So they
            are priced on the smallest placement with a stage of `stage_ranks` ranks in the cluster
            `node_type`: this stage alone, or the stages that share its node.
            """
            processes = self.network.widths[node_type]
            stages = max(1, processes // self.stage_ranks)
            nodes = max(1, self.stage_ranks // processes)
            sizes = replace(self.sizes, pipeline=stages)
            placement = Placement(sizes, processes, node_runs=((node_type, nodes),))
            # fold(): the nodes of stage 0 in a compact form, which the cost model prices
            fold, (stage,) = self.prices.fold(placement, 0)
            return self.prices.collective_s(fold, stage)

        group_sizes = (self.shape.tensor, self.shape.context, self.shape.expert)
        collective_bytes = (block.tensor_bytes, block.context_bytes, block.expert_bytes)
        collectives_s = (
            0.0  # of one pass: half of them are in the forward pass, half in the backward pass
        )
        if max(group_sizes) > 1:
            key = ("alone", node_type, self.stage_ranks, group_sizes, collective_bytes, gpu)
            # remember(): computed once for each key, for all shapes of a search
            collectives_s = self.network.remember(key, collective_s) / 2
        forward_s = block.forward_flops / gpu.flops + collectives_s
        return _BlockTimes(
            forward_s=forward_s,
            both_s=forward_s + block.backward_flops / gpu.flops + collectives_s,
            limit_bytes=min(gpu.memory_bytes or inf, self.prices.rules.memory_bytes or inf),
        )

    def _layers_fit(self, limit_bytes: float) -> bool:
        """Return whether all stages together can hold the model, if every GPU has `limit_bytes`.

        It is an optimistic test, for any number of layers on each stage: the bytes of embedding and
        output layer are left out. If it fails, no placement fits.
        """
        if limit_bytes == inf:
            return True
        shape = self.shape
        available_bytes = max(0.0, limit_bytes - self.job.working_bytes)
        _, state_bytes, _ = self.job.state_bytes  # of a block: weights, gradients and optimizer
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

        The fastest network counts. The bound is 0 if neighbouring stages may share a node.

        Args:
            latency: Count the latency, not only the bytes.
        """
        shape = self.shape
        widths = self.network.widths  # ranks of a node, by node type
        pipeline_ranks = shape.pipeline * shape.tensor * shape.context
        # Stages may share a node in two cases:
        #   the ranks of a stage do not fill nodes
        #   each cluster can hold whole pipelines (whole_pipelines), and a stage's ranks in some
        #   cluster do not fill nodes (splits_nodes)
        whole_pipelines = all(ranks % pipeline_ranks == 0 for ranks in self.ranks)
        splits_nodes = any(
            ranks // shape.pipeline % width for ranks, width in zip(self.ranks, widths)
        )
        may_share_node = (whole_pipelines and splits_nodes) or any(
            self.stage_ranks % width for width in widths
        )
        if shape.pipeline == 1 or may_share_node:
            return 0.0
        message_bytes = self.job.block.activation_bytes
        # Over Ethernet, tensor parallel ranks send a slice of the message each, and it may be
        # compressed. `slices` depends on the parallel sizes only, so the placement needs no nodes.
        slices = self.prices.slices(Placement(self.sizes, self.network.processes, node_runs=()))
        share = self.job.compressed_share(self.prices.rules.compression) / slices
        node_types = range(len(self.ranks))

        def least_s() -> float:
            """Return the seconds in which a node's ranks send an activation, on the best network.

            Uses the enclosing method's node_types (all clusters), widths (ranks of their nodes) and
            latency (whether it counts). Over Ethernet each rank sends only the part `share` of
            `message_bytes`, over other networks all of it.
            """
            fabrics = {
                self.network.fabric((node_type, other))
                for node_type in node_types
                for other in node_types
            }
            seconds = []
            for fabric in fabrics:
                sent_bytes = message_bytes * share if fabric.name == ETHERNET else message_bytes
                line = self.network.line(fabric)  # the fabric with its measured rate and latency
                latency_s = line.latency_s if latency else 0.0
                # All ranks of a node send at once through its NIC; the narrowest has the fewest.
                node_bits = 8 * min(widths) * sent_bytes
                seconds.append(node_bits / line.rate_bps + latency_s)
            return min(seconds)

        # remember(): computed once for each key
        return self.network.remember(("stage_link", message_bytes, share, latency), least_s)

    def _reduction_s(self, node_type: int) -> float:
        """Return the least seconds in which a stage reduces the gradients of one layer (block).

        It is the less of two rings: inside the cluster, as part of a hierarchical all-reduce, or
        among all ranks of a data parallel group. How many ranks of a group are in this cluster is
        open; an equal number in each cluster is assumed, which is the cheapest case.

        Args:
            node_type: Number of the cluster, which has some of the stage's ranks.
        """
        shape = self.shape
        network = self.network
        processes = network.widths[node_type]
        if shape.zero > 1:  # ZeRO 2 and 3 sum the gradients of each micro-batch, not once a step
            return 0.0
        # Stages that do not fill nodes share them, and may have groups inside a node, which cost
        # nothing here. With a WAN, crossing_s() has the bound.
        shares_nodes = any(self.stage_ranks % width for width in network.widths)
        if shares_nodes or network.wan:
            return 0.0
        node_types = range(len(self.ranks))
        shards = shape.data * shape.context  # ranks of a data parallel group
        shards_per_node = max(1, min(processes, self.stage_ranks) // shape.tensor)
        groups_per_node = processes // shards_per_node  # they share the node's NIC

        def byte_s(fabric: Fabric, ranks: int) -> float:
            """Return the seconds for each byte of gradients in a ring all-reduce of so many ranks."""
            if ranks <= shards_per_node:  # inside a node
                return 0.0
            sent_bytes = (
                2 * (ranks - 1) / ranks
            )  # by each rank of a ring, for each byte of gradients
            # line(): the fabric with its measured rate
            return 8 * sent_bytes * groups_per_node / network.line(fabric).rate_bps

        def least_byte_s() -> float:
            """Return the seconds for each byte of gradients, by the cheaper of the two rings.

            They are the ring of a group's ranks inside this cluster, and the ring of all its ranks.
            """
            inside_s = byte_s(network.fabric([node_type]), max(1, shards // len(node_types)))
            across_s = byte_s(network.fabric(node_types), shards)
            return min(inside_s, across_s)

        key = ("least reduction", node_type, shards, shards_per_node)
        block_byte_s = network.remember(key, least_byte_s)  # computed once for each key
        share = 0.5 if shape.zero else 1.0  # a reduce-scatter is half an all-reduce
        _, block_bytes, _ = self.job.reduced_bytes  # of embedding, block and output layer
        return block_byte_s * block_bytes * share

    # ------------------------------------------------------------------- traffic between clusters

    def crossing_s(self) -> float:
        """Return a lower bound on the step time from the traffic between clusters, in seconds.

        A plan divides the clusters into groups of equal size. The clusters of a group share stages,
        and the pipeline passes from group to group. Which size a plan chooses is open, so the
        result is the least of the bounds for all sizes (_group_crossing_s).

        The bound is 0 if the clusters have no WAN between them, or differ in size.
        """
        cluster_count = len(self.ranks)
        cluster_ranks = self.ranks[0]
        # Groups of whole clusters are the only possibility if a stage fills clusters, or clusters
        # fill with whole stages.
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
        """Return a lower bound on the step, in seconds, if a stage lies on `group_size` clusters.

        Two kinds of traffic cross between clusters: activations from each group of clusters to the
        next, and, after the last micro-batch, the sum of the gradients over the clusters of a
        group.

        Args:
            group_size: Number of clusters that share their stages.
            links: Highest rates between clusters. Which links a plan uses is open, so the fastest
                are assumed.
        """
        shape = self.shape
        job = self.job
        cluster_count = len(self.ranks)
        seconds = 0.0
        if group_size > 1:
            # The gradients of each stage are summed over the clusters of its group.
            shards = shape.data * shape.context
            gradient_bits = 0.0  # no bound with experts
            _, block, _ = job.layers
            if not block.expert_parameters:
                gradient_bits = 8 * shape.tensor * job.total_bytes
            # SHARES: kind of compression -> bytes sent for each byte
            gradient_bits *= (1 - 1 / shards) * SHARES[self.prices.rules.compress]
            # The group with most gradients has at least its share of them: group_size /
            # cluster_count. Each of its clusters receives a whole sum from its group_size - 1
            # peers. The slowest of these clusters is at best the group_size-th fastest of all.
            peers = group_size - 1
            fastest_into_bps = links.into_bps[peers - 1]  # of each cluster, fastest first
            into_bps = fastest_into_bps[group_size - 1]
            sums_s = gradient_bits * group_size / cluster_count / into_bps
            # A ring sends 2 (g - 1) / g of the group's gradients over each link, for g =
            # group_size. It connects g clusters, so its slowest link is at best the (g - 1)-th
            # fastest of the tree.
            ring_bits = self.ring_bits * 2 * (group_size - 1) / cluster_count
            slowest_ring_bps = links.tree_bps[peers - 1]
            ring_s = ring_bits / slowest_ring_bps
            seconds = max(sums_s, ring_s)
        if group_size < cluster_count:
            # The pipeline passes from group to group. Hidden stage links overlap their latency with
            # passes.
            latency_s = links.latency_s * (not self.prices.hide_stage_links)
            activation_bits = 8 * shape.micro_batches * job.block.activation_bytes / shape.tensor
            activation_bits *= job.compressed_share(self.prices.rules.compression)
            # The chains contain all clusters, so they have cluster_count - group_size links without
            # a cycle. The slowest of them is at best the last of that many fastest links of the
            # spanning tree.
            chain_links = cluster_count - group_size
            slowest_bps = links.tree_bps[chain_links - 1]
            latencies_s = shape.micro_batches * latency_s
            bytes_s = self.stage_ranks / group_size * activation_bits / slowest_bps
            seconds += latencies_s + bytes_s
        return seconds

    @property
    def ring_bits(self) -> float:
        """Bits of all gradients that ring all-reduces between clusters must carry.

        Lower bounds divide it by the rates of the links. It is 0, which means no bound, if the
        gradients travel in other ways: with ZeRO, experts, compression, or direct exchanges between
        all pairs of clusters with gloo (rules.direct).
        """
        rules = self.prices.rules
        _, block, _ = self.job.layers  # embedding, block, output layer
        has_experts = block.expert_parameters
        if rules.direct or self.shape.zero or has_experts or rules.compress != "off":
            return 0.0
        # total_bytes are those of one tensor parallel rank; each of these ranks has its own ring.
        return 8 * self.shape.tensor * self.job.total_bytes
