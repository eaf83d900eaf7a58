"""Order of the nodes if clusters differ in the ranks of a node: against every order of the nodes."""

import itertools

import clusters
import pytest

from holmes_ext.plan.arrange.orders import Blocks, Orders, classes_of, launched
from holmes_ext.plan.arrange.place import fastest_first, place
from holmes_ext.plan.cost.model import Gpu
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.sizes import PIPELINES_FIRST, Sizes
from holmes_ext.plan.workload import Workload

WORK = Workload(0.03, 0.06, 8, 13e6, 4e5, 4e6, 4e6, 4e6)


def site(narrow="a[0-3]", wide="b[0-1]"):
    """Nodes of 2 ranks with InfiniBand, and nodes of 4 ranks with RoCE."""
    return clusters.site(f"a ib 2Gb/s {narrow} processes=2", f"b roce 1.6Gb/s {wide} processes=4")


def prices_of(network, sizes):
    return Prices(network, RankModel.of_workload(WORK, sizes))


@pytest.mark.parametrize("pipeline", (1, 2, 4, 8))
@pytest.mark.parametrize("tensor", (1, 2))
def test_no_order_of_the_nodes_is_better(pipeline, tensor):
    here = site()
    network = Network(here)
    sizes = Sizes(pipeline, tensor).complete(here.world_size)
    prices = prices_of(network, sizes)
    planned = place(prices, sizes)
    assert sorted(planned.names) == sorted(network.node_type_of)
    assert planned.widths == (2, 4)
    best = min(
        (prices.spans_networks(placement), prices.step_s(placement))
        for order in set(itertools.permutations("aaaabb"))
        for placement in [network.placement(named(order), sizes)]
    )
    assert prices.spans_networks(planned) == best[0]
    assert prices.step_s(planned) == pytest.approx(best[1], rel=1e-8)


def named(order):
    """Add numbers to the nodes of each cluster: "a b a" becomes "a0 b0 a1"."""
    numbers = {"a": itertools.count(), "b": itertools.count()}
    return [f"{cluster}{next(numbers[cluster])}" for cluster in order]


def test_stages_lie_on_the_nodes_of_one_cluster():
    here = site()
    sizes = Sizes(2).complete(here.world_size)
    planned = place(prices_of(Network(here), sizes), sizes)
    assert sorted(planned.stages) == [((0, 8),), ((1, 8),)]
    # Four narrow nodes hold a stage, and two wide ones the other.
    assert sorted(planned.parts) == [((0, 4),), ((1, 2),)]


def test_nodes_that_do_not_fill_blocks_stay_together_by_class():
    """Three nodes of 2 ranks and one of 4: six ranks are no multiple of four."""
    here = site("a[0-2]", "b0")
    network = Network(here)
    class_of = classes_of(network)
    assert not Blocks(network, class_of).has_only_whole_blocks
    sizes = Sizes(5, 2).complete(here.world_size)
    planned = place(prices_of(network, sizes), sizes)
    assert planned.names in (("a0", "a1", "a2", "b0"), ("b0", "a0", "a1", "a2"))


def test_blocks_have_equally_many_ranks():
    here = site()
    class_of = classes_of(Network(here))
    blocks = Blocks(Network(here), class_of)
    assert blocks.ranks == 4
    assert blocks.nodes == {0: 2, 1: 1}
    assert blocks.in_launchers_order() == (0, 0, 1, 1)
    mixed = {name: class_of[name] for name in ("a0", "b0", "a1", "b1", "a2", "a3")}
    assert Blocks(Network(here), mixed).in_launchers_order() == (1, 0, 1, 0)


def test_nodes_of_different_width_on_one_fabric_are_not_interchangeable():
    here = clusters.site(
        "a ib 2Gb/s a[0-1] processes=2 fabric=f", "b ib 2Gb/s b[0-1] processes=4 fabric=f"
    )
    assert classes_of(Network(here)) == {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
    orders = Orders(Network(here), [Gpu(1e12)] * 2)
    assert orders.first_equal_type == (0, 1)


def test_all_orders_of_whole_clusters_are_listed():
    network = Network(site())
    orders = Orders(network, [Gpu(1e12)] * 2)
    placements, is_complete = orders.placements(Sizes(2).complete(16))
    assert is_complete
    assert [placement.node_runs for placement in placements] == [
        ((0, 4), (1, 2)),
        ((1, 2), (0, 4)),
        ((0, 2), (1, 1), (0, 2), (1, 1)),  # both clusters hold a part of every stage
    ]
    # A wide node cannot be divided between four stages, so every node holds whole pipelines.
    placements, _ = orders.placements(Sizes(4).complete(16))
    assert placements[-1].sizes.order == PIPELINES_FIRST


def test_the_launchers_order_is_kept_as_it_is():
    here = site("a[0-2]", "b0")
    network = Network(here)
    stock = launched(network, Sizes(5, 2).complete(here.world_size))
    assert stock.node_runs == ((0, 3), (1, 1))
    assert stock.stages_per_component == 5, "the wide node holds two stages, from the middle on"
    assert fastest_first(network) == ("a0", "a1", "a2", "b0")
