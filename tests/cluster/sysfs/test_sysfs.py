import json
import os
import shutil
from dataclasses import replace

import pytest
from damage import nic_of
from namespaces import in_namespace
from sysfs_builder import (
    CASES,
    Sysfs,
    aws_ena,
    container,
    copy_without_links,
    dgx_a100,
    dual_port,
    ports_down,
    roce_lag,
)

from holmes_ext.cluster.addresses import interface_addresses
from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.sysfs.node import read_nics, select
from holmes_ext.errors import HolmesError


def by_name(nics):
    return {nic.name: nic for nic in nics}


def names(nics):
    return [nic.name for nic in nics]


# ---- what real kinds of nodes look like ----


def test_dgx_a100(tmp_path):
    nics = read_nics(dgx_a100(tmp_path / "n"))
    found = by_name(nics)
    assert names(nics)[:10] == [
        f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9, 4, 5)
    ]  # ib, then roce
    assert found["mlx5_2:1"] == Nic(
        kind="ib",
        device="mlx5_2",
        port=1,
        netdevs=("ibp75s0",),
        state="up",
        state_text="ACTIVE",
        rate_bps=200 * 10**9,
        max_rate_bps=252061538461,
        addresses=("172.16.2.11/24",),
        mtu=4092,
        subnet_prefix="fe80:0000:0000:0000",
        gids=found["mlx5_2:1"].gids,
        lid=0x1E,
        sm_lid=1,
        numa=1,
        pci="0000:4b:00.0",
        driver="mlx5_core",
    )
    assert [(g.index, g.type, g.value) for g in found["mlx5_2:1"].gids] == [
        (0, "ib", "fe80:0000:0000:0000:0c42:a103:0065:5c02")
    ]
    storage = found["mlx5_4:1"]
    assert (
        storage.kind,
        storage.ifname,
        storage.roce_v2_index,
        storage.addresses,
        storage.subnet_prefix,
        storage.lid,
    ) == ("roce", "enp225s0f0", 3, ("10.9.0.11/24",), "", 0)
    assert [(g.index, g.type) for g in storage.gids] == [
        (0, "roce_v1"),
        (1, "roce_v2"),
        (2, "roce_v1"),
        (3, "roce_v2"),
    ]
    face = found["enp225s0f0"]
    assert (face.kind, face.rdma, face.rate_bps) == ("ethernet", "mlx5_4:1", 200 * 10**9)
    down = found["mlx5_5:1"]
    assert (down.state, down.state_text, down.rate_bps, down.skipped) == (
        "down",
        "DOWN/Disabled",
        0,
        "",
    )
    assert (found["enp226s0"].rate_bps, found["enp226s0"].max_rate_bps, found["enp226s0"].rdma) == (
        10**9,
        8 * 10**9,
        "",
    )
    assert (found["enp227s0"].state, found["enp227s0"].state_text) == ("down", "no carrier")
    assert found["enx0a94ef2c1d05"].skipped == "management (USB/BMC)"
    assert found["docker0"].skipped
    assert not any(
        name.startswith("ibp") or name == "lo" for name in found
    )  # IPoIB is never Ethernet


def test_roce_bond_and_virtual_functions(tmp_path):
    found = by_name(read_nics(roce_lag(tmp_path / "n")))
    lag = found["mlx5_bond_0:1"]
    assert (lag.kind, lag.netdevs, lag.members, lag.ifname) == (
        "roce",
        ("bond0", "bond0.200"),
        ("ens1f0np0", "ens1f1np1"),
        "bond0",
    )
    assert lag.addresses == ("10.10.0.21/16", "fd10::21/64", "10.20.0.21/24")
    assert (lag.roce_v2_index, lag.mtu, lag.rate_bps, lag.parent) == (3, 9000, 200 * 10**9, "")
    bond = found["bond0"]
    assert (bond.kind, bond.rdma, bond.members, bond.skipped, bond.numa) == (
        "ethernet",
        "mlx5_bond_0:1",
        ("ens1f0np0", "ens1f1np1"),
        "",
        2,
    )
    assert (found["bond0.200"].skipped, found["bond0.200"].members, found["bond0.200"].numa) == (
        "",
        (),
        2,
    )
    assert found["ens1f0np0"].skipped == found["ens1f1np1"].skipped == "member of bond0"
    vf = found["mlx5_2:1"]
    assert (vf.parent, vf.pci, vf.state, vf.max_rate_bps) == (
        "mlx5_bond_0",
        "0000:41:00.2",
        "up",
        0,
    )
    assert found["mlx5_3:1"].state == "down" and found["mlx5_3:1"].parent == "mlx5_bond_0"
    assert found["ens1f0v0"].parent == "ens1f0np0" and found["ens1f0v0"].rdma == "mlx5_2:1"
    aside = {name: nic.skipped for name, nic in found.items() if nic.skipped}
    assert aside == {
        "ens1f0np0": "member of bond0",
        "ens1f1np1": "member of bond0",
        "veth12ab": "member of docker0",
        "ens1f0np0_0": "representor of a virtual function",
        "ens1f0np0_1": "representor of a virtual function",
        "docker0": "container network (by its name)",
        "calid00d": "container network (by its name)",
        "vethx": "veth without an address",
        "dummy0": "virtual device",
        "tap0": "virtual device",
        "vxlan.calico": "virtual device",
    }


def test_dual_port_hca(tmp_path):
    ib, roce, eth = read_nics(dual_port(tmp_path / "n"))
    assert (ib.name, ib.kind, ib.netdevs, ib.subnet_prefix, ib.mtu) == (
        "mlx4_0:1",
        "ib",
        ("ib0",),
        "fec0:0000:0000:0007",
        2044,
    )
    assert (roce.name, roce.kind, roce.netdevs, roce.roce_v2_index) == (
        "mlx4_0:2",
        "roce",
        ("ens3d1",),
        3,
    )
    assert (eth.name, eth.rdma, eth.addresses) == ("ens3d1", "mlx4_0:2", ("10.40.0.3/24",))
    assert ib.max_rate_bps == roce.max_rate_bps == 63015384615  # PCIe 3.0 x8


def test_dual_port_hca_with_both_ports_on_ethernet(tmp_path):
    """One PCI function has both net devices: dev_port (before Linux 3.15: dev_id) says which port each is."""
    t = Sysfs(tmp_path)
    device = t.pci("0000:05:00.0", "mlx4_core")
    t.hca("mlx4_0", device)
    for i in (0, 1):
        t.net(f"ens{5 - i}", device, dev_port=i, speed=40000, addresses=[f"10.4{i}.0.3/24"])
        t.roce_port("mlx4_0", "", f"10.4{i}.0.3", number=i + 1)
    root = t.save_addresses()
    expected = {"mlx4_0:1": ("ens5",), "mlx4_0:2": ("ens4",)}
    assert {nic.name: nic.netdevs for nic in read_nics(root) if nic.kind == "roce"} == expected
    for name in ("ens4", "ens5"):
        (root / f"class/net/{name}/dev_port").unlink()
    assert {nic.name: nic.netdevs for nic in read_nics(root) if nic.kind == "roce"} == expected


def test_ports_down_are_kept(tmp_path):
    nics = read_nics(ports_down(tmp_path / "n"))
    assert {nic.name: (nic.state, nic.state_text, nic.rate_bps // 10**9) for nic in nics} == {
        "mlx5_0:1": ("down", "DOWN/Polling", 0),
        "mlx5_1:1": ("down", "INIT", 100),
        "mlx5_2:1": ("down", "ARMED", 100),
        "mlx5_3:1": ("down", "DOWN/Disabled", 0),
        "eth0": ("down", "no carrier", 0),
        "eth1": ("down", "not brought up", 0),
    }
    assert nics[0].numa == -1
    assert select(nics) == nics  # down, but not set aside


def test_cloud_node_with_efa(tmp_path):
    efa, eth = read_nics(aws_ena(tmp_path / "n"))
    assert (efa.name, efa.kind, efa.up, efa.rate_bps, efa.netdevs) == (
        "rdmap0s6:1",
        "efa",
        True,
        10**11,
        (),
    )
    assert (eth.name, eth.up, eth.rate_bps, eth.mtu, eth.driver, eth.addresses) == (
        "ens5",
        True,
        0,
        9001,
        "ena",
        ("172.31.7.44/20",),
    )


def test_container_with_veth(tmp_path):
    nics = read_nics(container(tmp_path / "n"))
    assert [(n.name, n.usable, n.addresses, n.driver) for n in nics] == [
        ("eth0", True, ("10.244.1.7/24",), "veth"),
        ("net1", True, ("10.55.0.7/24",), "veth"),
    ]


def test_soft_roce_without_pci_device(tmp_path):
    t = Sysfs(tmp_path)
    t.virtual("eth0", speed=10000, iflink=5, addresses=["10.0.0.1/24"])
    t.hca("rxe0")
    t.roce_port("rxe0", "eth0", "10.0.0.1", rate="2.5 Gb/sec (1X SDR)")
    roce, eth = read_nics(t.save_addresses())
    assert (roce.name, roce.netdevs, roce.pci, roce.rate_bps, roce.addresses) == (
        "rxe0:1",
        ("eth0",),
        "",
        2_500_000_000,
        ("10.0.0.1/24",),
    )
    assert eth.rdma == "rxe0:1"


def test_azure_virtual_function_behind_a_synthetic_nic(tmp_path):
    t = Sysfs(tmp_path)
    vmbus = "devices/LNXSYSTM:00/VMBUS:00/00155d12-3456"
    t.write(f"{vmbus}/uevent", "DRIVER=hv_netvsc")
    t.net("eth0", vmbus, speed=50000, addresses=["10.0.0.4/24"])
    vf = t.pci("0002:00:02.0", "mlx5_core")
    t.net("enP2s2", vf, speed=50000, flags=0x1803)
    t.enslave("eth0", "enP2s2")
    t.hca("mlx5_0", vf)
    t.roce_port("mlx5_0", "enP2s2")
    found = by_name(read_nics(t.save_addresses()))
    assert found["mlx5_0:1"].ifname == "eth0" and found["mlx5_0:1"].addresses == ("10.0.0.4/24",)
    assert found["enP2s2"].skipped == "member of eth0" and found["eth0"].usable


def test_bridge_over_a_physical_nic_is_its_face(tmp_path):
    t = Sysfs(tmp_path)
    t.net("eno1", t.pci("0000:01:00.0", "ixgbe"), speed=10000)
    t.virtual("br0", devtype="bridge", addresses=["10.0.0.1/24"])
    t.virtual("br1", devtype="bridge", addresses=["10.7.0.1/24"])
    t.enslave("br0", "eno1")
    found = by_name(read_nics(t.save_addresses()))
    assert found["br0"].usable and found["br0"].members == ("eno1",)
    assert (found["br1"].skipped, found["eno1"].skipped) == (
        "bridge without a physical NIC",
        "member of br0",
    )


def test_vrf_takes_no_nic_away(tmp_path):
    t = Sysfs(tmp_path)
    t.net("eno1", t.pci("0000:01:00.0", "ixgbe"), speed=10000, addresses=["10.0.0.1/24"])
    t.virtual("blue", devtype="vrf")
    t.enslave("blue", "eno1")
    found = by_name(read_nics(t.save_addresses()))
    assert found["eno1"].usable and found["blue"].skipped == "virtual device"


def test_team_and_macvlan(tmp_path):
    t = Sysfs(tmp_path)
    for i in (0, 1, 2):
        t.net(f"eno{i}", t.pci(f"0000:01:00.{i}", "ixgbe"), speed=10000)
    t.virtual("team0", addresses=["10.0.0.1/24"])
    t.enslave("team0", "eno0", "eno1")
    t.virtual("mv0", addresses=["10.1.0.1/24"])
    t.link("class/net/mv0/lower_eno2", "class/net/eno2")
    found = by_name(read_nics(t.save_addresses()))
    assert found["team0"].usable and found["team0"].members == ("eno0", "eno1")
    assert found["mv0"].usable and found["mv0"].members == () and found["eno2"].skipped == ""


@pytest.mark.parametrize(
    "name, reason",
    [
        ("storage0", "storage"),
        ("idrac", "management"),
        ("mgmt0", "management"),
        ("cilium_host", "container network"),
    ],
)
def test_names_that_say_what_they_are(tmp_path, name, reason):
    t = Sysfs(tmp_path)
    t.net(name, t.pci("0000:01:00.0", "ixgbe"), speed=10000, addresses=["10.0.0.1/24"])
    [nic] = read_nics(t.save_addresses())
    assert nic.skipped == f"{reason} (by its name)"


@pytest.mark.parametrize("speed", [-1, 65535, 4294967295, ""])
def test_unknown_speeds(tmp_path, speed):
    t = Sysfs(tmp_path)
    t.net("eth0", t.pci("0000:01:00.0", "virtio_net"), speed=speed)
    assert read_nics(t.save_addresses())[0].rate_bps == 0


# ---- addresses ----


def test_without_ip_addr_json_gids_tell_roce_addresses(tmp_path):
    root = roce_lag(tmp_path / "n")
    (root / "ip_addr.json").unlink()
    found = by_name(read_nics(root))
    assert found["mlx5_bond_0:1"].addresses == ("10.10.0.21/32", "10.20.0.21/32")
    assert found["bond0"].addresses == ("10.10.0.21/32",) and found["bond0.200"].addresses == (
        "10.20.0.21/32",
    )
    assert found["vethx"].skipped == ""  # nobody knows whether it has an address
    assert found["mlx5_3:1"].addresses == ()


def test_given_addresses_win(tmp_path):
    found = by_name(read_nics(roce_lag(tmp_path / "n"), addresses={"bond0.200": ("10.99.0.1/8",)}))
    lag = found["mlx5_bond_0:1"]
    assert (lag.netdevs, lag.ifname, lag.addresses) == (
        ("bond0.200", "bond0"),
        "bond0.200",
        ("10.99.0.1/8",),
    )
    assert lag.roce_v2_index == 5 and found["bond0"].addresses == ()


# ---- captured trees ----


@pytest.mark.parametrize("case", CASES)
def test_a_tree_copied_with_links_followed_reads_the_same(tmp_path, case):
    root = CASES[case](tmp_path / "n")
    copy = copy_without_links(root, tmp_path / "copy")
    assert not any(p.is_symlink() for p in copy.rglob("*"))
    expected = read_nics(root)
    if (
        case == "dgx_a100"
    ):  # a USB device's PCI address shows only in its path, which such a copy loses
        expected = tuple(replace(n, pci="") if "USB" in n.skipped else n for n in expected)
    assert read_nics(copy) == expected


@pytest.mark.parametrize("case", CASES)
def test_a_tarred_tree_reads_the_same(tmp_path, case):
    """An archive keeps links, and pads every file with NULs to the 4096 bytes that sysfs claims."""
    root = CASES[case](tmp_path / "n")
    expected = read_nics(root)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    for directory, _, files in os.walk(copy):
        for file in files:
            path = os.path.join(directory, file)
            if not os.path.islink(path) and file != "ip_addr.json":
                with open(path, "r+b") as f:
                    f.truncate(4096)
    assert read_nics(copy) == expected


def test_missing_optional_files(tmp_path):
    """Kernels differ in what they show; only what every kernel has is demanded."""
    root = roce_lag(tmp_path / "n")
    optional = {
        "dev_port",
        "dev_id",
        "numa_node",
        "phys_port_name",
        "current_link_speed",
        "current_link_width",
        "node_type",
        "fw_ver",
        "carrier",
        "speed",
        "uevent",
        "sm_lid",
        "lid",
    }
    for directory, _, files in os.walk(root):
        for file in files:
            if file in optional:
                os.unlink(os.path.join(directory, file))
    found = by_name(read_nics(root))
    assert found["mlx5_bond_0:1"].netdevs[0] == "bond0" and found["bond0"].up
    # by the links
    assert (
        found["mlx5_bond_0:1"].pci == "0000:41:00.0"
        and found["mlx5_bond_0:1"].driver == "mlx5_core"
    )


# ---- this machine ----


def test_this_machine():
    nics = read_nics()
    live = interface_addresses()
    for nic in nics:
        if nic.kind == "ethernet":
            assert nic.device in live and nic.addresses == live[nic.device]
    with open("/sys/class/net/lo/type") as f:
        assert f.read().strip() == "772"
    assert "lo" not in names(nics)


READ = (
    "import json; from dataclasses import asdict; from holmes_ext.cluster.sysfs.node import read_nics; "
    "print(json.dumps([asdict(n) for n in read_nics()]))"
)
VETH = (
    "ip link add va type veth peer name vb",
    "ip addr add 10.1.2.3/20 dev va",
    "ip link set va up",
    "ip link set vb up",
)


def test_veth_in_a_real_namespace():
    out = in_namespace(
        READ,
        *VETH,
        "mount -t sysfs sysfs /sys",
        "ip tuntap add dev tap7 mode tap",
        "until [ $(cat /sys/class/net/va/operstate) = up ]; do sleep 0.05; done",
    )
    found = by_name(nic_of(d) for d in json.loads(out))
    assert (
        found["va"].usable
        and found["va"].addresses == ("10.1.2.3/20",)
        and found["va"].rate_bps == 10**10
    )
    assert found["vb"].skipped == "veth without an address"
    assert found["tap7"].skipped == "virtual device"


def test_sys_of_another_namespace_is_refused():
    script = (
        "from holmes_ext.cluster.sysfs.node import *\n"
        "try: read_nics()\nexcept HolmesError as error: print(error)"
    )
    out = in_namespace(script, *VETH)
    assert "another network namespace" in out and "va, vb" in out and "mount -t sysfs" in out


# ---- select ----


@pytest.fixture(scope="module")
def dgx(tmp_path_factory):
    return read_nics(dgx_a100(tmp_path_factory.mktemp("dgx") / "n"))


@pytest.fixture(scope="module")
def lag(tmp_path_factory):
    return read_nics(roce_lag(tmp_path_factory.mktemp("lag") / "n"))


def test_select_leaves_out_what_is_set_aside(lag):
    assert names(select(lag)) == [
        "mlx5_2:1",
        "mlx5_3:1",
        "mlx5_bond_0:1",
        "bond0",
        "bond0.200",
        "ens1f0v0",
        "ens1f0v1",
    ]


def test_select_excludes_an_hca_in_every_use(dgx):
    left = names(select(dgx, exclude=["mlx5_4", "mlx5_5:1"]))
    assert left == [f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9)] + ["enp226s0", "enp227s0"]
    assert "mlx5_4:1" not in names(select(dgx, exclude=["enp225s0f0"]))
    assert names(select(dgx, exclude=["mlx5_*", "en*"])) == []


def test_select_includes(dgx, lag):
    assert names(select(dgx, include=["mlx5_[01]", "mlx5_6:1", "enp226s0"])) == [
        "mlx5_0:1",
        "mlx5_1:1",
        "mlx5_6:1",
        "enp226s0",
    ]
    assert names(select(dgx, include=["ibp12s0"])) == ["mlx5_0:1"]
    assert names(select(dgx, include=["mlx5_*"], exclude=["mlx5_[45]"])) == [
        f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9)
    ]
    [usb] = select(dgx, include=["enx0a94ef2c1d05"])
    assert usb.usable  # named in full: the default rules are overruled
    assert names(select(lag, include=["ens1f*"])) == [
        "mlx5_2:1",
        "mlx5_3:1",
        "ens1f0v0",
        "ens1f0v1",
    ]
    assert names(select(lag, include=["ens1f0np0"])) == ["ens1f0np0"]


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["mlx5_99", "MLX5_0", "", "mlx5_0:2"])
def test_select_names_a_pattern_that_matches_nothing(dgx, option, pattern):
    with pytest.raises(HolmesError) as caught:
        select(dgx, **{option: [pattern]})
    assert f"{option} pattern '{pattern}' matches no NIC" in str(
        caught.value
    ) and "mlx5_9:1" in str(caught.value)


def test_select_refuses_wildcards_for_what_is_set_aside(dgx):
    with pytest.raises(HolmesError, match=r"enx0a94ef2c1d05 \(management \(USB/BMC\)\)"):
        select(dgx, include=["enx*"])


# ---- damaged trees: one clear line that names the file ----

PORT = "class/infiniband/mlx5_bond_0/ports/1"


@pytest.mark.parametrize(
    "path, text",
    [
        (f"{PORT}/link_layer", "Token Ring"),
        (f"{PORT}/link_layer", None),
        (f"{PORT}/state", "4"),
        (f"{PORT}/state", None),
        (f"{PORT}/phys_state", "LinkUp"),
        (f"{PORT}/rate", "fast"),
        (f"{PORT}/rate", None),
        (f"{PORT}/gids/0", "fe80::1"),
        (f"{PORT}/gids/x", "fe80::1"),
        (f"{PORT}/gid_attrs/types/1", "RoCE v3"),
        (f"{PORT}/gid_attrs/ndevs/1", "a b"),
        ("class/infiniband/mlx5_bond_0/ports/one", ""),
        ("class/infiniband/mlx5_bond_0/ports/256", ""),
        ("class/net/ens1f0np0/device/numa_node", "zero"),
        ("class/net/ens1f0np0/device/uevent", "x"),
        ("class/net/ens1f0np0/device/uevent", "PCI_SLOT_NAME=here"),
        ("class/net/bond0/type", "ethernet"),
        ("class/net/bond0/type", None),
        ("class/net/bond0/mtu", "-5"),
        ("class/net/bond0/mtu", None),
        ("class/net/bond0/speed", "1e9"),
        ("class/net/bond0/speed", "9" * 12),
        ("class/net/bond0/operstate", "UP"),
        ("class/net/bond0/operstate", None),
        ("class/net/bond0/carrier", "2"),
        ("class/net/bond0/flags", "up"),
        ("class/net/bond0/flags", None),
        ("class/net/bond0/mtu", "9" * 5000),
        ("class/net/bond0/mtu", "\u0663"),
        ("class/net/bond0/bonding/slaves", "caf\u00e9"),
        ("class/net/ens1f0v0/dev_port", "-1"),
        ("class/net/bond0/operstate", "up\x07"),
        ("class/net/bond0/operstate", "up" * 40000),
        ("class/net/vethx/iflink", None),
    ],
)
def test_damaged_file_is_named(tmp_path, path, text):
    root = roce_lag(tmp_path / "n")
    file = root / path
    if text is None:
        file.unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    with pytest.raises(HolmesError) as caught:
        read_nics(root)
    directory, _, name = path.rpartition("/")
    where = directory if name in ("x", "one", "256") else path  # a name that should not be there
    assert str(root / where) in str(caught.value)
    assert len(str(caught.value)) < len(str(root)) + 400


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever


def make_directory(path):
    path.unlink()
    path.mkdir()


def make_loop(path):
    path.unlink()
    path.symlink_to(path.name)


def make_binary(path):
    path.write_bytes(bytes(range(256)))


def make_huge(path):
    with open(path, "wb") as file:
        file.write(b"1" * 100)
        file.truncate(1 << 40)  # sparse: a terabyte of NULs


@pytest.mark.parametrize("damage", [make_fifo, make_directory, make_loop, make_binary])
@pytest.mark.parametrize("path", ["class/net/bond0/operstate", f"{PORT}/state", f"{PORT}/gids/3"])
def test_odd_files_are_named(tmp_path, damage, path):
    root = roce_lag(tmp_path / "n")
    damage(root / path)
    with pytest.raises(HolmesError, match=path):
        read_nics(root)


def test_a_huge_file_is_not_read_whole(tmp_path):
    root = roce_lag(tmp_path / "n")
    make_huge(root / PORT / "state")
    with pytest.raises(HolmesError, match=f"{PORT}/state"):
        read_nics(root)


@pytest.mark.parametrize(
    "path",
    [
        "class/net/bond0",
        "class/infiniband/mlx5_2",
        "class/net/ens1f0v0/device",
        "class/infiniband/mlx5_2/device",
    ],
)
@pytest.mark.parametrize("target", ["/etc", "nothing", "."])
def test_links_that_lead_astray(tmp_path, path, target):
    root = roce_lag(tmp_path / "n")
    (root / path).unlink()
    (root / path).symlink_to(target if target != "." else os.path.basename(path))
    with pytest.raises(HolmesError, match=path):
        read_nics(root)


@pytest.mark.parametrize(
    "root, why",
    [("nothing", "No such file"), ("file", "neither"), ("empty", "neither"), ("nul\0", "null")],
)
def test_not_a_tree(tmp_path, root, why):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HolmesError, match=why):
        read_nics(f"{tmp_path}/{root}")
