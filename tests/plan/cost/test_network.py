"""network: loads and prices against hand-made numbers, of a fabric of a megabyte a second."""

import pytest

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.plan.buckets import chunks_of
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.placement import Fold, StageMessages
from holmes_ext.plan.sizes import Sizes


def network(nodes, latency_s=0.0, processes=1):
    fabrics = Fabric("f", "ib", 8_000_000, latency_s), Fabric(ETHERNET, "ethernet", 1_000_000, 0.0)
    ports = Port("f"), Port(ETHERNET)
    return Network(Site(tuple(Node(f"n{i}", "c", processes, ports) for i in range(nodes)), fabrics))


def fold(of, sizes):
    names = [node.name for node in of.site.nodes]
    return Fold(of.placement(names, sizes.complete(of.world)))


def ring_s(size, nodes, tensor=1, **more):
    of = network(nodes, processes=tensor, **more)
    (family,) = fold(of, Sizes(tensor=tensor)).families(0)
    return of.ring(family, groups=family.count).price.seconds(size)


def test_allreduce():
    assert ring_s(1e6, 2) == pytest.approx(1.0)  # 2 (n-1)/n = 1
    assert ring_s(1e6, 4) == pytest.approx(1.5)
    assert ring_s(1e6, 2, tensor=8) == pytest.approx(8.0)  # eight groups share each NIC
    assert ring_s(0, 8) == 0.0
    assert ring_s(1e6, 3, latency_s=0.25) == pytest.approx(4 / 3 + 4 * 0.25)


@pytest.mark.parametrize(
    "size, chunks", [(0, 1), (90, 1), (100, 1), (199, 1), (200, 2), (1050, 10)]
)
def test_chunks_are_as_large_as_they_should_be_or_larger(size, chunks):
    assert chunks_of(size, 100) == chunks


def test_send():
    of = network(2, latency_s=0.5, processes=2)
    stage_link = fold(of, Sizes(pipeline=2)).stage_link(0, 0, 1)
    assert of.message(stage_link).price.seconds(2e6) == pytest.approx(
        4 + 0.5
    )  # two ranks of a node send at once


def test_an_all_reduce_between_equally_busy_nodes_takes_the_rate_of_the_busier_one():
    """If both stages are on one class of nodes, both directions use its NICs, which one node stands for."""
    messages = StageMessages(
        sender=0, receiver=0, node_types=(0, 0), leaving=3, reaching=1, count=1
    )
    for one_way in (messages, messages.turned):
        flows = dict(network(4).pairwise(one_way).nics)
        assert flows == {(0, "f", "out"): 3, (0, "f", "in"): 3}
