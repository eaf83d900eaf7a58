"""Predicted step times of one job in each cluster, for the forecast of joined jobs.

batches        samples of each job, in proportion to the clusters' nodes or speeds
first look     search for the best plan of each job (planner/search/sketch.py), without a proof
equal jobs     clusters with equal nodes, networks and batches are searched once
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.estimate import site_of_cluster
from holmes_ext.join.simulated_rounds import JoinedJob
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.search.changed import ethernet_s
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import first_look

#: Least seconds of the search for the best plan of one job.
LEAST_SECONDS = 1.0


class PricedJobs(NamedTuple):
    """One job in each cluster with its predicted step time, and the searches that the time ended."""

    jobs: list[JoinedJob]
    unfinished: list[str]  # clusters whose search did not examine all parallel sizes


def price_jobs(spanning: SearchResult, batches: Mapping[str, int], seconds: float) -> PricedJobs:
    """Search for the best plan of a job on each cluster alone.

    Args:
        spanning: The search for one job that spans the clusters; the jobs train the same model.
        batches: Cluster -> samples of its job in a step.
        seconds: Time limit of the search for each job; at least LEAST_SECONDS are used.

    Raises:
        HolmesError: No plan of a job fits its cluster.
    """
    prices: dict[Hashable, _Price] = {}  # properties of a job -> its price
    jobs = []
    unfinished = []
    for cluster, samples in batches.items():
        request = _request(spanning, cluster, samples)
        key = _properties(request, cluster)
        if key not in prices:
            try:
                prices[key] = _price(request, max(LEAST_SECONDS, seconds))
            except HolmesError as error:
                raise HolmesError(f"--joined: a job on cluster {cluster} alone: {error}") from None
        price = prices[key]
        if price.is_unfinished:
            unfinished.append(cluster)
        jobs.append(JoinedJob(cluster, samples, price.step_s, price.ethernet_s))
    return PricedJobs(jobs, unfinished)


class _Price(NamedTuple):
    """Step time of the best plan that was found for a job."""

    step_s: float
    ethernet_s: float  # seconds of it that depend on Ethernet's rate, which the rounds reduce
    is_unfinished: bool  # the time was over before all parallel sizes were examined


def _price(request: SearchResult, seconds: float) -> _Price:
    """Search for the best plan of a job; a forecast needs a good plan, but no proof."""
    result = first_look(request, seconds)
    return _Price(result.best.step_s, ethernet_s(result, result.best), result.is_unfinished)


def _request(spanning: SearchResult, cluster: str, samples: int) -> SearchResult:
    """Return the request of a search for a job with `samples` samples a step on one cluster."""
    site = site_of_cluster(spanning.network.site, cluster)
    model = replace(spanning.model, global_batch=samples, micro_batches=0)
    request = spanning.on(Network(site, spanning.network.links), model)
    return replace(request, global_batch=samples)


def _properties(request: SearchResult, cluster: str) -> Hashable:
    """Return what the step time of a job on one cluster depends on: equal for equal jobs.

    These are the samples of a step, the GPU, and the processes and networks of every node. A
    network counts by kind, rate and latency; one that was measured is equal only to itself.
    """
    network = request.network
    fabrics: dict[str, Hashable] = {}
    for fabric in network.site.fabrics:
        is_measured = fabric.name in network.links.measured
        fabrics[fabric.name] = (
            fabric.name if is_measured else (fabric.kind, fabric.rate_bps, fabric.latency_s)
        )
    nodes = []
    for node in network.site.nodes:
        nodes.append((node.processes, tuple(fabrics[name] for name in node.fabrics)))
    return request.global_batch, request.model.gpu_of(cluster), tuple(nodes)
