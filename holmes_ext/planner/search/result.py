"""What a search of plans found: candidates, the optimality gap, and what was left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path

from holmes_ext.document import load_json
from holmes_ext.plan.arrange.orders import described, launched
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network, stock_fabric
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel, StageCosts, estimate, kinds_of
from holmes_ext.plan.engine import FLAT, EngineTraits, Rules
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import DEFAULT_ORDER
from holmes_ext.planner.search.space import Limits

#: Steps that differ by less than this fraction are equal.
EQUAL = 1e-9


@dataclass(frozen=True)
class Candidate:
    """One plan. By stage: memory_bytes, limit_bytes, reductions (their names), in_flight."""

    shape: Shape
    placement: Placement
    split: tuple[int, ...]
    #: The step in closed form, and simulated: 0 when it was not.
    formula_s: float
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    reductions: tuple[str, ...]
    simulated_s: float = 0.0
    #: Micro-batches that a stage begins before its first backward; () under the framework's own schedule.
    in_flight: tuple[int, ...] = ()
    breadth_first: bool = False
    #: Of each stage (plan/passes); () under 1F1B.
    schedule: tuple[str, ...] = ()
    #: Its command line asks for no a hierarchical all-reduce, where these are the framework's own.
    flat: bool = False

    @property
    def step_s(self) -> float:
        """The simulated step where there is one."""
        return self.simulated_s or self.formula_s

    @property
    def peak_bytes(self) -> float:
        return max(self.memory_bytes)

    @property
    def fits(self) -> bool:
        return all(used <= limit for used, limit in zip(self.memory_bytes, self.limit_bytes))

    @property
    def key(self) -> tuple[Shape, Placement, tuple[int, ...]]:
        return self.shape, self.placement, self.split


@dataclass(frozen=True)
class OptimalityGap:
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
        error = f"whose worst measured error is {worst_error():.1%}"
        if self.proven:
            return f"proven best within the model, {error}"
        least = f"no plan takes less than {self.bound_s:.4g} s"
        return f"within {self.gap:.1%} of the best within the model ({least}), {error}"


@cache
def worst_error() -> float:
    """Of simulated steps against measured ones: the worst of benchmarks/results (docs/generate.py)."""
    table = load_json(Path(__file__).with_name("model_error.json"), "install holmes_ext again")
    worst: float = table.take("worst_error", float)
    return worst


@dataclass
class SearchResult:
    """What was asked for, and what was found; candidates: the fastest first."""

    network: Network
    model: Model
    global_batch: int
    limits: Limits = Limits()
    rules: Rules = Rules()
    engine: EngineTraits = EngineTraits()
    candidates: list[Candidate] = field(default_factory=list)
    #: Of every shape that fits, seconds that no placement of it beats.
    ideals: dict[Shape, float] = field(default_factory=dict)
    #: None before a step was simulated.
    optimality_gap: OptimalityGap | None = None
    #: The layout that the user gave.
    user_layout: Candidate | None = None
    #: How many: shapes, placements left out by their bound, those that no memory holds.
    shapes: int = 0
    pruned: int = 0
    misfits: int = 0
    #: Of the search.
    seconds: float = 0.0
    interrupted: bool = False
    #: Reductions that stock overlaps: "off", "first" (of the first stage), "on"; here: those of this result.
    stock_overlap: str = "off"
    overlap: str = ""
    #: ZeRO 1's weights travel under the next forward.
    gather_overlap: bool = False
    #: The same on all nodes, where this is on some of them, with which the job is faster.
    on_all: SearchResult | None = None

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Of each kind of nodes."""
        return tuple(self.model.gpu_of(cluster) for cluster, _ in self.network.kinds)

    def describe(self, candidate: Candidate) -> str:
        return described(self.network, candidate.placement)

    def tokens_per_s(self, candidate: Candidate) -> float:
        return self.global_batch * self.model.sequence / candidate.step_s

    @property
    def batch_flops(self) -> float:
        """FLOPs of a step that the model needs: nothing counts that is computed again."""
        layers = replace(self.model, micro_batch=1, recompute="none").costs()
        return 3 * sum(layer.forward_flops for layer in layers) * self.global_batch

    def flops_per_gpu(self, candidate: Candidate) -> float:
        """FLOP/s that the model needs."""
        return self.batch_flops / candidate.step_s / self.network.world

    def prices(self, shape: Shape, flat: bool = False) -> Prices:
        return self._prices(shape, flat)

    @cached_property
    def _prices(self) -> Callable[[Shape, bool], Prices]:
        return lru_cache(maxsize=64)(self._prices_of)

    def _prices_of(self, shape: Shape, flat: bool) -> Prices:
        hierarchical = self.limits.hierarchical
        reductions = self.limits.of("reduction", self.rules.reductions)
        if flat or hierarchical is not None and shape.zero not in hierarchical:
            reductions = [FLAT]
        rules = replace(
            self.rules,
            reductions=tuple(reductions),
            zero=shape.zero,
            virtual=shape.virtual,
            memory_bytes=self.limits.memory_bytes,
            alike=hierarchical is not None,
            hybrid=shape.replicas > 1,
        )
        sizes, remember = shape.sizes(), self.network.remember
        key = id(self.model), shape.micro_batch, shape.recompute
        model = remember((*key, shape.micro_batches, shape.zero), lambda: shape.model(self.model))
        of_rank = *key, shape.tensor, shape.context, shape.expert, shape.pipeline == 1
        kinds = remember(of_rank, lambda: kinds_of(model, sizes))
        return Prices(self.network, RankModel.of(model, sizes, kinds, shape.replicas), rules)

    def costs(self, candidate: Candidate, sharded: bool = True) -> StageCosts:
        """The candidate's costs again; sharded: with what ZeRO 2 and 3 send."""
        return self.prices(candidate.shape, candidate.flat).costs(
            candidate.placement, sharded=sharded
        )

    def candidate(
        self, shape: Shape, placement: Placement, split: Sequence[int], flat: bool = False
    ) -> Candidate:
        prices = self.prices(shape, flat)
        costs = prices.costs(placement)
        step = estimate(costs, split)
        names = tuple(reduction.name for reduction in prices.reductions(placement))
        memory = step.memory_bytes, costs.limit_bytes
        return Candidate(shape, placement, tuple(split), step.step_s, *memory, names, flat=flat)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_prices"}

    def stock(
        self, shape: Shape, split: Sequence[int] = (), order: str = DEFAULT_ORDER
    ) -> tuple[SearchResult, Candidate]:
        """Without holmes: the launcher's order, all traffic on the network that all nodes share, layers even
        unless `split` says otherwise, overlapped as the framework does it."""
        site, links = self.network.site, self.network.links
        network = self.network.remember("stock", lambda: Network(site, links, stock_fabric(site)))
        rules = replace(self.rules, overlap=self.stock_overlap == "on", hide_stage_links=False)
        stock = replace(self, network=network, rules=rules, overlap=self.stock_overlap)
        placement = launched(network, shape.sizes(order).complete(network.world))
        layers = split or uniform(self.model.layers, shape.pipeline)
        return stock, stock.candidate(shape, placement, layers)

    def with_known(self, candidate: Candidate) -> SearchResult:
        """With a candidate that others told, where it is in the space and better than what was found."""
        quicker = candidate.simulated_s and candidate.fits and candidate.step_s < self.best.step_s
        if not quicker or candidate.shape not in self.ideals or self.optimality_gap is None:
            return self
        return self.ranked([replace(candidate), *self.candidates], self.optimality_gap.bound_s)

    def ranked(self, candidates: list[Candidate], bound_s: float) -> SearchResult:
        """With these, the fastest first; no plan takes less than bound_s."""
        best_s = candidates[0].step_s
        return replace(
            self, candidates=candidates, optimality_gap=OptimalityGap(best_s, min(bound_s, best_s))
        )

    def on(self, network: Network, model: Model | None = None) -> SearchResult:
        """The same on another network, nothing found."""
        model = model or self.model
        return replace(
            self,
            network=network,
            model=model,
            candidates=[],
            ideals={},
            optimality_gap=None,
            user_layout=None,
            on_all=None,
            shapes=0,
            pruned=0,
            misfits=0,
        )
