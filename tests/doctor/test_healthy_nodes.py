"""No healthy node has a problem, and planted faults are found: `holmes doctor` on many kinds of nodes."""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import clusters
import pytest
from healthy_nodes import NODES, Machine, build

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.doctor.in_use import check_used_nics, mark_unused
from holmes_ext.doctor.nics import check_machine
from holmes_ext.doctor.side_by_side import NodeCheck, compare, kind_of
from holmes_ext.doctor.variables import check_variables


def report(name, nics):
    return NodeCheck(NodeReport(name, f"boot/{name}", "", nics, 1), {}, {}, ())


nics_of = cache(read_nics)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Return a function from the name of a node to its tree, which is written once."""
    return cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


def findings_of(root, environ=None, spec=None, name="n1"):
    """Return what `holmes doctor` finds on a node, apart from the installed packages."""
    nics = nics_of(root)
    marked = mark_unused(nics, name, spec)
    unused = [one.name for one, nic in zip(marked, nics) if one.skipped != nic.skipped]
    return [
        *check_used_nics(root, marked, is_live=False, is_in_cluster=bool(kind_of(name, spec))),
        *check_machine(nics, kind_of(name, spec), live=False),
        *check_variables(environ or {}, nics, unused),
        *compare([report(name, nics)], spec),
    ]


def neighbour_of(nic):
    """Return the same NIC on the next node, with another LID and the next IP address."""
    interfaces = [ipaddress.ip_interface(address) for address in nic.addresses]
    addresses = tuple(f"{one.ip + 1}/{one.network.prefixlen}" for one in interfaces)
    return replace(nic, lid=nic.lid + 50 if nic.lid else 0, addresses=addresses)


@pytest.mark.parametrize("name", NODES)
def test_a_healthy_node_has_no_problem(name, healthy):
    """Neither alone, nor in a cluster.toml that describes it, nor beside a second such node."""
    root = healthy(name)
    found = findings_of(root)
    assert [f"{f.about}: {f.what}" for f in found if f.level == "problem"] == []
    assert len(found) <= 3, found  # notes
    nics = nics_of(root)
    fast_nics = [nic for nic in nics if nic.fast and nic.usable]
    if not fast_nics:
        return
    kind = fast_nics[0].kind
    gbps = sum(nic.rate_bps for nic in fast_nics if nic.kind == kind) / 1e9
    spec = clusters.spec(f"c {kind} {gbps:g}Gb/s n1,n2", ethernet="1Gb/s")
    found = [
        *findings_of(root, spec=spec),
        *compare([report("n1", nics), report("n2", tuple(map(neighbour_of, nics)))], spec),
    ]
    assert [f"{f.about}: {f.what}" for f in found if f.level == "problem"] == []


class Fault(NamedTuple):
    """A fault that is planted on a healthy node."""

    node: str  # one of NODES
    level: str
    words: str  # of the finding: "about: what"
    files: Mapping[str, str] = {}  # path in the tree -> new text
    environ: Mapping[str, str] = {}
    add: Callable[[Machine], None] | None = None  # NICs that the healthy node does not have
    toml: str = ""  # a cluster of cluster.toml


PORT = "class/infiniband/{}/ports/1/{}".format
FAULTS = {
    "no subnet manager": Fault(
        "dgx_h100",
        "problem",
        "mlx5_4:1: the port is in state INIT: no subnet manager has set it up",
        {PORT("mlx5_4", "state"): "2: INIT"},
    ),
    "cable unplugged": Fault(
        "dgx_h100",
        "note",
        "mlx5_4:1: the ib port is DOWN/Polling",
        {PORT("mlx5_4", "state"): "1: DOWN", PORT("mlx5_4", "phys_state"): "2: Polling"},
    ),
    "all ports down": Fault(
        "coreweave_pod",
        "problem",
        "NICs: no NIC of this node can be used",
        {
            **{PORT(f"ibp{hca}", "state"): "1: DOWN" for hca in range(8)},
            "class/net/eth0/operstate": "down",
        },
    ),
    "one lane of InfiniBand": Fault(
        "juwels_booster",
        "problem",
        "mlx5_2:1: the link runs on one lane (50 Gb/sec (1X HDR))",
        {PORT("mlx5_2", "rate"): "50 Gb/sec (1X HDR)"},
    ),
    "a link trained down": Fault(
        "dgx_h100",
        "note",
        "mlx5_9:1: the link runs at 200 Gb/s, mlx5_0:1 at 400 Gb/s",
        {PORT("mlx5_9", "rate"): "200 Gb/sec (2X NDR)"},
    ),
    "a switch of an older generation": Fault(
        "snellius_a100",
        "note",
        "the link runs at 100 Gb/s, the adapter (MT4123) can do 200",
        {
            f"class/infiniband/mlx5_{hca}/{path}": text
            for hca in (0, 1)
            for path, text in (("hca_type", "MT4123"), ("ports/1/rate", "100 Gb/sec (4X EDR)"))
        },
    ),
    "a slot with 8 lanes": Fault(
        "dgx_h100",
        "problem",
        "mlx5_0:1: PCIe carries 252.1 Gb/s, the link 400 Gb/s",
        {"class/infiniband/mlx5_0/device/current_link_width": "8"},
    ),
    "a slot of an older generation": Fault(
        "hgx_h100_nccl_1131",
        "problem",
        "mlx5_3:1: PCIe carries 252.1 Gb/s, the link 400 Gb/s",
        {"class/infiniband/mlx5_3/device/current_link_speed": "16.0 GT/s PCIe"},
    ),
    "RoCE v1 only": Fault(
        "e810_roce",
        "problem",
        "rocep23s0f0:1: the port has no RoCE v2 GID",
        {PORT("rocep23s0f0", f"gid_attrs/types/{index}"): "IB/RoCE v1" for index in range(4)},
    ),
    "another MTU on one rail": Fault(
        "gcp_a3_ultra",
        "problem",
        "MTU: the roce NICs differ in MTU (bytes): mlx5_0:1 8896, mlx5_1:1 8896, mlx5_2:1 8896, "
        "mlx5_3:1 8896, mlx5_4:1 8896, mlx5_5:1 1460",
        {"class/net/gpu5rdma0/mtu": "1460"},
    ),
    "GIDs at different indices": Fault(
        "mi300x_thor",
        "note",
        "GID indices: the RoCE v2 GIDs have different indices: bnxt_re0:1 at 1",
        {
            PORT("bnxt_re0", "gid_attrs/types/1"): "RoCE v2",
            PORT("bnxt_re0", "gids/1"): "0000:0000:0000:0000:0000:ffff:0a28:0009",
            PORT("bnxt_re0", "gids/3"): "0000:0000:0000:0000:0000:0000:0000:0000",
        },
    ),
    "no address on Ethernet": Fault(
        "juwels_booster",
        "note",
        "em2: the interface is up and has no IP address",
        add=lambda machine: machine.eth("em2", driver="igb", speed=1000),
    ),
    "no address on RoCE": Fault(
        "gbe25",
        "note",
        "no cluster.toml: node 'n1': RoCE NIC mlx5_1:1 has no IPv4 address with a subnet",
        add=lambda machine: machine.roce("mlx5_1", "ens3f0np0", rate="25 Gb/sec (1X EDR)"),
    ),
    "RDMA module not loaded": Fault(
        "workstations",
        "note",
        "ens1: the NIC can do RDMA, but /sys/class/infiniband shows no port of it",
        add=lambda machine: machine.eth("ens1", "10.1.1.1/24", driver="mlx5_core", speed=100000),
    ),
    "a bond without one of its links": Fault(
        "ib_and_active_backup_bond",
        "note",
        "bond0: the bond runs without its member eno2 (no carrier)",
        {"class/net/eno2/operstate": "down", "class/net/eno2/carrier": "0"},
    ),
    "two NICs in one IP subnet": Fault(
        "gbe100_one_lane",
        "note",
        "ens1np0, ens9np0: 2 NICs of this node are in one IP subnet, 10.4.1.0/24",
        add=lambda machine: machine.roce(
            "mlx5_9", "ens9np0", "10.4.1.6/24", rate="100 Gb/sec (1X NDR)"
        ),
    ),
    "two InfiniBand subnets": Fault(
        "dgx_1_v100",
        "note",
        "InfiniBand subnets: the ports of this node are in 2: fec0:0000:0000:0001: mlx5_0:1, mlx5_1:1, "
        "mlx5_2:1; fec0:0000:0000:0009: mlx5_3:1",
        {PORT("mlx5_3", "gids/0"): "fec0:0000:0000:0009:a088:c203:0004:0000"},
    ),
    "default InfiniBand prefix": Fault(
        "dgx_1_v100",
        "note",
        "mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1: the subnet prefix is the default one",
        {
            PORT(f"mlx5_{hca}", "gids/0"): f"fe80:0000:0000:0000:a088:c203:000{hca}:0000"
            for hca in range(4)
        },
    ),
    "HCAs of two vendors": Fault(
        "mi300x_thor",
        "note",
        "vendors: the roce NICs of this node are of 2: Broadcom: bnxt_re0:1",
        add=lambda machine: machine.roce("mlx5_0", "ens20np0", "10.41.0.9/24"),
    ),
    "a container without the host's network": Fault(
        "pod_sriov_roce",
        "problem",
        "mlx5_0:1, mlx5_1:1: /sys shows the RoCE port, but its net device is in another network namespace",
        {f"class/infiniband/mlx5_{hca}/ports/1/state": "1: DOWN" for hca in (2, 3)},
    ),
    "NCCL_IB_HCA names what is not there": Fault(
        "dgx_h100",
        "problem",
        "NCCL_IB_HCA: '=mlx5_0,mlx5_12' names mlx5_12, which this node does not have",
        environ={"NCCL_IB_HCA": "=mlx5_0,mlx5_12"},
    ),
    "NCCL_IB_HCA names a port that is down": Fault(
        "dgx_h100",
        "problem",
        "NCCL_IB_HCA: 'mlx5_0,mlx5_2' names mlx5_2, which is down",
        environ={"NCCL_IB_HCA": "mlx5_0,mlx5_2"},
    ),
    "NCCL_IB_HCA is a prefix of two kinds": Fault(
        "dgx_h100",
        "problem",
        "NCCL_IB_HCA: 'mlx5' selects HCAs of 2 kinds (names are prefixes): ib: mlx5_0:1",
        environ={"NCCL_IB_HCA": "mlx5"},
    ),
    "NCCL_IB_HCA leaves both kinds": Fault(
        "dgx_h100",
        "problem",
        "NCCL_IB_HCA: '^mlx5_7' selects HCAs of 2 kinds (names are prefixes): ib: mlx5_0:1",
        environ={"NCCL_IB_HCA": "^mlx5_7"},
    ),
    "NCCL_IB_HCA of another machine": Fault(
        "mi300x_thor",
        "problem",
        "NCCL_IB_HCA: 'mlx5' names mlx5, which this node does not have (its HCAs: bnxt_re0:1",
        environ={"NCCL_IB_HCA": "mlx5"},
    ),
    "NCCL_IB_HCA of the host in a pod": Fault(
        "pod_sriov_roce",
        "problem",
        "NCCL_IB_HCA: '=mlx5_0,mlx5_2' selects mlx5_0:1, whose net device is in another network namespace",
        environ={"NCCL_IB_HCA": "=mlx5_0,mlx5_2"},
    ),
    "NCCL_SOCKET_IFNAME names what is not there": Fault(
        "azure_nd_h100",
        "problem",
        "NCCL_SOCKET_IFNAME: 'ens,eno' names ens, eno, which this node does not have",
        environ={"NCCL_SOCKET_IFNAME": "ens,eno"},
    ),
    "NCCL_SOCKET_IFNAME selects a container's bridge": Fault(
        "host_network_pod",
        "problem",
        "NCCL_SOCKET_IFNAME: '^lo,docker' selects cni0, flannel.1 (inside this node only); eno1 (Ethernet)",
        environ={"NCCL_SOCKET_IFNAME": "^lo,docker"},
    ),
    "NCCL_SOCKET_IFNAME selects IP over InfiniBand, too": Fault(
        "connectx3",
        "problem",
        "NCCL_SOCKET_IFNAME: 'ib,ens' selects ens3d1 (Ethernet); ib0 (IP over InfiniBand)",
        environ={"NCCL_SOCKET_IFNAME": "ib,ens"},
    ),
    "NCCL_SOCKET_IFNAME selects a port without a cable": Fault(
        "dgx_h100",
        "problem",
        "NCCL_SOCKET_IFNAME: '=enp41s0f1np1' selects only enp41s0f1np1 (DOWN/Disabled)",
        environ={"NCCL_SOCKET_IFNAME": "=enp41s0f1np1"},
    ),
    "GLOO_SOCKET_IFNAME takes no prefix": Fault(
        "dgx_h100",
        "problem",
        "GLOO_SOCKET_IFNAME: 'eno' names eno, which this node does not have",
        environ={"GLOO_SOCKET_IFNAME": "eno"},
    ),
    "NCCL_IB_GID_INDEX of RoCE v1": Fault(
        "oci_h100",
        "problem",
        "NCCL_IB_GID_INDEX: entry 2 is no RoCE v2 GID of mlx5_0:1 (roce_v1)",
        environ={"NCCL_IB_GID_INDEX": "2"},
    ),
    "NCCL_IB_DISABLE": Fault(
        "dgx_h100",
        "problem",
        "NCCL_IB_DISABLE: is set, though mlx5_0:1, mlx5_3:1",
        environ={"NCCL_IB_DISABLE": "1"},
    ),
    "a misspelt variable": Fault(
        "gcp_a2",
        "problem",
        "HOLMES_CLUSTR: holmes reads no variable of this name",
        environ={"HOLMES_CLUSTR": "c.toml"},
    ),
    "a rate that the NICs do not have": Fault(
        "juwels_booster",
        "problem",
        "n1: mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1 run at 800 Gb/s, but the rate of fabric 'c' is 1.6 Tb/s",
        toml="c ib 1600Gb/s n1",
    ),
    "the rate of one NIC": Fault(
        "juwels_booster",
        "note",
        "n1: its 4 fast NICs run at 800 Gb/s together, but the rate of fabric 'c' is 200 Gb/s",
        toml="c ib 200Gb/s n1",
    ),
    "a kind that the node does not have": Fault(
        "juwels_booster",
        "problem",
        "n1: cluster.toml: node 'n1' of cluster 'c' has no roce NIC that is up",
        toml="c roce 800Gb/s n1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, healthy, tmp_path):
    fault = FAULTS[name]
    if fault.add or fault.files:
        machine = Machine(tmp_path)
        NODES[fault.node](machine)
        if fault.add:
            fault.add(machine)
        root = machine.save()
    else:
        root = healthy(fault.node)
    for path, text in fault.files.items():
        (root / path).write_text(f"{text}\n")
    spec = clusters.spec(fault.toml, ethernet="1Gb/s") if fault.toml else None
    found = findings_of(root, fault.environ, spec)
    lines = [f"{f.level} {f.about}: {f.what}" for f in found]
    expected = [line for line in lines if fault.words in line and line.startswith(fault.level)]
    assert len(expected) == 1, lines
    assert sum(line.startswith("problem") for line in lines) <= 1, lines
