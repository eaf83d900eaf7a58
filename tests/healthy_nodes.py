"""/sys trees of 40 kinds of healthy nodes, for tests: what people run training jobs on.

Names, drivers, rates and states are those of public outputs (manuals, issues of NVIDIA/nccl and other
projects, launch scripts); addresses are placeholders. Each entry of NODES writes one tree:

    NODES["dgx_h100"](Machine(path))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sysfs_builder import Sysfs, mapped

SUBNET = "fec0:0000:0000:0001"


class _SmallTables(Sysfs):
    """Trees whose GID tables have no empty entries, which is faster to write and to read."""

    def port(self, *args, gids=(), **more) -> None:
        super().port(*args, gids=gids, **{**more, "table": len(gids)})


class Machine:
    """A /sys tree that grows NIC by NIC."""

    def __init__(self, root: Path) -> None:
        self.tree = _SmallTables(root)
        self.count = 0

    def _pci(self, driver: str, **more) -> str:
        """Add a PCI function at the next free address."""
        self.count += 1
        domain, number = divmod(self.count, 200)
        speed = "32.0 GT/s PCIe"
        return self.tree.pci(f"{domain:04x}:{number:02x}:00.0", driver, **{"speed": speed, **more})

    def ib(
        self, hca, netdev="", rate="400 Gb/sec (4X NDR)", prefix=SUBNET, driver="mlx5_core", **pci
    ) -> None:
        """Add an InfiniBand port, with an IPoIB device if it has a name."""
        device = self._pci(driver, **pci)
        self.tree.hca(hca, device)
        guid = f"a088:c203:00{self.count:02x}:0000"
        self.tree.ib_port(hca, guid=guid, prefix=prefix, rate=rate, lid=100 + self.count, sm_lid=1)
        if netdev:
            self.tree.net(netdev, device, type=32, mtu=2044, speed=int(rate.split()[0]) * 1000)

    def roce(
        self,
        hca,
        netdev,
        address="",
        rate="400 Gb/sec (4X NDR)",
        mtu=9000,
        driver="mlx5_core",
        board="",
        **pci,
    ) -> None:
        """Add a RoCE port and its network device."""
        device = self._pci(driver, **pci)
        path = self.tree.hca(hca, device)
        if board:
            self.tree.write(f"{path}/sys_image_guid", board)
        speed = int(rate.split()[0]) * 1000
        addresses = [address] if address else []
        self.tree.net(netdev, device, speed=speed, mtu=mtu, addresses=addresses)
        self.tree.roce_port(hca, netdev, *[text.split("/")[0] for text in addresses], rate=rate)

    def down(self, hca, netdev, layer="Ethernet") -> None:
        """Add a port without a cable."""
        device = self._pci("mlx5_core")
        self.tree.hca(hca, device)
        rate = "40 Gb/sec (4X QDR)" if layer == "Ethernet" else "10 Gb/sec (4X SDR)"
        self.tree.port(hca, 1, layer, rate, state="1: DOWN", phys="3: Disabled")
        self.tree.net(netdev, device, operstate="down", carrier=0)

    def eth(self, netdev, address="", driver="virtio_net", speed=None, **more) -> None:
        """Add an Ethernet device."""
        addresses = [address] if address else []
        device = self._pci(driver, speed="8.0 GT/s PCIe", width=8)
        self.tree.net(netdev, device, speed=speed, addresses=addresses, **more)

    def bond(self, name, members, address, speed=25000, driver="ice") -> None:
        """Add a bond over two Ethernet devices."""
        for member in members:
            self.eth(member, driver=driver, speed=speed, flags=0x1803)
        self.tree.bond(name, *members, speed=2 * speed, addresses=[address])

    def save(self) -> Path:
        return self.tree.save_addresses()


def _rails(
    machine: Machine, hcas: Sequence[int], hca: str, netdev: str, address: str, **more
) -> None:
    """Add a RoCE port for each number: "{}" in the texts is the number, "{i}" counts from 0."""
    for i, number in enumerate(hcas):
        machine.roce(
            hca.format(number, i=i),
            netdev.format(number, i=i),
            address.format(number, i=i),
            **more,
        )


def dgx_h100(machine: Machine) -> None:
    # DGX H100 user guide, table 6: "Network Modules"
    numbers = {0: 24, 3: 64, 4: 79, 5: 94, 6: 154, 9: 192, 10: 206, 11: 220}
    for hca, bus in numbers.items():
        machine.ib(f"mlx5_{hca}", f"ibp{bus}s0")
    machine.roce("mlx5_1", "enp41s0f0np0", "10.9.1.7/24", rate="200 Gb/sec (4X HDR)", mtu=1500)
    machine.down("mlx5_2", "enp41s0f1np1")
    machine.roce("mlx5_7", "enp170s0f0np0", "10.9.2.7/24", rate="200 Gb/sec (4X HDR)", mtu=1500)
    machine.down("mlx5_8", "enp170s0f1np1")
    machine.eth("eno3", "192.168.1.7/24", driver="i40e", speed=10000)
    machine.tree.virtual("docker0", devtype="bridge", operstate="down", carrier=0)


def dgx_h100_roce(machine: Machine) -> None:
    # NVIDIA/nccl-tests#185: enp220s0np0, mlx5_10:1/RoCE
    _rails(
        machine,
        (24, 64, 79, 94, 154, 192, 206, 220),
        "mlx5_{}",
        "enp{}s0np0",
        "11.1.{i}.136/24",
    )
    machine.eth("eno3", "192.168.1.7/24", driver="i40e", speed=10000)


def dgx_b200(machine: Machine) -> None:
    for hca in (4, 7, 8, 9, 10, 13, 14, 15):
        machine.ib(f"mlx5_{hca}", f"ibp{hca}s0")
    for hca, number in ((0, 1), (1, 2)):
        machine.roce(f"mlx5_{hca}", f"enp17{hca}s0f0np0", f"10.9.{number}.7/24")


def dgx_1_v100(machine: Machine) -> None:
    for hca in range(4):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", rate="100 Gb/sec (4X EDR)", speed="8.0 GT/s PCIe")
    machine.eth("enp1s0f0", "10.31.0.7/16", driver="ixgbe", speed=10000)
    machine.eth("enp1s0f1", driver="ixgbe", operstate="down", carrier=0)


def dgx_2(machine: Machine) -> None:
    for hca in range(8):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", rate="100 Gb/sec (4X EDR)", speed="8.0 GT/s PCIe")
    machine.roce("mlx5_8", "enp134s0f0", "10.31.0.8/16", rate="100 Gb/sec (4X EDR)")
    machine.down("mlx5_9", "enp134s0f1")


def hgx_spectrum_x(machine: Machine) -> None:
    """Routed RoCE: each port has a point-to-point subnet to its switch; a bonded front end."""
    _rails(machine, range(8), "mlx5_{}", "eth{}", "172.16.{}.2/31", mtu=9216)
    machine.bond("bond0", ("ens1f0np0", "ens1f1np1"), "10.7.0.21/24", speed=100000)


def hgx_h100_nccl_1131(machine: Machine) -> None:
    # NVIDIA/nccl#1131: mlx5_0-3, 6-9 for RoCE, sockets on ens9f0np0
    _rails(machine, (0, 1, 2, 3, 6, 7, 8, 9), "mlx5_{}", "ens{}np0", "10.248.{}.10/24")
    machine.eth("ens9f0np0", "10.7.0.10/24", driver="bnxt_en", speed=25000)


def hgx_h20_bonds(machine: Machine) -> None:
    """Each HCA is a bond of two ports: mlx5_bond_0 to 3, as H20 servers of Chinese clouds have."""
    for number in range(4):
        members = [f"ens{number}f{port}np{port}" for port in (0, 1)]
        functions = [
            machine.tree.pci(
                f"0000:{0x30 + number:02x}:00.{port}", "mlx5_core", speed="32.0 GT/s PCIe"
            )
            for port in (0, 1)
        ]
        for port, function in enumerate(functions):
            machine.tree.net(members[port], function, speed=200000, flags=0x1803, mtu=4200)
        address = f"10.30.{number}.5"
        machine.tree.bond(
            f"bond{number + 1}", *members, speed=400000, mtu=4200, addresses=[f"{address}/24"]
        )
        machine.tree.hca(f"mlx5_bond_{number}", functions[0])
        machine.tree.roce_port(
            f"mlx5_bond_{number}", f"bond{number + 1}", address, rate="400 Gb/sec (4X NDR)"
        )
    machine.bond("bond0", ("eth0", "eth1"), "10.7.0.5/24")


def oci_h100(machine: Machine) -> None:
    """BM.GPU.H100.8: 16 RDMA ports in one subnet, and a front end with another rate and MTU."""
    hcas = (0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17)
    _rails(
        machine,
        hcas,
        "mlx5_{}",
        "rdma{i}",
        "10.224.{i}.3/12",
        rate="200 Gb/sec (4X HDR)",
        mtu=4220,
    )
    machine.roce("mlx5_2", "eth0", "10.1.2.3/24", rate="100 Gb/sec (4X EDR)")
    machine.roce("mlx5_11", "eth1", rate="100 Gb/sec (4X EDR)")


def oci_a100(machine: Machine) -> None:
    """BM.GPU4.8: ConnectX-5 with 100 Gb/s for RDMA and 50 Gb/s in front."""
    _rails(
        machine,
        range(16),
        "mlx5_{}",
        "rdma{i}",
        "192.168.{i}.3/16",
        rate="100 Gb/sec (4X EDR)",
        mtu=4220,
    )
    machine.roce("mlx5_16", "eth0", "10.1.2.3/24", rate="50 Gb/sec (1X HDR)")


def oci_mi300x(machine: Machine) -> None:
    _rails(machine, (0, 2, 3, 4, 5, 7, 8, 9), "mlx5_{}", "rdma{i}", "10.224.{i}.9/12", mtu=4220)
    machine.roce("mlx5_1", "eth0", "10.1.2.9/24", rate="100 Gb/sec (4X EDR)")


def azure_nd_h100(machine: Machine) -> None:
    """ND H100 v5: eight NDR virtual functions, and eth0 above a virtual function (skypilot#4448)."""
    for hca in range(8):
        machine.ib(f"mlx5_ib{hca}", f"ib{hca}", width=0)
    _azure_front_end(machine)


def azure_nd_a100(machine: Machine) -> None:
    for hca in range(8):
        machine.ib(f"mlx5_ib{hca}", f"ib{hca}", rate="200 Gb/sec (4X HDR)", width=0)
    _azure_front_end(machine)


def azure_ndv2(machine: Machine) -> None:
    machine.ib("mlx5_0", "ib0", rate="100 Gb/sec (4X EDR)", width=0)
    _azure_front_end(machine)


def azure_nc24rs(machine: Machine) -> None:
    # NVIDIA/nccl-tests#36: 0002:00:02.0 mlx4_0 (MT4100) port 1 (ACTIVE) ==> ib0 (Up)
    machine.ib("mlx4_0", "ib0", rate="56 Gb/sec (4X FDR)", driver="mlx4_core", width=0)
    machine.eth("eth0", "10.60.0.5/24", driver="hv_netvsc", speed=40000)


def _azure_front_end(machine: Machine) -> None:
    machine.eth("eth0", "10.60.0.5/24", driver="hv_netvsc", speed=40000)
    device = machine.tree.pci("1ee2:00:02.0", "mlx5_core", width=0)
    machine.tree.net(
        "enP7906s1", device, speed=40000, flags=0x1803, addresses=["fe80::20d:3aff/64"]
    )
    machine.tree.hca("mlx5_an0", device)
    machine.tree.roce_port("mlx5_an0", "enP7906s1", rate="40 Gb/sec (4X QDR)")
    machine.tree.enslave("eth0", "enP7906s1")


def gcp_a3_ultra(machine: Machine) -> None:
    """Eight RoCE virtual functions, each in a VPC subnet of its own, and two gVNICs."""
    _rails(
        machine,
        range(8),
        "mlx5_{}",
        "gpu{}rdma0",
        "192.168.{}.5/24",
        mtu=8896,
        width=0,
    )
    machine.eth("enp0s19", "10.0.0.5/32", driver="gve", mtu=8244)
    machine.eth("enp192s20", "10.1.0.5/32", driver="gve", mtu=8244)


def gcp_a2(machine: Machine) -> None:
    machine.eth("ens4", "10.128.0.7/32", driver="gve", mtu=1460)


def aws_p3dn(machine: Machine) -> None:
    machine.eth("ens5", "172.31.7.44/20", driver="ena", mtu=9001)


def lambda_one_click(machine: Machine) -> None:
    for hca in range(8):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", width=0)
    machine.eth("eno1", "172.26.133.5/20")


def nebius_h200(machine: Machine) -> None:
    for hca in range(8):
        machine.ib(f"mlx5_{hca}", width=0)
    machine.eth("eth0", "10.10.0.9/24")
    machine.tree.virtual("cilium_host", addresses=["10.0.1.7/32"])
    machine.tree.virtual("lxc0a1", speed=10000, iflink=3, addresses=["fe80::1/64"])


def coreweave_h100(machine: Machine) -> None:
    """HCAs are named ibp0 to ibp7."""
    for hca in range(8):
        machine.ib(f"ibp{hca}", f"ib{hca}")
    machine.roce("roce0", "enp157s0np0", "10.0.4.7/24", rate="100 Gb/sec (4X EDR)")
    machine.tree.virtual("cali01", speed=10000, iflink=3, addresses=["fe80::ecee/64"])


def coreweave_pod(machine: Machine) -> None:
    """Write a pod with rdma/ib: all HCAs, and a veth as its only network device."""
    for hca in range(8):
        machine.ib(f"ibp{hca}")
    machine.tree.virtual("eth0", speed=10000, iflink=41, addresses=["10.244.1.7/32"])


def pod_sriov_roce(machine: Machine) -> None:
    """Write a pod that has the host's physical functions, but not their network devices."""
    machine.tree.virtual("eth0", speed=10000, iflink=41, addresses=["10.244.1.7/24"])
    for number in range(2):
        function = machine.tree.pci(f"0000:4{number}:00.0", "mlx5_core", speed="32.0 GT/s PCIe")
        machine.tree.hca(f"mlx5_{number}", function)
        machine.tree.roce_port(
            f"mlx5_{number}", f"ens{number}np0", f"10.12.{number}.2", rate="400 Gb/sec (4X NDR)"
        )
        virtual = machine.tree.pci(f"0000:4{number}:00.2", "mlx5_core", physfn=function)
        address = f"10.12.{number}.21"
        machine.tree.hca(f"mlx5_{number + 2}", virtual)
        machine.tree.net(
            f"net{number + 1}", virtual, speed=400000, mtu=9000, addresses=[f"{address}/24"]
        )
        machine.tree.roce_port(
            f"mlx5_{number + 2}", f"net{number + 1}", address, rate="400 Gb/sec (4X NDR)"
        )


def pod_macvlan(machine: Machine) -> None:
    machine.tree.virtual("eth0", speed=10000, iflink=41, addresses=["10.244.1.7/24"])
    machine.tree.virtual("net1", speed=100000, iflink=7, addresses=["10.55.0.7/24"])


def host_network_pod(machine: Machine) -> None:
    """Kubernetes with the host's network: calico, flannel and a bridge stand beside InfiniBand."""
    for hca in range(4):
        machine.ib(f"mlx5_{hca}", f"ibs{hca}", rate="200 Gb/sec (4X HDR)")
    machine.eth("eno1", "10.2.0.9/16", driver="i40e", speed=10000)
    machine.tree.virtual("cni0", devtype="bridge", addresses=["10.244.1.1/24"])
    machine.tree.virtual("veth77", speed=10000, iflink=3)
    machine.tree.enslave("cni0", "veth77")
    machine.tree.virtual(
        "flannel.1", devtype="vxlan", operstate="unknown", addresses=["10.244.1.0/32"]
    )


def roce_vlan(machine: Machine) -> None:
    """RoCE on a VLAN: the address, and so the GID to use, belongs to the VLAN device."""
    for number in range(2):
        netdev = f"ens{number}f0np0"
        machine.roce(f"mlx5_{number}", netdev, f"10.5.{number}.9/24", rate="100 Gb/sec (4X EDR)")
        vlan = f"{netdev}.100"
        machine.tree.vlan(vlan, netdev, speed=100000, mtu=9000, addresses=[f"10.6.{number}.9/24"])
        at = f"class/infiniband/mlx5_{number}/ports/1"
        machine.tree.write(f"{at}/gids/4", mapped(f"10.6.{number}.9"))
        machine.tree.write(f"{at}/gid_attrs/types/4", "RoCE v2")
        machine.tree.write(f"{at}/gid_attrs/ndevs/4", vlan)
    machine.eth("eno1", "10.2.0.9/16", driver="tg3", speed=1000)


def juwels_booster(machine: Machine) -> None:
    for hca in range(4):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", rate="200 Gb/sec (4X HDR)")
    machine.eth("em1", "10.11.0.9/16", driver="igb", speed=1000)


def leonardo(machine: Machine) -> None:
    """Dual-port cards with HDR100: two lanes of 50 Gb/s are meant."""
    for hca in range(4):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", rate="100 Gb/sec (2X HDR)")
    machine.eth("eno1", "10.11.0.9/16", driver="ixgbe", speed=10000)


def summit_like(machine: Machine) -> None:
    for hca in range(4):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", rate="100 Gb/sec (4X EDR)")
    machine.eth("enP5p1s0f0", "10.41.0.9/16", driver="tg3", speed=1000)


def snellius_a100(machine: Machine) -> None:
    # openucx/ucx#9727: two HDR ports and a 25GbE port (MT4117) of one lane
    for hca in range(2):
        machine.ib(f"mlx5_{hca}", f"ib{hca}", rate="200 Gb/sec (4X HDR)")
    machine.roce("mlx5_2", "eno1np0", "145.0.0.9/24", rate="25 Gb/sec (1X EDR)", mtu=1500)
    machine.down("mlx5_3", "eno2np1")


def mi300x_thor(machine: Machine) -> None:
    """Broadcom Thor 2: bnxt_re0 to 7."""
    _rails(
        machine,
        range(8),
        "bnxt_re{}",
        "ens{}np0",
        "10.40.{}.9/24",
        driver="bnxt_en",
    )
    machine.eth("eno1", "10.2.0.9/16", driver="ixgbe", speed=10000)


def e810_roce(machine: Machine) -> None:
    # NVIDIA/nccl#622: Intel E810 in RoCE v2 mode
    machine.roce("rocep23s0f0", "ens1f0", "10.6.0.5/24", rate="100 Gb/sec (4X EDR)", driver="ice")
    machine.eth("eno1", "10.2.0.9/16", driver="i40e", speed=10000)


def gb200_tray(machine: Machine) -> None:
    # DGX GB200 deployment guide, "Compute Tray Network Ports"
    for hca in (0, 1, 4, 5):
        machine.ib(f"mlx5_{hca}", f"ibp{hca}s0")
    machine.roce("mlx5_2", "enP6p3s0f0np0", "10.9.0.7/24", rate="200 Gb/sec (4X HDR)", mtu=1500)
    machine.down("mlx5_3", "enP6p3s0f1np1")
    machine.roce("mlx5_6", "enP22p3s0f0np0", "10.9.1.7/24", rate="200 Gb/sec (4X HDR)", mtu=1500)
    machine.down("mlx5_7", "enP22p3s0f1np1")


def gb300_roce(machine: Machine) -> None:
    """ConnectX-8 (NVIDIA/aicr#1413): GPU memory is reached by a second PCIe function."""
    _rails(
        machine,
        (161, 162, 201, 202),
        "rocep{}s0",
        "enp{}s0np0",
        "10.50.{i}.7/24",
        rate="800 Gb/sec (4X XDR)",
    )
    machine.eth("eno1", "10.2.0.9/16", driver="igc", speed=1000)


def dgx_spark(machine: Machine) -> None:
    """One 200 Gb/s port behind two PCIe functions of 126 Gb/s each (NVIDIA/dgx-spark-playbooks#103)."""
    for number, (hca, netdev) in enumerate(
        (("rocep1s0f0", "enp1s0f0np0"), ("roceP2p1s0f0", "enP2p1s0f0np0"))
    ):
        machine.roce(
            hca,
            netdev,
            f"192.168.{100 + number}.10/24",
            rate="200 Gb/sec (4X HDR)",
            mtu=1500,
            width=4,
            board="30c5:9903:0047:4b1e",
        )
    machine.eth("enP7s7", "10.2.0.9/16", driver="r8127", speed=10000)


def soft_roce(machine: Machine) -> None:
    machine.eth("ens3", "10.8.0.9/24", speed=None)
    machine.tree.hca("rxe0")
    machine.tree.roce_port("rxe0", "ens3", "10.8.0.9", rate="2.5 Gb/sec (1X SDR)")


def gbe25(machine: Machine) -> None:
    machine.roce("mlx5_0", "ens2f0np0", "10.4.0.5/24", rate="25 Gb/sec (1X EDR)")


def gbe100_one_lane(machine: Machine) -> None:
    for number in range(2):
        machine.roce(
            f"mlx5_{number}", f"ens{number}np0", f"10.4.{number}.5/24", rate="100 Gb/sec (1X NDR)"
        )


def connectx3(machine: Machine) -> None:
    """Two ports of one card: InfiniBand and Ethernet."""
    device = machine.tree.pci("0000:05:00.0", "mlx4_core", speed="8 GT/s", width=8)
    machine.tree.hca("mlx4_0", device)
    machine.tree.net("ib0", device, type=32, mtu=2044, speed=56000, addresses=["192.168.50.3/24"])
    machine.tree.net("ens3d1", device, dev_port=1, speed=40000, addresses=["10.40.0.3/24"])
    machine.tree.ib_port("mlx4_0", prefix=SUBNET, rate="56 Gb/sec (4X FDR)", lid=3, sm_lid=1)
    machine.tree.roce_port("mlx4_0", "ens3d1", "10.40.0.3", number=2, rate="40 Gb/sec (4X QDR)")


def workstations(machine: Machine) -> None:
    machine.eth("eno1", "192.168.0.9/24", driver="igc", speed=2500)
    machine.eth("wlan0", "192.168.7.9/24", driver="iwlwifi", devtype="wlan")
    machine.tree.virtual("docker0", devtype="bridge", operstate="down", carrier=0)


def ib_and_active_backup_bond(machine: Machine) -> None:
    for hca in range(8):
        machine.ib(f"mlx5_{hca}", f"ib{hca}")
    machine.bond("bond0", ("eno1", "eno2"), "10.2.0.9/16", driver="i40e")
    machine.eth("idrac", "169.254.1.2/24", driver="cdc_ether")


def ib_with_storage_subnet(machine: Machine) -> None:
    """Compute and storage InfiniBand are two fabrics."""
    for hca in range(8):
        machine.ib(f"mlx5_{hca}", f"ib{hca}")
    machine.ib("mlx5_8", "ibs8", rate="200 Gb/sec (4X HDR)", prefix="fec0:0000:0000:0002")
    machine.eth("eno1", "10.2.0.9/16", driver="i40e", speed=10000)


NODES: dict[str, Callable[[Machine], None]] = {
    build.__name__: build
    for build in (
        dgx_h100,
        dgx_h100_roce,
        dgx_b200,
        dgx_1_v100,
        dgx_2,
        hgx_spectrum_x,
        hgx_h100_nccl_1131,
        hgx_h20_bonds,
        oci_h100,
        oci_a100,
        oci_mi300x,
        azure_nd_h100,
        azure_nd_a100,
        azure_ndv2,
        azure_nc24rs,
        gcp_a3_ultra,
        gcp_a2,
        aws_p3dn,
        lambda_one_click,
        nebius_h200,
        coreweave_h100,
        coreweave_pod,
        pod_sriov_roce,
        pod_macvlan,
        host_network_pod,
        roce_vlan,
        juwels_booster,
        leonardo,
        summit_like,
        snellius_a100,
        mi300x_thor,
        e810_roce,
        gb200_tray,
        gb300_roce,
        dgx_spark,
        soft_roce,
        gbe25,
        gbe100_one_lane,
        connectx3,
        workstations,
        ib_and_active_backup_bond,
        ib_with_storage_subnet,
    )
}


def build(name: str, root: Path) -> Path:
    """Write the tree of a node; return its root."""
    machine = Machine(root)
    NODES[name](machine)
    return machine.save()
