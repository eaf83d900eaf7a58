"""What is summed and gathered in a step, and when.

gradients     of a stage after its last backward, or under it: a layer's are final in
              the last micro-batch's backward, and full buckets leave at once. Chunks of
              an interleaved stage share no bucket
tied          a weight of the first and the last stage: after the
              stage's own, or before (EngineTraits.tied_first)
ZeRO 1        weights are gathered after the optimizer, or under the next forward
ZeRO 2, 3     each micro-batch: a layer's gradients are scattered after its backward, (3) its weights
              gathered before forward and backward; once a step: (2) weights are gathered
small ones    the gradients' norm among a pipeline's stages before the optimizer; the loss,
              averaged over the last stage's ranks, and from there to the other stages at
              the step's end (a round trip between clusters); what the script sums itself
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from holmes_ext.plan.buckets import bucket_bytes, cut
from holmes_ext.plan.cost.model import Layer, Model
from holmes_ext.plan.cost.network import Load, Network
from holmes_ext.plan.cost.reductions import (
    Hierarchical,
    PricedReduction,
    Tag,
    by_pairs,
    hierarchical,
    inside_clusters,
    owners,
    tied_hierarchical,
    twins,
)
from holmes_ext.plan.placement import Fold, GroupFamily
from holmes_ext.planner.simulate.events import Transfer
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.transfers import TransferMaker

#: Beyond so many chunks of a stage they are simulated as larger ones: their pipeline's fill is overrated by
#: less than 1/32.
MOST_CHUNKS = 32
#: (chunk, layer)
Place = tuple[int, int]


@dataclass(frozen=True)
class Gradient:
    """Of one parameter. late: it becomes final after the backward pass only."""

    place: Place
    size: float
    late: bool = False


@dataclass(frozen=True)
class Leaving:
    """Buckets that leave at one moment: bytes of each, places of their gradients. after: the layer whose
    backward they wait for; None: the whole pass."""

    sizes: tuple[float, ...]
    places: tuple[Place, ...]
    after: Place | None


def leaving(
    gradients: Sequence[Gradient], limit_bytes: float, exceed: bool, first_bytes: float = 0
) -> list[Leaving]:
    """`gradients` (in the order in which they become final) in buckets of limit_bytes, the first of
    first_bytes. Those that are full at one layer's end are one transfer."""
    by_moment: dict[Place | None, list[list[Gradient]]] = {}
    for late in (False, True):
        of_kind = [gradient for gradient in gradients if gradient.late == late]
        sizes = [gradient.size for gradient in of_kind]
        for places in cut(sizes, limit_bytes, exceed=exceed, first_bytes=first_bytes):
            after = None if late else of_kind[places[-1]].place
            by_moment.setdefault(after, []).append([of_kind[index] for index in places])
    return [
        Leaving(
            tuple(sum(gradient.size for gradient in bucket) for bucket in buckets),
            tuple(dict.fromkeys(gradient.place for bucket in buckets for gradient in bucket)),
            after,
        )
        for after, buckets in by_moment.items()
    ]


class Collectives:
    """transfers: of all of them."""

    def __init__(
        self,
        network: Network,
        fold: Fold,
        run: Execution,
        ranges: Sequence[tuple[int, int]],
        layers: Sequence[Layer],
        model: Model,
        maker: TransferMaker,
    ):
        self.network, self.fold, self.run, self.ranges = network, fold, run, ranges
        self.model, self.maker = model, maker
        self.stages, sizes = len(fold.stages), fold.of.sizes
        #: Bytes of weights for each byte of gradients.
        self.weights = model.activation_width / model.gradient_width
        self.parameters = [layer.parameters for layer in layers]
        #: Of each gradient of each layer.
        self.reduced = [
            [
                model.gradient_width * count
                for count in layer.reduced(sizes.data * sizes.context, sizes.expert)
            ]
            for layer in layers
        ]
        self.tied_bytes = model.tied_bytes(sizes)
        self.late_gather = run.zero == 1 and run.gather_overlap
        self.transfers: dict[Hashable, Transfer] = {}
        #: What is posted to start a collective, where that is not itself.
        self.starts: dict[Tag, list[Hashable]] = {}
        #: By (kind of pipeline, stage).
        self.groups: dict[tuple[int, int], GroupFamily] = {}
        self.shards: dict[tuple[int, int], GroupFamily] = {}
        self.leaving: dict[tuple[int, int], list[Leaving]] = {}
        self.tied: dict[int, Tag] = {}
        for stage in fold.stages:
            for family in fold.families(stage):
                if family.ranks > 1:
                    self._add_family(family)
        if self.tied_bytes:
            self._add_tied()
        for kind in range(len(fold.kinds)) if self.stages > 1 else ():
            if run.engine.norm:
                self.transfers["norm", kind] = self._norm(kind)
            for stage in range(self.stages - 1) if run.engine.reports_loss else ():
                self.transfers["loss", kind, stage] = self._number(kind, self.stages - 1, stage)

    # ------------------------------------------------------------------- what they carry

    def gradients(self, stage: int) -> list[Gradient]:
        """Of a stage, in the order in which they become final: the reverse of the forward pass."""
        late: set[tuple[int, int]] = set()
        if self.tied_bytes and self.run.engine.tied_first:
            late = {(0, 0), (len(self.reduced) - 1, len(self.reduced[-1]) - 1)}
        result = []
        for chunk in reversed(range(self.run.virtual)):
            for layer in reversed(range(*self.ranges[chunk * self.stages + stage])):
                for number, size in reversed(list(enumerate(self.reduced[layer]))):
                    result.append(Gradient((chunk, layer), size, (layer, number) in late))
        return result

    def _add_family(self, family: GroupFamily) -> None:
        run, stage = self.run, family.stage
        gradients = self.gradients(stage)
        total = sum(gradient.size for gradient in gradients)
        ring, both = self._ring(family), None
        if run.is_hierarchical(stage):
            how = run.direct, 0, run.compress, self._link_bps(family.kinds)
            both = hierarchical(self.network, family, total, *how)
        scatters = run.zero > 0 and run.engine.scatters
        every = self._buckets(family, gradients, both.chunk_bytes if both else 0.0)
        for kind in family.pipelines:
            self.groups[kind, stage], self.leaving[kind, stage] = family, every
        if run.engine.averages_loss and stage == self.stages - 1:
            self.transfers["average", stage, family.pipelines, 0] = self._number_summed(
                family, ring
            )
        for number in range(run.sums):
            self.transfers["sum", stage, family.pipelines, number] = self._number_summed(
                family, ring
            )
        if run.zero > 1:
            self._add_shards(family)
        for number, buckets in enumerate(every):
            tag = ("reduce", stage, family.pipelines, number)
            reduction = both if both and not scatters else PricedReduction(ring)
            if scatters:
                self._add_ring(family, ring.scaled(run.scatter), tag, buckets.sizes)
            else:
                self._add_reduction(
                    reduction, tag, buckets.sizes, len(family.pipelines), MOST_CHUNKS // len(every)
                )
            if run.zero:
                sizes = [self.weights * size for size in buckets.sizes]
                self._add_ring(family, ring.scaled(0.5), ("gather", *tag[1:]), sizes)

    def _buckets(
        self, family: GroupFamily, gradients: Sequence[Gradient], chunk_bytes: float
    ) -> list[Leaving]:
        run, total = self.run, sum(gradient.size for gradient in gradients)
        if not run.buckets_on(family.stage):
            places = dict.fromkeys(gradient.place for gradient in gradients)
            return [Leaving((total,), tuple(places), None)]
        suited = chunk_bytes or bucket_bytes(self.network.fabric(family.kinds), family.ranks, total)
        how = run.bucket_bytes or suited, run.engine.buckets_exceed, run.first_bucket_bytes
        chunks = [
            list(of_chunk) for _, of_chunk in groupby(gradients, lambda gradient: gradient.place[0])
        ]
        return [bucket for chunk in chunks for bucket in leaving(chunk, *how)]

    def _add_reduction(
        self, reduction: PricedReduction, tag: Tag, sizes: Sequence[float], parties: int, most: int
    ) -> None:
        chains = reduction.flows(sizes, tag, max(1, most))
        self.starts[tag] = [chain[0].tag for chain in chains]
        for chain in chains:
            for number, flow in enumerate(chain):
                self.transfers[flow.tag] = self.maker.flow(flow, 1 if number else parties)

    def _add_ring(self, family: GroupFamily, load: Load, tag: Tag, sizes: Sequence[float]) -> None:
        links = self.network.links
        gather, scatter = links.host_gather, links.host_scatter
        host = {"gather": gather, "weights": gather, "scatter": scatter}.get(str(tag[0]), 1.0)
        transfer = self.maker.collective(load, sizes, len(family.pipelines), host)
        self.transfers[tag] = replace(transfer, channel=tag[:3])

    def _add_shards(self, family: GroupFamily) -> None:
        """What ZeRO 2 and 3 send for every layer, in each micro-batch."""
        run, stage = self.run, family.stage
        hybrid = inside_clusters(self.network, family) if run.replicas == "clusters" else []
        inside = [self._of_cluster(shards) for shards in hybrid] or [family]
        across = owners(self.network, family) if hybrid else None
        for shards in inside:
            for kind in shards.pipelines:
                self.shards[kind, stage] = shards
        for layer in range(*self.ranges[stage]):
            size = sum(self.reduced[layer])
            for shards in inside:
                of_layer, ring = (stage, shards.pipelines, layer), self._ring(shards)
                self._add_ring(shards, ring.scaled(run.scatter), ("scatter", *of_layer), [size])
                for letter in "FB" if run.zero == 3 else "":
                    tag = ("weights", *of_layer, letter)
                    self._add_ring(shards, ring.scaled(0.5), tag, [self.weights * size])
            if across is not None:
                owned = ("across", stage, family.pipelines, layer)
                self._add_ring(across, self._ring(across), owned, [size / inside[0].ranks])

    def _of_cluster(self, family: GroupFamily) -> GroupFamily:
        """Only the pipelines whose ranks are there."""
        fold, stage = self.fold, family.stage
        pipelines = (kind for kind in family.pipelines if fold.kind_on(kind, stage) in family.kinds)
        return replace(family, pipelines=tuple(pipelines))

    def _ring(self, family: GroupFamily) -> Load:
        return self.network.ring(family, inside_bps=self._link_bps(family.kinds))

    def _link_bps(self, kinds: Iterable[int]) -> float:
        return min(self.model.gpu_of(self.network.cluster(kind)).link_bps for kind in kinds)

    def _add_tied(self) -> None:
        """By pairs, or hierarchically where each of the two stages is on a cluster of its own."""
        fold, last = self.fold, self.fold.stages[-1]
        hierarchical: dict[int, tuple[Hierarchical, GroupFamily] | None] = {}
        if self.run.tied:
            for family in twins(fold):
                how = self.run.direct, 0, self._link_bps(family.kinds)
                levels = tied_hierarchical(self.network, family, self.tied_bytes, *how)
                hierarchical |= dict.fromkeys(
                    family.pipelines, (levels, family) if levels else None
                )
        for kind in range(len(fold.kinds)):
            link = self._link_bps((fold.kind_on(kind, 0), fold.kind_on(kind, last)))
            pair, joint = by_pairs(self.network, fold, kind, link), hierarchical.get(kind)
            if joint and joint[0].seconds(self.tied_bytes) < pair.seconds(self.tied_bytes):
                tag, parties = ("tied", 0, joint[1].pipelines, 0), 2 * len(joint[1].pipelines)
                reduction: PricedReduction = joint[0]
            else:
                tag, parties, reduction = ("tied", 0, (kind,), 0), 2, pair
            if tag not in self.transfers:
                self._add_reduction(reduction, tag, [self.tied_bytes], parties, MOST_CHUNKS)
                if len(reduction.flows([1.0], tag, 1)[0]) == 1:
                    self.transfers[tag].channel = None
            self.tied[kind] = tag

    def _number(self, kind: int, stage: int, other: int) -> Transfer:
        """One number from a stage to another: its latency, and no bytes to speak of."""
        load = self.network.message(self.fold.stage_link(kind, stage, other))
        return replace(self.maker.message(load, 4.0), bits=0.0, uses=(), channel=None)

    def _norm(self, kind: int) -> Transfer:
        """All-reduce of one number among a pipeline's stages, twice round a ring; the first message waits for
        its receiver."""
        count = self.stages
        hops = [self._number(kind, stage, (stage + 1) % count) for stage in range(count)]
        hop_s = [hop.fixed_s + hop.latency_s for hop in hops]
        seconds = 2 * (sum(hop_s) - min(hop_s)) + max(hop.latency_s for hop in hops)
        return Transfer(count, seconds, across=any(hop.across for hop in hops))

    def _number_summed(self, family: GroupFamily, ring: Load) -> Transfer:
        """All-reduce of one number over gloo's ring (gloo/allreduce.cc): from the last rank down to the
        first, and from there down to the second; the last one hears first that the one below it waits."""
        if ring.fabric is None:
            return self.maker.collective(ring, [4.0], len(family.pipelines))
        nodes = [
            self.network.cluster(kind) for kind, count in family.ring for _ in range(min(count, 2))
        ]
        down = zip([*nodes[:0:-1], nodes[0]], [*nodes[-2::-1], nodes[-1]])
        fabric = self.network.fabric(family.kinds)
        longer = [
            self.network.longer_s(fabric, pair) if pair[0] != pair[1] else 0.0 for pair in down
        ]
        longer_s = 2 * sum(longer) - sum(longer[-2:]) + longer[0]
        transfer = self.maker.collective(
            replace(ring, longer_s=longer_s), [4.0], len(family.pipelines)
        )
        return replace(transfer, bits=0.0, uses=())
