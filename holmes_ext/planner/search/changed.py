"""Step time of a plan on a changed site ("what if"): with other networks, GPUs or nodes.

A site is the clusters, nodes and networks of a job. "Stock" is the same job without holmes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations
from math import inf
from typing import NamedTuple

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

#: Factor on Ethernet's rate with which ethernet_s() measures its influence.
LESS = 0.9
#: Most shapes that are searched again on a changed site.
MAX_SHAPES = 3
#: Most clusters for which moving a node to another cluster is examined.
MAX_CLUSTERS = 4


class StepTimes(NamedTuple):
    """Seconds of a step with holmes, and of the same job without holmes ("stock")."""

    step_s: float
    stock_s: float


class SiteChange(NamedTuple):
    """A change of the site (networks, GPUs or nodes), and the best plan's step time after it."""

    description: str  # noun phrase
    step_s: float


def with_site(
    result: SearchResult, candidate: Candidate, site: Site, links: Links | None = None
) -> StepTimes:
    """Return the step times on other networks: of a plan, and of the job without holmes.

    The job without holmes is called "stock". The steps are simulated if the candidate's is; else
    they come from the closed form.

    Args:
        result: Request for the site as it is.
        candidate: The plan.
        site: The same nodes and clusters with other networks.
        links: Measured links to use; None for those of the result.
    """
    # pairs: rates measured between two clusters. `site` has them already, perhaps changed, and the
    # measured rates would replace them.
    links = replace(links or result.network.links, pairs=())
    changed = result.on(Network(site, links))
    if candidate.simulated_s:
        # folded_s(): simulates few micro-batches, and derives the time of the whole step from them.
        step_s = folded_s(job_of(changed, candidate))
    else:
        step_s = estimate(changed.costs(candidate), candidate.split).step_s
    # The job without holmes has the parallel sizes of the layout that the user gave (user_layout) or
    # else of the plan, as in the tables and pictures.
    _, stock = stock_like(changed, result.user_layout or candidate)
    return StepTimes(step_s, stock.step_s)


def with_ethernet(result: SearchResult, candidate: Candidate, factor: float) -> StepTimes:
    """Return the step times of a plan with and without holmes, if Ethernet's rates change.

    Clusters reach each other over Ethernet. If the site describes the links between clusters (its
    WAN), their rates are multiplied by `factor`. Otherwise Ethernet's rate on every node is.
    """
    # Two descriptions of the site: network.site has the rates of cluster.toml, network.measured
    # has measured rates in its WAN. `links` are the measured rates of fabrics.
    site = result.network.measured
    links = result.network.links
    if site.wan:
        return with_site(result, candidate, replace(site, wan=site.wan.scaled(factor)))
    # If Ethernet was measured, its rate in `links` counts instead of the site's: both are scaled.
    scaled = with_fabric(result.network.site, ETHERNET, rate=factor)
    return with_site(result, candidate, scaled, links.scaled(ETHERNET, factor))


def ethernet_s(result: SearchResult, candidate: Candidate) -> float:
    """Return the seconds of a plan's step that Ethernet's rate decides.

    A step with a slower Ethernet (factor LESS on the rate) shows it. If t seconds depend on the
    rate, they become t / LESS. So t is the growth of the step divided by (1 / LESS - 1).
    """
    network = result.network
    site = with_fabric(network.site, ETHERNET, rate=LESS)
    links = network.links.scaled(ETHERNET, LESS)
    if candidate.simulated_s:
        slower = result.on(Network(site, links))
        growth_s = folded_s(job_of(slower, candidate)) - candidate.simulated_s
    else:
        growth_s = with_site(result, candidate, site, links).step_s - candidate.formula_s
    return min(candidate.step_s, max(0.0, growth_s / (1 / LESS - 1)))


def with_fabric(site: Site, name: str, rate: float = 1.0, latency: float = 1.0) -> Site:
    """Return a site with the rate and the latency of the fabric `name` multiplied by factors."""

    def changed(fabric: Fabric) -> Fabric:
        """Return `fabric` with other rate and latency if it is the fabric to change, else as it is."""
        if fabric.name != name:
            return fabric
        rate_bps = round(fabric.rate_bps * rate)
        return replace(fabric, rate_bps=rate_bps, latency_s=fabric.latency_s * latency)

    return replace(site, fabrics=tuple(map(changed, site.fabrics)))


def with_latency(site: Site, seconds: float) -> Site:
    """Return a site with a latency of `seconds`, one way, between any two clusters.

    The rates stay.
    """
    links = []
    for pair in combinations(site.clusters, 2):
        link = site.wan.pair_of.get(pair)
        rate_bps = link.rate_bps if link else 0  # 0: no limit
        links.append(Between(pair, rate_bps, seconds))
    return replace(site, wan=replace(site.wan, between=tuple(links)))


# --------------------------------------------------------------------------- what if


def what_if(result: SearchResult) -> list[SiteChange]:
    """Return, for each of some changes of the site, the step time of the best plan after it.

    Changes are better networks or GPUs, and nodes moved to other clusters. For each, the best
    shapes (parallel sizes) of the result are searched again; the plans of the result are also tried
    unchanged. So a faster network or GPU never makes the step longer. A change is left out if no
    plan fits it.
    """
    changes = []
    for description, changed in _changed_requests(result):
        try:
            changes.append(SiteChange(description, _best_step_s(result, changed)))
        except HolmesError:  # no plan fits
            continue
    return changes


def _best_step_s(result: SearchResult, changed: SearchResult) -> float:
    """Return the step time, in seconds, of the best plan on a changed site.

    Two sets of plans are tried: those that a search on the changed site finds, and those that were
    found for the site as it is.

    Args:
        result: Result for the site as it is.
        changed: The same request for the changed site: a SearchResult without plans.
    """
    # Breadth-first plans are variants of others in the list, with another order of passes.
    # _kept_plan_s() cannot restore that order.
    simulated_plans = [
        plan for plan in result.candidates if plan.simulated_s and not plan.breadth_first
    ]
    plans = simulated_plans[:MAX_SHAPES]
    shapes = list(dict.fromkeys(plan.shape for plan in plans))
    steps_s = [search(changed, only=shapes, prove=False).best.step_s]
    # Plans can be kept as they are only if no node moved to another cluster.
    has_same_nodes = changed.network.names == result.network.names
    if has_same_nodes:
        steps_s += [_kept_plan_s(changed, plan) for plan in plans]
    return min(steps_s)


def _kept_plan_s(changed: SearchResult, candidate: Candidate) -> float:
    """Return the step time of an unchanged plan on a changed site; inf if memory is too small.

    The better of two schedules counts: the plan's warm-up depths, and new ones for the changed
    site. A warm-up depth is the number of micro-batches that a stage begins before its first
    backward pass.

    Args:
        changed: Search request for the changed site.
        candidate: The plan.
    """
    same_plan = changed.candidate(candidate.shape, candidate.placement, candidate.split)
    if not same_plan.fits:
        return inf
    step_s = timed(changed, same_plan).step_s  # with new warm-up depths
    if not candidate.in_flight:  # the framework's schedule: it does not depend on the site
        return step_s
    same_schedule = job_of(changed, same_plan, in_flight=candidate.in_flight)
    return min(step_s, folded_s(same_schedule))


def _changed_requests(result: SearchResult) -> Iterator[tuple[str, SearchResult]]:
    """Yield the changes of the site: (description, search request for the changed site).

    A request is a SearchResult without plans. search() fills it.
    """
    yield from _network_changes(result)
    yield from _gpu_changes(result)
    yield from _moved_nodes(result)


def _network_changes(result: SearchResult) -> Iterator[tuple[str, SearchResult]]:
    """Yield better networks: twice the rate or half the latency, of a fabric or between clusters.

    Each is (description, search request for the changed site). A request is a SearchResult without
    plans. search() fills it.
    """
    site = result.network.site
    links = result.network.links
    for fabric in site.fabrics:
        if fabric.name == ETHERNET or any(fabric.name in node.fabrics for node in site.nodes):
            faster = with_fabric(site, fabric.name, rate=2.0)
            network = Network(faster, links.scaled(fabric.name, 2.0))
            yield f"twice the rate of {fabric.name}", result.on(network)
    if ETHERNET not in links.measured:  # a measured latency would replace the changed one
        nearer = with_fabric(site, ETHERNET, latency=0.5)
        yield "half the latency of ethernet", result.on(Network(nearer, links))
    wan = result.network.wan
    if wan:
        # Rates measured between two clusters would replace the WAN's changed rates. A fabric's
        # changes above leave them as they are.
        without_pairs = replace(links, pairs=())
        faster = replace(site, wan=wan.scaled(2.0))
        yield "twice the rates between clusters", result.on(Network(faster, without_pairs))
        nearer = replace(site, wan=wan.scaled(1.0, 0.5))
        yield "half the latency between clusters", result.on(Network(nearer, without_pairs))


def _gpu_changes(result: SearchResult) -> Iterator[tuple[str, SearchResult]]:
    """Yield better GPUs of a cluster: as fast as the fastest, or with twice the memory.

    Each is (description, search request for the changed site). A request is a SearchResult without
    plans. search() fills it. Twice the memory is yielded only if plans did not fit the memory.
    """
    site = result.network.site
    model = result.model
    fastest_flops = max(gpu.flops for gpu in result.gpus)
    for name in site.clusters:
        gpu = model.gpu_of(name)
        better_gpus = {}  # description -> GPU
        if gpu.flops < fastest_flops:
            description = f"GPUs of {name} as fast as the fastest"
            better_gpus[description] = replace(gpu, flops=fastest_flops)
        if gpu.memory_bytes and result.misfits:
            description = f"twice the memory on GPUs of {name}"
            better_gpus[description] = replace(gpu, memory_bytes=2 * gpu.memory_bytes)
        for description, better_gpu in better_gpus.items():
            better_model = replace(model, gpus={**model.gpus, name: better_gpu})
            network = Network(site, result.network.links)
            yield description, result.on(network, better_model)


def _moved_nodes(result: SearchResult) -> Iterator[tuple[str, SearchResult]]:
    """Yield sites with a node moved to another cluster: (description, search request).

    A request is a SearchResult without plans. search() fills it. With more than MAX_CLUSTERS clusters
    there are none. Nodes are moved between clusters with equal numbers of GPUs in a node.
    """
    site = result.network.site
    if len(site.clusters) > MAX_CLUSTERS:
        return
    for source, target in permutations(site.clusters, 2):
        # A cluster keeps at least 1 node, and its nodes have equally many GPUs.
        nodes_left = sum(node.cluster == source for node in site.nodes) - 1
        if nodes_left and site.processes_in(source) == site.processes_in(target):
            moved = Network(_with_moved_node(site, source, target), result.network.links)
            yield f"one node moved from {source} to {target}", result.on(moved)


def _with_moved_node(site: Site, source: str, target: str) -> Site:
    """Return a site whose last node of cluster `source` is in `target`, with the ports of the nodes there."""
    *_, leaving = (node for node in site.nodes if node.cluster == source)
    *_, last_of_target = (node for node in site.nodes if node.cluster == target)
    moved = replace(leaving, cluster=target, ports=last_of_target.ports)
    # The moved node becomes the last of its new cluster.
    nodes = [node for node in site.nodes if node is not leaving]
    nodes.insert(nodes.index(last_of_target) + 1, moved)
    return replace(site, nodes=tuple(nodes))
