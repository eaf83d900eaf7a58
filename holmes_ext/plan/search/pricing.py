"""Prices of every stage of a shape under an arrangement, from numbers of clusters instead of numbers of ranks.

The prices are plan/cost/network.py's and the sharing of NICs plan/cost/nodes.py's, so a dense model gives the same
figures as costs_on_site where traffic inside a node is free (tests/plan/search/test_pricing.py compares them); here
stages with the same content are priced once, which is what a search of 16,384 GPUs needs. Besides: NVLink where the
GPUs' rate is known, ZeRO, experts, and for a data-parallel group that straddles clusters the choice between a flat ring
and two levels (not under ZeRO 2 and 3, which no engine reduces so). What ZeRO 2 and 3 send counts in full: nothing of
it is hidden under computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import inf
from typing import Any

from holmes_ext.cluster.site import ETHERNET, Fabric
from holmes_ext.plan.cost.across import facing
from holmes_ext.plan.cost.memory import Memory, stage_memory, under_way
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network_old import FREE, Price, all_reduce, message, ring, summed_across, tied_seconds
from holmes_ext.plan.cost.stages import Portion, StageCosts, StagePrice, costs_of, layer_kinds
from holmes_ext.plan.search.arrangement import Arrangement, Content, Ground
from holmes_ext.plan.search.space import REDUCTIONS, Shape
from holmes_ext.plan.sizes import PIPELINES_FIRST


class Pricing:
    """Prices of one shape; content by content, edge by edge."""

    def __init__(
        self, ground: Ground, model: Model, shape: Shape, reductions: Sequence[str] = REDUCTIONS,
        memory_bytes: float = 0.0, hides: bool = True, alike: bool = False,
    ):
        self.alike = alike  # all stages, over as many clusters each, reduce in two levels, or none does
        self.ground, self.shape, self.reductions, self.memory_bytes = ground, shape, reductions, memory_bytes
        self.hides = hides and ground.only is None and shape.virtual == 1
        self.original, self.sizes, self.processes = model, shape.sizes(), ground.processes
        key = (id(model), shape.micro_batch, shape.recompute)
        self.model = ground.remember((*key, shape.micro_batches, shape.zero), lambda: shape.model(model))
        of_layers = (*key, shape.tensor, shape.context, shape.expert, shape.pipeline == 1)
        kinds = ground.remember(of_layers, lambda: layer_kinds(self.model, self.sizes))
        self.portion = Portion(self.model, self.sizes, kinds)
        self.block, self.shards = self.portion.block, self.portion.shards
        self.stage_ranks = ground.world // shape.pipeline
        cut = ground.only is None and self.sizes.tensor_inside(self.processes)
        self._copies = self.model.copies(self.sizes) if cut else 1
        self.known: dict[Hashable, Any] = {}  # what others work out of it, made once
        self._stages: dict[tuple[Content, str, int], StagePrice] = {}
        self._edges: dict[tuple[Content, Content, bool, str], Price] = {}

    def stages(self, arrangement: Arrangement) -> list[StagePrice]:
        """Of all stages. Those that hold the same clusters reduce at about the same time: they share what lies between.
        """
        contents, order = arrangement.contents, arrangement.order
        counts = Counter(contents) if self.ground.wan else Counter[Content]()
        prices = [self.stage(content, order, counts.get(content, 1)) for content in contents]
        ways = {(price.way, len(content)) for price, content in zip(prices, contents)}
        if self.alike and len(ways) > 1 and any(way == "two-level" for way, _ in ways):
            flat = Pricing(self.ground, self.original, self.shape, ("flat",), self.memory_bytes, self.hides)
            return flat.stages(arrangement)
        return prices

    def stage(self, content: Content, order: str, alike: int = 1) -> StagePrice:
        """alike: how many stages hold the same."""
        if (content, order, alike) not in self._stages:
            self._stages[content, order, alike] = self._price(content, order, alike)
        return self._stages[content, order, alike]

    def costs(self, arrangement: Arrangement, overlap: bool, sharded: bool = True) -> StageCosts:
        """What a partition of the layers under `arrangement` costs; sharded: with what ZeRO 2 and 3 send."""
        prices = self.stages(arrangement)
        edges, places = self.edges(arrangement), [self.ground.place(content) for content in arrangement.contents]
        chunks = self.shape.virtual, self._load_s(arrangement, edges) if self.shape.virtual > 1 else 0.0
        tied_s, how = self.tied_s(arrangement), (*chunks, sharded, self.hides)
        return costs_of(self.portion, prices, edges, tied_s, places, overlap, *how)

    def memory(self, stage: int, blocks: int, held: float = 0.0) -> Memory:
        """Of a rank of a stage with so many blocks, term by term; held: micro-batches under way, where they are not the
        schedule's own."""
        shape, portion, layers = self.shape, self.portion, [self.block] * blocks
        layers += [portion.layers[0]] if stage == 0 else []
        layers += [portion.layers[2]] if stage == shape.pipeline - 1 else []
        keep = held or under_way(stage, shape.pipeline, shape.virtual, shape.micro_batches)
        shards = self.shards, portion.expert_shards
        return stage_memory(self.original, layers, shape.zero, *shards, keep, portion.working_bytes)

    def edges(self, arrangement: Arrangement) -> list[Price]:
        """Of one activation from each stage to the next."""
        step, found = self._step(arrangement.order), []
        for stage, (one, other) in enumerate(zip(arrangement.contents, arrangement.contents[1:])):
            key = (one, other, (stage + 1) * step % self.processes != 0, arrangement.order)
            if key not in self._edges:
                self._edges[key] = self._edge(*key)
            found.append(self._edges[key])
        return found

    def least_edge_s(self, with_latency: bool = True) -> float:
        """Seconds that no activation to the next stage beats, whatever the arrangement; 0 where neighbouring stages may
        share a node."""
        ground, shape = self.ground, self.shape
        replica, uneven = shape.pipeline * shape.tensor * shape.context, self.stage_ranks % self.processes
        pipelines_first = all(ranks % replica == 0 for ranks in ground.ranks)
        pipelines_first &= any(ranks // shape.pipeline % self.processes for ranks in ground.ranks)
        if shape.pipeline == 1 or pipelines_first or uneven:
            return 0.0
        every, size = range(len(ground.ranks)), self.block.activation_bytes

        def least() -> float:
            fabrics = {ground.fabric((one, other)) for one in every for other in every}
            prices = [(message(fabric, self.processes), size / self._slices(fabric)) for fabric in fabrics]
            return min(price.seconds(part) if with_latency else price.byte_s * part for price, part in prices)

        return ground.remember(("edge", size, self._slices(ground.site.fabric_by_name[ETHERNET]), with_latency), least)

    def least_crossing_s(self) -> float:
        """Seconds of a step that no arrangement of whole clusters beats, of what crosses clusters of equal size where
        the network between them is not flat; 0 where nothing is known.

        Groups of g clusters share stages. The pipeline passes from group to group in g chains, and chains over all
        clusters use as many links as a forest of g trees, whose worst link is at best that of the spanning tree without
        its g - 1 worst ones. Once all micro-batches have passed, gradients are summed: the group that holds most layers
        at least its share, each of its clusters a whole sum (or a flat ring's half), over g - 1 links."""
        ground, shape, size = self.ground, self.shape, self.stage_ranks
        count, ranks = len(ground.ranks), ground.ranks[0]
        if not ground.wan or len(set(ground.ranks)) > 1 or size % ranks and ranks % size:
            return 0.0
        tree, into, latency_s = ground.ways
        latency_s *= not self.hides  # under what computes
        every_bit = 8 * shape.micro_batches * self.block.activation_bytes / shape.tensor  # as much as slices leave
        reduced = sum(self.portion.reduced_bytes) + (self.portion.blocks - 1) * self.portion.reduced_bytes[1]
        summed = 0.0 if self.model.experts else 8 * shape.tensor * reduced * (1 - 1 / self.shards)
        found = []
        for together in (n for n in range(max(1, size // ranks), count + 1) if count % n == 0):
            seconds = summed * together / count / into[together - 2][together - 1] if together > 1 else 0.0
            if together < count:
                seconds += shape.micro_batches * latency_s + size / together * every_bit / tree[count - together - 1]
            found.append(seconds)
        return min(found)

    def tied_s(self, arrangement: Arrangement) -> float:
        """All-reduce of the tied embedding's gradient between the first and the last stage."""
        size, step = self.model.tied_bytes(self.sizes), self._step(arrangement.order)
        if not size:
            return 0.0
        first, last = arrangement.contents[0], arrangement.contents[-1]
        if step * self.shape.pipeline <= self.processes:
            return self._inside(2, [index for index, _ in first]).seconds(size)
        sharers, found = min(self.processes, step), []
        for pair, flows in facing(first, last).items():
            fabric = self.ground.fabric(pair)
            ways = self.ground.crossing(fabric, pair, flows, ring=True)
            found.append(all_reduce(2, fabric, sharers, ways))
        pair_price, count, here = max(found, key=lambda price: price.seconds(size)), self.shards, 1
        ends = (*first, *last)
        if self.ground.only is not None or count == 1 or len(ends) != 2 or ends[0][0] == ends[1][0]:
            return pair_price.seconds(size)
        here = self._members_on_node(arrangement.order)
        inside = [all_reduce(count, self.ground.fabric([index]), self.processes // here) if count > here
                  else self._inside(count, [index]) for index, _ in ends]
        slowest, names = max(inside, key=lambda price: price.byte_s), [self.ground.site.clusters[i] for i, _ in ends]
        across = fabric, (names[0], names[1]), count, self.processes, self.ground.wan, self.shape.tensor
        return tied_seconds(size, pair_price, slowest, *across)

    def _load_s(self, arrangement: Arrangement, edges: Sequence[Price]) -> float:
        """Seconds that a stage's NIC sends for one micro-batch of all chunks: v activations down, v gradients up, and
        at the ends v - 1 around; what goes to another cluster and what stays in one are different NICs."""
        v, contents = self.shape.virtual, arrangement.contents
        clusters = [{index for index, _ in content} for content in contents]
        loads, size = [{True: 0.0, False: 0.0} for _ in clusters], self.block.activation_bytes
        for stage, edge in enumerate(edges):
            across = len(clusters[stage] | clusters[stage + 1]) > 1
            loads[stage][across] += v * edge.seconds(size)
            loads[stage + 1][across] += v * edge.seconds(size)
        local = self._step(arrangement.order) * self.shape.pipeline <= self.processes
        around = self._edge(contents[-1], contents[0], local, arrangement.order).seconds(size)
        for load in (loads[0], loads[-1]):
            load[len(clusters[0] | clusters[-1]) > 1] += (v - 1) * around
        return max(max(load.values()) for load in loads)

    def _step(self, order: str) -> int:
        """Ranks from one stage to the next."""
        return self.shape.tensor * self.shape.context if order == PIPELINES_FIRST else self.stage_ranks

    def _price(self, content: Content, order: str, alike: int) -> StagePrice:
        zero, model = self.shape.zero, self.model
        gpus = [self.ground.gpus[index] for index, _ in content]
        way, whole = self._reduction(content, order, alike)
        weights = model.activation_width / model.gradient_width  # of gradients' bytes
        scatter = whole.scaled(0.5)  # a reduce-scatter or an all-gather is half an all-reduce
        gather = Price(weights * scatter.byte_s, scatter.latency_s)
        both = Price(scatter.byte_s + gather.byte_s, whole.latency_s)
        return StagePrice(
            flops=min(gpu.flops for gpu in gpus), collective_s=self._collectives(content, order),
            reduction=(whole, both, gather, FREE)[zero], gather=gather if zero == 3 else FREE,
            scatter=scatter if zero >= 2 else FREE,
            limit_bytes=min(min((gpu.memory_bytes or inf) for gpu in gpus), self.memory_bytes or inf), way=way,
        )

    def _members_on_node(self, order: str) -> int:
        """Ranks of one data-parallel group on a node."""
        processes, tensor, context = self.processes, self.shape.tensor, self.shape.context
        whole = tensor * context * self.shape.pipeline
        if order == PIPELINES_FIRST:
            here = context * (processes // whole) if processes >= whole else min(context, processes // tensor)
        else:
            here = min(processes, self.stage_ranks) // tensor
        return max(1, here)

    def _reduction(self, content: Content, order: str, alike: int) -> tuple[str, Price]:
        """An all-reduce of gradients by the faster way that is allowed."""
        count, here = self.shards, self._members_on_node(order)
        clusters = [index for index, _ in content]
        if count == 1:
            return "none", FREE
        if count <= here:
            return "local", self._inside(count, clusters)
        possible = self.ground.only is None and "two-level" in self.reductions and self.shape.zero < 2
        typical = sum(self.portion.reduced_bytes) + (self.portion.blocks - 1) * self.portion.reduced_bytes[1]
        typical /= self.shape.pipeline
        known = content, count, here, alike * (self.stage_ranks // count), typical, possible
        key = "reduction", self.shape.tensor, "flat" in self.reductions, known
        return self.ground.remember(key, lambda: self._straddling(*known))

    def inside_s(self, content: Content, order: str, way: str, cluster: int) -> float:
        """Seconds a byte of an all-reduce that way on the NIC that it shares with activations inside `cluster`."""
        here, count = self._members_on_node(order), dict(content)[cluster] // self.shape.tensor
        if way == "flat" and len(content) > 1 or way in ("none", "local") or count <= here:
            return 0.0
        return all_reduce(count, self.ground.fabric([cluster]), self.processes // here).byte_s

    def _straddling(
        self, content: Content, count: int, here: int, groups: int, size: float, possible: bool
    ) -> tuple[str, Price]:
        """Of `groups` groups of `count` ranks at once, `here` of each on a node. size: bytes that are typical."""
        clusters = [index for index, _ in content]
        fabric = self.ground.fabric(clusters)
        ways = self.ground.crossing(fabric, clusters, groups, ring=True)
        flat = all_reduce(count, fabric, self.processes // here, ways)
        two = self._two_level(content, here, fabric, size, groups) if possible else None
        if two and ("flat" not in self.reductions or two.seconds(size) < flat.seconds(size)):
            return "two-level", two
        return "flat", flat

    def _two_level(self, content: Content, here: int, across: Fabric, size: float, groups: int) -> Price | None:
        """Inside each cluster on its own fabric, across only the sums, as runtime/reduce/two_level_nccl.py makes them,
        which needs as many ranks in each cluster; None where no cluster's own fabric is faster."""
        inner = {index: self.ground.fabric([index]) for index, _ in content}
        faster = any(fabric.preference > across.preference for fabric in inner.values()) or self.ground.wan
        if len(inner) < 2 or not faster:
            return None
        if any(ranks % self.shape.tensor or ranks // self.shape.tensor < here for _, ranks in content):
            return None
        members = [ranks // self.shape.tensor for _, ranks in content]
        if len(set(members)) > 1:
            return None
        inside = [
            all_reduce(count, inner[index], self.processes // here) if count > here else self._inside(count, [index])
            for (index, _), count in zip(content, members)
        ]
        names = [self.ground.site.clusters[index] for index, _ in content]
        slowest = max(inside, key=lambda price: price.byte_s)
        return summed_across(
            size, slowest, across, dict(zip(names, members)), self.processes, direct=False, wan=self.ground.wan,
            groups=groups,
        )[1].pipelined

    def _inside(self, count: int, clusters: Sequence[int]) -> Price:
        """All-reduce among `count` GPUs of one node; free where their link is not known."""
        rate = min(self.ground.gpus[index].link_bps for index in clusters)
        return Price(ring(count)[1] * 8 / rate) if rate and count > 1 else FREE

    def _fabric_of(self, content: Content, span: int) -> Fabric:
        """Of groups of `span` neighbouring ranks: the slowest of the clusters' own where each lies in one, else what
        all share."""
        if all(ranks % span == 0 for _, ranks in content):
            return min((self.ground.fabric([index]) for index, _ in content), key=lambda fabric: fabric.preference)
        return self.ground.fabric([index for index, _ in content])

    def _collectives(self, content: Content, order: str) -> float:
        """Seconds of a block's tensor, context and expert groups in one micro-batch, forward and backward."""
        shape, block, processes = self.shape, self.block, self.processes
        clusters = [index for index, _ in content]
        rate = min(self.ground.gpus[index].link_bps for index in clusters)
        local = Price(8 / rate) if rate else FREE
        pipelines_first, seconds = order == PIPELINES_FIRST, 0.0
        if shape.tensor > 1:
            price = self._inside(shape.tensor, clusters)
            if shape.tensor > processes:
                price = all_reduce(shape.tensor, self._fabric_of(content, shape.tensor))
            seconds += price.seconds(block.tensor_bytes)
        if (size := shape.context) > 1:
            span, sharers = shape.tensor * size, min(shape.tensor, processes)
            price = local if span <= processes else message(self._fabric_of(content, span), sharers, size - 1)
            seconds += price.seconds(block.context_bytes)
        if self.model.experts and (size := shape.expert) > 1:
            span = shape.tensor * size
            wide = self.ground.fabric(clusters) if pipelines_first else self._fabric_of(content, span)
            price = local if span <= processes and not pipelines_first else message(wide, processes, size - 1)
            seconds += price.seconds(block.expert_bytes)
        return seconds

    def _edge(self, one: Content, other: Content, local: bool, order: str) -> Price:
        if local:
            rate = min(self.ground.gpus[index].link_bps for index, _ in (*one, *other))
            return Price(8 / rate) if rate else FREE
        sharers, found = min(self.processes, self._step(order)), []
        for pair, flows in facing(one, other).items():
            fabric = self.ground.fabric(pair)
            (way,) = self.ground.crossing(fabric, pair, flows) or ((),)
            price, slices = message(fabric, sharers, way=way), self._slices(fabric)
            gathered = self._inside(slices, [index for index, _ in other]).scaled(0.5) if slices > 1 else FREE
            found.append(Price(price.byte_s / slices + gathered.byte_s, price.latency_s + gathered.latency_s))
        return max(found, key=lambda price: price.seconds(self.block.activation_bytes))

    def _slices(self, fabric: Fabric) -> int:
        """Tensor ranks that share out an activation on `fabric`, as plan/cost/nodes.py has it."""
        return self._copies if fabric.name == ETHERNET else 1
