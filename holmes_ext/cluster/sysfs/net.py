"""Reader of class/net: the network devices of a /sys tree, and reasons not to use some of them.

Each device has a category:

    physical  the device has a `device` link (PCI, virtio, a virtual function, ...)
    stacked   bond, VLAN, bridge, team, macvlan: `lower_NAME` links name the devices below. A
              macvlan or ipvlan in a container has its lower device in another namespace and looks
              like a veth
    vrf       a routing table; the devices in it are used as without it
    veth      a cable to another network namespace: the NIC of a container, or of a node of `holmes
              lab`
    virtual   all other devices without a `device` link: dummy, tap, tunnels, switches

Layout: drivers/net/core/net-sysfs.c of Linux and Documentation/ABI/testing/sysfs-class-net.

Default rules exclude devices that a training job should not use, with a reason in `Nic.skipped`. A
user who names a NIC in `include` overrules them. /sys does not show which network a NIC is cabled
to (such as storage), so the rules use names, and the user excludes other NICs with `exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from holmes_ext.cluster.sysfs.tree import Tree
from holmes_ext.errors import HolmesError

#: Hardware type of a network device (linux/if_arp.h): ARPHRD_ETHER.
ETHERNET = 1
#: Hardware type of a network device (linux/if_arp.h): ARPHRD_INFINIBAND, IP over InfiniBand.
INFINIBAND = 32
_UP = 0x1  # IFF_UP
_OPERSTATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
#: phys_port_name of a device that represents a virtual function inside a NIC's switch.
_REPRESENTOR = re.compile(r"(c[0-9]+)?pf[0-9]+(vf|sf)[0-9]+")
#: SPEED_UNKNOWN as different kernels print it.
_UNKNOWN_SPEEDS = (-1, 65535, 4294967295)
#: Upper limit of a speed in Mb/s.
_FASTEST_MBPS = 10**8
#: GT/s of a PCIe generation -> share of the transferred bits that is data (line coding).
_PCIE_CODING = {
    2.5: 8 / 10,
    5.0: 8 / 10,
    8.0: 128 / 130,
    16.0: 128 / 130,
    32.0: 128 / 130,
    64.0: 242 / 256,
}


@dataclass(frozen=True)
class Hardware:
    """Hardware behind a network device or an HCA: a PCI function, or a device on another bus."""

    max_rate_bps: int = 0  # rate of the PCIe link, 0 if unknown (no PCIe, a virtual function)
    numa: int = -1  # NUMA node, -1 if unknown
    pci: str = ""
    driver: str = ""
    parent: str = ""  # virtual function: PCI address of its physical function


@dataclass(frozen=True)
class NetDevice(Hardware):
    """Network device of a /sys tree, such as "eth0", with the properties of its hardware.

    A device without hardware, such as a bond, has the defaults of Hardware.
    """

    name: str = ""
    type: int = ETHERNET
    category: str = "virtual"  # physical, bond, team, vlan, bridge, macvlan, vrf, veth or virtual
    up: bool = False
    state_text: str = ""  # state in the kernel's words
    speed_bps: int = 0
    mtu: int = 0
    master: str = ""  # bond, bridge, ... that has this device as a member
    lowers: tuple[str, ...] = ()  # devices below this device
    port_index: int = 0  # port of the HCA that the device belongs to, from 0
    usb: bool = False
    wireless: bool = False
    representor: bool = False  # represents a virtual function inside the NIC's switch


def read_net_devices(tree: Tree) -> dict[str, NetDevice]:
    """Return the Ethernet and IPoIB network devices of a tree by name.

    A device that disappears while the tree is read, because a container stops, is left out.

    Raises:
        HolmesError: a file of a device is damaged.
    """
    devices = {}
    for name in tree.names("class/net"):
        path = f"class/net/{name}"
        if name == "bonding_masters":  # a file of the bonding driver, no device
            continue
        real_path = tree.resolve(path)
        try:
            if tree.needed_number(f"{path}/type") in (ETHERNET, INFINIBAND):
                devices[name] = _read_device(tree, name, real_path)
        except HolmesError:
            # The device may have disappeared since its name was listed.
            if tree.is_dir(real_path):
                raise
    return devices


def _read_device(tree: Tree, name: str, real_path: str) -> NetDevice:
    """Return a network device of a tree.

    Args:
        tree: The /sys tree.
        name: Name of the device.
        real_path: Path of the device after all links.

    Raises:
        HolmesError: a file of the device is damaged.
    """
    path = f"class/net/{name}"
    names = tree.names(path)  # files and folders of the device
    slaves = ""
    if "bonding" in names:
        slaves = tree.text(f"{path}/bonding/slaves") or ""
    flags = tree.needed_number(f"{path}/flags", "0x[0-9a-f]{1,8}")
    carrier = tree.number(f"{path}/carrier", "[01]")
    speed = tree.number(f"{path}/speed")
    devtype = tree.uevent(path).get("DEVTYPE", "")
    is_physical = "device" in names
    if is_physical:
        category = "physical"
        hardware = read_hardware(tree, path)
        bus_uevent = tree.uevent(f"{path}/device")
    else:
        category = _category_without_device_link(tree, path, names, devtype, speed)
        hardware = Hardware(driver=category if category != "virtual" else "")
        bus_uevent = {}
    state = _read_state(tree, path, flags, carrier)
    is_usb = bus_uevent.get("DEVTYPE") == "usb_interface" or "/usb" in real_path
    port_name = tree.text(f"{path}/phys_port_name") or ""
    members = tree.checked_names(f"{path}/bonding/slaves", slaves.split())
    return NetDevice(
        **vars(hardware),
        name=name,
        type=tree.needed_number(f"{path}/type"),
        category=category,
        up=state.up,
        state_text=state.text,
        speed_bps=_speed_bps(tree, path, speed) if state.up else 0,
        mtu=tree.needed_number(f"{path}/mtu", "[0-9]{1,10}"),
        master=tree.link_name(f"{path}/master", "INTERFACE") if "master" in names else "",
        lowers=tuple(dict.fromkeys([*members, *_lowers(names)])),
        port_index=_port_index(tree, path),
        usb=is_physical and is_usb,
        wireless=devtype == "wlan" or "wireless" in names,
        representor=_REPRESENTOR.fullmatch(port_name) is not None,
    )


def _lowers(names: Sequence[str]) -> list[str]:
    """Return the devices below a network device such as a bond: X for each file "lower_X" in `names`."""
    return [name.removeprefix("lower_") for name in names if name.startswith("lower_")]


def _category_without_device_link(
    tree: Tree, path: str, names: Sequence[str], devtype: str, speed: int | None
) -> str:
    """Return the category of a network device without a `device` link (it is not physical).

    Categories are "bond", "vlan", "bridge", "team", "macvlan", "vrf", "veth" (one end of a cable
    between network namespaces), and "virtual" for all other devices.

    Args:
        tree: The /sys tree.
        path: Path of the device in the tree.
        names: Names of the files of the device.
        devtype: DEVTYPE in the uevent of the device, "" if it has none.
        speed: Content of the device's file `speed`, None if it has none.
    """
    if devtype in ("bond", "vlan", "bridge", "macvlan", "vrf"):
        return devtype
    if devtype == "ipvlan":  # like a macvlan, it shares a physical device with the host
        return "macvlan"
    if "bonding" in names:
        return "bond"
    lowers = _lowers(names)
    if not devtype and lowers:
        # A team is the master of the devices below it; a macvlan only uses them.
        name = path.rpartition("/")[2]
        masters = [tree.link_name(f"class/net/{lower}/master", "INTERFACE") for lower in lowers]
        return "team" if name in masters else "macvlan"
    if not devtype and "tun_flags" not in names:
        # A veth is one end of a virtual cable. It has two signs. `iflink` is the number of the
        # other end, not of the device itself; but the other end is in another network namespace,
        # where it may have the same number. A veth also has a speed, unlike dummy and ifb devices.
        peer = tree.needed_number(f"{path}/iflink")
        if peer != tree.needed_number(f"{path}/ifindex") or speed is not None:
            return "veth"
    return "virtual"


class _State(NamedTuple):
    """State of a network device: whether it can transfer data, and if not, the reason."""

    up: bool
    text: str  # "up", "no carrier", "not brought up", or another operstate of Linux


def _read_state(tree: Tree, path: str, flags: int, carrier: int | None) -> _State:
    """Return whether a network device can transfer data, and if not, the reason.

    Args:
        tree: The /sys tree.
        path: Path of the device in the tree.
        flags: Content of the device's file `flags`.
        carrier: Content of the device's file `carrier`, None if it has none.

    Raises:
        HolmesError: operstate is missing or unknown.
    """
    operstate = tree.needed_text(f"{path}/operstate")
    if operstate not in _OPERSTATES:
        raise tree.error(
            f"{path}/operstate",
            f"{operstate!a:.80} is no state that Linux knows ({', '.join(_OPERSTATES)})",
        )
    if not flags & _UP:
        return _State(up=False, text="not brought up")
    if operstate == "up":
        return _State(up=True, text="up")
    # Drivers that do not maintain operstate (some tunnels and virtual NICs) report "unknown".
    if operstate == "unknown" and carrier == 1:
        return _State(up=True, text="up")
    return _State(up=False, text="no carrier" if carrier == 0 else operstate)


def _speed_bps(tree: Tree, path: str, speed: int | None) -> int:
    """Return the rate of a network device in bits/s, 0 if it is unknown.

    Args:
        tree: The /sys tree.
        path: Path of the device in the tree, for the error message.
        speed: Content of the device's file `speed` in Mb/s, None if it has none.

    Raises:
        HolmesError: the content is not a speed.
    """
    if speed is None or speed in _UNKNOWN_SPEEDS:
        return 0
    if not 0 <= speed < _FASTEST_MBPS:
        raise tree.error(f"{path}/speed", f"{speed} is no speed in Mb/s")
    return speed * 10**6


def _port_index(tree: Tree, path: str) -> int:
    """Return the port of the HCA that a network device belongs to, from 0.

    Args:
        tree: The /sys tree.
        path: Path of the network device in the tree.
    """
    # The second argument is the pattern that the content must match.
    index = tree.number(f"{path}/dev_port", "[0-9]{1,4}")
    if not index:  # before Linux 3.15, only dev_id differs between the ports of a device
        index = tree.number(f"{path}/dev_id", "0x[0-9a-f]{1,4}")
    return index or 0


def top_device(name: str, devices: dict[str, NetDevice]) -> str:
    """Return the network device that sockets bind to: the device above a device, or the device itself.

    That device has the IP address. It is the topmost of the masters: a bond, team or bridge that
    has the device as a member. Masters without an address of their own do not count: a virtual
    switch (Open vSwitch) or a routing table (vrf).

    Args:
        name: Name of the device.
        devices: All network devices by name.
    """
    visited = set()
    while name not in visited:
        visited.add(name)
        master = devices.get(devices[name].master)
        # On Azure, a physical master is a synthetic NIC (hv_netvsc) above a virtual function.
        if master is not None and master.category in ("bond", "team", "bridge", "physical"):
            name = master.name
    return name


def physical_below(device: NetDevice, devices: dict[str, NetDevice]) -> tuple[NetDevice, ...]:
    """Return the physical devices below a device, or the device itself if it is physical.

    Args:
        device: A network device.
        devices: All network devices by name.
    """
    visited: dict[str, NetDevice] = {}
    pending = [device.name]
    while pending:
        name = pending.pop()
        if name in devices and name not in visited:
            visited[name] = devices[name]
            pending.extend(devices[name].lowers)
    return tuple(found for found in visited.values() if found.category == "physical")


def read_hardware(tree: Tree, path: str) -> Hardware:
    """Return the PCI function, or the device on another bus, of a network device or an HCA.

    Args:
        tree: The /sys tree.
        path: Path of the network device or HCA. It has a `device` link.

    Raises:
        HolmesError: a file is damaged.
    """
    device = f"{path}/device"
    tree.resolve(device)  # raises if the link points to nothing
    # The second argument is the pattern that the content must match.
    numa_node = tree.number(f"{device}/numa_node", "-1|[0-9]{1,4}")
    # link_name() returns the last part of a link's target. In captured trees, where links may be
    # files in uevent format, its second argument names the key with the same value.
    driver = tree.uevent(device).get("DRIVER", "") or tree.link_name(f"{device}/driver", "DRIVER")
    if driver:
        tree.checked_names(f"{device}/uevent", [driver])
    return Hardware(
        max_rate_bps=_pcie_bps(tree, device),
        numa=-1 if numa_node is None else numa_node,
        pci=tree.pci_address(device),
        driver=driver,
        parent=tree.link_name(f"{device}/physfn", "PCI_SLOT_NAME"),
    )


def _pcie_bps(tree: Tree, device: str) -> int:
    """Return the rate of a device's PCIe link in bits/s, 0 if it is unknown.

    Args:
        tree: The /sys tree.
        device: Path of the PCI device in the tree.
    """
    speed = tree.text(f"{device}/current_link_speed") or ""
    width = tree.text(f"{device}/current_link_width") or ""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?", speed)
    if not match or not re.fullmatch("[0-9]{1,2}", width, re.ASCII):
        return 0
    transfers = float(match[1])  # GT/s of one lane
    # speed x share of data x lanes
    return int(transfers * 1e9 * _PCIE_CODING.get(transfers, 0) * int(width))


#: Reason -> names that administrators and systems give to NICs that are not for training traffic.
NAMES = {
    "storage (by its name)": ("*storage*", "stor[0-9]*", "san[0-9]*", "iscsi*", "nfs[0-9]*"),
    "management (by its name)": ("idrac*", "ilo[0-9]*", "bmc*", "ipmi*", "mgmt*", "usb[0-9]*"),
    "container network (by its name)": (
        "docker*",
        "cali*",
        "cilium_*",
        "lxc*",
        "virbr*",
        "cni[0-9]*",
    ),
}
#: Drivers of a baseboard controller's USB link to the host.
_USB_DRIVERS = ("cdc_ether", "cdc_ncm", "cdc_subset", "rndis_host", "cdc_eem")


def reason_by_name(*names: str) -> str:
    """Return why a NIC with these names is not for training traffic, "" if no name shows a reason.

    Args:
        names: Names of the NIC, such as those of its network devices ("storage0", "docker0").
    """
    for reason, patterns in NAMES.items():
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return reason
    return ""


def reason_to_skip(
    device: NetDevice, devices: dict[str, NetDevice], has_address: bool | None
) -> str:
    """Return the reason why jobs do not use an Ethernet device by default, "" if they do.

    Args:
        device: The device.
        devices: All network devices by name.
        has_address: The device has an IP address; None if addresses are unknown.
    """
    if device.usb or device.driver in _USB_DRIVERS:
        return "management (USB/BMC)"
    if device.wireless:
        return "wireless"
    if device.representor:
        return "representor of a virtual function"
    if device.master:
        # Sockets belong on the bond or bridge. In a vrf, they belong on the member.
        master = devices.get(device.master)
        if master is None or master.category != "vrf":
            return f"member of {device.master}"
    by_name = reason_by_name(device.name)
    if by_name:
        return by_name
    if device.category in ("bond", "team", "vlan", "bridge"):
        # Without a physical NIC below, the device connects containers of this node (docker0).
        has_physical = bool(physical_below(device, devices))
        return "" if has_physical else f"{device.category} without a physical NIC"
    if device.category in ("veth", "macvlan"):
        # A container's NIC has an address; the host's end of a container's cable has none.
        return f"{device.category} without an address" if has_address is False else ""
    return "" if device.category == "physical" else "virtual device"
