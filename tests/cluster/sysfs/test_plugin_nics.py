"""NICs that are neither InfiniBand nor RoCE, recognized in /sys by driver, node type and link layer."""

import pytest
from sysfs_builder import Sysfs, mapped

from holmes_ext.cluster.sysfs.node import read_nics

GBPS = 10**9


@pytest.fixture
def tree(tmp_path):
    """Make a /sys with an Ethernet NIC of a virtual machine."""
    tree = Sysfs(tmp_path)
    tree.net("eth0", tree.pci("0000:00:05.0", "virtio_net"), addresses=["10.0.0.5/20"])
    return tree


def nics_of(tree):
    return {nic.name: nic for nic in read_nics(tree.save_addresses())}


@pytest.mark.parametrize("node_type", ["7: unspecified", "0: <unknown>", "1: CA"])
def test_efa(tree, node_type):
    for number, name in enumerate(("rdmap64s0", "rdmap80s0")):
        tree.hca(name, tree.pci(f"0000:4{number}:00.0", "efa"), node_type=node_type)
        tree.port(name, 1, "Unspecified", "100 Gb/sec (4X EDR)")
    nics = nics_of(tree)
    assert list(nics) == ["rdmap64s0:1", "rdmap80s0:1", "eth0"]
    efa = nics["rdmap64s0:1"]
    assert (efa.kind, efa.usable, efa.fast, efa.rate_bps) == ("efa", True, True, 100 * GBPS)


@pytest.mark.parametrize("driver", ["cxi_ss1", "cxi_core", "cxi_eth"])
def test_slingshot(tree, driver):
    device = tree.pci("0000:01:00.0", driver)
    tree.net("hsn0", device, speed=200000, mtu=9000, addresses=["10.150.0.7/16"])
    hsn = nics_of(tree)["hsn0"]
    assert (hsn.kind, hsn.plugin_kind, hsn.usable) == ("ethernet", "slingshot", True)


def test_slingshot_in_a_container_has_only_its_name(tree):
    tree.virtual("hsn0", speed=200000, iflink=7, addresses=["10.150.0.7/16"])
    tree.virtual("eth9", speed=200000, iflink=8, addresses=["10.151.0.7/16"])
    nics = nics_of(tree)
    assert (nics["hsn0"].plugin_kind, nics["eth9"].plugin_kind) == ("slingshot", "")


def test_an_hsn_device_of_slingshot_10_is_roce(tree):
    """The first Slingshot clusters have ConnectX-5, which NCCL uses with verbs."""
    device = tree.pci("0000:01:00.0", "mlx5_core")
    tree.hca("mlx5_0", device)
    tree.net("hsn0", device, speed=100000, addresses=["10.150.0.7/16"])
    tree.roce_port("mlx5_0", "hsn0", "10.150.0.7")
    nics = nics_of(tree)
    assert nics["mlx5_0:1"].kind == "roce" and nics["hsn0"].plugin_kind == ""


def test_gvnic(tree):
    tree.net("eth1", tree.pci("0000:06:00.0", "gve"), speed=200000, addresses=["10.1.0.2/32"])
    nics = nics_of(tree)
    assert (nics["eth1"].plugin_kind, nics["eth0"].plugin_kind) == ("gvnic", "")


def test_omni_path(tree):
    tree.hca("hfi1_0", tree.pci("0000:3b:00.0", "hfi1"))
    tree.ib_port("hfi1_0", prefix="fe80:0000:0000:0001", rate="100 Gb/sec (4X EDR)", lid=3)
    nic = nics_of(tree)["hfi1_0:1"]
    assert (nic.kind, nic.lid, nic.subnet_prefix) == ("opa", 3, "fe80:0000:0000:0001")


def test_erdma(tree):
    """The driver of eRDMA calls itself iWARP ("4: RNIC"), but NCCL connects over it (NVIDIA/nccl#2428)."""
    tree.hca("erdma_0", tree.pci("0000:00:15.0", "erdma"), node_type="4: RNIC")
    gids = {1: (mapped("10.0.0.5"), "", "eth0")}
    tree.port("erdma_0", 1, "Ethernet", "100 Gb/sec (4X EDR)", gids=gids)
    nics = nics_of(tree)
    nic = nics["erdma_0:1"]
    assert (nic.kind, nic.usable, nic.gid_index, nic.netdevs) == ("erdma", True, 1, ("eth0",))
    assert nics["eth0"].rdma == "erdma_0:1"


@pytest.mark.parametrize("driver", ["ice", "cxgb4", "qede"])
def test_iwarp_is_listed_with_the_reason_not_to_use_it(tree, driver):
    device = tree.pci("0000:17:00.0", driver)
    tree.hca("iwp23s0f0", device, node_type="4: RNIC")
    tree.net("ens1f0", device, speed=100000, addresses=["10.6.0.5/24"])
    tree.port("iwp23s0f0", 1, "Ethernet", "100 Gb/sec (4X EDR)")
    nics = nics_of(tree)
    nic = nics["iwp23s0f0:1"]
    assert (nic.kind, nic.fast, nic.usable) == ("iwarp", False, False)
    assert "NCCL cannot connect over it" in nic.skipped
    assert nics["ens1f0"].usable and not nics["ens1f0"].rdma


@pytest.mark.parametrize(
    "node_type, layer",
    [
        ("1: CA", "Unspecified"),
        ("1: CA", "Unknown"),
        ("5: usNIC", "Ethernet"),
        ("9: new", "Ethernet"),
    ],
)
def test_an_rdma_device_of_an_unknown_kind_is_not_left_out(tree, node_type, layer):
    tree.hca("new0", tree.pci("0000:17:00.0", "new_driver"), node_type=node_type)
    tree.port("new0", 1, layer, "100 Gb/sec (4X EDR)")
    assert nics_of(tree)["new0:1"].kind == "plugin"


@pytest.mark.parametrize("node_type", ["2: switch", "3: router"])
def test_devices_that_are_no_adapters_are_left_out(tree, node_type):
    tree.hca("switch0", tree.pci("0000:17:00.0", "mlxsw"), node_type=node_type)
    tree.ib_port("switch0")
    assert list(nics_of(tree)) == ["eth0"]
