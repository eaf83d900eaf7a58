"""The one price: what every layer costs on every stage of a placement, with the reductions that it has.

    reductions(network, placement, job, rules)  ->  how each stage sums its gradients
    price(network, placement, job, rules)       ->  StageCosts: what partition, search, bounds and plans ask

Stages that hold the same nodes are looked at once. A stage computes as fast as its slowest GPU, and holds what its
smallest one does; its groups take as long as the slowest of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from holmes_ext.cluster.site import ETHERNET
from holmes_ext.plan.cost.network import FREE, Load, Network, Price
from holmes_ext.plan.cost.rank_model import RankModel
from holmes_ext.plan.cost.reductions.reduction import NONE, Reduction
from holmes_ext.plan.cost.reductions.sharded import Sharded, inside_clusters, owners
from holmes_ext.plan.cost.reductions.tied import by_pairs, in_two_levels, twins
from holmes_ext.plan.cost.reductions.two_levels import TwoLevels, two_levels
from holmes_ext.plan.cost.stages import Row, StageCosts
from holmes_ext.plan.placement.fold import Family, Fold
from holmes_ext.plan.placement.placement import Content, Placement
from holmes_ext.plan.sizes import INSIDE

T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    """What a job may do and does, besides where it runs: by its engine, its options, its network API."""

    #: Of flat, two-level.
    reductions: tuple[str, ...] = ("flat", "two-level")
    #: gloo's exchanges; else NCCL's rings.
    direct: bool = False
    compress: str = "off"
    zero: int = 0
    #: FSDP's shards inside clusters.
    hybrid: bool = False
    #: Gathers and scatters travel while the layer before computes.
    prefetch: bool = False
    #: Chunks of a stage.
    virtual: int = 1
    #: Gradients are reduced under the last backward.
    overlap: bool = False
    #: As many micro-batches are in flight as hide the pipeline's edges.
    hide_edges: bool = True
    #: Tensor ranks share out what crosses; tied weights are summed in two levels.
    slices: bool = True
    tied: bool = True
    #: Of every GPU; 0: what the GPUs have.
    memory_bytes: float = 0.0
    #: All stages that lie on as many clusters reduce alike.
    alike: bool = False


class Prices:
    """Of one job on one network, for any placement of the same sizes."""

    def __init__(self, network: Network, job: RankModel, rules: Rules = Rules()):
        self.network, self.job, self.rules = network, job, rules
        self.stock = network.only is not None
        self.hide_edges = rules.hide_edges and not self.stock and rules.virtual == 1
        self.known: dict[Hashable, Any] = {}

    # ------------------------------------------------------------------- what is alike

    def _stages(self, placement: Placement, *stages: int) -> tuple[Hashable, Callable[[], tuple[Fold, int]]]:
        """What tells these stages from others, and where their groups and edges are found: among their own nodes
        where every stage has whole ones; the number of the first of them there."""
        if placement.whole:
            contents = tuple(placement.stages[stage] for stage in stages)
            key = contents, placement.sizes
            return key, lambda: (self._fold(key, lambda: placement.alone(*stages)), 0)
        key = stages, placement
        return key, lambda: (self._fold(placement, lambda: placement), stages[0])

    def fold(self, placement: Placement, *stages: int) -> tuple[Fold, int]:
        """Where the groups of these stages, and the edge between two, are found; the number of the first there."""
        return self._stages(placement, *stages)[1]()

    def _fold(self, key: Hashable, make: Callable[[], Placement]) -> Fold:
        return self.network.remember(("fold", key), lambda: Fold(make()))

    def remember(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        if (what, key) not in self.known:
            self.known[what, key] = make()
        found: T = self.known[what, key]
        return found

    # ------------------------------------------------------------------- reductions

    def reductions(self, placement: Placement) -> list[Reduction]:
        """Of each stage: the slowest of its groups. Stages that hold the same nodes reduce at about the same time:
        they share what lies between clusters."""
        contents = placement.stages
        counts = Counter(contents) if self.network.wan else Counter[Content]()
        found = [
            self._reduction(placement, stage, counts.get(content, 1)) for stage, content in enumerate(contents)
        ]
        names = {(one.name, len(content)) for one, content in zip(found, contents)}
        if self.rules.alike and len(names) > 1 and any(name == "two-level" for name, _ in names):
            flat = Prices(self.network, self.job, replace(self.rules, reductions=("flat",)))
            return flat.reductions(placement)
        return found

    def _reduction(self, placement: Placement, stage: int, alike: int) -> Reduction:
        key, fold = self._stages(placement, stage)
        return self.remember("reduction", (key, alike), lambda: self._slowest(*fold(), alike, placement.sizes.pipeline))

    def _slowest(self, fold: Fold, stage: int, alike: int, pipeline: int) -> Reduction:
        families = fold.families(stage)
        groups = alike * sum(family.count for family in families)
        every = [self.of_family(family, groups, pipeline) for family in families]
        return max(every, key=lambda one: one.seconds(self.job.total_bytes / pipeline))

    def of_family(self, family: Family, groups: float, pipeline: int) -> Reduction:
        """By the fastest way that is allowed; groups: that cross at once."""
        network, rules = self.network, self.rules
        if family.ranks == 1:
            return NONE
        size = self.job.total_bytes / pipeline
        load = network.ring(family, groups, self.link_bps(family.kinds))
        flat = Reduction(load, "flat" if family.nodes > 1 else "local")
        if not self.stock and rules.zero < 2 and "two-level" in rules.reductions:
            link = self.link_bps(family.kinds)
            both = two_levels(network, family, size, rules.direct, groups, rules.compress, link)
            if both and ("flat" not in rules.reductions or both.seconds(size) < flat.seconds(size)):
                return both
        return self._sharded(family, load, flat.name, groups) if rules.zero else flat

    def _sharded(self, family: Family, load: Load, name: str, groups: float) -> Reduction:
        known = {"zero": self.rules.zero, "weights": self.job.weights}
        parts = inside_clusters(self.network, family) if self.rules.hybrid else []
        if not parts:
            return Sharded(load, name, **known)
        rings = [self.network.ring(part, groups, self.link_bps(part.kinds)) for part in parts]
        slowest = max(rings, key=lambda ring: ring.price.byte_s)
        across = self.network.ring(owners(self.network, family), groups)
        return Sharded(slowest, "hybrid", **known, across=across, shards=parts[0].ranks)

    # ------------------------------------------------------------------- stages and edges

    def costs(self, placement: Placement, reductions: Sequence[Reduction] = (), sharded: bool = True) -> StageCosts:
        """See the module. sharded: with what ZeRO 2 and 3 send in each micro-batch."""
        job, rules, contents = self.job, self.rules, placement.stages
        ways = list(reductions) or self.reductions(placement)
        rows = []
        for stage, way in enumerate(ways):
            key, fold = self._stages(placement, stage)
            rows.append(self.remember("layers", (key, id(way), sharded), lambda: self._layers(*fold(), way, sharded)))  # noqa: B023
        forward, backward, reduction = zip(*rows)
        edges, size = self.edges(placement), job.block.activation_bytes
        seconds = [edge.seconds(size) for edge in (*edges, FREE)]
        ends = (0.0,) * bool(job.after)
        transfer = tuple((edge,) * (len(job.layers) - len(ends)) + ends for edge in seconds)
        places = [self.remember("place", content, lambda: self._place(content)) for content in contents]  # noqa: B023
        return StageCosts(
            forward, backward, reduction, transfer, job.micro_batches,
            latency_s=tuple(way.once.latency_s for way in ways),
            state_bytes=job.state_bytes, kept_bytes=tuple(layer.kept_bytes for layer in job.layers),
            limit_bytes=tuple(limit for _, limit in places), before=job.before, after=job.after,
            tied_s=self.tied_s(placement), overlap=rules.overlap, repeats=job.repeats,
            working_bytes=job.working_bytes, virtual=rules.virtual,
            load_s=self._load_s(placement, edges) if rules.virtual > 1 else 0.0,
            places=tuple(place for place, _ in places),
            hidden=tuple(edge.byte_s * size for edge in edges) if self.hide_edges and edges else None,
        )

    def _place(self, content: Content) -> tuple[str, float]:
        """Names of the clusters, and bytes that the smallest GPU holds."""
        clusters = list(dict.fromkeys(self.network.cluster(kind) for kind, _ in content))
        memory = self.job.slowest(clusters).memory_bytes or inf
        return ", ".join(clusters), min(memory, self.rules.memory_bytes or inf)

    def _layers(self, fold: Fold, stage: int, way: Reduction, sharded: bool) -> tuple[Row, Row, Row]:
        """By kind of layer: forward, backward, reduction but its latency."""
        job, content = self.job, fold.placement.stages[stage]
        flops = job.slowest([self.network.cluster(kind) for kind, _ in content]).flops
        half = self.collective_s(fold, stage) / 2
        rows = []
        for layer, size in zip(job.layers, job.reduced_bytes):
            own = half if layer.kind == "block" else 0.0
            forward, backward = layer.forward_flops / flops + own, layer.backward_flops / flops + own
            if sharded:
                sent = way.forward.seconds(size), way.backward.seconds(size)
                if self.rules.prefetch:
                    forward, backward = max(forward, sent[0]), max(backward, sent[1])
                else:
                    forward, backward = forward + sent[0], backward + sent[1]
            rows.append((forward, backward, size * way.once.byte_s))
        return tuple(zip(*rows))  # type: ignore[return-value]

    def collective_s(self, fold: Fold, stage: int) -> float:
        """Seconds of a block's tensor, context and expert groups in one micro-batch, forward and backward."""
        block, sizes = self.job.block, fold.whole.sizes
        groups = (
            ("tensor", sizes.tensor, block.tensor_bytes), ("context", sizes.context, block.context_bytes),
            ("expert", sizes.expert, block.expert_bytes),
        )  # fmt: skip
        return sum(self._group_s(fold, stage, kind, size) for kind, ranks, size in groups if ranks > 1)

    def _group_s(self, fold: Fold, stage: int, kind: str, size: float) -> float:
        seconds = [0.0]
        for family in fold.families(stage, kind):
            link = self.link_bps(family.kinds)
            if kind == "tensor":
                load = self.network.ring(family, family.count, link)
            else:
                load = self.network.in_turn(family, kind == "expert", link)
            seconds.append(load.price.seconds(size))
        return max(seconds)

    def link_bps(self, kinds: Iterable[int]) -> float:
        """Between the GPUs of a node of these kinds."""
        key = "link", frozenset(kinds)
        if key not in self.known:
            self.known[key] = self.job.slowest([self.network.cluster(kind) for kind in key[1]]).link_bps
        found: float = self.known[key]
        return found

    def edges(self, placement: Placement) -> list[Price]:
        """Of an activation, from each stage to the next."""
        return [self.edge(placement, stage, stage + 1) for stage in range(placement.sizes.pipeline - 1)]

    def edge(self, placement: Placement, one: int, other: int) -> Price:
        """Until the slowest pair of ranks has its activation across."""
        key, fold = self._stages(placement, one, other)
        return self.remember("edge", key, lambda: self._edge(*fold(), other - one if not placement.whole else 1))

    def _edge(self, fold: Fold, one: int, step: int) -> Price:
        """What each kind of pipeline's message takes depends on no bytes: it is worked out once for all jobs."""
        slices, size = self.slices(fold.whole), self.job.block.activation_bytes

        def prices() -> list[Price]:
            crossing: Counter[tuple[int, int]] = Counter()
            edges = [fold.edge(kind, one, one + step) for kind in range(len(fold.kinds))]
            for edge in edges:
                crossing[edge.kinds] += edge.count
            links = [self.link_bps(edge.kinds) for edge in edges]
            loads = [self.network.message(edge, link, crossing[edge.kinds]) for edge, link in zip(edges, links)]
            return [_sliced(load, link, slices) for load, link in zip(loads, links)]

        key = "edge", id(fold), one, step, slices, id(self.job.gpus)
        return max(self.network.remember(key, prices), key=lambda price: price.seconds(size or 1.0))

    def slices(self, placement: Placement) -> int:
        """Tensor ranks that share out an activation on Ethernet (runtime/groups/wire.py): those that all have it, where
        the ranks that receive it are in one node. Where nobody told whether there is sequence parallelism: all."""
        if self.stock or not self.rules.slices or not placement.sizes.tensor_inside(placement.processes):
            return 1
        return self.job.copies or placement.sizes.tensor

    def tied_s(self, placement: Placement) -> float:
        """All-reduce of a tied embedding's gradient between the first and the last stage."""
        size, last = self.job.tied_bytes, placement.sizes.pipeline - 1
        if not size or not last:
            return 0.0
        key, fold = self._stages(placement, 0, last)
        end = 1 if placement.whole else last

        def seconds() -> float:
            return max(one.seconds(size) for one in self.tied(fold()[0], end))

        return self.remember("tied", key, seconds)

    def tied(self, fold: Fold, last: int) -> list[Reduction]:
        """Of each kind of pipeline: by pairs, or in two levels where that is faster."""
        size, found = self.job.tied_bytes, []
        for kind in range(len(fold.kinds)):
            pairs, both = self.tied_of(fold, last, kind, alone=False)
            found.append(both if both and both.seconds(size) < pairs.seconds(size) else pairs)
        return found

    def tied_of(self, fold: Fold, last: int, kind: int, alone: bool) -> tuple[Reduction, TwoLevels | None]:
        """By pairs, and in two levels where that is possible; alone: the others being still."""
        kinds = fold.kind_on(kind, 0), fold.kind_on(kind, last)
        pairs = by_pairs(self.network, fold, kind, self.link_bps(kinds))
        if self.stock or not self.rules.tied:
            return pairs, None
        for family in twins(fold):
            if kind in family.pipelines:
                groups = 0 if alone else family.count
                size, direct = self.job.tied_bytes, self.rules.direct
                link = self.link_bps(family.kinds)
                return pairs, in_two_levels(self.network, family, size, direct, groups, link)
        return pairs, None

    def _load_s(self, placement: Placement, edges: Sequence[Price]) -> float:
        """Seconds that a stage's NIC sends for one micro-batch of all chunks: v activations down, v gradients up, and
        at the ends v - 1 around. What goes to another cluster and what stays in one are different NICs."""
        v, size, last = self.rules.virtual, self.job.block.activation_bytes, placement.sizes.pipeline - 1
        on = [{self.network.cluster(kind) for kind, _ in content} for content in placement.stages]
        loads = [{True: 0.0, False: 0.0} for _ in on]
        for stage, edge in enumerate(edges):
            across = len(on[stage] | on[stage + 1]) > 1
            loads[stage][across] += v * edge.seconds(size)
            loads[stage + 1][across] += v * edge.seconds(size)
        around = self.edge(placement, last, 0).seconds(size) if last else 0.0
        for load in (loads[0], loads[-1]):
            load[len(on[0] | on[-1]) > 1] += (v - 1) * around
        return max(max(load.values()) for load in loads)

    def straddling(self, placement: Placement) -> dict[str, list[tuple[int, Family]]]:
        """Of each kind the groups that only Ethernet holds though a member has better: (stage, family)."""
        found: dict[str, list[tuple[int, Family]]] = {}
        for stage in range(placement.sizes.pipeline):
            _, fold = self._stages(placement, stage)
            own, place = fold()
            for kind in INSIDE:
                for family in own.families(place, kind):
                    if self.network.straddles(family.kinds):
                        found.setdefault(kind, []).append((stage, family))
        return found


def _sliced(load: Load, link_bps: float, slices: int) -> Price:
    """A message of which each of `slices` ranks sends a part on Ethernet, gathered on the node that it reaches."""
    if load.fabric is None or load.fabric.name != ETHERNET or slices == 1:
        return load.price
    gathered = 8 * (slices - 1) / slices / link_bps if link_bps else 0.0
    return Price(load.price.byte_s / slices + gathered, load.price.latency_s)


def price(
    network: Network, placement: Placement, job: RankModel, rules: Rules = Rules(),
    reductions: Sequence[Reduction] = (),
) -> StageCosts:
    """What a partition of the job's layers over the placement's stages costs."""
    return Prices(network, job, rules).costs(placement, reductions)
