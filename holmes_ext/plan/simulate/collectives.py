"""What is reduced and gathered in a step, when, and over which NICs: plan/simulate/step.py's collectives.

    deepspeed   tied embeddings, then each stage's gradients, optimizer, (ZeRO-1: weights are gathered)
    megatron    each stage's gradients, then tied embeddings, optimizer, (ZeRO-1: weights are gathered, or under the next forward)
    ZeRO 2, 3   each micro-batch: a layer's gradients are scattered after its backward, (3) its weights gathered before forward and backward;
                once a step: (2) weights are gathered
    overlap     a layer's gradients are final in the last micro-batch's backward; full buckets leave at once, in that order

A ring of n ranks passes every node once: 2 (n - 1) / n of the bytes through each NIC, both ways at once, in 2 (n - 1) steps (half of both for a
reduce-scatter or a gather); among GPUs of one node over their own link, where its rate is known. Two levels: runtime/reduce/two_level.py's four steps, chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Layer, Model
from holmes_ext.plan.cost.reduction import bucket_bytes, reduced_parameters
from holmes_ext.plan.simulate.events import Transfer
from holmes_ext.plan.simulate.folding import Columns, Group
from holmes_ext.plan.sizes import Sizes

if TYPE_CHECKING:
    from holmes_ext.plan.simulate.step import Options

#: Of runtime/reduce/two_level.py: bytes of a chunk for each rank of the smallest cluster.
CHUNK_SHARE_BYTES = 512 * 2**10
#: Beyond so many chunks of one bucket they are simulated as larger ones: the pipeline's fill is then overrated by under 1/32.
MOST_CHUNKS = 32


def inside_s(model: Model, columns: Columns, nodes: Iterable[str], size: float) -> float:
    """Seconds of `size` bytes between GPUs of one node; 0 where the rate of their link is not known."""
    rate = min(model.gpu_of(columns.cluster(node)).link_bps for node in nodes)
    return size * 8 / rate if rate else 0.0


class Reductions:
    """transfers: of all collectives. before, along, after: the operations that an actor's program gets for them."""

    def __init__(self, columns: Columns, links: Links, options: Options, ranges, layers: Sequence[Layer], model: Model, sizes: Sizes, micro_batches: int):
        self.columns, self.links, self.options, self.sizes, self.model = columns, links, options, sizes, model
        self.stages, self.ranges, self.micro_batches = columns.stages, ranges, micro_batches
        self.parameters = [layer.parameters for layer in layers]
        shards = sizes.data * sizes.context
        self.reduced = [reduced_parameters(layer, shards, sizes.expert) for layer in layers]
        if model.tied and sizes.pipeline == 1:
            self.parameters[-1] -= model.vocabulary * model.hidden / sizes.tensor
            self.reduced[-1] -= model.vocabulary * model.hidden / sizes.tensor
        self._late_gather = options.zero == 1 and options.gather_overlap
        self.transfers: dict[Hashable, Transfer] = {}
        self._group: dict[tuple[int, int], Group] = {}
        self._buckets: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}  # (kind, stage) -> buckets of (chunk, layer)
        for stage in range(self.stages):
            for group in columns.groups(stage):
                if group.ranks > 1:
                    self._make(group)
        self.tied = bool(model.tied and self.stages > 1)
        if self.tied:
            self._make_tied()

    def _cut(self, stage: int, group: Group) -> list[list[tuple[int, int]]]:
        """Buckets of (chunk, layer) in the order of the last backward."""
        chunks = reversed(range(self.options.virtual))
        final = [(chunk, layer) for chunk in chunks for layer in reversed(range(*self.ranges[chunk * self.stages + stage]))]
        if not self._overlaps() or (self.options.overlap == "first" and stage > 0):
            return [final]
        width = self.model.gradient_width
        total = sum(self.reduced[layer] for _, layer in final) * width
        limit = self.options.bucket_bytes or bucket_bytes(int(total), group.ranks, self.columns.fabric(tuple(group.members)))
        buckets, size = [[]], 0.0
        for place in final:
            if size >= limit:
                buckets, size = [*buckets, []], 0.0
            buckets[-1].append(place)
            size += self.reduced[place[1]] * width
        return buckets

    def _overlaps(self) -> bool:
        return self.options.overlap != "off" and self.options.zero < 2

    def _make(self, group: Group) -> None:
        buckets = self._cut(group.stage, group)
        for kind in group.kinds:
            self._group[kind, group.stage] = group
            self._buckets[kind, group.stage] = buckets
        scatter = self.options.zero and self.options.engine != "deepspeed"  # DeepSpeed's ZeRO-1 all-reduces under a pipeline
        if self.options.zero > 1:
            self._make_shards(group)
        for number, bucket in enumerate(buckets):
            parameters = sum(self.reduced[layer] for _, layer in bucket)
            self._collective(group, ("reduce", group.stage, group.kinds, number), parameters * self.model.gradient_width, 0.5 if scatter else 1.0)
            if self.options.zero:
                self._collective(group, ("gather", group.stage, group.kinds, number), parameters * self.model.activation_width, 0.5)

    def _make_shards(self, group: Group) -> None:
        """What ZeRO 2 and 3 send for every layer and micro-batch."""
        for micro_batch in range(self.micro_batches):
            for layer in range(*self.ranges[group.stage]):
                of_layer, size = (group.stage, group.kinds, micro_batch, layer), self.reduced[layer]
                self._collective(group, ("scatter", *of_layer), size * self.model.gradient_width, 0.5)
                for letter in "FB" if self.options.zero == 3 else "":
                    self._collective(group, ("weights", *of_layer, letter), size * self.model.activation_width, 0.5)

    def _collective(self, group: Group, tag: tuple, size: float, part: float) -> None:
        """part: 1 of an all-reduce, 1/2 of a reduce-scatter or a gather."""
        parties = len(group.kinds)
        if self.options.two_level and part == 1.0 and len(group.clusters) > 1 and any(len(nodes) > 1 for nodes in group.clusters.values()):
            self._two_level(group, tag, size)
            return
        if len(group.members) == 1:
            seconds = inside_s(self.model, self.columns, group.members, part * 2 * (group.ranks - 1) / group.ranks * size)
            self.transfers[tag] = Transfer(parties, seconds, channel=tag[:3])
            return
        fabric = self.columns.fabric(tuple(group.members))
        curve = self.links.of(fabric).ring
        steps = part * 2 * (group.ranks - 1)
        uses = self._uses({node: (fabric, count) for node, count in group.alike.items()})
        uses += self.links.on_cores(fabric, group.count * len(group.members))
        across = len(group.clusters) > 1
        fixed = steps * (curve.fixed_s(size / group.ranks) + self.options.message_s)
        self.transfers[tag] = Transfer(parties, fixed, steps / group.ranks * size * 8, curve.rate_bps, uses, tag[:3], across=across)

    def _uses(self, nodes: dict) -> tuple:
        found: dict[Hashable, float] = {}
        for node, (fabric, weight) in nodes.items():
            for way in ("out", "in"):
                nic = self.columns.nic(node, fabric, way)
                found[nic] = max(found.get(nic, 0.0), weight)
        return tuple(found.items())

    def _two_level(self, group: Group, tag: tuple, size: float) -> None:
        """Chunks, each in four transfers that follow each other; `tag` itself is the last of the last chunk."""
        ranks = {name: sum(group.members[node] for node in nodes) for name, nodes in group.clusters.items()}
        smallest, clusters = min(ranks.values()), len(ranks)
        chunks = max(1, min(MOST_CHUNKS, round(size / (CHUNK_SHARE_BYTES * smallest))))
        bits = 8 * size / chunks
        inside, across, fixed, software = {}, {}, 0.0, ()
        ethernet = self.columns.fabric(tuple(group.members))
        for name, nodes in group.clusters.items():
            own = self.columns.fabric(nodes)
            for node in nodes:
                here = group.members[node]
                inside[node] = own, group.alike[node] * here * (ranks[name] - here) / ranks[name]
                across[node] = ethernet, group.alike[node] * here * (clusters - 1) / clusters / ranks[name]
            software += self.links.on_cores(own, group.count * sum(here * (ranks[name] - here) / ranks[name] for here in map(group.members.get, nodes)))
            if len(nodes) > 1:
                fixed = max(fixed, self.links.of(own).send.fixed_s(bits / 8 / ranks[name]))
        piece = (clusters - 1) / clusters * bits / 8 / smallest
        shapes = {
            "inside": dict(fixed_s=fixed + self.options.message_s, bits=bits, uses=self._uses(inside) + software, across=True),
            "across": dict(
                fixed_s=self.links.of(ethernet).send.fixed_s(piece) + self.options.message_s, bits=bits, uses=self._uses(across) + self.links.on_cores(ethernet, group.count * (clusters - 1)), across=True
            ),
        }
        phases = ("inside", "across", "across", "inside")
        for chunk in range(chunks):
            names = [(*tag, "chunk", chunk, phase) for phase in range(4)]
            if chunk == chunks - 1:
                names[3] = tag
            for phase, name in enumerate(names):
                then = names[phase + 1] if phase < 3 else None
                shape = shapes[phases[phase]]
                self.transfers[name] = Transfer(len(group.kinds) if phase == 0 else 1, channel=(tag[:3], phase), then=then, **shape)

    def _chunk_tags(self, tag: tuple) -> list[tuple]:
        """What an actor posts to start a collective."""
        if (*tag, "chunk", 0, 0) not in self.transfers:
            return [tag]
        tags, chunk = [], 0
        while (name := (*tag, "chunk", chunk, 0)) in self.transfers:
            tags.append(name)
            chunk += 1
        return tags

    def _make_tied(self) -> None:
        size = self.model.vocabulary * self.model.hidden / self.sizes.tensor * self.model.gradient_width
        for kind in range(len(self.columns.kinds)):
            one, two, leaving, reaching = self.columns.edge(kind, 0, self.stages - 1)
            if one == two:
                self.transfers["tied", kind] = Transfer(2, inside_s(self.model, self.columns, (one,), size))
                continue
            fabric = self.columns.fabric((one, two))
            curve = self.links.of(fabric).ring
            uses = self._uses({one: (fabric, leaving), two: (fabric, reaching)}) + self.links.on_cores(fabric, 2 * self.columns.count[kind])
            across = self.columns.cluster(one) != self.columns.cluster(two)
            fixed = 2 * (curve.fixed_s(size / 2) + self.options.message_s)
            self.transfers["tied", kind] = Transfer(2, fixed, 8 * size, curve.rate_bps, uses, across=across)

    def before(self, kind: int, stage: int) -> Iterator[tuple]:
        """At the step's start: the last step's weights begin to be gathered, in the order of the forward pass."""
        if self._late_gather:
            for tag in reversed(self._tags(kind, stage, "gather")):
                yield ("post", tag)

    def along(self, kind: int, stage: int, chunk: int, letter: str, micro_batch: int, final: bool) -> tuple[dict, dict]:
        """For one pass: layer -> operations before it (gathered weights are awaited), layer -> operations after it (a bucket leaves)."""
        needs: dict[int, list[tuple]] = {}
        launches: dict[int, list[tuple]] = {}
        if self.options.zero > 1:
            return self._shards(kind, stage, letter, micro_batch) if (kind, stage) in self._group else (needs, launches)
        buckets = self._buckets.get((kind, stage), [])
        for number, bucket in enumerate(buckets):
            own = [layer for part, layer in bucket if part == chunk]
            if own and letter == "F" and micro_batch == 0 and self._late_gather:
                needs[min(own)] = [("wait", self._tag(kind, stage, "gather", number), "gather", 0)]
            if own and final and self._overlaps() and bucket[-1][0] == chunk:
                tag = self._tag(kind, stage, "reduce", number)
                launches[bucket[-1][1]] = [("post", name) for name in self._chunk_tags(tag)]
        return needs, launches

    def _shards(self, kind: int, stage: int, letter: str, micro_batch: int) -> tuple[dict, dict]:
        """along, of ZeRO 2 and 3: each layer's weights before it, its gradients after it, and both awaited."""
        needs, launches = {}, {}
        for layer in range(*self.ranges[stage]):
            of_layer = (stage, self._group[kind, stage].kinds, micro_batch, layer)
            if self.options.zero == 3:
                weights = ("weights", *of_layer, letter)
                needs[layer] = [("post", weights), ("wait", weights, "gather", micro_batch)]
            if letter == "B":
                scatter = ("scatter", *of_layer)
                launches[layer] = [("post", scatter), ("wait", scatter, "reduce", micro_batch)]
        return needs, launches

    def after(self, kind: int, stage: int) -> Iterator[tuple]:
        """After the last pass: what is left of the reductions, the optimizer, the gather."""
        steps = [self._reduce(kind, stage), self._tie(kind, stage)]
        for ops in reversed(steps) if self.options.engine == "deepspeed" else steps:
            yield from ops
        share = self._group[kind, stage].ranks if self.options.zero and (kind, stage) in self._group else 1
        own = sum(self.parameters[layer] for place in range(stage, len(self.ranges), self.stages) for layer in range(*self.ranges[place]))
        yield ("software", "optimizer", self.options.parameter_s * own / share, -1, 0)
        if self.options.zero in (1, 2) and not self._late_gather:
            for tag in self._tags(kind, stage, "gather"):
                yield from (("post", tag), ("wait", tag, "gather", -1))

    def _reduce(self, kind: int, stage: int) -> list[tuple]:
        ops: list[tuple] = []
        tags = self._tags(kind, stage, "reduce") if self.options.zero < 2 else []
        if not self._overlaps():
            ops += [("post", name) for tag in tags for name in self._chunk_tags(tag)]
        return ops + [("wait", tag, "reduce", -1) for tag in tags]

    def _tie(self, kind: int, stage: int) -> list[tuple]:
        if not self.tied or stage not in (0, self.stages - 1):
            return []
        return [("post", ("tied", kind)), ("wait", ("tied", kind), "reduce", -1)]

    def _tag(self, kind: int, stage: int, what: str, number: int) -> tuple:
        return (what, stage, self._group[kind, stage].kinds, number)

    def _tags(self, kind: int, stage: int, what: str) -> list[tuple]:
        return [self._tag(kind, stage, what, number) for number in range(len(self._buckets.get((kind, stage), [])))]
