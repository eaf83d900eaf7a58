"""How each stage of a placement sums its gradients: what its groups can do, priced, and the slowest of them.

Stages that hold the same nodes are looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.rank_model import RankModel
from holmes_ext.plan.cost.reductions import (
    NONE,
    PricedReduction,
    Sharded,
    TwoLevels,
    inside_clusters,
    owners,
    two_levels,
)
from holmes_ext.plan.placement.families import GroupFamily
from holmes_ext.plan.placement.fold import Fold
from holmes_ext.plan.placement.placement import Placement
from holmes_ext.plan.rules import FLAT, TWO_LEVEL, Rules
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
    both: TwoLevels | None
    #: Groups that share what lies between clusters.
    crossing: float


class StageSums:
    """Of one job on one network, for any placement of the same sizes; what was worked out is kept.
    on_best_fabrics: a kind of group, such as "data", that is priced by Network.on_best_fabrics: what would a
    step take if none of these groups straddled; "": no kind."""

    def __init__(self, network: Network, job: RankModel, rules: Rules = Rules(), on_best_fabrics: str = ""):
        self.network, self.job, self.rules = network, job, rules
        self.stock = network.only is not None
        self.hide_edges = rules.hide_edges and not self.stock and rules.virtual == 1
        self.known: dict[Hashable, Any] = {}
        #: By kind of group.
        self.groups: dict[str, Network] = dict.fromkeys(INSIDE, network)
        if on_best_fabrics:
            self.groups[on_best_fabrics] = Network(network.site, network.links, network.only,
                                                   on_best_fabrics=True)

    # ------------------------------------------------------------------- what is alike

    def _stages(self, placement: Placement, *stages: int) -> tuple[Hashable, Callable[[], FoldedStages]]:
        """What tells these stages from others, and where their nodes' fold is found."""
        tied = placement.tied
        components = sorted({stage // tied for stage in stages})
        places = tuple(components.index(stage // tied) * tied + stage % tied for stage in stages)
        key = tuple(placement.parts[index] for index in components), placement.sizes

        def folded() -> FoldedStages:
            return self.network.remember(("fold", key), lambda: Fold(placement.alone(*components))), places

        return (key, places), folded

    def _on_stages(
        self, what: str, make: Callable[[Fold, tuple[int, ...]], T], placement: Placement, *stages: int
    ) -> T:
        """What `make` tells of these stages' fold, once for all stages that are like them."""
        key, folded = self._stages(placement, *stages)
        return self.remember(what, key, lambda: make(*folded()))

    def fold(self, placement: Placement, *stages: int) -> FoldedStages:
        """Where the groups of these stages, and the edges between them, are found; their numbers there."""
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
        if self.rules.alike and len(names) > 1 and any(name == TWO_LEVEL for name, _ in names):
            flat = StageSums(self.network, self.job, replace(self.rules, reductions=(FLAT,)))
            return flat.reductions(placement)
        return result

    def _reduction(self, placement: Placement, stage: int) -> PricedReduction:
        key, _ = self._stages(placement, stage)
        size = self.job.total_bytes / placement.sizes.pipeline

        def slowest() -> PricedReduction:
            every = self.sums(placement, stage)
            across = [group for group in every
                      if group.both is not None or self.network.across(group.family.kinds)]
            twice = bool(across) and all(self._in_two_levels(group, size) for group in across)
            chosen = [self._chosen(group, twice) for group in every]
            return max(chosen, key=lambda group: group.seconds(size))

        return self.remember("reduction", (key, self._together(placement, stage)), slowest)

    def _in_two_levels(self, sums: Sums, size: float) -> bool:
        if sums.both is None:
            return False
        return FLAT not in self.rules.reductions or sums.both.seconds(size) < sums.flat.seconds(size)

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
        if not self.stock and rules.zero < 2 and TWO_LEVEL in rules.reductions:
            how = rules.direct, crossing, rules.compress, link
            size = self.job.total_bytes / pipeline
            both = two_levels(network, family, size, *how, chunk_bytes=rules.bucket_bytes)
        return Sums(family, PricedReduction(load, FLAT if family.nodes > 1 else "local"), both, crossing)

    def _sharded(self, sums: Sums) -> Sharded:
        known: dict[str, Any] = {"zero": self.rules.zero, "weights": self.job.weights}
        if self.rules.zero == 1 and self.rules.gathers:
            known["scatter_part"] = 1.0
        parts = inside_clusters(self.network, sums.family) if self.rules.hybrid else []
        if not parts:
            return Sharded(sums.flat.load, sums.flat.name, **known)
        rings = [self.network.ring(part, sums.crossing, self.link_bps(part.kinds)) for part in parts]
        slowest = max(rings, key=lambda ring: (ring.price.byte_s, ring.price.latency_s))
        across = self.network.ring(owners(self.network, sums.family), sums.crossing)
        return Sharded(slowest, "hybrid", **known, across=across, shards=parts[0].ranks)

    def link_bps(self, kinds: Iterable[int]) -> float:
        """Between the GPUs of a node of these kinds."""
        key, cluster = frozenset(kinds), self.network.cluster
        return self.remember("link", key, lambda: self.job.slowest(map(cluster, key)).link_bps)
