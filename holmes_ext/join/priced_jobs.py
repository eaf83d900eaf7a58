"""Predicted step times of one job in each cluster, for the forecast of joined jobs.

batches        samples of each job, in proportion to the clusters' nodes or speeds
first look     search for the best plan of each job (planner/search/sketch.py), without a proof that no plan
               is better
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

#: Least seconds of the search for the best plan of a job.
LEAST_SECONDS = 1.0


class PricedJobs(NamedTuple):
    """Predicted step times of several jobs, one in each cluster.

    The step time of a job is that of the best plan that a search with a time limit finds.
    """

    jobs: list[JoinedJob]
    #: Clusters whose search reached its time limit before all parallel sizes were examined.
    unfinished: list[str]


def price_jobs(spanning: SearchResult, batches: Mapping[str, int], seconds: float) -> PricedJobs:
    """Predict the step time of a job on each cluster alone: that of the best plan a search finds.

    Equal jobs, on clusters with equal nodes, networks and batches, share a single search.

    Args:
        spanning: The search for one job that spans the clusters; the jobs train the same model.
        batches: Cluster -> samples of its job in a step.
        seconds: Time limit of the search for each job; at least LEAST_SECONDS are used.

    Raises:
        HolmesError: No plan of a job fits its cluster.
    """
    predictions: dict[Hashable, _StepPrediction] = {}  # by the properties of a job
    jobs = []
    unfinished = []
    for cluster, samples in batches.items():
        request = _request(spanning, cluster, samples)
        key = _step_time_key(request, cluster)
        if key not in predictions:
            try:
                predictions[key] = _predict_step(request, max(LEAST_SECONDS, seconds))
            except HolmesError as error:
                raise HolmesError(f"--joined: a job on cluster {cluster} alone: {error}") from None
        prediction = predictions[key]
        if prediction.is_unfinished:
            unfinished.append(cluster)
        jobs.append(JoinedJob(cluster, samples, prediction.step_s, prediction.ethernet_s))
    return PricedJobs(jobs, unfinished)


class _StepPrediction(NamedTuple):
    """Step time of the best plan that a search has found for a job."""

    step_s: float
    #: Part of the step, in seconds, that is longer on a slower Ethernet. The exchanges between the
    #: jobs use the same Ethernet.
    ethernet_s: float
    is_unfinished: bool  # the time was over before all parallel sizes were examined


def _predict_step(request: SearchResult, seconds: float) -> _StepPrediction:
    """Search for a good plan of a job, and return its predicted step time.

    A forecast does not need the proof that no other plan is faster. So only the first look is
    taken: it ranks the parallel sizes by a formula for the step time, and simulates the fastest.

    Args:
        request: The job: a SearchResult without plans.
        seconds: Time limit of the ranking.
    """
    result = first_look(request, seconds)
    return _StepPrediction(
        step_s=result.best.step_s,
        ethernet_s=ethernet_s(result, result.best),
        is_unfinished=result.is_unfinished,
    )


def _request(spanning: SearchResult, cluster: str, samples: int) -> SearchResult:
    """Return the input of a plan search for a job on one cluster that trains `samples` samples a step."""
    site = site_of_cluster(spanning.network.site, cluster)
    model = replace(spanning.model, global_batch=samples, micro_batches=0)
    request = spanning.on(Network(site, spanning.network.links), model)
    return replace(request, global_batch=samples)


def _step_time_key(request: SearchResult, cluster: str) -> Hashable:
    """Return a key that is equal for two jobs if a search predicts the same step time for both.

    The key contains the samples of a step, the GPU, and the processes and networks of every node.
    The model is not in it, because all jobs of a forecast train the same model.

    Args:
        request: Request for a search of the job's best plan; it contains no plans yet.
        cluster: Name of the cluster on which the job runs.
    """
    network = request.network
    fabrics: dict[str, Hashable] = {}  # name of a network -> its part of the key
    for fabric in network.site.fabrics:
        if fabric.name in network.links.measured:
            # Measured rates belong to this network alone: no other network is equal to it.
            fabrics[fabric.name] = fabric.name
        else:
            fabrics[fabric.name] = (fabric.kind, fabric.rate_bps, fabric.latency_s)
    nodes = []
    for node in network.site.nodes:
        nodes.append((node.processes, tuple(fabrics[name] for name in node.fabrics)))
    return request.global_batch, request.model.gpu_of(cluster), tuple(nodes)
