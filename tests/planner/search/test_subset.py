"""Tests the search for the best subset of a site's idle nodes for a job of given size.

If the search can look at all subsets, it must find the best one. Otherwise its result comes with a lower
bound on the step time of every subset, the optimality gap. No subset may be below that bound.
"""

import itertools
import random
import time
from dataclasses import replace
from math import inf

import clusters
import pytest
from random_clusters import random_site
from selection import some

from holmes_ext.cli.show.training import Training
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model, on_clusters
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.shape import Shape
from holmes_ext.planner.bound.nodes import ideal
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.search.subset import Priced, best_subset
from holmes_ext.planner.show.subset import AvailableNodes, floor, in_closed_form


def every(idle, count):
    return [
        counts
        for counts in itertools.product(*(range(most + 1) for most in idle))
        if sum(counts) == count
    ]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_for_any_price(seed):
    rng = random.Random(seed)
    idle = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 5)))
    count = rng.randrange(1, sum(idle) + 1)
    prices = {counts: rng.uniform(1, 2) for counts in every(idle, count)}
    asked = []

    def price(counts):
        asked.append(counts)
        return Priced(prices[counts], 0.9 * prices[counts])

    order = rng.sample(range(len(idle)), len(idle))
    found = best_subset(
        idle, count, price, lambda family: 0.5, unit=rng.choice((1, 2, 3)), order=order
    )
    assert found.complete and sorted(asked) == sorted(prices)
    assert [counts for counts, _ in found.found] == sorted(prices, key=prices.__getitem__)
    assert found.bound_s == pytest.approx(
        0.9 * min(prices.values())
    ) and found.gap == pytest.approx(0.1)


def test_a_subset_at_the_floor_ends_the_search():
    asked = []

    def price(counts):
        asked.append(counts)
        return Priced(1.0, 1.0)

    found = best_subset((50, 50, 50), 60, price, lambda family: 1.0)
    assert len(asked) == 1 and found.proven and not found.complete


def test_the_time_ends_the_search_with_the_best_so_far():
    found = best_subset(
        (50, 50, 50), 60, lambda counts: Priced(2.0, 2.0), lambda family: 1.0, end=0.0
    )
    assert len(found.found) == 1 and found.gap == 0.5 and not found.complete


def test_clusters_that_are_alike_stand_for_each_other():
    asked = []

    def price(counts):
        asked.append(counts)
        return Priced(1 + max(counts) / 100, 0.5)

    found = best_subset((6, 4, 6), 8, price, lambda family: 0.1, first_equal=(0, 0, 0))
    assert found.complete and len(asked) == len(
        {tuple(sorted(counts)) for counts in every((6, 4, 6), 8)}
    )
    assert all(have >= taken for counts in asked for have, taken in zip((6, 4, 6), counts))
    assert sorted(found.found[0][0]) == [2, 3, 3]


def test_what_does_not_fit_is_left_out():
    def price(counts):
        if counts[0] > 1:
            raise HolmesError(f"{counts} fits nowhere")
        return Priced(1.0 + counts[0], 1.0)

    assert best_subset((4, 4), 4, price, lambda family: 0.5).found[0][0] == (0, 4)
    with pytest.raises(HolmesError, match="fits nowhere"):
        best_subset((4, 2), 4, price, lambda family: 0.5)


@pytest.mark.parametrize("count", [0, 9])
def test_too_many_nodes(count):
    with pytest.raises(HolmesError, match="ask for 1 to 8"):
        best_subset((4, 4), count, lambda counts: Priced(1.0, 1.0), lambda family: 0.5)


def case(seed, nodes):
    """Return a random site with this number of nodes, a model, and how many of the nodes train it."""
    rng, toml, pipeline, count = random_site(seed, nodes)
    spec, data = parse_spec(toml), count // pipeline
    model = on_clusters(
        Model(
            name="m",
            layers=16,
            hidden=2048,
            heads=16,
            sequence=1024,
            vocabulary=32000,
            global_batch=8 * data,
        ),
        spec,
    )
    shape = Shape(pipeline, 8, 1, 1, data, 1, 1, 8, "none", 0)
    site = AvailableNodes(
        spec, Training(model, None, overlap=True), 8 * data, Limits(), (shape,), count
    )
    best, ideal_model = ideal(site_from_spec(spec), count, model, Links())
    found = in_closed_form(
        Network(best), replace(site.job, model=ideal_model), site.batch, site.limits, site.shapes
    )
    return rng, replace(site, floor_s=max(floor(found), site.computing_s()))


def idle_of(site):
    return tuple(len(cluster.nodes) for cluster in site.spec.clusters)


@pytest.mark.parametrize("seed", [*range(30), 154, 221])
def test_the_best_of_all_subsets_of_random_sites(seed):
    """The search finds the best of all subsets, which are enumerated node by node.

    Two subsets with as many nodes of each cluster have one price. No step is below the floor of a
    family that its subset is in.
    """
    rng, site = case(seed, random.Random(seed).randrange(4, 13))
    idle = idle_of(site)
    prices = {counts: site.price(counts).step_s for counts in every(idle, site.count)}
    found = site.best(inf)
    assert found.found[0][1].step_s == min(prices.values())
    assert found.proven and found.bound_s <= min(prices.values())
    for family in {tuple(rng.choice((nodes, None)) for nodes in counts) for counts in prices} - set(
        prices
    ):
        of_it = [
            step_s
            for counts, step_s in prices.items()
            if all(own in (None, nodes) for own, nodes in zip(family, counts))
        ]
        assert site.floor(family) <= min(of_it) * (1 + 1e-9), (family, idle)


def test_equal_parts_of_three_clusters_are_above_the_floor_of_two():
    """The floor of two clusters is a floor for equal parts of three.

    NCCL sums hierarchically over clusters with equally many ranks, so 4 + 4 + 4 nodes and not 4 +
    8: yet the eight of open clusters are a floor.
    """
    three = (f"{name} ib 400Gb/s {name}[0-3]" for name in "abc")
    spec = clusters.spec(*three, ethernet="25Gb/s", processes=8)
    model = on_clusters(
        Model(
            name="m",
            layers=16,
            hidden=2048,
            heads=16,
            sequence=1024,
            vocabulary=32000,
            global_batch=96,
        ),
        spec,
    )
    shape = Shape(1, 8, 1, 1, 12, 1, 1, 8, "none", 0)
    site = AvailableNodes(spec, Training(model, None, overlap=True), 96, Limits(), (shape,), 12)
    priced = site.price((4, 4, 4))
    assert priced.plan.best.reductions == ("hierarchical",)
    assert 0.5 * priced.step_s < site.floor((4, None, None)) <= priced.step_s


@pytest.mark.parametrize("seed", some(range(30), 1, 5))
def test_random_sites_of_200_nodes_are_within_the_optimality_gap(seed):
    """No random subset of the idle nodes has a step time below the lower bound that the search gives.

    The search has 10 s to find the best nodes for a job. If it says that its result is proven to be the best,
    no random subset may be better than that result.
    """
    rng, site = case(
        1000 + seed, 200
    )  # random clusters with 200 nodes, and the number of nodes wanted
    idle = idle_of(site)  # number of idle nodes in each cluster
    begin = time.monotonic()
    result = site.best(begin + 10)
    print(
        f"{len(idle)} clusters, {site.count} nodes: {len(result.found)} looked at in "
        f"{time.monotonic() - begin:.1f} s, gap {result.gap:.2%}, complete {result.complete}"
    )
    idle_nodes = [(cluster, node) for cluster, nodes in enumerate(idle) for node in range(nodes)]
    for _ in range(15):
        subset = rng.sample(idle_nodes, site.count)
        clusters_of_subset = [cluster for cluster, _ in subset]
        # The step time depends only on the number of nodes in each cluster.
        counts = tuple(clusters_of_subset.count(cluster) for cluster in range(len(idle)))
        step_s = site.price(counts).step_s
        assert step_s >= result.bound_s * (1 - 1e-9)
        if result.proven:
            _, best = result.found[0]  # sorted by step time
            assert step_s >= best.step_s * (1 - 1e-9)
