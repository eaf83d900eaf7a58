"""What no choice of nodes beats: better nodes and networks than any have, on which a step is never longer.

family (8, ?, ?)     8 nodes of the first cluster; the others, of clusters that are open, as
                     one cluster "?" with the best GPUs of these on one network as fast as the
                     best of theirs and Ethernet together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site, fabrics_of_spec, site_from_spec
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model

#: Nodes of each cluster; None where a cluster is open: the nodes that are left are of these clusters, in any
#: way.
Family = tuple[int | None, ...]
#: The cluster and the network that stand for open ones: no cluster.toml can have one of this name.
OPEN = "?"


def is_flat(spec: SiteSpec) -> bool:
    """Whether clusters differ in their own networks alone, not in what lies between them."""
    return not (spec.wan or spec.pairs)


def alike(spec: SiteSpec, model: Model, alone: bool = False) -> list[int]:
    """For each cluster the first one that can stand for it; alone: in a job on one cluster."""
    clusters = spec.clusters
    shared = [cluster.fabric for cluster in clusters]
    own = [alone or is_flat(spec) and shared.count(fabric) == 1 for fabric in shared]
    looks = [
        (cluster.kind, cluster.rate_bps, cluster.latency_s, model.gpu_of(cluster.name))
        if own[index] and cluster.fabric not in spec.links
        else cluster.name
        for index, cluster in enumerate(clusters)
    ]
    return [looks.index(look) for look in looks]


def fastest_first(spec: SiteSpec, model: Model, kin: Sequence[int]) -> list[int]:
    """The clusters by their networks and GPUs, those that are alike (`kin`, as alike() says) together."""

    def best(index: int) -> tuple[float, ...]:
        first = spec.clusters[kin[index]]
        return (
            -first.rate_bps * (first.fabric != ETHERNET),
            -model.gpu_of(first.name).flops,
            kin[index],
        )

    return sorted(range(len(kin)), key=best)


def ideal(site: Site, count: int, model: Model, links: Links) -> tuple[Site, Model]:
    """`count` nodes of one cluster with the best GPUs, on one network better than any, and `model` there: a
    floor for all subsets. links: measured ones."""
    names = [node.name for node in site.nodes[:count]]
    return _on_one_fabric(site, dict.fromkeys(names, "best"), links), replace(
        model, gpus={"best": _best([model.gpu_of(name) for name in site.clusters])}
    )


def ideal_gpus(site: Site, count: int, model: Model, links: Links) -> tuple[Site, Model]:
    """The `count` nodes with the fastest GPUs, each GPU a cluster, on that network: a floor of computing."""
    fastest = sorted(site.nodes, key=lambda node: -model.gpu_of(node.cluster).flops)[:count]
    gpus = {
        f"{model.gpu_of(node.cluster).flops:g}": model.gpu_of(node.cluster).flops
        for node in fastest
    }
    clusters = {node.name: f"{model.gpu_of(node.cluster).flops:g}" for node in fastest}
    best = _best([model.gpu_of(name) for name in site.clusters])
    return _on_one_fabric(site, clusters, links), replace(
        model, gpus={name: replace(best, flops=flops) for name, flops in gpus.items()}
    )


def _best(gpus: Sequence[Gpu]) -> Gpu:
    """0 stands for no limit."""
    free = {
        field: any(not getattr(gpu, field) for gpu in gpus)
        for field in ("memory_bytes", "link_bps")
    }
    most = {
        field: 0.0 if free[field] else max(getattr(gpu, field) for gpu in gpus) for field in free
    }
    return Gpu(max(gpu.flops for gpu in gpus), **most)


def _on_one_fabric(site: Site, clusters: Mapping[str, str], links: Links) -> Site:
    """The nodes of `clusters` (node -> cluster), all on one network with the least latency of any, as fast as
    the best fabric and Ethernet together: reductions hierarchically use both at once. It is an Ethernet, over
    which tensor ranks share out what a stage sends."""
    fast = [
        links.line(fabric)
        for fabric in site.fabrics
        if any(fabric.name in node.fabrics for node in site.nodes)
    ]
    rates = {fabric.name: fabric.rate_bps for fabric in fast}
    rate_bps = rates[ETHERNET] + max(
        (rate for name, rate in rates.items() if name != ETHERNET), default=0
    )
    shared_fabric = Fabric(ETHERNET, "ethernet", rate_bps, min(fabric.latency_s for fabric in fast))
    nodes = [
        Node(name, cluster, site.processes, (Port(ETHERNET, rate_bps=rate_bps),))
        for name, cluster in clusters.items()
    ]
    return Site(tuple(nodes), (shared_fabric,), site.source)


def of_family(
    spec: SiteSpec, family: Family, count: int, model: Model, links: Links, slices: float
) -> tuple[Site, Model]:
    """`count` nodes that are no worse than those of any subset of a family, and `model` there; the network
    between clusters is flat. slices: times that Ethernet may carry an activation faster than its rate says,
    as tensor ranks share it out there (of a faster network they do not)."""
    known = spec.only(
        {
            name
            for cluster, nodes in zip(spec.clusters, family)
            for name in cluster.nodes[: nodes or 0]
        }
    )
    among = [cluster for cluster, nodes in zip(spec.clusters, family) if nodes is None]
    names = [name for cluster in among for name in cluster.nodes][
        : count - sum(nodes or 0 for nodes in family)
    ]
    site = site_from_spec(known)
    lines = [links.line(fabric) for fabric in fabrics_of_spec(replace(spec, clusters=tuple(among)))]
    rate_bps, fast_bps = lines[0].rate_bps, max((line.rate_bps for line in lines[1:]), default=0)
    fabrics, ports = site.fabrics, [Port(ETHERNET, rate_bps=rate_bps)]
    if fast_bps:
        both_bps = max(fast_bps + rate_bps, int(slices * rate_bps))
        fabrics = (
            *fabrics,
            Fabric(OPEN, among[0].kind, both_bps, min(line.latency_s for line in lines)),
        )
        shared = {line.name for line in lines[1:]} & {fabric.name for fabric in site.fabrics}
        ports[:0] = [Port(OPEN, rate_bps=both_bps), *(Port(name) for name in sorted(shared))]
    processes = spec.clusters[0].processes
    nodes = (*site.nodes, *(Node(name, OPEN, processes, tuple(ports)) for name in names))
    gpus = {**model.gpus, OPEN: _best([model.gpu_of(cluster.name) for cluster in among])}
    return replace(site, nodes=nodes, fabrics=fabrics), replace(model, gpus=gpus)
