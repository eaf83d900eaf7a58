"""Time of the collectives of sharded weights (FSDP, ZeRO 3), over all clusters or inside each of them."""

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
    """Sizes of a model's weights and gradients in bytes, for training that shards them."""

    units: int  # parts of the model that are gathered separately (FSDP units, such as layers)
    weight_bytes: float  # of all units, in the dtype in which weights are sent
    gradient_bytes: float  # of all units, in the dtype in which gradients are sent
    regathered_share: float = 1.0  # part of the weights that the backward pass gathers again


def sharded_seconds(
    plan: Plan,
    ranks: Sequence[int],
    sharded: ShardedWeights,
    network_api: str,
    hybrid: bool = False,
) -> float:
    """Return the seconds that all gathers and reduce-scatters of a step take, without computation.

    The weights of each unit (such as a layer) are gathered before its forward pass, and partly
    again before its backward pass. Its gradients are reduce-scattered.

    Args:
        plan: The plan.
        ranks: Ranks that the weights are sharded over.
        sharded: Size of the model.
        network_api: Interface to the NICs: "verbs" (NCCL) or "sockets" (gloo).
        hybrid: Whether each cluster has all shards, and gradients are summed across clusters.
    """
    network = Network(site_of(plan, network_api))
    sizes = Sizes().complete(plan.world_size)
    family = family_of(network.placement(plan.nodes, sizes), ranks)
    if family.ranks == 1:
        return 0.0
    parts = inside_clusters(network, family) if hybrid else []

    # Without hybrid sharding, or if the clusters have different numbers of ranks, a single ring spans all
    # ranks.
    rings = [network.ring(part, groups=1) for part in parts or [family]]
    slowest = max(rings, key=lambda ring: ring.price.byte_s)
    across = None
    if parts:  # an all-reduce among the owners of the same shard
        across = network.ring(owners(network, family), groups=1)
    reduction = Sharded(
        load=slowest,
        zero=3,
        regathered_share=sharded.regathered_share,
        weight_bytes_per_gradient_byte=sharded.weight_bytes / sharded.gradient_bytes,
        # gloo's reduce-scatter takes as long as its all-reduce.
        scatter_share=1.0 if network_api == SOCKETS else 0.5,
        across=across,
        shards=parts[0].ranks if parts else 1,
    )

    # A unit is priced as a layer that computes nothing, in a model with this layer only.
    unit_bytes = sharded.gradient_bytes / sharded.units
    (forward_s,), (backward_s,) = reduction.passes(
        forward=(0.0,), backward=(0.0,), sizes=(unit_bytes,), repeats=(1,), prefetch=False
    )
    return sharded.units * (forward_s + backward_s)


def equal_groups(plan: Plan, ranks: Sequence[int]) -> list[list[int]]:
    """Return `ranks` divided by cluster, if each cluster has equally many of them.

    Raises:
        HolmesError: The clusters have different numbers of these ranks.
    """
    clusters = plan.by_cluster(ranks)
    if len({len(members) for members in clusters.values()}) > 1:
        held = ", ".join(f"{name} {len(members)}" for name, members in clusters.items())
        raise HolmesError(
            f"clusters hold different numbers of the {len(ranks)} ranks that FSDP shards over ({held}): a "
            f"device mesh is rectangular; start the same number of nodes in each"
        )
    return list(clusters.values())


def spanning_rows(plan: Plan, rows: Sequence[Sequence[int]]) -> str:
    """Return a text such as "ranks 0 to 3 lie in clusters a, b", for the first row that spans clusters.

    Args:
        plan: The plan.
        rows: Groups of ranks.

    Returns:
        "" if no row spans clusters.
    """
    for row in rows:
        clusters = plan.by_cluster(row)
        if len(clusters) > 1:
            return f"ranks {some_of(row)} lie in clusters {', '.join(clusters)}"
    return ""
