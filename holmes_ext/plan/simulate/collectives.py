"""What is reduced and gathered in a step, and when: plan/simulate/step.py's collectives.

    deepspeed   tied embeddings, then each stage's gradients, optimizer, (ZeRO-1: weights are gathered)
    megatron    each stage's gradients, then tied embeddings, optimizer, (ZeRO-1: weights are gathered, or under the
                next forward)
    ZeRO 2, 3   each micro-batch: a layer's gradients are scattered after its backward, (3) its weights gathered before
                forward and backward; once a step: (2) weights are gathered
    small ones  megatron: the gradients' norm among a pipeline's stages before the optimizer; both: the loss from the
                last stage to the others at the step's end, who wait for it (a round trip between clusters); what the
                script sums itself then (Execution.sums)
    overlap     a layer's gradients are final in the last micro-batch's backward; full buckets leave at once, in that
                order. Where they end is plan/cost/buckets.py's cut: GradientReducer's, or megatron-core's and
                DistributedDataParallel's; chunks of an interleaved stage (megatron-core's, torch's) share none
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from holmes_ext.plan.cost.buckets import bucket_bytes, cut
from holmes_ext.plan.cost.model import Layer, Model
from holmes_ext.plan.simulate.events import Op, Transfer
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.simulate.flows import Flows
from holmes_ext.plan.simulate.pipelines import DataGroups
from holmes_ext.plan.sizes import Sizes

#: Beyond so many chunks of a stage they are simulated as larger ones: their pipeline's fill is overrated by under 1/32.
MOST_CHUNKS = 32
#: Engines whose every stage is told the loss.
REPORTING = ("deepspeed", "megatron")
#: Engines whose buckets end with the gradient that reaches the limit.
EXCEEDING = ("megatron", "ddp")
Tag = tuple[Hashable, ...]
Place = tuple[int, int]  # (chunk, layer)
Operations = dict[int, list[Op]]  # by layer


@dataclass(frozen=True)
class Gradient:
    """Of one parameter. late: it becomes final after the backward pass only (DeepSpeed's tied embedding)."""

    place: Place
    size: float
    late: bool = False


@dataclass(frozen=True)
class Leaving:
    """Buckets that leave at one moment: bytes of each; places: of their gradients; after: the layer whose backward they
    wait for, None for what is sent after the backward pass."""

    sizes: tuple[float, ...]
    places: tuple[Place, ...]
    after: Place | None


def leaving(gradients: Sequence[Gradient], limit_bytes: float, exceed: bool, first_bytes: float = 0) -> list[Leaving]:
    """`gradients`, in the order in which they become final, in buckets of limit_bytes (the first: first_bytes). Those
    that are full at one layer's end leave one after the other: one transfer."""
    found: dict[Place | None, list[tuple[Gradient, ...]]] = {}
    for late in (False, True):
        own = [gradient for gradient in gradients if gradient.late == late]
        for places in cut([gradient.size for gradient in own], limit_bytes, exceed=exceed, first_bytes=first_bytes):
            found.setdefault(None if late else own[places[-1]].place, []).append(tuple(own[index] for index in places))
    return [
        Leaving(
            tuple(sum(gradient.size for gradient in bucket) for bucket in buckets),
            tuple(dict.fromkeys(gradient.place for bucket in buckets for gradient in bucket)), after,
        )
        for after, buckets in found.items()
    ]


class Reductions:
    """transfers: of all collectives. before, along, after: the operations that an actor's program gets for them."""

    def __init__(
        self, flows: Flows, execution: Execution, ranges: Sequence[tuple[int, int]], layers: Sequence[Layer],
        model: Model, sizes: Sizes,
    ):
        self.flows, self.execution, self.ranges = flows, execution, ranges
        self.stages, self.width = flows.pipelines.stages, model.gradient_width
        self.weights = model.activation_width / model.gradient_width  # bytes for each of gradients
        self.parameters = [layer.parameters for layer in layers]
        ranks = sizes.data * sizes.context
        self.reduced = [[self.width * count for count in layer.reduced(ranks, sizes.expert)] for layer in layers]
        self.tied_bytes = model.tied_bytes(sizes)
        self._late_gather = execution.zero == 1 and execution.gather_overlap
        self.transfers: dict[Hashable, Transfer] = {}
        self._starts: dict[Tag, list[Hashable]] = {}  # what is posted to start a collective, where it is not its tag
        self._groups: dict[tuple[int, int], DataGroups] = {}  # by (kind, stage)
        self._shards_of: dict[tuple[int, int], DataGroups] = {}  # over which ZeRO 2 and 3 shard
        self._leaving: dict[tuple[int, int], list[Leaving]] = {}
        for stage in range(self.stages):
            for groups in flows.pipelines.groups(stage):
                if groups.ranks > 1:
                    self._make(groups)
        for kind in range(len(flows.pipelines.kinds)):
            if self.tied_bytes:
                self.transfers["tied", kind] = flows.tied(kind, self.tied_bytes)
            if self.stages > 1 and execution.engine in REPORTING:
                if execution.engine == "megatron":
                    self.transfers["norm", kind] = flows.norm(kind)
                for stage in range(self.stages - 1):
                    self.transfers["loss", kind, stage] = flows.number(kind, self.stages - 1, stage)

    def gradients(self, stage: int) -> list[Gradient]:
        """Of a stage, in the order in which they become final: the reverse of the forward pass."""
        late = bool(self.tied_bytes) and self.execution.engine == "deepspeed"
        tied = {(0, 0), (len(self.reduced) - 1, len(self.reduced[-1]) - 1)} if late else set()  # (layer, parameter)
        return [
            Gradient((chunk, layer), self.reduced[layer][number], (layer, number) in tied)
            for chunk in reversed(range(self.execution.virtual))
            for layer in reversed(range(*self.ranges[chunk * self.stages + stage]))
            for number in reversed(range(len(self.reduced[layer])))
        ]

    def _buckets(self, groups: DataGroups, two_level: bool) -> list[Leaving]:
        gradients = self.gradients(groups.stage)
        total = self.flows.gradient_bytes[groups.stage] = sum(gradient.size for gradient in gradients)
        if not self.execution.buckets_on(groups.stage):
            return [Leaving((total,), tuple(dict.fromkeys(gradient.place for gradient in gradients)), None)]
        fabric = self.flows.pipelines.fabric(tuple(groups.members))
        limit: float = self.execution.bucket_bytes or bucket_bytes(fabric, groups.ranks, total)
        if two_level and not self.execution.bucket_bytes:
            limit = self.flows.summed(groups, self.execution.two_level == "direct")[1].chunk_bytes
        chunks = [list(own) for _, own in groupby(gradients, lambda gradient: gradient.place[0])]  # each has its own
        how = limit, self.execution.engine in EXCEEDING, self.execution.first_bucket_bytes
        return [one for own in chunks for one in leaving(own, *how)]

    def _make(self, groups: DataGroups) -> None:
        zero, spread = self.execution.zero, any(len(nodes) > 1 for nodes in groups.clusters.values())
        two_level = self.execution.two_level != "off" and len(groups.clusters) > 1 and spread
        every = self._buckets(groups, two_level)
        for kind in groups.kinds:
            self._groups[kind, groups.stage], self._leaving[kind, groups.stage] = groups, every
        for number in range(self.execution.sums):
            self.transfers["sum", groups.stage, groups.kinds, number] = self.flows.number_summed(groups)
        scatter = zero and self.execution.engine != "deepspeed"  # DeepSpeed's ZeRO-1 all-reduces under a pipeline
        if zero > 1:
            self._make_shards(groups)
        for number, one in enumerate(every):
            tag = ("reduce", groups.stage, groups.kinds, number)
            if two_level and not scatter:
                direct, most = self.execution.two_level == "direct", max(1, MOST_CHUNKS // len(every))
                found, self._starts[tag] = self.flows.two_levels(groups, one.sizes, direct, most, tag)
                self.transfers.update(found)
            else:
                self._ring(groups, tag, one.sizes, self.execution.scatter if scatter else 1.0)
            if zero:
                self._ring(groups, ("gather", *tag[1:]), [self.weights * size for size in one.sizes], 0.5)

    def _make_shards(self, groups: DataGroups) -> None:
        """What ZeRO 2 and 3 send for every layer, in each micro-batch."""
        hybrid = self.execution.replicas == "clusters" and len(groups.clusters) > 1
        inside = [self._inside(groups, name) for name in groups.clusters] if hybrid else [groups]
        for own in inside:
            for kind in own.kinds:
                self._shards_of[kind, groups.stage] = own
        across = self._across(groups) if hybrid else None
        for layer in range(*self.ranges[groups.stage]):
            size = sum(self.reduced[layer])
            for own in inside:
                of_layer = groups.stage, own.kinds, layer
                self._ring(own, ("scatter", *of_layer), [size], self.execution.scatter)
                for letter in "FB" if self.execution.zero == 3 else "":
                    self._ring(own, ("weights", *of_layer, letter), [self.weights * size], 0.5)
            if across is not None:
                self._ring(across, ("across", groups.stage, groups.kinds, layer), [size / inside[0].ranks], 1.0)

    def _inside(self, groups: DataGroups, cluster: str) -> DataGroups:
        """The part of a group that lies in one cluster; where clusters are equal, of kinds that are in no other."""
        nodes = groups.clusters[cluster]
        kinds = tuple(kind for kind in groups.kinds if self.flows.pipelines.kinds[kind][groups.stage] in nodes)
        assert kinds and len(set(groups.ranks_of.values())) == 1, "replicas are equal: boxes()"
        members, alike = ({node: of[node] for node in nodes} for of in (groups.members, groups.alike))
        ranks, clusters = sum(members.values()), {cluster: nodes}
        return DataGroups(groups.stage, kinds, ranks, members, alike, clusters, groups.count, {})

    @staticmethod
    def _across(groups: DataGroups) -> DataGroups:
        """The owners of one shard, a rank in each cluster; a node has as many such groups as ranks in `groups`."""
        names, first = list(groups.clusters), [nodes[0] for nodes in groups.clusters.values()]
        alike = {node: groups.alike[node] * groups.members[node] for node in first}
        ring = Counter(zip(names, (*names[1:], names[0])))
        shards = next(iter(groups.ranks_of.values()))
        return DataGroups(groups.stage, groups.kinds, len(names), dict.fromkeys(first, 1), alike,
                          {name: (node,) for name, node in zip(names, first)}, groups.count * shards, dict(ring))

    def _ring(self, groups: DataGroups, tag: Tag, sizes: Sequence[float], part: float) -> None:
        gather, scatter = self.flows.links.host_gather, self.flows.links.host_scatter
        host = {"gather": gather, "weights": gather, "scatter": scatter}.get(str(tag[0]), 1.0)
        self.transfers[tag] = self.flows.ring(groups, sizes, part, tag[:3], host)

    def _post(self, tag: Tag) -> list[Op]:
        return [("post", name) for name in self._starts.get(tag, [tag])]

    def before(self, kind: int, stage: int) -> list[Op]:
        """At the step's start: the last step's weights begin to be gathered, in the order of the forward pass."""
        tags = reversed(self._tags(kind, stage, "gather")) if self._late_gather else ()
        return [op for tag in tags for op in self._post(tag)]

    def along(
        self, kind: int, stage: int, chunk: int, letter: str, micro_batch: int, final: bool
    ) -> tuple[Operations, Operations]:
        """For one pass, by layer: operations before it (gathered weights are awaited), operations after it (buckets
        leave)."""
        needs: Operations = {}
        launches: Operations = {}
        if self.execution.zero > 1 and (kind, stage) in self._groups:
            return self._shards(kind, stage, letter, micro_batch)
        if not final and not (self._late_gather and letter == "F" and micro_batch == 0):
            return needs, launches
        for number, one in enumerate(self._leaving.get((kind, stage), [])):
            own = [layer for part, layer in one.places if part == chunk]
            if own and letter == "F":
                needs.setdefault(min(own), []).append(("wait", self._tag(kind, stage, "gather", number), "gather", 0))
            if final and one.after and one.after[0] == chunk:
                launches[one.after[1]] = self._post(self._tag(kind, stage, "reduce", number))
        return needs, launches

    def _shards(self, kind: int, stage: int, letter: str, micro_batch: int) -> tuple[Operations, Operations]:
        """along, of ZeRO 2 and 3: each layer's weights before it, its gradients after it, and both awaited."""
        needs: Operations = {}
        launches: Operations = {}
        own, whole = self._shards_of[kind, stage], self._groups[kind, stage]
        for layer in range(*self.ranges[stage]):
            of_layer = (stage, own.kinds, layer)
            if self.execution.zero == 3:
                weights = (("weights", *of_layer, letter), micro_batch)
                needs[layer] = [("post", weights), ("wait", weights, "gather", micro_batch)]
            if letter == "B":
                tags = [("scatter", *of_layer), ("across", stage, whole.kinds, layer)]
                each = [(tag, micro_batch) for tag in tags if tag in self.transfers]
                launches[layer] = [op for tag in each for op in (("post", tag), ("wait", tag, "reduce", micro_batch))]
        return needs, launches

    def after(self, kind: int, stage: int) -> Iterator[Op]:
        """After the last pass: what is left of the reductions, the optimizer, the gather."""
        steps = [self._reduce(kind, stage), self._tie(kind, stage)]
        for ops in reversed(steps) if self.execution.engine == "deepspeed" else steps:
            yield from ops
        if ("norm", kind) in self.transfers:
            yield from (("post", ("norm", kind)), ("wait", ("norm", kind), "reduce", -1))
        owners = (self._shards_of or self._groups) if self.execution.zero else {}
        share = owners[kind, stage].ranks if (kind, stage) in owners else 1
        ranges = self.ranges[stage :: self.stages]
        own = sum(self.parameters[layer] for low_high in ranges for layer in range(*low_high))
        yield ("software", "optimizer", self.execution.parameter_s * own / share, -1, 0)
        if self.execution.zero in (1, 2) and not self._late_gather:
            for tag in self._tags(kind, stage, "gather"):
                yield from (("post", tag), ("wait", tag, "gather", -1))

    def told(self, kind: int, stage: int) -> Iterator[Op]:
        """The loss, and what the script sums: the end of all."""
        yield from self._loss(kind, stage)
        for number in range(self.execution.sums if (kind, stage) in self._groups else 0):
            tag = self._tag(kind, stage, "sum", number)
            yield from (("post", tag), ("wait", tag, "reduce", -1))

    def _loss(self, kind: int, stage: int) -> list[Op]:
        last = self.stages - 1
        if stage < last and ("loss", kind, stage) in self.transfers:
            return [("post", ("loss", kind, stage), True), ("wait", ("loss", kind, stage), "send", -1)]
        tags = [("loss", kind, other) for other in range(last) if ("loss", kind, other) in self.transfers]
        posts: list[Op] = [("post", tag) for tag in tags]
        return [*posts, *(("wait", tag, "send", -1, True) for tag in tags)]

    def _reduce(self, kind: int, stage: int) -> list[Op]:
        tags = self._tags(kind, stage, "reduce") if self.execution.zero < 2 else []
        left = [tag for tag, one in zip(tags, self._leaving.get((kind, stage), [])) if one.after is None]
        return [op for tag in left for op in self._post(tag)] + [("wait", tag, "reduce", -1) for tag in tags]

    def _tie(self, kind: int, stage: int) -> list[Op]:
        if not self.tied_bytes or stage not in (0, self.stages - 1):
            return []
        return [("post", ("tied", kind)), ("wait", ("tied", kind), "reduce", -1)]

    def _tag(self, kind: int, stage: int, what: str, number: int) -> Tag:
        return (what, stage, self._groups[kind, stage].kinds, number)

    def _tags(self, kind: int, stage: int, what: str) -> list[Tag]:
        return [self._tag(kind, stage, what, number) for number in range(len(self._leaving.get((kind, stage), [])))]
