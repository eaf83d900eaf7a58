"""Lower bound on the traffic between clusters in a step, for given parallel sizes.

It is not known yet which nodes hold which stage. A plan divides the clusters into groups of equal size,
and the pipeline passes from group to group:

    groups of 1    (a)(b)(c)(d)    activations cross between all clusters, gradients do not
    groups of 2    (a b)(c d)      a and b share stages, and sum the gradients of these
    all together   (a b c d)       gradients cross, activations need not
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
        """Prepare lower bounds on the time that a job's traffic between clusters takes in a step.

        Args:
            network: Clusters, and the links between them.
            prices: Bytes of activations and gradients, and their compression.
            shape: Parallel sizes, micro-batch and ZeRO stage.
            cluster_ranks: Ranks of each cluster.
            ring_bits: Bits of the gradients of the whole model, if ring all-reduces sum them
                between clusters. 0 with other algorithms (ZeRO, experts, compression, gloo's direct
                exchanges): then no bound from rings is made.
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

        The clusters form groups of equal size, and the clusters of a group share their pipeline
        stages. Example: of clusters a, b, c, d in groups of two, a and b hold stages 0 and 1, c and
        d hold stages 2 and 3. A plan may have groups of any size. So there is a bound for each
        size, and the least of them is returned.

        The result is 0 (no bound) if plans need not have such groups: without a WAN, if clusters
        have different numbers of ranks, or if a stage can have a part of a cluster's ranks together
        with ranks of another cluster.
        """
        if not self.network.wan or len(set(self.cluster_ranks)) > 1:
            return 0.0
        cluster_ranks = self.cluster_ranks[0]

        # Either a stage has the ranks of whole clusters, or a cluster has the ranks of
        # several whole stages. Otherwise plans may have no groups of whole clusters: no bound.
        stage_fills_clusters = self.stage_ranks % cluster_ranks == 0
        stages_fill_cluster = cluster_ranks % self.stage_ranks == 0
        if not stage_fills_clusters and not stages_fill_cluster:
            return 0.0
        links: BestLinks = self.network.remember("best links", lambda: best_links(self.network))

        # A group has at least the clusters that a stage fills.
        least_group = max(1, self.stage_ranks // cluster_ranks)
        return min(
            self._step_with_groups_s(group_size, links)
            for group_size in range(least_group, self.cluster_count + 1)
            if self.cluster_count % group_size == 0
        )

    def _step_with_groups_s(self, group_size: int, links: BestLinks) -> float:
        """Return a lower bound on the step, in seconds, if a stage lies on `group_size` clusters.

        Two kinds of traffic cross between clusters: activations from each group of clusters to the
        next, and, after the last micro-batch, the sum of the gradients over the clusters of a
        group.

        Args:
            group_size: Number of clusters that share their stages.
            links: Highest rates between clusters. The plan's links are not known yet, so the fastest
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

        Two lower bounds hold at the same time, so the larger is returned:

            any algorithm    A cluster receives the sums of its group's gradients from the other
                             clusters of the group.
            ring             A ring all-reduce is as fast as its slowest link. Only if the job uses
                             rings between clusters (ring_bits > 0).

        It is not known which clusters form a group. Of any g clusters, the slowest is no faster than
        the g-th fastest of all clusters, so that rate is assumed. The same holds for links of a ring.

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

        # Experts' gradients are summed in smaller groups. These may lie inside a cluster. So with
        # experts no traffic between clusters is certain: 0 bits.
        gradient_bits = 0.0
        if not block.expert_parameters:
            gradient_bits = 8 * shape.tensor * job.total_bytes

        # SHARES: kind of compression -> bytes sent for each byte
        gradient_bits *= (1 - 1 / group_ranks) * SHARES[self.prices.rules.compress]
        # Any algorithm: some group has at least an equal share of the model's gradients. Each of
        # its clusters receives their sums from its peers.
        fastest_into_bps = links.into_bps[peers - 1]  # of each cluster, fastest first
        into_bps = fastest_into_bps[group_size - 1]
        sums_s = gradient_bits * group_share / into_bps

        # Ring: of g clusters, it sends 2 (g - 1) / g of the group's gradients over each link. A
        # ring contains a tree of g - 1 links. The slowest link of any such tree is no faster than
        # the (g - 1)-th fastest link of the maximum spanning tree.
        ring_bits = self.ring_bits * 2 * peers / group_size * group_share
        slowest_ring_bps = links.tree_bps[peers - 1]
        return max(sums_s, ring_bits / slowest_ring_bps)

    def _activations_s(self, group_size: int, links: BestLinks) -> float:
        """Return the least seconds for all activations over the slowest link between groups.

        All micro-batches of the step pass each link between groups, so the step takes at least the
        time of the slowest. The plan's links are not known yet, so the fastest possible set of
        links is assumed. The i-th cluster of a group sends to the i-th cluster of the next group:
        groups of g clusters make g chains. Example with groups (a b)(c d): the chains a -> c and
        b -> d.

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

        # A chain of k clusters has k - 1 links, so g chains have cluster_count - g links in all.
        # They form no cycle. Of n links without a cycle, the slowest is no faster than the n-th
        # fastest link of the maximum spanning tree: tree_bps[n - 1].
        chain_links = self.cluster_count - group_size
        slowest_bps = links.tree_bps[chain_links - 1]
        senders = self.stage_ranks / group_size  # ranks of a stage on each cluster
        return shape.micro_batches * latency_s + senders * activation_bits / slowest_bps
