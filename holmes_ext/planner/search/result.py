"""Request and result of a search for the best plan: candidates, optimality gap, counts.

The closed form is a formula for the step time of a plan: quick, but less exact than a simulated
step. "Stock" is the same job without holmes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")
#: Steps that differ by less than this fraction are equal.
EQUAL = 1e-9
#: An optimality gap up to this multiple of EQUAL counts as zero.
ROUNDING_ERRORS = 10
#: Forward and backward pass of a matrix multiplication: floating-point operations relative to the
#: forward.
FLOPS_FACTOR = 3


@dataclass(frozen=True)
class Candidate:
    """A plan: a shape, the nodes of its stages, and its split of the layers."""

    shape: Shape
    placement: Placement
    #: Layers of each stage.
    split: tuple[int, ...]
    #: Step time by the closed form, in seconds.
    formula_s: float
    #: Memory needed and available on a GPU of each stage.
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    #: Name of each stage's gradient reduction: "flat", "hierarchical" or "hybrid".
    reductions: tuple[str, ...]
    #: Simulated step time in seconds; 0 if not simulated.
    simulated_s: float = 0.0
    #: Warm-up depth of each stage: micro-batches that it begins before its first backward pass; ()
    #: under the framework's own schedule.
    in_flight: tuple[int, ...] = ()
    #: All micro-batches pass a chunk before the next chunk (arXiv 2211.05953).
    breadth_first: bool = False
    #: Order of the passes on each stage (plan/passes); () under 1F1B.
    schedule: tuple[str, ...] = ()
    #: The command line turns off the framework's own hierarchical all-reduce.
    flat: bool = False

    @property
    def step_s(self) -> float:
        """Step time in seconds: simulated if available, else by the closed form."""
        return self.simulated_s or self.formula_s

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest stage's GPUs."""
        return max(self.memory_bytes)

    @property
    def fits(self) -> bool:
        """True if every stage fits the memory of its GPUs."""
        return all(used <= limit for used, limit in zip(self.memory_bytes, self.limit_bytes))

    @property
    def key(self) -> tuple[Shape, Placement, tuple[int, ...]]:
        """Value that identifies the plan apart from its pipeline schedule: shape, placement and split."""
        return self.shape, self.placement, self.split


@dataclass(frozen=True)
class OptimalityGap:
    """Distance between the best plan's step time and the lower bound on all plans."""

    #: Step time of the best plan, in seconds.
    step_s: float
    #: Seconds below which no plan of the search space takes a step.
    bound_s: float

    @property
    def gap(self) -> float:
        """Largest fraction of the step that another plan could save."""
        return max(0.0, 1 - self.bound_s / self.step_s)

    @property
    def proven(self) -> bool:
        """True if no plan is faster than the best, apart from rounding."""
        return self.gap <= ROUNDING_ERRORS * EQUAL

    def __str__(self) -> str:
        error = f"whose worst measured error is {worst_error():.1%}"
        if self.proven:
            return f"proven best within the model, {error}"
        least = f"no plan takes less than {self.bound_s:.4g} s"
        return f"within {self.gap:.1%} of the best within the model ({least}), {error}"


@cache
def worst_error() -> float:
    """Return the largest relative error of simulated against measured steps in benchmarks/results.

    docs/generate.py writes the file that is read here.
    """
    # The second argument is the advice in the error message if the file cannot be read.
    table = load_json(Path(__file__).with_name("model_error.json"), "install holmes_ext again")
    worst: float = table.take("worst_error", float)
    return worst


@dataclass
class SearchResult:
    """Request and result of a search: a job, and the plans found for it."""

    network: Network
    model: Model
    #: Sequences of a step.
    global_batch: int
    limits: Limits = Limits()
    rules: Rules = Rules()
    engine: EngineTraits = EngineTraits()
    #: Plans found, the fastest first.
    candidates: list[Candidate] = field(default_factory=list)
    #: Shape -> lower bound on the step time of its placements, in seconds; shapes that fit the
    #: memory only.
    ideals: dict[Shape, float] = field(default_factory=dict)
    #: Lower bound on the step time of all shapes for which no time was left to compute their own
    #: bound, in seconds; inf if there are none.
    unbounded_s: float = inf
    #: None before a step was simulated.
    optimality_gap: OptimalityGap | None = None
    #: The layout that the user gave, if any.
    user_layout: Candidate | None = None
    #: The plan that differs from this layout least: the same sizes, with a better number of layers on
    #: each stage; None if there is none.
    nearest: Candidate | None = None
    #: Number of shapes; of placements excluded by their bound; of shapes and placements that fit no
    #: memory.
    shapes: int = 0
    pruned: int = 0
    misfits: int = 0
    #: Shapes that could have a faster plan, but were not examined because the time was over.
    skipped: int = 0
    #: Duration of the search.
    seconds: float = 0.0
    #: Ended by Ctrl-C.
    interrupted: bool = False
    #: Reductions that the framework overlaps without holmes: "off", "first" (of the first stage) or
    #: "on".
    stock_overlap: str = "off"
    #: The same for this result's plans; "" for `rules.overlap`.
    overlap: str = ""
    #: ZeRO 1 gathers the weights under the next forward pass.
    gather_overlap: bool = False
    #: Results of remember().
    remembered: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    #: Result for all nodes, if this result uses fewer nodes because the job is faster with them.
    on_all: SearchResult | None = None

    @property
    def best(self) -> Candidate:
        """The fastest plan."""
        return self.candidates[0]

    @property
    def is_unfinished(self) -> bool:
        """True if the time was over before all shapes were examined: the best plan may be poor."""
        is_proven = self.optimality_gap is not None and self.optimality_gap.proven
        return self.skipped > 0 and not is_proven

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPU model of each node type of the network."""
        return tuple(self.model.gpu_of(cluster) for cluster, _ in self.network.node_types)

    def describe(self, candidate: Candidate) -> str:
        """Return a text with the order in which a plan's pipeline passes the clusters."""
        return described(self.network, candidate.placement)

    def tokens_per_s(self, candidate: Candidate) -> float:
        """Return the tokens that a plan trains per second."""
        return self.global_batch * self.model.sequence / candidate.step_s

    @property
    def computing_s(self) -> float:
        """Seconds in which all GPUs together compute a step; no plan is faster."""
        ranks_of_type = [len(names) * self.network.processes for names in self.network.names]
        flops = sum(ranks * gpu.flops for ranks, gpu in zip(ranks_of_type, self.gpus))
        return self.batch_flops / flops

    @property
    def batch_flops(self) -> float:
        """Floating-point operations that the model needs for a step, without recomputation."""
        layers = replace(self.model, micro_batch=1, recompute="none").costs()
        forward_flops = sum(layer.forward_flops for layer in layers)
        return FLOPS_FACTOR * forward_flops * self.global_batch

    def flops_per_gpu(self, candidate: Candidate) -> float:
        """Return the FLOP/s of each GPU that the model needs, without recomputation."""
        return self.batch_flops / candidate.step_s / self.network.world

    def prices(self, shape: Shape, flat: bool = False) -> Prices:
        """Return the Prices of a shape: times of computation and communication for any placement.

        Args:
            shape: Parallel sizes, micro-batch, recomputation and ZeRO stage.
            flat: Without hierarchical all-reduce.
        """
        return self._cached_prices(shape, flat)

    @cached_property
    def _cached_prices(self) -> Callable[[Shape, bool], Prices]:
        """Return a function that computes the Prices of a shape, and keeps those of the last 64 shapes.

        The cache belongs to this object: a decorated method would share one with all objects.
        """
        return lru_cache(maxsize=64)(self._compute_prices)

    def _compute_prices(self, shape: Shape, flat: bool) -> Prices:
        """Return the Prices of a shape: times of computation and communication for any placement.

        A pipeline stage reduces its gradients flat (in a ring) or hierarchically. The possible ways
        depend on whether holmes or the framework reduces hierarchically:

            holmes           each stage has the way that is faster for it
            the framework    all stages have the same way, and the ZeRO stages are limited

        The way is flat in both cases if `flat` is set.

        Args:
            shape: Parallel sizes, micro-batch, recomputation and ZeRO stage.
            flat: Without hierarchical all-reduce.
        """
        # ZeRO stages at which the framework can reduce hierarchically; None: holmes does, at any.
        framework_zero_stages = self.limits.hierarchical
        can_be_hierarchical = not flat
        if framework_zero_stages is not None and shape.zero not in framework_zero_stages:
            can_be_hierarchical = False
        reductions = [FLAT]
        if can_be_hierarchical:
            reductions = self.limits.of("reduction", self.rules.reductions)
        rules = replace(
            self.rules,
            reductions=tuple(reductions),
            zero=shape.traffic_zero(self.model),
            virtual=shape.virtual,
            memory_bytes=self.limits.memory_bytes,
            # A framework reduces in the same way on all pipeline stages.
            same_reductions=framework_zero_stages is not None,
            hybrid=shape.replicas > 1,  # ZeRO 3 shards inside each cluster only
        )
        sizes = shape.sizes()

        # (key, function) -> the function's value, computed once a key. So a key has everything that
        # affects the value; the model itself is not hashable, so its id stands for it.
        remember = self.network.remember
        key = (id(self.model), shape.micro_batch, shape.recompute)
        model_key = (*key, shape.micro_batches, shape.mode)
        model = remember(model_key, lambda: shape.model(self.model))

        # The layers of a rank. They also depend on the sizes that divide a layer, and on whether a
        # single stage has all layers.
        has_all_layers = shape.pipeline == 1
        rank_key = (*key, shape.tensor, shape.context, shape.expert, has_all_layers)
        kinds = remember(rank_key, lambda: kinds_of(model, sizes))
        return Prices(self.network, RankModel.of(model, sizes, kinds, shape.replicas), rules)

    def costs(self, candidate: Candidate, sharded: bool = True) -> StageCosts:
        """Return the times and the memory of a candidate's stages.

        Args:
            candidate: The plan.
            sharded: Include the collectives of ZeRO 2 and 3 in the passes.
        """
        prices = self.prices(candidate.shape, candidate.flat)
        return prices.costs(candidate.placement, sharded=sharded)

    def candidate(
        self, shape: Shape, placement: Placement, split: Sequence[int], flat: bool = False
    ) -> Candidate:
        """Return the plan of a shape, a placement and a split, with its step by the closed form.

        Args:
            shape: Parallel sizes, micro-batch, recomputation and ZeRO stage.
            placement: Nodes of each stage.
            split: Layers of each stage.
            flat: Without hierarchical all-reduce.
        """
        prices = self.prices(shape, flat)
        costs = prices.costs(placement)
        step = estimate(costs, split)
        return Candidate(
            shape=shape,
            placement=placement,
            split=tuple(split),
            formula_s=step.step_s,
            memory_bytes=step.memory_bytes,
            limit_bytes=costs.limit_bytes,
            reductions=tuple(reduction.name for reduction in prices.reductions(placement)),
            flat=flat,
        )

    def remember(self, name: str, candidate: Candidate, compute: Callable[[], T]) -> T:
        """Return the result of compute(), called only once for each name and candidate.

        Copies of a result (replace()) share the remembered values. A value is computed again for a
        copy that simulates the candidate differently: with another network, model or rules, or
        another overlap of gradient reductions or weight gathers.

        Args:
            name: Name of the result, such as "causes".
            candidate: The plan that compute() is about.
            compute: Function without arguments.
        """
        job = (id(self.network), id(self.model), self.rules, self.overlap, self.gather_overlap)
        key = (name, candidate, job)
        if key not in self.remembered:
            self.remembered[key] = compute()
        value: T = self.remembered[key]
        return value

    def __getstate__(self) -> dict[str, object]:
        # The cache of prices cannot be pickled. Worker processes rebuild it, and need no other cache.
        state = {name: value for name, value in self.__dict__.items() if name != "_cached_prices"}
        return {**state, "remembered": {}}

    def stock(
        self, shape: Shape, split: Sequence[int] = (), order: str = DEFAULT_ORDER
    ) -> tuple[SearchResult, Candidate]:
        """Return a plan of the job without holmes ("stock"), and a SearchResult that prices such plans.

        The ranks are in the launcher's order, all traffic uses the network that all nodes share,
        and reductions overlap as in the framework.

        Args:
            shape: Parallel sizes, micro-batch, recomputation and ZeRO stage of the plan.
            split: Layers of each stage; () for the same number on every stage.
            order: Order of the parallel axes in the ranks.

        Returns:
            A copy of this object with the stock network and rules, and the plan.
        """
        site = self.network.site
        links = self.network.links
        network = self.network.remember("stock", lambda: Network(site, links, stock_fabric(site)))
        # stock_overlap is "off", "first" (only the first stage overlaps) or "on". The closed form
        # (rules) can only be on or off for all stages, the simulation (overlap) can be all three.
        rules = replace(
            self.rules,
            overlap=self.stock_overlap == "on",
            hide_stage_links=False,  # as many micro-batches in flight as in the framework's schedule
        )
        stock = replace(self, network=network, rules=rules, overlap=self.stock_overlap)
        sizes = shape.sizes(order).complete(network.world)  # with the data size
        placement = launched(network, sizes)  # nodes in the launcher's order
        layers = split or uniform(self.model.layers, shape.pipeline)
        return stock, stock.candidate(shape, placement, layers)

    def with_best_if_faster(self, candidate: Candidate) -> SearchResult:
        """Make `candidate` the best plan of the result, if it is faster than the plans found.

        The candidate does not come from the search: it is the user's own layout, for example, with a
        micro-batch that the search does not try. The result is unchanged if the candidate was not
        simulated or does not fit the memory, or if no plan was simulated (no optimality gap).
        """
        is_faster = candidate.simulated_s and candidate.fits and candidate.step_s < self.best.step_s
        if not is_faster or self.optimality_gap is None:
            return self
        # The best plan must be another object than the user's layout, because callers compare them
        # with `is`. So put a copy in front.
        return self.ranked([replace(candidate), *self.candidates], self.optimality_gap.bound_s)

    def ranked(self, candidates: list[Candidate], bound_s: float) -> SearchResult:
        """Replace the plans of a search result, and compute the optimality gap of the fastest.

        Args:
            candidates: Plans, the fastest first.
            bound_s: Lower bound on the step time of every plan, in seconds.
        """
        best_s = candidates[0].step_s
        return replace(
            self, candidates=candidates, optimality_gap=OptimalityGap(best_s, min(bound_s, best_s))
        )

    def on(self, network: Network, model: Model | None = None) -> SearchResult:
        """Copy the search request for another network or model, without the plans found.

        A SearchResult without plans (candidates) is the request of a search; search() fills it.

        Args:
            network: Network of the new request.
            model: Model of the new request; None for the same model.
        """
        model = model or self.model
        return replace(
            self,
            network=network,
            model=model,
            candidates=[],
            ideals={},
            unbounded_s=inf,
            optimality_gap=None,
            user_layout=None,
            nearest=None,
            on_all=None,
            remembered={},
            shapes=0,
            pruned=0,
            misfits=0,
            skipped=0,
        )
