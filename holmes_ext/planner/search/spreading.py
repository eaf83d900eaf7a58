"""Spreads the nodes of clusters over the stages of a pipeline so that less traffic crosses a WAN.

The search itself keeps clusters whole. Here the nodes of its fastest plans are moved between stages
by local search (plan/arrange/spread.py), so that the busiest link between clusters carries its
traffic sooner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice, permutations
from math import inf
from typing import NamedTuple

from holmes_ext.plan.arrange.orders import Blocks
from holmes_ext.plan.arrange.spread import Stages, spread
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.shape import Shape
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.bound.best_links import rates_between
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search.result import EQUAL, Candidate, SearchResult
from holmes_ext.planner.search.simulated import timed

#: Most shapes whose nodes are spread over the stages.
MAX_SHAPES = 2
#: Most arrangements that the local search tries for a shape.
MAX_TRIES = 1500
#: Most orders of the clusters in a stage that are tried.
MAX_ORDERS = 120


class ClusterPair(NamedTuple):
    """Direction of traffic between two clusters."""

    source: int
    target: int


def with_spread(result: SearchResult) -> SearchResult:
    """Return the result with spread variants of its fastest plans, if these are faster.

    In a spread variant of a plan, a stage may have nodes of several clusters. The closed form, a
    formula for the step time, is computed first. Only variants for which it is shorter than the step
    of the best plan are simulated. Without a WAN the result does not change.

    The lower bound of the search does not hold for spread plans, but it is kept. So the optimality
    gap compares the best plan with the plans in which each stage lies in a single cluster.
    """
    has_clusters = len(result.network.node_types) > 1
    if not result.network.wan or not has_clusters or result.optimality_gap is None:
        return result

    # (stages, ranks that a replica of the model has on a stage) -> fastest plan, if its shape
    # could beat the best step with less traffic (_may_gain)
    fastest: dict[tuple[int, int], Candidate] = {}
    for candidate in result.candidates:
        shape = candidate.shape
        if candidate.simulated_s and _may_gain(result, shape):
            fastest.setdefault((shape.pipeline, shape.tensor * shape.context), candidate)
    known_stages = {plan.placement.stages for plan in result.candidates}
    improved = []
    for candidate in islice(fastest.values(), MAX_SHAPES):
        variant = _spread_nodes(result, candidate)
        if variant is None or variant.placement.stages in known_stages:
            continue
        if variant.formula_s < result.best.step_s:
            improved.append(timed(result, variant))
    ranked = sorted([*improved, *result.candidates], key=lambda plan: plan.simulated_s or inf)
    return result.ranked(ranked, result.optimality_gap.bound_s)


def _may_gain(result: SearchResult, shape: Shape) -> bool:
    """Return whether less traffic could make a plan of a shape the fastest.

    It cannot if the computation alone takes longer than the best step.
    """
    if shape.pipeline == 1 or shape.virtual > 1:  # nodes are spread over plain pipelines only
        return False
    bound = ShapeBound(result.network, result.prices(shape), shape)
    return bound.computing_s() < result.best.step_s


def _can_spread(candidate: Candidate, network: Network, blocks: Blocks) -> bool:
    """Return whether blocks of nodes can be exchanged between the stages of a candidate.

    Each stage must consist of whole blocks. Tensor and context parallel groups must lie inside nodes,
    or their traffic would cross between clusters, too.
    """
    shape = candidate.shape
    stage_ranks = network.world // shape.pipeline
    has_nodes_for_itself = candidate.placement.stages_per_component <= 1  # no stages on its nodes
    has_whole_blocks = stage_ranks % blocks.ranks == 0
    has_groups_inside = network.processes % (shape.tensor * shape.context) == 0
    return (
        has_nodes_for_itself
        and has_whole_blocks
        and has_groups_inside
        and blocks.has_only_whole_blocks  # no node is left over
    )


def _spread_nodes(result: SearchResult, candidate: Candidate) -> Candidate | None:
    """Return a candidate with its nodes spread over the stages so that less traffic crosses clusters.

    A stage may then have nodes of several clusters. A local search looks for the arrangement in
    which the traffic between clusters takes least time. If clusters differ in the ranks of a node,
    it moves blocks: nodes of the same cluster with as many ranks as a block of any other cluster.

    Returns:
        None if stages do not hold whole blocks, no arrangement has less traffic, or the memory is
        too small.
    """
    network = result.network
    shape = candidate.shape
    job = result.prices(shape).job
    blocks = Blocks(network, network.node_type_of)
    if not _can_spread(candidate, network, blocks):
        return None

    # Activations that a block sends to the next stage in a step. The tensor parallel ranks share out
    # an activation, so each of the block's ranks sends 1 / tensor of it.
    sent_bytes = shape.micro_batches * job.block.activation_bytes * blocks.ranks / shape.tensor
    scatter_share = 0.5 if shape.zero else 1.0  # a reduce-scatter is half an all-reduce

    # Gradients of a stage: total_bytes are those of a tensor parallel rank over all stages.
    reduced_bytes = shape.tensor * scatter_share * job.total_bytes / shape.pipeline
    # crossing.seconds(arrangement): seconds that the traffic between clusters takes in a step
    crossing = Crossing(network, sent_bytes, reduced_bytes)

    # For each stage: (cluster, blocks).
    parts = [
        [(cluster, nodes // blocks.nodes[cluster]) for cluster, nodes in part]
        for part in candidate.placement.parts
    ]
    current = tuple(tuple(sorted(_cluster_of_nodes(part))) for part in parts)

    # Clusters in the order in which the pipeline visits them.
    chain = tuple(dict.fromkeys(cluster for part in parts for cluster, _ in part))
    blocks_of_clusters = [
        len(names) // blocks.nodes[cluster] for cluster, names in enumerate(network.names)
    ]

    # An arrangement is, for each stage, the cluster of every block. A local search looks for the one
    # with the least crossing.seconds(). It begins with the clusters in the order `chain`.
    stages, seconds = spread(blocks_of_clusters, shape.pipeline, crossing.seconds, MAX_TRIES, chain)
    current_seconds = crossing.seconds(current)
    has_less_traffic = seconds < current_seconds * (1 - EQUAL)
    if not has_less_traffic:
        return None

    # laid(): the placement of blocks with this arrangement; most blocks send inside their cluster.
    sizes = candidate.placement.sizes
    clusters_of_stages = map(_cluster_of_nodes, laid(stages, sizes, blocks.ranks).parts)
    placement = blocks.placement(sizes, list(clusters_of_stages))
    variant = result.candidate(shape, placement, candidate.split)
    fits = estimate(result.costs(variant), candidate.split).fits
    return variant if all(fits) else None


class Crossing:
    """Calculator of the time that a step's traffic needs between clusters, by where the stages lie.

    seconds() is the objective of the search over arrangements (for each stage, the cluster of every
    node).
    """

    def __init__(self, network: Network, sent: float, reduced: float):
        """Store the traffic of a step and the rates between clusters; seconds() computes with them.

        Args:
            network: Rates between the clusters.
            sent: Bytes of activations that a node sends in a step, each way.
            reduced: Bytes of a stage's gradients in an all-reduce.
        """
        self.sent_bits = 8 * sent
        self.reduced_bits = 8 * reduced
        self.rates_bps = rates_between(network)

    def seconds(self, stages: Stages) -> float:
        """Return the seconds that traffic between clusters needs, for given places of the stages.

        It is the sum of two times: of the messages between stages on the link with most of them,
        and of the gradient reductions on the link with most of those.

        Args:
            stages: For each stage, the cluster of every node.
        """
        # (cluster, cluster) -> loads of the link from the first to the second
        messages: dict[tuple[int, int], float] = defaultdict(float)  # in units of sent_bits
        all_reduces: dict[tuple[int, int], float] = defaultdict(float)  # in units of reduced_bits
        for stage in stages:
            clusters = set(stage)
            for pair in permutations(clusters, 2):
                # Direct exchange: each cluster sends the others their part, and gathers the sums.
                all_reduces[pair] += 2 / len(clusters)
        for sender, receiver in zip(stages, stages[1:]):
            for source, target in _crossing_messages(sender, receiver):
                messages[source, target] += 1  # activation
                messages[target, source] += 1  # gradient
        pipeline_s = self._fullest_s(messages, self.sent_bits)
        data_parallel_s = self._fullest_s(all_reduces, self.reduced_bits)
        return pipeline_s + data_parallel_s

    def _fullest_s(self, loads: Mapping[tuple[int, int], float], bits: float) -> float:
        """Return the seconds of the link whose traffic takes longest; 0 without traffic.

        Args:
            loads: (source, target) cluster -> traffic on the link between them, in units of `bits`.
            bits: Unit of the loads.
        """
        return max(
            (bits * load / self.rates_bps[pair] for pair, load in loads.items()), default=0.0
        )


@lru_cache(maxsize=10_000)
def _crossing_messages(sender: tuple[int, ...], receiver: tuple[int, ...]) -> list[ClusterPair]:
    """Return the messages between two stages that must cross clusters, as few as possible.

    Args:
        sender: Cluster of each node of the sending stage.
        receiver: Cluster of each node of the receiving stage.

    Returns:
        (source, target) cluster of each message.
    """
    # Nodes of the same cluster are matched; only the surplus nodes of each cluster send to another
    # cluster.
    sends = Counter(sender)
    receives = Counter(receiver)
    sources = (sends - receives).elements()
    targets = (receives - sends).elements()
    return [ClusterPair(source, target) for source, target in zip(sources, targets)]


def _cluster_of_nodes(counts: Iterable[tuple[int, int]]) -> list[int]:
    """Expand pairs (cluster, number of nodes) into a list with the cluster of every node."""
    return [cluster for cluster, nodes in counts for _ in range(nodes)]


def laid(stages: Stages, sizes: Sizes, processes: int) -> Placement:
    """Return the placement in which most nodes send to a node of the same cluster.

    A node sends to the node at the same position of the next stage. So the clusters of each stage
    are ordered such that the previous stage has a node of the same cluster at as many positions as
    possible.

    Args:
        stages: For each stage, the cluster of every node.
        sizes: Complete parallel sizes.
        processes: Ranks on each node.
    """
    parts: list[list[int]] = []  # for each stage: the cluster of the node at each position
    previous: list[int] = []

    def matches(arranged: list[int]) -> int:
        """Return at how many positions the node is in the same cluster as in the previous stage."""
        return sum(a == b for a, b in zip(arranged, previous))

    for stage in stages:
        counts = Counter(stage)  # cluster -> nodes
        arrangements = []
        for order in islice(permutations(counts), MAX_ORDERS):
            arrangements.append(_cluster_of_nodes((cluster, counts[cluster]) for cluster in order))
        previous = max(arrangements, key=matches)
        parts.append(previous)
    return Placement.of_parts(sizes, processes, parts)
