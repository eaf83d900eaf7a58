"""Best-first search over the orders in which a pipeline passes clusters of equal size.

Used if a WAN makes the orders differ. An order is a sequence of groups of clusters, all of the same
size:

    (a)(b)(c)...      groups of a single cluster
    (a b)(c d)...     groups of two clusters that share stages

A* (Hart, Nilsson and Raphael, 1968) extends a prefix (the first groups of an order) by a group at a
time. The lower bound of a prefix has

  * the messages of a micro-batch over the chosen links, forward and back
  * the messages of all micro-batches over the slowest of these links
  * the best possible link for each border between groups that is still open
  * for groups of a single cluster, the work of the first stage after its last backward pass
  * for larger groups, the reduction of the gradients between the clusters of a group

A complete order with a bound below the best step time already reached is then bounded as a
placement (least.py).
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
from holmes_ext.planner.bound.best_links import best_links, rates_between
from holmes_ext.planner.bound.least import StepLowerBound

#: Most prefixes of orders that are extended, and most placements that are bounded.
MAX_EXTENDED = 6000
MAX_BOUNDED = 1000
#: Fewest clusters that make a search worth it; all orders of fewer are listed anyway.
MIN_CLUSTERS = 3


class _ClusterLink(NamedTuple):
    """Seconds for an activation from a cluster's last stage to the next cluster's first stage."""

    total_s: float
    interval_s: float  # between messages that follow each other


class _Prefix(NamedTuple):
    """Beginning of an order of clusters, with a lower bound on the step time.

    An order is the sequence in which a pipeline passes the clusters. It may pass several at once:
    the order is a sequence of groups of equally many clusters, and the clusters of a group hold the
    same pipeline stages. Example: in ((0, 1), (2, 3)), clusters 0 and 1 hold the first stages.
    The search keeps the prefixes in a heap, the least bound first.
    """

    bound_s: float
    number: int  # order of creation; decides between equal bounds
    group_size: int
    groups: Groups

    @property
    def clusters(self) -> int:
        """Number of clusters that this beginning of an order has, in all its groups."""
        return len(self.groups) * self.group_size


class OrderSearch(NamedTuple):
    """Result of a search over the orders of clusters in a pipeline.

    It has the placements found, and a lower bound for all orders that were not examined.
    """

    #: (lower bound on the step in seconds, placement)
    placements: list[tuple[float, Placement]]
    remaining_s: float  # inf if every order was examined


class OrderBounds:
    """Lower bounds on the step time for all orders in which a pipeline can pass its clusters.

    The parallel sizes are given. below() searches for the orders that can beat a step time.
    """

    def __init__(
        self,
        orders: Orders,
        sizes: Sizes,
        bound_of: Callable[[Placement], StepLowerBound],
        ring_bits: float,
    ):
        """Estimate the costs of each link between clusters from the lower bounds of some sample pipelines.

        A sample pipeline passes all clusters in sequence. The samples are chosen so that
        every pair of clusters appears as neighbours, and also as the first and the last cluster. So
        they contain every cost that depends on two clusters.

        Args:
            orders: Clusters to order.
            sizes: Complete parallel sizes.
            bound_of: Returns the lower bound of a placement.
            ring_bits: Bits of the gradients of all layers, if clusters with common stages sum them
                by ring all-reduces. 0 if another algorithm or none is used; then the bound has no
                reduction between clusters.
        """
        self.orders = orders
        self.sizes = sizes
        self.bound_of = bound_of
        self.ring_bits = ring_bits
        self.clusters = orders.node_types  # each cluster is a node type here
        #: (cluster, next cluster) -> bits/s
        self.rates_bps = rates_between(orders.network)
        #: Rates of the best links that connect all clusters, fastest first.
        self.tree_bps = best_links(orders.network).tree_bps
        #: (cluster, next cluster) -> activation between them
        self.links: dict[tuple[int, int], _ClusterLink] = {}
        #: (first cluster, last cluster) -> all-reduce of the tied embedding, seconds
        self.tied_s: dict[tuple[int, int], float] = {}
        self.micro_batches = 0  # set from the first sample
        #: Cluster -> least seconds of a first stage on it after its last backward pass.
        self.first_stage_end_s = [inf] * len(self.clusters)
        #: Least seconds of a micro-batch's passes and messages inside clusters.
        self.inside_s = inf
        for first in self.clusters:
            others = [*self.clusters[first + 1 :], *self.clusters[:first]]
            # Rotations of the others: each of them is second once and last once.
            for index, last in enumerate(others):
                # Fills links, tied_s, micro_batches, first_stage_end_s and inside_s.
                self._read_chain((first, *others[index + 1 :], *others[:index], last))

    @staticmethod
    def applies_to(orders: Orders, sizes: Sizes) -> bool:
        """Return whether OrderBounds holds for these clusters, and a search is worth it.

        True for a pipeline over at least MIN_CLUSTERS clusters that a WAN connects. (Without a WAN
        all orders take equally long; of fewer clusters all orders are examined without a search.)
        Also, all clusters must have equally many ranks, and hold a whole number of stages.

        Args:
            orders: Clusters to order.
            sizes: Complete parallel sizes.
        """
        if not orders.network.wan or sizes.pipeline == 1 or len(orders.node_types) < MIN_CLUSTERS:
            return False
        widths = orders.network.widths  # ranks of a node
        ranks_of_clusters = {nodes * width for nodes, width in zip(orders.nodes, widths)}
        if len(ranks_of_clusters) > 1:
            return False
        (cluster_ranks,) = ranks_of_clusters
        stage_ranks = orders.network.world // sizes.pipeline
        return cluster_ranks % stage_ranks == 0

    def _read_chain(self, chain: Sequence[int]) -> None:
        """Store the costs of the links between clusters, and of the first stage, from a sample pipeline.

        A sample is a pipeline over all clusters in the order a -> b -> ... -> z. Its lower bound
        has times by stage. They are stored by cluster, so that below() can estimate other orders:

            links[a, b], ...        an activation between each two neighbouring clusters
            tied_s[a, z]            all-reduce of the tied embedding, between first and last stage
            first_stage_end_s[a]    work of the first stage after its last backward pass
            inside_s                passes and messages of a micro-batch inside clusters: the least
                                    of all samples, whatever the order

        Args:
            chain: All clusters, in the order of the sample.
        """
        # A group for each cluster: there is a single placement with this order.
        (placement,) = self.orders.placements_of(self.sizes, tuple((cluster,) for cluster in chain))
        bound = self.bound_of(placement)
        self.micro_batches = bound.micro_batches
        first = chain[0]
        last = chain[-1]

        # A stage's link leads to the next stage. It leaves the cluster on the cluster's last stage;
        # the last cluster has no such link.
        stages_per_cluster = bound.stage_count // len(chain)
        border_stages = range(stages_per_cluster - 1, bound.stage_count - 1, stages_per_cluster)
        for source, target, stage in zip(chain, chain[1:], border_stages):
            self.links[source, target] = _ClusterLink(
                bound.stage_links_s[stage],
                bound.interval_s[stage],  # least seconds between two messages on the link
            )

        # first_stage_end_s() includes the tied embedding's all-reduce. This depends on the last
        # cluster, too, so it is stored separately.
        tied_s = bound.tied_s[0]
        self.tied_s[first, last] = tied_s
        first_end_s = bound.first_stage_end_s() - tied_s
        self.first_stage_end_s[first] = min(self.first_stage_end_s[first], first_end_s)

        # A micro-batch takes no less than if all layers were on the fastest stage (block_s has the
        # forward and the backward pass). An activation and a gradient pass each link in a cluster.
        compute_s = bound.layer_count * min(bound.block_s)
        border_links_s = sum(bound.stage_links_s[stage] for stage in border_stages)
        inside_links_s = sum(bound.stage_links_s) - border_links_s
        self.inside_s = min(self.inside_s, compute_s + 2 * inside_links_s)

    def below(self, best_s: float) -> OrderSearch:
        """Search the clusters' orders for placements with a lower bound below `best_s` seconds.

        Best-first search (A*): it extends the beginning of an order that has the least bound by
        another group of clusters. It stops early after extending MAX_EXTENDED beginnings or finding
        MAX_BOUNDED placements. Then `remaining_s` of the result is a lower bound for all orders
        that were not examined.
        """
        placements = []
        bounded = 0  # placements so far
        number = count()
        heap: list[_Prefix] = []

        # The empty prefix, for each size of the groups that divides the clusters. (A single group
        # has no order.)
        for group_size in range(1, len(self.clusters)):
            if len(self.clusters) % group_size == 0:
                heap.append(_Prefix(0.0, next(number), group_size, groups=()))
        for _ in range(MAX_EXTENDED):
            if not heap or heap[0].bound_s >= best_s or bounded == MAX_BOUNDED:
                break
            prefix = heapq.heappop(heap)  # with the least bound
            if prefix.clusters == len(self.clusters):  # a complete order
                for placement in self.orders.placements_of(self.sizes, prefix.groups):
                    bounded += 1
                    bound_s = max(prefix.bound_s, self.bound_of(placement).seconds(best_s))
                    if bound_s < best_s:
                        placements.append((bound_s, placement))
                continue
            for group in self._next_groups(prefix):
                groups = (*prefix.groups, group)
                bound_s = self.prefix_bound_s(groups, prefix.group_size)
                if bound_s < best_s:
                    longer = _Prefix(bound_s, next(number), prefix.group_size, groups)
                    heapq.heappush(heap, longer)
        remaining_s = heap[0].bound_s if heap and heap[0].bound_s < best_s else inf
        return OrderSearch(placements, remaining_s)

    def _next_groups(self, prefix: _Prefix) -> Iterator[tuple[int, ...]]:
        """Yield the groups of unused clusters that can come next in an order.

        The clusters of a group share stages. Of interchangeable clusters, those with lower numbers
        are used first. So of two orders that differ only by an exchange of equal clusters, a single
        order is tried.

        Args:
            prefix: First groups of the order, and the size of every group.
        """
        used = {cluster for group in prefix.groups for cluster in group}
        unused = [cluster for cluster in self.clusters if cluster not in used]
        for group in combinations(unused, prefix.group_size):
            skipped = [cluster for cluster in unused if cluster not in group]
            if not any(self._is_after_equal(cluster, skipped) for cluster in group):
                yield group

    def _is_after_equal(self, cluster: int, skipped: Sequence[int]) -> bool:
        """Return whether `skipped` has a cluster that equals `cluster` and comes before it."""
        first_equal = self.orders.first_equal_type  # equal values for interchangeable clusters
        return any(
            first_equal[earlier] == first_equal[cluster] for earlier in skipped if earlier < cluster
        )

    def prefix_bound_s(self, groups: Groups, group_size: int) -> float:
        """Return a lower bound, in seconds, for every order of clusters that begins with `groups`.

        A pipeline passes the groups in their order. The clusters of a group share stages, and each
        micro-batch is divided among them: chain i is the path through the i-th cluster of every
        group, and carries 1 / group_size of each micro-batch. The bound adds up events that follow
        each other in every such order:

            one_way_s     The first activation goes over the links of the slowest chain.
            all_down_s    It does so, and the other activations follow over the slowest link.
            messages_s    After all_down_s, the last gradient comes back over the chain (one_way_s).

        With groups of several clusters, the gradients are also summed between the clusters of a group.
        This begins after all_down_s, so the longer of this sum and the way back counts. With groups
        of a single cluster, the passes inside the clusters are added, and the first stage's work
        after its last backward pass. To groups that are not chosen yet, the best link is assumed.

        Args:
            groups: First groups of the order.
            group_size: Number of clusters in each group.
        """
        # A border is the step from one group to the next. Borders to groups that are not chosen yet
        # are open.
        open_borders = len(self.clusters) // group_size - len(groups)
        chains = []  # for each chain, the costs of its links
        for clusters in zip(*groups):
            chains.append([self.links[pair] for pair in zip(clusters, clusters[1:])])

        # The way of the first activation, then that of the others over the slowest link.
        chosen_s = max(_chain_s(chain, group_size) for chain in chains)
        one_way_s = chosen_s + open_borders * self._least_link_s(group_size)

        # interval_s: seconds between two messages that follow each other on a link
        intervals_s = [link.interval_s for chain in chains for link in chain]
        if open_borders > 0:
            intervals_s.append(self._least_interval_s())
        all_down_s = one_way_s + (self.micro_batches - 1) * max(intervals_s) / group_size
        messages_s = one_way_s + all_down_s

        if group_size > 1:  # groups of a single cluster have no reduction between clusters
            reduction_s = self._reduction_s(groups, open_borders, group_size)
            return max(messages_s, all_down_s + reduction_s)

        (first,) = groups[0]
        # After the first stage's last backward pass: its reduction and update, and the all-reduce
        # of an embedding tied between first and last stage.
        end_s = self.first_stage_end_s[first] + self._least_tied_s(groups, open_borders)

        # inside_s: least seconds of a micro-batch's passes, and messages, inside the clusters
        return self.inside_s + messages_s + end_s

    def _least_interval_s(self) -> float:
        """Return the shortest time from one message to the next on any link between clusters, in seconds."""
        return min(link.interval_s for link in self.links.values())

    def _least_link_s(self, group_size: int) -> float:
        """Return the least seconds for 1 / group_size of an activation, on any link between clusters.

        A message takes latency and the time of its bytes. The least total time and the least time
        of the bytes are taken from all links, each by itself. They may belong to two different
        links, so no real link is faster than the result.
        """
        least = _ClusterLink(
            total_s=min(link.total_s for link in self.links.values()),
            interval_s=self._least_interval_s(),
        )
        return _chain_s([least], group_size)

    def _least_tied_s(self, groups: Groups, open_borders: int) -> float:
        """Return the least seconds of the tied embedding's all-reduce, for groups of a single cluster.

        The first and the last stage both have the tied embedding. So this all-reduce runs between
        the first and the last cluster of the order. While the last cluster is open, every cluster
        that is not used yet may be the last, and the least of their times is a lower bound.

        Args:
            groups: First groups of the order, of a single cluster each.
            open_borders: Number of groups that are not chosen yet; 0: the order is complete.
        """
        (first,) = groups[0]
        last_clusters = list(groups[-1])
        if open_borders:
            last_clusters = [cluster for cluster in self.clusters if (cluster,) not in groups]
        return min(self.tied_s[first, last] for last in last_clusters)

    def _reduction_s(self, groups: Groups, open_borders: int, group_size: int) -> float:
        """Return the least seconds to sum all gradients in rings, with a ring for each group of clusters.

        A ring goes around the clusters of a group. These share stages. How many layers, and so
        gradients, a group has is open. At best all groups end at the same time: then all gradients
        take their bits / the sum of the rings' rates.

        Args:
            groups: First groups of the order.
            open_borders: Number of groups that are not chosen yet. (Each of them is behind a border
                between groups that is still open.) The best possible ring is assumed for them.
            group_size: Number of clusters in each group.
        """
        peers = group_size - 1
        # A ring around the clusters of a group is as fast as its slowest link.
        rings_bps = []
        for group in groups:
            next_in_ring = (*group[1:], group[0])
            rings_bps.append(min(self.rates_bps[link] for link in zip(group, next_in_ring)))

        # A group that is not chosen yet: a ring around its clusters contains a tree of `peers`
        # links, and its rate is that of the slowest link. tree_bps are the links of the maximum
        # spanning tree of all clusters, fastest first. In every tree of n links, the slowest is no
        # faster than the n-th of these: tree_bps[n - 1], here n = peers.
        open_rings_bps = open_borders * self.tree_bps[peers - 1]
        total_bps = sum(rings_bps) + open_rings_bps

        # A ring all-reduce among g clusters sends 2 (g - 1) / g of the bytes over each link.
        return self.ring_bits * 2 * peers / group_size / total_bps


def _chain_s(links: Sequence[_ClusterLink], group_size: int) -> float:
    """Return the seconds in which a part of an activation passes several links, one after the other.

    The links are those of a chain: it carries 1 / group_size of each micro-batch. The times of a
    link are for a whole activation: `total_s` is its latency and the time of the bytes,
    `interval_s` the time of the bytes alone. Example: of 5 ms in total, 4 ms are for the bytes.
    With two clusters in a group, half of the bytes go over this chain, and the activation takes 3
    ms.
    """
    saved_share = 1 - 1 / group_size  # of the bytes: these go over other chains
    return sum(link.total_s - link.interval_s * saved_share for link in links)
