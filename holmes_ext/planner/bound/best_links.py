"""Best rates between clusters over a WAN, for lower bounds on the time of the traffic between clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, permutations
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.wan import Hop
from holmes_ext.plan.cost.network import Network


class BestLinks(NamedTuple):
    """Highest rates and least latency of the links between clusters, whatever clusters a plan connects.

    best_links() makes it for lower bounds on the step time, before it is known which clusters a plan
    will connect. So a bound takes the best case: the n-th fastest link of a plan is at most as fast
    as the n-th rate here.
    """

    #: Rates of the maximum spanning tree over all clusters (Prim 1957), fastest first, in bits/s.
    #: The n-th fastest link of any tree or forest is no faster than the n-th of these.
    tree_bps: list[float]
    #: Item n - 1 has a rate for each cluster, the fastest cluster first: the bits/s at which it can
    #: receive from its n fastest peers together.
    into_bps: list[list[float]]
    latency_s: float  # one way, between the two clusters with the least


def rates_between(network: Network) -> dict[tuple[int, int], float]:
    """Return the rate between each two clusters: (from, to) -> bits/s of the slowest link on the path.

    The path between two clusters consists of links over the WAN and of each cluster's connection to
    the WAN (uplink). The rate is inf for clusters on the same fast network: they need no WAN.
    """
    rates_bps = {}
    for pair in permutations(range(len(network.node_types)), 2):
        hops = _wan_hops(network, pair)
        rates_bps[pair] = min((hop.rate_bps for hop in hops), default=inf)
    return rates_bps


def _wan_hops(network: Network, pair: tuple[int, int]) -> Sequence[Hop]:
    """Return the WAN links between two clusters; none if a fast network connects them.

    A hop is a link between two clusters, or a cluster's connection to the WAN (uplink).
    """
    # fabric(): the fastest network that the nodes of both clusters share. Only Ethernet has a WAN.
    if network.fabric(pair).name != ETHERNET:
        return ()
    source, target = pair
    return network.wan.hops(network.cluster(source), network.cluster(target))


def best_links(network: Network) -> BestLinks:
    """Return the highest rates (bits/s) and the least latency of the links between clusters.

    Lower bounds on the step time use the result before it is known which clusters a plan connects: in
    any case, the plan's n-th fastest link is at best the n-th fastest of all. Each node type
    of `network` is a cluster here. The rate between two clusters is that of the slowest link on
    the path, the latency is the sum over the path's links.

    Returns:
        tree_bps: Rates of the links of the maximum spanning tree over all clusters, fastest first.
        into_bps: Item n - 1 is the list of rates at which each cluster can receive from n peers
            together, the fastest cluster first.
        latency_s: Least latency between any two clusters, one way.
    """
    rates_bps = rates_between(network)
    latencies_s = []
    for pair, rate_bps in rates_bps.items():
        # inf: a fast network connects both clusters, or the WAN does not limit the rate. Then no
        # latency is counted; the result is a lower bound.
        hops = _wan_hops(network, pair) if rate_bps < inf else ()
        latencies_s.append(sum(hop.latency_s for hop in hops))
    clusters = range(len(network.node_types))
    return BestLinks(
        tree_bps=_spanning_tree_bps(rates_bps, clusters),
        into_bps=_rates_into(network, rates_bps, clusters),
        latency_s=min(latencies_s),
    )


def _spanning_tree_bps(rates_bps: Mapping[tuple[int, int], float], clusters: range) -> list[float]:
    """Return the rates of the maximum spanning tree over all clusters, the fastest first.

    Prim's algorithm (1957): always add the fastest link to a cluster that is not yet in the tree.

    Args:
        rates_bps: (from cluster, to cluster) -> bits/s.
        clusters: Indices of the clusters.
    """
    in_tree = {0}
    tree_bps = []
    while len(in_tree) < len(clusters):
        border = (pair for pair in rates_bps if pair[0] in in_tree and pair[1] not in in_tree)
        fastest = max(border, key=rates_bps.__getitem__)
        _, added_cluster = fastest
        in_tree.add(added_cluster)
        tree_bps.append(rates_bps[fastest])
    return sorted(tree_bps, reverse=True)


def _rates_into(
    network: Network, rates_bps: Mapping[tuple[int, int], float], clusters: range
) -> list[list[float]]:
    """Return the highest rates at which clusters can receive from several peers, in bits/s.

    A cluster receives from its n fastest peers at the sum of their rates, but no faster than its
    uplink to the WAN.

    Args:
        network: Nodes, and the network between the clusters.
        rates_bps: (from cluster, to cluster) -> bits/s.
        clusters: Indices of the clusters.

    Returns:
        A list for each number of peers. Item n - 1 has the rate from n peers of every cluster,
        the fastest cluster first.
    """
    rates_of_clusters = []  # for each cluster: item n - 1 is the rate from its n fastest peers
    for target in clusters:
        links_bps = [rates_bps[source, target] for source in clusters if source != target]
        links_bps.sort(reverse=True)
        # uplink_of: cluster -> bits/s
        uplink_bps = network.wan.uplink_of.get(network.cluster(target), inf)
        rates_of_clusters.append([min(sum_bps, uplink_bps) for sum_bps in accumulate(links_bps)])
    rates_by_peers = zip(*rates_of_clusters)  # item n - 1: the rates of all clusters from n peers
    return [sorted(rates, reverse=True) for rates in rates_by_peers]
