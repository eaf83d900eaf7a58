"""class/net: the net devices of a tree, what each one is, and which a training job should leave alone.

    physical  has a `device` link (PCI, virtio, a virtual function, ...)
    stacked   bond, VLAN, bridge, team, macvlan: the devices below it are its `lower_NAME` links (a macvlan or
              ipvlan in a container has its lower device in another namespace, and looks like a veth)
    vrf       a routing table; devices under it stay what they are
    veth      a cable to another network namespace: what containers (and the lab) have for a NIC
    virtual   all others without `device`: dummy, tap, tunnels, switches

Layout: drivers/net/core/net-sysfs.c of Linux and Documentation/ABI/testing/sysfs-class-net.

A default rule sets a NIC aside (`Nic.skipped`), with its reason in one line; naming the NIC in `include`
overrules that. What a NIC is cabled to (storage) cannot be known from /sys: `exclude` is for what names do
not say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holmes_ext.cluster.sysfs.tree import Tree
from holmes_ext.errors import HolmesError

ETHERNET, INFINIBAND = 1, 32  # ARPHRD_ETHER, ARPHRD_INFINIBAND (IPoIB) of linux/if_arp.h
_UP = 0x1  # IFF_UP
_OPERSTATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
_REPRESENTOR = re.compile(r"(c[0-9]+)?pf[0-9]+(vf|sf)[0-9]+")
_UNKNOWN_SPEEDS = (-1, 65535, 4294967295)  # SPEED_UNKNOWN as different kernels print it
# Line coding of each PCIe generation: the share of the GT/s that carries data
_PCIE_CODING = {
    2.5: 8 / 10,
    5.0: 8 / 10,
    8.0: 128 / 130,
    16.0: 128 / 130,
    32.0: 128 / 130,
    64.0: 242 / 256,
}


@dataclass(frozen=True)
class Function:
    """The PCI function (or other bus device) behind a port, in the words of cluster/nic.py."""

    max_rate_bps: int = (
        0  # what its PCIe link carries now; 0 when unknown (no PCIe, a virtual function)
    )
    numa: int = -1
    pci: str = ""
    driver: str = ""
    parent: str = ""  # PCI address of the physical function of a virtual one


@dataclass(frozen=True)
class NetDevice(Function):
    name: str = ""
    type: int = ETHERNET
    what: str = "virtual"  # physical, bond, team, vlan, bridge, macvlan, vrf, veth or virtual
    up: bool = False
    state_text: str = ""
    speed_bps: int = 0
    mtu: int = 0
    master: str = ""  # the device that has taken it in (bond, bridge, ...)
    lowers: tuple[str, ...] = ()  # the devices below it
    port_index: int = 0  # which port of its HCA it belongs to
    usb: bool = False
    wireless: bool = False
    representor: bool = False


def read_net_devices(tree: Tree) -> dict[str, NetDevice]:
    """The Ethernet and IPoIB net devices of a tree by name, without those that vanish meanwhile (a container
    stops). HolmesError names the damaged file."""
    devices = {}
    for name in tree.names("class/net"):
        path = f"class/net/{name}"
        if name == "bonding_masters":  # a file of the bonding driver, no device
            continue
        real = tree.resolve(path)
        try:
            if tree.needed_number(f"{path}/type") in (ETHERNET, INFINIBAND):
                devices[name] = _read_device(tree, name, real)
        except HolmesError:
            if tree.is_dir(real):
                raise
    return devices


def _read_device(tree: Tree, name: str, real: str) -> NetDevice:
    path = f"class/net/{name}"
    names = tree.names(path)
    slaves = tree.text(f"{path}/bonding/slaves") or "" if "bonding" in names else ""
    flags = tree.needed_number(f"{path}/flags", "0x[0-9a-f]{1,8}")
    carrier = tree.number(f"{path}/carrier", "[01]")
    speed = tree.number(f"{path}/speed")
    devtype = tree.uevent(path).get("DEVTYPE", "")
    physical = "device" in names
    what = "physical" if physical else _what(tree, path, names, devtype, speed)
    function = (
        read_function(tree, path)
        if physical
        else Function(driver=what if what != "virtual" else "")
    )
    up, state_text = _state(tree, path, flags, carrier)
    about = tree.uevent(f"{path}/device") if physical else {}
    port_name = tree.text(f"{path}/phys_port_name") or ""
    return NetDevice(
        **vars(function),
        name=name,
        type=tree.needed_number(f"{path}/type"),
        what=what,
        up=up,
        state_text=state_text,
        speed_bps=_speed(tree, path, speed) if up else 0,
        mtu=tree.needed_number(f"{path}/mtu", "[0-9]{1,10}"),
        master=tree.link_name(f"{path}/master", "INTERFACE") if "master" in names else "",
        lowers=tuple(
            dict.fromkeys(
                [*tree.devices(f"{path}/bonding/slaves", slaves.split()), *_lowers(names)]
            )
        ),
        port_index=_port_index(tree, path),
        usb=physical and (about.get("DEVTYPE") == "usb_interface" or "/usb" in real),
        wireless=devtype == "wlan" or "wireless" in names,
        representor=_REPRESENTOR.fullmatch(port_name) is not None,
    )


def _lowers(names: Sequence[str]) -> list[str]:
    return [name.removeprefix("lower_") for name in names if name.startswith("lower_")]


def _what(tree: Tree, path: str, names: Sequence[str], devtype: str, speed: int | None) -> str:
    if devtype in ("bond", "vlan", "bridge", "macvlan", "vrf"):
        return devtype
    if devtype == "ipvlan":
        return "macvlan"
    if "bonding" in names:
        return "bond"
    lowers = _lowers(names)
    if not devtype and lowers:  # a team takes in what is below it; a macvlan only stands on it
        name = path.rpartition("/")[2]
        taken = any(tree.link_name(f"class/net/{n}/master", "INTERFACE") == name for n in lowers)
        return "team" if taken else "macvlan"
    # veth has no mark of its own in /sys. Its peer is another device (iflink), or, where both happen to have
    # the same number in two namespaces, it still claims a speed, which dummy and ifb do not.
    if not devtype and "tun_flags" not in names:
        peer = tree.needed_number(f"{path}/iflink")
        if peer != tree.needed_number(f"{path}/ifindex") or speed is not None:
            return "veth"
    return "virtual"


def _state(tree: Tree, path: str, flags: int, carrier: int | None) -> tuple[bool, str]:
    oper = tree.needed_text(f"{path}/operstate")
    if oper not in _OPERSTATES:
        raise tree.error(
            f"{path}/operstate",
            f"{oper!a:.80} is no state that Linux knows ({', '.join(_OPERSTATES)})",
        )
    if not flags & _UP:
        return False, "not brought up"
    # Drivers that do not keep operstate (some tunnels and virtual NICs) say "unknown": then carrier counts.
    if oper == "up" or (oper == "unknown" and carrier == 1):
        return True, "up"
    return False, "no carrier" if carrier == 0 else oper


def _speed(tree: Tree, path: str, speed: int | None) -> int:
    if speed is None or speed in _UNKNOWN_SPEEDS:
        return 0
    if not 0 <= speed < 10**8:
        raise tree.error(f"{path}/speed", f"{speed} is no speed in Mb/s")
    return speed * 10**6


def _port_index(tree: Tree, path: str) -> int:
    index = tree.number(f"{path}/dev_port", "[0-9]{1,4}")
    if not index:  # before Linux 3.15 only dev_id told the ports of one device apart
        index = tree.number(f"{path}/dev_id", "0x[0-9a-f]{1,4}")
    return index or 0


def top_device(name: str, devices: dict[str, NetDevice]) -> str:
    """What has taken `name` in at last (a bond, or a bridge over it), to which sockets bind; else `name`. A
    virtual switch (Open vSwitch) is none: it carries no address."""
    seen = set()
    while name not in seen:
        seen.add(name)
        master = devices.get(devices[name].master)
        if master is not None and master.what in ("bond", "team", "bridge", "physical"):
            name = master.name
    return name


def physical_below(device: NetDevice, devices: dict[str, NetDevice]) -> tuple[NetDevice, ...]:
    """The physical devices that a stacked one stands on (itself when it is physical)."""
    seen, below = {}, [device.name]
    while below:
        name = below.pop()
        if name in devices and name not in seen:
            seen[name] = devices[name]
            below.extend(devices[name].lowers)
    return tuple(d for d in seen.values() if d.what == "physical")


def read_function(tree: Tree, path: str) -> Function:
    """What is behind the `device` link of a net device or an HCA."""
    device = f"{path}/device"
    tree.resolve(device)
    node = tree.number(f"{device}/numa_node", "-1|[0-9]{1,4}")
    driver = tree.uevent(device).get("DRIVER", "") or tree.link_name(f"{device}/driver", "DRIVER")
    tree.devices(f"{device}/uevent", [driver] if driver else [])
    parent = tree.link_name(f"{device}/physfn", "PCI_SLOT_NAME")
    return Function(
        _pcie_bps(tree, device),
        -1 if node is None else node,
        tree.pci_address(device),
        driver,
        parent,
    )


def _pcie_bps(tree: Tree, device: str) -> int:
    speed = tree.text(f"{device}/current_link_speed") or ""
    width = tree.text(f"{device}/current_link_width") or ""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?", speed)
    if not match or not re.fullmatch("[0-9]{1,2}", width, re.ASCII):
        return 0
    rate = float(match[1])
    return int(rate * 1e9 * _PCIE_CODING.get(rate, 0) * int(width))


# Names that administrators and systems give to NICs that are not for training traffic
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
_USB_DRIVERS = ("cdc_ether", "cdc_ncm", "cdc_subset", "rndis_host", "cdc_eem")


def reason_by_name(*names: str) -> str:
    """The reason to set aside a NIC that has one of these names, "" when there is none."""
    for reason, patterns in NAMES.items():
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return reason
    return ""


def reason_to_skip(
    device: NetDevice, devices: dict[str, NetDevice], has_address: bool | None
) -> str:
    """Why an Ethernet device is set aside, "" when it is not. `has_address`: None when unknown."""
    master = devices.get(device.master)
    if device.usb or device.driver in _USB_DRIVERS:  # a baseboard controller's link to the host
        return "management (USB/BMC)"
    if device.wireless:
        return "wireless"
    if device.representor:  # the switch's side of a virtual function
        return "representor of a virtual function"
    if device.master and (
        master is None or master.what != "vrf"
    ):  # sockets belong on the bond or bridge
        return f"member of {device.master}"
    named = reason_by_name(device.name)
    if named:
        return named
    if device.what in ("bond", "team", "vlan", "bridge"):
        # over a physical NIC it is that NIC's face; without one it joins containers of this node (docker0)
        return "" if physical_below(device, devices) else f"{device.what} without a physical NIC"
    if device.what in ("veth", "macvlan"):
        # a container's NIC has an address; the host's end of a container's cable has none
        return f"{device.what} without an address" if has_address is False else ""
    return "" if device.what == "physical" else "virtual device"
