"""What a plan takes when the site is another: its networks, its GPUs, its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from math import inf

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.wan import Between
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.simulated import job_of, timed
from holmes_ext.planner.search.stock import stock_like
from holmes_ext.planner.simulate.repeat import folded_s

#: Of Ethernet's rate, to see what it decides.
LESS = 0.9
#: Shapes that are looked at again under a change of the site; clusters up to which nodes move.
SHAPES, MOST_CLUSTERS = 3, 4


def with_site(
    result: SearchResult, candidate: Candidate, site: Site, links: Links | None = None
) -> tuple[float, float]:
    """Seconds of a step, and of stock's with its sizes, on a site with another network; simulated if the
    candidate is."""
    links = replace(links or result.network.links, pairs=())  # the site has them
    changed = result.on(Network(site, links))
    if candidate.simulated_s:
        step_s = folded_s(job_of(changed, candidate))
    else:
        step_s = estimate(changed.costs(candidate), candidate.split).step_s
    return step_s, stock_like(changed, candidate)[1].step_s


def with_ethernet(result: SearchResult, candidate: Candidate, factor: float) -> tuple[float, float]:
    """with_site at `factor` times the rates between clusters (flat network: of Ethernet on every node)."""
    site, links = result.network.measured, result.network.links
    if site.wan:
        return with_site(result, candidate, replace(site, wan=site.wan.scaled(factor)))
    faster = with_fabric(result.network.site, ETHERNET, factor)
    return with_site(result, candidate, faster, links.scaled(ETHERNET, factor))


def ethernet_s(result: SearchResult, candidate: Candidate) -> float:
    """What of a step Ethernet's rate decides: by how much longer it takes with LESS of it."""
    network = result.network
    site, links = with_fabric(network.site, ETHERNET, LESS), network.links.scaled(ETHERNET, LESS)
    if candidate.simulated_s:
        slower = result.on(Network(site, links))
        longer = folded_s(job_of(slower, candidate)) - candidate.simulated_s
    else:
        longer = with_site(result, candidate, site, links)[0] - candidate.formula_s
    return min(candidate.step_s, max(0.0, longer / (1 / LESS - 1)))


def with_fabric(site: Site, name: str, rate: float = 1.0, latency: float = 1.0) -> Site:
    """`site` with so many times the rate and latency of one fabric."""

    def changed(fabric: Fabric) -> Fabric:
        if fabric.name != name:
            return fabric
        return replace(
            fabric, rate_bps=round(fabric.rate_bps * rate), latency_s=fabric.latency_s * latency
        )

    return replace(site, fabrics=tuple(map(changed, site.fabrics)))


def with_latency(site: Site, seconds: float) -> Site:
    """`site` with this latency, one way, between any two clusters."""
    pairs = list(combinations(site.clusters, 2))
    rates = {pair: link.rate_bps for pair in pairs if (link := site.wan.pair_of.get(pair))}
    between = tuple(Between(pair, rates.get(pair, 0), seconds) for pair in pairs)
    return replace(site, wan=replace(site.wan, between=between))


# --------------------------------------------------------------------------- what if


def what_if(result: SearchResult) -> list[tuple[str, float]]:
    """(one change of the site, the step that the best of the first shapes then takes). The plans found are
    tried there too, so better hardware never takes longer."""
    steps = []
    for what, changed in _changes(result):
        try:
            steps.append((what, _least_s(result, changed)))
        except HolmesError:
            continue  # nothing fits there
    return steps


def _least_s(result: SearchResult, changed: SearchResult) -> float:
    plans = [plan for plan in result.candidates if plan.simulated_s and not plan.breadth_first][
        :SHAPES
    ]
    kept = [plan for plan in plans if changed.network.names == result.network.names]
    shapes = list(dict.fromkeys(plan.shape for plan in plans))
    best = search(changed, only=shapes, prove=False).best
    return min([best.step_s, *(_kept_s(changed, plan) for plan in kept)])


def _kept_s(changed: SearchResult, candidate: Candidate) -> float:
    """Of a plan as it was, also with as many micro-batches in flight as it had; inf where it does not fit."""
    again = changed.candidate(candidate.shape, candidate.placement, candidate.split)
    if not again.fits:
        return inf
    step_s = timed(changed, again).step_s
    if not candidate.in_flight:
        return step_s
    return min(step_s, folded_s(job_of(changed, again, in_flight=candidate.in_flight)))


def _changes(result: SearchResult) -> Iterator[tuple[str, SearchResult]]:
    network, model = result.network, result.model
    site, links = network.site, network.links
    for fabric in site.fabrics:
        if fabric.name == ETHERNET or any(fabric.name in node.fabrics for node in site.nodes):
            faster = Network(with_fabric(site, fabric.name, 2.0), links.scaled(fabric.name, 2.0))
            yield f"twice the rate of {fabric.name}", result.on(faster)
    if ETHERNET not in links.measured:
        nearer = Network(with_fabric(site, ETHERNET, latency=0.5), links)
        yield "half the latency of ethernet", result.on(nearer)
    if wan := network.wan:
        without_pairs = replace(links, pairs=())  # the site has them
        better = {"twice the rates": wan.scaled(2.0), "half the latency": wan.scaled(1.0, 0.5)}
        for what, changed in better.items():
            yield (
                f"{what} between clusters",
                result.on(Network(replace(site, wan=changed), without_pairs)),
            )
    fastest = max(gpu.flops for gpu in result.gpus)
    for name in site.clusters:
        gpu, gpus = model.gpu_of(name), {}
        if gpu.flops < fastest:
            gpus[f"GPUs of {name} as fast as the fastest"] = replace(gpu, flops=fastest)
        if gpu.memory_bytes and result.misfits:
            gpus[f"twice the memory on GPUs of {name}"] = replace(
                gpu, memory_bytes=2 * gpu.memory_bytes
            )
        for what, other in gpus.items():
            yield (
                what,
                result.on(Network(site, links), replace(model, gpus={**model.gpus, name: other})),
            )
    for source, target in permutations(site.clusters, 2):
        if (
            len(site.clusters) <= MOST_CLUSTERS
            and sum(node.cluster == source for node in site.nodes) > 1
        ):
            moved = _moved(site, source, target)
            yield f"one node moved from {source} to {target}", result.on(Network(moved, links))


def _moved(site: Site, source: str, target: str) -> Site:
    """`site` with the last node of `source` in `target`, attached as the nodes there are."""
    leaving = [node for node in site.nodes if node.cluster == source][-1]
    peer = [node for node in site.nodes if node.cluster == target][-1]
    stay = [node for node in site.nodes if node is not leaving]
    at = stay.index(peer) + 1
    return replace(
        site, nodes=(*stay[:at], replace(leaving, cluster=target, ports=peer.ports), *stay[at:])
    )
