"""What a search of plans found: candidates, the certificates, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import stock_fabric
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate
from holmes_ext.plan.search.arrangement import Arrangement, Ground, arrangement_of, launcher
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.search.space import REDUCTIONS, Limits, Shape
from holmes_ext.plan.sizes import DEFAULT_ORDER

#: Steps that differ by less than this fraction are equal.
EQUAL = 1e-9


@dataclass(frozen=True)
class Candidate:
    """One plan. formula_s: its step in closed form; bound_s: no partition of it is faster in closed form; least_s: no
    1F1B step of any partition takes less. simulated_s: of plan/simulate/step.py, 0 when it was not simulated;
    breadth_first: in that order (ranking.py). memory_bytes, limit_bytes, reductions (the way of plan/cost/stages.py's
    StagePrice), and in_flight (micro-batches under way, () under the framework's own schedule): by stage."""

    shape: Shape
    arrangement: Arrangement
    split: tuple[int, ...]
    formula_s: float
    bound_s: float
    least_s: float
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    reductions: tuple[str, ...]
    simulated_s: float = 0.0
    in_flight: tuple[int, ...] = ()
    breadth_first: bool = False

    @property
    def step_s(self) -> float:
        """The simulated step where there is one."""
        return self.simulated_s or self.formula_s

    @property
    def replicas(self) -> int:
        """Clusters over which each stage's data-parallel groups lie, in equal parts; 1 where no group crosses, 0 where
        the parts or the stages differ."""
        contents = self.arrangement.contents
        found = {len(content) if len({ranks for _, ranks in content}) == 1 else 0 for content in contents}
        return found.pop() if len(found) == 1 else 0

    @property
    def peak_bytes(self) -> float:
        return max(self.memory_bytes)


@dataclass(frozen=True)
class Certificate:
    """No plan of the space takes less than bound_s; step_s is the best one's."""

    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The fraction of the step that a better plan could save at most."""
        return max(0.0, 1 - self.bound_s / self.step_s)

    @property
    def proven(self) -> bool:
        return self.gap <= 10 * EQUAL

    def __str__(self) -> str:
        if self.proven:
            return "proven best within the model"
        return f"within {self.gap:.1%} of the best within the model (no plan takes less than {self.bound_s:.4g} s)"


@dataclass
class Outcome:
    """candidates: the fastest first. unseen: shapes that were not expanded, with their bounds;
    ideals: of every shape that fits, seconds that no arrangement of it beats. misfits: arrangements
    that no memory holds. left_s: the least bound of what was not worked out. formula: certificate of the closed form;
    simulated: of simulated steps, None before plan/search/ranking.py's rank. yours: the layout that the user gave.
    framework_overlap: of reductions, as stock does it ("off", "first": of the first stage, "on"); reducing: the same of
    this outcome, "" for what `overlap` says. gather_overlap: ZeRO-1's weights travel under the next forward. hides: as
    many micro-batches are under way as hide the pipeline's edges (not in stock, nor interleaved)."""

    ground: Ground
    model: Model
    global_batch: int
    limits: Limits
    overlap: bool
    candidates: list[Candidate] = field(default_factory=list)
    unseen: list[tuple[float, Shape]] = field(default_factory=list)
    ideals: dict[Shape, float] = field(default_factory=dict)
    formula: Certificate = Certificate(1.0, 0.0)
    simulated: Certificate | None = None
    shapes: int = 0
    pruned: int = 0
    misfits: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    left_s: float = 0.0
    yours: Candidate | None = None
    framework_overlap: str = "off"
    reducing: str = ""
    gather_overlap: bool = False
    hides: bool = True

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def certificate(self) -> Certificate:
        """Of the best one's step."""
        return self.simulated or self.formula

    def tokens_per_s(self, candidate: Candidate) -> float:
        return self.global_batch * self.model.sequence / candidate.step_s

    def flops_per_gpu(self, candidate: Candidate) -> float:
        """FLOP/s that the model needs: nothing counts that is computed again."""
        layers = replace(self.model, micro_batch=1, recompute="none").costs()
        forward = sum(layer.forward_flops for layer in layers) * self.global_batch
        return 3 * forward / candidate.step_s / self.ground.world

    def pricing(self, shape: Shape) -> Pricing:
        reductions, two_level = self.limits.allowed.get("reduction", REDUCTIONS), self.limits.two_level
        if two_level is not None and shape.zero not in two_level:
            reductions = ("flat",)
        more = self.limits.memory_bytes, self.hides, two_level is not None
        return Pricing(self.ground, self.model, shape, reductions, *more)

    def costs(self, candidate: Candidate, sharded: bool = True) -> StageCosts:
        """The candidate's costs again; sharded: with what ZeRO 2 and 3 send."""
        return self.pricing(candidate.shape).costs(candidate.arrangement, self.overlap, sharded)

    def candidate(
        self, pricing: Pricing, arrangement: Arrangement, split: Sequence[int], bound_s: float | None = None,
        least_s: float = 0.0,
    ) -> Candidate:
        """bound_s: None where the split is the best one."""
        one = estimate(pricing.costs(arrangement, self.overlap), split)
        prices = pricing.stages(arrangement)
        return Candidate(
            shape=pricing.shape, arrangement=arrangement, split=tuple(split), formula_s=one.step_s,
            bound_s=one.step_s if bound_s is None else bound_s, least_s=least_s, memory_bytes=one.memory_bytes,
            limit_bytes=tuple(price.limit_bytes for price in prices), reductions=tuple(price.way for price in prices),
        )

    def stock(self, shape: Shape, split: Sequence[int] = (), order: str = DEFAULT_ORDER) -> tuple[Outcome, Candidate]:
        """The same shape without holmes: the launcher's order of nodes, all traffic on the network that all nodes
        share, layers even unless `split` says otherwise, overlapped as the framework does it."""
        site = self.ground.site
        ground = Ground.of(site, self.model, stock_fabric(site), self.ground.links)
        how: dict[str, Any] = {"overlap": self.framework_overlap == "on", "reducing": self.framework_overlap}
        how["hides"] = False
        stock = replace(self, ground=ground, **how)
        if order == DEFAULT_ORDER:
            arrangement = launcher(ground, shape.pipeline)
        else:
            arrangement = arrangement_of(ground, [node.name for node in site.nodes], shape.sizes(order))
        layers = split or uniform(self.model.layers, shape.pipeline)
        return stock, stock.candidate(stock.pricing(shape), arrangement, layers)
