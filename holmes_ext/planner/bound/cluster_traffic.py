"""Lower bound on the traffic between clusters in a step, for given parallel sizes.

Which nodes hold which stage is open. A plan divides the clusters into groups of equal size, and the
pipeline passes from group to group:

    groups of 1    (a)(b)(c)(d)    activations cross between all clusters, gradients do not
    groups of 2    (a b)(c d)      a and b share stages, and sum the gradients of these
    one group      (a b c d)       gradients cross, activations need not
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import SHARES
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.best_links import BestLinks, best_links


class ClusterTraffic:
    """Lower bound on the time that traffic between clusters takes in a step."""

    def __init__(
        self,
        network: Network,
        prices: Prices,
        shape: Shape,
        cluster_ranks: Sequence[int],
        ring_bits: float,
    ):
        """Set the job.

        Args:
            network: Clusters, and the links between them.
            prices: Bytes of activations and gradients, and their compression.
            shape: Parallel sizes, micro-batch and ZeRO stage.
            cluster_ranks: Ranks of each cluster.
            ring_bits: Bits of all gradients if rings of clusters sum them; 0 if they travel in other
                ways.
        """
        self.network = network
        self.prices = prices
        self.shape = shape
        self.cluster_ranks = cluster_ranks
        self.ring_bits = ring_bits
        self.cluster_count = len(cluster_ranks)
        self.stage_ranks = network.world // shape.pipeline

    def seconds(self) -> float:
        """Return a lower bound on the step time from the traffic between clusters, in seconds.

        Which size the groups of clusters have is open, so the result is the least of the bounds for
        all sizes. It is 0 if the clusters have no WAN between them, or differ in size.
        """
        if not self.network.wan or len(set(self.cluster_ranks)) > 1:
            return 0.0
        cluster_ranks = self.cluster_ranks[0]
        # Groups of whole clusters are the only possibility if a stage fills clusters, or clusters
        # fill with whole stages.
        stage_fills_clusters = self.stage_ranks % cluster_ranks == 0
        stages_fill_cluster = cluster_ranks % self.stage_ranks == 0
        if not stage_fills_clusters and not stages_fill_cluster:
            return 0.0
        links: BestLinks = self.network.remember("best links", lambda: best_links(self.network))
        least_group = max(1, self.stage_ranks // cluster_ranks)
        return min(
            self._group_s(group_size, links)
            for group_size in range(least_group, self.cluster_count + 1)
            if self.cluster_count % group_size == 0
        )

    def _group_s(self, group_size: int, links: BestLinks) -> float:
        """Return a lower bound on the step, in seconds, if a stage lies on `group_size` clusters.

        Two kinds of traffic cross between clusters: activations from each group of clusters to the
        next, and, after the last micro-batch, the sum of the gradients over the clusters of a
        group.

        Args:
            group_size: Number of clusters that share their stages.
            links: Highest rates between clusters. Which links a plan uses is open, so the fastest
                are assumed.
        """
        seconds = 0.0
        if group_size > 1:
            seconds += self._reduction_s(group_size, links)
        if group_size < self.cluster_count:
            seconds += self._activations_s(group_size, links)
        return seconds

    def _reduction_s(self, group_size: int, links: BestLinks) -> float:
        """Return the least seconds to sum the gradients over the clusters of each group.

        The larger of two bounds counts: the traffic into a cluster, and that of a ring.

        Args:
            group_size: Number of clusters that share their stages.
            links: Highest rates between clusters.
        """
        shape = self.shape
        job = self.prices.job
        peers = group_size - 1
        group_share = group_size / self.cluster_count  # of the stages, and so of the gradients
        _, block, _ = job.layers
        group_ranks = shape.data * shape.context  # of a data parallel group
        gradient_bits = 0.0  # no bound with experts
        if not block.expert_parameters:
            gradient_bits = 8 * shape.tensor * job.total_bytes
        # SHARES: kind of compression -> bytes sent for each byte
        gradient_bits *= (1 - 1 / group_ranks) * SHARES[self.prices.rules.compress]
        # The group with most gradients has at least its share of them. Each of its clusters
        # receives a whole sum from its peers. The slowest of these clusters is at best the
        # group_size-th fastest of all.
        fastest_into_bps = links.into_bps[peers - 1]  # of each cluster, fastest first
        into_bps = fastest_into_bps[group_size - 1]
        sums_s = gradient_bits * group_share / into_bps
        # A ring of g clusters sends 2 (g - 1) / g of the group's gradients over each link. Its
        # slowest link is at best the (g - 1)-th fastest of the tree.
        ring_bits = self.ring_bits * 2 * peers / group_size * group_share
        slowest_ring_bps = links.tree_bps[peers - 1]
        return max(sums_s, ring_bits / slowest_ring_bps)

    def _activations_s(self, group_size: int, links: BestLinks) -> float:
        """Return the least seconds for all activations over the slowest link between groups.

        Args:
            group_size: Number of clusters that share their stages.
            links: Highest rates between clusters.
        """
        shape = self.shape
        # Hidden stage links overlap their latency with passes.
        latency_s = 0.0 if self.prices.hide_stage_links else links.latency_s
        activation_bits = (
            8 * shape.micro_batches * self.prices.job.block.activation_bytes / shape.tensor
        )
        activation_bits *= self.prices.job.compressed_share(self.prices.rules.compression)
        # The chains of clusters have cluster_count - group_size links without a cycle. The slowest
        # of them is at best the last of that many fastest links of the spanning tree.
        chain_links = self.cluster_count - group_size
        slowest_bps = links.tree_bps[chain_links - 1]
        senders = self.stage_ranks / group_size  # ranks of a stage on one cluster
        return shape.micro_batches * latency_s + senders * activation_bits / slowest_bps
