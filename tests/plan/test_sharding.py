"""What sharded weights cost, by hand: 4 ranks in 2 clusters of 2, 8 MB of weights in 4 units."""

import pytest
from clusters import TWO, site

from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sharding import ShardedWeights, equal_groups, sharded_seconds, spanning_rows
from holmes_ext.plan.traffic import SOCKETS, VERBS

WHAT = ShardedWeights(units=4, weight_bytes=8e6, gradient_bytes=8e6)


def plan_of(*clusters, **more):
    return build_plan(site(*(clusters or TWO), **more))


@pytest.mark.parametrize(
    "network_api, again, crossings",
    [
        # gathers and a reduce-scatter, which gloo makes an all-reduce
        (VERBS, 1.0, 3),
        (SOCKETS, 1.0, 4),
        (VERBS, 0.0, 2),
    ],
)
def test_over_everything_each_crossing_takes_three_quarters_of_the_weights_through_the_ethernet(
    network_api, again, crossings
):
    plan = plan_of(ethernet="250Mb/s")
    what = ShardedWeights(4, 8e6, 8e6, again)
    latency = next(fabric for fabric in plan.fabrics if fabric.kind == "ethernet").latency_s
    expected = crossings * (3 / 4 * 8e6 * 8 / 250e6 + 4 * 3 * latency)
    assert sharded_seconds(plan, range(4), what, network_api) == pytest.approx(expected)


def test_hybrid_is_the_slower_cluster_and_a_shard_s_all_reduce():
    plan = plan_of(ethernet="250Mb/s")
    fabrics = {fabric.kind: fabric for fabric in plan.fabrics}
    inside = 3 * (1 / 2 * 8e6 * 8 / 1.6e9 + 4 * fabrics["roce"].latency_s)
    across = 2 / 2 * 8e6 / 2 * 8 / 250e6 + 4 * 2 * fabrics["ethernet"].latency_s
    assert sharded_seconds(plan, range(4), WHAT, VERBS, hybrid=True) == pytest.approx(
        inside + across
    )


def test_ranks_of_a_node_share_its_ethernet():
    one, four = plan_of(), plan_of(processes=4)
    few = sharded_seconds(one, range(4), WHAT, VERBS, hybrid=True)
    many = sharded_seconds(four, range(16), WHAT, VERBS, hybrid=True)
    # a node of four sends what a node of one does: a quarter from each rank; inside (n-1)/n grows
    assert few < many < 1.6 * few


def test_one_rank_and_one_node_cost_nothing_on_a_network():
    plan = plan_of("a ib 2Gb/s a0", "b roce 1.6Gb/s b0")
    assert sharded_seconds(plan, [0], WHAT, VERBS) == 0.0


def test_clusters_of_different_size_are_no_box():
    plan = plan_of("a ib 2Gb/s a[0-2]", "b roce 1.6Gb/s b0")
    with pytest.raises(HolmesError, match=r"different numbers of the 4 ranks .*\(a 3, b 1\)"):
        equal_groups(plan, range(4))
    assert equal_groups(plan_of(), range(4)) == [[0, 1], [2, 3]]


def test_the_first_row_that_crosses_is_named():
    plan = plan_of("a ib 2Gb/s a[0-2]", "b roce 1.6Gb/s b0")
    assert spanning_rows(plan, [[0, 1], [2, 3]]) == "ranks 2, 3 lie in clusters a, b"
    assert spanning_rows(plan_of(), [[0, 1], [2, 3]]) == ""
