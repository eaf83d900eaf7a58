"""Writes /sys trees as Linux shows them, for tests: the links, the attributes, and their exact texts.

  devices/pci0000:00/0000:41:00.0/{uevent,numa_node,current_link_*,driver,physfn,net/ens1f0,infiniband/mlx5_0}
  class/net/ens1f0 -> ../../devices/...          class/infiniband/mlx5_0 -> ../../devices/...

Each case function at the end writes one kind of node and returns its root.
"""

import json
import os
from pathlib import Path

EMPTY_GID = ":".join(["0000"] * 8)
DEFAULT_PREFIX = "fe80:0000:0000:0000"


def mapped(ipv4: str) -> str:
    """Return the IPv4-mapped GID of an address, as sysfs prints it."""
    a, b, c, d = (int(x) for x in ipv4.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


class Sysfs:
    def __init__(self, root):
        self.root = Path(root)
        self.index = 1
        self.addresses = []
        self.virtual(
            "lo",
            type=772,
            mtu=65536,
            flags=0x9,
            operstate="unknown",
            addresses=["127.0.0.1/8", "::1/128"],
        )

    def write(self, path: str, text) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if text != "" else "")

    def link(self, path: str, target: str) -> None:
        """Make a relative link inside the tree, like the kernel's."""
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(
            os.path.relpath(os.path.realpath(self.root / target), os.path.realpath(at.parent))
        )

    def pci(
        self,
        address: str,
        driver: str,
        numa: int = 0,
        speed: str = "16.0 GT/s PCIe",
        width: int = 16,
        physfn: str = "",
    ) -> str:
        """Make a PCI function and return its path.

        `physfn`: path of the physical function of a virtual one.
        """
        path = f"devices/pci{address[:7]}/{address}"
        self.write(
            f"{path}/uevent",
            f"DRIVER={driver}\nPCI_CLASS=20700\nPCI_ID=15B3:101B\nPCI_SLOT_NAME={address}\n"
            "MODALIAS=pci:v000015B3d0000101Bsv000015B3sd00000008bc02sc07i00",
        )
        self.write(f"{path}/numa_node", numa)
        self.write(f"{path}/vendor", "0x15b3")
        self.write(f"{path}/current_link_speed", "Unknown" if physfn else speed)
        self.write(f"{path}/current_link_width", 0 if physfn else width)
        (self.root / f"bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        self.link(f"{path}/driver", f"bus/pci/drivers/{driver}")
        if physfn:
            self.link(f"{path}/physfn", physfn)
            number = len(list((self.root / physfn).glob("virtfn*")))
            self.link(f"{physfn}/virtfn{number}", path)
        return path

    def usb(self, pci: str, driver: str) -> str:
        path = f"{pci}/usb1/1-14/1-14.1/1-14.1:2.0"
        self.write(
            f"{path}/uevent",
            f"DEVTYPE=usb_interface\nDRIVER={driver}\nPRODUCT=46b/ffb0/100\nTYPE=0/0/0\n"
            "INTERFACE=2/6/0",
        )
        (self.root / f"bus/usb/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        self.link(f"{path}/driver", f"bus/usb/drivers/{driver}")
        return path

    def net(self, name: str, device: str, **more) -> str:
        """Make a net device on a bus device."""
        path = self._net(name, f"{device}/net/{name}", **more)
        self.link(f"{path}/device", device)
        return path

    def virtual(self, name: str, **more) -> str:
        return self._net(name, f"devices/virtual/net/{name}", **more)

    def _net(
        self,
        name,
        path,
        type=1,
        speed=None,
        mtu=1500,
        flags=0x1003,
        operstate="up",
        carrier=1,
        devtype="",
        dev_port=0,
        iflink=None,
        addresses=(),
        phys_port_name=None,
    ) -> str:
        index, self.index = self.index, self.index + 1
        up = operstate in ("up", "unknown")
        values = {
            "type": type,
            "mtu": mtu,
            "flags": hex(flags),
            "operstate": operstate,
            "ifindex": index,
            "iflink": index if iflink is None else iflink,
            "dev_port": dev_port,
            "dev_id": hex(dev_port),
            "uevent": (f"DEVTYPE={devtype}\n" if devtype else "")
            + f"INTERFACE={name}\nIFINDEX={index}",
            "address": f"02:00:00:00:00:{index:02x}",
            "carrier": carrier if carrier is not None else "",
            # the kernel answers EINVAL for a device that is down, or that has no ethtool speed
            "speed": speed if speed is not None and up else "",
            "duplex": "full" if up else "",
        }
        if phys_port_name is not None:
            values["phys_port_name"] = phys_port_name
        for key, value in values.items():
            self.write(f"{path}/{key}", value)
        self.write(f"{path}/statistics/tx_bytes", 123456789)
        self.link(f"class/net/{name}", path)
        info = [
            {
                "family": "inet6" if ":" in a else "inet",
                "local": a.split("/")[0],
                "prefixlen": int(a.split("/")[1]),
                "scope": "global",
            }
            for a in addresses
        ]
        self.addresses.append(
            {"ifindex": index, "ifname": name, "flags": ["UP"], "addr_info": info}
        )
        return path

    def enslave(self, master: str, *slaves: str) -> None:
        for slave in slaves:
            self.link(f"class/net/{slave}/master", f"class/net/{master}")
            self.link(f"class/net/{slave}/upper_{master}", f"class/net/{master}")
            self.link(f"class/net/{master}/lower_{slave}", f"class/net/{slave}")

    def bond(self, name: str, *slaves: str, **more) -> None:
        self.virtual(name, devtype="bond", flags=0x1403, **more)
        self.write(f"class/net/{name}/bonding/mode", "802.3ad 4")
        self.write(f"class/net/{name}/bonding/slaves", " ".join(slaves))
        self.enslave(name, *slaves)
        self.write("class/net/bonding_masters", name)

    def vlan(self, name: str, lower: str, **more) -> None:
        self.virtual(name, devtype="vlan", **more)
        self.link(f"class/net/{name}/lower_{lower}", f"class/net/{lower}")
        self.link(f"class/net/{lower}/upper_{name}", f"class/net/{name}")

    def hca(self, name: str, device: str = "", node_type: str = "1: CA") -> str:
        path = f"{device}/infiniband/{name}" if device else f"devices/virtual/infiniband/{name}"
        self.write(f"{path}/node_type", node_type)
        self.write(f"{path}/node_guid", "0c42:a103:0065:5c6e")
        self.write(f"{path}/fw_ver", "20.31.1014")
        if device:
            self.link(f"{path}/device", device)
        self.link(f"class/infiniband/{name}", path)
        return path

    def port(
        self,
        hca: str,
        number: int,
        layer: str,
        rate: str,
        state="4: ACTIVE",
        phys="5: LinkUp",
        lid=0,
        sm_lid=0,
        gids=(),
        table=16,
    ) -> None:
        """`gids`: {index: (value, type text, net device)}; the table's other entries are empty."""
        at = f"class/infiniband/{hca}/ports/{number}"
        for key, value in {
            "link_layer": layer,
            "rate": rate,
            "state": state,
            "phys_state": phys,
            "lid": hex(lid),
            "sm_lid": hex(sm_lid),
            "cap_mask": "0x2651e848",
            "counters/port_xmit_data": 1,
        }.items():
            self.write(f"{at}/{key}", value)
        gids = dict(gids)
        for i in range(table):
            value, kind, ndev = gids.get(i, (EMPTY_GID, "", ""))
            self.write(f"{at}/gids/{i}", value)
            self.write(f"{at}/gid_attrs/types/{i}", kind)
            self.write(f"{at}/gid_attrs/ndevs/{i}", ndev)

    def ib_port(
        self,
        hca,
        number=1,
        guid="0c42:a103:0065:5c6e",
        prefix=DEFAULT_PREFIX,
        rate="200 Gb/sec (4X HDR)",
        **more,
    ) -> None:
        self.port(
            hca,
            number,
            "InfiniBand",
            rate,
            gids={0: (f"{prefix}:{guid}", "IB/RoCE v1", "")},
            table=8,
            **more,
        )

    def roce_port(self, hca, netdev, *ipv4, number=1, rate="100 Gb/sec (2X HDR)", **more) -> None:
        """Make a RoCE port with the GID table that Linux fills.

        Link-local v1 and v2 entries come first, then a v1 and a v2 entry for each address.
        """
        values = [f"{DEFAULT_PREFIX}:0e42:a1ff:fe65:5c6e", *map(mapped, ipv4)]
        texts = ("IB/RoCE v1", "RoCE v2")
        gids = {
            2 * i + t: (value, texts[t], netdev) for i, value in enumerate(values) for t in (0, 1)
        }
        self.port(hca, number, "Ethernet", rate, gids=gids, **more)

    def save_addresses(self) -> Path:
        """Write ip_addr.json; returns the root."""
        (self.root / "ip_addr.json").write_text(json.dumps(self.addresses))
        return self.root


def copy_without_links(source: Path, target: Path) -> Path:
    """Copy a tree as `cp -L` copies the needed parts of class/, so that no link remains.

    Of links to other devices (lower_*, virtfn*, ...) only empty folders remain: they lead round in circles.
    """
    elsewhere = ("lower_", "upper_", "virtfn", "driver", "usb")

    def copy(at: Path, to: Path, depth: int) -> None:
        if at.is_dir():
            to.mkdir(parents=True)
            if at.name.startswith(elsewhere):
                return
            for child in sorted(at.iterdir()):
                if child.exists() and (depth > 0 or not child.is_dir()):
                    copy(child, to / child.name, depth - 1)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(at.read_bytes())

    for kind, depth in (("net", 4), ("infiniband", 6)):
        if (source / "class" / kind).exists():
            copy(source / "class" / kind, target / "class" / kind, depth)
    if (source / "ip_addr.json").exists():
        (target / "ip_addr.json").write_bytes((source / "ip_addr.json").read_bytes())
    return target


# ---- cases ----

IB_PCI = (
    "0000:0c:00.0",
    "0000:12:00.0",
    "0000:4b:00.0",
    "0000:54:00.0",
    "0000:8d:00.0",
    "0000:94:00.0",
    "0000:ba:00.0",
    "0000:cc:00.0",
)


def dgx_a100(root) -> Path:
    """Write a DGX A100.

    It has 8 InfiniBand HCAs (mlx5_0-3, 6-9), a dual-port storage HCA in Ethernet mode (mlx5_4, 5),
    2 igb ports and a BMC USB port.
    """
    t = Sysfs(root)
    for n, (hca, address) in enumerate(zip((0, 1, 2, 3, 6, 7, 8, 9), IB_PCI)):
        device = t.pci(address, "mlx5_core", numa=[3, 3, 1, 1, 7, 7, 5, 5][n])
        t.hca(f"mlx5_{hca}", device)
        t.net(
            f"ibp{int(address[5:7], 16)}s0",
            device,
            type=32,
            speed=200000,
            mtu=4092,
            addresses=[f"172.16.{n}.11/24"],
        )
        t.ib_port(f"mlx5_{hca}", guid=f"0c42:a103:0065:5c{n:02x}", lid=0x1C + n, sm_lid=1)
    for port, hca in enumerate(("mlx5_4", "mlx5_5")):
        device = t.pci(f"0000:e1:00.{port}", "mlx5_core", numa=7)
        t.hca(hca, device)
        t.net(
            f"enp225s0f{port}",
            device,
            speed=200000 if port == 0 else None,
            operstate="up" if port == 0 else "down",
            carrier=1 - port,
            phys_port_name=f"p{port}",
            addresses=["10.9.0.11/24", "fe80::1/64"] if port == 0 else [],
        )
        if port == 0:
            t.roce_port(hca, "enp225s0f0", "10.9.0.11", rate="200 Gb/sec (4X HDR)")
        else:
            t.port(hca, 1, "Ethernet", "40 Gb/sec (4X QDR)", state="1: DOWN", phys="3: Disabled")
    mgmt = t.pci("0000:e2:00.0", "igb", numa=7, speed="5.0 GT/s PCIe", width=2)
    t.net("enp226s0", mgmt, speed=1000, addresses=["192.168.1.11/24", "fe80::2/64"])
    t.net("enp227s0", t.pci("0000:e3:00.0", "igb", numa=7), operstate="down", carrier=0)
    usb = t.usb(t.pci("0000:23:00.3", "xhci_hcd"), "cdc_ether")
    t.net("enx0a94ef2c1d05", usb, operstate="unknown", speed=-1, addresses=["169.254.0.18/16"])
    t.virtual("docker0", devtype="bridge", operstate="down", carrier=0, addresses=["172.17.0.1/16"])
    return t.save_addresses()


def roce_lag(root) -> Path:
    """Write a ConnectX-6 with both ports in a bond (one HCA, mlx5_bond_0).

    The bond carries a VLAN; the node also has virtual functions and containers.
    """
    t = Sysfs(root)
    pf = [t.pci(f"0000:41:00.{i}", "mlx5_core", numa=2) for i in (0, 1)]
    for i in (0, 1):
        t.net(f"ens1f{i}np{i}", pf[i], speed=100000, flags=0x1803, mtu=9000, phys_port_name=f"p{i}")
    t.bond(
        "bond0",
        "ens1f0np0",
        "ens1f1np1",
        speed=200000,
        mtu=9000,
        addresses=["10.10.0.21/16", "fd10::21/64"],
    )
    t.vlan("bond0.200", "bond0", speed=200000, mtu=9000, addresses=["10.20.0.21/24"])
    t.hca("mlx5_bond_0", pf[0])
    t.roce_port("mlx5_bond_0", "bond0", "10.10.0.21", rate="200 Gb/sec (4X HDR)", table=32)
    for index, kind in ((4, "IB/RoCE v1"), (5, "RoCE v2")):
        at = "class/infiniband/mlx5_bond_0/ports/1"
        t.write(f"{at}/gids/{index}", mapped("10.20.0.21"))
        t.write(f"{at}/gid_attrs/types/{index}", kind)
        t.write(f"{at}/gid_attrs/ndevs/{index}", "bond0.200")
    for i in (0, 1):
        vf = t.pci(f"0000:41:00.{i + 2}", "mlx5_core", numa=2, physfn=pf[0])
        t.hca(f"mlx5_{i + 2}", vf)
        netdev = f"ens1f0v{i}"
        t.net(
            netdev,
            vf,
            speed=100000,
            addresses=["10.30.0.21/24"] if i == 0 else (),
            operstate="up" if i == 0 else "down",
            carrier=1 if i == 0 else None,
        )
        if i == 0:
            t.roce_port("mlx5_2", netdev, "10.30.0.21")
        else:
            t.port(
                "mlx5_3", 1, "Ethernet", "40 Gb/sec (4X QDR)", state="1: DOWN", phys="3: Disabled"
            )
        t.net(f"ens1f0np0_{i}", pf[0], phys_port_name=f"pf0vf{i}", speed=100000)
    t.virtual("docker0", devtype="bridge", addresses=["172.17.0.1/16"])
    t.virtual("veth12ab", speed=10000, iflink=77)
    t.enslave("docker0", "veth12ab")
    t.virtual("calid00d", speed=10000, iflink=3, addresses=["fe80::eeee/64"])
    t.virtual("vethx", speed=10000, iflink=3, addresses=["fe80::eeee/64"])
    t.virtual("dummy0", flags=0x83, operstate="unknown")
    t.virtual("tap0", speed=10)
    t.write("class/net/tap0/tun_flags", "0x1002")
    t.virtual("vxlan.calico", devtype="vxlan", operstate="unknown", addresses=["10.244.1.1/32"])
    return t.save_addresses()


def dual_port(root) -> Path:
    """Write one ConnectX-3 with one PCI function and two ports.

    Port 1 is InfiniBand with its own subnet, port 2 is Ethernet.
    """
    t = Sysfs(root)
    device = t.pci("0000:05:00.0", "mlx4_core", numa=0, speed="8 GT/s", width=8)
    t.hca("mlx4_0", device)
    t.net("ib0", device, type=32, mtu=2044, speed=56000, addresses=["192.168.50.3/24"])
    t.net("ens3d1", device, dev_port=1, speed=40000, addresses=["10.40.0.3/24"])
    t.ib_port("mlx4_0", 1, prefix="fec0:0000:0000:0007", rate="56 Gb/sec (4X FDR)", lid=3, sm_lid=1)
    t.roce_port("mlx4_0", "ens3d1", "10.40.0.3", number=2, rate="40 Gb/sec (4X QDR)")
    return t.save_addresses()


def ports_down(root) -> Path:
    """Write InfiniBand ports in every state short of ACTIVE.

    There is no subnet manager. An Ethernet port has no cable.
    """
    t = Sysfs(root)
    for i, (state, phys) in enumerate(
        (
            ("1: DOWN", "2: Polling"),
            ("2: INIT", "5: LinkUp"),
            ("3: ARMED", "5: LinkUp"),
            ("1: DOWN", "3: Disabled"),
        )
    ):
        device = t.pci(f"0000:{i + 1:02x}:00.0", "mlx5_core", numa=-1)
        t.hca(f"mlx5_{i}", device)
        t.ib_port(
            f"mlx5_{i}",
            state=state,
            phys=phys,
            lid=0 if i != 2 else 9,
            sm_lid=0,
            rate="10 Gb/sec (4X SDR)" if phys != "5: LinkUp" else "100 Gb/sec (4X EDR)",
        )
        t.net(f"ib{i}", device, type=32, mtu=4092, operstate="down", carrier=0)
    t.net("eth0", t.pci("0000:06:00.0", "ixgbe"), operstate="down", carrier=0)
    t.net("eth1", t.pci("0000:06:00.1", "ixgbe"), operstate="down", carrier=None, flags=0x1002)
    return t.save_addresses()


def aws_ena(root) -> Path:
    """Write a cloud node with ENA Ethernet and an EFA device, which is no InfiniBand."""
    t = Sysfs(root)
    t.net(
        "ens5",
        t.pci("0000:00:05.0", "ena", numa=-1, speed="", width=""),
        mtu=9001,
        addresses=["172.31.7.44/20", "fe80::4a:b/64"],
    )
    efa = t.pci("0000:00:06.0", "efa", numa=0)
    t.hca("rdmap0s6", efa, node_type="0: <unknown>")
    t.port("rdmap0s6", 1, "Unspecified", "100 Gb/sec (4X EDR)")
    return t.save_addresses()


def container(root) -> Path:
    """Write a pod with two veths, eth0 first.

    The peers in the host have the same number by chance or not.
    """
    t = Sysfs(root)
    t.virtual("eth0", speed=10000, iflink=41, addresses=["10.244.1.7/24", "fe80::7/64"])
    t.virtual("net1", speed=10000, addresses=["10.55.0.7/24"])
    t.virtual("tunl0", type=768, flags=0x80, operstate="down")
    return t.save_addresses()


CASES = {f.__name__: f for f in (dgx_a100, roce_lag, dual_port, ports_down, aws_ena, container)}
