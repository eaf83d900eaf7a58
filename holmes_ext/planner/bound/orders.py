"""Best-first search over the orders in which a pipeline passes clusters of equal size.

Used if a WAN makes the orders differ. A* (Hart, Nilsson and Raphael, 1968) extends the beginning of an order
by one group of clusters at a time:

    (a)(b)(c)...      groups of one cluster
    (a b)(c d)...     groups of two clusters that share stages

The lower bound of a beginning has the messages over the chosen links down and up, the micro-batches over the
slowest of these links, and the best possible link for each border still open; for groups of one cluster also
the work of the first stage after its last backward pass. A complete order whose bound is below the best step
time already reached is then bounded as a placement (least.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, count
from math import inf
from typing import NamedTuple

from holmes_ext.plan.arrange.orders import Groups, Orders
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.bound.least import StepLowerBound
from holmes_ext.planner.bound.shape import best_links, rates_between

#: Most beginnings that are extended, and most placements that are bounded.
MAX_EXTENDED = 6000
MAX_BOUNDED = 1000
#: Fewest clusters for which a search is worth it; all orders of fewer are listed anyway.
MIN_CLUSTERS = 3


class _ClusterLink(NamedTuple):
    """Seconds for an activation from one cluster to the next."""

    total_s: float
    interval_s: float  # between messages that follow each other


class _Beginning(NamedTuple):
    """Entry of the search's heap: the groups at the beginning of an order."""

    bound_s: float
    number: int  # order of creation; decides between equal bounds
    group_size: int
    groups: Groups

    @property
    def clusters(self) -> int:
        return len(self.groups) * self.group_size


class OrderSearch(NamedTuple):
    """Result of a search: placements, and a bound for all orders that were not examined."""

    #: (lower bound on the step in seconds, placement)
    placements: list[tuple[float, Placement]]
    remaining_s: float  # inf if every order was examined


class OrderBounds:
    """Lower bounds on the step time for cluster orders of one shape."""

    def __init__(
        self,
        orders: Orders,
        sizes: Sizes,
        bound_of: Callable[[Placement], StepLowerBound],
        ring_bits: float,
    ):
        """Read the costs of all links between clusters from sample placements.

        Args:
            orders: Clusters to order.
            sizes: Complete parallel sizes.
            bound_of: Returns the lower bound of a placement.
            ring_bits: Bits of all gradients if they travel around the clusters (ShapeBound.ring_bits).
        """
        self.orders = orders
        self.sizes = sizes
        self.bound_of = bound_of
        self.ring_bits = ring_bits
        self.clusters = orders.node_types
        #: (cluster, next cluster) -> bits/s
        self.rates_bps = rates_between(orders.network)
        #: Rates of the best links that connect all clusters, fastest first.
        self.tree_bps = best_links(orders.network).tree_bps
        #: (cluster, next cluster) -> activation between them
        self.links: dict[tuple[int, int], _ClusterLink] = {}
        #: (first cluster, last cluster) -> all-reduce of the tied embedding, seconds
        self.tied_s: dict[tuple[int, int], float] = {}
        self.micro_batches = 0
        #: Cluster -> least seconds of a first stage on it after its last backward pass.
        self.first_stage_end_s = [inf] * len(self.clusters)
        #: Least seconds of one micro-batch's passes and messages inside clusters.
        self.inside_s = 0.0
        for first in self.clusters:
            others = [(first + offset) % len(self.clusters) for offset in self.clusters[1:]]
            # Rotations: each other cluster is second once and last once.
            for index, last in enumerate(others):
                self._read_chain((first, *others[index + 1 :], *others[:index], last))

    @staticmethod
    def applies_to(orders: Orders, sizes: Sizes) -> bool:
        """Return whether the orders differ and these bounds hold for their clusters.

        The bounds need a WAN, several clusters with equally many GPUs, and whole stages in each cluster.
        """
        ranks_of_clusters = {nodes * orders.network.processes for nodes in orders.nodes}
        stage_ranks = orders.network.world // sizes.pipeline
        is_ordered = len(orders.node_types) >= MIN_CLUSTERS and sizes.pipeline > 1
        return (
            bool(orders.network.wan)
            and is_ordered
            and len(ranks_of_clusters) == 1
            and ranks_of_clusters.pop() % stage_ranks == 0
        )

    def _read_chain(self, chain: Sequence[int]) -> None:
        """Read the costs of a chain from the bound of its placement, and keep them in this object.

        They are the links between neighbouring clusters, the work of the first stage at the end of a step,
        the tied embedding's all-reduce, and the least time inside clusters.

        Args:
            chain: All clusters in the order of the pipeline.
        """
        (placement,) = self.orders.placements_of(self.sizes, tuple((cluster,) for cluster in chain))
        bound = self.bound_of(placement)
        stages_per_cluster = bound.stage_count // len(chain)
        # Last stages of all clusters but the last one: their stage links leave the cluster.
        borders = range(stages_per_cluster - 1, bound.stage_count - 1, stages_per_cluster)
        for pair, stage in zip(zip(chain, chain[1:]), borders):
            self.links[pair] = _ClusterLink(bound.stage_links_s[stage], bound.interval_s[stage])
        first = chain[0]
        tied_s = bound.tied_s[0]
        self.tied_s[first, chain[-1]] = tied_s
        first_end_s = bound.first_stage_end_s() - tied_s
        self.first_stage_end_s[first] = min(self.first_stage_end_s[first], first_end_s)
        self.micro_batches = bound.micro_batches
        compute_s = bound.layer_count * min(bound.block_s)
        border_links_s = sum(bound.stage_links_s[stage] for stage in borders)
        inside_links_s = sum(bound.stage_links_s) - border_links_s
        self.inside_s = min(self.inside_s or inf, compute_s + 2 * inside_links_s)

    def below(self, best_s: float) -> OrderSearch:
        """Search for the placements whose lower bound is below `best_s` seconds.

        The search ends early after MAX_EXTENDED beginnings or MAX_BOUNDED placements.
        """
        placements = []
        bounded = 0  # placements so far
        number = count()
        heap: list[_Beginning] = []
        # The empty beginning, for each size of the groups that divides the clusters.
        for group_size in self.clusters[1:]:
            if len(self.clusters) % group_size == 0 and len(self.clusters) > group_size:
                heap.append(_Beginning(0.0, next(number), group_size, groups=()))
        for _ in range(MAX_EXTENDED):
            if not heap or heap[0].bound_s >= best_s or bounded == MAX_BOUNDED:
                break
            beginning = heapq.heappop(heap)  # the one with the least bound
            if beginning.clusters == len(self.clusters):  # a complete order
                for placement in self.orders.placements_of(self.sizes, beginning.groups):
                    bounded += 1
                    bound_s = max(beginning.bound_s, self.bound_of(placement).seconds(best_s))
                    if bound_s < best_s:
                        placements.append((bound_s, placement))
                continue
            for group in self._next_groups(beginning):
                groups = (*beginning.groups, group)
                bound_s = self.seconds(groups, beginning.group_size)
                if bound_s < best_s:
                    longer = _Beginning(bound_s, next(number), beginning.group_size, groups)
                    heapq.heappush(heap, longer)
        remaining_s = heap[0].bound_s if heap and heap[0].bound_s < best_s else inf
        return OrderSearch(placements, remaining_s)

    def _next_groups(self, beginning: _Beginning) -> Iterator[tuple[int, ...]]:
        """Yield the groups that may follow a beginning.

        Of interchangeable clusters, those with lower numbers are used first, so equal orders appear once.
        """
        used = {cluster for group in beginning.groups for cluster in group}
        unused = [cluster for cluster in self.clusters if cluster not in used]
        alike = self.orders.first_equal_type  # equal values for interchangeable clusters
        for group in combinations(unused, beginning.group_size):
            skips_an_equal_cluster = any(
                earlier not in group
                for cluster in group
                for earlier in unused
                if earlier < cluster and alike[earlier] == alike[cluster]
            )
            if not skips_an_equal_cluster:
                yield group

    def seconds(self, groups: Groups, group_size: int) -> float:
        """Return a lower bound on the step time of every order that begins with `groups`, in seconds.

        A micro-batch is divided among the chains of a group's clusters: pipeline i runs through the i-th
        cluster of every group. A border is a step from a group to the next one.

        Args:
            groups: Groups of clusters at the beginning of the order.
            group_size: Number of clusters in each group.
        """
        open_borders = len(self.clusters) // group_size - len(groups)
        least_link_s = min(link.total_s for link in self.links.values())
        least_interval_s = min(link.interval_s for link in self.links.values())
        chains = [[self.links[pair] for pair in zip(chain, chain[1:])] for chain in zip(*groups)]
        intervals_s = [link.interval_s for chain in chains for link in chain]
        if open_borders > 0:
            intervals_s.append(least_interval_s)
        # A chain's link carries 1 / group_size of each micro-batch.
        saved_share = 1 - 1 / group_size

        def chain_s(chain: Sequence[_ClusterLink]) -> float:
            return sum(link.total_s - link.interval_s * saved_share for link in chain)

        least_link_s -= least_interval_s * saved_share
        one_way_s = max(map(chain_s, chains)) + open_borders * least_link_s
        all_down_s = one_way_s + (self.micro_batches - 1) * max(intervals_s) / group_size
        messages_s = one_way_s + all_down_s
        if group_size > 1:
            reduction_s = self._reduction_s(groups, open_borders, group_size)
            return max(messages_s, all_down_s + reduction_s)
        first = groups[0][0]
        if open_borders:
            last_clusters = [cluster for cluster in self.clusters if (cluster,) not in groups]
        else:
            last_clusters = [groups[-1][0]]
        tied_s = min(self.tied_s[first, last] for last in last_clusters)
        return self.inside_s + messages_s + self.first_stage_end_s[first] + tied_s

    def _reduction_s(self, groups: Groups, open_borders: int, group_size: int) -> float:
        """Return the least seconds to sum the gradients around the clusters of each group.

        Each group has a part of all gradients, and at best all groups end at the same time.

        Args:
            groups: Groups of clusters at the beginning of the order.
            open_borders: Number of groups that are not chosen yet.
            group_size: Number of clusters in each group.
        """
        # A ring around the clusters of a group is as fast as its slowest link.
        rings_bps = (
            min(self.rates_bps[pair] for pair in zip(group, (*group[1:], group[0])))
            for group in groups
        )
        open_rings_bps = open_borders * self.tree_bps[group_size - 2]
        total_bps = sum(rings_bps) + open_rings_bps
        return self.ring_bits * 2 * (group_size - 1) / group_size / total_bps
