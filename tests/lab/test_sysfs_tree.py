"""lab/network/sysfs_tree.py: trees that look like a real machine's."""

import os

import clusters
import pytest
from holmes_lab.network import shaping as network
from holmes_lab.network import sysfs_tree

SPEC = clusters.spec(
    "a ib 200Gb/s a0,a1", "b roce 1.6Gb/s b0", "c ib 100Gb/s c0", ethernet="25Gb/s"
)
NODES = {node.name: node for node in network.lay_out(SPEC, 0.01)}


@pytest.fixture
def read(tmp_path):
    for name, node in NODES.items():
        sysfs_tree.write_tree(tmp_path / name, node)
    return lambda node, path: (tmp_path / node / path).read_text().strip()


def test_infiniband_port(read):
    port = "class/infiniband/mlx5_0/ports/1/"
    assert read("a0", port + "link_layer") == "InfiniBand"
    assert (
        read("a0", port + "state") == "4: ACTIVE" and read("a0", port + "phys_state") == "5: LinkUp"
    )
    assert (
        read("a0", port + "rate") == "200 Gb/sec (4X HDR)"
        and read("c0", port + "rate") == "100 Gb/sec (4X EDR)"
    )
    assert read("a0", port + "sm_lid") == "0x1"
    lids = {int(read(node, port + "lid"), 16) for node in ("a0", "a1")}
    assert len(lids) == 2 and 0 not in lids
    prefixes = [read(node, port + "gids/0")[:19] for node in ("a0", "a1", "c0")]
    assert prefixes[0] == prefixes[1] != prefixes[2] and "fe80:0000:0000:0000" not in prefixes
    assert read("a0", port + "gid_attrs/types/0") == "IB/RoCE v1"
    assert read("a0", "class/infiniband/mlx5_0/device/net/ib0/type") == "32"
    assert read("a0", "class/infiniband/mlx5_0/device/numa_node") == "0"


def test_roce_port(read):
    port = "class/infiniband/mlx5_0/ports/1/"
    assert (
        read("b0", port + "link_layer") == "Ethernet"
        and read("b0", port + "rate") == "1.6 Gb/sec (4X SDR)"
    )
    types = [read("b0", port + f"gid_attrs/types/{index}") for index in range(4)]
    assert types == ["IB/RoCE v1", "RoCE v2"] * 2
    high, low = (int(part) for part in NODES["b0"].nic("roce0").address.split(".")[2:])
    assert read("b0", port + "gids/3") == f"0000:0000:0000:0000:0000:ffff:0a65:{high:02x}{low:02x}"
    assert read("b0", port + "gid_attrs/ndevs/3") == "roce0"
    assert read("b0", "class/infiniband/mlx5_0/device/net/roce0/type") == "1"


def test_net_devices_and_pci_addresses(read, tmp_path):
    assert sorted(os.listdir(tmp_path / "a0/class/net")) == ["eth0", "ib0"]
    assert (
        read("a0", "class/net/eth0/speed") == "25000"
        and read("a0", "class/net/ib0/speed") == "200000"
    )
    assert (
        read("a0", "class/net/eth0/operstate") == "up"
        and read("a0", "class/net/eth0/carrier") == "1"
    )
    assert read("b0", "class/net/roce0/address") == NODES["b0"].nic("roce0").mac
    assert len(read("a0", "class/net/ib0/address").split(":")) == 20
    address = (tmp_path / "a0/class/infiniband/mlx5_0/device").resolve().name
    assert (tmp_path / "a0/class/net/ib0/device").resolve().name == address == "0000:31:00.0"
    assert (tmp_path / "a0/class/net/eth0/device").resolve().name == "0000:17:00.0"


def test_a_tree_can_be_moved(tmp_path, read):
    os.rename(tmp_path / "b0", tmp_path / "moved")
    assert read("moved", "class/infiniband/mlx5_0/device/net/roce0/operstate") == "up"


def test_a_pulled_cable_shows(read, tmp_path):
    sysfs_tree.set_link(tmp_path / "b0", NODES["b0"].nic("roce0"), up=False)
    assert read("b0", "class/infiniband/mlx5_0/ports/1/state") == "1: DOWN"
    assert (
        read("b0", "class/net/roce0/operstate") == "down"
        and read("b0", "class/net/eth0/operstate") == "up"
    )


def test_holmes_reads_it_back_as_what_cluster_toml_says(tmp_path, read):
    read_nics = pytest.importorskip("holmes_ext.cluster.sysfs.node").read_nics
    nics = {(nic.kind, nic.netdevs): nic for nic in read_nics(str(tmp_path / "b0"))}
    roce, ethernet = nics["roce", ("roce0",)], nics["ethernet", ("eth0",)]
    assert (
        roce.state == "up"
        and roce.rate_bps == 1_600_000_000
        and ethernet.rate_bps == 25_000_000_000
    )
    assert roce.addresses == (NODES["b0"].nic("roce0").address + "/16",)
    assert (
        ethernet.addresses == (NODES["b0"].address + "/16",)
        and roce.skipped == ethernet.skipped == ""
    )
    prefixes = [
        next(nic for nic in read_nics(str(tmp_path / node)) if nic.kind == "ib").subnet_prefix
        for node in ("a0", "a1", "c0")
    ]
    assert prefixes[0] == prefixes[1] != prefixes[2]
