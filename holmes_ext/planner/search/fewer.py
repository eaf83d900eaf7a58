"""Search for a subset of the nodes on which the job is faster than on all of them.

Fewer nodes can be faster if the traffic to a cluster takes longer than its GPUs save.

    all nodes        (8, 8, 4)    nodes of each cluster; the step of the best plan found
    fewer clusters   (8, 8, 0)    every set of clusters (of many, the sets that fast links connect)
    fewer nodes      (7, 8, 0)    the best set without a cluster, or a node of a cluster, while that is faster

A set is not searched if its GPUs need longer to compute the batch than the best step so far, or if
no shape's lower bound (bound/shape.py) is below that step. Each set gets a first look (sketch.py):
a quick search without a proof. The result is for starting a job; a running job keeps its nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.bound.best_links import rates_between
from holmes_ext.planner.bound.nodes import first_equal_cluster
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search.result import EQUAL, SearchResult
from holmes_ext.planner.search.search import FIRST_LOOK_SHARE, first_look, proven
from holmes_ext.planner.search.sketch import Progress
from holmes_ext.planner.search.space import shapes
from holmes_ext.planner.search.spreading import with_spread
from holmes_ext.planner.search.subset import Counts

#: Share of the time limit in which fewer nodes are examined.
FEWER_NODES_SHARE = 0.1
#: Most clusters of which every set is examined; of more, the sets that links above a rate connect.
MAX_ALL_SETS = 5
#: The plan of all nodes is proven too if its step is within this factor of the best step on fewer
#: nodes.
NEAR = 1.2


class _FewerNodes(NamedTuple):
    """Result of a search for fewer nodes on which the job is faster than on all nodes."""

    #: Plans on the best subset of the nodes, not yet proven; None if none is faster than all nodes.
    result: SearchResult | None
    interrupted: bool  # the user pressed Ctrl-C during the search


def best_use(
    on_all: SearchResult,
    spec: SiteSpec,
    end: float,
    progress: Progress | None = None,
    rows: int = 10,
) -> SearchResult:
    """Return the best plan on all nodes, or on fewer nodes if the job is faster there.

    Args:
        on_all: Plans on all nodes of `spec`, from a search without proof.
        spec: Clusters and nodes available.
        end: Moment of time.monotonic() at which to stop.
        progress: Called from time to time.
        rows: Number of shapes that a table shows.

    Returns:
        A result with an optimality gap; `on_all` is set if it uses fewer nodes. After Ctrl-C: the
        best so far, with `interrupted` set.
    """
    begin = time.monotonic()
    # With a WAN: nodes of clusters are spread over the stages, if that is faster.
    on_all = with_spread(on_all)
    fewer_end = begin + FEWER_NODES_SHARE * (end - begin)
    fewer, interrupted = _search_fewer_nodes(on_all, spec, fewer_end, rows)
    if fewer is None:
        if interrupted:
            return replace(on_all, interrupted=True)
        return proven(on_all, end, progress)
    if not interrupted and on_all.best.step_s < NEAR * fewer.best.step_s:
        # The full search may still find a faster plan on all nodes. It gets half of the remaining
        # time.
        half_end = (time.monotonic() + end) / 2
        on_all = proven(on_all, half_end, progress)
        interrupted = on_all.interrupted
    if not interrupted:
        fewer = proven(fewer, end, progress)
        interrupted = fewer.interrupted
    if on_all.best.step_s <= fewer.best.step_s:
        return replace(on_all, interrupted=interrupted)
    return replace(fewer, on_all=on_all, interrupted=interrupted)


def _search_fewer_nodes(result: SearchResult, spec: SiteSpec, end: float, rows: int) -> _FewerNodes:
    """Search for a subset of the nodes on which the job is faster than on all.

    Args:
        result: Plans on all nodes, from a quick search: it has not proven that no plan is faster.
        spec: Clusters and nodes available.
        end: Moment of time.monotonic() at which to stop.
        rows: Number of shapes that a table shows.

    Returns:
        The plans on the best subset, or None if no subset is faster than all nodes; and whether
        Ctrl-C ended the search.
    """
    search_of_sets = _NodeSets(result, spec, end, rows)
    interrupted = False
    try:
        search_of_sets.examine(search_of_sets.cluster_sets())
        # Take away nodes from the best set as long as that makes the step shorter.
        while search_of_sets.examine(search_of_sets.one_less()):
            pass
    except KeyboardInterrupt:
        interrupted = True
    best = search_of_sets.best_result  # still `result` if no subset was faster
    return _FewerNodes(None if best is result else best, interrupted)


class _NodeSets:
    """Greedy search for the subset of the nodes with the shortest step.

    A subset is a number of nodes of each cluster. The search begins with all nodes. Its caller
    offers sets to examine(), which keeps the best.
    """

    def __init__(self, result: SearchResult, spec: SiteSpec, end: float, rows: int):
        """Start the search for a faster subset of the nodes with all nodes as the best set.

        Args:
            result: Plans on all nodes, from a quick search: it has not proven that no plan is
                faster.
            spec: Clusters and nodes available.
            end: Moment of time.monotonic() at which to stop.
            rows: Number of shapes that a table shows.
        """
        #: Search result (with plans) on the best set of nodes so far.
        self.best_result = result
        #: Number of nodes of each cluster in this set.
        self.counts: Counts = tuple(len(cluster.nodes) for cluster in spec.clusters)
        self.spec = spec
        self.end = end
        self.rows = rows
        #: For each cluster, the index of the first cluster that is interchangeable with it: equal
        #: nodes and networks. kin_alone is for jobs on a single cluster: there the networks between
        #: clusters do not matter, so more clusters are interchangeable.
        self.kin = first_equal_cluster(spec, result.model)
        self.kin_alone = first_equal_cluster(spec, result.model, alone=True)
        #: Sets examined, in canonical form.
        self.seen = {self._canonical(self.counts)}
        self.batch_flops = result.batch_flops  # floating-point operations of a step
        #: FLOP/s of a node of each cluster.
        self.node_flops = [
            result.model.gpu_of(cluster.name).flops * cluster.processes for cluster in spec.clusters
        ]

    def _canonical(self, counts: Counts) -> Counts:
        """Return a key for a set of nodes; it is equal for sets that differ in interchangeable clusters only.

        The counts are sorted within each group of interchangeable clusters.
        """
        is_one_cluster = sum(map(bool, counts)) == 1
        kin = self.kin_alone if is_one_cluster else self.kin
        return tuple(count for _, count in sorted(zip(kin, counts)))

    def cluster_sets(self) -> Iterator[Counts]:
        """Yield sets of whole clusters: the number of nodes of each cluster, or 0.

        Of few clusters, they are all subsets. Of many, they are those that fast links connect: for
        each rate of a link, the connected components of the graph of all links that are at least as
        fast.
        """
        clusters = range(len(self.counts))  # indices
        if len(clusters) <= MAX_ALL_SETS:
            yield from product(*((0, count) for count in self.counts))
            return
        names = [cluster.name for cluster in self.spec.clusters]
        network = self.best_result.network

        # The network numbers the clusters in an order of its own: its number -> index in `counts`.
        index_of = [
            names.index(network.cluster(number)) for number in range(len(network.node_types))
        ]
        rates_bps = {}  # (cluster, cluster) -> bits/s
        for (source, target), rate_bps in rates_between(network).items():
            rates_bps[index_of[source], index_of[target]] = rate_bps
        for least_bps in sorted({*rates_bps.values()}):
            # A component: clusters that links of at least this rate connect.
            for component in _components(clusters, rates_bps, least_bps):
                counts = [0] * len(clusters)
                for index in component:
                    counts[index] = self.counts[index]
                yield tuple(counts)

    def one_less(self) -> Iterator[Counts]:
        """Yield sets of nodes that lack a cluster, or a single node, of the best set so far.

        For each cluster, they are the best set without this cluster, and without a node of it.
        """
        for index, count in enumerate(self.counts):
            for fewer in {0, max(0, count - 1)}:
                yield (*self.counts[:index], fewer, *self.counts[index + 1 :])

    def examine(self, sets: Iterable[Counts]) -> bool:
        """Search for a plan on each of some sets of nodes, and keep the set with the shortest step.

        A set is skipped if it was examined before, or if its GPUs alone need longer than the best
        step so far. Sets with most FLOP/s come first.

        Args:
            sets: Number of nodes of each cluster, for each set.

        Returns:
            Whether a better set was found.
        """
        previous_result = self.best_result

        def most_flops_first(counts: Counts) -> tuple[float, list[int]]:
            """Return a sort key: least computing time first, then most nodes in the first clusters."""
            return self._compute_s(counts), [-count for count in counts]

        for counts in sorted({*sets}, key=most_flops_first):
            best_s = self.best_result.best.step_s  # step of the best plan on the best set
            if self._compute_s(counts) >= best_s or time.monotonic() > self.end:
                break  # the following sets compute even longer
            canonical = self._canonical(counts)
            if canonical in self.seen:
                continue
            self.seen.add(canonical)
            result = self._searched_briefly(counts)
            if result is not None and result.best.step_s < best_s * (1 - EQUAL):
                self.best_result = result
                self.counts = counts
        return self.best_result is not previous_result

    def _compute_s(self, counts: Counts) -> float:
        """Return a lower bound on the step time on a set of nodes: its GPUs compute the batch without idling.

        The result is in seconds.

        Args:
            counts: Number of nodes of each cluster.
        """
        flops = sum(count * node_flops for count, node_flops in zip(counts, self.node_flops))
        return self.batch_flops / flops if flops else inf

    def _searched_briefly(self, counts: Counts) -> SearchResult | None:
        """Search for the best plan on a set of nodes, without proof that no other plan is faster.

        Args:
            counts: Number of nodes of each cluster. The first nodes in the description
                of the cluster are taken.

        Returns:
            None if no plan fits, or none can be faster than the best plan on the best set so far.
        """
        names: set[str] = set()
        for cluster, count in zip(self.spec.clusters, counts):
            names.update(cluster.nodes[:count])
        spec = self.spec.only(names)
        request = self.best_result.on(Network(site_from_spec(spec), Links.of_spec(spec)))
        best_plan = self.best_result.best  # on the best set so far
        best_s = best_plan.step_s
        promising = []  # shapes whose lower bound is below the best step
        for shape in shapes(request.network, request.model, request.global_batch, request.limits):
            if time.monotonic() > self.end:  # too late for a search of the shapes
                return None
            if ShapeBound(request.network, request.prices(shape), shape).seconds < best_s:
                promising.append(shape)
        if not promising:
            return None

        # A share of the remaining time, as other sets follow.
        seconds = FIRST_LOOK_SHARE * max(0.0, self.end - time.monotonic())
        try:
            # rows: number of shapes that the caller's table shows, so as many are searched at least
            result = first_look(request, seconds, self.rows, promising)
            return with_spread(result)  # adds plans whose stages have nodes of several clusters
        except HolmesError:  # no plan fits the memory
            return None


def _components(
    clusters: range, rates_bps: Mapping[tuple[int, int], float], least_bps: float
) -> list[set[int]]:
    """Return the sets of clusters that links of at least a rate connect.

    Example: clusters 0, 1 and 2, and only the link between 0 and 2 is fast enough -> {0, 2}, {1}

    Args:
        clusters: Indices of the clusters.
        rates_bps: (cluster, cluster) -> bits/s.
        least_bps: Least rate of a link that counts.
    """
    components = [{cluster} for cluster in clusters]
    for low, high in combinations(clusters, 2):
        if rates_bps[low, high] < least_bps:
            continue
        (of_low,) = (component for component in components if low in component)
        (of_high,) = (component for component in components if high in component)
        if of_low is not of_high:
            of_low |= of_high
            components.remove(of_high)
    return components
