"""Weights sharded over a data-parallel group (FSDP, ZeRO 3): what their collectives take, over all its clusters and
inside each.

    over everything    every unit (layer) all-gathers its weights in the forward and again in the backward pass, and
                       reduce-scatters its gradients: 3 (n-1)/n of the weights through each NIC, on the network of all
    inside clusters    the same on each cluster's own fabric; then the owners of a shard, one in each of C clusters,
                       all-reduce it across (HSDP). A rank keeps C times as much

Rings (plan/cost/network.py); gloo's reduce-scatter moves as much as an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.network_old import FREE, Price, all_reduce
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.words import some_of


@dataclass(frozen=True)
class Sharded:
    """What is sharded. units: that are gathered one by one. weight_bytes: of all units, as they travel; again: the part
    that the backward pass gathers once more, 0 to 1; gradient_bytes: as they travel."""

    units: int
    weight_bytes: float
    gradient_bytes: float
    again: float = 1.0

    def seconds(self, ranks: int, network: Price, carrier: str) -> float:
        """Of one step's gathers and reduce-scatters among `ranks`; network: a ring all-reduce's price there."""
        if ranks == 1:
            return 0.0
        gathers, scatter = 0.5 * (1 + self.again), 1.0 if carrier == SOCKETS else 0.5
        latency = self.units * (gathers + scatter) * network.latency_s
        return latency + network.byte_s * (gathers * self.weight_bytes + scatter * self.gradient_bytes)


def boxes(plan: Plan, ranks: Sequence[int]) -> list[list[int]]:
    """`ranks` by cluster, as many in each; HolmesError where that cannot be."""
    clusters = plan.by_cluster(ranks)
    if len({len(members) for members in clusters.values()}) > 1:
        held = ", ".join(f"{name} {len(members)}" for name, members in clusters.items())
        raise HolmesError(
            f"clusters hold different numbers of the {len(ranks)} ranks that FSDP shards over ({held}): a mesh is a"
            " box; start as many nodes in each"
        )
    return list(clusters.values())


def sharded_seconds(plan: Plan, ranks: Sequence[int], what: Sharded, carrier: str) -> float:
    """Of a step's collectives, weights sharded over all `ranks`."""
    fabric = plan.fabric_of(ranks, carrier)
    return what.seconds(len(ranks), all_reduce(len(ranks), fabric) if fabric else FREE, carrier)


def hybrid_seconds(plan: Plan, clusters: Sequence[Sequence[int]], what: Sharded, carrier: str) -> float:
    """The same, sharded inside `clusters` (equal ones) and summed across them; the ranks of a node share its NIC."""
    count, size = len(clusters), len(clusters[0])
    inside = max(sharded_seconds(plan, members, what, carrier) for members in clusters)
    owners = [members[0] for members in clusters]
    fabric = plan.fabric_of(owners, carrier)
    if fabric is None:
        return inside
    across = all_reduce(count, fabric, min(plan.processes, size))
    return inside + what.units * across.latency_s + across.byte_s * what.gradient_bytes / size


def straddling_rows(plan: Plan, rows: Sequence[Sequence[int]]) -> str:
    """ "ranks 0 to 3 lie in clusters a, b" of the first row that lies in several; "" where none does."""
    for row in rows:
        if len(clusters := plan.by_cluster(row)) > 1:
            return f"ranks {some_of(row)} lie in clusters {', '.join(clusters)}"
    return ""
