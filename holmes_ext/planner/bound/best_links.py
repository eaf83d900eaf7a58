"""Best rates between clusters over a WAN, for lower bounds on the traffic that crosses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.wan import Hop
from holmes_ext.plan.cost.network import Network


class BestLinks(NamedTuple):
    """Best rates that any choice of links between clusters can reach."""

    #: Rates of the maximum spanning tree over all clusters (Prim 1957), fastest first, in bits/s.
    #: The n-th fastest link of any tree or forest is no faster than the n-th of these.
    tree_bps: list[float]
    #: Item n - 1: for each cluster the rate at which it receives from its n fastest peers, fastest
    #: first, in bits/s.
    into_bps: list[list[float]]
    latency_s: float  # the least of all pairs


def rates_between(network: Network) -> dict[tuple[int, int], float]:
    """Return the rate from cluster to cluster in bits/s: (from, to) -> rate of the slowest hop.

    A hop is a link between two clusters, or the uplink of one. The rate is inf for clusters on one
    fast network.
    """
    rates_bps = {}
    for pair in permutations(range(len(network.node_types)), 2):
        hops = _hops(network, pair)
        rates_bps[pair] = min((hop.rate_bps for hop in hops), default=inf)
    return rates_bps


def _hops(network: Network, pair: tuple[int, int]) -> Sequence[Hop]:
    """Return the WAN hops from one cluster to another; none if a fast network connects them."""
    if network.fabric(pair).name != ETHERNET:
        return ()
    source, target = pair
    return network.wan.hops(network.cluster(source), network.cluster(target))


def best_links(network: Network) -> BestLinks:
    """Return the best rates between the clusters of a network that any choice of links can reach.

    Each node type is a cluster here, numbered as in Network.node_types. The rates are sorted, as a
    bound needs only the n-th best rate, whichever clusters have it. A path between two clusters has
    hops: links between clusters, or the uplink of one.
    """
    node_types = range(len(network.node_types))
    rates_bps = rates_between(network)
    # The WAN hops of each pair; none for a pair on one fast network, which adds no WAN latency.
    paths = [_hops(network, pair) if rates_bps[pair] < inf else () for pair in rates_bps]

    # Maximum spanning tree (Prim 1957): always add the fastest link to a cluster not yet in the
    # tree.
    in_tree = {0}
    tree_bps = []
    while len(in_tree) < len(node_types):
        border = (pair for pair in rates_bps if pair[0] in in_tree and pair[1] not in in_tree)
        inside, outside = max(border, key=rates_bps.__getitem__)
        in_tree.add(outside)
        tree_bps.append(rates_bps[inside, outside])

    # For each number of peers: the rate at which each cluster receives from so many of its fastest
    # peers. It is at most that of the cluster's uplink to the WAN.
    links_into = []
    for target in node_types:
        links = [rates_bps[source, target] for source in node_types if source != target]
        links_into.append(sorted(links, reverse=True))
    uplinks_bps = [
        network.wan.uplink_of.get(network.cluster(node_type), inf) for node_type in node_types
    ]
    into_bps = []
    for peers in range(1, len(node_types)):
        rates = [
            min(sum(links[:peers]), uplink_bps)
            for links, uplink_bps in zip(links_into, uplinks_bps)
        ]
        into_bps.append(sorted(rates, reverse=True))
    latency_s = min(sum(hop.latency_s for hop in path) for path in paths)
    return BestLinks(sorted(tree_bps, reverse=True), into_bps, latency_s)
