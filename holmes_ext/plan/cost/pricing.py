"""Seconds and bytes of every stage of a shape under an arrangement, from numbers of clusters instead of numbers of ranks.

The rules are plan/cost/step.py's (ring all-reduce, groups that share a NIC share its rate), so a dense model gives the same figures as
plan/cost/stage_costs.py where traffic inside a node is free (tests/test_pricing.py compares them); here stages with the same content are priced once,
which is what a search of 16,384 GPUs needs. Besides: NVLink where the GPUs' rate is known, ZeRO, experts, and for a data-parallel group that
straddles clusters the choice between a flat ring and two levels (runtime/reduce/two_level.py: inside, across, inside; not under ZeRO 2 and 3, which no
engine reduces so). What ZeRO 2 and 3 send counts in full: nothing of it is hidden under computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from holmes_ext.cluster.site import Fabric
from holmes_ext.plan.cost.memory import working_bytes
from holmes_ext.plan.cost.model import Layer, Model
from holmes_ext.plan.cost.reduction import reduced_parameters
from holmes_ext.plan.cost.step import allreduce_seconds, send_seconds
from holmes_ext.plan.search.arrangement import PIPELINES_FIRST, Arrangement, Content, Ground
from holmes_ext.plan.search.space import REDUCTIONS, Shape


@dataclass(frozen=True)
class StagePrice:
    """Of one stage: flops (FLOP/s of a GPU), collective_s (of a block and micro-batch, forward and backward), gather_byte_s and
    scatter_byte_s (weights gathered before a layer's forward and its backward, gradients scattered after its backward, of every micro-batch: ZeRO 3, and
    the latter ZeRO 2; of a byte of gradients), part_latency_s (of one of these), byte_s (reduction of a byte of gradients once a step), latency_s (of that),
    limit_bytes, reduction ("local", "flat", "two-level") and the fabric of the reduction."""

    flops: float
    collective_s: float
    gather_byte_s: float
    scatter_byte_s: float
    part_latency_s: float
    byte_s: float
    latency_s: float
    limit_bytes: float
    reduction: str
    fabric: str


class Pricing:
    """Prices of one shape; content by content, edge by edge."""

    def __init__(self, ground: Ground, model: Model, shape: Shape, reductions: Sequence[str] = REDUCTIONS, memory_bytes: float = 0.0):
        self.ground, self.shape, self.reductions, self.memory_bytes = ground, shape, reductions, memory_bytes
        self.original = model
        key = (id(model), shape.micro_batch, shape.micro_batches, shape.recompute, shape.zero)
        if key not in ground.memo:
            ground.memo[key] = shape.model(model)
        self.model = ground.memo[key]
        key = (id(model), shape.micro_batch, shape.recompute, shape.tensor, shape.context, shape.expert, shape.pipeline == 1)
        if key not in ground.memo:
            own = (shape.tensor, shape.context, shape.expert if model.experts else 1)
            ground.memo[key] = layers_of(self.model, *own, model.tied and shape.pipeline == 1), working_bytes(self.model, *own)
        (self.embedding, self.block, self.output), self.working = ground.memo[key]
        self.stage_ranks = ground.world // shape.pipeline
        self.shards = shape.data * shape.context
        self._stages: dict[tuple[Content, str], StagePrice] = {}
        self._edges: dict[tuple, float] = {}

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (self.embedding, *[self.block] * self.model.layers, self.output)

    def bytes_of(self, layer: Layer) -> float:
        """State of a layer's parameters on one rank."""
        expert_shards = max(1, self.shards // self.shape.expert)
        whole, shared = self.model.state_bytes, self.model.sharded_bytes
        dense = layer.parameters - layer.expert_parameters
        return dense * (whole + shared / self.shards) + layer.expert_parameters * (whole + shared / expert_shards)

    def reduced_bytes(self, layer: Layer) -> float:
        """Gradients of a layer, in bytes that a group of all data-parallel ranks would have to reduce to take as long."""
        return self.model.gradient_width * reduced_parameters(layer, self.shards, self.shape.expert)

    def sharded_s(self, layer: Layer, price: StagePrice) -> tuple[float, float]:
        """Seconds that ZeRO 2 and 3 add to a forward and to a backward of a layer."""
        if self.shape.zero < 2:
            return 0.0, 0.0
        size, latency = self.reduced_bytes(layer), price.part_latency_s
        gather = size * price.gather_byte_s + (latency if price.gather_byte_s else 0.0)
        return gather, gather + size * price.scatter_byte_s + (latency if price.scatter_byte_s else 0.0)

    def stage(self, content: Content, order: str) -> StagePrice:
        if (content, order) not in self._stages:
            self._stages[content, order] = self._price(content, order)
        return self._stages[content, order]

    def edges(self, arrangement: Arrangement) -> list[float]:
        """Seconds of one activation from each stage to the next."""
        step, processes = self._step(arrangement.order), self.ground.processes
        found = []
        for stage, (one, other) in enumerate(zip(arrangement.contents, arrangement.contents[1:])):
            key = (one, other, (stage + 1) * step % processes != 0, arrangement.order)
            if key not in self._edges:
                self._edges[key] = self._edge(*key)
            found.append(self._edges[key])
        return found

    def least_edge_s(self) -> float:
        """Seconds that no activation to the next stage beats, whatever the arrangement; 0 where neighbouring stages may share a node."""
        ground, shape = self.ground, self.shape
        replica = shape.pipeline * shape.tensor * shape.context
        pipelines_first = all(ranks % replica == 0 for ranks in ground.ranks) and any(ranks // shape.pipeline % ground.processes for ranks in ground.ranks)
        if shape.pipeline == 1 or pipelines_first or self.stage_ranks % ground.processes:
            return 0.0
        key = ("edge", self.block.activation_bytes)
        if key not in ground.memo:
            fabrics = {ground.fabric((one, other)) for one in range(len(ground.ranks)) for other in range(len(ground.ranks))}
            ground.memo[key] = min(send_seconds(self.block.activation_bytes, fabric, ground.processes) for fabric in fabrics)
        return ground.memo[key]

    def wrap(self, arrangement: Arrangement) -> float:
        """Seconds of an activation from the last stage to the first: the next chunk's."""
        local = self._step(arrangement.order) * self.shape.pipeline <= self.ground.processes
        return self._edge(arrangement.contents[-1], arrangement.contents[0], local, arrangement.order)

    def tied_s(self, arrangement: Arrangement) -> float:
        """All-reduce of the tied embedding's gradient between the first and the last stage."""
        if not self.model.tied or self.shape.pipeline == 1:
            return 0.0
        step, size = self._step(arrangement.order), self.model.vocabulary * self.model.hidden / self.shape.tensor * self.model.gradient_width
        sharers = min(self.ground.processes, step)
        if step * self.shape.pipeline <= self.ground.processes:
            return self._inside(size, 2, [index for index, _ in arrangement.contents[0]])
        pairs = _pairs(arrangement.contents[0], arrangement.contents[-1])
        return max(allreduce_seconds(size, [1, 1], self.ground.fabric(pair), sharers) for pair in pairs)

    def _step(self, order: str) -> int:
        """Ranks from one stage to the next."""
        return self.shape.tensor * self.shape.context if order == PIPELINES_FIRST else self.stage_ranks

    def _price(self, content: Content, order: str) -> StagePrice:
        shape, model, clusters = self.shape, self.model, [index for index, _ in content]
        gpus = [self.ground.gpus[index] for index in clusters]
        limit = min(min((gpu.memory_bytes or inf) for gpu in gpus), self.memory_bytes or inf)
        how, fabric, byte_s, latency = self._reduction(content, order)
        weights = model.activation_width / model.gradient_width  # of gradients' bytes
        gather, scatter = weights * byte_s / 2, byte_s / 2  # a reduce-scatter or an all-gather is half an all-reduce
        return StagePrice(
            flops=min(gpu.flops for gpu in gpus),
            collective_s=self._collectives(content, order),
            gather_byte_s=gather if shape.zero == 3 else 0.0,
            scatter_byte_s=scatter if shape.zero >= 2 else 0.0,
            part_latency_s=latency / 2,
            byte_s=(byte_s, scatter + gather, gather, 0.0)[shape.zero],
            latency_s=(latency, latency, latency / 2, 0.0)[shape.zero],
            limit_bytes=limit,
            reduction=how,
            fabric=fabric,
        )

    def _members_on_node(self, order: str) -> int:
        """Ranks of one data-parallel group on a node."""
        processes, tensor, context = self.ground.processes, self.shape.tensor, self.shape.context
        whole = tensor * context * self.shape.pipeline
        if order == PIPELINES_FIRST:
            here = context * (processes // whole) if processes >= whole else min(context, processes // tensor)
        else:
            here = min(processes, self.stage_ranks) // tensor
        return max(1, here)

    def _reduction(self, content: Content, order: str) -> tuple[str, str, float, float]:
        """How, over which fabric, seconds of a byte of gradients, latency: an all-reduce by the faster way that is allowed."""
        count, here = self.shards, self._members_on_node(order)
        clusters = [index for index, _ in content]
        if count == 1:
            return "none", "", 0.0, 0.0
        if count <= here:
            return "local", "", self._inside(1.0, count, clusters), 0.0
        fabric, sharers = self.ground.fabric(clusters), self.ground.processes // here
        latency = allreduce_seconds(0.0, _spread(count, here), fabric, sharers)
        flat = ("flat", fabric.name, allreduce_seconds(1e9, _spread(count, here), fabric, sharers) / 1e9 - latency / 1e9, latency)
        options = [flat] if "flat" in self.reductions else []
        possible = self.ground.only is None and "two-level" in self.reductions and self.shape.zero < 2
        two = self._two_level(content, here, fabric) if possible else None
        options += [two] if two else []
        size = self._typical_bytes
        return min(options or [flat], key=lambda option: option[2] * size + option[3])

    @cached_property
    def _typical_bytes(self) -> float:
        total = self.embedding.parameters + self.output.parameters + self.model.layers * self.block.parameters
        return total * self.model.gradient_width / self.shape.pipeline

    def _two_level(self, content: Content, here: int, across: Fabric) -> tuple[str, str, float, float] | None:
        """Inside each cluster on its own fabric, across only the sums; None where no cluster's own fabric is faster."""
        inner = {index: self.ground.fabric([index]) for index, _ in content}
        if len(inner) < 2 or all(fabric.preference <= across.preference for fabric in inner.values()):
            return None
        if any(ranks % self.shape.tensor or ranks // self.shape.tensor < here for _, ranks in content):
            return None
        sharers, processes = self.ground.processes // here, self.ground.processes
        members = [ranks // self.shape.tensor for _, ranks in content]

        def seconds(size: float) -> tuple[float, float]:
            inside = max(
                allreduce_seconds(size, _spread(count, here), inner[index], sharers) if count > here else self._inside(size, count, [index])
                for (index, _), count in zip(content, members)
            )
            return inside, allreduce_seconds(size / min(members), [1] * len(members), across, processes)

        latencies, whole = seconds(0.0), seconds(1e9)  # chunks follow each other: the slower level sets the pace
        latency, slower = sum(latencies), max((all_ - late) / 1e9 for all_, late in zip(whole, latencies))
        return "two-level", across.name, slower, latency

    def _inside(self, size: float, count: int, clusters: Sequence[int]) -> float:
        """All-reduce of `size` bytes among `count` GPUs of one node; 0 where their link is not known."""
        rate = min(self.ground.gpus[index].link_bps for index in clusters)
        return 2 * (count - 1) / count * size * 8 / rate if rate and count > 1 else 0.0

    def _fabric_of(self, content: Content, span: int) -> Fabric:
        """Of groups of `span` neighbouring ranks: the slowest of the clusters' own where each lies in one, else what all share."""
        if all(ranks % span == 0 for _, ranks in content):
            return min((self.ground.fabric([index]) for index, _ in content), key=lambda fabric: fabric.preference)
        return self.ground.fabric([index for index, _ in content])

    def _collectives(self, content: Content, order: str) -> float:
        """Seconds of a block's tensor, context and expert groups in one micro-batch, forward and backward."""
        shape, block, processes = self.shape, self.block, self.ground.processes
        clusters, seconds = [index for index, _ in content], 0.0
        rate = min(self.ground.gpus[index].link_bps for index in clusters)
        if shape.tensor > 1:
            if shape.tensor <= processes:
                seconds += self._inside(block.tensor_bytes, shape.tensor, clusters)
            else:
                seconds += allreduce_seconds(block.tensor_bytes, _spread(shape.tensor, processes), self._fabric_of(content, shape.tensor))
        if shape.context > 1:
            span = shape.tensor * shape.context
            if span <= processes:
                seconds += block.context_bytes * 8 / rate if rate else 0.0
            else:
                seconds += send_seconds(block.context_bytes, self._fabric_of(content, span), min(shape.tensor, processes), shape.context - 1)
        if self.model.experts and shape.expert > 1:
            span = shape.tensor * shape.expert
            if span <= processes and order != PIPELINES_FIRST:
                seconds += block.expert_bytes * 8 / rate if rate else 0.0
            else:
                wide = self._fabric_of(content, span) if order != PIPELINES_FIRST else self.ground.fabric(clusters)
                seconds += send_seconds(block.expert_bytes, wide, processes, shape.expert - 1)
        return seconds

    def _edge(self, one: Content, other: Content, local: bool, order: str) -> float:
        size = self.block.activation_bytes
        if local:
            rate = min(self.ground.gpus[index].link_bps for index, _ in (*one, *other))
            return size * 8 / rate if rate else 0.0
        sharers = min(self.ground.processes, self._step(order))
        return max(send_seconds(size, self.ground.fabric(pair), sharers) for pair in _pairs(one, other))


def layers_of(model: Model, tensor: int, context: int, expert: int, one_matrix: bool) -> tuple[Layer, Layer, Layer]:
    """Embedding, a block, output."""
    layers = model.costs(tensor, context, expert)
    output = layers[-1]
    if one_matrix:
        output = replace(output, parameters=output.parameters - model.vocabulary * model.hidden / tensor)
    return layers[0], layers[1], output


def _spread(count: int, here: int) -> list[int]:
    """`count` members, `here` on each node; allreduce_seconds looks at their sum and whether there is more than one node."""
    return [count - here, here]


def _pairs(one: Content, other: Content) -> set[tuple[int, int]]:
    """Clusters that face each other when two stages' ranks are laid side by side."""
    pairs, left, right = set(), list(one), list(other)
    while left and right:
        taken = min(left[0][1], right[0][1])
        pairs.add((left[0][0], right[0][0]))
        left = ([(left[0][0], left[0][1] - taken)] if left[0][1] > taken else []) + left[1:]
        right = ([(right[0][0], right[0][1] - taken)] if right[0][1] > taken else []) + right[1:]
    return pairs
