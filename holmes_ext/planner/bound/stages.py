"""Lower bounds on the work of each pipeline stage of one placement: messages, reductions, optimizer.

A placement fixes which nodes hold which stage; the number of layers of each stage is still open. Every value
here holds for each number of layers, so the bounds on the step time (least.py, chunks.py) can rest on it.

A "fold" (plan/cost/price.py) is a smaller placement with only the nodes of some stages. It has the same
costs, and many placements share it. Pipelines whose ranks are on equal nodes are of one kind.

A resource that several stages share is counted once: a NIC carries the messages of one pipeline class at a
time, and a link between clusters carries the reductions of one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.network import FREE, Price
from holmes_ext.plan.cost.pipeline import share_nics
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import (
    OTHER_ROUTE_SHARE,
    Hierarchical,
    PricedReduction,
    hierarchical,
)
from holmes_ext.plan.cost.stages import Rows, StageCosts
from holmes_ext.plan.engine import POSTED
from holmes_ext.plan.placement import GroupFamily, Placement
from holmes_ext.planner.simulate.execution import Execution

#: Share of an all-reduce's traffic that a reduce-scatter of the same bytes causes.
REDUCE_SCATTER_SHARE = 0.5
#: Relative tolerance for quotients that are rounded down to whole layers or micro-batches.
ROUNDING = 1e-12
#: ZeRO stage that shards gradients, so their sum is sent per micro-batch and not once a step.
ZERO_GRADIENTS = 2


class LinearCost(NamedTuple):
    """Seconds that a stage needs as a linear function of its number of layers."""

    block_s: float  # for each layer (transformer block)
    fixed_s: float  # once, whatever the number of layers

    def layers_below(self, limit_s: float, max_layers: int) -> int:
        """Return the most layers (up to `max_layers`) that take less than `limit_s` seconds."""
        if limit_s == inf or not self.block_s:
            return max_layers
        layers = ceil((limit_s - self.fixed_s) / self.block_s * (1 - ROUNDING)) - 1
        return min(max_layers, layers)


class Message(NamedTuple):
    """An activation sent to the next stage: lower bounds on its times, in seconds."""

    #: From the first byte sent to the last byte received.
    total_s: float
    #: While the sender waits, if sends block.
    sender_blocked_s: float
    #: Between the ends of two messages that follow each other on the stage link.
    interval_s: float
    #: While the sender's NIC is busy.
    nic_s: float
    #: Name of the fabric that carries the message; "" inside one node.
    fabric: str


#: The message from a stage to itself (pipelines of one stage).
NO_MESSAGE = Message(total_s=0.0, sender_blocked_s=0.0, interval_s=0.0, nic_s=0.0, fabric="")


@dataclass(frozen=True)
class AfterBackward:
    """Lower bounds on the work of a stage from the start of its last backward pass on."""

    #: Reduction of the stage's gradients.
    reduction: LinearCost
    #: Optimizer, and all-gather of the updated weights.
    update: LinearCost
    #: The reduction overlaps with the last backward pass.
    overlapped: bool
    #: Seconds for which one block's reduction occupies the NIC that carries activations inside the cluster.
    shared_nic_block_s: float


class StageBounds:
    """Lower bounds on the work of every stage of one placement. Lists have one entry for each stage."""

    def __init__(self, prices: Prices, placement: Placement, costs: StageCosts, run: Execution):
        """Read the compute times and the memory limits.

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
        #: Seconds of one block, and of the embedding (first stage) and the output layer (last stage).
        self.forward_s, self.extra_forward_s = _block_and_extra(costs.forward_s)
        self.backward_s, self.extra_backward_s = _block_and_extra(costs.backward_s)
        self.block_s = [f + b for f, b in zip(self.forward_s, self.backward_s)]
        self.extra_s = [f + b for f, b in zip(self.extra_forward_s, self.extra_backward_s)]
        #: Largest number of layers for which the stage's memory has room.
        self.max_layers = self._max_layers()

    def _max_layers(self) -> list[int]:
        """Return the most layers that fit the memory of each stage; all layers without a memory limit."""
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
        """Compute the lower bounds on messages, reductions and the work after the last backward pass."""
        run = self.run
        count = self.stage_count
        #: Sends do not block, and as many micro-batches are in flight as hide the stage links.
        self.async_stage_links = self.costs.link_load_s is not None
        #: Position, among the ranks of a stage, of the pipelines with the slowest messages.
        self.slowest_position, messages = self._slowest_messages()
        #: From the last stage back to the first one (interleaved schedules).
        self.last_to_first = messages[-1]
        #: Seconds from sending an activation on stage s to its arrival on stage s + 1.
        self.stage_links_s = [message.total_s for message in messages[:-1]]
        # POSTED: the framework itself sends without waiting for the receiver.
        sends_block = not self.async_stage_links and run.engine.sends != POSTED
        self.sender_blocked_s = [
            message.sender_blocked_s if sends_block else 0.0 for message in messages[:-1]
        ]
        #: Seconds between messages that follow each other on the stage link below the stage.
        self.interval_s = [message.interval_s for message in messages[:-1]]
        #: Warm-up depth: micro-batches that the stage may begin before its first backward pass.
        self.warm_up = [min(depth, self.micro_batches) for depth in self._max_warm_up()]
        #: Seconds for which one micro-batch's messages occupy the stage's NIC.
        self.nic_busy_s = self._nic_busy_s(messages)
        #: The same if the reduction uses that NIC too (AfterBackward.shared_nic_block_s), else 0.
        self.shared_nic_busy_s = [
            busy * (message.fabric == self._fabric_inside_cluster(stage))
            for stage, (busy, message) in enumerate(zip(self.nic_busy_s, messages))
        ]
        scatter_share = REDUCE_SCATTER_SHARE if run.engine.scatters else 1.0
        #: Share of an all-reduce's traffic that summing the gradients causes once a step. ZeRO 2 and 3 sum
        #: them for every micro-batch instead.
        self.all_reduce_share = (1.0, scatter_share, 0.0, 0.0)[run.zero]  # of ZeRO 0, 1, 2 and 3
        self.after_backward = [self._after_backward(stage) for stage in range(count)]
        stages_per_node = max(1, self.prices.network.processes // self.placement.stride)
        first_stages = range(0, count, stages_per_node) if stages_per_node > 1 else ()
        #: Stages that share a node, node by node; empty if a node holds one stage only.
        self.stages_of_nodes = [
            list(range(count)[first : first + stages_per_node]) for first in first_stages
        ]
        #: A layer takes the same time on every stage.
        self.is_homogeneous = len({*zip(self.forward_s, self.backward_s)}) == 1
        #: The gradient norm is summed over all stages before any optimizer step.
        self.has_norm_barrier = run.engine.norm and count > 1
        #: All-reduce of a tied embedding's gradient, between first and last stage.
        self.tied_s = [0.0] * count
        if self.has_norm_barrier and self.prices.job.tied_bytes:
            self.tied_s[0] = self.tied_s[-1] = self._tied_all_reduce_s()

    def _max_warm_up(self) -> list[int]:
        """Return the largest number of micro-batches that each stage begins before its first backward pass.

        1F1B begins one micro-batch for each stage from here to the end. Hiding the stage links needs more:
        as many as the messages of the stages below take passes (plan/cost/pipeline.py, in_flight). The
        number is largest at the fastest pace that any split of the layers allows.
        """
        result = [self.stage_count - stage for stage in range(self.stage_count)]  # 1F1B
        if self.costs.link_load_s is None:  # the framework's schedule
            return result
        # Seconds of a block's activation on each stage link; [1] is the block among embedding, block, output.
        stage_links_s = tuple(row[1] for row in self.costs.transfer_s[: self.stage_count - 1])
        mean_stage_s = (sum(self.extra_s) + self._least_block_work_s()) / self.stage_count
        # Twice (seconds of a message on each stage link, seconds for which it occupies the link): if a NIC
        # carries one stage link at a time, and if it carries both of its stage's links.
        exclusive = (stage_links_s, self.costs.link_load_s)
        shared = share_nics(*exclusive, self.costs.shared_nic_stages, mean_stage_s)
        # A pace is the seconds between two micro-batches: the slowest of computation and stage links.
        paces = [(links_s, max(mean_stage_s, *loads_s)) for links_s, loads_s in (exclusive, shared)]
        for stage in reversed(range(self.stage_count - 1)):
            passes_in_transit = 0.0
            for links_s, pace_s in paces:
                if pace_s:
                    passes_in_transit = max(passes_in_transit, 2 * links_s[stage] / pace_s)
            result[stage] = result[stage + 1] + 1 + ceil(passes_in_transit)
        return result

    def _least_block_work_s(self) -> float:
        """Return a lower bound on the seconds that all stages compute the blocks of one micro-batch.

        Every stage has one block; the others are on the fastest stages, as far as memory allows.
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

    def _slowest_messages(self) -> tuple[int, list[Message]]:
        """Return the messages of the pipelines that communicate longest, and their position in a stage.

        Pipelines differ if they lie on different node types. The list has the message of every stage to
        the next one; the last stage sends to the first.
        """
        # The positions at which the node types change on some stage: one for each pipeline that differs.
        positions = self.placement.borders[:-1]
        messages_of = {
            position: [self._message(stage, position) for stage in range(self.stage_count)]
            for position in positions
        }
        slowest = max(
            positions,
            key=lambda position: sum(message.total_s for message in messages_of[position]),
        )
        return slowest, messages_of[slowest]

    def _message(self, stage: int, position: int) -> Message:
        """Return the message from `stage` to the next one while only the pipelines at `position` send."""
        next_stage = (stage + 1) % self.stage_count
        if next_stage == stage:
            return NO_MESSAGE
        parts = self.placement.parts
        tied = self.placement.stages_per_component
        # Equal keys mean equal nodes on both ends, so placements of one search share the result.
        key = (
            parts[stage // tied],
            parts[next_stage // tied],
            stage % tied,
            next_stage - stage,
            position,
        )
        return self.prices.remember(
            "message", key, lambda: self._priced_message(stage, next_stage, position)
        )

    def _priced_message(self, stage: int, next_stage: int, position: int) -> Message:
        """Return the message from `stage` to `next_stage` while only the pipelines at `position` send."""
        prices = self.prices
        network = prices.network
        fold, ends = prices.fold(self.placement, stage, next_stage)
        stage_link = fold.stage_link(fold.pipeline_class_at(position), *ends)
        message_bytes = prices.job.block.activation_bytes
        load = network.message(stage_link, prices.link_bps(stage_link.node_types))
        if load.fabric is None:  # both stages are on one node
            seconds = load.price.seconds(message_bytes)
            return Message(
                total_s=seconds, sender_blocked_s=seconds, interval_s=0.0, nic_s=0.0, fabric=""
            )
        if load.fabric.name == ETHERNET:
            # Over Ethernet, tensor parallel ranks send a slice of the message each, and it may be compressed.
            compressed_share = prices.job.compressed_share(prices.rules.compression)
            message_bytes *= compressed_share / prices.slices(self.placement)
        interval_s = message_bytes * load.price.byte_s
        flows_per_nic = max(flows for _, flows in load.nics)
        return Message(
            total_s=load.price.seconds(message_bytes),
            sender_blocked_s=interval_s + load.fabric.latency_s,
            interval_s=interval_s,
            nic_s=8 * message_bytes * flows_per_nic / load.fabric.rate_bps,
            fabric=load.fabric.name,
        )

    def _nic_busy_s(self, messages: Sequence[Message]) -> list[float]:
        """Return the seconds for which an activation down and a gradient up occupy each stage's NIC.

        The bound is 0 if activation and gradient leave through different NICs, and on measured networks: a
        NIC may carry more there than one message was measured to need.
        """
        result = [0.0] * self.stage_count
        network = self.prices.network
        if network.links.measured or self.placement.stride % network.processes:
            return result
        for stage in range(1, self.stage_count - 1):
            up = messages[stage - 1]
            down = messages[stage]
            if up.fabric == down.fabric:
                result[stage] = up.nic_s + down.nic_s
        return result

    # ------------------------------------------------------------------- reductions

    def _after_backward(self, stage: int) -> AfterBackward:
        """Return the lower bounds on a stage's reduction and update, computed once for equal stages."""
        tied = self.placement.stages_per_component  # number of neighbouring stages that share nodes
        nodes = (self.placement.parts[stage // tied], stage % tied)
        is_first = stage == 0
        is_last = stage == self.stage_count - 1
        run = self.run
        # Stages with equal keys have equal bounds, also in other placements of the search.
        key = (
            nodes,
            self.slowest_position,
            (is_first, is_last),
            run.hierarchical,
            run.reductions[stage : stage + 1],
        )
        return self.prices.remember("after", key, lambda: self._priced_after_backward(stage))

    def _priced_after_backward(self, stage: int) -> AfterBackward:
        """Return the lower bounds on a stage's reduction and update, from the prices of its groups."""
        prices = self.prices
        run = self.run
        job = prices.job
        reduction, family = self.reduction(
            stage
        )  # family: the data parallel groups that are summed over
        ring = prices.network.ring(family, 0, prices.link_bps(family.node_types)).price
        reduction_price = self._reduction_price(reduction, ring)
        gather_price = self._weight_gather_price(ring)
        shards = family.ranks if run.zero else 1

        update_s = []  # of embedding, block and output layer
        reduction_s = []
        for layer, gradient_bytes in zip(job.layers, job.reduced_bytes):
            optimizer_s = run.parameter_s * layer.parameters / shards
            update_s.append(optimizer_s + gather_price.byte_s * gradient_bytes)
            reduction_s.append(reduction_price.byte_s * gradient_bytes)
        block_bytes = job.reduced_bytes[1]
        nic_byte_s = self._nic_byte_s(reduction, self._fabric_inside_cluster(stage))
        return AfterBackward(
            reduction=self._linear(stage, reduction_s, reduction_price.latency_s),
            update=self._linear(stage, update_s, gather_price.latency_s),
            overlapped=run.buckets_on(stage),
            shared_nic_block_s=nic_byte_s * block_bytes * self.all_reduce_share,
        )

    def _linear(self, stage: int, seconds: Sequence[float], latency_s: float) -> LinearCost:
        """Return the cost of a stage from the seconds of embedding, block and output layer."""
        embedding_s, block_s, output_s = seconds
        has_embedding = float(stage == 0)
        has_output = float(stage == self.stage_count - 1)
        fixed_s = has_embedding * embedding_s + has_output * output_s + latency_s
        return LinearCost(block_s, fixed_s)

    def _reduction_price(self, reduction: PricedReduction, ring: Price) -> Price:
        """Return a lower bound on the price of summing gradients once a step."""
        run = self.run
        if isinstance(reduction, Hierarchical):
            # The two levels overlap, so the slower one counts. With a WAN the stage may take another
            # route for the bytes that it really has, which is faster by OTHER_ROUTE_SHARE at most.
            slower_byte_s = max(reduction.inside.byte_s, reduction.across.byte_s)
            route_factor = OTHER_ROUTE_SHARE if self.prices.network.wan else 1.0
            latency_s = reduction.inside.latency_s + reduction.across.latency_s
            return Price(route_factor * slower_byte_s, latency_s)
        if not run.zero:
            return reduction.once
        if run.zero >= ZERO_GRADIENTS:
            return FREE
        return ring.scaled(REDUCE_SCATTER_SHARE) if run.engine.scatters else ring

    def _weight_gather_price(self, ring: Price) -> Price:
        """Return the price of gathering the updated weights after the optimizer (ZeRO 1 and 2)."""
        run = self.run
        if run.zero not in (1, 2):
            return FREE
        if run.zero == 1 and run.gather_overlap:
            return FREE
        half_ring = ring.scaled(0.5)  # an all-gather is half of an all-reduce
        return Price(
            self.prices.job.weight_bytes_per_gradient_byte * half_ring.byte_s, half_ring.latency_s
        )

    def reduction(self, stage: int) -> tuple[PricedReduction, GroupFamily]:
        """Return the reduction that the simulation uses on a stage, and the groups that it sums over.

        The groups are those that contain the slowest pipelines (`slowest_position`). They are data parallel
        groups with equal nodes (a "family"), so they share one price.
        """
        prices = self.prices
        run = self.run
        fold, (folded_stage,) = prices.fold(self.placement, stage)
        pipeline_kind = fold.pipeline_class_at(self.slowest_position)
        family = next(
            candidate
            for candidate in fold.families(folded_stage)
            if pipeline_kind in candidate.pipeline_classes
        )
        if family.ranks == 1:  # nothing to sum
            return PricedReduction(), family
        link_bps = prices.link_bps(family.node_types)
        if run.is_hierarchical(stage):
            mean_stage_bytes = prices.job.total_bytes / self.stage_count
            hierarchical_reduction = hierarchical(
                prices.network, family, mean_stage_bytes, run.direct, 0, run.compress, link_bps
            )
            if hierarchical_reduction is not None:
                return hierarchical_reduction, family
        return PricedReduction(prices.network.ring(family, 0, link_bps)), family

    def _fabric_inside_cluster(self, stage: int) -> str:
        """Return the name of the fabric that carries activations inside the cluster of a stage."""
        fold, (folded_stage,) = self.prices.fold(self.placement, stage)
        node_kind = fold.node_type_on(fold.pipeline_class_at(self.slowest_position), folded_stage)
        return self.prices.network.fabric([node_kind]).name

    @staticmethod
    def _nic_byte_s(reduction: PricedReduction, fabric: str) -> float:
        """Return the seconds for which each byte of a reduction occupies a NIC on `fabric`."""
        if isinstance(reduction, Hierarchical):
            passes = 2  # reduce-scatter before, all-gather after the exchange between clusters
            loads = reduction.inside_loads
        else:
            passes = 1
            loads = (reduction.load,)
        byte_s = []  # of each load on `fabric`; the least is the bound
        for load in loads:
            if load.fabric is not None and load.fabric.name == fabric:
                flows_per_nic = max(flows for _, flows in load.nics)
                byte_s.append(8 * load.volume * flows_per_nic / load.fabric.rate_bps)
        return passes * min(byte_s, default=0.0)

    def _tied_all_reduce_s(self) -> float:
        """Return a lower bound on the all-reduce of the tied embedding's gradient, in seconds.

        The bound is 0 if the first and the last stage may share a node.
        """
        prices = self.prices
        tied_bytes = prices.job.tied_bytes
        last_stage = self.stage_count - 1
        if last_stage * self.placement.stride < prices.network.processes:
            return 0.0
        fold, _ = prices.fold(self.placement, 0, last_stage)
        # Two ways to reduce: between pairs of ranks, or hierarchically (None if impossible).
        pairs, hierarchical_reduction = prices.tied_of(
            fold, fold.pipeline_class_at(self.slowest_position), alone=True
        )
        seconds = [pairs.seconds(tied_bytes)]
        if hierarchical_reduction is not None:
            # With a WAN the reduction may take another route, which is faster by the factor
            # OTHER_ROUTE_SHARE at most.
            route_factor = OTHER_ROUTE_SHARE if prices.network.wan else 1.0
            seconds.append(hierarchical_reduction.seconds(tied_bytes) * route_factor)
        return min(seconds)


def _block_and_extra(rows: Rows) -> tuple[list[float], list[float]]:
    """Return, for each stage, the cost of a block and of the embedding or output layer that it also has.

    Args:
        rows: For each stage the costs of (embedding, block, output layer).
    """
    extra = [0.0] * len(rows)
    extra[0] += rows[0][0]
    extra[-1] += rows[-1][2]
    return [row[1] for row in rows], extra
