"""Reader of the NICs of a node, from /sys or from a tree that was captured on another machine.

    class/infiniband ─> rdma.py ─┐
                                 ├─> read_nics ─> (Nic, ...) ─> select ─> the NICs a job may use
    class/net ───────> net.py ───┘        │
    addresses.py ─────────────────────────┘

Every port is listed once for each use: a RoCE port as "roce", and its network device as "ethernet"
with the port's name in `rdma`. IPoIB network devices belong to their InfiniBand port, because they
do not reach Ethernet. The list includes ports that are down, and ports that the default rules
exclude, with the reason in `skipped`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from holmes_ext.cluster.addresses import (
    Addresses,
    captured_addresses,
    interface_addresses,
    is_link_local_v6,
)
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.sysfs.net import (
    ETHERNET,
    NetDevice,
    physical_below,
    read_net_devices,
    reason_by_name,
    reason_to_skip,
)
from holmes_ext.cluster.sysfs.rdma import read_rdma_ports
from holmes_ext.cluster.sysfs.tree import Tree
from holmes_ext.errors import HolmesError

#: Reason in `Nic.skipped` of a RoCE port whose net device this network namespace does not have.
FOREIGN = "its net device is in another network namespace"


def read_nics(root: str | Path = "/sys", addresses: Addresses | None = None) -> tuple[Nic, ...]:
    """Return all NIC ports of a tree in the order of KINDS: InfiniBand first, Ethernet last.

    Ports of one kind are sorted by name.

    If a captured tree has no file with IP addresses, those of RoCE ports come from their GIDs. GIDs
    have no prefix length, so these addresses get /32 or /128. A shorter prefix could wrongly put
    two nodes in one subnet, and so on one fabric.

    Args:
        root: Root of the /sys tree.
        addresses: Network device -> its addresses, such as ("10.0.0.1/16",). None reads those of
            this node for /sys, and those in ip_addr.json for a captured tree.

    Raises:
        HolmesError: a file is damaged, or /sys shows another network namespace than this process's.
    """
    tree = Tree(root)
    devices = read_net_devices(tree)
    if addresses is None:
        if tree.live:
            _check_namespace(tree)
            addresses = interface_addresses()
        else:
            addresses = captured_addresses(root)
    rdma_ports = _rdma_ports_with_addresses(tree, devices, addresses)
    port_of_netdev: dict[str, Nic] = {}  # network device -> its RoCE port
    for port in rdma_ports:
        if port.fast and not KINDS[port.kind].infiniband:
            for netdev in port.netdevs:
                port_of_netdev.setdefault(netdev, port)
    ethernet = [
        _ethernet_nic(device, devices, addresses, port_of_netdev.get(device.name))
        for device in devices.values()
        if device.type == ETHERNET
    ]
    kinds = list(KINDS)
    nics = [*rdma_ports, *ethernet]
    nics.sort(key=lambda nic: (kinds.index(nic.kind), _natural_order(nic.name)))
    return tuple(nics)


def _rdma_ports_with_addresses(
    tree: Tree, devices: dict[str, NetDevice], addresses: Addresses | None
) -> list[Nic]:
    """Return the RDMA ports of a tree with their IP addresses.

    RoCE ports that this network namespace cannot use get the reason in `skipped`.

    Args:
        tree: The /sys tree.
        devices: All network devices by name.
        addresses: Network device -> its addresses; None if unknown.
    """
    ports = [_with_addresses(port, addresses, devices) for port in read_rdma_ports(tree, devices)]
    if tree.names("class/net"):  # without the folder, nothing is known about net devices
        ports = [_mark_if_foreign(port) for port in ports]
    # A virtual function's `parent` is a PCI address here. If an HCA is there, its name is better.
    hca_at: dict[str, str] = {port.pci: port.device for port in ports if port.pci}
    return [replace(port, parent=hca_at.get(port.parent, port.parent)) for port in ports]


def _mark_if_foreign(port: Nic) -> Nic:
    """Return a port, with FOREIGN in `skipped` if its net device is in another network namespace.

    Only RoCE ports need a net device. A port that already has a reason in `skipped` keeps it.

    In a container, /sys shows all HCAs of the host, but only the net devices of the container. If
    the net device of a RoCE port is not among them, the kernel refuses connections on that port with
    ENODEV ("No such device", NVIDIA/nccl issues 799 and 925).
    """
    if port.kind != "roce" or port.netdevs:
        return port
    return replace(port, skipped=port.skipped or FOREIGN)


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that orders numbers in names by value: eth2 before eth10."""
    key = []
    for part in re.split("([0-9]+)", name):
        is_number = part.isdigit()
        key.append((is_number, int(part) if is_number else 0, part))
    return key


def _check_namespace(tree: Tree) -> None:
    """Raise HolmesError if /sys shows another network namespace than this process's.

    /sys belongs to the network namespace of the process that mounted it.
    """
    missing = []
    for index, name in socket.if_nameindex():
        path = f"class/net/{name}"
        if not tree.is_dir(path) or tree.number(f"{path}/ifindex") not in (index, None):
            missing.append(name)
    if missing:
        raise HolmesError(
            f"{tree.root}: shows the net devices of another network namespace than this "
            f"process's (not {', '.join(sorted(missing))}); mount it again inside: unshare --mount, "
            "mount -t sysfs sysfs /sys"
        )


def _with_addresses(port: Nic, addresses: Addresses | None, devices: dict[str, NetDevice]) -> Nic:
    """Return an RDMA port with the addresses and MTU of its network devices.

    The network devices are sorted: those with addresses first, then those that are up. A port whose
    name, or whose network device's name, shows that it is not for training ("storage0") gets the
    reason in `skipped`.

    Args:
        port: An InfiniBand or RoCE port.
        addresses: Network device -> its addresses; None if unknown.
        devices: All network devices by name.
    """
    address_of = addresses or {}

    def rank(netdev: str) -> tuple[bool, bool]:
        return not address_of.get(netdev), not devices[netdev].up

    netdevs = tuple(sorted(port.netdevs, key=rank))
    port_addresses: list[str] = []
    for netdev in netdevs:
        port_addresses += address_of.get(netdev, ())
    # Each RoCE v2 GID stands for an IP address. GIDs are only used if the addresses of the port's
    # network devices cannot be read: none were captured, or the devices are in another network
    # namespace (a container). Otherwise a port without an address has really none.
    is_unreadable = addresses is None or not netdevs
    if not port_addresses and port.kind in ("roce", "erdma") and is_unreadable:
        port_addresses = _gid_addresses(port)
    return replace(
        port,
        netdevs=netdevs,
        addresses=tuple(dict.fromkeys(port_addresses)),
        mtu=devices[netdevs[0]].mtu if netdevs else 0,
        skipped=port.skipped or reason_by_name(port.device, *netdevs),
    )


def _gid_addresses(port: Nic, netdev: str = "") -> list[str]:
    """Return the addresses that the GIDs of a RoCE port stand for, with full prefix length.

    Args:
        port: A RoCE port.
        netdev: Network device whose GIDs count; "" for all.
    """
    addresses = []
    for gid in port.gids:
        address = gid.address
        if netdev in ("", gid.netdev) and not address.is_link_local:
            addresses.append(f"{address}/{address.max_prefixlen}")
    return list(dict.fromkeys(addresses))


def _ethernet_nic(
    device: NetDevice,
    devices: dict[str, NetDevice],
    addresses: Addresses | None,
    rdma_port: Nic | None,
) -> Nic:
    """Return a network device as a NIC of kind "ethernet".

    Args:
        device: The network device.
        devices: All network devices by name.
        addresses: Network device -> its addresses; None if unknown.
        rdma_port: RoCE port that has the network device, None without one.
    """
    device_addresses: tuple[str, ...] = ()
    # None: unknown. GIDs do not settle it, because they show only some of a device's addresses.
    has_address = None
    if addresses is not None:
        device_addresses = tuple(addresses.get(device.name, ()))
        has_address = any(not is_link_local_v6(address) for address in device_addresses)
    elif rdma_port is not None:
        device_addresses = tuple(_gid_addresses(rdma_port, device.name))
    has_members = device.category in ("bond", "team", "bridge")
    # PCI address -> network device. A representor has the PCI address of its NIC, but stands for a
    # virtual function in the NIC's switch, so it is not the device at that address.
    device_at = {
        other.pci: other.name for other in devices.values() if other.pci and not other.representor
    }
    numa_nodes = {physical.numa for physical in physical_below(device, devices)}
    return Nic(
        kind="ethernet",
        device=device.name,
        netdevs=(device.name,),
        state="up" if device.up else "down",
        state_text=device.state_text,
        rate_bps=device.speed_bps,
        max_rate_bps=device.max_rate_bps,
        addresses=device_addresses,
        mtu=device.mtu,
        numa=numa_nodes.pop() if len(numa_nodes) == 1 else -1,
        pci=device.pci,
        driver=device.driver,
        # Of a virtual function: device of its physical function, or the PCI address if it has none.
        parent=device_at.get(device.parent, device.parent),
        members=device.lowers if has_members else (),
        rdma=rdma_port.name if rdma_port else "",
        skipped=reason_to_skip(device, devices, has_address),
    )


def select(
    nics: Iterable[Nic], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Nic, ...]:
    """Return the NICs that a job may use, in the order given. Ports that are down stay in the list.

    A pattern (fnmatch, case-sensitive) matches the device ("mlx5_0"), the port ("mlx5_0:1") or a
    network device of the port ("ens1f0"). A NIC is excluded by default if its `skipped` has a
    reason: wireless, management (USB), virtual, a member of a bond, ...

    Args:
        nics: All NICs of a node.
        include: Patterns of the NICs to use. () for all that are not excluded by default. A name
            without wildcards also selects a NIC that is excluded by default. A pattern with
            wildcards does not ("en*" is not meant to bring back the members of a bond).
        exclude: Patterns of NICs not to use. The name of a RoCE port excludes its network devices,
            too.

    Raises:
        HolmesError: a pattern matches no NIC, or only NICs that are excluded by default.
    """
    nics = tuple(nics)
    _check_patterns(nics, "include", include)
    _check_patterns(nics, "exclude", exclude)
    if include:
        included: list[Nic] = []
        for pattern in include:
            included.extend(_nics_selected_by(nics, pattern))
        chosen = [replace(nic, skipped="") for nic in nics if nic in included]
    else:
        chosen = [nic for nic in nics if not nic.skipped]
    for pattern in exclude:
        chosen = [nic for nic in chosen if not _is_excluded(nic, pattern)]
    return tuple(chosen)


def _check_patterns(nics: Sequence[Nic], option: str, patterns: Sequence[str]) -> None:
    """Raise HolmesError if a pattern matches no NIC.

    Args:
        nics: All NICs of a node.
        option: "include" or "exclude".
        patterns: The patterns of the option.
    """
    matches = _is_included if option == "include" else _is_excluded
    for pattern in patterns:
        if not any(matches(nic, pattern) for nic in nics):
            listed = ", ".join(nic.name for nic in nics) or "none"
            raise HolmesError(
                f"{option} pattern {pattern!a:.80} matches no NIC of this node; there are: {listed}"
            )


def _is_included(nic: Nic, pattern: str) -> bool:
    names = {nic.device, nic.name, *nic.netdevs}
    return any(fnmatchcase(name, pattern) for name in names)


def _is_excluded(nic: Nic, pattern: str) -> bool:
    if _is_included(nic, pattern):
        return True
    if not nic.rdma:
        return False
    # The network device of a RoCE port is excluded with the port.
    hca = nic.rdma.rpartition(":")[0]
    return fnmatchcase(nic.rdma, pattern) or fnmatchcase(hca, pattern)


def _nics_selected_by(nics: Sequence[Nic], pattern: str) -> list[Nic]:
    """Return the NICs that a pattern of `include` selects.

    Args:
        nics: All NICs of a node.
        pattern: Name of a NIC, or a pattern with wildcards.

    Raises:
        HolmesError: the pattern has wildcards, and the default rules exclude all NICs that it
            matches.
    """
    matched = [nic for nic in nics if _is_included(nic, pattern)]
    has_wildcards = any(letter in pattern for letter in "*?[")
    if not has_wildcards:
        return matched
    kept = [nic for nic in matched if not nic.skipped]
    if not kept:
        reasons = ", ".join(f"{nic.name} ({nic.skipped})" for nic in matched)
        raise HolmesError(
            f"include pattern {pattern!a:.80} matches only NICs that are set aside: {reasons}; "
            "to use one, write its name without wildcards"
        )
    return kept
