"""Tests lower bounds on the step time for the order in which a pipeline passes the clusters.

Pipeline stages are placed on clusters, one cluster after another. A bound for an order, or for its beginning,
must not exceed the simulated step time of any placement in that order. The random clusters of these tests are
connected by links that several stages may share.
"""

import random
from dataclasses import replace
from itertools import combinations, product
from math import inf

import clusters
import pytest
from layer_splits import some_splits
from selection import some

from holmes_ext.cluster.wan import Between, Uplink, Wan
from holmes_ext.plan.arrange.orders import Orders
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.bound.crossing import FAIR, SharedHop, blocks_at_most
from holmes_ext.planner.bound.orders import OrderBounds
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search.evaluate import Evaluator
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import job_of
from holmes_ext.planner.search.space import Limits, shapes
from holmes_ext.planner.simulate.repeat import folded_s

#: Seeds of random searches; the first 8 run in every test run, the others only in exhaustive runs.
SEEDS = some(range(200), *range(8))


def case(pick):
    """Return a random planning problem, as a search for the best plan that has not started yet.

    There are three or four clusters with one or two nodes each. Each pair of clusters has a link of its own;
    a cluster may have an uplink that its links share.
    """
    names = "abcd"[: pick.choice((3, 4, 4))]  # of clusters
    nodes_per_cluster = pick.choice((1, 2))
    processes_per_node = pick.choice((1, 2))
    networks = pick.choice((("ib", "roce") * 2, ("ethernet",) * 4))  # inside each cluster
    rdma_rate = pick.choice(("20Gb/s", "100Gb/s"))
    # A line describes a cluster: name, network, rate ("-": the rate of Ethernet), nodes.
    lines = []
    for name, network in zip(names, networks):
        rate = "-" if network == "ethernet" else rdma_rate
        lines.append(f"{name} {network} {rate} {name}[0-{nodes_per_cluster - 1}]")
    site = clusters.site(
        *lines, ethernet=pick.choice(("1Gb/s", "5Gb/s")), processes=processes_per_node
    )

    pairs = [(first, second) for first in names for second in names if first < second]
    links = []
    for pair in pairs:
        rate_bps = pick.choice((10**8, 3 * 10**8, 10**9))
        latency_s = pick.choice((1e-4, 0.01, 0.08))
        links.append(Between(pair, rate_bps, latency_s))
    uplinks = tuple(Uplink(name, rate_bps=3 * 10**8) for name in names if pick.random() < 0.2)
    site = replace(site, wan=Wan(uplinks, tuple(links)))

    gpus = {
        name: Gpu(flops=pick.choice((20e12, 60e12)), memory_bytes=0.0, link_bps=1e11)
        for name in names
    }
    model = Model(
        layers=8,
        hidden=pick.choice((256, 512)),
        heads=8,
        sequence=512,
        vocabulary=pick.choice((512, 20000)),
        tied=pick.random() < 0.5,
        flash=True,
        micro_batches=1,
        gpu=Gpu(20e12),
        gpus=gpus,
    )
    rules = Rules(overlap=pick.random() < 0.7, hide_stage_links=pick.random() < 0.5)
    zero_stages = (0, 0, 1)[: pick.choice((1, 3))]
    # The values of some options that the search may choose.
    limits = Limits({"recompute": ("none",), "virtual": (1,), "zero": zero_stages})
    global_batch = site.world_size * pick.choice((1, 2, 4))
    return SearchResult(Network(site), model, global_batch, limits, rules)


def every_order(orders, together):
    return list(dict.fromkeys((*orders._chained(together), *orders._distinct(together))))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_simulated_step_of_any_order_is_below_its_bound(seed):
    """Each lower bound on the step time of a placement is at most the simulated step time.

    Compared are three bounds: of the order of clusters and of each beginning of it, of the parallel sizes
    (the shape), and of the placement itself.
    """
    pick = random.Random(seed)
    result = case(pick)  # a random planning problem
    evaluator = Evaluator(result)
    world = result.network.world
    every_shape = shapes(result.network, result.model, result.global_batch, result.limits)
    # Shapes for which orders of clusters have a bound.
    bounded_shapes = [
        shape
        for shape in every_shape
        if OrderBounds.applies_to(evaluator.orders, shape.sizes().complete(world))
    ]
    compared = 0
    for shape in pick.sample(bounded_shapes, min(3, len(bounded_shapes))):
        sizes = shape.sizes().complete(world)  # parallel sizes
        prices = result.prices(shape)  # times of computation and communication

        def bound_of(placement):
            """Return the lower bound of the placement itself, for the current shape."""
            return evaluator.lower_bound(shape, placement, prices.costs(placement))  # noqa: B023

        shape_bound = ShapeBound(result.network, prices, shape)
        order_bounds = OrderBounds(evaluator.orders, sizes, bound_of, shape_bound.ring_bits)
        for together in (1, 2):  # clusters that stand side by side in the order
            orders = every_order(evaluator.orders, together)
            sampled_orders = pick.sample(orders, min(5, len(orders)))
            cluster_count = len(result.network.node_types)
            if cluster_count % together != 0:
                continue
            for order in sampled_orders:
                beginnings = [order[:count] for count in range(1, len(order) + 1)]
                order_s = max(
                    order_bounds.prefix_bound_s(beginning, together) for beginning in beginnings
                )
                for placement in evaluator.orders.placements_of(
                    sizes, order
                ):  # placements in this order
                    bound_s = max(order_s, shape_bound.seconds, bound_of(placement).seconds())
                    # A split has the number of layers of each pipeline stage.
                    for split in some_splits(pick, result.model.layers, shape.pipeline, 1):
                        candidate = result.candidate(shape, placement, split)
                        simulated_s = folded_s(
                            job_of(result, candidate)
                        )  # simulates a training step
                        details = (shape, order, split, order_s, shape_bound.seconds)
                        assert bound_s <= simulated_s * (1 + 1e-9), details
                        compared += 1
    assert compared


def test_every_order_below_the_best_step_is_found():
    """By listing all of them."""
    result = case(random.Random(3))
    evaluator = Evaluator(result)
    every = shapes(result.network, result.model, result.global_batch, result.limits)
    shape = max(
        (
            shape
            for shape in every
            if OrderBounds.applies_to(
                evaluator.orders, shape.sizes().complete(result.network.world)
            )
        ),
        key=lambda one: one.pipeline,
    )
    sizes, prices = shape.sizes().complete(result.network.world), result.prices(shape)

    def bound_of(placement):
        return evaluator.lower_bound(shape, placement, prices.costs(placement))

    def look(best):
        ring_bits = ShapeBound(result.network, prices, shape).ring_bits
        found, left_s = OrderBounds(evaluator.orders, sizes, bound_of, ring_bits).below(best)
        assert left_s == inf
        return {placement for _, placement in found}

    orders = Orders(evaluator.orders.network, evaluator.orders.gpus)
    listed = {
        one: bound_of(one).seconds()
        for together in (1, 2)
        if len(orders.node_types) % together == 0
        for groups in every_order(orders, together)
        for one in orders.placements_of(sizes, groups)
    }
    middle = sorted(listed.values())[len(listed) // 2]
    assert look(inf) == set(listed)
    assert (
        {one for one, seconds in listed.items() if seconds < 0.98 * middle}
        <= look(middle)
        < set(listed)
    )


@pytest.mark.parametrize("small", ["a", "abcd"], ids=["one cluster", "all clusters"])
def test_an_order_is_infeasible_if_its_first_stage_holds_no_layer(small):
    """The first stage has the embedding, and most micro-batches in flight: its memory may hold no layer.

    Then no placement with this first stage is found, and the search goes on with other orders.

    Args:
        small: Clusters whose GPUs hold a layer on every stage but the first.
    """
    names = "abcd"
    lines = [f"{name} ethernet - {name}0" for name in names]
    site = clusters.site(*lines, ethernet="1Gb/s", processes=1)
    links = [Between(pair, 10**8, 0.01) for pair in combinations(names, 2)]
    site = replace(site, wan=Wan((), tuple(links)))
    gpus = {name: Gpu(20e12, memory_bytes=1e9 if name in small else 80e9) for name in names}
    model = Model(8, 512, 8, 512, 200_000, tied=False, micro_batches=1, gpus=gpus)
    limits = Limits({"recompute": ("none",), "virtual": (1,), "zero": (0,), "pipeline": (4,)})
    result = SearchResult(Network(site), model, 8, limits)
    evaluator = Evaluator(result)
    shape = next(iter(shapes(result.network, model, 8, limits)))
    sizes = shape.sizes().complete(4)
    prices = result.prices(shape)

    def bound_of(placement):
        return evaluator.lower_bound(shape, placement, prices.costs(placement))

    search = OrderBounds(evaluator.orders, sizes, bound_of, ring_bits=0.0).below(inf)
    first_clusters = {
        result.network.cluster(placement.parts[0][0][0]) for _, placement in search.placements
    }
    expected = {"b"} if small == "a" else set()  # c and d are equal to b, so b stands for them
    assert first_clusters == expected
    assert search.remaining_s == inf


def test_a_hop_holds_the_blocks_of_all_its_stages():
    hop = SharedHop((1, 2), block_s=0.5, ends_s=1.0)
    assert blocks_at_most([hop], [4, 4, 4, 4], [3.0]) == 8 + 4
    assert blocks_at_most([hop], [4, 1, 1, 4], [3.0]) == 10, (
        "the stages hold less than the hop carries"
    )
    assert blocks_at_most([hop], [4, 4, 4, 4], [0.5]) < 8, "not even the embedding"


def test_no_split_reduces_more_beside_the_first_stage_than_its_hop_says():
    """Every split of a few blocks, each other stage on the same clusters with as much as the first one."""
    most, hop = (
        [3, 5, 2, 4],
        SharedHop((0, 1, 2, 3), 0.5, 1.0, embedding_s=0.8, beside_first=(0, 1, 2)),
    )
    for seconds in (1.0, 2.2, 3.4, 4.6, 9.0):
        found = [
            sum(split)
            for split in product(*(range(1, room + 1) for room in most))
            if (first_s := 0.8 + 0.5 * split[0])
            + FAIR * sum(min(first_s, 0.5 * split[stage]) for stage in (1, 2))
            <= seconds
        ]
        told = hop.blocks_beside_first(most, seconds)
        assert max(found, default=0) <= told <= max(found, default=0) + 3 or not found and told < 8
    assert hop.blocks_beside_first(most, 1.2) < 0 and hop.blocks_beside_first(most, inf) == sum(
        most
    )
    assert hop._replace(stages=(1, 2, 3)).blocks_beside_first(most, 0.0) == inf, (
        "another clusters' hop"
    )
    assert blocks_at_most([hop], most, [inf], 2.2) == hop.blocks_beside_first(most, 2.2) < sum(most)
