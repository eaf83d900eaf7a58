"""reduction: who is waited for, and buckets that suit a fabric."""

from pathlib import Path

from holmes_ext.cluster.site import Fabric, site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.cost.reduction import bucket_bytes, exposed_stages
from holmes_ext.plan.cost.step import Workload
from holmes_ext.plan.sizes import Sizes

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
SITE = site_from_spec(load_spec(EXAMPLES / "two_clusters_4.toml"))
NODES = ("a0", "a1", "b0", "b1")


def test_the_first_stage_is_always_waited_for_a_later_one_when_its_fabric_is_slow():
    sizes = Sizes(pipeline=2, data=2)
    slow = Workload(forward_s=1.0, backward_s=2.0, gradient_bytes=1e9)  # 4 s and 5 s on 2 and 1.6 Gb/s; a backward is 2 s
    assert exposed_stages(SITE, NODES, sizes, slow) == (True, True)
    quick = Workload(forward_s=1.0, backward_s=2.0, gradient_bytes=1e8)  # 0.5 s on 1.6 Gb/s
    assert exposed_stages(SITE, NODES, sizes, quick) == (True, False)


def test_what_is_not_reduced_is_not_waited_for():
    assert exposed_stages(SITE, NODES, Sizes(pipeline=4, data=1)) == (False,) * 4


def test_a_bucket_is_an_eighth_but_outweighs_the_latencies_of_its_ring():
    fabric = Fabric("a", "ib", 200 * 10**9, 2e-6)
    assert bucket_bytes(8 * 10**9, 16, fabric) == 10**9
    floor = bucket_bytes(1000, 16, fabric)
    transfer, latency = 2 * 15 / 16 * floor * 8 / fabric.rate_bps, 2 * 15 * fabric.latency_s
    assert 9.9 * latency <= transfer <= 10.1 * latency
