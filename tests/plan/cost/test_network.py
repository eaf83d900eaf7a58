"""network: prices against hand-made numbers."""

import pytest

from holmes_ext.cluster.site import Fabric
from holmes_ext.plan.cost.network import all_reduce, inside_cluster, message, two_level_seconds

FABRIC = Fabric("f", "ib", 8_000_000, 0.0)  # a megabyte a second


def test_allreduce():
    assert all_reduce(2, FABRIC).seconds(1e6) == pytest.approx(1.0)  # 2 (n-1)/n = 1
    assert all_reduce(4, FABRIC).seconds(1e6) == pytest.approx(1.5)
    assert all_reduce(2, FABRIC, sharers=8).seconds(1e6) == pytest.approx(8.0)
    assert all_reduce(8, FABRIC).seconds(0) == 0.0
    slow = Fabric("f", "ib", 8_000_000, 0.25)
    assert all_reduce(3, slow).seconds(1e6) == pytest.approx(4 / 3 + 4 * 0.25)


def test_send():
    assert message(Fabric("f", "ib", 8_000_000, 0.5), sharers=2, messages=3).seconds(2e6) == pytest.approx(4 + 1.5)


def test_two_levels_by_hand():
    """4 + 4 ranks, one a node, 8 MB: inside 2 x 3/4 of them, across 2 x 1/2 x 1/4, one under the other but for the
    first chunk of 2 MiB on the faster level."""
    slow = Fabric("e", "ethernet", 1_000_000, 0.0)
    flat, two = two_level_seconds(8e6, [4, 4], FABRIC, slow)
    assert flat == pytest.approx(2 * 7 / 8 * 8e6 * 8 / 1e6)
    assert two == pytest.approx(max(1.5 * 8, 0.25 * 64) + 1.5 * 2**21 / 1e6)


def test_inside_a_cluster_a_ring_leaves_a_node_once_and_direct_sends_go_to_every_node():
    assert inside_cluster(8, 1, direct=False) == (7, 7 / 8) and inside_cluster(8, 1, direct=True) == (1, 7 / 8)
    assert inside_cluster(8, 4, direct=False) == (7, 7 / 8) and inside_cluster(8, 4, direct=True) == (1, 2.0)
