"""Ideal node sets for lower bounds on the step time of many subsets of nodes at once.

A family is all subsets of a given size with given numbers of nodes from some clusters (the fixed
clusters). The other nodes of a subset are of the open clusters, divided in any way:

    family (8, ?, ?)     8 nodes of the first cluster; the second and the third are open

Better GPUs and networks never make a step longer. So the lower bound for an ideal set of nodes, at
least as good as every subset of the family, holds for the whole family. In the ideal set, the open
clusters become a single cluster with the best of their GPUs, on a network as fast as their best fabric
and Ethernet together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site, fabrics_of_spec, site_from_spec
from holmes_ext.cluster.sources.hostlist import folded
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.words import grouped

#: Subsets with these numbers of nodes of each cluster. None marks an open cluster: the remaining
#: nodes of a subset belong to the open clusters, divided in any way.
Family = tuple[int | None, ...]
#: Name of the ideal cluster and fabric that replace the open clusters; no cluster.toml can use it.
OPEN = "?"


def is_flat(spec: SiteSpec) -> bool:
    """Return whether all clusters reach each other at the same rate.

    This is so if cluster.toml describes neither a WAN nor measured rates of pairs of clusters.
    """
    return not (spec.wan or spec.pairs)


def first_equal_cluster(spec: SiteSpec, model: Model, alone: bool = False) -> list[int]:
    """Return, for each cluster, the index of the first cluster with equal nodes and networks.

    A cluster without an equal cluster has its own index. Equal clusters are interchangeable: a job
    takes as long on nodes of the first as on nodes of the second. In a job with several clusters
    this also needs equal links to the other clusters, so all clusters must reach each other at the
    same rate, and none may share its fast fabric with another.

    Args:
        spec: Clusters to compare.
        model: GPUs of the clusters.
        alone: Compare the clusters for jobs on a single cluster; the links between clusters do not
            matter.
    """
    fabrics = [cluster.fabric for cluster in spec.clusters]
    properties: list[object] = []  # of each cluster: equal for interchangeable clusters
    for cluster in spec.clusters:
        has_private_fabric = is_flat(spec) and fabrics.count(cluster.fabric) == 1
        has_equal_links = alone or has_private_fabric
        # A measured fabric has other rates than those of its kind of NIC.
        is_measured = cluster.fabric in spec.links
        if has_equal_links and not is_measured:
            gpu = model.gpu_of(cluster.name)
            network = (cluster.kind, cluster.rate_bps, cluster.latency_s)
            properties.append((*network, gpu, cluster.processes))
        else:
            properties.append(cluster.name)  # equal to no other cluster
    return [properties.index(values) for values in properties]


def fastest_first(spec: SiteSpec, model: Model, first_equal: Sequence[int]) -> list[int]:
    """Sort the clusters by network rate, then by GPU speed, and return their indices.

    Interchangeable clusters stay together.

    Args:
        spec: All clusters.
        model: GPUs of the clusters.
        first_equal: Result of first_equal_cluster().
    """

    def order(index: int) -> tuple[float, ...]:
        """Return the key by which clusters are sorted: network rate, GPU speed, first equal cluster.

        Args:
            index: Index of the cluster in `spec`.
        """
        first = spec.clusters[first_equal[index]]
        fast_rate_bps = 0 if first.fabric == ETHERNET else first.rate_bps
        return (-fast_rate_bps, -model.gpu_of(first.name).flops, first_equal[index])

    return sorted(range(len(first_equal)), key=order)


def ideal(site: Site, count: int, model: Model, links: Links) -> tuple[Site, Model]:
    """Return an ideal cluster of `count` nodes, and a copy of the model for the cluster's GPUs.

    Every node of the ideal cluster has the best GPUs of any cluster of `site`. A network connects all
    of them, at least as fast as each network of `site`. So no subset of `count` nodes of `site`
    has a shorter step than the ideal cluster.

    Args:
        site: All nodes.
        count: Nodes of the ideal cluster.
        model: The model to train. Model.gpus has the GPU of each cluster of `site`, because the
            speed and memory of the GPUs decide the step time.
        links: Measured rates and latencies of the networks.

    Returns:
        The ideal cluster, as a site with the single cluster "best"; and the model with its GPU.

    Raises:
        HolmesError: Nodes have different numbers of processes, so subsets of `count` nodes have
            different numbers of ranks, and cannot be compared.
    """
    if not site.has_equal_nodes:
        names_of = grouped((node.processes, node.name) for node in site.nodes)
        counts = " or ".join(map(str, sorted(names_of)))
        choices = " or ".join(f"--idle '{folded(names_of[count])}'" for count in sorted(names_of))
        raise HolmesError(
            f"--nodes: the nodes of {site.source} have {counts} processes, so equally many nodes are not "
            f"equally many GPUs; choose among equal ones with {choices}; to plan for nodes of both kinds, "
            f"name them: holmes plan --cluster {site.source} --nodelist LIST instead of --nodes"
        )
    clusters = {node.name: "best" for node in site.nodes[:count]}
    best = _best_gpu([model.gpu_of(name) for name in site.clusters])
    return _on_one_fabric(site, clusters, links), replace(model, gpus={"best": best})


def ideal_gpus(site: Site, count: int, model: Model, links: Links) -> tuple[Site, Model]:
    """Return an ideal site: the `count` nodes with the fastest GPUs, and the fastest network.

    No subset of `count` nodes can compute a step faster than these nodes, so their step time is a
    lower bound for all subsets. The new site has a cluster for each GPU speed, named by its
    FLOP/s. The network is at least as fast as each network of `site`.

    Args:
        site: All nodes.
        count: Nodes of the new site.
        model: Model with the GPUs of the site's clusters.
        links: Measured links.

    Returns:
        The new site; and the model with the GPUs of its clusters.
    """
    fastest = sorted(site.nodes, key=lambda node: -model.gpu_of(node.cluster).flops)[:count]
    clusters = {}  # node -> cluster, named by its GPU speed
    flops_of = {}  # cluster -> FLOP/s of a GPU
    for node in fastest:
        flops = model.gpu_of(node.cluster).flops
        clusters[node.name] = f"{flops:g}"
        flops_of[f"{flops:g}"] = flops
    best = _best_gpu([model.gpu_of(name) for name in site.clusters])
    gpus = {name: replace(best, flops=flops) for name, flops in flops_of.items()}
    return _on_one_fabric(site, clusters, links), replace(model, gpus=gpus)


def _best_gpu(gpus: Sequence[Gpu]) -> Gpu:
    """Combine GPUs into an ideal GPU with the best value of each property; 0 bytes or bit/s: "no limit"."""

    def best(values: Sequence[float]) -> float:
        """Return the largest value; 0 if it is among them, because it means "no limit"."""
        return max(values) if all(values) else 0.0

    return Gpu(
        flops=max(gpu.flops for gpu in gpus),
        memory_bytes=best([gpu.memory_bytes for gpu in gpus]),
        link_bps=best([gpu.link_bps for gpu in gpus]),
    )


def _on_one_fabric(site: Site, clusters: Mapping[str, str], links: Links) -> Site:
    """Return a site whose nodes share an ideal network, as good as all networks of `site`.

    Its latency is the least of all fabrics in use. Its rate is the sum of the fastest fabric's and
    Ethernet's rate, because a hierarchical all-reduce uses both at once. Its name is Ethernet,
    because only on Ethernet tensor parallel ranks send a slice of a message each, the fastest case.

    Args:
        site: Nodes and fabrics to take the best values from.
        clusters: Name of each node of the new site -> name of its cluster.
        links: Measured links.
    """
    used_names = {name for node in site.nodes for name in node.fabrics}
    # line(): the fabric with its measured rate and latency
    used_fabrics = [links.line(fabric) for fabric in site.fabrics if fabric.name in used_names]
    rates_bps = {fabric.name: fabric.rate_bps for fabric in used_fabrics}
    fast_bps = max((rate for name, rate in rates_bps.items() if name != ETHERNET), default=0)
    rate_bps = rates_bps[ETHERNET] + fast_bps
    latency_s = min(fabric.latency_s for fabric in used_fabrics)
    ideal_fabric = Fabric(ETHERNET, "ethernet", rate_bps, latency_s)
    ports = (Port(ETHERNET, rate_bps=rate_bps),)
    nodes = [Node(name, cluster, site.processes, ports) for name, cluster in clusters.items()]
    return Site(tuple(nodes), (ideal_fabric,), site.source)


def of_family(
    spec: SiteSpec, family: Family, count: int, model: Model, links: Links, send_speedup: float
) -> tuple[Site, Model]:
    """Return ideal nodes, at least as good as any subset of a family, and the model with their GPUs.

    A family is all subsets of `count` nodes with the given numbers of nodes from the fixed
    clusters. The fixed clusters keep their nodes. The other nodes become an ideal cluster (OPEN)
    with the best GPUs and networks of the open clusters.

    Args:
        spec: All clusters. They must reach each other at the same rate (is_flat).
        family: Number of nodes of each cluster, None for open clusters.
        count: Nodes of every subset.
        model: Model with the GPUs of all clusters.
        links: Measured links.
        send_speedup: How many times faster Ethernet carries an activation than its rate says, at
            most: tensor parallel ranks send a slice each. Faster fabrics carry it whole.
    """
    fixed_names: set[str] = set()  # nodes of the clusters that are not open (None: open)
    for cluster, nodes in zip(spec.clusters, family):
        fixed_names.update(cluster.nodes[: nodes or 0])
    site = site_from_spec(spec.only(fixed_names))

    open_clusters = [cluster for cluster, nodes in zip(spec.clusters, family) if nodes is None]
    open_count = count - sum(nodes or 0 for nodes in family)
    open_names = [name for cluster in open_clusters for name in cluster.nodes][:open_count]
    open_spec = replace(spec, clusters=tuple(open_clusters))

    # The networks of the ideal nodes. Fabrics with their measured rates; Ethernet is the first.
    ethernet, *fast = [links.line(fabric) for fabric in fabrics_of_spec(open_spec)]
    fabrics = site.fabrics
    ports = [Port(ETHERNET, rate_bps=ethernet.rate_bps)]
    fast_bps = max((fabric.rate_bps for fabric in fast), default=0)
    if fast_bps:
        # A single ideal fabric: as fast as the fastest fabric and Ethernet together, or as Ethernet
        # with messages in slices.
        ideal_bps = max(fast_bps + ethernet.rate_bps, int(send_speedup * ethernet.rate_bps))
        latency_s = min(fabric.latency_s for fabric in (ethernet, *fast))
        fabrics = (*fabrics, Fabric(OPEN, open_clusters[0].kind, ideal_bps, latency_s))
        # Fabrics that reach from the open clusters to the fixed ones stay available, too.
        shared_names = {fabric.name for fabric in fast} & {fabric.name for fabric in site.fabrics}
        ideal_port = Port(OPEN, rate_bps=ideal_bps)
        ports = [ideal_port, *(Port(name) for name in sorted(shared_names)), *ports]

    # The ideal nodes with the best of the GPUs.
    processes = spec.clusters[0].processes
    open_nodes = [Node(name, OPEN, processes, tuple(ports)) for name in open_names]
    open_gpu = _best_gpu([model.gpu_of(cluster.name) for cluster in open_clusters])
    return (
        replace(site, nodes=(*site.nodes, *open_nodes), fabrics=fabrics),
        replace(model, gpus={**model.gpus, OPEN: open_gpu}),
    )
