"""The one price: what every layer costs on every stage of a placement, with the reductions that it has.

    StageSums(network, job, rules)              ->  what the groups of a stage can do, priced
    StageSums.reductions(placement)             ->  how each stage sums its gradients: by its slowest group
    price(network, placement, job, rules)       ->  StageCosts: what partition, search, bounds and plans ask

Stages that hold the same nodes are looked at once. The slowest GPU, the smallest one, and the slowest group
of a stage count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.network import FREE, Load, Network, Price
from holmes_ext.plan.cost.reductions import (
    NONE,
    Hierarchical,
    PricedReduction,
    Sharded,
    by_pairs,
    hierarchical,
    inside_clusters,
    is_hierarchical,
    owners,
    twins,
)
from holmes_ext.plan.cost.stages import RankModel, Row, StageCosts, estimate
from holmes_ext.plan.engine import FLAT, HIERARCHICAL, Rules
from holmes_ext.plan.placement import Content, Fold, GroupFamily, Placement
from holmes_ext.plan.sizes import INSIDE

T = TypeVar("T")
#: The fold of some stages, and their numbers there.
FoldedStages = tuple[Fold, tuple[int, ...]]


@dataclass(frozen=True)
class Sums:
    """How the groups of a family could sum their gradients."""

    family: GroupFamily
    flat: PricedReduction
    #: None: they cannot.
    both: Hierarchical | None
    #: Groups that share what lies between clusters.
    crossing: float


class StageSums:
    """Of one job on one network, for any placement of the same sizes; what was worked out is kept.
    on_best_fabrics: a kind of group, such as "data", that is priced by Network.on_best_fabrics: what would a
    step take if none of these groups spanned; "": no kind."""

    def __init__(
        self, network: Network, job: RankModel, rules: Rules = Rules(), on_best_fabrics: str = ""
    ):
        self.network, self.job, self.rules = network, job, rules
        self.stock = network.only is not None
        self.hide_stage_links = rules.hide_stage_links and not self.stock and rules.virtual == 1
        self.known: dict[Hashable, Any] = {}
        #: By kind of group.
        self.groups: dict[str, Network] = dict.fromkeys(INSIDE, network)
        if on_best_fabrics:
            self.groups[on_best_fabrics] = Network(
                network.site, network.links, network.only, on_best_fabrics=True
            )

    # ------------------------------------------------------------------- what is alike

    def _stages(
        self, placement: Placement, *stages: int
    ) -> tuple[Hashable, Callable[[], FoldedStages]]:
        """What tells these stages from others, and where their nodes' fold is found."""
        tied = placement.tied
        components = sorted({stage // tied for stage in stages})
        places = tuple(components.index(stage // tied) * tied + stage % tied for stage in stages)
        key = tuple(placement.parts[index] for index in components), placement.sizes

        def folded() -> FoldedStages:
            return self.network.remember(
                ("fold", key), lambda: Fold(placement.alone(*components))
            ), places

        return (key, places), folded

    def _on_stages(
        self,
        what: str,
        make: Callable[[Fold, tuple[int, ...]], T],
        placement: Placement,
        *stages: int,
    ) -> T:
        """What `make` tells of these stages' fold, once for all stages that are like them."""
        key, folded = self._stages(placement, *stages)
        return self.remember(what, key, lambda: make(*folded()))

    def fold(self, placement: Placement, *stages: int) -> FoldedStages:
        """Where the groups of these stages, and the stage links between them, are found; their numbers
        there."""
        return self._stages(placement, *stages)[1]()

    def remember(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        if (what, key) not in self.known:
            self.known[what, key] = make()
        result: T = self.known[what, key]
        return result

    # ------------------------------------------------------------------- reductions

    def reductions(self, placement: Placement) -> list[PricedReduction]:
        """Of each stage: the slowest of its groups."""
        result = [self._reduction(placement, stage) for stage in range(placement.sizes.pipeline)]
        names = {(priced.name, len(content)) for priced, content in zip(result, placement.stages)}
        if self.rules.alike and len(names) > 1 and any(name == HIERARCHICAL for name, _ in names):
            flat = StageSums(self.network, self.job, replace(self.rules, reductions=(FLAT,)))
            return flat.reductions(placement)
        return result

    def _reduction(self, placement: Placement, stage: int) -> PricedReduction:
        key, _ = self._stages(placement, stage)
        size = self.job.total_bytes / placement.sizes.pipeline

        def slowest() -> PricedReduction:
            every = self.sums(placement, stage)
            across = [
                group
                for group in every
                if group.both is not None or self.network.across(group.family.kinds)
            ]
            twice = bool(across) and all(self._is_hierarchical(group, size) for group in across)
            chosen = [self._chosen(group, twice) for group in every]
            return max(chosen, key=lambda group: group.seconds(size))

        return self.remember("reduction", (key, self._together(placement, stage)), slowest)

    def _is_hierarchical(self, sums: Sums, size: float) -> bool:
        if sums.both is None:
            return False
        return FLAT not in self.rules.reductions or sums.both.seconds(size) < sums.flat.seconds(
            size
        )

    def _chosen(self, sums: Sums, twice: bool) -> PricedReduction:
        if sums.family.ranks == 1:
            return NONE
        sharded = self._sharded(sums) if self.rules.zero else None
        if twice and sums.both is not None:
            if sharded is not None and self.rules.gathers:
                return replace(sums.both, gather=sharded.gather)
            return sums.both
        return sharded or sums.flat

    def _together(self, placement: Placement, stage: int) -> int:
        """Stages on the same nodes reduce at the same time: they share what lies between clusters."""
        return placement.stages.count(placement.stages[stage]) if self.network.wan else 1

    def sums(self, placement: Placement, stage: int) -> list[Sums]:
        """How the groups of a stage could sum: of each family."""
        key, folded = self._stages(placement, stage)
        together = self._together(placement, stage)

        def made() -> list[Sums]:
            fold, (place,) = folded()
            families = fold.families(place)
            crossing = together * sum(family.count for family in families)
            return [self.sums_of(family, crossing, placement.sizes.pipeline) for family in families]

        return self.remember("sums", (key, together), made)

    def sums_of(self, family: GroupFamily, crossing: float, pipeline: int = 1) -> Sums:
        """crossing: groups that share what lies between clusters."""
        network, rules = self.groups["data"], self.rules
        link, both = self.link_bps(family.kinds), None
        load = network.ring(family, crossing, link)
        if not self.stock and rules.zero < 2 and HIERARCHICAL in rules.reductions:
            how = rules.direct, crossing, rules.compress, link
            size = self.job.total_bytes / pipeline
            both = hierarchical(network, family, size, *how, chunk_bytes=rules.bucket_bytes)
        return Sums(
            family, PricedReduction(load, FLAT if family.nodes > 1 else "local"), both, crossing
        )

    def _sharded(self, sums: Sums) -> Sharded:
        known: dict[str, Any] = {"zero": self.rules.zero, "weights": self.job.weights}
        if self.rules.zero == 1 and self.rules.gathers:
            known["scatter_part"] = 1.0
        parts = inside_clusters(self.network, sums.family) if self.rules.hybrid else []
        if not parts:
            return Sharded(sums.flat.load, sums.flat.name, **known)
        rings = [
            self.network.ring(part, sums.crossing, self.link_bps(part.kinds)) for part in parts
        ]
        slowest = max(rings, key=lambda ring: (ring.price.byte_s, ring.price.latency_s))
        across = self.network.ring(owners(self.network, sums.family), sums.crossing)
        return Sharded(slowest, "hybrid", **known, across=across, shards=parts[0].ranks)

    def link_bps(self, kinds: Iterable[int]) -> float:
        """Between the GPUs of a node of these kinds."""
        key, cluster = frozenset(kinds), self.network.cluster
        return self.remember("link", key, lambda: self.job.slowest(map(cluster, key)).link_bps)


class Prices(StageSums):
    """Of one job on one network, for any placement of the same sizes."""

    def costs(
        self, placement: Placement, reductions: Sequence[PricedReduction] = (), sharded: bool = True
    ) -> StageCosts:
        """See the module. sharded: with what ZeRO 2 and 3 send in each micro-batch."""
        job, rules, contents = self.job, self.rules, placement.stages
        chosen = list(reductions) or self.reductions(placement)
        rows = []
        for stage, priced in enumerate(chosen):
            key, fold = self._stages(placement, stage)
            key = key, id(priced), sharded
            rows.append(self.remember("layers", key, partial(self._layers, fold, priced, sharded)))
        forward, backward, reduction, weights = zip(*rows)
        stage_links, size = self.stage_links(placement), job.block.activation_bytes
        seconds = [stage_link.seconds(size) for stage_link in (*stage_links, FREE)]
        ends = (0.0,) * bool(job.after)
        transfer = tuple(
            (stage_link,) * (len(job.layers) - len(ends)) + ends for stage_link in seconds
        )
        places = [
            self.remember("place", content, partial(self._place, content)) for content in contents
        ]
        return StageCosts(
            forward,
            backward,
            reduction,
            transfer,
            job.micro_batches,
            latency_s=tuple(priced.once.latency_s for priced in chosen),
            state_bytes=job.state_bytes,
            kept_bytes=tuple(layer.kept_bytes for layer in job.layers),
            limit_bytes=tuple(limit for _, limit in places),
            before=job.before,
            after=job.after,
            tied_s=self.tied_s(placement),
            overlap=rules.overlap,
            repeats=job.repeats,
            working_bytes=job.working_bytes,
            virtual=rules.virtual,
            load_s=self._load_s(placement, stage_links) if rules.virtual > 1 else 0.0,
            places=tuple(place for place, _ in places),
            hidden=tuple(stage_link.byte_s * size for stage_link in stage_links)
            if self.hide_stage_links and stage_links
            else None,
            nics=self.nics(placement) if self.hide_stage_links else (),
            weights_s=weights,
        )

    def step_s(self, placement: Placement) -> float:
        """A step in closed form, with one block on each stage."""
        costs = self.costs(placement)
        return estimate(costs, (1,) * costs.stages).step_s

    def _place(self, content: Content) -> tuple[str, float]:
        """Names of the clusters, and bytes that the smallest GPU holds."""
        clusters = self.network.clusters(content)
        memory = self.job.slowest(clusters).memory_bytes or inf
        return ", ".join(clusters), min(memory, self.rules.memory_bytes or inf)

    def _layers(
        self, folded: Callable[[], FoldedStages], priced: PricedReduction, sharded: bool
    ) -> tuple[Row, Row, Row, Row]:
        """By kind of layer: forward, backward, reduction but its latency, weights' gradients."""
        fold, (stage,) = folded()
        job, content = self.job, fold.placement.stages[stage]
        flops = job.slowest(self.network.clusters(content)).flops
        half = self.collective_s(fold, stage) / 2
        groups_s = [half if layer.kind == "block" else 0.0 for layer in job.layers]
        forward = tuple(
            layer.forward_flops / flops + more for layer, more in zip(job.layers, groups_s)
        )
        backward = tuple(
            layer.backward_flops / flops + more for layer, more in zip(job.layers, groups_s)
        )
        if sharded and isinstance(priced, Sharded):
            how = job.reduced_bytes, job.repeats, self.rules.prefetch
            forward, backward = priced.passes(forward, backward, *how)
        reduction = tuple(size * priced.once.byte_s for size in job.reduced_bytes)
        return (
            forward,
            backward,
            reduction,
            tuple(layer.weight_flops / flops for layer in job.layers),
        )

    def collective_s(self, fold: Fold, stage: int) -> float:
        """Seconds of a block's tensor, context and expert groups in one micro-batch, forward and backward."""
        block, sizes = self.job.block, fold.of.sizes
        groups = (
            ("tensor", sizes.tensor, block.tensor_bytes),
            ("context", sizes.context, block.context_bytes),
            ("expert", sizes.expert, block.expert_bytes),
        )
        return sum(
            self._group_s(fold, stage, kind, size) for kind, ranks, size in groups if ranks > 1
        )

    def _group_s(self, fold: Fold, stage: int, kind: str, size: float) -> float:
        seconds = [0.0]
        for family in fold.families(stage, kind):
            link = self.link_bps(family.kinds)
            if kind == "tensor":
                load = self.groups[kind].ring(family, family.count, link)
            else:
                load = self.groups[kind].in_turn(family, kind == "expert", link)
            seconds.append(load.price.seconds(size))
        return max(seconds)

    def stage_links(self, placement: Placement) -> list[Price]:
        """Of an activation, from each stage to the next."""
        return [
            self.stage_link(placement, stage, stage + 1)
            for stage in range(placement.sizes.pipeline - 1)
        ]

    def stage_link(self, placement: Placement, stage: int, other: int) -> Price:
        """Until the slowest pair of ranks has its activation across."""
        return self._on_stages("stage_link", self._stage_link, placement, stage, other)

    def _stage_link(self, fold: Fold, stages: tuple[int, ...]) -> Price:
        """What each kind of pipeline's message takes is worked out once for all jobs."""
        sender, receiver = stages
        slices, size = self.slices(fold.of), self.job.block.activation_bytes
        share = 1.0 if self.stock else self.job.compressed_share(self.rules.compression)

        def prices() -> list[Price]:
            crossing: Counter[tuple[int, int]] = Counter()
            stage_links = fold.stage_links(
                sender, receiver, lambda kinds: self.network.fabric(kinds).name
            )
            for stage_link in stage_links:
                crossing[stage_link.kinds] += stage_link.count
            links = [self.link_bps(stage_link.kinds) for stage_link in stage_links]
            loads = [
                self.network.message(stage_link, link, crossing[stage_link.kinds])
                for stage_link, link in zip(stage_links, links)
            ]
            return [_cut(load, link, slices, share) for load, link in zip(loads, links)]

        key = "stage_link", id(fold), stages, slices, share, id(self.job.gpus)
        return max(self.network.remember(key, prices), key=lambda price: price.seconds(size or 1.0))

    def nics(self, placement: Placement) -> tuple[tuple[int, int], ...]:
        """StageCosts.nics: (first, last) of neighbouring stages on the same nodes, where the stage
        links before and after them are on one network."""
        last, ranges, first = placement.sizes.pipeline - 1, [], 0
        fabrics = [
            self._on_stages("fabrics", self._fabrics, placement, stage, stage + 1)
            for stage in range(last)
        ]
        for stage in range(1, last):
            first = first if fabrics[stage - 1] == {""} else stage
            if first and fabrics[stage] != {""} and fabrics[first - 1] & fabrics[stage]:
                ranges.append((first, stage))
        return tuple(ranges)

    def _fabrics(self, fold: Fold, stages: tuple[int, ...]) -> set[str]:
        """Fabrics that carry a stage's messages to the next one; "" inside nodes."""
        sender, receiver = stages
        stage_links = fold.stage_links(
            sender, receiver, lambda kinds: self.network.fabric(kinds).name
        )
        return {
            "" if stage_link.local else self.network.fabric(stage_link.kinds).name
            for stage_link in stage_links
        }

    def slices(self, placement: Placement) -> int:
        """Tensor ranks that share out an activation on Ethernet (runtime/groups/wire.py); 1 where receivers
        are on several nodes. All, where nobody told whether there is sequence parallelism."""
        if (
            self.stock
            or not self.rules.slices
            or not placement.sizes.tensor_inside(placement.processes)
        ):
            return 1
        return self.job.copies or placement.sizes.tensor

    def tied_s(self, placement: Placement) -> float:
        """All-reduce of a tied embedding's gradient between the first and the last stage."""
        size, last = self.job.tied_bytes, placement.sizes.pipeline - 1
        if not size or not last:
            return 0.0

        def seconds(fold: Fold, stages: tuple[int, ...]) -> float:
            return max(reduction.seconds(size) for reduction in self.tied(fold))

        return self._on_stages("tied", seconds, placement, 0, last)

    def tied(self, fold: Fold) -> list[PricedReduction]:
        """Of each kind of pipeline: by pairs, or hierarchically where that is faster."""
        size, result = self.job.tied_bytes, []
        for kind in range(len(fold.kinds)):
            pairs, hierarchical = self.tied_of(fold, kind, alone=False)
            result.append(
                hierarchical
                if hierarchical and hierarchical.seconds(size) < pairs.seconds(size)
                else pairs
            )
        return result

    def tied_of(
        self, fold: Fold, kind: int, alone: bool
    ) -> tuple[PricedReduction, Hierarchical | None]:
        """By pairs, and hierarchically where that is possible; alone: the others being still."""
        kinds = fold.kind_on(kind, 0), fold.kind_on(kind, fold.stages[-1])
        pairs = by_pairs(self.network, fold, kind, self.link_bps(kinds))
        if self.stock or not self.rules.tied:
            return pairs, None
        for family in twins(fold):
            if kind in family.pipelines:
                groups = 0 if alone else family.count
                size, direct = self.job.tied_bytes, self.rules.direct
                link = self.link_bps(family.kinds)
                return pairs, is_hierarchical(self.network, family, size, direct, groups, link)
        return pairs, None

    def _load_s(self, placement: Placement, stage_links: Sequence[Price]) -> float:
        """Seconds that a stage's NIC sends for a micro-batch of all chunks: v activations down, v gradients
        up, at the ends v - 1 around; inside a cluster and across it is another NIC."""
        v, size, last = (
            self.rules.virtual,
            self.job.block.activation_bytes,
            placement.sizes.pipeline - 1,
        )
        on = [{self.network.cluster(kind) for kind, _ in content} for content in placement.stages]
        loads = [{True: 0.0, False: 0.0} for _ in on]
        for stage, stage_link in enumerate(stage_links):
            across = len(on[stage] | on[stage + 1]) > 1
            loads[stage][across] += v * stage_link.seconds(size)
            loads[stage + 1][across] += v * stage_link.seconds(size)
        around = self.stage_link(placement, last, 0).seconds(size) if last else 0.0
        for load in (loads[0], loads[-1]):
            load[len(on[0] | on[-1]) > 1] += (v - 1) * around
        return max(max(load.values()) for load in loads)

    def spans_networks(self, placement: Placement) -> bool:
        """Whether groups are left to Ethernet though a member has a better fabric."""
        return any(
            self._on_stages("spans_networks", self._spans_networks, placement, stage)
            for stage in range(placement.sizes.pipeline)
        )

    def _spans_networks(self, fold: Fold, stages: tuple[int, ...]) -> bool:
        families = (family for kind in INSIDE for family in fold.families(stages[0], kind))
        return any(self.network.spans_networks(family.kinds) for family in families)


def _cut(load: Load, link_bps: float, slices: int, share: float) -> Price:
    """A message rounded to `share` and cut into `slices` on Ethernet, gathered where it arrives."""
    if load.fabric is None or load.fabric.name != ETHERNET:
        return load.price
    gathered = 8 * (slices - 1) / slices / link_bps if link_bps else 0.0
    return Price(share * load.price.byte_s / slices + gathered, load.price.latency_s)


def price(
    network: Network,
    placement: Placement,
    job: RankModel,
    rules: Rules = Rules(),
    reductions: Sequence[PricedReduction] = (),
) -> StageCosts:
    """What a partition of the job's layers over the placement's stages costs."""
    return Prices(network, job, rules).costs(placement, reductions)
