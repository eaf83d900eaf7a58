"""A job of fewer nodes, where that is faster: what crosses to a cluster may take longer than it computes.

    all nodes        (8, 8, 4)    nodes of each cluster; the step of the best plan found
    fewer clusters   (8, 8, 0)    every set of them (of many clusters those that fast links join)
    fewer nodes      (7, 8, 0)    a cluster or a node less of the best set, as long as that is faster

Where the GPUs of a set take longer to compute the batch alone than the best step so far, or no shape's bound
(bound/shape.py) is below it, nothing is searched. A job that runs keeps its nodes: this is for starting one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.bound.nodes import alike
from holmes_ext.planner.bound.shape import ShapeBound, rates_between
from holmes_ext.planner.search.result import EQUAL, SearchResult
from holmes_ext.planner.search.search import proven, search
from holmes_ext.planner.search.sketch import Progress
from holmes_ext.planner.search.space import shapes
from holmes_ext.planner.search.spreading import with_spread
from holmes_ext.planner.search.subset import Counts

#: Part of the seconds in which fewer nodes are looked at.
FIRST = 0.1
#: Clusters of which every set is looked at; of more, those that links of one rate or more join.
EVERY_SET = 5
#: Times the best step of fewer nodes up to which the plan of all of them is proven, too.
NEAR = 1.2


def best_use(
    on_all: SearchResult,
    spec: SiteSpec,
    end: float,
    progress: Progress | None = None,
    rows: int = 10,
) -> SearchResult:
    """`on_all`, a first look at all nodes of `spec`, with an optimality gap when time.monotonic() is
    `end`; or
    what is found on fewer nodes where these are faster, with `on_all` set. Ctrl-C: the best so far, with
    `interrupted` set. rows: of search()."""
    begin, on_all = time.monotonic(), with_spread(on_all)
    fewer, stopped = _on_fewer(on_all, spec, begin + FIRST * (end - begin), rows)
    if fewer is None:
        return replace(on_all, interrupted=True) if stopped else proven(on_all, end, progress)
    if not stopped and on_all.best.step_s < NEAR * fewer.best.step_s:
        on_all = proven(on_all, (time.monotonic() + end) / 2, progress)
        stopped = on_all.interrupted
    if not stopped:
        fewer = proven(fewer, end, progress)
        stopped = fewer.interrupted
    if on_all.best.step_s <= fewer.best.step_s:
        return replace(on_all, interrupted=stopped)
    return replace(fewer, on_all=on_all, interrupted=stopped)


def _on_fewer(
    result: SearchResult, spec: SiteSpec, end: float, rows: int
) -> tuple[SearchResult | None, bool]:
    """(a first look at the nodes with which the job is faster than with all; None where there are none;
    whether Ctrl-C ended that), as far as was seen when time.monotonic() is `end`."""
    sets, stopped = _Sets(result, spec, end, rows), False
    try:
        sets.look(sets.of_clusters())
        while sets.look(sets.one_less()):
            pass
    except KeyboardInterrupt:
        stopped = True
    return None if sets.best is result else sets.best, stopped


class _Sets:
    """counts: nodes of each cluster with which the job is fastest so far; best: what was found there."""

    def __init__(self, result: SearchResult, spec: SiteSpec, end: float, rows: int):
        self.best, self.spec, self.end, self.rows = result, spec, end, rows
        self.counts: Counts = tuple(len(cluster.nodes) for cluster in spec.clusters)
        self.kin = alike(spec, result.model)
        self.kin_alone = alike(spec, result.model, alone=True)
        self.seen = {self._like(self.counts)}
        self.batch_flops, gpu_of = result.batch_flops, result.model.gpu_of
        #: FLOP/s of a node of each cluster.
        self.flops = [gpu_of(cluster.name).flops * cluster.processes for cluster in spec.clusters]

    def _like(self, counts: Counts) -> Counts:
        """The same for sets that differ in clusters which are alike."""
        kin = self.kin_alone if sum(map(bool, counts)) == 1 else self.kin
        return tuple(count for _, count in sorted(zip(kin, counts)))

    def of_clusters(self) -> Iterator[Counts]:
        indices = range(len(self.counts))
        if len(indices) <= EVERY_SET:
            yield from product(*((0, count) for count in self.counts))
            return
        names = [cluster.name for cluster in self.spec.clusters]
        network = self.best.network
        kinds = {names.index(network.cluster(kind)): kind for kind in range(len(network.kinds))}
        rates = rates_between(network)
        for threshold in sorted({*rates.values()}):
            part = {index: index for index in indices}
            for low, high in combinations(indices, 2):
                if rates[kinds[low], kinds[high]] >= threshold:
                    kept, joined = part[low], part[high]
                    part = {
                        index: kept if label == joined else label for index, label in part.items()
                    }
            for chosen in {*part.values()}:
                yield tuple(
                    count if part[index] == chosen else 0 for index, count in enumerate(self.counts)
                )

    def one_less(self) -> Iterator[Counts]:
        """The best set without a cluster, or without a node of one."""
        for index, count in enumerate(self.counts):
            for fewer in {0, max(0, count - 1)}:
                yield (*self.counts[:index], fewer, *self.counts[index + 1 :])

    def look(self, sets: Iterable[Counts]) -> bool:
        """Whether one of them is faster; the most FLOP/s first, of equal ones those of the first clusters."""
        before = self.best
        for counts in sorted(
            {*sets}, key=lambda some: (self._floor_s(some), [-count for count in some])
        ):
            if self._floor_s(counts) >= self.best.best.step_s or time.monotonic() > self.end:
                break
            if (like := self._like(counts)) not in self.seen:
                self.seen.add(like)
                result = self._first_look(counts)
                if result is not None and result.best.step_s < self.best.best.step_s * (1 - EQUAL):
                    self.best, self.counts = result, counts
        return self.best is not before

    def _floor_s(self, counts: Counts) -> float:
        """Seconds in which their GPUs compute the batch."""
        flops = sum(count * node_flops for count, node_flops in zip(counts, self.flops))
        return self.batch_flops / flops if flops else inf

    def _first_look(self, counts: Counts) -> SearchResult | None:
        """None where nothing fits, or can be faster."""
        names = {
            name
            for cluster, count in zip(self.spec.clusters, counts)
            for name in cluster.nodes[:count]
        }
        spec = self.spec.only(names)
        request = self.best.on(Network(site_from_spec(spec), Links.of_spec(spec)))
        how = request.network, request.model, request.global_batch, request.limits
        only = [
            shape
            for shape in shapes(*how)
            if ShapeBound(request.network, request.prices(shape), shape).seconds
            < self.best.best.step_s
        ]
        try:
            left_s = max(0.0, self.end - time.monotonic())
            result = (
                search(request, left_s, rows=self.rows, only=only, prove=False) if only else None
            )
            return result and with_spread(result)
        except HolmesError:  # nothing fits the memory
            return None
