"""Reader of class/infiniband: the RDMA ports of a /sys tree (InfiniBand, RoCE, EFA, Omni-Path, ...).

Layout: drivers/infiniband/core/sysfs.c of Linux and
Documentation/ABI/stable/sysfs-class-infiniband.

    class/infiniband/mlx5_0/node_type              "1: CA"
                           /device/                the PCI function: numa_node, physfn, net/ENS1F0
                           /ports/1/link_layer     "InfiniBand" or "Ethernet" (RoCE)
                                   /rate           "200 Gb/sec (4X HDR)"
                                   /state          "4: ACTIVE"      /phys_state  "5: LinkUp"
                                   /lid  /sm_lid   "0x1c"
                                   /gids/3         eight groups; zeros where the entry is empty
                                   /gid_attrs/types/3   "RoCE v2";  EINVAL where the entry is empty
                                   /gid_attrs/ndevs/3   "ens1f0"
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from holmes_ext.cluster.nic import GID, KINDS, Gid, Nic
from holmes_ext.cluster.sysfs.net import (
    ETHERNET,
    INFINIBAND,
    Hardware,
    NetDevice,
    read_hardware,
    top_device,
)
from holmes_ext.cluster.sysfs.tree import Tree

_STATE = re.compile(r"([0-5]): (NOP|DOWN|INIT|ARMED|ACTIVE|ACTIVE_DEFER)")
_PHYS_STATE = re.compile(r"[0-9]+: ?(.{0,40})")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec \(.{1,40}\)")
#: (type in /sys, the port is InfiniBand) -> type of a `Gid`.
_GID_TYPES = {
    ("IB/RoCE v1", True): "ib",
    ("IB/RoCE v1", False): "roce_v1",
    ("RoCE v2", False): "roce_v2",
}
#: Link layer in /sys -> kind of NIC.
_KIND_BY_LAYER = {
    kind.layer: name for name, kind in KINDS.items() if kind.layer and not kind.driver
}
#: Pattern of kernel drivers -> kind of NIC, for kinds that the link layer does not show.
_KINDS_BY_DRIVER = {
    driver: name
    for name, kind in KINDS.items()
    for driver in (kind.driver, kind.netdev_driver)
    if driver
}
#: Beginnings of `node_type` for an adapter ("1: CA", a channel adapter), for iWARP ("4: RNIC"), and for
#: devices that are no adapters: "2: switch", "3: router".
_ADAPTER, _IWARP, _SWITCH_OR_ROUTER = "1:", "4:", ("2:", "3:")
#: Reason not to use an iWARP port. NCCL lists it as a device of its "IB" network, since it is an active
#: port with the link layer Ethernet, and then fails to connect: src/transport/net_ib/ moves the queue
#: pairs to RTR itself (ibv_modify_qp), and those of iWARP are connected by librdmacm only.
NO_IWARP = "iWARP: NCCL cannot connect over it and uses the network device"
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
#: Characters of the upper half of a GID, the subnet prefix: four groups of four digits.
_PREFIX_LENGTH = 19
_LAST_PORT = 255


def read_rdma_ports(tree: Tree, devices: dict[str, NetDevice]) -> tuple[Nic, ...]:
    """Return the RDMA ports of a /sys tree, without IP addresses.

    The kernel driver of a port, or else its link layer, shows the kind of NIC. If neither does, the kind
    is "plugin": only a network plugin of NCCL may be able to use the port.

    An iWARP port has the reason why jobs cannot use it in `skipped`. A port of a virtual function has
    the PCI address of the physical function in `parent`.

    Args:
        tree: The /sys tree.
        devices: All network devices by name.

    Raises:
        HolmesError: a file is damaged.
    """
    nics = []
    for hca in tree.names("class/infiniband"):
        path = f"class/infiniband/{hca}"
        tree.resolve(path)  # raises if the link points to nothing
        node_type = tree.text(f"{path}/node_type") or "1: CA"
        ports = tree.names(f"{path}/ports")
        for port in sorted(ports, key=_numeric_order):
            if not re.fullmatch("[0-9]{1,3}", port, re.ASCII) or int(port) > _LAST_PORT:
                raise tree.error(f"{path}/ports", f"{port!a:.80} is no port number")
            layer = tree.needed_text(f"{path}/ports/{port}/link_layer")
            if layer not in (*_KIND_BY_LAYER, "Unspecified", "Unknown"):
                raise tree.error(
                    f"{path}/ports/{port}/link_layer",
                    f"{layer!a:.80} is not {' or '.join(_KIND_BY_LAYER)}",
                )
            is_switch_or_router = node_type.startswith(_SWITCH_OR_ROUTER)
            if int(port) == 0 or is_switch_or_router:  # port 0 is the management port of a switch
                continue
            kind = _kind_by_layer(node_type, layer)
            nics.append(_read_port(tree, hca, int(port), len(ports), kind, devices))
    return tuple(nics)


def _kind_by_layer(node_type: str, layer: str) -> str:
    """Return the kind of a port whose kernel driver does not show it.

    Args:
        node_type: Text in the file of that name, such as "1: CA".
        layer: Link layer of the port.
    """
    if node_type.startswith(_IWARP):
        return "iwarp"
    if node_type.startswith(_ADAPTER) and layer in _KIND_BY_LAYER:
        return _KIND_BY_LAYER[layer]
    return "plugin"


def _kind_by_driver(driver: str) -> str:
    """Return the kind of NIC that a kernel driver shows; "" if it drives several kinds, as mlx5 does."""
    for pattern, kind in _KINDS_BY_DRIVER.items():
        if fnmatchcase(driver, pattern):
            return kind
    return ""


def _numeric_order(number: str) -> tuple[int, str]:
    """Return a sort key that orders decimal numbers without leading zeros by value."""
    return len(number), number


def _read_port(
    tree: Tree, hca: str, port: int, port_count: int, kind: str, devices: dict[str, NetDevice]
) -> Nic:
    """Return a port of an HCA.

    Args:
        tree: The /sys tree.
        hca: Name of the HCA.
        port: Number of the port, from 1.
        port_count: Number of ports of the HCA.
        kind: Kind of NIC by link layer. The kernel driver of the NIC may show another kind.
        devices: All network devices by name.

    Raises:
        HolmesError: a file of the port is damaged.
    """
    hca_path = f"class/infiniband/{hca}"
    path = f"{hca_path}/ports/{port}"
    is_physical = "device" in tree.names(hca_path)  # soft-RoCE has no device
    hardware = read_hardware(tree, hca_path) if is_physical else Hardware()
    kind = _kind_by_driver(hardware.driver) or kind
    state = _read_state(tree, path)
    has_link = state.physical == "LinkUp" or state.logical == "ACTIVE"
    gids = _read_gids(tree, path, kind)
    # A port's network devices are in the folder of its PCI function, and beside its GIDs.
    names = [gid.netdev for gid in gids]
    if is_physical:
        names = _netdevs_of_function(tree, f"{hca_path}/device", port, port_count, devices) + names
    netdevs = _top_netdevs(names, kind, devices)  # with the bond instead of its members
    members: list[str] = []
    for netdev in netdevs:
        if devices[netdev].category in ("bond", "team"):
            members += devices[netdev].lowers
    subnet_prefix = ""
    if KINDS[kind].infiniband and gids and gids[0].index == 0:
        subnet_prefix = gids[0].value[:_PREFIX_LENGTH]
    return Nic(
        **vars(hardware),
        kind=kind,
        device=hca,
        port=port,
        netdevs=netdevs,
        state="up" if state.logical == "ACTIVE" else "down",
        state_text=state.text,
        # A port without a link still has a number in /sys, that of its slowest lane.
        rate_bps=_read_rate_bps(tree, f"{path}/rate") if has_link else 0,
        mtu=devices[netdevs[0]].mtu if netdevs else 0,
        subnet_prefix=subnet_prefix,
        gids=gids,
        lid=_read_lid(tree, f"{path}/lid", kind),
        sm_lid=_read_lid(tree, f"{path}/sm_lid", kind),
        members=tuple(members),
        skipped=NO_IWARP if kind == "iwarp" else "",
    )


class _PortState(NamedTuple):
    """Logical and physical state of an RDMA port; it transfers data only if it is "ACTIVE"."""

    logical: str  # "ACTIVE", "INIT", "DOWN", ...
    physical: str  # "LinkUp", "Polling", ...; "" if unknown

    @property
    def text(self) -> str:
        """State in the kernel's words: "ACTIVE", "DOWN/Polling"."""
        if self.physical in ("", "LinkUp"):
            return self.logical
        return f"{self.logical}/{self.physical}"


def _read_state(tree: Tree, path: str) -> _PortState:
    """Return the state of a port.

    Args:
        tree: The /sys tree.
        path: Path of the port in the tree.

    Raises:
        HolmesError: a file with the state is damaged.
    """
    text = tree.needed_text(f"{path}/state")
    match = _STATE.fullmatch(text)
    if not match:
        raise tree.error(f"{path}/state", f"{text!a:.80} is no port state such as '4: ACTIVE'")
    # Not all drivers have the file. "0:" is a state without a name, which becomes "".
    physical_text = tree.text(f"{path}/phys_state") or "0:"
    physical_match = _PHYS_STATE.fullmatch(physical_text)
    if not physical_match:
        raise tree.error(
            f"{path}/phys_state", f"{physical_text!a:.80} is no state such as '5: LinkUp'"
        )
    # Without the numbers: "ACTIVE" of "4: ACTIVE", and "LinkUp" of "5: LinkUp".
    return _PortState(logical=match[2], physical=physical_match[1])


def _read_rate_bps(tree: Tree, path: str) -> int:
    """Return the rate in a port's file `rate`, in bits/s.

    Args:
        tree: The /sys tree.
        path: Path of the file in the tree.

    Raises:
        HolmesError: the file does not hold a rate.
    """
    text = tree.needed_text(path)
    match = _RATE.fullmatch(text)
    if not match:
        raise tree.error(path, f"{text!a:.80} is no rate such as '200 Gb/sec (4X HDR)'")
    return round(float(match[1]) * 1e9)


def _read_lid(tree: Tree, path: str, kind: str) -> int:
    """Return the local identifier in a file, 0 if there is none or the port is not InfiniBand.

    Args:
        tree: The /sys tree.
        path: Path of the file in the tree.
        kind: Kind of the port's NIC.
    """
    if not KINDS[kind].infiniband:
        return 0
    return tree.number(path, "0x[0-9a-f]{1,8}") or 0


def _read_gids(tree: Tree, path: str, kind: str) -> tuple[Gid, ...]:
    """Return the GID table of a port without its empty entries, sorted by index.

    Args:
        tree: The /sys tree.
        path: Path of the port in the tree.
        kind: Kind of NIC.

    Raises:
        HolmesError: an entry is damaged.
    """
    is_infiniband = KINDS[kind].infiniband
    gids = []
    for index in sorted(tree.names(f"{path}/gids"), key=_numeric_order):
        if not re.fullmatch("[0-9]{1,6}", index, re.ASCII):
            raise tree.error(f"{path}/gids", f"{index!a:.80} is no GID index")
        value = tree.text(f"{path}/gids/{index}")
        if value is None or value == _EMPTY_GID:
            continue
        if not GID.fullmatch(value):
            raise tree.error(f"{path}/gids/{index}", f"{value!a:.80} is no GID")
        # Kernels before 4.5 have no gid_attrs: all their GIDs are of this type.
        type_text = tree.text(f"{path}/gid_attrs/types/{index}") or "IB/RoCE v1"
        gid_type = _GID_TYPES.get((type_text, is_infiniband))
        if gid_type is None:
            raise tree.error(
                f"{path}/gid_attrs/types/{index}",
                f"{type_text!a:.80} is no GID type of a port of kind {kind}",
            )
        netdev = ""
        if not is_infiniband:
            netdev = tree.device_name(f"{path}/gid_attrs/ndevs/{index}")
        gids.append(Gid(int(index), value, gid_type, netdev))
    return tuple(gids)


def _netdevs_of_function(
    tree: Tree, device: str, port: int, port_count: int, devices: dict[str, NetDevice]
) -> list[str]:
    """Return the network devices that belong to a port of a PCI function.

    Args:
        tree: The /sys tree.
        device: Path of the PCI function in the tree.
        port: Number of the port, from 1.
        port_count: Number of ports of the function.
        devices: All network devices of this network namespace by name.
    """
    netdevs = []
    for name in tree.names(f"{device}/net"):
        if name not in devices or devices[name].representor:
            continue
        # Several ports of a function share its folder; the device's number tells them apart.
        if port_count == 1 or devices[name].port_index == port - 1:
            netdevs.append(name)
    return netdevs


def _top_netdevs(names: Iterable[str], kind: str, devices: dict[str, NetDevice]) -> tuple[str, ...]:
    """Return the network devices that the sockets of a port bind to.

    A member of a bond is replaced by the bond.

    Args:
        names: Network devices of the port; those of other network namespaces are ignored.
        kind: Kind of NIC.
        devices: All network devices of this network namespace by name.
    """
    wanted_type = INFINIBAND if KINDS[kind].infiniband else ETHERNET
    top = dict.fromkeys(top_device(name, devices) for name in names if name in devices)
    return tuple(name for name in top if devices[name].type == wanted_type)
