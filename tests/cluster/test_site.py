import json
from dataclasses import replace

import clusters
import pytest

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site, site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError

TEXT = clusters.toml("a ib 2Gb/s a[0-1]", "b roce 1.6Gb/s b0", "c ethernet - c0", processes=2)


def site():
    return site_from_spec(parse_spec(TEXT))


def test_what_the_file_says():
    here = site()
    assert [node.name for node in here.nodes] == ["a0", "a1", "b0", "c0"]
    assert here.clusters == ("a", "b", "c")
    assert (here.processes, here.world_size) == (2, 8)
    assert here.node_by_name["a1"].fabrics == ("a", ETHERNET)
    assert here.node_by_name["c0"].fabrics == (ETHERNET,)
    assert here.node_by_name["a0"].port("a").rate_bps == 2_000_000_000
    assert here.fabric_by_name["b"] == Fabric("b", "roce", 1_600_000_000, 4e-6)


def test_shared_fabric():
    here = site()
    assert here.shared_fabric(["a0", "a1"]).name == "a"
    assert here.shared_fabric(["a0", "a0"]).name == "a"
    assert here.shared_fabric(["a0", "b0"]).name == ETHERNET
    assert here.shared_fabric(["c0"]).name == ETHERNET


def test_preference_is_by_rate_then_rdma_then_latency_then_name():
    fabrics = [
        Fabric("a", "ib", 100, 2e-6),
        Fabric(ETHERNET, "ethernet", 100, 0.0),
        Fabric("y", "roce", 100, 4e-6),
        Fabric("z", "roce", 99, 0.0),
        Fabric("b", "ib", 100, 2e-6),
    ]
    from_worst = sorted(fabrics, key=lambda fabric: fabric.preference)
    assert [fabric.name for fabric in from_worst] == ["z", ETHERNET, "y", "a", "b"]


def test_rdma_goes_before_ethernet_at_equal_rates():
    for name in ("a", "z"):
        ports = (Port(name), Port(ETHERNET))
        nodes = tuple(Node(f"n{index}", "n", 1, ports) for index in range(2))
        here = Site(nodes, (Fabric(ETHERNET, "ethernet", 100, 0.0), Fabric(name, "roce", 100, 0.0)))
        assert here.shared_fabric(["n0", "n1"]).name == name


def test_clusters_on_one_fabric():
    text = TEXT.replace('kind = "roce"', 'kind = "ib"\nfabric = "a"\nlatency = "9us"')
    here = site_from_spec(parse_spec(text))
    assert here.shared_fabric(["a0", "b0"]) == Fabric("a", "ib", 1_600_000_000, 9e-6)


def test_clusters_may_differ_in_the_processes_of_a_node():
    here = clusters.site("a ib 2Gb/s a[0-1] processes=4", "b roce 1.6Gb/s b0 processes=8")
    assert not here.has_equal_nodes
    assert (here.world_size, here.processes, here.aligned_ranks) == (16, 4, 8)
    assert here.processes_of == {"a0": 4, "a1": 4, "b0": 8}
    assert (here.processes_in("a"), here.processes_in("b")) == (4, 8)
    assert here.ranks_of_every_node == 1, "no number of nodes says how many ranks they have"
    equal = site()
    assert equal.has_equal_nodes and equal.processes_of == {}
    assert equal.ranks_of_every_node == equal.processes == equal.aligned_ranks


def test_nodes_of_a_cluster_have_equally_many_processes():
    ports = (Port(ETHERNET),)
    nodes = (Node("n0", "n", 8, ports), Node("n1", "n", 4, ports))
    fabrics = (Fabric(ETHERNET, "ethernet", 100, 0.0),)
    with pytest.raises(
        HolmesError, match="node 'n0' has 8 processes and node 'n1' has 4, both in cluster 'n'"
    ):
        Site(nodes, fabrics)
    single = (Node("n0", "n", 1, ports), Node("n1", "n", 2, ports))
    with pytest.raises(HolmesError, match="node 'n0' has 1 process and node 'n1' has 2"):
        Site(single, fabrics)
    # Without a cluster.toml, each number of processes gets a cluster of its own.
    here = Site.of_reports(nodes, fabrics)
    assert [node.cluster for node in here.nodes] == ["n-8", "n-4"]
    alike = Site.of_reports(nodes[:1], fabrics)
    assert [node.cluster for node in alike.nodes] == ["n"]


def test_json_round_trip():
    here = site()
    node = replace(
        here.nodes[0],
        ports=(Port("a", "ib0", "10.0.0.1", ("mlx5_0", "mlx5_1"), 3, 5), here.nodes[0].ports[1]),
    )
    here = Site((node, *here.nodes[1:]), here.fabrics)
    assert Site.from_dict(json.loads(json.dumps(here.to_dict()))) == here


def test_digest():
    here = site()
    assert Site(tuple(reversed(here.nodes)), here.fabrics).digest == here.digest
    named = replace(
        here.nodes[0],
        ports=(replace(here.nodes[0].ports[0], interface="ib7"), here.nodes[0].ports[1]),
    )
    assert Site((named, *here.nodes[1:]), here.fabrics).digest == here.digest
    assert Site(here.nodes[:-1], here.fabrics).digest != here.digest
    assert (
        Site(here.nodes, (replace(here.fabrics[0], rate_bps=1), *here.fabrics[1:])).digest
        != here.digest
    )
