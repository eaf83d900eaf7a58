"""Places where experts can live, and the cost of sending a token between them.

A place is a set of expert parallel ranks without a network between them: the ranks of a node. An
expert has the same place in all expert parallel groups, so a cost is the mean over the groups:

    0                                                  ranks on the same node
    INSIDE                                             nodes of the same cluster
    rate of the fastest path / rate of this path       clusters; 1 if the network between them is flat

A token that crosses clusters costs far more than a token that stays. So the placement with the least
total cost crosses clusters least (over slow links least of all), and then crosses nodes least.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from holmes_ext.errors import HolmesError
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import groups

#: Cost of a token between nodes of a cluster; a token that crosses clusters costs 1 or more.
INSIDE = 1e-4
#: Fewest ranks of a group over which experts can be distributed.
MIN_RANKS = 2


@dataclass(frozen=True)
class Places:
    """Nodes that can hold the experts of a layer, and the cost of a token between ranks.

    places_of() makes it for a plan. A place is the ranks of an expert parallel group on a node:
    no network is between them. Costs have no unit: 0 inside a node, INSIDE inside a cluster, 1 over
    the fastest path between clusters, more over slower paths.
    """

    #: For each place, its ranks within an expert parallel group (0, 1, ...).
    of: tuple[tuple[int, ...], ...]
    #: [from rank][to rank] cost of a token.
    far: tuple[tuple[float, ...], ...]
    #: [from rank][to rank] share of the groups in which the token crosses clusters, and nodes.
    crossing: tuple[tuple[float, ...], ...]
    moving: tuple[tuple[float, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of expert parallel ranks."""
        return len(self.far)


def places_of(plan: Plan) -> Places:
    """Return the nodes that can hold a plan's experts, and the cost of a token between ranks.

    An expert has the same rank number in all expert parallel groups, but the groups lie on
    different nodes. So each cost is a mean over the groups; so is the share of groups in which two
    ranks are on different nodes or clusters.

    Raises:
        HolmesError: The plan has no expert parallel groups.
    """
    if plan.sizes is None or plan.sizes.expert < MIN_RANKS:
        raise HolmesError(
            "the plan has no expert parallelism: give the expert-parallel size (--expert N)"
        )
    size = plan.sizes.expert

    # For each expert parallel group, the node of each rank.
    groups_nodes = [
        [plan.node_of(rank) for rank in ranks] for ranks in groups(plan.sizes, "expert")
    ]
    clusters = list(plan.clusters)
    rates_bps = {
        (source, target): _rate_bps(plan, source, target)
        for source in clusters
        for target in clusters
        if source != target
    }
    fastest_bps = max(rates_bps.values(), default=1.0)

    # [from rank][to rank], as means over the groups: cost, share across clusters, share across
    # nodes.
    far = [[0.0] * size for _ in range(size)]
    crossing = [[0.0] * size for _ in range(size)]
    moving = [[0.0] * size for _ in range(size)]
    group_count = len(groups_nodes)
    for nodes in groups_nodes:
        for (sender, source), (receiver, target) in product(enumerate(nodes), repeat=2):
            source_cluster = plan.cluster_of[source]
            target_cluster = plan.cluster_of[target]
            if source_cluster != target_cluster:
                # 1 on the fastest path between clusters, more on slower paths.
                rate_bps = rates_bps[source_cluster, target_cluster]
                far[sender][receiver] += fastest_bps / rate_bps / group_count
                crossing[sender][receiver] += 1 / group_count
                moving[sender][receiver] += 1 / group_count
            elif source != target:
                # So little that it only decides between placements with equal traffic between
                # clusters.
                far[sender][receiver] += INSIDE / group_count
                moving[sender][receiver] += 1 / group_count
    costs = _frozen(far)
    return Places(
        of=_ranks_of_places(costs),
        far=costs,
        crossing=_frozen(crossing),
        moving=_frozen(moving),
    )


def _frozen(table: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    """Convert a table of lists into tuples, which cannot be changed."""
    return tuple(map(tuple, table))


def _rate_bps(plan: Plan, source: str, target: str) -> float:
    """Return the rate of the slowest part of the path between nodes of two clusters, in bits/s."""
    fabric = plan.fabric_of((_first_rank(plan, source), _first_rank(plan, target)))
    assert fabric is not None
    return min([fabric.rate_bps, *(hop.rate_bps for hop in plan.wan.hops(source, target))])


def _first_rank(plan: Plan, cluster: str) -> int:
    """Return the first rank on a cluster's nodes."""
    for node in plan.nodes:
        if node in plan.clusters[cluster]:
            return plan.first_rank(node)
    raise AssertionError(f"the plan has no node of cluster {cluster}")


def _ranks_of_places(costs: tuple[tuple[float, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Divide the ranks into places: sets of ranks between which sending a token costs nothing.

    A place is usually a node. Only ranks with the same cost to every rank share a place. A rank that
    shares with no other rank is a place of its own.

    Args:
        costs: [from rank][to rank] cost of sending a token.

    Returns:
        The ranks of each place.
    """
    ranks_of_row: dict[tuple[float, ...], list[int]] = {}
    for rank, row in enumerate(costs):
        ranks_of_row.setdefault(row, []).append(rank)
    places: list[tuple[int, ...]] = []
    for ranks in ranks_of_row.values():
        is_free_inside = all(costs[ranks[0]][peer] == 0 for peer in ranks)
        if is_free_inside:
            places.append(tuple(ranks))
        else:
            places += [(rank,) for rank in ranks]
    return tuple(sorted(places))
