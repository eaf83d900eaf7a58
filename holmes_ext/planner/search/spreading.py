"""Nodes spread over stages by what crosses, where there is a WAN (plan/arrange/spread.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice, permutations
from math import inf

from holmes_ext.plan.arrange.spread import Stages, spread
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.bound.shape import ShapeBound, rates_between
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import timed

#: Shapes whose nodes are spread over stages, and orders of stages looked at for each.
SHAPES, TRIES = 2, 1500
#: Orders of a stage's kinds that are looked at.
ORDERS = 120


def with_spread(result: SearchResult) -> SearchResult:
    """With the fastest shapes' nodes spread over stages, simulated where they promise more. The
    optimality gap speaks of whole clusters."""
    if not result.network.wan or len(result.network.kinds) < 2 or result.optimality_gap is None:
        return result
    fastest: dict[tuple[int, int], Candidate] = {}
    for candidate in result.candidates:
        shape = candidate.shape
        if (
            candidate.simulated_s
            and shape.pipeline > 1
            and shape.virtual == 1
            and (
                ShapeBound(result.network, result.prices(shape), shape).computing_s()
                < result.best.step_s
            )
        ):
            fastest.setdefault((shape.pipeline, shape.tensor * shape.context), candidate)
    known = {plan.placement.stages for plan in result.candidates}
    improved = []
    for candidate in islice(fastest.values(), SHAPES):
        moved = _spread(result, candidate)
        if moved and moved.formula_s < result.best.step_s and moved.placement.stages not in known:
            improved.append(timed(result, moved))
    ranked = sorted([*improved, *result.candidates], key=lambda plan: plan.simulated_s or inf)
    return result.ranked(ranked, result.optimality_gap.bound_s)


def _spread(result: SearchResult, candidate: Candidate) -> Candidate | None:
    """`candidate` with its nodes spread; None where stages hold no whole nodes, or nothing crosses faster."""
    network, shape, job = result.network, candidate.shape, result.prices(candidate.shape).job
    processes, size = network.processes, network.world // shape.pipeline
    if (
        size % processes
        or candidate.placement.tied > 1
        or processes % (shape.tensor * shape.context)
    ):
        return None
    sent = shape.micro_batches * job.block.activation_bytes * processes / shape.tensor
    reduced = shape.tensor * (0.5 if shape.zero else 1.0) * job.total_bytes / shape.pipeline
    crossing = Crossing(network, sent, reduced)
    parts = candidate.placement.parts
    current = tuple(
        tuple(sorted(kind for kind, count in part for _ in range(count))) for part in parts
    )
    chain = tuple(dict.fromkeys(kind for part in parts for kind, _ in part))
    stages, seconds = spread(
        list(map(len, network.names)), shape.pipeline, crossing.seconds, TRIES, chain
    )
    if seconds >= crossing.seconds(current) * (1 - EQUAL):
        return None
    spread_out = result.candidate(
        shape, laid(stages, candidate.placement.sizes, processes), candidate.split
    )
    costs = result.costs(spread_out)
    return spread_out if all(estimate(costs, candidate.split).fits) else None


class Crossing:
    """What of a step passes the fullest link between clusters. sent: bytes of a node's activations, each way;
    reduced: of a stage's gradients, summed directly."""

    def __init__(self, network: Network, sent: float, reduced: float):
        self.sent, self.reduced, self.rates = 8 * sent, 8 * reduced, rates_between(network)

    def seconds(self, stages: Stages) -> float:
        pipeline: dict[tuple[int, int], float] = defaultdict(float)
        data: dict[tuple[int, int], float] = defaultdict(float)
        for stage in stages:
            kinds = set(stage)
            for pair in permutations(kinds, 2):
                data[pair] += 2 / len(kinds)
        for sender, receiver in zip(stages, stages[1:]):
            for source, target in _moved(sender, receiver):
                pipeline[source, target] += 1
                pipeline[target, source] += 1
        return self._fullest(pipeline, self.sent) + self._fullest(data, self.reduced)

    def _fullest(self, loads: Mapping[tuple[int, int], float], bits: float) -> float:
        return max((bits * load / self.rates[pair] for pair, load in loads.items()), default=0.0)


@lru_cache(maxsize=10_000)
def _moved(sender: tuple[int, ...], receiver: tuple[int, ...]) -> list[tuple[int, int]]:
    """(from, to) of each message that must cross clusters from a stage to the next, as few as can be."""
    sends, receives = Counter(sender), Counter(receiver)
    return [*zip((sends - receives).elements(), (receives - sends).elements())]


def laid(stages: Stages, sizes: Sizes, processes: int) -> Placement:
    """Each stage's kinds in the order in which most nodes face their own kind in the stage before."""
    parts: list[list[int]] = []
    for stage in stages:
        counts, before = Counter(stage), parts[-1] if parts else []
        orders = islice(permutations(counts), ORDERS)
        lines = [[kind for kind in order for _ in range(counts[kind])] for order in orders]
        parts.append(max(lines, key=lambda line: sum(a == b for a, b in zip(line, before))))  # noqa: B023
    return Placement.of_parts(sizes, processes, parts)
