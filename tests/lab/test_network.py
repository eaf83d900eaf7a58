"""lab/network/shaping.py: addresses, links and shaping that a cluster.toml becomes."""

import re

import clusters
import pytest
from holmes_lab import interleave
from holmes_lab.network import shaping as network

from holmes_ext.errors import HolmesError

SPEC = clusters.spec(
    "a ib 2Gb/s a0,a1 fabric=spine",
    "b roce 600Mb/s b0",
    "c ib 1Gb/s c0 fabric=spine",
    "d ethernet - d0",
)


def test_every_node_has_eth0_and_its_fabrics_nic():
    nodes = {node.name: node for node in network.lay_out(SPEC, 1.0)}
    assert list(nodes) == ["a0", "a1", "b0", "c0", "d0"]
    assert [[nic.name for nic in node.nics] for node in nodes.values()] == [
        ["eth0", "ib0"],
        ["eth0", "ib0"],
        ["eth0", "roce0"],
        ["eth0", "ib0"],
        ["eth0"],
    ]
    assert (
        nodes["a0"].nic("ib0").bridge
        == nodes["c0"].nic("ib0").bridge
        != nodes["b0"].nic("roce0").bridge
    )
    assert {node.nics[0].bridge for node in nodes.values()} == {"eth"}
    addresses = [nic.address for node in nodes.values() for nic in node.nics]
    macs = [nic.mac for node in nodes.values() for nic in node.nics]
    assert len(set(addresses)) == len(addresses) and len(set(macs)) == len(macs)
    subnets = {
        nic.bridge: nic.address.rsplit(".", 2)[0] for node in nodes.values() for nic in node.nics
    }
    assert len(set(subnets.values())) == 3


def test_scale_multiplies_what_is_shaped_and_not_what_is_announced():
    nic = network.lay_out(SPEC, 0.1)[0].nic("ib0")
    assert nic.rate_bps == 200_000_000 and nic.nominal_bps == 2_000_000_000


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_factor_is_refused(scale):
    with pytest.raises(HolmesError, match="--scale"):
        network.lay_out(SPEC, scale)


def test_more_nodes_than_a_machine_holds_are_refused():
    big = clusters.spec("a ethernet - n[0-999]")
    with pytest.raises(HolmesError, match="1000 nodes"):
        network.lay_out(big, 1.0)


@pytest.mark.parametrize(
    "rate", [10**6, 4 * 10**7, 250 * 10**6, 600 * 10**6, 1600 * 10**6, 3 * 10**9, 10**10]
)
def test_shaping_keeps_what_a_message_gets_for_free_small(rate):
    """Up to 300 Mb/s, at most 10 % of 128 KiB passes at once.

    That is a burst, or with a peak rate the peak's burst.
    """
    s = network.shaping(rate)
    assert s.rate_bps == pytest.approx(rate * 1514 / 1448)
    free = s.peak_burst or s.burst
    assert free > s.gso_max_size * 1514 / 1448 + 1514, (
        "tbf cuts larger packets into frames, which costs CPU"
    )
    most = (
        0.1 * 131072
        if rate <= 300e6
        else max(20_000, 160e-6 * rate / 8 + 2_000, 71_000 * (rate > 3.5e9))
    )
    assert free <= most
    if rate > 700e6:
        assert s.burst >= max(70_000, rate * 0.5e-3 / 8) and s.peak_bps == pytest.approx(
            1.06 * s.rate_bps
        )


def test_batches_shape_both_ends_of_every_link():
    nodes = network.lay_out(SPEC, 1.0)
    ip, tc = network.switch_batches(nodes, {node.name: 100 + node.index for node in nodes})
    assert ip.count(" type bridge ") == 3 and ip.count(" type veth ") == 9
    assert (
        "link add name f2 mtu 1500 type veth peer name roce0 address 02:48:4d:65:00:03 mtu 1500 netns "
        "102\n" in ip
    )
    shaped = {line.split()[3] for line in tc.splitlines()}
    assert shaped == {"e0", "e1", "e2", "e3", "e4", "f0", "f1", "f2", "f3"}
    ip, tc = network.node_batches(nodes[2])
    assert "address add 10.77.0.3/16 dev eth0\n" in ip and "link set dev lo up\n" in ip
    assert [line.split()[3] for line in tc.splitlines()] == ["eth0", "roce0"]
    assert all(" latency 20ms" in line for line in tc.splitlines())


def test_hosts_maps_names_to_ethernet():
    lines = network.hosts_file(network.lay_out(SPEC, 1.0)).splitlines()
    assert "10.77.0.3 b0" in lines and "127.0.0.1 localhost" in lines


def test_interleave_takes_the_clusters_in_turn():
    assert interleave(SPEC) == ("a0", "b0", "c0", "d0", "a1")


def test_an_unknown_nic_is_named():
    with pytest.raises(HolmesError, match="node a0: no NIC 'roce0'; it has eth0, ib0"):
        network.lay_out(SPEC, 1.0)[0].nic("roce0")


def test_another_burst_is_another_queue():
    """A packet of the old one that is longer than the new burst would stay at its head for ever."""
    handles = [
        re.search(r"handle (\w+):", network.shape_commands("eth0", rate)[1]).group(1)
        for rate in (3_000_000, 2_000_000, 100_000_000, 500_000_000, 10**9, 10**10, 10**11)
    ]
    assert handles[0] == handles[1] and len(set(handles)) == 6
    assert all(0 < int(handle, 16) < 65_536 for handle in handles)
