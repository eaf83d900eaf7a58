"""Sysfs trees of emulated nodes: holmes reads the NICs of a node there instead of in /sys.

HOLMES_SYSFS names the tree of a node. The files and their texts are as in Linux
(drivers/infiniband/core/sysfs.c and net/core/net-sysfs.c):

    devices/pci0000:00/0000:17:00.0/net/eth0/...
    devices/pci0000:00/0000:31:00.0/{numa_node, net/ib0/..., infiniband/mlx5_0/ports/1/...}
    class/net/{eth0, ib0}, class/infiniband/mlx5_0          links into devices/
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from holmes_ext.cluster.nic import KINDS
from holmes_lab.network.shaping import MAX_NODES, MTU, LabNic, LabNode

#: PCI address of the Ethernet NIC, and PCI bus of the first HCA (host channel adapter, a fast NIC). Further
#: HCAs (rails) have the next buses.
_ETHERNET_PCI, _HCA_BUS = "0000:17:00.0", 0x31
#: InfiniBand generation -> Gb/s of a lane. A port has 4 lanes.
_LANE_GBPS = {
    "SDR": 2.5,
    "DDR": 5,
    "QDR": 10,
    "FDR": 14,
    "EDR": 25,
    "HDR": 50,
    "NDR": 100,
    "XDR": 200,
}
#: PCI identifiers of a ConnectX-6: vendor NVIDIA (Mellanox), device MT28908, network controller.
_PCI_IDENTIFIERS = {"vendor": "0x15b3", "device": "0x101b", "class": "0x020000"}
_HCA_TYPE = "MT4123"  # part number of ConnectX-6 that its driver shows
_FIRMWARE = "20.31.1014"  # a released firmware of it
#: Pattern of kernel drivers in KINDS -> driver of an emulated NIC. Kinds without a driver have _DRIVER.
_DRIVER_OF_PATTERN = {"hfi[12]": "hfi1", "*cxi*": "cxi_ss1"}
_DRIVER = "mlx5_core"
#: Kind of NIC -> text of its node_type, if it is no channel adapter ("1: CA").
_NODE_TYPES = {"efa": "7: unspecified", "erdma": "4: RNIC", "plugin": "7: unspecified"}
#: First bytes of an IPoIB address: flags, and the number of a queue pair (any number would do).
_IPOIB_QUEUE_PAIR = "00:00:10:49:"
#: Hardware types of net devices (linux/if_arp.h).
_ETHER, _INFINIBAND = 1, 32
_GID_TABLE_SIZE = 8


def write_tree(root: Path, node: LabNode) -> None:
    """Write the sysfs tree of a node with all links up, and the output of `ip -j addr` as ip_addr.json.

    holmes reads the NICs of the emulated node from this tree in place of /sys. InfiniBand, RoCE and
    Ethernet NICs are ConnectX-6 adapters of NVIDIA (driver mlx5_core), since these can have any link layer.
    NICs of other kinds have the driver of their kind. All of them have an RDMA port and a network
    device, also those that have only one of the two in reality (EFA, Slingshot, gVNIC): the lab's
    network plugin finds NICs by the first and moves data over the second.

    Args:
        root: Folder of the tree. It is created.
        node: The node with its NICs.
    """
    addresses = []
    for number, nic in enumerate(node.nics, start=2):  # interface 1 is the loopback
        address = (
            _ETHERNET_PCI if nic.kind == "ethernet" else f"0000:{_HCA_BUS + nic.rail:02x}:00.0"
        )
        pci = root / "devices/pci0000:00" / address
        _write(pci, {"numa_node": "0", **_PCI_IDENTIFIERS})
        driver = _driver_of(nic.kind)
        _write(pci, {"uevent": f"DRIVER={driver}\nPCI_SLOT_NAME={pci.name}"})
        (root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        _link(pci / "driver", root / "bus/pci/drivers" / driver)
        _write(
            pci / "net" / nic.name,
            {**_net_files(nic), "ifindex": str(number), "iflink": str(number)},
        )
        _write(pci / "net" / nic.name, {"uevent": f"INTERFACE={nic.name}\nIFINDEX={number}"})
        inet = {"family": "inet", "local": nic.address, "prefixlen": nic.prefix, "label": nic.name}
        inet["scope"] = "global"
        addresses.append({"ifindex": number, "ifname": nic.name, "mtu": MTU, "addr_info": [inet]})
        _link(pci / "net" / nic.name / "device", pci)
        _link(root / "class/net" / nic.name, pci / "net" / nic.name)
        if nic.kind != "ethernet":
            device = pci / "infiniband" / nic.hca
            node_type = _NODE_TYPES.get(nic.kind, "1: CA")
            _write(device, {"node_type": node_type, "node_guid": _groups(_guid(nic))})
            _write(device, {"fw_ver": _FIRMWARE, "hca_type": _HCA_TYPE})
            _link(device / "device", pci)
            _write_port(device / "ports/1", node, nic)
            _link(root / "class/infiniband" / nic.hca, device)
        set_link(root, nic, up=True)
    _write(root, {"ip_addr.json": json.dumps(addresses)})


def _driver_of(kind: str) -> str:
    """Return the kernel driver of an emulated NIC."""
    pattern = KINDS[kind].driver or KINDS[kind].netdev_driver
    return _DRIVER_OF_PATTERN.get(pattern, pattern) or _DRIVER


def set_link(root: Path, nic: LabNic, up: bool) -> None:
    """Write into an emulated node's imitation of /sys whether the cable of a NIC is plugged in.

    Args:
        root: Folder that holmes reads in place of /sys on this node (write_tree()).
        nic: A NIC of the node.
        up: Whether its cable is plugged in.
    """
    _write(
        root / "class/net" / nic.name,
        {"operstate": "up" if up else "down", "carrier": "1" if up else "0"},
    )
    if nic.kind != "ethernet":
        state, physical = ("4: ACTIVE", "5: LinkUp") if up else ("1: DOWN", "2: Polling")
        _write(
            root / "class/infiniband" / nic.hca / "ports/1",
            {"state": state, "phys_state": physical},
        )


def _net_files(nic: LabNic) -> dict[str, str]:
    """Return name -> content of the files of a network interface, without those about its link.

    An InfiniBand NIC has an IPoIB interface. Its address has 20 bytes: 4 for a queue pair, and 16
    for the GID (the subnet prefix and the GUID of the port). Other interfaces have a MAC
    address.
    """
    infiniband = KINDS[nic.kind].infiniband
    if infiniband:
        gid_bytes = _hex_bytes(_subnet_prefix(nic)) + _hex_bytes(_guid(nic))
        hardware_address = _IPOIB_QUEUE_PAIR + ":".join(gid_bytes)
    else:
        hardware_address = nic.mac
    return {
        "type": str(_INFINIBAND if infiniband else _ETHER),
        "speed": str(round(nic.nominal_bps / 1e6)),
        "mtu": "2044" if infiniband else str(MTU),  # 2044: usual for IPoIB
        "address": hardware_address,
        "flags": "0x1003",  # up, broadcast, multicast
        "dev_id": "0x0",
        "dev_port": "0",
    }


def _write_port(port: Path, node: LabNode, nic: LabNic) -> None:
    """Write the files of the port of a fast NIC.

    An InfiniBand port has a LID (local identifier) and one GID. Any other port has GIDs of its
    link-local and of its IPv4 address, each for RoCE v1 and v2.

    Args:
        port: Folder of the port.
        node: The node with its number in the lab.
        nic: The NIC with its number among the fast NICs of its node (rail).
    """
    infiniband = KINDS[nic.kind].infiniband
    # LIDs are unique in a subnet. LID 1 is that of the subnet manager, the ports of rail 0 follow,
    # then those of rail 1, and so on.
    own_lid = 2 + node.index + MAX_NODES * nic.rail
    lid, sm_lid = (f"0x{own_lid:x}", "0x1") if infiniband else ("0x0", "0x0")
    layer = KINDS[nic.kind].layer or "Unspecified"
    rate = _rate_text(nic.nominal_bps)
    _write(port, {"link_layer": layer, "rate": rate, "lid": lid, "sm_lid": sm_lid, "sm_sl": "0"})
    _write(port / "pkeys", {"0": "0xffff"})
    if infiniband:
        # A GID has 128 bits: the subnet prefix, and the GUID of the port. The kernel shows the type
        # of an InfiniBand GID with the text "IB/RoCE v1".
        gids = [(_subnet_prefix(nic) << 64 | _guid(nic), "IB/RoCE v1")]
    else:
        link_local = 0xFE80 << 112 | _guid(nic)  # the IPv6 address fe80::GUID
        # The IPv4 address as an IPv6 address (::ffff:a.b.c.d).
        mapped = 0xFFFF << 32 | int.from_bytes(bytes(map(int, nic.address.split("."))), "big")
        gids = [(gid, kind) for gid in (link_local, mapped) for kind in ("IB/RoCE v1", "RoCE v2")]
        _write(port / "gid_attrs/ndevs", {str(index): nic.name for index in range(len(gids))})
    _write(port / "gid_attrs/types", {str(index): kind for index, (_, kind) in enumerate(gids)})
    empty = [(0, "")] * (_GID_TABLE_SIZE - len(gids))
    _write(
        port / "gids",
        {str(index): _groups(gid, count=8) for index, (gid, _) in enumerate(gids + empty)},
    )


def _rate_text(bps: int) -> str:
    """Return a rate in the form of the kernel, such as "200 Gb/sec (4X HDR)".

    A rate that no generation of InfiniBand has is called SDR.

    Args:
        bps: Rate in bits/s.
    """
    name = next((name for name, lane in _LANE_GBPS.items() if bps == 4 * lane * 1e9), "SDR")
    return f"{bps / 1e9:g} Gb/sec (4X {name})"


def _subnet_prefix(nic: LabNic) -> int:
    """Return the subnet prefix of a NIC's network, the upper 64 bits of its GIDs.

    Each network has a site-local prefix of its own, because the default fe80:: would not identify it.
    """
    return 0xFEC0 << 48 | (nic.number + 1)


def _guid(nic: LabNic) -> int:
    """Return the GUID of a NIC: the EUI-64 of its MAC address."""
    octets = bytes.fromhex(nic.mac.replace(":", ""))
    return int.from_bytes(bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:], "big")


def _groups(value: int, count: int = 4) -> str:
    """Return a number as `count` groups of four hex digits, such as "fec0:0000:0000:0001"."""
    digits = f"{value:0{4 * count}x}"
    return ":".join(digits[start : start + 4] for start in range(0, len(digits), 4))


def _hex_bytes(value: int) -> list[str]:
    """Return the 8 bytes of a number, each as two hexadecimal digits."""
    return [f"{octet:02x}" for octet in value.to_bytes(8, "big")]


def _write(directory: Path, files: dict[str, str]) -> None:
    """Write files into a folder, and create the folder if it does not exist.

    Args:
        directory: The folder.
        files: Name -> content. A newline is added to it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text + "\n")


def _link(path: Path, target: Path) -> None:
    """Make a symbolic link. It is relative, so that the tree can be copied."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
