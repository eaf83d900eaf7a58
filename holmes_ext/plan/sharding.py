"""What collectives of sharded weights (FSDP, ZeRO 3) take, over all clusters or inside each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.reductions import Sharded, inside_clusters, owners
from holmes_ext.plan.placement import family_of
from holmes_ext.plan.plan import Plan, site_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.words import some_of


@dataclass(frozen=True)
class ShardedWeights:
    """What is sharded."""

    #: That are gathered one by one.
    units: int
    #: Of all units, as they travel.
    weight_bytes: float
    gradient_bytes: float
    #: Part of the weights that the backward pass gathers again.
    again: float = 1.0


def sharded_seconds(
    plan: Plan, ranks: Sequence[int], what: ShardedWeights, network_api: str, hybrid: bool = False
) -> float:
    """Of a step's gathers and reduce-scatters; hybrid: shards inside clusters, sums across."""
    network = Network(site_of(plan, network_api))
    sizes = Sizes().complete(plan.world_size)
    family = family_of(network.placement(plan.nodes, sizes), ranks)
    if family.ranks == 1:
        return 0.0
    parts = inside_clusters(network, family) if hybrid else []
    rings = [network.ring(part, 1) for part in parts or [family]]
    reduction = Sharded(
        max(rings, key=lambda ring: ring.price.byte_s),
        zero=3,
        again=what.again,
        weights=what.weight_bytes / what.gradient_bytes,
        scatter_part=1.0 if network_api == SOCKETS else 0.5,
        across=network.ring(owners(network, family), 1) if parts else None,
        shards=parts[0].ranks if parts else 1,
    )
    unit = what.gradient_bytes / what.units
    (forward_s,), (backward_s,) = reduction.passes((0.0,), (0.0,), (unit,), (1,), prefetch=False)
    return what.units * (forward_s + backward_s)


def equal_groups(plan: Plan, ranks: Sequence[int]) -> list[list[int]]:
    """`ranks` by cluster, as many in each; HolmesError where that cannot be."""
    clusters = plan.by_cluster(ranks)
    if len({len(members) for members in clusters.values()}) > 1:
        held = ", ".join(f"{name} {len(members)}" for name, members in clusters.items())
        raise HolmesError(
            f"clusters hold different numbers of the {len(ranks)} ranks that FSDP shards over ({held}): a "
            f"device mesh is rectangular; start the same number of nodes in each"
        )
    return list(clusters.values())


def spanning_rows(plan: Plan, rows: Sequence[Sequence[int]]) -> str:
    """ "ranks 0 to 3 lie in clusters a, b" of the first row that lies in several; "" where none does."""
    for row in rows:
        if len(clusters := plan.by_cluster(row)) > 1:
            return f"ranks {some_of(row)} lie in clusters {', '.join(clusters)}"
    return ""
