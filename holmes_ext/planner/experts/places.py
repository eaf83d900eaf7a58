"""Where experts can live, and how far it is: expert-parallel ranks, those on one node taken together.

An expert has one place, the same in all expert-parallel groups, so a distance is the mean over them:

    0                                        ranks on one node
    INSIDE                                   nodes of one cluster
    rate of the fastest way / rate of it     clusters: 1 where the network between them is flat

A token that crosses clusters counts more than any that stays: the least sum crosses least, over slow links
least of all, and then moves least between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from holmes_ext.errors import HolmesError
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import groups

#: Of a token between nodes of a cluster, where one that crosses counts 1 or more.
INSIDE = 1e-4


@dataclass(frozen=True)
class Places:
    """of: expert-parallel ranks of each place; far[i][j]: of a token from rank i to rank j; crossing, moving:
    parts of the groups in which that crosses clusters, nodes."""

    of: tuple[tuple[int, ...], ...]
    far: tuple[tuple[float, ...], ...]
    crossing: tuple[tuple[float, ...], ...]
    moving: tuple[tuple[float, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.far)


def places_of(plan: Plan) -> Places:
    """HolmesError where the plan has no expert-parallel groups."""
    if plan.sizes is None or plan.sizes.expert < 2:
        raise HolmesError(
            "the plan has no expert parallelism: give the expert-parallel size (--expert N)"
        )
    expert_groups, size = groups(plan.sizes, "expert"), plan.sizes.expert
    clusters, nodes = (
        list(plan.clusters),
        [[plan.node_of(rank) for rank in ranks] for ranks in expert_groups],
    )
    rates = {(a, b): _rate(plan, a, b) for a in clusters for b in clusters if a != b}
    fastest = max(rates.values(), default=1.0)
    tables = tuple([[0.0] * size for _ in range(size)] for _ in range(3))
    for names in nodes:
        for i, source in enumerate(names):
            for j, target in enumerate(names):
                pair, apart = (
                    (plan.cluster_of[source], plan.cluster_of[target]),
                    float(source != target),
                )
                crosses = float(pair[0] != pair[1])
                distance = fastest / rates[pair] if crosses else INSIDE * apart
                for table, value in zip(tables, (distance, crosses, apart)):
                    table[i][j] += value / len(nodes)
    far, crossing, moving = (tuple(map(tuple, table)) for table in tables)
    return Places(_together(far), far, crossing, moving)


def _rate(plan: Plan, source: str, target: str) -> float:
    """Bits/s of the slowest thing between nodes of two clusters."""
    first, second = (
        next(i for i, node in enumerate(plan.nodes) if node in plan.clusters[name])
        for name in (source, target)
    )
    fabric = plan.fabric_of((first * plan.processes, second * plan.processes))
    assert fabric is not None
    return min([fabric.rate_bps, *(hop.rate_bps for hop in plan.wan.hops(source, target))])


def _together(far: tuple[tuple[float, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks with nothing between them and the same distances to all others, taken together."""
    by_row: dict[tuple[float, ...], list[int]] = {}
    for rank, row in enumerate(far):
        by_row.setdefault(row, []).append(rank)
    together = [
        ranks for ranks in by_row.values() if all(far[ranks[0]][peer] == 0 for peer in ranks)
    ]
    alone = [(rank,) for ranks in by_row.values() if ranks not in together for rank in ranks]
    return tuple(sorted([*map(tuple, together), *alone]))
