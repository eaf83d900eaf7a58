"""Lower bounds on the work of each pipeline stage: messages, reductions, optimizer.

A placement fixes which nodes hold which stage, but not how many layers each stage has. So a bound is
either independent of the number of layers, or a linear function of it (LinearCost). least.py and
chunks.py compute bounds on the step time from them.

    stage link        connection of a stage to the next: activations there, gradients back
    pipeline          the ranks with the same index in each stage
    pipeline class    all pipelines on equal nodes
    family            all data-parallel groups of a stage on equal nodes
    Fold              compact form of the nodes of some stages (plan/placement.py)

Other traffic on the same NIC or link could only make a stage slower. So a bound counts the messages
of a single pipeline class, or the reductions of a single stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from holmes_ext.plan.cost.network import FREE, Price
from holmes_ext.plan.cost.pipeline import share_nics
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import (
    OTHER_ROUTE_SHARE,
    ZERO_GRADIENTS,
    Hierarchical,
    PricedReduction,
    hierarchical,
)
from holmes_ext.plan.cost.stages import Rows, StageCosts
from holmes_ext.plan.engine import POSTED
from holmes_ext.plan.placement import GroupFamily, Placement
from holmes_ext.planner.bound.messages import Message, slowest_messages
from holmes_ext.planner.bound.updates import ROUNDING, LinearCost
from holmes_ext.planner.simulate.execution import Execution

#: Share of an all-reduce's traffic that a reduce-scatter of the same bytes causes.
REDUCE_SCATTER_SHARE = 0.5


@dataclass(frozen=True)
class AfterBackward:
    """Lower bounds on the work of a stage from the start of its last backward pass on."""

    #: Reduction of the stage's gradients.
    reduction: LinearCost
    #: Optimizer, and all-gather of the updated weights.
    update: LinearCost
    #: The reduction overlaps with the last backward pass.
    overlapped: bool
    #: Seconds for which a block's reduction occupies the NIC that carries activations inside the
    #: cluster.
    shared_nic_block_s: float


class StageBounds:
    """Lower bounds on the work of every stage of a placement (lists: an entry for each stage)."""

    def __init__(self, prices: Prices, placement: Placement, costs: StageCosts, run: Execution):
        """Read the compute times and the memory limits of a placement's pipeline stages.

        Args:
            prices: Times of computation and communication for the parallel sizes.
            placement: Nodes of every stage.
            costs: Times and memory that the simulation of a step uses.
            run: Schedule and overlap of the job.
        """
        self.prices = prices
        self.placement = placement
        self.costs = costs
        self.run = run
        self.stage_count = costs.stages
        self.layer_count = costs.blocks
        self.micro_batches = costs.micro_batches
        #: Seconds of a block, and of embedding (on the first) and output layer (on the last stage).
        self.forward_s, self.extra_forward_s = _block_and_extra(costs.forward_s)
        self.backward_s, self.extra_backward_s = _block_and_extra(costs.backward_s)
        self.block_s = [f + b for f, b in zip(self.forward_s, self.backward_s)]
        self.extra_s = [f + b for f, b in zip(self.extra_forward_s, self.extra_backward_s)]
        #: Largest number of layers that fit the stage's memory.
        self.max_layers = self._max_layers()

    def _max_layers(self) -> list[int]:
        """Return how many layers fit the memory of each stage; all layers without a memory limit."""
        # Bytes of a layer, and of embedding or output layer. room_bytes: memory of a GPU for them.
        block_bytes, extra_bytes = _block_and_extra(self.costs.memory)
        result = []
        for available, block, extra in zip(self.costs.room_bytes, block_bytes, extra_bytes):
            layers = self.layer_count
            if available != inf:
                layers = min(layers, floor((available - extra) / block * (1 + ROUNDING)))
            result.append(layers)
        return result

    def fits(self, split: Sequence[int]) -> bool:
        """Return whether the layers of `split` fit the memory of every stage."""
        return all(layers <= most for layers, most in zip(split, self.max_layers))

    def bound_communication(self) -> None:
        """Compute lower bounds on the stages' messages, gradient reductions and weight updates.

        The results become attributes of this object: lists with an entry for each stage, or for
        each stage but the last (messages to the next stage). Two flags that the bounds on the step
        need are set, too: is_homogeneous and has_norm_barrier.
        """
        self._bound_messages()
        self._bound_reductions()
        #: A layer takes the same time on every stage.
        self.is_homogeneous = len({*zip(self.forward_s, self.backward_s)}) == 1
        #: The gradient norm is summed over all stages before any optimizer step.
        self.has_norm_barrier = self.run.engine.norm and self.stage_count > 1
        #: All-reduce of a tied embedding's gradient, between first and last stage. Without a norm
        #: it is left out: 0 is always a valid lower bound.
        self.tied_s = [0.0] * self.stage_count
        if self.has_norm_barrier and self.prices.job.tied_bytes:
            self.tied_s[0] = self.tied_s[-1] = self._tied_all_reduce_s()

    def _bound_messages(self) -> None:
        """Compute lower bounds on the times of the messages between stages, as attributes."""
        # link_load_s (times of holmes's schedule) is None if the framework's own schedule runs.
        has_framework_schedule = self.costs.link_load_s is None
        #: holmes's schedule: sends do not block, and enough micro-batches begin to hide messages.
        self.async_stage_links = not has_framework_schedule
        #: Index, among the ranks of a stage, of the ranks whose pipeline has the slowest messages.
        self.slowest_rank_index, messages = slowest_messages(
            self.prices, self.placement, self.stage_count
        )
        #: From the last stage back to the first (interleaved schedules).
        self.last_to_first = messages[-1]
        to_next_stage = messages[:-1]
        #: Seconds from sending an activation on stage s to its arrival on stage s + 1.
        self.stage_links_s = [message.total_s for message in to_next_stage]
        #: Seconds between messages that follow each other on the link to the next stage.
        self.interval_s = [message.interval_s for message in to_next_stage]

        # POSTED: the framework itself sends without waiting for the receiver.
        sends_block = has_framework_schedule and self.run.engine.sends != POSTED
        #: Seconds for which a send blocks the stage.
        self.sender_blocked_s = [0.0] * len(to_next_stage)
        if sends_block:
            self.sender_blocked_s = [message.sender_blocked_s for message in to_next_stage]
        #: Warm-up depth: micro-batches that the stage may begin before its first backward pass.
        self.warm_up = [min(depth, self.micro_batches) for depth in self._max_warm_up()]
        #: Seconds for which a micro-batch's messages occupy the stage's NIC.
        self.nic_busy_s = self._nic_busy_s(messages)
        #: The same, but 0 unless this is the NIC of AfterBackward.shared_nic_block_s. (The NIC then
        #: sends the messages and the stage's gradient reduction, so both times may be added.)
        self.shared_nic_busy_s = [0.0] * self.stage_count
        for stage, message in enumerate(messages):
            is_same_nic = message.fabric == self._fabric_inside_cluster(stage)
            if is_same_nic:  # each fabric has its own NICs
                self.shared_nic_busy_s[stage] = self.nic_busy_s[stage]

    def _bound_reductions(self) -> None:
        """Compute lower bounds on each stage's work after its last backward pass, as attributes."""
        # ZeRO 1: some engines reduce-scatter the gradients (half the traffic), others all-reduce them.
        zero_1_share = REDUCE_SCATTER_SHARE if self.run.engine.scatters else 1.0
        share_of_zero = (1.0, zero_1_share, 0.0, 0.0)  # ZeRO 2 and 3 sum after each micro-batch
        #: Traffic of the sum of gradients at the step's end, divided by that of an all-reduce.
        self.all_reduce_share = share_of_zero[self.run.zero]
        stages = range(self.stage_count)
        #: By stage: its gradient reduction and update.
        self.after_backward = [self._after_backward(stage) for stage in stages]
        #: Lists of the stages on the same node; empty if each node holds ranks of a single stage.
        self.stages_of_nodes = []
        # Consecutive ranks fill a node of `processes` ranks. Every `stride` ranks, the next stage
        # begins: with 8 ranks a node and a stride of 4, stages 0 and 1 are on the same nodes.
        stages_per_node = max(1, self.prices.network.processes // self.placement.stride)
        if stages_per_node > 1:
            for first in stages[::stages_per_node]:
                self.stages_of_nodes.append(list(stages[first : first + stages_per_node]))

    def _max_warm_up(self) -> list[int]:
        """Return the most micro-batches that each stage may begin before its first backward.

        Under 1F1B this is 1 for this stage and 1 for each later stage. A schedule that hides the
        messages between stages needs more: another for each micro-batch that is being sent, as
        activation or as gradient, between this stage and the last. A faster pace (time between two
        micro-batches) means that more are on their way. So the fastest pace of all splits of the
        layers is assumed.
        """
        result = [self.stage_count - stage for stage in range(self.stage_count)]  # 1F1B
        if self.costs.link_load_s is None:  # the framework's own schedule: stage links not hidden
            return result
        # transfer_s: seconds after embedding, block and output layer, on each stage link.
        stage_links_s = []  # seconds of a block's activation on each stage link
        for _, block_s, _ in self.costs.transfer_s[: self.stage_count - 1]:
            stage_links_s.append(block_s)
        mean_stage_s = (sum(self.extra_s) + self._least_block_work_s()) / self.stage_count
        # Pairs of lists by stage link: seconds of a message, and seconds for which it occupies the
        # link. Exclusive: each link has a NIC for itself. Shared: the same NIC of a stage carries its
        # links to both neighbours (share_nics), so messages take longer. Both are tried.
        exclusive = (tuple(stage_links_s), self.costs.link_load_s)
        shared = share_nics(
            transfer=exclusive[0],
            load=exclusive[1],
            nics=self.costs.shared_nic_stages,
            busy_s=mean_stage_s,
        )
        # A pace is the seconds between two micro-batches: the slowest of computation and links.
        paces = [(links_s, max(mean_stage_s, *loads_s)) for links_s, loads_s in (exclusive, shared)]
        for stage in reversed(range(self.stage_count - 1)):
            # A micro-batch uses the stage link twice, as activation and as gradient. In this time
            # so many other micro-batches follow at the pace.
            micro_batches_in_transit = 0.0
            for links_s, pace_s in paces:
                if pace_s:
                    in_transit = 2 * links_s[stage] / pace_s
                    micro_batches_in_transit = max(micro_batches_in_transit, in_transit)
            result[stage] = result[stage + 1] + 1 + ceil(micro_batches_in_transit)
        return result

    def _least_block_work_s(self) -> float:
        """Return the least seconds in which all layers (blocks) compute a micro-batch, in sequence.

        Embedding and output layer are not included. This is the best split of the layers: 1 on
        every stage, and the others on the fastest stages, as far as memory allows.
        """
        remaining = self.layer_count - self.stage_count
        total_s = sum(self.block_s)
        for stage in sorted(range(self.stage_count), key=self.block_s.__getitem__):
            layers = min(remaining, self.max_layers[stage] - 1)
            total_s += layers * self.block_s[stage]
            remaining -= layers
            if not remaining:
                break
        return total_s

    # ------------------------------------------------------------------- messages

    def _nic_busy_s(self, messages: Sequence[Message]) -> list[float]:
        """Return the seconds for which a micro-batch's messages occupy each stage's NIC.

        A stage between others sends an activation to the next stage, and a gradient to the previous
        stage. The result is a lower bound. It is 0 for the first and the last stage, and where the
        seconds are not certain: if both messages leave through different NICs, if stages share
        nodes, and on measured networks. (There only the rate of a single message was measured; a NIC
        may be faster than that.)

        Args:
            messages: For each stage, the message to the next stage.
        """
        result = [0.0] * self.stage_count
        network = self.prices.network
        # The stride is the number of neighbouring ranks of a stage.
        shares_nodes = self.placement.stride % network.site.aligned_ranks != 0
        if network.links.measured or shares_nodes:
            return result
        # The first and the last stage send in a single direction, so they never limit the step.
        for stage in range(1, self.stage_count - 1):
            up = messages[stage - 1]  # a gradient to the stage before is as large as its activation
            down = messages[stage]
            if up.fabric == down.fabric:
                result[stage] = up.receiver_nic_s + down.sender_nic_s
        return result

    # ------------------------------------------------------------------- reductions

    def _after_backward(self, stage: int) -> AfterBackward:
        """Return the lower bounds on a stage's gradient reduction and update.

        An update is an optimizer step and the gather of the updated weights. The bounds are
        computed once for equal stages.
        """
        # A component is a set of neighbouring stages that share nodes (mostly a single stage).
        stages_per_component = self.placement.stages_per_component
        component, stage_in_component = divmod(stage, stages_per_component)
        nodes = (self.placement.parts[component], stage_in_component)
        is_first = stage == 0
        is_last = stage == self.stage_count - 1
        run = self.run
        # Stages with equal keys have equal bounds, also in other placements of the search. The
        # reduction is that of the pipeline at slowest_rank_index, so this index belongs to the key.
        key = (
            nodes,
            self.slowest_rank_index,
            (is_first, is_last),
            run.hierarchical,
            run.reductions[stage : stage + 1],  # a slice: empty if no reductions are given
        )
        # remember(): computed once for each key
        return self.prices.remember("after", key, lambda: self._priced_after_backward(stage))

    def _priced_after_backward(self, stage: int) -> AfterBackward:
        """Compute the lower bounds on a stage's gradient reduction and update, in seconds.

        An update is an optimizer step and the gather of the updated weights. Each collective has a
        price: its latency, and seconds for each byte. With the bytes of the layers, the seconds
        become a linear function of the stage's number of layers, as this is not known yet.
        """
        prices = self.prices
        run = self.run
        job = prices.job
        # family: the data parallel groups that are summed over
        reduction, family = self.reduction(stage)
        link_bps = prices.link_bps(family.node_types)  # between the GPUs of a node
        # groups=0: no other group crosses between clusters at the same time
        ring = prices.network.ring(family, groups=0, inside_bps=link_bps).price
        reduction_price = self._reduction_price(reduction, ring)
        gather_price = self._weight_gather_price(ring)
        shards = family.ranks if run.zero else 1  # ranks that share the optimizer's work

        # Seconds for embedding, block and output layer.
        update_s = []
        reduction_s = []
        for layer, gradient_bytes in zip(job.layers, job.reduced_bytes):
            optimizer_s = run.parameter_s * layer.parameters / shards
            update_s.append(optimizer_s + gather_price.byte_s * gradient_bytes)
            reduction_s.append(reduction_price.byte_s * gradient_bytes)
        _, block_bytes, _ = job.reduced_bytes  # gradients of a block
        # For a byte of gradients, seconds on the NIC that also sends the stage's activations.
        nic_byte_s = self._nic_byte_s(reduction, self._fabric_inside_cluster(stage))
        return AfterBackward(
            reduction=self._linear(stage, reduction_s, reduction_price.latency_s),
            update=self._linear(stage, update_s, gather_price.latency_s),
            overlapped=run.buckets_on(stage),  # sent in buckets under the last backward pass
            # all_reduce_share: once a step, ZeRO sends only this share of an all-reduce's bytes
            shared_nic_block_s=nic_byte_s * block_bytes * self.all_reduce_share,
        )

    def _linear(self, stage: int, seconds: Sequence[float], latency_s: float) -> LinearCost:
        """Return the seconds of a stage as a linear function of its number of layers.

        Args:
            stage: Number of the stage. The first also has the embedding, the last the output layer.
            seconds: Seconds of embedding, block (a layer) and output layer.
            latency_s: Latency of the collective, once whatever the number of layers.
        """
        embedding_s, block_s, output_s = seconds
        has_embedding = float(stage == 0)
        has_output = float(stage == self.stage_count - 1)
        fixed_s = has_embedding * embedding_s + has_output * output_s + latency_s
        return LinearCost(block_s, fixed_s)

    def _reduction_price(self, reduction: PricedReduction, ring: Price) -> Price:
        """Return the least latency, and seconds for each byte, of summing a stage's gradients.

        Both together are a price. A hierarchical reduction costs the slower of its parts. ZeRO 1
        costs `ring`, or half of it if each rank gets its shard only. ZeRO 2 and 3 cost nothing
        here: they sum after each micro-batch. Any other reduction costs its own price.

        Args:
            reduction: Reduction that the stage uses.
            ring: Price of a ring all-reduce in the same groups; only ZeRO 1 uses it.
        """
        run = self.run
        if isinstance(reduction, Hierarchical):
            # The parts inside and across clusters overlap, so the slower part counts. With a WAN
            # this price is that of the default route between clusters, unless another takes less
            # than OTHER_ROUTE_SHARE (0.95) of the time for a stage of mean size. The simulation may
            # choose another route for this stage, so only 0.95 of the price is sure.
            slower_byte_s = max(reduction.inside.byte_s, reduction.across.byte_s)
            route_factor = OTHER_ROUTE_SHARE if self.prices.network.wan else 1.0
            latency_s = reduction.inside.latency_s + reduction.across.latency_s
            return Price(route_factor * slower_byte_s, latency_s)
        if not run.zero:
            return reduction.once  # price of the collectives that run once a step
        if run.zero >= ZERO_GRADIENTS:
            return FREE  # sent after each micro-batch, under its passes
        # ZeRO 1: each rank needs the sums of its shard only, if the engine makes use of that.
        return ring.scaled(REDUCE_SCATTER_SHARE) if run.engine.scatters else ring

    def _weight_gather_price(self, ring: Price) -> Price:
        """Return the price of gathering the updated weights after the optimizer (ZeRO 1 and 2).

        Args:
            ring: Price of a ring all-reduce over the same ranks.
        """
        run = self.run
        if run.zero not in (1, 2):  # ZeRO 0 has all weights, ZeRO 3 gathers them before each pass
            return FREE
        if run.zero == 1 and run.gather_overlap:  # hidden under the next forward pass
            return FREE
        half_ring = ring.scaled(0.5)  # an all-gather is half of an all-reduce
        return Price(
            self.prices.job.weight_bytes_per_gradient_byte * half_ring.byte_s, half_ring.latency_s
        )

    def reduction(self, stage: int) -> tuple[PricedReduction, GroupFamily]:
        """Return how a stage's gradients are summed, and over which data parallel groups.

        The simulation uses the same reduction. A "family" is all data parallel groups of a stage
        on equal nodes, so they have the same price. The result is for the family of the pipeline with
        the slowest messages, whose rank on a stage is the stage's rank number `slowest_rank_index`.
        """
        prices = self.prices
        run = self.run
        # fold(): this stage only, with equal ranks counted together. A pipeline class is all
        # pipelines on equal nodes.
        fold, (folded_stage,) = prices.fold(self.placement, stage)
        pipeline_class = fold.pipeline_class_at(self.slowest_rank_index)
        family = next(
            candidate
            for candidate in fold.families(folded_stage)
            if pipeline_class in candidate.pipeline_classes
        )
        if family.ranks == 1:  # nothing to sum
            return PricedReduction(), family
        link_bps = prices.link_bps(family.node_types)
        if run.is_hierarchical(stage):
            # The route is chosen for a stage of mean size, as the layers of the stage are open.
            mean_stage_bytes = prices.job.total_bytes / self.stage_count
            hierarchical_reduction = hierarchical(
                prices.network,
                family,
                mean_stage_bytes,
                direct=run.direct,
                groups=0,  # no other group crosses between clusters at the same time
                compress=run.compress,
                inside_bps=link_bps,
            )
            if hierarchical_reduction is not None:
                return hierarchical_reduction, family
        return PricedReduction(prices.network.ring(family, groups=0, inside_bps=link_bps)), family

    def _fabric_inside_cluster(self, stage: int) -> str:
        """Return the name of the network that carries activations inside the cluster of a stage.

        If a stage lies on several clusters, the cluster of the pipeline with the slowest messages is
        taken.
        """
        # fold(): the stage's nodes, with equal ranks together. A pipeline class is all pipelines on
        # equal nodes; a node type is a cluster.
        fold, (folded_stage,) = self.prices.fold(self.placement, stage)
        pipeline_class = fold.pipeline_class_at(self.slowest_rank_index)
        node_type = fold.node_type_on(pipeline_class, folded_stage)
        return self.prices.network.fabric([node_type]).name

    @staticmethod
    def _nic_byte_s(reduction: PricedReduction, fabric: str) -> float:
        """Return the least seconds for which each byte of gradients in a reduction occupies a NIC.

        Only NICs of the given fabric count; 0 if the reduction does not use it. A hierarchical
        reduction occupies NICs in several clusters, for different times. The caller needs the NIC
        that also sends the stage's activations. It may be in any of these clusters: the least counts.

        Args:
            reduction: Reduction of a stage.
            fabric: Name of the fabric.
        """
        if isinstance(reduction, Hierarchical):
            steps = 2  # reduce-scatter before the exchange between clusters, all-gather after it
            loads = reduction.inside_loads
        else:
            steps = 1
            loads = (reduction.load,)
        byte_s = []  # of each load on `fabric`
        for load in loads:
            if load.fabric is not None and load.fabric.name == fabric:
                # load.nics: (NIC, equal flows that share it). A flow has `volume` bytes a byte.
                flows_per_nic = max(flows for _, flows in load.nics)
                byte_s.append(8 * load.volume * flows_per_nic / load.fabric.rate_bps)
        return steps * min(byte_s, default=0.0)

    def _tied_all_reduce_s(self) -> float:
        """Return a lower bound on the all-reduce of the tied embedding's gradient, in seconds.

        The first and the last stage both have the tied embedding, so its gradient is summed between
        them. The bound is 0 if they may share a node. Of all pipelines, that with the slowest messages
        counts.
        """
        prices = self.prices
        tied_bytes = prices.job.tied_bytes
        last_stage = self.stage_count - 1
        # Distance of a pipeline's first and last rank; stride: from one stage to the next. Consecutive
        # ranks fill a node, so both may share a node if the widest node has more ranks than that.
        distance = last_stage * self.placement.stride
        if distance < max(prices.network.widths):
            return 0.0
        # fold(): the nodes of both stages, with equal ranks together. A pipeline class is all
        # pipelines on equal nodes; that at slowest_rank_index has the slowest messages.
        fold, _ = prices.fold(self.placement, 0, last_stage)
        # tied_of() prices two ways to reduce: between pairs of ranks, or hierarchically (None if
        # impossible). alone: no other group sends at the same time; this gives the least time.
        pairs, hierarchical_reduction = prices.tied_of(
            fold, fold.pipeline_class_at(self.slowest_rank_index), alone=True
        )
        seconds = [pairs.seconds(tied_bytes)]
        if hierarchical_reduction is not None:
            # With a WAN the simulation may choose another route. tied_of() keeps its default route
            # unless another takes less than OTHER_ROUTE_SHARE (0.95) of the time. So the fastest
            # route takes at least 0.95 of this price.
            route_factor = OTHER_ROUTE_SHARE if prices.network.wan else 1.0
            seconds.append(hierarchical_reduction.seconds(tied_bytes) * route_factor)
        return min(seconds)


def _block_and_extra(rows: Rows) -> tuple[list[float], list[float]]:
    """Return two lists of costs by stage: of a transformer block, and of embedding or output layer.

    Args:
        rows: For each stage the costs of (embedding, block, output layer).
    """
    extra = [0.0] * len(rows)
    extra[0] += rows[0][0]
    extra[-1] += rows[-1][2]
    return [row[1] for row in rows], extra
