"""Lower bound on the step time of all plans that have the same parallel sizes.

A "shape" fixes the parallel sizes, micro-batch, recomputation and ZeRO stage, but not yet which nodes
hold which stage. The bound has two parts: the computation of all clusters together, and the traffic
that must cross between clusters.

A node type is a cluster (with its GPUs and fabrics). 1F1B, warm-up depth and chunk are Megatron's
terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.plan.cost.model import in_flight
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.cluster_traffic import ClusterTraffic

#: Factor on the share of forward passes in the blocks' time: with embedding and output layer a
#: stage's share may be larger.
FORWARD_SHARE_MARGIN = 1.2


class _BlockTimes(NamedTuple):
    """Seconds of a transformer layer (block) for a micro-batch on the GPUs of a cluster.

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
        #: Ranks of each node type (here: of each cluster).
        self.ranks = [len(names) * width for names, width in zip(network.names, network.widths)]

    @property
    def seconds(self) -> float:
        """Lower bound on the step time of the shape, in seconds; inf if the memory cannot hold the layers."""
        return max(self.computing_s(), self.crossing_s())

    def computing_s(self) -> float:
        """Return a lower bound on the step time from the computation of all stages, in seconds.

        It assumes an ideal case that can only shorten the step: each stage lies inside a single
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
        micro-batch's round trip cannot hide, round trips in sequence, the messages of a
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
        warm_up = self._largest_warm_up()  # micro-batches begun before the first backward pass

        # Seconds in which all stages together compute a micro-batch, if none is idle. Each node
        # type computes count / both_s blocks in a second.
        blocks_per_s = sum(count / block.both_s for count, block in zip(stage_counts, times))
        micro_batch_s = layers / blocks_per_s

        # A round trip: a micro-batch passes all stages and links, forward and back.
        links = self.shape.pipeline - 1
        link_s = self.stage_link_s()
        fastest_s = layers * min(block.both_s for block in times)
        round_trip_s = fastest_s + 2 * links * link_s

        # Bound 1: all passes on all stages, if no stage is ever idle.
        compute_s = micro_batches * micro_batch_s
        # Bound 2: the first micro-batch's round trip, and then the passes of the other micro-batches,
        # except those forward passes that stages can compute during the trip.
        micro_batches_outside_trip = self._passes_outside_trip(times, warm_up)
        with_round_trip_s = round_trip_s + micro_batches_outside_trip * micro_batch_s

        # Bound 3: a stage has at most warm_up micro-batches under way, so each round of that many
        # takes a round trip.
        rounds = (micro_batches - 1) // warm_up + 1
        in_rounds_s = rounds * round_trip_s

        # Bound 4: all activations pass a stage link in sequence.
        hides_links = self.prices.hide_stage_links
        link_interval_s = self.stage_link_s(latency=False) if hides_links else link_s
        messages_s = micro_batches * link_interval_s

        # Bound 5: passes and gradient reduction of the last stage to end.
        with_reduction_s = self._with_reduction_s(
            stage_counts, times, reductions_s, warm_up, link_s
        )
        return max(compute_s, with_round_trip_s, in_rounds_s, messages_s, with_reduction_s)

    def _largest_warm_up(self) -> int:
        """Return the most micro-batches that a stage may begin before its first backward pass.

        Under 1F1B it is the number of stages. A schedule that hides the messages between stages may
        begin more of them, the longer the messages take. How long is not known yet, so all
        micro-batches are assumed.
        """
        micro_batches = self.shape.micro_batches
        if self.prices.hide_stage_links and self.shape.pipeline > 1:
            return micro_batches
        return min(self.shape.pipeline, micro_batches)

    def _passes_outside_trip(self, times: Sequence[_BlockTimes], warm_up: int) -> float:
        """Return the least work of a stage outside the first round trip, as a number of micro-batches.

        The first micro-batch goes through all stages and back: the round trip. Meanwhile a stage
        can compute only the forward passes of the next warm_up - 1 micro-batches. A forward pass is
        about a third of a micro-batch's work (both passes). So with 8 micro-batches and a warm-up of
        4, at most 3 * 1/3 = 1 of the other 7 is computed during the trip, and 6 remain. The share is
        rounded up by FORWARD_SHARE_MARGIN, so the result is never too large for a lower bound.

        Args:
            times: Times of a block (transformer layer) on each node type.
            warm_up: Micro-batches that a stage begins before its first backward pass.
        """
        forward_share = max(block.forward_s / block.both_s for block in times)
        forward_share = min(1.0, forward_share * FORWARD_SHARE_MARGIN)
        hidden = (warm_up - 1) * forward_share
        return max(0.0, self.shape.micro_batches - 1 - hidden)

    def _with_reduction_s(
        self,
        stage_counts: Sequence[float],
        times: Sequence[_BlockTimes],
        reductions_s: Sequence[float],
        warm_up: int,
        link_s: float,
    ) -> float:
        """Return a lower bound on a 1F1B step, in seconds, from passes and gradient reduction.

        The bound is the sum of two parts:

            down_s    The first activation passes all layers and stage links.
            after_s   A stage does its other passes and reduces its gradients. This takes `block_s`
                      seconds for each of its layers (blocks).

        The stage that ends last sets after_s. The best split of the layers, in fractions, lets all
        stages end at the same time; every other split is slower. Under this split, after_s is the
        number of blocks / blocks_per_s, the blocks that all stages together complete in a second.

        Args:
            stage_counts: For each node type (cluster), the number of stages that its ranks hold;
                may be a fraction.
            times: Times of a block on each node type.
            reductions_s: Least seconds for the gradients of a block on each node type.
            warm_up: Largest number of micro-batches that a stage begins before its first backward
                pass.
            link_s: Least seconds of an activation from a stage to the next.
        """
        # For each node type: seconds that a block adds to its stage after down_s.
        block_s = []
        for block, reduction_s in zip(times, reductions_s):
            backward_s = block.both_s - block.forward_s
            exposed_s = max(0.0, reduction_s - backward_s)  # the last backward pass hides the rest
            # While a stage waits for its first gradient it can do warm_up - 1 forward passes. So
            # these may cost no time: a lower bound must not count them.
            passes_s = self.shape.micro_batches * block.both_s - (warm_up - 1) * block.forward_s
            # The first forward pass of every block is a part of down_s, so it is not counted here.
            block_s.append(passes_s + exposed_s - block.forward_s)
        fastest_forward_s = self.job.blocks * min(block.forward_s for block in times)
        down_s = fastest_forward_s + (self.shape.pipeline - 1) * link_s
        if min(block_s) <= 0:  # few micro-batches: no bound beyond the way down of the first
            return down_s
        blocks_per_s = sum(count / seconds for count, seconds in zip(stage_counts, block_s))
        after_s = self.job.blocks / blocks_per_s
        return down_s + after_s

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

        # Bound 1, computation.
        slowest_block_s = max(block.both_s for block in times)
        slowest_stage_s = slowest_block_s * self.job.blocks / stages
        slowest_stages = sum(
            count for count, block in zip(stage_counts, times) if block.both_s == slowest_block_s
        )

        # The last of the slowest stages computes all micro-batches. Before that the first
        # micro-batch passes a chunk of each other slowest stage forward, and after that the last
        # micro-batch passes them backward. Both use the stage links in between.
        others = max(0.0, slowest_stages - 1)
        passes_of_others = others / chunks  # in passes of a whole stage
        compute_s = slowest_stage_s * (micro_batches + passes_of_others) + 2 * others * link_s

        # Bound 2, messages. At most two stage links at each border between clusters leave a cluster.
        # If there are many more, two neighbouring stage links are inside a cluster and share its
        # NICs.
        borders = len(stage_counts) - 1
        links_on_nic = 2 if (stages - 1) // 2 > 2 * borders else 1
        messages_s = micro_batches * chunks * links_on_nic * link_s

        # Bound 3, passes and reduction. The gradients of the last chunk are reduced first: when its
        # last backward pass begins, all forward passes have ended, and all backward passes but the
        # `passes_behind` that follow.
        backward_s = min(block.both_s - block.forward_s for block in times)
        forward_s = micro_batches * min(block.forward_s for block in times)
        passes_behind = (stages * (chunks - 1) + 1) / chunks  # in passes of a whole stage
        backward_before_s = max(0.0, micro_batches - passes_behind) * backward_s
        with_reduction_s = stage_blocks * (forward_s + backward_before_s + min(reductions_s))
        return max(compute_s, messages_s, with_reduction_s)

    def _block_times(self, node_type: int) -> _BlockTimes:
        """Return the times of a transformer layer (block) on a pipeline stage that lies inside a cluster.

        The times include the layer's tensor, context and expert parallel collectives. They are the
        same on every stage of the cluster.

        Args:
            node_type: Number of the cluster (the network numbers node types; here each is a cluster).
        """
        gpu = self.job.gpu_of(self.network.cluster(node_type))
        block = self.job.block

        def collective_s() -> float:
            """Return the seconds of a block's tensor, context and expert parallel collectives.

            They are for a forward and a backward pass. They depend only on the nodes of the stage. So
            they are priced on the smallest placement that has such a stage in this cluster.
            """
            ranks_per_node = self.network.widths[node_type]
            if self.stage_ranks >= ranks_per_node:  # a single stage on whole nodes
                stages = 1
                nodes = self.stage_ranks // ranks_per_node
            else:  # a node with several stages
                stages = ranks_per_node // self.stage_ranks
                nodes = 1
            sizes = replace(self.sizes, pipeline=stages)
            placement = Placement(sizes, ranks_per_node, node_runs=((node_type, nodes),))
            # The cost model prices a compact form of the placement, with a number for stage 0 in it.
            fold, (folded_stage,) = self.prices.fold(placement, 0)
            return self.prices.collective_s(fold, folded_stage)

        group_sizes = (self.shape.tensor, self.shape.context, self.shape.expert)
        collective_bytes = (block.tensor_bytes, block.context_bytes, block.expert_bytes)
        collectives_s = 0.0  # of a pass: half of them are in the forward, half in the backward pass
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

        It is not known which nodes hold the stages, so the network with the shortest time is assumed. The
        bound is 0 if neighbouring stages may share a node.

        Args:
            latency: Count the latency, not only the bytes.
        """
        if self.shape.pipeline == 1 or self._stages_may_share_node():
            return 0.0
        message_bytes = self.job.block.activation_bytes

        # Over Ethernet, each tensor parallel rank sends a slice of the message, as all of them
        # have the same activation. It may be compressed, too.
        # The number of slices depends on the parallel sizes only: a placement without nodes will do.
        without_nodes = Placement(self.sizes, self.network.processes, node_runs=())
        slices = self.prices.slices(without_nodes)
        ethernet_share = self.job.compressed_share(self.prices.rules.compression) / slices
        key = ("stage_link", message_bytes, ethernet_share, latency)

        # remember(): computed once for each key
        return self.network.remember(
            key, lambda: self._fastest_send_s(message_bytes, ethernet_share, latency)
        )

    def _stages_may_share_node(self) -> bool:
        """Return whether a plan may put ranks of two neighbouring stages on the same node.

        This is so in two cases: the ranks of a stage do not fill nodes; or each cluster can hold
        whole pipelines, and a stage's ranks in some cluster do not fill nodes.
        """
        widths = self.network.widths  # ranks of a node, by node type
        if any(self.stage_ranks % width for width in widths):
            return True
        pipeline_ranks = self.shape.pipeline * self.shape.tensor * self.shape.context
        holds_whole_pipelines = all(ranks % pipeline_ranks == 0 for ranks in self.ranks)
        if not holds_whole_pipelines:
            return False
        # Then a stage may have an equal part of its ranks on each cluster.
        ranks_of_a_stage = [ranks // self.shape.pipeline for ranks in self.ranks]
        return any(ranks % width for ranks, width in zip(ranks_of_a_stage, widths))

    def _fastest_send_s(self, message_bytes: float, ethernet_share: float, latency: bool) -> float:
        """Return the least seconds in which all ranks of a node send an activation to the next stage.

        Each rank sends a message. The fastest network counts. Over Ethernet, tensor parallel ranks do
        not all send the same activation: each sends a slice of it, possibly compressed. Over fast
        networks each rank sends the whole activation.

        Args:
            message_bytes: Bytes of a message (a whole activation).
            ethernet_share: Bytes that a rank sends over Ethernet / bytes of the message.
            latency: Count the latency, not only the bytes.
        """
        network = self.network
        node_types = range(len(self.ranks))
        # fabric(): the fastest network that two clusters share
        fabrics = {network.fabric(pair) for pair in product(node_types, repeat=2)}
        seconds = []
        for fabric in fabrics:
            line = network.line(fabric)  # the fabric with its measured rate and latency
            sent_bytes = message_bytes
            if fabric.name == ETHERNET:
                sent_bytes *= ethernet_share
            # All ranks of a node send at once through its NIC. Which node sends is open, so the node
            # with the fewest ranks is assumed: a lower bound.
            node_bits = 8 * min(network.widths) * sent_bytes
            latency_s = line.latency_s if latency else 0.0
            seconds.append(node_bits / line.rate_bps + latency_s)
        return min(seconds)

    def _reduction_s(self, node_type: int) -> float:
        """Return the least seconds in which a stage reduces the gradients of a layer (block).

        A plan reduces them in one of two ways. A hierarchical all-reduce contains a ring inside
        this cluster; otherwise a single ring has all ranks of the data parallel group. The result is the
        time of the faster ring, so it is a lower bound for both ways. How many ranks of a group are
        in this cluster is open; an equal number in each cluster is assumed, the cheapest case.

        The result is 0 (no bound) in three cases: ZeRO 2 and 3 reduce earlier in the
        step; stages that do not fill nodes may have data parallel groups inside a node, without
        network traffic; and with a WAN, crossing_s() bounds the traffic.

        Args:
            node_type: Number of the cluster; it has some of the stage's ranks.
        """
        shape = self.shape
        network = self.network
        if shape.zero > 1:  # ZeRO 2 and 3 sum the gradients of each micro-batch, not once a step
            return 0.0
        shares_nodes = any(self.stage_ranks % width for width in network.widths)
        if shares_nodes or network.wan:
            return 0.0
        node_types = range(len(self.ranks))
        group_ranks = shape.data * shape.context  # of a data parallel group
        processes = network.widths[node_type]
        node_ranks = max(1, min(processes, self.stage_ranks) // shape.tensor)  # on a node
        rings_on_node = processes // node_ranks  # they share the node's NIC

        def ring_byte_s(fabric: Fabric, ranks: int) -> float:
            """Return the seconds for each byte of gradients in a ring all-reduce of so many ranks."""
            if ranks <= node_ranks:  # inside a node
                return 0.0
            return self._ring_byte_s(fabric, ranks, rings_on_node)

        def least_byte_s() -> float:
            """Return the seconds for each byte of gradients in the faster ring: inside or across clusters."""
            ranks_inside = max(1, group_ranks // len(node_types))
            inside_s = ring_byte_s(network.fabric([node_type]), ranks_inside)
            across_s = ring_byte_s(network.fabric(node_types), group_ranks)
            return min(inside_s, across_s)

        key = ("least reduction", node_type, group_ranks, node_ranks)
        byte_s = network.remember(key, least_byte_s)  # computed once for each key
        share = 0.5 if shape.zero else 1.0  # a reduce-scatter is half an all-reduce
        _, block_bytes, _ = self.job.reduced_bytes  # of embedding, block and output layer
        return byte_s * block_bytes * share

    def _ring_byte_s(self, fabric: Fabric, ranks: int, rings_on_node: int) -> float:
        """Return the seconds for each byte of gradients in a ring all-reduce between nodes.

        Args:
            fabric: Network of the ring.
            ranks: Ranks of the ring.
            rings_on_node: Rings that share the NIC of a node.
        """
        sent_bytes = 2 * (ranks - 1) / ranks  # by each rank, for each byte of gradients
        # line(): the fabric with its measured rate
        return 8 * sent_bytes * rings_on_node / self.network.line(fabric).rate_bps

    def crossing_s(self) -> float:
        """Return a lower bound on the step time from the traffic between clusters, in seconds.

        Activations or gradients must pass the links between clusters, wherever the stages lie. The
        step takes at least the time of the slowest link. Only clusters over a WAN have this bound;
        else it is 0.
        """
        traffic = ClusterTraffic(
            self.network,
            self.prices,
            self.shape,
            cluster_ranks=self.ranks,
            ring_bits=self.ring_bits,  # of gradients that ring all-reduces sum between clusters
        )
        return traffic.seconds()

    @property
    def ring_bits(self) -> float:
        """Bits of all gradients that ring all-reduces between clusters must carry.

        Lower bounds divide it by the rates of the links. It is 0 (no bound) if the
        gradients travel in other ways: with ZeRO, experts, compression, or direct exchanges between
        all pairs of clusters with gloo (rules.direct).
        """
        rules = self.prices.rules
        _, block, _ = self.job.layers  # embedding, block, output layer
        has_experts = block.expert_parameters
        if rules.direct or self.shape.zero or has_experts or rules.compress != "off":
            return 0.0
        # total_bytes are those of a tensor parallel rank; each of these ranks has its own ring.
        return 8 * self.shape.tensor * self.job.total_bytes
